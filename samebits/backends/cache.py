"""The on-disk cache of compiled kernels, in one folder for all backends.

A process executes what it reads here. So it refuses files that another user could have written, and entries
that are damaged: each has a checksum of its name and contents. ``os.replace`` makes an entry appear whole,
with any number of processes. Errors of the cache never stop a computation. They cost a compilation and give
one warning.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import warnings
from pathlib import Path

from samebits.remedies import see

__all__ = ["folder", "read", "write"]

_MAGIC = b"samebits kernel 1\n"
_HEAD = len(_MAGIC) + hashlib.sha256().digest_size


def folder() -> Path:
    """The cache's folder: ``SAMEBITS_CACHE_DIR``, or ``samebits`` in the user's cache directory.

    It need not exist yet.

    Raises:
        OSError: there is no home directory, or users other than this one and root can write to the folder.
    """
    path = _path()
    with contextlib.suppress(FileNotFoundError):
        _trust(path, path.stat())
    return path


def read(name: str) -> bytes | None:
    """The contents of the entry `name`; None if there is none, or none that may be loaded."""
    try:
        path = folder() / name
        with path.open("rb") as file:
            _trust(path, os.fstat(file.fileno()))
            data = file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn_uncached(error)
        return None
    contents = data[_HEAD:]
    if data[:_HEAD] != _head(name, contents):
        _warn("a compiled kernel in the cache is damaged and is compiled again", str(path))
        return None
    return contents


def write(name: str, contents: bytes) -> None:
    """Write the entry `name`, and replace an older one. Without a usable folder, nothing is written."""
    try:
        _path().mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder() / name
        handle, temporary = tempfile.mkstemp(prefix=f".{name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_head(name, contents) + contents)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        _warn_uncached(error)


def _path() -> Path:
    explicit = os.environ.get("SAMEBITS_CACHE_DIR")
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        if explicit:
            return Path(explicit).expanduser()
        # A relative path is invalid by the XDG Base Directory Specification.
        return (caches if caches.is_absolute() else Path.home() / ".cache") / "samebits"
    except RuntimeError as error:
        raise OSError("no home directory") from error


def _trust(path: Path, status: os.stat_result) -> None:
    """Refuse a path that other users can write to, because this process executes what is in it."""
    if os.name != "posix":
        return
    if status.st_uid not in (os.geteuid(), 0):
        raise PermissionError(f"{path} belongs to another user")
    if status.st_mode & 0o022:
        raise PermissionError(f"{path} can be written by others: chmod go-w")


def _head(name: str, contents: bytes) -> bytes:
    return _MAGIC + hashlib.sha256(f"{name}\n".encode() + contents).digest()


_warned: set[str] = set()


def _warn(what: str, details: str, advice: str = "") -> None:
    if what not in _warned:
        _warned.add(what)
        warnings.warn(f"samebits: {what} ({details}){advice}", RuntimeWarning, stacklevel=3)


def _warn_uncached(error: OSError) -> None:
    _warn(
        "compiled kernels cannot be cached, and every process compiles its own",
        str(error),
        ": set SAMEBITS_CACHE_DIR to a folder that you alone can write to"
        + see("caches-tables-and-archives"),
    )
