"""An H200 that computes nothing: CPU tensors pass for its own, and a driver notes what is launched."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from samebits import backends
from samebits.backends import pytorch_in_c
from samebits.backends.cuda import (
    devices,
    driver,
    matmul,
    runtime,
    tensor_maps,
)
from samebits.backends.cuda.attention import maps_sm90
from samebits.backends.cuda.plans import forget_plans

INFO = devices.DeviceInfo(0, "NVIDIA H200", (9, 0), 132, 232448, 60 << 20)
_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int
_LAUNCH = ctypes.CFUNCTYPE(_NUMBER, _POINTER, _POINTER, _POINTER, _POINTER)
_REPLACE = ctypes.CFUNCTYPE(_NUMBER, _POINTER, _POINTER)
_READ = ctypes.CFUNCTYPE(_NUMBER, _POINTER, ctypes.POINTER(ctypes.c_int32))
_CURRENT = ctypes.CFUNCTYPE(_NUMBER, ctypes.POINTER(ctypes.c_int8))
_STREAM = ctypes.CFUNCTYPE(_NUMBER, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))
_SET = ctypes.CFUNCTYPE(_NUMBER, ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t, _POINTER)


class FakeGpu:
    """Notes launches, and allocates from memory that :meth:`start` empties: so addresses repeat.

    Attributes:
        log: of each launch its kernel, configuration and parameters, or the memory set to zeros.
        specs: the kernels launched.
        codes: errors that the next launches return.
        map_codes: errors that the next changes of a tensor map's address return.
    """

    def __init__(self, memory: int = 1 << 26) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.specs: list[Any] = []
        self.codes: list[int] = []
        self.map_codes: list[int] = []
        self._memory, self._next = torch.empty(memory, dtype=torch.uint8), 0
        self._kernels: list[Any] = []
        self._callbacks = _LAUNCH(self._launch), _REPLACE(self._replace), _SET(self._set)
        names = "cuLaunchKernelEx", "cuTensorMapReplaceAddress", "cuMemsetD8Async"
        self.library = SimpleNamespace(**dict(zip(names, self._callbacks, strict=True)))
        self.library.cuTensorMapEncodeTiled = self._encode

    def start(self) -> None:
        """Forget the launches, and what was allocated."""
        self.log, self.specs, self._next = [], [], 0

    def allocate(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        count = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if 0 not in shape else 0
        start, self._next = self._next, self._next + -(-count * dtype.itemsize // 512) * 512
        assert self._next <= self._memory.numel(), "the memory is too small"
        room = self._memory[start : start + count * dtype.itemsize].view(dtype)
        return torch.as_strided(room, shape, strides).detach() if count else torch.empty(shape, dtype=dtype)

    @contextmanager
    def keeps_copies(self) -> Iterator[None]:
        """What ``contiguous`` makes lives on: a GPU frees memory in the order of its launches."""
        kept, contiguous = [], torch.Tensor.contiguous

        def keep(t: Tensor) -> Tensor:
            kept.append(contiguous(t))
            return kept[-1]

        with mock.patch.object(torch.Tensor, "contiguous", keep):
            yield

    @contextmanager
    def allocates_all(self) -> Iterator[None]:
        """Also what PyTorch's own functions allocate."""

        def empty(shape: Any, dtype: torch.dtype) -> Tensor:
            strides = torch.empty(shape, device="meta").stride()
            return self.allocate(tuple(shape), strides, dtype)

        def empty_like(t: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
            return empty(t.shape, dtype or t.dtype)

        def new_empty(t: Tensor, *shape: Any, dtype: torch.dtype | None = None) -> Tensor:
            return empty(shape if isinstance(shape[0], int) else shape[0], dtype or t.dtype)

        with (
            mock.patch.object(torch, "empty_like", empty_like),
            mock.patch.object(torch.Tensor, "new_empty", new_empty),
        ):
            yield

    def load(self, spec: Any, device: int) -> runtime.Kernel:
        found = runtime._kernels.get((spec, device))
        if found is None:
            self._kernels.append(spec)
            found = runtime._kernels[spec, device] = runtime.Kernel(spec, device, len(self._kernels))
        return found

    def make_current(self, device: int) -> None:
        self.log.append(("context", device))

    def _launch(self, config: int, function: int, params: int, extra: int) -> int:
        spec = self._kernels[function - 1]
        at = ctypes.cast(params, ctypes.POINTER(ctypes.c_void_p))[0]
        packed = ctypes.string_at(at, struct.calcsize("@" + spec.params))
        if self.codes and (code := self.codes.pop(0)):
            return code
        self.log.append((spec.source, spec.entry, ctypes.string_at(config, 52), packed))
        self.specs.append(spec)
        return 0

    def _replace(self, map: int, address: int) -> int:
        if self.map_codes and (code := self.map_codes.pop(0)):
            return code
        ctypes.memmove(map, (ctypes.c_uint64 * 1)(address), 8)
        return 0

    def _set(self, at: int, value: int, count: int, stream: int) -> int:
        self.log.append((at, value, count))
        return 0

    def _encode(self, to: int, dtype: int, rank: int, address: int, sizes: int, *more: int) -> int:
        """A map of the address, and of all that it was made of."""
        made = ctypes.string_at(sizes, 112)
        how = dtype | more[4] << 8 | more[5] << 16  # with the swizzle and the promotion into L2
        ctypes.memmove(to, struct.pack("@QII112s", address, how, rank, made), 128)
        return 0


def _zero(*_: object) -> int:
    return 0


def _device_at(tensor: int, found: Any) -> int:
    found[0] = 0 if _running else -1
    return 0


def _current(found: Any) -> int:
    found[0] = 0
    return 0


def _stream_of(device: int, found: Any) -> int:
    found[0] = _stream(device)
    return 0


INSTEAD = {
    "aoti_torch_get_device_index": _READ(_device_at),
    "_ZN3c104cuda9GetDeviceEPa": _CURRENT(_current),
    "aoti_torch_get_current_cuda_stream": _STREAM(_stream_of),
}
"""What replays ask. The extension keeps these functions: after a fake, tensors are on the CPU again."""
_running: list[FakeGpu] = []


def _stream(device: int) -> int:
    return 77


@contextmanager
def fake_gpu() -> Iterator[FakeGpu]:
    """PyTorch's CPU tensors are on this GPU, for this library alone."""
    gpu = FakeGpu()
    caches: tuple[Any, ...] = (backends.on_gpu, matmul.family, runtime._allow_replays)
    caches = (*caches, tensor_maps.tensor_map, maps_sm90.mask_maps, maps_sm90.tile_maps)
    tensor: Any = torch.Tensor
    patches: list[Any] = [
        mock.patch.object(tensor, "is_cuda", property(lambda t: True)),
        mock.patch.object(tensor, "get_device", _zero),
        mock.patch.object(torch._C, "_cuda_getDevice", _zero, create=True),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", _stream, create=True),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
        mock.patch.object(torch.cuda, "current_stream", return_value=mock.Mock()),
        mock.patch.object(driver, "library", return_value=gpu.library),
        mock.patch.object(driver, "error_name", "error {}".format),
        mock.patch.object(driver, "make_context_current", gpu.make_current),
        mock.patch.object(runtime, "require", return_value=None),
        mock.patch.object(runtime, "load", gpu.load),
        mock.patch.object(runtime, "_kernels", {}),
        mock.patch.object(runtime, "_allocate", SimpleNamespace(_empty_strided_cuda=gpu.allocate)),
        mock.patch.object(devices, "device_info", return_value=INFO),
        mock.patch.object(matmul, "_kept_offsets", {}),
    ]
    for cache in caches:
        cache.cache_clear()
    forget_plans()  # also recipes, which have functions of a fake driver
    _running.append(gpu)
    try:
        for patch in patches:
            patch.start()
        functions = gpu._callbacks
        make_current, fail = driver.make_context_current, runtime._fail
        pytorch_in_c.configure(make_current, fail, *functions, allocate=gpu.allocate, **INSTEAD)
        yield gpu
    finally:
        _running.remove(gpu)
        for patch in reversed(patches):
            patch.stop()
        for cache in caches:
            cache.cache_clear()
        forget_plans()
        _kept.append(gpu)  # the extension has its callbacks


_kept: list[FakeGpu] = []
