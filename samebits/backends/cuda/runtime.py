"""Compile, cache, load and launch CUDA kernels. The only module that imports ``cuda.core``.

A kernel is named by a :class:`KernelSpec`, pure data. :func:`compile` turns one into machine code with
NVRTC, GPU or no GPU; :func:`load` does so through an on-disk cache and keeps the loaded :class:`Kernel` for
the life of the process; :meth:`Kernel.launch` runs it on PyTorch's current stream. Importing this module
touches no CUDA.

Every kernel takes one parameter, a struct by value, so that a launch is one ``struct.pack_into`` and one
driver call. Both sides of that struct are checked against each other when the kernel is loaded.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import re
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from samebits.backends import UnavailableError, cache

__all__ = [
    "CompileError",
    "Cubin",
    "DeviceInfo",
    "Kernel",
    "KernelSpec",
    "LaunchError",
    "Status",
    "UnavailableError",
    "before_loading",
    "compile",
    "device_info",
    "empty_matrix",
    "load",
    "require",
    "status",
    "tensor_map",
]

KERNELS = Path(__file__).parent / "kernels"
INCLUDE = KERNELS / "include"

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a")
"""Every architecture that continuous integration compiles for. Tensor-core kernels begin at the second."""

OLDEST = (7, 5)
"""The lowest compute capability that any kernel runs on."""

INSTALL = "install the extra cuda: pip install '.[cuda]' in a clone of samebits"

# Each would change results. No contraction: a kernel that wants a fused multiply-add says so.
_FLOAT_OPTIONS = {"fma": False, "ftz": False, "prec_div": True, "prec_sqrt": True}


class CompileError(RuntimeError):
    """NVRTC rejected a kernel: its log is in the message."""


class LaunchError(RuntimeError):
    """The CUDA driver returned an error; its name is in the message."""


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What a schedule may ask of a GPU."""

    index: int
    name: str
    capability: tuple[int, int]
    sm_count: int
    max_smem: int
    """Bytes of dynamic shared memory that one block may use."""
    l2_bytes: int

    @property
    def arch(self) -> str:
        """The NVRTC architecture: from Hopper on with the ``a`` that unlocks its own instructions."""
        major, minor = self.capability
        return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


@dataclass(frozen=True, slots=True)
class Status:
    """Whether CUDA kernels can run here, and if not, why and what to do."""

    available: bool
    reason: str
    remedy: str
    cuda_core: str | None
    nvrtc: str | None
    torch_cuda: str | None
    devices: tuple[DeviceInfo, ...]


@functools.cache
def device_info(index: int) -> DeviceInfo:
    """Properties of the CUDA device ``index``."""
    p: Any = torch.cuda.get_device_properties(index)
    return DeviceInfo(
        index,
        p.name,
        (p.major, p.minor),
        p.multi_processor_count,
        p.shared_memory_per_block_optin,
        p.L2_cache_size,
    )


def status() -> Status:
    """What ``samebits info`` shows of the CUDA backend. Never raises."""
    reason, remedy = "", ""
    devices: tuple[DeviceInfo, ...] = ()
    core, nvrtc = _installed("cuda-core"), None
    if core is not None:
        try:
            nvrtc = nvrtc_version()
        except (UnavailableError, CompileError) as error:
            reason, _, remedy = str(error).partition(" — ")
    if torch.cuda.is_available():
        devices = tuple(device_info(i) for i in range(torch.cuda.device_count()))
    try:
        _require_compiler()
        _require_gpu()
        if devices and all(d.capability < OLDEST for d in devices):
            _require_capability(devices[0], OLDEST, "CUDA kernels need")
    except UnavailableError as error:
        reason, _, remedy = str(error).partition(" — ")
    return Status(not reason, reason, remedy, core, nvrtc, torch.version.cuda, devices)


def require(device: int) -> None:
    """Raise UnavailableError unless CUDA kernels run on CUDA device `device`."""
    _require_compiler()
    _require_gpu()
    _require_capability(device_info(device), OLDEST, "CUDA kernels need")


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _require_compiler() -> None:
    try:
        found = importlib.util.find_spec("cuda.core") is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        raise UnavailableError(f"samebits' CUDA kernels need the package cuda-core — {INSTALL}")


def _require_gpu() -> None:
    if torch.version.cuda is None:
        raise UnavailableError(
            f"this PyTorch ({torch.__version__}) is built without CUDA — install a CUDA build: https://pytorch.org"
        )
    if not torch.cuda.is_available():
        raise UnavailableError(
            "PyTorch finds no NVIDIA GPU or no driver — check that nvidia-smi lists a GPU, and that "
            "CUDA_VISIBLE_DEVICES does not hide it"
        )


def _require_capability(info: DeviceInfo, oldest: tuple[int, int], who: str) -> None:
    if info.capability < oldest:
        raise UnavailableError(
            f"{info.name} is {_sm(info.capability)}; samebits' {who} {_sm(oldest)} or newer — "
            "use another GPU, or CPU tensors"
        )


def _sm(capability: tuple[int, int]) -> str:
    major, minor = capability
    return f"sm_{major}{minor}"


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One kernel, as data.

    Attributes:
        source: file name in ``kernels/``.
        entry: the ``extern "C"`` function in it.
        params: ``struct`` format (native alignment) of the kernel's one parameter, a struct passed by value.
            ``P`` a pointer, ``q`` a 64-bit and ``i`` a 32-bit integer, ``f`` a float, ``128s`` a tensor map;
            tensor maps come first, and are aligned to 64 or 128 bytes in C.
        constants: names and values given to the compiler as ``-D``.
        block: threads in a block.
        smem: bytes of dynamic shared memory.
        cluster: blocks in a cluster.
        programmatic: allow programmatic dependent launch after the kernel before it on the stream.
        oldest: the lowest compute capability that it runs on.
    """

    source: str
    entry: str
    params: str
    constants: tuple[tuple[str, int | str], ...]
    block: int
    smem: int = 0
    cluster: tuple[int, int, int] = (1, 1, 1)
    programmatic: bool = False
    oldest: tuple[int, int] = (8, 0)


@dataclass(frozen=True, slots=True)
class Cubin:
    """Machine code, and what ``ptxas`` says of it."""

    code: bytes
    registers: int
    local_bytes: int
    """Stack frame: arrays in local memory, and spills."""
    spill_bytes: int
    static_smem: int
    advice: tuple[str, ...]
    """What it says of lost speed, such as that matrix instructions run one by one (C7515)."""


def compile(spec: KernelSpec, arch: str) -> Cubin:
    """Compile ``spec`` for ``arch`` (such as ``"sm_90a"``), uncached. Needs no GPU and no driver."""
    _require_compiler()
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
    """Full version of the NVRTC in use, such as ``13.0.88``, asked of the compiler itself."""
    _require_compiler()
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


def _cache_key(spec: KernelSpec, arch: str) -> str:
    """A hash of everything that decides the machine code."""
    files = [KERNELS / spec.source, *sorted(INCLUDE.glob("*.cuh"))]
    recipe = [spec.source, spec.constants, arch, sorted(_FLOAT_OPTIONS.items()), nvrtc_version()]
    digest = hashlib.sha256(json.dumps(recipe).encode())
    for file in files:
        text = file.read_bytes()
        digest.update(f"\n{file.name} {len(text)}\n".encode() + text)
    return digest.hexdigest()[:40]


def cached_cubin(spec: KernelSpec, arch: str) -> bytes:
    """Machine code of ``spec`` for ``arch``, from the on-disk cache or else compiled into it."""
    name = _entry(spec, arch)
    code = cache.read(name)
    if code is None:
        code = compile(spec, arch).code
        cache.write(name, code)
    return code


def is_cached(spec: KernelSpec, arch: str) -> bool:
    """Whether the on-disk cache has its machine code."""
    return cache.read(_entry(spec, arch)) is not None


def _entry(spec: KernelSpec, arch: str) -> str:
    return f"{Path(spec.source).stem}-{arch}-{_cache_key(spec, arch)}.cubin"


_CONFIG = "@7I P P I"  # CUlaunchConfig: grid, block, shared memory; stream; attributes; their number
_PARAMS_AT = 128  # where a launch buffer's parameter struct begins, after its CUlaunchConfig
_PARAMS_MAX = 4096

_INVALID_CONTEXT = 201
_MAX_DYNAMIC_SMEM = 8
_NON_PORTABLE_CLUSTER = 14
_CLUSTER_DIMENSION = 4
_PROGRAMMATIC_SERIALIZATION = 6


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16)]


class _LaunchBuffer(threading.local):
    """Memory that a launch is described in, one for each thread since the driver reads it without the GIL."""

    def __init__(self) -> None:
        self.memory = ctypes.create_string_buffer(_PARAMS_AT + _PARAMS_MAX + 128)
        self.offset = -ctypes.addressof(self.memory) % 128  # a CUtensorMap wants 64, to be sure 128
        self.config = ctypes.addressof(self.memory) + self.offset
        self.pointers = (ctypes.c_void_p * 1)(self.config + _PARAMS_AT)
        self.launch = (self.memory, self.offset, self.config, ctypes.addressof(self.pointers))


_buffer = _LaunchBuffer()


@functools.cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    pointer: Any = ctypes.c_void_p
    number: Any = ctypes.c_int
    driver.cuLaunchKernelEx.argtypes = [pointer] * 4
    driver.cuTensorMapEncodeTiled.argtypes = [pointer, number, number, *[pointer] * 5, *[number] * 4]
    return driver


def _error_name(code: int) -> str:
    name, text = ctypes.c_char_p(), ctypes.c_char_p()
    _driver().cuGetErrorName(code, ctypes.byref(name))
    _driver().cuGetErrorString(code, ctypes.byref(text))
    return f"{(name.value or b'unknown').decode()} ({code}): {(text.value or b'').decode()}"


def _check(code: int, what: str) -> None:
    if code:
        raise LaunchError(f"{what}: {_error_name(code)}")


def _make_context_current(device: int) -> None:
    """For a thread that has called no CUDA yet: the driver, unlike the runtime, makes it no context."""
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    _check(_driver().cuDeviceGet(ctypes.byref(handle), device), "cuDeviceGet")
    _check(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), handle), "cuDevicePrimaryCtxRetain")
    _check(_driver().cuCtxSetCurrent(context), "cuCtxSetCurrent")


class Kernel:
    """A kernel loaded on one device, held for the life of the process. Made by :func:`load`."""

    __slots__ = (
        "_attributes",
        "_attributes_at",
        "_current_device",
        "_fixed",
        "_function",
        "_launch",
        "_pack",
        "_stream",
        "device",
        "spec",
    )

    def __init__(self, spec: KernelSpec, device: int, function: int) -> None:
        self.spec = spec
        self.device = device
        self._function = function
        attributes = []
        if spec.cluster != (1, 1, 1):
            attributes.append(_Attribute(_CLUSTER_DIMENSION, 0, (ctypes.c_uint * 16)(*spec.cluster)))
        if spec.programmatic:
            attributes.append(_Attribute(_PROGRAMMATIC_SERIALIZATION, 0, (ctypes.c_uint * 16)(1)))
        self._attributes = (_Attribute * len(attributes))(*attributes)
        self._attributes_at = (ctypes.addressof(self._attributes), len(attributes))
        self._fixed = (spec.block, 1, 1, spec.smem)
        pad = _PARAMS_AT - struct.calcsize(_CONFIG)
        self._pack = struct.Struct(f"{_CONFIG}{pad}x{spec.params}").pack_into
        self._launch = _driver().cuLaunchKernelEx
        self._stream = torch._C._cuda_getCurrentRawStream
        self._current_device = torch._C._cuda_getDevice

    def launch(self, grid: tuple[int, int, int], *values: Any) -> None:
        """Run on PyTorch's current stream of this kernel's device; no synchronisation.

        Args:
            grid: blocks in x, y and z (multiples of the cluster's).
            values: the members of the kernel's parameter struct, in order.
        """
        device = self.device
        if self._current_device() != device:
            with torch.cuda.device(device):
                return self.launch(grid, *values)
        memory, offset, config, params = _buffer.launch
        self._pack(memory, offset, *grid, *self._fixed, self._stream(device), *self._attributes_at, *values)
        code = self._launch(config, self._function, params, None)
        if code == _INVALID_CONTEXT:
            _make_context_current(device)
            code = self._launch(config, self._function, params, None)
        if code:
            raise LaunchError(
                f"{self.spec.source} on cuda:{self.device}, grid {grid}, block {self.spec.block}, cluster "
                f"{self.spec.cluster}, {self.spec.smem} bytes of shared memory: {_error_name(code)}"
            )


_allocate: Any = torch._C._dynamo.guards


def empty_matrix(rows: int, columns: int, dtype: torch.dtype, device: int) -> torch.Tensor:
    """``torch.empty`` in a third of the time: as code does it that ``torch.compile`` wrote."""
    if torch._C._cuda_getDevice() != device:
        with torch.cuda.device(device):
            return empty_matrix(rows, columns, dtype, device)
    matrix: torch.Tensor = _allocate._empty_strided_cuda((rows, columns), (columns or 1, 1), dtype)
    return matrix


_kernels: dict[tuple[KernelSpec, int], Kernel] = {}
_libraries: list[Any] = []
_loading = threading.RLock()


class _Loading(threading.local):
    hook: Callable[[KernelSpec, int], None] | None = None


_loading_here = _Loading()


@contextmanager
def before_loading(hook: Callable[[KernelSpec, int], None]) -> Iterator[None]:
    """Tell `hook` of each kernel that this thread is about to load, and on which device; it may raise."""
    before, _loading_here.hook = _loading_here.hook, hook
    try:
        yield
    finally:
        _loading_here.hook = before


def load(spec: KernelSpec, device: int) -> Kernel:
    """The kernel of ``spec`` on CUDA device ``device``: compiled and loaded by the first call, then held.

    Raises:
        UnavailableError: it cannot run here.
        RuntimeError: the first call came during CUDA-graph capture.
    """
    kernel = _kernels.get((spec, device))
    if kernel is None:
        if _loading_here.hook is not None:
            _loading_here.hook(spec, device)
        with _loading:
            kernel = _kernels.get((spec, device))
            if kernel is None:
                kernel = _kernels[spec, device] = _load(spec, device)
    return kernel


def _load(spec: KernelSpec, device: int) -> Kernel:
    _require_compiler()
    _require_gpu()
    info = device_info(device)
    _require_capability(info, spec.oldest, f"{spec.source} needs")
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{spec.source} is not loaded on cuda:{device}, and no kernel may be while a CUDA graph is "
                "captured: call samebits.prepare(...) first, or run the operation once before the capture"
            )
    if spec.smem > info.max_smem:
        raise LaunchError(
            f"{spec.source} needs {spec.smem} bytes of shared memory, {info.name} has {info.max_smem}"
        )
    code = cached_cubin(spec, info.arch)
    from cuda.core import ObjectCode

    with torch.cuda.device(device):
        _make_context_current(device)
        try:
            library = ObjectCode.from_cubin(code, name=spec.source)
            kernel = library.get_kernel(spec.entry)
        except Exception as error:
            raise UnavailableError(
                f"the driver rejects {spec.source} for {info.arch}, NVRTC {nvrtc_version()}: {error} — "
                "update the driver, or install the nvidia-cuda-nvrtc of the driver's own CUDA version"
            ) from error
        driver = _driver()
        handle, function, ordinal = ctypes.c_void_p(int(kernel.handle)), ctypes.c_void_p(), ctypes.c_int()
        _check_params(spec, handle)
        _check(driver.cuDeviceGet(ctypes.byref(ordinal), device), "cuDeviceGet")
        settings = {_MAX_DYNAMIC_SMEM: spec.smem}
        x, y, z = spec.cluster
        if x * y * z > 8:
            settings[_NON_PORTABLE_CLUSTER] = 1
        for attribute, value in settings.items():
            result = driver.cuKernelSetAttribute(attribute, value, handle, ordinal)
            _check(result, f"cuKernelSetAttribute({attribute}, {value}) of {spec.source}")
        result = driver.cuKernelGetFunction(ctypes.byref(function), handle)
        _check(result, f"cuKernelGetFunction of {spec.source}")
    _libraries.append((library, kernel))  # unloading is never safe while a graph may replay the kernel
    assert function.value is not None
    return Kernel(spec, device, function.value)


def _check_params(spec: KernelSpec, kernel: ctypes.c_void_p) -> None:
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    result = _driver().cuKernelGetParamInfo(
        kernel, ctypes.c_size_t(0), ctypes.byref(offset), ctypes.byref(size)
    )
    _check(result, f"cuKernelGetParamInfo of {spec.source}")
    packed = struct.calcsize("@" + spec.params)
    if packed > _PARAMS_MAX or size.value not in {
        -(-packed // align) * align for align in (4, 8, 16, 64, 128)
    }:
        raise LaunchError(
            f"{spec.source} takes parameters of {size.value} bytes, KernelSpec.params packs {packed}"
        )


_MAP_DTYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
_MAP_BYTES = {0: 0, 32: 1, 64: 2, 128: 3}
_L2_BYTES = {0: 0, 64: 1, 128: 2, 256: 3}
_MAP_SIZES = struct.Struct("@5Q4Q5I5I")  # shape, strides, box, element strides


@functools.lru_cache(maxsize=4096)
def tensor_map(
    address: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int = 128,
    l2_promotion: int = 256,
) -> bytes:
    """The ``CUtensorMap`` of a tiled tensor, 128 bytes for a ``128s`` member; elements outside read as zero.

    Args:
        address: of the first element, a multiple of 16.
        dtype: float16, bfloat16 or float32.
        shape: sizes in elements, innermost dimension first.
        strides: in bytes, of every dimension but the innermost (which is contiguous); multiples of 16.
        box: the tile's sizes, innermost first.
        swizzle: 0, 32, 64 or 128 bytes.
        l2_promotion: 0, 64, 128 or 256 bytes.
    """
    buffer, rank = _buffer, len(shape)
    more = (0,) * (5 - rank)
    _MAP_SIZES.pack_into(
        buffer.memory, buffer.offset + 128, *shape, *more, *strides, *more, *box, *more, *(1,) * rank, *more
    )
    sizes = buffer.config + 128
    arguments = (
        *(buffer.config, _MAP_DTYPES[dtype], rank, address),
        *(sizes, sizes + 40, sizes + 72, sizes + 92),
        *(0, _MAP_BYTES[swizzle], _L2_BYTES[l2_promotion], 0),
    )
    result = _driver().cuTensorMapEncodeTiled(*arguments)
    if result == _INVALID_CONTEXT:  # a thread of autograd's, say
        _make_context_current(torch._C._cuda_getDevice())
        result = _driver().cuTensorMapEncodeTiled(*arguments)
    if result:
        what = f"{address:#x}, {dtype}, shape {shape}, strides {strides}, box {box}, swizzle {swizzle}"
        raise LaunchError(f"cuTensorMapEncodeTiled({what}): {_error_name(result)}")
    return ctypes.string_at(buffer.config, 128)
