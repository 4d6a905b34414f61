"""Benchmarks that want a GPU, in small on a CPU; what they write is what tables and pictures are made of."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import re
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import samebits

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from benchmarks import (
    ahead,
    attention_invariance,
    counters,
    cubins,
    engines,
    grouped,
    held_out,
    logp,
    models,
    offline,
    peers,
    plot,
    price,
    ranks,
    recurrent,
    rows,
    scaled,
    steps,
    support,
    tune,
    vllm,
)
from benchmarks.record import GPUS, commits, environment, load, measured, tiny
from benchmarks.tables.models import (
    gpu_embeddings,
    gpu_models_drift,
    gpu_models_time,
    gpu_peers,
    gpu_steps,
    the_price,
)
from benchmarks.tables.operations import gpu_logp, gpu_rows
from benchmarks.tables.products import (
    gpu_behind,
    gpu_counters,
    gpu_grouped,
    gpu_grouped_cases,
    gpu_held_out,
    gpu_quantize,
    gpu_scaled_grouped,
    gpu_tiny,
    gpu_triton_tune,
    triton_choice,
)
from benchmarks.tables.proofs import gpu_attention_invariance
from samebits.backends.cuda import compiler
from samebits.backends.cuda.matmul import PRODUCTS
from samebits.tools.bench import clock
from samebits.tools.bench.cases import SHAPES, BenchCase
from samebits.tools.verify import fused

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 50}


@pytest.mark.long
def test_models(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, small in {
        "DRIFT": {name: shape | SMALL for name, shape in models.DRIFT.items()},
        "LEARNER": models.LEARNER | SMALL,
        "LOOP": {"prompts": 2, "group": 3, "answer": 4},
        "PROMPTS": 2,
        "PROMPT": 5,
        "ANSWER": 6,
    }.items():
        monkeypatch.setattr(models, name, small)
    changed = {"PyTorch": {"one by one": 5, "padded": 2}, "samebits": {"one by one": 0, "padded": 0}}
    data = {
        "environment": environment("c0ffee") | {"gpu": "A GPU"},
        "micro_batches": {"torch.nn.Linear": {"2": 10, "4": 1200}, "samebits.nn.Linear": {"2": 0, "4": 0}},
        "sizes": models.sizes(),
        "drift": models.drift("cpu"),
        "training": models.training(2, "cpu"),
        "forward": [
            {
                "rows": 1,
                "tokens": 4096,
                "torch": {"forward_ms": 20.0, "attention_ms": 4.0},
                "samebits": {"forward_ms": 40.0, "attention_ms": 20.0},
            }
        ],
    }
    assert {d["differing"] for d in data["drift"] if d["by"] == "samebits"} == {0}
    said = gpu_models_drift(data)
    assert said.count("| 0 | 0 | 0 |") == 6
    assert (
        "0 in samebits. Two runs under samebits end with identical weights; PyTorch's was run once." in said
    )
    assert "10 and 1,200 other weights in PyTorch, 0 and 0 in samebits" in said
    found = {"environment": data["environment"], "sentences": 16, "changed": changed}
    assert "16 sentences (its own weights, float32), 5 change" in gpu_embeddings(found)
    assert "(docs/assets/a-gpu-models.svg)" in said
    assert "on one A GPU" in said
    assert "| 1 x 4,096 | 20.0 | 40.0 | 4.0 | 20.0 | 2.00 | 1.25 |" in gpu_models_time(data)
    assert "% of tokens" in plot.render(plot.gpu_models(data))


@pytest.mark.parametrize("kind", ["forward", "dX", "dW"])
def test_grouped_products_are_held_to_the_reference(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "DEVICE", "cpu")
    case = grouped.GroupedCase("a model", kind, 5, 2, 24, 40, 30, True)
    operands = grouped.routed(case, torch.randn(5, 40, 24, dtype=torch.bfloat16), 0)
    grouped.check(operands)
    grouped.theirs(operands.a, operands.b, operands.offs, operands.sequences)  # takes them, too
    ours = grouped.ours

    def wrong(*given: torch.Tensor) -> torch.Tensor:
        return ours(*given) * 1.01

    monkeypatch.setattr(grouped, "ours", wrong)
    with pytest.raises(AssertionError, match="against the CPU reference"):
        grouped.check(operands)


def test_tables_of_grouped_products() -> None:
    case = {f: getattr(grouped.CASES[0], f) for f in grouped.GroupedCase.__slots__}
    timed = {"touched": 9.0, "limit": 1.5, "us": {"samebits": 2.0, "torch": 3.0}}
    data = {"environment": environment("c0ffee") | {"gpu": "A GPU"}, "cases": [case | timed]}
    assert "| forward | 1.50 | 1.50 | 0.75 |" in gpu_grouped(data)
    every = gpu_grouped_cases(data)
    assert "| Qwen3-30B-A3B | forward | 2048, 1536 | 16 | balanced | 2.0 | 3.0 | 1.5 |" in every


@pytest.mark.parametrize("op", rows.OPS)
def test_row_operations_are_checked(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right bits pass. A bit of a result that is wrong is found."""
    monkeypatch.setattr(rows, "DEVICE", "cpu")
    monkeypatch.setattr(rows, "ENTRIES", 50)
    case, ours = rows.RowCase(op, 40, 24), rows.OPS[op].ours
    operands = rows.OPS[op].operands(case)
    rows.check(case, operands)

    def wrong(*operands: Any) -> Any:
        results = ours(*operands)
        results = results if isinstance(results, tuple) else (results,)
        results[-1].view(torch.int16).bitwise_xor_(1)
        return results

    monkeypatch.setitem(rows.OPS, op, dataclasses.replace(rows.OPS[op], ours=wrong))
    with pytest.raises(AssertionError, match=op):
        rows.check(case, operands)


def test_tables_of_row_operations_and_steps() -> None:
    data = {"environment": environment("c0ffee") | {"gpu": "A GPU"}}
    us = {"samebits": 2.0, "torch": 3.0, "copy": 1.0}
    cases = [rows.RowCase("sum", rows.TOKENS, n).record() | {"us": us} for n in rows.WIDTHS]
    said = gpu_rows(data | {"cases": cases})
    assert "| sum | 0.50 | 0.50 | 1.50 | 1.50 |" in said
    assert "| sum | 4,096 | 1,024 | bfloat16 | 2.0 | 3.0 | 1.0 |" in said
    assert "sum" in plot.render(plot.gpu_rows(data | {"cases": cases}))
    ours = {"context": {"ms": 3.0, "mib": 90}, "process": {"ms": 2.0, "mib": 90}}
    step = {"work": "decode", "torch": {"ms": 4.0, "mib": 100}} | ours
    assert "| decode | 4.00 | 3.00 | 2.00 | 0.50 |  | 0.90 |" in gpu_steps(data | {"cases": [step]})
    more = {"torch, compiled": {"ms": 2.5, "mib": 60}, "fused": {"ms": 1.0, "mib": 45}}
    said = gpu_steps(data | {"cases": [step, step | more | {"work": "train"}]})
    assert "| decode | 4.00 |  | 3.00 | 2.00 |  | 0.50 |  | 0.90 |" in said
    assert "| train | 4.00 | 2.50 | 3.00 | 2.00 | 1.00 | 0.25 | 0.40 | 0.75 |" in said


def test_a_library_that_is_installed_and_broken_says_so() -> None:
    assert recurrent._peer("no_such_library.ops", "f") is None
    found = recurrent._peer("json", "dumps")
    assert found is not None
    assert found({}) == "{}"
    broken = recurrent._peer("json.no_such_module", "f")
    assert broken is not None
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        broken()


def test_steps_of_split_models_have_the_columns_that_ran() -> None:
    cases = [{"how": how, "rows": 1, "tokens": 4096, "ms": 9.6} for how in ("torch", "samebits", "one")]
    head, rows = ranks.step_table({"llama": {"steps": cases}})
    assert head[1:] == ["PyTorch, split", "samebits, split", "samebits, one GPU"]
    assert rows == [["1.2 billion, 1 x 4,096", "10", "10", "10"]]
    cases.append(
        {"model": "4.5 billion", "how": "samebits", "rows": 8, "tokens": 512, "ms": 9.0, "graph": 5.2}
    )
    head, rows = ranks.step_table({"llama": {"steps": cases}})
    assert head[-1] == "split, in a CUDA graph"
    assert rows[1] == ["4.5 billion, 8 x 512", "", "9", "", "5"]


def test_a_row_of_steps_is_merged_into_results(tmp_path: Path) -> None:
    works = ["train, 8 x 512", "train, 8 x 512, linear_logp", "train, 1 x 512"]
    assert steps.chosen(works, works[0]) == works[:1]
    assert steps.chosen(works, "8 x 512") == works[:2]
    assert steps.chosen(works, "") == works
    record = environment("c0ffee")
    cases = [{"work": work, "torch": {"ms": 1.0, "mib": 1}} for work in works[:2]]
    path, data = tmp_path / "new" / "steps.json", {"environment": record, "model": {"n": 1}, "cases": cases}
    steps.save(path, data, merge=True)
    more = [cases[1] | {"torch": {"ms": 2.0, "mib": 1}}, {"work": works[2]}]
    steps.save(path, data | {"environment": record | {"date": "2000-01-01"}, "cases": more}, merge=True)
    assert json.loads(path.read_text())["cases"] == [cases[0], *more]
    with pytest.raises(ValueError, match=r"--merge: expected model {'n': 1} of"):
        steps.save(path, data | {"model": {"n": 2}}, merge=True)
    later = {"environment": record | {"commit": "decade"}, "cases": more[:1]}
    steps.save(path, data | later, merge=True)
    found = {case["work"]: case.get("commit") for case in json.loads(path.read_text())["cases"]}
    assert found == dict(zip(works, ("c0ffee", None, "c0ffee"), strict=True))
    steps.save(path, data, merge=False)
    assert json.loads(path.read_text())["cases"] == cases


@pytest.mark.parametrize("layers", ["", "12"])
def test_prices_name_both_baselines(layers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ms = {"torch": 8.0, "torch, compiled": 5.0, "liger": 10.0, "context": 7.0, "process": 6.0, "fused": 4.0}
    name = "forward + backward, 8 x 512" + (f", {layers} layers" if layers else "")
    case: dict[str, Any] = {"work": name} | {form: {"ms": t} for form, t in ms.items()}
    (gpu, *_) = GPUS
    monkeypatch.setattr(
        price, "load", lambda name: {"cases": [case]} if name.endswith("/steps.json") else load(name)
    )
    found = {row[0]: row[1:] for row in price.rows(gpu)}
    work = price.STEPS["forward + backward, 8 x 512"] + (f", {layers} layers" if layers else "")
    assert found[work][1] == "0.88"
    label = f"Llama 1B, {layers}\nlayers, 8 x 512" if layers else "Llama 1B\n8 x 512"
    assert steps.trained({"cases": [case]}) == {label: case}
    assert found[f"{work}, beside `torch.compile`"] == ["0.80", "0.80", "PyTorch, eager 1.60, Liger 2.00"]


def test_logp() -> None:
    ms, mib = {"samebits": 2.0, "torch": 3.0}, {"samebits": 40.2, "torch": 4096.0}
    case = {"tokens": 16, "d": 64, "v": 1000, "forward_ms": ms | {logp.PRODUCT: 1.0}, "forward_mib": mib}
    case |= {"forward_graph_ms": ms, "forward_backward_ms": ms, "forward_backward_peak_mib": mib}
    case |= {"forward_backward_graph_ms": {"samebits": 1.0, "torch": 4.0}}
    said = gpu_logp({"environment": environment("c0ffee") | {"gpu": "A GPU"}, "cases": [case]})
    assert "| 16, 64, 1,000 | forward | 2 ms, 40 MiB | 3 ms, 4,096 MiB | 1 ms | 1.50 |" in said
    assert "| 16, 64, 1,000 | and backward | 2 ms, 40 MiB | 3 ms, 4,096 MiB |  | 1.50 |" in said
    assert "| 16, 64, 1,000 | both in a CUDA graph | 1 ms | 4 ms |  | 4.00 |" in said
    assert "gradients included" in said
    assert "(docs/assets/a-gpu-logp.svg)" in said
    assert plot.OURS in plot.render(plot.gpu_logp({"environment": {"gpu": "A GPU"}, "cases": [case]}))


def test_tables_of_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    us = {"samebits": 2.0, "torch": 4.0, peers.MODE: 8.0}
    ms = {"samebits": 1.5, "torch": 3.0, "liger_kernel": 6.0, logp.PRODUCT: 1.0}
    data = {
        "environment": environment("c0ffee") | {"gpu": "A GPU"},
        "products": [BenchCase("forward", m, 64, 64).record() | {"us": us} for m in peers.ROWS],
        "products_changed": {"samebits": 0, "torch": 7, peers.MODE: 0},
        "products_rows": 1000,
        "log_probabilities": [
            {"tokens": 64, "forward_ms": ms, "forward_backward_ms": ms, "forward_backward_peak_mib": ms}
        ],
        "steps": [{"work": peers.DECODING, **{who: {"ms": t} for who, t in us.items()}}],
    }
    said = gpu_peers(data)
    assert "| products, forward, M <= 128 | 0.50 | 2.00 |  |" in said
    assert "| log-probs, forward and backward | 0.50 |  | 2.00 |" in said
    assert f"| {peers.DECODING} | 0.50 | 2.00 |  |" in said
    assert "| 1,000 rows of products | 7 | 0 | 0 |  |" in said
    assert "| 64 tokens | 3 | 2 |  | 6 |" in said
    (gpu, *_) = GPUS
    monkeypatch.setattr(price, "measured", lambda name: GPUS if name == "peers.json" else measured(name))
    monkeypatch.setattr(price, "load", lambda name: data if name.endswith("/peers.json") else load(name))
    others = {row[0]: row[3] for row in price.rows(gpu)}
    assert price.BESIDE.keys() <= others.keys()
    assert others["products, bf16, forward, M <= 128"] == "batch_invariant_ops 2.00 (samebits 0.50)"
    assert others["log-probs, forward and backward"] == "Liger 2.00 (samebits 0.50)"


@pytest.mark.parametrize("gpu", GPUS)
def test_the_price_on_every_gpu(gpu: str) -> None:
    table, said = the_price(gpu).split("\n\n")
    head, _, *rows = table.splitlines()
    assert head == "| time, PyTorch = 1 | samebits | worst | others |"
    products = next(row for row in rows if "forward, M <= 128" in row).split(" | ")
    assert all(float(cell) > 0 for cell in products[1:3])
    assert all(row.count("|") == head.count("|") for row in rows)
    assert all(f"`{commit[:10]}`" in said for commit in commits(gpu, price.FILES))


def test_kinds_of_products_that_are_behind() -> None:
    cases = [
        BenchCase("forward", 64, 128, n).record() | {"us": {"samebits": us, "torch": 9.0}}
        for n, us in ((8, 9.0), (16, 10.0), (24, 12.0))
    ]
    cases += [BenchCase("dX", 64, 128, 8).record() | {"us": {"samebits": 8.0, "torch": 9.0}}]
    *_, row = gpu_behind({"cases": cases}).splitlines()
    assert row == "| forward | bfloat16 | 64 | 2 of 3 | 0.877 | 0.75 at 128, 24 |"


@pytest.mark.parametrize("wrong", [0, 3])
def test_rows_that_change_with_the_batch_are_counted(wrong: int) -> None:
    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x.float() @ w
        y[:wrong] += len(x)  # which depends on the batch
        return y

    x, w = torch.ones(8, 4, dtype=torch.bfloat16), torch.ones(4, 2)
    assert peers.changed(run, x, w, at=(1, 5)) == min(wrong, 1) + min(wrong, 5)


def test_tiny_products_have_a_picture_if_they_were_measured() -> None:
    us = {"samebits": 4.0, "torch": 9.0, "copy": 3.0}
    case = {"work": "bmm", "dtype": "bfloat16", "batch": 1000, "m": 4, "k": 5, "n": 6, "us": us}
    data = {"environment": {"gpu": "A GPU"}, "ceilings": {"copy_bytes_per_s": 2e12}, "cases": [case]}
    assert "(docs/assets/a-gpu-tiny.svg)" in gpu_tiny(data)
    drawn = plot.render(plot.gpu_tiny(data))
    assert plot.OURS in drawn
    assert plot.THEIRS in drawn
    assert gpu_tiny(data | {"cases": []}) == "Not measured yet."
    assert (f"{GPUS[0]}-tiny.svg" in plot.PICTURES) == bool(tiny(load(f"{GPUS[0]}/bench.json")))
    assert {path.name for path in plot.ASSETS.glob("*.svg")} == plot.PICTURES.keys()


def test_the_last_digits_of_a_number_do_not_change_a_picture() -> None:
    def drawn(top: float) -> str:
        figure, axes = plot.plt.subplots()
        axes.plot([0, 1])
        figure.subplots_adjust(top=top)
        return plot.render(figure)

    with plot.matplotlib.rc_context(plot.STYLE):
        assert drawn(0.9) == drawn(0.9 + 1e-12)


def test_attention_invariance(monkeypatch: pytest.MonkeyPatch) -> None:
    small = attention_invariance.SMALL_SETUPS, attention_invariance.SMALL, "cpu"
    setups = attention_invariance.invariance(*small)
    ways = [way for s in setups for way in s["ways"]]
    assert {way["differing"] for way in ways} == {0}
    assert {"chunks of 7", "decoding, 1 at a time", "decoding from pages of 9", "a cache that drops keys"} | {
        "packed",
        "padded on the left",
        "padded on the right",
    } <= {way["way"] for way in ways}
    counts = {key: sum(way[key] for way in ways) for key in ("values", "differing")}
    data = {
        "environment": environment("c0ffee"),
        "setups": setups,
        "compared": counts["values"],
        "differing": 0,
    }
    said = gpu_attention_invariance(data)
    assert (
        f"{counts['values']:,} values of 2 kinds of attention, beside one prefill of each: 0 differ." in said
    )

    def from_the_second_slot(*x: Any, **options: Any) -> Any:
        keys = (torch.nn.functional.pad(t, (0, 0, 0, 0, 1, 0)) for t in x[1:])
        return (
            samebits.attention(x[0], *keys, **options)
            if x[0].ndim == 4
            else samebits.attention(*x, **options)
        )

    # Keys counted from another place: every other way has other bits then.
    monkeypatch.setattr(attention_invariance, "attention", from_the_second_slot)
    ways = attention_invariance.invariance(*small)[1]["ways"]
    assert any(way["differing"] for way in ways)


def test_counters() -> None:
    names = ["ID", "Kernel Name", *counters.METRICS.values()]

    def row(kernel: str, nanoseconds: str, grid: str) -> list[str]:
        value = {"seconds": nanoseconds, "blocks": grid, "hertz": "1500000000", "cycles": "1,000"}
        return ["0", kernel, *(value.get(name, "50") for name in counters.METRICS)]

    lines = [names, ["", "", *["unit"] * len(counters.METRICS)]]
    lines += [
        row("tensor_core_sm90", "2000", "100"),
        row("gemm<32, 8>", "1500", "200"),
        row("reduce", "500", "9"),
    ]
    lines += [row("fma_sm90", "3000", "5"), row("fma_sm90", "1000", "3"), row("sgemm", "3000", "7")]
    quoted = "\n".join(",".join(f'"{cell}"' for cell in line) for line in lines)
    assert counters.parse("==ERROR== ERR_NVGPUCTRPERM\n") == []
    found = counters.parse(f"==PROF== Connected\n{quoted}\n")
    assert [(len(case["samebits"]), len(case["torch"])) for case in found] == [(1, 2), (2, 1)]
    assert found[0]["samebits"][0]["seconds"] == 2e-6
    cases = [
        {"work": "dX", "m": 1000, "k": 64, "n": 32, "dtype": dtype, **kernels}
        for dtype, kernels in zip(("bfloat16", "float32"), found, strict=True)
    ]
    made = environment("c0ffee") | {"gpu": "A GPU", "multiprocessors": 132}
    said = gpu_counters({"environment": made, "cases": cases})
    assert "| dX 1,000, 64, 32, bfloat16 | samebits | 2.0 | 1.50 | 50% | 0 | 50% | 0.0 |" in said
    assert "|  | `gemm<32, 8>` | 2.0 | 1.50 |" in said


def test_no_point_of_the_roofline_is_under_its_label() -> None:
    for gpu in GPUS:
        with plot.matplotlib.rc_context(plot.STYLE):
            figure = plot.gpu_roofline(load(f"{gpu}/bench.json"))
            figure.canvas.draw()
        (axes,) = figure.axes
        (label,) = (text for text in axes.texts if "clone" in text.get_text())
        assert "No bound" in label.get_text()
        extent = plot.matplotlib.text.Text.get_window_extent(label)  # without the line that leads from it
        points = [axes.transData.transform(line.get_xydata()) for line in axes.lines]
        assert not any(extent.contains(*point) for line in points for point in line)
        plot.plt.close(figure)


def test_contestants_alone_take_turns_in_a_fair_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "ALONE", 0.005)
    calls: list[str] = []

    def run(name: str) -> float:
        time.sleep(0.001)
        calls.append(name)
        return float(len(calls))

    counted = clock.alone({name: partial(run, name) for name in "AB"})
    turns = [(name, len([*turn])) for name, turn in itertools.groupby(calls)]
    assert "".join(name for name, _ in turns) == "BABA"
    assert min(counted["B"]) > turns[0][1] + turns[1][1]  # its first turn, after a pause, does not count
    assert counted["A"][-1] == len(calls)


def test_schedules_have_names_of_their_own() -> None:
    for kernel in PRODUCTS:
        schedules = {*kernel.catalogue}
        assert len({tune.label(s) for s in schedules}) == len(schedules)  # times are kept by name


def test_a_tuners_report() -> None:
    us, cost = {"torch": 10.0, "one": 8.0, "two": 5.0}, {"one": 7.25, "two": 5.5}
    case = BenchCase("forward", 16, 64, 32).record() | {"us": us, "cost": cost, "chosen": "one"}
    assert tune.speeds(case) == (1.25, 2.0)
    lines, means = tune.report([case, case | {"chosen": "two"}])
    assert [next(column.cells) for column in lines.columns] == (
        [
            "forward",
            "bfloat16",
            "1",
            "64",
            "32",
            "16",
            "10.0",
            "8.0",
            "7.2",
            "1.250",
            "5.0",
            "5.5",
            "2.000",
            "two",
        ]
    )
    assert lines.row_count == 2
    assert [*means.columns[4].cells] == ["2.000"]


@pytest.mark.parametrize("name", sorted({kernel.name for kernel in PRODUCTS}))
def test_the_table_of_what_is_proven_knows_every_kernel_of_products(name: str) -> None:
    of = [o.name for o in support.OPERATIONS if re.fullmatch(o.kernels, f"{name}: shapes, layouts, strides")]
    assert len(of) == 1, of


def test_what_a_gpu_will_need_is_known_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H100 has slower memory, and wants other kernels for some shapes."""
    monkeypatch.setattr(held_out, "drawn", lambda: [(62, 7168, 36864), (300, 768, 3072)])
    h200, h100 = (ahead.needed(gpu, ahead.timed).keys() for gpu in ahead.GPUS)
    assert min(len(h200), len(h100)) > 10
    assert h200 != h100


def test_all_kernels_of_a_call_are_compiled_ahead() -> None:
    """Gradients of delta rules take six behind those of the forward."""

    def run() -> Any:
        cases = [c for c in fused.fused_cases(False) if c.kernel == "delta" and "gradients" in c.what]
        return fused.loads(cases[:1], torch.device("cpu"))

    sources = {spec.source for spec in ahead.needed(ahead.GPUS[0], run)}
    of_gradients = {f"delta_{which}_backward.cu" for which in ("scores", "matrices", "chains", "rows")}
    of_forward = {"delta_begin.cu", "delta_chunks.cu"}
    assert sources >= {*of_forward, "linear_begin.cu", "delta_states.cu", *of_gradients}


def test_the_list_of_cubins_has_every_source() -> None:
    sources = {path.name for path in compiler.KERNELS.glob("*.cu")}
    assert {spec.source for spec, _ in cubins.kernels()} == sources


@pytest.mark.parametrize("model", engines.MODELS)
def test_prompts_have_tokens_of_the_model(
    model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Stock vLLM without a tokenizer takes any, and its embedding reads past its table."""
    asked: set[int] = set()

    class LLM:
        llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=lambda: None))

        def __init__(self, folder: str, **options: Any) -> None:
            assert json.loads(Path(folder, "config.json").read_text()) == engines.MODELS[model]

        def collective_rpc(self, call: Any) -> list[Any]:
            return [{"attention": "SOME", "tokens_cached": 9}]

        def generate(self, prompts: Any, sampling: Any, **options: Any) -> None:
            asked.update(token for prompt in prompts for token in prompt["prompt_token_ids"])

    called = SimpleNamespace(LLM=LLM, SamplingParams=SimpleNamespace)
    lora = SimpleNamespace(LoRARequest=lambda *of: of)
    for name, module in (("vllm", called), ("vllm.lora", lora), ("vllm.lora.request", lora)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(vllm, "save_adapters", lambda folder, shape: [folder] * vllm.ADAPTERS)
    monkeypatch.setattr(engines, "DECODED", ((1, 128),) * len(engines.DECODED))
    monkeypatch.setattr(engines, "PREFILLED", (1, 2048))
    found = vllm.serve("stock", argparse.Namespace(model=model, ranks=1))
    assert (found["attention"], found["tokens_cached"]) == ("SOME", 9)
    last = engines.MODELS[model]["vocab_size"] - 1
    assert 0.99 * last < max(asked) <= last


def test_engines_share_works_and_results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[int, int, int]] = []

    def generate(prompts: list[list[int]], sampled: int) -> None:
        assert {*itertools.chain(*prompts)} <= {*range(7)}
        asked.append((len(prompts), len(prompts[0]), sampled))

    found = engines.rates(generate, 7)
    works = [(rows, engines.PROMPT, sampled) for rows, sampled in engines.DECODED]
    works += [(*engines.PREFILLED, 1), (1, 2048, 1)]
    assert asked == [work for work in works for _ in range(1 + (5 if work == works[-1] else engines.ROUNDS))]
    assert found["tokens_per_second"].keys() == {*engines.WORKS}

    def ask(*arguments: str, **variables: str) -> Any:
        assert arguments[:2] == ("vllm", "--engines")
        assert ("VLLM_BATCH_INVARIANT" in variables) == (arguments[-1] == "invariant")
        return found | {"start_seconds": 1.0, "tokens_cached": 9}

    out = tmp_path / "vllm.json"
    monkeypatch.setattr(engines, "ask", ask)
    monkeypatch.setattr(
        "sys.argv", ["vllm", "--engines", "stock,invariant", "--commit", "none", "--out", str(out)]
    )
    vllm.main()
    data = json.loads(out.read_text())
    assert [*data["engines"]] == ["stock", "invariant"]
    assert data["model"] == "Qwen3 8b"


def test_held_out_shapes() -> None:
    drawn = held_out.drawn()
    assert len({*drawn}) == 40
    assert drawn[:2] == [(288, 3072, 16384), (7236, 3072, 5120)]  # another draw is another benchmark
    assert {(k, n) for _, k, n in drawn} & {*SHAPES} == set()
    every = held_out.products(drawn)
    assert [held_out.sizes(work, s) for work, s in every] == [shape for shape in drawn for _ in range(3)]
    assert {work: (s.a_by_k, s.b_by_k) for work, s in every} == {
        "forward": (True, True),
        "dX": (True, False),
        "dW": (False, False),
    }


def test_held_out_times_are_not_those_that_chose() -> None:
    class Clock:
        """The third is fast while a winner is sought, and not thereafter."""

        def __init__(self, **first: float) -> None:
            self.early = first
            self.ran: list[list[str]] = []

        def first(self) -> dict[str, list[float]]:
            return {name.strip("_"): [us] for name, us in self.early.items()}

        def final(self, names: Sequence[str]) -> dict[str, list[float]]:
            times = {"torch": 12.0, "0": 10.0, "2": 9.0, "3": 9.5 if self.ran else 8.0}
            self.ran.append([*names])
            return {name: [times[name]] * 6 for name in names}

    clock = Clock(_0=10.0, _1=11.0, _2=8.5, _3=8.0, torch=10.0)
    us, place, early = held_out.measured(clock)
    assert early == {"0": 10.0, "1": 11.0, "2": 8.5, "3": 8.0, "torch": 10.0}
    assert clock.ran == [["0", "3", "2"], ["torch", "0", "3"]]
    assert (us, place) == ({"torch": 12, "untuned": 10, "tuned": 9.5}, 3)

    alone = Clock(_0=10.0, _1=11.0, torch=10.0)
    assert held_out.measured(alone)[:2] == ({"torch": 12, "untuned": 10, "tuned": 10}, 0)
    assert alone.ran == [["torch", "0"]]

    noisy = Clock(_0=10.0, _3=8.0, torch=10.0)
    noisy.final = lambda names: {name: [6.0] * 3 + [9.5] * 3 if name == "3" else [10.0] * 6 for name in names}  # type: ignore[method-assign]
    assert held_out.measured(noisy)[1] == 0
    case = {"work": "dX", "m": 16, "k": 64, "n": 32, "us": us}
    data = {"environment": environment("c0ffee") | {"gpu": "A GPU"}, "seed": 28, "left": 1, "cases": [case]}
    said = gpu_held_out(data)
    assert "| M <= 128 | all | 1 | 1.263 | 1.263 | 1.200 | 1.200 | 0.950 | 0.950 |" in said
    assert "Left when the budget was spent: 1." in said
    assert held_out.show(data).row_count == 2


def test_schedules_of_triton() -> None:
    pytest.importorskip("triton")
    data = load("nvidia-h200/triton_tune.json")
    some = [triton_choice(c, 132) for c in data["cases"] if c["m"] <= 128]
    said = gpu_triton_tune(data)
    assert f"| {len(some)} | {statistics.geometric_mean(some):.3f} |" in said
    assert f"| {min(some):.3f} |" in said


@pytest.mark.parametrize("m", [1, 3])
def test_scales_lie_as_pytorch_takes_them(m: int) -> None:
    """Those of neighbouring rows side by side; of one row, too, with strides as if there were more."""
    a, b = torch.zeros(m, 640), torch.zeros(260, 640)
    given = a, b, torch.rand(m, 5), torch.rand(3, 5)
    _, _, of_a, of_b = scaled.for_pytorch(*given)
    assert of_a.stride() == (1, m)
    assert of_b.stride() == (1, 8)
    assert torch.equal(of_a, given[2])
    assert torch.equal(of_b, given[3].T)


def test_tables_of_fp8() -> None:
    times = {"us": {"ours": 2.0, "bf16": 6.0, "copy": 1.8}, "tflops": 9.0, "bytes": 4_000_000}
    cases = [dataclasses.asdict(case) | times for case in scaled.GROUPED]
    quantized = [{"kind": "1 x 128", "rows": 2, "k": 128} | times]
    made = {"date": "", "commit": "", "gpu": "", "versions": {}}
    data = {"environment": made, "grouped": cases, "quantize": quantized}
    assert "| 1.50, 9 |" in gpu_scaled_grouped(data)
    assert "2.00 TB/s" in gpu_scaled_grouped(data)
    assert "| 0.90, 2.0 us |" in gpu_quantize(data)


def test_code_of_other_gpus_becomes_zeros(tmp_path: Path) -> None:
    """Machine code of Hopper and small PTX stay where they are, and so does all that is no GPU code."""
    ptx, machine, head = 1, 2, 64
    images = [
        (ptx, 80, b"small"),
        (ptx, 80, b"P" * 300_000),
        (machine, 80, b"8" * 99),
        (machine, 90, b"9" * 99),
    ]
    entries = b"".join(
        struct.pack("<HHIQ", kind, 0, head, len(code))
        + struct.pack("<12xI", arch).ljust(head - 16, b"h")
        + code
        for kind, arch, code in images
    )
    whole = (
        b"ELF"
        + offline.FATBIN
        + struct.pack("<HHQ", 1, 16, len(entries))
        + entries
        + offline.FATBIN
        + b"x" * 12
    )
    library = tmp_path / "library.so"
    library.write_bytes(whole)
    offline.without_other_code(library, offline._not_hopper)
    expected = whole.replace(b"P" * 300_000, bytes(300_000)).replace(b"8" * 99, bytes(99))
    assert library.read_bytes() == expected
