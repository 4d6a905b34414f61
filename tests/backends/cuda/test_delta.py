"""The kernel of delta rules and linear attention: every schedule has the reference's bits."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import samebits
from samebits.backends import delta
from samebits.backends.cuda import delta as kernels
from samebits.backends.cuda import delta_prepare, linear_attention, runtime
from samebits.backends.cuda import delta_schedules as schedules
from samebits.backends.cuda.compiler import KernelSpec
from samebits.backends.cuda.linear_schedules import (
    Linear,
    LinearGradients,
    LinearRows,
    LinearStates,
    catalogue_of_linear,
    catalogue_of_linear_gradients,
    choose_linear,
    choose_linear_gradients,
)
from samebits.backends.delta import Delta, Steps
from samebits.backends.recurrent import Layout, RecurrentState
from samebits.backends.reference import delta as reference
from samebits.contract import FMA, TENSOR_CORE
from samebits.testing import assert_same_bits
from tests.support.cubins import resources
from tests.support.fake_gpu import fake_gpu

LENGTHS = (70, 0, 5, 130)
STEPS = (7, 57, 0, 1, 1, 17, 1000)
"""Tokens of the calls that go on: to a chunk's end, past it, and so on."""

FORMS = [
    # dtype, tensor core, delta rule, decays, key heads, heads, key size, size
    (torch.bfloat16, True, True, True, 2, 4, 128, 128),
    (torch.bfloat16, True, False, True, 1, 1, 64, 40),
    (torch.float16, True, True, False, 1, 2, 20, 17),
    (torch.float32, False, True, True, 1, 2, 128, 64),
    (torch.float32, False, False, False, 1, 1, 24, 24),
    (torch.bfloat16, False, True, True, 1, 1, 16, 16),
    (torch.bfloat16, True, True, "channels", 1, 2, 128, 64),
    (torch.float16, True, True, "channels", 1, 1, 20, 17),
    (torch.float32, False, True, "channels", 1, 1, 64, 40),
    (torch.bfloat16, True, "weighted", True, 1, 2, 128, 64),
    (torch.float16, True, "weighted", True, 1, 3, 24, 17),
    (torch.float32, False, "weighted", True, 1, 2, 20, 24),
]

LINEAR_FORMS = [
    (torch.bfloat16, True, False, True, 2, 4, 128, 128),
    (torch.bfloat16, True, False, True, 1, 8, 128, 64),
    (torch.float16, True, False, False, 1, 1, 256, 256),
    (torch.float16, True, False, True, 1, 2, 20, 17),
    (torch.bfloat16, True, False, True, 1, 1, 80, 40),
    (torch.float16, True, "weighted", True, 2, 6, 64, 192),
    (torch.bfloat16, True, "weighted", True, 1, 8, 128, 64),
    (torch.bfloat16, True, "weighted", True, 1, 2, 24, 20),
]


def assert_no_spills(spec: KernelSpec) -> None:
    found = resources(spec, "sm_90a")
    assert found.spill_bytes == 0
    assert found.local_bytes == 0


def on_gpu_with(multiprocessors: int, kib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedules are chosen for a GPU of so many multiprocessors, each with so much shared memory."""
    gpu = SimpleNamespace(sm_count=multiprocessors, max_smem=kib << 10)
    monkeypatch.setattr(schedules.devices, "device_info", lambda _: gpu)


BY_CHANNEL = (
    schedules.Schedule(32, 64, 8, 2),
    schedules.Schedule(64, 64, 8, 1),
    schedules.Schedule(32, 16, 4, 1),
)  # the choices for heads of 128


@pytest.mark.parametrize(
    ("schedule", "by_channel"),
    [*((s, False) for s in schedules.catalogue()), *((s, True) for s in BY_CHANNEL)],
    ids=str,
)
def test_compiles_without_spills(schedule: schedules.Schedule, by_channel: bool) -> None:
    options = {"tensor_core": True, "hardware_exp2": True, "delta": True, "vector": True}
    options["by_channel"] = by_channel
    assert_no_spills(kernels.kernel_spec(schedule, torch.bfloat16, 128, **options))


@pytest.mark.parametrize(("systems", "keep"), [(False, False), (True, False), (True, True)])
def test_what_comes_before_compiles_without_spills(systems: bool, keep: bool) -> None:
    options = {"tensor_core": True, "hardware_exp2": True, "systems": systems, "keep": keep}
    spec = delta_prepare.kernel_spec(torch.bfloat16, 128, **options)
    assert_no_spills(spec)
    assert 3 * (spec.smem + 1024) <= 228 << 10  # three blocks share a multiprocessor


@pytest.mark.parametrize("key_size", [128, 256])
@pytest.mark.parametrize(
    ("schedule", "by_channel"),
    [(schedule, x) for x in (False, True) for schedule in schedules.catalogue_of_steps(x)],
    ids=str,
)
def test_steps_compile_without_spills(schedule: schedules.Step, key_size: int, by_channel: bool) -> None:
    options = {"hardware_exp2": True, "delta": True, "by_channel": by_channel}
    spec = kernels.step_spec(schedule, torch.bfloat16, key_size, 128, **options)
    assert_no_spills(spec)


@pytest.mark.parametrize(
    ("blocks", "size", "by_channel", "delta_rule", "wanted"),
    [
        (32, 128, False, True, schedules.Step(32, 8, few=True)),  # a multiprocessor for each block
        (33, 128, False, True, schedules.Step(32, 8, few=True)),
        (34, 128, False, True, schedules.Step(32)),
        (32, 128, False, False, schedules.Step(32)),
        (128, 128, False, True, schedules.Step(64)),
        (132, 128, False, True, schedules.Step(128)),
        (132, 64, False, True, schedules.Step(64)),
        (33, 128, True, True, schedules.Step(32, 12, few=True)),
        (66, 128, True, True, schedules.Step(64, 16, few=True)),
        (67, 128, True, True, schedules.Step(64, 8)),
        (128, 128, True, True, schedules.Step(64, 8)),
        (256, 128, True, True, schedules.Step(128, 8)),
    ],
)
def test_which_schedule_a_step_takes(
    blocks: int,
    size: int,
    by_channel: bool,
    delta_rule: bool,
    wanted: schedules.Step,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_gpu_with(132, 227, monkeypatch)
    assert schedules.choose_step(torch.bfloat16, 128, size, blocks, by_channel, delta_rule, 0) == wanted


@pytest.mark.parametrize(
    ("kib", "key_size", "wanted"),
    [
        (99, 128, schedules.Step(32, 12, few=True)),
        (99, 192, schedules.Step(64, 8)),
        (99, 256, None),
        (163, 256, schedules.Step(32, 12, few=True)),
    ],
)
def test_a_step_takes_a_schedule_that_fits(
    kib: int, key_size: int, wanted: schedules.Step | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu_with(132, kib, monkeypatch)
    assert schedules.choose_step(torch.bfloat16, key_size, 128, 8, True, True, 0) == wanted


CHUNK_FORMS = [
    (torch.bfloat16, True, True, True, 2, 4, 128, 128),
    (torch.float16, True, True, False, 1, 3, 128, 192),
    (torch.bfloat16, True, True, True, 1, 2, 64, 40),
    (torch.float16, True, True, True, 1, 2, 20, 17),
    (torch.bfloat16, True, True, True, 1, 1, 96, 72),
    (torch.bfloat16, True, True, True, 1, 1, 16, 16),
    (torch.bfloat16, True, True, "channels", 2, 4, 128, 128),
    (torch.float16, True, True, "channels", 1, 2, 20, 17),
    (torch.bfloat16, True, True, "channels", 1, 1, 96, 72),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("part", "by_channel"),
    [
        (linear_attention.DELTA_BEGIN, False),
        *itertools.product(schedules.catalogue_of_chunks(), (False, True)),
        *itertools.product(schedules.catalogue_of_states(), (False, True)),
    ],
    ids=str,
)
def test_whole_chunks_compile_without_spills(
    part: schedules.DeltaChunks | schedules.DeltaStates | str, by_channel: bool, dtype: torch.dtype
) -> None:
    options = {"hardware_exp2": True, "by_channel": by_channel}
    for keep in (False, True)[: 1 + isinstance(part, schedules.DeltaChunks)]:
        assert_no_spills(linear_attention.kernel_spec(part, dtype, 128, **options, keep=keep))


@pytest.mark.parametrize("kib", [99, 163, 227])
def test_every_size_of_whole_chunks_has_a_schedule_that_fits(
    kib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu_with(132, kib, monkeypatch)
    sizes = (16, 64, 128), (1, 17, 64, 128, 256), (1, 32, 256), (False, True)
    for key_size, size, blocks, by_channel in itertools.product(*sizes):
        takes = schedules.takes_chunks(key_size, by_channel, 0)
        assert takes == (kib > 99 or key_size <= (64 if by_channel else 16))
        if takes:
            found = schedules.choose_chunks(key_size, size, blocks, by_channel, 0)
            assert found.memory(key_size, by_channel) <= kib << 10
            assert found in schedules.catalogue_of_chunks()
        of_states = schedules.choose_states(key_size, by_channel, 0)
        assert of_states.memory(key_size, by_channel) <= kib << 10
        assert of_states in schedules.catalogue_of_states()
    assert not schedules.takes_chunks(144, False, 0)
    if kib == 227:
        assert schedules.choose_chunks(128, 128, 32, False, 0) == schedules.DeltaChunks(2)
        assert schedules.choose_chunks(128, 128, 256, False, 0) == schedules.DeltaChunks(4)
        assert schedules.choose_chunks(128, 128, 256, True, 0) == schedules.DeltaChunks(4)


OF_LINEAR = list(
    dict.fromkeys(part for linear in catalogue_of_linear() for part in (linear.states, linear.rows))
)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("part", "keep"),
    [
        (linear_attention.BEGIN, False),
        *((part, False) for part in OF_LINEAR),
        *((part, True) for part in OF_LINEAR if isinstance(part, LinearStates)),
    ],
    ids=str,
)
def test_linear_attention_compiles_without_spills(
    part: LinearStates | LinearRows | str, keep: bool, weighted: bool
) -> None:
    options = {"hardware_exp2": True, "weighted": weighted, "keep": keep}
    spec = linear_attention.kernel_spec(part, torch.bfloat16, 128, **options)
    assert_no_spills(spec)


@pytest.mark.parametrize("kib", [99, 163, 227])
def test_every_size_of_linear_attention_has_a_schedule_that_fits(
    kib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu_with(84, kib, monkeypatch)
    known = [*catalogue_of_linear()]
    sizes = (16, 128, 256), (1, 17, 64, 128, 256)
    for key_size, size, weighted in itertools.product(*sizes, (False, True)):
        found = choose_linear(key_size, size, weighted, 0)
        for part in (found.states, found.rows):
            assert part.memory(key_size, weighted) <= kib << 10
        assert found.states in [s.states for s in known]
        assert found.rows in [s.rows for s in known]


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize(
    ("which", "schedule"),
    [
        *(("matrices", schedules.DeltaGradients(tile, True, 2)) for tile in (16, 32, 64)),
        ("matrices", schedules.DeltaGradients(64, True, 1)),
        *(("rows", schedules.DeltaGradients(16, staged, 1)) for staged in (True, False)),
    ],
    ids=str,
)
def test_gradients_compile_without_spills(
    which: str, schedule: schedules.DeltaGradients, by_channel: bool
) -> None:
    options = {"tensor_core": True, "hardware_exp2": True, "delta": True, "by_channel": by_channel}
    given = (which, schedule, torch.bfloat16, 128, 128)
    assert_no_spills(kernels.gradients_spec(*given, **options))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("which", "schedule"),
    [
        *(("matrices", schedule) for schedule in catalogue_of_linear_gradients()),
        *(("values", schedule) for schedule in [*catalogue_of_linear_gradients()][:2]),
        ("rows", next(catalogue_of_linear_gradients())),
    ],
    ids=str,
)
def test_gradients_of_linear_attention_compile_without_spills(
    which: str, schedule: LinearGradients, weighted: bool
) -> None:
    options = {"hardware_exp2": True, "weighted": weighted}
    spec = linear_attention.gradients_spec(which, schedule, torch.bfloat16, 128, 128, **options)
    assert_no_spills(spec)
    if which != "matrices" or (schedule.stages == 2 and schedule.keys <= 32):
        assert 2 * (spec.smem + 1024) <= 228 << 10  # two blocks share a multiprocessor


@pytest.mark.parametrize("kib", [99, 163, 227])
def test_which_gradients_of_linear_attention_fit(kib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper all do; heads of 128 leave chunks in records where a block has 99 KiB."""
    on_gpu_with(132, kib, monkeypatch)
    known = {(s.keys, s.stages) for s in catalogue_of_linear_gradients()}
    sizes = (16, 64, 128, 256), (1, 17, 64, 128, 256), (1, 32, 256), (False, True)
    for key_size, size, blocks, weighted in itertools.product(*sizes):
        found = choose_linear_gradients(key_size, size, blocks, weighted, 0)
        if found is not None:
            assert found.most_memory(key_size, size, weighted) <= kib << 10
            assert (found.keys, found.stages) in known
        assert found is not None or kib < 227
    if kib == 227:
        stages = [choose_linear_gradients(128, 128, blocks, True, 0).stages for blocks in (32, 256)]  # type: ignore[union-attr]
        assert stages == [3, 2]


IN_REGISTERS = [s for s in schedules.catalogue_of_gradients() if s.registers]


@pytest.mark.parametrize(
    ("which", "schedule", "by_channel"),
    [
        ("scores", IN_REGISTERS[0], False),
        *(("matrices", schedule, False) for schedule in IN_REGISTERS),
        *(("matrices", schedule, True) for schedule in IN_REGISTERS if schedule.tile <= 64),
    ],
    ids=str,
)
def test_gradients_in_registers_compile_without_spills(
    which: str, schedule: schedules.DeltaGradients, by_channel: bool
) -> None:
    options = {"tensor_core": True, "hardware_exp2": True, "delta": True, "by_channel": by_channel}
    found = resources(kernels.gradients_spec(which, schedule, torch.bfloat16, 128, 128, **options), "sm_90a")
    # 16 warps leave 128 registers: what no chunk changes is spilled
    most = 176 if schedule.tile == 128 else 0
    assert max(found.spill_bytes, found.local_bytes) <= most


@pytest.mark.parametrize(
    ("kib", "size", "by_channel", "stages"),
    [
        *((99, 128, False, 1), (163, 128, False, 2), (163, 256, False, 1), (227, 128, False, 2)),
        *((227, 256, False, 1), (163, 128, True, 2), (227, 128, True, 2)),
    ],
)
def test_gradients_take_the_stages_that_fit(
    kib: int, size: int, by_channel: bool, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 16 bits heads of 128 fit into every GPU's shared memory, and heads of 256 into an A100's.

    With a decay for each channel heads of 128 fit into an A100's. From there on the gradient of the matrix
    lies in registers.
    """
    on_gpu_with(84, kib, monkeypatch)
    found = schedules.choose_of_gradients(torch.bfloat16, size, size, 32, True, True, by_channel, 0)
    assert found.stages == stages
    assert found.staged or not by_channel
    assert found.registers == (size == 128 and kib > 99)
    assert max(found.memory(torch.bfloat16, size, size, True, by_channel)) <= kib << 10


@pytest.mark.parametrize("decays", [True, "channels"])
def test_a_call_announces_all_kernels_that_it_loads(decays: object) -> None:
    """So they are compiled side by side."""
    told: list[list[KernelSpec]] = []
    with fake_gpu() as gpu, runtime.before_loading(lambda specs, device: told.append([*specs])):
        x = operands((torch.bfloat16, True, True, decays, 1, 1, 64, 64))
        z = torch.empty(x.v.shape)
        kernels.forward(x, None, empty_results(x), None, z=z)
        assert len(told) == 1
        assert {*told[0]} == {*gpu._kernels}
        kernels.backward(x, None, x.v, None, z=z)
        assert {*told[1]} == {*gpu._kernels} - {*told[0]}


@pytest.mark.parametrize("decays", [True, "channels"])
def test_a_backward_with_z_solves_no_system(decays: object) -> None:
    """Without, it takes the forward first."""
    with fake_gpu() as gpu:
        x = operands((torch.bfloat16, True, True, decays, 1, 1, 64, 64))
        kernels.backward(x, None, x.v, None, z=torch.empty(x.v.shape))
        sources = [spec.source for spec in gpu.specs]
        assert "delta_states.cu" in sources[:2]
        assert not {"delta.cu", "delta_begin.cu", "delta_chunks.cu"} & {*sources}
        gpu.start()
        kernels.backward(x, None, x.v, None)
        again = [spec.source for spec in gpu.specs]
        assert again[1] == "delta_chunks.cu"
        assert again[2:] == sources


@pytest.mark.parametrize("decays", [True, "channels"])
def test_a_second_call_describes_no_kernel(decays: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """An announcement that nobody hears costs a call nothing."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a kernel was described again")

    with fake_gpu():
        x = operands((torch.bfloat16, True, True, decays, 1, 1, 64, 64))
        for _ in range(2):
            kernels.forward(x, None, empty_results(x), None)
            kernels.backward(x, None, x.v, None)
            for module, name in (
                (linear_attention, "kernel_spec"),
                (linear_attention, "spec_of"),
                (kernels, "gradients_spec"),
            ):
                monkeypatch.setattr(module, name, refuse)


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize(("dtype", "tensor_core"), [(torch.float32, False), (torch.bfloat16, True)])
def test_gradients_by_records_take_a_schedule_that_has_kernels(
    dtype: torch.dtype, tensor_core: bool, delta: bool, by_channel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of the matrix are in registers with tensor cores and the delta rule alone."""
    on_gpu_with(132, 227, monkeypatch)
    found = schedules.choose_of_gradients(dtype, 64, 64, 32, tensor_core, delta, by_channel, 0)
    assert found.takes(64, tensor_core, delta, by_channel)
    assert found.registers == (tensor_core and delta)


@pytest.mark.parametrize(
    ("blocks", "size", "by_channel", "tile"),
    [
        *((32, 128, False, 32), (66, 128, False, 64), (132, 128, False, 128), (256, 64, False, 64)),
        *((256, 32, False, 32), (32, 128, True, 32), (66, 128, True, 64), (256, 128, True, 64)),
    ],
)
def test_tiles_of_gradients_are_as_wide_as_fills_the_gpu(
    blocks: int, size: int, by_channel: bool, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu_with(132, 227, monkeypatch)
    found = schedules.choose_of_gradients(torch.bfloat16, 128, size, blocks, True, True, by_channel, 0)
    assert (found.registers, found.tile) == (True, tile)


def operands(form: tuple[object, ...], device: str = "cpu") -> Delta:
    dtype, tensor_core, rule, decays, key_heads, heads, key_size, size = form
    assert isinstance(dtype, torch.dtype)
    r = torch.Generator().manual_seed(3)
    tokens = sum(LENGTHS) + 4

    def normal(*shape: object) -> Tensor:
        return torch.randn(*shape, generator=r)

    q, k = (torch.nn.functional.normalize(normal(tokens, key_heads, key_size), dim=-1) for _ in range(2))
    v = normal(tokens, heads, size)
    channels = (key_size,) if decays == "channels" else ()
    g = -normal(tokens, heads, *channels).abs() * 0.2 if decays else None
    beta = normal(tokens, heads).sigmoid()
    initial = normal(len(LENGTHS), heads, key_size, size) * 0.3
    weights, skip = (beta, normal(heads, size)) if rule == "weighted" else (None, None)
    beta = beta if rule is True else None
    ends = list(itertools.accumulate(LENGTHS, initial=2))
    spans = torch.tensor([*itertools.pairwise(ends)], dtype=torch.int32)
    for t in (q, k, v):  # tokens of no sequence are not read
        t[[0, 1, -1]] = torch.nan
    given = [None if t is None else t.to(device) for t in (g, beta, weights, skip, initial, spans)]
    contract = FMA if not tensor_core else TENSOR_CORE
    key = contract.key
    if device == "cpu" and tensor_core:
        from samebits.backends.cuda import matmul

        key = TENSOR_CORE.on(matmul.family(0)).key
    moved = (t.to(dtype).to(device) for t in (q, k, v))
    return Delta(*moved, *given, 0.25, key)  # type: ignore[arg-type]


STEP_FORMS = [
    # dtype, delta rule, decays, key heads, heads, key size, size
    (torch.bfloat16, True, True, 2, 4, 128, 128),
    (torch.float16, True, True, 1, 2, 64, 192),
    (torch.bfloat16, True, False, 1, 1, 96, 64),
    (torch.float16, False, True, 1, 1, 256, 40),
    (torch.bfloat16, False, False, 1, 3, 16, 8),
    (torch.bfloat16, "weighted", True, 1, 2, 128, 64),
    (torch.float16, "weighted", True, 1, 3, 64, 136),
    (torch.bfloat16, True, "channels", 2, 4, 128, 128),
    (torch.float16, True, "channels", 1, 2, 48, 40),
    (torch.bfloat16, True, "channels", 1, 1, 144, 64),
]
POSITIONS = (0, 1, 5, 15, 16, 17, 31, 37, 48, 57, 63, 64)
"""Rows of the open chunk before a step."""


def step(
    form: tuple[object, ...], positions: Sequence[int] = POSITIONS, device: str = "cpu"
) -> tuple[Delta, RecurrentState]:
    """A token for each sequence, cut out of wider rows, and states: garbage where there are no rows.

    The last sequence is one of NaN.
    """
    dtype, rule, decays, key_heads, heads, key_size, size = form
    assert isinstance(dtype, torch.dtype)
    r = torch.Generator().manual_seed(7)
    n = len(positions)

    def normal(*shape: object) -> Tensor:
        return torch.randn(*shape, generator=r)

    widths = [key_heads * key_size] * 2 + [heads * size]  # type: ignore[operator,list-item]
    rows = normal(n, sum(widths) + 2)
    rows /= key_size**0.25  # type: ignore[operator]
    rows[-1] = torch.nan
    parts = rows.to(dtype).to(device)[:, 2:].split(widths, 1)
    q, k, v = (t.unflatten(1, (h, -1)) for t, h in zip(parts, (key_heads, key_heads, heads), strict=True))
    channels = (key_size,) if decays == "channels" else ()
    g = (-normal(n, heads, *channels).abs() * 0.2).to(device) if decays else None
    beta = normal(n, heads).sigmoid().to(device)
    weights, skip = (beta, normal(heads, size).to(device)) if rule == "weighted" else (None, None)  # type: ignore[arg-type]
    beta = beta if rule is True else None
    own = delta.layout("delta", heads, key_size, size, dtype, bool(channels), rule == "weighted")  # type: ignore[arg-type]
    state = RecurrentState(own, sequences=n)
    state.count.copy_(torch.tensor(positions))
    state.parts["matrix"].copy_(normal(*state.parts["matrix"].shape) * 0.3)
    state.parts["keys"].copy_(normal(*state.parts["keys"].shape) / key_size**0.5)  # type: ignore[operator]
    state.parts["updates"].copy_(normal(*state.parts["updates"].shape))
    if decays:
        state.parts["decays"].copy_((-normal(n, heads, 64, *channels).abs() * 0.2).cumsum(2))
    if weights is not None:
        state.parts["weights"].copy_(normal(n, heads, 64).sigmoid())
    for i, count in enumerate(positions):
        for name in rows_of(state):
            state.parts[name][i, :, count:] = torch.nan
    state.parts["matrix"][-1] = torch.nan
    key = TENSOR_CORE.key
    if device == "cpu":
        from samebits.backends.cuda import matmul

        key = TENSOR_CORE.on(matmul.family(0)).key
    spans = torch.empty(n, 0, dtype=torch.int32, device=device)
    x = Delta(q, k, v, g, beta, weights, skip, None, spans, 0.25, key)
    return x, RecurrentState(own, state.data.to(device))


OF_STEPS = [
    # form of a step; types of dt, of its bias and of D; columns of D; softplus; limits
    (STEP_FORMS[5], torch.float32, torch.float32, torch.bfloat16, False, True, (0.0, math.inf)),
    (STEP_FORMS[6], torch.float16, None, torch.float32, True, False, (0.05, 0.7)),
    (STEP_FORMS[5], torch.bfloat16, torch.bfloat16, None, False, True, (0.0, 0.5)),
]


def of_steps(
    form: tuple[Any, ...], positions: Sequence[int] = POSITIONS, device: str = "cpu"
) -> tuple[Delta, RecurrentState]:
    """A token whose weights, decays and D are computed from its step."""
    of_step, dt, bias, d, columns, softplus, limits = form
    x, state = step(of_step, positions, device)
    (n, heads, size), r = x.v.shape, torch.Generator().manual_seed(11)
    of_dt = torch.randn(n, 2 * heads, generator=r)[:, ::2]
    of_bias = None if bias is None else torch.randn(heads, generator=r).to(bias).to(device)
    of_d = None if d is None else torch.randn(heads, size, generator=r)[:, : size if columns else 1]
    of_d = None if of_d is None else of_d.to(d).to(device).squeeze(1)
    a = -torch.rand(heads, generator=r).to(device)
    given = Steps(of_dt.to(dt).to(device), of_bias, a, of_d, softplus, *limits)
    return dataclasses.replace(x, g=None, weights=None, skip=None, steps=given), state


def rows_of(state: RecurrentState) -> list[str]:
    """The parts that have a chunk's rows."""
    return [name for name in state.parts if name not in ("matrix", "marks")]


def empty_results(x: Delta) -> Tensor:
    """Memory for results, poisoned: float32 for some of those with weights."""
    wide = x.weighted and x.v.shape[1] == 2
    return torch.full(x.v.shape, torch.nan, dtype=torch.float32 if wide else x.v.dtype, device=x.v.device)


def assert_same_step(got: tuple[Tensor, RecurrentState], want: tuple[Tensor, RecurrentState]) -> None:
    """The bits of results and states, but for the sequence of NaN."""
    (out, state), (out_wanted, wanted) = got, want
    assert_same_bits(out[:-1].cpu(), out_wanted[:-1])
    assert out[-1].isnan().all()
    assert state.count.tolist() == wanted.count.tolist()
    assert not state.parts["marks"].any()
    assert_same_bits(state.parts["matrix"][:-1].cpu(), wanted.parts["matrix"][:-1])
    for n, count in enumerate(wanted.count[:-1].int().tolist()):
        for name in rows_of(wanted):
            assert_same_bits(state.parts[name][n, :, :count].cpu(), wanted.parts[name][n, :, :count])


def layout_of(x: Delta) -> Layout:
    heads, size = x.v.shape[1:]
    sizes = heads, x.q.shape[2], size
    return delta.layout("delta", *sizes, x.q.dtype, x.by_channel, x.weights is not None)


def pieces(run: object, x: Delta) -> tuple[Tensor, Tensor, RecurrentState]:
    """Results by calls that go on, the last matrices, and the state."""
    own = layout_of(x)
    device = x.q.device
    state = RecurrentState(own, sequences=len(x.spans), device=device)
    state.parts["matrix"].copy_(x.initial)
    out = empty_results(x)
    closed = torch.full(state.parts["matrix"].shape, torch.nan, device=device)
    at = x.spans[:, 0].clone()
    for step in STEPS:
        after = torch.minimum(at + step, x.spans[:, 1])
        part = torch.stack([at, after], 1).to(torch.int32).contiguous()
        run(  # type: ignore[operator]
            dataclasses.replace(x, initial=None, spans=part), state.data, out, closed
        )
        at = after
    return out, closed, state


def gradients_of(x: Delta) -> Iterator[tuple[Delta, Tensor | None, Tensor, Tensor | None]]:
    """Calls whose gradients are computed, states before them, and the gradients of their results."""
    r = torch.Generator().manual_seed(5)
    grad = torch.randn(x.v.shape, generator=r).to(x.v.dtype)
    assert x.initial is not None
    of_closed = torch.randn(x.initial.shape, generator=r)
    yield x, None, grad, of_closed
    yield dataclasses.replace(x, initial=None), None, grad, None
    state = RecurrentState(layout_of(x), sequences=len(x.spans))
    cut = x.spans[:, :1] + torch.tensor([[40], [0], [2], [64]])
    first = dataclasses.replace(x, initial=None, spans=torch.cat([x.spans[:, :1], cut], 1).int())
    reference.forward(first, state.data, torch.zeros_like(x.v), None)
    rest = dataclasses.replace(x, initial=None, spans=torch.cat([cut, x.spans[:, 1:]], 1).int())
    yield rest, state.data, grad, of_closed


def in_turns(schedules: Sequence[Any], forms: Sequence[tuple[object, ...]] = FORMS) -> list[Any]:
    """Forms with a third of the schedules each, all of them together: a kernel takes seconds to compile."""
    return [
        pytest.param(form, schedule, id=f"{form}, {schedule}")
        for i, form in enumerate(forms)
        for schedule in schedules[i % 3 :: 3]
    ]


@pytest.mark.gpu
@pytest.mark.parametrize(("form", "schedule"), in_turns([*schedules.catalogue()]))
def test_every_schedule_has_the_references_bits(
    form: tuple[object, ...], schedule: schedules.Schedule
) -> None:
    on_cpu, on_gpu = operands(form), operands(form, "cuda")
    padded = -(-on_gpu.q.shape[2] // 16) * 16
    options = bool(form[1]), on_gpu.by_channel, on_gpu.weights is not None
    if schedule.memory(on_gpu.q.dtype, padded, *options) > 227 << 10:
        pytest.skip("takes more shared memory than there is")
    assert_same_forward(on_cpu, on_gpu, schedule)


@pytest.mark.gpu
@pytest.mark.parametrize(("form", "schedule"), in_turns([*catalogue_of_linear(), None], LINEAR_FORMS))
def test_every_schedule_of_linear_attention_has_the_references_bits(
    form: tuple[object, ...], schedule: Linear | None
) -> None:
    if schedule is not None:
        kernels_of = schedule.states, schedule.rows
        if max(s.memory(form[6], form[2] == "weighted") for s in kernels_of) > 227 << 10:
            pytest.skip("takes more shared memory than there is")
    assert_same_forward(operands(form), operands(form, "cuda"), schedule)


@pytest.mark.gpu
@pytest.mark.parametrize("form", CHUNK_FORMS)
@pytest.mark.parametrize("schedule", [*schedules.catalogue_of_chunks(), None], ids=str)
def test_every_schedule_of_whole_chunks_has_the_references_bits(
    form: tuple[object, ...], schedule: schedules.DeltaChunks | None
) -> None:
    assert_same_forward(operands(form), operands(form, "cuda"), schedule)


@pytest.mark.gpu
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_whole_chunks_have_the_bits_of_windows(seed: int, by_channel: bool) -> None:
    """At random shapes, of more chunks than fit into a test on a CPU."""
    r = torch.Generator().manual_seed(seed)
    heads, group, key_size, size, tokens = (
        int(torch.randint(low, high, (), generator=r))
        for low, high in ((1, 5), (1, 4), (1, 129), (1, 260), (800, 1500))
    )
    q, k = (
        torch.nn.functional.normalize(torch.randn(tokens, heads, key_size, generator=r), dim=-1)
        for _ in range(2)
    )
    v, cuts = torch.randn(tokens, heads * group, size, generator=r), torch.randint(tokens, (2,), generator=r)
    g, beta = (torch.rand(tokens, heads * group, generator=r) for _ in range(2))
    if by_channel:
        g = torch.rand(tokens, heads * group, key_size, generator=r)
    spans = torch.tensor([*itertools.pairwise([0, *sorted(cuts.tolist()), tokens])], dtype=torch.int32)
    given = (t.to(torch.bfloat16).cuda() for t in (q, k, v))
    x = Delta(*given, -g.cuda() / 4, beta.cuda(), None, None, None, spans.cuda(), 0.25, TENSOR_CORE.key)  # type: ignore[arg-type]
    found = []
    for schedule in (schedules.Schedule(16, 64, 8, 1), None, *schedules.catalogue_of_chunks()):
        out, closed = empty_results(x), torch.full((3, heads * group, key_size, size), torch.nan).cuda()
        kernels.forward(x, None, out, closed, schedule)
        found.append((out, closed))
    for got in found[1:]:
        for a, b in zip(got, found[0], strict=True):
            assert_same_bits(a, b)


def assert_same_forward(on_cpu: Delta, on_gpu: Delta, schedule: Any) -> None:
    """The results of one call and of several, the matrices after it, and the states that these leave."""

    def forward(x: Delta, state: Tensor | None, out: Tensor, closed: Tensor | None) -> None:
        kernels.forward(x, state, out, closed, schedule)

    results = []
    for x, run in ((on_cpu, reference.forward), (on_gpu, forward)):
        out = empty_results(x)
        closed = torch.full(x.initial.shape, torch.nan, device=x.v.device)  # type: ignore[union-attr]
        run(x, None, out, closed)
        by_pieces, last, state = pieces(run, x)
        results.append((out, closed, by_pieces, last, state))
    for want, got in zip(*(r[:4] for r in results), strict=True):
        assert_same_bits(got.cpu(), want)
    want, got = results[0][4], results[1][4]
    assert got.count.tolist() == want.count.tolist()
    assert not got.parts["marks"].any()
    assert_same_bits(got.parts["matrix"].cpu(), want.parts["matrix"])
    for n, count in enumerate(want.count.int().tolist()):
        for name in rows_of(want):
            assert_same_bits(got.parts[name][n, :, :count].cpu(), want.parts[name][n, :, :count])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("make", "form"), [*((step, f) for f in STEP_FORMS), *((of_steps, f) for f in OF_STEPS)]
)
def test_every_step_has_the_references_bits(make: Any, form: tuple[object, ...]) -> None:
    """A token after each number of rows, then another, by all schedules: through a chunk's end."""
    found = []
    every = [*schedules.catalogue_of_steps("channels" in form), None]
    for device, schedule in [("cpu", None), *(("cuda", s) for s in every)]:
        x, state = make(form, [*range(65), 7], device)
        for _ in range(2):
            out = empty_results(x)
            if device == "cpu":
                reference.forward(x, state.data, out, None)
            else:
                kernels.forward(x, state.data, out, None, schedule)
        found.append((out, state))
    for got in found[1:]:
        assert_same_step(got, found[0])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("form", "schedule"),
    [
        *in_turns([*schedules.catalogue_of_gradients()]),
        *in_turns([*catalogue_of_linear_gradients(), None], LINEAR_FORMS),
    ],
)
def test_gradients_have_the_references_bits(
    form: tuple[object, ...], schedule: schedules.DeltaGradients | LinearGradients | None
) -> None:
    """From matrices, and from where a state goes on."""
    on_cpu = operands(form)
    padded, size = -(-on_cpu.q.shape[2] // 16) * 16, on_cpu.v.shape[2]
    fits = True
    if isinstance(schedule, LinearGradients):
        fits = schedule.most_memory(padded, size, on_cpu.weighted) <= 227 << 10
    elif schedule is not None:
        memory = schedule.memory(on_cpu.q.dtype, padded, size, bool(form[1]), on_cpu.by_channel)
        fits = max(memory) <= 227 << 10
        fits &= schedule.takes(padded, bool(form[1]), on_cpu.beta is not None, on_cpu.by_channel)
    if not fits:
        pytest.skip("takes more shared memory than there is, or no such operands")
    contract = TENSOR_CORE.key if form[1] else FMA.key
    for x, *given in gradients_of(on_cpu):
        want = reference.backward(x, *given)
        moved = {
            name: t.cuda() if isinstance(t := getattr(x, name), Tensor) else t
            for name in ("q", "k", "v", "g", "beta", "weights", "skip", "initial", "spans", "scale")
        }
        state, *grads = (None if t is None else t.cuda() for t in given)
        before = None if state is None else state.clone()
        for a, b in zip(
            kernels.backward(Delta(**moved, contract=contract), state, *grads, schedule), want, strict=True
        ):
            if a is None or b is None:
                assert a is b
            else:
                assert_same_bits(a.cpu(), b)
        if state is not None:  # another backward may start from it
            assert torch.equal(state, before)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("form", "number"), in_turns(range(len(schedules.catalogue_of_states())), CHUNK_FORMS)
)
def test_every_schedule_of_states_has_the_references_bits(
    form: tuple[object, ...], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From z that each schedule of whole chunks has left. Results are the same with z."""
    states, of_chunks = schedules.catalogue_of_states()[number], schedules.catalogue_of_chunks()
    chunks = of_chunks[number % len(of_chunks)]
    monkeypatch.setattr(linear_attention, "choose_states", lambda *_: states)
    for x, *given in gradients_of(operands(form)):
        want, wanted_out = reference.backward(x, *given), torch.zeros_like(x.v)
        before, *_ = given
        reference.forward(x, None if before is None else before.clone(), wanted_out, None)
        moved = {
            field.name: t.cuda() if isinstance(t := getattr(x, field.name), Tensor) else t
            for field in dataclasses.fields(x)
        }
        on_gpu = Delta(**moved | {"contract": TENSOR_CORE.key})
        state, *grads = (None if t is None else t.cuda() for t in given)
        z = torch.full(x.v.shape, torch.nan, device="cuda")
        out = torch.zeros_like(on_gpu.v)
        kernels.forward(on_gpu, None if state is None else state.clone(), out, None, chunks, z=z)
        assert_same_bits(out.cpu(), wanted_out)
        assert z[:2].isnan().all()  # tokens of no sequence
        for a, b in zip(kernels.backward(on_gpu, state, *grads, z=z), want, strict=True):
            if a is None or b is None:
                assert a is b
            else:
                assert_same_bits(a.cpu(), b)


@pytest.mark.gpu
@pytest.mark.parametrize("key_size", [64, 144])
@pytest.mark.parametrize("operation", ["gated_delta_rule", "kda"])
def test_a_compiled_training_step_has_the_same_bits(operation: str, key_size: int) -> None:
    """Tensors without data have the shape of what a forward saves."""
    r, sizes = torch.Generator().manual_seed(0), ((key_size,), (key_size,), (64,))
    leaves = [torch.randn(1, 150, 2, *of, generator=r).to(torch.bfloat16) / 4 for of in sizes]
    leaves.append(-torch.rand(1, 150, 2, *((key_size,) if operation == "kda" else ()), generator=r))
    leaves.append(torch.rand(1, 150, 2, generator=r))
    leaves = [t.cuda().requires_grad_() for t in leaves]

    def loss(*x: Tensor) -> Tensor:
        return getattr(samebits, operation)(*x)[0].float().sum()  # type: ignore[no-any-return]

    want = torch.autograd.grad(loss(*leaves), leaves)
    for a, b in zip(torch.autograd.grad(torch.compile(loss)(*leaves), leaves), want, strict=True):
        assert_same_bits(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("operation", ["gated_delta_rule", "kda", "lightning_attention"])
def test_the_public_functions_gradients(operation: str, dtype: torch.dtype) -> None:
    r = torch.Generator().manual_seed(0)
    B, T, H, D = 3, 150, 2, 64
    given = [torch.randn(B, T, h, D, generator=r).to(dtype) / 4 for h in (H, H, 2 * H)]
    channels = (D,) if operation == "kda" else ()
    given.append(-torch.rand(B, T, 2 * H, *channels, generator=r))
    if operation != "lightning_attention":
        given.append(torch.rand(B, T, 2 * H, generator=r))
    grad = torch.randn(B, T, 2 * H, D, generator=r).to(dtype)
    of_final = torch.randn(B, 2 * H, D, D, generator=r)

    def run(device: str) -> list[Tensor]:
        leaves = [t.to(device).requires_grad_() for t in given]
        out, state = getattr(samebits, operation)(
            *leaves[:3],
            **dict(zip(("g", "beta"), leaves[3:], strict=False)),
            output_final_state=True,
            key_start=torch.tensor([0, 3, 80], device=device),
        )
        return [
            t.cpu()
            for t in torch.autograd.grad([out, state.matrix], leaves, [grad.to(device), of_final.to(device)])
        ]

    for got, want in zip(run("cuda"), run("cpu"), strict=True):
        assert_same_bits(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("operation", ["gated_delta_rule", "kda"])
def test_the_public_function_decodes_with_the_bits_of_a_prefill(operation: str, dtype: torch.dtype) -> None:
    r = torch.Generator().manual_seed(0)
    B, T, H, D = 3, 150, 4, 128
    q, k, v = (torch.randn(B, T, H, D, generator=r).to(dtype) for _ in range(3))
    g = -torch.rand(B, T, H, *((D,) if operation == "kda" else ()), generator=r)
    given = [q, k, v, g, torch.rand(B, T, H, generator=r)]
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    rule = getattr(samebits, operation)
    want, _ = rule(*given, **options)
    x = [t.cuda() for t in given]
    whole, _ = rule(*x, **options)
    assert_same_bits(whole.cpu(), want)
    found, state = rule(*(t[:, :100] for t in x), **options)
    steps = [found]
    for t in range(100, T):
        o, state = rule(*(y[:, t : t + 1] for y in x), initial_state=state, **options)
        steps.append(o)
    assert_same_bits(torch.cat(steps, 1), whole)
