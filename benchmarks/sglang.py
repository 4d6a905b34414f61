"""Tokens per second of SGLang: stock, with its deterministic mode, and with samebits' plug-in.

python -m benchmarks sglang [--model 8b] [--engines stock,samebits,deterministic] [--attention fa3]
                            [--commit COMMIT] [--out FILE]

It writes benchmarks/results/<gpu>/sglang.json, by ``benchmarks/engines.py``. Weights are SGLang's dummies.
``--attention`` names the backend of the engines that are not samebits'; by default SGLang chooses. Which one
it was is in the results.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import engines
from benchmarks.record import arguments


def serve(engine: str, options: argparse.Namespace) -> dict[str, Any]:
    """Starts an engine in processes of its own, and measures it from here."""
    import sglang

    shape = engines.MODELS[options.model]
    more: dict[str, Any] = {"attention_backend": options.attention}
    if engine == "samebits":
        import samebits.sglang

        more = samebits.sglang.options()
    elif engine == "deterministic":
        more["enable_deterministic_inference"] = True
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(shape))
        llm = sglang.Engine(
            model_path=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            context_length=4096,
            max_running_requests=256,
            cuda_graph_max_bs_decode=256,
            random_seed=0,
            **more,
        )
    took = time.perf_counter() - started

    def generate(prompts: list[list[int]], sampled: int) -> None:
        sampling = {"temperature": 1.0, "max_new_tokens": sampled, "ignore_eos": True}
        llm.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True)

    found = engines.rates(generate, shape["vocab_size"])
    info = llm.get_server_info()
    llm.shutdown()
    return {
        "start_seconds": round(took, 1),
        "attention": info["attention_backend"],
        "page": info["page_size"],
        **found,
        "tokens_cached": info["max_total_num_tokens"],
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--attention", help="of engines that are not samebits'")
    engines.run("sglang", parser, {name: {} for name in ("stock", "samebits", "deterministic")}, serve)
