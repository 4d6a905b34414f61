"""Log-probs of SGLang's sampler: those of ``log_softmax`` under samebits.

Those of sampled tokens are of ``log_softmax(logits.float() / temperature)``, and of a greedy batch of
``log_softmax(logits.float())``. ``top_k``, ``top_p`` and ``min_p`` cut what is sampled from, and no log-prob.
Those of prompts are computed by ``F.log_softmax`` within the model's call, which the mode replaces.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers import sampler
from sglang.srt.layers.logprob_processor import LogprobResult
from torch import Tensor

from samebits.engines.hooks import Hooks
from samebits.ops.logp import gather_logp
from samebits.ops.softmax import log_softmax, softmax

__all__ = ["install"]


def install(hooks: Hooks) -> None:
    """Replace what samples, and computes log-probs."""
    hooks.replace(
        *(sampler.Sampler, "forward", _forward),
        *("self", "logits_output", "sampling_info", "return_logprob", "top_logprobs_nums"),
        *("token_ids_logprobs", "positions"),
    )
    for name, parameters in (
        ("_preprocess_logits", ("self", "logits", "sampling_info")),
        ("_sample_from_probs", ("self", "probs", "sampling_info", "positions", "simple_sampling_case")),
        ("_sync_token_ids_across_tp", ("self", "batch_next_token_ids", "sampling_info")),
    ):
        hooks.expect(sampler.Sampler, name, *parameters)
    hooks.expect(sampler, "SGLANG_RETURN_ORIGINAL_LOGPROB")
    hooks.expect(LogprobResult, "write_output_to", "self", "logits_output")


def _forward(
    self: Any,
    logits_output: Any,
    sampling_info: Any,
    return_logprob: bool,
    top_logprobs_nums: list[int],
    token_ids_logprobs: list[list[int] | None],
    positions: Tensor,
) -> Tensor:
    """Token ids ``[rows]``, by SGLang's own sampling. It leaves the logits as they are."""
    logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info)
    masks = any(sampling_info.return_sampling_masks or [])
    if sampling_info.is_all_greedy:
        scaled, ids = logits, torch.argmax(logits, -1)
        if masks:
            self._attach_greedy_sampling_mask_to_output(logits_output, sampling_info, ids)
    else:
        scaled = logits / sampling_info.temperatures
        probs = softmax(scaled, -1)
        simple = not (
            sampling_info.need_top_p_sampling
            or sampling_info.need_top_k_sampling
            or sampling_info.need_min_p_sampling
        )
        ids = self._sample_from_probs(probs, sampling_info, positions, simple)
        if masks:
            kept = self._compute_sampling_mask_from_probs(probs, sampling_info)
            self._attach_sampling_mask_to_output(logits_output, sampling_info, ids, kept)
    if return_logprob:
        of = logits if sampler.SGLANG_RETURN_ORIGINAL_LOGPROB else scaled
        if any(n > 0 for n in top_logprobs_nums) or any(t is not None for t in token_ids_logprobs):
            found = self.output_logprob_processor.compute_logprobs(
                log_softmax(of, -1), top_logprobs_nums, token_ids_logprobs, ids
            )
        else:
            logps = gather_logp(of, ids[:, None])[:, 0]
            found = LogprobResult(token_logprobs=logps.clamp_(min=torch.finfo(logps.dtype).min))
        found.write_output_to(logits_output)
    self._sync_token_ids_across_tp(ids, sampling_info)
    return ids
