"""Triton: kernels that compile for every GPU without one, indices in its interpreter."""

from __future__ import annotations

import importlib
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import samebits
from tests.support import ROOT

# ---- compiling for a GPU that is not here

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
    "gfx950": ("hip", "gfx950", 64),
}
NVIDIA = [name for name in TARGETS if name.startswith("sm_")]
FETCHING = ("sm_90", "sm_100")  # have a copy engine for tiles
# Bytes of shared memory that a program may have.
SHARED = dict(zip(TARGETS, (163 << 10, 227 << 10, 227 << 10, 64 << 10, 160 << 10), strict=True))
PLACES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def scheduled(s: Any) -> dict[str, Any]:
    """The constants and options of a schedule."""
    blocks = {"BLOCK_M": s.block_m, "BLOCK_N": s.block_n, "BLOCK_K": s.block_k, "GROUP": s.group}
    return blocks | {"num_warps": s.warps, "num_stages": s.stages}


def compiled(target: str, kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> str:
    """The assembly of a kernel; what is in neither dict is a 32-bit integer."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    options = {name: value for name, value in constants.items() if name not in kernel.arg_names}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    pointers = [i for i, n in enumerate(names) if signature[n].startswith("*")]
    source = ASTSource(
        kernel,
        signature,
        {(names.index(n),): value for n, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i in pointers},
    )
    options["enable_fp_fusion"] = False
    result = triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)
    assert result.metadata.shared <= SHARED[target]
    text: str = result.asm["ptx"] if "ptx" in result.asm else result.asm["amdgcn"]
    assert ".ftz" not in text
    assert "tf32" not in text
    if "amdgcn" in result.asm:
        # The mode in which f32 subnormals are kept: FP_DENORM (both kinds) in the kernel's descriptor.
        assert re.search(r"\.amdhsa_float_denorm_mode_32 3", text)
    return text


def general(
    target: str, dtype: torch.dtype, out: torch.dtype, along: tuple[str, str], s: Any, **given: str
) -> str:
    from samebits.backends.triton import kernels, products

    types = {"a": f"*{PLACES[dtype]}", "b": f"*{PLACES[dtype]}", "out": f"*{PLACES[out]}", **given}
    constants = {name: None for name in ("acc", "bias", "cu_seqlens") if name not in given}
    fma = s in products.FMA_SCHEDULES
    constants |= {"FMA": fma, "CLOSING_ZERO": fma, "STAGES": s.stages}
    constants |= {"A_ALONG": along[0], "B_ALONG": along[1]}
    return compiled(target, kernels.matmul, types, constants | scheduled(s))


@pytest.mark.parametrize("target", TARGETS)
def test_fma_compiles(target: str) -> None:
    pytest.importorskip("triton")
    from samebits.backends.triton.products import FMA_SCHEDULES

    for i, schedule in enumerate(FMA_SCHEDULES):
        dtype = (torch.float32, torch.bfloat16, torch.float16)[i % 3]
        carried = {"acc": "*fp32", "cu_seqlens": "*i32"} if i % 2 else {"bias": "*fp32"}
        text = general(target, dtype, torch.float32, (("k", "row"), ("", ""))[i % 2], schedule, **carried)
        if target in NVIDIA:
            assert "fma.rn.f32" in text
            # Nothing but fused multiply-adds, and the sum with the bias.
            assert not re.search(r"\b(mul|mad|sub)(\.rn)?\.f32", text)
        else:
            assert re.search(r"v_(pk_)?fma(c|_mix)?_f32", text)


@pytest.mark.parametrize("target", NVIDIA)
def test_tensor_core_compiles(target: str) -> None:
    pytest.importorskip("triton")
    from samebits.backends.triton.products import MMA_SCHEDULES

    for i, schedule in enumerate(MMA_SCHEDULES):
        dtype = (torch.bfloat16, torch.float16)[i % 2]
        carried = {"acc": "*fp32", "cu_seqlens": "*i64"} if i % 2 else {"bias": f"*{PLACES[dtype]}"}
        along = (("k", "k"), ("k", "row"), ("row", "row"), ("", ""))[i]
        text = general(target, dtype, torch.float32 if i % 2 else dtype, along, schedule, **carried)
        assert_multiplies_16_bit_operands(text, target)


@pytest.fixture
def gpu(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target instead of the GPU here."""
    pytest.importorskip("triton")
    from samebits.backends.triton import runtime

    found = runtime.Gpu(132, SHARED[target] - 1024, target in FETCHING, target == "sm_100")
    monkeypatch.setattr(runtime, "gpu", lambda device: found)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("target", FETCHING)
def test_tiles_compile(target: str) -> None:
    from samebits.backends.triton import runtime
    from samebits.backends.triton.products import TILE_SCHEDULES
    from samebits.backends.triton.tiles import fits

    for i, s in enumerate(TILE_SCHEDULES):
        dtype = (torch.bfloat16, torch.float16)[i % 2]
        a_k_major, b_k_major, accumulate = i % 2 == 0, i % 3 == 0, i % 4 == 3
        size = 4 if accumulate else 2
        assert fits(s, size, accumulate, runtime.gpu(0))
        bias = i % 5 == 4
        text = tiles(
            target, dtype, s, a_k_major=a_k_major, b_k_major=b_k_major, accumulate=accumulate, bias=bias
        )
        assert_multiplies_16_bit_operands(text, target)


def tiles(
    target: str,
    dtype: torch.dtype,
    s: Any,
    *,
    a_k_major: bool,
    b_k_major: bool,
    accumulate: bool,
    bias: bool,
) -> str:
    from samebits.backends.triton import kernels, runtime
    from samebits.backends.triton.tiles import tile_constants

    blocks = {
        "a": (s.block_m, s.block_k) if a_k_major else (s.block_k, s.block_m),
        "b": (s.block_n, s.block_k) if b_k_major else (s.block_k, s.block_n),
        "out": (s.block_m, s.block_n // s.parts),
    }
    held = dict.fromkeys("ab", PLACES[dtype]) | {"out": "fp32" if accumulate else PLACES[dtype]}
    types = {name: f"tensordesc<{held[name]}{list(block)}>" for name, block in blocks.items()}
    types["bias"] = f"*{PLACES[dtype]}"
    constants = {
        "A_K_MAJOR": a_k_major,
        "B_K_MAJOR": b_k_major,
        "ACCUMULATE": accumulate,
        "PARTS": s.parts,
        **({} if bias else {"bias": None}),
    }
    made_for = tile_constants(s, 4 if accumulate else 2, accumulate, runtime.gpu(0))
    made_for.pop("enable_fp_fusion")
    return compiled(target, kernels.matmul_tiles, types, constants | made_for)


ROWS = dict.fromkeys(
    ["m", "s", "u", "target_logit", "keep", "logp", "entropy", "shift", "log_sum", "grad", "grad_entropy"],
    "*fp32",
) | {"target": "*i64", "scale": "fp32"}


@pytest.mark.parametrize("target", TARGETS)
def test_log_probabilities_compile(target: str) -> None:
    pytest.importorskip("triton")
    from samebits.backends.triton import logp
    from samebits.backends.triton import logp_kernels as kernels

    for logits, u in itertools.product(PLACES.values(), ({}, {"u": None})):
        types = ROWS | {"logits": f"*{logits}"}
        text = compiled(target, kernels.block_statistics, types, logp.BLOCK_STATISTICS | u)
        assert_exact_functions(text, target)
    for u in ({}, {"u": None}):
        text = compiled(target, kernels.combine, ROWS, logp.COMBINE | u)
        assert_exact_functions(text, target)
        if target in NVIDIA:
            assert ("div.rn.f32" in text) == (not u)
    for dtype, none in itertools.product(PLACES.values(), ({}, {"grad_entropy": None})):
        types = ROWS | {"logits": "*fp32", "out": f"*{dtype}"}
        text = compiled(target, kernels.grad_logits, types, logp.GRAD_LOGITS | none)
        assert_exact_functions(text, target)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("target", FETCHING)
def test_fused_log_probabilities_compile(target: str) -> None:
    from samebits.backends.triton import logp_kernels as kernels
    from samebits.backends.triton import runtime
    from samebits.backends.triton.linear_logp import STATISTICS_SCHEDULES
    from samebits.backends.triton.products import TILE_SCHEDULES
    from samebits.backends.triton.tiles import tile_constants

    fused = [(kernels.statistics_tiles, s) for s in STATISTICS_SCHEDULES]
    fused += [(kernels.grad_logits_tiles, s) for s in TILE_SCHEDULES]
    for i, (kernel, s) in enumerate(fused):
        dtype = ("bf16", "fp16")[i % 2]
        blocks = {
            "hidden": (s.block_m, s.block_k),
            "weight": (s.block_n, s.block_k),
            "out": (s.block_m, s.block_n // s.parts),
        }
        types = ROWS | {name: f"tensordesc<{dtype}{list(block)}>" for name, block in blocks.items()}
        types["bias"] = f"*{dtype}"
        grads, optional = kernel is kernels.grad_logits_tiles, i % 3 > 0
        size = 2 if grads else 4 * optional  # of an element that leaves: a logit that is kept
        constants = tile_constants(s, size, False, runtime.gpu(0))
        constants.pop("enable_fp_fusion")
        if grads:
            constants["PARTS"] = s.parts
        if not optional:
            constants |= dict.fromkeys({"bias", "u", "keep", "grad_entropy"} & set(kernel.arg_names))
        text = compiled(target, kernel, types, constants)
        assert_multiplies_16_bit_operands(text, target)
        assert_exact_functions(text, target)


def assert_exact_functions(text: str, target: str) -> None:
    """No exp, log or quotient of the GPU's own."""
    if target in NVIDIA:
        assert "fma.rn.f32" in text
        assert not re.search(r"\.approx|div\.full|\b(ex2|lg2|mad\.(rn\.)?f32)", text)
        assert not re.search(r"\b(add|sub|mul)\.f32", text)  # without .rn, which ptxas might fuse
    else:
        assert not re.search(r"v_(exp|log)_f32", text)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("kernels", "matmul"),
        ("kernels", "matmul_tiles"),
        ("logp_kernels", "block_statistics"),
        ("logp_kernels", "combine"),
        ("logp_kernels", "grad_logits"),
        ("logp_kernels", "statistics_tiles"),
        ("logp_kernels", "grad_logits_tiles"),
    ],
)
def test_no_size_or_stride_is_compiled_in(module: str, name: str) -> None:
    """Triton compiles anew for an integer that is 1, or a multiple of 16, unless told not to."""
    pytest.importorskip("triton")
    kernels = importlib.import_module(f"samebits.backends.triton.{module}")
    others = {"a", "b", "acc", "bias", "cu_seqlens", "out", "hidden", "weight", "logits", *ROWS}
    if module == "kernels":
        others -= {"m"}  # there it is a size
    sizes = [p for p in getattr(kernels, name).params if not p.is_constexpr and p.name not in others]
    assert len(sizes) >= 3
    assert all(p.do_not_specialize for p in sizes)


def test_tiles_are_stored_in_rows_of_whole_16_bytes() -> None:
    """The copy engine wrote beyond the one element of an output of [1, 1]."""
    pytest.importorskip("triton")
    from samebits.backends.product import Operands, Product
    from samebits.backends.triton.products import TENSOR_CORE_TILES

    def takes(m: int, n: int, out_dtype: torch.dtype = torch.bfloat16) -> bool:
        room = -(-n // 8) * 8  # rows of every tensor start at multiples of 16 bytes
        a, b = torch.empty(m, 64, dtype=torch.bfloat16), torch.empty(64, room, dtype=torch.bfloat16)
        out = torch.empty(m, room, dtype=out_dtype)
        return TENSOR_CORE_TILES.supports(Product.of(Operands(a, b[:, :n], out[:, :n]), "mma"))

    for m in (1, 40):
        assert not takes(m, 1)
        assert not takes(m, 17)
        assert not takes(m, 18, torch.float32)
        assert takes(m, 20, torch.float32)
        assert takes(m, 520)


def test_a_schedule_is_chosen_by_its_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the general tensor-core kernel, whose schedules were never timed."""
    pytest.importorskip("triton")
    from samebits.backends.product import Operands, Product
    from samebits.backends.triton import matmul, runtime
    from samebits.backends.triton.products import FMA, TENSOR_CORE, TENSOR_CORE_TILES

    for sms, shared in ((132, SHARED["sm_90"] - 1024), (108, 0)):
        gpu = runtime.Gpu(sms, shared, fetches_tiles=shared > 0)
        monkeypatch.setattr(runtime, "gpu", lambda device, gpu=gpu: gpu)
        for m, n in itertools.product((1, 40, 512, 8192), (48, 4096)):
            a, b = torch.empty(m, 64, dtype=torch.bfloat16), torch.empty(64, n, dtype=torch.bfloat16)
            x = Operands(a, b, a.new_empty(m, n))
            for step, kernel in (("mma", TENSOR_CORE_TILES if shared else TENSOR_CORE), ("fma", FMA)):
                p = Product.of(x, step)
                assert matmul.fastest(p) is kernel
                chosen, offered = kernel.choose(p), kernel.all(p)
                assert chosen in offered
                few_rows = [s for s in offered if s.block_m <= 2 * max(m, 8)]
                if kernel is not TENSOR_CORE:
                    among = offered if kernel is FMA else few_rows
                    assert kernel.cost(p, chosen) == min(kernel.cost(p, s) for s in among) > 0


def test_a_start_that_lies_otherwise_than_the_output_is_refused() -> None:
    """The kernel finds both at the same offsets."""
    pytest.importorskip("triton")
    from samebits.backends.product import Operands, Product
    from samebits.backends.triton import products

    a = torch.empty(4, 8, dtype=torch.bfloat16)
    out, start = a.new_empty(4, 4), torch.empty(4, 4)
    for kernel in (products.TENSOR_CORE, products.FMA):
        assert kernel.supports(Product.of(Operands(a, a.mT, out, start=start), kernel.step))
        with pytest.raises(ValueError, match=r"expected .*a start laid out as out"):
            kernel.run(Operands(a, a.mT, out, start=start.mT))


def assert_multiplies_16_bit_operands(text: str, target: str) -> None:
    """No instruction that would widen operands or join more than 16 k at a time to the accumulator."""
    found = set(re.findall(r"(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)[\w.:]*", text))
    assert found
    assert all(
        name.endswith("kind::f16")
        or re.search(r"\.m\d+n\d+k16(\.row\.col)?\.f32\.(bf16\.bf16|f16\.f16)(\.f32)?$", name)
        for name in found
    ), found
    assert target == "sm_100" or not any("tcgen05" in name for name in found)


ARITHMETIC = r"\b(add|sub|mul|mad|fma)\.[\w.]*f32"


@pytest.mark.parametrize("target", TARGETS)
def test_compiled_chains_are_never_split(target: str) -> None:
    """Accumulators of parts of K would have to be added, and a plain product without a bias adds nothing."""
    pytest.importorskip("triton")
    from samebits.backends.triton.products import FMA_SCHEDULES, MMA_SCHEDULES

    for s in FMA_SCHEDULES:
        text = general(target, torch.float32, torch.float32, ("k", "row"), s)
        if target in NVIDIA:
            assert {m[0] for m in re.finditer(ARITHMETIC, text)} == {"fma.rn.f32"}
        else:
            assert not re.search(r"\bv_(pk_)?(add|sub|mac|mad)_f32|v_mfma", text)
    for s in MMA_SCHEDULES if target in NVIDIA else ():
        text = general(target, torch.bfloat16, torch.bfloat16, ("k", "row"), s)
        assert not re.search(ARITHMETIC, text), s
        assert_multiplies_16_bit_operands(text, target)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("target", FETCHING)
def test_compiled_chains_of_tiles_are_never_split(target: str) -> None:
    """Nor do pipelines of any depth: of every schedule, of products and of log-probabilities."""
    from samebits.backends.triton.linear_logp import STATISTICS_SCHEDULES
    from samebits.backends.triton.products import TILE_SCHEDULES

    for s in TILE_SCHEDULES + STATISTICS_SCHEDULES:
        text = tiles(target, torch.bfloat16, s, a_k_major=True, b_k_major=True, accumulate=False, bias=False)
        assert not re.search(ARITHMETIC, text), s


@pytest.mark.parametrize("target", NVIDIA)
@pytest.mark.parametrize("what", ["", "promoted", "two chains", "by multiplications"])
def test_what_reorders_k_is_seen_when_compiled(what: str, target: str) -> None:
    pytest.importorskip("triton")
    from tests.backends.triton.traps import trap

    constants = {"WHAT": what, "BLOCK": 64, "num_warps": 4, "num_stages": 3}
    with pytest.raises(AssertionError) if what else nullcontext():
        text = compiled(target, trap, {"a": "*bf16", "b": "*bf16", "out": "*fp32"}, constants)
        assert_multiplies_16_bit_operands(text, target)
        assert not re.search(ARITHMETIC, text)


# ---- what is compiled again


class Nowhere:
    """Triton's driver of a GPU that is not here."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget(*TARGETS["sm_90"])

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[set[Any], list[Any]]]:
    """Kernels launched on an H100, with their constants and what they lack, and those compiled; none runs."""
    pytest.importorskip("triton")
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from samebits.backends.triton import matmul, runtime

    launched: set[Any] = set()
    compilations: list[Any] = []
    run = JITFunction.run

    def compile(self: Any, key: Any, signature: Any, device: int, *rest: Any) -> Any:
        compilations.append((self.__name__, signature))
        self.device_caches[device][0][key] = kernel = mock.Mock()
        return kernel

    def launch(self: Any, *args: Any, **options: Any) -> Any:
        assert options["enable_fp_fusion"] is False  # products and sums stay two roundings
        said = {name: x for name, x in options.items() if name not in ("grid", "warmup")}
        missing = tuple(x is None for x in args)
        launched.add((self.__name__, missing, *sorted(said.items())))
        return run(self, *args, **options)

    found = runtime.Gpu(132, SHARED["sm_90"] - 1024, fetches_tiles=True)
    monkeypatch.setattr(runtime, "gpu", lambda device: found)
    monkeypatch.setattr(matmul, "_plan", matmul._plan.__wrapped__)
    monkeypatch.setattr(JITFunction, "_do_compile", compile)
    monkeypatch.setattr(JITFunction, "run", launch)
    active = driver.active if driver._active is not None else None
    driver.set_active(Nowhere())
    jitted = [
        f
        for name in ("kernels", "logp_kernels")
        for f in vars(importlib.import_module(f"samebits.backends.triton.{name}")).values()
        if isinstance(f, JITFunction)
    ]
    for f in jitted:
        f.device_caches.clear()
    yield launched, compilations
    for f in jitted:
        f.device_caches.clear()
    driver._active = active


TOKENS = (*range(1, 41), 63, 64, 65, 100, 127, 128, 129, 200, 256, 300, 511, 512, 1000, 1024, 2047, 4096)
BF16, F32 = torch.bfloat16, torch.float32


def weights_gradient(x: torch.Tensor, w: torch.Tensor, *, packed: bool = False) -> torch.Tensor:
    m = len(x)
    spans = torch.tensor([0, m // 2, m], dtype=torch.int32) if packed else None
    y = samebits.linear(x, w.requires_grad_(), cu_seqlens=spans)
    return torch.autograd.grad(y, w, torch.ones_like(y))[0]


def log_probabilities(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    target = torch.zeros(len(x), dtype=torch.int64)
    y = samebits.linear_logp(x, w.requires_grad_(), target)
    return torch.autograd.grad(y, w, torch.ones_like(y))[0]


COMPILED_FOR: dict[str, tuple[torch.dtype, int, Callable[..., torch.Tensor]]] = {
    "linear": (BF16, 64, lambda x, w: samebits.linear(x, w)),
    "linear, any stride": (BF16, 63, lambda x, w: samebits.linear(x, w)),
    "linear, FMA": (F32, 64, lambda x, w: samebits.linear(x, w)),
    "dW": (BF16, 64, weights_gradient),
    "dW, packed": (BF16, 64, partial(weights_gradient, packed=True)),
    "dW, FMA": (F32, 64, weights_gradient),
    "bmm": (BF16, 64, lambda x, w: samebits.bmm(x.expand(3, *x.shape), w.mT.expand(3, *w.mT.shape))),
    "linear_logp and dW": (BF16, 64, log_probabilities),
    "logp": (F32, 64, lambda x, w: samebits.logp(x, torch.zeros(len(x), dtype=torch.int64))),
}


@pytest.mark.parametrize("name", COMPILED_FOR)
def test_a_new_number_of_rows_compiles_nothing(name: str, launches: tuple[set[Any], list[Any]]) -> None:
    """A kernel is compiled once for each schedule, not for one row, nor for a multiple of 16."""
    from samebits.backends.triton.linear_logp import STATISTICS_SCHEDULES
    from samebits.backends.triton.products import MMA_SCHEDULES, TILE_SCHEDULES
    from tests.backends.triton.interpreted import by_triton

    dtype, k, call = COMPILED_FOR[name]
    launched, compilations = launches
    weight = torch.zeros(512, k, dtype=dtype)
    with by_triton():
        for m in TOKENS:
            call(torch.zeros(m, k, dtype=dtype), weight.detach())
    assert launched
    assert len(compilations) == len(launched), compilations
    assert len(launched) <= 3 * len(TILE_SCHEDULES) + len(STATISTICS_SCHEDULES) + len(MMA_SCHEDULES)


def test_torch_compile_compiles_nothing_for_a_new_number_of_rows(
    launches: tuple[set[Any], list[Any]],
) -> None:
    from tests.backends.triton.interpreted import by_triton

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(samebits.linear, fullgraph=True, dynamic=True, backend=counter)
    launched, compilations = launches
    weight = torch.zeros(512, 64, dtype=BF16)
    with by_triton():
        for m in TOKENS[1:]:  # a size of one is special to torch.compile
            call(torch.zeros(m, 64, dtype=BF16), weight)
    assert counter.frame_count == 1
    assert 2 <= len(compilations) == len(launched)


# ---- indices, in Triton's interpreter


@pytest.mark.long
@pytest.mark.parametrize(
    ("part", "every", "least"),  # parts run side by side
    [
        ("products", 3, 180),
        ("logp", 3, 450),
        pytest.param("products", 1, 500, marks=pytest.mark.nightly),
        pytest.param("logp", 1, 550, marks=pytest.mark.nightly),
    ],
)
def test_indices_in_the_interpreter(part: str, every: int, least: int) -> None:
    triton = pytest.importorskip("triton")
    interpreter = importlib.import_module("triton._C.libtriton").interpreter
    if not hasattr(interpreter, "fma_fp32"):
        pytest.skip(f"in the interpreter of Triton {triton.__version__}, an fma rounds twice")
    command = [sys.executable, "-W", "ignore", "-m", "tests.backends.triton.interpreted", part, str(every)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-3000:]
    assert int(run.stdout) > least
