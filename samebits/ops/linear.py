"""``samebits.linear``: a linear layer's product, whose weight gradient is a chain over tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.backends import Key
from samebits.contract import Contract
from samebits.ops import _products
from samebits.ops._checks import check_operands, check_out_dtype, check_segments, shape
from samebits.ops._sequences import check_cu_seqlens_form
from samebits.ops.expand import expand


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    contract: Contract | None = None,
) -> Tensor:
    """``y = x @ weight.T + bias``, as :func:`torch.nn.functional.linear`.

    Every output element is one chain over ascending input features, or the tree of the contract's segments.
    Then the bias is added in float32 with one rounding, and the sum is rounded once to ``out_dtype``.

    Args:
        x: ``[..., in_features]``; bfloat16, float16 or float32, any strides.
        weight: ``[out_features, in_features]``; same dtype and device.
        bias: ``[out_features]``, or one number for all of them; same dtype and device.
        cu_seqlens: offsets of packed sequences, int32 or int64 ``[sequences + 1]`` on the same device. They
            start at 0, never decrease, and end at ``tokens``. ``x`` is then ``[tokens, in_features]`` or
            ``[1, tokens, in_features]``. The offsets decide where the weight gradient's chain starts new
            groups. They change no bit of the output.
        out_dtype: the dtype of ``x`` (default) or ``torch.float32``. A head whose logits are not to be
            rounded to 16 bits has float32.
        contract: as in :func:`samebits.matmul`.

    Gradients:
        * of ``x``: a chain over output features, for each token by itself.
        * of ``weight`` and ``bias``: one chain over all tokens, in order, with a float32 accumulator, rounded
          once at the end. Every sequence starts a new group of 16 tokens, and its tail is padded with zeros.
          A sequence is a row of a batch ``x[B, T, ...]``, or lies between two offsets of ``cu_seqlens``. A
          2-D ``x`` is one sequence. So these gradients have the same bits however a batch is packed, or
          padded at the end of its sequences (with zero output gradients there). This does not hold if a
          padded batch is flattened to 2-D first: then padding lies between the sequences' tokens and, in 16
          bits, moves them to other groups.
        * A float32 output gradient of 16-bit operands is first rounded to their dtype under ``TENSOR_CORE``.
          It is used as it is under ``FMA``.
        * of a ``bias`` of one number: the sum of the features' gradients, as :func:`torch.sum` of that row
          under :func:`samebits.batch_invariant`.

    Raises:
        TypeError: a tensor is not dense bfloat16, float16 or float32, dtypes differ, ``cu_seqlens`` is not
            int32 or int64, or ``out_dtype`` or the contract do not fit the dtype.
        ValueError: shapes or devices do not match, or ``cu_seqlens`` does not cut the tokens into sequences.
            On a GPU its values are checked on the GPU, without waiting. Bad ones end in a device-side assert,
            as a bad index does in PyTorch. They are checked once, and again after each change that PyTorch
            counts. Changes through ``.data`` or by a CUDA graph are not counted. Then gradients of bad
            offsets are meaningless, but nothing out of bounds is read.
    """
    x, weight, bias, key, bypass = checked(x, weight, bias, cu_seqlens, contract)
    run = _products.linear
    if out_dtype is not None and check_out_dtype("linear", out_dtype, x.dtype) != x.dtype:
        run = _products.wide_linear
    return run(x, weight, bias, cu_seqlens, key, bypass=bypass)  # type: ignore[no-any-return]


def checked(
    x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor | None, contract: Contract | None
) -> tuple[Tensor, Tensor, Tensor | None, Key, bool]:
    """The arguments of :func:`linear`, cast by autocast, its key, and whether the dispatcher has no part."""
    operands = {"x": x, "weight": weight} if bias is None else {"x": x, "weight": weight, "bias": bias}
    (x, weight, *biases), key, bypass = check_operands("linear", contract, operands)
    bias = biases[0] if biases else None
    if x.ndim == 0:
        raise ValueError("samebits.linear: x: expected at least 1-D, got a 0-D tensor")
    if weight.ndim != 2:
        raise ValueError(
            f"samebits.linear: weight: expected [out_features, in_features], got shape {shape(weight)}"
        )
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(
            "samebits.linear: x, weight: in_features must be equal, got"
            f" {x.shape[-1]} and {weight.shape[1]} of shapes {shape(x)} and {shape(weight)};"
            " weight is [out_features, in_features]"
        )
    sizes = ("x, weight: in_features", x.shape[-1]), ("weight: out_features", weight.shape[0])
    check_segments("linear", contract, sizes[0], x, sizes[1])
    if bias is not None and (bias.ndim != 1 or bias.shape[0] != weight.shape[0]):
        if bias.shape not in ((), (1,)):
            raise ValueError(
                f"samebits.linear: bias: expected shape {(weight.shape[0],)}, (1,) or () for weight"
                f" {shape(weight)}, got {shape(bias)}"
            )
        bias = expand(bias, weight.shape[:1])
    if cu_seqlens is not None:
        check_cu_seqlens_form("linear", "x", x, cu_seqlens)
    return x, weight, bias, key, bypass and cu_seqlens is None
