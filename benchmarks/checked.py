"""Benchmarks of cases whose results are checked: one with wrong bits has no speed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.table import Table

import samebits
from benchmarks.record import environment, lines_of_progress, save
from samebits.backends.cuda import devices
from samebits.backends.cuda.matmul import family

T = TypeVar("T")


def l2_bytes() -> int:
    return devices.device_info(torch.cuda.current_device()).l2_bytes


def run(
    name: str,
    options: argparse.Namespace,
    cases: Sequence[T],
    measure: Callable[[T], dict[str, Any]],
    show: Callable[[dict[str, Any]], Table],
    *,
    width: int = 120,
) -> None:
    """Measure the cases, print a table of them, and write it to ``<name>.json``.

    Exits with 1 if results of a case are wrong, of which `measure` raises an AssertionError.
    """
    console = Console(width=width)
    progress = lines_of_progress(console)
    torch.manual_seed(0)
    record = environment(options.commit) | {"digest": samebits.TENSOR_CORE.on(family(0)).digest()}
    data: dict[str, Any] = {"environment": record, "cases": [], "red": []}
    for i, case in enumerate(cases):
        progress(i / len(cases), str(case))
        try:
            data["cases"].append(measure(case))
        except AssertionError as error:
            data["red"].append(f"{case}: {error}")
    console.print(show(data))
    for red in data["red"]:
        console.print(f"RED {red}", style="red", highlight=False)
    save(options.out, f"{name}.json", data)
    sys.exit(bool(data["red"]))
