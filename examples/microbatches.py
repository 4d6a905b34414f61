"""Training in 1, 2 or 4 micro-batches ends with the same weights, bit for bit.

A small model learns to continue a text, letter by letter, in bfloat16 with float32 master weights. With
PyTorch's layers, every micro-batch rounds its weight gradient, so the weights depend on the number of
micro-batches. With samebits' layers and a float32 ``main_grad``, one chain runs through all micro-batches of
a step.

    python examples/microbatches.py
"""

from __future__ import annotations

from importlib.resources import files

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samebits

STEPS, SEQUENCES, TOKENS, CONTEXT = 6, 8, 32, 8


def text() -> tuple[Tensor, int]:
    """The text that comes with samebits, as indices of letters, and the number of different letters."""
    letters = (files("samebits") / "data" / "harbour.txt").read_text("utf-8")
    alphabet = sorted(set(letters))
    return torch.tensor([alphabet.index(c) for c in letters]), len(alphabet)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """``[SEQUENCES, TOKENS, ...]``: the letters before each position, and the next letter."""
    ids, alphabet = text()
    start = torch.Generator().manual_seed(step)
    starts = torch.randint(len(ids) - TOKENS - CONTEXT, (SEQUENCES,), generator=start)
    windows = torch.stack([ids[s : s + TOKENS + CONTEXT] for s in starts]).unfold(1, CONTEXT, 1)
    return F.one_hot(windows[:, :-1], alphabet).flatten(2).bfloat16(), windows[:, 1:, -1]


def train(micro_batches: int, *, convert: bool, device: str = "cpu") -> tuple[Tensor, list[float]]:
    """All weights after training, and the loss of every step."""
    alphabet = text()[1]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(CONTEXT * alphabet, 96), nn.ReLU(), nn.Linear(96, alphabet))
    model = model.to(device, torch.bfloat16)
    if convert:
        samebits.convert(model)
    weights = list(model.parameters())
    masters = [nn.Parameter(w.detach().float()) for w in weights]
    optimizer = torch.optim.AdamW(masters, lr=1e-2)
    losses = []
    for step in range(STEPS):
        for weight, master in zip(weights, masters, strict=True):
            master.grad = torch.zeros_like(master)
            if convert:
                weight.main_grad = master.grad
        total = 0.0
        inputs, targets = (t.to(device) for t in batch(step))
        for x, target in zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True):
            logits = model(x).float().flatten(0, 1)
            loss = F.cross_entropy(logits, target.flatten(), reduction="sum") / targets.numel()
            loss.backward()
            total += loss.item()
        for weight, master in zip(weights, masters, strict=True):
            if not convert:
                master.grad.copy_(weight.grad)
                weight.grad = None
        optimizer.step()
        with torch.no_grad():
            for weight, master in zip(weights, masters, strict=True):
                weight.copy_(master)
        losses.append(total)
    return torch.cat([m.detach().flatten() for m in masters]), losses


def main(device: str = "cpu") -> dict[str, dict[int, int]]:
    """How many weights differ from those of one micro-batch, for both kinds of layers and each number."""
    differing: dict[str, dict[int, int]] = {}
    for name, convert in (("torch.nn.Linear", False), ("samebits.nn.Linear, main_grad", True)):
        whole, losses = train(1, convert=convert, device=device)
        print(f"{name}: loss {losses[0]:.3f} -> {losses[-1]:.3f} in {STEPS} steps")
        differing[name] = {}
        for micro_batches in (2, 4):
            parts, _ = train(micro_batches, convert=convert, device=device)
            count = int((parts.view(torch.int32) != whole.view(torch.int32)).sum())
            differing[name][micro_batches] = count
            largest = float((parts - whole).abs().max())
            print(
                f"  {micro_batches} micro-batches instead of 1: {count:,} of {whole.numel():,} weights"
                f" differ, by up to {largest:.1e}"
            )
    return differing


if __name__ == "__main__":
    main()
