"""The examples of generation and of reinforcement learning run, and show what they say."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import ROOT
from tests.support.devices import DEVICES

pytest.importorskip("transformers")
EXAMPLES = ROOT / "examples"


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])


def run(name: str, *args: Any) -> Any:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](*args)


# On a GPU, PyTorch's own results need larger models to change: benchmarks/models.py has them.
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_generate(architecture: str, dtype: str, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--architecture", architecture, "--dtype", dtype, "--tokens", "12", "--device", device]
    found = run("generate", arguments)
    assert [d.differing for d in found["samebits"]] == [0, 0, 0]
    assert [d.kl for d in found["samebits"]] == [0, 0, 0]
    assert device == "cuda" or found["PyTorch"][0].differing > 0
    assert capsys.readouterr().out.count("0 of 48 tokens differ, by up to 0.00e+00") >= 3


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
def test_grpo(device: str, tmp_path: Path) -> None:
    plot = tmp_path / "grpo.svg"
    runs = run("grpo", ["--steps", "3", "--device", device, "--plot", str(plot)])
    ours = runs["samebits"]
    assert ours.largest == [0] * 3
    assert ours.kl == [0] * 3
    assert ours.weights == runs["samebits, again"].weights
    assert device == "cuda" or max(runs["PyTorch"].largest) > 0
    assert plot.read_text().startswith("<?xml")


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
def test_trl_grpo(device: str) -> None:
    pytest.importorskip("trl", reason="the trl extra is not installed: pip install '.[trl]'")
    runs = run("trl_grpo", ["--steps", "3", "--device", device])
    ours = runs["samebits"]
    assert [(step.differing, step.off) for step in ours.steps] == [(0, 0)] * 3
    assert all(step.tokens > 0 for step in ours.steps)
    assert ours.weights == runs["samebits, again"].weights
    assert device == "cuda" or any(step.differing > 0 for step in runs["PyTorch"].steps)


@pytest.mark.long
@pytest.mark.parametrize(
    ("device", "ranks"),
    [
        pytest.param("cpu", 1, marks=pytest.mark.nightly),
        ("cpu", 2),
        pytest.param("cuda", 2, marks=pytest.mark.gpu),
    ],
)
def test_tensor_parallel(device: str, ranks: int) -> None:
    if torch.cuda.device_count() < ranks and device == "cuda":
        pytest.skip(f"needs {ranks} GPUs, got {torch.cuda.device_count()}")
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *launch, str(EXAMPLES / "tensor_parallel.py"), "--steps", "2"]
    hidden = {} if device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": paths, **hidden}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=600)
    assert done.returncode == 0, done.stderr
    ours = done.stdout.partition(f"samebits, TP {ranks} beside TP 1, on {device}")[2]
    assert ours.count(" 0 of 96 tokens differ, by up to 0.00e+00; KL 0.00e+00") == 2
    assert "\n  0 weights differ at the end" in ours
