"""Calls of the CUDA driver, for functions that PyTorch and cuda-core lack or make too slow."""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any

__all__ = [
    "INVALID_CONTEXT",
    "PARAMS_AT",
    "PARAMS_MAX",
    "LaunchError",
    "buffer",
    "check",
    "error_name",
    "library",
    "make_context_current",
    "memory_rate",
]

PARAMS_AT = 128
"""Where a launch buffer's parameter struct begins, after its CUlaunchConfig."""

PARAMS_MAX = 4096
"""The most bytes of a parameter struct."""

INVALID_CONTEXT = 201
"""The driver's error code in a thread without a context."""


class LaunchError(RuntimeError):
    """The CUDA driver returned an error. The message has its name."""


class _LaunchBuffer(threading.local):
    """Memory for a launch's description. Each thread has one, because the driver reads it without the GIL."""

    def __init__(self) -> None:
        self.memory = ctypes.create_string_buffer(PARAMS_AT + PARAMS_MAX + 128)
        self.offset = -ctypes.addressof(self.memory) % 128  # a CUtensorMap needs 64; 128 is safe
        self.config = ctypes.addressof(self.memory) + self.offset
        self.pointers = (ctypes.c_void_p * 1)(self.config + PARAMS_AT)
        self.launch = (self.memory, self.offset, self.config, ctypes.addressof(self.pointers))


buffer = _LaunchBuffer()


@functools.cache
def library() -> ctypes.CDLL:
    """libcuda, loaded by the first call."""
    loaded = ctypes.CDLL("libcuda.so.1")
    pointer: Any = ctypes.c_void_p
    number: Any = ctypes.c_int
    loaded.cuLaunchKernelEx.argtypes = [pointer] * 4
    loaded.cuTensorMapEncodeTiled.argtypes = [pointer, number, number, *[pointer] * 5, *[number] * 4]
    loaded.cuMemsetD8Async.argtypes = [pointer, ctypes.c_ubyte, ctypes.c_size_t, pointer]
    return loaded


def error_name(code: int) -> str:
    """The name, number and text of an error."""
    name, text = ctypes.c_char_p(), ctypes.c_char_p()
    library().cuGetErrorName(code, ctypes.byref(name))
    library().cuGetErrorString(code, ctypes.byref(text))
    return f"{(name.value or b'unknown').decode()} ({code}): {(text.value or b'').decode()}"


def check(code: int, what: str) -> None:
    """Raise LaunchError if the call that returned `code` failed."""
    if code:
        raise LaunchError(f"{what}: {error_name(code)}")


_MEMORY_CLOCK, _BUS_WIDTH = 36, 37  # kHz, and bits that memory moves twice in a cycle


def memory_rate(device: int) -> float:
    """Bytes that a device's memory moves in a microsecond at most; 0 if the driver does not know."""
    found = ctypes.c_int()
    rate = 2 / 8 / 1e3
    for attribute in (_MEMORY_CLOCK, _BUS_WIDTH):
        if library().cuDeviceGetAttribute(ctypes.byref(found), attribute, device):
            return 0
        rate *= found.value
    return rate


def make_context_current(device: int) -> None:
    """Give this thread a context. The driver, unlike the runtime, does not make one by itself."""
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    check(library().cuDeviceGet(ctypes.byref(handle), device), "cuDeviceGet")
    check(library().cuDevicePrimaryCtxRetain(ctypes.byref(context), handle), "cuDevicePrimaryCtxRetain")
    check(library().cuCtxSetCurrent(context), "cuCtxSetCurrent")
