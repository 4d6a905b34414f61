"""Mamba's scan on CUDA tensors: ``kernels/selective_scan*.cu``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from samebits.backends.cuda import compiler, devices, runtime
from samebits.backends.cuda.operands import TYPES, address, with_rows
from samebits.backends.selective_scan import laid_out
from samebits.functions import CHANNEL_BLOCK, STATE_PIECE, VOCAB_BLOCK

_F32 = torch.float32
_CHUNK = 8
_MOST_TERMS = 72 << 10  # bytes of shared memory for what is summed over channels
_OF_STEP = _OF_SUMS = 128  # threads of a block of selective_scan_step.cu, selective_scan_sums.cu
_STRIDES = "qq" * 4 + "qqqq" * 2


def lanes(size: int) -> int:
    """Lanes that share the state of a channel."""
    return 1 << (-(-size // STATE_PIECE) - 1).bit_length()


@dataclass(frozen=True, slots=True)
class ChannelScan:
    """A schedule of ``selective_scan.cu``.

    Attributes:
        threads: of a block.
        tile: tokens that a block has in shared memory.
        ahead: tokens that are computed side by side, as far as they do not wait for each other.
    """

    threads: int
    tile: int
    ahead: int


def catalogue(size: int) -> list[ChannelScan]:
    """Schedules for a state of `size` entries, of every kind."""
    most = _tile(size)
    return [ChannelScan(128, most, 4), ChannelScan(64, most, 4), ChannelScan(64, max(8, most // 2), 8)]


def choose(size: int, channels: int, groups: int, sequences: int, multiprocessors: int) -> ChannelScan:
    """Larger blocks where they fill the GPU."""
    blocks = sequences * groups * -(-channels // groups * lanes(size) // 128)
    return ChannelScan(128 if blocks >= multiprocessors // 2 else 64, _tile(size), 4)


def _tile(size: int) -> int:
    return max(8, 64 // lanes(size)) if size > STATE_PIECE else 32


@dataclass(frozen=True, slots=True)
class Form:
    """What the tensors of a call decide of its kernels: macros of ``selective_scan.cuh``."""

    dtype: torch.dtype
    delta: torch.dtype
    gate: torch.dtype | None
    of_states: torch.dtype
    size: int
    along: bool
    wide: bool
    states_along: bool
    states_wide: bool
    softplus: bool
    aligned: bool

    def constants(self, threads: int, tile: int) -> tuple[tuple[str, int | str], ...]:
        vector = 8 if self.wide and threads // lanes(self.size) >= 8 else 1
        return (
            *(("IN", TYPES[self.dtype]), ("DT", TYPES[self.delta]), ("GATE", TYPES[self.gate])),
            *(("OF_BC", TYPES[self.of_states]), ("SIZE", self.size), ("THREADS", threads), ("TILE", tile)),
            *(("VECTOR", vector), ("ALONG", int(self.along))),
            *(("BC_ALONG", int(self.states_along)), ("BC_VECTOR", 8 if self.states_wide else 1)),
            *(("SOFTPLUS", int(self.softplus)), ("ALIGNED", int(self.aligned))),
        )

    def cells(self, channels: int, tile: int) -> int:
        """Floats of shared memory that have a value for each token and channel."""
        return channels * (tile + 4) if self.along else channels * tile

    def states(self, tile: int) -> int:
        """Floats of shared memory for B and C."""
        return 2 * tile * (STATE_PIECE * lanes(self.size) + 4)


def kernel_spec(
    form: Form, schedule: ChannelScan, states: bool = False, *, programmatic: bool = False
) -> compiler.KernelSpec:
    """The kernel of ``selective_scan.cu``. ``states``: it writes those before chunks, and no outputs."""
    threads, tile = schedule.threads, schedule.tile
    channels = threads // lanes(form.size)
    own = ("AHEAD", schedule.ahead), ("STATES", int(states))
    return compiler.KernelSpec(
        *("selective_scan.cu", "selective_scan", "P" * 13 + _STRIDES + "iiiiii"),
        (*form.constants(threads, tile), *own),
        block=threads,
        smem=4 * (form.states(tile) + 3 * form.cells(channels, tile) + channels),
        programmatic=programmatic,
    )


def gradients_spec(form: Form) -> compiler.KernelSpec:
    """The kernel of ``selective_scan_backward.cu``."""
    count, row = lanes(form.size), STATE_PIECE * lanes(form.size)
    threads, tile = CHANNEL_BLOCK * count, 16 if count <= 4 else 8
    plane = CHANNEL_BLOCK * (row + 4 * count if count <= 4 else row) + row % 32
    summed = _CHUNK
    while summed > 1 and 8 * plane * summed > _MOST_TERMS:
        summed //= 2
    arrays = 5 if form.gate is None else 6
    floats = form.states(tile) + arrays * form.cells(CHANNEL_BLOCK, tile) + CHANNEL_BLOCK + 2 * summed * plane
    return compiler.KernelSpec(
        *("selective_scan_backward.cu", "selective_scan_backward", "P" * 21 + "qq" + _STRIDES + "iiiiii"),
        (*form.constants(threads, tile), ("SUMMED", summed)),
        block=threads,
        smem=4 * floats,
    )


def step_spec(
    dtype: torch.dtype,
    dt: torch.dtype,
    gate: torch.dtype | None,
    of_states: torch.dtype,
    size: int,
    softplus: bool,
    aligned: bool,
    wide: bool,
    *,
    programmatic: bool = False,
) -> compiler.KernelSpec:
    """The kernel of ``selective_scan_step.cu``."""
    constants = (
        *(("IN", TYPES[dtype]), ("DT", TYPES[dt]), ("GATE", TYPES[gate]), ("OF_BC", TYPES[of_states])),
        *(
            ("SIZE", size),
            ("SOFTPLUS", int(softplus)),
            ("ALIGNED", int(aligned)),
            ("VECTOR", 8 if wide else 1),
        ),
    )
    return compiler.KernelSpec(
        *("selective_scan_step.cu", "selective_scan_step", "P" * 10 + "q" * 8 + "iiiff", constants),
        block=_OF_STEP,
        programmatic=programmatic,
    )


def sums_spec(dtype: torch.dtype, size: int, runs: int, *, programmatic: bool = False) -> compiler.KernelSpec:
    """The kernel of ``selective_scan_sums.cu``."""
    constants = ("OUT", TYPES[dtype]), ("SIZE", size), ("RUNS", runs)
    return compiler.KernelSpec(
        *("selective_scan_sums.cu", "selective_scan_sums", "PPqiii", constants),
        block=_OF_SUMS,
        programmatic=programmatic,
    )


_kernel = runtime.loader(kernel_spec)
_gradients_kernel = runtime.loader(gradients_spec)
_step_kernel = runtime.loader(step_spec)
_sums_kernel = runtime.loader(sums_spec)


@dataclass(frozen=True, slots=True)
class _Call:
    """The operands of a call, as its kernels take them."""

    u: Tensor
    delta: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    z: Tensor | None
    bias: Tensor | None
    states: Tensor | None
    offsets: Tensor | None
    softplus: bool

    @classmethod
    def of(cls, u: Tensor, *given: object) -> _Call:
        u = laid_out(u, u)
        x = cls(u, *given)  # type: ignore[arg-type]
        b, c = (x.B, x.C) if x.B.dtype == x.C.dtype else (x.B.to(_F32), x.C.to(_F32))
        return cls(
            *(u, laid_out(u, x.delta), x.A.contiguous(), b, c),
            None if x.D is None else x.D.contiguous(),
            None if x.z is None else laid_out(u, x.z),
            None if x.bias is None else x.bias.contiguous(),
            None if x.states is None else x.states.contiguous(),
            *(x.offsets, x.softplus),
        )

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: int) -> Tensor:
        """Memory for results of tokens: with offsets, some may belong to no sequence."""
        return (runtime.empty if self.offsets is None else runtime.zeros)(shape, dtype, device)

    def empty(self, dtype: torch.dtype) -> Tensor:
        """The same in the shape and the layout of u."""
        (batch, channels, tokens), device = self.u.shape, self.u.get_device()
        if self.u.stride(2) == 1:
            return self.allocate((batch, channels, tokens), dtype, device)
        return self.allocate((batch, tokens, channels), dtype, device).transpose(1, 2)

    @property
    def sequences(self) -> int:
        return len(self.u) if self.offsets is None else len(self.offsets) - 1

    def form(self, *others: Tensor | None, states: Tensor | None = None) -> Form:
        """`others`, `states`: tensors of the shapes of u and of the states, beside those of the call."""
        u, (groups, size) = self.u, self.B.shape[1:3]
        along = u.stride(2) == 1
        of_lines = [t for t in (u, self.delta, self.z, *others) if t is not None]
        low = u.shape[2] if along else u.shape[1] // groups
        for t in of_lines:
            low |= t.stride(0) | t.stride(1 if along else 2)
        wide = not low & 7 and not any(t.data_ptr() & 15 for t in of_lines)
        states_along = self.B.stride(3) == 1 and self.C.stride(3) == 1
        side, low_of_states = (3, u.shape[2]) if states_along else (2, size)
        states_wide = self.B.stride(side) == 1 and self.C.stride(side) == 1
        for t in (self.B, self.C):
            for dim in {0, 1, 2, 3} - {side}:
                low_of_states |= t.stride(dim)
            states_wide &= not t.data_ptr() & 15
        return Form(
            *(u.dtype, self.delta.dtype, None if self.z is None else self.z.dtype, self.B.dtype, size),
            *(along, wide, states_along, states_wide and not low_of_states & 7, self.softplus),
            not (address(self.states) | address(states) | self.A.data_ptr()) & 15,
        )

    def strides(self, *of_lines: Tensor | None) -> tuple[int, ...]:
        """Of tensors of u's shape, and of B and C."""
        line = 1 if self.u.stride(2) == 1 else 2
        found = [(0, 0) if t is None else (t.stride(0), t.stride(line)) for t in of_lines]
        return *(n for both in found for n in both), *self.B.stride(), *self.C.stride()

    def numbers(self, channels_of_block: int) -> tuple[int, ...]:
        """Rows, channels, groups, channels and blocks of a group, tokens."""
        (rows, channels, tokens), groups = self.u.shape, self.B.shape[1]
        of_group = channels // groups
        return rows, channels, groups, of_group, -(-of_group // channels_of_block), tokens

    def run(
        self, out: Tensor | None, after: Tensor | None, chunks: Tensor | None, schedule: ChannelScan | None
    ) -> None:
        """Launch the scan, for outputs and states after it, or for states before its chunks."""
        u, groups = self.u, self.B.shape[1]
        form, device = self.form(out), u.get_device()
        if schedule is None:
            count = devices.device_info(device).sm_count
            schedule = choose(form.size, u.shape[1], groups, self.sequences, count)
        numbers = self.numbers(schedule.threads // lanes(form.size))
        _kernel(device, form, schedule, chunks is not None).launch(
            (self.sequences, numbers[4] * groups, 1),
            *(u.data_ptr(), self.delta.data_ptr(), address(self.z), self.B.data_ptr(), self.C.data_ptr()),
            *(address(t) for t in (self.A, self.D, self.bias, self.states, self.offsets)),
            *(address(t) for t in (out, after, chunks)),
            *self.strides(u, self.delta, self.z, out),
            *numbers,
        )


def scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    bias: Tensor | None,
    states: Tensor | None,
    offsets: Tensor | None,
    softplus: bool,
    schedule: ChannelScan | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs in the dtype and the layout of `u`, and the states after each sequence."""
    x = _Call.of(u, delta, A, B, C, D, z, bias, states, offsets, softplus)
    out = x.empty(u.dtype)
    after = runtime.empty((x.sequences, *A.shape), _F32, u.get_device())
    if after.numel():
        x.run(out, after, None, schedule)
    return out, after


def scan_backward(
    grad: Tensor,
    grad_states: Tensor | None,
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    bias: Tensor | None,
    states: Tensor | None,
    offsets: Tensor | None,
    softplus: bool,
    schedule: ChannelScan | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of u, delta, z, A (of each sequence), B, C, D, bias, and of the states before.

    Those of D and bias are terms for each token of all rows, ``[tokens, channels]``, in float32.
    """
    x = _Call.of(u, delta, A, B, C, D, z, bias, states, offsets, softplus)
    (batch, channels, tokens), (groups, size), device = u.shape, B.shape[1:3], u.get_device()
    sequences, total, numbers = x.sequences, batch * tokens, x.numbers(CHANNEL_BLOCK)
    du, ddelta = x.empty(u.dtype), x.empty(delta.dtype)
    dz = None if z is None else x.empty(z.dtype)
    terms = [None if t is None else x.allocate((total, channels), _F32, device) for t in (bias, D)]
    db, dc = (x.allocate((total, groups, numbers[4], size), _F32, device) for _ in range(2))
    da, before = (runtime.empty((sequences, channels, size), _F32, device) for _ in range(2))
    if before.numel():
        chunks = runtime.empty((total // _CHUNK + 2 * sequences, channels, size), _F32, device)
        x.run(None, None, chunks, schedule)
        grad = laid_out(x.u, grad)
        grad_states = None if grad_states is None else grad_states.contiguous()
        form = x.form(grad, du, ddelta, dz, states=grad_states)
        _gradients_kernel(device, form).launch(
            (sequences, numbers[4] * groups, 1),
            *(t.data_ptr() for t in (grad, x.u, x.delta)),
            address(x.z),
            *(t.data_ptr() for t in (x.B, x.C, x.A)),
            *(address(t) for t in (x.D, x.bias, chunks, grad_states, offsets, du, ddelta, dz, *terms)),
            *(t.data_ptr() for t in (db, dc, da, before)),
            *x.strides(grad, x.u, x.delta, x.z, du),
            *numbers,
        )
    of_b, of_c = (_over_blocks(t, of) for t, of in ((db, B), (dc, C)))
    return du, ddelta, dz, da, of_b, of_c, *reversed(terms), before


def _over_blocks(terms: Tensor, of: Tensor) -> Tensor:
    """Sums of ``terms[tokens of all rows, groups, blocks, N]``, in the dtype and shape of B or C."""
    (batch, groups, size, tokens), device = of.shape, of.get_device()
    out = runtime.empty((batch, groups, size, tokens), of.dtype, device)
    if out.numel():
        _sums_kernel(device, of.dtype, size, -(-terms.shape[2] // VOCAB_BLOCK)).launch(
            (-(-out.numel() // _OF_SUMS), 1, 1),
            *(terms.data_ptr(), out.data_ptr(), out.numel(), terms.shape[2], groups, tokens),
        )
    return out


def step(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    bias: Tensor | None,
    states: Tensor,
    softplus: bool,
    lowest: float,
    highest: float,
) -> Tensor:
    """Outputs of one token of each sequence, from raw dt, with their gates; `states` are moved on."""
    (batch, channels), (groups, size), device = x.shape, B.shape[1:], x.get_device()
    out = runtime.empty((batch, channels), x.dtype, device)
    if not states.numel():
        return out
    moved = states if states[0].is_contiguous() else states.contiguous()
    x, dt, A = with_rows(x), with_rows(dt), A.contiguous()
    z, (D, bias) = (
        None if z is None else with_rows(z),
        (None if t is None else t.contiguous() for t in (D, bias)),
    )
    b, c = (B, C) if B.dtype == C.dtype else (B.to(_F32), C.to(_F32))
    b, c = (t if t.stride(2) == 1 or size == 1 else t.contiguous() for t in (b, c))
    aligned = not (moved.data_ptr() | A.data_ptr() | 4 * moved.stride(0)) & 15
    wide = not (b.data_ptr() | c.data_ptr()) & 15 and not size & 7
    wide = wide and not any(t.stride(dim) & 7 for t in (b, c) for dim in (0, 1))
    blocks = -(-channels // groups * lanes(size) // _OF_STEP)
    gate = None if z is None else z.dtype
    _step_kernel(device, x.dtype, dt.dtype, gate, b.dtype, size, softplus, aligned, wide).launch(
        (batch, groups * blocks, 1),
        *(x.data_ptr(), dt.data_ptr(), address(z), b.data_ptr(), c.data_ptr(), A.data_ptr()),
        *(address(D), address(bias), moved.data_ptr(), out.data_ptr()),
        *(x.stride(0), dt.stride(0), 0 if z is None else z.stride(0)),
        *(*b.stride()[:2], *c.stride()[:2], moved.stride(0)),
        *(channels, channels // groups, blocks, lowest, highest),
    )
    if moved is not states:
        states.copy_(moved)
    return out
