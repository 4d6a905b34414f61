"""The universal CUDA kernels: compile everywhere without spills; on a GPU, have the reference's bits."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("cuda.core")

from samebits.backends.cuda import matmul_fma, matmul_fma_sm90, matmul_sm80, runtime
from samebits.backends.cuda.matmul_sm80 import Layout
from samebits.backends.reference import matmul as reference
from samebits.contract import AMPERE, FMA, HOPPER, TENSOR_CORE
from samebits.testing import KINDS, assert_same_bits, values

HALF = (torch.bfloat16, torch.float16)
K_VECTOR, ROW_VECTOR, K_GATHER, ROW_GATHER = (
    Layout(k_major, vector, (0, 0, int(not k_major), int(k_major)))
    for vector in (True, False)
    for k_major in (True, False)
)
KERNELS = (matmul_sm80, matmul_fma)
ALL_DTYPES = (torch.float32, *HALF)


def name(x):
    if hasattr(x, "SCHEDULES"):
        return x.__name__.rpartition(".")[2]
    if isinstance(x, matmul_fma_sm90.Schedule):
        kind = type(x).__name__.lower()
        return f"{kind}-{x.tile_m}x{x.tile_n}-{x.thread_m}x{x.thread_n}x{x.depth}-{x.min_blocks}"
    return f"{x.tile_m}x{x.tile_n}x{x.tile_k}"


kernels = pytest.mark.parametrize("kernel", KERNELS, ids=name)
schedules = pytest.mark.parametrize(
    ("kernel", "schedule"), [(kernel, s) for kernel in KERNELS for s in kernel.SCHEDULES], ids=name
)


def dtypes(kernel):
    return ALL_DTYPES if kernel is matmul_fma else HALF


@pytest.mark.parametrize("arch", runtime.ARCHITECTURES)
@pytest.mark.parametrize("schedule", matmul_sm80.SCHEDULES, ids=name)
@pytest.mark.parametrize(
    ("a", "b", "dtype"),
    [
        (K_VECTOR, K_VECTOR, torch.bfloat16),
        (ROW_VECTOR, ROW_VECTOR, torch.float16),
        (K_GATHER, K_GATHER, torch.float16),
        (ROW_GATHER, ROW_GATHER, torch.bfloat16),
        (K_VECTOR, ROW_GATHER, torch.float16),
    ],
    ids=["NT", "TN", "gather-NT", "gather-TN", "vector-gather"],
)
def test_tensor_core_kernel_compiles_without_spills(schedule, arch, a, b, dtype):
    spec = matmul_sm80.kernel_spec(schedule, dtype, a, b)
    if arch != "sm_75":
        compiles_without_spills(spec, arch, schedule, schedule.min_blocks)


F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
FMA_CASES = (
    (K_VECTOR, K_VECTOR, (F32, F32, F32), False),
    (K_VECTOR, ROW_VECTOR, (F32, F32, F32), False),
    (ROW_VECTOR, ROW_VECTOR, (F32, F32, F32), True),
    (K_GATHER, ROW_GATHER, (F32, F32, F32), False),
    (K_GATHER._replace(strides=(0, 0, 0, 2)), K_VECTOR, (F32, BF16, BF16), True),
    (K_VECTOR, ROW_VECTOR, (F16, F16, F16), False),
)


@pytest.mark.parametrize("arch", runtime.ARCHITECTURES)
@pytest.mark.parametrize("schedule", matmul_fma.SCHEDULES, ids=name)
def test_fma_kernel_compiles_without_spills(schedule, arch):
    """Every case on sm_90a; on the others the schedules take turns, so that each case meets each of them."""
    if schedule.smem > SMEM[arch]:
        pytest.skip("needs more shared memory")
    turn = runtime.ARCHITECTURES.index(arch) + matmul_fma.SCHEDULES.index(schedule)
    cases = FMA_CASES if arch == "sm_90a" else [FMA_CASES[turn % len(FMA_CASES)]]
    for a, b, types, segmented in cases:
        spec = matmul_fma.kernel_spec(schedule, types, a, b, segmented)
        blocks = schedule.min_blocks if arch.endswith("a") else 1
        compiles_without_spills(spec, arch, schedule, blocks)


@pytest.mark.parametrize("schedule", matmul_fma_sm90.SCHEDULES, ids=name)
def test_hopper_fma_kernel_compiles_without_spills(schedule):
    for a_turned, b_turned in itertools.product((False, True), repeat=2):
        spec = schedule.spec(a_turned, b_turned)
        assert spec.smem <= 227 << 10
        assert (spec.smem + 1024) * schedule.min_blocks <= 228 << 10
        # Each quarter of a multiprocessor has registers for its own warps.
        warps = -(-schedule.threads // 32 * schedule.min_blocks // 4)
        cubin = compiles_without_spills(spec, "sm_90a", schedule, schedule.min_blocks)
        assert -(-cubin.registers // 8) * 8 * warps * 32 <= 16384


@pytest.mark.parametrize("arch", runtime.ARCHITECTURES)
def test_every_architecture_has_schedules_of_the_fma_kernel(arch):
    info = runtime.DeviceInfo(0, "", (7, 5), 40, SMEM[arch], 4 << 20)
    for m, n, batch in itertools.product((1, 7, 64, 5000), (1, 33, 5000), (1, 3000)):
        assert matmul_fma.choose_schedule(m, n, batch, info).smem <= SMEM[arch]


def compiles_without_spills(spec, arch, schedule, blocks):
    cubin = runtime.compile(spec, arch)
    assert cubin.spill_bytes == 0
    assert cubin.local_bytes == 0
    assert cubin.registers * schedule.threads * blocks <= 65536
    return cubin


SMEM = dict.fromkeys(runtime.ARCHITECTURES, 227 << 10) | {
    "sm_75": 64 << 10,
    "sm_80": 163 << 10,
    "sm_86": 99 << 10,
    "sm_89": 99 << 10,
    "sm_120a": 99 << 10,
}
"""Bytes of shared memory that a block may have."""


@pytest.mark.parametrize("schedule", matmul_sm80.SCHEDULES, ids=name)
def test_schedules_fit_every_architecture(schedule):
    assert schedule.smem <= min(SMEM[arch] for arch in runtime.ARCHITECTURES if arch != "sm_75")


H200 = runtime.DeviceInfo(0, "NVIDIA H200", (9, 0), 132, 227 << 10, 60 << 20)
L40S = runtime.DeviceInfo(0, "NVIDIA L40S", (8, 9), 142, 99 << 10, 96 << 20)


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
def test_choose_schedule(info, m, n, tile):
    schedule = matmul_sm80.choose_schedule(m, n, 1, info)
    assert (schedule.tile_m, schedule.tile_n) == tile


def test_every_shape_has_a_schedule():
    for m, n, batch in itertools.product((0, 1, 2, 7, 16, 64, 1000), (1, 8, 33, 5000), (0, 1, 3000)):
        assert matmul_sm80.choose_schedule(m, n, batch, H200) in matmul_sm80.SCHEDULES


def empty(shape, strides, offset=0):
    storage = torch.empty(
        offset + 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)), dtype=HALF[0]
    )
    return storage.as_strided(shape, strides, offset)


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (empty((64, 32), (32, 1)), (True, True)),
        (empty((64, 32), (1, 64)), (False, True)),
        (empty((64, 32), (32, 1), offset=8), (True, True)),
        (empty((64, 32), (32, 1), offset=1), (True, False)),
        (empty((64, 32), (36, 1)), (True, False)),
        (empty((64, 31), (32, 1)), (True, True)),
        (empty((64, 31), (31, 1)), (True, False)),
        (empty((64, 32), (1, 65)), (False, False)),
        (empty((64, 32), (64, 2)), (True, False)),
        (empty((1, 32), (5, 1)), (True, True)),
        (empty((64, 1), (1, 1)), (False, True)),
        (empty((64, 32), (0, 1)), (True, True)),
        (empty((64, 32), (1, 0)), (False, True)),
        (empty((3, 64, 32), (2048, 32, 1)), (True, True)),
        (empty((3, 64, 32), (2052, 32, 1)), (True, False)),
    ],
)
def test_layout(x, expected):
    layout = matmul_sm80.layout(x, -2, -1, chunk=8, ragged=False)
    assert layout[:2] == expected


def test_ragged_layout_never_assumes_where_a_span_begins():
    assert matmul_sm80.layout(empty((64, 32), (32, 1)), -2, -1, chunk=8, ragged=True)[:2] == (True, False)
    assert matmul_sm80.layout(empty((64, 32), (1, 64)), -2, -1, chunk=8, ragged=True)[:2] == (False, True)


# Below: on a GPU.


def family():
    return TENSOR_CORE.on(HOPPER if torch.cuda.get_device_capability() >= (9, 0) else AMPERE)


def poison(shape, dtype):
    return torch.full(shape, float("nan"), dtype=dtype, device="cuda")


def k_contiguous(x):
    return x.contiguous()


def row_contiguous(x):
    return x.mT.contiguous().mT


def _inside(x, shape, place):
    """x as a view into a larger tensor of NaN."""
    view = place(poison(shape, x.dtype))
    return view.copy_(x)


def misaligned(x):
    *batch, m, k = x.shape
    return _inside(x, (*batch, m + 2, k + 3), lambda big: big[..., 1 : m + 1, 1 : k + 1])


def row_misaligned(x):
    return misaligned(x.mT).mT


def aligned_inside(x):
    *batch, m, k = x.shape
    return _inside(x, (*batch, m + 1, -(-k // 8) * 8 + 8), lambda big: big[..., :m, :k])


def spread(x):
    *batch, m, k = x.shape
    return _inside(x, (*batch, m, k * 2), lambda big: big[..., ::2])


LAYOUTS = (k_contiguous, row_contiguous, misaligned, row_misaligned, aligned_inside, spread)
layouts = pytest.mark.parametrize(
    ("place_a", "place_b"), list(itertools.product(LAYOUTS, LAYOUTS)), ids=lambda f: f.__name__
)


def golden():
    data = np.load(Path(__file__).parent / "data" / "tensor_core_chain_sm90.npz")
    for case in sorted({key.rpartition("/")[0] for key in data.files}):
        dtype = torch.bfloat16 if case.startswith("bf16") else torch.float16
        a, b = (torch.from_numpy(data[f"{case}/{x}"].view(np.int16)).view(dtype) for x in "ab")
        acc, out = (
            torch.from_numpy(data[f"{case}/{x}"].view(np.float32)) if f"{case}/{x}" in data.files else None
            for x in ("c0", "out")
        )
        yield case, a, b.mT, acc, out


def on_gpu(x):
    return None if x is None else x.cuda()


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", matmul_sm80.SCHEDULES, ids=name)
@layouts
def test_golden(schedule, place_a, place_b):
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("recorded on sm_90")
    for case, a, b, acc, expected in golden():
        out = poison(expected.shape, torch.float32)
        matmul_sm80.matmul(
            place_a(a.cuda()), place_b(b.mT.cuda()).mT, acc=on_gpu(acc), out=out, schedule=schedule
        )
        assert_same_bits(out, expected, case)


def over_sequences(kernel):
    """What says that the terms belong to sequences, where the kernel has to be told."""
    return {"closing": True} if kernel is matmul_fma else {}


def check(kernel, a, b, *, acc=None, bias=None, cu_seqlens=None, out_dtype=torch.float32, schedule=None):
    """One product on the GPU, poisoned around and inside, against the reference."""
    contract = FMA.key if kernel is matmul_fma else family().key
    plain = acc is None and cu_seqlens is None and a.ndim < 4
    more = {} if plain else over_sequences(kernel)
    batch = max((x.shape[0] for x in (a, b) if x.ndim > 2), default=None)
    m, n = a.shape[-2], b.shape[-1]
    shape = (m, n) if batch is None else (batch, m, n)
    if plain:
        expected = reference.matmul(
            a.cpu(),
            b.cpu(),
            bias=None if bias is None else bias.cpu(),
            out_dtype=out_dtype,
            contract=contract,
        )
    else:
        assert bias is None
        a4, b4 = (
            (x.cpu() if x.ndim == 4 else x.cpu().expand(batch or 1, *x.shape[-2:]).unsqueeze(1))
            for x in (a, b)
        )
        a4, b4 = (x.expand(batch or 1, *x.shape[1:]) for x in (a4, b4))
        acc3 = None if acc is None else acc.cpu().reshape(-1, m, n)
        spans = None if cu_seqlens is None else cu_seqlens.cpu()
        expected = reference.addbmm(acc3, a4, b4, spans, out_dtype=out_dtype, contract=contract).reshape(
            shape
        )

    around = torch.full((*shape[:-2], m + 2, n + 5), 123.0, dtype=out_dtype, device="cuda")
    for out in (
        poison(shape, out_dtype),
        around[..., 1 : m + 1, 2 : n + 2],
        poison((*shape[:-2], n, m), out_dtype).mT,
    ):
        out.fill_(float("nan"))
        kernel.matmul(a, b, acc=acc, bias=bias, cu_seqlens=cu_seqlens, out=out, schedule=schedule, **more)
        assert_same_bits(out.contiguous(), expected)
    around[..., 1 : m + 1, 2 : n + 2] = 123.0
    assert (around == 123.0).all(), "wrote outside its output"


SHAPES = [
    (1, 1, 1), (1, 17, 64), (3, 16, 5), (16, 40, 32), (17, 33, 31), (64, 64, 64),
    (65, 100, 130), (128, 15, 256), (130, 200, 70), (1, 300, 257), (257, 129, 1),
]  # fmt: skip


@pytest.mark.gpu
@schedules
def test_shapes(kernel, schedule):
    for i, ((m, k, n), dtype) in enumerate(itertools.product(SHAPES, dtypes(kernel))):
        kind = KINDS[i % len(KINDS)]
        a, b = values(kind, (m, k), dtype, i).cuda(), values(kind, (k, n), dtype, i + 50).cuda()
        for out_dtype in {torch.float32, dtype}:
            check(kernel, a, b, out_dtype=out_dtype, schedule=schedule)
            check(kernel, a, row_contiguous(b), out_dtype=out_dtype, schedule=schedule)


def readable(x):
    """x as TMA can read it, rows contiguous, with NaN around."""
    *batch, m, k = x.shape
    return _inside(x, (*batch, m + 1, -(-k // 4) * 4 + 4), lambda big: big[..., :m, :k])


def readable_along_rows(x):
    return readable(x.mT).mT


TMA_SHAPES = [
    (1, 1, 1), (3, 5, 4), (32, 32, 32), (33, 31, 65), (70, 33, 40), (129, 64, 200), (257, 95, 130),
    (100, 289, 300),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", matmul_fma_sm90.SCHEDULES, ids=name)
@pytest.mark.parametrize("place_b", [readable, readable_along_rows], ids=lambda f: f.__name__)
@pytest.mark.parametrize("place_a", [readable, readable_along_rows], ids=lambda f: f.__name__)
def test_hopper_fma_kernel(schedule, place_a, place_b):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    for i, (m, k, n) in enumerate(TMA_SHAPES):
        for j, kind in enumerate(("normal", KINDS[i % len(KINDS)], KINDS[(i + 3) % len(KINDS)])):
            a, b = (
                values(kind, (m, k), torch.float32, i).cuda(),
                values(kind, (k, n), torch.float32, i + 50).cuda(),
            )
            a, b = place_a(a), place_b(b.mT).mT
            bias = values(kind, (2 * n,), ALL_DTYPES[i % 3], 3).cuda()
            acc = values(kind, (m, n), torch.float32, 4).cuda()
            check(matmul_fma, a, b, schedule=schedule)
            check(matmul_fma, a, b, bias=bias[:n] if j else bias[::2], schedule=schedule)
            check(matmul_fma, a, b, acc=row_contiguous(acc) if j else acc, schedule=schedule)
    a, b = (
        values("normal", (3, 70, 100), torch.float32, 1).cuda(),
        values("normal", (3, 100, 60), torch.float32, 2).cuda(),
    )
    a, b = place_a(a), place_b(b.mT).mT
    for x, y in ((a, b), (a[:1], b), (a, b[:1]), (a, b[2]), (a[1:2].expand(3, 70, 100), b)):
        check(matmul_fma, x, y, schedule=schedule)
    # In place, and in parts of the chain.
    a, b = (
        values("normal", (150, 400), torch.float32, 1).cuda(),
        values("normal", (400, 300), torch.float32, 2),
    )
    a, b = place_a(a), place_b(b.mT.cuda()).mT
    acc = values("normal", (150, 300), torch.float32, 3).cuda()
    expected = matmul_fma.matmul(a, b, acc=acc, out=torch.empty_like(acc), schedule=matmul_fma.SCHEDULES[0])
    for cut in (48, 64, 300):
        carried = acc.clone()
        matmul_fma.matmul(a[:, :cut], b[:cut], acc=carried, out=carried, schedule=schedule)
        matmul_fma.matmul(a[:, cut:], b[cut:], acc=carried, out=carried, schedule=schedule)
        assert_same_bits(carried, expected)


@pytest.mark.gpu
def test_hopper_fma_schedules_agree_at_size():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    for m, k, n in [(1000, 1111, 776), (512, 4096, 1024), (2048, 768, 3072)]:
        for place_a, place_b in itertools.product((readable, readable_along_rows), repeat=2):
            a = place_a(torch.randn(m, k, device="cuda"))
            b = place_b(torch.randn(n, k, device="cuda")).mT
            first = matmul_fma.matmul(
                a, b, out=poison((m, n), torch.float32), schedule=matmul_fma.SCHEDULES[0]
            )
            for schedule in matmul_fma_sm90.SCHEDULES:
                for _ in range(3):
                    out = matmul_fma.matmul(a, b, out=poison((m, n), torch.float32), schedule=schedule)
                    assert_same_bits(out, first, str(schedule))


@pytest.mark.gpu
@kernels
@layouts
def test_layouts(kernel, place_a, place_b):
    for m, k, n in [(40, 72, 24), (33, 45, 70)]:
        a, b = (
            values("normal", (m, k), dtypes(kernel)[0], 1).cuda(),
            values("normal", (k, n), dtypes(kernel)[0], 2).cuda(),
        )
        check(kernel, place_a(a), place_b(b.mT).mT)


@pytest.mark.gpu
@kernels
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_epilogues(kernel, kind, dtype):
    if dtype not in dtypes(kernel):
        pytest.skip("FMA alone takes float32")
    a, b = values(kind, (37, 50), dtype, 1).cuda(), values(kind, (50, 43), dtype, 2).cuda()
    for bias_dtype in (torch.float32, *HALF):
        bias = values(kind, (86,), bias_dtype, 3).cuda()
        for out_dtype in {torch.float32, dtype}:
            check(kernel, a, b, bias=bias[:43], out_dtype=out_dtype)
            check(kernel, a, b, bias=bias[::2], out_dtype=out_dtype)
    acc = values(kind, (37, 43), torch.float32, 4).cuda()
    for out_dtype in {torch.float32, dtype}:
        check(kernel, a, b, acc=acc, out_dtype=out_dtype)
        check(kernel, a, b, acc=row_contiguous(acc), out_dtype=out_dtype)
        check(kernel, a[:, :0], b[:0], acc=acc, out_dtype=out_dtype)


@pytest.mark.gpu
@schedules
def test_accumulates_in_place(kernel, schedule):
    a, b = (
        values("normal", (150, 100), dtypes(kernel)[0], 1).cuda(),
        values("normal", (100, 300), dtypes(kernel)[0], 2).cuda(),
    )
    acc = values("normal", (150, 300), torch.float32, 3).cuda()
    expected = kernel.matmul(a, b, acc=acc, out=torch.empty_like(acc), schedule=schedule)
    cut = acc.clone()
    kernel.matmul(a[:, :48], b[:48], acc=cut, out=cut, schedule=schedule)
    kernel.matmul(a[:, 48:], b[48:], acc=cut, out=cut, schedule=schedule)
    assert_same_bits(cut, expected)


@pytest.mark.gpu
@schedules
def test_batches(kernel, schedule):
    a, b = (
        values("normal", (5, 20, 33), dtypes(kernel)[0], 1).cuda(),
        values("normal", (5, 33, 18), dtypes(kernel)[0], 2).cuda(),
    )
    check(kernel, a, b, schedule=schedule)
    check(kernel, a[:1], b, schedule=schedule)
    check(kernel, a, b[:1], schedule=schedule)
    check(kernel, a, b[2], schedule=schedule)
    check(kernel, a.expand(5, 20, 33), b[:1].expand(5, 33, 18), schedule=schedule)
    check(kernel, a.transpose(0, 1)[:3], b[:3], schedule=schedule)


@pytest.mark.gpu
@kernels
def test_zero_strides(kernel):
    a, b = (
        values("normal", (40, 64), dtypes(kernel)[0], 1).cuda(),
        values("normal", (64, 40), dtypes(kernel)[0], 2).cuda(),
    )
    one = torch.ones((), dtype=dtypes(kernel)[0], device="cuda")
    check(kernel, a.mT, one.expand(40, 1))
    check(kernel, a[:1].expand(40, 64), b)
    check(kernel, a[:, :1].expand(40, 64), b)
    check(kernel, one.expand(40, 64), one.expand(64, 24))


@pytest.mark.gpu
@schedules
@pytest.mark.parametrize("place", LAYOUTS, ids=lambda f: f.__name__)
def test_segments(kernel, schedule, place):
    for segments, k in [(1, 20), (3, 1), (4, 16), (3, 37), (2, 80)]:
        a = values("wide", (2, segments, 20, k), dtypes(kernel)[0], 1).cuda()
        b = values("normal", (2, segments, k, 24), dtypes(kernel)[0], 2).cuda()
        acc = values("normal", (2, 20, 24), torch.float32, 3).cuda()
        check(kernel, place(a), place(b.mT).mT, schedule=schedule)
        check(kernel, place(a), place(b.mT).mT, acc=acc, schedule=schedule)


LENGTHS = [
    [40],
    [16, 16, 8],
    [1, 2, 3, 0, 0, 17, 64, 1],
    [0, 5, 0],
    [0],
    [100, 33, 47],
    [1] * 50,
    [15, 16, 17] * 5,
]


@pytest.mark.gpu
@schedules
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda x: f"{len(x)}-spans-of-{sum(x)}")
def test_ragged_segments(kernel, schedule, lengths):
    bounds = torch.tensor([0, *itertools.accumulate(lengths)])
    total = sum(lengths)
    y, x = (
        values("wide", (total, 40), dtypes(kernel)[0], 1).cuda(),
        values("normal", (total, 24), dtypes(kernel)[0], 2).cuda(),
    )
    acc = values("normal", (40, 24), torch.float32, 3).cuda()
    for dtype in (torch.int32, torch.int64):
        spans = bounds.to(dtype).cuda()
        check(kernel, y.mT, x, cu_seqlens=spans, schedule=schedule)
        check(kernel, y.mT, x, acc=acc, cu_seqlens=spans, schedule=schedule)
        check(kernel, k_contiguous(y.mT), row_contiguous(x), cu_seqlens=spans, schedule=schedule)
        check(kernel, y.mT, y.new_ones(()).expand(total, 1), cu_seqlens=spans, schedule=schedule)


@pytest.mark.gpu
@kernels
def test_packed_and_padded_sequences_agree(kernel):
    lengths, longest = [5, 32, 17, 1, 40], 40
    y, x = (
        values("normal", (95, 130), dtypes(kernel)[0], 1).cuda(),
        values("normal", (95, 70), dtypes(kernel)[0], 2).cuda(),
    )
    bounds = [0, *itertools.accumulate(lengths)]
    spans = torch.tensor(bounds, device="cuda")
    more = over_sequences(kernel)
    packed = kernel.matmul(y.mT, x, cu_seqlens=spans, out=poison((130, 70), torch.float32), **more)
    y_padded, x_padded = (t.new_zeros(5, longest, t.shape[1]) for t in (y, x))
    for i, (start, stop) in enumerate(itertools.pairwise(bounds)):
        y_padded[i, : stop - start], x_padded[i, : stop - start] = y[start:stop], x[start:stop]
    padded = kernel.matmul(y_padded.mT[None], x_padded[None], out=poison((1, 130, 70), torch.float32), **more)
    assert_same_bits(padded[0], packed)
    carried = torch.zeros(130, 70, device="cuda")
    for start, stop in itertools.pairwise(bounds):
        kernel.matmul(y[start:stop].mT, x[start:stop], acc=carried, out=carried, **more)
    assert_same_bits(carried, packed)


@pytest.mark.gpu
@kernels
def test_wrong_spans_read_nothing_else(kernel):
    y = torch.ones(64, 32, dtype=dtypes(kernel)[0], device="cuda")
    out = kernel.matmul(
        y.mT,
        y,
        cu_seqlens=torch.tensor([-5, 1 << 30, 3, 64], device="cuda"),
        out=poison((32, 32), torch.float32),
    )
    assert (out <= 64 + 61).all()


@pytest.mark.gpu
@kernels
def test_schedules_agree_at_size(kernel):
    for m, k, n in [(1000, 1111, 777), (512, 4096, 1024)]:
        for dtype in dtypes(kernel):
            a, b = torch.randn(m, k, device="cuda").to(dtype), torch.randn(n, k, device="cuda").to(dtype).mT
            first = None
            for schedule in kernel.SCHEDULES:
                out = kernel.matmul(a, b, out=poison((m, n), torch.float32), schedule=schedule)
                first = out if first is None else first
                assert_same_bits(out, first, str(schedule))


@pytest.mark.gpu
@kernels
def test_rows_do_not_depend_on_the_batch(kernel):
    a, b = (
        torch.randn(300, 1000, device="cuda").to(dtypes(kernel)[0]),
        torch.randn(1000, 500, device="cuda").to(dtypes(kernel)[0]),
    )
    whole = kernel.matmul(a, b, out=poison((300, 500), dtypes(kernel)[0]))
    for m in (1, 2, 3, 15, 16, 17, 64, 100, 299):
        assert_same_bits(kernel.matmul(a[-m:], b, out=poison((m, 500), dtypes(kernel)[0])), whole[-m:])


@pytest.mark.gpu
def test_equals_cublas_where_it_does_not_split_k():
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("known of Hopper")
    a, b = (
        torch.randn(4096, 2048, device="cuda").to(HALF[0]),
        torch.randn(6144, 2048, device="cuda").to(HALF[0]),
    )
    assert_same_bits(matmul_sm80.matmul(a, b.mT, out=poison((4096, 6144), HALF[0])), torch.mm(a, b.mT))


@pytest.mark.gpu
@kernels
def test_huge_strides(kernel):
    """Offsets beyond 2**31 elements."""
    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs 20 GB")
    big = torch.empty((1 << 32) + 4096, dtype=dtypes(kernel)[0], device="cuda")
    a = big.as_strided((4, 64), (1 << 30, 1)).copy_(values("normal", (4, 64), dtypes(kernel)[0], 1).cuda())
    check(kernel, a, values("normal", (64, 24), dtypes(kernel)[0], 2).cuda())
    b = big.as_strided((4, 64), (1 << 30, 1), 256).copy_(
        values("normal", (4, 64), dtypes(kernel)[0], 3).cuda()
    )
    check(kernel, values("normal", (24, 4), dtypes(kernel)[0], 4).cuda(), b)


@pytest.mark.gpu
@kernels
def test_graph_replay(kernel):
    a, b = (
        torch.randn(64, 256, device="cuda").to(dtypes(kernel)[0]),
        torch.randn(256, 128, device="cuda").to(dtypes(kernel)[0]),
    )
    out = poison((64, 128), torch.float32)
    expected = kernel.matmul(a, b, out=torch.empty_like(out))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.matmul(a, b, out=out)
    for _ in range(2):
        out.fill_(float("nan"))
        graph.replay()
        assert_same_bits(out, expected)


@pytest.mark.gpu
@kernels
def test_nothing_to_compute(kernel):
    a = torch.zeros(0, 8, dtype=dtypes(kernel)[0], device="cuda")
    assert kernel.matmul(a, a.mT, out=torch.empty(0, 0, device="cuda")).shape == (0, 0)


@pytest.mark.gpu
@kernels
def test_wrong_operands_are_refused(kernel):
    a, b = (
        torch.zeros(4, 8, dtype=dtypes(kernel)[0], device="cuda"),
        torch.zeros(8, 6, dtype=dtypes(kernel)[0], device="cuda"),
    )
    out = torch.zeros(4, 6, device="cuda")
    own = [
        ({"a": a.float()}, "a: expected bfloat16 or float16"),
        ({"b": b.half()}, "b: expected a's dtype"),
    ]
    if kernel is matmul_fma:
        own = [({name: torch.zeros_like(out).double()}, f"{name}: expected float32") for name in "ab"]
    for wrong, message in [
        *own,
        ({"b": b[:5]}, "K differs"),
        ({"b": b.cpu()}, "b: expected a tensor on cuda:0, got cpu"),
        ({"out": out.mT}, r"out: expected \(4, 6\), got \(6, 4\)"),
        ({"acc": out.half()}, "acc: expected float32"),
        ({"bias": out[0, :5]}, r"bias: expected \(6,\)"),
        ({"cu_seqlens": torch.zeros(3, device="cuda")}, "cu_seqlens"),
    ]:
        with pytest.raises(ValueError, match=message):
            kernel.matmul(**({"a": a, "b": b, "out": out} | wrong))


@pytest.mark.gpu
@kernels
def test_follows_the_operands_device(kernel):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    a, b = values("normal", (33, 40), dtypes(kernel)[0], 1), values("normal", (40, 20), dtypes(kernel)[0], 2)
    outs = [
        kernel.matmul(a.to(d), b.to(d), out=torch.empty(33, 20, device=d))
        for d in ("cuda:0", "cuda:1", "cuda:0")
    ]
    assert torch.cuda.current_device() == 0
    for out in outs[1:]:
        assert_same_bits(out.cpu(), outs[0].cpu())
