"""The price of the same bits: a few rows from all results of a GPU."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable
from typing import Any

from benchmarks import engines, peers, steps
from benchmarks.record import load, measured
from benchmarks.scaled import beside
from samebits.tools.bench.attention_report import attention_summary
from samebits.tools.bench.report import summary

DECODE = "decode of that Llama, eager, 1 and 32 rows"
BESIDE = {
    "training step of a Llama of a billion parameters, 8 x 512 tokens": peers.TRAINING,
    DECODE: peers.DECODING,
    "products, bf16, forward, M <= 128": "products, forward, M <= 128",
    "products, bf16, forward, dX and dW, M >= 512": "products, forward, M >= 512",
    "log-probs, forward and backward": "log-probs, forward and backward",
}
"""What peers were measured at, beside which row of the table."""
STEPS = {
    "forward + backward, 8 x 512": "training step of a Llama of a billion parameters, 8 x 512 tokens",
    "forward + backward, 1 x 4,096": "training step of that Llama, 1 x 4,096 tokens",
    "Qwen3 4B, checkpointed, forward + backward, 4 x 2,048": (
        "training step of a Qwen3 of 4 billion, checkpointed, 4 x 2,048 tokens"
    ),
    "experts, forward + backward, 8 x 512": "training step of a model of experts, 8 x 512 tokens",
    "decode, eager, batch 1": DECODE,
    "decode, eager, batch 32": DECODE,
}
COMPILED = "torch, compiled"
BESIDE_COMPILED = ", beside `torch.compile`"


ROLLOUTS = "vllm.json", "vllm_1.7b.json"
"""Of engines, on a GPU of their own if need be."""

FILES = tuple(f"{name}.json" for name in ("steps", "models", "bench", "scaled", "attention", "logp", "peers"))
"""The results that it is of."""


def _beside_compiled(work: str, case: dict[str, Any]) -> list[str]:
    """A row that has compiled PyTorch for 1, and samebits in its fastest form."""
    theirs = case[COMPILED]["ms"]
    ours = f"{steps.best(case)['ms'] / theirs:.2f}"
    beside = {"torch": "PyTorch, eager", "liger": "Liger"}
    others = [f"{name} {case[form]['ms'] / theirs:.2f}" for form, name in beside.items() if form in case]
    return [work + BESIDE_COMPILED, ours, ours, ", ".join(others)]


def rows(gpu: str) -> list[list[str]]:
    """Work, time beside PyTorch's (= 1), where it is worst, and peers' times."""
    found: list[list[str]] = []
    theirs = peers.times(load(f"{gpu}/peers.json")) if gpu in measured("peers.json") else {}

    def add(work: str, times: Iterable[float], worst: float | None = None) -> None:
        every = list(times)
        slowest = max(every) if worst is None else worst
        beside = theirs.get(BESIDE.get(work, ""), {})
        names = [f"{name} {beside[who]:.2f}" for who, name in peers.NAMES.items() if who in beside]
        others = f"{', '.join(names)} (samebits {beside['samebits']:.2f})" if names else ""
        found.append([work, f"{statistics.geometric_mean(every):.2f}", f"{slowest:.2f}", others])

    for file in ROLLOUTS:
        if gpus := measured(file):
            data = load(f"{gpu if gpu in gpus else gpus[0]}/{file}")
            speeds = {
                name: [engines.speed(of, work) for work in engines.WORKS]
                for name, of in data["engines"].items()
            }
            beside_stock = {
                name: [s / t for s, t in zip(speeds["stock"], of, strict=True)] for name, of in speeds.items()
            }
            where = f"{data['environment']['gpu']} at `{data['environment']['commit'][:10]}`"
            add(f"rollouts in vLLM, {data['model']}, {where} (vLLM = 1)", beside_stock["samebits"])
            if "invariant" in beside_stock:
                found[-1][-1] = (
                    f"VLLM_BATCH_INVARIANT=1 {statistics.geometric_mean(beside_stock['invariant']):.2f}"
                )
    if gpu in measured("steps.json"):
        cases = load(f"{gpu}/steps.json")["cases"]
        taken: dict[str, list[float]] = {}
        compiled: dict[str, list[str]] = {}
        for (step, work), case in itertools.product(STEPS.items(), cases):
            name, layers = steps.layers_of(case["work"])
            if name == step:
                work += f", {layers} layers" if layers else ""
                forms = [form for form in ("context", "process") if form in case] or ["fused"]
                taken.setdefault(work, []).extend(case[form]["ms"] / case["torch"]["ms"] for form in forms)
                if COMPILED in case:
                    compiled[work] = _beside_compiled(work, case)
        for work, times in taken.items():
            add(work, times)
            if work in compiled:
                found.append(compiled[work])
    if gpu in measured("models.json"):
        runs = load(f"{gpu}/models.json")["training"]
        *ours, torch = (runs[who]["seconds_a_step"] for who in ("samebits", "samebits, again", "torch"))
        add("GRPO step of a small Llama, eager", [of_one / torch for of_one in ours])
    bands = summary(load(f"{gpu}/bench.json")["cases"])
    for band in ("forward, M <= 128", "forward, dX and dW, M >= 512"):
        speed = bands["bfloat16", band]
        add(f"products, bf16, {band}", [1 / speed.mean], 1 / speed.worst)
    if gpu in measured("scaled.json"):
        cases = load(f"{gpu}/scaled.json")["cases"]
        add("products, FP8, forward", [1 / beside(case) for case in cases])
    if gpu in measured("attention.json"):
        figures = attention_summary(load(f"{gpu}/attention.json"))
        for band in ("forward and backward, causal and full", "decode"):
            figure = figures[band]
            add(f"attention, {band}", [1 / figure.mean], 1 / figure.worst)
    if gpu in measured("logp.json"):
        cases = load(f"{gpu}/logp.json")["cases"]
        both = [c["forward_backward_ms"] for c in cases]
        add("log-probs, forward and backward", [t["samebits"] / t["torch"] for t in both])
    return found
