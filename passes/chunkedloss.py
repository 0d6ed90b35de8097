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
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from xform.axes import Path
from xform.batch.local import evaluate
from xform.batch.states import Batch, Micro, Outcome, Split, State
from xform.context import Context
from xform.copies import Groups
from xform.errors import Decline, PlanError
from xform.heads import Head, Refused, Region, find_head
from xform.higher_order import enter, hoist, is_plain_jit
from xform.movement import nbytes
from xform.plans.rules import MAXTEXT_RULES
from xform.report import amount
from xform.rewrite import Site, rewrite
from xform.tensors.runs import replaced
from xform.trace import Jaxpr, JaxprEqn, Value, Var, inline

BATCH_AXES = dict(MAXTEXT_RULES)["activation_batch"]
"""The mesh axes that the batch may lie on."""


@dataclasses.dataclass(frozen=True)
class ChunkedLoss:
    """Options:

    chunks: in how many parts the tokens go through the head and the loss; it has to divide the length.
    """

    chunks: int = 8

    stages: ClassVar[tuple[str, ...]] = ("model",)
    after: ClassVar[tuple[str, ...]] = ("roll",)

    def rewrite(self, jaxpr: Jaxpr, context: Context) -> Jaxpr:
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
        try:
            axis, region = self._region(head, context)
        except Decline as why:
            line = getattr(why, "line", "") or head.line
            context.report.declined("chunkedloss", f"the head {head.what}", str(why), line)
            return jaxpr
        logits = nbytes(head.eqn.outvars[0])
        context.report.did(
            "chunkedloss",
            f"the head {head.what} and the loss go through {self.chunks} chunks of the {axis}",
            f"logits of {amount(logits / self.chunks)} at a time instead of {amount(logits)}",
            head.line,
        )
        run = (region.numbers, functools.partial(_chunked, region, self._groups(context)))
        return _at(opened, head.scope.path, lambda body: replaced(body, [run], "chunkedloss"))

    def _groups(self, context: Context) -> Groups | None:
        axes = tuple(a for a in BATCH_AXES if context.mesh.shape.get(a, 1) > 1)
        return Groups(context.mesh, axes) if axes else None

    def _region(self, head: Head, context: Context) -> tuple[str, Region]:
        """The region by the first axis of the tokens along which it can be cut."""
        reasons: list[Decline] = []
        uneven: list[str] = []
        for name, factors in head.tokens:
            size = math.prod(f.size for f in factors)
            if size % self.chunks:
                uneven.append(f"the {name} of {size} ({', '.join(map(str, _divisors(size)))})")
                continue
            if name == "batch" and size % (self.chunks * context.mesh.size):
                why = f"{self.chunks} chunks of the batch of {size} leave devices of the mesh idle"
                reasons.append(Decline(why))
                continue
            try:
                return name, Region(Batch(factors, Split(size, self.chunks)), head)
            except Decline as why:
                text = re.sub(r"\bbatch\b", name, str(why))  # the rows that `xform.batch` cuts are these
                reasons.append(Refused(text, getattr(why, "line", "")))
        if reasons:
            raise reasons[0]
        raise PlanError(
            f"chunkedloss.chunks = {self.chunks} does not divide {' nor '.join(uneven)};"
            " in brackets what does"
        )


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


def _chunked(region: Region, groups: Groups | None, part: Jaxpr) -> Callable[..., list[Value]]:
    """The function that stands in the place of a region, taken out as `part`."""
    split = region.tokens.split
    pairs = [(region.jaxpr.eqns[i], region.outcomes[i]) for i in sorted(region.numbers)]
    # What depends on no token and is used elsewhere too, a cast weight, is made there once as well.
    common = [(eqn, outcome) for eqn, outcome in pairs if all(s.is_same for s in outcome.states)]
    takes = [region.states[v].is_rows for v in part.invars]
    gives = {v: region.states[v] for v in part.outvars if isinstance(v, Var) and not region.states[v].is_same}
    copied = region.weights(groups.count) if groups else {}
    inside = [_with_copies(eqn, outcome, copied) for eqn, outcome in _making(pairs, gives, copied)]

    def emit(*args: Value) -> list[Value]:
        same = {v: x for v, x, own in zip(part.invars, args, takes, strict=True) if not own}
        own = {
            v: split.apart(x, region.states[v])
            for v, x, own in zip(part.invars, args, takes, strict=True)
            if own
        }
        whole = dict(same)
        evaluate(common, whole, Micro(0, split))
        copies = {v: groups.copies(whole[v]) for v in copied} if groups else {}

        def chunk(index: Value, rows: Sequence[Value], common: Sequence[Any]) -> list[Value]:
            env = dict(zip((*own, *same, *copies), (*rows, *common), strict=True))
            evaluate(inside, env, Micro(index, split))
            return [env[v] for v in gives]

        def turn(_: None, x: tuple[Value, list[Value]]) -> tuple[None, list[Value]]:
            return None, jax.checkpoint(chunk, prevent_cse=False)(*x, [*same.values(), *copies.values()])

        _, ys = jax.lax.scan(turn, None, (jnp.arange(split.steps), list(own.values())))
        whole.update((v, _whole(y, s, split)) for (v, s), y in zip(gives.items(), ys, strict=True))
        return [whole[v] for v in part.outvars if isinstance(v, Var)]

    return emit


Pair = tuple[JaxprEqn, Outcome]


def _making(pairs: Sequence[Pair], results: Collection[Var], given: Collection[Var]) -> list[Pair]:
    """The equations that make the results, when some values are there already."""
    wanted, found = set(results), list[Pair]()
    for eqn, outcome in reversed(pairs):
        if not wanted.isdisjoint(eqn.outvars):
            found.append((eqn, outcome))
            wanted.update(v for v in eqn.invars if isinstance(v, Var) and v not in given)
    return found[::-1]


def _with_copies(eqn: JaxprEqn, outcome: Outcome, copied: Mapping[Var, int]) -> Pair:
    """The equation, as a product with a weight's copies if it is one with a weight that has some."""
    side = next((k for k, v in enumerate(eqn.invars) if isinstance(v, Var) and v in copied), None)
    if side is None:
        return eqn, outcome
    rows = copied[eqn.invars[side]]

    def emit(args: Sequence[Any], micro: Micro) -> list[Value]:
        return [args[side].product(eqn, args[1 - side], side, rows)]

    return eqn, Outcome(outcome.states, emit)


def _whole(parts: Value, state: State, split: Split) -> Value:
    """The whole value of what the chunks gave of it, [chunks, ...]."""
    if state.is_rows:
        return split.together(parts, state)
    combine: dict[str, Callable[..., Value]] = {"sum": jnp.sum, "max": jnp.max, "min": jnp.min}
    return combine[state.kind](parts, axis=0).astype(parts.dtype)
