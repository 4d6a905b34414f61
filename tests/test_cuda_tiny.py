"""Tiny batched products: the kernel compiles everywhere without spills and, on a GPU, has the right bits."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import samebits
from samebits import FMA, TENSOR_CORE
from samebits.backends.cuda import bmm_tiny, runtime
from samebits.backends.cuda.bmm_tiny import SCHEDULES, Product, Schedule, bmm, choose_schedule
from samebits.backends.reference import matmul as reference
from samebits.testing import KINDS, assert_same_bits, bits, values
from tests.devices import FAMILY

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None, reason="cuda-core is not installed (samebits[cuda])"
)

# (m, k, n); those that are no multiples of four share a kernel
SHAPES = (
    (1, 1, 1), (4, 4, 4), (8, 8, 8), (5, 5, 5), (12, 64, 12), (12, 12, 64), (16, 64, 16), (32, 32, 32),
    (64, 64, 64), (7, 33, 9), (17, 16, 3), (64, 3, 1), (1, 64, 64), (63, 61, 62), (33, 15, 40), (3, 0, 5),
    (8, 0, 8), (24, 36, 28), (8, 64, 4), (2, 64, 2), (64, 1, 64), (4, 8, 8), (8, 4, 4), (12, 4, 20),
)  # fmt: skip

# operands' and output's dtypes, and whether under FMA
DTYPES = (
    (BF16, BF16, BF16, False),
    (F16, F16, F32, False),
    (F32, F32, F32, True),
    (BF16, BF16, BF16, True),
    (F16, F32, F16, True),
)


INFO = runtime.DeviceInfo(0, "NVIDIA H200", (9, 0), 132, 227 << 10, 60 << 20)
SMALLEST = runtime.DeviceInfo(0, "NVIDIA T4", (7, 5), 40, 64 << 10, 4 << 20)


def products(sizes: Iterable[int]) -> Iterator[Product]:
    shapes = itertools.product(sizes, repeat=3)
    for (m, n, k), layout, dtypes in itertools.product(
        shapes, itertools.product((True, False), repeat=2), DTYPES
    ):
        a, b, out, fused = dtypes
        yield Product(m, n, k, a, b, out, *layout, fused)


def runs(s: Schedule, p: Product, vectors: tuple[int, int, int]) -> bool:
    return s.staged or (p.compiled_in and p.direct(s, vectors))


@needs_compiler
@pytest.mark.parametrize("arch", runtime.ARCHITECTURES)
def test_compiles_without_spills(arch: str) -> None:
    """Each schedule with some of the products; on other architectures than the first, each tenth."""
    some = list(products((4, 63, 64)))
    pairs = [(s, p) for i, s in enumerate(SCHEDULES) for p in some[i * 7 % 30 :: 31]]
    for i, (s, p) in enumerate(pairs[:: 1 if arch == "sm_90a" else 10]):
        if arch == "sm_75" and not p.fused:
            continue
        dense = p.compiled_in and (i % 2 == 1 or not s.staged)
        vectors = (16, 16, 16) if dense else (p.a.itemsize, p.b.itemsize, p.out.itemsize)
        if not runs(s, p, vectors):
            continue
        broadcast = (i % 5 == 0, i % 7 == 0) if dense else None
        spec = bmm_tiny.kernel_spec(s, p, vectors, broadcast, accumulate=p.out is F32, programmatic=True)
        cubin = runtime.compile(spec, arch)
        assert cubin.spill_bytes == cubin.local_bytes == 0, (s, p)
        assert cubin.registers * s.threads <= 65536, (s, p)


@needs_compiler
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("size", [4, 8, 16, 64])
def test_choices_compile_without_spills(size: int, arch: str) -> None:
    for p in products((size,)):
        if not p.a_k_major or (p.b_k_major and arch != "sm_90a"):
            continue
        s = choose_schedule(p, 4096, 132)
        spec = bmm_tiny.kernel_spec(s, p, (16, 16, 16), (False, False), accumulate=False, programmatic=True)
        cubin = runtime.compile(spec, arch)
        assert cubin.spill_bytes == cubin.local_bytes == 0, (s, p)


@pytest.mark.parametrize("info", [INFO, SMALLEST], ids=lambda i: i.name)
def test_a_block_holds_at_least_one_matrix(info: runtime.DeviceInfo) -> None:
    for p, batch in itertools.product(products((1, 4, 17, 64)), (2, 1000, 1 << 24)):
        s = replace(choose_schedule(p, batch, info.sm_count), staged=True)
        spec = bmm_tiny.kernel_spec(s, p, (4, 4, 4), None, accumulate=False, programmatic=True)
        assert p.smem + bmm_tiny.SLACK <= spec.smem <= info.max_smem


def blank(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("a", "b", "dense"),
    [
        (blank((9, 8, 8), BF16), blank((9, 8, 8), BF16), True),
        (blank((9, 8, 8), BF16).mT, blank((9, 8, 8), BF16).mT, True),
        (blank((9, 8, 8), F32), blank((1, 8, 8), F32), True),
        (blank((1, 8, 8), F32).expand(9, 8, 8), blank((9, 8, 8), F32), True),
        (blank((9, 8, 8), F32)[1:8], blank((7, 8, 8), F32), True),
        (blank((18, 8, 8), F32)[::2], blank((9, 8, 8), F32), False),
        (blank((9, 8, 12), F32)[..., :8], blank((9, 8, 8), F32), False),
        (blank((9, 8, 8), BF16), blank((9, 9, 8), BF16)[:, :8], False),
        (blank((9, 6, 8), F32), blank((9, 8, 8), F32), False),
        (blank((9, 8, 8), BF16).permute(1, 2, 0), blank((8, 9, 8), BF16), False),
        (blank((9, 8, 8), BF16)[..., :1].expand(9, 8, 8), blank((9, 8, 8), BF16), False),
        (blank((9, 8, 8), F32), blank((9, 8, 8), F32)[..., :1].expand(9, 8, 8), False),
        (blank((9, 8, 8), F32)[:, :1].expand(9, 8, 8), blank((9, 8, 8), F32), False),
    ],
)
def test_only_dense_matrices_go_straight_into_registers(
    a: Tensor, b: Tensor, dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs: list[runtime.KernelSpec] = []
    monkeypatch.setattr(runtime, "device_info", lambda index: INFO)
    monkeypatch.setattr(runtime, "load", lambda spec, device: specs.append(spec))
    fused = a.dtype is F32
    monkeypatch.setattr(bmm_tiny.matmul_fma if fused else bmm_tiny.matmul_sm80, "check", lambda *args: None)
    batch = max(len(a), len(b))
    for s in SCHEDULES:
        p = bmm_tiny.plan(a, b, blank((batch, a.shape[1], b.shape[2]), a.dtype), fused=fused, schedule=s)
        constants = dict(specs[-1].constants)
        assert constants["DENSE"] == dense
        whole = not fused or a.shape[1] % s.tile[0] == 0
        assert constants["STAGED"] == (s.staged or not dense or not whole)
        blocks, per_block = p.grid[0], p.sizes[1]
        assert (blocks - 1) * per_block < batch <= blocks * per_block


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("shape", "schedule", "parts"),
    [
        ((64, 64, 64), None, 2),
        ((16, 32, 32), Schedule(128, (1, 4), 3, parts=2), 2),  # shared memory would hold three
        ((64, 20, 64), Schedule(128, (4, 8), 1, parts=2), 1),  # half of k is no multiple of four
        ((32, 64, 32), Schedule(128, (4, 8), 1, parts=2), 1),  # threads without a tile
    ],
)
def test_a_block_that_copies_k_in_parts_has_one_matrix(
    shape: tuple[int, int, int],
    schedule: Schedule | None,
    parts: int,
    shared: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    specs: list[runtime.KernelSpec] = []
    monkeypatch.setattr(runtime, "device_info", lambda index: INFO)
    monkeypatch.setattr(runtime, "load", lambda spec, device: specs.append(spec))
    monkeypatch.setattr(bmm_tiny.matmul_fma, "check", lambda *args: None)
    m, k, n = shape
    a, b, out = blank((1 if shared else 9, m, k), F32), blank((9, k, n), F32), blank((9, m, n), F32)
    schedule = schedule or replace(
        choose_schedule(Product(m, n, k, F32, F32, F32, True, False, True), 9, 1), per_block=4
    )
    plan = bmm_tiny.plan(a, b, out, fused=True, schedule=schedule)
    assert dict(specs[-1].constants)["PARTS"] == parts
    assert parts == 1 or (plan.grid[0], plan.sizes[1]) == (9, 1)


def strided(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype = BF16, offset: int = 0
) -> Tensor:
    reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    return torch.empty(offset + 1 + reach, dtype=dtype).as_strided(shape, strides, offset)


@pytest.mark.parametrize(
    ("x", "expected"),  # of an operand [batch, row, k]: whether its lines run along k, and the vectors' bytes
    [
        (strided((5, 8, 16), (128, 16, 1)), (True, 16)),
        (strided((5, 8, 12), (96, 12, 1)), (True, 8)),
        (strided((5, 8, 16), (128, 1, 8)), (False, 16)),
        (strided((5, 8, 16), (128, 16, 1), offset=2), (True, 4)),
        (strided((5, 8, 16), (128, 16, 1), offset=1), (True, 2)),
        (strided((5, 8, 16), (129, 16, 1)), (True, 2)),
        (strided((5, 8, 15), (120, 15, 1)), (True, 2)),
        (strided((5, 8, 15), (120, 15, 1), F32), (True, 4)),
        (strided((5, 8, 16), (256, 32, 2)), (True, 2)),
        (strided((5, 8, 16), (0, 16, 1)), (True, 16)),
        (strided((5, 8, 16), (8, 1, 40)), (False, 16)),
        (strided((5, 8, 16), (1, 80, 5)), (True, 2)),
        (strided((5, 8, 1), (8, 1, 1)), (False, 16)),
        (strided((5, 8, 16), (8, 1, 0)), (False, 16)),
        (strided((5, 8, 16), (16, 0, 1)), (True, 16)),
        (strided((5, 8, 16), (0, 0, 0)), (True, 2)),
    ],
)
def test_layout(x: Tensor, expected: tuple[bool, int]) -> None:
    if x.data_ptr() % 16 not in (0, 2, 4):
        pytest.skip("the allocator gave odd memory")
    layout = bmm_tiny._layout(x, 1, 2)
    assert layout[:2] == expected


# Below: on a GPU.


def poison(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device="cuda")


def transposed(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


def gaps(x: Tensor) -> Tensor:
    batch, rows, columns = x.shape
    return poison((2 * batch, 2 * rows, 3 * columns + 1), x.dtype)[::2, ::2, 1::3].copy_(x)


def odd(x: Tensor) -> Tensor:
    batch, rows, columns = x.shape
    return poison((batch, rows + 1, columns + 3), x.dtype)[:, 1:, 1 : columns + 1].copy_(x)


def pitched(x: Tensor) -> Tensor:
    batch, rows, columns = x.shape
    return poison((batch, rows, columns // 8 * 8 + 16), x.dtype)[..., :columns].copy_(x)


def batch_last(x: Tensor) -> Tensor:
    return x.permute(1, 2, 0).contiguous().permute(2, 0, 1)


PLACES: tuple[Callable[[Tensor], Tensor], ...] = (
    Tensor.contiguous,
    transposed,
    gaps,
    odd,
    pitched,
    batch_last,
)


def check(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    *,
    fused: bool,
    acc: Tensor | None = None,
    closing: bool = False,
    schedule: Schedule | None = None,
) -> None:
    """Hold the kernel to the CPU reference."""
    if acc is not None:
        out.copy_(acc)
    bmm(a, b, out, fused=fused, accumulate=acc is not None, closing=closing and fused, schedule=schedule)
    key = (FMA if fused else TENSOR_CORE.on(FAMILY)).key
    a, b = a.cpu(), b.cpu()
    if closing:
        sequences = (t.expand(len(out), *t.shape[1:])[:, None] for t in (a, b))
        start = None if acc is None else acc.cpu()
        want = reference.addbmm(start, *sequences, None, out_dtype=out.dtype, contract=key)
    else:
        want = reference.matmul(a, b, bias=None, out_dtype=out.dtype, contract=key)
    assert_same_bits(out, want, f"{a.shape} {a.stride()} {b.stride()} {out.stride()} {schedule}")


def operands(
    shape: tuple[int, int, int], dtypes: tuple[torch.dtype, torch.dtype], kind: str, batch: int, seed: int = 0
) -> tuple[Tensor, Tensor]:
    m, k, n = shape
    a = values(kind, (batch, m, k), dtypes[0], seed, "cuda")
    return a, values(kind, (batch, k, n), dtypes[1], seed + 1, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_shapes_and_schedules(shape: tuple[int, int, int]) -> None:
    m, _, n = shape
    first = sum(shape)
    for i, (a, b, out, fused) in enumerate(DTYPES, first):
        for j, schedule in enumerate((None, *SCHEDULES), i):
            batch = (2, 3, 37, 100, 5)[j % 5]
            x, y = operands(shape, (a, b), KINDS[j % len(KINDS)], batch, j)
            check(x, y, poison((batch, m, n), out), fused=fused, closing=j % 3 == 0, schedule=schedule)


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(24, 36, 28), (8, 8, 8), (4, 4, 4), (12, 20, 16), (7, 33, 9)], ids=str)
def test_layouts(
    shape: tuple[int, int, int], dtypes: tuple[torch.dtype, torch.dtype, torch.dtype, bool]
) -> None:
    m, _, n = shape
    a_dtype, b_dtype, out_dtype, fused = dtypes
    a, b = operands(shape, (a_dtype, b_dtype), "normal", 5)
    turns = itertools.cycle(PLACES)
    for place_a, place_b in itertools.product(PLACES, PLACES):
        check(place_a(a), place_b(b), next(turns)(poison((5, m, n), out_dtype)), fused=fused)
    for one, other in ((a[:1], b), (a[:1].expand(a.shape), b), (a, b[:1]), (a, b[2:3].expand(b.shape))):
        check(one, other, poison((5, m, n), out_dtype), fused=fused)
    for one, other in itertools.product((a, a[..., :1], a[:, :1]), (b, b[..., :1], b[:, :1])):
        check(one.expand(a.shape), other.expand(b.shape), poison((5, m, n), out_dtype), fused=fused)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fused", [False, True])
def test_accumulates(kind: str, fused: bool) -> None:
    for shape, dtype in itertools.product(((12, 20, 16), (5, 7, 3), (8, 8, 8), (9, 0, 4)), (BF16, F16, F32)):
        if dtype is F32 and not fused:
            continue
        a, b = operands(shape, (dtype, dtype), kind, 6)
        acc = values(kind, (6, shape[0], shape[2]), F32, 9, "cuda")
        for place in PLACES:
            check(a, b, place(poison(tuple(acc.shape), F32)), fused=fused, acc=acc, closing=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_no_element_depends_on_the_batch(dtype: torch.dtype) -> None:
    """Over batch sizes and positions, beside NaN and infinity; the general kernels give the same bits."""
    for m, k, n in ((4, 4, 4), (8, 8, 8), (12, 64, 12), (5, 33, 7), (64, 64, 64)):
        a, b = operands((m, k, n), (dtype, dtype), "wide", 9000 // m)
        full = samebits.bmm(a, b)
        for batch in (1, 2, 3, 7, 64, 133, len(a) - 1):
            at = (len(a) - batch) * 3 // 4
            here = slice(at, at + batch)
            assert_same_bits(samebits.bmm(a[here], b[here]), full[here], f"{batch} from {at}")
        company = values("special", tuple(a.shape), dtype, 7, "cuda")
        company[1::3] = a[1::3]
        assert_same_bits(samebits.bmm(company, b)[1::3], full[1::3], "beside NaN and inf")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_more_than_two_to_the_31_elements(dtype: torch.dtype) -> None:
    batch = (1 << 27) + 77
    if torch.cuda.mem_get_info()[0] < batch * 16 * dtype.itemsize * 3 + (2 << 30):
        pytest.skip("needs 28 GB")
    a, b = torch.empty((2, batch, 4, 4), dtype=dtype, device="cuda").view(torch.int16).random_().view(dtype)
    out = bmm_into(a, b)
    at = torch.tensor([0, 1, batch // 2, (1 << 27) - 1, 1 << 27, batch - 2, batch - 1])
    some = a[at.cuda()].cpu(), b[at.cuda()].cpu()
    contract = FMA if dtype is F32 else TENSOR_CORE.on(FAMILY)
    assert_same_bits(out[at.cuda()], samebits.bmm(*some, contract=contract))
    half = samebits.bmm(a[batch // 2 :], b[batch // 2 :])
    assert torch.equal(bits(half), bits(out[batch // 2 :]))


def bmm_into(a: Tensor, b: Tensor) -> Tensor:
    out = poison((len(a), a.shape[1], b.shape[2]), a.dtype)
    bmm(a, b, out, fused=a.dtype is F32)
    return out


@pytest.mark.gpu
def test_other_sizes_are_refused() -> None:
    for m, k, n in ((65, 4, 4), (4, 65, 4), (4, 4, 65)):
        with pytest.raises(ValueError, match="sizes up to 64"):
            bmm_into(*operands((m, k, n), (BF16, BF16), "normal", 2))


@pytest.mark.gpu
def test_operations_come_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and gradients of a tiny batch are one launch of this kernel each."""
    launched: list[str] = []
    launch = runtime.Kernel.launch

    def noted(self: runtime.Kernel, grid: tuple[int, int, int], *rest: Any) -> None:
        launched.append(self.spec.source)
        launch(self, grid, *rest)

    monkeypatch.setattr(runtime.Kernel, "launch", noted)
    for dtype in (BF16, F32):
        a, b = (t.requires_grad_() for t in operands((12, 20, 16), (dtype, dtype), "normal", 9))
        out = samebits.bmm(a, b)
        torch.autograd.grad(out, (a, b), torch.ones_like(out))
    assert launched == ["bmm_tiny.cu"] * 6
