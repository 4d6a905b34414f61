"""MkDocs hooks: pages and examples that live outside of docs, and docstring roles as plain code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

PAGES = {
    "index.md": "README.md",
    "architecture.md": "ARCHITECTURE.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security.md": "SECURITY.md",
}


def on_files(files: Files, config: Any) -> Files:
    root = Path(config.config_file_path).parent
    for page, source in PAGES.items():
        text = (root / source).read_text().replace("](docs/", "](")
        for target, name in PAGES.items():
            text = text.replace(f"]({name})", f"]({target})")
        files.append(File.generated(config, page, content=text))
    for example in (p for p in (root / "examples").iterdir() if p.suffix in (".py", ".ipynb")):
        files.append(File.generated(config, f"examples/{example.name}", abs_src_path=str(example)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    for page, source in PAGES.items():
        markdown = markdown.replace(f"](../{source}", f"]({page}")
    return markdown.replace("](../examples/", "](examples/")


def on_page_content(html: str, **_: Any) -> str:
    return re.sub(r":(?:func|class|attr|meth|mod):(<code>)", r"\1", html)
