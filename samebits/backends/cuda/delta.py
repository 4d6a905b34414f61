"""Delta rules and linear attention on CUDA tensors: ``kernels/delta*.cu``.

``delta.cu`` computes every forward. Where each sequence has one token, ``delta_step*.cu`` are faster, and
where it has many, :mod:`samebits.backends.cuda.linear_attention`. With a decay for each channel,
``delta_prepare.cu`` computes what does not depend on a state of all chunks before.

For gradients a kernel goes through the chunks again, and keeps a record of each of them: the forward's, or
where that has saved z of each row (see :func:`keeps_z`) a faster one. Another goes through them backwards, as
each needs the gradient of the next one's matrix. With both in its record, every chunk's other gradients are
computed by themselves. Without the delta rule, with tensor cores,
:mod:`samebits.backends.cuda.linear_attention` has gradients without records.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch import Tensor

from samebits.backends.cuda import linear_attention, matmul, runtime, ssd_steps
from samebits.backends.cuda.delta_prepare import (
    Prepared,
    dense,
    places_of,
    prepare,
    spans_of,
    spec_of,
    takes_hardware_exp2,
)
from samebits.backends.cuda.delta_schedules import (
    FEW,
    GRADIENT_SCORE_BYTES,
    STEP_KEYS,
    DeltaChunks,
    DeltaGradients,
    Schedule,
    Step,
    choose,
    choose_of_gradients,
    choose_step,
    record_bytes,
    takes_chunks,
)
from samebits.backends.cuda.delta_specs import gradients_spec, kernel_spec, step_spec, sums_spec
from samebits.backends.cuda.linear_schedules import (
    Linear,
    LinearGradients,
    choose_linear_gradients,
    padded_size,
)
from samebits.backends.cuda.operands import address
from samebits.backends.delta import Delta, layout
from samebits.backends.recurrent import CHUNK
from samebits.contract import contract_from_key

__all__ = ["backward", "forward", "gradients_spec", "keeps_z", "kernel_spec", "step_spec", "sums_spec"]

_MOST_SEQUENCES = 65_535
"""Of a call: blocks in a grid's third dimension."""


def _is_step(x: Delta, q: Tensor, k: Tensor, state: Tensor | None, out: Tensor | None) -> bool:
    """Whether that kernel takes a call: a token for each sequence, and memory to be read by words."""
    if state is None or out is None or x.spans.shape[1] or len(x.spans) != len(q):
        return False
    key_size, size = q.shape[2], x.v.shape[2]
    pairs = functools.reduce(int.__or__, (n for t in (q, k) for n in (t.data_ptr() // 2, *t.stride()[:2])))
    lines = state.data_ptr() | 4 * state.stride(0) | out.data_ptr()
    whole = key_size % 16 == 0 and key_size <= STEP_KEYS and size % 8 == 0
    return whole and not (pairs & 1 or lines & 15)


_kernel = runtime.loader(kernel_spec)


_step_kernel = runtime.loader(step_spec)


def forward(
    x: Delta,
    state: Tensor | None,
    out: Tensor,
    closed: Tensor | None,
    schedule: Schedule | Step | Linear | DeltaChunks | None = None,
    *,
    z: Tensor | None = None,
) -> None:
    """See :mod:`samebits.backends.delta`."""
    if len(x.spans) and (x.v.shape[0] or state is not None or closed is not None):
        _run(x, state, out, closed, None, schedule, z=z)


def keeps_z(contract: str, key_size: int, by_channel: bool, device: int) -> bool:
    """See :mod:`samebits.backends.delta`."""
    tensor_core = contract_from_key(contract).step == "mma"
    return tensor_core and takes_chunks(padded_size(key_size), by_channel, device)


def _check_sequences(x: Delta) -> None:
    if len(x.spans) > _MOST_SEQUENCES:
        raise ValueError(
            f"samebits: recurrent layers on a GPU: expected at most {_MOST_SEQUENCES:,} sequences in a call,"
            f" got {len(x.spans):,}"
        )


def _goes_by_chunks(x: Delta, tensor_core: bool) -> bool:
    """Whether :mod:`samebits.backends.cuda.linear_attention` has calls of many tokens."""
    if x.beta is None:
        return tensor_core and not x.by_channel
    return keeps_z(x.contract, x.q.shape[2], x.by_channel, x.q.get_device())


def _run(
    x: Delta,
    state: Tensor | None,
    out: Tensor | None,
    closed: Tensor | None,
    records: Tensor | None,
    schedule: Schedule | Step | Linear | DeltaChunks | None,
    prepared: Prepared | None = None,
    z: Tensor | None = None,
) -> None:
    """Results, and `z` if it is there; or with `records` what gradients need of every chunk."""
    _check_sequences(x)
    device = x.q.get_device()
    matmul.check_contract(x.contract, device)
    tensor_core = contract_from_key(x.contract).step == "mma"
    q, k, v = map(dense, (x.q, x.k, x.v))
    tokens, heads, size = v.shape
    key_heads, key_size = q.shape[1:]
    sequences = len(x.spans)
    weighted = x.weighted
    low = functools.reduce(
        int.__or__,
        (t.data_ptr() | t.stride(0) * t.itemsize | t.stride(1) * t.itemsize for t in (q, k, v)),
        size * v.itemsize,  # the first column of a tile
    )
    padded = padded_size(key_size)
    hardware_exp2, delta = takes_hardware_exp2(tensor_core, device), x.beta is not None
    few = tokens <= FEW * sequences
    linear = records is None and (z is not None or not few) and _goes_by_chunks(x, tensor_core)
    if schedule is None and tensor_core and closed is z is None and _is_step(x, q, k, state, out):
        schedule = choose_step(x.q.dtype, key_size, size, sequences * heads, x.by_channel, delta, device)
    if not isinstance(schedule, Step):
        x = x.computed(ssd_steps.ssd_steps)
    if isinstance(schedule, (Linear, DeltaChunks)) or (schedule is None and linear):
        linear_attention.run(x, (q, k, v), state, out, closed, z, schedule, hardware_exp2)
        return
    if z is not None:
        raise ValueError(
            f"samebits: recurrent layers on a GPU: expected a schedule that leaves z, got {schedule}"
        )
    if schedule is None:
        of = x.q.dtype, padded, size, sequences * heads
        schedule = choose(*of, few, tensor_core, x.by_channel, device, weighted)
    if records is not None and state is not None:
        state = state.clone()  # which is updated
    rule: dict[str, Any] = {"delta": delta, "weighted": weighted, "by_channel": x.by_channel}
    rule["hardware_exp2"] = hardware_exp2
    if isinstance(schedule, Step):
        rule["steps"] = x.steps and ssd_steps.form_of(x.steps)
        kernel = _step_kernel(*(device, schedule, x.q.dtype, key_size, size), **rule)
    else:
        rule |= {"tensor_core": tensor_core, "vector": not low & 15, "keep": records is not None}
        if x.by_channel and prepared is None:
            options = {"tensor_core": tensor_core, "systems": False}
            both = (
                functools.partial(spec_of, x, **options, keep=False),
                functools.partial(kernel_spec, schedule, x.q.dtype, padded, **rule),
            )
            runtime.announce((make() for make in both), device)
            prepared = prepare(x, state, None, **options)
        kernel = _kernel(device, schedule, x.q.dtype, padded, **rule)
    initial = None if x.initial is None else x.initial.contiguous()
    own = layout("delta", heads, key_size, size, x.q.dtype, x.by_channel, weighted)
    parts = ("matrix", "keys", "updates", "decays", "weights" if weighted else "decays", "marks")
    strides = [n for t in (q, k, v) for n in t.stride()[:2]]
    g = x.g if x.g is None or not x.by_channel else dense(x.g)
    strides += [n for t in (g, x.beta, x.weights) for n in ((0, 0) if t is None else t.stride()[:2])]
    kernel.launch(
        (-(-size // schedule.tile), heads, sequences),
        *map(address, (q, k, v, g, x.beta, x.weights, x.skip, initial)),
        *map(address, (state, closed, out, spans_of(x), records)),
        *strides,
        own.words if state is None else state.stride(0),
        *(own.offset(name) for name in parts),
        *(key_size, size, heads, heads // key_heads, tokens, out is not None and out.dtype != v.dtype),
        x.scale,
        0 if prepared is None else address(prepared.chunks),
        *(() if x.steps is None else ssd_steps.values_of(x.steps)),
    )


# ---- gradients


_gradients_kernel = runtime.loader(gradients_spec)


_sums_kernel = runtime.loader(sums_spec)


def backward(
    x: Delta,
    state: Tensor | None,
    grad: Tensor,
    grad_closed: Tensor | None,
    schedule: DeltaGradients | LinearGradients | None = None,
    *,
    z: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """See :mod:`samebits.backends.delta`."""
    _check_sequences(x)
    device, dtype = x.q.get_device(), x.q.dtype
    matmul.check_contract(x.contract, device)
    tensor_core = contract_from_key(x.contract).step == "mma"
    q, grad = map(dense, (x.q, grad))
    (tokens, heads, _), (_, key_heads, key_size) = x.v.shape, q.shape
    sequences, group = len(x.spans), heads // key_heads

    whole = sequences > 0 and not x.spans.shape[1]  # every token is in a sequence

    def new(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        if whole:
            return runtime.empty(shape, dtype, device)
        return torch.zeros(shape, dtype=dtype, device=q.device)

    dq, dk, dv = new(q.shape, dtype), new(q.shape, dtype), new(x.v.shape, dtype)
    dg, dbeta, dweights = (None if t is None else new(t.shape) for t in (x.g, x.beta, x.weights))
    dinitial = None if x.initial is None else torch.zeros(x.initial.shape, device=q.device)
    if sequences and heads:
        closed = None if grad_closed is None else grad_closed.to(torch.float32).contiguous()
        rows = None if group == 1 else new((2, tokens, heads, key_size))
        found = {"dv": dv, "dq": dq, "dk": dk, "rows": rows, "dg": dg, "dbeta": dbeta, "dweights": dweights}
        found["dinitial"] = dinitial
        if schedule is None:
            schedule = _gradients_schedule(x, tensor_core)
        if isinstance(schedule, LinearGradients):
            operands = q, dense(x.k), dense(x.v)
            hardware_exp2 = takes_hardware_exp2(tensor_core, device)
            linear_attention.backward(x, operands, state, (grad, closed), found, schedule, hardware_exp2)
        else:
            if z is None and x.beta is not None and _goes_by_chunks(x, tensor_core):
                z = _z_of(x, state)
            _backward_by_records(x, q, state, (grad, closed), found, schedule, tensor_core, z)
        if rows is not None and (count := q.numel()):
            each = 4 if key_size % 4 == 0 else 1
            grid = -(-count // (256 * each)), 2, 1
            given = *map(address, (rows, dq, dk)), key_size, group, count
            _sums_kernel(device, dtype, each).launch(grid, *given)
    return dq, dk, dv, dg, dbeta, dweights, dinitial


def _z_of(x: Delta, state: Tensor | None) -> Tensor:
    """What the forward has not saved."""
    z = runtime.empty(x.v.shape, torch.float32, x.v.get_device())
    _run(
        x,
        None if state is None else state.clone(),
        torch.empty_like(z, dtype=x.v.dtype),
        None,
        None,
        None,
        z=z,
    )
    return z


def _gradients_schedule(x: Delta, tensor_core: bool) -> DeltaGradients | LinearGradients:
    device, dtype, delta = x.q.get_device(), x.q.dtype, x.beta is not None
    of = padded_size(x.q.shape[2]), x.v.shape[2], len(x.spans) * x.v.shape[1]
    if tensor_core and not delta:
        linear = choose_linear_gradients(*of, x.weights is not None, device)
        if linear is not None:
            return linear
    return choose_of_gradients(dtype, *of, tensor_core, delta, x.by_channel, device)


def _backward_by_records(
    x: Delta,
    q: Tensor,
    state: Tensor | None,
    grads: tuple[Tensor, Tensor | None],
    found: dict[str, Tensor | None],
    schedule: DeltaGradients,
    tensor_core: bool,
    z: Tensor | None,
) -> None:
    """All gradients of `found`; where heads share keys, dq and dk of each head, as its "rows".

    `z` is there where the forward saves it.
    """
    device, dtype, delta, weighted = q.get_device(), q.dtype, x.beta is not None, x.weights is not None
    (tokens, heads, size), (_, key_heads, key_size) = x.v.shape, q.shape
    sequences, group, padded = len(x.spans), heads // key_heads, padded_size(key_size)
    names = ["matrices", "rows"]
    if schedule.registers and not x.by_channel:
        names.insert(0, "scores")
    if schedule.staged and tensor_core:
        names.insert(-1, "chains")
    whole, hardware_exp2 = z is not None, takes_hardware_exp2(tensor_core, device)
    rule: dict[str, Any] = {"tensor_core": tensor_core, "hardware_exp2": hardware_exp2, "delta": delta}
    rule |= {"by_channel": x.by_channel, "weighted": weighted}
    of = schedule, dtype, padded, size
    lacks = {which: which == "chains" and not whole for which in names}
    specs = (gradients_spec(which, *of, **rule, lacks=lacks[which]) for which in names)
    again = () if z is None else linear_attention.record_specs(x, hardware_exp2)
    runtime.announce(itertools.chain(specs, again), device)  # which asks for none unless it tells somebody
    kernels = {which: _gradients_kernel(device, which, *of, **rule, lacks=lacks[which]) for which in names}
    places = places_of(x)
    records = torch.empty(
        places * heads * record_bytes(dtype, key_size, size, x.by_channel, weighted),
        dtype=torch.uint8,
        device=q.device,
    )
    prepared = left = systems = None
    if x.by_channel:
        prepared = prepare(x, state, records, tensor_core=tensor_core, systems=whole)
        left, systems = prepared.chunks, prepared.systems
        assert whole or not schedule.registers  # which takes the systems of whole chunks
    if z is None:
        _run(x, state, None, None, records, None, prepared)
    else:
        operands = q, dense(x.k), dense(x.v)
        linear_attention.leave_records(x, operands, state, z, records, hardware_exp2, prepared)
    if "scores" in names:
        left = runtime.empty((places * heads, GRADIENT_SCORE_BYTES // 4), torch.float32, device)
    own = layout("delta", heads, key_size, size, dtype, x.by_channel, weighted)
    rows = found["rows"]
    given = (
        *map(address, (q, grads[0], x.beta, x.skip, state, grads[1], records)),
        *(address(found[name]) for name in ("dv", "dq", "dk")),
        *((0, 0) if rows is None else (rows[0].data_ptr(), rows[1].data_ptr())),
        *(address(found[name]) for name in ("dg", "dbeta", "dweights", "dinitial")),
        address(spans_of(x)),
        *(n for t in (q, grads[0]) for n in t.stride()[:2]),
        *((0, 0) if x.beta is None else x.beta.stride()),
        own.words if state is None else state.stride(0),
        *(key_size, size, heads, group, tokens, sequences),
        x.scale,
        address(left),
        *((address(systems),) if x.by_channel else ()),
    )
    grids = {
        "scores": (places, heads, 1),
        "matrices": (-(-size // schedule.tile), heads, sequences),
        "chains": (places * (-(-padded // 32) + CHUNK // 32), heads, 1),
        "rows": (places, heads, 1),
    }
    for which, kernel in kernels.items():
        kernel.launch(grids[which], *given)
