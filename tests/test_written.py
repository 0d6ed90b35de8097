"""Which collectives a plan takes, what is said of it, and what cannot be written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.shards import grid
from xform import Plan, PlanError, Shard, parallelize, topologies
from xform.higher_order import equations
from xform.spmd.written import dotted

PARAMS = {
    "up": jax.ShapeDtypeStruct((64, 256), jnp.float32),
    "down": jax.ShapeDtypeStruct((256, 64), jnp.float32),
}
TOKENS = jax.ShapeDtypeStruct((1024, 64), jnp.float32)


def step(params, x):
    def loss(params):
        return jnp.mean((x + jnp.tanh(x @ params["up"]) @ params["down"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), value


def traced(mesh, topology=None, fn=step, **options):
    devices = topologies.parse(topology).devices() if topology else None
    plan = Plan(mesh, [Shard(strict=False, **options)])
    return parallelize(fn, plan, devices=devices).trace(PARAMS, TOKENS)


def is_written(program):
    return any(eqn.primitive.name == "shard_map" for eqn in equations(program.jaxpr))


def test_on_a_whole_slice_collectives_are_written_out_in_stages():
    program = traced({"fsdp": 16}, "v5e-16")
    assert is_written(program)
    text = str(program.report)
    # Scatters over the whole slice would be all-reduces: the compiler's prediction counts them twice.
    assert "collectives written out: 245.77 kB a device and step, the compiler's 368.65 kB" in text
    assert "shard: along fsdp: 245.77 kB: fsdp.minor 49.15 kB, fsdp.major 196.61 kB" in text


def test_auto_leaves_them_to_the_compiler():
    assert not is_written(traced({"fsdp": 16}, "v5e-16", collectives="auto"))


def test_where_links_are_unknown_they_are_the_compilers_unless_asked():
    program = traced({"fsdp": 8})
    assert not is_written(program)
    assert "collectives are the compiler's: nothing is known of these devices' links" in str(program.report)
    assert is_written(traced({"fsdp": 8}, collectives="explicit"))


def test_a_region_over_another_mesh_is_declined_and_the_line_named():
    mesh = grid({"fsdp": 4})

    def own(params, x):
        x = jax.shard_map(jnp.sin, mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp"))(x)
        return step(params, x)

    says = r"at test_written.py:\d+ .* has an axis 'fsdp' of 4, which in the plan's mesh is 8 devices"
    with pytest.raises(PlanError, match=says):
        traced({"fsdp": 8}, fn=own, collectives="explicit")


def test_an_axis_that_is_left_to_the_compiler_must_be_there():
    with pytest.raises(PlanError, match="automatic names the mesh axis 'tensr'; the mesh has fsdp"):
        traced({"fsdp": 8}, collectives="explicit", automatic=["tensr"])


def test_an_axis_can_be_left_to_the_compiler():
    plan = Plan({"fsdp": 2, "tensor": 4}, [Shard(strict=False, collectives="explicit", automatic=["tensor"])])
    made = parallelize(step, plan)
    rng = np.random.default_rng(0)
    params = {k: rng.normal(size=v.shape).astype(np.float32) / 8 for k, v in PARAMS.items()}
    x = rng.normal(size=TOKENS.shape).astype(np.float32)
    (region,) = [e for e in equations(made.trace(params, x).jaxpr) if e.primitive.name == "shard_map"]
    assert region.params["newly_manual_axes"] == {"fsdp"}
    want, got = jax.jit(step)(params, x), made(params, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), want, got)


@pytest.mark.parametrize(
    "path, name",
    [
        ("['params']['head']['kernel']", "params.head.kernel"),
        ("[0].params['mlp/~/linear_0']['w']", "0.params.mlp.~.linear_0.w"),
        ("", ""),
    ],
    ids=["dict", "haiku", "none"],
)
def test_a_weights_path_can_stand_in_a_name_stack(path, name):
    assert dotted(path) == name
