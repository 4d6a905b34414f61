"""How forms are recognised: by what code computes.

Each form that may be meant is compared with the code on random operands (:mod:`samebits.fusion.probe`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from types import BuiltinFunctionType, FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn

from samebits.fusion.forms import (
    Gate,
    GatedNorm,
    GateOfExperts,
    Kind,
    Norm,
    NormRotary,
    Rotary,
    moved,
    own_class,
    subclass,
)
from samebits.fusion.probe import (
    DTYPES,
    DiffersError,
    UnfitError,
    check,
    compare,
    name_of,
    results,
    rows,
    weights,
)
from samebits.ops.activation import POINTWISE

__all__ = ["Forms"]


def _exactly(proven: Sequence[Kind]) -> bool:
    """Whether a form is proven in float32, too: rounding to 16 bits hides most of what differs before."""
    return any(kind[1] == torch.float32 for kind in proven)


# ---- norms


def _norms_like(module: nn.Module) -> Iterator[Norm]:
    """Forms that a module may have, by its parameters and numbers."""
    if next(module.children(), None) is not None:
        return
    own = dict(module.named_parameters(recurse=False))
    if len(own) > 1 or any(p.ndim != 1 or p.dtype not in DTYPES for p in own.values()):
        return
    weight = next(iter(own), None)
    numbers = [n for n, v in vars(module).items() if isinstance(v, float) and 0 < v < 1e-2]
    for eps in numbers:
        yield Norm(type(module), None, weight, eps, "twice", 0.0)
        if weight is not None:
            yield Norm(type(module), None, weight, eps, "once", 0.0)
            yield Norm(type(module), None, weight, eps, "once", 1.0)


def _prove_norm(form: Norm, module: nn.Module, device: torch.device) -> tuple[Norm, str]:
    """The form with what is proven of it, and why no more is."""
    weight = form._weight(module)
    size = 64 if weight is None else len(weight)
    own, proven, after_sum, why = form.kind.forward, [], [], ""
    of_sum = ""
    if not _is_norm(form, module, device, size):
        return form, ""
    kinds = [(d, w) for d in DTYPES for w in ({d, torch.float32} if weight is not None else {None})]
    for dtype, of_weight in kinds:
        kind = (device.type, dtype, of_weight)
        trial = replace(form, proven=(kind,), after_sum=(kind,))
        norm, add = trial.norm(), trial.sum()
        given = {"x": rows((2, 33, size), dtype, device, 2)}
        if weight is not None and of_weight is not None:
            given["weight"] = weights(weight.detach().to(device), of_weight, 3)

        # What follows uses the rows again, as a residual stream is: gradients are summed in the same order.
        def alone(run: Any, t: dict[str, Tensor]) -> Any:
            x = t["x"].clone()
            y = _with(module, form.weight, t.get("weight"), lambda m: run(m, x))
            return y, x * 1.0

        def summed(run: Any, t: dict[str, Tensor]) -> Any:
            a, b = t["x"].clone(), t["other"].clone()
            total, y = _with(module, form.weight, t.get("weight"), lambda m: run(m, a, b))
            return y, total * 1.0

        def own_sum(m: nn.Module, a: Tensor, b: Tensor) -> Any:
            total = a + b
            return total, own(m, total)

        try:
            compare(partial(alone, own), partial(alone, norm), given)
            proven.append(kind)
        except DiffersError as error:
            why = f"in {name_of(dtype)}, {error}"
        try:
            both = given | {"other": rows((2, 33, size), dtype, device, 4)}
            compare(partial(summed, own_sum), partial(summed, add), both)
            after_sum.append(kind)
        except DiffersError as error:
            if dtype == torch.float32:
                of_sum = f"in float32, {error}"
    if not _exactly(after_sum):
        return form, of_sum or why
    form = replace(form, proven=tuple(proven), after_sum=tuple(after_sum))
    if proven:
        form = replace(form, fused=subclass(form.kind, "forward", form.norm()))
    return form, why


def _is_norm(form: Norm, module: nn.Module, device: torch.device, size: int) -> bool:
    """Whether results have the module's bits where no gradient is asked for, in bfloat16."""
    given = {"x": rows((9, size), torch.bfloat16, device, 2)}
    weight = form._weight(module)
    if weight is not None:
        given["weight"] = weights(weight.detach().to(device), torch.bfloat16, 3)
    kind = device.type, torch.bfloat16, None if weight is None else torch.bfloat16
    norm = replace(form, proven=(kind,)).norm()

    def run(f: Any, t: dict[str, Tensor]) -> Any:
        return _with(module, form.weight, t.get("weight"), lambda m: f(m, t["x"]))

    try:
        compare(lambda t: run(form.kind.forward, t), lambda t: run(norm, t), given, backward=False)
    except DiffersError:
        return False
    return True


def _with(module: nn.Module, name: str | None, weight: Tensor | None, run: Callable[[Any], Any]) -> Any:
    """`run` of the module with another weight, which stays its own."""
    if name is None or weight is None:
        return run(module)
    kept = module._parameters[name]
    del module._parameters[name]
    try:
        setattr(module, name, weight)
        return run(module)
    finally:
        delattr(module, name)
        module._parameters[name] = kept


# ---- gates


def _prove_gate(act: Callable[..., Any], device: torch.device) -> tuple[Gate | None, str]:
    kind = own_class(type(act)) if isinstance(act, nn.Module) else act
    best, why = None, "no activation of samebits.gated has its bits"
    for activation in POINTWISE:
        proven = []
        for dtype in DTYPES:
            at = (device.type, dtype)
            run = Gate(kind, activation, (at,)).run()
            given = {"gate": rows((7, 40), dtype, device, 5), "up": rows((7, 40), dtype, device, 6)}
            try:
                compare(
                    lambda t: act(t["gate"]) * t["up"],
                    lambda t, run=run: run(act, t["gate"], t["up"]),
                    given,
                )
                proven.append(at)
            except (DiffersError, UnfitError):
                pass
            except Exception:  # it is no function of one tensor
                return None, why
        if _exactly(proven) and len(proven) > (len(best.proven) if best else 0):
            best = Gate(kind, activation, tuple(proven))
    return best, why


def _prove_gated_norm(form: GatedNorm, module: nn.Module, device: torch.device) -> tuple[GatedNorm, str]:
    """The form with what is proven of it, and why no more is."""
    weight = form.of._weight(module)
    size = 64 if weight is None else len(weight)
    own, proven, why = form.kind.forward, [], ""

    def compared(dtype: torch.dtype, again: bool, backward: bool = True) -> str:
        """What differs, with rows and gates that are used again, or are not."""
        trial = replace(form, proven=((device.type, dtype),)).norm()
        given = {name: rows((2, 33, size), dtype, device, i) for i, name in enumerate(("x", "gate"), 7)}
        if weight is not None:
            given["weight"] = weights(weight.detach().to(device), dtype, 3)

        def run(f: Any, t: dict[str, Tensor]) -> Any:
            x, gate = t["x"].clone(), t["gate"].clone()
            y = _with(module, form.of.weight, t.get("weight"), lambda m: f(m, x, gate))
            return (y, x * 1.0, gate * 1.0) if again else y

        try:
            compare(partial(run, own), partial(run, trial), given, backward)
        except DiffersError as error:
            return f"in {name_of(dtype)}, {error}"
        return ""

    if compared(torch.bfloat16, again=False, backward=False):  # it is none
        return form, ""
    if why := compared(torch.float32, again=False):
        return form, why
    for dtype in DTYPES:
        said = compared(dtype, again=True)
        if not said:
            proven.append((device.type, dtype))
        why = said or why
    form = replace(form, proven=tuple(proven))
    if proven:
        form = replace(form, fused=subclass(form.kind, "forward", form.norm()))
    return form, why


def _prove_gate_of_experts(module: Any, device: torch.device) -> tuple[GateOfExperts | None, str]:
    own = type(module)._apply_gate
    numbers = [n for n, v in vars(module).items() if isinstance(v, float | int) and not isinstance(v, bool)]
    limits: list[str | None] = [None, *(n for n in numbers if "limit" in n)]
    alphas = [n for n in numbers if "alpha" in n]
    candidates = [GateOfExperts(own, a, False, n, None) for a in POINTWISE for n in limits]
    candidates += [
        GateOfExperts(own, "gpt_oss", turns, limit, alpha)
        for turns in (True, False)
        for limit in limits
        for alpha in alphas
    ]
    best, why = None, "no form of samebits.gated has its bits"
    for form in candidates:
        proven = []
        for dtype in DTYPES:
            at = (device.type, dtype)
            run = replace(form, proven=(at,)).run()
            given = {"gate_up": rows((9, 40), dtype, device, 10) * 4}  # some beyond a limit
            try:
                compare(
                    lambda t: own(module, t["gate_up"]),
                    lambda t, run=run: run(module, t["gate_up"]),
                    given,
                )
                proven.append(at)
            except DiffersError as error:
                why = str(error) if "fails" in str(error) else why
            except Exception:  # the own code
                continue
        if _exactly(proven) and len(proven) > (len(best.proven) if best else 0):
            best = replace(form, proven=tuple(proven))
    return best, why


# ---- rotary positions


def _prove_rotary(own: Callable[..., Any], device: torch.device) -> tuple[Rotary | None, str]:
    why = "it takes other arguments than queries, keys, cosines and sines"
    try:
        parameters = inspect.signature(own).parameters
    except (TypeError, ValueError):
        return None, why
    needed = [
        n
        for n, p in parameters.items()
        if p.kind is p.POSITIONAL_OR_KEYWORD and n not in ("cos", "sin", "unsqueeze_dim", "position_ids")
    ]
    if not {"cos", "sin"} <= parameters.keys() or not 1 <= len(needed) <= 2:
        return None, why
    default = parameters["unsqueeze_dim"].default if "unsqueeze_dim" in parameters else None
    axes: tuple[int | None, ...] = (-2, -3) if default is None else (None,)
    candidates = [
        Rotary(own, tuple(needed), axis, default, layout, paired, first_half)
        for layout in ("halves", "pairs", "pairs to halves")
        for paired, first_half in ((False, False), (True, False), (False, True))
        for axis in axes
    ]
    why = "no form of samebits.rotary has its bits"
    cases: dict[Any, _Case | None] = {}
    for form in candidates:
        if not _kinds_of_rotary(form, device, DTYPES[:1], (3, 4), cases, backward=False):
            continue
        why = "no form of samebits.rotary has its gradients"
        trials = [
            replace(form, gradients=gradients, wide=wide)
            for gradients in ("rounded", "wide", "split")
            for wide in (False, True)
        ]
        best = max(trials, key=lambda trial: len(_kinds_of_rotary(trial, device, DTYPES[:2], (4,), cases)))
        proven = _kinds_of_rotary(best, device, DTYPES, (3, 4), cases)
        if _exactly(proven):
            return replace(best, proven=proven), ""
    return None, why


_Case = tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor]]
"""Queries and keys, other arguments, and what the own function makes of them."""


def _kinds_of_rotary(
    form: Rotary,
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    ndims: Sequence[int],
    cases: dict[Any, _Case | None],
    backward: bool = True,
) -> tuple[Kind, ...]:
    """The kinds of operands, of these dtypes and dimensions, on which the form has the function's bits.

    Args:
        cases: those that were met; None where the function takes no such operands.
    """
    found: dict[Kind, list[bool]] = {}
    axes = (-2, -3) if form.axis is None else (form.axis,)
    for axis, ndim, part, dtype in product(axes, ndims, (1, 2, 4), dtypes):
        for table in {dtype, torch.float32}:
            key = axis, ndim, part, dtype, table, backward
            if key not in cases:
                cases[key] = _case_of_rotary(form, device, *key)
            case = cases[key]
            if case is None:
                continue
            given, fixed, first = case
            kind = form._kind(given[form.tensors[0]], fixed["cos"], axis)
            run = replace(form, proven=(kind,)).run()
            try:
                check(first, lambda t, fixed=fixed, run=run: run(**t, **fixed), given, backward)
                found.setdefault(kind, []).append(True)
            except (DiffersError, UnfitError):
                found.setdefault(kind, []).append(False)
    return tuple(kind for kind, right in found.items() if all(right))


def _case_of_rotary(
    form: Rotary,
    device: torch.device,
    axis: int,
    ndim: int,
    part: int,
    dtype: torch.dtype,
    table: torch.dtype,
    backward: bool,
) -> _Case | None:
    size = 16
    lead = (2, 5)[4 - ndim :]
    given = {
        name: rows((*lead, n, size) if axis == -2 else (*lead[:-1], n, 5, size), dtype, device, n)
        for n, name in enumerate(form.tensors, 3)
    }
    generator = torch.Generator().manual_seed(9)
    angles = torch.rand((*lead, size // part), generator=generator, dtype=torch.float32) * 6
    fixed: dict[str, Any] = {"cos": angles.cos().to(device, table)}
    fixed["sin"] = (angles + 0.5).sin().to(device, table)
    if form.default is not None:
        fixed["unsqueeze_dim"] = axis + ndim
    try:
        return given, fixed, results(lambda t: form.own(**t, **fixed), given, backward)
    except Exception:
        return None


# ---- all of them


known: dict[Any, tuple[Any, str]] = {}
"""What was found before, by kind of device, and class or function: it is proven once in a process."""


def _traits(module: nn.Module) -> Any:
    """What a module's code may depend on: its class, shapes of its parameters, and its other attributes."""
    shapes = tuple((n, tuple(p.shape)) for n, p in module.named_parameters(recurse=False))
    others = _others(module)
    _kept.extend(v for v in others.values() if not isinstance(v, _PLAIN))  # so that no other has its id
    return type(module), shapes, tuple((n, v if isinstance(v, _PLAIN) else id(v)) for n, v in others.items())


def _others(module: nn.Module) -> dict[str, Any]:
    """Attributes of its own, but for the number of its layer."""
    inner = vars(nn.Module()).keys()
    return {n: v for n, v in vars(module).items() if n not in inner and n != "layer_idx"}


_PLAIN = (int, float, bool, str, torch.dtype, type(None))
_kept: list[Any] = []


@functools.cache
def _on(form: Any, device: str) -> Any:
    """A form on a type of device."""
    if moved(form, device) == form:
        return form
    form = moved(form, device)
    if isinstance(form, Norm | GatedNorm) and form.fused is not None:
        form = replace(form, fused=subclass(form.kind, "forward", form.norm()))
    return form


class Forms:
    """The forms of what a model has, on one device.

    Attributes:
        device: where they are proven.
        runs_on: the type of device where they run: the mode has the same bits on all.
        loss: kinds of operands for which the loss is to be fused with its head.
        of_logits: the same, for a loss from logits.
    """

    def __init__(self, device: torch.device, loss: bool = False, runs_on: str | None = None) -> None:
        self.device, self.runs_on = device, runs_on or device.type
        self.loss: tuple[Kind, ...] = tuple((device.type, d) for d in DTYPES) if loss else ()
        self.of_logits: tuple[Kind, ...] = tuple((device.type, d) for d in DTYPES if d.itemsize == 2)

    def _found(self, key: Any, find: Callable[[], tuple[Any, str]]) -> tuple[Any, str]:
        key = self.device.type, key
        if key not in known:
            known[key] = find()
        form, why = known[key]
        return form if form is None else _on(form, self.runs_on), why

    def norm(self, module: nn.Module) -> tuple[Norm | None, str]:
        """The form of a module, and why it has none, or not in every dtype."""
        return self._found(("norm", _traits(module)), lambda: self._norm(module))

    def _norm(self, module: nn.Module) -> tuple[Norm | None, str]:
        best: Norm | None = None
        why = ""
        for form in _norms_like(module):
            try:
                found, said = _prove_norm(form, module, self.device)
            except Exception:  # it is no function of one tensor
                return None, ""
            proven = len(found.proven) + len(found.after_sum)
            if proven and (best is None or proven > len(best.proven) + len(best.after_sum)):
                best, why = found, said
            elif best is None and "gradient" in said:  # of results that are the same
                why = said
        return best, why

    def gated_norm(self, module: nn.Module) -> tuple[GatedNorm | None, str]:
        """The same, of a norm of its first argument that takes a gate."""
        return self._found(("gated norm", _traits(module)), lambda: self._gated_norm(module))

    def _gated_norm(self, module: nn.Module) -> tuple[GatedNorm | None, str]:
        kinds = (*_PLAIN, FunctionType, BuiltinFunctionType)
        options = [(n, v) for n, v in _others(module).items() if isinstance(v, kinds)]
        why = ""
        try:
            takes = len(inspect.signature(type(module).forward).parameters)  # with self
            for norm, activation in product(_norms_like(module) if takes == 3 else (), POINTWISE):
                fixed = tuple(o for o in options if o[0] != norm.eps)
                form, said = _prove_gated_norm(GatedNorm(norm, activation, fixed), module, self.device)
                if form.proven:
                    return form, said
                why = said or why
        except Exception:  # it is no function of two tensors
            return None, ""
        return None, why

    def gate(self, act: Any) -> tuple[Gate | None, str]:
        traits = _traits(act) if isinstance(act, nn.Module) else act
        return self._found(("gate", traits), lambda: _prove_gate(act, self.device))

    def gate_of_experts(self, module: Any) -> tuple[GateOfExperts | None, str]:
        act = getattr(module, "act_fn", None)
        traits = _traits(module), _traits(act) if isinstance(act, nn.Module) else act
        return self._found(("experts", traits), lambda: _prove_gate_of_experts(module, self.device))

    def rotary(self, function: Any) -> tuple[Rotary | None, str]:
        return self._found(("rotary", function), lambda: _prove_rotary(function, self.device))

    def norm_rotary(self, q: nn.Module, k: nn.Module, rotary: Rotary | None) -> NormRotary | None:
        """The form of norms of heads and what turns these then: whole modules prove it."""
        norms = self.norm(q)[0], self.norm(k)[0]
        if rotary is None or None in norms or len(rotary.tensors) != 2:
            return None
        of_q, of_k = cast("tuple[Norm, Norm]", norms)
        if (of_q.rounding, of_q.offset) != (of_k.rounding, of_k.offset):
            return None
        dtypes = {kind[1] for kind in rotary.proven}
        for norm in (of_q, of_k):
            dtypes &= {kind[1] for kind in norm.after_sum}
        found = tuple((self.runs_on, d) for d in DTYPES if d in dtypes)
        return NormRotary((of_q, of_k), rotary, found) if found else None
