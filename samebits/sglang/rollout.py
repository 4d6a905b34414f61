"""An engine for ``samebits parity``: it samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from samebits.engines.logprobs import head_dtype
from samebits.engines.parity import Sample
from samebits.sglang import options
from samebits.sglang.check import samples
from samebits.sglang.plugin import device, version

__all__ = ["Rollout"]


class Rollout:
    """SGLang under samebits. It runs its model in a process of its own.

    Args:
        model: a folder, or a name.
        length: the most tokens of a sequence.
        share: of a GPU's memory.
        more: arguments of ``sglang.Engine``.
    """

    def __init__(self, model: str, length: int, share: float, **more: Any) -> None:
        import sglang
        from transformers import AutoConfig

        self.config: Any = AutoConfig.from_pretrained(model)
        wide = head_dtype(self.config) is not None  # which SGLang does not read
        more.setdefault("enable_fp32_lm_head", wide)
        self.llm = sglang.Engine(
            model_path=model,
            **{"skip_tokenizer_init": True, "context_length": length, "mem_fraction_static": share},
            **options() | more,
        )

    def __str__(self) -> str:
        dtype = str(self.config.dtype).removeprefix("torch.")
        return f"SGLang {version()} on {device()}, {', '.join(self.config.architectures)}, {dtype}"

    @property
    def vocabulary(self) -> int:
        return int(self.config.get_text_config().vocab_size)

    def sample(self, prompts: Sequence[Sequence[int]], new: int) -> list[Sample]:
        """At temperature 1, `new` tokens after each prompt, with the log-probs of prompts."""
        outputs: Any = self.llm.generate(
            input_ids=[[*prompt] for prompt in prompts],
            sampling_params={"temperature": 1.0, "max_new_tokens": new, "ignore_eos": True},
            return_logprob=True,
            logprob_start_len=0,
        )
        return samples(prompts, outputs)

    def close(self) -> None:
        """End its processes."""
        self.llm.shutdown()
