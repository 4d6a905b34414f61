"""Checks that run on every rank: ``test_exchange.py``."""

from __future__ import annotations

import itertools
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from samebits.backends.reference.matmul import rounded
from samebits.distributed import _symmetric, exchange, ordered_all_reduce, ordered_reduce_scatter
from samebits.distributed._groups import agree, name_of
from samebits.testing import assert_same_bits, values
from tests.support.ranks import device, place

DTYPES = (
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
)


def of_rank(rank: int, kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return values(kind, shape, dtype, 100 + rank)


def tree(partials: list[Tensor]) -> Tensor:
    """The sum as ``docs/contract.md`` writes it, by recursion and in numpy."""
    if len(partials) == 1:
        return partials[0].float()
    half = len(partials) // 2
    with np.errstate(all="ignore"):
        return torch.from_numpy(
            np.asarray(np.add(tree(partials[:half]).numpy(), tree(partials[half:]).numpy()))
        )


def by_all_ways(check: object) -> None:
    """With one exchange, and with two: by the backend, and on GPUs also by a kernel."""
    assert callable(check)
    for small in (1 << 20, 0):
        with mock.patch.object(exchange, "_SMALL", small), mock.patch.object(exchange, "_space"):
            exchange._space.return_value = None  # type: ignore[attr-defined]
            check()
    for at_once, most in ((1 << 18, 1 << 25), (0, 1 << 25), (0, 64)) if device().type == "cuda" else ():
        with mock.patch.multiple(_symmetric, _AT_ONCE=at_once, _MOST=most, _LEAST=64):
            check()


def check_the_tree_of_all_ranks() -> None:
    ranks = dist.get_world_size()

    def check() -> None:
        kinds = itertools.cycle(("normal", "cancel", "tiny", "huge", "special"))
        for shape in ((16, 24), (13, 5), (3, 2, 7), (31,), (1, 9), ()):
            for dtype, out in DTYPES:
                kind = next(kinds)
                partials = [of_rank(r, kind, shape, dtype) for r in range(ranks)]
                x = place(partials[dist.get_rank()])
                got = ordered_all_reduce(x, out_dtype=out)
                want = rounded(tree(partials).reshape(1, -1), out).reshape(shape)
                assert_same_bits(got, want, f"{kind} {shape} {dtype} {out}")
                assert_same_bits(x, of_rank(dist.get_rank(), kind, shape, dtype), "the argument")

    by_all_ways(check)


def check_no_rows() -> None:
    assert ordered_all_reduce(place(torch.empty(0, 4))).shape == (0, 4)
    assert ordered_reduce_scatter(place(torch.empty(0, 4))).shape == (0, 4)


def check_parts() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for dim, shape in ((0, (16, 3)), (1, (3, 8, 5)), (-1, (5, 24))):
        partials = [of_rank(r, "cancel", shape, torch.float32) for r in range(ranks)]
        want = rounded(tree(partials).reshape(1, -1), torch.bfloat16).reshape(shape)
        got = ordered_reduce_scatter(place(partials[rank]), dim=dim, out_dtype=torch.bfloat16)
        assert got.is_contiguous()
        assert_same_bits(got, want.chunk(ranks, dim)[rank].contiguous(), f"{dim} {shape}")


def check_strides() -> None:
    partials = [of_rank(r, "normal", (8, 6), torch.float32) for r in range(dist.get_world_size())]
    x = place(partials[dist.get_rank()].T.contiguous()).T
    by_all_ways(lambda: assert_same_bits(ordered_all_reduce(x), tree(partials)))


def check_gradients() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = place(of_rank(rank, "normal", (8, 4), torch.bfloat16)).requires_grad_()
    grad = of_rank(99, "normal", (8, 4), torch.float32)
    ordered_all_reduce(x, out_dtype=torch.float32).backward(place(grad))
    assert x.grad is not None
    assert_same_bits(x.grad, grad.bfloat16(), "all-reduce")
    x.grad = None
    ordered_reduce_scatter(x, out_dtype=torch.float32).backward(place(grad.chunk(ranks)[rank]))
    assert_same_bits(x.grad, grad.bfloat16(), "reduce-scatter")
    x.grad = None
    whole = exchange.gather(x, 1, name_of("gather", None), True)
    assert_same_bits(
        whole, torch.cat([of_rank(r, "normal", (8, 4), torch.bfloat16) for r in range(ranks)], 1)
    )
    grads = [of_rank(200 + r, "normal", tuple(whole.shape), torch.bfloat16) for r in range(ranks)]
    whole.backward(place(grads[rank]))
    assert_same_bits(x.grad, tree(grads).bfloat16().chunk(ranks, 1)[rank].contiguous(), "gather")


def check_traced() -> None:
    if dist.get_world_size() > 2:
        return  # tracing takes each process seconds

    @torch.compile(backend="aot_eager", fullgraph=True)
    def double(x: Tensor) -> Tensor:
        return ordered_all_reduce(x * 2) * 1

    x = place(of_rank(dist.get_rank(), "normal", (4, 4), torch.float32)).requires_grad_()
    y = double(x)
    partials = [of_rank(r, "normal", (4, 4), torch.float32) * 2 for r in range(dist.get_world_size())]
    assert_same_bits(y, tree(partials))
    y.sum().backward()
    assert x.grad is not None
    assert_same_bits(x.grad, torch.full((4, 4), 2.0))


def check_groups() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(
        device().type, (max(1, ranks // 2), min(2, ranks)), mesh_dim_names=("data", "tensor")
    )
    pair = [r for r in range(ranks) if r // 2 == rank // 2]
    x = [of_rank(r, "normal", (4, 4), torch.float32) for r in range(ranks)]
    mine = place(x[rank])
    assert_same_bits(ordered_all_reduce(mine, mesh["tensor"]), tree([x[r] for r in pair]))
    assert_same_bits(ordered_all_reduce(mine, mesh["tensor"].get_group()), tree([x[r] for r in pair]))
    with pytest.raises(ValueError, match="mesh of one dimension"):
        ordered_all_reduce(mine, mesh)
    if ranks == 4:
        three = dist.new_group([0, 1, 2])
        with pytest.raises(ValueError, match="not a member" if rank == 3 else "power of two"):
            ordered_all_reduce(mine, three)


def check_refusals() -> None:
    with pytest.raises(TypeError, match="float64"):
        ordered_all_reduce(torch.zeros(2, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"out_dtype.*float64"):
        ordered_all_reduce(torch.zeros(2), out_dtype=torch.float64)
    with pytest.raises(TypeError, match=r"group.*str"):
        ordered_all_reduce(torch.zeros(2), "all")
    with pytest.raises(ValueError, match=r"dim: .*got 1"):
        ordered_reduce_scatter(torch.zeros(2), dim=1)
    if dist.get_world_size() > 2:
        with pytest.raises(ValueError, match="multiple of"):
            ordered_reduce_scatter(torch.zeros(6, 8))


def check_ranks_agree() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    name = name_of("test", None)
    for _ in range(2):
        agree("test", name, device(), contract="a", shape=(1, 2))
    if ranks > 1:
        for _ in range(2):
            with pytest.raises(ValueError, match=rf"ranks \[{ranks - 1}\] differ from rank 0"):
                agree("test", name, device(), contract="b" if rank == ranks - 1 else "c")
        with (
            mock.patch("samebits.distributed._groups.__version__", str(rank)),
            pytest.raises(ValueError, match="differ"),
        ):
            agree("test", name, device())
