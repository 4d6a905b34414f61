"""Compiles what a run on a Hopper GPU will need, on a machine without one: time on a GPU is short.

SAMEBITS_CACHE_DIR=DIR python -m benchmarks ahead [verify] [held_out]

It fills the on-disk cache with the CUDA kernels of ``samebits verify`` and of ``benchmarks.held_out``, with a
process for each CPU: some 10,000, in about 25 minutes on two. Carry DIR to the GPU's machine, whose NVRTC
must have the same version. A change of a kernel's sources makes them void.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import torch
from rich.console import Console

from benchmarks import held_out
from benchmarks.record import lines_of_progress
from samebits.backends.cuda import compiler, devices, precompile, runtime
from samebits.tools.tune.families import contest
from samebits.tools.verify.plan import VerifyPlan
from tests.support import fake_gpu

GPUS = (
    replace(fake_gpu.INFO, memory_rate=4.92e6),
    replace(fake_gpu.INFO, name="NVIDIA H100 80GB HBM3", l2_bytes=50 << 20, memory_rate=3.35e6),
)
"""Schedules depend on how fast memory is."""
Calls = Iterable[Callable[[], object]]


def verified() -> Calls:
    """Calls that load what ``samebits verify`` runs."""
    plan = VerifyPlan(0, False, ["cuda"])
    plan.device = torch.device("cpu")
    return plan.cuda()


def timed() -> Iterator[Callable[[], object]]:
    """Calls that load what ``benchmarks.held_out`` times."""
    for _, shape in held_out.products(held_out.drawn()):
        of = contest(shape, 0, alone=True)
        assert of is not None
        yield from (way.plan for way in of.ways)


RUNS: dict[str, Callable[[], Calls]] = {"verify": verified, "held_out": timed}


def needed(gpu: devices.DeviceInfo, run: Callable[[], Calls]) -> dict[compiler.KernelSpec, None]:
    """All kernels that `run` loads on this GPU. Its calls run to their end, without a launch."""
    found: dict[compiler.KernelSpec, None] = {}
    allocate = SimpleNamespace(_empty_strided_cuda=lambda *of: torch.empty_strided(*of[:2], dtype=of[2]))
    with fake_gpu.fake_gpu() as fake:

        def load(spec: compiler.KernelSpec, device: int) -> runtime.Kernel:
            runtime.announce([spec], device)
            return fake.load(spec, device)

        with (
            mock.patch.object(devices, "device_info", return_value=gpu),
            mock.patch.object(runtime, "load", load),
            mock.patch.object(runtime, "_allocate", allocate),
            runtime.before_loading(lambda specs, device: found.update(dict.fromkeys(specs))),
            torch.no_grad(),
        ):
            for call in run():
                call()
                fake.start()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", help=f"all, or some of: {', '.join(RUNS)}")
    options = parser.parse_args()
    if unknown := sorted(set(options.runs) - RUNS.keys()):
        parser.error(f"expected some of {', '.join(RUNS)}; got {', '.join(unknown)}")
    console = Console()
    for name in options.runs or RUNS:
        for gpu in GPUS:
            kernels = [(spec, gpu.arch.target) for spec in needed(gpu, RUNS[name])]
            found = precompile.compile_all(kernels, lines_of_progress(console))
            console.print(f"{name}, {gpu.name}: {found.needed} kernels, {found.missing} of them compiled now")
