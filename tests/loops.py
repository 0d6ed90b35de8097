"""Language models of which only the layers differ, written in a Python loop, with random arguments."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.layers import f, i, picked
from xform.higher_order import bodies, scan_parts
from xform.trace import Jaxpr, JaxprEqn, Literal, bind

MATRIX, VECTOR = f(12, 12), f(12)


def norm(x: Any, scale: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def attend(x: Any, w: Any, mask: Any = None, bias: Any = 0.0) -> Any:
    scores = jnp.einsum("ble,bme->blm", x @ w["q"], x @ w["k"]) + bias
    if mask is not None:
        scores = jnp.where(mask, scores, -1e9)
    return jnp.einsum("blm,bme->ble", jax.nn.softmax(scores), x @ w["v"])


def mlp(x: Any, w: Any, act: Callable = jnp.tanh) -> Any:
    return act(norm(x, w["scale"]) @ w["up"]) @ w["down"]


def layer(x: Any, w: Any, mask: Any = None, act: Callable = jnp.tanh, bias: Any = 0.0) -> Any:
    x = x + attend(norm(x, w["norm"]), w, mask, bias)
    return x + mlp(x, w, act)


def one(hidden: int = 20) -> dict[str, Any]:
    names = {"q": MATRIX, "k": MATRIX, "v": MATRIX, "norm": VECTOR, "scale": VECTOR}
    return names | {"up": f(12, hidden), "down": f(hidden, 12)}


def model(apply: Callable, layers: int, **more: Any) -> tuple[Callable, Any]:
    """A language model whose layers are `apply(params, x) -> x`, and its arguments."""

    def loss(params: Any, tokens: Any, labels: Any) -> Any:
        x = apply(params, params["table"][tokens])
        x, *rest = x if isinstance(x, tuple) else (x,)
        return picked(norm(x, params["final"]) @ params["table"].T, labels), rest

    params = {"table": f(17, 12), "final": VECTOR, "layers": [one() for _ in range(layers)]} | more
    return loss, (params, i(3, 7), i(3, 7))


def dropout(key: Any, x: Any) -> Any:
    return jnp.where(jax.random.bernoulli(key, 0.75, x.shape), x / 0.75, 0)


def chained(key: Any, layers: int) -> Any:
    for _ in range(layers):
        key, sub = jax.random.split(key)
        yield sub


KEYS: dict[str, tuple[Callable, int]] = {
    "split": (lambda key, n: list(jax.random.split(key, n)), 1),
    "fold_in": (lambda key, n: [jax.random.fold_in(key, k) for k in range(n)], 1),
    "chained": (chained, 2),
    "chained, all at first": (lambda key, n: list(chained(key, n)), 2),
}


def random_layer(seed: int) -> Callable:
    """A layer of random operations: (n, x, weights, shared) -> the next x, and another value."""

    def run(n: int, x: Any, w: Any, shared: Any) -> tuple[Any, Any]:
        rng, pool = np.random.default_rng(seed), [x, shared]
        for _ in range(8):
            a, b = (pool[rng.integers(len(pool))] for _ in range(2))
            name = ("q", "k", "v")[rng.integers(3)]
            made = (lambda a=a, b=b: a + b, lambda a=a, b=b: a * jnp.tanh(b), lambda a=a: 0.1 * n * a)
            pool.append((*made, lambda a=a, name=name: a @ w[name])[rng.integers(4)]())
        return norm(x + norm(x * pool[-1], w["scale"]) @ w["q"], w["norm"]), pool[-3]

    return run


def random(args: Any) -> list[Any]:
    rng = np.random.default_rng(0)

    def value(v: Any) -> Any:
        if jax.dtypes.issubdtype(v.dtype, jax.dtypes.prng_key):
            return jax.random.key(3)
        if v.dtype == jnp.int32:
            return jnp.asarray(rng.integers(0, 5, v.shape, dtype=np.int32))
        if v.dtype == bool:
            return jnp.asarray(rng.integers(0, 2, v.shape, dtype=bool))
        return jnp.asarray(rng.normal(size=v.shape).astype(v.dtype) / 3)

    return jax.tree.map(value, jax.tree.leaves(args))


def evaluated(jaxpr: Jaxpr, *args: Any) -> list[Any]:
    """A program's results, one operation after the other, loops turn by turn: what is compiled is one
    operation, once for all programs that have it.
    """
    env: dict[Any, Any] = dict(zip(jaxpr.all_invars, [*jaxpr.consts, *args], strict=True))

    def read(v: Any) -> Any:
        return v.val if isinstance(v, Literal) else env[v]

    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, _results(eqn, list(map(read, eqn.invars))), strict=True))
    return list(map(read, jaxpr.outvars))


def _results(eqn: JaxprEqn, args: list[Any]) -> list[Any]:
    if eqn.primitive.name in ("jit", "remat2", "custom_jvp_call"):
        return evaluated(bodies(eqn)[0], *args)
    if eqn.primitive.name == "cond":
        return evaluated(eqn.params["branches"][int(args[0])], *args[1:])
    if eqn.primitive.name != "scan":
        return bind(eqn, args, eqn.params)
    consts, carry, _ = scan_parts(eqn)
    state, xs, turns = args[consts : consts + carry], args[consts + carry :], range(eqn.params["length"])
    given = {}
    for n in reversed(turns) if eqn.params["reverse"] else turns:
        outs = evaluated(eqn.params["jaxpr"], *args[:consts], *state, *(x[n] for x in xs))
        state, given[n] = outs[:carry], outs[carry:]
    return [*state, *(jnp.stack([given[n][k] for n in turns]) for k in range(len(given[0])))]
