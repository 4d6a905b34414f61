"""Why architectures differ or decode by steps: what is known of them."""

from __future__ import annotations

POSITIONS = "positions count from the row's start"
CHUNKS = "its chunks count from the row's start"
FROM_THE_START = POSITIONS, CHUNKS
"""Why padding on the left is not checked: it may change bits."""

STEPS: dict[str, str] = {
    name: what
    for what, names in {
        "A gated delta rule": "qwen4_exp_text",
        "mLSTM in chunks": "xlstm",
    }.items()
    for name in names.split()
}
"""Models that decode by another algorithm than they prefill by, and what it is."""

WHOLE = {"recurrent_gemma", "rwkv"}
"""Models whose prefill cannot go on from a cache: it is in one piece."""


TOLD = {"bamba"}
"""Models that count positions from the start of a chunk, unless they are told."""

_COMPRESSED = "the keys of compressed blocks lie behind those of all tokens, so padding and chunks move them"
_ROWS = "some of its layers take the rows of the flattened batch, which are one sequence"
_UNKNOWN = "attention of its own; what depends on the padded length, from 256 tokens on, is not found yet"
REASONS: dict[str, str] = {
    "deepseek_v4": _COMPRESSED,
    "hy_v4": _UNKNOWN,
    "inkling2_text": _UNKNOWN,
    "jetmoe": "its experts call `linear` with the rows of each, so their gradients do not know sequences",
    "llama4_text": "its experts and shared experts have all rows of the flattened batch as one sequence",
    "mpt": "its bias of positions counts from the row's padded end, which moves all scores",
    "recurrent_gemma": "its gates have the rows of the flattened batch in one `baddbmm`, as one sequence; its"
    " steps convolve in another order",
    "fnet": "mixes tokens by a Fourier transform",
} | dict.fromkeys(
    """
    afmoe cohere2_moe gpt2 gpt-sw3 hy_v3 inkling_text laguna mellum minimax_m3_vl_text openai-gpt qwen2_moe
    qwen3_5_moe_text qwen3_next qwen4_exp_text
    """.split(),  # noqa: SIM905
    _ROWS,
)
"""What in a model makes it fail."""
