"""A tiny model as the checks call it: sequences or pictures go in, one by one or as a batch."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from benchmarks.zoo.build import WORDS, build
from benchmarks.zoo.reasons import TOLD

LENGTHS = (300, 300, 131, 40)
"""Tokens of the sequences that forwards see."""
SHORT = (40, 37, 20)
"""Tokens of those that gradients are computed of."""
SOURCE = (90, 61, 33, 90)
"""Tokens of an encoder's side."""
CACHES = ("past_key_values", "cache_params", "state", "mems")

Item = dict[str, Tensor]  # one sequence or picture, without a batch dimension
Seeds = Sequence[Tensor | None]


class Model:
    """One model in one dtype.

    ``items`` are the inputs of forwards, ``short`` those of backwards.
    """

    def __init__(self, name: str, kind: str, dtype: torch.dtype, device: str, fp8: bool = False) -> None:
        self.net = build(name, kind, dtype, device, fp8)
        self.name, self.dtype, self.device = name, dtype, device
        config = self.net.config
        self.kind = kind
        if kind == "encoder-decoder" and not config.is_encoder_decoder:
            self.kind = "causal"
        self.known: dict[tuple[int, str], Tensor] = {}  # results of items alone
        self.pads_left = True  # unless that is reported
        self.takes = set(inspect.signature(self.net.forward).parameters)
        self.random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        text = config.get_text_config(decoder=True)
        most = getattr(text, "max_position_embeddings", None) or 512
        most = min(most, getattr(text, "max_target_positions", None) or 512) - 4
        self.items = [self._item(min(n, most), m) for n, m in zip(LENGTHS, SOURCE, strict=True)]
        self.short = [self._item(min(n, most), m) for n, m in zip(SHORT, SOURCE, strict=False)]

    def _item(self, tokens: int, source: int) -> Item:
        config, g = self.net.config, self.random

        def words(count: int) -> Tensor:
            return torch.randint(*WORDS, (count,), generator=g).to(self.device)

        def numbers(*size: int) -> Tensor:
            return torch.randn(size, generator=g).to(self.device, self.dtype)

        if self.kind == "vision":
            vision = getattr(config, "vision_config", config)
            size = getattr(vision, "image_size", 64)
            if self.net.main_input_name == "input_ids":  # a picture as a sequence
                return {"input_ids": words(100)}
            height, width = size if isinstance(size, list | tuple) else (size, size)
            return {"pixel_values": numbers(getattr(vision, "num_channels", 3), height, width)}
        if self.kind != "encoder-decoder":
            return {self.net.main_input_name: words(tokens)}
        if self.net.main_input_name == "input_features":
            features = numbers(config.num_mel_bins, 2 * config.max_source_positions)
            return {"input_features": features, "decoder_input_ids": words(tokens)}
        return {"input_ids": words(source), "decoder_input_ids": words(tokens)}

    # ---- batches

    @property
    def padded(self) -> bool:
        """Whether items have lengths, and a batch of them can be padded."""
        return self.kind != "vision" and ("attention_mask" in self.takes or self.kind == "causal")

    def batch(self, items: Sequence[Item], side: str = "right", extra: int = 0) -> dict[str, Tensor]:
        """The arguments of a forward. Items of different lengths are padded, all by at least `extra`."""
        given: dict[str, Tensor] = {}
        for key in items[0]:
            rows = [item[key] for item in items]
            if rows[0].is_floating_point():
                given[key] = torch.stack(rows)
                continue
            longest = max(map(len, rows)) + extra
            decoder = key.startswith("decoder")
            at = [((0, longest - len(r)) if side == "right" else (longest - len(r), 0)) for r in rows]
            given[key] = torch.stack([F.pad(r, p, value=WORDS[0]) for r, p in zip(rows, at, strict=True)])
            if side == "right" and all(p == (0, 0) for p in at):
                continue
            mask = torch.stack([F.pad(torch.ones_like(r), p) for r, p in zip(rows, at, strict=True)])
            name = "decoder_attention_mask" if decoder else "attention_mask"
            if name in self.takes:
                given[name] = mask
            if side == "left" and not decoder and "position_ids" in self.takes:
                given["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
        return given

    def places(self, items: Sequence[Item], side: str, tokens: int) -> list[slice]:
        """Where the items' own outputs are among the `tokens` of a row."""
        key = list(items[0])[-1]
        if items[0][key].is_floating_point():
            return [slice(None)] * len(items)
        lengths = [len(item[key]) for item in items]
        return [slice(0, n) if side == "right" else slice(tokens - n, None) for n in lengths]

    def forward(self, items: Sequence[Item], side: str = "right", extra: int = 0) -> list[Tensor]:
        """The logits of each item, without those of padding."""
        alone = (id(items[0]), side) if len(items) == 1 else None
        if alone is not None and alone in self.known:
            return [self.known[alone]]
        with torch.no_grad():
            out = logits(self.net(**self.batch(items, side, extra)))
        found = [o[p] for o, p in zip(out, self.places(items, side, out.shape[1]), strict=True)]
        if alone is not None:
            self.known[alone] = found[0]
        return found

    def seeds(self, items: Sequence[Item]) -> list[Tensor]:
        """Gradients of the logits."""
        g = torch.Generator().manual_seed(1)
        like = self.forward(items)
        return [torch.randn(x.shape, generator=g).to(x.device, x.dtype) for x in like]

    def gradients(self, items: Sequence[Item], seeds: Seeds, extra: int = 0) -> dict[str, Tensor]:
        """Gradients of all parameters; an item without a seed adds nothing."""
        out = logits(self.net(**self.batch(items, extra=extra)))
        whole = torch.zeros_like(out)
        for row, place, seed in zip(whole, self.places(items, "right", out.shape[1]), seeds, strict=True):
            if seed is not None:
                row[place] = seed
        named = {n: p for n, p in self.net.named_parameters() if p.requires_grad}
        found = torch.autograd.grad(out, list(named.values()), whole, allow_unused=True)
        return {n: g for n, g in zip(named, found, strict=True) if g is not None}

    # ---- decoding

    def decode(self, items: Sequence[Item], cuts: Sequence[int], cache: Any = None) -> Tensor:
        """The logits of items of one length, in chunks that begin at `cuts`, through a cache."""
        given = self.batch(items)
        key = "decoder_input_ids" if "decoder_input_ids" in given else self.net.main_input_name
        ids = given.pop(key)
        if self.kind == "encoder-decoder":
            encoded = self.net.get_encoder()(**given, return_dict=True)
            given = {k: v for k, v in given.items() if k == "attention_mask"} | {"encoder_outputs": encoded}
        name = next((n for n in CACHES if n in self.takes), None)
        if name is None:
            raise NotImplementedError("the model has no cache")
        found = []
        ends = [*cuts[1:], ids.shape[1]]
        with torch.no_grad():
            for start, stop in zip(cuts, ends, strict=True):
                if self.name in TOLD:
                    given["position_ids"] = torch.arange(start, stop, device=ids.device)[None]
                out = self.net(**given, **{key: ids[:, start:stop], name: cache, "use_cache": True})
                found.append(logits(out))
                cache = out.get(name)
                if cache is None:
                    raise NotImplementedError("the model returns no cache")
        return torch.cat(found, 1)

    def static_cache(self, tokens: int) -> Any:
        config = self.net.config.get_text_config(decoder=True)
        own = transformers.StaticCache(config=config, max_cache_len=tokens)
        if self.kind != "encoder-decoder":
            return own
        source = self.items[0].get("input_ids")
        long = self.net.config.max_source_positions if source is None else len(source)
        return transformers.EncoderDecoderCache(
            own, transformers.StaticCache(config=config, max_cache_len=long)
        )

    def generate(self, items: Sequence[Item], tokens: int) -> list[Tensor]:
        """The scores of each item's answer, and its tokens as a last column."""
        side = "left" if self.kind == "causal" else "right"
        start = [{k: v[:1] if k.startswith("decoder") else v for k, v in item.items()} for item in items]
        given = self.batch(start, side)
        given.pop("position_ids", None)
        self.net.generation_config.eos_token_id = None
        if self.kind == "encoder-decoder":
            self.net.generation_config.decoder_start_token_id = 1
        with torch.no_grad():
            out = self.net.generate(
                **given,
                max_new_tokens=tokens,
                do_sample=False,
                num_beams=1,
                return_dict_in_generate=True,
                output_logits=True,
                pad_token_id=0,
            )
        scores = torch.stack(out.logits, 1)
        drawn = out.sequences[:, -scores.shape[1] :, None].to(scores.dtype)
        return list(torch.cat([scores, drawn], -1))


def logits(out: Any) -> Tensor:
    found = out.logits if getattr(out, "logits", None) is not None else out[0]
    assert isinstance(found, Tensor)
    return found
