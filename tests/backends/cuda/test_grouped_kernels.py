"""Grouped products on CUDA: host code and compilation without a GPU, and every kernel on one."""

from __future__ import annotations

import importlib.util
import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import samebits
from samebits import TENSOR_CORE
from samebits.backends.cuda import grouped
from samebits.backends.cuda.products import fma, grouped_sm90, grouped_terms_sm90, tensor_core
from samebits.backends.cuda.products.gemm_sm90 import Gemm
from samebits.backends.cuda.products.grouped import balanced
from samebits.backends.cuda.products.plan import TileLayout
from samebits.backends.cuda.products.tensor_core_sm90 import Sm90Variant
from samebits.backends.grouped import GroupedOperands, GroupedProduct
from samebits.backends.reference import grouped as reference
from samebits.testing import assert_same_bits, values
from samebits.tools.verify import grouped as verification
from samebits.tools.verify.operands import unfilled
from samebits.tools.verify.report import Report
from tests.support import sanitize
from tests.support.cubins import resources
from tests.support.devices import FAMILY

BF16, F32 = torch.bfloat16, torch.float32
needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None, reason="cuda-core is not installed (samebits[cuda])"
)
K_VECTOR, ROW_VECTOR = TileLayout(True, True, (0, 0, 0, 1)), TileLayout(False, True, (0, 0, 1, 0))
K_GATHER, ROW_GATHER = (x._replace(vector=False) for x in (K_VECTOR, ROW_VECTOR))
FORMS = [
    ("OF_ROWS", K_VECTOR, K_VECTOR),
    ("OF_ROWS", K_VECTOR, ROW_VECTOR),
    ("OF_ROWS", ROW_GATHER, K_GATHER),
    ("OF_TERMS", ROW_VECTOR, ROW_VECTOR),
    ("OF_TERMS", K_GATHER, ROW_GATHER),
]


@needs_compiler
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120a"])
def test_runs_compile(arch: str) -> None:
    assert resources(grouped.RUNS, arch).local_bytes == 0


SIZES = [
    (m, n, terms, groups)
    for m, n in ((64, 7168), (768, 2048), (4096, 28672))
    for terms in (1, 64, 512)
    for groups in (1, 128)
]


@pytest.mark.parametrize(("m", "n", "terms", "groups"), SIZES)
def test_groups_of_sequences_have_a_hopper_schedule_that_fits(
    m: int, n: int, terms: int, groups: int
) -> None:
    g = Gemm(m, n, terms, groups, True, True)
    s = grouped_sm90.for_sequences(grouped_sm90.chosen(g, 132, True), g)
    assert s.share in (1, s.warpgroups)
    assert s.stages >= 2
    assert s.fits(True, True)


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize(("b_mn", "bound"), [(False, None), (True, None), (True, torch.int32)])
def test_hopper_compiles(b_mn: bool, bound: torch.dtype | None) -> None:
    """Some kinds of schedule for each form."""
    a_mn = bound is not None
    v = Sm90Variant(BF16, BF16, a_mn, b_mn, cu_seqlens_dtype=bound)
    kinds = [s for s in grouped_sm90.GROUPED_SM90.catalogue if s.fits(a_mn, b_mn) and not (a_mn and s.swap)]
    short = [s for s in kinds if s.block_k < 64]
    assert bool(short) == a_mn
    for s in {*short[::5], *kinds[::7]}:
        spec = grouped_sm90.spec(v, grouped_sm90.with_table(s, v, 128), 128)
        assert resources(spec, "sm_90a").local_bytes == 0, s


@needs_compiler
@pytest.mark.parametrize("out", [BF16, F32])
@pytest.mark.parametrize("schedule", grouped_terms_sm90.GROUPED_TERMS_SM90.catalogue, ids=str)
def test_steps_of_sequences_compile(schedule: Any, out: torch.dtype) -> None:
    v = Sm90Variant(BF16, out, True, True)
    of = grouped_terms_sm90.spec(v, grouped_terms_sm90.with_table(schedule, 128), 128)
    assert resources(of, "sm_90a").local_bytes == 0


@needs_compiler
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120a"])
@pytest.mark.parametrize("schedule", [tensor_core.SCHEDULES[1], tensor_core.SCHEDULES[3]], ids=str)
@pytest.mark.parametrize(("form", "a", "b"), FORMS)
def test_tensor_core_compiles(schedule: Any, arch: str, form: str, a: TileLayout, b: TileLayout) -> None:
    """A few registers may be spilled around the loop: the largest tiles have none left for a group."""
    cubin = resources(tensor_core.kernel_spec(schedule, BF16, a, b, form), arch)
    assert cubin.spill_bytes <= 32
    assert cubin.registers * schedule.threads * schedule.min_blocks <= 65536


@needs_compiler
@pytest.mark.parametrize("schedule", [fma.SCHEDULES[1], fma.SCHEDULES[5]], ids=str)
@pytest.mark.parametrize(("form", "a", "b"), FORMS)
def test_fma_compiles(schedule: Any, form: str, a: TileLayout, b: TileLayout) -> None:
    spec = fma.kernel_spec(schedule, (F32, F32, F32), a, b, form == "OF_TERMS", form)
    assert resources(spec, "sm_90a").spill_bytes == 0


def test_no_group_is_cut_into_more_tiles_than_there_are_blocks() -> None:
    offs = torch.zeros(5, dtype=torch.int32)
    for rows, tile in itertools.product((1, 2, 7, 16, 33), (1, 4, 16)):
        a, b = torch.empty(rows, 8, dtype=BF16), torch.empty(5, 8, 3, dtype=BF16)
        p = GroupedProduct.of(GroupedOperands(a, b, torch.empty(rows, 3), offs), "mma")
        r = torch.Generator().manual_seed(rows)
        for _ in range(200):
            ends = torch.randint(0, rows + 1, (5,), generator=r).sort().values.tolist()
            bounds = [0, *ends, rows]
            tiles = sum(-(-(j - i) // tile) for i, j in itertools.pairwise(bounds))
            assert tiles <= p.most_tiles(tile)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(
    ("rows", "groups", "k", "n"), [(8, 128, 64, 48), (300, 4, 33, 20), (0, 3, 8, 8), (5, 2, 0, 8)]
)
def test_launches_add_up(
    launches: list[Any], dtype: torch.dtype, rows: int, groups: int, k: int, n: int
) -> None:
    key = "TENSOR_CORE:mma" if dtype == BF16 else "FMA:fma"
    x, weight = torch.empty(rows, k, dtype=dtype), torch.empty(groups, n, k, dtype=dtype)
    offs, bias = torch.zeros(groups, dtype=torch.int32), torch.empty(groups, n, dtype=dtype)
    sequences = torch.zeros(rows, dtype=torch.int32)
    out = grouped.grouped_rows(x, weight.mT, offs, bias=bias, out_dtype=F32, contract=key)
    assert (out.shape, out.dtype) == ((rows, n), F32)
    dx = grouped.grouped_rows(out.to(dtype), weight, offs, bias=None, out_dtype=dtype, contract=key)
    assert dx.shape == x.shape
    columns = grouped.grouped_rows(
        x.mT.contiguous().mT, weight.mT, offs, bias=None, out_dtype=dtype, contract=key
    )
    assert columns.shape == out.shape
    for of_rows in (None, sequences):
        dw = grouped.grouped_terms(out.to(dtype).mT, x, offs, of_rows, out_dtype=dtype, contract=key)
        assert (dw.shape, dw.dtype) == ((groups, n, k), dtype)
        acc = torch.zeros(groups, n, k)
        for into, a, b in ((acc, out.to(dtype).mT, x), (acc.mT, x.mT, out.to(dtype))):
            grouped.grouped_terms_later(into, a, b, offs, of_rows, contract=key)()
    names = {str(launch) for launch in launches}
    assert names <= {"tensor_core.cu", "fma.cu", "grouped_runs.cu", "grouped_sm90.cu"}
    assert "grouped_runs.cu" in names or groups == 0


def test_schedules_are_chosen_for_the_rows_of_a_group() -> None:
    offs = torch.zeros(128, dtype=torch.int32)
    x, weight = torch.empty(512, 64, dtype=BF16), torch.empty(128, 32, 64, dtype=BF16)
    p = GroupedProduct.of(GroupedOperands(x, weight.mT, torch.empty(512, 32), offs), "mma")
    assert balanced(p)[1:] == (4, 32, 64, 128)
    p = GroupedProduct.of(GroupedOperands(x.mT, x, torch.empty(128, 64, 64), offs), "mma")
    assert balanced(p)[1:] == (64, 64, 4, 128)


def of_terms(
    rows: int, groups: int, m: int = 256, n: int = 192, *, sequences: bool = True, dtype: torch.dtype = BF16
) -> GroupedProduct:
    a, b = torch.empty(rows, m, dtype=dtype).mT, torch.empty(rows, n, dtype=dtype)
    out, offs = torch.empty(groups, m, n, dtype=dtype), torch.zeros(groups, dtype=torch.int32)
    runs = torch.empty(rows + 2 * groups, dtype=torch.int32) if sequences else None
    return GroupedProduct.of(GroupedOperands(a, b, out, offs, runs=runs), "mma" if dtype != F32 else "fma")


@pytest.mark.parametrize(
    ("p", "name", "tile"),
    [
        (of_terms(64 * 8, 8), "grouped_sm90", None),
        (of_terms(99 * 8, 8), "grouped_sm90", None),
        (of_terms(100 * 8, 8), "grouped_terms_sm90", (128, 192)),
        (of_terms(299 * 8, 8), "grouped_terms_sm90", (128, 192)),
        (of_terms(300 * 8, 8), "grouped_terms_sm90", (256, 192)),
        (of_terms(300 * 8, 8, sequences=False), "grouped_sm90", None),
        (of_terms(300 * 8, 8, m=264), "grouped_sm90", None),
        (of_terms(300 * 8, 8, n=200), "grouped_sm90", None),
        (of_terms(300 * 8, 8, n=201), "grouped_tensor_core", None),
        (of_terms(300 * 8, 8, dtype=F32), "grouped_fma", None),
    ],
    ids=str,
)
def test_which_kernel_sums_over_rows(
    launches: list[Any], p: GroupedProduct, name: str, tile: tuple[int, int] | None
) -> None:
    kernel, schedule = grouped.chosen(p)
    assert (kernel.name, schedule) == (name, None)
    if tile:
        s = kernel.choose(p)
        assert (s.block_m, s.block_n) == tile
        assert s in kernel.catalogue


def test_what_is_chosen_is_in_the_catalogue() -> None:
    """Random groups: what ``verify`` runs is all that can be chosen."""
    rng, kinds = random.Random(1), grouped_sm90.GROUPED_SM90.kinds
    for _ in range(400):
        m, n, k, groups = (int(2 ** rng.uniform(*ends)) for ends in ((0, 13), (3, 15), (5, 15), (0, 9)))
        a_mn, b_mn = rng.choice(((False, False), (False, True), (True, True)))
        g = Gemm(m, n, k, groups, a_mn, b_mn)
        s = grouped_sm90.chosen(g, rng.choice((78, 114, 132)), a_mn)
        for schedule in (s, grouped_sm90.for_sequences(s, g)) if a_mn else (s,):
            assert grouped_sm90.kind(schedule) in kinds, (g, schedule)


@pytest.mark.parametrize(
    "cases", [verification.grouped_cases(False)[::3], sanitize.GROUPED[::3]], ids=["verify", "sanitizer"]
)
def test_every_kernel_is_verified(launches: list[Any], cases: list[verification.GroupedCase]) -> None:
    met = set()
    for case in cases:
        x = verification.make(case, torch.device("cpu"), unfilled)
        p = GroupedProduct.of(verification.into(x, verification.room(case, x)[0]), case.step)
        met |= {kernel.name for kernel in grouped.GROUPED if kernel.supports(p)}
    assert met == {kernel.name for kernel in grouped.GROUPED}


@pytest.mark.parametrize("kernel", grouped.GROUPED, ids=lambda kernel: kernel.name)
def test_verify_runs_every_schedule(kernel: Any, launches: list[Any]) -> None:
    """In each layout that takes it."""
    cases, cpu = verification.grouped_cases(False), torch.device("cpu")
    products = [verification.unfilled_product(case, cpu) for case in cases]
    run, taken = set(), set()
    for p, some in zip(products, verification.tried(kernel, products, False), strict=True):
        layout = p.a.strides[-1] == 1, p.b.strides[-1] == 1, p.of_terms
        assert (None in some) == kernel.supports(p)
        run |= {(layout, s) for s in some if s}
        taken |= {(layout, s) for s in kernel.all(p)} if kernel.supports(p) else set()
    assert run == taken


def test_public_gradients_reach_every_tile_of_sequences(launches: list[Any]) -> None:
    found = []
    for experts, k, n, tokens, _ in verification.EXPERTS:
        kernel, _ = grouped.chosen(p := of_terms(tokens, experts, n, k))
        if kernel.name == "grouped_terms_sm90":
            found.append(kernel.choose(p))
    assert {(s.block_m, s.block_n) for s in found} == {(128, 192), (256, 192)}


def test_steps_of_sequences_launch(launches: list[Any]) -> None:
    """Through the public entry, with both outputs, and transposed where the output is."""
    key, offs = "TENSOR_CORE:mma", torch.zeros(4, dtype=torch.int32)
    a, b = torch.empty(2000, 256, dtype=BF16), torch.empty(2000, 192, dtype=BF16)
    sequences, acc = torch.zeros(2000, dtype=torch.int32), torch.zeros(4, 256, 192)
    grouped.grouped_terms(a.mT, b, offs, sequences, out_dtype=BF16, contract=key)
    grouped.grouped_terms_later(acc, a.mT, b, offs, sequences, contract=key)()
    grouped.grouped_terms_later(acc.mT, b.mT, a, offs, sequences, contract=key)()
    assert [str(x) for x in launches] == ["grouped_runs.cu", "grouped_terms_sm90.cu"] * 3


# On a GPU.


@pytest.mark.gpu
def test_every_kernel_under_its_schedules() -> None:
    report = Report("", "", "", "", {}, False)
    device = torch.device("cuda", torch.cuda.current_device())
    cases = verification.grouped_cases(False)[::3]
    verification.verify_grouped(report, cases, TENSOR_CORE.on(FAMILY), device, False)
    assert report.compared > 0
    assert report.differing == 0, report.first


@pytest.mark.gpu
@pytest.mark.parametrize("b_mn", [False, True])
def test_panels_of_large_groups(b_mn: bool) -> None:
    """Groups of less than a panel of tiles, of whole panels, and of some and a rest."""
    rows, n, k = 2000, 648, 80
    a, b = (values("normal", s, BF16, i, "cuda") for i, s in enumerate(((rows, k), (4, k, n))))
    b = b if b_mn else b.mT.contiguous().mT
    offs = torch.tensor([60, 1084, 1084, 1990], dtype=torch.int32, device="cuda")
    out = torch.empty(rows, n, dtype=BF16, device="cuda")
    x = GroupedOperands(a, b, out, offs)
    kernel, p = grouped_sm90.GROUPED_SM90, GroupedProduct.of(x, "mma")
    if not kernel.supports(p):
        pytest.skip("not on this GPU")
    key = TENSOR_CORE.on(FAMILY).key
    want = reference.grouped_rows(a.cpu(), b.cpu(), offs.cpu(), bias=None, out_dtype=BF16, contract=key)
    for schedule, group in itertools.product(kernel.all(p)[::3], (1, 2, 3, 7, 16)):
        s = replace(schedule, group=group)
        out.fill_(torch.nan)
        kernel.plan(p, s).run(x)
        assert_same_bits(out, want.cuda(), str(s))


@pytest.mark.gpu
def test_experts_beside_linear() -> None:
    report = Report("", "", "", "", {}, False)
    verification.verify_experts(report, torch.device("cuda", torch.cuda.current_device()))
    assert report.differing == 0, report.first


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_a_graph_replays_other_offsets(dtype: torch.dtype) -> None:
    """Nothing of the offsets is on the host: a captured layer computes other groups, and their gradients."""
    x, weight = (values("normal", s, dtype, i, "cuda") for i, s in enumerate(((300, 72), (6, 40, 72))))
    grad = values("normal", (300, 40), dtype, 2, "cuda")
    offs, numbers = (
        torch.full((6,), 300, dtype=torch.int32, device="cuda"),
        torch.zeros_like(x[:, 0], dtype=torch.int32),
    )
    leaves = [t.requires_grad_() for t in (x, weight)]

    def run() -> list[Tensor]:
        y = samebits.grouped_mm(x, weight.mT, offs, sequences=numbers)
        return [y.detach(), *torch.autograd.grad(y, leaves, grad)]

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for ends in ([0, 0, 3, 150, 151, 290], [50, 100, 150, 200, 250, 300], [0] * 6):
        offs.copy_(torch.tensor(ends, dtype=torch.int32))
        numbers.copy_(torch.arange(300, dtype=torch.int32) // 21)
        graph.replay()
        found = [t.clone() for t in captured]
        for got, want in zip(found, run(), strict=True):
            assert_same_bits(got, want)


@pytest.mark.gpu
def test_no_wait() -> None:
    """Neither the forward nor the backward waits for the GPU."""
    x, weight = (
        values("normal", s, BF16, i, "cuda").requires_grad_() for i, s in enumerate(((64, 72), (6, 40, 72)))
    )
    offs = torch.tensor([1, 2, 3, 40, 50, 64], dtype=torch.int32, device="cuda")
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            samebits.grouped_mm(x, weight.mT, offs, sequences=offs.repeat(11)[:64]).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


BAD = """
import sys, torch, samebits
offs = torch.tensor(eval(sys.argv[1]), dtype=torch.int32, device="cuda")
x = torch.ones(8, 16, dtype=torch.bfloat16, device="cuda")
try:
    if sys.argv[2] == "rows":
        samebits.grouped_mm(x, torch.ones(3, 16, 4, dtype=torch.bfloat16, device="cuda"), offs)
    else:
        samebits.grouped_mm(x.mT, x, offs)
    torch.cuda.synchronize()
except Exception as error:
    print("refused:", error)
"""


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["rows", "terms"])
@pytest.mark.parametrize("offs", ["[0, 3, 9]", "[-1, 3, 8]", "[5, 3, 8]"])
def test_bad_offsets_end_in_an_error_of_the_device(offs: str, form: str) -> None:
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-c", BAD, offs, form], capture_output=True, text=True, check=False
    )
    assert "refused:" in done.stdout, done.stdout + done.stderr
    said = done.stdout + done.stderr  # an assertion, or on Hopper a trap
    assert "device-side assert" in said or "unspecified launch failure" in said
