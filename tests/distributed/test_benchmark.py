"""The benchmark of several ranks runs, and finds no value of a step that differs from one rank's."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support import ROOT
from tests.support.ranks import needs_gloo


@pytest.mark.long
@needs_gloo
def test_benchmark() -> None:
    pytest.importorskip("transformers")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *launch, "-m", "benchmarks", "distributed", "--smoke", "--commit", "none"]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=env, cwd=ROOT, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert '"values that differ from one rank\'s": 0' in done.stdout
