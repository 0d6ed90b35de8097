"""Every spelling that becomes an operation computes what it did: values and gradients, by the plain form."""

import functools
import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.spellings import Spelling
from xform.errors import Decline
from xform.higher_order import equations
from xform.kernels.lowering import LOWERINGS, Options
from xform.ops import operation_of
from xform.raising.finding import find
from xform.raising.placing import Claim, placed
from xform.raising.sinking import sunk
from xform.trace import Jaxpr, eval_jaxpr

OPS = {
    "attention": "attention",
    "losses": "cross_entropy",
    "experts": "experts",
    "recurrences": "linear_recurrence",
}
"""The operation that the spellings of each module are of."""

CASES = [
    pytest.param(op, spelling, number, f"{module}-{name}", id=f"{module}-{name}")
    for module, op in OPS.items()
    if importlib.util.find_spec(f"tests.spellings.{module}") is not None
    for number, (name, spelling) in enumerate(
        importlib.import_module(f"tests.spellings.{module}").SPELLINGS.items()
    )
]

TOLERANCE = {"float32": 2e-5, "bfloat16": 4e-2, "float16": 6e-3}
"""Of a value's largest element; in narrow types the program rounds in between, the operation does not."""


def replaced(jaxpr: Jaxpr, op: str) -> tuple[Jaxpr, list[str]]:
    """The program with all operations of a kind lowered, and why some are not."""
    inside, claims, reasons = sunk(jaxpr), [], []
    for r in find(inside, op).raised:
        try:
            made = LOWERINGS[op](r, Options("v5e", shortest=1, asked=True))
            claims += [Claim(r.view, each.takes, each.gives, each.emit) for each in made]
        except Decline as why:
            reasons.append(str(why))
    return placed(inside, claims), reasons


@functools.cache
def rewritten(op: str, name: str) -> tuple[Jaxpr, Jaxpr, list[str]]:
    """The flat program of a spelling, the program with its operations lowered, and why some are not."""
    (spelling,) = (case.values[1] for case in CASES if case.values[3] == name)
    leaves, tree = jax.tree.flatten(spelling.args)
    jaxpr = jax.make_jaxpr(lambda *xs: jax.tree.leaves(spelling.fn(*jax.tree.unflatten(tree, xs))))(*leaves)
    return jaxpr, *replaced(jaxpr, op)


def is_lowered(jaxpr: Jaxpr) -> bool:
    return any(operation_of(eqn) is not None for eqn in equations(jaxpr))


def value(x: Any, seed: int) -> Any:
    """An argument: as it is, or made up where it is a shape; numbers of labels are small."""
    rng = np.random.default_rng(seed)
    if not isinstance(x, jax.ShapeDtypeStruct):
        return jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jnp.integer):
        return jnp.asarray(rng.integers(0, 2, x.shape), x.dtype)
    return jnp.asarray(rng.normal(size=x.shape), x.dtype)


def computed(program: Jaxpr, values: Sequence[Any], by: Sequence[int]) -> tuple[Any, Any]:
    """What a program gives, and the gradients of a sum of it by some of its arguments."""

    def loss(chosen: Any) -> Any:
        given = dict(zip(by, chosen, strict=True))
        outs = eval_jaxpr(program, *(given.get(i, x) for i, x in enumerate(values)))
        real = [y for y in outs if jnp.issubdtype(y.dtype, jnp.floating)]
        return sum(jnp.sum(jnp.sin(jnp.where(jnp.isfinite(y), y, 0).astype(jnp.float32))) for y in real), outs

    if not by:
        return eval_jaxpr(program, *values), []
    gradients, outs = jax.grad(loss, has_aux=True)([values[i] for i in by])
    return outs, gradients


def agree(got: Any, want: Any, narrow: float = 0.0, least: float = 1e-6) -> None:
    """narrow: the tolerance of the narrowest type that it computes in; least: what counts as large."""
    for a, b in zip(got, want, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if a.dtype.kind in "biu":
            np.testing.assert_array_equal(a, b)
            continue
        a, b = a.astype(np.float64), b.astype(np.float64)
        size = np.max(np.abs(b[np.isfinite(b)]), initial=least)
        np.testing.assert_allclose(a, b, rtol=0, atol=max(TOLERANCE["float32"], narrow) * size)


@pytest.mark.parametrize(("op", "spelling", "number", "name"), CASES)
def test_a_lowered_spelling_computes_the_same(op: str, spelling: Spelling, number: int, name: str) -> None:
    leaves = jax.tree.leaves(spelling.args)
    jaxpr, new, reasons = rewritten(op, name)
    if not is_lowered(new):
        assert reasons, "it is neither lowered nor is there a reason"
        return
    types = {str(v.aval.dtype) for eqn in equations(jaxpr) for v in eqn.outvars if hasattr(v.aval, "dtype")}
    narrow = max((TOLERANCE[t] for t in types if t in TOLERANCE), default=0.0)
    values = [value(x, i) for i, x in enumerate(leaves)]
    # Every eighth is differentiated as well, for the time it takes.
    differentiated = number % 8 == 0 and "while" not in {eqn.primitive.name for eqn in equations(jaxpr)}
    by = [i for i, x in enumerate(values) if differentiated and jnp.issubdtype(x.dtype, jnp.floating)]
    (got, gradients), (want, others) = jax.jit(lambda *xs: [computed(p, xs, by) for p in (new, jaxpr)])(
        *values
    )
    agree(got, want, narrow)
    # A gradient that is zero but for rounding is so in both.
    largest = max((np.max(np.abs(np.asarray(g, np.float32)), initial=0) for g in others), default=0.0)
    rounded = max((TOLERANCE.get(str(g.dtype), 0.0) for g in others), default=0.0)
    agree(gradients, others, max(4 * narrow, rounded), largest)


def test_most_spellings_of_attention_become_an_operation() -> None:
    """The others have a bias, dropout, or a mask of data for each query and key."""
    names = [name for op, _, _, name in (case.values for case in CASES) if op == "attention"]
    count = sum(is_lowered(rewritten("attention", name)[1]) for name in names)
    assert count >= 0.7 * len(names)
