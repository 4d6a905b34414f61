"""Errors link to sections of docs/troubleshooting.md, and those quote errors that exist."""

from __future__ import annotations

import ast
import re

import pytest

from samebits.remedies import PAGE, see
from tests.support import ROOT

TEXT = (ROOT / PAGE).read_text()
SECTIONS = {
    title: re.findall(r"^> (.+)$", body, re.MULTILINE)
    for title, body in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", TEXT, re.DOTALL | re.MULTILINE)
}
TREES = [ast.parse(path.read_text()) for path in sorted((ROOT / "samebits").rglob("*.py"))]


def messages() -> list[str]:
    """All strings of the package, with an ellipsis for what an f-string fills in."""
    found = []
    for node in (node for tree in TREES for node in ast.walk(tree)):
        if isinstance(node, ast.JoinedStr):
            parts = (str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values)
            found.append("".join(parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


def test_links_of_errors_lead_to_a_section() -> None:
    markdown = pytest.importorskip(
        "markdown", reason="the docs extra is not installed: pip install '.[docs]'"
    )
    ids = set(re.findall(r'<h2 id="([^"]+)"', markdown.Markdown(extensions=["toc"]).convert(TEXT)))
    calls = [node for tree in TREES for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = [call.args[0] for call in calls if isinstance(call.func, ast.Name) and call.func.id == "see"]
    anchors = {ast.literal_eval(name) for name in named}
    assert len(anchors) > 8
    assert anchors - ids == set()


def test_a_link_is_the_page_of_the_documentation() -> None:
    site = re.search(r"^site_url: (\S+)", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    page = "docs/troubleshooting.md" if site is None else f"{site[1].rstrip('/')}/troubleshooting/"
    assert see("fp8") == f" (see {page}#fp8)"


@pytest.mark.parametrize("section", [title for title in SECTIONS if title != "Without an error"])
def test_sections_quote_errors_that_exist(section: str) -> None:
    said = messages()
    assert SECTIONS[section], "a section begins with an error"
    for quote in SECTIONS[section]:
        pattern = re.compile(".*".join(map(re.escape, quote.strip("… ").split("…"))))
        assert any(pattern.search(text) for text in said), quote
