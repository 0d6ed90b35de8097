"""Small layers, losses and training steps, and how the tests write what roles are found in them."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from xform.axes import find_axes
from xform.roles import Roles, find_roles


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


def f(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


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


def layer(p: Any, x: Any) -> Any:
    return gated(p, block(p, x))


def sgd(loss: Callable) -> Callable:
    def step(params: Any, *batch: Any) -> Any:
        gradients = jax.grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    return step
