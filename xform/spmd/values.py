"""A value of the original program as the walk knows it, and the body that it is known in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from xform.spmd.layout import Laid
from xform.trace import Value, current_trace

WEIGHT = "weight:"
"""The name scope of the collectives that bring a weight together; the weight's path follows."""

WHOLE = "whole_values"
"""The name scope of the collectives for operations that are done on whole values."""

GRADIENT = "gradient:"
"""The name scope of the collectives that sum a gradient; the dtype follows in which it is computed."""


@dataclasses.dataclass(frozen=True)
class Options:
    """How collectives are written out.

    sum_dtype: in which dtype gradients are summed over the batch's axes; None for their own. overlap:
    "prefetch", collectives of a loop run beside another turn; "permute", they are built of permutes. gather:
    weights come together for a "layer" at a time, or once for the whole "step".
    """

    sum_dtype: str | None = None
    overlap: tuple[str, ...] = ()
    gather: Literal["layer", "step"] = "layer"


PLAIN = Options()


class Scope:
    """A body that is being traced: its kind, JAX's trace, how often it runs, and the forms of values in it.

    `adds`: it is the body of a loop that adds to what it carries.
    """

    def __init__(self, kind: str, parent: Scope | None, turns: int = 1) -> None:
        self.kind, self.parent, self.trace = kind, parent, current_trace()
        self.times: int = turns * (parent.times if parent else 1)
        self.adds = False
        self.forms: dict[Val, dict[Laid, tuple[Value, int | None]]] = {}
        self.kept = 0  # bytes of weights that are gathered here for loops
        self.later: Value | None = None  # the last result of the backward pass
        self.last: Val | None = None  # the weight that was gathered last


class Val:
    """A value of the original program. `laid`: how it lies; of what is made where it is used (`make`), how it
    would lie by what it is made of. `origin`: the weight that it is, whole or a layer of it, cast or turned.
    `gradient`: it is the terms of a weight's gradient, to be summed over the batch; they may be wider than
    `aval` says, until they are. `turned`: the weight that it is the transpose of, and how. `codes`: it is
    made of the codes of a weight, of so many bytes each, which travel in its place. `named`: the weight of
    which it is made number by number, as its codes are. `terms`: it stays the terms of a sum until it is
    asked for that (`resident`).
    """

    __slots__ = ("aval", "codes", "gradient", "laid", "make", "named", "origin", "scope", "terms", "turned")

    def __init__(
        self, aval: Any, laid: Laid, scope: Scope, make: Callable[[Laid], Value] | None = None
    ) -> None:
        self.aval, self.laid, self.scope, self.make = aval, laid, scope, make
        self.origin, self.named, self.gradient, self.codes, self.terms = "", "", False, 0, False
        self.turned: tuple[Val, tuple[int, ...]] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(getattr(self.aval, "shape", ()))

    @property
    def itemsize(self) -> int:
        return int(getattr(self.aval.dtype, "itemsize", 4))
