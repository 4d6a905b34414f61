"""Compilation of CUDA kernels with NVRTC, through the on-disk cache. It needs no GPU and no driver.

A :class:`KernelSpec` describes a kernel, as data. :func:`compile` turns it into machine code, and
:func:`cached_cubin` does so through :mod:`samebits.backends.cache`. Importing this module does not initialize
CUDA.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import io
import json
import re
from dataclasses import dataclass
from pathlib import Path

from samebits.backends import UnavailableError, cache
from samebits.backends.arch import ARCHS, SM_80
from samebits.remedies import see

__all__ = [
    "ARCHITECTURES",
    "CompileError",
    "Cubin",
    "KernelSpec",
    "cached_cubin",
    "compile",
    "is_cached",
    "nvrtc_version",
    "require_compiler",
    "source_hash",
]

KERNELS = Path(__file__).parent / "kernels"
INCLUDE = KERNELS / "include"

ARCHITECTURES = tuple(arch.target for arch in ARCHS.values())
"""Every architecture that continuous integration compiles for. Tensor-core kernels start at the second."""

INSTALL = "install the extra cuda: pip install '.[cuda]' in a clone of samebits" + see("no-compiler")

# Each of these options would change results. There is no contraction: kernels call fused multiply-adds.
_FLOAT_OPTIONS = {"fma": False, "ftz": False, "prec_div": True, "prec_sqrt": True}


class CompileError(RuntimeError):
    """NVRTC rejected a kernel. The message has its log."""


def require_compiler() -> None:
    """Raise UnavailableError unless the package cuda-core, which calls NVRTC, is installed."""
    try:
        found = importlib.util.find_spec("cuda.core") is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        raise UnavailableError(f"samebits' CUDA kernels need the package cuda-core — {INSTALL}")


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One kernel, as data.

    Attributes:
        source: file name in ``kernels/``.
        entry: the ``extern "C"`` function in it.
        params: ``struct`` format (native alignment) of the kernel's one parameter, a struct passed by value.
            ``P`` is a pointer, ``q`` a 64-bit and ``i`` a 32-bit integer, ``f`` a float, ``128s`` a tensor
            map. Tensor maps come first, and are aligned to 64 or 128 bytes in C.
        constants: names and values given to the compiler as ``-D``.
        block: threads in a block.
        smem: bytes of dynamic shared memory.
        cluster: blocks in a cluster.
        programmatic: allow programmatic dependent launch after the previous kernel on the stream.
        oldest: the lowest compute capability that the kernel runs on.
    """

    source: str
    entry: str
    params: str
    constants: tuple[tuple[str, int | str], ...]
    block: int
    smem: int = 0
    cluster: tuple[int, int, int] = (1, 1, 1)
    programmatic: bool = False
    oldest: tuple[int, int] = SM_80


@dataclass(frozen=True, slots=True)
class Cubin:
    """Machine code, and the information that ``ptxas`` prints about it."""

    code: bytes
    registers: int
    local_bytes: int
    """Size of the stack frame: arrays in local memory, and spills."""
    spill_bytes: int
    static_smem: int
    advice: tuple[str, ...]
    """Warnings about lost speed, such as matrix instructions that run one by one (C7515)."""


def compile(spec: KernelSpec, arch: str) -> Cubin:
    """Compile ``spec`` for ``arch`` (such as ``"sm_90a"``), uncached. Needs no GPU and no driver."""
    require_compiler()
    from cuda.core import Program, ProgramOptions  # type: ignore[import-untyped]

    log = io.StringIO()
    options = ProgramOptions(
        name=spec.source,
        arch=arch,
        std="c++17",
        include_path=[str(INCLUDE)],
        define_macro=[(name, str(value)) for name, value in spec.constants] or None,
        ptxas_options=["-v"],
        **_FLOAT_OPTIONS,
    )
    try:
        code = Program((KERNELS / spec.source).read_text(), "c++", options).compile("cubin", logs=log).code
    except Exception as error:
        raise CompileError(
            f"{spec.source} for {arch} with {dict(spec.constants)}: {error}\n{log.getvalue()}"
        ) from error
    text = log.getvalue()

    def number(pattern: str) -> int:
        return sum(map(int, re.findall(pattern, text)))

    return Cubin(
        code=bytes(code),
        registers=number(r"Used (\d+) registers"),
        local_bytes=number(r"(\d+) bytes stack frame"),
        spill_bytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        static_smem=number(r"(\d+) bytes smem"),
        advice=tuple(re.findall(r".*Potential Performance Loss.*", text)),
    )


@functools.cache
def nvrtc_version() -> str:
    """Full version of the NVRTC in use, such as ``13.0.88``, from the compiler itself."""
    require_compiler()
    from cuda.core import Program, ProgramOptions

    log = io.StringIO()
    source = (
        "#define TEXT(x) #x\n#define VALUE(x) TEXT(x)\n"
        '#pragma message("nvrtc " VALUE(__CUDACC_VER_MAJOR__) "." VALUE(__CUDACC_VER_MINOR__) "."'
        " VALUE(__CUDACC_VER_BUILD__))\n"
    )
    try:
        Program(source, "c++", ProgramOptions(arch="sm_80")).compile("cubin", logs=log)
    except Exception as error:
        raise UnavailableError(f"NVRTC does not load: {error} — {INSTALL}") from error
    found = re.search(r'"nvrtc ([\d.]+)"', log.getvalue())
    if found is None:
        raise UnavailableError(f"NVRTC does not tell its version:\n{log.getvalue()} — {INSTALL}")
    return found.group(1)


_INCLUDE = re.compile(rb'^#include "(\w+\.cuh)"', re.MULTILINE)


def source_hash(*sources: str) -> str:
    """A hash of files in ``kernels/``, and of all that they include."""
    digest, seen = hashlib.sha256(), set()
    paths = [KERNELS / name for name in sources]
    while paths:
        path = paths.pop()
        if path not in seen:
            seen.add(path)
            text = path.read_bytes()
            digest.update(f"\n{path.name} {len(text)}\n".encode() + text)
            paths += sorted(INCLUDE / name.decode() for name in _INCLUDE.findall(text))
    return digest.hexdigest()


def _cache_key(spec: KernelSpec, arch: str) -> str:
    """A hash of everything that decides the machine code."""
    of_source = source_hash(spec.source)
    recipe = [spec.source, of_source, spec.constants, arch, sorted(_FLOAT_OPTIONS.items()), nvrtc_version()]
    return hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:40]


def cached_cubin(spec: KernelSpec, arch: str) -> bytes:
    """Machine code of ``spec`` for ``arch``, from the on-disk cache. If it is missing, it is compiled."""
    name = _entry(spec, arch)
    code = cache.read(name)
    if code is None:
        code = compile(spec, arch).code
        cache.write(name, code)
    return code


def is_cached(spec: KernelSpec, arch: str) -> bool:
    """Whether the on-disk cache has the machine code of ``spec`` for ``arch``."""
    return cache.read(_entry(spec, arch)) is not None


def _entry(spec: KernelSpec, arch: str) -> str:
    return f"{Path(spec.source).stem}-{arch}-{_cache_key(spec, arch)}.cubin"
