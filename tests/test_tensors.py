"""The names of tensors: the table for the models here, the public ones, and layers of every spelling."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.layers import TOKENS, attention, f, i, language_model, picked
from tests.public import PUBLIC
from xform.axes import find_axes
from xform.higher_order import bodies
from xform.models import encoder_decoder, gpt2, llama
from xform.roles import Roles, find_roles
from xform.roles.evidence import Evidence
from xform.tensors import PRODUCTS, Place, describe_tensors, name_tensors, tensor_rows
from xform.tensors.names import name_products
from xform.trace import Jaxpr


def named(fn: Callable, args: Any) -> tuple[dict[Place, str], Roles]:
    jaxpr = jax.make_jaxpr(fn)(*args)
    leaves, _ = jax.tree_util.tree_flatten_with_path(args)
    roles = find_roles(find_axes(jaxpr), None, [jax.tree_util.keystr(path) for path, _ in leaves])
    return name_tensors(jaxpr, roles), roles


def equation(jaxpr: Jaxpr, path: Any, index: int) -> Any:
    for at, number in path:
        jaxpr = bodies(jaxpr.eqns[at])[number]
    return jaxpr.eqns[index]


def by_weight(fn: Callable, args: Any) -> dict[str, str]:
    """The names of projections by the path of their weight; numbers of layers as "#", which agree."""
    names, roles = named(fn, args)
    evidence = Evidence(roles.axes)
    paths = dict(zip(roles.axes.jaxpr.invars, roles.paths, strict=True))
    found: dict[str, str] = {}
    for (path, index, _), name in names.items():
        if name == "decoder_layer_input":
            continue
        scope = roles.axes.scope(path)
        eqn = equation(roles.axes.jaxpr, path, index)
        while eqn.primitive.name in ("add", "convert_element_type", "reshape"):
            eqn = scope.jaxpr.eqns[scope.makers[eqn.invars[0]]]
        if eqn.primitive.name not in PRODUCTS:
            continue
        sources = [evidence.source(scope, v) for v in eqn.invars[:2] if not roles.is_activation(scope, v)]
        for source in sources:
            key = re.sub(r"\['?([^\]']*)'?\]", r".\1", paths[source]).removeprefix(".0.")
            key = re.sub(r"(?<=[._])\d+(?=\.)", "#", key)
            assert found.setdefault(key, name) == name, paths[source]
    return found


def counted(fn: Callable, args: Any) -> dict[str, int]:
    names, _ = named(fn, args)
    return {name: list(names.values()).count(name) for name in sorted(set(names.values()))}


HEADS = {"query": "query_proj", "key": "key_proj", "value": "value_proj", "out": "out_proj"}
SWIGLU = {"gate": "mlpwi_0", "up": "mlpwi_1", "down": "mlpwo"}
UNGATED = {"up": "mlpwi", "down": "mlpwo"}
ATTENTION = ("attention_out", "context", "out_proj")


def below(prefix: str, names: dict[str, str]) -> dict[str, str]:
    return {f"{prefix}{key}": name for key, name in names.items()}


def kernels(names: dict[str, str]) -> dict[str, str]:
    return {f"{key}.kernel": name for key, name in names.items()}


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("scan", [False, True])
def test_models_scanned_unrolled_and_recomputed(scan: bool, remat: bool) -> None:
    fn, args = llama.loss(scan=scan, remat=remat)
    layer = "layers." if scan else "layers.#."
    assert by_weight(fn, args) == {
        "head.kernel": "logits",
        **below(f"{layer}attention.", kernels(HEADS)),
        **below(f"{layer}mlp.", kernels(SWIGLU)),
    }
    fn, args = gpt2.loss(scan=scan, remat=remat)
    layer = "layers." if scan else "layer_#."
    assert by_weight(fn, args) == {
        "embed.embedding": "logits",
        **below(f"{layer}attention.", kernels({"qkv": "qkv_proj", "out": "out_proj"})),
        **below(layer, kernels(UNGATED)),
    }
    fn, args = encoder_decoder.loss(scan=scan, remat=remat)
    layer = "layers." if scan else "layers.#."
    assert by_weight(fn, args) == {
        "embed": "logits",
        **below(f"encoder.{layer}", UNGATED | below("self.", HEADS)),
        **below(f"decoder.{layer}", UNGATED | below("self.", HEADS) | below("cross.", HEADS)),
    }


@pytest.mark.parametrize(("scan", "times"), [(True, 1), (False, 2)])
def test_every_layer_has_exactly_its_names(scan: bool, times: int) -> None:
    split = ("query_proj", "key_proj", "value_proj")
    inputs = {"decoder_layer_input": times}
    assert counted(*llama.loss(scan=scan)) == {
        **dict.fromkeys((*ATTENTION, *split, "mlpwi_0", "mlpwi_1", "mlpwo"), times),
        "logits": 1,
        **inputs,
    }
    assert counted(*gpt2.loss(scan=scan)) == {
        **dict.fromkeys((*ATTENTION, "qkv_proj", "mlpwi", "mlpwo"), times),
        "logits": 1,
        **inputs,
    }
    assert counted(*encoder_decoder.loss(scan=scan)) == {
        **dict.fromkeys((*ATTENTION, *split), 3 * times),
        **dict.fromkeys(("mlpwi", "mlpwo"), 2 * times),
        "logits": 1,
        "decoder_layer_input": 2 * times,
    }


def test_a_decoding_step_has_the_same_names() -> None:
    assert by_weight(*llama.decode_step(scan=True)) == {
        "head.kernel": "logits",
        **below("layers.attention.", kernels(HEADS)),
        **below("layers.mlp.", kernels(SWIGLU)),
    }


QKVO = {"q_proj": "query_proj", "k_proj": "key_proj", "v_proj": "value_proj"}
T5 = {"q": "query_proj", "k": "key_proj", "v": "value_proj", "o": "out_proj"}
LLAMA = {
    **below("model.layers.#.self_attn.", QKVO | {"o_proj": "out_proj"}),
    **below("model.layers.#.mlp.", {"gate_proj": "mlpwi_0", "up_proj": "mlpwi_1", "down_proj": "mlpwo"}),
    "lm_head": "logits",
}


def encoder_only(attention: str, output: str) -> dict[str, str]:
    return {
        **below(f"{output}.", {"intermediate.dense": "mlpwi", "output.dense": "mlpwo"}),
        f"{output}.attention.output.dense": "out_proj",
        **below(f"{attention}.", {"query": "query_proj", "key": "key_proj", "value": "value_proj"}),
    }


def whisper(side: str, *attentions: str) -> dict[str, str]:
    heads = QKVO | {"out_proj": "out_proj"}
    found = below(f"model.{side}.layers.#.", {"fc1": "mlpwi", "fc2": "mlpwo"})
    for each in attentions:
        found |= below(f"model.{side}.layers.#.{each}.", heads)
    return found


def t5(side: str, *attentions: str) -> dict[str, str]:
    found = below(f"{side}.block.#.layer.#.DenseReluDense.", {"wi": "mlpwi", "wo": "mlpwo"})
    for each in attentions:
        found |= below(f"{side}.block.#.layer.#.{each}.", T5)
    return found


PUBLIC_NAMES: dict[str, dict[str, str]] = {
    "gpt2": {
        **below("transformer.h.#.attn.", {"c_attn": "qkv_proj", "c_proj": "out_proj"}),
        **below("transformer.h.#.mlp.", {"c_fc": "mlpwi", "c_proj": "mlpwo"}),
        "transformer.wte": "logits",
    },
    "llama": LLAMA,
    "mistral": LLAMA,
    "bloom": {
        **below("transformer.h.#.self_attention.", {"query_key_value": "qkv_proj", "dense": "out_proj"}),
        **below("transformer.h.#.mlp.", {"dense_h_to_4h": "mlpwi", "dense_4h_to_h": "mlpwo"}),
        "transformer.word_embeddings": "logits",
    },
    "bert": {
        **encoder_only("bert.encoder.layer.#.attention.self", "bert.encoder.layer.#"),
        "bert.embeddings.word_embeddings": "logits",
    },
    "t5": {
        **t5("encoder", "SelfAttention"),
        **t5("decoder", "SelfAttention", "EncDecAttention"),
        "shared": "logits",
    },
    "vit": {
        **encoder_only("vit.encoder.layer.#.attention.attention", "vit.encoder.layer.#"),
        "classifier": "logits",
    },
    "whisper": {
        **whisper("encoder", "self_attn"),
        **whisper("decoder", "self_attn", "encoder_attn"),
        "model.decoder.embed_tokens": "logits",
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("model", PUBLIC)
def test_public_models(model: str) -> None:
    """Slow: Hugging Face's classes are imported and traced."""
    fn, args = PUBLIC[model]()
    found = by_weight(fn, args)
    shorter = {re.sub(r"\.(kernel|embedding)$", "", key): name for key, name in found.items()}
    assert shorter == PUBLIC_NAMES[model]
    count = counted(fn, args)
    layers = 8 if model in ("t5", "whisper") else 2
    assert [count[name] for name in ATTENTION] == [layers] * 3


# ---------------------------------------------------------------- spellings of one layer

EMBED, HEAD_COUNT, HEAD_DIM, HIDDEN, EXPERTS = 12, 3, 4, 14, 5


def found_in(layer: Callable, **weights: jax.ShapeDtypeStruct) -> dict[str, str]:
    """The names of the weights' products of two layers, in a language model, without the logits."""
    params = {"table": f(13, EMBED), "layers": [weights, weights]}
    names = by_weight(language_model(layer), (params, *TOKENS))
    assert names.pop("table") == "logits"
    return {key.removeprefix("layers.#."): name for key, name in names.items()}


def attended(q: Any, k: Any, v: Any) -> Any:
    """Heads folded into the batch, keys the left operand, no softmax of jax's, the division at the end."""
    q, k, v = (jnp.swapaxes(x, 1, 2).reshape(-1, x.shape[1], HEAD_DIM) for x in (q, k, v))
    scores = jnp.swapaxes(jnp.einsum("nmd,nld->nml", k, q) / 2.0, 1, 2)
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[1:], bool)), scores, -1e9)
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    mixed = jnp.einsum("nld,nml->nmd", v, weights) / weights.sum(-1, keepdims=True)
    return jnp.swapaxes(mixed.reshape(2, -1, mixed.shape[1], HEAD_DIM), 1, 2)


SPLIT = {name: f(EMBED, HEAD_COUNT, HEAD_DIM) for name in ("query", "key", "value")}
OUT = {"out": f(HEAD_COUNT, HEAD_DIM, EMBED)}


def projected(p: Any, x: Any, name: str) -> Any:
    return jnp.einsum("ble,ehd->blhd", x, p[name])


def merged(p: Any, x: Any, mixed: Any) -> Any:
    return x + jnp.einsum("blhd,hde->ble", mixed, p["out"])


def normed(x: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


@pytest.mark.parametrize("attend", [attention, attended])
def test_queries_are_told_from_keys_by_the_axis_of_the_softmax(attend: Callable) -> None:
    def layer(p: Any, x: Any) -> Any:
        # Value first, then key: their order says nothing.
        v, k, q = (projected(p, normed(x), name) for name in ("value", "key", "query"))
        return merged(p, x, attend(normed(q), normed(k), v))

    assert found_in(layer, **SPLIT, **OUT) == HEADS


def test_a_grouped_query_repeats_its_keys() -> None:
    def layer(p: Any, x: Any) -> Any:
        q, k, v = (projected(p, x, name) for name in ("query", "key", "value"))
        return merged(p, x, attention(q, jnp.repeat(k, 3, axis=2), jnp.repeat(v, 3, axis=2)))

    one = {name: f(EMBED, 1, HEAD_DIM) for name in ("key", "value")}
    assert found_in(layer, **SPLIT | one, **OUT) == HEADS


def test_one_projection_of_keys_and_values() -> None:
    def layer(p: Any, x: Any) -> Any:
        kv = jnp.einsum("ble,ekhd->blkhd", x, p["kv"])
        return merged(p, x, attention(projected(p, x, "query"), kv[:, :, 0], kv[:, :, 1]))

    weights = {"query": SPLIT["query"], "kv": f(EMBED, 2, HEAD_COUNT, HEAD_DIM)}
    assert found_in(layer, **weights, **OUT) == {
        "query": "query_proj",
        "kv": "kv_proj",
        "out": "out_proj",
    }


def test_a_parallel_block_of_one_projection_in_and_one_out() -> None:
    def layer(p: Any, x: Any) -> Any:
        wide = HEAD_COUNT * HEAD_DIM
        *heads, hidden = jnp.split(normed(x) @ p["in"], [wide, 2 * wide, 3 * wide], axis=-1)
        q, k, v = (each.reshape(*x.shape[:2], HEAD_COUNT, HEAD_DIM) for each in heads)
        mixed = attention(q, k, v).reshape(*x.shape[:2], wide)
        return x + jnp.concatenate([mixed, jax.nn.gelu(hidden)], -1) @ p["out"]

    wide = HEAD_COUNT * HEAD_DIM
    weights = {"in": f(EMBED, 3 * wide + HIDDEN), "out": f(wide + HIDDEN, EMBED)}
    assert found_in(layer, **weights) == {"in": "qkv_proj", "out": "out_proj"}


def test_latent_attention_shows_its_latents() -> None:
    def layer(p: Any, x: Any) -> Any:
        q = jnp.einsum("blr,rhd->blhd", normed(x @ p["query_a"]), p["query_b"])
        latent, rope = jnp.split(x @ p["kv_a"], [5], axis=-1)
        kv = jnp.einsum("blr,rhd->blhd", normed(latent), p["kv_b"])
        k, v = jnp.split(kv, 2, axis=-1)
        rope = jnp.broadcast_to(jnp.sin(rope)[:, :, None], (*k.shape[:3], 2))
        return merged(p, x, attention(q, jnp.concatenate([k, rope], -1), v))

    weights = {"query_a": f(EMBED, 6), "query_b": f(6, HEAD_COUNT, HEAD_DIM + 2), "kv_a": f(EMBED, 5 + 2)}
    weights |= {"kv_b": f(5, HEAD_COUNT, 2 * HEAD_DIM), **OUT}
    assert found_in(layer, **weights) == {
        "query_a": "query_wa_proj",
        "query_b": "query_proj",
        "kv_a": "kv_wa_proj",
        "kv_b": "kv_proj",
        "out": "out_proj",
    }
    params = {"table": f(13, EMBED), "layers": [weights]}
    count = counted(language_model(layer), (params, *TOKENS))
    assert count["mla_q"] == count["mla_kv"] == 1


def test_linear_attention_has_queries_keys_and_values() -> None:
    def layer(p: Any, x: Any) -> Any:
        q, k, v = (projected(p, x, name) for name in ("query", "key", "value"))
        state = jnp.einsum("blhd,blhe->bhde", jax.nn.elu(k) + 1, v)
        return merged(p, x, jnp.einsum("blhd,bhde->blhe", jax.nn.elu(q) + 1, state))

    assert found_in(layer, **SPLIT, **OUT) == HEADS


@pytest.mark.parametrize("act", [jax.nn.silu, jax.nn.gelu, jax.nn.relu, jnp.tanh])
def test_the_gate_is_what_passes_no_nonlinearity(act: Callable) -> None:
    def layer(p: Any, x: Any) -> Any:
        up, gate = x @ p["up"], x @ p["gate"]  # the gate second
        return x + (up * act(gate)) @ p["down"]

    weights = {"up": f(EMBED, HIDDEN), "gate": f(EMBED, HIDDEN), "down": f(HIDDEN, EMBED)}
    assert found_in(layer, **weights) == SWIGLU


def test_the_gate_is_told_where_the_hidden_is_normed() -> None:
    def layer(p: Any, x: Any) -> Any:
        return x + normed((x @ p["up"]) * jax.nn.silu(x @ p["gate"])) @ p["down"]

    weights = {"up": f(EMBED, HIDDEN), "gate": f(EMBED, HIDDEN), "down": f(HIDDEN, EMBED)}
    assert found_in(layer, **weights) == SWIGLU


def test_a_gate_in_the_same_projection_and_none() -> None:
    def fused(p: Any, x: Any) -> Any:
        gate, up = jnp.split(x @ p["up"], 2, axis=-1)
        return x + (jax.nn.silu(gate) * up) @ p["down"]

    def ungated(p: Any, x: Any) -> Any:
        return x + jax.nn.relu(x @ p["up"]) @ p["down"]

    assert found_in(fused, up=f(EMBED, 2 * HIDDEN), down=f(HIDDEN, EMBED)) == UNGATED
    assert found_in(ungated, up=f(EMBED, HIDDEN), down=f(HIDDEN, EMBED)) == UNGATED


EXPERT = {
    "router": f(EMBED, EXPERTS),
    "gate": f(EXPERTS, EMBED, HIDDEN),
    "up": f(EXPERTS, EMBED, HIDDEN),
    "down": f(EXPERTS, HIDDEN, EMBED),
}
MOE = {"gate": "moe_mlpwi_0", "up": "moe_mlpwi_1", "down": "moe_mlpwo"}


def test_experts_that_all_are_computed() -> None:
    def layer(p: Any, x: Any) -> Any:
        weights = jax.nn.softmax(x @ p["router"])
        gate, up = (jnp.einsum("ble,xem->blxm", x, p[name]) for name in ("gate", "up"))
        out = jnp.einsum("blxm,xme->blxe", jax.nn.silu(gate) * up, p["down"])
        return x + jnp.einsum("blxe,blx->ble", out, weights)

    assert found_in(layer, **EXPERT) == MOE


def test_experts_that_a_one_hot_product_dispatches_to() -> None:
    def layer(p: Any, x: Any) -> Any:
        weights, chosen = jax.lax.top_k(jax.nn.softmax(x @ p["router"]), 1)
        mask = jax.nn.one_hot(chosen[..., 0], EXPERTS)
        place = jax.nn.one_hot((jnp.cumsum(mask, 1) * mask - 1).astype(int), 3)
        taken = jnp.einsum("blxc,ble->xbce", place, x)
        gate, up = (jnp.einsum("xbce,xem->xbcm", taken, p[name]) for name in ("gate", "up"))
        out = jnp.einsum("xbcm,xme->xbce", jax.nn.silu(gate) * up, p["down"])
        return x + jnp.einsum("blxc,xbce->ble", place * weights[..., None], out)

    assert found_in(layer, **EXPERT) == MOE


def test_experts_of_ragged_products() -> None:
    def layer(p: Any, x: Any) -> Any:
        flat = x.reshape(-1, EMBED)
        weights, chosen = jax.lax.top_k(jax.nn.softmax(flat @ p["router"]), 1)
        order = jnp.argsort(chosen[:, 0])
        sizes = jnp.bincount(chosen[:, 0], length=EXPERTS)
        gate, up = (jax.lax.ragged_dot(flat[order], p[name], sizes) for name in ("gate", "up"))
        out = jax.lax.ragged_dot(jax.nn.silu(gate) * up, p["down"], sizes)
        return x + (out[jnp.argsort(order)] * weights).reshape(x.shape)

    assert found_in(layer, **EXPERT) == MOE


def test_a_tensor_is_named_behind_its_bias_and_its_cast() -> None:
    def layer(p: Any, x: Any) -> Any:
        wide = x.astype(jnp.bfloat16) @ p["up"].astype(jnp.bfloat16)
        hidden = (wide.astype(jnp.float32) + p["bias"]).astype(jnp.bfloat16)
        out = jnp.matmul(jax.nn.relu(hidden), p["down"], preferred_element_type=jnp.float32)
        return x + out.astype(jnp.bfloat16)

    weights = {"up": f(EMBED, HIDDEN), "bias": f(HIDDEN), "down": f(HIDDEN, EMBED)}
    params = {"table": f(13, EMBED), "layers": [weights]}
    names, roles = named(language_model(layer), (params, *TOKENS))
    found = {name: equation(roles.axes.jaxpr, path, index) for (path, index, _), name in names.items()}
    # No narrower than the product: the product. Narrower: where it is.
    assert found["mlpwi"].primitive.name == "dot_general"
    assert found["mlpwo"].primitive.name == "convert_element_type"
    assert found["mlpwo"].outvars[0].aval.dtype == jnp.bfloat16


def test_convolutions_are_listed_with_their_weights_and_what_follows_them_makes_logits() -> None:
    def loss(p: Any, images: Any, labels: Any) -> Any:
        x = jax.lax.conv_general_dilated(images, p[0], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
        x = jax.lax.conv_general_dilated(jax.nn.relu(x), jnp.flip(p[1]), (2,), "SAME")
        return picked(x.mean(2) @ p[2], labels)

    jaxpr = jax.make_jaxpr(loss)((f(3, 5, 7), f(6, 7, 3), f(6, 11)), f(4, 7, 5), i(4))
    found = name_products(jaxpr, find_roles(find_axes(jaxpr)))
    assert [(p.name, p.weight, p.inputs) for p in found] == [
        ("conv", 1, (0,)),
        ("conv", 1, (1,)),
        ("logits", 1, (2,)),
    ]


def test_what_is_no_layer_has_no_names() -> None:
    def plain(p: Any, x: Any) -> Any:
        return jnp.tanh(x @ p["first"]) @ p["second"]

    names, _ = named(plain, ({"first": f(5, 7), "second": f(7, 3)}, f(2, 5)))
    assert set(names.values()) <= {"mlpwi", "mlpwo"}
    assert named(lambda x: x @ x, (f(3, 3),))[0] == {}


@pytest.mark.parametrize("factory", [llama.loss, llama.train_step])
def test_the_tensors_of_a_model_are_listed_also_where_a_step_differentiates_it(factory: Callable) -> None:
    found = describe_tensors(*factory(scan=True))
    by_name = {each["name"]: each for each in found}
    assert by_name["query_proj"]["dims"] == [["batch"], ["length"], ["kv_heads", "q_group"], ["head_dim"]]
    assert by_name["mlpwi_0"]["dims"] == [["batch"], ["length"], ["mlp"]]
    assert by_name["decoder_layer_input"]["dims"] == [["batch"], ["length"], ["embed"]]
    assert {each["count"] for each in found} == {1}
    heading, first, *_ = tensor_rows(found)
    assert heading[0] == "tensor"
    assert first[:3] == ("decoder_layer_input", "1", "float32 batch x length x embed")
