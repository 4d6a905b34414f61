"""Models that mix attention and recurrent layers: steps, ``generate``, and KL of rollouts and trainers.

python -m benchmarks hybrids [--only PART ...] [--commit COMMIT] [--out FILE]

It writes benchmarks/results/<gpu>/hybrids.json, anew after each of `PARTS`: for `MODELS`, with random weights
in bf16, the KL between what ``generate`` samples token by token and a forward of training; training steps
(forward and backward); steps of decoding with a static cache, in CUDA graphs; and ``generate``. `FORMS` take
part: samebits in its context, as it is and fused, ``transformers`` with the kernels of other libraries
(flash-linear-attention, mamba-ssm, causal-conv1d), if they are installed, and ``transformers`` with its
PyTorch forms. Without causal-conv1d the others' convolutions are the Triton kernels of
flash-linear-attention, which results say. Layers of mamba-ssm that are fused in training want causal-conv1d's
CUDA code, so models are in evaluation mode, where all forms have the same layers.

Each form has a process of its own, since ``transformers`` chooses kernels when it is imported. They make
ready side by side, where PyTorch's forms come last, and take turns at every step.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from functools import cache, partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import samebits
import samebits.transformers
from benchmarks import steps
from benchmarks.record import arguments, environment, results, write
from benchmarks.steps import Form, SkippedError, Turn, context, fused, nothing
from benchmarks.turns import processes
from samebits.tools.graphs import capture

DEVICE = "cuda"
VOCABULARY = 16384
QWEN: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 0,
    "mlp_only_layers": [0, 1, 2, 3],
}
NEMOTRON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "layers_block_type": ["linear_attention", "mlp"] * 3 + ["full_attention", "mlp"],
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
}
GRANITE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 2048,
    "shared_intermediate_size": 5632,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "mamba_n_heads": 64,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 256,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
}
"""Widths and heads of the real ones, few layers, no experts."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-Next": ("Qwen3Next", QWEN),
    "Nemotron-H": ("NemotronH", NEMOTRON),
    "Granite 4": ("GraniteMoeHybrid", GRANITE),
}
TIMED = ("Qwen3-Next", "Nemotron-H")
TRAINED, DECODED = ((1, 4096), (8, 512)), (1, 32)
PROMPT, KEYS, TOKENS = 512, 1024, 64
"""Of decoding: tokens that are there, the static cache, and the steps of a turn, which are a chunk's."""
GENERATED = 32, 64, 64
"""Sequences, their prompts, and new tokens."""
PROMPTS, ANSWER = (5, 17, 64, 33, 90, 11, 70, 48), 64
"""Of the KL: the lengths of prompts, and new tokens."""
PEERS = ("flash-linear-attention", "fla-core", "mamba-ssm", "causal-conv1d", "triton")
LIBRARIES = ("fla", "mamba_ssm", "causal_conv1d")
FORMS = {
    "torch": Form(nullcontext, "sdpa", ""),
    "others": Form(nullcontext, "sdpa", ""),
    "context": Form(context, "samebits", ""),
    "fused": Form(context, "samebits", "", fused),
}
SAID = {
    "torch": "PyTorch's forms",
    "others": "others' kernels",
    "context": "samebits",
    "fused": "samebits, fused",
}
OURS = ("context", "fused")


def convolutions() -> str:
    """What the other libraries' short convolutions are."""
    if find_spec("causal_conv1d"):
        return "causal-conv1d"
    return "Triton kernels of flash-linear-attention; causal-conv1d is not installed"


def _choose(form: str) -> None:
    """Let ``transformers``, which is not imported yet, find the kernels of a form."""
    if form != "others":
        for name in LIBRARIES:
            sys.modules[name] = None  # type: ignore[assignment]  # so that it cannot be imported
    elif not find_spec("causal_conv1d"):
        theirs = import_module("fla.modules.causal_conv1d")
        module: Any = ModuleType("causal_conv1d")
        module.__spec__ = ModuleSpec(module.__name__, None)

        def causal_conv1d_fn(
            x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
        ) -> Any:
            return theirs.causal_conv1d(x.mT, weight, bias, activation=activation)[0].mT

        def causal_conv1d_update(
            x: Tensor,
            conv_state: Tensor,
            weight: Tensor,
            bias: Tensor | None = None,
            activation: str | None = None,
        ) -> Any:
            given = {"weight": weight, "bias": bias, "activation": activation}
            return theirs.causal_conv1d_update(x.mT, conv_state, **given)[0].mT

        module.causal_conv1d_fn, module.causal_conv1d_update = causal_conv1d_fn, causal_conv1d_update
        sys.modules["causal_conv1d"] = module


@cache
def model_of(name: str, form: str) -> Any:
    """A model in bf16, with the same weights in every process. Some of its tokens are likely."""
    import transformers

    kind, config = MODELS[name]
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(DEVICE):
            made = getattr(transformers, f"{kind}Config")(**config)
            model = getattr(transformers, f"{kind}ForCausalLM")(made)
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        model.lm_head.weight.mul_(4)
    model.generation_config.eos_token_id = None
    model.set_attn_implementation("sdpa")
    return FORMS[form].prepared(model.eval())


def tokens(rows: int, n: int) -> Tensor:
    """The same in every process."""
    generator = torch.Generator().manual_seed(n)
    return torch.randint(1, VOCABULARY, (rows, n), generator=generator).to(DEVICE)


# ---- KL between a rollout and a trainer


def compared(rollout: Tensor, trainer: Tensor, chosen: Tensor) -> dict[str, Any]:
    """Of log-probabilities ``[tokens, vocabulary]`` of the same tokens: which differ, and the exact KL."""
    theirs, ours = (t.gather(1, chosen[:, None])[:, 0] for t in (rollout, trainer))
    wide = rollout.double()
    kl = (wide.exp() * (wide - trainer.double())).sum(1)
    return {
        "tokens": len(chosen),
        "differ": int((theirs.view(torch.int32) != ours.view(torch.int32)).sum()),
        "largest": float((theirs - ours).abs().max()),
        "kl": float(kl.mean()),
    }


def rollout(name: str, form: str) -> dict[str, dict[str, Any]]:
    """Sampled with a cache in a batch padded on the left; then forwards of whole sequences."""
    model, within = model_of(name, form), FORMS[form].within
    longest, rows = max(PROMPTS), len(PROMPTS)
    ids = torch.zeros(rows, longest, dtype=torch.long, device=DEVICE)
    mask = torch.zeros_like(ids)
    for i, n in enumerate(PROMPTS):
        ids[i, longest - n :], mask[i, longest - n :] = tokens(1, n)[0], 1
    options: dict[str, Any] = {"do_sample": True, "top_k": 0, "pad_token_id": 0}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    model.set_attn_implementation(FORMS[form].decoding)
    with within():
        torch.manual_seed(1)
        model.generate(ids, attention_mask=mask, max_new_tokens=2, **options)  # kernels may be tuned in place
        out = model.generate(ids, attention_mask=mask, max_new_tokens=ANSWER, **options)
        sampled = torch.stack(out.logits, 1).float().log_softmax(-1).flatten(0, 1)
    chosen = out.sequences[:, longest:].flatten()
    whole = [row[longest - n :] for row, n in zip(out.sequences, PROMPTS, strict=True)]
    model.set_attn_implementation("sdpa")
    answers = [slice(n - 1, n - 1 + ANSWER) for n in PROMPTS]
    found = {}
    with within():
        padded = torch.nn.utils.rnn.pad_sequence(whole, batch_first=True)
        shown = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in whole], batch_first=True)
        with torch.no_grad():  # gradients of shared experts' weights depend on padding, and are refused
            logits = model(padded, attention_mask=shown, use_cache=False).logits
        found["padded on the right"] = torch.cat([row[at] for row, at in zip(logits, answers, strict=True)])
        if form in OURS:  # transformers' own layers do not restart
            at = torch.cat([torch.arange(len(row), device=DEVICE) for row in whole])[None]
            logits = model(torch.cat(whole)[None], position_ids=at, use_cache=False).logits.detach()[0]
            parts = logits.split([len(row) for row in whole])
            found["packed"] = torch.cat([row[at] for row, at in zip(parts, answers, strict=True)])
        found = {how: logits.float().log_softmax(-1) for how, logits in found.items()}
    return {how: compared(sampled, logp, chosen) for how, logp in found.items()}


# ---- steps


def training(form: str) -> dict[str, Turn]:
    """Forward and backward, with the model's own loss."""
    return {
        f"{name}, forward + backward, {rows} x {n:,}": (
            nothing,
            partial(steps.stored_logits, model_of(name, form), tokens(rows, n)),
            nothing,
        )
        for name in TIMED
        for rows, n in TRAINED
    }


class Decoding:
    """`TOKENS` steps of decoding, by a CUDA graph. The cache is then as before, but for recurrent states."""

    def __init__(self, name: str, form: str, batch: int) -> None:
        self._model, self._attention = model_of(name, form), FORMS[form].decoding
        self._prompt = tokens(batch, PROMPT)
        self._ids = self._prompt[:, :1].clone()
        self._at = torch.full((batch, 1), PROMPT, device=DEVICE)
        self._cache: Any = None
        self._replay: Callable[[], None] | None = None

    @torch.no_grad()
    def fill(self) -> None:
        """The cache, with the prompt."""
        from transformers import StaticCache

        self._model.set_attn_implementation(self._attention)
        self._cache = StaticCache(config=self._model.config, max_cache_len=KEYS)
        self._model(self._prompt, past_key_values=self._cache, use_cache=True, logits_to_keep=1)

    @torch.no_grad()
    def step(self) -> None:
        self._model(self._ids, past_key_values=self._cache, position_ids=self._at, use_cache=True)
        self._at += 1

    def prepare(self) -> None:
        """Capture a step, once."""
        if self._replay is not None:
            return
        self.fill()
        for _ in range(2):
            self.step()
        torch.cuda.synchronize()
        graph, _ = capture(self.step)
        self.forget()
        self._replay = graph.replay

    def run(self) -> None:
        assert self._replay is not None
        for _ in range(TOKENS):
            self._replay()

    def forget(self) -> None:
        self._at.fill_(PROMPT)
        for layer in self._cache.layers:
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length.fill_(PROMPT)
        self._model.set_attn_implementation("sdpa")


def decoding(form: str) -> dict[str, Turn]:
    found: dict[str, Turn] = {}
    for name in TIMED:
        for batch in DECODED:
            decode = Decoding(name, form, batch)
            work = f"{name}, decode, CUDA graph, batch {batch}"
            found[work] = decode.prepare, decode.run, decode.forget
    return found


def generating(form: str) -> dict[str, Turn]:
    """Call by call, with a dynamic cache, greedily."""
    rows, prompt, new = GENERATED
    found: dict[str, Turn] = {}
    for name in TIMED:
        model, ids = model_of(name, form), tokens(rows, prompt)
        given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": new, "do_sample": False}
        run = partial(model.generate, ids, pad_token_id=0, **given)
        before = partial(model.set_attn_implementation, FORMS[form].decoding)
        work = f"{name}, generate, {rows} sequences, {new} new tokens"
        found[work] = before, run, partial(model.set_attn_implementation, "sdpa")
    return found


class Part(NamedTuple):
    """Steps: those of a form, how many turns of each are taken, and how many steps a turn has."""

    steps: Callable[[str], dict[str, Turn]]
    repeats: int
    each: int = 1


PARTS = {
    "training": Part(training, 4),
    "decoding": Part(decoding, 5, TOKENS),
    "generate": Part(generating, 2),
}
KL = "kl"


# ---- processes


def serve(cpus: Collection[int], form: str, turns: Connection) -> None:
    """Answers what is asked for, until None comes: a model's KL, a part's steps, their first runs, a step."""
    with steps.on(cpus):
        _choose(form)
        samebits.transformers.register()
        works: dict[str, Turn] = {}
        while (asked := turns.recv()) is not None:
            what, name = asked
            try:
                if what == KL:
                    answer: Any = rollout(name, form)
                elif what == "part":
                    works = PARTS[name].steps(form)
                    answer = list(works)
                elif what == "first":
                    answer = steps.once(works[name], FORMS[form])
                else:
                    with steps.on(sorted(cpus)[-2:]):
                        answer = steps.once(works[name], FORMS[form])
            except Exception as error:
                answer = SkippedError(f"{type(error).__name__}: {error}"[:300])
            turns.send(answer)
            torch.cuda.empty_cache()  # for the others


Ask = Callable[[str, str, Collection[str]], dict[str, Any]]


def asking(forms: dict[str, Connection], skipped: list[dict[str, str]]) -> Ask:
    """Asks forms for the same. PyTorch's wait until kernels of the others are compiled and tuned."""

    def ask(what: str, name: str, taking: Collection[str]) -> dict[str, Any]:
        found = {}
        for last in (False, True):
            some = [form for form in forms if form in taking and (form == "torch") is last]
            for form in some:
                forms[form].send((what, name))
            for form in some:
                try:
                    answer = forms[form].recv()
                except EOFError:  # its process has died
                    del forms[form]
                    answer = SkippedError("its process died")
                if isinstance(answer, SkippedError):
                    skipped.append({"form": form, "work": name, "why": str(answer)})
                else:
                    found[form] = answer
        return {form: found[form] for form in forms if form in found}

    return ask


def of_part(name: str, forms: dict[str, Connection], ask: Ask) -> Iterator[dict[str, Any]]:
    """The times of each of a part's steps, of the forms that can take it."""
    part = PARTS[name]
    works = ask("part", name, FORMS)
    for work in dict.fromkeys(work for of in works.values() for work in of):
        first = ask("first", work, [form for form, of in works.items() if work in of])

        def once(form: str, work: str = work) -> steps.Taken:
            forms[form].send(("turn", work))
            taken: steps.Taken = forms[form].recv()
            return taken._replace(ms=taken.ms / part.each)

        yield {"part": name, "work": work} | steps.in_turns(
            {f: partial(once, f) for f in first}, part.repeats
        )


def best(case: dict[str, Any]) -> float | None:
    """The time of the faster of samebits' forms."""
    return min((case[form]["ms"] for form in OURS if form in case), default=None)


def show(data: dict[str, Any]) -> list[Table]:
    times = Table("step", *(f"{SAID[form]}, ms" for form in FORMS), "of the others' time")
    for case in data["cases"]:
        cells = (f"{case[form]['ms']:.4g}" if form in case else "" for form in FORMS)
        ours, theirs = best(case), case.get("others")
        times.add_row(case["work"], *cells, f"{ours / theirs['ms']:.2f}" if ours and theirs else "")
    kl = Table("model", "form", "trainer's rows", "tokens", "differ", "largest", "KL")
    for c in data["kl"]:
        numbers = str(c["tokens"]), str(c["differ"]), f"{c['largest']:.2g}", f"{c['kl']:.3g}"
        kl.add_row(c["model"], c["form"], c["rows"], *numbers)
    return [kl, times]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=[KL, *PARTS], help="of the parts")
    options = parser.parse_args()
    console, out, start = Console(width=150), results(options.out, "hybrids.json"), time.perf_counter()
    record = environment(options.commit)
    for package in PEERS:
        try:
            record["versions"][package] = version(package)
        except PackageNotFoundError:
            continue
    data: dict[str, Any] = {
        "environment": record,
        "models": {name: config for name, (_, config) in MODELS.items()},
        "convolutions": convolutions(),
        **{name: [] for name in ("kl", "cases", "skipped", "red")},
    }
    taking = [form for form in FORMS if form != "others" or find_spec("fla")]
    with processes(partial(serve, os.sched_getaffinity(0)), taking) as forms:
        ask = asking(forms, data["skipped"])
        for part in options.only or [KL, *PARTS]:
            for name in MODELS if part == KL else ():
                for form, by in ask(KL, name, FORMS).items():
                    found = [{"model": name, "form": form, "rows": how} | c for how, c in by.items()]
                    data["kl"].extend(found)
                    data["red"] += [c for c in found if form in OURS and (c["differ"] or c["kl"])]
            if part != KL:
                data["cases"].extend(of_part(part, forms, ask))
            write(out, data)
            console.print(f"{part}: {time.perf_counter() - start:.0f} s", style="dim", highlight=False)
        for of in forms.values():
            of.send(None)
    for table in show(data):
        console.print(table)
    for what in data["skipped"]:
        console.print(
            f"{what['form']}: {what['work']}: skipped, {what['why']}", highlight=False, markup=False
        )
    for case in data["red"]:
        console.print(f"RED {case}", style="red", highlight=False)
    sys.exit(bool(data["red"]))
