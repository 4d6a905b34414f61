"""``samebits bench``: speed beside PyTorch on the shapes of common models, with the right bits.

Times are medians over replays of CUDA graphs. The graphs rotate over enough operands to defeat the L2 cache.

Cases that are bound by arithmetic are also bound by power, and the clock follows the power of the last tenth
of a second. In these cases each contestant runs alone for that long before it is timed, as in a program that
uses no other, in two turns. In other cases the contestants take turns at each replay.

Attention runs beside PyTorch's fastest backend for the case, which a short race finds. Windows, packed
sequences and padding run beside samebits' own causal attention of as many pairs of queries and keys.

A case is not timed if its sampled rows differ from the universal kernel's or the reference's.
"""

from samebits.tools.bench.attention import bench_attention
from samebits.tools.bench.attention_cases import ATTENTION, AttentionCase, quick_attention
from samebits.tools.bench.attention_report import show_attention
from samebits.tools.bench.cases import CASES, BenchCase, quick
from samebits.tools.bench.measure import bench
from samebits.tools.bench.report import show

__all__ = [
    "ATTENTION",
    "CASES",
    "AttentionCase",
    "BenchCase",
    "bench",
    "bench_attention",
    "quick",
    "quick_attention",
    "show",
    "show_attention",
]
