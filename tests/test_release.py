"""The sdist and the wheel: both build, and they hold the package's files and nothing else."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from samebits import __version__
from tests.support import ROOT

INFO = f"samebits-{__version__}.dist-info"
KINDS = {
    ".py": "samebits",
    ".cu": "samebits/backends/cuda/kernels",
    ".cuh": "samebits/backends/cuda/kernels/include",
}
"""Suffixes of the sources in a wheel, and the folders that they are in."""
OTHERS = {
    "samebits/py.typed",
    *(f"samebits/data/{name}" for name in ("harbour.txt", "known_answers.npz", "proven.json")),
    *(f"samebits/data/tuned/{path.name}" for path in (ROOT / "samebits/data/tuned").glob("*.json")),
}
METADATA = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt", "licenses/LICENSE"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist of a checkout, and the wheel that was built from it."""
    copy = tmp_path_factory.mktemp("release") / "checkout"
    unwanted = shutil.ignore_patterns(
        *("__pycache__", "*.so", "*.nbi", "*.nbc", ".*", "*.egg-info", "build", "dist")
    )
    shutil.copytree(ROOT, copy, ignore=unwanted)
    (copy / "samebits" / "data" / "stray.bin").write_bytes(b"left by someone")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(copy / "dist"), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (sdist,), (wheel,) = (copy / "dist").glob("*.tar.gz"), (copy / "dist").glob("*.whl")
    return sdist, wheel


def test_the_wheel_holds_the_package_and_nothing_else(built: tuple[Path, Path]) -> None:
    held = set(zipfile.ZipFile(built[1]).namelist())
    extension = {name for name in held if re.fullmatch(r"samebits/backends/_replay\.[\w-]+\.so", name)}
    sources = {
        str(path.relative_to(ROOT))
        for suffix, folder in KINDS.items()
        for path in (ROOT / folder).rglob(f"*{suffix}")
    }
    assert sorted(held - extension) == sorted(sources | OTHERS | {f"{INFO}/{name}" for name in METADATA})


def test_the_sdist_holds_what_the_wheel_is_built_from(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        held = {m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()}
    assert held >= {"LICENSE", "README.md", "pyproject.toml", "samebits/backends/_replay.c", *OTHERS}
    assert {name.partition("/")[0] for name in held} == {
        *("LICENSE", "PKG-INFO", "README.md", "pyproject.toml", "samebits", "samebits.egg-info", "setup.cfg"),
        *("CHANGELOG.md", "CITATION.cff", "MANIFEST.in", "SECURITY.md", "constraints.txt"),
    }


def test_the_metadata_say_what_a_reader_must_know(built: tuple[Path, Path]) -> None:
    text = zipfile.ZipFile(built[1]).read(f"{INFO}/METADATA").decode()
    head = text.partition("\n\n")[0].splitlines()
    assert f"Version: {__version__}" in head
    assert "License-Expression: Apache-2.0" in head
    assert "Requires-Python: >=3.11" in head
    assert re.search(
        rf"^version: {re.escape(__version__)}$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE
    )
    assert f"\n## {__version__} " in (ROOT / "CHANGELOG.md").read_text()


def test_both_distributions_have_one_version() -> None:
    native = tomllib.loads((ROOT / "native" / "pyproject.toml").read_text())["project"]
    assert native["version"] == __version__
    assert native["optional-dependencies"]["export"] == [f"samebits[cuda]=={__version__}"]
