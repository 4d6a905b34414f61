"""Whole steps of models in PyTorch and samebits: eager, compiled, fused, and with Liger's kernels.

python -m benchmarks steps [--only KIND ...] [--forms FORM ...] [--steps PART] [--layers N] [--merge]
                           [--commit COMMIT] [--out FILE]

It writes benchmarks/results/<gpu>/steps.json, anew after each step: training steps (forward and backward) of
a Llama, of a Qwen3 with activation checkpointing and of a model of experts, decoding with a static cache of
1,024 keys (as a CUDA graph and call by call), and the peak memory of each. `FORMS` has what takes part, and
`KINDS` in what. Liger does if it is installed. The loss is the model's own, and in some steps
``linear_logp``, beside PyTorch's own; ``--layers`` makes models of so many, and results say so. A row can be
measured alone: ``--merge`` puts it into results of the same commit and machine, in place of those of its
steps. Runs on several GPUs may do so at once::

    CUDA_VISIBLE_DEVICES=1 taskset -c 16-31 \\
        python -m benchmarks steps --only training --steps 'forward + backward, 8 x 512' --merge

PyTorch attends by ``sdpa``, samebits by ``sdpa`` in training and by its own implementation in decoding;
experts run PyTorch's grouped products, and samebits' own implementation. Each form has a process of its own,
since what the switch of the process registers stays. They compile side by side on all CPUs, and then take
turns at every step, as :mod:`benchmarks.turns` says. A turn runs the step twice and times the second.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import operator
import os
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

import samebits
import samebits.transformers
from benchmarks.models import BATCHES, BILLION
from benchmarks.record import arguments, environment, merged, results, write
from benchmarks.turns import processes
from samebits.ops.linear_logp import linear_logp
from samebits.tools.graphs import capture

EXPERTS: dict[str, Any] = {
    "hidden_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "vocab_size": 32768,
    "max_position_embeddings": 4096,
}
"""A Qwen3-MoE."""
CHECKPOINTED: dict[str, Any] = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
"""A Qwen3 of 4 billion parameters."""
TRAINED = {
    "forward + backward, 8 x 512": ("Llama 1B", "8 x 512"),
    "forward + backward, 1 x 4,096": ("Llama 1B", "1 x 4,096"),
    "Qwen3 4B, checkpointed, forward + backward, 4 x 2,048": ("Qwen3 4B", "4 x 2,048"),
    "experts, forward + backward, 8 x 512": ("experts", "8 x 512"),
}
"""Steps in README's first picture, with whatever number of layers they were measured."""
DECODED = (1, 32, 128)
KEYS = 1024
Step = Callable[[], Any]
Turn = tuple[Step, Step, Step]
"""What is done before a step, the step, and what is done after it."""


def stored_logits(model: Any, ids: torch.Tensor) -> None:
    """Forward and backward with the model's own loss, which stores the logits."""
    model(ids, labels=ids, use_cache=False).loss.backward()
    model.zero_grad(set_to_none=True)


def fused_logits(model: Any, ids: torch.Tensor) -> None:
    """The same loss by ``linear_logp``."""
    hidden = model.model(ids, use_cache=False).last_hidden_state[:, :-1]
    (-linear_logp(hidden, model.lm_head.weight, ids[:, 1:]).mean()).backward()
    model.zero_grad(set_to_none=True)


_LAYERS = " layers"


def layers_of(work: str) -> tuple[str, str]:
    """A step's name without the layers of ``--layers``, and their number, or nothing."""
    name, _, layers = work.removesuffix(_LAYERS).rpartition(", ")
    return (name, layers) if work.endswith(_LAYERS) else (work, "")


def trained(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The cases of README's first picture, by their labels in it."""
    found = {}
    for case in data["cases"]:
        name, layers = layers_of(case["work"])
        if name in TRAINED:
            model, size = TRAINED[name]
            found[f"{model}, {layers}\nlayers, {size}" if layers else f"{model}\n{size}"] = case
    return found


class Decoding:
    """A step of decoding, with the cache as it was after each one."""

    def __init__(self, model: Any, batch: int, attention: str) -> None:
        from transformers import StaticCache

        self._model, self._attention = model, attention
        self.prepare()
        self._cache: Any = StaticCache(config=model.config, max_cache_len=KEYS)
        prompt = tokens(model, batch, KEYS - 1)
        for part in prompt.split(128, 1):
            model.model(part, past_key_values=self._cache, use_cache=True)
        self._ids = prompt[:, :1].clone()
        self._at = torch.full((batch, 1), KEYS - 1, device="cuda")

    @torch.no_grad()
    def eager(self) -> torch.Tensor:
        out = self._model(self._ids, past_key_values=self._cache, position_ids=self._at, use_cache=True)
        logits: torch.Tensor = out.logits
        return logits

    def prepare(self) -> None:
        self._model.set_attn_implementation(self._attention)

    def forget(self) -> None:
        """Takes the last token out of the cache again."""
        for layer in self._cache.layers:
            layer.cumulative_length.fill_(KEYS - 1)

    def graph(self) -> Step:
        for _ in range(2):
            self.eager()
            self.forget()
        torch.cuda.synchronize()
        graph, _ = capture(self.eager)
        self.forget()
        return graph.replay


def as_it_is(model: Any) -> Any:
    return model


def compiled(model: Any) -> Any:
    return torch.compile(model, dynamic=False)  # one graph for each size, as for one batch


def fused(model: Any) -> Any:
    samebits.fuse(model)
    return model


def fused_and_compiled(model: Any) -> Any:
    return compiled(fused(model))


def fused_with_loss(model: Any) -> Any:
    samebits.fuse(model, loss=True)
    return model


def fused_with_loss_and_compiled(model: Any) -> Any:
    return compiled(fused_with_loss(model))


def with_liger(model: Any) -> Any:
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model)
    return model


class Form(NamedTuple):
    """PyTorch, or a form of the mode.

    Attributes:
        within: what a step runs in.
        decoding: a model's attention while it decodes.
        experts: how it computes experts.
        prepared: the model that is called, from one that is loaded.
    """

    within: Callable[[], AbstractContextManager[Any]]
    decoding: str
    experts: str
    prepared: Callable[[Any], Any] = as_it_is


def context() -> AbstractContextManager[Any]:
    return samebits.batch_invariant("error")


def process() -> AbstractContextManager[Any]:
    return samebits.set_batch_invariant_mode(True, "error")


FORMS = {
    "torch": Form(nullcontext, "sdpa", "grouped_mm"),
    "torch, compiled": Form(nullcontext, "sdpa", "grouped_mm", compiled),
    "liger": Form(nullcontext, "sdpa", "grouped_mm", with_liger),
    "context": Form(context, "samebits", "samebits"),
    "process": Form(process, "samebits", "samebits"),
    "compiled": Form(context, "samebits", "samebits", compiled),
    "fused": Form(context, "samebits", "samebits", fused),
    "fused, compiled": Form(context, "samebits", "samebits", fused_and_compiled),
    "fused with loss": Form(context, "samebits", "samebits", fused_with_loss),
    "fused with loss, compiled": Form(context, "samebits", "samebits", fused_with_loss_and_compiled),
}
COMPILED = tuple(name for name in FORMS if "compiled" in name)
Measured = dict[str, dict[str, float]]


def nothing() -> None:
    """Before a step that needs nothing, and after one that leaves nothing behind."""


class Taken(NamedTuple):
    """Milliseconds of a step, and the most bytes that it allocated."""

    ms: float
    peak: int


def once(turn: Turn, form: Form) -> Taken:
    """The second of two runs of a step. The first wakes up the host, the GPU and their caches.

    The step starts with an idle GPU and ends with one. The functions before and after it are not timed.
    """
    before, step, after = turn
    with form.within():
        for _ in range(2):
            before()
            held = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
            start = time.perf_counter()
            step()
            torch.cuda.synchronize()
            taken = Taken((time.perf_counter() - start) * 1e3, torch.cuda.max_memory_allocated() - held)
            after()
    return taken


def in_turns(forms: Mapping[str, Callable[[], Taken]], repeats: int) -> Measured:
    """Median times and peaks of a step in several forms, which take turns. The first turns do not count."""
    found: dict[str, list[Taken]] = {form: [] for form in forms}
    for turn in range(repeats + 1):
        for form, run in forms.items():
            taken = run()
            if turn:
                found[form].append(taken)
    return {form: summary(taken) for form, taken in found.items()}


def summary(taken: list[Taken]) -> dict[str, float]:
    ms, peaks = zip(*taken, strict=True)
    return {"ms": float(f"{statistics.median(ms):.4g}"), "mib": max(peaks) >> 20}


def tokens(model: Any, rows: int, n: int) -> torch.Tensor:
    """The same in every process."""
    torch.manual_seed(0)
    return torch.randint(model.config.vocab_size, (rows, n), device="cuda")


def on_gpu(kind: Callable[[Any], Any], config: Any, experts: str | None = None) -> Any:
    """A model in bf16 that attends by ``sdpa``, with the same weights in every process."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model: Any = kind(config)
    finally:
        torch.set_default_dtype(before)
    model.set_attn_implementation("sdpa")
    if experts is not None:
        model.set_experts_implementation(experts)
    return model


def of_layers(config: dict[str, Any], layers: int | None) -> dict[str, Any]:
    """A configuration with another number of layers, unless that is None."""
    return config if layers is None else config | {"num_hidden_layers": layers}


def a_billion(layers: int | None) -> Any:
    """The model of a billion parameters, which is a Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return on_gpu(LlamaForCausalLM, LlamaConfig(**of_layers(BILLION, layers)))


def training(form: str, layers: int | None) -> dict[str, Turn]:
    """The steps of training, by their names."""
    model = FORMS[form].prepared(a_billion(layers))
    found: dict[str, Turn] = {}
    for rows, n in BATCHES:
        name, ids = f"forward + backward, {rows} x {n:,}", tokens(model, rows, n)
        found[name] = nothing, partial(stored_logits, model, ids), nothing
        if form in EAGER:
            loss = stored_logits if form == "torch" else fused_logits
            found[f"{name}, linear_logp"] = nothing, partial(loss, model, ids), nothing
    return found


def training_checkpointed(form: str, layers: int | None) -> dict[str, Turn]:
    """A step of training that computes each layer again in the backward."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = on_gpu(Qwen3ForCausalLM, Qwen3Config(**of_layers(CHECKPOINTED, layers)))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model = FORMS[form].prepared(model)
    step = partial(stored_logits, model, tokens(model, 4, 2048))
    return {"Qwen3 4B, checkpointed, forward + backward, 4 x 2,048": (nothing, step, nothing)}


def training_experts(form: str, layers: int | None) -> dict[str, Turn]:
    """The steps of training a model of experts, by their names."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(**of_layers(EXPERTS, layers))
    model = on_gpu(Qwen3MoeForCausalLM, config, FORMS[form].experts)
    model = FORMS[form].prepared(model)
    return {
        f"experts, forward + backward, {rows} x {n:,}": (
            nothing,
            partial(stored_logits, model, tokens(model, rows, n)),
            nothing,
        )
        for rows, n in BATCHES
    }


@torch.no_grad()
def decoding(form: str, layers: int | None) -> dict[str, Turn]:
    """The steps of decoding, by their names."""
    model = a_billion(layers)
    found: dict[str, Turn] = {}
    for batch in DECODED:
        with FORMS[form].within():
            decode = Decoding(model, batch, FORMS[form].decoding)
            found[f"decode, eager, batch {batch}"] = nothing, decode.eager, decode.forget
            found[f"decode, CUDA graph, batch {batch}"] = nothing, decode.graph(), decode.forget
    return found


class Kind(NamedTuple):
    """Steps of one model: those of a form, how many turns of each are taken, and by whom."""

    steps: Callable[[str, int | None], dict[str, Turn]]
    repeats: int
    forms: tuple[str, ...]


EAGER = ("torch", "context", "process")
KINDS = {
    "training": Kind(training, 9, tuple(FORMS)),
    "checkpointed": Kind(
        training_checkpointed,
        5,
        ("torch", "torch, compiled", "context", "fused", "fused, compiled", "fused with loss, compiled"),
    ),
    "experts": Kind(training_experts, 9, (*EAGER, "fused", *COMPILED)),
    "decoding": Kind(decoding, 45, EAGER),
}


class SkippedError(RuntimeError):
    """A form cannot take a step."""


@contextmanager
def on(cpus: Collection[int]) -> Iterator[None]:
    """For compilation, to which :mod:`benchmarks.turns` would leave two."""
    some = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, some)


def serve(layers: int | None, cpus: Collection[int], form: str, turns: Connection) -> None:
    """Makes the steps of each kind that is asked for, and takes those that are, until None comes.

    Work that begins with "first: " is a step's first run, which may compile it. The answer to what fails is
    why.
    """
    with on(cpus):
        import_module("torch._inductor.config")  # it counts CPUs
    samebits.transformers.register()
    steps: dict[str, Turn] = {}
    while (work := turns.recv()) is not None:
        try:
            if work in KINDS:
                steps.clear()
                gc.collect()
                steps = KINDS[work].steps(form, layers)
                turns.send(list(steps))
            elif (first := work.removeprefix("first: ")) != work:
                start = time.perf_counter()
                with on(cpus):
                    once(steps[first], FORMS[form])
                turns.send(time.perf_counter() - start)
            else:
                turns.send(once(steps[work], FORMS[form]))
        except Exception as error:
            turns.send(SkippedError(f"{type(error).__name__}: {error}"))
        torch.cuda.empty_cache()  # for the others


def absent() -> dict[str, str]:
    """Forms that are not installed, and why."""
    return {} if find_spec("liger_kernel") else {"liger": "liger_kernel is not installed"}


def chosen(works: Sequence[str], part: str) -> list[str]:
    """The step of this name, or else all that have it in their names."""
    return [part] if part in works else [work for work in works if part in work]


def measure(
    console: Console, kinds: Sequence[str], some: Sequence[str], part: str, layers: int | None
) -> Iterator[dict[str, Any]]:
    """The steps of these kinds that `part` chooses, in some forms."""
    skipped = {form: why for form, why in absent().items() if form in some}
    for form, why in skipped.items():
        console.print(f"{form}: skipped, {why}")
    server = partial(serve, layers, os.sched_getaffinity(0))
    with processes(server, [form for form in some if form not in skipped]) as forms:

        def send(form: str, work: str) -> None:
            forms[form].send(work)

        def answer(form: str) -> Any:
            found = forms[form].recv()
            if isinstance(found, SkippedError):
                raise found
            return found

        def ask(form: str, work: str) -> Any:
            send(form, work)
            return answer(form)

        def all_of(taking: Sequence[str], work: str, at_once: Sequence[str]) -> dict[str, Any]:
            """The answers of forms, some of which work side by side. It says who gives none."""
            found = {}
            for form in at_once:
                send(form, work)
            for form in sorted(taking, key=lambda form: form not in at_once):
                try:
                    found[form] = answer(form) if form in at_once else ask(form, work)
                except SkippedError as why:
                    console.print(f"{form}: {work}: skipped, {why}", highlight=False)
            return {form: found[form] for form in taking if form in found}

        for kind in kinds:
            taking = [form for form in KINDS[kind].forms if form in forms]
            works = all_of(taking, kind, taking)
            for work in chosen([*dict.fromkeys(work for of in works.values() for work in of)], part):
                able = [form for form, of in works.items() if work in of]
                first = all_of(able, f"first: {work}", [form for form in able if form in COMPILED])
                said = ", ".join(f"{form} {first[form]:.0f} s" for form in first if form in COMPILED)
                console.print(f"{work}{f' (compiled: {said})' if said else ''}", style="dim", highlight=False)
                found = in_turns({f: partial(ask, f, work) for f in first}, KINDS[kind].repeats)
                for form in found.keys() & {*COMPILED}:
                    found[form]["first_s"] = round(first[form], 1)
                name = work if layers is None else f"{work}, {layers}{_LAYERS}"
                yield {"work": name} | found
        for of in forms.values():
            of.send(None)


OURS = tuple(form for form in FORMS if FORMS[form].within is not nullcontext)


def best(case: dict[str, Any]) -> dict[str, float]:
    """What samebits takes in its fastest form."""
    return min((case[form] for form in OURS if form in case), key=operator.itemgetter("ms"), default={})


def show(data: dict[str, Any]) -> Table:
    table = Table("step", *(f"{form}, ms" for form in FORMS), "least / torch, compiled", "memory")
    for case in data["cases"]:
        times = (f"{case[form]['ms']:.2f}" if form in case else "" for form in FORMS)
        ours, theirs = best(case), case.get("torch, compiled") or case.get("torch") or {}
        ratios = {of: f"{ours[of] / theirs[of]:.3f}" for of in ours.keys() & theirs.keys() if theirs[of]}
        table.add_row(case["work"], *times, ratios.get("ms", ""), ratios.get("mib", ""))
    return table


def save(path: Path, data: dict[str, Any], merge: bool) -> None:
    """Write results. Runs that merge into one file do so one after the other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        write(path, merged(path, data, "work") if merge else data)
    finally:
        os.close(folder)


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {number}")
    return number


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=KINDS, metavar="KIND", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--forms", nargs="+", choices=FORMS, metavar="FORM", help=f"of {', '.join(FORMS)}")
    parser.add_argument("--steps", default="", metavar="PART", help="this, or those with it in their names")
    parser.add_argument("--layers", type=positive, metavar="N", help="of each model, instead of its own")
    parser.add_argument("--merge", action="store_true", help="keep the other steps of the results")
    options = parser.parse_args()
    some = options.only or options.forms or options.steps or options.layers
    if some and options.out is None and not options.merge:
        parser.error(
            "expected --merge or --out with --only, --forms, --steps or --layers, since results have all"
        )
    console = Console(width=200)
    cases: list[dict[str, Any]] = []
    data = {
        "environment": environment(options.commit),
        "model": BILLION,
        "checkpointed": CHECKPOINTED,
        "experts": EXPERTS,
        "cases": cases,
    }
    kinds, forms = options.only or list(KINDS), options.forms or list(FORMS)
    for case in measure(console, kinds, forms, options.steps, options.layers):
        cases.append(case)
        save(results(options.out, "steps.json"), data, options.merge)
    console.print(show(data))
