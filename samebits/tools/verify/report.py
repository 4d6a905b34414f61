"""The report of ``samebits verify``, as JSON and for the terminal."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor

from samebits.testing import bits, pattern
from samebits.tools.verify.failures import KernelError


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
    """One line of the report: a comparison, and how many values differed."""

    kernel: str
    what: str
    against: str
    schedules: int = 0
    results: int = 0
    compared: int = 0
    differing: int = 0
    counts: bool = True
    """Whether a difference is a failure. Differences of cuBLAS are only reported."""


@dataclass
class Report:
    """The results of ``samebits verify``.

    Attributes:
        gpu: the GPU's name; None if none was verified.
        why_not: why no GPU was verified; empty if one was.
        contract: the contract that the GPU's bits were compared with, and its digest.
        versions: versions of samebits, torch, the driver and NVRTC.
        thorough: whether all cases ran.
        backends: the verified backends: ``cuda``, ``triton``.
        only: the parts that ran; empty if all did.
        kernels: how many kernels were compiled, or taken from the cache.
        lines: the comparisons.
        first: the first place where bits differ.
        failure: a kernel that raised an error or did not end. Nothing ran after it.
        seconds: time taken.
    """

    gpu: str | None
    why_not: str
    contract: str
    digest: str
    versions: dict[str, str]
    thorough: bool
    backends: Sequence[str] = ()
    only: Sequence[str] = ()
    kernels: int = 0
    lines: list[Line] = dataclasses.field(default_factory=list)
    first: Mismatch | None = None
    failure: str = ""
    hung: bool = False
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self._schedules: dict[tuple[str, str, str], set[str]] = {}

    @property
    def compared(self) -> int:
        return sum(line.compared for line in self.lines if line.counts)

    @property
    def differing(self) -> int:
        return sum(line.differing for line in self.lines if line.counts)

    @property
    def exit_code(self) -> int:
        """0: every bit is as specified. 1: some are not. 2: no GPU was verified."""
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

    def _count(self, line: Line, schedules: set[str]) -> None:
        every = self._schedules.setdefault((line.kernel, line.what, line.against), set())
        every |= schedules
        line.schedules = len(every - {repr("")})

    def empty(self) -> Report:
        """Another of the same, for a part of the comparisons."""
        return dataclasses.replace(self, lines=[], first=None)

    def add(self, part: Report) -> None:
        """Take over the comparisons of a part."""
        for of in part.lines:
            line = self.line(of.kernel, of.what, of.against, of.counts)
            self._count(line, part._schedules[of.kernel, of.what, of.against])
            line.results += of.results
            line.compared += of.compared
            line.differing += of.differing
        self.first = self.first or part.first

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
        """Compare the bits of `got` with those of `want`, on the same device."""
        line = self.line(kernel, what, against, counts)
        self._count(line, {repr(schedule)})
        line.results += 1
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
            sides = [(float(x[at].item()), pattern(x[at])) for x in (got, want)]
            self.first = Mismatch(kernel, what, str(case), str(schedule), at, *sides[0], *sides[1])


def show(report: Report) -> RenderableType:
    """The report as tables."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("kernel", "what", "held to"):
        table.add_column(name, overflow="fold")
    for name in ("schedules", "results", "values", "differing"):
        table.add_column(name, justify="right", no_wrap=True)
    before = ""
    names = list(dict.fromkeys(line.kernel for line in report.lines))
    for line in sorted(report.lines, key=lambda line: names.index(line.kernel)):
        alarm = "red bold" if line.counts else "yellow"
        table.add_row(
            "" if line.kernel == before else line.kernel,
            line.what,
            line.against,
            str(line.schedules or ""),
            f"{line.results:,}",
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
    of = f", {', '.join(report.only)} alone" if report.only else ""
    verdict = {
        0: Text(
            f"{report.gpu}, {' and '.join(report.backends)}{of}: "
            f"all {report.compared:,} values have the bits specified",
            "green bold",
        ),
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
