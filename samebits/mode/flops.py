"""FLOP formulas of this library's operators, for ``torch.utils.flop_counter``.

A call counts as the PyTorch operator counts that it takes the place of. Formulas are registered when the
counter's module is loaded.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from samebits.mode.patches import when_loaded

__all__ = ["register_flops"]

_MODULE = "torch.utils.flop_counter"


def register_flops() -> None:
    """Register the formulas as soon as ``torch.utils.flop_counter`` is loaded."""
    if _MODULE in sys.modules:
        _register()
    else:
        when_loaded(_MODULE, _register)


def _register() -> None:
    for family in ("conv", "fp8_linear", "fp8_weights", "grouped_mm", "linear_logp", "scaled_grouped_mm"):
        importlib.import_module(f"samebits.ops.{family}")  # they define operators
    counter = sys.modules[_MODULE]
    for names, formula in _FORMULAS.items():
        for name in names.split():
            target = getattr(torch.ops.samebits, name)
            if target not in counter.flop_registry:
                counter.register_flop_formula(target, get_raw=True)(formula)


def _matmul(a: Tensor, b: Tensor, *rest: Any, out_val: Tensor, **named: Any) -> int:
    return 2 * out_val.numel() * a.shape[-1]


def _linear(x: Tensor, weight: Tensor, *rest: Any, out_val: Tensor, **named: Any) -> int:
    return 2 * x.numel() * weight.shape[0]


def _sum_of_products(acc: Tensor | None, a: Tensor, b: Tensor, *rest: Any, **named: Any) -> int:
    return _grouped_terms(a, b)


def _grouped_terms(a: Tensor, b: Tensor, *rest: Any, **named: Any) -> int:
    sums = (a.shape[-2] == 1 and not a.stride(-1)) or (b.shape[-1] == 1 and not b.stride(-2))
    return 0 if sums else 2 * a.numel() * b.shape[-1]  # PyTorch sums the gradient of a bias


def _linear_logp(hidden: Tensor, weight: Tensor, *rest: Any, **named: Any) -> int:
    return 2 * hidden.numel() * weight.shape[0]


def _linear_logp_backward(
    grad: Tensor, grad_entropy: Any, hidden: Tensor, weight: Tensor, *rest: Any, **_: Any
) -> int:
    needed: Sequence[bool] = rest[-1]
    return 2 * hidden.numel() * weight.shape[0] * sum(needed[:2])


def _conv(x: Tensor, weight: Tensor, *rest: Any, out_val: Tensor, **named: Any) -> int:
    return 2 * out_val.numel() * prod(weight.shape[1:])


def _conv_grad_x(grad: Tensor, weight: Tensor, *rest: Any, **named: Any) -> int:
    return 2 * grad.numel() * prod(weight.shape[1:])


def _conv_grad_weight(grad: Tensor, x: Tensor, weight: Sequence[int], *rest: Any, **named: Any) -> int:
    return 2 * grad.numel() * x.shape[1] * prod(weight[2:])  # with groups, too: so PyTorch counts


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    sinks: Any,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    key_start: Any,
    key_length: Tensor | None,
    block_table: Tensor | None,
    *rest: Any,
    **named: Any,
) -> int:
    return 2 * _pairs(q, k, cu_seqlens_q, cu_seqlens_k, key_length, block_table) * (q.shape[-1] + v.shape[-1])


def _attention_out(out: Tensor, *args: Any, **named: Any) -> int:
    return _attention(*args, **named)


def _attention_backward(
    grad: Tensor, out: Tensor, lse2: Tensor, grad_mask: bool, *args: Any, **named: Any
) -> int:
    q: Tensor = args[0]
    k: Tensor = args[1]
    v: Tensor = args[2]
    pairs = _pairs(q, k, *args[5:7], *args[8:10])
    return 2 * pairs * (3 * q.shape[-1] + 2 * v.shape[-1])


def _pairs(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    key_length: Tensor | None,
    block_table: Tensor | None,
) -> int:
    """Pairs of a query and a key of its sequence, for all heads: PyTorch counts masked ones, too."""
    heads = q.shape[-2]
    if cu_seqlens_q is None and block_table is None:
        return prod(q.shape[:-1]) * k.shape[-3]
    queries = _lengths(cu_seqlens_q, q)
    keys = _lengths(cu_seqlens_k, k) if block_table is None else _numbers(key_length)
    if queries is None or keys is None:  # their values are not known
        return prod(q.shape[:-1]) * k.shape[-3]
    return heads * sum(m * n for m, n in zip(queries, keys, strict=True))


def _numbers(x: Tensor | None) -> list[int] | None:
    return None if x is None or x.is_meta or isinstance(x, FakeTensor) else x.tolist()


def _lengths(offsets: Tensor | None, x: Tensor) -> list[int] | None:
    if offsets is None:
        return [x.shape[-3]] * x.shape[0]
    return _numbers(offsets.diff())


_FORMULAS: dict[str, Callable[..., int]] = {
    "matmul scaled_mm grouped_rows scaled_grouped_mm fp8_grouped_linear fp8_grouped_weights": _matmul,
    "linear wide_linear fp8_linear fp8_weights": _linear,
    "addbmm addbmm_": _sum_of_products,
    "grouped_terms": _grouped_terms,
    "linear_logp": _linear_logp,
    "linear_logp_backward": _linear_logp_backward,
    "conv": _conv,
    "conv_grad_x": _conv_grad_x,
    "conv_grad_weight": _conv_grad_weight,
    "attention": _attention,
    "attention_out": _attention_out,
    "attention_backward": _attention_backward,
}
