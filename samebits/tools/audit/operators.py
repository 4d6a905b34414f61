"""The audit of a function: which operator's rows first depend on the batch, and how the difference grows."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from samebits._version import __version__
from samebits.tools.audit.drift import ordered
from samebits.tools.audit.operator_report import Change, NotCompared, OperatorAudit, OperatorReport
from samebits.tools.audit.trace import (
    Call,
    Layout,
    Observer,
    Trace,
    find_layout,
    is_dense,
    memory,
    modes_disabled,
)
from samebits.tools.seeds import seeded
from samebits.tools.text import AuditError, dtype_name, one_line, plural


def audit(
    fn: Callable[..., Any],
    inputs: Any,
    *,
    backward: bool = False,
    max_rows: int = 4,
    name: str | None = None,
    source: str = "inputs given by the caller",
    notes: Sequence[str] = (),
    progress: Callable[[float, str], None] = lambda done, what: None,
) -> OperatorReport:
    """Run `fn` on a batch and on parts of it, and compare the bits of every operator's rows.

    The function runs on the whole batch, and again in other ways: each audited row alone, either half, all
    rows reversed, and all rows followed by as many copies of one. Every call of an operator is compared
    twice:

    * with all that it inherits from the calls before it, which shows how a difference grows;
    * with the audited rows of its arguments set to those of the whole batch, so that a change comes from this
      operator.

    The rows of a result lie along the one dimension that grows with the batch, also where the batch is merged
    with another dimension (``[B * T, C]``, ``[T * B, C]``). Results that cannot be compared are listed with
    the reason: a sum over rows such as a weight gradient, or a result whose shape depends on the data.

    Args:
        fn: a module or a function. It runs as it is, so call ``eval()`` on a module first. It should depend
            on nothing but its arguments, and treat rows alike. It runs about twenty times.
        inputs: a mapping is passed as keyword arguments, a tuple as positional ones, anything else as the one
            argument. The batch is the first dimension of the first tensor, and of all others of that size.
        backward: compare the operators of the backward, too. The result ``y`` must have rows. Its gradient is
            ``y`` itself, as of ``(y * y).sum() / 2``. No ``.grad`` changes.
        max_rows: rows to audit, at least 1; evenly spaced. These rows of every operator's result in the whole
            batch are kept in main memory.
        name: the function's name in the report.
        source: the name of the inputs in the report.
        notes: passed on to the report.
        progress: receives the fraction of the work that is done, and the current batch.

    Raises:
        AuditError: there are no two rows, ``fn`` does not run on a part of the batch, or there is nothing to
            differentiate.
    """
    if not isinstance(max_rows, int) or max_rows < 1:
        raise AuditError(f"max_rows: expected an int of at least 1, got {max_rows!r}")
    if not isinstance(backward, bool):
        raise AuditError(f"backward: expected a bool, got {type(backward).__name__}")
    start = time.perf_counter()
    run = _Run(fn, inputs, backward)
    audited = sorted({i * run.batch // max_rows for i in range(max_rows)})
    layouts = _find_layouts(run, audited[0])
    whole = _Whole(layouts, audited, run.batch)
    progress(0.0, "the whole batch")
    run(range(run.batch), whole)
    batches = _batches(run.batch, audited)
    for i, (batch, rows) in enumerate(batches.items()):
        progress((i + 1) / (len(batches) + 1), batch)
        run(rows, _Comparison(whole, batch, rows, heal=True))
        run(rows, _Comparison(whole, batch, rows, heal=False))
    operators, not_compared = whole.results()
    changing = sorted({o.operator for o in operators if o.own.first == _REPEAT})
    if changing:
        notes = (*notes, f"not even the same batch twice gives the same bits: {', '.join(changing)}")
    return OperatorReport(
        model=name or str(getattr(fn, "__name__", type(fn).__name__)),
        inputs=source,
        device=str(run.device),
        threads=torch.get_num_threads(),
        torch_version=torch.__version__,
        samebits_version=__version__,
        batch=run.batch,
        rows=tuple(audited),
        batches=tuple(batches),
        seconds=round(time.perf_counter() - start, 1),
        notes=tuple(notes),
        operators=operators,
        not_compared=not_compared,
    )


_REPEAT = "the same batch again"


def _batches(count: int, audited: Sequence[int]) -> dict[str, list[int]]:
    """Other batches of the same rows; every one has at least one audited row."""
    every = list(range(count))
    batches = {_REPEAT: every}
    batches |= {f"row {row} alone": [row] for row in audited}
    if count > 2:
        half = -(-count // 2)
        halves = {"the first half": every[:half], "the second half": every[half:]}
        batches |= {name: rows for name, rows in halves.items() if set(rows) & set(audited)}
    batches["last row first"] = every[::-1]
    batches["padded with as many rows"] = every + [audited[0]] * count
    return batches


class _Run:
    """`fn`, run on any rows of its inputs."""

    def __init__(self, fn: Callable[..., Any], inputs: Any, backward: bool) -> None:
        if not callable(fn):
            raise AuditError(f"fn: expected a function or a module, got {type(fn).__name__}")
        self._fn, self._backward = fn, backward
        self._names = _names(fn)
        args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
        args = args if isinstance(args, tuple) else (args,)
        self._leaves, self._form = tree_flatten((args, dict(kwargs)))
        tensors = [t for t in self._leaves if isinstance(t, Tensor) and t.ndim > 0]
        if not tensors:
            raise AuditError("inputs: expected at least one tensor with a batch dimension, got none")
        self.batch, self.device = tensors[0].shape[0], tensors[0].device
        if self.batch < 2:
            raise AuditError(
                f"inputs: expected a batch of at least 2 rows, got the shape {list(tensors[0].shape)}"
            )

    def __call__(self, rows: Sequence[int], observer: Observer) -> None:
        index = torch.tensor(list(rows), device="cpu")

        def part(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.ndim == 0 or leaf.shape[0] != self.batch:
                return leaf
            chosen = leaf.detach().index_select(0, index.to(leaf.device))
            return chosen.requires_grad_(leaf.requires_grad)

        args, kwargs = tree_unflatten([part(leaf) for leaf in self._leaves], self._form)
        trace = Trace(self._names, observer)
        try:
            with seeded(), torch.set_grad_enabled(self._backward), trace.running():
                results = [t for t in tree_flatten(self._fn(*args, **kwargs))[0] if isinstance(t, Tensor)]
                with modes_disabled():
                    for t in results:
                        trace.tell("forward", "", "output", [t], [t.detach().clone()])
                if self._backward:
                    self._differentiate([t for t in results if t.requires_grad])
        except AuditError:
            raise
        except Exception as error:
            raise AuditError(
                f"the function raised {type(error).__name__} in a batch of {plural(len(index), 'row')}:"
                f" {one_line(error)}"
            ) from error

    def _differentiate(self, results: Sequence[Tensor]) -> None:
        leaves = _leaves(results)
        if not leaves:
            raise AuditError("backward: nothing that requires grad leads to the function's result")
        if any(t.ndim == 0 for t in results):
            raise AuditError("backward: expected results with rows, got a scalar: return a loss for each row")
        torch.autograd.grad(results, leaves, [t.detach().clone() for t in results], allow_unused=True)


def _leaves(results: Sequence[Tensor]) -> list[Tensor]:
    """The tensors for which the graph of `results` accumulates gradients."""
    nodes = [t.grad_fn for t in results]
    seen, leaves = set(nodes), []
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        after = [n for n, _ in node.next_functions if n not in seen]
        seen.update(after)
        nodes += after
    return leaves


def _names(fn: Callable[..., Any]) -> dict[nn.Module, str]:
    """Names of the modules that `fn` is, is a method of, or closes over."""
    roots: dict[str, Any] = {"": fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)}
    cells = getattr(fn, "__closure__", None) or ()
    for variable, cell in zip(getattr(getattr(fn, "__code__", None), "co_freevars", ()), cells, strict=False):
        roots[variable] = cell.cell_contents
    names: dict[nn.Module, str] = {}
    for prefix, root in roots.items():
        if isinstance(root, nn.Module):
            for name, module in root.named_modules(prefix=prefix):
                names.setdefault(module, name)
    return names


def _find_layouts(run: _Run, row: int) -> dict[Call, list[Layout | None]]:
    """Where the rows are in every result, from two small batches of one repeated row."""
    shapes: dict[Call, list[torch.Size]] = {}
    layouts: dict[Call, list[Layout | None]] = {}

    class Three(Observer):
        def called(self, call: Call, inputs: list[Tensor], results: list[Tensor]) -> None:
            shapes[call] = [t.shape for t in results]

    class Two(Observer):
        def called(self, call: Call, inputs: list[Tensor], results: list[Tensor]) -> None:
            if len(shapes.get(call, ())) == len(results):
                layouts[call] = [
                    find_layout(t, three) if is_dense(t) else None
                    for t, three in zip(results, shapes[call], strict=True)
                ]

    run([row] * 3, Three())
    run([row] * 2, Two())
    return layouts


# Elements of the largest result without rows that is kept. A larger one is compared by its digest, and cannot
# be set to that of the whole batch.
_KEEP = 1 << 20


@dataclass
class _Kept:
    """A result in the whole batch: its audited rows, or a digest if it has none."""

    layout: Layout
    rows: Tensor | None
    digest: bytes = b""


@dataclass
class _Tally:
    rows: set[int] = field(default_factory=set)
    ulp: int = 0
    of_row: float = 0.0
    first: str = ""

    def change(self) -> Change:
        return Change(len(self.rows), self.ulp, self.of_row, self.first)


@dataclass
class _Record:
    """A call in the whole batch, and its comparisons with other batches."""

    index: int
    inputs: tuple[tuple[int, ...], ...]
    dtype: str
    kept: list[_Kept | None] = field(default_factory=list)
    own: _Tally = field(default_factory=_Tally)
    drift: _Tally = field(default_factory=_Tally)
    after: str = ""
    batches: set[str] = field(default_factory=set)
    reasons: dict[str, str] = field(default_factory=dict)
    """Reasons why the call was not compared, and the first batch of each."""


class _Whole(Observer):
    """The calls in the whole batch."""

    def __init__(
        self, layouts: Mapping[Call, list[Layout | None]], audited: Sequence[int], batch: int
    ) -> None:
        self._layouts, self._batch = layouts, batch
        self.audited = list(audited)
        self.records: dict[Call, _Record] = {}
        self.elsewhere: dict[Call, NotCompared] = {}

    def called(self, call: Call, inputs: list[Tensor], results: list[Tensor]) -> None:
        shapes = tuple(tuple(t.shape) for t in inputs)
        record = _Record(len(self.records), shapes, dtype_name(results[0].dtype))
        self.records[call] = record
        if not inputs:
            record.reasons["it takes no tensors"] = ""
            return
        layouts = self._layouts.get(call, [])
        if len(layouts) != len(results):
            record.reasons["it does not run in batches of 2 and 3 rows"] = ""
            return
        for result, layout in zip(results, layouts, strict=True):
            rows = None if layout is None else layout.rows(result, self._batch)
            if layout is None or rows is None:
                record.kept.append(None)
                record.reasons[f"rows cannot be told in its result of shape {list(result.shape)}"] = ""
            elif layout.dim is None:
                value = rows.cpu().clone() if result.numel() <= _KEEP else None
                record.kept.append(_Kept(layout, value, _digest(result)))
            else:
                index = torch.tensor(self.audited, device=rows.device)
                record.kept.append(_Kept(layout, rows.index_select(0, index).cpu()))

    def results(self) -> tuple[tuple[OperatorAudit, ...], tuple[NotCompared, ...]]:
        operators, not_compared = [], list(self.elsewhere.values())
        for call, record in self.records.items():
            key = record.index, call.phase, call.module, call.operator
            if record.batches:
                shapes, count = record.inputs, len(record.batches)
                own, drift = record.own.change(), record.drift.change()
                operators.append(OperatorAudit(*key, shapes, record.dtype, count, own, drift, record.after))
            elif not record.reasons:
                record.reasons["it ran in no other batch"] = ""
            not_compared += [NotCompared(*key, *reason) for reason in record.reasons.items()]
        return tuple(operators), tuple(sorted(not_compared, key=lambda n: n.index))


class _Comparison(Observer):
    """Compare the calls in a batch of `members` with those in the whole batch. With `heal`, undo changes."""

    def __init__(self, whole: _Whole, batch: str, members: Sequence[int], heal: bool) -> None:
        self._whole, self._batch, self._size, self._heal = whole, batch, len(members), heal
        self._places = [i for i, row in enumerate(members) if row in whole.audited]
        self._audited = [whole.audited.index(members[i]) for i in self._places]
        self._last = 0
        # Memory of results that were not compared, and so not healed, with the operator that computed them.
        self._unknown: dict[int, str] = {}

    def moved(self, inputs: list[Tensor], results: list[Tensor]) -> None:
        after = self._not_compared(inputs)
        for t in results:
            self._learn(t, after)

    def called(self, call: Call, inputs: list[Tensor], results: list[Tensor]) -> None:
        after = self._not_compared(inputs)
        record = self._whole.records.get(call)
        known = [False] * len(results)
        if record is None:
            key = self._last, call.phase, call.module, call.operator
            missing = NotCompared(*key, "it does not run in the whole batch", self._batch)
            self._whole.elsewhere.setdefault(call, missing)
        else:
            self._last = record.index
            if len(record.kept) == len(results):
                pairs = zip(record.kept, results, strict=True)
                known = [kept is not None and self._compare(record, kept, t, after) for kept, t in pairs]
            elif record.kept:
                record.reasons.setdefault("it has another number of results", self._batch)
        for t, is_known in zip(results, known, strict=True):
            self._learn(t, "" if is_known else call.operator)

    def _not_compared(self, inputs: Sequence[Tensor]) -> str:
        """The operators that computed those of `inputs` that were not compared."""
        return ", ".join(dict.fromkeys(filter(None, (self._unknown.get(memory(t)) for t in inputs))))

    def _learn(self, result: Tensor, not_compared: str) -> None:
        self._unknown.pop(memory(result), None)
        if not_compared:
            self._unknown[memory(result)] = not_compared

    def _compare(self, record: _Record, kept: _Kept, result: Tensor, after: str) -> bool:
        """Whether `result` was compared. With `heal`, it then has the bits of the whole batch."""
        if after and not (result.is_floating_point() or result.is_complex()):
            # Integers such as positions in the batch must differ between batches.
            record.reasons.setdefault("it computes integers from others that were not compared", self._batch)
            return False
        rows = kept.layout.rows(result, self._size) if is_dense(result) else None
        if rows is None or (kept.rows is not None and rows.shape[1:] != kept.rows.shape[1:]):
            record.reasons.setdefault("its result has another shape", self._batch)
            return False
        if kept.layout.dim is None:
            if _digest(result) != kept.digest:
                reason = "its result has no rows and changes with them, as a sum over them does"
                record.reasons.setdefault(reason, self._batch)
                if kept.rows is None:
                    return False
                if self._heal:
                    with torch.no_grad():
                        result.copy_(kept.rows[0])
            else:
                record.batches.add(self._batch)
            return True
        assert kept.rows is not None
        record.batches.add(self._batch)
        index = torch.tensor(self._places, device=rows.device)
        want = kept.rows[self._audited]
        tally = record.own if self._heal else record.drift
        audited = [self._whole.audited[i] for i in self._audited]
        changed = _tally_changes(rows.index_select(0, index).cpu(), want, audited, self._batch, tally)
        if changed and self._heal:
            record.after = record.after or after
            with torch.no_grad():
                rows.index_copy_(0, index, want.to(rows.device))
        return True


def _digest(t: Tensor) -> bytes:
    copy = _integers(t.cpu()).clone()  # once numpy has seen a storage, it cannot be resized
    return hashlib.blake2b(copy.numpy().tobytes(), digest_size=16).digest()


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _integers(t: Tensor) -> Tensor:
    t = torch.view_as_real(t) if t.is_complex() else t
    return t.contiguous().view(_INTEGERS[t.element_size()])


def _tally_changes(got: Tensor, want: Tensor, rows: Sequence[int], batch: str, tally: _Tally) -> bool:
    """Whether `got` differs from `want`. Adds the changed `rows`, and by how much, to the tally."""
    got, want = got.reshape(len(got), -1), want.reshape(len(want), -1)
    a, b = _integers(got).reshape(len(got), -1), _integers(want).reshape(len(got), -1)
    changed = (a != b).any(1).nonzero()[:, 0].tolist()
    if not changed:
        return False
    tally.first = tally.first or batch
    tally.rows.update(rows[i] for i in changed)
    a, b, got, want = a[changed], b[changed], got[changed], want[changed]
    if got.is_floating_point() and got.element_size() > 1:
        width = 8 * got.element_size()
        steps = (ordered(a.long(), width) - ordered(b.long(), width)).abs()
        tally.ulp = max(tally.ulp, int(steps.max()))
    wide = torch.complex128 if got.is_complex() else torch.float64
    x, y = got.to(wide), want.to(wide)
    distance = torch.where((a == b).reshape(*x.shape, -1).all(-1), 0.0, (x - y).abs())
    scale = y.abs().nan_to_num(0, 0, 0).amax(1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    of_row = float((distance.nan_to_num(nan=math.inf, posinf=math.inf) / scale).max())
    tally.of_row = max(tally.of_row, of_row)
    return True
