"""Errors link to sections of docs/troubleshooting.md, and those quote errors that exist."""

from __future__ import annotations

import ast
import functools
import itertools
import re

import pytest

from samebits.remedies import PAGE, see
from tests.support import ROOT

TEXT = (ROOT / PAGE).read_text()
SECTIONS = {
    title: re.findall(r"^> (.+)$", body, re.MULTILINE)
    for title, body in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", TEXT, re.DOTALL | re.MULTILINE)
}
TREES = [
    ast.parse(path.read_text())
    for folder in ("samebits", "native/samebits_native")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
CONSTANTS = {
    ast.unparse(node.targets[0]): node.value
    for tree in TREES
    for node in tree.body
    if isinstance(node, ast.Assign) and len(node.targets) == 1
}


def said(node: ast.expr) -> str:
    """What an expression says: an ellipsis stands for what is filled in, and ``(see #anchor)`` for a link."""
    match node:
        case ast.JoinedStr(values=parts):
            return "".join(map(said, parts))
        case ast.FormattedValue(value=ast.Name(id=name)) if name in CONSTANTS:
            return said(CONSTANTS[name])
        case ast.Constant(value=str(text)):
            return text.replace(f"(see {PAGE}#", "(see #")
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return said(left) + said(right)
        case ast.Call(func=ast.Name(id="see"), args=[ast.Constant(value=anchor)]):
            return f" (see #{anchor})"
        case ast.Call(args=parts):  # of an error, or of what warns
            return "".join(map(said, parts))
    return "…"


def anchors() -> dict[str, str]:
    """The anchors of the sections, by their titles."""
    markdown = pytest.importorskip(
        "markdown", reason="the docs extra is not installed: pip install '.[docs]'"
    )
    html = markdown.Markdown(extensions=["toc"]).convert(TEXT)
    return {title: anchor for anchor, title in re.findall(r'<h2 id="([^"]+)">([^<]+)<', html)}


def test_links_of_errors_lead_to_a_section() -> None:
    calls = [node for tree in TREES for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = [call.args[0] for call in calls if isinstance(call.func, ast.Name) and call.func.id == "see"]
    linked = {ast.literal_eval(name) for name in named}
    assert linked == {*anchors().values()} - {"without-an-error"}


def test_a_link_is_the_page_of_the_documentation() -> None:
    site = re.search(r"^site_url: (\S+)", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    page = "docs/troubleshooting.md" if site is None else f"{site[1].rstrip('/')}/troubleshooting/"
    assert see("fp8") == f" (see {page}#fp8)"


@functools.cache
def all_said() -> set[str]:
    nodes = itertools.chain.from_iterable(map(ast.walk, TREES))
    return {said(node) for node in nodes if isinstance(node, ast.BinOp | ast.Call)}


@pytest.mark.parametrize("section", [title for title in SECTIONS if title != "Without an error"])
def test_sections_quote_errors_that_link_to_them(section: str) -> None:
    link = re.escape(f" (see #{anchors()[section]})")
    assert SECTIONS[section], "a section begins with an error"
    for quote in SECTIONS[section]:
        pattern = re.compile(".*".join(map(re.escape, quote.strip("… ").split("…"))) + ".*" + link)
        assert any(map(pattern.search, all_said())), quote
