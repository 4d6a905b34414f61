"""``samebits verify``: every kernel and schedule on this GPU against the CPU reference, bit for bit.

Nothing here decides what is right. Small products are held to the CPU reference, which executes the contract
literally; large ones to the universal kernel, of which sampled rows are held to the reference each time;
batches to one another. Every output is filled with NaN before its kernel runs, and so is what lies beside it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import importlib.resources
import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor

from samebits._version import __version__
from samebits.contract import AMPERE, FMA, HOPPER, TENSOR_CORE, Contract
from samebits.ops.addmm import addmm_
from samebits.ops.bmm import bmm
from samebits.ops.linear import linear
from samebits.ops.matmul import matmul
from samebits.testing import KINDS, bits, values

__all__ = [
    "Case",
    "Kernel",
    "Line",
    "Mismatch",
    "Operands",
    "Report",
    "cases",
    "kernels",
    "known_answers",
    "verify",
]

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

Show = Callable[[float, str], None]


# ---- what is compared, as data


@dataclass(frozen=True, slots=True)
class Case:
    """One product ``[m, k] @ [k, n]``.

    Attributes:
        what: what it tries, one line of the report.
        m, n, k: sizes.
        layout: of A and B: ``N``, rows contiguous, or ``T``, columns contiguous; ``x @ weight.T`` is NT.
        dtype: of A and B.
        out: dtype of the output; None is that of A and B.
        kind: one of ``samebits.testing.KINDS``.
        place: of A and B in memory: ``plain``; ``pitched``, rows 16-byte aligned with a gap; ``odd``, at an
            odd address with an odd pitch; ``spread``, every second element.
        bias: its dtype, if any.
        accumulate: start the chains from an f32 matrix.
        pitch: elements between the output's rows.
        batch: number of matrices, 0 for plain 2-D.
        shared: which operand is one matrix for the whole batch, ``a``, ``b`` or neither.
        segments: sequences as an axis of A and B; 0 for none.
        lengths: sequences as spans of k.
        bounds: dtype of the offsets of those spans.
    """

    what: str
    m: int
    n: int
    k: int
    layout: str = "NT"
    dtype: torch.dtype = BF16
    out: torch.dtype | None = None
    kind: str = "normal"
    place: str = "plain"
    bias: torch.dtype | None = None
    accumulate: bool = False
    pitch: int = 0
    batch: int = 0
    shared: str = ""
    segments: int = 0
    lengths: tuple[int, ...] = ()
    bounds: torch.dtype = torch.int32

    @property
    def out_dtype(self) -> torch.dtype:
        return self.out or self.dtype

    @property
    def work(self) -> int:
        """Multiplications."""
        return self.m * self.n * self.k * max(1, self.batch) * max(1, self.segments)

    @property
    def variant(self) -> tuple[object, ...]:
        """What kernels are compiled for: cases that share it mostly share kernels."""
        out = self.out_dtype, self.bias, self.accumulate, max(self.n, self.pitch) % 8 == 0
        return self.layout, self.dtype, *out, self.k % 64 == 0, bool(self.lengths) and self.bounds

    def __str__(self) -> str:
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        said = {name: getattr(self, name) for name in list(defaults)[4:]}
        words = [f"{name} {v}" for name, v in said.items() if v != defaults[name]]
        text = ", ".join([f"M {self.m}, N {self.n}, K {self.k}", *words])
        return text.replace("torch.", "")


LAYOUTS = ("NT", "NN", "TN", "TT")
SHAPES = (
    (1, 1, 1), (1, 17, 64), (3, 5, 24), (5, 3, 16), (8, 72, 8), (17, 31, 33), (33, 4096, 512), (64, 64, 64),
    (65, 130, 100), (128, 256, 15), (136, 328, 200), (130, 70, 200), (257, 1, 129), (300, 520, 264),
    (512, 768, 512), (1000, 520, 1096),
)  # fmt: skip
SIZES = ((512, 768, 512), (136, 328, 200), (8, 72, 8), (1, 264, 392), (2048, 1536, 320))
LENGTHS = (
    (64, 128),
    (1, 0, 17, 63, 0, 200, 64, 5),
    (333,),
    (16,) * 9,
    (0,),
    (1,) * 40,
    (15, 16, 17) * 5,
)
LARGE = (
    (4096, 4096, 512),
    (2048, 6144, 1024),
    (16, 28672, 4096),
    (100, 4096, 14336),
    (3000, 5000, 520),
)
LARGEST = ((8192, 8192, 1024), (16384, 4096, 2048), (1024, 8192, 8192), (1, 57344, 8192), (64, 8192, 28672))


def cases(thorough: bool) -> list[Case]:
    """What is held to the CPU reference, and, from `LARGE` on, to the universal kernel."""
    kinds, dtypes = itertools.cycle(KINDS), itertools.cycle((BF16, F16))
    found = []
    for shape in SHAPES:
        for dtype in (BF16, F16):
            found.append(Case("shapes", *shape, dtype=dtype, kind=next(kinds)))
            found.append(Case("shapes", *shape, dtype=dtype, kind=next(kinds), out=F32))
    for layout in LAYOUTS:
        for dtype in (BF16, F16) if thorough else (BF16,):
            for shape in SIZES:
                found.append(Case("layouts", *shape, layout, dtype))
                if thorough:
                    found.append(Case("layouts", *shape, layout, dtype, out=F32, kind=next(kinds)))
        for place, shape in itertools.product(("pitched", "odd", "spread"), ((136, 328, 200), (33, 70, 45))):
            found.append(Case("strides", *shape, layout, next(dtypes) if thorough else BF16, place=place))
    for dtype, kind in itertools.product((BF16, F16), KINDS):
        for out in (None, F32):
            for shape in ((136, 72, 272), (16, 264, 1032)):
                found.append(Case("values", *shape, dtype=dtype, kind=kind, out=out))
    for dtype in (BF16, F16) if thorough else (BF16,):
        for kind in ("normal", "special") if thorough else ("special",):
            same = partial(Case, "epilogues", 300, 520, 264, dtype=dtype, kind=kind)
            found += [same(bias=dtype), same(bias=F32, out=F32), same(bias=dtype, pitch=528)]
            found += [same(pitch=523), same(out=F32, pitch=523), same(out=F32, accumulate=True)]
            found += [same(out=F32, accumulate=True, pitch=521), same(out=F32, accumulate=True, layout="TN")]
    for shared in ("", "a", "b"):
        for layout in LAYOUTS if thorough else ("NT", "NN"):
            for shape in ((136, 264, 200), (1, 72, 64), (20, 18, 33)):
                found.append(Case("batches", *shape, layout, batch=5, shared=shared))
    for lengths in LENGTHS:
        for bounds in (torch.int32, torch.int64):
            for m, n in ((264, 520), (40, 24)):
                spans = partial(Case, "sequences", m, n, sum(lengths), "TN", lengths=lengths, bounds=bounds)
                found += [spans(out=F32, accumulate=True, kind="wide"), spans()]
                if thorough:
                    found += [spans(dtype=F16, kind="special"), spans(dtype=F16, out=F32)]
    for segments, k in ((3, 1), (4, 16), (3, 37), (2, 80)):
        for accumulate in (False, True):
            out = F32 if accumulate else None
            found.append(
                Case("sequences", 40, 72, k, "TN", batch=2, segments=segments, accumulate=accumulate, out=out)
            )
    for shape in LARGE + (LARGEST if thorough else ()):
        for layout in LAYOUTS[:3] if thorough and shape[0] > 16 else ("NT",):
            found.append(Case("large", *shape, layout))
            if thorough:
                found.append(Case("large", *shape, layout, F16, out=F32, kind="wide"))
    return found


@dataclass(frozen=True, slots=True)
class Operands:
    a: Tensor
    b: Tensor
    bias: Tensor | None = None
    acc: Tensor | None = None
    cu_seqlens: Tensor | None = None


def _laid(x: Tensor, layout: str, place: str) -> Tensor:
    """The values of `x` at other strides, with NaN beside them."""
    if layout == "T":
        return _laid(x.mT, "N", place).mT
    columns = x.shape[-1]
    width, first, step = {
        "plain": (columns, 0, 1),
        "pitched": (-(-columns // 8) * 8 + 8, 0, 1),
        "odd": (columns + 2 + columns % 2, 1, 1),
        "spread": (2 * columns, 0, 2),
    }[place]
    room = x.new_full((*x.shape[:-1], width + (place == "odd")), math.nan)
    return room[..., first : first + step * columns : step].copy_(x)


def _operands(case: Case, device: torch.device, make: Callable[..., Tensor] = values) -> Operands:
    lead = (case.batch,) if case.batch else ()
    mid = (case.segments,) if case.segments else ()
    a_lead = (1,) if case.shared == "a" else lead
    b_lead = (1,) if case.shared == "b" else lead
    a = make(case.kind, (*a_lead, *mid, case.m, case.k), case.dtype, 1, device)
    b = make(case.kind, (*b_lead, *mid, case.k, case.n), case.dtype, 2, device)
    bias = None if case.bias is None else make(case.kind, (case.n,), case.bias, 3, device)
    acc = make("normal", (*lead, case.m, case.n), F32, 4, device) if case.accumulate else None
    cu_seqlens = None
    if case.lengths:
        ends = list(itertools.accumulate(case.lengths, initial=0))
        cu_seqlens = torch.tensor(ends, dtype=case.bounds, device=device)
    return Operands(
        _laid(a, case.layout[0], case.place), _laid(b, case.layout[1], case.place), bias, acc, cu_seqlens
    )


def _unfilled(kind: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: Any) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def _room(case: Case, operands: Operands) -> tuple[Tensor, Tensor]:
    """An output of NaN, or of the accumulator, and the memory it lies in."""
    lead = (case.batch,) if case.batch else ()
    width = max(case.n, case.pitch)
    room = operands.a.new_full((*lead, case.m, width), math.nan, dtype=case.out_dtype)
    out = room[..., : case.n]
    if operands.acc is not None:
        out.copy_(operands.acc)
    return out, room


def _reference(case: Case, operands: Operands, contract: Contract) -> Tensor:
    """What the contract says, computed on the CPU, on the operands' device."""
    from samebits.backends.reference import matmul as reference

    a, b, device = operands.a.cpu(), operands.b.cpu(), operands.a.device
    if operands.acc is None and operands.cu_seqlens is None and not case.segments:
        bias = None if operands.bias is None else operands.bias.cpu()
        out = reference.matmul(a, b, bias=bias, out_dtype=case.out_dtype, contract=contract.key)
        return out.to(device)
    batch = max(1, case.batch)
    if not case.segments:
        a, b = a.unsqueeze(-3), b.unsqueeze(-3)
    a, b = (x.expand(batch, *x.shape[-3:]) for x in (a, b))
    acc = None if operands.acc is None else operands.acc.cpu().reshape(batch, case.m, case.n)
    spans = None if operands.cu_seqlens is None else operands.cu_seqlens.cpu()
    out = reference.addbmm(acc, a, b, spans, out_dtype=case.out_dtype, contract=contract.key)
    return out.reshape(((case.batch,) if case.batch else ()) + (case.m, case.n)).to(device)


# ---- the kernels


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel as its host module offers it."""

    name: str
    schedules: Sequence[Any]
    """None is the one that it chooses itself."""
    takes: Callable[[Operands, Tensor, Any], bool]
    run: Callable[[Operands, Tensor, Any], object]


def _universal() -> Kernel:
    from samebits.backends.cuda import matmul_sm80

    def run(x: Operands, out: Tensor, schedule: Any) -> object:
        acc = None if x.acc is None else out
        return matmul_sm80.matmul(
            x.a, x.b, acc=acc, bias=x.bias, cu_seqlens=x.cu_seqlens, out=out, schedule=schedule
        )

    return Kernel("matmul_sm80", matmul_sm80.SCHEDULES, lambda x, out, schedule: True, run)


def _hopper() -> Kernel:
    from samebits.backends.cuda import matmul_sm90
    from samebits.backends.cuda.schedule import catalogue

    def mn(t: Tensor, row: int, k: int) -> bool:
        return not matmul_sm90._k_major(t.shape[row], t.shape[k], t.stride(row), t.stride(k))

    def takes(x: Operands, out: Tensor, schedule: Any) -> bool:
        return bool(
            x.a.ndim < 4
            and x.a.shape[-1] > 0
            and matmul_sm90.supports(x.a, x.b, cu_seqlens=x.cu_seqlens)
            and (schedule is None or schedule.fits(mn(x.a, -2, -1), mn(x.b, -1, -2)))
        )

    def run(x: Operands, out: Tensor, schedule: Any) -> object:
        matmul_sm90.matmul(
            x.a,
            x.b,
            out,
            bias=x.bias,
            accumulate=x.acc is not None,
            cu_seqlens=x.cu_seqlens,
            schedule=schedule,
        )
        return out

    majors = itertools.product((False, True), repeat=2)
    every = dict.fromkeys(s for a_mn, b_mn in majors for s in catalogue(a_mn, b_mn))
    return Kernel("matmul_sm90", (None, *every), takes, run)


def _runs(todo: Sequence[Case], offered: Sequence[Kernel], thorough: bool) -> list[list[tuple[Kernel, Any]]]:
    """For each case, the schedules to try. Of many, a third for each variant, unless `thorough`."""
    variants = {variant: i for i, variant in enumerate(dict.fromkeys(case.variant for case in todo))}

    def tried(kernel: Kernel, j: int, variant: int) -> bool:
        return thorough or len(kernel.schedules) < 20 or j == 0 or (j + variant) % 3 == 0

    return [
        [(k, s) for k in offered for j, s in enumerate(k.schedules) if tried(k, j, variants[case.variant])]
        for case in todo
    ]


def kernels(device: int) -> list[Kernel]:
    """Those that run on CUDA device `device`; the universal one first."""
    from samebits.backends.cuda import runtime

    info = runtime.device_info(device)
    return [_universal(), *([_hopper()] if info.capability == (9, 0) else [])]


# ---- the report


@dataclass(frozen=True)
class Mismatch:
    """One place where bits differ."""

    kernel: str
    what: str
    case: str
    schedule: str
    at: tuple[int, ...]
    got: float
    got_bits: str
    expected: float
    expected_bits: str


@dataclass
class Line:
    """One line of the report: what was compared with what, and how many values differed."""

    kernel: str
    what: str
    against: str
    schedules: int = 0
    products: int = 0
    compared: int = 0
    differing: int = 0
    counts: bool = True
    """Whether a difference is a failure; bits of cuBLAS are only reported."""


@dataclass
class Report:
    """What ``samebits verify`` found.

    Attributes:
        gpu: its name, None if none was verified.
        why_not: why no GPU was verified; empty if one was.
        contract: what the GPU's bits were held to, with its digest.
        versions: of samebits, torch, the driver and NVRTC.
        thorough: whether all cases ran.
        kernels: how many kernels were compiled, or taken from the cache.
        lines: the comparisons.
        first: the first place where bits differ.
        failure: a kernel that raised an error or did not end; nothing ran after it.
        seconds: how long it took.
    """

    gpu: str | None
    why_not: str
    contract: str
    digest: str
    versions: dict[str, str]
    thorough: bool
    kernels: int = 0
    lines: list[Line] = dataclasses.field(default_factory=list)
    first: Mismatch | None = None
    failure: str = ""
    hung: bool = False
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self._schedules: dict[tuple[str, str, str], set[object]] = {}

    @property
    def compared(self) -> int:
        return sum(line.compared for line in self.lines if line.counts)

    @property
    def differing(self) -> int:
        return sum(line.differing for line in self.lines if line.counts)

    @property
    def exit_code(self) -> int:
        """0: every bit as specified. 1: not so. 2: no GPU was verified."""
        if self.differing or self.failure:
            return 1
        return 0 if self.gpu else 2

    def to_json(self) -> str:
        data = dataclasses.asdict(self) | {"compared": self.compared, "differing": self.differing}
        return json.dumps(data, indent=1)

    def line(self, kernel: str, what: str, against: str, counts: bool = True) -> Line:
        for line in self.lines:
            if (line.kernel, line.what, line.against) == (kernel, what, against):
                return line
        self.lines.append(Line(kernel, what, against, counts=counts))
        return self.lines[-1]

    def compare(
        self,
        kernel: str,
        what: str,
        against: str,
        got: Tensor,
        want: Tensor,
        case: object = "",
        schedule: object = "",
        counts: bool = True,
    ) -> None:
        """Hold `got` to `want`, both on one device, by their bits."""
        line = self.line(kernel, what, against, counts)
        self._schedules.setdefault((kernel, what, against), set()).add(schedule)
        line.schedules = len(self._schedules[kernel, what, against])
        line.products += 1
        line.compared += got.numel()
        if got.shape != want.shape or got.dtype != want.dtype:
            raise KernelError(
                f"{kernel}, {what}, {case}: {got.dtype} {got.shape}, not {want.dtype} {want.shape}"
            )
        if torch.equal(bits(got), bits(want)):
            return
        different = (bits(got) != bits(want)).nonzero()
        line.differing += len(different)
        if counts and self.first is None:
            at = tuple(different[0].tolist())
            sides = [(float(x[at].item()), _pattern(x[at])) for x in (got, want)]
            self.first = Mismatch(kernel, what, str(case), str(schedule), at, *sides[0], *sides[1])


def _pattern(x: Tensor) -> str:
    digits = 2 * x.element_size()
    return f"0x{int(bits(x.reshape(1)).item()) & ((1 << 4 * digits) - 1):0{digits}X}"


class KernelError(Exception):
    """A kernel raised an error."""


class HangError(KernelError):
    """A kernel did not end."""


def _finish(doing: str, seconds: float = 60.0) -> None:
    """Wait for the current stream, not for ever."""
    done = torch.cuda.Event()
    done.record()
    deadline = time.monotonic() + seconds
    while not done.query():
        if time.monotonic() > deadline:
            raise HangError(f"{doing}: did not end within {seconds:.0f} s")
        time.sleep(0)


@contextmanager
def _doing(what: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise KernelError(f"{what}: {type(error).__name__}: {error}") from error


# ---- verifying


def verify(*, thorough: bool = False, device: int = 0, progress: Show = lambda done, what: None) -> Report:
    """Hold every kernel and schedule on a GPU to the CPU reference.

    Kernels that are not in the on-disk cache yet are compiled first, by a process for each CPU: a script that
    calls this needs the usual ``if __name__ == "__main__":``.

    Args:
        thorough: every combination, and large products too.
        device: index of the CUDA device.
        progress: told the fraction done, and what is being done.

    Returns:
        The report. Without a GPU it has the CPU reference's known answers, and why no GPU was verified.
    """
    from samebits.backends.cuda import runtime

    start = time.monotonic()
    status = runtime.status()
    why_not = "" if status.available else f"{status.reason}. {status.remedy}".strip()
    if status.available and device >= len(status.devices):
        why_not = f"there is no device {device}; PyTorch sees {len(status.devices)}"
    versions = {"samebits": __version__, "torch": str(torch.__version__)}
    for name in ("numba", "cuda-core"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    contract = TENSOR_CORE.on(HOPPER)
    report = Report(None, why_not, str(contract), contract.digest(), versions, thorough)
    try:
        progress(0.0, "known answers of the CPU reference")
        known_answers(report)
        if not why_not:
            versions["nvrtc"] = runtime.nvrtc_version()
            with torch.cuda.device(device), torch.no_grad():
                _verify_gpu(report, device, thorough, progress)
    except HangError as error:
        report.failure, report.hung = str(error), True
    except KernelError as error:
        report.failure = str(error)
    report.seconds = round(time.monotonic() - start, 1)
    return report


def _verify_gpu(report: Report, index: int, thorough: bool, progress: Show) -> None:
    from samebits.backends.cuda import ahead, runtime
    from samebits.backends.cuda.matmul import family

    info = runtime.device_info(index)
    device = torch.device("cuda", index)
    contract = TENSOR_CORE.on(family(index))
    report.gpu, report.contract, report.digest = info.name, str(contract), contract.digest()
    offered = kernels(index)
    todo = cases(thorough)
    runs = _runs(todo, offered, thorough)

    def calls() -> Iterator[Callable[[], object]]:
        for case, pairs in zip(todo, runs, strict=True):
            operands = _operands(case, device, _unfilled)
            out, _ = _room(case, operands)
            for kernel, schedule in pairs:
                if kernel.takes(operands, out, schedule):
                    yield partial(kernel.run, operands, out, schedule)

    progress(0.0, "choosing kernels")
    report.kernels = ahead.compile_for(calls(), lambda done, what: progress(0.5 * done, what))
    for i, (case, pairs) in enumerate(zip(todo, runs, strict=True)):
        progress(0.5 + 0.35 * i / len(todo), f"{case.what}: {case}")
        _verify_case(report, case, offered[0], pairs, contract, device)
    parts: list[Callable[[], None]] = [
        partial(_verify_operations, report, contract, device),
        partial(_verify_tokens, report, contract, device, 1024, 768, BF16),
        partial(_verify_tokens, report, contract, device, 264, 1032, F16),
        *(
            partial(_verify_rows, report, contract, device, n, k, dtype, thorough)
            for n, k, dtype in _ROWS_OF[: None if thorough else 2]
        ),
    ]
    for i, part in enumerate(parts):
        progress(0.85 + 0.15 * i / len(parts), "operations" if i == 0 else "batches, streams, graphs")
        with _doing("samebits"):
            part()


_REFERENCE = "CPU reference"
_LARGE = 1 << 29
"""Multiplications from which on the CPU is too slow."""


def _verify_case(
    report: Report,
    case: Case,
    universal: Kernel,
    pairs: Iterable[tuple[Kernel, Any]],
    contract: Contract,
    device: torch.device,
) -> None:
    operands = _operands(case, device)
    against = _REFERENCE
    if case.work <= _LARGE:
        want = _reference(case, operands, contract)
    else:
        against = "matmul_sm80"
        want, _ = _room(case, operands)
        with _doing(f"matmul_sm80, {case}"):
            universal.run(operands, want, None)
            _finish(f"matmul_sm80, {case}")
        rows = sorted({r * (case.m - 1) // 3 for r in range(4)})
        some = dataclasses.replace(case, m=len(rows))
        columns = torch.arange(0, case.n, max(1, case.n * len(rows) * case.k // (_LARGE // 8)), device=device)
        few = dataclasses.replace(some, n=len(columns))
        sampled = _reference(few, Operands(operands.a[rows], operands.b[:, columns]), contract)
        report.compare("matmul_sm80", "large, sampled", _REFERENCE, want[rows][:, columns], sampled, case)
    _, expected = _room(case, operands)
    expected[..., : case.n] = want
    for kernel, schedule in pairs:
        out, room = _room(case, operands)
        if not kernel.takes(operands, out, schedule):
            continue
        doing = f"{kernel.name}, {case.what}, {case}, {schedule}"
        with _doing(doing):
            kernel.run(operands, out, schedule)
            _finish(doing)
        report.compare(kernel.name, case.what, against, room, expected, case, schedule)


def _verify_operations(report: Report, contract: Contract, device: torch.device) -> None:
    """The public operations and their gradients, on the GPU and on the CPU."""

    def both(what: str, run: Callable[..., tuple[Tensor, ...]], *shapes: tuple[int, ...]) -> None:
        for dtype, kind in itertools.product((BF16, F16), ("normal", "wide", "special")):
            inputs = [values(kind, shape, dtype, i) for i, shape in enumerate(shapes)]
            want = run(*inputs, contract=contract)
            got = run(*(t.to(device) for t in inputs), contract=contract)
            _finish(what)
            for g, w in zip(got, want, strict=True):
                report.compare("operations", what, _REFERENCE, g, w.to(device), f"{dtype} {kind} {shapes}")

    def gradients(x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor, **options: Any) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
        with torch.enable_grad():
            y = linear(*leaves, **options)
        return (y.detach(), *torch.autograd.grad(y, leaves, dy))

    def packed(x: Tensor, *others: Tensor, contract: Contract) -> tuple[Tensor, ...]:
        ends = torch.tensor([0, 5, 5, 37, 53, 200], dtype=torch.int32, device=x.device)
        return gradients(x, *others, cu_seqlens=ends, contract=contract)

    def accumulated(a: Tensor, b: Tensor, contract: Contract) -> tuple[Tensor, ...]:
        acc = values("normal", (a.shape[0], b.shape[1]), F32, 9).to(a.device)
        return (addmm_(addmm_(acc, a, b, contract=contract), a, b, contract=contract),)

    for n, k in ((136, 200), (24, 33)):
        both("linear and gradients", gradients, (3, 70, k), (n, k), (n,), (3, 70, n))
        both("linear and gradients, packed", packed, (200, k), (n, k), (n,), (200, n))
        both("addmm_", accumulated, (70, k), (k, n))
        both("bmm", lambda a, b, contract: (bmm(a, b, contract=contract),), (4, 30, k), (1, k, n))
        both("matmul", lambda a, b, contract: (matmul(a, b, contract=contract),), (3, 1, 20, k), (2, k, n))


ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_ROWS_OF = ((1024, 4096, BF16), (256, 7168, BF16), (4096, 4096, BF16), (3072, 768, F16), (4096, 14336, BF16))


def _verify_rows(
    report: Report,
    contract: Contract,
    device: torch.device,
    n: int,
    k: int,
    dtype: torch.dtype,
    thorough: bool,
) -> None:
    """A row's bits in batches of every size, position, company, chunking, stride, stream and graph."""
    where = f"N {n}, K {k}, {dtype}"
    x = values("normal", (ROWS[-1], k), dtype, 1, device)
    weight = values("normal", (n, k), dtype, 2, device)
    full = linear(x, weight)
    spread = torch.arange(0, ROWS[-1], ROWS[-1] // 8, device=device)
    want = _reference(Case("", 8, n, k, dtype=dtype), Operands(x[spread], weight.mT), contract)
    report.compare("samebits.linear", "rows, sampled", _REFERENCE, full[spread], want, where)

    def same(what: str, got: Tensor, rows: Any, counts: bool = True, who: str = "samebits.linear") -> None:
        _finish(f"{who}, {what}, {where}")
        report.compare(who, what, "full batch", got, full[rows], where, counts=counts)

    noise = values("special", (ROWS[-1], k), dtype, 3, device)
    busy, other = torch.cuda.Stream(), torch.cuda.Stream()
    load = values("normal", (4096, 4096), dtype, 4, device)
    for m in ROWS:
        prefix = slice(0, m)
        same("number of rows", linear(x[:m], weight), prefix)
        at = (ROWS[-1] - m) * 5 // 8
        here = slice(at, at + m)
        same("position", linear(x[here], weight), here)

        company = noise[: 2 * m].clone()
        mine = slice(m // 2, m // 2 + m) if len(company) == 2 * m else slice(0, m)
        company[mine] = x[here]
        same("NaN and inf beside it", linear(company, weight)[mine], here)

        padded = torch.cat((x[here], x.new_zeros(max(1, m // 3), k)))
        same("padding", linear(padded, weight)[:m], here)

        chunks = [linear(c, weight) for c in x[: min(ROWS[-1], 64 * m)].split(m)]
        same("chunks", torch.cat(chunks), slice(0, min(ROWS[-1], 64 * m)))

        for place in ("pitched", "odd", "spread"):
            same("strides", linear(_laid(x[here], "N", place), weight), here)
        same("strides", linear(_laid(x[here], "T", "plain"), weight), here)

        torch.cuda.synchronize()
        with torch.cuda.stream(other):
            got = linear(x[here], weight)
            same("another stream", got, here)

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = linear(x[here], weight)
        for _ in range(2):
            got.fill_(math.nan)
            graph.replay()
            same("CUDA graph", got, here)

        with torch.cuda.stream(busy):
            for _ in range(20):
                torch.mm(load, load)
        again = [linear(x[here], weight) for _ in range(4 if thorough else 2)]
        for got in again:
            same("beside other work", got, here)
        torch.cuda.synchronize()

        same("equal bits", torch.mm(x[:m], weight.mT), prefix, counts=False, who="torch.mm (cuBLAS)")


_TOKENS = (700, 0, 1, 333, 16, 1024, 47, 5, 512, 129)
"""Lengths of sequences."""


def _verify_tokens(
    report: Report, contract: Contract, device: torch.device, n: int, k: int, dtype: torch.dtype
) -> None:
    """The bits of dW and db however the same sequences are packed, padded, or cut into micro-batches."""
    where, key = f"N {n}, K {k}, {dtype}", contract.key
    ends = list(itertools.accumulate(_TOKENS, initial=0))
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)
    x = values("normal", (ends[-1], k), dtype, 1, device)
    dy = values("wide", (ends[-1], n), dtype, 2, device)
    weight, bias = values("normal", (n, k), dtype, 3, device), x.new_zeros(n)

    def chain(dy: Tensor, x: Tensor, offsets: Tensor | None = None) -> Tensor:
        out: Tensor = torch.ops.samebits.addbmm(None, dy.mT[None], x[None], offsets, F32, key)
        return out[0]

    def same(what: str, got: Tensor, want: Tensor) -> None:
        _finish(f"{what}, {where}")
        report.compare("gradients of weights", what, "packed sequences", got, want, where)

    want = chain(dy[None], x[None], offsets)
    case = Case("", 8, n, ends[-1], dtype=dtype, out=F32)
    rows = torch.arange(0, n, n // 8, device=device)[:8]
    few = Operands(dy[:, rows].mT.contiguous(), x, cu_seqlens=offsets)
    sampled = _reference(dataclasses.replace(case, m=len(rows), n=k), few, contract)
    report.compare("gradients of weights", "f32, sampled", _REFERENCE, want[rows], sampled, where)

    longest = max(_TOKENS) + 9
    padded_x = values("normal", (len(_TOKENS), longest, k), dtype, 4, device)
    padded_dy = padded_x.new_zeros((len(_TOKENS), longest, n))
    for i, (start, stop) in enumerate(itertools.pairwise(ends)):
        padded_x[i, : stop - start], padded_dy[i, : stop - start] = x[start:stop], dy[start:stop]
    same("f32, padded", chain(padded_dy, padded_x), want)

    grad = torch.zeros((n, k), device=device)
    for start, stop in itertools.pairwise(sorted({*ends, 160, ends[3] + 48, ends[5] + 512})):
        addmm_(grad, dy[start:stop].mT, x[start:stop])
    same("f32, micro-batches", grad, want)

    leaves = [t.detach().requires_grad_() for t in (weight, bias)]
    with torch.enable_grad():
        packed = linear(x, *leaves, cu_seqlens=offsets)
        padded = linear(padded_x, *leaves)
    for name, got, right in zip(
        ("dW", "db"),
        torch.autograd.grad(padded, leaves, padded_dy),
        torch.autograd.grad(packed, leaves, dy),
        strict=True,
    ):
        same(f"{name}, padded", got, right)


# ---- known answers of the CPU reference

_KNOWN_DIGESTS = {
    "AMPERE": "37e69b606fd271b6",
    "FMA": "3bc67e0a9b1b9475",
}


def known_answers(report: Report) -> None:
    """Hold the CPU reference to what an H200 computed, and to digests of its own results."""
    path = importlib.resources.files("samebits") / "data" / "known_answers.npz"
    with path.open("rb") as file:
        recorded = np.load(file)
        answers = {
            key: torch.from_numpy(recorded[key].view(f"i{recorded[key].itemsize}")) for key in recorded
        }
    for case in sorted({key.rpartition("/")[0] for key in answers}):
        dtype = BF16 if case.startswith("bf16") else F16
        a, b = (answers[f"{case}/{side}"].view(dtype) for side in "ab")
        want = answers[f"{case}/out"].view(F32)
        start = answers.get(f"{case}/c0")
        acc = torch.zeros_like(want) if start is None else start.view(F32).clone()
        addmm_(acc, a, b.mT, contract=TENSOR_CORE.on(HOPPER))
        report.compare(_REFERENCE, "known answers", "recorded on an H200", acc, want, case)
    for contract in (TENSOR_CORE.on(AMPERE), FMA):
        name = contract.mma.name if contract.mma else contract.name
        right = _digest(contract) == _KNOWN_DIGESTS[name]
        flag = torch.tensor([float(right)])
        report.compare(_REFERENCE, "known answers", f"recorded digest, {name}", flag, torch.ones(1), name)


def _digest(contract: Contract) -> str:
    """Of a product whose operands come from integer arithmetic, so that no random generator matters."""
    i = torch.arange(24 * 200, dtype=torch.int64)
    x = ((i * 2654435761 % 2**32 >> 20) % 255 - 127).float() / 64
    x *= torch.exp2(-((i * 40503 >> 7) % 12).float())
    a = x.to(BF16)[: 16 * 200].view(16, 200)
    b = x.to(BF16)[-8 * 200 :].view(8, 200)
    out = matmul(a, b.mT, out_dtype=F32, contract=contract)
    return hashlib.sha256(bits(out).numpy().tobytes()).hexdigest()[:16]


# ---- for people


def show(report: Report) -> RenderableType:
    """The report as tables."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("kernel", "what", "held to"):
        table.add_column(name, overflow="fold")
    for name in ("schedules", "products", "values", "differing"):
        table.add_column(name, justify="right", no_wrap=True)
    before = ""
    names = list(dict.fromkeys(line.kernel for line in report.lines))
    for line in sorted(report.lines, key=lambda line: names.index(line.kernel)):
        alarm = "red bold" if line.counts else "yellow"
        table.add_row(
            "" if line.kernel == before else line.kernel,
            line.what,
            line.against,
            str(line.schedules) if line.kernel.startswith("matmul_sm") else "",
            f"{line.products:,}",
            f"{line.compared:,}",
            Text(f"{line.differing:,}", style=alarm if line.differing else "green"),
        )
        before = line.kernel
    parts: list[RenderableType] = ["", table, ""]
    if report.first is not None:
        f = report.first
        parts.append(Text(f"First difference: {f.kernel}, {f.what}, {f.case}", style="red bold"))
        parts.append(
            f"  at {f.at}: got {f.got!r} ({f.got_bits}), expected {f.expected!r} ({f.expected_bits})"
        )
        parts += [f"  {f.schedule}"] if f.schedule else []
    if report.failure:
        parts.append(Text(f"Stopped: {report.failure}", style="red bold"))
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    parts.append(
        Text(f"{report.contract}, digest {report.digest}. {versions}. {report.seconds:.0f} s.", "dim")
    )
    verdict = {
        0: Text(f"{report.gpu}: all {report.compared:,} values have the bits specified", "green bold"),
        1: Text(
            f"{report.differing:,} of {report.compared:,} values differ: bits are NOT as specified"
            if report.differing
            else f"{report.compared:,} values have the bits specified, but it did NOT run to its end",
            "red bold",
        ),
        2: Text("No GPU was verified", "yellow bold").append(
            f": {report.why_not}\nThe CPU reference gives all {report.compared:,} of its known answers.",
            "default not bold",
        ),
    }[report.exit_code]
    return Group(*parts, verdict)
