"""What comes before the kernels of delta rules: ``kernels/delta_prepare.cu``, and what all calls have."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.backends.arch import SM_80
from samebits.backends.cuda import compiler, matmul, runtime
from samebits.backends.cuda.delta_schedules import prepared_memory
from samebits.backends.cuda.linear_schedules import padded_size
from samebits.backends.cuda.operands import TYPES, address
from samebits.backends.delta import Delta, layout
from samebits.backends.recurrent import CHUNK
from samebits.contract import INTERPOLATION

__all__ = ["dense", "kernel_spec", "places_of", "prepare", "spans_of", "takes_hardware_exp2"]


def places_of(x: Delta) -> int:
    """Of chunks: see ``first_chunk`` of the kernels."""
    return x.q.shape[0] // CHUNK + 2 * len(x.spans)


def spans_of(x: Delta) -> Tensor | None:
    return x.spans if x.spans.shape[1] else None


def dense(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


def takes_hardware_exp2(tensor_core: bool, device: int) -> bool:
    return tensor_core and matmul.family(device).exp2 == INTERPOLATION


def kernel_spec(
    dtype: torch.dtype, key_size: int, *, tensor_core: bool, hardware_exp2: bool
) -> compiler.KernelSpec:
    """The kernel of ``delta_prepare.cu`` for keys of `key_size`, a multiple of 16."""
    constants = (
        *(("TYPE", TYPES[dtype]), ("TENSOR_CORE", int(tensor_core))),
        *(("KEY_SIZE", key_size), ("HARDWARE_EXP2", int(hardware_exp2))),
    )
    smem = prepared_memory(dtype, key_size)
    return compiler.KernelSpec(
        *("delta_prepare.cu", "delta_prepare", "7P7q8if", constants), block=256, smem=smem, oldest=SM_80
    )


_kernel = runtime.loader(kernel_spec)


def prepare(x: Delta, state: Tensor | None, records: Tensor | None, *, tensor_core: bool) -> Tensor:
    """What a pass over the chunks of a call with a decay for each channel multiplies: ``struct Prepared``."""
    assert x.g is not None
    device, dtype = x.q.get_device(), x.q.dtype
    q, k, g = map(dense, (x.q, x.k, x.g))
    (tokens, heads, size), (_, key_heads, key_size) = x.v.shape, q.shape
    padded, places = padded_size(key_size), places_of(x)
    floats, stored = CHUNK * (padded + CHUNK) + padded, CHUNK * (CHUNK + 3 * padded)
    each = floats + stored * dtype.itemsize // 4
    found = runtime.empty((places * heads * each,), torch.float32, device)
    kernel = _kernel(
        device, dtype, padded, tensor_core=tensor_core, hardware_exp2=takes_hardware_exp2(tensor_core, device)
    )
    own = layout("delta", heads, key_size, size, dtype, True)
    kernel.launch(
        (places, heads, 1),
        *map(address, (q, k, g, state, found, records, spans_of(x))),
        *(n for t in (q, k, g) for n in t.stride()[:2]),
        own.words if state is None else state.stride(0),
        *(own.offset("keys"), own.offset("decays")),
        *(key_size, size, heads, heads // key_heads, tokens, len(x.spans)),
        1.0 if records is None else x.scale,
    )
    return found
