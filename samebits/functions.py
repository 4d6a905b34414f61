"""The constants of exp, log, exp2, gelu and sums over the vocabulary.

``docs/contract.md``, "Log-probabilities", "exp2" and "Fused layers", defines the functions. The CPU
reference reads the constants from here. For CUDA, ``python -m benchmarks tables`` writes them into
``kernels/include/constants.cuh``.
"""

from __future__ import annotations

__all__ = ["CHAINS", "CHANNEL_BLOCK", "CONSTANTS", "EX2_SM90", "STATE_PIECE", "VOCAB_BLOCK"]

VOCAB_BLOCK = 128
"""Consecutive entries of the vocabulary in a block, which is summed by halves."""

CHAINS = 32
"""Chains over the blocks of a row. The blocks go to the chains in turn."""

STATE_PIECE = 8
"""Neighbours in a channel's state whose products are one chain."""

CHANNEL_BLOCK = 32
"""Channels over which gradients of B and C are summed by halves."""

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
        "P1": "0x1.62e43p-1",
        "P2": "0x1.ebfbep-3",
        "P3": "0x1.c6af6cp-5",
        "P4": "0x1.3b2a1cp-7",
        "P5": "0x1.5f0896p-10",
        "P6": "0x1.444004p-13",
        "L1": "-0x1p-1",
        "L2": "0x1.555554p-2",
        "L3": "-0x1.000226p-2",
        "L4": "0x1.99a008p-3",
        "L5": "-0x1.547244p-3",
        "L6": "0x1.22da1cp-3",
        "L7": "-0x1.0d8542p-3",
        "L8": "0x1.055b72p-3",
        "L9": "-0x1.38b59p-4",
        "HALF_ROOT": "0x1.6a09e6p-1",
        "TANH_SCALE": "0x1.988454p-1",
        "TANH_CUBE": "0x1.6e4e26p-5",
        "TANH_SLOPE": "0x1.12ba9cp-3",
        "DENSITY": "0x1.988454p-2",
        "G1": "-0x1.20dd78p+0",
        "G2": "-0x1.45f28cp-1",
        "G3": "-0x1.a510c8p-4",
        "G4": "0x1.3ada8ap-6",
        "G5": "0x1.ed1856p-15",
        "G6": "-0x1.9d5694p-10",
        "G7": "0x1.344168p-11",
        "G8": "-0x1.bcb54p-14",
        "G9": "0x1.0de7eap-17",
    }.items()
}
"""All of them are f32 values. HALF_ROOT: of 1 / 2. TANH_SLOPE: 3 TANH_CUBE. DENSITY: 1 / sqrt(2 pi)."""

# fmt: off
EX2_SM90: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int] = (
    (
        33554435, 33919818, 34289182, 34662565, 35040018, 35421577, 35807292, 36197209, 36591372, 36989825,
        37392616, 37799797, 38211409, 38627504, 39048131, 39473337, 39903173, 40337690, 40776937, 41220970,
        41669836, 42123592, 42582286, 43045977, 43514717, 43988561, 44467565, 44951786, 45441278, 45936101,
        46436314, 46941971, 47453135, 47969867, 48492225, 49020269, 49554065, 50093674, 50639159, 51190582,
        51748011, 52311510, 52881146, 53456983, 54039091, 54627538, 55222393, 55823725, 56431607, 57046106,
        57667297, 58295254, 58930048, 59571754, 60220447, 60876205, 61539104, 62209220, 62886634, 63571424,
        64263672, 64963458, 65670863, 66385972,
    ),
    (
        22713, 22960, 23210, 23463, 23718, 23977, 24238, 24502, 24768, 25038, 25311, 25586, 25865, 26147,
        26431, 26719, 27010, 27304, 27602, 27902, 28206, 28513, 28824, 29138, 29455, 29776, 30100, 30428,
        30759, 31094, 31432, 31775, 32121, 32471, 32824, 33182, 33543, 33908, 34277, 34651, 35028, 35409,
        35795, 36185, 36579, 36977, 37380, 37787, 38198, 38614, 39035, 39460, 39889, 40324, 40763, 41207,
        41655, 42109, 42568, 43031, 43500, 43973, 44452, 44936,
    ),
    (
        494, 501, 506, 511, 518, 521, 527, 532, 541, 546, 551, 559, 564, 568, 577, 583, 589, 596, 600, 609,
        615, 622, 627, 633, 641, 647, 655, 661, 670, 677, 686, 691, 699, 705, 715, 721, 730, 739, 748, 753,
        763, 773, 779, 787, 796, 806, 813, 822, 833, 842, 849, 858, 870, 877, 887, 896, 909, 917, 925, 938,
        946, 959, 969, 980,
    ),
    6114,
)
# fmt: on
"""``ex2.approx.ftz.f32`` of sm_90: for each 64th of [1, 2) the coefficients of its quadratic, and a constant.

Held to an H100 for all float32 of 2^-30 <= |x| < 128, and to a table that an H200 gave.
"""
