"""Embeddings and log-probabilities with the vocabulary split over ranks, with one rank's bits."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from samebits.backends import Key, contract_of, unpack_key
from samebits.backends.logits_in_pieces import logits_of
from samebits.backends.replay import refuse
from samebits.backends.token_logps import Rows, Statistics
from samebits.contract import Contract
from samebits.distributed._groups import Group, add_bits, agree, all_gather, all_to_all, name_of, ranks
from samebits.distributed.exchange import check_divides, gather, reduce_over_ranks
from samebits.distributed.linear import NO_DIM, of_one_rank, operands
from samebits.functions import VOCAB_BLOCK
from samebits.ops import linear_logp as whole
from samebits.ops._checks import check_device, check_segments, shape
from samebits.ops._operator import Operator, refuse_second_derivatives
from samebits.ops._rows import check_rows
from samebits.ops._sequences import check_cu_seqlens_form, check_offsets
from samebits.ops.embedding import _gradient as embedding_gradient
from samebits.ops.logp import check_target, pieces, watch_target

__all__ = ["vocab_parallel_embedding", "vocab_parallel_linear_logp"]


def vocab_parallel_embedding(
    ids: Tensor,
    weight: Tensor,
    group: Group = None,
    *,
    padding_idx: int | None = None,
    sequence_dim: int | None = None,
) -> Tensor:
    """``out[..., :] = weight[ids[...], :]``, with the rows of ``weight`` split over ranks.

    Ranks exchange rows as they are, and nothing is rounded. The gradient of ``weight`` has the bits of one
    rank: that of a row is one chain over the tokens with that id, as under :func:`samebits.batch_invariant`.

    Args:
        ids: int64 or int32 ``[...]``, the same on all ranks, each within [0, V).
        weight: ``[V / T, features]``: this rank's part of T; bfloat16, float16 or float32.
        group: as in :func:`samebits.distributed.ordered_all_reduce`.
        padding_idx: tokens with this id, one of [0, V), have no gradient.
        sequence_dim: None: every rank gets the whole result. Else (sequence parallelism) this dimension of
            `ids` is split over ranks in the result.

    Raises:
        TypeError: a dtype is not one of these.
        ValueError: shapes or devices do not match, the number of ranks does not divide the dimension, or the
            ranks do not agree on all this. That is compared once, when it is new to all ranks: calls must be
            the same on all of them.
        IndexError: on the CPU, an id is not within [0, V). On a GPU such ids end in a device-side assert.
    """
    op = "vocab_parallel_embedding"
    called, name = f"distributed.{op}", name_of(op, group)
    check_rows(called, weight)
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
        got = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(f"samebits.{called}: ids: expected an int64 or int32 tensor, got {got}")
    check_device(called, "ids", ids, "weight", weight)
    if weight.ndim != 2 or len(weight) == 0:
        raise ValueError(f"samebits.{called}: weight: expected [V / T, features], got shape {shape(weight)}")
    size = ranks(name)[1]
    if padding_idx is not None and not 0 <= padding_idx < len(weight) * size:
        raise IndexError(
            f"samebits.{called}: padding_idx: expected one of {len(weight) * size} rows, got {padding_idx}"
        )
    dim = NO_DIM
    if sequence_dim is not None:
        if not -ids.ndim <= sequence_dim < ids.ndim:
            raise ValueError(
                f"samebits.{called}: sequence_dim: expected a dimension of ids {shape(ids)},"
                f" got {sequence_dim}"
            )
        dim = sequence_dim % ids.ndim
        check_divides(op, f"ids: dimension {sequence_dim}", ids.shape[dim], size)
    needed = torch.is_grad_enabled() and weight.requires_grad
    facts = {"dtype": weight.dtype, "weight": weight.shape, "sequence_dim": dim, "gradients": needed}
    agree(op, name, weight, padding_idx=padding_idx, **facts)
    out: Tensor = _embedding(weight, ids, -1 if padding_idx is None else padding_idx, dim, name)
    return out


def _owned(ids: Tensor, rows: int, group: str) -> tuple[Tensor, Tensor]:
    """`ids` counted from this rank's first row, and which of them are its own."""
    own = ids.to(torch.int64) - ranks(group)[0] * rows
    return own, (own >= 0) & (own < rows)


def _embedding_forward(weight: Tensor, ids: Tensor, padding_idx: int, dim: int, group: str) -> Tensor:
    refuse("an exchange between ranks is no launch")
    size = ranks(group)[1]
    own, mine = _owned(ids, len(weight), group)
    known = (ids >= 0) & (ids < len(weight) * size)
    rows = torch.embedding(weight, own.where(mine | ~known, 0))  # which refuses unknown ids
    if size == 1:
        return rows
    rows.view(torch.uint8).masked_fill_(~mine[..., None], 0)
    if dim == NO_DIM:
        return add_bits(rows, group)
    moved = rows.movedim(dim, 0)
    parts = all_to_all(moved, group, [len(moved) // size] * size)
    return parts.view(torch.uint8).sum(0, dtype=torch.uint8).view(rows.dtype).movedim(0, dim).contiguous()


def _embedding_fake(weight: Tensor, ids: Tensor, padding_idx: int, dim: int, group: str) -> Tensor:
    tokens = [*ids.shape]
    if dim != NO_DIM:
        tokens[dim] //= ranks(group)[1]
    return weight.new_empty(*tokens, weight.shape[1])


_embedding = Operator(
    "vocab_parallel_embedding(Tensor weight, Tensor ids, int padding_idx, int dim, str group) -> Tensor",
    cpu=_embedding_forward,
    fake=_embedding_fake,
)


def _embedding_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weight, ids, ctx.padding_idx, ctx.dim, ctx.group = inputs
    ctx.count = len(weight)
    ctx.save_for_backward(ids)


def _embedding_backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    refuse_second_derivatives("distributed.vocab_parallel_embedding")
    (ids,) = saved
    if ctx.dim != NO_DIM:
        grad = gather(grad, ctx.dim, ctx.group, True)
    own, mine = _owned(ids, ctx.count, ctx.group)
    own = own.where(mine & (ids != ctx.padding_idx), ctx.count)  # a row more, which has no gradient
    return embedding_gradient(grad, own, ctx.count + 1, ctx.count)[: ctx.count], None, None, None, None


_embedding.register_autograd(_embedding_backward, setup_context=_embedding_setup)


@overload
def vocab_parallel_linear_logp(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    group: Group = None,
    *,
    ignore_index: int = -100,
    temperature: float = 1.0,
    return_entropy: Literal[False] = False,
    cu_seqlens: Tensor | None = None,
    contract: Contract | None = None,
) -> Tensor: ...


@overload
def vocab_parallel_linear_logp(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    group: Group = None,
    *,
    ignore_index: int = -100,
    temperature: float = 1.0,
    return_entropy: Literal[True],
    cu_seqlens: Tensor | None = None,
    contract: Contract | None = None,
) -> tuple[Tensor, Tensor]: ...


def vocab_parallel_linear_logp(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    group: Group = None,
    *,
    ignore_index: int = -100,
    temperature: float = 1.0,
    return_entropy: bool = False,
    cu_seqlens: Tensor | None = None,
    contract: Contract | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`samebits.linear_logp` with the vocabulary split over ranks.

    Results and gradients have the bits of one rank with the whole ``weight``, under the same contract. Ranks
    exchange the statistics of blocks of 128 entries (8 or 12 bytes for each block and token), and every rank
    merges all of them. If V / T is no multiple of 128, they also exchange the logits of blocks that lie on
    two ranks. The gradient of ``hidden`` is a sum over ranks, in segments of the vocabulary.

    Args:
        hidden: ``[..., D]``, the same on all ranks; bfloat16, float16 or float32.
        weight: ``[V / T, D]``: this rank's part of T, at least 256 entries; same dtype and device.
        target: int64 or int32 ``[...]``, the same on all ranks, from the whole vocabulary.
        bias: ``[V / T]``, the same part.
        group: as in :func:`samebits.distributed.ordered_all_reduce`.
        contract: as in :func:`samebits.distributed.row_parallel_linear`.
        ignore_index, temperature, return_entropy, cu_seqlens: as in :func:`samebits.linear_logp`.

    Returns:
        As :func:`samebits.linear_logp`, the same on all ranks.

    Raises:
        TypeError, ValueError, IndexError: as in :func:`samebits.linear_logp` and
            :func:`samebits.distributed.row_parallel_linear`; or V / T is less than 256.
    """
    op = "vocab_parallel_linear_logp"
    called = f"distributed.{op}"
    given = {"hidden": hidden, "weight": weight} | ({} if bias is None else {"bias": bias})
    (hidden, weight, *biases), key, name = operands(op, contract, group, given)
    bias = biases[0] if biases else None
    whole.check_shapes(called, hidden, weight, bias)
    size = ranks(name)[1]
    if size > 1:
        _check_blocks(called, len(weight))
    own = contract_of(of_one_rank(key, size))
    check_segments(called, own, ("", 0), hidden, ("weight: V / T", len(weight)))
    target = check_target(called, target, "hidden", hidden, ignore_index)
    scale = whole.scale_of(called, temperature)
    if cu_seqlens is not None:
        check_cu_seqlens_form(called, "hidden", hidden, cu_seqlens)
    if not isinstance(return_entropy, bool):
        raise TypeError(
            f"samebits.{called}: return_entropy: expected a bool, got {type(return_entropy).__name__}"
        )
    needed = tuple(t.requires_grad for t in given.values()) if torch.is_grad_enabled() else ()
    facts = {"dtype": hidden.dtype, "weight": weight.shape, "bias": bias is not None, "gradients": needed}
    options = {"ignore_index": ignore_index, "temperature": temperature, "return_entropy": return_entropy}
    agree(op, name, hidden, contract=unpack_key(key)[0], **facts, **options)
    refuse_unknown = watch_target(called, target, len(weight) * size, ignore_index, key)
    logp, entropy, _, _ = _logp(
        hidden, weight, bias, target, cu_seqlens, ignore_index, scale, return_entropy, name, key
    )
    refuse_unknown()
    return (logp, entropy) if return_entropy else logp


def _check_blocks(op: str, count: int) -> None:
    if count < 2 * VOCAB_BLOCK:  # then every rank has a whole block, and a block lies on two ranks at most
        raise ValueError(
            f"samebits.{op}: weight: expected a V / T of {2 * VOCAB_BLOCK} entries or more, got {count}"
        )


def _logp_forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    cu_seqlens: Tensor | None,
    ignore_index: int,
    scale: float,
    entropy: bool,
    group: str,
    key: Key,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    refuse("an exchange between ranks is no launch")
    backend, logits, products, contract = whole.backend_of(hidden, key)
    if cu_seqlens is not None:
        check_offsets("linear_logp", cu_seqlens, hidden.shape[-2], key)
    (count, features), (rank, size) = weight.shape, ranks(group)
    flat, blocks = target.reshape(-1).contiguous(), whole_blocks(count, size)
    rows = Rows.empty(flat, count * size, ignore_index, scale=scale, entropy=entropy)
    first, last = (block * VOCAB_BLOCK - rank * count for block in blocks[rank])
    inner, edges = slice(first, min(last, count)), (slice(0, first), slice(min(last, count), count))
    own = flat - (rank * count + first)
    own = own.where((own >= 0) & (own < inner.stop - first), -1)  # or another rank's
    inner_rows = Rows.empty(own, inner.stop - first, -2, scale=scale, entropy=entropy)
    inner_bias = None if bias is None else bias[inner]
    x = hidden.reshape(len(flat), features)
    for start, stop in pieces(len(flat), count * size, whole._STATISTICS):
        part, some = rows.part(start, stop), x[start:stop]
        found = backend.statistics(
            some, weight[inner], inner_bias, inner_rows.part(start, stop), contract=contract
        )
        given = some, weight, bias
        z = [logits_of(products, *given, e, contract) if e.stop > e.start else None for e in edges]
        logits.combine(_gathered(logits, found, z, part, count, blocks, group), part)
    kept = target.shape if entropy else (0,)
    return rows.logp.view(target.shape), rows.entropy.view(kept), rows.shift, rows.log_sum


def whole_blocks(count: int, size: int) -> list[tuple[int, int]]:
    """The blocks of the vocabulary that lie within the `count` entries of each of `size` ranks.

    The first one, and the one after the last. The vocabulary's last block may be shorter than others.
    """
    ends = [r * count // VOCAB_BLOCK for r in range(1, size)] + [-(-size * count // VOCAB_BLOCK)]
    return [(-(-r * count // VOCAB_BLOCK), end) for r, end in enumerate(ends)]


def _gathered(
    logits: Any,
    own: Statistics,
    edges: list[Tensor | None],
    rows: Rows,
    count: int,
    blocks: list[tuple[int, int]],
    group: str,
) -> Statistics:
    """The statistics of all blocks, from those of each rank's own.

    Args:
        logits: a backend's module for log-probabilities of given logits.
        edges: the logits of a rank's first and last entries, in blocks that it shares with others.
    """
    size = ranks(group)[1]
    if size == 1:
        return own
    tokens, most = len(rows.target), max(end - first for first, end in blocks)
    shared = [r for r in range(1, size) if r * count % VOCAB_BLOCK]  # ranks that begin within a block
    widths = [
        most,
        most,
        most if rows.with_entropy else 0,
        1,
        *((VOCAB_BLOCK, VOCAB_BLOCK) if shared else ()),
    ]
    sent = own.m.new_empty(tokens, sum(widths))
    columns = sent.split(widths, 1)
    tails = edges if shared else ()
    for room, mine in zip(columns, (*own[:3], own.target_logit[:, None], *tails), strict=True):
        if mine is not None:
            room[:, : mine.shape[1]].copy_(mine)
    parts = all_gather(sent, group).split(widths, 2)
    found = Statistics.empty(rows)
    for r, (first, end) in enumerate(blocks):
        for room, theirs in zip(found[:3] if rows.with_entropy else found[:2], parts, strict=False):
            room[:, first:end] = theirs[r, :, : end - first]
    owner = rows.target.div(count, rounding_mode="floor").clamp(0, size - 1)
    found.target_logit.copy_(parts[3][..., 0].gather(0, owner[None])[0])
    for r in shared:  # every rank computes these blocks from their logits
        first = r * count // VOCAB_BLOCK * VOCAB_BLOCK
        end = min(first + VOCAB_BLOCK, size * count)
        left, right = parts[5][r - 1, :, : r * count - first], parts[4][r, :, : end - r * count]
        logits.add_statistics(found, torch.cat([left, right], 1), first, rows)
    return found


def _logp_fake(hidden: Tensor, *given: Any) -> tuple[Tensor, ...]:
    target, entropy = given[2], given[-3]
    shapes = (target.shape, target.shape if entropy else (0,), (target.numel(),), (target.numel(),))
    return tuple(hidden.new_empty(s, dtype=torch.float32) for s in shapes)


_logp = Operator(
    "vocab_parallel_linear_logp(Tensor hidden, Tensor weight, Tensor? bias, Tensor target,"
    " Tensor? cu_seqlens, int ignore_index, float scale, bool entropy, str group, str contract)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    cpu=_logp_forward,
    fake=_logp_fake,
)


def _partial_gradients(
    grad: Tensor,
    grad_entropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    cu_seqlens: Tensor | None,
    entropy: Tensor,
    shift: Tensor,
    log_sum: Tensor,
    ignore_index: int,
    scale: float,
    group: str,
    key: Key,
    needed: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of hidden, in float32 and of this rank's segments, and of weight and bias."""
    (_, size), flat, none = ranks(group), target.reshape(-1), shift.new_empty(0)
    count = len(weight)
    own, mine = _owned(flat, count, group)
    # Another rank's target is one entry beyond those here. One that does not count is -1.
    counts = (flat != ignore_index) & (flat >= 0) & (flat < count * size)
    own = own.where(mine, count).where(counts, -1)
    rows = Rows(own, count + 1, -1, scale, none, entropy.reshape(-1), shift, log_sum)
    dx = hidden.new_empty((len(flat), hidden.shape[-1]) if needed[0] else 0, dtype=torch.float32)
    grads = (
        grad.reshape(-1).contiguous(),
        None if grad_entropy is None else grad_entropy.reshape(-1).contiguous(),
    )
    key = of_one_rank(key, size)
    kept = shift.new_empty(len(flat), 0)
    dw, db = whole.gradients_into(dx, rows, *grads, hidden, weight, bias, cu_seqlens, None, kept, needed, key)
    return dx.view(hidden.shape) if needed[0] else dx, dw, db


def _fake_gradients(*args: Any) -> tuple[Tensor, ...]:
    hidden, weight, needed = args[2], args[3], args[-1]
    return (
        hidden.new_empty(hidden.shape if needed[0] else (0,), dtype=torch.float32),
        weight.new_empty(weight.shape if needed[1] else (0, weight.shape[1])),
        weight.new_empty(weight.shape[0] if needed[2] else 0),
    )


_gradient = Operator(
    "vocab_parallel_linear_logp_backward(Tensor grad, Tensor? grad_entropy, Tensor hidden, Tensor weight,"
    " Tensor? bias, Tensor target, Tensor? cu_seqlens, Tensor entropy, Tensor shift, Tensor log_sum,"
    " int ignore_index, float scale, str group, str contract, bool[3] needed) -> (Tensor, Tensor, Tensor)",
    cpu=_partial_gradients,
    fake=_fake_gradients,
)


def _logp_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.ignore_index, ctx.scale, ctx.entropy, ctx.group, ctx.key = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _logp_backward(
    ctx: Any, saved: tuple[Tensor, ...], grad: Tensor | None, grad_entropy: Tensor | None = None, *_: Any
) -> tuple[Tensor | None, ...]:
    refuse_second_derivatives("distributed.vocab_parallel_linear_logp")
    hidden, weight, bias, target, cu_seqlens, entropy, shift, log_sum = saved
    needed = list(ctx.needs_input_grad[:3])
    if grad is None:
        grad = shift.new_zeros(target.shape)
    if not ctx.entropy:  # torch.compile passes an empty gradient for the missing result
        grad_entropy = None
    given = hidden, weight, bias, target, cu_seqlens, entropy, shift, log_sum
    options = ctx.ignore_index, ctx.scale, ctx.group, ctx.key, needed
    dx, dw, db = _gradient(grad, grad_entropy, *given, *options)
    if needed[0]:
        dx = reduce_over_ranks(dx, None, ctx.group, hidden.dtype)
    return *(g if n else None for g, n in zip((dx, dw, db), needed, strict=True)), *(None,) * 7


_logp.register_autograd(_logp_backward, setup_context=_logp_setup)
