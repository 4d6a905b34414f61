"""Every kernel that tuned tables can name, with its sources."""

from __future__ import annotations

from typing import Any

from samebits.backends.cuda.attention.catalogue import BACKWARD, FORWARD
from samebits.backends.cuda.grouped import GROUPED
from samebits.backends.cuda.matmul import PRODUCTS
from samebits.backends.cuda.products.scaled_grouped_sm90 import SCALED_GROUPED_SM90
from samebits.backends.cuda.products.scaled_sm90 import SCALED_SM90
from samebits.backends.kernel import Kernel

__all__ = ["KERNELS"]

_KERNELS: list[Kernel[Any, Any]] = [
    *PRODUCTS,
    *GROUPED,
    SCALED_SM90,
    SCALED_GROUPED_SM90,
    *FORWARD,
    *BACKWARD,
]

KERNELS = {kernel.name: tuple(kernel.sources) or (f"{kernel.name}.cu",) for kernel in _KERNELS}
"""File names in ``kernels/``, by the kernel's name."""
KERNELS |= {"statistics_sm90": ("statistics_sm90.cu",)}
