"""What the mode changes in PyTorch's internals: it is undone, and errors say what has changed in PyTorch."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import Variable
from torch.backends import mha
from torch.utils.checkpoint import CheckpointFunction, _CheckpointFrame

import samebits
from samebits.backends import modes
from samebits.mode import kernels, patches
from samebits.mode.patches import ChangedError

Break = Callable[[pytest.MonkeyPatch], object]


def changed() -> list[Any]:
    """All that the changes replace."""
    return [
        Variable._execution_engine,
        CheckpointFunction.forward,
        _CheckpointFrame.__init__,
        mha.get_fastpath_enabled,
        [*sys.meta_path],
        [*torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS],
        [repr(op.non_fallthrough_keys) for op in torch._ops._higher_order_ops.values()],
        torch._C._dispatch_dump("aten::relu"),
        torch._C._dispatch_dump("aten::nextafter"),
    ]


@pytest.fixture
def outside() -> Iterator[None]:
    """Nothing is changed. Afterwards all is, since other tests have registered kernels."""
    patches.uninstall()
    yield
    patches.uninstall()
    patches.install()


class _Deaf(list[Any]):
    def insert(self, *given: Any) -> None:
        self.append(given[-1])


def _other(*args: Any, **kwargs: Any) -> Any:
    """In place of a function: it does something else."""


class _All:
    def __contains__(self, code: Any) -> bool:
        return True


def _put(of: Any, name: str, value: Any) -> Break:
    return lambda monkeypatch: monkeypatch.setattr(of, name, value)


_frame = type("_CheckpointFrame", (), {"__init__": _other})  # it keeps nothing
_hook = type("_checkpoint_hook", (), {"__init__": lambda self: None})
_function = SimpleNamespace(forward=None, apply=CheckpointFunction.apply)
_kernel = SimpleNamespace(call_boxed=lambda keys, x, y: x)

BREAKS: dict[str, tuple[str, Break]] = {
    "keys are not included": ("dispatcher's keys.*not called", _put(patches, "include", _other)),
    "no fallback": ("dispatcher's keys", _put(torch.library.Library, "fallback", _other)),
    "functions": ("keys.*HigherOrderOperator", _put(torch._ops.HigherOrderOperator, "fallthrough", _other)),
    "another kernel": ("kernels of.*not called", _put(torch.library, "get_kernel", lambda *of: _kernel)),
    "no kernel": ("kernels of.*get_kernel", lambda m: m.delattr(torch.library, "get_kernel")),
    "another engine": ("engine.*do not ask", _put(torch.autograd, "_engine_run_backward", _other)),
    "numbers of nodes": ("nodes.*sequence_nr", _put(patches, "_NUMBER", patches._NUMBER + 8)),
    "threads of nodes": ("nodes.*thread_id", _put(patches, "_THREAD", patches._THREAD - 8)),
    "a new layout": ("nodes.*laid out", _put(patches, "_NUMBER", 0)),
    "re-entrant": ("checkpointing.*CheckpointFunction", _put(patches, "CheckpointFunction", _function)),
    "checkpoints": ("checkpointing.*recompute_fn", _put(patches, "_CheckpointFrame", _frame)),
    "how checkpoints run": ("checkpointing.*not used", _put(patches, "_checkpoint_hook", _hook)),
    "fast paths": (r"fast paths.*MultiheadAttention", _put(nn.MultiheadAttention, "forward", lambda self: 0)),
    "the compiler's cache": ("the cache of", _put(patches.AUTOGRAD_CACHE, "_put", _other)),
    "imports": ("the import of modules", lambda m: m.setattr(sys, "meta_path", _Deaf(sys.meta_path))),
}


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize("name", BREAKS)
def test_what_has_changed_in_pytorch_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both forms of the mode raise the error, and nothing stays changed."""
    match, break_it = BREAKS[name]
    break_it(monkeypatch)
    before = changed()
    monkeypatch.setattr(kernels, "_libraries", {})
    for form in (samebits.batch_invariant, samebits.set_batch_invariant_mode):
        with pytest.raises(ChangedError, match=rf"PyTorch {re.escape(torch.__version__)} .*{match}"), form():
            pass
        assert changed() == before
    assert not samebits.is_batch_invariant_mode_enabled()


BREAKS_OF_THE_ENGINE: dict[str, tuple[str, Break]] = {
    "its callers": ("call kernels as expected", _put(patches, "_CALLERS", ())),
    "kernels of Python": ("look alike", _put(patches, "_CALLERS", _All())),
    "the node": ("another node", _put(torch._C, "_current_autograd_node", torch._C._functions.UndefinedGrad)),
    "the task": ("call kernels as expected", _put(torch._C, "_current_graph_task_id", lambda: -1)),
}


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize("name", BREAKS_OF_THE_ENGINE)
def test_the_engine_is_tried_in_the_first_backward(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    match, break_it = BREAKS_OF_THE_ENGINE[name]
    with samebits.batch_invariant("ignore"):
        pass  # registers, if no other test has
    patches.install()
    w = torch.ones(3, requires_grad=True)
    with samebits.batch_invariant("error"):
        y = (torch.ones(2, 3) + w).sum()
    with monkeypatch.context() as broken:
        break_it(broken)
        for _ in range(2):
            with pytest.raises(ChangedError, match=f"autograd's engine: .*{match}"):
                y.backward()
    assert w.grad is None
    y.backward()
    assert w.grad is not None


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize("context", [False, True])
def test_the_engine_is_tried_in_the_mode_of_the_process(context: bool) -> None:
    w = torch.ones(3, requires_grad=True)
    patches.install()
    inner = samebits.batch_invariant("error") if context else nullcontext()
    with samebits.set_batch_invariant_mode(True, "error"), inner:
        (torch.ones(2, 3) + w).sum().backward()
    assert patches._Engine.tried
    assert w.grad is not None


OUTSIDE = """
import samebits, torch
w = torch.ones(3, requires_grad=True)
with samebits.set_batch_invariant_mode(True, "error"):  # no context was ever entered
    y = (torch.ones(2, 3) + w).sum()
y.backward()
assert w.grad is not None
"""


@pytest.mark.long
def test_a_first_backward_after_the_mode_of_the_process() -> None:
    subprocess.run([sys.executable, "-c", OUTSIDE], check=True)


def test_a_stance_that_pytorch_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "set_stance", lambda stance: None)
    with pytest.raises(ChangedError, match="set_stance"):
        patches.run_eagerly()


@pytest.mark.usefixtures("outside")
def test_all_is_undone() -> None:
    before = changed()
    patches.install()
    inside = changed()
    assert all(a != b for a, b in zip(inside[:-2], before[:-2], strict=True))
    patches.install()  # once
    assert changed() == inside
    patches.uninstall()
    assert changed() == before


@pytest.mark.usefixtures("outside")
def test_the_trials_take_milliseconds() -> None:
    patches.install()
    patches.uninstall()
    start = time.perf_counter()
    patches.install()
    assert time.perf_counter() - start < 1


def test_keys_that_pytorch_does_not_have() -> None:
    with pytest.raises(ImportError, match=r"no key TESTING_ONLY_Nothing .*2\.11\.0"):
        modes.dispatch_key("TESTING_ONLY_Nothing")
