"""A token has the same log-prob in generation with a cache, in chunked prefill and in training.

The example builds a small causal model of `transformers` with random weights, and samples from it token by
token with a KV cache. It computes the log-probs of those tokens a second time by prefilling a cache in
chunks, and a third time by the forward of training. It does so once in PyTorch, and once under
``samebits.batch_invariant``.

    python examples/generate.py --architecture qwen3 --dtype bfloat16
"""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import samebits

MODELS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}


SMALL = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}


def build(architecture: str, dtype: torch.dtype, device: str, *, seed: int = 0, **sizes: int) -> nn.Module:
    """A causal model of sizes `SMALL` and `sizes`, with random weights that prefer some tokens."""
    torch.manual_seed(seed)
    config, model = MODELS[architecture]
    sizes = SMALL | sizes
    with torch.device(device):
        return model(config(**sizes, initializer_range=sizes["hidden_size"] ** -0.5)).to(dtype)


def logps(model: nn.Module, hidden: Tensor, tokens: Tensor, ours: bool) -> Tensor:
    """Log-probs of `tokens` after the hidden states ``[rows, tokens, D]``."""
    if ours:
        return samebits.linear_logp(hidden, model.lm_head.weight, tokens)
    return model.lm_head(hidden).float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


@torch.no_grad()
def generate(
    model: nn.Module, prompts: Tensor, count: int, *, ours: bool, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Sample `count` tokens after ``prompts[rows, tokens]``, one by one.

    Returns:
        All tokens, and the log-probs of the new ones.
    """
    generator = torch.Generator(prompts.device).manual_seed(seed)
    cache, step = DynamicCache(config=model.config), prompts
    ids, results = prompts, []
    for _ in range(count):
        hidden = model.model(step, past_key_values=cache, use_cache=True).last_hidden_state[:, -1:]
        probabilities = model.lm_head(hidden[:, 0]).float().softmax(-1)
        step = torch.multinomial(probabilities, 1, generator=generator)
        results.append(logps(model, hidden, step, ours))
        ids = torch.cat([ids, step], 1)
    return ids, torch.cat(results, 1)


@torch.no_grad()
def prefill(model: nn.Module, ids: Tensor, count: int, chunk: int, *, ours: bool) -> Tensor:
    """Log-probs of the last `count` tokens, with the cache filled a chunk at a time."""
    cache = DynamicCache(config=model.config)
    parts = [
        model.model(part, past_key_values=cache, use_cache=True).last_hidden_state
        for part in ids.split(chunk, dim=1)
    ]
    return logps(model, torch.cat(parts, 1)[:, -count - 1 : -1], ids[:, -count:], ours)


def training(model: nn.Module, ids: Tensor, count: int, *, ours: bool) -> Tensor:
    """Log-probs of the last `count` tokens, all at once and with gradients."""
    hidden = model.model(ids, use_cache=False).last_hidden_state
    return logps(model, hidden[:, -count - 1 : -1], ids[:, -count:], ours)


@dataclass(frozen=True)
class Difference:
    """The difference between two computations of the same tokens' log-probs."""

    name: str
    tokens: int
    differing: int
    largest: float
    kl: float
    """An estimate of the divergence: the mean of e^d - 1 - d. It is 0 only if every difference d is 0."""

    @classmethod
    def of(cls, name: str, one: Tensor, other: Tensor) -> Difference:
        d = (one - other).double()
        differing = int((one.view(torch.int32) != other.view(torch.int32)).sum())
        return cls(name, d.numel(), differing, float(d.abs().max()), float((d.expm1() - d).mean()))

    def __str__(self) -> str:
        return (
            f"{self.name:32} {self.differing:5} of {self.tokens} tokens differ,"
            f" by up to {self.largest:.2e}; KL {self.kl:.2e}"
        )


def compare(model: nn.Module, prompts: Tensor, count: int, *, ours: bool) -> list[Difference]:
    """Compare generation, and chunked prefill, with the forward of training."""
    mode: AbstractContextManager[None] = samebits.batch_invariant("error") if ours else nullcontext()
    with mode:
        ids, generated = generate(model, prompts, count, ours=ours)
        chunked = prefill(model, ids, count, 7, ours=ours)
        trained = training(model, ids, count, ours=ours).detach()
        alone = torch.cat([training(model, row, count, ours=ours).detach() for row in ids.split(1)])
    return [
        Difference.of("generation, with a cache", generated, trained),
        Difference.of("prefill in chunks of 7", chunked, trained),
        Difference.of("training, one row at a time", alone, trained),
    ]


def main(arguments: list[str] | None = None) -> dict[str, list[Difference]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--architecture", choices=sorted(MODELS), default="qwen3")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=40)
    options = parser.parse_args(arguments)
    model = build(options.architecture, getattr(torch, options.dtype), options.device)
    prompts = torch.randint(model.config.vocab_size, (options.rows, 9), device=options.device)
    print(f"{options.architecture}, {options.dtype}, on {options.device}; against the forward of training")
    found = {}
    for ours, name in ((False, "PyTorch"), (True, "samebits")):
        found[name] = compare(model, prompts, options.tokens, ours=ours)
        print(name, *found[name], sep="\n  ")
    return found


if __name__ == "__main__":
    main()
