"""Selective state spaces on CUDA tensors: ``kernels/state_space.cu`` and ``state_space_backward.cu``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samebits.backends.cuda import compiler, devices, runtime
from samebits.backends.cuda.operands import TYPES, address, with_rows
from samebits.functions import CHANNEL_BLOCK, STATE_PIECE

_THREADS = 128
_F32 = torch.float32
_PARAMS = "P" * 12 + "q" * 9 + "iiiiiff"
_FULL = 2  # blocks for each multiprocessor that let threads keep more channels


@dataclass(frozen=True, slots=True)
class Scan:
    """A schedule of ``state_space.cu``.

    Attributes:
        kept: channels of a thread.
        tile: tokens that a block has in shared memory.
    """

    kept: int
    tile: int


def lanes(size: int) -> int:
    """Lanes that share the state of a channel."""
    return 1 << (-(-size // STATE_PIECE) - 1).bit_length()


def schedules(size: int, own: bool) -> list[Scan]:
    """All of a state of `size` entries; those of more channels last."""
    tile = 8 if lanes(size) > 8 else 16
    return [Scan(kept, tile) for kept in (1, 2, 4) if kept <= min(lanes(size), 2 if own else 4)]


def choose(size: int, own: bool, channels: int, groups: int, sequences: int, multiprocessors: int) -> Scan:
    """The one whose threads keep most channels, if the GPU is full of blocks then."""
    found, *more = schedules(size, own)
    for s in more:
        of_block = _THREADS // lanes(size) * s.kept
        if sequences * groups * -(-channels // groups // of_block) >= _FULL * multiprocessors:
            found = s
    return found


def kernel_spec(
    dtype: torch.dtype,
    size: int,
    own: bool,
    schedule: Scan,
    *,
    wide: bool = False,
    aligned: bool = True,
    step: bool = False,
    softplus: bool = False,
    dt: torch.dtype = _F32,
    gate: torch.dtype | None = None,
    programmatic: bool = False,
) -> compiler.KernelSpec:
    """The kernel of ``state_space.cu``."""
    constants = (
        *(("IN", TYPES[dtype]), ("DT", TYPES[dt]), ("GATE", TYPES[gate]), ("SIZE", size), ("OWN", int(own))),
        *(("KEPT", schedule.kept), ("TILE", schedule.tile), ("STEP", int(step)), ("SOFTPLUS", int(softplus))),
        *(("WIDE", int(wide)), ("ALIGNED", int(aligned))),
    )
    return compiler.KernelSpec(
        "state_space.cu", "state_space", _PARAMS, constants, block=_THREADS, programmatic=programmatic
    )


_kernel = runtime.loader(kernel_spec)


def scan(
    x: Tensor,
    steps: Tensor,
    decays: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor | None,
    states: Tensor | None,
    offsets: Tensor,
    own: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Outputs in `dtype`, and the states ``[sequences, channels, size]`` after each sequence."""
    device, sequences = x.get_device(), len(offsets) - 1
    out = runtime.zeros(x.shape, dtype, device)  # tokens of no sequence
    after = runtime.empty((sequences, x.shape[1], b.shape[2]), _F32, device)
    if not after.numel():
        return out, after
    states = None if states is None else states.contiguous()
    schedule = _chosen(x, b, own, sequences)
    options = {"wide": dtype != x.dtype}
    _launch(x, steps, decays, b, c, skip, None, None, states, after, offsets, out, own, schedule, options)
    return out, after


def step(
    x: Tensor,
    dt: Tensor,
    decays: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor | None,
    bias: Tensor | None,
    z: Tensor | None,
    states: Tensor,
    own: bool,
    softplus: bool,
    lowest: float,
    highest: float,
) -> Tensor:
    """Outputs of one token of each sequence, from raw dt, with their gates; `states` are moved on."""
    out = runtime.empty(x.shape, x.dtype, x.get_device())
    if not states.numel():
        return out.zero_()
    moved = states if states[0].is_contiguous() else states.contiguous()
    options = {"step": True, "softplus": softplus, "dt": dt.dtype, "gate": None if z is None else z.dtype}
    given = (x, dt, decays, b, c, skip, bias, z, moved, moved, None, out, own, Scan(1, 1), options)
    _launch(*given, lowest, highest)
    if moved is not states:
        states.copy_(moved)
    return out


def _chosen(x: Tensor, b: Tensor, own: bool, sequences: int) -> Scan:
    count = devices.device_info(x.get_device()).sm_count
    return choose(b.shape[2], own, x.shape[1], b.shape[1], sequences, count)


def _launch(
    x: Tensor,
    steps: Tensor,
    decays: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor | None,
    bias: Tensor | None,
    z: Tensor | None,
    before: Tensor | None,
    after: Tensor,
    offsets: Tensor | None,
    out: Tensor,
    own: bool,
    schedule: Scan,
    options: dict[str, Any],
    lowest: float = 0.0,
    highest: float = 0.0,
) -> None:
    if not x.dtype == b.dtype == c.dtype:
        x, b, c = x.to(_F32), b.to(_F32), c.to(_F32)
        if out.dtype != _F32:  # a type that the kernel does not write from these
            wide = runtime.empty(out.shape, _F32, out.get_device())
            options = options | {"wide": False}
            _launch(
                *(
                    x,
                    steps,
                    decays,
                    b,
                    c,
                    skip,
                    bias,
                    z,
                    before,
                    after,
                    offsets,
                    wide,
                    own,
                    schedule,
                    options,
                ),
                *(lowest, highest),
            )
            out.copy_(wide)
            return
        options = options | {"wide": False}
    x, steps, decays = with_rows(x), with_rows(steps), decays.contiguous()
    b, c = (t if t.stride(2) == 1 or t.shape[2] == 1 else t.contiguous() for t in (b, c))
    z = None if z is None else with_rows(z)
    channels, (groups, size) = x.shape[1], b.shape[1:]
    aligned = not (address(before) | after.data_ptr() | decays.data_ptr() | 4 * after.stride(0)) & 15
    of_block = _THREADS // lanes(size) * schedule.kept
    blocks = -(-channels // groups // of_block)
    kernel = _kernel(x.get_device(), x.dtype, size, own, schedule, aligned=aligned, **options)
    kernel.launch(
        (len(after), blocks * groups, 1),
        *(t.data_ptr() for t in (x, b, c, steps, decays)),
        *(address(t) for t in (skip, bias, before, offsets, z)),
        *(out.data_ptr(), after.data_ptr()),
        *(x.stride(0), b.stride(0), c.stride(0), steps.stride(0), 0 if z is None else z.stride(0)),
        *(out.stride(0), after.stride(0), b.stride(1), c.stride(1)),
        *(channels, channels // groups, channels // steps.shape[1], blocks, len(x), lowest, highest),
    )


_CHUNK = 8
_MOST_OF_TWO = 128  # states of a channel whose sums have two buffers


def backward_spec(
    dtype: torch.dtype, grad: torch.dtype, size: int, own: bool, aligned: bool = True
) -> compiler.KernelSpec:
    """The kernel of ``state_space_backward.cu``."""
    buffers, count, row = 2 if size <= _MOST_OF_TWO else 1, lanes(size), STATE_PIECE * lanes(size)
    constants = (
        *(("IN", TYPES[dtype]), ("GRAD", TYPES[grad]), ("SIZE", size), ("OWN", int(own))),
        *(("ALIGNED", int(aligned)), ("BUFFERS", buffers)),
    )
    floats = 2 * _CHUNK * row + 6 * _CHUNK * CHANNEL_BLOCK + buffers * 2 * count * row
    return compiler.KernelSpec(
        "state_space_backward.cu",
        "state_space_backward",
        "P" * 16 + "q" * 7 + "iiiii",
        constants,
        block=CHANNEL_BLOCK * count,
        smem=4 * floats,
    )


_backward_kernel = runtime.loader(backward_spec)


def scan_backward(
    grad: Tensor,
    grad_states: Tensor | None,
    x: Tensor,
    steps: Tensor,
    decays: Tensor,
    b: Tensor,
    c: Tensor,
    states: Tensor | None,
    offsets: Tensor,
    own: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """In float32: dv, dw, and dB, dC in blocks of channels, dA of each sequence, that of states before."""
    device, (tokens, channels), (groups, size) = x.get_device(), x.shape, b.shape[1:]
    sequences, blocks = len(offsets) - 1, -(-channels // groups // CHANNEL_BLOCK)
    dv, dw = (runtime.zeros((tokens, channels), _F32, device) for _ in range(2))
    db, dc = (runtime.zeros((tokens, groups, blocks, size), _F32, device) for _ in range(2))
    of_before = runtime.empty((sequences, channels, size), _F32, device)
    da = torch.empty_like(of_before) if own else runtime.empty((0, 0, 0), _F32, device)
    if of_before.numel():
        if not x.dtype == b.dtype == c.dtype:
            x, b, c = x.to(_F32), b.to(_F32), c.to(_F32)
        chunks = runtime.empty((tokens // _CHUNK + sequences, channels, size), _F32, device)
        grad, x, steps, decays = with_rows(grad), with_rows(x), with_rows(steps), decays.contiguous()
        b, c = (t if t.stride(2) == 1 or t.shape[2] == 1 else t.contiguous() for t in (b, c))
        states, grad_states = (None if t is None else t.contiguous() for t in (states, grad_states))
        aligned = not (address(states) | address(grad_states) | decays.data_ptr()) & 15
        _backward_kernel(device, x.dtype, grad.dtype, size, own, aligned).launch(
            (sequences, blocks * groups, 1),
            *(t.data_ptr() for t in (grad, x, b, c, steps, decays)),
            *(address(t) for t in (states, grad_states)),
            *(t.data_ptr() for t in (offsets, chunks, dv, dw, db, dc, da, of_before)),
            *(t.stride(0) for t in (grad, x, b, c, steps)),
            *(
                b.stride(1),
                c.stride(1),
                channels,
                channels // groups,
                channels // steps.shape[1],
                blocks,
                tokens,
            ),
        )
    return dv, dw, db, dc, da, of_before
