"""``samebits tune``: which schedules are fastest on this GPU, kept in a file that chooses them from then on.

For each shape, the cost model's choice and the most plausible other schedules are timed as ``samebits bench``
times: medians over replays of CUDA graphs that rotate over operands, alone where arithmetic is the bound. A
schedule that is faster than the choice by more than the noise goes into the table. All give the same bits.
"""

from samebits.tools.tune.contest import Contest, Way
from samebits.tools.tune.measure import Outcome, decide, tune

__all__ = ["Contest", "Outcome", "Way", "decide", "tune"]
