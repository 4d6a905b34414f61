"""Delta rules, linear attention and state spaces beside flash-linear-attention and mamba-ssm.

python -m benchmarks recurrent [--quick] [--only LAYER] [--limit SECONDS] [--commit COMMIT] [--out FILE]

Forward, forward with backward, and decoding -> benchmarks/results/<gpu>/recurrent.json, which is written
after each layer. Other libraries take part if they are installed; what of them compiles for longer than the
limit is refused. Decoding is compared with a prefill, bit for bit, before it is timed. All who take part in a
case are timed in the same way, which it names: in CUDA graphs, or where one of them cannot be captured by
launches from Python.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

import samebits
from benchmarks.record import arguments, environment, lines_of_progress, save
from samebits.backends import UnavailableError
from samebits.backends.cuda.matmul import family
from samebits.testing import assert_same_bits
from samebits.tools.bench.clock import Race, median, timed

BF16, DEVICE = torch.bfloat16, "cuda"
HEADS, SIZE, STATES, TAPS, CHANNELS = 32, 128, 128, 4, 8192
PREFILLS, DECODED = ((1, 4096), (8, 512)), (1, 32, 256)
PEERS = ("flash-linear-attention", "fla-core", "mamba-ssm", "causal-conv1d", "triton")
Run = Callable[..., Any]
Operands = dict[str, Tensor]


def _peer(module: str, name: str) -> Run | None:
    """A function of another library, if that is installed. Its first call imports it, and says what fails."""
    if find_spec(module.partition(".")[0]) is None:
        return None

    @cache
    def found() -> Run:
        function: Run = getattr(import_module(module), name)
        return function

    return lambda *args, **kwargs: found()(*args, **kwargs)


def _ruled(batch: int, tokens: int) -> Operands:
    q, k, v = (torch.randn(batch, tokens, HEADS, SIZE, device=DEVICE, dtype=BF16) for _ in range(3))
    g = F.logsigmoid(torch.randn(batch, tokens, HEADS, device=DEVICE)) / 8
    beta = torch.rand(batch, tokens, HEADS, device=DEVICE)
    return {"q": F.normalize(q, dim=-1), "k": F.normalize(k, dim=-1), "v": v, "g": g, "beta": beta}


def _by_channel(batch: int, tokens: int) -> Operands:
    g = F.logsigmoid(torch.randn(batch, tokens, HEADS, SIZE, device=DEVICE)) / 8
    return _ruled(batch, tokens) | {"g": g}


def _plain(batch: int, tokens: int) -> Operands:
    found = _ruled(batch, tokens)
    del found["beta"]
    return found


def _spaces(batch: int, tokens: int) -> Operands:
    b, c = (torch.randn(batch, tokens, 1, STATES, device=DEVICE, dtype=BF16) for _ in range(2))
    x = torch.randn(batch, tokens, HEADS, SIZE, device=DEVICE, dtype=BF16)
    dt, A = torch.rand(batch, tokens, HEADS, device=DEVICE) / 10, -torch.rand(HEADS, device=DEVICE)
    return {"x": x, "dt": dt, "A": A, "B": b, "C": c}


def _channels(batch: int, tokens: int) -> Operands:
    u, delta = (torch.randn(batch, CHANNELS, tokens, device=DEVICE, dtype=BF16) for _ in range(2))
    b, c = (torch.randn(batch, 16, tokens, device=DEVICE, dtype=BF16) for _ in range(2))
    A = -torch.rand(CHANNELS, 16, device=DEVICE)
    return {"u": u, "delta": F.softplus(delta - 3), "A": A, "B": b, "C": c}


def _taps(batch: int, tokens: int) -> Operands:
    x = torch.randn(batch, tokens, CHANNELS, device=DEVICE, dtype=BF16).transpose(1, 2)
    return {"x": x, "weight": torch.randn(CHANNELS, TAPS, device=DEVICE, dtype=BF16)}


def _space(state: Any, x: dict[str, Any]) -> Any:
    return samebits.ssd(**x, initial_states=state, return_final_states=True)


def _last(x: Operands) -> Operands:
    """The last token, where tokens come last."""
    return {name: t[..., -1] if t.ndim == 3 else t for name, t in x.items()}


def _scan(initial_state: Tensor | None = None, output_final_state: bool = True, **x: Any) -> Any:
    if initial_state is None:
        return samebits.selective_scan(**x, return_last_state=True)
    last: list[Any] = [*_last(x).values()]
    return samebits.selective_state_update(initial_state, *last)[..., None], initial_state


def _convolve(initial_state: Tensor | None = None, output_final_state: bool = True, **x: Any) -> Any:
    if initial_state is None:
        return samebits.causal_conv1d(**x, return_final_states=True, activation="silu")
    y = samebits.causal_conv1d_update(_last(x)["x"], initial_state, x["weight"], activation="silu")
    return y[..., None], initial_state


def _taps_of_tokens(batch: int, tokens: int) -> Operands:
    x = torch.randn(batch, CHANNELS, tokens, device=DEVICE, dtype=BF16)
    return {"x": x, "weight": torch.randn(CHANNELS, TAPS, device=DEVICE, dtype=BF16)}


def _convolve_tokens(convolve: Run, x: Operands) -> Tensor:
    """As fla has it, with channels last."""
    y: Tensor = convolve(x["x"].mT, weight=x["weight"], activation="silu")[0]
    return y.mT


def _of_channels(x: Operands) -> tuple[Tensor, ...]:
    """A step's operands as mamba-ssm takes them: D and the bias of steps, too."""
    of_head = HEADS, SIZE
    none = torch.zeros(HEADS, 1, device=DEVICE).expand(of_head)
    dt, A = x["dt"][:, 0, :, None].expand(-1, *of_head), x["A"][:, None, None].expand(*of_head, STATES)
    return x["x"][:, 0], dt, A, x["B"][:, 0], x["C"][:, 0], none, None, none  # type: ignore[return-value]


def _of_scan(x: Operands) -> tuple[Tensor, ...]:
    """The same of a selective scan."""
    none = torch.zeros(CHANNELS, device=DEVICE)
    return (*_last(x).values(), none, None, none)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Layer:
    """A recurrent layer.

    Attributes:
        operands: makes them for a batch of so many tokens.
        ours: gives results alone.
        theirs: the library, its function's module and name, and how that is called.
        decodes: whether steps go on with a :class:`samebits.RecurrentState`.
        their_step: the same for a step of decoding, with a state.
        state: the shape of that for one sequence, and its dtype.
        axis: of tokens.
    """

    operands: Callable[[int, int], Operands]
    ours: Run
    theirs: tuple[str, str, str, Callable[[Run, Operands], Any]]
    decodes: Run | None = None
    their_step: tuple[str, str, str, Callable[[Run, Operands, Tensor], Any]] | None = None
    state: tuple[tuple[int, ...], torch.dtype] = ((HEADS, SIZE, SIZE), torch.float32)
    axis: int = 1


LAYERS = {
    "gated_delta_rule": Layer(
        _ruled,
        lambda **x: samebits.gated_delta_rule(**x)[0],
        ("fla", "fla.ops.gated_delta_rule", "chunk_gated_delta_rule", lambda f, x: f(**x)[0]),
        samebits.gated_delta_rule,
        (
            *("fla", "fla.ops.gated_delta_rule", "fused_recurrent_gated_delta_rule"),
            lambda f, x, state: f(**x, initial_state=state, output_final_state=True)[0],
        ),
    ),
    "lightning_attention": Layer(
        _plain,
        lambda **x: samebits.lightning_attention(**x)[0],
        ("fla", "fla.ops.simple_gla", "chunk_simple_gla", lambda f, x: f(**x)[0]),
        samebits.lightning_attention,
        (
            *("fla", "fla.ops.simple_gla", "fused_recurrent_simple_gla"),
            lambda f, x, state: f(**x, initial_state=state, output_final_state=True)[0],
        ),
    ),
    "ssd": Layer(
        _spaces,
        samebits.ssd,
        (
            *("mamba-ssm", "mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined"),
            lambda f, x: f(*x.values(), 256),
        ),
        lambda initial_state=None, output_final_state=False, **x: _space(initial_state, x),
        (
            *("mamba-ssm", "mamba_ssm.ops.triton.selective_state_update", "selective_state_update"),
            lambda f, x, state: f(state, *_of_channels(x)),
        ),
    ),
    "selective_scan": Layer(
        _channels,
        samebits.selective_scan,
        (
            *("mamba-ssm", "mamba_ssm.ops.selective_scan_interface", "selective_scan_fn"),
            lambda f, x: f(*x.values()),
        ),
        _scan,
        (
            *("mamba-ssm", "mamba_ssm.ops.triton.selective_state_update", "selective_state_update"),
            lambda f, x, state: f(state, *_of_scan(x)),
        ),
        ((CHANNELS, 16), torch.float32),
        2,
    ),
    "causal_conv1d": Layer(
        _taps,
        lambda x, weight: samebits.causal_conv1d(x, weight, activation="silu"),
        ("fla", "fla.modules.causal_conv1d", "causal_conv1d", _convolve_tokens),
        _convolve,
        (
            *("fla", "fla.modules.causal_conv1d", "causal_conv1d_update"),
            lambda f, x, state: f(x["x"][..., -1], state, weight=x["weight"], activation="silu"),
        ),
        ((CHANNELS, TAPS), BF16),
        2,
    ),
    "causal_conv1d, tokens side by side": Layer(
        _taps_of_tokens,
        lambda x, weight: samebits.causal_conv1d(x, weight, activation="silu"),
        (
            *("causal-conv1d", "causal_conv1d", "causal_conv1d_fn"),
            lambda f, x: f(x["x"], x["weight"], activation="silu"),
        ),
        _convolve,
        (
            *("causal-conv1d", "causal_conv1d", "causal_conv1d_update"),
            lambda f, x, state: f(x["x"][..., -1], state, x["weight"], activation="silu"),
        ),
        ((CHANNELS, TAPS - 1), BF16),
        2,
    ),
    "kda": Layer(  # last: the other library tunes for minutes
        _by_channel,
        lambda **x: samebits.kda(**x)[0],
        ("fla", "fla.ops.kda", "chunk_kda", lambda f, x: f(**x)[0]),
        samebits.kda,
        (
            *("fla", "fla.ops.kda", "fused_recurrent_kda"),
            lambda f, x, state: f(**x, initial_state=state, output_final_state=True)[0],
        ),
    ),
}


def _both(run: Callable[[Operands], Tensor], x: Operands) -> Callable[[], Any]:
    """`run`, and the gradients of all operands."""
    leaves = {name: t.detach().requires_grad_() for name, t in x.items()}
    grad = torch.randn_like(run(x))
    return lambda: torch.autograd.grad(run(leaves), [*leaves.values()], grad)


def _in_turns(runs: dict[str, Callable[[], Any]], calls: int, rounds: int) -> dict[str, float]:
    """Median microseconds of a call, launches from Python included."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name in [*runs] if turn % 2 else [*reversed(runs)]:
            run = runs[name]
            us = timed(lambda run=run: [run() for _ in range(calls)]) / calls  # type: ignore[misc]
            if turn:
                times[name].append(us)
    return {name: median(t) for name, t in times.items()}


def _times(runs: dict[str, Callable[[], Any]], calls: int, rounds: int) -> dict[str, Any]:
    """Median microseconds of a call in CUDA graphs; with what cannot be captured, from Python for all."""
    race = Race(calls)
    try:
        for name, run in runs.items():
            race.add(name, run, [()])
        return {"by": "graphs", "us": race.run(rounds)}
    except RuntimeError:
        torch.cuda.synchronize()
        return {"by": "launches", "us": _in_turns(runs, calls, rounds)}


@contextmanager
def _limited(seconds: int) -> Iterator[None]:
    """TimeoutError after so long: some libraries tune for minutes."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"compiled for {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _taking_part(
    contestants: dict[str, Callable[[], Callable[[], Any]]], limit: int, case: dict[str, Any]
) -> dict[str, Callable[[], Any]]:
    """What can be called. What a library refuses is noted in `case`."""
    runs = {}
    for who, make in contestants.items():
        try:
            with _limited(limit):
                run = make()
                run()
                torch.cuda.synchronize()
            runs[who] = run
        except UnavailableError:
            raise
        except Exception as error:
            case.setdefault("refused", {})[who] = f"{type(error).__name__}: {error}"[:200]
    return runs


def _contestants(name: str, x: Operands) -> dict[str, Callable[[Operands], Tensor]]:
    layer = LAYERS[name]
    found: dict[str, Callable[[Operands], Tensor]] = {"samebits": lambda x: layer.ours(**x)}
    library, module, function, how = layer.theirs
    if (peer := _peer(module, function)) is not None:
        found[library] = lambda x: how(peer, x)
    return found


def prefills(name: str, limit: int) -> Iterator[dict[str, Any]]:
    """Forward, and forward with backward."""
    for batch, tokens in PREFILLS:
        x = LAYERS[name].operands(batch, tokens)
        for what in ("forward", "both"):
            case: dict[str, Any] = {"layer": name, "what": what, "batch": batch, "tokens": tokens}
            calls: dict[str, Callable[[], Callable[[], Any]]] = {}
            for who, run in _contestants(name, x).items():
                forward = partial(torch.no_grad()(run), x)
                calls[who] = partial(_both, run, x) if what == "both" else lambda forward=forward: forward  # type: ignore[misc]
            runs = _taking_part(calls, limit, case)
            yield case | (_times(runs, 5, 7) if runs else {"us": {}})


def _parts(name: str, x: Operands, start: int, stop: int) -> Operands:
    axis = LAYERS[name].axis
    return {
        key: t.narrow(axis, start, stop - start).contiguous() if t.ndim > axis else t for key, t in x.items()
    }


def _check(name: str) -> None:
    """Raise AssertionError unless tokens one by one have the bits of a prefill."""
    decodes = LAYERS[name].decodes
    assert decodes is not None
    x = LAYERS[name].operands(2, 70)
    whole, _ = decodes(**x)
    found, state = decodes(**_parts(name, x, 0, 60), output_final_state=True)
    steps = [found]
    for t in range(60, 70):
        found, state = decodes(**_parts(name, x, t, t + 1), initial_state=state, output_final_state=True)
        steps.append(found)
    assert_same_bits(torch.cat(steps, LAYERS[name].axis), whole, name)


@torch.no_grad()
def decoding(name: str, limit: int) -> Iterator[dict[str, Any]]:
    """A step of each sequence: in the mean over a chunk's rows, for it is closed once in 64 tokens."""
    layer = LAYERS[name]
    if layer.decodes is None or layer.their_step is None:
        return
    decodes, (library, module, function, how) = layer.decodes, layer.their_step
    _check(name)
    for batch in DECODED:
        case: dict[str, Any] = {"layer": name, "what": "decode", "batch": batch, "tokens": 1}
        x = layer.operands(batch, 65)
        _, state = decodes(**_parts(name, x, 0, 64), output_final_state=True)
        last = _parts(name, x, 64, 65)
        ours = partial(decodes, **last, initial_state=state, output_final_state=True)
        calls: dict[str, Callable[[], Callable[[], Any]]] = {"samebits": lambda ours=ours: ours}  # type: ignore[misc]
        if (peer := _peer(module, function)) is not None:
            shape, dtype = layer.state
            theirs = partial(how, peer, last, torch.zeros(batch, *shape, device=DEVICE, dtype=dtype))
            calls[library] = lambda theirs=theirs: theirs  # type: ignore[misc]
        yield case | _times(_taking_part(calls, limit, case), 64, 7)


def show(data: dict[str, Any]) -> Table:
    table = Table("layer", "", "batch x tokens", "samebits, us", "others, us", "of theirs")
    for c in data["cases"]:
        us = c["us"]
        others = {who: t for who, t in us.items() if who != "samebits"}
        ours = f"{us['samebits']:,.1f}" if "samebits" in us else "refused"
        theirs = ", ".join(f"{who} {t:,.1f}" for who, t in others.items())
        ratio = f"{us['samebits'] / min(others.values()):.2f}" if others and "samebits" in us else ""
        table.add_row(c["layer"], c["what"], f"{c['batch']} x {c['tokens']:,}", ours, theirs, ratio)
    return table


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--quick", action="store_true", help="the delta rule and Mamba 2 alone")
    parser.add_argument("--only", action="append", choices=LAYERS, help="this layer; may be given again")
    parser.add_argument(
        "--limit", type=int, default=60, help="seconds for what a library compiles in one case"
    )
    options = parser.parse_args()
    names = options.only or (["gated_delta_rule", "ssd"] if options.quick else [*LAYERS])
    console = Console(width=120)
    progress = lines_of_progress(console)
    torch.manual_seed(0)
    record = environment(options.commit) | {"digest": samebits.TENSOR_CORE.on(family(0)).digest()}
    for package in PEERS:
        try:
            record["versions"][package] = version(package)
        except PackageNotFoundError:
            continue
    data: dict[str, Any] = {"environment": record, "cases": [], "red": []}
    for i, name in enumerate(names):
        for what in (prefills, decoding):
            progress(i / len(names), name)
            try:
                data["cases"].extend(what(name, options.limit))
            except UnavailableError as error:
                console.print(f"{name}: {error}", style="dim", highlight=False)
            except AssertionError as error:
                data["red"].append(f"{name}: {error}")
        save(options.out, "recurrent.json", data)
    console.print(show(data))
    for case in data["red"]:
        console.print(f"RED {case}", style="red", highlight=False)
    sys.exit(bool(data["red"]))
