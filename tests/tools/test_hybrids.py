"""The benchmark of hybrids in small, on a CPU."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import samebits.transformers
from benchmarks import hybrids
from benchmarks.hybrids import FORMS, MODELS, TIMED
from benchmarks.record import environment
from benchmarks.tables.operations import gpu_hybrids

SMALL: dict[str, Any] = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
TWO = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
TINY = {
    "Qwen3-Next": TWO
    | {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "mlp_only_layers": [0, 1]}
    | {"linear_key_head_dim": 16, "linear_value_head_dim": 16},
    "Nemotron-H": {"layers_block_type": ["linear_attention", "mlp", "full_attention"], "n_groups": 1}
    | {"mamba_num_heads": 2, "mamba_head_dim": 16, "ssm_state_size": 16},
    "Granite 4": TWO
    | {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "shared_intermediate_size": 32},
}
ON_A_CPU = {"DEVICE": "cpu", "VOCABULARY": 50, "PROMPTS": (3, 7), "ANSWER": 4}
ON_A_CPU |= {"TRAINED": ((2, 6),), "DECODED": (2,), "PROMPT": 5, "KEYS": 12, "GENERATED": (2, 3, 4)}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, value in ON_A_CPU.items():
        monkeypatch.setattr(hybrids, name, value)
    for name, (kind, config) in MODELS.items():
        monkeypatch.setitem(MODELS, name, (kind, config | SMALL | TINY[name]))
    samebits.transformers.register()
    hybrids.model_of.cache_clear()
    yield
    hybrids.model_of.cache_clear()


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_a_rollout_has_the_bits_of_the_trainer(name: str) -> None:
    found = hybrids.rollout(name, "fused")
    assert [*found] == ["padded on the right", "packed"]
    for case in found.values():
        assert case == {"tokens": 8, "differ": 0, "largest": 0.0, "kl": 0.0}


def test_tokens_that_differ_are_counted() -> None:
    rollout = torch.randn(3, 50).log_softmax(-1)
    trainer = rollout.clone()
    trainer[1] = torch.randn(50).log_softmax(-1)
    found = hybrids.compared(rollout, trainer, torch.tensor([4, 5, 6]))
    assert found["tokens"] == 3
    assert found["differ"] == 1
    assert found["largest"] > 0
    want = torch.nn.functional.kl_div(trainer, rollout, reduction="batchmean", log_target=True)
    assert found["kl"] == pytest.approx(want.item(), rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("form", ["torch", "fused"])
def test_steps(form: str) -> None:
    within = FORMS[form].within
    for part in (hybrids.training, hybrids.generating):
        works = part(form)
        assert len(works) == len(TIMED)
        for before, step, after in works.values():
            with within():
                before()
                step()
                after()
    for name in TIMED:
        with within():
            decode = hybrids.Decoding(name, form, 2)
            decode.fill()
            for _ in range(2):
                decode.step()
                decode.forget()


def test_kernels_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in hybrids.LIBRARIES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    hybrids._choose("torch")
    assert all(sys.modules.pop(name) is None for name in hybrids.LIBRARIES)


def test_tables() -> None:
    times = {"torch": {"ms": 9.0, "mib": 4}, "others": {"ms": 4.0, "mib": 4}}
    case = {"part": "training", "work": "train"} | times | {"fused": {"ms": 2.0, "mib": 4}}
    assert hybrids.best(case) == 2.0
    assert hybrids.best({"work": "train"} | times) is None
    found = {"tokens": 8, "differ": 0, "largest": 0.0, "kl": 0.0}
    kl = [{"model": "Bamba", "form": "fused", "rows": "packed"} | found]
    data = {"environment": environment("c0ffee") | {"gpu": "A GPU"}, "cases": [case], "kl": kl}
    assert [t.row_count for t in hybrids.show(data)] == [1, 1]
    data |= {"convolutions": hybrids.convolutions()}
    said = gpu_hybrids(data | {"cases": [case, {"work": "other", "context": times["torch"]}]})
    assert "| train | 9 | 4 | refused | 2 | 0.50 |" in said
    assert "| Bamba | samebits, fused | packed | 0 of 8 | 0 | 0 |" in said
    assert find_spec("causal_conv1d") or "causal-conv1d is not installed" in said
    del case["others"]
    said = gpu_hybrids(data)
    assert "| step | PyTorch's forms, ms | samebits, fused, ms | of the time of PyTorch's forms |" in said
    assert "| train | 9 | 2 | 0.22 |" in said
    assert "convolutions" not in said
