"""What of inference engines is covered, and with which versions that was tested."""

from __future__ import annotations

from benchmarks.tables.text import table
from samebits.sglang import proven as sglang
from samebits.vllm.proven import COVERED, NATIVE, TESTED


def vllm_native() -> str:
    return ", ".join(f"`{name}`" for name in NATIVE)


def vllm_versions() -> str:
    return table(["vLLM", "PyTorch", "tested on"], ((v, *where) for v, (_, *where) in TESTED.items()))


def vllm_covered() -> str:
    return table(["", "0.32.0 on CPUs, in CI", "0.26.0 on GPUs"], COVERED)


def sglang_native() -> str:
    return ", ".join(f"`{name}`" for name in sglang.NATIVE)


def sglang_versions() -> str:
    header = ["SGLang", "device", "PyTorch", "tested on"]
    return table(header, ((*of, *where) for of, where in sglang.TESTED.items()))
