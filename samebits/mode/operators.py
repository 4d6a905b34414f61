"""The rules of the mode by PyTorch's operators (``torch.ops.aten``), as its dispatcher knows them.

They follow from the tables of :mod:`samebits.mode.rules`: an operator has the rule of the function of its
name. Python functions that call others need none, since what they call has one. Nor do broadcasting and
``expand``: autograd reduces their gradients with ``sum``, which has a rule for that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from samebits.backends import chosen_backend
from samebits.mode import indexing, internals, overrides, products, rules
from samebits.mode.arguments import takes
from samebits.mode.optimizers import step_in_whole_vectors
from samebits.mode.pointwise import (
    complex_in_whole_vectors,
    loss_gradient_in_whole_vectors,
    scaling_in_whole_vectors,
)
from samebits.mode.vectors import in_whole_vectors
from samebits.ops.expand import sum_over_broadcast

__all__ = ["Rule", "name_of", "operator_rules", "outs"]

Replacement = Callable[..., Any]


class Rule(NamedTuple):
    """What is done with the calls of an operator.

    Attributes:
        replacement: takes the operator's arguments but ``out``, and returns NotImplemented for those that are
            not covered. None: all calls are reported.
        in_autograd: takes the calls by which autograd itself reduces gradients.
        keys: of the dispatcher, at which the rule holds in the process. In contexts it holds for all tensors,
            or for those on a CPU, if it has keys for them alone.
        sums: whether the operator computes in the dtype of ``out``.
        of_gradients: whether autograd adds up gradients by it.
    """

    replacement: Replacement | None
    in_autograd: Replacement | None = None
    keys: tuple[str, ...] = ("CPU", "AutogradCPU", "CUDA", "AutogradCUDA")
    sums: bool = False
    of_gradients: bool = False


def _cross_entropy_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    by_name = ("none", "mean", "sum")[reduction]
    return overrides.cross_entropy(
        input, target, weight, None, ignore_index, None, by_name, label_smoothing=label_smoothing
    )


def _einsum(equation: str, tensors: Sequence[Tensor], path: Any = None) -> Any:
    return products.einsum_(equation, *tensors)  # from left to right, whatever the path


def _sum_of_gradients(
    input: Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    """A gradient's sum over the dimensions in which its tensor was broadcast."""
    if not takes(input) or dtype is not None or input.ndim == 0:
        return NotImplemented
    chosen_backend(input.device.type, "sum")
    summed = {d % input.ndim for d in dim} if dim else set(range(input.ndim))
    total = sum_over_broadcast(input, [1 if d in summed else n for d, n in enumerate(input.shape)])
    return total if keepdim else total.reshape([n for d, n in enumerate(input.shape) if d not in summed])


_OF_OPERATORS: dict[str, Replacement] = {
    "cross_entropy_loss": _cross_entropy_loss,
    "einsum": _einsum,
    "_index_put_impl_": indexing.index_put_,
}
# Their gradients are other operators: sums, `index_add_`, `scatter_add_` and `_index_put_impl_`.
_LEFT = ("expand", "expand_as", "sum_to_size", "index_select", "gather", "repeat_interleave", "repeat")
_OF_GRADIENTS = ("sum", "index_add_", "scatter_add_", "_index_put_impl_")
_OTHER_NAMES = {"logsigmoid": "log_sigmoid", "fold": "col2im"}


# Operators that no rule of a function leads to: sparse products and sums.
_SPARSE = ("_sparse_mm", "_sparse_addmm", "_sparse_sum", "_sparse_softmax", "_sparse_log_softmax")


@functools.cache
def name_of(op: OpOverload) -> str:
    """The name of the function that a user calls."""
    if op.namespace != "aten":
        return op._schema.name.replace("::", ".")
    name = op._schema.name.removeprefix("aten::")
    for function, other in _OTHER_NAMES.items():
        name = function if name == other else name
    return rules.full_name(name) or f"aten.{name}"


def _overloads(name: str) -> Iterator[OpOverload]:
    """The operators with this name, or that of a special function."""
    name = _OTHER_NAMES.get(name, name)
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
            if rules.is_direct(op) and _is_dispatched(op):
                yield op


def _replaced() -> Iterator[tuple[OpOverload, Rule]]:
    replacements = {
        key if isinstance(key, str) else key.__name__: replacement
        for row in rules.REPLACED
        for key, replacement in row.functions.items()
        if not isinstance(key, FunctionType)
    }
    for name, replacement in (replacements | _OF_OPERATORS).items():
        for op in _overloads(name):
            writes_one = outs(op) in ([], ["out"]) and name != "_foreach_norm"
            sums = name in rules.NAMES_OF_SUMS
            in_autograd = _sum_of_gradients if name == "sum" and not outs(op) else None
            yield (
                op,
                Rule(
                    replacement if writes_one or not outs(op) else None,
                    in_autograd,
                    sums=sums,
                    of_gradients=name in _OF_GRADIENTS and not outs(op),
                ),
            )


def _accumulating() -> Iterator[tuple[OpOverload, Rule]]:
    for name, asks in rules.ACCUMULATING.items():
        functional = {_kinds(op): op for op in _overloads(name) if not outs(op)}
        for op in _overloads(name):
            yield op, Rule(rules.unless(functional[_kinds(op)] if outs(op) else op, *asks))


_BACKENDS = tuple(
    f"{kind}{device}" for device in ("CPU", "CUDA") for kind in ("", "Quantized", "Sparse", "SparseCsr")
)


def _pointwise() -> Iterator[tuple[OpOverload, Rule]]:
    """Elementwise operators on a CPU.

    Those of several tensors have a rule below autograd alone: above, a number may come in place of a tensor,
    which PyTorch cannot hand to Python under ``torch.func``. Their gradients consist of other operators.
    """
    for replacement, names in (
        (scaling_in_whole_vectors, ("add", "sub", "mul", "div")),
        (in_whole_vectors, rules.WHOLE_VECTORS),
        (complex_in_whole_vectors, rules.COMPLEX_WHOLE_VECTORS),
    ):
        for name in names:
            functional = {_kinds(op): op for op in _overloads(name) if not outs(op)}
            for op in (*_overloads(name), *_overloads(name + "_")):
                compute = functional.get(_kinds(op))
                several = _kinds(op).count("Tensor") > 1
                keys = ("CPU",) if several else ("CPU", "AutogradCPU")
                if several and internals.is_composite(op):
                    continue  # what it calls has a rule; one below autograd would take its gradient away
                if compute is None:  # polygamma_, whose arguments have another order
                    yield op, Rule(None, keys=keys)
                elif outs(op):
                    yield op, Rule(replacement(compute, None), keys=keys)
                else:
                    in_place = op._schema.is_mutable
                    yield op, Rule(replacement(op, compute if in_place else None), keys=keys)


def _gradients() -> Iterator[tuple[OpOverload, Rule]]:
    for name in rules.LOSS_GRADIENTS_IN_WHOLE_VECTORS:
        op = getattr(torch.ops.aten, name).default
        yield op, Rule(loss_gradient_in_whole_vectors(op), keys=("CPU",), of_gradients=True)
    for name in rules.GRADIENTS_IN_WHOLE_VECTORS:  # autograd calls them on whole vectors
        op = getattr(torch.ops.aten, name).default
        yield op, Rule(in_whole_vectors(op), keys=("CPU",))


def _steps() -> Iterator[tuple[OpOverload, Rule]]:
    for name in rules.STEPS_IN_WHOLE_VECTORS:
        yield from ((op, Rule(step_in_whole_vectors(op), keys=("CPU",))) for op in _overloads(name))


def _internal() -> Iterator[tuple[OpOverload, Rule]]:
    for op in filter(_is_dispatched, internals.reported()):
        composite = internals.is_composite(op)
        yield op, Rule(None) if composite else Rule(None, keys=_BACKENDS)


def _kinds(op: OpOverload) -> tuple[str, ...]:
    return tuple(str(a.type) for a in op._schema.arguments if not a.is_out)


@functools.cache
def operator_rules() -> dict[OpOverload, Rule]:
    """The rule of every operator that has one."""
    reported = (op for name in rules.REPORTED_NAMES for op in _overloads(name))
    found = dict(_internal())
    found |= dict.fromkeys((*_direct(), *reported), Rule(None))
    found |= dict((*_pointwise(), *_gradients(), *_steps(), *_accumulating(), *_replaced()))
    found |= {op: Rule(None, keys=()) for name in _SPARSE for op in _overloads(name)}
    return {op: rule for op, rule in found.items() if op._schema.name.removeprefix("aten::") not in _LEFT}
