"""Function modes of PyTorch's: whether one is to see what an operator calls."""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["OwnMode", "sees_calls"]


class OwnMode(TorchFunctionMode):
    """A mode of this library's. It need not see what the library's own operators call."""


def sees_calls() -> bool:
    """Whether a mode is active that is not this library's."""
    if not torch._C._is_torch_function_mode_enabled():
        return False
    return torch._C._len_torch_function_stack() != 1 or not isinstance(
        torch._C._get_function_stack_at(0), OwnMode
    )
