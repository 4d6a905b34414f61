"""Schedules of the product kernels without a GPU: all compile without spills, fit, and are chosen well."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import cubins, tune
from samebits.backends.cuda import compiler, devices, runtime
from samebits.backends.cuda.matmul import PRODUCTS, fastest
from samebits.backends.cuda.products import (
    fma,
    fma_sm90,
    segmented,
    tensor_core,
    tensor_core_sm90,
    tiny,
)
from samebits.backends.cuda.products.plan import TileLayout, tile_layout
from samebits.backends.cuda.products.tiny import TinyMatrices, TinySchedule, choose_schedule
from samebits.backends.kernel import Kernel
from samebits.backends.product import Matrix, Operands, Product
from tests.support.cubins import resources

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None, reason="cuda-core is not installed (samebits[cuda])"
)
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16

SMEM = dict.fromkeys(compiler.ARCHITECTURES, 227 << 10) | {
    "sm_75": 64 << 10,
    "sm_80": 163 << 10,
    "sm_86": 99 << 10,
    "sm_89": 99 << 10,
    "sm_120a": 99 << 10,
}
"""Bytes of shared memory that a block may have."""

H200 = devices.DeviceInfo(0, "NVIDIA H200", (9, 0), 132, 227 << 10, 60 << 20)
L40S = devices.DeviceInfo(0, "NVIDIA L40S", (8, 9), 142, 99 << 10, 96 << 20)
T4 = devices.DeviceInfo(0, "NVIDIA T4", (7, 5), 40, 64 << 10, 4 << 20)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes kernels believe in a GPU."""
    return lambda info: monkeypatch.setattr(devices, "device_info", lambda index: info)


def product(m: int, n: int, k: int = 64, batch: int = 0, **more: Any) -> Product:
    """Of row-major matrices; `a` and `b` replace them."""
    lead, step = ((batch,) if batch else ()), more.pop("step", "mma")
    dtype = BF16 if step == "mma" else F32
    a, b = more.pop("a", None), more.pop("b", None)

    def matrix(*shape: int, dtype: torch.dtype = dtype) -> Matrix:
        return Matrix(dtype, (*lead, *shape), (*([shape[0] * shape[1]] * len(lead)), shape[1], 1))

    return Product(step, 0, a or matrix(m, k), b or matrix(k, n), matrix(m, n, dtype=F32), **more)


def compiled_without_spills(spec: compiler.KernelSpec, arch: str) -> compiler.Cubin:
    cubin = resources(spec, arch)
    assert cubin.spill_bytes == cubin.local_bytes == 0, spec
    assert not cubin.advice, spec
    return cubin


def shape(s: Any) -> str:
    return f"{s.tile_m}x{s.tile_n}"


def fma_name(s: fma_sm90.FmaSm90Schedule) -> str:
    kind = type(s).__name__.lower()
    return f"{kind}-{s.tile_m}x{s.tile_n}-{s.thread_m}x{s.thread_n}x{s.depth}-{s.min_blocks}"


@needs_compiler
@pytest.mark.parametrize("arch", compiler.ARCHITECTURES)
@pytest.mark.parametrize("segments", [2, 4, 8, 16, 32, 64])
def test_trees_compile_without_spills(segments: int, arch: str) -> None:
    compiled_without_spills(segmented.tree_spec(segments), arch)


# The universal kernels.

TILE_LAYOUTS = [
    TileLayout(k_major, vector, (0, 0, int(not k_major), int(k_major)))
    for vector in (True, False)
    for k_major in (True, False)
]


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize("arch", [arch for arch in compiler.ARCHITECTURES if arch != "sm_75"])
@pytest.mark.parametrize("schedule", tensor_core.SCHEDULES, ids=shape)
def test_tensor_core_compiles_without_spills(schedule: tensor_core.TensorCoreSchedule, arch: str) -> None:
    """Every case on sm_80 and sm_90a; on the others the schedules take turns."""
    every = cubins.tensor_core_operands(*TILE_LAYOUTS)
    turn = compiler.ARCHITECTURES.index(arch) + tensor_core.SCHEDULES.index(schedule)
    for a, b, dtype in every if arch in ("sm_80", "sm_90a") else [every[turn % len(every)]]:
        cubin = compiled_without_spills(tensor_core.kernel_spec(schedule, dtype, a, b), arch)
        assert cubin.registers * schedule.threads * schedule.min_blocks <= 65536


FMA_CASES = cubins.fma_operands(*TILE_LAYOUTS)


@needs_compiler
@pytest.mark.parametrize("arch", compiler.ARCHITECTURES)
@pytest.mark.parametrize("schedule", fma.SCHEDULES, ids=shape)
def test_fma_compiles_without_spills(schedule: fma.FmaSchedule, arch: str) -> None:
    """Every case on sm_90a; on the others the schedules take turns, so that each case meets each of them."""
    if schedule.smem > SMEM[arch]:
        pytest.skip("needs more shared memory")
    turn = compiler.ARCHITECTURES.index(arch) + fma.SCHEDULES.index(schedule)
    cases = FMA_CASES if arch == "sm_90a" else [FMA_CASES[turn % len(FMA_CASES)]]
    for a, b, types, sequences in cases:
        cubin = compiled_without_spills(fma.kernel_spec(schedule, types, a, b, sequences), arch)
        blocks = schedule.min_blocks if arch.endswith("a") else 1
        assert cubin.registers * schedule.threads * blocks <= 65536


@needs_compiler
@pytest.mark.parametrize("schedule", fma_sm90.FMA_SM90.catalogue, ids=fma_name)
def test_hopper_fma_compiles_without_spills(schedule: fma_sm90.FmaSm90Schedule) -> None:
    """Each with two of the four layouts, in turns."""
    turn = bool(fma_sm90.FMA_SM90.catalogue.index(schedule) % 2)
    for a_by_k in (False, True):
        spec = schedule.spec(a_by_k, a_by_k ^ turn)
        assert spec.smem <= 227 << 10
        assert (spec.smem + 1024) * schedule.min_blocks <= 228 << 10
        # Each quarter of a multiprocessor has registers for its own warps.
        warps = -(-schedule.threads // 32 * schedule.min_blocks // 4)
        cubin = compiled_without_spills(spec, "sm_90a")
        assert cubin.registers * schedule.threads * schedule.min_blocks <= 65536
        assert -(-cubin.registers // 8) * 8 * warps * 32 <= 16384


@pytest.mark.parametrize("arch", compiler.ARCHITECTURES)
def test_every_architecture_has_schedules_of_the_fma_kernel(arch: str, on: Any) -> None:
    on(devices.DeviceInfo(0, "", (7, 5), 40, SMEM[arch], 4 << 20))
    for m, n, batch in itertools.product((1, 7, 64, 5000), (1, 33, 5000), (1, 3000)):
        assert fma.FMA.choose(product(m, n, batch=batch, step="fma")).smem <= SMEM[arch]


@pytest.mark.parametrize("info", [H200, L40S, T4], ids=lambda i: i.name)
def test_schedules_of_the_fma_kernel_fit(info: devices.DeviceInfo, on: Any) -> None:
    on(info)
    found = fma.FMA.all(product(64, 64, step="fma"))
    assert found
    assert max(s.smem for s in found) <= info.max_smem


@pytest.mark.parametrize("schedule", tensor_core.SCHEDULES, ids=shape)
def test_tensor_core_schedules_fit_every_architecture(schedule: tensor_core.TensorCoreSchedule) -> None:
    assert schedule.smem <= min(SMEM[arch] for arch in compiler.ARCHITECTURES if arch != "sm_75")


@pytest.mark.parametrize(
    ("info", "m", "n", "tile"),
    [
        (H200, 1, 4096, (16, 32)),
        (H200, 64, 4096, (64, 16)),
        (H200, 4096, 1, (64, 16)),
        (H200, 8192, 8192, (128, 128)),
        (L40S, 8192, 8192, (128, 256)),
        (H200, 1, 1, (16, 32)),
    ],
)
def test_tensor_core_choices(
    info: devices.DeviceInfo, m: int, n: int, tile: tuple[int, int], on: Any
) -> None:
    on(info)
    schedule = tensor_core.TENSOR_CORE.choose(product(m, n))
    assert (schedule.tile_m, schedule.tile_n) == tile


def test_every_shape_has_a_schedule(on: Any) -> None:
    on(H200)
    for m, n, batch in itertools.product((0, 1, 2, 7, 16, 64, 1000), (1, 8, 33, 5000), (0, 1, 3000)):
        assert tensor_core.TENSOR_CORE.choose(product(m, n, batch=batch)) in tensor_core.SCHEDULES


def strided(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype = BF16, offset: int = 0
) -> Matrix:
    return Matrix(dtype, shape, strides, offset * dtype.itemsize % 16)


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (strided((64, 32), (32, 1)), (True, True)),
        (strided((64, 32), (1, 64)), (False, True)),
        (strided((64, 32), (32, 1), offset=8), (True, True)),
        (strided((64, 32), (32, 1), offset=1), (True, False)),
        (strided((64, 32), (36, 1)), (True, False)),
        (strided((64, 31), (32, 1)), (True, True)),
        (strided((64, 31), (31, 1)), (True, False)),
        (strided((64, 32), (1, 65)), (False, False)),
        (strided((64, 32), (64, 2)), (True, False)),
        (strided((1, 32), (5, 1)), (True, True)),
        (strided((64, 1), (1, 1)), (False, True)),
        (strided((64, 32), (0, 1)), (True, True)),
        (strided((64, 32), (1, 0)), (False, True)),
        (strided((3, 64, 32), (2048, 32, 1)), (True, True)),
        (strided((3, 64, 32), (2052, 32, 1)), (True, False)),
    ],
)
def test_layouts_of_tiles(x: Matrix, expected: tuple[bool, bool]) -> None:
    assert tile_layout(x, -2, -1, chunk=8, ragged=False)[:2] == expected


def test_ragged_layouts_never_assume_where_a_span_begins() -> None:
    assert tile_layout(strided((64, 32), (32, 1)), -2, -1, chunk=8, ragged=True)[:2] == (True, False)
    assert tile_layout(strided((64, 32), (1, 64)), -2, -1, chunk=8, ragged=True)[:2] == (False, True)


# On Hopper.


def test_schedules_know_how_fast_memory_is(on: Any) -> None:
    """Gradients whose writes an H200's memory takes as fast as they come, and an H100's does not."""
    x, dy = strided((16, 8192), (8192, 1)), strided((8192, 16), (1, 8192))
    tiles = {}
    for name, rate in (("H100", 3.35e6), ("H200", 4.92e6), ("unknown", 0)):
        on(replace(H200, name=name, memory_rate=rate))
        p = replace(product(8192, 8192, 16, a=dy, b=x), out=strided((8192, 8192), (8192, 1)))
        s = tensor_core_sm90.TENSOR_CORE_SM90.choose(p)
        tiles[name] = s.block_m, s.block_n
    assert tiles == {"H100": (128, 128), "H200": (128, 192), "unknown": (128, 192)}


@pytest.mark.parametrize(
    ("x", "turned"),
    [
        (torch.empty(64, 32), True),
        (torch.empty(32, 64).mT, False),
        (torch.empty(64, 36)[:, :33], True),
        (torch.empty(64, 33), None),
        (torch.empty(64, 36)[:, 1:], None),
        (torch.empty(1, 33), True),
        (torch.empty(33, 1).mT, True),
        (torch.empty(64, 1), False),
        (torch.empty(64, 64)[:, ::2], None),
        (torch.empty(1, 32).expand(64, 32), None),
        (torch.empty(64, 8).as_strided((30, 32), (4, 1)), None),
        (torch.empty(3, 64, 32), True),
        (torch.empty(64, 32).expand(3, 64, 32), True),
        (torch.empty(3 * 2050).as_strided((3, 64, 32), (2049, 32, 1)), None),
        (torch.empty(64, 32, dtype=torch.bfloat16), None),
        (torch.empty(2, 3, 64, 32), None),
    ],
)
def test_what_tma_reads_for_the_fma_kernel(x: Tensor, turned: bool | None) -> None:
    assert x.data_ptr() % 16 == 0 or turned is None
    assert fma_sm90._by_k(Matrix.of(x), -2, -1) is turned


@pytest.mark.parametrize(
    ("m", "n", "k", "by_k", "tile", "blocks"),
    [
        (256, 4096, 4096, True, (64, 128), 1),  # of 256 tiles of 64 x 64 some would wait for a second round
        (512, 4096, 4096, True, (128, 128), 1),  # 128 tiles: each has a multiprocessor to itself
        (2048, 4096, 4096, True, (128, 128), 2),  # 512: those that share one hide each other's waits
        (2048, 4096, 4096, False, (128, 128), 1),  # there is less to transpose
        (256, 8192, 32, True, (64, 64), 4),  # few terms: what matters is how soon tiles are stored
    ],
)
def test_blocks_that_share_a_multiprocessor_are_counted(
    m: int, n: int, k: int, by_k: bool, tile: tuple[int, int], blocks: int
) -> None:
    best = min(fma_sm90.MANY, key=lambda s: s.time(m, n, k, 1, by_k, 132))
    assert (best.tile_m, best.tile_n, best.min_blocks) == (*tile, blocks)


@pytest.mark.parametrize(
    ("m", "n", "tile"),
    [(1, 256, (1, 32)), (1, 4096, (1, 32)), (8, 1024, (8, 8)), (16, 4096, (16, 32)), (128, 4096, (16, 128))],
)
def test_few_rows_of_fma_have_small_tiles(m: int, n: int, tile: tuple[int, int], on: Any) -> None:
    on(H200)
    weight = strided((64, n), (1, 64), F32)
    chosen = fma_sm90.FMA_SM90.choose(product(m, n, step="fma", b=weight))
    assert (chosen.tile_m, chosen.tile_n) == tile
    assert chosen in fma_sm90.FEW


@pytest.mark.parametrize(
    ("m", "n", "by_k", "few"),
    [
        (16, 4096, False, True),
        (17, 4096, False, False),  # four k are read at a time only where they lie side by side
        (128, 4096, True, True),
        (256, 4096, True, False),
        (512, 256, True, True),  # as few outputs
        (512, 256, False, False),
    ],
)
def test_which_products_of_fma_have_few_rows(m: int, n: int, by_k: bool, few: bool, on: Any) -> None:
    on(H200)
    weight = strided((64, n), (1, 64) if by_k else (n, 1), F32)
    chosen = fma_sm90.FMA_SM90.choose(product(m, n, step="fma", b=weight))
    assert chosen in (fma_sm90.FEW if few else fma_sm90.MANY)


# Batches of tiny matrices.


def tiny_matrices(sizes: Iterable[int]) -> Iterator[TinyMatrices]:
    shapes = itertools.product(sizes, repeat=3)
    for (m, n, k), layout, dtypes in itertools.product(
        shapes, itertools.product((True, False), repeat=2), cubins.TINY_DTYPES
    ):
        a, b, out, step = dtypes
        yield TinyMatrices(m, n, k, a, b, out, *layout, step)


def runs(s: TinySchedule, p: TinyMatrices, vectors: tuple[int, int, int]) -> bool:
    return s.staged or (p.compiled_in and p.direct(s, vectors))


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize("arch", compiler.ARCHITECTURES)
def test_tiny_compiles_without_spills(arch: str) -> None:
    """Each schedule with some of the products: every second pair on sm_90a, each tenth elsewhere."""
    some = list(tiny_matrices((4, 63, 64)))
    pairs = [(s, p) for i, s in enumerate(tiny.SCHEDULES) for p in some[i * 7 % 30 :: 31]]
    for i, (s, p) in enumerate(pairs[:: 2 if arch == "sm_90a" else 10]):
        if arch == "sm_75" and p.step == "mma":
            continue
        dense = p.compiled_in and (i % 2 == 1 or not s.staged)
        vectors = (16, 16, 16) if dense else (p.a.itemsize, p.b.itemsize, p.out.itemsize)
        if not runs(s, p, vectors):
            continue
        broadcast = (i % 5 == 0, i % 7 == 0) if dense else None
        spec = tiny.kernel_spec(s, p, vectors, broadcast, accumulate=p.out is F32, programmatic=True)
        cubin = compiled_without_spills(spec, arch)
        assert cubin.registers * s.threads <= 65536, (s, p)


@needs_compiler
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("size", [4, 8, 16, 64])
def test_tiny_choices_compile_without_spills(size: int, arch: str) -> None:
    for p in tiny_matrices((size,)):
        if not p.a_k_major or (p.b_k_major and arch != "sm_90a"):
            continue
        s = choose_schedule(p, 4096, 132)
        spec = tiny.kernel_spec(s, p, (16, 16, 16), (False, False), accumulate=False, programmatic=True)
        compiled_without_spills(spec, arch)


@pytest.mark.parametrize("info", [H200, T4], ids=lambda i: i.name)
def test_a_block_holds_at_least_one_matrix(info: devices.DeviceInfo) -> None:
    for p, batch in itertools.product(tiny_matrices((1, 4, 17, 64)), (2, 1000, 1 << 24)):
        s = replace(choose_schedule(p, batch, info.sm_count), staged=True)
        spec = tiny.kernel_spec(s, p, (4, 4, 4), None, accumulate=False, programmatic=True)
        assert p.smem + tiny.SLACK <= spec.smem <= info.max_smem


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], tuple[Any, ...]]]:
    """Constants and launches of the kernels that would run on an H200."""
    found: list[tuple[dict[str, Any], tuple[Any, ...]]] = []

    class Kernel:
        def __init__(self, spec: compiler.KernelSpec) -> None:
            self.constants = dict(spec.constants)

        def launch(self, *values: Any) -> None:
            found.append((self.constants, values))

    monkeypatch.setattr(devices, "device_info", lambda index: H200)
    monkeypatch.setattr(runtime, "load", lambda spec, device: Kernel(spec))
    return found


def blank(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("a", "b", "dense"),
    [
        (blank((9, 8, 8), BF16), blank((9, 8, 8), BF16), True),
        (blank((9, 8, 8), BF16).mT, blank((9, 8, 8), BF16).mT, True),
        (blank((9, 8, 8), F32), blank((1, 8, 8), F32), True),
        (blank((1, 8, 8), F32).expand(9, 8, 8), blank((9, 8, 8), F32), True),
        (blank((9, 8, 8), F32)[1:8], blank((7, 8, 8), F32), True),
        (blank((18, 8, 8), F32)[::2], blank((9, 8, 8), F32), False),
        (blank((9, 8, 12), F32)[..., :8], blank((9, 8, 8), F32), False),
        (blank((9, 8, 8), BF16), blank((9, 9, 8), BF16)[:, :8], False),
        (blank((9, 6, 8), F32), blank((9, 8, 8), F32), False),
        (blank((9, 8, 8), BF16).permute(1, 2, 0), blank((8, 9, 8), BF16), False),
        (blank((9, 8, 8), BF16)[..., :1].expand(9, 8, 8), blank((9, 8, 8), BF16), False),
        (blank((9, 8, 8), F32), blank((9, 8, 8), F32)[..., :1].expand(9, 8, 8), False),
        (blank((9, 8, 8), F32)[:, :1].expand(9, 8, 8), blank((9, 8, 8), F32), False),
    ],
)
def test_only_dense_matrices_go_straight_into_registers(
    a: Tensor, b: Tensor, dense: bool, noted: list[tuple[dict[str, Any], tuple[Any, ...]]]
) -> None:
    kernel = tiny.TINY_FMA if a.dtype is F32 else tiny.TINY
    batch = max(len(a), len(b))
    out = blank((batch, a.shape[1], b.shape[2]), a.dtype)
    for s in tiny.SCHEDULES:
        kernel.run(Operands(a, b, out), s)
        constants, (grid, *values) = noted[-1]
        assert constants["DENSE"] == dense
        whole = a.dtype is not F32 or a.shape[1] % s.tile[0] == 0
        assert constants["STAGED"] == (s.staged or not dense or not whole)
        blocks, per_block = grid[0], values[-7]
        assert (blocks - 1) * per_block < batch <= blocks * per_block


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("shape", "schedule", "parts"),
    [
        ((64, 64, 64), None, 2),
        ((16, 32, 32), TinySchedule(128, (1, 4), 3, parts=2), 2),  # shared memory would hold three
        ((64, 20, 64), TinySchedule(128, (4, 8), 1, parts=2), 1),  # half of k is no multiple of four
        ((32, 64, 32), TinySchedule(128, (4, 8), 1, parts=2), 1),  # threads without a tile
    ],
)
def test_a_block_that_copies_k_in_parts_has_one_matrix(
    shape: tuple[int, int, int],
    schedule: TinySchedule | None,
    parts: int,
    shared: bool,
    noted: list[tuple[dict[str, Any], tuple[Any, ...]]],
) -> None:
    m, k, n = shape
    a, b, out = blank((1 if shared else 9, m, k), F32), blank((9, k, n), F32), blank((9, m, n), F32)
    matrices = TinyMatrices(m, n, k, F32, F32, F32, True, False, "fma")
    schedule = schedule or replace(choose_schedule(matrices, 9, 1), per_block=4)
    tiny.TINY_FMA.run(Operands(a, b, out), schedule)
    constants, (grid, *values) = noted[-1]
    assert constants["PARTS"] == parts
    assert parts == 1 or (grid[0], values[-7]) == (9, 1)


@pytest.mark.parametrize(
    ("x", "expected"),  # of an operand [batch, row, k]: whether its lines run along k, and the vectors' bytes
    [
        (strided((5, 8, 16), (128, 16, 1)), (True, 16)),
        (strided((5, 8, 12), (96, 12, 1)), (True, 8)),
        (strided((5, 8, 16), (128, 1, 8)), (False, 16)),
        (strided((5, 8, 16), (128, 16, 1), offset=2), (True, 4)),
        (strided((5, 8, 16), (128, 16, 1), offset=1), (True, 2)),
        (strided((5, 8, 16), (129, 16, 1)), (True, 2)),
        (strided((5, 8, 15), (120, 15, 1)), (True, 2)),
        (strided((5, 8, 15), (120, 15, 1), F32), (True, 4)),
        (strided((5, 8, 16), (256, 32, 2)), (True, 2)),
        (strided((5, 8, 16), (0, 16, 1)), (True, 16)),
        (strided((5, 8, 16), (8, 1, 40)), (False, 16)),
        (strided((5, 8, 16), (1, 80, 5)), (True, 2)),
        (strided((5, 8, 1), (8, 1, 1)), (False, 16)),
        (strided((5, 8, 16), (8, 1, 0)), (False, 16)),
        (strided((5, 8, 16), (16, 0, 1)), (True, 16)),
        (strided((5, 8, 16), (0, 0, 0)), (True, 2)),
    ],
)
def test_layouts_of_lines(x: Matrix, expected: tuple[bool, int]) -> None:
    assert tiny._layout(x, 1, 2)[:2] == expected


# Which kernel runs a product.


@pytest.mark.parametrize(
    ("p", "name"),
    [
        (product(64, 64, 64, batch=9), "tiny"),
        (product(64, 64, 64, batch=9, step="fma"), "tiny"),
        (product(65, 64, 64, batch=9), "tensor_core_sm90"),
        (product(1, 4096, 4096), "tensor_core_sm90"),
        (product(1, 4096, 4096, a=strided((1, 4096), (4096, 1), offset=1)), "padded_sm90"),
        (product(8, 4096, 41, a=strided((8, 41), (41, 1))), "tensor_core"),
        (product(16, 4096, 4095, a=strided((16, 4095), (4095, 1))), "padded_sm90"),
        (product(4096, 4096, 4096, a=strided((4096, 4096), (4097, 1), offset=1)), "padded_sm90"),
        (product(256, 4096, 4096, a=strided((256, 4096), (8192, 2))), "padded_sm90"),
        (product(2048, 4096, 4096, step="fma"), "fma_sm90"),
        (product(8, 64, 41, step="fma", a=strided((8, 41), (41, 1), F32)), "fma"),
        (product(64, 64, 4096, step="fma", cu_seqlens=strided((5,), (1,), torch.int32)), "fma"),
    ],
    ids=str,
)
def test_which_kernel_runs_a_product(p: Product, name: str, on: Any) -> None:
    on(H200)
    assert fastest(p).name == name
    on(L40S)
    elsewhere = {"tiny": "tiny", "padded_sm90": "tensor_core"}
    assert fastest(p).name == elsewhere.get(name, name.removesuffix("_sm90"))


@pytest.mark.parametrize("kernel", PRODUCTS, ids=lambda kernel: f"{kernel.name}-{kernel.step}")
def test_a_choice_is_among_its_candidates(kernel: Kernel[Product, Any], on: Any) -> None:
    """Of the products of ``samebits bench``; tuners time each candidate once."""
    supported = 0
    for info in (H200, L40S):
        on(info)
        for p in (tune.product(case, kernel, 0) for case in tune.cases(kernel)):
            if kernel.supports(p):
                found = kernel.candidates(p)
                assert kernel.choose(p) in found, p
                assert len({*found}) == len(found), p
                supported += 1
    assert supported > (
        5 if kernel.name == "padded_sm90" else 10
    )  # few of them have rows that TMA cannot read


def test_every_product_has_a_kernel(on: Any) -> None:
    on(T4)
    for step, kernel in (("mma", PRODUCTS[0]), ("fma", PRODUCTS[1])):
        for m, n, k in itertools.product((0, 1, 33, 4096), (0, 1, 33, 4096), (0, 1, 33)):
            p = product(m, n, k, step=step)
            assert kernel.supports(p)
            assert fastest(p).supports(p)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"a": torch.zeros(4, 8)}, "a: expected bfloat16 or float16"),
        ({"b": torch.zeros(8, 6, dtype=F16)}, "b: expected a's dtype"),
        ({"b": torch.zeros(5, 6, dtype=BF16)}, "K differs"),
        ({"b": torch.zeros(8, 6, dtype=BF16, device="meta")}, "b: expected a tensor on cpu, got meta"),
        ({"out": torch.zeros(6, 4)}, r"out: expected \(4, 6\), got \(6, 4\)"),
        ({"start": torch.zeros(4, 6, dtype=F16)}, "start: expected float32"),
        ({"start": torch.zeros(4, 5)}, r"start: expected \(4, 6\)"),
        ({"bias": torch.zeros(5)}, r"bias: expected \(6,\)"),
        ({"bias": torch.zeros(6, dtype=torch.float64)}, "bias: expected float32"),
        ({"cu_seqlens": torch.zeros(3)}, "cu_seqlens"),
        ({"cu_seqlens": torch.zeros(6, dtype=torch.int32)[::2]}, "cu_seqlens: expected contiguous"),
    ],
    ids=str,
)
def test_wrong_operands_are_refused(given: dict[str, Tensor], message: str) -> None:
    right = Operands(torch.zeros(4, 8, dtype=BF16), torch.zeros(8, 6, dtype=BF16), torch.zeros(4, 6))
    Product.of(right, "mma")
    with pytest.raises(ValueError, match=message):
        Product.of(right._replace(**given), "mma")
    doubles = Operands(torch.zeros(4, 8).double(), torch.zeros(8, 6), torch.zeros(4, 6))
    with pytest.raises(ValueError, match="a: expected float32"):
        Product.of(doubles, "fma")
