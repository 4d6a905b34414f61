"""Models with state spaces and short convolutions under the mode: one function, however tokens are fed."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("transformers")

import samebits
import samebits.transformers
from benchmarks.zoo.build import build
from samebits.mode import state_space_layers
from samebits.testing import assert_same_bits

BF16 = torch.bfloat16
LENGTHS = (11, 6, 17)


@pytest.fixture(scope="module", params=["mamba", "mamba2", "falcon_h1", "zamba", "lfm2"])
def model(request: pytest.FixtureRequest) -> Any:
    """Of channels; of heads, whose steps have gates; of several scans in a layer; of convolutions alone."""
    return build(request.param, "causal", BF16, "cpu", False)


def ids(tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(8, 96, (1, tokens), generator=torch.Generator().manual_seed(seed))


def cached(model: Any, part: Tensor, cache: Any, start: int) -> tuple[Tensor, Any]:
    positions = torch.arange(start, start + part.shape[1])[None].expand(len(part), -1)
    given = {"position_ids": positions} if not type(model).__name__.startswith("Mamba") else {}
    name = "cache_params" if type(model).__name__.startswith("Mamba") else "past_key_values"
    out = model(part, use_cache=True, **given, **{name: cache})
    return out.logits, out[name]


def test_a_prefill_goes_on_from_a_cache_and_decodes(model: Any) -> None:
    tokens = ids(23)
    with torch.no_grad(), samebits.batch_invariant(on_uncovered="error"):
        want = model(tokens).logits
        found, cache = [], None
        for start, stop in ((0, 9), (9, 10), (10, 19), (19, 20), (20, 21), (21, 22), (22, 23)):
            logits, cache = cached(model, tokens[:, start:stop], cache, start)
            found.append(logits)
    assert_same_bits(torch.cat(found, 1), want)


def test_sequences_of_a_packed_row_do_not_see_each_other(model: Any) -> None:
    if type(model).__name__.startswith("Mamba"):
        pytest.skip("takes no position_ids")
    rows = [ids(n, n) for n in LENGTHS]
    packed, positions = torch.cat(rows, 1), torch.cat([torch.arange(n) for n in LENGTHS])[None]
    with samebits.batch_invariant(on_uncovered="error"):
        logits = model(packed, position_ids=positions, use_cache=False).logits
        found = torch.autograd.grad(logits.float().square().sum(), [*model.parameters()])
        alone = torch.cat([model(row, use_cache=False).logits for row in rows], 1)
        assert_same_bits(logits, alone)
        padded = [F.pad(row, (max(LENGTHS) - row.shape[1], 0)) for row in rows]
        mask = torch.cat([F.pad(torch.ones_like(row), (max(LENGTHS) - row.shape[1], 0)) for row in rows])
        places = (mask.cumsum(1) - 1).clamp(min=0)
        left = model(torch.cat(padded), mask, position_ids=places, use_cache=False).logits
    for row, n, part in zip(left, LENGTHS, logits[0].split(LENGTHS), strict=True):
        assert_same_bits(row[-n:], part)
    assert all(g.isfinite().all() for g in found)


@pytest.mark.long
@pytest.mark.parametrize("name", ["mamba2", "falcon_h1"])
def test_compiled_layers_are_told_of_padding(name: str) -> None:
    model = build(name, "causal", BF16, "cpu", False)
    tokens, mask = ids(11), torch.arange(11)[None] >= 3
    given = {"attention_mask": mask.to(torch.int64), "use_cache": False}
    with torch.no_grad(), samebits.batch_invariant(on_uncovered="error"):
        want = model(tokens, **given).logits
        torch._dynamo.reset()
        got = torch.compile(model, backend="eager")(tokens, **given).logits
    assert_same_bits(got, want)


def test_beams_have_the_scores_of_whole_sequences(model: Any) -> None:
    tokens = torch.cat([ids(9, 1), ids(9, 2)])
    model.generation_config.eos_token_id = None
    options = {"num_beams": 3, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    more = {"output_scores": True, "return_dict_in_generate": True}
    with torch.no_grad(), samebits.batch_invariant():
        out = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options, **more)
        alone = [
            model.generate(row, attention_mask=torch.ones_like(row), **options, **more)
            for row in tokens.split(1)
        ]
        kept = model(out.sequences).logits.float().log_softmax(-1)
    for i, one in enumerate(alone):
        assert_same_bits(one.sequences_scores[0], out.sequences_scores[i])
        assert torch.equal(one.sequences[0], out.sequences[i])
    scores = kept[:, 8:-1].gather(2, out.sequences[:, 9:, None]).sum((1, 2)) / 5
    torch.testing.assert_close(scores, out.sequences_scores, rtol=1e-3, atol=1e-3)


def test_outside_of_the_mode_layers_are_their_own(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with samebits.batch_invariant():
        pass  # what is exchanged is exchanged now

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError

    for name in ("causal_conv1d", "ssd", "selective_scan"):
        monkeypatch.setattr(state_space_layers, name, fail)
    with torch.no_grad():
        model(ids(5))
        with samebits.batch_invariant(), pytest.raises(AssertionError):
            model(ids(5))


@pytest.mark.parametrize("name", state_space_layers._MODELS)
def test_models_have_what_is_exchanged(name: str) -> None:
    """A version of ``transformers`` that has renamed a function fails here."""
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    with samebits.batch_invariant():
        pass
    known = {*state_space_layers._FUNCTIONS} & {*vars(module)} - {"mamba_inner_fn"}
    conv = {"causal_conv1d_fn", "causal_conv1d_update"}
    of_channels = {"mamba_selective_scan", "mamba_selective_state_update"}
    of_heads = {"mamba2_chunk_scan", "mamba2_selective_state_update", "mamba2_split_conv1d_scan_combined"}
    scans = set() if name.startswith("lfm2") else of_channels if known & of_channels else of_heads
    assert known == conv | scans
    if name not in ("mamba", "falcon_mamba"):  # which take no position_ids
        assert "create_recurrent_attention_mask" in vars(module)
