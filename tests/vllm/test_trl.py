"""TRL's trainer with vLLM in its process: ``examples/trl_vllm.py`` shows what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT


@pytest.mark.long
def test_ratios_are_one_after_every_update(tmp_path: Path) -> None:
    for package in ("trl", "datasets"):
        pytest.importorskip(package, reason="the trl extra is not installed: pip install '.[trl]'")
    to = tmp_path / "runs.json"
    program = [sys.executable, str(ROOT / "examples" / "trl_vllm.py"), "--json", str(to)]
    sizes = ["--steps", "3", "--hidden", "64", "--answer", "8", "--device", "cpu", "--only", "samebits"]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*program, *sizes],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": paths},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    run = json.loads(to.read_text())["samebits"]
    assert [(s["differing"], s["off"], s["kl"]) for s in run["steps"]] == [(0, 0, 0)] * 3
    assert all(s["tokens"] > 16 for s in run["steps"])
