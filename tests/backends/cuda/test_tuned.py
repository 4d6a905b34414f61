"""Tables of tuned schedules: files, look-up, plans; and bits, which no table changes."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import samebits
from samebits.backends import replay
from samebits.backends.cuda import compiler, devices, grouped, linear_logp_sm90, matmul, shapes, tuned
from samebits.backends.cuda.plans import forget_plans
from samebits.backends.cuda.shapes import AttentionShape, GroupedShape, LogpShape, ProductShape
from samebits.backends.cuda.tuned import Entry, Table, TunedError, schedule_data
from samebits.backends.product import Operands, Product
from samebits.backends.token_logps import Rows
from samebits.testing import assert_same_bits
from samebits.tools.shapes import read_shapes
from samebits.tools.tune import Outcome, contest, families
from samebits.tools.tune.families import product
from tests.support.fake_gpu import INFO, FakeGpu, fake_gpu

BF16 = torch.bfloat16
SHAPE = ProductShape("mma", "bfloat16", "bfloat16", "bfloat16", 48, 256, 128)


@pytest.fixture(autouse=True)
def _no_table() -> Iterator[None]:
    yield
    samebits.load_tuned(None)


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    with fake_gpu() as found:
        yield found


def entry(shape: ProductShape = SHAPE, place: int = 1, device: int = 0) -> Entry:
    """An entry with another schedule than the cost model's."""
    p = product(shape, device)
    kernel, choice = matmul.fastest(p), matmul.fastest(p).choose(p)
    other = [s for s in kernel.candidates(p) if s != choice][place]
    return Entry(kernel.name, schedule_data(other), 5.0, 6.0)


def written(path: Path, entries: dict[Any, Entry], name: str = INFO.name) -> Path:
    tuned.write(path, Table(name, entries))
    return path


def multiply(shape: ProductShape = SHAPE) -> torch.Tensor:
    x, w = torch.zeros(shape.m, shape.k, dtype=BF16), torch.zeros(shape.n, shape.k, dtype=BF16)
    return samebits.matmul(x, w.mT)


def constants(gpu: FakeGpu) -> list[dict[str, Any]]:
    return [dict(spec.constants) for spec in gpu.specs]


@pytest.mark.usefixtures("gpu")
def test_a_file_has_what_was_written(tmp_path: Path) -> None:
    dW = replace(SHAPE, a_by_k=False, b_by_k=False)
    entries = {SHAPE: entry(), dW: Entry("tensor_core_sm90", None, 7.0, 7.0)}
    path = written(tmp_path / "folder" / "table.json", entries)
    assert tuned.read(path).entries == entries
    assert len(path.read_text().splitlines()) == 4  # one for each entry
    assert shapes.from_data(shapes.as_data(dW)) == dW


def warned(run: Callable[[], object]) -> str:
    """The one warning of `run`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    (one,) = caught
    assert one.category is RuntimeWarning
    return str(one.message)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text[: len(text) // 2], "it is damaged"),
        (lambda text: "", "it is damaged"),
        (lambda text: "[" * 200_000, "it is damaged"),
        (lambda text: "[1]", "it is no table of format 1"),
        (lambda text: text.replace('"format": 1', '"format": 2'), "it is no table of format 1"),
        (lambda text: text.replace('"m": 48', '"m": "48"'), "product: m: got '48'"),
        (lambda text: text.replace('"m": 48, ', ""), "expected all of its sizes"),
        (lambda text: text.replace('"m": 48', '"m": 1e99'), "product: m: got "),
        (lambda text: text.replace('"op": "product"', '"op": "sum"'), "expected a shape of product"),
        (lambda text: text.replace('"us": 5.0', '"us": -1'), "the entry of"),
        (lambda text: text.replace('"us": 5.0', '"us": NaN'), "the entry of"),
        (lambda text: text.replace('"gpu"', '"cpu"'), "expected gpu, kernels and entries"),
    ],
)
def test_a_damaged_file_is_ignored_with_one_warning(tmp_path: Path, change: Any, says: str) -> None:
    path = written(tmp_path / "t.json", {SHAPE: entry()})
    path.write_text(change(path.read_text()))

    def use() -> None:
        assert samebits.load_tuned(path) == 0
        multiply()
        multiply()

    said = warned(use)
    assert f"the tuned table {path} is ignored: " in said
    assert says in said
    with pytest.raises(TunedError):
        tuned.read(path)


@pytest.mark.usefixtures("gpu")
def test_a_missing_file_and_one_for_another_gpu(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match=r"absent\.json is ignored: No such file"):
        assert samebits.load_tuned(tmp_path / "absent.json") == 0
    with pytest.warns(RuntimeWarning, match=r"~nobody here/t\.json is ignored: No such file"):
        assert samebits.load_tuned("~nobody here/t.json") == 0
    samebits.load_tuned(written(tmp_path / "t.json", {SHAPE: entry()}, "NVIDIA H100"))
    said = warned(lambda: (multiply(), multiply(replace(SHAPE, m=64))))
    assert "it is for NVIDIA H100, and this is NVIDIA H200" in said
    with pytest.raises(TypeError, match=r"load_tuned: path: expected a path or None, got int"):
        samebits.load_tuned(3)  # type: ignore[arg-type]


def test_a_table_in_the_home_folder(tmp_path: Path, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    written(tmp_path / "t.json", {SHAPE: entry()})
    assert samebits.load_tuned("~/t.json") == 1


def test_an_entry_of_a_kernel_with_a_long_name_is_stale(tmp_path: Path) -> None:
    path = written(tmp_path / "t.json", {SHAPE: Entry("é" * 5000, None, 1.0, 1.0)})
    assert tuned.read(path).stale == 1


def test_entries_of_other_kernels_are_stale(tmp_path: Path, gpu: FakeGpu) -> None:
    other = replace(SHAPE, m=64)
    path = written(tmp_path / "t.json", {SHAPE: entry(), other: Entry("fma", None, 1.0, 1.0)})
    data = json.loads(path.read_text())
    data["kernels"]["tensor_core_sm90"] = "0" * 16
    path.write_text(json.dumps(data))
    with pytest.warns(RuntimeWarning, match=r"\(1 of its entries\) is ignored: .*other versions"):
        assert samebits.load_tuned(path) == 1
    want = constants(gpu)
    multiply()
    assert constants(gpu) != want
    data["kernels"]["fma"] = "0" * 16
    path.write_text(json.dumps(data))
    with pytest.warns(RuntimeWarning, match=r"t\.json is ignored: it is of other versions"):
        assert samebits.load_tuned(path) == 0


def test_a_version_is_that_of_all_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {k.name: tuned.version(k.name) for k in matmul.PRODUCTS}
    assert before.pop("tail_sm90") == before["tensor_core_sm90"]  # launched twice
    assert len({*before.values()}) == len(before)
    assert tuned.version("no_such_kernel") == tuned.version("../compiler") == ""
    include = tmp_path / "include"
    include.mkdir()
    for path in compiler.KERNELS.glob("*.cu"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    for path in compiler.INCLUDE.glob("*.cuh"):
        (include / path.name).write_bytes(path.read_bytes() + b"//" * (path.name == "wgmma_sm90.cuh"))
    monkeypatch.setattr(compiler, "KERNELS", tmp_path)
    monkeypatch.setattr(compiler, "INCLUDE", include)
    changed = {name for name, was in before.items() if tuned.version.__wrapped__(name) != was}
    assert changed == {"tensor_core_sm90", "padded_sm90"}


def test_a_table_decides_on_a_plan_and_is_forgotten(tmp_path: Path, gpu: FakeGpu) -> None:
    for _ in range(4):  # replayed from the third on
        multiply()
    (untuned,) = {str(c) for c in constants(gpu)}
    given = entry()
    assert given.schedule is not None
    assert samebits.load_tuned(written(tmp_path / "t.json", {SHAPE: given})) == 1
    gpu.start()
    for _ in range(4):
        multiply()
    assert {c["BLOCK_N"] for c in constants(gpu)} == {given.schedule["block_n"]}
    assert {str(c) for c in constants(gpu)} != {untuned}
    assert len(gpu.specs) == 4
    samebits.load_tuned("")
    gpu.start()
    multiply()
    assert {str(c) for c in constants(gpu)} == {untuned}


@pytest.mark.usefixtures("gpu")
def test_replays_are_forgotten() -> None:
    if not replay.available:
        pytest.skip("the extension was not built")
    for _ in range(4):
        multiply()

    def recipes() -> int:
        return sum(len(x.recipes) for x in replay._replays)

    assert recipes() > 0
    samebits.load_tuned("")
    assert recipes() == 0


def test_a_schedule_that_the_kernel_cannot_choose_is_refused(tmp_path: Path, gpu: FakeGpu) -> None:
    multiply()
    want = constants(gpu)
    good = entry()
    for schedule in ({"kind": "Sm90Schedule", "block_m": 8}, {}, (good.schedule or {}) | {"stages": 99}):
        samebits.load_tuned(written(tmp_path / "t.json", {SHAPE: replace(good, schedule=schedule)}))
        gpu.start()
        said = warned(lambda: (multiply(), multiply(replace(SHAPE, m=64))))
        assert "entry for [48, 128]" in said
        assert "has no such schedule" in said
        assert constants(gpu)[:1] == want
    samebits.load_tuned(written(tmp_path / "t.json", {SHAPE: replace(good, kernel="fma")}))
    with pytest.warns(RuntimeWarning, match="fma has no such schedule"):
        multiply()


@pytest.mark.usefixtures("gpu")
def test_sizes_between_two_that_agree() -> None:
    def table(low: int, high: int, places: tuple[int, int] = (1, 1)) -> Table:
        given = {m: entry(place=place) for m, place in zip((low, high), places, strict=True)}
        return Table(INFO.name, {replace(SHAPE, m=m): e for m, e in given.items()})

    at = replace(SHAPE, m=60)
    found = table(48, 64).find(at)
    assert found == (entry(), False)
    assert table(48, 64, (1, 2)).find(at) is None
    assert table(32, 128).find(at) is None  # too far apart
    assert table(48, 64).find(replace(at, k=256)) is None
    assert table(48, 64).find(replace(SHAPE, m=48)) == (entry(), True)
    assert table(48, 64).find(replace(SHAPE, m=40)) is table(48, 64).find(replace(SHAPE, m=65)) is None
    dW = replace(SHAPE, a_by_k=False, b_by_k=False)
    terms = Table(INFO.name, {replace(dW, k=k): entry() for k in (512, 1024)})
    assert terms.find(replace(dW, k=600)) is not None
    assert terms.find(replace(dW, k=512, m=50)) is None


def test_where_tables_are_found(tmp_path: Path, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def tuned_by() -> str:
        forget_plans()
        tuned._in_use.tables.clear()
        return tuned._table(0).source

    shipped, cached = tmp_path / "shipped", tmp_path / "cache"
    monkeypatch.setattr(tuned, "SHIPPED", shipped)
    monkeypatch.setenv("SAMEBITS_CACHE_DIR", str(cached))
    cached.mkdir(mode=0o700)
    assert tuned_by() == ""
    monkeypatch.delenv("SAMEBITS_TUNED")
    assert tuned_by() == ""
    of_package = written(shipped / "nvidia-h200.json", {SHAPE: entry()})
    assert tuned_by() == str(of_package)
    own = written(tuned.default_file(INFO.name), {SHAPE: entry(place=2)})
    assert own == cached / "tuned" / "nvidia-h200.json"
    assert tuned_by() == str(own)
    assert tuned._table(0).entries == {SHAPE: entry(place=2)}
    cached.chmod(0o777)  # then anyone could write there
    assert tuned_by() == str(of_package)
    monkeypatch.setenv("SAMEBITS_TUNED", str(own))
    assert tuned_by() == str(own)
    monkeypatch.setenv("SAMEBITS_TUNED", "")
    assert tuned_by() == ""
    samebits.load_tuned(of_package)
    assert tuned_by() == str(of_package)


@pytest.mark.usefixtures("gpu")
def test_shapes_of_products() -> None:
    x, w = torch.zeros(48, 128, dtype=BF16), torch.zeros(256, 128, dtype=BF16)

    def of(a: torch.Tensor, b: torch.Tensor, **more: Any) -> ProductShape | None:
        out = torch.zeros(*a.shape[:-1], b.shape[-1], dtype=a.dtype)
        step = "fma" if a.dtype == torch.float32 else "mma"
        return ProductShape.of(Product.of(Operands(a, b, out, **more), step))

    assert of(x, w.mT) == SHAPE
    assert of(x, w.mT, bias=torch.zeros(256)) == SHAPE
    assert of(x, w.mT, sequences=True) == SHAPE
    assert of(x.float(), w.mT.float(), sequences=True) == replace(
        SHAPE, step="fma", a="float32", b="float32", out="float32", sequences=True
    )
    assert of(x, w.mT.contiguous()) == replace(SHAPE, b_by_k=False)
    assert of(x.mT.contiguous().mT, w.mT) == replace(SHAPE, a_by_k=False)
    assert of(torch.zeros(48, 129, dtype=BF16)[:, :-1], w.mT) == replace(SHAPE, aligned=False)
    assert of(x[:, ::2], w.mT[::2]) is None
    assert of(x[:0], w.mT) is None
    batch = x.expand(3, 48, 128)
    assert of(batch.contiguous(), w.mT.expand(3, 128, 256).contiguous()) == replace(
        SHAPE, batch=3, b_by_k=False
    )
    assert of(batch, w.mT.expand(3, 128, 256)) is None
    for shape in (
        SHAPE,
        replace(SHAPE, b_by_k=False),
        replace(SHAPE, batch=3),
        replace(SHAPE, aligned=False),
    ):
        assert ProductShape.of(product(shape, 0)) == shape


def test_no_table_costs_nothing(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without entries, no candidate is listed; and a plan that was found asks no table."""

    def fail(*_: object) -> None:
        raise AssertionError("asked")

    monkeypatch.setattr(matmul, "ways", fail)
    multiply()
    monkeypatch.setattr(tuned, "find", fail)
    multiply()
    assert len(gpu.specs) == 2


def test_the_tables_that_come_along() -> None:
    """They can be read. Where a kernel has changed since, entries are left out without a warning."""
    for path in tuned.SHIPPED.glob("*.json"):
        table = tuned.read(path)
        assert table.entries or table.stale, path
        assert path.name == f"{tuned.slug(table.gpu)}.json"
        on_hopper = devices.describe(table.gpu, (9, 0), 132, 227 << 10)
        for shape, found in table.entries.items():
            if found.schedule is not None and isinstance(shape, ProductShape):
                ways = matmul.ways(product(shape, on_hopper), found.kernel)
                assert found.schedule in [tuned.schedule_data(s) for _, s in ways], shape


def test_a_stale_table_that_comes_along_says_nothing(
    tmp_path: Path, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuned, "SHIPPED", tmp_path)
    monkeypatch.setenv("SAMEBITS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("SAMEBITS_TUNED")
    path = written(tmp_path / "nvidia-h200.json", {SHAPE: entry()})
    path.write_text(path.read_text().replace(tuned.version("tensor_core_sm90"), "0" * 16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        samebits.load_tuned(None)
        multiply()
    assert tuned.read(path).stale == 1
    assert len(gpu.specs) == 1


def test_shapes_of_other_operations(tmp_path: Path, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups, attention and log-probabilities: recorded, and chosen by a table."""
    monkeypatch.setattr(families, "place", lambda device: "cpu")
    x, w = torch.zeros(64, 128, dtype=BF16), torch.zeros(4, 256, 128, dtype=BF16)
    offs = torch.tensor([16, 32, 48, 64], dtype=torch.int32)
    q, k = torch.zeros(2, 600, 4, 64, dtype=BF16), torch.zeros(2, 2000, 2, 64, dtype=BF16)
    hidden, vocabulary = torch.zeros(48, 128, dtype=BF16), torch.zeros(1024, 128, dtype=BF16)
    rows = Rows.empty(torch.zeros(48, dtype=torch.int64), 1024, -100)
    calls: dict[str, Callable[[], object]] = {
        "grouped_sm90.cu": lambda: samebits.grouped_mm(x, w.mT, offs=offs),
        "attention_sm90.cu": lambda: samebits.attention(q, k, k, causal=True),
        "statistics_sm90.cu": lambda: linear_logp_sm90.statistics(hidden, vocabulary, None, rows),
    }

    def launched() -> dict[str, Any]:
        samebits.load_tuned(tuned.in_use())
        gpu.start()
        for call in calls.values():
            call()
        return {spec.source: spec for spec in gpu.specs if spec.source in calls}

    with samebits.record_shapes(tmp_path / "shapes.json") as found:
        untuned = launched()
    assert untuned.keys() == calls.keys()
    assert {*found} == {
        GroupedShape("mma", "bfloat16", "bfloat16", 4, 64, 256, k=128),
        AttentionShape("bfloat16", 2, 600, 2000, 4, 2, 64, 64, right=0, align="last"),
        LogpShape("bfloat16", 48, 1024, 128),
    }
    assert {*read_shapes(tmp_path / "shapes.json")} == {*found}
    entries: dict[Any, Entry] = {}
    for shape in found:
        of = families.contest(shape, 0)
        assert of is not None
        assert len(of.ways) > 1
        assert len({*map(str, (way.schedule for way in of.ways))}) == len(of.ways)
        way = of.ways[-1]
        entries[shape] = Entry(way.kernel, schedule_data(way.schedule), 1.0, 2.0)
        assert str(shape)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert samebits.load_tuned(written(tmp_path / "t.json", entries)) == 3
        by_table = launched()
    for source, spec in untuned.items():
        assert by_table[source] != spec, source
    wrong = {shape: replace(e, schedule={"kind": "x"}) for shape, e in entries.items()}
    written(tmp_path / "t.json", wrong)
    with pytest.warns(RuntimeWarning, match="has no such schedule"):
        assert launched() == untuned


@pytest.mark.usefixtures("gpu")
def test_contests_of_groups() -> None:
    rows = GroupedShape("mma", "bfloat16", "bfloat16", 8, 512, 256, k=128)
    terms = GroupedShape(
        "mma",
        "bfloat16",
        "float32",
        8,
        4096,
        256,
        512,
        of_terms=True,
        a_by_k=False,
        b_by_k=False,
        accumulate=True,
    )
    for shape in (rows, replace(rows, rows=4096, b_by_k=False), terms):
        p = families.grouped_product(shape, 0)
        assert GroupedShape.of(p) == shape
        kernel = grouped.fastest(p)
        of = families.contest(shape, 0)
        assert of is not None
        assert of.ways[0].schedule == kernel.choose(p)
        assert kernel.name == "grouped_sm90"
        kinds = {replace(s, group=16, early=False) for s in kernel.all(p)}
        for way in of.ways:  # verify proves each kind
            assert replace(way.schedule, group=16, early=False) in kinds
            kernel.plan(p, way.schedule)


@pytest.mark.usefixtures("gpu")
def test_contests_of_groups_have_groups_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 256 rows in each group, a tile of 256 rows would win, and need a second one in practice."""
    for module in (families, contest):
        monkeypatch.setattr(module, "place", lambda device: "cpu")
    of = families.contest(GroupedShape("mma", "bfloat16", "bfloat16", 32, 32 * 256, 64, k=64), 0)
    assert of is not None
    torch.manual_seed(0)
    offs = [of.operands()[2] for _ in range(2)]
    assert not torch.equal(*offs)  # each set of operands has its own
    for ends in offs:
        assert (ends.dtype, ends[-1]) == (torch.int32, 32 * 256)
        rows = ends.diff(prepend=ends.new_zeros(1))
        assert 8 <= (rows > 256).sum() <= 24
        assert 128 < rows.min() <= rows.max() < 384


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_a_tuned_product_has_the_same_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    """Every schedule that a table could choose for some products, through such a table."""
    torch.manual_seed(0)
    name = devices.device_info(0).name
    step, word = ("fma", "float32") if dtype == torch.float32 else ("mma", "bfloat16")
    for m in (1, 48, 300):
        shape = ProductShape(step, word, word, word, m, 512, 256)  # type: ignore[arg-type]
        x, w = (torch.randn(n, 256, device="cuda", dtype=dtype) for n in (m, 512))
        samebits.load_tuned("")
        want = samebits.matmul(x, w.mT)
        ways = matmul.ways(product(shape, 0))
        assert ways
        for kernel, s in ways[:6]:
            given = {shape: Entry(kernel.name, schedule_data(s), 1.0, 2.0)}
            assert samebits.load_tuned(written(tmp_path / "t.json", given, name)) == 1
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert_same_bits(samebits.matmul(x, w.mT), want, f"{kernel.name}, {s}")


def test_the_environment_of_tests() -> None:
    assert os.environ["SAMEBITS_TUNED"] == ""


@pytest.mark.usefixtures("gpu")
def test_the_shapes_of_a_run(tmp_path: Path) -> None:
    for _ in range(4):
        multiply()  # replayed by now
    path = tmp_path / "shapes.json"
    with samebits.record_shapes(path) as found:
        for _ in range(3):
            multiply()
        assert len(found) == 1
        x, w, dy = (torch.zeros(m, n, dtype=BF16) for m, n in ((48, 128), (256, 128), (48, 256)))
        with samebits.record_shapes() as inner:
            for a, b in ((x, w.mT), (dy, w), (dy.mT, x)):
                samebits.matmul(a, b)
    multiply(replace(SHAPE, m=1))
    dX = replace(SHAPE, k=256, n=128, b_by_k=False)
    dW = replace(SHAPE, m=256, n=128, k=48, a_by_k=False, b_by_k=False)
    assert {*inner} == {SHAPE, dX, dW}
    assert {*found} == {*inner}
    assert read_shapes(path) == sorted(found, key=lambda s: json.dumps(shapes.as_data(s)))
    with pytest.raises(TypeError, match="record_shapes: path: expected a path or None, got int"):
        samebits.record_shapes(3)  # type: ignore[arg-type]


@pytest.mark.usefixtures("gpu")
def test_prepare_tunes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What no table has is measured once, chosen by, and kept, unless a table was named."""
    asked: list[list[ProductShape]] = []

    def tune(todo: Any, *, device: int) -> Outcome:
        asked.append([*todo])
        return Outcome({shape: entry(shape) for shape in todo}, [], [], [])

    monkeypatch.setattr("samebits.tools.tune.tune", tune)
    monkeypatch.setenv("SAMEBITS_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("SAMEBITS_TUNED")
    monkeypatch.setattr(tuned, "SHIPPED", tmp_path)
    tmp_path.chmod(0o700)
    samebits.load_tuned(None)
    w = torch.zeros(256, 128, dtype=BF16)
    samebits.prepare(w, [48, 64], tune=True)
    samebits.prepare(w, [48, 96], tune=True)
    assert [[s.m for s in some] for some in asked] == [[48, 64], [96]]
    kept = tuned.read(tuned.default_file(INFO.name))
    assert [s.m for s in kept.entries] == [48, 64, 96]
    assert tuned.known(SHAPE, 0)
    samebits.load_tuned("")
    assert not tuned.known(SHAPE, 0)
    samebits.prepare(w, [128], tune=True)
    assert tuned.read(tuned.default_file(INFO.name)).entries == kept.entries
    assert tuned.known(replace(SHAPE, m=128), 0)
    with pytest.raises(TypeError, match=r"prepare: tune: expected a bool, got int"):
        samebits.prepare(w, [1], tune=1)  # type: ignore[arg-type]
