"""What the processes of ``samebits verify`` run in tests. Each imports this file, which so imports little."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from samebits.tools.verify.failures import KernelError
from samebits.tools.verify.report import Report


def note_environment(file: Path) -> None:
    file.write_text(os.environ["SAMEBITS_CACHE_DIR"])


def verify_some(found: Report, index: int, threads: int, todo: Any, done: Any) -> None:
    """A part differs where its number is `index`, and breaks where it is not below 10."""
    while (i := todo.get()) is not None:
        one = found.empty()
        got = torch.zeros(i + 1)
        one.compare(f"kernel {i % 2}", "what", "reference", got, got + (i == index), i, f"schedule {i % 4}")
        done.put((i, one if i < 10 else KernelError(f"part {i}")))


def die(*of: Any) -> None:
    os._exit(5)
