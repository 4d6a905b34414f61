"""Grouped products in FP8: each row has the bits of ``scaled_mm`` with its group's matrix."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import ScalingType

import samebits
from samebits.testing import assert_same_bits, values
from tests.contract.test_fp8 import FORMATS, expected, operand, scales
from tests.support.devices import DEVICES

ROWS, GROUPS, BLOCKS = ScalingType.RowWise, ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def offsets(ends: list[int], device: str = "cpu") -> Tensor:
    return torch.tensor(ends, dtype=torch.int32, device=device)


def of_groups(ends: list[int], rows: int) -> list[int | None]:
    """The group of each row."""
    return [next((g for g, end in enumerate(ends) if row < end), None) for row in range(rows)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("left", "right"), [("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e4m3")])
@pytest.mark.parametrize("recipes", [(GROUPS, BLOCKS), (GROUPS, GROUPS), (ROWS, ROWS)])
def test_against_the_naive_implementation(
    recipes: tuple[Any, Any], left: str, right: str, device: str
) -> None:
    """Empty groups, special values, and rows of none, which are NaN in the operand."""
    ends, rows, n, k = [0, 2, 2, 5], 7, 130 if recipes[1] is BLOCKS else 3, 200
    a, b = (
        operand(rows, k, FORMATS[left], 0, special=True),
        operand(4 * n, k, FORMATS[right], 1, special=True),
    )
    a.view(torch.uint8)[5:] = 0x7F
    b, wide = b.view(4, n, k), recipes[0] is ROWS
    of_a = scales(rows, 1 if wide else 2, seed=2)
    of_b = scales(4, -(-n // 128) if recipes[1] is BLOCKS else n, 1 if wide else 2, seed=3)
    bias = values("normal", (4, n), torch.float32, 4)
    given_b = of_b.mT if recipes[1] is BLOCKS else of_b[..., 0] if wide else of_b
    on_device = [t.to(device) for t in (a, b, of_a, given_b, bias)]
    found = samebits.scaled_grouped_mm(
        *(on_device[0], on_device[1].mT, on_device[2], recipes[0], on_device[3], recipes[1]),
        offs=offsets(ends, device),
        bias=on_device[4],
        output_dtype=torch.float32,
    )
    spread = of_b.repeat_interleave(128, 1)[:, :n] if recipes[1] is BLOCKS else of_b
    for row, g in enumerate(of_groups(ends, rows)):
        want = torch.zeros(1, n)
        if g is not None:
            one = a[row : row + 1], b[g], of_a[row : row + 1].expand(1, 2), spread[g].expand(n, 2)
            want = expected(*one, torch.float32, bias[g])
        assert_same_bits(found[row : row + 1], want, str(row))


def quantized(groups: int, rows: int, n: int, k: int, device: str) -> tuple[Tensor, ...]:
    """Rows and weights with their scales."""
    x = values("normal", (rows, k), torch.bfloat16, 0).to(device)
    weight = values("normal", (groups, n, k), torch.bfloat16, 1).to(device)
    a, of_a = samebits.quantize(x)
    b, of_b = samebits.quantize(weight, block=(128, 128))
    return a, b, of_a, of_b


@pytest.mark.parametrize("device", DEVICES)
@given(data=st.data())
def test_rows_are_those_of_scaled_mm(device: str, data: st.DataObject) -> None:
    """Any groups, in both forms."""
    groups, n, k = data.draw(st.integers(1, 5)), data.draw(st.sampled_from([8, 40, 136])), 144
    counts = data.draw(st.lists(st.integers(0, 70), min_size=groups, max_size=groups))
    height = max(counts) + data.draw(st.integers(0, 2)) or 1
    ends = torch.tensor(counts).cumsum(0).tolist()
    rows = ends[-1] + data.draw(st.integers(0, 3))
    a, b, of_a, of_b = quantized(groups, rows, n, k, device)
    recipes = (of_a, GROUPS, of_b.mT, BLOCKS)
    out = samebits.scaled_grouped_mm(a, b.mT, *recipes, offs=offsets(ends, device))
    masked, scale = torch.full((groups, height, k), torch.nan), torch.full((groups, height, 2), torch.nan)
    masked, scale = masked.to(E4M3).to(device), scale.to(device)
    starts = [0, *ends[:-1]]
    for g, (start, count) in enumerate(zip(starts, counts, strict=True)):
        here = slice(start, start + count)
        masked[g, :count], scale[g, :count] = a[here], of_a[here]
        want = samebits.scaled_mm(a[here], b[g].mT, of_a[here], GROUPS, of_b[g].mT, BLOCKS)
        assert_same_bits(out[here], want)
    assert_same_bits(out[ends[-1] :], torch.zeros_like(out[ends[-1] :]))
    found = samebits.scaled_grouped_mm(
        masked, b.mT, scale, GROUPS, of_b.mT, BLOCKS, offs=offsets(counts, device)
    )
    for g, (start, count) in enumerate(zip(starts, counts, strict=True)):
        assert_same_bits(found[g, :count], out[start : start + count])
        assert_same_bits(found[g, count:], torch.zeros_like(found[g, count:]))


@pytest.mark.parametrize("process", [False, True])
def test_under_the_mode(process: bool) -> None:
    """``F.scaled_grouped_mm`` is this library's."""
    a, b, *_ = quantized(3, 9, 8, 144, "cpu")
    of_b = torch.rand(3, 8) + 0.5
    given: Any = (a, b.mT, torch.rand(9) + 0.5, ROWS, of_b, ROWS)
    offs = offsets([2, 2, 8])
    want = samebits.scaled_grouped_mm(*given, offs=offs)
    if process:
        samebits.enable_batch_invariant_mode("error")
    try:
        with nullcontext() if process else samebits.batch_invariant("error"):
            assert_same_bits(torch.nn.functional.scaled_grouped_mm(*given, offs=offs), want)
    finally:
        if process:
            samebits.disable_batch_invariant_mode()


GIVEN: dict[str, Any] = {
    "mat_a": torch.zeros(6, 200, dtype=E4M3),
    "mat_b": torch.zeros(2, 200, 130, dtype=E5M2),
    "scale_a": torch.ones(6, 2),
    "scale_recipe_a": GROUPS,
    "scale_b": torch.ones(2, 2, 2),
    "scale_recipe_b": BLOCKS,
    "offs": offsets([1, 6]),
}


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"mat_a": torch.zeros(6, 200)}, TypeError, "mat_a: expected a dense tensor of torch.float8_e4m3fn"),
        ({"mat_b": torch.zeros(200, 130, dtype=E4M3)}, ValueError, "mat_b: expected 3-D"),
        ({"mat_a": torch.zeros(3, 4, 200, dtype=E4M3)}, ValueError, r"\[T, K\] or \[G, M, K\], and"),
        ({"mat_a": torch.zeros(6, 100, dtype=E4M3)}, ValueError, r"\[T, K\] or \[G, M, K\], and"),
        ({"scale_recipe_a": BLOCKS}, ValueError, "depends on the others in the batch"),
        ({"scale_recipe_b": ScalingType.TensorWise}, ValueError, "scale_recipe_b: expected one of RowWise"),
        ({"scale_a": torch.ones(6, 1)}, ValueError, r"scale_a: expected shape \(6, 2\), got \(6, 1\)"),
        ({"scale_b": torch.ones(2, 2)}, ValueError, r"expected shape \(2, 2, 2\) or \(2, 4, 2\)"),
        ({"offs": torch.tensor([1, 6])}, TypeError, "offs: expected a dense tensor of torch.int32, got"),
        ({"offs": offsets([6])}, ValueError, r"offs: expected shape \(2,\), got \(1,\)"),
        ({"offs": offsets([3, 2])}, ValueError, "offs: expected ends that never decrease, from 0 to 6"),
        ({"offs": offsets([3, 7])}, ValueError, "offs: expected ends that never decrease, from 0 to 6"),
        (
            {
                "mat_a": torch.zeros(2, 3, 200, dtype=E4M3),
                "scale_a": torch.ones(2, 3, 2),
                "offs": offsets([4, 0]),
            },
            ValueError,
            "offs: expected numbers of rows from 0 to 3, got 4 at position 0",
        ),
        ({"bias": torch.ones(130)}, ValueError, r"bias: expected shape \(2, 130\), got \(130,\)"),
        ({"bias": torch.ones(2, 130).requires_grad_()}, ValueError, "bias: .* FP8 values have no gradients"),
        ({"output_dtype": torch.float64}, TypeError, "output_dtype: expected bfloat16, float16 or float32"),
    ],
)
def test_refuses(change: dict[str, object], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        samebits.scaled_grouped_mm(**(GIVEN | change))


def test_nothing_to_compute() -> None:
    none: dict[str, Any] = {
        "mat_a": GIVEN["mat_a"][:0],
        "scale_a": GIVEN["scale_a"][:0],
        "offs": offsets([0, 0]),
    }
    assert samebits.scaled_grouped_mm(**(GIVEN | none)).shape == (0, 130)
    none = {"mat_b": GIVEN["mat_b"][:0], "scale_b": GIVEN["scale_b"][:0], "offs": offsets([])}
    assert_same_bits(samebits.scaled_grouped_mm(**(GIVEN | none)), torch.zeros(6, 130, dtype=torch.bfloat16))
