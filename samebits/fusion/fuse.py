"""``samebits.fuse``: which modules of a model run fused operators."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from samebits.fusion.calls import evaluated, of_logits, of_loss, of_module
from samebits.fusion.forms import subclass
from samebits.fusion.probe import DTYPES, DiffersError, UnfitError, compare, name_of
from samebits.fusion.proofs import Forms
from samebits.fusion.report import Fused, Fusion, Left, Swap
from samebits.fusion.source import GATE, LOSS, LOSS_OF_LOGITS, NORM_ROTARY, ROTARY, SUM, Plan, plan
from samebits.mode import batch_invariant

__all__ = ["fuse", "fuse_parts"]

NORM, GATED_NORM = "RMS norm", "gated RMS norm"
Unit = tuple[int, ...]
"""Sites of a plan that are fused together."""


def fuse(model: nn.Module, inputs: Any = None, *, loss: bool = False) -> Fusion:
    """Let modules of a model run fused operators under the mode, with the bits of their own code.

    ::

        print(samebits.fuse(model))  # before it is sharded, compiled, or given to a trainer
        with samebits.batch_invariant():
            model(**inputs)

    These are fused, wherever they stand in a module's code:

    * RMS norms, alone and after a residual sum: :func:`samebits.add_rms_norm`; those that then take a gate
      in float32, as in Qwen3-Next: it and :func:`samebits.gated`;
    * rotary positions of queries and keys: :func:`samebits.rotary`; after RMS norms of their heads:
      :func:`samebits.norm_rotary`;
    * activations of gates, and the product with their factors, also of experts: :func:`samebits.gated`;
    * a language model's loss from its logits in 16 bits, which are not stored in float32;
    * with ``loss=True``, a language model's loss: :func:`samebits.linear_logp`. Logits are not stored.

    Modules are recognised by what they compute, not by name. For each class, and in each of float32, bfloat16
    and float16, the fused form is compared with the own code on random values of several scales: results and
    all gradients, bit for bit, under the mode. First parts alone; then, in the modules of which they are
    parts, each such module as a whole. What differs is left as it is, and the report says so.

    A module stays the same object, with its parameters, buffers, hooks and names. It only changes its class,
    to a subclass of the same name whose method is the own source with fused operators in it. Copies stay
    fused, pickles have the own classes. The own code runs outside of the mode, and on operands that were not
    proven: of other dtypes, on another kind of device, broadcast ones. So the bits are always the mode's.

    Args:
        model: a model of ``transformers``, or any module. Its weights have to be loaded, and on the device
            where it will run. Adapters may come before or after.
        inputs: the arguments of a forward: a mapping, a tuple, or one tensor. It runs once, without
            gradients, so that calls of the modules are known. None: the tokens that models of
            ``transformers`` propose. Modules that they do not reach, such as a vision tower, are left then.
        loss: whether to fuse the loss, where `labels` are given. The model then returns no logits with it. In
            float32 it has the own loss's bits. In 16 bits it has those of logits in float32, which a model's
            own loss rounds first: it differs from that, and is more accurate.

    Returns:
        What is fused and what is not. ``str`` of it is a summary, and ``undo()`` gives modules their own
        classes back.

    Raises:
        TypeError: `model` is not a module.
        ValueError: its parameters are neither on a CPU nor on a GPU.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"samebits.fuse: model: expected a Module, got {type(model).__name__}")
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"samebits.fuse: model: expected parameters on a CPU or a GPU, got {device}: load its weights"
            " first"
        )
    fuser = _Fuser(model, Forms(device, loss))
    try:
        groups = fuser.plans()  # before any class is another
        fuser.norms()
        fuser.gates_of_experts()
        fuser.methods(groups, inputs)
    except BaseException:
        fuser.result().undo()
        raise
    return fuser.result()


_ALONE = (SUM, GATE, ROTARY)
"""What :func:`fuse_parts` fuses in the forwards of modules."""


def fuse_parts(model: nn.Module) -> Fusion:
    """Let modules of ``transformers`` run fused operators, in a model that cannot be called: an engine's.

    They are those of :func:`fuse`, but for losses, and norms of heads that then turn. Each is proven as
    :func:`fuse` does it, alone, on the CPU. What puts it in its place is the same. Modules as a whole are not
    compared: for a model as a whole, ``samebits parity`` does.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    fuser = _Fuser(model, Forms(torch.device("cpu"), runs_on=device.type))
    fuser.modules = [(n, m) for n, m in fuser.modules if type(m).__module__.startswith("transformers.")]
    with torch.device("cpu"), torch.inference_mode(False):
        groups = fuser.plans()
        fuser.norms()
        for group in groups:
            fuser.take(group)
    return fuser.result()


@dataclass
class _Group:
    """Modules that are fused in the same way.

    Attributes:
        call: arguments of a call of the first that was called, and the module.
    """

    plan: Plan
    modules: list[tuple[str, nn.Module]] = field(default_factory=list)
    call: Any = None


class _Fuser:
    def __init__(self, model: nn.Module, forms: Forms) -> None:
        self.model, self.forms = model, forms
        self.swapped: list[Swap] = []
        self.made: dict[Any, Any] = {}
        self.fused: dict[tuple[str, str], tuple[list[str], set[torch.dtype]]] = {}
        self.left: dict[tuple[str, str, str], list[str]] = {}
        self.modules = [
            (name, m)
            for name, m in model.named_modules()
            if not (
                "forward" in vars(m) or hasattr(m, "_samebits_own") or type(m).__module__.startswith("torch.")
            )
        ]

    def result(self) -> Fusion:
        order = {d: i for i, d in enumerate(DTYPES)}
        return Fusion(
            tuple(
                Fused(kind, what, tuple(names), tuple(sorted(dtypes, key=order.__getitem__)))
                for (kind, what), (names, dtypes) in self.fused.items()
            ),
            tuple(
                Left(kind, what, tuple(names), reason) for (kind, what, reason), names in self.left.items()
            ),
            self.forms.runs_on,
            self.swapped,
        )

    def swap(self, module: nn.Module, fused: type[nn.Module]) -> None:
        self.swapped.append((module, type(module), fused))
        module.__class__ = fused

    def has(self, name: str, module: nn.Module, what: str, dtypes: Sequence[torch.dtype]) -> None:
        names, known = self.fused.setdefault((type(module).__name__, what), ([], set()))
        if not names or names[-1] != name:
            names.append(name)
        known.update(dtypes)

    def lacks(self, name: str, module: nn.Module, what: str, reason: str) -> None:
        self.left.setdefault((type(module).__name__, what, reason), []).append(name)

    def norms(self) -> None:
        forms: dict[str, Any] = {GATED_NORM: self.forms.gated_norm, NORM: self.forms.norm}
        for name, module in self.modules:
            for what, find in forms.items():
                form, why = find(module)
                if form is not None and form.fused is not None:
                    self.swap(module, form.fused)
                    self.has(name, module, what, [kind[1] for kind in form.proven])
                    break  # a module has one class; without a gate it runs its own code
                if why or form is not None:
                    self.lacks(name, module, what, why)

    def gates_of_experts(self) -> None:
        for name, module in self.modules:
            if callable(getattr(type(module), "_apply_gate", None)):
                form, why = self.forms.gate_of_experts(module)
                if form is None:
                    self.lacks(name, module, GATE, why)
                    continue
                made = self.made.setdefault(form, None) or subclass(type(module), "_apply_gate", form.run())
                self.made[form] = made
                self.swap(module, made)
                self.has(name, module, GATE, [kind[1] for kind in form.proven])

    def plans(self) -> list[_Group]:
        """What can be fused in the forwards of modules, those within others first."""
        groups: dict[Any, _Group] = {}
        for name, module in reversed(self.modules):
            found = plan(type(module).forward, module, self.forms)
            if found is None or self.forms.gated_norm(module)[0] is not None:  # its gate is in it
                continue
            for what, why in found.left:
                self.lacks(name, module, what, why)
            if found.sites:
                shapes = tuple((tuple(p.shape), p.dtype) for p in module.parameters())
                group = groups.setdefault((type(module), found.key, shapes), _Group(found))
                group.modules.append((name, module))
        return list(groups.values())

    def methods(self, groups: list[_Group], inputs: Any) -> None:
        """Fuse what stands in the forwards of modules."""
        if groups:
            self.call(groups, inputs)
        for group in groups:
            self.prove(group)

    def call(self, groups: list[_Group], inputs: Any) -> None:
        """Run the model until a module of each group was called, and keep the arguments."""
        of = {id(m): group for group in groups for _, m in group.modules}
        missing = {id(group) for group in groups}

        def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
            group = of[id(module)]
            if group.call is None:
                group.call = module, copy.deepcopy((args, kwargs))
                missing.discard(id(group))
                if not missing:
                    raise _AllCalledError

        hooks = [m.register_forward_pre_hook(keep, with_kwargs=True) for g in groups for _, m in g.modules]
        try:
            args, kwargs = _arguments(self.model, inputs)
            if not (args or kwargs):
                return
            with evaluated(self.model), torch.no_grad(), batch_invariant("ignore"):
                self.model(*args, **kwargs)
        except _AllCalledError:
            pass
        except Exception:
            if inputs is not None:
                raise
        finally:
            for hook in hooks:
                hook.remove()

    def prove(self, group: _Group) -> None:
        own = group.plan
        what = {unit: own.sites[unit[0]][0] for unit in own.units}
        if group.call is None:
            why = "it was not called: give fuse the `inputs` of a forward that does"
            for name, module in group.modules:
                for kind in dict.fromkeys(what.values()):
                    self.lacks(name, module, kind, why)
            return
        module, call = group.call
        proven: dict[Unit, set[torch.dtype]] = {unit: set() for unit in what}
        whys: dict[Unit, str] = {}
        for dtype in DTYPES:
            units = [unit for unit in what if dtype in _dtypes(*own.sites[unit[0]][1:])]
            for unit in self.right(own, module, call, dtype, units, whys):
                proven[unit].add(dtype)
        if any(proven.values()):
            made = own.make({i: dtypes for unit, dtypes in proven.items() for i in unit})
            fused = subclass(type(module), own.own.__name__, made)
        for name, m in group.modules:
            for unit, dtypes in proven.items():
                if dtypes:
                    self.has(name, m, what[unit], [*dtypes])
                else:
                    self.lacks(name, m, what[unit], whys.get(unit, "its own code runs in no dtype"))
            if any(proven.values()):
                self.swap(m, fused)

    def take(self, group: _Group) -> None:
        """Fuse what is proven by itself."""
        own = group.plan
        dtypes = {i: _dtypes(form, of) for i, (what, form, of) in enumerate(own.sites) if what in _ALONE}
        try:
            fused = subclass(type(group.modules[0][1]), own.own.__name__, own.make(dtypes))
        except UnfitError as error:
            dtypes, why = {}, str(error)
        else:
            why = "it is proven in whole modules alone"
        for name, m in group.modules:
            for i, (what, *_) in enumerate(own.sites):
                if i in dtypes:
                    self.has(name, m, what, [*dtypes[i]])
                else:
                    self.lacks(name, m, what, why)
            if dtypes:
                self.swap(m, fused)

    def right(
        self,
        own: Plan,
        module: nn.Module,
        call: Any,
        dtype: torch.dtype,
        units: list[Unit],
        whys: dict[Unit, str],
    ) -> list[Unit]:
        """Which of them keep a module's bits: all, or those that do so alone. `whys` gets the others'."""
        together = self.differs(own, module, call, dtype, units) if units else None
        parts = [unit for unit in units if own.sites[unit[0]][0] not in (NORM_ROTARY, LOSS)]  # they hide some
        if together == "" and parts and parts != units:
            together = self.differs(own, module, call, dtype, parts)
        if not together:
            return units if together == "" else []
        found = []
        for unit in units:
            why = self.differs(own, module, call, dtype, [unit]) if len(units) > 1 else together
            if why:
                whys[unit] = f"in {name_of(dtype)}, {why}"
            elif why == "":
                found.append(unit)
        if len(found) > 1 and self.differs(own, module, call, dtype, found) != "":
            whys |= dict.fromkeys(found, f"in {name_of(dtype)}, {together}")
            return []
        return found

    def differs(
        self, own: Plan, module: nn.Module, call: Any, dtype: torch.dtype, units: list[Unit]
    ) -> str | None:
        """What differs in a module if these are fused. None: its own code has no such dtype."""
        try:
            made = own.make({i: {dtype} for unit in units for i in unit})
            kind, trial = type(module), subclass(type(module), own.own.__name__, made)
            what = {own.sites[i][0] for unit in units for i in unit}
            if LOSS in what:
                operands, run, wide = of_loss(module, call, dtype)
            elif LOSS_OF_LOGITS in what:
                operands, run, wide = of_logits(module, call, dtype)
            else:
                operands, run, wide = *of_module(module, call, dtype), nullcontext

            def run_own(t: dict[str, Tensor]) -> Any:
                with self.own_code(module), wide():
                    return run(t)

            def run_fused(t: dict[str, Tensor]) -> Any:
                module.__class__ = trial
                try:
                    return run(t)
                finally:
                    module.__class__ = kind

            with evaluated(module):
                compare(run_own, run_fused, operands)
        except (DiffersError, UnfitError) as error:
            return str(error)
        except Exception:  # the own code
            return None
        return ""

    @contextmanager
    def own_code(self, module: nn.Module) -> Iterator[None]:
        """Let what is in a module run its own code meanwhile."""
        within = {id(m) for m in module.modules()}
        ours = [swap for swap in self.swapped if id(swap[0]) in within]
        for m, own, _ in reversed(ours):
            m.__class__ = own
        try:
            yield
        finally:
            for m, _, fused in ours:
                m.__class__ = fused


class _AllCalledError(Exception):
    pass


def _dtypes(form: Any, maker: str) -> set[torch.dtype]:
    return {kind[1] for kind in (form.after_sum if maker == "sum" else form.proven)}


def _arguments(model: nn.Module, inputs: Any) -> tuple[Any, Any]:
    """Of a forward: those given, or tokens that the model itself proposes."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if inputs is not None:
        return (tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,)), {}
    given = dict(getattr(model, "dummy_inputs", {}))
    device = next(model.parameters()).device
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False) and "input_ids" in given:
        given.setdefault("decoder_input_ids", given["input_ids"])
    takes = inspect.signature(model.forward).parameters
    given |= {"use_cache": False} if "use_cache" in takes else {}
    return (), tree_map(lambda t: t.to(device) if isinstance(t, Tensor) else t, given)
