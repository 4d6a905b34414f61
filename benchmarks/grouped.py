"""Grouped products of experts beside torch._grouped_mm: benchmarks/results/<gpu>/grouped.json.

python -m benchmarks grouped [--quick] [--commit COMMIT] [--out FILE]

Every result is compared with the CPU reference, in some rows and columns, before it is timed.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

import samebits
from benchmarks.checked import l2_bytes, run
from benchmarks.record import arguments
from samebits.backends.reference import grouped as reference
from samebits.contract import resolve
from samebits.testing import assert_same_bits
from samebits.tools.bench.clock import Race

BF16 = torch.bfloat16
DEVICE = "cuda"
BYTES_A_SECOND, OPERATIONS_A_SECOND = 4.2e12, 700e12
"""What an H200 sustains, of which every case's limit follows."""
SEQUENCE = 2048
"""Tokens of a sequence, where gradients of weights restart."""


@dataclass(frozen=True, slots=True)
class GroupedCase:
    """A product of a layer of experts.

    Attributes:
        model: whose layer it is.
        kind: ``forward``, ``dX`` or ``dW``.
        experts: on this GPU.
        chosen: experts of a token.
        k, n: sizes of an expert's matrix in the forward.
        tokens: in all. Each has `chosen` rows.
        skewed: whether expert i is chosen in proportion to 1 / (i + 1); else all alike.
    """

    model: str
    kind: str
    experts: int
    chosen: int
    k: int
    n: int
    tokens: int
    skewed: bool

    @property
    def rows(self) -> int:
        return self.tokens * self.chosen

    def __str__(self) -> str:
        shares = "skewed" if self.skewed else "balanced"
        return f"{self.model} {self.k} to {self.n}, {self.kind}, {self.tokens} tokens, {shares}"


MODELS = (
    ("Qwen3-30B-A3B", 128, 8, ((2048, 1536), (768, 2048))),
    ("Mixtral-8x7B", 8, 2, ((4096, 28672), (14336, 4096))),
    ("DeepSeek-V3, 1 of 8 ranks", 32, 1, ((7168, 4096), (2048, 7168))),
)
TOKENS = (16, 64, 128, 1024, 4096, 16384)
CASES = tuple(
    GroupedCase(model, kind, experts, chosen, k, n, tokens, skewed)
    for model, experts, chosen, sizes in MODELS
    for k, n in sizes
    for kind in ("forward", "dX", "dW")
    for tokens in TOKENS
    for skewed in (False, True)
    if kind != "dW" or tokens >= 1024
)


def quick() -> tuple[GroupedCase, ...]:
    first = {model: sizes[0] for model, _, _, sizes in MODELS}
    return tuple(c for c in CASES if (c.k, c.n) == first[c.model] and c.tokens in (64, 4096) and not c.skewed)


@dataclass(frozen=True, slots=True)
class Routed:
    """The operands of a case with one choice of experts."""

    a: Tensor
    b: Tensor
    offs: Tensor
    sequences: Tensor
    touched: int


def routed(case: GroupedCase, weight: Tensor, seed: int) -> Routed:
    """Tokens with random experts, sorted by expert. A token's experts differ."""
    generator = torch.Generator().manual_seed(seed)
    shares = 1 / torch.arange(1, case.experts + 1, dtype=torch.float64) ** (1.0 if case.skewed else 0.0)
    chosen = torch.multinomial(shares.expand(case.tokens, -1), case.chosen, generator=generator)
    order = torch.sort(chosen.flatten(), stable=True).indices
    counts = torch.bincount(chosen.flatten(), minlength=case.experts)
    sequences = (order // case.chosen // SEQUENCE).int().to(DEVICE)
    offs = counts.cumsum(0).int().to(DEVICE)
    x, dy = (torch.randn((case.rows, size), device=DEVICE, dtype=BF16) for size in (case.k, case.n))
    a, b = {"forward": (x, weight.mT), "dX": (dy, weight), "dW": (dy.mT, x)}[case.kind]
    return Routed(a, b, offs, sequences, int((counts > 0).sum()))


def ours(a: Tensor, b: Tensor, offs: Tensor, sequences: Tensor) -> Tensor:
    return samebits.grouped_mm(a, b, offs, sequences=sequences if b.ndim == 2 else None)


def theirs(a: Tensor, b: Tensor, offs: Tensor, sequences: Tensor) -> Tensor:
    return torch._grouped_mm(a, b, offs)


def work(case: GroupedCase, touched: int) -> tuple[int, int]:
    """Bytes that have to be read and written, and multiplications and additions."""
    matrices = case.experts if case.kind == "dW" else touched
    moved = 2 * (matrices * case.k * case.n + case.rows * (case.k + case.n))
    return moved, 2 * case.rows * case.k * case.n


def check(x: Routed) -> None:
    """Raise AssertionError for wrong bits, in some rows and columns of some groups."""
    got = ours(x.a, x.b, x.offs, x.sequences)
    key = resolve(None, BF16, "cpu")
    columns = torch.arange(got.shape[-1] - 1, -1, -(got.shape[-1] // 16 | 1), device=DEVICE)
    if x.b.ndim == 2:
        few = torch.arange(0, x.a.shape[0], x.a.shape[0] // 8 | 1, device=DEVICE)
        operands = (t.cpu() for t in (x.a[few], x.b[:, columns], x.offs, x.sequences))
        want = reference.grouped_terms(*operands, out_dtype=BF16, contract=key)
        return assert_same_bits(got[:, few][..., columns].cpu(), want, "against the CPU reference")
    some = torch.arange(len(x.a) - 1, -1, -(len(x.a) // 16 | 1), device=DEVICE).flip(0)
    ends = torch.searchsorted(some, x.offs, right=False).int()
    operands = (t.cpu() for t in (x.a[some], x.b[..., columns], ends))
    want = reference.grouped_rows(*operands, bias=None, out_dtype=BF16, contract=key)
    assert_same_bits(got[some][:, columns].cpu(), want, "against the CPU reference")


@functools.lru_cache(maxsize=1)
def weights(experts: int, n: int, k: int) -> Tensor:
    return torch.randn((experts, n, k), device=DEVICE, dtype=BF16)


def measure(case: GroupedCase) -> dict[str, Any]:
    """Times of a case in microseconds."""
    weight = weights(case.experts, case.n, case.k)
    moved, operations = work(case, min(case.experts, case.rows))
    limit = max(moved / BYTES_A_SECOND, operations / OPERATIONS_A_SECOND)
    count = max(1, min(8, math.ceil(3 * l2_bytes() / moved)))
    choices = [routed(case, weight, seed) for seed in range(count)]
    check(choices[0])
    sets = [(x.a, x.b, x.offs, x.sequences) for x in choices]
    race = Race(max(count, min(200, math.ceil(2e-3 / max(limit, 4e-6)))))
    race.add("samebits", ours, sets)
    race.add("torch", theirs, sets)
    touched = statistics.mean(x.touched for x in choices)
    moved, _ = work(case, round(touched))
    limit = max(moved / BYTES_A_SECOND, operations / OPERATIONS_A_SECOND)
    return asdict(case) | {"touched": touched, "limit": round(limit * 1e6, 2), "us": race.run(7)}


def means(data: dict[str, Any]) -> Iterator[tuple[str, float, float, float]]:
    """Of each kind, of few tokens (one to 64) and of all: speed beside torch, mean and least, and the share
    of the limit."""
    few = [c for c in data["cases"] if c["tokens"] <= 64 and c["kind"] != "dW"]
    kinds = {"decode, at most 64 tokens": few}
    kinds |= {kind: [c for c in data["cases"] if c["kind"] == kind] for kind in ("forward", "dX", "dW")}
    for kind, cases in kinds.items():
        if cases:
            beside = [c["us"]["torch"] / c["us"]["samebits"] for c in cases]
            share = statistics.geometric_mean(c["limit"] / c["us"]["samebits"] for c in cases)
            yield kind, statistics.geometric_mean(beside), min(beside), share


def show(data: dict[str, Any]) -> Table:
    table = Table("model", "kind", "k", "n", "tokens", "shares", "us", "torch, us", "x torch", "of the limit")
    for c in data["cases"]:
        us, shares = c["us"], "skewed" if c["skewed"] else "balanced"
        ratios = f"{us['torch'] / us['samebits']:.2f}", f"{c['limit'] / us['samebits']:.2f}"
        sizes = f"{c['k']:,}", f"{c['n']:,}", f"{c['tokens']:,}"
        table.add_row(
            c["model"], c["kind"], *sizes, shares, f"{us['samebits']:.1f}", f"{us['torch']:.1f}", *ratios
        )
    for kind, beside, worst, share in means(data):
        table.add_row("mean (least)", kind, *[""] * 6, f"{beside:.2f} ({worst:.2f})", f"{share:.2f}")
    return table


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--quick", action="store_true", help="a few cases")
    options = parser.parse_args()
    run("grouped", options, quick() if options.quick else CASES, measure, show, width=140)
