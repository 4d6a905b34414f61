"""How the library unpacks machine code, beside Python's zlib."""

from __future__ import annotations

import ctypes
import random
import subprocess
import zlib
from typing import Any

import pytest

from native.tests import support

pytestmark = pytest.mark.skipif(not support.HAS_COMPILER, reason="no C compiler")

CALL = """
#include "internal.h"
bool unpack(const unsigned char* from, size_t size, unsigned char* to, size_t to_size) {
    static inflate_room room;
    return sb_inflate(from, size, to, to_size, &room);
}
"""


@pytest.fixture(scope="module")
def unpack() -> Any:
    source, out = support.folder() / "unpack.c", support.folder() / "unpack.so"
    source.write_text(CALL)
    files = [str(source), str(support.SOURCES / "inflate.c")]
    subprocess.run(["cc", *support.FLAGS, f"-I{support.SOURCES}", "-o", str(out), *files], check=True)
    found = ctypes.CDLL(str(out)).unpack
    found.restype = ctypes.c_bool
    found.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t]
    return found


def packed(data: bytes, level: int, strategy: int) -> bytes:
    packer = zlib.compressobj(level, wbits=-zlib.MAX_WBITS, strategy=strategy)
    return packer.compress(data) + packer.flush()


@pytest.mark.long
def test_what_zlib_packs_is_unpacked(unpack: Any) -> None:
    drawn = random.Random(0)
    for _ in range(500):
        letters = range(drawn.choice((1, 2, 4, 256)))
        data = bytes(drawn.choices(letters, k=drawn.choice((0, 1, 5, 100, 5000, 70_000))))
        given = packed(data, drawn.choice((0, 1, 6, 9)), drawn.choice((0, 1, 2, 3, 4)))
        room = ctypes.create_string_buffer(len(data) + 2)
        assert unpack(given, len(given), room, len(data))
        assert room.raw == data + bytes(2)
        assert not unpack(given, len(given), room, len(data) + 1)
        assert not data or not unpack(given, len(given), room, len(data) - 1)


def test_what_zlib_refuses_is_refused(unpack: Any) -> None:
    drawn, refused = random.Random(1), 0
    for _ in range(1500):
        data = bytes(drawn.choices(range(16), k=drawn.randrange(1, 3000)))
        given = bytearray(packed(data, 9, drawn.choice((0, 2, 4))))
        for _ in range(drawn.randrange(1, 4)):
            given[drawn.randrange(len(given))] ^= 1 << drawn.randrange(8)
        wanted, other = None, zlib.decompressobj(wbits=-zlib.MAX_WBITS)
        try:
            found = other.decompress(bytes(given))
            wanted = found if other.eof and len(found) == len(data) else None
        except zlib.error:
            pass
        room = ctypes.create_string_buffer(len(data))
        good = unpack(bytes(given), len(given), room, len(data))
        if wanted is not None:
            assert good
            assert room.raw == wanted
        refused += not good
    assert refused > 300
