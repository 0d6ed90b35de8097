"""What a pass keeps from one call to the next, in the function's state, beside the user's own arrays."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

Phase = Literal["start", "run", "measure"]
"""Of what passes keep: it may have nothing in it yet; it has; it is to be found from the arguments."""


@dataclasses.dataclass(frozen=True)
class Kept:
    """An array that is kept.

    path: its name. initial: what it is filled with before the first call; None: only `step.calibrate` makes
    it.
    """

    path: str
    aval: Any
    initial: float | None
