"""Row reductions on CUDA tensors: ``kernels/rows.cu``, and ``kernels/columns.cu`` for sums over tokens."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from samebits.backends.cuda import compiler, runtime

_THREADS = 256
_COLUMNS = 32

# The macros of convert.cuh.
_TYPES = {None: "NONE", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}

# The parameter structs of rows.cu and columns.cu.
_PARAMS = {
    "row_sum": "PPqqqi",
    "softmax": "PPqqq",
    "log_softmax": "PPqqq",
    "softmax_backward": "PPPqq",
    "log_softmax_backward": "PPPqq",
    "norm_forward": "PPPPPPqqqf",
    "norm_backward": "PPPPPPqqqq",
    "column_sums": "PPPPPPqqqq",
    "embedding_backward": "PPPPqqq",
}


def kernel_spec(
    entry: str, x: torch.dtype, out: torch.dtype, param: torch.dtype = torch.float32, *, warps: int = 1
) -> compiler.KernelSpec:
    """A kernel of rows.cu, in which `warps` warps share a row."""
    constants = ("IN", _TYPES[x]), ("OUT", _TYPES[out]), ("PARAM", _TYPES[param]), ("WARPS", warps)
    return compiler.KernelSpec("rows.cu", entry, _PARAMS[entry], constants, block=_THREADS)


def columns_spec(
    entry: str, grad: torch.dtype, out: torch.dtype, x: torch.dtype | None = None
) -> compiler.KernelSpec:
    """A kernel of columns.cu."""
    constants = ("GRAD", _TYPES[grad]), ("X", _TYPES[x]), ("OUT", _TYPES[out])
    return compiler.KernelSpec("columns.cu", entry, _PARAMS[entry], constants, block=_THREADS)


@functools.cache  # to make a KernelSpec, and its hash, takes longer than a launch
def _kernel(
    entry: str, device: int, x: torch.dtype, out: torch.dtype, param: torch.dtype, warps: int
) -> runtime.Kernel:
    return runtime.load(kernel_spec(entry, x, out, param, warps=warps), device)


@functools.cache
def _columns_kernel(
    entry: str, device: int, grad: torch.dtype, out: torch.dtype, x: torch.dtype | None
) -> runtime.Kernel:
    return runtime.load(columns_spec(entry, grad, out, x), device)


def _launch(
    entry: str, like: Tensor, out: torch.dtype, *values: Any, param: torch.dtype = torch.float32
) -> None:
    """Run a kernel of rows.cu on the rows of `like`."""
    rows, n = like.shape
    if rows == 0:
        return
    warps = 1 if n <= 1024 else 8
    kernel = _kernel(entry, like.get_device(), like.dtype, out, param, warps)
    kernel.launch((-(-rows * warps // (_THREADS // 32)), 1, 1), *values)


def row_sum(x: Tensor, mean: bool, dtype: torch.dtype) -> Tensor:
    """Sums or means in `dtype` of the rows of ``x[rows, n]``."""
    x = _with_rows(x)
    out = torch.empty(x.shape[0], dtype=dtype, device=x.device)
    _launch("row_sum", x, dtype, x.data_ptr(), out.data_ptr(), x.stride(0), *x.shape, mean)
    return out


def softmax(x: Tensor, logarithm: bool, dtype: torch.dtype) -> Tensor:
    """Softmax or its logarithm in `dtype` of the rows of ``x[rows, n]``."""
    x = _with_rows(x)
    out = runtime.empty_matrix(x.shape[0], x.shape[1], dtype, x.get_device())
    entry = "log_softmax" if logarithm else "softmax"
    _launch(entry, x, dtype, x.data_ptr(), out.data_ptr(), x.stride(0), *x.shape)
    return out


def softmax_backward(grad: Tensor, out: Tensor, logarithm: bool, dtype: torch.dtype) -> Tensor:
    """Gradients in `dtype` of the rows that gave `out`."""
    grad, y = grad.contiguous(), out.contiguous()
    dx = runtime.empty_matrix(grad.shape[0], grad.shape[1], dtype, grad.get_device())
    entry = "log_softmax_backward" if logarithm else "softmax_backward"
    _launch(entry, grad, dtype, *(t.data_ptr() for t in (grad, y, dx)), *grad.shape, param=y.dtype)
    return dx


def norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Layer norm of the rows of ``x[rows, n]`` (RMS norm without `centred`), means and 1 / deviations."""
    x = _with_rows(x)
    weight, bias = _vectors(weight, bias)
    out = runtime.empty_matrix(x.shape[0], x.shape[1], x.dtype, x.get_device())
    means, scales = (
        torch.empty(n, dtype=torch.float32, device=x.device)
        for n in (x.shape[0] if centred else 0, x.shape[0])
    )
    param = next((t.dtype for t in (weight, bias) if t is not None), torch.float32)
    _launch(
        *("norm_forward", x, x.dtype, x.data_ptr(), _address(weight), _address(bias), out.data_ptr()),
        *(means.data_ptr() if centred else 0, scales.data_ptr(), x.stride(0), *x.shape, eps),
        param=param,
    )
    return out, means, scales


def norm_backward(grad: Tensor, x: Tensor, weight: Tensor | None, means: Tensor, scales: Tensor) -> Tensor:
    """Gradients of the rows of `x`."""
    x, grad = _with_rows(x), _with_rows(grad)
    (weight,) = _vectors(weight)
    out = runtime.empty_matrix(x.shape[0], x.shape[1], x.dtype, x.get_device())
    _launch(
        *("norm_backward", x, x.dtype, grad.data_ptr(), x.data_ptr(), _address(weight)),
        *(means.data_ptr() if means.numel() else 0, scales.data_ptr(), out.data_ptr()),
        *(grad.stride(0), x.stride(0), *x.shape),
        param=torch.float32 if weight is None else weight.dtype,
    )
    return out


def norm_columns(
    grad: Tensor, x: Tensor, means: Tensor, scales: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Gradients in `dtype` of weight and bias."""
    x = _with_rows(x)
    weight_grad, bias_grad = (torch.empty(x.shape[1], dtype=dtype, device=x.device) for _ in range(2))
    _column_sums(grad, bias_grad, x, means, scales, weight_grad)
    return weight_grad, bias_grad


def column_sum(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums in `dtype` of the columns of ``x[tokens, n]``: chains over tokens."""
    out = torch.empty(x.shape[1], dtype=dtype, device=x.device)
    _column_sums(x, out)
    return out


def _column_sums(
    grad: Tensor,
    out: Tensor,
    x: Tensor | None = None,
    means: Tensor | None = None,
    scales: Tensor | None = None,
    product: Tensor | None = None,
) -> None:
    grad = _with_rows(grad)
    tokens, n = grad.shape
    if n == 0:
        return
    kernel = _columns_kernel(
        "column_sums", grad.get_device(), grad.dtype, out.dtype, None if x is None else x.dtype
    )
    kernel.launch(
        (-(-n // _COLUMNS), 1, 1),
        *(grad.data_ptr(), _address(x), _address(means), _address(scales), _address(product), out.data_ptr()),
        *(grad.stride(0), 0 if x is None else x.stride(0), tokens, n),
    )


def embedding_backward(grad: Tensor, ids: Tensor, count: int, padding: int) -> Tensor:
    """Gradients ``[count, n]`` of an embedding's rows from ``grad[tokens, n]`` and ``ids[tokens]``."""
    grad = _with_rows(grad)
    out = torch.empty(count, grad.shape[1], dtype=grad.dtype, device=grad.device)
    if out.numel() == 0:
        return out
    by_id, tokens = ids.sort(stable=True)
    starts = torch.searchsorted(by_id, torch.arange(count + 1, device=ids.device))
    kernel = _columns_kernel("embedding_backward", grad.get_device(), grad.dtype, out.dtype, None)
    kernel.launch(
        (count, 1, 1),
        *(t.data_ptr() for t in (grad, tokens, starts, out)),
        *(grad.stride(0), grad.shape[1], padding),
    )
    return out


def _with_rows(x: Tensor) -> Tensor:
    """The matrix, contiguous along rows."""
    return x if x.stride(1) == 1 or x.shape[1] <= 1 else x.contiguous()


def _vectors(*vectors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The vectors, contiguous and of one dtype."""
    dtypes = {t.dtype for t in vectors if t is not None}
    if len(dtypes) > 1:
        vectors = tuple(None if t is None else t.to(torch.float32) for t in vectors)
    return tuple(None if t is None or t.is_contiguous() else t.contiguous() for t in vectors)


def _address(t: Tensor | None) -> int:
    return 0 if t is None or t.numel() == 0 else t.data_ptr()
