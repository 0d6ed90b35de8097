"""Several stacks, an encoder and a decoder, in one pipeline; blocks by what layers cost; ends on stages."""

import itertools
import math
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import layered
from tests.layered import PROGRAMS, translated
from tests.test_pipeline import graded, piped, same, scheduled
from tests.test_pipeline_plans import SMALL
from tests.test_pipeline_sends import EXPLICIT, ran, sent, traced, untaken
from xform import Pipeline, Plan, PlanError, check
from xform.models import encoder_decoder
from xform.pipeline.balance import evened, slowest
from xform.pipeline.choice import Choice, choices
from xform.schedules import cost, make

BOTH = "encoder and decoder"

# ---------------------------------------------------------------- two stacks


@pytest.mark.slow  # a step of layers of two kinds
def test_stacks_of_uneven_layers_that_follow_each_other() -> None:
    same(translated(3), **scheduled("circular"))


def test_the_activations_of_both_travel_and_nothing_else() -> None:
    """What the decoder reads of the encoder is sent where the encoder's activations were."""
    found = sent(traced(PROGRAMS[BOTH](), schedule="circular", repeats=2))
    schedule = make("circular", 2, 4, 2)
    needed = cost(schedule).permutes("next") + cost(schedule).permutes("previous")
    permutes = sum(n for (what, _, _), n in found.items() if what == "ppermute")
    assert 2 * needed <= permutes <= 2 * (needed + untaken(schedule))


def test_a_run_of_chunks_for_each_stack_is_stored_and_gathered_as_one_is() -> None:
    options: dict[str, Any] = {"mesh": {"stage": 2, "fsdp": 2}, "schedule": "circular", "repeats": 2}
    for eqn, _, _ in ran(traced(PROGRAMS[BOTH](), EXPLICIT, **options)):
        if eqn.primitive.name in ("all_gather", "all_to_all") and "stage" in eqn.params["axis_name"]:
            assert math.prod(eqn.invars[0].aval.shape) == layered.EMBED  # the scale's gradient, of a stage


def test_a_bias_of_weights_and_data_is_made_by_the_layers_that_read_it() -> None:
    def loss(params: Any, tokens: Any) -> Any:
        bias = params["positions"][:, None] * params["positions"] + jnp.where(tokens != 0, 0.0, -1e9)[:, None]

        def layer(x: Any, w: Any) -> Any:
            return layered.mlp(x + jax.nn.softmax(bias) @ layered.normed(x), w)

        x = layered.through(layer, params["embedding"][tokens], layered.stacked(params))
        return layered.tied(params, x, tokens)

    program = loss, layered.weights(positions=(layered.LENGTH,)), (layered.text(),)
    step = same(program, schedule="gpipe")
    assert "travel with each microbatch: what layers carry: float32[2,5,8]" in str(
        step.trace(program[1], *program[2]).report
    )


@pytest.mark.slow  # a whole model, compiled twice
def test_an_encoder_and_a_decoder_are_two_stacks() -> None:
    fn, args = encoder_decoder.loss(scan=True, **SMALL)
    plan = Plan({"stage": 2}, [Pipeline(microbatches=4, schedule="circular", repeats=2)])
    result = check(fn, args, plan, devices=jax.devices()[:2])
    assert result.ok, str(result)


def test_the_report_says_where_each_stack_is() -> None:
    loss, params, data = PROGRAMS[BOTH]()
    report = str(piped(graded(loss), schedule="1f1b").trace(params, *data).report)
    assert "4 layers are 2 stages over 'stage': a run of 4 layers each on 1 of 2 blocks" in report
    assert "declined layers stored as stages have them: blocks differ in layers" in report
    assert "what is before the stack of 4 layers is a layer of its own: on stage 1" in report


def test_a_loop_of_few_weights_stays_around() -> None:
    def loss(params: Any, tokens: Any) -> Any:
        x = layered.through(lambda x, w: x * w, params["embedding"][tokens], params["small"])
        return layered.tied(params, layered.through(layered.mlp, x, layered.stacked(params)), tokens)

    program = loss, layered.weights(small=(2, layered.EMBED)), (layered.text(),)
    step = same(program, schedule="gpipe")
    said = "less than an eighth of the weights of the largest"
    assert said in str(step.trace(program[1], *program[2]).report)


# ---------------------------------------------------------------- blocks


def best(costs: list[int], blocks: int) -> int:
    """By trial of all cuts."""
    cuts = itertools.combinations(range(1, len(costs)), blocks - 1)
    return min(slowest(costs, [b - a for a, b in itertools.pairwise((0, *cut, len(costs)))]) for cut in cuts)


def test_blocks_are_cut_so_that_the_dearest_costs_least() -> None:
    drawn = random.Random(0)
    for _ in range(40):
        costs = [drawn.randint(1, 5) for _ in range(drawn.randint(4, 9))]
        blocks = drawn.randint(1, 4)
        counts = evened(costs, blocks)
        assert (len(counts), sum(counts), min(counts) > 0) == (blocks, len(costs), True)
        assert slowest(costs, counts) == best(costs, blocks)


def test_blocks_of_layers_that_cost_the_same_are_even_and_the_first_have_more() -> None:
    assert evened([1] * 10, 4) == (3, 3, 2, 2)
    assert evened([10**15] * 126, 16) == (8,) * 14 + (7,) * 2


def test_a_chunk_for_each_stack_is_tried_first() -> None:
    assert choices(8, 2, 1, 0, 2)[0] == Choice("eager-1f1b", 2)
    assert choices(8, 2, 1, 0)[0] == Choice("eager-1f1b", 1)


# ---------------------------------------------------------------- ends on stages


def test_embedding_and_head_on_the_first_and_the_last_stage() -> None:
    same(PROGRAMS["skip to the end"](), ends="stages", **scheduled("circular"))


@pytest.mark.slow  # a step on four devices
def test_ends_on_stages_of_fsdp() -> None:
    mesh = {"stage": 2, "fsdp": 2}
    same(PROGRAMS["token weights"](), EXPLICIT, mesh=mesh, ends="stages", schedule="1f1b")


def test_what_ends_on_stages_give_is_not_sent() -> None:
    """Losses and counts are born on the last stage, and stay there."""
    found = sent(traced(PROGRAMS["plain"](), schedule="gpipe", ends="stages"))
    costs = cost(make("gpipe", 2, 4))
    needed = costs.permutes("next") + costs.permutes("previous")
    assert sum(n for (what, _, _), n in found.items() if what == "ppermute") == needed


def test_a_head_that_costs_much_leaves_the_last_stage_fewer_layers() -> None:
    loss, params, data = layered.of_layers(8)
    wide = {**params, "embedding": np.zeros((96, layered.EMBED), np.float32)}
    report = str(piped(graded(loss), schedule="1f1b", ends="stages").trace(wide, *data).report)
    assert "a run of 6 layers, or 2 each" in report
    assert "what is after the layers is a layer of its own: on stage 1" in report


def test_gradients_of_the_data_want_ends_outside() -> None:
    def loss(params: Any, x: Any, tokens: Any) -> Any:
        return layered.tied(params, layered.through(layered.mlp, x, layered.stacked(params)), tokens)

    x = np.ones((layered.BATCH, layered.LENGTH, layered.EMBED), np.float32)
    with pytest.raises(PlanError, match=r'pipeline\.ends = "outside"'):
        piped(graded(loss, (0, 1)), schedule="1f1b", ends="stages").trace(
            layered.weights(), x, layered.text()
        )
