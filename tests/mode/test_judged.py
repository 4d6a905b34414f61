"""Every operator of PyTorch's has a rule in the mode, or was judged safe for a reason (``judged.py``)."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload

from samebits.mode import UncoveredError, batch_invariant, set_batch_invariant_mode
from samebits.mode.internals import PATTERNS, fits, operator
from samebits.mode.operators import operator_rules
from samebits.testing import assert_same_bits
from tests.mode import judged


@functools.cache
def operators() -> list[OpOverload]:
    """PyTorch's own: this process may have loaded libraries that have operators of theirs."""
    code = "import torch; print(*torch._C._dispatch_get_all_op_names())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [operator(name) for name in found.stdout.split()]


OF_OTHER_VERSIONS = {"aten::shallow_copy_data_", "prepacked::*"}


def test_every_operator_was_judged() -> None:
    rules = operator_rules()
    left = [
        op.name() for op in operators() if op not in rules and not any(g.holds(op) for g in judged.GROUPS)
    ]
    assert left == []


@pytest.mark.long
def test_every_pattern_is_of_some_operator() -> None:
    if not torch.__version__.startswith("2.13"):
        pytest.skip("patterns are of all versions of PyTorch")
    names = {op._schema.name for op in operators()}
    groups = [*PATTERNS.values(), *(g.patterns for g in judged.GROUPS if isinstance(g, judged.Names))]
    patterns = {p for group in groups for p in group.split()}
    idle = {p for p in patterns if not any(map(fits(p).fullmatch, names))}
    assert idle == OF_OTHER_VERSIONS
    assert [g.reason for g in judged.GROUPS if not any(map(g.holds, operators()))] == []


def elementwise() -> list[OpOverload]:
    return [
        op
        for op in operators()
        if judged.is_elementwise(op)
        and not op._schema.is_mutable
        and op._schema.arguments
        and op.namespace != "_test"
        and op.name() != "aten::where"  # of one tensor: places
    ]


# They take other arguments than tensors of one shape.
NOT_DRAWN = """
    aten::_masked_scale aten::_transform_bias_rescale_qkv aten::clamp aten::clip aten::dequantize.tensors
    aten::fake_quantize_per_* aten::fill.Tensor aten::glu* aten::masked_fill.* aten::nested_to_padded_tensor
    aten::new_* aten::nll_loss*_backward aten::quantize_per_* aten::where.Scalar*
    prims::conj_physical
"""
SHARDS = [7] * 18 + [5]


def drawn(argument: Any, dtype: torch.dtype, seed: int) -> Any:
    """A value for an argument of an elementwise operator. A tensor is a vector of ordinary numbers."""
    kind, name = str(argument.type), argument.name
    if kind in ("Tensor", "Optional[Tensor]"):
        x = torch.rand(sum(SHARDS), generator=torch.Generator().manual_seed(seed)) * 0.8 + 0.1
        if name in ("condition", "mask"):
            return x > 0.5
        return (x * 50).long() + 1 if dtype == torch.int64 else x.to(dtype)
    if name in ("reduction", "p", "n"):
        return int(name == "p")
    if argument.has_default_value():
        return argument.default_value
    number = 2 if dtype == torch.int64 else 0.75
    return {"number": number, "float": 0.75, "int": 0, "bool": False}.get(kind)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_elementwise_operators_do_not_look_at_an_elements_place(dtype: torch.dtype) -> None:
    wrong, not_drawn = [], []
    for op in elementwise():
        for kind in (dtype, torch.float32, torch.int64):  # some take no other ones
            arguments = {a.name: drawn(a, kind, i) for i, a in enumerate(op._schema.arguments)}
            try:
                with batch_invariant("error"):
                    whole = op(**arguments)
                    parts = [op(**shard) for shard in shards(arguments)]
                break
            except (RuntimeError, IndexError):
                continue
        else:
            not_drawn.append(op.name())
            continue
        if not same(whole, parts):
            wrong.append(op.name())
    assert wrong == []
    assert [name for name in not_drawn if not fits(NOT_DRAWN).fullmatch(name)] == []


def shards(arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    split = {name: x.split(SHARDS) for name, x in arguments.items() if isinstance(x, Tensor)}
    for i in range(len(SHARDS)):
        yield arguments | {name: parts[i] for name, parts in split.items()}


def same(whole: Any, parts: list[Any]) -> bool:
    several, *pieces = (list(x) if isinstance(x, (tuple, list)) else [x] for x in (whole, *parts))
    tensors = [i for i, x in enumerate(several) if isinstance(x, Tensor) and x.ndim and not x.is_quantized]
    joined = [(several[i], torch.cat([p[i] for p in pieces])) for i in tensors]
    return all(torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) for x, y in joined)


def test_pytorchs_own_gradients_look_at_it() -> None:
    """Else rules for them would be idle."""
    arguments = {"grad_output": torch.rand(131), "self": torch.rand(131)}
    whole, parts = (
        torch.ops.aten.mish_backward(**arguments),
        [torch.ops.aten.mish_backward(**shard) for shard in shards(arguments)],
    )
    assert not same(whole, parts)


def quantized(model: torch.nn.Module) -> torch.nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear, torch.nn.LSTM})


LINEAR = quantized(torch.nn.Sequential(torch.nn.Linear(64, 64)))
LSTM = quantized(torch.nn.Sequential(torch.nn.LSTM(8, 4)))
REPORTS: dict[str, Callable[[], Any]] = {
    "quantized.linear_dynamic": lambda: LINEAR(torch.randn(9, 64)),
    "aten.quantized_lstm": lambda: LSTM(torch.randn(3, 2, 8)),
    "torch._addmm_activation": lambda: torch._addmm_activation(
        torch.ones(4), torch.ones(3, 5), torch.ones(5, 4), use_gelu=True
    ),
    "torch.sparse.sampled_addmm": lambda: torch.sparse.sampled_addmm(
        torch.eye(3).to_sparse_csr(), torch.randn(3, 4), torch.randn(4, 3)
    ),
    "torch.histogramdd": lambda: torch.histogramdd(torch.randn(99, 2), [3, 3], weight=torch.rand(99)),
    "torch.quantize_per_tensor_dynamic": lambda: torch.quantize_per_tensor_dynamic(
        torch.randn(9), torch.quint8, False
    ),
    "aten.native_layer_norm_backward": lambda: torch.ops.aten.native_layer_norm_backward(
        *(torch.ones(2, 4),) * 2, [4], *(torch.ones(2, 1),) * 2, *(torch.ones(4),) * 2, [True] * 3
    ),
    "torch.scatter": lambda: torch.scatter(
        torch.zeros(3), 0, torch.tensor([0, 0]), torch.ones(2), reduce="add", out=torch.zeros(3)
    ),
    "torch._foreach_mm": lambda: torch._foreach_mm([torch.ones(2, 2)], [torch.ones(2, 2)]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REPORTS)
def test_it_is_reported(name: str) -> None:
    """In a context, and in the process."""
    if name == "torch._foreach_mm" and not hasattr(torch, "_foreach_mm"):
        pytest.skip("this PyTorch has none")
    REPORTS[name]()
    with batch_invariant("error"), pytest.raises(UncoveredError, match=name.replace(".", r"\.")):
        REPORTS[name]()
    with set_batch_invariant_mode(True, "error"), pytest.raises(UncoveredError):
        REPORTS[name]()


def test_it_is_not() -> None:
    with batch_invariant("error"):
        counts, _ = torch.histogramdd(torch.randn(99, 2), [3, 3])
        torch.scatter(torch.zeros(3), 0, torch.tensor([0, 1]), torch.ones(2), out=torch.zeros(3))
        x = torch.randn(9, 4, requires_grad=True)
        torch.nn.functional.max_pool1d(torch.nn.functional.pad(x, (1, 1), "reflect"), 2).sum().backward()
        assert_same_bits(torch.ops.prims.sum(x.detach(), [1]), x.detach().sum(1))
    assert counts.sum() == 99


@pytest.mark.parametrize("mode", [batch_invariant, lambda what: set_batch_invariant_mode(True, what)])
def test_autograd_may_call_them(mode: Callable[[str], Any]) -> None:
    """A forward without the mode has PyTorch's backward, which says nothing within."""
    layers = [torch.nn.LayerNorm(4), torch.nn.Conv1d(3, 3, 1), torch.nn.BatchNorm1d(3), torch.nn.GRU(4, 4)]
    for layer in layers:
        next(layer.parameters()).requires_grad_(False)  # its gradient is no tensor
    x = torch.randn(9, 3, 4, requires_grad=True)

    def gradients(within: bool) -> list[Tensor | None]:
        losses = [layer(x) for layer in layers]
        losses = [y[0] if isinstance(y, tuple) else y for y in losses]
        wanted = [p for layer in layers for p in (x, *layer.parameters()) if p.requires_grad]
        with mode("error") if within else contextlib.nullcontext():
            return torch.autograd.grad([y.sin().mean() for y in losses], wanted)

    for mine, theirs in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_new_operators_are_found() -> None:
    """What fits no group and has no rule is left over."""
    library = torch.library.Library("samebits_tests_judged", "DEF")
    library.define("multiplied(Tensor a, Tensor b) -> Tensor")
    op = torch.ops.samebits_tests_judged.multiplied.default
    assert isinstance(op, OpOverload)
    assert op not in operator_rules()
    assert not any(g.holds(op) for g in judged.GROUPS)
