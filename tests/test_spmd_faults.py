"""Programs that collectives written out once got wrong, the smallest of each kind."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.shards import parted
from xform import Plan, Shard, parallelize

PLAN = Plan({"fsdp": 2, "tensor": 4}, [Shard(strict=False, collectives="explicit")])
SIZES = {"fsdp": 2, "tensor": 4}


def real(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32))


def test_a_dimension_of_no_elements_lies_anywhere() -> None:
    def none_of_it(x: Any) -> Any:
        return jnp.concatenate([x[:0] * 2, x]).sum(1) + (x[:, :0] @ x[:0]).sum(1)

    parted(none_of_it, (np.ones((4, 8), np.float32),), SIZES, [P("fsdp", "tensor")], P("fsdp"))


def test_no_rows_are_laid_out_as_rows_are() -> None:
    parted(lambda x: x + 1, (np.ones((0, 8), np.float32),), SIZES, [P("fsdp", "tensor")], P("tensor", "fsdp"))


@jax.custom_vjp
def halved(x: Any) -> Any:
    """The identity, whose gradient is half of itself."""
    return x


halved.defvjp(lambda x: (x, None), lambda _, g: (g / 2,))


def extreme(weights: Any, x: Any) -> Any:
    """A ReLU has many elements that are the least."""
    y = jax.nn.relu(x @ weights["up"])
    return y.min() + jnp.sum(y.max(0)) + jax.nn.logsumexp(y)


def with_rule(weights: Any, x: Any) -> Any:
    return jnp.mean(halved(x @ weights["up"]) ** 2)


@pytest.mark.parametrize("loss", [extreme, with_rule], ids=["extreme", "with_rule"])
def test_a_loss_is_differentiated_from_outside(loss: Callable[..., Any]) -> None:
    args = ({"up": real(12, 8)}, real(6, 12))
    want, got = jax.grad(loss)(*args), jax.jit(jax.grad(parallelize(loss, PLAN)))(*args)
    np.testing.assert_allclose(got["up"], want["up"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.bool_])
def test_what_the_outside_notices_is_called_once_with_all_of_it(dtype: Any) -> None:
    seen: list[np.ndarray] = []

    def note(x: Any) -> np.ndarray:
        seen.append(np.asarray(x))
        return (np.asarray(x)[:, 0] > 0).astype(dtype)

    def step(weights: Any, x: Any) -> Any:
        y = x @ weights["up"]
        return io_callback(note, jax.ShapeDtypeStruct((6,), dtype), y), y

    args = ({"up": real(12, 8)}, real(6, 12))
    found, y = jax.block_until_ready(parallelize(step, PLAN)(*args))
    assert len(seen) == 1
    np.testing.assert_array_equal(seen[0], y)
    np.testing.assert_array_equal(found, (np.asarray(y)[:, 0] > 0).astype(dtype))


def test_a_constraint_may_speak_of_another_mesh() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("elsewhere",))

    def step(weights: Any, x: Any) -> Any:
        return jax.lax.with_sharding_constraint(x @ weights["up"], NamedSharding(mesh, P(None, "elsewhere")))

    args = ({"up": real(12, 8)}, real(6, 12))
    np.testing.assert_allclose(parallelize(step, PLAN)(*args), jax.jit(step)(*args), rtol=1e-5, atol=1e-5)
