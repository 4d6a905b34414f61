"""Sums in segments: engines on one, two and four ranks have the bits of one trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.conftest import Engine, generate, prompts, trainer


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        pytest.param("qwen3", 1, marks=pytest.mark.long),
        pytest.param("qwen3_moe", 2, marks=pytest.mark.long),  # its first layer is dense
        pytest.param("qwen3", 4, marks=pytest.mark.nightly),  # each rank has a copy of keys
        pytest.param("gemma2", 2, marks=pytest.mark.nightly),
        pytest.param("starcoder2", 2, marks=pytest.mark.nightly),  # biases, by the code of transformers
        pytest.param("gpt_oss", 1, marks=pytest.mark.nightly),
        pytest.param("glm4_moe", 2, marks=pytest.mark.nightly),  # experts for all tokens
        pytest.param("olmoe", 2, marks=pytest.mark.nightly),  # norms of all heads
    ],
)
def test_bits_of_the_trainer(name: str, ranks: int, engine: Engine, folders: Callable[[str], Path]) -> None:
    """Prefill in chunks, decoding, log-probs of prompts; and they are not those of plain sums."""
    import samebits
    import samebits.vllm
    from samebits.vllm.check import replayed

    llm = engine(
        *(name,),
        max_num_batched_tokens=32,
        tensor_parallel_size=ranks,
        **samebits.vllm.options(segments=8),
    )
    outputs = generate(llm, prompts(6, 3, 60), prompt_logprobs=0)
    llm.llm_engine.engine_core.shutdown()
    model = trainer(folders(name))
    assert not replayed(model, outputs)
    assert not samebits.convert(model, contract=samebits.TENSOR_CORE.segmented(8)).unconverted
    parity = replayed(model, outputs)
    assert parity, str(parity)
    assert parity.tokens > 6 * 6 + 60


@pytest.mark.long
def test_a_head_in_float32(engine: Engine, folders: Callable[[str], Path]) -> None:
    """Its sums are not cut: log-probs are those of ``linear_logp``."""
    import torch

    import samebits
    import samebits.vllm

    llm = engine("qwen3", hf_overrides={"head_dtype": "float32"}, **samebits.vllm.options(segments=8))
    (asked,) = prompts(1, 60, 60)
    (output,) = generate(llm, [asked], prompt_logprobs=0, max_tokens=1)
    found = [at[token].logprob for at, token in zip(output.prompt_logprobs[1:], asked[1:], strict=True)]
    model = trainer(folders("qwen3"))
    contract = samebits.TENSOR_CORE.segmented(8)
    samebits.convert(model, contract=contract)
    with torch.no_grad(), samebits.batch_invariant("error"):
        hidden = model.model(torch.tensor([asked])).last_hidden_state[0, :-1]
        logp = samebits.linear_logp(hidden, model.lm_head.weight, torch.tensor(asked[1:]), contract=contract)
    assert logp.tolist() == found


@pytest.mark.parametrize("segments", [0, 3, 128])
def test_segments_are_a_power_of_two(segments: int) -> None:
    import samebits.vllm

    with pytest.raises(ValueError, match=r"segments: expected a power of two"):
        samebits.vllm.options(segments=segments)


def test_experts_with_biases_are_not_split() -> None:
    from types import SimpleNamespace

    from samebits.engines.refusals import RefusedError
    from samebits.vllm.parallel import split_experts

    with pytest.raises(RefusedError, match=r"the layer x: its experts have biases, .*on one rank"):
        split_experts("the layer x", SimpleNamespace(has_bias=True), 2)


def test_options_of_a_configuration() -> None:
    from types import SimpleNamespace

    from samebits.engines.refusals import RefusedError
    from samebits.vllm.asked import segments_of

    def found(**given: Any) -> int:
        config: Any = SimpleNamespace(additional_config={"samebits": given})
        return segments_of(config)

    assert (found(), found(segments=8)) == (1, 8)
    with pytest.raises(RefusedError, match=r"segment for samebits: its options are any_version, segments"):
        found(segment=8)
    with pytest.raises(ValueError, match=r"segments: expected a power of two"):
        found(segments=3)
