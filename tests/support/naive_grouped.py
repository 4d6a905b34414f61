"""A second implementation of "Grouped products" in docs/contract.md, over the chains of `naive`.

Matrices are lists of rows of Python floats, results are bits.
"""

from __future__ import annotations

from tests.support import naive

Matrix = list[list[float]]
Bits = list[list[int]]


def group_of(offs: list[int], row: int) -> int | None:
    """The group of a row, by looking for it among all of them."""
    start = 0
    for g, stop in enumerate(offs):
        if start <= row < stop:
            return g
        start = stop
    return None


def rows(
    a: Matrix,
    b: list[Matrix],
    offs: list[int],
    contract: str,
    dtype: str,
    out: str,
    bias: Matrix | None = None,
    segments: int = 1,
) -> Bits:
    """``a[T, K]`` by ``b[G, K, N]``."""
    width = len(b[0][0])
    found = []
    for t, row in enumerate(a):
        g = group_of(offs, t)
        if g is None:
            found.append([0] * width)
            continue
        found.append([])
        for n in range(width):
            terms = [(x, b[g][k][n]) for k, x in enumerate(row)]
            value = naive.segmented(terms, contract, dtype, segments)
            found[-1].append(naive.finish(value, out, None if bias is None else bias[g][n]))
    return found


def terms(
    a: Matrix,
    b: Matrix,
    offs: list[int],
    sequences: list[int] | None,
    contract: str,
    dtype: str,
    out: str,
    start: list[Matrix] | None = None,
) -> list[Bits]:
    """``a[M, T]`` by ``b[T, N]``; `start`: what the chains start from."""
    found = []
    for g in range(len(offs)):
        of_group = [t for t in range(len(b)) if group_of(offs, t) == g]
        runs: list[list[int]] = []
        for t in of_group:
            if runs and (sequences is None or sequences[t] == sequences[runs[-1][-1]]):
                runs[-1].append(t)
            else:
                runs.append([t])
        found.append(
            [
                [
                    naive.finish(
                        naive.chain(
                            [[(row[t], b[t][n]) for t in run] for run in runs],
                            contract,
                            dtype,
                            acc=0.0 if start is None else start[g][m][n],
                            plain=False,
                        ),
                        out,
                    )
                    for n in range(len(b[0]))
                ]
                for m, row in enumerate(a)
            ]
        )
    return found
