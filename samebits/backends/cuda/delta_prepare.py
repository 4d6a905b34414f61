"""What comes before the kernels of delta rules: ``kernels/delta_prepare.cu``, and what all calls have."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from samebits.backends.arch import SM_80
from samebits.backends.cuda import compiler, matmul, runtime
from samebits.backends.cuda.delta_schedules import SCORE_BYTES, prepared_memory, system_bytes
from samebits.backends.cuda.linear_schedules import padded_size
from samebits.backends.cuda.operands import TYPES, address
from samebits.backends.delta import Delta, layout
from samebits.backends.recurrent import CHUNK
from samebits.contract import INTERPOLATION

__all__ = [
    "Prepared",
    "dense",
    "kernel_spec",
    "places_of",
    "prepare",
    "spans_of",
    "spec_of",
    "takes_hardware_exp2",
]


def places_of(x: Delta) -> int:
    """Of chunks: see ``first_chunk`` of the kernels."""
    return x.q.shape[0] // CHUNK + 2 * len(x.spans)


def spans_of(x: Delta) -> Tensor | None:
    return x.spans if x.spans.shape[1] else None


def dense(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


def takes_hardware_exp2(tensor_core: bool, device: int) -> bool:
    return tensor_core and matmul.family(device).exp2 == INTERPOLATION


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a pass over the chunks of a call with a decay for each channel multiplies.

    Attributes:
        chunks: ``struct Prepared`` of each chunk and head.
        systems: for whole chunks, ``struct System``.
        scores: for these, but not for gradients, ``struct QueryScores``.
        counts: for these, rows of open chunks that states had.
    """

    chunks: Tensor
    systems: Tensor | None = None
    scores: Tensor | None = None
    counts: Tensor | None = None


def kernel_spec(
    dtype: torch.dtype,
    key_size: int,
    *,
    tensor_core: bool,
    hardware_exp2: bool,
    systems: bool = False,
    keep: bool = False,
) -> compiler.KernelSpec:
    """The kernel of ``delta_prepare.cu`` for keys of `key_size`, a multiple of 16."""
    constants = (
        *(("TYPE", TYPES[dtype]), ("TENSOR_CORE", int(tensor_core))),
        *(("KEY_SIZE", key_size), ("HARDWARE_EXP2", int(hardware_exp2))),
        *(("SYSTEMS", int(systems)), ("KEEP", int(keep))),
    )
    smem = prepared_memory(dtype, key_size)
    params = "7P7q8if" + ("4P2q" if systems else "")
    return compiler.KernelSpec(
        *("delta_prepare.cu", "delta_prepare", params, constants), block=256, smem=smem, oldest=SM_80
    )


_kernel = runtime.loader(kernel_spec)


def spec_of(x: Delta, *, tensor_core: bool, systems: bool, keep: bool) -> compiler.KernelSpec:
    """The kernel that :func:`prepare` takes for a call."""
    options = _options(x, tensor_core, systems, keep)
    return kernel_spec(x.q.dtype, padded_size(x.q.shape[2]), **options)


def _options(x: Delta, tensor_core: bool, systems: bool, keep: bool) -> dict[str, bool]:
    hardware_exp2 = takes_hardware_exp2(tensor_core, x.q.get_device())
    return {"tensor_core": tensor_core, "hardware_exp2": hardware_exp2, "systems": systems, "keep": keep}


def prepare(
    x: Delta, state: Tensor | None, records: Tensor | None, *, tensor_core: bool, systems: bool
) -> Prepared:
    """All of a call; with `systems` for ``delta_chunks.cu`` or ``delta_states.cu``, else for ``delta.cu``."""
    assert x.g is not None
    device, dtype, keep = x.q.get_device(), x.q.dtype, records is not None
    q, k, g = map(dense, (x.q, x.k, x.g))
    (tokens, heads, size), (_, key_heads, key_size) = x.v.shape, q.shape
    padded, places = padded_size(key_size), places_of(x)
    floats, stored = (CHUNK + 1) * padded, CHUNK * 3 * padded
    if keep or not systems:
        floats, stored = floats + CHUNK**2, stored + CHUNK**2

    def leave(words: int) -> Tensor:
        return runtime.empty((places * heads * words,), torch.float32, device)

    found = Prepared(leave(floats + stored * dtype.itemsize // 4))
    if systems:
        found = Prepared(
            found.chunks,
            leave(system_bytes(True) // 4),
            None if keep else leave(SCORE_BYTES // 4),
            None if state is None else runtime.empty((len(x.spans),), torch.int32, device),
        )
    kernel = _kernel(device, dtype, padded, **_options(x, tensor_core, systems, keep))
    own = layout("delta", heads, key_size, size, dtype, True)
    given: tuple[int, ...] = ()
    if systems:
        assert x.beta is not None
        given = *map(address, (x.beta, found.counts, found.systems, found.scores)), *x.beta.stride()
    kernel.launch(
        (places, heads, 1),
        *map(address, (q, k, g, state, found.chunks, records, spans_of(x))),
        *(n for t in (q, k, g) for n in t.stride()[:2]),
        own.words if state is None else state.stride(0),
        *(own.offset("keys"), own.offset("decays")),
        *(key_size, size, heads, heads // key_heads, tokens, len(x.spans)),
        1.0 if records is None else x.scale,
        *given,
    )
    return found
