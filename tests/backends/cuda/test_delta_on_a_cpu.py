"""Kernels of delta rules and linear attention, compiled for a CPU: the reference's bits."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from samebits.backends.cuda import delta as kernels
from samebits.backends.cuda import delta_prepare, linear_attention, matmul
from samebits.backends.cuda import delta_schedules as schedules
from samebits.backends.cuda.linear_schedules import (
    Linear,
    LinearGradients,
    LinearRows,
    LinearStates,
)
from samebits.backends.delta import Delta
from samebits.backends.recurrent import RecurrentState
from samebits.backends.reference import delta as reference
from samebits.contract import AMPERE, FMA
from samebits.testing import assert_same_bits
from tests.backends.cuda.test_delta import (
    OF_STEPS,
    STEP_FORMS,
    assert_same_step,
    empty_results,
    gradients_of,
    of_steps,
    operands,
    pieces,
    rows_of,
    step,
)
from tests.support import host_kernels

pytestmark = host_kernels.needs_compiler

FORMS = [
    # dtype, tensor core, delta rule, decays, key heads, heads, key size, size
    (torch.bfloat16, True, True, True, 1, 2, 32, 24),
    (torch.float16, True, False, True, 1, 1, 20, 17),
    (torch.float32, False, True, True, 1, 1, 16, 16),
    (torch.bfloat16, True, True, "channels", 1, 1, 32, 24),
    (torch.float32, False, True, "channels", 1, 1, 12, 16),
    (torch.bfloat16, True, "weighted", True, 1, 2, 32, 24),
    (torch.float32, False, "weighted", True, 1, 2, 12, 16),
    (torch.float16, True, "weighted", True, 1, 3, 20, 17),
]
ODD = torch.float16, True, True, "channels", 1, 2, 21, 17
GRADIENTS = [schedules.DeltaGradients(16, True, 2), schedules.DeltaGradients(32, False, 1)]
OF_GRADIENTS = [
    *zip(FORMS, GRADIENTS * 4, strict=True),
    (FORMS[3], GRADIENTS[0]),
    ((torch.float16, True, "weighted", True, 1, 2, 20, 17), schedules.DeltaGradients(32, False, 2)),
    # some warps have no channels
    ((torch.bfloat16, True, True, True, 1, 2, 80, 40), GRADIENTS[0]),
    ((torch.float16, True, True, "channels", 1, 2, 69, 17), GRADIENTS[0]),
    # the forward's kernel of window after window
    ((torch.bfloat16, True, True, True, 1, 1, 144, 24), GRADIENTS[0]),
    # the gradient of the matrix in registers: a tile that is not full, or several; odd sizes
    (FORMS[0], schedules.DeltaGradients(32, True, 2, True)),
    ((torch.float16, True, True, True, 1, 2, 20, 17), schedules.DeltaGradients(32, True, 2, True)),
    ((torch.bfloat16, True, True, True, 2, 2, 48, 72), schedules.DeltaGradients(64, True, 2, True)),
    (FORMS[3], schedules.DeltaGradients(32, True, 2, True)),
    (ODD, schedules.DeltaGradients(32, True, 2, True)),
    ((torch.bfloat16, True, True, "channels", 2, 2, 48, 72), schedules.DeltaGradients(64, True, 2, True)),
    ((torch.bfloat16, True, True, "channels", 1, 1, 128, 24), schedules.DeltaGradients(32, True, 2, True)),
]
STATES = LinearStates(2, 32, 3)
OF_LINEAR_GRADIENTS = [
    # tiles of keys, the last not full; heads that share keys; odd sizes; several strips of columns of a warp
    (
        (torch.bfloat16, True, False, True, 1, 2, 48, 40),
        LinearGradients(STATES, 32, 2, 2, 2),
    ),
    ((torch.bfloat16, True, False, False, 1, 4, 32, 16), LinearGradients(STATES, 16, 3, 1)),
    (
        (torch.float16, True, False, True, 1, 1, 20, 17),
        LinearGradients(LinearStates(4, 32, 2), 32, 2, 8),
    ),
    (
        (torch.bfloat16, True, "weighted", True, 2, 6, 80, 72),
        LinearGradients(STATES, 64, 2, 8),
    ),
    (
        (torch.float16, True, "weighted", True, 1, 3, 20, 17),
        LinearGradients(STATES, 16, 2, 8, 2),
    ),
    (
        (torch.bfloat16, True, "weighted", True, 1, 2, 21, 144),
        LinearGradients(STATES, 32, 2, 8),
    ),
    (
        (torch.bfloat16, True, "weighted", True, 1, 1, 144, 24),
        LinearGradients(STATES, 32, 3, 8),
    ),
]
SCHEDULES = [schedules.Schedule(16, 16, 4, 1), schedules.Schedule(32, 64, 8, 2)]
LINEAR_FORMS = [
    # two tiles of keys, the last not full, and two of values; heads that share keys, none full; odd sizes
    (torch.bfloat16, True, False, True, 1, 2, 48, 40),
    (torch.bfloat16, True, False, False, 1, 4, 32, 16),
    (torch.float16, True, False, True, 1, 1, 20, 17),
    (torch.bfloat16, True, "weighted", True, 1, 2, 48, 40),
    (torch.float16, True, "weighted", True, 1, 3, 20, 17),
]
LINEAR = [  # a schedule for each
    Linear(LinearStates(2, 32, 3), LinearRows(32, 2, 1, 8)),
    Linear(LinearStates(1, 64, 2), LinearRows(32, 1, 2, 4)),
    Linear(LinearStates(4, 32, 4), LinearRows(64, 2, 2, 1)),
    Linear(LinearStates(2, 32, 2), LinearRows(32, 1, 2, 8)),
    Linear(LinearStates(1, 16, 3), LinearRows(16, 1, 1, 8)),
]
CHUNK_FORMS = [
    # two tiles of values, the last of one warp; heads that share keys; odd sizes; all channels of a key
    (torch.bfloat16, True, True, True, 1, 2, 48, 40),
    (torch.bfloat16, True, True, False, 1, 4, 64, 16),
    (torch.float16, True, True, True, 1, 1, 20, 17),
    (torch.bfloat16, True, True, True, 1, 1, 128, 24),
    *(
        (dtype, True, True, "channels", *sizes)
        for dtype, *sizes in (
            *((torch.bfloat16, 1, 2, 48, 40), (torch.bfloat16, 1, 2, 64, 72)),
            *((torch.float16, 1, 1, 21, 17), (torch.bfloat16, 1, 1, 128, 24)),
        )
    ),
]
CHUNKS = [schedules.DeltaChunks(*of) for of in ((2, 3), (1, 4), (4, 3), (1, 3))] * 2  # a schedule for each

DELTA_STATES = [  # a schedule for each
    schedules.DeltaStates(*of)
    for of in (
        (2, 32, 3),
        (1, 64, 2),
        (4, 16, 4),
        (2, 64, 3),
        (1, 32, 3),
        (4, 64, 2),
        (2, 16, 2),
        (8, 128, 3),
    )
]


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    host_kernels.use(monkeypatch, kernels)
    host_kernels.use(monkeypatch, linear_attention)
    host_kernels.use(monkeypatch, delta_prepare)
    monkeypatch.setattr(linear_attention, "choose_linear", lambda *_: LINEAR[0])
    monkeypatch.setattr(linear_attention, "choose_chunks", lambda *_: CHUNKS[0])
    monkeypatch.setattr(linear_attention, "choose_states", lambda *_: DELTA_STATES[0])
    monkeypatch.setattr(kernels, "takes_chunks", lambda key_size, *_: key_size <= 128)
    monkeypatch.setattr(matmul, "family", lambda device: AMPERE)
    monkeypatch.setattr(matmul, "check_contract", lambda contract, device: None)


@pytest.mark.parametrize(
    ("form", "schedule"),
    [
        *zip(FORMS, SCHEDULES * 4, strict=True),
        (FORMS[3], SCHEDULES[0]),
        ((torch.bfloat16, True, False, "channels", 1, 2, 32, 24), SCHEDULES[1]),
        *((ODD, schedule) for schedule in SCHEDULES),
    ],
    ids=str,
)
def test_forward(form: tuple[object, ...], schedule: schedules.Schedule) -> None:
    assert_same_forward(form, schedule)


def assert_same_forward(
    form: tuple[object, ...], schedule: schedules.Schedule | Linear | schedules.DeltaChunks
) -> None:
    """The results of one call and of several, the matrices after it, and the states that these leave."""
    x = operands(form)

    def forward(x: Delta, state: Tensor | None, out: Tensor, closed: Tensor | None) -> None:
        kernels.forward(x, state, out, closed, schedule)

    results = []
    for run in (reference.forward, forward):
        out = empty_results(x)
        closed = torch.full(x.initial.shape, torch.nan)  # type: ignore[union-attr]
        run(x, None, out, closed)
        by_pieces, last, state = pieces(run, x)
        results.append((out, closed, by_pieces, last, state.parts["matrix"]))
    for want, got in zip(*results, strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize(("form", "schedule"), [*zip(LINEAR_FORMS, LINEAR, strict=True)], ids=str)
def test_forward_without_the_delta_rule(form: tuple[object, ...], schedule: Linear) -> None:
    assert_same_forward(form, schedule)


@pytest.mark.parametrize(("form", "schedule"), [*zip(CHUNK_FORMS, CHUNKS, strict=True)], ids=str)
def test_forward_by_whole_chunks(form: tuple[object, ...], schedule: schedules.DeltaChunks) -> None:
    assert_same_forward(form, schedule)


STEPS = schedules.catalogue_of_steps(False)
OF_CHANNELS = schedules.catalogue_of_steps(True)


@pytest.mark.parametrize(
    ("form", "schedule"),
    [*zip(STEP_FORMS, (*STEPS, *STEPS[:3], *OF_CHANNELS[:2], OF_CHANNELS[0]), strict=True)]
    + [(STEP_FORMS[n], STEPS[3]) for n in (1, 4, 6)]
    + [(form, schedule) for form in STEP_FORMS[7:] for schedule in OF_CHANNELS[2:]],
    ids=str,
)
def test_steps(form: tuple[object, ...], schedule: schedules.Step) -> None:
    """One token after so many rows of a chunk, up to a full one, then another."""
    assert_same_steps(*step(form), schedule)


def assert_same_steps(x: Delta, state: RecurrentState, schedule: schedules.Step) -> None:
    """Two steps of one token."""
    results = []
    for run in (reference.forward, kernels.forward):
        own = RecurrentState(state.layout, state.data.clone())
        for _ in range(2):
            out = empty_results(x)
            run(x, own.data, out, None, *([schedule] if run is kernels.forward else []))
        results.append((out, own))
    assert_same_step(results[1], results[0])


FEW = STEPS[3], *OF_CHANNELS[2:]


@pytest.mark.parametrize("behind", [torch.nan, torch.inf])
@pytest.mark.parametrize("schedule", FEW, ids=str)
def test_steps_of_few_sequences_after_each_number_of_rows(schedule: schedules.Step, behind: float) -> None:
    """What lies behind them goes nowhere, neither where three heads share one of keys."""
    decays = "channels" if schedule in OF_CHANNELS else True
    x, state = step((torch.bfloat16, True, decays, 1, 3, 32, 40), [*range(65), 7])
    for n, count in enumerate(state.count.int().tolist()):
        for name in rows_of(state):
            state.parts[name][n, :, count:] = behind
    assert_same_steps(x, state, schedule)


@pytest.mark.parametrize("schedule", OF_CHANNELS[2:], ids=str)
@pytest.mark.parametrize(("key_size", "size"), [(16, 8), (80, 136), (256, 64)])
def test_steps_of_few_sequences_by_size(schedule: schedules.Step, key_size: int, size: int) -> None:
    """Lanes without channels, and with eight; warps without columns."""
    assert_same_steps(*step((torch.float16, True, "channels", 1, 1, key_size, size)), schedule)


@pytest.mark.parametrize(
    ("form", "schedule"), [*zip(OF_STEPS, STEPS[1:], strict=True), (OF_STEPS[0], STEPS[3])], ids=str
)
def test_steps_of_mamba_2(form: tuple[Any, ...], schedule: schedules.Step) -> None:
    """One launch has what two have: the step's weight, decay and D, too."""
    x, state = of_steps(form)
    results = []
    for run in (reference.forward, kernels.forward):
        own = RecurrentState(state.layout, state.data.clone())
        out = empty_results(x)
        run(x, own.data, out, None, *([schedule] if run is kernels.forward else []))
        results.append((out, own))
    assert_same_step(results[1], results[0])


@pytest.mark.parametrize(
    ("form", "schedule"),
    [(STEP_FORMS[4], STEPS[0]), (STEP_FORMS[4], STEPS[3])]
    + [(STEP_FORMS[8], OF_CHANNELS[n]) for n in (0, 2, 3)],
    ids=str,
)
def test_steps_where_all_decays(form: tuple[object, ...], schedule: schedules.Step) -> None:
    """The decay of a row from one that is behind it is infinite: nothing may be multiplied by it."""
    x, state = step((*form[:2], form[2] or True, *form[3:]))
    x = dataclasses.replace(x, g=x.g * 300)  # type: ignore[operator]
    state.parts["decays"].mul_(300)
    results = []
    for run in (reference.forward, kernels.forward):
        own = RecurrentState(state.layout, state.data.clone())
        out = torch.full_like(x.v, torch.nan).contiguous()
        run(x, own.data, out, None, *([schedule] if run is kernels.forward else []))
        results.append((out, own))
    assert_same_step(results[1], results[0])


def test_which_kernel_takes_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """`delta_step`: a token for each sequence with a state, in memory of whole words."""
    monkeypatch.setattr(kernels, "choose", lambda *_: SCHEDULES[0])
    monkeypatch.setattr(kernels, "choose_step", lambda *_: schedules.Step(32))
    launched: list[str] = []

    class Recorder:
        def __init__(self, source: str) -> None:
            self.source = source

        def launch(self, *_: object) -> None:
            launched.append(self.source)

    monkeypatch.setattr(kernels, "_kernel", lambda *_, **__: Recorder("delta"))
    monkeypatch.setattr(linear_attention, "run", lambda *_: launched.append("linear"))
    monkeypatch.setattr(kernels, "_step_kernel", lambda *_, **__: Recorder("delta_step"))

    def source(x: Delta, state: Tensor | None, closed: Tensor | None = None) -> str:
        launched.clear()
        kernels.forward(x, state, torch.empty_like(x.v).contiguous(), closed)
        return launched[0]

    x, state = step(STEP_FORMS[0], (3, 64))
    assert source(x, state.data) == "delta_step"
    assert source(x, None) == "delta"
    assert source(x, state.data, torch.empty(2, 4, 128, 128)) == "delta"
    assert source(x, torch.empty(state.data.numel() + 1)[1:].view(2, -1)) == "delta"
    assert source(dataclasses.replace(x, spans=torch.tensor([[0, 1], [1, 2]]).int()), state.data) == "delta"
    assert source(dataclasses.replace(x, spans=torch.empty(1, 0).int()), state.data) == "delta"
    odd = torch.empty(x.q.numel() + 1, dtype=x.q.dtype)[1:].view(x.q.shape)
    assert source(dataclasses.replace(x, q=odd), state.data) == "delta"
    assert source(dataclasses.replace(x, contract=FMA.key), state.data) == "delta"
    for key_size, size in ((24, 128), (272, 128), (128, 20)):
        x, state = step((*STEP_FORMS[0][:5], key_size, size), (3, 64))
        assert source(x, state.data) == "delta"

    x = operands(LINEAR_FORMS[0])
    assert source(x, None) == "linear"
    assert source(dataclasses.replace(x, spans=x.spans.repeat(4, 1)), None) == "delta"  # of few tokens each
    assert source(dataclasses.replace(x, contract=FMA.key), None) == "delta"
    x = operands(CHUNK_FORMS[0])
    assert source(x, None) == "linear"
    assert source(dataclasses.replace(x, contract=FMA.key), None) == "delta"
    assert source(operands((*CHUNK_FORMS[0][:6], 144, 40)), None) == "delta"  # of more than 128 channels
    few = dataclasses.replace(x, spans=x.spans.repeat(4, 1))
    assert source(few, None) == "delta"
    kernels.forward(few, None, torch.empty_like(x.v), None, z=torch.empty(x.v.shape))
    assert launched[1:] == ["linear"]


@pytest.mark.parametrize(
    ("form", "schedule"),
    [
        ((torch.float32, False, True, True, 1, 1, 16, 16), schedules.Schedule(16, 16, 4, 1)),
        ((torch.bfloat16, True, False, True, 1, 1, 16, 16), LINEAR[2]),
        ((torch.bfloat16, True, True, True, 1, 1, 16, 16), CHUNKS[2]),
    ],
)
def test_sequences_of_one_length(
    form: tuple[object, ...],
    schedule: schedules.Schedule | Linear | schedules.DeltaChunks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They need no spans, forward and backward."""
    monkeypatch.setattr(kernels, "choose", lambda *_: schedule)
    of_gradients = OF_LINEAR_GRADIENTS[0][1] if isinstance(schedule, Linear) else GRADIENTS[0]
    x = operands(form)
    tokens = torch.cat([torch.arange(begin, begin + 66) for begin in (2, 77)])
    q, k, v, g, beta = (None if t is None else t[tokens] for t in (x.q, x.k, x.v, x.g, x.beta))
    x = dataclasses.replace(x, q=q, k=k, v=v, g=g, beta=beta, initial=x.initial[:2])  # type: ignore[index,arg-type]
    told = dataclasses.replace(x, spans=torch.tensor([[0, 66], [66, 132]], dtype=torch.int32))
    x = dataclasses.replace(x, spans=torch.empty(2, 0, dtype=torch.int32))
    got, want = torch.full_like(x.v, torch.nan), torch.zeros_like(x.v)
    reference.forward(told, None, want, None)
    kernels.forward(x, None, got, None, schedule)
    assert_same_bits(got, want)
    for a, b in zip(
        kernels.backward(x, None, want, None, of_gradients),
        reference.backward(told, None, want, None),
        strict=True,
    ):
        assert (a is None) == (b is None)
        if b is not None:
            assert_same_bits(a, b)


@pytest.mark.parametrize(
    ("decays", "schedule"),
    [
        *((x, schedules.Schedule(16, *of, 1)) for x in (True, "channels") for of in ((16, 4), (64, 8))),
        (True, CHUNKS[0]),
    ],
)
def test_forward_where_all_decays(
    decays: object, schedule: schedules.Schedule | schedules.DeltaChunks
) -> None:
    """Rows that are not there come behind decays to nothing."""
    x = operands((torch.bfloat16, True, True, decays, 1, 1, 16, 16))
    assert x.g is not None
    x = dataclasses.replace(x, g=x.g * 1000)

    def forward(x: Delta, state: Tensor | None, out: Tensor, closed: Tensor | None) -> None:
        kernels.forward(x, state, out, closed, schedule)

    (want, last, _), (got, last_found, _) = (pieces(run, x) for run in (reference.forward, forward))
    assert_same_bits(got, want)
    assert_same_bits(last_found, last)


@pytest.mark.parametrize(("form", "schedule"), OF_GRADIENTS + OF_LINEAR_GRADIENTS, ids=str)
def test_backward(
    form: tuple[object, ...],
    schedule: schedules.DeltaGradients | LinearGradients,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From matrices, and from where a state goes on."""
    staged = isinstance(schedule, schedules.DeltaGradients) and schedule.staged
    monkeypatch.setattr(kernels, "choose", lambda *_: SCHEDULES[staged])
    for x, state, grad, of_closed in gradients_of(operands(form)):
        want = reference.backward(x, state, grad, of_closed)
        got = kernels.backward(x, state, grad, of_closed, schedule)
        for a, b in zip(got, want, strict=True):
            if a is None or b is None:
                assert a is b
            else:
                assert_same_bits(a, b)


@pytest.mark.parametrize(
    ("form", "chunks", "states"), [*zip(CHUNK_FORMS, CHUNKS, DELTA_STATES, strict=True)], ids=str
)
def test_backward_from_z_of_the_forward(
    form: tuple[object, ...],
    chunks: schedules.DeltaChunks,
    states: schedules.DeltaStates,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which results and states are the same with. Tokens of no sequence have no z."""
    monkeypatch.setattr(linear_attention, "choose_states", lambda *_: states)
    for x, state, grad, of_closed in gradients_of(operands(form)):
        after, wanted = (None if state is None else state.clone() for _ in range(2))
        out, want, z = torch.zeros_like(x.v), torch.zeros_like(x.v), torch.full(x.v.shape, torch.nan)
        reference.forward(x, wanted, want, None)
        kernels.forward(x, after, out, None, chunks, z=z)
        assert_same_bits(out, want)
        if wanted is not None:
            rows = slice(0, x.v.shape[1] * x.q.shape[2] * x.v.shape[2] + 1)  # the count, and the matrix
            assert_same_bits(after[:, rows], wanted[:, rows])  # type: ignore[index]
        given = torch.zeros(len(z), dtype=torch.bool)
        for start, stop in x.bounds():
            given[start:stop] = True
        assert z[given].isfinite().all()
        assert z[~given].isnan().all()
        for a, b in zip(
            kernels.backward(x, state, grad, of_closed, GRADIENTS[0], z=z),
            reference.backward(x, state, grad, of_closed),
            strict=True,
        ):
            if a is None or b is None:
                assert a is b
            else:
                assert_same_bits(a, b)


@pytest.mark.parametrize(("decays", "times"), [(True, 1), ("channels", 1), ("channels", 300)])
@pytest.mark.parametrize("staged", [True, False])
def test_backward_of_a_chunk_whose_last_block_is_not_full(
    decays: object, times: int, staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are not there have weights, too: of zero, whatever was in shared memory."""
    monkeypatch.setattr(kernels, "choose", lambda *_: schedules.Schedule(16, 64, 8, 1))
    x = operands((torch.bfloat16, True, True, decays, 1, 1, 16, 16))
    assert x.g is not None
    x = dataclasses.replace(x, initial=None, spans=torch.tensor([[2, 43]], dtype=torch.int32), g=x.g * times)
    grad = torch.randn(x.v.shape, generator=torch.Generator().manual_seed(0)).to(x.v.dtype)
    want = reference.backward(x, None, grad, None)
    got = kernels.backward(x, None, grad, None, schedules.DeltaGradients(16, staged, 1))
    for a, b in zip(got[:5], want[:5], strict=True):
        assert_same_bits(a, b)  # type: ignore[arg-type]


def test_too_many_sequences_are_refused() -> None:
    """Before a launch, which would fail by itself without a name."""
    x = operands(FORMS[2])
    many = dataclasses.replace(x, spans=torch.zeros(65_536, 2, dtype=torch.int32))
    with pytest.raises(ValueError, match="at most 65,535 sequences in a call, got 65,536"):
        kernels.forward(many, None, torch.empty_like(x.v), None)
