"""CUDA kernels, compiled by a C++ compiler and run on a CPU.

Their host side runs, too, on CPU tensors. Tensor-core steps are those of ``AMPERE``, as the contract has
them. Threads of a block take turns, so that a missing barrier shows only if it matters to one of two orders
of them. A GPU alone shows that NVRTC's code does the same. What was compiled is kept in samebits'
cache, by all that decides it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from samebits.backends import cache
from samebits.backends.cuda import compiler, runtime

_HERE = Path(__file__).parent / "host"
_KERNELS = Path(compiler.__file__).parent / "kernels"
# PTX, of which a CPU's compiler knows nothing. That of sm_80 and newer is left out by __CUDA_ARCH__.
_PTX = {
    'asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x));': "wide = widened_half(x);",
    'asm("cvt.rn.f16.f32 %0, %1;" : "=h"(first) : "f"(low));': "first = narrowed_half(low);",
    'asm("cvt.rn.f16.f32 %0, %1;" : "=h"(second) : "f"(high));': "second = narrowed_half(high);",
}
# Threads of a block share what is static here; and all of shared memory that is dynamic has one name.
_SHARED = {
    "extern __shared__ __align__(16) unsigned char memory[];": "unsigned char* const memory = bytes;",
    "    __shared__ alignas(16) ": "    alignas(16) static ",
    "    __shared__ ": "    static ",
}
_CXX = shutil.which("c++")
needs_compiler = pytest.mark.skipif(_CXX is None, reason="there is no C++ compiler")


class HostKernel:
    """In place of a :class:`samebits.backends.cuda.runtime.Kernel`."""

    def __init__(self, spec: compiler.KernelSpec) -> None:
        self._spec = spec
        self._launch = ctypes.CDLL(str(_compiled(spec))).launch
        self._launch.restype = ctypes.c_bool

    def launch(self, grid: tuple[int, int, int], *params: Any) -> None:
        given = struct.pack(self._spec.params, *params)
        # A struct of 64-bit members ends at a multiple of 8 bytes.
        room = ctypes.create_string_buffer(given, -(-len(given) // 8) * 8)
        kept = self._launch(room, *grid, self._spec.block, self._spec.smem)
        assert kept, f"{self._spec.source} takes more shared memory than {self._spec.smem} bytes"


@functools.cache
def _sources() -> Path:
    to = Path(_directory().name) / "kernels"
    shutil.copytree(_KERNELS, to)
    convert = to / "include" / "convert.cuh"
    text = convert.read_text()
    for ptx, plain in _PTX.items():
        assert ptx in text, f"convert.cuh has changed: {ptx}"
        text = text.replace(ptx, plain)
    convert.write_text(text)
    shared = "include/row.cuh", "l2norm.cu", "routing.cu", "sort_slots.cu"
    for source in [*to.glob("attention*.cu"), *(to / name for name in shared)]:
        text = source.read_text()
        for cuda, plain in _SHARED.items():
            text = text.replace(cuda, plain)
        source.write_text(text)
    for replaced in ("ptx_sm80.cuh", "named_barriers.cuh"):
        shutil.copy(_HERE / replaced, to / "include")
    return to


@functools.cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


@functools.cache
def _of_all_kernels() -> Any:
    """What decides the code of every kernel: the compiler, and what it includes."""
    files = sorted([*_HERE.iterdir(), *(_sources() / "include").iterdir()])
    version = subprocess.run([str(_CXX), "--version"], capture_output=True, check=True).stdout
    return hashlib.sha256(version + b"".join(file.read_bytes() for file in files))


@functools.cache
def _compiled(spec: compiler.KernelSpec) -> Path:
    kernels = _sources()
    macros = {**dict(spec.constants), "SOURCE": f'"{spec.source}"', "ENTRY": spec.entry}
    options = "-std=c++20", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-w", "-shared", "-fPIC"
    options = *options, "-U_FORTIFY_SOURCE"  # it takes another stack for a broken one
    options = *options, *(f"-D{name}={value}" for name, value in macros.items())
    decided = _of_all_kernels().copy()
    decided.update(repr(options).encode() + (kernels / spec.source).read_bytes())
    name = f"{Path(spec.source).stem}-host-{decided.hexdigest()[:32]}.so"
    to = kernels.parent / name
    if (known := cache.read(name)) is not None:
        to.write_bytes(known)
        return to
    include = f"-I{kernels}", f"-I{kernels / 'include'}"
    subprocess.run([str(_CXX), *options, *include, str(_HERE / "launch.cpp"), "-o", str(to)], check=True)
    cache.write(name, to.read_bytes())
    return to


_LOADERS = {
    "_kernel": "kernel_spec",
    "_few_kernel": "few_spec",
    "_gradients_kernel": "gradients_spec",
    "_sorter": "sort_spec",
    "_step_kernel": "step_spec",
    "_sums_kernel": "sums_spec",
}
"""What loads kernels in modules of the CUDA backend, and the specs that they load."""


def use(monkeypatch: pytest.MonkeyPatch, host: ModuleType) -> None:
    """Let functions of `host` take CPU tensors. What they allocate starts as NaN."""

    def loader(spec: Callable[..., Any]) -> Callable[..., HostKernel]:
        return lambda _, *args, **options: HostKernel(spec(*args, **options))

    def empty(shape: tuple[int, ...], dtype: torch.dtype, device: int) -> torch.Tensor:
        return torch.full(tuple(shape), torch.nan if dtype.is_floating_point else -1, dtype=dtype)

    def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: int) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=dtype)

    for name, spec in _LOADERS.items():
        if hasattr(host, name):
            monkeypatch.setattr(host, name, loader(getattr(host, spec)))
    monkeypatch.setattr(runtime, "empty", empty)
    monkeypatch.setattr(runtime, "zeros", zeros)
    monkeypatch.setattr(runtime, "beyond_l2", lambda made: made.nbytes > 4096)
