"""Grouped products on CUDA tensors, and the choice of kernels. Every kernel gives the same bits."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from samebits.backends import Later
from samebits.backends.cuda import compiler, runtime, shapes, tuned
from samebits.backends.cuda.matmul import check_contract
from samebits.backends.cuda.plans import Plans
from samebits.backends.cuda.products.grouped import GROUPED_FMA, GROUPED_TENSOR_CORE
from samebits.backends.cuda.products.grouped_sm90 import GROUPED_SM90
from samebits.backends.cuda.products.grouped_terms_sm90 import GROUPED_TERMS_SM90
from samebits.backends.cuda.products.plan import CudaKernel, CudaPlan, nothing
from samebits.backends.cuda.products.segmented import Partials, part_of, tree_launch
from samebits.backends.cuda.shapes import GroupedShape
from samebits.backends.grouped import GroupedOperands, GroupedProduct
from samebits.backends.product import Matrix
from samebits.backends.segments import check_terms
from samebits.contract import contract_from_key

GROUPED: tuple[CudaKernel[GroupedProduct, Any], ...] = (
    GROUPED_TENSOR_CORE,
    GROUPED_FMA,
    GROUPED_SM90,
    GROUPED_TERMS_SM90,
)
"""All kernels of grouped products. The first of each step is universal: it supports every product."""


def fastest(p: GroupedProduct) -> CudaKernel[GroupedProduct, Any]:
    """The kernel that should be fastest. This is the one place where they are chosen."""
    if GROUPED_TERMS_SM90.pays(p):
        return GROUPED_TERMS_SM90
    return [kernel for kernel in GROUPED[:-1] if kernel.step == p.step and kernel.supports(p)][-1]


def chosen(p: GroupedProduct) -> tuple[CudaKernel[GroupedProduct, Any], Any]:
    """The kernel and the schedule that should be fastest: a tuned table's, or its own choice, as None."""
    shape = GroupedShape.of(p)
    if shape is not None:
        shapes.met(shape)
    return tuned.find(shape, p.device, partial(ways, p)) or (fastest(p), None)


def ways(p: GroupedProduct, name: str = "") -> list[tuple[CudaKernel[GroupedProduct, Any], Any]]:
    """The fastest kernel, if it is that of this name, and the schedules that could be. Tuning times them."""
    kernel = fastest(p)
    return [(kernel, s) for s in kernel.candidates(p)] if name in ("", kernel.name) else []


def grouped_rows(
    a: Tensor, b: Tensor, offs: Tensor, *, bias: Tensor | None, out_dtype: torch.dtype, contract: str
) -> Tensor:
    """``a[t, K] @ b[g, K, N] (+ bias[g, N])`` for the rows t of every group g, and +0 for rows of none."""
    out = runtime.empty((a.shape[0], b.shape[2]), out_dtype, a.get_device())
    _launch(_call(GroupedOperands(a, b, out, _contiguous(offs), bias), contract))
    return out


def grouped_terms(
    a: Tensor, b: Tensor, offs: Tensor, sequences: Tensor | None, *, out_dtype: torch.dtype, contract: str
) -> Tensor:
    """``a[M, t] @ b[t, N]`` over the rows t of every group: chains over sequences from +0."""
    out = runtime.empty((offs.shape[0], a.shape[0], b.shape[1]), out_dtype, a.get_device())
    offs = _contiguous(offs)
    _launch(_call(GroupedOperands(a, b, out, offs, runs=runs(sequences, offs)), contract))
    return out


def grouped_terms_later(
    out: Tensor, a: Tensor, b: Tensor, offs: Tensor, sequences: Tensor | None, *, contract: str
) -> Later:
    """`grouped_terms` into ``out[G, M, N]``, from whose values the chains start."""
    if out.stride(1) < out.stride(2):  # products commute, and a kernel writes along rows
        out, a, b = out.mT, b.mT, a.mT
    offs = _contiguous(offs)
    x = GroupedOperands(a, b, out, offs, runs=runs(sequences, offs), accumulate=True)
    call = _call(x, contract)
    call[0].encode(a.data_ptr(), b.data_ptr(), out.data_ptr())
    return partial(_launch, call)


RUNS = compiler.KernelSpec("grouped_runs.cu", "grouped_runs", "3P2i", (), block=512)


def runs(sequences: Tensor | None, offs: Tensor) -> Tensor | None:
    """The sequences of the rows of every group, as :class:`GroupedOperands` has them."""
    if sequences is None:
        return None
    rows, groups, device = sequences.shape[0], offs.shape[0], offs.get_device()
    found = runtime.empty((rows + 2 * groups,), torch.int32, device)
    if groups:
        sequences = _contiguous(sequences)
        kernel = runtime.load(RUNS, device)
        kernel.launch((groups, 1, 1), offs.data_ptr(), found.data_ptr(), sequences.data_ptr(), groups, rows)
    return found


def _contiguous(t: Tensor) -> Tensor:
    return t if t.is_contiguous() else t.contiguous()


def _chosen_plan(p: GroupedProduct) -> CudaPlan:
    kernel, schedule = chosen(p)
    return kernel.plan(p, schedule)


def _segmented_plan(p: GroupedProduct, segments: int) -> CudaPlan:
    """The plan of groups of rows in segments: a product of each segment, and the tree of their sums."""
    if 0 in p.out.shape:
        return CudaPlan(nothing)
    k, at = p.k // segments, Partials(segments, p.m, p.n)
    steps = k * p.a.strides[-1] * p.a.dtype.itemsize, k * p.b.strides[-2] * p.b.dtype.itemsize
    a = part_of(p.a, (p.rows, k), p.a.strides, steps[0])
    b = part_of(p.b, (p.groups, k, p.n), p.b.strides, steps[1])
    part = replace(p, a=a, b=b, out=Matrix(torch.float32, (p.m, p.n), (at.row, 1)), bias=None)
    inner = _chosen_plan(part)
    tree = tree_launch(p.device, segments, (at.segment, at.row), p.out, p.bias, p.groups)

    def launch(a: int, b: int, out: int, offs: int, bias: int, runs: int) -> None:
        room = runtime.empty((at.floats,), torch.float32, p.device)
        for s in range(segments):
            sums = room.data_ptr() + s * at.segment * 4
            inner.launch(a + s * steps[0], b + s * steps[1], sums, offs, 0, 0)
        tree(room.data_ptr(), out, bias, offs)

    return CudaPlan(launch)


_Call = tuple[CudaPlan, GroupedOperands]


def _launch(call: _Call) -> None:
    plan, x = call
    plan.run(x)


_plans: Plans[CudaPlan] = Plans()


def _call(x: GroupedOperands, contract: str) -> _Call:
    """The plan of the fastest kernel for these operands."""
    a, b, out, bias = x.a, x.b, x.out, x.bias
    key = (
        contract,
        (a.data_ptr() & 15, b.data_ptr() & 15, out.data_ptr() & 15, a.get_device(), x.accumulate),
        (a.dtype, b.dtype, out.dtype, x.offs.shape[0], x.runs is None),
        (a.shape, a.stride(), b.shape, b.stride(), out.shape, out.stride()),
        None if bias is None else (bias.dtype, bias.stride()),
    )
    plan = _plans.get(key)
    if plan is None:
        check_contract(contract, a.get_device())
        p = GroupedProduct.of(x, contract_from_key(contract).step)
        segments = 1 if p.of_terms else check_terms(contract, p.k)
        plan = _plans.keep(key, _segmented_plan(p, segments) if segments > 1 else _chosen_plan(p))
    return plan, x
