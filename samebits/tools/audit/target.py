"""Targets of the audit: a model's linear layers, the operators they run, and reasons not to audit one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samebits
from samebits.tools.audit.drift import Operator
from samebits.tools.text import dtype_name, one_line, plural

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LINEAR, _ADDMM = "torch.nn.functional.linear", "torch.addmm"


@dataclass(frozen=True)
class Target:
    """A linear layer, which PyTorch and samebits compute as operators on rows."""

    name: str
    module: nn.Module
    operator: str
    weight: Tensor  # [out_features, in_features]
    bias: Tensor | None
    overridden: bool  # whether its forward differs from that of its kind

    def operators(self, dtype: torch.dtype) -> tuple[Operator, Operator]:
        """PyTorch's operator and samebits', in `dtype`. Under autocast it differs from the weight's dtype."""
        weight, bias = self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype)
        ours = partial(_run_samebits, weight=weight, bias=bias)
        if self.operator == _ADDMM:
            return partial(torch.addmm, bias, mat2=weight.mT), ours
        return partial(_run_linear, weight=weight, bias=bias), ours


def as_target(name: str, module: nn.Module) -> Target | None:
    """`module` as a target, or None if it is no linear layer."""
    # Not imported: a model can have a Conv1D only if transformers is loaded.
    pytorch_utils = sys.modules.get("transformers.pytorch_utils")
    weight: Any = getattr(module, "weight", None)
    bias: Any = getattr(module, "bias", None)
    kind: Any
    if isinstance(module, nn.Linear):
        kind, operator = samebits.nn.Linear if type(module) is samebits.nn.Linear else nn.Linear, _LINEAR
    elif pytorch_utils is not None and isinstance(module, pytorch_utils.Conv1D):
        kind, operator, weight = pytorch_utils.Conv1D, _ADDMM, weight.mT
    else:
        return None
    overridden = getattr(module.forward, "__func__", None) is not kind.forward
    return Target(name, module, operator, weight, bias, overridden)


def _run_linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(rows, weight, bias)


def _run_samebits(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return samebits.linear(rows, weight, bias)


def why_not(target: Target) -> str | None:
    """Why the weight of `target` cannot be audited; None if it can."""
    weight = target.weight
    if isinstance(weight, nn.UninitializedParameter):
        return "its weight is not initialized"
    if type(weight) not in (Tensor, nn.Parameter) or weight.layout is not torch.strided:
        return f"its weight is a {type(weight).__name__} of layout {weight.layout}, not a plain dense tensor"
    if weight.dtype not in DTYPES:
        return f"its weight is {dtype_name(weight.dtype)}; samebits takes float32, bfloat16 and float16"
    if not weight.numel():
        return f"its weight of shape {list(weight.shape)} has no elements"
    if weight.device.type == "cuda":
        return cuda_problem(weight.device)
    if weight.device.type != "cpu":
        return f"its weight is on {weight.device}; samebits runs on CPU and CUDA devices"
    return None


def cuda_problem(device: torch.device) -> str | None:
    """Why samebits does not run on the CUDA device `device`, and what to do; None if it does."""
    from samebits.backends import UnavailableError
    from samebits.backends.cuda import devices, matmul

    status = devices.status()
    if not status.available:
        return f"{status.reason}: {status.remedy}" if status.remedy else status.reason
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        return f"there is no {device}: {plural(torch.cuda.device_count(), 'CUDA device')} here"
    try:
        matmul.family(index)
    except UnavailableError as error:
        return one_line(error)
    return None


def why_not_rows(target: Target, captured: Sequence[Tensor], autocast: bool) -> str | None:
    """Why the rows that reached `target` cannot be audited; None if they can."""
    if not captured:
        return "no activation reached it: its module was not called, or with no rows"
    if len(captured) > 1:
        kinds = " and ".join(f"{dtype_name(rows.dtype)} [{rows.shape[1]}]" for rows in captured)
        return f"its rows have several dtypes or widths in one run: {kinds}"
    (rows,), weight = captured, target.weight
    if rows.shape[1] != weight.shape[1]:
        return f"its activations have {rows.shape[1]} features, and its weight takes {weight.shape[1]}"
    if rows.dtype != weight.dtype and not autocast:
        return f"its activations are {dtype_name(rows.dtype)} and its weight {dtype_name(weight.dtype)}"
    if rows.dtype not in DTYPES:
        return f"its activations are {dtype_name(rows.dtype)}; samebits takes float32, bfloat16 and float16"
    if rows.device != weight.device:
        return f"its activations are on {rows.device} and its weight on {weight.device}"
    return None
