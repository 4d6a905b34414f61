"""samebits.batch_invariant: which operators it covers, with which bits, and that nothing else changes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import samebits
from samebits.backends.modes import CONTEXT, includes, with_context
from samebits.mode import UncoveredError, batch_invariant, calls, functions, rules
from samebits.mode.pointwise import loss_gradient_in_whole_vectors
from samebits.mode.traced import Traced
from samebits.mode.vectors import in_whole_vectors
from samebits.ops import reduce
from samebits.ops.attention import scaled_dot_product_attention
from samebits.ops.softmax import log_softmax, softmax
from samebits.testing import assert_same_bits, values
from tests.mode.conftest import Within
from tests.support.devices import DEVICES
from tests.support.threads import in_threads

on_devices = pytest.mark.parametrize("device", DEVICES)
DTYPES = [torch.float32, torch.bfloat16]
X = values("normal", (6, 3, 40), torch.float32, 0)


@pytest.fixture(autouse=True)
def _forget_warnings() -> None:
    calls._warned.clear()


# name -> a computation on a batch x[rows, tokens, 40] with weights w[40, 40] and b[40]
COVERED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "mm": lambda x, w, b: torch.mm(x.flatten(0, 1), w).view(x.shape),
    "matmul": lambda x, w, b: torch.matmul(x, w),
    "@": lambda x, w, b: x @ w,
    "bmm": lambda x, w, b: torch.bmm(x, x.mT),
    "mv": lambda x, w, b: torch.mv(x.flatten(0, 1), b).view(x.shape[:2]),
    "addmm": lambda x, w, b: torch.addmm(b, x.flatten(0, 1), w).view(x.shape),
    "addmm, scaled": lambda x, w, b: torch.addmm(b, x.flatten(0, 1), w, beta=0.5, alpha=2).view(x.shape),
    "baddbmm": lambda x, w, b: torch.baddbmm(x, x, w.expand(len(x), -1, -1), alpha=0.5),
    "linear": lambda x, w, b: F.linear(x, w, b),
    "grouped_mm": lambda x, w, b: F.grouped_mm(
        x.flatten(0, 1), w[None], offs=torch.tensor([x.shape[:2].numel()], dtype=torch.int32, device=x.device)
    ).view(x.shape),
    "einsum": lambda x, w, b: torch.einsum("...i,oi->...o", x, w) + b,
    "softmax": lambda x, w, b: x.softmax(-1),
    "log_softmax": lambda x, w, b: F.log_softmax(x, dim=2),
    "cross_entropy": lambda x, w, b: F.cross_entropy(
        x.mT, x.argmax(2).where(x[..., 0] > 0, -100), reduction="none"
    ),
    "layer_norm": lambda x, w, b: F.layer_norm(x, (40,), b, b),
    "rms_norm": lambda x, w, b: F.rms_norm(x, (40,), b),
    "rms norm by hand": lambda x, w, b: b * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)),
    "logsumexp": lambda x, w, b: x.logsumexp((1, 2)),
    "sum": lambda x, w, b: x.sum((1, 2)),
    "nansum": lambda x, w, b: torch.where(x > 1, torch.nan, x).nansum(-1),
    "nanmean": lambda x, w, b: torch.nanmean(torch.where(x > 1, torch.nan, x), 2),
    "var": lambda x, w, b: x.var((1, 2)),
    "std": lambda x, w, b: torch.std(x, -1, correction=0),
    "std_mean": lambda x, w, b: torch.stack(torch.std_mean(x, -1), -1),
    "norm": lambda x, w, b: x.norm(dim=-1),
    "vector_norm": lambda x, w, b: torch.linalg.vector_norm(x, dim=(1, 2)),
    "normalize": lambda x, w, b: F.normalize(x, dim=-1),
    "norm, 1": lambda x, w, b: x / x.norm(p=1, dim=-1, keepdim=True),
    "local_response_norm": lambda x, w, b: F.local_response_norm(x.mT, 3).mT,
    "batch_norm": lambda x, w, b: F.batch_norm(x.mT, b.detach(), w[0].detach() ** 2, w[1], b).mT,
    "avg_pool1d": lambda x, w, b: F.avg_pool1d(x, 5, 2, 1),
    "adaptive_avg_pool2d": lambda x, w, b: F.adaptive_avg_pool2d(x, (1, 3)),
    "mean": lambda x, w, b: torch.mean(x, dim=1),
    "attention": lambda x, w, b: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "conv1d": lambda x, w, b: F.conv1d(x.mT, w[:, :, None].expand(-1, -1, 3), b, padding=1).mT,
    "conv1d, depthwise": lambda x, w, b: F.conv1d(x.mT, w[:, None, :4], b, padding=3, groups=40)[..., :-3].mT,
    "conv2d": lambda x, w, b: F.conv2d(x[:, None], w[:2, None, :9].view(2, 1, 3, 3), b[:2], 2, 1),
    "topk": lambda x, w, b: x.topk(5)[0],
    "cumsum": lambda x, w, b: x.cumsum(-1),
    "x[i]": lambda x, w, b: x[:, torch.tensor([0, 0, 2, 1], device=x.device)],
    "silu": lambda x, w, b: F.silu(x * b),
    "gelu": lambda x, w, b: F.gelu(x + b),
    "repeat": lambda x, w, b: x[:, None].expand(-1, 2, -1, -1).reshape(len(x), 6, 40).softmax(-1),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", COVERED)
@on_devices
def test_rows_in_every_company_and_place(device: str, name: str, dtype: torch.dtype, within: Within) -> None:
    """Forward and the gradient of the rows; also where a backward comes after the context."""
    f = COVERED[name]
    x = X.to(device, dtype)
    w = (values("normal", (40, 40), dtype, 1) / 8).to(device)
    b = values("normal", (40,), dtype, 2).to(device)

    def run(rows: Tensor) -> tuple[Tensor, Tensor]:
        leaf = rows.detach().requires_grad_()
        with within("error"):
            y = f(leaf, w, b)
        seed = values("normal", (6, *y.shape[1:]), dtype, 3).to(device)[: len(y)]
        return y.detach(), torch.autograd.grad(y, leaf, seed)[0]

    y, dx = run(x)
    for count in (1, 2, 5):
        some, d_some = run(x[:count])
        assert_same_bits(some, y[:count], f"{count} rows")
        assert_same_bits(d_some, dx[:count], f"gradient of {count} rows")
    turned, _ = run(x.flip(0))
    assert_same_bits(turned.flip(0), y, "the other way round")


@pytest.mark.parametrize("name", ["linear", "layer_norm", "rms_norm", "rms norm by hand", "gelu", "addmm"])
@on_devices
def test_gradients_of_weights_in_a_padded_batch(device: str, name: str) -> None:
    f = COVERED[name]
    x, b = X.to(device), values("normal", (40,), torch.float32, 2).to(device)
    w = (values("normal", (40, 40), torch.float32, 1) / 8).to(device)
    seed = values("normal", tuple(x.shape), torch.float32, 3).to(device)

    def run(rows: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in (w, b)]
        with batch_invariant():
            y = f(rows, *leaves)
        return torch.autograd.grad(y, leaves, grad, allow_unused=True)

    padded, zeros = (torch.zeros(6, 8, 40, device=device) for _ in range(2))
    padded[:, :3], zeros[:, :3] = x, seed
    for got, want in zip(run(padded, zeros), run(x, seed), strict=True):
        if want is not None:
            assert_same_bits(got, want)


def test_operators_are_this_librarys(within: Within) -> None:
    x, w = values("normal", (3, 300), torch.bfloat16, 0), values("normal", (200, 300), torch.bfloat16, 1)
    with within():
        assert_same_bits(F.linear(x, w), samebits.linear(x, w))
        assert_same_bits(x @ w.mT, samebits.matmul(x, w.mT))
        pair, ends = torch.stack((w, -w)).mT, torch.tensor([1, 3], dtype=torch.int32)
        assert_same_bits(F.grouped_mm(x, pair, offs=ends), samebits.grouped_mm(x, pair, ends))
        assert_same_bits(torch.softmax(x, 1), softmax(x))
        assert_same_bits(nn.LogSoftmax(0)(x), log_softmax(x, 0))
        q = values("normal", (2, 4, 9, 8), torch.bfloat16, 2)
        for options in ({}, {"scale": 0.3}, {"is_causal": True}):
            got = F.scaled_dot_product_attention(q, q[:, :2], q[:, :2], enable_gqa=True, **options)
            want = scaled_dot_product_attention(q, q[:, :2], q[:, :2], enable_gqa=True, **options)
            assert_same_bits(got, want)
        assert torch.ones(3, dtype=torch.int64).sum() == 3
    embedding = nn.Embedding(5, 4, padding_idx=1)
    ids = torch.tensor([[1, 2], [2, 2]])
    with within():
        (got,) = torch.autograd.grad(embedding(ids).sum(), embedding.weight)
    (want,) = torch.autograd.grad(embedding(ids).sum(), embedding.weight)
    assert_same_bits(got, want)


def test_a_traced_embedding_keeps_its_padding() -> None:
    """Nothing is recorded while it is traced. But the graph may be trained."""
    ids, table = torch.tensor([0, 1, 4, 1]), torch.ones(5, 4)
    with samebits.batch_invariant():
        graph = torch.jit.trace(
            lambda ids, table: F.embedding(ids, table, padding_idx=1), (ids, table), check_trace=False
        )
    (grad,) = torch.autograd.grad(graph(ids, table.requires_grad_()).sum(), table)
    assert_same_bits(grad, torch.tensor([1.0, 0, 0, 0, 1])[:, None].expand(5, 4))


def test_close_to_pytorch_in_a_transformer(within: Within) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(10, 16), layer, nn.LayerNorm(16), nn.Linear(16, 10))
    ids = torch.randint(10, (2, 7))

    def gradients() -> tuple[Tensor, ...]:
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        return torch.autograd.grad(loss, list(model.parameters()))

    plain = gradients()
    with within("error"):
        for got, want in zip(gradients(), plain, strict=True):
            torch.testing.assert_close(got, want)
        model.eval()  # PyTorch has a fast path for this
        with torch.no_grad():
            assert_same_bits(model(ids[:1]), model(ids)[:1])


def test_nothing_changes_outside(within: Within) -> None:
    names = ("mm", "softmax", "sum", "conv1d", "rsqrt")
    functions = [getattr(torch, name) for name in names] + [F.linear, F.silu, Tensor.__matmul__]
    x, w = torch.randn(5, 700), torch.randn(9, 700)
    before = [F.linear(x, w), x.softmax(1), x.sum(1), F.layer_norm(x, (700,))]
    with within():
        inside = [F.linear(x, w), x.softmax(1), x.sum(1), F.layer_norm(x, (700,))]
    with pytest.raises(KeyError), within():
        raise KeyError
    assert not includes(CONTEXT)
    after = [F.linear(x, w), x.softmax(1), x.sum(1), F.layer_norm(x, (700,))]
    assert functions == [getattr(torch, name) for name in names] + [F.linear, F.silu, Tensor.__matmul__]
    for a, b in zip(after, before, strict=True):
        assert_same_bits(a, b)
    assert any((a != b).any() for a, b in zip(inside, before, strict=True))


def test_other_threads_are_left_alone() -> None:
    x = torch.randn(5, 700)
    plain = x.softmax(1)

    def work() -> tuple[bool, Tensor, Tensor]:
        on = includes(CONTEXT)
        with batch_invariant("error"):
            inside = x.softmax(1)
        return on, inside, x.softmax(1)

    with batch_invariant():
        ours = x.softmax(1)
        seen = in_threads(*[work] * 4)
    for on, inside, after in seen:
        assert not on
        assert_same_bits(inside, ours)
        assert_same_bits(after, plain)


def test_nesting_and_the_decorator() -> None:
    x = torch.randn(4, 9)

    @batch_invariant("error")
    def decorated(depth: int) -> Tensor:
        assert includes(CONTEXT)
        with pytest.raises(UncoveredError, match=r"torch\.logcumsumexp"):
            torch.logcumsumexp(x, 1)
        with batch_invariant("ignore"):
            torch.logcumsumexp(x, 1)
        return decorated(depth - 1) if depth else x.softmax(1)

    assert decorated.__name__ == "decorated"
    assert_same_bits(decorated(2), softmax(x))
    around = batch_invariant("error")
    with around, pytest.raises(UncoveredError):
        x.logcumsumexp(1)
    assert not includes(CONTEXT)
    x.logcumsumexp(1)


UNCOVERED: dict[str, Callable[[], Any]] = {
    "conv_transpose1d": lambda: nn.ConvTranspose1d(3, 2, 3)(X),
    "logcumsumexp": lambda: X.logcumsumexp(0),
    "cumprod": lambda: X.clone().requires_grad_().cumprod(0),
    "norm": lambda: X.norm(p=3),
    "vector_norm": lambda: torch.linalg.vector_norm(X, 3),
    "prod": lambda: X.prod(1),
    "batch_norm": lambda: nn.BatchNorm1d(3)(X),
    "scatter_reduce": lambda: X[0].scatter_reduce(0, torch.zeros(1, 1, dtype=torch.int64), X[0], "prod"),
    "scatter": lambda: X[0].scatter(0, torch.zeros(1, 1, dtype=torch.int64), 2.0, reduce="add"),
    "bincount": lambda: torch.bincount(torch.zeros(40, dtype=torch.int64), X[0, 0]),
    "lstm": lambda: nn.LSTM(40, 2)(X),
    "rfft": lambda: torch.fft.rfft(X),
    "bilinear": lambda: nn.Bilinear(40, 40, 2)(X, X),
    "matmul": lambda: X.double() @ X.double().mT,
    "sum": lambda: X.double().sum(),
    "_foreach_norm": lambda: torch._foreach_norm([X], 3),
    "scaled_dot_product_attention": lambda: F.scaled_dot_product_attention(X, X, X, dropout_p=0.1),
    "_softmax": lambda: torch.ops.aten._softmax(X, 1, False),
    "normalize": lambda: F.normalize(X, 3),
    "tensordot": lambda: torch.tensordot(X, X, 3),
    "interpolate": lambda: F.interpolate(X[None], (2, 7), mode="bilinear", antialias=True),
    "fold": lambda: F.fold(torch.ones(1, 4, 9), (4, 4), (2, 2)),
    "grid_sample": lambda: F.grid_sample(X[None], torch.ones(1, 2, 2, 2), align_corners=False),
    "torch.logcumsumexp": lambda: torch.logcumsumexp(input=X, dim=0),
    "rnn_tanh_cell": lambda: nn.RNNCell(40, 2)(X[0]),
    "convolution": lambda: torch.ops.aten.convolution(X, X[:3], None, [1], [0], [1], False, [0], 1),
    "native_layer_norm": lambda: torch.native_layer_norm(X, (40,), None, None, 1e-5),
    "index_put": lambda: X.index_put((X > 0,), X[0, 0, 0], accumulate=True),
    "sparse.mm": lambda: torch.sparse.mm(X[0].to_sparse(), X[0].mT),
}


@pytest.mark.parametrize("name", UNCOVERED)
def test_uncovered_operators_are_named(name: str) -> None:
    call, inner = UNCOVERED[name], "norm" if name == "normalize" else name
    with batch_invariant("error"), pytest.raises(UncoveredError, match=inner):
        call()
    with batch_invariant("ignore"), warnings.catch_warnings():
        warnings.simplefilter("error")
        call()
    with batch_invariant(), pytest.warns(RuntimeWarning, match=inner) as caught:
        [call() for _ in range(2)]
    assert len(caught) == 1
    assert caught[0].filename == __file__ or name in PYTHON


# Reached through Python of PyTorch.
PYTHON = (
    *("lstm", "rnn_tanh_cell", "conv_transpose1d", "batch_norm", "bilinear", "normalize", "norm"),
    *("tensordot", "interpolate", "fold", "grid_sample"),
)

_I = torch.zeros(4, dtype=torch.int64)
_M = torch.eye(4)
# Arguments that PyTorch takes for one operator or another; a call is reported before shapes are looked at.
ARGUMENTS: list[tuple[Any, ...]] = [
    *((_M,), (_M, _M), (_M, _M, _M), (_M, _M, _M, _M), (_M, 1), (_M, 2.0, 1, 1.0), (_M, 1, False)),
    *((_M, 1, _I, _M), (_M, 1, _I, _M, "sum"), (_M, "sum"), ([_M, _M],)),
    (_M, _M, None, [1], [0], [1], False, [0], 1),
    (_M, _M, None, [1], [0], [1], False, [0], 1, False, False, False, False),
    (_M, None, None, None, None, True, 0.1, 1e-5, True),
    (_M, None, None, None, None, True, 0.1, 1e-5),
    (_M, _M, _M, 4, 4, 4, 1, 1e-5),
    (_M, [4], None, None, 1e-5),
    (_M, (_M, _M), [_M], True, 1, 0.0, False, False, False),
    (_M, _M, [_M], True, 1, 0.0, False, False, False),
    (_M, (_M, _M), _M, _M),
    (_M, _M, _M, None, False),
    (_M, _M, _M, 1, 1, *(_M,) * 4),
    (_M, 1, 1, *(_M,) * 4, False, False, 1e-5, *(_M,) * 8),
]
# Gone from this PyTorch, where functions of these names raise an error, or with arguments that no other has.
NOT_CALLED = {
    "solve_triangular",
    *(
        name
        for name, function in vars(torch._linalg_utils).items()
        if isinstance(function, FunctionType) and "now removed" in str(function.__code__.co_consts)
    ),
}


def test_every_listed_operator_is_reported() -> None:
    for func in functions.UNCOVERED:
        name = functions.NAMES[func]

        def reported(func: Any, args: tuple[Any, ...]) -> bool:
            try:
                func(*args)
            except UncoveredError:
                return True
            except Exception:
                pass
            return False

        with batch_invariant("error"):
            called = any(reported(func, args) for args in ARGUMENTS)
            if not called and name.rpartition(".")[2] in NOT_CALLED:
                called = reported(Traced("error").__torch_function__, (func, (), (_M,)))
        assert called, name


@pytest.mark.parametrize("on_uncovered", ["error", "warn", "ignore"])
def test_pooling_by_maxima(on_uncovered: Any, within: Within) -> None:
    x = values("normal", (1, 2, 4, 4, 4), torch.float32, 0)
    pools: list[tuple[str, int, dict[str, Any]]] = [("max_pool", d, {"kernel_size": 2}) for d in (1, 2, 3)]
    pools += [("adaptive_max_pool", d, {"output_size": 2}) for d in (1, 2, 3)]
    pools += [("fractional_max_pool", d, {"kernel_size": 2, "output_size": 2}) for d in (2, 3)]
    with within(on_uncovered):
        for name, d, options in pools:
            rows = x.view(1, 2, *{1: (64,), 2: (8, 8), 3: (4, 4, 4)}[d])
            out, _ = getattr(F, f"{name}{d}d")(rows, **options, return_indices=True)
            assert out.shape == getattr(F, f"{name}{d}d")(rows, **options).shape
        assert nn.MaxPool2d(2)(x[0]).shape == (2, 4, 2, 2)


def test_elementwise_functions_over_lengths_and_threads(within: Within) -> None:
    x = torch.randn(70_001)
    with within("error"):
        for f in (F.silu, F.gelu, torch.sigmoid, F.softplus, torch.exp2, torch.cosh, lambda x: 2.5**x):
            full = f(x)
            for start, stop in ((0, 1), (5, 38), (100, 33_000), (3, 70_000)):
                assert_same_bits(f(x[start:stop]), full[start:stop])
            assert_same_bits(f(x[:69_996].view(12, -1).mT), full[:69_996].view(12, -1).mT)
    assert F.silu(x, True) is x


# Everything of PyTorch that takes each element, by name: of torch, Tensor, torch.special and functional.
POINTWISE = """
    abs absolute neg negative positive sign sgn ceil floor round trunc fix frac sqrt square reciprocal
    rad2deg deg2rad nan_to_num clamp clamp_min clamp_max clip add sub subtract mul multiply div divide
    true_divide fmod remainder maximum minimum fmax fmin copysign heaviside nextafter
    bessel_j0 bessel_j1 bessel_y0 bessel_y1 modified_bessel_i0 scaled_modified_bessel_k0 spherical_bessel_j0
    zeta angle relu relu6 leaky_relu hardtanh hardswish hardsigmoid hardshrink softsign threshold
""".split()  # noqa: SIM905
POINTWISE += [rule.name for rule in rules.ELEMENTWISE if rule.each is in_whole_vectors]
VARIANTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add alpha": lambda x, y: torch.add(x, y, alpha=0.3),
    "sub alpha": lambda x, y: torch.sub(x, y, alpha=0.3),
    "add_ alpha": lambda x, y: x.mul(0.9).add_(y, alpha=0.1),
    "sub_ alpha": lambda x, y: (x * 1).sub_(y, alpha=0.3),
    "rope": lambda x, y: 1 / 10000.0**x,
    "x ** -0.5": lambda x, y: x**-0.5,
    "x ** 3": lambda x, y: x**3,
    "x **= y": lambda x, y: (x * 1).__ipow__(y),
    "div rounded": lambda x, y: torch.div(x * 500, y, rounding_mode="trunc"),
    "//": lambda x, y: x * 500 // y,
    "polygamma": lambda x, y: torch.polygamma(1, x),
    "broadcast": lambda x, y: torch.atan2(x, X[0, 0, :37]),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.3),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y, value=0.3),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "gelu": lambda x, y: F.gelu(x, approximate="tanh"),
    "gelu in place": lambda x, y: torch._C._nn.gelu_(x * 1),
    "inplace": lambda x, y: nn.ELU(0.5, inplace=True)(nn.SiLU(inplace=True)(nn.Mish(True)(x * 1))),
    "glu": lambda x, y: F.glu(torch.cat([x, y], -1)),
    "binary cross-entropy": lambda x, y: F.binary_cross_entropy(
        x.sigmoid(), y.detach().sigmoid(), reduction="none"
    ),
    "its logits": lambda x, y: F.binary_cross_entropy_with_logits(
        x, y.detach(), pos_weight=X[0, 0, :37], reduction="none"
    ),
    "huber_loss, delta": lambda x, y: F.huber_loss(9 * x, y.detach(), reduction="none", delta=3.3),
    "smooth_l1_loss, beta": lambda x, y: F.smooth_l1_loss(x, y.detach(), reduction="none", beta=3.0),
    **{
        f"{f.__name__}": lambda x, y, f=f: f(x, y.detach(), reduction="none")  # type: ignore[misc]
        for f in (F.mse_loss, F.l1_loss, F.huber_loss, F.smooth_l1_loss, F.kl_div, F.poisson_nll_loss)
    },
}


def _calls(name: str) -> list[Callable[[Tensor, Tensor], Any]]:
    """Calls of everything of that name, with each kind of arguments that it takes."""
    if name in VARIANTS:
        return [VARIANTS[name]]
    found: list[Callable[[Tensor, Tensor], Any]] = []
    for function in functions.named(name) | functions.named(name + "_"):
        for call in (
            lambda x, y, f=function: f(x * 1),
            lambda x, y, f=function: f(x * 1, y),
            lambda x, y, f=function: f(x * 1, 0.3),
            lambda x, y, f=function: f(x * 1, -0.5),
            lambda x, y, f=function: f(2.3, x),
            lambda x, y, f=function: f(x * 1, y, y),
            lambda x, y, f=function: f(x * 1, 0.3, 0.7),
        ):
            try:
                if call(torch.ones(2, 3) / 2, torch.ones(2, 3) / 3).shape == (2, 3):
                    found.append(call)
            except (TypeError, RuntimeError, AttributeError):
                pass
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.binary_cross_entropy_with_logits(x, x.detach().abs(), reduction="none"),
        lambda x: F.binary_cross_entropy_with_logits(x, x.detach().abs()),
        F.glu,
        lambda x: F.affine_grid(x.view(37, 2, 3), [37, 1, 41, 43], align_corners=False),
    ],
    ids=["losses", "loss", "glu", "affine_grid"],
)
def test_gradients_by_operators_with_a_rule(function: Any, dtype: torch.dtype) -> None:
    """Autograd computes them by ``sigmoid`` and ``bmm``, also where the backward runs outside."""
    x = values("normal", (37, 6), dtype, 0).requires_grad_()
    with batch_invariant("error"):
        out = function(x)
        seed = values("normal", tuple(out.shape), dtype, 1)
        (want,) = torch.autograd.grad(out, x, seed, retain_graph=True)
    (got,) = torch.autograd.grad(out, x, seed)
    assert_same_bits(got, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dim", "shape"), [(1, (3, 30, 37)), (-1, (37, 3, 30)), (0, (30, 111))], ids=str)
def test_a_gated_unit_does_not_look_at_a_layout(
    dim: int, shape: tuple[int, ...], dtype: torch.dtype, within: Within
) -> None:
    """As in convolutions of speech, where the halves are channels and a batch has more steps, or fewer."""
    x = values("normal", shape, dtype, 0)
    seed = torch.linspace(0.3, 1.7, x.numel()).view(shape).to(dtype).chunk(2, dim)[0]

    def run(x: Tensor, seed: Tensor) -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        with within("error"):
            out = F.glu(leaf, dim)
        return [out.detach(), *torch.autograd.grad(out, leaf, seed)]

    wanted = run(x, seed)
    steps = 0 if dim == -1 else -1
    for n in (1, 5, 16):
        part = (t.narrow(steps, 0, n) for t in (x, seed))
        for got, want in zip(run(*part), wanted, strict=True):
            assert_same_bits(got, want.narrow(steps, 0, n), f"{n} steps")
    turned = x.transpose(0, -1).contiguous().transpose(0, -1)
    for got, want in zip(run(turned, seed), wanted, strict=True):
        assert_same_bits(got, want, "another layout")
    with within("error"), pytest.raises(RuntimeError, match="must be even"):
        F.glu(x.narrow(dim, 0, 29), dim)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*POINTWISE, *VARIANTS])
@pytest.mark.filterwarnings("ignore:This overload")
def test_elements_alone_and_in_batches(name: str, dtype: torch.dtype, within: Within) -> None:
    """Forward and gradient of each elementwise function, of rows that whole vectors do not divide."""
    g = torch.Generator().manual_seed(0)
    uniform, normal = (f(2, 90, 37, generator=g) for f in (torch.rand, torch.randn))
    seed = torch.linspace(0.3, 1.7, 90 * 74).view(90, 74)

    def run(call: Any, x: Tensor, y: Tensor, start: int, stop: int, gradient: bool) -> list[Tensor]:
        leaves = [t[start:stop].clone().requires_grad_(gradient) for t in (x, y)]
        with within("error"):
            out = call(*leaves)
            out = torch.view_as_real(out).flatten(1) if out.is_complex() else out
            if not out.requires_grad:
                return [out]
            weights = seed[start:stop, : out.shape[1]].to(out.dtype)
            grads = torch.autograd.grad(out, leaves, weights, allow_unused=True, materialize_grads=True)
        return [out.detach(), *grads]

    checked = 0
    for pair in (uniform * 0.9 + 0.05, uniform * 3 + 0.01, normal * 3):
        for call in _calls(name):
            for gradient in (True, False):
                try:
                    full = run(call, *pair.to(dtype), 0, 90, gradient)
                except UncoveredError:
                    raise
                except (RuntimeError, TypeError):  # not in PyTorch, for this dtype, or without a gradient
                    continue
                checked += 1
                for start, stop in ((0, 1), (5, 8), (17, 83), (1, 90)):
                    alone = run(call, *pair.to(dtype), start, stop, gradient)
                    for got, want in zip(alone, full, strict=True):
                        want = want[start:stop]
                        assert torch.equal(got.isnan(), want.isnan())  # of whichever bits
                        assert_same_bits(*(t.masked_fill(t.isnan(), 0) for t in (got, want)))
                break
    assert checked or dtype == torch.bfloat16


# Reentrant checkpoints are not for autograd.grad.
BACKWARDS = [("Tensor.backward", True), ("autograd.backward", True)]
BACKWARDS += [(backward, False) for backward in ("Tensor.backward", "autograd.backward", "autograd.grad")]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("backward", "reentrant"), BACKWARDS)
def test_what_a_backward_computes_again_is_covered(device: str, backward: str, reentrant: bool) -> None:
    leaves = [t.to(device).requires_grad_() for t in (X.clone(), torch.eye(40) + 0.1, torch.ones(40))]

    def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.layer_norm(F.silu(x @ w * b), (40,), b).softmax(-1).square()

    with batch_invariant("error"):
        want = torch.autograd.grad(layer(*leaves).sum(), leaves)
        loss = checkpoint(layer, *leaves, use_reentrant=reentrant).sum()
        if backward == "autograd.grad":
            got = torch.autograd.grad(loss, leaves)
        else:
            loss.backward() if backward == "Tensor.backward" else torch.autograd.backward(loss)
            got = tuple(t.grad for t in leaves)
        loss = layer(*leaves).sum()
    outside = torch.autograd.grad(loss, leaves)
    for ours, again, after in zip(want, got, outside, strict=True):
        assert_same_bits(again, ours)
        assert_same_bits(after, ours)


def test_threads_that_autograd_takes_the_mode_to_report_too() -> None:
    def elsewhere() -> None:
        with with_context(True), pytest.raises(UncoveredError):
            X.logcumsumexp(0)

    with batch_invariant("error"):
        in_threads(elsewhere)


def test_functions_that_dispatch_themselves(within: Within) -> None:
    with within("error"):
        grid = torch.meshgrid(torch.arange(3), torch.arange(2), indexing="ij")
    assert [t.tolist() for t in grid] == [[[0, 0], [1, 1], [2, 2]], [[0, 1]] * 3]


def test_cross_entropy_of_pictures_has_a_backward(within: Within) -> None:
    x = values("normal", (2, 5, 3, 4), torch.float32, 0).requires_grad_()
    target = torch.arange(24).view(2, 3, 4) % 5
    with within("error"):
        (got,) = torch.autograd.grad(F.cross_entropy(x, target), x)
    (theirs,) = torch.autograd.grad(F.cross_entropy(x, target), x)
    torch.testing.assert_close(got, theirs)


def test_results_lie_in_memory_as_pytorchs(within: Within) -> None:
    for x in (X.mT, values("normal", (2, 3, 4, 5), torch.float32, 0).to(memory_format=torch.channels_last)):
        for function in (F.gelu, torch.rsqrt, torch.exp, lambda t: t**2, lambda t: torch.lerp(t, t, 0.5)):
            with within("error"):
                got = function(x)
            assert got.stride() == function(x).stride()
            torch.testing.assert_close(got, function(x), equal_nan=True)


def test_gradients_of_losses_on_a_gpu_are_pytorchs() -> None:
    """Wherever the backward runs: the rule is for CPUs, but autograd's own calls reach it from any device."""
    called: list[Any] = []
    gradient = loss_gradient_in_whole_vectors(lambda *args: called.append(args))
    args = (torch.ones((), device="meta"), X.to("meta"), X.to("meta"), 1, 0.7)
    gradient(*args)
    assert called == [args]


class Tripling(Tensor):
    """Multiplies what ``F.linear`` gives."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [t.as_subclass(Tensor) if isinstance(t, cls) else t for t in args]
        result = func(*plain, **(kwargs or {}))
        return result * 3 if func is F.linear else result


@on_devices
@pytest.mark.parametrize("name", COVERED)
def test_results_change_in_place_where_pytorchs_do(device: str, name: str, within: Within) -> None:
    """As ``ReLU(inplace=True)`` behind a layer does."""

    def run(in_place: bool) -> tuple[Tensor, ...]:
        w, b = values("normal", (40, 40), torch.float32, 1) / 8, values("normal", (40,), torch.float32, 2)
        leaves = [t.to(device, copy=True).requires_grad_() for t in (X, w, b)]
        out = COVERED[name](*leaves)
        out = out.mul_(0.5) if in_place else out * 0.5
        return out, *torch.autograd.grad(out, leaves, torch.ones_like(out), allow_unused=True)

    try:
        run(in_place=True)
    except RuntimeError:  # PyTorch's own backward needs the result
        return
    with within():
        for i, (got, want) in enumerate(zip(run(in_place=True), run(in_place=False), strict=True)):
            assert (got is None) == (want is None)
            if got is not None:
                assert_same_bits(got, want, f"result {i}")


def test_subclasses_that_override_functions_or_operators_do_so() -> None:
    weight = torch.eye(40).as_subclass(Tripling)
    with batch_invariant("error"):  # which covers what the subclass calls
        assert torch.equal(F.linear(X, weight), 3 * X)
    pair = TwoTensor(X, X)  # as a DTensor, it dispatches operators
    with batch_invariant("ignore"):
        assert torch.equal((pair @ torch.eye(40)).a, X)
    with batch_invariant("error"), pytest.raises(UncoveredError, match="matmul"):
        pair @ torch.eye(40)
    with batch_invariant("error"):
        F.linear(X, nn.Parameter(torch.eye(40)))


def test_nested_tensors_are_left_to_pytorch(within: Within) -> None:
    nested = torch.nested.nested_tensor([X[0], X[1, :2]])
    with within("ignore"):
        assert torch.equal((nested + nested).unbind()[1], X[1, :2] * 2)


def test_higher_order_operators_are_named() -> None:
    with batch_invariant("error"), pytest.raises(Exception, match=r"UncoveredError.*cond"):
        torch.cond(torch.tensor(True), lambda t: t.softmax(1), lambda t: t.softmax(0), (X,))


def test_a_wrong_argument() -> None:
    with pytest.raises(ValueError, match="on_uncovered"):
        batch_invariant("no")  # type: ignore[arg-type]


def test_autocast(within: Within) -> None:
    x, w = torch.randn(3, 40), torch.randn(5, 40)
    with within(), torch.autocast("cpu", torch.bfloat16):
        assert_same_bits(F.linear(x, w), samebits.linear(x.bfloat16(), w.bfloat16()))
        assert F.scaled_dot_product_attention(x, x, x).dtype == torch.bfloat16
        assert torch.addmm(torch.ones(3, 5), x, w.mT).dtype == torch.bfloat16
        assert torch.baddbmm(torch.ones(1, 3, 5), x[None], w.mT[None]).dtype == torch.bfloat16


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_autocast_of_a_loss(reduction: str, within: Within) -> None:
    target, weight = torch.tensor([0, 3, -100, 1]), values("normal", (10, 10), torch.float32, 1)

    def run() -> tuple[Tensor, Tensor]:
        x = X[0, 0].view(4, 10).clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(F.linear(x, weight), target, reduction=reduction)
        return loss.detach(), torch.autograd.grad(loss, x, torch.ones_like(loss))[0]

    want = run()
    with within("error"):
        got = run()
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=0.02, atol=0.02)


@pytest.mark.long
def test_compiled_whole() -> None:
    torch.manual_seed(0)
    norm, projection = nn.RMSNorm(40), nn.Linear(40, 40)

    def f(x: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        return projection(norm(y)).log_softmax(-1).mean(1) * norm.weight

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    parameters = [*norm.parameters(), *projection.parameters()]
    plain = compiled(X)
    with batch_invariant("error"):
        want = f(X)
        got = compiled(X)
    assert_same_bits(got, want)
    for g, w in zip(*(torch.autograd.grad(y.sum(), parameters) for y in (got, want)), strict=True):
        assert_same_bits(g, w)
    assert_same_bits(compiled(X), plain, "compiled again outside")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", COVERED)
def test_a_compiled_function_that_enters_the_context(name: str) -> None:
    """What is compiled has the bits of what is not. A graph that breaks may run another function."""
    f, seed = COVERED[name], values("normal", (6, 40, 40), torch.float32, 3)

    def within(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        with batch_invariant("error"):
            return f(x, w, b)

    torch._dynamo.reset()  # one function is compiled for each name
    dtype = torch.bfloat16 if name == "grouped_mm" else torch.float32  # the compiler takes no other
    results: list[tuple[Tensor, ...]] = []
    for run in (torch.compile(within, backend="aot_eager", fullgraph=True), within):
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in (X, seed[0] / 8, seed[1, 0])]
        y = run(*leaves)
        grad = seed.flatten()[: y.numel()].view_as(y).to(dtype)
        grads = torch.autograd.grad(y, leaves, grad, allow_unused=True)
        results.append((y.detach(), *(torch.zeros(0) if g is None else g for g in grads)))
    for what, got, want in zip(("y", "dx", "dw", "db"), *results, strict=True):
        assert_same_bits(got, want, what)


def test_a_compiled_function_that_the_compiler_gives_up() -> None:
    """``gaussian_nll_loss`` breaks the graph within the context. Then all of it runs as if not compiled."""
    var = X.square() + 0.1

    def within(x: Tensor) -> tuple[Tensor, ...]:
        with batch_invariant("error"):
            return F.gaussian_nll_loss(x, X.flip(0), var), F.mse_loss(x, X.flip(0)), x.sum()

    torch._dynamo.reset()
    for got, want in zip(torch.compile(within, backend="eager")(X), within(X), strict=True):
        assert_same_bits(got, want)


def test_a_compiled_function_takes_what_pytorch_composes() -> None:
    def within(x: Tensor) -> tuple[Tensor, ...]:
        with batch_invariant("error"):
            return torch.split(x, 2)[0], torch.atleast_3d(x[0]), F.mse_loss(x, X.flip(0), reduction="none")

    torch._dynamo.reset()
    compiled = torch.compile(within, fullgraph=True, backend="eager")
    for got, want in zip(compiled(X), within(X), strict=True):
        assert_same_bits(got, want)


@pytest.mark.long
def test_sizes_that_are_constants_beside_ones_that_are_not() -> None:
    """With symbols for sizes, the compiler takes ``37 in (1, size)`` to be false."""
    f: dict[str, Callable[[Tensor], Tensor]] = {
        "sum_to_size": lambda x: x.sum_to_size(1, 40),
        "einsum": lambda x: torch.einsum("bij,bjk->bik", x, torch.ones(6, 40, 4)),
        "mask": lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(3, 3).tril().bool()),
        "masks": lambda x: F.scaled_dot_product_attention(
            *(x[None, :, None],) * 3, attn_mask=torch.ones(1, 6, 1, 3, 3).tril().bool()
        ),
    }

    def within(x: Tensor, name: str) -> Tensor:
        with batch_invariant("error"):
            return f[name](x)

    torch._dynamo.reset()
    compiled = torch.compile(within, fullgraph=True, dynamic=True, backend="aot_eager")
    for name in f:
        assert_same_bits(compiled(X, name), within(X, name), name)


def test_a_compiled_function_reports_what_pytorch_does_not_document() -> None:
    """The compiler asks no mode about such functions, ``torch._grouped_mm`` among them, of itself."""

    def within(x: Tensor) -> list[Tensor]:
        with batch_invariant("error"):
            return torch._foreach_norm([x], 3)

    with pytest.raises(Exception, match="UncoveredError"):
        torch.compile(within, fullgraph=True, backend="eager")(X)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_elementwise(dynamic: bool) -> None:
    x = torch.randn(40, 37) * 3

    def f(x: Tensor) -> Tensor:
        y = F.softplus(x) + torch.sigmoid(x) + F.mish(x) + 2.5**x / (x.abs() ** 0.3)
        return F.silu(torch.add(y, x, alpha=0.3), inplace=True)

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    with batch_invariant("error"):
        full = compiled(x)
        assert_same_bits(full, f(x))
        for start, stop in ((0, 1), (3, 5), (1, 40)):
            assert_same_bits(compiled(x[start:stop]), full[start:stop])
        with pytest.raises(Exception, match="UncoveredError"):
            torch.compile(lambda x: x.logcumsumexp(1), fullgraph=True, backend="aot_eager")(x)


FORWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "pow": lambda x: x.abs() ** 2.5,
    "float_power": lambda x: torch.float_power(x.abs(), 2.5),
    "expand": lambda x: x[:1] * X,
    "x[i]": lambda x: x[_I],
    "huber_loss": lambda x: F.huber_loss(x, X.flip(1)),
}
NO_FORWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "cumsum": lambda x: x.cumsum(0),
    "cumsum_": lambda x: (x * 1).cumsum_(0),
    "cumprod": lambda x: x.cumprod(0),
    "index_add": lambda x: x.index_add(0, _I, x[:4]),
    "index_put": lambda x: x.index_put((_I,), x[:4], accumulate=True),
    "scatter_add": lambda x: x.scatter_add(0, _I[:, None, None].expand(4, 3, 40), x),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2, mode="nearest"),
    "sum": lambda x: x.sum(0),
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", [*FORWARD, *NO_FORWARD])
def test_forward_mode_derivatives_are_right_or_refused(name: str, grad: bool, within: Within) -> None:
    f = (FORWARD | NO_FORWARD)[name]
    with forward_ad.dual_level(), torch.set_grad_enabled(grad):
        x = forward_ad.make_dual(X, X.flip(0))
        if name in NO_FORWARD:
            with within("error"):
                with pytest.raises(NotImplementedError, match="forward-mode derivatives are not implemented"):
                    f(x)
                f(X)  # which has none
            return
        want = forward_ad.unpack_dual(f(x)).tangent
        with within("error"):
            got = forward_ad.unpack_dual(f(x)).tangent
        assert got is not None
        torch.testing.assert_close(got, want)


def test_forward_mode_derivatives_are_refused_in_a_compiled_function() -> None:
    def inside(x: Tensor) -> Tensor:
        with batch_invariant("error"):
            return x.cumsum(0)

    torch._dynamo.reset()
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode derivatives"):
        torch.compile(inside, backend="aot_eager")(forward_ad.make_dual(X, X))


VMAPPED: dict[str, Callable[[Tensor], Tensor]] = {
    "cumsum": lambda x: x.cumsum(0),
    "cumprod": lambda x: x.cumprod(0),
    "var": lambda x: x.var(),
    "topk": lambda x: x.topk(2)[0],
    "logsumexp": lambda x: x.logsumexp(0),
    "avg_pool1d": lambda x: F.avg_pool1d(x, 2),
    "group_norm": lambda x: F.group_norm(x[None], 3),
}


@pytest.mark.parametrize("name", VMAPPED)
def test_vmap(name: str) -> None:
    f, leaf = VMAPPED[name], X.clone().requires_grad_()
    with batch_invariant("error"):
        got = torch.vmap(f)(leaf)
        for row, x in zip(got.detach(), X, strict=True):
            assert_same_bits(row, f(x))
        if name == "cumprod":
            with pytest.raises(NotImplementedError, match="gradients of cumprod"):
                got.sum().backward()
            return
        want = torch.stack([f(x) for x in leaf])
    for g, w in zip(*(torch.autograd.grad(y.square().sum(), leaf)[0] for y in (got, want)), strict=True):
        assert_same_bits(g, w)


def test_names_and_shapes_that_pytorch_takes(within: Within) -> None:
    with within("error"):
        assert_same_bits(X.sum(axis=1), reduce.sum(X, 1))
        assert_same_bits(torch.mean(X, axis=(0, 2), keepdims=True), reduce.mean(X, (0, 2), True))
        assert_same_bits(X.sum_to_size(3, 1), reduce.sum(X, (0, 2), True)[0])
        assert_same_bits(X.sum_to_size((6, 3, 40)), X)
        with pytest.raises(RuntimeError, match="size"):
            X.sum_to_size(2, 1)
        empty = torch.empty(2, 3, 0, 8, requires_grad=True)
        q = torch.ones(2, 3, 4, 8, requires_grad=True)
        out = F.scaled_dot_product_attention(q, empty, empty)
    assert_same_bits(out.detach(), torch.zeros(2, 3, 4, 8))
    dq, dk = torch.autograd.grad(out.sum(), (q, empty))
    assert_same_bits(dq, torch.zeros(2, 3, 4, 8))
    assert dk.shape == empty.shape
    mask = torch.ones(4, 4, dtype=torch.bool)
    with within("error"), pytest.raises(ValueError, match="is_causal"):
        F.scaled_dot_product_attention(q, q, q, attn_mask=mask, is_causal=True)
