"""Products of tokens with weights of experts, where a choice decides which token takes which expert.

    dot(mask[t,x,c], tokens) -> dot(sent[x,c,d], w[x,d,f])        places for each expert
    dot(tokens, w[x,d,f]) * gates[t,x]                            all experts, most of them times zero
    dot(tokens, w[chosen])                                        weights looked up
    sum of where(chosen == e, dot(tokens, w[e]), 0)               a loop over experts (`looped`)

A product counts where something routed (`choosing`) that tells the experts' axis apart decides what goes into
it, or what is kept of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from xform.axes import Factor, Scope, find_axes
from xform.higher_order import SCATTERS
from xform.raising.choosing import CHOICES, MOVED, Routed, factors, is_float, moved_from, routed, tokens
from xform.raising.flat import View
from xform.raising.indices import SAME
from xform.raising.looped import turned
from xform.raising.loops import loops
from xform.raising.meaning import Near
from xform.raising.regions import Known, Region, sources
from xform.trace import Atom, DropVar, JaxprEqn, Var, shape_of

OP = "experts"
SOFT = "every token goes to every expert: its gates are a softmax of which nothing is chosen"
ELSEWHERE = "what an expert gives goes to other tokens than it took, or to sums of them"

Dims = tuple[frozenset[Factor], ...]
"""The axes of each dimension of a value."""


@dataclasses.dataclass(frozen=True)
class Product:
    """A product of tokens x and weights w: equation `number`, or the loop that holds it.

    axes: the experts' among those of w; none where each expert has an array of its own. summed: the axes that
    the product sums over. keys: what chose: products with one in common are of one operation.
    """

    number: int
    style: str
    x: Atom
    w: Var
    axes: frozenset[Factor]
    summed: frozenset[Factor]
    experts: int
    keys: frozenset[object]


class Sending:
    """The products by expert of a view, and what nearly are."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.scope: Scope = find_axes(view.jaxpr).root
        self.pure = self._weights()
        self.tokens = tokens(view, self.scope)
        given = (v for v in view.jaxpr.invars if shape_of(v) and not is_float(v))
        self.given = frozenset[Factor]().union(*(factors(self.scope, v) for v in given))
        self.chosen_among = frozenset(self._chosen_among())
        features = self._features() - self.tokens - self.chosen_among
        self.routed = routed(view, self.scope, features, _from_outside(view))
        self.known = Known(view, self.scope, self.routed, self.pure, self.tokens, self.chosen_among)
        along = frozenset[Factor]().union(*(r.along for r in self.routed.values()))
        indexed = (factors(self.scope, v) for v in self.routed if not is_float(v))
        self.told_apart = along.union(*indexed, *self._written_or_read())

    def found(self) -> tuple[list[Product], list[Near]]:
        products: list[Product] = []
        nears: list[Near] = []
        for number, eqn in enumerate(self.view.eqns):
            if eqn.primitive.name != "dot_general" or not is_float(eqn.outvars[0]):
                continue
            for side in (1, 0):
                made = self._looked_up(number, eqn, side) or self._dense(number, eqn, side)
                if isinstance(made, Product):
                    products.append(made)
                if made is not None:
                    break
            else:
                made = SOFT if self._is_soft(number, eqn) else None
            if isinstance(made, str):
                nears.append(Near(OP, made, self.view, number))
        taken = {p.number for p in products}
        for t in turned(self.view, self.scope, self.routed, self.pure):
            if t.number not in taken:
                axes = frozenset(self.scope[t.w][t.dim]) if t.dim >= 0 else frozenset[Factor]()
                summed = frozenset(f for d in t.summed for f in self.scope[t.w][d])
                products.append(Product(t.number, "loop", t.x, t.w, axes, summed, t.experts, t.keys))
        return products, nears

    # ------------------------------------------------------------ what is known of the view

    def _written_or_read(self) -> Iterator[frozenset[Factor]]:
        """The axes into which something routed points."""
        for eqn in self.view.eqns:
            name = eqn.primitive.name
            if (name != "gather" and name not in SCATTERS) or eqn.invars[1] not in self.routed:
                continue
            dims = eqn.params["dimension_numbers"]
            places = dims.start_index_map if name == "gather" else dims.scatter_dims_to_operand_dims
            yield frozenset(f for d in places for f in self.scope[eqn.invars[0]][d])

    def _chosen_among(self) -> Iterator[Factor]:
        """The axes along which the largest are found: of experts; never those of what an expert gives."""
        for eqn in self.view.eqns:
            if eqn.primitive.name in CHOICES:
                axes = eqn.params.get("axes") or (eqn.params.get("dimension", -1),)
                yield from (f for d in axes for f in self.scope[eqn.invars[0]][d])

    def _weights(self) -> set[Var]:
        """Values that are inputs, or such cut, moved and cast."""
        found = {v for v in self.view.jaxpr.all_invars if is_float(v)}
        for eqn in self.view.eqns:
            name = eqn.primitive.name
            moves = name in _CUTS or name in SAME or name in MOVED
            if moves and eqn.invars and isinstance(eqn.invars[0], Var) and eqn.invars[0] in found:
                found.update(v for v in eqn.outvars if not isinstance(v, DropVar))
        return found

    def _features(self) -> set[Factor]:
        """Axes that products with weights sum over."""
        found: set[Factor] = set()
        for eqn in self.view.eqns:
            if eqn.primitive.name != "dot_general" or not any(
                v in self.pure for v in eqn.invars if isinstance(v, Var)
            ):
                continue
            summed = self._summed(eqn, 0)
            if len(summed) == 1:
                found |= summed
        return found

    def _summed(self, eqn: JaxprEqn, side: int) -> frozenset[Factor]:
        dims = eqn.params["dimension_numbers"][0][side]
        return frozenset(f for d in dims for f in self.scope[eqn.invars[side]][d])

    # ------------------------------------------------------------ weights looked up

    def _looked_up(self, number: int, eqn: JaxprEqn, side: int) -> Product | None:
        w, x = eqn.invars[side], eqn.invars[1 - side]
        gather = self._lookup(w)
        if gather is None or gather.primitive.name not in ("gather", "dynamic_slice"):
            return None
        base = self._base(gather.invars[0])
        at = [v for v in gather.invars[1:] if isinstance(v, Var) and v in self.routed]
        if base is None or not at:
            return None
        sizes, window = shape_of(gather.invars[0]), gather.params["slice_sizes"]
        dims = tuple(d for d, n in enumerate(window) if n < sizes[d])
        rest = [n for d, n in enumerate(sizes) if d not in dims and n > 1]
        if len(dims) != 1 or window[dims[0]] != 1 or len(rest) < 2:
            return None
        routes = [self.routed[v] for v in at]
        looked = frozenset[Factor]().union(*(factors(self.scope, v) for r in routes for v in r.sources))
        if all(r.given for r in routes) and not looked <= factors(self.scope, x) - self._summed(
            eqn, 1 - side
        ):
            return None
        axes, summed = frozenset(self.scope[base][dims[0]]), self._summed(eqn, side)
        if not factors(self.scope, base) - axes - summed - factors(self.scope, x):
            return None
        return Product(number, "gathered", x, base, axes, summed, sizes[dims[0]], sources(routes))

    def _lookup(self, w: Atom) -> JaxprEqn | None:
        """The equation that looks weights up, which may be weighed as well."""
        eqn = moved_from(self.view, w)
        if eqn is not None and eqn.primitive.name == "mul":
            found = [moved_from(self.view, v) for v in eqn.invars if len(shape_of(v)) > 2]
            return next((e for e in found if e is not None and e.primitive.name == "gather"), None)
        return eqn

    def _base(self, atom: Atom) -> Var | None:
        """The input that a weight is, moved and cast."""
        while isinstance(atom, Var) and (eqn := self.view.maker(atom)) is not None:
            if eqn.primitive.name not in MOVED | SAME | _CUTS:
                return None
            atom = eqn.invars[0]
        return atom if isinstance(atom, Var) and is_float(atom) else None

    # ------------------------------------------------------------ weights with the experts' axis

    def _is_bank(self, w: Atom) -> bool:
        """Whether a value may be the weights of several experts: what has two axes more than one."""
        return isinstance(w, Var) and w in self.pure and sum(f.size > 1 for f in factors(self.scope, w)) > 2

    def _dense(self, number: int, eqn: JaxprEqn, side: int) -> Product | str | None:
        w, x = eqn.invars[side], eqn.invars[1 - side]
        if not isinstance(w, Var) or not self._is_bank(w) or not isinstance(x, Var):
            return None
        summed = self._summed(eqn, side)
        for axes in self._may_be_experts(w):
            others = factors(self.scope, w) - axes
            if not summed & others or not others - summed or others & (self.tokens | self.chosen_among):
                continue
            region = Region(self.known, axes, others, number)
            met = region.met()
            if met and (region.mixed or (met[0] in ("one_hot", "sorted") and not region.returns)):
                return ELSEWHERE
            if met:
                style, keys = met
                style = "sorted" if style == "all" and axes & summed else style
                count = 1
                for f in axes:
                    count *= f.size
                return Product(number, style, x, w, axes, summed - axes, count, keys)
        return None

    def _may_be_experts(self, w: Var) -> Iterator[frozenset[Factor]]:
        """Axes of weights that something routed tells apart: each, and, where experts lie in rows, all."""
        told = sorted((self.told_apart - self.given) & factors(self.scope, w), key=lambda f: f.id)
        yield from (frozenset((f,)) for f in told)
        if len(told) > 1:
            yield frozenset(told)

    def _is_soft(self, number: int, eqn: JaxprEqn) -> bool:
        """Whether it is a mixture in which every token goes to every expert: what a softmax along their axis
        weighs.
        """
        for side in (1, 0):
            w = eqn.invars[side]
            if not self._is_bank(w):
                continue
            contract = eqn.params["dimension_numbers"][0][side]
            for d, dim in enumerate(self.scope[w]):
                if d in contract or len(dim) != 1:
                    continue
                others = factors(self.scope, w) - set(dim)
                if Region(self.known, frozenset(dim), others, number).is_soft():
                    return True
        return False


_CUTS = frozenset(("slice", "dynamic_slice", "split", "unstack", "concatenate", "stack", "copy"))


def _from_outside(view: View) -> dict[Var, Routed]:
    """What is routed among the inputs of a loop's body: integers that the program around it computed."""
    if view.outer is None or not any(not is_float(v) for v in view.jaxpr.invars):
        return {}
    own = [loop for loop in loops(view.outer) if loop.body.place == view.place]
    if not own:
        return {}
    outside = Sending(view.outer).routed
    given = zip(view.jaxpr.invars, own[0].body.jaxpr.invars, strict=True)
    found = {v: own[0].inputs.get(there) for v, there in given}
    return {
        v: Routed(sources=frozenset((v,)))
        for v, each in found.items()
        if each is not None and isinstance(each[0], Var) and each[0] in outside and not outside[each[0]].given
    }
