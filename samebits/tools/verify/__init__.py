"""``samebits verify``: every kernel and schedule on this GPU against the CPU reference, bit for bit.

Nothing here decides what is right. Small products are held to the CPU reference, which executes the contract
literally; large ones to the universal kernel, of which sampled rows are held to the reference each time;
batches to one another. Every output is filled with NaN before its kernel runs, and so is what lies beside it.
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
