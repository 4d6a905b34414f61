"""The mode's rules by function, for code that ``torch.compile`` traces; and names for messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from samebits.mode.rules import RULES, Rule
from samebits.mode.vectors import in_whole_vectors

__all__ = [
    "ALIASES",
    "BODIES",
    "HIGHER_ORDER",
    "NAMES",
    "POWERS",
    "REPLACEMENTS",
    "SUMS",
    "TAKE_OUT",
    "UNCOVERED",
    "UNTRACED",
    "VIEWS",
    "full_name",
    "is_direct",
    "named",
    "unless",
]

Function = Callable[..., Any]

_WHERE = (torch, torch.Tensor, F, torch.linalg, torch.fft, torch.special)
_LABELS = ("torch", "torch.Tensor", "torch.nn.functional", "torch.linalg", "torch.fft", "torch.special")


def named(name: str) -> dict[Function, str]:
    """All functions of PyTorch with this name, and their full names."""
    found = zip(_WHERE, _LABELS, strict=True)
    return {getattr(w, name): f"{label}.{name}" for w, label in found if callable(getattr(w, name, None))}


_VARIANTS = {rule.name: rule.label for rule in RULES if rule.label}


def full_name(name: str) -> str | None:
    """Where users find the function that an operator of this name is called by."""
    kind, _, rest = name.partition("_")
    if kind in ("linalg", "fft", "special") and hasattr(getattr(torch, kind), rest):
        return f"torch.{kind}.{rest}"
    return _VARIANTS.get(name) or next(iter(named(name).values()), None)


def unless(func: Function, argument: str, place: int) -> Function:
    """`func`, covered only where `argument`, at position `place`, is False, None or absent."""

    def call(*args: Any, **kwargs: Any) -> Any:
        asked = args[place] if len(args) > place else kwargs.get(argument)
        return func(*args, **kwargs) if asked is None or asked is False else NotImplemented

    return call


def _elementwise(name: str) -> Iterator[tuple[Function, Function | None]]:
    """All functions called `name` or `name_`. In-place ones come with their out-of-place form."""
    for where in _WHERE:
        func = getattr(where, name, None)
        if func is not None:
            yield func, getattr(where, "__" + name[3:]) if name.startswith("__i") else None
            if hasattr(where, name + "_"):
                yield getattr(where, name + "_"), func


def _functions(rule: Rule) -> tuple[Function, ...]:
    return rule.functions or tuple(named(rule.name))


def _replacements(rule: Rule) -> dict[Function, Function]:
    if rule.each is not None:
        return {func: rule.each(func, out_of_place) for func, out_of_place in _elementwise(rule.name)}
    if rule.unless is not None:
        return {func: unless(func, *rule.unless) for func in _functions(rule)}
    found = {} if rule.replacement is None else dict.fromkeys(_functions(rule), rule.replacement)
    return found if rule.functional is None else found | {getattr(F, rule.name): rule.functional}


def _where(holds: Callable[[Rule], Any]) -> frozenset[Function]:
    """The functions of the rules for which this holds."""
    return frozenset(func for rule in RULES if holds(rule) for func in _functions(rule))


REPLACEMENTS = {func: r for rule in RULES for func, r in _replacements(rule).items()}
"""The replacement of each function. It returns NotImplemented for arguments that are not covered."""
UNCOVERED = _where(lambda rule: rule.reported)
TAKE_OUT = _where(lambda rule: rule.replacement)
"""Functions whose ``out`` this library writes."""
SUMS = _where(lambda rule: rule.sums)
VIEWS = _where(lambda rule: rule.is_view)
NAMES = {
    func: label
    for rule in RULES
    if rule.reported or rule.replacement or rule.unless
    for func, label in (
        dict.fromkeys(rule.functions, full_name(rule.name)) if rule.functions else named(rule.name)
    ).items()
    if label
}
ALIASES = {"axis": "dim", "keepdims": "keepdim", "x": "input", "x1": "input", "x2": "other"}
"""Other names that PyTorch takes for arguments."""
POWERS = [  # torch.compile does not find these in a dictionary
    (Tensor.__pow__, in_whole_vectors(Tensor.pow)),
    (Tensor.__rpow__, in_whole_vectors(Tensor.__rpow__)),
    (Tensor.__ipow__, in_whole_vectors(Tensor.pow_, Tensor.pow)),
]


def _higher_order(*names: str) -> list[Any]:
    """The operators of these names that this PyTorch has."""
    found = torch.ops.higher_order
    return [getattr(found, name) for name in names if hasattr(found, name)]


HIGHER_ORDER = _higher_order("flex_attention", "cond", "while_loop", "map_impl", "scan", "associative_scan")
UNTRACED = [*HIGHER_ORDER, *_higher_order("tag_activation_checkpoint")]
"""``torch.compile`` traces what they call without a context that is entered in the function it compiles."""

_NO_CHECKS = {
    name: lambda *_: False
    for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
}


def _body(function: FunctionType) -> FunctionType:
    """A copy of PyTorch's `function` that does not dispatch itself, so that its calls are overridden."""
    body = FunctionType(
        function.__code__,
        function.__globals__ | _NO_CHECKS,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    body.__kwdefaults__ = function.__kwdefaults__
    return body


# Python functions of PyTorch that are followed into. Functions with a closure are dispatched by it. Those of
# `torch.functional` have a rule, or call nothing that has one, and the compiler traces no copies of them.
BODIES = {
    function: _body(function)
    for function in vars(F).values()
    if isinstance(function, FunctionType)
    and function.__module__ == F.__name__
    and not function.__closure__
    and function not in UNCOVERED
}
# Backward functions are followed into so that activation checkpointing's second forward is covered.
_BACKWARD: tuple[Any, ...] = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
BODIES |= {func: _body(func) for func in _BACKWARD}

_DIRECT = {
    rule.name for rule in RULES if (rule.reported or rule.replacement) and not (rule.functions or rule.moves)
} | {"_fused_rms_norm"}
_DIRECT_KINDS = (
    "linalg_",
    "_linalg_",
    "fft_",
    "_fft_",
    "upsample_",
    "_upsample_",
    "grid_sampler_",
    "_scaled_dot_product_",
)


def is_direct(func: Any) -> bool:
    """Whether `func` is an operator of ``torch.ops.aten`` that reduces, or of ``transformers``."""
    if not isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return False
    namespace, _, name = str(func).partition(".")
    name = name.partition(".")[0]
    if namespace == "transformers":
        return name == "grouped_mm_fallback"
    return namespace == "aten" and (name in _DIRECT or name.startswith(_DIRECT_KINDS))
