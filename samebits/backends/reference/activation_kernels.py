"""Activations element by element, as ``docs/contract.md`` has them."""

from __future__ import annotations

import numpy as np
from numba import float32 as f32
from numba import int64 as i64
from numba import void

from samebits.backends.reference.kernels import _njit, fma
from samebits.backends.reference.logp_kernels import exp, log, one_and_exp_minus, silu
from samebits.functions import CONSTANTS

SILU, SIGMOID, GELU, GELU_TANH, SOFTPLUS = range(5)

_HALF_ROOT, _TANH_SCALE, _TANH_CUBE, _TANH_SLOPE, _DENSITY = (
    np.float32(CONSTANTS[name]) for name in ("HALF_ROOT", "TANH_SCALE", "TANH_CUBE", "TANH_SLOPE", "DENSITY")
)
_G1, _G2, _G3, _G4, _G5, _G6, _G7, _G8, _G9 = (np.float32(CONSTANTS[f"G{i}"]) for i in range(1, 10))
_ZERO, _HALF, _ONE, _TWO, _FOUR = (np.float32(x) for x in (0, 0.5, 1, 2, 4))


@_njit()
def _erf(x):
    """1 - e**q for the magnitude, where q is the logarithm of erfc."""
    t = abs(x)
    t = _FOUR if t > _FOUR else t
    q = fma(_G9, t, _G8)
    q = fma(q, t, _G7)
    q = fma(q, t, _G6)
    q = fma(q, t, _G5)
    q = fma(q, t, _G4)
    q = fma(q, t, _G3)
    q = fma(q, t, _G2)
    q = fma(q, t, _G1)
    y = _ONE - exp(q * t)
    return -y if x < _ZERO else y


@_njit()
def _tanh(x):
    e = exp(abs(x) * -_TWO)
    y = _ONE - (e + e) / (_ONE + e)
    return -y if x < _ZERO else y


@_njit()
def _tanh_of_gelu(a):
    return _tanh(_TANH_SCALE * fma(_TANH_CUBE, (a * a) * a, a))


@_njit()
def _softplus(x):
    """log(1 + e**x). What the sum 1 + e**-|x| lost is put back by the quotient."""
    e = exp(-abs(x))
    sum_ = _ONE + e
    above = e if sum_ == _ONE else log(sum_) * (e / (sum_ - _ONE))
    return x + above if x > _ZERO else above


@_njit()
def _activated(a, which):
    if which == SILU:
        return silu(a)
    if which == SIGMOID:
        return _ONE / one_and_exp_minus(a)
    if which == SOFTPLUS:
        return _softplus(a)
    if which == GELU:
        return (a * _HALF) * (_ONE + _erf(a * _HALF_ROOT))
    return (_HALF * a) * (_ONE + _tanh_of_gelu(a))


@_njit(void(f32[:, :], f32[:, :], i64, i64, i64))
def activate(x, out, which, first, last):
    """Some rows of ``out = activation(x)``."""
    for i in range(first, last):
        for j in range(x.shape[1]):
            out[i, j] = _activated(x[i, j], which)


@_njit()
def _gradient(g, a, which):
    if which == SILU:
        y = _ONE / one_and_exp_minus(a)
        return (g * y) * fma(a, _ONE - y, _ONE)
    if which == GELU:
        below = _HALF * (_ONE + _erf(a * _HALF_ROOT))
        density = _DENSITY * exp((a * a) * -_HALF)
        return g * fma(a, density, below)
    y = _tanh_of_gelu(a)
    slope = _TANH_SCALE * fma(_TANH_SLOPE, a * a, _ONE)
    of_tanh = ((_HALF * a) * fma(-y, y, _ONE)) * slope
    return g * (_HALF * (_ONE + y) + of_tanh)


@_njit(void(f32[:, :], f32[:, :], f32[:, :], i64, i64, i64))
def differentiate(grad, x, out, which, first, last):
    """Some rows of the gradient of ``activation(x)``, but for sigmoid's, given that of the result."""
    for i in range(first, last):
        for j in range(x.shape[1]):
            out[i, j] = _gradient(grad[i, j], x[i, j], which)
