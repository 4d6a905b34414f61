"""Scaled dot-product attention, made of chains: ``F.scaled_dot_product_attention``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samebits.backends import Key, broadcast, contract_of, on_gpu, unpack_key
from samebits.contract import Contract
from samebits.ops._checks import check_device, check_operands, shape
from samebits.ops._operator import Operator, refuse_second_derivatives
from samebits.ops._rows import backend, refuse_triton


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    contract: Contract | None = None,
) -> Tensor:
    """``softmax(q @ k.mT * scale + mask) @ v``, as :func:`torch.nn.functional.scaled_dot_product_attention`.

    ``z[i, j] = (sum over d of q[i, d] * k[j, d]) * scale + mask[i, j]``, -inf where masked,
    ``p[i, j] = exp(z[i, j] - R) / S`` in the input dtype, ``out[i] = sum over j of p[i, j] * v[j]``

    Scores are float32 accumulators of chains over d; R and S as in ``softmax``; the output is one chain over
    the keys, from key 0. Masked keys at the end of a row (and how many there are) change no bit, so one query
    with a cache of its past, a chunk of queries, and all queries at once give a query the same bits. That
    takes masked keys and values to be finite numbers: 0 * inf and 0 * NaN are NaN. Keys that are masked at
    the start do move the others, to other blocks of 128 and groups of 16, and so may change bits.

    Args:
        q: ``[..., H, L, E]``; bfloat16, float16 or float32, any strides.
        k: ``[..., H, S, E]``; same dtype and device. With ``enable_gqa`` it may have fewer heads, of which
            each serves H / their number consecutive heads of q. Leading dimensions broadcast.
        v: ``[..., H, S, Ev]``, likewise.
        mask: ``[..., L, S]``, broadcast. Boolean: False is masked. Otherwise added to the scores in float32;
            it may not require a gradient.
        is_causal: query i sees keys 0 to i.
        scale: float32; 1 / sqrt(E) by default.
        contract: as in :func:`samebits.matmul`.

    Returns:
        ``[..., H, L, Ev]``. A query with all keys masked, or with none, gives zeros.

    Gradients: from the scores computed again; of q a chain over keys, of k and v chains over queries, with
    each head that they serve as a sequence. See ``docs/contract.md``, "Attention".

    Raises:
        TypeError: dtypes are not these, or differ.
        ValueError: shapes or devices do not match, both ``mask`` and ``is_causal`` are given, or the mask
            requires a gradient.
    """
    (q, k, v), key, _ = check_operands("attention", contract, {"q": q, "k": k, "v": v})
    refuse_triton("attention", key)
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.ndim < 2:
            raise ValueError(
                f"samebits.attention: {name}: expected [..., tokens, size], got shape {shape(t)}"
            )
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"samebits.attention: q, k: sizes differ in shapes {shape(q)} and {shape(k)}")
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(f"samebits.attention: k, v: tokens differ in shapes {shape(k)} and {shape(v)}")
    if scale is None:
        scale = 1 / math.sqrt(q.shape[-1]) if q.shape[-1] else 1.0
    grouped = enable_gqa and q.ndim > 2
    if grouped:
        batch = broadcast(*(t.shape[:-3] for t in (q, k, v)))
        leading = torch.Size((*batch, q.shape[-3]))
    else:
        leading = broadcast(*(t.shape[:-2] for t in (q, k, v)))
    q5, k4, v4 = _heads(q, k, v, leading, grouped)
    if mask is not None:
        if is_causal:
            raise ValueError("samebits.attention: mask: expected none with is_causal")
        mask = _mask(mask, q, k, leading, q5)
    scale = float(np.float32(scale))
    out: Tensor = _operator(q5, k4, v4, mask, is_causal, scale, key)
    return out.reshape(*leading, q.shape[-2], v.shape[-1])


def _heads(
    q: Tensor, k: Tensor, v: Tensor, leading: torch.Size, grouped: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """q as ``[B, heads of k, group, L, E]``, k and v as ``[B, heads, S, E]``."""
    batch, heads = leading[:-1], leading[-1] if leading else 1
    of_k = k.shape[-3] if grouped else heads
    if of_k == 0 or heads % of_k or (grouped and v.shape[-3] != of_k):
        raise ValueError(
            "samebits.attention: k, v: expected as many heads as, or a divisor of, q's, got shapes"
            f" {shape(q)}, {shape(k)} and {shape(v)}"
        )
    q = q.expand(*leading, *q.shape[-2:]).reshape(batch.numel(), of_k, heads // of_k, *q.shape[-2:])
    k, v = (
        t.expand(*leading[:-1], *((of_k,) if leading else ()), *t.shape[-2:]).reshape(
            batch.numel(), of_k, *t.shape[-2:]
        )
        for t in (k, v)
    )
    return q, k, v


def _mask(mask: Tensor, q: Tensor, k: Tensor, leading: torch.Size, q5: Tensor) -> Tensor:
    """The mask as a view ``[B, heads of k, group, L, S]``, boolean or float32."""
    check_device("attention", "mask", mask, "q", q)
    if mask.requires_grad and torch.is_grad_enabled():
        raise ValueError("samebits.attention: mask: expected one that requires no gradient")
    if mask.dtype != torch.bool:
        check_operands("attention", None, {"mask": mask}, autocast=False)
        mask = mask.to(torch.float32)
    wanted = (*leading, q.shape[-2], k.shape[-2])
    try:
        mask = mask.expand(wanted)
    except RuntimeError:
        raise ValueError(
            f"samebits.attention: mask: expected a shape that broadcasts to {tuple(wanted)},"
            f" got {shape(mask)}"
        ) from None
    return mask.reshape(*q5.shape[:3], *mask.shape[-2:])


_SCORES = 1 << 27  # held at once: 512 MiB


def _pieces(q: Tensor, k: Tensor) -> Iterator[tuple[slice, slice]]:
    """Parts of the batch and of k's heads with about so many scores."""
    batch, heads = q.shape[:2]
    scores = q.shape[2] * q.shape[3] * k.shape[2]
    at_once = max(1, _SCORES // max(1, scores))
    rows, columns = max(1, at_once // max(1, heads)), min(heads, at_once)
    for b in range(0, batch, rows):
        for h in range(0, heads, max(1, columns)):
            yield slice(b, b + rows), slice(h, h + columns)


def _products(t: Tensor, key: Key) -> tuple[Any, str]:
    """The module that multiplies on the device of `t`, and the contract's key that it takes."""
    if t.is_cuda:
        return on_gpu("matmul", key, t.get_device())
    from samebits.backends.reference import matmul as reference

    return reference, unpack_key(key)[0]


def _probabilities(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float, key: Key) -> Tensor:
    """``p[b, heads, group * L, S]``, of the dtype of q."""
    b, heads, group, L, _ = q.shape
    S = k.shape[2]
    products, contract = _products(q, key)
    scores = products.matmul(
        *(q.reshape(b, heads, group * L, q.shape[-1]), k.mT),
        bias=None,
        out_dtype=torch.float32,
        contract=contract,
    )
    if mask is not None:
        scores = scores.view(b, heads, group, L, S).mul_(scale)
        scores = scores.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else scores.add_(mask)
        scale = 1.0
    p = backend(q).probabilities(scores.reshape(-1, S), scale, L if causal else 0, q.dtype)
    return p.view(b, heads, group * L, S)  # type: ignore[no-any-return]


def _product_over_keys(a: Tensor, b: Tensor, key: Key) -> Tensor:
    """``a[..., M, keys] @ b[..., keys, N]``, chains that end in a zero term: more zeros change nothing."""
    products, contract = _products(a, key)
    out = products.addbmm(
        *(None, a.flatten(0, 1)[:, None], b.reshape(-1, 1, *b.shape[2:]), None),
        out_dtype=a.dtype,
        contract=contract,
    )
    return out.view(*a.shape[:2], *out.shape[1:])  # type: ignore[no-any-return]


def _product_over_queries(a: Tensor, b: Tensor, group: int, key: Key) -> Tensor:
    """``a[..., group * L, M].mT @ b[..., group * L, N]``, each of the group a sequence."""
    tokens = a.shape[2] // group
    if contract_of(key).step == "fma" or tokens % 16 == 0:
        group = 1  # the same chain: no group of 16 reaches over the end of a sequence
    heads = a.shape[:2].numel()
    a4, b4 = (t.reshape(heads, group, t.shape[2] // group, t.shape[3]) for t in (a, b))
    products, contract = _products(a, key)
    out = products.addbmm(None, a4.mT, b4, None, out_dtype=a.dtype, contract=contract)
    return out.view(*a.shape[:2], *out.shape[1:])  # type: ignore[no-any-return]


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, key: Key
) -> Tensor:
    if q.is_cuda:
        from samebits.backends.cuda import attention_sm90

        _, contract = _products(q, key)
        if attention_sm90.supports(q, k, v, contract) and attention_sm90.pays(q, k):
            return attention_sm90.attention(q, k, v, mask, causal, scale, contract)
    return stored(q, k, v, mask, causal, scale, key)


def stored(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, key: Key
) -> Tensor:
    """The forward by kernels that store scores, some heads at a time."""
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    if k.shape[2] == 0:
        return out.zero_()
    for part in _pieces(q, k):
        part_mask = None if mask is None else mask[part]
        p = _probabilities(q[part], k[part], part_mask, causal, scale, key)
        out[part] = _product_over_keys(p, v[part], key).view(out[part].shape)
    return out


def _gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    key: Key,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
    if k.shape[2] == 0:
        return dq.zero_(), dk, dv
    group = q.shape[2]
    products, contract = _products(q, key)
    for part in _pieces(q, k):
        part_mask = None if mask is None else mask[part]
        p = _probabilities(q[part], k[part], part_mask, causal, scale, key)
        dy, rows = (t[part].flatten(2, 3) for t in (grad, q))
        dv[part] = _product_over_queries(p, dy, group, key)
        dp = products.matmul(dy, v[part].mT, bias=None, out_dtype=torch.float32, contract=contract)
        dz = backend(q).grad_scores(dp.flatten(0, 2), p.flatten(0, 2), scale, q.dtype).view(p.shape)
        dq[part] = _product_over_keys(dz, k[part], key).view(dq[part].shape)
        dk[part] = _product_over_queries(dz, rows, group, key)
    return dq, dk, dv


def _fake(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, key: Key
) -> Tensor:
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


_operator = Operator(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float scale, str contract) -> Tensor",
    cpu=_forward,
    fake=_fake,
)


def _fake_gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(t.new_empty(t.shape) for t in (q, k, v))


_gradient = Operator(
    "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float"
    " scale, str contract) -> (Tensor, Tensor, Tensor)",
    cpu=_gradients,
    fake=_fake_gradients,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, v, mask, ctx.causal, ctx.scale, ctx.key = inputs
    ctx.save_for_backward(q, k, v, mask)


def _backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    refuse_second_derivatives("attention")
    grads = _gradient(grad, *saved, ctx.causal, ctx.scale, ctx.key)
    return *grads, None, None, None, None


_operator.register_autograd(_backward, setup_context=_setup_context)
