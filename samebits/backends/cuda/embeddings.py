"""Gradients of embeddings on CUDA tensors: ``kernels/embeddings.cu``."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.backends.cuda import compiler, runtime
from samebits.backends.cuda.operands import TYPES, address, with_rows

_THREADS = {"embedding_backward": 256, "embedding_many": 32, "embedding_few": 32}
_MOST_BESIDE = 65_535  # blocks in a grid's second dimension
_MANY = 16  # tokens with one id, beyond which warps share its row
_UNSORTED = 512  # tokens, each of which looks for its id among all


def kernel_spec(entry: str, grad: torch.dtype, out: torch.dtype, vector: int) -> compiler.KernelSpec:
    """A kernel of embeddings.cu."""
    types = ("GRAD", TYPES[grad]), ("OUT", TYPES[out])
    constants = *types, ("VECTOR", vector), ("MANY", _MANY)
    return compiler.KernelSpec("embeddings.cu", entry, "PPPPPqqqq", constants, block=_THREADS[entry])


_kernel = runtime.loader(kernel_spec)


def sums_by_id(grad: Tensor, ids: Tensor, out: Tensor, padding: int) -> None:
    """Sums into ``out[count, n]`` of the rows of ``grad[tokens, n]`` with each id; zeros for `padding`."""
    if out.numel() == 0:
        return
    grad, ids = with_rows(grad), ids.contiguous()
    (count, n), tokens = out.shape, len(ids)
    low = grad.data_ptr() | (grad.stride(0) | n) * grad.itemsize
    vector = 1 if low & 15 else 16 // grad.itemsize
    beside = min(-(-n // (32 * vector)), _MOST_BESIDE)
    given: tuple[Tensor | None, ...]
    if tokens <= _UNSORTED:
        runtime.zeroed(out)
        given, grids = (ids, None, None), {"embedding_few": (tokens, beside, 1)} if tokens else {}
    else:
        by_id, places = ids.sort(stable=True)
        given = by_id, places, torch.searchsorted(by_id, torch.arange(count + 1, device=ids.device))
        grids = {"embedding_backward": (count, 1, 1), "embedding_many": (-(-tokens // _MANY), beside, 1)}
    for entry, grid in grids.items():
        _kernel(grad.get_device(), entry, grad.dtype, out.dtype, vector).launch(
            grid,
            *(grad.data_ptr(), *map(address, given), out.data_ptr()),
            *(grad.stride(0), n, count, padding),
        )
