"""Every kernel of products, under its schedules, on a GPU: the reference's bits, and nothing else written.

A kernel passes over what it says that it does not support. Of kernels with many schedules a dozen take part;
``samebits verify --thorough`` runs them all.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import samebits
from samebits import FMA, TENSOR_CORE
from samebits.backends.cuda import runtime
from samebits.backends.cuda.matmul import PRODUCTS
from samebits.backends.cuda.products import kinds_sm90
from samebits.backends.cuda.products.tensor_core_sm90 import TENSOR_CORE_SM90
from samebits.backends.kernel import Kernel as KernelOf
from samebits.backends.product import Operands, Product
from samebits.backends.reference import matmul as reference
from samebits.testing import KINDS, assert_same_bits, bits, values
from samebits.tools.verify import takes
from tests.support.devices import ARCH, FAMILY
from tests.support.recorded import RECORDED

pytestmark = pytest.mark.gpu

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
Place = Callable[[Tensor], Tensor]
Kernel = KernelOf[Product, Any]

KERNELS: list[Kernel] = [*PRODUCTS]
if importlib.util.find_spec("triton"):
    from samebits.backends.triton.products import PRODUCTS as OF_TRITON

    KERNELS += OF_TRITON


def named(kernel: Kernel) -> str:
    return f"{kernel.name.replace(' ', '-')}-{kernel.step}"


def some(kernel: Kernel) -> list[Any]:
    """The default choice, and up to a dozen schedules of the catalogue."""
    every = kernel.catalogue
    return [None, *every[:: -(-len(every) // 12)]]


@pytest.fixture(params=KERNELS, ids=named)
def kernel(request: pytest.FixtureRequest) -> Kernel:
    found: Kernel = request.param
    if not ARCH.runs(found.name):
        pytest.skip("it runs on Hopper alone")
    return found


def dtypes(kernel: Kernel) -> tuple[torch.dtype, ...]:
    return (BF16, F16) if kernel.step == "mma" else (F32, BF16, F16)


def poison(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.full(tuple(shape), torch.nan, dtype=dtype, device="cuda")


# Places of ``x[..., rows, columns]`` in memory, NaN around it.


def contiguous(x: Tensor) -> Tensor:
    return x.contiguous()


def transposed(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


def misaligned(x: Tensor) -> Tensor:
    *batch, m, k = x.shape
    return poison((*batch, m + 2, k + 3), x.dtype)[..., 1 : m + 1, 1 : k + 1].copy_(x)


def misaligned_transposed(x: Tensor) -> Tensor:
    return misaligned(x.mT).mT


def pitched(x: Tensor) -> Tensor:
    *batch, m, k = x.shape
    return poison((*batch, m + 1, -(-k // 8) * 8 + 8), x.dtype)[..., :m, :k].copy_(x)


def pitched_transposed(x: Tensor) -> Tensor:
    return pitched(x.mT).mT


def spread(x: Tensor) -> Tensor:
    *batch, m, k = x.shape
    return poison((*batch, 2 * m, 3 * k + 1), x.dtype)[..., ::2, 1::3].copy_(x)


def batch_last(x: Tensor) -> Tensor:
    if x.ndim < 3:
        return x
    return x.movedim(0, -1).contiguous().movedim(-1, 0)


PLACES: tuple[Place, ...] = (
    contiguous,
    transposed,
    misaligned,
    misaligned_transposed,
    pitched,
    pitched_transposed,
    spread,
    batch_last,
)


def expected(
    kernel: Kernel,
    a: Tensor,
    b: Tensor,
    *,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    start: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    sequences: bool = False,
) -> Tensor:
    """What the contract says, by the CPU."""
    key = (FMA if kernel.step == "fma" else TENSOR_CORE.on(FAMILY)).key
    a, b = a.cpu(), b.cpu()
    bias = None if bias is None else bias.cpu()
    if not sequences:
        return reference.matmul(a, b, bias=bias, out_dtype=out_dtype, contract=key)
    assert bias is None
    batch = max((x.shape[0] for x in (a, b) if x.ndim > 2), default=1)
    a4, b4 = (x if x.ndim == 4 else x.expand(batch, *x.shape[-2:]).unsqueeze(1) for x in (a, b))
    a4, b4 = (x.expand(batch, *x.shape[1:]) for x in (a4, b4))
    m, n = a.shape[-2], b.shape[-1]
    acc = None if start is None else start.cpu().reshape(-1, m, n)
    spans = None if cu_seqlens is None else cu_seqlens.cpu()
    out = reference.addbmm(acc, a4, b4, spans, out_dtype=out_dtype, contract=key)
    return out if max(a.ndim, b.ndim) > 2 else out[0]


def check(kernel: Kernel, a: Tensor, b: Tensor, schedule: Any = None, **given: Any) -> int:
    """One product into several places against the reference; how many of them the kernel took."""
    out_dtype, start = given.pop("out_dtype", F32), given.pop("start", None)
    cu_seqlens, bias = given.pop("cu_seqlens", None), given.pop("bias", None)
    before, behind = given.pop("beside", (2, 3))  # columns beside one of the outputs
    sequences = start is not None or cu_seqlens is not None or a.ndim == 4
    assert not given
    more = {"bias": bias, "start": start, "cu_seqlens": cu_seqlens, "sequences": sequences}
    want = expected(kernel, a, b, out_dtype=out_dtype, **more)
    *batch, m, n = want.shape
    around = torch.full((*batch, m + 2, before + n + behind), 123.0, dtype=out_dtype, device="cuda")
    inside = around[..., 1 : m + 1, before : before + n]
    taken = 0
    for out in (poison(want.shape, out_dtype), inside, poison((*batch, n, m), out_dtype).mT):
        for in_place in (False, True) if start is not None and out_dtype == F32 else (False,):
            at = out if in_place else start
            x = Operands(a, b, out, bias, at, cu_seqlens, sequences)
            if not takes(kernel, Product.of(x, kernel.step), schedule):
                continue
            out.copy_(start) if in_place else out.fill_(torch.nan)
            kernel.run(x, schedule)
            assert_same_bits(out.contiguous(), want, f"{schedule}")
            taken += 1
    inside.fill_(123.0)
    assert (around == 123.0).all(), "wrote outside its output"
    return taken


def filled(kind: str, shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    return values(kind, tuple(shape), dtype, seed).cuda()


SHAPES = [
    (1, 1, 1), (1, 17, 64), (3, 16, 5), (16, 40, 32), (17, 33, 31), (64, 64, 64), (65, 100, 130), (8, 8, 8),
    (128, 15, 256), (130, 200, 70), (1, 300, 257), (257, 129, 1), (32, 32, 32), (70, 33, 40), (129, 64, 200),
    (136, 328, 200), (257, 95, 130), (100, 289, 300), (12, 64, 12), (4, 4, 4), (63, 62, 61), (3, 5, 4),
]  # fmt: skip


def places(kernel: Kernel) -> tuple[Place, Place]:
    """Of what the kernel takes whatever the other operand is."""
    odd = kernel.name == "padded_sm90"
    return (misaligned, misaligned_transposed) if odd else (pitched, pitched_transposed)


def test_shapes(kernel: Kernel) -> None:
    taken = dict.fromkeys(range(len(some(kernel))), 0)
    for i, ((m, k, n), dtype) in enumerate(itertools.product(SHAPES, dtypes(kernel))):
        kind, batch = KINDS[i % len(KINDS)], (5,) if kernel.name == "tiny" else ()
        a, b = filled(kind, (*batch, m, k), dtype, i), filled(kind, (*batch, k, n), dtype, i + 50)
        for j, schedule in enumerate(some(kernel)):
            place = places(kernel)[(i + j) % 2]
            x, y = place(a), (contiguous, pitched_transposed, pitched)[(i + j) % 3](b)
            taken[j] += check(kernel, x, y, schedule, out_dtype=(F32, dtype)[(i + j // 2) % 2])
    assert min(taken.values()) > 0, "a schedule met no product that it takes"


@pytest.mark.parametrize("place_b", PLACES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("place_a", PLACES, ids=lambda f: f.__name__)
def test_layouts(kernel: Kernel, place_a: Place, place_b: Place) -> None:
    for i, (m, k, n) in enumerate([(40, 72, 24), (33, 45, 70), (24, 36, 28), (7, 33, 9), (64, 64, 64)]):
        for batch, dtype in itertools.product(((), (5,)), dtypes(kernel)):
            a, b = filled("normal", (*batch, m, k), dtype, 1), filled("normal", (*batch, n, k), dtype, 2)
            check(kernel, place_a(a), place_b(b).mT, some(kernel)[i % len(some(kernel))])
            check(kernel, place_a(a), place_b(b).mT, out_dtype=dtype)


@pytest.mark.parametrize("b_mn", [False, True])
def test_transposed_tiles(b_mn: bool) -> None:
    """A quarter of them, all of 32 columns or in several blocks: two in each direction, one moved back."""
    if ARCH.own != "sm90":
        pytest.skip("it runs on Hopper alone")
    turned = [s for s in kinds_sm90.catalogue(False, b_mn) if s.swap]
    kinds = {(s.block_m, s.block_n, s.warpgroups, s.share, s.blocks): s for s in turned}
    for i, s in enumerate(kinds.values()):
        if i % 4 and s.blocks < 3 and not (b_mn and s.block_m == 32):
            continue
        m, k, n = s.block_n + 3, 80, s.block_m * s.cluster + (24, 21)[i % 3 == 2]  # odd rows leave one by one
        dtype, batch = (BF16, F16)[i // 4 % 2], ((), (), (3,))[i // 4 % 3]
        a, b = filled("normal", (*batch, m, k), dtype, i), filled("normal", (*batch, k, n), dtype, i + 1)
        b = pitched(b) if b_mn else transposed(b)
        assert check(TENSOR_CORE_SM90, a, b, s, out_dtype=dtype, beside=(8, 8)) == 2, s


@pytest.mark.parametrize("kind", KINDS)
def test_epilogues(kernel: Kernel, kind: str) -> None:
    turns = itertools.cycle(some(kernel))
    for dtype, (m, k, n) in itertools.product(dtypes(kernel), ((37, 50, 43), (136, 72, 264), (64, 16, 40))):
        batch = (6,) if kernel.name == "tiny" else ()
        a, b = filled(kind, (*batch, m, k), dtype, 1), filled(kind, (*batch, k, n), dtype, 2)
        start = filled(kind, (*batch, m, n), F32, 4)
        for bias_dtype, out_dtype in itertools.product((F32, BF16, F16), {F32, dtype}):
            bias = filled(kind, (2 * n,), bias_dtype, 3)
            check(kernel, pitched(a), pitched(b), next(turns), bias=bias[:n], out_dtype=out_dtype)
            check(kernel, a, b, next(turns), bias=bias[::2], out_dtype=out_dtype)
        for out_dtype in {F32, dtype}:
            check(kernel, pitched(a), pitched(b), next(turns), start=start, out_dtype=out_dtype)
            check(kernel, a, b, next(turns), start=transposed(start), out_dtype=out_dtype)
            # Operations see to it that a NaN keeps its bits where no term is added.
            check(kernel, a[..., :0], b[..., :0, :], start=start.nan_to_num(), out_dtype=out_dtype)


def test_chains_carried_on_in_place(kernel: Kernel) -> None:
    """In parts of k, cut at multiples of 16."""
    for dtype, schedule in itertools.product(dtypes(kernel), some(kernel)):
        batch = (5,) if kernel.name == "tiny" else ()
        m, k, n = (60, 64, 40) if batch else (150, 400, 304)
        a, b = filled("normal", (*batch, m, k), dtype, 1), filled("normal", (*batch, k, n), dtype, 2)
        start = filled("normal", (*batch, m, n), F32, 3)
        want = expected(kernel, a, b, out_dtype=F32, start=start, sequences=True)
        for place in (contiguous, transposed):
            for cut in (16, 48):
                carried, taken = start.clone(), True
                for part in (slice(0, cut), slice(cut, k)):
                    x = Operands(place(a[..., part]), place(b[..., part, :]), carried, start=carried)
                    x = x._replace(sequences=True)
                    taken = taken and takes(kernel, Product.of(x, kernel.step), schedule)
                    if taken:
                        kernel.run(x, schedule)
                if taken:
                    assert_same_bits(carried, want, f"{schedule}")


def test_batches(kernel: Kernel) -> None:
    for dtype, schedule in itertools.product(dtypes(kernel), some(kernel)):
        a, b = filled("normal", (5, 20, 33), dtype, 1), filled("normal", (5, 33, 18), dtype, 2)
        for place in (contiguous, pitched):
            x, y = place(a), place(b)
            for pair in (
                (x, y),
                (x[:1], y),
                (x, y[:1]),
                (x, y[2]),
                (x.expand(5, 20, 33), y[:1].expand(5, 33, 18)),
            ):
                check(kernel, *pair, schedule)
            check(kernel, x.transpose(0, 1)[:3], y[:3], schedule)


def test_zero_strides(kernel: Kernel) -> None:
    for dtype in dtypes(kernel):
        a, b = filled("normal", (40, 64), dtype, 1), filled("normal", (64, 40), dtype, 2)
        one = torch.ones((), dtype=dtype, device="cuda")
        check(kernel, a.mT, one.expand(40, 1))
        check(kernel, a[:1].expand(40, 64), b)
        check(kernel, a[:, :1].expand(40, 64), b)
        check(kernel, one.expand(40, 64), one.expand(64, 24))
        a, b = filled("normal", (5, 24, 28), dtype, 1), filled("normal", (5, 28, 36), dtype, 2)
        for x, y in itertools.product((a, a[..., :1], a[:, :1]), (b, b[..., :1], b[:, :1])):
            check(kernel, x.expand(a.shape), y.expand(b.shape), out_dtype=dtype)


@pytest.mark.parametrize("place", PLACES, ids=lambda f: f.__name__)
def test_sequences_as_an_axis(kernel: Kernel, place: Place) -> None:
    turns = itertools.cycle(some(kernel))
    for sequences, k in [(1, 20), (3, 1), (4, 16), (3, 37), (2, 80)]:
        for dtype in dtypes(kernel):
            a = filled("wide", (2, sequences, 20, k), dtype, 1)
            b = filled("normal", (2, sequences, 24, k), dtype, 2)
            start = filled("normal", (2, 20, 24), F32, 3)
            for schedule in (next(turns), next(turns)):
                check(kernel, place(a), place(b).mT, schedule)
                check(kernel, place(a), place(b).mT, schedule, start=start)


LENGTHS = [
    [40],
    [16, 16, 8],
    [1, 2, 3, 0, 0, 17, 64, 1],
    [0, 5, 0],
    [0],
    [100, 33, 47],
    [1] * 50,
    [15, 16, 17] * 5,
]


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda x: f"{len(x)}-spans-of-{sum(x)}")
def test_sequences_as_spans(kernel: Kernel, lengths: list[int]) -> None:
    ends, total = torch.tensor([0, *itertools.accumulate(lengths)]), sum(lengths)
    for dtype, schedule in itertools.product(dtypes(kernel), some(kernel)):
        y, x = filled("wide", (total, 40), dtype, 1), filled("normal", (total, 24), dtype, 2)
        start = filled("normal", (40, 24), F32, 3)
        for bounds in (ends.int().cuda(), ends.cuda()):
            check(kernel, y.mT, x, schedule, cu_seqlens=bounds)
            check(kernel, y.mT, x, schedule, cu_seqlens=bounds, start=start)
            check(kernel, contiguous(y.mT), transposed(x), schedule, cu_seqlens=bounds)
            check(kernel, y.mT, y.new_ones(()).expand(total, 1), schedule, cu_seqlens=bounds)


def test_packed_padded_and_carried_sequences_agree(kernel: Kernel) -> None:
    lengths, longest, dtype = [5, 32, 17, 1, 40], 40, dtypes(kernel)[0]
    y, x = filled("normal", (95, 136), dtype, 1), filled("normal", (95, 72), dtype, 2)
    ends = [0, *itertools.accumulate(lengths)]
    y_padded, x_padded = (t.new_zeros(5, longest, t.shape[1]) for t in (y, x))
    carried = torch.zeros(136, 72, device="cuda")
    parts = [Operands(y[i:j].mT, x[i:j], carried, start=carried) for i, j in itertools.pairwise(ends)]
    for i, (start, stop) in enumerate(itertools.pairwise(ends)):
        y_padded[i, : stop - start], x_padded[i, : stop - start] = y[start:stop], x[start:stop]
    packed, padded = poison((136, 72), F32), poison((1, 136, 72), F32)
    spans = torch.tensor(ends, device="cuda")
    results = {
        "packed": ([Operands(y.mT, x, packed, cu_seqlens=spans)], packed),
        "padded": ([Operands(y_padded.mT[None], x_padded[None], padded)], padded),
        "carried": (parts, carried),
    }
    found = {}
    for name, (calls, out) in results.items():
        calls = [call._replace(sequences=True) for call in calls]
        if all(kernel.supports(Product.of(call, kernel.step)) for call in calls):
            for call in calls:
                kernel.run(call)
            found[name] = out.reshape(136, 72)
    for name, got in found.items():
        assert_same_bits(got, next(iter(found.values())), name)


def test_wrong_spans_read_nothing_else(kernel: Kernel) -> None:
    y = torch.ones(64, 32, dtype=dtypes(kernel)[0], device="cuda")
    spans = torch.tensor([-5, 1 << 30, 3, 64], device="cuda")
    x = Operands(y.mT, y, poison((32, 32), F32), cu_seqlens=spans, sequences=True)
    if kernel.supports(Product.of(x, kernel.step)):
        kernel.run(x)
        assert (x.out <= 64 + 61).all()


@pytest.mark.parametrize("place_b", PLACES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("place_a", PLACES, ids=lambda f: f.__name__)
def test_recorded_chains(kernel: Kernel, place_a: Place, place_b: Place) -> None:
    if kernel.step == "fma" or not ARCH.copies_tiles:
        pytest.skip("tensor cores' chains, recorded on sm_90")
    for i, (case, recorded) in enumerate(RECORDED.items()):
        a, b, start, want = (t if t is None else t.cuda() for t in recorded)
        for schedule in some(kernel)[i % 3 :: 3]:
            out = poison(want.shape, F32) if start is None else start.clone()
            x = Operands(place_a(a), place_b(b).mT, out, start=None if start is None else out)
            if takes(kernel, Product.of(x, kernel.step), schedule):
                kernel.run(x, schedule)
                assert_same_bits(out, want, f"{case}, {schedule}")


def test_schedules_agree_at_size(kernel: Kernel) -> None:
    """Thrice each: some blocks take several tiles, and rings of stages go round many times."""
    universal = PRODUCTS[0 if kernel.step == "mma" else 1]
    for (m, k, n), dtype in itertools.product(
        [(1000, 1111, 776), (512, 4096, 1024), (2048, 768, 3072)], dtypes(kernel)
    ):
        for place_a, place_b in itertools.product((pitched, pitched_transposed), repeat=2):
            a = place_a(torch.randn(m, k, device="cuda").to(dtype))
            b = place_b(torch.randn(n, k, device="cuda").to(dtype)).mT
            want = poison((m, n), F32)
            universal.run(Operands(a, b, want))
            for schedule in some(kernel):
                x = Operands(a, b, poison((m, n), F32))
                if takes(kernel, Product.of(x, kernel.step), schedule):
                    for _ in range(3):
                        x.out.fill_(torch.nan)
                        kernel.run(x, schedule)
                        assert_same_bits(x.out, want, f"{schedule}")


def test_rows_do_not_depend_on_the_batch(kernel: Kernel) -> None:
    dtype = dtypes(kernel)[0]
    a, b = torch.randn(300, 1000, device="cuda").to(dtype), torch.randn(1000, 504, device="cuda").to(dtype)
    whole = Operands(a, b, poison((300, 504), dtype))
    if not kernel.supports(Product.of(whole, kernel.step)):
        pytest.skip("it takes batches of matrices alone")
    kernel.run(whole)
    for m in (1, 2, 3, 15, 16, 17, 64, 100, 299):
        part = Operands(a[-m:], b, poison((m, 504), dtype))
        kernel.run(part)
        assert_same_bits(part.out, whole.out[-m:])


def test_equals_cublas_where_it_does_not_split_k() -> None:
    if not ARCH.copies_tiles:
        pytest.skip("known of Hopper")
    a, b = torch.randn(4096, 2048, device="cuda").to(BF16), torch.randn(6144, 2048, device="cuda").to(BF16)
    x = Operands(a, b.mT, poison((4096, 6144), BF16))
    PRODUCTS[0].run(x)
    assert_same_bits(x.out, torch.mm(a, b.mT))


def test_huge_strides(kernel: Kernel) -> None:
    """Offsets beyond 2**31 elements."""
    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs 20 GB")
    dtype = dtypes(kernel)[0]
    big = torch.empty((1 << 32) + 4096, dtype=dtype, device="cuda")
    a = big.as_strided((4, 64), (1 << 30, 1)).copy_(filled("normal", (4, 64), dtype, 1))
    check(kernel, a, filled("normal", (64, 24), dtype, 2))
    b = big.as_strided((4, 64), (1 << 30, 1), 256).copy_(filled("normal", (4, 64), dtype, 3))
    check(kernel, filled("normal", (24, 4), dtype, 4), b)
    c = big.as_strided((4, 8, 8), (1 << 30, 8, 1), 1024).copy_(filled("normal", (4, 8, 8), dtype, 5))
    check(kernel, c, filled("normal", (4, 8, 8), dtype, 6))


def test_graph_replay(kernel: Kernel) -> None:
    dtype, batch = dtypes(kernel)[0], (9,) if kernel.name == "tiny" else ()
    a = torch.randn(*batch, 64, 64, device="cuda").to(dtype)
    b = torch.randn(*batch, 64, 48, device="cuda").to(dtype)
    x = Operands(places(kernel)[0](a), b, poison((*batch, 64, 48), F32))
    kernel.run(x)
    want, graph = x.out.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.run(x)
    for _ in range(2):
        x.out.fill_(torch.nan)
        graph.replay()
        assert_same_bits(x.out, want)


def test_nothing_to_compute(kernel: Kernel) -> None:
    for shape in ((0, 8), (3, 0, 8), (0, 4, 8)):
        a = torch.zeros(shape, dtype=dtypes(kernel)[0], device="cuda")
        x = Operands(a, a.mT, torch.empty(*shape[:-1], shape[-2], device="cuda"))
        if kernel.supports(Product.of(x, kernel.step)):
            kernel.run(x)


def test_what_a_kernel_does_not_support_it_refuses(kernel: Kernel) -> None:
    a = torch.zeros(2, 65, 7, dtype=BF16, device="cuda")[:, :, 1:]
    x = Operands(a, a.mT, torch.zeros(2, 65, 65, device="cuda"))
    p = Product.of(x, kernel.step)
    if kernel.supports(p):
        kernel.plan(p)
        return
    with pytest.raises(ValueError, match=kernel.name):
        kernel.plan(p)


def test_follows_the_operands_device(kernel: Kernel) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    batch = (3,) if kernel.name == "tiny" else ()
    k = 41 if kernel.name == "padded_sm90" else 40
    a = values("normal", (*batch, 33, k), dtypes(kernel)[0], 1)
    b = values("normal", (*batch, k, 24), dtypes(kernel)[0], 2)
    outs = []
    for device in ("cuda:0", "cuda:1", "cuda:0"):
        x = Operands(a.to(device), b.to(device), torch.empty(*batch, 33, 24, device=device))
        kernel.run(x)
        outs.append(x.out.cpu())
    assert torch.cuda.current_device() == 0
    for out in outs[1:]:
        assert_same_bits(out, outs[0])


# Batches of tiny matrices, by the public function.


def tiny(shape: Iterable[int], dtype: torch.dtype, kind: str, batch: int) -> tuple[Tensor, Tensor]:
    m, k, n = shape
    return filled(kind, (batch, m, k), dtype, 0), filled(kind, (batch, k, n), dtype, 1)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_no_element_depends_on_the_batch(dtype: torch.dtype) -> None:
    """Over batch sizes and positions, beside NaN and infinity; the general kernels give the same bits."""
    for m, k, n in ((4, 4, 4), (8, 8, 8), (12, 64, 12), (5, 33, 7), (64, 64, 64)):
        a, b = tiny((m, k, n), dtype, "wide", 9000 // m)
        full = samebits.bmm(a, b)
        for batch in (1, 2, 3, 7, 64, 133, len(a) - 1):
            at = (len(a) - batch) * 3 // 4
            here = slice(at, at + batch)
            assert_same_bits(samebits.bmm(a[here], b[here]), full[here], f"{batch} from {at}")
        company = filled("special", a.shape, dtype, 7)
        company[1::3] = a[1::3]
        assert_same_bits(samebits.bmm(company, b)[1::3], full[1::3], "beside NaN and inf")


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_more_than_two_to_the_31_elements(dtype: torch.dtype) -> None:
    batch = (1 << 27) + 77
    if torch.cuda.mem_get_info()[0] < batch * 16 * dtype.itemsize * 3 + (2 << 30):
        pytest.skip("needs 28 GB")
    a, b = torch.empty((2, batch, 4, 4), dtype=dtype, device="cuda").view(torch.int16).random_().view(dtype)
    out = samebits.bmm(a, b)
    at = torch.tensor([0, 1, batch // 2, (1 << 27) - 1, 1 << 27, batch - 2, batch - 1])
    some = a[at.cuda()].cpu(), b[at.cuda()].cpu()
    contract = FMA if dtype is F32 else TENSOR_CORE.on(FAMILY)
    assert_same_bits(out[at.cuda()], samebits.bmm(*some, contract=contract))
    half = samebits.bmm(a[batch // 2 :], b[batch // 2 :])
    assert torch.equal(bits(half), bits(out[batch // 2 :]))


@pytest.mark.counts_calls
def test_tiny_batches_are_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and gradients alike."""
    launched: list[str] = []
    launch = runtime.Kernel.launch

    def noted(self: runtime.Kernel, grid: tuple[int, int, int], *rest: Any) -> None:
        launched.append(self.spec.source)
        launch(self, grid, *rest)

    monkeypatch.setattr(runtime.Kernel, "launch", noted)
    for dtype in (BF16, F32):
        a, b = (t.requires_grad_() for t in tiny((12, 20, 16), dtype, "normal", 9))
        out = samebits.bmm(a, b)
        torch.autograd.grad(out, (a, b), torch.ones_like(out))
    assert launched == ["tiny.cu"] * 6
