"""The audit finds exactly the layers, rows and places whose bits an operator lets depend on the batch."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samebits
from samebits.tools.audit import AuditError, Report, audit_linears, measure, plan
from samebits.tools.audit import linears as linears_module
from samebits.tools.audit import target as target_module

ROWS = [1, 2, 3, 4, 5, 7, 8, 12, 24, 33, 96]


@pytest.mark.parametrize("rows", ROWS)
def test_every_variation_covers_every_row_and_invents_none(rows: int) -> None:
    variations = plan(rows)
    assert len({v.name for v in variations}) == len(variations)
    for v in variations:
        index = torch.cat(v.batches)
        assert set(index[index < rows].tolist()) == set(range(rows)), v.name
        assert index.max() < rows + 3
        assert min(len(b) for b in v.batches) > 0


@pytest.mark.parametrize("rows", [r for r in ROWS if r > 8])
def test_batch_sizes_are_exact_and_rotations_bring_every_row_everywhere(rows: int) -> None:
    places: list[set[int]] = [set() for _ in range(rows)]
    for v in plan(rows):
        if v.kind == "batch size":
            assert {len(b) for b in v.batches} == {int(v.name.split()[-1])}
        if v.name == "batches of 3" or (v.kind == "position" and "batches of 3," in v.name):
            for batch in v.batches:
                for place, row in enumerate(batch.tolist()):
                    places[row].add(place)
    assert all(p == {0, 1, 2} for p in places)


def test_other_neighbours_are_other_neighbours() -> None:
    by_name = {v.name: v for v in plan(96)}
    near = {frozenset(b.tolist()) for b in by_name["batches of 8"].batches}
    for batch in by_name["batches of 8, other neighbours"].batches:
        assert all(len(frozenset(batch.tolist()) & other) <= 3 for other in near)


@pytest.mark.parametrize("rows", [r for r in ROWS if r <= 8])
def test_eight_rows_have_no_other_neighbours(rows: int) -> None:
    assert not any("other neighbours" in v.name for v in plan(rows))


def at_batch_size(size: int, change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Twice the input; changed in batches of `size`."""
    return lambda x: change(2 * x) if len(x) == size else 2 * x


def last_bit_of_column_1(y: Tensor) -> Tensor:
    y = y.clone()
    y[:, 1] = torch.nextafter(y[:, 1], torch.tensor(math.inf))
    return y


def test_measure_counts_rows_once_and_names_the_first_place() -> None:
    rows = torch.arange(1.0, 41.0).reshape(10, 4)
    drift = measure(at_batch_size(1, last_bit_of_column_1), rows, plan(10))
    # The cut into 1, 2, 3, 5, ... and the one into seven have batches of one row, too.
    assert {v.name: v.changed for v in drift.variations if v.changed} == {
        "batches of 1": 10,
        "cut into 7 chunks": 4,
        "cut into chunks of 1, 2, 3, 5, 8, ...": 1,
    }
    assert (drift.rows, drift.changed, drift.ulp) == (10, 10, 1)
    first = drift.first
    assert first is not None
    assert (first.variation, first.row, first.column) == ("batches of 1", 0, 1)
    assert (first.batch_rows, first.position) == (1, 0)
    assert first.expected == 4.0
    assert (first.expected_bits, first.got_bits) == ("0x40800000", "0x40800001")
    assert drift.relative == pytest.approx(2.0**-21 / 4)
    assert drift.of_row == pytest.approx(2.0**-17 / 72)  # row 8: 66, 68, 70, 72


def test_measure_sees_a_row_that_depends_on_its_place_and_on_its_neighbours() -> None:
    rows = torch.randn(12, 3)

    def by_place(x: Tensor) -> Tensor:
        y = x.clone()
        y[-1] *= 1 + 2.0**-10
        return y

    def by_neighbour(x: Tensor) -> Tensor:
        return x + 0 * x.sum(0)  # NaN spreads, finite values do not

    placed = measure(by_place, rows, plan(12))
    assert placed.changed == 12
    assert placed.first is not None
    assert (placed.first.row, placed.first.variation) == (0, "batches of 1")
    spread = measure(by_neighbour, rows, plan(12))
    assert {v.name for v in spread.variations if v.changed} == {
        "batches of 8, each row next to NaN",
        "batches of 8, each row next to infinity",
    }
    assert spread.relative == spread.of_row == math.inf
    assert spread.first is not None
    assert math.isnan(spread.first.got)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ulp_counts_bit_patterns(dtype: torch.dtype) -> None:
    rows = torch.full((4, 2), -0.0, dtype=dtype)
    sign = measure(lambda x: x.abs() if len(x) == 1 else x, rows, plan(4))
    assert (sign.changed, sign.ulp, sign.relative, sign.of_row) == (4, 1, 0, 0)
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    across = measure(lambda x: x * 0 + tiny if len(x) == 1 else x * 0 - tiny, rows + 1, plan(4))
    assert (across.ulp, across.relative) == (3, 2)  # -tiny, -0, +0, +tiny


def test_nan_payloads_differ_in_bits() -> None:
    drift = measure(lambda x: torch.full_like(x, math.nan), torch.zeros(3, 1), plan(3))
    assert drift.changed == 0
    other = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)

    def operator(x: Tensor) -> Tensor:
        return (other if len(x) == 2 else torch.tensor([math.nan])).expand(len(x), 1)

    drift = measure(operator, torch.zeros(3, 1), plan(3))
    assert drift.changed == 3
    assert drift.first is not None
    assert drift.first.got_bits == "0x7FC00001"


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 24)
        self.second = nn.Linear(24, 8, bias=False)
        self.idle = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.second(F.gelu(self.first(x)) * scale)


@pytest.fixture
def tiny() -> Tiny:
    torch.manual_seed(1)
    return Tiny()


@pytest.fixture
def variant_second_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's operator, made to split the sum of 24 terms in batches of 2."""

    def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        exact = (rows.double() @ weight.double().T + (0 if bias is None else bias.double())).float()
        if weight.shape[1] == 24 and len(rows) == 2:
            return torch.nextafter(exact, torch.tensor(math.inf))
        return exact

    monkeypatch.setattr(target_module, "_run_linear", linear)


@pytest.mark.usefixtures("variant_second_layer")
def test_the_right_layer_is_named(tiny: Tiny) -> None:
    report = audit_linears(tiny, [torch.randn(3, 7, 16)], max_rows=20)
    assert [(x.name, x.torch.rows, x.torch.changed, x.samebits.changed) for x in report.layers] == [
        ("first", 20, 0, 0),
        ("second", 20, 20, 0),
    ]
    second = report.layers[1]
    assert (second.in_features, second.out_features, second.dtype) == (24, 8, "float32")
    assert (second.contract, second.digest) == ("FMA", samebits.FMA.digest())
    assert second.torch.first is not None
    assert (second.torch.first.batch_rows, second.torch.first.variation) == (2, "batches of 2")
    assert [s.name for s in report.skipped] == ["idle"]
    assert not report.samebits_drifts


def test_samebits_drift_is_found(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = samebits.linear
    monkeypatch.setattr(samebits, "linear", lambda x, w, b=None: honest(x, w, b) + (len(x) == 3))
    report = audit_linears(tiny, [torch.randn(9, 16)])
    assert report.samebits_drifts
    assert all(x.samebits.changed == 9 for x in report.layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_report_survives_json(tiny: Tiny, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        target_module,
        "_run_linear",
        lambda x, weight, bias: F.linear(x, weight, bias) * (math.nan if len(x) == 1 else 1),
    )
    report = audit_linears(tiny.to(dtype), [torch.randn(6, 16, dtype=dtype)], notes=["a note"])
    first = report.layers[0].torch.first
    assert first is not None
    assert math.isnan(first.got)
    back = Report.from_json(report.to_json())
    # NaN is unequal to itself: compare what JSON says of both, then the rest.
    assert back.to_json() == report.to_json()
    assert dataclasses.replace(back, layers=()) == dataclasses.replace(report, layers=())
    assert back.layers[0].torch.relative == math.inf
    assert report.layers[0].contract.startswith("FMA" if dtype == torch.float32 else "TENSOR_CORE")

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    data = json.loads(report.to_json(), parse_constant=refuse)
    assert data["schema"] == 1
    assert data["layers"][0]["torch"]["first"]["got"] == "nan"
    assert set(data) == {"schema", *(f.name for f in dataclasses.fields(Report))}


def test_from_json_refuses_what_is_no_report() -> None:
    with pytest.raises(ValueError, match='"schema": 1'):
        Report.from_json('{"schema": 2}')


def test_rows_are_spread_over_all_forward_passes(tiny: Tiny) -> None:
    seen: list[Tensor] = []
    inputs = [{"x": torch.full((50, 16), float(i)), "scale": 0.5} for i in range(4)]
    original = linears_module.measure

    def spy(operator: object, rows: Tensor, *rest: object) -> object:
        seen.append(rows)
        return original(operator, rows, *rest)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linears_module, "measure", spy)
        audit_linears(tiny, inputs, max_rows=12, only="^first$")
    assert seen[0].shape == (12, 16)
    assert seen[0][:, 0].unique(return_counts=True)[1].tolist() == [3, 3, 3, 3]


def test_the_model_is_left_as_it_was(tiny: Tiny) -> None:
    tiny.train()
    audit_linears(tiny, [(torch.randn(4, 16),)])
    assert tiny.training
    assert all(not m._forward_pre_hooks for m in tiny.modules())
    assert all(p.grad is None and p.requires_grad for p in tiny.parameters())


def test_parts_in_eval_mode_stay_there() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4)).train()
    model[1].eval()
    audit_linears(model, [torch.randn(4, 4)])
    assert [m.training for m in model.modules()] == [True, True, False, True]


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize("shape", [(3, 0), (0, 3)])
def test_layers_without_elements_are_skipped(shape: tuple[int, int]) -> None:
    model = nn.ModuleDict({"empty": nn.Linear(*shape), "full": nn.Linear(4, 4)})
    model.forward = (
        lambda x: (  # type: ignore[method-assign]
            model["empty"](x[:, : shape[0]]),
            model["full"](x),
        )
    )
    report = audit_linears(model, [torch.randn(4, 4)])
    assert [x.name for x in report.layers] == ["full"]
    (skipped,) = report.skipped
    assert (skipped.name, "no elements" in skipped.reason) == ("empty", True)


def test_the_default_device_does_not_matter(tiny: Tiny) -> None:
    x = torch.randn(12, 16)
    torch.set_default_device("meta")
    try:
        report = audit_linears(tiny, [x])
    finally:
        torch.set_default_device(None)
    assert [layer.samebits.rows for layer in report.layers] == [12, 12]


class Autocasts(nn.Module):
    """Its first layer in the dtype of its weights, its second under autocast, its third in both."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(16, 16) for _ in range(3))
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        with torch.autocast("cpu", self.dtype):
            z = self.second(y)
            self.third(z)
        return self.third(y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_layer_under_autocast_is_audited_in_its_dtype(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x, seen = Autocasts(dtype), torch.randn(12, 16), []

    def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = F.linear(rows, weight, bias)
        seen.append((rows.dtype, weight.dtype, None if bias is None else bias.dtype, out.dtype))
        return out

    monkeypatch.setattr(target_module, "_run_linear", linear)
    report = audit_linears(model, [x])
    name = str(dtype).removeprefix("torch.")
    assert [(layer.name, layer.dtype) for layer in report.layers] == [("first", "float32"), ("second", name)]
    assert [layer.contract.split("[")[0] for layer in report.layers] == ["FMA", "TENSOR_CORE"]
    assert set(seen) == {(torch.float32,) * 4, (dtype,) * 4}
    assert report.notes == (f"autocast runs in {name}, and so does the audit: second",)
    (third,) = report.skipped
    assert third.reason == f"its rows have several dtypes or widths in one run: {name} [16] and float32 [16]"


class HalfAutocast(Tiny):
    """Its first layer under autocast if the caller wants so, its second never."""

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        y = self.first(x)
        with torch.autocast("cpu", enabled=False):
            return self.second(y.float())


def test_autocast_around_the_audit_reaches_no_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for name in ("_run_linear", "_run_samebits"):
        honest = getattr(target_module, name)

        def run(rows: Tensor, honest: Callable[..., Tensor] = honest, **parameters: Tensor | None) -> Tensor:
            out: Tensor = honest(rows, **parameters)
            seen.append((rows.shape[1], rows.dtype, out.dtype))
            return out

        monkeypatch.setattr(target_module, name, run)
    x = torch.randn(12, 16)
    with torch.autocast("cpu", torch.bfloat16):
        report = audit_linears(HalfAutocast(), [x])
    assert [layer.dtype for layer in report.layers] == ["bfloat16", "float32"]
    assert report.notes == ("autocast runs in bfloat16, and so does the audit: first",)
    assert set(seen) == {(16, torch.bfloat16, torch.bfloat16), (24, torch.float32, torch.float32)}


def test_activations_of_another_dtype_than_the_weight_are_skipped() -> None:
    class Casts(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.float())

    class Slices(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[..., :3])

    with pytest.raises(AuditError, match="its activations are bfloat16 and its weight float32"):
        audit_linears(Casts(4, 4), [torch.ones(3, 4, dtype=torch.bfloat16)])
    with pytest.raises(AuditError, match="its activations have 4 features, and its weight takes 3"):
        audit_linears(Slices(3, 4), [torch.ones(3, 4)])


def test_layers_with_a_forward_of_their_own_are_named() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    class Renamed(nn.Linear):
        pass

    patched = nn.Linear(4, 4)
    patched.forward = lambda x: F.linear(x, patched.weight)  # type: ignore[method-assign]
    model = nn.Sequential(nn.Linear(4, 4), Scaled(4, 4), Renamed(4, 4), patched)
    (note,) = audit_linears(model, [torch.ones(3, 4)]).notes
    assert note.startswith("audited as the plain product")
    assert note.endswith(": 1, 3")
    (note,) = audit_linears(Scaled(4, 4), [torch.ones(3, 4)]).notes
    assert note.endswith(": (the module itself)")


def test_transformers_conv1d_is_a_linear_layer() -> None:
    utils = pytest.importorskip("transformers.pytorch_utils")
    report = audit_linears(utils.Conv1D(6, 10), [torch.randn(5, 10)])
    (layer,) = report.layers
    assert (layer.operator, layer.in_features, layer.out_features) == ("torch.addmm", 10, 6)
    assert (layer.name, layer.torch.rows, layer.samebits.changed) == ("", 5, 0)
    assert report.notes == ()


class Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 3:
            raise SystemExit(0)
        raise RuntimeError("two\nlines")


@pytest.mark.parametrize(
    ("model", "inputs", "options", "message"),
    [
        (nn.GELU(), [torch.ones(2)], {}, "GELU has no linear layer"),
        (nn.Linear(2, 2), [], {}, "no inputs"),
        (nn.Linear(2, 2), [torch.ones(2, 2)], {"max_rows": 1}, "at least 2, got 1"),
        (nn.Linear(2, 2), [torch.ones(2, 2)], {"only": "x"}, "no linear layer's name matches 'x'"),
        (nn.Linear(2, 2), [torch.ones(2, 2)], {"only": "["}, r"only: '\[' is not a regular expression"),
        (nn.Linear(2, 2), torch.ones(2, 2), {}, "expected a list of forward passes, got a Tensor"),
        (nn.Linear(2, 2), {"input": torch.ones(2, 2)}, {}, "expected a list .* got a dict"),
        (nn.LazyLinear(2), [torch.ones(2, 2)], {}, "not initialized"),
        (
            nn.Linear(2, 2).double(),
            [torch.ones(2, 2).double()],
            {},
            r"no linear layer can be audited .*1 layer found.* \(the module itself\): .* float64",
        ),
        (Raises(), [torch.ones(3, 2)], {}, "raised SystemExit: 0$"),
        (nn.Linear(2, 2), [torch.ones(0, 2)], {}, "no activation reached it"),
        (Raises(), [torch.ones(2, 2)], {}, "raised RuntimeError: two lines$"),
    ],
)
def test_errors(model: nn.Module, inputs: list[Tensor], options: dict[str, object], message: str) -> None:
    with pytest.raises(AuditError, match=message) as caught:
        audit_linears(model, inputs, **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
