"""Draw docs/assets/*.svg from benchmarks/results. With --check, fail if a picture is not up to date.

python -m benchmarks plot [--check]
"""

from __future__ import annotations

import argparse
import io
import re
from collections.abc import Callable
from typing import Any

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks import engines, record, steps
from benchmarks.record import GPUS, ROOT, load, measured, tiny
from benchmarks.rows import TOKENS, WIDTHS
from samebits.tools.bench.attention_report import speed
from samebits.tools.bench.report import forward, is_forward, ratio

ASSETS = ROOT / "docs" / "assets"

# The same results give the same file: no date, no random ids, and text as text (no glyph outlines).
STYLE: Any = {
    "svg.hashsalt": "samebits",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 11,
    "figure.facecolor": "white",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e5e5e5",
}
OURS, THEIRS, ORACLE = "#00796b", "#c62828", "#7e57c2"


def overview(**results: dict[str, Any]) -> Figure:
    """README's first picture: KL over steps of training, tokens/s of the rollout, time of a training step."""
    panels = {"trl_vllm": _kl, "vllm": _engines, "steps": _training}
    drawn = {name: draw for name, draw in panels.items() if name in results}
    figure, (every,) = plt.subplots(
        1, len(drawn), figsize=(4 * len(drawn), 3.4), layout="constrained", squeeze=False
    )
    for axes, (name, draw) in zip(every, drawn.items(), strict=True):
        draw(axes, results[name])
        gpu = results[name]["environment"]["gpu"].removeprefix("NVIDIA ")
        axes.set_title(f"{axes.get_title(loc='left')}, {gpu}", fontsize=11, loc="left")
    sides = (("PyTorch, vLLM", THEIRS), ("compiled PyTorch", ORACLE), ("samebits", OURS))
    with_compiled = any("torch, compiled" in case for case in results.get("steps", {}).get("cases", ()))
    handles = [Patch(color=colour, label=name) for name, colour in sides if colour != ORACLE or with_compiled]
    figure.legend(handles=handles, frameon=False, ncols=3, loc="outside lower center")
    return figure


def _kl(axes: Axes, data: dict[str, Any]) -> None:
    for run, colour in zip(data["runs"].values(), (THEIRS, OURS), strict=True):
        kl = [step["kl"] for step in run["steps"]]
        axes.plot(range(1, len(kl) + 1), kl, color=colour, lw=2, marker=".")
    axes.annotate("exactly 0", (1, 0), (2, 6), textcoords="offset points", color=OURS)
    axes.set_yscale("symlog", linthresh=1e-6)
    axes.set_yticks([0, 1e-6, 1e-5, 1e-4, 1e-3], ["0", "1e-6", "1e-5", "1e-4", "1e-3"])
    axes.set_ylim(-2e-7, 2e-3)
    axes.set_xlabel("step of TRL's GRPO with vLLM")
    axes.set_title("KL of rollout and trainer", loc="left")


def _engines(axes: Axes, data: dict[str, Any]) -> None:
    works = [work for work in engines.WORKS if work.startswith("decode")]
    stock = [engines.speed(data["engines"]["stock"], work) for work in works]
    for name, colour, shift in (("stock", THEIRS, -0.2), ("samebits", OURS, 0.2)):
        speeds = [engines.speed(data["engines"][name], work) for work in works]
        heights = [speed / of for speed, of in zip(speeds, stock, strict=True)]
        bars = axes.bar([i + shift for i in range(len(works))], heights, 0.4, color=colour)
        axes.bar_label(bars, [f"{s:,.0f}" for s in speeds], fontsize=8)
    axes.margins(y=0.1)
    axes.set_xticks(range(len(works)), [work.split()[1] for work in works])
    axes.set_xlabel("rows that decode (height: stock = 1)")
    axes.grid(axis="x", visible=False)
    axes.set_title(f"rollout, tokens/s: {data['model']}", loc="left")


def _training(axes: Axes, data: dict[str, Any]) -> None:
    cases = steps.trained(data)
    for place, case in enumerate(cases.values()):
        times = {
            THEIRS: case["torch"]["ms"],
            ORACLE: case.get("torch, compiled", {}).get("ms"),
            OURS: steps.best(case)["ms"],
        }
        times = {colour: ms for colour, ms in times.items() if ms}
        for at, (colour, ms) in enumerate(times.items()):
            width = 0.8 / len(times)
            bar = axes.bar(place + (at - (len(times) - 1) / 2) * width, ms, width, color=colour)
            axes.bar_label(bar, [f"{ms:,.0f}"], fontsize=8)
    axes.set_xticks(range(len(cases)), [*cases])
    axes.margins(y=0.1)
    axes.grid(axis="x", visible=False)
    axes.set_title("training step, ms", loc="left")


def drift(data: dict[str, Any]) -> Figure:
    sizes = [v for v in data["variations"] if v["kind"] == "batch size"]
    labels = [v["name"].removeprefix("batches of ") for v in sizes]
    figure, axes = plt.subplots(figsize=(7.2, 3.2), layout="constrained")
    for side, name, colour, shift in (
        ("torch", "torch.nn.functional.linear", THEIRS, -0.2),
        ("samebits", "samebits.linear", OURS, 0.2),
    ):
        changed = [v[side] for v in sizes]
        bars = axes.bar([i + shift for i in range(len(sizes))], changed, 0.4, color=colour, label=name)
        axes.bar_label(bars, [f"{c:,}" for c in changed], fontsize=9)
    dtype = data["layers"][0]["dtype"]
    rows = sizes[0]["rows"]
    axes.set_xticks(range(len(sizes)), labels)
    axes.set_xlabel("rows in the batch")
    axes.set_ylabel("rows with other bits")
    axes.set_title(
        f"{data['model']}: {len(data['layers'])} linear layers, {rows:,} rows, {dtype}",
        fontsize=11,
        loc="left",
    )
    axes.margins(y=0.12)
    axes.grid(axis="x", visible=False)
    axes.legend(frameon=False)
    return figure


def reference_speed(data: dict[str, Any]) -> Figure:
    cases = data["cases"]
    figure, axes = plt.subplots(figsize=(7.2, 3.2), layout="constrained")
    libraries = (("samebits", OURS), ("mmasim", ORACLE), ("torch.matmul", THEIRS))
    for place, (library, colour) in enumerate(libraries):
        at, speeds = [], []
        for i, case in enumerate(cases):
            for result in case["results"]:
                if result["library"] == library:
                    at.append(i + (place - 1) * 0.27)
                    speeds.append(result["gmac_per_s"])
        bars = axes.bar(at, speeds, 0.27, color=colour, label=library)
        axes.bar_label(bars, [f"{s:.0f}" if s >= 10 else f"{s:.2g}" for s in speeds], fontsize=9)
    axes.set_yscale("log")
    axes.set_xticks(
        range(len(cases)), [f"{case['model'] or case['name']}\n{case['dtype']}" for case in cases]
    )
    axes.set_ylabel("GMAC/s (log scale)")
    threads = data["environment"]["threads"]
    axes.set_title(f"{data['environment']['cpu']}, {threads} threads", fontsize=11, loc="left")
    axes.margins(y=0.15)
    axes.grid(axis="x", visible=False)
    figure.legend(frameon=False, ncols=3, loc="outside lower center")
    return figure


def _shape(case: dict[str, Any]) -> str:
    return f"{case['k']}, {case['n']}"


def gpu_speed(data: dict[str, Any]) -> Figure:
    """A dot for each shape and M, and the geometric mean."""
    figure, panels = plt.subplots(1, 3, figsize=(10.5, 3.8), layout="constrained", sharey=True)
    for axes, work in zip(panels, ("forward", "dX", "dW"), strict=True):
        grads = [c for c in data["cases"] if c["work"] == work and c["dtype"] == "bfloat16"]
        cases = forward(data) if work == "forward" else grads
        shapes = list(dict.fromkeys(map(_shape, cases)))
        colours = plt.colormaps["viridis"](np.linspace(0.0, 0.9, len(shapes)))
        for shape, colour in zip(shapes, colours, strict=True):
            line = [c for c in cases if _shape(c) == shape]
            axes.plot(
                [c["m"] for c in line], [ratio(c) for c in line], color=colour, lw=0.8, marker=".", ms=4
            )
        sizes = sorted({c["m"] for c in cases})
        means = [np.exp(np.mean([np.log(ratio(c)) for c in cases if c["m"] == m])) for m in sizes]
        axes.plot(sizes, means, color=OURS, lw=3, label="geometric mean")
        axes.axhline(1, color=THEIRS, lw=1.5, label="torch (cuBLAS)")
        axes.set_xscale("log", base=2)
        axes.set_xlabel("rows M")
        axes.set_title(f"{work}, {len(shapes)} shapes", fontsize=11, loc="left")
    panels[0].set_ylabel("speed relative to torch")
    panels[0].legend(frameon=False)
    figure.suptitle(f"{data['environment']['gpu']}, bf16: each thin line is one (K, N)", fontsize=11)
    return figure


def gpu_roofline(data: dict[str, Any]) -> Figure:
    figure, axes = plt.subplots(figsize=(7.2, 4), layout="constrained")
    cases = [c for c in data["cases"] if is_forward(c) and c["dtype"] == "bfloat16"]
    flop = np.array([2 * c["m"] * c["k"] * c["n"] for c in cases], float)
    size = np.array([2 * (c["m"] * c["k"] + c["k"] * c["n"] + c["m"] * c["n"]) for c in cases], float)
    top, copy = data["ceilings"]["flop_per_s"] / 1e12, data["ceilings"]["copy_bytes_per_s"] / 1e12
    at = np.geomspace((flop / size).min() / 1.3, (flop / size).max() * 1.3, 200)
    axes.plot(at, np.minimum(at * copy, top), color="black", lw=1)
    axes.annotate(
        f"copy (torch.clone) in the same run:\n{copy:.2f} TB/s read and written.\n"
        "No bound: a copy is half writes,\nproducts of few rows mostly read",
        (1.4, 1.4 * copy),
        (0.03, 0.74),
        textcoords="axes fraction",
        fontsize=9,
        arrowprops={"arrowstyle": "-", "lw": 0.6, "relpos": (0.2, 0)},
    )
    axes.text(
        at[-1], 1.1 * top, f"torch.mm 8192 cubed, {top:.0f} TFLOP/s", fontsize=9, ha="right", va="bottom"
    )
    for who, colour, marker in (("torch", THEIRS, "x"), ("samebits", OURS, ".")):
        speed = flop / np.array([c["us"][who] for c in cases]) / 1e6
        axes.plot(flop / size, speed, marker, color=colour, ms=5, label=who, mew=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("floating-point operations per byte read or written")
    axes.set_ylabel("TFLOP/s")
    axes.set_title(f"{data['environment']['gpu']}, forward, bf16", fontsize=11, loc="left")
    axes.legend(frameon=False, loc="lower right")
    return figure


def gpu_tiny(data: dict[str, Any]) -> Figure:
    """Bars of samebits and torch for each batched product, and a mark for a copy of as many bytes."""
    by_dtype = {t: [c for c in tiny(data) if c["dtype"] == t] for t in ("float32", "bfloat16")}
    shown = {dtype: cases for dtype, cases in by_dtype.items() if cases}
    figure, (panels,) = plt.subplots(
        1, len(shown), figsize=(10.5, 4.2), layout="constrained", sharey=True, squeeze=False
    )
    for axes, (dtype, cases) in zip(panels, shown.items(), strict=True):
        at = np.arange(len(cases))
        for who, colour, shift in (("torch", THEIRS, -0.2), ("samebits", OURS, 0.2)):
            axes.barh(at + shift, [c["us"][who] for c in cases], 0.4, color=colour, label=who)
        axes.plot(
            [c["us"]["copy"] for c in cases], at, "|", color="black", ms=16, label="copy of as many bytes"
        )
        axes.set_yticks(at, [f"{c['batch']} x {c['m']}, {c['k']}, {c['n']}" for c in cases], fontsize=9)
        axes.set_xlabel("microseconds")
        axes.set_title(f"{dtype}, batch x M, K, N", fontsize=11, loc="left")
        axes.set_xscale("log")
        axes.grid(axis="y", visible=False)
    panels[0].invert_yaxis()
    panels[0].legend(frameon=False, fontsize=9)
    figure.suptitle(f"{data['environment']['gpu']}: batches of tiny products", fontsize=11)
    return figure


def gpu_drift(data: dict[str, Any]) -> Figure:
    drifts, sizes = data["drift"], data["drift"][0]["rows"]
    shares = np.array(
        [[100 * n / m for n, m in zip(d["changed"]["torch"], sizes, strict=True)] for d in drifts]
    )
    figure, axes = plt.subplots(figsize=(7.6, 0.27 * len(drifts) + 1.3), layout="constrained")
    axes.imshow(shares, cmap="Reds", vmin=0, vmax=130, aspect="auto")
    for (i, j), share in np.ndenumerate(shares):
        if share:
            axes.text(j, i, f"{share:.0f}" if share >= 1 else "<1", ha="center", va="center", fontsize=8)
    axes.set_xticks(range(len(sizes)), [str(m) for m in sizes], fontsize=8)
    axes.set_yticks(range(len(drifts)), [f"{d['k']}, {d['n']}" for d in drifts], fontsize=8)
    axes.set_xlabel("rows M in the batch")
    axes.set_ylabel("K, N")
    ours = sum(sum(d["changed"]["samebits"]) for d in drifts)
    axes.set_title(
        f"torch.mm, bf16: rows with other bits than in a batch of {sizes[-1]}, % (samebits: {ours} rows)",
        fontsize=10,
        loc="left",
    )
    axes.grid(visible=False)
    return figure


def gpu_attention(data: dict[str, Any]) -> Figure:
    """Speed beside PyTorch over tokens, forward and with backward, and over keys in decoding."""
    figure, panels = plt.subplots(1, 3, figsize=(10.5, 3.8), layout="constrained", sharey=True)
    for axes, (work, title) in zip(
        panels, (("forward", "forward"), ("both", "forward and backward"), (None, "decode")), strict=True
    ):
        lines: dict[str, dict[int, list[float]]] = {}
        for c in data["cases"]:
            ratio = speed(c)
            if ratio is None or (c["form"] != "decode" if work is None else c["work"] != work):
                continue
            if work is not None and c["form"] not in ("causal", "full"):
                continue
            name = f"batch {c['batch']}" if work is None else f"{c['form']}, head of {c['head']}"
            lines.setdefault(name, {}).setdefault(c["keys"], []).append(ratio)
        colours = plt.colormaps["viridis"](np.linspace(0.0, 0.9, max(1, len(lines))))
        for (name, by_keys), colour in zip(lines.items(), colours, strict=True):
            at = sorted(by_keys)
            means = [np.exp(np.mean(np.log(by_keys[n]))) for n in at]
            axes.plot(at, means, color=colour, lw=1.5, marker=".", label=name)
        axes.axhline(1, color=THEIRS, lw=1.5)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("keys" if work is None else "tokens of a sequence")
        axes.set_title(title, fontsize=11, loc="left")
        axes.legend(frameon=False, fontsize=9)
    panels[0].set_ylabel("speed relative to torch")
    figure.suptitle(
        f"{data['environment']['gpu']}, bf16: attention beside torch's fastest backend", fontsize=11
    )
    return figure


def gpu_rows(data: dict[str, Any]) -> Figure:
    """Bandwidth beside a copy's, and speed beside PyTorch, over the width of a row, for each operation."""
    figure, panels = plt.subplots(1, 2, figsize=(10.5, 3.8), layout="constrained")
    cases = [
        c for c in data["cases"] if c["rows"] == TOKENS and c["n"] in WIDTHS and c["dtype"] == "bfloat16"
    ]
    ops = list(dict.fromkeys(c["op"] for c in cases))
    colours = plt.colormaps["viridis"](np.linspace(0.0, 0.9, max(1, len(ops))))
    for axes, who, title in zip(
        panels, ("copy", "torch"), ("bandwidth relative to a copy", "speed relative to torch"), strict=True
    ):
        for op, colour in zip(ops, colours, strict=True):
            some = [c for c in cases if c["op"] == op]
            ratios = [c["us"][who] / c["us"]["samebits"] for c in some]
            axes.plot([c["n"] for c in some], ratios, color=colour, lw=1.5, marker=".", label=op)
        axes.axhline(1, color=THEIRS, lw=1.5)
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("values in a row")
        axes.set_title(title, fontsize=11, loc="left")
    panels[1].legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.suptitle(f"{data['environment']['gpu']}, bf16: {TOKENS:,} rows", fontsize=11)
    return figure


def gpu_logp(data: dict[str, Any]) -> Figure:
    """Time and memory of log-probabilities, with and without stored logits, for each size."""
    cases = data["cases"]
    sizes = [f"{c['tokens']:,} tokens,\nD {c['d']:,}, V {c['v']:,}" for c in cases]
    figure, panels = plt.subplots(1, 3, figsize=(10.5, 3.6), layout="constrained", sharey=True)
    for axes, (key, said, unit) in zip(
        panels,
        (
            ("forward_graph_ms", "forward, in CUDA graphs", "ms"),
            ("forward_backward_ms", "forward and backward, eager", "ms"),
            ("forward_mib", "memory of the forward", "MiB"),
        ),
        strict=True,
    ):
        for who, colour, shift in (("torch", THEIRS, -0.2), ("samebits", OURS, 0.2)):
            values = [c[key][who] for c in cases]
            bars = axes.barh(np.arange(len(cases)) + shift, values, 0.4, color=colour, label=who)
            axes.bar_label(
                bars, [f"{v:,.3g}" if v < 1000 else f"{v:,.0f}" for v in values], fontsize=8, padding=2
            )
        axes.set_xscale("log")
        axes.margins(x=0.2)
        axes.set_xlabel(unit)
        axes.set_title(said, fontsize=11, loc="left")
        axes.grid(axis="y", visible=False)
    panels[0].set_yticks(range(len(cases)), sizes, fontsize=9)
    panels[0].invert_yaxis()
    panels[0].legend(frameon=False, fontsize=9)
    figure.suptitle(
        f"{data['environment']['gpu']}, bf16: log-probabilities, logits stored by torch", fontsize=11
    )
    return figure


def gpu_models(data: dict[str, Any]) -> Figure:
    """Two plots: the training loop's mismatch at each step, and generation against training."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 3.6), layout="constrained")
    for who, colour in (("torch", THEIRS), ("samebits", OURS)):
        largest = data["training"][who]["largest"]
        left.plot(range(1, len(largest) + 1), largest, color=colour, lw=2, marker=".", label=who)
    left.set_xlabel("step")
    left.set_title("GRPO: largest |log-prob of trainer − of rollout|", fontsize=11, loc="left")
    left.set_ylim(bottom=0)
    left.margins(y=0.15)
    left.legend(frameon=False)
    cases = list(dict.fromkeys((d["model"], d["name"]) for d in data["drift"]))
    for who, colour, shift in (("torch", THEIRS, -0.2), ("samebits", OURS, 0.2)):
        found = {(d["model"], d["name"]): d for d in data["drift"] if d["by"] == who}
        shares = [100 * found[case]["differing"] / found[case]["tokens"] for case in cases]
        bars = right.barh([i + shift for i in range(len(cases))], shares, 0.4, color=colour, label=who)
        right.bar_label(bars, [f"{found[case]['differing']:,}" for case in cases], fontsize=9, padding=3)
    right.set_yticks(range(len(cases)), [f"{model}: {name}" for model, name in cases], fontsize=9)
    right.invert_yaxis()
    right.margins(x=0.12)
    right.set_xlabel("% of tokens")
    right.set_title("log-probs with other bits than in training", fontsize=11, loc="left")
    right.grid(axis="y", visible=False)
    figure.suptitle(f"{data['environment']['gpu']}, bf16", fontsize=11)
    return figure


def gpu_vllm(data: dict[str, Any]) -> Figure:
    """Each engine's tokens per second beside stock vLLM's, with its own."""
    figure, axes = plt.subplots(figsize=(8.4, 3.6), layout="constrained")
    found = data["engines"]
    names = {"stock": "stock", "invariant": "VLLM_BATCH_INVARIANT=1", "samebits": "samebits"}
    colours = {"stock": THEIRS, "invariant": ORACLE, "samebits": OURS}
    for place, (name, colour) in enumerate(colours.items()):
        if name not in found:
            continue
        speeds = [engines.speed(found[name], work) for work in engines.WORKS]
        stock = [engines.speed(found["stock"], work) for work in engines.WORKS]
        at = [i + (place - 1) * 0.27 for i in range(len(speeds))]
        heights = [s / of for s, of in zip(speeds, stock, strict=True)]
        bars = axes.bar(at, heights, 0.27, color=colour, label=names[name])
        axes.bar_label(bars, [f"{s:,.0f}" for s in speeds], fontsize=8)
    axes.set_xticks(range(len(engines.WORKS)), engines.WORKS)
    axes.set_ylabel("speed, stock = 1")
    axes.set_title(f"vLLM, {data['model']}, {data['environment']['gpu']}: tokens/s", fontsize=11, loc="left")
    axes.margins(y=0.12)
    axes.grid(axis="x", visible=False)
    figure.legend(frameon=False, ncols=3, loc="outside lower center")
    return figure


def gpu_trl_vllm(data: dict[str, Any]) -> Figure:
    """By step of TRL's GRPO with vLLM: how far the loss is from the rollout, and the reward."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for (name, run), colour in zip(data["runs"].items(), (THEIRS, OURS), strict=True):
        at = range(1, len(run["steps"]) + 1)
        left.plot(at, [step["off"] for step in run["steps"]], color=colour, lw=2, marker=".", label=name)
        right.plot(at, run["reward"], color=colour, lw=2, marker=".", label=name)
    left.set_ylim(bottom=-0.002)
    left.set_xlabel("step")
    left.set_title("largest |importance ratio − 1|", fontsize=11, loc="left")
    left.legend(frameon=False)
    right.set_ylim(0, 1)
    right.set_xlabel("step")
    right.set_title("mean reward", fontsize=11, loc="left")
    figure.suptitle(f"TRL's GRPO with vLLM, {data['environment']['gpu']}", fontsize=11)
    return figure


def _of(results: str, draw: Callable[[dict[str, Any]], Figure]) -> Callable[[], Figure]:
    return lambda: draw(load(results))


PICTURES: dict[str, Callable[[], Figure]] = (
    {
        "overview.svg": lambda: overview(
            **{name: load(f"{gpu}/{name}.json") for name, gpu in record.overview().items()}
        ),
        "drift.svg": _of("cpu/drift.json", drift),
        "reference-speed.svg": _of("cpu/reference.json", reference_speed),
    }
    | {
        f"{gpu}-{what}.svg": _of(f"{gpu}/bench.json", draw)
        for gpu in GPUS
        for what, draw in (
            ("speed", gpu_speed),
            *((("tiny", gpu_tiny),) if tiny(load(f"{gpu}/bench.json")) else ()),
            ("roofline", gpu_roofline),
            ("drift", gpu_drift),
        )
        if gpu == GPUS[0] or what == "speed"
    }
    | {
        f"{gpu}-{what}.svg": _of(f"{gpu}/{what}.json", draw)
        for gpu in GPUS[:1]
        for what, draw in (
            ("rows", gpu_rows),
            ("logp", gpu_logp),
            ("models", gpu_models),
        )
        if gpu in measured(f"{what}.json")
    }
    | {
        f"{gpu}-attention.svg": _of(f"{gpu}/attention.json", gpu_attention)
        for gpu in measured("attention.json")
    }
    | {f"{gpu}-vllm.svg": _of(f"{gpu}/vllm.json", gpu_vllm) for gpu in measured("vllm.json")[:1]}
    | {
        f"{gpu}-trl-vllm.svg": _of(f"{gpu}/trl_vllm.json", gpu_trl_vllm)
        for gpu in measured("trl_vllm.json")[:1]
    }
)


def render(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    # Matplotlib names markers and clip paths by a hash of all digits, of which the last depend on the CPU.
    names: dict[str, str] = {}
    text = re.sub(
        r"\b[mp][0-9a-f]{10}\b", lambda m: names.setdefault(m[0], f"{m[0][0]}{len(names)}"), buffer.getvalue()
    )
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if a picture is out of date"
    )
    options = parser.parse_args()
    stale = []
    for name, draw in PICTURES.items():
        with matplotlib.rc_context(STYLE):
            text = render(draw())
        path = ASSETS / name
        if path.exists() and path.read_text() == text:
            continue
        stale.append(name)
        if not options.check:
            ASSETS.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            print(f"wrote {path}")
    if options.check and stale:
        raise SystemExit(f"out of date: {', '.join(stale)}; run python -m benchmarks plot")
