"""Rotary positions and their gradients on CUDA tensors: ``kernels/rotary.cu``."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from samebits.backends.cuda import compiler, runtime
from samebits.backends.cuda.operands import TYPES, address

_THREADS = 128
TABLE = "PPP" + 8 * "q"  # the struct of rotary.cuh
_PARAMS = "PPPP" + 12 * "q" + TABLE + "q" + "iiii"
LAYOUTS = {
    "halves": ("HALVES", "HALVES"),
    "pairs": ("PAIRS", "PAIRS"),
    "pairs to halves": ("PAIRS", "HALVES"),
}


def kernel_spec(
    x: torch.dtype,
    trig: torch.dtype,
    layout: str,
    full: bool,
    vector: int,
    gradients: str = "none",
    *,
    programmatic: bool = False,
) -> compiler.KernelSpec:
    """The kernel of ``rotary.cu``."""
    types = ("IN", TYPES[x]), ("TRIG", TYPES[trig])
    of_operand, of_result = LAYOUTS[layout] if gradients == "none" else reversed(LAYOUTS[layout])
    placed = ("FROM", of_operand), ("TO", of_result)
    constants = (*types, *placed, ("FULL", int(full)), ("VECTOR", vector), ("GRADIENTS", gradients.upper()))
    return compiler.KernelSpec(
        "rotary.cu", "rotary", _PARAMS, constants, block=_THREADS, programmatic=programmatic
    )


_kernel = runtime.loader(kernel_spec)


def rotary(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    pairs: int,
    layout: str,
) -> tuple[Tensor, Tensor]:
    """Queries and keys ``[..., H, D]``, of which the first ``2 * pairs`` entries of a head are rotated."""
    device = q.get_device()
    q_out = runtime.empty(q.shape, q.dtype, device)
    k_out = runtime.empty((0,) if k is None else k.shape, q.dtype, device)
    rotary_into(q, k, cos, sin, positions, q_out, None if k is None else k_out, pairs, layout)
    return q_out, k_out


def rotary_backward(
    of_q: Tensor | None,
    of_k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    pairs: int,
    layout: str,
    gradients: str,
) -> tuple[Tensor, Tensor]:
    """Gradients of queries and keys from those of what :func:`rotary` gives."""
    lead, other = (of_k, None) if of_q is None else (of_q, of_k)
    assert lead is not None
    device = lead.get_device()
    first = runtime.empty(lead.shape, lead.dtype, device)
    second = runtime.empty((0,) if other is None else other.shape, lead.dtype, device)
    into = None if other is None else second
    rotary_into(lead, other, cos, sin, positions, first, into, pairs, layout, gradients)
    return (second, first) if of_q is None else (first, second)


def rotary_into(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    q_out: Tensor,
    k_out: Tensor | None,
    pairs: int,
    layout: str,
    gradients: str = "none",
) -> None:
    """The same into `q_out` and `k_out`, which may be `q` and `k`, but for the layout "pairs to halves".

    Or what :func:`rotary_backward` gives, if `gradients` is another word than "none".
    """
    lead, head = q.shape[:-2], q.shape[-1]
    cos, sin, at = placed(cos, sin, positions, lead)
    given = [None if t is None else head_rows(t, 2) for t in (q, k, q_out, k_out)]
    tokens = given[0]
    assert tokens is not None
    batch, count = tokens.shape[:2]
    heads = q.shape[-2], 0 if k is None else k.shape[-2]
    if batch * count * sum(heads) * head == 0:
        return
    in_place = q_out is q and (k is None or k_out is k)
    rest = 0 if in_place else head - 2 * pairs
    low = cos.data_ptr() | sin.data_ptr()
    for t in (cos, sin):
        low |= functools.reduce(int.__or__, t.stride()[:-1], 0) * t.itemsize
    for lines in given:
        if lines is not None:
            outer, token, each, _ = lines.stride()
            low |= lines.data_ptr() | (outer | token | each) * lines.itemsize
    vector = 16 // q.itemsize
    if low & 15 or pairs % vector:
        vector = 1
    full = cos.shape[-1] == 2 * pairs
    steps = [(0, 0, 0) if t is None else t.stride()[:3] for t in given]
    tasks = sum(heads) * (pairs // vector - (-rest // (2 * vector)))
    _kernel(q.get_device(), q.dtype, cos.dtype, layout, full, vector, gradients).launch(
        (batch * count, -(-tasks // _THREADS), 1),
        *(*map(address, given), *steps[0], *steps[1], *steps[2], *steps[3]),
        *(*table_of(cos, sin, at), count, *heads, pairs, rest),
    )
    for written, into in ((given[2], q_out), (given[3], k_out)):
        if into is not None and written is not None and written.data_ptr() != into.data_ptr():
            into.copy_(written.view(into.shape))


def placed(
    cos: Tensor, sin: Tensor, positions: Tensor | None, lead: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cosines, sines and positions of tokens, so that kernels can read them."""
    if positions is None:
        cos, sin = (head_rows(t.expand(*lead, t.shape[-1]), 1) for t in (cos, sin))
        return cos, sin, None
    cos, sin = (t if t.stride(-1) == 1 else t.contiguous() for t in (cos, sin))
    return cos, sin, _tokens(positions, 0)


def table_of(cos: Tensor, sin: Tensor, at: Tensor | None) -> tuple[int, ...]:
    """The values of a ``Table`` of what :func:`placed` gave."""
    of_cos, of_sin = (t.stride()[:2] if at is None else (0, t.stride(0)) for t in (cos, sin))
    of_positions = (0, 0) if at is None else at.stride()
    wide = int(at is not None and at.dtype == torch.int64)
    addresses = cos.data_ptr(), sin.data_ptr(), address(at)
    return *addresses, *of_cos, *of_sin, *of_positions, cos.shape[0], wide


def head_rows(t: Tensor, kept: int) -> Tensor:
    """`t` as ``[batch, tokens, ...]`` with the last `kept` dimensions, contiguous in the last."""
    if t.shape[-1] > 1 and t.stride(-1) != 1:
        t = t.contiguous()
    return _tokens(t, kept)


def _tokens(t: Tensor, kept: int) -> Tensor:
    """`t` as ``[batch, tokens, ...]`` with the last `kept` dimensions: a view if there is one."""
    lead, last = t.shape[: t.ndim - kept], t.shape[t.ndim - kept :]
    if len(lead) == 2:
        return t
    return t[None] if len(lead) == 1 else t.reshape(-1, lead[-1] if lead else 1, *last)
