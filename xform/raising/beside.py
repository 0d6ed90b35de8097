"""What an attention has beside its products: terms of its logits, masks, factors of its weights, a sink.

where(m, q . k + b, -1e9)   terms: b is added, m tells which keys are seen
(p * dropped * 1.25) . v    weighed: dropout, a constant
exp(x) / (sum exp(x) + exp(y))   a sink: y is a logit more, that has no value
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence

from xform.axes.factors import Shape
from xform.raising.flat import View, dtype_of, size
from xform.raising.logits import FAR, Added, Logits, Miss, Selected
from xform.raising.operands import operand
from xform.raising.points import depends
from xform.raising.probing import Factor
from xform.raising.reading import Reading, Space
from xform.raising.seen import Term
from xform.raising.softmax import Mixing, exponent, summed
from xform.trace import Atom, Var


def factors(reading: Reading, space: Space, atom: Atom, dims: Shape) -> frozenset[int]:
    """The factors along which a value that is laid along `dims` changes."""
    if not dims:
        return frozenset()
    pairs = zip(dims, reading.varies(atom), strict=True)
    return frozenset(leaf for dim, changes in pairs if changes for leaf in space.leaves(dim))


def is_bias(view: View, term: Term) -> bool:
    """Whether what is added may be more than a mask: made of floating-point numbers or positions."""
    if term.seen is not None:
        return False
    inputs = depends(view, term.atom)
    return not inputs or any(dtype_of(v).kind not in "biu" for v in inputs)


def terms(
    reading: Reading, space: Space, logits: Logits, added: Sequence[Added], made: set[Var], s: Collection[int]
) -> list[Term]:
    """What is added to logits or selects among them, of `added` and of what was selected. made: the products
    whose sum they are; s: factors of keys. What shifts all keys alike is left out where it is a constant or
    made of the products. Raises `Miss`.
    """
    found: list[Term] = []
    for each in added:
        own = factors(reading, space, each.atom, each.dims)
        keyed = not own.isdisjoint(s)
        inside = reading.follows(each.atom, made)
        if keyed and inside:
            why = "its logits are shifted by what is not the same for all keys"
            raise Miss(why, reading.number(each.atom))
        if keyed or (own and not inside and reading.takes_inputs(each.atom)):
            found.append(Term(each.atom, each.dims, each.factor, None, 0.0))
    for chosen in logits.selected:
        if reading.follows(chosen.atom, made):
            raise Miss("which keys are seen depends on its logits", reading.number(chosen.atom))
        found.append(_selected(reading, chosen))
    return found


def _selected(reading: Reading, chosen: Selected) -> Term:
    if not chosen.fill <= FAR:
        raise Miss(
            f"where its mask is not set its logits are {chosen.fill:g}: such keys are seen",
            reading.number(chosen.atom),
        )
    return Term(chosen.atom, chosen.dims, 1.0, chosen.seen, chosen.fill)


def weighed(reading: Reading, mixing: Mixing) -> tuple[list[Term], list[Factor], float]:
    """What is done to weights: masks, what they are multiplied by (dropout), a constant. Raises `Miss`."""
    masks: list[Term] = []
    weighing: list[Factor] = []
    scale = 1.0
    norms = [i for i, step in enumerate(mixing.steps) if step.kind == "norm"]
    last = norms[-1] if norms else len(mixing.steps)
    for i, step in enumerate(mixing.steps):
        if step.kind == "scale":
            scale *= step.factor if i > last or not norms else 1.0
        elif step.kind in ("select", "mul"):
            assert step.atom is not None
            if _is_random(reading.view, step.atom):
                weighing.append(
                    Factor(step.atom, step.dims, 1.0, step.seen if step.kind == "select" else None)
                )
            elif step.kind == "select" or reading.is_boolean(step.atom):
                seen = step.seen if step.kind == "select" else True
                masks.append(Term(step.atom, step.dims, 1.0, seen, -math.inf, weights=True))
            else:
                raise Miss("its weights are multiplied by other values before they mix", step.number)
    return masks, weighing, scale


def _is_random(view: View, atom: Atom) -> bool:
    return any(
        view.eqns[n].primitive.name.startswith(("random_", "threefry", "rng_"))
        for n in view.ancestors([atom])
    )


def sink(
    reading: Reading,
    space: Space,
    logits: Logits,
    mixing: Mixing,
    total: Atom | None,
    made: set[Var],
    start: tuple[Var, Shape],
) -> Factor | None:
    """A logit more, that has no value. total: what weights are divided by; start: the exponentials. Raises
    `Miss`.
    """
    if logits.sink is not None:
        atom, number = logits.sink
        axis = reading.view.eqns[number].params["dimension"]
        dims = tuple(() if i == axis else d for i, d in enumerate(logits.dims))
        return _reduced(reading, space, Factor(atom, dims))
    if total is None:
        return None
    found = summed(reading, space, mixing, total, *start)
    if found is None:
        return None
    y = exponent(reading, found.atom, made)
    if y is None:
        raise Miss("something is added to the sum of its weights that is no logit", found.number)
    dims = found.dims if len(size(y)) == len(found.dims) else ()
    return _reduced(reading, space, Factor(y, dims))


def _reduced(reading: Reading, space: Space, factor: Factor) -> Factor:
    """The smallest value that is repeated to be this one."""
    side = operand(reading, space, factor.atom)
    if not factor.dims:
        return factor
    known = tuple(d if c else () for d, c in zip(side.dims, reading.varies(factor.atom), strict=True))
    space.factors.tie(known, tuple(d if k else () for d, k in zip(factor.dims, known, strict=True)))
    small = [x for x in side.sources if x.factor == 1.0]
    best = min(small, key=lambda x: (math.prod(size(x.atom)), len(size(x.atom))))
    return dataclasses.replace(factor, atom=best.atom, dims=best.dims)
