"""Linear attention by chunks on CUDA tensors: ``kernels/linear_*.cu``, and with the delta rule two others.

Without the delta rule updates are values, so nothing but the matrix goes from chunk to chunk. Three launches:
decays of all chunks, the matrix at each chunk's start, and then all results at once. What the first two leave
is all that gradients need of a forward.

With it (``delta_begin.cu``, ``delta_chunks.cu``) there are two: what chunks need of keys, queries and decays,
and then all else, from chunk to chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.backends.arch import SM_80
from samebits.backends.cuda import compiler, runtime
from samebits.backends.cuda.delta_schedules import (
    SCORE_BYTES,
    SYSTEM_BYTES,
    DeltaChunks,
    Linear,
    LinearRows,
    LinearStates,
    choose_chunks,
    choose_linear,
    padded_size,
)
from samebits.backends.cuda.operands import TYPES, address
from samebits.backends.delta import Delta, layout
from samebits.backends.recurrent import CHUNK

__all__ = ["BEGIN", "DELTA_BEGIN", "kernel_spec", "run"]

BEGIN, DELTA_BEGIN = "linear_begin", "delta_begin"
"""Kernels without schedules."""
_BEGINNING = 4
"""Warps of their blocks; in the first each has a head."""
_PARAMS = "19P13q13if"
"""``struct Params`` of ``include/linear.cuh``."""
Part = DeltaChunks | LinearStates | LinearRows | str


def kernel_spec(
    part: Part,
    dtype: torch.dtype,
    key_size: int,
    *,
    hardware_exp2: bool,
    weighted: bool = False,
    keep: bool = False,
) -> compiler.KernelSpec:
    """The kernel that has a schedule of this class, or one of those without, by its name.

    `key_size` is a multiple of 16; rows have weights if `weighted`; `keep` is for gradients.
    """
    name, warps, smem, helpers = "", _BEGINNING, 0, 0
    more: tuple[tuple[str, int | str], ...] = (("WEIGHTED", int(weighted)),)
    if isinstance(part, str):
        name = part
        if name == DELTA_BEGIN:
            smem = CHUNK * (2 * (2 - keep) * (key_size + 8) + 8)
            more = (("KEEP", int(keep)),)
    else:
        warps = part.warps
        smem = part.memory(key_size, keep if isinstance(part, DeltaChunks) else weighted)
        more += (("STAGES", part.stages),)
        if isinstance(part, LinearStates):
            name = "linear_states"
            more += (("KEY_TILE", min(part.keys, key_size)), ("KEEP", int(keep)))
        elif isinstance(part, LinearRows):
            name = "linear_rows"
            more += (("TILE", part.tile),)
        else:
            name, helpers = "delta_chunks", warps
            more = (("STAGES", part.stages), ("KEEP", int(keep)))
    constants: tuple[tuple[str, int | str], ...] = (
        *(("TYPE", TYPES[dtype]), ("KEY_SIZE", key_size), ("WARPS", warps)),
        *(("HARDWARE_EXP2", int(hardware_exp2)), *more),
    )
    return compiler.KernelSpec(
        *(f"{name}.cu", name, _PARAMS, constants), block=32 * (warps + helpers), smem=smem, oldest=SM_80
    )


_kernel = runtime.loader(kernel_spec)


def run(
    x: Delta,
    operands: tuple[Tensor, Tensor, Tensor],
    state: Tensor | None,
    out: Tensor | None,
    closed: Tensor | None,
    records: Tensor | None,
    schedule: Linear | DeltaChunks | None,
    hardware_exp2: bool,
) -> None:
    """Results; or with `records` what gradients need of every chunk, and `state` stays as it is.

    `operands` are q, k and v, dense along rows.
    """
    q, k, v = operands
    device, dtype = q.get_device(), q.dtype
    (tokens, heads, size), (_, key_heads, key_size) = v.shape, q.shape
    sequences, group, padded = len(x.spans), heads // key_heads, padded_size(key_size)
    weighted, keep = x.weights is not None, records is not None
    if schedule is None:
        of = padded, size, sequences * heads
        schedule = (
            choose_linear(*of, weighted, device) if x.beta is None else choose_chunks(*of, keep, device)
        )
    places = tokens // CHUNK + 2 * sequences
    parts: list[Part]
    shared = 1
    if isinstance(schedule, DeltaChunks):
        parts = [DELTA_BEGIN, schedule]
        grids = [(places, heads, 1), (-(-size // (16 * schedule.warps)), heads, sequences)]
    else:
        states, rows = schedule.states, schedule.rows
        parts = [BEGIN, states, *([] if keep else [rows])]
        shared = next(n for n in range(min(rows.heads, group), 0, -1) if group % n == 0)
        tiles = -(-size // (16 * states.warps)) * -(-padded // min(states.keys, padded))
        grids = [
            (places, -(-heads // _BEGINNING), 1),
            (tiles, heads, sequences),
            (places, heads // shared, -(-size // rows.tile)),
        ]
    options = {"hardware_exp2": hardware_exp2, "weighted": weighted, "keep": keep}
    runtime.announce((kernel_spec(part, dtype, padded, **options) for part in parts), device)
    kernels = [_kernel(device, part, dtype, padded, **options) for part in parts]

    counts = opened = decays = matrices = systems = scores = None
    if state is not None:
        counts = runtime.empty((sequences,), torch.int32, device)
        opened = runtime.empty((sequences, heads, CHUNK * (key_size + size)), dtype, device)
    if x.beta is None:
        decays = runtime.empty((places, heads, (2 + weighted) * CHUNK), torch.float32, device)
        if not keep:
            matrices = runtime.empty((places, heads, padded_size(size) * padded), dtype, device)
    else:
        systems = runtime.empty((places, heads, SYSTEM_BYTES // 4), torch.float32, device)
        if not keep:
            scores = runtime.empty((places, heads, SCORE_BYTES // 4), torch.int32, device)
    initial = None if x.initial is None else x.initial.contiguous()
    own = layout("delta", heads, key_size, size, dtype, weighted=weighted)
    spans = x.spans if x.spans.shape[1] else None
    given = (
        *map(address, (q, k, v, x.g, x.beta, x.weights, x.skip, initial)),
        *map(address, (state, closed, out, spans, records)),
        *map(address, (counts, opened, decays, matrices, systems, scores)),
        *(n for t in (q, k, v) for n in t.stride()[:2]),
        *(n for t in (x.g, x.beta, x.weights) for n in ((0, 0) if t is None else t.stride())),
        own.words if state is None else state.stride(0),
        *(own.offset(name) for name in ("matrix", "keys", "updates", "decays")),
        own.offset("weights" if weighted else "decays"),
        *(key_size, size, heads, group, tokens, sequences, shared, out is not None and out.dtype != dtype),
        x.scale,
    )
    for kernel, grid in zip(kernels, grids, strict=False):
        kernel.launch(grid, *given)
