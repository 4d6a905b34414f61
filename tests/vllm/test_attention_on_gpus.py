"""What attention has for GPUs alone: what it does without one."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from samebits.engines.refusals import RefusedError

STARTS = [0, 4, 8, 12, 12]  # of three sequences, and of one that only pads the step


def built(monkeypatch: pytest.MonkeyPatch, starts: list[int], tokens: int) -> list[int]:
    """The starts of queries that a step's metadata has, in a graph of so many tokens."""
    from samebits.vllm import attention_cuda

    def build(self: Any, prefix: int, metadata: Any, fast_build: bool = False) -> Any:
        assert (prefix, fast_build) == (0, True)
        return metadata.query_start_loc.tolist()

    monkeypatch.setattr(attention_cuda.FlashAttentionMetadataBuilder, "build", build)
    on_gpu, on_cpu = torch.tensor([*starts, 99], dtype=torch.int32), torch.tensor(starts, dtype=torch.int32)
    step = SimpleNamespace(
        query_start_loc=on_gpu[:-1],
        query_start_loc_cpu=on_cpu,
        num_actual_tokens=tokens,
        num_reqs=len(starts) - 1,
        max_query_len=max(b - a for a, b in itertools.pairwise(starts)),
    )
    builder = object.__new__(attention_cuda.SamebitsMetadataBuilder)
    found: list[int] = builder.build(0, step, fast_build=True)
    assert on_gpu[-1] == 99
    return found


def test_padding_belongs_to_a_sequence_that_pads(monkeypatch: pytest.MonkeyPatch) -> None:
    assert built(monkeypatch, STARTS, 16) == [0, 4, 8, 12, 16]
    assert built(monkeypatch, STARTS, 12) == STARTS
    assert built(monkeypatch, [0, 1, 2], 2) == [0, 1, 2]
    assert built(monkeypatch, [0, 1, 2, 2, 2], 4) == [0, 1, 2, 2, 2]  # nobody reads them
    assert built(monkeypatch, [0, 1, 2, 2], 4) == [0, 1, 2, 4]


def test_a_sequence_takes_no_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its queries would have other positions."""
    with pytest.raises(RefusedError, match="the last one would have the padding's queries"):
        built(monkeypatch, STARTS[:-1], 16)


def test_padding_without_keys_changes_no_other_sequence() -> None:
    import samebits

    draw = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(*s, generator=draw).bfloat16() for s in ((8, 2, 32), (3, 16, 2, 32), (3, 16, 2, 32))
    )
    table = torch.tensor([[1], [2], [-1]], dtype=torch.int32)

    def attended(tokens: int, starts: list[int], lengths: list[int]) -> torch.Tensor:
        return samebits.attention(
            *(q[:tokens], k, v),
            causal=True,
            cu_seqlens_q=torch.tensor(starts, dtype=torch.int32),
            key_length=torch.tensor(lengths, dtype=torch.int32),
            block_table=table[: len(lengths)],
        )

    padded = attended(8, [0, 2, 4, 8], [9, 16, 0])
    assert torch.equal(padded[:4], attended(4, [0, 2, 4], [9, 16]))
    assert not padded[4:].any()


def test_layers_of_the_transformers_backend_are_modules() -> None:
    """Else nobody would look at them, nor make their kernels ready."""
    from samebits.vllm import unfused

    class Model(nn.Module):
        model_config = SimpleNamespace(use_mla=False)
        made = unfused._as_modules(lambda self: {0: nn.Identity(), 1: nn.Identity()})

    model = Model()
    layers = model.made()
    assert [*layers] == [0, 1]
    assert {*layers.values()} <= {*model.modules()}
