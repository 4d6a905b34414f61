"""How the package's files hang together: what imports what, and how long a file may be."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import samebits

ROOT = Path(samebits.__file__).parent
FILES = {
    ".".join(["samebits", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}
TREES = {module: ast.parse(path.read_text()) for module, path in FILES.items()}

LAYERS = (
    ("_version", "contexts", "contract", "functions", "remedies", "testing"),
    ("backends",),
    ("ops",),
    ("latent", "nn", "mode", "transformers"),
    ("distributed",),
)
"""From below. A module imports from its own layer and those under it. All others, the tools, stand on top:
so does ``prepare``, which can tune."""

BACKENDS = ("cuda", "reference", "triton")
LONGEST = 450


def layer(module: str) -> int:
    part = module.split(".")[1]
    return next((i for i, parts in enumerate(LAYERS) if part in parts), len(LAYERS))


def imported(tree: ast.Module) -> Iterator[str]:
    """The package's modules that a module imports, when it is loaded or later, in a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in FILES)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, ast.unparse(node)
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from {name if name in FILES else str(node.module) for name in names} & FILES.keys()


@pytest.mark.long
def test_every_module_can_be_imported_first() -> None:
    modules = [m for m in FILES if m != "samebits.__main__"]  # which runs the command line
    optional = {
        "triton": "samebits.backends.triton.",
        "sglang": "samebits.sglang.",
        "verl": "samebits.verl",
        "vllm": "samebits.vllm.",
    }
    for needed, own in optional.items():
        if importlib.util.find_spec(needed) is None:
            modules = [m for m in modules if not m.startswith(own)]
    # Python imports the package before any of its modules. So those that it loads are imported first there.
    code = """
import importlib.util, os, sys, warnings
import numba, rich, samebits, torch._dynamo, torch.distributed.tensor.parallel, typer
for other in ("scipy.linalg", "triton.language"):  # what modules load: once, not in each child
    if importlib.util.find_spec(other.partition(".")[0]):
        importlib.import_module(other)
numba.njit("f4(f4)")(lambda x: x)  # loads the rest of numba
warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
failed = []
for module in set(sys.argv[1:]) - sys.modules.keys():
    child = os.fork()
    if child == 0:
        try:
            __import__(module)
        except BaseException as error:
            print(module, repr(error), flush=True)
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        failed.append(module)
sys.exit(bool(failed))
"""
    done = subprocess.run([sys.executable, "-c", code, *modules], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_imports_have_no_circle() -> None:
    package = {"samebits"}  # its own file, which all modules load first
    graph = {m: {*imported(tree)} - package - {m} for m, tree in TREES.items() if m not in package}
    TopologicalSorter(graph).prepare()  # an error names the modules of a circle


def test_imports_point_down() -> None:
    pairs = [(m, name) for m, tree in TREES.items() if m != "samebits" for name in imported(tree)]
    assert [(m, name) for m, name in pairs if name != "samebits" and layer(name) > layer(m)] == []
    assert [m for m, name in pairs if name == "samebits" and layer(m) < len(LAYERS)] == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_backends_do_not_import_each_other(backend: str) -> None:
    others = tuple(f"samebits.backends.{other}" for other in BACKENDS if other != backend)
    mine = {m: tree for m, tree in TREES.items() if m.startswith(f"samebits.backends.{backend}")}
    assert [(m, name) for m, tree in mine.items() for name in imported(tree) if name.startswith(others)] == []


def test_a_class_of_the_cuda_backend_has_a_name_of_its_own() -> None:
    trees = [tree for m, tree in TREES.items() if m.startswith("samebits.backends.cuda")]
    names = Counter(node.name for t in trees for node in ast.walk(t) if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


def test_one_file_alone_compares_compute_capabilities() -> None:
    """All others ask ``samebits/backends/arch.py`` what a GPU can do."""
    found = [
        f"{m}:{node.lineno}"
        for m, tree in TREES.items()
        for node in ast.walk(tree)
        if m != "samebits.backends.arch" and isinstance(node, ast.Compare)
        if any(word in ast.unparse(node) for word in ("capability", "(9, 0)", ".major", "SM_"))
    ]
    assert found == []


def test_operators_and_backends_are_short_files() -> None:
    lines = {m: len(FILES[m].read_text().splitlines()) for m in FILES if layer(f"{m}.") in (1, 2)}
    assert {m: n for m, n in lines.items() if n > LONGEST} == {}
