"""Verification of the public operations."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from samebits.backends import chosen_backend, use_backend
from samebits.contract import FMA, Contract
from samebits.ops.addmm import addmm_
from samebits.ops.attention import attention
from samebits.ops.bmm import bmm
from samebits.ops.linear import linear
from samebits.ops.linear_logp import linear_logp
from samebits.ops.logp import logp
from samebits.ops.matmul import matmul
from samebits.testing import values
from samebits.tools.verify.case import BF16, F16, F32
from samebits.tools.verify.failures import finish
from samebits.tools.verify.reference import REFERENCE
from samebits.tools.verify.report import Report


def verify_operations(report: Report, contract: Contract, device: torch.device) -> None:
    """Compare the public operations and their gradients on the GPU with those on the CPU.

    On the GPU the chosen backend computes them, if one was chosen.
    """
    backend = chosen_backend(device.type) or ""
    name = f"{backend} operations".strip()

    def both(what: str, run: Callable[..., tuple[Tensor, ...]], *shapes: tuple[int, ...]) -> None:
        for dtype, kind in itertools.product((BF16, F16, F32), ("normal", "wide", "special")):
            inputs = [values(kind, shape, dtype, i) for i, shape in enumerate(shapes)]
            follows = FMA if dtype == F32 else contract
            with use_backend(None):
                want = run(*inputs, contract=follows)
            got = run(*(t.to(device) for t in inputs), contract=follows)
            finish(f"{name}, {what}")
            for g, w in zip(got, want, strict=True):
                report.compare(name, what, REFERENCE, g, w.to(device), f"{dtype} {kind} {shapes}")

    def gradients(x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor, **options: Any) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
        with torch.enable_grad():
            y = linear(*leaves, **options)
        return (y.detach(), *torch.autograd.grad(y, leaves, dy))

    def packed(x: Tensor, *others: Tensor, contract: Contract) -> tuple[Tensor, ...]:
        ends = torch.tensor([0, 5, 5, 37, 53, 200], dtype=torch.int32, device=x.device)
        return gradients(x, *others, cu_seqlens=ends, contract=contract)

    def accumulated(a: Tensor, b: Tensor, contract: Contract) -> tuple[Tensor, ...]:
        acc = values("normal", (a.shape[0], b.shape[1]), F32, 9).to(a.device)
        return (addmm_(addmm_(acc, a, b, contract=contract), a, b, contract=contract),)

    def log_probabilities(
        x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor, contract: Contract
    ) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
        target = torch.arange(-1, len(x) - 1, device=x.device)
        with torch.enable_grad():
            results = linear_logp(
                *(leaves[0], leaves[1], target, leaves[2]),
                ignore_index=-1,
                temperature=0.7,
                return_entropy=True,
                contract=contract,
            )
        return (*(t.detach() for t in results), *torch.autograd.grad(results, leaves, [dy.float()] * 2))

    def from_logits(logits: Tensor, dy: Tensor, contract: Contract) -> tuple[Tensor, ...]:
        leaf = logits.detach().requires_grad_()
        with torch.enable_grad():
            out = logp(leaf, torch.arange(-1, len(leaf) - 1, device=leaf.device), ignore_index=-1)
        return (out.detach(), *torch.autograd.grad(out, leaf, dy.float()))

    def attended(q: Tensor, k: Tensor, v: Tensor, dy: Tensor, **options: Any) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        with torch.enable_grad():
            out = attention(*leaves, is_causal=True, enable_gqa=True, **options)
        return (out.detach(), *torch.autograd.grad(out, leaves, dy))

    for n, k in ((136, 200), (24, 33)):
        both("linear and gradients", gradients, (3, 70, k), (n, k), (n,), (3, 70, n))
        both("linear and gradients, packed", packed, (200, k), (n, k), (n,), (200, n))
        both("addmm_", accumulated, (70, k), (k, n))
        both("bmm", lambda a, b, contract: (bmm(a, b, contract=contract),), (4, 30, k), (1, k, n))
        both("matmul", lambda a, b, contract: (matmul(a, b, contract=contract),), (3, 1, 20, k), (2, k, n))
        both("linear_logp and gradients", log_probabilities, (70, k), (40 * n, k), (40 * n,), (70,))
        both("logp and gradient", from_logits, (70, 40 * n), (70,))
        if backend == "triton":  # it has no attention
            continue
        heads, shared = (2, 4, 70), (2, 2, 70)
        both("attention and gradients", attended, (*heads, k), (*shared, k), (*shared, n), (*heads, n))
