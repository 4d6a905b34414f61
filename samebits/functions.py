"""The constants of exp, log and sums over the vocabulary.

``docs/contract.md``, "Log-probabilities", defines the functions. The CPU reference reads the constants from
here. ``kernels/include/functions.cuh`` repeats them for CUDA, and a test compares the two.
"""

from __future__ import annotations

__all__ = ["CHAINS", "CONSTANTS", "VOCAB_BLOCK"]

VOCAB_BLOCK = 128
"""Consecutive entries of the vocabulary in a block, which is summed by halves."""

CHAINS = 32
"""Chains over the blocks of a row. The blocks go to the chains in turn."""

CONSTANTS = {
    name: float.fromhex(value)
    for name, value in {
        "LOG2E": "0x1.715476p+0",
        "LN2": "0x1.62e43p-1",
        "LN2_LOW": "-0x1.05c61p-29",
        "E0": "0x1p+0",
        "E1": "0x1p+0",
        "E2": "0x1.fffffap-2",
        "E3": "0x1.55549p-3",
        "E4": "0x1.555a6ap-5",
        "E5": "0x1.123b28p-7",
        "E6": "0x1.693ea6p-10",
        "L1": "-0x1p-1",
        "L2": "0x1.555554p-2",
        "L3": "-0x1.000226p-2",
        "L4": "0x1.99a008p-3",
        "L5": "-0x1.547244p-3",
        "L6": "0x1.22da1cp-3",
        "L7": "-0x1.0d8542p-3",
        "L8": "0x1.055b72p-3",
        "L9": "-0x1.38b59p-4",
    }.items()
}
"""All of them are f32 values."""
