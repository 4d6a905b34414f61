"""Replacements of an engine's attributes: checked, and undone."""

from __future__ import annotations

from types import ModuleType

import pytest

from samebits.engines.hooks import Hooks, MovedError


class Base:
    def inherited(self, x: int) -> int:
        return x


class Layer(Base):
    def own(self, x: int, scale: int = 1) -> int:
        return x * scale

    @staticmethod
    def static(x: int) -> int:
        return x


def test_what_is_replaced_comes_back() -> None:
    before = dict(vars(Layer))
    module = ModuleType("engine")
    module.function = len  # type: ignore[attr-defined]
    hooks = Hooks("engine 1.0")
    hooks.replace(Layer, "own", lambda self, x, scale=1: -x, "self", "x")
    hooks.replace(Layer, "own", lambda self, x: 7)
    hooks.replace(Layer, "inherited", lambda self, x: -x, "self", "x")
    hooks.replace(Layer, "static", staticmethod(lambda x: -x), "x")
    hooks.replace(module, "function", max)
    assert (Layer().own(2), Layer().inherited(3), Layer.static(4)) == (7, -3, -4)
    assert (Base().inherited(3), module.function(1, 2)) == (3, 2)
    hooks.undo()
    assert dict(vars(Layer)) == before
    assert (Layer().own(2, 2), Layer().inherited(3), Layer.static(4)) == (4, 3, 4)
    assert module.function is len
    hooks.undo()  # of nothing


@pytest.mark.parametrize(
    ("name", "parameters", "said"),
    [
        ("gone", (), r"engine 1.0: .*Layer.gone: expected to exist"),
        ("own", ("self", "x", "bias"), r"Layer.own: expected a function of \(self, x, bias, ...\), got one"),
        ("inherited", ("x",), r"Layer.inherited: .*got one of \(self, x\)"),
    ],
)
def test_what_has_moved_is_named(name: str, parameters: tuple[str, ...], said: str) -> None:
    hooks = Hooks("engine 1.0")
    with pytest.raises(MovedError, match=said):
        hooks.replace(Layer, name, None, *parameters)
    assert "gone" not in vars(Layer)
    assert Layer().own(2, 3) == 6
