"""What ``_replay.c`` knows of the driver and of PyTorch: functions that it calls without Python.

PyTorch exports some for C, and keeps them stable. Others are for C++, but take and give numbers and addresses
alone, so that C can call them, too. A trial compares what is read of a tensor with what Python says.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler
from torch.utils._python_dispatch import _disable_current_modes

from samebits.backends import choices, is_chosen
from samebits.backends.modes import TESTED, dispatch_key
from samebits.backends.replay import _guards, _replay

__all__ = ["configure"]

_FUNCTIONS = (  # in the order of _replay.c; those for C++ raise nothing
    *(f"aoti_torch_get_{what}" for what in ("data_ptr", "dim", "sizes", "strides", "dtype", "layout")),
    "aoti_torch_get_device_index",
    "_ZN2at6native6is_negERKNS_6TensorE",
    "_ZNK3c1010TensorImpl13requires_gradEv",
    "_ZN2at4impl27torch_function_mode_enabledEv",
    "_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv",
    "aoti_torch_grad_mode_is_enabled",
    "_ZN3c104impl28tls_is_dispatch_key_includedENS_11DispatchKeyE",
    "_ZN3c104impl28tls_is_dispatch_key_excludedENS_11DispatchKeyE",
    "_ZN3c104cuda9GetDeviceEPa",
    "aoti_torch_get_current_cuda_stream",
)
# Included while torch.jit.trace or torch.func is at work; and excluded while autocast is off.
_KEYS = ("Tracer", "FuncTorchDynamicLayerFrontMode", "AutocastCPU", "AutocastCUDA")


def _is_watched() -> bool:
    return forward_ad._current_level >= 0 or profiler._is_profiler_enabled or is_chosen()


# While these dictionaries have these very objects, nothing is watched, and nobody is asked.
_AT_REST = (
    (vars(forward_ad), "_current_level", -1),
    (vars(profiler), "_is_profiler_enabled", False),
    (choices, "made", False),
)


def configure(
    make_current: Callable[[int], None],
    fail: Callable[[int, Any], None],
    *functions: Any,
    allocate: Callable[..., Tensor] | None = None,
    **instead: Any,
) -> None:
    """Let calls be replayed. The CUDA backend calls it before its first launch.

    Args:
        make_current: gives this thread the context of a device.
        fail: raises the driver's error of a code, in a launch of a kernel.
        functions: ``cuLaunchKernelEx``, ``cuTensorMapReplaceAddress`` and ``cuMemsetD8Async``.
        allocate: in place of PyTorch's ``_empty_strided_cuda``.
        instead: functions in place of PyTorch's of these names.

    Raises:
        RuntimeError: PyTorch's tensors are not what ``_replay.c`` knows.
    """
    if _replay is None:
        return
    torch_in_c = ctypes.CDLL(torch._C.__file__)  # which finds what PyTorch's other libraries export
    try:
        own = [instead.get(name) or getattr(torch_in_c, name) for name in _FUNCTIONS]
    except AttributeError as error:
        raise _unreadable() from error
    empty = allocate or _guards._empty_strided_cuda
    _replay.configure(
        (Tensor, torch.nn.Parameter, torch.dtype, empty, make_current, fail, _is_watched, _AT_REST),
        tuple(ctypes.cast(f, ctypes.c_void_p).value for f in (*own, *functions)),
        tuple(int(dispatch_key(name)) for name in _KEYS),
    )
    with _disable_current_modes():
        trial = torch.empty_strided((2, 3), (7, 2), dtype=torch.bfloat16, device="cpu")
        trials = trial, torch._neg_view(trial), torch.nn.Parameter(trial)
    for t in trials:
        shape, strides = (struct.pack("2q", *numbers) for numbers in (t.shape, t.stride()))
        told = t.data_ptr(), t.get_device(), shape, strides, t.is_neg(), t.requires_grad
        if _replay.described(t) != told:
            _replay.unset()  # else the next call would read its tensors
            raise _unreadable()


def _unreadable() -> RuntimeError:
    return RuntimeError(f"samebits: tensors of PyTorch {torch.__version__} cannot be read ({TESTED} can)")
