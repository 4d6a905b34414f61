"""Block-scaled FP8: recorded chains, a second implementation, and rows that do not depend on the batch."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import ScalingType

import samebits
from samebits.backends.reference.matmul import carry_on
from samebits.contract import FP8
from samebits.testing import KINDS, assert_same_bits, bits, values
from tests.support import ROOT, naive_fp8
from tests.support.devices import DEVICES

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
NAMES = {dtype: name for name, dtype in FORMATS.items()}
PAIRS = list(itertools.product(FORMATS, repeat=2))
ROWS, GROUPS, BLOCKS = ScalingType.RowWise, ScalingType.BlockWise1x128, ScalingType.BlockWise128x128

with np.load(ROOT / "tests" / "data" / "fp8_chain_sm90.npz") as _file:
    _RECORDED = dict(_file)
CASES = sorted({key.rpartition("/")[0] for key in _RECORDED})


def recorded(case: str) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """a[48, K], b[64, K], start and out[48, 64] of a case."""
    left, right = case.split()[:2]
    a, b = (
        torch.from_numpy(_RECORDED[f"{case}/{x}"]).view(FORMATS[f])
        for x, f in zip("ab", (left, right), strict=True)
    )
    start = _RECORDED.get(f"{case}/start")
    start = None if start is None else torch.from_numpy(start).view(torch.float32)
    return a, b, start, torch.from_numpy(_RECORDED[f"{case}/out"]).view(torch.float32)


def operand(rows: int, k: int, dtype: torch.dtype, seed: int, *, special: bool = False) -> Tensor:
    """Bytes of every kind: wide exponents, subnormals, zeros; with `special` a few NaN and infinities."""
    g = torch.Generator().manual_seed(seed)
    top = 0x7F if dtype == torch.float8_e4m3fn else 0x7C
    codes = torch.randint(0, top, (rows, k), generator=g)
    codes = torch.where(torch.rand(rows, k, generator=g) < 0.1, 0, codes)
    if special:
        codes = torch.where(torch.rand(rows, k, generator=g) < 0.004, top, codes)
    codes += 128 * (torch.rand(rows, k, generator=g) < 0.5)
    return codes.to(torch.uint8).view(dtype)


def scales(*size: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.exp2(4 * torch.randn(size, generator=g))


def expected(
    a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, out: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """``a[M, K] @ b[N, K].T`` by tests/support/naive_fp8.py; a scale for every row and block."""
    left, right, name = NAMES[a.dtype], NAMES[b.dtype], {torch.bfloat16: "bf16", torch.float16: "f16"}
    rows, columns = (
        [[naive_fp8.decoded(c, form) for c in row] for row in x.view(torch.uint8).tolist()]
        for x, form in ((a, left), (b, right))
    )
    found = [
        [
            naive_fp8.element(
                row,
                column,
                left,
                right,
                list(zip(s, t, strict=True)),
                name.get(out, "f32"),
                None if bias is None else bias[n].item(),
            )
            for n, (column, t) in enumerate(zip(columns, of_b.tolist(), strict=True))
        ]
        for row, s in zip(rows, of_a.tolist(), strict=True)
    ]
    return torch.tensor(found).to(torch.int32 if out == torch.float32 else torch.int16).view(out)


@pytest.mark.parametrize("case", CASES)
def test_reference_has_the_recorded_bits(case: str) -> None:
    """What an H100 computed, one step or a chain, from +0 or from a value carried in."""
    a, b, start, want = recorded(case)
    chain = np.zeros((1, *want.shape), np.float32) if start is None else start.numpy()[None].copy()
    terms = a[None, None], b.mT[None, None]
    carry_on(*terms, chain, np.array([[0, 0, a.shape[1]]]), FP8.key, closing_zero=False)
    found = torch.from_numpy(chain[0])
    found = torch.where(found.isnan(), torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32), found)
    assert_same_bits(found, want)


@pytest.mark.parametrize("case", CASES)
def test_naive_implementation_has_the_recorded_bits(case: str) -> None:
    """A sample of the same, because fractions are slow."""
    left, right = case.split()[:2]
    a, b, start, want = recorded(case)
    for m, n in itertools.product(range(0, len(a), 11), range(0, len(b), 13)):
        row, column = (
            [naive_fp8.decoded(c, form) for c in x.view(torch.uint8).tolist()]
            for x, form in ((a[m], left), (b[n], right))
        )
        acc = 0.0 if start is None else start[m, n].item()
        found = naive_fp8.finish(naive_fp8.chain(row, column, left, right, acc), "f32")
        assert found == bits(want)[m, n].item() & 0xFFFFFFFF, (m, n)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [c for c in CASES if f"{c}/start" not in _RECORDED and "256" not in c])
def test_scaled_mm_has_the_recorded_bits(case: str, device: str) -> None:
    a, b, _, want = (t if t is None else t.to(device) for t in recorded(case))
    ones = torch.ones(len(a), 1, device=device), torch.ones(1, len(b), device=device)
    out = samebits.scaled_mm(a, b.mT, ones[0], ROWS, ones[1], ROWS, output_dtype=torch.float32)
    assert_same_bits(out, want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(("left", "right"), PAIRS)
class TestAgainstTheNaiveImplementation:
    """Every kind of scale, every output, with and without a bias."""

    @pytest.mark.parametrize("out", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize("k", [1, 40, 128, 300])
    def test_groups_by_groups(
        self, left: str, right: str, special: bool, device: str, k: int, out: torch.dtype
    ) -> None:
        a, b = (operand(3, k, FORMATS[f], s, special=special) for s, f in enumerate((left, right)))
        of_a, of_b = scales(3, -(-k // 128), seed=2), scales(3, -(-k // 128), seed=3)
        bias = values("normal", (3,), out, 4) if k == 300 else None
        given = (t.to(device) for t in (a, b.mT, of_a, of_b))
        x, y, s, t = given
        on_device = None if bias is None else bias.to(device)
        found = samebits.scaled_mm(x, y, s, GROUPS, t, GROUPS, bias=on_device, output_dtype=out)
        assert_same_bits(found, expected(a, b, of_a, of_b, out, bias))

    def test_groups_by_blocks(self, left: str, right: str, special: bool, device: str) -> None:
        k, n = 200, 130
        a, b = (
            operand(1, k, FORMATS[left], 0, special=special),
            operand(n, k, FORMATS[right], 1, special=special),
        )
        of_a, of_b = scales(1, 2, seed=2), scales(2, 2, seed=3)
        x, y, s, t = (v.to(device) for v in (a, b.mT, of_a, of_b.mT))
        want = expected(a, b, of_a, of_b.repeat_interleave(128, 0)[:n], torch.float32)
        assert_same_bits(samebits.scaled_mm(x, y, s, GROUPS, t, BLOCKS, output_dtype=torch.float32), want)
        padded = torch.cat([t, torch.full((2, 2), torch.nan, device=device)])  # as PyTorch wants it
        assert_same_bits(
            samebits.scaled_mm(x, y, s, GROUPS, padded, BLOCKS, output_dtype=torch.float32), want
        )

    def test_rows_by_rows(self, left: str, right: str, special: bool, device: str) -> None:
        a, b = (operand(4, 260, FORMATS[f], s, special=special) for s, f in enumerate((left, right)))
        of_a, of_b = scales(4, 1, seed=2), scales(4, 1, seed=3)
        x, y, s, t = (v.to(device) for v in (a, b.mT, of_a, of_b.mT))
        want = expected(a, b, of_a.expand(4, 3), of_b.expand(4, 3), torch.float32)
        assert_same_bits(samebits.scaled_mm(x, y, s, ROWS, t, ROWS, output_dtype=torch.float32), want)


@pytest.mark.parametrize("device", DEVICES)
def test_extreme_scales(device: str) -> None:
    """Products of scales that overflow, underflow or are NaN, and zeros times infinity."""
    edges = torch.tensor(
        [2.0**-149, 2.0**-126, 2.0**-80, 1.0, 2.0**80, 3.4e38, torch.inf, torch.nan, 0.0, -1.5]
    )
    n = len(edges)
    a, b = operand(n, 256, FORMATS["e4m3"], 0), operand(n, 256, FORMATS["e5m2"], 1)
    a[0] = 0
    of_a, of_b = torch.stack([edges, edges.flip(0)], 1), torch.stack([edges, torch.ones(n)], 1)
    x, y, s, t = (v.to(device) for v in (a, b.mT, of_a, of_b))
    found = samebits.scaled_mm(x, y, s, GROUPS, t, GROUPS, output_dtype=torch.float32)
    assert_same_bits(found, expected(a, b, of_a, of_b, torch.float32))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("form", FORMATS)
class TestQuantize:
    def test_groups(self, form: str, dtype: torch.dtype, kind: str, device: str) -> None:
        x = values(kind, (4, 150), dtype, 0)
        x[1] = 0  # a group of zeros
        found, scale = samebits.quantize(x.to(device), dtype=FORMATS[form])
        assert found.dtype == FORMATS[form]
        assert scale.shape == (4, 2)
        for row, start in itertools.product(range(4), (0, 128)):
            codes, of_group = naive_fp8.quantized(x[row, start : start + 128].double().tolist(), form)
            assert found[row, start : start + 128].view(torch.uint8).tolist() == codes
            assert bits(scale[row, start // 128]).item() == naive_fp8.finish(of_group, "f32")

    def test_blocks(self, form: str, dtype: torch.dtype, kind: str, device: str) -> None:
        x = values(kind, (130, 130), dtype, 0)
        found, scale = samebits.quantize(x.to(device), block=(128, 128), dtype=FORMATS[form])
        assert scale.shape == (2, 2)
        for top, left in itertools.product((0, 1), repeat=2):
            here = slice(128 * top, 128 * top + 128), slice(128 * left, 128 * left + 128)
            codes, of_block = naive_fp8.quantized(x[here].flatten().double().tolist(), form)
            assert found[here].view(torch.uint8).flatten().tolist() == codes
            assert bits(scale[top, left]).item() == naive_fp8.finish(of_block, "f32")
