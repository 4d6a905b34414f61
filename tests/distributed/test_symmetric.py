"""What ``Space`` asks of its kernels, without GPUs: those are mocks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from samebits.distributed import _symmetric
from samebits.distributed._symmetric import Space


@pytest.fixture
def space() -> Any:
    """The memory of rank 1 of four, for inboxes and for parts of up to a million elements."""
    found: Any = object.__new__(Space)
    found._rank, found._ranks, found._inbox, found._part = 1, 4, (1 << 20) // 3 // 4 * 4, 1 << 20
    found._kernels, found._data, found._memory = mock.Mock(), "data", "memory"
    found._group, found._device, found._timeout, found._control = mock.Mock(), mock.Mock(index=0), 1, ()
    with mock.patch.object(Space, "_in_order"), mock.patch("torch.cuda.is_current_stream_capturing"):
        yield found


@pytest.mark.parametrize(("count", "at_once"), [(349_524, True), (349_525, False)])
def test_inboxes_hold_what_is_sent_to_them(space: Any, count: int, at_once: bool) -> None:
    """An inbox has a multiple of four elements, which is less than a third of all."""
    space.all_reduce(torch.empty(count), None, torch.bfloat16)
    assert space._kernels.add_small.called == at_once
    assert space._kernels.add_parts.called != at_once


def test_memory_that_could_not_grow_is_as_before(space: Any) -> None:
    with mock.patch.object(Space, "_map", side_effect=RuntimeError("out of memory")):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="out of memory"):
                space._grow(1 << 24)
    assert (space._part, space._data, space._memory) == (1 << 20, "data", "memory")


def test_parts_of_no_features(space: Any) -> None:
    found = space.reduce_scatter(torch.empty(8, 0), torch.empty(0), torch.bfloat16)
    assert found.shape == (2, 0)
    assert not space._kernels.add_parts.called


def test_the_memory_is_that_of_the_tensors_device() -> None:
    group = object()
    with (
        mock.patch.object(_symmetric, "group_of", return_value=group),
        mock.patch.object(_symmetric, "capturing", return_value=False),
        mock.patch.object(_symmetric, "_spaces", {}),
        mock.patch.object(_symmetric, "_make", side_effect=lambda group, device: device),
        mock.patch("torch.cuda.device"),
    ):
        for index in (0, 1, 0):
            x: Any = mock.Mock(is_cuda=True, device=f"cuda:{index}", get_device=lambda index=index: index)
            assert _symmetric.space_of("name", x) == f"cuda:{index}"
