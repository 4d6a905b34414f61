"""The rules of the mode by PyTorch's operators (``torch.ops.aten``), as its dispatcher knows them.

They follow from :data:`samebits.mode.rules.RULES`: an operator has the rule of the function of its name.
Python functions that call others need none, since what they call has one. Nor do broadcasting and ``expand``:
autograd reduces their gradients with ``sum``, which has a rule for that.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch._ops import OpOverload

from samebits.mode import internals
from samebits.mode.functions import full_name, is_direct, unless
from samebits.mode.rules import BACKENDS, RULES, Replacement, Rule

__all__ = ["OperatorRule", "name_of", "operator_rules", "outs"]


class OperatorRule(NamedTuple):
    """What is done with the calls of an operator.

    Attributes:
        replacement: takes the operator's arguments but ``out``, and returns NotImplemented for those that are
            not covered. None: all calls are reported.
        in_autograd, keys, sums: as in :class:`samebits.mode.rules.Rule`.
        of_gradients: whether it has the rule in backwards outside of contexts, too.
    """

    replacement: Replacement | None
    in_autograd: Replacement | None = None
    keys: tuple[str, ...] = BACKENDS
    sums: bool = False
    of_gradients: bool = False


_FUNCTIONS = {operator: rule.name for rule in RULES for operator in rule.operators or ()}


@functools.cache
def name_of(op: OpOverload) -> str:
    """The name of the function that a user calls."""
    if op.namespace != "aten":
        return op._schema.name.replace("::", ".")
    name = op._schema.name.removeprefix("aten::")
    name = _FUNCTIONS.get(name, name)
    return full_name(name) or f"aten.{name}"


def _overloads(name: str) -> Iterator[OpOverload]:
    """The operators with this name, or that of a special function."""
    for spelled in (name, f"special_{name}"):
        packet = getattr(torch.ops.aten, spelled, None)
        found = () if packet is None else (getattr(packet, o) for o in packet.overloads())
        yield from filter(_is_dispatched, found)


def _is_dispatched(op: OpOverload) -> bool:
    """Whether the dispatcher runs it on tensors. Operators of TorchScript, and on named tensors, are left."""
    schema = op._schema
    on_tensors = any("Tensor" in str(a.type) for a in schema.arguments)
    return on_tensors and "Dimname" not in str(schema) and torch._C._dispatch_has_kernel(op.name())


def outs(op: OpOverload) -> list[str]:
    """The names of its ``out`` arguments."""
    return [a.name for a in op._schema.arguments if a.is_out]


def _direct() -> Iterator[OpOverload]:
    for full in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full.partition("::")
        packet = getattr(torch.ops.aten, name.partition(".")[0], None) if namespace == "aten" else None
        for op in () if packet is None else (getattr(packet, o) for o in packet.overloads()):
            if is_direct(op) and _is_dispatched(op):
                yield op


_BACKENDS = tuple(
    f"{kind}{device}" for device in ("CPU", "CUDA") for kind in ("", "Quantized", "Sparse", "SparseCsr")
)


def _of(rule: Rule) -> Iterator[tuple[OpOverload, OperatorRule]]:
    """What becomes of the operators of a rule."""
    for name in (rule.name,) if rule.operators is None else rule.operators:
        if rule.each is not None:
            yield from _elementwise(rule, name)
            continue
        functional = {_kinds(op): op for op in _overloads(name) if not outs(op)}
        for op in _overloads(name):
            of_gradients = (f"{name}.out" if outs(op) else name) in rule.of_gradients
            replacement = rule.as_operator or rule.replacement
            if rule.unless is not None:
                replacement = unless(functional[_kinds(op)] if outs(op) else op, *rule.unless)
            elif rule.each_operator is not None:
                if outs(op):
                    continue
                replacement = rule.each_operator(op)
            elif outs(op) and not _writes_one(op):
                replacement = None
            in_autograd = None if outs(op) else rule.in_autograd
            yield op, OperatorRule(replacement, in_autograd, rule.keys, rule.sums, of_gradients)


def _elementwise(rule: Rule, name: str) -> Iterator[tuple[OpOverload, OperatorRule]]:
    """Elementwise operators on a CPU.

    Those of several tensors have a rule below autograd alone: above, a number may come in place of a tensor,
    which PyTorch cannot hand to Python under ``torch.func``. Their gradients consist of other operators.
    """
    assert rule.each_operator is not None
    functional = {_kinds(op): op for op in _overloads(name) if not outs(op)}
    for op in (*_overloads(name), *_overloads(name + "_")):
        compute = functional.get(_kinds(op))
        several = _kinds(op).count("Tensor") > 1
        keys = rule.keys[:1] if several else rule.keys
        if several and internals.is_composite(op):
            continue  # what it calls has a rule; one below autograd would take its gradient away
        if compute is None:  # polygamma_, whose arguments have another order
            yield op, OperatorRule(None, keys=keys)
        elif outs(op):
            yield op, OperatorRule(rule.each_operator(compute, None), keys=keys)
        else:
            in_place = op._schema.is_mutable
            yield op, OperatorRule(rule.each_operator(op, compute if in_place else None), keys=keys)


def _internal() -> Iterator[tuple[OpOverload, OperatorRule]]:
    for op in filter(_is_dispatched, internals.reported()):
        composite = internals.is_composite(op)
        yield op, OperatorRule(None) if composite else OperatorRule(None, keys=_BACKENDS)


def _kinds(op: OpOverload) -> tuple[str, ...]:
    return tuple(str(a.type) for a in op._schema.arguments if not a.is_out)


def _writes_one(op: OpOverload) -> bool:
    """Whether its only ``out`` is a tensor of that name."""
    return [(a.name, str(a.type)) for a in op._schema.arguments if a.is_out] == [("out", "Tensor")]


@functools.cache
def operator_rules() -> dict[OpOverload, OperatorRule]:
    """The rule of every operator that has one."""
    found = dict(_internal())
    found |= dict.fromkeys(_direct(), OperatorRule(None))
    for rule in RULES:
        found |= dict(_of(rule))
    left = {rule.name for rule in RULES if rule.replacement is not None and rule.operators == ()}
    return {op: rule for op, rule in found.items() if op._schema.name.removeprefix("aten::") not in left}
