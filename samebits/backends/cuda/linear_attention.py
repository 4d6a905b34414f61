"""Linear attention without the delta rule on CUDA tensors: ``kernels/linear_*.cu``.

Updates are values there, so nothing but the matrix goes from chunk to chunk. Three launches: decays of all
chunks, the matrix at each chunk's start, and then all results at once. What the first two leave is all that
gradients need of a forward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.backends.arch import SM_80
from samebits.backends.cuda import compiler, runtime
from samebits.backends.cuda.delta_schedules import (
    Linear,
    LinearRows,
    LinearStates,
    choose_linear,
    padded_size,
)
from samebits.backends.cuda.operands import TYPES, address
from samebits.backends.delta import Delta, layout
from samebits.backends.recurrent import CHUNK

__all__ = ["kernel_spec", "run"]

_BEGINNING = 4
"""Warps of a block of the first kernel, each with a head."""


def kernel_spec(
    schedule: LinearStates | LinearRows | None,
    dtype: torch.dtype,
    key_size: int,
    *,
    hardware_exp2: bool,
    weighted: bool = False,
    keep: bool = False,
) -> compiler.KernelSpec:
    """The kernel of ``linear_states.cu`` or ``linear_rows.cu``, or without a schedule of ``linear_begin.cu``.

    `key_size` is a multiple of 16; rows have weights if `weighted`; `keep` is for gradients.
    """
    warps = schedule.warps if schedule else _BEGINNING
    constants: tuple[tuple[str, int | str], ...] = (
        *(("TYPE", TYPES[dtype]), ("KEY_SIZE", key_size), ("WARPS", warps)),
        *(("HARDWARE_EXP2", int(hardware_exp2)), ("WEIGHTED", int(weighted))),
    )
    name = "linear_begin"
    if isinstance(schedule, LinearStates):
        name = "linear_states"
        keys = min(schedule.keys, key_size)
        constants += (("KEY_TILE", keys), ("STAGES", schedule.stages), ("KEEP", int(keep)))
    elif schedule:
        name = "linear_rows"
        constants += (("TILE", schedule.tile), ("STAGES", schedule.stages))
    return compiler.KernelSpec(
        *(f"{name}.cu", name, "16P11q13if", constants),
        block=32 * warps,
        smem=schedule.memory(key_size, weighted) if schedule else 0,
        oldest=SM_80,
    )


_kernel = runtime.loader(kernel_spec)


def run(
    x: Delta,
    operands: tuple[Tensor, Tensor, Tensor],
    state: Tensor | None,
    out: Tensor | None,
    closed: Tensor | None,
    records: Tensor | None,
    schedule: Linear | None,
    hardware_exp2: bool,
) -> None:
    """Results; or with `records` what gradients need of every chunk, and `state` stays as it is.

    `operands` are q, k and v, dense along rows.
    """
    q, k, v = operands
    device, dtype = q.get_device(), q.dtype
    (tokens, heads, size), (_, key_heads, key_size) = v.shape, q.shape
    sequences, group, padded = len(x.spans), heads // key_heads, padded_size(key_size)
    if schedule is None:
        schedule = choose_linear(padded, size, sequences * heads, x.weights is not None, device)
    places = tokens // CHUNK + 2 * sequences
    keep = records is not None
    parts: tuple[LinearStates | LinearRows | None, ...] = (None, schedule.states, schedule.rows)
    weighted = x.weights is not None
    options = {"hardware_exp2": hardware_exp2, "weighted": weighted, "keep": keep}
    parts = parts[: 3 - keep]
    runtime.announce((kernel_spec(part, dtype, padded, **options) for part in parts), device)
    kernels = [_kernel(device, part, dtype, padded, **options) for part in parts]

    counts = opened = matrices = None
    if state is not None:
        counts = runtime.empty((sequences,), torch.int32, device)
        opened = runtime.empty((sequences, heads, CHUNK * (key_size + size)), dtype, device)
    decays = runtime.empty((places, heads, (2 + weighted) * CHUNK), torch.float32, device)
    if not keep:
        matrices = runtime.empty((places, heads, padded_size(size) * padded), dtype, device)
    initial = None if x.initial is None else x.initial.contiguous()
    shared = next(n for n in range(min(schedule.rows.heads, group), 0, -1) if group % n == 0)
    own = layout("delta", heads, key_size, size, dtype, weighted=weighted)
    spans = x.spans if x.spans.shape[1] else None
    given = (
        *map(address, (q, k, v, x.g, x.weights, x.skip, initial, state, closed, out, spans, records)),
        *map(address, (counts, opened, decays, matrices)),
        *(n for t in (q, k, v) for n in t.stride()[:2]),
        *(n for t in (x.g, x.weights) for n in ((0, 0) if t is None else t.stride())),
        own.words if state is None else state.stride(0),
        *(own.offset(name) for name in ("matrix", "keys", "updates", "decays")),
        own.offset("weights" if weighted else "decays"),
        *(key_size, size, heads, group, tokens, sequences, shared, out is not None and out.dtype != dtype),
        x.scale,
    )
    tiles = -(-size // (16 * schedule.states.warps)) * -(-padded // min(schedule.states.keys, padded))
    grids = (
        (places, -(-heads // _BEGINNING), 1),
        (tiles, heads, sequences),
        (places, heads // shared, -(-size // schedule.rows.tile)),
    )
    for kernel, grid in zip(kernels, grids, strict=False):
        kernel.launch(grid, *given)
