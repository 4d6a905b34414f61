"""Kernels of Mamba's scan, compiled for a CPU: the reference's bits."""

from __future__ import annotations

import pytest
import torch

from samebits.backends.cuda import selective_scan as kernels
from samebits.backends.reference import selective_scan as reference
from samebits.testing import assert_same_bits, values
from tests.support import host_kernels
from tests.support.selective_scans import BF16, CASES, F32, SCHEDULE, Case, change, compare

pytestmark = host_kernels.needs_compiler


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    host_kernels.use(monkeypatch, kernels)


@pytest.mark.parametrize("name", CASES)
def test_scan_and_gradients(name: str) -> None:
    compare(CASES[name].operands(), CASES[name].schedule)


@pytest.mark.parametrize("how", ["steep", "growing", "infinite", "backwards"])
@pytest.mark.parametrize("name", ["packed", "channels"])
def test_decays_that_are_not_the_usual_ones(name: str, how: str) -> None:
    compare(change(CASES[name].operands(), how), CASES[name].schedule)


def test_one_channel_is_laid_out_once() -> None:
    """Its copy has tokens and channels side by side, and the others have to follow the copy."""
    given = Case(shape=(2, 1, 16, 1, 5)).operands()
    given["u"] = values("normal", (2, 1, 32), BF16, 1)[..., ::2]
    given |= {n: values("normal", (2, 16, 5), BF16, i)[..., :1].mT for i, n in enumerate(("delta", "z"))}
    compare(given, SCHEDULE)


def test_sums_over_blocks() -> None:
    """More blocks than a run has."""
    terms, of = values("cancel", (4, 2, 300, 4), F32, 1), torch.empty(2, 2, 4, 2, dtype=BF16)
    assert_same_bits(kernels._over_blocks(terms, of), reference._over_blocks(terms, of))


@pytest.mark.parametrize("name", [name for name in CASES if name != "no token" and CASES[name].cuts is None])
def test_steps(name: str) -> None:
    given = CASES[name].operands()
    at = {n: given[n][..., 0] if n in "uBC" else given[n] for n in ("u", "A", "B", "C", "D", "bias")}
    at |= {"delta": given["delta"][..., 0], "z": None if given["z"] is None else given["z"][..., 0]}
    states = values("normal", (len(at["u"]), *at["A"].shape), F32, 10)
    found = []
    for step in (reference.step, kernels.step):
        moved = states.clone()
        order = (at[n] for n in ("u", "delta", "A", "B", "C", "D", "z", "bias"))
        found.append((step(*order, moved, given["softplus"], 0.01, 0.5), moved))
    for got, want in zip(*found, strict=True):
        assert_same_bits(got, want)
