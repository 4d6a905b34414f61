"""What benchmarks of engines' log-probs share: models, prompts, and the comparison with `transformers`.

Models have random weights. For each, an engine in a process of its own samples answers to prompts of 1 to
7,300 tokens, half of which begin alike. Prefill is in chunks, and prefixes are cached. The cache is too small
for all rows: the engine preempts some and computes them again. Then `transformers` computes every token's
log-prob in one forward over prompt and answer, in padded batches.

With models of BREADTH the results are NAME_breadth.json: mixtures of experts; requests that use ADAPTERS
adapters in turns, or none, not merged; layers with a recurrent state; latent attention, absorbed; checkpoints
in block FP8; weights that the engine quantizes online; a head in float32.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.engines import answer, ask, save_adapter
from benchmarks.record import environment, merged, results, write

VOCABULARY = 32768
LONGEST = 8000
"""Tokens of a prompt and its answer."""
ANSWER = 700
PREFIX = 500
ROWS = 256
CACHED = 96 * 1024
"""Tokens that the cache holds, of the 256 rows' half a million."""
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 16384,
    "num_key_value_heads": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "head_dim": 64,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 4096,
        },
    },
    "qwen3": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 6,
        "num_attention_heads": 16,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "gemma2": {
        "hidden_size": 1152,
        "intermediate_size": 4096,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "head_dim": 128,
        "sliding_window": 1024,
        "query_pre_attn_scalar": 128,
    },
}
"""Configurations by the type of model."""
_EXPERTS = {
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_experts_per_tok": 4,
    "tie_word_embeddings": False,
}
BREADTH: dict[str, dict[str, Any]] = {
    "qwen3_moe": _EXPERTS
    | {"head_dim": 128, "moe_intermediate_size": 384, "num_experts": 64, "norm_topk_prob": True},
    "mixtral": _EXPERTS | {"head_dim": 64, "intermediate_size": 1024, "num_local_experts": 16},
    "gpt_oss": _EXPERTS
    | {
        "head_dim": 64,
        "intermediate_size": 1024,
        "num_local_experts": 32,
        "sliding_window": 128,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    "qwen3_lora": MODELS["qwen3"],
    "qwen3_fp8": MODELS["qwen3"],
    "qwen3_fp8_online": MODELS["qwen3"],
    "qwen3_head": MODELS["qwen3"] | {"head_dtype": "float32"},
}
_STATES = {
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "tie_word_embeddings": False,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
}
BREADTH |= {
    "granitemoehybrid": _STATES
    | {
        "num_local_experts": 0,
        "shared_intermediate_size": 3072,
        "mamba_n_heads": 32,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "embedding_multiplier": 12.0,
        "logits_scaling": 4.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.0078125,
    },
    "qwen3_next": _STATES
    | {
        "head_dim": 128,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "moe_intermediate_size": 384,
        "shared_expert_intermediate_size": 384,
        "num_experts": 32,
        "num_experts_per_tok": 4,
    },
}
_LATENT = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 512,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 32,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "tie_word_embeddings": False,
}
_GROUPS = {"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
BREADTH |= {
    "deepseek_v2": _LATENT | {"q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
    "deepseek_v3": _LATENT | _GROUPS | {"rope_parameters": _YARN},
    "glm4_moe_lite": _LATENT | _GROUPS | {"n_group": 1, "topk_group": 1},
}
BREADTH |= {f"qwen3_moe_{form}": BREADTH["qwen3_moe"] for form in ("fp8", "fp8_online")}
"""What is beside dense models. With "_lora", the model has adapters. With "_fp8", its checkpoint is in block
FP8; with "_fp8_online", it is in 16 bits, and both sides quantize its weights as they load them. With
"_head", its logits are in float32."""
ONLINE = "fp8_per_block"
"""vLLM's name of that. A model whose folder has a file of this name asks for it."""
ADAPTERS, RANK, SCALING = 4, 16, 1.5
"""Of models with adapters: how many, and what each is."""


def build(kind: str, folder: str) -> None:
    """A model with random weights, whose norms and biases are no identities."""
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    shape = _COMMON | (MODELS | BREADTH)[kind]
    of = kind.partition("_fp8")[0].removesuffix("_lora").removesuffix("_head")
    config = transformers.AutoConfig.for_model(of, **shape)
    model = auto.from_config(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 1:
                p.add_(0.1 * torch.randn_like(p))
            elif "embed" not in name:
                p.mul_(1.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.1 * torch.randn_like(buffer))
    model.save_pretrained(folder)
    if kind.endswith("_lora"):  # of all linear layers but the head
        every = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and "head" not in n}
        layers = {n: (m.in_features, m.out_features) for n, m in every.items()}
        for adapter in range(ADAPTERS):
            save_adapter(Path(folder, f"adapter{adapter}"), layers, RANK, SCALING, spread=0.05)
    elif kind.endswith("_fp8"):
        quantize_checkpoint(Path(folder))
    elif kind.endswith("_online"):
        Path(folder, ONLINE).touch()


def quantize_checkpoint(folder: Path) -> None:
    """Rewrites a checkpoint in block FP8: layers and experts, but neither the head nor routers."""
    from safetensors.torch import load_file, save_file
    from transformers import FineGrainedFP8Config

    import samebits

    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        values, scale = samebits.quantize(tensors[name].cuda(), block=(128, 128))
        tensors |= {name: values.cpu(), f"{name}_scale_inv": scale.cpu()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = FineGrainedFP8Config(modules_to_not_convert=["lm_head"]).to_dict()
    (folder / "config.json").write_text(json.dumps(config))


def use_adapter(model: nn.Module, folder: Path) -> list[Any]:
    """Adds an adapter's products as PEFT does. Returns handles that remove them."""
    from safetensors.torch import load_file

    tensors = {k: t.cuda() for k, t in load_file(folder / "adapter_model.safetensors").items()}

    def added(a: Tensor, b: Tensor) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
            return out + functional.linear(functional.linear(args[0], a), b) * SCALING

        return hook

    handles = []
    for name, m in model.named_modules():
        parts = [tensors.get(f"base_model.model.{name}.lora_{part}.weight") for part in "AB"]
        if parts[0] is not None and parts[1] is not None:
            handles.append(m.register_forward_hook(added(parts[0], parts[1])))
    return handles


def adapter_of(request: int) -> int | None:
    """Which adapter a request uses, if the model has any."""
    return None if request % (ADAPTERS + 1) == ADAPTERS else request % (ADAPTERS + 1)


def requests(tokens: int) -> list[list[int]]:
    """Prompts of 1 to LONGEST - ANSWER tokens, as many of each magnitude; half of them begin alike."""
    draw = random.Random(0)
    prefix = [draw.randrange(3, VOCABULARY) for _ in range(PREFIX)]
    found = []
    for i in range(-(-tokens // ANSWER)):
        length = int((LONGEST - ANSWER) ** draw.random())
        own = [draw.randrange(3, VOCABULARY) for _ in range(length)]
        found.append((prefix + own)[:length] if i % 2 else own)
    return found


@torch.no_grad()
def replay(folder: str, sequences: list[list[int]], answers: list[int], segments: int) -> list[Tensor]:
    """The log-probs of each sequence's last tokens, by one forward of `transformers` under samebits."""
    from transformers import AutoModelForCausalLM

    import samebits

    samebits.transformers.register()
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="samebits"
    )
    model = model.cuda().eval()
    if hasattr(model.config, "kv_lora_rank"):
        samebits.latent.absorb(model)
    if hasattr(model.config, "head_dtype"):
        samebits.convert(model.get_output_embeddings(), out_dtype=torch.float32)
    if Path(folder, ONLINE).exists():
        samebits.convert(model, fp8="block", filter=lambda name, _: name != "lm_head")
    if segments > 1:
        samebits.convert(model, contract=samebits.TENSOR_CORE.segmented(segments))
    if not Path(folder, "adapter0").exists():
        found = _replayed(model, sequences, answers, range(len(sequences)))
        return [found[i] for i in range(len(sequences))]
    found = {}
    for adapter in (*range(ADAPTERS), None):
        handles = [] if adapter is None else use_adapter(model, Path(folder, f"adapter{adapter}"))
        own = [i for i in range(len(sequences)) if adapter_of(i) == adapter]
        found |= _replayed(model, sequences, answers, own)
        for handle in handles:
            handle.remove()
    return [found[i] for i in range(len(sequences))]


def _replayed(
    model: Any, sequences: list[list[int]], answers: list[int], which: Sequence[int]
) -> dict[int, Tensor]:
    """Those of some of the sequences."""
    import samebits

    order = sorted(which, key=lambda i: len(sequences[i]))
    found: dict[int, Tensor] = {}
    while order:
        most = max(1, 16384 // len(sequences[order[-1]]))
        part, order = order[-most:], order[:-most]
        longest = len(sequences[part[-1]])
        ids, mask = (torch.zeros(len(part), longest, dtype=torch.long) for _ in range(2))
        for row, i in enumerate(part):
            ids[row, : len(sequences[i])] = torch.tensor(sequences[i])
            mask[row, : len(sequences[i])] = 1
        with samebits.batch_invariant("error"):
            logits = model(ids.cuda(), attention_mask=mask.cuda(), use_cache=False).logits
            for row, i in enumerate(part):
                last = slice(len(sequences[i]) - answers[i] - 1, len(sequences[i]) - 1)
                targets = torch.tensor(sequences[i][-answers[i] :], device="cuda")
                logp = logits[row, last].float().log_softmax(-1)
                found[i] = logp.gather(-1, targets[:, None])[:, 0].cpu()
    return found


def segments(options: argparse.Namespace) -> int:
    """Of sums: an engine on several ranks has 8."""
    return 8 if getattr(options, "ranks", 1) > 1 else 1


def compare(kind: str, options: argparse.Namespace, benchmark: str) -> dict[str, Any]:
    """The engine's bits and those of `transformers`, for one model. The benchmark's ``--serve`` samples."""
    with tempfile.TemporaryDirectory() as folder:
        build(kind, folder)
        ranks = ("--ranks", f"{options.ranks}") if segments(options) > 1 else ()
        found = ask(benchmark, "--tokens", f"{options.tokens}", *ranks, "--serve", folder)
        prompts = requests(options.tokens)
        sequences = [p + a for p, a in zip(prompts, found["answers"], strict=True)]
        theirs = replay(folder, sequences, [len(a) for a in found["answers"]], segments(options))
    differing, worst, first = 0, 0.0, None
    for i, (ours, logp) in enumerate(zip(found["logps"], theirs, strict=True)):
        engine = torch.from_numpy(np.array(ours, np.float32))
        bad = engine.view(torch.int32) != logp.view(torch.int32)
        differing += int(bad.sum())
        worst = max(worst, float((engine - logp).abs().max()))
        if first is None and bad.any():
            at = int(bad.nonzero()[0])
            first = {"request": i, "token": at, "engine": float(engine[at]), "trainer": float(logp[at])}
    return {
        "model": kind,
        "tokens": sum(map(len, found["answers"])),
        "differing": differing,
        "largest": worst,
        "first": first,
        "prompts": len(prompts),
        "shortest": min(map(len, prompts)),
        "longest": max(map(len, sequences)),
        **{key: found[key] for key in ("seconds", "preemptions", "tokens_from_prefixes")},
    }


def show(data: dict[str, Any]) -> Table:
    table = Table("model", "tokens", "other bits", "largest", "preempted", "tokens from prefixes")
    for c in data["cases"]:
        counts = (f"{c[key]:,}" for key in ("tokens", "differing"))
        table.add_row(
            c["model"],
            *counts,
            f"{c['largest']:.2g}",
            f"{c['preemptions']:,}",
            f"{c['tokens_from_prefixes']:,}",
        )
    return table


def run(
    name: str,
    parser: argparse.ArgumentParser,
    serve: Callable[[str, argparse.Namespace], dict[str, Any]],
    *,
    beside: bool,
) -> None:
    """The benchmark NAME of an engine, into ``<name>.json``. Exits with 1 if bits differ.

    Args:
        name: of the benchmark.
        parser: its options. Those of this function are added.
        serve: samples so many tokens of the model in a folder, in a process that runs the same benchmark.
        beside: whether models run side by side. Times do not matter here.
    """
    parser.add_argument("--tokens", type=int, default=350_000 if beside else 34_000, help="of each model")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--merge", action="store_true", help="keep the other models of the results")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        folder, out = options.serve
        answer(out, serve(folder, options))
    kinds = options.models.split(",")
    breadth = "" if {*kinds} <= {*MODELS} else "_breadth"
    split = f"_tp{options.ranks}" if segments(options) > 1 else ""
    file = f"{name}{breadth}{split}.json"
    data: dict[str, Any] = {"environment": environment(options.commit), "cases": []}
    if split:
        data["ranks"] = options.ranks
    spawn = multiprocessing.get_context("spawn")
    failed: list[Exception] = []
    with ProcessPoolExecutor(len(kinds) if beside else 1, spawn) as pool:
        for job in as_completed([pool.submit(compare, kind, options, name) for kind in kinds]):
            try:
                data["cases"].append(job.result())
            except Exception as error:  # the other models' results stay
                failed.append(error)
                continue
            print(data["cases"][-1], flush=True)
            path = results(options.out, file)
            write(path, merged(path, data, "model") if options.merge else data)
    Console(width=130).print(show(data))
    if failed:
        raise ExceptionGroup(f"{len(failed)} of {len(kinds)} models have no result", failed)
    if any(case["differing"] for case in data["cases"]):
        raise SystemExit("bits differ")
