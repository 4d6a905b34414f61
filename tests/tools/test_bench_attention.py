"""Attention in ``samebits bench``: what it counts, compares and reports; in small, on a CPU."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from samebits.tools.bench import ATTENTION, quick_attention
from samebits.tools.bench import attention as measure
from samebits.tools.bench import attention_cases as cases
from samebits.tools.bench import attention_report as report
from samebits.tools.bench.attention_cases import AttentionCase

CPU = torch.device("cpu")
SMALL = [
    AttentionCase(work, form, 2, 150, 150, 16, heads=2, kv_heads=1)
    for work in ("forward", "both")
    for form in ("causal", "full", "window", "padded")
]
SMALL += [AttentionCase(w, "packed", 1, 1300, 1300, 16, heads=2, kv_heads=1) for w in ("forward", "both")]
SMALL += [
    AttentionCase("forward", "decode", 2, 1, 300, 16, heads=2, kv_heads=1),
    *(
        AttentionCase("forward", form, 2, 20, 300, 16, heads=2, kv_heads=1)
        for form in ("chunk", *cases.CHUNKS)
    ),
]
named = pytest.mark.parametrize("case", SMALL, ids=lambda c: f"{c.form}-{c.work}")


def seen(case: AttentionCase) -> int:
    """Pairs, counted one by one."""
    found = 0
    for n in case.lengths:
        queries = min(n, case.queries)
        i, j = torch.arange(queries)[:, None] + n - queries, torch.arange(n)
        mask = torch.ones(queries, n, dtype=torch.bool) if case.form in ("full", "decode") else j <= i
        if "window" in case.form:
            mask &= j > i - cases.WINDOW
        found += int(mask.sum())
    return found


@named
def test_pairs(case: AttentionCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "WINDOW", 40)
    assert case.pairs == seen(case)
    other = cases.dense(case)
    if case.form in ("window", "packed", "padded"):
        assert 0.9 < other.pairs / case.pairs < 1.1


@named
def test_right_bits_pass_and_wrong_ones_do_not(case: AttentionCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "WINDOW", 40)
    torch.manual_seed(0)
    with torch.no_grad():
        operands = cases.make_attention(case, CPU, torch.randn)
        measure.check(case, operands)
        right = cases.ours
        for wrong in range(4 if case.work == "both" else 1):

            def ours(*asked: Any, wrong: int = wrong) -> Any:
                def run(*tensors: Tensor) -> Any:
                    found = right(*asked)(*tensors)
                    results = list(found) if isinstance(found, tuple) else [found]
                    results[wrong].view(torch.int16)[..., -1:, -1, -1] ^= 1
                    return tuple(results) if isinstance(found, tuple) else results[0]

                return run

            monkeypatch.setattr(measure, "ours", ours)
            with pytest.raises(AssertionError, match="against the CPU reference"):
                measure.check(case, operands)


@pytest.mark.parametrize("form", ["causal", "full"])
def test_errors(form: Any) -> None:
    case = AttentionCase("both", form, 1, 200, 200, 16, heads=2, kv_heads=1)
    torch.manual_seed(0)
    with torch.no_grad():
        found = measure.accuracy(case, CPU, ())
    assert found["error"].keys() == {"samebits"}
    assert all(1e-4 < error < 1e-2 for error in found["error"]["samebits"].values())


def test_the_list_of_cases() -> None:
    assert len({*ATTENTION}) == len(ATTENTION)
    assert {*quick_attention()} < {*ATTENTION}
    assert len(quick_attention()) < len(ATTENTION) / 5
    assert {c.form for c in quick_attention()} == {c.form for c in ATTENTION}
    for c in ATTENTION:
        assert sum(band(c.record()) for band in report.BANDS.values()) == 1
        assert c.key_bytes <= 16 << 30
    for b, t in cases.SELF:
        assert 4096 <= b * t <= 16384


def results() -> dict[str, Any]:
    """Every case twice as fast as the other."""
    found: list[dict[str, Any]] = []
    for case in quick_attention():
        line = case.record() | {"us": {"samebits": 10.0, "torch": 20.0}, "backend": "cuDNN"}
        if case.form in ("window", "packed", "padded"):
            other = cases.dense(case)
            line |= {"us": {"samebits": 10.0, "dense": 20.0}, "dense": other.record()}
        found.append(line)
    found[0] = found[0] | {"us": {"samebits": 10.0, "torch": 5.0}}
    error = {who: dict.fromkeys(("out", "dq", "dk", "dv"), 1e-3) for who in ("samebits", "cuDNN")}
    return {
        "environment": {"gpu": "A GPU", "versions": {}, "date": "today", "commit": "c0ffee"},
        "ceilings": {"copy_bytes_per_s": 4e12},
        "cases": found,
        "accuracy": [cases.ACCURACY[0].record() | {"error": error}],
        "memory": [cases.MEMORY[0].record() | {"bytes": {"samebits": 64 << 20}}],
    }


def test_report() -> None:
    data = results()
    summary = report.attention_summary(data)
    assert summary.keys() == {*report.BANDS, report.BANDWIDTH}
    first = summary["forward, causal and full"]
    assert (first.worst, first.at) == (0.5, data["cases"][0])
    assert first.mean == pytest.approx((0.5 * 2 ** (first.cases - 1)) ** (1 / first.cases))
    window = next(c for c in data["cases"] if c["form"] == "window")
    assert report.speed(window) == pytest.approx(2 * window["pairs"] / window["dense"]["pairs"])
    decode = [c for c in data["cases"] if c["form"] == "decode" and c["key_bytes"] >= report.LARGE]
    smallest = min(c["key_bytes"] for c in decode)
    assert summary[report.BANDWIDTH].worst == pytest.approx(smallest / 10e-6 / 4e12)
    console = Console(file=io.StringIO(), width=150)
    console.print(report.show_attention(data))
    assert "memory of causal 1 x 16,384, 128, 32 heads of keys, MiB: samebits 64" in console.file.getvalue()


def test_only_a_refusal_leaves_a_backend_out(monkeypatch: pytest.MonkeyPatch) -> None:
    case = AttentionCase("both", "causal", 1, 64, 64, 16, heads=1, kv_heads=1)

    def failing(error: Exception) -> Any:
        def run(*operands: Tensor) -> Tensor:
            raise error

        return lambda *asked: run

    monkeypatch.setattr(measure, "theirs", failing(RuntimeError("No available kernel. Aborting execution.")))
    with torch.no_grad():
        assert measure.accuracy(case, CPU)["error"].keys() == {"samebits"}
        monkeypatch.setattr(measure, "theirs", failing(torch.OutOfMemoryError("CUDA out of memory")))
        with pytest.raises(torch.OutOfMemoryError):
            measure.accuracy(case, CPU)


@pytest.mark.gpu
def test_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = AttentionCase("both", "causal", 1, 256, 256, 64, heads=4, kv_heads=4)
    monkeypatch.setattr(measure, "ACCURACY", (whole,))
    monkeypatch.setattr(measure, "MEMORY", (whole,))
    sized = [dataclasses.replace(c, head=64) for c in SMALL]
    data = measure.bench_attention([*sized, whole])
    assert data["red"] == []
    assert len(data["cases"]) == len(sized) + 1
    assert all(min(c["us"].values()) > 0 for c in data["cases"])
    assert all("dense" in c["us"] or "torch" in c["us"] for c in data["cases"])
    assert data["memory"][0]["bytes"]["samebits"] >= 0
    assert {"samebits", "cuDNN"} <= data["accuracy"][0]["error"].keys()


def test_a_case_that_torch_does_not_take_has_no_speed() -> None:
    case = dataclasses.replace(ATTENTION[0]).record() | {"us": {"samebits": 1.0}}
    assert report.speed(case) is None
    assert report.attention_summary(results() | {"cases": [case]}) == {}


def test_tables_and_pictures() -> None:
    pytest.importorskip("matplotlib")
    from benchmarks import plot
    from benchmarks.tables import operations

    data = results()
    said = operations.gpu_attention(data)
    assert "(docs/assets/a-gpu-attention.svg)" in said
    assert "| decode | 3 | 2.000 | 2.000 | decode 1 x 16,384, 128 |" in said
    assert "| causal 1 x 4,096, 128 | bfloat16 | dk | 0.001 | 0.001 |" in said
    assert "| causal 1 x 16,384, 128, 32 heads over 32 | 64 |" in said
    every = operations.gpu_attention_cases(data)
    assert every.count("own causal") == sum("dense" in c for c in data["cases"])
    assert plot.THEIRS in plot.render(plot.gpu_attention(data))
