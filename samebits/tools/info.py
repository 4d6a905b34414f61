"""``samebits info``: this machine, the backends that work on it, and what to do about the others."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from samebits._version import __version__
from samebits.backends import cache, replay
from samebits.backends.arch import OLDEST, arch_of
from samebits.contract import AMPERE, FMA, FP8, HOPPER, TENSOR_CORE
from samebits.tools.terminal import Console
from samebits.tools.text import plural

__all__ = ["Backend", "Gpu", "Info", "gather", "main", "show"]

_PACKAGES = ("numpy", "numba", "cuda-core", "nvidia-cuda-nvrtc", "triton", "transformers")


@dataclass(frozen=True)
class Backend:
    """Whether a backend works here.

    Attributes:
        name: ``reference``, ``cuda`` or ``triton``.
        computes: the devices it computes on.
        works: whether it works.
        why: how that was found, or why it does not work.
        remedy: what to do about that; empty if there is nothing to do.
    """

    name: str
    computes: str
    works: bool
    why: str
    remedy: str


@dataclass(frozen=True)
class Gpu:
    """A GPU that PyTorch sees."""

    name: str
    capability: str
    memory_gib: float
    contracts: tuple[str, ...]
    """The contracts that it can compute."""
    family: str
    """How its tensor cores add: HOPPER or AMPERE; empty if that is not known."""
    proven: dict[str, Any] | None
    """The last recorded `samebits verify` on this model, and its speed; None if there is none."""
    tuned: int
    """Entries of the tables of `samebits tune` in use for it."""


@dataclass(frozen=True)
class Info:
    """Everything that ``samebits info`` shows.

    Attributes:
        samebits: samebits' version.
        python: Python's version.
        packages: version of each package that samebits can use; None if it is not installed.
        cpu: the processor's name.
        cores: CPUs that this process may use.
        threads: CPU threads of PyTorch, and of samebits.
        gpus: GPUs that PyTorch sees.
        contracts: digest of each contract. Equal digests promise equal bits.
        backends: the backends, in the order of the report.
        driver: the NVIDIA driver's version; None if there is none.
        cache: where compiled kernels are kept, or why they are not.
        answer: whether it works here, how fast, and what to install, a line each.
    """

    samebits: str
    python: str
    packages: dict[str, str | None]
    cpu: str
    cores: int
    threads: int
    gpus: tuple[Gpu, ...]
    contracts: dict[str, str]
    backends: tuple[Backend, ...]
    driver: str | None
    cache: str
    answer: tuple[str, ...]


def gather() -> Info:
    """Gather the information. Missing or broken parts are reported, and raise nothing."""
    gpus, backends = _gpus(), (_reference(), _cuda(), _triton())
    return Info(
        samebits=__version__,
        python=platform.python_version(),
        packages={"torch": str(torch.__version__), **{name: _version(name) for name in _PACKAGES}},
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        gpus=gpus,
        contracts={
            "FMA": FMA.digest(),
            "TENSOR_CORE, HOPPER": TENSOR_CORE.on(HOPPER).digest(),
            "TENSOR_CORE, AMPERE": TENSOR_CORE.on(AMPERE).digest(),
            "FP8": FP8.digest(),
        },
        backends=backends,
        driver=_driver(),
        cache=_cached(),
        answer=_answer(gpus, backends),
    )


def main(*, as_json: bool) -> int:
    """Print the information.

    Returns:
        The exit code of the command.
    """
    found = gather()
    if as_json:
        print(json.dumps(dataclasses.asdict(found), indent=2))
    else:
        Console().print(show(found))
    return 0


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _gpus() -> tuple[Gpu, ...]:
    if not torch.cuda.is_available():
        return ()
    found: list[Any] = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return tuple(
        Gpu(
            p.name,
            f"sm_{p.major}{p.minor}",
            round(p.total_memory / 2**30, 1),
            _contracts((p.major, p.minor)),
            _family((p.major, p.minor)),
            _proven().get(p.name),
            _tuned(i),
        )
        for i, p in enumerate(found)
    )


def _family(capability: tuple[int, int]) -> str:
    mma = None if torch.version.hip is not None else arch_of(capability).mma
    return "" if mma is None else mma.name


def _proven() -> dict[str, Any]:
    """What this project has recorded of each model of GPU."""
    recorded: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "proven.json").read_text())
    return recorded


def _tuned(device: int) -> int:
    from samebits.backends.cuda import tuned

    try:
        return tuned.entries(device)
    except Exception:  # it is asked of GPUs that nothing else works on
        return 0


def _driver() -> str | None:
    try:
        said = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"(?<=\s)\d+\.\d+(\.\d+)?(?=\s)", said)
    return found[0] if found else None


def _answer(gpus: tuple[Gpu, ...], backends: tuple[Backend, ...]) -> tuple[str, ...]:
    """Will it work here, how fast, and what is missing?"""
    reference, cuda, triton = backends
    said = [
        "CPU tensors: yes, for proofs and tests. It is the reference, and slow."
        if reference.works
        else f"CPU tensors: no. The reference {reference.why}. → {reference.remedy}"
    ]
    if not gpus:
        return (*said, f"GPU tensors: no, {cuda.why}. → {cuda.remedy}")
    for gpu in gpus:
        by = [b for b in (cuda, triton) if b.works]
        if not by or not gpu.contracts:
            why = f"{cuda.why}. → {cuda.remedy}" if not by else "it is too old for every kernel"
            said.append(f"{gpu.name}: no, {why}")
            continue
        needs = "" if "TENSOR_CORE" in gpu.contracts else " Pass contract=samebits.FMA for 16-bit operands."
        said.append(f"{gpu.name}: yes, by {' and '.join(b.name for b in by)}.{needs}")
        if gpu.proven is None:
            said += [
                "  Proven on this model: no, its kernels are only compiled. → run samebits verify",
                "  Speed on this model: not measured. → run samebits bench --quick",
            ]
            continue
        p = gpu.proven
        older = p["digest"] != TENSOR_CORE.on(HOPPER).digest()
        said.append(
            f"  Proven on this model{', before a change of bits' * older}: {', '.join(p['operations'])}"
            f" ({p['compared']:,} values, {p['date']}, commit {p['commit']}). For your driver and version:"
            " samebits verify"
        )
        times = ", ".join(f"{what} {speed:.2f}" for what, speed in p["speed"].items())
        said.append(f"  Speed on this model, PyTorch = 1: {times}")
        known = plural(gpu.tuned, "tuned shape") if gpu.tuned else "No tuned table"
        said.append(f"  {known}. samebits tune may find faster schedules for your shapes.")
    return tuple(said)


def _contracts(capability: tuple[int, int]) -> tuple[str, ...]:
    if torch.version.hip is not None:  # ROCm numbers its architectures differently
        return ("FMA",)
    arch = arch_of(capability)
    if not arch.at_least(OLDEST):
        return ()
    return ("FMA", *("TENSOR_CORE",) * (arch.mma is not None), *("FP8",) * (arch.fp8 is not None))


def _reference() -> Backend:
    """The CPU reference. Tests FMA and TENSOR_CORE on sums whose result shows their order."""
    try:
        start = time.perf_counter()
        from samebits.ops.matmul import matmul

        # 1 + 2**-24 + 2**-24 is 1 as a chain from the left, and more than 1 in any other order.
        a = torch.tensor([[1.0, 2.0**-24, 2.0**-24]], dtype=torch.float32)
        fma = matmul(a, a.new_ones(3, 1)).item()
        # Next to 1, the fused sum of a Hopper tensor core keeps 2**-25 and cuts off 2**-26.
        b = torch.tensor([[1.0, *[2.0**-25] * 4, *[2.0**-26] * 8]], dtype=torch.bfloat16)
        ones = torch.ones(b.shape[1], 1, dtype=torch.bfloat16)
        mma = matmul(b, ones, out_dtype=torch.float32, contract=TENSOR_CORE.on(HOPPER)).item()
        if (fma, mma) != (1.0, 1.0 + 2.0**-23):
            return Backend("reference", "CPU", False, f"gives wrong bits here ({fma!r}, {mma!r})", _REPORT_IT)
    except Exception as error:  # a broken numba or llvmlite raises all kinds
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return Backend("reference", "CPU", False, why, "pip install --upgrade --force-reinstall numba")
    seconds = time.perf_counter() - start
    why = f"FMA and TENSOR_CORE ran, bits as specified ({seconds:.1f} s), {_cached()}"
    return Backend("reference", "CPU", True, why, "")


_REPORT_IT = "please report it, with this output"


def _cached() -> str:
    try:
        return f"kernels cached in {cache.folder()}"
    except OSError as error:
        return f"kernels not cached ({error})"


def _cuda() -> Backend:
    from samebits.backends.cuda import devices

    status = devices.status()
    why = f"NVRTC {status.nvrtc}, {_cached()}" if status.available else status.reason
    computes, remedy = "NVIDIA GPUs: FMA from sm_75 on, TENSOR_CORE from sm_80 on", status.remedy
    if status.available and not replay.available:
        why += ", calls cost the CPU more than they need to: the extension was not built"
        remedy = "install a C compiler, then samebits again"
    return Backend("cuda", computes, status.available, why, remedy)


def _triton() -> Backend:
    from samebits.backends.triton import runtime

    status = runtime.status()
    why = f"Triton {status.triton}" if status.available else status.reason
    computes = "GPUs that Triton compiles for: FMA; on NVIDIA's from sm_80 on TENSOR_CORE too"
    return Backend("triton", computes, status.available, why, status.remedy)


def show(found: Info) -> RenderableType:
    """The sections for a terminal."""
    parts: list[RenderableType] = [
        Text("Will it work here, and how fast?", style="bold"),
        *(Padding(line, (0, 2)) for line in map(Text, found.answer)),
        Text(),
    ]

    def section(title: str, rows: list[tuple[str, str | Text]]) -> None:
        table = Table(box=None, padding=(0, 2, 0, 2), show_header=False)
        table.add_column(no_wrap=True, style="dim", min_width=19)
        table.add_column(overflow="fold")
        for row in rows:
            table.add_row(*row)
        parts.extend((Text(title, style="bold"), table, Text()))

    versions: list[tuple[str, str | Text]] = [("samebits", found.samebits), ("Python", found.python)]
    versions += [(name, version or "not installed") for name, version in found.packages.items()]
    section("Versions", versions)
    gpus = [
        f"{gpu.name}, {gpu.capability}, {gpu.memory_gib} GiB: {', '.join(gpu.contracts) or 'too old'}"
        + (f", family {gpu.family}" if gpu.family else "")
        + f", {plural(gpu.tuned, 'tuned shape')}"
        for gpu in found.gpus
    ]
    machine = f"{found.cpu}, {plural(found.cores, 'core')}, {plural(found.threads, 'thread')}"
    rows: list[tuple[str, str | Text]] = [
        ("CPU", machine),
        ("GPUs", "\n".join(gpus) or "none that PyTorch can use"),
    ]
    section("Machine", [*rows, ("driver", found.driver or "none"), ("cache", found.cache)])
    section("Contracts (equal digests promise equal bits)", list(found.contracts.items()))
    backends: list[tuple[str, str | Text]] = []
    for backend in found.backends:
        state = (
            Text("works", style="green bold") if backend.works else Text("does not work", style="yellow bold")
        )
        state.append(
            f" on {backend.computes}: " if backend.works else f" ({backend.computes}): ", style="dim"
        )
        state.append(backend.why, style="default not bold")
        if backend.remedy:
            state.append(f"\n→ {backend.remedy}", style="default not bold")
        backends.append((backend.name, state))
    section("Backends", backends)
    return Group(*parts)
