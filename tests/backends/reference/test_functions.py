"""exp and log of the reference: the specified bits, and the errors that docs/contract.md states."""

from __future__ import annotations

import numpy as np
import pytest

from samebits.backends.reference import logp_kernels as kernels
from tests.support import naive
from tests.support.ulps import worst


def patterns(first: float, last: float, step: int) -> np.ndarray:
    """Every `step`-th f32 from `first` to `last`."""
    low, high = (int(np.float32(x).view(np.uint32)) for x in (first, last))
    return np.arange(low, high, step, dtype=np.uint32).view(np.float32)


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.nightly), 31])
@pytest.mark.parametrize(("name", "bound"), [("exp", 0.89), ("log", 0.94)])
def test_exp_and_log_of_every_f32(name: str, bound: float, step: int) -> None:
    """Each night. Else of every 31st, some 35 million, whose worst is a little better than that of all."""
    assert bound - (0.01 if step == 1 else 0.1) < worst(name, step) < bound


def test_exp_and_log_at_their_ends() -> None:
    for x, y in ((0.0, 1.0), (-0.0, 1.0), (-87.7, 0.0), (-88.0, 0.0), (-1e30, 0.0), (-np.inf, 0.0)):
        assert float(kernels.exp(np.float32(x))) == y
        assert not np.signbit(kernels.exp(np.float32(x)))
    assert np.isnan(kernels.exp(np.float32(np.nan)))
    assert kernels.log(np.float32(1)) == 0
    assert kernels.log(np.float32(0)) == -np.inf
    assert np.isnan(kernels.log(np.float32(np.nan)))
    x = np.concatenate([patterns(-1e-9, -90, 3_000_017), patterns(1, 2**31, 800_011)])
    for v in x:
        assert kernels.exp(-abs(v)) == naive.exp32(-abs(v))
        assert kernels.log(abs(v)) == naive.log32(abs(v))
