"""Layers of experts: new weights arrive in them, and SGLang hears which experts were chosen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.sglang.conftest import Start
from tests.vllm import models
from tests.vllm.conftest import prompts, trainer


def same(model: Any, samples: list[Any]) -> bool:
    from samebits.engines.parity import compare, replay

    return bool(compare(samples, replay(model, [[*s.prompt, *s.tokens] for s in samples])))


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3_moe_sparse", "glm4_moe"])
def test_new_weights(
    name: str,
    start: Start,
    folders: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Experts and routers are in SGLang's memory, into which it copies."""
    from safetensors.torch import load_file
    from torch.multiprocessing import reductions

    # SGLang would change, for good, how this process sends tensors: those on CPUs cannot be sent then.
    monkeypatch.setattr(reductions, "_reduce_tensor_original", reductions.reduce_tensor, raising=False)

    made, first = start(name), trainer(folders(name))
    assert same(first, made.generate(prompts(3, 3, 30)))
    models.save(name, tmp_path, seed=1)
    tensors = load_file(tmp_path / "model.safetensors")  # a module has all experts in one tensor
    done, said = made.runner.weight_updater.update_weights_from_tensor([*tensors.items()])
    assert done, said
    second = trainer(tmp_path)
    samples = made.generate(prompts(3, 3, 30))
    assert same(second, samples)
    assert not same(first, samples)
    done, said = made.runner.weight_updater.update_weights_from_disk(str(folders(name)), "auto")
    assert done, said
    assert same(first, made.generate(prompts(3, 3, 30)))


def test_chosen_experts(start: Start, folders: Callable[[str], Path]) -> None:
    """With `enable_return_routed_experts`, SGLang is told of those that a trainer's routers choose."""
    import torch
    from sglang.srt.state_capturer.routed_experts import set_global_experts_capturer

    told: dict[int, Any] = {}

    class Capturer:
        def capture(self, layer_id: int, topk_indices: Any) -> None:
            told[layer_id] = topk_indices

        def on_forward_end(self, **forward: Any) -> None:
            pass

    made, model = start("qwen3_moe_sparse"), trainer(folders("qwen3_moe_sparse"))
    chosen: dict[int, Any] = {}
    for i, layer in enumerate(model.model.layers):
        layer.mlp.experts.register_forward_pre_hook(lambda _, args, i=i: chosen.__setitem__(i, args[1]))
    (prompt,) = prompts(1, 20, 20)
    set_global_experts_capturer(Capturer())
    try:
        made.generate([prompt], new=1)
    finally:
        set_global_experts_capturer(None)
    assert same(model, made.generate([prompt], new=1))
    assert told.keys() == chosen.keys() == {0, 1}
    for i, ids in told.items():
        assert torch.equal(ids, chosen[i][: len(prompt)])
