"""Reciprocal square roots: ``torch.rsqrt``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from samebits.backends import module_for
from samebits.ops._operator import Operator
from samebits.ops._rows import check_rows


def rsqrt(x: Tensor) -> Tensor:
    """``1 / sqrt(x)``, as :func:`torch.rsqrt`: two roundings in float32, and one to the dtype of `x`.

    PyTorch computes it so on a CPU, and by an approximation on a GPU. The gradient is PyTorch's:
    ``-0.5 * grad * result**3``, which is differentiated again by PyTorch.

    Args:
        x: bfloat16, float16 or float32, any shape and strides.

    Raises:
        TypeError: `x` is not dense or of another dtype.
    """
    out: Tensor = _operator(x, bypass=check_rows("rsqrt", x))
    return out


def _run(x: Tensor) -> Tensor:
    found: Tensor = module_for("rsqrt", x)[0].rsqrt(x)
    return found


_operator = Operator("rsqrt(Tensor x) -> Tensor", cpu=_run, fake=lambda x: x.new_empty(x.shape))


def _setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _backward(ctx: Any, saved: tuple[Tensor], grad: Tensor) -> Tensor:
    (y,) = saved
    return -0.5 * grad * (y * y * y)


_operator.register_autograd(_backward, setup_context=_setup_context)
