"""An engine for ``samebits parity``: it samples, and tells what its modules compute."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from samebits.engines.parity import Sample, outputs_of_modules
from samebits.vllm import options
from samebits.vllm.asked import segments_of
from samebits.vllm.check import samples

__all__ = ["Rollout"]


class Rollout:
    """vLLM in this process, under samebits.

    Args:
        model: a folder, or a name.
        length: the most tokens of a sequence.
        share: of a GPU's memory, or a CPU's.
        segments: as in :func:`samebits.vllm.options`.
        more: arguments of ``vllm.LLM``.
    """

    def __init__(self, model: str, length: int, share: float, segments: int = 1, **more: Any) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # modules are looked at
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        from vllm import LLM

        more["gpu_memory_utilization"] = share  # on a CPU, too, in spite of the name
        self.llm = LLM(
            *(model,),
            **{"skip_tokenizer_init": True, "max_model_len": length, "disable_log_stats": True},
            **more | options(segments=segments),
        )

    def __str__(self) -> str:
        import vllm

        config = self.llm.llm_engine.vllm_config
        own = config.model_config.model_impl != "transformers"
        return (
            f"vLLM {vllm.__version__} on {config.device_config.device_type},"
            f" {', '.join(config.model_config.architectures)}"
            f" ({'vLLM’s own classes' if own else 'its Transformers backend, unfused'}),"
            f" {str(config.model_config.dtype).removeprefix('torch.')}"
            f"{_split(config)}"
        )

    @property
    def vocabulary(self) -> int:
        return int(self.llm.llm_engine.vllm_config.model_config.get_vocab_size())

    def sample(self, prompts: Sequence[Sequence[int]], new: int) -> list[Sample]:
        """At temperature 1, `new` tokens after each prompt, with the log-probs of prompts."""
        return self._generate(prompts, new, 1.0)

    def _generate(self, prompts: Sequence[Sequence[int]], new: int, temperature: float) -> list[Sample]:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=temperature,
            max_tokens=new,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            prompt_logprobs=0,
        )
        requests: Any = [{"prompt_token_ids": [*prompt]} for prompt in prompts]
        return samples(self.llm.generate(requests, params, use_tqdm=False))

    def outputs(self, sequence: Sequence[int]) -> dict[str, Tensor]:
        """What modules give in a prefill of a sequence, by their names."""
        self.llm.reset_prefix_cache()
        core: Any = self.llm.llm_engine
        model = core.model_executor.driver_worker.get_model()
        with outputs_of_modules(model) as found:
            self._generate([sequence], 1, 0.0)
        return found


def _split(config: Any) -> str:
    segments, ranks = segments_of(config), config.parallel_config.tensor_parallel_size
    return "" if segments == 1 else f", {segments} segments on {ranks} rank{'s' * (ranks > 1)}"
