"""The errors of exp and log, in units of the last place.

``python -m tests.support.ulps`` measures every float32.
"""

from __future__ import annotations

import numba
import numpy as np

from samebits.backends.reference.kernels import f32_to_bits
from samebits.backends.reference.logp_kernels import bits_to_f32, exp, log

RANGES = {"exp": (-1e-45, -87.68), "log": (1.0, 3e38)}


@numba.njit(nogil=True)
def _worst(is_exp: bool, low: int, high: int, step: int) -> float:
    worst = 0.0
    for pattern in range(low, high, step):
        x = bits_to_f32(np.uint32(pattern))
        wide = np.float64(x)
        exact = np.exp(wide) if is_exp else np.log(wide)
        if exact == 0.0:
            continue
        got = np.float64(exp(x) if is_exp else log(x))
        nearest = np.float32(exact)
        unit = np.float64(bits_to_f32(np.uint32(f32_to_bits(nearest) + 1))) - np.float64(nearest)
        worst = max(worst, abs(got - exact) / abs(unit))
    return worst


def worst(name: str, step: int) -> float:
    """The largest error over every `step`-th float32 of the function's range."""
    low, high = (int(np.float32(x).view(np.uint32)) for x in RANGES[name])
    return float(_worst(name == "exp", low, high, step))


if __name__ == "__main__":
    for function in RANGES:
        print(f"{function}: {worst(function, 1):.4f} ulp")
