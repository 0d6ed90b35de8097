"""Small targets for the command line's tests."""

import jax
import jax.numpy as jnp


def loss(width: int = 24, aux: bool = False):
    """A loss of parameters and tokens; with `aux` it returns the logits' mean beside it."""

    def fn(params, tokens):
        x = params["table"].at[tokens].get(mode="clip")
        logits = jnp.tanh(x @ params["w"]) @ params["table"].T
        value = jax.nn.logsumexp(logits, -1).mean()
        return (value, {"mean": logits.mean()}) if aux else value

    shapes = {"table": (56, width), "w": (width, width)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    return fn, (params, jax.ShapeDtypeStruct((8, 6), jnp.int32))


def step():
    """Gradient descent."""
    fn, (params, tokens) = loss()

    def train(params, tokens):
        value, gradients = jax.value_and_grad(fn)(params, tokens)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return train, (params, tokens)


def not_a_pair():
    return 3


def fails():
    """A factory that raises."""
    raise KeyError("no data set")


def shapes_clash():
    """A program that cannot be traced."""
    return (lambda x, w: x @ w), (jnp.ones((3, 4)), jnp.ones((5, 6)))


def not_an_array():
    return (lambda p, name: p * len(name)), (jnp.ones(3), "abc")


def not_a_tuple():
    return jnp.tanh, jnp.ones(3)


def too_few():
    return (lambda p, x: p @ x), (jnp.ones(3),)


def needs(width: int):
    return jnp.tanh, (jnp.ones(width),)


def exits():
    raise SystemExit("no data")


def noisy():
    """A program that prints, made by a factory that prints."""
    print("from the factory")

    def fn(p, x):
        print("from the trace")
        jax.debug.print("from the run {}", x.sum())
        return ((x @ p) ** 2).mean()

    return fn, (jnp.ones((8, 4)), jnp.ones((16, 8)))


def too_large():
    """A loss whose activations no chip holds."""

    def fn(p, x):
        return ((jnp.tanh(x @ p) @ p.T) ** 2).mean()

    shapes = ((4096, 65_536), (1 << 20, 4096))
    return jax.value_and_grad(fn), tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)
