"""The kernels on offer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from samebits.verify.operands import Operands


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


def kernels(device: int) -> list[Kernel]:
    """Those that run on CUDA device `device`; of every step the one that takes all operands comes first."""
    from samebits.backends.cuda import runtime

    info = runtime.device_info(device)
    hopper = [_hopper()] if info.capability == (9, 0) else []
    return [_universal(), *hopper, _fma(), _tiny("mma"), _tiny("fma")]
