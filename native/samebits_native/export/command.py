"""``samebits export``: choose, compile, and write an archive for each architecture."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch

from samebits.backends import UnavailableError
from samebits.backends.cuda import compiler, precompile
from samebits.backends.cuda.compiler import KernelSpec
from samebits.tools import terminal
from samebits.tools.shapes import weight
from samebits.tools.text import ToolError, one_line, plural
from samebits_native.export.choices import Sizes
from samebits_native.export.kernels import DTYPES, GPUS, OPS, build


def main(
    folder: Path,
    *,
    archs: Sequence[str],
    dtypes: Sequence[str],
    ops: Sequence[str],
    shapes: Sequence[str],
    heads: Sequence[str] = (),
) -> int:
    """Write archives into `folder`. The arguments are the command's options; an empty one stands for all.

    Returns:
        The exit code, 0.

    Raises:
        ToolError: an argument is not one of those that there are, nothing compiles here, or a file cannot be
            written.
    """
    out = terminal.Console()
    _among("--arch", archs, GPUS)
    _among("--dtype", dtypes, DTYPES)
    _among("--op", ops, OPS)
    chosen = [DTYPES[d] for d in dtypes or DTYPES]
    sizes = Sizes()
    if shapes:
        given = [weight(text) for text in shapes]
        sizes = sizes._replace(shapes=given, experts=given)
    if heads:
        sizes = sizes._replace(heads=[_head(text) for text in heads])
    if "sm_75" in archs and torch.float32 not in chosen:
        raise ToolError("--dtype: expected f32 for sm_75, whose tensor cores no contract describes")
    try:
        compiler.require_compiler()
        folder.mkdir(parents=True, exist_ok=True)
        for arch in archs:
            with terminal.progress() as say:
                say(0.0, f"choosing schedules for {arch}")
                archive = build(arch, chosen, ops or OPS, sizes)
                code = compile_all(archive.specs, arch, say)
            path, packed = folder / f"{arch}.samebits", archive.pack(code)
            path.write_bytes(packed)
            kernels, contracts = plural(len(code), "kernel"), _contracts(archive.digests)
            out.print(f"{path}: {kernels}, {len(packed) / 1e6:.1f} MB; contracts: {contracts}")
    except UnavailableError as error:
        raise ToolError(str(error)) from error
    except OSError as error:
        raise ToolError(f"{folder}: {one_line(error)}") from error
    return 0


def compile_all(
    specs: Sequence[KernelSpec], arch: str, say: Callable[[float, str], None] = lambda done, what: None
) -> list[bytes]:
    """The machine code of `specs` for `arch`, from the on-disk cache or by a process for each CPU."""
    found: list[bytes] = [b""] * len(specs)
    workers = min(len(specs), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, precompile.processes(), precompile.adopt, (dict(os.environ),)) as pool:
        jobs = {pool.submit(compiler.cached_cubin, spec, arch): i for i, spec in enumerate(specs)}
        for done, job in enumerate(as_completed(jobs)):
            found[jobs[job]] = job.result()
            say((done + 1) / len(specs), f"compiling {plural(len(specs), 'kernel')} for {arch}")
    return found


def _contracts(digests: Sequence[str]) -> str:
    """The contracts' digests, and the dtypes that follow each."""
    dtypes: dict[str, list[str]] = {}
    for dtype, digest in zip(DTYPES, digests, strict=True):
        dtypes.setdefault(digest, []).append(dtype)
    return ", ".join(f"{' and '.join(names)} {digest}" for digest, names in dtypes.items() if digest)


def _among(option: str, given: Sequence[str], names: Iterable[str]) -> None:
    known = list(names)
    for name in given:
        if name not in known:
            raise ToolError(f"{option}: expected one of {', '.join(known)}, got {name}")


def _head(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)(?:x(\d+))?", text)
    sizes = (0, 0) if found is None else (int(found[1]), int(found[2] or found[1]))
    if not all(1 <= size <= 256 for size in sizes):
        raise ToolError(f"--head: expected a size from 1 to 256, or those of q and v as 192x128, got {text}")
    return sizes
