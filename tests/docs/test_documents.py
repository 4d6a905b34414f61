"""README and docs: their Python examples run, and the files and modules that they name exist."""

import re
from types import SimpleNamespace

import pytest
import torch

from tests.support import ROOT

PAGES = [
    *("README.md", "CONTRIBUTING.md", "tests/README.md"),
    *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md")),
]
NAMED_FROM = ("", "samebits/backends/cuda", "samebits/backends/cuda/kernels", "samebits/backends")
"""Folders that a path in a document may be relative to."""


@pytest.mark.parametrize("page", PAGES)
def test_python_examples_run(page: str) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    scope = {  # a reader's own
        "model": torch.nn.Linear(8, 4),
        "inputs": torch.randn(3, 8),
        "trainer": SimpleNamespace(train=lambda: None),
    }
    for block in blocks:  # one page is one program
        if "import transformers" in block:
            pytest.importorskip("transformers")
        exec(compile(block, page, "exec"), scope)


@pytest.mark.parametrize("page", PAGES)
def test_files_and_modules_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    modules = re.findall(r"python -m (benchmarks \w+|tests[\w.]*)", text)
    paths = re.findall(r"`([\w./]+\.(?:py|cuh?|npz|sh))\b[^`]*`|\bbash ([\w./]+\.sh)", text)
    files = [re.sub("[ .]", "/", m) for m in modules]
    files = [f"{f}/__main__.py" if (ROOT / f).is_dir() else f"{f}.py" for f in files]
    named = [one or other for one, other in paths] + files
    assert [path for path in named if not any((ROOT / d / path).exists() for d in NAMED_FROM)] == []


@pytest.mark.parametrize("page", [*PAGES, "ARCHITECTURE.md", "CHANGELOG.md", "SECURITY.md"])
def test_prose_fits_128_columns(page: str) -> None:
    """Not so tables, code, pictures, and what ``benchmarks.tables`` writes."""
    text = re.sub(r"<!-- begin: .*?<!-- end: ", "", (ROOT / page).read_text(), flags=re.DOTALL)
    text = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)
    lines = (line for line in text.splitlines() if not line.lstrip().startswith(("|", "!")))
    assert [line for line in lines if len(line) > 128] == []


@pytest.mark.parametrize(
    "words",
    [
        *(
            "train-inference mismatch",
            "training-inference mismatch",
            "importance ratio",
            "importance sampling",
        ),
        *("KL spike", "nondeterminism", "batch size changes the output", "off-policy", "bitwise consistent"),
        *("reproducibility", "determinism", "rollout"),
    ],
)
def test_a_page_has_the_words_that_people_search_for(words: str) -> None:
    """The site's search splits at spaces and hyphens, and knows no stems."""
    pages = [(ROOT / page).read_text().lower() for page in PAGES if page.startswith("docs/")]
    wanted = set(re.split(r"[\s-]+", words.lower()))
    assert any(wanted <= set(re.findall(r"\w+", page)) for page in pages)
