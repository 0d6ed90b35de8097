"""Which loops around a model's products have a weight for each turn: those over layers, not microbatches.

Turns have weights of their own where a product's weight comes from what is scanned over, or from what the
turns change, a counter say, by which it is looked up in a stack. A product without a weight goes with the
others in its loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from xform.higher_order import bodies, carries, operands, scan_parts
from xform.ops.marks import Loops
from xform.rewrite import Path
from xform.roles import Roles
from xform.tensors.names import NamedProduct
from xform.trace import Atom, Jaxpr, JaxprEqn, Var


def loops_around(products: Iterable[NamedProduct], roles: Roles) -> Mapping[Path, Loops]:
    """For the body of each of a model's products, the loops that it stands in."""
    paths: dict[Path, None] = {}
    own: set[Path] = set()
    for p in products:
        paths.setdefault(p.path)
        own.update(_own(p, roles))

    def loops(path: Path) -> Iterator[tuple[int, bool]]:
        for depth, (index, _) in enumerate(path):
            eqn = roles.axes.scope(path[:depth]).jaxpr.eqns[index]
            if eqn.primitive.name in ("scan", "while"):
                yield eqn.params.get("length", 0), path[: depth + 1] in own

    return {path: tuple(loops(path)) for path in paths}


def _own(p: NamedProduct, roles: Roles) -> Iterator[Path]:
    """The loops around a product whose turns take different weights."""
    if p.weight is None:
        return
    wanted: list[Atom] = [roles.axes.scope(p.path).jaxpr.eqns[p.index].invars[p.weight]]
    for depth in range(len(p.path) - 1, -1, -1):
        path, (index, number) = p.path[:depth], p.path[depth]
        inside = roles.axes.scope(p.path[: depth + 1]).jaxpr
        eqn = roles.axes.scope(path).jaxpr.eqns[index]
        from_inputs = _behind(inside, wanted)
        if from_inputs & _changing(eqn, number):
            yield p.path[: depth + 1]
        outer = operands(eqn, number)
        wanted = [eqn.invars[at] for i in from_inputs if (at := outer[i]) is not None]


def _behind(jaxpr: Jaxpr, wanted: Iterable[Atom]) -> set[int]:
    """The numbers of the inputs that values are made of."""
    need = {v for v in wanted if isinstance(v, Var)}
    for eqn in reversed(jaxpr.eqns):
        if not need.isdisjoint(eqn.outvars):
            need.update(v for v in eqn.invars if isinstance(v, Var))
    return {i for i, v in enumerate(jaxpr.invars) if v in need}


def _changing(eqn: JaxprEqn, number: int) -> set[int]:
    """The inputs of a loop's body that are others in each turn."""
    body = bodies(eqn)[number]
    changed: Sequence[int] = [
        there for here, there in carries(eqn, number).items() if body.outvars[here] is not body.invars[there]
    ]
    if eqn.primitive.name != "scan":
        return set(changed)
    consts, carry, _ = scan_parts(eqn)
    return {*changed, *range(consts + carry, len(body.invars))}
