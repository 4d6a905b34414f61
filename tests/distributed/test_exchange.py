"""Sums over ranks, at 1, 2, 4 and 8 processes; and what happens to others when one ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from samebits.distributed import ordered_all_reduce, ordered_reduce_scatter
from samebits.testing import assert_same_bits
from tests.support.ranks import SIZES, needs_gloo, run

CHECKS = "tests.distributed.exchange_checks"
PLACES = [
    *(("cpu", ranks) for ranks in SIZES),
    *(pytest.param("cuda", ranks, marks=pytest.mark.gpu) for ranks in SIZES),
]


@needs_gloo
@pytest.mark.parametrize(("device", "ranks"), PLACES)
def test_on_ranks(device: str, ranks: int, tmp_path: Path) -> None:
    run(CHECKS, device, ranks, tmp_path)


def test_a_process_alone_needs_no_group() -> None:
    x = torch.randn(3, 4)
    assert_same_bits(ordered_all_reduce(x), x)
    assert_same_bits(ordered_reduce_scatter(x, out_dtype=torch.bfloat16), x.bfloat16())


@pytest.mark.long
def test_the_package_is_loaded_only_when_it_is_used() -> None:
    code = """
import sys, samebits
assert not any(name.startswith("samebits.distributed") for name in sys.modules)
assert samebits.distributed.ordered_all_reduce
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.long
@needs_gloo
def test_a_rank_that_ends_is_an_error_on_the_others(tmp_path: Path) -> None:
    code = """
import datetime, os, sys, torch, torch.distributed as dist
from samebits.distributed import ordered_all_reduce
child = os.fork()
rank, store = 0 if child else 1, sys.argv[1]
dist.init_process_group(
    "gloo", "file://" + store, timeout=datetime.timedelta(seconds=10), rank=rank, world_size=2
)
ordered_all_reduce(torch.ones(4))
if rank == 1:
    os._exit(0)
try:
    ordered_all_reduce(torch.ones(4))
except RuntimeError:
    os._exit(7 + os.waitpid(child, 0)[1])
"""
    command = [sys.executable, "-c", code, str(tmp_path / "store")]
    assert subprocess.run(command, check=False, timeout=120).returncode == 7


@pytest.mark.long
@needs_gloo
def test_a_group_of_a_name_that_comes_back_is_another_group(tmp_path: Path) -> None:
    """What ranks agreed on before ``destroy_process_group`` is compared again."""
    code = """
import datetime, os, sys, torch, torch.distributed as dist
from samebits.distributed._groups import agree, name_of
child = os.fork()
rank, names = 0 if child else 1, []
for store in sys.argv[1:]:
    timeout = datetime.timedelta(seconds=10)
    dist.init_process_group("gloo", "file://" + store, timeout=timeout, rank=rank, world_size=2)
    names.append(name_of("test", None))
    try:
        agree("test", names[-1], torch.device("cpu"), contract=rank * (len(names) - 1))
    except ValueError:
        names.append("differ")
    dist.destroy_process_group()
right = names[0] == names[1] and names[2:] == ["differ"]
os._exit(7 * right + (os.waitpid(child, 0)[1] >> 8 if child else 0))
"""
    command = [sys.executable, "-c", code, *(str(tmp_path / store) for store in "ab")]
    assert subprocess.run(command, check=False, timeout=120).returncode == 14
