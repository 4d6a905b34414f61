"""Tokens per second of SGLang: stock, with its deterministic mode, and with samebits' plug-in.

python -m benchmarks sglang [--model 8b] [--engines stock,samebits,deterministic] [--attention fa3]
                            [--commit COMMIT] [--out FILE]

It writes benchmarks/results/<gpu>/sglang.json. Models, works and rounds are those of ``vllm``. Weights are
SGLang's dummies. ``--attention`` names the backend of the engines that are not samebits'; by default SGLang
chooses. Which one it was is in the results.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.record import arguments, environment, save
from benchmarks.vllm import DECODED, MODELS, PREFILLED, PROMPT, ROUNDS, VOCABULARY, WORKS, show, speed

ENGINES = ("stock", "samebits", "deterministic")


def serve(engine: str, model: str, attention: str | None) -> dict[str, Any]:
    """Starts an engine in processes of its own, and measures it from here."""
    import sglang

    more: dict[str, Any] = {"attention_backend": attention}
    if engine == "samebits":
        import samebits.sglang

        more = samebits.sglang.options()
    elif engine == "deterministic":
        more["enable_deterministic_inference"] = True
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODELS[model]))
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
    draw = random.Random(0)

    def generate(rows: int, prompt: int, sampled: int) -> float:
        """Seconds."""
        ids = [[draw.randrange(VOCABULARY) for _ in range(prompt)] for _ in range(rows)]
        sampling = {"temperature": 1.0, "max_new_tokens": sampled, "ignore_eos": True}
        start = time.perf_counter()
        llm.generate(input_ids=ids, sampling_params=sampling, return_logprob=True)
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
    info = llm.get_server_info()
    llm.shutdown()
    return {
        "start_seconds": round(took, 1),
        "attention": info["attention_backend"],
        "page": info["page_size"],
        "tokens_per_second": {work: [float(f"{r:.5g}") for r in of] for work, of in rates.items()},
        "first_token_ms": [float(f"{ms:.4g}") for ms in first],
        "tokens_cached": info["max_total_num_tokens"],
    }


def measure(
    model: str, engines: list[str], attention: str | None, console: Console
) -> Iterator[dict[str, Any]]:
    """Each engine, started from here. Yields what was found so far after each."""
    found: dict[str, Any] = {}
    for engine in engines:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "found.json")
            command = [
                sys.executable,
                "-m",
                "benchmarks.sglang",
                "--model",
                model,
                "--serve",
                engine,
                str(out),
            ]
            command += ["--attention", attention] if attention else []
            subprocess.run(command, env=os.environ | {"HF_HUB_OFFLINE": "1"}, check=True)
            found[engine] = json.loads(out.read_text())
        speeds = (f"{work} {speed(found[engine], work):,.0f}" for work in WORKS)
        console.print(f"{engine}: {', '.join(speeds)}", style="dim", highlight=False)
        yield found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument("--engines", default=",".join(ENGINES), help="stock first")
    parser.add_argument("--attention", help="of engines that are not samebits'")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        engine, out = options.serve
        Path(out).write_text(json.dumps(serve(engine, options.model, options.attention)))
        sys.stdout.flush()
        os._exit(0)  # the engine's threads may be waiting
    console = Console(width=130)
    name = "sglang.json" if options.model == "8b" else f"sglang_{options.model}.json"
    data = {"environment": environment(options.commit), "model": f"Qwen3 {options.model}", "engines": {}}
    for data["engines"] in measure(options.model, options.engines.split(","), options.attention, console):
        save(options.out, name, data)
    console.print(show(data))


if __name__ == "__main__":
    main()
