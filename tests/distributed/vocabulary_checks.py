"""Checks of a vocabulary split over ranks that run on every rank: ``test_vocabulary.py``."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import samebits
from samebits import FMA, TENSOR_CORE
from samebits.distributed import vocab_parallel_embedding, vocab_parallel_linear_logp
from samebits.ops import linear_logp
from samebits.ops.embedding import embedding
from samebits.testing import assert_same_bits, values
from tests.distributed.linear_checks import leaf, part
from tests.support.ranks import device, place


def tokens(shape: tuple[int, ...], vocabulary: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(7)).to(device(), dtype)


def drawn(*given: Any) -> Tensor:
    return place(values(*given))


def check_embedding() -> None:
    vocabulary = 48
    for dtype, shape, ids_dtype, padding in (
        (torch.bfloat16, (3, 16), torch.int64, None),
        (torch.float32, (40,), torch.int32, 5),
        (torch.float16, (2, 8, 3), torch.int64, 0),
    ):
        ids = tokens(shape, vocabulary, ids_dtype)
        weight = drawn("special", (vocabulary, 7), dtype, 3)
        grad = drawn("cancel", (*shape, 7), dtype, 4)
        want = embedding(ids, whole := leaf(weight), padding)
        want.backward(grad)
        assert whole.grad is not None
        for dim in (None, 0) if shape[0] % 8 == 0 else (None,):
            y = vocab_parallel_embedding(
                ids, mine := leaf(part(weight, 0)), padding_idx=padding, sequence_dim=dim
            )
            assert_same_bits(y, want if dim is None else part(want, dim), f"{dtype}")
            y.backward(grad if dim is None else part(grad, dim))
            assert mine.grad is not None
            assert_same_bits(mine.grad, part(whole.grad, 0), f"{dtype}: gradient")
    ids = tokens((2, 16), vocabulary)
    weight = drawn("normal", (vocabulary, 6), torch.bfloat16, 3)
    assert_same_bits(
        vocab_parallel_embedding(ids, part(weight, 0), sequence_dim=1), part(torch.embedding(weight, ids), 1)
    )


def check_log_probabilities() -> None:
    ranks = dist.get_world_size()
    for dtype, contract, vocabulary, features, entropy, temperature in (
        (torch.bfloat16, TENSOR_CORE.segmented(8), 128 * 8 * 3, 48, True, 1.0),
        (torch.bfloat16, None, 128 * 16 + 32, 33, False, 0.7),  # blocks that lie on two ranks
        (torch.float32, FMA.segmented(16), 128 * 17 + 16, 24, True, 1.5),
        (torch.float16, None, 128 * 24, 17, False, 1.0),
    ):
        hidden = drawn("normal", (3, 7, features), dtype, 1)
        weight = drawn("normal", (vocabulary, features), dtype, 2)
        bias = drawn("normal", (vocabulary,), dtype, 3)
        target = tokens((3, 7), vocabulary)
        target[0, :3], target[1, 0], target[1, 1], target[1, 2] = -100, 0, vocabulary - 1, vocabulary // 2
        grads = [drawn("normal", (3, 7), torch.float32, seed) for seed in (4, 5)]
        options: dict[str, Any] = {"temperature": temperature, "return_entropy": entropy}

        def backward(results: Any, grads: list[Tensor] = grads) -> list[Tensor]:
            results = results if isinstance(results, tuple) else (results,)
            torch.autograd.backward(results, grads[: len(results)])
            return [*results]

        default = (FMA if dtype == torch.float32 else TENSOR_CORE).segmented(8)
        given = leaf(hidden), leaf(weight), leaf(bias)
        want = backward(
            samebits.linear_logp(*given[:2], target, given[2], contract=contract or default, **options)
        )
        for logits in (3 << 27, vocabulary * 5):  # all tokens at once, or some
            mine = leaf(hidden), leaf(part(weight, 0)), leaf(part(bias, 0))
            with mock.patch.object(linear_logp, "_STATISTICS", logits):
                got = backward(
                    vocab_parallel_linear_logp(*mine[:2], target, mine[2], contract=contract, **options)
                )
            for a, b in zip(got, want, strict=True):
                assert_same_bits(a, b, f"{contract}")
            for t, whole, name in zip(mine, given, ("hidden", "weight", "bias"), strict=True):
                assert t.grad is not None
                assert whole.grad is not None
                expected = whole.grad if name == "hidden" else part(whole.grad, 0)
                assert_same_bits(t.grad, expected, f"{contract}: gradient of {name}, {ranks} ranks")


def check_parts_of_the_backward() -> None:
    """Gradients of logits in parts that are smaller than a segment, and larger."""
    vocabulary = 128 * 8 * 2
    hidden, weight = (drawn("normal", (n, 16), torch.bfloat16, n) for n in (9, vocabulary))
    target = tokens((9,), vocabulary)
    given = leaf(hidden), leaf(weight)
    samebits.linear_logp(*given, target, contract=TENSOR_CORE.segmented(8)).sum().backward()
    for logits in (9 * 128, 9 * 512):
        mine = leaf(hidden), leaf(part(weight, 0))
        with mock.patch.object(linear_logp, "_GRAD_LOGITS", logits):
            vocab_parallel_linear_logp(*mine, target).sum().backward()
        for t, whole, dim in zip(mine, given, (None, 0), strict=True):
            assert t.grad is not None
            assert whole.grad is not None
            assert_same_bits(t.grad, whole.grad if dim is None else part(whole.grad, 0))


def check_traced() -> None:
    if dist.get_world_size() > 2:
        return  # tracing takes each process seconds

    def model(ids: Tensor, table: Tensor, target: Tensor) -> Tensor:
        return vocab_parallel_linear_logp(vocab_parallel_embedding(ids, table) * 2, table, target)

    table = part(drawn("normal", (1024, 16), torch.float32, 3), 0)
    ids, target = tokens((4, 5), 1024), tokens((4, 5), 1000)
    results = []
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        y = run(ids, mine := leaf(table), target)
        y.sum().backward()
        results.append((y, mine.grad))
    for a, b in zip(*results, strict=True):
        assert a is not None
        assert b is not None
        assert_same_bits(a, b)


def check_refusals() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    weight, hidden = place(torch.zeros(2048 // ranks, 8)), place(torch.zeros(2, 8))
    target = place(torch.tensor([1, 2048]))
    with pytest.raises(IndexError, match=r"\[0, 2048\), got 2048"):
        vocab_parallel_linear_logp(hidden, weight, target)
    if not target.is_cuda:  # where it ends in a device assert
        with pytest.raises(IndexError):
            vocab_parallel_embedding(target, weight)
    with pytest.raises(IndexError, match="padding_idx"):
        vocab_parallel_embedding(target, weight, padding_idx=-1)
    with pytest.raises(ValueError, match="D must be equal"):
        vocab_parallel_linear_logp(hidden[:, :4], weight, target)
    if ranks > 1:
        with pytest.raises(ValueError, match="of 256 entries or more, got 100"):
            vocab_parallel_linear_logp(hidden, weight[:100], target)
        with pytest.raises(ValueError, match="differ from rank 0"):
            vocab_parallel_linear_logp(hidden, weight, target, temperature=2.0 + rank)
        with pytest.raises(ValueError, match=r"sequence_dim|multiple of"):
            vocab_parallel_embedding(target.new_zeros(3), weight, sequence_dim=0)
