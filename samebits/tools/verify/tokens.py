"""Comparison of weight gradients, which are sums over tokens, under different packings of the tokens."""

from __future__ import annotations

import dataclasses
import itertools

import torch
from torch import Tensor

from samebits.backends import chosen_backend, pack_key
from samebits.contract import Contract
from samebits.ops.addmm import addmm_
from samebits.ops.linear import linear
from samebits.testing import values
from samebits.tools.verify.case import F32, ProductCase
from samebits.tools.verify.failures import finish
from samebits.tools.verify.operands import Inputs
from samebits.tools.verify.reference import REFERENCE, on_cpu
from samebits.tools.verify.report import Report

_TOKENS = (700, 0, 1, 333, 16, 1024, 47, 5, 512, 129)
"""Lengths of sequences."""


def verify_tokens(
    report: Report, contract: Contract, device: torch.device, n: int, k: int, dtype: torch.dtype
) -> None:
    """Compare the bits of dW and db when the same sequences are packed, padded, or cut into micro-batches.

    The chosen backend computes them, if one was chosen.
    """
    backend = chosen_backend(device.type)
    where, key = f"N {n}, K {k}, {dtype}", pack_key(contract.key, backend)
    name = f"{backend or ''} gradients of weights".strip()
    ends = list(itertools.accumulate(_TOKENS, initial=0))
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)
    x = values("normal", (ends[-1], k), dtype, 1, device)
    dy = values("wide", (ends[-1], n), dtype, 2, device)
    weight, bias = values("normal", (n, k), dtype, 3, device), x.new_zeros(n)

    def chain(dy: Tensor, x: Tensor, offsets: Tensor | None = None) -> Tensor:
        out: Tensor = torch.ops.samebits.addbmm(None, dy.mT[None], x[None], offsets, F32, key)
        return out[0]

    def same(what: str, got: Tensor, want: Tensor) -> None:
        finish(f"{name}, {what}, {where}")
        report.compare(name, what, "packed sequences", got, want, where)

    want = chain(dy[None], x[None], offsets)
    case = ProductCase("", 8, n, ends[-1], dtype=dtype, out=F32)
    rows = torch.arange(0, n, n // 8, device=device)[:8]
    few = Inputs(dy[:, rows].mT.contiguous(), x, cu_seqlens=offsets)
    sampled = on_cpu(dataclasses.replace(case, m=len(rows), n=k), few, contract)
    report.compare(name, "f32, sampled", REFERENCE, want[rows], sampled, where)

    longest = max(_TOKENS) + 9
    padded_x = values("normal", (len(_TOKENS), longest, k), dtype, 4, device)
    padded_dy = padded_x.new_zeros((len(_TOKENS), longest, n))
    for i, (start, stop) in enumerate(itertools.pairwise(ends)):
        padded_x[i, : stop - start], padded_dy[i, : stop - start] = x[start:stop], dy[start:stop]
    same("f32, padded", chain(padded_dy, padded_x), want)

    grad = torch.zeros((n, k), device=device)
    for start, stop in itertools.pairwise(sorted({*ends, 160, ends[3] + 48, ends[5] + 512})):
        addmm_(grad, dy[start:stop].mT, x[start:stop])
    same("f32, micro-batches", grad, want)

    leaves = [t.detach().requires_grad_() for t in (weight, bias)]
    with torch.enable_grad():
        packed = linear(x, *leaves, cu_seqlens=offsets)
        padded = linear(padded_x, *leaves)
    for name, got, right in zip(
        ("dW", "db"),
        torch.autograd.grad(padded, leaves, padded_dy),
        torch.autograd.grad(packed, leaves, dy),
        strict=True,
    ):
        same(f"{name}, padded", got, right)
