"""The values of a program as one graph, across the bodies of its equations; the program is not changed.

What a body takes is the value outside, what it gives is the value that the equation gives, so that a jit, a
remat or a custom rule is no border. Where several values may arrive (a loop's first carry and its next, the
branches of a cond) an operation without an equation joins them; so does what a scan takes apart or stacks.

    flow = Flow(roles)
    flow.ops[3].ins[0].op            # the operation that made the first operand of the fourth
    flow.behind(value, stops)        # the stops met on the way back from a value
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator

from xform.axes import Path, Scope
from xform.higher_order import bodies, carries, operands, scan_parts
from xform.roles import Roles
from xform.roles.evidence import VALUES
from xform.roles.logical import is_activation
from xform.trace import Jaxpr, JaxprEqn, Literal, Var, shape_of


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """One array. `op` made it as its result number `result`; None: an input, a constant or a literal.

    data: whether it is computed from data; weight: whether it is computed from other inputs or constants.
    """

    shape: tuple[int, ...]
    op: Op | None = None
    result: int = 0
    users: list[Op] = dataclasses.field(default_factory=list)
    data: bool = False
    weight: bool = False


@dataclasses.dataclass(eq=False, slots=True)
class Op:
    """One equation at one call site, or, without an equation, a join of its operands."""

    number: int
    path: Path
    index: int
    eqn: JaxprEqn | None
    scope: Scope
    ins: list[Value]
    outs: list[Value]

    @property
    def name(self) -> str:
        return "" if self.eqn is None else self.eqn.primitive.name

    @property
    def sources(self) -> list[Value]:
        """The operands that the values of the results come from; the others only say which."""
        return self.ins[VALUES.get(self.name, slice(None))]


class Flow:
    """All operations of a program, in order."""

    def __init__(self, roles: Roles) -> None:
        self.ops: list[Op] = []
        self.inside: dict[Path, list[Value]] = {}  # what each body takes, in the order of its inputs
        root = roles.axes.root
        values = []
        for var in (*root.jaxpr.constvars, *root.jaxpr.invars):
            data = is_activation(roles, root, var)
            values.append(Value(shape_of(var), data=data, weight=not data))
        consts = len(root.jaxpr.constvars)
        self._body(root, (), values[:consts], values[consts:])
        self._spread()

    def behind(self, value: Value, stops: Collection[Op]) -> list[Op]:
        """The stops whose results reach a value through no other stop, in program order."""
        found: set[Op] = set()
        for op in self.region(value, stops):
            found.update(v.op for v in op.sources if v.op is not None and v.op in stops)
        if value.op is not None and value.op in stops:
            found.add(value.op)
        return sorted(found, key=lambda op: op.number)

    def region(self, value: Value, stops: Collection[Op]) -> set[Op]:
        """The operations that a value of data is made by, back to the stops; they are not among it."""
        seen: set[Op] = set()
        todo = [value]
        while todo:
            op = todo.pop().op
            if op is not None and op not in seen and op not in stops:
                seen.add(op)
                todo += [v for v in op.sources if v.data]
        return seen

    def _body(self, scope: Scope, path: Path, consts: list[Value], args: list[Value]) -> list[Value]:
        jaxpr = scope.jaxpr
        self.inside[path] = args
        known: dict[Var, Value] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

        def read(atom: Var | Literal) -> Value:
            return Value(shape_of(atom)) if isinstance(atom, Literal) else known[atom]

        for index, eqn in enumerate(jaxpr.eqns):
            ins = [read(v) for v in eqn.invars]
            known.update(zip(eqn.outvars, self._equation(scope, path, index, eqn, ins), strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _equation(self, scope: Scope, path: Path, index: int, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
        inner = list(enumerate(bodies(eqn)))
        if not inner or any((index, number) not in scope.children for number, _ in inner):
            return self._op(path, index, eqn, scope, ins, [shape_of(v) for v in eqn.outvars])
        shapes = [shape_of(v) for v in eqn.outvars]
        results: list[list[Value]] = []
        for number, body in inner:
            outs = self._inner(scope, path, index, eqn, ins, number, body)
            test = eqn.primitive.name == "while" and body is eqn.params["cond_jaxpr"]
            if len(outs) == len(shapes) and not test:
                results.append(outs)
        if not results:
            return self._op(path, index, eqn, scope, ins, shapes)
        return [
            ways[0] if len(ways) == 1 and ways[0].shape == shape else self._join(path, scope, ways, shape)
            for shape, ways in zip(shapes, map(list, zip(*results, strict=True)), strict=True)
        ]

    def _inner(
        self, scope: Scope, path: Path, index: int, eqn: JaxprEqn, ins: list[Value], number: int, body: Jaxpr
    ) -> list[Value]:
        """The results of a body at this call site."""
        below, place = scope.enter(index, number), (*path, (index, number))
        looped = carries(eqn, number)
        whole = sum(scan_parts(eqn)[:2]) if eqn.primitive.name == "scan" else len(body.invars)
        args = []
        for i, (var, at) in enumerate(zip(body.invars, operands(eqn, number), strict=True)):
            if at is None:
                args.append(Value(shape_of(var)))
            elif i in looped.values() or i >= whole:
                args.append(self._join(place, below, [ins[at]], shape_of(var)))
            else:
                args.append(ins[at])
        consts = [Value(shape_of(v), weight=True) for v in body.constvars]
        outs = self._body(below, place, consts, args)
        for result, i in looped.items():
            join = args[i].op
            assert join is not None
            join.ins.append(outs[result])
            outs[result].users.append(join)
        return outs

    def _join(self, path: Path, scope: Scope, ways: list[Value], shape: tuple[int, ...]) -> Value:
        return self._op(path, -1, None, scope, ways, [shape])[0]

    def _op(
        self,
        path: Path,
        index: int,
        eqn: JaxprEqn | None,
        scope: Scope,
        ins: list[Value],
        shapes: list[tuple[int, ...]],
    ) -> list[Value]:
        op = Op(len(self.ops), path, index, eqn, scope, list(ins), [])
        op.outs += [Value(shape, op, i) for i, shape in enumerate(shapes)]
        self.ops.append(op)
        for value in ins:
            value.users.append(op)
        return op.outs

    def _spread(self) -> None:
        """What is computed from data, and from weights: on and on around the loops until nothing changes."""
        changed = True
        while changed:
            changed = False
            for op in self.ops:
                data, weight = any(v.data for v in op.ins), any(v.weight for v in op.ins)
                for v in op.outs:
                    if (data and not v.data) or (weight and not v.weight):
                        v.data, v.weight, changed = v.data or data, v.weight or weight, True


def dimensions_behind(op: Op, dimension: int) -> Iterator[tuple[Value, int]]:
    """The operands, each with the dimension, that a dimension of an operation's results comes from.

    Nothing where it was merged with others, or is new.
    """
    special = _DIMENSIONS.get(op.name)
    if special is not None:
        found = special(op, dimension)
        if found is not None:
            yield op.ins[0], found
        return
    for value in op.sources:
        if len(value.shape) == len(op.outs[0].shape):
            yield value, dimension


def _reshape(op: Op, dimension: int) -> int | None:
    """The dimension of the same size with as much before it."""
    before, after = op.ins[0].shape, op.outs[0].shape

    def ahead(shape: tuple[int, ...], d: int) -> int:
        product = 1
        for n in shape[:d]:
            product *= n
        return product

    place = (ahead(after, dimension), after[dimension])
    return next((d for d in range(len(before)) if (ahead(before, d), before[d]) == place), None)


def _transpose(op: Op, dimension: int) -> int | None:
    assert op.eqn is not None
    return int(op.eqn.params["permutation"][dimension])


def _broadcast(op: Op, dimension: int) -> int | None:
    assert op.eqn is not None
    places = list(op.eqn.params["broadcast_dimensions"])
    d = places.index(dimension) if dimension in places else None
    return d if d is not None and op.ins[0].shape[d] == op.outs[0].shape[dimension] else None


_DIMENSIONS: dict[str, Callable[[Op, int], int | None]] = {
    "reshape": _reshape,
    "squeeze": _reshape,
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
}
