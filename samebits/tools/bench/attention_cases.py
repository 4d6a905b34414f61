"""Attention in ``samebits bench``: the cases, their operands, and what competes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from samebits.ops.attention import attention
from samebits.tools.bench.cases import BF16, Run, packed_lengths

WINDOW = 1024

Form = Literal[
    "causal",
    "full",
    "window",
    "packed",
    "padded",
    "decode",
    "chunk",
    "chunk, boolean mask",
    "chunk, float mask",
    "chunk, window",
    "chunk, sinks",
]


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """One call of attention.

    Attributes:
        work: ``forward``, or ``both``: forward and backward.
        form: which keys a query sees:

            * ``causal`` and ``full``: as many queries as keys.
            * ``window``: causal, and at most `WINDOW` keys.
            * ``packed``: causal, sequences of mean length 512 one after the other (``cu_seqlens``).
            * ``padded``: causal, a batch of sequences with padding on the left (``key_start``).
            * ``chunk``: causal; the queries are the last tokens of the keys. Said by a boolean mask; by a
              float one, which also adds to each score; within a window of `WINDOW` keys; and with sinks,
              which PyTorch's attention does not have: it then computes the chunk alone.
            * ``decode``: one query over all keys.

            The competitor of ``window``, ``packed`` and ``padded`` is samebits' own causal attention of as
            many pairs of queries and keys (:func:`dense`). That of the others is PyTorch's fastest backend.
        batch: sequences; 1 if packed.
        queries, keys: tokens of a sequence, or of all if packed.
        head: size of a head.
        heads, kv_heads: of queries; of keys and values.
    """

    work: Literal["forward", "both"]
    form: Form
    batch: int
    queries: int
    keys: int
    head: int
    heads: int = 32
    kv_heads: int = 8
    dtype: torch.dtype = BF16

    @property
    def lengths(self) -> list[int]:
        """Keys of every sequence."""
        if self.form == "packed":
            return packed_lengths(self.keys)
        if self.form == "padded":
            half = max(1, self.keys // 2)
            return [self.keys - n % half for n in packed_lengths(1024 * self.batch)[: self.batch]]
        return [self.keys] * self.batch

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees, for one head."""
        if self.form in ("full", "decode"):
            return self.batch * self.queries * self.keys
        if self.form == "chunk, window":
            return self.batch * self.queries * WINDOW
        if self.form.startswith("chunk"):
            return self.batch * (self.queries * self.keys - self.queries * (self.queries - 1) // 2)
        seen = (min(n, WINDOW) if self.form == "window" else n for n in self.lengths)
        return sum(w * (w + 1) // 2 + (n - w) * w for w, n in zip(seen, self.lengths, strict=True))

    @property
    def flop(self) -> int:
        """Two products forward, five backward."""
        return (14 if self.work == "both" else 4) * self.pairs * self.heads * self.head

    @property
    def key_bytes(self) -> int:
        """Of keys and values."""
        return 2 * self.batch * self.keys * self.kv_heads * self.head * self.dtype.itemsize

    @property
    def bytes(self) -> int:
        """Of operands and results."""
        others = 2 * self.batch * self.queries * self.heads * self.head * self.dtype.itemsize
        return (2 if self.work == "both" else 1) * (self.key_bytes + others)

    def record(self) -> dict[str, Any]:
        """The case as it is written into results."""
        sizes = {"pairs": self.pairs, "key_bytes": self.key_bytes}
        return asdict(self) | {"dtype": str(self.dtype).removeprefix("torch.")} | sizes


_HEADS = (64, 128)
_TOKENS = tuple((n // t, t) for t in (512, 1024, 2048, 4096, 8192) for n in (4096, 16384) if n >= t)
SELF = (*_TOKENS, (1, 8192), (1, 16384))
"""(batch, tokens) with 4,096 to 16,384 tokens in all."""

DECODE = tuple((b, n) for b in (1, 8, 32, 128, 256) for n in (1024, 4096, 16384, 65536) if b * n <= 1 << 21)
"""(batch, keys) that fit into memory."""


def _own(work: Literal["forward", "both"], head: int) -> list[AttentionCase]:
    """Forms beside the causal one."""
    sizes: dict[Form, Sequence[tuple[int, int]]] = {
        "window": ((1, 4096), (4, 4096), (1, 16384)),
        "packed": ((1, 4096), (1, 16384)),
        "padded": ((4, 1024), (8, 2048), (2, 8192)),
    }
    return [AttentionCase(work, form, b, t, t, head) for form, some in sizes.items() for b, t in some]


CHUNKS: tuple[Form, ...] = ("chunk, boolean mask", "chunk, float mask", "chunk, window", "chunk, sinks")

ATTENTION: tuple[AttentionCase, ...] = (
    *(
        AttentionCase(work, form, b, t, t, head)
        for work in ("forward", "both")
        for form in ("causal", "full")
        for head in _HEADS
        for b, t in SELF
    ),
    *(case for work in ("forward", "both") for head in _HEADS for case in _own(work, head)),
    *(AttentionCase("forward", "decode", b, 1, n, 128) for b, n in DECODE),
    *(
        AttentionCase("forward", "chunk", b, 512, n, head)
        for head in _HEADS
        for b in (1, 4)
        for n in (8192, 16384, 32768)
    ),
    *(AttentionCase("forward", form, 1, 512, 8192, head) for form in CHUNKS for head in _HEADS),
    *(AttentionCase("both", "causal", b, n, n, h, 16, 16) for b, n in ((8, 512), (4, 2048)) for h in _HEADS),
)

MEMORY = tuple(AttentionCase("both", "causal", 1, 16384, 16384, 128, kv_heads=n) for n in (32, 8))
"""Cases whose memory is measured."""

ACCURACY = (
    AttentionCase("both", "causal", 1, 4096, 4096, 128, heads=4, kv_heads=1),
    AttentionCase("both", "causal", 1, 4096, 4096, 64, heads=4, kv_heads=1),
    AttentionCase("both", "full", 2, 1024, 1024, 128, heads=4, kv_heads=2),
    AttentionCase("both", "causal", 1, 2048, 2048, 128, heads=4, kv_heads=1, dtype=torch.float16),
)
"""Cases whose error is measured beside float64."""


def quick_attention() -> tuple[AttentionCase, ...]:
    """A part of `ATTENTION` that takes some ten seconds."""
    some = {(8, 512), (1, 4096), (1, 16384), (8, 2048)}
    few = {(1, 16384), (32, 4096), (128, 16384)}
    return tuple(
        c
        for c in ATTENTION
        if c.head == 128
        and (c.form != "full" or c.work == "forward")
        and (
            c.form in CHUNKS
            or (c.batch, c.keys)
            in (few if c.form == "decode" else {(1, 16384)} if c.form == "chunk" else some)
        )
    )


def dense(case: AttentionCase) -> AttentionCase:
    """Plain causal attention with about as many tokens, and pairs for each."""
    tokens = sum(case.lengths)
    length = max(1, round(2 * case.pairs / tokens) - 1)
    batch = max(1, round(case.pairs / (length * (length + 1) // 2)))
    return AttentionCase(case.work, "causal", batch, length, length, case.head, case.heads, case.kv_heads)


def make_attention(case: AttentionCase, device: torch.device, make: Callable[..., Tensor]) -> list[Tensor]:
    """q, k, v and, for a backward, the gradient of the output. Tokens before heads, as in memory."""
    lead: tuple[tuple[int, ...], ...] = ((case.batch, case.queries), (case.batch, case.keys))
    if case.form == "packed":
        lead = (case.queries,), (case.keys,)
    q, k = (*lead[0], case.heads, case.head), (*lead[1], case.kv_heads, case.head)
    tensors = [make(shape, device=device, dtype=case.dtype) for shape in (q, k, k)]
    if case.work == "forward":
        return tensors
    return [*(t.requires_grad_() for t in tensors), make(q, device=device, dtype=case.dtype)]


def options(case: AttentionCase, device: torch.device | str) -> dict[str, Any]:
    """What :func:`samebits.attention` is called with, besides tensors."""
    if case.form in ("full", "decode"):
        return {}
    if "mask" in case.form:
        return {"mask": chunk_mask(case, device)}
    found: dict[str, Any] = {"causal": True}
    if case.form == "chunk, sinks":
        found["sinks"] = torch.arange(case.heads, device=device) / 8 - 2
    if "window" in case.form:
        found["window"] = (WINDOW - 1, 0)
    if case.form == "padded":
        starts = [case.keys - n for n in case.lengths]
        found["key_start"] = torch.tensor(starts, dtype=torch.int32, device=device)
    if case.form == "packed":
        offsets = [0, *itertools.accumulate(case.lengths)]
        ends = torch.tensor(offsets, dtype=torch.int32, device=device)
        found |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    return found


def chunk_mask(case: AttentionCase, device: torch.device | str) -> Tensor:
    """What a chunk's queries see: boolean, or to add to scores, less the further a key is away."""
    last = torch.arange(case.keys - case.queries, case.keys, device=device)[:, None]
    away = last - torch.arange(case.keys, device=device)
    if case.form == "chunk, float mask":
        return (away / -256).masked_fill(away < 0, -torch.inf).to(case.dtype)
    return (away >= 0) & (away < WINDOW) if case.form == "chunk, window" else away >= 0


def with_gradients(forward: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """The output of a forward, and the gradients of q, k and v."""

    def run(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            out = forward(q, k, v)
            return (out.detach(), *torch.autograd.grad(out, (q, k, v), grad))

    return run


def ours(case: AttentionCase, device: torch.device | str) -> Run:
    """The call of samebits."""
    forward: Any = partial(attention, **options(case, device))
    run: Run = with_gradients(forward) if case.work == "both" else forward
    return run


BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def theirs(case: AttentionCase, backend: SDPBackend, device: torch.device | str) -> Run:
    """The call of PyTorch by one of its backends, which may refuse it."""
    mask: Any = None
    if case.form.startswith("chunk"):  # is_causal would mean that the first query sees the first key alone
        mask = chunk_mask(case, device)
        if case.form in ("chunk", "chunk, sinks") and backend == SDPBackend.FLASH_ATTENTION:
            mask = causal_lower_right(case.queries, case.keys)
    # Efficient attention takes no groups of heads, so keys and values are repeated for it.
    repeats = case.heads // case.kv_heads if backend == SDPBackend.EFFICIENT_ATTENTION else 1

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if repeats > 1:
            k, v = (t.repeat_interleave(repeats, 2) for t in (k, v))
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                attn_mask=mask,
                is_causal=case.form == "causal",
                enable_gqa=q.shape[2] != k.shape[2],
            )
        return out.transpose(1, 2)

    run: Run = with_gradients(forward) if case.work == "both" else forward
    return run
