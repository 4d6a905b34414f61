"""The contests of products, products of groups, attention and log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from samebits.backends.attention import Attention
from samebits.backends.cuda.shapes import AttentionShape, GroupedShape, LogpShape, ProductShape, Shape
from samebits.backends.grouped import GroupedOperands, GroupedProduct
from samebits.backends.product import Matrix, Operands, Product
from samebits.backends.token_logps import Rows
from samebits.contract import TENSOR_CORE
from samebits.tools.tune.contest import MOST, Contest, Way, few, make, place

__all__ = ["contest", "grouped_product", "product"]


_VARIED, _VARIATIONS = 2, 3
"""How many schedules run in variations, too, and in how many of them."""


def contest(shape: Shape, device: int, *, alone: bool = False) -> Contest | None:
    """The contest of a shape on a GPU. None: one way only, unless that may run `alone`; or none there."""
    if isinstance(shape, ProductShape):
        found: Contest | None = _product(shape, device)
    elif isinstance(shape, GroupedShape):
        found = _grouped(shape, device)
    elif isinstance(shape, AttentionShape):
        found = _attention(shape, device)
    else:
        found = _logp(shape, device)
    return found if found is not None and (alone or len(found.ways) > 1) else None


def _matrix(dtype: str, rows: int, columns: int, batch: int, by_columns: bool, aligned: bool) -> Matrix:
    """A matrix that is contiguous along its columns, or along its rows; if not aligned, nor is its pitch.

    With a batch of 0 it has no batch dimension.
    """
    kind: torch.dtype = getattr(torch, dtype)
    outer, inner = (rows, columns) if by_columns else (columns, rows)
    units = 16 // kind.itemsize
    pitch = -(-inner // units) * units if aligned else inner + (inner % units == 0)
    strides = (pitch, 1) if by_columns else (1, pitch)
    if batch == 0:
        return Matrix(kind, (rows, columns), strides)
    return Matrix(kind, (batch, rows, columns), (outer * pitch, *strides))


def _bytes(*matrices: Matrix) -> float:
    return float(sum(math.prod(x.shape) * x.dtype.itemsize for x in matrices))


def _empty(x: Matrix, device: int) -> Tensor:
    return torch.empty_strided(x.shape, x.strides, dtype=x.dtype, device=place(device))


# ---- Products ----


def product(s: ProductShape, device: int) -> Product:
    """A product of this shape, without tensors."""
    batch = s.batch if s.batch > 1 else 0
    return Product(
        s.step,
        device,
        _matrix(s.a, s.m, s.k, batch, s.a_by_k, s.aligned),
        _matrix(s.b, s.k, s.n, batch, not s.b_by_k, s.aligned),
        _matrix(s.out, s.m, s.n, batch, True, s.aligned),
        start="out" if s.accumulate else "zero",
        sequences=s.sequences,
    )


def _product(shape: ProductShape, device: int) -> Contest:
    from samebits.backends.cuda import matmul

    p = product(shape, device)
    first = matmul.fastest(p)
    kernels = matmul.kernels_for(p)
    choice, *others = [(first, first.choose(p)), *((k, k.choose(p)) for k in kernels if k is not first)]
    ways = [choice, *others, *((kernel, s) for kernel in kernels for s in kernel.candidates(p))]
    found = few(choice, {(kernel, s): kernel.cost(p, s) for kernel, s in ways}, others)
    varied = [(kernel, x) for kernel, s in found if (x := kernel.variations(p, s)[:_VARIATIONS])]
    found += [(kernel, s) for kernel, some in varied[:_VARIED] for s in some]

    def way(kernel: Any, s: Any) -> Way:
        def plan() -> Callable[..., Any]:
            made = kernel.plan(p, s)

            def run(a: Tensor, b: Tensor, *out: Tensor) -> Tensor:
                to = out[0] if out else _empty(p.out, device)
                made.run(Operands(a, b, to, start=to if out else None))
                return to

            return run

        return Way(kernel.name, s, plan)

    matrices = (p.a, p.b, p.out) if shape.accumulate else (p.a, p.b)
    return Contest(
        shape,
        [way(kernel, s) for kernel, s in found],
        2.0 * shape.m * shape.n * shape.k * shape.batch,
        _bytes(p.a, p.b, p.out),
        lambda: tuple(make(x, device) for x in matrices),
    )


# ---- Products of groups: no table knows how tokens will fall ----


def grouped_product(s: GroupedShape, device: int) -> GroupedProduct:
    """A product of this shape, without tensors."""
    if s.of_terms:
        a = _matrix(s.dtype, s.m, s.rows, 0, s.a_by_k, s.aligned)
        b = _matrix(s.dtype, s.rows, s.n, 0, not s.b_by_k, s.aligned)
        out = _matrix(s.out, s.m, s.n, s.groups, True, s.aligned)
    else:
        a = _matrix(s.dtype, s.rows, s.k, 0, s.a_by_k, s.aligned)
        b = _matrix(s.dtype, s.k, s.n, s.groups, not s.b_by_k, s.aligned)
        out = _matrix(s.out, s.rows, s.n, 0, True, s.aligned)
    return GroupedProduct(s.step, device, a, b, out, accumulate=s.accumulate)


def _ends(rows: int, groups: int) -> Tensor:
    """Where groups end if each row falls into one at random. Equal ones would suit tiles that divide them."""
    return torch.randint(groups, (rows,)).bincount(minlength=groups).cumsum(0).to(torch.int32)


def _grouped(shape: GroupedShape, device: int) -> Contest:
    from samebits.backends.cuda import grouped

    p = grouped_product(shape, device)
    kernel = grouped.fastest(p)
    choice = kernel.choose(p)
    costs = {s: kernel.cost(p, s) for s in (choice, *kernel.candidates(p))}

    def way(s: Any) -> Way:
        def plan() -> Callable[..., Any]:
            made = kernel.plan(p, s)

            def run(a: Tensor, b: Tensor, offs: Tensor, *out: Tensor) -> Tensor:
                to = out[0] if out else _empty(p.out, device)
                made.run(GroupedOperands(a, b, to, offs, accumulate=shape.accumulate))
                return to

            return run

        return Way(kernel.name, s, plan)

    def operands() -> tuple[Tensor, ...]:
        offs = _ends(shape.rows, shape.groups).to(place(device))
        given = make(p.a, device), make(p.b, device), offs
        return (*given, make(p.out, device)) if shape.accumulate else given

    flop = 2.0 * shape.rows * shape.n * (shape.m if shape.of_terms else shape.k)
    return Contest(shape, [way(s) for s in few(choice, costs)], flop, _bytes(p.a, p.b, p.out), operands)


# ---- Attention ----


def _attention(shape: AttentionShape, device: int) -> Contest | None:
    from samebits.backends.cuda import devices
    from samebits.backends.cuda.attention.catalogue import HopperKernel
    from samebits.backends.cuda.matmul import family

    kernel = HopperKernel()
    if not devices.device_info(device).arch.runs(kernel.name):
        return None
    s, where = shape, place(device)
    contract, kind = TENSOR_CORE.on(family(device)).key, getattr(torch, s.dtype)
    lead = () if s.packed else (s.batch,)

    def tensors(make: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        q = make((*lead, s.queries, s.heads, s.head), dtype=kind, device=where)
        k = make((*lead, s.keys, s.kv_heads, s.head), dtype=kind, device=where)
        return q, k, make((*lead, s.keys, s.kv_heads, s.values), dtype=kind, device=where)

    def ends(count: int) -> Tensor:
        found = torch.linspace(0, count, s.batch + 1, device=where)
        return found.round().to(torch.int32)

    lengths: dict[str, Tensor] = {}
    if s.packed:
        lengths = {"cu_seqlens_q": ends(s.queries), "cu_seqlens_k": ends(s.keys)}
    elif s.ragged:
        lengths = {"key_length": torch.full((s.batch,), s.keys, dtype=torch.int32, device=where)}

    def call(q: Tensor, k: Tensor, v: Tensor) -> Attention:
        scale, softcap = s.head**-0.5, 30.0 if s.softcap else 0.0
        return Attention(q, k, v, contract, scale, softcap, (s.left, s.right), s.align, **lengths)

    x = call(*tensors(torch.empty))
    if not kernel.supports(x):
        return None

    def way(schedule: Any) -> Way:
        def plan() -> Callable[..., Any]:
            made = kernel.plan(x, schedule)
            return lambda q, k, v: made.run(call(q, k, v))

        return Way(kernel.name, schedule, plan)

    seen = s.keys if s.right < 0 or s.queries == 1 else max(1, s.keys - min(s.queries, s.keys) // 2)
    sequences = s.batch if s.packed else 1  # whose tokens see those of one sequence only
    flop = 2.0 * (1 if s.packed else s.batch) * s.heads * s.queries * seen * (s.head + s.values) / sequences
    every = [way(schedule) for schedule in kernel.candidates(x)[: 2 * MOST]]
    return Contest(
        s, every, flop, float(sum(t.nbytes for t in (x.q, x.q, x.k, x.v))), partial(tensors, torch.randn)
    )


# ---- Log-probabilities ----


def _logp(shape: LogpShape, device: int) -> Contest | None:
    from samebits.backends.cuda import devices, linear_logp_sm90

    if not devices.device_info(device).arch.runs("statistics_sm90"):
        return None
    s, where, entry = shape, place(device), "statistics_sm90"
    kind: torch.dtype = getattr(torch, s.dtype)
    choice = linear_logp_sm90.choose(entry, s.tokens, s.vocabulary)

    def operands(make: Callable[..., Tensor] = torch.randn) -> tuple[Tensor, Tensor]:
        hidden = make((s.tokens, s.features), dtype=kind, device=where)
        return hidden, make((s.vocabulary, s.features), dtype=kind, device=where)

    target = torch.zeros(s.tokens, dtype=torch.int64, device=where)
    rows = Rows.empty(target, s.vocabulary, -100)
    if not linear_logp_sm90.supports(*operands(torch.empty), None):
        return None

    def way(schedule: Any) -> Way:
        def run(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
            return linear_logp_sm90.statistics(hidden, weight, None, rows, schedule=schedule)

        def plan() -> Callable[..., Any]:
            hidden, weight = operands(torch.empty)
            linear_logp_sm90.load(entry, hidden, weight, schedule)
            return run

        return Way("statistics_sm90", schedule, plan)

    # A tile for few tokens takes as long for one as for all that it has room for.
    others = [x for x in linear_logp_sm90.schedules(entry) if not x.swap or s.tokens <= 4 * x.block_n]
    every = [way(x) for x in dict.fromkeys((choice, *others))]
    moved = float(kind.itemsize * (s.tokens + s.vocabulary) * s.features)
    return Contest(s, every, 2.0 * s.tokens * s.vocabulary * s.features, moved, operands)
