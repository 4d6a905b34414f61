"""The audit of a model's linear layers, on the activations that reach them."""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from samebits._version import __version__
from samebits.contract import Contract, contract_from_key, resolve
from samebits.tools.audit.capture import capture
from samebits.tools.audit.drift import measure
from samebits.tools.audit.report import Layer, Report, Skipped
from samebits.tools.audit.target import DTYPES, Target, as_target, why_not, why_not_rows
from samebits.tools.audit.variation import plan
from samebits.tools.text import AuditError, dtype_name, module_name, plural, some_names


def audit_linears(
    model: nn.Module,
    inputs: Sequence[Any],
    *,
    max_rows: int = 96,
    only: str | None = None,
    name: str | None = None,
    source: str = "inputs given by the caller",
    notes: Sequence[str] = (),
    progress: Callable[[float, str], None] = lambda done, layer: None,
) -> Report:
    """Audit every linear layer of `model` on the activations that reach it when the model runs on `inputs`.

    Args:
        model: any module, on the CPU or a CUDA device. It runs in eval mode without gradients. Afterwards it
            is as it was before.
        inputs: the inputs of each forward pass, on the model's device. A mapping is passed as keyword
            arguments, a tuple as positional ones, anything else as the one argument.
        max_rows: rows of each layer to audit, at least 2; evenly spaced over all that reach the layer.
        only: audit only the layers whose name contains a match of this regular expression.
        name: the model's name in the report.
        source: the name of the inputs in the report.
        notes: passed on to the report.
        progress: receives the fraction of the work that is done, and the current layer.

    Raises:
        AuditError: nothing to audit, or the model does not run on the inputs.
    """
    if max_rows < 2:
        raise AuditError(
            f"max_rows: expected at least 2, got {max_rows}: one row alone has no batch to depend on"
        )
    if isinstance(inputs, str) or not isinstance(inputs, Sequence):
        raise AuditError(
            f"inputs: expected a list of forward passes, got a {type(inputs).__name__}; put it in a list"
        )
    if not inputs:
        raise AuditError("no inputs: the model needs at least one forward pass")
    start = time.perf_counter()
    found = [t for t in (as_target(n, m) for n, m in model.named_modules()) if t is not None]
    if not found:
        raise AuditError(
            f"{type(model).__name__} has no linear layer (torch.nn.Linear, transformers' Conv1D)"
        )
    if only is not None:
        try:
            found = [t for t in found if re.search(only, t.name)]
        except re.error as error:
            raise AuditError(f"only: {only!r} is not a regular expression: {error}") from error
        if not found:
            raise AuditError(f"no linear layer's name matches {only!r}")
    reasons = {t.name: why_not(t) for t in found}
    targets = [t for t in found if reasons[t.name] is None]
    with torch.no_grad():
        captured, autocast = capture(model, targets, inputs, max_rows)
        for t in targets:
            reasons[t.name] = why_not_rows(t, captured[t.name], t.name in autocast)
        targets = [t for t in targets if reasons[t.name] is None]
        rows = {t.name: captured[t.name][0] for t in targets}
        layers = _measure_all(targets, rows, progress)
    if not layers:
        example = next(f"{module_name(n)}: {r}" for n, r in reasons.items() if r)
        raise AuditError(
            f"no linear layer can be audited ({plural(len(found), 'layer')} found); for example {example}"
        )
    return Report(
        model=name or type(model).__name__,
        inputs=source,
        device=", ".join(sorted({str(t.weight.device) for t in targets})),
        threads=torch.get_num_threads(),
        machine=platform.machine(),
        torch_version=torch.__version__,
        samebits_version=__version__,
        max_rows=max_rows,
        seconds=round(time.perf_counter() - start, 1),
        notes=(*notes, *_caveats(targets, rows)),
        layers=tuple(layers),
        skipped=tuple(Skipped(n, r) for n, r in reasons.items() if r is not None),
    )


def _caveats(targets: Sequence[Target], rows: Mapping[str, Tensor]) -> list[str]:
    """Differences between the audit and the layers' own computation, and the layers concerned."""
    notes = []
    for dtype in DTYPES:
        cast = [t.name for t in targets if rows[t.name].dtype == dtype != t.weight.dtype]
        if cast:
            notes.append(f"autocast runs in {dtype_name(dtype)}, and so does the audit: {some_names(cast)}")
    overridden = [t.name for t in targets if t.overridden]
    if overridden:
        notes.append(
            "audited as the plain product with weight and bias, though the forward of their class or instance"
            f" is another and may compute something else: {some_names(overridden)}"
        )
    return notes


def _contract(rows: Tensor) -> Contract:
    """The contract that samebits follows for `rows`, with the tensor core's family."""
    contract = contract_from_key(resolve(None, rows.dtype, rows.device.type))
    if rows.is_cuda and contract.step == "mma":
        from samebits.backends.cuda.matmul import family

        return contract.on(family(rows.get_device()))
    return contract


def _measure_all(
    targets: Sequence[Target], captured: Mapping[str, Tensor], progress: Callable[[float, str], None]
) -> list[Layer]:
    plans = {m: plan(m) for m in {len(captured[t.name]) for t in targets}}
    work = {m: m + sum(len(b) for v in p for b in v.batches) for m, p in plans.items()}
    total = sum(t.weight.numel() * work[len(captured[t.name])] for t in targets)
    done = 0
    layers = []
    for t in targets:
        rows = captured[t.name]
        progress(done / total, t.name)

        def advance(count: int, t: Target = t) -> None:
            nonlocal done
            done += count * t.weight.numel()
            progress(done / total, t.name)

        # PyTorch's runs take almost no time, so only samebits' move the progress bar.
        run_torch, run_samebits = t.operators(rows.dtype)
        with torch.autocast(rows.device.type, enabled=False):  # operands are cast already
            theirs = measure(run_torch, rows, plans[len(rows)])
            ours = measure(run_samebits, rows, plans[len(rows)], advance)
        layers.append(
            Layer(
                t.name,
                t.operator,
                t.weight.shape[1],
                t.weight.shape[0],
                dtype_name(rows.dtype),
                str(contract := _contract(rows)),
                contract.digest(),
                theirs,
                ours,
            )
        )
    return layers
