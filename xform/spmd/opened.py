"""Manual regions that a program brings itself, opened into the one that everything is in.

    shard_map over tensor {            in the region over fsdp and tensor:
      y = dot_general x w        ->      y = dot_general x w         on rows that lie over fsdp
      z = psum y over tensor }           z = psum y over tensor

Inside, the region's own axes are as its author has them: what he sees of a value is its part along them, and
his collectives stay. Along all other axes his values are laid out as anywhere else. An axis that is cut along
the torus goes by the names of its parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from xform.errors import Decline
from xform.higher_order import bodies, equations
from xform.sharding.layout import entry_axes
from xform.spmd.forms import Draft, Form, each_alone
from xform.spmd.layout import Laid, Piece, size_of, whole
from xform.spmd.loops import waiting
from xform.spmd.values import Val
from xform.spmd.walk import Walk
from xform.spmd.wishes import Parts
from xform.trace import JaxprEqn, shape_of, source_line

KERNELS = frozenset({"pallas_call", "mpmd_map"})
"""What may name a mesh axis inside, where it cannot be given another name."""


MOVED = ("all_gather_dimension", "scatter_dimension", "split_axis", "concat_axis")
"""Parameters that name the dimensions that a collective moves."""


def check(eqn: JaxprEqn, sizes: Mapping[str, int], parts: Parts) -> None:
    """Raises Decline where a shard_map cannot be opened in a region over `parts` of a mesh of these sizes."""
    here = f"the shard_map at {source_line(eqn)}"
    own = dict(eqn.params["mesh"].shape)
    for axis in eqn.params["newly_manual_axes"]:
        if sizes.get(axis) != own[axis]:
            has = f"{sizes[axis]} devices" if axis in sizes else f"none of {', '.join(sizes)}"
            raise Decline(f"{here} has an axis {axis!r} of {own[axis]}, which in the plan's mesh is {has}")
        if axis not in parts and own[axis] > 1:
            raise Decline(f"{here} is over {axis!r}, which the plan leaves to the compiler")
    cut = [a for a in eqn.params["newly_manual_axes"] if len(parts.get(a, (a,))) > 1]
    for inner in equations(bodies(eqn)[0]):
        if inner.params.get("axis_index_groups") is not None:
            raise Decline(f"{here} has a collective in groups, at {source_line(inner)}")
        if cut and inner.primitive.name in KERNELS:
            raise Decline(f"{here} has a kernel, and {', '.join(cut)} is cut along the torus")


def shard_map(walk: Walk, eqn: JaxprEqn, vals: list[Val]) -> list[Val]:
    p = eqn.params
    (body,) = bodies(eqn)
    own = {part for axis in p["newly_manual_axes"] for part in walk.parts.get(axis, ())}
    inputs = []
    for val, var, spec in zip(vals, body.invars, p["in_specs"], strict=True):
        given = [_named(walk, entry) for entry in (*spec, *[None] * (len(val.shape) - len(spec)))]
        outside, inside = [], []
        for size, dim, axes in zip(val.shape, val.laid.dims, given, strict=True):
            part = size // walk.grid.ways(axes)
            others = tuple(a for piece in dim for a in piece.axes if a not in own)
            if part % walk.grid.ways(others):
                others = ()
            outside.append((Piece(size, axes + others),))
            inside.append((Piece(part, others),))
        partial = val.laid.partial if val.terms else ()
        x = walk.get(val, Laid(tuple(outside), partial))
        inputs.append(waiting(walk, x, var.aval, Laid(tuple(inside), partial)))
    outs = walk.inlined(eqn, body, inputs)
    made = []
    for val, var, spec in zip(outs, eqn.outvars, p["out_specs"], strict=True):
        laid = walk.settled(val)
        x = walk.get(val, laid)
        given = [_named(walk, entry) for entry in (*spec, *[None] * (len(val.shape) - len(spec)))]
        dims = []
        for dim, axes in zip(laid.dims, given, strict=True):
            if axes and len(dim) > 1:  # pieces inside a part of the dimension
                dims.append((Piece(walk.grid.ways(axes), axes), *dim))
                continue
            others = tuple(a for piece in dim for a in piece.axes)
            dims.append((Piece(size_of(dim) * walk.grid.ways(axes), axes + others),) if axes else dim)
        made.append(waiting(walk, x, var.aval, Laid(tuple(dims), laid.partial)))
    return made


def _named(walk: Walk, entry: Any) -> tuple[str, ...]:
    """The parts of the mesh axes in an entry of a PartitionSpec, or of a collective's axes."""
    return tuple(part for axis in entry_axes(entry) for part in walk.parts.get(axis, ()))


# ---------------------------------------------------------------- the author's collectives


def _renamed(walk: Walk, eqn: JaxprEqn) -> dict[str, Any]:
    key = "axes" if "axes" in eqn.params else "axis_name"
    return {key: _named(walk, eqn.params[key])}


def along_nothing(walk: Walk, eqn: JaxprEqn, vals: list[Val]) -> list[Val]:
    """pvary, pcast: what varies over which axes is not told apart here."""
    return vals


def each(walk: Walk, eqn: JaxprEqn, vals: list[Val]) -> list[Val]:
    """psum, pmax, pmin, ppermute: every element by itself."""
    new = _renamed(walk, eqn)
    if not next(iter(new.values())):
        return vals
    if eqn.primitive.name == "psum_invariant":  # asks of which axes an operand varies over
        eqn = eqn.replace(primitive=jax.lax.psum_p, params={"axes": (), "axis_index_groups": None})
    return walk.lower(eqn, _with(each_alone(eqn), new), vals)


def along(walk: Walk, eqn: JaxprEqn, vals: list[Val]) -> list[Val]:
    """all_gather, reduce_scatter, all_to_all: the dimensions that are not gathered or split are mapped."""
    if eqn.primitive.name == "all_gather_invariant":
        eqn = eqn.replace(primitive=jax.lax.all_gather_p, params={**eqn.params, "axis_index_groups": None})
    p, d = eqn.params, Draft(eqn)
    before, after = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    taken = {p[k] for k in MOVED if k in p}
    if len(before) == len(after):
        for dim in range(len(before)):
            if dim not in taken:
                d.tie({0: dim}, {0: dim})
    return walk.lower(eqn, _with(d.form(), _renamed(walk, eqn)), vals)


def _with(form: Form, new: Mapping[str, Any]) -> Form:
    return Form(
        form.operands, form.results, form.sizes, form.kinds, lambda params, ins, outs: {**params, **new}
    )


def axis_index(walk: Walk, eqn: JaxprEqn, vals: list[Val]) -> list[Val]:
    names = _named(walk, eqn.params["axis_name"])
    x: Any = jax.lax.axis_index(names) if names else jax.numpy.int32(0)
    return [walk.held(x, eqn.outvars[0].aval, whole(()))]


HANDLERS = {
    "shard_map": shard_map,
    "axis_index": axis_index,
    **dict.fromkeys(("pvary", "pcast"), along_nothing),
    **dict.fromkeys(("psum", "psum_invariant", "pmax", "pmin", "ppermute"), each),
    **dict.fromkeys(("all_gather", "all_gather_invariant", "reduce_scatter", "all_to_all"), along),
}
