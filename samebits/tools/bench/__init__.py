"""``samebits bench``: speed beside PyTorch (cuBLAS) on the shapes of common models, with the right bits.

Times are medians over replays of CUDA graphs, which rotate over enough operands to defeat the L2 cache. Where
arithmetic is the bound, so is power, and the clock follows the power of the last tenth of a second. There
each contestant runs alone for as long before it is timed, as in a program that uses no other, in two turns;
elsewhere they take turns at each replay. No time is taken of a case whose sampled rows differ from the
universal kernel's or the reference's.
"""

from samebits.tools.bench.cases import CASES, BenchCase, quick
from samebits.tools.bench.measure import bench
from samebits.tools.bench.report import show

__all__ = ["CASES", "BenchCase", "bench", "quick", "show"]
