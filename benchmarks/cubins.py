"""Hashes of the CUDA kernels' machine code, to prove that a change of their sources changes no instruction.

python -m benchmarks cubins DIR [--against FILE] [--only SOURCE]

It compiles a fixed list of kernels without a GPU, with a process for each CPU. The list has every source,
architecture, kind of schedule and branch of the preprocessor. DIR/cubins.json gets two hashes of each kernel:
of the whole cubin, and of its machine code alone. Only the first depends on names of functions and variables,
and on constants of the source that no instruction loads.

With ``--against`` and an earlier file, it lists the differences, and exits with 1 if machine code differs.
NVRTC is not deterministic for some kernels: these give other machine code when they are compiled again.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import multiprocessing
import os
import struct
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from samebits.backends.attention import Attention
from samebits.backends.cuda import (
    adapters,
    assert_spans,
    causal_conv1d,
    columns,
    compiler,
    delta,
    delta_prepare,
    delta_schedules,
    embeddings,
    exchange,
    exp2,
    gated,
    gather,
    grouped,
    linear_attention,
    linear_logp_sm90,
    linear_schedules,
    logp,
    losses,
    norm_gradients,
    norm_rotary,
    quantize,
    rotary,
    routing,
    rows,
    rsqrt,
    selective_scan,
    slots,
    ssd_steps,
    vector_norm,
)
from samebits.backends.cuda.attention import (
    backward_sm90,
    latent_sm90,
    sm90,
    universal,
    universal_backward,
)
from samebits.backends.cuda.products import (
    fma,
    fma_sm90,
    grouped_sm90,
    grouped_terms_sm90,
    kinds_sm90,
    padded_sm90,
    plan,
    scaled_grouped_sm90,
    scaled_sm90,
    segmented,
    tensor_core,
    tensor_core_sm90,
    tiny,
)
from samebits.contract import INTERPOLATION, POLYNOMIAL
from samebits.ops.activation import POINTWISE
from samebits.ops.gated import ACTIVATIONS

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HOPPER = "sm_90a"
SMEM = 227 << 10
FLAGS = [(a, b) for a in (False, True) for b in (False, True)]

EPILOGUES: list[dict[str, Any]] = [
    {"out_dtype": BF16},
    {"out_dtype": F32},
    {"out_dtype": BF16, "bias_dtype": BF16, "folded": True},
    {"out_dtype": F32, "accumulate": True},
    {"out_dtype": F32, "accumulate": True, "aligned": False},
    {"out_dtype": BF16, "aligned": False, "bias_dtype": BF16},
    {"out_dtype": BF16, "aligned": False},
    {"out_dtype": F16, "dtype": F16, "bias_dtype": F16, "folded": True},
]
"""Each kind of epilogue and operand of the tensor-core kernel on Hopper once."""

RAGGED: list[dict[str, Any]] = [
    {"out_dtype": F32, "accumulate": True, "cu_seqlens_dtype": torch.int32},
    {"out_dtype": BF16, "cu_seqlens_dtype": torch.int64},
]
"""The same over spans of k, where both operands are contiguous along their rows."""

TINY_DTYPES = (
    (BF16, BF16, BF16, "mma"),
    (F16, F16, F32, "mma"),
    (F32, F32, F32, "fma"),
    (BF16, BF16, BF16, "fma"),
    (F16, F32, F16, "fma"),
)
"""Of the operands and the output of tiny matrices, with the contract's step."""

Kernel = tuple[Any, str]
"""A KernelSpec, and an architecture to compile it for."""
Hashes = dict[str, dict[str, str]]
"""The hashes ``cubin`` and ``code`` of kernels, by name."""


def kernels() -> Iterator[Kernel]:
    """The fixed list of kernels."""
    layouts = [
        plan.TileLayout(k_major, vector, (0, 0, int(not k_major), int(k_major)))
        for vector in (True, False)
        for k_major in (True, False)
    ]
    yield from of_tensor_core(layouts)
    yield from of_fma(layouts)
    yield from of_groups(layouts)
    yield from fma_on_hopper()
    yield from tensor_core_on_hopper()
    yield from grouped_on_hopper()
    yield from fp8()
    yield from log_probabilities_on_hopper()
    yield from universal_attention()
    yield from attention_on_hopper()
    yield from of_tiny_matrices()
    yield from whole_files()
    yield from fused_layers()
    yield from recurrent_layers()


def tensor_core_operands(k_vector: Any, row_vector: Any, k_gather: Any, row_gather: Any) -> tuple[Any, ...]:
    """Ways to copy, of a and of b, each with a dtype."""
    return (
        (k_vector, k_vector, BF16),
        (row_vector, row_vector, F16),
        (k_gather, k_gather, F16),
        (row_gather, row_gather, BF16),
        (k_vector, row_gather, F16),
    )


def fma_operands(k_vector: Any, row_vector: Any, k_gather: Any, row_gather: Any) -> tuple[Any, ...]:
    """The same under FMA, with dtypes of a, b and the output, and whether k has segments."""
    return (
        (k_vector, k_vector, (F32, F32, F32), False),
        (k_vector, row_vector, (F32, F32, F32), False),
        (row_vector, row_vector, (F32, F32, F32), True),
        (k_gather, row_gather, (F32, F32, F32), False),
        (k_gather._replace(strides=(0, 0, 0, 2)), k_vector, (F32, BF16, BF16), True),
        (k_vector, row_vector, (F16, F16, F16), False),
    )


def of_tensor_core(layouts: list[Any]) -> Iterator[Kernel]:
    """All schedules and ways to copy, for alternating architectures."""
    archs = compiler.ARCHITECTURES[1:]
    cases = itertools.product(tensor_core.SCHEDULES, tensor_core_operands(*layouts))
    for i, (s, (a, b, dtype)) in enumerate(cases):
        for turn in range(2):
            yield tensor_core.kernel_spec(s, dtype, a, b), archs[(i + 3 * turn) % len(archs)]


def of_fma(layouts: list[Any]) -> Iterator[Kernel]:
    """All schedules and ways to copy under FMA, for alternating architectures."""
    archs = compiler.ARCHITECTURES
    for i, s in enumerate(fma.SCHEDULES):
        for j, (a, b, types, in_segments) in enumerate(fma_operands(*layouts)):
            yield fma.kernel_spec(s, types, a, b, in_segments), archs[(i + j) % len(archs)]


def of_groups(layouts: list[Any]) -> Iterator[Kernel]:
    """Both forms of grouped products under all schedules, for alternating architectures."""
    archs = compiler.ARCHITECTURES
    k_vector, row_vector, k_gather, row_gather = layouts
    of_rows, of_terms = (
        (("OF_ROWS", k_vector, k_vector), ("OF_ROWS", row_gather, row_vector)),
        (
            ("OF_TERMS", row_vector, row_vector),
            ("OF_TERMS", k_gather, row_vector),
        ),
    )
    for i, s in enumerate(tensor_core.SCHEDULES):
        for j, (form, a, b) in enumerate((*of_rows, *of_terms)):
            yield tensor_core.kernel_spec(s, BF16, a, b, form), archs[1 + (i + j) % (len(archs) - 1)]
    for i, way in enumerate(fma.SCHEDULES):
        for j, (form, a, b) in enumerate((*of_rows, *of_terms)):
            types = (F32, F32, F32) if j % 2 == 0 else (BF16, BF16, F32)
            yield fma.kernel_spec(way, types, a, b, form == "OF_TERMS", form), archs[(i + j) % len(archs)]
    for arch in archs[1:]:
        yield grouped.RUNS, arch


def fma_on_hopper() -> Iterator[Kernel]:
    """All schedules and layouts. One layout also as tests/support/sanitize.py compiles it for racecheck."""
    for i, s in enumerate((*fma_sm90.MANY, *fma_sm90.FEW)):
        for turned in FLAGS:
            yield s.spec(*turned), HOPPER
        spec = s.spec(*FLAGS[i % 4])
        constants = (*spec.constants, ("ALL_LANES_ARRIVE", 1))
        yield type(spec)(spec.source, spec.entry, spec.params, constants, spec.block), HOPPER


def tensor_core_on_hopper(layouts: Iterable[tuple[bool, ...]] = FLAGS) -> Iterator[Kernel]:
    """All schedules, with alternating kinds of epilogue and operand."""
    for a_mn, b_mn in layouts:
        # Beside those that kernels in segments are compiled with, the one that takes the most registers.
        every = [*EPILOGUES, {"out_dtype": F32, "bias_dtype": F32}]
        turns = itertools.cycle(every + RAGGED if a_mn and b_mn else every)
        for i, s in enumerate(kinds_sm90.catalogue(a_mn, b_mn)):
            case = tensor_core_sm90.Sm90Variant(**{"dtype": BF16, "a_mn": a_mn, "b_mn": b_mn, **next(turns)})
            yield tensor_core_sm90.spec(case, s), HOPPER
            if i % 8 == 0:  # as tails
                yield tensor_core_sm90.spec(case, s, beside=True), HOPPER


def grouped_on_hopper() -> Iterator[Kernel]:
    """All schedules of groups of rows, and every fourth of groups of terms."""
    kernel = grouped_sm90.GROUPED_SM90
    for i, s in enumerate(kernel.catalogue):
        for a_mn, b_mn in ((False, bool(i % 2)), (True, True)):
            if not s.fits(a_mn, b_mn) or (a_mn and (s.swap or i % 4)):
                continue
            bounds = torch.int32 if a_mn else None
            v = tensor_core_sm90.Sm90Variant(BF16, (BF16, F32)[i % 2], a_mn, b_mn, cu_seqlens_dtype=bounds)
            yield grouped_sm90.spec(v, grouped_sm90.with_table(s, v, 128), 128), HOPPER
    terms = grouped_terms_sm90
    for i, s in enumerate(terms.GROUPED_TERMS_SM90.catalogue):
        v = tensor_core_sm90.Sm90Variant(BF16, (BF16, F32)[i % 2], True, True)
        yield terms.spec(v, terms.with_table(s, 128), 128), HOPPER


def fp8() -> Iterator[Kernel]:
    """All schedules of products in FP8, with every kind of scales and epilogue, and quantization."""
    every = dict.fromkeys((*scaled_sm90.SCHEDULES, *scaled_grouped_sm90.SCHEDULES))
    for s, b_rows in itertools.product(every, (False, True)):
        m = s.tile.block_n if s.parts > 1 else 4096
        for a, b, out, bias in ((E4M3, E4M3, BF16, None), (E4M3, E5M2, F16, F32), (E5M2, E4M3, F32, None)):
            p = scaled_sm90.Scaled(
                0, m, 4096, 7168, a, b, 7168, 7168, (56, 1), (56, 1), b_rows, out, 4096, 0, bias
            )
            if s in scaled_sm90.SCALED_SM90.all(p):
                yield scaled_sm90.spec(p, s), HOPPER
            of_groups = scaled_grouped_sm90.ScaledGrouped(p, 32, b is E5M2, 4096 * 7168, 32 * 56)
            if s in scaled_grouped_sm90.SCALED_GROUPED_SM90.all(of_groups):
                yield scaled_grouped_sm90.spec(of_groups, s), HOPPER
    for x, values in itertools.product((BF16, F16, F32), (E4M3, E5M2)):
        for square, vector in FLAGS:
            yield quantize.kernel_spec(x, values, square=square, vector=vector), HOPPER
        for silu, vector in itertools.product(("EXACT", "FAST")[: 2 if x is BF16 else 1], (False, True)):
            yield quantize.kernel_spec(x, values, square=False, vector=vector, silu=silu), HOPPER


def log_probabilities_on_hopper() -> Iterator[Kernel]:
    """All schedules, dtypes and results."""
    operands = ((BF16, None), (BF16, BF16), (F16, F32))
    entries = ("statistics_sm90", False), ("statistics_sm90", True), ("grad_logits_sm90", False)
    for (entry, kept), (dtype, bias), entropy in itertools.product(entries, operands, (False, True)):
        for s in linear_logp_sm90.schedules(entry):
            case: Any = {
                "dtype": dtype,
                "bias": bias,
                "entropy": entropy,
                "folded": s.block_n < 32,
                "kept": kept,
            }
            yield linear_logp_sm90.spec(entry, s, **case), HOPPER


def universal_attention() -> Iterator[Kernel]:
    """All schedules of the universal kernels, for alternating architectures, with each macro both ways."""
    some = (
        (BF16, 64, 64, True, None, False, False, True),
        (F16, 128, 128, True, torch.bool, False, False, True),
        (BF16, 192, 128, True, None, True, True, False),
        (F16, 256, 256, False, F16, False, False, False),
        (F32, 64, 80, True, F32, True, False, False),
        (F32, 128, 128, False, None, False, True, False),
    )
    for i, case in enumerate(some):
        of = universal.Variant(*case)
        archs = compiler.ARCHITECTURES[of.dtype != F32 :]
        grad_mask = of.mask not in (None, torch.bool)
        specs = [*universal.specs(of, SMEM)]
        if not of.paged:
            specs += universal_backward.specs(of, SMEM, grad_mask=grad_mask)
        for j, spec in enumerate(specs):
            yield spec, archs[(3 * i + j) % len(archs)]


def attention_on_hopper() -> Iterator[Kernel]:
    """All schedules, over tensors and over pages, with each macro both ways."""
    for case in ((BF16, 128, 128, False), (F16, 64, 64, True), (BF16, 96, 80, False)):
        for paged in (False, True):
            of = sm90.HopperVariant(*case, paged)
            for spec in dict.fromkeys(sm90.spec(of, s) for s in sm90.schedules(of)):
                yield spec, HOPPER
    for dtype, head, values, softcap in ((BF16, 128, 128, 0.0), (F16, 64, 64, 1.0), (BF16, 96, 80, 0.0)):
        q, v = (torch.empty(1, 1, 1, size, dtype=dtype, device="meta") for size in (head, values))
        x = Attention(q, q, v, "", 1.0, softcap)
        for spec in dict.fromkeys(backward_sm90.specs(x)):
            yield spec, HOPPER
    table = torch.empty(1, 1, dtype=torch.int32, device="meta")
    for dtype, pages in itertools.product((BF16, F16), (None, table)):
        q = torch.empty(1, 1, 1, 576, dtype=dtype, device="meta")
        for spec in latent_sm90.specs(Attention(q, q, q[..., :512], "", 1.0, block_table=pages)):
            yield spec, HOPPER


def of_tiny_matrices() -> Iterator[Kernel]:
    """Some products under each schedule, and the choices for squares."""
    archs, spec = compiler.ARCHITECTURES, tiny.kernel_spec

    def products(*sizes: int) -> Iterator[Any]:
        every: Iterator[Any] = itertools.product(itertools.product(sizes, repeat=3), FLAGS, TINY_DTYPES)
        for (m, n, k), (a_by_k, b_by_k), (a, b, out, step) in every:
            yield tiny.TinyMatrices(m, n, k, a, b, out, a_by_k, b_by_k, step)

    some = list(products(4, 63, 64))
    pairs = [(s, p) for i, s in enumerate(tiny.SCHEDULES) for p in some[i * 7 % 30 :: 31]]
    for i, (s, p) in enumerate(pairs):
        dense = p.compiled_in and (i % 2 == 1 or not s.staged)
        vectors = (16, 16, 16) if dense else (p.a.itemsize, p.b.itemsize, p.out.itemsize)
        if not (s.staged or (p.compiled_in and p.direct(s, vectors))):
            continue
        broadcast = (i % 5 == 0, i % 7 == 0) if dense else None
        kernel = spec(s, p, vectors, broadcast, accumulate=p.out is F32, programmatic=True)
        for arch in {HOPPER, archs[i % len(archs)]} - (set() if p.step == "fma" else {"sm_75"}):
            yield kernel, arch
    for size in (4, 8, 16, 64):
        for i, p in enumerate(products(size)):
            s, arch = (
                tiny.choose_schedule(p, 4096, 132),
                (HOPPER, "sm_80", "sm_100a")[(i + size // 4) % 3],
            )
            yield spec(s, p, (16, 16, 16), (False, False), accumulate=False, programmatic=True), arch


def whole_files() -> Iterator[Kernel]:
    """All kernels of row and column reductions, of log-probabilities from logits, exp2, trees,
    sums of ranks and copies."""
    for arch in compiler.ARCHITECTURES:
        for x, out, param in ((F32, BF16, F16), (F16, F32, F32), (BF16, F16, BF16)):
            for n in (100, 2048, 40000):
                for schedule in rows.schedules(n, x):
                    yield rows.kernel_spec("row_sum", x, out, param, schedule), arch
            for vector in (1, 16 // x.itemsize):
                yield rows.long_spec(x, out, vector), arch
        for grad, out, of in ((F16, BF16, F32), (BF16, F16, None), (F32, F32, BF16)):
            for vector in (1, 16 // grad.itemsize):
                yield columns.kernel_spec(grad, out, of, vector=vector), arch
                if of is None:
                    yield columns.few_spec(grad, out, vector), arch
        for grad, out in ((F16, F16), (BF16, BF16), (F32, F32)):
            for vector in (1, 16 // grad.itemsize):
                for entry in ("embedding_backward", "embedding_many", "embedding_few"):
                    yield embeddings.kernel_spec(entry, grad, out, vector), arch
        for x, param, sums in ((F32, BF16, F16), (BF16, F32, F32), (F16, F16, BF16)):
            for n in (1000, 4096, 5120, 8192):
                s = norm_gradients.choose(n, x.itemsize)
                yield norm_gradients.kernel_spec(x, param, sums, s), arch
        for logits, grads in ((F32, F32), (BF16, F16), (F16, BF16)):
            for entropy in (False, True):
                yield logp.kernel_spec("grad_logits", logits, grads, entropy=entropy), arch
        for bounds in (torch.int32, torch.int64):
            yield assert_spans.spec(bounds), arch
            for unit in (1, 2, 4, 16):
                yield gather.kernel_spec(bounds, unit), arch
        for x, count in ((F32, 3), (BF16, 8), (F16, 16)):
            for vector, weighted in ((1, True), (16 // x.itemsize, False)):
                of = x if weighted else None
                yield slots.kernel_spec("take_slots", x, vector, 1, of), arch
                yield slots.kernel_spec("sum_slots", x, vector, count, of), arch
            yield slots.kernel_spec("sum_slots", x, 16 // x.itemsize, count, F32), arch
        yield slots.kernel_spec("route", F32, 1, 1, None), arch
        yield slots.sort_spec("sort_slots"), arch  # and the others of its source
        for score, blocks in (("softmax", 1), ("sigmoid", 2), ("logits", 4)):
            yield routing.kernel_spec(BF16, F32, score, blocks, score == "sigmoid"), arch
        for model in (INTERPOLATION, POLYNOMIAL):
            yield exp2.spec(model), arch
        for segments in (2, 8, 64):
            yield segmented.tree_spec(segments), arch
        for ranks in (2, 8):  # both kernels of the file
            yield exchange.parts_spec(ranks, arch >= "sm_90"), arch
    yield padded_sm90.spec(), HOPPER


def fused_layers() -> Iterator[Kernel]:
    """Each activation, layout and form of gradients, for alternating architectures."""
    archs, n = compiler.ARCHITECTURES, itertools.count()

    def each(spec: Any) -> Kernel:
        return spec, archs[next(n) % len(archs)]

    for entry in ("add_rms_norm", "add_rms_norm_backward"):
        for x, out, param in ((BF16, BF16, BF16), (F16, F32, F32), (F32, F32, F32)):
            for m, size, aligned in itertools.product((1, 4096), (128, 4096, 40000), (False, True)):
                schedule = rows.choose(entry, m, size, x, aligned, F32 in (out, param))
                yield each(rows.kernel_spec(entry, x, out, param, schedule))
    forms = ("ALONE", BF16), ("APART", F16), ("ALTERNATING", F32), ("APART", BF16)
    entries = "gated", "gated_backward"
    for entry, activation, (form, x) in itertools.product(entries, ACTIVATIONS, forms):
        for vector in (1, 16 // x.itemsize):
            if form != "ALONE" or activation != "gpt_oss":
                yield each(gated.kernel_spec(entry, x, activation, form, vector))
    for x, vector in ((BF16, 8), (F32, 1)):
        yield each(gated.kernel_spec("gated", x, "softplus", "ALONE", vector))
    yield gated.kernel_spec("gated", BF16, "silu", "APART", 8, fast_silu=True), HOPPER
    for x, groups, slices, vector in (
        (BF16, 1, 3, True),
        (F16, 4, 1, False),
        (BF16, 8, 2, True),
        (F32, 1, 3, True),
    ):
        arch = archs[next(n) % len(archs)] if x == F32 else HOPPER
        yield adapters.kernel_spec(x, x == F32, groups, slices, vector), arch
    turned = ((BF16, BF16), (F16, F32), (F32, F32))
    for (x, trig), layout, full in itertools.product(turned, rotary.LAYOUTS, (False, True)):
        for gradients in ("none", "rounded", "wide", "split"):
            for vector in (1, 16 // x.itemsize):
                yield each(rotary.kernel_spec(x, trig, layout, full, vector, gradients))
            if layout == "pairs to halves":
                continue
            entry = "norm_rotary" if gradients == "none" else "norm_rotary_backward"
            for lanes in (8, 16):
                yield each(norm_rotary.kernel_spec(entry, x, x, trig, layout, full, lanes, gradients))
    for x in (F32, BF16, F16):
        for arch in archs:
            yield rsqrt.kernel_spec(x), arch
            yield vector_norm.kernel_spec(x), arch
            for entry in ("pick", "mean_of_losses", "spread"):
                yield losses.kernel_spec(entry, x), arch
    once = ("APART", F16, 8), ("APART", BF16, 8), ("ALTERNATING", BF16, 1)
    for entry, activation, (form, x, vector) in itertools.product(entries, POINTWISE, once):
        yield each(gated.kernel_spec(entry, x, activation, form, vector, once=True))
    for x, aligned in ((BF16, True), (F16, False), (F32, True)):
        for entry, size in itertools.product(("l2norm", "l2norm_backward"), (128, 256)):
            yield each(rows.kernel_spec(entry, x, x, x, rows.choose(entry, 4096, size, x, aligned)))


def recurrent_layers() -> Iterator[Kernel]:
    """Convolutions, state spaces and delta rules, with each macro both ways."""
    archs, n = compiler.ARCHITECTURES, itertools.count()
    forms: tuple[tuple[causal_conv1d.Result, bool], ...] = (
        *(("SUM", False), ("SILU", False)),
        *(("SILU_GRADIENT", False), ("SUM", True)),
    )
    every = itertools.product((BF16, F16, F32), (2, 4), (False, True), forms)
    for x, taps, of_channels, (result, backwards) in every:
        wide = 4 if of_channels else 16 // x.itemsize
        for vector, packed in ((1, True), (wide, False), (wide, True)):
            of_tokens = x, taps, vector, of_channels, result, backwards, packed, 1 if of_channels else 32
            yield causal_conv1d.kernel_spec(*of_tokens), archs[next(n) % len(archs)]
            if result == "SILU":
                yield causal_conv1d.kernel_spec(*of_tokens, fast_silu=True), HOPPER
            if result == "SUM":
                vector = 1 if vector == 1 else 16 // x.itemsize
                spec = causal_conv1d.sums_spec(x, taps, vector, of_channels, packed, 32 if backwards else 64)
                yield spec, archs[next(n) % len(archs)]
    for x, silu, kept in itertools.product((BF16, F16, F32), (False, True), (0, 3, 4)):
        of_step = x, 4, 16 // x.itemsize if kept else 1, kept, silu
        yield causal_conv1d.step_spec(*of_step, fast_silu=True), HOPPER
        yield causal_conv1d.step_spec(*of_step), archs[next(n) % len(archs)]
    for of_steps, softplus in itertools.product(((BF16, F32, F16), (F32, BF16, F32)), (False, True)):
        yield ssd_steps.kernel_spec(*of_steps, softplus), archs[next(n) % len(archs)]
    types = (BF16, F16, F32), (F32, F32, None)
    for (x, steps, gate), size, flag in itertools.product(types, (5, 16, 128), (False, True)):
        form = selective_scan.Form(x, steps, gate, x, size, flag, not flag, flag, flag, not flag, flag)
        for schedule in selective_scan.catalogue(size):
            yield selective_scan.kernel_spec(form, schedule, flag), archs[next(n) % len(archs)]
        yield selective_scan.gradients_spec(form), HOPPER
        wide = flag and size != 5
        spec = selective_scan.step_spec(x, steps, gate, x, size, flag, not flag, wide)
        yield spec, archs[next(n) % len(archs)]
        yield selective_scan.sums_spec(x, size, 2), archs[next(n) % len(archs)]
    rules = itertools.product((False, True), ("none", "delta", "weighted"))
    for x, (by_channel, rule) in itertools.product((BF16, F32), rules):
        if by_channel and rule == "weighted":
            continue
        erases, weighted = rule == "delta", rule == "weighted"
        given = {
            "tensor_core": x is BF16,
            "hardware_exp2": x is BF16,
            "delta": erases,
            "by_channel": by_channel,
            "weighted": weighted,
        }
        for way in delta_schedules.catalogue():
            if way.memory(x, 64, x is BF16, by_channel, weighted) <= SMEM:
                yield delta.kernel_spec(way, x, 64, vector=erases, keep=not erases, **given), HOPPER
        for step in (
            delta_schedules.catalogue_of_steps(by_channel) if x is BF16 and erases >= by_channel else ()
        ):
            for dtype, size in ((BF16, 128), (F16, 40)):
                options: dict[str, Any] = {"hardware_exp2": dtype is BF16, "delta": erases}
                options |= {"weighted": weighted, "by_channel": by_channel}
                yield delta.step_spec(step, dtype, 128, size, **options), HOPPER
                if weighted:
                    yield (
                        delta.step_spec(step, dtype, 128, size, steps=(dtype, F32, F32, True), **options),
                        HOPPER,
                    )
        for systems, keep in ((False, False), (True, False), (True, True)) if by_channel and erases else ():
            if x is BF16 or not systems:
                options = {"tensor_core": x is BF16, "hardware_exp2": x is BF16, "systems": systems}
                yield delta_prepare.kernel_spec(x, 64, keep=keep, **options), HOPPER
        for linear in (
            linear_schedules.catalogue_of_linear() if x is BF16 and not (by_channel or erases) else ()
        ):
            options = {"hardware_exp2": True, "weighted": weighted}
            for part in (linear.states, linear.rows):
                yield linear_attention.kernel_spec(part, x, 64, **options), HOPPER
            yield linear_attention.kernel_spec(linear_attention.BEGIN, x, 64, **options), HOPPER
            yield linear_attention.kernel_spec(linear.states, F16, 80, keep=True, **options), HOPPER
        of_linear: tuple[Any, ...] = ()
        if x is BF16 and not (by_channel or erases):
            of_linear = tuple(linear_schedules.catalogue_of_linear_gradients())
        for linear_gradients in of_linear:
            for which in ("matrices", "values", "rows")[: 1 if linear_gradients.keys > 32 else 3]:
                options = {"hardware_exp2": True, "weighted": weighted}
                yield linear_attention.gradients_spec(which, linear_gradients, x, 64, 40, **options), HOPPER
        for of_chunks in delta_schedules.catalogue_of_chunks() if x is BF16 and erases else ():
            options = {"hardware_exp2": True, "by_channel": by_channel}
            for kernel in (linear_attention.DELTA_BEGIN, of_chunks)[by_channel:]:
                yield linear_attention.kernel_spec(kernel, x, 64, **options), HOPPER
                yield linear_attention.kernel_spec(kernel, F16, 80, keep=True, **options), HOPPER
        for states in delta_schedules.catalogue_of_states() if x is BF16 and erases else ():
            for dtype, size in ((x, 64), (F16, 80)):
                options = {"hardware_exp2": True, "by_channel": by_channel}
                yield linear_attention.kernel_spec(states, dtype, size, **options), HOPPER
        for which, of in (
            ("matrices", delta_schedules.DeltaGradients(16, True, 2)),
            ("matrices", delta_schedules.DeltaGradients(64, True, 1)),
            ("rows", delta_schedules.DeltaGradients(16, False, 1)),
        ):
            yield delta.gradients_spec(which, of, x, 64, 64, **given), HOPPER
        for of in delta_schedules.catalogue_of_gradients() if x is BF16 and erases else ():
            if of.registers and of.takes(64, True, True, by_channel):
                for which in ("scores", "matrices")[by_channel or of.tile > 32 :]:
                    yield delta.gradients_spec(which, of, x, 64, 64, **given), HOPPER
        yield delta.sums_spec(x, 4 if erases else 1), HOPPER
        if x is BF16 and erases:
            of = delta_schedules.DeltaGradients(16, True, 1)
            for which in ("chains", "rows"):
                yield delta.gradients_spec(which, of, x, 64, 64, **given), HOPPER


def name(kernel: Kernel) -> str:
    spec, arch = kernel
    return " ".join([spec.source, arch, *(f"{macro}={value}" for macro, value in spec.constants)])


def hashes(kernel: Kernel) -> dict[str, str]:
    """Hashes of the cubin, and of its machine code: instructions, literals and resource usage."""
    cubin = compiler.compile(*kernel)
    occupies = cubin.registers, cubin.local_bytes, cubin.spill_bytes, cubin.static_smem
    code = hashlib.sha256(repr(occupies).encode())
    for section, content in sorted(sections(cubin.code)):
        if section.startswith((".text", ".nv.constant0", ".nv.constant2")):  # instructions, sizes, literals
            kind = section.replace(f".{kernel[0].entry}", "")
            code.update(f"\n{kind} {len(content)}\n".encode() + content)
    return {"cubin": hashlib.sha256(cubin.code).hexdigest(), "code": code.hexdigest()}


def sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the sections of a 64-bit ELF file."""
    no_bits = 8  # the type of sections without contents in the file
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names_at = struct.unpack_from("<3H", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]
    names = headers[names_at][4]
    for at, kind, _, _, begin, length in headers:
        label = elf[names + at : elf.index(b"\0", names + at)].decode()
        yield label, b"" if kind == no_bits else elf[begin : begin + length]


def compare(before: Hashes, after: Hashes, chosen: dict[str, Kernel], console: Console) -> bool:
    """Print the differences. Returns whether all machine code is the same, as far as NVRTC allows to tell."""
    both = before.keys() & after.keys()
    identical = sum(before[k] == after[k] for k in both)
    other = {k for k in both if before[k]["code"] != after[k]["code"]}
    unstable = {k for k in other if any(hashes(chosen[k]) != after[k] for _ in range(3))}
    lists = {
        "differs": other - unstable,
        "not deterministic": unstable,
        "gone": before.keys() - after.keys(),
        "new": after.keys() - before.keys(),
    }
    for what, found in lists.items():
        for k in sorted(found):
            console.print(f"{what}: {k}", highlight=False, markup=False, soft_wrap=True)
    counts = ", ".join(f"{len(found)} {what}" for what, found in lists.items())
    same = len(both) - identical - len(other)
    console.print(
        f"{len(both)} kernels in both: {identical} identical, {same} the same but for symbols, {counts}",
        soft_wrap=True,
    )
    return not (lists["differs"] or lists["gone"] or lists["new"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dir", type=Path, metavar="DIR", help="where cubins.json is written")
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare with these hashes")
    parser.add_argument("--only", metavar="SOURCE", default="", help="only sources with this in their names")
    options = parser.parse_args()
    console = Console()
    chosen = {name(kernel): kernel for kernel in kernels() if options.only in kernel[0].source}
    found: Hashes = {}
    # NVRTC compiles one program at a time in a process.
    with (
        ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("forkserver")) as pool,
        Progress(console=console, transient=True) as progress,
    ):
        task = progress.add_task("compiling", total=len(chosen))
        jobs = {pool.submit(hashes, kernel): k for k, kernel in chosen.items()}
        for job in as_completed(jobs):
            found[jobs[job]] = job.result()
            progress.advance(task)
    options.dir.mkdir(parents=True, exist_ok=True)
    path = options.dir / "cubins.json"
    path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    console.print(f"{len(found)} kernels: {path}", soft_wrap=True)
    if options.against:
        before = json.loads(options.against.read_text())
        before = {k: v for k, v in before.items() if options.only in k.partition(" ")[0]}
        sys.exit(not compare(before, found, chosen, console))
