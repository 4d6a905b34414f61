"""Elementwise functions in whole SIMD vectors on a CPU, also in graphs whose sizes are symbols."""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node

from samebits.backends.modes import with_context
from samebits.mode.arguments import records, tensors_of
from samebits.ops._autograd import plainly
from samebits.ops._operator import as_no_view, library, refuse_second_derivatives
from samebits.ops.expand import expand
from samebits.ops.norm_of_shards import is_sharded

__all__ = ["as_operator", "glu_of_halves", "in_whole_vectors", "operator_node"]

_SHARE = 1 << 14  # so few elements PyTorch's CPU loops do not divide among threads


def in_whole_vectors(
    func: Callable[..., Any], out_of_place: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """The elementwise `func`, in lengths for which PyTorch's CPU loops compute all elements alike.

    PyTorch's loops run over whole SIMD vectors. They compute the remainder of each thread's share with other
    functions, which may give other bits. If `func` writes into its first argument, `out_of_place` is the
    function that computes. In a graph whose sizes are symbols this is one operator, which computes so when it
    runs: how many shares there are is not known before.
    """
    called = _known(out_of_place or func)
    parameters = func.__code__.co_varnames if isinstance(func, FunctionType) else ()
    flag = parameters.index("inplace") if "inplace" in parameters else None

    def pointwise(*args: Any, **kwargs: Any) -> Any:
        tensors = list(tensors_of((*args, *kwargs.values())))
        if not tensors or not all(
            t.is_cpu and t.layout == torch.strided and not t.is_nested for t in tensors
        ):
            return func(*args, **kwargs)
        if kwargs.get("out") is not None:
            return NotImplemented
        compute, in_place, operands = out_of_place or func, out_of_place is not None, args
        options = dict(kwargs)
        if flag is not None:
            in_place = options.pop("inplace", False) or any(args[flag:])
            operands = args[:flag]
        if not torch.compiler.is_compiling() and _are_shards(tensors):
            mine = [_of_rank(x) for x in operands]
            out = in_whole_vectors(compute)(*mine, **{key: _of_rank(x) for key, x in options.items()})
            out = _as_shard(out, next(filter(is_sharded, tensors)))
            return operands[0].copy_(out) if in_place else out
        shape = torch.broadcast_shapes(*(t.shape for t in tensors))
        count = math.prod(shape)
        call = None if _is_static(count) else _described(operands, options)
        if call is not None:
            if in_place:  # the operator keeps its operands for the gradient
                call = call[0], [call[1][0].clone(), *call[1][1:]]
            out = torch.ops.samebits.elementwise(called, *call)
        else:
            out = _computed(compute, operands, options, tensors, shape, count)
        if not in_place:
            return out
        into = tensors[0]
        kinds = [(t.is_floating_point(), t.is_complex(), t.dtype == torch.bool) for t in (into, out)]
        if shape != into.shape or kinds[0] != kinds[1]:
            return func(*args, **kwargs)  # PyTorch raises an error in most of these cases
        return into.copy_(out)

    return pointwise


def _are_shards(tensors: Sequence[Any]) -> bool:
    """Whether these are DTensors of one shape, and split alike. So a rank's parts belong together.

    Tensors of no dimensions may be among them. Others, PyTorch's operators gather where they have to.
    """
    found = [t for t in tensors if is_sharded(t)]
    kinds = {(t.shape, t.device_mesh, t.placements) for t in found}
    return len(kinds) == 1 and all(is_sharded(t) or t.ndim == 0 for t in tensors)


def _of_rank(x: Any) -> Any:
    return x.to_local() if is_sharded(x) else x


def _as_shard(part: Tensor, like: Any) -> Any:
    """This rank's part of a DTensor that is split as another."""
    made = {"shape": like.shape, "stride": like.stride(), "run_check": False}
    return type(like).from_local(part, like.device_mesh, like.placements, **made)


def _computed(
    compute: Callable[..., Any],
    operands: Sequence[Any],
    options: dict[str, Any],
    tensors: list[Tensor],
    shape: torch.Size,
    count: int,
) -> Tensor:
    wide = {t.dtype for t in tensors if t.ndim > 0}

    def parts(x: Any) -> Any:
        if not isinstance(x, Tensor) or (x.ndim == 0 and shape and not (records(x) and x.dtype in wide)):
            return None  # PyTorch does not promote types for 0-D
        whole = x if x.shape == shape else expand(x, shape) if records(x) else x.expand(shape)
        padding = 0.5 if x.is_floating_point() else 1
        return F.pad(whole.reshape(-1), (0, -count % 64), value=padding).split(_SHARE)

    positional = [(x, parts(x)) for x in operands]
    named = {key: (x, parts(x)) for key, x in options.items()}
    out = torch.cat(
        [
            compute(
                *(x if p is None else p[i] for x, p in positional),
                **{key: x if p is None else p[i] for key, (x, p) in named.items()},
            )
            for i in range(max(1, -(-count // _SHARE)))
        ]
    )
    out = out[:count].view(shape)
    like = next((t for t in tensors if t.shape == shape), out)
    # The result has the strides of its operand, as PyTorch's has.
    return out if like.is_contiguous() else torch.empty_like(like, dtype=out.dtype).copy_(out)


_functions: dict[str, Callable[..., Any]] = {}


def _known(function: Callable[..., Any]) -> str:
    """A name by which graphs know `function`, in all processes."""
    name: str
    if isinstance(function, OpOverload):
        name = function.name()
    else:
        name = f"{getattr(function, '__module__', None) or 'torch'}.{function.__qualname__}"
    if _functions.setdefault(name, function) is not function:
        raise AssertionError(f"samebits: two elementwise functions are called {name}")
    return name


def _glu_of_halves(x: Tensor, gate: Tensor) -> Tensor:
    halves: Tensor = torch.ops.aten.glu.default(torch.stack([x, gate]), 0)
    out = halves[0]
    return out if x.is_contiguous() else torch.empty_like(x).copy_(out)  # a fake one has them, too


glu_of_halves = in_whole_vectors(_glu_of_halves)
"""``F.glu`` of the halves of its operand."""


def as_operator(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
    """A call of an elementwise operator as one that runs PyTorch's kernel. None: it cannot be one."""
    call = _described(args, kwargs)
    found: Tensor | None = None if call is None else torch.ops.samebits.elementwise(_known(op), *call)
    return found


def operator_node(node: Node) -> None:
    """Turn a node that calls an elementwise operator into one of :func:`as_operator`."""
    call = _described(node.args, node.kwargs)
    if call is not None:
        node.args, node.kwargs = (_known(node.target), *call), {}  # type: ignore[arg-type]
        node.target = torch.ops.samebits.elementwise.default


def _function(name: str) -> Callable[..., Any]:
    """The function that has this name. Graphs from a cache name operators that nobody asked for yet."""
    if name not in _functions:
        base, _, overload = name.removeprefix("aten::").partition(".")
        _known(getattr(getattr(torch.ops.aten, base), overload or "default"))
    return _functions[name]


@functools.cache
def _computing(name: str) -> Callable[..., Any]:
    """The function that has this name, as the mode computes it."""
    function = _function(name)
    if name == "aten::glu":
        return lambda x, dim=-1: glu_of_halves(*x.chunk(2, dim))
    if name == "aten::glu_backward":  # it has halves, too, and calls sigmoid
        return _within(function)
    return function if name.startswith("aten::glu_") else in_whole_vectors(function)


def _within(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose operators are called in the context."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with with_context(True):
            return function(*args, **kwargs)

    return call


def _is_static(count: float) -> bool:
    if torch.compiler.is_dynamo_compiling():
        from torch.fx.experimental.symbolic_shapes import has_static_value

        return has_static_value(count)
    return not isinstance(count, torch.SymInt)


def _described(operands: Sequence[Any], options: Mapping[str, Any]) -> tuple[str, list[Any]] | None:
    """Arguments as an operator takes them: words, and the tensors or nodes among them. None: it cannot."""
    words, tensors = [], []
    for name, x in (*(("", x) for x in operands), *options.items()):
        if isinstance(x, (Tensor, Node)):
            tensors.append(x)
        elif not (
            x is None
            or isinstance(x, (str, complex, torch.dtype))
            or (isinstance(x, (int, float)) and _is_static(x))
        ):
            return None
        words.append(f"{name}={_TENSOR if isinstance(x, (Tensor, Node)) else repr(x)}")
    return " ".join(words), tensors


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and _is_static(x)


_TENSOR = "tensor"
_NO_LITERALS: dict[str, Any] = {"inf": torch.inf, "-inf": -torch.inf, "nan": torch.nan}
_NO_LITERALS |= {repr(x): x for x in vars(torch).values() if isinstance(x, torch.dtype)}


def _called(function: Callable[..., Any], call: str, tensors: Sequence[Tensor]) -> Any:
    """Call `function` of the arguments that are :func:`_described`."""
    args: list[Any] = []
    named: dict[str, Any] = {}
    given = iter(tensors)
    for name, _, value in (word.partition("=") for word in call.split(" ")):
        x = next(given) if value == _TENSOR else _NO_LITERALS.get(value)
        x = ast.literal_eval(value) if x is None else x
        if name:
            named[name] = x
        else:
            args.append(x)
    return function(*args, **named)


def _forward(function: str, call: str, tensors: Sequence[Tensor]) -> Tensor:
    return as_no_view(plainly(_called)(_computing(function), call, tensors))  # type: ignore[no-any-return]


def _fake(function: str, call: str, tensors: Sequence[Tensor]) -> Tensor:
    with torch._C.DisableTorchFunction():
        return plainly(_called)(_function(function), call, tensors)  # type: ignore[no-any-return]


def _gradients(grad: Tensor, function: str, call: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of all tensors of floating-point numbers, as PyTorch computes them of whole vectors."""
    leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
    wanted = [t for t in leaves if t.requires_grad]
    with torch.enable_grad():
        out = plainly(_called)(_computing(function), call, leaves)
        found = torch.autograd.grad(out, wanted, grad, allow_unused=True, materialize_grads=True)
    return [as_no_view(_laid_out(g, t)) for g, t in zip(found, wanted, strict=True)]


def _laid_out(x: Tensor, like: Tensor) -> Tensor:
    """`x` with the strides that a graph was told."""
    room = torch.empty_like(like)
    return x if x.stride() == room.stride() else room.copy_(x)


def _fake_gradients(grad: Tensor, function: str, call: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(t) for t in tensors if t.is_floating_point()]


for _schema, _cpu, _meta in (
    ("elementwise(str function, str call, Tensor[] tensors) -> Tensor", _forward, _fake),
    (
        "elementwise_backward(Tensor grad, str function, str call, Tensor[] tensors) -> Tensor[]",
        _gradients,
        _fake_gradients,
    ),
):
    library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    _name = _schema.partition("(")[0]
    library.impl(_name, _cpu, "CPU")
    library.impl(_name, _cpu, "CUDA")
    torch.library.register_fake(f"samebits::{_name}", _meta, lib=library)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.function, ctx.call, tensors = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    refuse_second_derivatives("elementwise")
    tensors = ctx.saved_tensors
    found = iter(torch.ops.samebits.elementwise_backward(grad, ctx.function, ctx.call, tensors))
    return None, None, [next(found) if t.is_floating_point() else None for t in tensors]


torch.library.register_autograd("samebits::elementwise", _backward, setup_context=_keep, lib=library)
