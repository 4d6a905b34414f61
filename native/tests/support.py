"""``libsamebits`` built for tests, archives without machine code, and what the driver of tests noted."""

from __future__ import annotations

import ctypes
import functools
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from samebits_native import engine
from samebits_native.export import archive, kernels
from samebits_native.export.choices import Sizes

NATIVE = Path(__file__).parents[1]
SOURCES = NATIVE / "src"
FLAGS = ("-std=c11", "-Wall", "-Wextra", "-Werror", "-Wpedantic", "-O1", "-fPIC", "-shared")
HAS_COMPILER = shutil.which("cc") is not None
SMALL = Sizes(
    ((4096, 4096), (768, 3072), (7168, 256)),
    (1, 8, 48, 64, 300, 1100, 2048),
    ((2048, 1536), (7168, 4096)),
    ((64, 64), (96, 80), (128, 128), (192, 128), (256, 256)),
    (16, 64, 256, 1024, 4096),
    more=False,
)
# Of tests that look at no choice: a few cells take no time to fill.
TINY = Sizes(((768, 3072),), (1, 300), ((2048, 1536),), ((64, 64),), (256,), more=False)


@functools.cache
def folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="samebits-native-"))


def sources() -> list[str]:
    """The library's files."""
    return sorted(str(file) for file in SOURCES.glob("*.c"))


@functools.cache
def build(driver: str | None = None) -> Path:
    """The library; with `driver`, for that file in place of the CUDA driver."""
    out = folder() / ("libsamebits.so" if driver is None else f"libsamebits-{len(driver)}.so")
    options = () if driver is None else (f'-DSB_LIBCUDA="{driver}"',)
    command = ["cc", *FLAGS, *options, "-o", str(out), *sources(), "-ldl", "-lpthread"]
    subprocess.run(command, check=True)
    return out


class Noted(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("kernel", "size")),
        *((name, ctypes.c_uint32 * 3) for name in ("grid", "block")),
        *((name, ctypes.c_uint32) for name in ("smem", "cluster", "programmatic", "spare")),
        ("stream", ctypes.c_uint64),
        ("params", ctypes.c_ubyte * 2048),
    ]


class Launched(NamedTuple):
    """A launch, as the driver of tests noted it."""

    kernel: int
    grid: tuple[int, ...]
    block: int
    smem: int
    cluster: int
    programmatic: bool
    stream: int
    params: bytes


@functools.cache
def fake_driver() -> ctypes.CDLL:
    out = folder() / "libdriver.so"
    subprocess.run(["cc", *FLAGS, "-o", str(out), str(Path(__file__).with_name("driver.c"))], check=True)
    found = ctypes.CDLL(str(out))
    found.driver_launch.restype = ctypes.POINTER(Noted)
    return found


@functools.cache
def library() -> ctypes.CDLL:
    """The library over the driver of tests."""
    return engine.load_library(build(fake_driver()._name))


def launches() -> list[Launched]:
    """What was launched since the last call."""
    driver = fake_driver()
    found = []
    for i in range(driver.driver_launches()):
        x = driver.driver_launch(i).contents
        assert tuple(x.block[1:]) == (1, 1)
        how = x.block[0], x.smem, x.cluster, bool(x.programmatic), x.stream
        found.append(Launched(x.kernel, tuple(x.grid), *how, bytes(x.params[: x.size])))
    driver.driver_reset()
    return found


def fake_code(of: archive.Archive) -> list[bytes]:
    """Machine code that the driver of tests takes."""
    sizes = (struct.calcsize("@" + spec.params) for spec in of.specs)
    return [struct.pack("<8s2I", b"fakecode", i, size) for i, size in enumerate(sizes)]


@functools.cache
def built(arch: str = "sm_90a", sizes: Sizes = SMALL) -> archive.Archive:
    """An archive of all operations."""
    return kernels.build(arch, [torch.float32, torch.bfloat16, torch.float16], sizes=sizes)


def write(of: archive.Archive, name: str) -> Path:
    path = folder() / name
    path.write_bytes(of.pack(fake_code(of)))
    return path


def opened(path: Path) -> engine.Engine:
    """An engine over the driver of tests."""
    return engine.Engine(path, library=build(fake_driver()._name))
