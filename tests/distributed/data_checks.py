"""Checks of data parallelism that run on every rank: ``test_data.py``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import samebits
from samebits.distributed import GradientGroups, OrderedReduceScatter, ordered_hook
from samebits.testing import assert_same_bits, values
from tests.distributed.exchange_checks import tree
from tests.support.ranks import device, place

GROUPS = 8


def make(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 6, bias=False)).to(dtype)
    samebits.convert(model)
    return model.to(device())


def batch(part: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return place(values("normal", (5, 12), dtype, 1000 + part))


def gradients_of(part: int, dtype: torch.dtype) -> list[Tensor]:
    model = make(dtype)
    y = model(batch(part, dtype))
    y.backward(y.detach())
    return [p.grad.cpu() for p in model.parameters() if p.grad is not None]


def mean_over_ranks(dtype: torch.dtype) -> list[Tensor]:
    ranks = dist.get_world_size()
    of_ranks = [gradients_of(rank, dtype) for rank in range(ranks)]
    return [(tree([*grads]) / ranks).to(dtype) for grads in zip(*of_ranks, strict=True)]


def check_ddp() -> None:
    for dtype, bucket in ((torch.float32, 25), (torch.bfloat16, 25), (torch.float32, 0.0005)):
        want = mean_over_ranks(dtype)
        ddp = nn.parallel.DistributedDataParallel(make(dtype), bucket_cap_mb=bucket)  # type: ignore[arg-type]
        ddp.register_comm_hook(None, ordered_hook)
        for _ in range(2):  # the second time, with other buckets
            ddp.zero_grad()
            y = ddp(batch(dist.get_rank(), dtype))
            y.backward(y.detach())
            for p, expected in zip(ddp.parameters(), want, strict=True):
                assert_same_bits(p.grad, expected, f"{dtype} {bucket}")


def check_fsdp() -> None:
    ranks = dist.get_world_size()
    mesh = init_device_mesh(device().type, (ranks,))
    for dtype, summed in ((torch.float32, False), (torch.bfloat16, False), (torch.float32, True)):
        want = mean_over_ranks(dtype)
        model: Any = make(dtype)
        for module in (model[0], model[2], model):
            fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
            module.set_custom_reduce_scatter(OrderedReduceScatter())
            module.set_force_sum_reduction_for_comms(summed)
        y = model(batch(dist.get_rank(), dtype))
        y.backward(y.detach())
        for p, expected in zip(model.parameters(), want, strict=True):
            assert_same_bits(p.grad.full_tensor(), expected, f"{dtype} {summed}")


def check_groups_have_the_bits_of_one_rank() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = make(dtype)
        unused = nn.Parameter(place(torch.ones(3)))
        gradients = GradientGroups([*model.parameters(), unused], GROUPS)
        of_groups = [gradients_of(part, dtype) for part in range(GROUPS)]
        want = [tree([*grads]).to(dtype) for grads in zip(*of_groups, strict=True)]
        for _ in range(2):
            for part in gradients.own:
                y = model(batch(part, dtype))
                y.backward(y.detach())
                gradients.add()
            gradients.reduce()
            for p, expected in zip([*model.parameters(), unused], [*want, torch.zeros(3)], strict=True):
                assert p.grad is not None
                assert_same_bits(p.grad, expected, str(dtype))
                p.grad = None


def check_refusals() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with pytest.raises(ValueError, match=r"groups.*power of two"):
        GradientGroups([], 3)
    if ranks > 1:
        with pytest.raises(ValueError, match="multiple of"):
            GradientGroups([], 1)
        with pytest.raises(ValueError, match="differ from rank 0"):
            GradientGroups([nn.Parameter(place(torch.ones(2 + rank)))])
    groups = GradientGroups([nn.Parameter(place(torch.ones(2)))], ranks)
    with pytest.raises(RuntimeError, match="got 0"):
        groups.reduce()
    groups.add()
    with pytest.raises(RuntimeError, match="got one more"):
        groups.add()
    if ranks > 1:
        x = place(torch.zeros(8))
        with pytest.raises(NotImplementedError, match="SUM or AVG"):
            OrderedReduceScatter()(x[: 8 // ranks], x, dist.group.WORLD, dist.ReduceOp.MAX)  # type: ignore[arg-type]
