"""Computes for each token only the experts that it chose, whichever way the program was written.

    h = silu (x up[e]) of all experts; y = sum_e gate[t,e] h down[e]        order = argsort ids
    r = dispatch[t,e,c] x; h = ...; y = combine[t,e,c] h              ->    h = ragged_dot x[order] up counts
    for e: y += where(ids == e, f_e(x), 0)                                  y = sum_j gates[t,j] z[t,j]

MaxText calls the one its dense, the other its sparse matmul. What no token chose is not computed, and no mask
of tokens, experts and places is multiplied with. Which experts a token goes to, and which have no place for
it, is told from what the program's masks come out as (`xform.experts.raised`), and stays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import jax

from xform.context import Context
from xform.experts import Sorted, raised
from xform.ops import operation_of
from xform.rewrite import Site, rewrite
from xform.trace import Jaxpr, Value


@dataclasses.dataclass(frozen=True)
class SparseExperts:
    """No options. What nearly is a mixture of experts is left, and said. `Experts` brings this pass along."""

    stages: ClassVar[tuple[str, ...]] = ("model",)
    after: ClassVar[tuple[str, ...]] = ("roll",)

    def rewrite(self, jaxpr: Jaxpr, context: Context) -> Jaxpr:
        made = raised(jaxpr, "sparseexperts", context.report)
        return rewrite(made, _written_out, context.report, "sparseexperts") if made is not jaxpr else jaxpr


def _written_out(site: Site) -> Sequence[Value] | None:
    """Tokens sorted by expert in plain JAX: products in it are for other passes to find."""
    op = operation_of(site.eqn)
    if not isinstance(op, Sorted):
        return None
    with jax.named_scope("experts"):
        return op.plain(*site.args)
