"""One run of ``samebits verify``: the known answers, then all comparisons on a GPU."""

from __future__ import annotations

import importlib.metadata
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.process import BaseProcess

import torch

from samebits._version import __version__
from samebits.backends import use_backend
from samebits.contract import FMA, HOPPER, TENSOR_CORE, Contract
from samebits.tools.verify.answers import known_answers
from samebits.tools.verify.attention import verify_attention
from samebits.tools.verify.case import BF16, CHAIN, F16
from samebits.tools.verify.chain import verify_chain
from samebits.tools.verify.exp2 import verify_exp2
from samebits.tools.verify.failures import HangError, KernelError, running
from samebits.tools.verify.fused import verify_fused
from samebits.tools.verify.grouped import verify_experts, verify_grouped
from samebits.tools.verify.kernel import BACKENDS
from samebits.tools.verify.operations import verify_operations
from samebits.tools.verify.plan import VerifyPlan, launch_part
from samebits.tools.verify.products import verify_case
from samebits.tools.verify.reductions import verify_reductions
from samebits.tools.verify.report import Report
from samebits.tools.verify.rows import ROWS_OF, verify_rows
from samebits.tools.verify.scaled import verify_scaled
from samebits.tools.verify.scaled_grouped import verify_scaled_grouped
from samebits.tools.verify.segments import verify_segments
from samebits.tools.verify.sequences import verify_sequences
from samebits.tools.verify.tokens import verify_tokens

Show = Callable[[float, str], None]


def verify(
    *,
    thorough: bool = False,
    backend: str | None = None,
    device: int = 0,
    progress: Show = lambda done, what: None,
) -> Report:
    """Compare every kernel and schedule on a GPU with the CPU reference.

    Kernels that are not in the on-disk cache yet are compiled first, in a process for each CPU and some more.
    So a script that calls this function needs the usual ``if __name__ == "__main__":``.

    Args:
        thorough: more combinations, and more large products.
        backend: the kernels' backend, ``"cuda"`` or ``"triton"``. The default is CUDA, and with `thorough`
            also Triton if it is installed.
        device: index of the CUDA device.
        progress: receives the fraction done, and the current work.

    Returns:
        The report. Without a GPU it has the CPU reference's known answers, and why no GPU was verified.

    Raises:
        ValueError: there is no such backend.
    """
    from samebits.backends.cuda import compiler, devices
    from samebits.backends.triton import runtime as triton

    if backend not in (None, *BACKENDS):
        raise ValueError(
            f"samebits.tools.verify.verify: backend: expected one of {BACKENDS} or None, got {backend!r}"
        )
    start = time.monotonic()
    status, second = devices.status(), triton.status()
    backends = [backend or "cuda"]
    if thorough and backend is None and second.available:
        backends.append("triton")
    why_not = " → ".join(filter(None, (status.reason, status.remedy)))
    if backend == "triton" and not (why_not or second.available):
        why_not = f"{second.reason} → {second.remedy}"
    if status.available and device >= len(status.devices):
        why_not = f"there is no device {device}; PyTorch sees {len(status.devices)}"
    versions = {"samebits": __version__, "torch": str(torch.__version__)}
    for name in ("numba", "cuda-core", "triton"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    contract = TENSOR_CORE.on(HOPPER)
    report = Report(None, why_not, str(contract), contract.digest(), versions, thorough, backends)
    try:
        if why_not:
            _verify_cpu(report, progress)
        else:
            versions["nvrtc"] = compiler.nvrtc_version()
            with torch.cuda.device(device), torch.no_grad():
                _verify_gpu(report, device, thorough, backends, progress)
    except HangError as error:
        report.failure, report.hung = str(error), True
    except KernelError as error:
        report.failure = str(error)
    report.seconds = round(time.monotonic() - start, 1)
    return report


def _verify_cpu(report: Report, progress: Show) -> None:
    progress(0.0, "known answers of the CPU reference")
    known_answers(report)


def _verify_gpu(report: Report, index: int, thorough: bool, backends: Sequence[str], progress: Show) -> None:
    from samebits.backends.cuda import devices, precompile
    from samebits.backends.cuda.matmul import family

    info = devices.device_info(index)
    contract = TENSOR_CORE.on(family(index))
    report.gpu, report.contract, report.digest = info.name, str(contract), contract.digest()
    torch.cuda.mem_get_info(index)  # claims the GPU if only one process may use it
    with _filling_caches(index, thorough, backends) as wait:
        _verify_cpu(report, progress)
        progress(0.0, "choosing kernels")
        plan = VerifyPlan(index, thorough, backends)
        compiled = precompile.compile_for(plan.cuda(), lambda done, what: progress(0.4 * done, what))
        report.kernels = compiled.needed
        if compiled.missing or "triton" in backends:
            progress(0.4, "compiling more kernels")
            wait(300)
    for i, (case, pairs) in enumerate(plan.products):
        progress(0.5 + 0.35 * i / len(plan.products), f"{case.what}: {case}")
        universal = next(kernel for kernel in plan.offered if kernel.step == case.step)
        if case.what == CHAIN:
            verify_chain(report, case, universal, pairs, plan.device)
        else:
            follows = FMA if case.step == "fma" else contract
            verify_case(report, case, universal, pairs, follows, plan.device)
    reduce = partial(verify_reductions, report, plan.reduced, plan.reducers, contract, plan.device)
    parts: list[_Part] = [
        ("reductions and log-probabilities", None, reduce),
        *_attention(report, plan, thorough),
        *_grouped(report, plan),
        *_public_functions(report, contract, plan.device, thorough, backends),
    ]
    for i, (what, backend, part) in enumerate(parts):
        progress(0.85 + 0.15 * i / len(parts), f"{what}, {backend}" if backend else what)
        with running("samebits"), use_backend(backend):
            part()


@contextmanager
def _filling_caches(index: int, thorough: bool, backends: Sequence[str]) -> Iterator[Callable[[float], None]]:
    """Fill the on-disk caches in other processes, with kernels that :mod:`precompile` cannot know.

    Some processes launch Triton's kernels, because most of Triton's compiler runs in one thread. One process
    for each backend runs the public functions. Yields a function that waits for the processes, at most for a
    number of seconds.
    """
    parts = min(8, os.cpu_count() or 1) if "triton" in backends else 0
    tasks = [partial(launch_part, index, thorough, part, parts) for part in range(parts)]
    tasks += [partial(_run_public_functions, index, thorough, backend) for backend in backends]
    with _in_processes([partial(_quietly, index, task) for task in tasks]) as wait:
        yield wait


@contextmanager
def _in_processes(tasks: Iterable[Callable[[], None]]) -> Iterator[Callable[[float], None]]:
    """Run each task in a process. Processes that still run at the end of this context are killed."""
    from samebits.backends.cuda import precompile

    started: list[BaseProcess] = []

    def wait(seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for process in started:
            process.join(max(0, deadline - time.monotonic()))

    try:
        for task in tasks:
            arguments = dict(os.environ), task
            process: BaseProcess = precompile.processes().Process(
                target=_in_environment, args=arguments, daemon=True
            )
            process.start()
            started.append(process)
        yield wait
    finally:
        for process in started:
            process.kill()
        wait(5)


def _in_environment(environment: dict[str, str], task: Callable[[], None]) -> None:
    from samebits.backends.cuda import precompile

    precompile.adopt(environment)
    task()


def _quietly(index: int, task: Callable[[], None]) -> None:
    # Verification reports the same errors, unless only this process was not allowed on the GPU.
    with suppress(Exception), torch.cuda.device(index), torch.no_grad():
        task()


def _run_public_functions(index: int, thorough: bool, name: str) -> None:
    from samebits.backends.cuda.matmul import family

    report = Report(None, "", "", "", {}, thorough)
    contract, device = TENSOR_CORE.on(family(index)), torch.device("cuda", index)
    for _, backend, part in _public_functions(report, contract, device, thorough, [name]):
        with use_backend(backend):
            part()


_Part = tuple[str, str | None, Callable[[], None]]


def _attention(report: Report, plan: VerifyPlan, thorough: bool) -> Iterator[_Part]:
    """Verification of attention's kernels, which are CUDA's."""
    if not plan.attended:
        return
    from samebits.backends.cuda import exp2
    from samebits.backends.cuda.attention import catalogue

    yield "exp2", None, partial(verify_exp2, report, plan.contract, plan.device, exp2.exp2)
    on = plan.contract, plan.device, thorough
    yield "attention", None, partial(verify_attention, report, plan.attended, catalogue, *on)


def _grouped(report: Report, plan: VerifyPlan) -> Iterator[_Part]:
    """Verification of grouped products, sums in segments, fused layers and FP8, which are CUDA's."""
    if plan.grouped:
        on = plan.contract, plan.device, plan.thorough
        yield "grouped products", None, partial(verify_grouped, report, plan.grouped, *on)
        yield "sums in segments", None, partial(verify_segments, report, plan.segmented, *on)
    if plan.fused:
        yield "fused layers", None, partial(verify_fused, report, plan.fused, plan.device)
    if plan.scaled:
        yield "products in FP8", None, partial(verify_scaled, report, plan.scaled, plan.device)
        of_groups = partial(verify_scaled_grouped, report, plan.scaled_grouped, plan.device)
        yield "grouped products in FP8", None, of_groups


def _public_functions(
    report: Report, contract: Contract, device: torch.device, thorough: bool, backends: Sequence[str]
) -> Iterator[_Part]:
    """Verification of the public functions, by Triton or without a chosen backend for the CUDA kernels."""
    if "cuda" in backends:
        yield "attention of sequences", None, partial(verify_sequences, report, device, thorough)
        yield "experts", None, partial(verify_experts, report, device)
    for name in backends:
        backend = None if name == "cuda" else name
        yield "operations", backend, partial(verify_operations, report, contract, device)
        for n, k, dtype in ((1024, 768, BF16), (264, 1032, F16)):
            yield "sequences", backend, partial(verify_tokens, report, contract, device, n, k, dtype)
        for n, k, dtype in ROWS_OF[: (None if thorough else 2) if backend is None else 1]:
            part = partial(verify_rows, report, contract, device, n, k, dtype, thorough)
            yield "batches, streams, graphs", backend, part
