"""What is chosen for 16-bit products on Hopper, as times on GPUs decided."""

from __future__ import annotations

import itertools
import math

import pytest

from samebits.backends.cuda.products import choice_sm90, kinds_sm90, segmented_sm90
from samebits.backends.cuda.products.gemm_sm90 import Gemm

LAYOUTS = list(itertools.product((False, True), repeat=2))


@pytest.mark.parametrize(
    ("m", "n", "k", "cluster", "group", "early"),
    [
        (2048, 256, 7168, 1, 2, False),  # all tiles at once: in squares
        (256, 4096, 4096, 1, 16, False),  # but where there are few rows of them
        (512, 4096, 4096, 1, 16, True),  # and tall ones start early
        (512, 8192, 8192, 2, 16, True),  # shared ones, too
        (8192, 8192, 8192, 1, 8, True),  # 2,048 rows of tiles together
        (16384, 4096, 4096, 2, 8, True),
        (8192, 8192, 4096, 2, 11, True),  # of 192 rows
    ],
)
def test_the_order_of_tiles(m: int, n: int, k: int, cluster: int, group: int, early: bool) -> None:
    chosen = choice_sm90.choose(Gemm(m, n, k), 132)
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
    chosen = choice_sm90.choose(Gemm(n, k, tokens, a_mn=True, b_mn=True), 132)
    assert (chosen.block_m, chosen.block_n) == tile


@pytest.mark.parametrize(
    ("n", "k", "terms", "tile", "group"),
    [
        (4096, 4095, 16, (128, 128), 2),
        (8192, 8192, 16, (128, 192), 2),  # larger tiles where many are written
        (4096, 4096, 512, (128, 128), 16),  # with more terms, writes are hidden
        (4096, 131072, 256, (128, 192), 16),  # b would not stay in L2
    ],
)
def test_gradients_that_are_bound_by_writes_leave_row_by_row(
    n: int, k: int, terms: int, tile: tuple[int, int], group: int
) -> None:
    chosen = choice_sm90.choose(Gemm(n, k, terms, a_mn=True, b_mn=True), 132)
    assert ((chosen.block_m, chosen.block_n), chosen.group) == (tile, group)


def test_gradients_of_few_rows_are_transposed() -> None:
    """Equal parts of the rows across, in squares of tiles, were fastest at 180 to 314 rows."""
    chosen = choice_sm90.choose(Gemm(320, 2048, 16384, b_mn=True), 132)
    assert (chosen.swap, chosen.block_m, chosen.block_n, chosen.group) == (True, 64, 80, 2)


@pytest.mark.parametrize(
    ("m", "n", "k", "b_mn", "early"),
    [
        (476, 7168, 5120, False, False),  # one tile for each block
        (300, 14336, 4096, False, False),  # two of the transpose
        (227, 16384, 106496, True, False),
        (372, 34816, 5120, False, True),  # more
        (1000, 4096, 4096, False, True),  # in clusters, which start together
        (600, 5120, 17920, True, False),  # more rows, transposed
        (4, 13312, 4096, True, False),  # two blocks on some multiprocessors
        (40, 16384, 4096, True, True),  # on nearly all
        (4, 14336, 4096, True, True),  # tiles of 128 columns, one on each
        (4, 17408, 4096, True, False),  # four on each
        (24, 5120, 65536, True, False),  # few blocks, not in pairs
    ],
)
def test_which_kernels_let_the_next_one_start(m: int, n: int, k: int, b_mn: bool, early: bool) -> None:
    assert choice_sm90.choose(Gemm(m, n, k, b_mn=b_mn), 132).early == early


def test_transposed_tiles_are_for_any_number_of_rows() -> None:
    """Above 512 rows they fill their waves, but for one kind up to a thousand."""
    found = {
        layout: [m for m in (129, 512, 513, 2040, 9000) if kinds_sm90._rows_across(gemm(m, layout), 132)]
        for layout in LAYOUTS
    }
    assert found[False, False] == found[False, True] == [129, 512, 513, 2040, 9000]
    assert found[True, False] == found[True, True] == []
    for m in (828, 1100, 1500, 5000):
        p, loose = gemm(m, (False, False)), set()
        for s in kinds_sm90._rows_across(p, 132):
            waves = s.tiles(p.swapped()) / 132
            if waves < 0.8 * math.ceil(waves):
                loose.add((s.block_m, s.share))
        assert loose == ({(128, 2)} if m < 1024 else set())


@pytest.mark.parametrize(
    ("m", "n", "k", "b_mn", "transposed", "tile", "cluster"),
    [
        (116, 17408, 5120, True, True, (192, 120), 1),  # 128 columns 11 % longer
        (318, 8192, 3072, True, True, (128, 160), 1),  # in pairs 1 %
        (414, 9728, 2560, True, True, (256, 144), 1),  # 192 x 88 9 %: eight tenths of a wave are enough
        (640, 8192, 28672, True, True, (256, 160), 2),
        (729, 1536, 24576, True, True, (64, 152), 1),  # 128 x 80 9 %
        (837, 3584, 37888, True, True, (128, 216), 1),  # 192 x 144 10 %
        (1175, 3584, 8192, True, True, (256, 136), 1),  # 128 x 136 9 %
        (
            1804,
            5376,
            43008,
            True,
            True,
            (256, 152),
            2,
        ),  # tiles of fixed sizes a sixth longer
        (2744, 2048, 8192, False, True, (256, 176), 2),  # 192 x 128 untransposed 9 %
        (8192, 4096, 14336, False, True, (256, 200), 1),  # 256 x 128 untransposed 5 %
        (16384, 4096, 14336, False, True, (256, 200), 2),  # 256 x 160 untransposed 5 %
        (2048, 4096, 24576, True, False, (128, 256), 2),  # transposed 2 %
        (3000, 8192, 28672, False, False, (256, 192), 2),  # transposed longer
        (3011, 8192, 3584, False, False, (256, 192), 2),  # transposed 2 %
    ],
)
def test_tiles_that_won_on_an_h200(
    m: int, n: int, k: int, b_mn: bool, transposed: bool, tile: tuple[int, int], cluster: int
) -> None:
    p = Gemm(m, n, k, b_mn=b_mn)
    chosen = choice_sm90.choose(p, 132)
    assert (chosen.swap, (chosen.block_m, chosen.block_n), chosen.cluster) == (transposed, tile, cluster)
    if m > 256 and transposed:
        tiles = chosen.tiles(p.swapped())
        assert tiles / 132 > 0.8 * -(-tiles // 132)


@pytest.mark.parametrize(
    ("m", "n", "k", "b_mn", "tile", "share", "cluster"),
    [
        (1725, 15168, 1088, False, (192, 176), 3, 2),
        (804, 18816, 2304, False, (128, 136), 1, 2),  # 192 columns take longer in turn
        (417, 3712, 1536, True, (128, 112), 2, 1),  # as do those of 64 columns with over 128 rows
        (200, 8192, 10240, True, (128, 104), 2, 1),  # 64 x 200 has no panels
        (692, 18112, 5440, False, (192, 176), 3, 1),  # pairs do not pay for one reason alone
        (2313, 9792, 2176, False, (128, 232), 2, 2),  # but for two
        (343, 13248, 9344, True, (128, 176), 1, 2),
        (32, 16000, 4096, True, (128, 32), 2, 1),  # one tile in place of two
        (33, 16000, 4096, True, (64, 48), 1, 1),
        (4, 14208, 4096, True, (64, 8), 1, 1),  # too few
    ],
)
def test_what_factors_of_transposed_tiles_decide(
    m: int, n: int, k: int, b_mn: bool, tile: tuple[int, int], share: int, cluster: int
) -> None:
    chosen = choice_sm90.choose(Gemm(m, n, k, b_mn=b_mn), 132)
    assert chosen.swap
    assert ((chosen.block_m, chosen.block_n), chosen.share, chosen.cluster) == (tile, share, cluster)


def test_tiles_of_128_columns_are_for_few_rows_of_one_matrix() -> None:
    def tall(n: int, batch: int = 1) -> bool:
        return any(s.block_m == 128 for s in kinds_sm90.kinds(Gemm(4, n, 4096, batch, b_mn=True), 132))

    assert [tall(n) for n in (14208, 14336, 16896, 17024)] == [False, True, True, False]
    assert not tall(192, batch=66)
    assert not tall(14336, batch=2)


def test_segments_come_in_pairs_where_tiles_are_many() -> None:
    def clusters(m: int, n: int, k: int) -> set[int]:
        found = segmented_sm90.candidates(Gemm(m, n, k), 132, light=True)
        return {s.cluster for s in found}

    assert clusters(1024, 4096, 8192) == {1}  # two tiles of 128 x 128 for each multiprocessor, or fewer
    assert clusters(4096, 4096, 8192) == {1, 2}
    assert clusters(1024, 4096, 131_072) == {1, 2}
    assert segmented_sm90.choose(Gemm(4096, 4096, 8192), 132, 8, light=True).cluster == 2
    # The last pair would have one column of tiles for itself.
    assert segmented_sm90.choose(Gemm(2048, 5248, 4096), 132, 8, light=True).cluster == 1


@pytest.mark.parametrize(
    ("m", "n", "k", "segments", "tile"),
    [
        (1024, 4096, 6144, 4, (128, 128, 6)),  # no sum waits in shared memory, so the ring has it all
        (2048, 4096, 4096, 8, (128, 128, 5)),  # one does
        (2048, 4096, 14336, 8, (128, 128, 5)),  # with a long k, too
        (1024, 3072, 4096, 8, (128, 96, 7)),  # all sums wait in registers
        (256, 4096, 2048, 4, (64, 128, 8)),
    ],
)
def test_rings_beside_sums_of_segments(
    m: int, n: int, k: int, segments: int, tile: tuple[int, int, int]
) -> None:
    """Each was the fastest of all candidates on an H200."""
    p = Gemm(m, n, k, out_bytes=2 if segments == 8 else 4)
    chosen = segmented_sm90.choose(p, 132, segments, light=segments == 8)
    assert (chosen.block_m, chosen.block_n, chosen.stages) == tile


def test_few_tiles_of_long_chains_are_narrow() -> None:
    """Chains are whole, so only more blocks end sooner."""
    chosen = choice_sm90.choose(Gemm(174, 1536, 24576, b_mn=True), 132)
    assert (chosen.block_m, chosen.block_n, chosen.swap) == (64, 48, True)


def test_gradients_of_few_rows_read_whole_lines() -> None:
    """Quarters of lines take up to twice as long, and tiles that read the same weights run side by side."""
    widths = {s.block_n for s in kinds_sm90.kinds(Gemm(102, 5120, 7168, b_mn=True), 132) if not s.swap}
    assert all(width % 32 == 0 for width in widths)
    assert choice_sm90.choose(Gemm(35, 1536, 24576, b_mn=True), 132).group == 2


def gemm(m: int, layout: tuple[bool, bool]) -> Gemm:
    return Gemm(m, 4096, 4096, 1, *layout)


def test_long_chains_of_few_hundred_rows_are_transposed_or_in_clusters() -> None:
    found = {(s.swap, s.cluster) for s in kinds_sm90.kinds(Gemm(423, 16384, 53248), 132)}
    assert found == {(True, 1), (True, 2), (False, 2)}


@pytest.mark.parametrize(
    ("n", "columns", "blocks"), [(5120, 64, 2), (8192, 64, 2), (1536, 32, 1), (13312, 64, 2), (14336, 128, 2)]
)
def test_rings_of_few_rows_leave_room_for_the_next_kernel(n: int, columns: int, blocks: int) -> None:
    """But not where there are few blocks, which need all of it. Fewer take half lines."""
    chosen = choice_sm90.choose(Gemm(4, n, 16384, b_mn=True), 132)
    assert (chosen.block_m, chosen.block_n, chosen.blocks) == (columns, 8, blocks)


def test_columns_of_32_are_for_gradients_of_inputs_that_leave_the_gpu_idle() -> None:
    def columns(m: int, n: int, batch: int = 1, a_mn: bool = False) -> set[int]:
        p = Gemm(m, n, 8192, batch, a_mn, b_mn=True)
        return {s.block_m for s in kinds_sm90.kinds(p, 132) if s.swap and s.block_m <= 64}

    assert columns(4, 2048) == {32, 64}
    assert columns(4, 2176) == columns(4, 128, batch=32) == columns(4, 448, a_mn=True) == {64}


def test_what_a_transposed_store_costs() -> None:
    """Results of 16 bits leave in pieces, where rows are whole units of 16 bytes; others one by one."""
    of_16_bits, of_odd_rows = (choice_sm90.choose(Gemm(600, n, 4096), 132) for n in (4096, 4095))
    assert (of_16_bits.swap, of_odd_rows.swap) == (True, False)


@pytest.mark.parametrize(("m", "n", "tile", "blocks"), [(48, 32768, (64, 48), 4), (91, 17408, (192, 96), 1)])
def test_gradients_run_at_once_where_they_fill_all_blocks(
    m: int, n: int, tile: tuple[int, int], blocks: int
) -> None:
    chosen = choice_sm90.choose(Gemm(m, n, 5120, b_mn=True), 132)
    assert ((chosen.block_m, chosen.block_n), chosen.blocks, chosen.early) == (tile, blocks, False)
