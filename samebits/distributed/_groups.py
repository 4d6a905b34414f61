"""Groups of ranks: what the package's functions take as ``group``, and how bytes move between ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from samebits._version import __version__
from samebits.backends.arch import arch_of
from samebits.ops._memory import capturing, has_memory
from samebits.remedies import see

Group: TypeAlias = Any
"""A ``torch.distributed`` process group, a ``DeviceMesh`` of one dimension, or None for all ranks."""

ALONE = ""
"""The name of a group of one rank, where ``torch.distributed`` was not initialized."""

_resolve: Any = dist.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def name_of(op: str, group: Group) -> str:
    """The group's name, by which operators know it.

    Raises:
        TypeError: `group` is none of :data:`Group`.
        ValueError: the number of its ranks is not a power of two, this rank is not one of them, or a mesh has
            several dimensions.
    """
    if group is None:
        if not dist.is_initialized():
            return ALONE
        group = dist.group.WORLD
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"samebits.distributed.{op}: group: expected a mesh of one dimension, got {group}: take"
                ' one by its name, as mesh["tp"]' + see("ranks")
            )
        group = group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"samebits.distributed.{op}: group: this rank is not a member of the group" + see("ranks")
        )
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"samebits.distributed.{op}: group: expected a process group, a DeviceMesh or None,"
            f" got {type(group).__name__}"
        )
    size = group.size()
    if size & (size - 1):
        raise ValueError(
            f"samebits.distributed.{op}: group: expected a power of two of ranks, because a binary tree adds"
            f" their results, got {size}" + see("ranks")
        )
    return cast(str, group.group_name)


def group_of(name: str) -> Any:
    """The process group `name`."""
    return _resolve(name)


def _ranks(name: str) -> tuple[int, int]:
    """This rank in the group `name`, and how many there are."""
    if name == ALONE:
        return 0, 1
    group = _resolve(name)
    return group.rank(), group.size()


ranks: Callable[[str], tuple[int, int]] = torch.compiler.assume_constant_result(_ranks)


def all_gather(x: Tensor, name: str) -> Tensor:
    """``out[T, ...]``: the bytes of every rank's `x`."""
    x, (_, size) = x.contiguous(), ranks(name)
    out = x.new_empty(size, *x.shape)
    if size == 1:
        return out.copy_(x)
    if x.numel():
        _gather(_bytes(out), _bytes(x), group=_resolve(name))
    return out


def all_to_all(x: Tensor, name: str, sizes: list[int]) -> Tensor:
    """``out[T, n, ...]``: of every rank's ``x[sum(sizes), ...]`` the part that is for this rank.

    Rank r gets n = ``sizes[r]`` rows, those after the ones for lower ranks.
    """
    rank, size = ranks(name)
    x = x.contiguous()
    out = x.new_empty(size, sizes[rank], *x.shape[1:])
    width = x[0].numel() * x.element_size() if len(x) else 0
    if size == 1:
        return out.copy_(x[None])
    if width:
        dist.all_to_all_single(
            _bytes(out),
            _bytes(x),
            [sizes[rank] * width] * size,
            [n * width for n in sizes],
            group=_resolve(name),
        )
    return out


def add_bits(x: Tensor, name: str) -> Tensor:
    """`x` of the ranks, added as integers: exact where at most one rank has anything but zero bytes."""
    out = x.contiguous()
    whole = out.numel() * out.element_size() % 4 == 0 and out.data_ptr() % 4 == 0
    dist.all_reduce(out.view(-1).view(torch.int32 if whole else torch.uint8), group=_resolve(name))
    return out


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


_agreed: dict[str, tuple[Any, set[tuple[Any, ...]]]] = {}
"""By a group's name the group, as ``destroy_process_group`` frees names, and what its ranks agree on."""


def agree(op: str, name: str, like: Tensor | torch.device, **facts: Any) -> None:
    """Compare `facts`, and the version of samebits, on all ranks of the group `name`, once for each `facts`.

    Facts are exchanged as a digest, which moves 32 bytes from every rank. In the capture of a CUDA graph and
    in traced code nothing is compared.

    Args:
        like: a tensor on the device that the group moves data from, or the device.
        facts: hashable data that must be the same. They are compared as text.

    Raises:
        ValueError: on every rank, if they differ and are new to all. It names the ranks that differ from
            rank 0. A rank that knows its facts already goes on, and the others wait for it in vain.
    """
    if name == ALONE or torch.compiler.is_compiling():
        return
    if isinstance(like, Tensor):
        if not has_memory(like) or capturing(like):
            return
        like = like.device
    group, known = group_of(name), (op, *facts.items())
    found = _agreed.get(name)
    if found is None or found[0] is not group:
        found = _agreed[name] = group, set()
    if known in found[1]:
        return
    family = arch_of(torch.cuda.get_device_capability(like)).mma if like.type == "cuda" else None
    of_device = family and family.name  # decides bits of a contract that is not bound to any
    compared = {"of": op, "samebits": __version__, "tensor cores": of_device, **facts}
    text = ", ".join(f"{fact} {value}" for fact, value in compared.items())
    mine = torch.frombuffer(bytearray(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8).to(like)
    digests = all_gather(mine, name).cpu()
    others = [rank for rank, digest in enumerate(digests) if not digest.equal(digests[0])]
    if others:
        raise ValueError(
            f"samebits.distributed.{op}: expected the same version, contract, shapes and options on all ranks"
            f" of the group, but ranks {others} differ from rank 0; here: {text}" + see("ranks")
        )
    found[1].add(known)
