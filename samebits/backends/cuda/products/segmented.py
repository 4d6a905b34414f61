"""Products in segments by kernels of plain products, and host side of ``kernels/tree.cu``.

A kernel computes the segments' sums, in float32, as a batch of products over a part of k each, and the tree
adds them. So this takes every product, and memory for the sums. Kernels that need none of that keep the sums
on the way: see ``tensor_core_sm90.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from samebits.backends.cuda import compiler, runtime
from samebits.backends.cuda.products.plan import (
    TYPES,
    CudaPlan,
    ScratchPlan,
    matrix_strides,
    nothing,
    writes_vectors,
)
from samebits.backends.product import LARGEST, Matrix, Product, need

__all__ = ["Partials", "TreeLaunch", "part_of", "segmented_plan", "tree_launch", "tree_spec"]

TreeLaunch = Callable[[int, int, int, int], None]
"""Launch on the addresses of partial sums, out, bias and offs. A missing one is 0."""


def tree_spec(segments: int) -> compiler.KernelSpec:
    """The kernel that adds this number of partial sums."""
    params = "PqqPqqqPqqPq3i4i"
    return compiler.KernelSpec("tree.cu", "tree", params, (("SEGMENTS", segments),), block=256)


class Partials:
    """Where the partial sums of ``rows`` rows and ``n`` columns lie in memory made for them."""

    __slots__ = ("floats", "row", "segment")

    def __init__(self, segments: int, rows: int, n: int) -> None:
        self.row = -(-n // 4) * 4
        self.segment = -(-rows * self.row // 64) * 64
        self.floats = segments * self.segment


def tree_launch(
    device: int,
    segments: int,
    strides: tuple[int, int],
    out: Matrix,
    bias: Matrix | None,
    groups: int | None = None,
) -> TreeLaunch:
    """The sum of partial sums with these `strides` of segments and rows, into ``out[M, N]`` or [B, M, N].

    Four of a row are read at once if strides are multiples of four. So rows may be padded to one.
    `groups`: the number of groups of rows, each with its ``bias[groups, N]``.
    """
    m, n = out.shape[-2:]
    rows = m * (out.shape[0] if out.ndim == 3 else 1)
    count = rows * -(-n // 4)
    need(max(m, n) <= LARGEST and count <= 256 * LARGEST, f"out: expected fewer elements, got {out.shape}")
    if count == 0:
        return lambda partials, out, bias, offs: None
    kernel = runtime.load(tree_spec(segments), device)
    bias_strides, kind = (0, 0), 0
    if bias is not None:
        bias_strides, kind = (bias.strides[-1], bias.strides[0] if groups else 0), TYPES[bias.dtype]
    sizes = (
        *(count, m, n, groups or 0),
        *(strides[0] % 4 == strides[1] % 4 == 0 and strides[1] >= -(-n // 4) * 4, writes_vectors(out)),
        *(TYPES[out.dtype], kind),
    )
    grid, out_strides = (-(-count // 256), 1, 1), matrix_strides(out)

    def launch(partials: int, out: int, bias: int, offs: int) -> None:
        kernel.launch(grid, partials, *strides, out, *out_strides, bias, *bias_strides, offs, *sizes)

    return launch


def segmented_plan(p: Product, segments: int, plan_of: Callable[[Product], CudaPlan]) -> CudaPlan:
    """The plan of plain product `p` in segments. `plan_of`: the plan of a product in one."""
    need(p.start == "zero" and not p.sequences, "start, sequences: expected none of a sum in segments")
    if p.out.empty:
        return CudaPlan(nothing)
    k = p.k // segments
    steps = k * p.a.strides[-1] * p.a.dtype.itemsize, k * p.b.strides[-2] * p.b.dtype.itemsize
    at = Partials(segments, p.batch * p.m, p.n)
    tree = tree_launch(p.device, segments, (at.segment, at.row), p.out, p.bias)
    f32 = torch.float32
    if p.batch == 1:
        a = part_of(p.a, (segments, p.m, k), (steps[0] // p.a.dtype.itemsize, *p.a.strides[-2:]))
        b = part_of(p.b, (segments, k, p.n), (steps[1] // p.b.dtype.itemsize, *p.b.strides[-2:]))
        out = Matrix(f32, (segments, p.m, p.n), (at.segment, at.row, 1))
        turns = 1
    else:  # a batch has one stride, so segments take turns
        a = part_of(p.a, (*p.a.shape[:-1], k), p.a.strides, steps[0])
        b = part_of(p.b, (*p.b.shape[:-2], k, p.n), p.b.strides, steps[1])
        out = Matrix(f32, (p.batch, p.m, p.n), (p.m * at.row, at.row, 1))
        turns = segments
    inner = plan_of(replace(p, a=a, b=b, out=out, bias=None))

    def launch(room: int, a: int, b: int, out: int, bias: int, cu_seqlens: int, start: int) -> None:
        for s in range(turns):
            inner.launch(a + s * steps[0], b + s * steps[1], room + s * at.segment * 4, 0, 0, 0)
        tree(room, out, bias, 0)

    return _InTurns(p.device, at.floats, launch, inner, [(s * steps[0], s * steps[1]) for s in range(turns)])


class _InTurns(ScratchPlan):
    """The plan of segments that another plan computes, from addresses `steps` on."""

    __slots__ = ("_inner", "_steps")

    def __init__(
        self,
        device: int,
        floats: int,
        launch: Callable[[int, int, int, int, int, int, int], None],
        inner: CudaPlan,
        steps: list[tuple[int, int]],
    ) -> None:
        super().__init__(device, floats, launch)
        self._inner, self._steps = inner, steps

    def encode(self, *addresses: int) -> None:
        for of_a, of_b in self._steps:
            self._inner.encode(addresses[0] + of_a, addresses[1] + of_b)


def part_of(x: Matrix, shape: tuple[int, ...], strides: tuple[int, ...], step: int = 0) -> Matrix:
    """`x` with another shape, from an address that may be any multiple of `step` bytes further on."""
    odd = x.misalignment or step % 16
    return Matrix(x.dtype, shape, strides, x.dtype.itemsize if odd else 0)
