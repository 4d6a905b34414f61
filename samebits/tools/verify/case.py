"""The products that ``samebits verify`` compares, as data."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from functools import partial

import torch

from samebits.backends.kernel import Step
from samebits.testing import KINDS

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True, slots=True)
class ProductCase:
    """One product ``[m, k] @ [k, n]``.

    Attributes:
        what: the line of the report that the case belongs to.
        m, n, k: sizes.
        layout: layouts of A and B: ``N``, rows contiguous, or ``T``, columns contiguous. ``x @ weight.T`` is
            NT.
        dtype: dtype of A and B.
        out: dtype of the output; None is that of A and B.
        kind: one of ``samebits.testing.KINDS``.
        place: place of A and B in memory: ``plain``, contiguous; ``pitched``, rows 16-byte aligned with a
            gap; ``odd``, at an odd address with an odd pitch; ``spread``, every second element.
        bias: dtype of the bias, if any.
        accumulate: start the chains from an f32 matrix.
        pitch: elements between the output's rows.
        batch: number of matrices; 0 for 2-D operands.
        shared: the operand that is one matrix for the whole batch: ``a``, ``b`` or neither.
        sequences: size of the axis of sequences of A and B; 0 for none.
        lengths: lengths of sequences packed along k.
        cu_seqlens_dtype: dtype of the offsets of packed sequences.
        step: step of the contract.
    """

    what: str
    m: int
    n: int
    k: int
    layout: str = "NT"
    dtype: torch.dtype = BF16
    out: torch.dtype | None = None
    kind: str = "normal"
    place: str = "plain"
    bias: torch.dtype | None = None
    accumulate: bool = False
    pitch: int = 0
    batch: int = 0
    shared: str = ""
    sequences: int = 0
    lengths: tuple[int, ...] = ()
    cu_seqlens_dtype: torch.dtype = torch.int32
    step: Step = "mma"

    @property
    def out_dtype(self) -> torch.dtype:
        return self.out or self.dtype

    @property
    def work(self) -> int:
        """The number of multiplications."""
        return self.m * self.n * self.k * max(1, self.batch) * max(1, self.sequences)

    @property
    def variant(self) -> tuple[object, ...]:
        """The properties that kernels are compiled for. Cases that share them mostly share kernels."""
        out = self.out_dtype, self.bias, self.accumulate, max(self.n, self.pitch) % 8 == 0
        offsets = bool(self.lengths) and self.cu_seqlens_dtype
        return self.step, self.layout, self.dtype, *out, self.k % 64 == 0, offsets

    def __str__(self) -> str:
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        values = {name: getattr(self, name) for name in list(defaults)[4:]}
        changed = [f"{name} {v}" for name, v in values.items() if v != defaults[name]]
        text = ", ".join([f"M {self.m}, N {self.n}, K {self.k}", *changed])
        return text.replace("torch.", "")


TINY_BATCHES = "tiny batches"
CHAIN = "back to back"
"""Square products that read and overwrite one another's matrices."""

LAYOUTS = ("NT", "NN", "TN", "TT")
SHAPES = (
    (1, 1, 1), (1, 17, 64), (3, 5, 24), (5, 3, 16), (8, 72, 8), (17, 31, 33), (33, 4096, 512), (64, 64, 64),
    (65, 130, 100), (128, 256, 15), (136, 328, 200), (130, 70, 200), (257, 1, 129), (300, 520, 264),
    (512, 768, 512), (1000, 520, 1096),
)  # fmt: skip
# In the first size, every schedule moves back its last tile of rows, of columns, or both.
SIZES = ((520, 776, 512), (136, 328, 200), (8, 72, 8), (1, 264, 392), (2048, 1536, 320))
LENGTHS = (
    (64, 128),
    (1, 0, 17, 63, 0, 200, 64, 5),
    (333,),
    (16,) * 9,
    (0,),
    (1,) * 40,
    (15, 16, 17) * 5,
)
TINY = (
    (4, 4, 4), (8, 8, 8), (12, 12, 64), (12, 64, 12), (16, 16, 64), (32, 32, 32), (64, 64, 64), (5, 3, 7),
    (1, 64, 9), (63, 61, 62), (33, 40, 15),
)  # fmt: skip
LARGE = (
    (4096, 4096, 512),
    (2048, 6144, 1024),
    (16, 28672, 4096),
    (100, 4096, 14336),
    (3000, 5000, 520),
)
LARGEST = ((8192, 8192, 1024), (16384, 4096, 2048), (1024, 8192, 8192), (1, 57344, 8192), (64, 8192, 28672))


def cases(thorough: bool) -> list[ProductCase]:
    """All cases. Kernels are compared with the CPU reference, and large ones with the universal kernel."""
    return [*_tensor_core(thorough), *_fma(thorough), *_tiny(thorough)]


def _tiny(thorough: bool) -> list[ProductCase]:
    """Batches of matrices of at most 64 rows and columns, under both contracts."""
    turns = itertools.cycle(itertools.product(KINDS, LAYOUTS, ("", "a", "b")))
    places = itertools.cycle(("plain", "pitched", "odd", "plain", "spread"))
    mma, fma = partial(ProductCase, TINY_BATCHES), partial(ProductCase, TINY_BATCHES, step="fma")
    found = []
    for shape in TINY:
        for of, dtype in ((mma, BF16), (mma, F16), (fma, F32), (fma, BF16), (fma, F16)):
            for batch in (2, 37, 1000) if thorough else (37,):
                kind, layout, shared = next(turns)
                same = partial(of, *shape, layout, dtype, kind=kind, batch=batch)
                found.append(same(shared=shared, place=next(places)))
                found.append(same(shared=shared, out=F32))
                found.append(same(accumulate=True, out=F32, pitch=shape[1] + 3))
    return found


def _fma(thorough: bool) -> list[ProductCase]:
    """All kinds of f32 cases. There are fewer of 16-bit operands, which have the same chains."""
    kinds = itertools.cycle(KINDS)
    f32 = partial(ProductCase, dtype=F32, step="fma")
    found = []
    for shape in SHAPES:
        found.append(f32("shapes", *shape, kind=next(kinds)))
        for dtype in (BF16, F16):
            found.append(ProductCase("shapes", *shape, dtype=dtype, kind=next(kinds), step="fma"))
    for layout in LAYOUTS:
        found += [f32("layouts", *shape, layout, kind=next(kinds)) for shape in SIZES]
        for place in ("pitched", "odd", "spread"):
            found.append(f32("strides", 33, 70, 45, layout, place=place))
            found.append(ProductCase("strides", 136, 328, 200, layout, place=place, step="fma"))
    for dtype, kind in itertools.product((F32, BF16, F16), KINDS):
        found.append(ProductCase("values", 136, 72, 272, dtype=dtype, kind=kind, step="fma"))
        found.append(ProductCase("values", 16, 264, 1032, dtype=dtype, kind=kind, out=F32, step="fma"))
    for dtype in (F32, BF16):
        same = partial(ProductCase, "epilogues", 300, 520, 264, dtype=dtype, kind="special", step="fma")
        found += [same(bias=dtype), same(bias=F32, out=F32), same(bias=F16, pitch=528), same(pitch=523)]
        found += [same(out=F32, accumulate=True), same(out=F32, accumulate=True, pitch=521, layout="TN")]
    for shared in ("", "a", "b"):
        for layout in LAYOUTS if thorough else ("NT", "NN"):
            for shape in ((136, 264, 200), (1, 72, 64), (20, 18, 33)):
                found.append(f32("batches", *shape, layout, batch=5, shared=shared))
    for lengths, offsets in zip(LENGTHS, itertools.cycle((torch.int32, torch.int64)), strict=False):
        for m, n in ((264, 520), (40, 24)):
            packed = partial(f32, "sequences", m, n, sum(lengths), "TN", lengths=lengths)
            packed = partial(packed, cu_seqlens_dtype=offsets)
            found += [packed(accumulate=True, kind="wide"), packed(kind="tiny"), packed(dtype=F16, out=F32)]
    for sequences, k in ((3, 1), (4, 16), (3, 37), (2, 80)):
        for accumulate in (False, True):
            found.append(
                f32("sequences", 40, 72, k, "TN", batch=2, sequences=sequences, accumulate=accumulate)
            )
    for shape in LARGE:
        found.append(f32("large", *shape))
        if thorough:
            found += [f32("large", *shape, layout, kind="wide") for layout in ("NN", "TN")]
    return found


def _tensor_core(thorough: bool) -> list[ProductCase]:
    kinds, dtypes = itertools.cycle(KINDS), itertools.cycle((BF16, F16))
    found = []
    for shape in SHAPES:
        for dtype in (BF16, F16):
            found.append(ProductCase("shapes", *shape, dtype=dtype, kind=next(kinds)))
            found.append(ProductCase("shapes", *shape, dtype=dtype, kind=next(kinds), out=F32))
    for layout in LAYOUTS:
        for dtype in (BF16, F16) if thorough else (BF16,):
            for shape in SIZES:
                found.append(ProductCase("layouts", *shape, layout, dtype))
                if thorough:
                    found.append(ProductCase("layouts", *shape, layout, dtype, out=F32, kind=next(kinds)))
        for place, shape in itertools.product(("pitched", "odd", "spread"), ((136, 328, 200), (33, 70, 45))):
            found.append(
                ProductCase("strides", *shape, layout, next(dtypes) if thorough else BF16, place=place)
            )
    for dtype, kind in itertools.product((BF16, F16), KINDS):
        for out in (None, F32):
            for shape in ((136, 72, 272), (16, 264, 1032)):
                found.append(ProductCase("values", *shape, dtype=dtype, kind=kind, out=out))
    for dtype in (BF16, F16) if thorough else (BF16,):
        for kind in ("normal", "special") if thorough else ("special",):
            same = partial(ProductCase, "epilogues", 300, 520, 264, dtype=dtype, kind=kind)
            found += [same(bias=dtype), same(bias=F32, out=F32), same(bias=dtype, pitch=528)]
            found += [same(pitch=523), same(out=F32, pitch=523), same(out=F32, accumulate=True)]
            found += [same(out=F32, accumulate=True, pitch=521), same(out=F32, accumulate=True, layout="TN")]
            found += [dataclasses.replace(same(pitch=528, out=of), n=521) for of in (None, F32)]
    for shared in ("", "a", "b"):
        for layout in LAYOUTS if thorough else ("NT", "NN"):
            for shape in ((136, 264, 200), (1, 72, 64), (20, 18, 33)):
                found.append(ProductCase("batches", *shape, layout, batch=5, shared=shared))
    for lengths in LENGTHS:
        for offsets in (torch.int32, torch.int64):
            for m, n in ((264, 520), (40, 24)):
                packed = partial(
                    ProductCase,
                    "sequences",
                    m,
                    n,
                    sum(lengths),
                    "TN",
                    lengths=lengths,
                    cu_seqlens_dtype=offsets,
                )
                found += [packed(out=F32, accumulate=True, kind="wide"), packed()]
                if thorough:
                    found += [packed(dtype=F16, kind="special"), packed(dtype=F16, out=F32)]
    for sequences, k in ((3, 1), (4, 16), (3, 37), (2, 80)):
        for accumulate in (False, True):
            out = F32 if accumulate else None
            found.append(
                ProductCase(
                    "sequences", 40, 72, k, "TN", batch=2, sequences=sequences, accumulate=accumulate, out=out
                )
            )
    for layout, size in itertools.product(LAYOUTS, (1088, 328) if thorough else (1088,)):
        chain = partial(ProductCase, CHAIN, size, size, size, layout)
        found.append(chain())
        if thorough:
            found.append(chain(F16))
        if thorough or layout == "TN":
            found.append(chain(out=F32, accumulate=True))
    for shape in LARGE + (LARGEST if thorough else ()):
        for layout in LAYOUTS[:3] if thorough and shape[0] > 16 else ("NT",):
            found.append(ProductCase("large", *shape, layout))
            if thorough:
                found.append(ProductCase("large", *shape, layout, F16, out=F32, kind="wide"))
    return found
