"""Other libraries beside samebits and PyTorch, all in one run.

python -m benchmarks peers [--commit COMMIT] [--out FILE]

It writes benchmarks/results/<gpu>/peers.json: products, as ``samebits bench`` measures them;
two steps of the model of ``benchmarks.steps``; and log-probabilities, as ``benchmarks.logp`` does.
batch_invariant_ops, Liger and Cut Cross-Entropy take part if they are installed. Rows of each are compared
with the same rows in smaller batches. The file is written anew after each part.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import samebits.transformers
from benchmarks import logp, steps
from benchmarks.models import BILLION
from benchmarks.record import arguments, environment, lines_of_progress, results, write
from samebits.tools.bench import BenchCase, bench
from samebits.tools.bench.cases import PEERS
from samebits.tools.bench.report import ratio

SHAPES = ((4096, 6144), (4096, 4096), (14336, 4096), (7168, 256), (768, 3072))
"""(K, N) of products."""
ROWS = (1, 16, 128, 2048, 8192)
LOGPS = (logp.CASES[0], logp.CASES[2])
TRAINED = 8, 512
"""Rows and tokens of the training step."""
TRAINING, DECODING = "training step, 8 x 512 tokens", "decode, eager, 1 row"
BANDS = {"products, forward, M <= 128": range(129), "products, forward, M >= 512": range(512, 1 << 20)}
MODE = "batch_invariant_ops"
"""The peer that has products, and a mode of PyTorch's operators."""
NAMES = {MODE: MODE, "liger_kernel": "Liger", "cut_cross_entropy": "Cut Cross-Entropy"}
"""What the peers are called, by their modules."""
Run = Callable[..., Tensor]
Data = dict[str, Any]


def changed(run: Run, rows: Tensor, *others: Tensor, at: Iterable[int]) -> int:
    """How many rows of smaller batches have other bits than in the whole one."""
    whole, found = run(rows, *others), 0
    for n in at:
        part = run(rows[:n], *others)
        bits = torch.int16 if part.dtype.itemsize == 2 else torch.int32
        differ = part.view(bits) != whole[:n].view(bits)
        found += int(differ.reshape(n, -1).any(1).sum())
    return found


def products(console: Console) -> Data:
    """Products beside cuBLAS and the peers of ``samebits bench``."""
    cases = [BenchCase("forward", m, k, n) for k, n in SHAPES for m in ROWS]
    found = bench(cases, peers=True, progress=lines_of_progress(console))
    runs: dict[str, Run] = {"samebits": samebits.linear, "torch": torch.nn.functional.linear}
    if find_spec(MODE):
        runs[MODE] = partial(PEERS[MODE].run, import_module(MODE))
    totals = dict.fromkeys(runs, 0)
    for k, n in SHAPES:
        x, weight = (torch.randn(rows, k, device="cuda").bfloat16() for rows in (ROWS[-1], n))
        for name, run in runs.items():
            w = PEERS[name].weight(weight) if name in PEERS else weight
            totals[name] += changed(run, x, w, at=ROWS[:-1])
    rows = sum(ROWS[:-1]) * len(SHAPES)
    return {
        "products": found["cases"],
        "red": found["red"],
        "products_changed": totals,
        "products_rows": rows,
    }


@torch.no_grad()
def logps_changed(case: logp.Case) -> dict[str, int]:
    """How many tokens' log-probabilities change with the number of tokens."""
    x, weight, target = logp.operands(case)
    found = {}
    for name, run in logp.contestants().items():
        some = partial(_of_some_tokens, run, weight, target)
        found[name] = changed(some, x, at=(case.tokens // 16, case.tokens // 4))
    return found


def _of_some_tokens(run: Run, weight: Tensor, target: Tensor, x: Tensor) -> Tensor:
    return run(x, weight, target[: len(x)])


def log_probabilities() -> Data:
    """Log-probabilities beside stored logits and the libraries of ``benchmarks.logp``."""
    cases = [logp.measure(case) for case in LOGPS]
    tokens = LOGPS[0].tokens // 16 + LOGPS[0].tokens // 4
    return {
        "log_probabilities": cases,
        "log_probabilities_changed": logps_changed(LOGPS[0]),
        "log_probabilities_rows": tokens,
    }


def of_a_model() -> Data:
    """Steps in PyTorch, samebits' context and a peer's mode, each with its own attention in decoding."""
    from transformers import LlamaConfig, LlamaForCausalLM

    forms = {"torch": steps.FORMS["torch"], "samebits": steps.FORMS["context"]}
    if find_spec(MODE):
        theirs = import_module(MODE).set_batch_invariant_mode
        forms[MODE] = steps.Form(theirs, "sdpa", "grouped_mm")
    samebits.transformers.register()
    with torch.device("cuda"):
        model: Any = LlamaForCausalLM(LlamaConfig(**BILLION))
        ids = torch.randint(model.config.vocab_size, TRAINED)
    model = model.to(torch.bfloat16)
    train = partial(steps.stored_logits, model, ids)
    model.set_attn_implementation("sdpa")
    totals, decoding = {}, {}
    turn: steps.Turn = steps.nothing, train, steps.nothing
    trained = steps.in_turns({name: partial(steps.once, turn, form) for name, form in forms.items()}, 9)
    with torch.no_grad():
        for name, form in forms.items():
            with form.within():
                totals[name] = changed(_logits(model), ids, at=(1, 2))
        for name, form in forms.items():
            with form.within():
                decode = steps.Decoding(model, 1, form.decoding)
            turn = decode.prepare, decode.eager, decode.forget
            decoding[name] = partial(steps.once, turn, form)
        decoded = steps.in_turns(decoding, 45)
    found = {TRAINING: trained, DECODING: decoded}
    cases = [{"work": work} | by for work, by in found.items()]
    return {"steps": cases, "steps_changed": totals, "steps_rows": 3}


def _logits(model: Any) -> Run:
    return lambda ids: model(ids, use_cache=False).logits.flatten(1)


def times(data: Data) -> dict[str, dict[str, float]]:
    """For each work the time of everyone that was measured, PyTorch = 1: geometric means."""
    found: dict[str, dict[str, list[float]]] = {}

    def add(work: str, who: str, time: float) -> None:
        found.setdefault(work, {}).setdefault(who, []).append(time)

    for case in data.get("products", ()):
        band = next(name for name, sizes in BANDS.items() if case["m"] in sizes)
        for who in case["us"]:
            add(band, who, 1 / ratio(case, who))
    for case in data.get("log_probabilities", ()):
        for work, kind in (("forward", "forward_ms"), ("forward and backward", "forward_backward_ms")):
            for who, ms in case[kind].items():
                if who not in (logp.PRODUCT, "samebits, Triton"):
                    add(f"log-probs, {work}", who, ms / case[kind]["torch"])
    for case in data.get("steps", ()):
        for who in case.keys() - {"work"}:
            add(case["work"], who, case[who]["ms"] / case["torch"]["ms"])
    return {
        work: {who: statistics.geometric_mean(each) for who, each in by.items()} for work, by in found.items()
    }


def show(data: Data) -> Table:
    table = Table("work", "time, PyTorch = 1")
    for work, by in times(data).items():
        table.add_row(work, ", ".join(f"{who} {time:.2f}" for who, time in by.items() if who != "torch"))
    for part in ("products", "log_probabilities", "steps"):
        if f"{part}_changed" in data:
            table.add_row(f"{part}: of {data[f'{part}_rows']:,} rows changed", str(data[f"{part}_changed"]))
    return table


def main() -> None:
    parser = arguments(__doc__)
    options = parser.parse_args()
    console = Console(width=150)
    out = results(options.out, "peers.json")
    data: Data = {"environment": environment(options.commit)}
    data["environment"]["versions"] |= {name: version(name) for name in NAMES if find_spec(name)}
    torch.manual_seed(0)
    for part in (partial(products, console), of_a_model, log_probabilities):
        data |= part()
        write(out, data)
        console.print(show(data))
        torch.cuda.empty_cache()
