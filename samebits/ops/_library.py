"""The ``torch.library`` namespace ``samebits``, and what every operation asks of its arguments."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch._C._functorch import TransformType
from torch.autograd import forward_ad, profiler

from samebits.backends import asked
from samebits.contract import Contract, resolve

library = torch.library.Library("samebits", "DEF")


class Operator:
    """An operator of the namespace: registered with PyTorch, and callable past its dispatcher.

    Dispatch costs the host as much as a small product does. So a call goes straight to ``cpu`` or ``cuda``,
    and is recorded if a gradient may be asked for, where that is all that the dispatcher would do: with plain
    tensors, outside of ``torch.compile`` and of every mode, transform, trace and profile.

    Args:
        schema: name, arguments and results, in ``torch.library``'s language.
        cpu, cuda, fake: what computes it on such devices, and for tensors without data.
        setup_context: what :func:`torch.library.register_autograd` takes.
        backward: the gradient, as :func:`without_modes` takes it.
    """

    __slots__ = ("_cpu", "_cuda", "_recorded", "_registered")

    def __init__(
        self,
        schema: str,
        *,
        cpu: Callable[..., Any],
        cuda: Callable[..., Any],
        fake: Callable[..., Any],
        setup_context: Callable[..., None] | None = None,
        backward: Callable[..., Any] | None = None,
    ) -> None:
        cpu, cuda = owned(cpu), owned(cuda)
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        name = schema.partition("(")[0]
        library.impl(name, cpu, "CPU")
        library.impl(name, cuda, "CUDA")
        torch.library.register_fake(f"samebits::{name}", fake, lib=library)
        self._registered = getattr(torch.ops.samebits, name).default
        self._cpu, self._cuda, self._recorded = cpu, cuda, self._registered
        if backward is not None and setup_context is not None:
            backward = without_modes(backward)
            torch.library.register_autograd(
                f"samebits::{name}", backward, setup_context=setup_context, lib=library
            )
            self._recorded = _recorded(self._run, setup_context, backward)

    def __call__(self, *args: Any, plain: bool = False) -> Any:
        """Run on the schema's arguments; ``plain`` says that :func:`all_plain` is known of the tensors."""
        if not plain and not all_plain([t for t in args if isinstance(t, Tensor)]):
            return self._registered(*args)
        if torch.is_grad_enabled():
            for t in args:
                if isinstance(t, Tensor) and t.requires_grad:
                    return self._recorded(*args)
        return self._run(*args)

    def _run(self, *args: Any) -> Any:
        lead = args[0] if args[0] is not None else args[1]
        return (self._cuda if lead.is_cuda else self._cpu)(*args)


def own(result: Any) -> Any:
    """A result as no view, whatever else it is."""
    return result.detach() if isinstance(result, Tensor) and result._is_view() else result


def owned(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, with results that are no views: autograd would let nobody change them in place."""

    @functools.wraps(run)
    def owning(*args: Any) -> Any:
        results = run(*args)
        return tuple(map(own, results)) if isinstance(results, tuple) else own(results)

    return owning


def reshaped(result: Tensor, shape: Sequence[int]) -> Tensor:
    """A result that nobody else has, in another shape. Without gradients it is no view: see :func:`owned`."""
    if result.shape == tuple(shape):
        return result
    found = result.reshape(tuple(shape))
    return found if torch.is_grad_enabled() else own(found)


def without_modes(gradients: Callable[..., Any]) -> Callable[..., Any]:
    """The backward that calls ``gradients(ctx, saved, *grads)`` with function modes off.

    A mode would cost each call of PyTorch's in there microseconds more. But `saved`, the context's saved
    tensors, are read before that: activation checkpointing computes them then, by running the forward again,
    which must see the modes around it.
    """

    @functools.wraps(gradients)
    def backward(ctx: Any, *grads: Any) -> Any:
        saved = ctx.saved_tensors
        with torch._C.DisableTorchFunction():
            return gradients(ctx, saved, *grads)

    return backward


def _recorded(
    run: Callable[..., Any], setup_context: Callable[..., None], gradients: Callable[..., Any]
) -> Callable[..., Any]:
    """`run`, recorded by autograd."""

    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            output = run(*args)
            setup_context(ctx, args, output)
            return output

        backward = staticmethod(gradients)

    # Function.apply would look for transforms and their wrappers once more.
    return super(torch.autograd.Function, Recorded).apply


_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def _dispatch_keys(*names: str) -> int:
    keys = (DispatchKeySet(DispatchKey.__members__[name]) for name in names)
    return functools.reduce(operator.or_, keys).raw_repr()


# Dense tensors with data, and nothing to unwrap or to negate; in inference mode they have fewer keys.
_PLAIN_KEYS = frozenset(
    _dispatch_keys(device, f"Autocast{device}", *more)
    for device in ("CPU", "CUDA")
    for more in ((), (f"Autograd{device}", "ADInplaceOrView"))
)


def all_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether the dispatcher would do nothing with these but to record autograd's graph and call a kernel."""
    if torch.compiler.is_compiling() or (
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
        or profiler._is_profiler_enabled
    ):
        return False
    for t in tensors:
        if type(t) not in _PLAIN_TYPES or torch._C._dispatch_keys(t).raw_repr() not in _PLAIN_KEYS:
            return False
    return True


SUPPORTED = (torch.bfloat16, torch.float16, torch.float32)


def check_operands(
    op: str, contract: Contract | None, operands: dict[str, Tensor], *, autocast: bool = True
) -> tuple[list[Tensor], str, bool]:
    """Refuse operands that are not dense tensors of one supported dtype on one device.

    Returns:
        The operands, with `autocast` in the dtype that ``torch.autocast`` wants them in if it is on; the key
        of the contract to run under, with the backend if one was asked for; and whether all operands are
        known to be plain (:func:`all_plain`).
    """
    tensors = list(operands.values())
    if contract is None and _glance(tensors):
        a = tensors[0]
        kind = "cuda" if a.is_cuda else "cpu"
        return tensors, resolve(None, a.dtype, kind) + asked(kind), True
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
    if not torch.compiler.is_compiling() and transform() == TransformType.Grad:
        raise NotImplementedError(
            f"samebits.{op}: torch.func's gradients are not implemented; use torch.autograd.grad"
        )
    kind = tensors[0].device.type
    if kind not in ("cpu", "cuda", "meta"):
        raise ValueError(f"samebits.{op}: expected tensors on a CPU or CUDA device, got {tensors[0].device}")
    if autocast and kind != "meta" and torch.is_autocast_enabled(kind):
        tensors = [t.to(torch.get_autocast_dtype(kind)) for t in tensors]
    dtype, first = tensors[0].dtype, next(iter(operands))
    for name, t in zip(operands, tensors, strict=True):
        if t.dtype != dtype:
            raise TypeError(f"samebits.{op}: {name}: expected {dtype} like {first}, got {t.dtype}")
        check_device(op, name, t, first, tensors[0])
    check_contract(op, contract)
    if contract is not None and dtype not in contract.input_dtypes:
        raise TypeError(
            f"samebits.{op}: {first}: contract {contract.name} takes bfloat16 or float16, got {dtype}"
            " (float32 runs under samebits.FMA, never as TF32)"
        )
    return tensors, resolve(contract, dtype, kind) + asked(kind), False


def check_contract(op: str, contract: Contract | None) -> None:
    if contract is not None and not isinstance(contract, Contract):
        raise TypeError(
            f"samebits.{op}: contract: expected a samebits.Contract, got {type(contract).__name__}"
        )


def _glance(tensors: list[Tensor]) -> bool:
    """Whether it is clear that there is nothing to refuse or cast: checks cost an eager call most."""
    if not all_plain(tensors) or torch._C._is_any_autocast_enabled():
        return False
    dtype, device = tensors[0].dtype, tensors[0].get_device()
    for t in tensors:
        if t.dtype is not dtype or t.get_device() != device:
            return False
    return dtype in SUPPORTED


def has_memory(*tensors: Tensor) -> bool:
    """Whether these have elements at real addresses: no traced, transformed, fake or meta tensors."""
    return (
        not torch.compiler.is_compiling()
        and transform() is None
        and all(
            type(t).__torch_dispatch__ is Tensor.__torch_dispatch__ and (t.is_cpu or t.is_cuda)
            for t in tensors
        )
    )


def capturing(t: Tensor) -> bool:
    """Whether the current stream of the device of `t` is being captured, be that device current or not."""
    if not t.is_cuda:
        return False
    if torch._C._cuda_getDevice() == t.get_device():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(t.device):
        return torch.cuda.is_current_stream_capturing()


def transform() -> Any:
    """The kind of the innermost ``torch.func`` transform at work, if any."""
    interpreter = torch._C._functorch.peek_interpreter_stack()
    return None if interpreter is None else interpreter.key()


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
