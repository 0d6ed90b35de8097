"""Where a program gets a sharding constraint: at the values whose layout is decided there.

Those are the results of products with a weight, and of attention; rows looked up in a table; gradients where
they are born; and what loops carry. Everything else follows: the partitioner hands layouts on through
elementwise operations, and scores and their gradients have the layout of the queries and keys. So two sorts
of constraint change nothing, and are not placed: on the products of two activations in a backward pass, whose
results follow from queries, keys and values that are constrained; and on what is another constrained value,
cast or transposed. What the user constrains himself is left to him, and the sending of tokens to experts, a
product of two activations, to the partitioner.

    places = Places(roles, layout, weights, spread=("data",)).find()
    places[()][17]                # equation 17 of the program: a layout or None for each result
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence

from jax.sharding import PartitionSpec

from xform.axes import Path, Scope
from xform.higher_order import READ, bodies, carries
from xform.roles import Roles
from xform.roles.logical import LENGTHS, logical_names
from xform.sharding.layout import Layout, spec_axes
from xform.trace import DropVar, JaxprEqn, Literal, Var, name_stack, shape_of, source_line

PRODUCTS = frozenset({"dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated"})
"""Operations whose result gets its layout from the rules, not from its operands. A lookup in a table is one
more.
"""

SUMS = frozenset({"reduce_sum", "scatter", "scatter-add", "scatter-sub"})
"""Operations other than products that sum over the batch: a bias's or a scale's gradient, a table's."""

SAME = frozenset({"convert_element_type", "copy", "reduce_precision", "transpose"})
"""Operations whose result lies as their operand does."""

Specs = tuple[PartitionSpec | None, ...]
Found = dict[Path, dict[int, Specs]]


@dataclasses.dataclass(frozen=True)
class _Body:
    """A body at one call site, and what is known of its variables."""

    scope: Scope
    carried: frozenset[Var]
    backward: bool
    own: frozenset[Var]  # those that the user constrains


class Places:
    """Finds the places. `weights` are the sets of roles that a gradient can have; `spread` the mesh axes that
    gradients lie on besides. `placed` counts what was found, by what it is.
    """

    def __init__(
        self, roles: Roles, layout: Layout, weights: frozenset[frozenset[str]], spread: Sequence[str]
    ) -> None:
        self.roles, self.layout, self.weights, self.spread = roles, layout, weights, spread
        self.placed: Counter[str] = Counter()
        self._chosen: dict[Var, PartitionSpec] = {}  # of the body that is being looked at

    def find(self) -> Found:
        """For each body, by its path, the equations with a constraint: a layout, or None, a result."""
        return {path: found for path, body in _walk(self.roles.axes.root) if (found := self._in(body))}

    def _in(self, body: _Body) -> dict[int, Specs]:
        self._chosen = {}
        found: dict[int, Specs] = {}
        for index, eqn in enumerate(body.scope.jaxpr.eqns):
            name = eqn.primitive.name
            decides = name in READ or name in PRODUCTS or name in SUMS or name == "gather"
            if not decides and body.carried.isdisjoint(eqn.outvars):
                continue
            if (bodies(eqn) and name not in READ) or _is_manual(eqn):
                continue  # decided inside
            specs = tuple(self._spec(body, eqn, var) for var in eqn.outvars)
            if any(specs):
                found[index] = specs
        return found

    def _spec(self, body: _Body, eqn: JaxprEqn, var: Var) -> PartitionSpec | None:
        """The layout of one result of an equation; None where it is not decided there."""
        if not shape_of(var) or isinstance(var, DropVar) or var in body.own:
            return None
        scope, carried = body.scope, var in body.carried
        product = eqn.primitive.name in PRODUCTS or eqn.primitive.name in READ
        dims = self.roles.of(scope, var)
        flat = [role for dim in dims for role in dim]
        names = logical_names(self.roles, scope, var)

        def line() -> str:
            return source_line(eqn)

        if self.roles.is_activation(scope, var):
            lookup = eqn.primitive.name == "gather" and "embed" in flat
            lengths = sum(any(role in LENGTHS for role in dim) for dim in dims)
            if not (product or carried or lookup) or lengths > 1:
                return None
            if product and not carried and self._follows(body, eqn, "experts" in flat):
                return None
            spec, what = self.layout.spec(names, line, partial=True)[0], "activation"
        elif frozenset(flat) in self.weights and (carried or self._sums_batch(scope, eqn)):
            spec, what = self.layout.spec(names, line)[0], "weight" if carried else "gradient"
            spec, _ = self.layout.spread(spec, names, shape_of(var), self.spread, line)
        else:
            return None
        if not spec_axes(spec) or self._has(body, eqn, len(dims), spec):
            return None
        self._chosen[var] = spec
        self.placed[f"{'carried ' * carried}{what} [{spelled(self.roles, scope, var)}] {spec}"] += 1
        return spec

    def _follows(self, body: _Body, eqn: JaxprEqn, sent: bool) -> bool:
        """Whether a product of two activations is one of a backward pass, or sends tokens to experts.

        Told where the tokens must go, XLA's partitioner computes them wrongly when they leave the mesh axis
        that they are summed over (jax 0.12, test_tokens_sent_to_experts); the experts' own products are told.
        """
        both = all(self.roles.is_activation(body.scope, v) for v in eqn.invars[:2])
        return both and (sent or body.backward or _is_backward(eqn))

    def _sums_batch(self, scope: Scope, eqn: JaxprEqn) -> bool:
        """Whether an operation sums over the batch: where a gradient is born."""
        return any(self.roles.is_activation(scope, v) for v in eqn.invars)

    def _has(self, body: _Body, eqn: JaxprEqn, rank: int, spec: PartitionSpec) -> bool:
        """Whether a result is a value, cast or transposed, that is constrained to the same layout already."""
        entries = [*spec, *[None] * (rank - len(spec))]
        eqns, makers = body.scope.jaxpr.eqns, body.scope.makers
        while eqn.primitive.name in SAME:
            if eqn.primitive.name == "transpose":
                turned = dict(zip(eqn.params["permutation"], entries, strict=True))
                entries = [turned[i] for i in range(rank)]
            var = eqn.invars[0]
            if isinstance(var, Literal) or var not in makers:
                return False
            if var in self._chosen:
                chosen = self._chosen[var]
                return [*chosen, *[None] * (rank - len(chosen))] == entries
            eqn = eqns[makers[var]]
        return False


def spelled(roles: Roles, scope: Scope, var: Var) -> str:
    """The roles of a value for people: `layers x embed x kv_heads·head_dim`."""
    return " x ".join("·".join(dim) or "1" for dim in roles.of(scope, var)) or "scalar"


def _walk(
    scope: Scope, path: Path = (), carried: frozenset[Var] = frozenset(), backward: bool = False
) -> Iterator[tuple[Path, _Body]]:
    """Every body that was analysed, outer ones first."""
    yield path, _Body(scope, carried, backward, _constrained(scope))
    for (index, number), inner in scope.children.items():
        eqn = scope.jaxpr.eqns[index]
        if eqn.primitive.name in READ:
            continue
        outs = inner.jaxpr.outvars
        next_turn = carries(eqn, number)
        if not next_turn and len(outs) == len(eqn.outvars):  # a call: what it gives is carried outside
            next_turn = {i: i for i, v in enumerate(eqn.outvars) if v in carried}
        inside = frozenset(v for i in next_turn if isinstance(v := outs[i], Var))
        yield from _walk(inner, (*path, (index, number)), inside, backward or _is_backward(eqn))


def _is_manual(eqn: JaxprEqn) -> bool:
    """Inside somebody's own shard_map, layouts are somebody's own affair."""
    return bool(getattr(eqn.ctx.cur_abstract_mesh, "manual_axes", ()))


def _is_backward(eqn: JaxprEqn) -> bool:
    """Whether an equation was made by transposing another, or recomputes one for it."""
    return "transpose(" in name_stack(eqn)


def _constrained(scope: Scope) -> frozenset[Var]:
    """The variables whose layout the user says: what he constrains, and what that is a cast or transpose
    of.
    """
    found: set[Var] = set()
    for eqn in scope.jaxpr.eqns:
        if eqn.primitive.name != "sharding_constraint":
            continue
        found.update(eqn.outvars)
        var = eqn.invars[0]
        while isinstance(var, Var):
            found.add(var)
            index = scope.makers.get(var)
            if index is None or scope.jaxpr.eqns[index].primitive.name not in SAME:
                break
            var = scope.jaxpr.eqns[index].invars[0]
    return frozenset(found)
