"""Triton's kernels in its interpreter, on CPU tensors.

TRITON_INTERPRET=1 python -m tests.backends.triton.interpreted PART [N]

Prints how many results of a part had the bits of the reference. With N, one of N cases of each loop runs,
with every value in one of them (``tests.support.sampling``). The interpreter's fma is a true one, so under
FMA operands are of all kinds (bf16 it does not round as it should). Its dot adds in an order of its own, so
under TENSOR_CORE they are numbers whose sums are exact in every order.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton.language.core import is_builtin
from triton.runtime import interpreter

import samebits
from samebits import FMA, HOPPER, TENSOR_CORE, Contract, backends
from samebits.backends import reference as reference_package
from samebits.backends.logits_in_pieces import grad_logits
from samebits.backends.product import Operands
from samebits.backends.reference import linear_logp as reference_linear_logp
from samebits.backends.reference import logp as reference_logp
from samebits.backends.reference import matmul as reference
from samebits.backends.token_logps import Rows
from samebits.backends.triton import linear_logp, logp, matmul, runtime
from samebits.backends.triton import products as backend
from samebits.backends.triton.products import TritonKernel
from samebits.backends.triton.tiles import TritonSchedule, fits
from samebits.testing import KINDS, assert_same_bits, values
from samebits.tools.verify import Report, reductions
from tests.ops.test_logp import KINDS as KINDS_OF_LOGITS
from tests.ops.test_logp import pieces, rows
from tests.support.sampling import sample

F32, F16 = torch.float32, torch.float16
ON_HOPPER = TENSOR_CORE.on(HOPPER)
LAYOUTS = ("plain", "transposed", "spread")
parts = 1


def some(*values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Their product, or one of `parts` of it."""
    cases = [*itertools.product(*values)]
    names = [dict(zip("abcd", case, strict=False)) for case in cases]
    return [cases[i] for i in sorted(sample(names, parts, repr(len(cases))))]


def whole(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).to(F16)


def laid(t: Tensor, layout: str) -> Tensor:
    if layout == "transposed":
        return t.mT.contiguous().mT
    if layout == "spread":
        return t.new_full((*t.shape[:-1], 2 * t.shape[-1]), torch.nan)[..., ::2].copy_(t)
    return t


def check(
    a: Tensor,
    b: Tensor,
    out_dtype: torch.dtype,
    kernel: TritonKernel[Any],
    schedule: TritonSchedule,
    layouts: tuple[str, str],
    *,
    acc: Tensor | None = None,
    bias: Tensor | None = None,
    spans: Tensor | None = None,
) -> int:
    contract = FMA if kernel.step == "fma" else ON_HOPPER
    if bias is None:
        want = reference.addbmm(acc, a, b, spans, out_dtype=out_dtype, contract=contract.key)
    else:
        want = reference.matmul(a[:, 0], b[:, 0], bias=bias, out_dtype=out_dtype, contract=contract.key)
    out = torch.full(want.shape, torch.nan, dtype=out_dtype) if acc is None else acc.clone()
    a, b = laid(a, layouts[0]), laid(b, layouts[1])
    if spans is not None:
        a, b = a[:, 0], b[:, 0]
    start = None if acc is None else out
    x = Operands(a, b, out, bias, start, spans, sequences=bias is None)
    kernel.run(x, schedule)
    assert_same_bits(out, want, f"{schedule}, {tuple(a.shape)}, {tuple(b.shape)}, {layouts}")
    return 1


def fma() -> int:
    count = 0
    layouts = itertools.cycle(itertools.product(LAYOUTS, LAYOUTS))
    for kind, dtype, schedule in some(KINDS, (F32, F16), backend.FMA_SCHEDULES[1:]):
        a, b = values(kind, (2, 1, 17, 9), dtype, 0), values(kind, (2, 1, 9, 20), dtype, 1)
        acc, bias = values("normal", (2, 17, 20), F32, 2), values(kind, (20,), dtype, 3)
        acc[0, 0, 0] = -0.0
        count += check(a, b, dtype, backend.FMA, schedule, next(layouts), bias=bias)
        count += check(a, b, F32, backend.FMA, schedule, next(layouts), acc=acc)
    for schedule in backend.FMA_SCHEDULES:
        acc = values("tiny", (1, 17, 20), F32, 2)
        a, b = values("tiny", (1, 3, 17, 9), F32, 0), values("tiny", (1, 3, 9, 20), F32, 1)
        count += check(a, b, F32, backend.FMA, schedule, next(layouts), acc=acc)
        a, b = values("tiny", (1, 1, 17, 23), F32, 0), values("tiny", (1, 1, 23, 20), F32, 1)
        spans = torch.tensor([0, 3, 3, 17, 23])
        count += check(a, b, F32, backend.FMA, schedule, next(layouts), acc=acc, spans=spans)
    largest = backend.FMA_SCHEDULES[0]
    return count + check(
        values("wide", (1, 1, 130, 7), F32, 0),
        values("wide", (1, 1, 7, 133), F32, 1),
        F32,
        backend.FMA,
        largest,
        LAYOUTS[:2],
    )


def wrong_spans() -> int:
    """Bounds outside of k are taken as the nearer end, and a span that ends before it starts as empty."""
    count = 0
    for kernel, contract in ((backend.FMA, FMA), (backend.TENSOR_CORE, ON_HOPPER)):
        around = whole((1, 1, 24, 60), 0), whole((1, 1, 60, 24), 1)
        a, b = around[0][..., 10:40], around[1][..., 10:40, :]
        want = torch.zeros(1, 24, 24)
        for start, stop in ((0, 20), (5, 30)):
            part = a[..., start:stop], b[..., start:stop, :], None
            want = reference.addbmm(want, *part, out_dtype=F32, contract=contract.key)
        for dtype in (torch.int32, torch.int64):
            out, spans = torch.full((1, 24, 24), torch.nan), torch.tensor([-7, 20, 5, 44], dtype=dtype)
            x = Operands(a[:, 0], b[:, 0], out, cu_seqlens=spans, sequences=True)
            kernel.run(x, kernel.catalogue[1])
            assert_same_bits(out, want, f"{contract}, {dtype}")
            count += 1
    return count


def tensor_core() -> int:
    count = 0
    of_both = [*itertools.product(LAYOUTS[:2], LAYOUTS[:2])]
    for layouts, schedule in some(of_both, backend.MMA_SCHEDULES):
        a, b = whole((2, 3, 24, 40), 0), whole((2, 3, 40, 72), 1)
        count += check(a, b, F32, backend.TENSOR_CORE, schedule, layouts, acc=whole((2, 24, 72), 2).float())
        spans = torch.tensor([0, 5, 5, 22, 40])
        count += check(a[:1, :1], b[:1, :1], F16, backend.TENSOR_CORE, schedule, layouts, spans=spans)
    for layouts, tiles in some(of_both, backend.TILE_SCHEDULES):
        a, b = whole((1, 1, 136, 72), 0), whole((1, 1, 72, 264), 1)
        count += check(a, b, F16, backend.TENSOR_CORE_TILES, tiles, layouts, bias=whole((264,), 2))
        if fits(tiles, 4, True, runtime.gpu(-1)):
            acc = whole((1, 136, 264), 3).float()
            count += check(a, b, F32, backend.TENSOR_CORE_TILES, tiles, layouts, acc=acc)
    return count


SPANS = torch.tensor([0, 3, 3, 17, 20])
OPERATIONS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "linear": (samebits.linear, [(20, 9), (12, 9), (12,)]),
    "linear, one row": (samebits.linear, [(9,), (12, 9)]),
    "linear, rows of a batch": (samebits.linear, [(3, 7, 9), (12, 9), (12,)]),
    "linear, packed": (lambda *t, **o: samebits.linear(*t, cu_seqlens=SPANS, **o), [(20, 9), (12, 9), (12,)]),
    "matmul": (samebits.matmul, [(3, 1, 5, 9), (2, 9, 6)]),
    "matmul, no terms": (samebits.matmul, [(5, 0), (0, 6)]),
    "matmul, no rows": (samebits.matmul, [(0, 5), (5, 6)]),
    "bmm": (samebits.bmm, [(4, 5, 9), (1, 9, 6)]),
    "addmm_, no terms": (
        lambda a, b, **o: samebits.addmm_(a.new_ones(5, 6, dtype=F32), a, b, **o),
        [(5, 0), (0, 6)],
    ),
    "addmm_": (lambda a, b, **o: samebits.addmm_(a.new_ones(5, 6, dtype=F32), a, b, **o), [(5, 9), (9, 6)]),
}


def gradients(call: Callable[..., Tensor], inputs: list[Tensor], contract: Contract) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in inputs]
    out = call(*leaves, contract=contract)
    dy = whole(tuple(out.shape), 9).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, dy)]


@contextmanager
def by_triton() -> Iterator[None]:
    """The reference's modules exchanged for Triton's."""
    theirs: dict[str, Any] = {"matmul": matmul, "logp": logp, "linear_logp": linear_logp}
    own = backends._reference
    with (
        mock.patch.multiple(reference_package, **theirs),
        mock.patch.object(backends, "_reference", lambda name: theirs.get(name) or own(name)),
    ):
        yield


def compare(got: Sequence[Tensor], want: Sequence[Tensor], what: str) -> int:
    """How many there are, all with the same bits."""
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert_same_bits(g, w, f"{what}, result {i}")
    return len(want)


def operations() -> int:
    """The public operations on products, and their gradients."""
    count = 0
    makes: list[tuple[Contract, Callable[..., Any]]] = [(ON_HOPPER, whole)]
    makes += [
        (FMA, lambda shape, seed, kind=kind, dtype=dtype: values(kind, shape, dtype, seed))
        for kind in ("normal", "special", "brink")
        for dtype in (F32, F16)
    ]
    for name, (contract, make) in some([*OPERATIONS], makes):
        call, shapes = OPERATIONS[name]
        inputs = [make(shape, seed) for seed, shape in enumerate(shapes)]
        want = gradients(call, inputs, contract)
        with by_triton():
            got = gradients(call, inputs, contract)
        count += compare(got, want, f"{name}, {contract}")
    return count


def segments() -> int:
    """Products in segments, batches of them, with a bias, and their gradients."""
    count = 0
    calls = samebits.linear, samebits.bmm
    makes: list[tuple[Contract, Callable[..., Any]]] = [(ON_HOPPER, whole_values), (FMA, values)]
    cases = [(*case, *of) for of in makes for case in ((2, F16), (8, F16), (64, F32))]
    cases.remove((64, F32, *makes[0]))  # tensor cores take 16 bits
    for call, (segments, dtype, contract, make) in some(calls, cases):
        sizes: tuple[tuple[int, ...], ...] = (3, 2 * segments), (segments, 2 * segments), (segments,)
        if call is samebits.bmm:
            sizes = (2, 3, 2 * segments), (2, 2 * segments, segments)
        inputs = [make("special", s, dtype, seed, "cpu") for seed, s in enumerate(sizes)]
        want = gradients(call, inputs, contract.segmented(segments))
        with by_triton():
            got = gradients(call, inputs, contract.segmented(segments))
        count += compare(got, want, f"{segments} segments, {contract}")
    partials = values("wide", (2, 5, 7), F32, 1)
    want = partials[0] + partials[1]
    matmul.tree_later(partials[0], partials)()
    return count + compare([partials[0]], [want], "a tree in place")


def given_logits() -> int:
    count = 0
    for kind, vocabulary, dtype in some(KINDS_OF_LOGITS, (1, 200, 33 * 128 + 5), (F32, F16)):
        target = torch.tensor([0, vocabulary // 2, -100, vocabulary - 1, 0])
        grad = torch.tensor([1.0, -0.3, 1.0, 1e-3, -0.0])

        def run(z: Tensor, target: Tensor = target, grad: Tensor = grad) -> tuple[Tensor, ...]:
            out = samebits.logp(z, target)
            return out.detach(), *torch.autograd.grad(out, z, grad)

        z = rows(kind, 5, vocabulary).to(dtype).requires_grad_()
        want = run(z)
        with by_triton():
            got = run(z)
        count += compare(got, want, f"logp, {kind}, {vocabulary}, {dtype}")
    return count


def log_probabilities() -> int:
    """`linear_logp` under FMA, with all of its options and their gradients, and without."""
    count = 0
    shapes = (9, 7), (300, 7), (300,)
    target = torch.tensor([0, 299, -100, 5, 130, 7, 128, 299, -100])
    spans = torch.tensor([0, 4, 4, 9])
    cases = ("special", F32, 1), ("normal", F32, 1 << 20), ("special", F16, 1 << 20), ("wide", F16, 1)
    for kind, dtype, size in cases if parts == 1 else cases[::2]:
        hidden, weight, bias = (values("normal", shape, dtype, i) for i, shape in enumerate(shapes))
        hidden[1], weight[290:], bias[:3] = (values(kind, s, dtype, 3) for s in ((7,), (10, 7), (3,)))
        grads = [values("normal", (9,), F32, seed) for seed in (4, 5)]
        leaves = [t.requires_grad_() for t in (hidden, weight, bias)]

        def run(leaves: list[Tensor] = leaves, grads: list[Tensor] = grads) -> tuple[Tensor, ...]:
            hidden, weight, bias = leaves
            main_grad = torch.ones(weight.shape)
            plain = samebits.linear_logp(hidden, weight, target, contract=FMA)
            results = samebits.linear_logp(
                *(hidden, weight, target, bias),
                temperature=0.7,
                return_entropy=True,
                cu_seqlens=spans,
                main_grad=main_grad,
                contract=FMA,
            )
            return (
                *(t.detach() for t in (plain, *results)),
                *torch.autograd.grad(plain, leaves[:2], grads[0]),
                *torch.autograd.grad(results, [hidden, bias], grads),
                main_grad,
            )

        want = run()
        with by_triton(), pieces(size):
            got = run()
        count += compare(got, want, f"linear_logp, {kind}, {dtype}, pieces of {size}")
    return count


def tensor_core_log_probabilities() -> int:
    """Results and gradients of logits, under every schedule of the fused kernels, and by way of logits."""
    count = 0
    key = ON_HOPPER.key
    tokens, features, vocabulary = 136, 48, 600
    part = slice(128, vocabulary - 9)
    wide, weight = whole((tokens, 2 * features), 0), whole((vocabulary, features), 1)
    hidden, strided, bias = wide[:, :features], wide[:, ::2], whole((vocabulary,), 2)
    target = torch.randint(vocabulary, (tokens,), generator=torch.Generator().manual_seed(3))
    target[::7], target[1], target[3] = -100, -5, vocabulary
    grad, grad_entropy = (values("normal", (tokens,), F32, seed) for seed in (4, 5))
    of_both = range(2)  # cases that are fused
    schedules, tiles = some(of_both, linear_logp.STATISTICS_SCHEDULES), some(of_both, backend.TILE_SCHEDULES)
    for i, (x, b, entropy, scale) in enumerate(
        ((hidden, None, False, 1.0), (hidden, bias, True, 0.01), (strided, bias, True, 0.01))
    ):
        fused = x is hidden
        assert linear_logp.supports_fused(x, weight, b, key) == fused
        want = Rows.empty(target, vocabulary, -100, scale=scale, entropy=entropy)
        kept = vocabulary // 256 * 128 if b is None else vocabulary
        want_kept = torch.full((tokens, kept), torch.nan)
        statistics = reference_linear_logp.statistics(x, weight, b, want, want_kept, contract=key)
        reference_logp.combine(statistics, want)
        arguments: tuple[Any, ...] = (x, weight, b, part, want, grad, grad_entropy if entropy else None)
        want_dz = grad_logits(reference_linear_logp.grad_logits_later, *arguments, dtype=F16, contract=key)
        for s in (s for case, s in schedules if case == i) if fused else (None,):
            got = Rows.empty(target, vocabulary, -100, scale=scale, entropy=entropy)
            keep = torch.full((tokens, kept), torch.nan)
            found = linear_logp.statistics(x, weight, b, got, keep, contract=key, schedule=s)
            logp.combine(found, got)
            assert_same_bits(keep, want_kept, f"logits, {s}")
            for name in ("logp", "entropy", "shift", "log_sum"):
                assert_same_bits(getattr(got, name), getattr(want, name), f"{name}, {s}")
                count += 1
        for s in (s for case, s in tiles if case == i) if fused else (None,):
            by = partial(linear_logp.grad_logits_later, schedule=s)
            dz = grad_logits(by, *arguments, dtype=F16, contract=key)
            assert_same_bits(dz, want_dz, f"dz, {s}")
            count += 1
    return count


def whole_values(kind: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: str) -> Tensor:
    """In place of `values`: sums that are exact in every order."""
    return whole(shape, seed).to(dtype).to(device)


def verification() -> int:
    """What `samebits verify` says of log-probabilities: right, but for a bit made wrong here."""
    cpu = torch.device("cpu")
    on = reductions.on_triton(ON_HOPPER, -1)
    assert len(on.schedules("statistics")) == len(linear_logp.STATISTICS_SCHEDULES)
    fused = [c for c in reductions.reductions(False, fused=True) if c.features and c.dtype == F16][3::38]
    given = [c for c in reductions.reductions(False, fused=False) if on.tried(c) and c.other == F32][1::34]
    assert len({c.kernel for c in fused}) >= 3
    drawn = reductions.RowOperands

    def combine(statistics: Any, rows: Rows) -> None:
        logp.combine(statistics, rows)
        rows.logp.view(torch.int32)[0] ^= 1

    wrong = on._replace(name="wrong ", logp=mock.Mock(wraps=logp, combine=combine))
    found = Report(None, "", "", "", {}, False)
    with mock.patch.object(reductions, "finish"):
        with mock.patch.object(reductions, "RowOperands", lambda case, **of: drawn(case, whole_values, **of)):
            reductions.verify_reductions(found, fused, [on], ON_HOPPER, cpu)
        reductions.verify_reductions(found, given, [on, wrong], ON_HOPPER, cpu)
    assert found.first is None or found.first.kernel.startswith("wrong "), found.first
    assert not any(line.differing for line in found.lines if line.kernel.startswith("triton "))
    assert any(line.differing for line in found.lines if line.kernel.startswith("wrong "))
    return sum(line.results for line in found.lines if line.kernel.startswith("triton "))


@contextmanager
def patched_once() -> Iterator[None]:
    """Every function of a kernel patches Triton's language again, which takes a third of all time to see.

    Names are patched together, so the first tells whether they are.
    """
    patch, first = interpreter._patch_builtin, {}

    def patch_builtin(package: Any, *of: Any) -> None:
        if package not in first:
            names = (name for name, member in inspect.getmembers(package) if is_builtin(member))
            first[package] = next(names, None)
        if first[package] and is_builtin(getattr(package, first[package])):
            patch(package, *of)

    with mock.patch.object(interpreter, "_patch_builtin", patch_builtin):
        yield


PARTS = {
    "products": (fma, wrong_spans, tensor_core, operations, segments),
    "logp": (given_logits, log_probabilities, tensor_core_log_probabilities, verification),
}

if __name__ == "__main__":
    parts = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    with patched_once():
        print(sum(results() for results in PARTS[sys.argv[1]]))
