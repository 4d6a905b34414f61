"""The Hopper kernel without a GPU: every schedule compiles without spills, and its host side adds up."""

from __future__ import annotations

import importlib.util
import itertools
import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from samebits import verify
from samebits.backends.cuda import (
    attention_sm90,
    linear_logp,
    linear_logp_sm90,
    logp,
    matmul,
    matmul_fma,
    matmul_fma_sm90,
    matmul_sm80,
    matmul_sm90,
    runtime,
    schedule,
)
from samebits.backends.linear_logp import grad_logits
from samebits.backends.rows import Rows
from samebits.verify import plan, reductions
from samebits.verify.operands import make_operands, make_room, unfilled

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None, reason="cuda-core is not installed (samebits[cuda])"
)
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

SMEM = 227 * 1024
LAYOUTS = list(itertools.product((False, True), repeat=2))

# Each kind of epilogue and operand once; the schedules take turns, so that each meets some of them.
CASES = [
    {"out_dtype": BF16},
    {"out_dtype": F32},
    {"out_dtype": BF16, "bias_dtype": BF16, "folded": True},
    {"out_dtype": F32, "accumulate": True},
    {"out_dtype": F32, "accumulate": True, "aligned": False},
    {"out_dtype": BF16, "aligned": False, "bias_dtype": BF16},
    {"out_dtype": F16, "dtype": F16, "bias_dtype": F16, "folded": True},
]
RAGGED = {"out_dtype": F32, "accumulate": True, "bounds_dtype": torch.int32}


def kernels(a_mn: bool, b_mn: bool) -> Iterator[runtime.KernelSpec]:
    cases = itertools.cycle([*CASES, RAGGED] if a_mn and b_mn else CASES)
    for s in schedule.catalogue(a_mn, b_mn):
        yield matmul_sm90.spec(
            matmul_sm90.Case(**{"dtype": BF16, "a_mn": a_mn, "b_mn": b_mn, **next(cases)}), s
        )


def fits_gpu(s: schedule.Schedule, a_mn: bool, b_mn: bool) -> bool:
    a, b = (b_mn, a_mn) if s.swap else (a_mn, b_mn)
    return s.stages >= 2 and s.smem(s.panel, a, b) <= SMEM // s.blocks and s.fits(a_mn, b_mn)


@pytest.mark.parametrize(("a_mn", "b_mn"), LAYOUTS)
def test_any_product_has_a_schedule_that_fits(a_mn: bool, b_mn: bool) -> None:
    sizes = (1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 100, 128, 129, 256, 1000, 4096, 100_000)
    for m, n, k, sms in itertools.product(sizes, sizes, (1, 16, 200, 4096), (114, 132)):
        s = schedule.choose(schedule.Product(m, n, k, 1, a_mn, b_mn), sms)
        assert fits_gpu(s, a_mn, b_mn), (m, n, k, s)


@pytest.mark.parametrize(("a_mn", "b_mn"), LAYOUTS)
def test_the_catalogue_fits(a_mn: bool, b_mn: bool) -> None:
    found = schedule.catalogue(a_mn, b_mn)
    assert len(found) == len(set(found)) > 20
    for s in found:
        assert fits_gpu(s, a_mn, b_mn), s


SIZES = st.integers(0, 17).flatmap(lambda bits: st.integers(1, 1 << bits))


@pytest.mark.parametrize(("a_mn", "b_mn"), LAYOUTS)
@given(SIZES, SIZES, SIZES, st.integers(1, 4), st.sampled_from([58, 66, 78, 114, 132, 144]))
@example(1344, 496, 16, 1, 132)
@example(1030, 289, 16, 1, 66)
def test_what_is_chosen_is_in_the_catalogue(
    a_mn: bool, b_mn: bool, m: int, n: int, k: int, batch: int, sms: int
) -> None:
    chosen = schedule.choose(schedule.Product(m, n, k, batch, a_mn, b_mn), sms)
    assert _kind(chosen) in {_kind(s) for s in schedule.catalogue(a_mn, b_mn)}


def _kind(s: schedule.Schedule) -> schedule.Schedule:
    return replace(s, early=False, ahead=0, group=0)  # which take turns in the catalogue


@needs_compiler
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize(("a_mn", "b_mn"), LAYOUTS)
def test_every_schedule_compiles_without_spills(a_mn: bool, b_mn: bool, part: int) -> None:
    specs = list(kernels(a_mn, b_mn))[part::4]
    assert specs
    for spec in specs:
        cubin = runtime.compile(spec, "sm_90a")
        assert cubin.spill_bytes == cubin.local_bytes == 0, spec
        assert not cubin.advice, spec


LOGP = list(itertools.product(("statistics_sm90", "grad_logits_sm90"), (False, True)))


@needs_compiler
@pytest.mark.parametrize(("entry", "entropy"), LOGP)
def test_log_probabilities_compile_without_spills(entry: str, entropy: bool) -> None:
    operands = [(BF16, None), (BF16, BF16), (F16, F16)]
    for s, (dtype, bias) in itertools.product(linear_logp_sm90.schedules(entry), operands):
        spec = linear_logp_sm90.spec(entry, s, dtype=dtype, bias=bias, entropy=entropy, folded=s.block_n < 32)
        assert spec.smem <= SMEM
        assert s.stages >= 2
        cubin = runtime.compile(spec, "sm_90a")
        assert cubin.spill_bytes == cubin.local_bytes == 0, spec
        assert not cubin.advice, spec


@needs_compiler
@pytest.mark.parametrize(
    ("head", "values", "mask"),
    [(64, 64, None), (128, 128, None), (16, 96, torch.bool), (128, 128, torch.bool), (128, 128, F32)],
    ids=str,
)
def test_attention_compiles_without_spills(head: int, values: int, mask: torch.dtype | None) -> None:
    every = 1 if head == 64 else 2
    for i, s in enumerate(attention_sm90.schedules(head, values)[::every]):
        case = attention_sm90.Case((BF16, F16, F16, BF16)[i % 4], head, values, mask)
        spec = attention_sm90.spec(case, s)
        cubin = runtime.compile(spec, "sm_90a")
        assert cubin.spill_bytes == cubin.local_bytes == 0, spec
        assert not cubin.advice, spec


def test_any_head_has_a_schedule_of_attention_that_fits() -> None:
    for head, values in itertools.product(range(16, 129, 16), repeat=2):
        for s in attention_sm90.schedules(head, values):
            assert s.smem(head, values) <= SMEM
            assert s.stages >= 3
        for rows, blocks in itertools.product((1, 64, 65, 4096), (1, 32, 33, 200, 8192)):
            chosen = attention_sm90.choose(head, values, rows, blocks)
            assert chosen.held >= blocks or chosen.held == 0


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """CPU tensors pass for those of an H200: everything of a launch but the launch, which is noted."""
    found: list[str] = []

    class Kernel:
        def __init__(self, spec: runtime.KernelSpec) -> None:
            self.spec = spec

        def launch(self, grid: tuple[int, int, int], *values: Any) -> None:
            assert min(grid) > 0
            assert grid[0] % self.spec.cluster[0] == 0
            struct.pack("@" + self.spec.params, *values)
            found.append(self.spec.source)

    def tensor_map(
        address: int,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        box: tuple[int, ...],
        swizzle: int = 128,
        l2_promotion: int = 256,
    ) -> bytes:
        # What the driver asks of a tensor map.
        assert len(shape) == len(box) == len(strides) + 1 <= 5
        assert all(s % 16 == 0 for s in (address, *strides))
        assert all(0 < n <= 256 for n in box)
        assert min(shape) > 0
        assert swizzle == 0 or box[0] * dtype.itemsize <= swizzle
        assert box[0] * dtype.itemsize % 16 == 0
        assert l2_promotion in (0, 64, 128, 256)
        return bytes(128)

    info = runtime.DeviceInfo(-1, "NVIDIA H200", (9, 0), 132, 232448, 60 << 20)
    monkeypatch.setattr(runtime, "device_info", lambda index: info)
    monkeypatch.setattr(runtime, "load", lambda spec, device: Kernel(spec))
    monkeypatch.setattr(runtime, "tensor_map", tensor_map)
    monkeypatch.setattr(runtime, "empty_matrix", lambda m, n, dtype, device: torch.empty((m, n), dtype=dtype))
    monkeypatch.setattr(matmul_sm80, "check", lambda *tensors: None)
    monkeypatch.setattr(matmul_fma, "check", lambda *tensors: None)
    monkeypatch.setattr(matmul, "_plans", {})
    matmul_sm90._plan.cache_clear()
    linear_logp_sm90._prepared.cache_clear()
    logp._kernel.cache_clear()
    attention_sm90._prepared.cache_clear()
    return found


@pytest.mark.parametrize(
    ("m", "n", "k", "cluster", "group", "early"),
    [
        (2048, 256, 7168, 1, 2, False),  # all tiles at once: in squares
        (256, 4096, 4096, 1, 16, False),  # but where there are few rows of them
        (512, 4096, 4096, 1, 16, True),  # and tall ones start early
        (512, 8192, 8192, 2, 16, True),  # shared ones, too
        (8192, 8192, 8192, 2, 8, True),  # 2,048 rows of tiles together
        (16384, 4096, 4096, 2, 11, True),
    ],
)
def test_the_order_of_tiles(m: int, n: int, k: int, cluster: int, group: int, early: bool) -> None:
    chosen = schedule.choose(schedule.Product(m, n, k), 132)
    assert (chosen.cluster, chosen.group, chosen.early) == (cluster, group, early)


@pytest.mark.parametrize(
    ("n", "k", "tokens", "tile"),
    [
        (25344, 4096, 4096, (192, 128)),  # of a chunk of the vocabulary
        (4096, 4096, 4096, (128, 256)),
        (4096, 14336, 1024, (128, 192)),
    ],
)
def test_tiles_of_weight_gradients(n: int, k: int, tokens: int, tile: tuple[int, int]) -> None:
    chosen = schedule.choose(schedule.Product(n, k, tokens, a_mn=True, b_mn=True), 132)
    assert (chosen.block_m, chosen.block_n) == tile


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "columns"),
    [
        (4096, 25344, 384),
        (4096, 151936, 384),
        (131072, 896, 128),  # 1,152 by pairs
        (256, 25344, 128),
    ],
)
def test_columns_of_dz_that_a_cluster_takes(tokens: int, vocabulary: int, columns: int) -> None:
    chosen = linear_logp_sm90.choose("grad_logits_sm90", tokens, vocabulary)
    assert chosen.block_n * chosen.cluster == columns


@pytest.mark.parametrize("m", [1, 3, 8, 33, 128, 256, 1000, 4096])
@pytest.mark.parametrize(("k", "n"), [(4096, 4096), (7168, 256), (768, 3072), (40, 24), (41, 23), (64, 1)])
def test_every_launch_adds_up(launches: list[str], m: int, k: int, n: int) -> None:
    def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    key = "TENSOR_CORE:mma"
    for out_dtype, bias in itertools.product((BF16, F32), (None, empty(n))):
        for b in (empty(n, k).mT, empty(k, n)):
            out = matmul.matmul(empty(m, k), b, bias=bias, out_dtype=out_dtype, contract=key)
            assert (out.shape, out.dtype) == ((m, n), out_dtype)
    dy, x = empty(m, n).mT[None, None], empty(m, k)[None, None]
    for bounds in (None, torch.tensor([0, m // 2, m])):
        assert matmul.addbmm(None, dy, x, bounds, out_dtype=BF16, contract=key).shape == (1, n, k)
        matmul.addbmm_later(empty(1, n, k, dtype=F32), dy, x, bounds, accumulate=True, contract=key)()
    rows = empty(4, 7, n).mT[None]
    assert matmul.addbmm(None, rows, empty(1, 4, 7, k), None, out_dtype=BF16, contract=key).shape == (1, n, k)
    assert matmul.matmul(empty(3, 5, k), empty(3, k, n), bias=None, out_dtype=BF16, contract=key).shape == (
        3,
        5,
        n,
    )
    # TMA asks for strides of 16 bytes; other layouts go to the universal kernel.
    assert "matmul_sm90.cu" in launches or k % 8
    assert "matmul_sm80.cu" in launches or k % 8 == n % 8 == 0


@pytest.mark.parametrize("m", [1, 3, 33, 128, 1000, 4096])
@pytest.mark.parametrize(("k", "n"), [(4096, 4096), (7168, 256), (40, 24), (41, 23), (64, 1), (1, 64)])
def test_every_launch_under_fma_adds_up(launches: list[str], m: int, k: int, n: int) -> None:
    key = "FMA:fma"
    for bias in (None, torch.empty(n), torch.empty(n, dtype=BF16)):
        for b in (torch.empty(n, k).mT, torch.empty(k, n)):
            out = matmul.matmul(torch.empty(m, k), b, bias=bias, out_dtype=F32, contract=key)
            assert (out.shape, out.dtype) == ((m, n), F32)
    dy, x = torch.empty(m, n).mT[None, None], torch.empty(m, k)[None, None]
    for bounds in (None, torch.tensor([0, m // 2, m])):
        assert matmul.addbmm(None, dy, x, bounds, out_dtype=F32, contract=key).shape == (1, n, k)
        matmul.addbmm_later(torch.empty(1, n, k), dy, x, bounds, accumulate=True, contract=key)()
    a3, b3 = torch.empty(3, 100, k), torch.empty(3, k, n)
    assert matmul.matmul(a3, b3, bias=None, out_dtype=F32, contract=key).shape == (3, 100, n)
    # TMA asks for strides of 16 bytes; other layouts, and sequences, go to the universal kernel.
    assert "matmul_fma_sm90.cu" in launches or min(m, n, k) < 64
    assert "matmul_fma.cu" in launches


@pytest.mark.parametrize("tokens", [1, 9, 33, 64, 65, 300, 4096])
@pytest.mark.parametrize(("features", "vocabulary"), [(64, 1000), (200, 129), (8, 1), (41, 300)])
def test_every_launch_of_log_probabilities_adds_up(
    launches: list[str], tokens: int, features: int, vocabulary: int
) -> None:
    hidden, weight, bias = (
        torch.empty(s, dtype=BF16) for s in ((tokens, features), (vocabulary, features), (vocabulary,))
    )
    key = "TENSOR_CORE:mma"
    rows = Rows.empty(torch.zeros(tokens, dtype=torch.int64), vocabulary, -100, entropy=True)
    grad = torch.ones(tokens)
    part = slice(vocabulary // 256 * 128, vocabulary)
    for b, h in itertools.product((None, bias), (None, grad)):
        assert linear_logp.statistics(hidden, weight, b, rows, contract=key).m.shape == (
            tokens,
            -(-vocabulary // 128),
        )
        given = hidden, weight, b, part, rows, grad, h
        dz = grad_logits(linear_logp.grad_logits_later, *given, dtype=BF16, contract=key)
        assert (dz.shape, dz.stride(0) % 8) == ((tokens, part.stop - part.start), 0)
    fused = {"statistics_sm90.cu", "grad_logits_sm90.cu"}
    # TMA asks for strides of 16 bytes; other layouts go by way of logits in memory.
    assert set(launches) == (fused if features % 8 == 0 else {"matmul_sm80.cu", "logp.cu"})


@pytest.mark.parametrize(("batch", "heads", "group"), [(1, 1, 1), (3, 2, 4), (2, 5, 3)])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 5000), (70, 4000), (300, 129), (5, 30_000)])
def test_every_launch_of_attention_adds_up(
    launches: list[str], batch: int, heads: int, group: int, queries: int, keys: int
) -> None:
    key = "TENSOR_CORE:mma"
    for head, values in ((8, 128), (64, 64), (128, 40)):
        q = torch.empty((batch, queries, heads, group, head), dtype=BF16).permute(0, 2, 3, 1, 4)
        cache = torch.empty((batch, keys + 5, heads, head + values), dtype=BF16).transpose(1, 2)
        k, v = cache[:, :, :keys, :head], cache[:, :, :keys, head:]
        for shared in (k, k[:1].expand(k.shape), k[:, :1].expand(k.shape)):
            assert attention_sm90.supports(q, shared, v, key)
        schedules = attention_sm90.schedules(-(-head // 16) * 16, -(-values // 16) * 16)
        for mask in (None, torch.empty((1, 1, 1, queries, 1), dtype=torch.bool)):
            mask = None if mask is None else mask.expand(*q.shape[:-1], keys)
            for s in (None, *schedules):
                out = attention_sm90.attention(q, k, v, mask, False, 0.5, key, schedule=s)
                assert out.shape == (*q.shape[:-1], values)
    assert set(launches) == {"attention_sm90.cu"}


@pytest.mark.parametrize(
    ("queries", "keys", "batch", "group", "pays"),
    [
        (512, 512, 8, 4, True),
        (1, 512, 1, 4, True),
        (1, 4096, 1, 4, False),  # a few queries over many keys
        (1, 4096, 64, 4, True),
        (8192, 8192, 1, 4, True),
        (16_384, 16_384, 1, 4, True),  # blocks of several tiles
    ],
)
def test_where_attention_without_scores_pays(
    launches: list[str], queries: int, keys: int, batch: int, group: int, pays: bool
) -> None:
    q, k = (torch.empty(s, dtype=BF16) for s in ((batch, 8, group, queries, 128), (batch, 8, keys, 128)))
    assert attention_sm90.pays(q, k) == pays


def test_what_attention_cannot_read_is_left_to_others(launches: list[str]) -> None:
    key = "TENSOR_CORE:mma"
    q, k = torch.empty((1, 2, 2, 9, 64), dtype=BF16), torch.empty((1, 2, 20, 64), dtype=BF16)
    assert attention_sm90.supports(q, k, k, key)
    for other in (
        (q.float(), k.float(), k.float(), key),
        (q, k.as_strided((1, 2, 20, 64), (0, 8, 8, 1)), k, key),  # rows overlap
        (q, k, k, "FMA:fma"),
        (q[..., :60], k[..., :60], k, key),
        (q, k, torch.empty((1, 2, 20, 136), dtype=BF16), key),
        (q, k.mT.contiguous().mT, k, key),
        (q, k, torch.empty(1 << 15, dtype=BF16)[1 : 20 * 128 + 1].view(1, 2, 20, 64), key),
        (q, k, k[:, :, :1].expand(k.shape), key),
        (q[:, :, :, :0], k, k, key),
    ):
        assert not attention_sm90.supports(*other)


def test_every_launch_of_reductions_adds_up(launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """And what runs a second time loads no other kernels, so that it can be captured then."""
    cases = list(reductions.reductions(thorough=False, fused=True))[::5]
    loaded, load = [], runtime.load
    monkeypatch.setattr(runtime, "load", lambda spec, device: loaded.append(spec) or load(spec, device))
    counts = []
    for _ in range(2):
        for call in reductions.calls(cases, reductions.on_cuda(fused=True), torch.device("cpu")):
            call()
        counts.append((len(set(loaded)), len(launches)))
    assert counts[1] == (counts[0][0], 2 * counts[0][1])
    fused = {"statistics_sm90.cu", "grad_logits_sm90.cu", "attention_sm90.cu"}
    assert set(launches) == {"rows.cu", "columns.cu", "logp.cu"} | fused


@pytest.mark.parametrize("thorough", [False, True])
def test_verify_runs_every_schedule_of_products(launches: list[str], thorough: bool) -> None:
    """In every layout, if a case has operands of it that the kernel takes."""
    todo = verify.cases(thorough)
    offered = [kernel for kernel in verify.kernels(0) if kernel.ahead]
    taken, tried = set(), set()
    for case, pairs in zip(todo, plan.runs(todo, offered, thorough), strict=True):
        operands = make_operands(case, torch.device("cpu"), unfilled)
        out = make_room(case, operands).out
        layout = case.layout if min(case.m, case.n, case.k) > 1 else "any"
        for kernel in offered:
            of = kernel.name, kernel.step, layout
            every = [s for s in kernel.schedules if kernel.step == case.step and (*of, s) not in tried]
            found = {(*of, s) for s in every if kernel.takes(operands, out, s)}
            taken |= found
            tried |= found & {(*of, s) for k, s in pairs if k is kernel}
    assert {of for of in taken if of[2] != "any"} <= tried
    assert {of[:2] for of in taken} == {(kernel.name, kernel.step) for kernel in offered}


def test_verify_runs_every_schedule_of_attention_with_every_mask(
    launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled for few heads, which have all the schedules there are; some blocks take several tiles."""
    on, load = reductions.on_cuda(fused=True), runtime.load
    taken: dict[object, set[tuple[object, ...]]] = {}
    several: set[object] = set()

    def noted(spec: runtime.KernelSpec, device: int) -> Any:
        of, kernel = dict(spec.constants), load(spec, device)
        taken.setdefault(of["MASK"], set()).add((of["WARPGROUPS"], of["STAGES"], of["HELD"]))

        def launch(grid: tuple[int, int, int], *values: Any) -> None:
            *_, tiles, _, _, _, _, _ = values  # the grid's cut, causal and scale come after it
            assert of["HELD"] == 0 or grid[0] == tiles
            if grid[0] < tiles:
                several.add((of["MASK"], of["WARPGROUPS"]))

        monkeypatch.setattr(kernel, "launch", launch)
        return kernel

    monkeypatch.setattr(runtime, "load", noted)
    cases = [c for c in reductions.reductions(thorough=False, fused=True) if c.values]
    for call in reductions.calls(cases, on, torch.device("cpu")):
        call()
    heads = itertools.product(range(16, 129, 16), repeat=2)
    every = {(s.warpgroups, s.stages, s.held) for of in heads for s in attention_sm90.schedules(*of)}
    assert taken == dict.fromkeys(("NONE", "BOOLEAN", "F32"), every)
    assert several == set(itertools.product(taken, (1, 2)))


@pytest.mark.parametrize(
    ("k", "sequences", "packed", "taken"),
    [
        (524_288, 65_536, True, True),
        (16, 2**30, False, True),
        (16, 2**31 - 2048, False, True),
        (17, 2**30 - 1024, False, True),
        (17, 2**30 - 1023, False, False),
        (2**30, 2**31 - 2048 - 2**26, True, True),
        (2**30, 2**31 - 2047 - 2**26, True, False),
    ],
)
def test_every_group_of_sequences_can_be_counted(
    k: int, sequences: int, packed: bool, taken: bool, launches: list[str]
) -> None:
    one, out = torch.ones((), dtype=BF16), torch.empty(1, 9, 8)
    bounds = torch.zeros((), dtype=torch.int32).expand(sequences + 1) if packed else None
    shape = (k,) if packed else (1, sequences, k)
    a, b = one.expand(*shape[:-1], 9, k), one.expand(*shape, 8)
    given = (a, b, out[0] if packed else out)
    if taken:
        assert matmul_sm80.plan(*given, cu_seqlens=bounds).sizes[2:4] == (k, sequences)
        return
    with pytest.raises(ValueError, match="has a size above"):
        matmul_sm80.plan(*given, cu_seqlens=bounds)


def test_sequences_too_long_for_one_axis_stay_apart(launches: list[str]) -> None:
    a, b = torch.ones((), dtype=BF16).expand(1, 2**20, 9, 4096), torch.ones(1, 1, 1, 8, dtype=BF16)
    b = b[..., :1].expand(1, 2**20, 4096, 8)
    assert matmul.addbmm(None, a, b, None, out_dtype=F32, contract="TENSOR_CORE:mma").shape == (1, 9, 8)
    assert launches == ["matmul_sm80.cu"]


def test_tiles_that_cannot_be_counted_are_refused(
    launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, out = (
        torch.empty(5, 200, 64, dtype=BF16),
        torch.empty(5, 64, 512, dtype=BF16),
        torch.empty(5, 200, 512),
    )
    matmul_sm90.plan(a, b, out)
    matmul_sm90._plan.cache_clear()
    monkeypatch.setattr(matmul_sm90, "LARGEST", 4)
    with pytest.raises(ValueError, match=r"5 products of \[200, 64\] by \[64, 512\] have more than 4 tiles"):
        matmul_sm90.plan(a, b, out)


def test_chains_of_no_element_are_rounded_without_a_launch() -> None:
    for shape in ((3, 0), (0, 4), (2, 0, 5)):
        assert matmul.rounded(torch.empty(shape), BF16).shape == shape


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
    assert matmul_fma_sm90._turned(x, -2, -1) is turned


def test_blocks_that_share_a_multiprocessor_are_counted() -> None:
    """Of 256 tiles three may meet on one of 132: four feeders with one tile at a time are faster."""
    best = min(matmul_fma_sm90.MANY, key=lambda s: s.time(256, 4096, 1, 132))
    assert (best.tile_m, best.tile_n, best.min_blocks) == (64, 64, 1)
    wide = min(matmul_fma_sm90.MANY, key=lambda s: s.time(2048, 4096, 1, 132))
    assert (wide.tile_m, wide.tile_n) == (128, 128)


@pytest.mark.parametrize(
    ("m", "n", "tile"),
    [(1, 256, (1, 32)), (1, 4096, (1, 32)), (8, 1024, (8, 8)), (16, 4096, (16, 32)), (128, 4096, (16, 128))],
)
def test_few_rows_of_fma_have_small_tiles(m: int, n: int, tile: tuple[int, int]) -> None:
    x, w = torch.empty(m, 64), torch.empty(n, 64)
    chosen = matmul_fma_sm90.choose_schedule(x, w.mT, 132)
    assert (chosen.tile_m, chosen.tile_n) == tile
    assert chosen in matmul_fma_sm90.FEW


@pytest.mark.parametrize(
    ("m", "n", "by_k", "few"),
    [
        (16, 4096, False, True),
        (17, 4096, False, False),  # four k are read at a time only where they lie side by side
        (256, 4096, True, True),
        (257, 4096, True, False),
        (512, 256, True, True),  # as few outputs
        (512, 256, False, False),
    ],
)
def test_which_products_of_fma_have_few_rows(m: int, n: int, by_k: bool, few: bool) -> None:
    weight = torch.empty(n, 64).mT if by_k else torch.empty(64, n)
    chosen = matmul_fma_sm90.choose_schedule(torch.empty(m, 64), weight, 132)
    assert chosen in (matmul_fma_sm90.FEW if few else matmul_fma_sm90.MANY)
