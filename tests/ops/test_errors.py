"""Bad input is refused before any work, by an error that names the argument, the wish and what came."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import samebits
from samebits import TENSOR_CORE
from samebits.testing import assert_same_bits

f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16


def t(*shape: int, dtype: torch.dtype = f32, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, device=device).to(dtype)


matmul, addmm_, linear, bmm = samebits.matmul, samebits.addmm_, samebits.linear, samebits.bmm
grouped_mm = samebits.grouped_mm
logp, linear_logp = samebits.logp, samebits.linear_logp
cu = torch.tensor
SHARED, SHARED3 = t(4, 3), t(3, 2, 4)
ENDS = torch.tensor([2, 2, 7], dtype=torch.int32)

CASES: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    # ranks and shapes
    (matmul, (t(), t(3)), {}, ValueError, "a, b: expected at least 1-D, got shapes () and (3,)"),
    (matmul, (t(2, 3), t(4, 5)), {}, ValueError, "got 3 and 4 of shapes (2, 3) and (4, 5)"),
    (matmul, (t(3), t(4)), {}, ValueError, "inner dimensions must be equal, got 3 and 4"),
    (matmul, (t(2, 2, 3), t(3, 3, 4)), {}, ValueError, "batch dimensions must be equal or 1"),
    (bmm, (t(2, 3), t(3, 4)), {}, ValueError, "expected 3-D, or one 3-D and one 2-D"),
    (bmm, (t(2, 2, 3, 3), t(2, 3, 4)), {}, ValueError, "expected 3-D"),
    (bmm, (t(2, 2, 3), t(3, 3, 4)), {}, ValueError, "got shapes (2, 2, 3) and (3, 3, 4)"),
    (bmm, (t(2, 2, 3), t(2, 4, 4)), {}, ValueError, "inner dimensions must be equal, got 3 and 4"),
    (linear, (t(), t(4, 3)), {}, ValueError, "x: expected at least 1-D"),
    (linear, (t(2, 3), t(3)), {}, ValueError, "weight: expected [out_features, in_features], got shape (3,)"),
    (linear, (t(2, 3), t(3, 4)), {}, ValueError, "got 3 and 4 of shapes (2, 3) and (3, 4)"),
    (linear, (t(2, 3), t(4, 3), t(3)), {}, ValueError, "bias: expected shape (4,)"),
    (linear, (t(2, 3), t(4, 3), t(4, 1)), {}, ValueError, "bias: expected shape (4,), (1,) or ()"),
    (linear, (t(2, 3), t(4, 3), t(1, 1)), {}, ValueError, "bias: expected shape (4,), (1,) or ()"),
    (addmm_, (t(2, 4), t(2, 3), t(5, 4)), {}, ValueError, "inner dimensions must be equal, got 3 and 5"),
    (addmm_, (t(2, 5), t(2, 3), t(3, 4)), {}, ValueError, "acc: expected shape (2, 4), got (2, 5)"),
    (addmm_, (t(4), t(2, 3), t(3, 4)), {}, ValueError, "acc: expected shape (2, 4), got (4,)"),
    (addmm_, (t(1, 2, 4), t(1, 2, 3), t(3, 4)), {}, ValueError, "a, b: expected 2-D"),
    (grouped_mm, (t(8), t(3, 2, 4), ENDS), {}, ValueError, "a, b: expected 2-D or 3-D, got shapes (8,)"),
    (grouped_mm, (t(8, 3), t(3, 2, 4), ENDS), {}, ValueError, "inner dimensions must be equal, got 3 and 2"),
    (grouped_mm, (t(8, 2), t(3, 2, 4)), {}, ValueError, "offs: expected the groups' ends for a (8, 2)"),
    (grouped_mm, (t(3, 8, 2), t(3, 2, 4), ENDS), {}, ValueError, "offs: expected None for 3-D a and b"),
    (grouped_mm, (t(2, 8, 2), t(3, 2, 4)), {}, ValueError, "numbers of groups must be equal, got shapes (2"),
    (grouped_mm, (t(8, 2), t(2, 2, 4), ENDS), {}, ValueError, "offs: expected shape (2,), one end for every"),
    (grouped_mm, (t(8, 2), t(3, 2, 4), ENDS[None]), {}, ValueError, "offs: expected shape (3,), one end for"),
    (grouped_mm, (t(2, 8), t(8, 4), ENDS[None]), {}, ValueError, "offs: expected 1-D, got shape (1, 3)"),
    (
        grouped_mm,
        (t(8, 2), t(3, 2, 4), ENDS.long()),
        {},
        TypeError,
        "offs: expected dense int32, got torch.in",
    ),
    (grouped_mm, (t(8, 2), t(3, 2, 4), [2, 2, 7]), {}, TypeError, "offs: expected a Tensor, got list"),
    (grouped_mm, (t(8, 2), t(3, 2, 4), ENDS.to("meta")), {}, ValueError, "offs: expected device cpu like a"),
    (
        grouped_mm,
        (t(8, 2), t(3, 2, 4), ENDS + 2),
        {},
        ValueError,
        "from 0 to 8 at most (the number of rows), got 9",
    ),
    (grouped_mm, (t(8, 2), t(3, 2, 4), ENDS.flip(0)), {}, ValueError, "got 2 after 7 at position 1"),
    (grouped_mm, (t(8, 2), t(3, 2, 4), ENDS - 3), {}, ValueError, "got -1 after 0 at position 0"),
    (grouped_mm, (t(2, 8), t(8, 4), ENDS + 2), {}, ValueError, "offs: expected ends that never decrease"),
    (
        grouped_mm,
        (t(8, 2), t(3, 2, 4), ENDS),
        {"bias": t(4)},
        ValueError,
        "bias: expected shape (3, 4) for b",
    ),
    (grouped_mm, (t(2, 8), t(8, 4), ENDS), {"bias": t(3, 4)}, ValueError, "bias: expected None unless a is"),
    (grouped_mm, (t(3, 8, 2), t(3, 2, 4)), {"main_grad": t(3, 2, 4)}, ValueError, "main_grad: expected None"),
    (
        grouped_mm,
        (t(3, 8, 2), t(3, 2, 4)),
        {"sequences": ENDS},
        ValueError,
        "sequences: expected None without",
    ),
    (
        grouped_mm,
        (t(8, 2), t(3, 2, 4), ENDS),
        {"sequences": ENDS},
        ValueError,
        "expected shape (8,), one for",
    ),
    (grouped_mm, (t(2, 8), t(8, 4), ENDS), {"sequences": t(8)}, TypeError, "sequences: expected dense int32"),
    (
        grouped_mm,
        (t(8, 2), t(3, 2, 4), ENDS),
        {"main_grad": t(3, 4, 2)},
        ValueError,
        "main_grad: expected shape",
    ),
    (
        grouped_mm,
        (t(8, 2), t(3, 2, 4), ENDS),
        {"main_grad": t(3, 2, 4, dtype=bf16)},
        TypeError,
        "main_grad: exp",
    ),
    (
        grouped_mm,
        (t(8, 2), SHARED3, ENDS),
        {"main_grad": SHARED3},
        ValueError,
        "main_grad: expected memory of",
    ),
    # kinds of tensors
    (matmul, ([[1.0]], t(1, 1)), {}, TypeError, "a: expected a Tensor, got list"),
    (linear, (t(2, 3), None), {}, TypeError, "weight: expected a Tensor, got NoneType"),
    (matmul, (t(2, 2).to_sparse(), t(2, 2)), {}, TypeError, "a: expected a dense (strided) tensor"),
    (matmul, (t(2, 2, dtype=torch.float64),) * 2, {}, TypeError, "got torch.float64"),
    (matmul, (t(2, 2, dtype=torch.int32),) * 2, {}, TypeError, "got torch.int32"),
    (matmul, (t(2, 2, dtype=torch.float8_e4m3fn),) * 2, {}, TypeError, "got torch.float8_e4m3fn"),
    (matmul, (t(2, 2, dtype=torch.complex64),) * 2, {}, TypeError, "got torch.complex64"),
    (matmul, (t(2, 2), t(2, 2, dtype=bf16)), {}, TypeError, "b: expected torch.float32 like a, got torch.bf"),
    (linear, (t(2, 3, dtype=f16), t(4, 3, dtype=f16), t(4)), {}, TypeError, "bias: expected torch.float16"),
    (matmul, (t(2, 2), t(2, 2, device="meta")), {}, ValueError, "b: expected device cpu like a, got meta"),
    (addmm_, (t(2, 2, device="meta"), t(2, 2), t(2, 2)), {}, ValueError, "acc: expected device cpu like a"),
    (addmm_, (t(2, 2, dtype=bf16), t(2, 2), t(2, 2)), {}, TypeError, "acc: expected a dense float32 tensor"),
    (addmm_, (None, t(2, 2), t(2, 2)), {}, TypeError, "acc: expected a dense float32 tensor, got NoneType"),
    (addmm_, (torch._neg_view(t(2, 2)), t(2, 2), t(2, 2)), {}, TypeError, "got a view with negated elements"),
    # contract and output dtype
    (matmul, (t(2, 2),) * 2, {"contract": TENSOR_CORE}, TypeError, "a: contract TENSOR_CORE takes"),
    (
        matmul,
        (t(2, 2),) * 2,
        {"contract": "FMA"},
        TypeError,
        "contract: expected a samebits.Contract, got str",
    ),
    (matmul, (t(2, 2),) * 2, {"out_dtype": bf16}, TypeError, "out_dtype: expected torch.float32, got"),
    (bmm, (t(1, 2, 2, dtype=f16),) * 2, {"out_dtype": bf16}, TypeError, "out_dtype: expected torch.float16"),
    (matmul, (t(2, 2),) * 2, {"out_dtype": "float32"}, TypeError, "expected torch.float32, got 'float32'"),
    (matmul, (torch.nested.nested_tensor([t(2, 2)]), t(2, 2)), {}, TypeError, "got a nested one"),
    # cu_seqlens
    (
        linear,
        (t(4, 3), t(4, 3)),
        {"cu_seqlens": [0, 4]},
        TypeError,
        "cu_seqlens: expected a Tensor, got list",
    ),
    (
        linear,
        (t(4, 3), t(4, 3)),
        {"cu_seqlens": t(2)},
        TypeError,
        "expected int32 or int64, got torch.float32",
    ),
    (linear, (t(4, 3), t(4, 3)), {"cu_seqlens": cu([[0, 4]])}, ValueError, "expected 1-D, got shape (1, 2)"),
    (linear, (t(4, 3), t(4, 3)), {"cu_seqlens": cu([0, 4], device="meta")}, ValueError, "device cpu like x"),
    (linear, (t(2, 2, 3), t(4, 3)), {"cu_seqlens": cu([0, 4])}, ValueError, "x: with cu_seqlens expected"),
    (linear, (t(3), t(4, 3)), {"cu_seqlens": cu([0, 1])}, ValueError, "x: with cu_seqlens expected"),
    (
        linear,
        (t(4, 3), t(4, 3)),
        {"cu_seqlens": cu([], dtype=torch.int32)},
        ValueError,
        "at least one offset",
    ),
    (linear, (t(4, 3), t(4, 3)), {"cu_seqlens": cu([1, 4])}, ValueError, "from 0 to 4"),
    (linear, (t(4, 3), t(4, 3)), {"cu_seqlens": cu([0, 3])}, ValueError, "got 0 to 3"),
    (linear, (t(4, 3), t(4, 3)), {"cu_seqlens": cu([0, 5])}, ValueError, "got 0 to 5"),
    (linear, (t(4, 3), t(4, 3)), {"cu_seqlens": cu([0, 3, 2, 4])}, ValueError, "got 3 then 2 at positions 1"),
    (linear, (t(4, 3), t(4, 3)), {"cu_seqlens": cu([0, -1, 4])}, ValueError, "got 0 then -1"),
    # log-probabilities
    (logp, (t(), cu(0)), {}, ValueError, "logits: expected [..., V] with V > 0, got shape ()"),
    (logp, (t(2, 0), cu([0, 0])), {}, ValueError, "logits: expected [..., V] with V > 0, got shape (2, 0)"),
    (logp, (t(2, 3), cu([0])), {}, ValueError, "target: expected shape (2,) for logits (2, 3), got (1,)"),
    (logp, (t(2, 3), [0, 1]), {}, TypeError, "target: expected a Tensor, got list"),
    (logp, (t(2, 3), t(2)), {}, TypeError, "target: expected int64 or int32, got torch.float32"),
    (logp, (t(2, 3), cu([0, 0], device="meta")), {}, ValueError, "target: expected device cpu like logits"),
    (
        logp,
        (t(2, 3), cu([0, 0])),
        {"ignore_index": None},
        TypeError,
        "ignore_index: expected an int, got None",
    ),
    (logp, (t(2, 3), cu([0, 3])), {}, IndexError, "or a value in [0, 3), got 3 at position 1"),
    (logp, (t(1, 2, 3), cu([[0, -1]])), {}, IndexError, "got -1 at position (0, 1)"),
    (logp, (t(2, 3), cu([0, -100])), {"ignore_index": 2}, IndexError, "expected 2 (ignore_index) or a value"),
    (logp, (t(2, 3, dtype=torch.float64), cu([0, 0])), {}, TypeError, "logits: expected bfloat16"),
    (linear_logp, (t(), t(4, 3), cu(0)), {}, ValueError, "hidden: expected at least 1-D"),
    (linear_logp, (t(2, 3), t(3), cu([0, 0])), {}, ValueError, "weight: expected [V, D] with V > 0, got"),
    (linear_logp, (t(2, 3), t(0, 3), cu([0, 0])), {}, ValueError, "weight: expected [V, D] with V > 0, got"),
    (linear_logp, (t(2, 3), t(4, 5), cu([0, 0])), {}, ValueError, "D must be equal, got 3 and 5"),
    (linear_logp, (t(2, 3), t(4, 3), cu([0, 0]), t(3)), {}, ValueError, "bias: expected shape (4,)"),
    (
        linear_logp,
        (t(2, 3), t(4, 3, dtype=bf16), cu([0, 0])),
        {},
        TypeError,
        "weight: expected torch.float32",
    ),
    (linear_logp, (t(2, 3), t(4, 3), cu([0, 4])), {}, IndexError, "got 4 at position 1"),
    (
        linear_logp,
        (t(2, 3), t(4, 3), cu([0, 0])),
        {"temperature": 0.0},
        ValueError,
        "temperature: expected a number in",
    ),
    (linear_logp, (t(2, 3), t(4, 3), cu([0, 0])), {"temperature": 1e-50}, ValueError, "got 1e-50"),
    (
        linear_logp,
        (t(2, 3), t(4, 3), cu([0, 0])),
        {"temperature": "1"},
        TypeError,
        "expected a number, got str",
    ),
    (
        linear_logp,
        (t(2, 3), t(4, 3), cu([0, 0])),
        {"cu_seqlens": cu([0, 3])},
        ValueError,
        "cu_seqlens: expected to run from 0 to 2",
    ),
    (
        linear_logp,
        (t(1, 2, 2, 3), t(4, 3), cu([[[0, 0], [0, 0]]])),
        {"cu_seqlens": cu([0, 4])},
        ValueError,
        "hidden: with cu_seqlens expected",
    ),
    (
        linear_logp,
        (t(2, 3), t(4, 3), cu([0, 0])),
        {"main_grad": t(4, 3, dtype=bf16)},
        TypeError,
        "main_grad: expected a dense float32 tensor, got torch.bfloat16",
    ),
    (
        linear_logp,
        (t(2, 3), t(4, 3), cu([0, 0])),
        {"main_grad": t(3, 4)},
        ValueError,
        "main_grad: expected shape (4, 3) like weight, got (3, 4)",
    ),
    (
        linear_logp,
        (t(2, 3), t(4, 3), cu([0, 0])),
        {"main_grad": t(3, 4).mT},
        ValueError,
        "main_grad: expected a contiguous tensor",
    ),
    (
        linear_logp,
        (t(2, 3), t(4, 3), cu([0, 0])),
        {"main_grad": t(4, 3).to_sparse()},
        TypeError,
        "main_grad: expected a dense float32 tensor, got layout torch.sparse_coo",
    ),
    (
        linear_logp,
        (t(2, 3), t(4, 3), cu([0, 0])),
        {"main_grad": torch._neg_view(t(4, 3))},
        TypeError,
        "main_grad: expected a plain tensor, got a view with negated elements",
    ),
    (
        linear_logp,
        (t(2, 3), t(4, 3), cu([0, 0])),
        {"main_grad": torch.inference_mode()(t)(4, 3)},
        TypeError,
        "main_grad: expected a plain tensor, got one made in inference mode",
    ),
    (
        linear_logp,
        (SHARED[:2], t(4, 3).requires_grad_(), cu([0, 0])),
        {"main_grad": SHARED},
        ValueError,
        "main_grad: expected memory of its own, got memory that hidden shares",
    ),
    (
        linear_logp,
        (t(2, 3), SHARED.detach().requires_grad_(), cu([0, 0])),
        {"main_grad": SHARED},
        ValueError,
        "main_grad: expected memory of its own, got memory that weight shares",
    ),
    (
        linear_logp,
        (t(2, 3), t(4, 3), cu([0, 0])),
        {"cu_seqlens": cu([0, 2]).to_sparse()},
        TypeError,
        "cu_seqlens: expected a dense tensor, got layout torch.sparse_coo",
    ),
    (
        logp,
        (t(2, 3), cu([0, 0]).to_sparse()),
        {},
        TypeError,
        "target: expected a dense tensor, got layout torch.sparse_coo",
    ),
    (
        linear_logp,
        (t(2, 3), t(4, 3), cu([0, 0])),
        {"return_entropy": "x"},
        TypeError,
        "return_entropy: expected a bool, got str",
    ),
    (
        logp,
        (t(2, 3), cu([0, 0])),
        {"ignore_index": 2**63},
        ValueError,
        "ignore_index: expected an int of 64 bits, got 9223372036854775808",
    ),
]


# What is no operation on tensors. The names that errors begin with are not always the functions' own.
LAYER = torch.nn.Linear(3, 4)
vmapped = torch.vmap(samebits.addmm_)
KINDS: list[tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    ("addmm_", vmapped, (t(2, 2, 2),) * 3, {}, NotImplementedError, "acc: torch.vmap is not implemented"),
    ("batch_invariant", samebits.batch_invariant, (None,), {}, ValueError, 'on_uncovered: expected "warn"'),
    ("convert", samebits.convert, ("x",), {}, TypeError, "module: expected a Module, got str"),
    ("convert", samebits.convert, (LAYER,), {"filter": 5}, TypeError, "filter: expected a function, got int"),
    ("convert", samebits.convert, (LAYER,), {"contract": "FMA"}, TypeError, "contract: expected a samebits."),
    ("prepare", samebits.prepare, (5, [2]), {}, TypeError, "weights: expected a module or tensors, got int"),
    ("prepare", samebits.prepare, (["x"], [2]), {}, TypeError, "weights: expected tensors, got str"),
    (
        "prepare",
        samebits.prepare,
        (LAYER, 2),
        {},
        TypeError,
        "rows: expected numbers or shapes, got 2: write",
    ),
    ("prepare", samebits.prepare, (LAYER, [1.5]), {}, TypeError, "rows: expected numbers or shapes, got 1.5"),
    ("prepare", samebits.prepare, (LAYER, [True]), {}, TypeError, "rows: expected numbers or shapes, got Tr"),
    (
        "prepare",
        samebits.prepare,
        (LAYER, t(2, 3)),
        {},
        TypeError,
        "rows: expected numbers or shapes, got te",
    ),
    (
        "prepare",
        samebits.prepare,
        (LAYER, [2]),
        {"backward": "x"},
        TypeError,
        "backward: expected a bool, got",
    ),
    (
        "prepare",
        samebits.prepare,
        (LAYER, [2]),
        {"contract": {}},
        TypeError,
        "contract: expected a samebits.",
    ),
    *(
        ("prepare", samebits.prepare, (LAYER, [2]), {"cu_seqlens": x}, TypeError, f"torch.int64, got {got}")
        for x, got in ((cu([0, 2]), "Tensor"), ("x", "str"), (True, "bool"), (f32, "torch.float32"))
    ),
    (
        "nn.Linear",
        samebits.nn.Linear,
        (3, 4),
        {"contract": "FMA"},
        TypeError,
        "contract: expected a samebits.",
    ),
    ("nn.Linear.from_torch", samebits.nn.Linear.from_torch, (None,), {}, TypeError, "layer: NoneType: it is"),
    ("use_backend", samebits.use_backend, (5,), {}, ValueError, "name: expected one of ('cuda',"),
    ("use_mma_model", samebits.use_mma_model, ("x",), {}, TypeError, "model: expected an MmaModel, got str"),
    ("Contract.on", TENSOR_CORE.on, (None,), {}, TypeError, "mma: expected an MmaModel, got NoneType"),
    ("Contract.on", TENSOR_CORE.on, ("x",), {}, TypeError, "mma: expected an MmaModel, got str"),
    ("Contract", samebits.FMA.on, (samebits.HOPPER,), {}, ValueError, 'mma: step "fma" takes no MmaModel'),
    ("Contract", samebits.Contract, (None, "mma"), {}, ValueError, "name: expected an identifier, got None"),
    (
        "Contract",
        samebits.Contract,
        ("X", None),
        {},
        ValueError,
        'expected "mma", "fma" or "scaled", got None',
    ),
    (
        "MmaModel",
        samebits.MmaModel,
        ("X", "8", 25, -133),
        {},
        ValueError,
        "group: expected 4, 8, 16 or 32, got '8'",
    ),
]
KINDS += [(op.__name__, op, *case) for op, *case in CASES]


@pytest.mark.parametrize(
    ("name", "op", "args", "kwargs", "error", "message"),
    KINDS,
    ids=[f"{case[0]}-{case[5][:40]}" for case in KINDS],
)
def test_refused(
    name: str,
    op: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=re.escape(message)) as caught:
        op(*args, **kwargs)
    assert str(caught.value).startswith(f"samebits.{name}: ")


def overlapping(what: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    buffer = torch.arange(64.0)
    a, b = torch.ones(3, 5), torch.ones(5, 4)
    if what == "expanded":
        return torch.zeros(4).expand(3, 4), a, b
    if what == "itself":
        return buffer.as_strided((3, 4), (2, 1)), a, b
    if what == "a":
        return buffer[:12].view(3, 4), buffer[11:26].view(3, 5), b
    return buffer[:12].view(3, 4), a, buffer[8:28].view(5, 4)


@pytest.mark.parametrize("what", ["expanded", "itself", "a", "b"])
def test_addmm_refuses_overlap_and_writes_nothing(what: str) -> None:
    acc, a, b = overlapping(what)
    before = acc.clone()
    with pytest.raises(ValueError, match="acc: expected"):
        samebits.addmm_(acc, a, b)
    assert torch.equal(acc, before)


def test_addmm_refuses_overlap_while_it_records_or_casts() -> None:
    acc, a, b = overlapping("a")
    before = acc.clone()
    with pytest.raises(ValueError, match="memory that a shares"):
        samebits.addmm_(acc, a, b.requires_grad_())
    square = torch.randn(4, 4)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="memory that a shares"):
        samebits.addmm_(square, square, torch.eye(4))
    assert torch.equal(acc, before)


def test_addmm_into_an_inference_tensor_writes_nothing_outside_of_that_mode() -> None:
    with torch.inference_mode():
        acc = torch.zeros(2, 2)
        samebits.addmm_(acc, torch.ones(2, 3), torch.ones(3, 2))
    with pytest.raises(TypeError, match="acc: expected a plain tensor, got one made in inference mode"):
        samebits.addmm_(acc, torch.ones(2, 3), torch.ones(3, 2))
    assert acc.tolist() == [[3.0, 3.0], [3.0, 3.0]]


def test_an_empty_accumulator_overlaps_nothing() -> None:
    assert samebits.addmm_(torch.zeros(1).expand(0, 3), torch.ones(0, 2), torch.ones(2, 3)).shape == (0, 3)


def test_addmm_takes_interleaved_memory_that_does_not_overlap() -> None:
    buffer = torch.randn(3, 10)
    acc, a = buffer[:, ::2], buffer[:, 1::2]
    want = samebits.addmm_(acc.clone(), a.clone(), torch.eye(5))
    samebits.addmm_(acc, a, torch.eye(5))
    assert torch.equal(acc, want)


def test_flushing_subnormals_is_refused() -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        with pytest.raises(RuntimeError, match="set_flush_denormal"):
            samebits.matmul(torch.ones(2, 2), torch.ones(2, 2))
        with pytest.raises(RuntimeError, match="set_flush_denormal"):
            samebits.addmm_(torch.zeros(2, 2), torch.ones(2, 2), torch.ones(2, 2))
    finally:
        torch.set_flush_denormal(False)


def test_forward_mode_derivatives_are_refused() -> None:
    """torch.library would drop the tangents in silence."""
    x, weight = torch.randn(3, 4), torch.randn(5, 4)
    with forward_ad.dual_level():
        samebits.linear(x, weight)
        with pytest.raises(NotImplementedError, match="x: forward-mode"):
            samebits.linear(forward_ad.make_dual(x, x), weight)
    with pytest.raises(NotImplementedError, match="weight: forward-mode"):
        torch.func.jvp(lambda w: samebits.linear(x, w), (weight,), (weight,))


def test_gradients_of_torch_func_are_refused_and_vmap_keeps_them() -> None:
    x, weight = torch.randn(4, 5, 7, requires_grad=True), torch.randn(3, 7)
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.grad(lambda w: samebits.linear(x, w).sum())(weight)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of vmap's fallback to a loop
        y = torch.vmap(lambda x: samebits.linear(x, weight))(x)
    assert y.requires_grad
    assert_same_bits(y, samebits.linear(x, weight))
