"""Schedules and layouts of the CUDA kernels on small shapes, to be run under compute-sanitizer:

export PYTHONPATH=.
sanitize=tests/support/sanitize.py
python $sanitize --compile  # first, by a process for each CPU; with --racecheck too, before that tool
compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 1 python $sanitize --triton
compute-sanitizer --tool racecheck --error-exitcode 1 python $sanitize --every 8 --racecheck

The bindings probe the driver for functions it may lack, which memcheck would report as API errors. Caching
allocations would hide accesses next to a tensor, so PYTORCH_NO_CUDA_MEMORY_CACHING=1 is set here.
"""

import argparse
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest import mock

if __name__ == "__main__":  # tests import the lists of cases
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    sys.modules["samebits.backends._replay"] = None  # a replay would hide the launch

import torch
import torch.nn.functional as F
from torch import Tensor

import samebits
from samebits.backends.cuda import compiler, devices, exp2, matmul, precompile
from samebits.backends.cuda.attention import catalogue
from samebits.backends.cuda.products import tensor_core_sm90
from samebits.backends.cuda.products.schedule_sm90 import Sm90Schedule
from samebits.backends.kernel import Kernel
from samebits.backends.product import Operands, Product
from samebits.backends.triton import runtime as triton
from samebits.contract import INTERPOLATION, TENSOR_CORE
from samebits.ops import experts
from samebits.tools.verify import (
    Inputs,
    fused,
    kernels,
    plan,
    reductions,
    scaled,
    scaled_grouped,
    segments,
    takes,
)
from samebits.tools.verify import grouped as verification
from samebits.tools.verify.attention import VARIANTS, AttentionCase, verify_attention
from samebits.tools.verify.report import Report
from tests.support import one_gpu
from tests.support.chains import chains
from tests.support.devices import multiprocessors

DTYPE = torch.bfloat16


def operands(rows: int, k: int, layout: str, dtype: torch.dtype = DTYPE) -> Tensor:
    if layout == "k":
        return torch.ones(rows, -(-k // 8) * 8, dtype=dtype, device="cuda")[:, :k]
    if layout == "rows":
        return torch.ones(k, -(-rows // 8) * 8, dtype=dtype, device="cuda")[:, :rows].mT
    if layout == "k, any alignment":
        return torch.ones(rows * k + 1, dtype=dtype, device="cuda")[1:].view(rows, k)
    return torch.ones(rows * k + 1, dtype=dtype, device="cuda")[1:].view(k, rows).mT


LAYOUTS = ("k", "rows", "k, any alignment", "rows, any alignment")


# Rings of up to eight stages of 32, and of 128, shall go round.
LONG = {"fma_sm90": 1069}


def some(kernel: Kernel, every: int, first: int = 0) -> list:
    """Each such schedule where they are many; of Hopper's one of each kind and width too."""
    schedules = [None, *kernel.catalogue]
    hopper = [s for s in schedules if isinstance(s, Sm90Schedule)]
    if not hopper:
        return schedules[first:]
    kinds = {
        (s.block_m, s.block_n, s.swap, s.warpgroups, s.share, s.cluster): s for s in hopper if s.block_m >= 64
    }
    widths = {(s.block_n, s.swap): s for s in hopper}
    return list(dict.fromkeys([*schedules[first::every], *kinds.values(), *widths.values()]))


def products(every: int):
    """Kernel, schedule and operands of each; with `every`, only some of the schedules."""
    m, n = 67, 43
    bias = torch.ones(n, device="cuda")
    for kernel in (k for k in kernels(torch.cuda.current_device()) if k.can_precompile):
        k = LONG.get(kernel.name, 85)
        spans = torch.tensor([0, 3, 3, 40, k], device="cuda")
        for schedule in some(kernel, every):
            for layout_a, layout_b in itertools.product(LAYOUTS, LAYOUTS):
                dtype = torch.float32 if kernel.step == "fma" else DTYPE
                a, b = operands(m, k, layout_a, dtype), operands(n, k, layout_b, dtype).mT
                acc = torch.ones(m, n, device="cuda")
                for x in (
                    Inputs(a, b, acc=acc, cu_seqlens=spans).into(acc),
                    Inputs(a, b, acc=acc).into(torch.ones_like(acc)),
                    Inputs(a, b, bias=bias).into(torch.empty(m, n, dtype=DTYPE, device="cuda")),
                    Inputs(a, b).into(torch.empty(m, n, dtype=DTYPE, device="cuda")),
                    Inputs(a, b, bias=bias).into(torch.empty(m, n, device="cuda")),
                ):
                    if takes(kernel, Product.of(x, kernel.step), schedule):
                        yield kernel, schedule, x


def long_products(every: int):
    """Hopper's, with a few multiprocessors for many tiles: blocks take several, and their rings go round."""
    kernel = next((k for k in kernels(torch.cuda.current_device()) if k.name == "tensor_core_sm90"), None)
    for i, s in enumerate(some(kernel, every, first=1) if kernel else ()):
        rows, columns = 2 * s.block_m + 8, 2 * s.block_n * s.cluster + 8
        m, n = (columns, rows) if s.swap else (rows, columns)
        k, batch = s.block_k * (s.stages + 2), 2 if i % 3 == 0 else 1
        for j, layouts in enumerate(itertools.product(LAYOUTS[:2], LAYOUTS[:2])):
            a, b = (
                torch.stack([operands(size, k, layout).mT] * batch).mT
                if layout == "rows"
                else torch.stack([operands(size, k, layout)] * batch)
                for size, layout in zip((m, n), layouts, strict=True)
            )
            out = torch.ones(batch, m, n, dtype=(DTYPE, torch.float32)[(i + j) % 2], device="cuda")
            if batch == 1:
                a, b, out = a[0], b[0], out[0]
            x = Inputs(a, b.mT, bias=torch.ones(n, device="cuda"))
            if out.dtype == torch.float32:
                spans = torch.tensor([0, 3, k // 2, k // 2, k], device="cuda")
                x = Inputs(a, b.mT, acc=out, cu_seqlens=spans if layouts == ("rows", "rows") else None)
            if takes(kernel, Product.of(x.into(out), kernel.step), s):
                with multiprocessors(2 * s.cluster):
                    yield kernel, s, x.into(out)


def float32_outputs(every: int):
    """Hopper's, to the ends of their memory, at addresses and strides of whole units of 16 bytes or not."""
    kernel = next((k for k in kernels(torch.cuda.current_device()) if k.name == "tensor_core_sm90"), None)
    for i, s in enumerate(some(kernel, every, first=1) if kernel else ()):
        m, n, k = s.block_m + 21, s.block_n + 12, 72
        a, b = operands(m, k, "k"), operands(n, k, "k").mT
        for offset, more in ((0, 0), (2, 0), (1, 0), (0, 4), (0, 2)):
            memory = torch.ones(offset + m * (n + more) - more, device="cuda")
            out = memory.as_strided((m, n), (n + more, 1), offset)
            x = Inputs(a, b, acc=out) if i % 2 else Inputs(a, b, bias=torch.ones(n, device="cuda"))
            if takes(kernel, Product.of(x.into(out), kernel.step), s):
                yield kernel, s, x.into(out)


def ways(s: Sm90Schedule, x: Operands) -> dict[str, bool]:
    """Which ways of the Hopper kernel a product takes."""
    p = Product.of(x, "mma")
    constants = dict(tensor_core_sm90.spec(tensor_core_sm90.variant(p), s).constants)
    rows, columns = (p.n, p.m) if s.swap else (p.m, p.n)
    tiles = -(-rows // s.block_m) * -(-columns // (s.block_n * s.cluster)) * p.batch
    blocks = s.grid(rows, columns, p.batch, devices.device_info(p.device).sm_count)[0]
    return {
        "several tiles for a block": tiles >= 2 * blocks // s.cluster,
        "a ring that goes round": p.k > s.block_k * s.stages,
        "a last tile moved back": x.start is None and rows > s.block_m and rows % s.block_m > 0,
        "output in panels by TMA": constants["PANEL"] > 0 and constants["ALIGNED"] > 0,
        "transposed output in panels": constants["PANEL"] > 0 and s.swap,
        "output in panels by lines": constants["PANEL"] > 0 and constants["ALIGNED"] == 0,
        "float32 in units": constants["OUTPUT"] == 1 and constants["ALIGNED"] > 0 and not s.swap,
        "float32 in elements": constants["OUTPUT"] == 1 and constants["ALIGNED"] == 0,
        "maps folded": constants["FOLDED"] > 0,
        "a batch": p.batch > 1,
        "chains carried on": x.start is not None,
        "sequences": x.cu_seqlens is not None,
        "clusters": s.cluster > 1,
        "operands swapped": s.swap,
    }


# Of log-probabilities: each schedule of the fused kernels, parts of blocks empty, rows that they cannot read.
SIZES = (
    *((1, 8, 1), (3, 24, 130), (9, 40, 1100), (20, 72, 300), (33, 16, 129), (70, 136, 300), (300, 24, 700)),
    (9, 7, 300),
    (2, 16, 131_201),  # more blocks than are weighed at once
)


def log_probabilities() -> None:
    """Forward and backward, on sizes that leave parts of blocks empty; then several tiles for a block."""
    for size in SIZES:
        log_probabilities_of(*size)
    with multiprocessors(4):
        log_probabilities_of(300, 24, 700)


def log_probabilities_of(tokens: int, features: int, vocabulary: int) -> None:
    x, weight = (
        torch.ones(shape, dtype=DTYPE, device="cuda", requires_grad=True)
        for shape in ((tokens, features), (vocabulary, features))
    )
    target = torch.arange(tokens, device="cuda") % vocabulary
    bias = torch.zeros(vocabulary, dtype=DTYPE, device="cuda", requires_grad=True)
    for b, entropy in itertools.product((None, bias), (False, True)):
        results = samebits.linear_logp(x, weight, target, b, return_entropy=entropy)
        torch.autograd.grad(results, [t for t in (x, weight, b) if t is not None], results)
    logits = torch.zeros(tokens, vocabulary, dtype=DTYPE, device="cuda", requires_grad=True)
    out = samebits.logp(logits, target)
    torch.autograd.grad(out, logits, out)
    assert torch.allclose(out, torch.full_like(out, -math.log(vocabulary)))
    # As in a CUDA graph, where nobody can be told of targets that are out of range.
    target[0], target[-1] = vocabulary, -1 << 40
    with mock.patch("samebits.ops.linear_logp.watch_target", return_value=lambda: None):
        results = samebits.linear_logp(x, weight, target, return_entropy=True)
    assert results[0][0].isnan()
    torch.autograd.grad(results, (x, weight), results)


def log_probabilities_by_triton() -> None:
    if triton.status().available:
        with samebits.use_backend("triton"):
            log_probabilities()


def tiny_products(every: int):
    """Batches of tiny matrices, several of them in a block."""
    tiny = [k for k in kernels(torch.cuda.current_device()) if k.name == "tiny"]
    shapes = ((13, 11, 21), (12, 20, 64), (8, 8, 8), (64, 64, 64))  # of the last, k is copied in parts
    for i, (kernel, (m, n, k), *layouts) in enumerate(itertools.product(tiny, shapes, LAYOUTS, LAYOUTS)):
        dtype = torch.float32 if kernel.step == "fma" else DTYPE
        a, b = (
            torch.ones(5 * rows * k + 1, dtype=dtype, device="cuda")["any" in layout :][: 5 * rows * k]
            for rows, layout in zip((m, n), layouts, strict=True)
        )
        a = a.view(5, m, k) if layouts[0][0] == "k" else a.view(5, k, m).mT
        b = b.view(5, n, k).mT if layouts[1][0] == "k" else b.view(5, k, n)
        schedules = [None, *kernel.catalogue]
        for schedule in [schedules[i % len(schedules)]] if every > 1 else schedules:
            acc = torch.ones(5, m, n, device="cuda")
            yield kernel, schedule, Inputs(a, b, acc=acc).into(acc)
            yield kernel, schedule, Operands(a, b, torch.empty(5, m, n, dtype=dtype, device="cuda"))


def triton_products():
    """Triton's schedules on operands that it fetches as tiles or by wide loads, and on others."""
    m, n, bias = 67, 48, torch.ones(48, device="cuda")
    for kernel in (k for k in kernels(torch.cuda.current_device()) if not k.can_precompile):
        dtypes = (torch.float32, DTYPE) if kernel.step == "fma" else (DTYPE,)
        places = (85, LAYOUTS[:2]), (85, LAYOUTS[2:]), (88, ("k", "k"))
        for dtype, schedule, (k, layouts) in itertools.product(dtypes, (None, *kernel.catalogue), places):
            spans = torch.tensor([0, 3, 3, 40, k], device="cuda")
            a, b = (operands(rows, k, layout, dtype) for rows, layout in zip((m, n), layouts, strict=True))
            acc = torch.ones(m, n, device="cuda")
            for x in (
                Inputs(a, b.mT, acc=acc, cu_seqlens=spans).into(acc),
                Inputs(a, b.mT, bias=bias).into(torch.empty(m, n, dtype=dtype, device="cuda")),
            ):
                if takes(kernel, Product.of(x, kernel.step), schedule):
                    yield kernel, schedule, x


def experts_rows(x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Of two slots a row, with weights and without."""
    to = experts.Routed(ids.view(-1, 2) % 3, 2, len(x))
    weights = torch.ones(len(x), 2, dtype=DTYPE, device="cuda", requires_grad=True)
    spread = experts.routed(x, to)
    return spread, experts.combined(spread, weights, to)


def row_reductions() -> None:
    """Every operation of rows, forward and backward, in every way to share a row; also on unaligned rows."""
    for count, n in ((1, 1), (3, 130), (9, 1100), (70, 40), (5, 2048), (2, 7000), (3, 12296), (1, 20000)):
        x, y = (torch.ones(count, n, dtype=DTYPE, device="cuda", requires_grad=True) for _ in range(2))
        w = torch.ones(n, dtype=DTYPE, device="cuda", requires_grad=True)
        ids = torch.arange(2 * count, device="cuda") % count
        many = torch.zeros(600, dtype=torch.int64, device="cuda")  # tokens with one id
        with samebits.batch_invariant("error"):
            results = (
                *(x.softmax(1), x.log_softmax(0), x.sum(0), x.mean(1), y * w, y * x[:, :1]),
                *(F.layer_norm(x, (n,), w, w), F.rms_norm(x, (n,), w), F.embedding(ids, y)),
                *(F.embedding(ids.int(), y[:, n // 3 :]), F.embedding(many, y)),
                *(torch.stack([x, y, x], 1).sum(1), *experts_rows(y, ids)),
                *experts_rows(y[:, n // 3 :], ids),
            )
            torch.autograd.grad(results, (x, y, w), results)
        of = partial(reductions.Reduction, dtype=DTYPE, other=DTYPE, what="", rows=count, n=n)
        cases = [of(name, place=("plain", "odd")[count % 2]) for name in reductions.ROWS]
        for call in reductions.calls(cases, reductions.on_cuda(fused=False), x.device):
            call()


# Of attention, small: rows and keys that fill tiles in part, segments to split, and each way to read.
ATTENTION = (
    *(
        AttentionCase(of, "batch", False, (37, 37), (150, 20), 2, 3, (-1, 0), "last", left=5)
        for of in VARIANTS[:2]
    ),
    AttentionCase(VARIANTS[2], "packed", True, (5, 0, 70), (130, 7, 600), 1, 2, (100, 3), "last", sinks=True),
    AttentionCase(VARIANTS[6], "pages", False, (1, 1), (600, 1100), 2, 4, (-1, 0), "last", page=16),
    AttentionCase(VARIANTS[6], "pages", True, (3, 40), (513, 90), 1, 2, (70, 0), "last", right=700, page=8),
    AttentionCase(VARIANTS[7], "pages", True, (3, 40), (513, 9), 1, 1, softcap=2.0, left=5, page=7),
    *(
        AttentionCase(
            of, "batch", False, (33,), (140,), 1, 2, softcap=float(of.softcap), broadcast=(2,), right=9
        )
        for of in VARIANTS
        if of.mask is not None
    ),
    AttentionCase(VARIANTS[8], "packed", True, (70, 5), (130, 9), 1, 2, (-1, 0), "last", softcap=2.0),
    AttentionCase(VARIANTS[9], "batch", False, (20,), (530,), 1, 1),
    AttentionCase(VARIANTS[11], "packed", True, (9, 1), (40, 129), 2, 1, (-1, 0), "last"),
    AttentionCase(VARIANTS[14], "packed", True, (17, 2), (17, 1030), 1, 3, (-1, 0), "last", sinks=True),
    AttentionCase(VARIANTS[17], "batch", False, (6, 6), (6, 3), 1, 2, softcap=2.0, align="slots", left=2),
    AttentionCase(VARIANTS[18], "pages", False, (2,), (700,), 1, 2, page=64),
)


class Alone:
    """In place of ``Surrounded``: it is for the sanitizer to see what is beside an output."""

    margins = ()

    def __enter__(self) -> "Alone":
        return self

    def __exit__(self, *_: object) -> None: ...


def attention(every: int) -> None:
    """Its cases under every schedule, or a third of them, forward and backward; then many tiles a block."""
    device = torch.device("cuda", torch.cuda.current_device())
    contract = TENSOR_CORE.on(matmul.family(device.index))

    def verify(cases: tuple[AttentionCase, ...]) -> None:
        found = Report("", "", "", "", {}, True)
        verify_attention(found, cases, catalogue, contract, device, thorough=every == 1)
        assert found.differing == 0, found.first

    with mock.patch("samebits.tools.verify.attention.Surrounded", Alone):
        verify(ATTENTION)
        with multiprocessors(2):
            verify(ATTENTION[:5])


def attention_kernels() -> Iterator[Callable[[], object]]:
    """Calls that load its kernels."""
    device = torch.device("cuda", torch.cuda.current_device())
    return plan.attention_kernels(ATTENTION, TENSOR_CORE.on(matmul.family(device.index)), device)


# Of grouped products: empty groups, groups smaller and larger than a tile, and rows of no group.
GROUPED = [case for case in verification.grouped_cases(False) if case.rows < 400]


def grouped(every: int) -> None:
    """Every kernel and schedule; with `every`, in a third of the cases."""
    device = torch.device("cuda", torch.cuda.current_device())
    found = Report("", "", "", "", {}, True)
    contract = TENSOR_CORE.on(matmul.family(device.index))
    cases = GROUPED if every == 1 else GROUPED[::3]
    verification.verify_grouped(found, cases, contract, device, every == 1)
    assert found.differing == 0, found.first


def grouped_kernels() -> Iterator[Callable[[], object]]:
    """Calls that load its kernels."""
    return verification.loads(GROUPED, torch.device("cuda", torch.cuda.current_device()), True)


# Of sums in segments.
SEGMENTED = [case for case in segments.segmented_cases(True) if case.m * case.n * case.k < 1 << 24]


def segmented(every: int) -> None:
    """Every kernel and schedule; with `every`, in a third of the cases."""
    device = torch.device("cuda", torch.cuda.current_device())
    found = Report("", "", "", "", {}, True)
    contract = TENSOR_CORE.on(matmul.family(device.index))
    cases = [*SEGMENTED[:: 1 if every == 1 else 3], *segments.TURNS]
    segments.verify_segments(found, cases, contract, device, every == 1)
    assert found.differing == 0, found.first


def segmented_kernels() -> Iterator[Callable[[], object]]:
    """Calls that load its kernels."""
    cases = [*SEGMENTED, *segments.TURNS]
    return segments.loads(cases, torch.device("cuda", torch.cuda.current_device()), True)


# Of fused layers: one of each kind of a kernel's cases.
FUSED = list({(case.kernel, case.what, case.row): case for case in fused.fused_cases(False)}.values())


def fused_layers(every: int) -> None:
    """Every way to share a row; with `every`, in a third of the cases."""
    device = torch.device("cuda", torch.cuda.current_device())
    found = Report("", "", "", "", {}, True)
    with mock.patch("samebits.tools.verify.fused.Surrounded", Alone):
        fused.verify_fused(found, FUSED if every == 1 else FUSED[::3], device)
    assert found.differing == 0, found.first


def fused_kernels() -> Iterator[Callable[[], object]]:
    """Calls that load its kernels."""
    return fused.loads(FUSED, torch.device("cuda", torch.cuda.current_device()))


# In FP8.
SCALED = [case for case in scaled.scaled_cases(False) if case.m < 150]
SCALED_GROUPED = scaled_grouped.scaled_grouped_cases(False)


def fp8(every: int) -> None:
    """Every schedule on Hopper, and quantization; with `every`, in a third of the cases."""
    device = torch.device("cuda", torch.cuda.current_device())
    if devices.device_info(device.index).arch.fp8 is None:
        return
    found, step = Report("", "", "", "", {}, True), 1 if every == 1 else 3
    scaled.verify_scaled(found, SCALED[::step], device)
    with mock.patch("samebits.tools.verify.scaled_grouped.Surrounded", Alone):
        scaled_grouped.verify_scaled_grouped(found, SCALED_GROUPED[::step], device)
    assert found.differing == 0, found.first


def fp8_kernels() -> Iterator[Callable[[], object]]:
    """Calls that load its kernels."""
    device = torch.device("cuda", torch.cuda.current_device())
    if devices.device_info(device.index).arch.fp8 is not None:
        yield from scaled.loads(SCALED, device)
        yield from scaled_grouped.loads(SCALED_GROUPED, device)


def exchanges() -> None:
    """Sums of ranks, each of which finds what the others sent: the sanitizer runs one kernel at a time."""
    for ranks in (2, 4, 8):
        of = one_gpu.Ranks(ranks, 4096, 8192)
        for shape, biased in itertools.product(((3, 5), (64, 120)), (False, True)):
            xs = torch.ones(ranks, *shape, device="cuda")
            bias = torch.ones(shape[1], dtype=DTYPE, device="cuda") if biased else None
            for way in ("at_once", "parts", "products", "scatter"):
                if way == "scatter" and xs[0].numel() % (4 * ranks):
                    continue
                for out in of.sums(xs, bias, DTYPE, way, alone=True):
                    assert (out == ranks + biased).all(), (ranks, shape, way)


ALL_ARRIVE = (
    *("fma_sm90.cu", "fma_few_sm90.cu", "grouped_terms_sm90.cu"),
    *("attention_sm90.cu", "attention_latent_sm90.cu", "attention_backward_sm90.cu"),
)


def all_lanes_arrive() -> None:
    """Where one lane arrives at a barrier for its warp, all do: see ``warp_arrive`` in ``ptx_sm90.cuh``."""
    made = compiler.KernelSpec.__init__

    def init(self: compiler.KernelSpec, source: str, entry: str, params: str, constants: tuple, *rest, **kw):
        if source in ALL_ARRIVE:
            constants = (*constants, ("ALL_LANES_ARRIVE", 1))
        made(self, source, entry, params, constants, *rest, **kw)

    compiler.KernelSpec.__init__ = init


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compile", action="store_true", help="only fill the cache of kernels")
    parser.add_argument(
        "--every",
        type=int,
        default=1,
        help="each such schedule, where they are many, and one of each kind and width",
    )
    parser.add_argument("--racecheck", action="store_true", help="kernels as that tool can follow them")
    parser.add_argument(
        "--triton", action="store_true", help="its kernels too, but for racecheck: their barriers are its own"
    )
    parser.add_argument(
        "--only",
        choices=(
            *("products", "rows", "chains", "exchanges", "attention", "segments", "grouped", "fused"),
            "fp8",
        ),
        help="products, operations of rows, sums over tokens and of long rows, sums of ranks, attention, sums"
        " in segments, products of groups, fused layers, or FP8",
    )
    options = parser.parse_args()
    every = options.every
    if options.racecheck:
        all_lanes_arrive()
    if options.only and options.only != "products":
        some = {"attention": attention, "segments": segmented, "grouped": grouped}
        some |= {"fused": fused_layers, "fp8": fp8}
        whole = {"rows": row_reductions, "chains": chains, "exchanges": exchanges}
        (whole | {name: partial(run, every) for name, run in some.items()})[options.only]()
        return
    found = itertools.chain(
        products(every), tiny_products(every), long_products(every), float32_outputs(every)
    )
    if options.compile:
        calls = (partial(k.run, x, s) for k, s, x in found)
        others = (
            *(attention_kernels(), grouped_kernels(), segmented_kernels()),
            *(fused_kernels(), fp8_kernels()),
        )
        needed = precompile.compile_for(itertools.chain(calls, *(() if options.only else others))).needed
        print(needed, "kernels")
        if options.only:
            return
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            print(len(list(pool.map(lambda p: p[0].run(p[2], p[1]), triton_products()))), "by Triton")
        log_probabilities_by_triton()
        return
    if options.triton:
        found = itertools.chain(found, triton_products())
    count, taken = 0, {}
    for kernel, schedule, x in found:
        kernel.run(x, schedule)
        more = float(x.start is not None or x.bias is not None)
        right = torch.tensor(x.a.shape[-1] + more).to(x.out.dtype).item()
        assert (x.out == right).all(), (kernel.name, schedule, x.a.stride(), x.b.stride())
        if schedule is not None and kernel.name == "tensor_core_sm90":
            for way, so in ways(schedule, x).items():
                taken[way] = taken.get(way, False) or so
        count += 1
    torch.cuda.synchronize()
    print(f"{count} products")
    assert all(taken.values()), [way for way, so in taken.items() if not so]
    if options.only:
        return
    log_probabilities()
    if options.triton:
        log_probabilities_by_triton()
    row_reductions()
    chains()
    attention(every)
    grouped(every)
    segmented(every)
    fused_layers(every)
    fp8(every)
    exchanges()
    exp2.exp2(torch.linspace(-150, 130, 1001, device="cuda"), INTERPOLATION)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
