"""Products in FP8 and how their rows come: benchmarks/results/<gpu>/fp8_invariance.json.

python -m benchmarks fp8_invariance [--device cpu] [--commit COMMIT] [--out FILE]

Every row of one product is computed again: under every schedule, in batches of other sizes, in another order,
beside NaN, and at other addresses. Samples are compared with the CPU reference and with the second
implementation in ``tests/support/scaled.py``, which runs on the GPU: one product is compared with it as a
whole. Quantized operands and layers with their gradients are computed again, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

import samebits
from benchmarks.attention_invariance import Way, compare, run
from samebits.ops._scaled import blocks
from tests.support import scaled as second

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RECIPES = {128: ScalingType.BlockWise128x128, 1: ScalingType.BlockWise1x128}
TILE = 2048, 1024
"""Of results that the second implementation computes at a time."""


class Operands(NamedTuple):
    """``a[m, k]``, ``b[n, k]``, their scales and the bias."""

    a: Tensor
    b: Tensor
    scale_a: Tensor
    scale_b: Tensor
    bias: Tensor | None

    def rows(self, some: Tensor | slice) -> Operands:
        return self._replace(a=self.a[some], scale_a=self.scale_a[some])

    def columns(self, stop: int) -> Operands:
        """The first columns of the product; b has as many rows."""
        bias = None if self.bias is None else self.bias[:stop]
        scale_b = self.scale_b[: stop if len(self.scale_b) == len(self.b) else blocks(stop)]
        return self._replace(b=self.b[:stop], scale_b=scale_b, bias=bias)


@dataclass(frozen=True)
class Setup:
    """A product ``a[m, k] @ b[n, k].T``.

    Attributes:
        rows: rows of b that share a scale.
        whole: whether the second implementation computes all of the result, and not a part.
        layer: whether a layer of this size is computed again, too.
    """

    k: int
    n: int
    a: torch.dtype = E4M3
    b: torch.dtype = E4M3
    rows: int = 128
    out: torch.dtype = BF16
    bias: torch.dtype | None = None
    m: int = 8192
    whole: bool = False
    layer: bool = False

    def make(self, m: int, device: str) -> tuple[Operands, Tensor, Tensor]:
        """Quantized operands, and what they were quantized from."""

        def drawn(rows: int) -> Tensor:
            sizes = torch.exp2(torch.randint(-6, 7, (rows, self.k), device=device))
            return (torch.randn(rows, self.k, device=device) * sizes).to(BF16)

        x, w = drawn(m), drawn(self.n)
        of_w: int | tuple[int, int] = 128 if self.rows == 1 else (128, 128)
        a, scale_a = samebits.quantize(x, dtype=self.a)
        b, scale_b = samebits.quantize(w, block=of_w, dtype=self.b)
        bias = None if self.bias is None else torch.randn(self.n, device=device).to(self.bias)
        return Operands(a, b, scale_a, scale_b, bias), x, w

    def product(self, x: Operands) -> Tensor:
        of_b = x.scale_b.T if self.rows == 128 else x.scale_b
        scales = x.scale_a, ScalingType.BlockWise1x128, of_b, RECIPES[self.rows]
        return samebits.scaled_mm(x.a, x.b.T, *scales, bias=x.bias, output_dtype=self.out)

    def by_second(self, x: Operands) -> Tensor:
        """The product by the second implementation, in tiles."""
        of_rows = x.scale_b.repeat_interleave(self.rows, 0)[: len(x.b)]
        out = torch.empty(len(x.a), len(x.b), dtype=self.out, device=x.a.device)
        for top in range(0, out.shape[0], TILE[0]):
            for left in range(0, out.shape[1], TILE[1]):
                rows, columns = slice(top, top + TILE[0]), slice(left, left + TILE[1])
                bias = None if x.bias is None else x.bias[columns]
                part = x.a[rows], x.b[columns], x.scale_a[rows], of_rows[columns]
                out[rows, columns] = second.scaled(*part, bias).to(self.out)
        return out


@dataclass(frozen=True)
class Sizes:
    """How much is computed.

    Attributes:
        batches: rows of a batch.
        single: how many rows are computed alone.
        part: rows and columns that the second implementation computes, where it does not all.
        on_cpu: rows that the CPU reference computes.
        quantized: rows that it quantizes.
        sequences: tokens of the sequences that a layer sees.
    """

    batches: tuple[int, ...]
    single: int
    part: tuple[int, int]
    on_cpu: int
    quantized: int
    sequences: tuple[int, ...]


SETUPS = (
    Setup(7168, 4096, layer=True),
    Setup(7168, 2112, out=F32, bias=F32),
    Setup(2048, 7168, layer=True),
    Setup(16384, 7168, a=E5M2),
    Setup(4096, 28672),
    Setup(1000, 2056, b=E5M2, rows=1, bias=BF16),
    Setup(4096, 4096, rows=1, out=F16),
    Setup(272, 32768, m=32768, out=F32, whole=True),
)
SIZES = Sizes((7, 64, 129, 1000, 4096), 64, (1024, 512), 16, 2048, (700, 1, 3333, 129))

SMALL_SETUPS = (
    Setup(272, 200, m=40, bias=F32, layer=True, whole=True),
    Setup(136, 24, E5M2, rows=1, out=F32, m=40),
)
SMALL = Sizes((7, 16), 3, (9, 8), 5, 30, (9, 1, 20))


def by_schedules(s: Setup, x: Operands) -> Iterator[Callable[[], Tensor]]:
    """Calls of the kernel under each of its schedules that can compute the product."""
    from samebits.backends.cuda import scaled
    from samebits.backends.cuda.products.scaled_sm90 import SCALED_SM90, Scaled

    formats, scales = (s.a, s.b, s.k, s.k), (1, 1)
    p = Scaled(0, len(x.a), s.n, s.k, *formats, scales, scales, s.rows == 1, s.out, s.n)
    for schedule in SCALED_SM90.all(p):
        yield partial(scaled.scaled_mm, *x, s.out, schedule=schedule)


def products(s: Setup, x: Operands, want: Tensor, sizes: Sizes, device: str) -> Iterator[Way]:
    """Other ways to the product ``want[m, n]``."""
    m, k = x.a.shape
    if device != "cpu":
        for call in by_schedules(s, x):
            yield "under each schedule", [call()], [want]
    if s.whole:
        yield "second implementation, whole", [want], [s.by_second(x)]
    else:
        rows, columns = sizes.part
        part = x.rows(slice(m - rows, m)).columns(columns)
        yield "second implementation, a part", [want[-rows:, :columns]], [s.by_second(part)]
    some = torch.randperm(m, device=device)[: sizes.on_cpu]
    on_cpu = Operands(*(None if t is None else t.cpu() for t in x.rows(some)))  # type: ignore[arg-type]
    yield "CPU reference, rows", [want[some]], [s.product(on_cpu).to(device)]

    few = range(0, m, max(1, m // sizes.single))
    yield "rows alone", [torch.cat([s.product(x.rows(slice(i, i + 1))) for i in few])], [want[list(few)]]
    for size in sizes.batches:
        parts = [s.product(x.rows(slice(i, i + size))) for i in range(0, m, size)]
        yield f"batches of {size}", [torch.cat(parts)], [want]
    order = torch.randperm(m, device=device)
    yield "in another order", [s.product(x.rows(order))], [want[order]]
    a, scale_a = x.a.clone(), x.scale_a.clone()
    a[::3].view(torch.uint8).fill_(0x7F)  # NaN in both formats
    scale_a[1::3] = torch.inf
    beside = s.product(x._replace(a=a, scale_a=scale_a))
    yield "beside NaN and infinite scales", [beside[2::3]], [want[2::3]]
    for more in (16, 1):  # the copy engine reads one of them as it is
        wide = torch.full((m, k + more), 0x7F, dtype=torch.uint8, device=device).view(x.a.dtype)
        wide[:, more:] = x.a
        by_columns = x.scale_a.T.contiguous().T
        moved = s.product(x._replace(a=wide[:, more:], scale_a=by_columns))
        yield "at other addresses", [moved], [want]


def quantized(s: Setup, operands: Operands, x: Tensor, w: Tensor, sizes: Sizes, device: str) -> Iterator[Way]:
    """The operands once more."""
    want = [operands.a, operands.scale_a]
    some = x[: sizes.quantized]
    found = samebits.quantize(some.cpu(), dtype=s.a)
    yield "quantized on the CPU", [t.to(device) for t in found], [t[: len(some)] for t in want]
    rows = len(w) // 128 * 128 or len(w)
    some = w[: min(rows, sizes.quantized // 128 * 128 or rows)]
    block: int | tuple[int, int] = 128 if s.rows == 1 else (128, 128)
    found = samebits.quantize(some.cpu(), block=block, dtype=s.b)
    own = [operands.b[: len(some)], operands.scale_b[: len(found[1])]]
    yield "quantized on the CPU", [t.to(device) for t in found], own
    for size in sizes.batches:
        parts = [samebits.quantize(part, dtype=s.a) for part in x.split(size)]
        yield "quantized in batches", [torch.cat(t) for t in zip(*parts, strict=True)], want
    wide = F.pad(x, (1, 0), value=torch.nan)[:, 1:]
    yield "quantized at other addresses", [*samebits.quantize(wide, dtype=s.a)], want


def layers(s: Setup, w: Tensor, sizes: Sizes, device: str) -> Iterator[Way]:
    """A layer's output and gradients: sequences packed, padded, and each by itself."""
    layer = samebits.nn.Linear(s.k, s.n, dtype=BF16, device=device, fp8="block")
    with torch.no_grad():
        layer.weight.copy_(w)
    lengths = sizes.sequences
    x, grad = (torch.randn(sum(lengths), n, device=device).to(BF16) for n in (s.k, s.n))
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)

    def run(x: Tensor, grad: Tensor, cu_seqlens: Tensor | None = None) -> list[Tensor]:
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out = layer(x, cu_seqlens)
        return [out.detach(), *torch.autograd.grad(out, [x, layer.weight, layer.bias], grad)]

    out, grad_x, *of_parameters = run(x, grad, offsets)

    def padded(t: Tensor) -> Tensor:
        return torch.stack([F.pad(row, (0, 0, 0, max(lengths) + 9 - len(row))) for row in t.split(lengths)])

    here = [*run(padded(x), padded(grad))]
    for i in (0, 1):
        here[i] = torch.cat([row[:n] for row, n in zip(here[i], lengths, strict=True)])
    yield "layers, padded with gradients", here, [out, grad_x, *of_parameters]
    parts = [run(*part)[:2] for part in zip(x.split(lengths), grad.split(lengths), strict=True)]
    alone = [torch.cat(t) for t in zip(*parts, strict=True)]
    yield "layers, sequences by themselves", alone, [out, grad_x]


def compile_kernels(setups: tuple[Setup, ...], device: str) -> None:
    """Those of all schedules, in parallel."""
    from samebits.backends.cuda.precompile import compile_for

    compile_for([call for s in setups for call in by_schedules(s, s.make(128, device)[0])])


@torch.no_grad()
def invariance(setups: tuple[Setup, ...], sizes: Sizes, device: str) -> list[dict[str, Any]]:
    """All setups, and the ways of each."""
    if device != "cpu":
        compile_kernels(setups, device)
    found = []
    for s in setups:
        torch.manual_seed(0)
        x, rows, w = s.make(s.m, device)
        want = s.product(x)
        ways = compare(products(s, x, want, sizes, device)) + compare(quantized(s, x, rows, w, sizes, device))
        if s.layer:
            ways += compare(layers(s, w, sizes, device))
        said = {key: str(v).removeprefix("torch.") for key, v in asdict(s).items() if "torch" in str(v)}
        found.append(asdict(s) | said | {"ways": ways})
    return found


def main() -> None:
    def setups(small: bool, device: str) -> list[dict[str, Any]]:
        return invariance(SMALL_SETUPS if small else SETUPS, SMALL if small else SIZES, device)

    run("fp8_invariance", __doc__, setups)
