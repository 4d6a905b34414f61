"""The Python examples in README and docs run."""

import re
from types import SimpleNamespace

import pytest
import torch

from tests.support import ROOT

PAGES = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES)
def test_python_examples_run(page: str) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    scope = {  # a reader's own
        "model": torch.nn.Linear(8, 4),
        "inputs": torch.randn(3, 8),
        "trainer": SimpleNamespace(train=lambda: None),
    }
    for block in blocks:  # one page is one program
        exec(compile(block, page, "exec"), scope)
