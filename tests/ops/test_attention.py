"""Attention: the naive implementation's bits, and queries whose bits depend on nothing but their sequence."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import samebits
from samebits import AMPERE, FMA, HOPPER, TENSOR_CORE, Contract, attention
from samebits.backends.attention import HIDES
from samebits.backends.cuda import compiler
from samebits.backends.reference.attention_kernels import exp2
from samebits.ops.attention import scaled_dot_product_attention
from samebits.testing import assert_same_bits, bits, values
from tests.support import ROOT, naive
from tests.support.devices import DEVICES, FAMILY, case
from tests.support.naive_attention import Naive
from tests.support.naive_attention import exp2 as naive_exp2
from tests.support.naive_rows import column_sum

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
NAMES = {F32: "f32", BF16: "bf16", F16: "f16"}
on_devices = pytest.mark.parametrize("device", DEVICES)
in_dtypes = pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


def exp2_of(x: np.ndarray, *, interpolate: bool) -> np.ndarray:
    out = np.empty_like(x)
    exp2(x, out, interpolate, 0, len(x))
    return out


def test_interpolation_gives_the_recorded_table() -> None:
    recorded = np.load(ROOT / "tests" / "data" / "ex2_sm90.npz")
    increments = [np.unpackbits(recorded[name])[: 2**23 - 1].astype(np.int64) for name in ("inc", "inc2")]
    first = recorded["first"]
    table = np.concatenate([first, first[0] + np.cumsum(increments[0] + 2 * increments[1])])
    for n in (-2, -126):
        x = (n + np.arange(2**23) * 2.0**-23).astype(np.float32)
        exact = x == n + np.arange(2**23) * 2.0**-23  # not where x has fewer bits
        want = (table * 2.0 ** (n - 23)).astype(np.float32)
        np.testing.assert_array_equal(exp2_of(x, interpolate=True)[exact], want[exact])


@pytest.mark.parametrize("model", ["POLYNOMIAL", "INTERPOLATION"])
def test_exp2(model: str) -> None:
    """The page's function; exact for integers; close to 2^x."""
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [
            rng.uniform(-130, 130, 2000),
            rng.uniform(-1, 1, 1000) * 2.0 ** rng.integers(-40, 3, 1000),
            [0.0, -0.0, math.inf, -math.inf, 127.4, 127.6, -126.0, -126.4, -126.6, 1e30, -1e30, 1e-40],
        ]
    ).astype(np.float32)
    got = exp2_of(x, interpolate=model == "INTERPOLATION")
    want = np.array([naive_exp2(float(v), model) for v in x], np.float32)
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))
    integers = np.arange(-150, 128).astype(np.float32)
    exact = np.where(integers < -126, 0, 2.0 ** integers.astype(np.float64)).astype(np.float32)
    np.testing.assert_array_equal(exp2_of(integers, interpolate=model == "INTERPOLATION"), exact)
    assert np.isnan(exp2_of(np.array([np.nan], np.float32), interpolate=model == "INTERPOLATION"))[0]
    x = np.linspace(-125.99, 127.4, 1 << 18).astype(np.float32)
    true = np.exp2(x.astype(np.float64))
    ulps = (exp2_of(x, interpolate=model == "INTERPOLATION") - true) / np.spacing(true.astype(np.float32))
    assert np.abs(ulps).max() < {"POLYNOMIAL": 0.86, "INTERPOLATION": 2.1}[model]


def contracts(dtype: torch.dtype) -> Contract:
    return FMA if dtype == F32 else TENSOR_CORE.on(FAMILY)


def as_dtype(rows: Any, dtype: torch.dtype) -> Tensor:
    """Naive results in `dtype`: nested lists of floats."""

    def pattern(x: Any) -> Any:
        return [pattern(y) for y in x] if isinstance(x, list) else naive.finish(float(x), NAMES[dtype])

    width = torch.int32 if dtype == F32 else torch.int16
    return torch.tensor(pattern(rows), dtype=torch.int64).to(width).view(dtype)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (9, 3), "scale": 0.3},
    "softcap, sinks": {"softcap": 1.5, "sinks": True, "causal": True},
    "boolean": {"mask": "boolean"},
    "float, softcap": {"mask": "float", "softcap": 2.0},
    "left padding": {"key_start": 3, "causal": True},
    "boolean, causal": {"mask": "boolean", "causal": True},
    "float, window, left padding": {"mask": "float", "window": (9, 3), "key_start": 2},
}


@pytest.mark.sampled(2)
@on_devices
@pytest.mark.parametrize("contract", [FMA, TENSOR_CORE.on(HOPPER), TENSOR_CORE.on(AMPERE)], ids=str)
@pytest.mark.parametrize("kind", ["normal", "wide", "special"])
@pytest.mark.parametrize("name", OPTIONS)
def test_it_is_the_naive_one(device: str, contract: Contract, kind: str, name: str) -> None:
    """Two heads of q share one of k and v; 5 queries of 21 keys, and gradients."""
    check_against_naive(device, contract, kind, name, queries=5, keys=21)


@pytest.mark.sampled(2)
@on_devices
@pytest.mark.parametrize("contract", [FMA, TENSOR_CORE.on(FAMILY)], ids=str)
@pytest.mark.parametrize("name", ["boolean", "float, softcap", "boolean, causal"])
def test_masks_of_queries_with_keys_of_their_own(device: str, contract: Contract, name: str) -> None:
    """As many queries as keys: chains over queries restart where a query shows its own key first."""
    check_against_naive(device, contract, "normal", name, queries=35, keys=35)


@on_devices
@pytest.mark.parametrize("contract", [FMA, TENSOR_CORE.on(FAMILY)], ids=str)
def test_segments_are_those_of_the_naive_one(device: str, contract: Contract) -> None:
    for name, keys in (("softcap, sinks", 530), ("plain", 1100)):
        check_against_naive(device, contract, "normal", name, queries=2, keys=keys, gradients=False)
    check_against_naive(device, contract, "normal", "boolean", queries=2, keys=1400, gradients=False)


@on_devices
@pytest.mark.parametrize("contract", [FMA, TENSOR_CORE.on(FAMILY)], ids=str)
def test_latent_keys_are_those_of_the_naive_one(device: str, contract: Contract) -> None:
    """The sizes of DeepSeek's latent attention."""
    check_against_naive(device, contract, "normal", "causal", queries=2, keys=4, sizes=(576, 512))


def check_against_naive(
    device: str,
    contract: Contract,
    kind: str,
    name: str,
    *,
    queries: int,
    keys: int,
    gradients: bool = True,
    sizes: tuple[int, int] = (3, 4),
) -> None:
    if device == "cuda" and contract.mma not in (None, FAMILY):
        pytest.skip("a GPU computes its own family's bits")
    options = dict(OPTIONS[name])
    dtype = F32 if contract is FMA else (BF16, F16)[len(name) % 2]
    group, (size, of_values) = 2, sizes
    start = options.pop("key_start", 0)
    shapes = [(1, queries, group, size), (1, keys, 1, size), (1, keys, 1, of_values)]
    shapes.append((1, queries, group, of_values))
    q, k, v, g = (case(kind, shape, dtype, "cpu", seed) for seed, shape in enumerate(shapes))
    if gradients and kind == "special":
        g = case("normal", shapes[3], dtype, "cpu", 3)
    mask = options.pop("mask", None)
    generator = torch.Generator().manual_seed(5)
    visible = torch.ones(group, queries, keys, dtype=torch.bool)
    offset = 0
    if "causal" in options or "window" in options:
        left, right = (math.inf, 0) if "causal" in options else options["window"]
        offset = keys - queries - start
        distance = torch.arange(keys) - start - (torch.arange(queries)[:, None] + offset)
        visible &= (distance <= right) & (distance >= -left)
    bias = shown = None
    if mask == "boolean":
        shown = torch.rand(group, queries, keys, generator=generator) > 0.4
        shown[0, queries // 2] = False
        visible &= shown
        options["mask"] = shown[None]
    elif mask == "float":
        bias = values("normal", (group, queries, keys), F32, 9)
        shown = torch.rand(bias.shape, generator=generator) > 0.2
        visible &= shown
        bias[~shown] = -math.inf
        options["mask"] = bias[None].clone().requires_grad_()
    if options.get("sinks"):
        options["sinks"] = torch.tensor([0.7, -math.inf]).requires_grad_()
    scale = float(np.float32(options.get("scale", 1 / math.sqrt(size))))
    reference = Naive(
        *(q[0].transpose(0, 1).tolist(), k[0, start:, 0].tolist(), v[0, start:, 0].tolist()),
        *(g[0].transpose(0, 1).tolist(), visible[:, :, start:].tolist(), scale),
        *(contract.mma.name if contract.mma else "FMA", NAMES[dtype], options.get("softcap", 0.0)),
        bias=None if bias is None else bias[:, :, start:].tolist(),
        shown=None if shown is None else shown[:, :, start:].tolist(),
        sinks=options["sinks"].tolist() if "sinks" in options else None,
        offset=offset,
        own="causal" in options or "window" in options or queries == keys,
    )
    if start:
        options["key_start"] = torch.tensor([start])
        k[0, :start], v[0, :start] = math.nan, math.nan
    options = {x: y.to(device) if isinstance(y, Tensor) else y for x, y in options.items()}
    leaves = [t.to(device).requires_grad_() for t in (q, k, v)]
    out, lse = attention(*leaves, **options, return_lse=True, contract=contract)
    for h in range(group):
        rows = [reference.forward(h, i) for i in range(queries)]
        assert_same_bits(out[0, :, h].detach().cpu(), as_dtype([r[0] for r in rows], dtype), f"out {h}")
        assert_same_bits(lse[0, h].cpu(), as_dtype([r[1] for r in rows], F32), f"lse {h}")
    if not gradients:
        return
    extra = [t for t in (options.get("mask"), options.get("sinks")) if t is not None and t.requires_grad]
    grads = [t.cpu() for t in torch.autograd.grad(out, [*leaves, *extra], g.to(device))]
    dq, dk, dv, u, sinks = reference.gradients()
    assert_same_bits(grads[0][0].transpose(0, 1), as_dtype(dq, dtype), "q")
    for got, want, of in ((grads[1], dk, "k"), (grads[2], dv, "v")):
        assert_same_bits(got[0, start:, 0], as_dtype(want, dtype), of)
        assert not got[0, :start].any(), of
    if mask == "float":
        assert_same_bits(grads[3][0, :, :, start:], as_dtype(u, F32), "mask")
    if "sinks" in options:
        tokens = [[sinks[h][i] for h in range(group)] for i in range(queries)]
        assert_same_bits(grads[3], as_dtype(column_sum(tokens), F32), "sinks")


class Case:
    """A causal sequence of 700 tokens, and what one of its queries sees."""

    def __init__(self, dtype: torch.dtype, device: str, **options: Any) -> None:
        self.T, self.options, self.device = 700, {"causal": True} | options, device
        shapes = [(1, self.T, 4, 16), (1, self.T, 2, 16), (1, self.T, 2, 8)]
        self.q, self.k, self.v = (case("normal", s, dtype, device, i) for i, s in enumerate(shapes))
        self.out, self.lse = self.run(self.q, self.k, self.v)

    def run(self, q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Any:
        return attention(q, k, v, **self.options, **more, return_lse=True)

    def check(self, results: Any, start: int, stop: int, message: str) -> None:
        out, lse = results
        shape = (1, stop - start, 4, 8)
        assert_same_bits(out.reshape(shape), self.out[:, start:stop], message)
        assert_same_bits(lse.reshape(1, 4, -1), self.lse[:, :, start:stop], f"lse, {message}")

    def ints(self, *numbers: int) -> Tensor:
        return torch.tensor(numbers, device=self.device)


def surrounded(t: Tensor, before: int, after: int, value: float = math.nan) -> Tensor:
    """``t[1, tokens, ...]`` with other tokens around it."""
    shape = t.shape[2:]
    return torch.cat([t.new_full((1, before, *shape), value), t, t.new_full((1, after, *shape), value)], 1)


VARIANTS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": (150, 0)},
    "softcap, sinks": {"softcap": 3.0, "sinks": torch.tensor([0.1, -2.0, 3.0, 0.5])},
}
QUERIES = (0, 1, 127, 128, 129, 511, 512, 513, 699)
in_variants = pytest.mark.parametrize("name", VARIANTS)


@on_devices
@in_dtypes
@in_variants
class TestInvariance:
    """The bits of a query, and NaN in everything that is not of its sequence."""

    @pytest.fixture
    def of(self, device: str, dtype: torch.dtype, name: str) -> Case:
        options = {x: y.to(device) if isinstance(y, Tensor) else y for x, y in VARIANTS[name].items()}
        return Case(dtype, device, **options)

    def test_chunks_and_decoding(self, of: Case) -> None:
        for start, stop in ((0, 33), (33, 400), (400, 513), (513, 700), *((t, t + 1) for t in QUERIES)):
            chunk = of.run(of.q[:, start:stop], of.k[:, :stop], of.v[:, :stop])
            of.check(chunk, start, stop, f"{start} to {stop}")
            cache = (surrounded(t, 0, 50) for t in (of.k, of.v))
            cache = (t.clone().index_fill_(1, of.ints(*range(stop, 750)), math.nan) for t in cache)
            static = of.run(of.q[:, start:stop], *cache, key_length=of.ints(stop))
            of.check(static, start, stop, f"{start} to {stop} of a static cache")

    def test_padding(self, of: Case) -> None:
        for pad in (1, 16, 130):
            q, k, v = (surrounded(t, pad, 0) for t in (of.q, of.k, of.v))
            out, lse = of.run(q, k, v, key_start=of.ints(pad))
            of.check((out[:, pad:], lse[:, :, pad:]), 0, of.T, f"{pad} on the left")
            step = of.run(q[:, -1:], k, v, key_start=of.ints(pad))
            of.check(step, of.T - 1, of.T, f"a step with {pad} on the left")
        padded = (surrounded(t, 0, 70, 1.0) for t in (of.q, of.k, of.v))
        out, lse = of.run(*padded)
        of.check((out[:, : of.T], lse[:, :, : of.T]), 0, of.T, "on the right")

    def test_packing(self, of: Case) -> None:
        q, k, v = (surrounded(t, 5, 40)[0] for t in (of.q, of.k, of.v))
        ends = of.ints(0, 5, 5, 5 + of.T, of.T + 45)
        out, lse = of.run(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends)
        of.check((out[5 : 5 + of.T], lse[:, 5 : 5 + of.T]), 0, of.T, "packed")
        some = of.ints(0, 0, 5, 105, 110)
        q = torch.cat([q[:5], of.q[0, 600:], q[:5]])
        out, lse = of.run(q, k, v, cu_seqlens_q=some, cu_seqlens_k=of.ints(0, 3, 5, 5 + of.T, of.T + 45))
        of.check((out[5:105], lse[:, 5:105]), 600, 700, "packed, with a cache")

    @pytest.mark.parametrize("page", [1, 16, 48, 512])
    def test_pages(self, of: Case, page: int) -> None:
        count = -(-of.T // page)
        order = torch.randperm(count + 3, generator=torch.Generator().manual_seed(page))[:count]
        pages = []
        for t in (of.k, of.v):
            whole = surrounded(t, 0, count * page - of.T)[0].view(count, page, *t.shape[2:])
            store = torch.full((count + 3, *whole.shape[1:]), math.nan, dtype=t.dtype, device=t.device)
            store[order.to(t.device)] = whole
            pages.append(store)
        table = torch.stack([order, torch.full_like(order, -1)]).to(of.device)
        for t in (of.T - 1, 130):
            lengths = of.ints(t + 1, 0)
            q = torch.cat([of.q[:, t : t + 1]] * 2)
            out, lse = of.run(q, *pages, block_table=table, key_length=lengths)
            of.check((out[:1], lse[:1]), t, t + 1, "decoding")
            ends = of.ints(0, 1, 1)
            packed = of.run(q[0], *pages, block_table=table, key_length=lengths, cu_seqlens_q=ends)
            of.check(packed, t, t + 1, "packed decoding")
        q, lengths = of.q[:, -1:], of.ints(of.T)
        later = {"key_start": of.ints(5), "key_length": lengths, "block_table": table[:1]}
        flat = (t[:, 5:] for t in (of.k, of.v))
        for got, want in zip(of.run(q, *pages, **later), of.run(q, *flat), strict=True):
            assert_same_bits(got, want, "from the 6th slot on")


@on_devices
@in_dtypes
@in_variants
@pytest.mark.parametrize("causal", [True, False])
def test_gradients_do_not_depend_on_padding_or_packing(
    device: str, dtype: torch.dtype, name: str, causal: bool
) -> None:
    """Two sequences, of 150 and 75 tokens; what lies about the keys is NaN, about the queries it is 1."""
    variant: dict[str, Any] = {"window": (30, 20)} if name == "window" and not causal else VARIANTS[name]
    lengths, T = (150, 75), 150
    shapes = [(2, T, 4, 16), (2, T, 2, 16), (2, T, 2, 8), (2, T, 4, 8)]
    tensors = [case("normal", s, dtype, device, i) for i, s in enumerate(shapes)]
    windowed = causal or "window" in variant

    def gradients(tensors: list[Tensor], **options: Any) -> tuple[list[Tensor], Tensor | None]:
        *leaves, g = (t.detach().clone().requires_grad_() for t in tensors)
        sinks = variant.get("sinks")
        if sinks is not None:
            sinks = sinks.to(device).requires_grad_()
        out = attention(*leaves, **variant | {"causal": causal, "sinks": sinks} | options)
        found = torch.autograd.grad(out, [*leaves, *([] if sinks is None else [sinks])], g.detach())
        return [out.detach(), *found[:3]], found[3] if sinks is not None else None

    want: list[list[Tensor]] = []
    for b, n in enumerate(lengths):
        found, _ = gradients([t[b : b + 1, :n] for t in tensors])
        want.append([t[0] for t in found])
    ends = torch.tensor([0, 150, 225], device=device)
    packed, d_sinks = gradients(
        [torch.cat([t[b, :n] for b, n in enumerate(lengths)]) for t in tensors],
        cu_seqlens_q=ends,
        cu_seqlens_k=ends,
    )
    for got, one, two in zip(packed, *want, strict=True):
        assert_same_bits(got, torch.cat([one, two]), "packed")

    def padded(side: str, pad: int) -> list[Tensor]:
        rows = []
        for i, t in enumerate(tensors):
            row = torch.full((2, T + pad, *t.shape[2:]), (1.0, math.nan, math.nan, 0.0)[i], dtype=dtype)
            row = row.to(device)
            for b, n in enumerate(lengths):
                (row[b, T + pad - n :] if side == "left" else row[b, :n]).copy_(t[b, :n])
            rows.append(row)
        return rows

    for pad in (0, 7, 16):
        key_start = torch.tensor([T + pad - n for n in lengths], device=device)
        found, sinks = gradients(padded("left", pad), key_start=key_start)
        for got, one, two in zip(found, *want, strict=True):
            for b, expected in enumerate((one, two)):
                assert_same_bits(got[b, T + pad - lengths[b] :], expected, f"{pad} on the left")
        if sinks is not None:
            assert d_sinks is not None
            assert_same_bits(sinks, d_sinks, "sinks, on the left")
        rows = padded("right", pad)
        if windowed:  # these bits ask for no lengths: a query does not see what is behind it
            if not causal:
                continue
            rows[1:3] = [t.nan_to_num(1.0) for t in rows[1:3]]
            found, sinks = gradients(rows)
        else:
            found, sinks = gradients(rows, key_length=torch.tensor(lengths, device=device))
        for got, one, two in zip(found, *want, strict=True):
            for b, expected in enumerate((one, two)):
                assert_same_bits(got[b, : lengths[b]], expected, f"{pad} on the right")
        if sinks is not None:
            assert d_sinks is not None
            assert_same_bits(sinks, d_sinks, "sinks, on the right")


@on_devices
@in_dtypes
def test_accuracy(device: str, dtype: torch.dtype) -> None:
    """Errors against float64, beside those of PyTorch's kernels."""
    q, k, v, g = (case("normal", (1, 900, 2, 64), dtype, device, seed) for seed in range(4))

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        by_head = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(*by_head, is_causal=True).transpose(1, 2)

    def run(f: Callable[..., Any], dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in (q, k, v)]
        out = f(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, g.to(dtype))]

    exact = run(theirs, torch.float64)

    def errors(results: list[Tensor]) -> list[float]:
        return [float((x - y).norm() / y.norm()) for x, y in zip(results, exact, strict=True)]

    ours = errors(run(lambda *t: attention(*t, causal=True), dtype))
    for name, mine, other in zip(("out", "q", "k", "v"), ours, errors(run(theirs, dtype)), strict=True):
        # A chain over 900 tokens in float32 has a larger error than a tree of partial sums.
        assert mine <= (1.5 if name == "out" or dtype != F32 else 2.2) * other, name
    _, lse = attention(q, k, v, causal=True, return_lse=True)
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) / 8
    hidden = torch.ones(900, 900, dtype=torch.bool, device=device).triu(1)
    want = scores.masked_fill(hidden, -math.inf).logsumexp(-1)
    torch.testing.assert_close(lse.double(), want, rtol=3e-7, atol=1e-6)


@on_devices
@in_dtypes
def test_queries_without_keys(device: str, dtype: torch.dtype) -> None:
    q, k = case("normal", (2, 5, 2, 8), dtype, device), case("normal", (2, 3, 2, 8), dtype, device, 1)
    for options in (
        {"causal": True},  # the first two queries come before the first key
        {"mask": torch.tensor([[False] * 3] * 2 + [[True] * 3] * 3, device=device)},
    ):
        leaves = [t.clone().requires_grad_() for t in (q, k, k)]
        out, lse = attention(*leaves, **options, return_lse=True)  # type: ignore[arg-type]
        assert_same_bits(out[:, :2].detach(), torch.zeros_like(q[:, :2]))
        assert torch.equal(lse[:, :, :2], torch.full_like(lse[:, :, :2], -math.inf))
        assert out[:, 2:].all()
        dq, dk, dv = torch.autograd.grad(out, leaves, torch.ones_like(out))
        assert_same_bits(dq[:, :2], torch.zeros_like(q[:, :2]))
        later = [t.clone().requires_grad_() for t in (q[:, 2:], k, k)]
        mask = {"mask": options["mask"][2:]} if "mask" in options else options
        want = torch.autograd.grad(attention(*later, **mask).sum(), later)  # type: ignore
        if dtype == F32:  # in 16 bits two queries less move the others to other groups
            for got, expected in zip((dq[:, 2:], dk, dv), want, strict=True):
                assert_same_bits(got, expected)


@on_devices
@in_dtypes
@pytest.mark.parametrize("sizes", [(0, 3), (3, 0), (0, 0)])
def test_empty(device: str, dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    queries, keys = sizes
    shapes = [(2, queries, 4, 8), (2, keys, 2, 8), (2, keys, 2, 6)]
    leaves = [torch.ones(s, dtype=dtype, device=device).requires_grad_() for s in shapes]
    sinks = torch.ones(4, device=device).requires_grad_()
    out, lse = attention(*leaves, sinks=sinks, return_lse=True)
    assert out.shape == (2, queries, 4, 6)
    assert_same_bits(out.detach(), torch.zeros_like(out))
    torch.testing.assert_close(lse, torch.ones_like(lse))
    for leaf, grad in zip((*leaves, sinks), torch.autograd.grad(out.sum(), (*leaves, sinks)), strict=True):
        assert_same_bits(grad, torch.zeros_like(leaf))


@on_devices
@in_dtypes
def test_infinities_and_nan(device: str, dtype: torch.dtype) -> None:
    """They reach the queries that see them, and no other."""
    q, k, v = (case("normal", (1, 300, 1, 16), dtype, device, seed) for seed in range(3))
    clean = attention(q, k, v, causal=True)
    for where, value in ((k, math.nan), (k, math.inf), (v, math.nan), (v, math.inf)):
        poisoned = where.clone()
        poisoned[:, 200] = value
        operands = (q, poisoned, v) if where is k else (q, k, poisoned)
        lengths = {"key_length": torch.tensor([200], device=device)}
        assert_same_bits(attention(q[:, :200], *operands[1:], causal=True, **lengths), clean[:, :200])
        out = attention(*operands, causal=True)
        if where is k:
            assert_same_bits(out[:, :200], clean[:, :200])
        assert not out[:, 200:].isfinite().any() if math.isnan(value) else not out[:, 200:].isfinite().all()
    nan = attention(q[:, :1], torch.full_like(k, math.nan), v)
    assert (bits(nan) == (0x7FFFFFFF if dtype == F32 else 0x7FFF)).all()


@on_devices
@in_dtypes
def test_strides_and_scales(device: str, dtype: torch.dtype) -> None:
    q, k, v, g = (case("normal", (2, 40, 3, 16), dtype, device, seed) for seed in range(4))

    def run(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        out = attention(*leaves, **options)
        return [out.detach(), *torch.autograd.grad(out, leaves, g)]

    want = run(q, k, v)
    laid = [
        q.transpose(1, 2).contiguous().transpose(1, 2),
        torch.stack([k, torch.full_like(k, math.nan)], -1)[..., 0],
        v[:, :, :1].expand_as(v),
    ]
    for got, expected in zip(run(*laid), run(q, k, v[:, :, :1].repeat(1, 1, 3, 1)), strict=True):
        assert_same_bits(got, expected)
    negative = run(-q, k, v, scale=-0.25)
    assert_same_bits(negative[0], want[0])
    assert_same_bits(-negative[1], want[1])
    even = run(q, k, v, scale=0)
    assert_same_bits(even[0][:, :1].expand_as(even[0]), even[0])
    assert not even[1].any()


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_16_bits_under_fma_are_widened(dtype: torch.dtype) -> None:
    q, k, v = (values("normal", (1, 200, 2, 16), dtype, seed) for seed in range(3))
    out, lse = attention(q, k, v, causal=True, return_lse=True, contract=FMA)
    wide, wide_lse = attention(q.float(), k.float(), v.float(), causal=True, return_lse=True)
    assert_same_bits(out, wide.to(dtype))
    assert_same_bits(lse, wide_lse)


def test_compiled_whole() -> None:
    q, k, v = (values("normal", (2, 20, 2, 8), F32, seed).requires_grad_() for seed in range(3))
    start = torch.tensor([0, 3])

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attention(q, k, v, window=(9, 0), softcap=5.0, key_start=start, return_lse=True)
        return out[0] * out[1].transpose(1, 2)[..., None].clamp(-1, 1)

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    results = [g(q, k, v) for g in (f, compiled)]
    want, got = ([out, *torch.autograd.grad(out.sum(), (q, k, v))] for out in results)
    for x, y in zip(got, want, strict=True):
        assert_same_bits(x, y)


@on_devices
@in_dtypes
class TestOfPyTorch:
    """F.scaled_dot_product_attention, in terms of attention."""

    def test_is_causal_is_top_left(self, device: str, dtype: torch.dtype) -> None:
        q, k, v = (case("normal", (2, 4, n, 16), dtype, device, n) for n in (20, 31, 31))
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        short = attention(*(t[:, :, :20].transpose(1, 2) for t in (q, k, v)), causal=True)
        assert_same_bits(out, short.transpose(1, 2))

    def test_padding_is_found_in_masks(self, device: str, dtype: torch.dtype) -> None:
        """Positions begin at the first key that a row of the batch sees."""
        T, starts = 150, (0, 37, 140)
        tensors = [case("normal", (3, 4, T, 16), dtype, device, seed) for seed in range(4)]
        mask = torch.ones(3, 1, T, T, dtype=torch.bool, device=device).tril()
        for b, start in enumerate(starts):
            mask[b, :, :, :start] = False
            tensors[3][b, :, :start] = 0

        def run(tensors: list[Tensor], **options: Any) -> list[Tensor]:
            *leaves, g = (t.detach().requires_grad_() for t in tensors)
            out = scaled_dot_product_attention(*leaves, **options)
            return [out.detach(), *torch.autograd.grad(out, leaves, g.detach())]

        hide = [(F32, torch.finfo(F32).min), (dtype, torch.finfo(dtype).min), (dtype, -1e4)]
        masks = [torch.zeros_like(mask, dtype=of).masked_fill_(~mask, value) for of, value in hide]
        for given in (mask, *masks):
            found = run(tensors, mask=given)
            for b, start in enumerate(starts):
                alone = run([t[b : b + 1, :, start:] for t in tensors], is_causal=True)
                for got, want in zip(found, alone, strict=True):
                    assert_same_bits(got[b : b + 1, :, start:], want, f"row {b}")
        step = scaled_dot_product_attention(tensors[0][:, :, -1:], *tensors[1:3], mask[:, :, -1:])
        assert_same_bits(step, run(tensors, mask=mask)[0][:, :, -1:], "a step")

    @pytest.mark.parametrize("hides", [-torch.inf, -6e3, -1e4, -1e9, -1e30])
    def test_what_hides_in_a_float_mask(self, device: str, dtype: torch.dtype, hides: float) -> None:
        """Keys, also all keys of a query, as a boolean mask does: with such weights it has no precision."""
        mask = torch.rand(1, 2, 40, 150, device=device) < 0.5
        mask[:, :, 3], mask[:, :, 5, 1:] = False, False
        tensors = [case("normal", (1, 2, n, 16), dtype, device, n) for n in (40, 150, 151, 41)]

        def run(mask: Tensor) -> list[Tensor]:
            *leaves, g = (
                t[:, :, :n].detach().requires_grad_()
                for t, n in zip(tensors, (40, 150, 150, 40), strict=True)
            )
            out = scaled_dot_product_attention(*leaves, mask=mask)
            return [out.detach(), *torch.autograd.grad(out, leaves, g.detach())]

        added = torch.zeros_like(mask, dtype=F32).masked_fill_(~mask, hides)
        for got, want in zip(run(added), run(mask), strict=True):
            assert_same_bits(got, want)
        assert not run(added)[0][:, :, 3].any()

    def test_what_does_not_hide_in_a_float_mask(self, device: str, dtype: torch.dtype) -> None:
        """Down to -5,678 a query all of whose keys have one mask has the weights of none."""
        q, k, v, g = (case("normal", (1, 2, n, 16), dtype, device, n) for n in (5, 60, 61, 6))
        q.zero_()  # at this size scores of less than some hundredths are lost

        def run(mask: Tensor | None) -> list[Tensor]:
            leaves = [t.detach().requires_grad_() for t in (q, k, v[:, :, :60])]
            out = scaled_dot_product_attention(*leaves, mask=mask)
            return [out.detach(), *torch.autograd.grad(out, leaves, g[:, :, :5].detach())]

        plain = run(None)
        for value, shown in ((-5600.0, True), (-5677.0, True), (-5679.0, False)):
            out, *grads = run(torch.full((1, 1, 5, 60), value, device=device))
            assert out.any() == shown
            assert grads[2].any() == shown
            if shown:
                torch.testing.assert_close(out, plain[0], rtol=1e-2, atol=1e-2)
                torch.testing.assert_close(grads[2], plain[3], rtol=1e-2, atol=1e-2)

    def test_gradients_of_a_mask(self, device: str, dtype: torch.dtype) -> None:
        """A bias for all of the batch, as T5's: a chain over its rows, in float32, rounded once."""
        q, k, v, g = (case("normal", (3, 2, 20, 8), dtype, device, seed) for seed in range(4))
        bias = case("normal", (1, 2, 20, 20), dtype, device, 5)

        def gradient(bias: Tensor, rows: slice) -> Tensor:
            bias = bias.detach().requires_grad_()
            with samebits.batch_invariant("error"):
                out = F.scaled_dot_product_attention(q[rows], k[rows], v[rows], bias)
            return torch.autograd.grad(out, bias, g[rows])[0]

        total = torch.zeros(bias.shape, device=device)
        for b in range(3):
            total += gradient(bias.to(F32), slice(b, b + 1))
        assert_same_bits(gradient(bias, slice(None)), total.to(dtype))

    @pytest.mark.parametrize(
        ("shapes", "mask"),
        [
            (((5, 8), (7, 8), (7, 6)), (5, 7)),
            (((3, 5, 8), (3, 7, 8), (3, 7, 6)), (7,)),
            (((3, 5, 8), (1, 7, 8), (7, 6)), (3, 1, 7)),
            (((2, 1, 3, 5, 8), (4, 3, 7, 8), (2, 4, 1, 7, 6)), (4, 1, 5, 7)),
            (((2, 1, 3, 5, 8), (4, 3, 7, 8), (2, 4, 1, 7, 6)), None),
        ],
    )
    def test_broadcasting(self, device: str, dtype: torch.dtype, shapes: Any, mask: Any) -> None:
        q, k, v = (case("normal", s, dtype, device, seed) for seed, s in enumerate(shapes))
        given = None if mask is None else case("normal", mask, dtype, device, 5)
        out = scaled_dot_product_attention(q, k, v, given)
        want = F.scaled_dot_product_attention(
            *(t.double() for t in (q, k, v)), None if given is None else given.double()
        )
        torch.testing.assert_close(out.double(), want, rtol=0.02, atol=0.02)


Q, K, V = torch.ones(2, 5, 4, 8), torch.ones(2, 7, 2, 8), torch.ones(2, 7, 2, 6)
ENDS = torch.tensor([0, 2, 5])
PAGES = {"block_table": torch.zeros(2, 3, dtype=torch.int32), "key_length": torch.tensor([3, 7])}
ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": Q.double()}, TypeError, "q: expected bfloat16, float16 or float32, got torch.float64"),
    ({"k": K.half()}, TypeError, "k: expected torch.float32 like q, got torch.float16"),
    ({"q": Q[0]}, ValueError, r"q: expected \[batch, .* got \(5, 4, 8\)"),
    ({"k": K[0], "v": V[0]}, ValueError, "k: expected"),
    ({"q": Q[..., :7]}, ValueError, "q, k: expected one last size"),
    ({"q": Q[..., :0], "k": K[..., :0]}, ValueError, "q, v: expected last sizes above 0"),
    ({"v": V[..., :0]}, ValueError, r"q, v: expected last sizes above 0, got .* and \(2, 7, 2, 0\)"),
    ({"v": V[:, :6]}, ValueError, "k, v: expected as many tokens and heads"),
    ({"q": Q[:, :, :3]}, ValueError, "q, k: expected a number of heads in q that is a multiple of k's"),
    ({"q": Q[:1]}, ValueError, "q, k: expected one batch size"),
    ({"window": (1, -2)}, ValueError, "window: expected two integers >= -1"),
    ({"window": 3}, ValueError, "window: expected two integers"),
    (
        {"window": (3, 1), "causal": True},
        ValueError,
        "window: expected 0 or -1 to the right with causal, got 1",
    ),
    ({"scale": math.inf}, ValueError, "scale: expected a magnitude below 1e\\+38, got inf"),
    ({"softcap": -1.0}, ValueError, r"softcap: expected one in \[0, 1e\+38\), got -1.0"),
    ({"sinks": torch.ones(3)}, ValueError, r"sinks: expected shape \(4,\), got \(3,\)"),
    ({"sinks": torch.ones(4, dtype=torch.int32)}, TypeError, "sinks: expected bfloat16"),
    ({"mask": torch.ones(5, 6)}, ValueError, r"mask: expected a shape that broadcasts to \(2, 4, 5, 7\)"),
    ({"mask": torch.ones(5, 7).int()}, TypeError, "mask: expected bfloat16"),
    ({"cu_seqlens_q": ENDS}, ValueError, "cu_seqlens_q: expected cu_seqlens_k or block_table with it"),
    ({"cu_seqlens_k": ENDS}, ValueError, "cu_seqlens_k: expected cu_seqlens_q with it"),
    ({"key_start": torch.tensor([1])}, ValueError, r"key_start: expected shape \(2\), got \(1,\)"),
    ({"key_start": torch.ones(2)}, TypeError, "key_start: expected int32 or int64, got torch.float32"),
    (
        {"key_start": torch.tensor([0, 8])},
        ValueError,
        "0 <= start <= length <= 7 .*got 8 and 7 of sequence 1",
    ),
    ({"key_length": torch.tensor([0, 8])}, ValueError, "key_length: expected .* got 0 and 8 of sequence 1"),
    ({"key_length": torch.tensor([2**32 + 3, 7])}, ValueError, "got 0 and 4294967299 of sequence 0"),
    ({"cu_seqlens_q": [0, 2, 5]}, TypeError, "cu_seqlens_q: expected a Tensor, got list"),
    ({"key_length": 7}, TypeError, "key_length: expected a Tensor, got int"),
    ({"block_table": PAGES["block_table"]}, ValueError, "key_length: expected lengths with block_table"),
    (PAGES | {"block_table": torch.full((2, 3), 2)}, ValueError, r"pages in \[0, 2\), got 2 of sequence 0"),
    (PAGES | {"q": Q.clone().requires_grad_()}, NotImplementedError, "block_table: gradients"),
]
PACKED = {"q": Q[0], "k": K[0, :5], "v": V[0, :5], "cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS}
ERRORS += [
    (PACKED | change, error, match)  # type: ignore[operator]
    for change, error, match in (
        ({"cu_seqlens_k": ENDS[:2]}, ValueError, r"cu_seqlens_k: expected shape \(3\), got \(2,\)"),
        ({"cu_seqlens_k": torch.tensor([0, 3, 4])}, ValueError, "cu_seqlens_k: expected to run from 0 to 5"),
        ({"cu_seqlens_q": torch.tensor([0, 6, 5])}, ValueError, "cu_seqlens_q: expected non-decreasing"),
        ({"mask": torch.ones(5, 5)}, ValueError, "mask: expected none with cu_seqlens_q"),
        ({"key_start": torch.zeros(2).int()}, ValueError, "key_start: expected none with cu_seqlens_k"),
        ({"cu_seqlens_q": ENDS.short()}, TypeError, "cu_seqlens_q: expected int32 or int64"),
    )
]


@pytest.mark.parametrize(("arguments", "error", "match"), ERRORS, ids=range(len(ERRORS)))
def test_errors(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        attention(**{"q": Q, "k": K, "v": V} | arguments)


OPS = torch.ops.samebits


def operands(*, grad: bool, packed: bool) -> tuple[Any, ...]:
    """Arguments of the operator."""
    leading = (5,) if packed else (2, 5)
    sizes = ((4, 8), (2, 8), (2, 6))
    q, k, v = (torch.randn(*leading, *size, requires_grad=grad) for size in sizes)
    ends = ENDS.int() if packed else None
    mask = None if packed else torch.randn(2, 1, 5, 5, requires_grad=grad)
    sinks = torch.randn(4, requires_grad=grad)
    start = None if packed else torch.tensor([0, 1], dtype=torch.int32)
    return (q, k, v, mask, sinks, ends, ends, start, None, None, -1, 0, "last", 0.5, 3.0, FMA.key)


def paged_call(device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Two packed sequences, of 5 and 1 queries and 21 and 130 keys, in pages of 16."""
    lengths = torch.tensor([21, 130], device=device)
    table = torch.randperm(22, generator=torch.Generator().manual_seed(3)).view(2, 11).to(device)
    k, v = (case("normal", (22, 16, 2, size), dtype, device, size) for size in (16, 24))
    return {
        "q": case("normal", (6, 4, 16), dtype, device, 0),
        **{"k": k, "v": v, "causal": True, "block_table": table, "key_length": lengths},
        "cu_seqlens_q": torch.tensor([0, 5, 6], device=device),
    }


def places(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Tensors of a shape, and the memory that they lie in."""

    def poison(*size: int) -> Tensor:
        return torch.full(size, torch.nan, dtype=dtype, device=device)

    tokens, heads, size = shape
    whole = poison(*shape)
    yield "contiguous", whole, whole
    flat = poison(tokens * heads * size + 8)
    yield "aligned slice", flat[8:].view(shape), flat
    yield "unaligned slice", flat[1:-7].view(shape), flat
    by_head = poison(heads, tokens, size)
    yield "heads first", by_head.transpose(0, 1), by_head
    gaps = poison(tokens, heads, 2 * size)
    yield "columns", gaps[..., size:], gaps
    backwards = poison(size, heads, tokens)
    yield "reversed", backwards.permute(2, 1, 0), backwards


@on_devices
@in_dtypes
def test_out(device: str, dtype: torch.dtype) -> None:
    """The same bits, in memory of any layout, and nothing is written beside it."""
    call = paged_call(device, dtype)
    want, want_lse = attention(**call, return_lse=True)
    for name, out, memory in places((6, 4, 24), dtype, device):
        memory.fill_(torch.nan)
        version = out._version
        got, lse = attention(**call, return_lse=True, out=out)
        assert got is out, name
        assert_same_bits(out, want)
        assert_same_bits(lse, want_lse)
        assert memory.isnan().sum() == memory.numel() - out.numel(), name
        assert out._version > version, name
    padded = [t[None, :5] for t in (call["q"], call["q"], call["q"])]
    out = torch.full_like(padded[0], torch.nan)
    assert attention(*padded, scale=-1.0, out=out) is out
    assert_same_bits(out, attention(*padded, scale=-1.0))
    empty = call["q"][None, :0]
    assert attention(empty, empty, empty, out=empty.clone()).shape == empty.shape


def test_out_in_inference_mode_and_under_autocast() -> None:
    call = paged_call("cpu", BF16)
    want = attention(**call)
    with torch.inference_mode():
        out = torch.empty_like(want)
        assert_same_bits(attention(**call, out=out), want)
        assert_same_bits(attention(**call, out=torch.empty(4, 6, 24).to(BF16).transpose(0, 1)), want)
    wide = {name: t.float() if isinstance(t, Tensor) and t.dtype == BF16 else t for name, t in call.items()}
    with torch.autocast("cpu", BF16):
        assert_same_bits(attention(**wide, out=out.clone()), want)


def test_out_compiled() -> None:
    call = paged_call("cpu", F32)
    want, want_lse = attention(**call, return_lse=True)

    def layer(out: Tensor) -> tuple[Tensor, Tensor]:
        written, lse = attention(**call, return_lse=True, out=out)
        return written * 2, lse

    torch._dynamo.reset()
    out = torch.full_like(want, torch.nan)
    doubled, lse = torch.compile(layer, backend="aot_eager", fullgraph=True)(out)
    assert_same_bits(out, want)
    assert_same_bits(doubled, want * 2)
    assert_same_bits(lse, want_lse)


@on_devices
def test_out_with_memory_of_others(device: str) -> None:
    both = case("normal", (2, 5, 4, 16), BF16, device, 0)
    q, out = both[..., :8], both[..., 8:]
    k, v = (case("normal", (2, 7, 2, 8), BF16, device, n) for n in (1, 2))
    want = attention(q, k, v)
    assert_same_bits(attention(q, k, v, out=out), want)  # between q's columns
    for name, wrong in (
        ("q", q),
        ("q", both.view(-1)[4:324].view(2, 5, 4, 8)),
        ("k", torch.cat([k.flatten(), k.flatten()]).view(2, 14, 2, 8)),
        ("elements", torch.empty(1, 1, 4, 8, dtype=BF16, device=device).expand(2, 5, 4, 8)),
    ):
        keys = wrong[:, :7] if name == "k" else k
        target = wrong.view(-1)[:320].view(2, 5, 4, 8) if name == "k" else wrong
        match = "that do not overlap" if name == "elements" else f"got memory that {name} shares"
        before = target.clone()
        with pytest.raises(ValueError, match=match):
            attention(q, keys, v, out=target)
        assert_same_bits(target, before)


OUT = torch.empty(2, 5, 4, 6)
OUT_ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"out": OUT.half()}, TypeError, "out: expected a dense float32 tensor, got torch.float16"),
    ({"out": [OUT]}, TypeError, "out: expected a dense float32 tensor, got list"),
    ({"out": OUT.to_sparse()}, TypeError, "out: expected a dense float32 tensor, got layout"),
    ({"out": OUT[..., :5]}, ValueError, r"out: expected shape \(2, 5, 4, 6\), got \(2, 5, 4, 5\)"),
    ({"out": OUT[0]}, ValueError, r"out: expected shape \(2, 5, 4, 6\), got \(5, 4, 6\)"),
    ({"out": OUT.to("meta")}, ValueError, "out"),
    ({"out": OUT.clone().requires_grad_()}, NotImplementedError, "out: gradients"),
    ({"out": OUT, "sinks": torch.ones(4, requires_grad=True)}, NotImplementedError, "out: gradients"),
    ({"out": torch._neg_view(OUT)}, TypeError, "out: expected a plain tensor, got a view with negated"),
]


@pytest.mark.parametrize(("arguments", "error", "match"), OUT_ERRORS, ids=range(len(OUT_ERRORS)))
def test_errors_of_out(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        attention(**{"q": Q, "k": K, "v": V} | arguments)
    with torch.inference_mode():
        of_inference = torch.empty_like(OUT)
    with pytest.raises(TypeError, match="out: expected a plain tensor, got one made in inference mode"):
        attention(Q, K, V, out=of_inference)
    with pytest.raises(NotImplementedError, match=r"out: torch\.vmap is not implemented"):
        torch.vmap(lambda q: attention(q, K, V, out=OUT))(Q[None])


@pytest.mark.parametrize("packed", [False, True])
def test_opcheck(packed: bool) -> None:
    torch.library.opcheck(OPS.attention.default, operands(grad=True, packed=packed))
    arguments = operands(grad=False, packed=packed)
    out, _, lse2 = OPS.attention(*arguments)
    gradients = torch.randn_like(out), out, lse2, not packed
    torch.library.opcheck(OPS.attention_backward.default, (*gradients, *arguments))
    torch.library.opcheck(OPS.attention_out.default, (torch.empty_like(out), *arguments))


def test_a_mask_hides_alike_in_kernels_and_in_the_reference() -> None:
    header = (compiler.INCLUDE / "attention_mask.cuh").read_text()
    assert f"constexpr float HIDES = {HIDES:.1f}f;" in header
