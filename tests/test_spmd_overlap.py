"""Loops whose collectives run beside another turn: what moves where in the program, and the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.shards import grid
from xform import Plan, Shard, parallelize
from xform.higher_order import bodies, equations
from xform.spmd import overlap, rings
from xform.spmd.ledger import ledger
from xform.spmd.traffic import GRADIENT
from xform.trace import Jaxpr, JaxprEqn

LAYERS = 4


def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"ups": (LAYERS, 16, 24), "downs": (LAYERS, 24, 16)}
    return {k: rng.normal(size=s).astype(np.float32) / 4 for k, s in shapes.items()}


def loss(params, x):
    @jax.checkpoint
    def layer(x, w):
        return x + jnp.tanh(x @ w["ups"]) @ w["downs"], None

    return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)


def step(params, x):
    value, gradients = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), value


X = np.random.default_rng(1).normal(size=(128, 16)).astype(np.float32)


def stepped(how: tuple[str, ...]):
    plan = Plan({"fsdp": 8}, [Shard(strict=False, collectives="explicit", overlap=how)])
    return parallelize(step, plan)


def loops(jaxpr: Jaxpr) -> list[JaxprEqn]:
    return [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "scan"]


def names(jaxpr: Jaxpr) -> list[str]:
    return [eqn.primitive.name for eqn in equations(jaxpr)]


@pytest.mark.parametrize("how", [("prefetch",), ("permute",), ("prefetch", "permute")], ids="+".join)
def test_numbers_are_those_of_one_device(how):
    want = jax.jit(step)(weights(), X)
    got = stepped(how)(weights(), X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), want, got)


def test_a_turn_gathers_the_next_ones_weights_and_scatters_the_last_ones_gradients():
    plain = stepped(()).trace(weights(), X)
    early = stepped(("prefetch",)).trace(weights(), X)
    forward, backward = loops(early.jaxpr)
    # The last turn of the forward loop, and the first and the last of the backward one, stand outside.
    assert (forward.params["length"], backward.params["length"]) == (LAYERS - 1, LAYERS - 2)
    (body,) = bodies(backward)
    reading = {v for eqn in body.eqns if eqn.primitive.name == "remat2" for v in eqn.invars}
    gathered = [e.outvars[0] for e in body.eqns if e.primitive.name == "all_gather"]
    assert gathered and reading.isdisjoint(gathered) and set(gathered) <= set(body.outvars)
    scattered = [e for e in equations(body) if e.primitive.name == "reduce_scatter"]
    assert len(scattered) == 2
    made = {v for eqn in body.eqns if eqn.primitive.name == "remat2" for v in eqn.outvars}
    assert not any(v in made for e in scattered for v in e.invars)
    # Nothing is sent in vain.
    before, after = (ledger(program.jaxpr, {"fsdp": 8}) for program in (plain, early))
    assert sum(s.total for s in before) == sum(s.total for s in after)
    said = str(early.report)
    assert "2 collectives of a loop run a turn early, 2 a turn late: 6.14 kB more on a device" in said


def test_permutes_take_the_place_of_gathers_and_scatters_in_loops():
    plain = ledger(stepped(()).trace(weights(), X).jaxpr, {"fsdp": 8})
    ringed = ledger(stepped(("permute",)).trace(weights(), X).jaxpr, {"fsdp": 8})
    assert sum(s.total for s in plain) == sum(s.total for s in ringed)
    inside = {s.kind for s in ringed if s.times == LAYERS}
    assert inside == {"permute"}
    assert any(GRADIENT in s.where for s in ringed if s.kind == "permute")


def test_a_loop_without_weights_stays_as_it_is():
    def sums(x):
        return jax.lax.scan(lambda c, row: (c + row, c * row), jnp.zeros(16), x)

    made = jax.make_jaxpr(sums)(X)
    (eqn,) = loops(made)
    assert overlap.cut(bodies(eqn)[0], 1) is None


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("dim", [0, 1])
def test_rings_give_what_the_collectives_give(n, dim):
    mesh = grid({"x": n})
    x = np.arange(n * 6 * n * 2, dtype=np.float32).reshape(n * 6, n * 2)
    spec = P("x") if dim == 0 else P(None, "x")

    def mapped(f, ins, out):
        return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=ins, out_specs=out, check_vma=False))

    gathered = mapped(lambda x: rings.gather(x, "x", n, dim), spec, P())(x)
    np.testing.assert_array_equal(gathered, x)

    def terms(x):
        return x * (1 + jax.lax.axis_index("x"))

    got = mapped(lambda x: rings.scatter(terms(x), "x", n, dim), P(), spec)(x)
    np.testing.assert_array_equal(got, x * (n * (n + 1) // 2))
