"""Verification of block-scaled products in FP8: every schedule, and the quantization of their operands."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from samebits.contract import FP8, SCALE_BLOCK
from samebits.ops.quantize import quantize
from samebits.ops.silu_mul_quantize import silu_mul_quantize
from samebits.testing import KINDS, values
from samebits.tools.verify.case import BF16, F16, F32
from samebits.tools.verify.failures import finish, running
from samebits.tools.verify.reference import REFERENCE
from samebits.tools.verify.report import Report

if TYPE_CHECKING:
    from samebits.backends.cuda.products.scaled_sm90 import Scaled

_SHAPES = (
    *((1, 8, 16), (3, 200, 128), (5, 328, 2900), (16, 72, 1168)),
    *((17, 264, 300), (129, 257, 656), (200, 392, 1040)),
)
_LARGER = ((65, 1032, 2064), (513, 520, 4104), (1030, 2056, 512), (8, 136, 10240))

SCALES = ((128, False), (1, False), (1, True))
EPILOGUES = ((BF16, None), (F32, F32), (F16, BF16), (BF16, F16), (F32, None))


class Operands(NamedTuple):
    """Both operands, their scales and the bias."""

    a: Tensor
    b: Tensor
    scale_a: Tensor
    scale_b: Tensor
    bias: Tensor | None

    def to(self, device: torch.device) -> Operands:
        bias = None if self.bias is None else self.bias.to(device)
        scales = self.scale_a.to(device), self.scale_b.to(device)
        return Operands(self.a.to(device), self.b.to(device), *scales, bias)


@dataclass(frozen=True, slots=True)
class ScaledCase:
    """The product ``a[m, k] @ b[n, k].T``.

    Attributes:
        rows: rows of b that share a scale: 1 or 128.
        whole: whether a row has one scale for all of k.
        special: whether some elements are NaN or infinite.
    """

    m: int
    n: int
    k: int
    a: torch.dtype
    b: torch.dtype
    rows: int
    whole: bool
    out: torch.dtype
    bias: torch.dtype | None
    special: bool

    def operands(self) -> Operands:
        """Finite bytes of every kind, and scales of unlike sizes."""
        blocks = 1 if self.whole else -(-self.k // SCALE_BLOCK)
        scales = [torch.exp2(4 * values("normal", (n, blocks), F32, seed)) for seed, n in self._scaled()]
        bias = None if self.bias is None else values("normal", (self.n,), self.bias, 5)
        a = finite_bytes((self.m, self.k), self.a, 1, special=self.special)
        b = finite_bytes((self.n, self.k), self.b, 2, special=self.special)
        return Operands(a, b, scales[0], scales[1], bias)

    def _scaled(self) -> tuple[tuple[int, int], ...]:
        return (3, self.m), (4, -(-self.n // self.rows))


def finite_bytes(shape: tuple[int, ...], dtype: torch.dtype, seed: int, *, special: bool = False) -> Tensor:
    """Finite values of every kind; with `special` a few that are NaN or infinite."""
    g = torch.Generator().manual_seed(seed)
    top = 0x7F if dtype == torch.float8_e4m3fn else 0x7C  # the first that is not finite
    codes = torch.randint(0, top, shape, generator=g)
    if special:
        codes = torch.where(torch.rand(shape, generator=g) < 0.003, top, codes)
    codes += 128 * (torch.rand(shape, generator=g) < 0.5)
    return codes.to(torch.uint8).view(dtype)


def scaled_cases(thorough: bool) -> list[ScaledCase]:
    """Every pair of formats, kind of scales, output and bias, in turn."""
    formats = itertools.cycle(itertools.product(FP8.input_dtypes, repeat=2))
    epilogues = itertools.cycle(EPILOGUES)
    shapes = _SHAPES + (_LARGER if thorough else ())
    found = []
    for (m, n, k), (rows, whole), special in itertools.product(shapes, SCALES, (False, True)):
        (a, b), (out, bias) = next(formats), next(epilogues)
        found.append(ScaledCase(m, n, k, a, b, rows, whole, out, bias, special))
    return found


def launches(case: ScaledCase, x: Operands, index: int) -> Iterator[tuple[object, Callable[[], Tensor]]]:
    """Every schedule that takes a case, and a call of the kernel."""
    from samebits.backends.cuda import scaled
    from samebits.backends.cuda.products.scaled_sm90 import SCALED_SM90

    for s in SCALED_SM90.all(_problem(case, index)):
        yield s, partial(scaled.scaled_mm, *x, case.out, schedule=s)


def loads(cases: Sequence[ScaledCase], device: torch.device) -> Iterator[Callable[[], object]]:
    """Calls that load every kernel."""
    from samebits.backends.cuda import runtime
    from samebits.backends.cuda.products.scaled_sm90 import SCALED_SM90, spec
    from samebits.backends.cuda.quantize import kernel_spec, silu_of

    specs = {spec(p, s) for p in (_problem(case, device.index) for case in cases) for s in SCALED_SM90.all(p)}
    for x, form in itertools.product((BF16, F16, F32), FP8.input_dtypes if cases else ()):
        for square, vector in itertools.product((False, True), repeat=2):
            specs.add(kernel_spec(x, form, square=square, vector=vector))
            specs.add(kernel_spec(x, form, square=False, vector=vector, silu=silu_of(x, device.index)))
    for kernel in specs:
        yield partial(runtime.load, kernel, device.index)


def _problem(case: ScaledCase, index: int) -> Scaled:
    from samebits.backends.cuda.products.scaled_sm90 import Scaled

    k = -(-case.k // 16) * 16
    of_scales = 1 if case.whole else -(-case.k // SCALE_BLOCK), 1
    b_rows = case.rows == 1 or case.n == 1
    formats = case.a, case.b, k, k
    return Scaled(
        index, case.m, case.n, k, *formats, of_scales, of_scales, b_rows, case.out, case.n, 0, case.bias
    )


def verify_scaled(report: Report, cases: Sequence[ScaledCase], device: torch.device) -> None:
    """Compare products under every schedule, and quantized operands, with the CPU reference."""
    from samebits.backends.reference import scaled as reference

    for case in cases:
        x = case.operands()
        options = {"bias": x.bias, "out_dtype": case.out, "contract": FP8.key}
        want = reference.scaled_mm(*x[:4], **options).to(device)  # type: ignore[arg-type]
        on_device = x.to(device)
        for schedule, call in launches(case, on_device, device.index or 0):
            with running(f"scaled_sm90, {case}, {schedule}"):
                got = call()
                finish(f"scaled_sm90, {case}, {schedule}")
            report.compare("scaled_sm90", "products in FP8", REFERENCE, got, want, case, schedule)
    _verify_quantize(report, device)
    _verify_silu_mul_quantize(report, device)


def _verify_quantize(report: Report, device: torch.device) -> None:
    blocks: list[int | tuple[int, int]] = [SCALE_BLOCK, (SCALE_BLOCK, SCALE_BLOCK)]
    for dtype, kind, form, block in itertools.product((BF16, F16, F32), KINDS, FP8.input_dtypes, blocks):
        rows = values(kind, (300, 520), dtype, 0)
        for given in (rows, rows[1:, 1:], rows.mT):
            wanted = quantize(given, block=block, dtype=form)
            found = quantize(given.to(device), block=block, dtype=form)
            finish("quantize")
            _compare(report, "quantize", found, wanted, device, f"{dtype} {kind} {form} {block}")


def _verify_silu_mul_quantize(report: Report, device: torch.device) -> None:
    """Random values of every kind, and every value of 16 bits in a block of its own."""
    name = "silu_mul_quantize"
    for dtype, kind, form in itertools.product((BF16, F16, F32), KINDS, FP8.input_dtypes):
        x = values(kind, (300, 520), dtype, 0), values("normal", (300, 520), dtype, 1)
        for given in (x, (x[0][1:, 1:], x[1][1:, 1:]), (x[0].mT, x[1].mT)):
            wanted = silu_mul_quantize(*given, dtype=form)
            found = silu_mul_quantize(*(t.to(device) for t in given), dtype=form)
            finish(name)
            _compare(report, name, found, wanted, device, f"{dtype} {kind} {form}")
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).reshape(-1, 1)
    for dtype in (BF16, F16):
        gate = every.view(dtype).expand(-1, SCALE_BLOCK).contiguous()
        wanted = silu_mul_quantize(gate, torch.ones_like(gate))
        found = silu_mul_quantize(gate.to(device), torch.ones_like(gate, device=device))
        finish(name)
        _compare(report, name, found, wanted, device, f"every {dtype}")


def _compare(
    report: Report,
    name: str,
    found: tuple[Tensor, Tensor],
    wanted: tuple[Tensor, Tensor],
    device: torch.device,
    where: str,
) -> None:
    for what, one, other in zip(("values", "scales"), found, wanted, strict=True):
        report.compare(name, what, REFERENCE, one, other.to(device), where)
