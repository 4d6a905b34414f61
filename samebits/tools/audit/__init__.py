"""The audit: which layers' and operators' rows change their bits with the batch, and by how much.

An *operator* is a function from rows to rows: ``F.linear`` with a layer's weights, or ``samebits.linear``
with the same weights.

* :func:`plan` lists different ways to batch the same rows.
* :func:`measure` runs an operator in all of them and compares raw bits.
* :func:`audit_linears` does so for every linear layer of a model, on the activations of a real forward pass.
* :func:`audit` runs a whole function in several batches, and compares every operator that runs in it.

See ``docs/audit.md``.
"""

from samebits.tools.audit.drift import Difference, Drift, VariationCount, measure
from samebits.tools.audit.linears import audit_linears
from samebits.tools.audit.operator_report import Change, NotCompared, OperatorAudit, OperatorReport
from samebits.tools.audit.operators import audit
from samebits.tools.audit.report import Layer, Report, Skipped
from samebits.tools.audit.variation import Variation, plan
from samebits.tools.text import AuditError

__all__ = [
    "AuditError",
    "Change",
    "Difference",
    "Drift",
    "Layer",
    "NotCompared",
    "OperatorAudit",
    "OperatorReport",
    "Report",
    "Skipped",
    "Variation",
    "VariationCount",
    "audit",
    "audit_linears",
    "measure",
    "plan",
]
