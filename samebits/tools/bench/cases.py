"""The cases of ``samebits bench``, their operands, and the competitors of samebits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from samebits.backends import chosen_backend, pack_key
from samebits.backends.cuda.shapes import ProductShape, Shape
from samebits.contract import TENSOR_CORE
from samebits.ops.addmm import addmm_
from samebits.ops.bmm import bmm
from samebits.ops.linear_logp import linear_logp
from samebits.ops.matmul import matmul

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
Run = Callable[..., Any]

MODELS = {
    "Llama-3 8B": ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)),
    "Llama-3 70B": ((8192, 10240), (8192, 8192), (8192, 57344), (28672, 8192)),
    "Qwen3 8B": ((4096, 6144), (4096, 4096), (4096, 24576), (12288, 4096)),
    "Qwen3 32B": ((5120, 10240), (8192, 5120), (5120, 51200), (25600, 5120)),
    "router": ((7168, 256),),
    "small": ((768, 3072), (3072, 768), (4096, 1024)),
}
"""(K, N) of the projections: queries, keys and values as one; output; gate and up as one; down."""

SHAPES = tuple(dict.fromkeys(itertools.chain(*MODELS.values())))
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
BETWEEN = (20, 48, 96, 160, 200, 300)
"""Rows that fill no tile of a power of two. They are measured at some shapes, and are not in any mean."""


F32_SHAPES = (*MODELS["Llama-3 8B"], *MODELS["router"], *MODELS["small"])


@dataclass(frozen=True, slots=True)
class BenchCase:
    """One product, or log-probabilities.

    Attributes:
        work: one of these:

            * ``forward``: x @ weight.T.
            * ``dX``: dy @ weight.
            * ``dW``: dy.T @ x.
            * ``dW ragged``: the same over packed sequences of mean length 512. The competitor is samebits'
              dense ``dW``.
            * ``dW main_grad``: the same accumulated into float32. The competitor is ``mm`` and ``add_``.
            * ``bmm``: a batch of a @ b. A copy of as many bytes is timed, too.
            * ``logp``: ``linear_logp`` of m tokens with a vocabulary of n. The competitors store the logits,
              or compute only the product.
        m: rows, or tokens.
        k, n: in and out features.
        dtype: dtype of all tensors.
        batch: number of matrices in ``bmm``.
    """

    work: Literal["forward", "dX", "dW", "dW ragged", "dW main_grad", "bmm", "logp"]
    m: int
    k: int
    n: int
    dtype: torch.dtype = BF16
    batch: int = 1

    @property
    def flop(self) -> int:
        return 2 * self.m * self.k * self.n * self.batch

    @property
    def bytes(self) -> int:
        """Bytes of both operands and the result."""
        elements = self.m * self.k + self.k * self.n + self.m * self.n
        return self.dtype.itemsize * elements * self.batch

    def record(self) -> dict[str, Any]:
        """The case as it is written into results."""
        return asdict(self) | {"dtype": str(self.dtype).removeprefix("torch.")}


TINY = (
    (1024, 12, 64, 12),
    (1024, 12, 12, 64),
    (4096, 16, 64, 16),
    (1024, 64, 64, 64),
    (1024, 32, 32, 32),
    (16384, 8, 8, 8),
    (65536, 4, 4, 4),
    (8192, 16, 16, 16),
    (4096, 32, 64, 32),
    (4096, 48, 16, 48),
    (4096, 64, 64, 64),
    (512, 64, 16, 64),
)
"""(batch, M, K, N) of batched products."""

ODD = (4095, 4096)
"""(K, N) whose rows the copy engine cannot read. The universal kernel computes these products."""

_BETWEEN_AT = ((4096, 28672), (14336, 4096), (8192, 8192), (5120, 10240))
_TRAINED = ((4096, 4096), (4096, 28672), (14336, 4096), (768, 3072))

CASES = (
    *(BenchCase("forward", m, k, n) for k, n in SHAPES for m in ROWS),
    *(BenchCase("forward", m, k, n) for k, n in _BETWEEN_AT for m in BETWEEN),
    *(BenchCase(work, m, k, n) for work in ("dX", "dW") for k, n in SHAPES for m in ROWS if m >= 512),
    *(BenchCase("forward", m, *ODD) for m in (16, 256, 4096)),
    *(BenchCase("forward", m, k, n, F16) for k, n in MODELS["Llama-3 8B"] for m in ROWS),
    *(
        BenchCase(work, m, k, n, F16)
        for work in ("dX", "dW")
        for k, n in MODELS["Llama-3 8B"]
        for m in (512, 2048, 8192)
    ),
    *(
        BenchCase("forward", m, k, n, F32)
        for k, n in F32_SHAPES
        for m in (1, 8, 16, 32, 64, 128, 256, 512, 2048)
    ),
    *(BenchCase("dX", m, k, n, F32) for k, n in F32_SHAPES for m in (1, 16)),
    *(BenchCase(work, m, k, n, F32) for work in ("dX", "dW") for k, n in F32_SHAPES for m in (512, 2048)),
    *(BenchCase("dW ragged", m, k, n) for k, n in _TRAINED for m in (8192, 16384)),
    *(BenchCase("dW main_grad", m, k, n) for k, n in _TRAINED for m in (2048, 8192)),
    *(BenchCase("bmm", m, k, n, dtype, batch) for batch, m, k, n in TINY for dtype in (BF16, F32)),
    *(BenchCase("logp", m, 4096, 151936) for m in (16, 256)),
    BenchCase("logp", 4096, 2048, 131072),
)


def of_shapes(shapes: Iterable[Shape]) -> list[BenchCase]:
    """The cases of a user's shapes, but for those that have no competitor."""
    found = (_of_shape(shape) for shape in shapes)
    return list(dict.fromkeys(case for case in found if case is not None))


def _of_shape(s: Shape) -> BenchCase | None:
    if not isinstance(s, ProductShape) or s.a != s.b or (s.out != s.a and not s.accumulate):
        return None
    dtype: torch.dtype = getattr(torch, s.a)
    if s.batch > 1:
        plain = s.a_by_k and not s.b_by_k and not s.accumulate
        return BenchCase("bmm", s.m, s.k, s.n, dtype, s.batch) if plain else None
    if s.accumulate:
        by_terms = not (s.a_by_k or s.b_by_k) and s.a != "float32"
        return BenchCase("dW main_grad", s.k, s.n, s.m, dtype) if by_terms else None
    if not s.a_by_k:
        return None if s.b_by_k else BenchCase("dW", s.k, s.n, s.m, dtype)
    if s.b_by_k:
        return BenchCase("forward", s.m, s.k, s.n, dtype)
    return BenchCase("dX", s.m, s.n, s.k, dtype)


HOST = ((16, 256, 256), (1, 1024, 1024))
"""(M, K, N) of products whose CPU launch overhead is longer than their time on the GPU."""

_QUICK = {(4096, 6144), (4096, 4096), (14336, 4096), (7168, 256), (768, 3072)}


def quick() -> tuple[BenchCase, ...]:
    """A part of `CASES` that takes under a minute."""
    rows = (1, 16, 128, 256, 2048)
    return tuple(
        c
        for c in CASES
        if c.work == "bmm"
        or (c.work == "logp" and c.m == 256)
        or ((c.k, c.n) in _QUICK and (c.m in rows or c.work in ("dW ragged", "dW main_grad")))
    )


@dataclass(frozen=True, slots=True)
class Peer:
    """Another batch-invariant ``x @ weight.T``: its layout of the weight, and its call."""

    weight: Callable[[Tensor], Tensor]
    run: Callable[[Any, Tensor, Tensor], Tensor]


PEERS = {
    "batch_invariant_ops": Peer(lambda w: w.mT, lambda module, x, w: module.matmul_persistent(x, w)),
    "sgemm_bi": Peer(
        lambda w: w.mT.contiguous(),
        lambda module, x, w: module.deterministic_linear(x, w, None, tensor_cores=True),
    ),
}
"""Peers by the module that has to be installed."""


def packed_lengths(tokens: int) -> list[int]:
    """Lengths of sequences, between 1 and 1023 with mean 512, mostly odd. They are the same in every run."""
    found, left, state = [], tokens, 1
    while left:
        state = state * 48271 % 2147483647
        found.append(min(left, 1 + state % 1023))
        left -= found[-1]
    return found


def make_operands(case: BenchCase, device: torch.device, make: Callable[..., Tensor]) -> tuple[Tensor, ...]:
    def matrix(rows: int, columns: int) -> Tensor:
        return make((rows, columns), device=device, dtype=case.dtype)

    m, k, n = case.m, case.k, case.n
    if case.work == "bmm":
        a, b = (make((case.batch, *shape), device=device, dtype=case.dtype) for shape in ((m, k), (k, n)))
        return a, b, torch.empty(case.bytes // 2, device=device, dtype=torch.uint8)
    if case.work == "forward":
        return matrix(m, k), matrix(n, k)
    if case.work == "logp":
        return matrix(m, k), matrix(n, k), torch.randint(n, (m,), device=device)
    if case.work == "dX":
        return matrix(m, n), matrix(n, k)
    if case.work == "dW main_grad":
        return matrix(m, n), matrix(m, k), torch.zeros(n, k, device=device)
    return matrix(m, n), matrix(m, k)


def stored_logits(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Log-probabilities in PyTorch, which stores the logits."""
    return -F.cross_entropy(F.linear(x, weight).float(), target, reduction="none")


def contestants(case: BenchCase, device: torch.device) -> dict[str, Run]:
    """The calls that are timed: samebits' and its competitors'."""
    if case.work == "forward":
        return {"samebits": lambda x, w: matmul(x, w.mT), "torch": lambda x, w: torch.mm(x, w.mT)}
    if case.work == "dX":
        return {"samebits": matmul, "torch": torch.mm}
    if case.work == "bmm":
        return {
            "samebits": lambda a, b, half: bmm(a, b),
            "torch": lambda a, b, half: torch.bmm(a, b),
            "copy": lambda a, b, half: half.clone(),
        }
    if case.work == "logp":
        return {
            "samebits": linear_logp,
            "torch": stored_logits,
            "product": lambda x, w, t: torch.mm(x, w.mT),
        }
    dense: Run = lambda dy, x: matmul(dy.mT, x)  # noqa: E731
    if case.work == "dW":
        return {"samebits": dense, "torch": lambda dy, x: torch.mm(dy.mT, x)}
    if case.work == "dW main_grad":
        return {
            "samebits": lambda dy, x, grad: addmm_(grad, dy.mT, x),
            "torch": lambda dy, x, grad: grad.add_(torch.mm(dy.mT, x)),
        }
    ends = torch.tensor([0, *itertools.accumulate(packed_lengths(case.m))], dtype=torch.int32, device=device)

    def ragged(dy: Tensor, x: Tensor) -> Tensor:
        key = pack_key(TENSOR_CORE.key, chosen_backend("cuda"))
        parts = dy.mT[None, None], x[None, None], ends, case.dtype, key
        out: Tensor = torch.ops.samebits.addbmm(None, *parts)
        return out[0]

    return {"samebits": ragged, "dense": dense}
