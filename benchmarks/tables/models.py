"""Tables of whole models and steps, on one GPU and on several."""

from __future__ import annotations

from typing import Any

from benchmarks import engines, peers, price, ranks, record, steps
from benchmarks.host import ratios
from benchmarks.record import load, measured, slug
from benchmarks.tables.text import made_with, measured_at, measured_on_gpu, table, with_commit


def overview() -> str:
    """README's first figures: what differs in stock, what that costs, and where it was measured."""
    gpus = record.overview()
    data = {name: load(f"{gpu}/{name}.json") for name, gpu in gpus.items()}
    said, costs = [], []
    if "trl_vllm" in data:
        runs = [run["steps"] for run in data["trl_vllm"]["runs"].values()]
        stock, ours = ([sum(s[key] for s in run) for key in ("differing", "tokens")] for run in runs)
        said.append(
            f"In {len(runs[0])} steps of TRL's GRPO with vLLM, {stock[0]:,} of {stock[1]:,} log-probs differ"
            f" between rollout and trainer in stock, and {ours[0]:,} of {ours[1]:,} under samebits."
        )
    rollouts: dict[str, list[str]] = {}
    for name, engine in (("vllm", "vLLM"), ("sglang_8b", "SGLang"), ("vllm_1.7b", "vLLM")):
        if of := data.get(name):
            speeds = [
                [engines.speed(of["engines"][e], w) for w in engines.WORKS] for e in ("samebits", "stock")
            ]
            beside = [ours / stock for ours, stock in zip(*speeds, strict=True)]
            text = f"{min(beside):.2f} to {max(beside):.2f} times stock {engine}'s tokens/s"
            rollouts.setdefault(of["model"], []).append(text)
    costs += [f"{model} samples {' and '.join(found)}" for model, found in rollouts.items()]
    if "steps" in data:
        cases = steps.trained(data["steps"]).values()
        beside = [steps.best(c)["ms"] / c.get(COMPILED, c["torch"])["ms"] for c in cases]
        kind = "compiled" if any(COMPILED in c for c in cases) else "eager"
        costs.append(
            f"a training step takes {min(beside):.2f} to {max(beside):.2f} of {kind} PyTorch's time"
            f" ([table](docs/performance.md#{gpus['steps']}))"
        )
    if costs:
        said.append(f"**What it costs**: {'; '.join(costs)}; [more](#what-it-costs).")
    where = " and ".join(dict.fromkeys(of["environment"]["gpu"] for of in data.values()))
    said.append(f"[Measured](docs/performance.md#where-the-figures-come-from) on one {where}.")
    picture = "KL of rollout and trainer over steps of training; tokens per second; time of a training step"
    return f"![{picture}: stock and samebits](docs/assets/overview.svg)\n\n{' '.join(said)}"


def gpu_models_drift(data: dict[str, Any]) -> str:
    """Differences of generation from training for the same tokens, and of rollout from trainer in a loop."""
    sizes, runs = data["sizes"], data["training"]
    cases: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for d in data["drift"]:
        cases.setdefault((d["model"], d["name"]), {})[d["by"]] = d
    rows = [
        [
            f"{model.capitalize()}: {name}",
            f"{by['torch']['tokens']:,}",
            *(
                text
                for who in ("torch", "samebits")
                for text in (f"{by[who]['differing']:,}", f"{by[who]['largest']:.2g}", f"{by[who]['kl']:.2g}")
            ),
        ]
        for (model, name), by in cases.items()
    ]
    sides = [
        f"{side}: {what}" for side in ("PyTorch", "samebits") for what in ("other bits", "by up to", "KL")
    ]
    theirs, ours = (max(runs[who]["largest"]) for who in ("torch", "samebits"))
    same = runs["samebits"]["weights"] == runs["samebits, again"]["weights"]
    learner, few = sizes["training"], sizes["drift"]
    models = " and ".join(
        f"{name.capitalize()} of {m['num_hidden_layers']} layers, hidden size {m['hidden_size']:,}"
        for name, m in few["models"].items()
    )
    picture = f"docs/assets/{slug(data['environment']['gpu'])}-models.svg"
    return "\n\n".join(
        (
            f"![Log-probs of rollout and training, PyTorch against samebits]({picture})",
            table(["log-probs beside those of training", "tokens", *sides], rows),
            f"Random weights, bf16: {models}; {few['prompts']} prompts of {few['prompt']} tokens, answered by"
            f" {few['answer']}. A GRPO loop of {len(runs['torch']['largest'])} steps (hidden size"
            f" {learner['hidden_size']:,}, {learner['group']} answers of {learner['answer']} tokens to each"
            f" prompt): log-probs of rollout and trainer differ by up to {theirs:.2g} in PyTorch and"
            f" {ours:.2g} in samebits. Two runs under samebits end with"
            f" {'identical' if same else 'DIFFERENT'} weights; PyTorch's was run once."
            + _micro_batches(data),
            measured_on_gpu(data),
        )
    )


def _micro_batches(data: dict[str, Any]) -> str:
    theirs, ours = ([by[n] for n in sorted(by)] for by in data["micro_batches"].values())
    return (
        f" Trained in 2 and 4 micro-batches instead of one, a small model ends with {theirs[0]:,} and"
        f" {theirs[1]:,} other weights in PyTorch, {ours[0]:,} and {ours[1]:,} in samebits."
    )


def gpu_embeddings(data: dict[str, Any]) -> str:
    """Embeddings that change with the batch of sentences."""
    theirs, ours = (max(by.values()) for by in data["changed"].values())
    said = (
        f"Of MiniLM's embeddings of {data['sentences']} sentences (its own weights, float32), {theirs} change"
        f" with the batch or its padding in PyTorch, {ours} in samebits."
    )
    return f"{said} {measured_on_gpu(data)}"


def gpu_models_time(data: dict[str, Any]) -> str:
    """Time of the forward, with and without attention, and of a step of the loop."""
    rows = []
    for case in data["forward"]:
        ours, theirs = case["samebits"], case["torch"]
        without = [side["forward_ms"] - side["attention_ms"] for side in (ours, theirs)]
        rows.append(
            [
                f"{case['rows']} x {case['tokens']:,}",
                *(f"{side[key]:.1f}" for key in ("forward_ms", "attention_ms") for side in (theirs, ours)),
                f"{ours['forward_ms'] / theirs['forward_ms']:.2f}",
                f"{without[0] / without[1]:.2f}",
            ]
        )
    times = ("PyTorch, ms", "samebits, ms", "its attention: PyTorch, ms", "samebits, ms")
    ratios = ("samebits / PyTorch", "without attention")
    sizes, runs = data["sizes"]["forward"], data["training"]
    step, theirs = (runs[who]["seconds_a_step"] for who in ("samebits, again", "torch"))
    return "\n\n".join(
        (
            table(["sequences x tokens", *times, *ratios], rows),
            f"Forward of a Llama of {sizes['num_hidden_layers']} layers, hidden size"
            f" {sizes['hidden_size']:,}, bf16; medians of eager calls. A step of the GRPO loop takes"
            f" {step:.2f} s, in PyTorch {theirs:.2f} s.",
            measured_on_gpu(data),
        )
    )


def gpu_host_calls(data: dict[str, Any]) -> str:
    """What the mode's calls cost the CPU, in both of its forms."""
    means = table(
        ["geometric means beside PyTorch", "`batch_invariant()`", "`enable_batch_invariant_mode()`"],
        ([what, f"{context:.2f}", f"{process:.2f}"] for what, context, process in ratios(data)),
    )
    head = ["call", "", "PyTorch, µs", "`batch_invariant()`, µs", "`enable_batch_invariant_mode()`, µs"]
    rows = (
        [c["call"], c["work"], *(f"{c['us'][form]:.1f}" for form in ("torch", "context", "process"))]
        for c in data["cases"]
    )
    return "\n\n".join((means, table(head, rows), measured_on_gpu(data)))


def gpu_steps(data: dict[str, Any]) -> str:
    """Steps of models in every form: a billion parameters, one with checkpointing, one of experts."""
    forms = [form for form in steps.FORMS if any(form in c for c in data["cases"])]

    def ratio(case: dict[str, Any], of: str, to: str) -> str:
        ours, theirs = steps.best(case)[of], case.get(to, {}).get(of)
        return f"{ours / theirs:.2f}" if theirs else ""

    lines = (
        [
            c["work"],
            *(f"{c[form]['ms']:.2f}" if form in c else "" for form in forms),
            ratio(c, "ms", "torch"),
            ratio(c, "ms", COMPILED),
            ratio(c, "mib", COMPILED if COMPILED in c else "torch"),
        ]
        for c in data["cases"]
    )
    head = ["step, ms", *(STEPS_BY[form] for form in forms), "samebits / PyTorch", "/ compiled", "memory"]
    older: dict[str, list[str]] = {}
    for c in data["cases"]:
        if "commit" in c:
            older.setdefault(c["commit"][:10], []).append(c["work"])
    said = (f"At commit `{commit}`: {'; '.join(works)}." for commit, works in older.items())
    return "\n\n".join((table(head, lines), measured_on_gpu(data), *said))


COMPILED = "torch, compiled"
STEPS_BY = {
    "torch": "PyTorch",
    COMPILED: "PyTorch, compiled",
    "liger": "Liger",
    "context": "context",
    "process": "process",
    "compiled": "context, compiled",
    "fused": "context, fused",
    "fused, compiled": "context, fused, compiled",
    "fused with loss": "context, fused with loss",
    "fused with loss, compiled": "context, fused with loss, compiled",
}
"""What tables call the forms of steps."""


def gpu_distributed(data: dict[str, Any]) -> str:
    """What several GPUs cost beside PyTorch and NCCL, and that they change no bit."""
    llama, logp = data["llama"], data["log_probabilities"]
    compared, differing = llama["values compared"], llama["values that differ from one rank's"]
    logps = (
        f"{logp['tokens']:,} log-probabilities, {logp['features']:,} features, a vocabulary of"
        f" {logp['vocabulary']:,}: {logp['ms']['one GPU']:.2f} ms on one GPU,"
        f" {logp['ms']['split']:.2f} ms split."
    )
    return "\n\n".join(
        (
            f"On {data['ranks']} GPUs training steps of Llamas were compared with"
            f" one GPU's: **{differing:,} of {compared:,} values differ**, log-probabilities and gradients.",
            table(
                ["row-parallel layer, M", "speed / torch.mm and all_reduce", "worst"],
                ranks.parallel_rows(data),
            ),
            table(
                ["rows of 8,192, microseconds", "`ordered_all_reduce`", "NCCL bf16", "NCCL float32"],
                ranks.exchange_rows(data),
            ),
            table(*ranks.step_table(data)),
            f"{logps} Layers and exchanges in CUDA graphs. Medians, of the slowest rank."
            " PyTorch's split step gathers and stores the logits, and attends by its default; samebits' uses"
            " `vocab_parallel_linear_logp` and its own attention.",
            measured_on_gpu(data),
        )
    )


def the_price(gpu: str) -> str:
    """README's table of speed."""
    rows = price.rows(gpu)
    said = (
        f"Lower is better. {measured_at(gpu, price.FILES)}; geometric means, and the worst case. Steps"
        " in both forms of the mode; samebits decodes with its own implementation of attention, and trains"
        " with its own of experts. The GRPO step under `batch_invariant`, in two runs of one loop, whose"
        " times scatter. Where PyTorch's FP8 product refused a call, half the time of its bf16 one stands for"
        " it. PyTorch's decode takes a slow path of its attention, because of the mask of its static cache."
    )
    if any(row[0].endswith(price.BESIDE_COMPILED) for row in rows):
        said += " Beside `torch.compile`, compiled PyTorch is 1, and samebits takes its fastest form."
    if gpu in measured("peers.json"):
        said += (
            " Others: in one run with samebits, on fewer shapes, products forward only, decode of 1 row only:"
            " see [Related projects](docs/beside.md)."
        )
    return "\n\n".join((table(["time, PyTorch = 1", "samebits", "worst", "others"], rows), said))


def gpu_engine(data: dict[str, Any]) -> str:
    """Tokens per second of vLLM or SGLang, stock and with the plug-in."""
    names = {
        "stock": "stock",
        "invariant": "`VLLM_BATCH_INVARIANT=1`",
        "deterministic": "deterministic mode",
        "samebits": "samebits",
    }
    found = {name: data["engines"][name] for name in names if name in data["engines"]}
    rows = []
    for work in engines.WORKS:
        speeds = [engines.speed(of, work) for of in found.values()]
        rows.append([work, *(f"{s:,.0f}" for s in speeds), *(f"{s / speeds[0]:.2f}" for s in speeds[1:])])
    for what, key in (
        ("milliseconds to the first token of 2,048", "first_token_ms"),
        ("tokens that the cache holds", "tokens_cached"),
    ):
        values = [engines.middle(of[key]) for of in found.values()]
        rows.append([what, *(f"{v:,.0f}" for v in values), *(f"{v / values[0]:.2f}" for v in values[1:])])
    head = [names[name] for name in found]
    attention = data["engines"]["stock"].get("attention")
    rounds = len(data["engines"]["stock"]["tokens_per_second"][engines.WORKS[0]])
    of_stock = f" Stock has the attention that it calls `{attention}`." if attention else ""
    return "\n\n".join(
        (
            table(["tokens per second", *head, *(f"{name} / stock" for name in head[1:])], rows),
            f"{data['model']}'s shape, random weights, bf16, with the log-prob of each sampled token. Prompts"
            f" of {engines.PROMPT} tokens where tokens are decoded. Medians of {rounds} rounds. Each"
            f" engine has a process of its own.{of_stock}",
            measured_on_gpu(data),
        )
    )


def gpu_engine_bits(data: dict[str, Any]) -> str:
    """Log-probs of an engine's tokens beside those of `transformers`."""
    head = ["model", "sampled tokens", "other bits", "preempted", "tokens from the prefix cache"]
    keys = ("tokens", "differing", "preemptions", "tokens_from_prefixes")
    rows = ([with_commit(c["model"], c), *(f"{c[key]:,}" for key in keys)] for c in data["cases"])
    shortest, longest = (f(c[k] for c in data["cases"]) for f, k in ((min, "shortest"), (max, "longest")))
    small = ", a cache too small for all rows" if any(c["preemptions"] for c in data["cases"]) else ""
    return "\n\n".join(
        (
            table(head, rows),
            f"Prompts from {shortest} token on, sequences of up to {longest:,}. Prefill in chunks of up to"
            f" 2,048, CUDA graphs{small}. `transformers` in padded batches.",
            measured_on_gpu(data),
        )
    )


def gpu_trl_vllm(data: dict[str, Any]) -> str:
    """TRL's GRPO with rollouts by vLLM: the loss's log-probs beside the rollout's."""
    rows = []
    for name, run in data["runs"].items():
        tokens, differing = (sum(step[key] for step in run["steps"]) for key in ("tokens", "differing"))
        off, kl = (max(step[key] for step in run["steps"]) for key in ("off", "kl"))
        rows.append(
            [name, str(len(run["steps"])), f"{tokens:,}", f"{differing:,}", f"{off:.2g}", f"{kl:.2g}"]
        )
    head = ["trainer and engine", "steps", "tokens", "other bits", "largest abs(ratio - 1)", "largest KL"]
    return "\n\n".join((table(head, rows), measured_on_gpu(data)))


def verl(data: dict[str, Any]) -> str:
    """verl's GRPO: the probabilities of the actor beside the rollout's, in verl's own metric."""
    rows = []
    for name, run in data["runs"].items():
        most, mean = (
            max(step[f"training/rollout_probs_diff_{of}"] for step in run) for of in ("max", "mean")
        )
        rows.append([name, str(len(run)), f"{most:.2g}", f"{mean:.2g}"])
    head = ["verl with", "steps", "largest `rollout_probs_diff_max`", "largest `rollout_probs_diff_mean`"]
    return "\n\n".join((table(head, rows), made_with(data)))


def gpu_peers(data: dict[str, Any]) -> str:
    """Other libraries' times, and how many of their rows change with the batch."""
    found = peers.times(data)
    names = {"samebits": "samebits", **peers.NAMES}
    names = {who: name for who, name in names.items() if any(who in by for by in found.values())}
    times = ([work, *(f"{by[who]:.2f}" if who in by else "" for who in names)] for work, by in found.items())
    parts = {"products": "rows of products", "log_probabilities": "log-probs", "steps": "sequences' logits"}
    changed = (
        [f"{data[f'{part}_rows']:,} {what}"]
        + [f"{of[who]:,}" if who in of else "" for who in ("torch", *names)]
        for part, what in parts.items()
        if (of := data.get(f"{part}_changed"))
    )
    memory = (
        [f"{case['tokens']:,} tokens"] + [f"{of[who]:,.0f}" if who in of else "" for who in ("torch", *names)]
        for case in data["log_probabilities"]
        for of in (case["forward_backward_peak_mib"],)
    )
    shapes = ", ".join(f"({k:,}, {n:,})" for k, n in peers.SHAPES)
    return "\n\n".join(
        (
            table(["time, PyTorch = 1", *names.values()], times),
            table(["log-probs, MiB, forward and backward", "PyTorch", *names.values()], memory),
            table(["other bits in a smaller batch", "PyTorch", *names.values()], changed),
            f"One run, bf16, geometric means. Products of K, N: {shapes}.",
            measured_on_gpu(data),
        )
    )


def fused(data: dict[str, Any]) -> str:
    """What ``samebits.fuse`` fused in which architecture."""
    kinds: tuple[str, ...] = (
        "RMS norm",
        "gated RMS norm",
        "residual sum and RMS norm",
        "gated activation",
        "rotary positions",
        "RMS norms of heads and rotary positions",
        "loss from logits",
        "loss from hidden states",
    )
    built = [a for a in data["architectures"] if "unbuilt" not in a]
    some = [a for a in built if a["fused"]]
    kinds = tuple(k for k in kinds if any(f["what"] == k for a in some for f in (*a["fused"], *a["left"])))
    counts = [d for a in some for d in a["dtypes"].values()]
    values, differ = (sum(d[key] for d in counts) for key in ("values", "differ"))

    def cell(architecture: dict[str, Any], kind: str) -> str:
        found = sum(f["count"] for f in architecture["fused"] if f["what"] == kind)
        left = sum(u["count"] for u in architecture["left"] if u["what"] == kind)
        return f"{found}, {left} left" if found and left else f"{left} left" if left else str(found or "")

    rows = [[f"`{a['name']}`", *(cell(a, kind) for kind in kinds)] for a in some]
    return "\n\n".join(
        (
            f"Something is fused in **{len(some)} of {len(built)}** architectures: of {values:,} values,"
            f" {differ:,} differ.",
            table(["architecture, modules", *(f"{kind[0].upper()}{kind[1:]}" for kind in kinds)], rows),
            made_with(data),
        )
    )
