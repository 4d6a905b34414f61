"""Verification of attention: every kernel and schedule on drawn problems, forward and backward."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from samebits.backends.attention import Align, Attention
from samebits.contract import FMA, Contract
from samebits.testing import KINDS, values
from samebits.tools.verify.case import BF16, F16, F32
from samebits.tools.verify.failures import finish, running
from samebits.tools.verify.operands import Surrounded, laid
from samebits.tools.verify.products import AROUND
from samebits.tools.verify.reference import REFERENCE
from samebits.tools.verify.report import Report

Form = Literal["batch", "packed", "pages"]


@dataclass(frozen=True, slots=True)
class AttentionVariant:
    """What kernels are compiled for.

    Attributes:
        dtype: of q, k and v.
        size, of_values: last sizes of q and k, and of v.
        mask: its dtype; None for no mask.
        softcap: whether scores are capped.
        paged: whether keys and values lie in pages.
        place: of q, k and v in memory: ``by head``, as PyTorch's function takes them, or as a product's A.
        step: of the contract.
        latent: whether values are the first columns of the keys, in the same memory.
    """

    dtype: torch.dtype
    size: int
    of_values: int
    mask: torch.dtype | None = None
    softcap: bool = False
    paged: bool = False
    place: str = "plain"
    step: Literal["mma", "fma"] = "mma"
    latent: bool = False


_BOOL = torch.bool
VARIANTS = (
    AttentionVariant(BF16, 64, 64),
    AttentionVariant(BF16, 128, 128, place="by head"),
    AttentionVariant(F16, 128, 128),
    AttentionVariant(F16, 128, 128, _BOOL),
    AttentionVariant(BF16, 64, 64, F32, place="by head"),
    AttentionVariant(F16, 64, 64, F16, softcap=True),
    AttentionVariant(BF16, 128, 128, paged=True),
    AttentionVariant(F16, 64, 64, softcap=True, paged=True),
    AttentionVariant(BF16, 192, 128, softcap=True),
    AttentionVariant(BF16, 256, 256),
    AttentionVariant(F16, 80, 96, BF16, place="pitched"),
    AttentionVariant(BF16, 33, 18, place="odd"),
    AttentionVariant(F16, 16, 40, _BOOL, softcap=True, place="spread"),
    AttentionVariant(BF16, 8, 24, paged=True, place="odd"),
    AttentionVariant(F32, 64, 64, step="fma"),
    AttentionVariant(F32, 128, 128, F32, place="by head", step="fma"),
    AttentionVariant(F32, 36, 20, _BOOL, softcap=True, step="fma"),
    AttentionVariant(F32, 17, 9, softcap=True, place="spread", step="fma"),
    AttentionVariant(F32, 64, 32, paged=True, step="fma"),
    AttentionVariant(F16, 40, 48, step="fma"),
    AttentionVariant(BF16, 576, 512),
    AttentionVariant(BF16, 576, 512, paged=True),
    AttentionVariant(F16, 280, 270, F32),
    AttentionVariant(F32, 576, 512, step="fma"),
    AttentionVariant(BF16, 576, 512, paged=True, latent=True),
    AttentionVariant(F16, 576, 512, latent=True),
)


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """One call of attention, forward and backward.

    Attributes:
        of: what kernels are compiled for.
        form: how sequences lie in q and k. In pages, q is packed or a batch.
        packed: whether q is packed.
        queries, keys: of each sequence.
        kv_heads, group: heads of k, and heads of q that share one.
        window, align, scale, softcap: as in :class:`samebits.backends.attention.Attention`.
        sinks: whether there are any.
        left, right: slots before and after the longest sequence's keys, unless packed.
        page: slots of a page.
        broadcast: dimensions of the mask that are expanded.
        kind: one of ``samebits.testing.KINDS``.
        seed: of the values.
    """

    of: AttentionVariant
    form: Form
    packed: bool
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    kv_heads: int = 1
    group: int = 1
    window: tuple[int, int] = (-1, -1)
    align: Align = "first"
    scale: float = 0.125
    softcap: float = 0.0
    sinks: bool = False
    left: int = 0
    right: int = 0
    page: int = 1
    broadcast: tuple[int, ...] = ()
    kind: str = "normal"
    seed: int = 0

    @property
    def what(self) -> str:
        """The line of the report that the case belongs to."""
        return self.form

    @property
    def gradients(self) -> bool:
        """Whether it has any: not where operands are infinite or NaN."""
        return self.form != "pages" and self.kind != "special"

    @property
    def grad_mask(self) -> bool:
        """Whether the mask has one."""
        return self.of.mask is not None and self.of.mask.is_floating_point

    @property
    def work(self) -> int:
        """The number of multiplications of the forward."""
        pairs = sum(q * k for q, k in zip(self.queries, self.keys, strict=True))
        return pairs * self.kv_heads * self.group * (self.of.size + self.of.of_values)

    def __str__(self) -> str:
        return ", ".join(
            f"{f.name} {getattr(x, f.name)}"
            for x in (self, self.of)
            for f in dataclasses.fields(x)
            if f.name not in ("of", "form")
        ).replace("torch.", "")


_LARGEST = 1 << 25
"""Multiplications of a case: more take the CPU too long."""


_LONG, _LONG_NEEDS = 256, 200 << 10
"""Entries of a key, of which longer ones need so many bytes of shared memory: those of sm_90."""


def attentions(thorough: bool, smem: int = _LONG_NEEDS) -> list[AttentionCase]:
    """All cases: some of every variant, drawn at random, but the same in every run.

    Args:
        smem: bytes of shared memory for a block. Keys that it does not hold are left out.
    """
    count = 12 if thorough else 6  # more in pages and under masks, which more schedules take
    variants = [(i, of) for i, of in enumerate(VARIANTS) if of.size <= _LONG or smem >= _LONG_NEEDS]
    more = [4 if of.mask not in (None, _BOOL) else 2 if of.mask else int(of.paged) for of in VARIANTS]
    return [_drawn(of, i, n) for i, of in variants for n in range(count * (1 + more[i]))]


_SHAPES = ((1, 2100), (3, 700), (40, 1100), (150, 150), (300, 600), (90, 33))
"""Most queries and keys of a sequence."""
_EDGES = (0, 1, 127, 128, 129, 511, 512, 513, 1024)
"""Of blocks and segments."""
_BOUNDS = (-1, 0, 1, 20, 127, 128, 500)
"""Of windows."""


def _drawn(of: AttentionVariant, i: int, n: int) -> AttentionCase:
    """Case `n` of variant `i`. The numbers choose its form, window and kind of values; the rest is drawn."""
    r = Random(f"{i} {n}")
    form: Form = "pages" if of.paged else "batch" if of.mask or n % 2 == 0 else "packed"
    packed = form == "packed" or (form == "pages" and n % 2 == 0)
    window = ((-1, -1), (-1, 0), (r.choice(_BOUNDS), 0), (r.choice(_BOUNDS), r.choice(_BOUNDS)))[(i + n) % 4]
    while True:
        sequences = r.randint(1, 4)
        most_queries, most_keys = r.choice(_SHAPES)
        edges = [e for e in _EDGES if e <= most_keys]
        keys = tuple(r.choice((r.choice(edges), r.randint(1, most_keys))) for _ in range(sequences))
        left = right = 0
        if form == "batch" and r.random() < 0.6:
            left, right = r.choice((0, 1, 16, 77)), r.choice((0, 9, 130))
        elif form == "batch":
            keys = keys[:1] * sequences
        elif form == "pages":
            left = r.choice((0, 5)) * (n % 4 == 0)
        slots = left + max(keys) + right
        if packed:
            queries = tuple(r.randint(0, most_queries) for _ in range(sequences))
        elif r.random() < 0.4:
            queries = (slots,) * sequences
        else:
            queries = (r.randint(2 * most_queries // 3, most_queries),) * sequences
        align: Align = "first"
        if window != (-1, -1):
            align = "first" if window == (-1, 0) and r.random() < 0.3 else "last"
        elif left and form == "batch" and queries[0] == slots:
            align = "slots"
        kv_heads, group = r.choice(((1, 1), (2, 1), (1, 3), (2, 4), (1, 8)))
        case = AttentionCase(
            *(of, form, packed, queries, keys, kv_heads, group, window, align),
            scale=float(np.float32(r.choice((1 / math.sqrt(of.size), 0.3, 1.0)))),
            softcap=float(np.float32(r.choice((0.7, 20.0)))) if of.softcap else 0.0,
            sinks=r.random() < 0.4,
            left=left,
            right=(0, 9, 700)[n % 3] if form == "pages" else right,  # tables are wider than sequences
            page=r.choice((1, 7, 8, 16, 24, 32, 64, 128, 256)) if of.paged else 1,
            broadcast=tuple(d for d in range(3) if r.random() < 0.3) if of.mask else (),
            kind=KINDS[(i + n // 2) % len(KINDS)] if n % 2 else "normal",
            seed=r.randrange(1 << 20),
        )
        if case.work <= _LARGEST:
            return case


def build(case: AttentionCase, contract: Contract, device: torch.device) -> tuple[Attention, Tensor]:
    """The call, and the gradient of its output. What lies outside of sequences is NaN, or no page."""
    of, heads = case.of, case.kv_heads * case.group
    tokens = (sum(case.queries),) if case.packed else (len(case.queries), max(case.queries))

    def draw(shape: tuple[int, ...], seed: int, finite: bool = True) -> Tensor:
        t = values(case.kind, shape, of.dtype, case.seed + seed)
        return t.nan_to_num() if finite else t

    def placed(t: Tensor) -> Tensor:
        if of.place == "by head":
            return t.transpose(-3, -2).contiguous().to(device).transpose(-3, -2)
        return laid(t.to(device), "N", of.place)

    q = draw((*tokens, heads, of.size), 0, case.gradients)
    g = draw((*tokens, heads, of.of_values), 1)
    rows: list[list[Tensor]] = [[], []]
    for i, n in enumerate(case.keys):
        rows[0].append(draw((n, case.kv_heads, of.size), 10 * i + 2, case.gradients or of.latent))
        rows[1].append(draw((n, case.kv_heads, of.of_values), 10 * i + 3))  # 0 times infinity is NaN
    starts, ends = None, None
    table = None
    if case.form == "packed":
        k, v = (torch.cat(of_all) for of_all in rows)
    else:
        slots = case.left + max(case.keys) + case.right
        # On the left as a tokenizer pads, so that all sequences end together; or where a cache begins.
        first = [slots - case.right - n if case.left else 0 for n in case.keys]
        if any(first):
            starts = torch.tensor(first, dtype=torch.int32, device=device)
        last = [a + n for a, n in zip(first, case.keys, strict=True)]
        if case.form == "pages" or any(n != slots for n in last):
            ends = torch.tensor(last, dtype=torch.int32, device=device)
        k, v = (_slots(of_all, first, slots) for of_all in rows)
        if case.form == "pages":
            table, (k, v) = _pages((k, v), first, last, case.page, case.seed)
    offsets = [
        torch.tensor([*itertools.accumulate(lengths, initial=0)], dtype=torch.int32, device=device)
        for lengths in (case.queries, case.keys)
    ]
    mask = None
    if of.mask is not None:
        mask = _mask(case, (len(case.queries), heads, *tokens[1:], k.shape[1]), device)
    k = placed(k)
    x = Attention(
        placed(q),
        k,
        k[..., : of.of_values] if of.latent else placed(v),
        contract=(FMA if of.step == "fma" else contract).key,
        scale=case.scale,
        softcap=case.softcap,
        window=case.window,
        align=case.align,
        mask=mask,
        sinks=values("normal", (heads,), F32, case.seed + 4).to(device) if case.sinks else None,
        cu_seqlens_q=offsets[0] if case.packed else None,
        cu_seqlens_k=offsets[1] if case.form == "packed" else None,
        key_start=starts,
        key_length=ends,
        block_table=None if table is None else table.to(device),
    )
    return x, placed(g)


def _slots(rows: list[Tensor], first: list[int], slots: int) -> Tensor:
    """Sequences as rows of a batch, with NaN around them."""
    out = rows[0].new_full((len(rows), slots, *rows[0].shape[1:]), math.nan)
    for to, start, own in zip(out, first, rows, strict=True):
        to[start : start + len(own)] = own
    return out


def _pages(
    batches: tuple[Tensor, ...], first: list[int], last: list[int], page: int, seed: int
) -> tuple[Tensor, list[Tensor]]:
    """Pages in any order, with some of NaN among them, and the table, with no page's number past the end."""
    rows, slots = batches[0].shape[:2]
    count = -(-slots // page)
    order = torch.randperm(rows * count + 3, generator=torch.Generator().manual_seed(seed))[: rows * count]
    stores = []
    for t in batches:
        whole = t.new_full((rows, count * page, *t.shape[2:]), math.nan)
        whole[:, :slots] = t
        store = t.new_full((rows * count + 3, page, *t.shape[2:]), math.nan)
        store[order] = whole.view(rows * count, page, *t.shape[2:])
        stores.append(store)
    table = order.view(rows, count).to(torch.int32)
    nowhere = (-1, torch.iinfo(torch.int32).max)[seed % 2]
    for row, start, stop in zip(table, first, last, strict=True):
        row[: start // page] = row[-(-stop // page) :] = nowhere
    return table, stores


def _mask(case: AttentionCase, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """A mask; the keys of some queries are all hidden.

    Rows agree in what they show of common keys, as with padding and gaps: all of them, or all but some that
    show all keys. Or none agree.
    """
    own = tuple(1 if d in case.broadcast else n for d, n in enumerate(shape))
    generator = torch.Generator().manual_seed(case.seed + 5)
    if case.seed // 3 % 3:
        queries, keys = own[2:]
        hidden = torch.rand((own[0], 1, 1, keys), generator=generator) < 0.3
        later = torch.arange(keys) > torch.arange(queries)[:, None] + max(0, keys - queries)
        hidden = (hidden | later).expand(own).clone()
        if case.seed // 3 % 3 == 2:
            hidden[:, :, 1::7] = False
    else:
        hidden = torch.rand(own, generator=generator) < 0.3
    hidden[:, :, 2::11] = True
    if case.of.mask == torch.bool:
        return (~hidden).to(device).expand(shape)
    assert case.of.mask is not None
    hides = (-torch.inf, torch.finfo(case.of.mask).min, -1e4)[case.seed % 3]
    mask = values("normal", own, case.of.mask, case.seed + 6).masked_fill_(hidden, hides)
    return mask.to(device).expand(shape)


def verify_attention(
    report: Report,
    cases: Iterable[AttentionCase],
    ways: Any,
    contract: Contract,
    device: torch.device,
    thorough: bool,
) -> None:
    """Compare kernels with the CPU reference, and the memory around outputs with NaN.

    Args:
        report: gets the comparisons.
        cases: of :func:`attentions`.
        ways: ``samebits.backends.cuda.attention.catalogue``. Without `thorough`, a case runs under the
            default choice and a third of the schedules, in turn.
        contract: of tensor cores.
        device: where kernels run.
        thorough: whether each case runs under all schedules.
    """
    from samebits.backends.reference import attention as reference

    for i, case in enumerate(cases):
        x, grad = build(case, contract, torch.device("cpu"))
        on, on_grad = build(case, contract, device)
        out, lse, lse2 = reference.forward(x)
        _compare(report, case, _in_turn(ways.forwards(on), i, thorough), (), {}, (out, lse, lse2))
        if not case.gradients:
            continue
        of_mask = {"grad_mask": case.grad_mask}
        want = reference.backward(x, grad, out, lse2, **of_mask)
        given = on_grad, out.to(device), lse2.to(device)
        _compare(report, case, _in_turn(ways.backwards(on, on_grad), i, thorough), given, of_mask, want)


def _in_turn(ways: Iterator[Any], i: int, thorough: bool) -> Iterator[Any]:
    return (way for j, way in enumerate(ways) if thorough or j == 0 or (i + j) % 3 == 0)


def _compare(
    report: Report,
    case: AttentionCase,
    ways: Iterable[Any],
    given: tuple[Tensor, ...],
    options: dict[str, bool],
    want: tuple[Tensor | None, ...],
) -> None:
    for way in ways:
        doing = f"{way.kernel}, {case.what}, {case}, {way.schedule}"
        with running(doing), Surrounded() as room:
            found = way.run(*given, **options)
            finish(doing)
        for got, right in zip(found, want, strict=True):
            if right is not None:
                right = right.to(got.device)
                report.compare(way.kernel, case.what, REFERENCE, got, right, case, way.schedule)
        for margins in room.margins:
            nan = torch.full_like(margins, torch.nan)
            report.compare(way.kernel, AROUND, "NaN", margins, nan, case, way.schedule)
