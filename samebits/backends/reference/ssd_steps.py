"""Steps of Mamba 2 on CPU tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.backends.reference.fused import activated
from samebits.backends.reference.matmul import require_subnormals, rounded


def ssd_steps(
    dt: Tensor,
    bias: Tensor | None,
    a: Tensor,
    d: Tensor | None,
    size: int,
    softplus: bool,
    lowest: float,
    highest: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Steps and decays ``[tokens, heads]``, and `d` for each column ``[heads, size]``, in float32."""
    require_subnormals()
    steps = dt.detach().to(torch.float32)
    if bias is not None:
        steps = steps + bias.detach().to(torch.float32)
    steps = (activated(steps, "softplus") if softplus else steps).clamp(lowest, highest)
    skip = steps.new_empty(0)
    if d is not None:
        columns = d.detach().to(torch.float32)
        skip = (
            (columns[:, None] if d.ndim == 1 else columns)
            .expand(-1, size)
            .clone(memory_format=torch.contiguous_format)
        )
    steps, decays = (rounded(t.contiguous(), torch.float32) for t in (steps, steps * a.detach()))
    return steps, decays, skip
