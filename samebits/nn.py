"""``samebits.nn.Linear`` and ``samebits.convert``: batch-invariant linear layers of models."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.fx
from torch import Tensor, nn

from samebits.backends import Key
from samebits.contract import Contract
from samebits.ops._autograd import without_modes
from samebits.ops._checks import SUPPORTED, check_contract, check_operands, check_segments, shape
from samebits.ops._memory import check_accumulator, has_memory, refuse_overlap, refuse_vmap
from samebits.ops._products import addbmm, addbmm_later, as_operand, product
from samebits.ops._sequences import sequences
from samebits.ops.fp8_linear import fp8_linear
from samebits.ops.fp8_linear import product as fp8_product
from samebits.ops.linear import linear
from samebits.transformers import are_converted, are_experts, convert_experts, why_not_converted

__all__ = ["Conversion", "Linear", "Unconverted", "convert"]


class Linear(nn.Linear):
    """A ``torch.nn.Linear`` that computes ``y = x @ weight.T + bias`` by :func:`samebits.linear`.

    Constructor, parameters, initialization and state dict are those of ``torch.nn.Linear``. Output bits,
    gradients and errors are those of :func:`samebits.linear`.

    If a parameter has an attribute ``main_grad`` when the layer runs, its gradient goes there and not to
    ``.grad``, as in Megatron-LM with ``gradient_accumulation_fusion``. ``main_grad`` is a float32 tensor of
    the parameter's shape that shares memory with no other tensor. The caller makes it, zeroes it, and gives
    it to the optimizer. The backward continues its chain over the new tokens (:func:`samebits.addmm_`). So
    micro-batches that are cut between sequences give the bits of one large batch. Then the backward sets
    ``grad_added_to_main_grad`` on the parameter. A backward that fails, for example for lack of memory,
    writes nothing there. ``main_grad`` works in eager mode only.

    ``torch.fx`` traces a layer as one call, as it does a ``torch.nn.Linear``. ``torch.jit.script`` takes it,
    and calls it in Python: such a module runs, but cannot be saved.

    Args:
        in_features: size of each input row.
        out_features: size of each output row.
        bias: whether the layer has a bias.
        device: device of the parameters.
        dtype: dtype of the parameters: bfloat16, float16 or float32.
        contract: as in :func:`samebits.linear`.
        fp8: ``"block"`` computes the output, and the gradient of the input, in FP8
            (:func:`samebits.scaled_mm`): inputs and output gradients in groups of 1 x 128, weights in blocks
            of 128 x 128, all in e4m3 (:func:`samebits.quantize`). Gradients of weight and bias stay those of
            :func:`samebits.linear`. Outputs still depend on no other row, and gradients not on packing,
            padding or micro-batches.
        out_dtype: as in :func:`samebits.linear`: ``torch.float32`` for a head whose logits are not rounded to
            16 bits, while its weight is. Not beside ``fp8``.
    """

    if TYPE_CHECKING:
        fp8: Literal["block"] | None
        out_dtype: torch.dtype | None
    else:  # TorchScript reads a class's annotations, and knows no literals
        fp8 = out_dtype = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        contract: Contract | None = None,
        fp8: Literal["block"] | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        check_contract("nn.Linear", contract)
        _check_form("nn.Linear", fp8, out_dtype)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.contract, self.fp8, self.out_dtype = contract, fp8, out_dtype

    @classmethod
    def from_torch(
        cls,
        layer: nn.Linear,
        *,
        contract: Contract | None = None,
        fp8: Literal["block"] | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Linear:
        """A new layer that shares the parameters of `layer`, in the same mode (training or eval).

        Raises:
            TypeError: `layer` is not a plain ``torch.nn.Linear``, or has hooks, which a new layer would lack.
        """
        reason = _why_not(layer)
        if reason is None and any(vars(layer)[hooks] for hooks in _HOOKS):
            reason = "it has hooks, which samebits.convert(module) keeps"
        if reason is not None:
            raise TypeError(f"samebits.nn.Linear.from_torch: layer: {type(layer).__name__}: {reason}")
        size, dtype = (layer.in_features, layer.out_features), layer.weight.dtype
        new = cls(*size, False, "meta", dtype, contract=contract, fp8=fp8, out_dtype=out_dtype)
        new.weight, new.bias = layer.weight, layer.bias
        return new.train(layer.training)

    def forward(self, input: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """``input`` ``[..., in_features]``; ``cu_seqlens`` as in :func:`samebits.linear`."""
        out: Tensor = self._run(input, cu_seqlens)
        return out

    @torch.jit.ignore  # type: ignore[untyped-decorator]  # TorchScript calls it in Python
    def _run(self, input: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        if isinstance(input, torch.fx.Proxy):
            return _traced(self, input, cu_seqlens)
        if torch.is_grad_enabled() and any(_main_grad(p) is not None for p in (self.weight, self.bias)):
            return _run_with_main_grads(self, input, cu_seqlens)
        return _product(self, input, self.weight, self.bias, cu_seqlens)

    def extra_repr(self) -> str:
        said = {"contract": self.contract, "fp8": self.fp8, "out_dtype": self.out_dtype}
        more = (f", {name}={value}" for name, value in said.items() if value is not None)
        return super().extra_repr() + "".join(more)


# TorchScript reads types, not their names.
Linear._run.__annotations__ = {"input": Tensor, "cu_seqlens": Tensor | None, "return": Tensor}


def _product(
    layer: Linear, x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor | None
) -> Tensor:
    contract, dtype = layer.contract, layer.out_dtype
    if layer.fp8 is not None:
        return fp8_linear(x, weight, bias, cu_seqlens=cu_seqlens, contract=contract)
    return linear(x, weight, bias, cu_seqlens=cu_seqlens, out_dtype=dtype, contract=contract)


def _traced(layer: Linear, x: torch.fx.Proxy, cu_seqlens: Any) -> Any:
    """A call of `layer` in the graph, as ``torch.fx`` traces a ``torch.nn.Linear``."""
    args = (x,) if cu_seqlens is None else (x, cu_seqlens)
    tracer: Any = x.tracer
    return tracer.create_proxy("call_module", tracer.path_of_module(layer), args, {})


def _check_form(op: str, fp8: str | None, out_dtype: torch.dtype | None) -> None:
    if fp8 not in (None, "block"):
        raise ValueError(f'samebits.{op}: fp8: expected "block" or None, got {fp8!r}')
    if out_dtype is None:
        return
    if not isinstance(out_dtype, torch.dtype):
        raise TypeError(f"samebits.{op}: out_dtype: expected a torch.dtype or None, got {out_dtype!r}")
    if fp8 is not None:
        raise ValueError(f"samebits.{op}: out_dtype: expected None beside fp8, got {out_dtype}")


_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def _main_grad(parameter: Tensor | None) -> Tensor | None:
    """The tensor that accumulates the gradient of `parameter`, or None for ``.grad``."""
    if parameter is None or not parameter.requires_grad:
        return None
    return getattr(parameter, "main_grad", None)


def _run_with_main_grads(layer: Linear, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    if torch.compiler.is_compiling():
        raise NotImplementedError("samebits.nn.Linear: main_grad: expected eager mode, got torch.compile")
    refuse_vmap("nn.Linear", "main_grad")
    given = {"x": x, "weight": layer.weight} | ({} if layer.bias is None else {"bias": layer.bias})
    operands, key, _ = check_operands("linear", layer.contract, given)
    check_segments("nn.Linear", layer.contract, ("", 0), x, ("out_features", len(layer.weight)))
    _check_main_grads(layer.weight, layer.bias, x=x)
    bias = operands[2] if len(operands) > 2 else None
    out: Tensor = _MainGradLinear.apply(  # type: ignore[no-untyped-call]
        *operands[:2], bias, layer, cu_seqlens, key
    )
    return out


def _check_main_grads(weight: Tensor, bias: Tensor | None, **others: Tensor) -> None:
    """Refuse unsuitable ``main_grad`` tensors. The backward checks again: they may have changed by then."""
    parameters = {"weight": weight} | ({} if bias is None else {"bias": bias})
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"samebits.nn.Linear: bias: expected shape {(len(weight),)} beside main_grad, got {shape(bias)}"
        )
    for name, parameter in parameters.items():
        acc, called = _main_grad(parameter), f"{name}.main_grad"
        if acc is None:
            continue
        check_accumulator("nn.Linear", called, acc, name, parameter)
        if acc.shape != parameter.shape:
            raise ValueError(
                f"samebits.nn.Linear: {called}: expected shape {shape(parameter)} like {name},"
                f" got {shape(acc)}"
            )
        if acc.requires_grad:
            raise ValueError(f"samebits.nn.Linear: {called}: expected a tensor that requires no grad")
        accs = {f"{n}.main_grad": _main_grad(p) for n, p in parameters.items() if p is not parameter}
        with_memory = parameters | others | {n: t for n, t in accs.items() if t is not None}
        if has_memory(acc, *with_memory.values()):
            refuse_overlap("nn.Linear", called, acc, **with_memory)


class _MainGradLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: Linear,
        cu_seqlens: Tensor | None,
        key: Key,
    ) -> Tensor:
        needed = ctx.needs_input_grad  # each operand is needed only for the other's gradient
        ctx.save_for_backward(x if needed[1] else None, weight if needed[0] else None, cu_seqlens)
        ctx.parameters = layer.weight, layer.bias
        ctx.shape, ctx.dtype, ctx.contract, ctx.fp8 = x.shape, x.dtype, key, layer.fp8
        with torch.autocast(x.device.type, enabled=False):  # operands are cast already
            return _product(layer, x, weight, bias, cu_seqlens)

    @staticmethod
    @without_modes
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, cu_seqlens = saved
        grad = as_operand(grad, ctx.dtype, ctx.contract)
        _check_main_grads(*ctx.parameters, grad=grad, **({} if x is None else {"x": x}))
        grads: list[Tensor | None] = [None, None, None, None, None, None]
        if ctx.needs_input_grad[0]:
            rows = grad if grad.ndim > 1 else grad.unsqueeze(0)
            given = weight, None, ctx.dtype, ctx.contract
            out = fp8_product(rows, *given, transposed=True) if ctx.fp8 else product(rows, *given)
            grads[0] = out.reshape(ctx.shape)
        columns, steps = sequences(grad).mT, []
        for i, parameter in enumerate(ctx.parameters, 1):
            if not ctx.needs_input_grad[i]:
                continue
            if i == 1:
                terms = sequences(x)
            else:
                terms = grad.new_ones(()).expand(*columns.shape[:2], columns.shape[3], 1)
            acc = _main_grad(parameter)
            if acc is None:
                out = addbmm(None, columns, terms, cu_seqlens, ctx.dtype, ctx.contract)
                grads[i] = out[0].view(parameter.shape)
            else:
                chains = acc.view(1, len(acc), terms.shape[-1])
                steps.append(addbmm_later(chains, columns, terms, cu_seqlens, ctx.contract))
                steps.append(partial(setattr, parameter, "grad_added_to_main_grad", True))
        for step in steps:  # all is written or nothing: everything that can fail has run before
            step()
        return tuple(grads)


@dataclass(frozen=True)
class Unconverted:
    """A module that computes products and was left as it is.

    Attributes:
        name: its name in the model.
        kind: its class.
        reason: why it was left, and what to do if something can be done.
    """

    name: str
    kind: str
    reason: str


@dataclass(frozen=True)
class Conversion:
    """The result of :func:`convert`. Its ``str`` is a summary.

    Attributes:
        converted: names of the layers that became ``samebits.nn.Linear``.
        already: names of the layers that were ``samebits.nn.Linear`` before.
        unconverted: all other modules known to compute products, and why they were left.
    """

    converted: tuple[str, ...]
    already: tuple[str, ...]
    unconverted: tuple[Unconverted, ...]

    def __str__(self) -> str:
        counts = {
            "layers converted": self.converted,
            "converted before": self.already,
            "left as they are": self.unconverted,
        }
        lines = ["; ".join(f"{what}: {len(names)}" for what, names in counts.items())]
        lines += [f"  {u.name or '(the module itself)'} ({u.kind}): {u.reason}" for u in self.unconverted]
        return "\n".join(lines)


def convert(
    module: nn.Module,
    *,
    filter: Callable[[str, nn.Module], bool] | None = None,
    contract: Contract | None = None,
    fp8: Literal["block"] | None = None,
    out_dtype: torch.dtype | None = None,
) -> Conversion:
    """Make every plain ``torch.nn.Linear`` of a model a :class:`samebits.nn.Linear`, in place.

    A layer stays the same object and only changes its class. So its parameters (tied ones too), dtype,
    device, ``requires_grad``, mode, hooks, name and every reference to it stay. Layers whose class or
    instance overrides ``forward`` are left as they are, and so are other modules that compute products. The
    report names each of them, with the reason. Code that calls ``torch.nn.functional.linear`` itself is
    neither converted nor reported: use ``samebits.audit`` to be sure. Converting twice changes nothing.

    With a `contract` or ``fp8="block"`` layers of experts of ``transformers`` are converted, too: their class
    becomes a subclass of the same name. Under a contract their products are :func:`samebits.grouped_mm`. In
    FP8 they are those of a layer in FP8 with each expert's weight (:func:`samebits.scaled_grouped_mm`), and
    weights have the gradients of :func:`samebits.grouped_mm`. Routers that are no linear layer stay as they
    are. Without both, experts are left to :class:`samebits.batch_invariant`.

    Args:
        module: the model, or one layer. Convert it before it is sharded, compiled or traced.
        filter: a function of a layer's name and the layer. Layers for which it is false are left.
        contract: the contract of the converted layers, as in :func:`samebits.linear`.
        fp8: ``"block"`` lets the converted layers compute in FP8, as in :class:`samebits.nn.Linear`.
            Experts take no `contract` beside it, and no `out_dtype`.
        out_dtype: of the converted layers, as in :class:`samebits.nn.Linear`. A head with float32 logits:
            ``convert(model, filter=lambda name, _: name == "lm_head", out_dtype=torch.float32)``.

    Raises:
        TypeError: ``module`` is not a module, ``filter`` not a function, ``contract`` not a contract, or
            ``out_dtype`` not a dtype.
        ValueError: ``fp8`` is neither ``"block"`` nor None, or stands beside ``out_dtype``.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"samebits.convert: module: expected a Module, got {type(module).__name__}")
    check_contract("convert", contract)
    _check_form("convert", fp8, out_dtype)
    if filter is not None and not callable(filter):
        raise TypeError(f"samebits.convert: filter: expected a function, got {type(filter).__name__}")
    bypassed = _bypassed(module)
    already, unconverted = [], []
    converted: dict[str, nn.Module] = {}
    for name, part in module.named_modules():
        # Also a subclass, such as one that parametrization made.
        asked = contract, fp8, out_dtype
        if isinstance(part, Linear) or are_converted(part):
            other = _asked_before(part) != asked
            if not isinstance(part, Linear):
                other = other and (contract is not None or fp8 is not None)
            if other and (filter is None or filter(name, part)):
                unconverted.append(
                    Unconverted(name, type(part).__name__, "it was converted before, with other options")
                )
            else:
                already.append(name)
            continue
        reason = _product_of_its_own(part)
        experts = (contract is not None or fp8 is not None) and are_experts(part)
        if isinstance(part, nn.Linear) or experts:
            reason = why_not_converted(part, asked) if experts else bypassed.get(part) or _why_not(part)
            if reason is None and filter is not None and not filter(name, part):
                reason = "the filter left it out"
            if reason is None:
                converted[name] = part
        if reason is not None:
            unconverted.append(Unconverted(name, type(part).__name__, reason))
    for part in converted.values():  # after `filter` has seen all layers, because it may raise
        if isinstance(part, nn.Linear):
            part.__class__ = Linear
            vars(part).update(contract=contract, fp8=fp8, out_dtype=out_dtype)
        else:
            convert_experts(part, contract, fp8 is not None)
    return Conversion(tuple(converted), tuple(already), tuple(unconverted))


def _asked_before(part: Any) -> tuple[Contract | None, str | None, torch.dtype | None]:
    """The options with which a layer was converted."""
    if isinstance(part, Linear):
        return part.contract, part.fp8, part.out_dtype
    return part.samebits_contract, "block" if part._samebits_in_fp8 else None, None


def _why_not(layer: nn.Module) -> str | None:
    """Why `layer` cannot become a :class:`Linear`; None if it can."""
    if isinstance(layer, nn.LazyLinear):
        return "its weight is not initialized: run the model once first"
    if nn.utils.parametrize.is_parametrized(layer):
        return "it is parametrized: convert first, then parametrize"
    fp8 = sys.modules.get("transformers.integrations.finegrained_fp8")
    if fp8 is not None and isinstance(layer, fp8.FP8Linear):
        return "its weight is FP8 already: samebits.batch_invariant runs it by samebits.scaled_mm"
    if type(layer) is not nn.Linear:
        return "it is not a plain torch.nn.Linear, and its class may compute something else"
    if "forward" in vars(layer):
        return "its forward was replaced on the instance: convert first, then wrap"
    weight = layer.weight  # torch.nn.utils.weight_norm makes it a plain tensor, which a hook computes
    if type(weight) not in (Tensor, nn.Parameter) or weight.layout is not torch.strided:
        return f"its weight is a {type(weight).__name__} of layout {weight.layout}, not a plain dense tensor"
    if weight.dtype not in SUPPORTED:
        return f"its weight is {weight.dtype}; samebits takes float32, bfloat16 and float16"
    return None


def _bypassed(module: nn.Module) -> dict[nn.Module, str]:
    """Linear layers whose weights PyTorch's modules use without calling them, and why."""
    layers: dict[nn.Module, str] = {}
    for part in module.modules():
        if isinstance(part, nn.MultiheadAttention):
            layers[part.out_proj] = "torch.nn.MultiheadAttention uses its weight without calling it"
        elif isinstance(part, nn.TransformerEncoderLayer) and torch.backends.mha.get_fastpath_enabled():
            reason = (
                "the fast path of torch.nn.TransformerEncoderLayer does not call it:"
                " torch.backends.mha.set_fastpath_enabled(False) first"
            )
            layers |= {part.linear1: reason, part.linear2: reason}
    return layers


def _product_of_its_own(part: nn.Module) -> str | None:
    """Why the products of `part`, which is no linear layer, stay PyTorch's. None if it computes none."""
    # Not imported: a model can have a Conv1D only if transformers is loaded.
    pytorch_utils = sys.modules.get("transformers.pytorch_utils")
    if pytorch_utils is not None and isinstance(part, pytorch_utils.Conv1D):
        return "its weight is transposed: replace it by a samebits.nn.Linear of weight.mT"
    kinds = (nn.MultiheadAttention, nn.Bilinear, nn.RNNBase, nn.RNNCellBase, nn.modules.conv._ConvNd)
    return "it computes products itself, with PyTorch's operators" if isinstance(part, kinds) else None
