"""The kernels of an archive: each schedule's variants, numbered as ``native/`` numbers them.

A variant's bits are said in ``products.c``, ``grouped.c``, ``sm90.c``, ``attention.c`` and ``logp.c`` of
``native/``, where calls look for them.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from samebits._version import __version__
from samebits.backends.arch import ARCHS, SM_80, Arch, arch_of
from samebits.backends.cuda import devices, linear_logp_sm90, logp
from samebits.backends.cuda.compiler import KernelSpec
from samebits.backends.cuda.products import fma, grouped_sm90, tensor_core, tensor_core_sm90
from samebits.backends.cuda.products.fma_sm90 import FmaSm90Schedule
from samebits.backends.cuda.products.grouped_sm90 import MOST_GROUPS
from samebits.backends.cuda.products.plan import TYPES, TileLayout
from samebits.backends.cuda.products.schedule_sm90 import Sm90Schedule
from samebits.backends.cuda.products.tensor_core_sm90 import Sm90Variant
from samebits.contract import FMA, TENSOR_CORE
from samebits_native.export import attention, choices
from samebits_native.export.archive import Archive, Family, Schedule, Table
from samebits_native.export.choices import BATCH, GROUPS, Sizes, Table3

__all__ = ["DTYPES", "GPUS", "OPS", "build"]

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
OPS = ("gemm", "ragged", "linear_logp", "grouped_mm", "attention")


class _Gpu(NamedTuple):
    """The GPU of an architecture that schedules are chosen for."""

    name: str
    capability: tuple[int, int]
    sm_count: int
    max_smem: int

    @property
    def arch(self) -> Arch:
        return arch_of(self.capability)


_MODELS = (
    *(("T4", 40), ("A100", 108), ("A10", 72), ("L40S", 142)),
    *(("NVIDIA H200", 132), ("B200", 148), ("B300", 148), ("RTX PRO 6000", 188)),
)
"""A GPU of each architecture, and its multiprocessors."""

GPUS = {
    arch.target: _Gpu(name, arch.capability, sms, arch.smem)
    for arch, (name, sms) in zip(ARCHS.values(), _MODELS, strict=True)
}
"""By architecture: the compute capability, multiprocessors, and bytes of a block's shared memory."""


def build(
    arch: str,
    dtypes: Collection[torch.dtype],
    ops: Collection[str] = OPS,
    sizes: Sizes = Sizes(),  # noqa: B008
) -> Archive:
    """An archive's tables and kernels, which are not compiled yet."""
    gpu = GPUS[arch]
    family = gpu.arch.mma
    half = [d for d in dtypes if d != torch.float32 and family is not None]
    contracts = {} if family is None else dict.fromkeys(half, TENSOR_CORE.on(family))
    if torch.float32 in dtypes:
        contracts[torch.float32] = FMA
    digests = [contracts[d].digest() if d in contracts else "" for d in DTYPES.values()]
    found = _Builder(Archive(arch, gpu.capability, __version__, digests), devices.describe(*gpu), gpu, sizes)
    if torch.float32 in dtypes:
        found.add_fma(ragged="ragged" in ops)
    if half:
        found.add_tensor_core(half)
    if "grouped_mm" in ops:
        found.add_grouped(dtypes if family is not None else [torch.float32])
    if gpu.arch.own == "sm90":
        if torch.float32 in dtypes and "gemm" in ops:
            found.add_fma_sm90()
        if half and {"gemm", "ragged"} & {*ops}:
            found.add_tensor_core_sm90(half, gemm="gemm" in ops, ragged="ragged" in ops)
        if half and "linear_logp" in ops:
            found.add_statistics(half)
        if half and "grouped_mm" in ops:
            found.add_grouped_sm90(half)
    if "attention" in ops:
        found.add_attention([*half, *([torch.float32] if torch.float32 in dtypes else [])])
    if "linear_logp" in ops and gpu.arch.at_least(SM_80):
        found.add_logp()
    return found.archive


def _layouts() -> list[TileLayout]:
    """How operands are loaded, in the order of their numbers in ``native/products.c``."""
    return [
        TileLayout(True, True, (0, 0, 8, 1)),
        TileLayout(False, True, (0, 0, 1, 8)),
        TileLayout(True, False, (0, 0, 9, 1)),
        TileLayout(True, False, (0, 0, 9, 2)),
        TileLayout(False, False, (0, 0, 1, 9)),
    ]


_VECTORS = 2  # the first layouts load vectors


def _grouped_variant(
    b_mn: bool, dtype: torch.dtype, f32: bool = False, bias: bool = False, aligned: bool = True
) -> Sm90Variant:
    out, bias_dtype = torch.float32 if f32 else dtype, dtype if bias else None
    return Sm90Variant(dtype, out, False, b_mn, bias_dtype, False, aligned, True)


def _most_groups(s: Sm90Schedule, of: Sm90Variant) -> int:
    """Groups whose table leaves room for the whole ring."""
    counts = range(1, MOST_GROUPS + 1)
    return bisect.bisect_left(counts, True, key=lambda n: grouped_sm90.with_table(s, of, n).stages < s.stages)


class _Builder:
    """An archive that grows."""

    def __init__(self, archive: Archive, device: int, gpu: _Gpu, sizes: Sizes) -> None:
        self.archive, self._device, self._gpu, self._sizes = archive, device, gpu, sizes
        self._kernels: dict[tuple[Family, Any], int] = {}

    def _number(self, family: Family, schedule: Any) -> int:
        """The number that the variants of a schedule are found by."""
        number = self._kernels.setdefault((family, schedule), len(self._kernels))
        self.archive.schedules[number] = schedule
        return number

    def _add_table(
        self, family: Family, key: int, plain: Schedule, found: Table3, record: Callable[[Any], Schedule]
    ) -> None:
        records = {s: record(s) for s in dict.fromkeys(found.cells) if s is not None}
        cells = [None if s is None else records[s] for s in found.cells]
        self.archive.tables.append(Table(family, key, plain, found.bounds, cells))

    def _add(self, kernel: int, variant: int, spec: KernelSpec) -> None:
        self.archive.variants[kernel, variant] = spec

    # ---- The universal kernels ----

    def _universal(self, family: Family, step: Any, plain: Any, batches: Sequence[int]) -> list[Any]:
        """The tables of a universal kernel, and the schedules in them. The plain one is the first."""

        def record(s: Any) -> Schedule:
            return Schedule(family, self._number(family, s), s.tile_m, s.tile_n, s.tile_k)

        used: dict[Any, None] = {plain: None}
        for key, batch in enumerate(batches):
            found = choices.universal(step, self._sizes, self._device, batch)
            used |= dict.fromkeys(found.cells)
            self._add_table(family, key, record(plain), found, record)
        return list(used)

    @property
    def _plain_tensor_core(self) -> Any:
        return [s for s in tensor_core.SCHEDULES if s.smem <= self._gpu.max_smem][2]

    @property
    def _plain_fma(self) -> Any:
        return next(s for s in fma.SCHEDULES if s.tile_m == 64 and s.smem <= self._gpu.max_smem)

    def add_tensor_core(self, dtypes: Iterable[torch.dtype]) -> None:
        used = self._universal(Family.TENSOR_CORE, "mma", self._plain_tensor_core, (1, BATCH))
        layouts = list(enumerate(_layouts()))
        for s, dtype, (i, a), (j, b) in itertools.product(used, dtypes, layouts, layouts):
            spec = tensor_core.kernel_spec(s, dtype, a, b)
            self._add(self._number(Family.TENSOR_CORE, s), i | j << 3 | TYPES[dtype] << 6, spec)

    def add_fma(self, ragged: bool) -> None:
        plain, layouts, f32 = self._plain_fma, list(enumerate(_layouts())), torch.float32
        for s in self._universal(Family.FMA, "fma", plain, (1, BATCH)):
            pairs = itertools.product(layouts if s == plain else layouts[:_VECTORS], repeat=2)
            for ((i, a), (j, b)), sequences in itertools.product(pairs, (False, True)[: 1 + ragged]):
                spec = fma.kernel_spec(s, (f32, f32, f32), a, b, sequences)
                self._add(self._number(Family.FMA, s), i | j << 3 | TYPES[f32] << 6 | sequences << 8, spec)

    def add_grouped(self, dtypes: Collection[torch.dtype]) -> None:
        """The universal kernels' form for groups of rows: the plain schedule for all layouts."""
        layouts = list(enumerate(_layouts()))
        for fma_, family in ((True, Family.GROUPED_FMA), (False, Family.GROUPED_TENSOR_CORE)):
            of = [d for d in dtypes if (d == torch.float32) == fma_]
            if not of:
                continue
            plain = self._plain_fma if fma_ else self._plain_tensor_core
            used = self._universal(family, "fma" if fma_ else "mma", plain, GROUPS)
            for s, dtype in itertools.product(used, of):
                every = layouts if s == plain else layouts[:_VECTORS]
                for (i, a), (j, b) in itertools.product(every, every):
                    if a.vector and not a.k_major:
                        continue  # groups start at any row
                    if fma_:
                        spec = fma.kernel_spec(s, (dtype, dtype, dtype), a, b, False, "OF_ROWS")
                    else:
                        spec = tensor_core.kernel_spec(s, dtype, a, b, "OF_ROWS")
                    self._add(self._number(family, s), i | j << 3 | TYPES[dtype] << 6, spec)

    # ---- Hopper ----

    def add_fma_sm90(self) -> None:
        def record(s: FmaSm90Schedule) -> Schedule:
            return Schedule(family, self._number(family, s), s.tile_m, s.tile_n)

        family = Family.FMA_SM90
        for a_by_k, b_by_k, batch in itertools.product((False, True), (False, True), (1, BATCH)):
            found = choices.fma_sm90(self._sizes, self._device, batch, a_by_k, b_by_k)
            used = [s for s in dict.fromkeys(found.cells) if s is not None]
            if not used:
                continue
            variant = a_by_k | b_by_k << 1
            self._add_table(family, variant | (batch > 1) << 2, record(used[0]), found, record)
            for s in used:
                self._add(self._number(family, s), variant, s.spec(a_by_k, b_by_k))

    def _hopper(self, family: Family, s: Sm90Schedule) -> Schedule:
        kernel = self._number(family, replace(s, group=1))  # the order of tiles is a parameter
        sizes = s.block_m, s.block_n, s.block_k, s.cluster, s.group, s.blocks
        return Schedule(family, kernel, *sizes, s.panel, s.swap, s.l2_promotion)

    def add_tensor_core_sm90(self, dtypes: Collection[torch.dtype], gemm: bool, ragged: bool) -> None:
        family = Family.TENSOR_CORE_SM90
        for layout, output, batched, found in choices.layout_tables(
            self._sizes, self._gpu.sm_count, self._device
        ):
            a_mn, b_mn = layout.a_mn, layout.b_mn
            spans = (None, torch.int32, torch.int64) if ragged and a_mn and b_mn else (None,)
            if not gemm and len(spans) == 1:
                continue
            plain = choices.plain(a_mn, b_mn)
            key = a_mn | b_mn << 1 | output << 2 | batched << 4
            record = functools.partial(self._tensor_core_sm90, layout)
            self._add_table(family, key, record(plain), found, record)
            biases = (False,) if a_mn else (False, True)
            for s, dtype, offsets, bias in itertools.product(
                dict.fromkeys(replace(s, group=1) for s in found.cells), dtypes, spans, biases
            ):
                # The archive would be too large with every variant. These have the plain schedule alone.
                if (output > 0 and (bias or dtype == torch.float16)) or offsets == torch.int64:
                    continue
                of = self._variant(layout, dtype, output > 0, bias, output == 2, True, offsets)
                self._add_variant(s, of)
            for dtype, offsets, bias, aligned in itertools.product(
                dtypes, spans, (False, True), (False, True)
            ):
                of = self._variant(layout, dtype, output > 0, bias, output == 2, aligned, offsets)
                self._add_variant(plain, of)
                if output == 1:
                    self._add_variant(plain, replace(of, accumulate=True))

    def _tensor_core_sm90(self, layout: choices.Layout, s: Sm90Schedule) -> Schedule:
        of = Sm90Variant(torch.bfloat16, torch.bfloat16, layout.a_mn, layout.b_mn)
        record = self._hopper(Family.TENSOR_CORE_SM90, s)
        return record._replace(panel=tensor_core_sm90.panel(of, s))

    def _variant(
        self,
        layout: choices.Layout,
        dtype: torch.dtype,
        f32: bool,
        bias: bool,
        accumulate: bool,
        aligned: bool,
        offsets: torch.dtype | None,
    ) -> Sm90Variant:
        out = torch.float32 if f32 else dtype
        bias_dtype = dtype if bias else None
        return Sm90Variant(
            dtype, out, layout.a_mn, layout.b_mn, bias_dtype, accumulate, aligned, True, offsets
        )

    def _add_variant(self, s: Sm90Schedule, of: Sm90Variant) -> None:
        """A kernel for k that is a multiple of 64, which is any k if stages have 64."""
        spans = {None: 0, torch.int32: 1, torch.int64: 2}[of.cu_seqlens_dtype]
        bits = of.a_mn | of.b_mn << 1 | TYPES[of.dtype] << 2 | (of.out_dtype == torch.float32) << 4
        bits |= (of.bias_dtype is not None) << 5 | of.accumulate << 6 | of.aligned << 7
        bits |= (s.block_k > 64) << 8 | spans << 9
        kernel = self._number(Family.TENSOR_CORE_SM90, replace(s, group=1))
        self._add(kernel, bits, tensor_core_sm90.spec(of, s))

    def add_grouped_sm90(self, dtypes: Collection[torch.dtype]) -> None:
        family, flags = Family.GROUPED_SM90, (False, True)
        for b_mn, groups, found in choices.grouped_tables(self._sizes, self._gpu.sm_count):
            record = functools.partial(self._grouped, b_mn)
            plain = choices.plain(False, b_mn)
            self._add_table(family, b_mn | groups << 1, record(plain), found, record)
            for dtype, f32, bias, aligned in itertools.product(dtypes, flags, flags, flags):
                self._add_grouped(plain, _grouped_variant(b_mn, dtype, f32, bias, aligned))
            biases = (False,) if b_mn else flags
            for s, dtype, bias in itertools.product(dict.fromkeys(found.cells), dtypes, biases):
                self._add_grouped(s, _grouped_variant(b_mn, dtype, bias=bias))

    def _grouped(self, b_mn: bool, s: Sm90Schedule) -> Schedule:
        most = _most_groups(s, _grouped_variant(b_mn, torch.bfloat16))
        return self._hopper(Family.GROUPED_SM90, s)._replace(groups=most)

    def _add_grouped(self, s: Sm90Schedule, of: Sm90Variant) -> None:
        """A kernel for as many groups as leave room for the whole ring, and one for more if they do not."""
        bits = of.b_mn | TYPES[of.dtype] << 1 | (of.out_dtype == torch.float32) << 3
        bits |= (of.bias_dtype is not None) << 4 | of.aligned << 5 | (s.block_k > 64) << 6
        kernel, most = self._number(Family.GROUPED_SM90, replace(s, group=1)), _most_groups(s, of)
        for reduced, groups in ((False, most), (True, MOST_GROUPS))[most == 0 : 1 + (most < MOST_GROUPS)]:
            ring = grouped_sm90.with_table(s, of, groups)
            self._add(kernel, bits | reduced << 7, grouped_sm90.spec(of, ring, groups))

    # ---- Log-probabilities ----

    def add_statistics(self, dtypes: Iterable[torch.dtype]) -> None:
        family, found = Family.STATISTICS_SM90, choices.statistics()
        plain = linear_logp_sm90.schedules("statistics_sm90")[0]
        record = self._hopper(family, plain)
        self._add_table(family, 0, record, found, lambda s: self._hopper(family, s))
        flags = (False, True)
        for s, dtype, bias, entropy, folded in itertools.product(
            dict.fromkeys((plain, *found.cells)), dtypes, flags, flags, flags
        ):
            if folded and s.block_k <= 64:
                continue
            spec = linear_logp_sm90.spec(
                "statistics_sm90",
                s,
                dtype=dtype,
                bias=dtype if bias else None,
                entropy=entropy,
                folded=folded,
            )
            bits = TYPES[dtype] | bias << 2 | entropy << 3 | folded << 4
            self._add(self._number(family, replace(s, group=1)), bits, spec)

    def add_logp(self) -> None:
        schedule = Schedule(Family.LOGP, self._number(Family.LOGP, None))
        every = Table3((choices.ANY,) * 3, [None])
        self._add_table(Family.LOGP, 0, schedule, every, lambda s: schedule)
        for entropy, (i, entry) in itertools.product(
            (False, True), enumerate(("block_statistics", "combine", "combine_few"))
        ):
            self._add(schedule.kernel, i | entropy << 2, logp.kernel_spec(entry, entropy=entropy))

    # ---- Attention ----

    def add_attention(self, dtypes: Collection[torch.dtype]) -> None:
        of = self._sizes.heads, dtypes, self._device
        found = attention.universals(*of)
        if self._gpu.arch.runs("attention_sm90"):
            found = itertools.chain(attention.hopper(*of), found)
        for x in found:

            def record(cell: Any, x: attention.Found = x) -> Schedule:
                return x.record(cell)._replace(kernel=self._number(x.family, x.kernel(cell)))

            self._add_table(x.family, x.key, record(x.plain), x.table, record)
            for schedule, bits, spec in x.kernels:
                self._add(self._number(x.family, schedule), bits, spec)
        merge = Schedule(Family.ATTENTION_MERGE, self._number(Family.ATTENTION_MERGE, None))
        every = Table3((choices.ANY,) * 3, [None])
        self._add_table(Family.ATTENTION_MERGE, 0, merge, every, lambda s: merge)
        for bits, spec in attention.merges(*of):
            self.archive.variants.setdefault((merge.kernel, bits), spec)
