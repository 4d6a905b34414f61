"""``samebits export``: what it compiles, writes and says. The machine code is real for two kernels alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from native.tests import support
from samebits.backends.cuda import devices, logp, matmul, tuned
from samebits.backends.cuda.products.tensor_core_sm90 import TENSOR_CORE_SM90
from samebits.backends.cuda.shapes import ProductShape
from samebits.tools.cli import app
from samebits.tools.tune.families import product
from samebits_native.export import command
from samebits_native.export.choices import ROWS, SHAPES, Sizes, layout_tables, statistics
from samebits_native.export.kernels import build


@pytest.mark.long
def test_the_command_writes_an_archive_for_each_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def fake_build(arch: str, dtypes: list[object], ops: tuple[str, ...], sizes: Sizes) -> object:
        made.append((arch, len(dtypes), tuple(ops), tuple(sizes.shapes), tuple(sizes.heads)))
        return build(arch, dtypes, ops, support.TINY)

    monkeypatch.setattr(command, "build", fake_build)
    monkeypatch.setattr(command, "compile_all", lambda specs, arch, say: [bytes(16)] * len(specs))
    options = [
        "--arch",
        "sm_90a",
        "--arch",
        "sm_80",
        "--dtype",
        "bf16",
        "--op",
        "gemm",
        "--shape",
        "64x128",
        "--head",
        "80",
    ]
    done = CliRunner().invoke(app, ["export", *options, str(tmp_path / "kernels")])
    assert done.exit_code == 0, done.output
    assert made == [(arch, 1, ("gemm",), ((64, 128),), ((80, 80),)) for arch in ("sm_90a", "sm_80")]
    files = sorted((tmp_path / "kernels").iterdir())
    assert [file.name for file in files] == ["sm_80.samebits", "sm_90a.samebits"]
    assert all(file.read_bytes().startswith(b"samebits") for file in files)
    assert "contracts: bf16 90be31343eee710b" in " ".join(done.output.split())


def test_a_wrong_option_is_exit_code_two(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["export", "--arch", "sm_1", str(tmp_path)])
    assert done.exit_code == 2


def test_kernels_are_compiled_for_their_architecture() -> None:
    pytest.importorskip("cuda.core")
    specs = [logp.kernel_spec("combine", entropy=entropy) for entropy in (False, True)]
    codes = command.compile_all(specs, "sm_80")
    assert [code[:4] for code in codes] == [b"\x7fELF"] * 2
    assert codes[0] != codes[1]


def test_the_choice_for_log_probabilities_is_exact() -> None:
    from samebits.backends.cuda import linear_logp_sm90

    found = statistics()
    rows, words, _ = found.bounds
    for tokens in (1, 8, 9, 63, 64, 65, 256, 257, 5000):
        for vocabulary in (*range(1, 2500, 7), 50257, 151_936):
            i = next((i for i, end in enumerate(rows) if tokens <= end), len(rows) - 1)
            j = next(j for j, end in enumerate(words) if vocabulary <= end)
            want = linear_logp_sm90.choose("statistics_sm90", tokens, vocabulary)
            assert found.cells[i * len(words) + j] == want, (tokens, vocabulary)


@pytest.mark.long
def test_few_kernels_serve_all_sizes() -> None:
    """So that an archive stays small, though its tables have a cell for each range of sizes."""
    kernels = {}
    for layout, output, batched, table in layout_tables(support.SMALL._replace(more=True), 132):
        used = {(layout[:2], output, s.block_m, s.block_n, s.block_k, s.cluster) for s in table.cells}
        kernels[layout[:2], output, batched] = len(used)
    assert max(kernels.values()) <= 3 * len(support.SMALL.rows)
    assert len(SHAPES) * len(ROWS) > 300


@pytest.mark.long
def test_a_tuned_table_goes_before_the_cost_model(tmp_path: Path) -> None:
    device = devices.describe("NVIDIA H200", (9, 0), 132, 227 << 10)
    m, (k, n) = support.SMALL.rows[-1], support.SMALL.shapes[0]
    forward = ProductShape("mma", "bfloat16", "bfloat16", "bfloat16", m, n, k)
    dW = ProductShape(
        "mma", *("bfloat16", "bfloat16", "float32"), n, k, 512, 1, False, False, accumulate=True
    )
    sizes = support.SMALL._replace(rows=(m, 512), shapes=support.SMALL.shapes[:1])
    entries = {}
    for shape in (forward, dW):
        p = product(shape, device)
        other = [s for _, s in matmul.ways(p) if s != TENSOR_CORE_SM90.choose(p)][-1]
        entries[shape] = tuned.Entry("tensor_core_sm90", tuned.schedule_data(other), 1.0, 2.0)
    tuned.write(tmp_path / "t.json", tuned.Table("NVIDIA H200", entries))
    before = {found[:3]: found[3].cells for found in layout_tables(sizes, 132, device)}
    try:
        assert tuned.load_tuned(tmp_path / "t.json") == 2
        after = {found[:3]: found[3] for found in layout_tables(sizes, 132, device)}
    finally:
        tuned.load_tuned(None)
    for key, table in after.items():
        data = [tuned.schedule_data(s) for s in table.cells]
        for shape, entry in entries.items():
            mine = (key[0].a_mn, key[0].b_mn, key[1]) == (
                not shape.a_by_k,
                not shape.b_by_k,
                2 * shape.accumulate,
            )
            if mine and not key[2]:
                rows, columns, terms = table.bounds
                at = (rows.index(shape.m) * len(columns) + columns.index(shape.n)) * len(terms) + terms.index(
                    shape.k
                )
                assert data[at] == entry.schedule
                assert before[key][at] != table.cells[at]
