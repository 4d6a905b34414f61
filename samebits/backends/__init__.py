"""Backends, and the choice among them. None of them changes a bit, so contracts do not include the choice."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from threading import local
from typing import Any, NewType, ParamSpec, TypeVar

import torch
from torch import Tensor

from samebits.contexts import check_function
from samebits.contract import Contract, contract_from_key

__all__ = [
    "NAMES",
    "Key",
    "Later",
    "UnavailableError",
    "broadcast",
    "chosen_backend",
    "contract_of",
    "module_for",
    "on_gpu",
    "pack_key",
    "same_shape",
    "unpack_key",
    "use_backend",
]

NAMES = ("cuda", "triton", "reference")
AUTOMATIC: tuple[str, ...] = ("cuda", "triton")
"""Backends for GPU tensors if none is chosen: the first of these that can run."""

PARTIAL: dict[str, frozenset[str]] = {
    "triton": frozenset(
        (
            *("addmm_", "bmm", "conv", "cross_entropy", "linear", "linear_logp", "logp", "matmul"),
            *("solve_triangular", "distributed.column_parallel_linear", "distributed.row_parallel_linear"),
            "distributed.vocab_parallel_linear_logp",
        )
    )
}
"""The operations of a backend that does not have all. The others are refused where it is chosen."""


class UnavailableError(RuntimeError):
    """A backend cannot run here. The message says why, and what to do."""


Later = Callable[[], object]
"""The last part of a computation, which cannot fail: checks, allocation, planning and compilation are done.

Functions called ``..._later`` return it. So several results can be written together or not at all: make all
of them, then run them in order. A backend may compute immediately, and leave only a copy for later.
"""

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _Choice(local):
    # A thread-local object, not a ContextVar, because torch.compile reads and guards its attributes.
    def __init__(self) -> None:
        self.backend: str | None = None
        self.made_by: use_backend | None = None  # set if the choice was made by a call, not by a block
        self.before: list[str | None] = []  # the choices outside of the open blocks


_choice = _Choice()
choices = {"made": False}
"""Whether any thread has ever made one."""


class use_backend:  # noqa: N801
    """Choose the backend. An explicit choice never falls back to another backend.

    * ``samebits.use_backend("triton")`` holds for this thread from now on.
    * ``with samebits.use_backend("triton"):`` holds until the end of the block.
    * As a decorator, it holds in each call of the function.

    An operation's backward uses the backend of its forward. Without a choice, the CUDA kernels compute GPU
    tensors. If they cannot (cuda-core is not installed, or the kernels do not know the GPU), Triton does. The
    reference computes CPU tensors. All backends give the same bits.

    The choice belongs to the thread, so do not ``await`` or ``yield`` inside. Activation checkpointing runs a
    function again in a thread of autograd's, so choose within that function. In code under ``torch.compile``
    use ``with``, because the first form ends with the graph.

    Args:
        name: ``"cuda"``, ``"triton"`` (GPU tensors only), ``"reference"`` (CPU tensors only), or None to
            choose automatically again.

    Raises:
        ValueError: there is no backend of this name. Operations raise it for tensors on a device that the
            chosen backend does not support.
        TypeError: it decorates what is no function, or one that yields or awaits.
        samebits.backends.UnavailableError: raised by an operation if the backend cannot run here.
    """

    def __init__(self, name: str | None) -> None:
        if name is not None and name not in NAMES:
            raise ValueError(f"samebits.use_backend: name: expected one of {NAMES} or None, got {name!r}")
        choices["made"] = True
        self._name, self._replaced = name, (_choice.backend, _choice.made_by)
        _choice.backend, _choice.made_by = name, self

    def __enter__(self) -> None:
        _choice.before.append(self._replaced[0] if _choice.made_by is self else _choice.backend)
        _choice.backend, _choice.made_by = self._name, None

    def __exit__(self, *_: object) -> None:
        _choice.backend, _choice.made_by = _choice.before.pop(), None

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        if _choice.made_by is self:  # the choice holds only in the function
            _choice.backend, _choice.made_by = self._replaced
        check_function("use_backend", function)
        name = self._name

        @functools.wraps(function)
        def by_backend(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with use_backend(name):
                return function(*args, **kwargs)

        return by_backend


def having(operation: str, name: str) -> str:
    """The backend of this name, which has the operation.

    Raises:
        UnavailableError: it has not.
    """
    if operation and name in PARTIAL and operation not in PARTIAL[name]:
        raise UnavailableError(
            f"samebits.{operation}: backend {name} does not compute it yet; choose backend cuda"
        )
    return name


def chosen_backend(device_type: str, operation: str = "") -> str | None:
    """The chosen backend. None if there is no choice, or only one backend for such a device.

    Raises:
        ValueError: the chosen backend does not support such a device.
        UnavailableError: it does not have the operation.
    """
    name = _choice.backend
    if name is None or device_type == "meta":
        return None
    if (name == "reference") != (device_type == "cpu"):
        takes = "CPU" if name == "reference" else "GPU"
        raise ValueError(f"samebits: backend {name}: expected {takes} tensors, got {device_type}")
    return None if name == "reference" else having(operation, name)


def is_chosen() -> bool:
    """Whether a backend is chosen in this thread."""
    return _choice.backend is not None


Key = NewType("Key", str)
"""A contract's key and the chosen backend, as one string: ``torch.library`` takes no objects."""


def pack_key(contract: str, backend: str | None) -> Key:
    """What an operator takes.

    So the choice is read once, in an operation's forward. Its backward may run in another thread, and follows
    the same choice.
    """
    # Not Key(...), which is one more call on the way to every kernel.
    return contract if backend is None else f"{contract}@{backend}"  # type: ignore[return-value]


def unpack_key(key: Key) -> tuple[str, str | None]:
    """The contract's key and the backend in a key of :func:`pack_key`."""
    contract, _, backend = key.partition("@")
    return contract, backend or None


def contract_of(key: Key) -> Contract:
    """The contract in an operator's key."""
    return _contract_of(key)


@functools.lru_cache(maxsize=64)
def _contract_of(key: Key) -> Contract:
    return contract_from_key(unpack_key(key)[0])


contract_of._dynamo_marked_constant = True  # type: ignore[attr-defined]  # PyTorch 2.11 cannot trace it


def broadcast(*shapes: torch.Size) -> torch.Size:
    """``torch.broadcast_shapes``, which is slower than a small kernel."""
    theirs: torch.Size
    if torch.compiler.is_compiling():  # it cannot trace what follows
        theirs = torch.broadcast_shapes(*shapes)
        return theirs
    longest = max(shapes, key=len)
    if all(s == longest or not s for s in shapes):
        return longest
    if all(type(n) is int for s in shapes for n in s):
        padded = ((1,) * (len(longest) - len(s)) + tuple(s) for s in shapes)
        sizes = [{n for n in of_dimension if n != 1} for of_dimension in zip(*padded, strict=True)]
        if all(len(found) < 2 for found in sizes):
            return torch.Size(found.pop() if found else 1 for found in sizes)
    theirs = torch.broadcast_shapes(*shapes)
    return theirs


def same_shape(a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether two shapes are equal. Tuples of two lengths compare sizes first, which may be symbols."""
    return len(a) == len(b) and tuple(a) == tuple(b)


@functools.cache
def on_gpu(operation: str, key: Key, device: int) -> tuple[Any, str]:
    """The module that computes `operation` on GPU `device`, and the contract's key that it takes.

    Args:
        operation: name of the module within its backend.
        key: an operator's key, see :func:`pack_key`.
        device: index of the GPU.

    Raises:
        UnavailableError: the chosen backend cannot run there, or no backend can.
    """
    contract, name = unpack_key(key)
    reasons = []
    for backend in (name,) if name else AUTOMATIC:
        package = f"samebits.backends.{backend}"
        if importlib.util.find_spec(f"{package}.{operation}") is None:
            reasons.append(f"{backend}: it does not compute {_SAID.get(operation, operation)} yet")
            continue
        try:
            importlib.import_module(f"{package}.runtime").require(device)
        except UnavailableError as error:
            reasons.append(f"{backend}: {error}")
        else:
            return importlib.import_module(f"{package}.{operation}"), contract
    raise UnavailableError("samebits: no backend for this GPU tensor. " + "; ".join(reasons))


_ON_CPU = {
    **dict.fromkeys(("add_rms_norm", "gated", "l2norm", "norm_rotary", "rotary"), "fused"),
    "quantize": "scaled",
    "rsqrt": "rows",
}
"""The modules of the reference that have another name."""


@functools.cache
def _reference(operation: str) -> Any:
    return importlib.import_module(f"samebits.backends.reference.{_ON_CPU.get(operation, operation)}")


def module_for(operation: str, t: Tensor, key: Key = Key("")) -> tuple[Any, str]:
    """The module that computes `operation` on the device of `t`, and the contract's key that it takes.

    Args:
        operation, key: as in :func:`on_gpu`.

    Raises:
        UnavailableError: `t` is on a GPU, and :func:`on_gpu` raises it.
    """
    if t.is_cuda:
        return on_gpu(operation, key, t.get_device())
    return _reference(operation), unpack_key(key)[0]


_SAID = {"scaled": "products in FP8", "quantize": "FP8 values and their scales"}
"""What modules compute whose names do not say it."""
