"""Attention: the naive implementation's bits, and queries whose bits depend on nothing but their sequence."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import samebits
from samebits import AMPERE, FMA, HOPPER, TENSOR_CORE, Contract, attention
from samebits.backends.reference.attention_kernels import exp2
from samebits.ops.attention import scaled_dot_product_attention
from samebits.testing import assert_same_bits, values
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

    def bits(x: Any) -> Any:
        return [bits(y) for y in x] if isinstance(x, list) else naive.finish(float(x), NAMES[dtype])

    width = torch.int32 if dtype == F32 else torch.int16
    return torch.tensor(bits(rows), dtype=torch.int64).to(width).view(dtype)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (9, 3), "scale": 0.3},
    "softcap, sinks": {"softcap": 1.5, "sinks": True, "causal": True},
    "boolean": {"mask": "boolean"},
    "float, softcap": {"mask": "float", "softcap": 2.0},
    "left padding": {"key_start": 3, "causal": True},
}


@on_devices
@pytest.mark.parametrize("contract", [FMA, TENSOR_CORE.on(HOPPER), TENSOR_CORE.on(AMPERE)], ids=str)
@pytest.mark.parametrize("kind", ["normal", "wide", "special"])
@pytest.mark.parametrize("name", OPTIONS)
def test_it_is_the_naive_one(device: str, contract: Contract, kind: str, name: str) -> None:
    """Two heads of q share one of k and v; 5 queries of 21 keys, and gradients."""
    check_against_naive(device, contract, kind, name, queries=5, keys=21)


@on_devices
@pytest.mark.parametrize("contract", [FMA, TENSOR_CORE.on(FAMILY)], ids=str)
def test_segments_are_those_of_the_naive_one(device: str, contract: Contract) -> None:
    for name, keys in (("softcap, sinks", 530), ("plain", 1100)):
        check_against_naive(device, contract, "normal", name, queries=2, keys=keys, gradients=False)


def check_against_naive(
    device: str,
    contract: Contract,
    kind: str,
    name: str,
    *,
    queries: int,
    keys: int,
    gradients: bool = True,
) -> None:
    if device == "cuda" and contract.mma not in (None, FAMILY):
        pytest.skip("a GPU computes its own family's bits")
    options = dict(OPTIONS[name])
    dtype = F32 if contract is FMA else (BF16, F16)[len(name) % 2]
    group, size, sizes = 2, 3, 4
    start = options.pop("key_start", 0)
    shapes = [(1, queries, group, size), (1, keys, 1, size), (1, keys, 1, sizes), (1, queries, group, sizes)]
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
    bias = None
    if mask == "boolean":
        hidden = torch.rand(group, queries, keys, generator=generator) < 0.4
        hidden[0, 3] = True
        visible &= ~hidden
        options["mask"] = ~hidden[None]
    elif mask == "float":
        bias = values("normal", (group, queries, keys), F32, 9)
        bias[torch.rand(bias.shape, generator=generator) < 0.2] = -math.inf
        options["mask"] = bias[None].clone().requires_grad_()
    if options.get("sinks"):
        options["sinks"] = torch.tensor([0.7, -math.inf]).requires_grad_()
    scale = float(np.float32(options.get("scale", 1 / math.sqrt(size))))
    reference = Naive(
        *(q[0].transpose(0, 1).tolist(), k[0, start:, 0].tolist(), v[0, start:, 0].tolist()),
        *(g[0].transpose(0, 1).tolist(), visible[:, :, start:].tolist(), scale),
        *(contract.mma.name if contract.mma else "FMA", NAMES[dtype], options.get("softcap", 0.0)),
        bias=None if bias is None else bias[:, :, start:].tolist(),
        sinks=options["sinks"].tolist() if "sinks" in options else None,
        offset=offset,
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
        assert_same_bits(grads[3][0], as_dtype(u, F32), "mask")
    if "sinks" in options:
        tokens = [[sinks[h][i] for h in range(group)] for i in range(queries)]
        assert_same_bits(grads[3], as_dtype(column_sum(tokens), F32), "sinks")
