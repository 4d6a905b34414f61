"""Code that inductor compiles under the mode has the bits of eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._ops import OpOverload

import samebits
from samebits.mode import inductor
from samebits.testing import assert_same_bits

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def layer(x: Tensor, weight: Tensor, matrix: Tensor) -> list[Tensor]:
    """A norm, a gate, quotients and sums, whose 16-bit parts are rounded in between."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    y = weight * scaled.to(x.dtype)
    z = F.linear(F.silu(y) * x + y * weight, matrix)
    there_and_back = (y.float() * 1.7 + wide).to(torch.bfloat16).float() - 0.3
    zeros = torch.zeros_like(x)
    return [F.elu(z) * torch.exp(z * 0.01) / 3, there_and_back, -zeros + x * 0, zeros - (-zeros)]


def results(run: Callable[..., list[Tensor]], leaves: list[Tensor]) -> list[Tensor]:
    with samebits.batch_invariant("error"):
        out = run(*leaves)
        total = sum((t.float() * t.float()).sum() for t in out)
        return [*out, *torch.autograd.grad(total, leaves)]


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_layer(dtype: torch.dtype, device: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    leaves = [torch.randn(n, 333, device=device, dtype=dtype) for n in (7, 1, 40)]
    leaves[0][0, :9] = torch.tensor([0.0, -0.0, 1e-30, -1e-38, 3e38, 1e-42, -1, 65504, 2**-24])
    leaves = [t.requires_grad_() for t in leaves]
    got = results(torch.compile(layer, fullgraph=True), leaves)
    for i, (g, w) in enumerate(zip(got, results(layer, leaves), strict=True)):
        assert_same_bits(g, w, f"result {i}")


def operators_of(run: Callable[..., Any], *args: Tensor) -> list[str]:
    """The operators that inductor is to compile."""
    from torch._inductor import compile_fx

    found: list[str] = []

    def seen(graph: torch.fx.GraphModule, *_: Any, **__: Any) -> Any:
        found.extend(str(n.target) for n in graph.graph.nodes if n.op == "call_function")
        return make_boxed_func(graph.forward)

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        return compile_fx.compile_fx(graph, inputs, inner_compile=seen)

    torch._dynamo.reset()
    torch.compile(run, backend=backend, fullgraph=True)(*args)
    return found


def around(run: Callable[..., Any]) -> Callable[..., Any]:
    def within(*args: Tensor) -> Any:
        with samebits.batch_invariant("error"):
            return run(*args)

    return within


def test_what_is_exact_is_fused_and_all_else_is_one_operator() -> None:
    x = torch.ones(3, 128)

    def run(x: Tensor) -> Tensor:
        return F.hardswish(x * x + 1 - (-x)) * F.leaky_relu(x)

    with samebits.batch_invariant("error"):
        outside = operators_of(run, x)
    for found in (outside, operators_of(around(run), x)):
        assert sum("elementwise" in name for name in found) == 2
        assert {name.split(".")[1] for name in found if name.startswith("aten.")} == {"mul", "add", "sub"}
    assert not any("samebits" in name for name in operators_of(run, x))


def test_a_sum_with_a_scale_is_one_operator() -> None:
    x = torch.ones(3, 128)
    with samebits.batch_invariant("error"):
        found = operators_of(lambda x: torch.add(x, x, alpha=3) + x.pow(2) + x.pow(3), x)
    assert sum("elementwise" in name for name in found) >= 2
    assert [name for name in found if "pow" in name] == ["aten.pow.Tensor_Scalar"]


def unary(op: OpOverload) -> bool:
    first, *rest = op._schema.arguments
    if op._schema.name in ("aten::clamp", "aten::clip"):  # they want a limit
        return False
    return str(first.type) == "Tensor" and all(a.has_default_value() for a in rest)


@pytest.mark.parametrize("op", [op for op in inductor._elementwise() if unary(op)], ids=str)
def test_every_function_of_one_tensor_computes_as_before(op: OpOverload) -> None:
    x = torch.linspace(-2, 2, 1024)
    if "bitwise" in op.name() or op.name() == "aten::__xor__":
        x = x.to(torch.int32)
    got = inductor._decomposed(op, op, x)
    assert_same_bits(got.to(torch.float32), op(x).to(torch.float32))


def test_other_settings_of_inductor_are_an_error() -> None:
    with (
        mock.patch.dict(inductor.SETTINGS, {"no_such_setting": True}),
        pytest.raises(RuntimeError, match="inductor's settings"),
    ):
        inductor._try_out(lambda config_patches, decompositions: None)
    with pytest.raises(RuntimeError, match="it takes no decompositions"):
        inductor._try_out(lambda config_patches: None)
