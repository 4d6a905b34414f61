"""Batches of any size in one graph: ``torch.compile(dynamic=True)`` and ``torch.export`` under the mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samebits.mode import batch_invariant, functions, rules
from samebits.testing import assert_same_bits, values

Call = Callable[[Tensor], Any]

V8, M88 = values("normal", (8,), torch.float32, 2), values("normal", (8, 8), torch.float32, 3)


class Tensors:
    """What the rules' examples take: a batch x[B, 6, 8], and others that do not depend on it."""

    w = values("normal", (5, 8), torch.float32, 1)
    v8, v6 = V8, values("normal", (6,), torch.float32, 2)
    m8, m6 = M88, values("normal", (6, 6), torch.float32, 3)
    taps = values("normal", (4, 6, 3), torch.float32, 4)
    triangle = torch.eye(6) * 4 + m6.tril()
    places = torch.tensor([3, 0, 3, 5, 1])

    def __init__(self, x: Tensor) -> None:
        self.x = x

    @property
    def pictures(self) -> Tensor:
        return self.x[:, :, None, :].repeat(1, 1, 4, 1)

    @property
    def clips(self) -> Tensor:
        return self.x[:, :, None, None, :].repeat(1, 1, 4, 4, 1)

    @property
    def batch_of_m8(self) -> Tensor:
        return self.m8.expand(self.x.shape[0], 8, 8)


def call_of(rule: rules.Rule) -> Call:
    return lambda x: rule.example(Tensors(x))


REPLACED = [rule for row in rules.REPLACED for rule in row.rules]
CALLS = {rule.name: call_of(rule) for rule in REPLACED if rule.example is not None}
NOT_HERE = {
    *("_grouped_mm", "_scaled_mm_v2", "_scaled_grouped_mm_v2"),  # of groups, whose sizes are no batch's
    *("gelu_", "silu_"),  # operators without a public function
}


WITHOUT_ROWS = {"dot", "msort", "_foreach_norm"}  # whose examples have no result for each row of the batch


def test_every_replacement_has_an_example() -> None:
    assert {rule.name for rule in REPLACED} - CALLS.keys() == NOT_HERE


def test_what_is_replaced_is_not_reported() -> None:
    reported = {name for names in rules.REPORTED.values() for name in names.split()}
    assert reported & {rule.name for rule in REPLACED} == set()


@pytest.mark.parametrize("name", sorted(CALLS.keys() - WITHOUT_ROWS))
def test_rows_of_an_example_do_not_depend_on_the_batch(name: str) -> None:
    with batch_invariant("error"):
        few, all_ = (run(lambda x: {"result": CALLS[name](x)}, FULL[:n]) for n in (3, 40))
    assert len(all_["result"]) == 40
    assert_equal(few, {n: y[:3] for n, y in all_.items()})


def elementwise() -> dict[str, Call]:
    """Those of one tensor, of two, of a tensor and a number, or of three."""
    found: dict[str, Call] = {}
    names = [rule.name for rule in rules.ELEMENTWISE if rule.each_operator is not None]
    for name in (n for n in names if not n.startswith("__")):
        f = next(iter(functions.named(name)))
        calls: dict[str, Call] = {
            name: lambda x, f=f: f(x),  # type: ignore[misc]
            f"{name} of two": lambda x, f=f: f(x, x + 0.25),  # type: ignore[misc]
            f"{name} of a number": lambda x, f=f: f(x, 0.75),  # type: ignore[misc]
        }
        if name in ("addcmul", "addcdiv", "lerp"):
            calls = {name: lambda x, f=f: f(x, x + 0.25, x + 0.5)}  # type: ignore[misc]
        for of, call in calls.items():
            leaf = torch.full((2, 6, 8), 0.4, requires_grad=True)
            try:
                out = call(leaf)
            except (TypeError, RuntimeError):
                continue
            try:
                if name == "sgn":
                    raise RuntimeError("PyTorch's own gradient of it fixes all sizes")
                torch.autograd.grad(out, leaf, torch.ones_like(out))
                found[of] = call
            except RuntimeError:  # PyTorch has none
                found[of] = lambda x, call=call: call(x.detach())  # type: ignore[misc]
    found["gelu, tanh"] = lambda x: F.gelu(x, approximate="tanh")
    found["pow of a number"] = lambda x: 2.5**x + x**-0.5
    found["in place"] = lambda x: F.silu(x * 1, inplace=True) + (x * 1).exp_()
    found["broadcast"] = lambda x: torch.atan2(x, V8) + torch.hypot(x, x[:, :1])
    found["add, alpha"] = lambda x: torch.add(x, x.exp(), alpha=0.3)
    found["huber_loss"] = lambda x: F.huber_loss(x, x.detach() * 2, reduction="none", delta=0.1)
    return found


ELEMENTWISE = elementwise()


def groups() -> dict[str, dict[str, Call]]:
    """Functions that are traced together."""
    found: dict[str, dict[str, Call]] = {}
    for row in rules.REPLACED:
        names = [rule.name for rule in row.rules if rule.name in CALLS]
        if names:
            found[names[0]] = {n: CALLS[n] for n in names}
    names = list(ELEMENTWISE)
    for i in range(0, len(names), 24):
        found[f"elementwise {i}"] = {n: ELEMENTWISE[n] for n in names[i : i + 24]}
    return found


GROUPS = groups()


def half(odd: bool) -> list[Any]:
    """Groups, of which every second one of elementwise functions is nightly: the other test has it."""
    elementwise = [name for name in GROUPS if name.startswith("elementwise")]
    left = elementwise[not odd :: 2]
    return [pytest.param(name, marks=[pytest.mark.nightly] if name in left else []) for name in GROUPS]


FULL = torch.rand(40, 6, 8, generator=torch.Generator().manual_seed(0)) * 0.9 + 0.05
BATCHES = (11, 13, 40)  # which are no other sizes


def flat(results: dict[str, Any]) -> dict[str, Tensor]:
    return {n: torch.view_as_real(y) if y.is_complex() else y for n, y in results.items()}


def run(f: Callable[[Tensor], dict[str, Any]], x: Tensor) -> dict[str, Tensor]:
    """Results, and their gradient."""
    leaf = x.detach().requires_grad_()
    found = flat(f(leaf))
    wanted = [y for y in found.values() if y.requires_grad]
    gradient = torch.autograd.grad(wanted, leaf, [torch.ones_like(y) for y in wanted])[0] if wanted else x
    return {n: y.detach() for n, y in found.items()} | {"gradient": gradient}


def assert_equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    for name, y in want.items():
        if y.is_floating_point() and y.dtype != torch.float64:
            assert_same_bits(got[name], y, name)
        else:
            assert torch.equal(got[name], y), name


@pytest.mark.parametrize("name", half(odd=False))
def test_one_graph_takes_all_batches(name: str) -> None:
    calls = GROUPS[name]
    if "upsample_linear1d" in calls and torch.__version__.startswith("2.11."):
        pytest.skip("PyTorch 2.11 refuses sizes that a tensor beside the graph has")
    torch._dynamo.reset()

    def f(x: Tensor) -> dict[str, Any]:
        return {n: call(x) for n, call in calls.items()}

    compiled = torch.compile(f, backend="aot_eager", dynamic=True, fullgraph=True)
    with batch_invariant("error"), torch._dynamo.config.patch(error_on_recompile=True):
        for batch in BATCHES:
            x = FULL[:batch]
            torch._dynamo.mark_dynamic(x, 0)
            want = run(f, x)
            assert_equal(run(compiled, x), want)


class Model(nn.Module):
    def __init__(self, calls: dict[str, Call]) -> None:
        super().__init__()
        self.calls = calls

    def forward(self, x: Tensor) -> dict[str, Any]:
        with batch_invariant("error"):
            return {n: call(x) for n, call in self.calls.items()}


@pytest.mark.parametrize("name", half(odd=True))
def test_an_exported_graph_takes_all_batches(name: str) -> None:
    model = Model(GROUPS[name])
    batch = torch.export.Dim("batch", min=2, max=64)
    with torch.no_grad():
        exported = torch.export.export(model, (FULL[: BATCHES[0]],), dynamic_shapes=({0: batch},)).module()
        for n in BATCHES[1:]:
            assert_equal(flat(exported(FULL[:n])), flat(model(FULL[:n])))


def test_a_strict_export_is_refused() -> None:
    """It does not show Python's operators to the context, so they would be PyTorch's, silently."""
    model = Model({"@": CALLS["__matmul__"]})
    with pytest.raises(Exception, match=r"torch.export: expected strict=False"):
        torch.export.export(model, (FULL,), strict=True)
