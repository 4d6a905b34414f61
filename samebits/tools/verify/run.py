"""One run of ``samebits verify``: the known answers, then all comparisons on a GPU."""

from __future__ import annotations

import importlib.metadata
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from queue import Empty
from typing import Any, TypeVar

import torch

from samebits._version import __version__
from samebits.backends import use_backend
from samebits.contract import FMA, HOPPER, TENSOR_CORE, Contract
from samebits.tools.verify.answers import known_answers
from samebits.tools.verify.attention import verify_attention
from samebits.tools.verify.case import BF16, CHAIN, F16, ProductCase
from samebits.tools.verify.chain import verify_chain
from samebits.tools.verify.exp2 import verify_exp2
from samebits.tools.verify.failures import HangError, KernelError, running
from samebits.tools.verify.fused import verify_fused
from samebits.tools.verify.grouped import verify_experts, verify_grouped
from samebits.tools.verify.kernel import BACKENDS
from samebits.tools.verify.operations import verify_operations
from samebits.tools.verify.plan import PARTS, Runs, VerifyPlan, launch_part
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
_T = TypeVar("_T")


def verify(
    *,
    thorough: bool = False,
    backend: str | None = None,
    only: Sequence[str] = (),
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
        only: the parts that are verified, of :data:`samebits.tools.verify.plan.PARTS`. The default is all.
        device: index of the CUDA device.
        progress: receives the fraction done, and the current work.

    Returns:
        The report. Without a GPU it has the CPU reference's known answers, and why no GPU was verified.

    Raises:
        ValueError: there is no such backend, or no such part.
    """
    from samebits.backends.cuda import compiler, devices
    from samebits.backends.triton import runtime as triton

    if backend not in (None, *BACKENDS):
        raise ValueError(
            f"samebits.tools.verify.verify: backend: expected one of {BACKENDS} or None, got {backend!r}"
        )
    if unknown := set(only) - PARTS.keys():
        raise ValueError(
            f"samebits.tools.verify.verify: only: expected some of {', '.join(PARTS)}, got {min(unknown)!r}"
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
    report = Report(None, why_not, str(contract), contract.digest(), versions, thorough, backends, only)
    try:
        if why_not:
            _verify_cpu(report, progress)
        else:
            versions["nvrtc"] = compiler.nvrtc_version()
            with torch.cuda.device(device), torch.no_grad():
                _verify_gpu(report, device, progress)
    except HangError as error:
        report.failure, report.hung = str(error), True
    except KernelError as error:
        report.failure = str(error)
    report.seconds = round(time.monotonic() - start, 1)
    return report


def _verify_cpu(report: Report, progress: Show) -> None:
    progress(0.0, "known answers of the CPU reference")
    known_answers(report)


def _verify_gpu(report: Report, index: int, progress: Show) -> None:
    from samebits.backends.cuda import devices, precompile
    from samebits.backends.cuda.matmul import family

    info = devices.device_info(index)
    contract = TENSOR_CORE.on(family(index))
    report.gpu, report.contract, report.digest = info.name, str(contract), contract.digest()
    torch.cuda.mem_get_info(index)  # claims the GPU if only one process may use it
    with _filling_caches(index, report) as wait:
        _verify_cpu(report, progress)
        progress(0.0, "choosing kernels")
        plan = VerifyPlan(index, report.thorough, report.backends, report.only)
        compiled = precompile.compile_for(plan.cuda(), lambda done, what: progress(0.4 * done, what))
        report.kernels = compiled.needed
        if compiled.missing or "triton" in report.backends:
            progress(0.4, "compiling more kernels")
            wait(300)
    parts = _parts(plan, contract, report)
    workers = _workers(index)
    done = _here(parts, report) if workers == 1 else _by_processes(workers, report, index, len(parts))
    found: dict[int, Report] = {}
    for i, of_part in done:
        what, backend, _ = parts[i]
        progress(0.5 + 0.5 * len(found) / len(parts), f"{what}, {backend}" if backend else what)
        found[i] = of_part
    for i in sorted(found):
        report.add(found[i])


_Part = tuple[str, str | None, Callable[[Report], None]]


def _workers(index: int) -> int:
    """How many processes verify. The CPU reference takes most of the time, in one or two threads."""
    from cuda.core import Device  # type: ignore[import-untyped]

    shared = Device(index).properties.compute_mode == 0
    return max(1, min(8, (os.cpu_count() or 1) // 2)) if shared else 1


def _here(parts: Sequence[_Part], report: Report) -> Iterator[tuple[int, Report]]:
    for i, part in enumerate(parts):
        yield i, _verify_part(part, report)


def _verify_part(part: _Part, report: Report) -> Report:
    _, backend, run = part
    of_part = report.empty()
    with running("samebits"), use_backend(backend):
        run(of_part)
    return of_part


def _by_processes(workers: int, report: Report, index: int, parts: int) -> Iterator[tuple[int, Report]]:
    """The reports of all parts as they are done, in any order."""
    from samebits.backends.cuda import precompile

    context = precompile.processes()
    todo: Queue[int | None] = context.Queue()
    done: Queue[tuple[int, Report | KernelError]] = context.Queue()
    for i in (*range(parts), *[None] * workers):
        todo.put(i)
    work = partial(_work, report.empty(), index, max(1, (os.cpu_count() or 1) // workers), todo, done)
    with _in_processes([work] * workers) as started:
        for _ in range(parts):
            i, result = _next(done, started)
            if isinstance(result, KernelError):
                raise result
            yield i, result


def _next(
    done: Queue[tuple[int, Report | KernelError]], started: Sequence[BaseProcess]
) -> tuple[int, Report | KernelError]:
    while True:
        with suppress(Empty):
            return done.get(timeout=5)
        for process in started:
            if process.exitcode:
                raise KernelError(f"a process that verified ended with exit code {process.exitcode}")


def _work(
    report: Report,
    index: int,
    threads: int,
    todo: Queue[int | None],
    done: Queue[tuple[int, Report | KernelError]],
) -> None:
    """Verify parts until there are none."""
    from samebits.backends.cuda.matmul import family

    torch.set_num_threads(threads)
    contract = TENSOR_CORE.on(family(index))
    with torch.cuda.device(index), torch.no_grad():
        plan = VerifyPlan(index, report.thorough, report.backends, report.only)
        parts = _parts(plan, contract, report)
        while (i := todo.get()) is not None:
            try:
                done.put((i, _verify_part(parts[i], report)))
            except KernelError as error:
                done.put((i, error))


def _parts(plan: VerifyPlan, contract: Contract, report: Report) -> list[_Part]:
    """What is verified, always in the same order: long parts are first."""
    return [
        *_grouped(plan),
        *_attention(plan, report.thorough),
        *(
            _public_functions(contract, plan.device, report.thorough, report.backends)
            if plan.functions
            else ()
        ),
        *(
            (
                "reductions and log-probabilities",
                None,
                _of(verify_reductions, cases, plan.reducers, contract, plan.device),
            )
            for cases in _slices(plan.reduced)
        ),
        *(
            (f"{cases[0][0].what}: {cases[0][0]}", None, _of(_verify_products, plan, contract, cases))
            for cases in _slices(plan.products, 100)
        ),
    ]


def _of(verify_it: Callable[..., None], *operands: Any) -> Callable[[Report], None]:
    return lambda report: verify_it(report, *operands)


def _slices(cases: Sequence[_T], n: int = 16) -> list[Sequence[_T]]:
    """Up to `n` parts of like work."""
    return [cases[i::n] for i in range(min(n, len(cases)))]


def _verify_products(
    report: Report, plan: VerifyPlan, contract: Contract, some: Sequence[tuple[ProductCase, Runs]]
) -> None:
    for case, pairs in some:
        universal = next(kernel for kernel in plan.offered if kernel.step == case.step)
        if case.what == CHAIN:
            verify_chain(report, case, universal, pairs, plan.device)
        else:
            follows = FMA if case.step == "fma" else contract
            verify_case(report, case, universal, pairs, follows, plan.device)


@contextmanager
def _filling_caches(index: int, report: Report) -> Iterator[Callable[[float], None]]:
    """Fill the on-disk caches in other processes, with kernels that :mod:`precompile` cannot know.

    Some processes launch Triton's kernels, because most of Triton's compiler runs in one thread. One process
    for each backend runs the public functions. Yields a function that waits for the processes, at most for a
    number of seconds.
    """
    parts = min(8, os.cpu_count() or 1) if "triton" in report.backends else 0
    tasks = [partial(launch_part, index, report.thorough, part, parts) for part in range(parts)]
    if not report.only or "functions" in report.only:
        tasks += [partial(_run_public_functions, index, report.thorough, name) for name in report.backends]
    with _in_processes([partial(_quietly, index, task) for task in tasks]) as started:
        yield partial(_wait, started)


@contextmanager
def _in_processes(tasks: Iterable[Callable[[], None]]) -> Iterator[Sequence[BaseProcess]]:
    """Run each task in a process. Processes that still run at the end of this context are killed."""
    from samebits.backends.cuda import precompile

    started: list[BaseProcess] = []
    try:
        for task in tasks:
            arguments = dict(os.environ), task
            process: BaseProcess = precompile.processes().Process(
                target=_in_environment, args=arguments, daemon=True
            )
            process.start()
            started.append(process)
        yield started
    finally:
        for process in started:
            process.kill()
        _wait(started, 5)


def _wait(started: Sequence[BaseProcess], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for process in started:
        process.join(max(0, deadline - time.monotonic()))


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
    for _, backend, part in _public_functions(contract, device, thorough, [name]):
        with use_backend(backend):
            part(report)


def _attention(plan: VerifyPlan, thorough: bool) -> Iterator[_Part]:
    """Verification of attention's kernels, which are CUDA's."""
    if not plan.attended:
        return
    from samebits.backends.cuda import exp2
    from samebits.backends.cuda.attention import catalogue

    yield "exp2", None, _of(verify_exp2, plan.contract, plan.device, exp2.exp2)
    for cases in _slices(plan.attended):
        yield "attention", None, _of(verify_attention, cases, catalogue, plan.contract, plan.device, thorough)


def _grouped(plan: VerifyPlan) -> Iterator[_Part]:
    """Verification of grouped products, sums in segments, fused layers and FP8, which are CUDA's."""
    if plan.grouped:
        on = plan.contract, plan.device, plan.thorough
        yield "grouped products", None, _of(verify_grouped, plan.grouped, *on)
        yield "sums in segments", None, _of(verify_segments, plan.segmented, *on)
    for layers in _slices(plan.fused):
        yield "fused layers", None, _of(verify_fused, layers, plan.device)
    if plan.scaled:
        yield "products in FP8", None, _of(verify_scaled, plan.scaled, plan.device)
        yield "grouped products in FP8", None, _of(verify_scaled_grouped, plan.scaled_grouped, plan.device)


def _public_functions(
    contract: Contract, device: torch.device, thorough: bool, backends: Sequence[str]
) -> Iterator[_Part]:
    """Verification of the public functions, by Triton or without a chosen backend for the CUDA kernels."""
    if "cuda" in backends:
        yield "attention of sequences", None, _of(verify_sequences, device, thorough)
        yield "experts", None, _of(verify_experts, device)
    for name in backends:
        backend = None if name == "cuda" else name
        yield "operations", backend, _of(verify_operations, contract, device)
        for n, k, dtype in ((1024, 768, BF16), (264, 1032, F16)):
            yield "sequences", backend, _of(verify_tokens, contract, device, n, k, dtype)
        for n, k, dtype in ROWS_OF[: (None if thorough else 2) if backend is None else 1]:
            part = _of(verify_rows, contract, device, n, k, dtype, thorough)
            yield "batches, streams, graphs", backend, part
