"""Launches of the CUDA kernels without a GPU: CPU tensors pass for those of an H200, up to the launch."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import math
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

import samebits
from samebits.backends.cuda import (
    add_rms_norm,
    causal_conv1d,
    columns,
    gated,
    grouped,
    linear_logp,
    logp,
    matmul,
    norm_rotary,
    rotary,
    rows,
    runtime,
    tensor_maps,
)
from samebits.backends.cuda.products import segmented_sm90
from samebits.backends.cuda.products.tensor_core import TENSOR_CORE
from samebits.backends.logits_in_pieces import grad_logits
from samebits.backends.product import Matrix, Operands, Product
from samebits.backends.token_logps import Rows, room_for_logits
from samebits.contract import resolve, segmented_key
from samebits.tools import verify
from samebits.tools.verify import plan, reductions, segments
from samebits.tools.verify.operands import make_inputs, make_room, unfilled

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_a_later_launch_cannot_fail(
    launches: list[str], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tensor maps are made when the step is. So main_grad is written whole or not at all."""
    key = resolve(None, dtype, "cuda")
    out, a, b = torch.zeros(2048, 2048), *torch.ones(2, 2048, 2048, dtype=dtype)
    steps = [
        matmul.matmul_later(out, a, b, accumulate=True, contract=key),
        matmul.addbmm_later(out[None], a[None, None], b[None, None], None, accumulate=True, contract=key),
    ]
    monkeypatch.setattr(tensor_maps, "tensor_map", None)
    for step in steps:
        step()
    assert launches == ["tensor_core_sm90.cu" if dtype == BF16 else "fma_sm90.cu"] * 2


@pytest.mark.parametrize("m", [1, 3, 8, 33, 128, 256, 1000, 4096])
@pytest.mark.parametrize(("k", "n"), [(4096, 4096), (7168, 256), (768, 3072), (40, 24), (41, 23), (64, 1)])
def test_every_launch_adds_up(launches: list[str], m: int, k: int, n: int) -> None:
    def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    key = "TENSOR_CORE:mma"
    for out_dtype, bias in itertools.product((BF16, F32), (None, empty(n))):
        for b in (empty(n, k).mT, empty(k, n)):
            out = matmul.matmul(empty(m, k), b, bias=bias, out_dtype=out_dtype, contract=key)
            assert (out.shape, out.dtype) == ((m, n), out_dtype)
    dy, x = empty(m, n).mT[None, None], empty(m, k)[None, None]
    for bounds in (None, torch.tensor([0, m // 2, m])):
        assert matmul.addbmm(None, dy, x, bounds, out_dtype=BF16, contract=key).shape == (1, n, k)
        matmul.addbmm_later(empty(1, n, k, dtype=F32), dy, x, bounds, accumulate=True, contract=key)()
    rows = empty(4, 7, n).mT[None]
    assert matmul.addbmm(None, rows, empty(1, 4, 7, k), None, out_dtype=BF16, contract=key).shape == (1, n, k)
    assert matmul.matmul(empty(3, 5, k), empty(3, k, n), bias=None, out_dtype=BF16, contract=key).shape == (
        3,
        5,
        n,
    )
    # TMA asks for strides of 16 bytes; other layouts go to the universal kernel.
    assert "tensor_core_sm90.cu" in launches or k % 8
    assert "tensor_core.cu" in launches or k % 8 == n % 8 == 0


@pytest.mark.parametrize("m", [1, 3, 33, 128, 1000, 4096])
@pytest.mark.parametrize(("k", "n"), [(4096, 4096), (7168, 256), (40, 24), (41, 23), (64, 1), (1, 64)])
def test_every_launch_under_fma_adds_up(launches: list[str], m: int, k: int, n: int) -> None:
    key = "FMA:fma"
    for bias in (None, torch.empty(n), torch.empty(n, dtype=BF16)):
        for b in (torch.empty(n, k).mT, torch.empty(k, n)):
            out = matmul.matmul(torch.empty(m, k), b, bias=bias, out_dtype=F32, contract=key)
            assert (out.shape, out.dtype) == ((m, n), F32)
    dy, x = torch.empty(m, n).mT[None, None], torch.empty(m, k)[None, None]
    for bounds in (None, torch.tensor([0, m // 2, m])):
        assert matmul.addbmm(None, dy, x, bounds, out_dtype=F32, contract=key).shape == (1, n, k)
        matmul.addbmm_later(torch.empty(1, n, k), dy, x, bounds, accumulate=True, contract=key)()
    a3, b3 = torch.empty(3, 100, k), torch.empty(3, k, n)
    assert matmul.matmul(a3, b3, bias=None, out_dtype=F32, contract=key).shape == (3, 100, n)
    # TMA asks for strides of 16 bytes; other layouts, and sequences, go to the universal kernel.
    assert "fma_sm90.cu" in launches or min(m, n, k) < 64
    assert "fma.cu" in launches


@pytest.mark.parametrize("m", [1, 3, 33, 1000])
@pytest.mark.parametrize(("k", "n"), [(4096, 4096), (40, 24), (8, 1), (0, 5)])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_every_launch_in_segments_adds_up(
    launches: list[str], dtype: torch.dtype, m: int, k: int, n: int
) -> None:
    contract = samebits.FMA if dtype == F32 else samebits.TENSOR_CORE
    key = contract.segmented(8).key
    for out_dtype, bias in itertools.product({dtype, F32}, (None, torch.empty(n, dtype=dtype))):
        for b in (torch.empty(n, k, dtype=dtype).mT, torch.empty(k, n, dtype=dtype)):
            a = torch.empty(m, k, dtype=dtype)
            out = matmul.matmul(a, b, bias=bias, out_dtype=out_dtype, contract=key)
            assert (out.shape, out.dtype) == ((m, n), out_dtype)
            assert matmul.matmul(a.view(1, m, k), b, bias=bias, out_dtype=out_dtype, contract=key).shape == (
                *(1, m, n),
            )
            matmul.matmul_later(torch.empty(m, n, dtype=out_dtype), a, b, bias=bias, contract=key)()
    batch = torch.empty(3, m, k, dtype=dtype), torch.empty(3, k, n, dtype=dtype)
    assert matmul.matmul(*batch, bias=None, out_dtype=F32, contract=key).shape == (3, m, n)
    matmul.tree_later(torch.empty(m, n, dtype=dtype), torch.empty(2, m, n))()
    offs = torch.tensor([0, m], dtype=torch.int32)
    bias = torch.empty(2, n, dtype=dtype)
    experts = torch.empty(2, k, n, dtype=dtype)
    out = grouped.grouped_rows(a, experts, offs, bias=bias, out_dtype=dtype, contract=key)
    assert out.shape == (m, n)
    assert "tree.cu" in launches
    with pytest.raises(ValueError, match="accumulate: expected False under"):
        matmul.matmul_later(torch.empty(m, n), a, b, accumulate=True, contract=key)
    with pytest.raises(ValueError, match="expected a multiple of 8 under"):
        matmul.matmul(
            torch.empty(m, 12).to(dtype),
            torch.empty(12, n).to(dtype),
            bias=None,
            out_dtype=dtype,
            contract=key,
        )


@pytest.mark.parametrize("thorough", [False, True])
def test_verify_runs_every_kernel_of_segments(launches: list[str], thorough: bool) -> None:
    """And every schedule of Hopper's, in each layout that takes it."""
    run, taken, cpu = set(), set(), torch.device("cpu")
    cases = segments.segmented_cases(thorough)
    products = [segments.unfilled_product(case, cpu) for case in cases]
    for case, p, schedules in zip(cases, products, segments.tried(cases, products, thorough), strict=True):
        a, b, bias = segments.make(case, cpu, unfilled)
        x = Operands(a, b, segments.room(case, cpu)[0], bias)
        if segmented_sm90.supports(p, case.segments):
            taken |= {(case.layout, s) for s in segmented_sm90.schedules(p)}
        for name, schedule, made in segments.ways(case, p, schedules):
            with suppress(segments._UnsupportedError):
                made().run(x)
                run.add((name, case.layout, schedule))
    assert {name for name, *_ in run} == {
        "tensor_core_sm90, segments",
        *(f"{kernel.name}, tree" for kernel in matmul.PRODUCTS),
    }
    assert taken <= {(layout, s) for _, layout, s in run}
    assert len(taken) > 300


@pytest.mark.parametrize("tokens", [1, 9, 33, 64, 65, 300, 4096])
@pytest.mark.parametrize(("features", "vocabulary"), [(64, 1000), (200, 129), (8, 1), (41, 300)])
def test_every_launch_of_log_probabilities_adds_up(
    launches: list[str], tokens: int, features: int, vocabulary: int
) -> None:
    hidden, weight, bias = (
        torch.empty(s, dtype=BF16) for s in ((tokens, features), (vocabulary, features), (vocabulary,))
    )
    key = "TENSOR_CORE:mma"
    rows = Rows.empty(torch.zeros(tokens, dtype=torch.int64), vocabulary, -100, entropy=True)
    grad = torch.ones(tokens)
    part = slice(vocabulary // 256 * 128, vocabulary)
    logits = torch.empty(tokens, -(-vocabulary // 4) * 4)[:, :vocabulary]
    for b, h in itertools.product((None, bias), (None, grad)):
        for keep in (None, logits):
            found = linear_logp.statistics(hidden, weight, b, rows, keep, contract=key)
            assert found.m.shape == (tokens, -(-vocabulary // 128))
        given = hidden, weight, b, part, rows, grad, h
        dz = grad_logits(linear_logp.grad_logits_later, *given, dtype=BF16, contract=key)
        assert (dz.shape, dz.stride(0) % 8) == ((tokens, part.stop - part.start), 0)
    fused = {"statistics_sm90.cu", "grad_logits_sm90.cu"}
    # TMA asks for strides of 16 bytes; other layouts go by way of logits in memory, a product.
    if features % 8 == 0:
        assert set(launches) == fused
    else:
        products = {"tensor_core.cu", "tensor_core_sm90.cu", "padded_sm90.cu"}
        assert products & set(launches)
        assert set(launches) - products == {"logp.cu"}


@pytest.mark.parametrize(("tokens", "segments"), [(0, 1), (512, 8)])
@pytest.mark.parametrize("keep", [False, True])
def test_every_launch_of_gradients_of_log_probabilities_adds_up(
    launches: list[str], monkeypatch: pytest.MonkeyPatch, tokens: int, segments: int, keep: bool
) -> None:
    """Without tokens, too; and where segments end at no multiple of a block."""
    op, key = importlib.import_module("samebits.ops.linear_logp"), segmented_key("TENSOR_CORE:mma", segments)
    features, vocabulary = 1024, 8 * 1001
    monkeypatch.setattr(op, "backend_of", lambda t, k: (linear_logp, logp, matmul, "TENSOR_CORE:mma"))
    monkeypatch.setattr(op, "_GRAD_LOGITS", 1001 * max(tokens, 1))
    hidden, weight, bias = (
        torch.empty(s, dtype=BF16) for s in ((tokens, features), (vocabulary, features), (vocabulary,))
    )
    rows = Rows.empty(torch.zeros(tokens, dtype=torch.int64), vocabulary, -100)
    kept = room_for_logits(tokens, weight) if keep else torch.empty(tokens, 0)
    given = torch.empty_like(hidden), rows, torch.ones(tokens), None, hidden, weight, bias, None, None
    op.gradients_into(*given, kept, [True, True, True], key)
    assert ("grad_logits_sm90.cu" in launches) == (tokens > 0)
    assert ("logp.cu" in launches) == (keep and tokens > 0)


def test_every_launch_of_reductions_adds_up(launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """And what runs a second time loads no other kernels, so that it can be captured then."""
    cases = list(reductions.reductions(thorough=False, fused=True))[::5]
    loaded, load = [], runtime.load
    monkeypatch.setattr(runtime, "load", lambda spec, device: loaded.append(spec) or load(spec, device))
    counts = []
    for _ in range(2):
        for call in reductions.calls(cases, reductions.on_cuda(fused=True), torch.device("cpu")):
            call()
        counts.append((len(set(loaded)), len(launches)))
    assert counts[1] == (counts[0][0], 2 * counts[0][1])
    fused = {"statistics_sm90.cu", "grad_logits_sm90.cu"}
    of_rows = {"rows.cu", "long_sums.cu", "columns.cu", "columns_few.cu", "embeddings.cu", "gather.cu"}
    of_rows |= {"norm_gradients.cu", "slots.cu", "sort_slots.cu", "routing.cu"}
    assert set(launches) == of_rows | {"logp.cu"} | fused


# What kernels of rows read. The rest of their operands is copied first, or gives only a dtype.
READ = {
    **dict.fromkeys(("sum", "mean", "softmax", "log_softmax", "sum over tokens", "rms_norm, no weight"), "x"),
    "softmax backward": "grad y",
    "log_softmax backward": "grad",
    "layer_norm": "x weight bias",
    "layer_norm, bias": "x bias",
    "layer_norm, weight": "x weight",
    "rms_norm": "x weight",
    "layer_norm backward": "x weight grad vectors",
    "rms_norm backward": "x grad",
    "layer_norm weights": "x grad vectors",
    "rms_norm weights": "x grad",
    "layer_norm gradients": "x weight grad vectors",
    "rms_norm gradients": "x grad",
    "sum over slots": "x",
    "slots taken": "x",
    "slots combined": "x",
    "experts chosen": "x",
    "embedding": "x",
    "embedding backward": "grad",
}


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("name", READ)
def test_a_kernel_gets_the_addresses_of_what_it_reads(
    launches: list[Any], name: str, dtype: torch.dtype
) -> None:
    operands = reductions.RowOperands(reductions.Reduction(name, dtype, dtype, "", 5, 40))
    result = reductions.KERNELS[name](reductions.on_cuda(fused=False), operands, "")[0]
    given = {value for launch in launches for value in launch.values}
    assert {t.data_ptr() for t in (result, *(getattr(operands, x) for x in READ[name].split()))} <= given


@pytest.mark.parametrize("in_place", [False, True])
def test_fused_layers_get_the_addresses_of_what_they_read(launches: list[Any], in_place: bool) -> None:
    """One launch each, of heads within a larger matrix, too."""
    x, r, w = torch.empty(5, 7, 64, dtype=BF16)[:, 1:5], torch.empty(5, 4, 64, dtype=BF16), torch.empty(64)
    table, at = torch.empty(50, 64, dtype=BF16), torch.empty(5, dtype=torch.int32)
    packed = torch.empty(5, 128, dtype=BF16)
    options = 1e-6, 0.0, True
    if in_place:
        add_rms_norm.add_rms_norm_into(x, r, w, x, r, *options)
        rotary.rotary_into(x, r, *table.chunk(2, 1), at, x, r, 32, "halves")
        gated.gated_into(packed, None, packed[:, 64:], "silu", 1.0, 1.0, False)
        results: tuple[Tensor, ...] = ()
    else:
        results = add_rms_norm.add_rms_norm(x, r, w, *options, BF16)
        results += rotary.rotary(x, r, *table.chunk(2, 1), at, 32, "halves")
        results += (gated.gated(packed, None, "silu", 1.0, 1.0, False, False),)
    assert launches == ["add_rms_norm.cu", "rotary.cu", "gated.cu"]
    given = {value for launch in launches for value in launch.values}
    halves = table[:, 32:], packed[:, 64:]
    assert {t.data_ptr() for t in (x, r, w, table, at, packed, *halves, *results)} <= given
    assert [dict(launch.spec.constants)["VECTOR"] for launch in launches] == [8, 8, 8]
    assert dict(launches[2].spec.constants)["FAST_SILU"] == 1


def test_sums_over_few_tokens_of_very_many_columns(launches: list[Any]) -> None:
    n = 2**31 + 1
    x = torch.empty(2, n, dtype=BF16, device="meta")
    columns.few_sums(x, torch.empty(n, dtype=BF16, device="meta"))
    (launch,) = launches
    assert launch.values[2:] == (n, 0, n, n, 2)


def test_gates_that_are_rounded_once(launches: list[Any]) -> None:
    """Not by Hopper's own silu, which is that of bf16. In float32 the kernel is the same."""
    for dtype, once in itertools.product((BF16, torch.float32), (False, True)):
        x = torch.empty(5, 64, dtype=dtype)
        gated.gated(x, x, "silu", 1.0, 1.0, once, False)
        gated.gated_backward(x, x, x, "silu", 1.0, 1.0, once, False, True, True)
    found = [dict(launch.spec.constants) for launch in launches]
    assert ["BETWEEN" in c for c in found] == [False, False, True, True, *(False,) * 4]
    assert [c["FAST_SILU"] for c in found] == [1, *(0,) * 7]


def test_heads_and_their_gradients_take_a_launch_each(launches: list[Any]) -> None:
    q, k, w, v = (torch.empty(s, dtype=BF16) for s in ((5, 4, 128), (5, 2, 128), (128,), (128,)))
    cos, sin = torch.empty(5, 128, dtype=BF16), torch.empty(5, 128, dtype=BF16)
    options = 1e-6, 0.0, False, 64, "halves"
    found = norm_rotary.norm_rotary(q, k, w, v, cos, sin, None, *options)
    of = *options, "rounded", True, True
    found += norm_rotary.norm_rotary_backward(*found, q, k, w, v, cos, sin, None, *of)
    alone = norm_rotary.norm_rotary_backward(None, k, q, k, w, v, cos, sin, None, *of)
    found += rotary.rotary_backward(q, k, cos, sin, None, 64, "halves", "rounded")
    gates = torch.empty(5, 64, dtype=BF16)
    found += gated.gated_backward(
        gates, torch.empty(5, 128, dtype=BF16), None, "silu", 7.0, 1.0, False, True, True, True
    )
    assert launches == [
        "norm_rotary.cu",
        *("norm_rotary_backward.cu", "norm_rotary_backward.cu", "rotary.cu", "gated_backward.cu"),
    ]
    given = [set(launch.values) for launch in launches]
    for of_launch, tensors in zip(
        given, (found[:2], found[:6], alone[1::2], found[6:8], found[8:9]), strict=True
    ):
        assert {t.data_ptr() for t in (*tensors,)} <= of_launch
    assert {t.data_ptr() for t in (q, k, w, v, cos, sin)} <= given[0] & given[1]
    assert alone[0].numel() == alone[2].numel() == 0


@pytest.mark.parametrize("weight", [torch.empty(80)[::2], torch.empty(1).expand(40)], ids=["step", "expand"])
def test_a_weight_with_gaps_is_copied_before_gradients_of_a_norm(launches: list[Any], weight: Tensor) -> None:
    x, scales = torch.empty(5, 40), torch.empty(5)
    rows.norm_gradients(x, x, weight, scales, scales, F32)
    assert launches
    assert weight.data_ptr() not in {value for launch in launches for value in launch.values}


@pytest.mark.parametrize("count", [1, 3, 64])
def test_blocks_of_a_long_sum_run_at_once(launches: list[Any], count: int) -> None:
    """The last block of a row adds what the others sum. It must not wait until one of them has ended."""
    rows.row_sum(torch.empty(1, 1 << 22, dtype=BF16).expand(count, -1), False, BF16)
    assert math.prod(launches[0].grid) <= 2 * 132


@pytest.mark.long
@pytest.mark.parametrize("thorough", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_verify_runs_every_schedule_of_products(launches: list[str], thorough: bool) -> None:
    """In every layout, if a case has operands of it that the kernel takes."""
    todo = verify.cases(thorough)
    offered = [kernel for kernel in verify.kernels(0) if kernel.can_precompile]
    taken, tried = set(), set()
    for case, pairs in zip(todo, plan.runs(todo, offered, thorough), strict=True):
        inputs = make_inputs(case, torch.device("cpu"), unfilled)
        p = Product.of(inputs.into(make_room(case, inputs).out), case.step)
        layout = case.layout if min(case.m, case.n, case.k) > 1 else "any"
        for kernel in offered:
            of = kernel.name, kernel.step, layout
            schedules = (None, *kernel.catalogue) if kernel.step == case.step else ()
            every = [s for s in schedules if (*of, s) not in tried]
            found = {(*of, s) for s in every if verify.takes(kernel, p, s)}
            taken |= found
            tried |= found & {(*of, s) for k, s in pairs if k is kernel}
    assert {of for of in taken if of[2] != "any"} <= tried
    every_one = {(kernel.name, kernel.step, s) for kernel in offered for s in (None, *kernel.catalogue)}
    assert {(name, step, s) for name, step, _, s in taken} == every_one


@pytest.mark.parametrize(
    ("k", "sequences", "packed", "taken"),
    [
        (524_288, 65_536, True, True),
        (16, 2**30, False, True),
        (16, 2**31 - 2048, False, True),
        (17, 2**30 - 1024, False, True),
        (17, 2**30 - 1023, False, False),
        (2**30, 2**31 - 2048 - 2**26, True, True),
        (2**30, 2**31 - 2047 - 2**26, True, False),
    ],
)
def test_every_group_of_sequences_can_be_counted(
    k: int, sequences: int, packed: bool, taken: bool, launches: list[str]
) -> None:
    one, out = torch.ones((), dtype=BF16), torch.empty(1, 9, 8)
    # Offsets cannot be this many without memory for them: only their number matters.
    a, b = one.expand(9, k) if packed else one.expand(1, sequences, 9, k), one.expand(k, 8)
    x = Operands(a, b if packed else one.expand(1, sequences, k, 8), out[0] if packed else out)
    p = Product.of(x, "mma")
    if packed:
        p = dataclasses.replace(p, cu_seqlens=Matrix(torch.int32, (sequences + 1,), (1,)))
    if taken:
        TENSOR_CORE.plan(p)
        return
    with pytest.raises(ValueError, match="has a size above"):
        TENSOR_CORE.plan(p)


@pytest.mark.parametrize("step", ["mma", "fma"])
def test_batches_that_32_bits_do_not_count_are_refused(launches: list[str], step: Any) -> None:
    """Also of tiny matrices, by a sentence."""
    one = torch.ones((), dtype=BF16 if step == "mma" else F32)

    def problem(batch: int) -> Product:
        x = Operands(*(one.expand(batch, 2, 2) for _ in range(3)))
        return Product.of(x, step)

    assert matmul.fastest(problem(2**31 - 2048)).name == "tiny"
    p = problem(2**31)
    with pytest.raises(ValueError, match="has a size above"):
        matmul.fastest(p).plan(p)


def test_sequences_too_long_for_one_axis_stay_apart(launches: list[str]) -> None:
    a, b = torch.ones((), dtype=BF16).expand(1, 2**20, 9, 4096), torch.ones(1, 1, 1, 8, dtype=BF16)
    b = b[..., :1].expand(1, 2**20, 4096, 8)
    assert matmul.addbmm(None, a, b, None, out_dtype=F32, contract="TENSOR_CORE:mma").shape == (1, 9, 8)
    assert launches == ["tensor_core.cu"]


def test_chains_of_no_element_are_rounded_without_a_launch() -> None:
    for shape in ((3, 0), (0, 4), (2, 0, 5)):
        assert matmul.rounded(torch.empty(shape), BF16).shape == shape


@pytest.mark.parametrize("last", [True, False])
def test_short_convolutions_read_vectors_and_their_gradients_take_three_launches(
    launches: list[Any], last: bool
) -> None:
    x = torch.empty(2, 512, 64, dtype=BF16) if last else torch.empty(2, 64, 512, dtype=BF16)
    x = x.mT if last else x
    weight, bias = torch.empty(64, 4, dtype=BF16), torch.empty(64, dtype=BF16)
    y = causal_conv1d.convolved(x, weight, bias, None, None, True)
    assert y.stride() == x.stride()
    causal_conv1d.gradients(y, x, weight, bias, None, None, True, True, True, True)
    state = torch.empty(2, 64, 3, dtype=BF16)
    causal_conv1d.move_on(x[..., :1].contiguous(), state, weight, bias, True)
    sources = ["causal_conv1d.cu"] * 3 + ["causal_conv1d_sums.cu", "causal_conv1d_step.cu"]
    assert launches == sources
    of = [dict(launch.spec.constants) for launch in launches]
    assert [o["VECTOR"] for o in of] == ([4, 4, 4, 8, 8] if last else [8] * 5)
    assert [o.get("RESULT") for o in of] == ["FAST_SILU", "SILU_GRADIENT", "SUM", None, "FAST_SILU"]
