"""``libsamebits`` without a GPU, over a driver of tests: archives, errors, symbols, and the engine."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import struct
import subprocess
import sys
import time
import tomllib
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from native.tests import support
from samebits import FMA, HOPPER, TENSOR_CORE, __version__
from samebits.tools.text import ToolError
from samebits_native import engine
from samebits_native.export import archive as format_
from samebits_native.export.command import main as export
from samebits_native.export.kernels import GPUS, OPS, build
from tests.support import ROOT

pytestmark = pytest.mark.skipif(not support.HAS_COMPILER, reason="no C compiler")
ENVIRONMENT = os.environ | {"PYTHONPATH": str(support.NATIVE)}


@pytest.fixture(scope="module")
def path() -> Path:
    return support.write(support.built(), "library.samebits")


def test_it_needs_neither_pytorch_nor_samebits() -> None:
    code = "import sys, samebits_native; sys.exit(bool({'torch', 'samebits', 'numpy'} & sys.modules.keys()))"
    subprocess.run([sys.executable, "-c", code], check=True, env=ENVIRONMENT)


def test_it_has_the_version_and_the_sources_of_the_library() -> None:
    project = tomllib.loads((support.NATIVE / "pyproject.toml").read_text())
    assert project["project"]["version"] == __version__
    assert project["project"]["optional-dependencies"]["export"] == [f"samebits[cuda]=={__version__}"]
    (extension,) = project["tool"]["setuptools"]["ext-modules"]
    assert [str(support.NATIVE / file) for file in extension["sources"]] == support.sources()


def opening(path: Path) -> engine.EngineError:
    with pytest.raises(engine.EngineError) as caught:
        support.opened(path)
    return caught.value


def changed(path: Path, at: int, by: bytes, *, checksum: bool = False) -> Path:
    data = bytearray(path.read_bytes())
    data[at : at + len(by)] = by
    if checksum:
        data[12:16] = zlib.crc32(data[24:]).to_bytes(4, "little")
    other = path.with_name("changed.samebits")
    other.write_bytes(data)
    return other


def test_the_library_exports_the_functions_of_its_header() -> None:
    shown = subprocess.run(
        ["nm", "-D", "--defined-only", str(support.build())], check=True, capture_output=True, text=True
    )
    symbols = {line.split()[-1] for line in shown.stdout.splitlines()}
    declared = re.findall(r"^SB_API .*?\b(sb_\w+)\(", (support.SOURCES / "samebits.h").read_text(), re.M)
    assert (
        symbols
        == {*declared}
        == {
            *("sb_abi_version", "sb_last_error", "sb_archive_open", "sb_archive_close", "sb_contract_digest"),
            "sb_archive_version",
            *("sb_context_create", "sb_context_destroy", "sb_gemm", "sb_bmm", "sb_gemm_ragged"),
            "sb_gemm_grouped",
            *("sb_workspace_size", "sb_linear_logp", "sb_attention_workspace_size", "sb_attention"),
        }
    )


def test_the_library_needs_no_cuda_library() -> None:
    shown = subprocess.run(["ldd", str(support.build())], check=True, capture_output=True, text=True)
    assert re.findall("cuda|libnv", shown.stdout) == []


def test_the_abi_is_one() -> None:
    header = (support.SOURCES / "samebits.h").read_text()
    assert f"#define SB_ABI_VERSION {format_.ABI}\n" in header
    assert support.library().sb_abi_version() == format_.ABI == engine._ABI


def test_the_header_is_c_plus_plus_too() -> None:
    command = ["cc", "-x", "c++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    subprocess.run([*command, str(support.SOURCES / "samebits.h")], check=True)


def test_contract_digests_are_the_librarys(path: Path) -> None:
    found = support.opened(path)
    digests = [found.contract_digest(d) for d in ("float32", "bfloat16", "float16")]
    assert digests == [FMA.digest(), *[TENSOR_CORE.on(HOPPER).digest()] * 2]


@pytest.mark.parametrize("given", [["float32"], ["bfloat16"], ["float16"], ["float16", "float32"]])
def test_an_archive_names_the_contracts_of_its_own_dtypes(given: list[str]) -> None:
    made = build("sm_90a", [getattr(torch, dtype) for dtype in given], ["gemm"], support.TINY)
    with support.opened(support.write(made, "dtypes.samebits")) as of:
        named = [dtype for dtype in engine.DTYPES if of.contract_digest(dtype)]
        assert sorted(named) == sorted(given)
        assert of.version == __version__


REFUSALS = [
    ("sm_90a", "bfloat16", "gemm", 0, "products of f32: samebits export --dtype f32 --op gemm"),
    ("sm_90a", "float16", "gemm", 1, "products of bf16: samebits export --dtype bf16 --op gemm"),
    ("sm_90a", "float32", "ragged", 0, "sequences of f32: samebits export --dtype f32 --op ragged"),
    ("sm_90a", "float16", "grouped", 1, "grouped products of bf16: .* --dtype bf16 --op grouped_mm"),
    ("sm_90a", "float32", "logp", 0, "log-probabilities of f32: .* --dtype f32 --op linear_logp"),
    ("sm_90a", "float32", "logp", 2, "log-probabilities of f16: .* --dtype f16 --op linear_logp"),
    ("sm_75", "float32", "gemm", 2, "products of f16: expected sm_80 or newer, the archive is for sm_75"),
    ("sm_75", "float32", "logp", 0, "log-probabilities: expected sm_80 or newer, .* sm_75"),
]


@pytest.mark.long
@pytest.mark.parametrize(("arch", "has", "call", "dtype", "message"), REFUSALS)
def test_a_refusal_names_the_options_that_help(
    arch: str, has: str, call: str, dtype: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, ops = support.fake_driver(), ["gemm"]
    capability = [ctypes.c_int.in_dll(driver, f"driver_{name}") for name in ("major", "minor")]
    made = build(arch, [getattr(torch, has)], ops, support.TINY)
    before = [x.value for x in capability]
    for x, value in zip(capability, made.capability, strict=True):
        x.value = value
    try:
        of = support.opened(support.write(made, "refusals.samebits"))
    finally:
        for x, value in zip(capability, before, strict=True):
            x.value = value
    at, size = [0x7F0000000000 << i for i in range(4)], {0: "float32", 1: "bfloat16", 2: "float16"}[dtype]

    def array(i: int, *shape: int, dtype: str = size) -> engine.Array:
        return engine.Array(at[i], dtype, shape, engine._dense(shape))

    a, b, out = array(0, 64, 64), array(1, 64, 64), array(2, 64, 64)
    target, found = array(3, 64, dtype="int64"), array(2, 64, dtype="float32")
    room = array(3, 1 << 26, dtype="float32")
    calls: dict[str, Callable[[], None]] = {
        "gemm": lambda: of.matmul(a, b, out=out, stream=0),
        "ragged": lambda: of.matmul_sequences(a, b, array(3, 3, dtype="int32"), out=out, stream=0),
        "grouped": lambda: of.grouped_mm(
            a, array(1, 2, 64, 64), array(3, 2, dtype="int32"), out=out, stream=0
        ),
        "logp": lambda: of.linear_logp(a, b, target, out=found, workspace=room, stream=0),
    }
    with of, pytest.raises(engine.EngineError, match=message) as caught:
        calls[call]()
    assert caught.value.status == 2


@pytest.mark.long
def test_a_hostile_archive_is_checked_in_little_time() -> None:
    """All its schedules share a kernel of very many variants."""
    made = support.built()
    kernel, spec = 5, made.specs[0]
    many = replace(
        made,
        tables=[],
        variants={(kernel, i): spec for i in range(400_000)},
    )
    plain = made.tables[0].plain._replace(kernel=kernel, cluster=spec.cluster[0])
    cells = [plain._replace(group=1 + i) for i in range(60_000)]
    many.tables.append(format_.Table(plain.family, 0, plain, ([1] * 60, [1] * 1000, [1]), cells))
    hostile, archive, library = support.write(many, "hostile.samebits"), ctypes.c_void_p(), support.library()
    start = time.perf_counter()
    assert library.sb_archive_open(str(hostile).encode(), ctypes.byref(archive)) == 0
    library.sb_archive_close(archive)
    assert time.perf_counter() - start < 5


def test_tables_do_not_share_their_cells(path: Path) -> None:
    sections = struct.unpack_from("<14Q", path.read_bytes(), 160)
    cells_of_the_second = sections[6] + 32 + 28
    assert "its tables contradict each other" in str(
        opening(changed(path, cells_of_the_second, bytes(4), checksum=True))
    )


def test_an_archive_is_refused(path: Path) -> None:
    damaged = opening(changed(path, 5000, b"\xff\x00"))
    assert damaged.status == 3
    assert re.search(r"damaged: expected the checksum \w{8}, got", str(damaged))
    cut = path.with_name("cut.samebits")
    cut.write_bytes(path.read_bytes()[:-16])
    assert "damaged: expected" in str(opening(cut))
    assert "has ABI version 99, this library 5: export it again" in str(opening(changed(path, 8, b"\x63")))
    assert "it is not an archive of samebits export" in str(opening(changed(path, 0, b"X")))
    assert "its tables contradict each other" in str(opening(changed(path, 168, b"\xff", checksum=True)))
    assert "cannot be opened" in str(opening(path.with_name("none")))


def test_an_archive_for_another_gpu_is_refused() -> None:
    other = support.write(support.built("sm_80"), "other.samebits")
    error = opening(other)
    assert error.status == 2
    assert "device 0 is sm_90, the archive is for sm_80: samebits export --arch sm_90a" in str(error)


def test_contexts_give_back_what_they_take(path: Path) -> None:
    driver = support.fake_driver()
    counts = [ctypes.c_int.in_dll(driver, f"driver_{of}") for of in ("retained", "modules")]
    before = [c.value for c in counts]
    support.opened(path).close()
    assert [c.value for c in counts] == before


def test_a_driver_that_is_not_there_gives_a_status(path: Path) -> None:
    code = (
        "import sys; from samebits_native import engine\n"
        "try: engine.Engine(sys.argv[1], library=sys.argv[2])\n"
        "except engine.EngineError as error: print(error.status, error)"
    )
    library = support.build("/nowhere/libcuda.so")
    command = [sys.executable, "-c", code, str(path), str(library)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.stdout.startswith("4 samebits_native: the CUDA driver does not load: /nowhere/libcuda.so")


@pytest.mark.long
@pytest.mark.parametrize(
    ("sanitizer", "damages"),
    [
        ("address,undefined", 300),
        pytest.param("address,undefined", 3000, marks=pytest.mark.nightly),
        ("thread", 100),
    ],
)
def test_bad_arguments_damaged_archives_and_threads_under_sanitizers(
    path: Path, sanitizer: str, damages: int
) -> None:
    folder, tests = support.folder(), Path(__file__).parent
    flags = ["-std=c11", "-O1", "-Wall", "-Wextra", "-Werror"]
    sanitize = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    driver, program, probe = folder / "libdriver-fuzz.so", folder / "fuzz", folder / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    if subprocess.run(["cc", *sanitize, str(probe), "-o", str(program)], check=False).returncode:
        sanitize = []  # without them, it still must not crash
    elif subprocess.run([str(program)], check=False).returncode:
        pytest.skip("the sanitizer does not run here")
    subprocess.run(
        ["cc", *flags, *sanitize, "-fPIC", "-shared", "-o", str(driver), str(tests / "driver.c")], check=True
    )
    sources = [*support.sources(), str(tests / "fuzz.c"), str(driver)]
    options = [f"-I{support.SOURCES}", f'-DSB_LIBCUDA="{driver}"', "-o", str(program)]
    subprocess.run(["cc", *flags, *sanitize, *options, *sources, "-ldl", "-lpthread", "-lm"], check=True)
    command = [str(program), str(path), str(folder / "damaged.samebits"), str(damages)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("1000 statuses of 1000 bad arguments; ")


class Described:
    """An array by its ``__cuda_array_interface__``."""

    def __init__(self, x: Any) -> None:
        interface = dict(x.__array_interface__)
        interface["version"] = 3
        self.__cuda_array_interface__ = interface


def test_the_engine_takes_arrays_that_are_not_torchs(path: Path) -> None:
    of = support.opened(path)
    support.launches()
    a, b, out = (Described(np.zeros(s, np.float32)) for s in ((8, 16), (4, 16), (8, 4)))
    of.matmul(a, engine.Array.of(b).mT, out=out, stream=5)
    (launch,) = support.launches()
    assert launch.stream == 5
    strided = Described(np.zeros((8, 32), np.float16)[:, ::2])
    assert engine.Array.of(strided).strides == (32, 2)
    with pytest.raises(engine.EngineError, match=r"expected matrices that fit together, got shapes"):
        of.matmul(a, b, out=out, stream=0)
    with pytest.raises(engine.EngineError, match="expected a's dtype float32, got"):
        of.matmul(a, Described(np.zeros((16, 4), np.float16)), out=out, stream=0)
    with pytest.raises(TypeError, match="expected an array on a GPU, got list"):
        of.matmul([1], b, out=out, stream=0)
    halves = [Described(np.zeros(s, np.float16)) for s in ((8, 16), (16, 4), (8, 4))]
    with pytest.raises(engine.EngineError, match="accumulate: expected an out_dtype of SB_F32") as caught:
        of.matmul(*halves[:2], out=halves[2], accumulate=True, stream=0)
    assert caught.value.status == 1
    assert support.launches() == []


def test_the_engine_refuses_arrays_that_it_would_misread(path: Path) -> None:
    of = support.opened(path)
    support.launches()
    a, b, out = (Described(np.zeros(s, np.float32)) for s in ((8, 16), (16, 4), (8, 4)))

    def refused(message: str, **given: Any) -> None:
        with pytest.raises(TypeError, match=message):
            of.matmul(**({"a": a, "b": b, "out": out, "stream": 0} | given))

    fields = np.zeros((16, 4), np.dtype([("x", "<f4"), ("y", "<u2")]))["x"]  # six bytes apart
    refused(r"b: expected strides in whole elements of 4 bytes, got \(24, 6\) bytes", b=Described(fields))
    refused("a: expected little-endian numbers, got >f4", a=Described(np.zeros((8, 16), ">f4")))
    refused("a: expected float32, .*, got <f8", a=Described(np.zeros((8, 16))))
    fixed = np.zeros((8, 4), np.float32)
    fixed.flags.writeable = False
    refused("out: expected an array that may be written, got a read-only one", out=Described(fixed))
    refused("bias: expected one of|bias: expected float32", bias=Described(np.zeros(4, np.int32)))
    of.matmul(Described(np.broadcast_to(np.float32(1), (8, 16))), b, out=out, stream=0)  # a may be read-only
    assert len(support.launches()) == 1


def test_the_engine_takes_workspaces_of_any_dtype(path: Path) -> None:
    of = support.opened(path)
    hidden, weight = (Described(np.zeros((n, 64), np.float32)) for n in (9, 300))
    target, out = Described(np.zeros(9, np.int64)), Described(np.zeros(9, np.float32))
    size = of.workspace_size(hidden, weight)

    def run(room: np.ndarray[Any, Any], *, fixed: bool = False) -> None:
        described = Described(room)
        described.__cuda_array_interface__["data"] = (1 << 24, fixed)
        of.linear_logp(hidden, weight, target, out=out, workspace=described, stream=0)

    for dtype in ("u1", "f4", "f8", "i2", "V256"):
        item = np.dtype(dtype).itemsize
        run(np.zeros((2, size // item // 2), dtype))
        with pytest.raises(engine.EngineError, match=f"expected {size} bytes.*, got {size - item}"):
            run(np.zeros(size // item - 1, dtype))
    for room in (np.broadcast_to(np.uint8(0), size), np.zeros(2 * size, np.uint8)[::2]):
        with pytest.raises(engine.EngineError, match="workspace: expected a contiguous array, got shape"):
            run(room)
    with pytest.raises(TypeError, match="workspace: expected an array that may be written"):
        run(np.zeros(size, np.uint8), fixed=True)
    with pytest.raises(TypeError, match="workspace: expected an array on a GPU, got DLPack"):
        of.linear_logp(hidden, weight, target, out=out, workspace=np.zeros(size, np.uint8), stream=0)
    support.launches()


def test_an_engine_gives_back_what_it_takes_if_it_fails(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    real = engine.load_library

    def loaded(path: str | Path) -> Any:
        library = real(path)
        close = library.sb_archive_close

        def counted(archive: Any) -> None:
            closed.append(bool(archive))
            close(archive)

        library.sb_archive_close = counted
        return library

    monkeypatch.setattr(engine, "load_library", loaded)
    with pytest.raises(engine.EngineError, match="device: cuDeviceGet"):
        engine.Engine(path, library=support.build(support.fake_driver()._name), device=7)
    assert closed == [True]
    with support.opened(path) as of:
        assert of.version == __version__
    assert closed == [True, True]
    assert of.version is None
    assert of.contract_digest("float32") is None


def test_an_archives_path_may_have_any_bytes(path: Path) -> None:
    other = path.with_name(os.fsdecode(b"\xff.samebits"))
    shutil.copy(path, other)
    with support.opened(other) as of:
        assert of.version == __version__


def test_the_engine_checks_groups(path: Path) -> None:
    of = support.opened(path)
    support.launches()
    shapes, ends = ((8, 16), (3, 16, 4), (8, 4)), Described(np.zeros(3, np.int32))
    a, b, out = (Described(np.zeros(s, np.float16)) for s in shapes)
    of.grouped_mm(a, b, ends, out=out, bias=Described(np.zeros((3, 4), np.float16)), stream=5)
    (launch,) = support.launches()
    assert launch.stream == 5
    with pytest.raises(engine.EngineError, match=r"expected \[T, K\], \[G, K, N\], \[T, N\], \[G\], got"):
        of.grouped_mm(a, b, Described(np.zeros(2, np.int32)), out=out, stream=0)
    with pytest.raises(engine.EngineError, match=r"bias: expected a's dtype and \(3, 4\)"):
        of.grouped_mm(a, b, ends, out=out, bias=Described(np.zeros((4, 3), np.float16)), stream=0)
    with pytest.raises(TypeError, match="offs: expected int32, got int64"):
        of.grouped_mm(a, b, Described(np.zeros(3, np.int64)), out=out, stream=0)
    assert support.launches() == []


def test_the_engine_checks_attention(path: Path) -> None:
    of = support.opened(path)
    support.launches()
    q, k, out = (Described(np.zeros((2, n, 4, 64), np.float16)) for n in (1, 600, 1))
    lengths = Described(np.zeros(2, np.int32))
    room = engine.Array(1 << 20, "float32", (1 << 20,), (1,))
    given: dict[str, Any] = {"workspace": room, "stream": 5}
    result = engine.Array(1 << 21, "float16", (2, 1, 4, 64), (256, 256, 64, 1))
    of.attention(q, k, k, out=result, key_length=lengths, **given)
    assert {launch.stream for launch in support.launches()} == {5}
    wrong = [
        ({"k": out}, "q, k, v: expected arrays that fit together"),
        ({"window": (0, 5), "causal": True}, "window: expected 0 or -1 to the right with causal, got 5"),
        ({"key_length": Described(np.zeros(3, np.int32))}, r"key_length: expected shape \(2,\)"),
        ({"scale": -1.0}, r"scale: expected a number in \(0, 1e38\), got -1"),
        ({"lse": Described(np.zeros((2, 4), np.float32))}, r"lse: expected contiguous \(2, 4, 1\)"),
    ]
    for change, message in wrong:
        with pytest.raises(engine.EngineError, match=message):
            of.attention(q, change.pop("k", k), k, out=result, **(given | change))
    with pytest.raises(TypeError, match="attention has no option mask"):
        of.attention(q, k, k, out=result, mask=q, **given)
    size = of.attention_workspace_size(q, k, k, key_length=lengths)
    small = room._replace(shape=(size // 4 - 1,))
    with pytest.raises(engine.EngineError, match=f"workspace: expected {size} bytes, got {size - 4}"):
        of.attention(q, k, k, out=result, key_length=lengths, workspace=small, stream=0)
    other = [Described(np.zeros((2, 9, 4, 32), np.float16)) for _ in range(3)]
    with pytest.raises(
        engine.EngineError,
        match=r"no attention with heads of 32 and 32 of f16: .* --op attention --head 32x32",
    ):
        of.attention(*other, out=engine.Array(1 << 21, "float16", (2, 9, 4, 32), (1152, 128, 32, 1)), **given)
    assert support.launches() == []


def test_the_engine_reads_dlpack(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(6, 8, dtype=torch.bfloat16)[1:, 2:]

    class Exported:
        def __init__(self, error: Exception | None = None) -> None:
            self.error = error

        def __dlpack_device__(self) -> tuple[int, int]:
            return x.__dlpack_device__()

        def __dlpack__(self, stream: int) -> Any:
            assert stream == -1  # no synchronization
            if self.error is not None:
                raise self.error
            return x.__dlpack__()

    with pytest.raises(TypeError, match="q: expected an array on a GPU, got DLPack's device 1"):
        engine.Array.of(Exported(), "q")
    with pytest.raises(TypeError, match="array: expected an array on a GPU, got DLPack's device 1"):
        engine.Array.of(np.zeros(4, np.float32))
    with pytest.raises(TypeError, match="array: expected an array on a GPU, got DLPack's device 1"):
        engine.Array.of(Exported(BufferError("which is not asked")))
    monkeypatch.setattr(engine, "_CUDA", (1,))
    found = engine.Array.of(Exported())
    assert found == engine.Array(x.data_ptr(), "bfloat16", (5, 6), (8, 1))
    assert found.mT == engine.Array(x.data_ptr(), "bfloat16", (6, 5), (1, 8))
    for error in (BufferError("it has a gradient"), RuntimeError("it has a gradient")):
        with pytest.raises(TypeError, match="k: expected an array that DLPack gives, got it has a gradient"):
            engine.Array.of(Exported(error), "k")
    x = torch.zeros(2, dtype=torch.complex64)
    with pytest.raises(TypeError, match=r"v: expected float32, .*, got DLPack's dtype \(5, 64, 1\)"):
        engine.Array.of(Exported(), "v")


@pytest.mark.parametrize("arch", GPUS)
def test_every_architecture_has_an_archive(arch: str) -> None:
    made = support.built(arch)
    assert [bool(digest) for digest in made.digests] == [True, *[arch != "sm_75"] * 2]
    assert len(made.pack(support.fake_code(made))) < 1 << 20
    assert all(spec.oldest <= made.capability for spec in made.specs)


@pytest.mark.long
def test_an_archive_has_the_operations_that_were_asked_for() -> None:
    sources = {}
    for op in OPS:
        made = build("sm_90a", [torch.bfloat16], [op], support.TINY)
        sources[op] = {spec.source for spec in made.specs}
    assert sources == {
        "gemm": {"tensor_core.cu", "tensor_core_sm90.cu"},
        "ragged": {"tensor_core.cu", "tensor_core_sm90.cu"},
        "linear_logp": {"tensor_core.cu", "statistics_sm90.cu", "logp.cu"},
        "grouped_mm": {"tensor_core.cu", "grouped_sm90.cu"},
        "attention": {"tensor_core.cu", "attention.cu", "attention_sm90.cu"},
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"archs": ["sm_70"]}, "--arch: expected one of sm_75, .*, got sm_70"),
        ({"dtypes": ["int8"]}, "--dtype: expected one of f32, bf16, f16, got int8"),
        (
            {"ops": ["conv"]},
            "--op: expected one of gemm, ragged, linear_logp, grouped_mm, attention, got conv",
        ),
        ({"shapes": ["4096"]}, "--shape: expected KxN, such as 4096x28672, got 4096"),
        (
            {"heads": ["512"]},
            "--head: expected a size from 1 to 256, or those of q and v as 192x128, got 512",
        ),
        ({"archs": ["sm_75"], "dtypes": ["bf16"]}, "--dtype: expected f32 for sm_75"),
    ],
)
def test_export_refuses(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    given = {"archs": ["sm_90a"], "dtypes": [], "ops": [], "shapes": []} | options
    with pytest.raises(ToolError, match=message):
        export(tmp_path, **given)
    assert list(tmp_path.iterdir()) == []


def test_the_program_in_the_documents_compiles(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "native.md").read_text()
    (program,) = re.findall(r"^```c\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    (tmp_path / "program.c").write_text(program)
    command = ["cc", "-std=c11", "-Wall", "-Wextra", "-Werror", f"-I{support.SOURCES}", "-c"]
    subprocess.run([*command, "-o", str(tmp_path / "program.o"), str(tmp_path / "program.c")], check=True)


def test_the_documents_commands_build_the_library_and_the_program(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "native.md").read_text()
    library, program = re.findall(r"^cc (?:.*\\\n)*.*$", text, re.MULTILINE)
    out = tmp_path / "libsamebits.so"
    build = library.replace("-o libsamebits.so", f"-o {out}")
    subprocess.run(["sh", "-c", build], check=True, cwd=ROOT)
    assert engine.load_library(out).sb_abi_version() == format_.ABI
    (source,) = re.findall(r"^```c\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    (tmp_path / "program.c").write_text(source)
    (tmp_path / "native").symlink_to(support.NATIVE)
    driver = (tmp_path / "cuda.c", tmp_path / "libcuda.so")
    driver[0].write_text(
        "".join(f"int {name}(void) {{ return 0; }}\n" for name in re.findall(r"cu\w+(?=\()", source)[:6])
    )
    subprocess.run(["cc", "-shared", "-o", str(driver[1]), str(driver[0])], check=True)
    subprocess.run(["sh", "-c", program], check=True, cwd=tmp_path)


@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake")
def test_cmake_builds_the_library(tmp_path: Path) -> None:
    for command in (["-S", str(support.NATIVE), "-B", str(tmp_path)], ["--build", str(tmp_path)]):
        subprocess.run(["cmake", *command], check=True, capture_output=True)
    built = tmp_path / "libsamebits.so"
    assert built.resolve().name == f"libsamebits.so.{format_.ABI}"
    assert engine.load_library(built).sb_abi_version() == format_.ABI


@pytest.mark.skipif(shutil.which("rustc") is None, reason="no Rust compiler")
def test_the_example_in_rust_runs(path: Path, tmp_path: Path) -> None:
    shutil.copy(support.build(support.fake_driver()._name), tmp_path / "libsamebits.so")
    example = ROOT / "examples" / "native.rs"
    options = ["--edition=2021", "-D", "warnings", "-L", str(tmp_path), "-l", "samebits"]
    program = tmp_path / "native"
    subprocess.run(["rustc", *options, "-o", str(program), str(example)], check=True)
    done = subprocess.run(
        [str(program), str(path)],
        env={"LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, f"f32: {FMA.digest()}\n"), done.stderr
