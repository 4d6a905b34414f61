"""The product kernels that are proved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from samebits.backends.product import Product, ProductKernel

BACKENDS = ("cuda", "triton")


def kernels(device: int, backends: Sequence[str] = BACKENDS) -> list[ProductKernel[Any]]:
    """Those that run on CUDA device `device`; of every step the one that supports all products comes first.

    Of CUDA's, unless they are asked for, only these two, to which others are held.
    """
    from samebits.backends.cuda import devices
    from samebits.backends.cuda.matmul import PRODUCTS
    from samebits.backends.triton import runtime as triton

    hopper = devices.device_info(device).capability == (9, 0)
    of_cuda = [kernel for kernel in PRODUCTS if hopper or not kernel.name.endswith("_sm90")]
    found: list[ProductKernel[Any]] = [*(of_cuda if "cuda" in backends else of_cuda[:2])]
    if "triton" in backends and triton.status().available:
        from samebits.backends.triton.products import PRODUCTS as OF_TRITON

        found += OF_TRITON
    return found


def takes(kernel: ProductKernel[Any], p: Product, schedule: Any) -> bool:
    """Whether `kernel` runs `p` under `schedule`; None is the one that it chooses itself."""
    return kernel.supports(p) and (schedule is None or schedule in kernel.schedules(p))
