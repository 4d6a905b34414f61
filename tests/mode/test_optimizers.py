"""Steps of PyTorch's optimizers: a weight's new value does not depend on its place in a tensor."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim import Adam, AdamW, Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

from samebits.mode import UncoveredError, batch_invariant, set_batch_invariant_mode
from samebits.testing import assert_same_bits

NOT_ELEMENTWISE = {
    "Adafactor": "scales a step by norms of the parameter and of its gradient, of rows and of columns",
    "LBFGS": "multiplies the gradients of all parameters",
    "Muon": "multiplies a gradient that is a matrix by itself",
    "SparseAdam": "takes sparse gradients",
}
OPTIMIZERS = [
    kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind)
    and issubclass(kind, Optimizer)
    and kind is not Optimizer
    and name not in NOT_ELEMENTWISE
]
FORMS = ({}, {"foreach": True}, {"foreach": False}, {"fused": True}, {"fused": True, "lr": torch.tensor(0.1)})
OPTIONS = (
    {},
    {"weight_decay": 0.1, "maximize": True},
    {"amsgrad": True},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.9, "dampening": 0.5},
    {"momentum": 0.9, "centered": True},
)
CASES = [
    pytest.param(kind, {**form, **options}, id=f"{kind.__name__}-{form}-{options}")
    for kind in OPTIMIZERS
    for form in FORMS
    for options in OPTIONS
    if {*form, *options} <= {*inspect.signature(kind).parameters}
]
SIZE = 131
ONE_BY_ONE = [7] * 18 + [5]


def trained(kind: Any, sizes: Sequence[int], dtype: torch.dtype = torch.float32, **options: Any) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    start, *grads = (torch.randn(SIZE, generator=generator).to(dtype) for _ in range(4))
    parts = [p.clone().requires_grad_() for p in start.split(sizes)]
    optimizer = kind(parts, **options)
    for grad in grads:
        for p, g in zip(parts, grad.split(sizes), strict=True):
            p.grad = g.clone()
        optimizer.step()
    return torch.cat([p.detach() for p in parts])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kind", "options"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_weight_takes_the_same_step_in_any_shard(
    kind: Any, options: dict[str, Any], dtype: torch.dtype
) -> None:
    with batch_invariant("error"):
        assert_same_bits(trained(kind, ONE_BY_ONE, dtype, **options), trained(kind, [SIZE], dtype, **options))


def test_in_the_process_too() -> None:
    options = {"fused": True, "momentum": 0.9, "nesterov": True, "lr": 0.1}
    with set_batch_invariant_mode(True, "error"):
        assert_same_bits(
            trained(torch.optim.SGD, ONE_BY_ONE, **options), trained(torch.optim.SGD, [SIZE], **options)
        )


def test_whole_vectors_take_pytorchs_step() -> None:
    """What is padded is the remainder alone: elsewhere the bits are PyTorch's."""
    plain = trained(AdamW, [SIZE], fused=True)
    with batch_invariant("error"):
        covered = trained(AdamW, [SIZE], fused=True)
    assert_same_bits(covered[:128], plain[:128])
    torch.testing.assert_close(covered, plain)


def steps(params: list[Tensor], **options: Any) -> list[Tensor]:
    optimizer = Adam(params, fused=True, **options)
    for _ in range(3):
        for i, p in enumerate(params):
            p.grad = torch.full_like(p, 0.1 * (i + 1))
        optimizer.step()
    return [p.detach() for p in params]


def test_parameters_of_any_layout() -> None:
    def params() -> list[Tensor]:
        x = torch.arange(210.0).view(2, 5, 7, 3).contiguous(memory_format=torch.channels_last)
        return [x, torch.arange(35.0).view(5, 7).t(), torch.tensor(2.0), torch.empty(0), torch.ones(128)]

    plain = steps([p.requires_grad_() for p in params()])
    with batch_invariant("error"):
        for mine, theirs in zip(steps([p.requires_grad_() for p in params()]), plain, strict=True):
            torch.testing.assert_close(mine, theirs)
            assert mine.stride() == theirs.stride()


def test_scaled_gradients_are_written_back_and_infinities_skip_the_step() -> None:
    def stepped(found_inf: float) -> tuple[Tensor, Tensor]:
        p = torch.ones(67, requires_grad=True)
        p.grad = torch.full_like(p, 6.0)
        optimizer = Adam([p], fused=True)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(3.0), torch.tensor(found_inf)
        optimizer.step()
        return p.detach(), p.grad

    for found_inf in (0.0, 1.0):
        plain = stepped(found_inf)
        with batch_invariant("error"):
            for mine, theirs in zip(stepped(found_inf), plain, strict=True):
                torch.testing.assert_close(mine, theirs)


@pytest.fixture
def mesh() -> Any:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        torch.distributed.destroy_process_group()


def test_shards_of_fsdp(mesh: Any) -> None:
    """A DTensor takes its step where this rank's part lies."""
    values = torch.linspace(-1, 1, 67)

    def stepped(make: Any) -> Any:
        p = make(values.clone()).requires_grad_()
        optimizer = torch.optim.SGD([p], lr=0.3, momentum=0.9, fused=True)
        for scale in (0.1, 0.7):
            p.grad = make(values.sin() * scale)
            optimizer.step()
        return p.detach()

    with batch_invariant("error"):
        sharded = stepped(lambda t: distribute_tensor(t, mesh))
        assert_same_bits(sharded.to_local(), stepped(lambda t: t))
        p = distribute_tensor(values, mesh).requires_grad_()
        p.grad = values.clone()
        with pytest.raises(UncoveredError, match="_fused_sgd_"):
            torch.optim.SGD([p], fused=True).step()
    assert sharded.placements == (Replicate(),)


def test_shards_where_the_process_was_in_the_mode_before_a_context() -> None:
    """Rules for CPUs are at the CPU's own keys then, which DTensor comes before. Steps are not."""
    run = f"""
import pytest
from samebits.mode import set_batch_invariant_mode
with set_batch_invariant_mode():
    pass
raise SystemExit(pytest.main(["-q", "-p", "no:cacheprovider", r"{__file__}", "-k", "test_shards_of_fsdp"]))
"""
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


@pytest.fixture
def two_ranks() -> Any:
    """A mesh in which this is the first of two ranks, and nothing is exchanged."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("size", [66, 67])  # two equal parts, and two that are not
@pytest.mark.parametrize("kind", [k for k in OPTIMIZERS if k is not torch.optim.Rprop])  # no DTensor
def test_steps_of_shards_exchange_nothing(kind: Any, size: int, two_ranks: Any) -> None:
    """Operators of one tensor at a time compute a rank's part alone, as PyTorch's do."""
    values = torch.linspace(-1, 1, size)

    def sharded(t: Tensor) -> Tensor:
        layout = {"shape": t.shape, "stride": t.stride(), "run_check": False}
        return DTensor.from_local(t.chunk(2)[0].clone(), two_ranks, [Shard(0)], **layout)

    def stepped(make: Any) -> Any:
        p = make(values.clone()).requires_grad_()
        optimizer = kind([p], **{"foreach": False} if "foreach" in inspect.signature(kind).parameters else {})
        for scale in (0.1, 0.7):
            p.grad = make(values.sin() * scale)
            optimizer.step()
        return p.detach()

    with batch_invariant("error"), CommDebugMode() as exchanges:
        part = stepped(sharded)
        assert_same_bits(part.to_local(), stepped(torch.clone)[: (size + 1) // 2])
    assert exchanges.get_total_counts() == 0


@pytest.mark.parametrize("size", [66, 67])
@pytest.mark.parametrize("function", [torch.exp, torch.tanh, lambda t: torch.add(t, t, alpha=0.3)])
def test_elementwise_functions_of_shards(function: Any, size: int, two_ranks: Any) -> None:
    whole = torch.linspace(-1, 1, size).requires_grad_()
    part = whole.detach().chunk(2)[0].clone().requires_grad_()
    with batch_invariant("error"):
        want = function(whole)
        want.backward(whole.detach().cos())
        layout = {"shape": whole.shape, "stride": whole.stride(), "run_check": False}
        got = function(DTensor.from_local(part, two_ranks, [Shard(0)], **layout))
        assert got.shape == whole.shape
        assert got.placements == (Shard(0),)
        got.to_local().backward(part.detach().cos())
    assert_same_bits(got.to_local().detach(), want.detach()[: len(part)])
    assert_same_bits(part.grad, whole.grad[: len(part)])
