"""The constants of ``samebits/functions.py`` for CUDA: ``kernels/include/constants.cuh``."""

from __future__ import annotations

from benchmarks.record import ROOT
from samebits.functions import CHAINS, CHANNEL_BLOCK, CONSTANTS, STATE_PIECE, VOCAB_BLOCK

__all__ = ["HEADER", "text"]

HEADER = ROOT / "samebits/backends/cuda/kernels/include/constants.cuh"


def text() -> str:
    """The header."""
    return "\n".join(
        (
            "// Written by python -m benchmarks tables, from samebits/functions.py.",
            *("#pragma once", "", "namespace contract {", ""),
            f"constexpr int VOCAB_BLOCK = {VOCAB_BLOCK};",
            f"constexpr int CHAINS = {CHAINS};",
            f"constexpr int STATE_PIECE = {STATE_PIECE};",
            f"constexpr int CHANNEL_BLOCK = {CHANNEL_BLOCK};",
            *(f"constexpr float {name} = {_literal(value)};" for name, value in CONSTANTS.items()),
            *("", "}  // namespace contract", ""),
        )
    )


def _literal(value: float) -> str:
    """A float32, as C++ spells it."""
    digits, exponent = value.hex().split("p")
    return f"{digits.rstrip('0').rstrip('.')}p{exponent}f"
