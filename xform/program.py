"""A function traced and rewritten for one combination of argument types, and how its arguments lie.

The program runs over arrays in the plan's layout (`xform.state`); what the user passes and gets has the
model's own tree, or is `Placed`. Leaves are numbered as `jax.tree.flatten((args, kwargs))` has them.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from xform.context import Leaf
from xform.quantization.weights import Storable
from xform.report import Report
from xform.state import Groups, Layout, Orders, Placed, only, order_at, row_path
from xform.state.kept import Kept, Phase
from xform.trace import Jaxpr, ShapedArray

LAST = " (last)"
"""The end of a stage's name, where a pass has its last word."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """The program before and after one pass; or before and after its state is stacked, "state", or put in
    the order of stages, "order".
    """

    name: str
    before: Jaxpr
    after: Jaxpr


@dataclasses.dataclass(frozen=True)
class Program:
    """One traced and rewritten form of a function, for one combination of argument types.

    jaxpr: the program after all passes, over the arrays of `inputs`. stages: what each pass did, the model
    stage's first. in_shardings and out_shardings: a layout an array, None where the plan says nothing.
    storable: finds which weights can be stored as codes, and how; None: the plan does not quantize, or the
    program is differentiated. in_tree: of (args, kwargs) in the model's own trees, static leaves too.
    in_groups: for each input the leaves of `in_tree` that it holds, several where they are stacked;
    out_groups: the same for outputs; in_orders and out_orders: in which order these are. seconds: trace and
    rewrite. kept: what passes keep from call to call, the last of `inputs` and `outputs`, which no group has;
    keeper: the argument that it is part of; returns: whether that comes back; phase: whether it has something
    in it.
    """

    jaxpr: Jaxpr
    stages: tuple[Stage, ...]
    report: Report
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    in_shardings: tuple[NamedSharding | None, ...]
    out_shardings: tuple[NamedSharding | None, ...]
    reasons: dict[str, str]
    storable: Callable[[], Storable] | None
    in_tree: Any
    out_tree: Any
    in_groups: Groups
    out_groups: Groups
    seconds: dict[str, float]
    kept: tuple[Kept, ...] = ()
    keeper: int | str = 0
    returns: bool = True
    phase: Phase = "start"
    in_orders: Orders = ()
    out_orders: Orders = ()

    @property
    def original(self) -> Jaxpr:
        """The program as it was traced, after model-stage passes and before the first step-stage one."""
        steps = [s for s in self.stages if not s.name.endswith("(model)")]
        return steps[0].before if steps else self.jaxpr

    @property
    def laid_out(self) -> Jaxpr:
        """The program over whole values: before the last stage wrote out its collectives, if one did."""
        last = [s for s in self.stages if s.name.endswith(LAST)]
        return last[0].before if last else self.jaxpr

    @functools.cached_property
    def arguments(self) -> tuple[Argument, ...]:
        """The arguments in order, positional ones first."""
        numbers = jax.tree.unflatten(self.in_tree, range(self.in_tree.num_leaves))
        return tuple(
            _argument_of(
                number,
                subtree,
                self.in_groups,
                self.in_orders,
                self.kept if number == self.keeper else (),
                self.phase,
            )
            for kind in numbers
            for number, subtree in (kind.items() if isinstance(kind, dict) else enumerate(kind))
        )

    @functools.cached_property
    def places(self) -> dict[str, int]:
        """Which input of the program a path means: its own, or that of a leaf of the model that it holds."""
        names = [jax.tree_util.keystr(path[1:]) for path, _ in paths(self.in_tree)]
        leaves = {names[i]: n for n, group in enumerate(self.in_groups) for i in group}
        return leaves | {leaf.path: n for n, leaf in enumerate(self.inputs)}

    def types(self) -> dict[int, tuple[tuple[int, ...], Any]]:
        """Shape and dtype of each leaf that is an array."""
        found: dict[int, tuple[tuple[int, ...], Any]] = {}
        for leaf, group in zip(self.inputs, self.in_groups, strict=False):
            shape = leaf.aval.shape if len(group) == 1 else leaf.aval.shape[1:]
            found.update((i, (shape, leaf.aval.dtype)) for i in group)
        return found

    def arranged(
        self, values: Sequence[Any], static: Mapping[int, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) in the plan's layout, with a value for each input and for each static leaf."""
        made = {argument.name: argument.filled(values, static) for argument in self.arguments}
        positional = tuple(made[a.name] for a in self.arguments if isinstance(a.name, int))
        return positional, {str(name): value for name, value in made.items() if isinstance(name, str)}


@dataclasses.dataclass(frozen=True)
class Argument:
    """One argument of a program.

    name: its number or keyword. leaves: its leaves' numbers. inputs: which inputs of the program it is made
    of. layout: how its leaves lie in these; static leaves are in none, what is kept is in the last.
    """

    name: int | str
    leaves: tuple[int, ...]
    inputs: tuple[int, ...]
    layout: Layout

    @property
    def is_stacked(self) -> bool:
        layout = self.layout
        return any(len(group) > 1 for group in layout.groups) or bool(layout.kept) or bool(layout.orders)

    @property
    def without_kept(self) -> Argument:
        groups = self.layout.groups
        layout = dataclasses.replace(self.layout, kept=(), begun=False)
        return dataclasses.replace(self, inputs=self.inputs[: len(groups)], layout=layout)

    def filled(self, values: Sequence[Any] | Mapping[int, Any], static: Mapping[int, Any]) -> Any:
        """The argument made of a value for each input of the program."""
        own = [values[i] for i in self.inputs]
        if self.is_stacked:
            return Placed(self.layout, own)
        leaves = {self.leaves[group[0]]: x for group, x in zip(self.layout.groups, own, strict=True)}
        return jax.tree.unflatten(
            self.layout.tree, [leaves[i] if i in leaves else static.get(i) for i in self.leaves]
        )


def _argument_of(
    name: int | str, subtree: Any, groups: Groups, orders: Orders, kept: Sequence[Kept], phase: Phase
) -> Argument:
    leaves, tree = jax.tree.flatten(subtree)
    first = leaves[0] if leaves else 0
    inputs = tuple(n for n, group in enumerate(groups) if leaves and first <= group[0] <= leaves[-1])
    own = tuple(tuple(i - first for i in groups[n]) for n in inputs)
    more = range(len(groups), len(groups) + len(kept))
    in_order = only(tuple(order_at(orders, n) for n in inputs))
    layout = Layout(tree, own, tuple(k.path for k in kept), bool(kept) and phase == "run", in_order)
    return Argument(name, tuple(leaves), (*inputs, *more), layout)


# ---------------------------------------------------------------- arguments and their names


def signature(fn: Callable[..., Any]) -> Any:
    """The signature of `fn`, or None where Python cannot tell."""
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):
        return None


def paths(tree: Any) -> list[tuple[Any, Any]]:
    """(path, number) of each leaf of a tree of (args, kwargs)."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(tree, range(tree.num_leaves)))
    return leaves


def input_leaves(
    tree: Any, numbers: Sequence[int], avals: Sequence[Any], donated: Collection[int | str]
) -> tuple[Leaf, ...]:
    """The arrays among the leaves of (args, kwargs): `numbers`, of types `avals`."""
    names = paths(tree)

    def leaf(path: Any, aval: Any) -> Leaf:
        argument = path[1].idx if path[0].idx == 0 else path[1].key
        # without the (args, kwargs) pair around it: `[0]['params']['w']`, `['scale']`
        return Leaf(jax.tree_util.keystr(path[1:]), aval, argument, argument in donated)

    return tuple(leaf(names[i][0], aval) for i, aval in zip(numbers, avals, strict=True))


def next_state(in_tree: Any, numbers: Sequence[int], out_tree: Any) -> dict[int, int]:
    """Output -> the input (of `numbers`) that it is at the next call: where a part of the result has the
    structure of an argument.
    """
    place = {leaf: i for i, leaf in enumerate(numbers)}
    args, kwargs = jax.tree.unflatten(in_tree, range(in_tree.num_leaves))
    trees: dict[Any, list[int]] = {}
    for argument in (*args, *kwargs.values()):
        leaves, tree = jax.tree.flatten(argument)
        if len(leaves) > 1:
            trees.setdefault(tree, leaves)
    found: dict[int, int] = {}

    def here(x: Any) -> bool:
        return jax.tree.structure(x) in trees

    result = jax.tree.unflatten(out_tree, range(out_tree.num_leaves))
    for part in jax.tree.leaves(result, is_leaf=here):
        if here(part):
            pairs = zip(jax.tree.leaves(part), trees[jax.tree.structure(part)], strict=True)
            found.update((out, place[leaf]) for out, leaf in pairs if leaf in place)
    return found


def stacked_leaves(leaves: Sequence[Leaf], groups: Groups) -> tuple[Leaf, ...]:
    """The leaves with those of a row as one."""

    def one(group: tuple[int, ...]) -> Leaf:
        first = leaves[group[0]]
        if len(group) == 1:
            return first
        aval = ShapedArray((len(group), *first.aval.shape), first.aval.dtype)
        return dataclasses.replace(first, path=row_path([leaves[i].path for i in group]), aval=aval)

    return tuple(map(one, groups))


def moved_names(names: Mapping[str, Any], leaves: Sequence[Leaf], groups: Groups) -> dict[str, Any]:
    """The user's names for axes, `path[dimension]` in the model's own tree, in terms of stacked leaves."""
    rows = {leaves[i].path: group for group in groups if len(group) > 1 for i in group}

    def moved(place: str) -> str:
        path, _, dimension = place.rpartition("[")
        group = rows.get(path)
        if group is None or not dimension.rstrip("]").isdigit():
            return place
        return f"{row_path([leaves[i].path for i in group])}[{int(dimension.rstrip(']')) + 1}]"

    def places(value: Any) -> Any:
        if isinstance(value, str):
            return moved(value)
        return list(dict.fromkeys(moved(p) if isinstance(p, str) else p for p in value))

    return {moved(key): places(value) for key, value in names.items()}


def donated_arguments(fn: Callable[..., Any], options: Mapping[str, Any]) -> set[int | str]:
    """The arguments that are donated, by number and by name, whichever of both the user gave."""
    known = signature(fn)
    names = list(known.parameters) if known is not None else []
    given = {*_as_tuple(options.get("donate_argnums")), *_as_tuple(options.get("donate_argnames"))}
    by_name = {names[i] for i in given if isinstance(i, int) and -len(names) <= i < len(names)}
    by_number = {names.index(name) for name in given | by_name if name in names}
    return given | by_name | by_number


def _as_tuple(x: Any) -> Iterator[Any] | tuple[Any, ...]:
    return () if x is None else (x,) if isinstance(x, (int, str)) else tuple(x)
