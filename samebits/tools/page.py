"""Figures and pages to send to somebody: SVG and HTML without any other file, for light and dark screens."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from samebits._version import __version__
from samebits.remedies import see
from samebits.tools.text import ToolError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

THEIRS, OURS, QUIET = "#d9534f", "#1a9c8b", "#8a8a8a"
"""Colours that can be told from white and from black."""
_INK = "#010203"  # what becomes the colour of the text around
_THEMES = (
    "{0} {{ color: #1f2328; background: #ffffff; }}"
    " @media (prefers-color-scheme: dark) {{ {0} {{ color: #e6e6e6; background: #16191d; }} }}"
)
_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 1rem; max-width: 64rem; }
h1 { font-size: 1.5rem; line-height: 1.2; } h2 { font-size: 1.1rem; margin-top: 2rem; }
svg { width: 100%; height: auto; } figure { margin: 0; overflow-x: auto; } figure svg { min-width: 30rem; }
div { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .8rem .2rem 0; text-align: left; border-bottom: 1px solid #8884; }
.verdict { font-weight: 600; } footer { margin-top: 2rem; opacity: .75; font-size: .85rem; }
"""


@dataclass(frozen=True)
class Table:
    """A heading, the names of columns, and rows of text."""

    title: str
    head: Sequence[str]
    rows: Iterable[Sequence[str]]


def figure(height: float = 3.6) -> Figure:
    """An empty figure in the style of a page. Raises an error if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ToolError(
            "a plot needs matplotlib: pip install '.[bench]' in a clone of samebits" + see("plots")
        ) from error
    return Figure(figsize=(9, height), layout="constrained")


def check(path: Path) -> None:
    """Raise an error if matplotlib is missing, or cannot write such a file."""
    formats = sorted(figure().canvas.get_supported_filetypes())
    ending = path.suffix[1:].lower()
    if ending and ending not in formats:  # without an ending, matplotlib appends one
        raise ToolError(f"plot {path}: matplotlib cannot write {ending}, only {', '.join(formats)}")


def save(drawn: Figure, path: str | Path) -> None:
    """Write a figure. An SVG follows the reader's theme."""
    if Path(path).suffix.lower() != ".svg":
        drawn.savefig(path)
        return
    style = f"<style>{_THEMES.format('svg')}</style>"
    text = re.sub(r"(<svg\b[^>]*>)", lambda m: m[1] + style, _svg(drawn), count=1)
    Path(path).write_text(text, encoding="utf-8")


def write(path: Path, title: str, verdict: str, drawn: Figure, tables: Iterable[Table], notes: str) -> None:
    """Write a page of one figure and some tables, in one file."""
    e = html.escape
    parts = [f"<h1>{e(title)}</h1><p class=verdict>{e(verdict)}</p><figure>{_svg(drawn)}</figure>"]
    for table in tables:
        rows = "".join(f"<tr>{''.join(f'<td>{e(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
        head = "".join(f"<th>{e(name)}</th>" for name in table.head)
        parts.append(f"<h2>{e(table.title)}</h2><div><table><tr>{head}</tr>{rows}</table></div>")
    path.write_text(
        "<!doctype html><html lang=en><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>{e(title)}</title><style>{_THEMES.format('body')}{_STYLE}</style>"
        f"{''.join(parts)}<footer>{e(notes)} Written by samebits {__version__}.</footer></html>\n",
        encoding="utf-8",
    )


def _svg(drawn: Figure) -> str:
    """The figure as an element, in the colour of the text around it."""
    import matplotlib

    drawn.patch.set_alpha(0)
    for axes in drawn.axes:
        axes.patch.set_alpha(0)
        axes.grid(color=QUIET, alpha=0.3, lw=0.5)
        axes.set_axisbelow(True)
        for item in (axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label, *axes.texts):  # type: ignore[attr-defined]
            item.set_color(_INK)
        axes.tick_params(which="both", colors=_INK)
        for side, spine in axes.spines.items():
            spine.set_color(_INK)
            spine.set_visible(side in ("left", "bottom"))
        legend = axes.get_legend()
        for text in legend.get_texts() if legend else ():
            text.set_color(_INK)
    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "samebits"}):
        drawn.savefig(file, format="svg", metadata={"Date": None})
    drawing = file.getvalue()
    return drawing[drawing.index("<svg") :].replace(_INK, "currentColor")
