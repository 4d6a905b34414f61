"""Gated activations, activations alone, and their gradients, on CUDA: ``kernels/gated{,_backward}.cu``."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

from samebits.backends import replay
from samebits.backends.cuda import compiler, runtime
from samebits.backends.cuda.operands import TYPES

_THREADS = 256
_NO_LIMIT = float("inf")
_AT_ONCE = 1 << 30  # entries of an activation alone that a launch takes: they are one row, counted in 32 bits


_PARAMS = {"gated": "PPPqqqqiff", "gated_backward": "PPPPPqqqqqqiff"}


def kernel_spec(
    entry: str,
    dtype: torch.dtype,
    activation: str,
    form: str,
    vector: int,
    once: bool = False,
    *,
    fast_silu: bool = False,
    programmatic: bool = False,
) -> compiler.KernelSpec:
    """The kernel of ``gated.cu`` or ``gated_backward.cu``. ``once`` changes nothing in float32."""
    between = (("BETWEEN", "F32"),) if once and dtype != torch.float32 else ()
    fast = fast_silu and entry == "gated" and dtype == torch.bfloat16 and activation == "silu" and not once
    of = ("IN", TYPES[dtype]), ("ACTIVATION", activation.upper()), ("FAST_SILU", int(fast))
    constants = *of, ("FORM", form), ("VECTOR", vector), *between
    return compiler.KernelSpec(
        f"{entry}.cu", entry, _PARAMS[entry], constants, block=_THREADS, programmatic=programmatic
    )


_kernel = runtime.loader(kernel_spec)


def gated(
    gate: Tensor,
    up: Tensor | None,
    activation: str,
    limit: float,
    alpha: float,
    once: bool,
    interleaved: bool,
) -> Tensor:
    """``activation(gate) * up``, contiguous. Without `up`, a row of `gate` has both."""
    size = gate.shape[-1] // (2 if up is None else 1)
    out = runtime.empty((*gate.shape[:-1], size), gate.dtype, gate.get_device())
    if interleaved:
        if out.numel():
            _launch("ALTERNATING", _rows(gate), 0, 0, out, activation, limit, alpha, once)
    else:
        gated_into(gate, up, out, activation, limit, alpha, once)
    return out


def gated_into(
    gate: Tensor, up: Tensor | None, out: Tensor, activation: str, limit: float, alpha: float, once: bool
) -> None:
    """The same into `out`, which may be an operand. Without `up`, both halves of a row are in `gate`."""
    if out.numel() == 0:
        return
    if up is not None and _alternate(gate, up) and (rows := _matrix(gate)).data_ptr() == gate.data_ptr():
        replay.tied(gate, up)  # a replay finds the factors by the gates alone
        return _launch("ALTERNATING", rows, 0, 0, out, activation, limit, alpha, once)
    rows = _rows(gate)
    if up is None:
        other, step = rows.data_ptr() + out.shape[-1] * out.itemsize, rows.stride(0)
    else:
        up = _rows(up)
        other, step = up.data_ptr(), up.stride(0)
    return _launch("APART", rows, other, step, out, activation, limit, alpha, once)


def gated_backward(
    grad: Tensor,
    gate: Tensor,
    up: Tensor | None,
    activation: str,
    limit: float,
    alpha: float,
    once: bool,
    interleaved: bool,
    of_gate: bool,
    of_up: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of gate and factor; without `up` that of what has both, and nothing."""
    device, size, n = gate.get_device(), gate.itemsize, grad.shape[-1]
    both = up is None
    first = runtime.empty(gate.shape if both or of_gate else (0,), gate.dtype, device)
    second = runtime.empty(gate.shape if of_up and not both else (0,), gate.dtype, device)
    if grad.numel() == 0:
        return first, second
    rows, g = _rows(gate), _rows(grad)
    if up is None:
        form = "ALTERNATING" if interleaved else "APART"
        behind = 0 if interleaved else n * size
        others = rows.data_ptr() + behind, first.data_ptr() + behind
        steps = rows.stride(0), rows.stride(0), 2 * n, 2 * n
    else:
        ups = _rows(up)
        form, others = "APART", (ups.data_ptr(), second.data_ptr() if of_up else 0)
        steps = rows.stride(0), ups.stride(0), n, n
    of_first = first.data_ptr() if both or of_gate else 0
    addresses = g.data_ptr(), rows.data_ptr(), others[0], of_first, others[1]
    _launch_backward(form, gate.dtype, device, g, n, addresses, steps, activation, limit, alpha, once)
    return first, second


def activation(x: Tensor, name: str) -> Tensor:
    """An activation alone, rounded, contiguous."""
    out = runtime.empty(x.shape, x.dtype, x.get_device())
    if out.numel():
        for some, to in _pieces(x.contiguous(), out):
            _launch("ALONE", some, 0, 0, to, name, _NO_LIMIT, 0.0)
    return out


def activation_backward(grad: Tensor, x: Tensor, name: str) -> Tensor:
    """The gradient of :func:`activation`, rounded, contiguous."""
    out = runtime.empty(x.shape, x.dtype, x.get_device())
    if out.numel():
        for g, some, to in _pieces(grad.contiguous(), x.contiguous(), out):
            addresses, steps = (g.data_ptr(), some.data_ptr(), 0, to.data_ptr(), 0), (0, 0, 0, 0)
            _launch_backward(
                "ALONE", x.dtype, x.get_device(), g, to.numel(), addresses, steps, name, _NO_LIMIT, 0.0
            )
    return out


def _pieces(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Contiguous tensors of one size, each as a row, or as rows of which a launch takes one."""
    rows = [t.view(1, -1) for t in tensors]
    if tensors[0].numel() <= _AT_ONCE:
        return [tuple(rows)]
    return zip(*(row.split(_AT_ONCE, 1) for row in rows), strict=True)


def _launch(
    form: str,
    gate: Tensor,
    up: int,
    up_row: int,
    out: Tensor,
    activation: str,
    limit: float,
    alpha: float,
    once: bool = False,
) -> None:
    """Run the kernel on rows of gates. `up` is an address."""
    to = _rows(out)
    (rows, n), size, vector = to.shape, to.itemsize, 16 // to.itemsize
    gate_row, out_row = gate.stride(0), to.stride(0)
    low = gate.data_ptr() | up | to.data_ptr()
    if rows > 1:
        low |= (gate_row | up_row | out_row) * size
    if low & 15 or n % vector:
        vector = 1
    count = rows * (n // vector)
    _kernel(gate.get_device(), "gated", gate.dtype, activation, form, vector, once).launch(
        (-(-count // _THREADS), 1, 1),
        *(gate.data_ptr(), up, to.data_ptr(), gate_row, up_row, out_row),
        *(count, n // vector, limit, alpha),
    )
    if to.data_ptr() != out.data_ptr():
        out.copy_(to.view(out.shape))


def _launch_backward(
    form: str,
    dtype: torch.dtype,
    device: int,
    grad: Tensor,
    n: int,
    addresses: tuple[int, ...],
    steps: tuple[int, ...],
    activation: str,
    limit: float,
    alpha: float,
    once: bool = False,
) -> None:
    """Run the kernel on rows of `n` gates. `addresses` and, but for the first one, `steps` are its own."""
    rows, size, vector = grad.shape[0], dtype.itemsize, 16 // dtype.itemsize
    steps = grad.stride(0), *steps
    low = functools.reduce(int.__or__, addresses)
    if rows > 1:
        low |= functools.reduce(int.__or__, steps) * size
    if low & 15 or n % vector:
        vector = 1
    count = rows * (n // vector)
    _kernel(device, "gated_backward", dtype, activation, form, vector, once).launch(
        (-(-count // _THREADS), 1, 1), *addresses, *steps, count, n // vector, limit, alpha
    )


def _alternate(gate: Tensor, up: Tensor) -> bool:
    """Whether both are in turns in one tensor, the gate first."""
    return (
        gate.stride(-1) == 2
        and gate.stride() == up.stride()
        and up.data_ptr() == gate.data_ptr() + gate.itemsize
    )


def _rows(x: Tensor) -> Tensor:
    """`x` as a matrix with contiguous rows: a view if there is one, else a copy."""
    return _matrix(x if x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous())


def _matrix(x: Tensor) -> Tensor:
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
