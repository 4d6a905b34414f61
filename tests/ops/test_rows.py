"""Row reductions: the naive implementation's bits, and rows that know nothing of each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import samebits
from samebits.backends.cuda import columns, compiler, embeddings, norm_gradients, rows
from samebits.ops.attention import scaled_dot_product_attention as attention
from samebits.ops.einsum import einsum
from samebits.ops.embedding import embedding
from samebits.ops.expand import expand
from samebits.ops.logsumexp import logsumexp
from samebits.ops.norm import layer_norm, rms_norm
from samebits.ops.reduce import mean, sum
from samebits.ops.softmax import log_softmax, softmax
from samebits.ops.variance import std, var, vector_norm
from samebits.testing import assert_same_bits, values
from tests.support import naive_rows
from tests.support.cubins import resources
from tests.support.devices import DEVICES, case
from tests.support.naive_bits import rounded

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = [F32, BF16, F16]
KINDS = ["normal", "wide", "tiny", "cancel", "special"]
LENGTHS = [1, 140]
on_devices = pytest.mark.parametrize("device", DEVICES)
in_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
EPS = float(np.float32(1e-5))


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with np.errstate(all="ignore"):
        yield


@on_devices
@in_dtypes
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", LENGTHS)
class TestNaive:
    """Every operation and its gradients, on every kind of values."""

    def test_sum_and_mean(self, device: str, dtype: torch.dtype, kind: str, n: int) -> None:
        x = case(kind, (2, n), dtype, device)
        assert_same_bits(sum(x, -1), rounded([naive_rows.row_sum(r) for r in x.tolist()], dtype))
        assert_same_bits(mean(x, -1), rounded([naive_rows.mean(r) for r in x.tolist()], dtype))

    def test_softmax(self, device: str, dtype: torch.dtype, kind: str, n: int) -> None:
        x, grad = (case(kind, (2, n), dtype, device, seed) for seed in (0, 1))
        x.requires_grad_()
        for op, forward, backward in (
            (softmax, naive_rows.softmax, naive_rows.softmax_backward),
            (log_softmax, naive_rows.log_softmax, naive_rows.log_softmax_backward),
        ):
            y = op(x)
            assert_same_bits(y, rounded([forward(r) for r in x.tolist()], dtype), op.__name__)
            (dx,) = torch.autograd.grad(y, x, grad)
            want = [backward(g, r) for g, r in zip(grad.tolist(), y.tolist(), strict=True)]
            assert_same_bits(dx, rounded(want, dtype), op.__name__)

    @pytest.mark.parametrize("correction", [0, 1])
    def test_deviations(self, device: str, dtype: torch.dtype, kind: str, n: int, correction: int) -> None:
        x, grad = case(kind, (2, n), dtype, device).requires_grad_(), case("normal", (2,), dtype, device, 1)
        for op, root in ((var, False), (std, True)):
            y = op(x, -1, correction)
            want = [naive_rows.deviation(r, correction, root=root) for r in x.tolist()]
            assert_same_bits(y, rounded(want, dtype), op.__name__)
            (dx,) = torch.autograd.grad(y, x, grad)
            of_rows = zip(grad.tolist(), x.tolist(), y.tolist(), strict=True)
            dx_want = [naive_rows.deviation_backward(*r, correction, root=root) for r in of_rows]
            assert_same_bits(dx, rounded(dx_want, dtype), op.__name__)

    def test_norm_and_logsumexp(self, device: str, dtype: torch.dtype, kind: str, n: int) -> None:
        x, grad = case(kind, (2, n), dtype, device).requires_grad_(), case("normal", (2,), dtype, device, 1)
        y, z = vector_norm(x, -1), logsumexp(x, -1)
        assert_same_bits(y, rounded([naive_rows.vector_norm(r) for r in x.tolist()], dtype), "norm")
        assert_same_bits(z, rounded([naive_rows.logsumexp(r) for r in x.tolist()], dtype), "logsumexp")
        (dy,), (dz,) = (torch.autograd.grad(out, x, grad) for out in (y, z))
        of_rows = list(zip(grad.tolist(), x.tolist(), y.tolist(), strict=True))
        want = [naive_rows.vector_norm_backward(*r) for r in of_rows]
        assert_same_bits(dy, rounded(want, dtype), "gradient of the norm")
        want = [naive_rows.logsumexp_backward(g, r) for g, r, _ in of_rows]
        assert_same_bits(dz, rounded(want, dtype), "gradient of logsumexp")

    @pytest.mark.parametrize("centred", [True, False])
    def test_norms(self, device: str, dtype: torch.dtype, kind: str, n: int, centred: bool) -> None:
        x, grad = (case(kind, (2, n), dtype, device, seed) for seed in (0, 1))
        weight, bias = (case("normal", (n,), dtype, device, seed) for seed in (2, 3))
        leaves = [t.requires_grad_() for t in ((x, weight, bias) if centred else (x, weight))]
        y = layer_norm(x, (n,), weight, bias, EPS) if centred else rms_norm(x, (n,), weight, EPS)
        w, b = weight.tolist(), bias.tolist() if centred else None
        want = [naive_rows.norm(r, w, b, EPS, centred=centred) for r in x.tolist()]
        assert_same_bits(y, rounded(want, dtype))
        grads = torch.autograd.grad(y, leaves, grad)
        pairs = list(zip(grad.tolist(), x.tolist(), strict=True))
        dx = [naive_rows.norm_backward(g, r, w, EPS, centred=centred) for g, r in pairs]
        columns = naive_rows.norm_columns(grad.tolist(), x.tolist(), EPS, centred=centred)
        for name, got, expected in zip(("x", "weight", "bias"), grads, (dx, *columns), strict=False):
            assert_same_bits(got, rounded(expected, dtype), name)

    def test_embedding_and_broadcasting(self, device: str, dtype: torch.dtype, kind: str, n: int) -> None:
        ids = torch.tensor([[2, 0, 2, 1], [3, 2, 0, 3]], device=device)
        weight, grad = case(kind, (5, n), dtype, device), case(kind, (2, 4, n), dtype, device, 1)
        weight.requires_grad_()
        out = embedding(ids, weight, padding_idx=3)
        assert_same_bits(out, weight[ids])
        (dw,) = torch.autograd.grad(out, weight, grad)
        flat = grad.view(8, n).tolist()
        groups = [
            [g for g, i in zip(flat, ids.flatten().tolist(), strict=True) if i == row] for row in range(5)
        ]
        groups[3] = []
        want = [naive_rows.column_sum(group) if group else [0.0] * n for group in groups]
        assert_same_bits(dw, rounded(want, dtype), "embedding")
        row = case(kind, (n,), dtype, device).requires_grad_()
        (db,) = torch.autograd.grad(expand(row, (2, 4, n)), row, grad)
        assert_same_bits(db, rounded(naive_rows.column_sum(flat), dtype), "over tokens")
        shared = case(kind, (2, 1, n), dtype, device).requires_grad_()
        (ds,) = torch.autograd.grad(expand(shared, (2, 4, n)), shared, grad)
        want = [naive_rows.column_sum(flat[i : i + 4]) for i in (0, 4)]
        assert_same_bits(ds[:, 0], rounded(want, dtype), "over heads of a group")
        if n == 1:
            return  # nothing is broadcast
        column = case(kind, (2, 4, 1), dtype, device).requires_grad_()
        (dc,) = torch.autograd.grad(expand(column, (2, 4, n)), column, grad)
        assert_same_bits(dc.view(8), rounded([naive_rows.row_sum(r) for r in flat], dtype), "along rows")


# Operations of rows: name -> what is computed from rows x[rows, n] and a vector w[n].
ROWWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda x, w: sum(x, -1),
    "mean": lambda x, w: mean(x, -1),
    "softmax": lambda x, w: softmax(x),
    "log_softmax": lambda x, w: log_softmax(x),
    "layer_norm": lambda x, w: layer_norm(x, w.shape, w),
    "layer_norm, bias": lambda x, w: layer_norm(x, w.shape, w.detach(), w),
    "rms_norm": lambda x, w: rms_norm(x, w.shape, w),
    "mul": lambda x, w: x * expand(w, x.shape),
}


@pytest.mark.parametrize("name", ROWWISE)
@on_devices
@given(
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(["normal", "wide", "cancel"]),
    rows=st.integers(1, 40),
    n=st.sampled_from([1, 7, 64, 129, 1000, 1025, 5000]),
    data=st.data(),
)
def test_rows_and_padding(
    device: str, name: str, dtype: torch.dtype, kind: str, rows: int, n: int, data: st.DataObject
) -> None:
    """A row alone, at other places and strides; weight gradients with padding between the tokens."""
    op = ROWWISE[name]
    x, w = case(kind, (rows, n), dtype, device).requires_grad_(), case("normal", (n,), dtype, device, 1)
    w.requires_grad_()
    y = op(x, w)
    grad = case("normal", tuple(y.shape), dtype, device, 2)
    dx, dw = torch.autograd.grad(y, (x, w), grad, allow_unused=True)
    i = data.draw(st.integers(0, rows - 1), "row")
    one = x[i : i + 1].detach().requires_grad_()
    alone = op(one, w)
    assert_same_bits(alone, y[i : i + 1])
    (d_alone,) = torch.autograd.grad(alone, one, grad[i : i + 1])
    assert_same_bits(d_alone, dx[i : i + 1])
    spread = torch.full((2 * rows + 3, n + 5), torch.nan, dtype=dtype, device=device)
    spread[: 2 * rows : 2, :n] = x.detach()
    assert_same_bits(op(spread[: 2 * rows : 2, :n], w), y)
    if dw is not None:
        padded = torch.ones(2 * rows + 3, n, dtype=dtype, device=device)
        padded[: 2 * rows : 2] = x.detach()
        padded_grad = torch.zeros(2 * rows + 3, *grad.shape[1:], dtype=dtype, device=device)
        padded_grad[: 2 * rows : 2] = grad
        assert_same_bits(torch.autograd.grad(op(padded, w), w, padded_grad)[0], dw)


@on_devices
@pytest.mark.parametrize("n", [200, 3000, 9000])
def test_what_is_masked_at_the_end_of_a_row_changes_nothing(device: str, n: int) -> None:
    z = case("normal", (5, n), F32, device)
    longer = torch.cat([z, torch.full((5, 777), -torch.inf, device=device)], 1)
    assert_same_bits(softmax(longer)[:, :n], softmax(z))
    assert_same_bits(sum(torch.cat([z, torch.zeros(5, 777, device=device)], 1), 1), sum(z, 1))


@on_devices
def test_log_softmax_is_logp(device: str) -> None:
    z = case("normal", (9, 700), F32, device).requires_grad_()
    target = torch.arange(9, device=device) * 71
    picked = log_softmax(z)[torch.arange(9, device=device), target]
    assert_same_bits(picked, samebits.logp(z, target))
    grad = case("normal", (9,), F32, device, 1)
    first, second = (torch.autograd.grad(y, z, grad)[0] for y in (picked, samebits.logp(z, target)))
    assert_same_bits(first, second)


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("btd,df->btf", [(2, 3, 4), (4, 5)]),
        ("bhid,bhjd->bhij", [(2, 3, 4, 5), (2, 3, 6, 5)]),
        ("bhij,bhjd->bihd", [(2, 3, 4, 6), (2, 3, 6, 5)]),
        ("ij,jk,kl->il", [(2, 3), (3, 4), (4, 5)]),
        ("i,i", [(4,), (4,)]),
        ("i,j->ij", [(4,), (3,)]),
        ("...ij,...jk->...ik", [(2, 1, 3, 4), (5, 4, 2)]),
        ("ii->i", [(4, 4)]),
        ("iij->j", [(3, 3, 2)]),
        ("ab,cb,ad->cd", [(2, 3), (4, 3), (2, 5)]),
        ("abc,bd->ad", [(2, 3, 4), (3, 5)]),
        ("ij", [(2, 3)]),
        ("ba", [(2, 3)]),
    ],
)
def test_einsum(equation: str, shapes: list[tuple[int, ...]]) -> None:
    operands = [values("cancel", shape, F32, seed) for seed, shape in enumerate(shapes)]
    torch.testing.assert_close(einsum(equation, *operands), torch.einsum(equation, *operands))
    for bad in ("ij,jk", equation + "z"):
        with pytest.raises(ValueError, match="einsum"):
            einsum(bad, *operands[:1])


@pytest.mark.gpu
@in_dtypes
@pytest.mark.parametrize("kind", ["normal", "special"])
@pytest.mark.parametrize(("count", "n"), [(1, 40_000), (300, 1024), (70, 1025), (9, 5000)])
def test_cuda_has_the_bits_of_the_cpu(dtype: torch.dtype, kind: str, count: int, n: int) -> None:
    x, w = values(kind, (count, n), dtype, 0), values("normal", (n,), dtype, 1)
    for name, op in ROWWISE.items():
        if name == "mul" and kind == "special":
            continue  # the product is PyTorch's, whose NaN is the device's own
        results = []
        for device in ("cpu", "cuda"):
            leaves = [t.to(device).requires_grad_() for t in (x, w)]
            y = op(*leaves)
            grad = values("normal", tuple(y.shape), dtype, 2).to(device)
            grads = torch.autograd.grad(y, leaves, grad, allow_unused=True)
            results.append([y, *(g for g in grads if g is not None)])
        for got, want in zip(results[1], results[0], strict=True):
            assert_same_bits(got.cpu(), want, name)


@pytest.mark.gpu
@in_dtypes
@pytest.mark.parametrize(("count", "n"), [(9_999, 1024), (2_500, 4096), (1_200, 16_384)])
def test_blocks_that_go_on_to_other_rows_take_every_row(dtype: torch.dtype, count: int, n: int) -> None:
    x, w = case("normal", (count, n), dtype, "cuda"), case("normal", (n,), dtype, "cuda", 1)
    ops: list[Callable[[Tensor], Tensor]] = [softmax, log_softmax]
    ops += [lambda x: rms_norm(x, (n,), w), lambda x: layer_norm(x, (n,), w, w)]
    for op in ops:
        few_at_a_time = torch.cat([op(part) for part in x.split(1000)])
        assert_same_bits(op(x), few_at_a_time)


@pytest.mark.gpu
@in_dtypes
@pytest.mark.parametrize("n", [9, 1032, 2064, 4104])
def test_sums_over_tokens_by_blocks_of_any_number_of_columns(dtype: torch.dtype, n: int) -> None:
    grad, x = (case("wide", (2601, n), dtype, "cpu", seed) for seed in (0, 1))
    means, scales = (case("normal", (2601,), F32, "cpu", seed) for seed in (2, 3))
    for centred in (means, means[:0]):
        of = grad, x, centred, scales
        for got, want in zip(
            OPS.norm_columns(*(t.cuda() for t in of), dtype), OPS.norm_columns(*of, dtype), strict=True
        ):
            assert_same_bits(got.cpu(), want)
    assert_same_bits(sum(grad.cuda(), 0).cpu(), sum(grad, 0))


@pytest.mark.gpu
@in_dtypes
@pytest.mark.parametrize("tokens", [1, 2, 8, 32, 33])
def test_sums_over_few_tokens(dtype: torch.dtype, tokens: int) -> None:
    """As of heads that were repeated: where they lie, they are not side by side."""
    whole = case("special", (700, tokens, 136), dtype, "cpu", tokens)
    for x in (whole, whole[:, :, 3:], whole[..., ::2], whole[:1, :, :5]):
        shape = len(x), 1, x.shape[2]
        assert_same_bits(OPS.sum_to(x.cuda(), shape).cpu(), OPS.sum_to(x, shape))


@pytest.mark.gpu
@in_dtypes
@pytest.mark.parametrize("n", [1, 35, 264, 1025, 2064, 4104])
def test_embeddings_of_which_some_have_many_tokens(dtype: torch.dtype, n: int) -> None:
    grad = case("special", (1300, n), dtype, "cpu")
    ids = torch.randint(40, (1300,), generator=torch.Generator().manual_seed(n))
    ids[torch.arange(0, 1300, 2)] = 3  # as padding has
    ids[:256] = 5
    for padding in (-1, 3):
        got = OPS.embedding_backward(grad.cuda(), ids.cuda(), 41, padding)
        assert_same_bits(got.cpu(), OPS.embedding_backward(grad, ids, 41, padding))


@pytest.mark.gpu
@in_dtypes
@pytest.mark.parametrize("n", [8, 1032, 2064, 4104, 8192, 12296, 16384])
def test_all_gradients_of_a_norm_are_those_of_rows_and_of_columns(dtype: torch.dtype, n: int) -> None:
    grad, x = (case("wide", (701, n), dtype, "cpu", seed) for seed in (0, 1))
    means, scales = (case("normal", (701,), F32, "cpu", seed) for seed in (2, 3))
    weight = case("normal", (n,), dtype, "cpu", 4)
    for centred in (means, means[:0]):
        of = grad, x, weight, centred, scales
        for got, want in zip(
            OPS.norm_gradients(*(t.cuda() for t in of), dtype), OPS.norm_gradients(*of, dtype), strict=True
        ):
            assert_same_bits(got.cpu(), want)


@on_devices
@pytest.mark.parametrize("centred", [True, False])
def test_statistics_of_a_norm_are_the_canonical_nan(device: str, centred: bool) -> None:
    x = torch.ones(2, 300, device=device)
    x[0, 7], x[1, 8] = torch.inf, torch.nan
    x[0, 9] = -torch.inf if centred else torch.nan
    _, means, scales = OPS.norm(x, None, None, EPS, centred)
    for statistics in (means, scales) if centred else (scales,):
        assert statistics.view(torch.int32).tolist() == [0x7FFFFFFF] * 2


@on_devices
def test_sum_and_mean_of_one_number_and_of_a_vector(device: str) -> None:
    x = torch.tensor(2.0, device=device, requires_grad=True)
    for op in (sum, mean):
        for dim, keepdim in ((None, False), (0, False), (-1, True), ((), False)):
            assert_same_bits(op(x, dim, keepdim), x.detach())
        (grad,) = torch.autograd.grad(op(x), x)
        assert_same_bits(grad, torch.ones_like(grad))
    v = torch.randn(5, device=device)
    assert_same_bits(sum(v, 0, keepdim=True), sum(v[None], 1))
    with samebits.batch_invariant():
        assert_same_bits(x.sum(), x.detach())
        assert_same_bits(x.mean(), x.detach())
        target = torch.tensor(2, device=device)
        loss = torch.nn.functional.cross_entropy(v, target)
        assert_same_bits(loss, torch.nn.functional.cross_entropy(v[None], target[None]))


@on_devices
def test_gradient_of_a_mean(device: str) -> None:
    """A GPU's quotient of a tensor by a number is a product with the inverse, a CPU's is not."""
    x, grad = torch.zeros(400, 49, device=device, requires_grad=True), values("normal", (400,), F32, 0)
    got = torch.autograd.grad(mean(x, 1), x, grad.to(device))[0]
    want = grad * torch.tensor(1 / 49, dtype=torch.float64).to(F32)
    assert_same_bits(got.cpu(), want[:, None].expand(400, 49))


def test_a_trace_sees_the_gradient_of_a_mean_as_one_operator() -> None:
    """A compiler would divide 1 by n on the GPU, and round elsewhere."""

    def gradient(x: Tensor, grad: Tensor) -> Tensor:
        return torch.autograd.grad(mean(x, 1), x, grad)[0]

    graph = make_fx(gradient)(torch.ones(3, 49, requires_grad=True), torch.ones(3)).graph
    assert OPS.divided.default in [node.target for node in graph.nodes]


@on_devices
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_the_gradient_of_a_mean_is_rounded_once(device: str, dtype: torch.dtype) -> None:
    """Every number of 16 bits, which PyTorch multiplies in float32."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).to(device)
    for n in (1, 2, 3, 5, 7, 100, 300, 4097):
        x = torch.zeros((), dtype=dtype, device=device).expand(1 << 16, n).requires_grad_()
        (got,) = torch.autograd.grad(mean(x, 1), x, every)
        assert_same_bits(got[:, n // 2], (every.float() * (1 / n)).to(dtype))


X = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: sum(X.double()), TypeError, "sum: x"),
        (lambda: sum(X, 2), IndexError, "sum: dim"),
        (lambda: mean(X.long()), TypeError, "mean: x"),
        (lambda: softmax(X, 5), IndexError, "softmax: dim"),
        (lambda: layer_norm(X, (2,)), ValueError, "normalized_shape"),
        (lambda: layer_norm(X, (3,), torch.ones(2)), ValueError, "weight: expected shape"),
        (lambda: rms_norm(X, (3,), torch.ones(3).double()), TypeError, "weight"),
        (lambda: embedding(X, X), TypeError, "ids"),
        (lambda: embedding(torch.tensor([2]), X), IndexError, "out of range"),
        (lambda: embedding(torch.tensor([0]), X, 2), IndexError, "padding_idx"),
        (lambda: embedding(torch.tensor([0]), X[0]), ValueError, "weight"),
        (lambda: attention(X, X[:, :2], X), ValueError, "q, k"),
        (lambda: attention(X, X, X[:1]), ValueError, "k, v"),
        (lambda: attention(X, X, X.half()), TypeError, "v: expected"),
        (lambda: attention(X, X, X, X, is_causal=True), ValueError, "mask"),
        (lambda: attention(X, X, X, torch.ones(3, 3)), ValueError, "mask: expected a shape"),
        (
            lambda: attention(*[torch.ones(3, 2, 2)] * 1, *[torch.ones(2, 2, 2)] * 2, enable_gqa=True),
            ValueError,
            "heads",
        ),
    ],
)
def test_errors(call: Callable[[], Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()


def test_gradients_are_those_of_the_maths() -> None:
    x, w = (torch.randn(4, 9, dtype=F32, requires_grad=True) for _ in range(2))
    for ours, theirs in (
        (lambda: sum(x * w, (0, 1)), lambda: (x * w).sum()),
        (lambda: mean(x * w, 0), lambda: (x * w).mean(0)),
        (lambda: softmax(x * w, 0), lambda: (x * w).softmax(0)),
        (lambda: log_softmax(x * w), lambda: (x * w).log_softmax(1)),
        (lambda: layer_norm(x, (4, 9), w, w), lambda: torch.nn.functional.layer_norm(x, (4, 9), w, w)),
        (lambda: rms_norm(x, (9,), w[0], 1e-6), lambda: torch.nn.functional.rms_norm(x, (9,), w[0], 1e-6)),
        (
            lambda: attention(x, w, x),
            lambda: torch.nn.functional.scaled_dot_product_attention(x[None], w[None], x[None])[0],
        ),
    ):
        a, b = ours(), theirs()
        torch.testing.assert_close(a, b)
        seed = torch.randn_like(a)
        for got, want in zip(
            *(torch.autograd.grad(t, (x, w), seed, allow_unused=True) for t in (a, b)), strict=True
        ):
            if want is not None:
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("arch", compiler.ARCHITECTURES)
def test_kernels_compile_without_spills(arch: str) -> None:
    pytest.importorskip("cuda.core")
    types = (F32, BF16, F16), (F16, F32, F32)
    shared = rows.RowSchedule(1, 1, 4), rows.RowSchedule(8, 0, 1)
    specs = [rows.kernel_spec("row_sum", *of, schedule) for of, schedule in zip(types, shared, strict=True)]
    specs += [columns.kernel_spec(F16, BF16, F32, vector=vector) for vector in (1, 8)]
    specs += [embeddings.kernel_spec("embedding_few", BF16, BF16, vector) for vector in (1, 8)]
    specs += [rows.long_spec(BF16, F32, vector) for vector in (1, 8)]
    widths = [(1024, F16), (4096, BF16), (7168, BF16), (8192, BF16), (12288, BF16), (16384, BF16)]
    widths += [(n, F32) for n in (2048, 4096, 8192)]
    if arch == "sm_75":  # has no GPU that they run on
        widths = []
    if arch == "sm_120a":  # spills 16 bytes, and its shared memory holds one such block, not three
        widths.remove((12288, BF16))
    if arch not in ("sm_80", "sm_90a"):  # where widths take turns
        widths = widths[compiler.ARCHITECTURES.index(arch) % 3 :: 3]
    for n, dtype in widths:
        shares = norm_gradients.choose(n, dtype.itemsize)
        specs.append(norm_gradients.kernel_spec(dtype, dtype, dtype, shares))
    for spec in specs:  # whole files
        cubin = resources(spec, arch)
        assert (cubin.spill_bytes, cubin.local_bytes) == (0, 0)


OPS = torch.ops.samebits
T = torch.tensor
OPCHECKS: list[tuple[Any, Callable[[], tuple[Any, ...]]]] = [
    (OPS.row_sum, lambda: (torch.randn(3, 5, requires_grad=True), True)),
    (OPS.divided, lambda: (torch.randn(3, requires_grad=True), 7)),
    (OPS.sum_to, lambda: (torch.randn(2, 3, 5, requires_grad=True), (3, 1))),
    (OPS.sum_to, lambda: (torch.randn(2, 3, 5, requires_grad=True), (3, 1), torch.bfloat16)),
    (OPS.softmax, lambda: (torch.randn(3, 5, requires_grad=True), False)),
    (OPS.softmax, lambda: (torch.randn(3, 5, requires_grad=True), True)),
    (OPS.softmax_backward, lambda: (torch.randn(3, 5), torch.rand(3, 5), False)),
    (OPS.norm, lambda: (*(torch.randn(s, requires_grad=True) for s in ((3, 5), (5,), (5,))), 1e-5, True)),
    (OPS.norm, lambda: (torch.randn(3, 5, requires_grad=True), None, None, 1e-5, False)),
    (OPS.norm_backward, lambda: (torch.randn(3, 5), torch.randn(3, 5), None, torch.randn(3), torch.rand(3))),
    (OPS.norm_columns, lambda: (torch.randn(3, 5), torch.randn(3, 5), torch.randn(3), torch.rand(3), F16)),
    (
        OPS.norm_gradients,
        lambda: (torch.randn(3, 5), torch.randn(3, 5), None, torch.randn(3), torch.rand(3), F16),
    ),
    (
        OPS.vector_norm_backward,
        lambda: tuple(torch.rand(s, requires_grad=True) for s in ((3,), (3, 5), (3,))),
    ),
    (OPS.logsumexp_backward, lambda: tuple(torch.rand(s, requires_grad=True) for s in ((3,), (3, 5)))),
    (OPS.embedding, lambda: (torch.randn(3, 5, requires_grad=True), T([[0, 1], [2, 0]]), -1)),
    (OPS.embedding_backward, lambda: (torch.randn(2, 2, 5), T([[0, 1], [2, 0]]), 3, 2)),
]


@pytest.mark.parametrize(("operator", "arguments"), OPCHECKS, ids=range(len(OPCHECKS)))
def test_opcheck(operator: Any, arguments: Callable[[], tuple[Any, ...]]) -> None:
    torch.library.opcheck(operator.default, arguments())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_the_default_dtype_does_not_matter(dtype: torch.dtype) -> None:
    x, weight, ids = values("normal", (4, 16), torch.bfloat16, 0), torch.ones(16), torch.tensor([1, 0, 1, 3])
    bias = torch.zeros(1)

    def everything() -> list[Tensor]:
        leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias)]
        y, w, b = leaves
        with samebits.batch_invariant("error"):
            results = [
                *(y.softmax(1), y.log_softmax(0), y.sum(0), y.mean(1), F.layer_norm(y, (16,), w, w)),
                *(F.rms_norm(y, (16,)), F.embedding(ids, y), F.cross_entropy(y, ids)),
                *(
                    F.scaled_dot_product_attention(y[None], y[None], y[None]),
                    samebits.linear(w, y.float(), b),
                ),
            ]
        return [*results, *torch.autograd.grad(results, leaves, [torch.ones_like(r) for r in results])]

    want = everything()
    torch.set_default_dtype(dtype)
    try:
        got = everything()
    finally:
        torch.set_default_dtype(torch.float32)
    for g, w in zip(got, want, strict=True):
        assert_same_bits(g, w)


@pytest.mark.parametrize("shape", [[5, 4, 1], [5, 1, 1], [1, 4, 7], [5, 4, 7], [4, 1]])
def test_a_sum_over_what_was_broadcast_has_the_strides_that_are_promised(shape: list[int]) -> None:
    """Also of a gradient that lies in another order than its dimensions."""
    grad = values("normal", (4, 5, 7), torch.float32, 1).transpose(0, 1)
    operator = torch.ops.samebits.sum_to.default
    torch.library.opcheck(operator, (grad, shape))
    assert_same_bits(operator(grad, shape), operator(grad.contiguous(), shape))
