"""The interface of kernels: what operations, proofs, tuner, benchmarks and sanitizer speak.

1. A *problem* is all that a kernel may know about a call before it runs: shapes, strides, dtypes, alignment,
   and which contract's step it follows. It has no address and no value.
2. A *schedule* is frozen data: tiles, stages, clusters. It decides the speed and never a bit.
3. A :class:`Kernel` says which problems it takes, and under which schedules.
4. A :class:`Plan` is a compiled and loaded kernel, with everything for a launch except the addresses.

To run a kernel under a schedule of one's own, for a proof or a measurement, give it to :meth:`Kernel.plan` or
:meth:`Kernel.run`. There is no other way to force one.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, Generic, Literal, Protocol, TypeVar

__all__ = ["Inputs", "Kernel", "Plan", "Step"]

Step = Literal["mma", "fma", "scaled"]
"""How a contract adds a group of terms: by the tensor core, or by one fused multiply-add for each term."""


class Inputs(Protocol):
    """The tensors of one call."""

    def problem(self, step: Step) -> Any:
        """Their problem, for a contract's step.

        Raises:
            ValueError: they do not fit together, or to `step`.
        """


class Plan(Protocol):
    """A kernel with everything for a launch except the addresses."""

    def run(self, x: Any) -> Any:
        """Run on these inputs, or on others of the same problem."""


P = TypeVar("P")
S = TypeVar("S")


class Kernel(abc.ABC, Generic[P, S]):
    """One kernel. `P` is the class of its problems, `S` that of its schedules.

    Attributes:
        name: the name of the kernel and its host file, and of its source if it has one of its own.
        step: the step of the contracts that it follows.
        sources: what it launches, in ``kernels/``; empty: ``<name>.cu``.
        can_precompile: whether :mod:`samebits.backends.cuda.precompile` can compile it before its launch.
    """

    name: str
    step: Step
    sources: Sequence[str] = ()
    can_precompile: bool = True

    @property
    def catalogue(self) -> Sequence[S]:
        """Every kind of schedule, whatever the problem. Empty: they depend on it."""
        return ()

    @abc.abstractmethod
    def supports(self, p: P) -> bool:
        """Whether the kernel can compute `p`."""

    def all(self, p: P) -> Sequence[S]:
        """Every schedule that can run `p`. Verification shows that none changes a bit."""
        return self.catalogue

    def candidates(self, p: P) -> Sequence[S]:
        """The schedules that :meth:`choose` picks from, each as it would run. Tuning times them."""
        return self.all(p)

    def variations(self, p: P, s: S) -> Sequence[S]:
        """`s` with other values of what no estimate tells apart. Tuning times some; a table may have any."""
        return ()

    def cost(self, p: P, s: S) -> float:
        """Estimated microseconds of `p` under `s`, to compare schedules, and kernels where documented.

        Of a kernel without a model it is 0 for the choice, and 1 for all others.
        """
        return float(s != self.choose(p))

    @abc.abstractmethod
    def choose(self, p: P) -> S:
        """The schedule that should be fastest."""

    @abc.abstractmethod
    def plan(self, p: P, s: S | None = None) -> Plan:
        """The plan of `p` under `s`, or under the choice of :meth:`choose`. Compiles and loads the kernel."""

    def run(self, x: Inputs, s: S | None = None) -> Any:
        """Compute a call by itself. Verification and tuning use this; operations keep their plans."""
        return self.plan(x.problem(self.step), s).run(x)
