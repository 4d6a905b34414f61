"""Sequences of tokens: the rows of a batch, or packed sequences between the offsets ``cu_seqlens``."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from samebits.backends import Key, on_gpu
from samebits.backends.replay import refuse
from samebits.ops._checks import check_device, shape
from samebits.ops._memory import capturing


def sequences(t: Tensor) -> Tensor:
    """``t[B, T, ..., features]`` as ``[1, B, tokens, features]``; 1-D and 2-D tensors are one sequence."""
    leading = t.shape[:-1]
    count = leading[0] if len(leading) > 1 else 1
    tokens = math.prod(leading[1:] if len(leading) > 1 else leading)
    return t.reshape(1, count, tokens, t.shape[-1])


def check_cu_seqlens_form(op: str, name: str, x: Tensor, cu_seqlens: Tensor) -> None:
    """Refuse a `cu_seqlens` that cannot be the offsets of sequences in `x`, the argument `name`.

    The check reads no values.
    """
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"samebits.{op}: cu_seqlens: expected a Tensor, got {type(cu_seqlens).__name__}")
    if cu_seqlens.layout is not torch.strided or cu_seqlens.is_nested:
        raise TypeError(f"samebits.{op}: cu_seqlens: expected a dense tensor, got layout {cu_seqlens.layout}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"samebits.{op}: cu_seqlens: expected int32 or int64, got {cu_seqlens.dtype}")
    if cu_seqlens.ndim != 1:
        raise ValueError(f"samebits.{op}: cu_seqlens: expected 1-D, got shape {shape(cu_seqlens)}")
    check_device(op, "cu_seqlens", cu_seqlens, name, x)
    if x.ndim != 2 and not (x.ndim == 3 and x.shape[0] == 1):
        raise ValueError(
            f"samebits.{op}: {name}: with cu_seqlens expected [tokens, features] or [1, tokens, features],"
            f" got shape {shape(x)}"
        )


def check_cu_seqlens(op: str, cu_seqlens: Tensor, tokens: int, name: str = "cu_seqlens") -> None:
    """Refuse offsets that do not cut `tokens` tokens into consecutive sequences. Reads the values."""
    if cu_seqlens.numel() == 0:
        raise ValueError(f"samebits.{op}: {name}: expected at least one offset, got none")
    ends = cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] != tokens:
        raise ValueError(
            f"samebits.{op}: {name}: expected to run from 0 to {tokens} (the number of tokens),"
            f" got {ends[0]} to {ends[-1]}"
        )
    for i, (start, stop) in enumerate(itertools.pairwise(ends)):
        if stop < start:
            raise ValueError(
                f"samebits.{op}: {name}: expected non-decreasing offsets, got {start} then {stop}"
                f" at positions {i} and {i + 1}"
            )


_asserted: WeakIdKeyDictionary = WeakIdKeyDictionary()


def trusted(cu_seqlens: Tensor) -> Tensor:
    """`cu_seqlens`, which this library has made and nobody writes to, so that they are never checked.

    So the capture of a CUDA graph may have them where its warm-up had none, and never loaded the check.
    """
    if not torch.compiler.is_compiling():
        _asserted[cu_seqlens] = None
    return cu_seqlens


def assert_cu_seqlens(op: str, cu_seqlens: Tensor, tokens: int, key: Key) -> None:
    """Check offsets as :func:`check_cu_seqlens` does, on the GPU and without waiting for it.

    Bad offsets end in a device-side assert. The check costs a launch, and layers share one tensor of offsets.
    So each version of the tensor is checked once, and in a CUDA graph at every replay. PyTorch's version
    counter does not count writes through ``.data``, by a CUDA graph or to an inference tensor, so offsets
    that those leave are not checked. They are safe: kernels clamp offsets to the tokens, and take a sequence
    that ends before it starts as empty.
    """
    refuse("offsets are checked once, not in each call")
    in_graph = capturing(cu_seqlens)
    seen = (0 if cu_seqlens.is_inference() else cu_seqlens._version, tokens)
    known = _asserted.get(cu_seqlens, ())
    if known is None or (not in_graph and known == seen):
        return
    if cu_seqlens.numel() == 0:
        raise ValueError(f"samebits.{op}: cu_seqlens: expected at least one offset, got none")
    backend, _ = on_gpu("assert_spans", key, cu_seqlens.get_device())
    backend.assert_spans(cu_seqlens, tokens)
    if not in_graph:
        _asserted[cu_seqlens] = seen


def check_offsets(op: str, cu_seqlens: Tensor | None, tokens: int, key: Key) -> None:
    """:func:`check_cu_seqlens` on a CPU, :func:`assert_cu_seqlens` on a GPU, if there are offsets."""
    if cu_seqlens is None:
        return
    if cu_seqlens.is_cuda:
        assert_cu_seqlens(op, cu_seqlens, tokens, key)
    else:
        check_cu_seqlens(op, cu_seqlens, tokens)
