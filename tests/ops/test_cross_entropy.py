"""Cross-entropy as one operator: the bits of its parts, on every device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import samebits
from samebits.ops.cross_entropy import cross_entropy
from samebits.ops.reduce import sum
from samebits.ops.softmax import log_softmax
from samebits.testing import assert_same_bits

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(1, 1), (7, 300), (65, 1000), (1001, 130)]


def inputs(rows: int, n: int, dtype: torch.dtype, ignore_index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = (torch.randn(rows, n, generator=generator) * 5).to(dtype)
    target = torch.randint(0, n, (rows,), generator=generator)
    if rows > 1:
        x[1, 0] = -torch.inf
        target[::3] = ignore_index
    return x, target


def results(x: Tensor, target: Tensor, ignore_index: int, reduction: str) -> list[Tensor]:
    """Of a first call, and of one that is replayed."""
    found = []
    for _ in range(4):
        leaf = x.clone().requires_grad_()
        with samebits.batch_invariant("error"):
            loss = F.cross_entropy(leaf, target, ignore_index=ignore_index, reduction=reduction)
            seed = torch.arange(1, loss.numel() + 1).reshape(loss.shape).to(loss)
            found += [loss.detach(), *torch.autograd.grad(loss, leaf, seed * 0.375)]
            found.append(F.cross_entropy(x, target, ignore_index=ignore_index, reduction=reduction))
    return found


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_has_the_bits_of_its_parts(dtype: torch.dtype, reduction: str) -> None:
    x, target = inputs(65, 300, dtype, -100)
    x.requires_grad_()
    losses = F.nll_loss(log_softmax(x), target, reduction="none")
    total = losses if reduction == "none" else sum(losses)
    want = total / (target >= 0).sum() if reduction == "mean" else total
    with samebits.batch_invariant("error"):
        got = F.cross_entropy(x, target, reduction=reduction)
    assert_same_bits(got.detach(), want.detach())
    seed = torch.full_like(want, 3)
    ours, theirs = (torch.autograd.grad(y, x, seed)[0] for y in (got, want))
    if dtype == torch.float32:  # samebits.logp's gradient of an ignored row has other zeros
        ours, theirs = ours + 0.0, theirs + 0.0
    assert_same_bits(ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("ignore_index", [-100, 0])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gpu_has_the_bits_of_the_cpu(
    dtype: torch.dtype, shape: tuple[int, int], reduction: str, ignore_index: int
) -> None:
    x, target = inputs(*shape, dtype, ignore_index)
    want = results(x, target, ignore_index, reduction)
    got = results(x.cuda(), target.cuda(), ignore_index, reduction)
    for ours, theirs in zip(got, want, strict=True):
        assert_same_bits(ours.cpu(), theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernels_have_the_bits_of_pytorchs_operators(dtype: torch.dtype) -> None:
    """On one GPU: an explicit choice of backend takes PyTorch's operators."""
    x, target = (t.cuda() for t in inputs(1001, 130, dtype, -100))
    for reduction in ("none", "mean", "sum"):
        got = results(x, target, -100, reduction)
        samebits.use_backend("cuda")
        try:
            want = results(x, target, -100, reduction)
        finally:
            samebits.use_backend(None)
        for ours, theirs in zip(got, want, strict=True):
            assert_same_bits(ours, theirs)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_wide_loss_is_that_of_logits_in_float32(
    shape: tuple[int, int], dtype: torch.dtype, reduction: str, device: str
) -> None:
    x, target = (t.to(device) for t in inputs(*shape, dtype, -100))
    x[-1, -1] = torch.nan
    found = []
    for wide in (False, True):
        leaf = x.clone().requires_grad_()
        of = leaf if wide else leaf.float()
        loss = cross_entropy(of, target, -100, reduction, wide=wide)
        seed = torch.arange(1, loss.numel() + 1, device=device).reshape(loss.shape).to(loss)
        found.append((loss.detach(), *torch.autograd.grad(loss, leaf, seed * 0.375)))
    assert found[1][0].dtype == torch.float32
    for theirs, ours in zip(*found, strict=True):  # a NaN's bits are those of the last conversion
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert_same_bits(ours.nan_to_num(1.0), theirs.nan_to_num(1.0))


def test_a_wide_loss_has_one_gradient() -> None:
    x, target = inputs(7, 300, torch.bfloat16, -100)
    x.requires_grad_()
    loss = cross_entropy(x, target, -100, "sum", wide=True)
    with pytest.raises(NotImplementedError, match="16-bit logits"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_a_wide_loss_as_an_operator() -> None:
    x, target = inputs(7, 300, torch.bfloat16, -100)
    for reduction in ("none", "mean", "sum"):
        number = ("none", "mean", "sum").index(reduction)
        torch.library.opcheck(
            torch.ops.samebits.cross_entropy.default,
            (x.clone().requires_grad_(), target, -100, number, True, "FMA:fma"),
            test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
        )
