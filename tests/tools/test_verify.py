"""``samebits verify`` and ``bench``: what they cover, what they tell, and what they do without a GPU."""

from __future__ import annotations

import inspect
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import samebits
from samebits import backends
from samebits.backends.cuda import linear_logp_sm90, routing, slots
from samebits.backends.cuda import rows as cuda_rows
from samebits.backends.kernel import Kernel, Plan
from samebits.backends.product import Operands, Product
from samebits.testing import KINDS
from samebits.tools import bench, cli, verify
from samebits.tools.bench import cases as bench_cases
from samebits.tools.bench import measure
from samebits.tools.bench import report as bench_report
from samebits.tools.cli import app
from samebits.tools.verify import (
    answers,
    attention,
    chain,
    exp2,
    fused,
    grouped,
    operations,
    plan,
    products,
    reductions,
    run,
    scaled,
    scaled_grouped,
    segments,
)
from samebits.tools.verify.case import LAYOUTS
from samebits.tools.verify.failures import KernelError
from samebits.tools.verify.operands import make_inputs, make_room, unfilled
from samebits.tools.verify.sheet import sheet
from tests.support import processes
from tests.support.threads import in_threads
from tests.tools.test_verify_grouped import GroupedStandIn
from tests.tools.test_verify_scaled import by_reference as scaled_by_reference
from tests.tools.test_verify_scaled import groups_by_reference as scaled_groups_by_reference
from tests.tools.test_verify_segments import SegmentedStandIn

CPU = torch.device("cpu")
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")


@pytest.mark.parametrize("thorough", [False, True])
def test_cases_cover_what_the_kernels_offer(thorough: bool) -> None:
    cases = verify.cases(thorough)
    assert {c.what for c in cases} == {
        "shapes", "layouts", "strides", "values", "epilogues", "batches", "tiny batches", "sequences",
        "back to back", "large",
    }  # fmt: skip
    assert {c.layout for c in cases} == set(LAYOUTS)
    assert {(c.step, c.dtype) for c in cases} == {
        ("mma", torch.bfloat16),
        ("mma", torch.float16),
        *(("fma", dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
    }
    assert {c.kind for c in cases} == set(KINDS)
    assert {c.place for c in cases} == {"plain", "pitched", "odd", "spread"}
    assert any(c.accumulate for c in cases)
    assert any(c.bias for c in cases)
    assert any(c.lengths for c in cases)
    assert any(c.sequences for c in cases)
    assert len(set(cases)) > 0.9 * len(cases)


def test_thorough_compares_a_thousand_million_values() -> None:
    schedules = 5  # of the universal kernel alone
    assert sum(c.m * c.n * max(1, c.batch) for c in verify.cases(True)) * schedules >= 10**9


@pytest.mark.parametrize("case", [c for c in verify.cases(False) if c.work < 1 << 21][::9], ids=str)
def test_operands_are_laid_out_as_the_case_says(case: verify.ProductCase) -> None:
    x = make_inputs(case, torch.device("cpu"))
    assert x.a.shape[-2:] == (case.m, case.k)
    assert x.b.shape[-2:] == (case.k, case.n)
    for t, layout in ((x.a, case.layout[0]), (x.b, case.layout[1])):
        rows, columns = t.stride()[-2:] if layout == "N" else t.stride()[:-3:-1]
        assert columns == (2 if case.place == "spread" else 1)
        assert case.place != "pitched" or (rows % 8 == 0 and t.storage_offset() == 0)
        assert case.place != "odd" or (rows % 2 == 1 and t.storage_offset() == 1)


def report() -> verify.Report:
    return verify.Report("a GPU", "", "", "", {}, False)


def test_a_single_differing_bit_is_found_and_told() -> None:
    want = torch.randn(5, 7).bfloat16()
    got = want.clone()
    got.view(torch.int16)[3, 2] ^= 1
    found = report()
    found.compare("kernel", "shapes", "CPU reference", want, want)
    assert (found.exit_code, found.first) == (0, None)
    found.compare("kernel", "shapes", "CPU reference", got, want, "the case")
    assert (found.compared, found.differing, found.exit_code) == (70, 1, 1)
    assert found.first is not None
    assert found.first.at == (3, 2)
    assert int(found.first.got_bits, 16) ^ int(found.first.expected_bits, 16) == 1
    assert json.loads(found.to_json())["differing"] == 1


def test_a_page_to_send_has_the_machine_and_every_result() -> None:
    gpu = {"name": "a GPU", "capability": "sm_100", "memory_gib": 178.0, "family": "HOPPER"}
    where = {
        **{"gpu": gpu, "driver": "590.1", "system": "Linux x86_64", "cpu": "a CPU", "cores": 2},
        **{"versions": {"samebits": "1", "triton": None}, "contracts": {"FMA": "0123"}},
    }
    want = torch.randn(5, 7).bfloat16()
    got = want.clone()
    got.view(torch.int16)[3, 2] ^= 1
    found = report()
    found.compare("kernel|s", "shapes", "CPU reference", want, want)
    assert "**All 35 values have the bits specified**" in sheet(found, where)
    found.compare("other", "shapes", "CPU reference", got, want, "the case", "a schedule")
    page = sheet(found, where)
    assert "**1 of 70 values differ**" in page
    assert "| GPU | a GPU, sm_100, 178.0 GiB |" in page
    assert "FMA `0123`" in page
    assert "| kernel\\|s | shapes | CPU reference | 0 | 1 | 35 | 0 |" in page
    assert found.first is not None
    assert f"First difference: other, shapes, the case, at (3, 2): got {found.first.got!r}" in page
    data = json.loads(page.partition("```json\n")[2].partition("\n```")[0])
    assert data["machine"] == where
    assert data["report"]["lines"] == json.loads(found.to_json())["lines"]


Compute = Callable[[Operands, object], None]


class StandIn(Kernel[Product, object]):
    """A kernel that is a function of operands and a schedule."""

    step = "mma"

    def __init__(self, compute: Compute) -> None:
        self.name, self._compute = "a kernel", compute

    @property
    def catalogue(self) -> Sequence[object]:
        return "right", "wrong"

    def supports(self, p: Product) -> bool:
        return True

    def choose(self, p: Product) -> object:
        return "right"

    def cost(self, p: Product, s: object) -> float:
        return 1.0

    def plan(self, p: Product, s: object = None) -> Plan:
        return mock.Mock(run=partial(self._compute, schedule=s or self.choose(p)))


def by_torch(x: Operands, schedule: object) -> None:
    product = x.a.float() @ x.b.float()
    x.out.copy_(product if x.start is None else product + x.start)


def beyond_its_rows(x: Operands, schedule: object) -> None:
    by_torch(x, schedule)
    out = x.out
    if schedule == "wrong":
        torch.as_strided(out, (1,), (1,), out.storage_offset() + out.shape[0] * out.stride(0)).zero_()


def too_early() -> Compute:
    """Uses what its first operand was at the call before."""
    seen: list[Tensor] = []

    def run(x: Operands, schedule: object) -> None:
        seen.append(x.a.clone())
        early = schedule == "wrong" and len(seen) % 5 == 0
        by_torch(x._replace(a=seen[-2]) if early else x, schedule)

    return run


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("what", ["around", "chain"])
def test_writes_outside_of_an_output_and_reads_that_come_too_early_are_found(
    what: str, accumulate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (products, chain):
        monkeypatch.setattr(module, "finish", lambda doing: None)
    monkeypatch.setattr(
        products,
        "on_cpu",
        lambda case, x, contract: (
            torch.zeros(case.m, case.n)
            .copy_(x.a.float() @ x.b.float() + (0 if x.acc is None else x.acc))
            .to(case.out_dtype)
        ),
    )
    out = torch.float32 if accumulate else None
    case = verify.ProductCase("back to back", 24, 24, 24, accumulate=accumulate, out=out)
    cpu = torch.device("cpu")
    for schedule, differing in (("right", False), ("wrong", True)):
        found = report()
        run = beyond_its_rows if what == "around" else too_early()
        kernel = StandIn(run)
        if what == "around":
            products.verify_case(found, case, kernel, [(kernel, schedule)], samebits.TENSOR_CORE, cpu)
        else:
            chain.verify_chain(found, case, kernel, [(kernel, schedule)], cpu)
        assert bool(found.differing) == differing, found
        assert found.compared > 0


HELD_TO = samebits.TENSOR_CORE.on(samebits.HOPPER)
REDUCTIONS = list(reductions.reductions(thorough=False, fused=True))


def test_reductions_cover_what_the_backends_offer() -> None:
    """Every function of the row kernels' host side, dtype, kind of values, stride and edge."""
    modules = cuda_rows.__name__, routing.__name__, slots.__name__
    offered = {
        name
        for name, f in vars(cuda_rows).items()
        if inspect.isfunction(f) and f.__module__ in modules and not name.startswith("_")
    } - {"kernel_spec", "launch", "long_spec", "choose", "schedules"}
    right = reductions.reference(HELD_TO)
    spy = mock.Mock(wraps=right.rows)
    for name, kernel in reductions.KERNELS.items():
        cases = [c for c in REDUCTIONS if c.kernel == name]
        assert {(c.dtype, c.other) for c in cases} == set(kernel.dtypes)
        assert {c.kind for c in cases} == set(KINDS)
        assert {c.rows for c in cases} >= {1, 3, 130 if kernel.entry else 129}
        assert {c.n for c in cases} >= {1, 4097}
        kernel(right._replace(rows=spy), reductions.RowOperands(cases[0]), None)
    assert {call[0] for call in spy.method_calls} == offered
    assert {(c.layout, c.place) for c in REDUCTIONS} == {("N", "plain"), *reductions.STRIDES}
    entries = {kernel.entry for kernel in reductions.KERNELS.values() if kernel.entry}
    assert {f"{entry}_sm90" for entry in entries} == {*linear_logp_sm90._PARAMS}
    assert not any(reductions.KERNELS[c.kernel].entry for c in reductions.reductions(True, fused=False))


@pytest.mark.long
@pytest.mark.parametrize("wrong", ["", "a bit", "beside its rows", "not written"])
def test_reductions_are_held_to_the_reference(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reductions, "finish", lambda doing: None)
    right = reductions.reference(HELD_TO)

    def row_sum(x: Tensor, mean: bool, dtype: torch.dtype) -> Tensor:
        """The reference's, but for what is wrong."""
        out = torch.empty(len(x), dtype=dtype).copy_(right.rows.row_sum(x, mean, dtype))
        if wrong == "a bit":
            out.view(torch.uint8)[0] ^= 1
        elif wrong == "beside its rows":
            torch.as_strided(out, (1,), (1,), out.storage_offset() + len(x)).zero_()
        elif wrong == "not written":
            return torch.empty(len(x), dtype=dtype)
        return out

    mine = mock.Mock(wraps=right.rows, row_sum=row_sum)
    found = report()
    some = [c for c in REDUCTIONS if c.kernel == "sum"] if wrong else REDUCTIONS[::7]
    reductions.verify_reductions(found, some, [right._replace(rows=mine)], HELD_TO, CPU)
    assert found.compared > 1000
    around = [line for line in found.lines if line.what == products.AROUND]
    assert sum(line.differing for line in around) == (len(some) if wrong == "beside its rows" else 0)
    if wrong in ("a bit", "not written"):
        assert found.first is not None
        assert found.differing >= len(some) if wrong == "a bit" else found.differing > 0
        assert all(line.differing for line in found.lines if line not in around)
    elif not wrong:
        assert found.differing == 0, found.first
        assert {line.kernel for line in found.lines} == set(reductions.KERNELS)


@pytest.mark.parametrize("wrong", ["", "statistics", "grad_logits", "combine"])
def test_log_probabilities_of_a_second_backend_are_held_to_the_reference(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under each of its schedules, by its own name; rows, which it does not reduce, are left out."""
    monkeypatch.setattr(reductions, "finish", lambda doing: None)
    right = reductions.reference(HELD_TO)

    def flipped(what: str, t: Tensor, schedule: object = "second") -> None:
        if (what, schedule) == (wrong, "second"):
            t.view(torch.uint8)[(0,) * t.ndim] ^= 1

    def statistics(*args: Any, schedule: object) -> Any:
        out = right.statistics(*args, schedule=schedule)
        flipped("statistics", out.s, schedule)
        return out

    def grad_logits(*args: Any, dtype: torch.dtype, schedule: object) -> Tensor:
        out = right.grad_logits(*args, dtype=dtype, schedule=schedule)
        flipped("grad_logits", out, schedule)
        return out

    def combine(statistics: Any, rows: Any) -> None:
        right.logp.combine(statistics, rows)
        flipped("combine", rows.logp)

    second = reductions.RowBackend(
        *("second ", None, mock.Mock(wraps=right.logp, combine=combine), statistics, grad_logits),
        lambda entry: ("first", "second"),
    )
    found = report()
    some = [c for c in REDUCTIONS if c.n <= 700 and c.kind == "normal"][::3]
    reductions.verify_reductions(found, some, [right, second], HELD_TO, CPU)
    lines = {name: [x for x in found.lines if x.kernel == name] for name in {x.kernel for x in found.lines}}
    assert {f"second {name}" for name in reductions._LOGP} == {x for x in lines if x.startswith("second ")}
    assert all(x.schedules == 2 for x in lines["second linear_logp"])
    differing = {name for name, of in lines.items() if any(x.differing for x in of)}
    assert (
        differing
        == {
            "": set(),
            "statistics": {f"second linear_logp{what}" for what in ("", ", bias", ", logits kept")},
            "grad_logits": {"second linear_logp backward", "second linear_logp backward, bias"},
            "combine": {f"second {name}" for name in reductions._LOGP if "backward" not in name},
        }[wrong]
    )


@pytest.mark.parametrize("thorough", [False, True])
def test_every_schedule_of_triton_runs(thorough: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of products on shapes, values, batches and sequences alike, and of log-probabilities."""
    pytest.importorskip("triton")
    from samebits.backends.triton import linear_logp, runtime
    from samebits.backends.triton.products import PRODUCTS, TILE_SCHEDULES

    monkeypatch.setattr(runtime, "gpu", lambda device: runtime.Gpu(132, 226 << 10, fetches_tiles=True))
    taken: dict[str, set[object]] = {}
    todo = [c for c in verify.cases(thorough) if c.work < 1 << 29]
    for case, pairs in zip(todo, plan.runs(todo, PRODUCTS, thorough), strict=True):
        inputs = make_inputs(case, CPU, unfilled)
        p = Product.of(inputs.into(make_room(case, inputs).out), case.step)
        for k, schedule in pairs:
            if verify.takes(k, p, schedule):
                for what in ("all", case.what):
                    taken.setdefault(f"{k.name}, {what}", set()).add(schedule)
    for k in PRODUCTS:
        assert taken[f"{k.name}, all"] == {None, *k.catalogue}
        for what in (
            "shapes",
            "layouts",
            "values",
            *(["batches", "sequences"] if "tiles" not in k.name else []),
        ):
            assert taken[f"{k.name}, {what}"] >= set(k.catalogue), what
    on = reductions.on_triton(HELD_TO, 0)
    assert tuple(on.schedules("statistics")) == linear_logp.STATISTICS_SCHEDULES
    assert tuple(on.schedules("grad_logits")) == TILE_SCHEDULES
    tried = {c.kernel for c in REDUCTIONS if on.tried(c)}
    assert tried == {*reductions._LOGP}
    monkeypatch.setattr(runtime, "gpu", lambda device: runtime.Gpu(132, 0, fetches_tiles=False))
    assert on.schedules("statistics") == on.schedules("grad_logits") == [None]


def test_processes_share_what_triton_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel is compiled by one of them."""
    ran: list[tuple[int, int]] = []
    asked = [(i % 6, i) for i in range(40)]

    class OnePlan:
        def __init__(self, index: int, thorough: bool, backends: Sequence[str]) -> None: ...

        def triton(self) -> Iterator[tuple[object, Callable[[], object]]]:
            for key, call in asked:
                yield key, partial(ran.append, (key, call))

    monkeypatch.setattr(plan, "VerifyPlan", OnePlan)
    for part in range(3):
        plan.launch_part(0, False, part, 3)
        assert len({key for key, _ in ran}) == 2 * part + 2
    assert sorted(ran) == sorted(asked)


@pytest.mark.long
def test_public_operations_are_verified_by_the_backend_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A bit that only this backend has wrong is found, and nothing else is wrong."""
    right = operations.bmm

    def wrong(*args: Any, **options: Any) -> Tensor:
        out = right(*args, **options)
        if backends._choice.backend == "reference":
            out.view(torch.uint8)[0, 0, 0] ^= 1
        return out

    monkeypatch.setattr(operations, "bmm", wrong)
    monkeypatch.setattr(operations, "chosen_backend", lambda kind: backends._choice.backend)
    monkeypatch.setattr(operations, "finish", lambda doing: None)
    found = report()
    with samebits.use_backend("reference"):
        operations.verify_operations(found, HELD_TO, CPU)
    assert {line.kernel for line in found.lines} == {"reference operations"}
    assert [line.what for line in found.lines if line.differing] == ["bmm"]


PUBLIC = ("verify_sequences", "verify_experts", "verify_operations", "verify_tokens", "verify_rows")
"""Of public functions. The first two are of what Triton does not compute."""


@pytest.mark.long
@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize(
    ("backend", "thorough", "verified", "only"),
    [
        (None, False, [None], ()),
        ("triton", False, ["triton"], ()),
        (None, True, [None, "triton"], ()),
        (None, False, [None], ("rows", "layers", "functions")),
    ],
)
def test_a_run_from_end_to_end(
    backend: str | None,
    thorough: bool,
    verified: list[str | None],
    only: tuple[str, ...],
    wrong: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the CPU passes for a GPU, and the reference for its kernels."""
    from samebits.backends.cuda import compiler, devices
    from samebits.backends.cuda.attention import catalogue
    from samebits.backends.cuda.attention.catalogue import Way
    from samebits.backends.reference import attention as reference_attention
    from samebits.backends.reference import matmul as reference
    from samebits.backends.triton import runtime as triton

    on = reductions.reference(HELD_TO)
    rows = mock.Mock(wraps=on.rows, row_sum=lambda *of: on.rows.row_sum(*of) + wrong)

    def product(x: Operands, schedule: object) -> None:
        x.out.copy_(reference.matmul(x.a, x.b, bias=None, out_dtype=x.out.dtype, contract=HELD_TO.key))

    class Some(plan.VerifyPlan):
        def __init__(self, *of: Any) -> None:
            super().__init__(*of)
            self.device = CPU
            self.products = [p for p in self.products if p[0].what == "shapes" and p[0].step == "mma"][:6]
            self.reduced = [c for c in self.reduced if c.kernel == "sum"][:4]
            self.attended = self.attended[:3]
            self.grouped = [c for c in self.grouped if not c.runs][:3]

    kernel = StandIn(product)
    gpu = devices.DeviceInfo(0, "a GPU", (9, 0), 132, 232448, 50 << 20)
    public: list[tuple[str, str | None]] = []
    for module in (products, reductions, attention, exp2, grouped, segments, fused, scaled, scaled_grouped):
        monkeypatch.setattr(module, "finish", lambda doing: None)
    for name in PUBLIC:
        note = lambda *of, name=name: public.append((name, backends._choice.backend))  # noqa: E731
        monkeypatch.setattr(run, name, note)
    edges = [(what, x) for what, x in exp2.arguments() if what == "edges"]
    monkeypatch.setattr(exp2, "arguments", lambda: edges)
    monkeypatch.setattr("samebits.backends.cuda.exp2.exp2", exp2.on_cpu)
    for direction in ("forward", "backward"):
        compute = getattr(reference_attention, direction)
        ways = lambda x, *of, compute=compute: [Way("attention", "", partial(compute, x))]  # noqa: E731
        monkeypatch.setattr(catalogue, f"{direction}s", ways)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(devices, "device_info", lambda index: gpu)
    found = mock.Mock(available=True, devices=(gpu,), cache="none", reason=None, remedy=None)
    monkeypatch.setattr(devices, "status", lambda: found)
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: "13.0")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (0, 0))
    monkeypatch.setattr(run, "_workers", lambda index: 1)
    monkeypatch.setattr(run, "_filling_caches", lambda *of: nullcontext(lambda seconds: None))
    monkeypatch.setattr(triton, "status", lambda: mock.Mock(available=True))
    monkeypatch.setattr("samebits.backends.cuda.matmul.family", lambda index: samebits.HOPPER)
    monkeypatch.setattr(run, "VerifyPlan", Some)
    monkeypatch.setattr(plan, "kernels", lambda index, backends: [kernel])
    monkeypatch.setattr(plan, "attention_kernels", lambda *of: ())
    monkeypatch.setattr(plan, "loads", lambda *of: ())
    of_groups = [GroupedStandIn("mma"), GroupedStandIn("fma")]
    monkeypatch.setattr(grouped, "grouped_kernels", lambda index: of_groups)
    few = segments.segmented_cases(True)[-6:]
    monkeypatch.setattr(plan, "segmented_cases", lambda thorough: few)
    by_reference = lambda case, *of: [("segments", None, partial(SegmentedStandIn, case, False))]  # noqa: E731
    monkeypatch.setattr(segments, "ways", by_reference)
    monkeypatch.setattr(segments, "loads", lambda *of: ())
    layers = fused.fused_cases(True)[:2]
    monkeypatch.setattr(fused, "fused_cases", lambda thorough: layers)
    monkeypatch.setattr(fused, "_schedules", lambda case: [None])
    monkeypatch.setattr(fused, "loads", lambda *of: ())
    in_fp8, groups_in_fp8 = scaled.scaled_cases(True)[:2], scaled_grouped.scaled_grouped_cases(True)[:2]
    monkeypatch.setattr(scaled, "scaled_cases", lambda thorough: in_fp8)
    monkeypatch.setattr(scaled_grouped, "scaled_grouped_cases", lambda thorough: groups_in_fp8)
    monkeypatch.setattr(scaled, "launches", scaled_by_reference)
    monkeypatch.setattr(scaled_grouped, "launches", scaled_groups_by_reference)
    monkeypatch.setattr(scaled, "KINDS", ("special",))
    for module in (scaled, scaled_grouped):
        monkeypatch.setattr(module, "loads", lambda *of: ())
    monkeypatch.setattr(plan, "on_cuda", lambda fused: on._replace(name="cuda ", rows=rows))
    monkeypatch.setattr(plan, "on_triton", lambda *of: on._replace(name="triton ", rows=rows))
    done: list[float] = []
    found = verify.verify(
        thorough=thorough, backend=backend, only=only, progress=lambda part, what: done.append(part)
    )
    assert not found.failure
    assert found.exit_code == wrong
    assert found.gpu == "a GPU"
    assert found.backends == [name or "cuda" for name in verified]
    reduced = {f"{name or 'cuda'} sum" for name in verified}
    attended = (
        {"attention", "ex2.approx.ftz.f32", "exp2 by polynomial", "grouped", "segments"}
        | {"add_rms_norm", "scaled_sm90", "scaled_grouped_sm90", "quantize", "silu_mul_quantize"}
        if None in verified
        else set()
    )
    if only:
        attended = {"add_rms_norm"}
    products_of = set() if only else {"a kernel"}
    assert {line.kernel for line in found.lines} == {"CPU reference", *products_of, *reduced, *attended}
    assert {line.kernel for line in found.lines if line.differing} == (reduced if wrong else set())
    called = [("verify_operations", name) for name in verified]
    assert [call for call in public if call[0] == "verify_operations"] == called
    assert {name for name, _ in public} == {*PUBLIC[2 * (None not in verified) :]}
    assert ("verify_sequences", "triton") not in public
    assert done == sorted(done)
    assert done[-1] < 1


@pytest.mark.parametrize("backend", verify.BACKENDS)
def test_public_functions_are_rehearsed(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    public: list[tuple[str, str | None]] = []
    for name in PUBLIC:
        note = lambda *of, name=name: public.append((name, backends._choice.backend))  # noqa: E731
        monkeypatch.setattr(run, name, note)
    monkeypatch.setattr("samebits.backends.cuda.matmul.family", lambda index: samebits.HOPPER)
    run._run_public_functions(0, False, backend)
    assert {name for name, _ in public} == {*PUBLIC[2 * (backend == "triton") :]}
    assert {by for _, by in public} == {None if backend == "cuda" else backend}


@pytest.mark.long
def test_processes_beside_are_waited_for_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = multiprocessing.active_children()
    for name in ("one", "another"):
        folder = str(tmp_path / f"{name}, a cache")
        monkeypatch.setenv("SAMEBITS_CACHE_DIR", folder)
        tasks = [partial(processes.note_environment, tmp_path / name), partial(sys.exit, 3)]
        with run._in_processes(tasks) as started:
            run._wait(started, 300)
            assert (tmp_path / name).read_text() == folder
    with run._in_processes([partial(time.sleep, 3600)]) as started:
        run._wait(started, 0.1)
        assert len(multiprocessing.active_children()) == len(before) + 1
    assert multiprocessing.active_children() == before


def test_parts_are_verified_by_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_work", processes.verify_some)
    parts = dict(run._by_processes(3, report(), 7, 10))
    whole = report()
    for i in sorted(parts):
        whole.add(parts[i])
    assert [line.kernel for line in whole.lines] == ["kernel 0", "kernel 1"]
    assert [(line.schedules, line.results, line.compared) for line in whole.lines] == [(2, 5, 25), (2, 5, 30)]
    assert whole.differing == 8
    assert whole.first is not None
    assert whole.first.case == "7"
    with pytest.raises(KernelError, match="part 10"):
        list(run._by_processes(2, report(), 0, 11))


@pytest.mark.long
def test_a_process_that_dies_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_work", processes.die)
    with pytest.raises(KernelError, match="exit code 5"):
        list(run._by_processes(2, report(), 0, 3))


def test_the_command_knows_all_parts() -> None:
    assert [part.value for part in cli.Verified] == list(plan.PARTS)


@NO_GPU
def test_what_cannot_be_verified_is_said() -> None:
    with pytest.raises(ValueError, match=r"only: expected some of products, .*, got 'all'"):
        verify.verify(only=["rows", "all"])
    assert verify.verify(backend="triton").exit_code == 2
    with pytest.raises(ValueError, match=r"backend: expected one of .*, got 'reference'"):
        verify.verify(backend="reference")


def test_what_is_public_is_verified_by_triton_too() -> None:
    both = list(run._public_functions(HELD_TO, CPU, False, verify.BACKENDS))
    parts = [{what for what, name, _ in both if name == backend} for backend in (None, "triton")]
    assert len(parts[1]) == 3
    assert parts[0] == parts[1] | {"attention of sequences", "experts"}


def test_zeros_and_nans_are_compared_by_their_bits() -> None:
    found = report()
    found.compare("kernel", "w", "a", torch.tensor([-0.0]), torch.tensor([0.0]))
    nan = torch.tensor([0x7FC00000, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    found.compare("kernel", "w", "a", nan[:1], nan[1:])
    assert found.differing == 2


def test_cublas_is_reported_and_does_not_fail() -> None:
    found = report()
    found.compare("torch.mm", "w", "a", torch.ones(3), torch.zeros(3), counts=False)
    assert (found.differing, found.exit_code, found.lines[0].differing) == (0, 0, 3)


def test_a_failure_is_told() -> None:
    found = report()
    found.failure = "tensor_core_sm90 did not end"
    assert found.exit_code == 1


@NO_GPU
def test_without_a_gpu_the_known_answers_are_verified(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    page = tmp_path / "report.md"
    done = CliRunner().invoke(app, ["verify", "--json", str(file), "--report", str(page)])
    assert done.exit_code == 2, done.output
    assert "No GPU was verified" in done.output
    said = page.read_text()
    assert said.startswith("# samebits verify: no GPU\n\n**No GPU was verified: ")
    assert samebits.FMA.digest() in said
    assert str(Path.home()) not in said, "a page to send names no folders of its sender"
    data = json.loads(file.read_text())
    assert data["gpu"] is None
    assert data["compared"] > 600
    assert data["differing"] == 0


@NO_GPU
def test_wrong_known_answers_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(answers._KNOWN_DIGESTS, "FMA", "0" * 16)
    done = CliRunner().invoke(app, ["verify"])
    assert done.exit_code == 1, done.output
    assert "NOT as specified" in done.output


@NO_GPU
def test_bench_without_a_gpu_says_why() -> None:
    done = CliRunner().invoke(app, ["bench", "--quick"])
    assert done.exit_code == 2
    assert "samebits bench: " in done.output


def test_bench_cases() -> None:
    forward = {(c.k, c.n, c.m) for c in bench.CASES if c.work == "forward"}
    assert {(k, n) for k, n, _ in forward} == {*bench_cases.SHAPES, bench_cases.ODD}
    assert all((k, n, m) in forward for k, n in bench_cases.SHAPES for m in bench_cases.ROWS)
    assert set(bench.quick()) < set(bench.CASES)
    assert {(c.work, c.dtype) for c in bench.quick()} == {(c.work, c.dtype) for c in bench.CASES}
    assert {c.m for c in bench.CASES if c.work == "forward"} == {*bench_cases.ROWS, *bench_cases.BETWEEN}
    between = [c for c in bench.CASES if c.work == "forward" and c.m in bench_cases.BETWEEN]
    for case in (c.record() | {"us": {"samebits": 1, "torch": 1}} for c in between):
        assert [band for _, band in bench_report.summary([case])] == ["forward, M 20, 48, 96, 160, 200, 300"]
        assert not bench_report.forward({"cases": [case]})
    odd = [
        c.record() | {"us": {"samebits": 1, "torch": 1}} for c in bench.CASES if (c.k, c.n) == bench_cases.ODD
    ]
    assert [band for _, band in bench_report.summary(odd)] == ["forward, K 4095"]
    assert not bench_report.forward({"cases": odd})
    lengths = bench_cases.packed_lengths(16384)
    assert sum(lengths) == 16384
    assert 400 < sum(lengths) / len(lengths) < 620


def test_bench_of_accumulated_gradients_compares_like_with_like() -> None:
    case = bench.BenchCase("dW main_grad", 40, 16, 24)
    runs = bench_cases.contestants(case, CPU)
    dy, x, grad = bench_cases.make_operands(case, CPU, torch.randn)
    with samebits.use_mma_model(samebits.HOPPER):
        ours = [runs["samebits"](dy, x, grad).clone() for _ in range(2)]
    theirs = [runs["torch"](dy, x, out).clone() for out in [torch.zeros(24, 16)] for _ in range(2)]
    torch.testing.assert_close(ours, theirs, atol=0.5, rtol=0.01)
    assert grad.data_ptr() == runs["samebits"](dy, x, grad).data_ptr()
    assert {c.work for c in bench.quick()} == {c.work for c in bench.CASES}


def test_bench_of_log_probabilities_compares_like_with_like() -> None:
    case = bench.BenchCase("logp", 3, 64, 300)
    x, weight, target = bench_cases.make_operands(case, CPU, torch.randn)
    runs = bench_cases.contestants(case, CPU)
    with samebits.use_mma_model(samebits.HOPPER):
        ours = runs["samebits"](x, weight, target)
    torch.testing.assert_close(ours, runs["torch"](x, weight, target), atol=0.1, rtol=0.01)
    assert runs["product"](x, weight, target).shape == (3, 300)
    assert [c.m for c in bench.quick() if c.work == "logp"] == [256]


def test_bench_summary_and_tables() -> None:
    def case(work: str, m: int, ours: float, theirs: float) -> dict[str, object]:
        name = "dense" if work == "dW ragged" else "torch"
        shape = {"work": work, "m": m, "k": 64, "n": 64, "dtype": "bfloat16"}
        return shape | {"us": {"samebits": ours, name: theirs}}

    cases = [case("forward", 1, 1.0, 2.0), case("forward", 128, 2.0, 1.0), case("dW ragged", 512, 1.0, 0.9)]
    found = bench_report.summary(cases)
    low = found["bfloat16", "forward, M <= 128"]
    assert (low.cases, low.mean, low.worst, low.worst_case["m"]) == (2, 1.0, 0.5, 128)
    assert found["bfloat16", "dW ragged / dense"].worst == 0.9
    assert len(found) == 2
    environment = {"gpu": "a GPU", "driver": "1", "digest": "0"}
    drift = [{"k": 64, "n": 64, "rows": [1], "changed": {"torch": [1], "samebits": [0]}}]
    assert bench.show({"cases": cases, "host": [], "drift": drift, "environment": environment})


@pytest.mark.long
def test_kernels_are_compiled_ahead_of_the_calls_that_load_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cuda.core")
    from samebits.backends.cuda import devices, precompile, runtime
    from samebits.backends.cuda.products import tensor_core
    from samebits.backends.cuda.products.plan import TileLayout

    layout = TileLayout(True, True, (0, 0, 0, 0))
    specs = [
        tensor_core.kernel_spec(tensor_core.SCHEDULES[2], dtype, layout, layout)
        for dtype in (torch.bfloat16, torch.float16, torch.bfloat16)
    ]
    hopper = devices.DeviceInfo(0, "a GPU", (9, 0), 132, 232448, 50 << 20)
    monkeypatch.setattr(devices, "device_info", lambda index: hopper)
    after_load: list[object] = []
    calls = [lambda spec=spec: after_load.append(runtime.load(spec, 0)) for spec in specs]
    monkeypatch.setattr(runtime, "_kernels", {})
    monkeypatch.setattr(runtime, "_load", lambda spec, device: spec)
    elsewhere: list[object] = []

    def another_thread() -> None:
        elsewhere.extend(in_threads(lambda: runtime.load(specs[0], 1)))

    for directory in (tmp_path / "one", tmp_path / "another"):  # also where processes were started before
        monkeypatch.setenv("SAMEBITS_CACHE_DIR", str(directory))
        elsewhere.clear()
        assert precompile.compile_for([*calls, another_thread]) == precompile.Compiled(needed=2, missing=2)
        assert elsewhere == [specs[0]]
        assert len(list(directory.glob("*.cubin"))) == 2
        assert precompile.compile_for(calls) == precompile.Compiled(needed=2, missing=0)
    assert not after_load, "a call went on without its kernel"


def test_measured_log_probabilities_are_held_to_the_cpu_whichever_backend_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("samebits.backends.cuda.matmul.family", lambda index: samebits.HOPPER)
    case = bench.BenchCase("logp", 5, 24, 40, torch.bfloat16)
    x, weight = torch.randn(5, 24).bfloat16(), torch.randn(40, 24).bfloat16()
    operands = x, weight, torch.arange(5)

    def ours(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        with samebits.use_backend("reference"):
            return samebits.linear_logp(x, weight, target) + wrong

    with samebits.use_backend("triton"):
        wrong = 0.0
        measure.check_logp(case, operands, CPU, ours)
        wrong = 1.0
        with pytest.raises(AssertionError):
            measure.check_logp(case, operands, CPU, ours)
