"""What is fused: norms, sums before them, rotary positions, gates. How each runs.

``proven`` says for which devices and dtypes a form has the bits of the code in its place: see
:mod:`samebits.fusion.proofs`. It runs on these alone, in the mode alone; the own code runs otherwise.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from samebits.fusion.probe import active, instead
from samebits.ops.add_rms_norm import add_rms_norm
from samebits.ops.gated import gated
from samebits.ops.norm_rotary import norm_rotary
from samebits.ops.rotary import rotary

__all__ = [
    "Gate",
    "GateOfExperts",
    "GatedNorm",
    "Kind",
    "Norm",
    "NormRotary",
    "Rotary",
    "moved",
    "only",
    "own_class",
    "plain",
    "subclass",
    "unhooked",
]

Kind = tuple[Any, ...]
"""Of operands: the type of their device, and what else a form may depend on, such as dtypes."""


def plain(t: Any) -> bool:
    """Whether it is a tensor of PyTorch's own, or a parameter: no DTensor."""
    return type(t) is Tensor or type(t) is nn.Parameter


def only(form: Any, dtypes: Collection[torch.dtype]) -> Any:
    """A form in these dtypes alone."""
    kinds = {name: getattr(form, name) for name in ("proven", "after_sum") if hasattr(form, name)}
    return replace(form, **{name: tuple(k for k in of if k[1] in dtypes) for name, of in kinds.items()})


def moved(form: Any, device: str) -> Any:
    """A form on another type of device."""
    kinds = {name: getattr(form, name) for name in ("proven", "after_sum") if hasattr(form, name)}
    return replace(form, **{name: tuple((device, *k[1:]) for k in of) for name, of in kinds.items()})


def unhooked(module: Any) -> bool:
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def subclass(kind: type[nn.Module], name: str, method: Callable[..., Any]) -> type[nn.Module]:
    """`kind` with another method, under its name, by which others know layers.

    A subclass, since classes may wrap the methods of subclasses, for checkpointing as ``transformers`` does.
    A pickle has `kind` itself, which can be imported; a copy stays fused.
    """

    own: Any = own_class(kind)

    def reduce(self: Any, protocol: Any) -> Any:
        return _made, (own,), self.__dict__

    def deepcopy(self: Any, memo: dict[int, Any]) -> Any:
        made = memo[id(self)] = fused.__new__(fused)
        made.__dict__ = copy.deepcopy(self.__dict__, memo)
        return made

    given: dict[str, Any] = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    given |= {"__reduce_ex__": reduce, "_samebits_own": own, name: method}
    if "__deepcopy__" not in dir(kind):
        given["__deepcopy__"] = deepcopy
    fused: Any = type(kind)(kind.__name__, (kind,), given)  # type: ignore[misc]
    return fused  # type: ignore[no-any-return]


def own_class(kind: type) -> type:
    """The class of which this one is the fused form, or itself."""
    found: type = getattr(kind, "_samebits_own", kind)
    return found


def _made(kind: Any) -> Any:
    return kind.__new__(kind)


# ---- norms


@dataclass(frozen=True)
class Norm:
    """An RMS norm: :func:`samebits.add_rms_norm` with these arguments.

    Attributes:
        kind: the module's class.
        fused: that of modules that are fused; None before it is made.
        weight, eps: names of attributes. A norm without a weight has None.
        proven: device, dtype of the rows and of the weight.
        after_sum: the same, where the rows are a sum that is used again.
    """

    kind: type[nn.Module]
    fused: type[nn.Module] | None
    weight: str | None
    eps: str
    rounding: Any
    offset: float
    proven: tuple[Kind, ...] = ()
    after_sum: tuple[Kind, ...] = ()

    def norm(self) -> Callable[..., Any]:
        """The forward of such a module."""
        own = self.kind.forward
        rounding, offset, proven = self.rounding, self.offset, self.proven

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            if active():
                x: Any = args[0] if len(args) == 1 and not kwargs else None
                weight = form._weight(self)
                if plain(x) and form._fits(x, weight, proven):
                    return add_rms_norm(x, None, weight, form._eps(self), rounding=rounding, offset=offset)
                instead("a norm of other operands", args[0] if args else None, proven)
            return own(self, *args, **kwargs)

        form = self
        return forward

    def sum(self) -> Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]]:
        """A function of such a module and two tensors: their sum, and what the module makes of it."""
        kinds, rounding, offset, proven = (self.kind, self.fused), self.rounding, self.offset, self.after_sum

        def add(norm: Any, a: Any, b: Any) -> tuple[Tensor, Tensor]:
            if active():
                if (
                    type(norm) in kinds
                    and unhooked(norm)
                    and plain(a)
                    and plain(b)
                    and a.shape == b.shape
                    and a.dtype == b.dtype
                    and a.device == b.device
                    and form._fits(a, weight := form._weight(norm), proven)
                ):
                    eps = form._eps(norm)
                    y, total = add_rms_norm(a, b, weight, eps, rounding=rounding, offset=offset)
                    return total, y
                instead("a sum and a norm of other operands", a, proven)
            total = a + b
            return total, norm(total)

        form = self
        return add

    def _weight(self, module: Any) -> Any:
        return None if self.weight is None else getattr(module, self.weight)

    def _eps(self, module: Any) -> float:
        eps: float = getattr(module, self.eps)
        return eps

    def _fits(self, x: Tensor, weight: Any, proven: tuple[Kind, ...]) -> bool:
        if weight is None:
            return (x.device.type, x.dtype, None) in proven
        return plain(weight) and (x.device.type, x.dtype, weight.dtype) in proven


# ---- gates


@dataclass(frozen=True)
class Gate:
    """An activation and a product: :func:`samebits.gated`.

    Attributes:
        kind: the class of the activation's module, before it was fused; or the function itself.
        activation: as :func:`samebits.gated` calls it.
        proven: device and dtype.
    """

    kind: Any
    activation: Any
    proven: tuple[Kind, ...] = ()

    def run(self) -> Callable[..., Tensor]:
        """A function of the activation, the gate and its factor."""
        kind: Any = self.kind
        activation, proven = self.activation, self.proven

        def gate_and_product(act: Any, gate: Any, up: Any) -> Tensor:
            if active():
                if (
                    (act is kind or (own_class(type(act)) is kind and unhooked(act)))
                    and plain(gate)
                    and plain(up)
                    and gate.shape == up.shape
                    and gate.dtype == up.dtype
                    and gate.device == up.device
                    and gate.ndim > 0
                    and (gate.device.type, gate.dtype) in proven
                ):
                    return gated(gate, up, activation=activation)
                instead("a gate of other operands", gate, proven)
            result: Tensor = act(gate) * up
            return result

        return gate_and_product


@dataclass(frozen=True)
class GatedNorm:
    """An RMS norm and then its gate: :func:`samebits.gated`, rounded once, of :func:`samebits.add_rms_norm`.

    Attributes:
        of: the norm, whose class is the module's.
        activation: as :func:`samebits.gated` calls it.
        options: attributes on which code may depend, such as its activation, and what they were.
        fused: the class of modules that are fused; None before it is made.
        proven: device, and dtype of rows, weight and gate.
    """

    of: Norm
    activation: Any
    options: tuple[tuple[str, Any], ...]
    fused: type[nn.Module] | None = None
    proven: tuple[Kind, ...] = ()

    @property
    def kind(self) -> type[nn.Module]:
        return self.of.kind

    def norm(self) -> Callable[..., Any]:
        """The forward of such a module."""
        own, of, activation, proven = self.kind.forward, self.of, self.activation, self.proven

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            if active():
                if len(args) == 2 and not kwargs and form._fits(self, *args):
                    x, gate = args
                    eps = of._eps(self)
                    y = add_rms_norm(x, None, of._weight(self), eps, rounding=of.rounding, offset=of.offset)
                    return gated(gate, y, activation=activation, rounding="once")
                instead("a gated norm of other operands", args[0] if args else None, proven)
            return own(self, *args, **kwargs)

        form = self
        return forward

    def _fits(self, module: Any, x: Any, gate: Any) -> bool:
        weight = self.of._weight(module)
        return (
            plain(x)
            and plain(gate)
            and gate.shape == x.shape
            and gate.dtype == x.dtype
            and gate.device == x.device
            and (weight is None or (plain(weight) and weight.dtype == x.dtype))
            and (x.device.type, x.dtype) in self.proven
            and all(getattr(module, name) == value for name, value in self.options)
        )


@dataclass(frozen=True)
class GateOfExperts:
    """A method of one matrix, with gates and their factors: :func:`samebits.gated`.

    Attributes:
        own: the method.
        activation: as :func:`samebits.gated` calls it.
        in_turns: whether gates and factors are in turns; else gates are the first half.
        limit, alpha: names of attributes, or None.
        proven: device and dtype.
    """

    own: Callable[..., Any]
    activation: Any
    in_turns: bool
    limit: str | None
    alpha: str | None
    proven: tuple[Kind, ...] = ()

    def run(self) -> Callable[..., Any]:
        """The method."""
        own, activation, in_turns = self.own, self.activation, self.in_turns
        limit, alpha, proven = self.limit, self.alpha, self.proven

        def apply_gate(self: Any, gate_up: Any) -> Any:
            if active():
                if (
                    plain(gate_up)
                    and gate_up.ndim > 0
                    and gate_up.shape[-1] % 2 == 0
                    and (gate_up.device.type, gate_up.dtype) in proven
                ):
                    return gated(
                        gate_up,
                        interleaved=in_turns,
                        activation=activation,
                        limit=None if limit is None else getattr(self, limit),
                        alpha=1.702 if alpha is None else getattr(self, alpha),
                    )
                instead("gates of experts of other operands", gate_up, proven)
            return own(self, gate_up)

        return apply_gate


# ---- rotary positions


@dataclass(frozen=True)
class Rotary:
    """A function of queries, keys, cosines and sines: :func:`samebits.rotary`.

    Attributes:
        own: the function.
        tensors: its parameters of queries and keys, or of one of these.
        axis: the dimension of heads, counted from the end, where it has no ``unsqueeze_dim``.
        default: that of ``unsqueeze_dim``. None: it has no such parameter.
        layout: as :func:`samebits.rotary` calls it.
        paired: whether `cos` has a value for each pair; else for each entry.
        first_half: whether the first half of `cos` is meant.
        gradients: as :func:`samebits.rotary` calls them.
        wide: whether it takes `cos` in float32.
        proven: device, dtypes of queries and cosines, heads' dimension, and whether all of a head turns.
    """

    own: Callable[..., Any]
    tensors: tuple[str, ...]
    axis: int | None
    default: int | None
    layout: Any
    paired: bool
    first_half: bool
    gradients: Any = "rounded"
    wide: bool = False
    proven: tuple[Kind, ...] = ()

    def run(self) -> Callable[..., Any]:
        """A function that is called as the own one."""
        own, proven = self.own, self.proven
        form, names = self, self._names()

        def turned(*args: Any, **kwargs: Any) -> Any:
            if active():
                given = dict(zip(names, args, strict=False)) | kwargs
                operands = form.operands(given)
                if operands is not None:
                    *tensors, options, back = operands
                    return back(*rotary(*tensors, **options))
                instead("rotary positions of other operands", given.get(form.tensors[0]), proven)
            return own(*args, **kwargs)

        return turned

    def _names(self) -> tuple[str, ...]:
        return tuple(inspect.signature(self.own).parameters)

    def operands(self, given: dict[str, Any]) -> tuple[Any, ...] | None:
        """Of the own function's arguments: q, k, cos, sin and options of :func:`samebits.rotary`.

        The last one is a function of its results, which gives the own function's. None: they do not fit.
        """
        single = len(self.tensors) == 1
        q: Any = given.get(self.tensors[0])
        k: Any = None if single else given.get(self.tensors[1])
        cos: Any = given.get("cos")
        sin: Any = given.get("sin")
        axis = self._heads(q, cos, given)
        if (
            axis is None
            or not all(n in (*self.tensors, "cos", "sin", "unsqueeze_dim") for n in given)
            or not plain(sin)
            or cos.requires_grad
            or sin.requires_grad
            or not (single or (plain(k) and k.dtype == q.dtype and k.ndim == q.ndim))
            or self._kind(q, cos, axis) not in self.proven
        ):
            return None
        turns = axis == -3
        if turns:
            q, k = q.transpose(-3, -2), None if single else k.transpose(-3, -2)
        if not self._fits(q, k, cos, sin):
            return None
        size = cos.shape[-1] * (2 if self.paired else 1)
        if self.first_half:
            half = cos.shape[-1] // 2
            cos, sin = cos[..., :half], sin[..., :half]
        if self.wide:
            cos, sin = cos.float(), sin.float()

        def back(q: Tensor, k: Tensor | None) -> Any:
            if turns:
                q, k = q.transpose(-3, -2), None if k is None else k.transpose(-3, -2)
            return q if single else (q, k)

        options = {"rotary_dim": size, "layout": self.layout, "gradients": self.gradients}
        return q, k, cos, sin, options, back

    def _heads(self, q: Any, cos: Any, given: dict[str, Any]) -> int | None:
        """The dimension of heads, counted from the end: -2 or -3. None: it has none."""
        if not (plain(q) and plain(cos) and cos.ndim == q.ndim - 1 and cos.shape[-1] > 1):
            return None
        if self.default is None:
            return self.axis
        at = given.get("unsqueeze_dim", self.default)
        at = at - q.ndim if at >= 0 else at
        return at if at in (-2, -3) and q.ndim + at >= 0 else None

    def _kind(self, q: Tensor, cos: Tensor, axis: int) -> Kind:
        whole = cos.shape[-1] == q.shape[-1]
        return q.device.type, q.dtype, cos.dtype, axis, q.ndim, whole

    def _fits(self, q: Tensor, k: Any, cos: Tensor, sin: Tensor) -> bool:
        """Whether shapes are those of tokens, heads and their entries. Broadcast rows are not."""
        size = cos.shape[-1] * (2 if self.paired else 1)
        lead = q.shape[:-2]
        return (
            size <= q.shape[-1]
            and sin.shape == cos.shape
            and sin.dtype == cos.dtype
            and all(n in (1, m) for n, m in zip(cos.shape[:-1], lead, strict=True))
            and cos.shape[-2] == lead[-1]
            and (k is None or (k.shape[:-2] == lead and k.shape[-1] == q.shape[-1]))
        )


@dataclass(frozen=True)
class NormRotary:
    """Norms of the heads of queries and keys, and then rotary positions: :func:`samebits.norm_rotary`.

    Attributes:
        norms: of queries and keys, ``[batch, tokens, heads, n]``.
        rotary: of both, with heads before tokens.
        proven: device and dtype.
    """

    norms: tuple[Norm, Norm]
    rotary: Rotary
    proven: tuple[Kind, ...] = ()

    def run(self) -> Callable[..., Any]:
        """A function of what turns alone, both norms, and the own function's arguments before the norms."""
        form, proven, names = self, self.proven, self.rotary._names()

        def turned(turn: Any, q_norm: Any, k_norm: Any, *args: Any, **kwargs: Any) -> Any:
            q, k, *others = args
            if active():
                given = dict(zip(names, args, strict=False)) | kwargs
                operands = form.rotary.operands(given)
                norms = (q_norm, q), (k_norm, k)
                if (
                    operands is not None
                    and q.ndim == 4
                    and form.rotary._heads(q, given["cos"], given) == -3
                    and (q.device.type, q.dtype) in proven
                    and all(form._takes(i, *norm) for i, norm in enumerate(norms))
                    and form.norms[0]._eps(q_norm) == form.norms[1]._eps(k_norm)
                ):
                    of_q, of_k = form.norms
                    q, k, cos, sin, options, back = operands
                    weights = of_q._weight(q_norm), of_k._weight(k_norm)
                    options |= {"rounding": of_q.rounding, "offset": of_q.offset}
                    return back(*norm_rotary(q, k, *weights, cos, sin, of_q._eps(q_norm), **options))
                instead("norms and rotary positions of other operands", q, proven)
            q, k = q_norm(q.transpose(1, 2)).transpose(1, 2), k_norm(k.transpose(1, 2)).transpose(1, 2)
            return turn(q, k, *others, **kwargs)

        return turned

    def _takes(self, which: int, norm: Any, x: Tensor) -> bool:
        """Whether a module is the norm that is meant, of such heads."""
        form = self.norms[which]
        if type(norm) not in (form.kind, form.fused) or not unhooked(norm):
            return False
        weight = form._weight(norm)
        if weight is not None and weight.shape != x.shape[-1:]:
            return False
        rounds_alike = weight is None or form.rounding == "once" or weight.dtype == x.dtype
        return rounds_alike and form._fits(x, weight, form.after_sum)
