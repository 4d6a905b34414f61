"""Second derivatives under the mode: PyTorch's within rounding, and of each row by itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import samebits
from samebits.testing import assert_same_bits, values
from tests.mode.conftest import Within, within  # noqa: F401 - a fixture
from tests.support.devices import DEVICES

on_devices = pytest.mark.parametrize("device", DEVICES)
LABELS = torch.tensor([1, 4, 0, -100, 5])

# Of x[5, 4, 6], of weights [4] and of [6].
CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "softmax": lambda x, a, b: x.softmax(-1) * b,
    "softmax of columns": lambda x, a, b: x.softmax(1) * b,
    "softmax of what is masked": lambda x, a, b: x.masked_fill(x > 0.5, -torch.inf).softmax(-1),
    "log_softmax": lambda x, a, b: x.log_softmax(-1) * b,
    "logsumexp": lambda x, a, b: x.logsumexp(-1) * a,
    "layer_norm": lambda x, a, b: F.layer_norm(x, (6,), b, b * 2),
    "layer_norm of several": lambda x, a, b: F.layer_norm(x, (4, 6)),
    "layer_norm, no bias": lambda x, a, b: F.layer_norm(x, (6,), b),
    "rms_norm": lambda x, a, b: F.rms_norm(x, (6,), b),
    "group_norm": lambda x, a, b: F.group_norm(x, 2, a, a * 2),
    "instance_norm": lambda x, a, b: F.instance_norm(x, weight=a),
    "batch_norm": lambda x, a, b: F.batch_norm(x, a.detach(), a.detach().abs(), a, a),
    "sum and mean": lambda x, a, b: x.square().sum(-1) * a + x.square().mean((1, 2), True)[..., 0],
    "var": lambda x, a, b: x.var(-1) * a,
    "std": lambda x, a, b: x.std(-1) * a,
    "std of all that a row has": lambda x, a, b: x.std((1, 2), correction=0),
    "norm": lambda x, a, b: x.norm(dim=-1) * a,
    "norm of order 1": lambda x, a, b: x.norm(1, -1) * a,
    "linear": lambda x, a, b: F.linear(x.square(), b[None]).square(),
    "conv1d": lambda x, a, b: F.conv1d(x, b[:3].expand(4, 4, 3) * a[:, None, None], a, padding=1),
    "conv1d, strides": lambda x, a, b: F.conv1d(x, b.view(1, 2, 3).expand(4, 2, 3), a, stride=3, groups=2),
    "conv1d, depthwise": lambda x, a, b: F.conv1d(x, b[:3].expand(4, 1, 3) * a[:, None, None], a, groups=4),
    "conv2d": lambda x, a, b: F.conv2d(x[:, None], b.view(1, 1, 2, 3), b[:1], dilation=2),
    "avg_pool1d": lambda x, a, b: F.avg_pool1d(x.square(), 3, 2, 1),
    "adaptive_avg_pool1d": lambda x, a, b: F.adaptive_avg_pool1d(x.square(), 4),
    "bilinear": lambda x, a, b: F.interpolate(x[:, None].square(), (3, 9), mode="bilinear"),
    "nearest": lambda x, a, b: F.interpolate(x.square(), 9),
    "silu": lambda x, a, b: F.silu(x) * b,
    "mish": lambda x, a, b: F.mish(x) * b,
    "gelu": lambda x, a, b: F.gelu(x) * b,
    "rsqrt": lambda x, a, b: (x.square() + 0.3).rsqrt() * b,
}  # fmt: skip
OF_ROWS = [n for n in CALLS if n != "linear"]
OTHER_BITS = ("mish",)  # PyTorch composes its gradient of others where that is to be differentiated


def operands(dtype: torch.dtype, device: str, rows: slice = slice(None)) -> list[Tensor]:
    x, a, b = (values("normal", shape, dtype, 3).to(device) for shape in ((5, 4, 6), (4,), (6,)))
    return [t.detach().requires_grad_() for t in (x[rows], a, b)]


def cotangent(like: Tensor, seed: int, rows: slice = slice(None)) -> Tensor:
    whole = values("normal", (5, *like.shape[1:]), torch.float32, seed)
    return whole[rows].to(like.device, like.dtype)


def derivatives(
    call: Callable[[Tensor, Tensor, Tensor], Tensor], leaves: list[Tensor], rows: slice = slice(None)
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients, and gradients of those of x and the weights, for the leaves and for the seed."""
    y = call(*leaves)
    seed = cotangent(y, 1, rows).requires_grad_()
    used = [
        t
        for t in leaves
        if torch.autograd.grad(y.sum(), t, retain_graph=True, allow_unused=True)[0] is not None
    ]
    firsts = torch.autograd.grad(y, used, seed, create_graph=True)
    of_x = [cotangent(firsts[0], 2, rows)]
    more = [values("normal", tuple(g.shape), torch.float32, 4).to(g) for g in firsts[1:]]
    known = [(g, v) for g, v in zip(firsts, [*of_x, *more], strict=True) if g.requires_grad]
    seconds = torch.autograd.grad(
        [g for g, _ in known],
        [*leaves, seed],
        [v for _, v in known],
        materialize_grads=True,
        allow_unused=True,
    )
    return [g.detach() for g in firsts], list(seconds)


@pytest.mark.parametrize("name", CALLS)
@on_devices
def test_as_pytorch_within_rounding(device: str, name: str, within: Within) -> None:  # noqa: F811
    wide = [t.detach().double().requires_grad_() for t in operands(torch.float32, device)]
    _, want = derivatives(CALLS[name], wide)
    with within("error"):
        _, got = derivatives(CALLS[name], operands(torch.float32, device))
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs.float(), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OF_ROWS)
@on_devices
def test_rows_alone_and_in_batches(
    device: str,
    name: str,
    dtype: torch.dtype,
    within: Within,  # noqa: F811
) -> None:
    def run(rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        with within("error"):
            (first, *_), (of_x, *_, of_seed) = derivatives(CALLS[name], operands(dtype, device, rows), rows)
        return first, of_x, of_seed

    full = run(slice(None))
    for rows in (slice(0, 1), slice(4, 5), slice(1, 4)):
        for got, want in zip(run(rows), full, strict=True):
            assert_same_bits(got, want[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [n for n in CALLS if n not in OTHER_BITS])
@on_devices
def test_gradients_have_the_same_bits_with_a_graph(device: str, name: str, dtype: torch.dtype) -> None:
    with samebits.batch_invariant("error"):
        firsts, _ = derivatives(CALLS[name], operands(dtype, device))
        leaves = operands(dtype, device)
        y = CALLS[name](*leaves)
        plain = torch.autograd.grad(y, leaves, cotangent(y, 1), allow_unused=True)
    for got, want in zip(firsts, [g for g in plain if g is not None], strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@on_devices
def test_cross_entropy(device: str, reduction: str, within: Within) -> None:  # noqa: F811
    target = LABELS.to(device)

    def run(x: Tensor) -> list[Tensor]:
        loss = F.cross_entropy(x, target, reduction=reduction)
        seed = (
            torch.linspace(0.5, 1.5, loss.numel(), device=device).reshape(loss.shape).to(x).requires_grad_()
        )
        (first,) = torch.autograd.grad(loss, x, seed, create_graph=True)
        return list(torch.autograd.grad(first, (x, seed), cotangent(first, 2)))

    x = values("normal", (5, 6), torch.float32, 0).to(device).requires_grad_()
    want = run(x.detach().double().requires_grad_())
    with within("error"):
        got = run(x)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs.float(), rtol=1e-5, atol=1e-6)


@on_devices
def test_losses_of_rows_alone_and_in_batches(device: str, within: Within) -> None:  # noqa: F811
    full = values("normal", (5, 300), torch.float32, 0).to(device)

    def run(rows: slice) -> Tensor:
        x = full[rows].detach().requires_grad_()
        with within("error"):
            loss = F.cross_entropy(x, LABELS[rows].to(device), reduction="none").sum()
            (first,) = torch.autograd.grad(loss, x, create_graph=True)
            first.square().sum().backward()
        assert x.grad is not None
        return x.grad

    want = run(slice(None))
    for rows in (slice(0, 1), slice(2, 5)):
        assert_same_bits(run(rows), want[rows])


def test_weights_of_an_embedding(within: Within) -> None:  # noqa: F811
    ids, w = torch.tensor([[1, 3, 1], [0, 3, 2]]), values("normal", (4, 5), torch.float32, 0)

    def run(weight: Tensor) -> Tensor:
        rows = F.embedding(ids, weight, padding_idx=2)
        (first,) = torch.autograd.grad(rows.pow(3).sum(), weight, create_graph=True)
        return torch.autograd.grad(first.square().sum(), weight)[0]

    want = run(w.double().requires_grad_())
    with within("error"):
        got = run(w.requires_grad_())
    torch.testing.assert_close(got, want.float())


REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "logp": lambda x: samebits.logp(x[:, 0], LABELS.clamp(min=0)),
    "linear_logp": lambda x: samebits.linear_logp(x[:, 0], x[:, 1], LABELS.clamp(min=0, max=4)),
    "solve_triangular": lambda x: torch.linalg.solve_triangular(torch.eye(4), x, upper=False),
    "cross_entropy of 16-bit logits": lambda x: F.cross_entropy(x[:, 0].bfloat16(), LABELS),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_left_is_refused(name: str) -> None:
    (x, *_) = operands(torch.float32, "cpu")
    with samebits.batch_invariant("error"):
        y = REFUSED[name](x)
        with pytest.raises(NotImplementedError, match=f"samebits.{name}: second derivatives"):
            torch.autograd.grad(y.sum(), x, create_graph=True)


@pytest.mark.parametrize("name", ["softmax", "logsumexp", "layer_norm", "var", "norm"])
def test_third_derivatives(name: str) -> None:
    leaves = operands(torch.float32, "cpu")
    with samebits.batch_invariant("error"):
        y = CALLS[name](*leaves)
        (first,) = torch.autograd.grad(y.square().sum(), leaves[:1], create_graph=True)
        with pytest.raises(NotImplementedError, match="third derivatives"):
            torch.autograd.grad(first.square().sum(), leaves[:1], create_graph=True)
