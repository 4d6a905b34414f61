"""Data parallelism: gradients of all ranks, added in a fixed order."""

# Without the import of annotations from __future__: DDP compares those of a hook.

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from samebits.distributed._groups import ALONE, Group, agree, all_to_all, group_of, name_of, ranks
from samebits.distributed.exchange import all_reduce, check_divides, finished, tree

__all__ = ["GradientGroups", "OrderedReduceScatter", "ordered_hook"]

_BUCKET = 1 << 25  # elements of gradients that are exchanged at once


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _beside(x: Tensor) -> Any:
    """A context for exchanges that overlap with the work on the current stream, which they wait for."""
    if not x.is_cuda:
        return nullcontext()
    if x.device not in _streams:
        _streams[x.device] = torch.cuda.Stream(x.device)
    _streams[x.device].wait_stream(torch.cuda.current_stream(x.device))
    return torch.cuda.stream(_streams[x.device])


def ordered_hook(state: Group, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """A communication hook of ``DistributedDataParallel``: the mean of all ranks' gradients in a fixed order.

    ::

        model = torch.nn.parallel.DistributedDataParallel(model)
        model.register_comm_hook(None, samebits.distributed.ordered_hook)

    Gradients are widened to float32, added as in :func:`samebits.distributed.ordered_all_reduce`, divided
    by the number of ranks, and rounded once. So two runs with as many ranks agree, whatever algorithm NCCL
    chooses and however parameters are put into buckets. (For the same bits with other numbers of ranks, see
    :class:`GradientGroups`.) On GPUs the exchange overlaps with the backward.

    Args:
        state: the group, as in :func:`samebits.distributed.ordered_all_reduce`: that of the model.
        bucket: from PyTorch.
    """
    name = name_of("ordered_hook", state)
    grads = bucket.buffer()
    _agree_on_parameters("ordered_hook", name, grads, bucket.parameters())
    done: torch.futures.Future[Tensor] = torch.futures.Future(
        devices=[grads.device] if grads.is_cuda else None
    )
    with _beside(grads):
        grads.copy_(all_reduce(grads, None, name, grads.dtype, ranks(name)[1]))
        done.set_result(grads)
    return done


def _agree_on_parameters(op: str, name: str, like: Tensor, parameters: Iterable[Tensor]) -> None:
    agree(op, name, like, parameters=tuple((p.dtype, *p.shape) for p in parameters))


class OrderedReduceScatter:
    """FSDP2's reduce-scatter of gradients, in a fixed order.

    ::

        fully_shard(model)
        model.set_custom_reduce_scatter(samebits.distributed.OrderedReduceScatter())

    Give one to every module that ``fully_shard`` was called on. Gradients (in ``reduce_dtype``) are widened
    to float32, added as in :func:`samebits.distributed.ordered_reduce_scatter`, divided by the number of
    ranks, and rounded once. The all-reduce between replicas of shards (HSDP) is PyTorch's own.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        name = name_of("OrderedReduceScatter", group)
        size = ranks(name)[1]
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise NotImplementedError(
                f"samebits.distributed.OrderedReduceScatter: op: expected SUM or AVG, got {op};"
                " set_force_sum_reduction_for_comms(True) asks for SUM"
            )
        agree("OrderedReduceScatter", name, input_tensor, shape=input_tensor.shape, dtype=input_tensor.dtype)
        sums = tree(all_to_all(input_tensor, name, [output_tensor.numel()] * size))
        divisor = size if op == dist.ReduceOp.AVG else 1
        output_tensor.copy_(finished(sums, None, output_tensor.dtype, divisor))


class _SumsOfGroups(OrderedReduceScatter):
    """Float32 sums over the ranks of one group: what :class:`GradientGroups` takes from FSDP2."""

    def __init__(self, ranks_of_group: list[int]) -> None:
        self._ranks = ranks_of_group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if dtype != torch.float32:  # sums of few ranks would be rounded where those of many are not
            raise TypeError(
                "samebits.distributed.GradientGroups: expected FSDP2 to reduce gradients in float32, got"
                f" {dtype}: give fully_shard a MixedPrecisionPolicy(reduce_dtype=torch.float32)"
            )
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        if dist.get_process_group_ranks(group) != self._ranks:
            raise ValueError(
                f"samebits.distributed.GradientGroups: group: expected the ranks that fully_shard splits"
                f" parameters over, {dist.get_process_group_ranks(group)}, got {self._ranks} (replicas of"
                " shards, HSDP, are not covered)"
            )
        super().__call__(output_tensor, input_tensor, group, op, async_op)


class GradientGroups:
    """Gradients of groups of sequences, added so that the sum does not depend on the number of ranks.

    The batch is cut into G groups of sequences. Each of T ranks runs a backward for G / T of them::

        gradients = samebits.distributed.GradientGroups(model, groups=8)
        for i in gradients.own:                  # the numbers of this rank's groups, in order
            loss_of(model(parts[i])).backward()  # no mean over the part's tokens: over the batch's
            gradients.add()
        gradients.reduce()                       # into .grad
        optimizer.step()

    The gradients of the groups are widened to float32 and added by the binary tree of
    :func:`samebits.distributed.ordered_all_reduce`, over groups in place of ranks. They are rounded once, at
    the end, to the dtype of ``.grad``. So 1, 2, 4, ... G ranks give the same bits. Memory: log2(G / T) + 1
    float32 copies of the gradients.

    Where ``fully_shard`` (FSDP2) was called on modules of the model, each backward adds T groups, one of
    every rank, into shards, and this takes the place of :class:`OrderedReduceScatter` on these modules. The
    sum is not divided by the number of ranks. Parameters have to be float32, and ``reduce_dtype`` too;
    ``param_dtype`` may have 16 bits.

    Args:
        model: a module, or the parameters that get gradients; the same on all ranks. With FSDP2, a module.
        groups: G, a power of two that the number of ranks divides.
        group: as in :func:`samebits.distributed.ordered_all_reduce`. With FSDP2, the ranks of its mesh.

    Attributes:
        own: the numbers of this rank's groups, 0 to G - 1, in the order of their backwards: neighbours, or
            with FSDP2 every T-th one.

    Raises:
        ValueError: G is no power of two, or the number of ranks does not divide it; or only some parameters
            are sharded.
        TypeError: a sharded parameter is not float32. In a backward: FSDP2 reduces another dtype.
    """

    def __init__(self, model: nn.Module | Iterable[Tensor], groups: int = 8, group: Group = None) -> None:
        self._name = name_of("GradientGroups", group)
        if not isinstance(groups, int) or groups < 1 or groups & (groups - 1):
            raise ValueError(
                f"samebits.distributed.GradientGroups: groups: expected a power of two, got {groups!r}"
            )
        rank, size = ranks(self._name)
        check_divides("GradientGroups", "groups", groups, size)
        parameters = model.parameters() if isinstance(model, nn.Module) else model
        self._parameters = [p for p in parameters if p.requires_grad]
        sharding = (
            [m for m in model.modules() if isinstance(m, FSDPModule)] if isinstance(model, nn.Module) else []
        )
        self._sharded = any(isinstance(p, DTensor) for p in self._parameters) and self._shard(sharding)
        self._groups, each = groups, groups // size
        self.own = range(rank, groups, size) if self._sharded else range(rank * each, (rank + 1) * each)
        if self._parameters and self._name != ALONE:
            _agree_on_parameters(
                f"GradientGroups({groups})", self._name, _local(self._parameters[0]), self._parameters
            )
        self._added = 0
        self._sums: list[tuple[int, list[Tensor]]] = []  # groups in a sum, and the sum

    def _shard(self, modules: Sequence[FSDPModule]) -> bool:
        """Let FSDP2 add the gradients of all ranks in float32. Returns True."""
        if not modules:
            raise ValueError(
                "samebits.distributed.GradientGroups: model: expected the module that fully_shard was called"
                " on, or one that contains it, for parameters that are DTensors"
            )
        size = ranks(self._name)[1]
        for p in self._parameters:
            if not isinstance(p, DTensor) or p.dtype != torch.float32:
                kind = TypeError if isinstance(p, DTensor) else ValueError
                raise kind(
                    "samebits.distributed.GradientGroups: model: expected all parameters sharded by"
                    f" fully_shard, and float32, got {type(p).__name__} of {p.dtype}, {tuple(p.shape)}"
                )
            split = [
                n for n, at in zip(p.device_mesh.shape, p.placements, strict=True) if not at.is_replicate()
            ]
            if size not in split:
                raise ValueError(
                    "samebits.distributed.GradientGroups: group: expected the ranks of a dimension of the"
                    f" mesh that parameters are split over, got {size} ranks and {p.device_mesh},"
                    f" {p.placements} (replicas of shards, HSDP, are not covered)"
                )
        members = [0] if self._name == ALONE else dist.get_process_group_ranks(group_of(self._name))
        for module in modules:
            module.set_custom_reduce_scatter(cast(Any, _SumsOfGroups(members)))
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        return True

    def add(self) -> None:
        """Take what ``.grad`` of all parameters holds as the gradient of the next group, and clear it.

        A parameter without a gradient has one of zeros.
        """
        most = len(self.own)
        if self._added == most:
            raise RuntimeError(
                f"samebits.distributed.GradientGroups: expected {most} groups of {self._groups} on this rank,"
                " got one more"
            )
        count, sums = 1, [self._take(p) for p in self._parameters]
        while self._sums and self._sums[-1][0] == count:
            _, earlier = self._sums.pop()
            for a, b in zip(earlier, sums, strict=True):
                b.copy_(tree(torch.stack([a, b])))
            count *= 2
        self._sums.append((count, sums))
        self._added += 1

    @staticmethod
    def _take(p: Tensor) -> Tensor:
        grad, p.grad = p.grad, None
        if grad is None:
            return torch.zeros_like(_local(p), dtype=torch.float32)
        return _local(grad).to(torch.float32, copy=True)

    @torch.no_grad()
    def reduce(self) -> None:
        """Write the sum over all groups of all ranks into ``.grad``, and begin anew."""
        if self._added != len(self.own):
            raise RuntimeError(
                f"samebits.distributed.GradientGroups: expected {len(self.own)} groups of {self._groups} on"
                f" this rank, got {self._added}"
            )
        ((_, sums),) = self._sums
        self._added, self._sums = 0, []
        if self._sharded:
            for p, total in zip(self._parameters, sums, strict=True):
                p.grad = _as_sharded(finished(total, None, p.dtype), p)
            return
        for some in _buckets(self._parameters):
            flat = torch.cat([sums[i].reshape(-1) for i in some])
            sums_of_ranks = all_reduce(flat, None, self._name, torch.float32)
            parts = sums_of_ranks.split([sums[i].numel() for i in some])
            for i, part in zip(some, parts, strict=True):
                p = self._parameters[i]
                p.grad = finished(part.view(p.shape), None, p.dtype)


def _local(t: Tensor) -> Tensor:
    """The tensor, or this rank's part of a DTensor."""
    return t.to_local() if isinstance(t, DTensor) else t


def _as_sharded(local: Tensor, like: Any) -> Tensor:
    """A DTensor of which this is the rank's part, sharded as `like` is."""
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _buckets(parameters: Sequence[Tensor]) -> Iterator[list[int]]:
    bucket: list[int] = []
    for i, p in enumerate(parameters):
        if bucket and sum(parameters[j].numel() for j in bucket) + p.numel() > _BUCKET:
            yield bucket
            bucket = []
        bucket.append(i)
    if bucket:
        yield bucket
