"""TRL's GRPO trainer under samebits: rollout and loss agree on every log-prob, to the bit.

A ``trl.GRPOTrainer`` at its defaults (autocast to bfloat16, gradient checkpointing, generation by
`transformers`) teaches a small Qwen3 with random weights to answer in even numbers. TRL assumes that the
log-probs of its rollout are those that its loss computes again, in micro-batches. Here the rollout's
log-probs are recorded, and the loss gets them as the old ones. In PyTorch some differ, so the first update
after a rollout is off-policy. Under ``samebits.batch_invariant`` each importance ratio is exactly 1, and a
second run ends with identical weights.

    python examples/trl_grpo.py --steps 4
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from generate import build
from grpo import digest
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, PrinterCallback
from trl import GRPOConfig, GRPOTrainer
from trl.kernels import ChunkedLogProbFunction

from samebits import batch_invariant

WORDS = ["<pad>", "<eos>", *(str(i) for i in range(298))]
PROMPTS = [" ".join(WORDS[2 + i : 4 + i + i % 4]) for i in range(32)]  # of two to five words


@dataclass
class Step:
    """A rollout, and the loss of its tokens."""

    tokens: int = 0
    differing: int = 0
    """Tokens whose log-prob has other bits in the loss than in the rollout."""
    off: float = 0
    """The largest |ratio - 1|, for the ratio of a token's probability in the loss to that in the rollout."""
    kl: float = 0
    """The divergence of the rollout from the loss: the mean of ratio - 1 - log(ratio)."""

    def add(self, rollout: Tensor, loss: Tensor) -> None:
        """Count tokens, given their log-probs."""
        difference = (loss - rollout).double().cpu().numpy()
        divergence = float((np.expm1(difference) - difference).sum())
        self.kl = (self.kl * self.tokens + divergence) / max(1, self.tokens + rollout.numel())
        self.tokens += rollout.numel()
        self.differing += int((rollout.view(torch.int32) != loss.view(torch.int32)).sum())
        self.off = max(self.off, float(abs(np.expm1(difference)).max()))


@dataclass
class Run:
    steps: list[Step]
    reward: list[float]
    weights: str
    """SHA-256 of the weights at the end."""


class Recorder(GRPOTrainer):
    """TRL's trainer, which also compares the log-probs of its rollout with those of its loss."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps: list[Step] = []

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        self.steps.append(Step())
        return super()._generate_single_turn(*args, **kwargs)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self.logps = found[0].detach()
        return found

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        loss = super()._compute_loss(model, inputs)
        mask = inputs["completion_mask"].bool()
        self.steps[-1].add(inputs["sampling_per_token_logps"][mask], self.logps[mask])
        return loss


class Trainer(Recorder):
    """The trainer, with the log-probs of a rollout by `transformers` as the old ones."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model.base_model.register_forward_pre_hook(positions, with_kwargs=True)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> tuple[list[list[int]], list[list[float]]]:
        """The tokens that TRL generates, and their log-probs, which TRL leaves out."""
        head, last = self.model.get_output_embeddings(), []
        hook = head.register_forward_pre_hook(lambda _, inputs: last.append(inputs[0][:, -1]))
        answers, _ = super()._generate_single_turn(*args, **kwargs)
        hook.remove()
        logps = []
        with torch.no_grad(), self.accelerator.autocast():
            for hidden, answer in zip(torch.stack(last, 1), answers, strict=True):
                tokens = torch.tensor(answer, device=hidden.device)
                operands = hidden[: len(answer)], head.weight, head.bias, tokens
                logps.append(ChunkedLogProbFunction.apply(*operands, self.temperature, 1 << 15)[0].tolist())
        return answers, logps

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        inputs["old_per_token_logps"] = inputs["sampling_per_token_logps"]
        return super()._compute_loss(model, inputs)


def positions(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Count positions from the first token that is not padding, as `generate` does. TRL's loss does not."""
    if kwargs.get("position_ids") is None:
        mask = kwargs["attention_mask"]
        kwargs["position_ids"] = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)
    return args, kwargs


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are `WORDS`."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def even(completions: list[str], **_: Any) -> list[float]:
    """The reward: the share of an answer's words that are even numbers."""
    answers = [completion.split() for completion in completions]
    return [sum(int(word) % 2 == 0 for word in answer) / max(1, len(answer)) for answer in answers]


def train(steps: int, *, ours: bool, device: str, seed: int = 0) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=build("qwen3", torch.float32, device, seed=seed, pad_token_id=0, eos_token_id=1),
            reward_funcs=even,
            args=GRPOConfig(
                output_dir=folder,
                use_cpu=device == "cpu",
                seed=seed,
                max_steps=steps,
                per_device_train_batch_size=4,  # rows of a micro-batch of the loss; the rollout has all 16
                gradient_accumulation_steps=4,
                max_completion_length=12,
                learning_rate=1e-2,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]),
            processing_class=word_tokenizer(),
        )
        trainer.remove_callback(PrinterCallback)
        mode: AbstractContextManager[None] = batch_invariant("error") if ours else nullcontext()
        with mode:
            trainer.train()
    reward = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    return Run(trainer.steps, reward, digest(trainer.model))


def main(arguments: list[str] | None = None) -> dict[str, Run]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    runs = {
        name: train(options.steps, ours=name != "PyTorch", device=options.device)
        for name in ("PyTorch", "samebits", "samebits, again")
    }
    table = Table("", "reward", "other log-probs", "|ratio - 1|", "weights")
    for name, run in runs.items():
        for i, (step, reward) in enumerate(zip(run.steps, run.reward, strict=True), start=1):
            differing = f"{step.differing} of {step.tokens}"
            weights = run.weights[:8] if i == options.steps else ""
            table.add_row(f"{name}, step {i}", f"{reward:.2f}", differing, f"{step.off:.1e}", weights)
        table.add_section()
    Console().print(table)
    return runs


if __name__ == "__main__":
    main()
