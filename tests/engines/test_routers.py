"""Routers of ``transformers`` in two launches: which are recognised, and their bits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import samebits
from samebits.engines import routers
from samebits.testing import assert_same_bits, values

pytest.importorskip("transformers")

_SIZES: dict[str, Any] = {"hidden_size": 40, "num_experts_per_tok": 3}
_DEEPSEEK = _SIZES | {"n_routed_experts": 24, "n_group": 4, "topk_group": 2, "norm_topk_prob": True}
ROUTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", _SIZES | {"num_experts": 24, "norm_topk_prob": True}),
    "qwen2_moe": ("Qwen2Moe", _SIZES | {"num_experts": 24, "norm_topk_prob": False}),
    "olmoe": ("Olmoe", _SIZES | {"num_experts": 24, "norm_topk_prob": False}),
    "mixtral": ("Mixtral", _SIZES | {"num_local_experts": 24}),
    "glm4_moe": ("Glm4Moe", _DEEPSEEK | {"routed_scaling_factor": 1.5, "n_group": 1, "topk_group": 1}),
    "deepseek_v3": ("DeepseekV3", _DEEPSEEK | {"routed_scaling_factor": 2.5}),
    "gpt_oss": ("GptOss", _SIZES | {"num_local_experts": 24}),
    "granitemoe": ("GraniteMoe", _SIZES | {"num_local_experts": 24}),
}

SCORES = {"glm4_moe": "sigmoid", "deepseek_v3": "sigmoid", "gpt_oss": "logits", "granitemoe": "logits"}


def router_of(name: str, dtype: torch.dtype) -> Any:
    import importlib

    import transformers

    prefix, sizes = ROUTERS[name]
    config = getattr(transformers, f"{prefix}Config")(**sizes)
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    (kind,) = (
        v for n, v in vars(module).items() if n.startswith(prefix) and n.endswith(("Router", "TopKRouter"))
    )
    made = kind(config)
    for i, p in enumerate(made.parameters()):
        p.data = values("normal", p.shape, dtype, i)
    for b in made.buffers():
        b.copy_(values("normal", b.shape, torch.float32, 5))
    return made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ROUTERS)
@torch.no_grad()
def test_a_router_has_its_bits_in_two_launches(name: str, dtype: torch.dtype) -> None:
    router, x = router_of(name, dtype), values("normal", (17, 40), dtype, 3)
    with samebits.batch_invariant():
        want = router(x)
        routers.fuse_router(router)
        assert "forward" in vars(router), "it was not recognised"
        form = routers._form_of(router_of(name, dtype))
        got = router(x)
    assert_same_bits(got[1], want[1])
    assert torch.equal(got[2], want[2])
    assert form is not None
    assert form.options.get("score", "softmax") == SCORES.get(name, "softmax")


@torch.no_grad()
def test_a_copy_of_a_fused_router_has_its_own_weight() -> None:
    router, x = router_of("qwen3_moe", torch.bfloat16), values("normal", (5, 40), torch.bfloat16, 3)
    routers.fuse_router(router)
    other = copy.deepcopy(router)
    other.weight.mul_(-1)
    assert torch.equal(other(x)[0], -router(x)[0])


@torch.no_grad()
def test_a_router_that_computes_something_else_stays() -> None:
    router = router_of("mixtral", torch.bfloat16)

    class Hotter(type(router)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x * 1.5)

    router.__class__ = Hotter
    routers.fuse_router(router)
    routers.fuse_router(nn.Linear(3, 4))  # type: ignore[arg-type]
    assert "forward" not in vars(router)


def _takes_hidden_groups(self: Any, x: torch.Tensor) -> Any:
    """DeepSeek-V3's steps, with 0 for experts of hidden groups, as some models have them."""
    logits = torch.nn.functional.linear(x.float(), self.weight.float())
    scores = logits.sigmoid()
    choice = scores + self.e_score_correction_bias
    of_groups = choice.view(len(x), self.num_group, -1).topk(2, dim=-1)[0].sum(dim=-1)
    shown = torch.zeros_like(of_groups).scatter(1, of_groups.topk(self.topk_group)[1], 1)
    shown = shown.repeat_interleave(choice.shape[1] // self.num_group, dim=1)
    chosen = choice.masked_fill(shown == 0, 0.0).topk(self.top_k)[1]
    weights = scores.gather(1, chosen)
    return logits, weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.routed_scaling_factor, chosen


def _adds_more(self: Any, x: torch.Tensor) -> Any:
    logits, weights, chosen = type(self).__base__.forward(self, x)
    weights = logits.sigmoid().gather(1, chosen)
    return logits, weights / (weights.sum(-1, keepdim=True) + 1e-12) * self.routed_scaling_factor, chosen


def _in_the_dtype_of_tokens(self: Any, x: torch.Tensor) -> Any:
    logits, weights, chosen = type(self).__base__.forward(self, x)
    return logits, weights.to(x.dtype), chosen


def _asks_for_more(self: Any, x: torch.Tensor, bias: torch.Tensor) -> Any:
    return type(self).__base__.forward(self, x)


@pytest.mark.parametrize(
    ("name", "forward"),
    [
        ("deepseek_v3", _takes_hidden_groups),
        ("glm4_moe", _adds_more),
        ("glm4_moe", _in_the_dtype_of_tokens),
        ("mixtral", _asks_for_more),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
@torch.no_grad()
def test_routers_that_differ_at_the_edges_stay(name: str, forward: Any) -> None:
    router = router_of(name, torch.float32)
    router.__class__ = type("Other", (type(router),), {"forward": forward})
    routers.fuse_router(router)
    assert "forward" not in vars(router)


@pytest.mark.parametrize("looks", [False, True])
@torch.no_grad()
def test_a_router_that_looks_at_its_configuration_stays(looks: bool) -> None:
    router = router_of("mixtral", torch.bfloat16)

    class Other(type(router)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x * self.config["scale"] if looks else x)

    router.__class__, router.config = Other, {"scale": 1.0}
    routers.fuse_router(router)
    assert ("forward" in vars(router)) != looks
    if not looks:
        fused = router.forward
        routers.fuse_router(router)
        assert router.forward is fused
