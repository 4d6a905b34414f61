"""A second implementation of docs/contract.md, "State spaces" and causal convolutions, on lists of floats."""

from __future__ import annotations

import numpy as np

from tests.support.naive import by_halves, exp32, f32, fma32, log32
from tests.support.naive_fp8 import one_and_exp_minus, rounded, silu
from tests.support.naive_rows import row_sum

Values = list[np.float32]
ZERO, ONE = f32(0), f32(1)


def softplus(r: float) -> np.float32:
    e = exp32(f32(-abs(r)))
    s = f32(ONE + e)
    above = e if s == ONE else f32(log32(s) * f32(e / f32(s - ONE)))
    return f32(f32(r) + above) if r > 0 else above


def sigmoid(r: float) -> np.float32:
    return f32(ONE / one_and_exp_minus(r))


def decay(x: np.float32) -> np.float32:
    return f32(ONE / exp32(f32(-x))) if x > 0 else exp32(x)


def pieces(f: Values, g: Values) -> np.float32:
    sums = []
    for first in range(0, len(f), 8):
        acc = ZERO
        for a, b in zip(f[first : first + 8], g[first : first + 8], strict=True):
            acc = fma32(a, b, acc)
        sums.append(acc)
    while len(sums) & (len(sums) - 1):
        sums.append(ZERO)
    return by_halves(sums)


class Channel:
    """One channel of one sequence. `decays` has one value for each state."""

    def __init__(self, decays: list[float], skip: float | None, state: list[float]) -> None:
        self.decays = [f32(a) for a in decays]
        self.skip = skip
        self.states = [[f32(s) for s in state]]
        self.tokens: list[tuple[np.float32, np.float32, np.float32, Values, Values, Values]] = []

    def step(self, x: float, u: float, b: list[float], c: list[float]) -> np.float32:
        state, size, x, u = self.states[-1], len(b), f32(x), f32(u)
        a = [decay(f32(u * self.decays[n])) for n in range(size)]
        v = f32(u * x)
        b, c = [f32(t) for t in b], [f32(t) for t in c]
        self.states.append([fma32(a[n], state[n], f32(v * b[n])) for n in range(size)])
        self.tokens.append((x, u, v, a, b, c))
        y = pieces(self.states[-1], c)
        return y if self.skip is None else f32(y + f32(f32(self.skip) * x))

    def backward(self, grads: list[float], of_state: list[float]) -> dict[str, list]:
        """For each token dv, w, and what is summed for B and C; α, and the gradient of the first state."""
        carried, alpha = [f32(s) for s in of_state], [ZERO] * len(of_state)
        found: dict[str, list] = {"dv": [], "w": [], "b": [], "c": []}
        for t in range(len(self.tokens) - 1, -1, -1):
            _, u, v, a, b, c = self.tokens[t]
            g, before, after = f32(grads[t]), self.states[t], self.states[t + 1]
            r = [fma32(g, c[n], carried[n]) for n in range(len(c))]
            carried = [f32(x * y) for x, y in zip(a, r, strict=True)]
            q = [f32(x * y) for x, y in zip(carried, before, strict=True)]
            alpha = [fma32(x, u, y) for x, y in zip(q, alpha, strict=True)]
            found["dv"].insert(0, pieces(r, b))
            found["w"].insert(0, pieces(q, self.decays))
            found["b"].insert(0, [f32(x * v) for x in r])
            found["c"].insert(0, [f32(g * s) for s in after])
        return found | {"alpha": alpha, "state": carried}


def over_channels(terms: Values) -> np.float32:
    """The sum over the channels of a group."""
    blocks = [terms[i : i + 32] for i in range(0, len(terms), 32)]
    return row_sum([float(by_halves(block + [ZERO] * (32 - len(block)))) for block in blocks])


def convolved(x: list[float], weight: list[float], bias: float | None, dtype: str, activated: bool) -> float:
    """One token of one channel, of the inputs that its taps see."""
    acc = ZERO
    for a, w in zip(x, weight, strict=True):
        acc = f32(acc + f32(f32(a) * f32(w)))
    out = rounded(float(acc if bias is None else f32(acc + f32(bias))), dtype)
    return rounded(silu(out), dtype) if activated else out
