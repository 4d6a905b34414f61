"""A second implementation of docs/contract.md, "Recurrent layers": one head, on lists of floats."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace

from tests.support.naive import LOG2E, chain, exact, f32, fma32, round_to
from tests.support.naive_attention import EXP2, exp2

Row = list[float]
Matrix = list[Row]
CHUNK, BLOCK = 64, 16


def mul(x: float, y: float) -> float:
    return float(f32(x) * f32(y))


def add(x: float, y: float) -> float:
    return float(f32(x) + f32(y))


def fma(x: float, y: float, z: float) -> float:
    return float(fma32(x, y, z))


@functools.cache
def rounded(x: float, dtype: str) -> float:
    return round_to(exact(x), dtype)


@functools.cache
def power(x: float, contract: str) -> float:
    return float(exp2(x, EXP2[contract]))


def dot(x: Row, y: Row, acc: float = 0.0) -> float:
    for p, r in zip(x, y, strict=True):
        acc = fma(p, r, acc)
    return acc


def total(x: Row) -> float:
    found = x[0]
    for y in x[1:]:
        found = add(found, y)
    return found


@dataclass(eq=False)
class Chunk:
    """Rows of a chunk, the matrix at its start, and what they give."""

    matrix: Matrix
    q: Matrix
    k: Matrix
    v: Matrix
    beta: Row | None
    weights: Row | None
    decays: Matrix  # a row of one number for each head, or one for each channel
    z: Matrix = field(default_factory=list)
    u: Matrix = field(default_factory=list)
    o: Matrix = field(default_factory=list)


@dataclass(eq=False)
class Naive:
    """A head in one sequence.

    Attributes:
        g: ``[T][1]``, or ``[T][K]`` for a decay of each channel.
        beta: None for no delta rule.
        weights, skip: those of ``ssd``: of each row, and of each column of the values.
        contract: "FMA" or a family.
        dtype: "f32" or "bf16".
    """

    q: Matrix
    k: Matrix
    v: Matrix
    g: Matrix
    beta: Row | None
    initial: Matrix
    scale: float
    contract: str
    dtype: str
    weights: Row | None = None
    skip: Row | None = None

    def __post_init__(self) -> None:
        self.K, self.V = len(self.initial), len(self.initial[0])
        self.by_channel = len(self.g[0]) == self.K
        self.chunks: list[Chunk] = []
        matrix = self.initial
        for start in range(0, len(self.q), CHUNK):
            rows = slice(start, start + CHUNK)
            decays: Matrix = []
            for g in self.g[rows]:
                before = decays[-1] if decays else [0.0] * len(g)
                decays.append([add(x, mul(y, LOG2E)) for x, y in zip(before, g, strict=True)])
            beta, weights = (None if x is None else x[rows] for x in (self.beta, self.weights))
            c = Chunk(matrix, self.q[rows], self.k[rows], self.v[rows], beta, weights, decays)
            self.rows(c)
            self.chunks.append(c)
            matrix = self.next(c)
        self.final = matrix

    def rounded(self, x: float) -> float:
        return rounded(x, self.dtype)

    def product(self, a: Row, b: Row, start: float = 0.0) -> float:
        terms = [(self.rounded(x), self.rounded(y)) for x, y in zip(a, b, strict=True)]
        return float(chain([terms], self.contract, self.dtype, acc=start))

    def decay(self, after: Row, before: Row) -> Row:
        """From one row to another, for each channel."""
        found = [power(float(f32(x) - f32(y)), self.contract) for x, y in zip(after, before, strict=True)]
        return found if self.by_channel else found * self.K

    def since(self, c: Chunk, i: int) -> Row:
        return self.decay(c.decays[i], [0.0] * len(c.decays[i]))

    def seen(self, c: Chunk, i: int, j: int) -> float:
        """What row i sees of row j, with one decay for each head."""
        return self.weighted(c, self.decay(c.decays[i], c.decays[j])[0], j)

    def weighted(self, c: Chunk, x: float, j: int) -> float:
        return x if c.weights is None else mul(x, c.weights[j])

    # ---- forward

    def read(self, c: Chunk, x: Row, i: int) -> Row:
        since = self.since(c, i)
        if self.by_channel:
            x = [mul(a, b) for a, b in zip(x, since, strict=True)]
        found = [self.product(x, [row[e] for row in c.matrix]) for e in range(self.V)]
        return found if self.by_channel else [mul(y, since[0]) for y in found]

    def score(self, c: Chunk, x: Row, i: int, j: int) -> float:
        key, first = c.k[j], i // BLOCK * BLOCK
        if not self.by_channel:
            return mul(self.product(x, key), self.decay(c.decays[i], c.decays[j])[0])
        if j < first:
            reference = c.decays[first - 1]
            left = [mul(a, b) for a, b in zip(x, self.decay(c.decays[i], reference), strict=True)]
            right = [mul(a, b) for a, b in zip(key, self.decay(reference, c.decays[j]), strict=True)]
            return self.product(left, right)
        acc = 0.0
        for a, b, w in zip(x, key, self.decay(c.decays[i], c.decays[j]), strict=True):
            acc = fma(mul(a, b), w, acc)
        return acc

    def rows(self, c: Chunk) -> None:
        for i in range(len(c.q)):
            if c.beta is None:
                c.u.append(c.v[i])
            else:
                first = i // BLOCK * BLOCK
                read = self.read(c, c.k[i], i)
                scores = [self.score(c, c.k[i], i, j) for j in range(i)]
                z, u = [], []
                for e in range(self.V):
                    start = float(f32(c.v[i][e]) - f32(read[e]))
                    earlier = [row[e] for row in c.u[:first]]
                    acc = self.product([-x for x in scores[:first]], earlier, start)
                    for j in range(first, i):
                        acc = fma(-scores[j], c.u[j][e], acc)
                    z.append(acc)
                    u.append(self.rounded(mul(c.beta[i], acc)))
                c.z.append(z)
                c.u.append(u)
            read = self.read(c, c.q[i], i)
            scores = [self.weighted(c, self.score(c, c.q[i], i, j), j) for j in range(i + 1)]
            found = [self.product(scores, [row[e] for row in c.u], read[e]) for e in range(self.V)]
            found = [mul(add(x, 0.0), self.scale) for x in found]
            if self.skip is not None:
                found = [add(x, mul(p, y)) for x, p, y in zip(found, self.skip, c.v[i], strict=True)]
            c.o.append([self.rounded(x) for x in found])

    def next(self, c: Chunk) -> Matrix:
        n = len(c.q) - 1
        kept, left = self.since(c, n), [self.decay(c.decays[n], row) for row in c.decays]
        found = []
        for d in range(self.K):
            keys = [row[d] for row in c.k]
            row = []
            for e in range(self.V):
                u = [x[e] for x in c.u]
                if self.by_channel:
                    pair = [mul(x, w[d]) for x, w in zip(keys, left, strict=True)], u
                else:
                    pair = keys, [mul(x, self.seen(c, n, j)) for j, x in enumerate(u)]
                row.append(self.product(*pair, mul(c.matrix[d][e], kept[d])))
            found.append(row)
        return found

    # ---- gradients

    def backward(self, grad: Matrix, of_final: Matrix, start: int = 0) -> dict[str, list]:
        """Of operands and the initial matrix; before those of q, k and v are rounded to the dtype.

        Of a call that went on with row `start`, whose rows `grad` has.
        """
        grad = [[0.0] * self.V] * start + grad
        parts, of_next = [], of_final
        for n in reversed(range(start // CHUNK, len(self.chunks))):
            before = max(start - n * CHUNK, 0)
            c = self.of_call(self.chunks[n], before)
            found, of_next = self.chunk_backward(c, grad[n * CHUNK : (n + 1) * CHUNK], of_next)
            parts.append({name: rows[before:] for name, rows in found.items()})
        joined = {name: [row for part in reversed(parts) for row in part[name]] for name in parts[0]}
        joined["initial"] = of_next
        joined["skip"] = [0.0] * self.V
        for f, v in zip(grad[start:], self.v[start:], strict=True):
            joined["skip"] = [add(acc, mul(x, y)) for acc, x, y in zip(joined["skip"], f, v, strict=True)]
        return joined

    def of_call(self, c: Chunk, before: int) -> Chunk:
        """A chunk whose first rows are those of earlier calls."""
        q = [[0.0] * self.K] * before + c.q[before:]
        if c.beta is None:
            return replace(c, q=q)
        z = [[0.0] * self.V] * before + c.z[before:]
        return replace(c, q=q, beta=[0.0] * before + c.beta[before:], z=z)

    def chunk_backward(self, c: Chunk, f: Matrix, of_next: Matrix) -> tuple[dict[str, list], Matrix]:
        n, K, V = len(c.q), range(self.K), range(self.V)
        N = range(n)
        left = [self.decay(c.decays[-1], row) for row in c.decays]
        since = [self.since(c, i) for i in N]

        du: Matrix = []
        for j in N:
            scores = [mul(self.score(c, c.q[i], i, j), self.scale) if i >= j else 0.0 for i in N]
            row = []
            for e in V:
                column = [x[e] for x in of_next]
                if self.by_channel:
                    start = self.product([mul(c.k[j][d], left[j][d]) for d in K], column)
                else:
                    start = mul(self.product(c.k[j], column), left[j][0])
                row.append(self.product(scores, [x[e] for x in f], start))
            du.append(row)
        dz: Matrix = [[0.0] * self.V for _ in N]
        dbeta: Row = []
        if c.beta is not None:
            for j in reversed(N):
                stop = min((j // BLOCK + 1) * BLOCK, n)
                scores = [self.score(c, c.k[i], i, j) if i > j else 0.0 for i in N]
                for e in V:
                    later = [-x for x in scores[stop:]]
                    acc = self.product(later, [x[e] for x in dz[stop:]], du[j][e])
                    for i in range(stop - 1, j, -1):
                        acc = fma(-scores[i], dz[i][e], acc)
                    du[j][e] = acc
                    dz[j][e] = self.rounded(mul(acc, c.beta[j]))
            dbeta = [dot(du[j], c.z[j]) for j in N]
        dweights = [dot(du[j], c.u[j]) for j in N]
        dv = dz
        if c.beta is None:
            dv = [[self.weighted(c, x, j) for x in du[j]] for j in N]
        if self.skip is not None:
            dv = [[add(x, mul(p, y)) for x, p, y in zip(dv[j], self.skip, f[j], strict=True)] for j in N]

        A = [[mul(self.product(f[i], c.u[j]), self.scale) if j <= i else 0.0 for j in N] for i in N]
        B = [[-self.product(dz[i], c.u[j]) if j < i else 0.0 for j in N] for i in N]
        a = self.of_rows(c, f, [[mul(x, self.scale) for x in row] for row in since], A)
        b = [[0.0] * self.K for _ in N]
        pairs = [(A, c.q)]
        if c.beta is not None:
            b = self.of_rows(c, dz, [[-x for x in row] for row in since], B)
            pairs.append((B, c.k))
        m = [[mul(self.product(c.u[j], of_next[d]), self.weighted(c, left[j][d], j)) for d in K] for j in N]
        columns = [
            [add(x, y) for x, y in zip(*both, strict=True)]
            for both in zip(self.of_columns(c, pairs), m, strict=True)
        ]
        dk = [[add(x, y) for x, y in zip(*both, strict=True)] for both in zip(b, columns, strict=True)]

        by_next = [[mul(x, since[-1][d]) for x in of_next[d]] for d in K]
        dS = [list(row) for row in by_next]
        for x, of, sign in ((c.q, f, self.scale), (c.k, dz, -1.0)):
            if sign == -1.0 and c.beta is None:
                continue
            factor = [[mul(y, sign) if sign != -1.0 else -y for y in row] for row in since]
            for d in K:
                for e in V:
                    p, r = [row[d] for row in x], [row[e] for row in of]
                    if self.by_channel:
                        p = [mul(y, s[d]) for y, s in zip(p, factor, strict=True)]
                    else:
                        r = [mul(y, s[0]) for y, s in zip(r, factor, strict=True)]
                    dS[d][e] = self.product(p, r, dS[d][e])

        rest = [
            [float(f32(x) - f32(y)) for x, y in zip(*both, strict=True)]
            for both in zip(b, columns, strict=True)
        ]
        if self.by_channel:
            sums = [[add(mul(c.q[i][d], a[i][d]), mul(c.k[i][d], rest[i][d])) for d in K] for i in N]
            last = [add(total([mul(c.k[j][d], m[j][d]) for j in N]), dot(c.matrix[d], by_next[d])) for d in K]
        else:
            sums = [[dot(c.k[i], rest[i], dot(c.q[i], a[i]))] for i in N]
            through = total([dot(c.matrix[d], by_next[d]) for d in K])
            last = [add(total([dot(c.k[j], m[j]) for j in N]), through)]
        sums[-1] = [add(x, y) for x, y in zip(sums[-1], last, strict=True)]
        dg = [sums[-1]]
        for row in reversed(sums[:-1]):
            dg.append([add(x, y) for x, y in zip(dg[-1], row, strict=True)])
        found = {"q": a, "k": dk, "v": dv, "g": dg[::-1], "beta": dbeta, "weights": dweights}
        return found, dS

    def of_rows(self, c: Chunk, f: Matrix, factor: Matrix, of: Matrix) -> Matrix:
        N, K = range(len(c.q)), range(self.K)
        found = []
        for i in N:
            first, row = i // BLOCK * BLOCK, []
            for d in K:
                start = mul(self.product(f[i], c.matrix[d]), factor[i][d])
                if not self.by_channel:
                    weights = [mul(of[i][j], self.seen(c, i, j)) if j <= i else 0.0 for j in N]
                    row.append(self.product(weights, [x[d] for x in c.k], start))
                    continue
                if first:
                    reference = c.decays[first - 1]
                    keys = [mul(c.k[j][d], self.decay(reference, c.decays[j])[d]) for j in range(first)]
                    found_earlier = self.product(of[i][:first], keys)
                    start = add(start, mul(found_earlier, self.decay(c.decays[i], reference)[d]))
                for j in range(first, i + 1):
                    start = fma(of[i][j], mul(c.k[j][d], self.decay(c.decays[i], c.decays[j])[d]), start)
                row.append(start)
            found.append(row)
        return found

    def of_columns(self, c: Chunk, pairs: list[tuple[Matrix, Matrix]]) -> Matrix:
        n = len(c.q)
        N, K = range(n), range(self.K)
        found = [[0.0] * self.K for _ in N]
        if not self.by_channel:
            for of, x in pairs:
                for j in N:
                    weights = [mul(of[i][j], self.seen(c, i, j)) if i >= j else 0.0 for i in N]
                    found[j] = [self.product(weights, [y[d] for y in x], found[j][d]) for d in K]
            return found
        for start in range(0, n, BLOCK):
            rows = range(start, min(start + BLOCK, n))
            for of, x in pairs:
                for j in range(start):
                    reference = c.decays[start - 1]
                    back = self.decay(reference, c.decays[j])
                    for d in K:
                        scaled = [mul(x[i][d], self.decay(c.decays[i], reference)[d]) for i in rows]
                        product = self.product([of[i][j] for i in rows], scaled)
                        found[j][d] = add(found[j][d], mul(product, back[d]))
                for j in rows:
                    for i in range(j, rows.stop):
                        weights = self.decay(c.decays[i], c.decays[j])
                        for d in K:
                            found[j][d] = fma(of[i][j], mul(x[i][d], weights[d]), found[j][d])
        return found
