"""Whole steps of two models, one of experts, in PyTorch and in both forms of the mode.

python -m benchmarks.steps [--commit COMMIT] [--out FILE]

It writes benchmarks/results/<gpu>/steps.json: training steps (forward and backward, with the logits' loss and
with ``linear_logp``), decoding with a static cache of 1,024 keys (as a CUDA graph and call by call), and the
peak memory of each. PyTorch attends by ``sdpa``, samebits by ``sdpa`` in training and by its own
implementation in decoding; experts run PyTorch's grouped products, and samebits' own implementation. PyTorch
and the context take turns. The switch of the process is measured afterwards, since what it registers stays:
the host may be faster then, or slower. Decoding is timed in three rounds over all batches.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

import samebits
import samebits.transformers
from benchmarks.models import BATCHES, BILLION
from benchmarks.record import RESULTS, environment, results_file, slug, write
from samebits.ops.linear_logp import linear_logp

EXPERTS: dict[str, Any] = {
    "hidden_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "vocab_size": 32768,
    "max_position_embeddings": 4096,
}
"""A Qwen3-MoE."""
DECODED = (1, 32, 128)
KEYS = 1024
ROUNDS = 3
"""Of decoding. Without a CUDA graph the host is the bound, and other work slows it for seconds at a time."""
Step = Callable[[], Any]
Turn = tuple[Step, Step, Step]
"""What is done before a step, the step, and what is done after it."""


def stored_logits(model: Any, ids: torch.Tensor) -> None:
    """Forward and backward with the model's own loss, which stores the logits."""
    model(ids, labels=ids, use_cache=False).loss.backward()
    model.zero_grad(set_to_none=True)


def fused_logits(model: Any, ids: torch.Tensor) -> None:
    """The same loss by ``linear_logp``."""
    hidden = model.model(ids, use_cache=False).last_hidden_state[:, :-1]
    (-linear_logp(hidden, model.lm_head.weight, ids[:, 1:]).mean()).backward()
    model.zero_grad(set_to_none=True)


class Decoding:
    """A step of decoding, with the cache as it was after each one."""

    def __init__(self, model: Any, batch: int, attention: str) -> None:
        from transformers import StaticCache

        self._model, self._attention = model, attention
        self.prepare()
        self._cache: Any = StaticCache(config=model.config, max_cache_len=KEYS)
        prompt = torch.randint(model.config.vocab_size, (batch, KEYS - 1), device="cuda")
        for part in prompt.split(128, 1):
            model.model(part, past_key_values=self._cache, use_cache=True)
        self._ids = prompt[:, :1].clone()
        self._at = torch.full((batch, 1), KEYS - 1, device="cuda")

    def eager(self) -> torch.Tensor:
        out = self._model(self._ids, past_key_values=self._cache, position_ids=self._at, use_cache=True)
        logits: torch.Tensor = out.logits
        return logits

    def prepare(self) -> None:
        self._model.set_attn_implementation(self._attention)

    def forget(self) -> None:
        """Takes the last token out of the cache again."""
        for layer in self._cache.layers:
            layer.cumulative_length.fill_(KEYS - 1)

    def graph(self) -> Step:
        for _ in range(2):
            self.eager()
            self.forget()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.eager()
        self.forget()
        return graph.replay


class Form(NamedTuple):
    """PyTorch, or a form of the mode, with a model's attention while it decodes, and its experts."""

    within: Callable[[], AbstractContextManager[Any]]
    decoding: str
    experts: str


FORMS = {
    "torch": Form(nullcontext, "sdpa", "grouped_mm"),
    "context": Form(lambda: samebits.batch_invariant("error"), "samebits", "samebits"),
    "process": Form(lambda: samebits.set_batch_invariant_mode(True, "error"), "samebits", "samebits"),
}
Measured = dict[str, dict[str, float]]


def nothing() -> None:
    """Before a step that needs nothing, and after one that leaves nothing behind."""


class Taken(NamedTuple):
    """Milliseconds of a step, and the most bytes that it allocated."""

    ms: list[float]
    peaks: list[int]

    def summary(self) -> dict[str, float]:
        return {"ms": float(f"{statistics.median(self.ms):.4g}"), "mib": max(self.peaks) >> 20}


def turns(steps: dict[str, Turn], repeats: int, forms: Mapping[str, Form] = FORMS) -> dict[str, Taken]:
    """A step in several forms, which take turns: what changes with time, changes for all.

    Each step starts with an idle GPU and ends with one. The functions before and after it are not timed.
    """
    found = {form: Taken([], []) for form in steps}
    for turn in range(repeats + 2):
        for form, (before, step, after) in steps.items():
            with forms[form].within():
                before()
                held = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                torch.cuda.synchronize()
                start = time.perf_counter()
                step()
                torch.cuda.synchronize()
                if turn > 1:
                    found[form].ms.append((time.perf_counter() - start) * 1e3)
                    found[form].peaks.append(torch.cuda.max_memory_allocated() - held)
                after()
    return found


def in_turns(steps: dict[str, Turn], repeats: int, forms: Mapping[str, Form] = FORMS) -> Measured:
    """Median times, and peaks of memory, of :func:`turns`."""
    return {form: taken.summary() for form, taken in turns(steps, repeats, forms).items()}


def training(model: Any, forms: Sequence[str]) -> dict[str, Measured]:
    """The steps of training, by their names."""
    model.set_attn_implementation("sdpa")
    found = {}
    for rows, tokens in BATCHES:
        ids = torch.randint(model.config.vocab_size, (rows, tokens), device="cuda")
        stored, fused = (partial(f, model, ids) for f in (stored_logits, fused_logits))
        name = f"forward + backward, {rows} x {tokens:,}"
        found[name] = in_turns(dict.fromkeys(forms, (nothing, stored, nothing)), 9)
        ours: dict[str, Step] = {form: stored if form == "torch" else fused for form in forms}
        found[f"{name}, linear_logp"] = in_turns(
            {form: (nothing, step, nothing) for form, step in ours.items()}, 9
        )
    return found


def training_experts(model: Any, forms: Sequence[str]) -> dict[str, Measured]:
    """The steps of training a model of experts, by their names."""
    model.set_attn_implementation("sdpa")
    found = {}
    for rows, tokens in BATCHES:
        ids = torch.randint(model.config.vocab_size, (rows, tokens), device="cuda")
        step = partial(stored_logits, model, ids)
        found[f"experts, forward + backward, {rows} x {tokens:,}"] = in_turns(
            {
                form: (partial(model.set_experts_implementation, FORMS[form].experts), step, nothing)
                for form in forms
            },
            9,
        )
    return found


@torch.no_grad()
def decoding(model: Any, forms: Sequence[str]) -> dict[str, Measured]:
    """The steps of decoding, by their names."""
    steps: dict[str, dict[str, Turn]] = {}
    for batch in DECODED:
        eager: dict[str, Turn] = {}
        graphs: dict[str, Turn] = {}
        for form in forms:
            with FORMS[form].within():
                decode = Decoding(model, batch, FORMS[form].decoding)
                eager[form] = decode.prepare, decode.eager, decode.forget
                graphs[form] = nothing, decode.graph(), decode.forget
        steps |= {f"decode, eager, batch {batch}": eager, f"decode, CUDA graph, batch {batch}": graphs}
    found = {work: {form: Taken([], []) for form in forms} for work in steps}
    for _ in range(ROUNDS):
        for work, of in steps.items():
            for form, taken in turns(of, 15).items():
                found[work][form].ms.extend(taken.ms)
                found[work][form].peaks.extend(taken.peaks)
    return {work: {form: taken.summary() for form, taken in of.items()} for work, of in found.items()}


def show(data: dict[str, Any]) -> Table:
    table = Table("step", *(f"{form}, ms" for form in FORMS), "context / torch", "process / torch", "memory")
    for case in data["cases"]:
        theirs, *ours = (case[form] for form in FORMS)
        times = (f"{of['ms']:.2f}" for of in (theirs, *ours))
        ratios = (f"{of['ms'] / theirs['ms']:.3f}" for of in ours)
        memory = f"{ours[0]['mib'] / theirs['mib']:.3f}" if theirs["mib"] else ""  # none in a graph's replay
        table.add_row(case["work"], *times, *ratios, memory)
    return table


def main() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--commit", help="what is measured, where there is no git to ask")
    parser.add_argument("--out", type=results_file, help="instead of benchmarks/results/<gpu>/steps.json")
    options = parser.parse_args()
    samebits.transformers.register()
    record = environment(options.commit)
    with torch.device("cuda"):
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(LlamaConfig(**BILLION))
        model = model.to(torch.bfloat16)
        experts: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**EXPERTS))
        experts = experts.to(torch.bfloat16)
    out = options.out or RESULTS / slug(torch.cuda.get_device_name()) / "steps.json"
    cases: dict[str, Measured] = {}
    for forms in (("torch", "context"), ("process",)):
        measured = training(model, forms) | training_experts(experts, forms) | decoding(model, forms)
        for work, times in measured.items():
            cases[work] = cases.get(work, {}) | times
    data: dict[str, Any] = {
        "environment": record,
        "model": BILLION,
        "experts": EXPERTS,
        "cases": [{"work": work} | times for work, times in cases.items()],
    }
    Console(width=130).print(show(data))
    write(out, data)


if __name__ == "__main__":
    main()
