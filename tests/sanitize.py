"""Every schedule and layout of the CUDA kernels on small shapes, to be run under compute-sanitizer:

compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 1 python tests/sanitize.py
compute-sanitizer --tool racecheck --error-exitcode 1 python tests/sanitize.py

The bindings probe the driver for functions it may lack, which memcheck would report as API errors. Caching
allocations would hide accesses next to a tensor, so PYTORCH_NO_CUDA_MEMORY_CACHING=1 is set here.
"""

import os

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch

from samebits.verify import Operands, kernels

DTYPE = torch.bfloat16


def operands(rows: int, k: int, layout: str) -> torch.Tensor:
    if layout == "k":
        return torch.ones(rows, -(-k // 8) * 8, dtype=DTYPE, device="cuda")[:, :k]
    if layout == "rows":
        return torch.ones(k, -(-rows // 8) * 8, dtype=DTYPE, device="cuda")[:, :rows].mT
    if layout == "k, any alignment":
        return torch.ones(rows * k + 1, dtype=DTYPE, device="cuda")[1:].view(rows, k)
    return torch.ones(rows * k + 1, dtype=DTYPE, device="cuda")[1:].view(k, rows).mT


LAYOUTS = ("k", "rows", "k, any alignment", "rows, any alignment")


def main() -> None:
    m, n, k = 67, 43, 85
    spans = torch.tensor([0, 3, 3, 40, k], device="cuda")
    bias = torch.ones(n, device="cuda")
    products = 0
    for kernel in kernels(torch.cuda.current_device()):
        for schedule in kernel.schedules:
            for layout_a in LAYOUTS:
                for layout_b in LAYOUTS:
                    a, b = operands(m, k, layout_a), operands(n, k, layout_b).mT
                    acc = torch.ones(m, n, device="cuda")
                    for x, out in (
                        (Operands(a, b, acc=acc, cu_seqlens=spans), acc),
                        (Operands(a, b, acc=acc), torch.ones_like(acc)),
                        (Operands(a, b, bias=bias), torch.empty(m, n, dtype=DTYPE, device="cuda")),
                    ):
                        if kernel.takes(x, out, schedule):
                            kernel.run(x, out, schedule)
                            products += 1
                            assert (out == k + 1).all(), (kernel.name, schedule, layout_a, layout_b)
    torch.cuda.synchronize()
    print(f"{products} products")


if __name__ == "__main__":
    main()
