"""Log-probs for engines, beside those that a trainer computes."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import samebits
from samebits.engines import logprobs
from samebits.engines.logprobs import convert_head
from samebits.engines.parity import Sample, compare, ratios
from samebits.engines.refusals import RefusedError
from samebits.testing import assert_same_bits


def logits(dtype: torch.dtype = torch.bfloat16, rows: int = 6, size: int = 300) -> Tensor:
    return (torch.randn(rows, size, generator=torch.Generator().manual_seed(3)) * 4).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_log_probs_of_tokens(dtype: torch.dtype) -> None:
    wide = logits(dtype, size=512)
    z = wide[:, :300]  # as vLLM cuts off the padding of a vocabulary
    ids = torch.randint(0, 300, (6, 3), dtype=torch.int32)
    with samebits.batch_invariant("error"):
        expected = z.float().log_softmax(-1)
    assert_same_bits(logprobs.all_logprobs(z), expected)
    assert_same_bits(samebits.gather_logp(z, ids), expected.gather(-1, ids.long()))


@pytest.mark.parametrize(("k", "p"), [(None, None), (5, None), (None, 0.8), (20, 0.9), (1, 0.1)])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_processed_log_probs(temperature: float, k: int | None, p: float | None) -> None:
    z = logits()
    got = logprobs.processed(z, temperature, k, p)
    with samebits.batch_invariant("error"):
        x = z.float() / torch.tensor(temperature)
        ordered, at = x.sort(dim=-1, stable=True)
        if k is not None:
            ordered = ordered.masked_fill(ordered < ordered[:, -k, None], -torch.inf)
        if p is not None:
            hidden = ordered.softmax(-1).cumsum(-1) <= 1 - torch.tensor(p)
            hidden[:, -1] = False
            ordered = ordered.masked_fill(hidden, -torch.inf)
        expected = torch.empty_like(x).scatter(-1, at, ordered).log_softmax(-1)
    assert_same_bits(got, expected)


def test_each_row_has_its_own_temperature_and_cut() -> None:
    z = logits()
    temperatures, k, p = (
        torch.tensor([0.5, 1, 2, 1, 0, 0.7]),
        torch.tensor([3, 300, 5, 300, 300, 1]),
        torch.tensor([1, 0.5, 0.9, 1, 1, 1]),
    )
    got = logprobs.keep_top(logprobs.divided(z, temperatures), k, p)
    for i, t in enumerate(temperatures.tolist()):
        cut = logprobs.keep_top(logprobs.divided(z[i : i + 1], torch.tensor([t])), k[i : i + 1], p[i : i + 1])
        assert_same_bits(got[i : i + 1], cut)
    assert_same_bits(got[4], z[4].float())  # greedy


def test_processed_log_probs_have_gradients() -> None:
    z = logits(torch.float32).requires_grad_()
    logprobs.processed(z, 0.7, 20, 0.9).max(-1).values.sum().backward()
    assert z.grad is not None
    assert z.grad.isfinite().all()
    assert z.grad.abs().sum() > 0


def test_ratios_of_no_tokens() -> None:
    nothing = torch.zeros(2, 3)
    found = ratios(nothing, nothing, torch.zeros(2, 3))
    ones = dict.fromkeys(("ratio_min", "ratio_max", "ratio_mean", "equal"), 1)
    assert found == {"tokens": 0, "differing": 0, "log_ratio_max": 0, "k1": 0, "k3": 0, **ones}


def test_ratios_of_a_step() -> None:
    engine = torch.tensor([[-1.0, -2.0, -torch.inf, 7.0], [-0.5, -3.0, -1.0, 7.0]])
    trainer = engine + torch.tensor([[0.5, 0, 0, 9], [0, -0.25, 0, 9]])
    mask = torch.tensor([[1, 1, 1, 0]]).expand(2, 4)
    log = torch.tensor([0.5, 0, 0, 0, -0.25, 0], dtype=torch.float64)
    r = log.exp()
    found = ratios(trainer, engine, mask)
    expected = {
        "tokens": 6,
        "differing": 2,
        "equal": 4 / 6,
        "ratio_min": r.min().item(),
        "ratio_max": r.max().item(),
        "ratio_mean": r.mean().item(),
        "log_ratio_max": 0.5,
        "k1": -0.25 / 6,
        "k3": (r - 1 - log).mean().item(),
    }
    assert found == pytest.approx(expected)
    for trainer, one in ((torch.nan, -1.0), (-1.0, -torch.inf), (-1.0, torch.nan)):
        found = ratios(torch.tensor([trainer]), torch.tensor([one]))
        assert (found["log_ratio_max"], found["k3"]) == (torch.inf, torch.inf)


def test_a_comparison_tells_how_far_it_is() -> None:
    """KL is of sampled tokens; the rest, of prompts too."""
    samples = [Sample([1, 2, 3], [4, 5], [-1.0, -2.0], [-3.0, -4.0]), Sample([1], [2], [-1.0])]
    same = [torch.tensor([-3.0, -4.0, -1.0, -2.0]), torch.tensor([-1.0])]
    parity = compare(samples, same)
    assert parity
    assert (parity.tokens, parity.equal, parity.largest, parity.k1, parity.k3) == (5, 1, 0, 0, 0)
    assert str(parity) == "0 of 5 tokens differ: every importance ratio is 1"
    other = [torch.tensor([-3.0, -4.5, -1.0, -1.75]), same[1]]
    parity = compare(samples, other)
    assert not parity
    assert (parity.differing, parity.equal, parity.largest, parity.first) == (2, 0.6, 0.5, (0, 2))
    assert parity.ratio == pytest.approx(math.exp(-0.5))
    assert parity.k1 == pytest.approx(-0.25 / 3)
    assert parity.k3 == pytest.approx((math.exp(0.25) - 1 - 0.25) / 3)
    assert "(60.00% have equal bits), by up to 0.5; importance ratios up to 0.60653" in str(parity)
    assert "KL -0.0833 (k1), 0.0113 (k3); first at token 2 of sequence 0" in str(parity)


def test_nothing_compared_proves_nothing() -> None:
    parity = compare([], [])
    assert not parity
    assert str(parity) == "no tokens were compared"


def test_a_head_has_the_dtype_of_the_configuration() -> None:
    def model(head: nn.Module, **config: str) -> Any:
        return SimpleNamespace(config=SimpleNamespace(**config), get_output_embeddings=lambda: head)

    wide, narrow, other = nn.Linear(4, 8), nn.Linear(4, 8), nn.Bilinear(4, 4, 8)
    convert_head(model(wide, head_dtype="float32"))
    assert wide.out_dtype == torch.float32
    convert_head(model(narrow))
    assert type(narrow) is nn.Linear
    samebits.convert(narrow)
    for head in (narrow, other):
        with pytest.raises(RefusedError, match=r"head_dtype='float32'.*cannot be converted"):
            convert_head(model(head, head_dtype="float32"))
