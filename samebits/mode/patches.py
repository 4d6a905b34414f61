"""What the mode needs of PyTorch's internals, and changes in them. All of it stands here.

Each :class:`Patch` is one change, with its undo and a trial. As a mode is first switched on, :func:`install`
makes all changes and tries them out, in threads that have no modes of the user's: some milliseconds. If
PyTorch does not work as expected, an error says so and nothing stays changed. (The keys of its dispatcher are
in :mod:`samebits.backends.modes`, since operators ask for one.)

Autograd's engine is tried in the first backward after that: running it starts threads, after which a process
should not be forked.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd import Variable, graph
from torch.backends import mha
from torch.utils.checkpoint import (
    CheckpointFunction,
    _checkpoint_hook,
    _CheckpointFrame,
)

from samebits.backends.modes import CONTEXT, NAMES, RECORDED, TESTED, include
from samebits.remedies import see

__all__ = [
    "AUTOGRAD_CACHE",
    "ask_about",
    "asks",
    "called_by_engine",
    "changed",
    "expect",
    "install",
    "install_when_loaded",
    "names_in",
    "place",
    "replace",
    "run_eagerly",
    "stance",
    "when_loaded",
]

Run = Callable[..., Any]
Undo = Callable[[], object]


class ChangedError(RuntimeError):
    """Internals of PyTorch or `transformers` are not what samebits knows. The message says which."""


class _Asks:
    """What the changes ask, which other modules answer.

    Attributes:
        in_mode: whether this thread is in a mode.
        again: the function that activation checkpointing is to run again in a backward, for the given one.
        sums_outside: whether a backward that begins sums gradients by rules, though it is in no mode.
    """

    in_mode: Callable[[], bool]
    again: Callable[[Run], Run]
    sums_outside: Callable[[], bool]


asks = _Asks()


TESTED_WITH = {"transformers": "5.17.0 and 5.23.0"}


class _Trial(threading.local):
    """The trial that runs in this thread.

    Attributes:
        seen: what the changed parts have noted. None: there is no trial.
        of_engine: the engine is to run.
    """

    seen: list[Any] | None = None
    of_engine = False


_trial = _Trial()


def expect(right: bool, what: str) -> None:
    if not right:
        raise ChangedError(what)


# ---- Keys of the dispatcher ----


def _add_keys() -> Undo:
    """All operators fall through the keys, but those that get a kernel there."""
    library, higher = torch.library.Library("_", "IMPL"), torch._ops._higher_order_ops
    keys = torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS
    stops = [(op, key) for op in higher.values() for key in NAMES if op.non_fallthrough_keys.has(key)]
    through = [(op, key) for op, key in stops if key not in op.py_kernels]
    for key in NAMES:
        library.fallback(torch.library.fallthrough_kernel, NAMES[key])
        keys.append(key)
    for op, key in through:
        op.fallthrough(key)

    def undo() -> None:
        library._destroy()
        for key in NAMES:
            keys.remove(key)
        for op, key in through:
            if key not in op.py_kernels:
                op.non_fallthrough_keys = op.non_fallthrough_keys.add(key)

    return undo


@contextmanager
def _kernel(op: Any, key: Any, note: Callable[[], Any], seen: list[Any]) -> Iterator[None]:
    """A kernel of this operator at a key, in a trial."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        seen.append(note())
        include(key, False)
        try:
            return op(*args, **kwargs)
        finally:
            include(key, True)

    library = torch.library.Library(op.namespace, "IMPL")
    try:
        library.impl(op, kernel, NAMES[key])
        yield
    finally:
        library._destroy()


def _try_keys() -> None:
    x = torch.ones(2, 3, requires_grad=True, device="cpu")
    for key in (CONTEXT, RECORDED):
        seen: list[Any] = []
        with _kernel(torch.ops.aten.relu.default, key, lambda: None, seen):
            x.relu()
            expect(not seen, f"{NAMES[key]}: a kernel runs in threads that have not included the key")
            include(key, True)
            try:
                y = x.neg().relu()
            finally:
                include(key, False)
        expect(len(seen) == 1, f"{NAMES[key]}: a kernel there is not called")
        expect(y.grad_fn is not None, f"{NAMES[key]}: the key is below autograd")
    for higher in torch._ops._higher_order_ops.values():
        stops = higher.non_fallthrough_keys.has(CONTEXT) and CONTEXT not in higher.py_kernels
        expect(not stops, "HigherOrderOperator: it does not fall through")


def _nothing() -> Undo:
    """PyTorch stays as it is."""
    return lambda: None


def _try_kernels() -> None:
    """A kernel at a backend's key takes the place of PyTorch's, and calls it."""
    op, library = torch.ops.aten.nextafter.default, torch.library.Library("aten", "IMPL")
    seen: list[Any] = []
    own = torch.library.get_kernel(op, "CPU").call_boxed

    def kernel(keys: Any, *args: Any) -> Any:
        seen.append(keys)
        return own(keys, *args)

    one, two = torch.tensor([1.0, 2.0], device="cpu").unbind()
    want = op(one, two)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
            library.impl(op, kernel, "CPU", with_keyset=True)
        got = op(one, two)
    finally:
        library._destroy()
    expect(len(seen) == 1 and got.equal(want), "torch.library: a kernel at a backend's key is not called")
    op(one, two)
    expect(len(seen) == 1, "torch.library: a kernel stays when its library is destroyed")


# ---- Autograd's engine, and its nodes ----


class _Engine(type(Variable._execution_engine)):  # type: ignore[misc]
    """Autograd's engine, which includes a key in backwards whose gradients are summed by rules."""

    tried = False

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        if _trial.seen is not None and not _trial.of_engine:
            _trial.seen.append(sys._getframe(1).f_code)
            return (None,)
        untried = not (self.tried or _trial.of_engine)
        if untried and (asks.in_mode() or asks.sums_outside()):
            _alone("autograd's engine", _try_engine)
            _Engine.tried = True
        tries = _trial.of_engine and not asks.in_mode()  # where that of the process is on, it has kernels
        if not (tries or asks.sums_outside()):
            return super().run_backward(*args, **kwargs)
        include(RECORDED, True)
        try:
            return super().run_backward(*args, **kwargs)
        finally:
            include(RECORDED, False)


_CALLERS = (graph._engine_run_backward.__code__, _Engine.run_backward.__code__)


def called_by_engine(above: int) -> bool:
    """Whether autograd's engine has called the kernel that asks, and not Python code in a backward.

    The engine works below the call that started it, or in a thread of its own, without Python's frames. The
    kernel's caller is so many frames `above` this.
    """
    if torch._C._current_graph_task_id() == -1:
        return False
    try:
        found = sys._getframe(above).f_code in _CALLERS
    except ValueError:
        found = True
    if _trial.seen is not None:
        _trial.seen.append((found, place(torch._C._current_autograd_node())))
    return found


def _watch_backwards() -> Undo:
    before = Variable._execution_engine
    Variable._execution_engine = _Engine()
    return lambda: setattr(Variable, "_execution_engine", before)


def _try_backwards() -> None:
    """Python's ways to start a backward lead here."""
    x = torch.ones(2, requires_grad=True, device="cpu")
    seen: list[Any] = []
    _trial.seen = seen
    for start in (x.sum().backward, lambda: torch.autograd.grad(x.sum(), x, allow_unused=True)):
        start()
    expect(seen == [_CALLERS[0]] * 2, "Variable._execution_engine: backwards do not ask it")


def _try_engine() -> None:
    """The engine sums what was broadcast by an operator, and tells kernels for which node."""
    ones = torch.ones(2, 3, dtype=torch.float64, device="cpu")  # a dtype without rules
    x = torch.ones(3, dtype=ones.dtype, device="cpu", requires_grad=True)
    y = ones + x
    x.register_hook(lambda grad: [None, grad.long().sum(0)][0])  # sums of integers are never reported
    seen: list[Any] = []
    _trial.seen = seen
    _trial.of_engine = True
    torch.autograd.backward(y, ones)
    by_engine = [where for found, where in seen if found]
    expect(len(by_engine) > 0, "autograd's engine does not call kernels as expected")
    expect(len(by_engine) < len(seen), "kernels called by Python and by autograd's engine look alike")
    expect(set(by_engine) == {place(y.grad_fn)}, "torch._C._current_autograd_node: another node")


_HEAD = object.__basicsize__
_CPP, _PYTHON = torch._C._functions.UndefinedGrad, torch._C._FunctionBase
# A node's object in Python ends with a pointer to the node in C++, after which some versions have another.
_POINTER = _CPP.__basicsize__ - _HEAD
_NUMBER = {8: 16, 16: 24}.get(_POINTER, 0)  # where the node has its number, behind what counts references
_THREAD = _NUMBER + 24  # and the number of the thread that recorded it


def place(node: Any) -> tuple[int, int]:
    """The thread that recorded a node of autograd's graph, and the node's number there.

    PyTorch numbers threads as it meets them, and never again alike. Python is told only the other number.
    """
    python = isinstance(node, _PYTHON)
    word = ctypes.c_uint64.from_address
    at = word(id(node) + (_PYTHON.__basicsize__ - _POINTER if python else _HEAD)).value
    return word(at + _THREAD).value, word(at + _NUMBER).value


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * 2


def _try_places() -> None:
    expect(_NUMBER > 0, "torch._C._functions: nodes are laid out in another way")
    found: list[set[int]] = []

    def record() -> None:
        x = torch.ones(2, requires_grad=True, device="cpu")
        results = [f(x) for _ in range(3) for f in (torch.exp, _Doubled.apply, lambda x: x + 1)]
        nodes: list[Any] = [*(y.grad_fn for y in results), _CPP()]
        places = [place(node) for node in nodes]
        found.append({thread for thread, _ in places})
        numbers = [node._sequence_nr() for node in nodes if not isinstance(node, _CPP)]
        expect([n for _, n in places[:-1]] == numbers, "Node.sequence_nr: it lies elsewhere")

    for _ in range(2):
        _in_a_thread(record)
    expect(
        len(found[0]) == len(found[1]) == 1 and found[0] != found[1] and 0 not in found[0] | found[1],
        "Node.thread_id: it lies elsewhere",
    )


# ---- Activation checkpointing ----


def _again(run: Run) -> Run:
    if _trial.seen is None:
        return asks.again(run)
    seen = _trial.seen

    def noted(*args: Any) -> Any:
        seen.append(run)
        return run(*args)

    return noted


def _keep_contexts() -> Undo:
    """Let checkpoints run what runs again in the forward's context, as PyTorch does with autocast."""
    forward: Run = CheckpointFunction.forward
    init: Run = _CheckpointFrame.__init__

    @functools.wraps(forward)
    def reentrant(ctx: Any, run_function: Run, *args: Any) -> Any:
        results = forward(ctx, run_function, *args)
        ctx.run_function = _again(run_function)
        return results

    @functools.wraps(init)
    def frame(self: Any, recompute_fn: Run, *args: Any, **kwargs: Any) -> None:
        init(self, _again(recompute_fn), *args, **kwargs)

    def put(forward: Run, init: Run) -> None:
        CheckpointFunction.forward = staticmethod(forward)  # type: ignore[method-assign]
        _CheckpointFrame.__init__ = init  # type: ignore[method-assign]

    put(reentrant, frame)
    return lambda: put(forward, init)


def names_in(code: CodeType) -> set[str]:
    """What code asks for by name, and the functions in it."""
    inner = [c for c in code.co_consts if isinstance(c, CodeType)]
    return {*code.co_names}.union(*map(names_in, inner))


def _try_checkpoints() -> None:
    """The form that is not re-entrant is not run: PyTorch loads its compiler for it, which takes seconds."""
    seen: list[Any] = []
    _trial.seen = seen
    x = torch.ones(2, requires_grad=True, device="cpu")
    node: Any = CheckpointFunction.apply(torch.exp, False, x).grad_fn
    expect(not seen, "CheckpointFunction: the forward runs what is to run again")
    node.run_function(x)
    expect(seen == [torch.exp], "CheckpointFunction: what runs again is not asked for")
    frame: Any = _CheckpointFrame(torch.neg, False, None, None)
    frame.recompute_fn(x)
    expect(seen == [torch.exp, torch.neg], "_CheckpointFrame: what runs again is not asked for")
    functions = (inspect.unwrap(f) for f in vars(torch.utils.checkpoint).values() if inspect.isfunction(f))
    made = any("_CheckpointFrame" in names_in(f.__code__) for f in functions)
    run = "recompute_fn" in names_in(_checkpoint_hook.__init__.__code__)
    expect(made and run, "_CheckpointFrame: it is not used")


# ---- Settings ----


def _avoid_fast_paths() -> Undo:
    """Transformer layers of PyTorch have a path of their own, with kernels of its own: not in a mode."""
    own = mha.get_fastpath_enabled

    @functools.wraps(own)
    def get_fastpath_enabled() -> bool:
        if not torch.jit.is_scripting():  # type: ignore[attr-defined]
            return own() and not asks.in_mode()
        return True

    mha.get_fastpath_enabled = get_fastpath_enabled
    return lambda: setattr(mha, "get_fastpath_enabled", own)


def _try_fast_paths() -> None:
    for layer in (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention):
        asked = {*inspect.unwrap(layer.forward).__code__.co_names}
        expect("get_fastpath_enabled" in asked, f"{layer.__name__}.forward: it asks for no fast path")


class Held:
    """A setting that is off while anybody holds it, in any thread, and then what it was before."""

    def __init__(self, get: Callable[[], bool], put: Callable[[bool], None]) -> None:
        self._get, self._put = get, put
        self._lock = threading.Lock()
        self._holders = 0
        self._before = True

    def hold(self) -> None:
        with self._lock:
            if not self._holders:
                self._before = self._get()
                self._put(False)
            self._holders += 1

    def release(self) -> None:
        with self._lock:
            self._holders -= 1
            if not self._holders:
                self._put(self._before)


def _autograd_cache() -> bool:
    from torch._functorch import config  # not with `import torch`

    return config.enable_autograd_cache


def _set_autograd_cache(on: bool) -> None:
    from torch._functorch import config

    config.enable_autograd_cache = on


AUTOGRAD_CACHE = Held(_autograd_cache, _set_autograd_cache)
"""``torch.compile`` keeps graphs on the disk by the functions called, which a context does not change."""


def _try_autograd_cache() -> None:
    AUTOGRAD_CACHE.hold()
    try:
        expect(_autograd_cache() is False, "torch._functorch.config.enable_autograd_cache")
    finally:
        AUTOGRAD_CACHE.release()


def stance() -> str:
    """What ``torch.compile`` does with functions."""
    import torch._dynamo  # another thread may be loading it

    found: str = torch._dynamo.eval_frame._stance.stance
    return found


def ask_about(functions: Iterable[Callable[..., Any]]) -> None:
    """Let ``torch.compile`` ask modes about these functions, too, from now on."""
    from torch._dynamo.variables.torch import get_overridable_functions

    get_overridable_functions().update(functions)


def run_eagerly() -> Any:
    """Let compiled functions run eagerly. Returns a context to leave for what was before."""
    try:
        before = torch.compiler.set_stance("force_eager")
        expect(stance() == "force_eager", "torch.compiler.set_stance")
    except (AttributeError, ChangedError) as error:
        raise changed("torch.compiler.set_stance", error) from error
    return before


# ---- Modules that are loaded later ----


class _WhenLoaded(MetaPathFinder):
    """Finds modules as others do, and calls functions as soon as they are loaded.

    Attributes:
        calls: the functions, by the names of modules.
    """

    def __init__(self) -> None:
        self.calls: dict[str, list[Callable[[], object]]] = {}
        self._asked: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.calls or name in self._asked:
            return None
        self._asked.add(name)  # the other finders
        try:
            spec = find_spec(name)
        finally:
            self._asked.discard(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_call(module: ModuleType) -> None:
                load(module)
                for call in self.calls.get(name, ()):
                    call()

            spec.loader.exec_module = load_and_call  # type: ignore[method-assign]
        return spec


_finder = _WhenLoaded()


def when_loaded(name: str, call: Callable[[], object]) -> None:
    """Call a function once a module is loaded, however often this is asked for. Not now, if it is."""
    calls = _finder.calls.setdefault(name, [])
    if call not in calls:
        calls.append(call)
    _find_modules()  # the module may be loaded before the mode is switched on


def _find_modules() -> Undo:
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    return lambda: sys.meta_path.remove(_finder)


def _try_modules() -> None:
    name, seen = "colorsys", []  # a small one, which is not imported for this
    _finder.calls[name] = [lambda: seen.append(name)]
    try:
        spec = next(s for f in sys.meta_path if (s := f.find_spec(name, None)) is not None)
        assert spec.loader is not None
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    finally:
        del _finder.calls[name]
    expect(len(seen) > 0, "sys.meta_path: its finders are not asked")


# ---- All of them ----


class Patch(NamedTuple):
    """A change.

    Attributes:
        of: what is changed, or needed as it is.
        make: changes it, and returns what undoes that.
        try_out: raises an error unless it works.
    """

    of: str
    make: Callable[[], Undo]
    try_out: Callable[[], None]


PATCHES = (
    Patch("the dispatcher's keys", _add_keys, _try_keys),
    Patch("kernels of backends", _nothing, _try_kernels),
    Patch("autograd's engine", _watch_backwards, _try_backwards),
    Patch("the nodes of autograd's graph", _nothing, _try_places),
    Patch("activation checkpointing", _keep_contexts, _try_checkpoints),
    Patch("fast paths of transformer layers", _avoid_fast_paths, _try_fast_paths),
    Patch("the cache of torch.compile", _nothing, _try_autograd_cache),
    Patch("the import of modules", _find_modules, _try_modules),
)

_lock = threading.Lock()
_undos: list[Undo] = []
_others: dict[str, list[Undo] | ChangedError] = {}
"""Modules for which changes were made: their undos, or why they could not be made."""


def install() -> None:
    """Make all changes, once, and try them out.

    Raises:
        ChangedError: PyTorch does not work as expected. Nothing is changed then.
    """
    with _lock:
        if not _undos:
            _make(PATCHES, _undos)


def _make(patches: Sequence[Patch], undos: list[Undo], library: str = "PyTorch") -> None:
    """Make changes and try them out: all of them, or none."""
    try:
        for patch in patches:
            _alone(patch.of, lambda patch=patch: undos.append(patch.make()), library)  # type: ignore[misc]
            _alone(patch.of, patch.try_out, library)
    except BaseException:
        _undo(undos)
        raise


def _undo(undos: list[Undo]) -> None:
    while undos:
        undos.pop()()


def install_when_loaded(module: str, patches: Sequence[Patch]) -> None:
    """Make changes in a library beside PyTorch: now, or once this module of it is loaded.

    Raises:
        ChangedError: it does not work as expected. Nothing in it is changed then.
    """
    done = _others.get(module)
    if isinstance(done, ChangedError):
        raise done
    if done is not None:
        return
    if module not in sys.modules:
        when_loaded(module, _once_loaded(module, patches))
        return
    with _lock:
        if module in _others:
            return
        undos: list[Undo] = []
        try:
            _make(patches, undos, module.partition(".")[0])
            _others[module] = undos
        except ChangedError as error:
            _others[module] = error
            raise


@functools.cache
def _once_loaded(module: str, patches: Sequence[Patch]) -> Callable[[], None]:
    def loaded() -> None:
        try:
            install_when_loaded(module, patches)
        except ChangedError:
            if asks.in_mode():  # otherwise, when it is entered again
                raise

    return loaded


def uninstall() -> None:
    """Undo all changes."""
    for done in _others.values():
        if not isinstance(done, ChangedError):
            _undo(done)
    _others.clear()
    _undo(_undos)
    _Engine.tried = False


def replace(of: Any, name: str, value: Any) -> Undo:
    """Set an attribute. Returns what sets it back, or removes it where it was inherited."""
    if name not in vars(of):
        setattr(of, name, value)
        return lambda: delattr(of, name)
    before = vars(of)[name]
    setattr(of, name, value)
    return lambda: setattr(of, name, before)


def _alone(of: str, function: Callable[[], object], library: str = "PyTorch") -> None:
    """Run it in a thread of its own. Whatever it raises means that the library has changed.

    Not for another library: this thread may be loading it, and another would wait for that.
    """
    try:
        if library == "PyTorch":
            _in_a_thread(function)
        else:
            function()
    except Exception as error:
        raise changed(of, error, library) from error


def changed(of: str, error: Exception, library: str = "PyTorch") -> ChangedError:
    version, tested = torch.__version__, TESTED
    if library != "PyTorch":
        version, tested = sys.modules[library].__version__, TESTED_WITH[library]
    return ChangedError(
        f"samebits: {library} {version} differs from the versions that samebits was"
        f" tested with ({tested}) in what the mode relies on, {of}: {type(error).__name__}: {error}. Use"
        " one of them, or another release of samebits" + see("pytorch-has-changed")
    )


def _in_a_thread(function: Callable[[], object]) -> None:
    """It has no modes, keys or settings of the thread that asks."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="samebits trial")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
