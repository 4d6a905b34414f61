"""Packs what benchmarks want beside PyTorch, for a GPU's machine that reaches no package registry.

python -m benchmarks offline vllm OUT.tar.xz      vLLM, without the code of other GPUs: 25 MB
python -m benchmarks offline peers OUT.tar.xz     flash-linear-attention, mamba-ssm, causal-conv1d, Triton
python -m benchmarks offline build FOLDER         there, once: the CUDA code of mamba-ssm and causal-conv1d

For Linux on x86-64 with Python 3.12, torch 2.11 and CUDA 13, on Hopper. There, unpack into a FOLDER, and give
benchmarks PYTHONPATH=<checkout>:FOLDER/vllm, or :FOLDER/peers. Triton comes without NVIDIA's programs: set
TRITON_PTXAS_PATH to those of the machine's own Triton, and so on. Packing wants ``pip`` and ``strip``, and an
environment with this library's development packages.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

VLLM = "0.26.0"
"""The newest that takes torch 2.11."""
IMPORTED = (
    *("annotated-types==0.8.0", "annotated-doc==0.0.7", "astor==0.8.1", "cachetools==8.0.2", "cbor2==6.3.0"),
    *("compressed-tensors==0.17.0", "depyf==0.20.0", "dill==0.4.1", "fastapi==0.136.3", "httpcore2==2.16.2"),
    *("httpx2==2.16.2", "jiter==0.19.0", "loguru==0.7.3", "msgspec==0.22.0", "openai==3.57.0"),
    *("partial-json-parser==0.2.1.1.post7", "pybase64==1.5.1", "pydantic==2.14.4", "pydantic-core==2.50.5"),
    *(
        "pyzmq==27.3.0",
        "sniffio==1.3.1",
        "starlette==1.10.0",
        "truststore==0.10.5",
        "typing-inspection==0.4.5",
    ),
)
"""What vLLM imports that machines with PyTorch lack."""
NEVER_CALLED = ("xgrammar", "llguidance", "openai_harmony")
STAND_IN = """__path__ = []
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    from pydantic_core import core_schema
    return type(name, (), {"__get_pydantic_core_schema__": classmethod(lambda *_: core_schema.any_schema())})
"""
SKIPPED = re.compile(
    "third_party/(deep_gemm|fmha|tml_fa4)|benchmarks/|fused_moe/configs|vllm_flash_attn/cute|/RECORD$"
)
LIBRARIES = re.compile(
    r"(_C_stable_libtorch|_moe_C_stable_libtorch|_vllm_fa3_C|cumem_allocator|spinloop)\.abi3\.so$"
)
PEERS = ("flash-linear-attention==0.6.0", "fla-core==0.6.0", "triton==3.7.1")
SOURCES = ("mamba-ssm==2.3.2.post1", "causal-conv1d==1.7.0")
THERE = ["--only-binary=:all:", "--python-version=3.12", "--implementation=cp"]
THERE += [f"--platform=manylinux_2_{n}_x86_64" for n in (5, 17, 24, 27, 28, 31, 34, 35)]
FATBIN, PTX = struct.pack("<I", 0xBA55ED50), 1


def pip(*arguments: str, **variables: str) -> None:
    command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--no-deps"]
    subprocess.run(command, check=True, env=os.environ | variables)


def install(to: Path, packages: Iterable[str]) -> None:
    pip("install", "--no-compile", "--target", str(to), *THERE, *packages)


def without_other_code(library: Path, unwanted: Callable[[int, int, bytes], bool]) -> None:
    """Zero what is `unwanted` of a library's GPU code, by kind, architecture and bytes: zeros compress."""
    code, at = bytearray(library.read_bytes()), 0
    while (at := code.find(FATBIN, at)) >= 0:
        version, header, size = struct.unpack_from("<HHQ", code, at + 4)
        if version != 1 or header != 16:
            at += 4
            continue
        entry, at = at + header, at + header + size
        while entry < at:
            kind, _, head, payload = struct.unpack_from("<HHIQ", code, entry)
            (arch,) = struct.unpack_from("<I", code, entry + 28)
            begin, entry = entry + head, entry + head + payload
            if unwanted(kind, arch, bytes(code[begin:entry])):
                code[begin:entry] = bytes(payload)
    library.write_bytes(code)


def _not_hopper(kind: int, arch: int, code: bytes) -> bool:
    """Of PTX, what is large belongs to quantized weights of other formats."""
    return len(code) > 200_000 if kind == PTX else arch != 90


def _other_attention(kind: int, arch: int, code: bytes) -> bool:
    """FlashAttention 3 in FP8, with heads of 96 or 256, or with soft caps alone."""
    sizes = set(re.findall(rb"EELi(\d+)ENS_10bfloat16", code))
    flags = {
        re.sub(rb"[LbE]", b"", f) for f in re.findall(rb"bfloat16_tEfNS_4arch4Sm90E((?:Lb[01]E)+)", code)
    }
    capped = bool(flags) and all(f[2:3] == b"1" for f in flags)
    return b"float_e4m3" in code or b"96" in sizes or (b"256" in sizes and bool(flags)) or capped


def vllm(to: Path) -> None:
    install(to, IMPORTED)
    for name in NEVER_CALLED:
        (to / name).mkdir()
        (to / name / "__init__.py").write_text(STAND_IN)
    with tempfile.TemporaryDirectory() as folder:
        pip("download", "--dest", folder, *THERE, f"vllm=={VLLM}")
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as whole:
            for name in whole.namelist():
                wanted = name.endswith((".py", ".json")) or LIBRARIES.search(name) or "dist-info/" in name
                if wanted and not SKIPPED.search(name):
                    whole.extract(name, to)
    for library in (to / "vllm").rglob("*_C*.so"):
        without_other_code(library, _other_attention if "fa3" in library.name else _not_hopper)
    own = to / "samebits-0.2.0.dist-info"  # an entry point beside a checkout that is not installed
    own.mkdir()
    (own / "METADATA").write_text("Metadata-Version: 2.1\nName: samebits\nVersion: 0.2.0\n")
    (own / "entry_points.txt").write_text("[vllm.general_plugins]\nsamebits = samebits.vllm:register\n")


def peers(to: Path) -> None:
    install(to, PEERS)
    triton = to / "triton"
    for part in (
        "plugins",
        "instrumentation",
        "FileCheck",
        "backends/nvidia/bin",
        "backends/nvidia/lib/cupti",
    ):
        path = triton / part
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    (triton / "_C/libproton.so").unlink()
    subprocess.run(["strip", "--strip-unneeded", str(triton / "_C/libtriton.so")], check=True)
    skip = {"MAMBA_SKIP_CUDA_BUILD": "TRUE", "CAUSAL_CONV1D_SKIP_CUDA_BUILD": "TRUE"}
    with tempfile.TemporaryDirectory() as folder:
        pip("download", "--no-build-isolation", "--no-binary=:all:", "--dest", folder, *SOURCES, **skip)
        for archive in Path(folder).glob("*.tar.gz"):
            with tarfile.open(archive) as whole:
                whole.extractall(to / "sources", filter="data")
    for pinned in SOURCES:
        name, version = pinned.split("==")
        package = name.replace("-", "_")
        shutil.copytree(to / "sources" / f"{package}-{version}" / package, to / package)
        own = to / f"{package}-{version}.dist-info"
        own.mkdir()
        (own / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (to / "mamba_ssm/__init__.py").write_text("")  # else it imports whole models


def build(folder: Path) -> None:
    """Some minutes with eight compilers: run it beside what does not want the CPUs."""
    from torch.utils.cpp_extension import load

    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")
    undefined = ("HALF_OPERATORS", "HALF_CONVERSIONS", "BFLOAT16_OPERATORS", "BFLOAT16_CONVERSIONS")
    flags = ["-O3", "-std=c++17", "--expt-relaxed-constexpr", "--expt-extended-lambda", "--use_fast_math"]
    flags += [
        f"-U__CUDA_NO_{name}__" for name in (*undefined, "BFLOAT162_OPERATORS", "BFLOAT162_CONVERSIONS")
    ]
    for name, pattern in (
        ("selective_scan_cuda", "mamba_ssm-*/csrc/selective_scan"),
        ("causal_conv1d_cuda", "causal_conv1d-*/csrc"),
    ):
        (source,) = (folder / "sources").glob(pattern)
        files = sorted(str(path) for path in source.iterdir() if path.suffix in (".cpp", ".cu"))
        load(
            name,
            files,
            extra_cuda_cflags=flags,
            extra_include_paths=[str(source)],
            build_directory=str(folder),
        )


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("what", choices=("vllm", "peers", "build"))
    parser.add_argument("path", type=Path, help="of the archive, or of the unpacked peers")
    options = parser.parse_args()
    if options.what == "build":
        build(options.path)
        return
    with tempfile.TemporaryDirectory() as folder:
        {"vllm": vllm, "peers": peers}[options.what](Path(folder))
        with tarfile.open(options.path, "w:xz") as archive:
            archive.add(folder, options.what, filter=lambda t: None if "__pycache__" in t.name else t)
    print(f"{options.path}: {options.path.stat().st_size / 1e6:,.1f} MB")
