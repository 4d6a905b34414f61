"""``samebits tune`` without a GPU: a clock that says what it is told, contests, merging, and the command."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

import samebits
from samebits.backends import UnavailableError
from samebits.backends.cuda import devices, matmul, tuned
from samebits.backends.cuda.shapes import AttentionShape, GroupedShape, LogpShape, ProductShape, as_data
from samebits.backends.cuda.tuned import Entry, Table, schedule_data
from samebits.tools import shapes as wanted
from samebits.tools.bench.cases import BenchCase
from samebits.tools.cli import app
from samebits.tools.text import ToolError
from samebits.tools.tune import command, contest, families, measure, report
from samebits.tools.tune.contest import Contest, Way

SHAPE = ProductShape("mma", "bfloat16", "bfloat16", "bfloat16", 48, 256, 128)
BF16 = torch.bfloat16


def run(*args: str) -> Result:
    return CliRunner().invoke(app, args, env={"COLUMNS": "200"})


@pytest.fixture
def hopper() -> int:
    """The index of an H200 that is described, and not here."""
    return devices.describe("NVIDIA H200", (9, 0), 132, 227 << 10)


class FakeClock:
    """Turns of each way take the times given, in the first race and in the final."""

    def __init__(self, first: Sequence[float], final: Sequence[float], spread: float = 0.0) -> None:
        self._first, self._final, self._spread = first, final, spread
        self.finalists: list[str] = []

    def first(self) -> dict[str, list[float]]:
        return {str(i): [t] for i, t in enumerate(self._first)}

    def final(self, names: Sequence[str]) -> dict[str, list[float]]:
        self.finalists = [*names]
        return {name: [self._final[int(name)] * x for x in (1, 1 + self._spread)] for name in names}


def a_contest(schedules: int = 6) -> Contest:
    found = matmul.FMA.catalogue[:schedules]
    ways = [Way("tensor_core", s, lambda: lambda a, b: a @ b) for s in found]
    return Contest(SHAPE, ways, 1e6, 1e6, lambda: (torch.ones(4, 4), torch.ones(4, 4)))


def test_a_clear_winner_is_kept() -> None:
    of, clock = a_contest(), FakeClock([10, 12, 9, 9.5, 8, 8.1], [10, 1, 9, 9, 8.2, 8])
    found = measure.decide(of, clock)
    assert clock.finalists == ["0", "4", "5"]  # the best, and who is close to it
    assert found == Entry("tensor_core", schedule_data(of.ways[5].schedule), 8, 10)


def test_who_is_timed_again() -> None:
    """Four at most, the fastest first, and none that was far behind the choice or the best."""
    first = {"0": 10.0, "1": 10.25, "2": 10.1, "3": 9.9, "4": 10.2, "5": 10.0, "6": 10.31}
    assert measure.finalists(first) == ["3", "5", "2", "4"]
    assert measure.finalists({"0": 10.0, "1": 10.29, "2": 10.31}) == ["1"]
    assert measure.finalists({"0": 10.0, "1": 9.0, "2": 9.8}) == ["1"]


@pytest.mark.parametrize(
    ("first", "final", "spread"),
    [
        ([10.0, 12, 13], [10.0, 9, 9], 0.0),  # nothing is close
        ([10.0, 9.9, 13], [10.0, 9.95, 9], 0.0),  # by less than the margin
        ([10.0, 9.0, 13], [10.0, 9.6, 9], 0.1),  # by less than the times spread
        ([10.0, 9.0, 13], [10.0, 10.5, 9], 0.0),  # alone it is slower
    ],
)
def test_what_may_be_noise_is_not_kept(first: list[float], final: list[float], spread: float) -> None:
    found = measure.decide(a_contest(3), FakeClock(first, final, spread))
    assert (found.schedule, found.kernel) == (None, "tensor_core")
    assert found.us == found.model_us


def test_the_plausible_schedules(hopper: int) -> None:
    for m, layout in itertools.product((1, 48, 300, 4096), ({}, {"b_by_k": False})):
        shape = ProductShape("mma", "bfloat16", "bfloat16", "bfloat16", m, 4096, 4096, **layout)  # type: ignore[arg-type]
        found = families.contest(shape, hopper)
        p = families.product(shape, hopper)
        kernel = matmul.fastest(p)
        if found is None:  # one schedule only
            assert m == 1
            continue
        assert found.ways[0].schedule == kernel.choose(p)
        several = [way.schedule for way in found.ways[: contest.MOST]]
        assert 2 <= len(found.ways) <= contest.MOST + 6
        assert len({way.schedule for way in found.ways}) == len(found.ways)
        candidates = [s for s in several if s in kernel.candidates(p)]
        costs = [kernel.cost(p, s) for s in candidates]
        assert costs[1:] == sorted(costs[1:])
        assert costs[-1] <= contest.PLAUSIBLE * min(costs)
        assert {way.schedule for way in found.ways} <= {s for _, s in matmul.ways(p)}
    single = ProductShape("fma", "float32", "float32", "float32", 4096, 4096, 4096)
    both = families.contest(single, hopper)
    assert both is not None
    assert {way.kernel for way in both.ways} <= {"fma", "fma_sm90"}
    assert contest.few("a", {"a": 3.0, "b": 1.0, "c": 1.7, "d": 1.2}) == ["a", "b", "d"]


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`tune` computes on a CPU what its contests say."""

    class Nowhere:
        def __init__(self, _: int) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    info = devices.DeviceInfo(0, "NVIDIA H200", (9, 0), 132, 227 << 10, 60 << 20)
    monkeypatch.setattr(torch.cuda, "device", Nowhere)
    monkeypatch.setattr(devices, "device_info", lambda index: info)
    yield
    samebits.load_tuned(None)


@pytest.mark.usefixtures("on_cpu")
def test_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [replace(SHAPE, m=m) for m in (64, 96, 128)]
    made: dict[Any, Contest | None] = {shape: replace(a_contest(), shape=shape) for shape in (SHAPE, *others)}
    made[others[0]] = None
    monkeypatch.setattr(families, "contest", lambda shape, device: made[shape])
    said: list[str] = []

    def times(of: Contest, runs: dict[str, Callable[..., Any]], sets: Any) -> FakeClock:
        assert len(sets) == 64
        assert all(torch.equal(run(*sets[0]), torch.full((4, 4), 4.0)) for run in runs.values())
        return FakeClock([10, 12, 9, 9.5, 8, 8.1], [10, 1, 9, 9, 8.2, 8])

    found = measure.tune([SHAPE, *others, SHAPE], times=times, progress=lambda _, what: said.append(what))
    assert [*found.entries] == [SHAPE, *others[1:]]
    assert (found.alone, found.left, found.wrong) == ([others[0]], [], [])
    assert said == ["choosing kernels", *map(str, (SHAPE, *others[1:]))]
    wrong = a_contest()
    wrong.ways[3] = Way("tensor_core", wrong.ways[3].schedule, lambda: lambda a, b: a @ b + 2**-20)
    made[SHAPE] = wrong
    found = measure.tune([SHAPE, others[1]], times=times)
    assert [*found.entries] == [others[1]]
    (what,) = found.wrong
    assert "other bits than" in what
    found = measure.tune([SHAPE, *others], times=times, budget=0.0)
    assert (found.entries, found.left) == ({}, [SHAPE, *others[1:]])


def text(of: Any) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(of)
    return captured.get()


def test_a_report() -> None:
    won, lost = Entry("fma", {}, 8.0, 10.0), Entry("fma", None, 7.0, 7.0)
    found = measure.Outcome({SHAPE: won, replace(SHAPE, m=64): lost}, [SHAPE], [SHAPE], [])
    said = text(report.show(found))
    assert "[48, 128] @ [128, 256] bfloat16" in said
    assert "25.0%" in said
    assert "2 shapes measured; 1 schedule faster than the cost model's by 25.0% in the mean, 11.8%" in said
    assert "1 shape with one schedule only; 1 shape left: the budget is spent" in said
    assert "choice is the fastest of each" in text(report.show(measure.Outcome({SHAPE: lost}, [], [], [])))


def test_shapes_of_weights() -> None:
    found = wanted.of_weights([(128, 256), (128, 256)], [48, 512], BF16)
    assert found == [
        SHAPE,
        replace(SHAPE, m=512),
        ProductShape("mma", *("bfloat16",) * 3, 512, 128, 256, b_by_k=False),  # type: ignore[arg-type]
        ProductShape("mma", *("bfloat16",) * 3, 256, 128, 512, a_by_k=False, b_by_k=False),  # type: ignore[arg-type]
    ]
    assert [s.aligned for s in wanted.of_weights([(129, 256)], [1, 512], BF16)] == [
        False,
        False,
        False,
        False,
    ]
    dW = wanted.of_weights([(128, 256)], [512], torch.float32)[-1]
    assert (dW.step, dW.sequences, dW.b) == ("fma", True, "float32")


def config(folder: Path, **more: Any) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    given = {"model_type": "llama", "num_hidden_layers": 2, "vocab_size": 100, "dtype": "float16"}
    path = folder / "config.json"
    path.write_text(json.dumps(sizes | given | more))
    return path


def test_shapes_of_a_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    want = [(64, 64), (64, 32), (64, 96), (96, 64), (64, 100)]
    for name in (config(tmp_path), tmp_path):
        assert wanted.of_model(str(name)) == (want, torch.float16)
    found = wanted.asked([], [str(tmp_path)], None, "1,512", None)
    assert len(found) == 4 * len(want)
    assert {s.a for s in found} == {"float16"}
    assert {s.a for s in wanted.asked([], [str(tmp_path)], None, "1", "bfloat16")} == {"bfloat16"}
    with pytest.raises(ToolError, match=r"--model .*absent: expected a folder with config\.json"):
        wanted.of_model(str(tmp_path / "absent"))
    config(tmp_path, model_type="no-such-type")
    with pytest.raises(ToolError, match=r"--model .*: expected a folder"):
        wanted.of_model(str(tmp_path))


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "expected --shape KxN, --model NAME_OR_CONFIG or --shapes FILE"),
        (["--shape", "4096"], "--shape: expected KxN, such as 4096x28672, got 4096"),
        (["--shape", "0x8"], "--shape: expected KxN"),
        (["--shape", "8x8", "--rows", "1,x"], "--rows: expected numbers of rows, such as 1,16,512, got 1,x"),
        (["--shape", "8x8", "--rows", "0"], "--rows: expected numbers of rows"),
        (["--shapes", "absent.json"], "--shapes absent.json: No such file"),
        (["--shapes", "bad.json"], "--shapes bad.json: expected a file of samebits.record_shapes"),
        (["--shapes", "deep.json"], "--shapes deep.json: expected a file of samebits.record_shapes"),
        (["--shapes", "none.json"], "--shapes none.json: it has no shapes"),
        (["--shape", "8x8", "--out", "absent/t.json"], "--out absent/t.json: expected a file in a folder"),
        (["--merge", "a.json", "a.json"], "--merge: expected --out FILE"),
        (
            ["--merge", "a.json", "bad.json", "--out", "c.json"],
            "--merge bad.json: it is no table of format 1",
        ),
        (["--merge", "a.json", "b.json", "--out", "c.json"], "expected a table for NVIDIA H200, got one for"),
        (["--merge", "a.json", "a.json", "--out", "c.json", "--shape", "8x8"], "--merge: expected no shapes"),
    ],
)
def test_mistakes(args: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text('{"shapes": [{"op": "product"}]}')
    (tmp_path / "deep.json").write_text("[" * 200_000)
    (tmp_path / "none.json").write_text('{"shapes": []}')
    for name, gpu in (("a", "NVIDIA H200"), ("b", "NVIDIA H100")):
        tuned.write(tmp_path / f"{name}.json", Table(gpu, {SHAPE: Entry("fma", None, 1.0, 1.0)}))
    monkeypatch.setattr(command, "tune", lambda *_, **__: pytest.fail("it ran"))
    result = run("tune", *args)
    assert result.exit_code == 2
    assert result.stderr.startswith("samebits tune: ")
    assert says in result.stderr
    assert result.stderr.count("\n") == 1


def test_without_a_gpu_it_says_why() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    result = run("tune", "--shape", "128x256")
    assert result.exit_code == 2
    assert result.stderr.startswith("samebits tune: ")


def test_merging(tmp_path: Path) -> None:
    a, b, out = (tmp_path / f"{name}.json" for name in "abc")
    old, new, more = (Entry("fma", None, t, t) for t in (1.0, 2.0, 3.0))
    other = replace(SHAPE, m=64)
    tuned.write(a, Table("NVIDIA H200", {SHAPE: old, other: more}))
    tuned.write(b, Table("NVIDIA H200", {SHAPE: new}))
    data = json.loads(b.read_text())
    stale = {
        "shape": as_data(replace(SHAPE, m=7)),
        "kernel": "tiny",
        "schedule": None,
        "us": 1,
        "model_us": 1,
    }
    data["entries"].append(stale)
    b.write_text(json.dumps(data))
    result = run("tune", "--merge", str(a), str(b), "--out", str(out))
    assert result.exit_code == 0
    assert "1 entry of other versions of kernels left out" in result.stderr
    assert "2 entries" in result.stdout
    assert tuned.read(out).entries == {SHAPE: new, other: more}


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it measures, and where it writes."""
    info = devices.DeviceInfo(0, "NVIDIA H200", (9, 0), 132, 227 << 10, 60 << 20)
    monkeypatch.setattr(devices, "device_info", lambda index: info)
    monkeypatch.setattr("samebits.tools.bench.measure.gpu", lambda index: None)
    monkeypatch.setenv("SAMEBITS_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir(mode=0o700)
    asked: list[Any] = []

    def tune(shapes: Any, **options: Any) -> measure.Outcome:
        asked.append((shapes, options["budget"]))
        entries = {shape: Entry("fma", None, 1.0, 1.0) for shape in shapes}
        return measure.Outcome(entries, [], [], [] if len(asked) < 3 else ["a way gave other bits"])

    monkeypatch.setattr(command, "tune", tune)
    out = tmp_path / "t.json"
    result = run("tune", "--shape", "128x256", "--rows", "48", "--budget", "9", "--out", str(out))
    assert (result.exit_code, asked) == (0, [([SHAPE], 9.0)])
    assert [*tuned.read(out).entries] == [SHAPE]
    for rows in ("48", "64"):  # what was measured before is kept
        result = run("tune", "--shape", "128x256", "--rows", rows)
    assert [s.m for s in tuned.read(tuned.default_file(info.name)).entries] == [48, 64]
    assert result.exit_code == 1
    assert "samebits tune: a way gave other bits" in result.stderr
    monkeypatch.setattr(command, "tune", lambda *_, **__: (_ for _ in ()).throw(UnavailableError("no GPU")))
    assert run("tune", "--shape", "128x256").exit_code == 2
    (tmp_path / "cache").chmod(0o777)
    result = run("tune", "--shape", "128x256")
    assert result.exit_code == 2
    assert "name a file with --out" in result.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_every_kind_of_shape_on_a_gpu() -> None:
    """Each way that a table may choose gives the same bits, and the next."""
    kind: Any = ("mma", "bfloat16", "bfloat16")
    of_terms: Any = {"of_terms": True, "a_by_k": False, "b_by_k": False}
    shapes = [
        GroupedShape(*kind, 8, 512, 256, k=128),
        GroupedShape(*kind, 8, 4096, 256, k=128, b_by_k=False),
        GroupedShape("mma", "bfloat16", "float32", 8, 4096, 256, 512, accumulate=True, **of_terms),
        AttentionShape("bfloat16", 2, 600, 2000, 8, 2, 64, 64, right=0, align="last"),
        AttentionShape("bfloat16", 4, 1, 3000, 8, 2, 128, 128, align="last"),
        AttentionShape("float16", 3, 1000, 1000, 4, 4, 64, 64, right=0, packed=True),
        AttentionShape("bfloat16", 3, 700, 700, 4, 4, 128, 64, softcap=True, ragged=True),
        LogpShape("bfloat16", 48, 4096, 256),
        LogpShape("bfloat16", 300, 4096, 256),
        ProductShape("mma", *("bfloat16",) * 3, 64, 64, 64, batch=40),  # type: ignore[arg-type]
        ProductShape("fma", *("float32",) * 3, 33, 65, 67, aligned=False),  # type: ignore[arg-type]
    ]
    before = torch.get_rng_state(), torch.cuda.get_rng_state()
    found = measure.tune(shapes)
    assert found.wrong == []
    assert all(map(torch.equal, before, (torch.get_rng_state(), torch.cuda.get_rng_state())))
    assert len(found.entries) + len(found.alone) == len(shapes)
    if devices.device_info(0).arch.runs("attention_sm90"):
        assert len(found.entries) >= 8


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_tuning_on_a_gpu(tmp_path: Path) -> None:
    """A tiny list, by the command: entries are used, and no bit differs."""
    out = tmp_path / "t.json"
    result = run("tune", "--shape", "1024x2048", "--rows", "16,300", "--budget", "120", "--out", str(out))
    assert result.exit_code == 0, result.stderr
    table = tuned.read(out)
    assert len(table.entries) == 4
    assert table.gpu == devices.device_info(0).name
    torch.manual_seed(0)
    weight = torch.randn(2048, 1024, device="cuda", dtype=BF16, requires_grad=True)
    results = []
    for path in ("", out):
        samebits.load_tuned(path)
        for m in (16, 300):
            x = torch.ones(m, 1024, device="cuda", dtype=BF16).cumsum(0).requires_grad_()
            y = samebits.linear(x, weight)
            dx, dw = torch.autograd.grad(y, (x, weight), torch.ones_like(y))
            results += [t.detach().view(torch.int16) for t in (y, dx, dw)]
    samebits.load_tuned(None)
    for t, want in zip(results[6:], results[:6], strict=True):
        assert torch.equal(t, want)


def test_bench_of_own_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "shapes.json"
    dX = replace(SHAPE, k=256, n=128, b_by_k=False)
    dW = replace(SHAPE, m=256, n=128, k=48, a_by_k=False, b_by_k=False)
    into = replace(dW, out="float32", accumulate=True)
    batch, bad = replace(SHAPE, batch=3, b_by_k=False), replace(SHAPE, out="float32")
    path.write_text(json.dumps({"shapes": [as_data(s) for s in (SHAPE, dX, dW, into, batch, bad)]}))
    asked: list[BenchCase] = []

    def bench(cases: Any, **_: Any) -> Any:
        asked.extend(cases)
        made = {"gpu": "A GPU", "driver": "1", "digest": "0"}
        timed = [case.record() | {"us": {"samebits": 2.0, "torch": 3.0}} for case in cases]
        return {"cases": timed, "red": [], "environment": made}

    monkeypatch.setattr("samebits.tools.bench.command.bench", bench)
    monkeypatch.setattr("samebits.tools.bench.command.bench_attention", lambda *_, **__: pytest.fail("ran"))
    result = run("bench", "--shapes", str(path))
    assert result.exit_code == 0, result.stderr
    sizes = (48, 128, 256)
    assert asked == [BenchCase(work, *sizes) for work in ("forward", "dX", "dW", "dW main_grad")] + [  # type: ignore[arg-type]
        BenchCase("bmm", *sizes, batch=3)
    ]
    assert "1.500" in result.stdout
    assert "dW main_grad" in result.stdout
    asked.clear()
    assert run("bench", "--shape", "128x256", "--rows", "48").exit_code == 0
    assert asked == [BenchCase("forward", *sizes)]
    path.write_text(json.dumps({"shapes": [as_data(bad)]}))
    for args, says in (
        (["--shapes", str(path)], "no shape here has a competitor"),
        (["--shape", "8x8", "--quick"], "--quick: expected none of --shape, --model and --shapes"),
    ):
        result = run("bench", *args)
        assert result.exit_code == 2
        assert says in result.stderr
