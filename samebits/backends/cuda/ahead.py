"""Compile many kernels at once, before the calls that will load them."""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing.context import ForkServerContext

from samebits.backends.cuda import runtime

__all__ = ["compile_for", "processes"]


@functools.cache
def processes() -> ForkServerContext:
    """How to start processes: as forks of one that only imported PyTorch. CUDA does not survive a fork."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([runtime.__name__])
    return context


class _Needed(BaseException):
    """Carries a kernel's spec out of the call that was about to load it; no plan is kept of such a call."""


def _tell(spec: runtime.KernelSpec, device: int) -> None:
    raise _Needed(spec, device)


def compile_for(
    calls: Iterable[Callable[[], object]], progress: Callable[[float, str], None] = lambda done, what: None
) -> int:
    """Compile, into the on-disk cache and with a process for each CPU, what `calls` will load.

    A call is stopped where it would load its first kernel that is not loaded yet, before any launch of it.

    Returns:
        How many kernels that were.
    """
    needed: dict[tuple[runtime.KernelSpec, str], None] = {}
    with runtime.before_loading(_tell):
        for call in calls:
            try:
                call()
            except _Needed as need:
                spec, device = need.args
                needed[spec, runtime.device_info(device).arch] = None
    if runtime.status().cache == "none" or len(needed) < 2:
        return len(needed)
    # NVRTC compiles one program at a time in a process.
    workers = min(len(needed), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, processes()) as pool:
        jobs = [pool.submit(runtime.cached_cubin, spec, arch) for spec, arch in needed]
        for done, job in enumerate(as_completed(jobs)):
            job.result()
            progress((done + 1) / len(jobs), f"compiling {len(jobs)} kernels")
    return len(needed)
