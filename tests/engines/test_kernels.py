"""The kernels that an engine makes ready before it serves."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from samebits.backends.cuda import runtime
from samebits.backends.cuda.compiler import KernelSpec
from samebits.engines import kernels
from samebits.ops.linear import linear
from tests.support.fake_gpu import fake_gpu


@pytest.mark.parametrize("most", [1, 100, 128, 129, 1000, 2049, 8192, 16384])
def test_row_counts(most: int) -> None:
    counts = kernels.row_counts(most)
    assert counts == sorted(set(counts))
    assert (counts[0], counts[-1]) == (1, most)


@pytest.mark.long
@pytest.mark.parametrize(("n", "k"), [(1024, 2048), (2048, 512)])
def test_they_meet_the_schedule_of_every_number_of_rows(n: int, k: int) -> None:
    most = 700
    needed: dict[int, frozenset[KernelSpec]] = {}

    def load(spec: KernelSpec, device: int) -> None:
        raise _Needed([spec])

    class _Needed(BaseException):
        pass

    def tell(specs: list[KernelSpec], device: int) -> None:
        raise _Needed(specs)

    allocate = SimpleNamespace(_empty_strided_cuda=lambda *of: torch.empty_strided(*of[:2], dtype=of[2]))
    w, x = torch.zeros(n, k, dtype=torch.bfloat16), torch.zeros(most, k, dtype=torch.bfloat16)
    with (
        fake_gpu(),
        mock.patch.object(runtime, "load", load),
        mock.patch.object(runtime, "_allocate", allocate),
        torch.no_grad(),
        runtime.before_loading(tell),
    ):
        for rows in range(1, most + 1):
            with pytest.raises(_Needed) as error:
                linear(x[:rows], w)
            needed[rows] = frozenset(error.value.args[0])
    ready = frozenset().union(*(needed[rows] for rows in kernels.row_counts(most)))
    assert {rows for rows, specs in needed.items() if not specs <= ready} == set()
