"""Models and their steps, for tests of ``samebits.fuse``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import samebits
from samebits.testing import assert_same_bits

Results = dict[str, Tensor]


def llama(dtype: torch.dtype = torch.bfloat16, **fields: Any) -> Any:
    """A tiny model of which every kind but clamped gates is fused."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=97,
        **fields,
    )
    model = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape), alpha=0.1)
    model.to(dtype)  # type: ignore[arg-type]
    return model


def ids(rows: int = 2, length: int = 9) -> Tensor:
    return torch.randint(0, 97, (rows, length), generator=torch.Generator().manual_seed(4))


def step(model: nn.Module, call: Callable[..., Any] | None = None, **given: Any) -> Results:
    """Logits, the loss and the gradients of a step under the mode."""
    model.zero_grad()
    with samebits.batch_invariant("ignore"):
        out = (model if call is None else call)(**({"input_ids": ids()} | given))
        loss = out.loss
        if loss is None:
            seed = torch.randn(out.logits.shape, generator=torch.Generator().manual_seed(5))
            seed[0, 2:5] = 0  # tokens that no loss is of
            loss = (out.logits * seed.to(out.logits.dtype)).sum()
        loss.backward()
    found = {"loss": loss.detach()} | ({} if out.logits is None else {"logits": out.logits.detach()})
    return found | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(found: Results, expected: Results) -> None:
    assert found.keys() == expected.keys()
    for name, t in expected.items():
        assert_same_bits(found[name], t, name)
