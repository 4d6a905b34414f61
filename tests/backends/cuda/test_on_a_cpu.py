"""Kernels of elements and of rows, compiled for a CPU, beside the reference at the edges of their formats."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from samebits.backends.attention import Attention
from samebits.backends.cuda import (
    columns,
    devices,
    embeddings,
    gated,
    l2norm,
    matmul,
    norm_rotary,
    runtime,
)
from samebits.backends.cuda.attention import mask, universal_backward
from samebits.backends.cuda.plans import forget_plans
from samebits.backends.reference import fused as reference
from samebits.backends.reference import rows as reference_rows
from samebits.contract import AMPERE, FMA, TENSOR_CORE
from samebits.ops._delta import EPS
from samebits.ops.reduce import sum as row_sum
from samebits.testing import assert_same_bits, values
from tests.support import host_kernels
from tests.support.fake_gpu import INFO

pytestmark = host_kernels.needs_compiler
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
NO_LIMIT = float("inf")


@pytest.mark.parametrize(
    ("activation", "dtype", "kind", "n"),
    [
        ("gelu", BF16, "brink", 64),
        ("relu", BF16, "brink", 64),
        ("silu", F16, "tiny", 37),
        ("sigmoid", F16, "wide", 64),
        ("gpt_oss", F16, "wide", 64),
        ("gelu_tanh", F16, "special", 64),
        ("relu2", BF16, "special", 37),
        ("silu", F32, "brink", 64),
    ],
)
def test_gradients_of_gated(
    monkeypatch: pytest.MonkeyPatch, activation: str, dtype: torch.dtype, kind: str, n: int
) -> None:
    """Also of products that are rounded to zero."""
    host_kernels.use(monkeypatch, gated)
    packed = values(kind, (23, 2 * n), dtype, 1)
    grad = packed[:, n:]
    limit = 2.5 if activation == "gpt_oss" else NO_LIMIT
    for interleaved in (False, True):
        turned = torch.stack(packed.chunk(2, -1), -1).flatten(-2) if interleaved else packed
        for once in {False, activation != "gpt_oss"}:
            args = grad, turned, None, activation, limit, 1.702, once, interleaved, True, True
            got, want = (f(*args)[0] for f in (gated.gated_backward, reference.gated_backward))
            assert_same_bits(got, want, f"{interleaved=} {once=}")


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gpt_oss"])
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("n", [37, 96])
def test_gated(monkeypatch: pytest.MonkeyPatch, activation: str, dtype: torch.dtype, n: int) -> None:
    """Several blocks, the last of which is not full. The result may take an operand's place."""
    host_kernels.use(monkeypatch, gated)
    limit = 2.5 if activation == "gpt_oss" else NO_LIMIT
    for rows, kind in ((0, "normal"), (1, "special"), (3, "wide"), (50, "special"), (83, "brink")):
        packed = values(kind, (rows, 2 * n), dtype, rows)
        turned = torch.stack(packed.chunk(2, -1), -1).flatten(-2)
        for x, interleaved in ((packed, False), (turned, True)):
            for once in {False, activation != "gpt_oss"}:
                args = x, None, activation, limit, 1.702, once, interleaved
                got, want = gated.gated(*args), reference.gated(*args)
                assert_same_bits(got, want, f"{rows=} {interleaved=} {once=}")
        if activation != "gpt_oss":
            alone, gate = gated.activation(packed, activation), packed[:, :n].contiguous()
            assert_same_bits(alone, reference.activation(packed, activation))
            for once in (False, True):
                mine = gate.clone()
                want = reference.gated(packed, None, activation, limit, 1.702, once, False)
                gated.gated_into(mine, packed[:, n:], mine, activation, limit, 1.702, once)
                assert_same_bits(mine, want)


def test_an_activation_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch counts the entries of a row in 32 bits, and an activation alone has one row."""
    host_kernels.use(monkeypatch, gated)
    x, grad = values("special", (2, 5, 37), BF16, 1)
    monkeypatch.setattr(gated, "_AT_ONCE", 64)
    assert_same_bits(gated.activation(x, "silu"), reference.activation(x, "silu"))
    want = reference.activation_backward(grad, x, "silu")
    assert_same_bits(gated.activation_backward(grad, x, "silu"), want)
    monkeypatch.undo()

    class Packs:
        def __init__(self, _: int, entry: str, *rest: object) -> None:
            self._params = gated._PARAMS[entry]

        def launch(self, grid: tuple[int, int, int], *params: object) -> None:
            launched.append(struct.pack(self._params, *params))

    launched: list[bytes] = []
    monkeypatch.setattr(gated, "_kernel", Packs)
    monkeypatch.setattr(
        runtime, "empty", lambda shape, dtype, _: torch.empty(shape, dtype=dtype, device="meta")
    )
    for count in (2**31 + 1, 2**34 + 8):  # by entries, and by eight of them
        large = torch.empty(count, dtype=BF16, device="meta")
        for run in (gated.activation, functools.partial(gated.activation_backward, large)):
            launched.clear()
            run(large, "silu")
            assert len(launched) == -(-count // 2**30)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x.flatten(1),
    "heads of a group": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "every second": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "turned": lambda x: x.mT.contiguous().mT,
    "in three runs": lambda x: x.unflatten(1, (6, 4)).transpose(1, 2),
    "expanded": lambda x: x[:, :1].expand(x.shape),
    "between others": lambda x: torch.cat([x, x, x], -1)[..., x.shape[-1] : 2 * x.shape[-1]],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "out"), [(BF16, BF16), (BF16, F32), (F16, F16), (F32, BF16), (F32, F32)])
def test_sums_over_few_tokens(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, out: torch.dtype, layout: str
) -> None:
    host_kernels.use(monkeypatch, columns)
    for tokens, kind, size in ((1, "special", 64), (2, "wide", 40), (9, "normal", 37), (32, "special", 8)):
        x = LAYOUTS[layout](values(kind, (tokens, 6, 4, size), dtype, tokens).flatten(1, 2))
        found = torch.full(x.shape[1:], torch.nan, dtype=out)
        columns.few_sums(x, found)
        assert_same_bits(found, reference_rows.column_sum(x, out), f"{tokens} tokens")


@pytest.mark.parametrize(
    ("dtype", "trig", "kind", "layout", "gradients", "full", "head", "pairs"),
    [
        (BF16, BF16, "special", "halves", "wide", True, 200, 32),
        (F16, F16, "tiny", "pairs", "rounded", False, 64, 32),
        (BF16, F32, "brink", "halves", "split", False, 128, 64),
    ],
)
def test_norm_rotary(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    trig: torch.dtype,
    kind: str,
    layout: str,
    gradients: str,
    full: bool,
    head: int,
    pairs: int,
) -> None:
    """With gradients, by positions, unknown ones too."""
    host_kernels.use(monkeypatch, norm_rotary)
    heads = values(kind, (2, 3, 5, head), dtype, 1)
    q, k = heads[..., :3, :], heads[..., 3:, :]
    grads = values(kind, (2, 3, 3, head), dtype, 2), values("normal", (2, 3, 2, head), dtype, 3)
    weights = [values("normal", (head,), dtype, seed) for seed in (4, 5)]
    cos, sin = (values("normal", (50, 2 * pairs if full else pairs), trig, seed) for seed in (6, 7))
    at = torch.tensor([[3, 49, 0], [50, -1, 7]])

    def run(module: Any, offset: float, once: bool) -> list[Tensor]:
        operands = q, k, *weights, cos, sin, at, 1e-6, offset, once, pairs, layout
        return [
            *module.norm_rotary(*operands),
            *module.norm_rotary_backward(*grads, *operands, gradients, True, True),
        ]

    for offset, once in ((0.0, False), (1.0, True)):
        for got, want in zip(run(norm_rotary, offset, once), run(reference, offset, once), strict=True):
            assert_same_bits(got, want, f"{offset} {once}")


@pytest.mark.parametrize("unsorted", [0, 512])
@pytest.mark.parametrize(("dtype", "n"), [(BF16, 264), (F32, 35)])
def test_embeddings(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, n: int, unsorted: int) -> None:
    """Ids that no other token has, that many have, and of padding."""
    host_kernels.use(monkeypatch, embeddings)
    monkeypatch.setattr(embeddings, "_UNSORTED", unsorted)
    monkeypatch.setattr(runtime, "zeroed", torch.Tensor.zero_)
    grad = values("special", (70, n), dtype, 1)
    ids = torch.randint(9, (70,), generator=torch.Generator().manual_seed(1))
    ids[[0, 33, 69]], ids[1::2] = torch.tensor([11, 12, 11]), 5
    for padding in (-1, 3):
        got = torch.full((14, n), torch.nan, dtype=dtype)
        embeddings.sums_by_id(grad, ids, got, padding)
        assert_same_bits(got, reference_rows.embedding_backward(grad, ids, 14, padding))


@pytest.mark.parametrize(
    ("dtype", "size", "heads", "kind", "aligned"),
    [
        (BF16, 128, 5, "special", True),
        (BF16, 64, 1, "brink", True),
        (F16, 200, 3, "normal", True),
        (BF16, 37, 4, "wide", True),
        (F16, 128, 4, "tiny", False),
        (F32, 128, 2, "special", True),
        (F32, 253, 3, "wide", True),
    ],
)
def test_sums_of_rows_of_gradients(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, size: int, heads: int, kind: str, aligned: bool
) -> None:
    """Of attention: D, and what each row adds to the gradient of its sink."""
    monkeypatch.setattr(runtime, "load", lambda spec, device: host_kernels.HostKernel(spec))
    monkeypatch.setattr(devices, "device_info", lambda device: INFO)
    monkeypatch.setattr(matmul, "family", lambda device: AMPERE)
    batch, queries = 2, 37
    grad, out = (values(kind, (batch, queries, heads, size + 8), dtype, seed) for seed in (1, 2))
    grad, out = grad[..., :size] if aligned else grad[..., 1 : size + 1], out[..., :size].contiguous()
    lse2 = torch.arange(batch * heads * queries).reshape(batch, heads, queries) % 7 - 3.0
    lse2[0, 0, 5] = -torch.inf
    contract = FMA if dtype == F32 else TENSOR_CORE.on(AMPERE)
    x = Attention(out, out, out, contract.key, 1.0, sinks=torch.zeros(heads))
    nan = torch.full_like(lse2, torch.nan)
    of_sinks = torch.full((batch * queries, heads), torch.nan)
    to = universal_backward.Gradients(nan, out, out, out, None, of_sinks)
    universal_backward.find_dots(x, grad, out, lse2, to)
    want = row_sum(grad.float() * out.float(), -1)
    assert_same_bits(to.dots, want.transpose(1, 2))
    sunk = -(torch.exp2(-lse2.transpose(1, 2)) * want)
    assert_same_bits(of_sinks.view_as(want), sunk.masked_fill(lse2.transpose(1, 2) == -torch.inf, 0.0))


def _told_of_rows(
    shown: Tensor, by_head: bool, group: int
) -> tuple[list[list[list[int]]], dict[tuple[int, ...], list[int]]]:
    """What ``find_rows`` finds, from ``[batch, heads, queries, keys]``: ``found``, and ``begins`` by row."""
    batch, heads, queries, _ = shown.shape
    found, begins = [], {}
    for b in range(batch):
        for h in range(heads):
            for i in range(queries):
                keys = shown[b, h, i].nonzero().flatten().tolist()
                side = 1 if by_head or heads == 1 else group
                before = (h - 1, i) if h % side else (h + side - 1, i - 1)
                others = (
                    shown[b, before[0], before[1]].nonzero().flatten().tolist() if before[1] >= 0 else None
                )
                goes_on = others is not None and keys[: len(others)] == others
                before_own = keys.index(i) if i in keys else -1 if keys else -2
                found.append([len(keys) if goes_on else ~len(keys), before_own])
                begins[b, h, i] = [*keys[::512], keys[-1] + 1 if keys else 0]
    return found, begins


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize(
    ("dtype", "keys", "heads"),
    [
        (torch.bool, 1200, 1),
        (torch.bool, 1536, 4),
        (torch.bool, 77, 4),
        (BF16, 640, 1),
        (F32, 1032, 4),
        (F16, 45, 4),
    ],
)
def test_rows_of_masks(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, keys: int, heads: int, by_head: bool
) -> None:
    """Of attention: what each row shows, read by 16 bytes and one by one."""
    monkeypatch.setattr(runtime, "load", lambda spec, device: host_kernels.HostKernel(spec))
    monkeypatch.setattr(runtime, "empty", lambda shape, dtype, device: torch.full(shape, -9, dtype=dtype))
    g = torch.Generator().manual_seed(keys)
    shown = (torch.arange(keys) <= torch.arange(keys - 9, keys)[:, None]).expand(2, heads, 9, keys).clone()
    shown[1, :, 2:5] &= torch.rand(keys, generator=g) > 0.2
    shown[0, :, 6] = False
    shown[0, -1, 7] = torch.rand(keys, generator=g) > 0.5
    shown[1, 0, 8] = torch.rand(keys, generator=g) > 0.01
    given = shown
    if dtype != torch.bool:
        given = torch.randn(shown.shape, generator=g).to(dtype).masked_fill(~shown, -torch.inf)
        given[0, 0, 0, 3] = -9000.0 if dtype != F16 else -torch.inf
        given[1, :, 3] *= 0
        given.masked_fill_(~shown, -torch.inf)
        shown = given.float() * 1.4426950408889634 > -8192
    q, k = torch.empty(2, 9, 4, 64, dtype=BF16), torch.empty(2, keys, 2, 64, dtype=BF16)
    x = Attention(q, k, k, TENSOR_CORE.on(AMPERE).key, 1.0, mask=given.expand(2, 4, 9, keys))
    rows = mask.find_rows(x, by_head=by_head)
    found, begins = _told_of_rows(shown, by_head, x.group)
    assert rows.found.flatten(0, 2).tolist() == found
    adds = torch.zeros_like(shown) if given is shown else shown & (given != 0)
    assert rows.begins[..., -2].bool().equal(adds.any(-1))
    for (b, h, i), want in begins.items():
        got = rows.begins[b, h, i].tolist()
        assert [*got[: len(want) - 1], got[-1]] == want, (b, h, i)


@pytest.fixture
def rows_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels that share rows. Plans of them are made for this test alone."""
    host_kernels.use(monkeypatch, l2norm)
    monkeypatch.setattr(runtime, "load", lambda spec, device: host_kernels.HostKernel(spec))
    monkeypatch.setattr(devices, "device_info", lambda device: INFO)
    forget_plans()
    yield
    forget_plans()


PLACES: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x,
    "heads of a wider matrix": lambda x: torch.cat([x, x], 2)[:, :, 1 : 1 + x.shape[2]],
    "by head": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "odd": lambda x: torch.nn.functional.pad(x, (3, 0))[..., 3:],
    "every second": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "repeated": lambda x: x[:, :, :1].expand(x.shape),
}


@pytest.mark.usefixtures("rows_on_a_cpu")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize(("shape", "kind"), [((2, 9, 3, 128), "normal"), ((1, 5, 2, 256), "special")])
def test_l2norm(dtype: torch.dtype, shape: tuple[int, ...], kind: str, place: str) -> None:
    """Of rows that lanes share, and of others; and its gradient, which lies in another way."""
    for size in (shape[-1], shape[-1] - 8, 37, 1):
        x, grad = (values(kind, (*shape[:-1], size), dtype, seed) for seed in (1, 2))
        for of_grad in (grad, PLACES["by head"](grad)):
            given = PLACES[place](x)
            got = l2norm.l2norm(given, EPS), l2norm.l2norm_backward(given, of_grad, EPS)
            want = reference.l2norm(given, EPS), reference.l2norm_backward(given, of_grad, EPS)
            for mine, right in zip(got, want, strict=True):
                assert_same_bits(mine, right, f"{size}")
