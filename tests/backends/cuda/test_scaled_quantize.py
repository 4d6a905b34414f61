"""Quantization to FP8 on a GPU has the bits of the CPU reference."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import samebits
from samebits.backends.cuda import quantize
from samebits.backends.cuda.quantize import kernel_spec
from samebits.testing import assert_same_bits
from tests.support.cubins import resources

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None, reason="cuda-core is not installed (samebits[cuda])"
)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def rows_of_unlike_sizes(m: int, k: int, dtype: torch.dtype) -> Tensor:
    """Zeros, subnormals, large values, and rows with a NaN or an infinity among them."""
    x = torch.randn(m, k) * torch.exp2(torch.randint(-20, 12, (m, 1)))
    x[::7] = 0
    x[3::11, k // 2] = float("nan")
    x[5::13, 0] = float("-inf")
    x[1::17] *= 2.0**-110
    return x.to(dtype)


@needs_compiler
@pytest.mark.parametrize("x", [BF16, F16, F32])
def test_kernels_compile_without_spills(x: torch.dtype) -> None:
    specs = [
        kernel_spec(x, values, square=square, vector=vector)
        for values, square, vector in itertools.product((E4M3, E5M2), (False, True), (False, True))
    ]
    for silu, vector in itertools.product(("EXACT", "FAST")[: 2 if x == BF16 else 1], (False, True)):
        specs.append(kernel_spec(x, E4M3, square=False, vector=vector, silu=silu))
    for spec in specs:
        cubin = resources(spec, "sm_90a")
        assert cubin.spill_bytes == cubin.local_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("block", [128, (128, 128)])
@pytest.mark.parametrize("of", [BF16, F16, F32])
def test_a_gpu_gives_the_reference_bits(
    of: torch.dtype, block: int | tuple[int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    views: list[Callable[[Tensor], Tensor]] = [
        lambda x: x,
        lambda x: x[1:],
        lambda x: x[:, 1:],
        lambda x: x.T.contiguous().T,
    ]
    for m, k in ((1, 1), (3, 128), (130, 7), (64, 520), (257, 1024), (300, 131)):
        x = rows_of_unlike_sizes(m, k, of)
        for view in views:
            values, scale = samebits.quantize(view(x), block=block, dtype=dtype)
            got, got_scale = samebits.quantize(view(x.cuda()), block=block, dtype=dtype)
            assert_same_bits(got_scale.cpu(), scale)
            assert torch.equal(got.view(torch.uint8).cpu(), values.view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("of", [BF16, F16, F32])
def test_a_gpu_activates_with_the_reference_bits(of: torch.dtype, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for m, k in ((1, 1), (3, 128), (130, 7), (64, 520), (257, 1024), (300, 131)):
        gate, up = rows_of_unlike_sizes(m, k, of), torch.randn(m, k).to(of)
        for views in ((gate, up), (gate.T.contiguous().T, up), (gate[:, 1:], up[:, 1:]), (gate[:1], up[:1])):
            want = samebits.silu_mul_quantize(*views, dtype=dtype)
            got = samebits.silu_mul_quantize(*(t.cuda() for t in views), dtype=dtype)
            assert_same_bits(got[1].cpu(), want[1])
            assert torch.equal(got[0].view(torch.uint8).cpu(), want[0].view(torch.uint8))


@pytest.mark.gpu
def test_both_ways_give_every_value_of_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the GPU's own exponential and reciprocal leave is rounded to the same bf16."""
    gate = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(BF16).reshape(-1, 1)
    gate = gate.expand(-1, 128).contiguous()
    want = samebits.silu_mul_quantize(gate, torch.ones_like(gate))
    for way in ("FAST", "EXACT"):
        monkeypatch.setattr(quantize, "silu_of", lambda x, device, way=way: way)
        got = quantize.silu_mul_quantize(gate.cuda(), torch.ones_like(gate).cuda(), E4M3)
        assert_same_bits(got[1].cpu(), want[1], way)
        assert torch.equal(got[0].view(torch.uint8).cpu(), want[0].view(torch.uint8)), way


@pytest.mark.gpu
def test_products_of_quantized_operands_have_the_reference_bits() -> None:
    recipe = torch.nn.functional.ScalingType
    x, w = torch.randn(70, 400, dtype=BF16), torch.randn(264, 400, dtype=BF16)

    def product(x: Tensor, w: Tensor) -> Tensor:
        (a, scale_a), (b, scale_b) = samebits.quantize(x), samebits.quantize(w, block=(128, 128))
        recipes = recipe.BlockWise1x128, recipe.BlockWise128x128
        return samebits.scaled_mm(a, b.mT, scale_a, recipes[0], scale_b.mT, recipes[1])

    assert_same_bits(product(x.cuda(), w.cuda()).cpu(), product(x, w))
