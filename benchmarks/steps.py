"""Whole steps of two models, one of experts, in PyTorch and in both forms of the mode.

python -m benchmarks.steps [--commit COMMIT] [--out FILE]

It writes benchmarks/results/<gpu>/steps.json: training steps (forward and backward, with the logits' loss and
with ``linear_logp``), decoding with a static cache of 1,024 keys (as a CUDA graph and call by call), and the
peak memory of each. PyTorch attends by ``sdpa``, samebits by ``sdpa`` in training and by its own
implementation in decoding; experts run PyTorch's grouped products, and samebits' own implementation. Each
form has a process of its own, since what the switch of the process registers stays. They take turns at every
step, as :mod:`benchmarks.turns` says. A turn runs the step twice and times the second.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

import samebits
import samebits.transformers
from benchmarks.models import BATCHES, BILLION
from benchmarks.record import RESULTS, environment, results_file, slug, write
from benchmarks.turns import processes
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
        prompt = tokens(model, batch, KEYS - 1)
        for part in prompt.split(128, 1):
            model.model(part, past_key_values=self._cache, use_cache=True)
        self._ids = prompt[:, :1].clone()
        self._at = torch.full((batch, 1), KEYS - 1, device="cuda")

    @torch.no_grad()
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

    ms: float
    peak: int


def once(turn: Turn, form: Form) -> Taken:
    """The second of two runs of a step. The first wakes up the host, the GPU and their caches.

    The step starts with an idle GPU and ends with one. The functions before and after it are not timed.
    """
    before, step, after = turn
    with form.within():
        for _ in range(2):
            before()
            held = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
            start = time.perf_counter()
            step()
            torch.cuda.synchronize()
            taken = Taken((time.perf_counter() - start) * 1e3, torch.cuda.max_memory_allocated() - held)
            after()
    return taken


def in_turns(forms: Mapping[str, Callable[[], Taken]], repeats: int) -> Measured:
    """Median times and peaks of a step in several forms, which take turns. The first turns do not count."""
    found: dict[str, list[Taken]] = {form: [] for form in forms}
    for turn in range(repeats + 1):
        for form, run in forms.items():
            taken = run()
            if turn:
                found[form].append(taken)
    return {form: summary(taken) for form, taken in found.items()}


def summary(taken: list[Taken]) -> dict[str, float]:
    ms, peaks = zip(*taken, strict=True)
    return {"ms": float(f"{statistics.median(ms):.4g}"), "mib": max(peaks) >> 20}


def tokens(model: Any, rows: int, n: int) -> torch.Tensor:
    """The same in every process."""
    torch.manual_seed(0)
    return torch.randint(model.config.vocab_size, (rows, n), device="cuda")


def a_billion() -> Any:
    """The model of a billion parameters, which is a Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda"):
        model: Any = LlamaForCausalLM(LlamaConfig(**BILLION))
    model.set_attn_implementation("sdpa")
    return model.to(torch.bfloat16)


def training(form: str) -> dict[str, Turn]:
    """The steps of training, by their names."""
    model = a_billion()
    found: dict[str, Turn] = {}
    for rows, n in BATCHES:
        stored, fused = (partial(f, model, tokens(model, rows, n)) for f in (stored_logits, fused_logits))
        name = f"forward + backward, {rows} x {n:,}"
        found[name] = nothing, stored, nothing
        found[f"{name}, linear_logp"] = nothing, stored if form == "torch" else fused, nothing
    return found


def training_experts(form: str) -> dict[str, Turn]:
    """The steps of training a model of experts, by their names."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda"):
        model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**EXPERTS))
    model = model.to(torch.bfloat16)
    model.set_attn_implementation("sdpa")
    model.set_experts_implementation(FORMS[form].experts)
    return {
        f"experts, forward + backward, {rows} x {n:,}": (
            nothing,
            partial(stored_logits, model, tokens(model, rows, n)),
            nothing,
        )
        for rows, n in BATCHES
    }


@torch.no_grad()
def decoding(form: str) -> dict[str, Turn]:
    """The steps of decoding, by their names."""
    model = a_billion()
    found: dict[str, Turn] = {}
    for batch in DECODED:
        with FORMS[form].within():
            decode = Decoding(model, batch, FORMS[form].decoding)
            found[f"decode, eager, batch {batch}"] = nothing, decode.eager, decode.forget
            found[f"decode, CUDA graph, batch {batch}"] = nothing, decode.graph(), decode.forget
    return found


KINDS: dict[Callable[[str], dict[str, Turn]], int] = {training: 9, training_experts: 9, decoding: 45}
"""The steps of a form, and how many turns of each are taken."""


def serve(form: str, turns: Connection) -> None:
    """Makes the steps of each kind, and answers the name of one with what it took, until None comes."""
    samebits.transformers.register()
    for kind in KINDS:
        steps = kind(form)
        turns.send(list(steps))
        while (work := turns.recv()) is not None:
            turns.send(once(steps[work], FORMS[form]))
        del steps
        gc.collect()
        torch.cuda.empty_cache()


def measure(console: Console) -> list[dict[str, Any]]:
    """Every step in each form."""
    cases = []
    with processes(serve, FORMS) as forms:

        def ask(form: str, work: str) -> Taken:
            forms[form].send(work)
            taken: Taken = forms[form].recv()
            return taken

        for repeats in KINDS.values():
            works = {form: of.recv() for form, of in forms.items()}
            for work in works["torch"]:
                console.print(work, style="dim", highlight=False)
                cases.append({"work": work} | in_turns({f: partial(ask, f, work) for f in FORMS}, repeats))
            for of in forms.values():
                of.send(None)
    return cases


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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--commit", help="what is measured, where there is no git to ask")
    parser.add_argument("--out", type=results_file, help="instead of benchmarks/results/<gpu>/steps.json")
    options = parser.parse_args()
    console, record = Console(width=130), environment(options.commit)
    data = {"environment": record, "model": BILLION, "experts": EXPERTS, "cases": measure(console)}
    console.print(show(data))
    write(options.out or RESULTS / slug(torch.cuda.get_device_name()) / "steps.json", data)


if __name__ == "__main__":
    main()
