"""Tracing of the operators that run in a function: where each is called, its arguments and its results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import resolve_name
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from samebits.backends.modes import with_context
from samebits.mode.operators import name_of

_aten = torch.ops.aten

# These operators only move elements or reserve memory, so they cannot change bits. Whether they are needed
# may depend on the strides of a batch.
_NO_ARITHMETIC = {
    _aten.clone,
    _aten.contiguous,
    _aten.empty,
    _aten.empty_like,
    _aten.empty_permuted,
    _aten.empty_strided,
    _aten.lift_fresh,
    _aten.new_empty,
    _aten.new_empty_strided,
    _aten._unsafe_view,
}


@dataclass(frozen=True)
class Call:
    """The identity of one call of an operator, which is the same in every batch.

    Attributes:
        phase: ``forward`` or ``backward``.
        module: name of the module that the call runs in. In a backward, the module whose forward it belongs
            to.
        operator: a name such as ``aten.addmm``. An operator that ``samebits.batch_invariant`` replaces has
            the name of PyTorch's function, such as ``torch.nn.functional.linear``.
        count: how often this operator had run in this phase and module before.
    """

    phase: str
    module: str
    operator: str
    count: int


class Observer:
    """Receives every call, with its tensor arguments and its results."""

    def called(self, call: Call, inputs: list[Tensor], results: list[Tensor]) -> None:
        """An operator has computed `results`. The observer may overwrite them."""

    def moved(self, inputs: list[Tensor], results: list[Tensor]) -> None:
        """Elements were copied unchanged, or memory was reserved."""


class Trace(TorchDispatchMode):
    """Report every operator that runs to `observer`.

    A function that ``samebits.batch_invariant`` replaces counts as one operator, forward and backward. Its
    intermediate results, such as a vector that is padded and cut, need not be laid out in rows.

    Args:
        names: names of the modules. A module that is not listed is called after its class.
        observer: receives the calls.
    """

    def __init__(self, names: Mapping[nn.Module, str], observer: Observer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = names
        self._observer = observer
        self._modules: list[str] = []
        self._counts: Counter[tuple[str, str, str]] = Counter()
        # The module of each node of autograd's graph, by the node's number.
        self._nodes: dict[int, str] = {}
        self._in_replacement = False
        self._replaced_nodes: set[int] = set()  # numbers of the nodes that replacements made

    @contextmanager
    def running(self) -> Iterator[None]:
        # Hooks for all modules, not on each: some modules run other kernels if they have hooks.
        before = nn.modules.module.register_module_forward_pre_hook(self._enter)
        after = nn.modules.module.register_module_forward_hook(self._leave, always_call=True)
        try:
            with self:
                yield
        finally:
            before.remove()
            after.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        inside = self._modules[-1] if self._modules else ""
        name = self._names.get(module)
        self._modules.append(f"{inside}.{type(module).__name__}".lstrip(".") if name is None else name)

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        self._modules.pop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        phase, module = self._place()
        result = func(*args, **kwargs)
        if _is_view(func):
            return result
        inputs = _tensors((args, kwargs))
        results = _unique([*_tensors(result), *_written(func, args, kwargs)])
        if func.overloadpacket in _NO_ARITHMETIC or self._is_replacement():
            with modes_disabled():
                self._observer.moved(inputs, results)
        else:
            self.tell(phase, module, str(func).removesuffix(".default"), inputs, results)
        return result

    def tell(
        self, phase: str, module: str, operator: str, inputs: list[Tensor], results: list[Tensor]
    ) -> None:
        """Report a call to the observer."""
        if results:
            key = phase, module, operator
            with modes_disabled():
                self._observer.called(Call(*key, self._counts[key]), inputs, results)
            self._counts[key] += 1

    def run_replacement(
        self,
        func: Callable[..., Any],
        replacement: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run the `replacement` that :mod:`samebits.mode` has for `func`, and report it as one call."""
        if self._is_replacement():
            return replacement(*args, **kwargs)
        phase, module = self._place()
        is_operator = isinstance(func, torch._ops.OpOverload)
        name = name_of(func) if is_operator else resolve_name(func) or str(func)
        first, self._in_replacement = torch._C._autograd._get_sequence_nr(), True
        try:
            result = replacement(*args, **kwargs)
        finally:
            self._in_replacement = False
            numbers = range(first, torch._C._autograd._get_sequence_nr())
            self._replaced_nodes.update(numbers)
        inputs, results = _tensors((args, kwargs)), _tensors(result)
        for node, edges in _last_nodes(results, numbers):
            # The gradients that leave this call's part of the graph are the results of its backward.
            def leave(gradients: Any, given: Any, edges: list[int] = edges) -> Any:
                gradients = [g if g is None or not _is_expanded(g) else g.clone() for g in gradients]
                left = [gradients[i] for i in edges]
                self.tell("backward", module, name, _tensors(given), _unique(_tensors(left)))
                return tuple(gradients)

            node.register_hook(leave)
        given = {memory(t) for t in inputs}
        no_views = [t for t in results if memory(t) not in given or any(t is x for x in inputs)]
        # `.data`, because the observer may write tensors that autograd has saved already.
        self.tell(phase, module, name, inputs, [t.data for t in no_views])
        return result

    def _is_replacement(self) -> bool:
        """Whether a replacement is running, forward or backward."""
        node = torch._C._current_autograd_node()
        return self._in_replacement or (node is not None and node._sequence_nr() in self._replaced_nodes)

    def _place(self) -> tuple[str, str]:
        module = self._modules[-1] if self._modules else ""
        node = torch._C._current_autograd_node()
        if node is not None:
            # In a backward, only the second forward of a checkpoint runs within modules.
            return "backward", module or self._nodes.get(node._sequence_nr(), "")
        # Autograd makes the node before its operator runs. Operators that follow without a node of their own
        # must not take this number, so the first one keeps it.
        self._nodes.setdefault(torch._C._autograd._get_sequence_nr() - 1, module)
        return "forward", module


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _tensors(tree: Any) -> list[Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor)]


def _unique(tensors: list[Tensor]) -> list[Tensor]:
    return list({id(t): t for t in tensors}.values())


def is_dense(t: Tensor) -> bool:
    return t.layout is torch.strided and not t.is_nested and not t.is_quantized


def memory(t: Tensor) -> int:
    """An identifier of the tensor's memory."""
    return t.untyped_storage()._cdata if is_dense(t) else id(t)


def _is_expanded(t: Tensor) -> bool:
    """Whether elements share memory, so that one cannot be written alone."""
    return is_dense(t) and any(n > 1 and not step for n, step in zip(t.shape, t.stride(), strict=True))


def _last_nodes(results: list[Tensor], numbers: range) -> Iterator[tuple[Any, list[int]]]:
    """Nodes numbered in `numbers` behind `results` whose edges lead to other nodes, and which edges do."""
    nodes, seen = [t.grad_fn for t in results], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen or node._sequence_nr() not in numbers:
            continue
        seen.add(node)
        after = [n for n, _ in node.next_functions]
        nodes += after
        edges = [i for i, n in enumerate(after) if n is not None and n._sequence_nr() not in numbers]
        if edges:
            yield node, edges


@contextmanager
def modes_disabled() -> Iterator[None]:
    """All modes are off, so that the audit's computations are neither traced nor replaced."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), with_context(False):
        yield


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that `func` changes in place."""
    written = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(args[i] if i < len(args) else kwargs.get(argument.name))
    return _tensors(written)


@dataclass(frozen=True)
class Layout:
    """Where the rows of a batch are in a result.

    Attributes:
        dim: the dimension of the rows. None if the result has no rows, and belongs to all of them alike.
        share: how many elements of this dimension belong to one row.
        inner: whether a row's elements are a batch apart, as in ``[T, B]`` flattened. Otherwise they are next
            to each other.
    """

    dim: int | None
    share: int = 1
    inner: bool = False

    def rows(self, result: Tensor, batch: int) -> Tensor | None:
        """A view ``[batch, ...]`` of `result`, or None if this is not its layout."""
        if self.dim is None:
            return result[None]
        if self.dim >= result.ndim or result.shape[self.dim] != batch * self.share:
            return None
        sizes = (self.share, batch) if self.inner else (batch, self.share)
        parts: Tensor = result.unflatten(self.dim, sizes)
        return parts.movedim(self.dim + self.inner, 0)


def find_layout(two: Tensor, three: torch.Size) -> Layout | None:
    """The layout of a result, from its value in a batch of two equal rows and its shape in one of three."""
    if len(three) != two.ndim:
        return None
    grown = [d for d in range(two.ndim) if two.shape[d] != three[d]]
    if not grown:
        return Layout(None)
    (dim, *others) = grown
    if others or two.shape[dim] % 2 or 3 * two.shape[dim] != 2 * three[dim]:
        return None
    share = two.shape[dim] // 2
    if share == 1:
        return Layout(dim)
    for layout in (Layout(dim, share), Layout(dim, share, inner=True)):
        rows = layout.rows(two, 2)
        assert rows is not None
        a, b = rows.to(torch.complex128 if rows.is_complex() else torch.float64)
        # Equal rows differ by rounding errors at most. Other elements of a tensor differ by far more.
        scale = torch.maximum(a.abs(), b.abs()).nan_to_num(0, 0, 0).sum()
        if (a - b).abs().nan_to_num(0, 0, 0).sum() <= 0.02 * scale:
            return layout
    return None
