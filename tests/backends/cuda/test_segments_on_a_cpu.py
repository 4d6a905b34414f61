"""The order in which Hopper's kernels add segments: ``kernels/include/segments_sm90.cuh``, on a CPU."""

from __future__ import annotations

import itertools
import re
import subprocess
from pathlib import Path

import pytest

from samebits.backends.cuda import compiler
from tests.support import host_kernels

CASES = [
    (2**levels, held, shared, joined)
    for levels, held, shared, joined in itertools.product(range(1, 7), range(4), range(2), (False, True))
    if held + shared <= levels and (held or not joined)
]


@pytest.mark.long
@host_kernels.needs_compiler
def test_every_place_of_sums_gives_the_tree(tmp_path: Path) -> None:
    header = (compiler.INCLUDE / "segments_sm90.cuh").read_text()
    for line in ("#pragma once\n", '#include "ptx_sm90.cuh"\n'):
        assert line in header
        header = header.replace(line, "")
    (tmp_path / "segments.h").write_text(re.sub(r"asm volatile\([^;]*\);", ";", header))
    text, calls = "", ""
    for i, (segments, held, shared, joined) in enumerate(CASES):
        macros = {"SEGMENTS": segments, "HELD": held, "SHARED": shared}
        text += "".join(f"#undef {name}\n#define {name} {value}\n" for name, value in macros.items())
        text += f'namespace case{i} {{\n#include "segments.h"\n}}\n'
        sums = f"case{i}::SegmentSums<TILES, FLOATS, {int(joined)}>"
        right = f"right<{sums}, {int(joined)}, {segments}, {held + 1}>"
        calls += f'    if (!{right}(0) || !{right}(1)) std::puts("{CASES[i]}");\n'
    (tmp_path / "cases.h").write_text(
        text + f"#undef SEGMENTS\nint run_cases() {{\n{calls}    return 0;\n}}\n"
    )
    program = tmp_path / "segments"
    source = Path(host_kernels.__file__).parent / "host" / "segments.cpp"
    options = "-std=c++20", "-O1", "-w", f"-I{tmp_path}", '-DCASES="cases.h"'
    subprocess.run(["c++", *options, str(source), "-o", str(program)], check=True)
    found = subprocess.run([str(program)], check=True, capture_output=True, text=True)
    assert found.stdout == ""
