"""Verification of row reductions and log-probabilities: every kernel on operands made for it."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samebits.backends.logits_in_pieces import grad_logits as grad_logits_by
from samebits.backends.token_logps import Rows, Statistics, vocabulary_pieces
from samebits.contract import Contract
from samebits.functions import VOCAB_BLOCK
from samebits.ops.topk_routing import MOST_EXPERTS
from samebits.testing import KINDS, values
from samebits.tools.verify.case import BF16, F16, F32
from samebits.tools.verify.failures import finish, running
from samebits.tools.verify.operands import Surrounded, laid, unfilled
from samebits.tools.verify.products import AROUND
from samebits.tools.verify.reference import REFERENCE
from samebits.tools.verify.report import Report

Pairs = tuple[tuple[torch.dtype, torch.dtype], ...]
SAME: Pairs = ((BF16, BF16), (F16, F16), (F32, F32))
WIDER: Pairs = ((BF16, F32), (F16, F32))
NARROWER: Pairs = ((F32, BF16), (F32, F16))
HALF: Pairs = SAME[:2]

EPS, SCALE = 1e-5, 0.7
IDS, PADDING, IGNORED = 11, 3, -1


class _Shared:
    """A module of row reductions, whose functions run under a schedule."""

    def __init__(self, rows: Any, schedule: Any) -> None:
        self._rows, self._schedule = rows, schedule

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._rows, name)
        takes = "schedule" in inspect.signature(found).parameters
        return partial(found, schedule=self._schedule) if takes else found


class RowBackend(NamedTuple):
    """A backend's kernels: its modules, and the functions that may have schedules."""

    name: str
    """A prefix of the kernels' names in the report."""
    rows: Any
    """The module of row reductions. None if the backend has none."""
    logp: Any
    statistics: Callable[..., Statistics]
    grad_logits: Callable[..., Tensor]
    schedules: Callable[[str], Sequence[Any]]
    """The schedules of one of these two functions; none without a fused kernel."""
    row_schedules: Callable[[int, torch.dtype], Sequence[Any]] = lambda n, dtype: ("",)
    """The schedules of rows of so many values."""

    def under(self, schedule: Any) -> RowBackend:
        """This backend, whose functions of rows share them so, if they can be told."""
        return self._replace(rows=_Shared(self.rows, schedule)) if schedule else self

    def tried(self, case: Reduction) -> Sequence[Any]:
        """The schedules under which the backend runs a case; none if it does not run it."""
        if entry := KERNELS[case.kernel].entry:
            return self.schedules(entry)
        if case.kernel in _LOGP:
            return ("",)
        return self.row_schedules(case.n, case.dtype) if self.rows is not None else ()


def on_cuda(fused: bool) -> RowBackend:
    """The CUDA kernels. `fused`: whether those of `linear_logp` run on the GPU."""
    from samebits.backends.cuda import linear_logp_sm90, logp, rows

    def schedules(entry: str) -> Sequence[Any]:
        return linear_logp_sm90.schedules(f"{entry}_sm90") if fused else ()

    grad_logits = partial(grad_logits_by, linear_logp_sm90.grad_logits_later)
    fused_ones = linear_logp_sm90.statistics, grad_logits, schedules
    return RowBackend("", rows, logp, *fused_ones, rows.schedules)


def on_triton(contract: Contract, device: int) -> RowBackend:
    """Triton's kernels. On a GPU that cannot fetch tiles, others compute log-probabilities."""
    from samebits.backends.triton import linear_logp, logp

    statistics = partial(linear_logp.statistics, contract=contract.key)
    grad_logits = partial(grad_logits_by, linear_logp.grad_logits_later, contract=contract.key)
    schedules = partial(linear_logp.schedules, device=device)
    return RowBackend("triton ", None, logp, statistics, grad_logits, schedules)


def reference(contract: Contract) -> RowBackend:
    from samebits.backends.reference import linear_logp, logp, rows

    def statistics(*args: Any, schedule: Any) -> Statistics:
        return linear_logp.statistics(*args, contract=contract.key)

    def grad_logits(*args: Any, dtype: torch.dtype, schedule: Any) -> Tensor:
        return grad_logits_by(linear_logp.grad_logits_later, *args, dtype=dtype, contract=contract.key)

    return RowBackend("", rows, logp, statistics, grad_logits, lambda entry: (None,))


@dataclass(frozen=True, slots=True)
class Reduction:
    """A kernel's work on matrices ``[rows, n]``, or on the logits of `rows` tokens.

    Attributes:
        kernel: one of `KERNELS`.
        dtype: dtype of the reduced values.
        other: dtype of parameters, or of results, where it may differ.
        what: the line of the report that the case belongs to.
        rows, n: sizes.
        features: size of hidden states and weights; 0 for none.
        kind: one of ``samebits.testing.KINDS``.
        layout, place: of the matrices in memory, as for a product's A.
    """

    kernel: str
    dtype: torch.dtype
    other: torch.dtype
    what: str
    rows: int
    n: int
    features: int = 0
    kind: str = "normal"
    layout: str = "N"
    place: str = "plain"

    def __str__(self) -> str:
        names = [f.name for f in dataclasses.fields(self) if f.name not in ("kernel", "what")]
        return ", ".join(f"{name} {getattr(self, name)}" for name in names).replace("torch.", "")


class _Operand:
    """An operand that is drawn when it is first read. Copies on a device have the case's strides."""

    def __init__(self, draw: Callable[[RowOperands], Tensor], matrix: bool = False) -> None:
        self._draw, self._matrix = draw, matrix

    def __get__(self, o: RowOperands, _: object = None) -> Tensor:
        if self not in o.kept:
            if o.source is None:
                o.kept[self] = self._draw(o)
            else:
                x = self.__get__(o.source).to(o.device)
                o.kept[self] = laid(x, o.case.layout, o.case.place) if self._matrix else x
        return o.kept[self]


def _tokens(features: str, dtype: str, seed: int) -> _Operand:
    """A matrix with a row for each of the case's rows. `features` and `dtype` name fields of the case."""
    return _Operand(
        lambda o: o.draw((o.case.rows, getattr(o.case, features)), getattr(o.case, dtype), seed), True
    )


def _entries(features: str, seed: int) -> _Operand:
    """A matrix with a row for each entry of the vocabulary."""
    return _Operand(lambda o: o.draw((o.case.n, getattr(o.case, features)), o.case.dtype, seed), True)


class RowOperands:
    """The operands of every kernel. Most are drawn independently, also the results of a forward."""

    case: Reduction
    x = _tokens("n", "dtype", 1)
    grad = _tokens("n", "dtype", 2)
    y = _tokens("n", "other", 3)
    hidden = _tokens("features", "dtype", 4)
    vocabulary = _entries("features", 5)
    weight = _Operand(lambda o: o.normal((o.case.n,), o.case.other, 6))
    bias = _Operand(lambda o: o.normal((o.case.n,), o.case.other, 7))
    vectors = _Operand(lambda o: o.draw_vectors())
    """In f32 for each row: logp, entropy, shift, logarithm of the sum, gradient. For norms the first two are
    mean and scale."""
    ids = _Operand(lambda o: o.integers(0, IDS, 8))
    target = _Operand(lambda o: o.integers(IGNORED - 1, o.case.n, 9))  # includes ignored and wrong targets

    def __init__(
        self,
        case: Reduction,
        make: Callable[..., Tensor] = values,
        source: RowOperands | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.case, self.source, self.device = case, source, device
        self.kept: dict[_Operand, Tensor] = {}
        self.draw: Callable[..., Tensor] = partial(make, case.kind, device="cpu")
        self.normal: Callable[..., Tensor] = partial(make, "normal", device="cpu")

    def integers(self, low: int, high: int, seed: int) -> Tensor:
        return torch.randint(low, high, (self.case.rows,), generator=torch.Generator().manual_seed(seed))

    def draw_vectors(self) -> Tensor:
        logits = self.hidden.float() @ self.vocabulary.float().mT if self.case.features else self.x.float()
        vectors = self.normal((5, self.case.rows), F32, 8)
        vectors[2], vectors[3] = logits.amax(1) * SCALE, vectors[3].abs()  # then probabilities are at most 1
        return vectors

    def placed(self, device: torch.device) -> RowOperands:
        """The same on `device`, at the case's strides. Operands not drawn yet follow when they are read."""
        there = RowOperands(self.case, source=self, device=device)
        for operand in list(self.kept):
            operand.__get__(there)
        return there


Results = tuple[Tensor, ...]


def _norm(
    on: RowBackend, o: RowOperands, *, bias: bool = True, weight: bool = True, centred: bool
) -> Results:
    y, *kept = on.rows.norm(o.x, o.weight if weight else None, o.bias if bias else None, EPS, centred)
    # The contract does not specify the NaN in values that are saved for the backward.
    return y, *(torch.where(t.isnan(), torch.nan, t) for t in kept)


def _norm_backward(on: RowBackend, o: RowOperands, *, centred: bool) -> Results:
    means, scales = o.vectors[0] if centred else o.vectors[0, :0], o.vectors[1]
    return (on.rows.norm_backward(o.grad, o.x, o.weight if centred else None, means, scales),)


def _norm_columns(on: RowBackend, o: RowOperands, *, centred: bool) -> Results:
    means, scales = o.vectors[0] if centred else o.vectors[0, :0], o.vectors[1]
    return on.rows.norm_columns(o.grad, o.x, means, scales, o.weight.dtype)  # type: ignore[no-any-return]


def _norm_gradients(on: RowBackend, o: RowOperands, *, centred: bool, weighted: bool) -> Results:
    means, scales = o.vectors[0] if centred else o.vectors[0, :0], o.vectors[1]
    weight = o.weight if weighted else None
    return on.rows.norm_gradients(o.grad, o.x, weight, means, scales, o.weight.dtype)  # type: ignore[no-any-return]


def _logp(on: RowBackend, o: RowOperands, *, entropy: bool) -> Results:
    rows = Rows.empty(o.target, o.x.shape[1], IGNORED, scale=SCALE, entropy=entropy)
    statistics = Statistics.empty(rows)
    for part in vocabulary_pieces(slice(0, rows.vocabulary), 1, 8 * VOCAB_BLOCK):
        on.logp.add_statistics(statistics, o.x[:, part], part.start, rows)
    return _combined(on, statistics, rows)


def _statistics(
    on: RowBackend, o: RowOperands, schedule: Any, *, bias: bool, entropy: bool, kept: bool = False
) -> Results:
    tokens, vocabulary = len(o.hidden), len(o.vocabulary)
    rows = Rows.empty(o.target, vocabulary, IGNORED, scale=SCALE, entropy=entropy)
    keep = None
    if kept:  # rows start at multiples of 16 bytes
        keep = o.x.new_full((tokens, -(-vocabulary // 4) * 4), torch.nan, dtype=F32)[:, :vocabulary]
    its_bias = o.bias if bias else None
    found = on.statistics(o.hidden, o.vocabulary, its_bias, rows, keep, schedule=schedule)
    return *_combined(on, found, rows), *(() if keep is None else (keep.contiguous(),))


def _combined(on: RowBackend, statistics: Statistics, rows: Rows) -> Results:
    on.logp.combine(statistics, rows)
    # The shift may be a zero of either sign. It may be anything where the logarithm of the sum is NaN.
    shift = torch.where(rows.log_sum.isnan(), torch.nan, rows.shift + 0.0)
    return rows.logp, rows.entropy, shift, rows.log_sum


def _grad_logits(on: RowBackend, o: RowOperands, *, entropy: bool) -> Results:
    rows, *grads = _given(o, o.x.shape[1], entropy)
    dz = torch.empty(o.x.shape, dtype=o.y.dtype, device=o.x.device)
    on.logp.grad_logits(dz, o.x, 0, rows, *grads)
    return (dz,)


def _fused_grad_logits(
    on: RowBackend, o: RowOperands, schedule: Any, *, bias: bool, entropy: bool
) -> Results:
    rows, *grads = _given(o, len(o.vocabulary), entropy)
    its_bias, parts = o.bias if bias else None, vocabulary_pieces(slice(0, rows.vocabulary), 1, 512)
    dtype = o.hidden.dtype
    return tuple(
        on.grad_logits(o.hidden, o.vocabulary, its_bias, part, rows, *grads, dtype=dtype, schedule=schedule)
        for part in parts
    )


def _given(o: RowOperands, vocabulary: int, entropy: bool) -> tuple[Rows, Tensor, Tensor | None]:
    """Rows with the results of a forward, and the gradients of those results."""
    logp, entropies, shift, log_sum, grad = (v.clone() for v in o.vectors)  # cloned to be aligned
    rows = Rows(o.target, vocabulary, IGNORED, SCALE, logp, entropies, shift, log_sum)
    return rows, grad, logp if entropy else None


def _in_slots(o: RowOperands) -> tuple[Tensor, Tensor, Tensor]:
    """The case's first rows as ``[tokens, slots, n]``, weights of these slots, and places of all."""
    slots = min(o.case.rows, 1 + o.case.n % 16)
    tokens = o.case.rows // slots
    places = torch.randperm(tokens * slots, generator=torch.Generator().manual_seed(10)).to(o.x.device)
    weights = o.grad.reshape(-1)[: tokens * slots].view(tokens, slots)
    return o.x[: tokens * slots].unflatten(0, (tokens, slots)), weights, places


def _slots_taken(on: RowBackend, o: RowOperands) -> Results:
    x, weights, places = _in_slots(o)
    tokens = o.x[: len(x)]
    return tuple(on.rows.take_slots(tokens, places, x.shape[1], w) for w in (None, weights))


def _slots_combined(on: RowBackend, o: RowOperands) -> Results:
    x, weights, places = _in_slots(o)
    return tuple(on.rows.combine_slots(o.x, places, x.shape[1], w) for w in (None, weights))


def _routed(on: RowBackend, o: RowOperands) -> Results:
    """Some experts are below 0, some beyond the last one."""
    found = on.rows.route(o.ids - 2, IDS - 4, max(1, o.case.rows // 3))
    return tuple(t.to(torch.int32).view(F32) for t in found)  # bits are compared


def _experts_chosen(on: RowBackend, o: RowOperands) -> Results:
    """With scores, bias and groups by the case's length."""
    x, n = o.x[:, :MOST_EXPERTS], min(o.case.n, MOST_EXPERTS)
    score, groups = ("softmax", "sigmoid", "logits")[n % 3], 4 if n % 8 == 0 and n % 3 < 2 else 1
    bias = None if n % 3 == 2 else (torch.arange(n, device=x.device) * 37 % 64 / 64).to(F32)
    numbers = groups, min(groups, 3), n % 2 > 0, 1e-20, 2.5
    weights, experts = on.rows.topk_routing(x, bias, min(n, 1 + n % 16), score, *numbers, o.case.other)
    return weights, experts.to(torch.int32).view(F32)  # bits are compared


@dataclass(frozen=True)
class Reducer:
    """A kernel: how to run it, and which pairs of dtypes it takes.

    `entry` names the backend's fused function, if the kernel is one. Those take schedules.
    """

    run: Callable[..., Results]
    dtypes: Pairs
    entry: str = ""

    def __call__(self, on: RowBackend, o: RowOperands, schedule: Any) -> Results:
        if self.entry:
            return self.run(on, o, schedule)
        return self.run(on.under(schedule), o)


ROWS = {
    "sum": Reducer(lambda on, o: (on.rows.row_sum(o.x, False, o.y.dtype),), SAME + WIDER),
    "mean": Reducer(lambda on, o: (on.rows.row_sum(o.x, True, o.y.dtype),), SAME),
    "2-norm": Reducer(lambda on, o: (on.rows.row_norm(o.x, o.y.dtype),), SAME),
    "softmax": Reducer(lambda on, o: (on.rows.softmax(o.x, False, o.y.dtype),), SAME),
    "log_softmax": Reducer(lambda on, o: (on.rows.softmax(o.x, True, o.y.dtype),), SAME),
    "softmax backward": Reducer(
        lambda on, o: (on.rows.softmax_backward(o.grad, o.y, False, o.y.dtype),), SAME
    ),
    "log_softmax backward": Reducer(
        lambda on, o: (on.rows.softmax_backward(o.grad, -o.y.abs(), True, o.y.dtype),), SAME
    ),
    "layer_norm": Reducer(partial(_norm, centred=True), SAME + WIDER),
    "layer_norm, bias": Reducer(partial(_norm, weight=False, centred=True), SAME),
    "layer_norm, weight": Reducer(partial(_norm, bias=False, centred=True), SAME),
    "rms_norm": Reducer(partial(_norm, bias=False, centred=False), SAME + WIDER),
    "rms_norm, no weight": Reducer(partial(_norm, weight=False, bias=False, centred=False), SAME),
    "layer_norm backward": Reducer(partial(_norm_backward, centred=True), SAME + WIDER),
    "rms_norm backward": Reducer(partial(_norm_backward, centred=False), SAME),
    "layer_norm weights": Reducer(partial(_norm_columns, centred=True), SAME + WIDER),
    "rms_norm weights": Reducer(partial(_norm_columns, centred=False), SAME),
    "layer_norm gradients": Reducer(partial(_norm_gradients, centred=True, weighted=True), SAME + WIDER),
    "rms_norm gradients": Reducer(partial(_norm_gradients, centred=False, weighted=True), SAME),
    "rms_norm gradients, no weight": Reducer(partial(_norm_gradients, centred=False, weighted=False), SAME),
    "sum over tokens": Reducer(lambda on, o: (on.rows.column_sum(o.x, o.y.dtype),), SAME + NARROWER),
    "sum over slots": Reducer(lambda on, o: (on.rows.slot_sum(_in_slots(o)[0]),), SAME),
    "slots taken": Reducer(_slots_taken, SAME),
    "slots combined": Reducer(_slots_combined, SAME),
    "slots routed": Reducer(_routed, SAME[:1]),
    "experts chosen": Reducer(_experts_chosen, SAME + WIDER),
    "embedding": Reducer(lambda on, o: (on.rows.embedding(o.x, o.ids % len(o.x)),), SAME),
    "embedding backward": Reducer(
        lambda on, o: tuple(on.rows.embedding_backward(o.grad, o.ids, IDS, p) for p in (-1, PADDING)), SAME
    ),
}
_LOGP = {
    "logp": Reducer(partial(_logp, entropy=False), SAME),
    "logp, entropy": Reducer(partial(_logp, entropy=True), SAME),
    "logp backward": Reducer(partial(_grad_logits, entropy=False), SAME + NARROWER),
    "logp backward, entropy": Reducer(partial(_grad_logits, entropy=True), SAME + NARROWER),
    "linear_logp": Reducer(partial(_statistics, bias=False, entropy=True), HALF, "statistics"),
    "linear_logp, bias": Reducer(partial(_statistics, bias=True, entropy=False), HALF, "statistics"),
    "linear_logp, logits kept": Reducer(
        partial(_statistics, bias=True, entropy=True, kept=True), HALF, "statistics"
    ),
    "linear_logp backward": Reducer(
        partial(_fused_grad_logits, bias=False, entropy=True), HALF, "grad_logits"
    ),
    "linear_logp backward, bias": Reducer(
        partial(_fused_grad_logits, bias=True, entropy=False), HALF, "grad_logits"
    ),
}
KERNELS = ROWS | _LOGP

Size = tuple[int, int, int]
"""Rows, n and features."""
SIZES: tuple[Size, ...] = (
    (1, 1, 0), (1, 129, 0), (3, 127, 0), (2, 128, 0), (64, 32, 0), (65, 31, 0),
    (129, 1, 0), (7, 1024, 0), (9, 1025, 0), (3, 4097, 0), (300, 70, 0), (5, 1504, 0), (3, 4088, 0),
    (2, 4096, 0), (2, 7000, 0), (3, 12288, 0), (2, 16384, 0), (1, 40000, 0), (500, 64, 0), (130, 8200, 0),
    (300, 4104, 0), (130, 8192, 0),
)  # fmt: skip
FUSED_SIZES: tuple[Size, ...] = (
    (1, 1, 8), (3, 130, 24), (9, 1100, 40), (20, 300, 72), (33, 129, 64), (70, 300, 136),
    (130, 4097, 64), (300, 700, 24),
)  # fmt: skip
STRIDES = (("N", "pitched"), ("N", "odd"), ("N", "spread"), ("T", "plain"))


def reductions(thorough: bool, fused: bool) -> Iterator[Reduction]:
    """All cases. Those of fused kernels only with `fused`."""
    kinds = itertools.cycle(KINDS)
    for name, kernel in KERNELS.items():
        if kernel.entry and not fused:
            continue
        sizes = FUSED_SIZES if kernel.entry else SIZES
        middle: Size = (70, 300, 72) if kernel.entry else (5, 1100, 0)
        for dtype, other in kernel.dtypes:
            case = partial(Reduction, name, dtype, other)
            for size in sizes * (3 if thorough else 1):
                yield case("shapes", *size, kind=next(kinds))
            for kind in KINDS:
                yield case("values", *middle, kind=kind)
            for layout, place in STRIDES[:1] if kernel.entry else STRIDES:
                yield case("strides", *middle, layout=layout, place=place)


def calls(cases: Iterable[Reduction], on: RowBackend, device: torch.device) -> Iterator[Callable[[], object]]:
    """Calls that load the kernels of `cases`."""
    for case in cases:
        kernel, operands = KERNELS[case.kernel], RowOperands(case, unfilled).placed(device)
        for schedule in on.tried(case):
            yield partial(kernel, on, operands, schedule)


def verify_reductions(
    report: Report,
    cases: Iterable[Reduction],
    backends: Sequence[RowBackend],
    contract: Contract,
    device: torch.device,
) -> None:
    """Compare the kernels of `backends` with the CPU reference, and the memory around outputs with NaN."""
    right = reference(contract)
    for case in cases:
        runs = [(on, schedule) for on in backends for schedule in on.tried(case)]
        if not runs:  # Triton reduces no rows
            continue
        kernel, operands = KERNELS[case.kernel], RowOperands(case)
        want = [t.to(device) for t in kernel(right, operands, None)]
        placed = operands.placed(device)
        for on, schedule in runs:
            name = on.name + case.kernel
            doing = f"{name}, {case.what}, {case}, {schedule}"
            with running(doing), Surrounded() as room:
                got = kernel(on, placed, schedule)
                finish(doing)
            for g, w in zip(got, want, strict=True):
                report.compare(name, case.what, REFERENCE, g, w, case, schedule)
            for margins in room.margins:
                nan = torch.full_like(margins, torch.nan)
                report.compare(name, AROUND, "NaN", margins, nan, case, schedule)
