"""Has a step take and give its state stacked: what is found to be rows becomes one array each.

    step(w0 w1 w2, x):                             step(w[3], x):
      l, dW = ... scan ... stack w0 w1 w2            l, dW = ... scan ... w
      g0 g1 g2 = unstack dW                    ->    n = sub w (mul dW 0.1)
      n0 = sub w0 (mul g0 0.1) ...                   return n
      return n0 n1 n2

`xform.state.search` proposes rows, `xform.state.settling` says which hold, and `xform.state.writing` writes
the program over them: an equation of a row is its first member's, batched by `jax.vmap`, with what all share
unbatched; loops and branches take and give rows whole; a chain of additions over a row is one sum of it; what
reads a single element takes it from the row. Everything else is carried over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from jax.lax import stack_p, unstack_p

from xform.higher_order import equations
from xform.state.groups import size
from xform.state.notes import Left, Notes, Reordered
from xform.state.placed import row_path
from xform.state.settling import Rows
from xform.state.writing import Writer, stacked
from xform.trace import Jaxpr, Value, Var, source_line, trace_flat

__all__ = ["Left", "Packed", "Reordered", "pack"]


@dataclasses.dataclass(frozen=True)
class Packed:
    """A program over stacked inputs.

    inputs: for each new input the old ones that it is: (i,), or a row in the order in which it is stacked;
        each old one is in exactly one, and they are ordered by their first. A row of n is [n, ...].
    outputs: the same for the outputs.
    left: stacks and slices that remain. reordered: sums that are taken row by row.
    """

    jaxpr: Jaxpr
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    left: tuple[Left, ...]
    reordered: tuple[Reordered, ...] = ()


def pack(
    jaxpr: Jaxpr,
    paths: Sequence[str],
    keep: Collection[int] = (),
    state: Mapping[int, int] | None = None,
) -> Packed | None:
    """The program with its state stacked. None where it has no `stack` and no `unstack`.

    paths: of the inputs, as `jax.tree_util.keystr` writes them; they only help to tell apart what is alike.
    keep: inputs that are not to be stacked. state: output -> the input that it is in the next step; such an
    output is stacked if and only if its input is.
    """
    if not any(eqn.primitive in (stack_p, unstack_p) for eqn in equations(jaxpr)):
        return None
    rows = Rows(jaxpr, paths, keep, state or {})
    stored = [g.rows[0].vars for g in rows.groups if g.alive and not g.members]
    inputs = _grouped(len(jaxpr.invars), [tuple(rows.scopes.inputs[v] for v in row) for row in stored])
    outputs = _outputs(jaxpr, rows, inputs, state or {})
    avals = [stacked(jaxpr.invars[group[0]].aval, len(group)) for group in inputs]
    notes = Notes()

    def flat(*values: Value) -> list[Value]:
        writer = Writer(rows, rows.scopes.top, notes)
        for group, value in zip(inputs, values, strict=True):
            writer.put([jaxpr.invars[i] for i in group], value)
        writer.run()
        return [writer.take([jaxpr.outvars[i] for i in group]) for group in outputs]

    names = jaxpr.debug_info.safe_arg_names(len(jaxpr.invars))
    new = trace_flat(
        flat, avals, jaxpr.debug_info.func_name, [row_path([names[i] for i in g]) for g in inputs]
    )
    for eqn, why in rows.remaining():
        what = f"{eqn.primitive.name} of {eqn.invars[0].aval.str_short()}"
        notes.add(what, sum(map(size, eqn.outvars)), why, source_line(eqn))
    return Packed(new, inputs, outputs, notes.left(), notes.sums())


def _grouped(count: int, rows: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    single = set(range(count)).difference(*rows)
    return tuple(sorted([*rows, *((i,) for i in single)], key=min))


def _outputs(
    jaxpr: Jaxpr, rows: Rows, inputs: Sequence[tuple[int, ...]], state: Mapping[int, int]
) -> tuple[tuple[int, ...], ...]:
    """Which outputs come back stacked: where the state does, and the rows there are."""
    back: dict[int, list[int]] = {}
    for out, number in state.items():
        back.setdefault(number, []).append(out)
    found = []
    for group in inputs:
        if len(group) > 1 and all(i in back for i in group):
            found += list(zip(*(sorted(back[i]) for i in group), strict=False))
    places: dict[Var, list[int]] = {}
    for i, atom in enumerate(jaxpr.outvars):
        if isinstance(atom, Var) and i not in state:
            places.setdefault(atom, []).append(i)
    for rows_ in [r for g in rows.groups if g.alive for r in g.rows if r.scope is rows.scopes.top]:
        found += list(zip(*(places.get(v, ()) for v in rows_.vars), strict=False))
    return _grouped(len(jaxpr.outvars), found)
