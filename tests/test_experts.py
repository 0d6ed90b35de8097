"""Mixtures of experts under MaxText's rule files: tokens sent by a one-hot product, or sorted for a ragged
dot.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from tests.layers import f, i, inputs, picked, told
from tests.test_constraints import constrained
from xform import plans
from xform.api import parallelize
from xform.check import check

BATCH, LENGTH, EMBED, MLP, EXPERTS, VOCAB, CAPACITY = 8, 16, 24, 40, 8, 48, 6


def sent(p, x):
    """Each token to the expert that scores it highest, as far as there is room (Fedus et al. 2021)."""
    scores = jax.nn.softmax(x @ p["router"])
    chosen = jax.nn.one_hot(jnp.argmax(scores, -1), EXPERTS)
    place = jnp.cumsum(chosen, axis=1) * chosen - 1
    mask = jax.nn.one_hot(place.astype(jnp.int32), CAPACITY) * chosen[..., None]
    taken = jnp.einsum("ble,blxc->bxce", x, mask)
    made = jnp.einsum("bxcm,xme->bxce", jnp.tanh(jnp.einsum("bxce,xem->bxcm", taken, p["up"])), p["down"])
    return jnp.einsum("bxce,blxc->ble", made, mask * scores.max(-1)[..., None, None])


def grouped(p, x):
    """The same without a limit, tokens sorted by expert."""
    flat = x.reshape(-1, EMBED)
    scores = jax.nn.softmax(flat @ p["router"])
    chosen = jnp.argmax(scores, -1)
    order = jnp.argsort(chosen)
    sizes = jnp.bincount(chosen, length=EXPERTS).astype(jnp.int32)
    made = jax.lax.ragged_dot(jnp.tanh(jax.lax.ragged_dot(flat[order], p["up"], sizes)), p["down"], sizes)
    return (made[jnp.argsort(order)] * scores.max(-1, keepdims=True)).reshape(x.shape)


def loss_with(experts):
    def loss(p, tokens, labels):
        x = p["table"][tokens]
        return picked((x + experts(p, x)) @ p["head"], labels)

    return loss


PARAMS = {
    "table": f(VOCAB, EMBED),
    "router": f(EMBED, EXPERTS),
    "up": f(EXPERTS, EMBED, MLP),
    "down": f(EXPERTS, MLP, EMBED),
    "head": f(EMBED, VOCAB),
}
ARGS = (PARAMS, i(BATCH, LENGTH), i(BATCH, LENGTH))


@pytest.mark.parametrize("experts", [sent, grouped])
@pytest.mark.parametrize("differentiated", [False, True])
def test_what_an_argmax_chooses_among_are_experts(experts, differentiated):
    loss = loss_with(experts)
    found = inputs(told(jax.grad(loss) if differentiated else loss, ARGS))
    assert found["0.router"] == "embed | experts"
    assert found["0.up"] == "experts | embed | mlp" and found["0.down"] == "experts | mlp | embed"


def test_classes_that_are_only_counted_are_no_experts():
    def accuracy(p, images, labels):
        hidden = jnp.tanh(images.reshape(-1, 35) @ p["w"])
        return (jnp.argmax(hidden @ p["head"], -1) == labels).mean()

    args = {"w": f(35, 24), "head": f(24, 11)}, f(3, 5, 7), i(3)
    assert "experts" not in inputs(told(accuracy, args))["0.head"]


FILES = {
    "cp_as_ep": dict(fsdp=2, context=2, expert=2),
    "ep_as_cp": dict(fsdp=2, expert=4),
    "ep_as_dp": dict(fsdp=2, expert=4),
    "fsdp_as_dp_for_attn": dict(fsdp=2, expert=4),
    "shard_exp_on_fsdp": dict(fsdp=4, expert=2),
}
LAID = {  # router, up, and what the experts make of the tokens sent to them
    "cp_as_ep": (
        P("fsdp", ("context", "expert")),
        P(("context", "expert"), "fsdp"),
        ("('context', 'expert')", "'fsdp'"),
    ),
    "ep_as_cp": (P("fsdp", "expert"), P("expert", "fsdp"), ("'expert'", "'fsdp'")),
    "ep_as_dp": (P("fsdp", "expert"), P("expert", "fsdp"), ("None", "('fsdp', 'expert')")),
    "fsdp_as_dp_for_attn": (P(None, "expert"), P("expert", "fsdp"), ("None", "('fsdp', 'expert')")),
    "shard_exp_on_fsdp": (P(None, ("expert", "fsdp")), P(("expert", "fsdp")), ("'expert'", "'fsdp'")),
}


@pytest.mark.parametrize("name", FILES)
def test_rule_files_lay_out_experts_and_what_is_sent_to_them(name):
    program = parallelize(loss_with(sent), getattr(plans.maxtext, name)(**FILES[name])).trace(*ARGS)
    specs = {leaf.path: s.spec for leaf, s in zip(program.inputs, program.in_shardings, strict=True)}
    router, up, made = LAID[name]
    assert (specs["[0]['router']"], specs["[0]['up']"]) == (router, up)
    (hidden,) = [what for what in constrained(program) if "x mlp x" in what or "mlp]" in what]
    assert hidden.startswith("activation [experts x mlp x batch x axis")
    assert f"P({made[0]}, None, {made[1]}, " in hidden


def test_scores_of_experts_lie_as_the_tokens_do():
    program = parallelize(loss_with(sent), plans.maxtext.cp_as_ep(**FILES["cp_as_ep"])).trace(*ARGS)
    (scores,) = [what for what in constrained(program) if "experts]" in what]
    assert scores.endswith("[batch x length x experts] P(('fsdp', 'expert'), 'context', UNCONSTRAINED)")


@pytest.mark.slow  # compiles for one and for eight devices
def test_tokens_sent_to_experts_are_those_of_one_device():
    result = check(loss_with(sent), ARGS, plans.maxtext.cp_as_ep(**FILES["cp_as_ep"]))
    assert result.ok, str(result)
