"""What a context does not cover does not pass through Python."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from samebits.mode import batch_invariant, kernels
from samebits.mode.operators import operator_rules

CALLS: dict[str, Callable[[Tensor], Any]] = {
    "view": lambda x: x.view(-1),
    "relu": lambda x: x.relu(),
    "cat": lambda x: torch.cat((x, x)),
    "where": lambda x: torch.where(x > 0, x, x),
    "transpose": lambda x: x.transpose(0, 1),
    "slices": lambda x: x[:, 1:],
    "to": lambda x: x.to(torch.bfloat16),
    "maximum": lambda x: torch.maximum(x, x),
}


def _python(call: Callable[[Tensor], Any], x: Tensor) -> list[str]:
    """The Python functions that run in a call, and those of C that they call."""
    seen: list[str] = []

    def profile(frame: Any, event: str, arg: Any) -> None:
        if event == "call":
            seen.append(frame.f_code.co_qualname)
        elif event == "c_call":
            seen.append(arg.__qualname__)

    call(x)
    sys.setprofile(profile)
    try:
        call(x)
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("records", [False, True])
def test_a_call_runs_no_python_that_it_did_not_run_before(name: str, records: bool) -> None:
    with batch_invariant("error"):
        pass  # registers, once
    x = torch.randn(4, 5, requires_grad=records)
    before = _python(CALLS[name], x)
    with batch_invariant("error"):
        assert _python(CALLS[name], x) == before


def test_a_covered_call_does() -> None:
    with batch_invariant("error"):
        assert len(_python(lambda x: x.softmax(-1), torch.randn(3, 4))) > 5


def test_beside_a_gpu_only_covered_operators_have_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that have a rule for CPU tensors alone do not."""
    registered: list[tuple[str, str]] = []

    class Library:
        def __init__(self, *kind: str) -> None:
            pass

        def impl(self, op: Any, kernel: Any, key: str, **options: Any) -> None:
            registered.append((str(op), key))

    monkeypatch.setattr(torch.library, "Library", Library)
    monkeypatch.setattr(kernels, "_libraries", {})
    monkeypatch.setattr(kernels, "_beside_a_gpu", lambda: True)
    monkeypatch.setattr(kernels, "HIGHER_ORDER", [])
    kernels._context_kernels()
    in_contexts = {op for op, key in registered if key == "TESTING_ONLY_GenericMode"}
    covered = {str(op) for op, rule in operator_rules().items() if "CUDA" in rule.keys or not rule.keys}
    optimizers = ("adagrad", "adam", "adamw", "sgd")  # whose steps come before what DTensor does
    steps = {op for op in in_contexts if op.startswith(tuple(f"aten._fused_{name}_." for name in optimizers))}
    assert in_contexts - steps == covered
    assert len(steps) == 8
    assert not in_contexts & {"aten.add.Tensor", "aten.mul.Tensor", "aten.tanh.default", "aten.view.default"}
