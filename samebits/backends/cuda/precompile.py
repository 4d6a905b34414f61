"""Parallel compilation of kernels before the calls that load them."""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing.context import ForkServerContext
from typing import NamedTuple

from samebits.backends import cache
from samebits.backends.cuda import compiler, devices, runtime

__all__ = ["Ahead", "Compiled", "adopt", "compile_all", "compile_for", "processes"]


class Compiled(NamedTuple):
    """How many kernels were needed, and how many of them were not in the on-disk cache."""

    needed: int
    missing: int


@functools.cache
def processes() -> ForkServerContext:
    """A context whose processes are forks of one that only imported PyTorch. CUDA does not survive a fork.

    The processes have the environment of the time when the first one started: see :func:`adopt`.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([runtime.__name__])
    return context


def adopt(environment: dict[str, str]) -> None:
    """Give this process the environment of another."""
    os.environ.clear()
    os.environ.update(environment)


class _Needed(BaseException):
    """Raised in a call that is about to load kernels, with their specs. No plan of the call is kept."""


def _tell(specs: Sequence[compiler.KernelSpec], device: int) -> None:
    raise _Needed(specs, device)


def compile_for(
    calls: Iterable[Callable[[], object]],
    progress: Callable[[float, str], None] = lambda done, what: None,
    *,
    load: bool = False,
) -> Compiled:
    """Compile the kernels that `calls` will load into the on-disk cache, with a process for each CPU.

    A call is stopped before it loads its first kernel that is not loaded yet, so it launches nothing with it.
    Without a cache, nothing is compiled. With `load` they are loaded, too.
    """
    needed = _needed(calls)
    compiled = compile_all(needed, progress)
    if load:
        for (spec, _), device in needed.items():
            runtime.load(spec, device)
    return compiled


def compile_all(
    kernels: Collection[tuple[compiler.KernelSpec, str]], progress: Callable[[float, str], None]
) -> Compiled:
    """Compile kernels, each for an architecture, into the on-disk cache, with a process for each CPU.

    Without a cache, nothing is compiled; nor is a single kernel.
    """
    missing = 0
    if len(kernels) > 1 and _cached():
        # NVRTC compiles one program at a time in a process.
        workers = min(len(kernels), os.cpu_count() or 1)
        with ProcessPoolExecutor(workers, processes(), adopt, (dict(os.environ),)) as pool:
            jobs = [pool.submit(_compile, spec, arch) for spec, arch in kernels]
            for done, job in enumerate(as_completed(jobs)):
                missing += job.result()
                progress((done + 1) / len(jobs), f"compiling {len(jobs)} kernels")
    return Compiled(len(kernels), missing)


def _needed(calls: Iterable[Callable[[], object]]) -> dict[tuple[compiler.KernelSpec, str], int]:
    """The kernels that the calls load first, of those not loaded yet, their architectures and a device."""
    needed: dict[tuple[compiler.KernelSpec, str], int] = {}
    with runtime.before_loading(_tell):
        for call in calls:
            try:
                call()
            except _Needed as need:
                specs, device = need.args
                arch = devices.device_info(device).arch.target
                needed.update(dict.fromkeys(((spec, arch) for spec in specs), device))
    return needed


class Ahead:
    """Compiles kernels into the on-disk cache in other processes, while this one does something else.

    Use it as a context. Without a cache, nothing is compiled.
    """

    def __init__(self) -> None:
        self._jobs: dict[tuple[compiler.KernelSpec, str], Future[bool]] = {}
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def add(self, calls: Iterable[Callable[[], object]]) -> list[Future[bool]]:
        """Compile what `calls` will load, as in :func:`compile_for`, after what was added before."""
        needed = _needed(calls)
        if needed and self._pool is None and _cached():
            workers = max(1, (os.cpu_count() or 1) - 1)  # one is left to this process
            self._pool = ProcessPoolExecutor(workers, processes(), adopt, (dict(os.environ),))
        if self._pool is None:
            return []
        for one in needed:
            if one not in self._jobs:
                self._jobs[one] = self._pool.submit(_compile, *one)
        return [self._jobs[one] for one in needed]


def _cached() -> bool:
    try:
        cache.folder()
    except OSError:
        return False
    return True


def _compile(spec: compiler.KernelSpec, arch: str) -> bool:
    missing = not compiler.is_cached(spec, arch)
    if missing:
        compiler.cached_cubin(spec, arch)
    return missing
