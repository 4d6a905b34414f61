"""Rows of tables, copied by ``kernels/gather.cu``: what it is asked for, and what it does on a GPU."""

from __future__ import annotations

import ctypes
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import samebits
from samebits.backends import replay
from samebits.backends.cuda import compiler, gather
from samebits.testing import assert_same_bits
from tests.support.cubins import resources
from tests.support.fake_gpu import FakeGpu, fake_gpu

BF16, F32, I32, I64 = torch.bfloat16, torch.float32, torch.int32, torch.int64
HUGE = 2**31 + 8  # elements from row to row


def apart(size: int, like: Tensor) -> Tensor:
    """Two rows whose distance no 32-bit number holds."""
    room = torch.empty(HUGE + size, dtype=like.dtype, device=like.device)
    table = room.as_strided((2, size), (HUGE, 1))
    return table.copy_(like[:2, :size])


# Of values[50, 5000], of which nothing is NaN.
TABLES: dict[str, Callable[[Tensor], Tensor]] = {
    "by 16 bytes": lambda v: v[:, :512].clone(),
    "by 4 bytes": lambda v: v[:, :70].clone(),
    "by elements": lambda v: v[:, :71].clone(),
    "a part of a warp's part": lambda v: v[:, :8].clone(),
    "several parts": lambda v: v,
    "several parts by elements": lambda v: v[:, :4999].clone(),
    "gaps": lambda v: v[:, :4096],
    "any alignment": lambda v: v[:, 1:4097],
    "one column": lambda v: v[:, 7:8],
    "one column of many rows": lambda v: v.mT[:, 7:8],
    "turned": lambda v: v.mT,
    "every second column": lambda v: v[:, ::2],
    "one row many times": lambda v: v[3].expand(50, 5000),
    "one row": lambda v: v[3:4],
    "rows far apart": lambda v: apart(77, v),
    "no columns": lambda v: v[:, :0],
}


def numbers(rows: int, device: str = "cpu") -> Iterator[Tensor]:
    """Of any shape, dtype and strides."""
    some = torch.randint(rows, (3, 40), generator=torch.Generator().manual_seed(rows)).to(device)
    yield from (some, some.to(I32), some[0, 0], some[:, 1:7], some.mT, some[:0], some[0, 0].expand(4, 5))
    yield from (torch.tensor([0, rows - 1], device=device), torch.zeros(2, 0, 3, dtype=I64, device=device))


def values(dtype: torch.dtype, device: str = "cpu") -> Tensor:
    return torch.arange(250_000, device=device).view(50, 5000).remainder(251).to(dtype)


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    with fake_gpu() as found:
        yield found


@pytest.mark.parametrize("arch", compiler.ARCHITECTURES)
@pytest.mark.parametrize("dtype", [I32, I64])
def test_the_kernel_compiles(arch: str, dtype: torch.dtype) -> None:
    for unit in gather._UNITS:
        assert resources(gather.kernel_spec(dtype, unit), arch).local_bytes == 0


def as_launched(gpu: FakeGpu) -> None:
    """Copy what the launches ask for."""
    for (_, _, config, params), spec in zip(gpu.log, gpu.specs, strict=True):
        at, given, out, count, parts, rows, units, step = struct.unpack("@PPPqqqqq", params)
        names = dict(spec.constants)
        (unit,) = (size for size, name in gather._UNITS.items() if name == names["UNIT"])
        (blocks,) = struct.unpack_from("@I", config)
        assert 8 * (blocks - 1) < count * parts <= 8 * blocks
        assert 128 * (parts - 1) < units <= 128 * parts
        assert (at | out | step * unit) % unit == 0
        number: Any = ctypes.c_int64 if names["NUMBER"] == "i64" else ctypes.c_int32
        for i, row in enumerate((number * count).from_address(given)):
            assert 0 <= row < rows
            ctypes.memmove(out + i * units * unit, at + row * step * unit, units * unit)


@pytest.mark.parametrize("dtype", [BF16, F32, torch.float64, torch.int8], ids=str)
@pytest.mark.parametrize("name", TABLES)
def test_a_launch_asks_for_the_rows(gpu: FakeGpu, name: str, dtype: torch.dtype) -> None:
    if name == "rows far apart" and dtype != torch.int8:
        pytest.skip("it takes as much memory as it is far")
    table = TABLES[name](values(dtype))
    for given in numbers(len(table)):
        gpu.start()
        with gpu.keeps_copies():
            out = gather.rows_of(table, given)
            as_launched(gpu)
        assert out.shape == (*given.shape, table.shape[1])
        assert torch.equal(out, table[given.long()])
        by_pytorch = table.stride(1) != 1 and table.shape[1] > 1
        assert len(gpu.log) == (out.numel() > 0 and not by_pytorch)


def within(form: str, on_uncovered: Any = "error") -> Any:
    if form == "context":
        return samebits.batch_invariant(on_uncovered)
    return samebits.set_batch_invariant_mode(True, on_uncovered)


@pytest.mark.parametrize("form", ["context", "process"])
@pytest.mark.parametrize("records", [False, True])
def test_the_mode_replays_it(gpu: FakeGpu, form: str, records: bool) -> None:
    replay.forget()
    table, given = values(BF16)[:, :512].clone().requires_grad_(records), torch.arange(20).view(4, 5)
    with within(form):
        for _ in range(5):
            gpu.start()
            out = F.embedding(given, table)
            as_launched(gpu)
            assert [launch[0] for launch in gpu.log] == ["gather.cu"]
            assert torch.equal(out, table[given])
            assert out.requires_grad == records
            assert not out._is_view()
            with torch.no_grad():
                assert not F.embedding(given, table).requires_grad


@pytest.mark.parametrize("form", ["context", "process"])
def test_what_it_does_not_take_is_pytorchs(gpu: FakeGpu, form: str) -> None:
    table, given = values(F32)[:, :64].clone(), torch.arange(6).view(2, 3)
    calls: dict[str, Callable[[], Tensor]] = {
        "float64": lambda: F.embedding(given, table.double()),
        "int64": lambda: F.embedding(given, table.long()),
        "turned": lambda: F.embedding(given, table.mT.contiguous().mT),
        "vmap": lambda: torch.func.vmap(lambda one: F.embedding(one, table))(given),
        "a chosen backend": lambda: samebits.use_backend("triton")(lambda: F.embedding(given, table))(),
    }
    replay.forget()
    for name, call in calls.items():
        with within(form, "ignore"):
            for _ in range(4):
                gpu.start()
                out = call()
                as_launched(gpu)  # for vmap, of what it was told to do
                assert torch.equal(out.float(), table[given]), name
                assert gpu.log == [] or (name, form) == ("vmap", "process")
    for bad in (lambda: F.embedding(given, table[0]), lambda: F.embedding(table, table)):
        with pytest.raises(RuntimeError) as theirs:
            bad()
        with within(form), pytest.raises(RuntimeError) as ours:
            bad()
        assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize(
    ("shape", "dtype", "error", "said"),
    [((4, 8), torch.int16, TypeError, "ids: expected"), ((4,), torch.int64, ValueError, "weight: expected")],
)
def test_the_registered_operator_names_what_it_refuses(
    shape: tuple[int, ...], dtype: torch.dtype, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        torch.ops.samebits.embedding(torch.zeros(shape), torch.zeros(3, dtype=dtype), -1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F32, torch.float64, torch.int8], ids=str)
@pytest.mark.parametrize("name", TABLES)
def test_rows_are_copied(name: str, dtype: torch.dtype) -> None:
    table = TABLES[name](values(dtype, "cuda"))
    for given in numbers(len(table), "cuda"):
        assert torch.equal(gather.rows_of(table, given), table[given.long()])


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["context", "process"])
@pytest.mark.parametrize("records", [False, True])
def test_embeddings_on_a_gpu(form: str, records: bool) -> None:
    table = torch.randn(1000, 4096, device="cuda", dtype=BF16)
    table[7] = torch.nan
    for shape in ((), (3, 1000)):
        for _ in range(4):  # a call, its recording, its replays
            given = torch.randint(1000, shape, device="cuda")
            with within(form):
                out = F.embedding(given, table.detach().requires_grad_(records))
            assert_same_bits(out.detach(), table[given])


@pytest.mark.gpu
@pytest.mark.parametrize("given", ["[0, 50]", "[-1]", "[2**40]", "[0, 49]"])
def test_a_number_out_of_range_ends_in_a_device_assert(given: str) -> None:
    """In a process of its own, since an assertion on the GPU ends that."""
    program = f"""
import torch, samebits
with samebits.batch_invariant():
    torch.nn.functional.embedding(torch.tensor({given}, device="cuda"), torch.ones(50, 8, device="cuda"))
torch.cuda.synchronize()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    good = given == "[0, 49]"
    assert (done.returncode == 0) == good, done.stderr
    assert good or "an id is out of range" in done.stderr + done.stdout
    assert good or "device-side assert" in done.stderr
