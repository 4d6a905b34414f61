"""Models of ``transformers`` in the mode, as they were loaded: attention, masks and experts are samebits'."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import samebits
from samebits.mode import UncoveredError, calls, interfaces, patches
from samebits.mode.patches import ChangedError
from samebits.testing import assert_same_bits

transformers = pytest.importorskip("transformers")

from transformers import masking_utils  # noqa: E402
from transformers.integrations import moe  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface, PreTrainedModel  # noqa: E402

from tests.ops.test_transformers import LENGTHS, WINDOW, padded, sequences  # noqa: E402

SMALL = {
    **{"vocab_size": 60, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048},
    **{"attention_dropout": 0.0, "pad_token_id": None, "eos_token_id": None, "initializer_range": 0.4},
}
KINDS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": WINDOW},
    "Gemma2": {"sliding_window": WINDOW, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 4},
    "GptOss": {"sliding_window": WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1},
}
FORMS = ("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention")
LACKING = {("Gemma2", "sdpa"), ("GptOss", "sdpa")}  # soft caps and sinks
CONTEXT = samebits.batch_invariant


def build(kind: str, form: str = "samebits", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    samebits.transformers.register()
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SMALL | KINDS.get(kind, {}) | changes)
    model = getattr(transformers, f"{kind}ForCausalLM")._from_config(config, attn_implementation="eager")
    model = model.to(dtype).eval()
    for name, p in model.named_parameters():
        if "sinks" in name:
            nn.init.normal_(p)
    # Their kernels are not installed, so transformers would refuse them.
    model.config._attn_implementation_internal = form
    model.config._experts_implementation_internal = "samebits" if form == "samebits" else "eager"
    return model


def outputs(model: Any, tokens: Tensor, **options: Any) -> list[Tensor]:
    """The logits, and gradients of the embedded tokens and of a projection, of what is not padding."""
    shown = options.get("attention_mask", torch.ones_like(tokens)).bool()
    x = model.get_input_embeddings()(tokens).detach().requires_grad_()
    logits = model(inputs_embeds=x, use_cache=False, **options).logits
    g = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3)).to(logits) * shown[..., None]
    weight = model.model.layers[0].self_attn.k_proj.weight
    dx, dw = torch.autograd.grad(logits, (x, weight), g)
    return [logits[shown], dx[shown], dw]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_has_the_bits_of_samebits(kind: str, form: str) -> None:
    """Padding on either side, packed sequences, and none: forward and gradients, however it was loaded."""
    if (kind, form) in LACKING:
        pytest.skip("transformers has no such form")
    ours, theirs = build(kind), build(kind, form)
    some = sequences()
    given: list[tuple[Tensor, dict[str, Tensor]]] = [(some[0][None], {})]
    for side in ("left", "right"):
        tokens, mask, positions, _ = padded(some, side)
        given.append((tokens, {"attention_mask": mask, "position_ids": positions}))
    if kind != "GptOss":  # which does not hand them on to masks
        positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
        given.append((torch.cat(some)[None], {"position_ids": positions}))
    with CONTEXT("error"):
        for tokens, options in given:
            found, want = outputs(theirs, tokens, **options), outputs(ours, tokens, **options)
            for name, got, one in zip(("logits", "dx", "dW"), found, want, strict=True):
                assert_same_bits(got, one, f"{name}, {[*options]}")


@pytest.mark.sampled(2)
@torch.no_grad()
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["Llama", "Mistral", "GptOss"])
def test_decoding_with_a_cache(kind: str, form: str, cache: str) -> None:
    """A cache that drops keys out of a window, and one of more slots than keys."""
    if (kind, form) in LACKING:
        pytest.skip("transformers has no such form")
    model, some = build(kind, form), sequences()
    tokens, mask, positions, at = padded(some, "left")
    whole = tokens.shape[1]
    made = {
        "dynamic": lambda: transformers.DynamicCache(config=model.config),
        "static": lambda: transformers.StaticCache(config=model.config, max_cache_len=whole + 5),
    }[cache]()
    with CONTEXT("error"):
        alone = [model(s[None], use_cache=False).logits[0] for s in some]
        found = []
        for start, end in ((0, 140), (140, 141), (141, 168), (168, 169), (169, 170), (170, whole)):
            options = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end]}
            found.append(model(tokens[:, start:end], past_key_values=made, use_cache=True, **options).logits)
    logits = torch.cat(found, 1)
    for row, want in enumerate(alone):
        assert_same_bits(logits[row, at[row]], want, f"{row}")


def test_nothing_changes_outside_of_the_mode() -> None:
    model = build("Llama", "sdpa")
    tokens, mask, positions, _ = padded(sequences(), "left")
    options = {"attention_mask": mask, "position_ids": positions}
    patches.uninstall()
    try:
        before = outputs(model, tokens, **options)
        own = ALL_ATTENTION_FUNCTIONS["sdpa"], masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
        assert "__call__" not in vars(PreTrainedModel)
    finally:
        patches.install()
    with CONTEXT("error"):
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not own[0]
        kept = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
        inside = outputs(model, tokens, **options)
    assert any(not torch.equal(a, b) for a, b in zip(before, inside, strict=True))
    assert (ALL_ATTENTION_FUNCTIONS["sdpa"], masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]) == own
    for got, want in zip(outputs(model, tokens, **options), before, strict=True):
        assert_same_bits(got, want)
    made = kept(batch_size=1, q_length=3, kv_length=3, attention_mask=torch.tensor([[False, True, True]]))
    assert not vars(made)  # transformers may have kept what it looked up in the mode


def test_the_process_is_covered() -> None:
    model, ours = build("Mistral", "sdpa"), build("Mistral")
    tokens, mask, positions, _ = padded(sequences(), "left")
    options = {"attention_mask": mask, "position_ids": positions}
    with samebits.set_batch_invariant_mode(True, "error"):
        for got, want in zip(
            outputs(model, tokens, **options), outputs(ours, tokens, **options), strict=True
        ):
            assert_same_bits(got, want)


@pytest.mark.long
@torch.no_grad()
@pytest.mark.parametrize("kind", ["Llama", "Mistral"])
def test_code_that_is_compiled_inside(kind: str) -> None:
    model, some = build(kind, "sdpa"), sequences()
    tokens, mask, positions, at = padded(some, "left")
    with CONTEXT("error"):
        compiled = torch.compile(model, backend="aot_eager")
        got = compiled(tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits
        for row, s in enumerate(some):
            assert_same_bits(got[row, at[row]], model(s[None], use_cache=False).logits[0], f"{row}")


@pytest.mark.long
@torch.no_grad()
def test_a_compiled_graph_need_not_break() -> None:
    model, (tokens, *_) = build("Llama", "sdpa"), sequences()
    with CONTEXT("error"):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        got = compiled(tokens[None], use_cache=False).logits
        assert_same_bits(got, model(tokens[None], use_cache=False).logits)


@torch.no_grad()
def test_a_mask_that_a_model_has_changed() -> None:
    """It carries nothing any more. Its rows still have the bits that they have alone."""
    model, some = build("Mistral", "eager"), sequences()
    tokens, mask, positions, at = padded(some, "left")
    changed = []

    def change(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        changed.append(1)
        return args, kwargs | {"attention_mask": kwargs["attention_mask"] + 0}

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(change, with_kwargs=True)
    with CONTEXT("error"):
        got = model(tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits
        for row, s in enumerate(some):
            assert_same_bits(got[row, at[row]], model(s[None], use_cache=False).logits[0], f"{row}")
    assert changed


# ---- What is reported


def own_attention() -> Any:
    config = transformers.BloomConfig(vocab_size=60, hidden_size=32, n_layer=1, n_head=2)
    return transformers.BloomForCausalLM(config).eval()


def biased_from_the_end() -> Any:
    config = transformers.MptConfig(vocab_size=60, d_model=32, n_layers=1, n_heads=2, expansion_ratio=1)
    return transformers.MptForCausalLM(config).eval()


TOKENS = torch.arange(2, 18).view(2, 8)
LEFT = torch.ones(2, 8, dtype=torch.long).index_fill_(1, torch.tensor([0, 1]), 0)
GAP, RIGHT = LEFT.roll(3, 1), LEFT.flip(1)

REPORTED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "left": (
        own_attention,
        {"attention_mask": LEFT},
        "attention of BloomAttention with keys that attention_mask",
    ),
    "gap": (
        own_attention,
        {"attention_mask": GAP},
        "attention of BloomAttention with keys that attention_mask",
    ),
    "end": (
        biased_from_the_end,
        {"attention_mask": RIGHT},
        "the architecture mpt of transformers .*padded end",
    ),
    "weights": (
        lambda: build("Llama", "eager"),
        {"attention_mask": LEFT, "output_attentions": True},
        "attention of LlamaAttention with output_attentions",
    ),
    "dropout": (
        lambda: build("Llama", "eager", attention_dropout=0.5).train(),
        {},
        "attention of LlamaAttention with dropout",
    ),
    "flash dropout": (
        lambda: build("Llama", "flash_attention_2", attention_dropout=0.5).train(),
        {},
        "attention of LlamaAttention with dropout",
    ),
}
SILENT = {
    "right": (own_attention, {"attention_mask": RIGHT}),
    "none": (biased_from_the_end, {}),
    "weights": (lambda: build("Llama", "eager"), {"output_attentions": True}),
}


@pytest.mark.parametrize("case", REPORTED)
def test_what_may_depend_on_padding_is_reported(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, options, what = REPORTED[case]
    model = made()
    with CONTEXT("error"), pytest.raises(UncoveredError, match=what):
        model(TOKENS, **options)
    if case == "flash dropout":  # whose kernel is not installed
        return
    monkeypatch.setattr(calls, "_warned", set())
    with CONTEXT(), pytest.warns(RuntimeWarning, match=what) as found:
        model(TOKENS, **options)
    assert len(found) == 1
    with CONTEXT("ignore"), warnings.catch_warnings():
        warnings.simplefilter("error")
        model(TOKENS, **options)


def test_shared_experts_of_a_flattened_batch_are_known() -> None:
    """Gradients of their weights depend on padding, in few elements: no test of values would tell."""
    flattens = re.compile(r"shared_experts?\(hidden_states_(reshaped|flat)\)")
    sources = Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
    found = {path.parent.name for path in sources if flattens.search(path.read_text(encoding="utf-8"))}
    assert found
    assert {name for name in found if not any(kind.startswith(name) for kind in interfaces._KNOWN)} == set()


@pytest.mark.parametrize(("options", "reported"), [({}, True), ({"use_cache": False}, False)], ids=str)
def test_a_step_that_sums_in_another_order_is_reported(options: dict[str, Any], reported: bool) -> None:
    sizes = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    config = transformers.RecurrentGemmaConfig(**sizes, num_hidden_layers=3, attention_window_size=16)
    model = transformers.RecurrentGemmaForCausalLM(config).eval()
    told: AbstractContextManager[object] = nullcontext()
    if reported:
        told = pytest.raises(UncoveredError, match=r"recurrent_gemma .*another order")
    with CONTEXT("error"), torch.no_grad():
        model(TOKENS, **options)
        with told:
            model(TOKENS[:, :1], **options)


@pytest.mark.parametrize("case", SILENT)
def test_what_does_not_is_not(case: str) -> None:
    made, options = SILENT[case]
    with CONTEXT("error"):
        made()(TOKENS, **options)


def test_asked_for_probabilities_an_eager_model_returns_them() -> None:
    model = build("Llama", "eager")
    with CONTEXT("error"):
        found = model(TOKENS, output_attentions=True).attentions
    assert [t.shape for t in found] == [(2, 4, 8, 8)] * 2


def test_an_eager_function_of_another_kind_stays() -> None:
    """It computes something that the arguments do not tell."""

    def eager(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any
    ) -> Any:
        return torch.sigmoid(query @ key.mT) @ value, None

    x = torch.randn(1, 2, 5, 8)
    hides = torch.zeros(1, 1, 5, 5).index_fill_(3, torch.tensor([0]), -torch.inf)
    with CONTEXT("error"):
        attend = ALL_ATTENTION_FUNCTIONS.get_interface("eager", eager)
        assert_same_bits(attend(nn.Module(), x, x, x, None)[0], eager(None, x, x, x, None)[0])
        with pytest.raises(UncoveredError, match="attention of Module in a form of its own"):
            attend(nn.Module(), x, x, x, hides)


@pytest.mark.parametrize("name", ["llama", "bert", "gemma2", "gpt_oss", "t5", "gpt2", "granite_swa", "vit"])
def test_the_usual_eager_functions_are_known(name: str) -> None:
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    assert interfaces._is_known(module.eager_attention_forward, sinks=name in ("gpt_oss", "granite_swa"))


# ---- Internals of transformers


@pytest.mark.long
def test_the_mode_does_not_load_transformers() -> None:
    code = (
        "import sys, samebits\nwith samebits.batch_invariant():\n    assert 'transformers' not in sys.modules"
    )
    code += "\nimport transformers.modeling_utils as m, samebits.mode.patches as p\nassert '__call__' in"
    code += " vars(m.PreTrainedModel)\np.uninstall()\nassert '__call__' not in vars(m.PreTrainedModel)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
def outside() -> Iterator[None]:
    patches.uninstall()
    yield
    patches.uninstall()
    patches.install()


BREAKS: dict[str, tuple[str, Any, str, Any]] = {
    "masks": ("masks of models.*no registry", masking_utils, "create_causal_mask", lambda *a, **k: None),
    "arguments": ("masks of models.*not asked for", masking_utils, "sdpa_mask", lambda batch_size: None),
    "attention": (
        "attention of models",
        AttentionInterface,
        "get_interface",
        lambda self, name, default: None,
    ),
    "idiom": (
        "attention of models",
        PreTrainedModel,
        "_can_set_attn_implementation",
        classmethod(lambda c: True),
    ),
    "experts": ("experts of models", moe, "use_experts_implementation", lambda *a: None),
}


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize("case", BREAKS)
def test_an_error_says_what_has_moved(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    what, of, name, value = BREAKS[case]
    monkeypatch.setattr(of, name, value)
    before = AttentionInterface.get_interface
    for _ in range(2):  # each time that the mode is entered
        with pytest.raises(ChangedError, match=f"transformers {transformers.__version__}.*{what}"), CONTEXT():
            pass
    assert AttentionInterface.get_interface is before
    assert "__call__" not in vars(PreTrainedModel)


# ---- Masks drawn at random


def _drawn(r: Random, slots: int) -> Tensor:
    """Which tokens of a row are shown: padding on both sides, and gaps."""
    shown = torch.zeros(slots, dtype=torch.bool)
    first = r.randrange(slots)
    shown[first : r.randint(first + 1, slots)] = True
    for _ in range(r.choice((0, 0, 1, 2))):
        at = r.randrange(slots)
        shown[at : at + r.randint(1, 9)] = False
    return shown if shown.any() else ~shown


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["sdpa", "eager", "samebits"])
@given(seed=st.integers(0, 1 << 30))
@settings(max_examples=6, deadline=None)
def test_each_row_of_a_masked_batch_has_the_bits_that_it_has_alone(
    form: str, dtype: torch.dtype, seed: int
) -> None:
    """Forward, gradients, and decoding with a cache, with masks of two and of four dimensions."""
    r = Random(seed)
    slots = r.choice((12, 40, 150))
    model = build("Llama", form, dtype, num_hidden_layers=1)
    shown = torch.stack([_drawn(r, slots) for _ in range(2)])
    tokens = torch.randint(60, (2, slots), generator=torch.Generator().manual_seed(seed))
    positions = (shown.long().cumsum(1) - 1).clamp(min=0)
    mask = shown.long()
    kind = r.choice(("two", "boolean", "float"))
    if kind != "two":
        opened = r.choice((torch.zeros(slots, slots), torch.eye(slots))).bool()
        mask = (torch.ones(slots, slots).tril().bool() & shown[:, None] | opened)[:, None]
        if kind == "float" or form == "eager":  # which adds it
            hides = r.choice((torch.finfo(dtype).min, -torch.inf))
            mask = torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, hides)
    what = f"{kind}, {slots}"
    g = torch.randn(2, slots, 60, generator=torch.Generator().manual_seed(5)).to(dtype) * shown[..., None]

    def forward(tokens: Tensor, g: Tensor, **options: Any) -> list[Tensor]:
        x = model.get_input_embeddings()(tokens).detach().requires_grad_()
        logits = model(inputs_embeds=x, use_cache=False, **options).logits
        return [logits, torch.autograd.grad(logits, x, g)[0]]

    with CONTEXT("error"):
        found = forward(tokens, g, attention_mask=mask, position_ids=positions)
        for row in range(2):
            own = shown[row]
            want = forward(tokens[row : row + 1, own], g[row : row + 1, own])
            compared = 1 if kind != "two" and dtype != torch.float32 and opened.any() else 2  # docs/limits.md
            for got, one in zip(found[:compared], want, strict=False):
                assert_same_bits(got[row, own], one[0], f"row {row}, {what}")
        with torch.no_grad():
            cache, steps = transformers.DynamicCache(config=model.config), []
            cuts = sorted({0, *(r.randrange(1, slots) for _ in range(3)), slots})
            for start, end in pairwise(cuts):
                part = mask[:, :end] if kind == "two" else mask[:, :, start:end, :end]
                options = {"attention_mask": part, "position_ids": positions[:, start:end]}
                out = model(tokens[:, start:end], past_key_values=cache, use_cache=True, **options)
                steps.append(out.logits)
    assert_same_bits(torch.cat(steps, 1)[shown], found[0].detach()[shown], f"decoding, {what}")


@torch.no_grad()
@pytest.mark.parametrize("form", ["sdpa", "eager", "samebits"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_window_that_goes_both_ways_is_not_moved_by_padding(side: str, form: str) -> None:
    samebits.transformers.register()
    torch.manual_seed(0)
    config = transformers.ModernBertConfig(
        **{"vocab_size": 60, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "local_attention": 16, "pad_token_id": 0, "initializer_range": 0.4},
        **{"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
    )
    model = transformers.ModernBertModel._from_config(config, attn_implementation=form).eval()
    some = sequences()
    tokens, mask, positions, at = padded(some, side)
    own = transformers.ModernBertModel._from_config(config, attn_implementation="sdpa").eval()
    own.load_state_dict(model.state_dict())
    options = {"attention_mask": mask, "position_ids": positions}
    want = own(tokens, **options)[0]
    with CONTEXT("error"):
        got = model(tokens, **options)[0]
        for row, s in enumerate(some):
            assert_same_bits(got[row, at[row]], model(s[None])[0][0], f"{row}")
            torch.testing.assert_close(got[row, at[row]], want[row, at[row]], rtol=1e-3, atol=1e-3)
