"""The role of every axis of models and small programs: of parameters, moments, data and activations."""

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from models import encoder_decoder, gpt2, llama
from tests import public
from tests.layers import (
    LAYER,
    TOKENS,
    attention,
    below,
    f,
    inputs,
    language_model,
    layer,
    model_of,
    sgd,
    told,
)
from xform.errors import PlanError
from xform.roles import ROLES, describe

QKV = "kv_heads*head_dim+kv_heads*head_dim+kv_heads*head_dim"
TO_HEADS, FROM_HEADS = "embed | kv_heads head_dim", "kv_heads head_dim | embed"
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


def test_the_same_roles_each_time() -> None:
    fn, args = llama.train_step(size="tiny", layers=2, batch=3, length=10, scan=False)
    one, other = told(fn, args), told(fn, args)
    assert one.table() == other.table()
    names = [[(x.id, roles.name(x)) for x in roles.axes.all()] for roles in (one, other)]
    assert names[0] == names[1]


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
