"""samebits.batch_invariant refuses the calls that PyTorch refuses; results have its shapes and dtypes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from samebits.testing import assert_same_bits
from tests.mode.conftest import Within

# By their names: v vectors, m matrices, b batches, numbers are sizes; i integers, h bfloat16.
T: dict[str, Tensor] = {
    **{f"v{n}": torch.randn(n) for n in (0, 1, 3, 4, 5)},
    **{f"m{r}{c}": torch.randn(r, c) for r in (0, 1, 2, 3, 4) for c in (0, 1, 3, 4, 5)},
    **{f"b{n}{r}{c}": torch.randn(n, r, c) for n in (1, 2) for r, c in ((3, 4), (4, 5), (3, 5))},
    "c2345": torch.randn(2, 3, 4, 5),
    "s": torch.randn(()),
    "h34": torch.randn(3, 4, dtype=torch.bfloat16),
    "h45": torch.randn(4, 5, dtype=torch.bfloat16),
    "i34": torch.ones(3, 4, dtype=torch.int64),
    "i2": torch.tensor([1, 4]),
    "o2": torch.tensor([1, 4], dtype=torch.int32),
}  # fmt: skip

PRODUCTS = """
    torch.mm(m34, m45)  torch.mm(m34, m34)  torch.mm(v4, m45)  torch.mm(b234, m45)  torch.mm(h34, m45)
    torch.mm(m30, m05)  torch.mm(m34, m45, out_dtype=torch.float32)
    torch.mm(h34, h45, out_dtype=torch.float32)  torch.mv(m34, v4)  torch.mv(m34, v3)  torch.mv(m34, m45)
    F.grouped_mm(m34.mT, b234, offs=o2)  F.grouped_mm(m34.mT, b234)  F.grouped_mm(m34.mT, b234, offs=i2)
    torch._grouped_mm(m34.mT, b134, offs=o2)  torch._grouped_mm(m34.mT, b234, offs=o2, bias=m34)
    torch._grouped_mm(m34.mT, b234, offs=o2, out_dtype=torch.bfloat16)  torch._grouped_mm(v4, b234, offs=o2)
    torch._grouped_mm(m34.mT, b234, offs=o2, out_dtype=torch.float32)  torch._grouped_mm(b234, b234.mT)
    torch._grouped_mm(b234, b234)  torch._grouped_mm(b234, m44, offs=o2)  F.grouped_mm(m34, m44, offs=o2)
    torch._grouped_mm(h34, b245, offs=o2)  torch._grouped_mm(b234, b234.mT, offs=o2)
    torch.dot(v4, v4)  torch.dot(v4, v3)  torch.dot(m34, m34)  torch.matmul(v4, v4)  torch.matmul(s, v4)
    torch.matmul(b234, m45)  torch.matmul(b234, b145)  torch.matmul(b234, m34)  torch.matmul(c2345, v5)
    torch.matmul(v3, b234)  torch.matmul(h34, m45)  m34 @ m45  m34 @ h45  m34 @ i34  torch.bmm(b234, b245)
    torch.bmm(b134, b245)  torch.bmm(m34, b245)  torch.bmm(b234, m45)  torch.bmm(b234, b234)
    torch.addmm(m35, m34, m45)  torch.addmm(v5, m34, m45)  torch.addmm(s, m34, m45)
    torch.addmm(m15, m34, m45)  torch.addmm(m31, m34, m45)  torch.addmm(b135, m34, m45)
    torch.addmm(v5, b234, m45)  torch.addmm(v5, m34, b245)  torch.addmm(v4, m34, m45)
    torch.addmm(v5, m34, m45, beta=0.5, alpha=2)  torch.addmm(v5, h34, h45)  torch.addmm(v5, v4, m45)
    torch.addmm(m35, m34, m34)  torch.addmm(m25, m34, m45)  torch.baddbmm(b235, b234, b245)
    torch.baddbmm(m35, b234, b245)  torch.baddbmm(v5, b234, b245)  torch.baddbmm(c2345, b234, b245)
    torch.baddbmm(b235, b134, b245)  torch.baddbmm(b235, b234, b145)  torch.baddbmm(b235, m34, b245)
    torch.baddbmm(b235, b234, m45)  torch.baddbmm(b135, b234, b245)  F.linear(m34, m34)  F.linear(v4, m34)
    F.linear(v4, m34, v3)  F.linear(v4, m34, m13)  F.linear(m34, m34, m13)  F.linear(m34, m34, m33)
    F.linear(m34, m34, m31)  F.linear(m34, m34, v4)  F.linear(b234, m34, m33)  F.linear(s, m34)
    F.linear(m34, m34, b134)  F.linear(b234, m34, v3)  F.linear(m34, h34)  F.linear(m34, m34, s)
    F.linear(m34, m34, v1)  torch.einsum("ij,jk->ik", m34, m45)  torch.einsum("ij,jk->ik", m34, m34)
    torch.einsum("ii->i", m23)  torch.einsum("ii->i", m33)  torch.einsum("ij,jk->ik", m31, m05)
    torch.einsum("ij,ij->i", m31, m30)  torch.einsum("ij,ij->ij", m31, m34)  torch.einsum("ij->ijk", m34)
    torch.einsum("ij,jk", m34, m45)  torch.einsum("...ij,jk->...ik", b234, m45)
    torch.einsum("i,j->ij", v3, v4)  torch.einsum("ij->", m34)  torch.einsum("ijk,jk->i", m34, m45)
    torch.einsum("ij,jk->ik", m34)  torch.einsum("ij,kj->", m31, m04)
"""
REDUCTIONS = """
    m34.softmax(0)  m34.softmax(-3)  m34.softmax(2)  m34.softmax(True)  s.softmax(0)  s.softmax(-1)
    s.softmax(1)  s.softmax(-2)  torch.softmax(m34, 1, torch.float64)
    torch.softmax(m34, dim=1, dtype=torch.bfloat16)  torch.softmax(m34)  F.softmax(m34, 1)
    F.softmax(m34, True)  F.softmax(s, 0)  F.log_softmax(s, 1)  m34.log_softmax(2)  m30.softmax(1)
    m03.softmax(1)  F.log_softmax(i34, 1)  torch.softmax(i34, 1, torch.float32)  m34.sum()  m34.sum(0)
    m34.sum(2)  m34.sum(-3)  m34.sum((0, 0))  m34.sum((0, -2))  m34.sum(())  m34.sum([0, 1], True)
    m34.sum(True)  m34.sum(0, 1)  m34.sum(dim=0, keepdim=True)  s.sum(0)  s.sum(1)  s.sum((0, 0))
    m34.sum(axis=1, keepdims=True)  torch.sum(h34, 0, dtype=torch.float32)  m30.sum(1)  m34.sum(0.5)
    m34.sum(dim=None)  m34.mean()  m34.mean((0, 1))  m34.mean((0, -2))  m34.mean(2)  m34.mean(True)
    i34.mean()  m30.mean(1)  m34.mean(0, dtype=torch.float64)  m34.nansum()  m34.nansum(1, True)
    m34.nansum((0, 0))  m34.nansum(2)  m34.nanmean()  m34.nanmean(0)  m34.nanmean((0, 0))
    m34.nanmean(dim=1, keepdim=True)  m34.nanmean(3)  m34.nanmean(True)  m34.logsumexp(0)
    m34.logsumexp((0, 1))  m34.logsumexp((0, 0))  m34.logsumexp(2)  m34.logsumexp()  m34.logsumexp(True)
    torch.logsumexp(m34, 1, keepdim=True)  s.logsumexp(0)  s.logsumexp(1)  m30.logsumexp(1)  m34.var()
    m34.var(0)  m34.var(False)  m34.var(0, False)  m34.var((0, 1), True, True)  m34.var(dim=1, correction=0)
    m34.var((0, 0))  m34.var(2)  m34.var(0, correction=5)  m34.std(1)  m34.std(unbiased=False)
    m34.std(1, keepdim=True)  torch.var(m34, 0, unbiased=True, keepdim=True)  torch.std_mean(m34, 1)
    torch.var_mean(m34)  torch.var_mean(m34, (0, 1), keepdim=True)  i34.var()  m34.norm()  m34.norm(2)
    m34.norm(2, 1)  m34.norm(dim=(0, 1), keepdim=True)  m34.norm("fro", 1)  m34.norm(dim=2)
    m34.norm(2, 0, dtype=torch.float64)  i34.norm()  torch.norm(m34)  torch.norm(m34, 2, 1, True)
    torch.linalg.norm(m34)  torch.linalg.norm(m34, "fro")  torch.linalg.norm(v4, 2)
    torch.linalg.norm(m34, dim=1)  torch.linalg.norm(m34, 2, 1)  torch.linalg.vector_norm(m34)
    torch.linalg.vector_norm(m34, 2, (0, 1), True)  torch.linalg.vector_norm(m34, 2, (0, 0))
    torch.linalg.vector_norm(h34, dtype=torch.float32)  torch.linalg.vector_norm(x=m34, dim=1)
    F.normalize(m34)  F.layer_norm(m34, (4,))  F.layer_norm(m34, (3,))  F.layer_norm(m34, (3, 4))
    F.layer_norm(m34, ())  F.layer_norm(m34, (4,), v3)  F.layer_norm(m34, (4,), v4, v4)
    F.rms_norm(m34, (4,), v4)  F.rms_norm(m34, (5,))  F.rms_norm(m34, [4])  F.cross_entropy(m34, i34[:, 0])
    F.cross_entropy(m34, i34[0, :1])  F.cross_entropy(v4, i34[0, 0])  m34.sum_to_size(1, 4)
    m34.sum_to_size(4)  m34.sum_to_size(3)  m34.expand(2, 3, 4)  m34.expand(4)  v4.expand_as(m34)
    F.embedding(i34, m34)  F.embedding(i34, v4)  F.embedding(m34, m34)
"""
OUT = """
    torch.mm(m34, m45, out=e35)  torch.mm(m34, m45, out=e0)  torch.mm(m34, m45, out=e25)
    torch.mm(m34, m45, out=d35)  torch.mm(m34, m45, out=t35)  torch.mm(m34, m45, out=w35)
    torch.mm(m34, m45, out=x35)  torch.mm(m34, m45, out=g35)  torch.mm(m34, m34, out=e35)
    torch.matmul(b234, m45, out=e0)  torch.bmm(b234, b245, out=e0)  torch.mv(m34, v4, out=e0)
    torch.addmm(v5, m34, m45, out=e35)  torch.addmm(b135, m34, m45, out=e35)
    torch.addmm(e35, m34, m45, out=e35)  torch.baddbmm(b235, b234, b245, alpha=2, out=e0)
    torch.softmax(m34, 0, out=e0)  torch.log_softmax(m34, 1, out=e35)  torch.softmax(m34, 0, out=d35)
    torch.sum(m34, 0, out=e0)  torch.sum(m34, 0, out=d35)  torch.sum(h34, 0, out=e0)
    torch.sum(m34, 0, out=j35)  torch.mean(m34, 1, out=e0)  torch.mean(m34, (0, 1), out=e0)
    torch.mean(m34, 0, out=j35)  torch.nansum(m34, 0, out=e0)  torch.nanmean(m34, 0, out=e0)
    torch.logsumexp(m34, 0, out=e0)  torch.logsumexp(m34, 0, out=d35)  torch.var(m34, 0, out=e0)
    torch.std(m34, 1, correction=0, out=e0)  torch.norm(m34, out=e0)
    torch.linalg.vector_norm(m34, dim=0, out=e0)  torch.linalg.norm(m34, out=e0)  e35.addmm_(m34, m45)
    e35.addmm_(m34, m45, beta=0.5, alpha=2)  v5.addmm_(m34, m45)  t35.addmm_(m34, m45)  e35.addmm_(m34, m34)
    g35.addmm_(m34, m45)  h34.addmm_(m34, m45)  e235.baddbmm_(b234, b245)  e35.baddbmm_(b234, b245)
    x35.addmm_(m34, m45)
"""


def calls(text: str) -> list[str]:
    return [call.strip() for line in text.splitlines() for call in line.strip().split("  ") if call.strip()]


def operands() -> dict[str, Tensor]:
    """Fresh ones. To write: e float32, d float64, j integers, t transposed, w wide, x expanded, g a leaf."""
    wide = torch.full((3, 9), 7.0)
    return {name: t.clone() for name, t in T.items()} | {
        "e0": torch.empty(0),
        "e35": torch.ones(3, 5),
        "e25": torch.ones(2, 5),
        "e235": torch.ones(2, 3, 5),
        "d35": torch.ones(3, 5, dtype=torch.float64),
        "j35": torch.ones(3, 5, dtype=torch.int64),
        "t35": torch.ones(5, 3).mT,
        "w35": wide[:, 2:7],
        "x35": torch.ones(1).expand(3, 5),
        "g35": torch.ones(3, 5, requires_grad=True),
    }


def tried(call: str, mode: Any) -> tuple[Any, dict[str, Tensor]]:
    """The result, or the error, and the operands afterwards."""
    given = operands()
    with warnings.catch_warnings(), mode:
        warnings.simplefilter("ignore")
        try:
            return eval(call, {"torch": torch, "F": F}, given), given
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            return error, given


def described(result: Any) -> Any:
    if isinstance(result, Exception):
        return "refused"
    if isinstance(result, tuple):
        return [described(x) for x in result]
    return tuple(result.shape), result.dtype


@pytest.mark.parametrize("call", calls(PRODUCTS + REDUCTIONS + OUT))
def test_accepted_and_refused_alike(call: str, within: Within) -> None:
    theirs, _ = tried(call, nullcontext())
    ours, _ = tried(call, within("ignore"))
    assert described(ours) == described(theirs), (ours, theirs)


@pytest.mark.parametrize("call", calls(OUT))
def test_what_is_written_is_the_functional_result(call: str, within: Within) -> None:
    ours, given = tried(call, within("error"))
    if isinstance(ours, Exception):
        untouched = operands()
        for name in ("e35", "t35", "w35"):
            assert_same_bits(given[name], untouched[name], name)
        return
    name = call.partition("out=")[2].rstrip(")") or call.partition(".")[0]
    assert ours is given[name]
    functional = call.replace(f", out={name}", "").replace("addmm_", "addmm").replace("baddbmm_", "baddbmm")
    if name == "d35" or "h34" in call:
        functional = f"{functional[:-1]}, dtype=torch.{str(ours.dtype)[6:]})"
    want, _ = tried(functional, within("ignore"))
    assert_same_bits(ours.detach(), want.detach(), call)


@pytest.mark.parametrize("call", ["h34 @ m45", "m34 @ h45", "h34.__matmul__(m45)", "torch.matmul(h34, m45)"])
def test_operands_of_two_dtypes_are_named(call: str, within: Within) -> None:
    """Also by the operator, of which Python takes a TypeError for an unknown type."""
    error, _ = tried(call, within("error"))
    assert type(error) is RuntimeError
    got, expected = ("bfloat16", "float32") if call.startswith("m") else ("float32", "bfloat16")
    assert f"torch.matmul (@): other: expected torch.{expected} like input, got torch.{got}" in str(error)


def test_gradients_flow_through_what_is_written_in_place(within: Within) -> None:
    acc, a, b = (torch.randn(3, 5), torch.randn(3, 4), torch.randn(4, 5))
    leaves = [t.requires_grad_() for t in (acc, a, b)]
    run: list[Callable[[], Tensor]] = [
        lambda: (leaves[0] * 1).addmm_(leaves[1], leaves[2], beta=0.5),
        lambda: torch.addmm(leaves[0] * 1, leaves[1], leaves[2], beta=0.5),
    ]
    with within("error"):
        in_place, functional = (torch.autograd.grad(f().square().sum(), leaves) for f in run)
    for got, want in zip(in_place, functional, strict=True):
        assert_same_bits(got, want)
