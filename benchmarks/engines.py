"""What benchmarks of inference engines share: models, works, adapters, and a process for each engine.

Each engine runs in a process of its own, one after the other, with its defaults where the plug-in asks for
no others. Weights are random. Every round has new random prompts, and returns the log-prob of each sampled
token. The first round warms up; of the seven others the median counts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.record import environment, save

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
MODELS: dict[str, dict[str, Any]] = {
    "8b": _QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "1.7b": _QWEN3
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
}
MODELS |= {
    "30b-a3b": _QWEN3
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
    },
    "8b-lora": MODELS["8b"],
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 3,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
MODELS |= {
    f"{name}-fp8": MODELS[name] | {"quantization_config": _FP8 | {"modules_to_not_convert": kept}}
    for name, kept in (
        ("8b", ["lm_head"]),
        ("30b-a3b", ["lm_head", *(f"model.layers.{i}.mlp.gate" for i in range(24))]),
    )
}
"""Shapes of Qwen3, and of DeepSeek-V3 with 3 layers of 61, the first without experts. 30b-a3b has half of its
layers. With "-lora", requests use adapters; with "-fp8", weights are in block FP8."""
DECODED = ((1, 128), (8, 256), (64, 256), (256, 256))
"""Rows, and tokens that each samples, after a prompt of PROMPT tokens."""
PROMPT = 128
PREFILLED = (64, 2048)
"""Prompts, and their tokens."""
ROUNDS = 7
WORKS = (
    *(f"decode, {n} row{'s' * (n > 1)}" for n, _ in DECODED),
    f"prefill, {PREFILLED[0]} x {PREFILLED[1]:,}",
)


def save_adapter(
    folder: Path, layers: Mapping[str, tuple[int, int]], rank: int, scaling: float, spread: float
) -> None:
    """A random adapter as PEFT saves it, of layers by name, with their inputs and outputs."""
    from safetensors.torch import save_file

    tensors = {}
    for name, (inputs, outputs) in layers.items():
        for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            values = (spread * torch.randn(shape)).to(torch.bfloat16)
            tensors[f"base_model.model.{name}.lora_{part}.weight"] = values
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": scaling * rank,
        "target_modules": sorted({name.rpartition(".")[2] for name in layers}),
    }
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))


def ask(name: str, *arguments: str, **variables: str) -> Any:
    """What ``python -m benchmarks NAME ARGUMENTS FILE`` writes to the file: see :func:`answer`."""
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        command = [sys.executable, "-m", "benchmarks", name, *arguments, str(out)]
        subprocess.run(command, env=os.environ | offline | variables, check=True)
        return json.loads(out.read_text())


def answer(out: str, found: Any) -> NoReturn:
    """Write what an engine gave, and end its process, in which threads may be waiting."""
    Path(out).write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)


def rates(generate: Callable[[list[list[int]], int], object], vocabulary: int) -> dict[str, Any]:
    """Tokens per second of all works, and milliseconds to a first token.

    Args:
        generate: samples so many tokens after each of the prompts.
        vocabulary: of the model. Without a tokenizer, an engine takes other tokens, and reads past its table.
    """
    draw = random.Random(0)

    def seconds(rows: int, prompt: int, sampled: int, rounds: int = ROUNDS) -> list[float]:
        found = []
        for _ in range(rounds + 1):
            prompts = [[draw.randrange(vocabulary) for _ in range(prompt)] for _ in range(rows)]
            start = time.perf_counter()
            generate(prompts, sampled)
            found.append(time.perf_counter() - start)
        return found[1:]

    every = [(rows, PROMPT, sampled, rows * sampled) for rows, sampled in DECODED]
    every.append((*PREFILLED, 1, PREFILLED[0] * PREFILLED[1]))
    speeds = {
        work: [float(f"{tokens / s:.5g}") for s in seconds(*of)]
        for work, (*of, tokens) in zip(WORKS, every, strict=True)
    }
    first = [float(f"{s * 1e3:.4g}") for s in seconds(1, 2048, 1, rounds=5)]
    return {"tokens_per_second": speeds, "first_token_ms": first}


def run(
    name: str,
    parser: argparse.ArgumentParser,
    engines: Mapping[str, dict[str, str]],
    serve: Callable[[str, argparse.Namespace], dict[str, Any]],
) -> None:
    """The benchmark NAME of engines, by their environment variables, into ``<name>.json``.

    ``serve(engine, options)`` starts an engine and measures it, in a process that runs the same benchmark.
    """
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument("--engines", default=",".join(engines), help="stock first")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        engine, out = options.serve
        answer(out, serve(engine, options))
    console = Console(width=130)
    of = [] if options.model == "8b" else [options.model]
    ranks = getattr(options, "ranks", 1)
    of += [f"tp{ranks}"] if ranks > 1 else []
    file = f"{'_'.join([name, *of])}.json"
    found: dict[str, Any] = {}
    model = "DeepSeek-V3" if options.model == "deepseek-v3" else f"Qwen3 {options.model}"
    data: dict[str, Any] = {"environment": environment(options.commit), "model": model, "engines": found}
    if ranks > 1:
        data["ranks"] = ranks
    for engine in options.engines.split(","):
        found[engine] = ask(name, *sys.argv[1:], "--serve", engine, **engines[engine])
        speeds = (f"{work} {speed(found[engine], work):,.0f}" for work in WORKS)
        console.print(f"{engine}: {', '.join(speeds)}", style="dim", highlight=False)
        save(options.out, file, data)
    console.print(show(data))


def middle(value: float | list[float]) -> float:
    """The median of several."""
    return statistics.median(value) if isinstance(value, list) else value


def speed(of: dict[str, Any], work: str) -> float:
    """Tokens per second."""
    return middle(of["tokens_per_second"][work])


def show(data: dict[str, Any]) -> Table:
    names = list(data["engines"])
    table = Table(f"tokens/s, {data['model']}", *names, *(f"{n} / stock" for n in names if n != "stock"))
    stock = data["engines"]["stock"]
    for work in WORKS:
        every = [speed(of, work) for of in data["engines"].values()]
        ratios = (s / speed(stock, work) for s, n in zip(every, names, strict=True) if n != "stock")
        table.add_row(work, *(f"{s:,.0f}" for s in every), *(f"{r:.2f}" for r in ratios))
    for what, key in (("first token of 2,048, ms", "first_token_ms"), ("tokens cached", "tokens_cached")):
        values = [of[key] for of in data["engines"].values()]
        medians = [statistics.median(v) if isinstance(v, list) else v for v in values]
        ratios = (
            m / medians[names.index("stock")] for m, n in zip(medians, names, strict=True) if n != "stock"
        )
        table.add_row(what, *(f"{m:,.0f}" for m in medians), *(f"{r:.2f}" for r in ratios))
    return table
