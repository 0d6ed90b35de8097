"""Computes the head and the loss of a language model for some of the tokens at a time, so that the logits are
never whole.

    logits[b,l,v] = dot_general x w            loss[b,l] = scan over chunks of l {
    shifted = sub logits (max logits)            remat2 {
    ...                                   ->       logits[b,l/n,v] = dot_general x w
    loss[b,l] = sub lse picked                     ... loss[b,l/n] = sub lse picked } }

The head is the product whose result has the vocabulary's axis and is the largest. What follows it, up to
where that axis has been reduced away, is taken as it is written: every operation there has to treat each
token alone, or add up over tokens, as `xform.batch` finds out. That region runs in a loop over chunks of the
tokens, wrapped in `jax.checkpoint`: the backward pass computes a chunk's logits again. A chunk is every n-th
token, so that a length or batch that lies in blocks on a mesh stays where it is.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval

from xform.axes import Path
from xform.batch.local import evaluate
from xform.batch.states import Batch, Micro, Split, State
from xform.context import Context
from xform.errors import Decline, PlanError
from xform.heads import CHUNKED, Head, Refused, Region, find_head
from xform.higher_order import enter, equations, hoist, is_plain_jit
from xform.movement import nbytes
from xform.plans.rules import MAXTEXT_RULES
from xform.report import amount
from xform.rewrite import Site, rewrite
from xform.sharding.once import Loop
from xform.slices import sliced_before
from xform.tensors.runs import replaced
from xform.trace import Jaxpr, JaxprEqn, Value, Var, inline, name_stack

BATCH_AXES = dict(MAXTEXT_RULES)["activation_batch"]
"""The mesh axes that the batch may lie on."""


@dataclasses.dataclass(frozen=True)
class ChunkedLoss:
    """Options:

    chunks: in how many parts the tokens go through the head and the loss; of the batch, where it is that
        which is cut, so many or a few more that each microbatch of the plan has whole ones.
    gather: where the mesh axes of the batch split the head's weight, "each" gathers it for every chunk, and
        sums its gradient over the devices for every chunk; "once" does both once, which takes the memory of
        the whole weight and its gradient; "auto": once, where that is less than the chunks save. Where Shard
        writes out collectives, the weight is gathered before the loop in any case.
    """

    chunks: int = 8
    gather: Literal["auto", "each", "once"] = "auto"

    stages: ClassVar[tuple[str, ...]] = ("model", "step")
    after: ClassVar[tuple[str, ...]] = ("roll", "narrow", "shard")

    def rewrite(self, jaxpr: Jaxpr, context: Context) -> Jaxpr:
        if context.stage == "step":
            return self._gathered(jaxpr, context)
        if self.chunks < 2:
            raise PlanError(f"chunkedloss.chunks = {self.chunks}: at least 2; without the pass there is one")
        head = find_head(context.roles(jaxpr))
        if head is None:
            why = "no product of activations and a weight gives logits over a vocabulary"
            context.report.declined("chunkedloss", "the program", why)
            return jaxpr
        opened = _opened(jaxpr, head.scope.path)
        if opened is not jaxpr:
            head = find_head(context.roles(opened))
            assert head is not None
        number, side = head.number, head.side
        sliced = _at(opened, head.scope.path, lambda body: sliced_before(body, number, side))
        if sliced is not opened:
            opened, head = sliced, find_head(context.roles(sliced))
            assert head is not None
        try:
            axis, region = self._region(head, context)
        except Decline as why:
            line = getattr(why, "line", "") or head.line
            context.report.declined("chunkedloss", f"the head {head.what}", str(why), line)
            return jaxpr
        logits, steps = nbytes(head.eqn.outvars[0]), region.tokens.split.steps
        context.report.did(
            "chunkedloss",
            f"the head {head.what} and the loss go through {steps} chunks of the {axis}",
            f"logits of {amount(logits / steps)} at a time instead of {amount(logits)}",
            head.line,
        )
        run = (region.numbers, functools.partial(_chunked, region))
        return _at(opened, head.scope.path, lambda body: replaced(body, [run], "chunkedloss"))

    def _gathered(self, jaxpr: Jaxpr, context: Context) -> Jaxpr:
        """The step, laid out on the mesh, with loops over chunks that gather weights once."""
        axes = [a for a in BATCH_AXES if context.mesh.shape.get(a, 1) > 1]
        ours = any(map(_is_ours, equations(jaxpr)))
        if self.gather == "each" or not axes or not ours or not any(context.in_shardings):
            return jaxpr
        roles = context.roles(jaxpr)

        def rule(site: Site) -> Sequence[Value] | None:
            if not _is_ours(site.eqn):
                return None
            scope = roles.axes.scope((*site.path, (site.index, 0)))
            loop = Loop(site.eqn, scope, context, roles, axes)
            if not loop.weights and not loop.sums:
                return None
            what = f"a loop over {self.chunks} chunks gathers {len(loop.weights)} weights and sums"
            what += f" {len(loop.sums)} gradients over the devices once"
            takes = f"{amount(loop.memory)} more on a device; without chunks it would be {amount(loop.saved)}"
            if self.gather == "auto" and loop.memory > loop.saved:
                context.report.declined("chunkedloss", what, takes)
                return None
            context.report.did("chunkedloss", what, takes)
            return loop.emit(site)

        new = rewrite(jaxpr, rule)
        if new is jaxpr:
            return jaxpr
        return partial_eval.dce_jaxpr(new, [True] * len(new.outvars), instantiate=True)[0]

    def _region(self, head: Head, context: Context) -> tuple[str, Region]:
        """The region by the first axis of the tokens along which it can be cut."""
        reasons: list[Decline] = []
        uneven: list[str] = []
        for name, factors in head.tokens:
            size = math.prod(f.size for f in factors)
            if size < self.chunks:
                uneven.append(f"the {name} of {size}, fewer than chunks")
                continue
            chunks = self._of_batch(size, context) if name == "batch" else self.chunks
            if name == "batch" and size % (chunks * _devices(context)):
                why = f"{chunks} chunks of the batch of {size} leave devices of the mesh idle"
                reasons.append(Decline(why))
                continue
            try:
                split = Split(size, chunks)
                region = Region(Batch(factors, split), head)
                if not split.spare:
                    return name, region
                if not region.sums:
                    return f"{name} of {size}, filled up to {size + split.spare}", region
                divisors = ", ".join(map(str, _divisors(size))) or "nothing"
                uneven.append(f"the {name} of {size}, over which the loss sums at once ({divisors} would do)")
            except Decline as why:
                text = re.sub(r"\bbatch\b", name, str(why))  # the rows that `xform.batch` cuts are these
                reasons.append(Refused(text, getattr(why, "line", "")))
        if reasons:
            raise reasons[0]
        raise PlanError(f"chunkedloss.chunks = {self.chunks} does not divide {' nor '.join(uneven)}")

    def _of_batch(self, rows: int, context: Context) -> int:
        """As many chunks, or more where the plan has microbatches, so that each of these has whole ones."""
        microbatches = context.microbatches(rows)
        if microbatches == 1:
            return self.chunks
        least = -(-self.chunks // microbatches) * microbatches
        fit = (n for n in range(least, rows + 1, microbatches) if rows % (n * _devices(context)) == 0)
        return next(fit, least)


def _devices(context: Context) -> int:
    """Of the mesh, those that have rows of their own."""
    return context.mesh.size // math.prod(context.mesh.shape.get(axis, 1) for axis in context.stage_axes)


def _is_ours(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "scan" and CHUNKED in re.split(r"\W+", name_stack(eqn))


def _divisors(n: int) -> list[int]:
    return [d for d in range(2, min(n, 64) + 1) if n % d == 0]


def _at(jaxpr: Jaxpr, path: Path, change: Callable[[Jaxpr], Jaxpr]) -> Jaxpr:
    """The program with the body at a path changed."""
    if not path:
        return change(jaxpr)
    (index, number), *rest = path

    def rule(site: Site) -> Sequence[Value] | None:
        if site.path or site.index != index:
            return None
        inside = enter(site.eqn, lambda b, n: _at(b, tuple(rest), change) if n == number else b)
        params, consts = hoist(site.eqn, inside)
        return site.bind(*consts, *site.args, **params)

    return rewrite(jaxpr, rule)


def _opened(jaxpr: Jaxpr, path: Path) -> Jaxpr:
    """The program with the calls of jit on the way to a body opened: the logits may leave them."""
    for depth in range(len(path) - 1, -1, -1):
        index = path[depth][0]

        def change(body: Jaxpr, index: int = index) -> Jaxpr:
            def rule(site: Site) -> Sequence[Value] | None:
                if site.path or site.index != index or not is_plain_jit(site.eqn):
                    return None
                return inline(site.params["jaxpr"], *site.args)

            return rewrite(body, rule)

        jaxpr = _at(jaxpr, path[:depth], change)
    return jaxpr


def _chunked(region: Region, part: Jaxpr) -> Callable[..., list[Value]]:
    """The function that stands in the place of a region, taken out as `part`."""
    split = region.tokens.split
    pairs = [(region.jaxpr.eqns[i], region.outcomes[i]) for i in sorted(region.numbers)]
    # What depends on no token and is used elsewhere too, a cast weight, is made there once as well.
    common = [(eqn, outcome) for eqn, outcome in pairs if all(s.is_same for s in outcome.states)]
    takes = [region.states[v].is_rows for v in part.invars]
    gives = {v: region.states[v] for v in part.outvars if isinstance(v, Var) and not region.states[v].is_same}

    def emit(*args: Value) -> list[Value]:
        same = {v: x for v, x, own in zip(part.invars, args, takes, strict=True) if not own}
        own = {
            v: split.apart(x, region.states[v])
            for v, x, own in zip(part.invars, args, takes, strict=True)
            if own
        }

        def chunk(index: Value, rows: Sequence[Value], whole: Sequence[Value]) -> list[Value]:
            env = {**dict(zip(own, rows, strict=True)), **dict(zip(same, whole, strict=True))}
            evaluate(pairs, env, Micro(index, split))
            return [env[v] for v in gives]

        def turn(_: None, x: tuple[Value, list[Value]]) -> tuple[None, list[Value]]:
            return None, jax.checkpoint(chunk, prevent_cse=False)(*x, list(same.values()))

        with jax.named_scope(CHUNKED):
            _, ys = jax.lax.scan(turn, None, (jnp.arange(split.steps), list(own.values())))
        env = dict(same)
        evaluate(common, env, Micro(0, split))
        env.update((v, _whole(y, s, split)) for (v, s), y in zip(gives.items(), ys, strict=True))
        return [env[v] for v in part.outvars if isinstance(v, Var)]

    return emit


def _whole(parts: Value, state: State, split: Split) -> Value:
    """The whole value of what the chunks gave of it, [chunks, ...]."""
    if state.is_rows:
        return split.together(parts, state)
    combine: dict[str, Callable[..., Value]] = {"sum": jnp.sum, "max": jnp.max, "min": jnp.min}
    return combine[state.kind](parts, axis=0).astype(parts.dtype)
