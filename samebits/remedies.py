"""The ends of errors that many meet: where the documentation says what to do."""

from __future__ import annotations

__all__ = ["see"]

PAGE = "docs/troubleshooting.md"
"""The page's file in a clone. (Once ``mkdocs.yml`` has a ``site_url``: its address there.)"""


def see(anchor: str) -> str:
    """The last words of an error's message: a link to a section of the page."""
    return f" (see {PAGE}#{anchor})"
