"""Runs a benchmark: python -m benchmarks NAME [OPTIONS]. Without a name it lists them."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

HERE = Path(__file__).parent


def programs() -> dict[str, Path]:
    """The files that have a ``main``, by name."""
    found = {path.stem: path for path in HERE.glob("*.py")}
    found |= {path.parent.name: path for path in HERE.glob("*/__main__.py")}
    del found["__main__"]
    return {name: path for name, path in sorted(found.items()) if "\ndef main(" in path.read_text()}


def main() -> None:
    known = programs()
    if len(sys.argv) < 2 or sys.argv[1] not in known:
        for name, path in known.items():
            text = ast.get_docstring(ast.parse(path.read_text())) or ""
            print(f"{name:22} {text.partition(chr(10))[0]}")
        sys.exit(2)
    name = sys.argv.pop(1)
    sys.argv[0] = f"python -m benchmarks {name}"
    module = f"benchmarks.{name}.__main__" if known[name].stem == "__main__" else f"benchmarks.{name}"
    importlib.import_module(module).main()


if __name__ == "__main__":
    main()
