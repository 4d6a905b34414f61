"""The ``torch.library`` namespace ``samebits``, and what every operation asks of its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch.autograd import forward_ad

from samebits.contract import Contract, resolve

library = torch.library.Library("samebits", "DEF")

_PLAIN = (Tensor, torch.nn.Parameter)

SUPPORTED = (torch.bfloat16, torch.float16, torch.float32)


def check_operands(
    op: str, contract: Contract | None, operands: dict[str, Tensor]
) -> tuple[list[Tensor], str]:
    """Refuse operands that are not dense tensors of one supported dtype on one device.

    Returns:
        The operands, in the dtype that ``torch.autocast`` wants them in if it is on, and the key of the
        contract to run under.
    """
    tensors = list(operands.values())
    a = tensors[0]
    if contract is None and not torch.compiler.is_compiling() and _all_plain(tensors):
        return tensors, resolve(None, a.dtype, a.device.type)
    for name, t in operands.items():
        if not isinstance(t, Tensor):
            raise TypeError(f"samebits.{op}: {name}: expected a Tensor, got {type(t).__name__}")
        if t.layout is not torch.strided:
            raise TypeError(
                f"samebits.{op}: {name}: expected a dense (strided) tensor, got layout {t.layout}"
            )
        if t.is_nested:
            raise TypeError(
                f"samebits.{op}: {name}: expected a plain tensor, got a nested one (use cu_seqlens)"
            )
        if t.dtype not in SUPPORTED:
            raise TypeError(f"samebits.{op}: {name}: expected bfloat16, float16 or float32, got {t.dtype}")
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(t).tangent is not None:
            raise NotImplementedError(
                f"samebits.{op}: {name}: forward-mode derivatives are not implemented, backward ones are"
            )
    if not torch.compiler.is_compiling() and _transform() == TransformType.Grad:
        raise NotImplementedError(
            f"samebits.{op}: torch.func's gradients are not implemented; use torch.autograd.grad"
        )
    kind = tensors[0].device.type
    if kind not in ("cpu", "cuda", "meta"):
        raise ValueError(f"samebits.{op}: expected tensors on a CPU or CUDA device, got {tensors[0].device}")
    if kind != "meta" and torch.is_autocast_enabled(kind):
        tensors = [t.to(torch.get_autocast_dtype(kind)) for t in tensors]
    dtype, first = tensors[0].dtype, next(iter(operands))
    for name, t in zip(operands, tensors, strict=True):
        if t.dtype != dtype:
            raise TypeError(f"samebits.{op}: {name}: expected {dtype} like {first}, got {t.dtype}")
        check_device(op, name, t, first, tensors[0])
    if contract is not None:
        if not isinstance(contract, Contract):
            raise TypeError(
                f"samebits.{op}: contract: expected a samebits.Contract, got {type(contract).__name__}"
            )
        if dtype not in contract.input_dtypes:
            raise TypeError(
                f"samebits.{op}: {first}: contract {contract.name} takes bfloat16 or float16, got {dtype}"
                " (float32 runs under samebits.FMA, never as TF32)"
            )
    return tensors, resolve(contract, dtype, kind)


def _all_plain(tensors: list[Tensor]) -> bool:
    """Whether a glance tells that there is nothing to refuse or cast: checks cost an eager call most."""
    a = tensors[0]
    if type(a) not in _PLAIN or a.dtype not in SUPPORTED or not (a.is_cuda or a.is_cpu):
        return False
    dtype, device = a.dtype, a.device
    for t in tensors:
        if type(t) not in _PLAIN or t.dtype is not dtype or t.device != device:
            return False
        if t.layout is not torch.strided or t.is_nested:
            return False
    return (
        forward_ad._current_level < 0 and _transform() is None and not torch.is_autocast_enabled(device.type)
    )


def has_memory(*tensors: Tensor) -> bool:
    """Whether these have elements at real addresses: no traced, transformed, fake or meta tensors."""
    return (
        not torch.compiler.is_compiling()
        and _transform() is None
        and all(type(t) in _PLAIN and (t.is_cpu or t.is_cuda) for t in tensors)
    )


def _transform() -> Any:
    """The kind of the innermost ``torch.func`` transform at work, if any."""
    interpreter = torch._C._functorch.peek_interpreter_stack()
    return None if interpreter is None else interpreter.key()


def call(operator: Callable[..., Tensor], *args: Any) -> Tensor:
    """Call a registered operator, past autograd's Python layer (half of its cost) if nothing asks for it."""
    if torch.compiler.is_compiling() or _transform() is not None:
        return operator(*args)
    if torch.is_grad_enabled():
        for t in args:
            if isinstance(t, Tensor) and t.requires_grad:
                return operator(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*args)


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
        wanted = " or ".join(dict.fromkeys([str(dtype), "torch.float32"]))
        raise TypeError(f"samebits.{op}: out_dtype: expected {wanted}, got {out_dtype!r}")
    return out_dtype


def shape(t: Tensor) -> str:
    return str(tuple(t.shape))
