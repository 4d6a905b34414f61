"""Checks of arguments that the operations share: operands, contracts, devices and dtypes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C._functorch import TransformType

from samebits.backends import Key, chosen_backend, pack_key
from samebits.contract import Contract, resolve
from samebits.ops._operator import bypasses_dispatcher, has_tangent, transform
from samebits.remedies import see

SUPPORTED = (torch.bfloat16, torch.float16, torch.float32)
_SUPPORTED = frozenset(SUPPORTED)


def check_operands(
    op: str, contract: Contract | None, operands: dict[str, Tensor], *, autocast: bool = True
) -> tuple[list[Tensor], Key, bool]:
    """Refuse operands that are not dense tensors of one supported dtype on one device.

    Returns:
        * The operands. With `autocast`, and if ``torch.autocast`` is on, they have its dtype.
        * The key that operators take (:func:`samebits.backends.pack_key`).
        * Whether :func:`bypasses_dispatcher` is known to hold for the operands.
    """
    tensors = list(operands.values())
    if contract is None and _needs_no_checks(tensors):
        a = tensors[0]
        kind = "cuda" if a.is_cuda else "cpu"
        return tensors, pack_key(resolve(None, a.dtype, kind), chosen_backend(kind, op)), True
    for name, t in operands.items():
        if not isinstance(t, Tensor):
            raise TypeError(f"samebits.{op}: {name}: expected a Tensor, got {type(t).__name__}")
        if t.layout is not torch.strided:
            raise TypeError(
                f"samebits.{op}: {name}: expected a dense (strided) tensor, got layout {t.layout}"
                + see("layouts")
            )
        if t.is_nested:
            raise TypeError(
                f"samebits.{op}: {name}: expected a plain tensor, got a nested one" + see("layouts")
            )
        if t.dtype not in SUPPORTED:
            raise TypeError(
                f"samebits.{op}: {name}: expected bfloat16, float16 or float32, got {t.dtype}" + see("dtypes")
            )
        if has_tangent(t):
            raise NotImplementedError(
                f"samebits.{op}: {name}: forward-mode derivatives are not implemented, backward ones are"
                + see("derivatives")
            )
    if not torch.compiler.is_compiling() and transform() == TransformType.Grad:
        raise NotImplementedError(
            f"samebits.{op}: torch.func's gradients are not implemented" + see("derivatives")
        )
    kind = tensors[0].device.type
    if kind not in ("cpu", "cuda", "meta"):
        raise ValueError(
            f"samebits.{op}: expected tensors on a CPU or CUDA device, got {tensors[0].device}"
            + see("devices")
        )
    if autocast and kind != "meta" and torch.is_autocast_enabled(kind):
        tensors = [t.to(torch.get_autocast_dtype(kind)) for t in tensors]
    dtype, first = tensors[0].dtype, next(iter(operands))
    for name, t in zip(operands, tensors, strict=True):
        if t.dtype != dtype:
            raise TypeError(
                f"samebits.{op}: {name}: expected {dtype} like {first}, got {t.dtype}" + see("dtypes")
            )
        check_device(op, name, t, first, tensors[0])
    check_contract(op, contract)
    if contract is not None and dtype not in contract.input_dtypes:
        raise TypeError(
            f"samebits.{op}: {first}: contract {contract.name} takes"
            f" {' or '.join(str(d).removeprefix('torch.') for d in contract.input_dtypes)}, got {dtype}"
            + see("contracts")
        )
    return tensors, pack_key(resolve(contract, dtype, kind), chosen_backend(kind, op)), False


def check_contract(op: str, contract: Contract | None) -> None:
    if contract is not None and not isinstance(contract, Contract):
        raise TypeError(
            f"samebits.{op}: contract: expected a samebits.Contract, got {type(contract).__name__}"
        )


def check_segments(
    op: str, contract: Contract | None, terms: tuple[str, int], x: Tensor, gradient: tuple[str, int]
) -> None:
    """Refuse sums that the contract's segments do not divide.

    `terms` is the name and the size of what the operation sums over. `gradient` is the same of what the
    gradient of `x` is summed over, if it needs one.
    """
    if contract is None or contract.segments == 1:
        return
    needed = {"": terms}
    if torch.is_grad_enabled() and x.requires_grad:
        needed["the gradient under "] = gradient
    for of, (name, size) in needed.items():
        if size % contract.segments:
            raise ValueError(
                f"samebits.{op}: {name}: expected a multiple of {contract.segments} for {of}contract"
                f" {contract}, got {size}" + see("segments")
            )


def _needs_no_checks(tensors: list[Tensor]) -> bool:
    """Whether all checks would pass without a cast. The checks are the largest cost of an eager call."""
    if torch._C._is_any_autocast_enabled() or not bypasses_dispatcher(tensors):
        return False
    dtype, device = tensors[0].dtype, tensors[0].get_device()
    if dtype not in _SUPPORTED:
        return False
    for t in tensors[1:]:  # noqa: SIM110 - sets and generators would take longer
        if t.dtype is not dtype or t.get_device() != device:
            return False
    return True


def are_plain(tensors: list[Tensor]) -> bool:
    """Whether :func:`bypasses_dispatcher` holds, all have a supported dtype, and all are on one device."""
    if not bypasses_dispatcher(tensors):
        return False
    return len({t.get_device() for t in tensors}) == 1 and {t.dtype for t in tensors} <= _SUPPORTED


def check_device(op: str, name: str, t: Tensor, lead_name: str, lead: Tensor) -> None:
    if t.device != lead.device:
        raise ValueError(
            f"samebits.{op}: {name}: expected device {lead.device} like {lead_name}, got {t.device}"
            + see("devices")
        )


def check_out_dtype(op: str, out_dtype: torch.dtype | None, dtype: torch.dtype) -> torch.dtype:
    """The output dtype: the input's by default, or float32."""
    if out_dtype is None:
        return dtype
    if out_dtype not in (dtype, torch.float32):
        wanted = " or ".join(dict.fromkeys([str(dtype), "torch.float32"]))
        raise TypeError(f"samebits.{op}: out_dtype: expected {wanted}, got {out_dtype!r}")
    return out_dtype


def shape(t: Tensor) -> str:
    return str(tuple(t.shape))
