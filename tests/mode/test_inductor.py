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
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import samebits
from samebits.mode import inductor
from samebits.mode.constant_masks import without_causal_masks
from samebits.testing import assert_same_bits, values

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
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.nightly)], ids=str
)
def test_a_layer(dtype: torch.dtype, device: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    leaves = [torch.randn(n, 333, device=device, dtype=dtype) for n in (7, 1, 40)]
    leaves[0][0, :9] = torch.tensor([0.0, -0.0, 1e-30, -1e-38, 3e38, 1e-42, -1, 65504, 2**-24])
    leaves = [t.requires_grad_() for t in leaves]
    got = results(torch.compile(layer, fullgraph=True), leaves)
    for i, (g, w) in enumerate(zip(got, results(layer, leaves), strict=True)):
        assert_same_bits(g, w, f"result {i}")


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("of", ["glu", "parts"])
def test_gradients_of_views(of: str, dynamic: bool) -> None:
    """Of halves of a gated unit, and of what is no whole tensor: they are laid out as a graph was told."""
    torch._dynamo.reset()

    def halves(x: Tensor) -> list[Tensor]:
        return [F.glu(x * 0.7, 1), F.glu(x.transpose(1, 2), 2)]

    def parts(x: Tensor) -> list[Tensor]:
        first, second = x.transpose(1, 2).chunk(2, 2)
        return [first.exp() - 1, torch.atan2(first, second) * 2]

    run = {"glu": halves, "parts": parts}[of]
    x = values("normal", (3, 30, 37), torch.float32, 0).requires_grad_()
    want = results(run, [x])
    got = results(torch.compile(run, fullgraph=True, dynamic=dynamic), [x])
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
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


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))


def step(model: Any, run: Any, **given: Any) -> list[Tensor]:
    model.zero_grad()
    ids = torch.arange(40).view(2, 20) % 64
    out = run(ids, labels=ids, use_cache=False, **given)
    out.loss.backward()
    return [out.loss.detach(), out.logits.detach(), *(p.grad.clone() for p in model.parameters())]


PACKED = torch.cat([torch.arange(12), torch.arange(8)]).expand(2, -1)


@pytest.mark.long
@pytest.mark.parametrize("given", [{}, {"position_ids": PACKED}], ids=["causal", "packed"])
def test_a_model_has_no_mask_where_all_is_causal(given: dict[str, Tensor]) -> None:
    from torch._inductor import compile_fx

    torch._dynamo.reset()
    calls: list[Any] = []

    def seen(graph: torch.fx.GraphModule, *_: Any, **__: Any) -> Any:
        calls.extend(n for n in graph.graph.nodes if n.target is torch.ops.samebits.attention.default)
        return make_boxed_func(graph.forward)

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        return compile_fx.compile_fx(graph, inputs, inner_compile=seen)

    model = llama()
    with samebits.batch_invariant("error"):
        got, want = step(model, torch.compile(model, backend=backend), **given), step(model, model, **given)
    (call,) = calls
    assert (call.args[3] is None) == (not given)
    if not given:
        assert call.args[1].meta["val"].shape[2] == 2  # its keys are not repeated
    for i, (g, w) in enumerate(zip(got[:2], want[:2], strict=True)):
        assert_same_bits(g, w, f"result {i}")
    if not given:  # the gradients of packed keys are summed in another way, without the compiler too
        for i, (g, w) in enumerate(zip(got[2:], want[2:], strict=True)):
            assert_same_bits(g, w, f"gradient {i}")


def attention(mask: Callable[[int], Tensor | None], **named: Any) -> Callable[[Tensor], Tensor]:
    return lambda q: F.scaled_dot_product_attention(q, q, q, mask(q.shape[-2]), **named)


def some_rows(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril().logical_and(torch.arange(n) != 1)


@pytest.mark.parametrize(
    ("mask", "causal"),
    [
        (lambda n: torch.arange(n) <= torch.arange(n)[:, None], True),
        (lambda n: torch.ones(n, n, dtype=torch.bool).tril().expand(2, 3, -1, -1), True),
        (lambda n: torch.arange(n) < torch.arange(n)[:, None], False),
        (lambda n: torch.ones(n, n, dtype=torch.bool), False),
        (lambda n: torch.zeros(n, n), False),
        (lambda n: torch.rand(n, n) < 2, False),
        (some_rows, False),
    ],
    ids=["causal", "expanded", "strictly", "all", "float", "random", "hidden"],
)
def test_only_the_causal_mask_is_replaced(mask: Callable[[int], Tensor], causal: bool) -> None:
    torch._dynamo.reset()
    q, given = torch.ones(2, 3, 16, 8), []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        without_causal_masks(graph)
        (node,) = (n for n in graph.graph.nodes if n.target is F.scaled_dot_product_attention)
        given.append(node.kwargs.get("attn_mask", node.args[3] if len(node.args) == 4 else None))
        return graph.forward

    run = attention(mask)
    torch.testing.assert_close(torch.compile(run, backend=backend, fullgraph=True)(q), run(q))
    assert (given[0] is None) == causal


@pytest.mark.parametrize(("form", "causal"), [(torch.tril, True), (torch.triu, False)])
def test_masks_are_known_within_checkpoints(form: Callable[[Tensor], Tensor], causal: bool) -> None:
    torch._dynamo.reset()
    q, given = torch.ones(2, 3, 16, 8, requires_grad=True), []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        without_causal_masks(graph)
        parts = [part for part in graph.children() if isinstance(part, torch.fx.GraphModule)]
        nodes = [n for part in parts for n in part.graph.nodes if n.target is F.scaled_dot_product_attention]
        given.extend(n.kwargs.get("attn_mask", n.args[3] if len(n.args) == 4 else None) for n in nodes)
        return graph.forward

    def run(q: Tensor) -> Tensor:
        mask = form(torch.ones(16, 16, dtype=torch.bool))
        for _ in range(2):
            q = checkpoint(F.scaled_dot_product_attention, q, q, q, mask, use_reentrant=False)
        return q

    torch.testing.assert_close(torch.compile(run, backend=backend, fullgraph=True)(q), run(q))
    assert [mask is None for mask in given] == [causal] * 2


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


def test_constants_keep_their_sign() -> None:
    """Triton's code of a constant of -0 is 0, so what is computed of constants is an operator."""
    zeros = torch.zeros(2, 3)

    def run(x: Tensor) -> tuple[Tensor, ...]:
        aten = torch.ops.aten
        zero, negative = aten.full.default([2, 3], 0.0), aten.full.default([2, 3], -0.0)
        return aten.mul.Tensor(aten.view.default(zero, [3, 2]), -1.0), aten.add.Tensor(negative, x), zero + x

    graph = make_fx(run)(zeros)
    inductor._constants(graph.graph)
    graph.recompile()
    for got, want in zip(graph(-zeros), run(-zeros), strict=True):
        assert_same_bits(got, want)
    targets = [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
    assert targets.count("samebits.elementwise.default") == 2
    assert not any(inductor._is_negative_zero(x) for n in graph.graph.nodes for x in n.args)
    with samebits.batch_invariant("error"):
        assert "samebits.elementwise.default" in operators_of(lambda x: x * -0.0, -zeros)
