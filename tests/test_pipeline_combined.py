"""Pipeline where another pass has a say in the same thing: chunks of the loss, sums of gradients, ranges."""

import jax
import numpy as np
import pytest

from tests.layered import PROGRAMS
from tests.test_pipeline import agree, graded, piped, run, slow, wanted
from xform import Accumulate, ChunkedLoss, Plan, parallelize

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
