"""Fused layers beside the code that they replace, eager and compiled, and a copy of as many bytes.

python -m benchmarks fused [--quick] [--only LAYER] [--out FILE]

Forward, and forward with backward -> benchmarks/results/<gpu>/fused.json. Results and gradients are compared
with those of the code under the mode, bit for bit, before anything is timed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor

import samebits
from benchmarks.checked import l2_bytes, run
from benchmarks.record import arguments
from samebits.testing import assert_same_bits
from samebits.tools.bench.clock import Race

BF16, EPS, DEVICE = torch.bfloat16, 1e-6, "cuda"
TOKENS, HEAD = 4096, 128
Run = Callable[..., Any]


def norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * wide.to(x.dtype)


def add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = residual + x
    return norm(total, weight), total


def rotate_half(x: Tensor) -> Tensor:
    a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-b, a), -1)


def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos[..., None, :], sin[..., None, :]
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def clamped(x: Tensor) -> Tensor:
    gate, up = x[..., ::2].clamp(max=7.0), x[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


@dataclass(frozen=True, slots=True)
class Layer:
    """A fused layer.

    Attributes:
        operands: what it is given for rows of `n` values.
        leaves: how many of them, the first ones, have gradients.
        ours, theirs: the layer, and the code that it replaces.
        forward, backward: how many matrices of `n` values a row each has to read and write.
    """

    operands: Callable[[int], list[Tensor]]
    leaves: int
    ours: Run
    theirs: Run
    forward: int
    backward: int


def _matrices(*widths: int) -> list[Tensor]:
    return [torch.randn(TOKENS, n, device=DEVICE, dtype=BF16) for n in widths]


def _heads(n: int) -> list[Tensor]:
    """Queries, keys, weights of their norms, cosines and sines: four heads of queries for each of keys."""
    keys = n // (5 * HEAD)
    q, k = (t.unflatten(-1, (-1, HEAD)) for t in _matrices(4 * keys * HEAD, keys * HEAD))
    return [q, k, *torch.randn(2, HEAD, device=DEVICE, dtype=BF16), *_matrices(HEAD, HEAD)]


def _gated_heads(n: int) -> list[Tensor]:
    """Heads' rows, their gates, and the weight of their norm."""
    return [
        *(t.unflatten(-1, (-1, HEAD)) for t in _matrices(n, n)),
        torch.randn(HEAD, device=DEVICE, dtype=BF16),
    ]


def _gated_norm(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    return samebits.gated(gate, samebits.add_rms_norm(x, None, weight, EPS), rounding="once")


def _apart(q: Tensor, k: Tensor, w: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return turned(norm(q, w), norm(k, v), cos, sin)


LAYERS = {
    "add_rms_norm": Layer(
        operands=lambda n: [*_matrices(n, n), torch.randn(n, device=DEVICE, dtype=BF16)],
        leaves=3,
        ours=lambda x, r, w: samebits.add_rms_norm(x, r, w, EPS),
        theirs=add_norm,
        forward=4,
        backward=4,
    ),
    "gated silu": Layer(
        operands=lambda n: _matrices(n, n),
        leaves=2,
        ours=samebits.gated,
        theirs=lambda gate, up: F.silu(gate) * up,
        forward=3,
        backward=5,
    ),
    "gated norm": Layer(  # of Qwen3-Next
        operands=_gated_heads,
        leaves=3,
        ours=_gated_norm,
        theirs=lambda x, gate, weight: (norm(x, weight) * F.silu(gate.to(torch.float32))).to(x.dtype),
        forward=5,
        backward=8,
    ),
    "gated gpt_oss": Layer(
        operands=lambda n: _matrices(2 * n),
        leaves=1,
        ours=lambda x: samebits.gated(x, activation="gpt_oss", limit=7.0, interleaved=True),
        theirs=clamped,
        forward=3,
        backward=5,
    ),
    "rotary": Layer(
        operands=lambda n: [t for i, t in enumerate(_heads(n)) if i not in (2, 3)],
        leaves=2,
        ours=samebits.rotary,
        theirs=turned,
        forward=2,
        backward=2,
    ),
    "norm_rotary": Layer(
        operands=_heads,
        leaves=4,
        ours=lambda q, k, w, v, cos, sin: samebits.norm_rotary(q, k, w, v, cos, sin, EPS),
        theirs=_apart,
        forward=2,
        backward=3,
    ),
}
WIDTHS = {"rotary": (3840, 5120, 7680), "norm_rotary": (3840, 5120, 7680)}
CASES = [(name, n) for name in LAYERS for n in WIDTHS.get(name, (2048, 4096, 8192))]


def both(run: Run, leaves: int) -> Run:
    """`run`, and gradients that are given as its results."""

    def step(*operands: Tensor) -> tuple[Tensor, ...]:
        own = [t.detach().requires_grad_() for t in operands[:leaves]]
        results = run(*own, *operands[leaves:])
        results = results if isinstance(results, tuple) else (results,)
        return *results, *torch.autograd.grad(results, own, [t.detach() for t in results])

    return step


def check(name: str, operands: Sequence[Tensor]) -> None:
    """Raise AssertionError unless results and gradients have the bits of the code under the mode."""
    layer = LAYERS[name]
    got = both(layer.ours, layer.leaves)(*operands)
    with samebits.batch_invariant("error"):
        want = both(layer.theirs, layer.leaves)(*operands)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_same_bits(a.detach().contiguous(), b.detach().contiguous(), f"{name}, result {i}")


def measure(case: tuple[str, int]) -> dict[str, Any]:
    """Times of a layer in microseconds, forward and forward with backward."""
    name, n = case
    layer, unit = LAYERS[name], TOKENS * n * BF16.itemsize
    compiled = torch.compile(layer.theirs)
    found: dict[str, Any] = {"layer": name, "rows": TOKENS, "n": n}
    for what, passes in (("forward", layer.forward), ("both", layer.forward + layer.backward)):
        moved = passes * unit
        count = max(1, min(8, math.ceil(3 * l2_bytes() / moved)))
        sets = [layer.operands(n) for _ in range(count)]
        if what == "forward":
            check(name, sets[0])
        race = Race(max(4, min(100, math.ceil(1e-3 / max(moved / 3.5e12, 4e-6)))))
        for who, form in (("samebits", layer.ours), ("torch", layer.theirs), ("compiled", compiled)):
            with torch.no_grad() if what == "forward" else torch.enable_grad():
                race.add(who, form if what == "forward" else both(form, layer.leaves), sets)
        halves = [(torch.empty(moved // 2, device=DEVICE, dtype=torch.uint8),) for _ in range(count)]
        race.add("copy", torch.clone, halves)
        found[what] = race.run(7)
    return found


def show(data: dict[str, Any]) -> Table:
    table = Table("layer", "n", "", "us", "eager, us", "compiled, us", "of a copy")
    for c in data["cases"]:
        for what in ("forward", "both"):
            us = c[what]
            times = (f"{us[who]:.1f}" for who in ("samebits", "torch", "compiled"))
            table.add_row(c["layer"], f"{c['n']:,}", what, *times, f"{us['copy'] / us['samebits']:.2f}")
    return table


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--quick", action="store_true", help="one width of each")
    parser.add_argument("--only", action="append", choices=LAYERS, help="this layer; may be given again")
    options = parser.parse_args()
    cases = [c for c in CASES[1::3] if options.quick] or CASES
    run("fused", options, [c for c in cases if not options.only or c[0] in options.only], measure, show)
