"""Verification of fused layers, gelu, rsqrt and log-probabilities of ids, on operands made for them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from samebits.ops import activation as alone
from samebits.ops.adapters import add_adapters
from samebits.ops.add_rms_norm import add_rms_norm
from samebits.ops.expand import sum_over_broadcast
from samebits.ops.gated import ACTIVATIONS, gated
from samebits.ops.logp import gather_logp
from samebits.ops.norm_rotary import norm_rotary
from samebits.ops.rotary import rotary
from samebits.ops.rsqrt import rsqrt
from samebits.testing import KINDS, values
from samebits.tools.verify import recurrent
from samebits.tools.verify.case import BF16, F16, F32
from samebits.tools.verify.failures import finish, running
from samebits.tools.verify.operands import Surrounded
from samebits.tools.verify.products import AROUND
from samebits.tools.verify.reference import REFERENCE
from samebits.tools.verify.report import Report

DTYPES = BF16, F16, F32
Results = tuple[Tensor, ...]


@dataclass(frozen=True)
class FusedCase:
    """A call of a public function.

    Attributes:
        kernel: the function.
        what: the line of the report that the case belongs to.
        name: what else tells the case from others.
        draw: makes its operands on a CPU.
        run: computes the results of these, or of copies on a GPU. Of rows it takes a `schedule`.
        row: length and dtype of the rows that threads share, if they do.
    """

    kernel: str
    what: str
    name: str
    draw: Callable[[], Results]
    run: Callable[..., Results]
    row: tuple[int, torch.dtype] | None = None

    def __str__(self) -> str:
        return self.name.replace("torch.", "")


_NORMED = (
    *(
        (1, 1),
        (1, 129),
        (3, 127),
        (65, 31),
        (7, 1024),
        (9, 1025),
        (3, 4097),
        (300, 70),
        (2, 7000),
        (3, 12288),
    ),
    *((2, 16384), (1, 40000), (1100, 1024), (1030, 2056), (300, 128), (33, 64), (70, 256), (9, 200)),
)
_FORMS: tuple[dict[str, Any], ...] = ({}, {"rounding": "once"}, {"rounding": "once", "offset": 1.0})
_TURNED = ((64, 64), (128, 128), (96, 32), (40, 16), (9, 6))
_LAYOUTS = ("halves", "pairs", "pairs to halves")
_GRADIENTS = ("rounded", "wide", "split")
_OF_IDS = ((1, 1, 1), (3, 129, 5), (2, 9000, 21), (1, 150_000, 2), (70, 1000, 300), (1100, 300, 1))


def fused_cases(thorough: bool) -> list[FusedCase]:
    """All cases."""
    every = (_norms, _rotations, _normed_rotations, _gates, _functions, _of_ids, _adapters, _recurrent)
    return [case for cases in every for case in cases(3 if thorough else 1)]


def _drawn(kind: str, *operands: tuple[tuple[int, ...], torch.dtype]) -> Results:
    """The first operand is of this kind, the others are normal."""
    kinds = itertools.chain([kind], itertools.repeat("normal"))
    drawn = zip(operands, kinds, range(1, len(operands) + 1), strict=False)
    return tuple(values(of, shape, dtype, seed) for (shape, dtype), of, seed in drawn)


def _norms(times: int) -> Iterator[FusedCase]:
    kinds, forms = itertools.cycle(KINDS), itertools.cycle(_FORMS)
    for dtype, weight in (*zip(DTYPES, DTYPES, strict=True), (BF16, F32), (F16, F32)):
        for rows, n in _NORMED * times:
            kind, form = next(kinds), next(forms)
            shape = rows, n
            draw = partial(_drawn, kind, (shape, dtype), (shape, dtype), ((n,), weight))
            name = f"{rows} x {n}, {dtype}, {weight}, {kind}, {form}"
            yield FusedCase("add_rms_norm", "shapes", name, draw, partial(_normed, form), (n, dtype))
            run = partial(_norm_gradients, form)
            yield FusedCase("add_rms_norm", "gradients", name, draw, run, (n, dtype))
        for heads, n in ((3, 128), (5, 67)):
            draw = partial(
                _drawn, "normal", ((9, heads + 2, n), dtype), ((9, heads, n), dtype), ((n,), weight)
            )
            name = f"{heads} heads of {n}, {dtype}, {weight}"
            yield FusedCase("add_rms_norm", "in place", name, draw, _normed_in_place, (n, dtype))


_EPS = 1e-6


def _kernels(x: Tensor, schedule: Any) -> tuple[Any, dict[str, Any]]:
    """The functions behind `add_rms_norm` on a device, and an argument of theirs."""
    if not x.is_cuda:
        from samebits.backends.reference import fused

        return fused, {}
    from samebits.backends.cuda import add_rms_norm as kernels

    return kernels, {"schedule": schedule}


def _normed(
    form: dict[str, Any], x: Tensor, residual: Tensor, weight: Tensor, *, schedule: Any = None
) -> Results:
    if schedule is None:
        alone = add_rms_norm(x, None, None)
        return *add_rms_norm(x, residual, weight, **form), add_rms_norm(x, None, weight, **form), alone
    kernels, how = _kernels(x, schedule)
    once, offset = form.get("rounding") == "once", form.get("offset", 0.0)
    dtype = x.dtype if once else torch.promote_types(x.dtype, weight.dtype)
    both = kernels.add_rms_norm(x, residual, weight, _EPS, offset, once, dtype, **how)
    alone = kernels.add_rms_norm(x, None, None, _EPS, 0.0, False, x.dtype, **how)[0]
    return *both, kernels.add_rms_norm(x, None, weight, _EPS, offset, once, dtype, **how)[0], alone


def _norm_gradients(
    form: dict[str, Any], x: Tensor, residual: Tensor, weight: Tensor, *, schedule: Any = None
) -> Results:
    """With a gradient of the sum, and without; x stands for gradients, too."""
    if schedule is not None:
        return _norm_gradients_shared(form, x, residual, weight, schedule)
    with torch.enable_grad():
        r, w = (t.detach().requires_grad_() for t in (residual, weight))
        y, total = add_rms_norm(x, r, w, **form)
        of_y = residual.to(y.dtype)
        both = torch.autograd.grad([y, total], [r, w], [of_y, x], retain_graph=True)
        return *both, *torch.autograd.grad(y, [r, w], of_y)


def _norm_gradients_shared(
    form: dict[str, Any], x: Tensor, residual: Tensor, weight: Tensor, schedule: Any
) -> Results:
    (kernels, how), found = _kernels(x, schedule), []
    once, offset = form.get("rounding") == "once", form.get("offset", 0.0)
    dtype = x.dtype if once else torch.promote_types(x.dtype, weight.dtype)
    total = kernels.add_rms_norm(x, residual, weight, _EPS, offset, once, dtype, **how)[1]
    of_y = residual.to(dtype)
    for of_sum in (x, None):
        of_r, terms = kernels.add_rms_norm_backward(
            of_y, of_sum, total, weight, _EPS, offset, once, True, **how
        )
        found += [of_r, sum_over_broadcast(terms, weight.shape, weight.dtype)]
    return tuple(found)


def _normed_in_place(packed: Tensor, residual: Tensor, weight: Tensor, *, schedule: Any = None) -> Results:
    packed, residual = packed.clone(), residual.clone()
    x = packed[:, 1:-1]
    if schedule is not None:
        kernels, how = _kernels(x, schedule)
        once = weight.dtype != x.dtype
        kernels.add_rms_norm_into(x, residual, weight, x, residual, _EPS, 0.0, once, **how)
    elif weight.dtype == x.dtype:
        add_rms_norm(x, residual, weight, out=x, out_sum=residual)
    else:
        add_rms_norm(x, residual, weight, rounding="once", out=x, out_sum=residual)
    return packed, residual


def _rotations(times: int) -> Iterator[FusedCase]:
    kinds, forms = itertools.cycle(KINDS), itertools.cycle(_GRADIENTS)
    dtypes = (*zip(DTYPES, DTYPES, strict=True), (BF16, F32), (F32, BF16))
    of = itertools.product(dtypes, _LAYOUTS, _TURNED * times, (False, True))
    for (dtype, trig), layout, (head, dim), full in of:
        kind, width = next(kinds), 2 * (dim if full else dim // 2)
        draw = partial(_turned, kind, head, width, dtype, trig)
        name = (
            f"{layout}, {dim} of {head}, cosines {trig} of {'entries' if full else 'pairs'}, {dtype}, {kind}"
        )
        yield FusedCase("rotary", layout, name, draw, partial(_rotated, dim, layout))
        gradients = next(forms)
        run = partial(_turned_back, dim, layout, gradients)
        yield FusedCase("rotary", "gradients", f"{gradients}, {name}", draw, run)


def _turned(kind: str, head: int, width: int, dtype: torch.dtype, trig: torch.dtype) -> Results:
    at = torch.randint(-1, 51, (3, 7), generator=torch.Generator().manual_seed(5))
    return *_drawn(kind, ((3, 7, 6 * head), dtype), ((50, width), trig)), at


def _rotated(dim: int, layout: Any, packed: Tensor, table: Tensor, at: Tensor) -> Results:
    """By positions, of every token, and in place, of heads packed with others."""
    cos, sin = table.chunk(2, -1)
    heads = packed.unflatten(-1, (6, -1))
    q, k = heads[..., :3, :], heads[..., 3:5, :]
    known = at.clamp(0, len(table) - 1)
    options: dict[str, Any] = {"rotary_dim": dim, "layout": layout}
    found = [
        *rotary(q, k, cos, sin, positions=at, **options),
        *rotary(q.transpose(0, 1), k.transpose(0, 1), cos[known.mT], sin[known.mT], **options),
    ]
    if layout != "pairs to halves":
        mine = heads.clone()
        out = mine[..., :3, :], mine[..., 3:5, :]
        rotary(*out, cos, sin, positions=at.int(), out=out, **options)
        found.append(mine)
    return tuple(t for t in found if t is not None)


def _turned_back(dim: int, layout: Any, gradients: Any, packed: Tensor, table: Tensor, at: Tensor) -> Results:
    """Gradients of queries and keys, and of one of both; the operands stand for those of the results."""
    cos, sin = table.chunk(2, -1)
    grads = packed.unflatten(-1, (6, -1))
    of_q, of_k = grads[..., :3, :], grads[..., 3:5, :]
    options: dict[str, Any] = {"rotary_dim": dim, "layout": layout, "gradients": gradients}
    with torch.enable_grad():
        q, k = (torch.zeros_like(t).requires_grad_() for t in (of_q, of_k))
        turned = rotary(q, k, cos, sin, positions=at, **options)
        both = torch.autograd.grad(turned, (q, k), (of_q, of_k), retain_graph=True)
        return *both, *torch.autograd.grad(turned[1], k, of_k)


def _normed_rotations(times: int) -> Iterator[FusedCase]:
    kinds, forms, gradients = itertools.cycle(KINDS), itertools.cycle(_FORMS), itertools.cycle(_GRADIENTS)
    dtypes = (*zip(DTYPES, DTYPES, strict=True), (BF16, F32), (F32, BF16))
    heads = ((128, 128), (64, 32), (256, 256), (200, 64), (9, 6)) * times
    for (dtype, trig), layout, (head, dim), full in itertools.product(dtypes, _LAYOUTS, heads, (False, True)):
        kind, form, of, width = next(kinds), next(forms), next(gradients), 2 * (dim if full else dim // 2)
        draw = partial(_turned_with_weights, kind, head, width, dtype, trig)
        name = (
            f"{layout}, {dim} of {head}, {form}, cosines {trig} of {'entries' if full else 'pairs'}, {dtype}"
        )
        options = form | {"rotary_dim": dim, "layout": layout, "gradients": of}
        yield FusedCase("norm_rotary", layout, f"{name}, {of}, {kind}", draw, partial(_norm_rotated, options))


def _turned_with_weights(kind: str, head: int, width: int, dtype: torch.dtype, trig: torch.dtype) -> Results:
    packed, table, at = _turned(kind, head, width, dtype, trig)
    return packed, table, at, *_drawn("normal", ((2, head), dtype))


def _norm_rotated(
    options: dict[str, Any], packed: Tensor, table: Tensor, at: Tensor, weights: Tensor
) -> Results:
    """Heads packed with others, in place too, and all gradients."""
    cos, sin = table.chunk(2, -1)
    heads = packed.unflatten(-1, (6, -1))
    q, k, grad = heads[..., :3, :], heads[..., 3:5, :], heads[..., 1:, :]
    with torch.enable_grad():
        of_q, of_k, *of_weights = leaves = [t.detach().requires_grad_() for t in (q, k, *weights)]
        turned = norm_rotary(of_q, of_k, of_weights[0], of_weights[1], cos, sin, positions=at, **options)
        both = torch.autograd.grad(turned, leaves, (grad[..., :3, :], grad[..., 3:, :]), retain_graph=True)
        of_keys = torch.autograd.grad(turned[1], leaves[1::2], grad[..., 3:, :])
    found = [*(t.detach() for t in turned), *both, *of_keys]
    if options["layout"] != "pairs to halves":
        mine = heads.clone()
        out = mine[..., :3, :], mine[..., 3:5, :]
        norm_rotary(*out, weights[0], weights[1], cos, sin, positions=at.int(), out=out, **options)
        found.append(mine)
    return tuple(found)


def _gates(times: int) -> Iterator[FusedCase]:
    numbers = itertools.count()
    for dtype, activation, kind in itertools.product(DTYPES, ACTIVATIONS, KINDS):
        for rows, n in ((5, 64), (3, 37), (300, 520), (2, 14336))[: 2 + times]:
            draw = partial(_drawn, kind, ((rows, 2 * n), dtype))
            limit = 2.5 if activation == "gpt_oss" else None
            for rounding in _roundings(activation, dtype):
                options = {"activation": activation, "limit": limit, "rounding": rounding}
                name = f"{rows} x {n}, {dtype}, {kind}, rounded {rounding}"
                yield FusedCase("gated", activation, name, draw, partial(_gated, options))
                if next(numbers) % 5 == 0 or times > 1:  # they take the CPU longer
                    run = partial(_gate_gradients, options)
                    yield FusedCase("gated", "gradients", f"{activation}, {name}", draw, run)
    for dtype, activation in itertools.product((BF16, F16), ACTIVATIONS):
        for rounding in _roundings(activation, dtype):
            draw, name = partial(_every_value, dtype), f"{activation}, {dtype}, rounded {rounding}"
            options = {"activation": activation, "rounding": rounding}
            yield FusedCase("gated", "every value", name, draw, partial(_gated, options))
            yield FusedCase("gated", "every value", name, draw, partial(_gate_gradients, options))


def _roundings(activation: str, dtype: torch.dtype) -> tuple[str, ...]:
    """Those that have kernels of their own."""
    return ("twice",) if activation == "gpt_oss" or dtype == torch.float32 else ("twice", "once")


def _every_value(dtype: torch.dtype) -> Results:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    return (
        torch.stack((every, torch.ones_like(every)), -1).view(-1, 32)[
            :, [*range(0, 32, 2), *range(1, 32, 2)]
        ],
    )


def _gated(options: dict[str, Any], packed: Tensor) -> Results:
    """Packed, in turns, and in place."""
    turns = torch.stack(packed.chunk(2, -1), -1).flatten(-2)
    mine = packed.clone()
    gated(mine, out=mine.chunk(2, -1)[1], **options)
    apart = gated(turns[..., ::2], turns[..., 1::2], **options)
    return gated(packed, **options), gated(turns, interleaved=True, **options), apart, mine


def _gate_gradients(options: dict[str, Any], packed: Tensor) -> Results:
    """Packed, in turns, and apart; factors stand for gradients, too."""
    grad = packed.chunk(2, -1)[1]
    with torch.enable_grad():
        turns = torch.stack(packed.chunk(2, -1), -1).flatten(-2)
        both, each, *apart = (t.detach().requires_grad_() for t in (packed, turns, *packed.chunk(2, -1)))
        return (
            *torch.autograd.grad(gated(both, **options), both, grad),
            *torch.autograd.grad(gated(each, interleaved=True, **options), each, grad),
            *torch.autograd.grad(gated(*apart, **options), apart, grad),
            *torch.autograd.grad(gated(apart[0].detach(), apart[1], **options), apart[1], grad),
        )


_ADAPTED = (
    *((1, 4, 16, (64, 80, 96)), (9, 3, 32, (72,)), (40, 5, 16, (30, 57)), (17, 2, 64, (96, 192))),
    (70, 9, 16, (128,)),
)
"""Tokens, slots, ranks, and where slices end."""


def _adapters(times: int) -> Iterator[FusedCase]:
    for dtype, kind in itertools.product(DTYPES, KINDS):
        for tokens, slots, rank, ends in _ADAPTED[: 2 + times]:
            draw = partial(_drawn_adapters, kind, tokens, slots, rank, ends, dtype)
            name = f"{tokens} tokens, {slots} adapters of rank {rank}, slices to {ends}, {dtype}, {kind}"
            yield FusedCase("add_adapters", "shapes", name, draw, partial(_adapted, ends))


def _drawn_adapters(
    kind: str, tokens: int, slots: int, rank: int, ends: tuple[int, ...], dtype: torch.dtype
) -> Results:
    inner, b = (tokens, slots * len(ends) * rank), (slots, ends[-1], rank)
    drawn = _drawn(kind, (inner, dtype), (b, dtype), ((tokens, ends[-1]), dtype))
    whose = torch.randint(-1, slots, (tokens,), generator=torch.Generator().manual_seed(tokens))
    scalings = torch.linspace(-0.3, 2.1, slots * len(ends)).view(slots, -1)
    scalings[0, -1] = torch.nan  # the first adapter has no such slice
    return *drawn, whose, scalings


def _adapted(
    ends: tuple[int, ...], inner: Tensor, b: Tensor, base: Tensor, whose: Tensor, scalings: Tensor
) -> Results:
    """Of each token's own adapter, of one for all, and of none; from one matrix, too."""
    near, far = torch.cat((base, inner), 1).split((base.shape[1], inner.shape[1]), 1)
    slots = whose, torch.full_like(whose, len(b) - 1), torch.full_like(whose, len(b))
    found = [add_adapters(base, inner, b, of, scalings, ends) for of in slots]
    return *found, add_adapters(near, far, b, whose, scalings, ends)


def _functions(times: int) -> Iterator[FusedCase]:
    functions: dict[str, Callable[[Tensor], Results]] = {
        "activation": _activations,
        "rsqrt": lambda x: (rsqrt(x), rsqrt(x[1:, 1:])),
    }
    for (name, run), dtype in itertools.product(functions.items(), DTYPES):
        for kind in KINDS:
            yield FusedCase(
                name, "values", f"{dtype}, {kind}", partial(_drawn, kind, ((30, 520), dtype)), run
            )
        if dtype != F32:
            yield FusedCase(name, "every value", str(dtype), partial(_every_value, dtype), run)


def _activations(x: Tensor) -> Results:
    """All, with their gradients."""
    found = []
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        for name in alone.POINTWISE:
            y = alone.activation(leaf, name)
            found += [y.detach(), *torch.autograd.grad(y, leaf, x.flip(0))]
    return tuple(found)


def _of_ids(times: int) -> Iterator[FusedCase]:
    kinds = itertools.cycle(KINDS)
    for dtype, (rows, vocabulary, n), _ in itertools.product(DTYPES, _OF_IDS, range(times)):
        kind = next(kinds)
        name = f"{rows} x {vocabulary}, {n} ids, {dtype}, {kind}"
        draw = partial(_logits, kind, rows, vocabulary, n, dtype)
        run: Callable[..., Results] = lambda z, ids: (gather_logp(z, ids), gather_logp(z, ids.int()))  # noqa: E731
        yield FusedCase("gather_logp", "shapes", name, draw, run)


def _logits(kind: str, rows: int, vocabulary: int, n: int, dtype: torch.dtype) -> Results:
    ids = torch.randint(-1, vocabulary + 1, (rows, n), generator=torch.Generator().manual_seed(3))
    return *_drawn(kind, ((rows, vocabulary), dtype)), ids


def _recurrent(times: int) -> Iterator[FusedCase]:
    for what, *given in recurrent.convolutions(times):
        yield FusedCase("causal_conv1d", what, *given)
    for what, *given in recurrent.state_spaces(times):
        yield FusedCase("state_space", what, *given)
    for what, *given in recurrent.delta_rules(times):
        yield FusedCase("delta", what, *given)


def _schedules(case: FusedCase) -> list[Any]:
    """The schedules that it may have, or their places; None is the choice."""
    from samebits.backends.cuda import rows

    if case.kernel == "state_space":
        return [None, *range(recurrent.SCHEDULES)]
    if case.kernel == "delta":
        return [None, 0]
    return [None, *(rows.schedules(*case.row) if case.row else ())]


def _run(case: FusedCase, operands: Sequence[Tensor], schedule: Any) -> Results:
    return case.run(*operands) if schedule is None else case.run(*operands, schedule=schedule)


def loads(cases: Sequence[FusedCase], device: torch.device) -> Iterator[Callable[[], object]]:
    """Calls that load the kernels of `cases`."""

    def call(case: FusedCase, schedule: Any) -> None:
        _run(case, [t.to(device) for t in case.draw()], schedule)

    for case in cases:
        for schedule in _schedules(case):
            yield partial(call, case, schedule)


def verify_fused(report: Report, cases: Sequence[FusedCase], device: torch.device) -> None:
    """Compare the kernels with the CPU reference, and the memory around outputs with NaN."""
    for case in cases:
        operands = case.draw()
        want = [t.to(device) for t in case.run(*operands)]
        placed = [t.to(device) for t in operands]
        for schedule in _schedules(case):
            doing = f"{case.kernel}, {case.what}, {case}, {schedule}"
            with running(doing), Surrounded() as room:
                got = _run(case, placed, schedule)
                finish(doing)
            for g, w in zip(got, want, strict=True):
                report.compare(
                    case.kernel, case.what, REFERENCE, g.contiguous(), w.contiguous(), case, schedule
                )
            for margins in room.margins:
                nan = torch.full_like(margins, torch.nan)
                report.compare(case.kernel, AROUND, "NaN", margins, nan, case, schedule)
