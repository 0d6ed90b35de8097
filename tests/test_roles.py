"""The role of every axis of models and small programs: of parameters, moments, data and activations."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from models import encoder_decoder, gpt2, llama
from tests import public
from xform.axes import find_axes
from xform.errors import PlanError
from xform.roles import ROLES, Roles, describe, find_roles

QKV = "kv_heads*head_dim+kv_heads*head_dim+kv_heads*head_dim"
TO_HEADS, FROM_HEADS, HEADS = "embed | kv_heads head_dim", "kv_heads head_dim | embed", "kv_heads head_dim"
TO_QUERIES, FROM_QUERIES = "embed | kv_heads q_group head_dim", "kv_heads q_group head_dim | embed"
UP, DOWN = "embed | mlp", "mlp | embed"


def norm(*paths: str) -> dict[str, str]:
    return {f"{path}.{leaf}": "embed" for path in paths for leaf in ("scale", "bias")}


def dense(path: str, kernel: str) -> dict[str, str]:
    return {f"{path}.kernel": kernel, f"{path}.bias": kernel.split(" | ")[1]}


GROUPED = {
    "model.embed_tokens.embedding": "vocab | embed",
    "model.layers.#.self_attn.q_proj.kernel": TO_QUERIES,
    "model.layers.#.self_attn.k_proj.kernel": TO_HEADS,
    "model.layers.#.self_attn.v_proj.kernel": TO_HEADS,
    "model.layers.#.self_attn.o_proj.kernel": FROM_QUERIES,
    "model.layers.#.mlp.gate_proj.kernel": UP,
    "model.layers.#.mlp.up_proj.kernel": UP,
    "model.layers.#.mlp.down_proj.kernel": DOWN,
    "model.layers.#.input_layernorm.weight": "embed",
    "model.layers.#.post_attention_layernorm.weight": "embed",
    "model.norm.weight": "embed",
    "lm_head.kernel": "embed | vocab",
}


def whisper_layers(side: str, attentions: tuple[str, ...]) -> dict[str, str]:
    layer = f"model.{side}.layers.#"
    found = norm(f"model.{side}.layer_norm", f"{layer}.final_layer_norm")
    for name in attentions:
        found |= norm(f"{layer}.{name}_layer_norm") | {f"{layer}.{name}.k_proj.kernel": TO_HEADS}
        for projection, kernel in (("q_proj", TO_HEADS), ("v_proj", TO_HEADS), ("out_proj", FROM_HEADS)):
            found |= dense(f"{layer}.{name}.{projection}", kernel)
    return found | dense(f"{layer}.fc1", UP) | dense(f"{layer}.fc2", DOWN)


def t5_attention(path: str) -> dict[str, str]:
    return {f"{path}.{n}.kernel": FROM_HEADS if n == "o" else TO_HEADS for n in "qkvo"}


def t5_stack(side: str, mlp: int) -> dict[str, str]:
    block = f"{side}.block.#.layer"
    return {
        **t5_attention(f"{block}.0.SelfAttention"),
        f"{block}.0.SelfAttention.relative_attention_bias.embedding": "buckets | kv_heads",
        **{f"{block}.{i}.layer_norm.weight": "embed" for i in range(mlp + 1)},
        f"{block}.{mlp}.DenseReluDense.wi.kernel": UP,
        f"{block}.{mlp}.DenseReluDense.wo.kernel": DOWN,
        f"{side}.final_layer_norm.weight": "embed",
    }


# The roles of each parameter: dimensions apart by "|", the factors of one by spaces. Layers are "#".
EXPECTED: dict[str, dict[str, str]] = {
    "gpt2": {
        "transformer.wte.embedding": "vocab | embed",
        "transformer.wpe.embedding": "positions | embed",
        **norm("transformer.h.#.ln_1", "transformer.h.#.ln_2", "transformer.ln_f"),
        "transformer.h.#.attn.c_attn.kernel": f"{QKV} | embed",  # stored as [out, in]
        "transformer.h.#.attn.c_attn.bias": QKV,
        "transformer.h.#.attn.c_proj.kernel": "embed | kv_heads head_dim",
        "transformer.h.#.attn.c_proj.bias": "embed",
        "transformer.h.#.mlp.c_fc.kernel": "mlp | embed",
        "transformer.h.#.mlp.c_fc.bias": "mlp",
        "transformer.h.#.mlp.c_proj.kernel": "embed | mlp",
        "transformer.h.#.mlp.c_proj.bias": "embed",
    },
    "llama": GROUPED,
    "mistral": GROUPED,
    "bloom": {
        "transformer.word_embeddings.embedding": "vocab | embed",
        **norm("transformer.word_embeddings_layernorm", "transformer.ln_f"),
        **norm("transformer.h.#.input_layernorm", "transformer.h.#.post_attention_layernorm"),
        **dense(
            "transformer.h.#.self_attention.query_key_value",
            "embed | kv_heads head_dim+head_dim+head_dim",
        ),
        **dense("transformer.h.#.self_attention.dense", FROM_HEADS),
        **dense("transformer.h.#.mlp.dense_h_to_4h", UP),
        **dense("transformer.h.#.mlp.dense_4h_to_h", DOWN),
    },
    "bert": {
        "bert.embeddings.word_embeddings.embedding": "vocab | embed",
        "bert.embeddings.position_embeddings.embedding": "positions | embed",
        "bert.embeddings.token_type_embeddings.embedding": "rows | embed",
        **norm("bert.embeddings.LayerNorm"),
        **norm("bert.encoder.layer.#.attention.output.LayerNorm", "bert.encoder.layer.#.output.LayerNorm"),
        **dense("bert.encoder.layer.#.attention.self.query", TO_HEADS),
        **dense("bert.encoder.layer.#.attention.self.key", TO_HEADS),
        **dense("bert.encoder.layer.#.attention.self.value", TO_HEADS),
        **dense("bert.encoder.layer.#.attention.output.dense", FROM_HEADS),
        **dense("bert.encoder.layer.#.intermediate.dense", UP),
        **dense("bert.encoder.layer.#.output.dense", DOWN),
        **dense("cls.predictions.transform.dense", "embed | embed"),  # its result meets the table
        **norm("cls.predictions.transform.LayerNorm"),
        "cls.predictions.bias": "vocab",
    },
    "t5": {
        "shared.embedding": "vocab | embed",
        **t5_stack("encoder", 1),
        **t5_stack("decoder", 2),
        **t5_attention("decoder.block.#.layer.1.EncDecAttention"),
    },
    "vit": {
        "vit.embeddings.cls_token": "1 | 1 | embed",
        "vit.embeddings.position_embeddings": "1 | length | embed",  # added to all positions
        "vit.embeddings.patch_embeddings.projection.kernel": "patch | patch | channels | embed",
        "vit.embeddings.patch_embeddings.projection.bias": "embed",
        **norm(
            "vit.encoder.layer.#.layernorm_before", "vit.encoder.layer.#.layernorm_after", "vit.layernorm"
        ),
        **dense("vit.encoder.layer.#.attention.attention.query", TO_HEADS),
        **dense("vit.encoder.layer.#.attention.attention.key", TO_HEADS),
        **dense("vit.encoder.layer.#.attention.attention.value", TO_HEADS),
        **dense("vit.encoder.layer.#.attention.output.dense", FROM_HEADS),
        **dense("vit.encoder.layer.#.intermediate.dense", UP),
        **dense("vit.encoder.layer.#.output.dense", DOWN),
        **dense("classifier", "embed | vocab"),
    },
    "whisper": {
        "model.encoder.conv1.kernel": "kernel | channels | channels",
        "model.encoder.conv1.bias": "channels",
        "model.encoder.conv2.kernel": "kernel | channels | embed",
        "model.encoder.conv2.bias": "embed",
        "model.encoder.embed_positions.embedding": "positions | embed",
        "model.decoder.embed_positions.embedding": "positions | embed",
        "model.decoder.embed_tokens.embedding": "vocab | embed",
        **whisper_layers("encoder", ("self_attn",)),
        **whisper_layers("decoder", ("self_attn", "encoder_attn")),
    },
}

TEXT = {name: "batch | length" for name in ("input_ids", "attention_mask", "targets", "weights")}
DECODED = {
    name: "batch | length" for name in ("decoder_input_ids", "decoder_attention_mask", "targets", "weights")
}
DATA: dict[str, dict[str, str]] = {
    **dict.fromkeys(("gpt2", "llama", "mistral", "bloom", "bert"), TEXT),
    "t5": DECODED | {"input_ids": "batch | kv_length", "attention_mask": "batch | kv_length"},
    "vit": {
        "pixel_values": "batch | channels | spatial patch | spatial patch",
        "targets": "batch",
        "weights": "batch",
    },
    "whisper": DECODED | {"input_features": "batch | channels | spatial"},
}


def told(fn: Callable, args: Any, names: Mapping[str, Any] | None = None) -> Roles:
    jaxpr = jax.make_jaxpr(fn)(*args)
    leaves, _ = jax.tree_util.tree_flatten_with_path(args)
    return find_roles(find_axes(jaxpr), names, [jax.tree_util.keystr(path) for path, _ in leaves])


def spelled(dims: list[list[str]]) -> str:
    return " | ".join(" ".join(dim) or "1" for dim in dims)


def inputs(roles: Roles) -> dict[str, str]:
    """The roles of the inputs by path, layers as "#": {"0.layers.#.wq": "embed | kv_heads head_dim"}."""
    found: dict[str, str] = {}
    for path, dims in roles.inputs().items():
        key = re.sub(r"\['?([^\]']*)'?\]", r".\1", path).lstrip(".")
        key = re.sub(r"\.(layers?|h|block)(\.|_)\d+\.", r".\1.#.", key)
        one, other = found.setdefault(key, spelled(dims)), spelled(dims)
        assert re.sub(r"axis\d+", "axis", one) == re.sub(r"axis\d+", "axis", other), path
    return found


def below(prefix: str, found: Mapping[str, str]) -> dict[str, str]:
    return {key.removeprefix(prefix): value for key, value in found.items() if key.startswith(prefix)}


@pytest.mark.parametrize("name", public.PUBLIC)
def test_the_parameters_of_a_public_models_loss(name: str) -> None:
    fn, args = public.PUBLIC[name]()
    roles = told(fn, args)
    found = inputs(roles)
    assert below("0.", found) == EXPECTED[name]
    assert below("1.", found) == DATA[name]
    assert not roles.axes.unruled


@pytest.mark.parametrize("name", public.PUBLIC)
def test_the_state_of_a_public_models_training_step(name: str) -> None:
    """Parameters, both moments, and what comes out, come out alike."""
    fn, args = public.train_step(name)
    roles = told(fn, args)
    found = inputs(roles)
    assert below("0.params.", found) == EXPECTED[name]
    assert below("0.optimizer.0.mu.", found) == EXPECTED[name]
    assert below("0.optimizer.0.nu.", found) == EXPECTED[name]
    root, jaxpr = roles.axes.root, roles.axes.jaxpr
    new = jax.tree_util.tree_leaves(jax.eval_shape(fn, *args)[0])
    for before, after in zip(jaxpr.invars, jaxpr.outvars[: len(new)], strict=False):
        assert roles.of(root, before) == roles.of(root, after)


@pytest.mark.parametrize("name", public.PUBLIC)
def test_every_activation_of_the_residual_stream(name: str) -> None:
    """All arrays of its shape, forward and backward, at every depth: no other array has these sizes, but what
    attention gives to the output projection."""
    fn, args = public.train_step(name)
    roles = told(fn, args)
    sizes = public.Sizes()
    allowed = {
        "embed": ("embed",),
        "heads": ("kv_heads", "head_dim"),
        "grouped": ("kv_heads", "q_group", "head_dim"),
    }
    lengths = {sizes.length: "length", sizes.source: "kv_length", 26: "length"}
    seen = 0
    for scope in roles.axes.scopes:
        for v in scope.raw:
            shape = v.aval.shape
            if (
                len(shape) == 3
                and shape[0] == sizes.batch
                and shape[2] == sizes.embed
                and shape[1] in lengths
            ):
                batch, length, rest = roles.of(scope, v)
                assert (batch, length) == (("batch",), (lengths[shape[1]],)), (
                    scope.path,
                    v,
                    roles.of(scope, v),
                )
                assert rest in allowed.values()
                seen += rest == allowed["embed"]
    assert seen > 50


@pytest.mark.parametrize("name", public.PUBLIC)
def test_sizes_that_coincide_change_nothing(name: str) -> None:
    alike = dict(batch=4, length=4, source=4, embed=16, heads=4, kv_heads=2, mlp=16, vocab=16)
    fn, args = public.train_step(name, **alike)
    assert below("0.params.", inputs(told(fn, args))) == EXPECTED[name]


def test_dropout_changes_nothing() -> None:
    fn, args = public.loss("gpt2", dropout=0.1)
    assert below("0.", inputs(told(fn, args))) == EXPECTED["gpt2"]


# The models of this repository

LLAMA = {
    "embed.embedding": "vocab | embed",
    "head.kernel": "embed | vocab",
    "norm.scale": "embed",
    "layers.#.attention.query.kernel": "embed | kv_heads q_group | head_dim",
    "layers.#.attention.key.kernel": "embed | kv_heads | head_dim",
    "layers.#.attention.value.kernel": "embed | kv_heads | head_dim",
    "layers.#.attention.out.kernel": "kv_heads q_group | head_dim | embed",
    "layers.#.attention_norm.scale": "embed",
    "layers.#.mlp.gate.kernel": UP,
    "layers.#.mlp.up.kernel": UP,
    "layers.#.mlp.down.kernel": DOWN,
    "layers.#.mlp_norm.scale": "embed",
}
GPT2 = {
    "embed.embedding": "vocab | embed",
    "position_embed.embedding": "positions | embed",
    **norm("norm", "layer.#.attention_norm", "layer.#.mlp_norm"),
    **dense("layer.#.attention.qkv", f"embed | {QKV}"),
    **dense("layer.#.attention.out", FROM_HEADS),
    **dense("layer.#.up", UP),
    **dense("layer.#.down", DOWN),
}


def t5_like(side: str, attentions: tuple[str, ...]) -> dict[str, str]:
    layer = f"{side}.layers.#"
    found = {f"{side}.norm": "embed", f"{side}.position_bias": "buckets | kv_heads"}
    found |= {f"{layer}.{name}_norm": "embed" for name in (*attentions, "mlp")}
    for name in attentions:
        found |= {f"{layer}.{name}.{n}": "embed | kv_heads | head_dim" for n in ("query", "key", "value")}
        found[f"{layer}.{name}.out"] = "kv_heads | head_dim | embed"
    return found | {f"{layer}.up": UP, f"{layer}.down": DOWN}


OURS: dict[str, tuple[Any, dict[str, str]]] = {
    "llama": (llama, LLAMA),
    "gpt2": (gpt2, GPT2),
    "encoder_decoder": (
        encoder_decoder,
        {
            "embed": "vocab | embed",
            **t5_like("encoder", ("self",)),
            **t5_like("decoder", ("self", "cross")),
        },
    ),
}


def stacked(expected: Mapping[str, str]) -> dict[str, str]:
    """The same with the layers scanned."""
    pattern = r"(layers?)\.#\."
    return {
        re.sub(pattern, "layers.", key): f"layers | {value}" if re.search(pattern, key) else value
        for key, value in expected.items()
    }


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("name", OURS)
def test_a_training_step_of_our_models(name: str, scan: bool) -> None:
    module, expected = OURS[name]
    fn, args = module.train_step(size="tiny", layers=2, batch=3, length=10, scan=scan)
    found = inputs(told(fn, args))
    expected = stacked(expected) if scan else expected
    assert below("0.params.", found) == expected
    for moment in ("mu", "nu"):
        (path,) = {key.split(f".{moment}.")[0] for key in found if f".{moment}." in key}
        assert below(f"{path}.{moment}.", found) == expected
    source = {"inputs": "batch | kv_length"} if name == "encoder_decoder" else {}
    assert below("1.", found) == dict.fromkeys(below("1.", found), "batch | length") | source


@pytest.mark.parametrize("scan", [False, True])
def test_packed_texts(scan: bool) -> None:
    fn, args = llama.loss(size="tiny", layers=2, batch=3, length=10, scan=scan, packed=True)
    found = inputs(told(fn, args))
    assert below("0.", found) == (stacked(LLAMA) if scan else LLAMA)
    assert set(below("1.", found).values()) == {"batch | length"}


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("name", OURS)
def test_a_step_of_decoding(name: str, scan: bool) -> None:
    """The cache's length is a `kv_length`, and so is an encoder's; nothing is called `length`."""
    module, expected = OURS[name]
    fn, args = module.decode_step(size="tiny", layers=2, batch=3, length=10, scan=scan)
    roles = told(fn, args)
    found = inputs(roles)
    expected = stacked(expected) if scan else expected
    unused = ("encoder", "decoder.layers.cross.key", "decoder.layers.cross.value")
    for key, value in expected.items():
        if not key.replace("#.", "").startswith(unused):
            assert found[f"0.{key}"] == value, key
    layers = "layers | " if scan else ""
    caches = {value for key, value in found.items() if re.search(r"key$|value$", key) and key[0] == "1"}
    assert caches == {f"{layers}batch | kv_length | kv_heads | head_dim"}
    assert not roles.factors("length")
    assert roles.of(roles.axes.root, roles.axes.jaxpr.outvars[0]) == (("batch",), ("vocab",))


# Small programs

F32 = jnp.float32


def f(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, F32)


def i(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def picked(logits: Any, labels: Any) -> Any:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1).mean()


def attention(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("blhd,bmhd->bhlm", q, k) / 2.0
    return jnp.einsum("bhlm,bmhd->blhd", jax.nn.softmax(scores), v)


def block(p: Any, x: Any, attend: Callable = attention) -> Any:
    q, k, v = (jnp.einsum("ble,ehd->blhd", x, p[n]) for n in "qkv")
    return x + jnp.einsum("blhd,hde->ble", attend(q, k, v), p["o"])


def gated(p: Any, x: Any) -> Any:
    gate, up = jnp.split(x @ p["gate_up"], 2, axis=-1)
    return x + (jax.nn.silu(gate) * up) @ p["down"]


def language_model(layer: Callable) -> Callable:
    def loss(p: Any, tokens: Any, labels: Any) -> Any:
        x = p["table"][tokens]
        for weights in p["layers"]:
            x = layer(weights, x)
        return picked(x @ p["table"].T, labels)

    return loss


HEADED = {"q": f(12, 3, 4), "k": f(12, 3, 4), "v": f(12, 3, 4), "o": f(3, 4, 12)}
LAYER = HEADED | {"gate_up": f(12, 14), "down": f(7, 12)}
HEADED_ROLES = {
    "q": "embed | kv_heads | head_dim",
    "k": "embed | kv_heads | head_dim",
    "v": "embed | kv_heads | head_dim",
    "o": "kv_heads | head_dim | embed",
}
LAYER_ROLES = HEADED_ROLES | {"gate_up": "embed | mlp+mlp", "down": "mlp | embed"}
TOKENS = (i(2, 8), i(2, 8))


def model_of(**layer: jax.ShapeDtypeStruct) -> dict[str, Any]:
    return {"table": f(13, 12), "layers": [layer]}


def moe_all(p: Any, x: Any) -> Any:
    """All experts for all tokens, weighed."""
    gates = jax.nn.softmax(x @ p["router"])
    hidden = jax.nn.relu(jnp.einsum("ble,xem->blxm", x, p["up"]))
    return x + jnp.einsum("blxm,xme,blx->ble", hidden, p["down"], gates)


def moe_capacity(p: Any, x: Any) -> Any:
    """Tokens are dispatched to places in the experts by one-hot products."""
    tokens = x.reshape(-1, x.shape[-1])
    gates, chosen = lax.top_k(jax.nn.softmax(tokens @ p["router"]), 2)
    to_expert = jax.nn.one_hot(chosen, 5)
    place = jnp.cumsum(to_expert.reshape(-1, 5), 0).reshape(to_expert.shape) * to_expert
    dispatch = jax.nn.one_hot(place.astype(jnp.int32), 6) * to_expert[..., None]
    inside = jnp.einsum("tkxc,te->xce", dispatch, tokens)
    hidden = jax.nn.relu(jnp.einsum("xce,xem->xcm", inside, p["up"]))
    outside = jnp.einsum("xcm,xme->xce", hidden, p["down"])
    return x + jnp.einsum("tkxc,xce,tk->te", dispatch, outside, gates).reshape(x.shape)


def moe_ragged(p: Any, x: Any) -> Any:
    """Tokens are sorted by expert."""
    tokens = x.reshape(-1, x.shape[-1])
    gates, chosen = lax.top_k(jax.nn.softmax(tokens @ p["router"]), 2)
    order = jnp.argsort(chosen.reshape(-1))
    groups = jnp.bincount(chosen.reshape(-1), length=5)
    hidden = jax.nn.relu(lax.ragged_dot(tokens[order // 2], p["up"], groups))
    outside = lax.ragged_dot(hidden, p["down"], groups)[jnp.argsort(order)]
    return x + (outside.reshape(-1, 2, x.shape[-1]) * gates[..., None]).sum(1).reshape(x.shape)


def linear_attention(q: Any, k: Any, v: Any) -> Any:
    state = jnp.einsum("blhd,blhf->bhdf", jax.nn.elu(k) + 1.0, v)
    return jnp.einsum("blhd,bhdf->blhf", q, state)


def in_chunks(q: Any, k: Any, v: Any) -> Any:
    """Attention, the queries in chunks of four."""
    chunks = q.reshape(2, 2, 4, 3, 4).swapaxes(0, 1)
    _, out = lax.scan(lambda _, q: (None, attention(q, k, v)), None, chunks)
    return out.swapaxes(0, 1).reshape(q.shape)


def latent(p: Any, x: Any) -> Any:
    """Queries, keys and values by way of narrow projections; a rotary part of the keys that heads share."""
    q = jnp.einsum("blr,rhd->blhd", x @ p["q_down"], p["q_up"])
    shared = x @ p["kv_down"]
    kv = jnp.einsum("blr,rhd->blhd", shared[..., :6], p["kv_up"])
    rotary = jnp.broadcast_to(shared[:, :, None, 6:], (2, 8, 3, 2))
    k = jnp.concatenate([kv[..., :4], rotary], -1)
    return gated(p, x + jnp.einsum("blhd,hde->ble", attention(q, k, kv[..., 4:]), p["o"]))


def adapted(p: Any, x: Any) -> Any:
    """A projection with a low-rank addition."""
    more = jnp.einsum("ble,er,rhd->blhd", x, p["a"], p["b"])
    return block(p, x, lambda q, k, v: attention(q + more, k, v))


def multi_query(p: Any, x: Any) -> Any:
    q = jnp.einsum("ble,ehd->blhd", x, p["q"])
    scores = jax.nn.softmax(jnp.einsum("blhd,bmd->bhlm", q, x @ p["k"]))
    return x + jnp.einsum("bhlm,bmd,hde->ble", scores, x @ p["v"], p["o"])


def grouped_fused(p: Any, x: Any) -> Any:
    """One projection to six heads of queries, two of keys, two of values, repeated; a norm on heads."""
    q, k, v = (y.reshape(2, 8, -1, 4) for y in jnp.split(x @ p["qkv"], [24, 32], axis=-1))
    k, v = (jnp.repeat(y, 3, axis=2) for y in (k * p["norm"], v))
    return x + attention(q, k, v).reshape(2, 8, 24) @ p["o"]


def rotary(q: Any, k: Any, v: Any) -> Any:
    """Attention after a rotation of pairs of features, written as products with a table of positions."""
    angles = jnp.arange(q.shape[1])[:, None] / 10.0 ** jnp.arange(2)
    cos, sin = jnp.repeat(jnp.cos(angles), 2, axis=1), jnp.repeat(jnp.sin(angles), 2, axis=1)

    def rotate(x: Any) -> Any:
        turned = jnp.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)
        return jnp.einsum("ld,blhd->blhd", cos, x) + jnp.einsum("ld,blhd->blhd", sin, turned)

    return attention(rotate(q), rotate(k), v)


def relative(p: Any, x: Any) -> Any:
    """Attention with a bias for each head and distance, the distances a constant."""
    distance = np.abs(np.subtract.outer(np.arange(8), np.arange(8)))
    q, k, v = (jnp.einsum("ble,ehd->blhd", x, p[n]) for n in "qkv")
    scores = jnp.einsum("blhd,bmhd->bhlm", q, k) + p["bias"][distance].transpose(2, 0, 1)
    return x + jnp.einsum("bhlm,bmhd,hde->ble", jax.nn.softmax(scores), v, p["o"])


def state_space(p: Any, x: Any) -> Any:
    """A depthwise convolution along the text and a recurrence."""
    h, gate = jnp.split(x @ p["in"], 2, axis=-1)
    spec = ("NHC", "HIO", "NHC")
    h = lax.conv_general_dilated(h, p["conv"], (1,), [(2, 0)], dimension_numbers=spec, feature_group_count=14)

    def step(state: Any, h: Any) -> Any:
        state = state * jnp.exp(p["decay"]) + h[..., None]
        return state, state.sum(-1)

    _, h = lax.scan(step, jnp.zeros((2, 14, 3)), h.swapaxes(0, 1))
    return x + (h.swapaxes(0, 1) * jax.nn.silu(gate)) @ p["out"]


EXPERTS = HEADED | {"router": f(12, 5), "up": f(5, 12, 7), "down": f(5, 7, 12)}
EXPERTS_ROLES = HEADED_ROLES | {
    "router": "embed | experts",
    "up": "experts | embed | mlp",
    "down": "experts | mlp | embed",
}

LAYERS: dict[str, tuple[Callable, dict[str, Any], dict[str, str]]] = {
    "gate and up in one": (lambda p, x: gated(p, block(p, x)), LAYER, LAYER_ROLES),
    "all experts": (lambda p, x: moe_all(p, block(p, x)), EXPERTS, EXPERTS_ROLES),
    "experts with a capacity": (lambda p, x: moe_capacity(p, block(p, x)), EXPERTS, EXPERTS_ROLES),
    "experts, sorted": (lambda p, x: moe_ragged(p, block(p, x)), EXPERTS, EXPERTS_ROLES),
    "linear attention": (lambda p, x: block(p, x, linear_attention), HEADED, HEADED_ROLES),
    "rotary positions": (
        lambda p, x: block(p, x, rotary),
        HEADED,
        {
            "q": "embed | kv_heads | head_dim head_dim",
            "k": "embed | kv_heads | head_dim head_dim",
            "v": "embed | kv_heads | head_dim",
            "o": "kv_heads | head_dim | embed",
        },
    ),
    "relative positions": (
        relative,
        HEADED | {"bias": f(9, 3)},
        HEADED_ROLES | {"bias": "buckets | kv_heads"},
    ),
    "queries in chunks": (lambda p, x: block(p, x, in_chunks), HEADED, HEADED_ROLES),
    "a low-rank addition": (
        adapted,
        HEADED | {"a": f(12, 2), "b": f(2, 3, 4)},
        HEADED_ROLES | {"a": "embed | axis0", "b": "axis0 | kv_heads | head_dim"},
    ),
    "latent attention": (
        latent,
        {"q_down": f(12, 7), "q_up": f(7, 3, 6), "kv_down": f(12, 8), "kv_up": f(6, 3, 9), "o": f(3, 5, 12)}
        | {"gate_up": f(12, 14), "down": f(7, 12)},
        {
            "q_down": "embed | axis2",
            "q_up": "axis2 | kv_heads | head_dim",
            "kv_down": "embed | axis0",
            "kv_up": "axis1 | kv_heads | head_dim_part+head_dim",
            "o": "kv_heads | head_dim | embed",
            "gate_up": "embed | mlp+mlp",
            "down": "mlp | embed",
        },
    ),
    "one head of keys": (
        multi_query,
        {"q": f(12, 3, 4), "k": f(12, 4), "v": f(12, 4), "o": f(3, 4, 12)},
        {
            "q": "embed | q_group | head_dim",
            "k": "embed | head_dim",
            "v": "embed | head_dim",
            "o": "q_group | head_dim | embed",
        },
    ),
    "grouped heads in one projection": (
        grouped_fused,
        {"qkv": f(12, 40), "o": f(24, 12), "norm": f(4)},
        {
            "qkv": "embed | kv_heads*q_group*head_dim+kv_heads*head_dim+kv_heads*head_dim",
            "o": FROM_QUERIES,
            "norm": "head_dim",
        },
    ),
    "a state space": (
        state_space,
        {"in": f(12, 28), "conv": f(3, 1, 14), "decay": f(14, 3), "out": f(14, 12)},
        {
            "in": "embed | mlp+mlp",
            "conv": "kernel | 1 | mlp",
            "decay": "mlp | axis0",
            "out": "mlp | embed",
        },
    ),
}


@pytest.mark.parametrize("step", ["loss", "training"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer(name: str, step: str) -> None:
    layer, weights, expected = LAYERS[name]
    loss = language_model(layer)
    fn = loss if step == "loss" else sgd(loss)
    roles = told(fn, (model_of(**weights), *TOKENS))
    found = inputs(roles)
    assert below("0.layers.#.", found) == expected
    assert found["0.table"] == "vocab | embed"
    text = "batch | length length" if name == "queries in chunks" else "batch | length"
    assert {found["1"], found["2"]} == {text}
    if step == "training":
        root, jaxpr = roles.axes.root, roles.axes.jaxpr
        for before, after in zip(jaxpr.invars, jaxpr.outvars, strict=False):
            assert roles.of(root, before) == roles.of(root, after)


def sgd(loss: Callable) -> Callable:
    def step(params: Any, *batch: Any) -> Any:
        gradients = jax.grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    return step


def stacked_model(loop: Callable) -> Callable:
    def loss(p: Any, tokens: Any, labels: Any) -> Any:
        return picked(loop(p["layers"], p["table"][tokens]) @ p["table"].T, labels)

    return loss


def layer(p: Any, x: Any) -> Any:
    return gated(p, block(p, x))


LOOPS: dict[str, Callable] = {
    "scan": lambda ws, x: lax.scan(lambda x, w: (layer(w, x), None), x, ws)[0],
    "scan of remat": lambda ws, x: lax.scan(jax.checkpoint(lambda x, w: (layer(w, x), None)), x, ws)[0],
    "scan over numbers": lambda ws, x: lax.scan(
        lambda x, n: (layer(jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, n, 0, False), ws), x), None),
        x,
        jnp.arange(5),
    )[0],
    "fori": lambda ws, x: lax.fori_loop(0, 5, lambda n, x: layer(jax.tree.map(lambda w: w[n], ws), x), x),
}


@pytest.mark.parametrize("fn", [lambda loss: loss, jax.grad, sgd], ids=["loss", "grad", "training"])
@pytest.mark.parametrize("name", LOOPS)
def test_stacked_layers(name: str, fn: Callable) -> None:
    weights = {n: f(5, *w.shape) for n, w in LAYER.items()}
    params = {"table": f(13, 12), "layers": weights}
    roles = told(fn(stacked_model(LOOPS[name])), (params, *TOKENS))
    found = inputs(roles)
    assert below("0.layers.", found) == {n: f"layers | {r}" for n, r in LAYER_ROLES.items()}
    root, jaxpr = roles.axes.root, roles.axes.jaxpr
    if len(jaxpr.outvars) > 1:
        for before, after in zip(jaxpr.invars, jaxpr.outvars, strict=False):
            assert roles.of(root, before) == roles.of(root, after)


def test_a_scan_over_microbatches() -> None:
    loss = language_model(layer)

    def step(p: Any, tokens: Any, labels: Any) -> Any:
        def one(total: Any, batch: Any) -> Any:
            value, gradients = jax.value_and_grad(loss)(p, *batch)
            return jax.tree.map(jnp.add, total, gradients), value

        zeros = jax.tree.map(jnp.zeros_like, p)
        return lax.scan(one, zeros, (tokens.reshape(3, 2, 8), labels.reshape(3, 2, 8)))

    found = inputs(told(step, (model_of(**LAYER), i(6, 8), i(6, 8))))
    assert found["1"] == found["2"] == "microbatches batch | length"
    assert below("0.layers.#.", found) == LAYER_ROLES


def test_vmap_over_examples() -> None:
    loss = language_model(layer)

    def mean(p: Any, tokens: Any, labels: Any) -> Any:
        return jax.vmap(lambda t, y: loss(p, t[None], y[None]))(tokens, labels).mean()

    found = inputs(told(mean, (model_of(**LAYER), *TOKENS)))
    assert found["1"] == "batch | length"
    assert below("0.layers.#.", found) == LAYER_ROLES


def test_one_example_has_no_batch() -> None:
    def loss(p: Any, tokens: Any, labels: Any) -> Any:
        return language_model(layer)(p, tokens[None], labels[None])

    roles = told(loss, (model_of(**LAYER), i(8), i(8)))
    assert inputs(roles)["1"] == "length"
    assert below("0.layers.#.", inputs(roles)) == LAYER_ROLES
    assert not roles.batch


def test_texts_shifted_against_themselves() -> None:
    """The labels are the tokens but the first: all but the last of an axis is a part of it."""

    def loss(p: Any, tokens: Any) -> Any:
        x = layer(p["layers"][0], p["table"][tokens])
        return picked((x @ p["table"].T)[:, :-1], tokens[:, 1:])

    roles = told(loss, (model_of(**LAYER), i(2, 9)))
    assert inputs(roles)["1"] == "batch | length"
    sizes = {(roles.name(x), x.size) for x in roles.axes.all()}
    assert {("length", 9), ("length_part", 8)} <= sizes


@pytest.mark.parametrize("fn", [lambda loss: loss, jax.grad, sgd], ids=["loss", "grad", "training"])
@pytest.mark.parametrize(
    ("loss", "params", "expected", "batch"),
    [
        pytest.param(
            lambda p, x, y: jnp.mean((jax.nn.relu(x @ p[0]) @ p[1] - y) ** 2),
            (f(5, 7), f(7, 3)),
            ("axis0 | mlp", "mlp | axis1"),
            (f(11, 5), f(11, 3)),
            id="two matrices",
        ),
        pytest.param(
            lambda p, x, y: picked(jax.nn.relu(x @ p[0] + p[1]) @ p[2], y),
            (f(5, 7), f(7), f(7, 3)),
            ("axis0 | mlp", "mlp", "mlp | vocab"),
            (f(11, 5), i(11)),
            id="a classifier",
        ),
        pytest.param(
            lambda p, x, y: jnp.mean((x @ p - y) ** 2),
            f(5, 3),
            ("axis0 | axis1",),
            (f(11, 5), f(11, 3)),
            id="linear regression",
        ),
        pytest.param(
            lambda p, x, y: jnp.mean((x + jax.nn.relu(x @ p[0]) @ p[1] - y) ** 2),
            (f(5, 7), f(7, 5)),
            (UP, DOWN),
            (f(11, 5), f(11, 5)),
            id="a residual block",
        ),
    ],
)
def test_programs_without_tokens(
    loss: Callable, params: Any, expected: tuple[str, ...], batch: Any, fn: Callable
) -> None:
    found = list(inputs(told(fn(loss), (params, *batch))).values())
    assert tuple(found[: len(expected)]) == expected
    assert all(roles.startswith("batch") for roles in found[len(expected) :])


def test_images() -> None:
    def loss(p: Any, images: Any, labels: Any) -> Any:
        spec = ("NHWC", "HWIO", "NHWC")
        x = jax.nn.relu(lax.conv_general_dilated(images, p[0], (1, 1), "SAME", dimension_numbers=spec))
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        x = jax.nn.relu(lax.conv_general_dilated(x, p[1], (2, 2), "SAME", dimension_numbers=spec))
        return picked(x.mean((1, 2)) @ p[2], labels)

    params = (f(3, 3, 2, 5), f(3, 3, 5, 7), f(7, 4))
    found = inputs(told(sgd(loss), (params, f(6, 8, 8, 2), i(6))))
    kernel = "kernel | kernel | channels | channels"
    assert list(found.values())[:3] == [kernel, kernel, "channels | vocab"]
    assert found["1"] == "batch | spatial | spatial | channels"


def test_attention_alone() -> None:
    shapes = (f(2, 8, 3, 4), f(2, 9, 3, 4), f(2, 9, 3, 5))
    found = inputs(told(attention_of_two_widths, shapes))
    assert found["0"] == "batch | length | kv_heads | head_dim"
    assert found["1"] == found["2"] == "batch | kv_length | kv_heads | head_dim"


def attention_of_two_widths(q: Any, k: Any, v: Any) -> Any:
    scores = jax.nn.softmax(jnp.einsum("blhd,bmhd->bhlm", q, k))
    return jnp.einsum("bhlm,bmhe->blhe", scores, v)


def test_contrast_of_images_and_texts_is_no_attention() -> None:
    def loss(p: Any, a: Any, b: Any) -> Any:
        return -jnp.diag(jax.nn.log_softmax((a @ p["a"]) @ (b @ p["b"]).T)).mean()

    roles = told(loss, ({"a": f(5, 7), "b": f(4, 7)}, f(6, 5), f(6, 4)))
    assert not {"head_dim", "kv_length", "length", "vocab"} & {roles.name(x) for x in roles.axes.all()}


def test_two_streams_projected_to_one_space() -> None:
    """What both make, and neither takes back, is no `mlp`."""

    def loss(p: Any, tokens: Any, labels: Any, x: Any) -> Any:
        text = gated(p["layers"][0], block(p["layers"][0], p["table"][tokens]))
        other = block(p["other"], x)
        a, b = text.mean(1) @ p["a"], other.mean(1) @ p["b"]
        return picked(text @ p["table"].T, labels) - (a * b).mean()

    other = {n: f(*(15 if size == 12 else size for size in w.shape)) for n, w in HEADED.items()}
    params = model_of(**LAYER) | {"other": other, "a": f(12, 9), "b": f(15, 9)}
    found = inputs(told(sgd(loss), (params, *TOKENS, f(2, 11, 15))))
    assert (found["0.a"], found["0.b"]) == ("embed | axis0", "embed | axis0")
    assert below("0.layers.#.", found) == LAYER_ROLES
    assert below("0.other.", found) == HEADED_ROLES


def test_the_same_roles_each_time() -> None:
    fn, args = llama.train_step(size="tiny", layers=2, batch=3, length=10, scan=False)
    one, other = told(fn, args), told(fn, args)
    assert one.table() == other.table()
    names = [[(x.id, roles.name(x)) for x in roles.axes.all()] for roles in (one, other)]
    assert names[0] == names[1]


def test_closed_over_weights_and_data() -> None:
    """The function being differentiated may have its batch as constants."""
    params = jax.tree.map(lambda s: jnp.ones(s.shape), model_of(**LAYER))
    tokens = jnp.arange(16).reshape(2, 8) % 13
    loss = language_model(layer)
    found = inputs(told(lambda p: loss(p, tokens, tokens + 0), (params,)))
    assert below("0.layers.#.", found) == LAYER_ROLES


# What is given out


def test_describe() -> None:
    fn, (params, tokens, labels) = language_model(layer), (model_of(**LAYER), *TOKENS)
    paths = [
        jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_flatten_with_path((params, tokens, labels))[0]
    ]
    result = describe(jax.make_jaxpr(fn)(params, tokens, labels), paths)
    assert list(result) == ["axes", "inputs"]
    assert list(result["inputs"]) == paths
    assert result["inputs"]["[0]['layers'][0]['gate_up']"] == [["embed"], ["mlp+mlp"]]
    assert result["inputs"]["[1]"] == [["batch"], ["length"]]
    sizes = {axis["role"]: axis["size"] for axis in result["axes"]}
    expected = {"batch": 2, "length": 8, "embed": 12, "kv_heads": 3, "head_dim": 4, "mlp": 7, "vocab": 13}
    assert sizes.items() >= expected.items()
    told_first = [axis["role"] for axis in result["axes"] if axis["role"] in ROLES]
    assert told_first == sorted(told_first, key=list(ROLES).index)


def test_table() -> None:
    roles = told(language_model(layer), (model_of(**LAYER), *TOKENS))
    rows = {row.role: row for row in roles.table()}
    embed = rows["embed"]
    assert (embed.size, embed.axes, embed.count) == (12, 1, 7)
    assert embed.inputs == (
        "[0]['layers'][0]['down'][1]",
        "[0]['layers'][0]['gate_up'][0]",
        "[0]['layers'][0]['k'][0]",
    )


def test_an_axis_that_no_input_has_is_shown_where_it_is_made() -> None:
    def loss(p: Any, x: Any, y: Any) -> Any:
        with jax.named_scope("outer"):
            q = jnp.concatenate([x, x], 1)
            return (attention(q, q, q) @ p - y).sum()

    roles = told(loss, (f(4, 3), f(2, 5, 3, 4), f(2, 10, 3, 3)))
    (row,) = (row for row in roles.table() if row.role == "length")
    assert row.count == 1
    roles = told(lambda p, x: loss(p, x, 0.0), (f(4, 3), f(2, 5, 3, 4)))
    (row,) = (row for row in roles.table() if row.role == "length")
    assert row.count == 0
    assert row.where.startswith("outer") and "test_roles.py" in row.where


def test_weights_and_activations() -> None:
    roles = told(sgd(language_model(layer)), (model_of(**LAYER), *TOKENS))
    root, jaxpr = roles.axes.root, roles.axes.jaxpr
    *params, tokens, _ = jaxpr.invars
    assert all(roles.is_weight(root, v) and not roles.is_activation(root, v) for v in params)
    assert roles.is_activation(root, tokens)
    assert [x.size for x in roles.factors("mlp")] == [7]


# What the user says

MLP = (f(5, 7), f(7, 5)), f(11, 5)


def blocks(p: Any, x: Any) -> Any:
    return jax.nn.relu(x @ p[0]) @ p[1]


def test_a_user_names_an_axis() -> None:
    roles = told(blocks, MLP, {"hidden": "[0][0][1]", "features": ["[1][-1]", "[0][1][1]"]})
    assert inputs(roles) == {"0.0": "features | hidden", "0.1": "hidden | features", "1": "batch | features"}


def test_a_name_of_the_user_counts_as_known() -> None:
    """Told what the residual stream is, the rules find what is hidden between."""
    roles = told(
        lambda p, x: blocks(p, x), ((f(5, 7), f(7, 3)), f(11, 5)), {"embed": ["[1][1]", "[0][1][1]"]}
    )
    assert inputs(roles) == {"0.0": "embed | mlp", "0.1": "mlp | embed", "1": "batch | embed"}


def test_a_user_splits_an_axis() -> None:
    names = {"[0][0][1]": ["3", "kv_heads=2", "head_dim"]}
    roles = told(lambda p, x: x @ p[0], ((f(5, 24),), f(11, 5)), names)
    assert inputs(roles)["0.0"].split(" | ")[1].split()[1:] == ["kv_heads", "head_dim"]
    (_, dim) = roles.axes.root[roles.axes.jaxpr.invars[0]]
    assert [x.size for x in dim] == [3, 2, 4]
    (_, out) = roles.axes.root[roles.axes.jaxpr.outvars[0]]
    assert out == dim


def test_a_user_names_a_factor() -> None:
    roles = told(lambda x: x.reshape(3, 4, 5), (f(12, 5),), {"groups": "[0][0].0"})
    assert inputs(roles)["0"].split()[0] == "groups"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"mlp": "[0][3][1]"}, r"no input called \[0\]\[3\]; there is .*\[0\]\[0\]"),
        ({"mlp": "[0][0][2]"}, r"\[0\]\[0\]\[2\]: \[0\]\[0\] has 2 dimensions"),
        ({"mlp": "[0][0][1].1"}, r"has 1 factors: 7"),
        ({"mlp": "w1"}, r"'w1' is no place"),
        ({"mlp": "[0][0][1]", "hidden": "[0][1][0]"}, r"named hidden, but the same axis is named mlp"),
        ({"[0][0][1]": ["2", "3"]}, r"has size 7, which does not split into \['2', '3'\]"),
        ({"[0][0][1]": ["a", "b"]}, r"has size 7, which does not split"),
        ({"[0][0][1]": ["a=b"]}, r"'a=b' is no factor"),
    ],
)
def test_a_place_that_is_not_there(names: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        told(blocks, MLP, names)


def test_optimizers_of_other_kinds() -> None:
    """Moments that are not of the parameter's shape, and steps that clip."""
    loss = language_model(layer)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adafactor(1e-3, min_dim_size_to_factor=5))
    params = model_of(**LAYER)
    state = jax.eval_shape(optimizer.init, params)

    def step(params: Any, state: Any, *batch: Any) -> Any:
        updates, state = optimizer.update(jax.grad(loss)(params, *batch), state, params)
        return optax.apply_updates(params, updates), state

    found = inputs(told(step, (params, state, *TOKENS)))
    assert below("0.layers.#.", found) == LAYER_ROLES
    rows = {key: value for key, value in found.items() if ".v_row." in key and "table" in key}
    assert set(rows.values()) <= {"embed", "vocab"} and rows
