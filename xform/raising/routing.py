"""Whether data say which expert's weights a token takes: evaluated, with made-up tokens and weights.

Between tokens, weights and result, all else is held: what the router computes, as it is for some inputs. So
the weights of one expert are changed, and it is seen which numbers of the result change with them. An element
that takes one expert and not another for some inputs, and for others the other and not the one, is routed.
Heads, ensembles and mixtures of all are not, nor is what goes by position, nor a unit that a ReLU has
switched off: tokens and weights are the same each time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform.higher_order import bodies
from xform.raising.banks import Candidate
from xform.raising.flat import View, dtype_of, size
from xform.tensors.runs import taken_out
from xform.trace import Atom, Jaxpr, JaxprEqn, Var, eval_jaxpr, shape_of

Array = np.ndarray[Any, Any]

SEEDS, DRAWS, TESTED = 5, 2, 4
MOST = 1 << 30
"""Multiplications in one evaluation, at most."""
FAR = 400
"""Equations of what a router computes, back from where it is used; beyond, values are made up."""


class TooLarge(Exception):
    """There is too much to compute."""


class Routing:
    """What follows from tokens `x` and banks by way of products, up to `outs`; all else is held."""

    def __init__(
        self,
        view: View,
        group: Sequence[Candidate],
        x: Var,
        after: Collection[Var],
        outs: Sequence[Var],
        known: frozenset[Var],
    ) -> None:
        self.view, self.x, self.outs = view, x, outs
        path = set().union(*(c.path for c in group))
        back = view.ancestors(outs)
        self.numbers = numbers = sorted(
            n for n in back if n in path or any(v in after for v in view.eqns[n].outvars)
        )
        self.banks = list(dict.fromkeys(c.bank for c in group))
        if sum(_work(view.eqns[n]) for n in numbers) > MOST:
            raise TooLarge("its tokens and experts are too many to evaluate which takes which")
        self.main = _region(view, numbers, outs)
        free = {x, *self.banks}
        self.held = [v for v in self.main.invars if v not in free]
        experts = min(size(self.banks[0]))
        side = sorted(view.ancestors(self.held, stop=free.__contains__))[-FAR:]
        side = [n for n in side if not free.intersection(view.eqns[n].outvars)]
        self.side = _region(view, side, self.held)
        self.high = max(2, experts)
        self._run = jax.jit(lambda *args: eval_jaxpr(self.main, *args))
        self._sides = jax.jit(lambda *args: eval_jaxpr(self.side, *args))
        self._made: dict[int, dict[Var, Any]] = {}

    def experts(self, banks: Sequence[Var]) -> tuple[Var, dict[Var, int]] | None:
        """The first result that is routed, and the dimension of experts of each bank."""
        found: list[dict[Var, int]] = [{} for _ in self.outs]
        for bank in banks:
            for d in _dims(bank):
                for k, is_routed in enumerate(self._routed(bank, d)):
                    if is_routed:
                        found[k].setdefault(bank, d)
        for out, dims in zip(self.outs, found, strict=True):
            if len(dims) == len(banks):
                return out, dims
        return None

    def _routed(self, bank: Var, d: int) -> list[bool]:
        n = size(bank)[d]
        tested = list(range(n))[:TESTED]
        patterns = [self._patterns(bank, d, tested, seed) for seed in range(SEEDS)]
        answers = []
        for k in range(len(self.outs)):
            each = np.stack([np.stack([p[k] for p in by_expert]) for by_expert in patterns])
            answers.append(_exclusive(each))
        return answers

    def _patterns(self, bank: Var, d: int, tested: Sequence[int], seed: int) -> list[list[Array]]:
        """For each expert and each result, which elements change with the expert's weights."""
        found: list[list[Array]] = []
        for e in tested:
            changed = [np.zeros(size(out), np.bool_) for out in self.outs]
            for draw in range(DRAWS):
                values = self._values(seed, draw)
                one = self._results(values)
                other = made_up(bank, 977 + draw, self.high)
                where = np.arange(size(bank)[d]).reshape(
                    [-1 if j == d else 1 for j in range(len(size(bank)))]
                )
                values = values | {bank: jnp.where(where == e, other, values[bank])}
                changed = [
                    c | _differ(a, b) for c, a, b in zip(changed, one, self._results(values), strict=True)
                ]
            found.append(changed)
        return found

    def keeps_tokens_apart(self, out: Var, contracted: int) -> bool:
        """Whether no number of the result follows from two tokens; where tokens lie in the result as they do
        in x, each from its own.
        """
        shape = size(self.x)
        at = next((d for d in reversed(range(len(shape))) if shape[d] == contracted), len(shape) - 1)
        rows = [n for d, n in enumerate(shape) if d != at]
        k = list(self.outs).index(out)
        in_place = list(size(out)[:-1]) == rows and at == len(shape) - 1
        any_at_all = False
        for seed in range(2):
            values = self._values(seed, 0)
            one = self._results(values)[k]
            seen = np.zeros(size(out), np.bool_)
            for row in sorted({0, math.prod(rows) // 2, math.prod(rows) - 1}):
                place = np.zeros(rows, np.bool_)
                place.flat[row] = True
                where = np.expand_dims(place, at)
                other = jnp.where(where, made_up(self.x, 4711 + row, self.high), values[self.x])
                changed = _differ(one, self._results(values | {self.x: other})[k])
                if (changed & seen).any() or (in_place and changed[~place].any()):
                    return False
                any_at_all = any_at_all or bool(changed.any())
                seen |= changed
        return any_at_all

    def _values(self, seed: int, draw: int) -> dict[Var, Any]:
        if seed not in self._made:
            with jax.ensure_compile_time_eval():
                args = [made_up(v, 31 * seed + 7 + j, self.high) for j, v in enumerate(self.side.invars)]
                held = dict(zip(self.held, self._sides(*args), strict=True))
            self._made[seed] = held
        own = {v: made_up(v, 5000 + 100 * draw + j, self.high) for j, v in enumerate((self.x, *self.banks))}
        return self._made[seed] | own

    def _results(self, values: dict[Var, Any]) -> list[Array]:
        with jax.ensure_compile_time_eval():
            return [np.asarray(v, np.float64) for v in self._run(*(values[v] for v in self.main.invars))]


def _exclusive(seen: Array) -> bool:
    """Whether an element takes one expert and not another, and with other data the other and not the one.
    seen: [seeds, experts, ...]
    """
    seen = seen.reshape(*seen.shape[:2], -1)
    for a in range(seen.shape[1]):
        for b in range(a):
            one = (seen[:, a] & ~seen[:, b]).any(0)
            other = (seen[:, b] & ~seen[:, a]).any(0)
            if (one & other).any():
                return True
    return False


def _differ(a: Array, b: Array) -> Array:
    large = max(float(np.max(np.abs(a), initial=0)), 1e-30)
    differ: Array = (np.abs(a - b) > 1e-6 * large) | (np.isnan(a) != np.isnan(b))
    return differ


def _dims(bank: Var) -> list[int]:
    return [d for d, n in enumerate(size(bank)) if n > 1]


def _region(view: View, numbers: Sequence[int], gives: Sequence[Var]) -> Jaxpr:
    part = taken_out(view.jaxpr, list(numbers))
    made = {v for eqn in part.eqns for v in eqn.outvars} | set(part.invars) | set(part.constvars)
    more = [v for v in gives if v not in made]
    return part.replace(
        invars=[*part.invars, *dict.fromkeys(more)],
        outvars=list(gives),
        debug_info=part.debug_info.with_unknown_names(),
    )


def made_up(atom: Atom, seed: int, high: int) -> Any:
    """Random numbers of an atom's type: integers from 0 to `high`, exclusive."""
    dtype, shape = dtype_of(atom), shape_of(atom)
    rng = np.random.default_rng(seed)
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        with jax.ensure_compile_time_eval():
            return jax.random.key(seed)
    if np.issubdtype(dtype, np.bool_):
        return rng.integers(0, 2, shape).astype(bool)
    if jnp.issubdtype(dtype, np.integer):
        return rng.integers(0, high, shape).astype(dtype)
    return rng.normal(size=shape).astype(dtype)


def _work(eqn: JaxprEqn) -> int:
    """About how many multiplications an equation does."""
    made = sum(math.prod(size(v)) for v in eqn.outvars if hasattr(v.aval, "shape"))
    if eqn.primitive.name == "dot_general":
        left = eqn.params["dimension_numbers"][0][0]
        return made * math.prod(size(eqn.invars[0])[d] for d in left)
    inner = sum(_work(e) for body in bodies(eqn) for e in body.eqns)
    turns = int(eqn.params["length"]) if eqn.primitive.name == "scan" else 1
    return made + turns * inner
