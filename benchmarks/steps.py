"""Whole steps of a model of a billion parameters, in PyTorch and in both forms of the mode.

python -m benchmarks.steps [--commit COMMIT] [--out FILE]

It writes benchmarks/results/<gpu>/steps.json: training steps (forward and backward, with the logits' loss and
with ``linear_logp``), decoding with a static cache of 1,024 keys (as a CUDA graph and call by call), and the
peak memory of each. PyTorch attends by ``sdpa``, samebits by ``sdpa`` in training and by its own
implementation in decoding. PyTorch and the context are measured first, since what the switch of the process
registers stays.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import samebits
import samebits.transformers
from benchmarks.models import BATCHES, BILLION
from benchmarks.record import RESULTS, environment, results_file, slug, write
from samebits.ops.linear_logp import linear_logp

DECODED = (1, 32, 128)
KEYS = 1024
Step = Callable[[], Any]


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

    def __init__(self, model: Any, batch: int) -> None:
        from transformers import StaticCache

        self._model = model
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


def milliseconds(step: Step, after: Step, repeats: int) -> float:
    """Median time of steps, each from an idle GPU to an idle GPU; `after` is not timed."""
    times = []
    for turn in range(repeats + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        if turn:
            times.append((time.perf_counter() - start) * 1e3)
        after()
    return float(f"{statistics.median(times):.4g}")


def measured(step: Step, after: Step = lambda: None, repeats: int = 7) -> dict[str, float]:
    for _ in range(2):
        step()
        after()
    torch.cuda.reset_peak_memory_stats()
    ms = milliseconds(step, after, repeats)
    return {"ms": ms, "mib": torch.cuda.max_memory_allocated() >> 20}


FORMS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "torch": nullcontext,
    "context": lambda: samebits.batch_invariant("error"),
    "process": lambda: samebits.set_batch_invariant_mode(True, "error"),
}


def training(model: Any, form: str) -> dict[str, dict[str, float]]:
    """The steps of training in a form, by their names."""
    model.set_attn_implementation("sdpa")
    found = {}
    for rows, tokens in BATCHES:
        ids = torch.randint(model.config.vocab_size, (rows, tokens), device="cuda")
        name = f"forward + backward, {rows} x {tokens:,}"
        found[name] = measured(partial(stored_logits, model, ids))
        fused = found[name] if form == "torch" else measured(partial(fused_logits, model, ids))
        found[f"{name}, linear_logp"] = fused
    return found


@torch.no_grad()
def decoding(model: Any, form: str) -> dict[str, dict[str, float]]:
    """The steps of decoding in a form, by their names."""
    model.set_attn_implementation("sdpa" if form == "torch" else "samebits")
    found = {}
    for batch in DECODED:
        decode = Decoding(model, batch)
        found[f"decode, eager, batch {batch}"] = measured(decode.eager, decode.forget, 15)
        found[f"decode, CUDA graph, batch {batch}"] = measured(decode.graph(), decode.forget, 15)
        del decode
    return found


def show(data: dict[str, Any]) -> Table:
    table = Table("step", *(f"{form}, ms" for form in FORMS), "context / torch", "process / torch", "memory")
    for case in data["cases"]:
        theirs, *ours = (case[form] for form in FORMS)
        times = (f"{of['ms']:.2f}" for of in (theirs, *ours))
        ratios = (f"{of['ms'] / theirs['ms']:.3f}" for of in ours)
        table.add_row(case["work"], *times, *ratios, f"{ours[0]['mib'] / theirs['mib']:.3f}")
    return table


def main() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

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
    out = options.out or RESULTS / slug(torch.cuda.get_device_name()) / "steps.json"
    times: dict[str, dict[str, Any]] = {}
    for form, within in FORMS.items():
        with within():
            times[form] = training(model, form) | decoding(model, form)
    cases = [{"work": work} | {form: times[form][work] for form in FORMS} for work in times["torch"]]
    data: dict[str, Any] = {"environment": record, "model": BILLION, "cases": cases}
    Console(width=130).print(show(data))
    write(out, data)


if __name__ == "__main__":
    main()
