"""Adapters (LoRA) of tokens, added to a layer's output, on CPU tensors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor

from samebits.backends.reference.matmul import matmul, require_subnormals, rounded


def add_adapters(
    base: Tensor,
    inner: Tensor,
    b: Tensor,
    adapters: Tensor,
    scalings: Tensor,
    ends: Sequence[int],
    contract: str,
) -> Tensor:
    """See :func:`samebits.ops.adapters.add_adapters`."""
    require_subnormals()
    out, dtype, (slots, _, rank) = base.contiguous().clone(), base.dtype, b.shape
    each = inner.reshape(len(base), slots, len(ends), rank)
    for s in range(slots):
        (rows,) = (adapters == s).nonzero(as_tuple=True)
        for i, (begin, end) in enumerate(itertools.pairwise((0, *ends))):
            if len(rows) == 0 or scalings[s, i].isnan():
                continue
            x, w = each[rows, s, i], b[s, begin:end].mT
            outer = matmul(x, w, bias=None, out_dtype=dtype, contract=contract)
            added = rounded(outer.float() * scalings[s, i], dtype)
            out[rows, begin:end] = rounded(base[rows, begin:end].float() + added.float(), dtype)
    return out
