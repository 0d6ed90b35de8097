"""xform rewrites JAX programs: parallelism, memory, precision and kernels as passes over a jaxpr."""

import os

_HERE = os.path.dirname(os.path.abspath(__file__))
if not os.path.isdir(os.path.join(_HERE, "passes")):
    # A checkout: passes, kernels and models lie beside the package, not inside it as when installed.
    __path__.append(os.path.dirname(_HERE))
del os, _HERE

from xform import plans as plans  # noqa: E402  (after the path is complete)
from xform.api import Lowered, Parallelized, Program, parallelize  # noqa: E402
from xform.check import check  # noqa: E402
from xform.errors import Decline, PlanError, PromiseError, RewriteError  # noqa: E402
from xform.passes.accumulate import Accumulate  # noqa: E402
from xform.passes.chunkedloss import ChunkedLoss  # noqa: E402
from xform.passes.context import Context  # noqa: E402
from xform.passes.experts import Experts  # noqa: E402
from xform.passes.kernels import Kernels  # noqa: E402
from xform.passes.narrow import Narrow  # noqa: E402
from xform.passes.offload import Offload  # noqa: E402
from xform.passes.pipeline import Pipeline  # noqa: E402
from xform.passes.quantize import Quantize  # noqa: E402
from xform.passes.remat import Remat  # noqa: E402
from xform.passes.roll import Roll  # noqa: E402
from xform.passes.shard import Shard  # noqa: E402
from xform.passes.sparseexperts import SparseExperts  # noqa: E402
from xform.plan import Pass, Plan  # noqa: E402
from xform.quantization.arrays import Quantized  # noqa: E402
from xform.raising.describe import raised  # noqa: E402
from xform.report import Report  # noqa: E402
from xform.state import Placed  # noqa: E402

__all__ = [
    "Accumulate",
    "ChunkedLoss",
    "Context",
    "Decline",
    "Experts",
    "Kernels",
    "Lowered",
    "Narrow",
    "Offload",
    "Parallelized",
    "Pass",
    "Pipeline",
    "Placed",
    "Plan",
    "PlanError",
    "Program",
    "PromiseError",
    "Quantize",
    "Quantized",
    "Remat",
    "Report",
    "RewriteError",
    "Roll",
    "Shard",
    "SparseExperts",
    "check",
    "parallelize",
    "plans",
    "raised",
]
