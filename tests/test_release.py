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

from samebits import AMPERE, FMA, FP8, HOPPER, TENSOR_CORE, __version__
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


def build(checkout: Path, out: Path) -> tuple[Path, Path]:
    """The sdist of a copy of ``checkout``, and the wheel that was built from it."""
    copy = out / "checkout"
    unwanted = shutil.ignore_patterns(
        *("__pycache__", "*.so", "*.nbi", "*.nbc", ".*", "*.egg-info", "build", "dist")
    )
    shutil.copytree(checkout, copy, ignore=unwanted)
    (package,) = (path.parent for path in copy.glob("*/py.typed"))
    (package / "stray.bin").write_bytes(b"left by someone")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(copy / "dist"), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (sdist,), (wheel,) = (copy / "dist").glob("*.tar.gz"), (copy / "dist").glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build(ROOT, tmp_path_factory.mktemp("release"))


@pytest.mark.long
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


@pytest.mark.long
def test_samebits_native_holds_its_library_and_what_it_is_built_from(tmp_path: Path) -> None:
    native = ROOT / "native"
    sdist, wheel = build(native, tmp_path)
    held = set(zipfile.ZipFile(wheel).namelist())
    (library,) = (name for name in held if name.endswith(".so"))
    assert re.fullmatch(r"samebits_native/_library\.[\w-]+\.so", library)
    modules = {str(path.relative_to(native)) for path in (native / "samebits_native").rglob("*.py")}
    info = f"samebits_native-{__version__}.dist-info"
    metadata = {f"{info}/{name}" for name in METADATA - {"entry_points.txt"}}
    assert sorted(held - {library}) == sorted(modules | {"samebits_native/py.typed"} | metadata)
    with tarfile.open(sdist) as archive:
        sources = {m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()}
    assert sources >= {str(path.relative_to(native)) for path in (native / "src").iterdir()}
    assert sources >= {"CMakeLists.txt", "LICENSE", "README.md", "pyproject.toml"}


def test_the_metadata_say_what_a_reader_must_know(built: tuple[Path, Path]) -> None:
    text = zipfile.ZipFile(built[1]).read(f"{INFO}/METADATA").decode()
    head = text.partition("\n\n")[0].splitlines()
    assert f"Version: {__version__}" in head
    assert "License-Expression: Apache-2.0" in head
    assert "Requires-Python: >=3.11" in head
    assert re.search(
        rf"^version: {re.escape(__version__)}$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE
    )


def test_the_changelog_says_what_became_of_the_bits() -> None:
    """The version's part has a date, *Numerics*, and the digests that this version has."""
    text = (ROOT / "CHANGELOG.md").read_text()
    found = re.search(
        rf"^## {re.escape(__version__)} \(\d{{4}}-\d\d-\d\d\)$(.*?)(?=^## |\Z)",
        text,
        re.MULTILINE | re.DOTALL,
    )
    assert found
    numerics = found[1].partition("\n### Numerics\n")[2]
    said = dict(re.findall(r"^\| `([\w.()]+)` \|.*\| `(\w+)` \|$", numerics, re.MULTILINE))
    contracts = {
        "TENSOR_CORE": TENSOR_CORE,
        "TENSOR_CORE.on(HOPPER)": TENSOR_CORE.on(HOPPER),
        "TENSOR_CORE.on(AMPERE)": TENSOR_CORE.on(AMPERE),
        "FMA": FMA,
        "FP8": FP8,
    }
    assert said == {name: contract.digest() for name, contract in contracts.items()}


def test_both_distributions_have_one_version() -> None:
    native = tomllib.loads((ROOT / "native" / "pyproject.toml").read_text())["project"]
    assert native["version"] == __version__
    assert native["optional-dependencies"]["export"] == [f"samebits[cuda]=={__version__}"]
