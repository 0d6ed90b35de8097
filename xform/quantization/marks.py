"""The names under which a model's program measures the ranges that are kept from one step to the next.

    a = reduce_max (abs x)          a' = name[range:3.mlpwi_0:left:16:12*] a

A mark says whose range it is, of how many steps the largest magnitudes are kept, and which loops stand around
the product, 12 turns with weights of their own here. It goes through autodiff with the number it names, into
forward loops, backward ones and what is computed again; there `kept` looks for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

from xform.higher_order import bodies, carries, operands, scan_parts
from xform.quantization.training import Products, Side
from xform.rewrite import Path
from xform.roles import Roles
from xform.tensors.names import NamedProduct
from xform.trace import Atom, Jaxpr, JaxprEqn, Var

SIDES = ("left", "right", "dlhs", "drhs")
FORWARD = SIDES[:2]

Loops = tuple[tuple[int, bool], ...]
"""The loops around a product, from the outermost: how many turns (0: nobody knows), and whether each has a
weight of its own.
"""


@dataclasses.dataclass(frozen=True)
class Mark:
    """key: the product's. side: a row of SIDES. steps: of how many the largest magnitudes are kept; 0: a range
    that was calibrated.
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


def marked(how: Products, key: str, loops: Loops) -> Products:
    """How a product is quantized, the ranges that are kept under their marks."""

    def one(name: str) -> Side:
        side: Side = getattr(how, name)
        if side.format is None or not side.calibration.is_kept:
            return side
        return dataclasses.replace(side, mark=Mark(key, name, side.calibration.steps, loops).text)

    return dataclasses.replace(how, **{name: one(name) for name in SIDES})


# ---------------------------------------------------------------- which loops have weights of their own


def loops_around(products: Iterable[NamedProduct], roles: Roles) -> Mapping[Path, Loops]:
    """For the body of each of a model's products, the loops that it stands in. Turns have weights of their own
    where a product's weight comes from what is scanned over, or from what the turns change, a counter say.
    """
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
    wanted: set[Atom] = {roles.axes.scope(p.path).jaxpr.eqns[p.index].invars[p.weight]}
    for depth in range(len(p.path) - 1, -1, -1):
        path, (index, number) = p.path[:depth], p.path[depth]
        inside = roles.axes.scope(p.path[: depth + 1]).jaxpr
        eqn = roles.axes.scope(path).jaxpr.eqns[index]
        from_inputs = _behind(inside, wanted)
        if from_inputs & _changing(eqn, number):
            yield p.path[: depth + 1]
        outer = operands(eqn, number)
        wanted = {eqn.invars[at] for i in from_inputs if (at := outer[i]) is not None}


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
