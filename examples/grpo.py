"""Reinforcement learning in which rollout and trainer agree on every log-prob, to the bit.

A small Llama learns to answer in even tokens, by group-relative policy optimisation. Several answers to each
prompt are sampled with a KV cache, rewarded, and reinforced by their advantage within the group. The trainer
computes the log-probs of the sampled tokens again, in batches of another size. In PyTorch the two differ, so
even the first update after a rollout is off-policy. Under ``samebits.batch_invariant`` the difference is
exactly 0 at every step, and a second run ends with identical weights.

All runs train side by side, and are drawn as they go. The picture at the end needs matplotlib.

    python examples/grpo.py --steps 30 --plot grpo.svg
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from generate import build, generate, training
from rich.console import Console
from rich.live import Live
from rich.table import Table
from torch import Tensor, nn

from samebits import batch_invariant

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@dataclass
class Run:
    """The record of a training run, step by step."""

    largest: list[float] = field(default_factory=list)
    """The largest difference of a token's log-prob between rollout and trainer."""
    kl: list[float] = field(default_factory=list)
    reward: list[float] = field(default_factory=list)
    weights: str = ""
    """SHA-256 of the weights at the end."""


def rewards(answers: Tensor) -> Tensor:
    """The share of an answer's tokens that are even."""
    return (answers % 2 == 0).float().mean(1)


def digest(model: nn.Module) -> str:
    sha = hashlib.sha256()
    for p in model.parameters():
        sha.update(p.detach().cpu().float().numpy().tobytes())
    return sha.hexdigest()


def training_steps(
    steps: int,
    *,
    ours: bool,
    dtype: torch.dtype,
    device: str,
    prompts: int = 4,
    group: int = 8,
    answer: int = 8,
    rate: float = 1e-2,
    seed: int = 0,
    **sizes: int,
) -> Iterator[Run]:
    """Train a fresh model: `group` answers of `answer` tokens to each prompt, at learning rate `rate`.

    Every step yields the record so far.
    """
    model = build("llama", dtype, device, seed=seed, **TINY | sizes)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    generator = torch.Generator().manual_seed(seed)
    run = Run()
    for step in range(steps):
        questions = torch.randint(10, (prompts, 3), generator=generator).repeat_interleave(group, 0)
        mode: AbstractContextManager[None] = batch_invariant("error") if ours else nullcontext()
        with mode:
            ids, rollout = generate(model, questions.to(device), answer, ours=ours, seed=seed + step)
            reward = rewards(ids[:, -answer:]).view(prompts, group)
            centred = reward - reward.mean(1, keepdim=True)
            spread = (centred * centred).mean(1, keepdim=True).sqrt()
            advantage = (centred / (spread + 1e-3)).view(-1, 1)
            optimizer.zero_grad()
            differences = []
            size = 5  # rows in a micro-batch; the rollout has another number
            for rows, old, gain in zip(
                ids.split(size), rollout.split(size), advantage.split(size), strict=True
            ):
                new = training(model, rows, answer, ours=ours)
                ratio = (new - old).exp()
                clipped = ratio.clamp(0.8, 1.2)
                loss = -torch.minimum(ratio * gain, clipped * gain).sum() / rollout.numel()
                loss.backward()
                differences.append((new.detach() - old).double())
            optimizer.step()
        d = torch.cat(differences)
        run.largest.append(float(d.abs().max()))
        run.kl.append(float((d.expm1() - d).mean()))
        run.reward.append(float(reward.mean()))
        if step == steps - 1:
            run.weights = digest(model)
        yield run


def bars(values: list[float], top: float) -> str:
    """A bar for each value, and a dot for one that is exactly 0."""
    return "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * v / top))] if v else "·" for v in values)


def table(runs: dict[str, Run]) -> Table:
    """The runs so far: KL of rollout and trainer, and reward, by step."""
    table = Table("", "KL, by step", "largest", "reward", "now", "weights", box=None, padding=(0, 2, 0, 0))
    top = max((max(run.kl) for run in runs.values()), default=0)
    for name, run in runs.items():
        kl, reward = bars(run.kl, top), bars(run.reward, 1)
        table.add_row(
            name,
            kl,
            f"{max(run.kl):.1e}",
            reward,
            f"{run.reward[-1]:.2f}",
            run.weights[:8],
            style="" if max(run.kl) else "green",
        )
    return table


def watch(runs: dict[str, Iterator[Run]]) -> dict[str, Run]:
    """Train all side by side, a step of each in turn, and draw them as they go."""
    with Live(console=Console()) as live:
        for records in zip(*runs.values(), strict=True):
            now = dict(zip(runs, records, strict=True))
            live.update(table(now))
    return now


def draw(runs: dict[str, Run]) -> Figure:
    """Draw the mismatch of rollout and trainer, and the reward, over the steps."""
    import matplotlib
    import matplotlib.pyplot as plt

    style = {"svg.hashsalt": "samebits", "svg.fonttype": "none", "font.size": 11, "axes.grid": True}
    style |= {"axes.spines.top": False, "axes.spines.right": False, "grid.color": "#e5e5e5"}
    matplotlib.rcParams.update(style)  # the same data gives the same file

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for (name, run), colour in zip(runs.items(), ("#c62828", "#00796b"), strict=True):
        at = range(1, len(run.kl) + 1)
        left.plot(at, run.kl, color=colour, marker=".", label=name)
        right.plot(at, run.reward, color=colour, marker=".", label=name)
    largest = max(max(run.kl) for run in runs.values())
    left.set_yscale("symlog", linthresh=largest / 100 or 1)
    left.set(xlabel="step", title="KL of rollout and trainer")
    right.set(xlabel="step", title="mean reward", ylim=(0, 1))
    left.legend(frameon=False)
    return figure


def main(arguments: list[str] | None = None) -> dict[str, Run]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        help="default: bfloat16 on a GPU, float32 on a CPU, where so small a model may not drift in 16 bits",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", default=Path("grpo.svg"))
    options = parser.parse_args(arguments)
    dtype = options.dtype or ("float32" if options.device == "cpu" else "bfloat16")
    place = {"dtype": getattr(torch, dtype), "device": options.device}
    ours = {"PyTorch": False, "samebits": True, "samebits, again": True}
    runs = watch({name: training_steps(options.steps, ours=own, **place) for name, own in ours.items()})
    if find_spec("matplotlib") is None:
        print("no picture: pip install matplotlib")
    else:
        figure = draw({name: runs[name] for name in ("PyTorch", "samebits")})
        figure.savefig(options.plot, format="svg", metadata={"Date": None})
        print(f"picture: {options.plot}")
    return runs


if __name__ == "__main__":
    main()
