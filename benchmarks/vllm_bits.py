"""Log-probs of vLLM with samebits' plug-in against `transformers` under samebits: bits of a million tokens.

python -m benchmarks vllm_bits [--tokens 350000] [--models llama,qwen3,gemma2] [--ranks N] [--commit COMMIT]
                               [--out FILE]

It writes benchmarks/results/<gpu>/vllm_bits.json, by ``benchmarks/engines_bits.py``. Models run side by side.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from benchmarks import engines_bits
from benchmarks.engines_bits import (
    ADAPTERS,
    ANSWER,
    CACHED,
    LONGEST,
    ONLINE,
    RANK,
    ROWS,
    adapter_of,
    requests,
)
from benchmarks.record import arguments

PAGE = 16
HYBRID = 1200
"""Pages of a model with recurrent layers."""


def serve(folder: str, options: argparse.Namespace) -> dict[str, Any]:
    """Samples in an engine. Returns answers and their log-probs, and what the engine counted."""
    config = json.loads(Path(folder, "config.json").read_text())
    if "kv_lora_rank" in config:
        os.environ["VLLM_MLA_DISABLE"] = "0"
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    import samebits.vllm

    adapted = Path(folder, "adapter0").exists()
    more: dict[str, Any] = samebits.vllm.options(segments=engines_bits.segments(options))
    more["tensor_parallel_size"] = options.ranks
    if adapted:
        more |= {"enable_lora": True, "max_loras": ADAPTERS, "max_lora_rank": RANK}
    if Path(folder, ONLINE).exists():
        more["quantization"] = ONLINE
    more["num_gpu_blocks_override"] = CACHED // PAGE
    if "linear_attention" in config.get("layer_types", ()):  # a page has a state, or some 500 tokens
        more |= {"mamba_cache_mode": "align", "num_gpu_blocks_override": HYBRID}
    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        max_model_len=LONGEST + 8,
        max_num_seqs=ROWS,
        max_num_batched_tokens=2048,
        gpu_memory_utilization=0.2,
        kv_cache_memory_bytes=8 << 30,  # engines side by side could not measure what is free
        block_size=PAGE,
        enable_prefix_caching=True,
        disable_log_stats=False,
        seed=0,
        **more,
    )
    sampling = SamplingParams(
        temperature=1.0, max_tokens=ANSWER, ignore_eos=True, detokenize=False, logprobs=0
    )
    prompts: Any = [{"prompt_token_ids": p} for p in requests(options.tokens)]
    start = time.perf_counter()
    adapters: Any = [adapter_of(i) if adapted else None for i in range(len(prompts))]
    adapters = [
        None if a is None else LoRARequest(f"{a}", a + 1, str(Path(folder, f"adapter{a}"))) for a in adapters
    ]
    outputs = llm.generate(prompts, sampling, use_tqdm=False, lora_request=adapters if adapted else None)
    took = time.perf_counter() - start
    counted = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    llm.llm_engine.engine_core.shutdown()
    answers = [list(o.outputs[0].token_ids) for o in outputs]
    logps = [
        [step[i].logprob for i, step in zip(ids, o.outputs[0].logprobs, strict=True)]
        for ids, o in zip(answers, outputs, strict=True)
    ]
    return {
        "answers": answers,
        "logps": logps,
        "seconds": round(took, 1),
        "preemptions": int(counted["vllm:num_preemptions"]),
        "tokens_from_prefixes": int(counted["vllm:prefix_cache_hits"]),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, default=1, help="GPUs of an engine")
    engines_bits.run("vllm_bits", parser, serve, beside=True)
