"""Write tables of benchmarks/results, and of the mode's rules, between the markers in README.md and docs.

python -m benchmarks.tables [--check]

A block starts with ``<!-- begin: NAME -->`` and ends with ``<!-- end: NAME -->``, each on its own line. With
``--check`` nothing is written: it fails if a block is not up to date.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from benchmarks import grouped, held_out, price, ranks, scaled, support
from benchmarks.host import ratios
from benchmarks.logp import PRODUCT
from benchmarks.record import GPUS, ROOT, load, measured, slug, tiny
from benchmarks.rows import TOKENS, means
from benchmarks.zoo.report import architectures
from samebits.mode import rules
from samebits.tools.bench.attention_report import attention_summary, bandwidth, speed, where
from samebits.tools.bench.cases import BETWEEN
from samebits.tools.bench.report import forward, ratio, summary

BLOCK = re.compile(
    r"(?<=^<!-- begin: )([a-z0-9-]+)( -->\n)(.*?)(?=^<!-- end: \1 -->$)", re.DOTALL | re.MULTILINE
)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *(list(row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def made_with(data: dict[str, Any]) -> str:
    e = data["environment"]
    versions = ", ".join(f"{name} {v}" for name, v in e["versions"].items())
    return (
        f"Measured {e['date']} at commit `{e['commit'][:10]}` on {e['cpu']}, {e['threads']} threads,"
        f" Python {e['python']}; {versions}."
    )


def reference_speed() -> str:
    data = load("cpu/reference.json")
    rows, shape, share = [], "", ""
    for case in data["cases"]:
        by_library = {r["library"]: r for r in case["results"]}
        ours, theirs, oracle = by_library["samebits"], by_library["torch.matmul"], by_library.get("mmasim")
        shape = f"{ours['m']} x {ours['k']} x {ours['n']}"
        row = [
            f"`{case['name']}`" + (f", `{case['model']}`" if case["model"] else ""),
            case["dtype"],
            f"{ours['gmac_per_s']:.3g}",
        ]
        if oracle:
            share = f"{oracle['m']} x {oracle['k']} x {oracle['n']}"
            row += [f"{oracle['gmac_per_s']:.2g}", f"{ours['gmac_per_s'] / oracle['gmac_per_s']:.0f}x"]
        else:
            row += ["", ""]
        rows.append([*row, f"{theirs['gmac_per_s']:.3g}", f"`{case['digest']}`"])
    head = ["contract", "inputs", "samebits", "mmasim", "samebits / mmasim", "torch.matmul", "digest"]
    return "\n\n".join(
        (
            table(head, rows),
            f"GMAC/s, medians, M x K x N = {shape}; samebits and mmasim write float32. mmasim computes"
            f" {share} of it, to the same bits; torch.matmul computes other bits, in the inputs' dtype.",
            made_with(data),
        )
    )


def before_after() -> str:
    """README's first figures: whole models on a GPU, or linear layers if models were not measured."""
    for gpu in measured("models.json"):
        said = gpu_models_drift(load(f"{gpu}/models.json"))
        if gpu in measured("embeddings.json"):
            said += f"\n\n{gpu_embeddings(load(f'{gpu}/embeddings.json'))}"
        return said
    data = load("cpu/drift.json")
    rows, theirs, ours = (sum(v[key] for v in data["variations"]) for key in ("rows", "torch", "samebits"))
    return "\n\n".join(
        (
            "![Rows of MiniLM whose bits depend on the batch size: PyTorch against samebits]"
            "(docs/assets/drift.svg)",
            f"{data['model']}'s {len(data['layers'])} linear layers on {data['inputs']}, batched in"
            f" {len(data['variations'])} ways: of {rows:,} rows, {theirs:,} changed bits in PyTorch and"
            f" {ours:,} in samebits.",
        )
    )


def drift() -> str:
    data = load("cpu/drift.json")
    layers = data["layers"]
    kinds: dict[str, dict[str, int]] = {}
    for v in data["variations"]:
        kind = kinds.setdefault(v["kind"], {"ways": 0, "rows": 0, "torch": 0, "samebits": 0})
        kind["ways"] += 1
        for key in ("rows", "torch", "samebits"):
            kind[key] += v[key]
    rows = [
        [name, str(k["ways"]), f"{k['rows']:,}", f"{k['torch']:,}", f"{k['samebits']:,}"]
        for name, k in kinds.items()
    ]
    changed = sum(1 for layer in layers if layer["torch"]["changed"])
    of_row = max(layer["torch"]["of_row"] for layer in layers)
    return "\n\n".join(
        (
            table(["what is varied", "ways", "rows compared", "changed: PyTorch", "changed: samebits"], rows),
            f"{data['model']} on {data['inputs']}: PyTorch changed rows of {changed} of {len(layers)} linear"
            f" layers, by up to {of_row:.1g} of the row's largest value.",
            made_with(data),
        )
    )


def _measured_on_gpu(data: dict[str, Any]) -> str:
    e, count = data["environment"], {1: "one", 2: "two"}.get(data.get("ranks", 1), "several")
    versions = ", ".join(f"{name} {v}" for name, v in e["versions"].items())
    said = (("gpu", f" on {count} {{}}"), ("driver", ", driver {}"))
    where = "".join(text.format(e[key]) for key, text in said if key in e)
    digest = f"; contract digest `{e['digest']}`" if "digest" in e else ""
    return f"Measured {e['date']} at commit `{e['commit'][:10]}`{where}; {versions}{digest}."


def gpu_summary(data: dict[str, Any]) -> str:
    rows = []
    for (dtype, band), s in summary(data["cases"]).items():
        worst = s.worst_case
        at = f"{worst['work']} M {worst['m']}, K {worst['k']}, N {worst['n']}"
        if worst["work"] == "bmm":
            at += f", batch {worst['batch']}"
        rows.append([band, dtype, str(s.cases), f"{s.mean:.3f}", f"{s.worst:.3f}", at])
    head = ["work", "dtype", "cases", "geometric mean", "worst", "worst at"]
    # In older results all contestants took turns, at a clock that followed the mean of their powers.
    alone = "each alone until the clock follows its power where arithmetic is the bound, else "
    accumulated = any(c["work"] == "dW main_grad" for c in data["cases"])
    main_grad = "; main_grad: into float32, by torch as `mm` and `add_`" if accumulated else ""
    said = (
        "Speed relative to torch (cuBLAS) in the same run, above 1 is faster; ragged dW relative to samebits'"
        f" own dense dW{main_grad}. Medians of CUDA graphs that rotate over operands larger than the L2"
        f" cache, {alone if data['environment'].get('alone') else ''}in turns."
    )
    return "\n\n".join((table(head, rows), said, _measured_on_gpu(data)))


def gpu_forward(data: dict[str, Any]) -> str:
    between = [c for c in data["cases"] if c["work"] == "forward" and c["m"] in BETWEEN]
    return "\n\n".join(_by_rows(cases) for cases in (forward(data), between) if cases)


def _by_rows(cases: list[dict[str, Any]]) -> str:
    sizes = sorted({c["m"] for c in cases})
    by_shape: dict[tuple[int, int], dict[int, float]] = {}
    for c in cases:
        by_shape.setdefault((c["k"], c["n"]), {})[c["m"]] = ratio(c)
    rows = [[f"{k}, {n}", *(f"{r[m]:.2f}" for m in sizes)] for (k, n), r in by_shape.items()]
    return table(["K, N", *(f"M {m}" for m in sizes)], rows)


def gpu_counters(data: dict[str, Any]) -> str:
    sms = data["environment"]["multiprocessors"]
    rows = []
    for case in data["cases"]:
        product = f"{case['work']} {case['m']:,}, {case['k']:,}, {case['n']:,}, {case['dtype']}"
        for who, kernels in (("samebits", case["samebits"]), ("torch", case["torch"])):
            kernel = max(kernels, key=lambda k: k["seconds"])
            busy = kernel["fma_percent" if case["dtype"] == "float32" else "tensor_percent"]
            into = kernel["into_sm_bytes"] / kernel["cycles"] / min(sms, kernel["blocks"])
            rows.append(
                [
                    product if who == "samebits" else "",
                    f"`{kernel['kernel'][:44]}`" if who == "torch" else who,
                    f"{sum(k['seconds'] for k in kernels) * 1e6:.1f}",
                    f"{kernel['hertz'] / 1e9:.2f}",
                    f"{busy:.0f}%",
                    f"{into:.0f}",
                    f"{kernel['out_of_l2_percent']:.0f}%",
                    f"{kernel['hbm_bytes'] / kernel['seconds'] / 1e12:.1f}",
                ]
            )
    head = ["M, K, N", "by", "µs", "GHz", "arithmetic", "bytes a cycle", "L2", "HBM, TB/s"]
    said = (
        "Nsight Compute's counters, of one launch on a GPU that was idle before, from cold caches."
        " Arithmetic: how long the busiest multiprocessor's tensor cores are at work; for float32, its share"
        " of the most instructions that its units take. Bytes a cycle: what comes into a multiprocessor."
        " L2: how busy the way out of it is. Of PyTorch's kernels the longest is shown, and the time of all."
    )
    return "\n\n".join((table(head, rows), said, _measured_on_gpu(data)))


def gpu_backward(data: dict[str, Any]) -> str:
    cases = [c for c in data["cases"] if c["work"] in ("dX", "dW") and c["dtype"] == "bfloat16"]
    sizes = sorted({c["m"] for c in cases})
    by_shape: dict[tuple[str, int, int], dict[int, float]] = {}
    for c in cases:
        by_shape.setdefault((c["work"], c["k"], c["n"]), {})[c["m"]] = ratio(c)
    rows = [[work, f"{k}, {n}", *(f"{r[m]:.2f}" for m in sizes)] for (work, k, n), r in by_shape.items()]
    return table(["work", "K, N", *(f"M {m}" for m in sizes)], rows)


def gpu_tiny(data: dict[str, Any]) -> str:
    cases = tiny(data)
    if not cases:
        return "Not measured yet."
    bandwidth = data["ceilings"]["copy_bytes_per_s"]
    rows = []
    for c in cases:
        us, m, k, n = c["us"], c["m"], c["k"], c["n"]
        size = c["batch"] * (m * k + k * n + m * n) * (4 if c["dtype"] == "float32" else 2)
        share, beside_copy = size / bandwidth / us["samebits"] * 1e6, us["copy"] / us["samebits"]
        times = [f"{us['samebits']:.1f}", f"{us['torch']:.1f}", f"{ratio(c):.2f}"]
        rows.append(
            [f"{c['batch']}, {m}, {k}, {n}", c["dtype"], *times, f"{share:.0%}", f"{beside_copy:.0%}"]
        )
    head = ["batch, M, K, N", "dtype", "samebits, µs", "torch, µs", "speed", "of large copies", "of a copy"]
    said = (
        "Speed relative to `torch.bmm` (no TF32). Bandwidth beside that of large copies, and of a copy of"
        " as many bytes."
    )
    picture = f"docs/assets/{slug(data['environment']['gpu'])}-tiny.svg"
    shown = f"![Times of batched products beside torch.bmm and a copy]({picture})"
    return "\n\n".join((table(head, rows), said, shown))


def gpu_host(data: dict[str, Any]) -> str:
    rows = []
    for line in data["host"]:
        us = line["us"]
        shape = f"{line['m']}, {line['k']}, {line['n']}"
        ours, theirs = us["samebits"], us["torch"]
        rows.append([line["operation"], shape, f"{ours:.1f}", f"{theirs:.1f}", f"{ours / theirs:.2f}"])
    return table(["eager call", "M, K, N", "samebits, µs", "torch, µs", "ratio"], rows)


def gpu_drift(data: dict[str, Any]) -> str:
    drifts = data["drift"]
    changing = [d for d in drifts if any(d["changed"]["torch"])]
    ours = sum(sum(d["changed"]["samebits"]) for d in drifts)
    where = ", ".join(f"({d['k']}, {d['n']})" for d in changing)
    return (
        f"`torch.mm` gives rows other bits at some M than in a batch of {drifts[0]['rows'][-1]} rows at"
        f" {len(changing)} of {len(drifts)} shapes (K, N): {where or 'none'}. samebits: {ours} rows."
    )


def gpu_models_drift(data: dict[str, Any]) -> str:
    """Differences of generation from training for the same tokens, and of rollout from trainer in a loop."""
    sizes, runs = data["sizes"], data["training"]
    cases: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for d in data["drift"]:
        cases.setdefault((d["model"], d["name"]), {})[d["by"]] = d
    rows = [
        [
            f"{model.capitalize()}: {name}",
            f"{by['torch']['tokens']:,}",
            *(
                text
                for who in ("torch", "samebits")
                for text in (f"{by[who]['differing']:,}", f"{by[who]['largest']:.2g}", f"{by[who]['kl']:.2g}")
            ),
        ]
        for (model, name), by in cases.items()
    ]
    sides = [
        f"{side}: {what}" for side in ("PyTorch", "samebits") for what in ("other bits", "by up to", "KL")
    ]
    theirs, ours = (max(runs[who]["largest"]) for who in ("torch", "samebits"))
    same = runs["samebits"]["weights"] == runs["samebits, again"]["weights"]
    learner, few = sizes["training"], sizes["drift"]
    models = " and ".join(
        f"{name.capitalize()} of {m['num_hidden_layers']} layers, hidden size {m['hidden_size']:,}"
        for name, m in few["models"].items()
    )
    picture = f"docs/assets/{slug(data['environment']['gpu'])}-models.svg"
    return "\n\n".join(
        (
            f"![Log-probs of rollout and training, PyTorch against samebits]({picture})",
            table(["log-probs beside those of training", "tokens", *sides], rows),
            f"Random weights, bf16: {models}; {few['prompts']} prompts of {few['prompt']} tokens, answered by"
            f" {few['answer']}. A GRPO loop of {len(runs['torch']['largest'])} steps (hidden size"
            f" {learner['hidden_size']:,}, {learner['group']} answers of {learner['answer']} tokens to each"
            f" prompt): log-probs of rollout and trainer differ by up to {theirs:.2g} in PyTorch and"
            f" {ours:.2g} in samebits, of which two runs end with {'identical' if same else 'DIFFERENT'}"
            " weights." + _micro_batches(data),
            _measured_on_gpu(data),
        )
    )


def _micro_batches(data: dict[str, Any]) -> str:
    theirs, ours = ([by[n] for n in sorted(by)] for by in data["micro_batches"].values())
    return (
        f" Trained in 2 and 4 micro-batches instead of one, a small model ends with {theirs[0]:,} and"
        f" {theirs[1]:,} other weights in PyTorch, {ours[0]:,} and {ours[1]:,} in samebits."
    )


def gpu_verify(data: dict[str, Any]) -> str:
    """The results of the last recorded run of ``samebits verify``."""
    thorough = " --thorough" if data["thorough"] else ""
    said = (
        f"`samebits verify{thorough}` compared {data['compared']:,} values of {data['kernels']:,} compiled"
        f" kernels in {data['seconds']:.0f} s: {data['differing']} differ."
    )
    if data["failure"] or data["hung"]:
        said += f" It did not end well: {data['failure'] or 'a kernel hung'}."
    return f"{said} {_measured_on_gpu(data)}"


def gpu_embeddings(data: dict[str, Any]) -> str:
    """Embeddings that change with the batch of sentences."""
    theirs, ours = (max(by.values()) for by in data["changed"].values())
    said = (
        f"Of MiniLM's embeddings of {data['sentences']} sentences (its own weights, float32), {theirs} change"
        f" with the batch or its padding in PyTorch, {ours} in samebits."
    )
    return f"{said} {_measured_on_gpu(data)}"


def gpu_models_time(data: dict[str, Any]) -> str:
    """Time of the forward, with and without attention, and of a step of the loop."""
    rows = []
    for case in data["forward"]:
        ours, theirs = case["samebits"], case["torch"]
        without = [side["forward_ms"] - side["attention_ms"] for side in (ours, theirs)]
        rows.append(
            [
                f"{case['rows']} x {case['tokens']:,}",
                *(f"{side[key]:.1f}" for key in ("forward_ms", "attention_ms") for side in (theirs, ours)),
                f"{ours['forward_ms'] / theirs['forward_ms']:.2f}",
                f"{without[0] / without[1]:.2f}",
            ]
        )
    times = ("PyTorch, ms", "samebits, ms", "its attention: PyTorch, ms", "samebits, ms")
    ratios = ("samebits / PyTorch", "without attention")
    sizes, runs = data["sizes"]["forward"], data["training"]
    step, theirs = (runs[who]["seconds_a_step"] for who in ("samebits, again", "torch"))
    return "\n\n".join(
        (
            table(["sequences x tokens", *times, *ratios], rows),
            f"Forward of a Llama of {sizes['num_hidden_layers']} layers, hidden size"
            f" {sizes['hidden_size']:,}, bf16; medians of eager calls. A step of the GRPO loop takes"
            f" {step:.2f} s, in PyTorch {theirs:.2f} s.",
            _measured_on_gpu(data),
        )
    )


def gpu_logp(data: dict[str, Any]) -> str:
    """Time and memory (beyond the operands) of each library that was installed."""
    libraries = list(dict.fromkeys(name for case in data["cases"] for name in case["forward_mib"]))
    rows = []
    for case in data["cases"]:
        for work, said, mib in (
            ("forward", "forward", case["forward_mib"]),
            ("forward_graph", "in a CUDA graph", {}),
            ("forward_backward", "and backward", case["forward_backward_peak_mib"]),
        ):
            ms = case[f"{work}_ms"]
            cells = [
                f"{ms[name]:.4g} ms" + (f", {mib[name]:,.0f} MiB" if name in mib else "")
                if name in ms
                else ""
                for name in libraries
            ]
            product = ms.get(PRODUCT)
            rows.append(
                [
                    f"{case['tokens']:,}, {case['d']:,}, {case['v']:,}",
                    said,
                    *cells,
                    "" if product is None else f"{product:.4g} ms",
                    f"{ms['torch'] / ms['samebits']:.2f}",
                ]
            )
    head = ["tokens, D, V", "work", *libraries, PRODUCT, "speed beside torch"]
    said = (
        "bf16; medians of eager calls where no CUDA graph is named. Memory at the peak, beyond"
        " operands; gradients included. torch is `F.linear`, `.float()` and `F.cross_entropy`; the product"
        " alone gives no log-probability."
    )
    gpu = slug(data["environment"]["gpu"])
    picture = f"![Time and memory of log-probabilities, beside stored logits](docs/assets/{gpu}-logp.svg)"
    return "\n\n".join((picture, table(head, rows), said, _measured_on_gpu(data)))


def gpu_attention(data: dict[str, Any]) -> str:
    """Geometric means and worsts of attention's bands, with errors and memory."""
    head = ["attention", "cases", "geometric mean", "worst", "worst at"]
    bands = [
        [name, str(f.cases), f"{f.mean:.3f}", f"{f.worst:.3f}", where(f.at)]
        for name, f in attention_summary(data).items()
    ]
    said = (
        "bf16. Speed relative to PyTorch's fastest backend for the case; where it says so, relative to"
        " samebits' own causal attention of as many pairs of queries and keys. Sizes: batch x keys, head."
    )
    picture = f"docs/assets/{slug(data['environment']['gpu'])}-attention.svg"
    backends = list(dict.fromkeys(name for c in data["accuracy"] for name in c["error"]))
    errors = [
        [
            where(c),
            c["dtype"],
            name,
            *(f"{c['error'][who][name]:.3g}" if who in c["error"] else "" for who in backends),
        ]
        for c in data["accuracy"]
        for name in ("out", "dq", "dk", "dv")
    ]
    names = list(dict.fromkeys(name for c in data["memory"] for name in c["bytes"]))
    memory = [
        [
            f"{where(c)}, {c['heads']} heads over {c['kv_heads']}",
            *(f"{c['bytes'][who] / 2**20:,.0f}" if who in c["bytes"] else "" for who in names),
        ]
        for c in data["memory"]
    ]
    return "\n\n".join(
        (
            f"![Speed of attention over the number of tokens and keys]({picture})",
            table(head, bands),
            said,
            table(["error of", "dtype", "", *backends], errors),
            "Root mean square of the difference from float64, relative to that of the result.",
            table(["MiB of memory, forward and backward", *names], memory),
            "At the peak, beyond operands, results and the log-sum-exp.",
            _measured_on_gpu(data),
        )
    )


def gpu_attention_cases(data: dict[str, Any]) -> str:
    """Every case of attention: its time, and that of what it is compared with."""
    rows = []
    for c in data["cases"]:
        us, ratio = c["us"], speed(c)
        beside = us.get("dense", us.get("torch"))
        rows.append(
            [
                c["form"],
                "forward" if c["work"] == "forward" else "and backward",
                f"{c['batch']} x {c['keys']:,}",
                str(c["head"]),
                f"{us['samebits']:,.1f}",
                "" if beside is None else f"{beside:,.1f}",
                "own causal" if "dense" in us else c.get("backend", ""),
                "" if ratio is None else f"{ratio:.2f}",
                f"{bandwidth(c, data):.0%}" if c["form"] == "decode" else "",
            ]
        )
    head = ["keys that are seen", "work", "batch x keys", "head", "samebits, µs", "beside, µs", "which"]
    return table([*head, "speed", "of a large copy's bandwidth"], rows)


def gpu_attention_invariance(data: dict[str, Any]) -> str:
    """How many values of attention were computed again in which ways."""
    ways: dict[str, list[int]] = {}
    for way in (way for s in data["setups"] for way in s["ways"]):
        count = ways.setdefault(way["way"], [0, 0])
        count[0] += way["values"]
        count[1] += way["differing"]
    rows = [[name, f"{values:,}", f"{differing:,}"] for name, (values, differing) in ways.items()]
    said = (
        f"{data['compared']:,} values of {len(data['setups'])} kinds of attention, beside one prefill of"
        f" each: {data['differing']:,} differ. Packed and padded with the gradients."
    )
    return "\n\n".join((table(["computed again", "values", "differ"], rows), said, _measured_on_gpu(data)))


def triton_choice(case: dict[str, Any], sms: int) -> float:
    """Speed relative to torch of the tiles that Triton's estimate chooses among those that were timed."""
    from samebits.backends.triton.products import TILE_SCHEDULES  # imports Triton

    m, n = {"forward": ("m", "n"), "dX": ("m", "k"), "dW": ("n", "k")}[case["work"]]
    times = {
        -(-(-(-case[m] // s.block_m) * -(-case[n] // s.block_n)) // sms) * s.us: case["us"][name]
        for s in TILE_SCHEDULES
        if (name := f"{s.block_m}x{s.block_n}x{s.block_k}") in case["us"]
    }
    return float(case["us"]["torch"] / times[min(times)])


def gpu_triton_tune(data: dict[str, Any]) -> str:
    """Speed relative to torch of the chosen and of the fastest schedule, for each product."""
    pick, rows = partial(triton_choice, sms=data["environment"]["multiprocessors"]), []
    for said, some in (
        ("forward, M <= 128", [c for c in data["cases"] if c["m"] <= 128]),
        ("forward, dX and dW, M >= 2048", [c for c in data["cases"] if c["m"] >= 2048]),
    ):
        fastest = [c["us"]["torch"] / min(t for by, t in c["us"].items() if by != "torch") for c in some]
        worst, at = min(((pick(c), c) for c in some), key=lambda pair: pair[0])
        means = (statistics.geometric_mean(speeds) for speeds in (map(pick, some), fastest))
        where = f"{at['work']} M {at['m']}, K {at['k']}, N {at['n']}"
        rows.append([said, str(len(some)), *(f"{mean:.3f}" for mean in means), f"{worst:.3f}", where])
    head = ["work, bf16", "cases", "geometric mean", "of the fastest", "worst", "worst at"]
    e = data["environment"]
    said = "Speed relative to torch.mm in the same run, of the chosen schedule."
    return "\n\n".join((table(head, rows), f"{said} Measured {e['date']} on one {e['gpu']}."))


def gpu_host_calls(data: dict[str, Any]) -> str:
    """What the mode's calls cost the CPU, in both of its forms."""
    means = table(
        ["geometric means beside PyTorch", "`batch_invariant()`", "`enable_batch_invariant_mode()`"],
        ([what, f"{context:.2f}", f"{process:.2f}"] for what, context, process in ratios(data)),
    )
    head = ["call", "", "PyTorch, µs", "`batch_invariant()`, µs", "`enable_batch_invariant_mode()`, µs"]
    rows = (
        [c["call"], c["work"], *(f"{c['us'][form]:.1f}" for form in ("torch", "context", "process"))]
        for c in data["cases"]
    )
    return "\n\n".join((means, table(head, rows), _measured_on_gpu(data)))


def gpu_rows(data: dict[str, Any]) -> str:
    """Row operations: means over widths, then every case."""
    over_widths = table(
        ["operation", "of a copy's bandwidth: mean", "least", "speed relative to PyTorch: mean", "least"],
        ([op, *(f"{x:.2f}" for x in values)] for op, *values in means(data)),
    )
    picture = f"docs/assets/{slug(data['environment']['gpu'])}-rows.svg"
    said = f"Means over {TOKENS:,} aligned rows; the copy is of the bytes that have to be read and written."
    head = ["operation", "rows", "n", "dtype", "samebits, µs", "PyTorch, µs", "a copy, µs"]
    cases = (
        [c["op"], f"{c['rows']:,}", f"{c['n']:,}", c["dtype"]]
        + [f"{c['us'][who]:.1f}" for who in ("samebits", "torch", "copy")]
        for c in data["cases"]
    )
    drawn = f"![Bandwidth of row operations over the width of a row]({picture})"
    return "\n\n".join((drawn, over_widths, said, table(head, cases), _measured_on_gpu(data)))


def gpu_grouped(data: dict[str, Any]) -> str:
    """Grouped products: means over all cases, then every case."""
    over_cases = table(
        ["kind", "speed relative to PyTorch: mean", "least", "of the limit: mean"],
        ([kind, *(f"{x:.2f}" for x in values)] for kind, *values in grouped.means(data)),
    )
    bandwidth, rate = grouped.BYTES_A_SECOND / 1e12, grouped.OPERATIONS_A_SECOND / 1e12
    said = (
        "The limit is the time to read and write all bytes, those of the experts that have tokens, at"
        f" {bandwidth:.1f} TB/s, or to multiply at {rate:.0f} TFLOP/s. Sequences have"
        f" {grouped.SEQUENCE:,} tokens."
    )
    head = ["model", "kind", "K, N", "tokens", "shares", "samebits, µs", "PyTorch, µs", "limit, µs"]
    cases = (
        [c["model"], c["kind"], f"{c['k']}, {c['n']}", f"{c['tokens']:,}"]
        + ["skewed" if c["skewed"] else "balanced"]
        + [f"{x:.1f}" for x in (c["us"]["samebits"], c["us"]["torch"], c["limit"])]
        for c in data["cases"]
    )
    return "\n\n".join((over_cases, said, table(head, cases), _measured_on_gpu(data)))


def gpu_native(data: dict[str, Any]) -> str:
    """libsamebits beside the library's own path through PyTorch."""
    speed, count = data["speed"], len(data["cases"])
    said = (
        f"{count} products of `samebits bench`, in CUDA graphs, each compared bit for bit: `libsamebits` has"
        f" {speed['mean']:.3f} of the speed of the path through PyTorch (geometric mean),"
        f" {speed['worst']:.3f} at least. The archive takes {data['archive_bytes'] / 1e6:.1f} MB;"
        f" its kernels load in {data['seconds']['load']:.1f} s. A call costs the CPU, in microseconds:"
    )
    head = ["M, K, N", "dtype", "from C", "`samebits.engine`", "PyTorch path"]
    lines = (
        [f"{c['m']:,}, {c['k']:,}, {c['n']:,}", c["dtype"]]
        + [f"{c['us'][name]:.1f}" for name in ("c", "engine", "torch")]
        for c in data["host"]
    )
    return "\n\n".join((said, table(head, lines), _measured_on_gpu(data)))


def gpu_steps(data: dict[str, Any]) -> str:
    """Steps of a model of a billion parameters, and of one of experts."""
    head = ["step", "PyTorch, ms", "context, ms", "process, ms", "context / PyTorch", "process / PyTorch"]
    lines = (
        [
            c["work"],
            *(f"{c[form]['ms']:.2f}" for form in ("torch", "context", "process")),
            *(f"{c[form]['ms'] / c['torch']['ms']:.2f}" for form in ("context", "process")),
            f"{c['context']['mib'] / c['torch']['mib']:.2f}" if c["torch"]["mib"] else "none",
        ]
        for c in data["cases"]
    )
    return "\n\n".join((table([*head, "memory / PyTorch's"], lines), _measured_on_gpu(data)))


def gpu_held_out(data: dict[str, Any]) -> str:
    lines = []
    for (rows, work), cases in held_out.bands(data["cases"]).items():
        cells = []
        for who, beside in held_out.COMPARED:
            found = held_out.speeds(cases, who, beside)
            cells += [f"{statistics.geometric_mean(found):.3f}", f"{min(found):.3f}"]
        lines.append([rows, work, str(len(cases)), *cells])
    head = ["rows", "work", "products"]
    for who, beside in held_out.COMPARED:
        head += [f"{who} / {'cuBLAS' if beside == 'torch' else beside}", "worst"]
    left = f" {data['left']} products were left: the budget was spent." if data["left"] else ""
    said = (
        f"Forty shapes, drawn by seed {data['seed']} from projections that no fit has seen, bf16. Speed"
        " relative to cuBLAS in the same run, and of the untuned choice relative to the tuned one; above 1 is"
        f" faster.{left}"
    )
    return "\n\n".join((table(head, lines), said, _measured_on_gpu(data)))


def gpu_scaled(data: dict[str, Any]) -> str:
    """Block-scaled products in FP8: bands of rows, then every case."""
    cases = [(c, scaled.beside(c)) for c in data["cases"]]
    bands = {
        "M <= 128": [(c, speed) for c, speed in cases if c["m"] <= 128],
        "M >= 512": [(c, speed) for c, speed in cases if c["m"] >= 512],
    }
    lines = []
    for name, of in bands.items():
        least, at = min((speed, f"M {c['m']:,}, K {c['k']:,}, N {c['n']:,}") for c, speed in of)
        mean = statistics.geometric_mean(speed for _, speed in of)
        lines.append([name, str(len(of)), f"{mean:.3f}", f"{least:.3f}", at])
    shapes = list(dict.fromkeys((c["k"], c["n"]) for c, _ in cases))
    rows = list(dict.fromkeys(c["m"] for c, _ in cases))
    by_shape = {(c["m"], c["k"], c["n"]): f"{speed:.2f}, {c['tflops']:,.0f}" for c, speed in cases}
    every = ([f"{k:,}, {n:,}", *(by_shape.get((m, k, n), "") for m in rows)] for k, n in shapes)
    said = (
        "Blocks of 1 x 128 by 128 x 128, e4m3, bf16 out. Speed relative to PyTorch's `scaled_mm`, or to twice"
        f" its bf16 product's in {sum('torch' not in c['us'] for c, _ in cases)} cases where it refused the"
        " call. Below, speed and TFLOP/s:"
    )
    return "\n\n".join(
        (
            table(["rows", "cases", "geometric mean", "worst", "worst at"], lines),
            said,
            table(["K, N", *(f"M {m:,}" for m in rows)], every),
            _measured_on_gpu(data),
        )
    )


def gpu_scaled_grouped(data: dict[str, Any]) -> str:
    """Grouped products in FP8: every layer, by the rows that an expert has on average."""
    cases = [c for c in data.get("grouped", []) if not c["masked"]]
    if not cases:
        return "Not measured yet."
    rows = sorted({c["rows"] // c["experts"] for c in cases})
    by_layer: dict[tuple[str, ...], dict[int, str]] = {}
    for c in cases:
        layer = c["model"], f"{c['k']:,}, {c['n']:,}", "skewed" if c["skewed"] else "alike"
        speed = f"{scaled.beside(c):.2f}, {c['tflops']:,.0f}"
        by_layer.setdefault(layer, {})[c["rows"] // c["experts"]] = speed
    lines = [[*layer, *(of.get(n, "") for n in rows)] for layer, of in by_layer.items()]
    masked = "; ".join(
        f"{c['experts']} experts of {c['k']:,} to {c['n']:,} take {c['us']['ours']:.1f} us,"
        f" {c['bytes'] / c['us']['ours'] / 1e6:.2f} TB/s"
        for c in data["grouped"]
        if c["masked"]
    )
    said = (
        "Speed relative to twice that of `torch._grouped_mm` in bf16, and TFLOP/s. PyTorch has no grouped"
        " product with scales of blocks on this GPU. A decoding step, 0 to 16 rows of room for 64 each:"
        f" {masked}."
    )
    head = ["layer", "K, N", "shares", *(f"{n:,} rows an expert" for n in rows)]
    return "\n\n".join((table(head, lines), said, _measured_on_gpu(data)))


def gpu_quantize(data: dict[str, Any]) -> str:
    """Quantization beside a copy."""
    cases = data.get("quantize", [])
    if not cases:
        return "Not measured yet."
    sizes = list(dict.fromkeys((c["rows"], c["k"]) for c in cases))
    found = {
        (c["kind"], c["rows"], c["k"]): f"{scaled.share(c):.2f}, {c['us']['ours']:.1f} us" for c in cases
    }
    lines = [
        [kind, *(found.get((kind, *size), "") for size in sizes)]
        for kind in dict.fromkeys(c["kind"] for c in cases)
    ]
    said = "Share of the bandwidth of a copy that moves as many bytes, and time. bf16 to e4m3."
    head = ["", *(f"{rows:,} x {k:,}" for rows, k in sizes)]
    return "\n\n".join((table(head, lines), said, _measured_on_gpu(data)))


def gpu_segments(data: dict[str, Any]) -> str:
    """What sums in segments cost on one GPU."""
    head = ["rows", "time / plain chain", "worst", "time / torch.mm", "worst"]
    text = (
        f"`TENSOR_CORE.segmented({data['segments']})`, {len(data['cases'])} products, bf16, geometric means."
    )
    return "\n\n".join((table(head, ranks.segments_rows(data)), text, _measured_on_gpu(data)))


def gpu_distributed(data: dict[str, Any]) -> str:
    """What several GPUs cost beside PyTorch and NCCL, and that they change no bit."""
    llama, logp = data["llama"], data["log_probabilities"]
    compared, differing = llama["values compared"], llama["values that differ from one rank's"]
    logps = (
        f"{logp['tokens']:,} log-probabilities, {logp['features']:,} features, a vocabulary of"
        f" {logp['vocabulary']:,}: {logp['ms']['one GPU']:.2f} ms on one GPU,"
        f" {logp['ms']['split']:.2f} ms split."
    )
    return "\n\n".join(
        (
            f"On {data['ranks']} GPUs a training step of a Llama of a billion parameters was compared with"
            f" one GPU's: **{differing:,} of {compared:,} values differ**, log-probabilities and gradients.",
            table(
                ["row-parallel layer, M", "speed / torch.mm and all_reduce", "worst"],
                ranks.parallel_rows(data),
            ),
            table(
                ["rows of 8,192, microseconds", "`ordered_all_reduce`", "NCCL bf16", "NCCL float32"],
                ranks.exchange_rows(data),
            ),
            table(
                ["step, milliseconds", "PyTorch, split", "samebits, split", "samebits, one GPU"],
                ranks.step_rows(data),
            ),
            f"{logps} Layers and exchanges in CUDA graphs; steps are eager. Medians, of the slowest rank.",
            _measured_on_gpu(data),
        )
    )


def gpu_price(gpu: str) -> str:
    """README's table of speed."""
    said = (
        f"On one {load(f'{gpu}/bench.json')['environment']['gpu']}; time, PyTorch = 1, below 1 is faster."
        " Geometric means, and the worst case. Steps under `enable_batch_invariant_mode`, the GRPO step under"
        " `batch_invariant`. Where PyTorch's FP8 product refused a call, half the time of its bf16 one stands"
        " for it. PyTorch's decode takes a slow path of its attention there, because of the"
        " cache's mask."
    )
    return "\n\n".join((table(["work", "time", "worst", "measured"], price.rows(gpu)), said))


def supported() -> str:
    """Which operation is proven on which GPU."""
    head, *rows = support.table_of_support()
    return table(head, rows)


def named(functions: Iterable[str | Callable[..., Any]]) -> str:
    """Names of PyTorch's functions, each once. Operators are shown as symbols."""
    names = [f if isinstance(f, str) else f.__name__ for f in functions]
    shown = ["@" if name == "__matmul__" else name for name in names]
    return ", ".join(f"`{name}`" for name in dict.fromkeys(shown) if not name.startswith("__"))


def mode_replaced() -> str:
    rows = ((named(row.functions), row.result, row.uncovered) for row in rules.REPLACED)
    return table(["PyTorch", "as", "not covered"], rows)


def mode_vectors() -> str:
    return ", ".join(f"`{name}`" for name in rules.WHOLE_VECTORS if not name.startswith("__"))


def mode_reported() -> str:
    return table(
        ["kind", "functions"], ((kind, named(names.split())) for kind, names in rules.REPORTED.items())
    )


GPU_BLOCKS: dict[str, dict[str, Callable[[dict[str, Any]], str]]] = {
    "bench.json": {
        "summary": gpu_summary,
        "forward": gpu_forward,
        "backward": gpu_backward,
        "tiny": gpu_tiny,
        "host": gpu_host,
        "drift": gpu_drift,
    },
    "attention.json": {"attention": gpu_attention, "attention-cases": gpu_attention_cases},
    "attention_invariance.json": {"attention-invariance": gpu_attention_invariance},
    "grouped.json": {"grouped": gpu_grouped},
    "held_out.json": {"held-out": gpu_held_out},
    "native.json": {"native": gpu_native},
    "host.json": {"host-calls": gpu_host_calls},
    "logp.json": {"logp": gpu_logp},
    "rows.json": {"rows": gpu_rows},
    "steps.json": {"steps": gpu_steps},
    "segments.json": {"segments": gpu_segments},
    "scaled.json": {
        "scaled": gpu_scaled,
        "scaled-grouped": gpu_scaled_grouped,
        "quantize": gpu_quantize,
    },
    "distributed.json": {"distributed": gpu_distributed},
    "triton_tune.json": {"triton-tune": gpu_triton_tune},
    "triton.json": {"triton": gpu_summary},
    "counters.json": {"counters": gpu_counters},
    "models.json": {"models-drift": gpu_models_drift, "models-time": gpu_models_time},
    "embeddings.json": {"embeddings": gpu_embeddings},
    "verify.json": {"verify": gpu_verify},
}


def gpu_block(gpu: str, results: str, write: Callable[[dict[str, Any]], str]) -> str:
    return write(load(f"{gpu}/{results}")) if gpu in measured(results) else "Not measured yet."


BLOCKS: dict[str, Callable[[], str]] = (
    {
        "before-after": before_after,
        "reference-speed": reference_speed,
        "drift": drift,
        "support": supported,
        "mode-replaced": mode_replaced,
        "mode-vectors": mode_vectors,
        "mode-reported": mode_reported,
        "architectures": lambda: gpu_block("cpu", "zoo.json", architectures),
    }
    | {f"{gpu}-price": partial(gpu_price, gpu) for gpu in GPUS}
    | {
        f"{gpu}-{what}": partial(gpu_block, gpu, results, write)
        for gpu in GPUS
        for results, blocks in GPU_BLOCKS.items()
        for what, write in blocks.items()
    }
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a block is out of date")
    options = parser.parse_args()
    stale, used = [], set()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):

        def block(match: re.Match[str]) -> str:
            used.add(match[1])
            return f"{match[1]}{match[2]}{BLOCKS[match[1]]()}\n"

        text = path.read_text()
        new = BLOCK.sub(block, text)
        if path.parent != ROOT:
            new = new.replace("](docs/", "](")
        if new != text:
            stale.append(str(path.relative_to(ROOT)))
            if not options.check:
                path.write_text(new)
                print(f"wrote {path}")
    if unused := BLOCKS.keys() - used:
        raise SystemExit(f"no page has a block for {', '.join(sorted(unused))}")
    if not support.PROVEN.exists() or support.PROVEN.read_text() != support.text():
        stale.append(str(support.PROVEN.relative_to(ROOT)))
        if not options.check:
            support.PROVEN.write_text(support.text())
            print(f"wrote {support.PROVEN}")
    if options.check and stale:
        raise SystemExit(f"out of date: {', '.join(stale)}; run python -m benchmarks.tables")


if __name__ == "__main__":
    main()
