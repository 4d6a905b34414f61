"""Row operations beside PyTorch's and a copy of as many bytes: benchmarks/results/<gpu>/rows.json.

python -m benchmarks rows [--quick] [--commit COMMIT] [--out FILE]

Every result is compared with the CPU reference, in some rows and columns, before it is timed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor

from benchmarks.checked import l2_bytes, run
from benchmarks.record import arguments
from samebits.backends.reference import rows as reference
from samebits.ops.norm import layer_norm, rms_norm
from samebits.ops.reduce import sum
from samebits.ops.softmax import log_softmax, softmax
from samebits.ops.variance import vector_norm
from samebits.testing import assert_same_bits
from samebits.tools.bench.clock import Race

BF16, F32 = torch.bfloat16, torch.float32
EPS = 1e-5
DEVICE = "cuda"
ENTRIES = 128256
"""Rows of the embedding."""

ATEN, OURS = torch.ops.aten, torch.ops.samebits
Operands = tuple[Tensor, ...]
Results = tuple[Tensor, ...]
Run = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class RowCase:
    """An operation on `rows` rows of `n` values."""

    op: str
    rows: int
    n: int
    dtype: torch.dtype = BF16

    def record(self) -> dict[str, Any]:
        return asdict(self) | {"dtype": str(self.dtype).removeprefix("torch.")}


@dataclass(frozen=True, slots=True)
class RowOp:
    """How an operation is run and held to the reference.

    Attributes:
        operands: makes them for a case.
        ours, theirs: the calls.
        matrices: how many matrices ``[rows, n]`` it has to read and write.
        reference: results on the CPU, of rows of the operands.
        columns: results on the CPU, of columns of the operands. They follow the others.
        weights: places of operands that all rows share.
    """

    operands: Callable[[RowCase], Operands]
    ours: Run
    theirs: Run
    matrices: int
    reference: Callable[..., Results] = lambda *operands: ()
    columns: Callable[..., Results] = lambda *operands: ()
    weights: tuple[int, ...] = ()


def _matrix(case: RowCase) -> Tensor:
    return torch.randn((case.rows, case.n), device=DEVICE, dtype=case.dtype)


def _weights(case: RowCase, count: int) -> Operands:
    return tuple(torch.randn(case.n, device=DEVICE, dtype=case.dtype) for _ in range(count))


def _normed(case: RowCase, centred: bool) -> Operands:
    """The gradient, x, the weight, means and 1 / deviations."""
    x = _matrix(case)
    (w,) = _weights(case, 1)
    _, means, scales = OURS.norm(x, w, None, EPS, centred)
    return _matrix(case), x, w, means, scales


def _embedded(case: RowCase) -> Operands:
    return _matrix(case), torch.randint(ENTRIES, (case.rows,), device=DEVICE)


def _half_padded(case: RowCase) -> Operands:
    """Half of the tokens, in any order, have one id."""
    grad, ids = _embedded(case)
    ids[torch.randperm(case.rows, device=DEVICE)[: case.rows // 2]] = 0
    return grad, ids


def _embedding_backward(operands: Callable[[RowCase], Operands]) -> RowOp:
    return RowOp(
        operands,
        lambda grad, ids: OURS.embedding_backward(grad, ids, ENTRIES, -1),
        lambda grad, ids: ATEN.embedding_dense_backward(grad, ids, ENTRIES, -1, False),
        1,
    )


def _norm_backward(grad: Tensor, x: Tensor, w: Tensor, means: Tensor, scales: Tensor) -> Results:
    gradients: Results = OURS.norm_gradients(grad, x, w, means, scales, w.dtype)
    return gradients


def _rms_norm_backward(grad: Tensor, x: Tensor, w: Tensor, means: Tensor, scales: Tensor) -> Any:
    return ATEN._fused_rms_norm_backward(grad, x, [x.shape[1]], scales[:, None], w, [True, True])


def _layer_norm_backward(grad: Tensor, x: Tensor, w: Tensor, means: Tensor, scales: Tensor) -> Any:
    of_rows = means[:, None], scales[:, None]
    return ATEN.native_layer_norm_backward(grad, x, [x.shape[1]], *of_rows, w, w, [True, True, True])


def _columns(grad: Tensor, x: Tensor, w: Tensor, means: Tensor, scales: Tensor) -> Results:
    return reference.norm_columns(grad, x, means, scales, w.dtype)


OPS = {
    "rms_norm": RowOp(
        lambda c: (_matrix(c), *_weights(c, 1)),
        lambda x, w: rms_norm(x, w.shape, w, EPS),
        lambda x, w: F.rms_norm(x, w.shape, w, EPS),
        2,
        lambda x, w: reference.norm(x, w, None, EPS, False)[:1],
        weights=(1,),
    ),
    "rms_norm backward": RowOp(
        lambda c: _normed(c, False),
        _norm_backward,
        _rms_norm_backward,
        3,
        lambda *of: (reference.norm_backward(*of),),
        _columns,
        weights=(2,),
    ),
    "layer_norm": RowOp(
        lambda c: (_matrix(c), *_weights(c, 2)),
        lambda x, w, b: layer_norm(x, w.shape, w, b, EPS),
        lambda x, w, b: F.layer_norm(x, w.shape, w, b, EPS),
        2,
        lambda x, w, b: reference.norm(x, w, b, EPS, True)[:1],
        weights=(1, 2),
    ),
    "layer_norm backward": RowOp(
        lambda c: _normed(c, True),
        _norm_backward,
        _layer_norm_backward,
        3,
        lambda *of: (reference.norm_backward(*of),),
        _columns,
        weights=(2,),
    ),
    "softmax": RowOp(
        lambda c: (_matrix(c),),
        softmax,
        lambda x: x.softmax(-1),
        2,
        lambda x: (reference.softmax(x, False, x.dtype),),
    ),
    "softmax backward": RowOp(
        lambda c: (_matrix(c), _matrix(c).softmax(-1)),
        lambda grad, y: OURS.softmax_backward(grad, y, False),
        lambda grad, y: ATEN._softmax_backward_data(grad, y, 1, y.dtype),
        3,
        lambda grad, y: (reference.softmax_backward(grad, y, False, y.dtype),),
    ),
    "log_softmax": RowOp(
        lambda c: (_matrix(c),),
        log_softmax,
        lambda x: x.log_softmax(-1),
        2,
        lambda x: (reference.softmax(x, True, x.dtype),),
    ),
    "log_softmax backward": RowOp(
        lambda c: (_matrix(c), _matrix(c).log_softmax(-1)),
        lambda grad, y: OURS.softmax_backward(grad, y, True),
        lambda grad, y: ATEN._log_softmax_backward_data(grad, y, 1, y.dtype),
        3,
        lambda grad, y: (reference.softmax_backward(grad, y, True, y.dtype),),
    ),
    "sum": RowOp(
        lambda c: (_matrix(c),),
        lambda x: sum(x, -1),
        lambda x: x.sum(-1),
        1,
        lambda x: (reference.row_sum(x, False, x.dtype),),
    ),
    "2-norm": RowOp(
        lambda c: (_matrix(c),),
        lambda x: vector_norm(x, -1),
        lambda x: torch.linalg.vector_norm(x, dim=-1),
        1,
        lambda x: (reference.row_norm(x, x.dtype),),
    ),
    "sum over tokens": RowOp(
        lambda c: (_matrix(c),),
        lambda x: OURS.sum_to(x, [1, x.shape[1]]),
        lambda x: x.sum(0, keepdim=True),
        1,
        columns=lambda x: (reference.column_sum(x, x.dtype),),
    ),
    "embedding backward": _embedding_backward(_embedded),
    "embedding backward, half padding": _embedding_backward(_half_padded),
}
EMBEDDINGS = [op for op in OPS if op.startswith("embedding")]

WIDTHS = (1024, 2048, 4096, 8192, 16384)
TOKENS = 4096
CASES = (
    *(RowCase(op, TOKENS, n) for op in OPS if op not in ("2-norm", *EMBEDDINGS) for n in WIDTHS),
    *(RowCase(op, TOKENS, n) for op in EMBEDDINGS for n in WIDTHS[:3]),
    *(RowCase(op, TOKENS, n, F32) for op in OPS if "softmax" in op for n in WIDTHS[1::2]),
    *(RowCase(op, TOKENS, n, F32) for op in ("rms_norm", "rms_norm backward", "sum") for n in WIDTHS[1::2]),
    *(RowCase(op, 16, n) for op in ("rms_norm", "layer_norm", "softmax", "sum") for n in WIDTHS[1::2]),
    *(RowCase(op, 1024, ENTRIES, F32) for op in ("log_softmax", "log_softmax backward")),
    *(RowCase(op, 1, 1 << 24) for op in ("sum", "2-norm")),
    *(RowCase(op, TOKENS, 5001) for op in ("rms_norm", "softmax", "sum")),
)
"""Widths of models, a vocabulary, few rows of a decode, a weight as one row, and rows not aligned."""


def quick() -> tuple[RowCase, ...]:
    return tuple(c for c in CASES if c.n in (2048, 5001) and c.rows == TOKENS)


def bytes_of(case: RowCase) -> int:
    """Bytes that have to be read and written."""
    size = case.dtype.itemsize
    whole = ENTRIES * case.n * size if case.op in EMBEDDINGS else 0
    return OPS[case.op].matrices * case.rows * case.n * size + whole


def check(case: RowCase, operands: Operands) -> None:
    """Raise AssertionError for wrong bits, in sixteen rows or columns.

    Of an embedding, the gradients of 64 tokens' entries are compared with sums over tokens on the CPU, and
    those of entries without tokens with zeros.
    """
    op = OPS[case.op]
    got = op.ours(*operands)
    got = got if isinstance(got, tuple) else (got,)
    some = torch.arange(case.rows - 1, -1, -(case.rows // 16 | 1), device=DEVICE)
    matrices = [t.shape[:1] == (case.rows,) and i not in op.weights for i, t in enumerate(operands)]
    of_rows = op.reference(
        *(t[some].cpu() if m else t.cpu() for t, m in zip(operands, matrices, strict=True))
    )
    for g, want in zip(got, of_rows, strict=False):
        assert_same_bits(g[some].cpu(), want, f"{case}: against the CPU reference")
    if case.op in EMBEDDINGS:
        grad, ids = (t.cpu() for t in operands)
        for id in {*ids[:64].tolist()}:
            want = reference.column_sum(grad[ids == id], grad.dtype)
            assert_same_bits(got[0][id].cpu(), want, f"{case}: entry {id}")
        assert not got[0].view(torch.int16)[~torch.isin(torch.arange(ENTRIES), ids).to(DEVICE)].any()
    few = torch.arange(case.n - 1, -1, -(case.n // 16 | 1), device=DEVICE)
    whole = [t.shape == (case.rows, case.n) for t in operands]
    of_columns = op.columns(
        *(t[:, few].cpu() if m else t.cpu() for t, m in zip(operands, whole, strict=True))
    )
    for g, want in zip(got[len(of_rows) :], of_columns, strict=False):
        assert_same_bits(g.flatten()[few].cpu(), want, f"{case}: over tokens, against the CPU reference")


def measure(case: RowCase) -> dict[str, Any]:
    """Times of a case in microseconds."""
    op, moved = OPS[case.op], bytes_of(case)
    count = max(1, min(32, math.ceil(3 * l2_bytes() / moved)))
    sets = [op.operands(case) for _ in range(count)]
    check(case, sets[0])
    halves = [(torch.empty(moved // 2, device=DEVICE, dtype=torch.uint8),) for _ in range(count)]
    race = Race(max(4, min(200, math.ceil(2e-3 / max(moved / 3.5e12, 4e-6)))))
    race.add("samebits", op.ours, sets)
    race.add("torch", op.theirs, sets)
    race.add("copy", torch.clone, halves)
    return case.record() | {"us": race.run(7)}


def means(data: dict[str, Any]) -> Iterator[tuple[str, float, float, float, float]]:
    """Of each operation over wide and many rows: speed beside a copy and beside torch, means and least."""
    for op in OPS:
        some = [c["us"] for c in data["cases"] if c["op"] == op and c["rows"] == TOKENS and c["n"] != 5001]
        if some:
            copy, theirs = ([us[who] / us["samebits"] for us in some] for who in ("copy", "torch"))
            mean = statistics.geometric_mean
            yield op, mean(copy), min(copy), mean(theirs), min(theirs)


def show(data: dict[str, Any]) -> Table:
    table = Table("operation", "rows", "n", "dtype", "us", "torch, us", "x torch", "of a copy")
    for c in data["cases"]:
        us = c["us"]
        ratios = (f"{us[who] / us['samebits']:.2f}" for who in ("torch", "copy"))
        sizes = f"{c['rows']:,}", f"{c['n']:,}", c["dtype"]
        table.add_row(c["op"], *sizes, f"{us['samebits']:.1f}", f"{us['torch']:.1f}", *ratios)
    for op, copy, least, beside, worst in means(data):
        table.add_row(
            f"{op}: mean (least)",
            "",
            "",
            "",
            "",
            "",
            f"{beside:.2f} ({worst:.2f})",
            f"{copy:.2f} ({least:.2f})",
        )
    return table


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--quick", action="store_true", help="a few cases")
    options = parser.parse_args()
    run("rows", options, quick() if options.quick else CASES, measure, show)
