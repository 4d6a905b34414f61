"""Tables of what was measured on a CPU."""

from __future__ import annotations

from benchmarks.record import load
from benchmarks.tables.text import made_with, table


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
