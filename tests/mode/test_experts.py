"""Layers of experts under the mode: what sorts, picks and adds by index, and models of ``transformers``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import samebits
from samebits.mode import indexing as mode_indexing
from samebits.ops import indexing, reduce
from samebits.testing import assert_same_bits, values
from samebits.transformers import _rows_of_batch
from tests.mode.conftest import Within
from tests.support import naive_rows
from tests.support.devices import DEVICES

on_devices = pytest.mark.parametrize("device", DEVICES)
on_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
PLACES = [3, 0, 3, 3, 1, 0, 3]


def make(shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: str = "cpu") -> Tensor:
    return values("normal", shape, dtype, seed).to(device)


def chains(x: Tensor, places: Tensor, terms: Tensor) -> Tensor:
    """``x[n, columns]`` with ``terms[k, columns]`` added, by a second implementation."""
    columns = [
        naive_rows.added_at(x[:, c].tolist(), places.tolist(), terms[:, c].tolist())
        for c in range(x.shape[1])
    ]
    return torch.tensor(columns).T.to(x.dtype)


# ---- sorting


TIES = torch.tensor([[1.0, 2, 2, 0, 2, 1], [0.0, -0.0, torch.nan, 0, -1, torch.nan]])


@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_is_sorted_alike_in_every_company(device: str, dtype: torch.dtype, within: Within) -> None:
    x = TIES.repeat(500, 500).to(device, dtype)
    with within("error"):
        every, one, two = (t.sort(-1) for t in (x, x[:1], x[1:2]))
    values, places = (torch.cat(parts) for parts in zip(one, two, strict=True))
    for some in (slice(2), slice(998, None)):
        assert_same_bits(every.values[some], values)
        assert torch.equal(every.indices[some], places)


@on_devices
def test_sorts_are_stable(device: str, within: Within) -> None:
    x = TIES.repeat(1, 40).to(device)
    want = torch.sort(x, stable=True)
    falling = torch.sort(x, stable=True, dim=-1, descending=True)
    with within("error"):
        for got in (x.sort(), torch.sort(x, -1), torch.sort(x, stable=False), x.sort(dim=1, stable=False)):
            assert torch.equal(got.indices, want.indices)
        for got in (x.sort(1, True), torch.sort(input=x, descending=True)):
            assert torch.equal(got.indices, falling.indices)
        assert torch.equal(x.argsort(), want.indices)
        assert torch.equal(torch.argsort(x, -1, True), falling.indices)
        assert torch.equal(torch.argsort(x, dim=1, descending=True, stable=False), falling.indices)
        assert_same_bits(x.T.contiguous().msort(), want.values.T.contiguous())
        assert torch.equal(torch.tensor([2, 1, 2, 1]).to(device).argsort().cpu(), torch.tensor([1, 3, 0, 2]))


@pytest.mark.parametrize("largest", [True, False])
@on_dtypes
@on_devices
def test_topk_takes_the_first_of_equal_values(
    device: str, dtype: torch.dtype, largest: bool, within: Within
) -> None:
    """For few entries, by sorting; for many, by keys."""
    for count in (2, 900):
        x = TIES.repeat(1, count).to(device, dtype)
        # In 16 bits PyTorch sorts NaN of long rows elsewhere on a GPU.
        want = torch.sort(x.float() + 0.0, dim=1, descending=largest, stable=True)[1][:, :11]
        for row in (slice(None), slice(1, 2)):
            with within("error"):
                found, places = x[row].topk(11, 1, largest, False)
            assert torch.equal(places, want[row])
            assert_same_bits(found, x[row].gather(1, want[row]))


def test_topk_refuses_what_pytorch_does(within: Within) -> None:
    x = torch.ones(3)
    with within("error"):
        assert x.topk(0)[0].shape == (0,)
        assert torch.ones(()).topk(1, 0)[1] == 0
        for call in (lambda: x.topk(4), lambda: x.topk(1, 2), lambda: x.topk(-1)):
            with pytest.raises((RuntimeError, IndexError)):
                call()


@pytest.mark.parametrize("shape", [(5,), (3, 5000), (2, 3, 4)])
def test_topk_of_no_entries_sorts_nothing(
    shape: tuple[int, ...], within: Within, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mode_indexing, "_keys", None)
    monkeypatch.setattr(mode_indexing, "_sort", None)
    monkeypatch.setattr(mode_indexing, "_topk", None)
    for dim in range(-len(shape), len(shape)):
        x = torch.randn(shape, requires_grad=True)
        want = x.narrow(dim, 0, 0)
        with within("error"):
            values, places = x.topk(0, dim)
        values.sum().backward()
        assert values.shape == places.shape == want.shape
        assert places.dtype == torch.int64
        assert x.grad is not None
        assert not x.grad.any()


def test_counts_are_exact_and_not_reported(within: Within) -> None:
    ids = torch.tensor([0, 2, 2, 1, 5])
    with within("error"):
        counts = torch.histc(ids.float(), bins=3, min=0, max=2)
        assert torch.cumsum(counts, 0, dtype=torch.int32).tolist() == [1, 2, 4]
        assert ids.cumsum(0).tolist() == [0, 2, 4, 5, 10]
        assert torch.bincount(ids).tolist() == [1, 1, 2, 0, 0, 1]


# ---- sums in the order of an index


ADD: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "index_add": lambda x, i, t: torch.index_add(x, 0, i, t),
    "index_add_": lambda x, i, t: x.clone().index_add_(0, i, t),
    "index_add, other dimension": lambda x, i, t: x.T.index_add(1, i, t.T).T,
    "index_put": lambda x, i, t: torch.index_put(x, (i,), t, accumulate=True),
    "index_put_": lambda x, i, t: x.clone().index_put_((i - 5,), t, accumulate=True),
    "scatter_add": lambda x, i, t: x.scatter_add(0, i[:, None].expand_as(t), t),
    "scatter_add_": lambda x, i, t: x.clone().scatter_add_(0, i[:, None].expand_as(t), t),
}


@pytest.mark.parametrize("name", ADD)
@on_dtypes
@on_devices
def test_what_is_added_at_an_index(device: str, name: str, dtype: torch.dtype, within: Within) -> None:
    """Chains from what was there, for 7 terms and for more than are added one after the other."""
    for repeats in (1, 7):
        places = torch.tensor(PLACES * repeats, device=device)
        x, terms = (values("sparse", (n, 3), dtype, n).to(device) for n in (5, len(places)))
        want = chains(x, places, terms).to(device)
        leaves = [t.clone().requires_grad_() for t in (x, terms)]
        with within("error"):
            got = ADD[name](leaves[0], places, leaves[1])
        seed = make((5, 3), dtype, 2, device)
        grads = torch.autograd.grad(got, leaves, seed)
        assert_same_bits(got.detach().contiguous(), want)
        assert_same_bits(grads[0], seed)
        assert_same_bits(grads[1], seed[places])


def test_terms_of_other_places_and_sizes(within: Within) -> None:
    x, i = make((5, 4), torch.float32, 0), torch.tensor([[0, 0, 1]])
    with within("error"):
        twice = x.index_add(0, torch.tensor([0]), x[1:2], alpha=2)
        assert_same_bits(twice[0], x[0] + 2 * x[1])
        assert_same_bits(x.index_add(1, torch.tensor([], dtype=torch.int64), x[:, :0]), x)
        assert torch.zeros(()).index_add(0, torch.tensor([0]), torch.ones(())).item() == 1
        assert_same_bits(x.scatter_add(1, i, x)[1:], x[1:])
        ones = torch.ones(3, dtype=torch.int64)
        assert ones.index_add(0, torch.tensor([1, 1]), ones[:2]).tolist() == [1, 3, 1]
        with pytest.raises((IndexError, RuntimeError), match="index"):
            x.index_add(0, torch.tensor([5]), x[:1])
        with pytest.raises(RuntimeError):
            x.index_add(0, torch.tensor([0]), x[:1, :2])


@pytest.mark.parametrize("name", ["index_add", "index_add_"])
@pytest.mark.parametrize(
    ("x", "source"),
    [
        pytest.param((5, 4), (3, 2, 2), id="as many numbers in other dimensions"),
        pytest.param((5, 2, 2), (3, 4), id="as many numbers in fewer dimensions"),
        pytest.param((5, 2, 3), (3, 3, 2), id="as many numbers in another order"),
        pytest.param((5, 4), (3,), id="numbers instead of rows"),
    ],
)
def test_terms_of_another_shape_are_refused(
    name: str, x: tuple[int, ...], source: tuple[int, ...], within: Within
) -> None:
    with within("error"), pytest.raises(RuntimeError, match="source tensor shape must match self"):
        ADD[name](torch.zeros(x), torch.tensor([0, 1, 1]), torch.ones(source))


@pytest.mark.parametrize("name", ["index_add", "index_add_"])
@pytest.mark.parametrize(
    ("dtype", "of_source"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_terms_of_another_dtype_are_refused(
    name: str, dtype: torch.dtype, of_source: torch.dtype, within: Within
) -> None:
    with within("error"), pytest.raises(RuntimeError, match="must have the same scalar type"):
        ADD[name](torch.zeros(5, 4, dtype=dtype), torch.tensor([0]), torch.ones(1, 4, dtype=of_source))


@pytest.mark.parametrize("include_self", [True, False])
@on_dtypes
@on_devices
def test_sums_and_means_of_what_is_scattered(
    device: str, dtype: torch.dtype, include_self: bool, within: Within
) -> None:
    places = torch.tensor(PLACES, device=device)
    x, terms = make((5, 3), dtype, 0, device), make((7, 3), dtype, 1, device)
    index = places[:, None].expand_as(terms)
    hit = torch.zeros(5, 1, device=device)
    hit[places] = 1
    start = x.float() if include_self else x.float() * (1 - hit)
    sums = chains(start, places, terms.float()).to(device)
    count = torch.bincount(places, minlength=5)[:, None]
    means = sums / (count + 1 if include_self else count.clamp(min=1)).float()
    options = {"include_self": include_self}
    leaves = [t.clone().requires_grad_() for t in (x, terms)]
    with within("error"):
        assert_same_bits(x.scatter_reduce(0, index, terms, "sum", **options), sums.to(dtype))
        got = torch.scatter_reduce(leaves[0], 0, index, leaves[1], "mean", **options)
        assert_same_bits(x.clone().scatter_reduce_(0, index, terms, "mean", **options), got.detach())
        most = x.scatter_reduce(0, index, terms, "amax", **options)
    assert_same_bits(got.detach(), means.to(dtype))
    assert_same_bits(most, x.scatter_reduce(0, index, terms, "amax", **options))
    wide = [t.double().requires_grad_() for t in (x, terms)]
    want = torch.scatter_reduce(wide[0], 0, index, wide[1], "mean", **options)
    seed = make((5, 3), dtype, 2, device)
    exact = torch.autograd.grad(want, wide, seed.double())
    for found, grad in zip(torch.autograd.grad(got, leaves, seed), exact, strict=True):
        torch.testing.assert_close(found.double(), grad, rtol=0.01, atol=0.01)


@on_devices
def test_an_empty_index_adds_nothing(device: str, within: Within) -> None:
    x, none = make((5, 4), torch.float32, 0, device), torch.zeros(2, 0, dtype=torch.int64, device=device)
    with within("error"):
        assert_same_bits(x.scatter_add(0, none, x[:1]), x)
        assert_same_bits(x.scatter_reduce(0, none, x[:1], "sum"), x)
        assert_same_bits(x.index_add(0, none.reshape(-1), x[:0]), x)
        source = torch.zeros(0, 4, device=device, requires_grad=True)
        index = torch.zeros(0, 4, dtype=torch.int64, device=device)
        for got in (x.scatter_add(0, index, source), x.scatter_reduce(0, index, source, "mean")):
            (grad,) = torch.autograd.grad(got.sum(), source)
            assert grad.shape == (0, 4)


@pytest.mark.parametrize("move", [lambda x: x, lambda x: x.movedim(0, 2)], ids=["contiguous", "permuted"])
def test_sums_at_an_index_lie_in_memory_as_pytorchs(move: Callable[[Tensor], Tensor], within: Within) -> None:
    x, i = move(make((6, 6, 6), torch.float32, 0)), torch.tensor([3, 0, 1])
    calls: list[Callable[[], Tensor]] = [
        lambda: x.index_add(1, i, x[:, :3]),
        lambda: x.index_put((i,), x[:3], accumulate=True),
        lambda: torch.ops.aten.index_put(x, [None, i], x[:, :3], True),
        lambda: x.scatter_add(1, i[None, :, None].expand(6, 3, 6), x[:, :3]),
    ]
    for call in calls:
        with within("error"):
            got = call()
        assert got.stride() == call().stride()


def test_an_index_is_refused_as_by_pytorch(within: Within) -> None:
    x = make((5, 2), torch.float32, 0)
    calls = [
        lambda: x.index_add(0, torch.tensor([True, False, True, False, False]), x),
        lambda: x.index_add(0, torch.tensor([1.9, 0.0]), x[:2]),
        lambda: x.index_add(0, torch.tensor([1, 0], dtype=torch.uint8), x[:2]),
        lambda: x[0, 0].index_add(0, torch.tensor([0]), x[0, :1]),
        lambda: x.scatter_add(0, torch.ones(1, 2), x[:1]),
    ]
    for call in calls:
        with pytest.raises(RuntimeError) as theirs:
            call()
        with within("error"), pytest.raises(RuntimeError) as ours:
            call()
        assert str(ours.value) == str(theirs.value)


OUTSIDE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index_put": lambda x, i: x.index_put((i * 0, i), torch.ones(1), accumulate=True),
    "index_put_": lambda x, i: x.clone().index_put_((i * 0 - 1, i), torch.ones(1), accumulate=True),
    "index_put, one index": lambda x, i: x.T.index_put((i,), torch.ones(4), accumulate=True),
    "index_add": lambda x, i: x.index_add(1, i, torch.ones(4, 1)),
    "scatter_add, many": lambda x, i: x.scatter_add(1, i.expand(2, 40), torch.ones(2, 40)),
    "scatter_add, few": lambda x, i: x.scatter_add(1, i.expand(2, 3), torch.ones(2, 3)),
    "x[:, i]": lambda x, i: x[:, i],
    "x[j, i]": lambda x, i: x[i * 0 + 1, i],
    "index_select": lambda x, i: x.index_select(1, i),
    "gather": lambda x, i: x.gather(1, i.expand(4, 2)),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_out_of_range_names_no_other_element(name: str, compiled: bool, within: Within) -> None:
    """As in PyTorch, where only some functions count from the end, and none wraps into the next row."""
    x = make((4, 50), torch.float32, 0).requires_grad_()

    def traced(x: Tensor, i: Tensor) -> Tensor:
        with samebits.batch_invariant("error"):
            return OUTSIDE[name](x, i)

    torch._dynamo.reset()  # one function is compiled for each name
    call = torch.compile(traced, backend="eager") if compiled else OUTSIDE[name]
    for i in (50, -51, *(() if "put" in name or "[" in name else (-1,))):
        index = torch.tensor([i])
        with pytest.raises((IndexError, RuntimeError)):
            OUTSIDE[name](x, index)
        mode = nullcontext() if compiled else within("error")
        with mode, pytest.raises((IndexError, RuntimeError), match=r"(?i)index|indices"):
            call(x, index)


PICK: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "x[i]": lambda x, i: x[i],
    "x[i - n]": lambda x, i: x[i - 5],
    "x[i, :2]": lambda x, i: torch.cat([x[i, :2], x[i, 2:]], 1),
    "x[:, i]": lambda x, i: x.T[:, i].T,
    "x[i, j]": lambda x, i: x[i[:, None], torch.arange(3, device=x.device)],
    "x[..., i]": lambda x, i: x.T.contiguous()[..., i].T,
    "x[None, i]": lambda x, i: x[None, i][0],
    "x[0, i]": lambda x, i: torch.stack([x.T[j, i] for j in range(3)], 1),
    "x[i, 0]": lambda x, i: torch.stack([x[i, j] for j in range(3)], 1),
    "x[list]": lambda x, i: x[PLACES * (len(i) // len(PLACES))],
    "x[i, j, None]": lambda x, i: x[i[:, None], torch.arange(3, device=x.device), None].squeeze(2),
    "index_select": lambda x, i: x.index_select(0, i),
    "index_select, columns": lambda x, i: torch.index_select(x.T, -1, i).T,
    "gather": lambda x, i: x.gather(0, i[:, None].expand(-1, 3)),
    "repeat_interleave": lambda x, i: x.repeat_interleave(torch.bincount(i, minlength=5), 0),
}


@on_dtypes
@on_devices
def test_gradients_of_an_index_without_repeats(device: str, dtype: torch.dtype) -> None:
    """Of ``sort`` and ``topk``: those of ``gather``, also where they are -0 or NaN."""
    x, seed = (values("special", (40, 90), dtype, i).to(device) for i in (1, 2))
    seed[:, ::7] = -0.0
    places = x.float().argsort(1)
    grads = []
    for picked in (indexing.pick, indexing.gather):
        leaf = x.clone().requires_grad_()
        out = picked(leaf, 1, places)
        assert_same_bits(out.detach(), x.gather(1, places))
        grads += torch.autograd.grad(out, leaf, seed)
    assert_same_bits(*grads)


@pytest.mark.parametrize("name", PICK)
@on_dtypes
@on_devices
def test_gradients_of_what_is_picked(device: str, name: str, dtype: torch.dtype, within: Within) -> None:
    for repeats in (1, 9):
        places = torch.tensor(PLACES * repeats, device=device)
        if name == "repeat_interleave":
            places = places.sort()[0]
        x, seed = make((5, 3), dtype, 0, device), make((len(places), 3), dtype, 1, device)
        leaf = x.clone().requires_grad_()
        with within("error"):
            got = PICK[name](leaf, places)
            (grad,) = torch.autograd.grad(got, leaf, seed)
        assert_same_bits(got.detach(), x[places])
        assert_same_bits(grad, chains(torch.zeros_like(x), places, seed).to(device))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PICK)
def test_gradients_of_what_is_picked_in_a_compiled_function(name: str) -> None:
    places = torch.tensor(PLACES * 9).sort()[0] if name == "repeat_interleave" else torch.tensor(PLACES * 9)
    x, seed = make((5, 3), torch.bfloat16, 0), make((len(places), 3), torch.bfloat16, 1)
    leaf = x.clone().requires_grad_()

    def inside(leaf: Tensor) -> Tensor:
        with samebits.batch_invariant("error"):
            return PICK[name](leaf, places)

    torch._dynamo.reset()
    got = torch.compile(inside, backend="aot_eager")(leaf)
    assert got.stride() == PICK[name](leaf, places).stride()
    (grad,) = torch.autograd.grad(got, leaf, seed)
    assert_same_bits(got.detach(), x[places])
    assert_same_bits(grad, chains(torch.zeros_like(x), places, seed))


@on_devices
def test_gradients_of_what_is_repeated(device: str, within: Within) -> None:
    x, seed = make((2, 3), torch.bfloat16, 0, device), make((8, 9), torch.bfloat16, 1, device)
    calls: list[Callable[[Tensor], Tensor]] = [
        lambda x: x.repeat(4, 3),
        lambda x: x.repeat((2, 4, 3))[0],
        lambda x: x.repeat_interleave(4, 0).repeat_interleave(3, -1),
    ]
    for call in calls:
        leaf = x.clone().requires_grad_()
        with within("error"):
            got = call(leaf)
            (grad,) = torch.autograd.grad(got, leaf, seed)
        assert_same_bits(got.detach(), call(x))
        exact = x.double().requires_grad_()
        (want,) = torch.autograd.grad(call(exact), exact, seed.double())
        torch.testing.assert_close(grad.double(), want, rtol=0.02, atol=0.05)


def test_views_stay_views(within: Within) -> None:
    x = make((4, 6), torch.float32, 0).requires_grad_()
    with within("error"):
        assert x[1:, None, ..., 2]._base is x
        mask = x > 0
        (grad,) = torch.autograd.grad(x[mask].sum(), x)
        assert torch.equal(grad, mask.float())
        with torch.no_grad():
            assert x.detach()[torch.tensor([0])].shape == (1, 6)


# ---- cumulated


@on_dtypes
@on_devices
def test_cumulated_by_doubling(device: str, dtype: torch.dtype, within: Within) -> None:
    for n in (1, 2, 7, 300):
        x, seed = make((3, n), dtype, 0, device), make((3, n), dtype, 1, device)
        leaf = x.clone().requires_grad_()
        with within("error"):
            sums, products = torch.cumsum(leaf, 1), x.cumprod(-1)
            (grad,) = torch.autograd.grad(sums, leaf, seed)
            assert_same_bits(x.T.cumsum(0).T.contiguous(), sums.detach())
            assert_same_bits(x[1:2].cumsum(1), sums[1:2].detach())
            assert_same_bits(x[:, : n // 2].cumsum(1), sums[:, : n // 2].detach())
            assert_same_bits(x.clone().cumsum_(1), sums.detach())
        rows = x.tolist()
        assert_same_bits(sums.detach().cpu(), torch.tensor([*map(naive_rows.cumulated, rows)]).to(dtype))
        want = torch.tensor([naive_rows.cumulated(r, product=True) for r in rows]).to(dtype)
        assert_same_bits(products.cpu(), want)
        back = [naive_rows.cumulated(r[::-1])[::-1] for r in seed.tolist()]
        assert_same_bits(grad.cpu(), torch.tensor(back).to(dtype))


@on_devices
def test_a_sum_over_few_terms(device: str) -> None:
    x = make((4, 5, 6, 7), torch.bfloat16, 0, device).requires_grad_()
    want = reduce.sum(x.detach().cpu(), 2)
    for dim, keepdim in ((2, False), ([-2], True)):
        got = reduce.sum(x, dim, keepdim)
        assert_same_bits(got.detach().reshape(4, 5, 7).cpu(), want)
        (grad,) = torch.autograd.grad(got.sum(), x)
        assert (grad == 1).all()


# ---- models of transformers


MODELS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 3},
    "DeepseekV3": {
        **{"n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 24, "n_group": 2},
        **{"topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16},
        **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4},
    },
}
SMALL = {
    **{"vocab_size": 60, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "attention_dropout": 0.0},
    **{"initializer_range": 0.3, "pad_token_id": None, "eos_token_id": None, "bos_token_id": None},
}


@pytest.fixture
def _registered() -> None:
    pytest.importorskip("transformers", exc_type=ImportError)
    samebits.transformers.register()


def build(kind: str, experts: str, dtype: torch.dtype, device: str) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SMALL | MODELS[kind])
    config._attn_implementation = "samebits"
    config._experts_implementation = experts
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(device, dtype)
    for name, p in model.named_parameters():
        if "bias" in name or "sinks" in name:
            torch.nn.init.normal_(p, generator=torch.Generator(device).manual_seed(1))
    return model.eval()


def tokens(device: str) -> Tensor:
    return torch.randint(1, 60, (3, 21), generator=torch.Generator().manual_seed(2)).to(device)


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize("kind", MODELS)
@on_dtypes
@on_devices
def test_all_forms_of_experts(device: str, kind: str, dtype: torch.dtype, within: Within) -> None:
    """Rows alone and in a batch; and all forms agree, whichever a model was loaded with."""
    ids = tokens(device)
    found = {}
    for form in ("grouped_mm", "batched_mm", "samebits", "eager"):
        model = build(kind, form, dtype, device)
        with within("error"), torch.no_grad():
            found[form] = model(ids).logits
            assert_same_bits(model(ids[1:2]).logits, found[form][1:2], form)
            assert_same_bits(model(ids[:, :9]).logits, found[form][:, :9], form)
    for form in ("batched_mm", "samebits", "eager"):
        assert_same_bits(found[form], found["grouped_mm"], form)


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize("kind", MODELS)
@on_dtypes
@on_devices
def test_gradients_of_experts_are_free_of_padding(
    device: str, kind: str, dtype: torch.dtype, within: Within
) -> None:
    ids = tokens(device)
    padded = F.pad(ids, (0, 6), value=7)
    shown = F.pad(torch.ones_like(ids), (0, 6))
    model = build(kind, "samebits", dtype, device)

    def gradients(ids: Tensor, shown: Tensor) -> list[tuple[str, Tensor]]:
        model.zero_grad()
        with within("error"):
            logits = model(ids, attention_mask=shown).logits[:, :21]
            F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:21].flatten()).backward()
        return [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]

    alone, with_padding = gradients(ids, torch.ones_like(ids)), gradients(padded, shown)
    assert any("gate_up_proj" in name for name, _ in alone)
    for (name, want), (_, got) in zip(alone, with_padding, strict=True):
        assert_same_bits(got, want, name)


@on_devices
@pytest.mark.parametrize("product", ["linear", "addmm"])
def test_bits_do_not_depend_on_earlier_calls(device: str, product: str, within: Within) -> None:
    """Rows of a flattened batch are one sequence, whichever call comes first."""
    x, seed = (make((3, 21, 40), torch.bfloat16, i, device) for i in (0, 1))
    w = make((40, 40), torch.bfloat16, 2, device).requires_grad_()
    x[0, 5] *= 4096  # great terms that cancel, so that it shows where groups begin
    x[2, 5], seed[2, 5] = x[0, 5], -seed[0, 5]

    def whole() -> Tensor:
        F.layer_norm(x, (40,))
        return torch.autograd.grad(F.linear(x, w.T), w, seed)[0]

    def flattened() -> Tensor:
        rows = x.view(-1, 40)
        out = F.linear(rows, w.T) if product == "linear" else torch.addmm(x[0, 0], rows, w)
        return torch.autograd.grad(out, w, seed.view(-1, 40))[0]

    with within("error"):
        first, then = flattened(), whole()
    with within("error"):
        want, got = whole(), flattened()
    assert_same_bits(got, first)
    assert_same_bits(then, want)
    assert (first != want).any()


@on_devices
@pytest.mark.parametrize("made", [F.gelu, lambda x: F.layer_norm(x, (8,)), lambda x: x[:, 1:]])
def test_flattened_tokens_know_their_batch(
    device: str, made: Callable[[Tensor], Tensor], within: Within
) -> None:
    """Whatever function made it, and whatever memory its result is a view of."""
    x = make((3, 5, 8), torch.bfloat16, 0, device).requires_grad_()
    with within("error"):
        batch = made(x)
        assert _rows_of_batch(batch.reshape(-1, 8)) == 3
        assert _rows_of_batch(batch.reshape(-1, 8) + 0) == 1


@pytest.mark.usefixtures("_registered")
@on_devices
def test_experts_of_other_processes_add_nothing(device: str, within: Within) -> None:
    """Of a layer that is cut into two by its experts, the halves add up."""
    model = build("Qwen3Moe", "samebits", torch.float32, device)
    layer = model.model.layers[0].mlp.experts
    x = make((10, 32), torch.float32, 0, device)
    ids = torch.stack([torch.arange(10, device=device) % 8, torch.arange(10, device=device) * 3 % 8], 1)
    weights = make((10, 2), torch.float32, 1, device).abs()
    layer._is_expert_parallel = True
    with within("error"), torch.no_grad():
        whole = layer(x, ids, weights)
        none = layer(x, torch.full_like(ids, 8), weights)
        first = layer(x, torch.where(ids < 4, ids, 8), weights)
        last = layer(x, torch.where(ids < 4, 8, ids), weights)
    assert_same_bits(none, torch.zeros_like(x))
    assert_same_bits(first + last, whole)
