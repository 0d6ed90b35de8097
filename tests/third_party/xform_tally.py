"""Counts the equations of a program, and changes nothing: the smallest pass a third party could write.

a = mul x y    ->    a = mul x y        (and a note: tally: 2 equations)
b = sin a            b = sin a
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar


@dataclasses.dataclass(frozen=True)
class Tally:
    """Options:

    only: primitives to count; all where none is named.
    label: what the note calls them.
    """

    only: tuple[str, ...] = ()
    label: str = "equations"

    stages: ClassVar[tuple[str, ...]] = ("step",)

    def rewrite(self, jaxpr: Any, context: Any) -> Any:
        counted = [eqn for eqn in jaxpr.eqns if not self.only or eqn.primitive.name in self.only]
        context.report.did("tally", f"{len(counted)} {self.label}")
        return jaxpr
