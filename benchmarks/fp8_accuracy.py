"""Errors of products in FP8 beside PyTorch's: benchmarks/results/<gpu>/fp8_accuracy.json.

python -m benchmarks fp8_accuracy [--commit COMMIT] [--out FILE]

Both multiply the same quantized operands. An error is the root mean square of the difference from their
product in float64, relative to that of the product. Beside it stands the error that quantization makes.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType

import samebits
from benchmarks.record import arguments, environment, results, write
from benchmarks.scaled import SIZES, for_pytorch

M = 512
KINDS = ("normal", "wide", "positive")
"""Values: normal; with magnitudes over 2^12; of one sign, so that sums grow."""
OUTPUTS = (torch.float32, torch.bfloat16)
RECIPES = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128


def drawn(kind: str, rows: int, k: int, device: str) -> Tensor:
    x = torch.randn(rows, k, device=device)
    if kind == "wide":
        x *= torch.exp2(torch.randint(-6, 7, (rows, k), device=device))
    return (x.abs() if kind == "positive" else x).to(torch.bfloat16)


def dequantized(values: Tensor, scale: Tensor) -> Tensor:
    rows = -(-values.shape[0] // scale.shape[0])
    wide = scale.double().repeat_interleave(rows, 0).repeat_interleave(128, 1)
    return values.double() * wide[: values.shape[0], : values.shape[1]]


def error(found: Tensor, exact: Tensor) -> float:
    rms = ((found.double() - exact).square().mean() / exact.square().mean()).sqrt()
    return float(f"{rms.item():.4g}")


def measure(kind: str, k: int, n: int, device: str = "cuda") -> list[dict[str, Any]]:
    """The errors of one product, for each dtype of the output."""
    x, w = drawn(kind, M, k, device), drawn(kind, n, k, device)
    a, scale_a = samebits.quantize(x)
    b, scale_b = samebits.quantize(w, block=(128, 128))
    exact = dequantized(a, scale_a) @ dequantized(b, scale_b).T
    rounded = error(exact, x.double() @ w.double().T)
    found = []
    for dtype in OUTPUTS:
        recipes = scale_a, RECIPES[0], scale_b.T, RECIPES[1]
        errors = {"samebits": error(samebits.scaled_mm(a, b.T, *recipes, output_dtype=dtype), exact)}
        case = {"kind": kind, "m": M, "k": k, "n": n, "out": str(dtype).removeprefix("torch.")}
        try:
            theirs, other, *scales = for_pytorch(a, b, scale_a, scale_b)
            recipes = scales[0], RECIPES[0], scales[1], RECIPES[1]
            out = torch.nn.functional.scaled_mm(theirs, other.T, *recipes, output_dtype=dtype)
            errors["torch"] = error(out, exact)
        except (RuntimeError, ValueError, NotImplementedError) as refusal:
            case["without_torch"] = str(refusal).splitlines()[0]
        found.append(case | {"error": errors, "of_quantization": rounded})
    return found


def main() -> None:
    parser = arguments(__doc__)
    options = parser.parse_args()
    out = results(options.out, "fp8_accuracy.json")
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    cases = [case for kind, (k, n) in itertools.product(KINDS, SIZES) for case in measure(kind, k, n)]
    for case in cases:
        print(case)
    write(out, {"environment": environment(options.commit), "cases": cases})
