"""Options, the profile of Hypothesis, and what tests on a GPU need."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import Tensor

from samebits import backends
from samebits.backends import replay
from samebits.backends.cuda import devices
from samebits.ops import _grouped, _products
from samebits.ops._operator import Operator
from samebits.testing import assert_same_bits
from tests.support import sampling

os.environ["SAMEBITS_TUNED"] = ""  # tests choose by the cost model, whatever was tuned on this machine
# Tests start many processes. Each would compile the package again, and a worker of xdist all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Examples are drawn from a fixed seed, so that a red run stays red; deadlines would time the first compile.
settings.register_profile("samebits", deadline=None, derandomize=True, max_examples=40, print_blob=True)
settings.load_profile("samebits")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backend", choices=("cuda", "triton"), help="what computes the operations on GPU tensors"
    )
    parser.addoption(
        "--replay",
        action="store_true",
        help="on a GPU, also replay every operator, and compare bits",
    )
    parser.addoption(
        "--nightly",
        action="store_true",
        help="also run what is marked nightly, and every case of what is marked sampled",
    )


def pytest_configure(config: pytest.Config) -> None:
    """The first option holds for every thread and leaves CPU tensors alone, so it is no `use_backend`.

    Workers of xdist share the CPUs. With as many threads as CPUs in each of them, threads would wait for each
    other, and a test take up to three times as long. Tests of what threads change set their number.
    """
    config.add_cleanup(gc.unfreeze)  # else objects are not freed when Python ends: libraries report leaks
    if workers := getattr(config.option, "numprocesses", None):
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
    if config.getoption("--backend"):
        backends.AUTOMATIC = (config.getoption("--backend"),)
    if config.getoption("--replay"):
        assert replay.available, "the extension was not built: no C compiler"
        _products._linear_gradients_on_gpu = replayed_too(_products._linear_gradients_on_gpu)
        _grouped._rows_gradients_on_gpu = replayed_too(_grouped._rows_gradients_on_gpu)
        for x in gc.get_objects():
            if isinstance(x, Operator):
                x._cuda = replayed_too(x._cuda)


def replayed_too(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, whose third result of the same arguments, a replay into poisoned memory, is compared too."""

    def run(*args: Any) -> Any:
        first = call(*args)
        if torch.cuda.is_current_stream_capturing():
            return first
        recorded = call(*args)
        poison = [torch.full_like(t, torch.nan) for t in floats(recorded)]
        del recorded, poison  # the replay allocates their memory
        for t, want in zip(floats(call(*args)), floats(first), strict=True):
            assert_same_bits(t, want, "a replay")
        return first

    def floats(result: Any) -> list[Tensor]:
        results = result if isinstance(result, tuple) else (result,)
        return [t for t in results if t is not None and t.is_floating_point()]

    return run if hasattr(call, "recipes") else call


def pytest_collection() -> None:
    """Tests are two million objects, through which the garbage collector would go again and again."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Nor does it look at them afterwards: a search took a second, and many tests ask for one."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before ``-m`` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without ``--nightly``, a sample runs. The first case of each test is ``quick``, but for long ones.

    Long tests run first. Without a GPU, tests marked ``gpu`` are skipped, with the reason.
    """
    if not config.getoption("--nightly"):
        left = sampling.left_for_the_night(items)
        config.hook.pytest_deselected(items=[item for item in items if item in left])
        items[:] = [item for item in items if item not in left]
    seen = set()
    for item in items:
        test = item.nodeid.partition("[")[0]
        if test not in seen and not any(map(item.get_closest_marker, ("gpu", "long"))):
            seen.add(test)
            item.add_marker("quick")
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    for item in items:
        if item.config.getoption("--replay") and item.get_closest_marker("counts_calls"):
            item.add_marker(pytest.mark.skip(reason="--replay repeats the calls that it counts"))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    status = devices.status() if marked else None
    if status is not None and not status.available:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=f"no GPU: {status.reason}"))


@pytest.fixture(autouse=True)
def _cuda_context(request: pytest.FixtureRequest) -> Iterator[None]:
    """The test that breaks the process's CUDA context is named, and those after it are not blamed for it.

    Python collects no garbage in a test: a CUDA graph among it, destroyed while the test captures another,
    would end that capture.
    """
    if request.node.get_closest_marker("gpu") is None or not torch.cuda.is_available():
        yield
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        pytest.skip(f"an earlier test broke the CUDA context: {error}")
    gc.disable()
    yield
    gc.enable()
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        if "PYTEST_XDIST_WORKER" in os.environ:  # it would skip the tests that are left; a new one runs them
            os._exit(1)
        pytest.fail(f"this test broke the CUDA context: {error}")
