"""Log-probs of SGLang with samebits' plug-in against `transformers` under samebits, bit for bit.

python -m benchmarks sglang_bits [--tokens 34000] [--models llama,qwen3,gemma2] [--commit COMMIT] [--out FILE]

It writes benchmarks/results/<gpu>/sglang_bits.json. Models, prompts and the comparison are those of
``vllm_bits``. Prefill is in chunks, and prefixes are in the radix cache. The cache is too small for all rows:
SGLang retracts some and computes them again. Models run one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.record import arguments, environment, save
from benchmarks.vllm_bits import ANSWER, CACHED, LONGEST, MODELS, ROWS, compare, requests, show


def serve(folder: str, tokens: int) -> dict[str, Any]:
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
        log_level="warning",
        **samebits.sglang.options(),
    )
    sampling = {"temperature": 1.0, "max_new_tokens": ANSWER, "ignore_eos": True}
    start = time.perf_counter()
    outputs: Any = llm.generate(input_ids=requests(tokens), sampling_params=sampling, return_logprob=True)
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
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, default=34_000, help="sampled by each model")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        folder, tokens, out = options.serve
        Path(out).write_text(json.dumps(serve(folder, int(tokens))))
        sys.stdout.flush()
        os._exit(0)  # the engine's threads may be waiting
    data: dict[str, Any] = {"environment": environment(options.commit), "cases": []}
    for kind in options.models.split(","):
        data["cases"].append(compare(kind, options.tokens, "benchmarks.sglang_bits"))
        print(data["cases"][-1], flush=True)
        save(options.out, "sglang_bits.json", data)
    Console(width=130).print(show(data))
    if any(case["differing"] for case in data["cases"]):
        raise SystemExit("bits differ")


if __name__ == "__main__":
    main()
