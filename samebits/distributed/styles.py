"""Styles for ``torch.distributed.tensor.parallel.parallelize_module`` with the bits of one rank.

Parameters become DTensors, as with PyTorch's styles. The forward is this package's, on the local tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor import parallel as pytorch
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

import samebits.nn
from samebits.backends.modes import CONTEXT, includes, with_context
from samebits.contract import Contract
from samebits.distributed._groups import agree, name_of, ranks
from samebits.distributed.exchange import check_divides, gather, split
from samebits.distributed.linear import column_parallel_linear, default_contract, row_parallel_linear
from samebits.distributed.vocabulary import vocab_parallel_embedding
from samebits.ops._checks import check_contract
from samebits.ops.embedding import embedding

__all__ = ["ColwiseParallel", "RowwiseParallel", "SequenceParallel", "tp_plan"]


class _Layouts:
    """What the forward of a split module needs, beside the module."""

    def __init__(
        self, mesh: DeviceMesh, given: Placement, wanted: Placement, local: bool, contract: Contract | None
    ) -> None:
        self.mesh, self.given, self.wanted, self.local, self.contract = mesh, given, wanted, local, contract
        self.group = name_of("parallelize_module", mesh)

    def taken(self, x: Tensor) -> tuple[Tensor, int | None]:
        """The local tensor of an input, and the dimension that is split over ranks."""
        layout = self.given
        if isinstance(x, DTensor):
            (layout,) = x.placements
            x = x.to_local()
        return x, layout.dim % x.ndim if isinstance(layout, Shard) else None

    def split_in(self, ndim: int) -> int | None:
        """The dimension of a result of `ndim` dimensions that is to be split over ranks."""
        return self.wanted.dim % ndim if isinstance(self.wanted, Shard) else None

    def handed_on(self, y: Tensor) -> Tensor:
        return y if self.local else DTensor.from_local(y, self.mesh, (self.wanted,), run_check=False)


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class _SplitLinear(nn.Linear):
    layouts: _Layouts


class _ColumnLinear(_SplitLinear):
    def forward(self, x: Tensor) -> Tensor:
        layouts = self.layouts
        x, dim = layouts.taken(x)
        if dim == x.ndim - 1:
            x, dim = gather(x, dim, layouts.group, False), None
        bias = None if self.bias is None else _local(self.bias)
        options: dict[str, Any] = {"sequence_dim": dim, "contract": layouts.contract}
        y = column_parallel_linear(x, _local(self.weight), bias, layouts.mesh, **options)
        if layouts.split_in(y.ndim) is None:
            y = gather(y, y.ndim - 1, layouts.group, False)
        return layouts.handed_on(y)


class _RowLinear(_SplitLinear):
    def forward(self, x: Tensor) -> Tensor:
        layouts = self.layouts
        x, dim = layouts.taken(x)
        if dim is None:
            x = split(x, x.ndim - 1, layouts.group)
        elif dim != x.ndim - 1:
            raise ValueError(
                "samebits.distributed.RowwiseParallel: input: expected it whole, or split in its last"
                f" dimension, got one split in dimension {dim} of {x.ndim}"
            )
        bias = None if self.bias is None else _local(self.bias)
        options: dict[str, Any] = {"sequence_dim": layouts.split_in(x.ndim), "contract": layouts.contract}
        return layouts.handed_on(row_parallel_linear(x, _local(self.weight), bias, layouts.mesh, **options))


class _SplitEmbedding(nn.Embedding):
    layouts: _Layouts

    def ids(self, ids: Tensor) -> Tensor:
        ids, dim = self.layouts.taken(ids)
        return ids if dim is None else gather(ids, dim, self.layouts.group, False)


class _ColumnEmbedding(_SplitEmbedding):
    def forward(self, ids: Tensor) -> Tensor:
        y = embedding(self.ids(ids), _local(self.weight), self.padding_idx)
        if self.layouts.split_in(y.ndim) is None:
            y = gather(y, y.ndim - 1, self.layouts.group, False)
        return self.layouts.handed_on(y)


class _RowEmbedding(_SplitEmbedding):
    def forward(self, ids: Tensor) -> Tensor:
        ids = self.ids(ids)
        options: dict[str, Any] = {"padding_idx": self.padding_idx}
        options["sequence_dim"] = self.layouts.split_in(ids.ndim + 1)
        return self.layouts.handed_on(
            vocab_parallel_embedding(ids, _local(self.weight), self.layouts.mesh, **options)
        )


def _split(
    style: Any,
    module: nn.Module,
    mesh: DeviceMesh,
    linear: type[nn.Module],
    table: type[nn.Module],
    dims: tuple[int, int],
) -> nn.Module:
    """Split a module's parameters as PyTorch's style does, and give it the forward of `linear` or `table`."""
    op = type(style).__name__
    kind = type(module)
    if kind not in (nn.Linear, samebits.nn.Linear, nn.Embedding) or "forward" in vars(module):
        raise NotImplementedError(
            f"samebits.distributed.{op}: expected a plain torch.nn.Linear, samebits.nn.Linear or"
            f" torch.nn.Embedding, got {kind.__name__}"
        )
    weight: Any = module.weight
    contract = style.contract
    if isinstance(module, nn.Embedding):
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            raise NotImplementedError(
                f"samebits.distributed.{op}: expected an embedding without max_norm, scale_grad_by_freq and"
                " sparse gradients"
            )
        partition, new, dim = style._partition_embedding_fn, table, dims[1]
    else:
        partition, new, dim = style._partition_linear_fn, linear, dims[0]
        contract = contract or getattr(module, "contract", None) or default_contract(weight.dtype)
    layouts = _Layouts(
        mesh, style.input_layouts[0], style.output_layouts[0], style.use_local_output, contract
    )
    size = ranks(layouts.group)[1]
    check_divides(op, f"weight: dimension {dim} of {tuple(weight.shape)}", weight.shape[dim], size)
    device = torch.empty(0, device=mesh.device_type).device
    facts = {"weight": weight.shape, "dtype": weight.dtype, "bias": getattr(module, "bias", None) is not None}
    agree(op, layouts.group, device, contract=contract and contract.key, **facts)
    distribute_module(module, mesh, partition)
    module.__class__ = new
    vars(module)["layouts"] = layouts
    return module


def _check_output_layouts(op: str, layout: Placement | None, most: str, allowed: bool) -> None:
    if layout is not None and not allowed:
        raise NotImplementedError(f"samebits.distributed.{op}: output_layouts: expected {most}, got {layout}")


class ColwiseParallel(pytorch.ColwiseParallel):
    """``torch.distributed.tensor.parallel.ColwiseParallel`` with the bits of one rank.

    For ``torch.nn.Linear`` and ``samebits.nn.Linear``, by
    :func:`samebits.distributed.column_parallel_linear`, and for ``torch.nn.Embedding``.

    Args:
        input_layouts: ``Replicate()`` (the default), ``Shard(-1)``, or ``Shard(d)`` of a dimension of tokens:
            sequence parallelism.
        output_layouts: ``Shard(-1)`` (the default) or ``Replicate()``.
        use_local_output: whether the module returns a plain tensor, the default, or a DTensor.
        contract: one with segments. By default that of a ``samebits.nn.Linear``, or
            ``samebits.TENSOR_CORE.segmented(8)``, or ``samebits.FMA.segmented(8)`` for float32.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        contract: Contract | None = None,
    ) -> None:
        check_contract("distributed.ColwiseParallel", contract)
        last = output_layouts in (Shard(-1), Replicate())
        _check_output_layouts("ColwiseParallel", output_layouts, "Shard(-1) or Replicate()", last)
        super().__init__(
            input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output
        )
        self.contract = contract

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _split(self, module, device_mesh, _ColumnLinear, _ColumnEmbedding, (0, 1))


class RowwiseParallel(pytorch.RowwiseParallel):
    """``torch.distributed.tensor.parallel.RowwiseParallel`` with the bits of one rank.

    For ``torch.nn.Linear`` and ``samebits.nn.Linear``, by :func:`samebits.distributed.row_parallel_linear`,
    and for ``torch.nn.Embedding``, by :func:`samebits.distributed.vocab_parallel_embedding`.

    Args:
        input_layouts: ``Shard(-1)`` (the default) or ``Replicate()``, which an embedding's ids mostly are.
        output_layouts: ``Replicate()`` (the default), or ``Shard(d)`` of a dimension of tokens: sequence
            parallelism.
        use_local_output, contract: as in :class:`samebits.distributed.ColwiseParallel`.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        contract: Contract | None = None,
    ) -> None:
        check_contract("distributed.RowwiseParallel", contract)
        tokens = output_layouts == Replicate() or (
            isinstance(output_layouts, Shard) and output_layouts.dim != -1
        )
        most = "Replicate() or Shard(d) of a dimension of tokens"
        _check_output_layouts("RowwiseParallel", output_layouts, most, tokens)
        super().__init__(
            input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output
        )
        self.contract = contract

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _split(self, module, device_mesh, _RowLinear, _RowEmbedding, (1, 0))


class SequenceParallel(pytorch.SequenceParallel):
    """``torch.distributed.tensor.parallel.SequenceParallel`` with the bits of one rank.

    For modules that compute each token (or head) by itself and have replicated parameters, as norms. The
    input is split over ranks in a dimension. Results and gradients of inputs are local. The gradients of
    parameters are sums over all tokens: the backward gathers inputs and gradients and runs the module's
    forward again on all of them. Run it under :func:`samebits.batch_invariant`, or with a module of your own
    that has such gradients: the module's own arithmetic is not replaced.

    Args:
        sequence_dim: the dimension that is split over ranks.
        use_local_output: whether the module returns a plain tensor, or a DTensor, the default.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        (layout,) = self.sequence_sharding
        layouts = _Layouts(device_mesh, layout, layout, self.use_local_output, None)
        forward = module.forward
        distribute_module(module, device_mesh, self._replicate_module_fn)

        def of_tokens(x: Tensor) -> Tensor:
            x, dim = layouts.taken(x)
            if dim is None:
                x, dim = split(x, layout.dim, layouts.group), layout.dim
            names = [name for name, p in module.named_parameters() if p.requires_grad]
            parameters = [_local(module.get_parameter(name)) for name in names]
            run = partial(_run_with, module, forward, names)
            y: Tensor = _OfTokens.apply(run, dim, layouts.group, x, *parameters)  # type: ignore[no-untyped-call]
            return layouts.handed_on(y)

        module.forward = of_tokens
        return module


def _run_with(
    module: nn.Module, forward: Callable[[Tensor], Tensor], names: list[str], x: Tensor, *parameters: Tensor
) -> Tensor:
    """``forward(x)`` with plain tensors in place of the module's parameters."""
    given = dict(zip(names, parameters, strict=True))
    places = [
        (part, name, f"{prefix}.{name}" if prefix else name)
        for prefix, part in module.named_modules()
        for name in part._parameters
    ]
    before = [part._parameters[name] for part, name, _ in places]
    try:
        for (part, name, path), p in zip(places, before, strict=True):
            part._parameters[name] = given.get(path, None if p is None else _local(p))
        y: Tensor = forward(x)
        return y
    finally:
        for (part, name, _), p in zip(places, before, strict=True):
            part._parameters[name] = p


class _OfTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, run: Callable[..., Tensor], dim: int, group: str, x: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.run, ctx.dim, ctx.group, ctx.x = run, dim, group, x.detach().requires_grad_(x.requires_grad)
        ctx.inside = includes(CONTEXT)
        ctx.save_for_backward(*parameters)
        with torch.enable_grad():
            ctx.y = run(ctx.x, *(p.detach() for p in parameters))
        y: Tensor = ctx.y.detach()
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x = torch.autograd.grad(ctx.y, ctx.x, grad)[0] if ctx.x.requires_grad else None
        leaves = [p.detach().requires_grad_() for p in ctx.saved_tensors]
        grads: tuple[Tensor, ...] = ()
        if leaves:
            x = gather(ctx.x.detach(), ctx.dim, ctx.group, True)
            grad = gather(grad, ctx.dim, ctx.group, True)
            with torch.enable_grad(), with_context(ctx.inside or includes(CONTEXT)):
                y = ctx.run(x, *leaves)
            grads = torch.autograd.grad(y, leaves, grad)
        return None, None, None, grad_x, *grads


_STYLES: dict[str, Callable[[Contract | None], ParallelStyle]] = {
    "colwise": lambda contract: ColwiseParallel(contract=contract),
    "colwise_gather_output": lambda contract: ColwiseParallel(output_layouts=Replicate(), contract=contract),
    "colwise_rep": lambda contract: ColwiseParallel(output_layouts=Replicate(), contract=contract),
    "rowwise": lambda contract: RowwiseParallel(contract=contract),
    "rowwise_split_input": lambda contract: RowwiseParallel(input_layouts=Replicate(), contract=contract),
    "rowwise_rep": lambda contract: RowwiseParallel(input_layouts=Replicate(), contract=contract),
    "embedding_rowwise": lambda contract: RowwiseParallel(input_layouts=Replicate()),
    "replicated_with_grad_allreduce": lambda contract: SequenceParallel(
        sequence_dim=2, use_local_output=True
    ),
}
"""What the names in a ``tp_plan`` of ``transformers`` mean. The last one is norms of queries and keys, whose
heads, dimension 2, are split over ranks."""


def tp_plan(model: nn.Module, *, contract: Contract | None = None) -> dict[str, ParallelStyle]:
    """The ``tp_plan`` of a ``transformers`` model as a plan of this package's styles.

    ::

        plan = samebits.distributed.tp_plan(model)
        torch.distributed.tensor.parallel.parallelize_module(model, mesh, plan)
        model.tie_weights()

    The last line ties what was tied before: the parameters are new ones. The number of ranks must divide the
    numbers of heads, also those of keys and values.

    Args:
        model: with an attribute ``tp_plan``, as dense models of ``transformers`` have one.
        contract: of all linear layers, as in :class:`samebits.distributed.ColwiseParallel`.

    Raises:
        ValueError: the model has no plan, or one with a style that has no counterpart here.
    """
    plan = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not plan:
        raise ValueError(
            f"samebits.distributed.tp_plan: model: expected one with a tp_plan, got {type(model).__name__}"
        )
    check_contract("distributed.tp_plan", contract)
    unknown = sorted({style for style in plan.values() if style not in _STYLES})
    if unknown:
        raise ValueError(
            f"samebits.distributed.tp_plan: model: expected styles among {', '.join(_STYLES)}, got"
            f" {', '.join(unknown)}; give those modules a style of their own"
        )
    return {name: _STYLES[style](contract) for name, style in plan.items()}
