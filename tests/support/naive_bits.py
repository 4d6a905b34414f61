"""Bits of naive results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.support import naive

NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


def rounded(rows: Any, dtype: torch.dtype) -> Tensor:
    """Naive results in `dtype`: nested lists of floats."""

    def bits(x: Any) -> Any:
        return [bits(y) for y in x] if isinstance(x, list) else naive.finish(float(x), NAMES[dtype])

    width = torch.int32 if dtype == torch.float32 else torch.int16
    return torch.tensor(bits(rows), dtype=torch.int64).to(width).view(dtype)
