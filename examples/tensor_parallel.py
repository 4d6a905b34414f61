"""A rollout at one tensor-parallel size and a trainer at another agree on every log-prob, to the bit.

A small Llama learns to answer in even tokens. Every process trains the whole model by itself (the trainer at
TP 1), and all of them together train a second copy that is split over them (TP n), which also samples the
answers. In PyTorch the two disagree on log-probs from the start, and end with other weights. With
``samebits.distributed`` they agree, and so do runs of other sizes: 1, 2 and 4 print the same digest.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py
"""

from __future__ import annotations

import argparse
import hashlib
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from generate import Difference, build
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, parallel
from transformers import DynamicCache

import samebits
from samebits.distributed import tp_plan, vocab_parallel_linear_logp

CONTRACT = samebits.TENSOR_CORE.segmented(8)
SIZES = {"vocab_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4}


def split(model: nn.Module, mesh: DeviceMesh, ours: bool) -> nn.Module:
    """The model, with its weights split over the ranks of `mesh`."""
    if ours:
        return parallel.parallelize_module(model, mesh, tp_plan(model, contract=CONTRACT))
    styles = {
        "colwise": lambda: parallel.ColwiseParallel(),
        "rowwise": lambda: parallel.RowwiseParallel(),
        "colwise_gather_output": lambda: parallel.ColwiseParallel(output_layouts=Replicate()),
        "embedding_rowwise": lambda: parallel.RowwiseParallel(input_layouts=Replicate()),
    }
    plan = {name: styles[style]() for name, style in model.tp_plan.items()}
    return parallel.parallelize_module(model, mesh, plan)


def logps(model: nn.Module, hidden: Tensor, tokens: Tensor, ours: bool) -> Tensor:
    """Log-probs of `tokens` after the hidden states ``[rows, tokens, D]``."""
    if not ours:
        return model.lm_head(hidden).float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    weight = model.lm_head.weight
    if isinstance(weight, DTensor):
        return vocab_parallel_linear_logp(
            hidden, weight.to_local(), tokens, group=weight.device_mesh, contract=CONTRACT
        )
    return samebits.linear_logp(hidden, weight, tokens, contract=CONTRACT)


@torch.no_grad()
def rollout(
    model: nn.Module, prompts: Tensor, count: int, ours: bool, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """All tokens, and the log-probs of the new ones, sampled one by one with a KV cache."""
    cache, step, ids, results = DynamicCache(config=model.config), prompts, prompts, []
    for _ in range(count):
        hidden = model.model(step, past_key_values=cache, use_cache=True).last_hidden_state[:, -1:]
        probabilities = model.lm_head(hidden[:, 0]).float().softmax(-1)
        step = torch.multinomial(probabilities, 1, generator=generator)
        results.append(logps(model, hidden, step, ours))
        ids = torch.cat([ids, step], 1)
    dist.broadcast(ids, 0)  # PyTorch's ranks may have sampled other tokens; ours never do
    return ids, torch.cat(results, 1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, count: int, ours: bool) -> Tensor:
    """One step by the policy gradient. Returns the log-probs of the answers."""
    hidden = model.model(ids, use_cache=False).last_hidden_state
    logp = logps(model, hidden[:, -count - 1 : -1], ids[:, -count:], ours)
    reward = (ids[:, -count:] % 2 == 0).float().mean(1)
    (-(reward - reward.mean())[:, None] * logp).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return logp.detach()


def whole(parameter: Tensor) -> Tensor:
    with torch.no_grad():
        return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def run(mesh: DeviceMesh, steps: int, rows: int, count: int, ours: bool) -> tuple[list[Difference], int, str]:
    """Differences of log-probs, step by step, of weights at the end, and the digest of TP n's weights."""
    device = mesh.device_type
    models = [build("llama", torch.bfloat16, device, **SIZES) for _ in range(2)]
    alone, together = models[0], split(models[1], mesh, ours)
    if ours:
        samebits.convert(alone, contract=CONTRACT)
    # PyTorch's lists of tensors (foreach), the default on GPUs, take no DTensors and plain ones together.
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=False) for m in (alone, together)]
    generator = torch.Generator(device).manual_seed(0)
    pairs = []
    with samebits.batch_invariant("error") if ours else nullcontext():
        for _ in range(steps):
            prompts = torch.randint(SIZES["vocab_size"], (rows, 7), device=device, generator=generator)
            ids, sampled = rollout(together, prompts, count, ours, generator)
            one, _ = (
                train(m, o, ids, count, ours) for m, o in zip((alone, together), optimizers, strict=True)
            )
            pairs.append((sampled, one))
    found = [Difference.of(f"step {i}, rollout and trainer", *pair) for i, pair in enumerate(pairs)]
    sha, differing = hashlib.sha256(), 0
    for p, q in zip(alone.parameters(), together.parameters(), strict=True):
        a, b = p.detach().view(torch.int16), whole(q).view(torch.int16)
        differing += int((a != b).sum())
        sha.update(b.cpu().numpy().tobytes())
    return found, differing, sha.hexdigest()[:16]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=12)
    options = parser.parse_args(arguments)
    ranks, here = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    device = "cuda" if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) else "cpu"
    if device == "cuda":
        torch.cuda.set_device(here)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    mesh = init_device_mesh(device, (ranks,), mesh_dim_names=("tp",))
    for ours, name in ((False, "PyTorch"), (True, "samebits")):
        found, differing, digest = run(mesh, options.steps, options.rows, options.tokens, ours)
        if dist.get_rank() == 0:
            print(f"{name}, TP {ranks} beside TP 1, on {device}", *found, sep="\n  ")
            print(f"  {differing:,} weights differ at the end; digest of TP {ranks}: {digest}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
