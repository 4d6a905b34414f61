"""Compiles and loads kernels before an engine serves.

The schedule of a product depends on its number of rows. In a batch that mixes prompts and decoding that is
any number, so serving would meet kernels that nobody has compiled, and each costs a second.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import process
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from samebits.backends.cuda import precompile, runtime
from samebits.contract import Contract
from samebits.ops.experts import Routed
from samebits.ops.fp8_weights import linear_of_groups
from samebits.ops.grouped_mm import grouped_mm
from samebits.ops.linear import linear

__all__ = ["grouped", "grouped_in_fp8", "loaded", "make_ready", "products", "row_counts", "sorts"]


def row_counts(most: int) -> list[int]:
    """Numbers of rows from 1 to `most`, so close that they meet every schedule.

    Schedules depend on ``ceil(rows / 8)``, a few on less, and change less the more rows there are.
    """
    counts = itertools.chain(range(1, 129), range(132, 1025, 4), range(1032, 2049, 8), range(2064, most, 16))
    return [*(n for n in counts if n < most), most]


def products(
    weights: Sequence[Tensor],
    most: int,
    out_dtype: torch.dtype | None = None,
    contract: Contract | None = None,
) -> list[Callable[[], object]]:
    """Calls of :func:`samebits.linear` with each kind of weight, for all :func:`row_counts`."""
    kinds = {(w.shape, w.dtype): w for w in weights}
    x = torch.zeros(most * max(w.shape[1] for w in weights), dtype=weights[0].dtype, device=weights[0].device)
    return [
        partial(linear, x[: n * w.shape[1]].view(n, w.shape[1]), w, out_dtype=out_dtype, contract=contract)
        for w in kinds.values()
        for n in row_counts(most)
    ]


def grouped(
    weights: Sequence[Tensor],
    most: int,
    slots: int,
    out_dtype: torch.dtype | None = None,
    contract: Contract | None = None,
) -> list[Callable[[], object]]:
    """Calls of :func:`samebits.grouped_mm` with each kind of ``weight[experts, K, N]``.

    Args:
        most: tokens, each of which goes to `slots` experts.
    """
    kinds = {(w.shape, w.stride(), w.dtype): w for w in weights}
    return [
        partial(grouped_mm, x, w, ends, out_dtype=out_dtype, contract=contract)
        for w in kinds.values()
        for x, ends in _routed(w, w.shape[1], w.dtype, most, slots)
    ]


def grouped_in_fp8(
    weights: Sequence[tuple[Tensor, Tensor]], most: int, slots: int, dtype: torch.dtype
) -> list[Callable[[], object]]:
    """The same of experts in block FP8, values ``[experts, N, K]`` and scales, for tokens of `dtype`.

    A call has two kernels.
    """
    kinds = {w.shape: (w, scale) for w, scale in weights}
    return [
        partial(linear_of_groups, "warm-up", x, ends, w, scale)
        for w, scale in kinds.values()
        for x, ends in _routed(w, w.shape[2], dtype, most, slots)
    ]


def sorts(experts: Iterable[int], most: int, slots: int) -> list[Callable[[], object]]:
    """Calls that sort the slots of one token by so many experts, and of `most` tokens."""
    ids = torch.zeros(most, slots, dtype=torch.int64, device="cuda")
    return [partial(Routed, ids[:n], count, 1) for count in experts for n in (1, most)]


def _routed(w: Tensor, k: int, dtype: torch.dtype, most: int, slots: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of all :func:`row_counts` of tokens, and where those of each expert of `w` end."""
    x = w.new_zeros(most * slots, k, dtype=dtype)
    experts = torch.arange(1, len(w) + 1, device=w.device)
    for n in row_counts(most):
        yield x[: n * slots], (experts * (n * slots) // len(w)).to(torch.int32)


@torch.no_grad()
def make_ready(calls: Sequence[Callable[[], object]]) -> None:
    """Compile what GPU calls will need, in parallel and into the on-disk cache, and load it."""
    with _children():
        precompile.compile_for(calls, load=True)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def loaded() -> int:
    """How many kernels this process has loaded. While an engine serves, it should not grow."""
    return len(runtime._kernels)


@contextmanager
def _children() -> Iterator[None]:
    """Let this process have child processes that end within: engines run in daemons, which may have none.

    The children do not import the user's script, which would start another engine.
    """
    config: dict[str, Any] = process.current_process()._config  # type: ignore[attr-defined]
    daemon, main = config.pop("daemon", None), sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        if daemon is not None:
            config["daemon"] = daemon
