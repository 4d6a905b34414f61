"""Replays: an operator's allocations and launches, done again for other tensors of the same geometry.

What an operator does on a GPU follows from the dtypes, shapes, strides and alignments of its tensors and from
its other arguments. Only addresses change from call to call. So the second call of a kind is recorded: what
it allocates, what it launches, and which addresses are where in the parameters. Every later call of that kind
is one call of ``_replay.c``, which takes some microseconds and runs no Python. It launches the same kernels
with the same parameters, so it gives the same bits.

A recording refuses what it cannot repeat: an operator of PyTorch's that computes, a pointer that is nobody's,
a result that is part of an allocation, a launch of Triton's. Such calls run as ever. So do all of them where
the extension was not built; ``samebits info`` says whether it was.
"""

from __future__ import annotations

import functools
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from samebits.backends.trace import Planned, Trace

try:
    from samebits.backends import _replay as _replay  # type: ignore[attr-defined]
except ImportError:  # no C compiler was there when samebits was installed
    _replay = None

__all__ = [
    "Recording",
    "available",
    "constant",
    "forget",
    "here",
    "kept",
    "refuse",
    "replayed",
    "tied",
    "traced",
    "viewed",
]

_guards: Any = torch._C._dynamo.guards  # functions that code of torch.compile calls

available: bool = _replay is not None
"""Whether the extension was built."""

# As in _replay.c:
_PARAMS_AT = 128  # where parameters begin, after the CUlaunchConfig
_MOST_TENSORS = 48  # arguments and allocations
_SMALL = 1 << 16  # bytes
_ALIGNED = 512  # as PyTorch's allocations are


class RefusedError(Exception):
    """A call cannot be replayed. The message says why."""


class _Here(threading.local):
    """What goes on in a thread.

    Attributes:
        recording, trace: of a call that runs, if it is being recorded.
    """

    recording: Recording | None = None
    trace: Trace | None = None


here = _Here()


def refuse(why: str) -> None:
    """If a call is being recorded, do not replay it."""
    if here.recording is not None:
        here.recording.refused = here.recording.refused or why


def tied(a: Tensor, b: Tensor) -> None:
    """The call follows from how far `b` begins from `a`. It is replayed only where that is as far."""
    if here.recording is not None:
        here.recording.tied(a, b)


def constant(t: Tensor) -> Tensor:
    """`t`, which is not written to any more. A recipe of the call that is recorded keeps it."""
    if here.recording is not None:
        here.recording.constants.append(t)
    return t


def kept(store: dict[Any, Tensor], key: Any, make: Callable[[], Tensor]) -> Tensor:
    """``make()``. Where a call is recorded, the one in `store`, which all replays read as it is.

    It is never replaced or freed: kernels of any stream may read it. Only recordings keep one, for what a
    capture or its warm-up allocates belongs to the graph.
    """
    if here.recording is None:
        return make()
    if key not in store:
        recording, here.recording = here.recording, None  # replays do not make it again
        try:
            made = make()
        finally:
            here.recording = recording
        if made.is_cuda:
            torch.cuda.current_stream(made.get_device()).synchronize()
        store.setdefault(key, made)
    return constant(store[key])


_replays: list[Any] = []
"""All of them: each is an operator's, and stays."""


def replayed(
    run: Callable[..., Any], *questions: Callable[[], Any], public: bool = False, views: bool = False
) -> Callable[..., Any]:
    """`run`, a function of tensors and numbers, with replays of its calls on GPUs.

    ``public``: calls are replayed only while nothing traces, transforms, casts or watches them, and all of
    `questions` are answered by False or -1. Those that autograd records have a plan
    (:mod:`samebits.backends.trace`) instead. Else PyTorch's dispatcher, or code in its place, has seen to all
    that.

    ``views``: results may be views of arguments. A replay makes them anew, as nothing that autograd knows.
    """
    if _replay is None:
        return run
    record = functools.partial(_record, views=True) if views else _record
    found: Callable[..., Any] = _replay.Replay(run, record, *((questions,) if public else ()))
    _replays.append(found)
    return found


def forget() -> None:
    """Drop all recipes and plans, so that the next calls run anew."""
    for found in _replays:
        found.recipes.clear()


def _record(
    run: Callable[..., Any],
    args: tuple[Any, ...],
    named: dict[str, Any] | None,
    by_autograd: bool,
    views: bool = False,
) -> tuple[Any, Any]:
    """The result of ``run(*args, **named)``, and its recipe, its plan, or None."""
    named = named or {}
    unseen = torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python)  # by a mode
    if unseen or torch.cuda.is_current_stream_capturing():  # which some calls allow for
        return run(*args, **named), False  # record a later call
    before, given = (here.recording, here.trace), (*args, *named.values())
    trace = here.trace = Trace()
    recording = here.recording = None if by_autograd else Recording(given, views)
    try:
        with _Watch(recording) if recording else nullcontext():
            result = run(*args, **named)
        return result, (recording and recording.recipe(result)) or trace.plan(given, result)
    finally:
        here.recording, here.trace = before


def traced(run: Callable[..., Any], args: tuple[Any, ...], planned: Planned) -> Any:
    """``run(*args)``, by which an operator runs, noted in the trace of this thread.

    Plans ask ``planned(args, part)`` for a function that does the same where a mode may be on. It returns one
    part of the results, or all for None.
    """
    trace, here.trace = here.trace, None
    try:
        made = run(*args)
    finally:
        here.trace = trace
    if trace is not None:
        trace.calls.append((args, made, planned))
    return made


def viewed(t: Tensor, view: Callable[..., Tensor], *rest: Any) -> Tensor:
    """``view(t, *rest)``, a view that plans make again."""
    result = view(t, *rest)
    if not torch.compiler.is_compiling() and here.trace is not None and result is not t:
        here.trace.views[id(result)] = result, t, view, rest
    return result


# Operators that allocate, and compute nothing.
_EMPTY = {
    getattr(torch.ops.aten, name).default
    for name in ("empty_like", "empty_strided", "new_empty", "new_empty_strided")
} | {torch.ops.aten.empty.memory_format}
_SAME = {torch.ops.aten.detach.default, torch.ops.aten._unsafe_view.default}


class _Watch(TorchDispatchMode):
    """Sees PyTorch's operators in a recording. Only allocations and views can be replayed."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.is_meta:
            return result  # computes nothing: a question about shapes and dtypes, which the key has
        if func in _EMPTY:
            self._recording.allocated(result)
        elif not func.is_view and func not in _SAME:
            refuse(str(func))
        return result


class Recording:
    """One call: its allocations and launches. All that it allocates lives as long.

    Attributes:
        refused: why the call cannot be replayed; empty if it can.
        constants: tensors that replays read, as they are.
    """

    def __init__(self, args: tuple[Any, ...], views: bool) -> None:
        self.refused = ""
        self.constants: list[Tensor] = []
        self._args, self._views = args, views
        self._allocations: list[Tensor] = []
        self._launches: list[tuple[int, Any, tuple[tuple[int, int, bool, int], ...]]] = []
        self._kernels: list[Any] = []
        self._ties: set[tuple[int, int, int]] = set()

    def allocated(self, t: Tensor) -> None:
        """`t` was allocated."""
        if len(self._args) + len(self._allocations) >= _MOST_TENSORS:
            refuse("too many tensors")
        if self.refused:  # then their memory may be needed
            self._allocations.clear()
        else:
            self._allocations.append(t)

    def zeroed(self, t: Tensor) -> None:
        """Contiguous `t` was set to zeros on the current stream."""
        at = self._place(t.data_ptr()) if t.numel() else None
        if at is not None:
            self._launches.append((0, t.nbytes, ((0, at[0], False, at[1]),)))
            self._kernels.append(None)

    def launched(self, kernel: Any, function: int, params: str, packed: bytes, values: Sequence[Any]) -> None:
        """`kernel` was launched.

        Args:
            kernel: the kernel, which lives as long as the recipe.
            function: its ``CUfunction``.
            params: the format of its parameter struct.
            packed: the ``CUlaunchConfig``, 128 bytes in all, and the parameters.
            values: the members of the struct.
        """
        patches = []
        for (kind, at), value in zip(_members(params), values, strict=True):
            address = value if kind == "P" else int.from_bytes(value[:8], "little") if kind == "s" else 0
            if address and not any(t.data_ptr() == address for t in self.constants):
                place = self._place(address)
                if place is None:
                    return
                patches.append((_PARAMS_AT + at, place[0], kind == "s", place[1]))
        self._launches.append((function, packed, tuple(patches)))
        self._kernels.append(kernel)

    def tied(self, a: Tensor, b: Tensor) -> None:
        """Replay the call only where `b` begins as far from `a`. Both begin where arguments do."""
        at = a.data_ptr(), b.data_ptr()
        of = [next((i for i, x in enumerate(self._args) if _begins_at(x, address)), None) for address in at]
        if of[0] is None or of[1] is None:
            refuse("the distance of what are no arguments")
        else:
            self._ties.add((of[0], of[1], at[1] - at[0]))

    def _place(self, address: int) -> tuple[int, int] | None:
        """The index of the tensor at `address`, and the bytes from its start. Refuses what is nobody's."""
        for i, t in enumerate(self._args):
            if isinstance(t, Tensor) and t.data_ptr() == address:
                self._ties |= {  # else it may be a pointer of the other one
                    (j, i, address - other.data_ptr())
                    for j, other in enumerate(self._args)
                    if isinstance(other, Tensor)
                    and j != i
                    and other.data_ptr() <= address < other.data_ptr() + _extent(other)
                }
                return i, 0
        found: dict[int, int] = {}
        for i, t in enumerate((*self._args, *self._allocations)):
            if isinstance(t, Tensor) and t.data_ptr() <= address < t.data_ptr() + _extent(t):
                found.setdefault(t.data_ptr(), i)
        if len(found) != 1:
            refuse("a pointer into no tensor, or into several")
            return None
        ((start, i),) = found.items()
        self._ties |= {(i, j, 0) for j, t in enumerate(self._args) if j > i and _begins_at(t, start)}
        return i, address - start

    def recipe(self, result: Any) -> Any:
        """The recipe of the call that gave `result`. None if it cannot be replayed."""
        geometries: list[tuple[Any, ...]] = [(tuple(t.shape), t.stride(), t.dtype) for t in self._allocations]
        results = result if type(result) is tuple else (result,)
        try:
            if self.refused:
                raise RefusedError(self.refused)
            if not self._launches and any(t.numel() for t in self._allocations):
                raise RefusedError("nothing was launched")
            taken: set[int] = set()
            indices = [self._returned(t, geometries, taken) for t in results]
            made = [i for i in indices if i is not None]
            if len(set(made)) < len(made):
                raise RefusedError("two results are one tensor")
            places, geometries = self._together(geometries, made)
            launches = (
                (
                    function,
                    packed,
                    tuple((at, places[i][0], is_map, places[i][1] + delta) for at, i, is_map, delta in to),
                )
                for function, packed, to in self._launches
            )
            indices = [None if i is None else places[i][0] for i in indices]
            return _replay.Recipe(
                *(self._device(), len(self._args), tuple(geometries), tuple(launches)),
                *(
                    (*self._kernels, *self.constants),
                    tuple(indices) if type(result) is tuple else indices[0],
                    tuple(self._ties),
                ),
            )
        except (RefusedError, ValueError) as error:  # ValueError: too many tensors, or bytes
            self.refused = str(error)
            return None

    def _together(
        self, geometries: list[tuple[Any, ...]], returned: list[int]
    ) -> tuple[dict[int, tuple[int, int]], list[tuple[Any, ...]]]:
        """What is allocated, where small memory that is not returned is one allocation if it is side by side.

        Also of each tensor, by its index, the index then, and the bytes from the start.
        """
        count = len(self._args)
        places, found = {i: (i, 0) for i in range(count)}, list[tuple[Any, ...]]()
        size = 0  # of the last one, if more may be put there
        for i, (t, geometry) in enumerate(zip(self._allocations, geometries, strict=True), count):
            extent = _extent(t)
            if i in returned or extent > _SMALL:
                places[i], size = (count + len(found), 0), 0
                found.append(geometry)
            elif extent:
                if not size:
                    found.append(())
                places[i] = count + len(found) - 1, size
                size += -(-extent // _ALIGNED) * _ALIGNED
                found[-1] = (size,), (1,), torch.uint8
        return places, found

    def _device(self) -> int:
        return next(t.get_device() for t in self._args if isinstance(t, Tensor))

    def _returned(self, t: Any, geometries: list[tuple[Any, ...]], taken: set[int]) -> int | None:
        """The index of a result. An allocation that is returned in another shape is made in that."""
        if t is None:
            return None
        if not isinstance(t, Tensor):
            raise RefusedError(f"a result is a {type(t).__name__}")
        for i, own in enumerate(self._allocations):
            same_bytes = own.nbytes == t.nbytes and own.dtype == t.dtype
            if own.data_ptr() == t.data_ptr() and same_bytes and t.numel():
                if _extent(t) != t.nbytes:
                    raise RefusedError("a result has gaps")
                geometries[i] = tuple(t.shape), t.stride(), t.dtype
                return len(self._args) + i
            if own is t or (t.numel() == own.numel() == 0 and own.dtype == t.dtype and i not in taken):
                taken.add(i)
                geometries[i] = tuple(t.shape), t.stride(), t.dtype
                return len(self._args) + i
        of = [i for i, x in enumerate(self._args) if self._views and _share_storage(x, t)]
        if len(of) != 1 or (own := self._args[of[0]]) is t or own.dtype != t.dtype:
            raise RefusedError("a result is no allocation of the call's")
        offset = t.storage_offset() - own.storage_offset()
        geometries.append((_guards._reinterpret_tensor, of[0], tuple(t.shape), t.stride(), offset))
        self._allocations.append(t)
        return len(self._args) + len(self._allocations) - 1


def _share_storage(x: Any, t: Tensor) -> bool:
    return isinstance(x, Tensor) and x.untyped_storage()._cdata == t.untyped_storage()._cdata


def _begins_at(x: Any, address: int) -> bool:
    return isinstance(x, Tensor) and x.data_ptr() == address


def _extent(t: Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    if t.numel() == 0:
        return 0
    return (1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))) * t.itemsize


@functools.lru_cache(maxsize=256)
def _members(params: str) -> tuple[tuple[str, int], ...]:
    """The kind and the offset of each member of a struct's format."""
    found, count, before = [], "", ""
    for kind in params:
        if kind.isdigit():
            count += kind
            continue
        for one in [f"{count}s"] if kind == "s" else [kind] * int(count or 1):
            at = struct.calcsize(f"@{before}{one}") - struct.calcsize(f"@{one}")
            found.append((kind, at))
            before += one
        count = ""
    return tuple(found)
