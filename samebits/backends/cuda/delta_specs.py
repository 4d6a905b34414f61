"""The CUDA kernels of delta rules: ``kernels/delta.cu``, those of one step, and those of gradients."""

from __future__ import annotations

import torch

from samebits.backends.arch import SM_80
from samebits.backends.cuda import compiler, ssd_steps
from samebits.backends.cuda.delta_schedules import (
    DeltaGradients,
    Schedule,
    Step,
    chains_memory,
)
from samebits.backends.cuda.linear_schedules import padded_size
from samebits.backends.cuda.operands import TYPES
from samebits.backends.recurrent import CHUNK

__all__ = ["gradients_spec", "kernel_spec", "step_spec", "sums_spec"]

_PARAMS = "13P13q12ifP"
"""``struct Params`` of the forward's kernels."""


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
    weighted: bool = False,
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
        ("WEIGHTED", int(weighted)),
        ("KEEP", int(keep)),
    )
    return compiler.KernelSpec(
        "delta.cu",
        "delta",
        _PARAMS,
        constants,
        block=32 * schedule.warps,
        smem=-(-schedule.memory(dtype, key_size, tensor_core, by_channel, weighted) // 16) * 16,
        oldest=SM_80,
    )


def step_spec(
    schedule: Step,
    dtype: torch.dtype,
    key_size: int,
    size: int,
    *,
    hardware_exp2: bool,
    delta: bool,
    by_channel: bool = False,
    weighted: bool = False,
    steps: ssd_steps.Form | None = None,
    programmatic: bool = False,
) -> compiler.KernelSpec:
    """The kernel for one token of each sequence; with `steps`, one that has what Mamba 2 needs of them."""
    constants: tuple[tuple[str, int | str], ...] = (
        *(("TYPE", TYPES[dtype]), ("KEY_SIZE", key_size), ("VALUE_SIZE", size), ("TILE", schedule.tile)),
        *(("HARDWARE_EXP2", int(hardware_exp2)), ("DELTA", int(delta)), ("BY_CHANNEL", int(by_channel))),
        *(("WEIGHTED", int(weighted)), ("WARPS", schedule.warps)),
        *(() if steps is None else ssd_steps.constants_of(*steps)),
    )
    smem = -(-schedule.memory(dtype, key_size, by_channel) // 16) * 16
    entry = "delta_step" + schedule.few * ("_few_channels" if by_channel else "_few")
    return compiler.KernelSpec(
        *(f"{entry}.cu", entry, _PARAMS + ("" if steps is None else ssd_steps.PARAMS), constants),
        block=32 * schedule.warps,
        smem=smem,
        # More blocks than multiprocessors fill these unevenly if they begin early.
        programmatic=programmatic and (schedule.few or schedule.tile == (64 if by_channel else 32)),
        oldest=SM_80,
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
    weighted: bool = False,
    lacks: bool = False,
) -> compiler.KernelSpec:
    """The kernel of ``delta_WHICH_backward.cu``: `which` is scores, matrices, chains or rows.

    `lacks` says that no rounded matrices are in the records that the first pass has left.
    """
    warps = schedule.warps(which, tensor_core, by_channel)
    constants: tuple[tuple[str, int | str], ...] = (
        *(("TYPE", TYPES[dtype]), ("TENSOR_CORE", int(tensor_core)), ("KEY_SIZE", key_size)),
        *(("WARPS", warps), ("HARDWARE_EXP2", int(hardware_exp2)), ("DELTA", int(delta))),
        *(("BY_CHANNEL", int(by_channel)), ("WEIGHTED", int(weighted))),
    )
    if which == "matrices":
        constants += (("TILE", schedule.tile), ("STAGES", schedule.stages))
        constants += (("REGISTERS", 1),) if schedule.registers else ()
    elif which == "rows":
        constants += (("VALUE_SIZE", padded_size(size)), ("STAGED", int(schedule.staged)))
    elif which == "chains":
        constants += (("VALUE_SIZE", padded_size(size)), ("RIGHTS", 2 * (not schedule.registers) + lacks))
    matrices, rows = schedule.memory(dtype, key_size, size, tensor_core, by_channel)
    smem = {
        "matrices": matrices,
        "rows": rows,
        "scores": CHUNK * (4 * (key_size + 8) + 4),
        "chains": chains_memory(size),
    }[which]
    name = f"delta_{which}_backward"
    return compiler.KernelSpec(
        *(f"{name}.cu", name, "17P7q6ifP" + "P" * by_channel, constants),
        block=32 * warps,
        smem=-(-smem // 16) * 16,
        oldest=SM_80,
    )


def sums_spec(dtype: torch.dtype, each: int) -> compiler.KernelSpec:
    """The kernel of ``delta_sums_backward.cu``, whose threads have so many neighbours."""
    constants = (("TYPE", TYPES[dtype]), ("WARPS", 8), ("EACH", each))
    return compiler.KernelSpec("delta_sums_backward.cu", "delta_sums_backward", "3P2iq", constants, block=256)
