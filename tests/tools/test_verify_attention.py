"""What ``samebits verify`` does with attention: what it covers, and that it finds what is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import samebits
from samebits.backends.attention import Attention
from samebits.backends.reference import attention as reference
from samebits.contract import AMPERE, HOPPER, INTERPOLATION, TENSOR_CORE, Exp2Model
from samebits.testing import KINDS
from samebits.tools.verify import attention, exp2, sequences
from samebits.tools.verify.products import AROUND
from samebits.tools.verify.report import Report

CPU = torch.device("cpu")
HELD_TO = TENSOR_CORE.on(HOPPER)
CASES = attention.attentions(thorough=False)


@pytest.fixture(autouse=True)
def _nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (attention, exp2, sequences):
        monkeypatch.setattr(module, "finish", lambda doing: None)


def report() -> Report:
    return Report("a GPU", "", "", "", {}, False)


def test_cases_cover_what_attention_takes() -> None:
    assert attention.attentions(thorough=False) == CASES
    assert len(set(attention.attentions(thorough=True))) == 2 * len(set(CASES))
    short = [case for case in CASES if case.of.size <= 256]
    assert attention.attentions(thorough=False, smem=99 << 10) == short
    assert {c.kind for c in CASES} == set(KINDS)
    assert {c.form for c in CASES} == {"batch", "packed", "pages"}
    assert {(c.form, c.packed) for c in CASES} >= {("pages", False), ("pages", True)}
    assert {c.align for c in CASES} == {"first", "slots", "last"}
    assert {(c.window[0] < 0, c.window[1] < 0) for c in CASES} == {(a, b) for a in (0, 1) for b in (0, 1)}
    assert {(c.form, c.window == (-1, 0), c.align) for c in CASES} >= {("batch", True, "first")}
    assert {c.of.mask is None for c in CASES if c.kind == "special"} == {False, True}
    assert {bool(c.left) for c in CASES if c.form == "pages"} == {False, True}
    for name in ("sinks", "softcap", "left", "right", "broadcast"):
        assert {bool(getattr(c, name)) for c in CASES if c.gradients} == {False, True}, name
    lengths = [(q, k) for c in CASES for q, k in zip(c.queries, c.keys, strict=True)]
    assert {q for q, _ in lengths} >= {0, 1}
    assert {k for _, k in lengths} >= {0, 1, 127, 128, 129, 511, 512, 513, 1024}
    assert any(q > k for q, k in lengths)
    assert {c.group for c in CASES} >= {1, 3, 4, 8}


@pytest.mark.parametrize("case", CASES[::5], ids=str)
def test_operands_are_as_the_case_says(case: attention.AttentionCase) -> None:
    x, grad = attention.build(case, HELD_TO, CPU)
    assert (x.batch, x.kv_heads, x.group) == (len(case.keys), case.kv_heads, case.group)
    assert grad.shape == (*x.q.shape[:-1], case.of.of_values)
    outside = x.v.isnan().all(-1).all(-1).sum().item()
    slots = x.k.shape[:-2].numel()
    if case.kind != "special":
        assert slots - outside == sum(case.keys)
        assert x.q.isfinite().all() or (case.kind == "huge" and not case.gradients)
    assert x.v.isnan().sum() == outside * x.v.shape[-2:].numel()
    if case.of.place == "by head":
        assert x.q.transpose(-3, -2).is_contiguous()
    # As the operator gives it: what it would refuse is not tried.
    starts = [0] * x.batch if x.key_start is None else x.key_start.tolist()
    ends = [x.keys] * x.batch if x.key_length is None else x.key_length.tolist()
    assert x.packed or all(0 <= a <= b <= x.keys for a, b in zip(starts, ends, strict=True))
    assert x.mask is None or x.mask.shape == (x.batch, x.heads, x.queries, x.keys)


def ways(change: Callable[[str, tuple[Tensor, ...]], Any]) -> SimpleNamespace:
    """The reference in place of kernels; `change` gets what its second schedule gives."""

    def of(direction: str, x: Attention, *_: Tensor) -> Any:
        compute = partial(getattr(reference, direction), x)
        yield SimpleNamespace(kernel=direction, schedule="", run=compute)
        for schedule in range(3):
            run = lambda *a, **o: change(direction, compute(*a, **o))  # noqa: E731
            yield SimpleNamespace(kernel=direction, schedule=schedule, run=run if schedule == 1 else compute)

    return SimpleNamespace(forwards=partial(of, "forward"), backwards=partial(of, "backward"))


SMALL = [c for c in CASES if c.work < 1 << 21][::3]


@pytest.mark.parametrize(
    ("direction", "which"),
    [("", 0), *(("forward", i) for i in range(3)), *(("backward", i) for i in range(5))],
)
def test_a_wrong_bit_is_found(direction: str, which: int) -> None:
    """In each result, under one schedule only; and nothing is found where nothing is wrong."""

    def change(of: str, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        wrong = results[which] if of == direction else None
        if wrong is not None and wrong.numel():
            wrong.view(torch.uint8)[(0,) * wrong.ndim] ^= 1
        return results

    found = report()
    attention.verify_attention(found, SMALL, ways(change), HELD_TO, CPU, thorough=False)
    assert {line.kernel for line in found.lines} == {"forward", "backward"}
    assert all(line.schedules == 3 for line in found.lines if line.compared)
    differing = {line.kernel for line in found.lines if line.differing}
    assert differing == ({direction} if direction else set()), found.first
    if direction:
        assert found.first is not None
        assert found.first.schedule == "1"


@pytest.mark.parametrize("wrong", ["beside", "not written"])
def test_outputs_start_as_nan_with_nan_around_them(wrong: str) -> None:
    def change(of: str, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        out, *others = results
        if of == "backward" or out.numel() == 0:
            return results
        own = out.new_empty(out.shape)
        if wrong == "beside":
            own.copy_(out)
            torch.as_strided(own, (1,), (1,), own.storage_offset() + own.numel()).zero_()
        return own, *others

    found = report()
    attention.verify_attention(found, SMALL[:6], ways(change), HELD_TO, CPU, thorough=True)
    differing = {line.what == AROUND for line in found.lines if line.differing}
    assert differing == {wrong == "beside"}


@pytest.mark.parametrize("mma", [HOPPER, AMPERE])
def test_a_wrong_entry_of_the_table_is_named(mma: Any) -> None:
    """By the first x, both values and their bits. Families without a recorded table take the polynomial."""

    def wrong(x: Tensor, model: Exp2Model) -> Tensor:
        out = exp2.on_cpu(x, model)
        out[x == -0.75] = torch.nextafter(out[x == -0.75], torch.tensor(math.inf))
        return out

    found, right = report(), report()
    exp2.verify_exp2(found, TENSOR_CORE.on(mma), CPU, wrong)
    kernels = ["ex2.approx.ftz.f32"] * (mma.exp2 == INTERPOLATION) + ["exp2 by polynomial"]
    assert list(dict.fromkeys(line.kernel for line in found.lines)) == kernels
    assert found.differing == len(kernels)
    first = found.first
    assert first is not None
    assert (first.kernel, first.case) == (kernels[0], "x -0.75 (0xBF400000)")
    assert int(first.got_bits, 16) == int(first.expected_bits, 16) + 1
    compared = {line.what: line.compared for line in found.lines}
    assert compared["table, x in [-1, 0)"] == compared["table, x in [0, 1)"] == 1 << 23
    exp2.verify_exp2(right, TENSOR_CORE.on(mma), CPU, exp2.on_cpu)
    assert right.differing == 0
    xs = torch.cat([x for what, x in exp2.arguments() if what == "edges"])
    assert xs.isnan().any()
    assert xs.isinf().sum() == 2
    for edge in (-(2.0**-30), 2.0**-30, -126.0, 128.0):
        below, above = (torch.nextafter(torch.tensor(edge), torch.tensor(to)) for to in (-math.inf, math.inf))
        assert all((xs == x).any() for x in (below, edge, above)), edge


@pytest.mark.parametrize("wrong", ["", "decoding", "padded", "gradients"])
def test_bits_that_depend_on_more_than_the_sequence_are_found(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        if wrong == "gradients" and "cu_seqlens_q" in options:
            q = q + (1 - 1e-3) * (q - q.detach())
        results = samebits.attention(q, k, v, **options)
        here = {"decoding": q.shape[1] == 1, "padded": "key_start" in options}
        if here.get(wrong) and "return_lse" in options:
            results[0].view(torch.uint8)[0, -1, 0, 0] ^= 1
        return results

    monkeypatch.setattr(sequences, "attention", changed)
    small = {"tokens": 1200, "heads": (1, 2), "size": 24, "of_values": 16}
    monkeypatch.setattr(sequences, "SEQUENCES", tuple(s | small for s in sequences.SEQUENCES[1:3]))
    found = report()
    sequences.verify_sequences(found, CPU, thorough=False)
    differing = {line.what for line in found.lines if line.differing}
    assert (
        differing
        == {
            "": set(),
            "decoding": {"decoding", "decoding, pages"},
            "padded": {"padding on the left"},
            "gradients": {"packed, dq"},
        }[wrong]
    )
    assert found.compared > 10**5
