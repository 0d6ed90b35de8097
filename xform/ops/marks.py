"""The names under which a model's program measures the ranges that are kept from one step to the next.

    a = reduce_max (abs x)          a' = name[range:3.mlpwi_0:left:16:12*] a

A mark says whose range it is, of how many steps the largest magnitudes are kept, and which loops stand around
the product, 12 turns with weights of their own here. It goes through autodiff with the number it names, into
forward loops, backward ones and what is computed again; there `quantization.places` looks for it.
"""

from __future__ import annotations

import dataclasses

from xform.trace import JaxprEqn

SIDES = ("left", "right", "dlhs", "drhs")
FORWARD = SIDES[:2]

APART = "microbatch_range"
"""The name of a range that each microbatch has of its own, and that is not kept."""

Loops = tuple[tuple[int, bool], ...]
"""The loops around a product, from the outermost: how many turns (0: nobody knows), and whether each has a
weight of its own.
"""


@dataclasses.dataclass(frozen=True)
class Mark:
    """key: the product's. side: a row of SIDES. steps: of how many the largest magnitudes are kept; 0: a
    range that was calibrated.
    """

    key: str
    side: str
    steps: int
    loops: Loops = ()

    @property
    def text(self) -> str:
        loops = ",".join(f"{turns}{'*' if own else ''}" for turns, own in self.loops)
        return f"range:{self.key}:{self.side}:{self.steps}:{loops}"

    @property
    def path(self) -> str:
        """Of the array that is kept."""
        return f"quantize[{self.key!r}][{self.side!r}]"

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array that is kept: a history, or a range, for each weight."""
        own = tuple(turns for turns, apart in self.loops if apart)
        return (*own, self.steps) if self.steps else own


def mark_of(eqn: JaxprEqn) -> Mark | None:
    """The mark that an equation is, if it is one."""
    if eqn.primitive.name != "name" or not eqn.params["name"].startswith("range:"):
        return None
    _, key, side, steps, loops = eqn.params["name"].split(":")
    turns = ((text.rstrip("*"), text.endswith("*")) for text in loops.split(",") if text)
    return Mark(key, side, int(steps), tuple((int(n), own) for n, own in turns))
