"""Checks of parallel styles that run on every rank: ``test_styles.py``."""

from __future__ import annotations

import functools
import warnings
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import samebits
from samebits import TENSOR_CORE
from samebits.distributed import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    tp_plan,
    vocab_parallel_linear_logp,
)
from samebits.testing import assert_same_bits, values
from tests.support.ranks import device, place

with suppress(ImportError):  # here, before the process forks
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

CONTRACT = TENSOR_CORE.segmented(8)
TOKENS, VOCABULARY, WIDTH = (2, 16), 2048, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH, padding_idx=1)
        self.norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        x = x + self.down(nn.functional.silu(self.up(self.norm(x))))
        return self.head(x)  # type: ignore[no-any-return]


def make() -> Block:
    torch.manual_seed(0)
    model = Block().bfloat16()
    with torch.no_grad():
        model.norm.weight.copy_(torch.rand(WIDTH) + 0.5)
    return model.to(device())


@functools.cache
def mesh() -> DeviceMesh:
    return init_device_mesh(device().type, (dist.get_world_size(),), mesh_dim_names=("tp",))


IDS = torch.randint(VOCABULARY, TOKENS, generator=torch.Generator().manual_seed(1))
GRAD = values("normal", (*TOKENS, VOCABULARY), torch.bfloat16, 2)


def step(model: nn.Module, grad: Tensor = GRAD) -> Tensor:
    with samebits.batch_invariant():
        y: Tensor = model(place(IDS))
    y.backward(place(grad))  # outside, as with checkpoints of another thread
    return y


def whole(t: Tensor | None) -> Tensor:
    assert t is not None
    return t.full_tensor() if isinstance(t, DTensor) else t


def one_rank() -> tuple[Block, Tensor]:
    model = make()
    samebits.convert(model, contract=CONTRACT)
    return model, step(model)


def assert_same_gradients(model: nn.Module, want: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), want.parameters(), strict=True):
        assert_same_bits(whole(p.grad), whole(q.grad), name)


def check_tensor_parallel() -> None:
    want, logits = one_rank()
    model = make()
    plan: Any = {
        "table": RowwiseParallel(input_layouts=Replicate()),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(contract=CONTRACT),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh(), plan)
    assert isinstance(model.up.weight, DTensor)
    assert_same_bits(step(model), logits)
    assert_same_gradients(model, want)
    assert [*model.state_dict()] == [*want.state_dict()]


def check_sequence_parallel() -> None:
    want, logits = one_rank()
    model = make()
    plan: Any = {
        "table": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(use_local_output=True),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
    }
    parallelize_module(model, mesh(), plan)
    with samebits.batch_invariant():
        y = model(place(IDS))
    assert_same_bits(y.full_tensor(), logits)
    y.to_local().backward(place(GRAD.chunk(mesh().size(), -1)[mesh().get_local_rank()]))
    assert_same_gradients(model, want)


def check_other_layouts() -> None:
    if dist.get_world_size() > 2:
        return

    want, logits = one_rank()
    model = make()
    plan: Any = {
        "table": ColwiseParallel(output_layouts=Replicate()),
        "up": ColwiseParallel(output_layouts=Replicate()),
        "down": RowwiseParallel(input_layouts=Replicate(), use_local_output=False),
        "head": ColwiseParallel(input_layouts=Shard(-1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh(), plan)

    def cut(module: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
        return (
            DTensor.from_local(given[0], mesh(), (Replicate(),), run_check=False).redistribute(
                placements=(Shard(-1),)
            ),
        )

    def local(module: nn.Module, given: tuple[Any], y: DTensor) -> Tensor:
        assert y.placements == (Replicate(),)
        return y.to_local()

    model.down.register_forward_hook(local)
    model.head.register_forward_pre_hook(cut)
    assert_same_bits(step(model), logits)
    assert_same_gradients(model, want)


def llama(tied: bool, qwen: bool) -> Any:
    samebits.transformers.register()
    config: Any = (Qwen3Config if qwen else LlamaConfig)(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        attn_implementation="samebits",
    )
    torch.manual_seed(0)
    model: Any = (Qwen3ForCausalLM if qwen else LlamaForCausalLM)(config).bfloat16()
    return model.to(device())


def check_a_model_of_transformers() -> None:
    pytest.importorskip("transformers")
    ranks, ids = dist.get_world_size(), place(IDS)
    for tied, qwen in ((False, False), (True, True)):
        if ranks > 2 and qwen:
            continue
        want, model = llama(tied, qwen), llama(tied, qwen)
        samebits.convert(want, contract=CONTRACT)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            parallelize_module(model, mesh(), tp_plan(model))  # type: ignore[arg-type]
        model.tie_weights()
        results = []
        for m in (want, model):
            with samebits.batch_invariant():
                hidden = m.model(ids).last_hidden_state
                weight = m.lm_head.weight
                if isinstance(weight, DTensor):
                    logp: Tensor = vocab_parallel_linear_logp(hidden[:, :-1], weight.to_local(), ids[:, 1:])
                else:
                    logp = samebits.linear_logp(hidden[:, :-1], weight, ids[:, 1:], contract=CONTRACT)
                logp.sum().backward()
                logits = m(ids).logits
            results.append((logp, logits))
        for a, b in zip(*results, strict=True):
            assert_same_bits(a, b, f"{qwen=}")
        assert_same_gradients(model, want)


def check_refusals() -> None:
    for style in (ColwiseParallel, RowwiseParallel):
        with pytest.raises(NotImplementedError, match="got Conv1d"):
            parallelize_module(nn.Conv1d(8, 8, 1), mesh(), style())
    with pytest.raises(NotImplementedError, match=r"output_layouts: expected Shard\(-1\)"):
        ColwiseParallel(output_layouts=Shard(1))
    with pytest.raises(NotImplementedError, match="output_layouts: expected Replicate"):
        RowwiseParallel(output_layouts=Shard(-1))
    with pytest.raises(ValueError, match="with a tp_plan"):
        tp_plan(nn.Linear(2, 2))
    ranks = dist.get_world_size()
    if ranks > 1:
        with pytest.raises(ValueError, match=f"expected a multiple of {ranks} ranks, got {ranks + 1}"):
            parallelize_module(nn.Linear(8, ranks + 1), mesh(), ColwiseParallel())
        with pytest.raises(ValueError, match="differ from rank 0"):
            parallelize_module(nn.Linear(8, 8 << dist.get_rank() % 2), mesh(), ColwiseParallel())
