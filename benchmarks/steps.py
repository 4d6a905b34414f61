"""Whole steps of a model of a billion parameters, in PyTorch and under ``samebits.batch_invariant``.

python -m benchmarks.steps [--commit COMMIT] [--out FILE]

It writes benchmarks/results/<gpu>/steps.json: training steps (forward and backward, with the logits' loss and
with ``linear_logp``), decoding with a static cache of 1,024 keys (as a CUDA graph and call by call), and the
peak memory of each. PyTorch attends by ``sdpa``, samebits by ``sdpa`` in training and by its own
implementation in decoding.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import samebits.transformers
from benchmarks.models import BATCHES, BILLION, mode
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


def training(model: Any) -> list[dict[str, Any]]:
    model.set_attn_implementation("sdpa")
    found = []
    for rows, tokens in BATCHES:
        ids = torch.randint(model.config.vocab_size, (rows, tokens), device="cuda")
        case: dict[str, Any] = {"work": f"forward + backward, {rows} x {tokens:,}"}
        case["torch"] = measured(partial(stored_logits, model, ids))
        with mode(True):
            case["samebits"] = measured(partial(stored_logits, model, ids))
            found.append(case)
            fused = measured(partial(fused_logits, model, ids))
        found.append({"work": f"{case['work']}, linear_logp", "torch": case["torch"], "samebits": fused})
    return found


@torch.no_grad()
def decoding(model: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for batch in DECODED:
        cases: dict[str, dict[str, Any]] = {
            how: {"work": f"decode, {how}, batch {batch}"} for how in ("CUDA graph", "eager")
        }
        for ours, name in ((False, "torch"), (True, "samebits")):
            model.set_attn_implementation("samebits" if ours else "sdpa")
            with mode(ours):
                decode = Decoding(model, batch)
                cases["eager"][name] = measured(decode.eager, decode.forget, 15)
                cases["CUDA graph"][name] = measured(decode.graph(), decode.forget, 15)
            del decode
        found += cases.values()
    return found


def show(data: dict[str, Any]) -> Table:
    table = Table("step", "torch, ms", "samebits, ms", "samebits / torch", "memory / torch")
    for case in data["cases"]:
        ours, theirs = case["samebits"], case["torch"]
        ratios = (f"{ours[of] / theirs[of]:.3f}" for of in ("ms", "mib"))
        table.add_row(case["work"], f"{theirs['ms']:.2f}", f"{ours['ms']:.2f}", *ratios)
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
    data: dict[str, Any] = {"environment": record, "model": BILLION, "cases": []}
    out = options.out or RESULTS / slug(torch.cuda.get_device_name()) / "steps.json"
    for part in (training, decoding):
        data["cases"] += part(model)
        Console(width=110).print(show(data))
        write(out, data)


if __name__ == "__main__":
    main()
