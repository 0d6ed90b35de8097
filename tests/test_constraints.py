"""Which values of a program get a sharding constraint, and which need none."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.layers import HEADED, attention, block, f, i, model_of, picked
from tests.test_shard import EMBED, PARAMS, STACKED, TOKENS, model, specs_in, traced
from xform.higher_order import bodies, equations

LENGTH = 8


def attended(p, tokens, labels):
    x = p["table"][tokens]
    for weights in p["layers"]:
        x = block(weights, x)
    return picked(x @ p["table"].T, labels)


ATTENDED = (model_of(**HEADED), i(2, LENGTH), i(2, LENGTH))


def constrained(program) -> dict[str, int]:
    """What was constrained to what, and how often."""
    notes = (n.what for n in program.report.of("did") if n.what.startswith("constrained"))
    counted = (note.removeprefix("constrained ").split(" x ", 1) for note in notes)
    return {what: int(count) for count, what in counted}


def test_queries_keys_values_and_the_output_of_attention_are_constrained_and_scores_are_not():
    found = constrained(traced(attended, *ATTENDED, mesh={"fsdp": 2, "tensor": 1, "data": 4}))
    assert found == {
        "activation [batch x length x embed] P('fsdp',)": 2,  # the lookup, and what attention adds
        "activation [batch x length x kv_heads x head_dim] P('fsdp',)": 3,
        "activation [batch x kv_heads x head_dim x length] P('fsdp',)": 1,
        "activation [batch x length x vocab] P('fsdp',)": 1,
    }


def test_products_of_two_activations_in_a_backward_pass_follow_from_their_operands():
    program = traced(jax.grad(attended), *ATTENDED, mesh={"fsdp": 2, "data": 4})
    inner = [what for what in constrained(program) if "kv_heads x head_dim x length" in what]
    assert inner == ["activation [batch x kv_heads x head_dim x length] P('fsdp',)"]
    assert constrained(program)[inner[0]] == 1  # forward only


def test_recomputed_attention_is_part_of_the_backward_pass():
    def loss(p, tokens, labels):
        x = p["table"][tokens]
        x = jax.checkpoint(block)(p["layers"][0], x)
        return picked(x @ p["table"].T, labels)

    found = constrained(traced(jax.grad(loss), *ATTENDED, mesh={"fsdp": 2, "data": 4}))
    assert found["activation [batch x kv_heads x head_dim x length] P('fsdp',)"] == 1
    assert found["activation [batch x length x kv_heads x head_dim] P('fsdp',)"] >= 6  # q, k, v, twice


def test_a_product_that_is_carried_is_constrained_once_through_cast_and_transpose():
    def loss(params, tokens):
        def layer(x, weights):
            up, down = weights
            return (jnp.tanh(x.T @ up) @ down).astype(jnp.bfloat16).T, None

        x = params["table"].at[tokens].get(mode="clip").astype(jnp.bfloat16).T
        x, _ = jax.lax.scan(layer, x, (params["ups"], params["downs"]))
        return (x.T @ params["head"]).mean()

    program = traced(loss, STACKED, i(8), mesh={"fsdp": 8})
    (loop,) = [e for e in program.jaxpr.eqns if e.primitive.name == "scan"]
    assert len(specs_in(bodies(loop)[0])) == 2  # up and down, and what is carried is down


def test_what_a_layer_called_by_a_loop_gives_is_carried():
    def loss(params, tokens):
        def layer(x, weights):
            up, down = weights
            return x + jnp.tanh(x @ up) @ down

        x = params["table"].at[tokens].get(mode="clip")
        call = jax.jit(layer)
        x, _ = jax.lax.scan(lambda x, w: (call(x, w), None), x, (params["ups"], params["downs"]))
        return (x @ params["head"]).mean()

    program = traced(loss, STACKED, TOKENS, mesh={"fsdp": 8})
    assert constrained(program)["carried activation [batch x length x embed] P('fsdp',)"] == 1


def test_what_the_user_constrains_is_left_to_him():
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    own = NamedSharding(mesh, P("tensor"))

    def constrain(x, place):
        return jax.lax.with_sharding_constraint(x.astype(jnp.bfloat16), own) if place == "mlp" else x

    program = traced(lambda p, t: model(p, t, constrain), PARAMS, TOKENS, mesh={"fsdp": 4, "tensor": 2})
    assert specs_in(program.jaxpr).count(P("tensor")) == 1
    assert not any("mlp]" in what for what in constrained(program))


def test_a_program_of_one_example_is_constrained_along_its_length():
    args = (ATTENDED[0], i(1, LENGTH), i(1, LENGTH))
    found = constrained(traced(jax.grad(attended), *args, mesh={"data": 2, "context": 4}))
    assert any("activation [1 x length x embed] P(None, 'context')" in what for what in found)
    assert any(what.startswith("gradient [kv_heads x head_dim x embed]") for what in found)


def test_a_product_of_weights_alone_is_no_gradient():
    def loss(params, tokens):
        merged = dict(params, up=params["up"] + params["a"] @ params["b"])
        return model(merged, tokens)

    adapted = PARAMS | {"a": f(EMBED, 5), "b": f(5, 40)}
    program = traced(loss, adapted, TOKENS, mesh={"fsdp": 8})
    assert not any("gradient" in what for what in constrained(program))


def test_attention_written_with_its_batch_in_a_vmap_is_constrained_alike():
    def one(p, x):
        return block(p, x[None], attention)[0]

    def loss(p, tokens, labels):
        x = jax.vmap(one, (None, 0))(p["layers"][0], p["table"][tokens])
        return picked(x @ p["table"].T, labels)

    program = traced(loss, *ATTENDED, mesh={"fsdp": 2, "data": 4})
    products = [e for e in equations(program.original) if e.primitive.name == "dot_general"]
    assert sum(constrained(program).values()) == len(products)  # all but the scores, and the lookup
