"""The product kernels that are verified."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from samebits.backends.kernel import Kernel
from samebits.backends.product import Product

BACKENDS = ("cuda", "triton")


def kernels(device: int, backends: Sequence[str] = BACKENDS) -> list[Kernel[Product, Any]]:
    """The kernels that run on CUDA device `device`.

    The first kernel of every step is the universal one, which supports all products. Without ``"cuda"`` in
    `backends`, the CUDA kernels are only these two, because others are compared with them.
    """
    from samebits.backends.cuda import devices
    from samebits.backends.cuda.matmul import PRODUCTS
    from samebits.backends.triton import runtime as triton

    arch = devices.device_info(device).arch
    of_cuda = [kernel for kernel in PRODUCTS if arch.runs(kernel.name)]
    found: list[Kernel[Product, Any]] = [*(of_cuda if "cuda" in backends else of_cuda[:2])]
    if "triton" in backends and triton.status().available:
        from samebits.backends.triton.products import PRODUCTS as OF_TRITON

        found += OF_TRITON
    return found


def takes(kernel: Kernel[Product, Any], p: Product, schedule: Any) -> bool:
    """Whether `kernel` runs `p` under `schedule`. None is the kernel's own choice."""
    return kernel.supports(p) and (schedule is None or schedule in kernel.all(p))
