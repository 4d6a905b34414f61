"""Delta rules and linear attention on CUDA tensors: host side of ``kernels/delta.cu``."""

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

__all__ = ["Schedule", "backward", "catalogue", "choose", "forward", "kernel_spec"]

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

    def memory(self, dtype: torch.dtype, key_size: int, tensor_core: bool) -> int:
        """Bytes of shared memory of a block: ``struct Memory``."""
        size, pad = dtype.itemsize, 16 // dtype.itemsize
        keys, values, columns = key_size + pad, self.tile + pad, CHUNK + pad
        stored = self.stages * ((CHUNK + self.rows) * keys + self.rows * values)
        stored += 2 * self.tile * columns + self.rows * columns
        floats = self.tile * (key_size + 8) + self.rows * (CHUNK + 8 + self.tile + 8)
        floats += 0 if tensor_core else self.rows * (self.tile + 8)
        return stored * size + 4 * (floats + CHUNK + 2 * self.stages * self.rows + 1)


def catalogue() -> Iterator[Schedule]:
    """Every schedule, for proofs."""
    for tile in (16, 32, 64):
        yield Schedule(tile, 16, 4, 1)
        for warps, stages in ((4, 1), (8, 1), (8, 2)):
            yield Schedule(tile, CHUNK, warps, stages)


def choose(
    dtype: torch.dtype, key_size: int, size: int, blocks: int, few: bool, tensor_core: bool, device: int
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
        if schedule.memory(dtype, key_size, tensor_core) <= info.max_smem:
            return schedule
    raise UnavailableError(
        f"samebits' CUDA kernel for delta rules does not take keys of {key_size} in {dtype} on this GPU — use"
        " CPU tensors"
    )


def kernel_spec(
    schedule: Schedule,
    dtype: torch.dtype,
    key_size: int,
    *,
    tensor_core: bool,
    hardware_exp2: bool,
    delta: bool,
    vector: bool,
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
    )
    return compiler.KernelSpec(
        "delta.cu",
        "delta",
        "10P11q10if",
        constants,
        block=32 * schedule.warps,
        smem=-(-schedule.memory(dtype, key_size, tensor_core) // 16) * 16,
        oldest=SM_80,
    )


_kernel = runtime.loader(kernel_spec)


def forward(
    x: Delta, state: Tensor | None, out: Tensor, closed: Tensor | None, schedule: Schedule | None = None
) -> None:
    """See :mod:`samebits.backends.delta`."""
    device = x.q.get_device()
    if x.by_channel:
        raise UnavailableError(
            "samebits' CUDA kernel for delta rules does not take a decay for each channel — use CPU tensors"
        )
    matmul.check_contract(x.contract, device)
    tensor_core = contract_from_key(x.contract).step == "mma"
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (x.q, x.k, x.v))
    tokens, heads, size = v.shape
    key_heads, key_size = q.shape[1:]
    sequences = len(x.spans)
    if 0 in (sequences, tokens) and state is None and closed is None:
        return
    low = functools.reduce(
        int.__or__,
        (t.data_ptr() | t.stride(0) * t.itemsize | t.stride(1) * t.itemsize for t in (q, k, v)),
        size * v.itemsize,  # the first column of a tile
    )
    padded = -(-key_size // 16) * 16
    if schedule is None:
        few = tokens <= _FEW * max(sequences, 1)
        schedule = choose(x.q.dtype, padded, size, sequences * heads, few, tensor_core, device)
    kernel = _kernel(
        *(device, schedule, x.q.dtype, padded),
        tensor_core=tensor_core,
        hardware_exp2=tensor_core and matmul.family(device).exp2 == INTERPOLATION,
        delta=x.beta is not None,
        vector=not low & 15,
    )
    initial = None if x.initial is None else x.initial.contiguous()
    own = layout("delta", heads, key_size, size, x.q.dtype, False)
    strides = [n for t in (q, k, v) for n in t.stride()[:2]]
    strides += [n for t in (x.g, x.beta) for n in ((0, 0) if t is None else t.stride())]
    kernel.launch(
        (-(-size // schedule.tile), heads, sequences),
        *map(address, (q, k, v, x.g, x.beta, initial, state, closed, out, x.spans)),
        *strides,
        own.words if state is None else state.stride(0),
        *(own.offset(name) for name in ("matrix", "keys", "updates", "decays", "marks")),
        *(key_size, size, heads, heads // key_heads, tokens),
        x.scale,
    )


def backward(
    x: Delta, state: Tensor | None, grad: Tensor, grad_closed: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """See :mod:`samebits.backends.delta`."""
    raise UnavailableError("samebits' CUDA kernels have no gradients of delta rules — use CPU tensors")
