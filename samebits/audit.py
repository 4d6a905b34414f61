"""Which layers' rows change their bits with the batch they ride in, and by how much.

An *operator* is a function from rows to rows: ``F.linear`` with a layer's weights, or ``samebits.linear``
with the same. :func:`plan` writes down ways in which the same rows can be batched; :func:`measure` runs an
operator over all of them and compares raw bits; :func:`audit_linears` does so for every linear layer of a
model, on the activations that reach it in a real forward pass. See ``docs/audit.md``.
"""

from __future__ import annotations

import dataclasses
import json
import math
import platform
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samebits
from samebits._version import __version__
from samebits.contract import Contract, contract_from_key, resolve

__all__ = [
    "AuditError",
    "Difference",
    "Drift",
    "Layer",
    "Report",
    "Skipped",
    "Variation",
    "VariationCount",
    "audit_linears",
    "measure",
    "plan",
]

Operator = Callable[[Tensor], Tensor]
"""Takes rows ``[M, K]`` and returns rows ``[M, N]``."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class AuditError(ValueError):
    """The audit cannot run on what it was given; one line says what is wrong and what to do."""


@dataclass(frozen=True)
class Variation:
    """One way to batch the same rows.

    Attributes:
        kind: ``repeat``, ``batch size``, ``position``, ``padding``, ``neighbours`` or ``chunks``.
        name: in words.
        batches: what each batch holds, as indices into the rows; the three indices after the last row stand
            for a row of zeros, of NaN and of infinities.
    """

    kind: str
    name: str
    batches: tuple[Tensor, ...]


def plan(rows: int) -> tuple[Variation, ...]:
    """The variations that `rows` rows are put through. Deterministic; every one covers every row."""
    cpu = torch.device("cpu")  # whatever the default device is
    index = torch.arange(rows, device=cpu)
    zero, nan, inf = rows, rows + 1, rows + 2
    variations = [Variation("repeat", "the same batch again", (index,))]

    def add(kind: str, name: str, batches: Iterable[Tensor]) -> None:
        variations.append(Variation(kind, name, tuple(batches)))

    def cut(size: int, order: Tensor = index) -> list[Tensor]:
        # The last batch reaches back for rows that the one before had, so that all have the same size.
        return [order[min(start, rows - size) :][:size] for start in range(0, rows, size)]

    def some(size: int) -> int:
        return min(size, rows)

    for size in [1, 2, 3, *(2**i for i in range(2, rows.bit_length()))]:
        if size < rows:
            add("batch size", f"batches of {size}", cut(size))
    if rows >= 3:
        # With "batches of 3" above, every row has been first, in the middle, and last.
        for shift in (1, 2):
            add("position", f"batches of 3, rotated by {shift}", (b.roll(shift) for b in cut(3)))
    if rows >= 2:
        add("position", "all rows, rotated by half", [index.roll(rows // 2)])
        add("position", "all rows, last row first", [index.flip(0)])
    for size, extra in ((5, 3), (24, 8)):
        if size < rows:
            padded = (torch.cat([b, torch.full((extra,), zero, device=cpu)]) for b in cut(size))
            add("padding", f"batches of {size} padded with {extra} rows of zeros", padded)
    twice = torch.cat([index, torch.full_like(index, zero)])
    add("padding", "all rows padded with as many rows of zeros", [twice])
    if rows > 8:  # else every row has all the others as neighbours, in any order
        # A multiplication by a number coprime to `rows` gives every row neighbours from far away.
        stride = next(s for s in range(int(rows * 0.618) | 1, 3 * rows + 3) if math.gcd(s, rows) == 1)
        add("neighbours", "batches of 8, other neighbours", cut(8, index * stride % rows))
    for filler, name in ((nan, "NaN"), (inf, "infinity")):
        size = some(8)
        between = (torch.stack([b, torch.full_like(b, filler)], 1).flatten() for b in cut(size))
        add("neighbours", f"batches of {size}, each row next to {name}", between)
    for parts in (2, 3, 7):
        if parts < rows:
            add("chunks", f"cut into {parts} chunks", index.tensor_split(parts))
    if rows >= 4:
        sizes = [1]  # 1, 2, 3, 5, 8, ...: small and large side by side
        while sum(sizes) < rows:
            sizes.append(sizes[-1] + (sizes[-2] if len(sizes) > 1 else 1))
        sizes[-1] -= sum(sizes) - rows
        add("chunks", "cut into chunks of 1, 2, 3, 5, 8, ...", index.split(sizes))
    return tuple(variations)


@dataclass(frozen=True)
class Difference:
    """One output element whose bits a variation changed.

    Attributes:
        variation: name of the variation.
        row: which of the audited rows.
        column: which output feature.
        batch_rows: rows in the batch that changed it.
        position: where in that batch the row was.
        expected: the value in the batch of all rows.
        got: the value in this batch.
        expected_bits: bits of ``expected``, in hexadecimal.
        got_bits: bits of ``got``.
    """

    variation: str
    row: int
    column: int
    batch_rows: int
    position: int
    expected: float
    got: float
    expected_bits: str
    got_bits: str


@dataclass(frozen=True)
class VariationCount:
    """How one variation did on one layer.

    Attributes:
        kind: see :class:`Variation`.
        name: see :class:`Variation`.
        rows: rows compared, each counted once.
        changed: rows of which at least one bit changed.
    """

    kind: str
    name: str
    rows: int
    changed: int


@dataclass(frozen=True)
class Drift:
    """How one operator's rows depend on their batch.

    Attributes:
        rows: rows compared, each counted once however many variations it went through.
        changed: rows of which some variation changed at least one bit.
        ulp: the largest difference in units in the last place: how many values of the dtype apart, with -0
            and +0 one apart and NaN beyond infinity. 0 means that no bit changed.
        relative: the largest ``|got - expected| / max(|got|, |expected|)``; infinite if NaN or infinity
            appeared or vanished. Large, as ``ulp`` is, where a sum cancels to nearly nothing.
        of_row: the largest ``|got - expected|`` in terms of the largest magnitude in its row.
        first: the first element that changed, in the order of the plan.
        variations: the same counts for each variation.
    """

    rows: int
    changed: int
    ulp: int
    relative: float
    of_row: float
    first: Difference | None
    variations: tuple[VariationCount, ...]


@dataclass(frozen=True)
class Layer:
    """One linear layer, audited.

    Attributes:
        name: the module's name in the model.
        operator: the operator that PyTorch runs for it.
        in_features: length of the sums.
        out_features: columns of the output.
        dtype: of weights and activations.
        contract: the contract samebits ran under.
        digest: its digest.
        torch: drift of PyTorch's operator.
        samebits: drift of samebits'.
    """

    name: str
    operator: str
    in_features: int
    out_features: int
    dtype: str
    contract: str
    digest: str
    torch: Drift
    samebits: Drift


@dataclass(frozen=True)
class Skipped:
    """A linear layer that was not audited, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Report:
    """The audit of one model.

    Attributes:
        model: what was audited.
        inputs: what it ran on.
        device: where; several are separated by commas.
        threads: CPU threads of PyTorch, and of samebits.
        machine: the CPU's architecture.
        torch_version: PyTorch's version.
        samebits_version: samebits' version.
        max_rows: rows audited of a layer, at most; evenly spaced over all that reached it.
        seconds: time taken, model loading not counted.
        notes: what a reader should know before trusting the numbers.
        layers: results, in the model's order.
        skipped: linear layers left out.
    """

    model: str
    inputs: str
    device: str
    threads: int
    machine: str
    torch_version: str
    samebits_version: str
    max_rows: int
    seconds: float
    notes: tuple[str, ...]
    layers: tuple[Layer, ...]
    skipped: tuple[Skipped, ...]

    @property
    def samebits_drifts(self) -> bool:
        """Whether any bit of samebits changed, which must never be."""
        return any(layer.samebits.changed for layer in self.layers)

    def to_json(self) -> str:
        """The report as standard JSON: numbers that JSON lacks are the strings "nan", "inf" and "-inf"."""
        return json.dumps({"schema": 1, **_plain(dataclasses.asdict(self))}, indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report that :meth:`to_json` wrote."""
        data = json.loads(text)
        if data.pop("schema", None) != 1:
            raise ValueError('Report.from_json: expected a report of samebits audit with "schema": 1')

        def drift(d: dict[str, Any]) -> Drift:
            counts = tuple(VariationCount(**v) for v in d.pop("variations"))
            first = d.pop("first")
            if first is not None:
                first |= {k: float(first[k]) for k in ("expected", "got")}
                first = Difference(**first)
            numbers = {k: float(d[k]) for k in ("relative", "of_row")}
            return Drift(**{**d, **numbers}, first=first, variations=counts)

        layers = (
            Layer(**{**d, "torch": drift(d["torch"]), "samebits": drift(d["samebits"])})
            for d in data.pop("layers")
        )
        skipped = tuple(Skipped(**d) for d in data.pop("skipped"))
        return cls(**{**data, "notes": tuple(data["notes"])}, layers=tuple(layers), skipped=skipped)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


_TINY = torch.finfo(torch.float64).tiny
_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(_BITS[x.dtype]).long()


def _ordered(bits: Tensor, width: int) -> Tensor:
    """Integers in the order of the values, one for each bit pattern: -0 is -1."""
    return torch.where(bits < 0, -1 - (bits & (2 ** (width - 1) - 1)), bits)


def measure(
    operator: Operator,
    rows: Tensor,
    variations: Sequence[Variation],
    progress: Callable[[int], None] = lambda rows: None,
) -> Drift:
    """Run `operator` on `rows` in every variation; compare the bits of each row with the batch of all rows.

    Args:
        operator: what to run.
        rows: ``[M, K]``.
        variations: what :func:`plan` gave for M.
        progress: told after each variation how many rows the operator was run on.
    """
    count = rows.shape[0]
    fill = rows.new_tensor([0.0, math.nan, math.inf])[:, None].expand(-1, rows.shape[1])
    pool = torch.cat([rows, fill])
    expected = operator(rows).cpu()  # where all comparing is done
    width = 8 * expected.element_size()
    expected_bits = _bits(expected)
    row_scale = expected.double().nan_to_num(0, 0, 0).abs().amax(1).clamp(min=_TINY)
    progress(count)

    changed = torch.zeros(count, dtype=torch.bool, device="cpu")
    counts, first, ulp, relative, of_row = [], None, 0, 0.0, 0.0
    for variation in variations:
        index = torch.cat(variation.batches)
        got = torch.cat([operator(pool[batch]).cpu() for batch in variation.batches])
        progress(len(index))
        differs = _bits(got) != expected_bits[index.clamp(max=count - 1)]
        differs &= (index < count)[:, None]
        here = torch.zeros_like(changed)
        where = differs.nonzero()
        if len(where):
            at, column = where.T
            row = index[at]
            here[row] = True
            was, now = expected_bits[row, column], _bits(got)[at, column]
            ulp = max(ulp, int((_ordered(was, width) - _ordered(now, width)).abs().max()))
            x, y = expected[row, column].double(), got[at, column].double()
            distance = (x - y).abs().nan_to_num(nan=math.inf, posinf=math.inf)
            scale = torch.maximum(x.abs(), y.abs()).nan_to_num(0, 0).clamp(min=_TINY)
            relative = max(relative, float((distance / scale).max()))
            of_row = max(of_row, float((distance / row_scale[row]).max()))
            if first is None:
                batch_rows, position = _place(variation.batches, int(at[0]))
                first = Difference(
                    variation.name,
                    int(row[0]),
                    int(column[0]),
                    batch_rows,
                    position,
                    float(x[0]),
                    float(y[0]),
                    _hex(was[0], width),
                    _hex(now[0], width),
                )
        changed |= here
        counts.append(VariationCount(variation.kind, variation.name, count, int(here.sum())))
    return Drift(count, int(changed.sum()), ulp, relative, of_row, first, tuple(counts))


def _place(batches: Sequence[Tensor], at: int) -> tuple[int, int]:
    """Size of the batch that holds element `at` of all batches end to end, and the place in it."""
    for batch in batches:
        if at < len(batch):
            return len(batch), at
        at -= len(batch)
    raise IndexError(at)


def _hex(bits: Tensor, width: int) -> str:
    return f"0x{int(bits) & (2**width - 1):0{width // 4}x}"


@dataclass(frozen=True)
class _Target:
    """A linear layer: two operators on rows, once its weight and bias have their dtype."""

    name: str
    module: nn.Module
    operator: str
    weight: Tensor  # [out_features, in_features]
    bias: Tensor | None
    overridden: bool  # its forward is not that of its kind

    def operators(self, dtype: torch.dtype) -> tuple[Operator, Operator]:
        """PyTorch's and samebits', in `dtype`: a cast to another one than the weight's is autocast's."""
        weight, bias = self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype)
        ours = partial(_run_samebits, weight=weight, bias=bias)
        if self.operator == _ADDMM:
            return partial(torch.addmm, bias, mat2=weight.mT), ours
        return partial(_run_linear, weight=weight, bias=bias), ours


_LINEAR, _ADDMM = "torch.nn.functional.linear", "torch.addmm"


def _target(name: str, module: nn.Module) -> _Target | None:
    """`module` as a target, or None if it is no linear layer."""
    # Looked up, not imported: a Conv1D can only be in a model if transformers is loaded.
    pytorch_utils = sys.modules.get("transformers.pytorch_utils")
    weight: Any = getattr(module, "weight", None)
    bias: Any = getattr(module, "bias", None)
    kind: Any
    if isinstance(module, nn.Linear):
        kind, operator = nn.Linear, _LINEAR
    elif pytorch_utils is not None and isinstance(module, pytorch_utils.Conv1D):
        kind, operator, weight = pytorch_utils.Conv1D, _ADDMM, weight.mT
    else:
        return None
    overridden = getattr(module.forward, "__func__", None) is not kind.forward
    return _Target(name, module, operator, weight, bias, overridden)


def _run_linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(rows, weight, bias)


def _run_samebits(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return samebits.linear(rows, weight, bias)


def _why_not(target: _Target) -> str | None:
    weight = target.weight
    if isinstance(weight, nn.UninitializedParameter):
        return "its weight is not initialized"
    if type(weight) not in (Tensor, nn.Parameter) or weight.layout is not torch.strided:
        return f"its weight is a {type(weight).__name__} of layout {weight.layout}, not a plain dense tensor"
    if weight.dtype not in DTYPES:
        return f"its weight is {_name(weight.dtype)}; samebits takes float32, bfloat16 and float16"
    if not weight.numel():
        return f"its weight of shape {list(weight.shape)} has no elements"
    if weight.device.type == "cuda":
        return cuda_problem(weight.device)
    if weight.device.type != "cpu":
        return f"its weight is on {weight.device}; samebits runs on CPU and CUDA devices"
    return None


def cuda_problem(device: torch.device) -> str | None:
    """Why samebits does not run on the CUDA device `device`, and what to do; None if it does."""
    from samebits.backends.cuda import matmul, runtime

    status = runtime.status()
    if not status.available:
        return f"{status.reason}: {status.remedy}" if status.remedy else status.reason
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        return f"there is no {device}: {plural(torch.cuda.device_count(), 'CUDA device')} here"
    try:
        matmul.family(index)
    except runtime.UnavailableError as error:
        return one_line(error)
    return None


def _why_not_rows(target: _Target, captured: Sequence[Tensor], autocast: bool) -> str | None:
    if not captured:
        return "no activation reached it: its module was not called, or with no rows"
    if len(captured) > 1:
        kinds = " and ".join(f"{_name(rows.dtype)} [{rows.shape[1]}]" for rows in captured)
        return f"its rows have several dtypes or widths in one run: {kinds}"
    (rows,), weight = captured, target.weight
    if rows.shape[1] != weight.shape[1]:
        return f"its activations have {rows.shape[1]} features, and its weight takes {weight.shape[1]}"
    if rows.dtype != weight.dtype and not autocast:
        return f"its activations are {_name(rows.dtype)} and its weight {_name(weight.dtype)}"
    if rows.dtype not in DTYPES:
        return f"its activations are {_name(rows.dtype)}; samebits takes float32, bfloat16 and float16"
    if rows.device != weight.device:
        return f"its activations are on {rows.device} and its weight on {weight.device}"
    if rows.dtype == torch.float32 and rows.is_cuda:
        return "samebits does not take float32 on CUDA in this version; pass --dtype bfloat16"
    return None


def _caveats(targets: Sequence[_Target], rows: Mapping[str, Tensor]) -> list[str]:
    """What the audit did otherwise than the layers themselves do, and to which."""
    notes = []
    for dtype in DTYPES:
        cast = [t.name for t in targets if rows[t.name].dtype == dtype != t.weight.dtype]
        if cast:
            notes.append(f"autocast runs in {_name(dtype)}, and so does the audit: {_some(cast)}")
    overridden = [t.name for t in targets if t.overridden]
    if overridden:
        notes.append(
            "audited as the plain product with weight and bias, though the forward of their class or instance"
            f" is another and may compute something else: {_some(overridden)}"
        )
    return notes


def _some(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(map(module_name, names[:8]))
    return shown + (f", and {len(names) - 8} more" if len(names) > 8 else "")


def module_name(name: str) -> str:
    """What to call the module `name` of a model: PyTorch's name for the model itself is empty."""
    return name or "(the module itself)"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _capture(
    model: nn.Module, targets: Sequence[_Target], inputs: Sequence[Any], max_rows: int
) -> tuple[dict[str, list[Tensor]], set[str]]:
    """The rows that reach each target when `model` runs on `inputs`: at most `max_rows`, evenly spaced.

    They have the dtype that the layer computes in: where autocast is on when it is called, autocast's. The
    rows of a layer that computed in several dtypes or widths come in several tensors.

    Returns:
        The rows of each target, and the names of the targets that autocast was on for.
    """
    taken: dict[str, list[Tensor]] = {target.name: [] for target in targets}
    autocast: set[str] = set()
    quota = -(-max_rows // len(inputs))

    def hook(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else next(iter(kwargs.values()))
        rows = x.detach().reshape(-1, x.shape[-1])
        rows = rows[_spread(len(rows), quota)].clone()
        kind = rows.device.type
        if torch.is_autocast_enabled(kind) and rows.is_floating_point():
            rows = rows.to(torch.get_autocast_dtype(kind))
            autocast.add(name)
        taken[name].append(rows)

    handles = [
        target.module.register_forward_pre_hook(partial(hook, target.name), with_kwargs=True)
        for target in targets
    ]
    # Of each module, for part of a model in training can be in eval mode; eval() of the user's can do more.
    training = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        for item in inputs:
            if isinstance(item, Mapping):
                model(**item)
            elif isinstance(item, tuple):
                model(*item)
            else:
                model(item)
    except (Exception, SystemExit) as error:
        raise AuditError(
            f"the model's forward pass on the given inputs raised {type(error).__name__}: {one_line(error)}"
        ) from error
    finally:
        for module, mode in training:
            module.training = mode
        for handle in handles:
            handle.remove()
    captured = {}
    for name, parts in taken.items():
        kinds: dict[tuple[torch.dtype, int], list[Tensor]] = {}
        for part in parts:
            if len(part):
                kinds.setdefault((part.dtype, part.shape[1]), []).append(part)
        captured[name] = [rows[_spread(len(rows), max_rows)] for rows in map(torch.cat, kinds.values())]
    return captured, autocast


def _spread(count: int, most: int) -> Tensor:
    """Indices of at most `most` of `count` rows, evenly spaced."""
    every = torch.arange(min(count, most), device="cpu")
    return every if count <= most else every * count // most


def plural(count: int, thing: str, things: str | None = None) -> str:
    """The count and the thing, in the form that fits."""
    return f"{count:,} {thing if count == 1 else things or thing + 's'}"


def one_line(error: BaseException) -> str:
    """What an exception says, on one line of bounded length."""
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:297] + "..."


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
        model: any module, on the CPU or a CUDA device. It runs in eval mode without gradients, and is left
            as it was.
        inputs: one forward pass each, on the model's device: a mapping is passed as keyword arguments, a
            tuple as positional ones, anything else as the one argument.
        max_rows: rows of each layer to audit, at least 2; evenly spaced over all that reach the layer.
        only: audit only the layers whose name matches this regular expression somewhere.
        name: what to call the model in the report.
        source: what to call the inputs in the report.
        notes: passed on to the report.
        progress: told the fraction of the work that is done, and the layer at hand.

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
    found = [t for t in (_target(n, m) for n, m in model.named_modules()) if t is not None]
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
    reasons = {t.name: _why_not(t) for t in found}
    targets = [t for t in found if reasons[t.name] is None]
    with torch.no_grad():
        captured, autocast = _capture(model, targets, inputs, max_rows)
        for t in targets:
            reasons[t.name] = _why_not_rows(t, captured[t.name], t.name in autocast)
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


def _contract(rows: Tensor) -> Contract:
    """The contract that samebits runs under on `rows`, the tensor core's family included."""
    contract = contract_from_key(resolve(None, rows.dtype, rows.device.type))
    if rows.is_cuda:
        from samebits.backends.cuda.matmul import family

        return contract.on(family(rows.get_device()))
    return contract


def _measure_all(
    targets: Sequence[_Target], captured: Mapping[str, Tensor], progress: Callable[[float, str], None]
) -> list[Layer]:
    plans = {m: plan(m) for m in {len(captured[t.name]) for t in targets}}
    work = {m: m + sum(len(b) for v in p for b in v.batches) for m, p in plans.items()}
    total = sum(t.weight.numel() * work[len(captured[t.name])] for t in targets)
    done = 0
    layers = []
    for t in targets:
        rows = captured[t.name]
        progress(done / total, t.name)

        def advance(count: int, t: _Target = t) -> None:
            nonlocal done
            done += count * t.weight.numel()
            progress(done / total, t.name)

        # PyTorch's runs take next to no time: only samebits' move the bar.
        run_torch, run_samebits = t.operators(rows.dtype)
        with torch.autocast(rows.device.type, enabled=False):  # what it casts, is cast already
            theirs = measure(run_torch, rows, plans[len(rows)])
            ours = measure(run_samebits, rows, plans[len(rows)], advance)
        layers.append(
            Layer(
                t.name,
                t.operator,
                t.weight.shape[1],
                t.weight.shape[0],
                _name(rows.dtype),
                str(contract := _contract(rows)),
                contract.digest(),
                theirs,
                ours,
            )
        )
    return layers
