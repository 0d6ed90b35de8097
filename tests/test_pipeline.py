"""Pipeline: a stack of layers over stages has the values and gradients that it has on one device."""

import functools
import math
import pathlib
import random
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import layered
from tests.layered import PROGRAMS, of_layers
from tests.test_pipeline_ticks import drawn
from xform import Pipeline, Plan, PlanError, Shard, parallelize
from xform.api import Parallelized
from xform.higher_order import equations
from xform.schedules import Schedule

TOLERANCE = 1e-6  # of an array's largest entry: float32, sums in another order
EXACT = 1e-12  # of float64

SCHEDULED: dict[str, dict[str, Any]] = {
    "gpipe": {},
    "gpipe, sent later": {"schedule": "gpipe", "delay": 1},
    "circular": {"repeats": 2},
    "circular, sent later": {"schedule": "circular", "repeats": 2, "delay": 1},
    "1f1b": {},
    "eager-1f1b": {},
    "eager-1f1b, two chunks": {"schedule": "eager-1f1b", "repeats": 2},
    "interleaved": {"repeats": 2},
    "zb-h1": {},
}
"""Options of the pass, by a name."""


def slow(*values: Any) -> Any:
    """A case that compiles a large program."""
    return pytest.param(*values, marks=pytest.mark.slow)


def graded(loss: Callable[..., Any], argnums: Any = 0, **options: Any) -> Callable[..., Any]:
    return lambda *args: jax.value_and_grad(loss, argnums, **options)(*args)


def piped(
    fn: Callable[..., Any], *passes: Any, mesh: Mapping[str, int] | None = None, **options: Any
) -> Parallelized:
    """The function over two stages, or a mesh."""
    sizes = mesh or {"stage": 2}
    chosen = {"schedule": "gpipe", "microbatches": 4} | options
    devices = jax.devices()[: math.prod(sizes.values())]
    return parallelize(fn, Plan(sizes, (Pipeline(**chosen), *passes)), devices=devices)


def scheduled(name: str) -> dict[str, Any]:
    return {"schedule": name} | SCHEDULED[name]


def wide(x: Any) -> Any:
    """Floats in float64."""
    return np.float64(x) if getattr(x, "dtype", None) == np.float32 else x


@functools.cache
def wanted(name: str) -> Any:
    """On one device, of one of the programs, computed once for all who compare."""
    loss, params, data = PROGRAMS[name]()
    return jax.jit(graded(loss))(params, *data)


def agree(found: Any, wanted: Any, tolerance: float = TOLERANCE) -> None:
    """To rounding, beside the largest entry of each array."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max(initial=0))


def run(step: Parallelized, *args: Any) -> Any:
    """What a step gives, whose program sends activations from stage to stage."""
    found = step(*args)
    (program,) = step._programs.values()
    assert "ppermute" in {eqn.primitive.name for eqn in equations(program.jaxpr)}
    return found


def same(program: layered.Program, *passes: Any, **options: Any) -> Parallelized:
    """The step, whose results in float64 are found to be those of one device: what differs is no rounding."""
    loss, params, data = program
    step = piped(graded(loss), *passes, **options)
    with jax.enable_x64(True):
        args = jax.tree.map(wide, (params, *data))
        agree(run(step, *args), jax.jit(graded(loss))(*args), EXACT)
    return step


# ---------------------------------------------------------------- programs


# What the programs have one each of is several at once here; `tests.benchmarks.pipeline_pairs` has each by
# itself, under each schedule.
EACH = [
    ("plain", "eager-1f1b, two chunks"),
    slow("both ends", "circular, sent later"),
    slow("many carries", "zb-h1"),
    slow("many rows", "interleaved"),
    slow("two towers", "gpipe"),
]


@pytest.mark.parametrize(("name", "schedule"), EACH)
def test_each_program_is_that_of_one_device(name: str, schedule: str) -> None:
    same(PROGRAMS[name](), **scheduled(schedule))


MESHES: dict[str, tuple[dict[str, int], tuple[Shard, ...]]] = {
    "four stages": ({"stage": 4}, ()),
    "stages of fsdp": ({"stage": 4, "fsdp": 2}, (Shard(strict=False, collectives="auto"),)),
    "stages of fsdp, written out": ({"stage": 4, "fsdp": 2}, (Shard(strict=False, collectives="explicit"),)),
    "stages of tensor": ({"stage": 2, "tensor": 4}, (Shard(strict=False, collectives="auto"),)),
    "stages of tensor, written out": (
        {"stage": 2, "tensor": 4},
        (Shard(strict=False, collectives="explicit"),),
    ),
}


@pytest.mark.slow  # whole steps on four devices
def test_weights_that_come_together_while_others_are_in_use() -> None:
    loss, params, data = PROGRAMS["plain"]()
    options = {"mesh": {"stage": 2, "fsdp": 2}, "schedule": "circular", "repeats": 4, "prefetch": True}
    step = piped(graded(loss), Shard(strict=False, collectives="explicit"), **options)
    agree(run(step, params, *data), wanted("plain"))
    assert "the next chunk's weights come together beside a tick" in str(step.trace(params, *data).report)


def test_weights_that_are_all_there_need_not_come_early() -> None:
    loss, params, data = PROGRAMS["plain"]()
    step = piped(graded(loss), schedule="interleaved", repeats=2, prefetch=True)
    assert "wants the weights of all of a stage's chunks at once" in str(step.trace(params, *data).report)


@pytest.mark.slow  # whole steps on eight devices
@pytest.mark.parametrize(
    ("name", "mesh", "schedule"),
    [
        ("balanced experts", "stages of fsdp, written out", "circular"),
        ("two sums", "stages of tensor, written out", "1f1b"),
        ("a key a layer", "stages of fsdp", "eager-1f1b"),
        ("plain", "stages of tensor", "zb-h1"),
    ],
)
def test_programs_and_schedules_over_meshes(name: str, mesh: str, schedule: str) -> None:
    sizes, passes = MESHES[mesh]
    same(PROGRAMS[name](), *passes, mesh=sizes, **scheduled(schedule))


# ---------------------------------------------------------------- sizes


@pytest.mark.slow  # four stages
def test_stages_may_have_layers_more_or_less_and_microbatches_be_no_multiple_of_stages() -> None:
    same(of_layers(10, 5), mesh={"stage": 4}, microbatches=5, **scheduled("zb-h1"))


@pytest.mark.slow  # the layers that are repeated are run for nothing, and give what they give to nobody
def test_uneven_stages_with_losses_of_layers_that_run_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layered, "LAYERS", 7)
    loss, params, data = layered.auxiliary_rows(reverse=True)
    params = {k: v[:7] if v.shape[0] == 8 else v for k, v in params.items()}
    same((loss, params, (data[0][:6],)), microbatches=3, **scheduled("circular"))


@pytest.mark.slow  # whole steps
@pytest.mark.parametrize(
    ("batch", "microbatches", "stages", "name"),
    [
        (5, 5, 4, "circular"),
        (3, 1, 2, "1f1b"),
    ],
)
def test_microbatches_need_be_no_multiple_of_stages(
    batch: int, microbatches: int, stages: int, name: str
) -> None:
    same(of_layers(8, batch), mesh={"stage": stages}, microbatches=microbatches, **scheduled(name))


# ---------------------------------------------------------------- tables of one's own


def table(tmp_path: pathlib.Path, schedule: Schedule) -> dict[str, Any]:
    """Options of the pass that name a file with a table."""
    path = tmp_path / "table"
    path.write_text(schedule.dumps())
    return {"schedule": str(path), "microbatches": schedule.microbatches}


@pytest.mark.slow  # three stages with works of all kinds
def test_a_table_of_ones_own_that_nobody_would_write(tmp_path: pathlib.Path) -> None:
    """Works at any time at which they can run: too many sorts of ticks for loops of each."""
    own = drawn(random.Random(1), 3, 4, 2)
    same(of_layers(7), mesh={"stage": 3}, **table(tmp_path, own))


# ---------------------------------------------------------------- what is asked for


def test_a_program_that_is_not_differentiated_gives_all_rows() -> None:
    _, params, (tokens,) = PROGRAMS["plain"]()

    def logits(params: Any, tokens: Any) -> Any:
        x = layered.through(layered.mlp, params["embedding"][tokens], layered.stacked(params))
        return x @ params["embedding"].T, jnp.mean(x, (1, 2))

    agree(run(piped(logits, schedule="circular", repeats=2), params, tokens), jax.jit(logits)(params, tokens))


def test_a_loss_alone_runs_forward_works_alone() -> None:
    loss, params, data = PROGRAMS["balanced experts"]()
    step = piped(loss, mesh={"stage": 4}, **scheduled("circular"))
    agree(run(step, params, *data), jax.jit(loss)(params, *data))


@pytest.mark.slow  # the schedule whose gradients of what goes in are works of their own
def test_rows_and_metrics_beside_the_loss_and_gradients_of_what_goes_in() -> None:
    _, params, (tokens,) = PROGRAMS["plain"]()

    def loss(params: Any, x: Any, scale: Any, tokens: Any) -> Any:
        x = jnp.tanh(x) @ params["embedding"]
        x = scale * layered.through(layered.mlp, x, layered.stacked(params))
        losses = layered.entropy(x @ params["embedding"].T, tokens)
        metrics = {"rows": jnp.sum(losses, 1), "most": jnp.max(losses), "of tokens": losses}
        return jnp.mean(losses), metrics | {"least": jnp.min(x), "tokens": jnp.sum(tokens > 3)}

    rng = np.random.default_rng(6)
    x = np.float32(rng.normal(size=(*tokens.shape, layered.VOCAB)))
    args = params, x, np.float32(rng.normal(size=(len(tokens), 1, 1))), tokens
    step = graded(loss, (0, 1, 2), has_aux=True)
    agree(run(piped(step, **scheduled("zb-h1")), *args), jax.jit(step)(*args))


@pytest.mark.slow  # a step of all arrays, as they lie by stage
@pytest.mark.parametrize("schedule", ["circular"])
def test_steps_of_a_placed_state(schedule: str) -> None:
    loss, params, data = PROGRAMS["documents"]()

    def step(params: Any, *data: Any) -> tuple[Any, Any]:
        value, gradients = jax.value_and_grad(loss)(params, *data)
        return jax.tree.map(lambda w, g: w - 0.3 * g, params, gradients), value

    sizes, passes = MESHES["stages of fsdp, written out"]
    mine = piped(step, *passes, mesh=sizes, **scheduled(schedule))
    mine.trace(params, *data)
    state, other = mine.place(params), params
    for _ in range(2):
        state, value = mine(state, *data)
        other, expected = jax.jit(step)(other, *data)
        agree(value, expected)
    agree(jax.tree.map(np.asarray, mine.unplace(state)), jax.tree.map(np.asarray, other), 1e-5)


# ---------------------------------------------------------------- numbers of less digits, or none


def divided() -> layered.Program:
    """Layers whose derivative divides by what they have kept."""

    def loss(params: Any, tokens: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return x / jnp.linalg.norm(x, axis=-1, keepdims=True) + x @ w

        x = layered.through(layer, params["embedding"][tokens], params["w"])
        return layered.tied(params, x, tokens)

    rng = np.random.default_rng(8)
    params = {"w": np.float32(rng.normal(size=(6, 8, 8)) / 3), "embedding": layered.weights()["embedding"]}
    return loss, params, (layered.text(6),)


@pytest.mark.slow  # a mixed table
def test_a_stage_without_work_makes_no_number_that_is_none() -> None:
    """It runs what the others run."""
    same(divided(), mesh={"stage": 3}, microbatches=3, schedule="zb-h1")


# ---------------------------------------------------------------- what is no pipeline


def test_weights_that_all_layers_share_are_no_stack() -> None:
    def loss(params: Any, tokens: Any) -> Any:
        w = {name: params[name][0] for name in ("up", "down", "norm")}
        x, _ = jax.lax.scan(lambda x, _: (layered.mlp(x, w), None), params["embedding"][tokens], length=4)
        return layered.tied(params, x, tokens)

    with pytest.raises(PlanError, match="weights of its own"):
        piped(graded(loss)).trace(layered.weights(), layered.text())


def test_a_stack_of_fewer_layers_than_blocks() -> None:
    loss, params, data = of_layers(3)
    with pytest.raises(PlanError, match=r"3 layers .*layered\.py.* 2 stages of 2 chunks need 4"):
        piped(graded(loss), **scheduled("circular")).trace(params, *data)


def test_a_batch_that_does_not_divide() -> None:
    loss, params, data = of_layers(4, 6)
    with pytest.raises(PlanError, match=r"pipeline\.microbatches = 4"):
        piped(graded(loss)).trace(params, *data)


def test_a_mesh_without_the_axis() -> None:
    loss, params, data = of_layers(4)
    with pytest.raises(PlanError, match=r"pipeline\.axis = 'stages': the mesh has stage"):
        piped(graded(loss), axis="stages").trace(params, *data)


def test_rows_that_meet_within_a_layer() -> None:
    def loss(params: Any, tokens: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return layered.mlp(x - jnp.mean(x, 0), w)

        x = layered.through(layer, params["embedding"][tokens], layered.stacked(params))
        return layered.tied(params, x, tokens)

    with pytest.raises(PlanError, match=r"the batch cannot be cut.*layered\.py|.*test_pipeline\.py"):
        piped(graded(loss)).trace(layered.weights(), layered.text())
