"""A state whose layers are stored in the order of the stages: in, out, through the step, and on a mesh."""

import dataclasses
import re
import warnings
from collections import Counter
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.lax import stack
from jax.sharding import NamedSharding, PartitionSpec

from tests.stages import LAYERS, ORDER, X, layer, loss_by, moved, params_of, piped, scanned, step_by
from xform import Placed, Plan, parallelize
from xform.check import check
from xform.ops.rows import by_stage
from xform.state import Element, Layout, Order, Ordered, closed, gathered, opened

ADAMW = optax.chain(optax.clip_by_global_norm(0.01), optax.adamw(1e-2))
MESH = {"stage": 4, "fsdp": 2}


@dataclasses.dataclass(frozen=True)
class ByStage:
    """Lays every array of as many rows as there are layers over the stages."""

    stages: ClassVar[tuple[str, ...]] = ("step",)

    def rewrite(self, jaxpr: Any, context: Any) -> Any:
        over, whole = (NamedSharding(context.mesh, PartitionSpec(*spec)) for spec in (("stage",), ()))
        for leaves, layouts in (
            (context.inputs, context.in_shardings),
            (context.outputs, context.out_shardings),
        ):
            layouts[:] = [over if leaf.aval.shape[:1] == (LAYERS,) else whole for leaf in leaves]
        return jaxpr


@dataclasses.dataclass(frozen=True)
class Stacks:
    """Has stacks of layers' weights stored as such."""

    stages: ClassVar[tuple[str, ...]] = ("step",)
    stacks: ClassVar[bool] = True

    def rewrite(self, jaxpr: Any, context: Any) -> Any:
        return jaxpr


PLAN = Plan(MESH, [ByStage()])


def state_of() -> Any:
    return params_of(), ADAMW.init(params_of())


def same(a: Any, b: Any, tolerance: float = 0.0) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=tolerance, atol=tolerance)


# ---------------------------------------------------------------- leaves in an order


TREE = {"w": np.arange(12.0).reshape(LAYERS, 3), "head": np.ones(5)}
LAYOUT = Layout(jax.tree.structure(TREE), ((0,), (1,)), orders=(None, Order(ORDER)))


def test_a_leaf_in_an_order_is_named_and_shaped_and_read_as_the_models_own() -> None:
    placed = Placed(LAYOUT, gathered(LAYOUT.groups, jax.tree.leaves(TREE), orders=LAYOUT.orders))
    np.testing.assert_array_equal(placed.arrays[1], TREE["w"][list(ORDER)])
    assert LAYOUT.paths == ("['head']", "['w']@0,2,1,3")
    leaf = opened(placed)["w"]
    assert isinstance(leaf, Ordered) and leaf.shape == (LAYERS, 3) and leaf.dtype == np.float64
    np.testing.assert_array_equal(leaf.array(), TREE["w"])
    assert closed(opened(placed), {LAYOUT.tree: LAYOUT}).arrays[1] is placed.arrays[1]
    same(closed(opened(placed), {}), TREE)


def test_orders_are_written_as_runs_and_with_their_dimension() -> None:
    assert str(Order((0, 1, 4, 5, 2, 3))) == "0-1,4-5,2-3"
    assert str(Order((1, 0, 2), 2)) == "1,0,2:2"


def test_an_order_of_another_dimension_than_the_stacks_is_of_each_of_its_leaves() -> None:
    tree = [np.arange(6.0).reshape(2, 3) + n for n in range(2)]
    layout = Layout(jax.tree.structure(tree), ((0, 1),), orders=(Order((2, 0, 1), 2),))
    placed = Placed(layout, gathered(layout.groups, tree, orders=layout.orders))
    np.testing.assert_array_equal(placed.arrays[0], np.stack(tree)[..., [2, 0, 1]])
    leaf = opened(placed)[1]
    assert isinstance(leaf, Element)
    np.testing.assert_array_equal(leaf.array(), tree[1])
    assert closed(opened(placed), {layout.tree: layout}).arrays[0] is placed.arrays[0]


def test_another_order_is_another_structure() -> None:
    other = dataclasses.replace(LAYOUT, orders=(None, Order((1, 0, 2, 3))))
    structures = {jax.tree.structure(Placed(layout, (1, 2))) for layout in (LAYOUT, other)}
    assert len(structures) == 2


# ---------------------------------------------------------------- a step on a mesh


def test_a_placed_state_goes_through_steps_as_it_is_and_comes_out_as_the_models_own() -> None:
    step = parallelize(step_by(piped, ADAMW), PLAN)
    plain = jax.jit(step_by(scanned, ADAMW))
    state, other = step.place(state_of(), X)[0], state_of()
    assert isinstance(state, Placed)
    same(step.unplace(state), other)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            layout = state.layout
            (state, value), (other, wanted) = step(state, X), plain(other, X)
            assert state.layout == layout
            np.testing.assert_allclose(value, wanted, rtol=1e-6)
    same(step.unplace(state), other, 1e-6)
    (w,) = (x for path, x in zip(state.layout.paths, state.arrays, strict=True) if path == "[0]['w']@0,2,1,3")
    assert w.sharding.spec == PartitionSpec("stage")
    assert step.unplace(state)[0]["w"].sharding.spec == PartitionSpec("stage")


def test_the_report_has_one_line_of_what_is_stored_so() -> None:
    program = parallelize(step_by(piped, ADAMW), PLAN).trace(state_of(), X)
    lines = [line for line in program.report.lines() if "stored" in line]
    assert lines == [
        "state: stored 6 arrays of 4 layers in the order of their stages: put in it once, by place or init;"
        " unplace gives the model's own"
    ]
    assert [stage.name for stage in program.stages] == ["order", "bystage"]
    assert not moved(program.jaxpr)


def test_nothing_travels_to_be_reordered() -> None:
    """The compiled step has the collectives of one whose layers are not reordered at all, and no more."""

    def unordered(layers: Any, x: Any) -> Any:
        for row in np.argsort(ORDER):
            x = layer(x, layers["w"][row], layers["b"][row])
        return x

    def collectives(step: Any) -> Counter[str]:
        text = step.lower(state_of(), X).compile().as_text()
        kinds = r"(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
        return Counter(re.findall(kinds, text))

    got, wanted = (collectives(parallelize(step_by(run, ADAMW), PLAN)) for run in (piped, unordered))
    assert got.total() <= wanted.total()


def test_the_models_own_tree_is_reordered_in_every_call_and_that_is_said() -> None:
    step = parallelize(step_by(piped, ADAMW), PLAN)
    with pytest.warns(UserWarning, match=r"step: 6 arrays come in another order .* in every call; \.place"):
        state, _ = step(state_of(), X)
    assert not isinstance(state, Placed)
    same(state, jax.jit(step_by(scanned, ADAMW))(state_of(), X)[0], 1e-6)


def test_a_state_is_born_in_its_order() -> None:
    step = parallelize(step_by(piped, ADAMW), PLAN)
    step.trace(state_of(), X)
    born = step.init(state_of)
    assert isinstance(born, Placed)
    assert born.layout == step.place(state_of(), X)[0].layout
    same(step.unplace(born), state_of())


def test_a_state_of_one_step_is_taken_by_another_with_another_order_or_none() -> None:
    def backwards(layers: Any, x: Any) -> Any:
        rows = tuple(reversed(range(LAYERS)))
        there = jax.tree.map(lambda w: by_stage(w, rows), layers)
        for row in rows:
            x = layer(x, there["w"][row], there["b"][row])
        return x

    params = parallelize(loss_by(piped), PLAN).place(params_of(), X)[0]
    wanted = loss_by(scanned)(params_of(), X)
    assert parallelize(loss_by(piped), PLAN)(params, X) == pytest.approx(wanted)
    other = parallelize(loss_by(backwards), PLAN)
    for step in (other, parallelize(loss_by(scanned), PLAN)):
        with pytest.warns(UserWarning, match="2 arrays come in another order"):
            assert step(params, X) == pytest.approx(wanted)
    again = other.place(params, X)[0]
    assert again.layout.orders != params.layout.orders
    same(other.unplace(again), params_of())


def test_layers_of_an_unrolled_model_are_stored_in_the_order_in_which_the_step_stacks_them() -> None:
    def loss(layers: list[Any], x: Any) -> Any:
        there = {name: stack([layers[row][name] for row in ORDER]) for name in "bw"}
        return jnp.mean(scanned(there, x) ** 2)

    def step(layers: list[Any], x: Any) -> Any:
        return jax.tree.map(lambda p, g: p - 0.1 * g, layers, jax.grad(loss)(layers, x))

    layers = [{"b": jnp.full(20, 0.1 * n, jnp.float32), "w": jnp.eye(20) * (1 + n)} for n in range(LAYERS)]
    x = jnp.ones((2, 20)) * 0.1
    by_stages = parallelize(step, Plan({}, [Stacks()]))
    state = by_stages.place(layers, x)[0]
    assert state.layout.groups == ((0, 4, 2, 6), (1, 5, 3, 7)) and not state.layout.orders
    np.testing.assert_allclose(state.arrays[0][:, 0], [0.0, 0.2, 0.1, 0.3], rtol=1e-6)
    same(by_stages.unplace(by_stages(state, x)), jax.jit(step)(layers, x), 1e-6)


def test_a_stack_of_layers_that_is_reordered_is_stacked_in_that_order() -> None:
    def loss(layers: list[Any], x: Any) -> Any:
        there = by_stage(stack(layers), ORDER)
        for row in np.argsort(ORDER):
            x = jnp.tanh(x @ there[row])
        return jnp.mean(x**2)

    def step(layers: list[Any], x: Any) -> Any:
        return [p - 0.1 * g for p, g in zip(layers, jax.grad(loss)(layers, x), strict=True)]

    layers = [jnp.eye(20) * (1 + n) for n in range(LAYERS)]
    x = jnp.ones((2, 20)) * 0.1
    by_stages = parallelize(step, Plan({}, [Stacks()]))
    state = by_stages.place(layers, x)[0]
    assert state.layout.groups == ((0, 2, 1, 3),) and not state.layout.orders
    assert not moved(by_stages.trace(layers, x).jaxpr)
    same(by_stages.unplace(by_stages(state, x)), jax.jit(step)(layers, x), 1e-6)


def test_check_has_the_step_by_stage_agree_with_its_original() -> None:
    assert check(step_by(piped, ADAMW), (state_of(), X), PLAN).ok
