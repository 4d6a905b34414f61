"""What a schedule is chosen by: a product and the like, as data that tuned tables are keyed by.

A shape has no address, no stride beyond the order of dimensions, and no bias: these do not decide which
schedule is fastest. :func:`met` notes the shapes of a run for ``samebits.record_shapes``.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import torch

from samebits.backends.attention import Attention
from samebits.backends.cuda.plans import forget_plans
from samebits.backends.grouped import GroupedProduct
from samebits.backends.kernel import Step
from samebits.backends.product import LARGEST, Matrix, Product
from samebits.contexts import Context

__all__ = [
    "KINDS",
    "AttentionShape",
    "GroupedShape",
    "LogpShape",
    "ProductShape",
    "Shape",
    "Shapes",
    "as_data",
    "dtype_name",
    "from_data",
    "met",
    "record_shapes",
]

Dtype = Literal["bfloat16", "float16", "float32"]


def dtype_name(dtype: torch.dtype) -> Any:
    """A dtype as shapes have it."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class ProductShape:
    """``out[m, n] = a[m, k] @ b[k, n]``, as :class:`samebits.backends.product.Product` has it.

    Attributes:
        a_by_k, b_by_k: whether the operand is contiguous along k, not along m or n.
        aligned: whether addresses and strides are multiples of 16 bytes.
        accumulate: whether chains start from the output.
        sequences: under FMA, whether a zero term ends the chain.
    """

    step: Step
    a: Dtype
    b: Dtype
    out: Dtype
    m: int
    n: int
    k: int
    batch: int = 1
    a_by_k: bool = True
    b_by_k: bool = True
    aligned: bool = True
    accumulate: bool = False
    sequences: bool = False

    @classmethod
    def of(cls, p: Product) -> ProductShape | None:
        """The shape of a product; None if tables have none for it.

        Packed sequences have the shape of the product without them: the cost model does not tell them apart.
        """
        if p.a.ndim > 3 or p.out.empty or p.k == 0 or p.out.strides[-1] != 1:
            return None
        if not isinstance(p.start, str) or (p.step == "fma" and p.cu_seqlens is not None):
            return None
        shared = any(x.ndim == 3 and x.shape[0] > 1 and x.strides[0] == 0 for x in (p.a, p.b))
        if p.batch > 1 and (shared or min(p.a.ndim, p.b.ndim) < 3 or p.a.shape[0] != p.b.shape[0]):
            return None
        a, b = _by_k(p.a, -2, -1), _by_k(p.b, -1, -2)
        if a is None or b is None:
            return None
        of_a, of_b, of_out = (dtype_name(x.dtype) for x in (p.a, p.b, p.out))
        aligned = all(map(_aligned, (p.a, p.b, p.out)))
        ends = p.sequences and p.step == "fma"
        sizes = p.m, p.n, p.k, p.batch
        return cls(p.step, of_a, of_b, of_out, *sizes, a, b, aligned, p.start == "out", ends)

    @property
    def along(self) -> str:
        """The size that tables may lie between: rows, or where they are the terms, those."""
        return "m" if self.a_by_k else "k"

    def __str__(self) -> str:
        batch = f"{self.batch} x " if self.batch > 1 else ""
        return f"{batch}[{self.m}, {self.k}] @ [{self.k}, {self.n}] {self.a}"


def _by_k(x: Matrix, row: int, k: int) -> bool | None:
    """Whether a matrix is contiguous along k, not along its other dimension; None if along neither."""
    if x.strides[k] == 1 or x.shape[k] == 1:
        return True
    return False if x.strides[row] == 1 or x.shape[row] == 1 else None


def _aligned(x: Matrix) -> bool:
    units = 16 // x.dtype.itemsize
    strides = [s for n, s in zip(x.shape, x.strides, strict=True) if n > 1 and s != 1]
    return x.misalignment == 0 and all(s % units == 0 for s in strides)


@dataclass(frozen=True, slots=True)
class GroupedShape:
    """A product of each group, as :class:`samebits.backends.grouped.GroupedProduct` has it.

    Attributes:
        rows: of all groups, or with `of_terms` terms.
        m: rows of each result with `of_terms`, else 0.
        k: the length of all chains, with `of_terms` 0.
        a_by_k, b_by_k, aligned, accumulate: as in :class:`ProductShape`.
    """

    step: Step
    dtype: Dtype
    out: Dtype
    groups: int
    rows: int
    n: int
    m: int = 0
    k: int = 0
    of_terms: bool = False
    a_by_k: bool = True
    b_by_k: bool = True
    aligned: bool = True
    accumulate: bool = False

    @classmethod
    def of(cls, p: GroupedProduct) -> GroupedShape | None:
        """The shape of a product; None if tables have none for it."""
        if p.out.empty or p.k == 0 or p.out.strides[-1] != 1 or p.a.dtype != p.b.dtype:
            return None
        a, b = _by_k(p.a, -2, -1), _by_k(p.b, -1, -2)
        if a is None or b is None:
            return None
        aligned = all(map(_aligned, (p.a, p.b, p.out)))
        sizes = (p.m, 0) if p.of_terms else (0, p.k)
        kind = p.step, dtype_name(p.a.dtype), dtype_name(p.out.dtype), p.groups, p.rows, p.n
        return cls(*kind, *sizes, p.of_terms, a, b, aligned, p.accumulate)

    @property
    def along(self) -> str:
        return "rows"

    def __str__(self) -> str:
        if self.of_terms:
            return f"{self.groups} x [{self.m}, part of {self.rows}] @ [.., {self.n}] {self.dtype}"
        return f"[{self.rows}, {self.k}] @ {self.groups} x [{self.k}, {self.n}] {self.dtype}"


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Attention, forward, on Hopper. Attributes as in :class:`samebits.backends.attention.Attention`.

    Attributes:
        ragged: whether sequences have their own lengths in padded tensors.
    """

    dtype: Dtype
    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head: int
    values: int
    left: int = -1
    right: int = -1
    align: Literal["first", "slots", "last"] = "first"
    softcap: bool = False
    packed: bool = False
    ragged: bool = False

    @classmethod
    def of(cls, x: Attention) -> AttentionShape:
        span = x.keys + x.queries  # no window is wider
        left, right = (w if 0 <= w < span else -1 for w in x.window)
        sizes = x.batch, x.queries, x.keys, x.heads, x.kv_heads, x.q.shape[-1], x.v.shape[-1]
        ragged = x.key_start is not None or x.key_length is not None
        capped = x.softcap != 0
        return cls(dtype_name(x.q.dtype), *sizes, left, right, x.align, capped, x.packed, ragged)

    @property
    def along(self) -> str:
        return "keys"

    def __str__(self) -> str:
        sizes = f"{self.batch} x {self.queries} queries, {self.keys} keys"
        return f"attention, {sizes}, {self.heads}:{self.kv_heads} heads of {self.head} {self.dtype}"


@dataclass(frozen=True, slots=True)
class LogpShape:
    """The statistics of log-probabilities from hidden states, on Hopper."""

    dtype: Dtype
    tokens: int
    vocabulary: int
    features: int

    @property
    def along(self) -> str:
        return "tokens"

    def __str__(self) -> str:
        return f"logp of {self.tokens} tokens, {self.features}, {self.vocabulary} {self.dtype}"


Shape = ProductShape | GroupedShape | AttentionShape | LogpShape
KINDS: dict[str, type[Shape]] = {
    "product": ProductShape,
    "grouped": GroupedShape,
    "attention": AttentionShape,
    "logp": LogpShape,
}
"""Shapes by the names that files have for them."""

_NAMES = {kind: name for name, kind in KINDS.items()}
_HINTS = {kind: get_type_hints(kind) for kind in KINDS.values()}


def as_data(shape: Shape) -> dict[str, Any]:
    """A shape for JSON: without what is as it mostly is."""
    given = asdict(shape)
    plain = {f.name: f.default for f in fields(shape)}
    return {"op": _NAMES[type(shape)]} | {k: v for k, v in given.items() if v != plain[k]}


def from_data(data: Any) -> Shape:
    """A shape from JSON.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(data, dict) or data.get("op") not in KINDS:
        raise ValueError(f"expected a shape of {', '.join(KINDS)}, got {str(data)[:80]}")
    kind, rest = KINDS[data["op"]], {name: value for name, value in data.items() if name != "op"}
    for name, value in rest.items():
        hint = _HINTS[kind].get(name)
        choices = get_args(hint)
        right = value in choices and type(value) is str if choices else type(value) is hint
        if not right or (hint is int and not -1 <= value <= LARGEST):
            raise ValueError(f"{data['op']}: {name}: got {str(value)[:40]!r}")
    try:
        return kind(**rest)
    except TypeError:
        raise ValueError(f"{data['op']}: expected all of its sizes, got {', '.join(rest)}") from None


# ---- The shapes of a run ----


class _Recorder:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.active: list[dict[Shape, None]] = []


_recorder = _Recorder()


def met(shape: Shape) -> None:
    """A call has this shape. Called where a plan is made, so only once for calls of one kind."""
    if _recorder.active:
        with _recorder.lock:
            for found in _recorder.active:
                found[shape] = None


class Shapes:
    """The shapes that a run has met: what :func:`record_shapes` gives."""

    def __init__(self) -> None:
        self._met: dict[Shape, None] = {}

    def __len__(self) -> int:
        return len(self._met)

    def __iter__(self) -> Iterator[Shape]:
        with _recorder.lock:
            return iter([*self._met])

    def to_json(self) -> str:
        """What ``samebits tune --shapes`` and ``samebits bench --shapes`` read."""
        lines = sorted(json.dumps(as_data(shape)) for shape in self)
        return '{"shapes": [\n' + ",\n".join(lines) + "\n]}\n"


class record_shapes(Context[Shapes]):  # noqa: N801
    """Collect the shapes of the calls on CUDA tensors in this block, to tune for them, or to measure them.

    It sees every thread, also the backward's: products, products of groups, attention and log-probabilities,
    by whatever function they are called. Replays of CUDA graphs that were captured before call nothing, so
    capture them within the block. Recording costs a call something only if it is the first of its kind.

    It is a decorator, too. Kept and entered again, it goes on: its shapes are those of all its blocks.

    Args:
        path: a file to write at the end of each block, for ``samebits tune --shapes``.

    A block gets the shapes: their number by ``len``, JSON by ``to_json()``.

    Raises:
        TypeError: ``path`` is neither a path nor None.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        if path is not None and not isinstance(path, str | os.PathLike):
            raise TypeError(
                f"samebits.record_shapes: path: expected a path or None, got {type(path).__name__}"
            )
        self._path, self._found = path, Shapes()

    def _open(self) -> record_shapes:
        return self

    def __enter__(self) -> Shapes:
        with _recorder.lock:
            _recorder.active.append(self._found._met)  # once for each open block
        forget_plans()  # so that all are met
        return self._found

    def __exit__(self, *_: object) -> None:
        with _recorder.lock:
            active = [i for i, met in enumerate(_recorder.active) if met is self._found._met]
            del _recorder.active[active[-1]]
        if self._path is not None:
            Path(self._path).write_text(self._found.to_json(), "utf-8")
