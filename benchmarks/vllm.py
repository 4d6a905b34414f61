"""Tokens per second of vLLM: stock, with its own batch invariance, and with samebits' plug-in.

python -m benchmarks vllm [--model 8b] [--engines stock,samebits,invariant] [--ranks N] [--commit COMMIT]
                          [--out FILE]

It writes benchmarks/results/<gpu>/vllm.json, by ``benchmarks/engines.py``. Requests of the model 8b-lora use
ADAPTERS adapters in turns. On several ranks samebits' sums are in segments. The attention that each
engine chose is in the results.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import engines
from benchmarks.record import arguments

ADAPTERS, RANK = 4, 16
_RPC = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # functions for collective_rpc
ENGINES: dict[str, dict[str, str]] = {
    "stock": _RPC,
    "samebits": _RPC,
    "invariant": _RPC | {"VLLM_BATCH_INVARIANT": "1"},
}
"""Environment variables of an engine."""


def randomise(worker: Any) -> dict[str, Any]:
    """In the engine's process: random weights in place of dummies. Returns what the engine chose.

    A router's bias is 0, whether it is a parameter or a buffer. So experts are equally likely in all engines.
    """
    generator = torch.Generator("cuda").manual_seed(0)
    model = worker.model_runner.model
    for name, p in model.named_parameters():
        with torch.no_grad():
            if "scale" in name:  # of weights in FP8
                p.fill_(1e-3)
                continue
            if p.dtype.itemsize == 1:
                p.copy_(20 * torch.randn(p.shape, generator=generator, device=p.device))
                continue
            p.normal_(0.0, 0.1 if "norm" in name else 0.02, generator=generator)
            if "norm" in name:
                p.add_(1.0)
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith("e_score_correction_bias"):
            t.data.zero_()
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    attention = {m.get_attn_backend().get_name() for m in layers if hasattr(m, "get_attn_backend")}
    config = worker.model_runner.kv_cache_config
    tokens = config.num_blocks * config.kv_cache_groups[0].kv_cache_spec.block_size
    return {"attention": ", ".join(sorted(attention)), "tokens_cached": int(tokens)}


def save_adapters(folder: Path, shape: dict[str, Any]) -> list[Path]:
    """Random adapters of all layers."""
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
    every = range(shape["num_hidden_layers"])
    named = {f"model.layers.{i}.{name}": sizes for i in every for name, sizes in layers.items()}
    paths = [folder / f"{i}" for i in range(ADAPTERS)]
    for path in paths:
        engines.save_adapter(path, named, RANK, scaling=2, spread=0.02)
    return paths


def serve(engine: str, options: argparse.Namespace) -> dict[str, Any]:
    """Starts an engine in a process of its own, and measures it from here."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    shape, adapted = engines.MODELS[options.model], options.model.endswith("-lora")
    more: dict[str, Any] = {"tensor_parallel_size": options.ranks}
    if engine == "invariant":
        more["attention_backend"] = "FLASH_ATTN"
    if engine == "samebits":
        if "kv_lora_rank" in shape:
            os.environ["VLLM_MLA_DISABLE"] = "0"
        import samebits.vllm

        more |= samebits.vllm.options(segments=8 if options.ranks > 1 else 1)
    if adapted:
        more |= {"enable_lora": True, "max_loras": ADAPTERS, "max_lora_rank": RANK}
    # Always the same: vLLM keeps what it compiled by the folder's name, among others.
    folder = Path(tempfile.gettempdir(), f"samebits-{options.model}")
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape))
    started = time.perf_counter()
    llm = LLM(
        f"{folder}",
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=4096,
        max_num_seqs=256,
        disable_log_stats=True,
        seed=0,
        **more,
    )
    took = time.perf_counter() - started
    chosen, *_ = llm.collective_rpc(randomise)
    kept = tempfile.TemporaryDirectory()
    adapters: list[Any] = []
    if adapted:
        folders = save_adapters(Path(kept.name), shape)
        adapters = [LoRARequest(f"{i}", i, f"{path}") for i, path in enumerate(folders, 1)]

    def generate(prompts: list[list[int]], sampled: int) -> None:
        ids: Any = [{"prompt_token_ids": p} for p in prompts]
        sampling = SamplingParams(
            temperature=1.0, max_tokens=sampled, ignore_eos=True, detokenize=False, logprobs=0
        )
        lora: Any = [adapters[i % ADAPTERS] for i in range(len(ids))] if adapters else None
        llm.generate(ids, sampling, use_tqdm=False, lora_request=lora)

    found = engines.rates(generate, shape["vocab_size"])
    llm.llm_engine.engine_core.shutdown()
    return {"start_seconds": round(took, 1), **found, **chosen}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, default=1, help="GPUs of an engine")
    engines.run("vllm", parser, ENGINES, serve)
