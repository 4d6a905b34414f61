"""The chains of ``docs/contract.md`` as scalar loops. LLVM vectorizes them over the columns of a tile.

``chain_tiles`` functions compute output tiles ``first <= t < last`` of ``out[B, M, N]``, float32, in place.
Each element's chain starts from the value in ``out``, and runs over every row ``(s, start, stop)`` of
``sequences`` in turn: over k from start to stop of ``a[B, S, M, K]`` and ``b[B, S, K, N]``, widened to
float32. Tiles only divide the work. No element's value depends on its tile.
"""

from __future__ import annotations

import functools
import hashlib
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import llvmlite
import numba
import numpy as np
from llvmlite import ir
from numba import boolean, types, void
from numba import float32 as f32
from numba import int64 as i64
from numba import uint16 as u16
from numba import uint32 as u32
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.registry import cpu_target
from numba.core.serialize import dumps
from numba.extending import intrinsic

from samebits.backends import cache

_F = TypeVar("_F", bound=Callable[..., Any])

TILE_M, TILE_N, GROUP = 16, 64, 16


@functools.cache
def edition() -> str:
    """A hash of all that machine code depends on: the sources here, their constants, numba and the CPU."""
    folder = Path(__file__).parent
    state = hashlib.sha256()
    for source in (*sorted(folder.glob("*.py")), folder.parents[1] / "functions.py"):
        state.update(source.read_bytes())
    host = cpu_target.target_context.codegen().magic_tuple()
    state.update(repr((sys.implementation.cache_tag, numba.__version__, llvmlite.__version__, host)).encode())
    return state.hexdigest()[:12]


class _OnDisk(NullCache):
    """A cache of a function's machine code for its one signature, in the cache of all backends.

    numba's own cache loads files unchecked, so a damaged one crashes the process. It also ignores changes of
    callees, and of constants in other modules, which :func:`edition` includes.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        module = function.__module__.rpartition(".")[2]
        self.name = f"{module}.{function.__qualname__}-{edition()}.numba"

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        target_context.refresh()
        code = cache.read(self.name)
        return None if code is None else CompileResult._rebuild(target_context, *pickle.loads(code))

    def save_overload(self, signature: Any, compiled: Any) -> None:
        if not compiled.library.has_dynamic_globals:  # addresses in this process
            cache.write(self.name, dumps(compiled._reduce()))


def _njit(signature: Any = None) -> Callable[[_F], _F]:
    # No fastmath, because LLVM must neither reorder nor contract. nogil, because threads share the tiles.
    # An explicit signature takes any strides; otherwise numba compiles again for every layout. Functions
    # without a signature are inlined into those with one, and not cached.
    def compile(function: _F) -> _F:
        compiled = numba.njit(nogil=True, error_model="numpy")(function)
        if signature is not None:
            compiled._cache = _OnDisk(function)
            compiled.compile(signature)
            compiled.disable_compile()
        return compiled  # type: ignore[no-any-return]

    return compile


_OPERANDS = (f32[:, :, :, :], f32[:, :, :, :], f32[:, :, :], i64[:, :])  # a, b, out, sequences


# LLVM operations that numba lacks: bit casts, exact truncation, fused multiply-add.
_F64 = ir.DoubleType()


def _bitcast(source: Any, target: Any, target_ir: ir.Type) -> Any:
    def cast(typingctx: Any, x: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.bitcast(args[0], target_ir)

        return target(source), codegen

    return intrinsic(cast)


f64_to_bits = _bitcast(types.float64, types.int64, ir.IntType(64))
bits_to_f64 = _bitcast(types.int64, types.float64, _F64)
f32_to_bits = _bitcast(types.float32, types.uint32, ir.IntType(32))


@intrinsic
def trunc(typingctx: Any, x: Any) -> Any:
    """``x`` rounded toward zero to an integer, in float64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.call(builder.module.declare_intrinsic("llvm.trunc", [_F64]), args)

    return types.float64(types.float64), codegen


@intrinsic
def fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` in float32 with one IEEE 754 rounding to nearest even."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), codegen


# An exponent so small that a sum with it is below every real one, and never decides emax.
_NO_EXPONENT = -(1 << 20)


@_njit()
def _exponent(x: Any, minimum: Any) -> Any:
    """The exponent e of x = s * 2**e with 1 <= |s| < 2, but at least `minimum`, where |s| may be below 1."""
    return max(np.int64((f32_to_bits(x) >> 23) & 0xFF) - 127, minimum)


def _fused_sum(group: int) -> Any:
    """A function that adds one fused sum of `group` products to `acc` for each column, as in MmaModel."""

    @_njit()
    def fused_sum(
        a, a_exponent, a_zero, b, b_exponent, b_zero, acc, width, fraction_bits, zero_exponent, kept
    ):
        # float64 holds every intermediate exactly: a product has at most 48 bits, and the sum is of integers
        # below 2**(fraction_bits + 2). Infinities and NaN follow IEEE 754, as in the contract. LLVM
        # vectorizes the loop over j, and unrolls the loops over i.
        for j in range(width):
            c = acc[j]
            c_exponent = min(max(((f64_to_bits(c) >> 52) & 0x7FF) - 1023, -126), 128)
            c_exponent = zero_exponent if c == 0.0 else c_exponent
            emax = float(max(c_exponent, max(a_zero, b_zero[j])))
            for i in range(group):
                e = a_exponent[i] + b_exponent[i, j]
                emax = e if e > emax else emax
            shift = fraction_bits - np.int64(emax)
            to_integer = bits_to_f64((1023 + shift) << 52)
            total = trunc(c * to_integer)
            for i in range(group):
                total += trunc(a[i] * b[i, j] * to_integer)
            exact = total * bits_to_f64((1023 - shift) << 52)
            magnitude = abs(exact)
            normal = bits_to_f64(f64_to_bits(exact) & kept)
            subnormal = trunc(normal * 2.0**149) * 2.0**-149
            rounded = subnormal if magnitude < 2.0**-126 else normal
            rounded = exact * np.inf if magnitude >= 2.0**128 else rounded
            acc[j] = rounded + 0.0  # -0 becomes +0

    return fused_sum


# `group` is a constant in each function, so that LLVM unrolls the loops.
_fused_sum_4, _fused_sum_8, _fused_sum_16, _fused_sum_32 = map(_fused_sum, (4, 8, 16, 32))


@_njit()
def _load_columns(b, k0, n0, terms, width, value):
    """``value[i, j] = b[k0 + i, n0 + j]``, zero after the last term. Reads along the smaller stride."""
    if b.strides[0] < b.strides[1]:
        for j in range(width):
            for i in range(terms):
                value[i, j] = b[k0 + i, n0 + j]
    else:
        for i in range(terms):
            for j in range(width):
                value[i, j] = b[k0 + i, n0 + j]
    for i in range(terms, len(value)):
        for j in range(width):
            value[i, j] = 0


@_njit(void(*_OPERANDS, *[i64] * 8))
def mma_chain_tiles(
    a, b, out, sequences, group, fraction_bits, zero_exponent, bits, a_minimum, b_minimum, first, last
):
    """The chain of a MmaModel, which keeps `bits` significant ones. Minima: smallest normal exponents."""
    step, kept = max(group, GROUP), np.int64(-1) << (53 - bits)
    M, N = out.shape[1], out.shape[2]
    tiles_m, tiles_n = (M + TILE_M - 1) // TILE_M, (N + TILE_N - 1) // TILE_N
    a_value, a_exponent = np.empty(step), np.empty(step)
    b_f32 = np.empty((step, TILE_N), np.float32)
    b_value, b_exponent = np.empty((step, TILE_N)), np.empty((step, TILE_N))
    a_zero, b_zero = np.empty(4, np.int64), np.empty((4, TILE_N), np.int64)
    acc = np.empty((TILE_M, TILE_N))
    for tile in range(first, last):
        batch, rest = tile // (tiles_m * tiles_n), tile % (tiles_m * tiles_n)
        n0, m0 = (rest // tiles_m) * TILE_N, (rest % tiles_m) * TILE_M
        height, width = min(TILE_M, M - m0), min(TILE_N, N - n0)
        for i in range(height):
            for j in range(width):
                acc[i, j] = out[batch, m0 + i, n0 + j]
        for p in range(sequences.shape[0]):
            s, start, stop = sequences[p, 0], sequences[p, 1], sequences[p, 2]
            for k0 in range(start, stop, step):
                terms = min(step, stop - k0)
                _load_columns(b[batch, s], k0, n0, terms, width, b_f32)
                b_zero[:] = _NO_EXPONENT
                for i in range(step):
                    for j in range(width):
                        x = b_f32[i, j]
                        zero = x == 0
                        b_value[i, j] = x
                        b_exponent[i, j] = _NO_EXPONENT if zero else _exponent(x, b_minimum)
                        b_zero[i // group, j] = zero_exponent if zero else b_zero[i // group, j]
                for m in range(height):
                    a_zero[:] = _NO_EXPONENT
                    for i in range(step):
                        x = a[batch, s, m0 + m, k0 + i] if i < terms else np.float32(0)
                        a_value[i] = x
                        a_exponent[i] = _NO_EXPONENT if x == 0 else _exponent(x, a_minimum)
                        if x == 0:
                            a_zero[i // group] = zero_exponent
                    for i in range(0, step, group):
                        g = i // group
                        a_terms = a_value[i:], a_exponent[i:], a_zero[g]
                        b_terms = b_value[i:], b_exponent[i:], b_zero[g]
                        of_column = acc[m], width, fraction_bits, zero_exponent, kept
                        if group == 32:
                            _fused_sum_32(*a_terms, *b_terms, *of_column)
                        elif group == 16:
                            _fused_sum_16(*a_terms, *b_terms, *of_column)
                        elif group == 8:
                            _fused_sum_8(*a_terms, *b_terms, *of_column)
                        else:
                            _fused_sum_4(*a_terms, *b_terms, *of_column)
        for i in range(height):
            for j in range(width):
                out[batch, m0 + i, n0 + j] = acc[i, j]


@_njit()
def _fma_terms(a, b, acc, terms, width):
    if terms == GROUP:
        for j in range(width):
            c = acc[j]
            for i in range(GROUP):
                c = fma(a[i], b[i, j], c)
            acc[j] = c
    else:
        for i in range(terms):
            for j in range(width):
                acc[j] = fma(a[i], b[i, j], acc[j])


@_njit(void(*_OPERANDS, boolean, i64, i64))
def fma_chain_tiles(a, b, out, sequences, closing_zero, first, last):
    """The FMA chain. With `closing_zero`, every sequence ends with the term 0 * 0, which turns -0 into +0."""
    M, N = out.shape[1], out.shape[2]
    tiles_m, tiles_n = (M + TILE_M - 1) // TILE_M, (N + TILE_N - 1) // TILE_N
    a_value = np.empty(GROUP, np.float32)
    b_value = np.empty((GROUP, TILE_N), np.float32)
    acc = np.empty((TILE_M, TILE_N), np.float32)
    for tile in range(first, last):
        batch, rest = tile // (tiles_m * tiles_n), tile % (tiles_m * tiles_n)
        n0, m0 = (rest // tiles_m) * TILE_N, (rest % tiles_m) * TILE_M
        height, width = min(TILE_M, M - m0), min(TILE_N, N - n0)
        for i in range(height):
            for j in range(width):
                acc[i, j] = out[batch, m0 + i, n0 + j]
        for p in range(sequences.shape[0]):
            s, start, stop = sequences[p, 0], sequences[p, 1], sequences[p, 2]
            for k0 in range(start, stop, GROUP):
                terms = min(GROUP, stop - k0)
                _load_columns(b[batch, s], k0, n0, terms, width, b_value)
                for m in range(height):
                    for i in range(terms):
                        a_value[i] = a[batch, s, m0 + m, k0 + i]
                    _fma_terms(a_value, b_value, acc[m], terms, width)
            if closing_zero and start < stop:
                zero = np.float32(0)
                for i in range(height):
                    for j in range(width):
                        acc[i, j] = fma(zero, zero, acc[i, j])
        for i in range(height):
            for j in range(width):
                out[batch, m0 + i, n0 + j] = acc[i, j]


@_njit()
def _f32_result(x, bias, j):
    y = x + bias[j] if bias.size else x
    return np.uint32(0x7FFFFFFF) if y != y else f32_to_bits(y)


@_njit()
def _f16_from_f32_bits(x):
    sign = (x >> 16) & np.uint32(0x8000)
    magnitude = np.int64(x & np.uint32(0x7FFFFFFF))
    if magnitude > 0x7F800000:
        return np.uint32(0x7FFF)
    if magnitude >= 0x47800000:  # 2**16 and above, infinity included
        return sign | np.uint32(0x7C00)
    exponent = (magnitude >> 23) - 127
    if exponent < -25:  # below half the smallest subnormal
        return sign
    # The result in units of its last place, which is 2**-24 for subnormals. A carry out of the fraction goes
    # into the exponent field, up to infinity.
    significand = (magnitude & 0x7FFFFF) | 0x800000
    drop = 13 if exponent >= -14 else -1 - exponent
    kept = significand >> drop
    remainder, half = significand & ((1 << drop) - 1), 1 << (drop - 1)
    if remainder > half or (remainder == half and kept & 1):
        kept += 1
    if exponent >= -14:
        kept += (exponent + 14) << 10
    return sign | np.uint32(kept)


@_njit(void(f32[:, :], f32[:], u32[:, :]))
def finish_f32(acc, bias, out):
    """``out = acc + bias`` for rows of f32, with one rounding. NaN becomes 0x7FFFFFFF. `out` is uint32."""
    for i in range(acc.shape[0]):
        for j in range(acc.shape[1]):
            out[i, j] = _f32_result(acc[i, j], bias, j)


@_njit(void(f32[:, :], f32[:], u16[:, :]))
def finish_bf16(acc, bias, out):
    """As `finish_f32`, then rounded to nearest even to bf16. NaN becomes 0x7FFF. `out` is uint16."""
    for i in range(acc.shape[0]):
        for j in range(acc.shape[1]):
            x = _f32_result(acc[i, j], bias, j)
            rounded = (x + np.uint32(0x7FFF) + ((x >> 16) & np.uint32(1))) >> 16
            out[i, j] = 0x7FFF if x == 0x7FFFFFFF else rounded


@_njit(void(f32[:, :], f32[:], u16[:, :]))
def finish_f16(acc, bias, out):
    """As `finish_f32`, then rounded to nearest even to f16. NaN becomes 0x7FFF. `out` is uint16."""
    for i in range(acc.shape[0]):
        for j in range(acc.shape[1]):
            out[i, j] = _f16_from_f32_bits(_f32_result(acc[i, j], bias, j))


@_njit(boolean(f32[:]))
def keeps_subnormals(probe):
    """Whether this thread's arithmetic keeps subnormals. `probe` is the f32 array [2**-126, 0.5]."""
    return probe[0] * probe[1] != np.float32(0)
