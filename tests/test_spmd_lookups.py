"""Lookups and updates run where the indices fall; their tables are gathered only where that sends less."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.shards import parted

SIZES = {"fsdp": 2, "tensor": 4}


def numbers(*shape: int) -> np.ndarray:
    """Small whole numbers: their sums are exact in any order."""
    return np.random.default_rng(len(shape)).integers(-9, 10, shape).astype(np.float32)


def indices(*shape: int, below: int, dtype: Any = np.int32) -> np.ndarray:
    """Every fifth is out of bounds."""
    drawn = np.random.default_rng(below).integers(0, below, shape)
    outside = below + 3 if np.dtype(dtype).kind == "u" else -2
    return np.where(np.arange(drawn.size).reshape(shape) % 5 == 4, outside, drawn).astype(dtype)


@pytest.mark.parametrize("mode", ["clip", "fill", "promise_in_bounds"])
@pytest.mark.parametrize("dtype", [np.int32, np.uint8])
def test_a_table_is_looked_up_where_it_lies(mode: str, dtype: Any) -> None:
    def look(table: Any, i: Any) -> Any:
        return table.at[i].get(mode=mode, wrap_negative_indices=False)

    args = (numbers(60, 6), indices(4, 3, below=60, dtype=dtype))
    made = parted(look, args, SIZES, [P("tensor"), P("fsdp")], P("fsdp"))
    assert made.moves() == [("psum", ("tensor",), 2 * 3 * 6)]


def test_whole_numbers_out_of_bounds_are_filled_once() -> None:
    def look(table: Any, i: Any) -> Any:
        return table.at[i].get(mode="fill", fill_value=7, wrap_negative_indices=False)

    args = (numbers(60, 6).astype(np.int32), indices(4, 3, below=60))
    assert parted(look, args, SIZES, [P("tensor"), P("fsdp")], P("fsdp")).shapes("gather") == [(2, 3, 6)]


def test_a_table_smaller_than_what_is_looked_up_is_gathered() -> None:
    args = (numbers(8, 6), indices(4, 31, below=8) % 8)
    made = parted(lambda t, i: t[i], args, SIZES, [P("tensor"), P("fsdp")], P("fsdp"))
    assert made.moves() == [("all_gather", ("tensor",), 2 * 6)]


def test_a_table_of_booleans_is_gathered() -> None:
    args = (numbers(60, 6) > 0, indices(4, 3, below=60) % 60)
    made = parted(lambda t, i: t[i], args, SIZES, [P("tensor"), P("fsdp")], P("fsdp"))
    assert {name for name, *_ in made.moves()} == {"all_gather"}


def test_a_lookup_that_is_wanted_over_the_axis_is_scattered() -> None:
    args = (numbers(60, 6), indices(4, 3, 4, below=60) % 60)
    spec = P("fsdp", None, "tensor")
    made = parted(lambda t, i: t[i], args, SIZES, [P("tensor"), P("fsdp")], spec, spec)
    assert made.moves() == [("reduce_scatter", ("tensor",), 2 * 3 * 4 * 6)]


def test_a_lookup_in_two_dimensions_that_lie_over_axes_is_of_both() -> None:
    args = (numbers(20, 5, 12), indices(3, below=20), indices(3, below=12))
    made = parted(
        lambda t, i, j: t.at[i, :, j].get(mode="fill", wrap_negative_indices=False),
        args,
        SIZES,
        [P("fsdp", None, "tensor"), P(), P()],
        P(),
    )
    ((name, axes, size),) = made.moves()
    assert (name, set(axes), size) == ("psum", {"fsdp", "tensor"}, 3 * 5)


def test_a_table_whose_rows_lie_in_pieces_is_looked_up_where_they_lie() -> None:
    args = (numbers(6, 4, 5, 7), indices(3, below=120))
    made = parted(
        lambda t, i: t.reshape(120, 7).at[i].get(mode="clip"), args, SIZES, [P("fsdp", "tensor"), P()], P()
    )
    assert made.shapes("gather") == [(3, 7)] and "all_gather" not in {name for name, *_ in made.moves()}


def test_labels_are_looked_up_in_logits_that_lie_over_the_vocabulary() -> None:
    def look(logits: Any, labels: Any) -> Any:
        return jnp.take_along_axis(logits, labels[..., None], axis=-1)

    args = (numbers(4, 3, 20), indices(4, 3, below=20))
    made = parted(look, args, SIZES, [P("fsdp", None, "tensor"), P("fsdp")], P("fsdp"))
    assert made.moves() == [("psum", ("tensor",), 2 * 3 * 1)]


def test_the_gradient_of_labels_stays_over_the_vocabulary() -> None:
    def loss(logits: Any, labels: Any) -> Any:
        return (jnp.take_along_axis(logits, labels[..., None], axis=-1) ** 2).sum()

    args = (numbers(4, 3, 20), indices(4, 3, below=20) % 20)
    spec = P("fsdp", None, "tensor")
    made = parted(jax.grad(loss), args, SIZES, [spec, P("fsdp")], spec, spec)
    assert made.moves() == [("psum", ("tensor",), 2 * 3 * 1)]
    assert made.shapes("scatter-add") == [(2, 3, 5)]


def test_the_gradient_of_an_embedding_is_scattered_to_where_it_is_wanted() -> None:
    def gradient(table: Any, tokens: Any, dy: Any) -> Any:
        return jax.vjp(lambda t: t[tokens], table)[1](dy)[0]

    args = (numbers(20, 6), indices(4, 3, below=20) % 20, numbers(4, 3, 6))
    spec = P("tensor", "fsdp")
    made = parted(gradient, args, SIZES, [spec, P("fsdp"), P("fsdp")], spec, spec)
    assert made.moves() == [("reduce_scatter", ("fsdp",), 5 * 6)]


@pytest.mark.parametrize("name", ["add", "subtract"])
def test_rows_that_lie_over_an_axis_are_added_to_the_operand_once(name: str) -> None:
    def add(table: Any, i: Any, dy: Any) -> Any:
        return getattr(table.at[i], name)(dy, mode="drop", wrap_negative_indices=False)

    args = (numbers(20, 2), indices(4, 31, below=20), numbers(4, 31, 2))
    made = parted(add, args, SIZES, [P("tensor"), P("fsdp"), P("fsdp")], P("tensor"), P("tensor"))
    assert made.moves() == [("psum", ("fsdp",), 5 * 2)]


@pytest.mark.parametrize("mode", ["clip", "drop", "promise_in_bounds"])
@pytest.mark.parametrize("name", ["set", "multiply", "min", "max"])
def test_updates_reach_the_part_that_their_indices_fall_on(name: str, mode: str) -> None:
    def update(table: Any, i: Any, x: Any) -> Any:
        return getattr(table.at[i], name)(x, mode=mode, wrap_negative_indices=False)

    i = np.array([3, 25, 11, -4, 7])
    made = parted(update, (numbers(20, 6), i, numbers(5, 6)), SIZES, [P("tensor"), P(), P()], P("tensor"))
    assert made.moves() == []


def test_each_row_of_a_cache_is_written_at_its_own_place() -> None:
    def write(cache: Any, x: Any, at: Any) -> Any:
        return jax.vmap(lambda c, u, i: lax.dynamic_update_slice(c, u, (i, 0)))(cache, x, at)

    args = (numbers(4, 12, 3), numbers(4, 1, 3), np.array([0, 5, 11, 40]))
    made = parted(write, args, SIZES, [P("fsdp", "tensor"), P("fsdp"), P("fsdp")], P("fsdp", "tensor"))
    assert made.moves() == []


@pytest.mark.parametrize("at", [0, 7, 11, 40, -40])
def test_a_position_of_a_cache_is_written_and_read_where_it_lies(at: int) -> None:
    def write(cache: Any, x: Any, at: Any) -> Any:
        return lax.dynamic_update_slice(cache, x, (0, at, 0))

    def read(cache: Any, at: Any) -> Any:
        return lax.dynamic_slice(cache, (0, at, 0), (4, 1, 3))

    cache, laid = numbers(4, 12, 3), P("fsdp", "tensor")
    assert (
        parted(write, (cache, numbers(4, 1, 3), np.int32(at)), SIZES, [laid, P("fsdp"), P()], laid).moves()
        == []
    )
    made = parted(read, (cache, np.int32(at)), SIZES, [laid, P()], P("fsdp"))
    assert made.moves() == [("psum", ("tensor",), 2 * 1 * 3)]


def in_turns(body: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda state, xs: lax.scan(lambda c, x: (body(c, x), None), state, xs)[0]


def test_a_cache_that_a_loop_carries_stays_where_it_lies() -> None:
    def body(cache: Any, i: Any) -> Any:
        before = lax.dynamic_slice(cache, (i, 0), (1, 3))
        return lax.dynamic_update_slice(cache, before + 1, (i + 5, 0))

    args = (numbers(12, 3), np.arange(7))
    made = parted(in_turns(body), args, SIZES, [P("tensor"), P()], P("tensor"))
    assert made.moves() == [("psum", ("tensor",), 1 * 3)]


def test_an_embedding_in_a_loop_is_looked_up_where_it_lies_under_grad() -> None:
    def loss(table: Any, tokens: Any) -> Any:
        return in_turns(lambda y, i: y + table[i] ** 2)(jnp.zeros((4, 2)), tokens).sum()

    args = (numbers(60, 2), indices(3, 4, below=60) % 60)
    made = parted(jax.grad(loss), args, SIZES, [P("tensor"), P(None, "fsdp")], P("tensor"), P("tensor"))
    assert ("all_gather", ("tensor",), 15 * 2) not in made.moves()


def test_slices_longer_than_one_take_whole_values() -> None:
    args = (numbers(12, 3), np.int32(5))
    made = parted(lambda x, i: lax.dynamic_slice(x, (i, 0), (5, 3)), args, SIZES, [P("tensor"), P()], P())
    assert made.moves() == [("all_gather", ("tensor",), 3 * 3)]
