"""One run: the known answers, then all that a GPU is held to."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from samebits._version import __version__
from samebits.backends import use_backend
from samebits.contract import FMA, HOPPER, TENSOR_CORE, Contract
from samebits.verify.answers import known_answers
from samebits.verify.case import BF16, CHAIN, F16
from samebits.verify.chain import verify_chain
from samebits.verify.failures import HangError, KernelError, running
from samebits.verify.operations import verify_operations
from samebits.verify.plan import Plan, compiling_by_triton
from samebits.verify.products import verify_case
from samebits.verify.reductions import verify_reductions
from samebits.verify.report import Report
from samebits.verify.rows import ROWS_OF, verify_rows
from samebits.verify.tokens import verify_tokens

Show = Callable[[float, str], None]


def verify(*, thorough: bool = False, device: int = 0, progress: Show = lambda done, what: None) -> Report:
    """Hold every kernel and schedule on a GPU to the CPU reference.

    Kernels that are not in the on-disk cache yet are compiled first, by a process for each CPU: a script that
    calls this needs the usual ``if __name__ == "__main__":``.

    Args:
        thorough: more combinations, and more large products.
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
    for name in ("numba", "cuda-core", "triton"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    contract = TENSOR_CORE.on(HOPPER)
    report = Report(None, why_not, str(contract), contract.digest(), versions, thorough)
    try:
        if why_not:
            _verify_cpu(report, progress)
        else:
            versions["nvrtc"] = runtime.nvrtc_version()
            with torch.cuda.device(device), torch.no_grad():
                _verify_gpu(report, device, thorough, progress)
    except HangError as error:
        report.failure, report.hung = str(error), True
    except KernelError as error:
        report.failure = str(error)
    report.seconds = round(time.monotonic() - start, 1)
    return report


def _verify_cpu(report: Report, progress: Show) -> None:
    progress(0.0, "known answers of the CPU reference")
    known_answers(report)


def _verify_gpu(report: Report, index: int, thorough: bool, progress: Show) -> None:
    from samebits.backends.cuda import ahead, runtime
    from samebits.backends.cuda.matmul import family
    from samebits.backends.triton import runtime as triton

    info = runtime.device_info(index)
    device = torch.device("cuda", index)
    contract = TENSOR_CORE.on(family(index))
    report.gpu, report.contract, report.digest = info.name, str(contract), contract.digest()
    with compiling_by_triton(index, thorough):
        _verify_cpu(report, progress)
        plan = Plan(index, thorough)
        report.kernels = ahead.compile_for(plan.cuda(), lambda done, what: progress(0.4 * done, what))
        progress(0.4, "compiling Triton's kernels")
    for i, (case, pairs) in enumerate(plan.products):
        progress(0.5 + 0.35 * i / len(plan.products), f"{case.what}: {case}")
        universal = next(kernel for kernel in plan.offered if kernel.step == case.step)
        if case.what == CHAIN:
            verify_chain(report, case, universal, pairs, device)
        else:
            follows = FMA if case.step == "fma" else contract
            verify_case(report, case, universal, pairs, follows, device)
    reduce = partial(verify_reductions, report, plan.reduced, plan.reducers, contract, device)
    parts: list[_Part] = [
        ("reductions and log-probabilities", None, reduce),
        *_public(report, contract, device, thorough, None),
        *(_public(report, contract, device, thorough, "triton") if triton.status().available else ()),
    ]
    for i, (what, backend, part) in enumerate(parts):
        progress(0.85 + 0.15 * i / len(parts), f"{what}, {backend}" if backend else what)
        with running("samebits"), use_backend(backend):
            part()


_Part = tuple[str, str | None, Callable[[], None]]


def _public(
    report: Report, contract: Contract, device: torch.device, thorough: bool, backend: str | None
) -> Iterator[_Part]:
    """Of the public functions, computed by `backend`, or, with None, as if nobody had chosen."""
    yield "operations", backend, partial(verify_operations, report, contract, device)
    for n, k, dtype in ((1024, 768, BF16), (264, 1032, F16)):
        yield "sequences", backend, partial(verify_tokens, report, contract, device, n, k, dtype)
    for n, k, dtype in ROWS_OF[: (None if thorough else 2) if backend is None else 1]:
        part = partial(verify_rows, report, contract, device, n, k, dtype, thorough)
        yield "batches, streams, graphs", backend, part
