"""``samebits.rotary``: rotary positions of queries and keys in one launch."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from samebits.ops._checks import check_device, shape
from samebits.ops._fused import (
    backend,
    check_out,
    check_tensors,
    refuse_gradients,
    refuse_shared,
)
from samebits.ops._operator import Operator, refuse_second_derivatives

_OP = "rotary"
Layout = Literal["halves", "pairs", "pairs to halves"]
Gradients = Literal["rounded", "wide", "split"]
_LAYOUTS = ("halves", "pairs", "pairs to halves")
_GRADIENTS = ("rounded", "wide", "split")


@overload
def rotary(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor | None = None,
    rotary_dim: int | None = None,
    layout: Layout = "halves",
    gradients: Gradients = "rounded",
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]: ...


@overload
def rotary(
    q: Tensor,
    k: None,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor | None = None,
    rotary_dim: int | None = None,
    layout: Layout = "halves",
    gradients: Gradients = "rounded",
    out: tuple[Tensor, None] | None = None,
) -> tuple[Tensor, None]: ...


def rotary(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor | None = None,
    rotary_dim: int | None = None,
    layout: Layout = "halves",
    gradients: Gradients = "rounded",
    out: tuple[Tensor, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Queries and keys with rotary positions, with the bits of ``apply_rotary_pos_emb`` of ``transformers``.

    For each pair (a, b) of a head's first R entries, with its cosines and sines, it gives

    ``round(round(a * cos) - round(b * sin))`` and ``round(round(b * cos) + round(a * sin))``

    where ``round`` rounds to the dtype to which PyTorch promotes those of `q` and `cos`. The result is
    rounded to the dtype of `q`, if that is another one. So `cos` in the dtype of `q` gives what most models
    compute (Llama, Qwen, Mistral, Gemma, GLM, GPT-NeoX, Phi-3, GPT-OSS), and `cos` in float32 what those do
    that compute in float32 (OLMo 2, Cohere, ERNIE 4.5, ModernBERT, the vision towers of Qwen). ``q * cos +
    rotate_half(q) * sin`` and GPT-OSS's ``first * cos - second * sin`` have the same bits. Products of
    complex numbers (Llama 4, DeepSeek-V2) may have others. The rest of a head is copied. One launch on a GPU,
    for both.

    Args:
        q: ``[..., Hq, D]``: tokens, heads and their entries, in any strides; bfloat16, float16 or float32.
            Where heads stand before tokens, as in ``transformers``, give ``q.transpose(-3, -2)``.
        k: ``[..., Hk, D]`` of the same tokens and dtype, or None.
        cos, sin: of one dtype and shape, in any strides. Without `positions` a row for each token:
            ``[..., C]``, of the tokens' shape or one that broadcasts to it. With `positions` tables
            ``[P, C]``; both may be halves of one. C is R / 2, a value for each pair, or R, one for each entry
            of a result.
        positions: int32 or int64, of the tokens' shape: rows of the tables. At a position that they do not
            have, the rotated entries are NaN. Nothing waits for a check.
        rotary_dim: R, even. None: D.
        layout: where a head's pairs are.

            * ``"halves"``: entries i and i + R / 2 (Llama, GPT-NeoX and most others).
            * ``"pairs"``: entries 2 i and 2 i + 1 (GLM, Cohere, ERNIE 4.5, GPT-J). Models whose `cos` has
              each value in either half use the first one: give ``cos[..., : R // 2]``.
            * ``"pairs to halves"``: entries 2 i and 2 i + 1 of `q`, and i and i + R / 2 of the result
              (DeepSeek-V3).
        gradients: which code the gradients have the bits of, see below.
        out: where the results are written; None for that of no `k`. They may be `q` and `k` themselves,
            unless pairs go to halves.

    Returns:
        Queries and keys, or None for no `k`.

    Raises:
        TypeError: a tensor is not dense, or has another dtype.
        ValueError: shapes or devices do not match, or `out` overlaps in another way.
        NotImplementedError: a gradient of `cos` or `sin` is asked for, or any with `out`.

    The gradients are turned back, in one launch for both. From those of a pair's results, g and h, they are

    ``round(g * cos) + round(h * sin)`` and ``round(h * cos) - round(g * sin)``

    with the cosine and sine of the same result, and a sum that is rounded. `gradients` says how:

    ===============  ========================  =====================  ==================================
    `gradients`      ``round``                 a sum of -0 is         code
    ===============  ========================  =====================  ==================================
    ``"rounded"``    to the dtype of `q`       +0                     that of most models, also OLMo 2's,
                                                                      ERNIE 4.5's and ModernBERT's
    ``"wide"``       to that of `cos` and `q`  +0                     what begins with ``q = q.float()``:
                                                                      Cohere, the vision towers of Qwen
    ``"split"``      to the dtype of `q`       -0                     what splits by :func:`torch.chunk`:
                                                                      GPT-OSS
    ===============  ========================  =====================  ==================================

    (Autograd adds the gradients of slices to zeros, and those of the rest of a head, too.) Results have the
    dtype of `q`. Second derivatives are not implemented.
    """
    bypass = check_tensors(_OP, q=q, k=k, cos=cos, sin=sin)
    pairs = check_heads(_OP, q, k, cos, sin, positions, rotary_dim, layout, gradients)
    refuse_gradients(_OP, cos=cos, sin=sin)
    if out is None:
        q_out, k_out = _operator(q, k, cos, sin, positions, pairs, layout, gradients, bypass=bypass)
        return q_out, None if k is None else k_out
    refuse_gradients(_OP, q=q, k=k)
    check_outs(_OP, out, layout, q=q, k=k, cos=cos, sin=sin)
    _into(q, k, cos, sin, positions, *out, pairs, layout, bypass=bypass)
    return out


def check_heads(
    op: str,
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    rotary_dim: int | None,
    layout: str,
    gradients: str,
) -> int:
    """Refuse queries, keys and tables that do not belong together. Returns the pairs of a head."""
    if q.ndim < 2:
        raise ValueError(f"samebits.{op}: q: expected [..., heads, D], got shape {shape(q)}")
    if layout not in _LAYOUTS:
        raise ValueError(f"samebits.{op}: layout: expected one of {_LAYOUTS}, got {layout!r}")
    if gradients not in _GRADIENTS:
        raise ValueError(f"samebits.{op}: gradients: expected one of {_GRADIENTS}, got {gradients!r}")
    lead, head = q.shape[:-2], q.shape[-1]
    if k is not None:
        if k.dtype != q.dtype:
            raise TypeError(f"samebits.{op}: k: expected {q.dtype} like q, got {k.dtype}")
        if k.ndim != q.ndim or k.shape[:-2] != lead or k.shape[-1] != head:
            wanted = f"{(*lead, 'heads', head)} for q {shape(q)}".replace("'", "")
            raise ValueError(f"samebits.{op}: k: expected {wanted}, got {shape(k)}")
    size = head if rotary_dim is None else rotary_dim
    if not isinstance(size, int) or size % 2 or not 0 <= size <= head:
        name = "q: D" if rotary_dim is None else "rotary_dim"
        raise ValueError(f"samebits.{op}: {name}: expected an even number up to {head}, got {size!r}")
    _check_tables(op, cos, sin, positions, q, size)
    return size // 2


def check_outs(
    op: str,
    out: tuple[Tensor, Tensor | None],
    layout: str,
    q: Tensor,
    k: Tensor | None,
    **others: Tensor | None,
) -> None:
    """Refuse what results of queries and keys cannot be written into."""
    if not isinstance(out, tuple) or len(out) != 2 or (out[1] is None) != (k is None):
        raise TypeError(f"samebits.{op}: out: expected a tuple of two, for q and k, got {type(out).__name__}")
    q_out, k_out = out
    moved = layout == "pairs to halves"  # then an entry's place is another thread's to read
    if q_out is q and k_out is k and not moved:
        return
    operands = {"q": q, "k": k, **others}
    check_out(op, "out[0]", q_out, q, q.dtype, () if moved else (q,), **operands)
    if k is not None and k_out is not None:
        check_out(op, "out[1]", k_out, k, k.dtype, () if moved else (k,), **operands)
        refuse_shared(op, **{"out[0]": q_out, "out[1]": k_out})


def _check_tables(op: str, cos: Tensor, sin: Tensor, positions: Tensor | None, q: Tensor, size: int) -> None:
    """Refuse cosines, sines and positions that are not those of the tokens of `q`."""
    if sin.dtype != cos.dtype:
        raise TypeError(f"samebits.{op}: sin: expected {cos.dtype} like cos, got {sin.dtype}")
    if sin.shape != cos.shape:
        raise ValueError(f"samebits.{op}: sin: expected shape {shape(cos)} like cos, got {shape(sin)}")
    if cos.ndim == 0 or cos.shape[-1] not in (size, size // 2):
        raise ValueError(
            f"samebits.{op}: cos: expected [..., {size // 2}] or [..., {size}] for rotary_dim {size}, got"
            f" shape {shape(cos)}"
        )
    lead = q.shape[:-2]
    if positions is None:
        own = cos.shape[:-1]
        spread = zip(reversed(own), reversed(lead), strict=False)
        if own != lead and (len(own) > len(lead) or any(n not in (1, m) for n, m in spread)):
            raise ValueError(
                f"samebits.{op}: cos: expected the tokens' shape {tuple(lead)} before its last dimension,"
                f" got shape {shape(cos)}"
            )
        return
    if not isinstance(positions, Tensor) or positions.dtype not in (torch.int32, torch.int64):
        got = positions.dtype if isinstance(positions, Tensor) else type(positions).__name__
        raise TypeError(f"samebits.{op}: positions: expected int32 or int64, got {got}")
    if positions.shape != lead:
        raise ValueError(
            f"samebits.{op}: positions: expected the tokens' shape {tuple(lead)}, got {shape(positions)}"
        )
    check_device(op, "positions", positions, "q", q)
    if cos.ndim != 2 or len(cos) == 0:
        raise ValueError(f"samebits.{op}: cos: expected [P, {size // 2}] with positions, got {shape(cos)}")


def _run(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    pairs: int,
    layout: str,
    gradients: str,
) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = backend(_OP, q).rotary(q, k, cos, sin, positions, pairs, layout)
    return found


_operator = Operator(
    "rotary(Tensor q, Tensor? k, Tensor cos, Tensor sin, Tensor? positions, int pairs, str layout,"
    " str gradients) -> (Tensor, Tensor)",
    cpu=_run,
    fake=lambda q, k, *_: (q.new_empty(q.shape), q.new_empty((0,) if k is None else k.shape)),
)


def _run_backward(
    of_q: Tensor | None,
    of_k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    pairs: int,
    layout: str,
    gradients: str,
) -> tuple[Tensor, Tensor]:
    module = backend(_OP, cos)
    found: tuple[Tensor, Tensor] = module.rotary_backward(
        of_q, of_k, cos, sin, positions, pairs, layout, gradients
    )
    return found


def _fake_backward(of_q: Tensor | None, of_k: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    lead: Any = of_k if of_q is None else of_q
    q, k = (lead.new_empty((0,) if t is None else t.shape) for t in (of_q, of_k))
    return q, k


_gradient = Operator(
    "rotary_backward(Tensor? of_q, Tensor? of_k, Tensor cos, Tensor sin, Tensor? positions, int pairs,"
    " str layout, str gradients) -> (Tensor, Tensor)",
    cpu=_run_backward,
    fake=_fake_backward,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, k, cos, sin, positions, *ctx.options = inputs
    ctx.save_for_backward(cos, sin, positions)
    ctx.set_materialize_grads(False)
    if k is None:
        ctx.mark_non_differentiable(output[1])


def _backward(
    ctx: Any, saved: tuple[Tensor, Tensor, Tensor | None], of_q: Tensor | None, of_k: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    refuse_second_derivatives(_OP)
    of_q, of_k = (g if ctx.needs_input_grad[i] else None for i, g in enumerate((of_q, of_k)))
    q = k = None
    if of_q is not None or of_k is not None:
        q, k = _gradient(of_q, of_k, *saved, *ctx.options)
    return None if of_q is None else q, None if of_k is None else k, None, None, None, None, None, None


_operator.register_autograd(_backward, setup_context=_setup_context)


def _run_into(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    q_out: Tensor,
    k_out: Tensor | None,
    pairs: int,
    layout: str,
) -> None:
    backend(_OP, q).rotary_into(q, k, cos, sin, positions, q_out, k_out, pairs, layout)


_into = Operator(
    "rotary_into(Tensor q, Tensor? k, Tensor cos, Tensor sin, Tensor? positions, Tensor(a!) q_out,"
    " Tensor(b!)? k_out, int pairs, str layout) -> ()",
    cpu=_run_into,
    fake=lambda *_: None,
)
