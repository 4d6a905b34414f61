"""``samebits.prepare``: compile and load kernels before they are needed."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from samebits.backends.cuda import devices, tuned
from samebits.backends.cuda.shapes import Shape, record_shapes
from samebits.backends.cuda.tuned import Table
from samebits.contract import Contract
from samebits.ops._checks import SUPPORTED, check_contract
from samebits.ops.linear import linear


def prepare(
    weights: nn.Module | Tensor | Iterable[Tensor],
    rows: Iterable[int | Sequence[int]],
    *,
    backward: bool = False,
    cu_seqlens: torch.dtype | None = None,
    contract: Contract | None = None,
    tune: bool = False,
) -> int:
    """Compile and load the kernels that :func:`samebits.linear` will use with these weights.

    The first product of a kind compiles its kernel, which takes seconds. It also loads the kernel, which is
    not allowed while a CUDA graph is captured. This function runs one product of every kind, on contiguous
    scratch inputs of the weight's dtype. Inputs with other strides may need other kernels: run those once
    yourself.

    Other operations are not prepared, such as :func:`samebits.linear_logp` and the functions that
    :func:`samebits.batch_invariant` replaces. Before you capture a step with these, run it once, forward and
    backward, with inputs of the same dtypes, shapes and strides.

    Args:
        weights: a module (all its ``nn.Linear`` layers), or 2-D weights ``[out_features, in_features]``.
        rows: the future inputs: their numbers of rows (tokens), or shapes ``(B, T, ...)`` without features.
        backward: prepare the gradients, too.
        cu_seqlens: prepare packed sequences, with offsets of this dtype (``torch.int32`` or ``torch.int64``).
        contract: as in :func:`samebits.linear`. The default is each layer's contract.
        tune: on GPUs, first time the schedules of products that no table has, as ``samebits tune`` does.
            This process chooses by the result. It is kept beside the compiled kernels, too, so that the next
            process need not measure, unless ``SAMEBITS_TUNED`` or :func:`samebits.load_tuned` names a table.

    Returns:
        How many different products were prepared.

    Raises:
        TypeError: an argument is not of these kinds.
        ValueError: a size is negative, or there is nothing to prepare.
    """
    check_contract("prepare", contract)
    for name, flag in (("backward", backward), ("tune", tune)):
        if not isinstance(flag, bool):
            raise TypeError(f"samebits.prepare: {name}: expected a bool, got {type(flag).__name__}")
    if cu_seqlens not in (None, torch.int32, torch.int64):
        raise TypeError(
            "samebits.prepare: cu_seqlens: expected a dtype, torch.int32 or torch.int64, got"
            f" {cu_seqlens if isinstance(cu_seqlens, torch.dtype) else type(cu_seqlens).__name__}"
        )
    layers: list[tuple[Tensor, Tensor | None, Contract | None]]
    if isinstance(weights, nn.Module):
        linears = [m for m in weights.modules() if isinstance(m, nn.Linear) and _takes(m.weight)]
        layers = [(m.weight, m.bias, contract or getattr(m, "contract", None)) for m in linears]
    else:
        layers = [(t, None, contract) for t in _tensors(weights)]
    kinds = {(w.shape, w.stride(), w.dtype, w.device, b is None, c): (w, b, c) for w, b, c in layers}
    shapes = _shapes(rows)
    if not kinds or not shapes:
        raise ValueError(f"samebits.prepare: nothing to prepare: {len(layers)} linear layers, rows {shapes}")

    def run() -> None:
        with torch.inference_mode(False), torch.set_grad_enabled(backward):
            for weight, bias, its_contract in kinds.values():
                parameters = [t.detach().requires_grad_(backward) for t in (weight, bias) if t is not None]
                for shape in shapes:
                    x = weight.new_zeros(*shape, weight.shape[-1], requires_grad=backward)
                    ends = None
                    if cu_seqlens is not None:
                        ends = torch.tensor([0, math.prod(shape)], dtype=cu_seqlens, device=weight.device)
                    y = linear(x, *parameters, cu_seqlens=ends, contract=its_contract)
                    if backward:
                        torch.autograd.grad(y, (x, *parameters), torch.zeros_like(y))

    if tune:
        with record_shapes() as met:
            run()
        _tune(met, {w.get_device() for w, _, _ in kinds.values() if w.is_cuda})
    run()
    return len(kinds) * len(shapes)


def _tune(met: Iterable[Shape], gpus: Iterable[int]) -> None:
    """Time the shapes that no table has, on each GPU, choose by the winners, and keep them."""
    from samebits.tools.tune import tune

    for device in gpus:
        todo = [shape for shape in met if not tuned.known(shape, device)]
        found = tune(todo, device=device) if todo else None
        if found is None or not found.entries:
            continue
        table = Table(devices.device_info(device).name, found.entries)
        tuned.add(table, device)
        if tuned.in_use() is None and "SAMEBITS_TUNED" not in os.environ:
            with suppress(OSError):  # it holds for this process, at least
                tuned.keep(table)


def _takes(weight: Tensor) -> bool:
    """Whether :func:`samebits.linear` takes this weight. ``samebits.convert`` skips the same layers."""
    return not is_lazy(weight) and weight.dtype in SUPPORTED and weight.layout is torch.strided


def _tensors(weights: Tensor | Iterable[Tensor]) -> list[Tensor]:
    found = [weights] if isinstance(weights, Tensor) else weights
    if not isinstance(found, Iterable):
        raise TypeError(
            f"samebits.prepare: weights: expected a module or tensors, got {type(weights).__name__}"
        )
    tensors = list(found)
    for t in tensors:
        if not isinstance(t, Tensor):
            raise TypeError(f"samebits.prepare: weights: expected tensors, got {type(t).__name__}")
        if t.ndim != 2 or not _takes(t):
            raise TypeError(
                "samebits.prepare: weights: expected dense 2-D bfloat16, float16 or float32, got"
                f" {t.dtype} of shape {tuple(t.shape)}"
            )
    return tensors


def _shapes(rows: Iterable[int | Sequence[int]]) -> list[tuple[int, ...]]:
    if not isinstance(rows, Iterable):
        raise TypeError(f"samebits.prepare: rows: expected numbers or shapes, got {rows}: write [{rows}]")
    shapes: dict[tuple[int, ...], None] = {}
    for r in rows:
        sizes = r if isinstance(r, Sequence) else (r,)
        try:
            shape = tuple(operator.index(n) for n in sizes)
        except TypeError:
            shape = None
        if shape is None or any(isinstance(n, bool) for n in sizes):
            raise TypeError(f"samebits.prepare: rows: expected numbers or shapes, got {r!r}")
        if min(shape, default=0) < 0:
            raise ValueError(f"samebits.prepare: rows: expected sizes of 0 or more, got {shape}")
        shapes[shape] = None
    return list(shapes)
