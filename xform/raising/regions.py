"""What becomes of tokens between their dispatch to experts and their return: where a choice meets them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping

from xform.axes import Factor, Scope
from xform.raising.choosing import Routed, factors, is_float, moved_from
from xform.raising.flat import View
from xform.trace import Atom, DropVar, JaxprEqn, Var


@dataclasses.dataclass(frozen=True)
class Known:
    """Of a view: what is routed, which values are weights, the axes of tokens and of their choices, and those
    among which is chosen.
    """

    view: View
    scope: Scope
    routed: Mapping[Var, Routed]
    pure: Collection[Var]
    tokens: frozenset[Factor]
    among: frozenset[Factor]


def sources(routes: Iterable[Routed]) -> frozenset[object]:
    """What chose."""
    return frozenset(v for r in routes for v in r.sources)


class Region:
    """The values around a product that have the experts' axes, and where something routed meets them.

    features: the other axes of the weights. returns: whether somewhere results leave that axis by what is
    routed, or in the product. mixed: whether tokens are summed before they get to an expert.
    """

    def __init__(
        self, known: Known, axes: frozenset[Factor], features: frozenset[Factor], number: int
    ) -> None:
        self.known, self.axes, self.features = known, axes, features
        self.view, self.scope = known.view, known.scope
        self.start = number
        self.returns = not self._has(known.view.eqns[number].outvars[0])
        self.mixed = False

    def met(self) -> tuple[str, frozenset[object]] | None:
        """The style, and what chose, where the two meet; None where they do not."""
        found: dict[str, list[Routed]] = {}
        for eqn in self._eqns():
            how = self._meets(eqn)
            self.returns |= self._takes_back(eqn)
            if how is not None:
                found.setdefault(how[0], []).extend(how[1])
        if not found:
            return None
        style = next(s for s in ("one_hot", "sorted", "all") if s in found)
        routes = [r for each in found.values() for r in each]
        if style == "all" and any(r.by_sort for r in routes):
            style = "sorted"
        chosen = [r for r in routes if not r.given] or routes
        return style, sources(chosen)

    def is_soft(self) -> bool:
        """Whether what a softmax along the axes gives weighs experts."""
        return any(
            self._has(v) and not factors(self.scope, v) & self.features and self._is_softmax(v)
            for eqn in self._eqns()
            if eqn.primitive.name in ("mul", "dot_general")
            for v in eqn.invars
            if isinstance(v, Var) and v not in self.known.pure
        )

    def _is_softmax(self, gate: Var) -> bool:
        """Whether a value is exponents over their sum along the axes."""
        last = moved_from(self.view, gate)
        if last is None or last.primitive.name != "div":
            return False
        above, below = (moved_from(self.view, v) for v in last.invars)
        if above is None or below is None or above.primitive.name != "exp":
            return False
        summed = below.params["axes"] if below.primitive.name == "reduce_sum" else ()
        return any(self.axes & frozenset(self.scope[below.invars[0]][d]) for d in summed)

    def _eqns(self) -> Iterator[JaxprEqn]:
        """The equations that take or give values with the axes, from the product on, both ways."""
        view = self.view
        seen: set[int] = set()
        todo = [self.start]
        while todo:
            number = todo.pop()
            if number in seen:
                continue
            seen.add(number)
            eqn = view.eqns[number]
            yield eqn
            for v in eqn.invars:
                if self._goes_on(v) and isinstance(v, Var) and v in view.makers:
                    todo.append(view.makers[v])
            for v in eqn.outvars:
                if self._goes_on(v):
                    todo += [n for n in view.users.get(v, ()) if n >= 0]

    def _goes_on(self, v: Atom) -> bool:
        if not isinstance(v, Var) or isinstance(v, DropVar) or v in self.known.pure:
            return False
        return self._is_data(v) and self._has(v) and is_float(v)

    def _is_data(self, v: Atom) -> bool:
        """Whether a value has more than tokens, their choices and experts: features."""
        return bool(factors(self.scope, v) - self.known.tokens - self.axes)

    def _carries(self, v: Var) -> bool:
        """Whether a value is no route, or one that met data: it has axes that say nothing of where to go."""
        route = self.known.routed.get(v)
        if route is None:
            return True
        known = self.known
        return bool(factors(self.scope, v) - known.tokens - known.among - route.along - self.axes)

    def _has(self, v: Atom) -> bool:
        return bool(self.axes & factors(self.scope, v))

    def _meets(self, eqn: JaxprEqn) -> tuple[str, list[Routed]] | None:
        """Where something routed that tells experts apart meets tokens: the style that shows, and routes."""
        name = eqn.primitive.name
        if name not in ("mul", "select_n", "dot_general", "gather", "div") and not name.startswith("scatter"):
            return None
        routes = self.known.routed
        mine = [v for v in eqn.invars if isinstance(v, Var) and v in routes]
        others = [v for v in eqn.invars if isinstance(v, Var) and is_float(v) and self._carries(v)]
        out = eqn.outvars[0]
        if name == "gather" or name.startswith("scatter"):
            return self._pointed(eqn)
        if not mine or not (self._has(out) or any(map(self._has, others))):
            return None
        telling = [
            routes[v]
            for v in mine
            if not factors(self.scope, v) & self.features
            and (self.axes & routes[v].along or (self._has(v) and self._choose(routes[v], eqn, others)))
        ]
        if not telling:
            return None
        if name == "dot_general" and any(map(self._is_data, others)):
            sent = self._has(out) and not any(map(self._has, others))
            if sent and not self._has_places(eqn, telling):
                self.mixed = True
                return None
            self.returns |= not self._has(out)
            return ("one_hot" if sent and self._summed(eqn) else "all"), telling
        return ("all", telling)

    def _takes_back(self, eqn: JaxprEqn) -> bool:
        """Whether a product with weights sums over experts."""
        if eqn.primitive.name != "dot_general" or not any(v in self.known.pure for v in eqn.invars):
            return False
        return bool(self._summed(eqn) & self.axes)

    def _pointed(self, eqn: JaxprEqn) -> tuple[str, list[Routed]] | None:
        """Where something routed says what is read or written, and tells experts apart by it."""
        at = eqn.invars[1]
        if not isinstance(at, Var) or at not in self.known.routed or factors(self.scope, at) & self.features:
            return None
        numbers, reads = eqn.params["dimension_numbers"], eqn.primitive.name == "gather"
        there = eqn.invars[0]
        given, gives = (there, eqn.outvars[0]) if reads else (eqn.invars[2], there)
        dims = numbers.start_index_map if reads else numbers.scatter_dims_to_operand_dims
        if not any(self.axes & frozenset(self.scope[there][d]) for d in dims) and (
            self._has(given) == self._has(gives)
        ):
            return None
        self.returns |= self._has(given) and not self._has(gives)
        return ("all" if self._has(given) else "sorted"), [self.known.routed[at]]

    def _choose(self, route: Routed, eqn: JaxprEqn, data: Iterable[Atom]) -> bool:
        """Whether it is the experts that choose their tokens, and these stay apart here."""
        if route.given or not any(self._has(v) for v in route.sources):
            return False
        return not self._summed(eqn) & self.known.among or not any(map(self._has, data))

    def _has_places(self, eqn: JaxprEqn, telling: list[Routed]) -> bool:
        """Whether tokens that are sent stay apart: an expert has places for them, or they are not summed."""
        if not eqn.params["dimension_numbers"][0][0]:
            return True
        own = factors(self.scope, eqn.outvars[0]) - self.axes
        return any(r.along & own for r in telling) or any(self._places(eqn, v) for v in eqn.invars)

    def _places(self, eqn: JaxprEqn, v: Atom) -> bool:
        """Whether a value says which token is at each of an expert's places."""
        if not isinstance(v, Var) or v not in self.known.routed or not self._has(v):
            return False
        mine = factors(self.scope, v)
        return bool(
            self._summed(eqn) & self.known.routed[v].along & mine and mine - self.axes - self._summed(eqn)
        )

    def _summed(self, eqn: JaxprEqn) -> frozenset[Factor]:
        if eqn.primitive.name != "dot_general":
            return frozenset()
        return frozenset(
            f for d in eqn.params["dimension_numbers"][0][0] for f in self.scope[eqn.invars[0]][d]
        )
