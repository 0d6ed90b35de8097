"""Shard: where constraints go, what is left alone, what the plan is told; numbers are in test_plans."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.processes import twice
from xform import PlanError, printing
from xform.api import parallelize
from xform.higher_order import bodies
from xform.passes.shard import Shard
from xform.plan import Plan

BATCH, LENGTH, EMBED, MLP, VOCAB = 8, 6, 24, 40, 56
PARAMS = {
    "table": jax.ShapeDtypeStruct((VOCAB, EMBED), jnp.float32),
    "scale": jax.ShapeDtypeStruct((EMBED,), jnp.float32),
    "up": jax.ShapeDtypeStruct((EMBED, MLP), jnp.float32),
    "down": jax.ShapeDtypeStruct((MLP, EMBED), jnp.float32),
    "head": jax.ShapeDtypeStruct((EMBED, VOCAB), jnp.float32),
}
TOKENS = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)


def same(x, spec):
    return x


def model(params, tokens, constrain=same):
    x = constrain(params["table"].at[tokens].get(mode="clip"), "residual")
    x = x * params["scale"]
    h = constrain(x @ params["up"], "mlp")
    x = x + constrain(jnp.tanh(h) @ params["down"], "residual")
    logits = constrain(x @ params["head"], "logits")
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], axis=-1, mode="clip")
    return -chosen.mean()


def specs_in(jaxpr) -> list[P]:
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "sharding_constraint":
            found.append(eqn.params["sharding"].spec)
        for body in bodies(eqn):
            found += specs_in(body)
    return found


def traced(fn, *args, mesh, **options):
    return parallelize(fn, Plan(mesh, [Shard(**options)])).trace(*args)


def specs(program) -> dict[str, P]:
    return {leaf.path: s.spec for leaf, s in zip(program.inputs, program.in_shardings, strict=True)}


def test_constraints_go_on_the_lookup_the_products_and_nothing_else():
    program = traced(model, PARAMS, TOKENS, mesh={"fsdp": 4, "tensor": 2})
    mesh = parallelize(model, Plan({"fsdp": 4, "tensor": 2})).mesh
    places = {
        "residual": P("fsdp", None, "tensor"),
        "mlp": P("fsdp", None, "tensor"),
        "logits": P("fsdp", None, "tensor"),
    }

    def by_hand(params, tokens):
        return model(
            params,
            tokens,
            lambda x, place: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, places[place])),
        )

    wanted = parallelize(by_hand, Plan({"fsdp": 4, "tensor": 2})).trace(PARAMS, TOKENS)
    assert printing.diff(program.jaxpr, wanted.jaxpr) == []


def test_parameters_lie_as_maxtext_lays_them():
    program = traced(model, PARAMS, TOKENS, mesh={"fsdp": 4, "tensor": 2})
    assert specs(program) == {
        "[0]['table']": P("tensor", "fsdp"),
        "[0]['scale']": P("tensor"),
        "[0]['up']": P("fsdp", "tensor"),
        "[0]['down']": P("tensor", "fsdp"),
        "[0]['head']": P("fsdp", "tensor"),
        "[1]": P("fsdp"),
    }


def step(state, tokens):
    """Gradient descent with momentum: the smallest optimizer with a state."""
    params, momentum = state
    loss, gradients = jax.value_and_grad(model)(params, tokens)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
    return (jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum), loss


def test_gradients_lie_like_their_parameters():
    program = traced(step, (PARAMS, PARAMS), TOKENS, mesh={"fsdp": 8})
    gradients = [s for s in program.report.lines() if "gradient" in s]
    assert any("[embed x mlp]" in s and "P('fsdp',)" in s for s in gradients)
    assert any("[vocab x embed]" in s and "P(None, 'fsdp')" in s for s in gradients)


def test_the_next_state_lies_like_the_state():
    program = traced(step, (PARAMS, PARAMS), TOKENS, mesh={"fsdp": 4, "tensor": 2})
    outs = dict(zip((leaf.path for leaf in program.outputs), program.out_shardings, strict=True))
    ins = dict(zip((leaf.path for leaf in program.inputs), program.in_shardings, strict=True))
    for which in (0, 1):
        for name in PARAMS:
            assert outs[f"[0][{which}]['{name}']"] == ins[f"[0][{which}]['{name}']"]
    assert outs["[1]"].spec == P()


def test_zero1_splits_the_optimizer_and_not_the_parameters():
    program = traced(step, (PARAMS, PARAMS), TOKENS, mesh={"data": 8}, optimizer_axes=["data"])
    found = specs(program)
    assert found["[0][0]['up']"] == P()
    assert found["[0][1]['up']"] == P("data")
    assert found["[0][1]['down']"] == P(None, "data")  # embed in both
    assert not any("gradient" in line for line in program.report.lines())


def test_zero2_splits_gradients_as_it_splits_the_optimizer():
    options = dict(optimizer_axes=["data"], gradient_axes=["data"])
    program = traced(step, (PARAMS, PARAMS), TOKENS, mesh={"data": 8}, **options)
    lines = [line for line in program.report.lines() if "gradient" in line]
    assert any("[embed x mlp] P('data',)" in line for line in lines)
    assert any("[mlp x embed] P(None, 'data')" in line for line in lines)


def test_sequence_parallel_puts_the_norms_length_on_the_tensor_axis():
    program = traced(model, PARAMS, TOKENS, mesh={"fsdp": 4, "tensor": 2}, sequence_parallel=True)
    found = specs_in(program.jaxpr)
    assert P("fsdp", "tensor") in found  # residual stream: batch, length
    assert P("fsdp", None, "tensor") in found  # mlp hidden and logits


def scanned(params, tokens):
    def layer(x, weights):
        up, down = weights
        return x + jnp.tanh(x @ up) @ down, None

    x = params["table"].at[tokens].get(mode="clip")
    x, _ = jax.lax.scan(layer, x, (params["ups"], params["downs"]))
    logits = x @ params["head"]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], axis=-1, mode="clip").mean()


STACKED = {
    "table": PARAMS["table"],
    "head": PARAMS["head"],
    "ups": jax.ShapeDtypeStruct((3, EMBED, MLP), jnp.float32),
    "downs": jax.ShapeDtypeStruct((3, MLP, EMBED), jnp.float32),
}


def test_a_scans_carry_is_constrained_inside_its_body():
    program = traced(scanned, STACKED, TOKENS, mesh={"fsdp": 8})
    (loop,) = [e for e in program.jaxpr.eqns if e.primitive.name == "scan"]
    (body,) = bodies(loop)
    assert specs_in(body) == [P("fsdp"), P("fsdp"), P("fsdp")]  # up, down, and what is carried
    carried = next(e for e in body.eqns if body.outvars[0] in e.outvars)
    assert carried.primitive.name == "sharding_constraint"


def test_the_same_under_grad_inside_the_backward_scan():
    program = traced(jax.grad(scanned), STACKED, TOKENS, mesh={"fsdp": 8})
    loops = [e for e in program.jaxpr.eqns if e.primitive.name == "scan"]
    assert len(loops) == 2
    backward = specs_in(bodies(loops[1])[0])
    assert P("fsdp") in backward and P(None, "fsdp") in backward  # dW of up and of down, a layer at a time


def test_a_dimension_that_does_not_divide_drops_the_axis_and_says_so():
    odd = {**PARAMS, "up": jax.ShapeDtypeStruct((EMBED, 35), jnp.float32)}
    odd["down"] = jax.ShapeDtypeStruct((35, EMBED), jnp.float32)
    program = traced(model, odd, TOKENS, mesh={"fsdp": 4, "tensor": 2})
    assert specs(program)["[0]['up']"] == P("fsdp")
    dropped = [str(n) for n in program.report.of("dropped")]
    assert any("tensor=2 for mlp: 35 does not divide ([0]['up'])" in line for line in dropped)
    assert any("tensor=2 for activation_mlp" in line and "test_shard.py" in line for line in dropped)


def test_a_one_device_mesh_changes_nothing():
    before = jax.make_jaxpr(model)(PARAMS, TOKENS)
    program = parallelize(model, Plan({"fsdp": 1}, [Shard()]), devices=jax.devices()[:1]).trace(
        PARAMS, TOKENS
    )
    assert printing.diff(before, program.jaxpr) == []


def test_a_mesh_axis_nothing_lies_on_is_reported():
    program = traced(model, PARAMS, TOKENS, mesh={"diloco": 2, "fsdp": 4})
    (note,) = [n for n in program.report.of("declined") if "mesh axis" in n.what]
    assert note.what == "mesh axis diloco=2" and "same work" in note.why


def test_somebodys_own_shard_map_is_left_alone():
    mesh = jax.make_mesh((8,), ("i",), axis_types=(AxisType.Auto,))

    def own(x, w):
        return jax.shard_map(lambda a, b: a @ b, mesh=mesh, in_specs=(P("i"), P()), out_specs=P("i"))(x, w)

    args = jax.ShapeDtypeStruct((8, 24), jnp.float32), jax.ShapeDtypeStruct((24, 40), jnp.float32)
    program = traced(own, *args, mesh={"fsdp": 8})
    (call,) = [e for e in program.jaxpr.eqns if e.primitive.name == "shard_map"]
    assert specs_in(bodies(call)[0]) == []


def test_a_program_that_lays_itself_out_in_its_types_is_left_alone_and_says_so():
    own = jax.make_mesh((8,), ("data",))  # Explicit axes

    def product(x, w):
        return jnp.tanh(jax.sharding.reshard(x, P("data")) @ w)

    step = parallelize(product, Plan({"fsdp": 8}, [Shard()]))
    with jax.set_mesh(own):
        program = step.trace(jnp.ones((8, 24)), jnp.ones((24, 40)))
        assert step(jnp.ones((8, 24)), jnp.ones((24, 40))).sharding.spec == P("data", None)
    (note,) = program.report.of("declined")
    assert "Explicit mesh axes data" in note.why and "Auto" in note.why
    assert specs_in(program.jaxpr) == []


def test_examples_that_the_step_cuts_into_microbatches_are_split():
    def accumulated(params, tokens):
        def one(total, part):
            return jax.tree.map(jnp.add, total, jax.grad(model)(params, part)), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        return jax.lax.scan(one, zeros, tokens.reshape(2, BATCH, LENGTH))[0]

    tokens = jax.ShapeDtypeStruct((2 * BATCH, LENGTH), jnp.int32)
    program = traced(accumulated, PARAMS, tokens, mesh={"fsdp": 4, "tensor": 2})
    assert specs(program)["[1]"] == P("fsdp")
    cut = jax.ShapeDtypeStruct((2, BATCH, LENGTH), jnp.int32)
    assert specs(traced(accumulated, PARAMS, cut, mesh={"fsdp": 8}))["[1]"] == P(None, "fsdp")


def test_a_factored_moment_lies_as_the_dimensions_it_kept():
    optimizer = optax.adafactor(1e-2, min_dim_size_to_factor=4)

    def trained(state, tokens):
        params, moments = state
        updates, moments = optimizer.update(jax.grad(model)(params, tokens), moments, params)
        return optax.apply_updates(params, updates), moments

    state = (PARAMS, jax.eval_shape(optimizer.init, PARAMS))
    found = specs(traced(trained, state, TOKENS, mesh={"fsdp": 4, "tensor": 2}))
    assert found["[0][0]['up']"] == P("fsdp", "tensor")
    assert found["[0][1][0].v_row['up']"] == P("fsdp")
    assert found["[0][1][0].v_col['up']"] == P("tensor")
    assert found["[0][1][0].v_row['down']"] == P("fsdp")  # of the larger dimension's mean, embed is left
    assert found["[0][1][0].v['scale']"] == P("tensor")  # not factored


def test_a_rule_replaces_the_base_rule_of_its_name():
    program = traced(model, PARAMS, TOKENS, mesh={"fsdp": 8}, rules={"mlp": ["fsdp"], "embed": []})
    assert specs(program)["[0]['up']"] == P(None, "fsdp")
    assert specs(program)["[0]['down']"] == P("fsdp")


def test_alternatives_are_tried_in_order():
    rules = {"embed": [["fsdp", "tensor"], ["tensor"]], "mlp": [["fsdp"]]}
    found = specs(traced(model, PARAMS, TOKENS, mesh={"fsdp": 4, "tensor": 2}, rules=rules))
    assert found["[0]['up']"] == P("tensor", "fsdp")  # embed's first alternative is taken in part
    assert found["[0]['down']"] == P("fsdp", "tensor")


def test_a_rule_that_matches_nothing_is_an_error_that_says_what_there_is():
    with pytest.raises(PlanError, match=r"'mpl' matches nothing.*activation_mlp.*mlp.*vocab"):
        traced(model, PARAMS, TOKENS, mesh={"fsdp": 8}, rules={"mpl": ["fsdp"]})


def test_a_rule_that_matches_nothing_is_a_note_when_not_strict():
    program = traced(model, PARAMS, TOKENS, mesh={"fsdp": 8}, rules={"exp": ["fsdp"]}, strict=False)
    assert any(n.what == "rule exp" for n in program.report.of("declined"))


@pytest.mark.parametrize(
    "options, named",
    [
        ({"rules": {"mlp": ["tensro"]}}, "the rule 'mlp' names the mesh axis 'tensro'"),
        ({"optimizer_axes": ["data"]}, "optimizer_axes names the mesh axis 'data'"),
        ({"gradient_axes": ["data"]}, "gradient_axes names the mesh axis 'data'"),
        ({"sequence_parallel": True}, "sequence_parallel names the mesh axis 'tensor'"),
    ],
)
def test_an_axis_the_mesh_lacks_is_an_error(options, named):
    with pytest.raises(PlanError, match=f"{named}.*the mesh has fsdp"):
        traced(model, PARAMS, TOKENS, mesh={"fsdp": 8}, **options)


def test_the_reason_for_a_layout_names_the_roles_and_the_rules():
    program = traced(step, (PARAMS, PARAMS), TOKENS, mesh={"data": 8}, optimizer_axes=["data"])
    assert program.reasons["[0][1]['up']"].startswith("optimizer, embed x mlp: embed whole (no fsdp, ")
    assert program.reasons["[0][1]['up']"].endswith("autoregressive in the mesh), and embed also -> data")
    assert program.reasons["[0][0]['up']"].startswith("parameter, embed x mlp")
    assert program.reasons["[1]"].startswith("data, batch x length")


PROGRAM = """
import jax
import xform
from xform.models import llama
fn, args = llama.train_step(size="tiny", layers=2, batch=8, length=16, scan=False)
for options in ({}, {"collectives": "explicit", "overlap": ["prefetch", "permute"], "gather": "step"}):
    shard = xform.Shard(optimizer_axes=["data"], **options)
    plan = xform.Plan({"data": 2, "fsdp": 2, "tensor": 2}, [shard])
    lowered = xform.parallelize(fn, plan, donate_argnums=0).lower(*args)
    print(lowered.as_text(), lowered.report())
"""


@pytest.mark.slow  # starts two processes that trace and lower a training step
def test_two_processes_lower_the_sharded_step_to_the_same_bytes():
    texts = twice(PROGRAM)
    assert texts[0] == texts[1] and texts[0].count(b"sdy.sharding_constraint") > 20
    assert texts[0].count(b"sdy.manual_computation") == 1
