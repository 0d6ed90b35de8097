"""Chooses for each named tensor whether it is kept, computed again or sent to the host, so that what is kept
fits and the least time goes into computing again and keeping.

Every set of kept names is looked at, and of each every part that could be on the host: what a layer's tensors
cost depends on which others are kept, and two sets of equal size can differ. Beyond as many names as that is
possible for, the policies by name are looked at too. The host is used where its traffic hides behind a pass
over the layers, or where nothing fits without it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from xform.memory.policies import POLICIES
from xform.memory.recompute import Cost, Layer, total
from xform.memory.speeds import Speeds

MOST = 10
"""Names among which every set is looked at."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """What is saved and what is offloaded, by name, in the order in which the program makes them.

    nbytes: what that adds to a program that keeps nothing, on one device; less than nothing where layers'
    inputs go to the host. host: bytes a device has there. cost: what is still computed again, and the
    seconds of that and of keeping. waiting: seconds of transfers that nothing hides.
    """

    save: tuple[str, ...]
    offload: tuple[str, ...]
    nbytes: float
    host: float
    cost: Cost
    waiting: float

    @property
    def seconds(self) -> float:
        return self.cost.seconds + self.waiting


class Choices:
    """All choices for some layers."""

    def __init__(self, layers: Sequence[Layer], speeds: Speeds) -> None:
        self.layers, self.speeds = layers, speeds
        self.inputs = tuple(dict.fromkeys(name for layer in layers for name, _ in layer.inputs))
        self.all_names = tuple(dict.fromkeys(p.name for layer in layers for p in layer.parts if p.name))
        worth = {name: self._worth(name) for name in self.all_names}
        best = sorted(self.all_names, key=lambda name: -worth[name])[:MOST]
        self.left_out = tuple(name for name in self.all_names if name not in best)
        self.names = tuple(name for name in self.all_names if name in best)

    def cost(self, kept: Collection[str]) -> Cost:
        """What is computed again, and what takes memory, when these are kept."""
        return self._cost(frozenset(kept))

    @functools.cached_property
    def all(self) -> list[Choice]:
        """Every choice, the least time first; of equal ones that with less on the host, then on the device,
        then that which keeps later tensors: the projections to heads, first in a layer, are read rearranged,
        and to keep them costs most.
        """
        place = {name: -number for number, name in enumerate((*self.inputs, *self.all_names))}

        def key(choice: Choice) -> tuple[Any, ...]:
            late = [[place[name] for name in reversed(names)] for names in (choice.save, choice.offload)]
            return float(f"{choice.seconds:.6e}"), choice.host, choice.nbytes, *late  # sums, in any order

        return sorted(self._choices(), key=key)

    def best(self, room: float, host: bool) -> Choice | None:
        """The choice that adds at most `room` bytes, with the least computed again; with `host`, one that may
        use it.
        """
        fitting = [c for c in self.all if c.nbytes <= room and (host or not c.offload)]
        return next((c for c in fitting if c.waiting <= 0), next(iter(fitting), None))

    @property
    def smallest(self) -> Choice:
        """The choice that takes the least device memory; of equal ones that with the least on the host, then
        the first.
        """
        return min(self.all, key=lambda c: (c.nbytes, c.host))

    @property
    def nothing(self) -> Choice:
        """The choice that keeps nothing."""
        return next(c for c in self.all if not c.save and not c.offload)

    # ------------------------------------------------------------

    def _cost(self, kept: frozenset[str]) -> Cost:
        found = self._costs.get(kept)
        if found is None:
            found = self._costs[kept] = total([layer.again(kept) for layer in self.layers])
        return found

    @functools.cached_property
    def _costs(self) -> dict[frozenset[str], Cost]:
        return {}

    def _worth(self, name: str) -> float:
        """Seconds that a name's bytes buy when it alone is kept."""
        none, alone = self.cost(()), self.cost([name])
        return (none.seconds - alone.seconds) / max(1.0, alone.held.get(name, 0.0))

    def _choices(self) -> Iterator[Choice]:
        hidden = self.cost(()).flops / self.speeds.flops  # about a pass forwards, its products alone
        for kept, away in self._sets():
            cost = self.cost(kept)
            if any(cost.held.get(name, 0.0) <= 0 for name in kept):
                continue  # a name that nothing reads when the others are kept
            host = sum(cost.held[name] for name in away)
            stays = sum(cost.held[name] for name in kept if name not in away)
            yield Choice(
                tuple(name for name in kept if name not in away),
                away,
                stays - sum(cost.held[name] for name in away if name in self.inputs),
                host,
                cost,
                max(0.0, host / self.speeds.host - hidden),
            )

    def _sets(self) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
        """What is kept, and the part of it, or of the layers' inputs, that is on the host."""
        can_offload = all(layer.offloads for layer in self.layers)
        for kept in _subsets(self.names):
            for away in _subsets((*self.inputs, *kept) if can_offload else ()):
                yield kept, away
        for save, offload in POLICIES.values() if self.left_out else ():
            held = self.cost({*save, *offload}).held  # of its names, those that something reads
            kept = tuple(name for name in self.all_names if held.get(name, 0.0) > 0)
            if not set(kept) <= set(self.names) and (can_offload or not offload):
                yield kept, tuple(name for name in kept if name in offload)


def _subsets(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Every part of a list, in its order; the empty one first."""
    for number in range(1 << len(names)):
        yield tuple(name for i, name in enumerate(names) if number >> i & 1)
