"""Attention in one run of ``samebits bench``: speed, bandwidth, memory and error beside PyTorch's."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import Tensor

from samebits.contract import TENSOR_CORE
from samebits.ops.attention import attention
from samebits.tools.bench.attention_cases import (
    ACCURACY,
    ATTENTION,
    BACKENDS,
    MEMORY,
    AttentionCase,
    dense,
    make_attention,
    options,
    ours,
    theirs,
)
from samebits.tools.bench.clock import ALONE, Race
from samebits.tools.bench.measure import Show, ceilings, environment, gpu
from samebits.tools.seeds import seeded

ROWS = 4
"""Queries, of the last sequence and its last group of heads, that are compared with the CPU's."""


def check(case: AttentionCase, operands: Sequence[Tensor]) -> None:
    """Raise AssertionError for wrong bits. Compares the last queries' results and gradients with the CPU's.

    The others have a gradient of zero here, so the gradients of keys and values are due to the last ones.
    """
    from samebits.testing import assert_same_bits

    device = operands[0].device
    contract = TENSOR_CORE
    if device.type == "cuda":
        from samebits.backends.cuda.matmul import family

        contract = TENSOR_CORE.on(family(device.index or 0))
    packed, group = case.form == "packed", case.heads // case.kv_heads
    length = case.lengths[-1]
    count = min(ROWS, case.queries, length)

    def last(t: Tensor, heads: int, tokens: int) -> Tensor:
        own = t[None] if packed else t[-1:]
        return own[:, -tokens:, -heads:]

    q, k, v = operands[:3]
    few = [last(q, group, count), last(k, 1, length), last(v, 1, length)]
    small: list[Tensor] = [t.detach().cpu().contiguous() for t in few]
    given = options(case, "cpu")
    if case.form in ("padded", "packed"):
        given = {"causal": True}
    if "mask" in given:
        given["mask"] = given["mask"][-count:]
    if "sinks" in given:
        given["sinks"] = given["sinks"][-group:]
    if case.work == "forward":
        results = [last(ours(case, device)(*operands[:3]), group, count)]
        wanted = [attention(*small, **given, contract=contract)]
    else:
        grad = torch.zeros_like(operands[3])
        last(grad, group, count).copy_(last(operands[3], group, count))
        out, *grads = ours(case, device)(q, k, v, grad)
        sizes = ((group, count), (group, count), (1, length), (1, length))
        results = [last(t, *size) for t, size in zip((out, *grads), sizes, strict=True)]
        leaves = [t.requires_grad_() for t in small]
        with torch.enable_grad():
            whole = attention(*leaves, **given, contract=contract)
            assert isinstance(whole, Tensor)
            wanted = [whole, *torch.autograd.grad(whole, leaves, last(grad, group, count).cpu())]
    for name, got, want in zip(("out", "dq", "dk", "dv"), results, wanted, strict=False):
        assert isinstance(want, Tensor)
        assert_same_bits(got.cpu().contiguous(), want.detach(), f"{case}: {name} against the CPU reference")


@contextmanager
def refusals() -> Iterator[list[str]]:
    """What PyTorch says where a backend does not take a call. Other errors, such as no memory, are raised."""
    said: list[str] = []
    try:
        with warnings.catch_warnings(action="ignore"):  # that say why
            yield said
    except RuntimeError as error:
        if "No available kernel" not in str(error):
            raise
        said.append(f"{type(error).__name__}: {error}"[:120])


def _measure(case: AttentionCase, device: torch.device, l2_bytes: int) -> dict[str, Any]:
    """Times of one case in microseconds."""

    def sets(c: AttentionCase) -> list[list[Tensor]]:
        count = max(1, min(64, ceil(4.5 * l2_bytes / c.bytes)))
        return [make_attention(c, device, torch.randn) for _ in range(count)]

    operands = sets(case)
    check(case, operands[0])
    arithmetic, memory = case.flop / 500e12, case.bytes / 3.5e12
    race = Race(max(2, min(300, ceil(3e-3 / max(arithmetic, memory, 5e-6)))))
    race.add("samebits", ours(case, device), operands)
    found: dict[str, Any] = case.record()
    if case.form in ("window", "packed", "padded"):
        other = dense(case)
        race.add("dense", ours(other, device), sets(other))
        found["dense"] = other.record()
    else:
        refused = {}
        for name, backend in BACKENDS.items():
            with refusals() as said:
                race.add(name, theirs(case, backend, device), operands)
            if said:
                refused[name] = said[0]
        tried = race.run(3)
        found |= {"tried": tried, "refused": refused}
        if others := tried.keys() - {"samebits"}:
            found["backend"] = min(others, key=tried.__getitem__)
            race = race.only(("samebits", found["backend"]))
    us = race.alone() if arithmetic > memory else race.run(11)
    return found | {"us": {name if name in ("samebits", "dense") else "torch": t for name, t in us.items()}}


def memory(case: AttentionCase, device: torch.device) -> dict[str, Any]:
    """Bytes at the peak of an eager call, beyond operands, results and the log-sum-exp."""
    operands = make_attention(case, device, torch.randn)
    runs = {"samebits": ours(case, device)} | {
        name: theirs(case, backend, device) for name, backend in BACKENDS.items()
    }
    peaks: dict[str, int] = {}
    for name, run in runs.items():
        with refusals() as said:
            run(*operands)
        if said:
            continue
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        results = run(*operands)
        torch.cuda.synchronize()
        kept = sum(t.numel() * t.element_size() for t in results) + 4 * case.batch * case.heads * case.queries
        peaks[name] = torch.cuda.max_memory_allocated(device) - before - kept
        del results
    return case.record() | {"bytes": peaks}


def exact(case: AttentionCase, operands: Sequence[Tensor]) -> list[Tensor]:
    """Output and gradients in float64. It stores the scores."""
    q, k, v, grad = (t.detach().double() for t in operands)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    group = case.heads // case.kv_heads
    with torch.enable_grad():
        scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(group, 2)) * case.head**-0.5
        if case.form == "causal":
            hidden = torch.ones(case.queries, case.keys, dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(hidden, -torch.inf)
        out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v.repeat_interleave(group, 2))
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def accuracy(case: AttentionCase, device: torch.device, backends: Iterable[str] = BACKENDS) -> dict[str, Any]:
    """Root mean square errors beside float64, relative to the root mean square of the result."""
    operands = make_attention(case, device, torch.randn)
    want = exact(case, operands)
    runs = {"samebits": ours(case, device)} | {
        name: theirs(case, BACKENDS[name], device) for name in backends
    }
    errors: dict[str, dict[str, float]] = {}
    for who, run in runs.items():
        with refusals() as said:
            got = run(*operands)
        if said:
            continue
        errors[who] = {
            name: float(f"{float((a - b).square().mean().sqrt() / b.square().mean().sqrt()):.4g}")
            for name, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=True)
        }
    return case.record() | {"error": errors}


def bench_attention(
    cases: Iterable[AttentionCase] = ATTENTION, *, device: int = 0, progress: Show = lambda done, what: None
) -> dict[str, Any]:
    """Measure attention beside PyTorch.

    Args:
        cases: whose speed is measured.
        device: index of the CUDA device.
        progress: receives the fraction done, and the current work.

    Returns:
        ``environment``, ``ceilings``, ``cases``, ``red`` (cases with other bits than specified, which are not
        timed), ``accuracy`` and ``memory``.

    Raises:
        samebits.backends.UnavailableError: no GPU can run this; the message says why.
    """
    from samebits.backends.cuda import devices, precompile

    where, todo = gpu(device), list(cases)
    with torch.cuda.device(device), seeded(), torch.no_grad():

        def calls() -> Iterator[Callable[[], object]]:
            for case in todo:
                yield partial(ours(case, where), *make_attention(case, where, torch.empty))

        progress(0.0, "choosing kernels")
        precompile.compile_for(calls(), lambda done, what: progress(0.1 * done, what))
        data: dict[str, Any] = {"environment": environment(device) | {"alone": ALONE}}
        data |= {"ceilings": ceilings(where), "cases": [], "red": []}
        l2 = devices.device_info(device).l2_bytes
        for i, case in enumerate(todo):
            said = f"attention {case.form}, {case.work}, {case.batch} x {case.keys}, {case.head}"
            progress(0.1 + 0.85 * i / len(todo), said)
            try:
                data["cases"].append(_measure(case, where, l2))
            except AssertionError as error:
                data["red"].append(str(error))
        progress(0.95, "memory and errors of attention")
        data["accuracy"] = [accuracy(case, where) for case in ACCURACY]
        data["memory"] = [memory(case, where) for case in MEMORY]
    return data
