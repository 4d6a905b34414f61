"""TorchTitan's models and its own parity test, with ``samebits.torchtitan`` as ``batch_invariant_ops``."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn

if importlib.util.find_spec("torchtitan") is None:
    pytest.skip("torchtitan is not installed: .ci/trainers.txt names what it needs", allow_module_level=True)

SHIM = Path(__file__).parents[2] / "shims" / "batch_invariant_ops"
LENGTHS = [40, 7, 23, 64, 1, 31]


@pytest.fixture
def shim(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The mode as TorchTitan turns it on. It has no way to turn it off."""
    from torchtitan.distributed import utils

    gpu = torch.backends.cuda.matmul
    settings = [(gpu, f"allow_{d}_reduced_precision_reduction") for d in ("bf16", "fp16")]
    settings += [(gpu, "allow_tf32"), (torch.backends.cudnn, "allow_tf32")]
    before, environment = [getattr(*s) for s in settings], dict(os.environ)
    monkeypatch.syspath_prepend(SHIM)
    monkeypatch.setattr(utils, "_batch_invariant_enabled", False)
    ops = importlib.import_module("batch_invariant_ops")
    utils.set_batch_invariance(True)
    assert ops.is_batch_invariant_mode_enabled()
    yield ops
    ops.disable_batch_invariant_mode()
    sys.modules.pop("batch_invariant_ops")
    os.environ.clear()
    os.environ.update(environment)
    for setting, value in zip(settings, before, strict=True):
        setattr(*setting, value)


def build(backend: str) -> nn.Module:
    """Two layers of TorchTitan's tiny Llama 3."""
    from torchtitan.models.llama3 import model_registry

    torch.manual_seed(0)
    config = model_registry("debugmodel", attn_backend=backend).model
    config.layers = config.layers[:2]
    model = config.build()
    with torch.no_grad():
        model.init_states()
    return model.to(torch.bfloat16)


def step(model: Any, sequences: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Logits of each packed sequence, and gradients of its tokens' embeddings."""
    kept: list[Tensor] = []

    def keep(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        kept.append(out.detach().requires_grad_())
        return kept[0]

    ids = torch.cat(sequences)[None]
    positions = torch.cat([torch.arange(len(s)) for s in sequences])[None]
    hook = model.tok_embeddings.register_forward_hook(keep)
    logits = model(ids, positions, model.get_attention_masks(positions))
    hook.remove()
    logits.float().log_softmax(-1).gather(-1, ids[..., None]).sum().backward()
    sizes = [len(s) for s in sequences]
    assert kept[0].grad is not None
    return [*zip(logits[0].detach().split(sizes), kept[0].grad[0].split(sizes), strict=True)]


def bits(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.int16)


@pytest.mark.parametrize("backend", ["varlen", "flex"])
def test_a_training_step_does_not_depend_on_what_is_packed_beside(shim: ModuleType, backend: str) -> None:
    model = build(backend)
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(0, 2048, (n,), generator=generator) for n in LENGTHS]
    whole = step(model, sequences)
    for size in (1, 2):
        parts = [pair for i in range(0, 6, size) for pair in step(model, sequences[i : i + size])]
        for own, packed in zip(parts, whole, strict=True):
            for a, b in zip(own, packed, strict=True):
                assert torch.equal(bits(a), bits(b))


class Mocks(MetaPathFinder, Loader):
    """What the file imports for its other two tests, which need GPUs, vLLM and Monarch."""

    NAMES = (
        "vllm",
        *(f"torchtitan.experiments.rl.{n}" for n in ("actors", "controller", "examples", "models")),
    )

    @classmethod
    def has(cls, name: str) -> bool:
        return any(name == m or name.startswith(f"{m}.") for m in cls.NAMES)

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if self.has(name) else None

    def create_module(self, spec: ModuleSpec) -> Any:
        return MagicMock()

    def exec_module(self, module: Any) -> None: ...


@pytest.mark.parametrize("backend", ["varlen", "flex"])
def test_its_own_test_of_batch_invariance_passes(
    shim: ModuleType, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rl = "torchtitan.experiments.rl"
    for name in [m for m in sys.modules if Mocks.has(m)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Mocks(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, f"{rl}.tests.test_bitwise_parity", raising=False)
    theirs = importlib.import_module(f"{rl}.tests.test_bitwise_parity")
    monkeypatch.setattr(theirs.dist, "get_rank", lambda: 0)
    kind = type("OnCPU", (theirs.BitwiseParityTestBase,), {"train_context": staticmethod(nullcontext)})
    test = kind("test_batch_invariance")
    test.model, test.device, test.attn_backend = build(backend).eval(), torch.device("cpu"), backend
    generator = torch.Generator().manual_seed(0)
    test.prompt_ids = [torch.randint(0, 2048, (n,), generator=generator).tolist() for n in (150, 97, 60, 33)]
    test.test_batch_invariance()


def test_everything_is_put_back(shim: ModuleType) -> None:
    from torch.nn.attention import varlen
    from torchtitan.models.common import attention

    assert attention.varlen_attn.__module__ == "samebits.torchtitan"
    shim.disable_batch_invariant_mode()
    assert attention.varlen_attn is varlen.varlen_attn
    assert varlen.varlen_attn.__module__ == varlen.varlen_attn_out.__module__ == varlen.__name__
    assert not shim.is_batch_invariant_mode_enabled()


def test_a_moved_function_is_an_error(shim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtitan.models.common import attention

    from samebits.engines.hooks import MovedError

    shim.disable_batch_invariant_mode()
    monkeypatch.setattr(attention, "varlen_attn", lambda q, k, v: q)
    with pytest.raises(MovedError, match=r"attention\.varlen_attn: expected a function of \(query"):
        shim.enable_batch_invariant_mode()
    assert not shim.is_batch_invariant_mode_enabled()
