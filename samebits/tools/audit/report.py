"""What the audit of a model found, and its JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any

from samebits.tools.audit.drift import Difference, Drift, VariationCount


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
        return json.dumps({"schema": 1, **plain(dataclasses.asdict(self))}, indent=2, allow_nan=False)

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


def plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value
