"""Loading and launching of CUDA kernels.

:func:`load` compiles a kernel (see :mod:`samebits.backends.cuda.compiler`), loads it, and keeps the
:class:`Kernel` for the life of the process. :meth:`Kernel.launch` runs it on PyTorch's current stream.
Importing this module does not initialize CUDA.

Every kernel takes one parameter, a struct by value. So a launch is one ``struct.pack_into`` and one driver
call. When a kernel is loaded, the sizes of the struct on both sides are compared.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec

import torch

from samebits.backends import UnavailableError, pytorch_in_c, replay
from samebits.backends.cuda import compiler, devices, driver
from samebits.backends.cuda.compiler import KernelSpec
from samebits.backends.cuda.devices import require
from samebits.backends.cuda.plans import kept
from samebits.backends.modes import sees_calls
from samebits.remedies import see

__all__ = [
    "Kernel",
    "announce",
    "before_loading",
    "beyond_l2",
    "empty",
    "load",
    "loader",
    "require",
    "zeroed",
    "zeros",
]

_CONFIG = "@7I P P I"  # CUlaunchConfig: grid, block, shared memory; stream; attributes; their number
_MAX_DYNAMIC_SMEM = 8
_NON_PORTABLE_CLUSTER = 14
_CLUSTER_DIMENSION = 4
_PROGRAMMATIC_SERIALIZATION = 6


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16)]


class Kernel:
    """A kernel that is loaded on one device for the life of the process. Made by :func:`load`."""

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
        pad = driver.PARAMS_AT - struct.calcsize(_CONFIG)
        self._pack = struct.Struct(f"{_CONFIG}{pad}x{spec.params}").pack_into
        self._launch = driver.library().cuLaunchKernelEx
        self._stream = torch._C._cuda_getCurrentRawStream
        self._current_device = torch._C._cuda_getDevice

    def launch(self, grid: tuple[int, int, int], *values: Any) -> None:
        """Run on PyTorch's current stream of this kernel's device, without synchronisation.

        Args:
            grid: blocks in x, y and z (multiples of the cluster's sizes).
            values: the members of the kernel's parameter struct, in order.
        """
        device = self.device
        if self._current_device() != device:
            with torch.cuda.device(device):
                return self.launch(grid, *values)
        memory, offset, config, params = driver.buffer.launch
        self._pack(memory, offset, *grid, *self._fixed, self._stream(device), *self._attributes_at, *values)
        code = self._launch(config, self._function, params, None)
        if code == driver.INVALID_CONTEXT:
            driver.make_context_current(device)
            code = self._launch(config, self._function, params, None)
        if code:
            _fail(code, self, grid)
        if replay.here.recording is not None:
            packed = ctypes.string_at(config, driver.PARAMS_AT + struct.calcsize("@" + self.spec.params))
            replay.here.recording.launched(self, self._function, self.spec.params, packed, values)


def _fail(code: int, kernel: Kernel | None, grid: tuple[int, int, int] | None = None) -> None:
    """Raise the driver's error of a launch; without a kernel, of setting memory to zeros."""
    if kernel is None:
        raise driver.LaunchError(f"cuMemsetD8Async: {driver.error_name(code)}")
    spec, size = kernel.spec, "" if grid is None else f"grid {grid}, "
    raise driver.LaunchError(
        f"{spec.source} on cuda:{kernel.device}, {size}block {spec.block}, cluster {spec.cluster},"
        f" {spec.smem} bytes of shared memory: {driver.error_name(code)}"
    )


@functools.cache
def _allow_replays() -> None:
    library = driver.library()
    functions = library.cuLaunchKernelEx, library.cuTensorMapReplaceAddress, library.cuMemsetD8Async
    pytorch_in_c.configure(driver.make_context_current, _fail, *functions)


_allocate: Any = torch._C._dynamo.guards


def empty(shape: Sequence[int], dtype: torch.dtype, device: int) -> torch.Tensor:
    """``torch.empty`` in a third of the time, by the function that code of ``torch.compile`` calls."""
    if sees_calls():
        return torch.empty(shape, dtype=dtype, device=f"cuda:{device}")
    if torch._C._cuda_getDevice() != device:
        with torch.cuda.device(device):
            return empty(shape, dtype, device)
    steps, step = [], 1
    for n in reversed(shape):
        steps.append(step)
        step *= n or 1
    found: torch.Tensor = _allocate._empty_strided_cuda(tuple(shape), tuple(reversed(steps)), dtype)
    if replay.here.recording is not None:
        replay.here.recording.allocated(found)
    return found


def zeros(shape: Sequence[int], dtype: torch.dtype, device: int) -> torch.Tensor:
    """``torch.zeros``, which can be replayed."""
    if sees_calls():
        return torch.zeros(shape, dtype=dtype, device=f"cuda:{device}")
    return zeroed(empty(shape, dtype, device))


def zeroed(found: torch.Tensor) -> torch.Tensor:
    """``found.zero_()`` of what :func:`empty` has made, which can be replayed."""
    device = found.get_device()
    if found.numel() == 0:
        return found
    if sees_calls() or torch._C._cuda_getDevice() != device:
        return found.zero_()
    stream, set_bytes = torch._C._cuda_getCurrentRawStream(device), driver.library().cuMemsetD8Async
    code = set_bytes(found.data_ptr(), 0, found.nbytes, stream)
    if code == driver.INVALID_CONTEXT:
        driver.make_context_current(device)
        code = set_bytes(found.data_ptr(), 0, found.nbytes, stream)
    if code:
        _fail(code, None)
    if replay.here.recording is not None:
        replay.here.recording.zeroed(found)
    return found


def beyond_l2(made: torch.Tensor) -> bool:
    """Whether the GPU's L2 cache does not hold a result until it is read."""
    return made.nbytes > devices.device_info(made.get_device()).l2_bytes


_kernels: dict[tuple[KernelSpec, int], Kernel] = {}
_code_objects: list[Any] = []
_loading = threading.RLock()


class _Loading(threading.local):
    hook: Callable[[Sequence[KernelSpec], int], None] | None = None


_loading_here = _Loading()


@contextmanager
def before_loading(hook: Callable[[Sequence[KernelSpec], int], None]) -> Iterator[None]:
    """Call `hook` with kernels that this thread is about to load, and their device. `hook` may raise."""
    before, _loading_here.hook = _loading_here.hook, hook
    try:
        yield
    finally:
        _loading_here.hook = before


def announce(specs: Iterable[KernelSpec], device: int) -> None:
    """Tell the hook of :func:`before_loading` of all kernels at once that a plan is about to load."""
    if _loading_here.hook is not None:
        missing = [spec for spec in specs if (spec, device) not in _kernels]
        if missing:
            _loading_here.hook(missing, device)


def load(spec: KernelSpec, device: int) -> Kernel:
    """The kernel of ``spec`` on CUDA device ``device``. The first call compiles and loads it.

    Raises:
        UnavailableError: the kernel cannot run here.
        RuntimeError: the first call came during CUDA-graph capture.
    """
    kernel = _kernels.get((spec, device))
    if kernel is None:
        announce([spec], device)
        with _loading:
            kernel = _kernels.get((spec, device))
            if kernel is None:
                kernel = _kernels[spec, device] = _load(spec, device)
    return kernel


_P = ParamSpec("_P")


def loader(spec: Callable[_P, KernelSpec]) -> Callable[Concatenate[int, _P], Kernel]:
    """A function of a device and `spec`'s arguments, which loads that kernel and keeps it by them.

    To make a KernelSpec, and its hash, takes longer than a launch. If `spec` takes `programmatic`, that says
    whether launches may overlap on the device, and `fast_silu` what its architecture has of that name.
    """
    told = inspect.signature(spec).parameters.keys() & {"programmatic", "fast_silu"}

    @kept
    def loaded(device: int, /, *args: _P.args, **kwargs: _P.kwargs) -> Kernel:
        if told:
            arch = devices.device_info(device).arch
            of_arch = {"programmatic": arch.copies_tiles, "fast_silu": arch.fast_silu}
            kwargs.update({name: of_arch[name] for name in told})
        return load(spec(*args, **kwargs), device)

    return loaded


def _load(spec: KernelSpec, device: int) -> Kernel:
    devices.require(device, spec.oldest, f"{spec.source} needs")
    info = devices.device_info(device)
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{spec.source} is not loaded on cuda:{device}, and no kernel may be while a CUDA graph is "
                "captured: call samebits.prepare(...) first, or run the operation once before the capture"
                + see("cuda-graphs")
            )
    _allow_replays()
    if spec.smem > info.max_smem:
        raise driver.LaunchError(
            f"{spec.source} needs {spec.smem} bytes of shared memory, {info.name} has {info.max_smem}"
        )
    code = compiler.cached_cubin(spec, info.arch.target)
    from cuda.core import ObjectCode  # type: ignore[import-untyped]

    with torch.cuda.device(device):
        driver.make_context_current(device)
        try:
            code_object = ObjectCode.from_cubin(code, name=spec.source)
            kernel = code_object.get_kernel(spec.entry)
        except Exception as error:
            raise UnavailableError(
                f"the driver rejects {spec.source} for {info.arch.target}, NVRTC {compiler.nvrtc_version()}:"
                f" {error} — update the driver, or install the nvidia-cuda-nvrtc of the driver's own CUDA"
                " version" + see("no-compiler")
            ) from error
        library = driver.library()
        handle, function, ordinal = ctypes.c_void_p(int(kernel.handle)), ctypes.c_void_p(), ctypes.c_int()
        _check_params(spec, handle)
        driver.check(library.cuDeviceGet(ctypes.byref(ordinal), device), "cuDeviceGet")
        settings = {_MAX_DYNAMIC_SMEM: spec.smem}
        x, y, z = spec.cluster
        if x * y * z > 8:
            settings[_NON_PORTABLE_CLUSTER] = 1
        for attribute, value in settings.items():
            result = library.cuKernelSetAttribute(attribute, value, handle, ordinal)
            driver.check(result, f"cuKernelSetAttribute({attribute}, {value}) of {spec.source}")
        result = library.cuKernelGetFunction(ctypes.byref(function), handle)
        driver.check(result, f"cuKernelGetFunction of {spec.source}")
    _code_objects.append((code_object, kernel))  # never unloaded, because a graph may replay the kernel
    assert function.value is not None
    return Kernel(spec, device, function.value)


def _check_params(spec: KernelSpec, kernel: ctypes.c_void_p) -> None:
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    result = driver.library().cuKernelGetParamInfo(
        kernel, ctypes.c_size_t(0), ctypes.byref(offset), ctypes.byref(size)
    )
    driver.check(result, f"cuKernelGetParamInfo of {spec.source}")
    packed = struct.calcsize("@" + spec.params)
    if packed > driver.PARAMS_MAX or size.value not in {
        -(-packed // align) * align for align in (4, 8, 16, 64, 128)
    }:
        raise driver.LaunchError(
            f"{spec.source} takes parameters of {size.value} bytes, KernelSpec.params packs {packed}"
        )
