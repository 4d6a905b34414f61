"""Batches of any size in one graph: ``torch.compile(dynamic=True)`` and ``torch.export`` under the mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samebits.mode import batch_invariant, rules
from samebits.testing import assert_same_bits, values

Call = Callable[[Tensor], Any]

# Parameters have names of what they are; x is the batch, [B, 6, 8].
W = values("normal", (5, 8), torch.float32, 1)
V8, V6 = (values("normal", (n,), torch.float32, 2) for n in (8, 6))
M88, M66 = (values("normal", (n, n), torch.float32, 3) for n in (8, 6))
TAPS = values("normal", (4, 6, 3), torch.float32, 4)
TRIANGLE = torch.eye(6) * 4 + M66.tril()
PLACES = torch.tensor([3, 0, 3, 5, 1])
LABELS = torch.tensor([1, 0, 7, 3, 2, 5])


def pictures(x: Tensor) -> Tensor:
    return x[:, :, None, :].repeat(1, 1, 4, 1)


def clips(x: Tensor) -> Tensor:
    return x[:, :, None, None, :].repeat(1, 1, 4, 4, 1)


def batches_of(x: Tensor) -> Tensor:
    return M88.expand(x.shape[0], 8, 8)


def offsets(x: Tensor) -> Tensor:
    return torch.tensor([2, 6], dtype=torch.int32)


CALLS: dict[str, Call] = {
    "mm": lambda x: torch.mm(x[:, 0], M88),
    "bmm": lambda x: torch.bmm(x, batches_of(x)),
    "matmul": lambda x: torch.matmul(x, M88),
    "__matmul__": lambda x: x @ M88,
    "__rmatmul__": lambda x: x.__rmatmul__(M66),
    "mv": lambda x: torch.mv(x[:, 0], V8),
    "dot": lambda x: torch.dot(x[:, 0, 0], x[:, 0, 1]),
    "linear": lambda x: F.linear(x, W, V8[:5]),
    "addmm": lambda x: torch.addmm(V8, x[:, 0], M88) + torch.addmm(V8, x[:, 0], M88, alpha=0.5),
    "addmm_": lambda x: (x[:, 0] * 1).addmm_(x[:, 1], M88),
    "baddbmm": lambda x: torch.baddbmm(V8, x, batches_of(x), beta=0.5),
    "baddbmm_": lambda x: (x * 1).baddbmm_(x, batches_of(x)),
    "einsum": lambda x: torch.einsum("btd,ed->bte", x, W) + torch.einsum("btd,bsd->bts", x, x[:, :5]),
    "softmax": lambda x: x.softmax(-1) + torch.softmax(x, 1),
    "log_softmax": lambda x: x.log_softmax(-1) + F.log_softmax(x, 1),
    "logsumexp": lambda x: torch.logsumexp(x, -1) + x.logsumexp((1, 2), True)[:, 0],
    "cross_entropy": lambda x: F.cross_entropy(x[:, 0], x[:, 0].detach().argmax(-1), reduction="none"),
    "binary_cross_entropy_with_logits": lambda x: F.binary_cross_entropy_with_logits(
        x, x.detach().sigmoid(), reduction="none"
    ),
    "layer_norm": lambda x: F.layer_norm(x, (8,), V8, V8) + F.layer_norm(x, (6, 8)),
    "rms_norm": lambda x: F.rms_norm(x, (8,), V8),
    "sum": lambda x: x.sum(-1) + x.sum((1, 2))[:, None],
    "mean": lambda x: x.mean(-1) + x.mean(1)[:, :6],
    "rsqrt": torch.rsqrt,
    "rsqrt_": lambda x: (x * 1).rsqrt_(),
    "gelu": lambda x: F.gelu(x) + F.gelu(x, approximate="tanh"),
    "nansum": lambda x: x.nansum(-1),
    "nanmean": lambda x: x.nanmean(-1),
    "sum_to_size": lambda x: x.sum_to_size(x.shape[0], 6, 1),
    "var": lambda x: x.var(-1) + x.var((1, 2), keepdim=True)[:, 0],
    "std": lambda x: x.std(-1),
    "var_mean": lambda x: torch.var_mean(x, -1)[0],
    "std_mean": lambda x: torch.std_mean(x, -1)[1],
    "norm": lambda x: x.norm(dim=-1) + torch.norm(x, 1, -1),
    "linalg_norm": lambda x: torch.linalg.norm(x, dim=-1),
    "linalg_vector_norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "_foreach_norm": lambda x: torch._foreach_norm([x[0], x[1]])[0],
    "embedding": lambda x: F.embedding((x.detach() > 0).long(), M88),
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(
        *(x[:, None],) * 3, is_causal=True
    ),
    "expand": lambda x: x[:, :1].expand(-1, 6, 8) * x,
    "expand_as": lambda x: x[:, :1].expand_as(x) * x,
    "conv1d": lambda x: F.conv1d(x, TAPS, padding=1),
    "conv2d": lambda x: F.conv2d(pictures(x), TAPS[:, :, None]),
    "conv3d": lambda x: F.conv3d(clips(x), TAPS[:, :, None, None]),
    "avg_pool1d": lambda x: F.avg_pool1d(x, 2),
    "avg_pool2d": lambda x: F.avg_pool2d(pictures(x), 3, 2, 1),
    "avg_pool3d": lambda x: F.avg_pool3d(clips(x), 2),
    "adaptive_avg_pool1d": lambda x: F.adaptive_avg_pool1d(x, 3),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(pictures(x), (2, 3)),
    "adaptive_avg_pool3d": lambda x: F.adaptive_avg_pool3d(clips(x), (2, 3, 3)),
    "upsample_linear1d": lambda x: F.interpolate(x, scale_factor=1.5, mode="linear"),
    "upsample_bilinear2d": lambda x: F.interpolate(pictures(x), (3, 9), mode="bilinear"),
    "upsample_trilinear3d": lambda x: F.interpolate(clips(x), (3, 9, 2), mode="trilinear"),
    "upsample_bicubic2d": lambda x: F.interpolate(pictures(x), (3, 9), mode="bicubic"),
    "upsample_nearest1d": lambda x: F.interpolate(x, scale_factor=1.5),
    "upsample_nearest2d": lambda x: F.interpolate(pictures(x), (3, 9)),
    "upsample_nearest3d": lambda x: F.interpolate(clips(x), (3, 9, 2)),
    "_upsample_nearest_exact1d": lambda x: F.interpolate(x, 5, mode="nearest-exact"),
    "_upsample_nearest_exact2d": lambda x: F.interpolate(pictures(x), (3, 9), mode="nearest-exact"),
    "_upsample_nearest_exact3d": lambda x: F.interpolate(clips(x), (3, 9, 2), mode="nearest-exact"),
    "fold": lambda x: F.fold(x[..., :4], (4, 6), (2, 3), stride=(2, 3)),
    "group_norm": lambda x: F.group_norm(x, 3, V6, V6) + F.group_norm(pictures(x), 2)[:, :, 0],
    "instance_norm": lambda x: F.instance_norm(x, weight=V6),
    "batch_norm": lambda x: F.batch_norm(x, V6, V6.abs(), V6, V6),
    "linalg_solve_triangular": lambda x: torch.linalg.solve_triangular(TRIANGLE, x, upper=False),
    "sort": lambda x: x.sort(-1).values,
    "argsort": lambda x: x.argsort(-1),
    "msort": lambda x: torch.msort(x[0]),
    "topk": lambda x: x.topk(3).values,
    "__getitem__": lambda x: x[:, PLACES],
    "index_select": lambda x: x.index_select(1, PLACES),
    "gather": lambda x: x.gather(2, (x.detach() > 0).long()),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "repeat": lambda x: x.repeat(1, 2, 1),
    "index_add": lambda x: x.index_add(1, PLACES, x[:, :5], alpha=0.5),
    "index_add_": lambda x: (x * 1).index_add_(1, PLACES, x[:, :5]),
    "scatter_add": lambda x: x.scatter_add(2, (x.detach() > 0).long(), x),
    "scatter_add_": lambda x: (x * 1).scatter_add_(2, (x.detach() > 0).long(), x),
    "scatter_reduce": lambda x: x.scatter_reduce(2, (x.detach() > 0).long(), x, "mean"),
    "scatter_reduce_": lambda x: (x * 1).scatter_reduce_(2, (x.detach() > 0).long(), x, "sum"),
    "index_put": lambda x: x.index_put((torch.arange(1), PLACES[:1]), x[:1, 0], True),
    "index_put_": lambda x: (x * 1).index_put_((torch.arange(1), PLACES[:1]), x[:1, 0], True),
    "cumsum": lambda x: x.cumsum(-1),
    "cumsum_": lambda x: (x * 1).cumsum_(1),
    "cumprod": lambda x: x.detach().cumprod(-1),
    "cumprod_": lambda x: (x.detach() * 1).cumprod_(1),
}
NOT_HERE = {
    *("_grouped_mm", "_scaled_mm_v2", "_scaled_grouped_mm_v2"),  # of groups, whose sizes are no batch's
    "gelu_",  # an operator without a public function
}


def name_of(function: Any) -> str:
    return function if isinstance(function, str) else function.__name__


def test_every_function_with_a_replacement_is_called() -> None:
    replaced = {name_of(f) for row in rules.REPLACED for f in row.functions}
    assert replaced <= CALLS.keys() | NOT_HERE | {"log_softmax", "softmax"}, replaced - CALLS.keys()


def elementwise() -> dict[str, Call]:
    """Those of one tensor, of two, of a tensor and a number, or of three."""
    found: dict[str, Call] = {}
    names = (*rules.WHOLE_VECTORS, *rules.COMPLEX_WHOLE_VECTORS, "add", "sub", "mul", "div")
    for name in (n for n in names if not n.startswith("__")):
        f = next(getattr(w, name) for w in rules._WHERE if hasattr(w, name))
        calls: dict[str, Call] = {
            name: lambda x, f=f: f(x),  # type: ignore[misc]
            f"{name} of two": lambda x, f=f: f(x, x + 0.25),  # type: ignore[misc]
            f"{name} of a number": lambda x, f=f: f(x, 0.75),  # type: ignore[misc]
        }
        if name in ("addcmul", "addcdiv", "lerp"):
            calls = {name: lambda x, f=f: f(x, x + 0.25, x + 0.5)}  # type: ignore[misc]
        for of, call in calls.items():
            leaf = torch.full((2, 6, 8), 0.4, requires_grad=True)
            try:
                out = call(leaf)
            except (TypeError, RuntimeError):
                continue
            try:
                if name == "sgn":
                    raise RuntimeError("PyTorch's own gradient of it fixes all sizes")
                torch.autograd.grad(out, leaf, torch.ones_like(out))
                found[of] = call
            except RuntimeError:  # PyTorch has none
                found[of] = lambda x, call=call: call(x.detach())  # type: ignore[misc]
    found["gelu, tanh"] = lambda x: F.gelu(x, approximate="tanh")
    found["pow of a number"] = lambda x: 2.5**x + x**-0.5
    found["in place"] = lambda x: F.silu(x * 1, inplace=True) + (x * 1).exp_()
    found["broadcast"] = lambda x: torch.atan2(x, V8) + torch.hypot(x, x[:, :1])
    found["add, alpha"] = lambda x: torch.add(x, x.exp(), alpha=0.3)
    found["huber_loss"] = lambda x: F.huber_loss(x, x.detach() * 2, reduction="none", delta=0.1)
    return found


ELEMENTWISE = elementwise()


def groups() -> dict[str, dict[str, Call]]:
    """Functions that are traced together."""
    found: dict[str, dict[str, Call]] = {}
    for row in rules.REPLACED:
        names = [n for n in dict.fromkeys(map(name_of, row.functions)) if n in CALLS]
        if names:
            found[names[0]] = {n: CALLS[n] for n in names}
    names = list(ELEMENTWISE)
    for i in range(0, len(names), 24):
        found[f"elementwise {i}"] = {n: ELEMENTWISE[n] for n in names[i : i + 24]}
    return found


GROUPS = groups()
FULL = torch.rand(40, 6, 8, generator=torch.Generator().manual_seed(0)) * 0.9 + 0.05
BATCHES = (11, 13, 40)  # which are no other sizes


def flat(results: dict[str, Any]) -> dict[str, Tensor]:
    return {n: torch.view_as_real(y) if y.is_complex() else y for n, y in results.items()}


def run(f: Callable[[Tensor], dict[str, Any]], x: Tensor) -> dict[str, Tensor]:
    """Results, and their gradient."""
    leaf = x.detach().requires_grad_()
    found = flat(f(leaf))
    wanted = [y for y in found.values() if y.requires_grad]
    gradient = torch.autograd.grad(wanted, leaf, [torch.ones_like(y) for y in wanted])[0] if wanted else x
    return {n: y.detach() for n, y in found.items()} | {"gradient": gradient}


def assert_equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    for name, y in want.items():
        if y.is_floating_point() and y.dtype != torch.float64:
            assert_same_bits(got[name], y, name)
        else:
            assert torch.equal(got[name], y), name


@pytest.mark.parametrize("name", GROUPS)
def test_one_graph_takes_all_batches(name: str) -> None:
    calls = GROUPS[name]
    torch._dynamo.reset()

    def f(x: Tensor) -> dict[str, Any]:
        return {n: call(x) for n, call in calls.items()}

    compiled = torch.compile(f, backend="aot_eager", dynamic=True, fullgraph=True)
    with batch_invariant("error"), torch._dynamo.config.patch(error_on_recompile=True):
        for batch in BATCHES:
            x = FULL[:batch]
            torch._dynamo.mark_dynamic(x, 0)
            want = run(f, x)
            assert_equal(run(compiled, x), want)


class Model(nn.Module):
    def __init__(self, calls: dict[str, Call]) -> None:
        super().__init__()
        self.calls = calls

    def forward(self, x: Tensor) -> dict[str, Any]:
        with batch_invariant("error"):
            return {n: call(x) for n, call in self.calls.items()}


@pytest.mark.parametrize("name", GROUPS)
def test_an_exported_graph_takes_all_batches(name: str) -> None:
    model = Model(GROUPS[name])
    batch = torch.export.Dim("batch", min=2, max=64)
    with torch.no_grad():
        exported = torch.export.export(model, (FULL[: BATCHES[0]],), dynamic_shapes=({0: batch},)).module()
        for n in BATCHES[1:]:
            assert_equal(flat(exported(FULL[:n])), flat(model(FULL[:n])))


def test_a_strict_export_is_refused() -> None:
    """It does not show Python's operators to the context, so they would be PyTorch's, silently."""
    model = Model({"@": CALLS["__matmul__"]})
    with pytest.raises(Exception, match=r"torch.export: expected strict=False"):
        torch.export.export(model, (FULL,), strict=True)
