"""Which layers' rows change their bits with the batch they ride in, and by how much.

An *operator* is a function from rows to rows: ``F.linear`` with a layer's weights, or ``samebits.linear``
with the same. :func:`plan` writes down ways in which the same rows can be batched; :func:`measure` runs an
operator over all of them and compares raw bits; :func:`audit_linears` does so for every linear layer of a
model, on the activations that reach it in a real forward pass. See ``docs/audit.md``.
"""

from samebits.audit.drift import Difference, Drift, VariationCount, measure
from samebits.audit.linears import audit_linears
from samebits.audit.report import Layer, Report, Skipped
from samebits.audit.variation import Variation, plan
from samebits.audit.words import AuditError

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
