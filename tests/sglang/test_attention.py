"""The attention backend: what a graph reads, and prefill in pieces."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from samebits.engines.refusals import RefusedError
from samebits.testing import assert_same_bits
from tests.sglang.conftest import Runner, Start
from tests.vllm.conftest import prompts


def decoding(made: Runner) -> Any:
    """A batch of three, after its prefill and a step."""
    with torch.inference_mode():
        batch = made.batch([made.request(p) for p in prompts(3, 17, 40)])
        for _ in range(2):
            ids, _ = made.step(batch)
            batch.input_ids = ids.to(torch.int64)
            batch.prepare_for_decode()
        return made.parts.ForwardBatch.init_new(batch, made.runner, return_hidden_states_before_norm=False)


def test_what_a_graph_reads(start: Start) -> None:
    """Tensors that stay where they are, filled for a batch that is padded by rows of one key."""
    made = start("qwen3")
    forward, backend = decoding(made), made.runner.attn_backend
    backend.init_forward_metadata(forward)
    eager = backend.step
    backend.init_cuda_graph_state(8, 8)
    fill = backend.get_cuda_graph_seq_len_fill_value()
    padded = SimpleNamespace(
        forward_mode=forward.forward_mode,
        batch_size=5,
        req_pool_indices=torch.cat([forward.req_pool_indices, forward.req_pool_indices.new_zeros(2)]),
        seq_lens=torch.cat([forward.seq_lens, forward.seq_lens.new_full((2,), fill)]),
        out_cache_loc=torch.cat([forward.out_cache_loc, forward.out_cache_loc.new_zeros(2)]),
    )
    backend.init_forward_metadata_out_graph(padded, in_capture=True)
    captured = backend.step
    captured.table.fill_(-1)
    captured.lengths.fill_(-1)
    backend.init_forward_metadata_out_graph(padded)  # as before each replay
    assert captured.table.data_ptr() == backend.step.table.data_ptr()
    assert captured.starts is eager.starts is None
    assert torch.equal(captured.table[:3], eager.table)
    assert torch.equal(captured.lengths, torch.cat([eager.lengths, eager.lengths.new_ones(2)]))
    layer = made.runner.model.model.layers[0].self_attn.attn
    q, k, v = (torch.randn(5, heads, 32).bfloat16() for heads in (4, 2, 2))
    with torch.inference_mode():
        out = backend.forward_decode(q, k, v, layer, padded)
        backend.init_forward_metadata(forward)
        expected = backend.forward_decode(q[:3], k[:3], v[:3], layer, forward)
    assert_same_bits(out[:3], expected)
    assert out.isfinite().all()
    padded.forward_mode = made.parts.ForwardBatch and type(forward.forward_mode).EXTEND
    with pytest.raises(RefusedError, match="a CUDA graph of EXTEND"):
        backend.init_forward_metadata_out_graph(padded)


@pytest.mark.parametrize("page", [1, 16, 32])
def test_a_prompt_in_pieces(page: int, start: Start) -> None:
    """Its last token has the same logits, whatever pages hold, and however many tokens come at once."""
    made = start("qwen3", page_size=page)
    (prompt,) = prompts(1, 70, 70)
    with torch.inference_mode():
        _, whole = made.step(made.batch([made.request(prompt)]))
        whole = whole.next_token_logits.clone()
        made.runner.req_to_token_pool.clear()
        made.runner.token_to_kv_pool_allocator.clear()
        req = made.request(prompt)
        for end in (32, 64, 70):
            req.set_extend_range(len(req.prefix_indices), end)
            _, output = made.step(made.batch([req]))
            table = made.runner.req_to_token_pool.req_to_token
            req.prefix_indices = table[req.req_pool_idx, :end].to(torch.int64)
    assert_same_bits(output.next_token_logits, whole)
