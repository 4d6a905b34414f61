"""``libsamebits`` launches what the library's own plans launch, at random shapes, strides and addresses."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import random
import struct
from typing import Any

import pytest
import torch

from native.tests import support
from samebits.backends.cuda import grouped, linear_logp, logp
from samebits.backends.cuda.matmul import PRODUCTS, fastest
from samebits.backends.cuda.products import grouped_sm90
from samebits.backends.cuda.products.grouped_sm90 import MOST_GROUPS
from samebits.backends.cuda.products.tail_sm90 import TAIL_SM90
from samebits.backends.cuda.products.tensor_core_sm90 import TENSOR_CORE_SM90
from samebits.backends.grouped import GroupedProduct
from samebits.backends.product import Matrix, Product
from samebits.backends.token_logps import Rows
from samebits.ops.logp import pieces
from samebits_native import engine
from samebits_native.export.archive import Archive, Family
from tests.support.fake_gpu import FakeGpu, fake_gpu

pytestmark = pytest.mark.skipif(not support.HAS_COMPILER, reason="no C compiler")

DTYPES = {0: torch.float32, 1: torch.bfloat16, 2: torch.float16}
STREAM = 77
KERNELS = {(kernel.name, kernel.step): kernel for kernel in PRODUCTS}


@pytest.fixture(scope="module")
def archive() -> Archive:
    return support.built()


@pytest.fixture(scope="module")
def engine_(archive: Archive) -> engine.Engine:
    return support.opened(support.write(archive, "launches.samebits"))


def product_of(x: engine._Product, sequences: engine._Sequences | None) -> Product:
    """The product that these arguments describe."""

    def matrix(of: Any, dtype: torch.dtype, rows: int, columns: int) -> Matrix:
        at = of.data % 16
        if x.batch > 1:
            return Matrix(dtype, (x.batch, rows, columns), (of.batch, of.row, of.column), at)
        return Matrix(dtype, (rows, columns), (of.row, of.column), at)

    dtype, out = DTYPES[x.dtype], DTYPES[x.out_dtype]
    offsets = None
    if sequences is not None and sequences.offsets:
        kind = torch.int64 if sequences.wide else torch.int32
        offsets = Matrix(kind, (sequences.count + 1,), (1,), sequences.offsets % 16)
    return Product(
        "fma" if x.dtype == 0 else "mma",
        0,
        matrix(x.a, dtype, x.m, x.k),
        matrix(x.b, dtype, x.k, x.n),
        matrix(x.out, out, x.m, x.n),
        Matrix(dtype, (x.n,), (1,), x.bias % 16) if x.bias else None,
        "out" if x.accumulate else "zero",
        offsets,
        sequences is not None,
    )


def kernel_of(spec: Any, p: Product) -> Any:
    name = {"fma_few_sm90": "fma_sm90", "fma_product": "fma"}.get(spec.entry, spec.entry)
    return KERNELS[name, p.step]


def launched_by_plan(gpu: FakeGpu, p: Product, x: Any, sequences: Any, spec: Any, schedule: Any) -> Any:
    """The launch of the plan of the kernel that `spec` belongs to, under this schedule."""
    kernel = kernel_of(spec, p)
    gpu.start()
    offsets = sequences.offsets if sequences is not None else 0
    start = x.out.data if x.accumulate else 0
    kernel.plan(p, schedule).launch(x.a.data, x.b.data, x.out.data, x.bias or 0, offsets or 0, start)
    (_, _, config, packed), (found,) = gpu.log[0], gpu.specs
    grid = struct.unpack_from("@3I", config)
    return found, grid, packed


def call(of: engine.Engine, x: Any, sequences: Any) -> int:
    at = ctypes.byref(x)
    if sequences is not None:
        return of._library.sb_gemm_ragged(of._context, at, ctypes.byref(sequences), STREAM)
    return (of._library.sb_gemm if x.batch == 1 else of._library.sb_bmm)(of._context, at, STREAM)


def check(gpu: FakeGpu, archive: Archive, of: engine.Engine, x: Any, sequences: Any) -> tuple[Any, Any]:
    """Launch the product natively and by the library's plan, and compare. The kernel and the schedule."""
    status = call(of, x, sequences)
    assert status == 0, of._library.sb_last_error()
    (launch,) = support.launches()
    spec = archive.specs[launch.kernel]
    number = next(k for (k, _), s in archive.variants.items() if s is spec)
    schedule = archive.schedules[number]
    if spec.entry == "tensor_core_sm90":
        (group,) = struct.unpack_from("@i", launch.params, len(launch.params) - 4)
        schedule = dataclasses.replace(schedule, group=group)
    p = product_of(x, sequences)
    found, grid, packed = launched_by_plan(gpu, p, x, sequences, spec, schedule)
    assert found == spec, (p, schedule)
    assert launch.grid == grid, (p, schedule)
    assert launch[2:7] == (spec.block, spec.smem, spec.cluster[0], spec.programmatic, STREAM)
    assert launch.params == packed, (p, schedule)
    return spec, schedule


def random_matrix(random: random.Random, rows: int, columns: int, batch: int, size: int, out: bool) -> Any:
    """Of either layout, padded and shifted or not."""
    inner, outer = (columns, rows) if out or random.random() < 0.5 else (rows, columns)
    pitch = inner + random.choice((0, 0, -inner % 8, -inner % 8, 1, 3, 8))
    step = 1
    if random.random() < 0.07:
        step, pitch = 2, 2 * pitch
    strides = (pitch, step) if inner == columns else (step, pitch)
    if out and step == 1 and random.random() < 0.1:
        strides = (1, rows + random.choice((0, 1, 8)))
        pitch, outer = strides[1], columns
    matrix = pitch * outer + random.choice((0, 0, -(pitch * outer) % 8, 5))
    if batch > 1 and not out and random.random() < 0.2:
        matrix = 0
    at = 0x7F0000000000 + 256 * random.randrange(1 << 20) + random.choice((0, 0, 0, 0, 8, size))
    return engine._Matrix(at, *strides, matrix if batch > 1 else random.choice((0, 7)))


def forget(random: random.Random, x: Any) -> None:
    """Give anything to the distances between rows of matrices that have one."""
    anything = (0, 1, 3, 8, -1, (1 << 63) - 1, -1 << 63)
    if x.m == 1:
        x.a.row, x.out.row = random.choice(anything), random.choice(anything)
    if x.k == 1:
        x.b.row = random.choice(anything)


def random_product(random: random.Random) -> tuple[Any, Any]:
    dtype = random.choice((0, 1, 1, 2))
    f32 = dtype == 0 or random.random() < 0.4
    sizes = (1, 2, 7, 8, 33, 64, 100, 128, 256, 300, 768, 1000, 4096, 7168)
    m, n, k = (random.choice(sizes) if random.random() < 0.7 else random.randrange(1, 3000) for _ in range(3))
    if random.random() < 0.05:
        k = 0
    elif random.random() < 0.5:
        k = -(-k // 64) * 64
    ragged = random.random() < 0.25
    batch = 1 if ragged or random.random() < 0.7 else random.randrange(2, 40)
    accumulate = f32 and random.random() < 0.4
    bias = 0x6F0000000000 + 16 * random.randrange(100) if random.random() < 0.3 else None
    size, out_size = 4 if dtype == 0 else 2, 4 if f32 else 2
    x = engine._Product(
        dtype,
        0 if f32 else dtype,
        *(m, n, k, batch),
        random_matrix(random, m, k, batch, size, False),
        random_matrix(random, k, n, batch, size, False),
        random_matrix(random, m, n, batch, out_size, True),
        bias,
        accumulate,
    )
    if random.random() < 0.5:
        forget(random, x)
    if not ragged:
        return x, None
    if random.random() < 0.6:  # the layout of weights' gradients
        x.a, x.b = (
            engine._Matrix(t.data & ~15, *s, 0) for t, s in ((x.a, (1, -(-m // 8) * 8)), (x.b, (n, 1)))
        )
    if random.random() < 0.3:
        return x, engine._Sequences(None, 1, 0)
    wide = random.random() < 0.5
    return x, engine._Sequences(0x5F0000000000 + 8 * random.randrange(9), random.randrange(1, 50), wide)


@pytest.mark.long
def test_random_products_launch_what_plans_launch(archive: Archive, engine_: engine.Engine) -> None:
    drawn, seen = random.Random(1), {}
    with fake_gpu() as gpu:
        for _ in range(1500):
            spec, schedule = check(gpu, archive, engine_, *random_product(drawn))
            seen.setdefault(spec.source, set()).add(schedule)
    few = {source: len(schedules) for source, schedules in seen.items()}
    assert few.keys() == {"tensor_core.cu", "fma.cu", "tensor_core_sm90.cu", "fma_sm90.cu", "fma_few_sm90.cu"}
    assert min(few.values()) >= 3, few


@pytest.mark.parametrize("m", [1, 2])
def test_the_distance_between_rows_of_one_row_does_not_count(
    m: int, archive: Archive, engine_: engine.Engine
) -> None:
    found = []
    with fake_gpu() as gpu:
        for row in (4096, 3, (1 << 63) - 1, -1 << 63):
            for dtype, out in ((1, 1), (2, 0), (0, 0)):
                x = dense(m, 4096, 768, "NT", dtype, out == 0)
                x.out.row = row
                if m == 1:
                    check(gpu, archive, engine_, x, None)
                    assert engine_._library.sb_gemm(engine_._context, ctypes.byref(x), STREAM) == 0
                    found.append(support.launches())
                else:
                    assert (call(engine_, x, None) == 0) == (row == 4096)
                    support.launches()
    assert found[:3] * 4 == found if m == 1 else not found


def dense(m: int, n: int, k: int, layout: str, dtype: int, f32: bool, *, accumulate: bool = False) -> Any:
    a = (k, 1) if layout[0] == "N" else (1, m)
    b = (n, 1) if layout[1] == "N" else (1, k)
    at = 0x7F0000000000
    matrices = (engine._Matrix(at << i, *s, 0) for i, s in enumerate((a, b, (n, 1))))
    return engine._Product(dtype, 0 if f32 else dtype, m, n, k, 1, *matrices, None, accumulate)


@pytest.mark.parametrize("dtype", [0, 1, 2])
def test_at_the_sizes_of_models_the_choice_is_the_librarys(
    dtype: int, archive: Archive, engine_: engine.Engine
) -> None:
    sizes, checked = support.SMALL, 0
    with fake_gpu() as gpu:
        for (k, n), m in ((shape, m) for shape in sizes.shapes for m in sizes.rows):
            works = [("NT", (m, n, k)), ("NN", (m, k, n)), ("TN", (n, k, m))]
            for layout, of in works[: 3 if m >= 256 else 1]:
                for f32 in (False, True)[dtype == 0 : 1 if dtype == 2 else 2]:
                    for accumulate in (False, True)[: 1 + (f32 and layout == "TN")]:
                        x = dense(*of, layout, dtype, f32, accumulate=accumulate)
                        p = product_of(x, None)
                        kernel = fastest(p)
                        if kernel is TAIL_SM90:  # archives have no tails
                            kernel = TENSOR_CORE_SM90
                        want = kernel.choose(p)
                        spec, schedule = check(gpu, archive, engine_, x, None)
                        assert (kernel_of(spec, p), schedule) == (kernel, want), p
                        checked += 1
    assert checked >= 30


def grouped_product_of(x: engine._Product, groups: engine._Groups) -> GroupedProduct:
    """The grouped product that these arguments describe."""

    def matrix(of: Any, dtype: torch.dtype, *shape: int) -> Matrix:
        strides = (of.batch, of.row, of.column)[-len(shape) :]
        return Matrix(dtype, shape, strides, of.data % 16)

    dtype = DTYPES[x.dtype]
    return GroupedProduct(
        "fma" if x.dtype == 0 else "mma",
        0,
        matrix(x.a, dtype, x.m, x.k),
        matrix(x.b, dtype, groups.count, x.k, x.n),
        matrix(x.out, DTYPES[x.out_dtype], x.m, x.n),
        Matrix(dtype, (groups.count, x.n), (groups.bias, 1), x.bias % 16) if x.bias else None,
    )


def check_grouped(gpu: FakeGpu, archive: Archive, of: engine.Engine, x: Any, groups: Any) -> tuple[Any, Any]:
    """The same of a grouped product."""
    status = of._library.sb_gemm_grouped(of._context, ctypes.byref(x), ctypes.byref(groups), STREAM)
    assert status == 0, of._library.sb_last_error()
    (launch,) = support.launches()
    mine = archive.specs[launch.kernel]
    schedule = archive.schedules[next(k for (k, _), s in archive.variants.items() if s is mine)]
    p = grouped_product_of(x, groups)
    kernel = next(k for k in grouped.GROUPED if f"{k.name}.cu".endswith(mine.source))
    if mine.source == "grouped_sm90.cu":
        (group,) = struct.unpack_from("@i", launch.params, 452)
        schedule = dataclasses.replace(schedule, group=group)
    gpu.start()
    kernel.plan(p, schedule).launch(x.a.data, x.b.data, x.out.data, groups.ends, x.bias or 0, 0)
    (_, _, config, packed), (found,) = gpu.log[0], gpu.specs
    assert dataclasses.replace(found, smem=mine.smem) == mine, (p, schedule)
    assert found.smem <= mine.smem <= 232448  # there is room for the table of more groups
    assert launch.grid == struct.unpack_from("@3I", config), (p, schedule)
    assert launch[2:7] == (mine.block, mine.smem, mine.cluster[0], mine.programmatic, STREAM)
    assert launch.params == packed, (p, schedule)
    return mine, (kernel, p, schedule)


def random_grouped(random: random.Random, counts: list[int]) -> tuple[Any, Any]:
    dtype = random.choice((0, 1, 1, 2))
    f32 = dtype == 0 or random.random() < 0.3
    count = random.choice((1, 2, 8, 9, 32, 128, 129, 1024, 1025, *counts))
    sizes = (1, 7, 8, 64, 100, 128, 256, 768, 1000, 2048, 7168)
    n, k = (random.choice(sizes) if random.random() < 0.7 else random.randrange(1, 3000) for _ in range(2))
    m = random.choice((1, 3, 64, 100, 1000, 4096, 100_000))
    if random.random() < 0.05:
        k = 0
    size, out_size = 4 if dtype == 0 else 2, 4 if f32 else 2
    a, b, out = (
        random_matrix(random, *of)
        for of in ((m, k, 1, size, False), (k, n, 2, size, False), (m, n, 1, out_size, True))
    )
    if random.random() < 0.6:  # as experts have them
        k = -(-k // 64) * 64
        n = -(-n // 8) * 8
        a, b, out = (
            engine._Matrix(t.data & ~15, *s)
            for t, s in ((a, (k, 1, 0)), (b, (1, k, n * k)), (out, (n, 1, 0)))
        )
        if random.random() < 0.5:
            b.row, b.column = n, 1
    bias = 0x6F0000000000 + 16 * random.randrange(100) if random.random() < 0.3 else None
    x = engine._Product(dtype, 0 if f32 else dtype, m, n, k, 1, a, b, out, bias, 0)
    if random.random() < 0.5:
        forget(random, x)
    return x, engine._Groups(0x5F0000000000 + 4 * random.randrange(9), count, n + random.choice((0, 3)))


@pytest.mark.long
def test_random_grouped_products_launch_what_plans_launch(archive: Archive, engine_: engine.Engine) -> None:
    drawn, seen = random.Random(2), {}
    tables = [t for t in archive.tables if t.family == Family.GROUPED_SM90]
    most = {s.groups for t in tables for s in (t.plain, *t.cells) if s is not None} - {MOST_GROUPS}
    counts = [most_ + more for most_ in sorted(most) for more in (0, 1)]  # the last with the whole ring
    assert counts
    with fake_gpu() as gpu:
        for _ in range(1500):
            spec, (_, _, schedule) = check_grouped(gpu, archive, engine_, *random_grouped(drawn, counts))
            seen.setdefault(spec.source, set()).add(schedule)
    few = {source: len(schedules) for source, schedules in seen.items()}
    assert few.keys() == {"tensor_core.cu", "fma.cu", "grouped_sm90.cu"}
    assert min(few.values()) >= 3, few


@pytest.mark.parametrize("groups", [8, 32, 128, 256])
@pytest.mark.parametrize("turned", [False, True])
def test_for_models_experts_the_choice_is_the_librarys(
    groups: int, turned: bool, archive: Archive, engine_: engine.Engine
) -> None:
    at = [0x7F0000000000 << i for i in range(3)]
    with fake_gpu() as gpu:
        for (k, n), share in itertools.product(support.SMALL.experts, (1, 4, 8, 32, 64, 256, 1024, 4096)):
            m, (k_, n_) = share * groups, (n, k) if turned else (k, n)
            b = engine._Matrix(at[1], *((n_, 1) if turned else (1, k_)), k_ * n_)
            a, out = engine._Matrix(at[0], k_, 1, 0), engine._Matrix(at[2], n_, 1, 0)
            x = engine._Product(1, 1, m, n_, k_, 1, a, b, out, None, 0)
            of = engine._Groups(0x5F0000000000, groups, 0)
            _, (kernel, p, schedule) = check_grouped(gpu, archive, engine_, x, of)
            want = grouped.fastest(p)
            assert kernel is want
            chosen = grouped_sm90.with_table(want.choose(p), grouped_sm90.variant(p), groups)
            assert grouped_sm90.with_table(schedule, grouped_sm90.variant(p), groups) == chosen, p


@pytest.mark.parametrize("readable", [True, False])
@pytest.mark.parametrize("tokens", [1, 9, 64, 65, 300, 3072])
@pytest.mark.parametrize(("features", "vocabulary"), [(64, 1000), (200, 129), (8, 1), (64, 151_936)])
def test_log_probabilities_launch_what_the_library_launches(
    tokens: int, features: int, vocabulary: int, readable: bool, archive: Archive, engine_: engine.Engine
) -> None:
    """Hopper's kernel, or where the copy engine cannot read the operands, logits in pieces."""
    support.launches()
    pitch = features if readable else features + 1
    with fake_gpu() as gpu:
        gpu._memory = torch.empty(1 << 32, dtype=torch.uint8)  # which is never touched
        hidden, weight = (
            gpu.allocate((rows, features), (pitch, 1), torch.bfloat16) for rows in (tokens, vocabulary)
        )
        bias, target = torch.empty(vocabulary, dtype=torch.bfloat16), torch.zeros(tokens, dtype=torch.int64)
        room = torch.empty(1 << 29, dtype=torch.uint8)
        for b, entropy in ((None, False), (bias, True)):
            rows = Rows.empty(target, vocabulary, -100, scale=1 / 0.7, entropy=entropy)
            want = []
            for start, stop in pieces(tokens, vocabulary, 3 << 27):
                gpu.log, gpu.specs = [], []
                part = rows.part(start, stop)
                found = linear_logp.statistics(
                    hidden[start:stop], weight, b, part, contract="TENSOR_CORE:mma"
                )
                logp.combine(found, part)
                want += [(spec, of[2], of[3]) for spec, of in zip(gpu.specs, gpu.log, strict=True)]
            x = engine._Logp(1, tokens, features, vocabulary, hidden.data_ptr(), pitch, weight.data_ptr())
            x.weight_row, x.bias, x.target = pitch, None if b is None else b.data_ptr(), target.data_ptr()
            x.ignore_index, x.temperature, x.logp = -100, 0.7, rows.logp.data_ptr()
            x.entropy = rows.entropy.data_ptr() if entropy else None
            size, call = scratch_of(engine_, x), engine_._library.sb_linear_logp
            at = -(-room.data_ptr() // 256) * 256
            assert size <= room.numel() - 256
            status = call(engine_._context, ctypes.byref(x), at, size, STREAM)
            assert status == 0, engine_._library.sb_last_error()
            assert call(engine_._context, ctypes.byref(x), at, size - 1, STREAM) == 1
            # Any kernel computes logits in memory; the library may copy the operands for it.
            products, copies = ("tensor_core.cu", "tensor_core_sm90.cu"), "padded_sm90.cu"
            launches = support.launches()
            sources = [archive.specs[of.kernel].source for of in launches]
            assert sum(map(sources.count, products)) == sum(of[0].source in products for of in want)
            made = [of for of, source in zip(launches, sources, strict=True) if source not in products]
            want = [of for of in want if of[0].source not in (*products, copies)]
            for launch, (spec, config, packed) in zip(made, want, strict=True):
                assert archive.specs[launch.kernel] == spec
                assert launch.grid == struct.unpack_from("@3I", config)
                fixed = inputs(spec.entry, launch.params)
                assert fixed == inputs(spec.entry, packed)


def scratch_of(of: engine.Engine, x: engine._Logp) -> int:
    size = ctypes.c_size_t()
    assert of._library.sb_workspace_size(of._context, ctypes.byref(x), ctypes.byref(size)) == 0
    return size.value


@pytest.mark.parametrize(("tokens", "features", "vocabulary"), [(9, 64, 1000), (300, 64, 50_000), (1, 8, 1)])
def test_the_scratch_of_log_probabilities_is_enough_at_any_address(
    tokens: int, features: int, vocabulary: int, engine_: engine.Engine
) -> None:
    support.launches()
    sizes = {}
    for shifts in itertools.product((None, 0, 2, 8, 14), repeat=2):
        at = [None if s is None else (0x7F0000000000 << i) + s for i, s in enumerate(shifts)]
        x = engine._Logp(1, tokens, features, vocabulary, at[0], features, at[1], features)
        sizes[shifts] = size = scratch_of(engine_, x)
        if None in shifts:
            continue
        x.target, x.temperature, x.logp = 0x6F0000000000, 1.0, 0x6E0000000000
        run = engine_._library.sb_linear_logp
        assert run(engine_._context, ctypes.byref(x), 0x5F0000000000, size, STREAM) == 0, shifts
        assert support.launches()
        assert run(engine_._context, ctypes.byref(x), 0x5F0000000000, size - 1, STREAM) == 1
    aligned = sizes.pop((0, 0))
    assert {size > aligned for size in sizes.values()} == {True}  # also where an address is not known yet
    assert len({*sizes.values()}) == 1


SCRATCH = {
    "statistics_sm90": range(272, 304),
    "block_statistics": (*range(0, 8), *range(24, 56)),
    "combine": (*range(0, 32), *range(56, 72)),
    "combine_few": (*range(0, 32), *range(56, 72)),
}
"""Bytes of parameters that are addresses of scratch."""


def inputs(entry: str, packed: bytes) -> bytes:
    """The parameters without the addresses of scratch. Those that are NULL stay."""
    hidden = {at for at in SCRATCH[entry] if any(packed[at // 8 * 8 : at // 8 * 8 + 8])}
    return bytes(0xFF if i in hidden else byte for i, byte in enumerate(packed))
