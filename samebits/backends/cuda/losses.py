"""Cross-entropy on CUDA tensors, beside its log-softmax: ``kernels/losses.cu``."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.backends.cuda import compiler, runtime
from samebits.backends.cuda.operands import TYPES, address

_THREADS = 256
_TARGETS = "Pqqqqq"
_PARAMS = {"pick": "PP" + _TARGETS, "mean_of_losses": "PPP" + _TARGETS, "spread": "PPPq" + _TARGETS}


def kernel_spec(entry: str, dtype: torch.dtype) -> compiler.KernelSpec:
    """The kernel of ``losses.cu`` with this name."""
    constants = (("VALUE", TYPES[dtype]),)
    return compiler.KernelSpec("losses.cu", entry, _PARAMS[entry], constants, block=_THREADS)


_kernel = runtime.loader(kernel_spec)


def pick(logs: Tensor, target: Tensor, vocabulary: int, ignore_index: int) -> Tensor:
    """The losses of rows, 0 where ignored. A target out of range ends in a device-side assert.

    Args:
        logs: log-probabilities ``[rows, vocabulary]``, or ``[rows]`` at the targets.
    """
    out = runtime.empty(target.shape, logs.dtype, logs.get_device())
    if out.numel():
        _kernel(logs.get_device(), "pick", logs.dtype).launch(
            (-(-out.numel() // _THREADS), 1, 1),
            *(logs.data_ptr(), out.data_ptr()),
            *_targets(logs, target, vocabulary, ignore_index),
        )
    return out


def mean(total: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """The total loss ``[1]`` divided by the number of targets that are not ignored, and that number."""
    device = total.get_device()
    out, count = runtime.empty((), total.dtype, device), runtime.empty((), torch.int64, device)
    _kernel(device, "mean_of_losses", total.dtype).launch(
        (1, 1, 1),
        *(total.data_ptr(), out.data_ptr(), count.data_ptr()),
        *_targets(total, target, 0, ignore_index),
    )
    return out, count


def spread(
    grad: Tensor, count: Tensor | None, target: Tensor, vocabulary: int, ignore_index: int, dense: bool
) -> Tensor:
    """Gradients of what :func:`pick` takes, ``[rows, vocabulary]`` if `dense`, from those of its losses.

    Args:
        grad: of all losses, or of their sum; of their mean with `count`.
    """
    shape = (*target.shape, vocabulary) if dense else tuple(target.shape)
    allocate = runtime.zeros if dense else runtime.empty
    out = allocate(shape, grad.dtype, grad.get_device())
    if target.numel():
        _kernel(grad.get_device(), "spread", grad.dtype).launch(
            (-(-target.numel() // _THREADS), 1, 1),
            *(grad.data_ptr(), address(count), out.data_ptr()),
            grad.stride(0) if grad.ndim else 0,
            *_targets(out, target, vocabulary, ignore_index),
        )
    return out


def _targets(values: Tensor, target: Tensor, vocabulary: int, ignore_index: int) -> tuple[int, ...]:
    dense = values.ndim == 2
    steps = (vocabulary, 1) if dense else (1, 0)
    return target.data_ptr(), target.numel(), vocabulary, ignore_index, *steps
