"""Where tests run: on the CPU, and, marked ``gpu``, on the current CUDA device."""

import pytest
import torch
from torch import Tensor

from samebits import AMPERE, HOPPER
from samebits.testing import values

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = ["cpu", GPU]

# The family of the GPU here, so that CPU tensors can be asked for its bits.
HOPPER_OR_NEWER = not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (9, 0)
FAMILY = HOPPER if HOPPER_OR_NEWER else AMPERE


def case(kind: str, shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    return values(kind, shape, dtype, seed).to(device)
