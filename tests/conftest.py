"""Options, the profile of Hypothesis, and what tests on a GPU need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from samebits import backends
from samebits.backends.cuda import devices

# Examples are drawn from a fixed seed, so that a red run stays red; deadlines would time the first compile.
settings.register_profile("samebits", deadline=None, derandomize=True, max_examples=40, print_blob=True)
settings.load_profile("samebits")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backend", choices=("cuda", "triton"), help="what computes the operations on GPU tensors"
    )


def pytest_configure(config: pytest.Config) -> None:
    """The option holds for every thread and leaves CPU tensors alone, so it is no `use_backend`."""
    if config.getoption("--backend"):
        backends.AUTOMATIC = (config.getoption("--backend"),)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a GPU, tests marked ``gpu`` are skipped, with the reason."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    status = devices.status() if marked else None
    if status is not None and not status.available:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=f"no GPU: {status.reason}"))


@pytest.fixture(autouse=True)
def _cuda_context(request: pytest.FixtureRequest) -> Iterator[None]:
    """The test that breaks the process's CUDA context is named, and those after it are not blamed for it."""
    if request.node.get_closest_marker("gpu") is None or not torch.cuda.is_available():
        yield
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        pytest.skip(f"an earlier test broke the CUDA context: {error}")
    yield
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        pytest.fail(f"this test broke the CUDA context: {error}")
