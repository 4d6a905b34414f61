"""The shapes that a user asks for: weights as KxN, a model's linear layers, or those that a run has met."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from samebits.backends.cuda.shapes import ProductShape, Shape, dtype_name, from_data
from samebits.tools.hub import stay_offline
from samebits.tools.text import ToolError, one_line

__all__ = ["GRADIENTS_FROM", "asked", "numbers", "of_model", "of_weights", "read_shapes", "weight"]

GRADIENTS_FROM = 256
"""Rows from which on the gradients of a weight's products count: nobody trains on fewer."""


def weight(text: str) -> tuple[int, int]:
    """K and N of a weight, from the text of ``--shape``."""
    found = re.fullmatch(r"(\d+)x(\d+)", text)
    if found is None or not all(0 < int(size) < 1 << 31 for size in found.groups()):
        raise ToolError(f"--shape: expected KxN, such as 4096x28672, got {text}")
    return int(found[1]), int(found[2])


def numbers(option: str, text: str) -> list[int]:
    """The numbers of rows in an option such as 1,16,512."""
    parts = text.split(",")
    if not all(re.fullmatch(r"[1-9]\d{0,8}", part) for part in parts):
        raise ToolError(f"{option}: expected numbers of rows, such as 1,16,512, got {text}")
    return sorted({int(part) for part in parts})


def of_weights(
    weights: Iterable[tuple[int, int]],
    rows: Sequence[int],
    dtype: torch.dtype,
    gradients_from: int = GRADIENTS_FROM,
) -> list[ProductShape]:
    """The products of a linear layer with each weight: all forwards, then dX and dW of many rows."""
    step: Any = "fma" if dtype == torch.float32 else "mma"
    kind, shapes = (step, *(dtype_name(dtype),) * 3), list(dict.fromkeys(weights))
    many = [m for m in rows if m >= gradients_from]
    found = [_laid(ProductShape(*kind, m, n, k)) for m in rows for k, n in shapes]
    for m in many:
        for k, n in shapes:
            found.append(_laid(ProductShape(*kind, m, k, n, b_by_k=False)))
            ends = step == "fma"  # sequences do, under FMA
            found.append(_laid(ProductShape(*kind, n, k, m, a_by_k=False, b_by_k=False, sequences=ends)))
    return found


def _laid(shape: ProductShape) -> ProductShape:
    """The shape with :attr:`aligned` as it is for contiguous tensors."""
    units = 4 if shape.step == "fma" else 8
    inner = (
        shape.k if shape.a_by_k else shape.m,
        shape.k if shape.b_by_k else shape.n,
        shape.n,
    )
    outer = (shape.m if shape.a_by_k else shape.k, shape.n if shape.b_by_k else shape.k, shape.m)
    aligned = all(i % units == 0 for i, o in zip(inner, outer, strict=True) if o > 1 and i > 1)
    return replace(shape, aligned=aligned)


def of_model(name: str) -> tuple[list[tuple[int, int]], torch.dtype]:
    """K and N of the linear layers of a transformers config, and its dtype. No weights are made or read.

    Raises:
        ToolError: there is no such config, or its model cannot be made.
    """
    stay_offline()
    try:
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
    except ImportError:
        raise ToolError("--model: expected transformers: pip install transformers") from None
    path = Path(name)
    where = path.parent if path.name == "config.json" else name
    try:
        config = AutoConfig.from_pretrained(where, local_files_only=True)
    except Exception as error:  # transformers raises of all kinds
        why = one_line(error)
        if not Path(where).is_dir():
            why = f"there is none, and samebits downloads nothing: `hf download {name}` first"
        raise ToolError(
            f"--model {name}: expected a folder with config.json, or a model in transformers' cache: {why}"
        ) from error
    language: Any = AutoModelForCausalLM
    other: Any = AutoModel
    try:
        with torch.device("meta"):
            try:
                model = language.from_config(config)
            except ValueError:  # it is none
                model = other.from_config(config)
    except Exception as error:
        raise ToolError(f"--model {name}: the model cannot be made: {one_line(error)}") from error
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    if not layers:
        raise ToolError(f"--model {name}: it has no linear layers")
    dtype = getattr(config, "dtype", None)
    found = dict.fromkeys((m.in_features, m.out_features) for m in layers)
    return list(found), dtype if dtype in (torch.float16, torch.float32) else torch.bfloat16


def read_shapes(path: Path) -> list[Shape]:
    """The shapes of a file that ``samebits.record_shapes`` wrote.

    Raises:
        ToolError: it is none.
    """
    try:
        data = json.loads(path.read_text("utf-8"))
        found = [from_data(one) for one in data["shapes"]]
    except OSError as error:
        raise ToolError(f"--shapes {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ToolError(f"--shapes {path}: expected a file of samebits.record_shapes: {error}") from error
    if not found:
        raise ToolError(f"--shapes {path}: it has no shapes")
    return list(dict.fromkeys(found))


def asked(
    shape: Sequence[str], models: Sequence[str], shapes: Path | None, rows: str, dtype: str | None
) -> list[Shape]:
    """The shapes of the options.

    Raises:
        ToolError: there are none, or an option is wrong.
    """
    sizes = numbers("--rows", rows)
    given: torch.dtype = getattr(torch, dtype or "bfloat16")
    found: list[Shape] = []
    if shape:
        found += of_weights([weight(text) for text in shape], sizes, given)
    for model in models:
        weights, own = of_model(model)
        found += of_weights(weights, sizes, given if dtype else own)
    if shapes is not None:
        found += read_shapes(shapes)
    if not found:
        raise ToolError("expected --shape KxN, --model NAME_OR_CONFIG or --shapes FILE")
    return list(dict.fromkeys(found))
