"""Products of matrices that TMA cannot read: copies, and the bits of the universal kernel."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import samebits
from samebits.backends.cuda import matmul, tensor_maps
from samebits.backends.cuda.matmul import fastest
from samebits.backends.cuda.products.padded_sm90 import PADDED_SM90
from samebits.backends.cuda.products.tensor_core import TENSOR_CORE
from samebits.backends.product import Operands, Product
from samebits.testing import assert_same_bits, values
from tests.backends.cuda.conftest import Launch
from tests.support.devices import ARCH

BF16 = torch.bfloat16


def empty(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=BF16)


@pytest.mark.parametrize(
    ("a", "b", "copies"),
    [
        (empty(16, 4095), empty(4096, 4095).mT, 2),
        (empty(512, 4096), empty(4096, 4097)[:, 1:].mT, 1),
        (empty(16, 4096)[:, 1:], empty(4095, 4096), 1),
        (empty(3, 512, 1001), empty(3, 1001, 2048), 1),
        (empty(1, 512, 1001).expand(3, -1, -1), empty(3, 1001, 2047), 2),
        (empty(16, 4096).mT, empty(16, 4095), 1),
    ],
)
def test_what_cannot_be_read_is_copied(launches: list[Launch], a: Tensor, b: Tensor, copies: int) -> None:
    matmul.matmul(a, b, bias=None, out_dtype=BF16, contract="TENSOR_CORE:mma")
    assert launches == ["padded_sm90.cu"] * copies + ["tensor_core_sm90.cu"]
    written = [launch.values[4:6] for launch in launches[:copies]]  # address and eights of each copy
    for (one, eights), (other, _) in itertools.pairwise(written):
        assert other >= one + 16 * eights


def test_a_later_launch_has_its_copies_and_maps(
    launches: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So main_grad is written whole or not at all."""
    dy, x = torch.empty(512, 4096, dtype=BF16), torch.empty(512, 4095, dtype=BF16)
    out = torch.zeros(4096, 4095)
    step = matmul.matmul_later(out, dy.mT, x, accumulate=True, contract="TENSOR_CORE:mma")
    monkeypatch.setattr(tensor_maps, "tensor_map", None)
    monkeypatch.setattr(matmul.runtime, "empty", None)
    step()
    assert launches == ["padded_sm90.cu", "tensor_core_sm90.cu"]


def _odd(x: Tensor) -> Tensor:
    return x


def _shifted(x: Tensor) -> Tensor:
    wide = torch.full((x.shape[0], x.shape[1] + 3), torch.nan, dtype=x.dtype, device=x.device)
    return wide[:, 1 : x.shape[1] + 1].copy_(x)


def _spread(x: Tensor) -> Tensor:
    return torch.full((*x.shape, 2), torch.nan, dtype=x.dtype, device=x.device)[..., 1].copy_(x)


@pytest.mark.gpu
@pytest.mark.parametrize("place", [_odd, _shifted, _spread])
@pytest.mark.parametrize(("m", "k", "n"), [(16, 4095, 4096), (300, 1001, 2047), (513, 2051, 1023)])
def test_bits_of_the_universal_kernel(m: int, k: int, n: int, place: Callable[[Tensor], Tensor]) -> None:
    """Of outputs and all gradients, also when calls are replayed, and with NaN in the memory between."""
    if ARCH.own != "sm90":
        pytest.skip("copies are made on Hopper alone")
    x, w, dy = (
        place(values("normal", shape, BF16, seed, torch.device("cuda")))
        for seed, shape in enumerate(((m, k), (n, k), (m, n)))
    )
    wanted, chosen = [], set()
    for a, b in ((x, w.mT), (dy, w), (dy.mT, x)):
        room = torch.full((a.shape[0], b.shape[1]), torch.nan, dtype=BF16, device="cuda")
        of = Operands(a, b, room)
        chosen.add(fastest(Product.of(of, "mma")))
        TENSOR_CORE.run(of)
        wanted.append(room)
    assert PADDED_SM90 in chosen
    x.requires_grad_()
    w.requires_grad_()
    for _ in range(5):
        y = samebits.linear(x, w)
        dx, dw = torch.autograd.grad(y, (x, w), dy)
        for got, want in zip((y, dx, dw), wanted, strict=True):
            assert_same_bits(got, want)
    main_grad = torch.zeros(n, k, device="cuda")
    for _ in range(2):
        samebits.addmm_(main_grad, dy.mT, x.detach())
    again = torch.zeros(n, k, device="cuda")
    for _ in range(2):
        TENSOR_CORE.run(Operands(dy.mT, x.detach(), again, start=again))
    assert_same_bits(main_grad, again)
