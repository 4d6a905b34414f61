"""What vLLM does on a GPU alone: sleep, take weights by handles, and tell which experts it chose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

import samebits
from tests.vllm import models
from tests.vllm.conftest import Engine, generate, prompts, trainer
from tests.vllm.test_serving import same

pytestmark = pytest.mark.gpu


@pytest.fixture
def in_a_process(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Makes one engine in a process of its own, which ends with the test."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # handles of memory are pickled
    made: list[Any] = []

    def start(name: str, **options: Any) -> Any:
        made.append(engine(name, enable_prefix_caching=True, block_size=32, **options))
        return made[-1]

    yield start
    for llm in made:
        llm.llm_engine.engine_core.shutdown()


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_sleep(name: str, level: int, in_a_process: Engine, folders: Callable[[str], Path]) -> None:
    """Weights come back from the CPU (1), or from the checkpoint (2)."""
    model = trainer(folders(name))
    llm = in_a_process(name, enable_sleep_mode=True)
    asked = prompts(3, 40, 60)
    same(model, generate(llm, asked))
    llm.sleep(level)
    lost = torch.full((torch.cuda.mem_get_info()[0] // 8,), torch.nan, device="cuda")  # where its memory was
    del lost
    torch.cuda.empty_cache()
    llm.wake_up()
    if level == 2:
        llm.collective_rpc("reload_weights")
    outputs = generate(llm, asked)
    assert not any(o.num_cached_tokens for o in outputs)
    same(model, outputs)


@pytest.mark.parametrize("packed", [False, True])
def test_weights_by_handles(packed: bool, in_a_process: Engine, tmp_path: Path) -> None:
    """The engine's process opens handles of the trainer's memory."""
    pytest.importorskip("ray", reason="what vLLM takes handles by imports ray")
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

    llm = in_a_process("qwen3", weight_transfer_config=WeightTransferConfig(backend="ipc"))
    asked = prompts(3, 40, 60)
    generate(llm, asked)
    model = trainer(models.save("qwen3", tmp_path / "new", seed=1))
    llm.init_weight_transfer_engine({"init_info": {}})
    llm.start_weight_update()
    how: Any = {"send_mode": lambda x: llm.update_weights({"update_info": asdict(x)}), "packed": packed}
    IPCWeightTransferEngine.trainer_send_weights(iter(model.state_dict().items()), how)
    llm.finish_weight_update()
    outputs = generate(llm, asked)
    assert not any(o.num_cached_tokens for o in outputs)
    same(model, outputs)


@pytest.mark.parametrize("model_impl", ["auto", "transformers"])
def test_chosen_experts(model_impl: str, engine: Engine, folders: Callable[[str], Path]) -> None:
    """A trainer with other bits lets its tokens go to the engine's experts."""
    from samebits.routing import replay
    from samebits.vllm import check

    llm = engine("qwen3_moe", model_impl=model_impl, enable_return_routed_experts=True)
    asked = prompts(3, 20, 40)
    outputs = generate(llm, asked)
    model = trainer(folders("qwen3_moe"))
    block = model.model.layers[1].mlp
    took: list[Any] = []
    block.experts.register_forward_pre_hook(lambda _, args: took.append(args[1].cpu()))
    for prompt, output, experts in zip(asked, outputs, check.experts(outputs), strict=True):
        ids = torch.tensor([[*prompt, *output.outputs[0].token_ids]], device=model.device)
        chosen = experts[:-1, 1]  # vLLM did not compute the last token
        with torch.no_grad(), samebits.batch_invariant("error"):
            model(ids)
            assert torch.equal(took.pop()[:-1], chosen)
            own = block.gate.weight.clone()
            block.gate.weight += torch.randn_like(own) * 0.02
            model(ids)
            assert not torch.equal(took.pop()[:-1], chosen)
            with replay(model, experts[None].to(model.device)):
                model(ids)
            assert torch.equal(took.pop()[:-1], chosen)
            block.gate.weight.copy_(own)
