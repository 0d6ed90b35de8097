"""Steps whose state is stacked, their packed form, and whether it gives the same numbers."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.lax import stack, stack_p, unstack_p

from xform.higher_order import equations
from xform.state import Packed, pack
from xform.trace import Jaxpr, eval_jaxpr, shape_of, trace_flat, typeof

LAYERS, WIDTH, ROWS = 3, 24, 5  # a weight is 2304 bytes: more than may be stacked on the spot


def seeded(seed: int, *shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * 0.3, jnp.float32)


def params_of(layers: int = LAYERS) -> dict[str, Any]:
    blocks = [{"w": seeded(i, WIDTH, WIDTH), "b": seeded(9 + i, WIDTH)} for i in range(layers)]
    return {"embed": seeded(31, WIDTH, WIDTH), "layers": blocks}


X = seeded(77, ROWS, WIDTH)


def rolled(layers: list[Any], x: Any) -> Any:
    """The layers as one scan over their stacked weights, as a pass rolls them."""
    stacked = {name: stack([layer[name] for layer in layers]) for name in layers[0]}
    return jax.lax.scan(lambda x, p: (jnp.tanh(x @ p["w"] + p["b"]), None), x, stacked)[0]


def loss(params: Any, x: Any) -> Any:
    return jnp.mean(rolled(params["layers"], x @ params["embed"]) ** 2)


def flat(fn: Callable, args: Any) -> tuple[Callable, list[Any], list[str]]:
    """The function over leaves, the leaves, and their paths."""
    found, tree = jax.tree_util.tree_flatten_with_path(args)
    paths = [jax.tree_util.keystr(path) for path, _ in found]
    leaves = [jnp.asarray(leaf) for _, leaf in found]
    return lambda *xs: jax.tree.leaves(fn(*jax.tree.unflatten(tree, xs))), leaves, paths


def packed(fn: Callable, *args: Any, own: bool = False, **options: Any) -> Packed:
    """The packed step; unless it has some of its `own`, without large stacks where none is told."""
    over, leaves, paths = flat(fn, args)
    found = pack(trace_flat(over, [typeof(leaf) for leaf in leaves], "step"), paths, **options)
    assert found is not None
    assert list(map(shape_of, found.jaxpr.invars)) == [
        leaves[g[0]].shape if len(g) == 1 else (len(g), *leaves[g[0]].shape) for g in found.inputs
    ]
    assert sorted(i for g in found.inputs for i in g) == list(range(len(leaves)))
    if not found.left and not own:
        assert not [e for e in equations(found.jaxpr) if large(e) and e.primitive in (stack_p, unstack_p)]
    return found


def large(eqn: Any) -> bool:
    return any(v.aval.size > 256 for v in eqn.outvars) and max(len(eqn.invars), len(eqn.outvars)) > 1


def gathered(groups: tuple[tuple[int, ...], ...], leaves: list[Any]) -> list[Any]:
    return [leaves[g[0]] if len(g) == 1 else jnp.stack([leaves[i] for i in g]) for g in groups]


def numbers(x: Any) -> np.ndarray:
    key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if key else x)


def agree(found: Packed, fn: Callable, *args: Any, tolerance: float = 1e-6) -> None:
    """Both programs' results. What XLA fuses differently may differ in the last place."""
    over, leaves, _ = flat(fn, args)

    def both(*xs: Any) -> Any:
        got = eval_jaxpr(found.jaxpr, *gathered(found.inputs, list(xs)))
        return got, gathered(found.outputs, over(*xs))

    got, want = jax.jit(both, compiler_options={"xla_backend_optimization_level": 0})(*leaves)
    for a, b in zip(got, want, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_allclose(numbers(a), numbers(b), rtol=tolerance, atol=tolerance)


def copied(jaxpr: Jaxpr) -> list[str]:
    """What the compiled program stacks or slices, of more than a KiB, other than a loop's turn by turn."""
    lowered = jax.jit(lambda *xs: eval_jaxpr(jaxpr, *xs)).lower(*[v.aval for v in jaxpr.invars])
    text = lowered.compile().as_text() or ""
    found = re.findall(r"= (\w+)\[([\d,]+)\]\S* (concatenate|slice|pad)\(", text)
    return [
        f"{op} {kind}[{shape}]"
        for kind, shape, op in found
        if np.prod(list(map(int, shape.split(",")))) > 256
    ]


def sizes(groups: tuple[tuple[int, ...], ...]) -> list[int]:
    return [len(group) for group in groups]


def sgd(params: Any, x: Any) -> Any:
    value, gradients = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def with_optimizer(optimizer: Any, of: Callable = loss) -> Callable:
    def step(params: Any, state: Any, x: Any) -> Any:
        value, gradients = jax.value_and_grad(of)(params, x)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def with_gradients(change: Callable, of: Callable = loss) -> Callable:
    """A step that does something with params and gradients."""
    return lambda params, *rest: change(params, jax.grad(of)(params, rest[-1]), *rest[:-1])


def descend(params: Any, gradients: Any) -> Any:
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


def weights(count: int = 3) -> list[Any]:
    return [seeded(i, WIDTH, WIDTH) for i in range(count)]


def through(ws: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]
