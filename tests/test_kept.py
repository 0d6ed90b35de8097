"""What a plan keeps in the state: placed, born, called, returned, saved, calibrated, checked and compiled."""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.test_quantization_kept import (
    APART,
    BATCHES,
    ONE,
    STACK,
    deep,
    histories,
    one,
    quantize,
    ran,
    same,
    told,
    trained,
    under,
    unrolled,
)
from xform import Placed, PlanError, Roll, Shard
from xform.check import check
from xform.plan import Plan
from xform.trace import Var, shape_of

STATIC = {
    "static": {"base": "int8_static"},
    "both": {"base": "int8_static", "weights_calibration": "delayed,3"},
}


def forward(p: Any, x: Any) -> Any:
    return told(p, x @ p["w"], BATCHES[0][1])


def static(fn: Any = forward, recipe: str = "static", *passes: Any, **more: Any) -> Any:
    return under(fn, quantize(recipe, **STATIC), *passes, **more)


# ---------------------------------------------------------------- delayed


def test_place_makes_histories_and_unplace_leaves_them_out() -> None:
    step = under(trained(one))
    state = step.place(ONE, *BATCHES[0])[0]
    assert isinstance(state, Placed)
    assert list(state.kept) == [f"quantize['0.mlpwi']['{side}']" for side in ("left", "right", "drhs")]
    assert not any(x.any() for x in state.kept.values())
    plain = step.unplace(state)
    assert jax.tree.structure(plain) == jax.tree.structure(ONE)
    jax.tree.map(np.testing.assert_array_equal, plain, ONE)


def test_the_step_takes_histories_and_gives_the_next() -> None:
    state, _ = ran(under(trained(one)), ONE, 2)
    assert isinstance(state, Placed) and state.kept["quantize['0.mlpwi']['left']"].tolist() == [
        float(np.abs(BATCHES[1][0]).max()),
        float(np.abs(BATCHES[0][0]).max()),
        0,
    ]


def test_place_leaves_histories_that_are_there_alone() -> None:
    step = under(trained(one))
    state, _ = ran(step, ONE, 2)
    same(histories(step.place(state)), histories(state))


def test_a_state_with_histories_is_placed_again_so_that_nothing_waits_for_what_is_measured() -> None:
    step = under(trained(one))
    state, _ = ran(step, ONE, 1)
    again = step.place(state)
    assert again.layout.begun and not state.layout.begun
    (after, loss), (other, alike) = step(again, *BATCHES[1]), step(state, *BATCHES[1])
    np.testing.assert_allclose(loss, alike, 1e-6)
    for path, history in histories(other).items():
        np.testing.assert_allclose(after.kept[path], history, 1e-5)
    assert after.layout == again.layout

    def waits(state: Any) -> bool:
        """Whether a product needs the batch's largest number."""
        jaxpr = step.trace(state, *BATCHES[1]).jaxpr
        behind = {
            eqn.outvars[0]
            for eqn in jaxpr.eqns
            if eqn.primitive.name == "reduce_max" and shape_of(eqn.invars[0]) == BATCHES[1][0].shape
        }
        for eqn in jaxpr.eqns:
            if not behind.isdisjoint(v for v in eqn.invars if isinstance(v, Var)):
                behind.update(eqn.outvars)
        products = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]
        return not behind.isdisjoint(v for eqn in products for v in eqn.invars)

    assert waits(state) and not waits(again)


def test_a_state_is_born_with_its_histories() -> None:
    step = under(trained(one))
    step.trace(ONE, *BATCHES[0])
    state = step.init(lambda: ONE)
    _, losses = ran(step, ONE, first=state)
    np.testing.assert_array_equal(losses, ran(step, ONE)[1])


def test_a_call_with_the_models_own_tree_says_what_to_do() -> None:
    step = under(trained(one))
    with pytest.raises(PlanError, match=r"keeps amax histories .*state = step\.place\(state, \.\.\.\) first"):
        step(ONE, *BATCHES[0])
    assert step.lower(ONE, *BATCHES[0]).compile() is not None
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (ONE, *BATCHES[0]))
    assert len(step.trace(*shapes).kept) == 3


def test_histories_go_through_a_checkpoint_of_arrays_by_path_bit_for_bit() -> None:
    step = under(trained(unrolled), Roll(), quantize())
    state, _ = ran(step, APART, 2)
    saved = {
        jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(state)
    }
    assert "quantize['1.mlpwo']['drhs']" in saved and "['head']" in saved
    fresh = step.place(APART, *BATCHES[0])[0]
    restored = jax.tree_util.tree_map_with_path(lambda path, x: saved[jax.tree_util.keystr(path)], fresh)
    for x in jax.tree.leaves(restored):
        assert isinstance(x, np.ndarray)
    (a, loss), (b, again) = step(state, *BATCHES[2]), step(restored, *BATCHES[2])
    np.testing.assert_array_equal(loss, again)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_histories_are_donated_with_the_state() -> None:
    step = under(trained(one))
    made = type(step)(trained(one), step.plan, step.mesh, {"donate_argnums": 0})
    state = made.place(jax.tree.map(jnp.copy, ONE), *BATCHES[0])[0]
    made(state, *BATCHES[0])
    assert all(x.is_deleted() for x in state.kept.values())


def test_histories_are_part_of_the_first_argument_that_comes_back() -> None:
    def step(x: Any, params: Any, momentum: Any, labels: Any) -> Any:
        value, grads = jax.value_and_grad(one)(params, x, labels)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        return value, jax.tree.map(lambda p, m: p - m, params, momentum), momentum

    made, (x, labels) = under(step), BATCHES[0]
    _, params, momentum, _ = made.place(x, ONE, jax.tree.map(jnp.zeros_like, ONE), labels)
    assert len(params.kept) == 3 and not isinstance(momentum, Placed)
    _, params, momentum = made(x, params, momentum, labels)
    assert params.kept["quantize['0.mlpwi']['left']"][0] == jnp.abs(x).max()
    assert not isinstance(momentum, Placed)
    made(x, params, momentum, labels)


def test_histories_of_a_keyword_argument() -> None:
    def step(*, x: Any, labels: Any, params: Any) -> Any:
        return trained(one)(params, x, labels)[0]

    made, batch = under(step), dict(zip(("x", "labels"), BATCHES[0], strict=True))
    program = made.trace(params=ONE, **batch)
    params = program.arranged([jnp.zeros(leaf.aval.shape, leaf.aval.dtype) for leaf in program.inputs], {})[
        1
    ]["params"]
    assert made(params=params, **batch).kept["quantize['0.mlpwi']['left']"][0] > 0


def test_an_evaluation_reads_the_histories_of_the_training_step() -> None:
    step, evaluate = under(trained(one)), under(one, quantize())
    state, _ = ran(step, ONE, 2)
    value = evaluate(state, *BATCHES[2])
    _, want = step(state, *BATCHES[2])
    np.testing.assert_allclose(value, want, 1e-6)
    report = str(evaluate.trace(state, *BATCHES[2]).report)
    assert "read alone: the function does not return the next value of the argument that has them" in report


def test_gradients_are_no_state_to_keep_histories_in() -> None:
    step = under(lambda p, x, labels: jax.value_and_grad(one)(p, x, labels))
    _, grads = step(step.place(ONE, *BATCHES[0])[0], *BATCHES[0])
    assert jax.tree.structure(grads) == jax.tree.structure(ONE)
    assert "read alone" in str(step.trace(ONE, *BATCHES[0]).report)


def test_a_call_without_jit_runs_the_users_function() -> None:
    step = under(trained(one))
    state = step.place(ONE, *BATCHES[0])[0]
    with jax.disable_jit():
        plain, _ = step(state, *BATCHES[0])
    assert jax.tree.structure(plain) == jax.tree.structure(ONE)


# ---------------------------------------------------------------- calibrated


def test_calibrated_ranges_are_the_largest_of_all_batches_and_the_next_calls_read_them() -> None:
    step = static()
    xs = [batch[0] for batch in BATCHES]
    state = step.calibrate(ONE, [(x,) for x in xs])
    largest = max(float(jnp.abs(x).max()) for x in xs)
    assert {path: x.tolist() for path, x in state.kept.items()} == {"quantize['0.mlpwi']['left']": largest}
    fixed = under(
        forward,
        quantize("fixed", fixed={"base": "int8_forward", "activations_calibration": f"fixed,{largest}"}),
    )
    for x in xs:
        np.testing.assert_allclose(step(state, x), fixed(ONE, x), 1e-6)  # XLA divides by a constant its way


def test_ranges_that_are_there_grow_with_more_batches() -> None:
    step = static()
    small = step.calibrate(ONE, [(BATCHES[0][0],)])
    large = step.calibrate(small, [(BATCHES[3][0],)])
    both = step.calibrate(ONE, [(BATCHES[0][0],), (BATCHES[3][0],)])
    same(histories(large), histories(both))
    same(histories(step.calibrate(large, [(BATCHES[0][0],)])), histories(large))


def test_without_calibration_place_and_a_call_say_what_to_do() -> None:
    step = static()
    x = BATCHES[0][0]
    for call in (lambda: step.place(ONE, x), lambda: step(ONE, x)):
        with pytest.raises(
            PlanError, match=r"there are none: state = step\.calibrate\(state, batches\) first"
        ):
            call()
    assert step.lower(ONE, x).compile() is not None
    with pytest.raises(PlanError, match="no batches"):
        step.calibrate(ONE, [])
    with pytest.raises(PlanError, match=r"keeps no calibrated ranges.*activations_calibration"):
        under(forward, quantize("forward")).calibrate(ONE, [(x,)])


def test_a_state_is_born_without_ranges_and_is_calibrated_then() -> None:
    step = static()
    x = BATCHES[0][0]
    step.trace(ONE, x)
    born = step.init(lambda: ONE)
    assert jax.tree.structure(born) == jax.tree.structure(ONE)
    np.testing.assert_array_equal(step(step.calibrate(born, [(x,)]), x), step(step.calibrate(ONE, [(x,)]), x))


def test_a_training_step_gives_calibrated_ranges_back_as_they_are() -> None:
    step = static(trained(one))
    state = step.calibrate(ONE, BATCHES[:2])
    after, _ = step(state, *BATCHES[3])
    same(histories(after), histories(state))
    assert np.abs(after.opened()["w"] - ONE["w"]).max() > 0


def test_histories_start_beside_calibrated_ranges_and_only_they_go_on() -> None:
    step = static(trained(one), "both")
    state = step.calibrate(ONE, BATCHES[:2])
    left, right = (f"quantize['0.mlpwi']['{side}']" for side in ("left", "right"))
    assert state.kept[left] > 0 and not state.kept[right].any()
    after, _ = step(state, *BATCHES[3])
    assert after.kept[left] == state.kept[left] and after.kept[right][0] > 0


def test_calibration_compiles_once() -> None:
    step, traces = static(), []

    @functools.wraps(forward)
    def counted(p: Any, x: Any) -> Any:
        traces.append(1)
        return forward(p, x)

    step = static(counted)
    step.calibrate(ONE, [(batch[0],) for batch in BATCHES])
    assert len(traces) == 2  # one program to be called, one that measures


# ---------------------------------------------------------------- with other devices, and the commands


@pytest.mark.slow  # both programs, on one device and on eight
@pytest.mark.parametrize("recipe", ["fp8_kept", "static"])
def test_check_compares_a_plan_that_keeps_ranges(recipe: str) -> None:
    plan = Plan({"data": 4}, (quantize(recipe, **STATIC), Shard(collectives="auto")))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = check(trained(deep), (STACK, *BATCHES[0]), plan, devices=jax.devices()[:4])
    assert result.ok and result.steps == 3, str(result)


@pytest.mark.slow  # compiled for one device and for four
def test_calibration_on_a_mesh_gives_what_one_device_does() -> None:
    batches = [BATCHES[0], BATCHES[1]]
    many = static(trained(deep), "static", Shard(collectives="auto"), mesh={"data": 4})
    alone = static(trained(deep))
    a, b = histories(many.calibrate(STACK, batches)), histories(alone.calibrate(STACK, batches))
    for path in a:  # a weight's largest number lies between two codes, and sums are taken in another order
        np.testing.assert_allclose(a[path], b[path], 1e-3)
