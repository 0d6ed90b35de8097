"""The blocks of an unrolled stack as one program: what a turn of a loop over them takes, does and gives.

    x1 = f(x0, w0, m)                     turn(x, w, m) = f(x, w, m)
    x2 = f(x1, w1, m)              ->     carried x from x0; own (w0, w1); shared m

The program is that of the first block, with its source lines and names. Which operand is carried, own or
shared is read off the place it stands at, in all blocks at once: in the first alone, one value may be several
of these.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Sequence

from xform.errors import Decline
from xform.layers.stacks import Stack
from xform.printing.spell import const_key
from xform.trace import Atom, Jaxpr, JaxprEqn, Literal, Var, body_effects, source_line


@dataclasses.dataclass(frozen=True)
class Turn:
    """One block as a program of (carried, own, shared) that gives (carried, extra).

    first: what the first block takes. own, extra: a row a value, with an entry a block. results: what the
    last block leaves of what is carried; None where nothing reads it and it is not made.
    """

    body: Jaxpr
    first: tuple[Atom, ...]
    own: tuple[tuple[Atom, ...], ...]
    shared: tuple[Var, ...]
    results: tuple[Var | None, ...]
    extra: tuple[tuple[Var, ...], ...]


def turn_of(jaxpr: Jaxpr, stack: Stack) -> Turn:
    """The turn of an unrolled stack in the body `jaxpr`. Raises Decline where the last block lacks an
    effect.
    """
    blocks = stack.blocks
    carried = list(zip(*(block.carried for block in blocks), strict=True))
    takes = {_key(row): Var(row[0].aval) for row in (*carried, *zip(*(b.own for b in blocks), strict=True))}
    rows = {_key(row): row for row in zip(*(b.own for b in blocks), strict=True)}
    starts = {_key(row[:-1]): takes[_key(row)] for row in carried}
    read: dict[Hashable, None] = {}

    def operand(atoms: Sequence[Atom]) -> Atom:
        key = _key(atoms)
        if key in takes:
            read[key] = None
            return takes[key]
        return starts.get(key, atoms[0]) if len(atoms) < len(blocks) else atoms[0]

    eqns: dict[int, JaxprEqn] = {}
    for numbers in itertools.zip_longest(*(block.equations for block in blocks)):
        row = [jaxpr.eqns[i] for i in numbers if i is not None]
        if row[0].effects and len(row) < len(blocks):
            raise Decline(f"the last layer does not do what `{row[0].primitive.name}` does in the others")
        operands = zip(*(eqn.invars for eqn in row), strict=True)
        eqns[numbers[0]] = row[0].replace(invars=list(map(operand, operands)))
    own = tuple(row for key, row in rows.items() if key in read)
    inputs = [takes[_key(row)] for row in (*carried, *own)]
    ordered = [eqns[i] for i in sorted(eqns)]
    made = {v for eqn in ordered for v in eqn.outvars} | set(inputs)
    free = (v for eqn in ordered for v in eqn.invars if isinstance(v, Var) and v not in made)
    shared = tuple(dict.fromkeys(free))
    extra = tuple(zip(*(block.extra for block in blocks), strict=True))
    body = jaxpr.replace(
        constvars=[],
        consts=[],
        invars=[*inputs, *shared],
        outvars=[*(v for v in blocks[0].results if v is not None), *(row[0] for row in extra)],
        eqns=ordered,
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    body = body.replace(effects=body_effects(body))
    return Turn(body, tuple(blocks[0].carried), own, shared, tuple(blocks[-1].results), extra)


def unheld(jaxpr: Jaxpr, stack: Stack, turn: Turn) -> str:
    """The user's line of an equation that reads of a block what the loop would not give; '' if none does."""
    inside = {i for block in stack.blocks for i in block.equations}
    made = {v for i in inside for v in jaxpr.eqns[i].outvars}
    given = {v for v in turn.results if v is not None} | {v for row in turn.extra for v in row}
    missing = made - given
    for i, eqn in enumerate(jaxpr.eqns):
        if i not in inside and any(isinstance(v, Var) and v in missing for v in eqn.invars):
            return source_line(eqn) or eqn.primitive.name
    return "a result" if any(isinstance(v, Var) and v in missing for v in jaxpr.outvars) else ""


def _key(atoms: Sequence[Atom]) -> Hashable:
    return tuple((const_key(v.val), str(v.aval)) if isinstance(v, Literal) else id(v) for v in atoms)
