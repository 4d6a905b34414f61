"""Log-probabilities: the reference against tests/support/naive.py, rows, gradients, accuracy."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import samebits
from samebits import FMA, TENSOR_CORE, Contract
from samebits.backends.cuda import compiler
from samebits.backends.cuda.logp import kernel_spec
from samebits.backends.logits_in_pieces import grad_logits, logits_of
from samebits.backends.reference import linear_logp as reference
from samebits.backends.token_logps import Rows
from samebits.testing import assert_same_bits, values
from tests.contract.test_conformance import CONTRACTS, NAMES, cases, expected
from tests.support import naive
from tests.support.cubins import resources
from tests.support.devices import ARCH, DEVICES, FAMILY, multiprocessors
from tests.support.naive import f32

KINDS = ["normal", "wide", "one-hot", "uniform", "masked", "infinite", "nan", "nothing"]


def rows(kind: str, tokens: int, vocabulary: int, seed: int = 0) -> Tensor:
    """Logits ``[tokens, vocabulary]``, f32."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(tokens, vocabulary, generator=generator)
    at = torch.randint(vocabulary, (tokens, 1), generator=generator)
    if kind == "wide":
        return z * 2000
    if kind == "one-hot":
        return z.scatter(1, at, 300.0)
    if kind == "uniform":
        return torch.full_like(z, 3.7)
    if kind == "masked":
        return z.masked_fill(torch.rand(z.shape, generator=generator) < 0.8, -torch.inf)
    if kind == "nothing":
        return torch.full_like(z, -torch.inf)
    special = {"infinite": torch.inf, "nan": torch.nan}
    if kind in special:
        return z.scatter(1, at, special[kind])
    return z


NAN = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)


def canonical(values: object) -> Tensor:
    """float32 values of tests/support/naive.py, every NaN the canonical one."""
    t = torch.tensor(np.array(values, np.float32))
    return torch.where(t.isnan(), NAN, t)


def narrow(values: list[list[np.float32]], dtype: torch.dtype) -> Tensor:
    """Rounded as a result is, by tests/support/naive.py."""
    patterns = [[naive.finish(float(x), NAMES[dtype]) for x in row] for row in values]
    return torch.tensor(patterns).to(torch.int32 if dtype == torch.float32 else torch.int16).view(dtype)


@pytest.mark.parametrize("vocabulary", [1, 3, 130])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", DEVICES)
def test_logp_is_the_naive_one(device: str, kind: str, vocabulary: int) -> None:
    for dtype in NAMES if kind in ("normal", "masked") else [torch.float32]:
        z = rows(kind, 4, vocabulary).to(dtype).requires_grad_()
        target = torch.tensor([0, vocabulary // 2, -100, vocabulary - 1])
        grad = torch.tensor([1.0, -0.3, 1.0, 1e-3])
        given = z.detach().to(device).requires_grad_()
        out = samebits.logp(given, target.to(device))
        want = [naive.logp(z[i].tolist(), t)[0] if t >= 0 else 0.0 for i, t in enumerate(target.tolist())]
        assert_same_bits(out, canonical(want))
        (dz,) = torch.autograd.grad(out, given, grad.to(device))
        want_dz = [
            naive.grad_logits(z[i].tolist(), t, grad[i].item()) if t >= 0 else [f32(0)] * vocabulary
            for i, t in enumerate(target.tolist())
        ]
        assert_same_bits(dz, narrow(want_dz, dtype))


@pytest.mark.parametrize("device", DEVICES)
def test_more_blocks_than_chains(device: str) -> None:
    z = rows("normal", 1, 34 * 128 + 1)
    want = naive.logp(z[0].tolist(), 4200)[0]
    assert_same_bits(samebits.logp(z.to(device), torch.tensor([4200], device=device)), canonical([want]))


def naive_linear_logp(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    grads: list[Tensor],
    contract: Contract,
    temperature: float,
    sequences: list[tuple[int, int]],
) -> dict[str, Tensor]:
    """Results and gradients for ``hidden[tokens, D]``."""
    f32_bias = None if bias is None else bias.float()
    z = expected(hidden, weight.mT, contract, out=torch.float32, bias=f32_bias).tolist()
    pairs = [naive.logp(row, max(t, 0), temperature) for row, t in zip(z, target.tolist(), strict=True)]
    ignored = target == -100
    dz = [
        [f32(0)] * len(row)
        if t < 0
        else naive.grad_logits(row, t, *(g[i].item() for g in grads), temperature=temperature)
        for i, (row, t) in enumerate(zip(z, target.tolist(), strict=True))
    ]
    dz_dtype = torch.float32 if contract.step == "fma" else hidden.dtype
    dz = narrow(dz, dz_dtype)
    wide = [x.to(dz_dtype) for x in (hidden, weight)]
    ones = torch.ones(len(hidden), 1, dtype=dz_dtype)
    return {
        "logp": canonical([p[0] for p in pairs]).masked_fill(ignored, 0),
        "entropy": canonical([p[1] for p in pairs]).masked_fill(ignored, 0),
        "hidden": expected(dz, wide[1], contract, out=hidden.dtype),
        "weight": expected(dz.mT, wide[0], contract, out=hidden.dtype, sequences=sequences),
        "bias": expected(dz.mT, ones, contract, out=hidden.dtype, sequences=sequences)[:, 0],
    }


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["normal", "special"])
# With segments: tests/contract/test_segments.py.
@pytest.mark.parametrize(
    ("contract", "dtype", "device"), [case for case in CONTRACTS if case.values[0].segments == 1]
)
@pytest.mark.parametrize(("temperature", "with_entropy"), [(1.0, False), (0.7, True)])
def test_linear_logp_is_the_naive_one(
    contract: Contract, dtype: torch.dtype, device: str, kind: str, temperature: float, with_entropy: bool
) -> None:
    hidden, weight, bias = cases("normal", (2, 2, 7), (131, 7), (131,), dtype=dtype)
    if kind == "special":  # in one token and a few entries, or everything would be NaN
        hidden[0, 0], weight[128:], bias[129:] = cases(kind, (7,), (3, 7), (2,), dtype=dtype)
    target = torch.tensor([[0, 130], [-100, 65]])
    grads = [values("normal", (4,), torch.float32, seed) for seed in (3, 4)][: 1 + with_entropy]
    leaves = [t.to(device).requires_grad_() for t in (hidden, weight, bias)]
    out = samebits.linear_logp(
        *(leaves[0], leaves[1], target.to(device), leaves[2]),
        temperature=temperature,
        return_entropy=with_entropy,
        contract=contract,
    )
    results = dict(zip(("logp", "entropy"), out if with_entropy else (out,), strict=False))
    got = torch.autograd.grad(list(results.values()), leaves, [g.view(2, 2).to(device) for g in grads])
    results |= dict(zip(("hidden", "weight", "bias"), got, strict=True))
    want = naive_linear_logp(
        *(hidden.detach().view(4, 7), weight.detach(), bias.detach(), target.view(-1)),
        *(grads, contract, temperature, [(0, 2), (2, 4)]),
    )
    for name, result in results.items():
        assert_same_bits(result.reshape(want[name].shape), want[name], name)


class Batch(NamedTuple):
    """Tokens in sequences of these lengths, packed."""

    hidden: Tensor
    target: Tensor
    grad: Tensor
    ends: Tensor


def batch(
    lengths: list[int], features: int, vocabulary: int, dtype: torch.dtype, seed: int, device: str
) -> Batch:
    tokens = sum(lengths)
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(vocabulary, (tokens,), generator=generator)
    target[torch.rand(tokens, generator=generator) < 0.2] = -100
    return Batch(
        values("normal", (tokens, features), dtype, seed).to(device),
        target.to(device),
        values("normal", (tokens,), torch.float32, seed + 1).to(device),
        torch.tensor([0, *itertools.accumulate(lengths)], device=device),
    )


def fused(dtype: torch.dtype, device: str) -> list[Contract | None]:
    """Contracts to try."""
    return [None] if device == "cuda" or dtype == torch.float32 else [None, FMA]


@pytest.mark.parametrize("device", DEVICES)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    tokens=st.integers(1, 70),
    features=st.integers(0, 40),
    vocabulary=st.integers(1, 700),
    seed=st.integers(0, 2**16),
    data=st.data(),
)
def test_rows_do_not_depend_on_their_company(
    device: str,
    dtype: torch.dtype,
    tokens: int,
    features: int,
    vocabulary: int,
    seed: int,
    data: st.DataObject,
) -> None:
    x, target, _, _ = batch([tokens], features, vocabulary, dtype, seed, device)
    weight = values("normal", (vocabulary, features), dtype, seed + 2, device)
    bias = values("normal", (vocabulary,), dtype, seed + 3, device)

    def f(x: Tensor, target: Tensor) -> Tensor:
        return torch.stack(samebits.linear_logp(x, weight, target, bias, return_entropy=True), -1)

    full = f(x, target)
    row = data.draw(st.integers(0, tokens - 1), "row")
    assert_same_bits(f(x[row], target[row]), full[row], "alone")

    company = values("special", (data.draw(st.integers(1, 70), "company"), features), dtype, seed + 4, device)
    at = data.draw(st.integers(0, len(company) - 1), "position")
    company[at] = x[row]
    ignored = torch.full((len(company),), -100, device=device)
    ignored[at] = target[row]
    assert_same_bits(f(company, ignored)[at], full[row], "beside NaN, inf and ignored tokens")

    cut = data.draw(st.integers(0, tokens), "cut")
    parts = [f(x[:cut], target[:cut]), f(x[cut:], target[cut:])]
    assert_same_bits(torch.cat(parts), full, "in two parts")
    with pieces(1):
        assert_same_bits(f(x, target), full, "in the smallest pieces")

    logits = samebits.matmul(x, weight.mT, out_dtype=torch.float32) + bias.float()
    given = samebits.logp(logits, target)
    assert_same_bits(given, full[:, 0].contiguous(), "from logits")
    room = logits.new_full((tokens, 2 * vocabulary + 1), torch.nan)
    strided = room[:, 1::2].copy_(logits)
    assert_same_bits(samebits.logp(strided, target), given, "from logits with strides")
    assert_same_bits(samebits.logp(logits[row], target[row]), given[row], "from one row of logits")


@contextmanager
def pieces(size: int) -> Iterator[None]:
    """Work on pieces of about so many logits."""
    names = (
        "samebits.ops.linear_logp._STATISTICS",
        "samebits.ops.linear_logp._GRAD_LOGITS",
        "samebits.backends.logits_in_pieces._LOGITS",
    )
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch(name, size))
        stack.enter_context(mock.patch("samebits.ops.logp._LOGITS", {"cpu": size, "cuda": size}))
        yield


@pytest.mark.counts_calls
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_given_logits_are_worked_on_in_pieces_both_ways(device: str, dtype: torch.dtype) -> None:
    logits = values("normal", (37, 150), dtype, 0).to(device).requires_grad_()
    target = torch.arange(37, device=device)

    def run() -> tuple[Tensor, Tensor]:
        out = samebits.logp(logits, target, ignore_index=3)
        return out.detach(), *torch.autograd.grad(out, logits, torch.arange(37.0, device=device))

    want = run()
    module = importlib.import_module("samebits.ops.logp")
    backend = module._backend(target, FMA.key)
    spied = mock.Mock(wraps=backend)
    with pieces(5 * 150), mock.patch.object(module, "_backend", return_value=spied):
        got = run()
    for g, w in zip(got, want, strict=True):
        assert_same_bits(g, w)
    for called in (spied.add_statistics, spied.grad_logits):
        rows = [len(call.args[1]) for call in called.call_args_list]
        assert sum(rows) == 37
        assert max(rows) == 5


def gradients(
    x: Tensor, weight: Tensor, bias: Tensor, target: Tensor, grad: Tensor, **options: Any
) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
    out = samebits.linear_logp(leaves[0], leaves[1], target, leaves[2], return_entropy=True, **options)
    return torch.autograd.grad(out, leaves, (grad, 0.1 * grad), allow_unused=True)


@pytest.mark.parametrize("device", DEVICES)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    room=st.integers(0, 20),
    vocabulary=st.integers(1, 500),
    seed=st.integers(0, 2**16),
    temperature=st.sampled_from([1.0, 0.6]),
)
def test_gradients_do_not_depend_on_pieces_padding_packing_and_micro_batches(
    device: str,
    dtype: torch.dtype,
    lengths: list[int],
    room: int,
    vocabulary: int,
    seed: int,
    temperature: float,
) -> None:
    for contract in fused(dtype, device):
        x, target, grad, ends = batch(lengths, 12, vocabulary, dtype, seed, device)
        weight = values("normal", (vocabulary, 12), dtype, seed + 2, device)
        bias = values("normal", (vocabulary,), dtype, seed + 3, device)
        options: dict[str, Any] = {"temperature": temperature, "contract": contract}
        packed = gradients(x, weight, bias, target, grad, cu_seqlens=ends, **options)
        with pieces(1 + seed % 5000):
            for got, want in zip(
                gradients(x, weight, bias, target, grad, cu_seqlens=ends, **options), packed, strict=True
            ):
                assert_same_bits(got, want, "pieces")

        length = max(lengths) + room
        padded_x = values("normal", (len(lengths), length, 12), dtype, seed + 4, device)
        padded_target = torch.full((len(lengths), length), -100, device=device)
        padded_grad = torch.ones(len(lengths), length, device=device)
        for i, n in enumerate(lengths):
            span = slice(ends[i], ends[i + 1])
            padded_x[i, :n], padded_target[i, :n], padded_grad[i, :n] = x[span], target[span], grad[span]
        padded = gradients(padded_x, weight, bias, padded_target, padded_grad, **options)
        for i, n in enumerate(lengths):
            assert_same_bits(padded[0][i, :n], packed[0][ends[i] : ends[i + 1]], "hidden, padded")
        assert_same_bits(padded[1], packed[1], "weight, padded")
        assert_same_bits(padded[2], packed[2], "bias, padded")

        at_once, split = (
            torch.zeros(vocabulary, 12, device=device),
            torch.zeros(vocabulary, 12, device=device),
        )
        none = gradients(x, weight, bias, target, grad, cu_seqlens=ends, main_grad=at_once, **options)
        assert none[1] is None
        assert_same_bits(none[0], packed[0], "hidden, main_grad")
        assert_same_bits(at_once.to(dtype), packed[1], "weight, main_grad")
        for start, stop in itertools.pairwise(ends.tolist()):
            micro = slice(start, stop)
            got = gradients(x[micro], weight, bias, target[micro], grad[micro], main_grad=split, **options)
            assert_same_bits(got[0], packed[0][micro], "hidden, micro-batches")
        assert_same_bits(split, at_once, "weight, micro-batches")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocabulary", [1000, 50_257, 262_144])
def test_accuracy(kind: str, vocabulary: int) -> None:
    """Against float64, at most twice the error of torch in f32."""
    z = rows(kind, 16, vocabulary)
    target = torch.cat([z[:8].argmax(1), torch.arange(8)])
    logits = {
        name: z.to(dtype).requires_grad_()
        for name, dtype in (("f64", torch.float64), ("torch", z.dtype), ("ours", z.dtype))
    }
    results = {
        name: samebits.logp(t, target)
        if name == "ours"
        else F.log_softmax(t, -1).gather(1, target[:, None])[:, 0]
        for name, t in logits.items()
    }
    grads = {name: torch.autograd.grad(results[name].sum(), t)[0] for name, t in logits.items()}
    eye = torch.eye(vocabulary) if vocabulary < 2000 else None
    for what in (results, grads):
        exact = what["f64"].detach().float()
        assert torch.equal(what["ours"].isnan(), exact.isnan())
        assert torch.equal(what["ours"].isinf(), exact.isinf())
        finite = exact.isfinite()
        errors = {
            name: (what[name][finite].double() - what["f64"][finite]).abs().max().item()
            if finite.any()
            else 0.0
            for name in ("torch", "ours")
        }
        assert errors["ours"] <= 2 * errors["torch"], errors
    if eye is not None and kind not in ("wide", "one-hot"):  # the logits themselves, through a product
        out, entropy = samebits.linear_logp(z, eye, target, return_entropy=True)
        if z.isfinite().all():
            assert_same_bits(out, results["ours"])
            p = logits["f64"].softmax(-1)
            torch.testing.assert_close(entropy.double(), -(p * p.log()).sum(-1), rtol=1e-6, atol=1e-6)


def test_no_gradient_of_an_entropy_that_was_not_asked_for() -> None:
    """torch.compile gives one, without elements, and a kernel that read it would read elsewhere."""
    x, weight = torch.randn(3, 5, requires_grad=True), torch.randn(9, 5)
    arguments = (None, torch.tensor([0, 8, -100]), None, None, -100, 1.0, False, False, samebits.FMA.key)
    logp, entropy, *_ = torch.ops.samebits.linear_logp(x, weight, *arguments)
    with mock.patch.object(reference, "grad_logits_later", wraps=reference.grad_logits_later) as called:
        (logp.sum() + entropy.sum()).backward()
    assert called.call_args.args[1].grad_entropy is None


HALF = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("arch", compiler.ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_kernels_compile_without_spills(arch: str, dtype: torch.dtype) -> None:
    cubin = resources(kernel_spec("grad_logits", dtype, dtype, entropy=True), arch)  # the whole file
    assert cubin.spill_bytes == cubin.local_bytes == 0


def everything(
    device: str,
    dtype: torch.dtype,
    tokens: int,
    features: int,
    vocabulary: int,
    contract: Contract | None = None,
) -> list[Tensor]:
    """Results and gradients of `linear_logp`, with and without all of its options."""
    if dtype != torch.float32 and contract is None:
        contract = TENSOR_CORE.on(FAMILY)
    x, target, grad, ends = batch(
        [tokens // 3, 0, tokens - tokens // 3], features, vocabulary, dtype, 0, device
    )
    weight = values("normal", (vocabulary, features), dtype, 2).to(device)
    bias = values("normal", (vocabulary,), dtype, 3).to(device)
    main_grad = values("normal", weight.shape, torch.float32, 4).to(device)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    plain = samebits.linear_logp(x, weight, target, contract=contract)
    logp, entropy = samebits.linear_logp(
        *(x, weight, target, bias),
        temperature=0.7,
        return_entropy=True,
        cu_seqlens=ends,
        main_grad=main_grad,
        contract=contract,
    )
    return [
        *(plain, logp, entropy),
        *torch.autograd.grad(plain, leaves[:2], grad),
        *torch.autograd.grad((logp, entropy), [x, bias], (grad, grad.flip(0))),
        main_grad,
    ]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "contract"),
    [(torch.float32, None), *((t, None) for t in HALF), *((t, FMA) for t in HALF)],
    ids=str,
)
@pytest.mark.parametrize(
    ("tokens", "features", "vocabulary"),
    [
        (1, 64, 1000),
        (16, 128, 5001),
        (129, 40, 12_345),
        (300, 72, 4096),
        (2000, 16, 1),
        (0, 8, 300),
        (70, 3, 777),
    ],
)
def test_cuda_has_the_bits_of_the_cpu(
    dtype: torch.dtype, contract: Contract | None, tokens: int, features: int, vocabulary: int
) -> None:
    want = everything("cpu", dtype, tokens, features, vocabulary, contract)
    poison = torch.full((1 << 24,), torch.nan, device="cuda")
    del poison
    for i, got in enumerate(everything("cuda", dtype, tokens, features, vocabulary, contract)):
        assert_same_bits(got, want[i], f"result {i}")
    with pieces(1 << 15):
        for i, got in enumerate(everything("cuda", dtype, tokens, features, vocabulary, contract)):
            assert_same_bits(got, want[i], f"result {i}, other pieces")


@pytest.mark.gpu
def test_cuda_without_fused_kernels() -> None:
    """What tensors take that TMA cannot read, and other GPUs."""
    shapes = (
        ("one token", 1, 64, 1000),
        ("a row of tiles", 40, 72, 5001),
        ("several", 300, 24, 4096),
    )
    for what, *shape in shapes:
        want = everything("cpu", torch.bfloat16, *shape)
        with (
            mock.patch("samebits.backends.cuda.linear_logp_sm90.supports", return_value=False),
            mock.patch("samebits.backends.triton.linear_logp.supports_fused", return_value=False),
        ):
            got = everything("cuda", torch.bfloat16, *shape)
        for i, (g, w) in enumerate(zip(got, want, strict=True)):
            assert_same_bits(g, w, f"{what}, result {i}")


FUSED = {"cuda": ("linear_logp_sm90", "logp"), "triton": ("linear_logp", "logp")}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("cuda", torch.bfloat16), ("cuda", torch.float16), ("triton", torch.bfloat16)],
    ids=["cuda-bf16", "cuda-f16", "triton-bf16"],
)
@pytest.mark.parametrize(
    ("kind", "features", "vocabulary", "with_bias", "with_entropy"),
    [
        ("normal", 200, 1000, False, False),
        ("normal", 64, 777, True, True),
        ("cancel", 520, 1300, True, False),
        ("special", 128, 300, True, True),
        ("wide", 192, 128 * 37 + 1, False, True),
        ("normal", 8, 100, True, True),
        ("normal", 72, 198, False, True),  # 189 of it: tiles of 192 end in what follows a row
        ("normal", 72, 198, False, False),
    ],
)
def test_cuda_schedules_change_no_bit(
    backend: str,
    dtype: torch.dtype,
    kind: str,
    features: int,
    vocabulary: int,
    with_bias: bool,
    with_entropy: bool,
) -> None:
    """Every schedule of the fused kernels, their results one by one."""
    if ARCH.own != "sm90":
        pytest.skip("the fused kernels are for Hopper")
    if backend == "triton":
        pytest.importorskip("triton")
    from samebits.backends.reference import linear_logp as reference
    from samebits.backends.reference import logp as reference_logp
    from samebits.backends.reference import matmul as reference_matmul

    tokens, key = 300, TENSOR_CORE.on(FAMILY).key
    fused, logp = (importlib.import_module(f"samebits.backends.{backend}.{m}") for m in FUSED[backend])
    if backend == "cuda":
        schedules = [fused.schedules(entry) for entry in ("statistics_sm90", "grad_logits_sm90")]
        statistics_of, grad_logits_of = (
            fused.statistics,
            partial(grad_logits, fused.grad_logits_later, dtype=dtype),
        )
    else:
        schedules = [fused.STATISTICS_SCHEDULES, fused.TILE_SCHEDULES]
        assert fused.supports_fused(*(torch.empty(8, features, dtype=dtype, device="cuda"),) * 2, None, key)
        statistics_of = partial(fused.statistics, contract=key)
        grad_logits_of = partial(grad_logits, fused.grad_logits_later, contract=key, dtype=dtype)
    results, kept = ["logp", "entropy", "log_sum"], ["s", "u"] if with_entropy else ["s"]
    if backend == "cuda":  # Triton's maxima pass over NaN, which reaches results by way of s
        results, kept = [*results, "shift"], [*kept, "m"]
    hidden, weight = (
        values(kind, (tokens, features), dtype, 0),
        values(kind, (vocabulary, features), dtype, 1),
    )
    bias = values("normal", (vocabulary,), dtype, 2) if with_bias else None
    target = torch.randint(vocabulary, (tokens,), generator=torch.Generator().manual_seed(3))
    target[::7], target[1], target[3] = -100, -5, vocabulary
    want = Rows.empty(target, vocabulary, -100, scale=0.75 if with_entropy else 1.0, entropy=with_entropy)
    statistics = reference.statistics(hidden, weight, bias, want, contract=key)
    reference_logp.combine(statistics, want)
    grad = values("normal", (tokens,), torch.float32, 4)
    grad_entropy = grad.flip(0).contiguous() if with_entropy else None
    part = slice(0 if vocabulary < 500 else 256, vocabulary - 9)
    gradient = grad_logits(
        reference.grad_logits_later,
        *(hidden, weight, bias, part, want, grad, grad_entropy),
        dtype=dtype,
        contract=key,
    )

    def on_gpu(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.cuda()

    x, w, b, g, h = (on_gpu(t) for t in (hidden, weight, bias, grad, grad_entropy))
    assert x is not None
    assert w is not None
    assert g is not None
    known = Rows._make(t.cuda() if isinstance(t, Tensor) else t for t in want)
    logits = logits_of(reference_matmul, hidden, weight, bias, slice(0, vocabulary), key)
    columns = 0, vocabulary, vocabulary // 256 * 128  # whose logits are kept
    for count in (1, 8, 37, 64, 65, 300):
        some = known.part(0, count)
        for s, few, n in itertools.product(schedules[0], (None, 4), columns):
            rows = Rows.empty(some.target, vocabulary, -100, scale=want.scale, entropy=with_entropy)
            for t in (rows.logp, rows.entropy, rows.shift, rows.log_sum):
                t.fill_(torch.nan)
            poison = torch.full((1 << 18,), torch.nan, device="cuda")
            del poison
            keep = torch.full((count, n + -n % 4), torch.nan, device="cuda")[:, :n] if n else None
            with multiprocessors(few):
                got = statistics_of(x[:count], w, b, rows, keep, schedule=s)
            logp.combine(got, rows)
            what = f"{count}, {s}, multiprocessors: {few}, kept: {n}"
            if keep is not None:
                assert_same_bits(keep.cpu(), logits[:count, :n], f"logits, {what}")
            for name in results:
                assert_same_bits(getattr(rows, name), getattr(want, name)[:count], f"{name}, {what}")
            for name in kept:
                mine, theirs = getattr(got, name).cpu(), getattr(statistics, name)[:count]
                assert torch.equal(mine.isnan(), theirs.isnan())
                # Which NaN it is, or which zero is the maximum, does not matter yet.
                mine, theirs = mine.nan_to_num(0) + 0.0, theirs.nan_to_num(0) + 0.0
                assert_same_bits(mine, theirs, f"{name}, {what}")
        for s, few in itertools.product(schedules[1], (None, 4)):
            with multiprocessors(few):
                dz = grad_logits_of(
                    *(x[:count], w, b, part, some, g[:count], None if h is None else h[:count]), schedule=s
                )
            assert_same_bits(dz, gradient[:count], f"dz, {count}, {s}, multiprocessors: {few}")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_cuda_logits_have_the_bits_of_the_cpu(kind: str, dtype: torch.dtype) -> None:
    for vocabulary in (4097, 131_201, 262_144):
        z = rows(kind, 40, vocabulary).to(dtype)
        target = torch.randint(vocabulary, (40,), generator=torch.Generator().manual_seed(1))
        results = []
        for device in ("cpu", "cuda"):
            leaf = z.to(device).requires_grad_()
            out = samebits.logp(leaf, target.to(device))
            results.append((out, *torch.autograd.grad(out.sum(), leaf)))
        for want, got in zip(*results, strict=True):
            assert_same_bits(got, want)


@pytest.mark.gpu
def test_cuda_entropy_of_a_vocabulary_whose_blocks_are_weighed_in_pieces() -> None:
    x, weight = (values("normal", s, torch.bfloat16, 0, "cpu") for s in ((3, 16), (131_201, 16)))
    target = torch.tensor([0, 131_200, 70_000])
    with samebits.use_mma_model(FAMILY):
        want = samebits.linear_logp(x, weight, target, return_entropy=True)
    got = samebits.linear_logp(x.cuda(), weight.cuda(), target.cuda(), return_entropy=True)
    for ours, theirs in zip(got, want, strict=True):
        assert_same_bits(ours, theirs)


@pytest.mark.gpu
def test_cuda_memory_is_bounded() -> None:
    """Logits take no more memory than the weight, 64 MiB: all of 4096 tokens would take 1 GiB in bf16."""
    x = torch.randn(4096, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(131_072, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.zeros(4096, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()

    def peak(f: Callable[[], Any]) -> tuple[float, Any]:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = f()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20, result

    with torch.no_grad():
        alone, _ = peak(lambda: samebits.linear_logp(x, weight, target))
    forward, out = peak(lambda: samebits.linear_logp(x, weight, target))
    backward, grads = peak(lambda: torch.autograd.grad(out.sum(), (x, weight)))
    beyond = backward - sum(g.numel() * g.element_size() for g in grads) / 2**20
    print(f"forward {forward:.0f} MiB, backward {beyond:.0f} MiB beyond the gradients")
    assert alone <= 64
    assert forward <= 64 + 64
    assert beyond <= 256
