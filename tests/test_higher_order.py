"""Bodies: found by type, rebuilt in place, and what is passed into and out of each of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.programs import Programs, W, X, flat
from xform.higher_order import OPAQUE, SCATTERS, bodies, carries, enter, operands, scan_parts
from xform.rewrite import rewrite
from xform.trace import Jaxpr, check_jaxpr, trace_flat, typeof


def traced(f, *args) -> Jaxpr:
    return trace_flat(flat(f), [typeof(jnp.asarray(a)) for a in args or (W, X)], "f")


def holder(name: str):
    """The first equation with bodies in a program of tests/programs.py."""
    return next(e for e in traced(getattr(Programs(), name)).eqns if bodies(e))


BODIES = {
    "layers": ("jit", 1), "scan": ("scan", 1), "while_loop": ("while", 2), "cond": ("cond", 2),
    "custom_jvp": ("custom_jvp_call", 1), "custom_vjp": ("custom_vjp_call", 1), "remat": ("remat2", 1),
    "shard_map": ("shard_map", 1), "linear_solve": ("custom_linear_solve", 4),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_bodies_are_found_by_type(name):
    primitive, number = BODIES[name]
    eqn = holder(name)
    assert eqn.primitive.name == primitive and len(bodies(eqn)) == number


@pytest.mark.parametrize("name", BODIES)
def test_entering_without_a_change_gives_the_same_parameters(name):
    eqn = holder(name)
    seen = []
    assert enter(eqn, lambda body, number: seen.append((number, body)) or body) is eqn.params
    assert seen == list(enumerate(bodies(eqn)))


@pytest.mark.parametrize("name", BODIES)
def test_a_changed_body_takes_its_place(name):
    eqn = holder(name)
    last = len(bodies(eqn)) - 1
    params = enter(eqn, lambda body, number: body.replace() if number == last else body)
    before, after = bodies(eqn), bodies(eqn.replace(params=params))
    assert [a is b for a, b in zip(before, after, strict=True)] == [True] * last + [False]
    assert list(params) == list(eqn.params)


@pytest.mark.parametrize("name", ["custom_jvp", "custom_vjp"])
def test_the_rule_of_a_changed_body_is_changed_when_it_is_asked_for(name):
    eqn = holder(name)
    numbers = []
    params = enter(eqn, lambda body, number: numbers.append(number) or body.replace())
    assert numbers == [0]
    rule = params["jvp_jaxpr_fun" if name == "custom_jvp" else "fwd_jaxpr_thunk"]
    zeros = [False] * (len(eqn.invars) - eqn.params["num_consts"])
    first, again = rule.call_wrapped(*zeros), rule.call_wrapped(*zeros)
    assert numbers == [0, -1] and first[0] is again[0]


def test_what_combines_two_scalars_and_kernels_are_opaque():
    def f(x):
        return jax.lax.reduce(x, 0.0, jax.lax.mul, (0,)), x.at[0].add(1.0), jax.lax.reduce_precision(x, 5, 3)

    for eqn in [*traced(f, X).eqns, *traced(Programs().pallas_call).eqns]:
        if eqn.primitive.name in OPAQUE:
            assert not bodies(eqn)
            assert enter(eqn, lambda body, number: body.replace()) is eqn.params


WRITES = {
    "scatter": lambda x, i, u: x.at[i].set(u),
    "scatter-add": lambda x, i, u: x.at[i].add(u),
    "scatter-sub": lambda x, i, u: x.at[i].subtract(u),
    "scatter-mul": lambda x, i, u: x.at[i].multiply(u),
    "scatter-min": lambda x, i, u: x.at[i].min(u),
    "scatter-max": lambda x, i, u: x.at[i].max(u),
}


def scatter_of(write):
    found = traced(write, np.ones((7, 5), np.float32), np.int32([1, 4, 2]), np.ones((3, 5), np.float32)).eqns
    (eqn,) = (e for e in found if "dimension_numbers" in e.params and e.primitive.name != "gather")
    return eqn


def test_the_scatters_are_called_what_jax_calls_them():
    assert tuple(scatter_of(write).primitive.name for write in WRITES.values()) == SCATTERS == tuple(WRITES)


@pytest.mark.parametrize("write", [*list(WRITES.values())[1:], lambda x, i, u: x.at[i].apply(jnp.sin)])
def test_what_a_scatter_combines_two_scalars_by_is_not_entered(write):
    eqn = scatter_of(write)
    assert isinstance(eqn.params["update_jaxpr"], Jaxpr)
    assert not bodies(eqn)
    assert enter(eqn, lambda body, number: body.replace()) is eqn.params


def test_operands_of_a_loop_are_its_constants_and_first_values():
    def f(w, x):
        return jax.lax.scan(lambda c, row: ((c[1] @ w, c[0]), row), (x[0], x[1]), x)

    (eqn,) = (e for e in traced(f).eqns if e.primitive.name == "scan")
    assert scan_parts(eqn) == (1, 2, 1)
    assert operands(eqn, 0) == [0, 1, 2, 3]
    assert carries(eqn, 0) == {0: 1, 1: 2}


def test_the_condition_and_the_body_of_a_while_loop_share_what_is_carried():
    def f(w, x):
        return jax.lax.while_loop(lambda s: s.sum() < w.sum(), lambda s: s @ w + x, x)

    eqn = next(e for e in traced(f).eqns if e.primitive.name == "while")
    assert eqn.params["cond_nconsts"] == 1 and eqn.params["body_nconsts"] == 2
    assert operands(eqn, 0) == [0, 3] and operands(eqn, 1) == [1, 2, 3]
    assert carries(eqn, 0) == {} and carries(eqn, 1) == {0: 2}


def test_the_predicate_of_a_cond_is_no_operand_of_its_branches():
    eqn = holder("cond")
    assert operands(eqn, 0) == operands(eqn, 1) == list(range(1, len(eqn.invars)))


def test_the_functions_of_a_linear_solve_have_their_own_constants_and_the_solvers_the_right_hand_side():
    eqn = holder("linear_solve")
    (matvec, _, solve, _) = eqn.params["const_lengths"]
    right = len(eqn.invars) - 1
    assert operands(eqn, 0) == [*range(matvec), None]
    assert operands(eqn, 2)[-1] == right and len(operands(eqn, 2)) == solve + 1
    assert [len(operands(eqn, n)) for n in range(4)] == [len(b.invars) for b in bodies(eqn)]


@pytest.mark.parametrize(
    "name", ["layers", "scan", "while_loop", "cond", "custom_vjp", "remat", "linear_solve"]
)
def test_an_operand_has_the_type_of_the_input_that_it_is(name):
    eqn = holder(name)
    for number, body in enumerate(bodies(eqn)):
        consts, carry, _ = scan_parts(eqn) if name == "scan" else (len(body.invars), 0, 0)
        for i, (v, position) in enumerate(zip(body.invars, operands(eqn, number), strict=True)):
            if position is None:
                continue
            aval = eqn.invars[position].aval
            assert v.aval.shape == (aval.shape[1:] if i >= consts + carry else aval.shape)


def test_the_constants_of_a_remat_body_become_operands():
    jaxpr = traced(lambda w, x: jax.checkpoint(lambda x: jnp.tanh(x @ w))(x))
    scale = jnp.asarray(np.float32([1, 2, 3, 4, 5]))
    new = rewrite(jaxpr, lambda s: [s.bind()[0] * scale] if s.name == "tanh" else None)
    (eqn,) = new.eqns
    assert not eqn.params["jaxpr"].consts and len(eqn.invars) == 3 and len(new.consts) == 1
    check_jaxpr(new)
