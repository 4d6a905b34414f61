"""How threads share rows: choices that were measured."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from samebits.backends.cuda import columns, devices, norm_gradients, rows

BF16 = torch.bfloat16


def test_a_warp_alone_takes_rows_in_its_own_way() -> None:
    norm, sums = (rows.choose(entry, 4096, 1024, BF16, True) for entry in ("rms_norm", "row_sum"))
    assert (norm.warps, norm.passes, norm.stages, norm.blocks) == (1, 2, 0, 4)
    assert (sums.warps, sums.passes, sums.blocks, sums.fetched) == (1, 2, 3, 1)
    for entry in ("rms_norm", "row_sum"):  # few rows, and rows that are not aligned, are taken as others
        assert rows.choose(entry, 16, 1024, BF16, True).fetched == 0
        assert rows.choose(entry, 4096, 1001, BF16, False).fetched == 0
    wide = rows.choose("rms_norm", 4096, 1024, BF16, True, wide=True)  # f32 takes more registers
    assert (wide.stages, wide.blocks) == (3, 3)


@pytest.mark.parametrize(("n", "lanes"), [(8, 8), (128, 8), (136, 16), (256, 16), (264, 0), (100, 0)])
def test_a_warp_takes_several_short_rows(n: int, lanes: int) -> None:
    for many in (1, 4096):
        assert rows.choose("add_rms_norm", many, n, BF16, True).lanes == lanes
        assert rows.choose("add_rms_norm", many, n, BF16, False).lanes == 0
        assert rows.choose("rms_norm", many, n, BF16, True).lanes == 0


def test_sums_take_long_unaligned_rows_in_pieces() -> None:
    of = rows.RowSchedule(2, 0, 1, blocks=4)
    assert rows.choose("row_sum", 4096, 5001, BF16, False) == of
    assert rows.choose("row_sum", 4096, 2049, BF16, False) == of
    for many, n, dtype in ((4096, 2047, BF16), (4096, 5001, torch.float32), (16, 5001, BF16)):
        assert rows.choose("row_sum", many, n, dtype, False).passes > 0


@pytest.mark.parametrize(
    ("n", "itemsize", "shares"),
    [
        (1024, 2, (16, 1, 2, 2, 1, 0, 3, 1)),
        (2056, 2, (16, 1, 2, 8, 1, 0, 4, 0)),
        (4096, 2, (16, 1, 2, 8, 1, 0, 4, 1)),
        (5120, 2, (64, 2, 4, 8, 2, 0, 3, 0)),
        (8192, 2, (32, 1, 2, 8, 2, 1, 4, 1)),
        (12288, 2, (64, 2, 4, 8, 4, 1, 3, 0)),
        (16384, 2, (128, 2, 4, 8, 4, 1, 3, 1)),
        (2048, 4, (8, 1, 2, 4, 1, 0, 3, 1)),
        (4096, 4, (16, 1, 2, 8, 1, 1, 3, 1)),
        (8192, 4, (32, 1, 2, 8, 2, 1, 3, 1)),
    ],
)
def test_gradients_of_a_norm_take_the_form_that_was_fastest(
    n: int, itemsize: int, shares: tuple[int, ...]
) -> None:
    assert norm_gradients.choose(n, itemsize) == shares


def test_rows_pass_through_shared_memory_beside_a_wide_weight() -> None:
    shares = norm_gradients.choose(5120, 2)
    of_half, of_f32 = (
        dict(norm_gradients.kernel_spec(BF16, param, BF16, shares).constants)
        for param in (BF16, torch.float32)
    )
    assert (of_half["STAGES"], of_f32["STAGES"]) == (0, 1)


@pytest.mark.parametrize(
    ("n", "shape"), [(1024, (8, 64)), (2048, (16, 64)), (4096, (32, 64)), (8192, (32, 32))]
)
def test_few_columns_have_a_multiprocessor_each(
    n: int, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    hopper = SimpleNamespace(max_smem=227 << 10, sm_count=132)
    monkeypatch.setattr(devices, "device_info", lambda device: hopper)
    assert columns._shape_of_block(n, 32, 0) == shape
