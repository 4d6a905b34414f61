"""Routers of ``transformers`` in two launches: which are recognised, and their bits."""

from __future__ import annotations

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
        got = router(x)
    assert_same_bits(got[1], want[1])
    assert torch.equal(got[2], want[2])


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
