"""What each axis of a program is, told from its dataflow alone: batch, length, embed, mlp, vocab and so on.

`axes` says which dimensions are the same axis; here each gets a role. The rules are a table
(`rules.RULES`), the facts they look at are in `evidence`. An axis that no rule names gets a name made
for it ("axis0"), never a wrong role; a user can name it, or split it, in the plan:

    names = {"mlp": "['w1'][1]", "['wqkv'][1]": ["3", "kv_heads=4", "head_dim"]}
    roles = find_roles(find_axes(jaxpr), names, paths)
    roles.of(roles.axes.root, jaxpr.invars[0])       # (("embed",), ("kv_heads", "q_group", "head_dim"))

A part of an axis that has no role of its own is called after the whole ("length_part": all tokens but the
last), a whole after its part ("length_whole"), and an axis that is a sum after what is summed: the output of
one projection to queries, keys and values is "kv_heads*q_group*head_dim+kv_heads*head_dim+kv_heads*head_dim".
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from xform.axes import Axes, Dim, Factor, Scope, find_axes
from xform.axes.factors import Shape
from xform.errors import PlanError
from xform.roles.evidence import Evidence
from xform.roles.known import Known
from xform.roles.rules import RULES
from xform.trace import Jaxpr, JaxprEqn, Literal, Var, name_stack, shape_of, source_line

ROLES: dict[str, str] = {
    "batch": "examples: in the data, and in every activation",
    "microbatches": "the steps of a scan over the data, each taking part of the batch",
    "length": "the data's other axis; what queries, or queries and keys, run over",
    "kv_length": "what keys run over where it is another axis: an encoder's length, a cache",
    "embed": "the residual stream",
    "kv_heads": "heads of keys and values; without groups, all heads",
    "q_group": "heads of queries for each head of keys and values",
    "head_dim": "contracted between queries and keys, or summed of the values",
    "mlp": "hidden between two weights: from the residual stream and back to it",
    "vocab": "rows of the table that tokens index; classes of logits",
    "layers": "the first axis of weights that a loop goes through",
    "experts": "what a router chooses among; groups of a ragged dot",
    "positions": "rows of a table of learned positions",
    "buckets": "rows of a table of relative distances",
    "rows": "rows of another table that is looked up, e.g. of token types",
    "patch": "the window of a convolution that cuts an image into patches",
    "spatial": "what a convolution slides over",
    "kernel": "the window of any other convolution",
    "channels": "features that a convolution takes or makes",
}
"""The vocabulary, in order, and what each role means."""

Place = re.compile(r"(?P<path>.*)\[(?P<dimension>-?\d+)\](?:\.(?P<factor>\d+))?$")
"""Where a plan points: an input's path, one of its dimensions, and, where that is a product, which of its
factors.
"""


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table: a role, the sizes it has, in how many inputs it occurs, some of these, and a
    user's line.
    """

    role: str
    size: int
    axes: int
    count: int
    inputs: tuple[str, ...]
    where: str


class Roles:
    """The roles of a program's axes."""

    def __init__(self, axes: Axes, named: Mapping[Factor, str], paths: Sequence[str]) -> None:
        self.axes = axes
        self.paths = tuple(paths)
        self._named = dict(named)
        self._made: dict[Factor, str] | None = None
        self._of: dict[Shape, tuple[tuple[str, ...], ...]] = {}
        self._active: dict[Shape, bool] = {}
        self.batch = frozenset(f for f, role in self._named.items() if role == "batch")
        self._data = self.batch or frozenset(
            f for f, r in self._named.items() if r in ("length", "kv_length")
        )

    def name(self, factor: Factor) -> str:
        """The role of an axis, or the name made for it."""
        role = self._named.get(factor)
        if role is None:
            if self._made is None:
                self._made = _made_names(self.axes, self._named)
            role = self._made.get(factor, "unknown")
        return role

    def is_told(self, factor: Factor) -> bool:
        """Whether some evidence, or the user, gave the axis its role."""
        return factor in self._named

    def of(self, scope: Scope, var: Var | Literal) -> tuple[tuple[str, ...], ...]:
        """For each dimension of a variable its roles, major to minor; () for a dimension of size 1."""
        shape = scope.raw_of(var)
        found = self._of.get(shape)
        if found is None:
            dims = self.axes.dims(shape)
            found = self._of[shape] = tuple(tuple(self.name(f) for f in dim) for dim in dims)
        return found

    def is_activation(self, scope: Scope, var: Var | Literal) -> bool:
        """Whether a variable has an axis of the batch, or of the length in a program for a single example:
        data, activations and their gradients do. A parameter added to all positions has a length only.
        """
        if isinstance(var, Literal):
            return False
        shape = scope.raw[var]
        found = self._active.get(shape)
        if found is None:
            dims = self.axes.dims(shape)
            found = self._active[shape] = any(f in self._data for dim in dims for f in dim)
        return found

    def is_weight(self, scope: Scope, var: Var | Literal) -> bool:
        """Whether a variable is an array but no activation: a parameter, its gradient, its moments."""
        return bool(scope[var]) and not self.is_activation(scope, var)

    def factors(self, role: str) -> list[Factor]:
        """The axes of a role, in order. An unrolled model has one `mlp` a layer."""
        return sorted((f for f, r in self._named.items() if r == role), key=lambda f: f.id)

    def inputs(self) -> dict[str, list[list[str]]]:
        """The roles of every input, by path."""
        root = self.axes.root
        pairs = zip(self.paths, self.axes.jaxpr.invars, strict=False)
        return {path: [list(dim) for dim in self.of(root, v)] for path, v in pairs}

    def table(self, examples: int = 3) -> list[Row]:
        """The axes for printing, roles in the vocabulary's order: where inputs have them, or who makes
        them.
        """
        places: dict[Factor, list[str]] = {}
        for path, v in zip(self.paths, self.axes.jaxpr.invars, strict=False):
            for i, dim in enumerate(self.axes.root[v]):
                for f in dim:
                    places.setdefault(f, []).append(f"{path}[{i}]")
        shown = list(dict.fromkeys([*places, *sorted(self._named, key=lambda f: f.id)]))
        groups: dict[tuple[str, int], list[Factor]] = {}
        for f in shown:
            groups.setdefault((self.name(f), f.size), []).append(f)
        first = _first_equations(self.axes, {f for f in shown if f not in places})
        rows = []
        for (role, size), fs in groups.items():
            inputs = [place for f in fs for place in places.get(f, ())]
            lines = [_where(first[f]) for f in fs if f in first]
            rows.append(
                Row(role, size, len(fs), len(inputs), tuple(inputs[:examples]), lines[0] if lines else "")
            )
        order = {role: i for i, role in enumerate(ROLES)}
        return sorted(
            rows, key=lambda row: (order.get(row.role, len(order)), row.role.endswith(("_part", "_whole")))
        )


def find_roles(axes: Axes, names: Mapping[str, Any] | None = None, inputs: Sequence[str] = ()) -> Roles:
    """The roles of a program's axes.

    `inputs` are the paths of the program's inputs, as `jax.tree_util.keystr` writes them. `names` is what the
    user says: role -> place or places, where a place is a path and a dimension, "['params']['w1'][1]", and
    with ".0" behind it one factor of a product; or a place -> the factors to split it into, major to minor,
    each a size, a name, or "name=size", with at most one size left out. Raises PlanError for a place that is
    not there."""
    names = dict(names or {})
    said: list[tuple[str, str]] = []
    for key, value in names.items():
        if Place.match(key):
            said += _split(axes, key, value, inputs)
    named: dict[Factor, str] = {}
    for key, value in names.items():
        if not Place.match(key):
            said += [(place, key) for place in ([value] if isinstance(value, str) else value)]
    for place, role in said:
        for f in _at(axes, place, inputs):
            if named.setdefault(f, role) != role:
                raise PlanError(
                    f"axes: {place} is named {role}, but the same axis is named {named[f]} elsewhere"
                )
    known = Known(Evidence(axes))
    known.role.update(named)
    for role, rule in RULES:
        for f in tuple(rule(known)):
            known.role.setdefault(f, role)
    return Roles(axes, known.role, inputs)


def describe(jaxpr: Jaxpr, in_paths: Sequence[str], names: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The axes of a program as plain data: {"axes": [{"role", "size"}], "inputs": {path: [[role, ...] per
    dimension]}}.
    """
    roles = find_roles(find_axes(jaxpr), names, in_paths)
    rows = dict.fromkeys((row.role, row.size) for row in roles.table())
    return {"axes": [{"role": role, "size": size} for role, size in rows], "inputs": roles.inputs()}


# Names made for what no rule names


def _made_names(axes: Axes, named: Mapping[Factor, str]) -> dict[Factor, str]:
    """Parts, wholes and sums after what they are of; the rest axis0, axis1 ..., those of the inputs first."""
    inputs = [f for v in axes.jaxpr.invars for dim in axes.root[v] for f in dim]
    every = list(dict.fromkeys([*inputs, *axes.all()]))
    made = dict(named)
    for f in every:
        _name_parts(f, made)
    changed = True
    while changed:
        changed = False
        for f in every:
            name = "" if f in made else _sum_name(f, made) or _part_or_whole(axes, f, made)
            if name:
                made[f] = name
                _name_parts(f, made)
                changed = True
    rest = (f for f in every if f not in made)
    return {**made, **{f: f"axis{i}" for i, f in enumerate(rest)}}


def _sum_name(f: Factor, made: Mapping[Factor, str]) -> str:
    """What a sum is the sum of, where something is known of each part, or a part is of size 1."""
    if any(f.sum) and all(g in made for dim in f.sum for g in dim):
        return "+".join("*".join(made[g] for g in dim) or "1" for dim in f.sum)
    return ""


def _part_or_whole(axes: Axes, f: Factor, made: Mapping[Factor, str]) -> str:
    whole = axes.whole(f)
    if whole is not None and whole in made:
        return _part_of(made[whole])
    for _, dim in f.parts:
        if len(dim) == 1 and dim[0] in made and not f.sum:
            return made[dim[0]] if made[dim[0]].endswith("_whole") else f"{made[dim[0]]}_whole"
    return ""


def _name_parts(f: Factor, made: dict[Factor, str]) -> None:
    if f in made:
        for _, dim in f.parts:
            for g in dim:
                if g not in made:
                    made[g] = _part_of(made[f])
                    _name_parts(g, made)


def _part_of(name: str) -> str:
    return name if name.endswith("_part") else f"{name}_part"


# What the user says


def _at(axes: Axes, place: str, paths: Sequence[str]) -> Dim:
    """The factors of a place in the inputs."""
    v, dimension, factor = _find(axes, place, paths)
    dim = axes.root[v][dimension]
    if factor is None:
        return dim
    if factor >= len(dim):
        raise PlanError(f"axes: {place} has {len(dim)} factors: {' x '.join(str(f.size) for f in dim)}")
    return (dim[factor],)


def _find(axes: Axes, place: Any, paths: Sequence[str]) -> tuple[Var, int, int | None]:
    match = Place.match(place) if isinstance(place, str) else None
    if match is None:
        raise PlanError(
            f"axes: {place!r} is no place; write an input's path and a dimension: \"['params']['w1'][1]\""
        )
    path, dimension = match["path"], int(match["dimension"])
    hits = [i for i, p in enumerate(paths) if p == path] or [
        i for i, p in enumerate(paths) if p.endswith(path)
    ]
    if not path or len(hits) != 1:
        near = [paths[i] for i in hits[:5]] or difflib.get_close_matches(path, paths, n=3, cutoff=0.3)
        what = "several inputs" if len(hits) > 1 else "no input"
        raise PlanError(f"axes: {what} called {path or place}; there is {', '.join(near) or 'none to name'}")
    v = axes.jaxpr.invars[hits[0]]
    rank = len(axes.root[v])
    if not -rank <= dimension < rank:
        raise PlanError(f"axes: {place}: {paths[hits[0]]} has {rank} dimensions")
    return v, dimension % rank, None if match["factor"] is None else int(match["factor"])


def _split(axes: Axes, place: str, value: Any, paths: Sequence[str]) -> list[tuple[str, str]]:
    """Split a dimension as the user says; the names that come with it."""
    v, dimension, factor = _find(axes, place, paths)
    entries = [value] if isinstance(value, (str, int)) else list(value)
    total = shape_of(v)[dimension]
    names, sizes = zip(*(_entry(place, entry) for entry in entries), strict=True) if entries else ((), ())
    known = prod(n for n in sizes if n)
    if factor is not None or sizes.count(None) > 1 or known == 0 or total % known:
        raise PlanError(f"axes: {place} has size {total}, which does not split into {entries}")
    full = [n or total // known for n in sizes]
    if prod(full) != total or 1 in full:
        raise PlanError(f"axes: {place} has size {total}, which does not split into {entries}")
    axes.split(axes.root.raw_of(v), dimension, full)
    dim = axes.root[v][dimension]
    if [f.size for f in dim] != full:
        found = " x ".join(str(f.size) for f in dim)
        raise PlanError(f"axes: {place} is {found} in this program, which does not split into {entries}")
    return [(f"{place}.{i}", name) for i, name in enumerate(names) if name]


def _entry(place: str, entry: Any) -> tuple[str, int | None]:
    name, _, size = str(entry).partition("=")
    if not size and name.isdecimal():
        name, size = "", name
    if (size and not size.isdecimal()) or (name and not name.isidentifier()):
        raise PlanError(f"axes: {place}: {entry!r} is no factor; write a size, a name or name=size")
    return name, int(size) if size else None


# Where an axis is first met


def _first_equations(axes: Axes, wanted: set[Factor]) -> dict[Factor, JaxprEqn]:
    found: dict[Factor, JaxprEqn] = {}
    for scope, eqn in _equations(axes):
        if len(found) == len(wanted):
            break
        for v in eqn.outvars:
            for dim in scope[v]:
                for f in dim:
                    if f in wanted:
                        found.setdefault(f, eqn)
    return found


def _equations(axes: Axes) -> Iterator[tuple[Scope, JaxprEqn]]:
    for scope in axes.scopes:
        for eqn in scope.jaxpr.eqns:
            yield scope, eqn


def _where(eqn: JaxprEqn) -> str:
    return " ".join(text for text in (name_stack(eqn), source_line(eqn)) if text)
