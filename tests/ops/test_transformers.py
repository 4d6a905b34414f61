"""``attn_implementation="samebits"``: models of ``transformers`` have the same bits however they are fed."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import samebits
from samebits import transformers as integration
from samebits.ops import _sequences
from samebits.testing import assert_same_bits
from samebits.tools.graphs import capture
from tests.support.devices import DEVICES
from tests.support.fake_gpu import FakeGpu, fake_gpu

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "attention_dropout": 0.0,
    "pad_token_id": None,  # its embedding would be 0, and old static caches do not count keys of 0
    "eos_token_id": None,
}
WINDOW = 40
KINDS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Mistral": {"sliding_window": WINDOW},
    "Gemma2": {"sliding_window": WINDOW, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 4},
    "Gemma3": {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "GptOss": {"sliding_window": WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1},
}
LENGTHS = (150, 33, 171)  # sequences that begin in other places of a block, and end in another


@pytest.fixture(autouse=True)
def _covered() -> Iterator[None]:
    samebits.transformers.register()
    with samebits.batch_invariant("ignore"):
        yield
    gc.collect()


def build(kind: str, device: str = "cpu", dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    names = {"Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM")}
    config, model = names.get(kind, (f"{kind}Config", f"{kind}ForCausalLM"))
    torch.manual_seed(0)
    made = getattr(transformers, config)(
        **SMALL | KINDS.get(kind, {}) | changes, initializer_range=0.4, experts_implementation="eager"
    )
    made._attn_implementation = "samebits"
    built = getattr(transformers, model)(made).to(device, dtype).eval()
    for name, p in built.named_parameters():
        if "sinks" in name:
            torch.nn.init.normal_(p)
    return built


def sequences(device: str = "cpu") -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randint(1, 60, (n,)).to(device) for n in LENGTHS]


@pytest.fixture
def told() -> list[torch.dtype]:
    """The dtypes of what the mask function tells: int32 and int8 for spans, bool for masks."""
    found: list[torch.dtype] = []

    def mask(**asked: Any) -> Tensor:
        found.append((t := integration._mask(**asked)).dtype)
        return t

    transformers.AttentionMaskInterface.register("samebits", mask)
    return found


def padded(some: list[Tensor], side: str) -> tuple[Tensor, Tensor, Tensor, list[slice]]:
    """Tokens, mask, positions, and where each sequence is."""
    whole = max(map(len, some))
    at = [slice(whole - len(s), whole) if side == "left" else slice(0, len(s)) for s in some]
    tokens, mask, positions = some[0].new_zeros(3, len(some), whole)
    for row, (s, place) in enumerate(zip(some, at, strict=True)):
        tokens[row, place], mask[row, place], positions[row, place] = s, 1, torch.arange(len(s))
    return tokens, mask, positions, at


def run(model: Any, tokens: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    """The logits, and the embedded tokens that they have gradients for."""
    embedded = model.get_input_embeddings()(tokens).detach().clone().requires_grad_()
    return model(inputs_embeds=embedded, use_cache=False, **given).logits, embedded


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_padding_and_packing(kind: str, device: str, told: list[torch.dtype]) -> None:
    model, some = build(kind, device), sequences(device)
    torch.manual_seed(2)
    grads = [torch.randn(len(s), 60, dtype=torch.bfloat16).to(device) for s in some]
    alone = []
    for s, g in zip(some, grads, strict=True):
        logits, x = run(model, s[None])
        alone.append((logits[0], torch.autograd.grad(logits, x, g[None])[0][0]))
    for side in ("left", "right"):
        tokens, mask, positions, at = padded(some, side)
        logits, x = run(model, tokens, attention_mask=mask, position_ids=positions)
        whole = torch.zeros_like(logits)
        for row, g in enumerate(grads):
            whole[row, at[row]] = g
        dx = torch.autograd.grad(logits, x, whole)[0]
        for row, (want, dwant) in enumerate(alone):
            assert_same_bits(logits[row, at[row]], want, f"{kind}, {side}, {row}")
            assert_same_bits(dx[row, at[row]], dwant, f"{kind}, {side}, gradient of {row}")
    tokens = torch.cat(some)[None]
    positions = torch.cat([torch.arange(len(s)) for s in some])[None].to(device)
    ends = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32, device=device)
    given = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 171, "max_length_k": 171}
    # GPT-OSS does not hand position_ids on to masks.
    for more in (given,) if kind == "GptOss" else ({}, given):
        logits, x = run(model, tokens, position_ids=positions, **more)
        dx = torch.autograd.grad(logits, x, torch.cat(grads)[None])[0]
        for got, dgot, (want, dwant) in zip(
            logits[0].split(LENGTHS), dx[0].split(LENGTHS), alone, strict=True
        ):
            assert_same_bits(got, want, f"{kind}, packed")
            assert_same_bits(dgot, dwant, f"{kind}, packed, gradient")
    assert {*told} == {torch.int32}


@pytest.mark.sampled(2)
@torch.no_grad()
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cache", ["dynamic", "unbounded", "static"])
@pytest.mark.parametrize("kind", KINDS)
def test_decoding_with_a_cache(kind: str, cache: str, device: str, told: list[torch.dtype]) -> None:
    model, some = build(kind, device, torch.float32), sequences(device)
    alone = [run(model, s[None])[0][0] for s in some]
    tokens, mask, positions, at = padded(some, "left")
    whole = tokens.shape[1]
    made = {
        "dynamic": lambda: transformers.DynamicCache(config=model.config),
        "unbounded": transformers.DynamicCache,
        "static": lambda: transformers.StaticCache(config=model.config, max_cache_len=whole + 9),
    }[cache]()
    cuts = [0, 50, 141, *range(142, 150), 160, *range(161, whole + 1)]
    found = []
    for begin, end in itertools.pairwise(cuts):
        here = slice(begin, end)
        found.append(
            model(
                tokens[:, here],
                attention_mask=mask[:, :end],
                position_ids=positions[:, here],
                past_key_values=made,
            ).logits
        )
    logits = torch.cat(found, 1)
    for row, want in enumerate(alone):
        assert_same_bits(logits[row, at[row]], want, f"{kind}, {cache}, {row}")
    assert {*told} == {torch.int32, torch.int8}


@torch.no_grad()
@pytest.mark.parametrize("cache", ["dynamic", "static", None])
@pytest.mark.parametrize("kind", ["Mistral", "Gemma3", "GptOss"])
def test_generate(kind: str, cache: str | None) -> None:
    model = build(kind)
    tokens, mask, _, at = padded([s[:60] for s in sequences()], "left")
    options = {"use_cache": False} if cache is None else {"cache_implementation": cache}
    made = model.generate(
        tokens,
        attention_mask=mask,
        max_new_tokens=20,
        do_sample=False,
        pad_token_id=0,
        disable_compile=True,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    for row, place in enumerate(at):
        want = run(model, made.sequences[row, place.start :][None])[0][0]
        for i, step in enumerate(made.logits):
            assert_same_bits(step[row], want[60 - place.start - 1 + i].float(), f"{kind}, {cache}, {i}")


@pytest.mark.parametrize("implementation", ["samebits", "sdpa"])
def test_position_biases(implementation: str) -> None:
    """T5 adds a float bias, with gradients, to scores of an encoder, a decoder and between them."""
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=60,
        d_model=32,
        d_kv=16,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        pad_token_id=0,
    )
    config._attn_implementation = implementation
    if not transformers.T5PreTrainedModel._supports_sdpa:
        pytest.skip("T5 of this version of transformers has attention of its own")
    model = transformers.T5ForConditionalGeneration(config).to(torch.bfloat16)
    some = sequences()
    answers = [s[:140] for s in some]
    bias = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight

    def outputs(tokens: Tensor, mask: Tensor | None, answer: Tensor) -> Tensor:
        return model(input_ids=tokens, attention_mask=mask, decoder_input_ids=answer).logits

    tokens, mask, _, _ = padded(some, "right")
    answer, _, _, of_answer = padded(answers, "right")
    together = outputs(tokens, mask, answer)
    for row, s in enumerate(some):
        alone = outputs(s[None], None, answers[row][None])
        assert_same_bits(together[row, of_answer[row]], alone[0], f"{row}")
        one = torch.autograd.grad(alone[0].float().square().sum(), bias)[0]
        rest = together[row, of_answer[row]].float().square().sum()
        assert_same_bits(torch.autograd.grad(rest, bias, retain_graph=True)[0], one, f"gradient of {row}")


@torch.no_grad()
def test_masks_that_say_more() -> None:
    """A mask of four dimensions, and a pattern of a model's own: as masks, with positions of the padding."""
    model, some = build("Llama"), sequences()
    alone = [run(model, s[None])[0][0] for s in some]
    tokens, mask, positions, at = padded(some, "left")
    causal = (
        torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril() & mask.bool()[:, None, None]
    )
    for given in (causal, torch.where(causal, 0.0, torch.finfo(torch.float32).min)):
        logits, _ = run(model, tokens, attention_mask=given, position_ids=positions)
        for row, want in enumerate(alone):
            assert_same_bits(logits[row, at[row]], want, f"{row}")


@torch.no_grad()
def test_another_pattern_beside_a_cache_that_dropped_keys() -> None:
    """As the chunks of Llama 4: seen are keys of one chunk, and a cache need not keep those before."""
    from transformers.masking_utils import chunked_causal_mask_function

    chunk, tokens, first = 150, 400, 300
    torch.manual_seed(3)
    q, k, v = (torch.randn(2, 2, tokens, 16, dtype=torch.bfloat16) for _ in range(3))
    padding = torch.arange(tokens) >= torch.tensor([[0], [70]])
    own = padding.to(torch.uint8).argmax(1)
    asked = {
        "batch_size": 2,
        "mask_function": chunked_causal_mask_function(chunk, own),
        "attention_mask": padding,
        "local_size": chunk,
        "device": "cpu",
    }

    def asks(first_query: int, first_key: int) -> Tensor:
        positions = torch.arange(first_query, tokens)  # which older versions pass
        sizes = {"q_length": len(positions), "q_offset": first_query, "cache_position": positions}
        return integration._mask(**asked, **sizes, kv_length=tokens - first_key, kv_offset=first_key)

    module = torch.nn.Module()
    whole, few = asks(0, 0), asks(380, first)
    want, _ = integration.attention_function(module, q, k, v, whole)
    rows = slice(380, tokens)
    assert whole.dtype == few.dtype == torch.bool
    got, _ = integration.attention_function(module, q[:, :, rows], k[:, :, first:], v[:, :, first:], few)
    assert not whole[:, 0, rows, :first].any()
    assert_same_bits(got, want[:, rows])


@pytest.mark.long
@torch.no_grad()
def test_torch_compile() -> None:
    model, some = build("Mistral"), sequences()
    tokens, mask, positions, at = padded(some, "left")
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        logits, _ = run(compiled, tokens, attention_mask=mask, position_ids=positions)
        want, _ = run(model, some[2][None])
        assert_same_bits(logits[2, at[2]], want[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["Llama", "Mistral"])
def test_padding_as_spans_and_as_a_mask(
    kind: str, side: str, device: str, told: list[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens and gradients, of weights too, have the same bits in both forms, whichever a batch gets."""
    model, some = build(kind, device), sequences(device)
    tokens, mask, positions, at = padded(some, side)
    found = []
    for form in (integration._without_gaps, lambda shown: (None, None, shown)):
        monkeypatch.setattr(integration, "_without_gaps", form)
        logits, x = run(model, tokens, attention_mask=mask, position_ids=positions)
        of_tokens = torch.cat([logits[row, place] for row, place in enumerate(at)])
        weight = model.model.layers[0].self_attn.k_proj.weight
        found.append((of_tokens, *torch.autograd.grad(of_tokens.square().sum(), (x, weight))))
    assert told == [torch.int32, torch.int8]
    for name, a, b in zip(("logits", "dx", "dW"), *found, strict=True):
        assert_same_bits(a, b, f"{kind}, {side}, {name}")


@torch.no_grad()
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["Llama", "Mistral"])
def test_hidden_tokens_between_others(kind: str, device: str) -> None:
    """Two turns of a padded batch, then decoding: in Mistral's window lie only tokens of the second turn."""
    model, (first, _, second, *_) = build(kind, device), sequences(device)
    gap = 7
    whole = torch.cat([first, second])
    tokens = torch.cat([first, first.new_zeros(gap), second])[None]
    mask = torch.ones_like(tokens)
    mask[:, len(first) : len(first) + gap] = 0
    positions = (mask.cumsum(1) - 1).clamp(0)
    want = model(whole[None]).logits[0]
    cache = transformers.DynamicCache(config=model.config)
    options = {"past_key_values": cache, "use_cache": True}
    steps = [
        model(t, attention_mask=mask[:, :end], position_ids=p, **options).logits[0]
        for t, p, end in zip(
            (tokens[:, :-2], tokens[:, -2:-1], tokens[:, -1:]),
            (positions[:, :-2], positions[:, -2:-1], positions[:, -1:]),
            (tokens.shape[1] - 2, tokens.shape[1] - 1, tokens.shape[1]),
            strict=True,
        )
    ]
    got = torch.cat(steps)[mask[0] == 1]
    window = getattr(model.config, "sliding_window", None)
    far = 0 if window is None else len(first) + model.config.num_hidden_layers * (window + gap)
    assert far < len(got) - 2
    assert_same_bits(got[far:], want[far:])


@torch.no_grad()
@pytest.mark.parametrize("kind", ["DeepseekV32", "GlmMoeDsa"])
def test_selected_keys(kind: str) -> None:
    """Each query selects 8 keys, which a mask tells `sdpa`: positions are those among them."""
    if not hasattr(transformers, f"{kind}Config"):
        pytest.skip("this version does not have it")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        **SMALL | {"hidden_size": 64, "num_key_value_heads": 4, "initializer_range": 0.2},
        **{
            "q_lora_rank": 32,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
        },
        **{"index_topk": 8, "index_n_heads": 2, "index_head_dim": 16, "first_k_dense_replace": 2},
    )
    model = (
        getattr(transformers, f"{kind}ForCausalLM")._from_config(config, attn_implementation="sdpa").eval()
    )
    tokens = torch.randint(60, (1, 40))
    padded = torch.cat([tokens.new_zeros(1, 7), tokens], 1)
    mask = torch.ones_like(padded)
    mask[:, :7] = 0
    want = model(tokens, use_cache=False).logits
    got = model(padded, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(0), use_cache=False)
    assert_same_bits(got.logits[:, 7:], want, "padding on the left")
    cache = transformers.DynamicCache(config=config)
    steps = [
        model(t, past_key_values=cache, use_cache=True).logits
        for t in (tokens[:, :20], *tokens[:, 20:].split(1, 1))
    ]
    assert_same_bits(torch.cat(steps, 1), want, "decoding")


@pytest.mark.parametrize("kind", ["Llama", "Gemma2"])
@pytest.mark.parametrize("packed", [False, True], ids=["whole rows", "packed"])
def test_a_capture_waits_for_no_count(kind: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the capture of a CUDA graph nobody can wait for the number of sequences. They have the same bits."""
    model, tokens = build(kind, "cpu"), torch.arange(96).view(2, 48) % 60
    positions = torch.cat([torch.arange(17), torch.arange(31)]).expand(2, -1) if packed else None

    def computed() -> tuple[Tensor, Tensor]:
        logits, x = run(model, tokens, position_ids=positions)
        return logits, torch.autograd.grad(logits.float().square().sum(), x)[0]

    eager = computed()
    with monkeypatch.context() as patched:
        patched.setattr(samebits.transformers, "capturing", lambda _: True)
        patched.setattr(transformers.masking_utils, "is_tracing", lambda _: True)
        patched.setattr(Tensor, "nonzero", None)
        captured = computed()
    for what, got, want in zip(("logits", "gradient"), captured, eager, strict=True):
        assert_same_bits(got, want, what)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True], ids=["whole rows", "packed"])
@pytest.mark.parametrize("captured_packed", [False, True], ids=["of whole rows", "of packed rows"])
def test_a_step_in_a_graph(packed: bool, captured_packed: bool) -> None:
    """Its forward and backward, captured with some positions, replayed with others."""
    model, tokens = build("Llama", "cuda"), torch.arange(96, device="cuda").view(2, 48) % 60
    whole, parts = torch.arange(48), torch.cat([torch.arange(17), torch.arange(31)])
    positions = (parts if captured_packed else whole).expand(2, -1).cuda()

    def step() -> tuple[Tensor, Tensor]:
        with samebits.batch_invariant("error"):
            logits, x = run(model, tokens, position_ids=positions)
            return logits.detach(), torch.autograd.grad(logits.float().square().sum(), x)[0]

    with torch.cuda.stream(torch.cuda.Stream()):
        step()
    torch.cuda.synchronize()
    graph, found = capture(step)
    positions.copy_((parts if packed else whole).expand(2, -1))
    graph.replay()
    for what, got, want in zip(("logits", "gradient"), found, step(), strict=True):
        assert_same_bits(got, want, what)


def test_a_capture_loads_no_kernel_that_whole_rows_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its warm-up sees that rows are whole, and the capture does not. No kernel may be loaded there."""
    module, rows = torch.nn.Module(), (2, 8, 512, 64)
    monkeypatch.setattr(integration, "capturing", lambda _: True)
    monkeypatch.setattr(_sequences, "capturing", lambda _: True)

    def loaded(gpu: FakeGpu, mask: Tensor | None) -> set[Any]:
        gpu.start()
        q, k, v = (torch.zeros(rows, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        out, _ = integration.attention_function(module, q, k, v, mask, is_causal=True)
        torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
        return set(gpu.specs)

    with fake_gpu() as gpu:
        whole = loaded(gpu, None)
        offsets = integration._offsets(torch.zeros(2, 512, dtype=torch.int64))
        told = integration.Spans(True, -1, offsets=offsets).pack(2, "cpu")
        assert len(loaded(gpu, told) | whole) == len(whole) > 1


@torch.no_grad()
def test_packed_rows_in_chunks() -> None:
    """Llama 4's chunks: a pattern that spans do not tell."""
    if not hasattr(transformers.masking_utils, "remap_positions_for_packed_sequence"):
        pytest.skip("older versions cut chunks from the row's start")
    torch.manual_seed(0)
    config = transformers.Llama4TextConfig(
        **{"vocab_size": 61, "hidden_size": 64, "num_hidden_layers": 2, "initializer_range": 0.2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "attention_chunk_size": 8},
        **{"intermediate_size": 96, "intermediate_size_mlp": 96, "num_local_experts": 2},
    )
    model = transformers.Llama4ForCausalLM._from_config(config, attn_implementation="samebits").eval()
    a, b = torch.randint(61, (1, 21)), torch.randint(61, (1, 40))
    tokens, positions = torch.cat([a, b], 1), torch.cat([torch.arange(21), torch.arange(40)])[None]
    with samebits.batch_invariant("error"):
        want = model(b, use_cache=False).logits
        got = model(tokens, position_ids=positions, use_cache=False).logits[:, 21:]
        assert_same_bits(got, want)
        ends = torch.tensor([0, 21, 61], dtype=torch.int32)
        with pytest.raises(ValueError, match="attention_mask: expected none with cu_seq_lens_q"):
            model(tokens, position_ids=positions, cu_seq_lens_q=ends, cu_seq_lens_k=ends)


@pytest.mark.parametrize("kind", ["Bloom", "Falcon", "GPTJ", "GPTNeo", "Mpt", "XGLM", "CodeGen", "Git"])
def test_a_model_with_attention_of_its_own_is_not_loaded(kind: str) -> None:
    model, config = getattr(transformers, f"{kind}Model"), getattr(transformers, f"{kind}Config")()
    with (
        torch.device("meta"),
        pytest.raises(ValueError, match=rf"{kind}Model: attn_implementation: .*load it"),
    ):
        model._from_config(config, attn_implementation="samebits")


def test_registering_twice_changes_nothing() -> None:
    interfaces = (transformers.AttentionInterface, transformers.AttentionMaskInterface)
    before = [interface().valid_keys() for interface in interfaces]
    samebits.transformers.register()
    assert [interface().valid_keys() for interface in interfaces] == before
    assert all("samebits" in keys for keys in before)


@torch.no_grad()
def test_refusals() -> None:
    model = build("Llama")
    tokens = torch.ones(1, 5, dtype=torch.long)
    with pytest.raises(NotImplementedError, match="dropout"):
        build("Llama", attention_dropout=0.1).train()(tokens)
    with pytest.raises(NotImplementedError, match="output_attentions"):
        integration.attention_function(model, *(torch.zeros(1, 1, 1, 4),) * 3, None, output_attentions=True)
