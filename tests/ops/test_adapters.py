"""Adapters of tokens: PEFT's steps, token by token, and what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import samebits
from samebits.ops.adapters import add_adapters
from samebits.testing import assert_same_bits, values
from tests.support.devices import DEVICES

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
on_devices = pytest.mark.parametrize("device", DEVICES)
in_dtypes = pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)

ENDS, SLOTS, RANK, K = (24, 40, 72), 3, 5, 40
"""Of queries, keys and values; the rank is filled up with zeros."""
NO = float("nan")
SCALINGS = torch.tensor([[0.7, 0.7, 0.7], [NO, 2.0, NO], [-1.3, NO, -1.3]])
"""Of each adapter's slices. The second has keys alone."""


def layer(dtype: torch.dtype, device: str) -> tuple[Tensor, list[list[Tensor]], list[list[Tensor]]]:
    """A weight; A and B of each slot and slice."""
    sizes = [end - begin for begin, end in itertools.pairwise((0, *ENDS))]
    weight = values("normal", (ENDS[-1], K), dtype, 1).to(device)
    a = [[values("normal", (RANK, K), dtype, s * 10 + i).to(device) for i in range(3)] for s in range(SLOTS)]
    b = [
        [values("normal", (n, RANK), dtype, s * 10 + i + 5).to(device) for i, n in enumerate(sizes)]
        for s in range(SLOTS)
    ]
    return weight, a, b


def operands(x: Tensor, whose: Tensor) -> tuple[Any, ...]:
    weight, a, b = layer(x.dtype, x.device.type)
    every_a, every_b = x.new_zeros(SLOTS, 3, 16, K), x.new_zeros(SLOTS, ENDS[-1], 16)
    for s in range(SLOTS):
        every_b[s, :, :RANK] = torch.cat(b[s])
        for i in range(3):
            every_a[s, i, :RANK] = a[s][i]
    both = samebits.linear(x, torch.cat([weight, every_a.flatten(0, 2)]))
    both[::2, : ENDS[-1]] *= -0.0
    return *both.split([ENDS[-1], SLOTS * 3 * 16], 1), every_b, whose, SCALINGS.to(x.device), ENDS


@on_devices
@in_dtypes
def test_steps_of_peft_for_each_token_alone(device: str, dtype: torch.dtype) -> None:
    whose = torch.tensor([2, -1, 0, 0, 1, 3, 2, -7, 1, 0, 2, 2, 1, -1, 0, 1, 2, 0, 1], device=device)
    x = values("normal", (len(whose), K), dtype, 9).to(device)
    given = operands(x, whose)
    got = add_adapters(*given)
    weight, a, b = layer(dtype, device)
    for t, s in enumerate(whose.tolist()):
        row = x[t : t + 1]
        want = samebits.linear(row, weight) * (1.0 if t % 2 else -0.0)
        if 0 <= s < SLOTS:
            parts = want.tensor_split(ENDS[:2], 1)
            for part, p, q, scaling in zip(parts, a[s], b[s], SCALINGS[s].tolist(), strict=True):
                if scaling == scaling:
                    part += samebits.linear(samebits.linear(row, p), q) * scaling
        assert_same_bits(got[t : t + 1], want, f"token {t}")
    assert_same_bits(add_adapters(*given[:3], torch.full_like(whose, -1), *given[4:]), given[0].contiguous())
    assert add_adapters(*(t[:0] for t in given[:2]), given[2], whose[:0], *given[4:]).shape == (0, ENDS[-1])


@pytest.mark.parametrize(
    ("at", "change", "error", "said"),
    [
        (0, lambda t: t.double(), TypeError, "base: expected bfloat16"),
        (0, lambda t: t[None], ValueError, "base, b: expected"),
        (1, lambda t: t[:, 1:], ValueError, "inner: expected shape"),
        (1, lambda t: t.float(), TypeError, "inner: expected torch.bfloat16"),
        (2, lambda t: t[..., :5], ValueError, "rank that is a multiple of 16, got 5"),
        (3, lambda t: t.int(), TypeError, "adapters: expected a Tensor of torch.int64"),
        (3, lambda t: t[1:], ValueError, "adapters: expected shape"),
        (4, lambda t: t.double(), TypeError, "scalings: expected a Tensor of torch.float32"),
        (4, lambda t: t[1:], ValueError, "scalings: expected shape"),
        (5, lambda t: (40, 24, 72), ValueError, "ends: expected up to 16 ascending"),
        (5, lambda t: tuple(map(float, t)), ValueError, "ends: expected up to 16 ascending"),
        (5, lambda t: t[:2], ValueError, "ends: expected up to 16 ascending"),
    ],
)
def test_refusals(at: int, change: Any, error: type[Exception], said: str) -> None:
    given = [*operands(values("normal", (4, K), BF16, 1), torch.tensor([0, 1, 2, -1]))]
    given[at] = change(given[at])
    with pytest.raises(error, match=f"add_adapters: .*{said}" if at else said):
        add_adapters(*given)


@pytest.mark.parametrize(("at", "name"), [(0, "base"), (4, "scalings")])
def test_gradients_are_refused(at: int, name: str) -> None:
    given = [*operands(values("normal", (4, K), BF16, 1), torch.tensor([0, 1, 2, -1]))]
    given[at] = given[at].detach().requires_grad_()
    with pytest.raises(NotImplementedError, match=f"{name}: gradients are not implemented"):
        add_adapters(*given)
