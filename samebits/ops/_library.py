"""The ``torch.library`` namespace ``samebits``, and what every operation asks of its arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.contract import Contract, resolve

library = torch.library.Library("samebits", "DEF")

SUPPORTED = (torch.bfloat16, torch.float16, torch.float32)


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors as ``torch.autocast`` wants a matrix product's operands, if it is on for their device."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t.to(dtype) if t.dtype in SUPPORTED else t for t in tensors)


def check_operands(op: str, contract: Contract | None, **operands: Tensor | None) -> str:
    """Refuse operands that are not dense tensors of one supported dtype on one device.

    Returns:
        The key of the contract to run under.
    """
    first = ""
    for name, t in operands.items():
        if t is None:
            continue
        if not isinstance(t, Tensor):
            raise TypeError(f"samebits.{op}: {name}: expected a Tensor, got {type(t).__name__}")
        if t.layout is not torch.strided:
            raise TypeError(
                f"samebits.{op}: {name}: expected a dense (strided) tensor, got layout {t.layout}"
            )
        if t.dtype not in SUPPORTED:
            raise TypeError(f"samebits.{op}: {name}: expected bfloat16, float16 or float32, got {t.dtype}")
        if not first:
            first = name
            continue
        lead = operands[first]
        assert lead is not None
        if t.dtype != lead.dtype:
            raise TypeError(f"samebits.{op}: {name}: expected {lead.dtype} like {first}, got {t.dtype}")
        check_device(op, name, t, first, lead)
    lead = operands[first]
    assert lead is not None
    if lead.device.type not in ("cpu", "meta"):
        raise ValueError(
            f"samebits.{op}: {first}: this version computes on CPU tensors only, got one on {lead.device}"
        )
    if contract is not None:
        if not isinstance(contract, Contract):
            raise TypeError(
                f"samebits.{op}: contract: expected a samebits.Contract, got {type(contract).__name__}"
            )
        if lead.dtype not in contract.input_dtypes:
            raise TypeError(
                f"samebits.{op}: {first}: contract {contract.name} takes bfloat16 or float16,"
                f" got {lead.dtype} (float32 runs under samebits.FMA, never as TF32)"
            )
    return resolve(contract, lead.dtype, lead.device.type)


def check_device(op: str, name: str, t: Tensor, lead_name: str, lead: Tensor) -> None:
    if t.device != lead.device:
        raise ValueError(
            f"samebits.{op}: {name}: expected device {lead.device} like {lead_name}, got {t.device}"
        )


def check_out_dtype(op: str, out_dtype: torch.dtype | None, dtype: torch.dtype) -> torch.dtype:
    """The output dtype: the input's by default, or float32."""
    if out_dtype is None:
        return dtype
    if out_dtype not in (dtype, torch.float32):
        raise TypeError(f"samebits.{op}: out_dtype: expected {dtype} or torch.float32, got {out_dtype}")
    return out_dtype


def shape(t: Tensor) -> str:
    return str(tuple(t.shape))
