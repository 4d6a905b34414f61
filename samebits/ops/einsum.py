"""``torch.einsum`` as products of pairs, from left to right."""

from __future__ import annotations

import math
from collections import Counter

from torch import Tensor

from samebits.ops.bmm import bmm
from samebits.ops.expand import expand
from samebits.ops.matmul import matmul
from samebits.ops.reduce import sum


def einsum(equation: str, *operands: Tensor) -> Tensor:
    """Sums of products over named dimensions, as :func:`torch.einsum` with an equation.

    Operands are multiplied in pairs, always from left to right. (PyTorch chooses the order by their sizes.)
    A pair is a product of matrices. Its chain runs over the letters that both operands have and nothing else
    needs, in row-major order of the first operand's letters. Letters that only one of the two has, and
    nothing else needs, are summed first, as by ``sum``. Every pair's result is rounded to the dtype of the
    operands.

    Raises:
        ValueError: the equation does not fit the operands.
    """
    terms, result = _parse(equation, [t.ndim for t in operands])
    _check_sizes(equation, terms, operands)
    operands = tuple(_diagonals(t, term) for t, term in zip(operands, terms, strict=True))
    terms = ["".join(dict.fromkeys(_diagonal_order(term))) for term in terms]
    a, term = operands[0], terms[0]
    for i in range(1, len(operands)):
        needed = set(result).union(*terms[i + 1 :])
        a, term = _pair(a, term, operands[i], terms[i], needed)
    a, term = _sum_out(a, term, set(result))
    return a.permute([term.index(c) for c in result])


def _parse(equation: str, ndims: list[int]) -> tuple[list[str], str]:
    """The letters of every operand and of the result. An ellipsis becomes digits, counted from the right."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(ndims):
        raise ValueError(f"samebits.einsum: {equation!r}: expected {len(terms)} operands, got {len(ndims)}")
    widths = [n - len(term.replace("...", "")) for term, n in zip(terms, ndims, strict=True)]
    digits = [chr(0x100 + i) for i in range(max([0, *widths]), 0, -1)]
    full = []
    for term, width in zip(terms, widths, strict=True):
        if width < 0 or (width > 0 and "..." not in term):
            raise ValueError(f"samebits.einsum: {equation!r}: a term does not fit an operand's dimensions")
        full.append(term.replace("...", "".join(digits[len(digits) - width :])))
    if not arrow:
        counts = Counter("".join(term.replace("...", "") for term in terms))
        right = ("..." if "..." in left else "") + "".join(sorted(c for c in counts if counts[c] == 1))
    result = right.replace("...", "".join(digits))
    if len(set(result)) < len(result) or not set(result) <= set("".join(full)):
        raise ValueError(
            f"samebits.einsum: {equation!r}: the result has letters that are repeated or unknown"
        )
    return full, result


def _check_sizes(equation: str, terms: list[str], operands: tuple[Tensor, ...]) -> None:
    """Refuse different sizes of one letter. A size of 1 broadcasts, but not within one operand."""
    sizes: dict[str, int] = {}
    for i, (term, t) in enumerate(zip(terms, operands, strict=True)):
        in_operand: dict[str, int] = {}
        for c, size in zip(term, t.shape, strict=True):
            if in_operand.setdefault(c, size) != size:
                raise ValueError(
                    f"samebits.einsum: {equation!r}: operand {i} has sizes {in_operand[c]} and {size}"
                    f" for {c!r}"
                )
        for c, size in in_operand.items():
            if sizes.setdefault(c, size) == 1:
                sizes[c] = size
            if size != 1 and size != sizes[c]:  # "in" is wrong where torch.compile has symbols
                raise ValueError(
                    f"samebits.einsum: {equation!r}: operands have sizes {sizes[c]} and {size} for {c!r}"
                )


def _diagonal_order(term: str) -> str:
    """The letters after diagonals are taken. A repeated letter moves to the end."""
    repeated = [c for c in dict.fromkeys(term) if term.count(c) > 1]
    return "".join(c for c in term if c not in repeated) + "".join(repeated)


def _diagonals(t: Tensor, term: str) -> Tensor:
    for c in [c for c in dict.fromkeys(term) if term.count(c) > 1]:
        while term.count(c) > 1:
            first = term.index(c)
            second = term.index(c, first + 1)
            t = t.diagonal(0, first, second)
            term = "".join(x for i, x in enumerate(term) if i not in (first, second)) + c
    return t


def _sum_out(t: Tensor, term: str, needed: set[str]) -> tuple[Tensor, str]:
    dims = [i for i, c in enumerate(term) if c not in needed]
    return (sum(t, dims), "".join(c for c in term if c in needed)) if dims else (t, term)


def _pair(a: Tensor, a_term: str, b: Tensor, b_term: str, needed: set[str]) -> tuple[Tensor, str]:
    a, a_term = _sum_out(a, a_term, needed | set(b_term))
    b, b_term = _sum_out(b, b_term, needed | set(a_term))
    both = [c for c in a_term if c in b_term]
    sizes = {c: size for t, s in ((a, a_term), (b, b_term)) for c, size in zip(s, t.shape, strict=True)}
    sizes |= {c: size for c, size in zip(a_term, a.shape, strict=True) if size != 1}  # the others broadcast
    a, b = (
        expand(t, [sizes[c] for c in s]) if [*t.shape] != [sizes[c] for c in s] else t
        for t, s in ((a, a_term), (b, b_term))
    )
    batch, inner = [c for c in both if c in needed], [c for c in both if c not in needed]
    left, right = [c for c in a_term if c not in both], [c for c in b_term if c not in both]

    def laid(t: Tensor, term: str, *groups: list[str]) -> Tensor:
        return t.permute([term.index(c) for group in groups for c in group])

    def count(letters: list[str]) -> int:
        return math.prod([sizes[c] for c in letters])

    a, b = laid(a, a_term, batch, left, inner), laid(b, b_term, batch, inner, right)
    if batch:
        out = bmm(
            a.reshape(count(batch), count(left), count(inner)),
            b.reshape(count(batch), count(inner), count(right)),
        )
    else:
        rows = a.reshape(*(sizes[c] for c in left), count(inner))
        out = matmul(rows, b.reshape(count(inner), count(right)))
    letters = [*batch, *left, *right]
    return out.reshape([sizes[c] for c in letters]), "".join(letters)
