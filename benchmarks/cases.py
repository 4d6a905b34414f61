"""The cases of ``benchmarks.reference``, as data."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import samebits


@dataclass(frozen=True)
class Product:
    """One ``[m, k] @ [k, n]`` product under one contract.

    Attributes:
        contract: samebits' contract.
        dtype: dtype of both operands. samebits and mmasim return float32.
        m, k, n: the shape.
        mmasim: PTX instruction whose mmasim model computes the same chain, and the GPU family it names; None
            if mmasim has none.
        mmasim_m, mmasim_n: rows and columns that mmasim computes. All of them would take hours.
    """

    contract: samebits.Contract
    dtype: torch.dtype
    m: int = 512
    k: int = 4096
    n: int = 1024
    mmasim: tuple[str, str] | None = None
    mmasim_m: int = 32
    mmasim_n: int = 64


REFERENCE = (
    *(
        Product(samebits.TENSOR_CORE.on(model), dtype, mmasim=(family, f"m16n8k16.f32.{kind}.{kind}.f32"))
        for model, family in ((samebits.HOPPER, "Hopper"), (samebits.AMPERE, "Ampere"))
        for dtype, kind in ((torch.bfloat16, "bf16"), (torch.float16, "f16"))
    ),
    Product(samebits.FMA, torch.float32),
)
