"""``generate_batch`` of ``transformers`` in the process's mode: its logits are those of the full forward.

It packs its requests into one row, in front of keys from a paged cache, with a mask that has a block for each
of them. So this is a test of masks, of caches and of chunks of a prefill, too.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from samebits.mode import set_batch_invariant_mode
from tests.support.devices import DEVICES

transformers = pytest.importorskip("transformers", reason="needs the extra demo")

PROMPTS = [3, 17, 1, 40, 9, 26, 64, 5, 33, 12, 2, 50]


def qwen3(dtype: torch.dtype, device: str) -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=199,
        max_position_embeddings=512,
        attn_implementation="sdpa",
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.2,
    )
    return transformers.Qwen3ForCausalLM(config).to(device, dtype).eval()


def rows(logits: Tensor) -> set[bytes]:
    flat = logits.detach().reshape(-1, logits.shape[-1]).cpu().view(torch.uint8)
    return {bytes(row.tolist()) for row in flat}


@pytest.mark.parametrize(
    "options",
    [{}, {"use_cuda_graph": False}, {"max_batch_tokens": 32}],
    ids=["defaults", "no graphs", "chunks"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_each_token_is_the_full_forwards(device: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    model = qwen3(dtype, device)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, 199, (n,), generator=generator).tolist() for n in PROMPTS]
    generation = transformers.GenerationConfig(
        max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    known = {field.name for field in dataclasses.fields(transformers.ContinuousBatchingConfig)}
    options = options | ({"auto_switch_to_flash": False} if "auto_switch_to_flash" in known else {})
    batching = transformers.ContinuousBatchingConfig(block_size=16, num_blocks=64, **options)
    seen: set[bytes] = set()
    hook = model.lm_head.register_forward_hook(lambda _module, _args, out: seen.update(rows(out)))
    with set_batch_invariant_mode(True, "error"), torch.no_grad():
        outputs = model.generate_batch(
            prompts, generation_config=generation, continuous_batching_config=batching, progress_bar=False
        )
        hook.remove()
        assert len(outputs) == len(prompts)
        other_bits, other_tokens = 0, []
        for output in outputs.values():
            prompt, made = list(output.prompt_ids), list(output.generated_tokens)
            assert len(made) == 8
            logits = model(torch.tensor([prompt + made[:-1]], device=device)).logits[0, len(prompt) - 1 :]
            for row, token in zip(logits, made, strict=True):
                other_bits += not rows(row) <= seen
                if row[token] != row.max():  # a tie of the largest is none
                    other_tokens.append((len(prompt), token))
    assert (other_bits, other_tokens) == (0, [])
