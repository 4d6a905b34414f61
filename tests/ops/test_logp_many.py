"""Log-probabilities of many tokens: several tiles for a block, and rows of 1 to 8192 of them."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import samebits
from samebits import TENSOR_CORE
from samebits.backends.cuda.plans import Plans
from samebits.testing import assert_same_bits, values
from tests.ops.test_logp import everything, pieces
from tests.support.devices import FAMILY

HALF = (torch.bfloat16, torch.float16)
COUNTS = (
    *(1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300, 512, 777),
    *(1024, 2048, 4095, 4096, 8192),
)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(("tokens", "features", "vocabulary"), [(300, 16, 40_001), (1100, 24, 5000)])
def test_cuda_has_the_bits_of_the_cpu_where_blocks_take_several_tiles(
    dtype: torch.dtype, tokens: int, features: int, vocabulary: int
) -> None:
    want = everything("cpu", dtype, tokens, features, vocabulary)
    for i, got in enumerate(everything("cuda", dtype, tokens, features, vocabulary)):
        assert_same_bits(got, want[i], f"result {i}")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_many_tokens_have_the_bits_of_the_universal_kernels(dtype: torch.dtype) -> None:
    """Which the CPU's are compared with elsewhere."""
    got = everything("cuda", dtype, 4096, 136, 20_000)
    with (
        mock.patch("samebits.backends.cuda.linear_logp_sm90.supports", return_value=False),
        mock.patch(
            "samebits.backends.cuda.products.tensor_core_sm90.TensorCoreSm90Kernel.supports",
            return_value=False,
        ),
        mock.patch("samebits.backends.cuda.matmul._plans", Plans()),  # of products seen before
        mock.patch("samebits.backends.triton.linear_logp.supports_fused", return_value=False),
    ):
        want = everything("cuda", dtype, 4096, 136, 20_000)
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert_same_bits(g, w, f"result {i}")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_rows_of_1_to_8192_tokens(dtype: torch.dtype) -> None:
    """Wherever they lie, among whatever neighbours: log-probability, entropy and gradient."""
    tokens, features, vocabulary = COUNTS[-1], 72, 1500
    contract = None if dtype == torch.float32 else TENSOR_CORE.on(FAMILY)
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(vocabulary, (tokens,), generator=generator)
    target[torch.rand(tokens, generator=generator) < 0.2] = -100
    x = values("normal", (tokens, features), dtype, 0)
    weight, bias = (
        values("normal", (vocabulary, features), dtype, 1),
        values("normal", (vocabulary,), dtype, 2),
    )
    grads = [values("normal", (tokens,), torch.float32, seed) for seed in (3, 4)]

    def step(x: Tensor, target: Tensor, grads: list[Tensor]) -> list[Tensor]:
        x = x.detach().requires_grad_()
        results = samebits.linear_logp(
            *(x, weight.to(x.device), target, bias.to(x.device)),
            temperature=0.8,
            return_entropy=True,
            contract=contract,
        )
        return [*results, *torch.autograd.grad(results, x, grads)]

    def same(got: list[Tensor], want: list[Tensor], rows: slice | Tensor, what: str) -> None:
        for name, g, w in zip(("logp", "entropy", "grad"), got, want, strict=True):
            assert_same_bits(g, w[rows], f"{name}, {what}")

    some = torch.randint(tokens, (48,), generator=generator)
    on_cpu = step(x[some], target[some], [g[some] for g in grads])
    x, target, grads = x.cuda(), target.cuda(), [g.cuda() for g in grads]
    whole = step(x, target, grads)
    same([t[some.cuda()] for t in whole], on_cpu, slice(None), "the CPU's")
    wide = torch.full((tokens, features + 24), torch.nan, dtype=dtype, device="cuda")
    wide[:, 8:-16] = x
    for count in COUNTS:
        first = int(torch.randint(tokens - count + 1, (), generator=generator))
        at = slice(first, first + count)
        part = [g[at] for g in grads]
        same(step(x[at], target[at], part), whole, at, f"{count} tokens from {first} on")
        same(step(wide[at, 8:-16], target[at], part), whole, at, f"{count} tokens with gaps from {first} on")
    with pieces(1 << 18):
        same(step(x, target, grads), whole, slice(None), "other pieces")

    others = torch.arange(tokens, device="cuda") % 3 > 0
    for what, fill, ignored in (("NaN", torch.nan, False), ("inf", torch.inf, False), ("ignored", 0.0, True)):
        around = x.masked_fill(others[:, None], fill)
        targets = target.masked_fill(others, -100) if ignored else target
        got = step(around, targets, grads)
        same([t[~others] for t in got], whole, ~others, f"neighbours: {what}")

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        same(step(x, target, grads), whole, slice(None), "another stream")
    stream.synchronize()
    weight, bias = weight.cuda(), bias.cuda()
    with torch.no_grad(), torch.cuda.graph(graph):
        captured = samebits.linear_logp(
            x, weight, target, bias, temperature=0.8, return_entropy=True, contract=contract
        )
    graph.replay()
    for name, g, w in zip(("logp", "entropy"), captured, whole, strict=False):
        assert_same_bits(g, w, f"{name}, a graph")


@pytest.mark.parametrize(
    ("dtype", "of_logp", "of_grads"), [(torch.float32, 3, 6), *((d, 0.01, 1.25) for d in HALF)]
)
@pytest.mark.parametrize("scale", [1, 10])
def test_accuracy_through_the_product(
    dtype: torch.dtype, of_logp: float, of_grads: float, scale: int
) -> None:
    """Against float64, the error at most so many times that of torch, which rounds logits to 16 bits.

    In float32 it sums in blocks, where samebits adds one term after the other.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 512, generator=generator).to(dtype)
    weight = (torch.randn(5000, 512, generator=generator) * scale / 512**0.5).to(dtype)
    target = torch.randint(5000, (16,), generator=generator)

    def torchs(x: Tensor, weight: Tensor) -> Tensor:
        z = F.linear(x, weight)
        z = z if z.dtype == torch.float64 else z.float()
        return z.log_softmax(1).gather(1, target[:, None])[:, 0]

    def run(f: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in (x, weight)]
        out = f(*leaves)
        return [t.detach().double() for t in (out, *torch.autograd.grad(out.sum(), leaves))]

    exact = run(torchs, torch.float64)
    ours = run(lambda x, weight: samebits.linear_logp(x, weight, target), dtype)
    for i, (mine, theirs) in enumerate(zip(ours, run(torchs, dtype), strict=True)):
        errors = [(t - exact[i]).abs().max().item() for t in (mine, theirs)]
        assert errors[0] <= (of_grads if i else of_logp) * errors[1], (
            ("logp", "hidden", "weight")[i],
            errors,
        )
