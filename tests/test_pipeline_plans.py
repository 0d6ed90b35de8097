"""Pipeline beside other passes, and over models as they are: values and gradients are those of one device."""

import math
from typing import Any

import jax
import pytest

from tests import public
from tests.layered import PROGRAMS
from tests.test_pipeline import MESHES, agree, graded, piped, run, scheduled, slow, wanted
from xform import (
    Accumulate,
    Kernels,
    Narrow,
    Pipeline,
    Plan,
    Quantize,
    Remat,
    Roll,
    Shard,
    check,
    parallelize,
    topologies,
)
from xform.models import gpt2, llama

# ---------------------------------------------------------------- what is kept, and what is done again


@pytest.mark.parametrize(
    ("policy", "schedule"),
    [
        slow("full", "zb-h1"),
        ("minimal", "circular"),
    ],
)
def test_layers_whose_values_are_computed_again(policy: Any, schedule: str) -> None:
    loss, params, data = PROGRAMS["plain"]()
    agree(run(piped(graded(loss), Remat(policy), **scheduled(schedule)), params, *data), wanted("plain"))


def test_a_layer_that_is_computed_again_keeps_its_input_alone() -> None:
    """What a stage keeps of a microbatch is an array of each of its layers."""
    loss, params, data = PROGRAMS["plain"]()

    def kept(*passes: Any) -> int:
        report = piped(graded(loss), *passes, schedule="1f1b").trace(params, *data)
        shapes = {v.aval.shape for eqn in report.jaxpr.eqns for v in eqn.outvars}
        return sum(math.prod(shape) for shape in shapes if shape[:3] == (2, 3, 4))

    assert 0 < kept(Remat("full")) < kept()


@pytest.mark.slow  # compiles two steps
@pytest.mark.parametrize("remat", [Remat("minimal_offloaded")])
def test_residuals_on_the_host(remat: Remat) -> None:
    loss, params, data = PROGRAMS["documents"]()
    agree(run(piped(graded(loss), remat, schedule="1f1b"), params, *data), wanted("documents"))


# ---------------------------------------------------------------- other passes


@pytest.mark.slow  # compiles programs with attention
@pytest.mark.parametrize(
    ("passes", "schedule"),
    [((Kernels(shortest=1), Remat("minimal")), "zb-h1")],
)
def test_attention_that_was_raised(passes: tuple[Any, ...], schedule: str) -> None:
    loss, params, data = PROGRAMS["documents"]()
    agree(run(piped(graded(loss), *passes, schedule=schedule), params, *data), wanted("documents"))


@pytest.mark.slow  # a model with kernels, lowered
def test_kernels_in_stages_that_the_compiler_partitions() -> None:
    """They get a region over the other axes alone: that of the stages is there already."""
    fn, args = llama.loss(size="tiny", scan=True, layers=2, batch=4, length=512)
    plan = Plan(
        {"stage": 2, "fsdp": 2},
        [Kernels(), Pipeline(microbatches=2, schedule="1f1b"), Shard(collectives="auto")],
    )
    step = parallelize(jax.value_and_grad(fn), plan, devices=topologies.parse("v5e:2x2").devices())
    lowered = step.lower(*args)
    assert "tpu_custom_call" in lowered.as_text()
    assert "attention in a shard_map of its own: b over fsdp" in str(lowered.report())


@pytest.mark.slow  # compiles a quantized program
@pytest.mark.parametrize("schedule", ["zb-h1"])
def test_quantized_products(schedule: str) -> None:
    """Each microbatch has scales of its own: so far from the floats as the whole batch is with its own."""
    loss, params, data = PROGRAMS["plain"]()
    step = piped(graded(loss), Quantize("int8", force=True), **scheduled(schedule))
    agree(run(step, params, *data), wanted("plain"), 0.05)
    assert "mlpwi: int8 activations, int8 weights, int8 gradients" in str(step.trace(params, *data).report)


@pytest.mark.slow  # compiles a quantized program
def test_quantized_products_of_weights_that_come_early() -> None:
    """The same numbers as where they come when they are wanted."""
    loss, params, data = PROGRAMS["plain"]()
    options = {"mesh": {"stage": 2, "fsdp": 2}, "schedule": "circular", "repeats": 3}
    passes = Quantize("int8", force=True), Shard(strict=False, collectives="explicit")
    now, early = (piped(graded(loss), *passes, prefetch=early, **options) for early in (False, True))
    found = run(early, params, *data)
    agree(found, wanted("plain"), 0.05)
    agree(found, run(now, params, *data), 0.0)
    assert "mlpwi: int8 activations, int8 weights, int8 gradients" in str(early.trace(params, *data).report)


@pytest.mark.slow  # eight microbatches
def test_steps_of_accumulate_are_more_microbatches_and_loops_may_be_narrow() -> None:
    loss, params, data = PROGRAMS["balanced experts"]()
    step = piped(graded(loss), Accumulate(steps=2), Narrow(), microbatches=4)
    agree(run(step, params, *data), wanted("balanced experts"))
    assert "8 microbatches of 1 row" in str(step.trace(params, *data).report)


# ---------------------------------------------------------------- models

SMALL = {"size": "tiny", "layers": 4, "batch": 4, "length": 8, "abstract": False}


@pytest.mark.slow  # whole models, compiled twice
def test_a_model_layer_by_layer() -> None:
    fn, args = gpt2.loss(scan=False, **SMALL)
    step = piped(jax.value_and_grad(fn), Roll(), schedule="1f1b")
    agree(run(step, *args), jax.jit(jax.value_and_grad(fn))(*args))


@pytest.mark.slow  # whole models, compiled twice
@pytest.mark.parametrize("name", ["bert"])
def test_public_models(name: str) -> None:
    fn, args = public.loss(name, layers=4, batch=4, length=8, embed=24, heads=4, mlp=32, vocab=40)
    plan = Plan({"stage": 2}, [Pipeline(microbatches=2, schedule="1f1b")])
    result = check(fn, args, plan, devices=jax.devices()[:2])
    assert result.ok, str(result)


@pytest.mark.slow  # a whole model on eight devices
def test_a_model_over_stages_and_fsdp() -> None:
    fn, args = llama.loss(scan=True, **(SMALL | {"batch": 8}))
    sizes, passes = MESHES["stages of fsdp, written out"]
    plan = Plan(sizes, [Pipeline(microbatches=4, schedule="1f1b"), Remat("full"), *passes])
    result = check(fn, args, plan)
    assert result.ok, str(result)
