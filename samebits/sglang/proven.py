"""What was proven to keep a trainer's bits: versions of SGLang, and architectures in its own classes."""

from __future__ import annotations

__all__ = ["NATIVE", "TESTED"]

TESTED = {
    ("0.5.16", "cpu"): ("2.13", "CPUs, in CI: its engine, without the kernels of `sglang-kernel`"),
    ("0.5.16", "cuda"): ("2.11", "an H200: CUDA graphs, chunked prefill, radix cache; 102,900 tokens"),
}
"""By version and kind of device: the version of PyTorch, and where."""

NATIVE = {
    "Gemma2ForCausalLM": ("gemma2",),
    "Gemma3ForCausalLM": ("gemma3_causal",),
    "Glm4ForCausalLM": ("glm4", "llama"),
    "Glm4MoeForCausalLM": ("glm4_moe",),
    "GraniteForCausalLM": ("granite",),
    "LlamaForCausalLM": ("llama",),
    "MistralForCausalLM": ("mistral", "llama"),
    "MixtralForCausalLM": ("mixtral",),
    "OlmoeForCausalLM": ("olmoe",),
    "Phi3ForCausalLM": ("llama",),
    "Qwen2ForCausalLM": ("qwen2",),
    "Qwen3ForCausalLM": ("qwen3", "qwen2"),
    "Qwen3MoeForCausalLM": ("qwen3_moe", "qwen2_moe"),
}
"""Architectures, and the modules of ``sglang.srt.models`` that hold them."""
