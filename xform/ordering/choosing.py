"""Which arrays are stored in the order of the stages, and what is still moved then.

What hangs together has one order, the one that its reorderings ask for, where an array that is stored hangs
with it, and where fewer bytes move in a step than in the model's own order.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping

from xform.ops.rows import reorder_of
from xform.ordering.ties import Dims, Place, Ties, Use
from xform.state import Left, Order, Reordered
from xform.state.groups import size
from xform.trace import Atom, Jaxpr, shape_of

Rows = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Move:
    """Rows of operand or result `number` along `dim` are put from one order into another; None: the model's
    own. node: the one that has an order.
    """

    of_result: bool
    number: int
    dim: int
    held: Rows | None
    wanted: Rows | None
    node: int


class Choice:
    """The order of each node of a program.

    state: output -> the input that it is at the next call. keep: inputs that are not to be stored otherwise.
    share: how much of what asks for the order of a length may be moved besides; infinite where that was
    decided before. in_orders, out_orders: of the inputs and outputs.
    """

    def __init__(
        self, jaxpr: Jaxpr, state: Mapping[int, int], keep: Collection[int], share: float = math.inf
    ) -> None:
        self.jaxpr, self.ties = jaxpr, Ties(jaxpr)
        self._state = {
            out: number
            for out, number in state.items()
            if jaxpr.outvars[out].aval.str_short() == jaxpr.invars[number].aval.str_short()
        }
        self._keep = {*keep, *(n for out, n in state.items() if out not in self._state)}
        for out, number in self._state.items():
            pair = self._dims(jaxpr.outvars[out]), self._dims(jaxpr.invars[number])
            for a, b in zip(*pair, strict=True):
                self.ties.tie(a, b)
        self._orders: dict[int, Rows] = {}
        self._refused: dict[int, tuple[str, int]] = {}
        self._share = share
        self._lengths: set[Rows] = set()  # orders of lengths, in which nothing is stored
        self._stored = self._candidates()
        self._choose()

    @property
    def in_orders(self) -> list[Order | None]:
        return [self._stored_as(number) for number in range(len(self.jaxpr.invars))]

    @property
    def out_orders(self) -> list[Order | None]:
        numbers = [self._state.get(out) for out in range(len(self.jaxpr.outvars))]
        return [None if number is None else self._stored_as(number) for number in numbers]

    @property
    def refused(self) -> list[tuple[str, int]]:
        """Why something is in the model's own order though another is asked for, and of how many bytes."""
        return list(self._refused.values())

    # ------------------------------------------------------------ what others ask

    def order(self, node: int | None) -> Rows | None:
        return None if node is None else self._orders.get(self.ties.find(node))

    def cancels(self, use: Use) -> bool:
        """Whether an equation is a reordering of what is stored so."""
        op = reorder_of(use.eqn)
        return op is not None and use.own is not None and self.order(use.own) == op.order

    def moves(self, place: Place, use: Use) -> list[Move]:
        """What is moved before and after an equation."""
        out = None if self.cancels(use) else use.own  # a reordering that remains has the model's own order
        wanted, made = (
            [tuple(None if node == out else node for node in dims) for dims in side]
            for side in (use.operands, use.results)
        )
        taken, given = ([self.ties.dims(place[0], v) for v in vs] for vs in (use.eqn.invars, use.eqn.outvars))
        return [*self._moves(False, taken, wanted), *self._moves(True, made, given)]

    def entering(self, number: int) -> list[Move]:
        """What of an input is moved before all else."""
        atom, order = self.jaxpr.invars[number], self._stored_as(number)
        return [dataclasses.replace(m, held=m.wanted, wanted=m.held) for m in self._border(atom, order)]

    def leaving(self, number: int) -> list[Move]:
        """What of an output is moved at last."""
        back = self._state.get(number)
        return self._border(self.jaxpr.outvars[number], None if back is None else self._stored_as(back))

    # ------------------------------------------------------------ what there is to tell

    def left(self) -> tuple[Left, ...]:
        """What is moved in a step, the same things added up; and what is not stored so, and why."""
        told: collections.Counter[tuple[str, str, str]] = collections.Counter()
        for *text, count in self._told():
            what, why, where = text
            told[what, why, where] += count
        return tuple(Left(what, count, why, where) for (what, why, where), count in told.items())

    def sums(self) -> tuple[Reordered, ...]:
        """The sums that are taken over rows in another order."""
        found = [
            Reordered(f"a sum over {len(rows)} layers", self.ties.line(place))
            for place, node in self.ties.sums
            if (rows := self.order(node)) is not None and rows not in self._lengths
        ]
        return tuple(dict.fromkeys(found))

    def edge(self) -> tuple[str, ...]:
        """What is put in the order of a length as it comes, or back as it goes."""
        found = [
            f"{kind} {atom.aval.str_short()}"
            for kind, atom, move in self._at_borders()
            if self.order(move.node) in self._lengths
        ]
        return tuple(found)

    def _told(self) -> Iterator[tuple[str, str, str, int]]:
        for place, use in self.ties.uses.items():
            op, name, where = reorder_of(use.eqn), use.eqn.primitive.name, self.ties.line(place)
            why = "not each layer is treated alone there"
            if op is not None:
                name, why = op.name, "what it is made of is stored in another order"
                node = None if use.own is None else self.ties.find(use.own)
                refused = self._refused.get(-1 if node is None else node)
                if node not in self._orders and (refused is None or op.is_length):
                    text = f"left `{name}` of {use.eqn.invars[0].aval.str_short()}"
                    known = "nothing that is stored hangs with it" if refused is None else refused[0]
                    yield text, known, where, _bytes(use, use.eqn.invars[0])
            for atom, move in self._told_of(place, use):
                what = f"what `{name}` gives" if move.of_result else f"what `{name}` takes"
                yield f"put {what} in order, {atom.aval.str_short()}", why, where, _bytes(use, atom)
        for kind, atom, move in self._at_borders():
            if self.order(move.node) in self._lengths:
                continue
            yield (
                f"put an {kind} in order, {atom.aval.str_short()}",
                "it is not stored by stage",
                "",
                size(atom),
            )
        for node, (why, count) in self._refused.items():
            for number in self._stored:
                if node in self._roots(self.jaxpr.invars[number]):
                    yield (
                        f"left {self.jaxpr.invars[number].aval.str_short()} in its own order",
                        why,
                        "",
                        count,
                    )

    def _told_of(self, place: Place, use: Use) -> Iterator[tuple[Atom, Move]]:
        """The moves of an equation that cost something: constants, and what counts rows, are made so."""
        for move in self.moves(place, use):
            atom = (use.eqn.outvars if move.of_result else use.eqn.invars)[move.number]
            if use.eqn.primitive.name != "iota" and not self.ties.is_constant(place[0], atom):
                yield atom, move

    def _at_borders(self) -> Iterator[tuple[str, Atom, Move]]:
        """The moves of inputs and outputs."""
        for kind, atoms, moves in (
            ("input", self.jaxpr.invars, self.entering),
            ("output", self.jaxpr.outvars, self.leaving),
        ):
            for number, atom in enumerate(atoms):
                if not self.ties.is_constant((), atom):
                    yield from ((kind, atom, move) for move in moves(number))

    # ------------------------------------------------------------ choosing

    def _dims(self, atom: Atom) -> Dims:
        return self.ties.dims((), atom)

    def _roots(self, atom: Atom) -> set[int]:
        return {self.ties.find(n) for n in self._dims(atom) if n is not None}

    def _candidates(self) -> list[int]:
        """The inputs that may be stored: those that come back, and what reordered arrays are made of."""
        asking = [
            use.own
            for use in self.ties.uses.values()
            if use.own is not None and (op := reorder_of(use.eqn)) is not None
            if not op.goes_back and not op.is_length
        ]
        weights = self.ties.behind(asking)
        back = set(self._state.values())
        return [
            number
            for number, v in enumerate(self.jaxpr.invars)
            if number not in self._keep and (number in back or not weights.isdisjoint(self._dims(v)))
        ]

    def _choose(self) -> None:
        """Gives nodes the order that is asked for most, but those that have to be in the model's own, and
        those of which more bytes would be moved so.
        """
        asked: dict[int, collections.Counter[Rows]] = {}
        for use in self.ties.uses.values():
            if use.own is not None and (op := reorder_of(use.eqn)) is not None:
                counts = asked.setdefault(self.ties.find(use.own), collections.Counter())
                counts[op.order] += _bytes(use, use.eqn.invars[0])
                if op.is_length:
                    self._lengths.add(op.order)
        fixed = {self.ties.find(node): why for node, why in self.ties.fixed.items()}
        hung = {node for number in self._stored for node in self._roots(self.jaxpr.invars[number])}
        hung |= {node for node, counts in asked.items() if not self._lengths.isdisjoint(counts)}
        for node in sorted(hung & set(asked)):
            if node in fixed:
                self._refused[node] = fixed[node], asked[node].total()
            else:
                self._orders[node] = asked[node].most_common(1)[0][0]
        costs: collections.Counter[int] = collections.Counter()
        for place, use in self.ties.uses.items():
            for atom, move in self._told_of(place, use):
                costs[self.ties.find(move.node)] += _bytes(use, atom)
        for _, atom, move in self._at_borders():
            costs[self.ties.find(move.node)] += size(atom)
        for node in [node for node in self._orders if costs[node] > self._most(node, asked[node].total())]:
            del self._orders[node]
            self._refused[node] = (
                f"in that order, {costs[node]} bytes of it would be moved",
                asked[node].total(),
            )

    def _most(self, node: int, asked: int) -> float:
        """How many bytes may be moved for an order that so many are asked to have."""
        return asked * self._share if self._orders[node] in self._lengths else asked

    def _stored_as(self, number: int) -> Order | None:
        if number in self._stored:
            for d, node in enumerate(self._dims(self.jaxpr.invars[number])):
                rows = self.order(node)
                if (
                    rows is not None
                    and rows not in self._lengths
                    and len(rows) == shape_of(self.jaxpr.invars[number])[d]
                ):
                    return Order(rows, d)
        return None

    def _moves(self, of_result: bool, held: Collection[Dims], wanted: Collection[Dims]) -> Iterator[Move]:
        for number, (mine, theirs) in enumerate(zip(held, wanted, strict=True)):
            for d, (a, b) in enumerate(zip(mine, theirs, strict=True)):
                before, after = self.order(a), self.order(b)
                if before != after:
                    node = b if before is None else a
                    assert node is not None
                    yield Move(of_result, number, d, before, after, node)

    def _border(self, atom: Atom, order: Order | None) -> list[Move]:
        moves = []
        for d, node in enumerate(self._dims(atom)):
            inside = self.order(node)
            outside = order.rows if order is not None and order.dim == d else None
            if inside != outside:
                moves.append(Move(False, 0, d, inside, outside, -1 if node is None else node))
        return moves


def _bytes(use: Use, atom: Atom) -> int:
    """What it takes a step to move an operand or result of an equation."""
    return size(atom) * use.turns
