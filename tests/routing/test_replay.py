"""A trainer's tokens go to recorded experts; the scores, weights and gradients are its own."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import samebits
from samebits.routing import _blocks, replay
from samebits.testing import assert_same_bits
from samebits.vllm import check
from tests.vllm import models

pytest.importorskip("transformers")

MODELS = "qwen3_moe", "mixtral", "gpt_oss", "glm4_moe", "deepseek_v3", "granite_moe", "olmoe"
K, LAYERS = 2, 2
IDS = torch.randint(1, 319, (2, 11), generator=torch.Generator().manual_seed(0))


def step(model: Any, given: Tensor | None = None) -> tuple[Tensor, list[Tensor], dict[int, Tensor]]:
    """Logits, gradients, and the experts that layers were given."""
    took: dict[int, Tensor] = {}
    hooks = [
        block.experts.register_forward_pre_hook(lambda _, args, i=i: took.update({i: args[1]}))
        for i, block in _blocks(model).items()
    ]
    model.zero_grad()
    try:
        with samebits.batch_invariant("error"), nullcontext() if given is None else replay(model, given):
            logits = model(IDS, use_cache=False).logits
            logits.float().logsumexp(-1).sum().backward()
    finally:
        for hook in hooks:
            hook.remove()
    return logits.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None], took


def recording(took: dict[int, Tensor]) -> Tensor:
    """``[2, 11, layers, k]``. Layers without experts have zeros, as in vLLM."""
    every = torch.zeros(IDS.numel(), LAYERS, K, dtype=torch.uint8)
    for layer, ids in took.items():
        every[:, layer] = ids
    return every.view(*IDS.shape, LAYERS, K)


def assert_same(found: tuple[Tensor, list[Tensor], Any], expected: tuple[Tensor, list[Tensor], Any]) -> None:
    assert_same_bits(found[0], expected[0])
    for got, want in zip(found[1], expected[1], strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("name", MODELS)
def test_its_own_choices_change_nothing_and_others_are_followed(name: str) -> None:
    samebits.transformers.register()
    model = models.build(name).train()
    own = step(model)
    given = recording(own[2])
    assert_same(step(model, given), own)

    count = next(iter(_blocks(model).values())).experts.num_experts
    others = (given.long() + 1) % count
    others[0, 3] = -1  # chooses by itself
    moved = step(model, others)
    assert (moved[0] != own[0]).any()
    for layer, ids in moved[2].items():
        expected = others[:, :, layer].reshape(-1, K)
        if layer == min(moved[2]):  # later ones get other inputs
            expected = torch.where(expected < 0, own[2][layer], expected)
            assert torch.equal(ids, expected)
        else:
            assert torch.equal(ids[expected[:, 0] >= 0], expected[expected[:, 0] >= 0])
    model.gradient_checkpointing_enable()  # layers run again in the backward
    assert_same(step(model, others), moved)
    assert_same(step(model), own)


def test_weights_and_gradients_are_of_the_trainers_scores() -> None:
    """Qwen 3's router, by hand."""
    model = models.build("qwen3_moe").float()
    router = model.model.layers[1].mlp.gate
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(1))
    given = torch.tensor([[3, 1], [0, 7], [2, 4], [6, 5], [1, 0]])
    logits = x @ router.weight.mT
    weights = logits.softmax(-1).gather(-1, given)
    weights = weights / weights.sum(-1, keepdim=True)
    (expected,) = torch.autograd.grad(weights[:, 0].sum(), router.weight)
    found: list[Any] = []
    hook = model.model.layers[1].mlp.experts.register_forward_pre_hook(lambda _, args: found.extend(args[1:]))
    recorded = torch.zeros(5, LAYERS, K, dtype=torch.int64)
    recorded[:, 1] = given
    with replay(model, recorded):
        model.model.layers[1].mlp(x[None])
    hook.remove()
    assert torch.equal(found[0], given)
    torch.testing.assert_close(found[1], weights)
    (gradient,) = torch.autograd.grad(found[1][:, 0].sum(), router.weight)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


def fine() -> Tensor:
    return torch.tensor([1, 0]).expand(*IDS.shape, LAYERS, K).clone()


def twice() -> Tensor:
    given = fine()
    given[1, 2, 1] = 3
    return given


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        (fine().float(), TypeError, "expected a tensor of integers, got torch.float32"),
        (fine()[..., :1, :], ValueError, r"with more than 1 layers, got shape \(2, 11, 1, 2\)"),
        (fine()[0, 0], ValueError, r"with more than 1 layers, got shape \(2, 2\)"),
        (twice(), ValueError, r"2 different ones of 8 .* got \[3, 3\] for token 13 in layer 1"),
        (fine() + 7, ValueError, r"got \[8, 7\] for token 0 in layer 1"),
        (fine()[:1], ValueError, "expected those of 22 tokens, which layer 1 got, but they are of 11"),
        (
            torch.tensor([1, 0, 2]).expand(*IDS.shape, LAYERS, 3),
            RuntimeError,
            "a router that chooses 3 experts by one topk, got 0 in layer 1",
        ),
    ],
    ids=["dtype", "layers", "dims", "twice", "range", "tokens", "k"],
)
def test_a_recording_that_does_not_fit_is_refused(given: Tensor, error: type[Exception], said: str) -> None:
    model = models.build("qwen3_moe")
    with pytest.raises(error, match=rf"samebits\.routing\.replay: .*{said}"):
        step(model, given)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert not torch.overrides._get_current_function_mode_stack()


def test_what_has_no_routers_is_refused() -> None:
    with pytest.raises(ValueError, match="got none in Linear"), replay(nn.Linear(2, 2), fine()):
        pass
    model = models.build("qwen3_moe")
    next(iter(_blocks(model).values())).gate.topk_method = "group_limited_greedy"
    with pytest.raises(ValueError, match=r"score every expert.*group_limited_greedy"), replay(model, fine()):
        pass
    twice = nn.ModuleDict({"talker": models.build("qwen3_moe"), "thinker": models.build("qwen3_moe")})
    with pytest.raises(ValueError, match="one block of experts in a layer"), replay(twice, fine()):
        pass
    model, said = models.build("qwen3_moe"), "expected a forward within the context, got none"
    with pytest.raises(RuntimeError, match=said), replay(model, fine()):
        pass


def test_what_vllm_recorded() -> None:
    """The last token that was sampled has been computed by nobody."""
    known = torch.arange(24).view(6, 2, 2).numpy().astype("uint8")

    def output(experts: Any) -> Any:
        completion = SimpleNamespace(token_ids=[7, 8], routed_experts=experts)
        return SimpleNamespace(prompt_token_ids=[1, 2, 3, 4, 5], outputs=[completion])

    (found,) = check.experts([output(known)])
    assert torch.equal(found, torch.cat([torch.arange(24).view(6, 2, 2), torch.full((1, 2, 2), -1)]))
    with pytest.raises(ValueError, match="expected the experts of 6 tokens, got those of 4"):
        check.experts([output(known[:4])])
    with pytest.raises(ValueError, match="enable_return_routed_experts=True"):
        check.experts([output(None)])
