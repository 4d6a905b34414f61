"""Tables of attention, row operations and log-probabilities."""

from __future__ import annotations

from typing import Any

from benchmarks import hybrids
from benchmarks.logp import PRODUCT
from benchmarks.record import slug
from benchmarks.rows import TOKENS, means
from benchmarks.tables.text import measured_on_gpu, table, with_commit
from samebits.tools.bench.attention_report import attention_summary, bandwidth, speed, where


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
            measured_on_gpu(data),
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


def gpu_paged(data: dict[str, Any]) -> str:
    """Decoding over pages."""
    names = list(data["cases"][0]["us"])
    rows = [
        [f"{c['rows']} x {c['keys']:,}", str(c["page"]), *(f"{c['us'][name]:.1f}" for name in names)]
        for c in data["cases"]
    ]
    head = ["sequences x keys", "slots of a page", *(f"{name}, µs" for name in names)]
    return "\n\n".join((table(head, rows), measured_on_gpu(data)))


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
    return "\n\n".join((drawn, over_widths, said, table(head, cases), measured_on_gpu(data)))


def gpu_logp(data: dict[str, Any]) -> str:
    """Time and memory (beyond the operands) of each library that was installed."""
    libraries = list(dict.fromkeys(name for case in data["cases"] for name in case["forward_mib"]))
    rows = []
    for case in data["cases"]:
        for work, said, mib in (
            ("forward", "forward", case["forward_mib"]),
            ("forward_graph", "in a CUDA graph", {}),
            ("forward_backward", "and backward", case["forward_backward_peak_mib"]),
            ("forward_backward_graph", "both in a CUDA graph", {}),
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
    return "\n\n".join((picture, table(head, rows), said, measured_on_gpu(data)))


def gpu_recurrent(data: dict[str, Any]) -> str:
    """Recurrent layers beside other libraries. Cases of another run name their commit."""
    works = {"forward": "forward", "both": "forward and backward", "decode": "a step of decoding"}
    rows = []
    for case in data["cases"]:
        us = dict(case["us"])
        ours = us.pop("samebits", None)
        theirs = ", ".join(f"{who} {t:,.1f}" for who, t in us.items()) or "not there"
        ratio = f"{ours / min(us.values()):.2f}" if us and ours is not None else ""
        sequences = f"{case['batch']:,} × {case['tokens']:,}"
        said = "refused" if ours is None else f"{ours:,.1f}"
        layer = with_commit(f"`{case['layer']}`", case)
        rows.append([layer, works[case["what"]], sequences, said, theirs, ratio])
    head = ["layer", "work", "sequences × tokens", "samebits, µs", "others, µs", "of the other's time"]
    return "\n\n".join((table(head, rows), measured_on_gpu(data)))


def gpu_hybrids(data: dict[str, Any]) -> str:
    """Steps of models with recurrent layers beside transformers, and rollouts beside trainers."""
    forms = [form for form in hybrids.FORMS if any(form in case for case in data["cases"])]
    beside = "others" if "others" in forms else "torch"
    rows = []
    for case in data["cases"]:
        ours, theirs = hybrids.best(case), case.get(beside)
        times = [f"{case[form]['ms']:.4g}" if form in case else "refused" for form in forms]
        ratio = f"{ours / theirs['ms']:.2f}" if ours and theirs else ""
        rows.append([case["work"], *times, ratio])
    head = [
        "step",
        *(f"{hybrids.SAID[form]}, ms" for form in forms),
        f"of the time of {hybrids.SAID[beside]}",
    ]
    of = [
        [
            *(with_commit(case["model"], case), hybrids.SAID[case["form"]], case["rows"]),
            f"{case['differ']:,} of {case['tokens']:,}",
            *(f"{case[name]:.2g}" for name in ("largest", "kl")),
        ]
        for case in data["kl"]
    ]
    what = ["model", "in", "trainer's rows", "log-probs that differ", "largest difference", "KL"]
    said = [f"Short convolutions of the others: {data['convolutions']}."] if beside == "others" else []
    return "\n\n".join((table(head, rows), table(what, of), *said, measured_on_gpu(data)))
