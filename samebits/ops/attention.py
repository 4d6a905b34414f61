"""Scaled dot-product attention: :func:`attention`, and ``F.scaled_dot_product_attention`` in terms of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from samebits.backends import broadcast
from samebits.backends.attention import Align
from samebits.backends.replay import viewed
from samebits.contract import Contract
from samebits.ops._attention import attend
from samebits.ops._checks import check_device, check_operands, shape
from samebits.ops._memory import check_written, refuse_vmap
from samebits.ops._operator import as_no_view
from samebits.ops.expand import expand


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    key_start: Tensor | None = None,
    key_length: Tensor | None = None,
    block_table: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    contract: Contract | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention, with the shapes and conventions of ``flash_attn``.

    ``z[i, j] = (sum over d of q[i, d] * k[j, d]) * scale``
    ``out[i] = sum over j of softmax(z[i])[j] * v[j]``

    Keys are counted from the first one of their sequence, whatever slot of a tensor or page they lie in.
    Under a mask each query counts those that the mask shows it. Their sums are formed in segments of 512
    keys, which are merged in ascending order. So the output of a query has the same bits in a prefill, in a
    chunk of one and in a decoding step, in a padded and in a packed batch, with hidden keys anywhere, and
    with pages of any size. Gradients have the same bits for every padding and packing.
    ``docs/contract.md``, "Attention", has the order of all sums.

    Args:
        q: ``[B, Tq, H, D]``, or packed ``[tokens, H, D]``; bfloat16, float16 or float32, any strides.
        k: ``[B, Tk, Hk, D]``, packed ``[tokens, Hk, D]``, or with ``block_table`` pages
            ``[pages, page, Hk, D]``; same dtype and device. H is a multiple of Hk: each head of k and v
            serves H / Hk consecutive ones of q.
        v: the same with a last size Dv of its own. It may be a view of k, as in latent attention. On a GPU
            D is at most 576, and Dv 512; above 256 they need the shared memory of sm_90.
        causal: a query sees no key after its own position. With ``causal`` or a window, the last query of a
            sequence has the position of its last key.
        window: how many keys to the left and right of its own position a query sees; -1 for all.
        scale: rounded to float32; 1 / sqrt(D) by default.
        softcap: scores become ``softcap * tanh(z / softcap)``; 0 for no cap.
        sinks: ``[H]``, any float dtype: a logit for each head that takes part in the softmax, without a
            value.
        mask: ``[B, H, Tq, Tk]``, or of a shape that broadcasts to it. Boolean: a key is invisible where
            False. Float: added to the scores; a key is invisible where it adds -5,678 or less. Its keys are
            slots of k. Not for packed operands.
        cu_seqlens_q: int32 or int64 ``[B + 1]``: the offsets of packed sequences in q.
        cu_seqlens_k: likewise in k and v. With ``cu_seqlens_q`` it or ``block_table`` is needed.
        key_start: int32 or int64 ``[B]``: the first slot of each sequence's keys (left padding); 0 by
            default.
        key_length: int32 or int64 ``[B]``: the slot after each sequence's last key, as ``cache_seqlens``; all
            slots are used by default.
        block_table: int32 or int64 ``[B, n]``: the pages that hold a sequence's slots, in order. It needs
            ``key_length``, and has no gradients.
        return_lse: also return the log-sum-exp of the scores.
        out: where the output goes, of its shape, q's dtype and device; no copy if contiguous. It has memory
            of its own. Without gradients.
        contract: as in :func:`samebits.matmul`.

    Returns:
        ``[B, Tq, H, Dv]`` or ``[tokens, H, Dv]``: ``out`` if given. A query that sees no key gives zeros.
        With ``return_lse`` also the log-sum-exp, float32 ``[B, H, Tq]`` or ``[H, tokens]``: natural, sinks
        included, -inf where no key is visible. It has no gradient.

    What lies outside of a sequence (other sequences, slots before ``key_start`` or from ``key_length`` on,
    other pages) is never read. Invisible keys within the sequence may hold anything, but their values must be
    finite; where gradients are computed, all of q, k, v and the gradient must be.

    Gradients: of q, k, v, of ``sinks``, and of a float mask. The probabilities are computed again from the
    log-sum-exp. Second derivatives are not implemented.

    Raises:
        TypeError: dtypes are not these, or differ.
        ValueError: shapes, devices or options do not fit. On a CPU also: offsets, starts, lengths or pages
            are out of range. On a GPU wrong offsets end in an error of the device; the others are clamped to
            what exists.
        NotImplementedError: a gradient is wanted with ``block_table`` or ``out``; ``out`` under
            ``torch.vmap``.
    """
    (q, k, v), key, _ = check_operands("attention", contract, {"q": q, "k": k, "v": v})
    _check_integers("cu_seqlens_q", cu_seqlens_q, (None,), q)
    batch = _check_shapes(q, k, v, cu_seqlens_q, cu_seqlens_k, block_table)
    for name, t, size in (
        ("cu_seqlens_q", cu_seqlens_q, (batch + 1,)),
        ("cu_seqlens_k", cu_seqlens_k, (batch + 1,)),
        ("key_start", key_start, (batch,)),
        ("key_length", key_length, (batch,)),
        ("block_table", block_table, (batch, None)),
    ):
        _check_integers(name, t, size, q)
    for name, t in (("key_start", key_start), ("key_length", key_length)):
        if t is not None and cu_seqlens_k is not None:
            raise ValueError(f"samebits.attention: {name}: expected none with cu_seqlens_k")
    if block_table is not None:
        if key_length is None:
            raise ValueError("samebits.attention: key_length: expected lengths with block_table, got None")
        wanted = (t for t in (q, k, v, sinks, mask) if isinstance(t, Tensor))
        if torch.is_grad_enabled() and any(t.requires_grad for t in wanted):
            raise NotImplementedError(
                "samebits.attention: block_table: gradients of a paged cache are not implemented"
            )
    window = _check_window(window, causal)
    heads = q.shape[-2]
    if sinks is not None:
        _check_floats("sinks", sinks, q)
        if tuple(sinks.shape) != (heads,):
            raise ValueError(f"samebits.attention: sinks: expected shape ({heads},), got {shape(sinks)}")
    if mask is not None:
        if cu_seqlens_q is not None:
            raise ValueError("samebits.attention: mask: expected none with cu_seqlens_q")
        keys = k.shape[1] if block_table is None else block_table.shape[1] * k.shape[1]
        mask = _check_mask(mask, (batch, heads, q.shape[1], keys), q)
    align: Align = "first"
    if window != (-1, -1):
        align = "last"
    elif key_start is not None and block_table is None and q.shape[-3] == k.shape[-3]:
        align = "slots"
    positions = cu_seqlens_q, cu_seqlens_k, key_start, key_length, block_table
    if out is not None:
        _check_out(out, q, v, (k, sinks, mask))
    out, lse = attend(q, k, v, mask, sinks, positions, window, align, scale, softcap, key, out)
    return (out, lse) if return_lse else out


def scaled_dot_product_attention(
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
    """:func:`attention` with the arguments of :func:`torch.nn.functional.scaled_dot_product_attention`.

    Keys that a mask hides change nothing, wherever they lie: see there.

    Args:
        q: ``[..., H, L, E]``.
        k: ``[..., H, S, E]``. With ``enable_gqa`` it may have fewer heads. Leading dimensions broadcast.
        v: ``[..., H, S, Ev]``, likewise.
        mask: ``[..., L, S]``, broadcast.
        is_causal: query i sees keys 0 to i, also where L and S differ.
        scale, contract: as in :func:`attention`.

    Returns:
        ``[..., H, L, Ev]``.

    Raises:
        TypeError, ValueError: as :func:`attention`; or both ``mask`` and ``is_causal`` are given.
    """
    (q, k, v), key, _ = check_operands("attention", contract, {"q": q, "k": k, "v": v})
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.ndim < 2:
            raise ValueError(
                f"samebits.attention: {name}: expected [..., tokens, size], got shape {shape(t)}"
            )
    heads = (-3,) if enable_gqa and q.ndim > 2 else ()
    if heads:
        batch = broadcast(*(t.shape[:-3] for t in (q, k, v)))
        leading = torch.Size((*batch, q.shape[-3]))
    else:
        leading = broadcast(*(t.shape[:-2] for t in (q, k, v)))
        batch = leading[:-1]
    q4, k4, v4 = (
        _by_token(t, torch.Size((*batch, *([t.shape[-3]] if heads else leading[-1:]))), len(batch))
        for t in (q, k, v)
    )
    _check_shapes(q4, k4, v4, None, None, None)
    if mask is not None:
        if is_causal:
            raise ValueError("samebits.attention: mask: expected none with is_causal")
        mask = _check_mask_of_torch(mask, leading, q4, k4)
    window = (-1, 0) if is_causal else (-1, -1)
    out, _ = attend(q4, k4, v4, mask, None, (None,) * 5, window, "first", scale, 0.0, key)
    out = viewed(out, Tensor.transpose, 1, 2)
    if len(leading) != 2:
        out = out.reshape(*leading, q.shape[-2], v.shape[-1])
    if q.ndim != 4 and torch.is_grad_enabled():
        out = out.clone()  # PyTorch's own result may be changed in place then, and the gradient needs ours
    return out if torch.is_grad_enabled() else as_no_view(out)


def _check_shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    block_table: Tensor | None,
) -> int:
    """Refuse operands that do not fit together. Returns how many sequences there are."""

    def refuse(name: str, expected: str, *tensors: Tensor) -> None:
        got = " and ".join(map(shape, tensors))
        raise ValueError(f"samebits.attention: {name}: expected {expected}, got {got}")

    if cu_seqlens_k is not None and (cu_seqlens_q is None or block_table is not None):
        wrong = "cu_seqlens_q with it" if cu_seqlens_q is None else "none with block_table"
        raise ValueError(f"samebits.attention: cu_seqlens_k: expected {wrong}")
    if cu_seqlens_q is not None and cu_seqlens_k is None and block_table is None:
        raise ValueError("samebits.attention: cu_seqlens_q: expected cu_seqlens_k or block_table with it")
    if q.ndim != (4 if cu_seqlens_q is None else 3):
        refuse("q", "[batch, queries, heads, size], or packed with cu_seqlens_q [tokens, heads, size]", q)
    forms = "[batch, keys, heads, size], packed [tokens, heads, size], or pages [pages, page, heads, size]"
    for name, t in (("k", k), ("v", v)):
        if t.ndim != (4 if cu_seqlens_k is None else 3):
            refuse(name, forms, t)
    if q.shape[-1] != k.shape[-1]:
        refuse("q, k", "one last size", q, k)
    if 0 in (q.shape[-1], v.shape[-1]):
        refuse("q, v", "last sizes above 0", q, v)
    if k.shape[:-1] != v.shape[:-1]:
        refuse("k, v", "as many tokens and heads in both", k, v)
    if k.shape[-2] == 0 or q.shape[-2] % k.shape[-2]:
        refuse("q, k", "a number of heads in q that is a multiple of k's", q, k)
    if cu_seqlens_q is not None:
        return max(0, cu_seqlens_q.numel() - 1)
    if block_table is None and q.shape[0] != k.shape[0]:
        refuse("q, k", "one batch size", q, k)
    return q.shape[0]


def _check_integers(name: str, t: Tensor | None, size: tuple[int | None, ...], q: Tensor) -> None:
    """Refuse anything but a dense tensor of integers of this size; None stands for any number."""
    if t is None:
        return
    if not isinstance(t, Tensor):
        raise TypeError(f"samebits.attention: {name}: expected a Tensor, got {type(t).__name__}")
    if t.layout is not torch.strided or t.is_nested:
        raise TypeError(f"samebits.attention: {name}: expected a dense tensor, got layout {t.layout}")
    if t.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"samebits.attention: {name}: expected int32 or int64, got {t.dtype}")
    check_device("attention", name, t, "q", q)
    if t.ndim != len(size) or any(n is not None and n != m for n, m in zip(size, t.shape, strict=False)):
        expected = ", ".join("n" if n is None else str(n) for n in size)
        raise ValueError(f"samebits.attention: {name}: expected shape ({expected}), got {shape(t)}")


def _check_floats(name: str, t: Tensor, q: Tensor) -> None:
    """Refuse anything but a dense tensor of a supported dtype."""
    check_operands("attention", None, {name: t}, autocast=False)
    check_device("attention", name, t, "q", q)


def _check_out(out: Tensor, q: Tensor, v: Tensor, others: Sequence[Tensor | None]) -> None:
    """Refuse anything but a tensor for the output that may be written to."""
    check_written("attention", "out", out, q.dtype, "q", q)
    wanted = (*q.shape[:-1], v.shape[-1])
    if tuple(out.shape) != wanted:
        raise ValueError(f"samebits.attention: out: expected shape {wanted}, got {shape(out)}")
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (out, q, v, *others)):
        raise NotImplementedError(
            "samebits.attention: out: gradients of what is written in place are not implemented"
        )
    refuse_vmap("attention", "out")


def _check_window(window: tuple[int, int], causal: bool) -> tuple[int, int]:
    """The window that both arguments together ask for."""
    if not (
        isinstance(window, (tuple, list))
        and len(window) == 2
        and all(isinstance(n, int) and not isinstance(n, bool) and n >= -1 for n in window)
    ):
        raise ValueError(
            f"samebits.attention: window: expected two integers >= -1 (left, right), got {window!r}"
        )
    left, right = window
    if not causal:
        return left, right
    if right > 0:
        raise ValueError(
            f"samebits.attention: window: expected 0 or -1 to the right with causal, got {right}"
        )
    return left, 0


def _broadcasts(sizes: Sequence[int], wanted: Sequence[int]) -> bool:
    return all(n == 1 or n == m for n, m in zip(sizes[::-1], wanted[::-1], strict=False))


def _check_mask(mask: Tensor, wanted: tuple[int, ...], q: Tensor) -> Tensor:
    """A mask with four dimensions, each as wanted or 1."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        _check_floats("mask", mask, q)
    check_device("attention", "mask", mask, "q", q)
    if mask.ndim > 4 or not _broadcasts(mask.shape, wanted):
        raise ValueError(
            f"samebits.attention: mask: expected a shape that broadcasts to {wanted}, got {shape(mask)}"
        )
    return mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))


def _by_token(t: Tensor, leading: torch.Size, batch: int) -> Tensor:
    """``t[..., heads, tokens, size]``, broadcast, as ``[rows, tokens, heads, size]``; without copies."""
    if t.ndim == 4 and t.shape[:2] == leading:
        return viewed(t, Tensor.transpose, 1, 2)
    t = expand(t, (*leading, *t.shape[-2:]))
    heads = leading[batch] if len(leading) > batch else 1
    return t.reshape(math.prod(leading[:batch]), heads, *t.shape[-2:]).transpose(1, 2)


def _check_mask_of_torch(mask: Tensor, leading: torch.Size, q: Tensor, k: Tensor) -> Tensor:
    """A mask of PyTorch's as :func:`_check_mask` returns it: a view, but for unusual broadcasting."""
    if isinstance(mask, Tensor) and len(leading) > 2 and mask.ndim > 3:
        batch = leading[:-1]
        sizes = mask.shape[:-3]
        if len(sizes) > len(batch) or not _broadcasts(sizes, batch):
            wanted = (*leading, q.shape[1], k.shape[1])
            raise ValueError(
                f"samebits.attention: mask: expected a shape that broadcasts to {wanted}, got {shape(mask)}"
            )
        mask = expand(mask, (*batch, *mask.shape[-3:])).flatten(0, -4)
    return _check_mask(mask, (q.shape[0], q.shape[2], q.shape[1], k.shape[1]), q)
