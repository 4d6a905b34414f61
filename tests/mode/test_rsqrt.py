"""``torch.rsqrt`` under the mode: specified bits on every device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import samebits
from samebits.backends.cuda import compiler, rsqrt
from samebits.testing import assert_same_bits, values
from tests.support.cubins import resources
from tests.support.devices import DEVICES

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROOTS: dict[str, Callable[[Tensor], Tensor]] = {
    "function": torch.rsqrt,
    "method": Tensor.rsqrt,
    "in place": lambda x: x.clone().rsqrt_(),
    "out": lambda x: torch.rsqrt(x, out=torch.empty_like(x)),
}


def expected(x: Tensor) -> Tensor:
    """In float64, which rounds to the right float32 roots and quotients."""
    root = x.double().sqrt().float()
    found = (1 / root.double()).float().to(x.dtype)
    nan = torch.tensor(0x7FFFFFFF if x.dtype == torch.float32 else 0x7FFF)
    integers = torch.int32 if x.dtype == torch.float32 else torch.int16
    return torch.where(found.isnan(), nan.to(integers).view(x.dtype), found)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ROOTS)
def test_two_roundings(device: str, dtype: torch.dtype, name: str) -> None:
    x = torch.cat([values(kind, (4000,), dtype, 0) for kind in ("normal", "wide", "tiny", "special")])
    x = torch.where(torch.arange(len(x)) % 9 == 0, x, x.abs())
    want = expected(x)
    with samebits.batch_invariant("error"):
        for part in (slice(None), slice(3, 8), slice(1, 2), slice(None, None, 7)):
            assert_same_bits(ROOTS[name](x.to(device)[part]).cpu(), want[part].contiguous())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradient(device: str, dtype: torch.dtype) -> None:
    x, grad = (values("normal", (300,), dtype, seed).to(device) for seed in (0, 1))
    x = x.abs().requires_grad_()
    with samebits.batch_invariant("error"):
        y = torch.rsqrt(x)
        (got,) = torch.autograd.grad(y, x, grad)
    power = y.detach() * y.detach() * y.detach()
    assert_same_bits(got, -0.5 * grad * power)


@pytest.mark.parametrize("device", DEVICES)
def test_other_dtypes_are_pytorchs(device: str) -> None:
    for x in (torch.rand(70).double(), torch.rand(5) + 1j, torch.tensor([4, 9])):
        with samebits.batch_invariant("error"):
            torch.testing.assert_close(torch.rsqrt(x.to(device)).cpu(), torch.rsqrt(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("arch", compiler.ARCHITECTURES[1::3])
def test_the_kernel_compiles(dtype: torch.dtype, arch: str) -> None:
    pytest.importorskip("cuda.core")
    assert resources(rsqrt.kernel_spec(dtype), arch).local_bytes == 0
