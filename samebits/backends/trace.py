"""Plans of calls that autograd records: which operator a call comes to, with which views of its arguments."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

__all__ = ["Planned", "Trace", "picking"]

Planned = Callable[[tuple[Any, ...], int | None], Callable[..., Any]]
"""Of arguments: what plans call with such. It returns one part of an operator's results, or all for None."""

_Step = tuple[int, Callable[..., Tensor], tuple[Any, ...]]


def picking(places: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Of a tuple, a tuple of what is at these places."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return operator.itemgetter(slice(places[0], places[0] + 1) if places else slice(0))


class Trace:
    """What a call comes to, if that is one call of an operator: its *plan*.

    A call that autograd records cannot be replayed. But which operator it calls, with which of the call's
    arguments, or views of them, follows from what a recipe follows from. A plan calls that at once.

    Attributes:
        calls: of operators, their arguments, results and what plans ask (:func:`traced`).
        views: tensors by their id; what each is a view of, and by which function with which arguments.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[Any, ...], Any, Planned]] = []
        self.views: dict[int, tuple[Tensor, Tensor, Callable[..., Tensor], tuple[Any, ...]]] = {}

    def plan(self, given: tuple[Any, ...], result: Any) -> Callable[..., Any] | None:
        """A function of the call's arguments. None: the call is more than one operator's."""
        if len(self.calls) != 1:
            return None
        ((args, made, planned),) = self.calls
        constants = tuple(x for x in args if not isinstance(x, Tensor))
        numbers = iter(range(len(given), len(given) + len(constants)))
        tensors: list[Any] = [*given, *(None for _ in constants)]
        steps: list[_Step] = []
        last: list[tuple[Callable[..., Tensor], tuple[Any, ...]]] = []
        parts = made if isinstance(made, tuple) else ()
        try:
            places = [
                self._place(x, tensors, steps) if isinstance(x, Tensor) else next(numbers) for x in args
            ]
            while result is not made and not any(result is x for x in parts):
                _, result, view, rest = self.views[id(result)]
                last.insert(0, (view, rest))
        except KeyError:  # something else was computed
            return None
        part = next((i for i, x in enumerate(parts) if x is result), None)
        pick = picking(places)
        run: Callable[..., Any] | None = None

        def plan(*given: Any) -> Any:
            nonlocal run
            values = given + constants
            for at, view, rest in steps:
                values += (view(values[at], *rest),)
            wanted = pick(values)
            if run is None:  # all calls of a plan have the same
                run = planned(wanted, part)
            result = run(*wanted)
            for view, rest in last:
                result = view(result, *rest)
            return result

        return plan

    def _place(self, x: Tensor, tensors: list[Any], steps: list[_Step]) -> int:
        """The index of `x` in `tensors`, behind which go the views that lead to it."""
        for i, known in enumerate(tensors):
            if known is x:
                return i
        _, of, view, rest = self.views[id(x)]
        steps.append((self._place(of, tensors, steps), view, rest))
        tensors.append(x)
        return len(tensors) - 1
