"""Tables of matrix products: dense, grouped, in FP8 and in segments."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

from benchmarks import grouped, held_out, ranks, scaled, unaligned
from benchmarks.record import slug, tiny
from benchmarks.tables.text import measured_on_gpu, table
from samebits.tools.bench.cases import BETWEEN, ODD
from samebits.tools.bench.report import forward, ratio, summary

_BEHIND = 0.97


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
    return "\n\n".join((table(head, rows), said, measured_on_gpu(data)))


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


def gpu_behind(data: dict[str, Any]) -> str:
    """Kinds of products of which some are behind torch's by more than :data:`_BEHIND`."""
    kinds: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for c in data["cases"]:
        if c["work"] in ("forward", "dX", "dW") and (c["k"], c["n"]) != ODD:
            kinds.setdefault((c["dtype"], c["work"], c["m"]), []).append(c)
    rows = []
    for (dtype, work, m), cases in sorted(kinds.items()):
        behind = [c for c in cases if ratio(c) < _BEHIND]
        if not behind:
            continue
        worst = min(behind, key=ratio)
        mean = statistics.geometric_mean(map(ratio, cases))
        at = f"{ratio(worst):.2f} at {worst['k']}, {worst['n']}"
        rows.append([work, dtype, f"{m:,}", f"{len(behind)} of {len(cases)}", f"{mean:.3f}", at])
    return table(["work", "dtype", "M", "behind", "geometric mean of all", "worst, at K, N"], rows)


def gpu_drift(data: dict[str, Any]) -> str:
    drifts = data["drift"]
    changing = [d for d in drifts if any(d["changed"]["torch"])]
    ours = sum(sum(d["changed"]["samebits"]) for d in drifts)
    where = ", ".join(f"({d['k']}, {d['n']})" for d in changing)
    return (
        f"`torch.mm` gives rows other bits at some M than in a batch of {drifts[0]['rows'][-1]} rows at"
        f" {len(changing)} of {len(drifts)} shapes (K, N): {where or 'none'}. samebits: {ours} rows."
    )


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
        "Nsight Compute's counters, of single launches on a GPU that was idle before, from cold caches."
        " Arithmetic: how long the busiest multiprocessor's tensor cores are at work; for float32, its share"
        " of the most instructions that its units take. Bytes a cycle: what comes into a multiprocessor."
        " L2: how busy the way out of it is. Of several kernels of a product the longest is shown, and the"
        " time of all. Here they run one after another; in use, samebits' second runs beside its first."
    )
    return "\n\n".join((table(head, rows), said, measured_on_gpu(data)))


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
    left = f" Left when the budget was spent: {data['left']}." if data["left"] else ""
    said = (
        f"Forty shapes, drawn by seed {data['seed']} from projections that no fit had seen then, bf16. Speed"
        " relative to cuBLAS in the same run, and of the untuned choice relative to the tuned one; above 1 is"
        f" faster.{left}"
    )
    return "\n\n".join((table(head, lines), said, measured_on_gpu(data)))


def gpu_grouped(data: dict[str, Any]) -> str:
    """Grouped products: means over all cases."""
    over_cases = table(
        ["kind", "speed relative to PyTorch: mean", "least", "of the estimate: mean"],
        ([kind, *(f"{x:.2f}" for x in values)] for kind, *values in grouped.means(data)),
    )
    bandwidth, rate = grouped.BYTES_A_SECOND / 1e12, grouped.OPERATIONS_A_SECOND / 1e12
    said = (
        "The estimate is the time to read and write all bytes, those of the experts that have tokens, at"
        f" {bandwidth:.1f} TB/s, or to multiply at {rate:.0f} TFLOP/s: what an H200 sustains, and no bound."
        f" An H100's memory is slower. Sequences have {grouped.SEQUENCE:,} tokens."
    )
    return "\n\n".join((over_cases, said, measured_on_gpu(data)))


def gpu_grouped_cases(data: dict[str, Any]) -> str:
    """Every grouped product."""
    head = ["model", "kind", "K, N", "tokens", "shares", "samebits, µs", "PyTorch, µs", "estimate, µs"]
    cases = (
        [c["model"], c["kind"], f"{c['k']}, {c['n']}", f"{c['tokens']:,}"]
        + ["skewed" if c["skewed"] else "balanced"]
        + [f"{x:.1f}" for x in (c["us"]["samebits"], c["us"]["torch"], c["limit"])]
        for c in data["cases"]
    )
    return f"{table(head, cases)}\n\n{measured_on_gpu(data)}"


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
            measured_on_gpu(data),
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
    return "\n\n".join((table(head, lines), said, measured_on_gpu(data)))


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
    return "\n\n".join((table(head, lines), said, measured_on_gpu(data)))


def gpu_fp8_accuracy(data: dict[str, Any]) -> str:
    """Errors of products in FP8, over all sizes."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for case in data["cases"]:
        groups.setdefault((case["kind"], case["out"]), []).append(case)
    lines = []
    for (kind, out), cases in groups.items():
        both = [c["error"] for c in cases if "torch" in c["error"]]
        ratios = [e["samebits"] / e["torch"] for e in both]
        means = [f"{statistics.geometric_mean(c['error']['samebits'] for c in cases):.2g}"]
        means += [f"{statistics.geometric_mean(e['torch'] for e in both):.2g}" if both else "refused"]
        beside = [f"{statistics.geometric_mean(ratios):.3f}", f"{max(ratios):.3f}"] if both else ["", ""]
        quantized = statistics.geometric_mean(c["of_quantization"] for c in cases)
        lines.append([kind, out, str(len(cases)), *means, *beside, f"{quantized:.2g}"])
    head = ["values", "output", "products", "samebits", "PyTorch", "samebits / PyTorch", "worst"]
    said = (
        f"Of {data['cases'][0]['m']} rows. Root mean square of the difference from float64's product of the"
        " same quantized operands, relative to that product: geometric means. The last column is how far"
        " that product is from the one of operands in bf16."
    )
    return "\n\n".join((table([*head, "of quantization"], lines), said, measured_on_gpu(data)))


def gpu_segments(data: dict[str, Any]) -> str:
    """What sums in segments cost on one GPU."""
    head = ["rows", "time / plain chain", "worst", "time / torch.mm", "worst"]
    dtype = data.get("dtype", "bfloat16")
    contract = f"{'FMA' if dtype == 'float32' else 'TENSOR_CORE'}.segmented({data['segments']})"
    text = f"`{contract}`, {len(data['cases'])} products, {dtype}, geometric means."
    return "\n\n".join((table(head, ranks.segments_rows(data)), text, measured_on_gpu(data)))


def gpu_unaligned(data: dict[str, Any]) -> str:
    """Products of matrices that TMA cannot read."""
    rows = sorted({c["m"] for c in data["cases"]})
    lines = []
    for work in dict.fromkeys(c["work"] for c in data["cases"]):
        of = {c["m"]: c for c in data["cases"] if c["work"] == work}
        lines.append([work, *(f"{unaligned.speed(of[m]):.2f}" for m in rows)])
    gains = [c["us"]["universal kernel"] / c["us"]["samebits"] for c in data["cases"]]
    speeds = [unaligned.speed(c) for c in data["cases"]]
    case = data["cases"][0]
    said = (
        f"Speed relative to torch, K {case['k']:,}, N {case['n']:,}, bf16: geometric mean"
        f" {statistics.geometric_mean(speeds):.2f}, least {min(speeds):.2f}. Beside the universal kernel:"
        f" {statistics.geometric_mean(gains):.2f}, least {min(gains):.2f}."
    )
    return "\n\n".join((table(["", *(f"M {m:,}" for m in rows)], lines), said, measured_on_gpu(data)))


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


def gpu_native(data: dict[str, Any]) -> str:
    """libsamebits beside the library's own path through PyTorch."""
    speed, count = data["speed"], len(data["cases"])
    said = (
        f"{count} products of `samebits bench`, in CUDA graphs, each compared bit for bit: `libsamebits` has"
        f" {speed['mean']:.3f} of the speed of the path through PyTorch (geometric mean),"
        f" {speed['worst']:.3f} at least. The archive takes {data['archive_bytes'] / 1e6:.1f} MB;"
        f" its kernels load in {data['seconds']['load']:.1f} s. A call costs the CPU, in microseconds:"
    )
    head = ["M, K, N", "dtype", "from C", "`samebits_native`", "PyTorch path"]
    lines = (
        [f"{c['m']:,}, {c['k']:,}, {c['n']:,}", c["dtype"]]
        + [f"{c['us'][name]:.1f}" for name in ("c", "engine", "torch")]
        for c in data["host"]
    )
    return "\n\n".join((said, table(head, lines), measured_on_gpu(data)))
