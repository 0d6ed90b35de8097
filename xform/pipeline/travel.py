"""What travels from stage to stage with a microbatch: numbered places, and which value is in one when.

What a loop carries is in the place in which its first layer finds it. What is made between two loops takes
a place whose value nobody reads any more, if one is of its type: so what a decoder reads of its encoder is
where the activations of the encoder were.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from xform.trace import Var

CARRIED, READ, ROWS = (
    "what layers carry",
    "what layers or the end read of what is before them",
    "what layers give one by one",
)


class Travel:
    """Places are taken and freed in the order of *times*, at which values are made and read. read: the last
    time that each value is read, but for being carried on; carried: the last time that it begins a loop.
    """

    def __init__(self, read: Mapping[Any, int], carried: Mapping[Any, int]) -> None:
        self.read, self.carried = read, carried
        self.types: list[Any] = []
        self.what: list[str] = []
        self.place: dict[Var, int] = {}
        self.until: list[int] = []

    def needed(self, v: Any) -> int:
        """The last time that anybody needs a value, -1 for never."""
        return max(self.read.get(v, -1), self.carried.get(v, -1))

    def new(self, aval: Any, what: str, until: int) -> int:
        """A place of its own."""
        self.types.append(aval)
        self.what.append(what)
        self.until.append(until)
        return len(self.types) - 1

    def free(self, aval: Any, what: str, now: int, until: int) -> int:
        """A place whose value is read no more after this time, or a new one."""
        for n, (mine, last) in enumerate(zip(self.types, self.until, strict=True)):
            if last <= now and (mine.shape, mine.dtype) == (aval.shape, aval.dtype):
                self.until[n] = until
                return n
        return self.new(aval, what, until)

    def make(self, v: Var, what: str, now: int) -> int:
        """A place for a value that is made at this time."""
        self.place[v] = self.free(v.aval, what, now, self.needed(v))
        return self.place[v]

    def begin(self, v: Any, aval: Any, time: int, taken: Iterable[int]) -> tuple[int, bool]:
        """The place in which a loop of this time finds what it carries; and whether the value has to
        be copied there, because it is needed beside it.
        """
        here = self.place[v]
        if self.read.get(v, -1) < time and self.carried[v] <= time and here not in taken:
            return here, False
        return self.free(aval, CARRIED, time - 1, time), True

    def becomes(self, v: Any, place: int) -> None:
        """A loop has left a value in a place."""
        self.place[v] = place
        self.until[place] = self.needed(v)
