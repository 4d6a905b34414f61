"""Hopper's float32 outputs: how they are stored depends on where they lie, what is stored does not."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from samebits import TENSOR_CORE
from samebits.backends.cuda.products import (
    grouped_sm90,
    kinds_sm90,
    scaled_sm90,
    segmented_sm90,
    tensor_core_sm90,
)
from samebits.backends.cuda.products.tensor_core_sm90 import TENSOR_CORE_SM90, Sm90Variant
from samebits.backends.grouped import GroupedOperands, GroupedProduct
from samebits.backends.product import Matrix, Operands, Product
from samebits.backends.reference import matmul as reference
from samebits.testing import assert_same_bits, values
from samebits.tools.verify import takes
from tests.support.cubins import resources
from tests.support.devices import ARCH, FAMILY

F32, BF16 = torch.float32, torch.bfloat16
needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None, reason="cuda-core is not installed (samebits[cuda])"
)
Kinds = list[Any]


def kinds(schedules: Any) -> Kinds:
    """One of each tile. What is transposed is stored by elements."""
    return list({(s.block_m, s.block_n, s.share): s for s in schedules if not s.swap}.values())


PLAIN = kinds(kinds_sm90.catalogue(False, False))
SEGMENTED = kinds(segmented_sm90.catalogue(Sm90Variant(BF16, F32, False, False)))
GROUPED = kinds(s for s in grouped_sm90.GROUPED_SM90.catalogue if s.fits(False, False))


def name(s: Any) -> str:
    return f"{s.block_m}x{s.block_n}-{s.share}"


@pytest.mark.parametrize(
    ("dtype", "misalignment", "columns", "row", "matrix", "aligned"),
    [
        (F32, 0, 12, 12, 120, True),
        (F32, 0, 12, 16, 124, True),
        (F32, 4, 12, 12, 120, False),
        (F32, 8, 12, 12, 120, False),  # pairs of them are aligned, and that is not enough
        (F32, 0, 10, 12, 120, False),
        (F32, 0, 12, 14, 140, False),
        (F32, 0, 12, 13, 132, False),
        (F32, 0, 12, 12, 122, False),
        (BF16, 0, 16, 16, 160, True),
        (BF16, 8, 16, 16, 160, False),
        (BF16, 0, 12, 16, 160, False),
        (BF16, 0, 16, 20, 200, False),
        (BF16, 0, 16, 16, 164, False),
    ],
)
def test_outputs_of_whole_units(
    dtype: torch.dtype, misalignment: int, columns: int, row: int, matrix: int, aligned: bool
) -> None:
    out = Matrix(dtype, (2, 10, columns), (matrix, row, 1), misalignment)
    a = Matrix(BF16, (2, 10, 64), (640, 64, 1))
    b = Matrix(BF16, (2, 64, columns), (64 * columns, 1, 64))
    p = Product("mma", 0, a, b, out)
    assert tensor_core_sm90.variant(p).aligned == aligned
    terms = GroupedProduct(
        "mma", 0, Matrix(BF16, (10, 64), (1, 16)), Matrix(BF16, (64, columns), (columns, 1)), out
    )
    assert grouped_sm90.variant(terms).aligned == aligned
    of_a, of_b, of_out = (x._replace(shape=x.shape[1:], strides=x.strides[1:]) for x in (a, b, out))
    first = Product("mma", 0, of_a, of_b, of_out)
    if aligned or matrix in (122, 164):  # where there is one matrix, no distance to the next counts
        assert tensor_core_sm90.variant(first).aligned
    scaled = scaled_sm90.Scaled(
        *(0, 10, columns, 128, torch.float8_e4m3fn, torch.float8_e4m3fn, 128, 128, (1, 1), (1, 1), True),
        *(dtype, row, misalignment),
    )
    assert scaled.aligned == tensor_core_sm90.variant(first).aligned


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize("bias", [None, BF16])
@pytest.mark.parametrize("aligned", [True, False])
def test_they_compile_without_spills(aligned: bool, bias: torch.dtype | None) -> None:
    """Each tile with two of the four, in turns."""
    v = Sm90Variant(BF16, F32, False, False, bias_dtype=bias, aligned=aligned)
    for s in PLAIN[aligned ^ (bias is None) :: 2]:
        cubin = resources(tensor_core_sm90.spec(v, s), "sm_90a")
        assert cubin.spill_bytes == cubin.local_bytes == 0, s
        assert not cubin.advice, s


# On a GPU.

needs_hopper = pytest.mark.skipif(ARCH.own != "sm90", reason="runs on Hopper alone")


def operands(s: Any, columns: int, k: int, batch: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
    """Of two rows of tiles and of two columns, the last of which are not whole."""
    m, n = s.block_m + 21, s.block_n + columns
    a, b = (values("normal", (*batch, size, k), BF16, size, "cuda") for size in (m, n))
    return a, b.mT


def places(shape: tuple[int, ...]) -> Iterator[tuple[Tensor, Callable[[Tensor], Tensor]]]:
    """Memory full of NaN, and a view of it: at each misalignment, with even and odd strides."""
    *batch, m, n = shape
    for offset, more, gap in itertools.product(range(5), (0, 1, 2, 4), (0, 2, 4) if batch else (0,)):
        pitch = n + more
        strides = (m * pitch + gap, pitch, 1)[-len(shape) :]
        memory = torch.full((8 + offset + (*batch, 1)[0] * (m * pitch + gap) + 8,), torch.nan, device="cuda")
        yield memory, partial(torch.as_strided, size=shape, stride=strides, storage_offset=8 + offset)


def check(
    shape: tuple[int, ...], run: Callable[[Tensor], bool], want: Tensor, start: Tensor | None = None
) -> None:
    """`run` computes into an output, if it takes it, the same at every place, and nothing around it."""
    taken = 0
    for memory, view in places(shape):
        expected, out = memory.clone(), view(memory)
        view(expected).copy_(want)
        if start is not None:
            out.copy_(start)
        if run(out):
            taken += 1
            assert_same_bits(memory, expected, f"{out.data_ptr() % 16} {out.stride()}")
    assert taken


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("s", PLAIN, ids=name)
@pytest.mark.parametrize("how", ["plain", "bias", "accumulate", "batch"])
def test_products(s: Any, how: str) -> None:
    for columns in (12, 14, 19):
        a, b = operands(s, columns, 72, (2,) if how == "batch" else ())
        bias = values("normal", (b.shape[-1],), BF16, 3, "cuda") if how == "bias" else None
        shape = (*a.shape[:-1], b.shape[-1])
        start = values("normal", shape, F32, 4, "cuda") if how == "accumulate" else None
        contract = TENSOR_CORE.on(FAMILY).key
        if start is None:
            on_cpu = None if bias is None else bias.cpu()
            want = reference.matmul(a.cpu(), b.cpu(), bias=on_cpu, out_dtype=F32, contract=contract)
        else:
            acc, x, y = start.cpu()[None], a.cpu()[None, None], b.cpu()[None, None]
            want = reference.addbmm(acc, x, y, None, out_dtype=F32, contract=contract)[0]

        def run(
            out: Tensor,
            a: Tensor = a,
            b: Tensor = b,
            bias: Tensor | None = bias,
            start: Tensor | None = start,
        ) -> bool:
            x = Operands(a, b, out, bias, None if start is None else out, sequences=start is not None)
            if not takes(TENSOR_CORE_SM90, Product.of(x, "mma"), s):
                return False
            TENSOR_CORE_SM90.run(x, s)
            return True

        check(shape, run, want, start)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("s", SEGMENTED, ids=name)
def test_sums_in_segments(s: Any) -> None:
    for columns, segments in ((12, 4), (14, 8), (20, 8)):
        a, b = operands(s, columns, 24 * segments)
        key = TENSOR_CORE.on(FAMILY).segmented(segments).key
        want = reference.matmul(a.cpu(), b.cpu(), bias=None, out_dtype=F32, contract=key)

        def run(out: Tensor, a: Tensor = a, b: Tensor = b, segments: int = segments) -> bool:
            x = Operands(a, b, out)
            segmented_sm90.plan(Product.of(x, "mma"), segments, s).run(x)
            return True

        check(tuple(want.shape), run, want)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("s", GROUPED, ids=name)
def test_groups_of_rows(s: Any) -> None:
    """The first group ends within a tile, and the rows of the last one begin anywhere."""
    for columns in (12, 14):
        a, b = operands(s, columns, 72)
        ends = (37, 37, len(a) - 3)
        weights = torch.stack([b, -b, b]).mT.contiguous().mT
        product = reference.matmul(
            a.cpu(), b.cpu(), bias=None, out_dtype=F32, contract=TENSOR_CORE.on(FAMILY).key
        )
        product[ends[-1] :] = 0
        offs = torch.tensor(ends, dtype=torch.int32, device="cuda")

        def run(out: Tensor, a: Tensor = a, weights: Tensor = weights, offs: Tensor = offs) -> bool:
            x = GroupedOperands(a, weights, out, offs)
            p = GroupedProduct.of(x, "mma")
            if not grouped_sm90.GROUPED_SM90.supports(p):
                return False
            grouped_sm90.GROUPED_SM90.run(x, s)
            return True

        check(tuple(product.shape), run, product)
