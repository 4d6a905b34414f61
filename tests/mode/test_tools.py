"""PyTorch's tools that look at operators: they see this library's, by name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import flop_counter
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

import samebits
from samebits.mode import batch_invariant, set_batch_invariant_mode
from samebits.testing import assert_same_bits
from tests.support.devices import DEVICES

MODES: dict[str, Callable[[], Any]] = {
    "context": lambda: batch_invariant("error"),
    "process": lambda: set_batch_invariant_mode(True, "error"),
}


def counted(run: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def leaf(*shape: int, device: str = "cpu") -> Tensor:
    return torch.randn(shape, device=device, requires_grad=True)


CALLS: dict[str, Callable[[Callable[..., Tensor]], Tensor]] = {
    "mm": lambda new: new(5, 8) @ new(8, 7),
    "bmm": lambda new: new(3, 5, 8) @ new(3, 8, 7),
    "a batch with one matrix": lambda new: new(3, 5, 8) @ new(8, 7),
    "addmm": lambda new: torch.addmm(new(7), new(5, 8), new(8, 7)),
    "baddbmm": lambda new: torch.baddbmm(new(3, 5, 7), new(3, 5, 8), new(3, 8, 7)),
    "linear": lambda new: F.linear(new(2, 5, 8), new(7, 8), new(7)),
    "linear of one feature": lambda new: F.linear(new(2, 5, 1), new(7, 1)),
    "conv1d": lambda new: F.conv1d(new(2, 4, 9), new(6, 2, 3), new(6), groups=2),
    "conv2d": lambda new: F.conv2d(new(2, 4, 9, 8), new(6, 4, 3, 3), stride=2, padding=1),
    "softmax": lambda new: new(3, 4).softmax(1),
    "two layers": lambda new: F.linear(F.silu(F.linear(new(9, 8), new(16, 8))), new(3, 16)),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("device", DEVICES)
def test_flops_are_those_that_pytorch_counts(name: str, mode: str, device: str) -> None:
    def run() -> None:
        CALLS[name](partial(leaf, device=device)).sum().backward()

    expected = counted(run)
    with MODES[mode]():
        assert counted(run) == expected
    assert expected > 0 or name == "softmax"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("device", DEVICES)
def test_flops_of_attention(mode: str, device: str) -> None:
    q, k, v = (
        leaf(2, 4, 5, 16, device=device),
        leaf(2, 2, 9, 16, device=device),
        leaf(2, 2, 9, 16, device=device),
    )
    shapes = [(2, 4, n, 16) for n in (5, 9, 9)]  # old versions count no grouped heads
    with MODES[mode]():
        assert counted(
            lambda: F.scaled_dot_product_attention(q.detach(), k.detach(), v.detach(), enable_gqa=True)
        ) == flop_counter.sdpa_flop_count(*shapes)
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        assert counted(lambda: out.sum().backward()) == flop_counter.sdpa_backward_flop_count(
            out.shape, *shapes
        )


def test_flops_of_packed_and_paged_attention() -> None:
    q, k, v = torch.randn(7, 4, 16), torch.randn(9, 2, 16), torch.randn(9, 2, 16)
    starts, keys = torch.tensor([0, 3, 7]), torch.tensor([0, 4, 9])
    packed = counted(lambda: samebits.attention(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=keys))
    assert packed == 4 * 16 * 4 * (3 * 4 + 4 * 5)


def test_flops_of_log_probabilities_and_groups() -> None:
    hidden, weight = leaf(6, 8), leaf(11, 8)
    loss = samebits.linear_logp(hidden, weight, torch.arange(6)).sum()
    assert counted(lambda: samebits.linear_logp(hidden, weight, torch.arange(6))) == 2 * 6 * 8 * 11
    assert counted(loss.backward) == 2 * 2 * 6 * 8 * 11
    a, b, offs = leaf(6, 8), leaf(2, 8, 5), torch.tensor([2, 6], dtype=torch.int32)
    assert counted(lambda: samebits.grouped_mm(a, b, offs)) == 2 * 6 * 8 * 5
    assert counted(samebits.grouped_mm(a, b, offs).sum().backward) == 2 * 2 * 6 * 8 * 5


@pytest.mark.long
def test_the_counter_is_loaded_by_who_wants_it() -> None:
    program = (
        "import sys, samebits, torch; assert 'torch.utils.flop_counter' not in sys.modules;"
        "from torch.utils.flop_counter import FlopCounterMode, flop_registry;"
        "assert torch.ops.samebits.linear in flop_registry"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(F.rms_norm(x, (8,)))))


SAVED = [torch.ops.samebits.linear.default, torch.ops.samebits.attention.default]


def by_name(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in SAVED else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", [SAVED, by_name], ids=["list", "function"])
@pytest.mark.parametrize("device", DEVICES)
def test_selective_checkpoints_keep_what_they_name(policy: Any, mode: str, device: str) -> None:
    torch.manual_seed(0)
    block, x = Block().to(device), torch.randn(3, 5, 8, device=device)

    def step(context: Any) -> tuple[list[Tensor], int]:
        block.zero_grad()
        with FlopCounterMode(display=False) as counter:
            y = checkpoint(block, x, use_reentrant=False, **context) if context is not None else block(x)
            y.sum().backward()
        return [p.grad for p in block.parameters()], counter.get_total_flops()

    with MODES[mode]():
        plain, once = step(None)
        whole, twice = step({})
        kept, saved = step({"context_fn": partial(create_selective_checkpoint_contexts, policy)})
    for got in (whole, kept):
        for mine, theirs in zip(got, plain, strict=True):
            assert_same_bits(mine, theirs)
    forward = 2 * 2 * 15 * 8 * 16
    assert saved == once
    assert twice in (once + forward // 2, once + forward)  # the last layer's output is not asked for
