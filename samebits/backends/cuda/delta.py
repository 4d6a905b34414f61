"""Delta rules and linear attention on CUDA tensors: ``kernels/delta*.cu``.

``delta.cu`` computes every forward. Where each sequence has one token, ``delta_step.cu`` is faster.

Gradients take three launches. The forward's kernel goes through the chunks again, and keeps a record of each
of them. A kernel goes through them backwards, as each needs the gradient of the next one's matrix. With both
in its record, every chunk's other gradients are computed by themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from samebits.backends import UnavailableError
from samebits.backends.arch import SM_80
from samebits.backends.cuda import compiler, devices, matmul, runtime
from samebits.backends.cuda.operands import TYPES, address
from samebits.backends.delta import Delta, layout
from samebits.backends.recurrent import CHUNK
from samebits.contract import INTERPOLATION, contract_from_key

__all__ = [
    "DeltaGradients",
    "Schedule",
    "Step",
    "backward",
    "catalogue",
    "catalogue_of_gradients",
    "catalogue_of_steps",
    "choose",
    "choose_of_gradients",
    "choose_step",
    "forward",
    "gradients_spec",
    "kernel_spec",
    "step_spec",
]

_PARAMS = "11P11q10if"
"""``struct Params`` of the forward's kernels."""

_FEW = 16
"""Tokens of a sequence, on average, up to which windows are small."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """How the kernel computes.

    Attributes:
        tile: columns of values that a block takes.
        rows: rows that it computes together: a chunk's, or 16.
        warps: in a block.
        stages: whether the next rows are copied while some are computed: 2, else 1.
    """

    tile: int
    rows: int
    warps: int
    stages: int

    def memory(self, dtype: torch.dtype, key_size: int, tensor_core: bool, by_channel: bool = False) -> int:
        """Bytes of shared memory of a block: ``struct Memory``."""
        size, pad = dtype.itemsize, 16 // dtype.itemsize
        keys, values, columns = key_size + pad, self.tile + pad, CHUNK + pad
        stored = self.stages * ((CHUNK + self.rows) * keys + self.rows * values)
        stored += 2 * self.tile * columns + self.rows * columns
        floats = self.tile * (key_size + 8) + self.rows * (CHUNK + 8 + self.tile + 8)
        floats += self.rows * (self.tile + 8) if by_channel or not tensor_core else 0
        decays, gammas = (key_size + 1, key_size) if by_channel else (1, 1)
        return stored * size + 4 * (floats + CHUNK * decays + self.stages * self.rows * (gammas + 1) + 1)


def catalogue() -> Iterator[Schedule]:
    """Every schedule, for proofs."""
    for tile in (16, 32, 64):
        yield Schedule(tile, 16, 4, 1)
        for warps, stages in ((4, 1), (8, 1), (8, 2))[tile == 64 :]:  # four warps of 64 columns spill
            yield Schedule(tile, CHUNK, warps, stages)


def choose(
    dtype: torch.dtype,
    key_size: int,
    size: int,
    blocks: int,
    few: bool,
    tensor_core: bool,
    by_channel: bool,
    device: int,
) -> Schedule:
    """The schedule for sequences times heads `blocks`, with `few` tokens each or with more."""
    info = devices.device_info(device)
    if few:
        wanted = [Schedule(tile, 16, 4, 1) for tile in (32, 16)]
    else:
        wide = blocks * -(-size // 64) >= info.sm_count
        tiles = (64, 32, 16) if wide and size > 32 else (32, 16)
        wanted = [Schedule(tile, CHUNK, 8, stages) for tile in tiles for stages in (2, 1)]
        wanted.append(Schedule(16, 16, 4, 1))
    for schedule in wanted:
        if schedule.memory(dtype, key_size, tensor_core, by_channel) <= info.max_smem:
            return schedule
    raise UnavailableError(
        f"samebits' CUDA kernel for delta rules does not take keys of {key_size} in {dtype} on this GPU — use"
        " CPU tensors"
    )


@dataclass(frozen=True, slots=True)
class Step:
    """How the kernel for one token of each sequence computes.

    Attributes:
        tile: columns of values that a block takes.
    """

    tile: int

    def memory(self, dtype: torch.dtype, key_size: int) -> int:
        """Bytes of shared memory of a block: ``struct Memory``."""
        keys, columns = (n + 16 // dtype.itemsize for n in (key_size, self.tile))
        stored = CHUNK * (keys + columns) + 2 * keys + CHUNK + self.tile
        return stored * dtype.itemsize + 4 * (2 * CHUNK + self.tile)


_STEP_KEYS = 256
"""The largest keys of that kernel: it is unrolled along them."""


def catalogue_of_steps() -> Iterator[Step]:
    """Every schedule, for proofs."""
    yield from map(Step, (32, 64, 128))


def choose_step(size: int, blocks: int, device: int) -> Step:
    """The schedule for sequences times heads `blocks`: wide tiles, if all multiprocessors have one."""
    sm_count = devices.device_info(device).sm_count
    for tile in (128, 64):
        if size > tile // 2 and blocks * -(-size // tile) >= sm_count:
            return Step(tile)
    return Step(32)


def _is_step(x: Delta, q: Tensor, k: Tensor, state: Tensor | None, out: Tensor | None) -> bool:
    """Whether that kernel takes a call: a token for each sequence, and memory to be read by words."""
    if state is None or out is None or x.by_channel or x.spans.shape[1] or len(x.spans) != len(q):
        return False
    key_size, size = q.shape[2], x.v.shape[2]
    pairs = functools.reduce(int.__or__, (n for t in (q, k) for n in (t.data_ptr() // 2, *t.stride()[:2])))
    lines = state.data_ptr() | 4 * state.stride(0) | out.data_ptr()
    whole = key_size % 16 == 0 and key_size <= _STEP_KEYS and size % 8 == 0
    return whole and not (pairs & 1 or lines & 15)


def kernel_spec(
    schedule: Schedule,
    dtype: torch.dtype,
    key_size: int,
    *,
    tensor_core: bool,
    hardware_exp2: bool,
    delta: bool,
    vector: bool,
    by_channel: bool = False,
    keep: bool = False,
) -> compiler.KernelSpec:
    """The kernel of ``delta.cu`` for keys of `key_size`, a multiple of 16."""
    constants = (
        ("TYPE", TYPES[dtype]),
        ("TENSOR_CORE", int(tensor_core)),
        ("KEY_SIZE", key_size),
        ("TILE", schedule.tile),
        ("ROWS", schedule.rows),
        ("WARPS", schedule.warps),
        ("STAGES", schedule.stages),
        ("HARDWARE_EXP2", int(hardware_exp2)),
        ("DELTA", int(delta)),
        ("VECTOR", int(vector)),
        ("BY_CHANNEL", int(by_channel)),
        ("KEEP", int(keep)),
    )
    return compiler.KernelSpec(
        "delta.cu",
        "delta",
        _PARAMS,
        constants,
        block=32 * schedule.warps,
        smem=-(-schedule.memory(dtype, key_size, tensor_core, by_channel) // 16) * 16,
        oldest=SM_80,
    )


_kernel = runtime.loader(kernel_spec)


def step_spec(
    schedule: Step, dtype: torch.dtype, key_size: int, size: int, *, hardware_exp2: bool, delta: bool
) -> compiler.KernelSpec:
    """The kernel of ``delta_step.cu``."""
    constants = (
        *(("TYPE", TYPES[dtype]), ("KEY_SIZE", key_size), ("VALUE_SIZE", size), ("TILE", schedule.tile)),
        *(("HARDWARE_EXP2", int(hardware_exp2)), ("DELTA", int(delta))),
    )
    smem = -(-schedule.memory(dtype, key_size) // 16) * 16
    return compiler.KernelSpec(
        "delta_step.cu", "delta_step", _PARAMS, constants, block=128, smem=smem, oldest=SM_80
    )


_step_kernel = runtime.loader(step_spec)


def forward(
    x: Delta,
    state: Tensor | None,
    out: Tensor,
    closed: Tensor | None,
    schedule: Schedule | Step | None = None,
) -> None:
    """See :mod:`samebits.backends.delta`."""
    if len(x.spans) and (x.v.shape[0] or state is not None or closed is not None):
        _run(x, state, out, closed, None, schedule)


def _run(
    x: Delta,
    state: Tensor | None,
    out: Tensor | None,
    closed: Tensor | None,
    records: Tensor | None,
    schedule: Schedule | Step | None,
) -> None:
    """Results, or with `records` what gradients need of every chunk."""
    device = x.q.get_device()
    matmul.check_contract(x.contract, device)
    tensor_core = contract_from_key(x.contract).step == "mma"
    q, k, v = map(_dense, (x.q, x.k, x.v))
    tokens, heads, size = v.shape
    key_heads, key_size = q.shape[1:]
    sequences = len(x.spans)
    low = functools.reduce(
        int.__or__,
        (t.data_ptr() | t.stride(0) * t.itemsize | t.stride(1) * t.itemsize for t in (q, k, v)),
        size * v.itemsize,  # the first column of a tile
    )
    padded = _padded(key_size)
    if schedule is None and tensor_core and closed is None and _is_step(x, q, k, state, out):
        schedule = choose_step(size, sequences * heads, device)
    elif schedule is None:
        few = tokens <= _FEW * sequences
        schedule = choose(x.q.dtype, padded, size, sequences * heads, few, tensor_core, x.by_channel, device)
    hardware_exp2, delta = _hardware_exp2(tensor_core, device), x.beta is not None
    if isinstance(schedule, Step):
        kernel = _step_kernel(
            *(device, schedule, x.q.dtype, key_size, size), hardware_exp2=hardware_exp2, delta=delta
        )
    else:
        kernel = _kernel(
            *(device, schedule, x.q.dtype, padded),
            tensor_core=tensor_core,
            hardware_exp2=hardware_exp2,
            delta=delta,
            vector=not low & 15,
            by_channel=x.by_channel,
            keep=records is not None,
        )
    initial = None if x.initial is None else x.initial.contiguous()
    own = layout("delta", heads, key_size, size, x.q.dtype, x.by_channel)
    strides = [n for t in (q, k, v) for n in t.stride()[:2]]
    g = x.g if x.g is None or not x.by_channel else _dense(x.g)
    strides += [n for t in (g, x.beta) for n in ((0, 0) if t is None else t.stride()[:2])]
    kernel.launch(
        (-(-size // schedule.tile), heads, sequences),
        *map(address, (q, k, v, g, x.beta, initial, state, closed, out, _spans(x), records)),
        *strides,
        own.words if state is None else state.stride(0),
        *(own.offset(name) for name in ("matrix", "keys", "updates", "decays", "marks")),
        *(key_size, size, heads, heads // key_heads, tokens),
        x.scale,
    )


def _spans(x: Delta) -> Tensor | None:
    return x.spans if x.spans.shape[1] else None


def _dense(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


def _padded(size: int) -> int:
    return -(-size // 16) * 16


def _hardware_exp2(tensor_core: bool, device: int) -> bool:
    return tensor_core and matmul.family(device).exp2 == INTERPOLATION


# ---- gradients

_WARPS = 8


@dataclass(frozen=True, slots=True)
class DeltaGradients:
    """How the kernels of gradients compute.

    Attributes:
        tile: columns of values that a block takes, which goes through the chunks.
        staged: whether a block that computes a chunk's rows copies what it reads to shared memory.
    """

    tile: int
    staged: bool

    def memory(
        self, dtype: torch.dtype, key_size: int, size: int, tensor_core: bool, by_channel: bool = False
    ) -> tuple[int, int]:
        """Bytes of shared memory of the two kernels: ``struct Memory`` of each."""
        bytes_, pad = dtype.itemsize, 16 // dtype.itemsize
        keys, values, columns = key_size + pad, _padded(size) + pad, CHUNK + pad
        decays = CHUNK * (key_size + 1 if by_channel else 1)
        stages = 2 if tensor_core and not by_channel and key_size <= 256 else 1
        stored = stages * 2 * CHUNK * keys + 3 * self.tile * columns + CHUNK * columns
        floats = CHUNK * (CHUNK + 8) + self.tile * (key_size + 8) + CHUNK * (self.tile + 8)
        matrices = stored * bytes_ + 4 * (floats + decays + CHUNK)
        if tensor_core and self.staged and not by_channel:
            shared = max(2 * CHUNK * values * bytes_, 4 * CHUNK * (key_size + 4))
            stored = 2 * CHUNK * keys + CHUNK * values + 2 * CHUNK * columns
            return matrices, stored * bytes_ + shared + 4 * (5 * CHUNK + key_size + 4)
        stored, floats = 0, 2 * CHUNK * (key_size + 1) + decays + 2 * CHUNK + key_size
        if by_channel:
            floats += 2 * CHUNK * (CHUNK + 8)
        else:
            stored += 2 * CHUNK * columns
        if self.staged or by_channel:
            stored += 2 * CHUNK * keys
        if self.staged:
            stored += 3 * CHUNK * values + (0 if by_channel else key_size * values)
        rows = stored * bytes_ + 4 * floats
        return matrices, rows


def catalogue_of_gradients() -> Iterator[DeltaGradients]:
    """Every schedule, for proofs."""
    for tile in (16, 32, 64):
        yield from (DeltaGradients(tile, staged) for staged in (True, False))


def choose_of_gradients(
    dtype: torch.dtype,
    key_size: int,
    size: int,
    blocks: int,
    tensor_core: bool,
    by_channel: bool,
    device: int,
) -> DeltaGradients:
    """The schedule for sequences times heads `blocks`."""
    info = devices.device_info(device)
    wide = blocks * -(-size // 64) >= info.sm_count and size > 32
    operands = dtype, key_size, size, tensor_core, by_channel
    staged = DeltaGradients(16, True).memory(*operands)[1] <= info.max_smem
    for tile in (64, 32, 16) if wide else (32, 16):
        schedule = DeltaGradients(tile, staged)
        if max(schedule.memory(*operands)) <= info.max_smem:
            return schedule
    raise UnavailableError(
        f"samebits' CUDA kernels for gradients of delta rules do not take keys of {key_size} in {dtype} on"
        " this GPU — use CPU tensors"
    )


def gradients_spec(
    which: str,
    schedule: DeltaGradients,
    dtype: torch.dtype,
    key_size: int,
    size: int,
    *,
    tensor_core: bool,
    hardware_exp2: bool,
    delta: bool,
    by_channel: bool = False,
) -> compiler.KernelSpec:
    """The kernel of ``delta_matrices_backward.cu`` or ``delta_rows_backward.cu``: `which` of them."""
    constants: tuple[tuple[str, int | str], ...] = (
        *(("TYPE", TYPES[dtype]), ("TENSOR_CORE", int(tensor_core)), ("KEY_SIZE", key_size)),
        *(("WARPS", _WARPS), ("HARDWARE_EXP2", int(hardware_exp2)), ("DELTA", int(delta))),
        ("BY_CHANNEL", int(by_channel)),
    )
    if which == "matrices":
        constants += (("TILE", schedule.tile),)
    else:
        constants += (("VALUE_SIZE", _padded(size)), ("STAGED", int(schedule.staged)))
    smem = schedule.memory(dtype, key_size, size, tensor_core, by_channel)[which == "rows"]
    name = f"delta_{which}_backward"
    return compiler.KernelSpec(
        *(f"{name}.cu", name, "15P7q6if", constants),
        block=32 * _WARPS,
        smem=-(-smem // 16) * 16,
        oldest=SM_80,
    )


_gradients_kernel = runtime.loader(gradients_spec)


def _record_bytes(dtype: torch.dtype, key_size: int, size: int, by_channel: bool) -> int:
    """Of ``struct Record``."""
    decays = key_size if by_channel else 1
    floats, stored = CHUNK * (decays + 2 * size) + 2 * key_size * size, CHUNK * (key_size + 2 * size)
    return -(-(4 * floats + dtype.itemsize * stored) // 16) * 16


def backward(
    x: Delta,
    state: Tensor | None,
    grad: Tensor,
    grad_closed: Tensor | None,
    schedule: DeltaGradients | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """See :mod:`samebits.backends.delta`."""
    device, dtype = x.q.get_device(), x.q.dtype
    matmul.check_contract(x.contract, device)
    tensor_core = contract_from_key(x.contract).step == "mma"
    q, grad = map(_dense, (x.q, grad))
    (tokens, heads, size), (_, key_heads, key_size) = x.v.shape, q.shape
    sequences, group, padded = len(x.spans), heads // key_heads, _padded(key_size)

    def new(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=q.device)

    dq, dk, dv = new(q.shape, dtype), new(q.shape, dtype), new(x.v.shape, dtype)
    dg, dbeta = (None if t is None else new(t.shape) for t in (x.g, x.beta))
    dinitial = None if x.initial is None else new(x.initial.shape)
    if sequences and heads:
        if schedule is None:
            of = dtype, padded, size, sequences * heads
            schedule = choose_of_gradients(*of, tensor_core, x.by_channel, device)
        matrices, rows = (
            _gradients_kernel(
                *(device, which, schedule, dtype, padded, size),
                tensor_core=tensor_core,
                hardware_exp2=_hardware_exp2(tensor_core, device),
                delta=x.beta is not None,
                by_channel=x.by_channel,
            )
            for which in ("matrices", "rows")
        )
        places = tokens // CHUNK + 2 * sequences
        records = torch.empty(
            places * heads * _record_bytes(dtype, key_size, size, x.by_channel),
            dtype=torch.uint8,
            device=q.device,
        )
        _run(x, None if state is None else state.clone(), None, None, records, None)
        own = layout("delta", heads, key_size, size, dtype, x.by_channel)
        closed = None if grad_closed is None else grad_closed.to(torch.float32).contiguous()
        sums = (new(q.shape), new(q.shape)) if group > 1 else (None, None)
        tensors = (q, grad, x.beta, state, closed, records, dv, dq, dk, *sums, dg, dbeta, dinitial, _spans(x))
        given = (
            *map(address, tensors),
            *(n for t in (q, grad) for n in t.stride()[:2]),
            *((0, 0) if x.beta is None else x.beta.stride()),
            own.words if state is None else state.stride(0),
            *(key_size, size, heads, group, tokens, sequences),
            x.scale,
        )
        matrices.launch((-(-size // schedule.tile), heads, sequences), *given)
        rows.launch((places, key_heads, 1), *given)
    return dq, dk, dv, dg, dbeta, dinitial
