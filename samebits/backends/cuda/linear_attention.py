"""Linear attention by chunks on CUDA tensors: ``kernels/linear_*.cu``, and with the delta rule two others.

Without the delta rule updates are values, so nothing but the matrix goes from chunk to chunk. Three launches:
decays of all chunks, the matrix at each chunk's start, and then all results at once. Gradients take the first
two again. Then one goes through the chunks backwards, for the gradient of the matrix at each chunk's end, and
all other gradients are computed at once.

With it (``delta_begin.cu``, ``delta_chunks.cu``) there are two: what chunks need of keys, queries and decays,
and then all else, from chunk to chunk. With a decay for each channel
:mod:`samebits.backends.cuda.delta_prepare` has the first. The second also leaves z of each row where
gradients are recorded. From it ``delta_states.cu`` knows all updates: it goes through the chunks again, and
leaves records for :mod:`samebits.backends.cuda.delta`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from samebits.backends.arch import SM_80
from samebits.backends.cuda import compiler, runtime
from samebits.backends.cuda.delta_prepare import Prepared, places_of, prepare, spec_of
from samebits.backends.cuda.delta_schedules import (
    SCORE_BYTES,
    DeltaChunks,
    DeltaStates,
    choose_chunks,
    choose_states,
    system_bytes,
)
from samebits.backends.cuda.linear_schedules import (
    Linear,
    LinearGradients,
    LinearRows,
    LinearStates,
    choose_linear,
    padded_size,
)
from samebits.backends.cuda.operands import TYPES, address
from samebits.backends.delta import Delta, layout
from samebits.backends.recurrent import CHUNK

__all__ = [
    "BEGIN",
    "DELTA_BEGIN",
    "backward",
    "gradients_spec",
    "kernel_spec",
    "leave_records",
    "record_specs",
    "run",
]

BEGIN, DELTA_BEGIN = "linear_begin", "delta_begin"
"""Kernels without schedules."""
_BEGINNING = 4
"""Warps of their blocks; in the first each has a head."""
_PARAMS = "20P13q13if"
"""``struct Params`` of ``include/linear.cuh``."""
_GRADIENTS = "12P2q"
"""``struct Gradients``."""
Part = DeltaChunks | LinearStates | LinearRows | str


def kernel_spec(
    part: Part,
    dtype: torch.dtype,
    key_size: int,
    *,
    hardware_exp2: bool,
    weighted: bool = False,
    keep: bool = False,
    by_channel: bool = False,
) -> compiler.KernelSpec:
    """The kernel that has a schedule of this class, or one of those without, by its name.

    `key_size` is a multiple of 16; rows have weights if `weighted`; `keep` is for gradients, of which it has
    matrices, or is to leave z; channels have decays of their own if `by_channel`, with the delta rule alone.
    """
    name, warps, smem, threads = "", _BEGINNING, 0, 32 * _BEGINNING
    more: tuple[tuple[str, int | str], ...] = (("WEIGHTED", int(weighted)),)
    if isinstance(part, str):
        name = part
        if name == DELTA_BEGIN:
            smem, more = CHUNK * (4 * (key_size + 8) + 8), ()
    else:
        warps, threads = part.warps, 32 * part.warps
        more += (("STAGES", part.stages),)
        if isinstance(part, (DeltaChunks, DeltaStates)):
            smem = part.memory(key_size, by_channel)
            more = (("STAGES", part.stages), ("BY_CHANNEL", int(by_channel)))
        if isinstance(part, DeltaChunks):
            name, threads = "delta_chunks", part.threads
            more += (("LEAVES_Z", int(keep)),)
        elif isinstance(part, DeltaStates):
            name = "delta_states"
            more += (("KEY_TILE", min(part.keys, key_size)),)
        elif isinstance(part, LinearStates):
            name, smem = "linear_states", part.memory(key_size, weighted)
            more += (("KEY_TILE", min(part.keys, key_size)), ("GRADIENTS", int(keep)))
        else:
            name, smem = "linear_rows", part.memory(key_size, weighted)
            more += (("TILE", part.tile),)
    constants: tuple[tuple[str, int | str], ...] = (
        *(("TYPE", TYPES[dtype]), ("KEY_SIZE", key_size), ("WARPS", warps)),
        *(("HARDWARE_EXP2", int(hardware_exp2)), *more),
    )
    params = _PARAMS + (_GRADIENTS if name == "linear_states" and keep else "P" if by_channel else "")
    return compiler.KernelSpec(
        *(f"{name}.cu", name, params, constants), block=threads, smem=smem, oldest=SM_80
    )


_kernel = runtime.loader(kernel_spec)


def gradients_spec(
    which: str,
    schedule: LinearGradients,
    dtype: torch.dtype,
    key_size: int,
    size: int,
    *,
    hardware_exp2: bool,
    weighted: bool,
) -> compiler.KernelSpec:
    """The kernel of ``linear_WHICH_backward.cu``: `which` is matrices, values or rows."""
    constants: tuple[tuple[str, int | str], ...] = (
        *(("TYPE", TYPES[dtype]), ("KEY_SIZE", key_size), ("WARPS", schedule.warps(which, size))),
        *(("HARDWARE_EXP2", int(hardware_exp2)), ("WEIGHTED", int(weighted)), ("GRADIENTS", 1)),
        ("VALUE_SIZE", padded_size(size)),
    )
    if which == "matrices":
        constants += (("KEY_TILE", min(schedule.keys, key_size)), ("STAGES", schedule.stages))
    elif which == "values":
        constants += (("TILE", schedule.tile(size)),)
    name = f"linear_{which}_backward"
    return compiler.KernelSpec(
        *(f"{name}.cu", name, _PARAMS + _GRADIENTS, constants),
        block=schedule.threads(which, key_size, size),
        smem=-(-schedule.memory(which, key_size, size, weighted) // 16) * 16,
        oldest=SM_80,
    )


_gradients_kernel = runtime.loader(gradients_spec)


def _tiles(states: LinearStates, key_size: int, size: int) -> int:
    """Blocks of a head in a sequence."""
    return -(-size // (16 * states.warps)) * -(-key_size // min(states.keys, key_size))


def _shared(most: int, group: int) -> int:
    """Heads of a block, of those that share one of keys."""
    return next(n for n in range(min(most, group), 0, -1) if group % n == 0)


def _given(
    x: Delta,
    operands: tuple[Tensor, Tensor, Tensor],
    state: Tensor | None,
    own: dict[str, Tensor | None],
    shared: int = 1,
) -> tuple[int | float, ...]:
    """``struct Params``, with those tensors of a call's `own` that are there."""
    q, k, v = operands
    device, dtype = q.get_device(), q.dtype
    (tokens, heads, size), (_, key_heads, key_size) = v.shape, q.shape
    sequences, weighted, out = len(x.spans), x.weights is not None, own.get("out")
    if state is not None and not x.by_channel:
        own["counts"] = runtime.empty((sequences,), torch.int32, device)
        own["opened"] = runtime.empty((sequences, heads, CHUNK * (key_size + size)), dtype, device)
    own["initial"] = None if x.initial is None else x.initial.contiguous()
    spans = x.spans if x.spans.shape[1] else None
    left = "counts", "opened", "decays", "matrices", "systems", "scores", "z"
    words = layout("delta", heads, key_size, size, dtype, x.by_channel, weighted)
    return (
        *map(address, (q, k, v, x.g, x.beta, x.weights, x.skip, own["initial"])),
        *map(address, (state, own.get("closed"), out, spans, own.get("records"))),
        *(address(own.get(name)) for name in left),
        *(n for t in (q, k, v) for n in t.stride()[:2]),
        *(n for t in (x.g, x.beta, x.weights) for n in ((0, 0) if t is None else t.stride()[:2])),
        words.words if state is None else state.stride(0),
        *(words.offset(name) for name in ("matrix", "keys", "updates", "decays")),
        words.offset("weights" if weighted else "decays"),
        *(key_size, size, heads, heads // key_heads, tokens, sequences, shared),
        *(out is not None and out.dtype != dtype, x.scale),
    )


def _specs(
    x: Delta, parts: tuple[Part, ...], options: dict[str, bool], records: bool
) -> Iterator[compiler.KernelSpec]:
    """The kernels of a call, or of one for records."""
    if x.by_channel:
        yield spec_of(x, tensor_core=True, systems=True, keep=records)
    for part in parts:
        yield kernel_spec(part, x.q.dtype, padded_size(x.q.shape[2]), **options)


def _options(x: Delta, hardware_exp2: bool, keep: bool = False) -> dict[str, bool]:
    options = {"hardware_exp2": hardware_exp2, "weighted": x.weights is not None, "keep": keep}
    return options | {"by_channel": x.by_channel}


def _schedule_of(x: Delta) -> Linear | DeltaChunks:
    device, padded, (_, heads, size) = x.q.get_device(), padded_size(x.q.shape[2]), x.v.shape
    if x.beta is None:
        return choose_linear(padded, size, x.weights is not None, device)
    return choose_chunks(padded, size, len(x.spans) * heads, x.by_channel, device)


def _parts_of(x: Delta, schedule: Linear | DeltaChunks) -> tuple[Part, ...]:
    if not isinstance(schedule, DeltaChunks):
        return BEGIN, schedule.states, schedule.rows
    return (schedule,) if x.by_channel else (DELTA_BEGIN, schedule)


def run(
    x: Delta,
    operands: tuple[Tensor, Tensor, Tensor],
    state: Tensor | None,
    out: Tensor | None,
    closed: Tensor | None,
    z: Tensor | None,
    schedule: Linear | DeltaChunks | None,
    hardware_exp2: bool,
) -> None:
    """Results, of `operands` q, k and v, dense along rows; with the delta rule `z`, too, if it is there."""
    q, _, v = operands
    device, dtype = q.get_device(), q.dtype
    (tokens, heads, size), (_, key_heads, key_size) = v.shape, q.shape
    sequences, padded = len(x.spans), padded_size(key_size)
    weighted, schedule = x.weights is not None, schedule or _schedule_of(x)
    options = _options(x, hardware_exp2, z is not None)
    places, shared, parts = tokens // CHUNK + 2 * sequences, 1, _parts_of(x, schedule)
    runtime.announce(_specs(x, parts, options, False), device)
    prepared = prepare(x, state, None, tensor_core=True, systems=True) if x.by_channel else None
    own = {"out": out, "closed": closed, "z": z}

    def leave(name: str, words: int, dtype: torch.dtype = torch.float32) -> None:
        own[name] = runtime.empty((places, heads, words), dtype, device)

    if isinstance(schedule, DeltaChunks):
        grids = [(places, heads, 1), (-(-size // (16 * schedule.warps)), heads, sequences)]
        if prepared is not None:
            grids = grids[1:]
            own |= {name: getattr(prepared, name) for name in ("systems", "scores", "counts")}
        else:
            leave("systems", system_bytes(False) // 4)
            leave("scores", SCORE_BYTES // 4)
    else:
        states, rows = schedule.states, schedule.rows
        shared = _shared(rows.heads, heads // key_heads)
        grids = [
            (places, -(-heads // _BEGINNING), 1),
            (_tiles(states, padded, size), heads, sequences),
            (places, heads // shared, -(-size // rows.tile)),
        ]
        leave("decays", (2 + weighted) * CHUNK)
        leave("matrices", padded_size(size) * padded, dtype)
    kernels = [_kernel(device, part, dtype, padded, **options) for part in parts]
    given = _given(x, operands, state, own, shared)
    if prepared is not None:
        given += (address(prepared.chunks),)
    for kernel, grid in zip(kernels, grids, strict=True):
        kernel.launch(grid, *given)


def _parts_of_records(x: Delta) -> tuple[str | DeltaStates, ...]:
    schedule = choose_states(padded_size(x.q.shape[2]), x.by_channel, x.q.get_device())
    return (schedule,) if x.by_channel else (BEGIN, schedule)


def record_specs(x: Delta, hardware_exp2: bool) -> Iterator[compiler.KernelSpec]:
    """The kernels that :func:`leave_records` takes, and the one before it."""
    return _specs(x, _parts_of_records(x), _options(x, hardware_exp2), True)


def leave_records(
    x: Delta,
    operands: tuple[Tensor, Tensor, Tensor],
    state: Tensor | None,
    z: Tensor,
    records: Tensor,
    hardware_exp2: bool,
    prepared: Prepared | None,
) -> None:
    """What gradients of the delta rule need of every chunk, from z of the forward; `state` stays as it is."""
    q, _, v = operands
    device, (_, heads, size), padded = q.get_device(), v.shape, padded_size(q.shape[2])
    places, (*begin, states) = places_of(x), _parts_of_records(x)
    assert isinstance(states, DeltaStates)
    own: dict[str, Tensor | None] = {"z": z, "records": records}
    if prepared is not None:
        own["counts"] = prepared.counts
    else:
        own["decays"] = runtime.empty((places, heads, 2 * CHUNK), torch.float32, device)
    grids = [(places, -(-heads // _BEGINNING), 1)] * len(begin)
    grids.append((_tiles(states, padded, size), heads, len(x.spans)))
    given = _given(x, operands, state, own)
    if prepared is not None:
        given += (address(prepared.chunks),)
    for part, grid in zip((*begin, states), grids, strict=True):
        _kernel(device, part, q.dtype, padded, **_options(x, hardware_exp2)).launch(grid, *given)


def backward(
    x: Delta,
    operands: tuple[Tensor, Tensor, Tensor],
    state: Tensor | None,
    grads: tuple[Tensor, Tensor | None],
    found: dict[str, Tensor | None],
    schedule: LinearGradients,
    hardware_exp2: bool,
) -> None:
    """Gradients without the delta rule, from `grads` of results and of the matrices after the last tokens.

    `found` has dq, dk, dv, dg, dweights and dinitial, or None; and, where heads share keys, "rows", which
    gets dq and dk of each head.
    """
    q, _, v = operands
    device, dtype = q.get_device(), q.dtype
    (tokens, heads, size), (_, key_heads, key_size) = v.shape, q.shape
    sequences, padded, weighted = len(x.spans), padded_size(key_size), x.weights is not None
    places, shared = tokens // CHUNK + 2 * sequences, _shared(schedule.heads, heads // key_heads)
    options = {"hardware_exp2": hardware_exp2, "weighted": weighted}
    names = "matrices", "values", "rows"
    runtime.announce(
        (
            kernel_spec(BEGIN, dtype, padded, **options),
            kernel_spec(schedule.states, dtype, padded, **options, keep=True),
            *(gradients_spec(name, schedule, dtype, padded, size, **options) for name in names),
        ),
        device,
    )
    begin = _kernel(device, BEGIN, dtype, padded, **options)
    kernels = [_kernel(device, schedule.states, dtype, padded, **options, keep=True)]
    for name in names:
        kernels.append(_gradients_kernel(device, name, schedule, dtype, padded, size, **options))

    def leave(*words: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return runtime.empty((places, heads, *words), dtype, device)

    entries = padded_size(size) * padded
    own: dict[str, Tensor | None] = {"decays": leave((2 + weighted) * CHUNK)}
    own["matrices"], of_matrices = leave(entries, dtype=dtype), leave(entries, dtype=dtype)
    starts, kept = (None if x.g is None else leave(n) for n in (entries, key_size))
    given = _given(x, operands, state, own, shared)
    more = (
        *map(address, (*grads, starts, of_matrices, kept)),
        *(address(found[name]) for name in ("rows", "dq", "dk", "dv", "dg", "dweights", "dinitial")),
        *grads[0].stride()[:2],
    )
    grids = (
        (_tiles(schedule.states, padded, size), heads, sequences),
        (-(-padded // min(schedule.keys, padded)), heads, sequences),
        (places, heads // shared, 1),
        (places, heads, 1),
    )
    begin.launch((places, -(-heads // _BEGINNING), 1), *given)
    for kernel, grid in zip(kernels, grids, strict=True):
        kernel.launch(grid, *given, *more)
