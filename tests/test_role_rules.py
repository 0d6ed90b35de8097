"""What each rule sees in small programs: all kinds of attention, experts, loops; programs without tokens."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from tests.layers import (
    HEADED,
    HEADED_ROLES,
    LAYER,
    LAYER_ROLES,
    TOKENS,
    attention,
    below,
    block,
    f,
    gated,
    i,
    inputs,
    language_model,
    layer,
    model_of,
    picked,
    sgd,
    told,
)

FROM_QUERIES, UP, DOWN = "kv_heads q_group head_dim | embed", "embed | mlp", "mlp | embed"


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


def stacked_model(loop: Callable) -> Callable:
    def loss(p: Any, tokens: Any, labels: Any) -> Any:
        return picked(loop(p["layers"], p["table"][tokens]) @ p["table"].T, labels)

    return loss


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


def test_a_row_looked_up_one_index_at_a_time() -> None:
    """Under vmap a dynamic slice becomes a gather that keeps the row's dimension, and a squeeze."""

    def loss(p: Any, tokens: Any, labels: Any) -> Any:
        def row(i: Any) -> Any:
            return lax.dynamic_index_in_dim(p["table"], i, keepdims=False)

        x = layer(p["layer"], jax.vmap(jax.vmap(row))(tokens))
        return picked(x @ p["head"], labels)

    params = {"table": f(21, 12), "head": f(12, 21), "layer": LAYER}
    found = inputs(told(sgd(loss), (params, *TOKENS)))
    assert found["0.table"] == "vocab | embed" and found["0.head"] == "embed | vocab"
    assert below("0.layer.", found) == LAYER_ROLES


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


def test_closed_over_weights_and_data() -> None:
    """The function being differentiated may have its batch as constants."""
    params = jax.tree.map(lambda s: jnp.ones(s.shape), model_of(**LAYER))
    tokens = jnp.arange(16).reshape(2, 8) % 13
    loss = language_model(layer)
    found = inputs(told(lambda p: loss(p, tokens, tokens + 0), (params,)))
    assert below("0.layers.#.", found) == LAYER_ROLES


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


def test_weights_that_the_program_stacks_are_weights() -> None:
    def loss(p: Any, x: Any) -> Any:
        layers = jax.tree.map(lambda *ws: lax.stack(ws), *p["layers"])
        x, _ = lax.scan(lambda x, w: (layer(w, x), None), x, layers)
        return jnp.mean(x * x)

    found = inputs(told(loss, ({"layers": [LAYER, LAYER]}, f(2, 8, 12))))
    assert below("0.layers.#.", found) == LAYER_ROLES
