"""Every schedule and layout of the CUDA kernels on small shapes, to be run under compute-sanitizer:

python tests/sanitize.py --compile  # first, by a process for each CPU
compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 1 python tests/sanitize.py
compute-sanitizer --tool racecheck --error-exitcode 1 python tests/sanitize.py --every 8

The bindings probe the driver for functions it may lack, which memcheck would report as API errors. Caching
allocations would hide accesses next to a tensor, so PYTORCH_NO_CUDA_MEMORY_CACHING=1 is set here.
"""

import argparse
import itertools
import os
from functools import partial

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch

from samebits.backends.cuda import ahead
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


def products(every: int):
    """Kernel, schedule, operands and output of each; with `every`, only each such schedule of the many."""
    m, n, k = 67, 43, 85
    spans = torch.tensor([0, 3, 3, 40, k], device="cuda")
    bias = torch.ones(n, device="cuda")
    for kernel in kernels(torch.cuda.current_device()):
        for schedule in kernel.schedules[:: every if len(kernel.schedules) > 20 else 1]:
            for layout_a, layout_b in itertools.product(LAYOUTS, LAYOUTS):
                a, b = operands(m, k, layout_a), operands(n, k, layout_b).mT
                acc = torch.ones(m, n, device="cuda")
                for x, out in (
                    (Operands(a, b, acc=acc, cu_seqlens=spans), acc),
                    (Operands(a, b, acc=acc), torch.ones_like(acc)),
                    (Operands(a, b, bias=bias), torch.empty(m, n, dtype=DTYPE, device="cuda")),
                ):
                    if kernel.takes(x, out, schedule):
                        yield kernel, schedule, x, out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compile", action="store_true", help="only fill the cache of kernels")
    parser.add_argument("--every", type=int, default=1, help="of a kernel with many schedules, each such one")
    options = parser.parse_args()
    found = products(options.every)
    if options.compile:
        print(ahead.compile_for(partial(k.run, x, out, s) for k, s, x, out in found), "kernels")
        return
    count = 0
    for kernel, schedule, x, out in found:
        kernel.run(x, out, schedule)
        assert (out == x.a.shape[1] + 1).all(), (kernel.name, schedule, x.a.stride(), x.b.stride())
        count += 1
    torch.cuda.synchronize()
    print(f"{count} products")


if __name__ == "__main__":
    main()
