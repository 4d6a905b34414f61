"""Rows of packed sequences in models with recurrent layers: each has the bits that it has alone."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("transformers")

import samebits
import samebits.transformers
from benchmarks.zoo.build import build
from samebits.testing import assert_same_bits

MODELS = [
    "qwen3_next",
    "granitemoehybrid",
    *(
        pytest.param(name, marks=pytest.mark.long)
        for name in """
        qwen3_5_text qwen4_exp_text olmo_hybrid kimi_linear bailing_hybrid minimax
        bamba nemotron_h falcon_h1 zamba2 jamba lfm2
        """.split()  # noqa: SIM905
    ),
]
# Products in bf16 sum 16 tokens at a time, from the row's start on, in gradients of weights.
LENGTHS = {torch.float32: (5, 16, 2), torch.bfloat16: (16, 32)}
EXPERTS = ".experts."
"""Gradients of experts' weights, in bf16, take a flattened batch as one sequence."""


def ids(tokens: int) -> Tensor:
    return torch.randint(8, 96, (1, tokens), generator=torch.Generator().manual_seed(tokens))


def told(how: str, lengths: tuple[int, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {"position_ids": torch.cat([torch.arange(n) for n in lengths])[None]}
    if how == "cu_seq_lens_q":
        offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        found |= {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
        found |= dict.fromkeys(("max_length_q", "max_length_k"), max(lengths))
    return found


@pytest.mark.parametrize(
    ("dtype", "how", "fused"),
    [(torch.float32, "cu_seq_lens_q", False), (torch.bfloat16, "position_ids", True)],
)
@pytest.mark.parametrize("name", MODELS)
def test_a_packed_sequence_has_its_own_bits(name: str, dtype: torch.dtype, how: str, fused: bool) -> None:
    """Logits, gradients of its embeddings, and those that it alone gives all weights."""
    try:
        model = build(name, "causal", dtype, "cpu", False)
    except (KeyError, ValueError, AttributeError) as missing:
        pytest.skip(f"not in this version: {missing}")
    if fused:
        samebits.fuse(model)
    lengths, weights = LENGTHS[dtype], dict(model.named_parameters())
    rows = torch.cat([ids(n) for n in lengths], 1)
    with samebits.batch_invariant(on_uncovered="error"):
        x = model.get_input_embeddings()(rows).detach().requires_grad_()
        packed = model(inputs_embeds=x, use_cache=False, **told(how, lengths)).logits
        seeds = torch.randn(packed.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        (of_x,) = torch.autograd.grad(packed, x, seeds, retain_graph=True)
        for i, n in enumerate(lengths):
            here = slice(sum(lengths[:i]), sum(lengths[:i]) + n)
            own = x.detach()[:, here].requires_grad_()
            alone = model(inputs_embeds=own, use_cache=False).logits
            wanted = torch.autograd.grad(alone, [own, *weights.values()], seeds[:, here], allow_unused=True)
            assert_same_bits(packed[:, here], alone, f"logits of {i}")
            assert_same_bits(of_x[:, here], wanted[0], f"embeddings of {i}")
            only = torch.zeros_like(seeds)
            only[:, here] = seeds[:, here]
            found = torch.autograd.grad(
                packed, [*weights.values()], only, retain_graph=True, allow_unused=True
            )
            for weight, got, want in zip(weights, found, wanted[1:], strict=True):
                if want is not None and (dtype == torch.float32 or EXPERTS not in weight):
                    assert_same_bits(got, want, f"{weight} of {i}")


@torch.no_grad()
def test_inputs_that_a_cache_kept_are_of_the_first_sequence() -> None:
    module = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    x, weight = torch.randn(1, 8, 9), torch.randn(8, 4)
    with samebits.batch_invariant():
        module.apply_mask_to_padding_states(torch.zeros(1, 5, 8), None)  # a layer begins, with 5 tokens
        offsets = torch.tensor([0, 3, 5], dtype=torch.int32)
        found = module.causal_conv1d_fn(x, weight, activation="gelu", cu_seq_lens_q=offsets)
        alone = [samebits.causal_conv1d(part, weight) for part in (x[..., :7], x[..., 7:])]
        assert_same_bits(found, F.gelu(torch.cat(alone, 2)))


@torch.no_grad()
def test_tokens_between_which_others_are_hidden() -> None:
    model = build("qwen3_next", "causal", torch.bfloat16, "cpu", False)
    mask = torch.tensor([[0, 1, 1, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0]])
    rows = torch.cat([ids(7), ids(7).flip(1)])
    places = (mask.cumsum(1) - 1).clamp(min=0)
    with samebits.batch_invariant():
        found = model(rows, mask, position_ids=places, use_cache=False).logits
        for row, shown, logits in zip(rows, mask != 0, found, strict=True):
            assert_same_bits(logits[shown], model(row[shown][None], use_cache=False).logits[0])


@torch.no_grad()
def test_a_compiled_model_tells_its_positions() -> None:
    """Granite 4 does not tell them to its masks."""
    model = build("granitemoehybrid", "causal", torch.bfloat16, "cpu", False)
    lengths = (4, 5, 2)
    given = told("position_ids", lengths) | {"use_cache": False}
    with samebits.batch_invariant(on_uncovered="error"):
        want = model(ids(11), **given).logits
        torch._dynamo.reset()
        got = torch.compile(model, backend="eager")(ids(11), **given).logits
    assert_same_bits(got, want)
