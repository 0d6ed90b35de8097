"""Random numbers are those of one device; with threefry keys each device makes its own part alone."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.random import threefry2x32_p
from jax.sharding import PartitionSpec as P

from tests.shards import parted

SIZES = {"fsdp": 2, "tensor": 4}


def key(impl: str = "threefry2x32") -> Any:
    return jax.random.key(7, impl=impl)


def test_each_device_makes_its_own_part_of_normal_numbers() -> None:
    made = parted(
        lambda k: jax.random.normal(k, (6, 3, 20)), [key()], SIZES, [P()], P("fsdp", None, "tensor")
    )
    assert made.moves() == [] and made.shapes("erf_inv") == [(3, 3, 5)]


def test_a_dimension_over_two_axes_is_numbered_as_a_whole() -> None:
    made = parted(lambda k: jax.random.bits(k, (3, 24)), [key()], SIZES, [P()], P(None, ("tensor", "fsdp")))
    assert made.shapes("threefry2x32") == [(3, 3)]


def test_a_dimension_of_pieces_over_axes_is_numbered_as_a_whole() -> None:
    def drop(k: Any, x: Any) -> Any:
        return (x.reshape(24, 5) * jax.random.bernoulli(k, 0.3, (24, 5))).reshape(6, 4, 5)

    x = np.arange(120, dtype=np.float32).reshape(6, 4, 5)
    made = parted(drop, [key(), x], SIZES, [P(), P("fsdp", "tensor")], P("fsdp", "tensor"))
    assert made.moves() == [] and made.shapes("threefry2x32") == [(3, 5)]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_bits_of_each_width_are_those_of_one_device(dtype: str) -> None:
    made = parted(lambda k: jax.random.bits(k, (5, 8), dtype), [key()], SIZES, [P()], P(None, "tensor"))
    assert made.shapes("threefry2x32") == [(5, 2)]


def test_bits_of_64_are_those_of_one_device() -> None:
    with jax.enable_x64(True):
        made = parted(
            lambda k: jax.random.bits(k, (5, 8), "uint64"), [key()], SIZES, [P()], P(None, "tensor")
        )
    assert made.shapes("threefry2x32") == [(5, 2)]


def test_keys_that_lie_over_an_axis_make_their_own_numbers() -> None:
    def draw(data: Any) -> Any:
        return jax.vmap(lambda k: jax.random.uniform(k, (3, 4)))(jax.random.wrap_key_data(data))

    data = jax.random.key_data(jax.random.split(key(), 6))
    made = parted(draw, [data], SIZES, [P("fsdp")], P("fsdp", None, "tensor"))
    assert made.moves() == [] and made.shapes("threefry2x32") == [(3, 3, 1)]


def test_keys_of_an_argument_are_gathered_where_the_numbers_lie_otherwise() -> None:
    def draw(keys: Any) -> Any:
        return jax.vmap(lambda k: jax.random.bits(k, (4,)))(keys)

    made = parted(draw, [jax.random.split(key(), 6)], SIZES, [P("fsdp")], P(None, "fsdp"))
    assert {name for name, *_ in made.moves()} <= {"all_gather", "all_to_all"}


DRAWS: dict[str, Callable[[Any], Any]] = {
    "bernoulli": lambda k: jax.random.bernoulli(k, 0.3, (8, 5)),
    "categorical": lambda k: jax.random.categorical(k, jnp.arange(40.0).reshape(8, 5)),
    "choice": lambda k: jax.random.choice(k, 31, (8,), replace=False),
    "exponential": lambda k: jax.random.exponential(k, (8, 5)),
    "fold_in": lambda k: jax.random.bits(jax.random.fold_in(k, 3), (8,)),
    "permutation": lambda k: jax.random.permutation(k, 8),
    "permutation of rows": lambda k: jax.random.permutation(k, jnp.arange(24).reshape(8, 3)),
    "randint": lambda k: jax.random.randint(k, (8, 5), -3, 11),
    "seed": lambda k: jax.random.bits(jax.random.key(jax.random.bits(k, ()) >> 1), (8,)),
    "split": lambda k: jax.vmap(lambda each: jax.random.bits(each, (5,)))(jax.random.split(k, 8)),
    "truncated_normal": lambda k: jax.random.truncated_normal(k, -1.0, 2.0, (8, 5)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_what_jax_random_draws_is_what_one_device_draws(name: str) -> None:
    made = parted(DRAWS[name], [key()], SIZES, [P()], P("tensor"))
    assert made.moves() == []


@pytest.mark.slow
def test_gamma_numbers_are_those_of_one_device() -> None:
    """Slow: compiles the rejection loop twice."""
    made = parted(lambda k: jax.random.gamma(k, 2.5, (8,)), [key()], SIZES, [P()], P("tensor"))
    assert made.moves() == []


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_bits_of_other_keys_are_made_whole_and_told(impl: str) -> None:
    made = parted(lambda k: jax.random.bits(k, (5, 8)), [key(impl)], SIZES, [P()], P(None, "tensor"))
    ((note, _),) = made.report
    assert note.kind == "declined" and "every device makes all of them" in note.why
    assert made.shapes("random_bits") == [(5, 8)]


def test_bits_that_are_not_partitionable_are_made_whole_and_told() -> None:
    with jax.threefry_partitionable(False):
        made = parted(lambda k: jax.random.bits(k, (5, 8)), [key()], SIZES, [P()], P(None, "tensor"))
    assert len(list(made.report)) == 1 and made.shapes("random_bits") == [(5, 8)]


def test_bits_of_the_generator_itself_are_those_of_one_device() -> None:
    def draw(seed: Any) -> Any:
        return lax.rng_bit_generator(seed, (5, 8), np.uint32)[1]

    seed = np.arange(4, dtype=np.uint32)
    assert parted(draw, [seed], SIZES, [P()], P(None, "tensor")).shapes("rng_bit_generator")[0] == (4,)


def test_dropout_in_a_loop_under_grad_is_made_on_the_parts() -> None:
    def loss(x: Any, k: Any) -> Any:
        def body(y: Any, i: Any) -> Any:
            kept = jax.random.bernoulli(jax.random.fold_in(k, i), 0.5, y.shape)
            return jax.checkpoint(lambda y: jnp.where(kept, y * y, 0.0))(y), None

        return lax.scan(body, x, jnp.arange(3))[0].sum()

    x = np.arange(1, 25, dtype=np.float32).reshape(6, 4) / 16
    spec = P("fsdp", "tensor")
    made = parted(jax.grad(loss), [x, key()], SIZES, [spec, P()], spec)
    assert made.moves() == [] and set(made.shapes("threefry2x32")) == {(3, 1)}


def words_of(k: Any) -> Any:
    """Bits of rows 13 to 20, each 5 long, as a program spells them itself."""
    data = jax.random.key_data(k)
    rows = lax.iota(np.uint32, 8) + np.uint32(13)
    low = rows[:, None] * np.uint32(5) + lax.iota(np.uint32, 5)
    halves = (lax.broadcast_in_dim(half, low.shape, ()) for half in data)
    high, low = threefry2x32_p.bind(*halves, jnp.zeros_like(low), low)
    return high ^ low


def test_words_of_numbers_that_are_counted_are_made_on_the_parts_and_once() -> None:
    made = parted(words_of, [key()], SIZES, [P()], P("tensor"))
    assert made.moves() == [] and made.shapes("threefry2x32") == [(2, 5)]


def test_words_of_keys_of_an_argument_are_made_where_those_lie() -> None:
    def draw(data: Any) -> Any:
        zeros = jnp.zeros_like(data)
        return threefry2x32_p.bind(data, data + np.uint32(1), zeros, zeros + np.uint32(7))[1]

    data = np.arange(24, dtype=np.uint32).reshape(8, 3)
    made = parted(draw, [data], SIZES, [P("tensor")], P("tensor"))
    assert made.moves() == [] and made.shapes("threefry2x32") == [(2, 3)]
