"""Makes one loop of layers that stand in the program one by one, and one loop of two inside each other.

    x = layer(x, w0, 3)                   w = stack w0 w1 w2 ...
    x = layer(x, w1, 4)            ->     x = scan over w, [3, 4, 5, ...] { layer }
    x = layer(x, w2, 5) ...

Layers are found by their dataflow (`xform.layers`), so it does not matter how they were written. What
differs between them the loop goes through: weights and keys as a `stack`, which `xform.state` moves out of
the step; numbers as an array. What they share stays outside, what else they give comes back by `unstack`. It
acts before autodiff, and before the passes that treat a layer, which then treat the body of the loop.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.source_info_util import reset_name_stack

from xform.context import Context
from xform.errors import Decline, PlanError
from xform.higher_order import RULES, enter, hoist, scan_parts
from xform.layers import Refusal, Stack, find_stacks
from xform.layers.columns import Column
from xform.layers.constants import lifted, pruned
from xform.layers.nests import divisor, kept, nest_of
from xform.layers.turns import Turn, turn_of, unheld
from xform.registry import unknown
from xform.report import Note, Report
from xform.rewrite import Path, Site, rewrite
from xform.tensors.runs import gathered, replaced, taken_out
from xform.trace import Atom, Jaxpr, JaxprEqn, at_equation, fitted, inline, source_line, trace_flat
from xform.trace import Literal as Number

Emit = Callable[..., Sequence[Any]]
Nesting = Literal["flat", "keep", "sqrt"]

CHECKPOINT = "remat2"
IN_LOOP = "the compiler does not merge what is in two loops"
UNROLLED_WITHIN = "there are layers one by one in each turn; a loop of these would be a loop within a loop"
TWICE = "what its layers do besides computing would be done twice, in the turns that are computed again"
OWN_RULE = "the layers in it have a differentiation rule of the user's own"


@dataclasses.dataclass(frozen=True)
class Roll:
    """Options:

    nesting: "flat" makes one loop of a loop over layers and one inside it; "keep" leaves such loops; "sqrt"
        makes of each loop over layers one inside another, as long as its length allows, each turn of the
        outer computed again for the backward pass: of N layers' inputs, about twice the root of N are kept.

    Raises PlanError where the model has no layers.
    """

    nesting: Nesting = "flat"

    stages: ClassVar[tuple[str, ...]] = ("model",)
    stacks: ClassVar[bool] = True  # the state is to be stored as the loops take it

    def rewrite(self, jaxpr: Jaxpr, context: Context) -> Jaxpr:
        if self.nesting not in typing.get_args(Nesting):
            raise unknown("nesting", self.nesting, typing.get_args(Nesting), "roll.nesting")
        plain = lifted(jaxpr)
        stacks, refusals = find_stacks(plain, context.roles(plain))
        if not stacks and context.stage_axes and not refusals:
            context.report.declined(
                "roll", "the model", "there are no blocks to roll; pipeline looks for a loop"
            )
            return jaxpr
        if not stacks:
            raise PlanError(_no_layers(refusals))
        for refusal in refusals:
            context.report.declined("roll", "layers that are nearly alike", refusal.why, refusal.where)
        rolling = _Rolling(self.nesting, stacks, context.report)
        rolled = rolling.body(plain, ())
        return rolled if rolling.done else jaxpr


@dataclasses.dataclass(frozen=True)
class _Run:
    """Equations of a body, the program that stands in their place, and what is said of it."""

    numbers: Collection[int]
    program: Jaxpr
    notes: tuple[Note, ...]

    def change(self, part: Jaxpr) -> Emit:
        return _apart(functools.partial(inline, self.program))


class _Rolling:
    """The rewrite of one program. `done`: whether anything was changed."""

    def __init__(self, nesting: Nesting, stacks: Sequence[Stack], report: Report) -> None:
        self.nesting, self.stacks, self.report = nesting, stacks, report
        self.done = False

    def body(self, jaxpr: Jaxpr, path: Path) -> Jaxpr:
        """A body with the stacks rolled that stand in it, at any depth."""
        runs: list[_Run] = []
        around: dict[int, None] = {}
        for each in self.stacks:
            if each.path == path:
                runs += self.run(jaxpr, each, runs)
            elif each.path[: len(path)] == path:
                around[each.path[len(path)][0]] = None
        for note in (note for run in runs for note in run.notes):
            self.report.add(note)
        self.done |= bool(runs)
        changes = [(run.numbers, run.change) for run in runs]
        changes += [((i,), functools.partial(self.around, path, i)) for i in around]
        return pruned(replaced(jaxpr, changes, "roll")) if changes else jaxpr

    def run(self, jaxpr: Jaxpr, each: Stack, others: Sequence[_Run]) -> list[_Run]:
        """What is done with a stack of this body, if anything; a note of why not."""
        line = source_line(jaxpr.eqns[each.index])
        try:
            if each.kind == "unrolled":
                run = self.unrolled(jaxpr, each, line)
            elif any(inner.kind == "unrolled" for inner in each.within):
                raise Decline(UNROLLED_WITHIN)
            elif self.nesting == "flat" and each.within:
                run = self.flat(jaxpr, each, line)
            elif self.nesting == "sqrt" and not each.within:
                run = self.nested(jaxpr, each, line)
            else:
                return []
            gathered(jaxpr, [*(other.numbers for other in others), run.numbers])
        except Decline as why:
            self.report.declined("roll", _name(each), str(why), line)
            return []
        return [run]

    def around(self, path: Path, index: int, part: Jaxpr) -> Emit:
        """An equation with layers somewhere inside."""

        def rule(site: Site) -> Sequence[Any] | None:
            if site.path:
                return None
            if site.name in RULES:
                raise Decline(OWN_RULE)
            inside = enter(site.eqn, lambda b, n: b if n < 0 else self.body(b, (*path, (index, n))))
            if inside is site.params:
                return None
            params, consts = hoist(site.eqn, inside)
            return site.bind(*consts, *site.args, **params)

        return _apart(functools.partial(inline, rewrite(part, rule, self.report, "roll")))

    def unrolled(self, jaxpr: Jaxpr, each: Stack, line: str) -> _Run:
        """Layers one by one as a loop."""
        turn = turn_of(jaxpr, each)
        if outside := unheld(jaxpr, each, turn):
            raise Decline(f"{outside} reads of a layer what the last layer does not make")
        if self.nesting == "sqrt" and turn.body.effects:
            raise Decline(TWICE)
        body, notes = merging(turn.body)
        turn = dataclasses.replace(turn, body=body)
        columns = [Column.of(jaxpr, row) for row in turn.own]
        numbers = {i for block in each.blocks for i in block.equations}
        numbers |= {i for column in columns for i in column.makers}
        part = taken_out(jaxpr, numbers)
        size, inner = len(each.blocks), self.inner(len(each.blocks))

        def emit(*args: Any) -> list[Any]:
            env: dict[Atom, Any] = dict(zip(part.invars, args, strict=True))
            inputs = [column.value(env) for column in columns]
            first = [v.val if isinstance(v, Number) else env[v] for v in turn.first]
            carried = [v.aval for v in turn.body.outvars[: len(first)]]
            shared = [env[v] for v in turn.shared]

            def run(carry: Sequence[Any], scanned: Sequence[Any]) -> Any:
                mine = [c.each(x, whole) for c, x, (_, whole) in zip(columns, scanned, inputs, strict=True)]
                takes = zip((*carry, *mine), turn.body.invars, strict=False)
                outs = inline(turn.body, *(fitted(x, v.aval) for x, v in takes), *shared)
                return outs[: len(first)], outs[len(first) :]

            start = [fitted(_strong(x, aval), aval) for x, aval in zip(first, carried, strict=True)]
            carry, ys = loop(run, start, [x for x, _ in inputs], size, inner)
            env |= {v: x for v, x in zip(turn.results, carry, strict=True) if v is not None}
            for row, y in zip(turn.extra, ys, strict=True):
                env.update((v, x) for v, x in zip(row, jax.lax.unstack(y), strict=True) if v not in env)
            return [env[v] for v in part.outvars]

        why = _detail(turn, columns)
        if inner != size:
            why += "; " + _saves([v.aval for v in turn.body.outvars[: len(turn.first)]], size, inner)
        elif self.nesting == "sqrt":
            notes.append(Note("declined", "roll", "a loop in a loop", _no_divisor(size), line))
        notes.append(Note("did", "roll", f"{_name(each)} are one loop of {_turns(size, inner)}", why, line))
        return _Run(numbers, _traced(emit, part, jaxpr.eqns[each.index]), tuple(notes))

    def inner(self, size: int) -> int:
        """How many turns an inner loop takes; as many as there are where there is to be none."""
        return divisor(size) if self.nesting == "sqrt" else size

    def flat(self, jaxpr: Jaxpr, each: Stack, line: str) -> _Run:
        """A loop over layers with a loop over layers in it as one loop."""
        nest = nest_of(jaxpr.eqns[each.index])
        what = f"loops of {' and '.join(map(str, nest.lengths))} turns are one of {math.prod(nest.lengths)}"
        program = _in_place(jaxpr, each.index, nest.emit)
        (within,) = each.within
        if within.within:
            # The loop is around the inner of the two now, and has what it had inside.
            index = next(i for i, eqn in enumerate(program.eqns) if eqn.primitive.name == "scan")
            here = dataclasses.replace(within, path=(), index=index)
            deeper = _Rolling(self.nesting, [here], self.report)
            program = deeper.body(program, ())
        return _Run((each.index,), program, (Note("did", "roll", what, "", line),))

    def nested(self, jaxpr: Jaxpr, each: Stack, line: str) -> _Run:
        """A loop over layers as one in another."""
        eqn = jaxpr.eqns[each.index]
        size = eqn.params["length"]
        inner, (consts, carry, _) = self.inner(size), scan_parts(eqn)
        if eqn.effects:
            raise Decline(TWICE)
        if inner == size:
            raise Decline(_no_divisor(size))

        def emit(*args: Any) -> list[Any]:
            def run(x: Sequence[Any], scanned: Sequence[Any]) -> Any:
                outs = inline(eqn.params["jaxpr"], *args[:consts], *x, *scanned)
                return outs[:carry], outs[carry:]

            start, xs = args[consts : consts + carry], args[consts + carry :]
            last, ys = loop(run, start, xs, size, inner, eqn.params["reverse"])
            return [*last, *ys]

        avals = [v.aval for v in eqn.outvars[:carry]]
        what = f"a loop of {size} turns is {_turns(size, inner)}"
        note = Note("did", "roll", what, _saves(avals, size, inner), line)
        return _Run((each.index,), _in_place(jaxpr, each.index, emit), (note,))


def merging(body: Jaxpr) -> tuple[Jaxpr, list[Note]]:
    """A body for a loop: nothing need keep the compiler from merging what jax.checkpoint computes again."""
    notes: list[Note] = []

    def rule(site: Site) -> Sequence[Any] | None:
        if site.name != CHECKPOINT or site.params["prevent_cse"] is False:
            return None
        what = "jax.checkpoint of a layer has prevent_cse=False"
        notes.append(Note("did", "roll", what, IN_LOOP, site.line))
        return site.bind(jaxpr=rewrite(site.params["jaxpr"], rule), prevent_cse=False)

    return rewrite(body, rule), notes


def loop(
    turn: Callable[[Any, Any], Any],
    first: Sequence[Any],
    xs: Sequence[Any],
    size: int,
    inner: int,
    reverse: bool = False,
) -> Any:
    """`jax.lax.scan` over `size` turns; where `inner` is less, as a loop over loops of so many, whose insides
    are computed again for the backward pass.
    """
    if inner == size:
        return jax.lax.scan(turn, list(first), list(xs), length=size, reverse=reverse)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def outer(carry: Any, xs: Any) -> Any:
        return jax.lax.scan(turn, carry, xs, length=inner, reverse=reverse)

    folded = [jnp.reshape(x, (size // inner, inner, *x.shape[1:])) for x in xs]
    carry, ys = jax.lax.scan(outer, list(first), folded, length=size // inner, reverse=reverse)
    return carry, [jnp.reshape(y, (size, *y.shape[2:])) for y in ys]


def _traced(emit: Emit, part: Jaxpr, at: JaxprEqn) -> Jaxpr:
    """What `emit` makes of the values that a part of a program reads, at a place in the user's source."""
    with at_equation(at), reset_name_stack():
        return trace_flat(emit, [v.aval for v in part.invars], "roll")


def _in_place(jaxpr: Jaxpr, index: int, emit: Emit) -> Jaxpr:
    """What `emit` makes of one equation's operands as the program that stands for it."""
    part, eqn = taken_out(jaxpr, (index,)), jaxpr.eqns[index]

    def run(*args: Any) -> list[Any]:
        env: dict[Atom, Any] = dict(zip(part.invars, args, strict=True))
        outs = emit(*(v.val if isinstance(v, Number) else env[v] for v in eqn.invars))
        made = dict(zip(eqn.outvars, outs, strict=True))
        return [made[v] for v in eqn.outvars if v in part.outvars]

    return _traced(run, part, eqn)


def _apart(emit: Emit) -> Emit:
    """`emit` without the name stack of the equations that it replaces: what it emits has its own."""

    def apart(*args: Any) -> Sequence[Any]:
        with reset_name_stack():
            return emit(*args)

    return apart


def _strong(x: Any, aval: Any) -> Any:
    return np.asarray(x, aval.dtype) if isinstance(x, (bool, int, float, complex)) else x


def _name(each: Stack) -> str:
    return f"{each.layers} {'unrolled' if each.kind == 'unrolled' else 'scanned'} layers"


def _turns(size: int, inner: int) -> str:
    return f"{size} turns" if inner == size else f"{size // inner} turns of {inner}"


def _no_divisor(size: int) -> str:
    return f"{size} has no divisor but itself: take a number of layers that has one, or another nesting"


def _saves(avals: Sequence[Any], size: int, inner: int) -> str:
    """What is no longer kept for the backward pass of what layers carry."""
    some = size // inner + inner
    saved = kept(avals) * (size - some)
    return f"of what layers carry, {some} are kept at a time, not {size}: {saved} bytes less"


def _detail(turn: Turn, columns: Sequence[Column]) -> str:
    counts = {
        "stacks {} arrays a layer": sum(c.numbers is None and c.source is None for c in columns),
        "goes through {} arrays as they are": sum(c.source is not None for c in columns),
        "goes through {} constants": sum(c.numbers is not None for c in columns),
        "shares {}": len(turn.shared),
        "collects {}": len(turn.extra),
    }
    return "; ".join(text.format(n) for text, n in counts.items() if n)


def _no_layers(refusals: Sequence[Refusal]) -> str:
    near = "".join(f"; {refusal.why} ({refusal.where})" for refusal in refusals[:3])
    return (
        "roll: the model has no layers to roll: nothing carries a residual stream from one block of weights"
        f" to the next alike{near}"
    )
