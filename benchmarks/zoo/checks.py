"""What is checked of a model: pairs of results that should have the same bits.

A check yields its pairs in PyTorch, and then under the mode. Without the mode, the largest difference is
PyTorch's drift. A check that PyTorch refuses, or whose results differ there by more than rounding, is not
applicable to the model.
"""

from __future__ import annotations

import dataclasses
import json
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
import torch
from torch import Tensor

from benchmarks.zoo.lora import add_adapters
from benchmarks.zoo.models import Model
from benchmarks.zoo.overrides import LORA, NOT_APPLICABLE
from benchmarks.zoo.reasons import CHUNKS, POSITIONS, STEPS, WHOLE
from samebits import batch_invariant
from samebits.mode import UncoveredError
from samebits.testing import bits, pattern

Pairs = Iterator[tuple[str, Tensor, Tensor]]
CUTS = (0, 128, 190, 256, 297, 298, 299)
NEW = 5
OTHER = "another function"
ROUNDING = {torch.float32: 2e-3, torch.bfloat16: 0.3}
"""Relative differences beyond this are not those of rounding."""


@dataclasses.dataclass
class Verdict:
    """Of one check.

    Attributes:
        state: "passes", "differs", "not applicable", "reported" (padding on the left, by a model that has
            attention of its own), "uncovered" or "fails".
        torch: PyTorch's largest difference, over the largest value.
        samebits: the same under the mode.
        said: what differs, or why there is no result.
    """

    state: str
    torch: float | None = None
    samebits: float | None = None
    said: str = ""


def rows(m: Model) -> Pairs:
    """Each item alone, and in a batch of equal lengths."""
    items = m.items if m.kind == "vision" else [m.items[0], m.items[1]]
    whole = m.forward(items)
    for i, item in enumerate(items):
        yield f"row {i}", m.forward([item])[0], whole[i]


def padding_right(m: Model) -> Pairs:
    items = [m.items[0], m.items[3]]
    for i, (item, row) in enumerate(zip(items, m.forward(items, extra=5), strict=True)):
        yield f"row {i}", m.forward([item])[0], row


def padding_left(m: Model) -> Pairs:
    items = m.items[2:]
    for i, (item, row) in enumerate(zip(items, m.forward(items, "left", extra=5), strict=True)):
        yield f"row {i}", m.forward([item], "left")[0], row


def cuts(m: Model) -> tuple[int, ...]:
    tokens = len(list(m.items[0].values())[-1])
    found = tuple(c for c in CUTS if c < tokens)
    return (0, *found[-3:]) if m.name in WHOLE or m.name in STEPS else found


def decode(m: Model) -> Pairs:
    """Prefill in chunks and decoding, in a batch, beside the forward of each row."""
    items = m.items[:2]
    steps = m.decode(items, cuts(m))
    for i, item in enumerate(items):
        yield f"row {i}", m.forward([item])[0], steps[i]


def decode_alone(m: Model) -> Pairs:
    """For models that decode by another algorithm: a prefill and steps, of each row alone and in a batch."""
    items = m.items[:2]
    at = cuts(m)
    steps = m.decode(items, at)
    for i, item in enumerate(items):
        yield f"row {i}", m.decode([item], at)[0], steps[i]


def static(m: Model) -> Pairs:
    item = m.items[0]
    tokens = len(list(item.values())[-1])
    at = cuts(m)
    want = m.decode([item], at)[0] if m.name in STEPS else m.forward([item])[0]
    yield "row 0", want, m.decode([item], at, m.static_cache(tokens + 4))[0]


def generate(m: Model) -> Pairs:
    items = m.items[2:]
    if asked(m, "left padding") or not m.pads_left:  # of one length
        items = [items[1], {k: v.flip(0) for k, v in items[1].items()}]
    for i, (item, row) in enumerate(zip(items, m.generate(items, NEW), strict=True)):
        yield f"row {i}", m.generate([item], NEW)[0], row


def gradients(m: Model) -> Pairs:
    """Of all parameters: mates whose logits have no gradient change nothing."""
    item = m.short[1]
    seeds = m.seeds([item])
    mate = m.items[0] if m.kind == "vision" else {k: v.flip(0) for k, v in item.items()}
    alone, beside = m.gradients([item], seeds), m.gradients([item, mate], [*seeds, None])
    yield from _named("beside a mate", alone, beside)


def gradients_with_padding(m: Model) -> Pairs:
    items = m.short
    seeds = m.seeds(items)
    alone = m.gradients(items[1:2], seeds[1:2])
    yield from _named("beside longer ones", alone, m.gradients(items, [None, seeds[1], None]))
    yield from _named("with padding", m.gradients(items, seeds), m.gradients(items, seeds, extra=21))


def checkpointing(m: Model) -> Pairs:
    items = m.short[:2]
    seeds = m.seeds(items)
    want = m.gradients(items, seeds)
    m.net.train()
    try:
        m.net.activation_checkpointing_enable()
        yield from _named("checkpointed", want, m.gradients(items, seeds))
    finally:
        m.net.activation_checkpointing_disable()
        m.net.eval()


def lora(m: Model) -> Pairs:
    """Adapters on all linear layers: their gradients, and rows."""
    items = m.short
    with add_adapters(m.net):
        m.known.clear()
        seeds = m.seeds(items)
        yield "row 1", m.forward(items[1:2])[0], m.forward(items)[1]
        alone = m.gradients(items[1:2], seeds[1:2])
        yield from _named("beside mates", alone, m.gradients(items, [None, seeds[1], None]))
    m.known.clear()


def _named(what: str, a: dict[str, Tensor], b: dict[str, Tensor]) -> Pairs:
    for name in b:
        yield f"{name} {what}", a.get(name, torch.zeros_like(b[name])), b[name]


CHECKS: dict[str, Callable[[Model], Pairs]] = {
    "rows": rows,
    "right padding": padding_right,
    "left padding": padding_left,
    "decode": decode,
    "static cache": static,
    "generate": generate,
    "gradients": gradients,
    "gradients with padding": gradients_with_padding,
    "checkpointing": checkpointing,
    "LoRA": lora,
}


def asked(m: Model, check: str) -> str:
    """Why a check is not applicable, or an empty string."""
    if found := NOT_APPLICABLE.get((m.name, check)):
        return found
    if check in ("right padding", "left padding", "gradients with padding") and not m.padded:
        return "pictures of one size" if m.kind == "vision" else "takes no mask"
    if check == "left padding" and m.kind == "encoder-decoder":
        return POSITIONS
    if check == "left padding" and "attention_mask" not in m.takes:
        return "takes no mask"
    if check == "left padding" and m.name in STEPS:
        return CHUNKS
    if check in ("decode", "static cache", "generate") and m.kind in ("encoder", "vision"):
        return "does not decode"
    if check == "checkpointing" and not m.net.supports_gradient_checkpointing:
        return "not in transformers"
    if check == "checkpointing" and m.dtype == torch.float32:
        return "checked in bfloat16"
    if check == "LoRA" and m.name not in LORA:
        return "checked of others"
    return ""


def check(name: str, theirs: Model, ours: Model) -> Verdict:
    if why := asked(ours, name):
        return Verdict("not applicable", said=why)
    run = decode_alone if name == "decode" and ours.name in STEPS else CHECKS[name]
    drift: float | None = None
    try:
        drift, _, finite = _compare(run(theirs))
        if not finite:
            return Verdict("not applicable", drift, None, "PyTorch's results are not finite")
    except Exception as error:
        return Verdict("not applicable", said=f"refused by transformers: {_said(error)}")
    try:
        with batch_invariant(on_uncovered="error"):
            mine, said, finite = _compare(run(ours))
    except UncoveredError as error:
        said = str(error).split(": ", 1)[1].split(" is not covered")[0]
        ours.pads_left = name != "left padding"
        return Verdict("uncovered" if ours.pads_left else "reported", drift, None, said)
    except Exception as error:
        return Verdict("fails", drift, None, _said(error))
    if not finite:
        return Verdict("fails", drift, mine, "results are not finite")
    if not said:
        return Verdict("passes", drift, 0.0)
    beyond = ROUNDING[ours.dtype]
    if drift > beyond and mine > beyond:
        return Verdict("not applicable", drift, mine, f"{OTHER}: PyTorch's differ by {drift:.2g}")
    return Verdict("differs", drift, mine, said)


def _compare(pairs: Pairs) -> tuple[float, str, bool]:
    """The largest relative difference, what differs first, and whether all is finite."""
    largest, scale = 0.0, 1e-30  # gradients that are zero but for rounding do not count as others do
    total, different, first, finite, where = 0, 0, "", True, 0
    for label, a, b in pairs:
        if a.shape != b.shape or a.dtype != b.dtype:
            raise ValueError(f"{label}: {tuple(a.shape)} {a.dtype} and {tuple(b.shape)} {b.dtype}")
        finite &= bool(a.isfinite().all()) and bool(b.isfinite().all())
        total += a.numel()
        scale = max(scale, float(a.abs().max()), float(b.abs().max()))
        at = (bits(a.contiguous()) != bits(b.contiguous())).nonzero()
        if not len(at):
            continue
        different += len(at)
        where += 1
        largest = max(largest, float((a.double() - b.double()).abs().max()))
        if not first:
            i = tuple(at[0].tolist())
            first = f"{label} at {list(i)}: {pattern(a[i])} and {pattern(b[i])}"
    said = f"{different} of {total} elements in {where} tensors differ, first {first}" if different else ""
    return largest / scale, said, finite


def _said(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}".split("\n")[0]
    return text[:160]


def results(name: str, kind: str, device: str, only: tuple[str, ...] = ()) -> dict[str, Any]:
    """All checks of one architecture, in both dtypes.

    One that passes is a number, PyTorch's drift; one that is not applicable is the reason.
    """
    warnings.simplefilter("ignore")
    try:
        m = Model(name, kind, torch.float32, device)
        m.forward(m.short[:1])
    except Exception as error:
        return {"name": name, "kind": kind, "unbuilt": _said(error)}
    attention = m.net.config._attn_implementation
    found: dict[str, Any] = {"name": name, "attention": attention, "checks": {}}
    for dtype in (torch.float32, torch.bfloat16):
        theirs, ours = Model(name, kind, dtype, device), Model(name, kind, dtype, device, fp8=True)
        found["kind"], found["class"] = ours.kind, type(ours.net).__name__
        seen: dict[str, Any] = {}
        for name_of, wide in found["checks"].get("float32", dict.fromkeys(CHECKS)).items():
            if only and name_of not in only:
                continue
            other = isinstance(wide, dict) and wide["said"].startswith(OTHER)
            seen[name_of] = wide["said"] if other else _short(check(name_of, theirs, ours))
        found["checks"][str(dtype).removeprefix("torch.")] = seen
    return found


def _short(v: Verdict) -> Any:
    def two(x: float | None) -> float | None:
        return None if x is None else float(f"{x:.2g}")

    if v.state == "passes":
        return two(v.torch)
    if v.state == "not applicable" and v.torch is None:
        return v.said
    said = {"state": v.state, "said": v.said}
    drift = {"torch": two(v.torch), "samebits": two(v.samebits)}
    return said | {k: x for k, x in drift.items() if x is not None}


def serve(pipe: Any, device: str, sources: str) -> None:
    """Writes the results of each architecture that is asked for. It is the whole of a process."""
    torch.set_num_threads(1)
    numba.set_num_threads(1)
    while (job := _received(pipe)) is not None:
        name, kind, path = job
        start = time.monotonic()
        found = results(name, kind, device)
        found |= {"seconds": round(time.monotonic() - start, 1), "sources": sources}
        whole = Path(path).with_suffix(".part")
        whole.write_text(json.dumps(found, indent=1))
        whole.rename(path)
        pipe.send(name)


def _received(pipe: Any) -> Any:
    try:
        return pipe.recv()
    except EOFError:  # there are no more
        return None
