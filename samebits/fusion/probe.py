"""Whether two functions have the same bits, forward and backward, under the mode."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from samebits.mode import batch_invariant
from samebits.mode.patches import asks

__all__ = [
    "DTYPES",
    "DiffersError",
    "UnfitError",
    "active",
    "check",
    "compare",
    "instead",
    "name_of",
    "proving",
    "results",
    "rows",
    "weights",
]

_SEED = 1
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class DiffersError(Exception):
    """A fused form has other bits than the code that it would replace. The message says where."""


class UnfitError(Exception):
    """A fused form met operands that it leaves to the own code, while it was to be proven on them."""


class _Here(threading.local):
    # Attributes of a thread-local object, because torch.compile reads and guards those.
    proving: bool = False


_here = _Here()


def active() -> bool:
    """Whether fused forms run in this thread: in the mode alone."""
    return asks.in_mode()


def instead(why: str, x: Any, proven: tuple[Any, ...]) -> None:
    """Say that the own code runs, in the mode. It must not while a form that has the dtype is tried.

    Args:
        x: what it runs on.
        proven: kinds of operands. The second entry is a dtype.
    """
    if _here.proving and isinstance(x, Tensor) and any(kind[1] == x.dtype for kind in proven):
        raise UnfitError(why)


@contextmanager
def proving() -> Iterator[None]:
    """Let :func:`instead` raise."""
    _here.proving = True
    try:
        yield
    finally:
        _here.proving = False


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def rows(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    """Random rows of several scales. Some are zero, of both signs, as gradients of padding are."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g, dtype=torch.float32)
    lead = (*shape[:-1], 1)
    x = x * torch.exp2(torch.randint(-8, 5, lead, generator=g).float())
    x = torch.where(torch.rand(lead, generator=g, dtype=torch.float32) < 0.15, 0.0 * x, x)
    x = torch.where(torch.rand(shape, generator=g, dtype=torch.float32) < 0.05, 0.0 * x, x)
    return x.to(device, dtype)


def weights(like: Tensor, dtype: torch.dtype, seed: int) -> Tensor:
    """Random weights. Products with them neither vanish nor overflow."""
    g = torch.Generator(like.device).manual_seed(seed)
    terms = like.shape[-1] if like.ndim > 1 else 1
    x = torch.randn(like.shape, generator=g, dtype=torch.float32, device=like.device)
    return (x / math.sqrt(max(1, terms))).to(dtype)


def compare(
    own: Callable[..., Any], fused: Callable[..., Any], operands: Mapping[str, Tensor], backward: bool = True
) -> None:
    """Run both on `operands` under the mode, forward and backward.

    Args:
        own: a function of a dictionary of tensors, which all require a gradient if they are floating.
        fused: the one that is to have its bits.

    Raises:
        DiffersError: a result or a gradient has other bits, or one of both fails.
    """
    check(results(own, operands, backward), fused, operands, backward)


def check(
    first: Mapping[str, Tensor],
    fused: Callable[..., Any],
    operands: Mapping[str, Tensor],
    backward: bool = True,
) -> None:
    """As :func:`compare`, with :func:`results` of the own code."""
    try:
        with proving():
            second = results(fused, operands, backward)
    except UnfitError:
        raise
    except Exception as error:
        text = str(error).partition("\n")[0]
        raise DiffersError(f"its fused form fails: {type(error).__name__}: {text}") from error
    if first.keys() != second.keys():
        raise DiffersError(f"results or gradients are missing: {sorted(first.keys() ^ second.keys())}")
    for name, a in first.items():
        b = second[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            raise DiffersError(f"{name}: {tuple(b.shape)} {b.dtype}, not {tuple(a.shape)} {a.dtype}")
        different = int((~same(a, b)).sum())
        if different:
            raise DiffersError(f"{name}: {different} of {a.numel()} values differ")


def same(a: Tensor, b: Tensor) -> Tensor:
    """Where two tensors have the same bits, or are both NaN."""
    if not a.is_floating_point():
        return a == b
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return (a.contiguous().view(kind) == b.contiguous().view(kind)) | (a.isnan() & b.isnan())


def results(run: Callable[..., Any], operands: Mapping[str, Tensor], backward: bool) -> dict[str, Tensor]:
    """Results and gradients, by name."""
    given = {
        name: t.detach().clone().requires_grad_(backward and t.is_floating_point())
        for name, t in operands.items()
    }
    with batch_invariant("ignore"), torch.set_grad_enabled(backward), torch.random.fork_rng([]):
        torch.default_generator.manual_seed(_SEED)
        out = [t for t in tree_leaves(run(given)) if isinstance(t, Tensor)]
        wanted = {n: t for n, t in given.items() if t.requires_grad}
        differentiable = [t for t in out if t.requires_grad]
        grads: Any = ()
        if differentiable:
            seeds = [
                rows(tuple(t.shape) or (1,), t.dtype, t.device, _SEED + i).view(t.shape)
                for i, t in enumerate(differentiable)
            ]
            grads = torch.autograd.grad(differentiable, list(wanted.values()), seeds, allow_unused=True)
    found = {f"result {i}": t.detach() for i, t in enumerate(out)}
    return found | {f"gradient of {n}": g for n, g in zip(wanted, grads, strict=bool(grads)) if g is not None}
