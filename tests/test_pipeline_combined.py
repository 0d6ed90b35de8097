"""Pipeline where another pass has a say in the same thing: chunks of the loss, sums of gradients, ranges."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import layered
from tests.layered import PROGRAMS, of_layers
from tests.test_pipeline import agree, graded, piped, run, slow, wanted
from xform import Accumulate, ChunkedLoss, Plan, PlanError, Quantize, parallelize

# ---------------------------------------------------------------- a loss in chunks


@pytest.mark.parametrize(
    ("chunks", "microbatches", "said"),
    [
        slow(4, 4, "4 chunks of the length"),
        (8, 4, "8 chunks of the batch"),
        slow(5, 2, "8 chunks of the batch"),
        slow(5, 8, "8 chunks of the batch"),
    ],
)
def test_a_loss_in_chunks(chunks: int, microbatches: int, said: str) -> None:
    """Rows of a chunk are in one microbatch, which has as many chunks as there are more of them."""
    loss, params, data = PROGRAMS["untied"]()
    step = piped(graded(loss), ChunkedLoss(chunks=chunks), schedule="1f1b", microbatches=microbatches)
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
