"""xform rewrites JAX programs: parallelism, memory, precision and kernels as passes over a jaxpr."""

import os

_HERE = os.path.dirname(os.path.abspath(__file__))
if not os.path.isdir(os.path.join(_HERE, "passes")):
    # A checkout: passes, kernels and models lie beside the package, not inside it as when installed.
    __path__.append(os.path.dirname(_HERE))
del os, _HERE
