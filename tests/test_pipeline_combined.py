"""Pipeline where another pass has a say in the same thing, and what its stages must not change."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import layered
from tests.layered import PROGRAMS, of_layers
from tests.test_pipeline import agree, graded, piped, run, scheduled, slow, wanted
from xform import Accumulate, ChunkedLoss, Plan, PlanError, Quantize, parallelize

# ---------------------------------------------------------------- a loss in chunks


@pytest.mark.parametrize(
    ("chunks", "microbatches", "schedule", "said"),
    [
        slow(4, 4, "circular", "4 chunks of the length"),
        (5, 2, "1f1b", "8 chunks of the batch"),
        slow(5, 8, "gpipe", "8 chunks of the batch"),
    ],
)
def test_a_loss_in_chunks(chunks: int, microbatches: int, schedule: str, said: str) -> None:
    """Rows of a chunk are in one microbatch, which has as many chunks as there are more of them."""
    loss, params, data = PROGRAMS["untied"]()
    options = scheduled(schedule) | {"microbatches": microbatches}
    step = piped(graded(loss), ChunkedLoss(chunks=chunks), **options)
    agree(run(step, params, *data), wanted("untied"))
    report = str(step.trace(params, *data).report)
    assert said in report and f"{microbatches} microbatches" in report


def test_a_loss_in_chunks_of_the_batch_in_microbatches() -> None:
    loss, params, data = PROGRAMS["untied"]()
    plan = Plan({}, [ChunkedLoss(chunks=5), Accumulate(steps=4)])
    step = parallelize(graded(loss), plan, devices=jax.devices()[:1])
    agree(step(params, *data), wanted("untied"))
    report = str(step.trace(params, *data).report)
    assert "8 chunks of the batch" in report and "4 microbatches of 2 rows" in report


def test_rows_of_a_chunk_that_are_on_several_devices_are_not_summed_once() -> None:
    loss, params, (tokens,) = PROGRAMS["untied"]()
    plan = Plan({"data": 2}, [ChunkedLoss(chunks=8), Accumulate(steps=2, reduce="once")])
    step = parallelize(graded(loss), plan, devices=jax.devices()[:2])
    report = str(step.trace(params, np.tile(tokens, (2, 1))).report)
    assert "declined the model: the program goes through the batch in a loop of 8 chunks" in report


# ---------------------------------------------------------------- what Accumulate has a say in


def test_gradients_are_added_up_in_the_dtype_that_accumulate_says() -> None:
    """Weights in bfloat16: the same numbers, to the bit, as when Pipeline says it."""
    loss, params, data = of_layers(2)
    args = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), params), *data
    step = piped(graded(loss), Accumulate(steps=2), microbatches=2)
    found, same = run(step, *args), run(piped(graded(loss), dtype="float32"), *args)
    jax.tree.map(np.testing.assert_array_equal, found, same)
    agree(found, jax.jit(graded(loss))(*args), 0.03)  # sums of eight rows, of eight binary digits
    assert "gradients are added up in float32" in str(step.trace(*args).report)
    other = piped(graded(loss), Accumulate(steps=2, dtype=""), microbatches=2)
    assert "their own dtype" in str(other.trace(*args).report)


def test_two_dtypes_of_sums() -> None:
    loss, params, data = PROGRAMS["plain"]()
    step = piped(graded(loss), Accumulate(steps=2), microbatches=2, dtype="float16")
    with pytest.raises(PlanError, match=r"pipeline\.dtype = 'float16' and accumulate\.dtype = 'float32'"):
        step.trace(params, *data)


def test_the_schedule_says_when_gradients_are_summed() -> None:
    loss, params, data = PROGRAMS["plain"]()
    step = piped(graded(loss), Accumulate(steps=2, reduce="once"))
    with pytest.raises(PlanError, match=r"accumulate\.reduce = 'once': with pipeline .* leave it out"):
        step.trace(params, *data)


# ---------------------------------------------------------------- weights that layers cast


def cast(x: Any, w: dict[str, Any]) -> Any:
    """A layer whose matrices are in bfloat16 wherever they are used."""
    up, down = (w[name].astype(jnp.bfloat16) for name in ("up", "down"))
    h = layered.normed(x) * (1 + w["norm"])
    return x + 0.5 * (jax.nn.silu(h.astype(jnp.bfloat16) @ up) @ down).astype(jnp.float32)


def of_layers_like(layer: Any) -> Any:
    def loss(params: Any, tokens: Any) -> Any:
        x = layered.through(layer, params["embedding"][tokens], layered.stacked(params))
        return layered.tied(params, x, tokens)

    return graded(loss)


def in_microbatches(step: Any, *args: Any) -> Any:
    """On one device, gradients added up in float32."""
    return parallelize(step, Plan({}, [Accumulate(steps=4)]), devices=jax.devices()[:1])(*args)


@pytest.mark.parametrize("schedule", ["circular", slow("zb-h1")])
def test_gradients_of_cast_weights_are_those_of_microbatches_to_the_bit(schedule: str) -> None:
    step, args = of_layers_like(cast), (layered.weights(4), layered.text())
    _, found = run(piped(step, dtype="float32", **scheduled(schedule)), *args)
    _, wanted = in_microbatches(step, *args)
    for name in ("up", "down"):
        np.testing.assert_array_equal(found[name], wanted[name], name)


@pytest.mark.slow  # two programs
def test_a_weight_that_one_use_casts_and_another_does_not_stays_as_it_is() -> None:
    def layer(x: Any, w: Any) -> Any:
        return cast(x, w) + 0.1 * jnp.tanh(x @ w["up"]) @ w["down"]

    step, args = of_layers_like(layer), (layered.weights(2), layered.text())
    mine = piped(step)
    agree(run(mine, *args), in_microbatches(step, *args))
    assert "bfloat16" not in str(mine.trace(*args).report)


def test_the_report_says_in_which_dtype_gradients_of_cast_weights_are_added_up() -> None:
    report = piped(of_layers_like(cast)).trace(layered.weights(2), layered.text()).report
    said = "their own dtype: of weights that layers cast first, bfloat16: pipeline.dtype names another"
    assert said in str(report)


# ---------------------------------------------------------------- ranges that are kept from step to step


def kept(where: str, calibration: str = "delayed,3") -> tuple[Quantize, Any, Any]:
    """Quantize that keeps the ranges of one weight's product; a training step, and its weights. The largest
    number of a range is a code: with int8 it lies between two.
    """
    fields = ("activations", "weights", "gradients")
    own = {"base": "fp8", **{f"{each}_calibration": calibration for each in fields}}

    def loss(params: Any, tokens: Any) -> Any:
        x = layered.through(layered.mlp, params["embedding"][tokens], layered.stacked(params))
        return jnp.mean(layered.entropy(x @ params["head"], tokens))

    def step(params: Any, tokens: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, tokens)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), value

    params = layered.weights(2, head=(layered.EMBED, layered.VOCAB))
    return Quantize("none", rules={f"param:{where}": "own"}, recipes={"own": own}), step, params


@pytest.mark.parametrize("calibration", ["delayed,3", "calibrated"])
def test_layers_on_stages_keep_no_ranges(calibration: str) -> None:
    quantize, step, params = kept("up", calibration)
    said = r"range of 0\.mlpwi cannot be kept with pipeline .*layered\.py.* current scaling, int8"
    with pytest.raises(PlanError, match=said):
        piped(step, quantize).trace(params, layered.text())


@pytest.mark.slow  # two training steps
def test_the_head_keeps_its_ranges_through_the_schedule() -> None:
    """Histories are those of microbatches without stages, to rounding."""
    quantize, step, params = kept("head")
    plan = Plan({}, [quantize, Accumulate(steps=4, dtype="")])
    plain, mine = parallelize(step, plan, devices=jax.devices()[:1]), piped(step, quantize)
    data = layered.text()
    for fn in (plain, mine):
        fn.trace(params, data)
    one, other = plain.place(params), mine.place(params)
    for _ in range(2):
        (one, value), (other, same) = plain(one, data), mine(other, data)
        agree(same, value)
    assert one.kept.keys() == other.kept.keys() and len(one.kept) == 4
    for path in one.kept:
        agree(np.asarray(other.kept[path]), np.asarray(one.kept[path]))


# ---------------------------------------------------------------- what a stage makes of nothing


def left_nothing() -> layered.Program:
    """Layers that divide by what the data leave of what they take."""

    def loss(params: Any, tokens: Any, seen: Any) -> Any:
        @jax.checkpoint
        def layer(x: Any, w: Any) -> Any:
            size = jnp.sum(jnp.abs(x) * seen[..., None], (1, 2), keepdims=True)
            return (x / size + jnp.tanh(x @ w + params["bias"])) * seen[..., None]

        x = params["embedding"][tokens] * seen[..., None]
        return layered.tied(params, layered.through(layer, x, params["norm"]), tokens)

    square = (layered.EMBED, layered.EMBED)
    params = layered.weights(4, bias=square[1:]) | {"norm": layered.weights(a=(4, *square))["a"]}
    seen = np.float32((np.arange(layered.LENGTH) + np.arange(layered.BATCH)[:, None]) % 2)
    return loss, params, (layered.text(), seen)


@pytest.mark.parametrize("schedule", ["1f1b", slow("circular")])
def test_layers_that_divide_by_what_data_leave_of_a_register(schedule: str) -> None:
    """A stage without work has a register of one microbatch and the data of another, which leave nothing."""
    loss, params, data = left_nothing()
    agree(
        run(piped(graded(loss), **scheduled(schedule)), params, *data), jax.jit(graded(loss))(params, *data)
    )


def running_once() -> layered.Program:
    """The last of three layers makes negative numbers, and all have the logarithm of what they take."""

    def loss(params: Any, tokens: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return jnp.where(w["last"] > 0, -x, x) + 0.1 * jnp.log(x) * (params["bias"] + w["norm"])

        rows = {"norm": params["norm"], "last": np.float32([0, 0, 1])}
        x = 2 + jnp.abs(params["embedding"][tokens])
        return layered.tied(params, layered.through(layer, x, rows), tokens)

    return loss, layered.weights(3, bias=(layered.EMBED,)), (layered.text(),)


def test_a_layer_that_cannot_run_twice_stands_in_for_one_that_a_stage_lacks() -> None:
    loss, params, data = running_once()
    step = piped(graded(loss), **scheduled("zb-h1"))
    agree(run(step, params, *data), jax.jit(graded(loss))(params, *data))
