"""The archive's format. ``native/archive.c`` reads the same structs: all numbers are little-endian.

Machine code is packed as zlib packs it, without its header: to about a quarter.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

from samebits.backends.cuda.compiler import KernelSpec

__all__ = ["ABI", "NONE", "Archive", "Family", "Schedule", "Table"]

ABI = 5
"""Incremented with every change of this file's structs, of what a field means, of a kernel's parameters, or
of ``samebits.h``."""

NONE = 0xFFFF
"""A cell without a schedule."""

_HEADER = struct.Struct("<8s2IQ2i16s40s24s24s24s")
_SECTION = struct.Struct("<2Q")
_SCHEDULE, _VARIANT, _CUBIN, _TABLE = map(struct.Struct, ("<12i", "<4I", "<2Q6I24s", "<8I"))
_CHECKED_FROM = 24


class Family(IntEnum):
    """The parameter struct, and what it is computed from: ``family`` of ``native/internal.h``."""

    TENSOR_CORE = 0
    FMA = 1
    TENSOR_CORE_SM90 = 2
    FMA_SM90 = 3
    STATISTICS_SM90 = 4
    LOGP = 5
    GROUPED_TENSOR_CORE = 6
    GROUPED_FMA = 7
    GROUPED_SM90 = 8
    ATTENTION_SM90 = 9
    ATTENTION = 10
    ATTENTION_MERGE = 11


class Schedule(NamedTuple):
    """What launches need to know of a schedule.

    Attributes:
        kernel: the number that its variants are found by.
        groups: the most groups whose table leaves room for the schedule's whole ring.
    """

    family: Family
    kernel: int
    tile_m: int = 1
    tile_n: int = 1
    tile_k: int = 1
    cluster: int = 1
    group: int = 1
    blocks: int = 1
    panel: int = 0
    swap: bool = False
    promotion: int = 0
    groups: int = 0


@dataclass(frozen=True)
class Table:
    """The choice of schedules by sizes.

    Attributes:
        plain: the schedule for calls that the chosen one has no variant for.
        bounds: the last m, n and k of each range. What lies beyond belongs to the last range.
        cells: a schedule for each range of m, n and k, in this order; None if another kernel is faster.
    """

    family: Family
    key: int
    plain: Schedule
    bounds: tuple[Sequence[int], Sequence[int], Sequence[int]]
    cells: Sequence[Schedule | None]


@dataclass
class Archive:
    """All that is in an archive.

    Attributes:
        digests: of the contracts of float32, bfloat16 and float16; empty for one that it has no kernels for.
        variants: the kernels, by their schedule's number and their variant.
        schedules: the library's own schedules by that number. They are not in the file.
    """

    arch: str
    capability: tuple[int, int]
    version: str
    digests: Sequence[str]
    tables: list[Table] = field(default_factory=list)
    variants: dict[tuple[int, int], KernelSpec] = field(default_factory=dict)
    schedules: dict[int, Any] = field(default_factory=dict)

    @property
    def specs(self) -> list[KernelSpec]:
        """The kernels, each once."""
        return list(dict.fromkeys(spec for _, spec in sorted(self.variants.items())))

    def pack(self, code: Sequence[bytes]) -> bytes:
        """The file. `code` is the machine code of each of :attr:`specs`."""
        tables = sorted(self.tables, key=lambda t: (t.family, t.key))
        used = {s: None for t in tables for s in (t.plain, *t.cells) if s is not None}
        numbers = {s: i for i, s in enumerate(sorted(used, key=lambda s: s.kernel))}
        assert len(numbers) < NONE
        bounds: list[int] = []
        cells: list[int] = []
        records = []
        for t in tables:
            counts = [len(b) for b in t.bounds]
            assert len(t.cells) == counts[0] * counts[1] * counts[2]
            records.append(_TABLE.pack(t.family, t.key, numbers[t.plain], *counts, len(bounds), len(cells)))
            bounds += [x for b in t.bounds for x in b]
            cells += [NONE if s is None else numbers[s] for s in t.cells]
        specs = {spec: i for i, spec in enumerate(self.specs)}
        variants = sorted(self.variants.items())
        sections = [
            (len(numbers), b"".join(_SCHEDULE.pack(*s) for s in numbers)),
            (len(variants), b"".join(_VARIANT.pack(*key, specs[spec], 0) for key, spec in variants)),
            (len(specs), bytes(_CUBIN.size * len(specs))),
            (len(records), b"".join(records)),
            (len(bounds), struct.pack(f"<{len(bounds)}i", *bounds)),
            (len(cells), struct.pack(f"<{len(cells)}H", *cells)),
        ]
        head = _HEADER.size + 7 * _SECTION.size
        out = bytearray(head)
        where = []
        for count, content in sections:
            where.append((len(out), count))
            out += _padded(content)
        cubins_at = where[2][0]
        where.append((len(out), len(specs)))
        for i, (spec, machine) in enumerate(zip(specs, code, strict=True)):
            packed = _packed(machine)
            record = _cubin(spec, len(out), len(packed), len(machine))
            out[cubins_at + i * _CUBIN.size : cubins_at + (i + 1) * _CUBIN.size] = record
            out += _padded(packed)
        texts = (text.encode() for text in (self.arch, self.version, *self.digests))
        out[: _HEADER.size] = _HEADER.pack(b"samebits", ABI, 0, len(out), *self.capability, *texts)
        out[_HEADER.size : head] = b"".join(_SECTION.pack(*x) for x in where)
        out[12:16] = struct.pack("<I", zlib.crc32(out[_CHECKED_FROM:]))
        return bytes(out)


def _packed(machine: bytes) -> bytes:
    packer = zlib.compressobj(9, wbits=-zlib.MAX_WBITS)
    return packer.compress(machine) + packer.flush()


def _cubin(spec: KernelSpec, at: int, size: int, unpacked: int) -> bytes:
    params = struct.calcsize("@" + spec.params)
    numbers = spec.block, spec.smem, spec.cluster[0], spec.programmatic, params, unpacked
    assert len(spec.entry) < 24
    return _CUBIN.pack(at, size, *numbers, spec.entry.encode())


def _padded(content: bytes | Iterable[int]) -> bytes:
    content = bytes(content)
    return content + bytes(-len(content) % 16)
