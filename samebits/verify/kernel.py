"""The kernels on offer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import Tensor

from samebits.contract import FMA, TENSOR_CORE, Contract
from samebits.verify.operands import Operands

BACKENDS = ("cuda", "triton")


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel as its host module offers it."""

    name: str
    step: Literal["mma", "fma"]
    """That of the contract it follows."""
    schedules: Sequence[Any]
    """None is the one that it chooses itself."""
    takes: Callable[[Operands, Tensor, Any], bool]
    run: Callable[[Operands, Tensor, Any], object]
    ahead: bool = True
    """Whether it is one of the CUDA kernels, compiled ahead; Triton compiles where it launches."""


def _universal() -> Kernel:
    from samebits.backends.cuda import matmul_sm80

    def run(x: Operands, out: Tensor, schedule: Any) -> object:
        acc = None if x.acc is None else out
        return matmul_sm80.matmul(
            x.a, x.b, acc=acc, bias=x.bias, cu_seqlens=x.cu_seqlens, out=out, schedule=schedule
        )

    return Kernel("matmul_sm80", "mma", matmul_sm80.SCHEDULES, lambda x, out, schedule: True, run)


def _hopper() -> Kernel:
    from samebits.backends.cuda import matmul_sm90
    from samebits.backends.cuda.schedule import catalogue

    def mn(t: Tensor, row: int, k: int) -> bool:
        return not matmul_sm90._k_major(t.shape[row], t.shape[k], t.stride(row), t.stride(k))

    def takes(x: Operands, out: Tensor, schedule: Any) -> bool:
        return bool(
            x.a.ndim < 4
            and x.a.shape[-1] > 0
            and matmul_sm90.supports(x.a, x.b, cu_seqlens=x.cu_seqlens)
            and (schedule is None or schedule in made_for[mn(x.a, -2, -1), mn(x.b, -1, -2)])
        )

    def run(x: Operands, out: Tensor, schedule: Any) -> object:
        matmul_sm90.matmul(
            x.a,
            x.b,
            out,
            bias=x.bias,
            accumulate=x.acc is not None,
            cu_seqlens=x.cu_seqlens,
            schedule=schedule,
        )
        return out

    majors = itertools.product((False, True), repeat=2)
    made_for = {layout: set(catalogue(*layout)) for layout in majors}
    every = dict.fromkeys(s for layout in made_for for s in catalogue(*layout))
    return Kernel("matmul_sm90", "mma", (None, *every), takes, run)


def _fma() -> Kernel:
    from samebits.backends.cuda import matmul_fma

    def run(x: Operands, out: Tensor, schedule: Any) -> object:
        acc = None if x.acc is None else out
        sequences = x.acc is not None or x.cu_seqlens is not None or x.a.ndim == 4
        return matmul_fma.matmul(
            *(x.a, x.b),
            acc=acc,
            bias=x.bias,
            cu_seqlens=x.cu_seqlens,
            closing=sequences,
            out=out,
            schedule=schedule,
        )

    return Kernel("matmul_fma", "fma", (None, *matmul_fma.SCHEDULES), lambda x, out, schedule: True, run)


def _fma_hopper() -> Iterator[Kernel]:
    from samebits.backends.cuda import matmul_fma_sm90

    def takes(x: Operands, out: Tensor, schedule: Any) -> bool:
        return matmul_fma_sm90.supports(x.a, x.b, out, cu_seqlens=x.cu_seqlens)

    yield Kernel("matmul_fma_sm90", "fma", matmul_fma_sm90.MANY, takes, _fma().run)
    yield Kernel("matmul_fma_few_sm90", "fma", matmul_fma_sm90.FEW, takes, _fma().run)


def _tiny(step: Literal["mma", "fma"]) -> Kernel:
    from samebits.backends.cuda import bmm_tiny

    def takes(x: Operands, out: Tensor, schedule: Any) -> bool:
        return bmm_tiny.supports(x.a, x.b, bias=x.bias, cu_seqlens=x.cu_seqlens)

    def run(x: Operands, out: Tensor, schedule: Any) -> object:
        accumulate = x.acc is not None
        bmm_tiny.bmm(
            *(x.a, x.b, out),
            fused=step == "fma",
            accumulate=accumulate,
            closing=accumulate,
            schedule=schedule,
        )
        return out

    return Kernel("bmm_tiny", step, (None, *bmm_tiny.SCHEDULES), takes, run)


def _triton() -> list[Kernel]:
    from samebits.backends.triton import matmul as backend

    def batched(x: Tensor, batch: int) -> Tensor:
        x = x if x.ndim == 4 else x.unsqueeze(-3)
        return x.expand(batch, *x.shape[-3:])

    def arranged(x: Operands, out: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        out = out if out.ndim == 3 else out[None]
        return batched(x.a, len(out)), batched(x.b, len(out)), out, None if x.acc is None else out

    def takes_tiles(x: Operands, out: Tensor, schedule: Any) -> bool:
        accumulate = x.acc is not None
        fits = schedule is None or backend.fits(schedule, out.element_size(), accumulate, out.device)
        return fits and x.cu_seqlens is None and backend.takes_tiles(*arranged(x, out), x.bias)

    def run(contract: Contract, x: Operands, out: Tensor, schedule: Any) -> object:
        a, b, out, acc = arranged(x, out)
        sequences = acc is not None or x.cu_seqlens is not None or x.a.ndim == 4
        backend.run(
            *(a, b, out, contract),
            acc=acc,
            bias=x.bias,
            cu_seqlens=x.cu_seqlens,
            closing_zero=sequences,
            schedule=schedule,
        )
        return out

    def takes_all(x: Operands, out: Tensor, schedule: Any) -> bool:
        return True

    mma, fma = partial(run, TENSOR_CORE), partial(run, FMA)
    return [
        Kernel("triton matmul", "mma", backend.MMA_SCHEDULES, takes_all, mma, ahead=False),
        Kernel("triton matmul_tiles", "mma", (None, *backend.TILE_SCHEDULES), takes_tiles, mma, ahead=False),
        Kernel("triton matmul, FMA", "fma", (None, *backend.FMA_SCHEDULES), takes_all, fma, ahead=False),
    ]


def kernels(device: int, backends: Sequence[str] = BACKENDS) -> list[Kernel]:
    """Those that run on CUDA device `device`; of every step the one that takes all operands comes first.

    Of CUDA's, unless they are asked for, only these two, to which others are held.
    """
    from samebits.backends.cuda import runtime
    from samebits.backends.triton import runtime as triton

    found = [_universal(), _fma()]
    if "cuda" in backends:
        hopper = runtime.device_info(device).capability == (9, 0)
        found += [*([_hopper(), *_fma_hopper()] if hopper else []), _tiny("mma"), _tiny("fma")]
    if "triton" in backends and triton.status().available:
        found += _triton()
    return found
