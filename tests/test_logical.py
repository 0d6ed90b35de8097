"""MaxText's names for the dimensions of a small model with attention, an mlp and experts."""

import jax
import jax.numpy as jnp

from xform.axes import find_axes
from xform.models import llama
from xform.roles import find_roles
from xform.roles.logical import logical_names


def names_of(fn, args):
    jaxpr = jax.make_jaxpr(fn)(*args)
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_flatten_with_path(args)[0]]
    roles = find_roles(find_axes(jaxpr), None, paths)
    named = {
        path: [d.name for d in logical_names(roles, roles.axes.root, v)]
        for path, v in zip(paths, jaxpr.invars, strict=True)
    }
    return named, roles, jaxpr


def test_weights_of_llama_have_maxtexts_names():
    named, _, _ = names_of(*llama.loss(size="tiny", scan=True))
    layer = "[0]['layers']"
    assert named["[0]['embed']['embedding']"] == ["vocab", "embed_vocab"]
    assert named["[0]['head']['kernel']"] == ["embed_vocab", "vocab"]
    assert named["[0]['norm']['scale']"] == ["norm"]
    assert named[f"{layer}['mlp_norm']['scale']"] == ["layers", "norm"]
    assert named[f"{layer}['attention']['query']['kernel']"] == [
        "layers",
        "embed_attn",
        "heads",
        "kv_head_dim",
    ]
    assert named[f"{layer}['attention']['key']['kernel']"] == [
        "layers",
        "embed_attn",
        "kv_heads",
        "kv_head_dim",
    ]
    assert named[f"{layer}['mlp']['up']['kernel']"] == ["layers", "embed", "mlp"]
    assert named["[1]['inputs']"] == ["activation_embed_and_logits_batch", "activation_norm_length"]


def test_activations_are_told_apart_by_what_else_they_have():
    _, roles, _ = names_of(*llama.loss(size="tiny", scan=True))
    seen = {
        tuple(d.name for d in logical_names(roles, scope, v))
        for scope in roles.axes.scopes
        for eqn in scope.jaxpr.eqns
        if eqn.primitive.name == "dot_general"
        for v in eqn.outvars
    }
    assert ("activation_batch", "activation_norm_length", "activation_embed") in seen
    assert ("activation_batch", "activation_length", "activation_mlp") in seen
    assert ("activation_embed_and_logits_batch", "activation_length", "activation_vocab") in seen
    query = ("activation_kv_batch", "activation_length_attn", "activation_heads", "activation_kv_head_dim")
    assert query in seen


def test_all_heads_together_are_as_many_as_can_be_split():
    fn, args = llama.loss(size="tiny", scan=True)
    jaxpr = jax.make_jaxpr(fn)(*args)
    roles = find_roles(find_axes(jaxpr))
    sizes = {d.name: d.size for v in jaxpr.invars for d in logical_names(roles, roles.axes.root, v)}
    assert (sizes["heads"], sizes["kv_heads"]) == (12, 4)


def test_experts_refine_the_names_beside_them():
    def moe(params, x):
        gates = jax.nn.softmax(x @ params["router"])
        h = jnp.tanh(jnp.einsum("ble,xem->blxm", x, params["up"]))
        return jnp.einsum("blxm,xme,blx->ble", h, params["down"], gates)

    def loss(params, tokens):
        x = params["table"][tokens]
        return (moe(params, x) @ params["table"].T).mean()

    params = {"table": (56, 24), "router": (24, 5), "up": (5, 24, 40), "down": (5, 40, 24)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in params.items()}
    named, _, _ = names_of(loss, (params, jax.ShapeDtypeStruct((3, 7), jnp.int32)))
    assert named["[0]['router']"] == ["embed_router", "exp"]
    assert named["[0]['up']"] == ["exp", "embed_moe", "mlp_moe"]
    assert named["[0]['down']"] == ["exp", "mlp_moe", "embed_moe"]
