"""Logits that ``linear_logp`` keeps for its backward: how many, and that they change no bit."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import samebits
from samebits.backends.token_logps import room_for_logits
from samebits.testing import assert_same_bits, values
from tests.ops.test_logp import pieces
from tests.support.devices import DEVICES

module = importlib.import_module("samebits.ops.linear_logp")
TOKENS, FEATURES, VOCABULARY = 21, 40, 700


def keeping(columns: int) -> AbstractContextManager[object]:
    """Keep the logits of so many entries of the vocabulary."""

    def room(tokens: int, weight: Tensor) -> Tensor:
        return weight.new_full((tokens, columns), torch.nan, dtype=torch.float32)

    return mock.patch.object(module, "room_for_logits", room)


def leaves(device: str, dtype: torch.dtype) -> list[Tensor]:
    shapes = ((3, TOKENS // 3, FEATURES), (VOCABULARY, FEATURES), (VOCABULARY,))
    return [values("normal", s, dtype, i, device).requires_grad_() for i, s in enumerate(shapes)]


def forward(x: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any) -> Any:
    target = torch.arange(TOKENS, device=x.device).view(3, -1) * 33
    target[1, 2], target[2, 6] = -100, VOCABULARY - 1
    return samebits.linear_logp(x, weight, target, bias, **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_kept_logits_change_no_bit(device: str, dtype: torch.dtype) -> None:
    given = leaves(device, dtype)
    grad = values("normal", (3, TOKENS // 3), torch.float32, 9, device)

    def run() -> list[Tensor]:
        samebits.backends.replay.forget()  # it does not know that the rule is another one
        plain = forward(*given[:2])
        both = forward(*given, return_entropy=True, temperature=0.7)
        main_grad = torch.ones(VOCABULARY, FEATURES, device=device)
        into = forward(*given, main_grad=main_grad)
        found = [plain, *both, into, *torch.autograd.grad(plain, given[:2], grad)]
        found += torch.autograd.grad(both, given, (grad, 0.1 * grad))
        found += torch.autograd.grad(into, [given[0], given[2]], grad)
        return [t.detach() for t in (*found, main_grad)]

    with keeping(0):
        want = run()
    for columns in (128, 384, VOCABULARY):
        for size in (None, 1, 5000):
            with keeping(columns), pieces(size or 1 << 40):
                for i, (got, expected) in enumerate(zip(run(), want, strict=True)):
                    assert_same_bits(got, expected, f"result {i}, kept: {columns}, pieces: {size}")


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "features", "kept"),
    [
        (16, 151_936, 4096, 151_936),
        (2048, 151_936, 4096, 151_936),
        (4096, 151_936, 4096, 593 * 128),  # half of it is 593.5 blocks
        (4096, 131_072, 256, 32 * 128),
        (3, 777, 64, 768),  # rows start at multiples of 16 bytes
        (3, 780, 64, 780),
        (600, 777, 64, 0),
        (0, 300, 8, 300),
        (5, 300, 0, 0),
    ],
)
def test_they_take_no_more_memory_than_the_weight(
    tokens: int, vocabulary: int, features: int, kept: int
) -> None:
    weight = torch.empty(vocabulary, features, dtype=torch.bfloat16, device="meta")
    room = room_for_logits(tokens, weight)
    assert room.shape == (tokens, kept)
    assert room.nbytes <= weight.nbytes


@pytest.mark.counts_calls
def test_what_is_kept_is_not_computed_again() -> None:
    given = leaves("cpu", torch.bfloat16)
    backend, *_ = module.backend_of(given[0], samebits.TENSOR_CORE.key)
    for columns, computed in ((0, [slice(0, VOCABULARY)]), (256, [slice(256, VOCABULARY)]), (VOCABULARY, [])):
        with (
            keeping(columns),
            mock.patch.object(backend, "grad_logits_later", wraps=backend.grad_logits_later) as again,
        ):
            forward(*given).sum().backward()
        assert [call.args[1].part for call in again.call_args_list] == computed


@pytest.mark.counts_calls
def test_nothing_is_kept_where_no_gradient_can_be_asked_for() -> None:
    given = leaves("cpu", torch.bfloat16)
    with mock.patch.object(module, "room_for_logits", wraps=room_for_logits) as room:
        with torch.no_grad():
            forward(*given)
        forward(*(t.detach() for t in given))
        room.assert_not_called()
        forward(given[0].detach(), given[1].detach(), given[2])
        room.assert_called_once()


@pytest.mark.parametrize("device", DEVICES)
def test_a_second_backward_gives_the_same_bits(device: str) -> None:
    given = leaves(device, torch.bfloat16)
    with keeping(VOCABULARY):
        out = forward(*given).sum()
        first = torch.autograd.grad(out, given, retain_graph=True)
        for got, want in zip(torch.autograd.grad(out, given), first, strict=True):
            assert_same_bits(got, want)
