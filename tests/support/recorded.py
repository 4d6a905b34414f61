"""Products that an H200 computed on its tensor cores, operands and results as bits."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tests.support import ROOT


class Recorded(NamedTuple):
    """``a[M, K] @ b[N, K].T``, added to `start` if there is one; `a` and `b` in 16 bits, the rest f32."""

    a: Tensor
    b: Tensor
    start: Tensor | None
    out: Tensor


def _read() -> dict[str, Recorded]:
    with np.load(ROOT / "tests" / "data" / "tensor_core_chain_sm90.npz") as file:
        arrays = dict(file)

    def f32(key: str) -> Tensor:
        return torch.from_numpy(arrays[key].view(np.int32)).view(torch.float32)

    found = {}
    for case in sorted({key.rpartition("/")[0] for key in arrays}):
        dtype = torch.bfloat16 if case.startswith("bf16") else torch.float16
        a, b = (torch.from_numpy(arrays[f"{case}/{x}"].view(np.int16)).view(dtype) for x in "ab")
        start = f32(f"{case}/c0") if f"{case}/c0" in arrays else None
        found[case] = Recorded(a, b, start, f32(f"{case}/out"))
    return found


RECORDED = _read()
