"""Tokens per second of vLLM: stock, with its own batch invariance, and with samebits' plug-in.

python -m benchmarks vllm [--model 8b] [--engines stock,samebits,invariant] [--commit COMMIT] [--out FILE]

It writes benchmarks/results/<gpu>/vllm.json. Each engine runs in a process of its own, one after the other,
with vLLM's defaults where the plug-in asks for no others. Weights are random. Every round has new random
prompts, and returns the log-prob of each sampled token. The first round warms up; of the three others the
median counts.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.record import arguments, environment, save

VOCABULARY = 151936
_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
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
}
"""Shapes of Qwen3. 30b-a3b has half of its layers. Requests of 8b-lora use ADAPTERS adapters in turns."""
ADAPTERS, RANK = 4, 16
ENGINES: dict[str, dict[str, str]] = {
    "stock": {},
    "samebits": {},
    "invariant": {"VLLM_BATCH_INVARIANT": "1"},
}
"""Environment variables of an engine."""
DECODED = ((1, 128), (8, 256), (64, 256), (256, 256))
"""Rows, and tokens that each samples, after a prompt of PROMPT tokens."""
PROMPT = 128
PREFILLED = (64, 2048)
"""Prompts, and their tokens."""
ROUNDS = 3
WORKS = (
    *(f"decode, {n} row{'s' * (n > 1)}" for n, _ in DECODED),
    f"prefill, {PREFILLED[0]} x {PREFILLED[1]:,}",
)


def randomise(worker: Any) -> int:
    """In the engine's process: random weights in place of dummies. Returns how many tokens are cached."""
    generator = torch.Generator("cuda").manual_seed(0)
    for name, p in worker.model_runner.model.named_parameters():
        with torch.no_grad():
            p.normal_(0.0, 0.1 if "norm" in name else 0.02, generator=generator)
            if "norm" in name:
                p.add_(1.0)
    config = worker.model_runner.kv_cache_config
    return int(config.num_blocks * config.kv_cache_groups[0].kv_cache_spec.block_size)


def save_adapters(folder: Path, shape: dict[str, Any]) -> list[Path]:
    """Random adapters of all layers, as PEFT saves them."""
    from safetensors.torch import save_file

    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    q, kv = (shape[f"num_{kind}_heads"] * shape["head_dim"] for kind in ("attention", "key_value"))
    layers = {
        "self_attn.q_proj": (hidden, q),
        "self_attn.k_proj": (hidden, kv),
        "self_attn.v_proj": (hidden, kv),
        "self_attn.o_proj": (q, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    names = [name.rpartition(".")[2] for name in layers]
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": names}
    paths = [folder / f"{i}" for i in range(ADAPTERS)]
    for path in paths:
        path.mkdir()
        tensors = {}
        for i in range(shape["num_hidden_layers"]):
            for name, (inputs, outputs) in layers.items():
                for part, size in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
                    key = f"base_model.model.model.layers.{i}.{name}.lora_{part}.weight"
                    tensors[key] = (0.02 * torch.randn(size)).to(torch.bfloat16)
        save_file(tensors, path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text(json.dumps(config))
    return paths


def serve(engine: str, model: str) -> dict[str, Any]:
    """Starts an engine in a process of its own, and measures it from here."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    more: dict[str, Any] = {}
    if engine == "invariant":
        more["attention_backend"] = "FLASH_ATTN"
    if engine == "samebits":
        import samebits.vllm

        more |= samebits.vllm.options()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODELS[model]))
        if model.endswith("-lora"):
            more |= {"enable_lora": True, "max_loras": ADAPTERS, "max_lora_rank": RANK}
        llm = LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=4096,
            max_num_seqs=256,
            disable_log_stats=True,
            seed=0,
            **more,
        )
    took = time.perf_counter() - started
    (cached,) = llm.collective_rpc(randomise)
    draw = random.Random(0)
    kept = tempfile.TemporaryDirectory()
    adapters: list[Any] = []
    if model.endswith("-lora"):
        folders = save_adapters(Path(kept.name), MODELS[model])
        adapters = [LoRARequest(f"{i}", i, f"{path}") for i, path in enumerate(folders, 1)]

    def generate(rows: int, prompt: int, sampled: int) -> float:
        """Seconds."""
        prompts: Any = [
            {"prompt_token_ids": [draw.randrange(VOCABULARY) for _ in range(prompt)]} for _ in range(rows)
        ]
        sampling = SamplingParams(
            temperature=1.0, max_tokens=sampled, ignore_eos=True, detokenize=False, logprobs=0
        )
        lora: Any = [adapters[i % ADAPTERS] for i in range(rows)] if adapters else None
        start = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False, lora_request=lora)
        return time.perf_counter() - start

    def rounds(run: Callable[[], float]) -> list[float]:
        return [run() for _ in range(ROUNDS + 1)][1:]

    rates = {}
    for work, (rows, sampled) in zip(WORKS, DECODED, strict=False):
        seconds = rounds(lambda rows=rows, sampled=sampled: generate(rows, PROMPT, sampled))  # type: ignore[misc]
        rates[work] = [rows * sampled / s for s in seconds]
    rows, prompt = PREFILLED
    rates[WORKS[-1]] = [rows * prompt / s for s in rounds(lambda: generate(rows, prompt, 1))]
    first = [generate(1, 2048, 1) * 1e3 for _ in range(6)][1:]
    llm.llm_engine.engine_core.shutdown()
    return {
        "start_seconds": round(took, 1),
        "tokens_per_second": {work: [float(f"{r:.5g}") for r in of] for work, of in rates.items()},
        "first_token_ms": [float(f"{ms:.4g}") for ms in first],
        "tokens_cached": cached,
    }


def measure(model: str, engines: list[str], console: Console) -> Iterator[dict[str, Any]]:
    """Each engine, started from here with its environment. Yields what was found so far after each."""
    found: dict[str, Any] = {}
    for engine in engines:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "found.json")
            variables = ENGINES[engine] | {
                "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # functions for collective_rpc
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_USE_FLASHINFER_SAMPLER": "0",
                "HF_HUB_OFFLINE": "1",
            }
            command = [
                sys.executable,
                "-m",
                "benchmarks",
                "vllm",
                "--model",
                model,
                "--serve",
                engine,
                str(out),
            ]
            subprocess.run(command, env=os.environ | variables, check=True)
            found[engine] = json.loads(out.read_text())
        speeds = (f"{work} {speed(found[engine], work):,.0f}" for work in WORKS)
        console.print(f"{engine}: {', '.join(speeds)}", style="dim", highlight=False)
        yield found


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


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument("--engines", default=",".join(ENGINES), help="stock first")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        engine, out = options.serve
        Path(out).write_text(json.dumps(serve(engine, options.model)))
        sys.stdout.flush()
        os._exit(0)  # the engine's threads may be waiting
    console = Console(width=130)
    name = "vllm.json" if options.model == "8b" else f"vllm_{options.model}.json"
    data = {"environment": environment(options.commit), "model": f"Qwen3 {options.model}", "engines": {}}
    for data["engines"] in measure(options.model, options.engines.split(","), console):
        save(options.out, name, data)
    console.print(show(data))
