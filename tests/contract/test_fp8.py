"""Block-scaled FP8: recorded chains, a second implementation, and rows that do not depend on the batch."""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import ScalingType

import samebits
from samebits.backends import UnavailableError
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
    """What an H100 and an H200 computed, one step or a chain, from +0 or from a value carried in."""
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

    @pytest.mark.sampled(4)
    def test_blocks(self, form: str, dtype: torch.dtype, kind: str, device: str) -> None:
        x = values(kind, (130, 130), dtype, 0)
        found, scale = samebits.quantize(x.to(device), block=(128, 128), dtype=FORMATS[form])
        assert scale.shape == (2, 2)
        for top, left in itertools.product((0, 1), repeat=2):
            here = slice(128 * top, 128 * top + 128), slice(128 * left, 128 * left + 128)
            codes, of_block = naive_fp8.quantized(x[here].flatten().double().tolist(), form)
            assert found[here].view(torch.uint8).flatten().tolist() == codes
            assert bits(scale[top, left]).item() == naive_fp8.finish(of_block, "f32")


EDGES = (0.0, -0.0, 1e-39, -64.0, 64.0, 87.5, -87.5, -88.5, -88.73, -89.0, 95.0, -95.0, 3e38, -3e38)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("form", FORMATS)
class TestSiluMulQuantize:
    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("kind", KINDS)
    def test_has_the_bits_of_the_naive_implementation(
        self, form: str, dtype: torch.dtype, kind: str, device: str
    ) -> None:
        gate, up = (values(kind, (3, 150), dtype, seed) for seed in (0, 1))
        gate[1] = 0
        if kind == "normal":
            gate[2, :14], up[2] = torch.tensor(EDGES), 1e-3
        name = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}[dtype]
        want = [
            [naive_fp8.silu_mul(a, b, name) for a, b in zip(*rows, strict=True)]
            for rows in zip(gate.double().tolist(), up.double().tolist(), strict=True)
        ]
        both = torch.cat([gate, up], 1).to(device)
        for given in ((both[:, :150], both[:, 150:]), (both,)):
            found, scale = samebits.silu_mul_quantize(*given, dtype=FORMATS[form])
            assert scale.shape == (3, 2)
            for row, start in itertools.product(range(3), (0, 128)):
                codes, of_group = naive_fp8.quantized(want[row][start : start + 128], form)
                assert found[row, start : start + 128].view(torch.uint8).tolist() == codes
                assert bits(scale[row, start // 128]).item() == naive_fp8.finish(of_group, "f32")

    def test_rows_alone_are_rows_of_the_batch(self, form: str, dtype: torch.dtype, device: str) -> None:
        gate, up = (values("normal", (2, 9, 300), dtype, seed).to(device) for seed in (0, 1))
        gate[0, 3] = torch.nan
        found, scale = samebits.silu_mul_quantize(gate, up, dtype=FORMATS[form])
        assert scale.shape == (2, 9, 3)
        for at in ((0, 0), (1, 8), (0, 4)):
            alone, of_alone = samebits.silu_mul_quantize(gate[at], up[at], dtype=FORMATS[form])
            assert_same_bits(of_alone, scale[at])
            assert torch.equal(alone.view(torch.uint8), found[at].view(torch.uint8))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_silu_is_pytorchs_for_every_value(dtype: torch.dtype, device: str) -> None:
    """So the fused step has the bits of PyTorch's functions, one after the other."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).to(device)
    gate = every.reshape(-1, 1).expand(-1, 128).contiguous()  # a block for each: its scale tells silu's bits
    want = samebits.quantize(torch.nn.functional.silu(gate) * torch.ones_like(gate))
    found = samebits.silu_mul_quantize(gate, torch.ones_like(gate))
    assert_same_bits(found[1], want[1])
    assert torch.equal(found[0].view(torch.uint8), want[0].view(torch.uint8))
    gate, up = (values("normal", (60, 500), dtype, seed).to(device) for seed in (0, 1))
    want = samebits.quantize(torch.nn.functional.silu(gate) * up)
    found = samebits.silu_mul_quantize(gate, up)
    assert_same_bits(found[1], want[1])
    assert torch.equal(found[0].view(torch.uint8), want[0].view(torch.uint8))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(3, 256, 200), (2, 130, 40), (0, 130, 40)])
def test_blocks_of_several_matrices(shape: tuple[int, int, int], device: str) -> None:
    x = values("normal", shape, torch.bfloat16, 0).to(device)
    found, scale = samebits.quantize(x, block=(128, 128))
    assert scale.shape == (shape[0], -(-shape[1] // 128), -(-shape[2] // 128))
    for g, matrix in enumerate(x):
        want, its_scale = samebits.quantize(matrix, block=(128, 128))
        assert torch.equal(found[g].view(torch.uint8), want.view(torch.uint8))
        assert_same_bits(scale[g], its_scale)


@pytest.mark.parametrize("device", DEVICES)
class TestLinear:
    """``samebits.nn.Linear`` with ``fp8="block"``: the same invariances as in 16 bits."""

    @staticmethod
    def layer(device: str, dtype: torch.dtype = torch.bfloat16) -> samebits.nn.Linear:
        torch.manual_seed(0)
        return samebits.nn.Linear(200, 150, dtype=dtype, fp8="block").to(device)

    @staticmethod
    def run(layer: samebits.nn.Linear, x: Tensor, grad: Tensor, **more: Tensor) -> list[Tensor]:
        """Output and gradients of x, weight and bias."""
        x = x.clone().requires_grad_()
        assert layer.bias is not None
        out = layer(x, **more)
        return [out.detach(), *torch.autograd.grad(out, [x, layer.weight, layer.bias], grad)]

    @staticmethod
    def batch(device: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
        x, grad = values("normal", (2, 9, 200), dtype, 1), values("normal", (2, 9, 150), dtype, 2)
        return x.to(device), grad.to(device)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_is_a_product_of_quantized_operands(self, device: str, dtype: torch.dtype) -> None:
        layer, (x, grad) = self.layer(device, dtype), self.batch(device, dtype)
        out, grad_x, grad_weight, grad_bias = self.run(layer, x, grad)
        weight, of_weight = samebits.quantize(layer.weight, block=(128, 128))
        for found, given, b, of_b, bias in (
            (out, x, weight.mT, of_weight.mT, layer.bias.detach()),
            (grad_x, grad, weight, of_weight, None),
        ):
            a, of_a = samebits.quantize(given.flatten(0, 1))
            want = samebits.scaled_mm(a, b, of_a, GROUPS, of_b, BLOCKS, bias=bias, output_dtype=dtype)
            assert_same_bits(found.flatten(0, 1), want.detach())
        plain = samebits.nn.Linear.from_torch(torch.nn.Linear(200, 150, dtype=dtype, device=device))
        _, _, want_weight, want_bias = self.run(plain, x, grad)
        assert_same_bits(grad_weight, want_weight, "weight")
        assert_same_bits(grad_bias, want_bias, "bias")

    def test_rows_alone_are_rows_of_the_batch(self, device: str) -> None:
        layer, (x, grad) = self.layer(device), self.batch(device)
        out, grad_x, *_ = self.run(layer, x, grad)
        poisoned = x.clone()
        poisoned[1] = torch.nan
        assert_same_bits(layer(poisoned)[0].detach(), out[0], "beside NaN")
        for row, position in ((0, 0), (1, 8)):
            one = slice(position, position + 1)
            alone = self.run(layer, x[row, one], grad[row, one])
            assert_same_bits(alone[0], out[row, one])
            assert_same_bits(alone[1], grad_x[row, one])

    def test_packing_and_padding_change_nothing(self, device: str) -> None:
        layer, (x, grad) = self.layer(device), self.batch(device)
        x[1, 5:], grad[1, 5:] = 0, 0  # padding of the second sequence
        out, grad_x, *of_parameters = self.run(layer, x, grad)
        packed = [torch.cat([t[0], t[1, :5]]) for t in (x, grad)]
        cu_seqlens = torch.tensor([0, 9, 14], dtype=torch.int32, device=device)
        found = self.run(layer, *packed, cu_seqlens=cu_seqlens)
        for one, whole in zip(found, (out, grad_x), strict=False):
            assert_same_bits(one, torch.cat([whole[0], whole[1, :5]]))
        for one, whole in zip(found[2:], of_parameters, strict=True):
            assert_same_bits(one, whole)

    def test_micro_batches_into_main_grad(self, device: str) -> None:
        layer, (x, grad) = self.layer(device), self.batch(device)
        layer.weight.main_grad = torch.zeros(150, 200, device=device)
        leaf = x.clone().requires_grad_()
        layer(leaf).backward(grad)
        assert leaf.grad is not None
        whole, layer.weight.main_grad = layer.weight.main_grad, torch.zeros(150, 200, device=device)
        for row in range(2):
            part = x[row : row + 1].clone().requires_grad_()
            layer(part).backward(grad[row : row + 1])
            assert part.grad is not None
            assert_same_bits(part.grad[0], leaf.grad[row])
        assert_same_bits(layer.weight.main_grad, whole)

    def test_compiles(self, device: str) -> None:
        layer, (x, grad) = self.layer(device), self.batch(device)
        want = self.run(layer, x, grad)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        for found, eager in zip(self.run(compiled, x, grad), want, strict=True):
            assert_same_bits(found, eager)

    def test_convert(self, device: str) -> None:
        plain = torch.nn.Linear(200, 150, dtype=torch.bfloat16, device=device)
        like = samebits.nn.Linear.from_torch(plain, fp8="block")
        samebits.convert(plain, fp8="block")
        assert "fp8=block" in repr(plain)
        x, _ = self.batch(device)
        assert_same_bits(plain(x).detach(), like(x).detach())


def test_linear_refuses() -> None:
    with pytest.raises(ValueError, match="fp8: expected \"block\" or None, got 'row'"):
        samebits.nn.Linear(8, 8, fp8="row")  # type: ignore[arg-type]
    layer = samebits.nn.Linear(8, 8, fp8="block", contract=samebits.FMA.segmented(2))
    with pytest.raises(ValueError, match="expected no segments in FP8"):
        layer(torch.ones(1, 8))
    with pytest.raises(ValueError, match="weight: expected features in FP8, got \\(0, 8\\)"):
        samebits.nn.Linear(8, 0, bias=False, fp8="block")(torch.ones(1, 8))


GIVEN = {
    "mat_a": torch.zeros(3, 200, dtype=torch.float8_e4m3fn),
    "mat_b": torch.zeros(200, 130, dtype=torch.float8_e5m2),
    "scale_a": torch.ones(3, 2),
    "scale_recipe_a": GROUPS,
    "scale_b": torch.ones(2, 2),
    "scale_recipe_b": BLOCKS,
}


def test_scales_may_be_powers_of_two_in_8_bits() -> None:
    in_8_bits = {name: GIVEN[name].to(torch.float8_e8m0fnu) for name in ("scale_a", "scale_b")}
    assert_same_bits(samebits.scaled_mm(**(GIVEN | in_8_bits)), samebits.scaled_mm(**GIVEN))


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"scale_recipe_a": ScalingType.TensorWise}, ValueError, "depends on the others in the batch"),
        ({"scale_recipe_a": BLOCKS}, ValueError, "depends on the others in the batch"),
        (
            {"scale_recipe_a": ScalingType.BlockWise1x32},
            ValueError,
            "expected one of RowWise, BlockWise1x128",
        ),
        ({"scale_recipe_b": ScalingType.TensorWise}, ValueError, "scale_recipe_b: expected one of RowWise"),
        ({"scale_recipe_b": "RowWise"}, TypeError, "scale_recipe_b: expected a .*ScalingType, got str"),
        ({"scale_a": torch.ones(3, 1)}, ValueError, r"scale_a: expected shape \(3, 2\), got \(3, 1\)"),
        (
            {"scale_b": torch.ones(3, 2)},
            ValueError,
            r"scale_b: expected shape \(2, 2\) or \(4, 2\), got \(3, 2\)",
        ),
        (
            {"scale_a": torch.ones(3, 2).double()},
            TypeError,
            "scale_a: expected a dense tensor of torch.float32",
        ),
        ({"scale_a": torch.ones(3, 2).to_sparse()}, TypeError, "scale_a: .*got layout torch.sparse_coo"),
        ({"bias": torch.ones(130).to_sparse()}, TypeError, "bias: .*got layout torch.sparse_coo"),
        ({"scale_b": torch.ones(2, 2).requires_grad_()}, ValueError, "scale_b: .*requires no grad"),
        ({"bias": torch.ones(130).requires_grad_()}, ValueError, "bias: .* FP8 values have no gradients"),
        ({"mat_a": torch.zeros(3, 200)}, TypeError, "mat_a: expected a dense tensor of torch.float8_e4m3fn"),
        (
            {"mat_b": GIVEN["mat_b"][:5]},
            ValueError,
            r"mat_a, mat_b: expected \[M, K\] and \[K, N\] with K > 0",
        ),
        ({"mat_b": GIVEN["mat_b"][0]}, ValueError, "mat_b: expected a matrix"),
        ({"bias": torch.ones(3)}, ValueError, r"bias: expected shape \(130,\), got \(3,\)"),
        ({"bias": torch.ones(130).double()}, TypeError, "bias: expected a dense tensor of bfloat16"),
        ({"output_dtype": torch.float64}, TypeError, "output_dtype: expected bfloat16, float16 or float32"),
        ({"scale_a": torch.ones(3, 2, device="meta")}, ValueError, "scale_a: expected device cpu like mat_a"),
    ],
)
def test_scaled_mm_refuses(change: dict[str, object], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        samebits.scaled_mm(**(GIVEN | change))


def test_scaled_mm_refuses_derivatives_of_transforms() -> None:
    """PyTorch would take zeros for them."""
    given = {**GIVEN}

    def product(bias: Tensor) -> Tensor:
        return samebits.scaled_mm(**given, bias=bias, output_dtype=torch.float32)

    bias = torch.ones(130)
    with pytest.raises(ValueError, match=r"bias: .* FP8 values have no gradients"):
        torch.func.grad(lambda bias: product(bias).sum())(bias)
    with pytest.raises(NotImplementedError, match="bias: expected no forward-mode derivative"):
        torch.func.jvp(product, (bias,), (bias,))
    with torch.no_grad():
        assert_same_bits(product(bias.requires_grad_()), product(bias.detach()))


@pytest.mark.parametrize(
    ("x", "more", "error", "match"),
    [
        (torch.ones(2).double(), {}, TypeError, "x: expected bfloat16, float16 or float32"),
        (torch.ones(2), {"dtype": torch.int8}, TypeError, "dtype: expected torch.float8_e4m3fn"),
        (torch.ones(2), {"block": 64}, ValueError, r"block: expected 128 or \(128, 128\), got 64"),
        (torch.ones(2), {"block": torch.tensor([128, 128])}, ValueError, r"block: expected 128 .*tensor\("),
        (torch.ones(2), {"block": (128, 128)}, ValueError, r"x: expected \[M, K\] or \[G, M, K\] for blocks"),
        (torch.ones(()), {}, ValueError, "x: expected at least 1-D"),
    ],
)
def test_quantize_refuses(x: Tensor, more: dict[str, object], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        samebits.quantize(x, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gate", "up", "more", "error", "match"),
    [
        (torch.ones(2, 3), None, {}, ValueError, r"gate: expected \[..., 2 K\] without up"),
        (torch.ones(2, 4), torch.ones(2, 3), {}, ValueError, r"gate, up: expected \[..., K\] of one shape"),
        (torch.ones(2), torch.ones(2).half(), {}, TypeError, "up: expected torch.float32 like gate"),
        (torch.ones(2).double(), torch.ones(2), {}, TypeError, "gate: expected bfloat16, float16 or float32"),
        (torch.ones(2), torch.ones(2), {"dtype": torch.int8}, TypeError, "dtype: expected torch.float8_e4m3"),
        (
            torch.ones(2),
            torch.ones(2).requires_grad_(),
            {},
            ValueError,
            "up: .* FP8 values have no gradients",
        ),
    ],
)
def test_silu_mul_quantize_refuses(
    gate: Tensor, up: Tensor | None, more: dict[str, object], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        samebits.silu_mul_quantize(gate, up, **more)  # type: ignore[arg-type]


def test_no_rows() -> None:
    assert samebits.silu_mul_quantize(torch.zeros(0, 200))[1].shape == (0, 1)
    values_, scale = samebits.quantize(torch.zeros(0, 200))
    assert scale.shape == (0, 2)
    assert samebits.scaled_mm(**(GIVEN | {"mat_a": values_, "scale_a": scale})).shape == (0, 130)
    assert samebits.quantize(torch.zeros(3, 0))[1].shape == (3, 0)


@pytest.mark.parametrize("process", [False, True])
def test_under_the_mode(process: bool) -> None:
    """``F.scaled_mm`` is this library's; scales over rows are refused."""
    given = {name: GIVEN[name] for name in ("mat_a", "mat_b", "scale_a", "scale_recipe_a")}
    given |= {"scale_b": torch.ones(130, 2), "scale_recipe_b": GROUPS}
    given["mat_a"], given["mat_b"] = (
        operand(3, 200, FORMATS["e4m3"], 0),
        operand(130, 200, FORMATS["e4m3"], 1).mT,
    )
    want = samebits.scaled_mm(**given)
    of_tensors = {"scale_recipe_a": ScalingType.TensorWise, "scale_recipe_b": ScalingType.TensorWise}
    of_tensors |= {"scale_a": torch.ones(1), "scale_b": torch.ones(1)}
    if process:
        samebits.enable_batch_invariant_mode("error")
    try:
        with nullcontext() if process else samebits.batch_invariant("error"):
            assert_same_bits(torch.nn.functional.scaled_mm(**given), want)
            with pytest.raises(ValueError, match="depends on the others in the batch"):
                torch.nn.functional.scaled_mm(**(given | of_tensors))
    finally:
        if process:
            samebits.disable_batch_invariant_mode()


def test_opcheck() -> None:
    x, weight = values("normal", (3, 200), torch.bfloat16, 0), values("normal", (130, 200), torch.bfloat16, 1)
    (a, of_a), (b, of_b) = samebits.quantize(x), samebits.quantize(weight, block=(128, 128))
    ops = torch.ops.samebits
    for operator, given in (
        (ops.quantize.default, (x, 1, FORMATS["e5m2"], FP8.key)),
        (ops.silu_mul_quantize.default, (x, x, FORMATS["e5m2"], FP8.key)),
        (
            ops.scaled_grouped_mm.default,
            (a, b[None], of_a, of_b[None], torch.tensor([2]).int(), None, torch.float16, FP8.key),
        ),
        (ops.scaled_mm.default, (a, b, of_a, of_b, None, torch.float16, FP8.key)),
    ):  # test_schema computes with FP8, which PyTorch does not on a CPU
        torch.library.opcheck(
            operator,
            given,
            test_utils=("test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic"),
        )
    key = samebits.TENSOR_CORE.on(samebits.HOPPER).key
    leaves = x.requires_grad_(), weight.requires_grad_()
    torch.library.opcheck(ops.fp8_linear.default, (*leaves, None, None, key))


@pytest.mark.gpu
def test_triton_is_refused() -> None:
    x = torch.ones(2, 128, device="cuda")
    values, scale = samebits.quantize(x)
    recipe = ScalingType.BlockWise1x128
    with samebits.use_backend("triton"):
        with pytest.raises(UnavailableError, match=r"triton.* does not compute"):
            samebits.quantize(x)
        with pytest.raises(UnavailableError, match=r"triton.* does not compute"):
            samebits.scaled_mm(values, values.T, scale, recipe, scale, recipe)
