"""What a device sends of a layer of experts, by each way that its tokens can go.

Of the ring each of the other devices gets all tokens; of slots as many rows as there are slots, whether they
are taken or not; of a ragged all-to-all as many as there are, taken to be the same for all experts. In the
backward pass tokens are sent again, and with them the gradients of results, and back come those of tokens.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from xform.experts.combining import Combine
from xform.experts.dispatch import NONE, RAGGED, RING, SLOTS, Dispatch
from xform.experts.function import Function
from xform.experts.operation import CHOICE, GIVEN, TOKEN
from xform.trace import shape_of

NUMBER = 4
"""Bytes of the number of an expert."""

SCALE = 4
"""Bytes of the scale of a row in eight bits."""


@dataclasses.dataclass(frozen=True)
class Sent:
    """Of `tokens` of a device, `choices` each, to experts on `ways` devices. Bytes: token, choice: of what
    the function takes of each token and of each choice, and its floats alone; made: of a choice's result.
    gate: of one. weights: of all experts.
    """

    how: Dispatch
    tokens: int
    choices: int
    ways: int
    token: int
    choice: int
    float_token: int
    float_choice: int
    made: int
    gate: int
    weights: int

    @classmethod
    def of(
        cls,
        function: Function,
        combine: Combine,
        tokens: int,
        choices: int,
        ways: int,
        capacity: float,
        dtype: str = "",
    ) -> Sent:
        sizes = {(kind, floats): 0 for kind in (TOKEN, CHOICE) for floats in (False, True)}
        weights = 0
        floats = {function.taken[k] for k in function.floats}
        for n, (v, kind) in enumerate(zip(function.jaxpr.invars, function.takes, strict=True)):
            if kind in (TOKEN, CHOICE):
                coded = dtype and kind == TOKEN and n in floats and len(shape_of(v)) > 1
                sizes[kind, False] += SCALE + math.prod(shape_of(v)[1:]) if coded else _of_row(v)
                sizes[kind, True] += _of_row(v) * (n in floats)
            elif kind == GIVEN and n in function.of_experts:
                weights += _of_row(v) * shape_of(v)[0]
        (out,) = function.jaxpr.outvars
        return cls(
            Dispatch(function, combine, ways=ways, capacity=capacity),
            tokens,
            choices,
            ways,
            sizes[TOKEN, False],
            sizes[CHOICE, False],
            sizes[TOKEN, True],
            sizes[CHOICE, True],
            _of_row(out),
            _item(out),
            weights,
        )

    def all(self, differentiated: bool, named: str | None) -> dict[str, float]:
        """The bytes of each way, of both passes where there are two; of a ragged all-to-all, which not every
        slice can, where it is named.
        """
        found = {
            RING: self.ring(differentiated),
            SLOTS: self.slots(self._rows(SLOTS), differentiated),
            NONE: (self.ways - 1) / self.ways * self.weights * (3 if differentiated else 1),
        }
        if named == RAGGED:
            found[RAGGED] = self.slots(self.tokens * self.choices, differentiated)
        return found

    @staticmethod
    def passes(differentiated: bool) -> str:
        return "forward and backward" if differentiated else "forward"

    def ring(self, differentiated: bool) -> float:
        k = self.choices
        summed = self.made if self.how.combine.out else k * self.made
        gates = self.how.combine.gates * self.gate
        there = k * NUMBER + self.token + k * (self.choice + gates)
        back = self.float_token + k * (self.float_choice + gates)
        total = there + summed + (there + summed + back if differentiated else 0)
        return float((self.ways - 1) * self.tokens * total)

    def slots(self, rows: int, differentiated: bool) -> float:
        gate = self.gate if self.how.combine.gates else 0  # of a choice, the product of its gates
        there, back = NUMBER + self.token + self.choice + gate, self.float_token + self.float_choice + gate
        total = there + self.made + (there + self.made + back if differentiated else 0)
        return (self.ways - 1) / self.ways * rows * total

    def may_overflow(self, strategy: str) -> bool:
        """Whether a device may have more choices for another, or have more of all, than there are slots."""
        how = dataclasses.replace(self.how, strategy=strategy)
        return how.room(self.tokens, self.choices) < how.most(self.tokens, self.choices)

    def _rows(self, strategy: str) -> int:
        how = dataclasses.replace(self.how, strategy=strategy)
        return self.ways * how.room(self.tokens, self.choices)


def _of_row(v: Any) -> int:
    """Bytes of an entry along the first dimension."""
    return _item(v) * math.prod(v.aval.shape[1:])


def _item(v: Any) -> int:
    return int(v.aval.dtype.itemsize)
