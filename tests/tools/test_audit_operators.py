"""The audit of a function names exactly the operators whose rows depend on the batch."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import samebits
from samebits.mode import overrides
from samebits.tools.audit import AuditError, OperatorReport
from samebits.tools.audit.operator_report import show

_VARIANT: set[str] = set()
"""Which of the operators below take another kernel for a batch of one row."""


def _finish(name: str, rows: int, exact: Tensor) -> Tensor:
    y = exact.float()
    return torch.nextafter(y, torch.tensor(torch.inf)) if name in _VARIANT and rows == 1 else y


@torch.library.custom_op("samebits_test::linear", mutates_args=())
def linear(x: Tensor, weight: Tensor) -> Tensor:
    return _finish("linear", len(x), x.double() @ weight.double().T)


@torch.library.custom_op("samebits_test::softmax", mutates_args=())
def softmax(x: Tensor) -> Tensor:
    return _finish("softmax", len(x), x.double().softmax(-1))


@torch.library.custom_op("samebits_test::mean", mutates_args=())
def mean(x: Tensor) -> Tensor:
    return _finish("mean", len(x), x.double().mean(1))


@torch.library.custom_op("samebits_test::attention", mutates_args=())
def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q.double() @ k.double().mT
    return _finish("attention", len(q), scores.softmax(-1) @ v.double())


@torch.library.custom_op("samebits_test::linear_backward", mutates_args=())
def linear_backward(grad: Tensor, weight: Tensor) -> Tensor:
    return _finish("linear_backward", len(grad), grad.double() @ weight.double())


linear.register_autograd(
    lambda ctx, grad: (linear_backward(grad, ctx.saved_tensors[0]), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
)


class Product(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, size))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return attention(x, x, x)


class Pool(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return softmax(mean(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.product, self.attention, self.pool = Product(8), Attention(), Pool()

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.attention(torch.relu(self.product(x))))


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.ReLU(), Block())


@pytest.fixture
def variant(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    monkeypatch.setattr(f"{__name__}._VARIANT", {request.param})
    return str(request.param)


MODULES = {"linear": "1.product", "attention": "1.attention", "mean": "1.pool", "softmax": "1.pool"}


@pytest.mark.parametrize("variant", MODULES, indirect=True)
def test_the_operator_that_depends_on_the_batch_is_named(model: nn.Module, variant: str) -> None:
    report = samebits.audit(model, torch.randn(6, 5, 8))
    (culprit,) = report.culprits
    assert report.first == culprit
    assert (culprit.phase, culprit.operator) == ("forward", f"samebits_test.{variant}")
    assert culprit.module == MODULES[variant]
    assert (culprit.own.rows, culprit.own.ulp, culprit.own.first) == (len(report.rows), 1, "row 0 alone")
    assert culprit.inputs[0][0] == 6
    grown = [o for o in report.operators if o.drift.rows]
    assert grown[0] == culprit
    assert grown[-1].operator == "output"
    assert report.not_compared == ()
    assert f"first samebits_test.{variant} in {MODULES[variant]}" in str(report)


def test_a_model_whose_rows_are_their_own_passes(model: nn.Module) -> None:
    report = samebits.audit(model, torch.randn(6, 5, 8))
    assert not report.drifts
    assert report.first is None
    assert [o.operator for o in report.operators if o.module.startswith("1")] == [
        "samebits_test.linear",
        "aten.relu",
        "samebits_test.attention",
        "samebits_test.mean",
        "samebits_test.softmax",
    ]
    assert {o.batches for o in report.operators} == {len(report.batches)}


@pytest.mark.parametrize("variant", ["linear_backward"], indirect=True)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_backward_operators_belong_to_the_module_of_their_forward(variant: str, checkpointed: bool) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.ReLU(), Product(8), nn.ReLU())
    parameters = copy.deepcopy(layers.state_dict())
    x = torch.randn(5, 3, 8, requires_grad=True)

    def f(x: Tensor) -> Tensor:
        y: Tensor = checkpoint(layers, x, use_reentrant=False) if checkpointed else layers(x)
        return y

    report = samebits.audit(f, x, backward=True)
    (culprit,) = report.culprits
    assert (culprit.phase, culprit.operator) == ("backward", f"samebits_test.{variant}")
    assert culprit.module == "layers.1"
    assert all(p.grad is None for p in (x, *layers.parameters()))
    torch.testing.assert_close(layers.state_dict(), parameters, rtol=0, atol=0)


@pytest.mark.parametrize("variant", ["", "linear"], indirect=True)
def test_rows_are_found_in_merged_and_moved_dimensions(variant: str) -> None:
    weight = torch.randn(4, 4)

    def f(x: Tensor) -> Tensor:  # [B, T, 8]: B outer and inner, at the front and at the back
        y = -x.flatten(0, 1)
        y = 2 * y.view(x.shape).transpose(0, 1).reshape(-1, 8)
        y = y.view(-1, len(x), 2, 4).permute(2, 3, 0, 1).flatten(2).abs().view(2, 4, -1, len(x))
        y = y.permute(3, 2, 0, 1).contiguous().relu_()  # [B, T, 2, 4]
        return linear(y, weight).flatten(1)

    report = samebits.audit(f, torch.randn(4, 3, 8))
    assert [o.operator for o in report.culprits] == ["samebits_test.linear"] * (variant == "linear")
    assert report.not_compared == ()
    assert [o.operator for o in report.operators] == [
        "aten.neg",
        "aten.mul.Tensor",
        "aten.abs",
        "aten.relu_",
        "samebits_test.linear",
        "output",
    ]


def test_a_sum_over_the_batch_is_not_compared_and_what_it_changes_is_seen() -> None:
    report = samebits.audit(lambda x: x - x.mean(0), torch.randn(5, 8))
    assert report.culprits == ()
    assert report.drifts
    (mean,) = report.not_compared
    assert (mean.operator, mean.first) == ("aten.mean.dim", "row 0 alone")
    assert "its result has no rows and changes with them" in mean.reason
    assert "no operator of 3 calls changed with equal arguments, but results did" in str(report)


def test_a_row_operator_over_the_batch_depends_on_it() -> None:
    report = samebits.audit(lambda x: x.softmax(0) * 2, torch.randn(5, 8))
    assert [o.operator for o in report.culprits] == ["aten._softmax"]


def test_results_whose_shape_depends_on_the_data_are_listed() -> None:
    report = samebits.audit(lambda x: (-x[x > 0], x * 2), torch.randn(5, 8))
    listed = {n.operator for n in report.not_compared}
    assert {"aten.index.Tensor", "aten.neg", "output"} <= listed
    assert {o.operator for o in report.operators} >= {"aten.gt.Scalar", "aten.mul.Tensor", "output"}
    assert not report.drifts


def test_places_in_the_batch_are_no_rows() -> None:
    def f(x: Tensor) -> Tensor:
        places = torch.arange(len(x)) + 0
        return x[places.flip(0).flip(0)] + 1

    report = samebits.audit(f, torch.randn(5, 8))
    assert not report.culprits
    assert {n.operator for n in report.not_compared} == {"aten.arange", "aten.add.Tensor", "aten.flip"}


@pytest.mark.parametrize("in_place", [False, True])
def test_operators_that_only_some_batches_run_cast_doubt_on_the_next(in_place: bool) -> None:
    def f(x: Tensor) -> Tensor:
        y = x.abs() * 3 if len(x) == 1 else x.neg()
        return y.clone().sign_() if in_place else y.clone().sign()

    report = samebits.audit(f, torch.randn(5, 8))
    sign = "aten.sign_" if in_place else "aten.sign"
    assert [(o.operator, o.after) for o in report.culprits] == [(sign, "aten.mul.Tensor")]
    assert {n.operator for n in report.not_compared} == {"aten.abs", "aten.mul.Tensor"}
    assert f"{sign} (or aten.mul.Tensor, before it)" in str(report)


def test_an_operator_that_does_not_repeat_is_noted() -> None:
    calls = []

    def f(x: Tensor) -> Tensor:
        calls.append(1)
        return x * float(len(calls))

    report = samebits.audit(f, torch.randn(4, 3))
    assert report.notes == ("not even the same batch twice gives the same bits: aten.mul.Tensor",)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.int64]
)
def test_all_dtypes_are_compared(dtype: torch.dtype) -> None:
    x = (8 * torch.randn(5, 8)).to(dtype)
    assert not samebits.audit(lambda x: x * 3, x).drifts
    report = samebits.audit(lambda x: x * 3 + int(len(x) == 1), x)
    assert [o.operator for o in report.culprits] == ["aten.add.Tensor"]
    assert (report.culprits[0].own.ulp > 0) == dtype.is_floating_point
    assert report.culprits[0].own.of_row > 0


def test_pytorchs_own_product_and_samebits() -> None:
    """On CPUs seen so far PyTorch takes another kernel for one row; samebits never does."""
    torch.manual_seed(0)
    layer, x = nn.Linear(384, 384), torch.randn(5, 1, 384)
    before = samebits.audit(layer, x, backward=True)
    assert before.first is None or before.first.operator in ("aten.addmm", "aten.mm")
    samebits.convert(layer)
    after = samebits.audit(layer, x.requires_grad_(), backward=True)
    assert not after.drifts
    assert {"samebits.linear", "samebits.matmul"} <= {o.operator for o in after.operators}
    assert {n.operator for n in after.not_compared} == {"samebits.addbmm"}


@pytest.mark.parametrize("variant", ["", "linear", "linear_backward"], indirect=True)
@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_under_the_mode_only_what_it_does_not_cover_is_named(kind: str, variant: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=32,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=12,
    )
    body = getattr(transformers, f"{kind}Model")(config).eval()
    head = Product(24)

    def model(ids: Tensor) -> Tensor:
        y: Tensor = head(body(input_ids=ids, use_cache=False).last_hidden_state)
        return y

    with samebits.batch_invariant(on_uncovered="error"):  # of the audit's own computations, too
        report = samebits.audit(model, torch.randint(32, (5, 7)), backward=True, max_rows=2)
    assert [(o.operator, o.module) for o in report.culprits] == [
        (f"samebits_test.{name}", "head") for name in [variant] if name
    ]
    assert report.drifts == bool(variant)
    compared = {(o.phase, o.operator) for o in report.operators}
    assert compared >= {
        (phase, f"torch.{name}")
        for phase in ("forward", "backward")
        for name in ("nn.functional.linear", "nn.functional.silu", "rsqrt", "mean")
    }
    assert {o for _, o in compared if o.startswith("samebits")} <= {
        "samebits.attention",  # that the mode gives models of transformers
        "samebits.attention_backward",
        "samebits_test.linear_backward",
        "samebits_test.linear",
    }


@pytest.mark.parametrize("variant", ["", "linear", "linear_backward"], indirect=True)
def test_a_covered_call_that_depends_on_the_batch_is_named_as_one(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(16, 16)

    def softmax(x: Tensor, dim: int) -> Tensor:  # of 15 features as of 16
        return linear(F.pad(x, (0, 1)), weight)[:, 1:] * 2

    monkeypatch.setattr(overrides, "softmax", softmax)
    x = torch.randn(5, 15, requires_grad=True)
    with samebits.batch_invariant():
        report = samebits.audit(lambda x: torch.softmax(-x, 1).relu(), x, backward=True)
    phase = "backward" if variant == "linear_backward" else "forward"
    assert [(o.phase, o.operator) for o in report.culprits] == [(phase, "torch.softmax")] * bool(variant)
    assert report.not_compared == ()
    assert [o.operator for o in report.operators if o.phase == "forward"] == [
        "torch.neg",
        "torch.softmax",
        "aten.relu",
        "output",
    ]


def test_a_sum_over_the_batch_that_is_not_covered_is_named_under_the_mode() -> None:
    with samebits.batch_invariant(on_uncovered="ignore"):
        report = samebits.audit(lambda x: torch.exp(torch.logcumsumexp(x.softmax(-1), 0)), torch.randn(5, 8))
    assert [o.operator for o in report.culprits] == ["aten.logcumsumexp"]


def test_under_the_mode_views_and_writes_are_followed() -> None:
    def f(x: Tensor) -> Tensor:
        y = x.sum(-1, keepdim=True).expand(x.shape) * x
        y.mul_(x).sigmoid_()
        return F.layer_norm(y, (8,)) + y.sum()

    with samebits.batch_invariant():
        report = samebits.audit(f, torch.randn(5, 8, requires_grad=True), backward=True)
    assert report.culprits == ()
    (total,) = [n for n in report.not_compared if n.phase == "forward"]
    assert (total.operator, total.first) == ("torch.sum", "row 0 alone")
    assert "its result has no rows and changes with them" in total.reason


def test_nothing_is_left_behind(model: nn.Module) -> None:
    state = torch.get_rng_state()
    enabled = torch.is_grad_enabled()
    samebits.audit(model, torch.randn(3, 5, 8))
    torch.set_rng_state(state)
    hooks = nn.modules.module
    assert not hooks._global_forward_hooks
    assert not hooks._global_forward_pre_hooks
    assert torch.is_grad_enabled() == enabled
    samebits.audit(lambda x: x * torch.rand(3, 1), torch.randn(7, 3, 8))
    assert torch.equal(torch.get_rng_state(), state) is False  # randn above drew from it
    torch.set_rng_state(state)
    x = torch.randn(7, 3, 8)
    after = torch.get_rng_state()
    samebits.audit(lambda x: x * torch.rand(3, 1), x)
    assert torch.equal(torch.get_rng_state(), after)


def test_inputs_of_every_form() -> None:
    ids, mask = torch.randint(9, (4, 3)), torch.ones(4, 3)
    table = torch.randn(9, 2)

    def f(ids: Tensor, *, mask: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        return {"y": F.embedding(ids, table) * mask[..., None] * scale}

    for report in (
        samebits.audit(f, {"ids": ids, "mask": mask, "scale": 2.0}),
        samebits.audit(lambda i, m: f(i, mask=m), (ids, mask)),
    ):
        assert (report.batch, report.rows, report.drifts) == (4, (0, 1, 2, 3), False)
    assert samebits.audit(torch.sin, torch.randn(9, 2), max_rows=2).rows == (0, 4)


def test_report_survives_json_and_is_drawn(model: nn.Module, tmp_path: Path) -> None:
    report = samebits.audit(
        lambda x: model(x) / (len(x) - 1), torch.randn(6, 5, 8), name="mine", notes=["a note"]
    )
    assert OperatorReport.from_json(report.to_json()) == report
    assert json.loads(report.to_json())["schema"] == 1
    assert report.culprits[0].own.of_row == float("inf")
    pytest.importorskip("matplotlib")
    report.save_plot(tmp_path / "growth.svg")
    assert "operators, in order of execution" in (tmp_path / "growth.svg").read_text()
    assert show(report, 80) is not None
    with pytest.raises(ValueError, match='"schema": 1'):
        OperatorReport.from_json('{"schema": 1}')


def fails_alone(x: Tensor) -> Tensor:
    if len(x) == 1:
        raise RuntimeError("two\nlines")
    return x


@pytest.mark.parametrize(
    ("fn", "inputs", "options", "message"),
    [
        (torch.sin, torch.randn(1, 3), {}, r"at least 2 rows, got the shape \[1, 3\]"),
        (torch.sin, 3.0, {}, "at least one tensor with a batch dimension"),
        (3, torch.randn(2, 3), {}, "fn: expected a function or a module, got int"),
        (torch.sin, torch.randn(2, 3), {"max_rows": 0}, "max_rows: expected an int of at least 1, got 0"),
        (torch.sin, torch.randn(2, 3), {"max_rows": "4"}, "max_rows: expected an int of at least 1, got '4'"),
        (torch.sin, torch.randn(2, 3), {"backward": "x"}, "backward: expected a bool, got str"),
        (torch.sin, torch.randn(2, 3), {"backward": True}, "nothing that requires grad"),
        (
            torch.sum,
            torch.randn(2, 3, requires_grad=True),
            {"backward": True},
            "got a scalar: return a loss for each row",
        ),
        (fails_alone, torch.randn(2, 3), {}, "raised RuntimeError in a batch of 1 row: two lines$"),
    ],
)
def test_errors(fn: Any, inputs: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(AuditError, match=message):
        samebits.audit(fn, inputs, **options)
