from __future__ import annotations

import pytest
from hypothesis import settings

from samebits import backends
from samebits.backends.cuda import runtime

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
    status = runtime.status() if marked else None
    if status is not None and not status.available:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=f"no GPU: {status.reason}"))
