"""Where a program repeats: its stacks of layers, scanned or unrolled. Nothing is rewritten.

A stack carries the residual stream from block to block, and each block has weights of its own that meet it.
Loops over heads, experts, time, chunks or microbatches repeat as well, but lack the one or the other. Blocks
are found by their dataflow (`repeats`), not by names or the order of the text; of all places where a layer
can be said to begin, the one with the most blocks is taken, then that with the least to carry. An unrolled
stack says, position by position, what differs between its blocks and what they share:

    for w in weights: x = x + f(norm(x, scale), w, mask)    # carried x; own w; shared scale, mask

What nearly repeats is a `Refusal`, with the first difference.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from xform.axes import Scope
from xform.higher_order import bodies, scan_parts
from xform.layers.blocks import cycle, grown, merged, sublayers
from xform.layers.repeats import Keys, View, alike
from xform.layers.unrolled import Candidate, Finder, Kinds, Miss, meets
from xform.printing.phrases import SILENT
from xform.printing.spell import spell
from xform.rewrite import Path
from xform.roles import Roles
from xform.trace import Atom, Jaxpr, JaxprEqn, Var, source_line

TIME = frozenset({"batch", "microbatches", "length", "kv_length"})
"""What a scan over the data goes through."""


@dataclasses.dataclass(frozen=True)
class Block:
    """One layer, or one cycle of layers: equations of one body, by number.

    The k-th of everything is the same thing in every block, with the same type; the order of the equations
    respects the dataflow. Only of the last block may an equation be missing at the end, and a result be None:
    where nothing reads what the next block would have taken.
    """

    equations: tuple[int, ...]
    carried: tuple[Atom, ...]  # what it takes from the block before; in the first maybe a literal
    results: tuple[Var | None, ...]  # what the next block takes
    own: tuple[Atom, ...]  # what it alone reads: weights, keys, constants; a literal by its identity
    extra: tuple[Var, ...]  # what else is read of it: caches, losses, collected states


@dataclasses.dataclass(frozen=True)
class Stack:
    """The layers of one encoder or decoder.

    index: the number of the scan's equation; unrolled, that of the first equation. period: layers a block, or
    a turn of the scan. shared: what all blocks read alike. within: the stacks in the body of a scan, with
    paths from there.
    """

    path: Path
    kind: Literal["scanned", "unrolled"]
    index: int
    blocks: tuple[Block, ...]
    period: int
    layers: int
    shared: tuple[Atom, ...]
    within: tuple[Stack, ...] = ()


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A stretch that nearly repeats: where, and the first difference between its two blocks."""

    where: str
    why: str


def find_stacks(jaxpr: Jaxpr, roles: Roles) -> tuple[list[Stack], list[Refusal]]:
    """The stacks of a program before autodiff, at any depth, in program order; and what is nearly one.

    A stack's own bodies are not searched: the outermost repetition counts.
    """
    search = _Search(roles)
    search.body(jaxpr, roles.axes.root, ())
    return search.stacks, search.refusals


class _Search:
    def __init__(self, roles: Roles) -> None:
        self.roles, self.keys = roles, Keys()
        self.stacks: list[Stack] = []
        self.refusals: list[Refusal] = []

    def body(self, jaxpr: Jaxpr, scope: Scope, path: Path) -> None:
        """The stacks of a body, and of the bodies in it that are no part of one."""
        view = View(jaxpr, self.keys)
        found = [s for i in range(len(jaxpr.eqns)) if (s := self.scanned(view, i, scope, path)) is not None]
        view.taken.update(s.index for s in found)
        finder = Finder(view, Kinds(self.roles, scope))
        for candidate in finder.run():
            stack = self.unrolled(view, candidate, path)
            found.append(stack)
            view.taken.update(i for block in stack.blocks for i in block.equations)
        self.refusals += (self.refusal(view, miss) for miss in finder.misses.values())
        places = {s.index: s for s in found}
        for i, eqn in enumerate(jaxpr.eqns):
            if i in places:
                self.stacks.append(places[i])
            if i not in view.taken and view.live[i]:
                for number, body in enumerate(bodies(eqn)):
                    child = scope.children.get((i, number))
                    if child is not None:
                        self.body(body, child, (*path, (i, number)))

    def scanned(self, view: View, index: int, scope: Scope, path: Path) -> Stack | None:
        """The stack that a scan is: it carries activations, which meet weights that it goes through."""
        eqn, child = view.eqns[index], scope.children.get((index, 0))
        if eqn.primitive.name != "scan" or child is None or not view.live[index]:
            return None
        consts, carry, _ = scan_parts(eqn)
        inner, kinds = child.jaxpr.invars, Kinds(self.roles, child)

        def lead(v: Atom) -> tuple[str, ...]:
            return next(iter(self.roles.of(scope, v)), ())

        sliced = [i for i in range(consts) if "layers" in lead(eqn.invars[i])]
        through = [i for i in range(consts + carry, len(inner)) if TIME.isdisjoint(lead(eqn.invars[i]))]
        matrices = {inner[i] for i in (*sliced, *through) if kinds.is_matrix(inner[i])}
        stream = {v for v in inner[consts : consts + carry] if kinds.is_stream(v)}
        if not meets(child.jaxpr.eqns, stream, matrices):
            return None
        within = _Search(self.roles)
        within.body(child.jaxpr, child, ())
        period = sum(stack.layers for stack in within.stacks) or 1
        shared = tuple(eqn.invars[i] for i in range(consts) if i not in sliced)
        layers = eqn.params["length"] * period
        return Stack(path, "scanned", index, (), period, layers, shared, tuple(within.stacks))

    def unrolled(self, view: View, candidate: Candidate, path: Path) -> Stack:
        """The stack that blocks side by side are, with all that they do alike, whole cycles as one block."""
        rows = grown(view, candidate.rows)
        turns = cycle(view, rows)
        period = turns * sublayers(view, rows)
        rows = merged(view, rows, turns)
        extra = rows.extra(view)
        blocks = tuple(
            Block(
                tuple(i for row in rows.equations if (i := row[n]) is not None),
                tuple(row[n] for row in rows.carried),
                tuple(row[n] for row in rows.results),
                tuple(row[n] for row in rows.own),
                tuple(row[n] for row in extra),
            )
            for n in range(rows.blocks)
        )
        start = min(blocks[0].equations)
        return Stack(path, "unrolled", start, blocks, period, period * len(blocks), tuple(rows.shared))

    def refusal(self, view: View, miss: Miss) -> Refusal:
        """How two blocks differ first."""
        where = source_line(view.eqns[max(miss.step.pairs)])
        if miss.difference is None:
            return Refusal(where, miss.why)
        a, b = miss.difference
        one, other = view.made_by(a), view.made_by(b)
        if not alike(a, b):
            there, here = (f"{self.told(view, atom)} is {atom.aval.str_short()}" for atom in (b, a))
            return Refusal(where, f"{there}; in the block before, {here}")
        if one is None or other is None:
            return Refusal(
                where, f"{self.told(view, b)} stands where the block before has {self.told(view, a)}"
            )
        inner = self.inside(view.eqns[one], view.eqns[other])
        before, after = written(*inner), written(*inner[::-1])
        return Refusal(where, f"{after} stands where the block before has {before}")

    def inside(self, one: JaxprEqn, other: JaxprEqn) -> tuple[JaxprEqn, JaxprEqn]:
        """Of two equations that differ, or of what is in their bodies, the first two that do."""
        if one.primitive is other.primitive:
            for a, b in zip(bodies(one), bodies(other), strict=False):
                for x, y in zip(a.eqns, b.eqns, strict=False):
                    if self.keys.of(x) != self.keys.of(y) or literals(x) != literals(y):
                        return self.inside(x, y)
        return one, other

    def told(self, view: View, atom: Atom) -> str:
        """How a value is made, with the user's line; or which input it is."""
        made = view.made_by(atom)
        if made is not None:
            return written(view.eqns[made])
        names = zip(self.roles.axes.jaxpr.invars, self.roles.paths, strict=False)
        return next(
            (path for v, path in names if v is atom), "an input" if isinstance(atom, Var) else str(atom.val)
        )


def literals(eqn: JaxprEqn) -> list[str]:
    """What an equation says of its operands in numbers."""
    return [str(v.val) for v in eqn.invars if not isinstance(v, Var)]


def written(eqn: JaxprEqn, other: JaxprEqn | None = None) -> str:
    """An equation's operation, its literals, the parameters in which it differs from the other, if they are
    the same operation, or else the types, and the user's line.
    """
    words = [eqn.primitive.name, *literals(eqn)]
    if other is not None and other.primitive is eqn.primitive:
        params = [(k, spell(v)) for k, v in eqn.params.items() if k not in SILENT and k in other.params]
        words += [f"{k}={text}" for k, text in params if text != spell(other.params[k])]
        if literals(eqn) == literals(other) and len(words) == 1 + len(literals(eqn)):
            words += [v.aval.str_short() for v in eqn.outvars]
    return f"`{' '.join(words)}` ({source_line(eqn)})"
