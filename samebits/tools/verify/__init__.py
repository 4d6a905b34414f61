"""``samebits verify``: every kernel and schedule on this GPU against the CPU reference, bit for bit.

The expected results come from elsewhere. Small products are compared with the CPU reference, which executes
the contract literally. Large ones are compared with the universal kernel, of which sampled rows are compared
with the reference each time. Batches are compared with one another. Every output, and the memory beside it,
is filled with NaN before its kernel runs.
"""

from samebits.tools.verify.answers import known_answers
from samebits.tools.verify.case import ProductCase, cases
from samebits.tools.verify.kernel import BACKENDS, kernels, takes
from samebits.tools.verify.operands import Inputs
from samebits.tools.verify.report import Line, Mismatch, Report, show
from samebits.tools.verify.run import verify

__all__ = [
    "BACKENDS",
    "Inputs",
    "Line",
    "Mismatch",
    "ProductCase",
    "Report",
    "cases",
    "kernels",
    "known_answers",
    "show",
    "takes",
    "verify",
]
