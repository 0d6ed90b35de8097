"""An estimate of the device memory that a program takes, from what is alive where; nothing is compiled.

Its arguments, the results that take no donated argument's place, and the most that is alive at once between
them. Elementwise operations are fused into what reads them and make nothing, unless several read a result
that is less to hold than its operands; reshapes and names are the value they are made of; a result takes the
place of an operand of its size that ends there. A loop holds what it stacks, and, while it runs, what its
body holds at most. A weight that a product needs whole is gathered for as long as that takes, and a sum over
the mesh is whole before it is scattered. What the compiler makes of it differs by its schedule, its padding
and its choice of fusions, and what is small it keeps on the chip: where it can be asked, what it says stands
in the estimate's place (`budget`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from xform.axes import Scope
from xform.axes.rules import ELEMENTWISE
from xform.higher_order import READ, bodies, scan_parts
from xform.memory.flat import Op, Value, flatten
from xform.memory.spread import Spread
from xform.trace import Var, shape_of

SAME = frozenset({"name", "sharding_constraint", "reshape", "squeeze", "expand_dims", "stop_gradient"})
"""Operations whose result is their operand, in its place."""

FUSED = ELEMENTWISE | {
    "broadcast_in_dim",
    "device_put",
    "iota",
    "transpose",
    "slice",
    "split",
    "concatenate",
    "pad",
    "rev",
}
"""Operations that are computed where their result is read."""

PRODUCTS = frozenset({"dot_general", "ragged_dot_general", "conv_general_dilated"})


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device: the arguments, and what is made."""

    arguments: float
    made: float

    @property
    def peak(self) -> float:
        return self.arguments + self.made


def estimate(spread: Spread, donated: Sequence[bool]) -> Memory:
    """The memory of a program on one device. `donated`: the inputs whose place its results may take."""
    root = spread.axes.root
    free: Counter[object] = Counter()
    for var, given in zip(root.jaxpr.invars, donated, strict=True):
        free[_type(spread, var)] += bool(given)
    placed: set[int] = set()
    for i, out in enumerate(root.jaxpr.outvars):
        if isinstance(out, Var) and out not in root.jaxpr.invars and free[_type(spread, out)] > 0:
            free[_type(spread, out)] -= 1
            placed.add(i)
    arguments = sum(spread.nbytes(root, v) for v in root.jaxpr.invars)
    return Memory(arguments, _Body(spread, root, placed).peak(0))


def _type(spread: Spread, var: Var) -> object:
    return shape_of(var), str(var.aval), spread.spec(spread.axes.root, var)


class _Body:
    """A body at one call site. `placed`: the results that are written where something outside is."""

    def __init__(self, spread: Spread, scope: Scope, placed: Collection[int]) -> None:
        self.spread = spread
        body = flatten(spread, scope)
        self.ins, self.ops = body.ins, body.ops
        literal = [not isinstance(v, Var) for v in scope.jaxpr.outvars]
        numbers = [i for i, each in enumerate(literal) if not each]
        self.results = set(body.outs)
        self.readers = Counter(v for op in self.ops for v in op.ins)
        self.behind: dict[Value, tuple[Value, ...]] = {}  # the values in memory that one is computed from
        self.last: dict[Value, int] = {}
        for number, op in enumerate(self.ops):
            roots = tuple(dict.fromkeys(r for v in op.ins for r in self._roots(v)))
            self.last.update(dict.fromkeys(roots, number))
            for value in op.outs:
                self.behind[value] = roots if self._is_free(op, value, roots) else (value,)
        self.placed: set[Value] = set()
        for i, value in zip(numbers, body.outs, strict=True):
            roots = self._roots(value)
            self.last.update(dict.fromkeys(roots, len(self.ops)))
            if i in placed:
                self.placed.update(roots if roots == (value,) or len(roots) == 1 else (value,))

    def _roots(self, value: Value) -> tuple[Value, ...]:
        return self.behind.get(value, (value,))

    def _is_free(self, op: Op, value: Value, roots: Sequence[Value]) -> bool:
        """Whether a result is not made in memory."""
        if op.name in SAME:
            return True
        if op.name not in FUSED:
            return False
        if not roots:
            return True
        if value in self.results:
            return False
        if self.readers[value] <= 1:
            return True
        # Several read it: it is made where that is less to hold than what it is computed from.
        return sum(r.nbytes for r in roots if r in self.behind) <= value.nbytes

    def peak(self, held: int) -> float:
        """The most that the body holds at once; of what it takes, the last `held` are its own."""
        size = {v: v.nbytes for v in self.ins[len(self.ins) - held :]} if held else {}
        alive = most = sum(size.values())
        for number, op in enumerate(self.ops):
            made = [v for v in op.outs if self.behind[v] == (v,)]
            size.update((v, 0.0 if v in self.placed else v.nbytes) for v in made)
            ending = [
                v for v in dict.fromkeys(r for a in op.ins for r in self._roots(a))
                if self.last[v] == number and v in size
            ]  # fmt: skip
            new = sum(size[v] for v in made)
            in_place = 0.0 if op.name in PRODUCTS else _in_place([size[v] for v in made], ending, size)
            most = max(most, alive + new - in_place + self._inside(op))
            alive += new - sum(size.pop(v) for v in ending)
            alive -= sum(size.pop(v) for v in made if v not in self.last)
        return most

    def _inside(self, op: Op) -> float:
        """What an operation needs while it runs, besides its operands and results."""
        if op.name == "dot_general":
            return self._whole(op)
        inside = 0.0
        if op.name in READ:  # a kernel keeps on the chip what its program makes
            return inside
        for number, body in enumerate(bodies(op.eqn)):
            if (op.index, number) not in op.scope.children:
                continue
            held, placed = 0, list(range(len(body.outvars)))
            if op.name == "scan":
                _, carry, held = scan_parts(op.eqn)
                placed = placed[carry:]
            elif op.name == "while":
                placed = []
            below = _Body(self.spread, op.scope.enter(op.index, number), placed)
            inside = max(inside, below.peak(held))
        return inside

    def _whole(self, op: Op) -> float:
        """Bytes that a product has whole for a while: a weight, gathered; a sum, before it is scattered."""
        spread, scope = self.spread, op.scope
        contracted, _ = op.eqn.params["dimension_numbers"]
        specs = [spread.spec(scope, v) for v in op.eqn.invars[:2]]
        out = {a for axes in spread.spec(scope, op.eqn.outvars[0]) for a in axes}
        summed = [{a for d in dims for a in spec[d]} for spec, dims in zip(specs, contracted, strict=True)]
        if scattered := summed[0] & summed[1] & out:
            return op.outs[0].nbytes * spread.ways([tuple(scattered)])
        whole = 0.0
        for atom, own, other in zip(op.eqn.invars[:2], summed, reversed(specs), strict=False):
            clash = own & out & {a for axes in other for a in axes}
            if clash:
                whole += spread.nbytes(scope, atom) * spread.ways([tuple(clash)])
        return whole


def _in_place(made: Sequence[float], ending: Sequence[Value], size: Mapping[Value, float]) -> float:
    """Bytes of results that take the place of operands that end."""
    places = Counter(size[v] for v in ending)
    total = 0.0
    for nbytes in made:
        if places[nbytes] > 0:
            places[nbytes] -= 1
            total += nbytes
    return total
