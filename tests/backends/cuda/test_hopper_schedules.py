"""Schedules of Hopper's tensor-core kernel without a GPU: they compile without spills, fit, and are known."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks import cubins
from samebits.backends.cuda.products import (
    choice_sm90,
    kinds_sm90,
    schedule_sm90,
    segmented_sm90,
    tensor_core_sm90,
)
from samebits.backends.cuda.products.gemm_sm90 import Gemm
from samebits.backends.product import Operands, Product
from tests.backends.cuda.test_product_schedules import BF16, F32, compiled_without_spills, needs_compiler
from tests.support.cubins import resources

LAYOUTS = list(itertools.product((False, True), repeat=2))
HOPPER_SMEM = 227 << 10


def test_outputs_that_tma_cannot_write_leave_in_panels_where_registers_suffice() -> None:
    def panel(block_n: int, **case: Any) -> int:
        s = schedule_sm90.Sm90Schedule(128, block_n, 64, 4, 2, 1)
        v = tensor_core_sm90.Sm90Variant(
            **{"dtype": BF16, "out_dtype": BF16, "a_mn": True, "b_mn": True} | case
        )
        constants = dict(tensor_core_sm90.spec(v, s).constants)
        assert constants["ALIGNED"] == v.aligned
        return int(constants["PANEL"])

    assert [panel(128), panel(160), panel(160, aligned=False)] == [64, 32, 0]
    assert [panel(128, aligned=False), panel(128, aligned=False, bias_dtype=BF16)] == [64, 0]
    assert panel(128, out_dtype=F32) == 0


def test_transposed_tiles_leave_in_panels_of_what_the_ring_leaves() -> None:
    """Not those of few columns, of one warpgroup or of segments, nor where TMA cannot write."""

    def panel(
        block_m: int, block_n: int, stages: int, warpgroups: int = 2, share: int = 2, **case: Any
    ) -> int:
        s = schedule_sm90.Sm90Schedule(block_m, block_n, 64, stages, warpgroups, share, swap=True)
        v = tensor_core_sm90.Sm90Variant(
            **{"dtype": BF16, "out_dtype": BF16, "a_mn": False, "b_mn": True} | case
        )
        spec = tensor_core_sm90.spec(v, s)
        assert spec.smem <= HOPPER_SMEM
        return int(dict(spec.constants)["PANEL"])

    assert [panel(256, 136, 4), panel(256, 136, 3), panel(256, 136, 2)] == [48, 136, 136]
    assert [panel(256, 192, 4), panel(256, 192, 3)] == [0, 96]
    assert [panel(192, 184, 4, 3, 3), panel(128, 160, 6, 2, 1)] == [48, 16]
    assert [panel(64, 136, 8, 1, 1), panel(128, 56, 8), panel(160, 136, 4)] == [0, 0, 0]
    assert panel(128, 64, 8) == 64
    two_blocks = schedule_sm90.Sm90Schedule(128, 72, 64, 4, 2, 2, blocks=2, swap=True)
    assert two_blocks.swapped_panel(False, False) == 16
    assert panel(256, 136, 4, bias_dtype=F32) == 48
    others = {"out_dtype": F32}, {"aligned": False}, {"segments": 8}
    assert [panel(256, 136, 4, **case) for case in others] == [0, 0, 0]


def fits_gpu(s: schedule_sm90.Sm90Schedule, a_mn: bool, b_mn: bool) -> bool:
    v = tensor_core_sm90.Sm90Variant(BF16, BF16, a_mn, b_mn)
    smem, panel = tensor_core_sm90.spec(v, s).smem, tensor_core_sm90.panel(v, s)
    fits = smem <= HOPPER_SMEM // s.blocks and s.fits(a_mn, b_mn)
    return s.stages >= 2 and fits and (panel >= 16 or not s.least_swapped_panels)


@pytest.mark.parametrize(("a_mn", "b_mn"), LAYOUTS)
def test_any_product_has_a_hopper_schedule_that_fits(a_mn: bool, b_mn: bool) -> None:
    sizes = (1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 100, 128, 129, 256, 1000, 4096, 100_000)
    for m, n, k, sms in itertools.product(sizes, sizes, (1, 16, 200, 4096), (114, 132)):
        s = choice_sm90.choose(Gemm(m, n, k, 1, a_mn, b_mn), sms)
        assert fits_gpu(s, a_mn, b_mn), (m, n, k, s)


@pytest.mark.parametrize(("a_mn", "b_mn"), LAYOUTS)
def test_the_hopper_catalogue_fits(a_mn: bool, b_mn: bool) -> None:
    found = kinds_sm90.catalogue(a_mn, b_mn)
    assert len(found) == len(set(found)) > 20
    for s in found:
        assert fits_gpu(s, a_mn, b_mn), s


SIZES = st.integers(0, 17).flatmap(lambda bits: st.integers(1, 1 << bits))


@pytest.mark.parametrize(("a_mn", "b_mn"), LAYOUTS)
@given(SIZES, SIZES, SIZES, st.integers(1, 4), st.sampled_from([58, 66, 78, 114, 132, 144]))
@example(1344, 496, 16, 1, 132)
@example(1030, 289, 16, 1, 66)
@example(564, 8192, 111_774, 1, 78)
@example(20, 16_000, 4096, 1, 132)
def test_what_is_chosen_is_in_the_hopper_catalogue(
    a_mn: bool, b_mn: bool, m: int, n: int, k: int, batch: int, sms: int
) -> None:
    chosen = choice_sm90.choose(Gemm(m, n, k, batch, a_mn, b_mn), sms)
    assert _kind(chosen) in {_kind(s) for s in kinds_sm90.catalogue(a_mn, b_mn)}


@pytest.mark.parametrize(("a_mn", "b_mn"), LAYOUTS)
@given(SIZES, SIZES, SIZES, st.sampled_from([2, 8, 64]), st.sampled_from([(BF16, None), (F32, BF16)]))
@example(3000, 8000, 8000, 8, (F32, None))
def test_what_is_chosen_for_segments_is_in_their_catalogue(
    a_mn: bool,
    b_mn: bool,
    m: int,
    n: int,
    k: int,
    segments: int,
    kinds: tuple[torch.dtype, torch.dtype | None],
) -> None:
    v = tensor_core_sm90.Sm90Variant(BF16, kinds[0], a_mn, b_mn, kinds[1])
    p, light = Gemm(m, n, k * segments, 1, a_mn, b_mn), kinds == (BF16, None)
    chosen = segmented_sm90.choose(p, 132, segments, light)
    assert _kind(chosen) in {_kind(s) for s in segmented_sm90.catalogue(v)}


def _kind(s: schedule_sm90.Sm90Schedule) -> schedule_sm90.Sm90Schedule:
    return replace(s, early=False, ahead=0, group=0)  # which take turns in the catalogue


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize(("a_mn", "b_mn"), LAYOUTS)
def test_hopper_tensor_core_compiles_without_spills(a_mn: bool, b_mn: bool, part: int) -> None:
    kernels = [*cubins.tensor_core_on_hopper([(a_mn, b_mn)])][part::4]
    assert kernels
    for spec, arch in kernels:
        compiled_without_spills(spec, arch)


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize(("a_mn", "b_mn"), LAYOUTS)
def test_hopper_segments_compile(a_mn: bool, b_mn: bool) -> None:
    """Some schedules keep two or three numbers in memory between segments, but never a sum."""
    cases = [case for case in cubins.EPILOGUES if not case.get("accumulate")]
    for i, case in enumerate(cases):
        v = tensor_core_sm90.Sm90Variant(**{"dtype": BF16, "a_mn": a_mn, "b_mn": b_mn, **case})
        for j, s in enumerate(segmented_sm90.catalogue(v)[i :: 6 * len(cases)]):
            of = replace(v, segments=(8, 16, 8, 2, 8, 4, 64)[(i + j) % 7])
            spec = segmented_sm90.segmented_spec(of, s)
            cubin = resources(spec, "sm_90a")
            assert cubin.local_bytes <= 16, spec
            assert not cubin.advice, spec


def test_tiles_that_cannot_be_counted_are_refused(
    launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = tensor_core_sm90.TENSOR_CORE_SM90
    a, b = torch.empty(5, 200, 64, dtype=BF16), torch.empty(5, 64, 512, dtype=BF16)
    p = Product.of(Operands(a, b, torch.empty(5, 200, 512)), "mma")
    small = replace(kernel.choose(p), block_m=1)
    kernel.plan(p, small)
    monkeypatch.setattr("samebits.backends.product.LARGEST", 600)
    with pytest.raises(ValueError, match=r"a product of a \(5, 200, 64\).* has a size above 600"):
        kernel.plan(p, small)
