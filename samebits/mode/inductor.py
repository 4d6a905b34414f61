"""What inductor compiles under the mode has the bits of eager PyTorch: it fuses what is exact.

inductor fuses elementwise functions. Its code may round them otherwise than PyTorch's kernels do: it keeps
what they would round to 16 bits in float32, contracts products and sums, and has other functions for a
quotient or an exponential. So under the mode

* functions of one rounding (:data:`EXACT`) are fused, each of them rounded as eager PyTorch rounds it;
* all other elementwise functions are one operator each, which runs PyTorch's kernel. So is what is computed
  of constants alone, for Triton writes a constant of -0 as 0; and on a CPU what rounds to 16 bits, in
  versions of PyTorch whose C++ leaves that out.

Not part of this: operators that PyTorch itself composes of several for the compiler, such as losses.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from samebits.mode.arguments import tensors_of
from samebits.mode.constant_masks import without_causal_masks
from samebits.mode.patches import asks, changed, when_loaded
from samebits.mode.vectors import as_operator, operator_node

__all__ = ["EXACT", "compile_exactly", "cover_inductor"]

EXACT = frozenset(
    """
    abs add bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor clone eq ge
    gt isfinite isinf isnan isneginf isposinf le logical_and logical_not logical_or logical_xor lt masked_fill
    mul ne neg positive rsub signbit sub where __lshift__ __rshift__ __xor__
    """.split()  # noqa: SIM905
)
"""Functions of at most one rounding, without a scale."""
_OF_INTEGERS = frozenset(
    "clamp clamp_max clamp_min clip floor_divide fmod maximum minimum remainder round sgn sign square".split()  # noqa: SIM905
)
_WITHOUT_A_TAG = frozenset(
    """
    elu_backward floor_divide glu glu_backward hardshrink_backward hardsigmoid_backward hardswish
    hardswish_backward hardtanh_backward huber_loss_backward leaky_relu leaky_relu_backward
    log_sigmoid_backward mish_backward mse_loss_backward smooth_l1_loss_backward soft_margin_loss_backward
    softplus_backward softshrink_backward
    """.split()  # noqa: SIM905
)
"""Elementwise operators that PyTorch does not tag so."""


class _Here(threading.local):
    """Whether what is traced in this thread enters a context, and whether inductor runs."""

    entered = False
    inside = False


_here = _Here()
Table = Mapping[OpOverload, Callable[..., Any]]


def compile_exactly() -> None:
    """The graph that is traced enters a context."""
    _here.entered = True


compile_exactly._dynamo_marked_constant = True  # type: ignore[attr-defined]  # it runs while it is traced


def cover_inductor() -> None:
    """Watch what is handed to inductor, now or as soon as it is loaded."""
    if _MODULE in sys.modules:
        _watch()
    else:
        when_loaded(_MODULE, _watch)


_MODULE = "torch._inductor.compile_fx"


def _watch() -> None:
    own = sys.modules[_MODULE].compile_fx
    if hasattr(own, "__wrapped__"):
        return

    @functools.wraps(own)
    def compile_fx(*args: Any, **named: Any) -> Any:
        if _here.inside or not (_here.entered or asks.in_mode()):
            return own(*args, **named)
        _here.inside, _here.entered = True, False  # inductor calls this again, with the settings
        if args and isinstance(args[0], GraphModule):
            without_causal_masks(args[0])
        try:
            return own(*args, **_exactly(**named))
        finally:
            _here.inside = False

    _try_out(own)
    setattr(sys.modules[_MODULE], own.__name__, compile_fx)


def _try_out(compile_fx: Callable[..., Any]) -> None:
    """Raise an error unless inductor has these arguments and settings."""
    from torch._inductor import config

    try:
        missing = {"config_patches", "decompositions"} - {*inspect.signature(compile_fx).parameters}
        with config.patch(SETTINGS):
            pass
    except Exception as error:
        raise changed("inductor's settings", error) from error
    if missing:
        raise changed("compile_fx", TypeError(f"it takes no {', '.join(missing)}"))


def _exactly(
    config_patches: Mapping[str, Any] | None = None, decompositions: Table | None = None, **rest: Any
) -> dict[str, Any]:
    """Arguments of ``compile_fx`` with which it compiles exactly."""
    from torch._inductor import config
    from torch._inductor.decomposition import select_decomp_table

    settings = {**(config_patches or {}), **SETTINGS}
    with config.patch(settings):
        theirs = select_decomp_table() if decompositions is None else decompositions
        first = _rounding(config.post_grad_custom_pre_pass)
    ours = {op: functools.partial(_decomposed, op, theirs.get(op)) for op in _elementwise()}
    return {
        "config_patches": settings | {"post_grad_custom_pre_pass": first},
        "decompositions": {**theirs, **ours},
        **rest,
    }


_CONVERSION = torch.ops.aten._to_copy.default
SETTINGS = {
    "emulate_precision_casts": True,  # Triton does not contract products and sums then
    "pattern_matcher": False,  # patterns leave out conversions to 16 bits and back
    "joint_graph_constant_folding": False,  # which leaves out the sum of -0 and 0
    "cpp.enable_floating_point_contract_flag": "off",
    "use_fast_math": False,
}


@functools.cache
def _elementwise() -> tuple[OpOverload, ...]:
    """PyTorch's elementwise operators."""
    found = []
    for full in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full.partition("::")
        base, _, overload = name.partition(".")
        if namespace != "aten" or not hasattr(torch.ops.aten, base):
            continue
        op = getattr(getattr(torch.ops.aten, base), overload or "default", None)
        if op is None or op._schema.is_mutable or [str(r.type) for r in op._schema.returns] != ["Tensor"]:
            continue
        if base in _WITHOUT_A_TAG or torch.Tag.pointwise in op.tags:
            found.append(op)
    return (*found, _CONVERSION)


def _decomposed(op: OpOverload, theirs: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    """A call of an elementwise operator in a graph: one operator, or what PyTorch makes of it."""
    if op is torch.ops.aten.neg.default and args[0].is_floating_point():
        return args[0] * -1.0  # Triton subtracts from 0, which makes 0 of 0
    if _is_left_wide(op, args, kwargs) or not _is_exact(op, args, kwargs):
        converts = op is _CONVERSION
        found = as_operator(op, args, {"dtype": kwargs["dtype"]} if converts else kwargs)
        if found is not None:
            form = kwargs.get("memory_format") if converts else None
            return found if form is None else found.clone(memory_format=form)
    return NotImplemented if theirs is None else theirs(*args, **kwargs)


def _is_exact(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    name = op._schema.name.removeprefix("aten::")
    if any(map(_is_negative_zero, (*args, *kwargs.values()))):
        return False
    if name in EXACT:
        scale: Any = kwargs.get("alpha", args[2] if name == "rsub" and len(args) > 2 else 1)
        return bool(scale == 1)
    if op is _CONVERSION:
        return True
    if name == "pow":
        exponent = args[1]
        return isinstance(exponent, (int, float)) and exponent in (1, 2)
    integers = not any(t.is_floating_point() or t.is_complex() for t in tensors_of((*args, *kwargs.values())))
    return integers and name in _OF_INTEGERS and not any(isinstance(x, float) for x in args)


def _is_negative_zero(x: Any) -> bool:
    return isinstance(x, float) and x == 0 and math.copysign(1, x) < 0


def _is_left_wide(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether inductor's code would go on with the float32 value of a result of 16 bits."""
    tensors = [*tensors_of((*args, *kwargs.values()))]
    if not all(t.is_cpu for t in tensors) or _rounds_on_a_cpu():
        return False
    if op is not _CONVERSION:
        dtypes: list[torch.dtype | None] = [t.dtype for t in tensors]
    elif kwargs.get("device") in (None, torch.device("cpu")):
        dtypes = [kwargs.get("dtype")]
    else:
        dtypes = []
    return any(dtype in (torch.float16, torch.bfloat16) for dtype in dtypes)


@functools.cache
def _rounds_on_a_cpu() -> bool:
    from torch._inductor.codegen import cpp

    return "emulate_precision_casts" in inspect.getsource(cpp)


def _rounding(before: Any) -> Any:
    """A pass over a graph, after the user's: each operator rounds to 16 bits what is of 16 bits."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    passes = (before,) if callable(before) else tuple(before or ())

    class Rounding(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            for own in passes:
                own(graph)
            _constants(graph)
            for node in graph.nodes:
                values = (n.meta.get("val") for n in (node, *node.all_input_nodes))
                if any(isinstance(t, Tensor) and t.dtype.itemsize == 2 for t in values):
                    node.meta["low_precision_pointwise_barrier"] = True

        def uuid(self) -> Any:  # of compiled code that is kept: count on when the pass changes
            return "samebits", 2, *(own.uuid() for own in passes if isinstance(own, CustomGraphPass))

    return Rounding()


_FULL = torch.ops.aten.full.default


def _constants(graph: Graph) -> None:
    """Functions of constants alone become operators, and so does a constant of -0."""
    found: set[Node] = set()
    for node in graph.nodes:
        if node.target is _FULL:
            if _is_negative_zero(node.args[1]):
                node.update_arg(1, 0.0)
                with graph.inserting_after(node):
                    negative = graph.call_function(torch.ops.aten.neg.default, (node,))
                negative.meta = node.meta.copy()
                node.replace_all_uses_with(negative)
                negative.update_arg(0, node)
            found.add(node)
        elif node.all_input_nodes and found.issuperset(node.all_input_nodes):
            if node.target in _elementwise():
                operator_node(node)
            else:  # a view
                found.add(node)
