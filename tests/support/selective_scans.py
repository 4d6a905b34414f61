"""Calls of Mamba's scan, and the comparison of their results."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from samebits.backends.cuda import selective_scan as kernels
from samebits.backends.reference import selective_scan as reference
from samebits.ops._rows import rounded
from samebits.testing import assert_same_bits, values

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SCHEDULE = kernels.ChannelScan(64, 16, 4)


@dataclasses.dataclass(frozen=True)
class Case:
    """What a call is given. `layout` is that of u, delta and z; `states_layout` that of B and C."""

    dtype: torch.dtype = BF16
    delta: torch.dtype = BF16
    shape: tuple[int, int, int, int, int] = (2, 40, 72, 1, 16)  # rows, channels, tokens, groups, states
    layout: str = "tokens"
    states_layout: str = "tokens"
    kind: str = "normal"
    gate: bool = True
    more: bool = True  # skip, bias and states
    softplus: bool = True
    cuts: tuple[int, ...] | None = None
    schedule: kernels.ChannelScan = SCHEDULE

    def operands(self) -> dict[str, Any]:
        rows, channels, tokens, groups, states = self.shape

        def lined(seed: int, dtype: torch.dtype, kind: str = "normal") -> Tensor:
            if self.layout == "tokens":
                return values(kind, (rows, channels, tokens), dtype, seed)
            if self.layout == "channels":
                return values(kind, (rows, tokens, channels), dtype, seed).transpose(1, 2)
            return values(kind, (rows, channels, tokens + 3), dtype, seed)[..., 1:-2]

        def of_states(seed: int) -> Tensor:
            if self.states_layout == "tokens":
                return values("normal", (rows, groups, states, tokens), self.dtype, seed)
            return values("normal", (rows, tokens, groups, states), self.dtype, seed).permute(0, 2, 3, 1)

        count = rows if self.cuts is None else len(self.cuts) - 1
        delta = lined(2, self.delta)
        return {
            "u": lined(1, self.dtype, self.kind),
            "delta": delta if self.softplus else delta.abs() / 4,
            "A": -values("normal", (channels, states), F32, 3).abs(),
            "B": of_states(4),
            "C": of_states(5),
            "D": values("normal", (channels,), F32, 6) if self.more else None,
            "z": lined(7, self.dtype) if self.gate else None,
            "bias": values("normal", (channels,), F32, 8) - 1 if self.more else None,
            "states": values("normal", (count, channels, states), F32, 9) if self.more else None,
            "offsets": None if self.cuts is None else torch.tensor(self.cuts, dtype=torch.int32),
            "softplus": self.softplus,
        }


CASES = {
    "tokens": Case(),
    "no more than a scan": Case(gate=False, more=False, softplus=False, delta=F32),
    "channels": Case(layout="channels", states_layout="states"),
    "unaligned tokens": Case(F16, layout="apart", shape=(2, 9, 21, 1, 16)),
    "unaligned channels": Case(F32, F32, layout="channels", shape=(1, 13, 19, 1, 16)),
    "packed": Case(shape=(1, 35, 64, 1, 16), cuts=(0, 3, 3, 8, 29, 64)),
    "sequences of rows": Case(shape=(2, 8, 24, 1, 16), cuts=(0, 5, 24, 31, 48), layout="channels"),
    "tokens of no sequence": Case(shape=(1, 8, 40, 1, 16), cuts=(2, 11, 37), gate=False, more=False),
    "groups, states of three pieces": Case(shape=(1, 72, 24, 2, 20), schedule=kernels.ChannelScan(64, 16, 2)),
    "few states": Case(shape=(1, 33, 40, 1, 3), schedule=kernels.ChannelScan(64, 32, 8)),
    "a piece": Case(F32, F32, shape=(1, 64, 16, 1, 8), schedule=kernels.ChannelScan(128, 16, 4)),
    "many states": Case(shape=(1, 5, 16, 1, 256), schedule=kernels.ChannelScan(64, 8, 4)),
    "wide": Case(F32, F32, kind="wide"),
    "special": Case(kind="special", shape=(1, 40, 48, 1, 16)),
    "one token": Case(shape=(3, 16, 1, 1, 16)),
    "no token": Case(shape=(2, 16, 0, 1, 16)),
}


def change(given: dict[str, Any], how: str) -> dict[str, Any]:
    """Decays and steps that are not the usual ones."""
    given = dict(given)
    if how == "steep":  # e^x to which nothing is left
        given["A"] = given["A"] * 60
    elif how == "growing":
        given["A"] = torch.where(torch.arange(given["A"].shape[1]) % 5 == 2, -given["A"] / 8, given["A"])
    elif how == "infinite":
        given["A"] = torch.where(torch.arange(len(given["A"]))[:, None] % 7 == 3, -torch.inf, given["A"])
    elif how == "backwards":
        given["delta"], given["softplus"] = -given["delta"], False
    return given


def compare(given: dict[str, Any], schedule: kernels.ChannelScan | None, device: str = "cpu") -> None:
    """Kernels on `device` with the reference."""
    there = {k: t.to(device) if isinstance(t, Tensor) else t for k, t in given.items()}
    want, got = reference.scan(**given), kernels.scan(**there, schedule=schedule)
    for name, a, b in zip(("y", "states"), got, want, strict=True):
        assert_same_bits(a, b, name)
        assert a.stride() == b.stride() or min(a.shape[1:]) <= 1
    grad = values("normal", given["u"].shape, given["u"].dtype, 11)
    of_after = values("normal", want[1].shape, F32, 12) if given["states"] is not None else None
    names = "du", "ddelta", "dz", "dA", "dB", "dC", "D", "bias", "dstates"
    of_results = [None if t is None else t.to(device) for t in (grad, of_after)]
    gradients = [
        reference.scan_backward(grad, of_after, **given),
        kernels.scan_backward(*of_results, **there, schedule=schedule),
    ]
    for name, b, a in zip(names, *gradients, strict=True):
        if b is None:
            assert a is None, name
        else:
            assert_same_bits(rounded(a, a.dtype), rounded(b, b.dtype), name)  # one NaN
