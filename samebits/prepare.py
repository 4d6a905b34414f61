"""``samebits.prepare``: have kernels compiled and loaded before they are needed."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from samebits.contract import Contract
from samebits.ops.linear import linear


def prepare(
    weights: nn.Module | Tensor | Iterable[Tensor],
    rows: Iterable[int],
    *,
    backward: bool = False,
    contract: Contract | None = None,
) -> int:
    """Compile and load every kernel that :func:`samebits.linear` will use with these weights.

    The first product of a kind compiles its kernel, which takes seconds, and loads it, which is not allowed
    while a CUDA graph is captured. This runs one product of every kind ahead of time, on scratch data.

    Args:
        weights: a module (all its ``nn.Linear`` layers), or 2-D weights ``[out_features, in_features]``.
        rows: the numbers of rows (tokens) to come; a kernel may be chosen by it.
        backward: prepare the gradients too.
        contract: as in :func:`samebits.linear`.

    Returns:
        How many different products were prepared.
    """
    layers: list[tuple[Tensor, Tensor | None]]
    if isinstance(weights, nn.Module):
        layers = [(m.weight, m.bias) for m in weights.modules() if isinstance(m, nn.Linear)]
    else:
        layers = [(t, None) for t in ([weights] if isinstance(weights, Tensor) else weights)]
    kinds = {(w.shape, w.stride(), w.dtype, w.device, bias is None): (w, bias) for w, bias in layers}
    counts = sorted(set(rows))
    for weight, bias in kinds.values():
        parameters = [t.detach().requires_grad_(backward) for t in (weight, bias) if t is not None]
        for count in counts:
            x = weight.new_zeros(count, weight.shape[-1], requires_grad=backward)
            with torch.set_grad_enabled(backward):
                y = linear(x, *parameters, contract=contract)
            if backward:
                torch.autograd.grad(y, (x, *parameters), torch.zeros_like(y))
    return len(kinds) * len(counts)
