"""Compiled kernels on disk: what is damaged, another's or nowhere costs a compilation and one warning."""

import errno
import itertools
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest
from numba import int64
from numba.core.dispatcher import Dispatcher

from samebits.backends import cache
from samebits.backends.reference import kernels, logp_kernels, rows_kernels


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of our own that does not exist yet, in a process that has warned of nothing."""
    monkeypatch.setenv("SAMEBITS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_warned", set())
    return tmp_path / "cache"


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions that numba really compiled, in order."""
    names: list[str] = []
    real = kernels._OnDisk.save_overload

    def save(self: Any, *of: Any) -> None:
        names.append(self.name)
        real(self, *of)

    monkeypatch.setattr(kernels._OnDisk, "save_overload", save)
    return names


def twice(x: Any) -> Any:
    return 2 * x


def compiled() -> int:
    """What a kernel gives that is loaded or compiled anew."""
    answer: int = kernels._njit(int64(int64))(twice)(21)
    return answer


def _flipped(data: bytes) -> bytes:
    rng, damaged = np.random.default_rng(len(data)), np.frombuffer(data, np.uint8).copy()
    damaged[rng.integers(0, len(data), 3)] ^= 1 << rng.integers(0, 8, 3, np.uint8)
    return damaged.tobytes()


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut in its head": lambda data: data[:20],
    "cut": lambda data: data[:-1],
    "longer": lambda data: data + b"\0",
    "garbage": lambda data: b"garbage",
    "zeros": lambda data: bytes(len(data)),
    "flipped bits": _flipped,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_entry_is_compiled_again_with_one_warning(
    damage: Callable[[bytes], bytes], folder: Path, compilations: list[str]
) -> None:
    assert compiled() == 42
    (entry,) = folder.iterdir()
    whole = entry.read_bytes()
    entry.write_bytes(damage(whole))
    with pytest.warns(RuntimeWarning, match=r"damaged and is compiled again") as told:
        assert compiled() == 42
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiled() == 42
        assert len(compilations) == 2
        entry.write_bytes(damage(whole))
        assert compiled() == 42  # and nothing is said again
    assert len(compilations) == 3


def test_an_entry_under_the_name_of_another_is_not_taken(folder: Path) -> None:
    cache.write("one", b"code")
    (folder / "one").rename(folder / "another")
    with pytest.warns(RuntimeWarning, match="damaged"):
        assert cache.read("another") is None


@pytest.mark.long
@pytest.mark.parametrize("damaged", [len(DAMAGE), pytest.param(None, marks=pytest.mark.nightly)])
def test_every_kernel_survives_damage(
    damaged: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own: machine code with flipped bits would end it.

    By day, each damage is that of one kernel.
    """
    entries = [f._cache.name for f in vars(kernels).values() if isinstance(f, Dispatcher) and on_disk(f)]
    contents = {name: cache.read(name) for name in entries}
    monkeypatch.setenv("SAMEBITS_CACHE_DIR", str(tmp_path / "cache"))
    for name, damage in zip(entries[:damaged], itertools.cycle(DAMAGE.values())):
        cache.write(name, contents.pop(name) or bytes(100_000))
        path = tmp_path / "cache" / name
        path.write_bytes(damage(path.read_bytes()))
    for name, code in contents.items():
        if code is not None:
            cache.write(name, code)
    code = "import torch, samebits; print(samebits.linear(torch.ones(2, 3), torch.ones(4, 3)).tolist())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str([[3.0] * 4] * 2)
    assert run.stderr.count("RuntimeWarning") == 1, run.stderr
    assert all(map(cache.read, entries))


def test_a_full_disk_stops_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fdopen

    def fdopen(handle: int, mode: str) -> Any:
        file = real(handle, mode)
        full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
        return mock.MagicMock(__enter__=lambda _: mock.Mock(write=full), __exit__=lambda *_: file.close())

    monkeypatch.setattr(os, "fdopen", fdopen)
    with pytest.warns(RuntimeWarning, match="No space left on device.*SAMEBITS_CACHE_DIR") as told:
        assert compiled() == compiled() == 42
    assert len(told) == 1
    assert [*folder.iterdir()] == []


@pytest.mark.parametrize("reason", ["read-only", "a file", "no home"])
def test_without_a_place_everything_is_compiled(
    reason: str, folder: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason == "read-only":
        monkeypatch.setattr(cache.tempfile, "mkstemp", mock.Mock(side_effect=PermissionError(13, reason)))
    if reason == "a file":
        folder.write_text("where the folder should be")
    if reason == "no home":
        monkeypatch.delenv("SAMEBITS_CACHE_DIR")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(Path, "home", mock.Mock(side_effect=RuntimeError))
    with pytest.warns(RuntimeWarning, match="cannot be cached.*SAMEBITS_CACHE_DIR") as told:
        assert compiled() == compiled() == 42
    assert len(told) == 1
    assert len(compilations) == 2


def test_a_read_only_cache_is_still_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write("entry", b"code")
    monkeypatch.setattr(Path, "mkdir", mock.Mock(side_effect=PermissionError))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.read("entry") == b"code"


ME = os.geteuid()


@pytest.mark.parametrize(
    ("owner", "mode", "trusted"),
    [
        (ME, 0o700, True),
        (ME, 0o755, True),
        (0, 0o755, True),
        (ME + 1, 0o755, False),
        (ME, 0o777, False),
        (ME, 0o1777, False),
        (ME, 0o775, False),
        (0, 0o1777, False),
    ],
)
@pytest.mark.parametrize("what", ["folder", "entry"])
def test_what_others_can_write_is_neither_loaded_nor_filled(
    owner: int, mode: int, trusted: bool, what: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.write("entry", b"code")

    def told(real: Callable[..., os.stat_result], kind: str) -> Callable[..., os.stat_result]:
        def status(*of: Any, **options: Any) -> os.stat_result:
            found = real(*of, **options)
            if kind != what:
                return found
            return os.stat_result((found.st_mode & ~0o7777 | mode, *found[1:4], owner, *found[5:]))

        return status

    monkeypatch.setattr(Path, "stat", told(Path.stat, "folder"))
    monkeypatch.setattr(os, "fstat", told(os.fstat, "entry"))
    if trusted:
        assert cache.read("entry") == b"code"
        assert cache.folder() == folder
        return
    with pytest.warns(RuntimeWarning, match=r"another user|written by others: chmod go-w"):
        assert cache.read("entry") is None
    if what == "folder":
        cache.write("more", b"code")
        assert not (folder / "more").exists()
        with pytest.raises(PermissionError):
            cache.folder()


def test_a_folder_of_ours_among_those_of_all(folder: Path) -> None:
    folder.parent.chmod(0o1777)
    before = os.umask(0)
    try:
        cache.write("entry", b"code")
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert cache.read("entry") == b"code"


@pytest.mark.parametrize(
    ("explicit", "xdg", "found"),
    [
        ("", "", "/home/me/.cache/samebits"),
        ("", "/caches", "/caches/samebits"),
        ("", "caches", "/home/me/.cache/samebits"),
        ("", "~/caches", "/home/me/.cache/samebits"),
        ("/mine", "/caches", "/mine"),
        ("~/mine", "/caches", "/home/me/mine"),
    ],
)
def test_where_the_cache_lies(explicit: str, xdg: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("SAMEBITS_CACHE_DIR", explicit)
    monkeypatch.setenv("XDG_CACHE_HOME", xdg)
    assert cache.folder() == Path(found)


WRITER = """
import runpy, sys
cache = runpy.run_path(sys.argv[1])
for i in range(200):
    cache["write"]("entry", bytes([i]) * 50_000)
    found = cache["read"]("entry")
    assert len(found) == 50_000 and len(set(found)) == 1
"""


@pytest.mark.long
def test_many_processes_fill_one_cache(folder: Path) -> None:
    command = [sys.executable, "-Werror", "-c", WRITER, str(cache.__file__)]
    children = [subprocess.Popen(command) for _ in range(4)]
    assert [child.wait(60) for child in children] == [0] * 4
    assert [entry.name for entry in folder.iterdir()] == ["entry"]


@pytest.mark.parametrize("module", [kernels, logp_kernels, rows_kernels], ids=lambda m: m.__name__)
def test_every_function_with_a_signature_has_an_entry_of_its_own(module: ModuleType) -> None:
    """Processes that filled numba's cache at once mixed up the variants of a function: wrong bits."""
    cached = [f for f in vars(module).values() if isinstance(f, Dispatcher) and on_disk(f)]
    assert cached
    for f in cached:
        assert "<" not in f.py_func.__qualname__  # of which there could be several
        assert f._cache.name.endswith(f".{f.py_func.__name__}-{kernels.edition()}.numba")
        assert len(f.signatures) == 1
        with pytest.raises(TypeError):
            f(*("of no type that it was compiled for",) * len(f.signatures[0]))


@pytest.mark.parametrize("changed", ["functions.py", "rows_kernels.py", "the CPU", "Python"])
def test_another_edition_has_entries_of_its_own(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, read = kernels.edition(), Path.read_bytes
    if changed == "the CPU":
        codegen = type(kernels.cpu_target.target_context.codegen())
        monkeypatch.setattr(codegen, "magic_tuple", lambda self: ("another",))
    elif changed == "Python":
        monkeypatch.setattr(sys.implementation, "cache_tag", "cpython-399")
    else:
        monkeypatch.setattr(Path, "read_bytes", lambda p: read(p) + b"#" * (p.name == changed))
    assert kernels.edition.__wrapped__() != before


def on_disk(f: Dispatcher) -> bool:
    return isinstance(f._cache, kernels._OnDisk)
