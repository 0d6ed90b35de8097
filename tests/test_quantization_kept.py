"""Ranges that are kept from step to step: histories against a loop by hand and Flax, in loops, on meshes."""

import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.layers import picked
from tests.test_experts import ARGS as EXPERTS
from tests.test_experts import grouped, loss_with
from tests.test_quantize import IMAGES, seen
from xform import Accumulate, Offload, Plan, PlanError, Remat, Roll, Shard, parallelize
from xform.higher_order import equations
from xform.passes.quantize import Quantize

N = 3
DELAYED = f"delayed,{N}"
KEPT = {f"{field}_calibration": DELAYED for field in ("activations", "weights", "gradients")}
RECIPES = {
    "int8_kept": {"base": "int8", **KEPT},
    "fp8_kept": {"base": "fp8", **KEPT},
    "forward": {"base": "int8_forward", **KEPT},
}


def quantize(recipe: str = "int8_kept", **more: Any) -> Quantize:
    return Quantize(recipe, rules={"param:head": "none"}, recipes=RECIPES | more)


def under(fn: Any, *passes: Any, mesh: dict[str, int] | None = None) -> Any:
    mesh = mesh or {"data": 1}
    devices = jax.devices()[: math.prod(mesh.values())]
    return parallelize(fn, Plan(mesh, passes or (quantize(),)), devices=devices)


def normal(seed: int, *shape: int) -> Any:
    return jnp.asarray(np.random.RandomState(seed).randn(*shape), jnp.float32)


def trained(loss: Any, rate: float = 0.1) -> Any:
    def step(params: Any, *batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - rate * g, params, grads), value

    return step


def told(p: Any, x: Any, labels: Any) -> Any:
    """The loss of what a model makes, by a head that stays in floats."""
    return picked(jnp.tanh(x) @ p["head"], labels)


def one(p: Any, x: Any, labels: Any) -> Any:
    """One product."""
    return told(p, x @ p["w"], labels)


def layer(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w["a"]) @ w["b"] + x


def deep(p: Any, x: Any, labels: Any) -> Any:
    """Layers in a scan."""
    return told(p, jax.lax.scan(lambda x, w: (layer(w, x), None), x, p["layers"])[0], labels)


def unrolled(p: Any, x: Any, labels: Any) -> Any:
    for w in p["layers"]:
        x = layer(w, x)
    return told(p, x, labels)


def two(p: Any, x: Any, labels: Any) -> Any:
    """Two products, one after the other."""
    return told(p, layer(p, x), labels)


HEAD = normal(5, 5, 11)
ONE = {"w": normal(2, 5, 5), "head": HEAD}
LAYERS = {"a": normal(0, 2, 5, 7) / 3, "b": normal(1, 2, 7, 5) / 3}
TWO = {k: x[0] for k, x in LAYERS.items()} | {"head": HEAD}
STACK = {"layers": LAYERS, "head": HEAD}
APART = {"layers": [{k: x[n] for k, x in LAYERS.items()} for n in range(2)], "head": HEAD}
BATCHES = [(normal(10 + n, 8, 5) * (1 + n), jnp.arange(8) * (n + 3) % 11) for n in range(4)]


def ran(step: Any, params: Any, steps: int = 3, first: Any = None) -> tuple[Any, list[Any]]:
    """The last state, and what each step returned besides."""
    state = step.place(params, *BATCHES[0])[0] if first is None else first
    losses = []
    for n in range(steps):
        state, loss = step(state, *BATCHES[n])
        losses.append(np.asarray(loss))
    return state, losses


@functools.cache
def scanned() -> tuple[dict[str, Any], list[Any]]:
    """The histories and losses of layers in a scan, on one device, with nothing else."""
    state, losses = ran(under(trained(deep)), STACK)
    return histories(state), losses


def histories(state: Any) -> dict[str, Any]:
    return {path: np.asarray(x) for path, x in state.kept.items()}


def same(a: Any, b: Any) -> None:
    assert a.keys() == b.keys()
    for path in a:
        np.testing.assert_array_equal(a[path], b[path], path)


def near(a: Any, b: Any, tolerance: float) -> None:
    assert a.keys() == b.keys()
    for path in a:
        np.testing.assert_allclose(a[path], b[path], tolerance, err_msg=path)


# ---------------------------------------------------------------- against a loop by hand


def by_hand(p: Any, past: dict[str, Any], x: Any, labels: Any) -> tuple[Any, Any]:
    """A step of `one` with int8 products, written out."""

    def coded(x: Any, history: Any) -> tuple[Any, Any, Any]:
        amax = jnp.max(jnp.abs(x))
        found = jnp.max(history)
        scale = jnp.where(found > 0, found, amax) / 127.5
        codes = jnp.clip(jnp.round(x / scale), -128, 127).astype(jnp.int32)
        return codes, scale, jnp.concatenate([amax[None], history[:-1]])

    a, left, one = coded(x, past["left"])
    b, right, two = coded(p["w"], past["right"])
    y = (a @ b).astype(jnp.float32) * left * right
    head, dy = jax.grad(lambda head, y: told({"head": head}, y, labels), (0, 1))(p["head"], y)
    g, scale, three = coded(dy, past["drhs"])
    dw = (a.T @ g).astype(jnp.float32) * scale * left
    made = {"w": p["w"] - 0.1 * dw, "head": p["head"] - 0.1 * head}
    return made, {"left": one, "right": two, "drhs": three}


def test_steps_are_those_of_a_loop_by_hand() -> None:
    step = under(trained(one))
    p, past = ONE, {side: jnp.zeros(N) for side in ("left", "right", "drhs")}
    state = step.place(p, *BATCHES[0])[0]
    for x, labels in (*BATCHES, BATCHES[0]):
        state, _ = step(state, x, labels)
        p, past = jax.jit(by_hand)(p, past, x, labels)
        # the gradient's last bit is XLA's: it may multiply and add at once
        np.testing.assert_allclose(step.unplace(state)["w"], p["w"], 1e-6, 1e-7)
        for side, history in past.items():
            got = state.kept[f"quantize['0.mlpwi']['{side}']"]
            np.testing.assert_allclose(got, history, 0 if side == "left" else 1e-5)
    assert np.asarray(past["left"]).all() and len(set(np.asarray(past["left"]).tolist())) == N


@pytest.mark.parametrize("recipe", ["int8_kept", "fp8_kept"])
def test_the_first_step_is_the_one_with_ranges_of_its_own(recipe: str) -> None:
    own = {"now": {"base": RECIPES[recipe]["base"], "channels": False}}
    now = jax.jit(under(trained(one), quantize("now", **own)))
    state, (loss,) = ran(under(trained(one), quantize(recipe)), ONE, 1)
    want, value = now(ONE, *BATCHES[0])
    np.testing.assert_array_equal(loss, value)
    np.testing.assert_array_equal(state.opened()["w"], want["w"])


def test_values_and_gradients_are_near_those_of_flax() -> None:
    """After the first step, in which Flax's scales are one. It multiplies by inverses of our scales, and
    rounds the gradient where we round it times a scale: some codes are neighbours, a fourth apart, in sums of
    eight.
    """
    own = {"flax": {"base": "fp8_delayed", **KEPT}}
    step = under(lambda p, x, y: (p, *jax.value_and_grad(one)(p, x, y)), quantize("flax", **own))
    op = nn.Fp8DotGeneralOp(amax_history_length=N)
    dims = (((1,), (0,)), ((), ()))
    variables = op.init(jax.random.key(0), BATCHES[0][0], ONE["w"], dims)

    def loss(w: Any, variables: Any, x: Any, labels: Any) -> Any:
        return told(ONE, op.apply(variables, x, w, dims), labels)

    state, flax_step = step.place(ONE, *BATCHES[0])[0], jax.jit(jax.value_and_grad(loss, (0, 1)))
    for n, (x, labels) in enumerate(BATCHES):
        state, value, grads = step(state, x, labels)
        want, (dw, meta) = flax_step(ONE["w"], variables, x, labels)
        variables = meta
        if n:
            np.testing.assert_allclose(value, want, 1e-6)
            assert np.abs(grads["w"] - dw).max() < 0.02 * np.abs(dw).max()
            newest = state.kept["quantize['0.mlpwi']['drhs']"][0]
            theirs = meta["_overwrite_with_gradient"]["output_grad_amax_history"][0]
            np.testing.assert_allclose(newest, theirs, 1e-5)
        for ours, theirs in (("left", "input"), ("right", "kernel")):
            kept = state.kept[f"quantize['0.mlpwi']['{ours}']"]
            flax = meta["_overwrite_with_gradient"][f"{theirs}_amax_history"]
            np.testing.assert_array_equal(np.sort(kept), np.sort(flax))


# ---------------------------------------------------------------- loops


def test_a_loop_over_layers_has_a_history_for_each_and_agrees_with_the_layers_unrolled() -> None:
    together, losses = scanned()
    state, alike = ran(under(trained(unrolled)), APART)
    np.testing.assert_allclose(losses, alike, 1e-6)
    apart = histories(state)
    assert {x.shape for x in together.values()} == {(2, N)}
    keys = {
        (n, side): f"quantize['{n}.{('mlpwi', 'mlpwo')[n % 2]}']['{side}']"
        for n in range(4)
        for side in SIDES
    }
    for (n, side), path in keys.items():
        if path in apart:
            np.testing.assert_allclose(together[keys[n % 2, side]][n // 2], apart[path], 1e-4)


SIDES = ("left", "right", "dlhs", "drhs")


def test_a_stack_looked_up_by_a_counter_is_a_loop_over_layers() -> None:
    def looked_up(p: Any, x: Any, labels: Any) -> Any:
        def turn(n: Any, x: Any) -> Any:
            return layer({k: w[n] for k, w in p["layers"].items()}, x)

        return told(p, jax.lax.fori_loop(0, 2, turn, x), labels)

    state, losses = ran(under(trained(looked_up)), STACK)
    other, alike = scanned()
    np.testing.assert_allclose(losses, alike, 1e-6)
    near(histories(state), other, 1e-5)


def test_a_loop_whose_turns_share_the_weight_has_one_history_of_the_largest() -> None:
    def shared(p: Any, xs: Any, labels: Any) -> Any:
        def turn(total: Any, row: Any) -> Any:
            return total + one(p, *row), None

        return jax.lax.scan(turn, 0.0, (xs, labels))[0]

    batch = normal(3, 6, 8, 5), jnp.arange(48).reshape(6, 8) % 11
    step = under(trained(shared))
    state, _ = step(step.place(ONE, *batch)[0], *batch)
    found = histories(state)
    assert {x.shape for x in found.values()} == {(N,)}
    assert found["quantize['0.mlpwi']['left']"][0] == np.abs(batch[0]).max()
    assert "the largest of 6 turns: they take the same weight" in str(step.trace(state, *batch).report)


def test_a_loop_of_unknown_turns_over_layers_is_refused_with_the_line() -> None:
    def loss(p: Any, x: Any, n: Any) -> Any:
        def turn(state: Any) -> Any:
            i, x = state
            return i + 1, layer({k: w[i] for k, w in p["layers"].items()}, x)

        return told(p, jax.lax.while_loop(lambda state: state[0] < n, turn, (0, x))[1], BATCHES[0][1])

    with pytest.raises(PlanError, match=r"nobody knows how many.*test_quantization_kept.py.*lax\.scan"):
        under(loss, quantize("forward")).trace(STACK, BATCHES[0][0], 3)


def test_a_loop_of_unknown_turns_with_one_weight_keeps_the_largest() -> None:
    def step(p: Any, x: Any, n: Any) -> Any:
        def turn(state: Any) -> Any:
            return state[0] + 1, 2 * jnp.tanh(state[1] @ p["w"])

        return p, told(p, jax.lax.while_loop(lambda state: state[0] < n, turn, (0, x))[1], BATCHES[0][1])

    made = under(step, quantize("forward"))
    args = ONE, BATCHES[0][0] / 100
    state, _ = made(made.place(*args, 3)[0], args[1], 3)
    inputs = [args[1]]
    for _ in range(2):
        inputs.append(2 * jnp.tanh(inputs[-1] @ ONE["w"]))
    largest = max(float(jnp.abs(x).max()) for x in inputs)
    np.testing.assert_allclose(state.kept["quantize['0.product']['left']"][0], largest, 0.02)


def test_a_loop_inside_a_layer_shares_the_layers_history() -> None:
    """What the inner loop does not change, autodiff takes out of it."""

    def parted(p: Any, x: Any, labels: Any) -> Any:
        def turn(x: Any, w: Any) -> Any:
            _, parts = jax.lax.scan(lambda c, part: (c, layer(w, part)), 0, x.reshape(2, 4, 5))
            return parts.reshape(8, 5), None

        return told(p, jax.lax.scan(turn, x, p["layers"])[0], labels)

    state, losses = ran(under(trained(parted)), STACK, 2)
    _, alike = scanned()
    np.testing.assert_allclose(losses, alike[:2], 1e-2)  # in the first step each part takes its own range
    assert {x.shape for x in histories(state).values()} == {(2, N)}


def test_models_that_are_mapped_share_a_history_of_the_largest() -> None:
    def mapped(p: Any, x: Any, labels: Any) -> Any:
        grads = jax.vmap(jax.grad(deep), (0, None, None))(p, x, labels)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads), 0.0

    three = jax.tree.map(lambda x: jnp.stack([x, 2 * x, 3 * x]), STACK)
    plan = Quantize("int8_kept", recipes=RECIPES)
    state, _ = ran(under(mapped, plan), three, 1)
    found = state.kept["quantize['0.mlpwi']['right']"]
    assert found.shape == (2, N)
    np.testing.assert_array_equal(found[:, 0], 3 * jnp.abs(LAYERS["a"]).max((1, 2)))


@pytest.mark.slow  # sorted rows and windows take the compiler a while
@pytest.mark.parametrize(("loss", "shapes"), [(loss_with(grouped), EXPERTS), (seen, IMAGES)])
def test_products_by_expert_and_convolutions_keep_ranges_too(loss: Any, shapes: Any) -> None:
    def numbers(s: Any) -> Any:
        if jnp.issubdtype(s.dtype, jnp.floating):
            return normal(0, *s.shape)
        return jnp.arange(math.prod(s.shape)).reshape(s.shape) % 5

    args = jax.tree.map(numbers, shapes)
    step = under(trained(loss), Quantize("int8_kept", recipes=RECIPES))
    now = Quantize("now", recipes={"now": {"base": "int8", "channels": False}})
    state, value = step(step.place(*args)[0], *args[1:])
    np.testing.assert_allclose(value, under(trained(loss), now)(*args)[1], 1e-6)
    assert len(state.kept) > 6 and all(x[0] > 0 for x in state.kept.values())


def test_a_product_in_a_manual_region_is_refused_with_the_line() -> None:
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    spec = jax.sharding.PartitionSpec

    def manual(p: Any, x: Any, labels: Any) -> Any:
        own = jax.shard_map(
            lambda x, w: x @ w, mesh=mesh, in_specs=(spec("data"), spec()), out_specs=spec("data")
        )
        return told(p, own(x, p["w"]), labels)

    with pytest.raises(PlanError, match=r"stands in shard_map \(test_quantization_kept.*by a rule"):
        under(trained(manual), mesh={"data": 2}).trace(ONE, *BATCHES[0])


def test_branches_and_rules_of_derivatives_and_calls_pass_ranges_on() -> None:
    @jax.custom_jvp
    def scaled(x: Any) -> Any:
        return 3 * x

    scaled.defjvp(lambda xs, ts: (scaled(*xs), 3 * ts[0]))

    def loss(p: Any, x: Any, labels: Any) -> Any:
        hidden = jax.jit(lambda x: scaled(x @ p["w"]))(x)
        other = jax.lax.cond(x[0, 0] > 100, lambda h: h, lambda h: jnp.tanh(h @ p["v"]), hidden)
        return told(p, other, labels)

    def plain(p: Any, x: Any, labels: Any) -> Any:
        return told(p, jnp.tanh(3 * (x @ p["w"]) @ p["v"]), labels)

    params = ONE | {"v": normal(3, 5, 5)}
    found = histories(ran(under(trained(loss)), params)[0])
    assert len(found) == 7 and all(x.all() for x in found.values())
    other = histories(ran(under(trained(plain)), params)[0])
    for path, plain_path in zip(found, other, strict=True):
        np.testing.assert_allclose(found[path], other[plain_path], 1e-5)


def test_what_is_not_finite_leaves_no_trace() -> None:
    step = under(trained(one, 0.0))
    x, labels = BATCHES[0]
    state, _ = step(step.place(ONE, x, labels)[0], x.at[1, 2].set(jnp.inf), labels)
    found = histories(state)
    assert found["quantize['0.mlpwi']['left']"].tolist() == [0, 0, 0]
    assert found["quantize['0.mlpwi']['right']"][0] > 0


def test_an_operand_of_several_products_has_one_history() -> None:
    def gated(p: Any, x: Any, labels: Any) -> Any:
        low, w, v = (a.astype(jnp.bfloat16) for a in (x, p["w"], p["v"]))
        other = (x.astype(jnp.bfloat16) @ v).astype(jnp.float32)
        return told(p, jax.nn.sigmoid((low @ w).astype(jnp.float32)) * other, labels)

    program = under(trained(gated)).trace(ONE | {"v": normal(3, 5, 5)}, *BATCHES[0])
    first, second = (sorted(k.path[-8:] for k in program.kept if f"['{n}." in k.path) for n in (0, 1))
    assert (len(first), len(second)) == (3, 2) and not any("left" in path for path in second)


# ---------------------------------------------------------------- with other passes


@pytest.mark.parametrize("first", [True, False])
def test_what_is_computed_again_only_reads(first: bool) -> None:
    passes = [Remat(save=[]), quantize()]
    step = under(trained(deep), *(passes if first else passes[::-1]))
    state, losses = ran(step, STACK)
    other, alike = scanned()
    np.testing.assert_array_equal(losses, alike)
    same(histories(state), other)

    def measured(step: Any) -> int:
        found = (e.primitive.name for e in equations(step.trace(state, *BATCHES[0]).jaxpr))
        return sum(name == "is_finite" for name in found)

    assert measured(step) == 8


@pytest.mark.parametrize("rows", [2, 4])
def test_microbatches_keep_the_histories_of_the_whole_batch(rows: int) -> None:
    whole, parts = under(trained(two)), under(trained(two), quantize(), Accumulate(rows=rows))
    first, _ = ran(whole, TWO, 1)  # a step in which a microbatch would take its own range
    state, losses = ran(whole, TWO, 2, first)
    parted, alike = ran(parts, TWO, 2, first)
    assert f"microbatches of {rows} rows" in str(parts.trace(first, *BATCHES[0]).report)
    np.testing.assert_allclose(losses, alike, 1e-6)
    near(histories(state), histories(parted), 1e-5)
    same(*(histories(ran(step, TWO, 1, first)[0]) for step in (whole, parts)))
    path = "quantize['0.mlpwi']['left']"
    np.testing.assert_array_equal(ran(parts, TWO, 1)[0].kept[path], first.kept[path])


def test_layers_that_are_rolled_have_their_histories_stacked() -> None:
    state, losses = ran(under(trained(unrolled), Roll(), quantize()), APART)
    other, alike = scanned()
    np.testing.assert_allclose(losses, alike, 1e-6)
    near(histories(state), other, 1e-5)


def test_offload_leaves_histories_on_the_device() -> None:
    def step(state: Any, *batch: Any) -> Any:
        value, grads = jax.value_and_grad(deep)(state["p"], *batch)
        m = jax.tree.map(lambda m, g: 0.9 * m + g, state["m"], grads)
        return {"p": jax.tree.map(lambda p, m: p - 0.1 * m, state["p"], m), "m": m}, value

    wide = {"a": jnp.tile(LAYERS["a"], (1, 1, 9)), "b": jnp.tile(LAYERS["b"], (1, 9, 1)) / 9}
    big = {"layers": wide, "head": HEAD}
    params = {"p": big, "m": jax.tree.map(jnp.zeros_like, big)}
    state, _ = ran(under(step, quantize(), Offload()), params, 1)
    assert all(x[..., 0].all() for x in histories(state).values())
    assert {x.sharding.memory_kind for x in state.kept.values()} != {"pinned_host"}


@pytest.mark.slow  # compiled for one device and for eight
@pytest.mark.parametrize("collectives", ["auto", "explicit"])
def test_histories_on_a_mesh_are_those_of_one_device(collectives: Any) -> None:
    layers = {"a": normal(0, 3, 8, 16) / 4, "b": normal(1, 3, 16, 8) / 4}
    params, batch = {"layers": layers, "head": normal(4, 8, 11)}, (normal(2, 8, 8), BATCHES[0][1])
    found = []
    for mesh, passes in (({"data": 1}, ()), ({"fsdp": 4, "tensor": 2}, (Shard(collectives=collectives),))):
        step = under(trained(deep), quantize("fp8_kept"), *passes, mesh=mesh)
        state = step.place(params, *batch)[0]
        for _ in range(3):
            state, _ = step(state, *batch)
        found.append(histories(state))
        assert all(x.sharding.is_fully_replicated for x in state.kept.values())
    near(*found, 1e-4)


# ---------------------------------------------------------------- what the plan says


def test_the_report_says_how_many_histories_there_are_and_what_they_take() -> None:
    report = str(under(trained(deep)).trace(STACK, *BATCHES[0]).report)
    assert "kept 8 amax histories of 3 steps, 192 bytes: of the steps before, in the state" in report
    assert "one scale a channel, an array where its range is kept" in report


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"base": "int8", "activations_calibration": "delayed"},
            "delayed takes 1 to 2 numbers.*delayed,1024",
        ),
        ({"base": "int8", "activations_calibration": "delayed,0"}, "a number of steps"),
        ({"base": "int8", "weights_calibration": "delayed,8,0"}, "factor has to be positive"),
        (
            {"base": "int8", "weights_calibration": "calibrated", "block": 4},
            "one range is kept for the whole",
        ),
        ({"base": "mxfp8", "gradients_calibration": "delayed,8"}, "blocks of 32.*absmax"),
    ],
)
def test_a_recipe_that_cannot_keep_ranges_says_why(fields: Any, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        under(trained(one), quantize("mine", mine=fields)).trace(ONE, *BATCHES[0])


def test_models_of_one_step_have_histories_of_their_own() -> None:
    def both(params: Any, x: Any, labels: Any) -> Any:
        first, second = (jax.grad(one)(params, k * x, labels) for k in (1, 3))
        return jax.tree.map(lambda p, a, b: p - a - b, params, first, second)

    step = under(both)
    state = step(step.place(ONE, *BATCHES[0])[0], *BATCHES[0])
    first, second = (state.kept[f"quantize['{key}']['left']"][0] for key in ("0.mlpwi", "1.0.mlpwi"))
    np.testing.assert_allclose(3 * first, second)


def test_a_rule_of_the_users_cannot_be_differentiated_from_outside_when_ranges_are_kept() -> None:
    @jax.custom_jvp
    def half(w: Any, x: Any) -> Any:
        return x @ w

    half.defjvp(lambda xs, ts: (half(*xs), ts[0][:0]))

    def loss(p: Any, x: Any, labels: Any) -> Any:
        return p, told(p, half(p["w"], x), labels)

    step = under(loss, quantize("forward"))
    state = step.place(ONE, *BATCHES[0])[0]
    assert np.isfinite(step(state, *BATCHES[0])[1])
    with pytest.raises(PlanError, match=r"differentiated from outside.*in the function that is parallelized"):
        jax.grad(lambda state: step(state, *BATCHES[0])[1])(state)


def test_a_derivative_from_outside_goes_through_quantized_products() -> None:
    step = under(lambda p, x, labels: (p, one(p, x, labels)), quantize("forward"))
    state = step.place(ONE, *BATCHES[0])[0]
    grads = jax.grad(lambda state: step(state, *BATCHES[0])[1])(state)
    want = jax.grad(one)(ONE, *BATCHES[0])
    np.testing.assert_allclose(grads.opened()["w"], want["w"], atol=0.02)
