"""`Placed`: the model's tree and the plan's layout of it, there and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xform.sharding.placement import taken_apart
from xform.state import Layout, Placed, closed, gathered, opened, row_path, whole

TREE = {"layers": [{"w": jnp.full(2, float(n)), "b": jnp.ones(3) * n} for n in range(3)], "norm": jnp.ones(4)}
LEAVES, STRUCTURE = jax.tree.flatten(TREE)  # b0 w0 b1 w1 b2 w2 norm
LAYOUT = Layout(STRUCTURE, ((0, 2, 4), (1, 3, 5), (6,)))


def placed() -> Placed:
    return Placed(LAYOUT, gathered(LAYOUT.groups, LEAVES))


def same(a, b) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_row_is_one_array_and_a_name_says_which() -> None:
    named, _ = jax.tree_util.tree_flatten_with_path(placed())
    assert {jax.tree_util.keystr(path): x.shape for path, x in named} == {
        "['layers'][*]['b']": (3, 3),
        "['layers'][*]['w']": (3, 2),
        "['norm']": (4,),
    }


def test_opened_and_closed_are_each_others_inverse_and_copy_nothing() -> None:
    before = placed()
    again = closed(opened(before), {STRUCTURE: LAYOUT})
    assert isinstance(again, Placed)
    assert all(a is b for a, b in zip(again.arrays, before.arrays, strict=True))


def test_a_part_that_has_no_layout_becomes_arrays_of_its_own() -> None:
    same(closed(opened(placed()), {}), TREE)


def test_a_placed_tree_goes_through_jit_and_tree_map_as_any_other() -> None:
    doubled = jax.jit(lambda tree: jax.tree.map(lambda x: 2 * x, tree))(placed())
    assert doubled.layout == LAYOUT
    same(closed(opened(doubled), {}), jax.tree.map(lambda x: 2 * x, TREE))


def test_only_all_leaves_of_one_stack_in_order_are_the_stack() -> None:
    leaves = jax.tree.leaves(opened(placed()))
    row = [leaves[0], leaves[2], leaves[4]]
    assert whole(row) is row[0].stacked
    assert whole(row[::-1]) is None
    assert whole(row[:2]) is None
    assert whole([leaves[0], leaves[3], leaves[4]]) is None
    np.testing.assert_array_equal(
        gathered(((0, 1),), row[1:])[0], jnp.stack([TREE["layers"][n]["b"] for n in (1, 2)])
    )


def test_reading_the_models_tree_out_of_a_placed_one_says_how() -> None:
    with pytest.raises(AttributeError, match=r"step\.unplace\(tree\)\.params reads"):
        placed().params  # noqa: B018
    with pytest.raises(TypeError, match=r"step\.unplace\(tree\)\['norm'\] reads"):
        placed()["norm"]


def test_paths_of_a_row_have_a_star_where_they_differ() -> None:
    assert row_path(["a"]) == "a"
    assert row_path(["[0].layers[9].w", "[0].layers[10].w"]) == "[0].layers[*].w"
    assert row_path([".h_0.w", ".h_1.w"]) == ".h_*.w"
    assert row_path(["[11]", "[1]"]) == "[1*]"


KEPT = Layout(STRUCTURE, LAYOUT.groups, ("quantize['0.mlpwi']['left']",))


def with_kept(x=7.0) -> Placed:
    return Placed(KEPT, [*placed().arrays, jnp.full(3, x)])


def test_what_a_plan_keeps_has_a_name_among_the_arrays_and_no_place_in_the_tree() -> None:
    named, _ = jax.tree_util.tree_flatten_with_path(with_kept())
    assert jax.tree_util.keystr(named[-1][0]) == "quantize['0.mlpwi']['left']"
    assert "quantize['0.mlpwi']['left']: float32[3]" in repr(with_kept())
    same(closed(opened(with_kept()), {}), TREE)
    same(taken_apart(with_kept()), TREE)


def test_what_is_kept_goes_with_the_first_part_of_its_layout_alone() -> None:
    (name,) = KEPT.kept
    first, second = closed((opened(with_kept()), opened(placed())), {STRUCTURE: KEPT}, {name: jnp.ones(3)})
    assert first.layout == KEPT and first.kept[name].tolist() == [1, 1, 1]
    assert second.layout == LAYOUT and not second.kept


def test_a_tree_that_is_not_stacked_is_placed_for_what_is_kept_and_its_like_is_plain() -> None:
    layout = Layout(STRUCTURE, tuple((i,) for i in range(len(LEAVES))), ("range",))
    first, second = closed((TREE, TREE), {STRUCTURE: layout}, {"range": jnp.ones(())})
    assert isinstance(first, Placed) and list(first.kept) == ["range"]
    same(second, TREE)
