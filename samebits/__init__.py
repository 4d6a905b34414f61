"""Matrix products whose every output row has the same bits whatever batch it rides in."""

from samebits._version import __version__
from samebits.backends import use_backend
from samebits.contract import AMPERE, FMA, HOPPER, TENSOR_CORE, Contract, MmaModel, use_mma_model
from samebits.ops.addmm import addmm_
from samebits.ops.bmm import bmm
from samebits.ops.linear import linear
from samebits.ops.linear_logp import linear_logp
from samebits.ops.logp import logp
from samebits.ops.matmul import matmul
from samebits.prepare import prepare

__all__ = [
    "AMPERE",
    "FMA",
    "HOPPER",
    "TENSOR_CORE",
    "Contract",
    "MmaModel",
    "__version__",
    "addmm_",
    "bmm",
    "linear",
    "linear_logp",
    "logp",
    "matmul",
    "prepare",
    "use_backend",
    "use_mma_model",
]
