"""Targets out of range: refused by name, and NaN where nobody can wait for the answer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import samebits
from samebits.testing import assert_same_bits, values
from tests.support.devices import DEVICES


def test_compiled_with_targets_of_a_number_known_later() -> None:
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="eager")
    def f(logits: Tensor, target: Tensor, keep: Tensor) -> Tensor:
        some = keep.nonzero()[:, 0]
        return samebits.logp(logits[some], target[some])

    logits, target = values("normal", (6, 40), torch.float32, 0, "cpu"), torch.arange(6)
    keep = torch.tensor([True, False, True, True, False, False])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        got = f(logits, target, keep)
    assert_same_bits(got, samebits.logp(logits[keep], target[keep]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [1, 1000, 5000, 70_000])
def test_the_first_of_many_targets_out_of_range_is_named(device: str, count: int) -> None:
    """A GPU's answer comes from several blocks, which stride over the targets, into slots that come round."""
    vocabulary, generator = 40, torch.Generator().manual_seed(count)
    target = torch.randint(vocabulary, (count, 2), generator=generator)
    logits = torch.zeros(1, vocabulary, device=device).expand(count, vocabulary)
    for first, second in ((count - 1, count - 1), (count // 2, count - 1), (count // 3, count // 2)):
        wrong = target.clone()
        wrong[second, 0], wrong[first, 0] = -1, vocabulary
        strided = wrong.to(device)[:, 0]  # beside which lie others
        with pytest.raises(IndexError, match=f"got {vocabulary} at position {first}$"):
            samebits.logp(logits, strided)
    if device != "cpu" and count == 1:
        right = target.to(device)[:, 0]
        assert all(samebits.logp(logits, right).isfinite().all() for _ in range(300))


@pytest.mark.gpu
def test_targets_are_checked_whatever_the_default_device() -> None:
    logits, target = torch.zeros(3, 40, device="cuda"), torch.tensor([0, 40, 1], device="cuda")
    with torch.device("cuda"), pytest.raises(IndexError, match="got 40 at position 1"):
        samebits.logp(logits, target)


@pytest.mark.gpu
def test_cuda_refuses_targets_out_of_range() -> None:
    x, weight = (values("normal", s, torch.bfloat16, 0, "cuda") for s in ((2, 3, 64), (300, 64)))
    good = torch.tensor([[0, 299, -100], [5, 6, 7]], device="cuda")
    for wrong in (300, -1, 2**40):
        target = good.clone()
        target[1, 0] = wrong
        said = f"got {wrong} at position .1, 0."
        with pytest.raises(IndexError, match=said):
            samebits.linear_logp(x, weight, target)
        with pytest.raises(IndexError, match=said):
            samebits.logp(x @ weight.T, target)
    assert samebits.linear_logp(x, weight, good).isfinite().all()


@pytest.mark.gpu
def test_cuda_graphs_take_targets_out_of_range() -> None:
    x, weight = (
        values("normal", s, torch.bfloat16, 0, "cuda").requires_grad_() for s in ((6, 64), (300, 64))
    )
    target = torch.tensor([0, 299, -100, 5, 6, 7], device="cuda")

    def f() -> tuple[Tensor, ...]:
        out, entropy = samebits.linear_logp(x, weight, target, return_entropy=True)
        return (out, *torch.autograd.grad((out + entropy).sum(), (x, weight)))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        f()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = f()
    target.copy_(torch.tensor([1, 300, -100, -1, 2**40, 298]))
    graph.replay()
    good = torch.tensor([True, False, True, False, False, True])
    assert torch.equal(captured[0].isnan().cpu(), ~good)
    target[~good.cuda()] = -100
    want = f()
    assert_same_bits(captured[0][good.cuda()], want[0][good.cuda()])
    assert_same_bits(captured[1], want[1])
    assert_same_bits(captured[2], want[2])


class Marked(Tensor):
    """With data of its own, and nothing to say about what becomes of it."""


def test_targets_of_a_subclass_are_looked_at() -> None:
    x, weight, target = torch.ones(2, 3), torch.ones(5, 3), torch.tensor([0, 5]).as_subclass(Marked)
    for call in (lambda: samebits.linear_logp(x, weight, target), lambda: samebits.logp(x, target)):
        with pytest.raises(IndexError, match="position 1"):
            call()


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (torch.zeros(5, 3, dtype=torch.bfloat16), "expected a dense float32 tensor"),
        (torch.zeros(3, 5), "expected shape"),
        (None, "memory that weight shares"),
    ],
)
def test_main_grad_is_looked_at_again_before_it_is_written(data: Tensor | None, match: str) -> None:
    x, weight, main_grad = torch.ones(2, 3), torch.ones(5, 3, requires_grad=True), torch.zeros(5, 3)
    before = weight.detach().clone()
    out = samebits.linear_logp(x, weight, torch.tensor([0, 4]), main_grad=main_grad)
    main_grad.data = weight.data if data is None else data
    with pytest.raises((TypeError, ValueError), match=match):
        out.sum().backward()
    assert_same_bits(weight, before)


def test_compiled_code_is_refused_a_main_grad_that_shares_memory() -> None:
    x, weight = torch.ones(2, 3), torch.ones(5, 3, requires_grad=True)
    run = torch.compile(samebits.linear_logp, backend="aot_eager", fullgraph=True)
    with pytest.raises(ValueError, match="memory that weight shares"):
        run(x, weight, torch.tensor([0, 4]), main_grad=weight.data)


def test_main_grad_of_a_frozen_weight_is_refused() -> None:
    x, weight, main_grad = torch.ones(2, 3, requires_grad=True), torch.ones(5, 3), torch.zeros(5, 3)
    with pytest.raises(ValueError, match="main_grad: expected a weight that requires a gradient"):
        samebits.linear_logp(x, weight, torch.tensor([0, 4]), main_grad=main_grad)
    with torch.no_grad():
        samebits.linear_logp(x, weight, torch.tensor([0, 4]), main_grad=main_grad)
