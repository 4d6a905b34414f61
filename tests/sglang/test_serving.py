"""Whatever SGLang's engine does with a request, its log-probs are the trainer's."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm import models
from tests.vllm.conftest import prompts, trainer

pytestmark = pytest.mark.long


@pytest.fixture
def engine(folders: Callable[[str], Path]) -> Iterator[Any]:
    """Its scheduler and model run in processes of their own: samebits gets there by SGLang's plug-ins."""
    import sglang

    import samebits.sglang

    llm = sglang.Engine(
        model_path=str(folders("qwen3")),
        device="cpu",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        context_length=128,
        max_total_tokens=512,
        max_running_requests=8,
        chunked_prefill_size=32,
        **samebits.sglang.options(),
    )
    yield llm
    llm.shutdown()


def generate(llm: Any, asked: list[list[int]], **sampling: Any) -> list[dict[str, Any]]:
    defaults = {"temperature": 1.0, "max_new_tokens": 8, "ignore_eos": True}
    outputs: list[dict[str, Any]] = llm.generate(
        input_ids=asked, sampling_params=defaults | sampling, return_logprob=True, logprob_start_len=-1
    )
    return outputs


def same(model: Any, asked: list[list[int]], outputs: list[dict[str, Any]], **distribution: Any) -> None:
    from samebits.sglang.check import replayed

    parity = replayed(model, asked, outputs, **distribution)
    assert parity, str(parity)
    assert parity.tokens >= 8 * len(asked)


def test_a_served_model(engine: Any, folders: Callable[[str], Path], tmp_path: Path) -> None:
    """Chunked prefill, radix cache, more requests than run at once, temperatures, new weights."""
    model = trainer(folders("qwen3"))
    draw = random.Random(5)
    head = [draw.randrange(1, 319) for _ in range(70)]
    asked = [head + tail for tail in prompts(10, 3, 20)]
    same(model, asked, generate(engine, asked))
    again = generate(engine, asked[:4])
    assert min(o["meta_info"]["cached_tokens"] for o in again) >= 64
    same(model, asked[:4], again)
    same(model, asked[:4], generate(engine, asked[:4], temperature=0.7), temperature=0.7)
    same(model, asked[:2], generate(engine, asked[:2], temperature=0.7, top_p=0.8), temperature=0.7)
    short = prompts(3, 5, 40)
    outputs = engine.generate(
        input_ids=short,
        sampling_params={"max_new_tokens": 8, "ignore_eos": True},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=3,
    )
    same(model, short, outputs)

    other = models.build("qwen3", seed=1)
    done, said = engine.update_weights_from_tensor([*other.state_dict().items()], flush_cache=True)
    assert done, said
    other.save_pretrained(tmp_path)
    second = trainer(tmp_path)
    outputs = generate(engine, asked[:3])
    same(second, asked[:3], outputs)
    done, said, *_ = engine.update_weights_from_disk(str(folders("qwen3")))
    assert done, said
    same(model, asked[:3], generate(engine, asked[:3]))
