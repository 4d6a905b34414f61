"""What is proven on which GPU: a table for the docs, and samebits/data/proven.json for ``samebits info``."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from benchmarks.record import ROOT, load, measured
from samebits.contract import HOPPER, TENSOR_CORE
from samebits.tools.bench.report import summary

PROVEN = ROOT / "samebits" / "data" / "proven.json"
CLASSES = ("other sm_90", "sm_100, 103, 120", "sm_80, 86, 89", "sm_75", "AMD gfx942, gfx950")
"""Kinds of GPU that kernels are compiled for, in tests without a GPU."""


@dataclass(frozen=True)
class Operation:
    """An operation on a backend.

    Attributes:
        name: as in the table.
        backend: ``cuda`` or ``triton``.
        kernels: matches "kernel: what was compared", in a report of ``samebits verify``.
        on: "compiled" or "refused" for each of `CLASSES`.
        ran: results of a GPU, of a run that compared bits in another way.
    """

    name: str
    backend: str
    kernels: str
    on: str
    ran: str = ""


# c: compiled, r: refused, -: neither compiled in tests nor refused
# Recorded reports have the former names of some kernels.
OPERATIONS = (
    Operation(
        "products, bfloat16 and float16",
        "cuda",
        r"(matmul_sm(80|90)|tensor_core(_sm90)?|(padded|tail)_sm90): (?!.*segments).*",
        "cccrr",
    ),
    Operation("products, float32", "cuda", r"(matmul_)?fma(_few)?(_sm90)?: (?!.*segments).*", "ccccr"),
    Operation("batches of tiny matrices", "cuda", r"(bmm_)?tiny: .*", "ccccr"),
    Operation("products of groups (experts)", "cuda", r"(?!scaled).*grouped.*", "cccrr", "grouped.json"),
    Operation(
        "products in FP8, of groups too",
        "cuda",
        r"(scaled(_grouped)?_sm90|(silu_mul_)?quantize): .*",
        "crrrr",
        "fp8_invariance.json",
    ),
    Operation("segments (more than one GPU)", "cuda", r".*: .*segments", "cccrr"),
    Operation(
        "sums, softmax, norms, embeddings",
        "cuda",
        r"(sum|mean|(log_)?softmax|layer_norm|rms_norm|embedding|slots)\b.*",
        "cccrr",
        "rows.json",
    ),
    Operation("log-probabilities", "cuda", r"(linear_)?logp\b.*", "cccrr"),
    Operation(
        "attention",
        "cuda",
        r"((universal |samebits\.)?attention|attention_\w+)\b.*",
        "cccrr",
        "attention_invariance.json",
    ),
    Operation(
        "products, bfloat16 and float16", "triton", r"triton matmul(_tiles)?: .*", "ccc-r", "triton.json"
    ),
    Operation("products, float32", "triton", r"triton matmul, FMA: .*", "ccc-c", "triton.json"),
    Operation("log-probabilities", "triton", r"triton (linear_)?logp\b.*", "ccc-c", "triton.json"),
    Operation("groups, FP8, sums, softmax, norms, attention", "triton", r"-", "rrrrr"),
)
SAID = {"c": "compiled", "r": "refused", "-": "not tried"}


def proven() -> dict[str, Any]:
    """For each GPU that was verified: the run, and how many values of each operation it compared."""
    found = {}
    for folder in measured("verify.json"):
        data = load(f"{folder}/verify.json")
        e = data["environment"]
        if data["differing"] or data["failure"] or data["hung"]:
            continue
        found[e["gpu"]] = {
            "samebits": e["versions"]["samebits"],
            "commit": e["commit"][:10],
            "date": e["date"],
            "driver": e.get("driver", ""),
            "digest": e["digest"],
            "compared": data["compared"],
            "speed": _speed(folder),
            "operations": {
                f"{o.name}: {o.backend}": values for o in OPERATIONS if (values := _compared(o, data))
            },
        }
    return found


def _speed(folder: str) -> dict[str, float]:
    """Measured speed relative to PyTorch: means over products, and whole steps."""
    found = {}
    if folder in measured("bench.json"):
        bands = summary(load(f"{folder}/bench.json")["cases"])
        for (dtype, band), s in bands.items():
            if dtype == "bfloat16" and band in ("forward, M <= 128", "forward, M >= 512"):
                found[f"products, {band.removeprefix('forward, ')}"] = round(s.mean, 2)
    if folder in measured("steps.json"):
        for case in load(f"{folder}/steps.json")["cases"]:
            if {"torch", "context"} <= case.keys():
                found[case["work"]] = round(case["torch"]["ms"] / case["context"]["ms"], 2)
    return found


def _compared(operation: Operation, data: dict[str, Any]) -> int:
    return sum(
        line["compared"]
        for line in data["lines"]
        if line["counts"] and re.fullmatch(operation.kernels, line["kernel"] + ": " + line["what"])
    )


def table_of_support() -> list[list[str]]:
    """The head and a row for each operation and backend."""
    gpus = proven()
    folders = {
        load(f"{folder}/verify.json")["environment"]["gpu"]: folder for folder in measured("verify.json")
    }
    rows = [["operation", "backend", *gpus, *CLASSES]]
    for o in OPERATIONS:
        cells = []
        for gpu, facts in gpus.items():
            said = []
            if f"{o.name}: {o.backend}" in facts["operations"]:
                older = facts["digest"] != TENSOR_CORE.on(HOPPER).digest()
                said.append(f"proven {facts['date']}" + ", before a change of bits" * older)
            if o.ran and folders[gpu] in measured(o.ran):
                date = load(f"{folders[gpu]}/{o.ran}")["environment"]["date"]
                said += [f"ran {date}"] if date > facts["date"] or not said else []
            cells.append(", ".join(said) or SAID[o.on[0]])
        rows.append([o.name, f"`{o.backend}`", *cells, *(SAID[mark] for mark in o.on)])
    return rows


def text() -> str:
    """What `PROVEN` holds."""
    return json.dumps(proven(), indent=1) + "\n"
