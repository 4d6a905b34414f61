"""A function's own source with fused operators in it: its syntax tree is changed, and compiled again.

What is looked for:

* ``s = a + b``, and ``self.norm(s)`` in the statement after it (after ``residual = s``, if that comes first);
* ``act(gate) * up``, and ``up * act(gate)``, also where ``g = act(gate)`` stands before ``g * up``;
* a call of a function of the module that takes cosines and sines, also of ``self.norm(q).transpose(1, 2)``;
* ``self.loss_function(logits, labels)``; with ``logits = self.head(x)``, if the loss is to be fused.

The new function has the globals, defaults and closure of the old one, and its lines in tracebacks. What runs
instead comes in by its closure.
"""

from __future__ import annotations
import __future__

import ast
import copy
import inspect
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import nn

from samebits.fusion.forms import only
from samebits.fusion.loss import Loss, LossOfLogits, knows
from samebits.fusion.probe import UnfitError
from samebits.fusion.proofs import Forms

__all__ = ["Plan", "plan"]

_FLAGS = 0
for _name in __future__.all_feature_names:
    _FLAGS |= getattr(__future__, _name).compiler_flag

_OF_DOCS = ("auto_docstring",)  # a decorator that changes no code
SUM, GATE, ROTARY = "residual sum and RMS norm", "gated activation", "rotary positions"
NORM_ROTARY = "RMS norms of heads and rotary positions"
LOSS, LOSS_OF_LOGITS = "loss from hidden states", "loss from logits"


@dataclass
class Plan:
    """A new form of a method.

    Attributes:
        own: the method.
        sites: what is fused where it computes, in which form, and the form's method that makes what runs.
        left: what was recognised and has no form, and why.
    """

    own: FunctionType  # with its decorators
    sites: list[tuple[str, Any, str]] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)
    tree: Any = None

    @property
    def key(self) -> Any:
        return self.own, tuple(self.sites)

    @property
    def units(self) -> list[tuple[int, ...]]:
        """Numbers of sites that are fused together or not at all."""
        loss = tuple(i for i, (what, *_) in enumerate(self.sites) if what == LOSS)
        return [(i,) for i in range(len(self.sites)) if i not in loss] + ([loss] if loss else [])

    def make(self, dtypes: Mapping[int, Collection[torch.dtype]]) -> Callable[..., Any]:
        """The method, each of its sites in these dtypes: a function of a module and the arguments."""
        runs = {
            _local(i): getattr(only(form, dtypes.get(i, ())), maker)()
            for i, (_, form, maker) in enumerate(self.sites)
        }
        plain = inspect.unwrap(self.own)
        cells = dict(zip(plain.__code__.co_freevars, plain.__closure__ or (), strict=True))
        free = {name: cell.cell_contents for name, cell in cells.items()} | runs
        module: Any = ast.parse(f"def make({', '.join(free)}):\n    return {self.tree.name}")
        module.body[0].body.insert(0, self.tree)
        ast.fix_missing_locations(module)
        flags = plain.__code__.co_flags & _FLAGS
        code = compile(module, plain.__code__.co_filename, "exec", flags, dont_inherit=True)
        names: dict[str, Any] = {}
        exec(code, plain.__globals__, names)  # the function's own source, and calls of ours
        made: Any = names["make"](**free)
        if _wrappers(made) != _wrappers(self.own):
            raise UnfitError("its method has wrappers that are not in its source")
        made.__qualname__, made.__module__ = self.own.__qualname__, self.own.__module__
        return made  # type: ignore[no-any-return]


def plan(own: Any, module: nn.Module, forms: Forms) -> Plan | None:
    """What of a method can be fused in this module. None: nothing of it is known."""
    # Wrappers that a class puts around its subclasses' methods come back. So do decorators in the source.
    while isinstance(own, FunctionType) and "__init_subclass__.<locals>" in own.__code__.co_qualname:
        own = getattr(own, "__wrapped__", None)
    if not isinstance(own, FunctionType):
        return None
    tree = _parsed(own)
    if tree is None or not tree.args.args or (hasattr(own, "__wrapped__") and not tree.decorator_list):
        return None
    tree.decorator_list = [d for d in tree.decorator_list if ast.unparse(d) not in _OF_DOCS]
    found = Plan(own)
    rewriter = _Rewriter(found, module, forms, tree.args.args[0].arg)
    if forms.loss:
        rewriter.find_losses(tree)
    rewriter.find_activated(tree)
    rewriter.visit(tree)
    found.tree = tree
    return found if found.sites or found.left else None


def _parsed(own: FunctionType) -> ast.FunctionDef | None:
    try:
        lines, first = inspect.getsourcelines(own)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):  # there is none, as of what was made by exec
        return None
    (node, *rest) = tree.body
    if rest or not isinstance(node, ast.FunctionDef):
        return None
    ast.increment_lineno(node, first - 1)
    return node


def _wrappers(function: Any) -> list[str]:
    found = []
    while hasattr(function, "__wrapped__"):
        found.append(function.__code__.co_qualname)
        function = function.__wrapped__
    return found


def _local(i: int) -> str:
    return f"_samebits_{i}"


class _Rewriter(ast.NodeTransformer):
    def __init__(self, found: Plan, module: nn.Module, forms: Forms, self_name: str) -> None:
        self.found, self.module, self.forms, self.self_name = found, module, forms, self_name
        code = inspect.unwrap(found.own).__code__
        self.activated: dict[str, ast.Assign] = {}
        self.losses: dict[str, tuple[ast.Call, str]] = {}
        self.locals = {*code.co_varnames, *code.co_cellvars} - {self_name}

    # ---- the parts of a syntax tree

    def _value(self, node: ast.expr) -> Any:
        """What an expression of attributes is: of the module, or global. None if that is not known."""
        if isinstance(node, ast.Name):
            if node.id == self.self_name:
                return self.module
            return None if node.id in self.locals else inspect.unwrap(self.found.own).__globals__.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self._value(node.value)
            return None if owner is None else getattr(owner, node.attr, None)
        if isinstance(node, ast.Subscript):  # ACT2FN[self.activation]
            owner, key = self._value(node.value), self._value(node.slice)
            try:
                return owner[key]
            except Exception:
                return None
        return None

    def _site(self, what: str, form: Any, why: str = "", maker: str = "run") -> ast.Name | None:
        if form is None:
            if why:
                self.found.left.append((what, why))
            return None
        self.found.sites.append((what, form, maker))
        return ast.Name(_local(len(self.found.sites) - 1), ast.Load())

    # ---- sums and norms

    def _block(self, body: list[ast.stmt]) -> None:
        for i, statement in enumerate(body):
            match statement:
                case ast.Assign(targets=[ast.Name(id=total)], value=ast.BinOp(op=ast.Add()) as added):
                    self._sum(body, i, total, added)
                case ast.Assign(
                    targets=[ast.Name(id=logits)], value=ast.Call(func=head, args=[hidden], keywords=[])
                ) if logits in self.losses and isinstance(self._value(head), nn.Linear):
                    self._head(body, i, self.losses[logits], head, hidden)
                case ast.Assign(
                    targets=[ast.Tuple(elts=[ast.Name(id=q), ast.Name(id=k)])],
                    value=ast.Call(func=ast.Name(), args=[ast.Name(id=of_q), ast.Name(id=of_k), *_]) as call,
                ) if (q, k) == (of_q, of_k) and q != k:
                    self._turned_heads(body, i, (q, k), call)

    def _sum(self, body: list[ast.stmt], i: int, total: str, added: ast.BinOp) -> None:
        names = {total}
        for statement in body[i + 1 :]:
            match statement:
                case ast.Assign(targets=[ast.Name(id=alias)], value=ast.Name(id=name)) if name in names:
                    names.add(alias)
                    continue
            break
        else:
            return
        if not isinstance(statement, ast.Assign | ast.AnnAssign | ast.Return | ast.Expr):
            return
        if statement.value is None:
            return
        normed = f"_samebits_normed_{len(self.found.sites)}"
        finder = _NormOf(self, names, normed)
        value = finder.visit(statement.value)
        if finder.norm is None:
            return
        form, why = self.forms.norm(finder.module)
        run = self._site(SUM, form if form is not None and form.after_sum else None, why, "sum")
        if run is None:
            return
        statement.value = value if value is not None else ast.Name(normed, ast.Load())
        call = ast.Call(run, [finder.norm, added.left, added.right], [])
        pair = ast.Tuple([ast.Name(total, ast.Store()), ast.Name(normed, ast.Store())], ast.Store())
        body[i] = ast.copy_location(ast.Assign([pair], call), body[i])

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                self._block(block)
        return super().generic_visit(node)

    # ---- norms of heads, and rotary positions

    def _turned_heads(self, body: list[ast.stmt], i: int, names: tuple[str, str], call: ast.Call) -> None:
        function = self._value(call.func)
        if not isinstance(function, FunctionType) or not {"cos", "sin"} <= {*_parameters(function)}:
            return
        turned = [_turned_before(body[:i], name) for name in names]
        normed: list[Any] = [None if t is None else t.value for t in turned]
        q, k = (None if n is None else self._value(n.func) for n in normed)
        if not (isinstance(q, nn.Module) and isinstance(k, nn.Module)):
            return
        rotary, _ = self.forms.rotary(function)
        run = self._site(NORM_ROTARY, self.forms.norm_rotary(q, k, rotary))
        turn = None if run is None else self._site(ROTARY, rotary)  # where the norms stand apart
        if run is None or turn is None:
            return
        for parent, norm in zip(turned, normed, strict=True):  # what it is of stays there
            parent.value = norm.args[0]  # type: ignore[union-attr]
        call.args, call.func = [turn, *(norm.func for norm in normed), *call.args], run

    # ---- losses

    def _head(
        self, body: list[ast.stmt], i: int, loss: tuple[ast.Call, str], head: ast.expr, hidden: ast.expr
    ) -> None:
        call, labels = loss
        module = ast.Name(self.self_name, ast.Load())
        run: Any = self._site(LOSS, Loss(self.forms.loss), maker="head")
        form = self.found.sites[-1][1]
        name = f"_samebits_hidden_{len(self.found.sites)}"
        (target,) = body[i].targets  # type: ignore[attr-defined]
        pair = ast.Tuple([target, ast.Name(name, ast.Store())], ast.Store())
        given = [module, head, hidden, ast.Name(labels, ast.Load())]
        body[i] = ast.copy_location(ast.Assign([pair], ast.Call(run, given, [])), body[i])
        fused: Any = self._site(LOSS, form, maker="loss")
        of_logits: Any = self._site(LOSS_OF_LOGITS, LossOfLogits(self.forms.of_logits))  # if there are some
        given = [of_logits, call.func, ast.Name(name, ast.Load()), copy.deepcopy(head)]
        call.args, call.func = [*given, *call.args], fused

    def find_losses(self, tree: ast.FunctionDef) -> None:
        """Keep the calls of the loss function, by the names of logits."""
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr="loss_function")) if (
                    owner == self.self_name
                ):
                    given = dict(zip(("logits", "labels"), node.args, strict=False))
                    given |= {k.arg: k.value for k in node.keywords if k.arg in ("logits", "labels")}
                    match given:
                        case {"logits": ast.Name(id=logits), "labels": ast.Name(id=labels)}:
                            self.losses[logits] = node, labels

    # ---- gates

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Mult):
            return node
        for act, up, gate_first in ((node.left, node.right, True), (node.right, node.left, False)):
            before = self.activated.get(act.id) if isinstance(act, ast.Name) else None
            match before.value if before is not None else act:
                case ast.Call(func=function, args=[gate], keywords=[]):
                    called = self._value(function)
                    if not callable(called) or isinstance(called, type):
                        continue
                    form, _ = self.forms.gate(called)
                    run = self._site(GATE, form)
                    if run is None:
                        continue
                    if before is not None:  # the name is of the gate itself then
                        before.value, gate = gate, act
                    given = [ast.keyword("gate", gate), ast.keyword("up", up)]
                    call = ast.Call(run, [function], given if gate_first else given[::-1])
                    return ast.copy_location(call, node)
        return node

    def find_activated(self, tree: ast.FunctionDef) -> None:
        """Keep assignments to names that are assigned once and used once."""
        names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
        count = Counter((n.id, type(n.ctx)) for n in names)
        for node in ast.walk(tree):
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call()):
                    if count[name, ast.Store] == count[name, ast.Load] == 1:
                        self.activated[name] = node

    # ---- rotary positions, and losses that have their logits

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        match node.func:
            case ast.Name(id=name):
                function = self._value(node.func)
                if isinstance(function, FunctionType) and {"cos", "sin"} <= {*_parameters(function)}:
                    form, why = self.forms.rotary(function)
                    run = self._site(ROTARY, form, f"{name}: {why}")
                    if run is not None:
                        node.func = ast.copy_location(run, node.func)
            case ast.Attribute(attr="loss_function") if knows(self._value(node.func)):
                run = self._site(LOSS_OF_LOGITS, LossOfLogits(self.forms.of_logits))
                if run is not None:
                    node.args, node.func = [node.func, *node.args], ast.copy_location(run, node.func)
        return node


def _turned_before(body: list[ast.stmt], name: str) -> ast.Attribute | None:
    """``self.norm(x).transpose`` in the last statement ``name = self.norm(x).transpose(1, 2)``.

    None: there is none, or the name is used since.
    """
    for statement in reversed(body):
        match statement:
            case ast.Assign(
                targets=[ast.Name(id=target)],
                value=ast.Call(
                    func=ast.Attribute(
                        value=ast.Call(func=ast.Attribute(), args=[_], keywords=[]), attr="transpose"
                    ) as turned,
                    args=[ast.Constant(value=1), ast.Constant(value=2)],
                    keywords=[],
                ),
            ) if target == name:
                return turned
        if any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(statement)):
            return None
    return None


class _NormOf(ast.NodeTransformer):
    """Finds ``self.norm(x)``, with x of these names, and puts a name there."""

    def __init__(self, rewriter: _Rewriter, names: set[str], normed: str) -> None:
        self.rewriter, self.names, self.normed = rewriter, names, normed
        self.norm: ast.expr | None = None
        self.module: Any = None

    def visit_Call(self, node: ast.Call) -> ast.AST:
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=owner)) as norm, args=[ast.Name(id=name)], keywords=[]
            ) if self.norm is None and owner == self.rewriter.self_name and name in self.names:
                module = self.rewriter._value(norm)
                if isinstance(module, nn.Module) and self.rewriter.forms.norm(module)[0] is not None:
                    self.norm, self.module = norm, module
                    return ast.copy_location(ast.Name(self.normed, ast.Load()), node)
        return self.generic_visit(node)

    def _conditional(self, node: ast.AST) -> ast.AST:
        return node  # what may not run is left

    visit_Lambda = visit_IfExp = visit_BoolOp = _conditional  # noqa: N815
    visit_ListComp = visit_GeneratorExp = visit_SetComp = visit_DictComp = _conditional  # noqa: N815


def _parameters(function: FunctionType) -> tuple[str, ...]:
    code = inspect.unwrap(function).__code__
    return tuple(code.co_varnames[: code.co_argcount])
