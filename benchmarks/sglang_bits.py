"""Log-probs of SGLang with samebits' plug-in against `transformers` under samebits, bit for bit.

python -m benchmarks sglang_bits [--tokens 34000] [--models llama,qwen3,gemma2] [--commit COMMIT] [--out FILE]

It writes benchmarks/results/<gpu>/sglang_bits.json, by ``benchmarks/engines_bits.py``. SGLang retracts rows
that its cache has no place for. Models run one after the other.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from benchmarks import engines_bits
from benchmarks.engines_bits import ANSWER, CACHED, LONGEST, ROWS, requests
from benchmarks.record import arguments


def serve(folder: str, options: argparse.Namespace) -> dict[str, Any]:
    """Samples in an engine. Returns answers and their log-probs, and what the engine counted."""
    import sglang

    import samebits.sglang

    config = Path(folder, "config.json")
    told = json.loads(config.read_text())
    if told["model_type"] == "gemma2":  # as checkpoints say it, and SGLang reads it
        config.write_text(json.dumps(told | {"hidden_act": "gelu_pytorch_tanh"}))
    llm = sglang.Engine(
        model_path=folder,
        skip_tokenizer_init=True,
        context_length=LONGEST + 8,
        max_running_requests=ROWS,
        chunked_prefill_size=2048,
        max_total_tokens=CACHED,
        mem_fraction_static=0.4,
        random_seed=0,
        enable_fp32_lm_head="head_dtype" in told,
        log_level="warning",
        **samebits.sglang.options(),
    )
    sampling = {"temperature": 1.0, "max_new_tokens": ANSWER, "ignore_eos": True}
    start = time.perf_counter()
    outputs: Any = llm.generate(
        input_ids=requests(options.tokens), sampling_params=sampling, return_logprob=True
    )
    took = time.perf_counter() - start
    llm.shutdown()
    infos = [o["meta_info"] for o in outputs]
    return {
        "answers": [[token for _, token, *_ in i["output_token_logprobs"]] for i in infos],
        "logps": [[logp for logp, *_ in i["output_token_logprobs"]] for i in infos],
        "seconds": round(took, 1),
        "preemptions": sum(i["num_retractions"] for i in infos),
        "tokens_from_prefixes": sum(i["cached_tokens"] for i in infos),
    }


def main() -> None:
    engines_bits.run("sglang_bits", arguments(__doc__), serve, beside=False)
