"""Rows, the groups of equations that make them, and what may be batched: the words of the search."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from jax.interpreters import batching
from jax.lax import stack_p, unstack_p

from xform.higher_order import RULES, bodies, equations
from xform.state.scopes import Op, Port, Scope
from xform.trace import Atom, JaxprEqn, ShapedArray, Var

SMALL = 1024
"""Bytes of an element up to which it is read from its row, or put into one, where it is wanted."""

WHOLE = (
    "while", "shard_map", "pallas_call", "mpmd_map", "ffi_call", "pure_callback", "custom_partitioning",
    "rng_bit_generator", "rng_uniform", "reshard", "layout_constraint",
)  # fmt: skip
"""Primitives whose batched form is another program, or gives other numbers, or is none."""


@dataclasses.dataclass(eq=False)
class Row:
    """Values that are one array. They are defined in `scope`, by `group`."""

    scope: Scope
    vars: tuple[Var, ...]
    group: Group


@dataclasses.dataclass(eq=False)
class Group:
    """What makes rows: equations or ports in a row, an unstack, inputs.

    columns: what the members take, operand by operand. why: the reason, once it is refuted.
    """

    members: tuple[Op, ...] | tuple[Port, ...]
    columns: list[tuple[Scope, tuple[Atom, ...]]]
    rows: list[Row] = dataclasses.field(default_factory=list)
    alive: bool = True
    why: str = ""


def size(atom: Atom) -> int:
    """Bytes of a value."""
    dtype = getattr(atom.aval, "dtype", None)
    return math.prod(getattr(atom.aval, "shape", ())) * (dtype.itemsize if dtype is not None else 0)


def stackable(atom: Atom) -> bool:
    """Whether a value is so small that it may be stacked with others on the spot."""
    return isinstance(atom.aval, ShapedArray) and size(atom) <= SMALL


def one_type(atoms: Sequence[Atom]) -> bool:
    """Whether values have one type, and one that says nothing of a mesh's dimensions."""
    aval: Any = atoms[0].aval
    if not isinstance(aval, ShapedArray) or any(getattr(aval.sharding, "spec", ())):
        return False
    return all(atom.aval == aval for atom in atoms)


def inside(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """All equations in an equation's bodies."""
    for body in bodies(eqn):
        yield from equations(body)


def stacks(eqn: JaxprEqn) -> bool:
    """Whether an equation stacks several arrays along a new first dimension."""
    return eqn.primitive is stack_p and eqn.params["axis"] == 0 and len(eqn.invars) > 1


def unstacks(eqn: JaxprEqn) -> bool:
    """Whether an equation takes an array apart along its first dimension."""
    return eqn.primitive is unstack_p and eqn.params["axis"] == 0 and len(eqn.outvars) > 1


def joins(eqn: JaxprEqn) -> bool:
    """Whether an equation puts several arrays of one type in a line: a stack but for its shape."""
    same = eqn.primitive.name == "concatenate" and eqn.params["dimension"] == 0 and len(eqn.invars) > 1
    return same and one_type(eqn.invars)


def stacking(eqn: JaxprEqn) -> bool:
    return stacks(eqn) or unstacks(eqn)


def batches(eqn: JaxprEqn) -> bool:
    """Whether an equation does on many at once what it does on one, to the same numbers."""
    inner = list(inside(eqn))
    if stacking(eqn) or any(e.primitive.name == "cond" for e in inner):
        return False
    return all(_has_batched_form(e) and not _other_bits(e) and not _placed(e) for e in (eqn, *inner))


def _has_batched_form(eqn: JaxprEqn) -> bool:
    primitive = eqn.primitive
    known = primitive in batching.fancy_primitive_batchers or primitive.name in RULES
    return known and primitive.name not in WHOLE


def _placed(eqn: JaxprEqn) -> bool:
    """Whether a value is put on devices by its dimensions."""
    devices = eqn.params.get("devices", ())
    return eqn.primitive.name == "device_put" and any(getattr(each, "spec", None) for each in devices)


def _other_bits(eqn: JaxprEqn) -> bool:
    """Whether it works with keys of a generator whose batched form gives other numbers."""
    types = [v.aval.str_short() for v in (*eqn.invars, *eqn.outvars)]
    return any(text.startswith("key<") and not text.startswith("key<fry>") for text in types)
