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
