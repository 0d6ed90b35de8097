"""What a pipeline sends and keeps, as its program says: permutes of the table, weights gathered once."""

import collections
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import layered
from tests.layered import PROGRAMS, Program, of_layers
from tests.processes import twice
from tests.test_pipeline import SCHEDULED, piped, scheduled, slow
from xform import Pipeline, Plan, Shard, aot, parallelize, topologies
from xform.api import Parallelized
from xform.higher_order import bodies, equations, scan_parts
from xform.pipeline.pieces import reached
from xform.pipeline.ticks import run_of
from xform.schedules import Schedule, cost, make
from xform.trace import Jaxpr, JaxprEqn

COLLECTIVES = {"ppermute", "psum", "psum_invariant", "all_gather", "reduce_scatter", "all_to_all"}
EXPLICIT = Shard(strict=False, collectives="explicit")
FSDP = {"stage": 4, "fsdp": 2}


def ran(jaxpr: Jaxpr, times: int = 1, depth: int = 0) -> Iterator[tuple[JaxprEqn, int, int]]:
    """The equations at all depths, each with how often it runs, and in how many loops it is. Where there is a
    condition, what stands under it is said to run never.
    """
    for eqn in jaxpr.eqns:
        yield eqn, times, depth
        loop = eqn.primitive.name == "scan"
        inner = times * eqn.params["length"] if loop else 0 if eqn.primitive.name == "cond" else times
        for body in bodies(eqn):
            yield from ran(body, inner, depth + loop)


def sent(jaxpr: Jaxpr) -> collections.Counter[tuple[str, str, int]]:
    """How often a collective runs along which axes, inside loops (1) or not."""
    found: collections.Counter[tuple[str, str, int]] = collections.Counter()
    for eqn, times, depth in ran(jaxpr):
        if eqn.primitive.name in COLLECTIVES:
            axes = eqn.params.get("axis_name", eqn.params.get("axes"))
            axes = (axes,) if isinstance(axes, str) else axes
            if math.prod(eqn.invars[0].aval.shape) > 1:
                found[eqn.primitive.name, ",".join(axes), min(depth, 1)] += times
    return found


def stepped(program: Program, *passes: Any, **options: Any) -> tuple[Parallelized, Program]:
    """A step of gradient descent."""
    loss, params, data = program

    def step(params: Any, *data: Any) -> tuple[Any, Any]:
        value, gradients = jax.value_and_grad(loss)(params, *data)
        return jax.tree.map(lambda w, g: w - 0.3 * g, params, gradients), value

    return piped(step, *passes, **options), (step, params, data)


def traced(program: Program, *passes: Any, **options: Any) -> Jaxpr:
    step, (_, params, data) = stepped(program, *passes, **options)
    return step.trace(params, *data).jaxpr


def table(name: str, stages: int, microbatches: int) -> Schedule:
    options = {"schedule": name} | SCHEDULED[name]
    return make(options["schedule"], stages, microbatches, options.get("repeats", 1), options.get("delay", 0))


def untaken(schedule: Schedule) -> int:
    """How many ticks make something in a direction, and nothing that another stage takes."""
    makes, sends = set(), {(send.tick, send.direction) for send in cost(schedule).sends}
    for tick, _, work in schedule.works():
        if work.kind != "weight":
            makes.add((tick, "next" if work.kind == "forward" else "previous"))
    return len(makes - sends)


# ---------------------------------------------------------------- along the stages


@pytest.mark.parametrize("name", SCHEDULED)
def test_a_tick_that_sends_in_a_direction_is_one_permute(name: str) -> None:
    """Where ticks of many sorts are one loop, one at which nothing goes on is one as well."""
    schedule = table(name, 4, 8)
    costs = cost(schedule)
    found = sent(traced(of_layers(8), mesh={"stage": 4}, microbatches=8, **scheduled(name)))
    permutes = sum(n for (what, axes, _), n in found.items() if what == "ppermute" and axes == "stage")
    needed = costs.permutes("next") + costs.permutes("previous")
    assert needed <= permutes <= needed + untaken(schedule)
    assert {axes for _, axes, _ in found} == {"stage"}
    ends = sum(n for (what, _, _), n in found.items() if what == "psum")
    # a microbatch's result to the loss, and its gradient to the embedding: under a condition in some loops
    assert ends == 2 * 8 or (ends < 2 * 8 and name == "interleaved")


@jax.custom_vjp
def marked(x: Any) -> Any:
    """x, which a layer takes forward through one operation that is nowhere else, and back through another."""
    return x + jax.lax.erf_inv(0.1 * jnp.tanh(x))


marked.defvjp(lambda x: (marked(x), x), lambda x, dx: (dx * jax.lax.lgamma(2 + jnp.tanh(x)),))


@pytest.mark.parametrize("name", ["gpipe", "circular", "eager-1f1b", "eager-1f1b, two chunks"])
def test_slots_that_run_and_do_nothing_are_those_of_the_table(name: str) -> None:
    """Their ticks have works of one kind, which all stages run, also those that have none."""
    schedule = table(name, 4, 8)

    def loss(params: Any, tokens: Any) -> Any:
        x = layered.through(lambda x, w: marked(x @ w), params["embedding"][tokens], params["w"])
        return layered.tied(params, x, tokens)

    params = {"w": np.zeros((8, layered.EMBED, layered.EMBED), np.float32)}
    params["embedding"] = layered.weights()["embedding"]
    program = loss, params, (layered.text(8),)
    options = {"mesh": {"stage": 4}, "microbatches": 8} | scheduled(name)
    layers: collections.Counter[str] = collections.Counter()
    for eqn, times, _ in ran(traced(program, **options)):
        layers[eqn.primitive.name] += times
    chunks = (layers["erf_inv"] + layers["lgamma"]) // (8 // schedule.blocks)
    works = sum(1 for _ in schedule.works())
    assert chunks * schedule.stages - works == cost(schedule).idle > 0


@pytest.mark.parametrize(
    ("name", "arrays"), [("plain", 1), ("skip to the end", 2), ("documents", 1), ("rotations outside", 1)]
)
def test_what_is_made_of_data_or_of_nothing_does_not_travel(name: str, arrays: int) -> None:
    """Masks and rotations are made on each stage; what the end takes of the embedding goes along."""
    found = sent(traced(PROGRAMS[name](), schedule="gpipe", microbatches=4))
    costs = cost(make("gpipe", 2, 4))
    needed = costs.permutes("next") + costs.permutes("previous")
    assert sum(n for (what, _, _), n in found.items() if what == "ppermute") == arrays * needed


def test_a_program_that_is_not_differentiated_sends_one_way() -> None:
    loss, params, data = PROGRAMS["plain"]()
    found = sent(piped(loss, mesh={"stage": 4}, schedule="1f1b").trace(params, *data).jaxpr)
    assert sum(n for (what, _, _), n in found.items() if what == "ppermute") == 6


# ---------------------------------------------------------------- along the batch's axes


@pytest.mark.parametrize(
    "name", ["1f1b", slow("zb-h1"), slow("eager-1f1b"), slow("gpipe"), slow("interleaved")]
)
def test_weights_are_gathered_once_and_gradients_scattered_once(name: str) -> None:
    found = sent(traced(of_layers(8, 16), EXPLICIT, mesh=FSDP, microbatches=8, **scheduled(name)))
    fsdp = {(what, depth): n for (what, axes, depth), n in found.items() if axes == "fsdp"}
    assert fsdp.pop(("all_gather", 0)) == 4  # up, down, norm and the embedding
    scattered = fsdp.pop(("reduce_scatter", 0))
    assert 4 <= scattered <= 5  # the embedding's two are made apart
    assert not fsdp
    assert {axes for _, axes, _ in found} == {"stage", "fsdp"}


@pytest.mark.parametrize("name", ["1f1b", "circular"])
def test_weights_cost_what_the_plan_must_send(name: str) -> None:
    """Each comes together once, or, where chunks take turns, once for each half of the schedule."""
    options = {"repeats": 4} | scheduled(name) if name == "circular" else scheduled(name)
    layers = of_layers(16 if name == "circular" else 8, 16)
    step, (_, params, data) = stepped(layers, EXPLICIT, mesh={"stage": 2, "fsdp": 4}, **options)
    report = step.trace(params, *data).report
    assert report.traffic is not None
    assert 0.9 < report.traffic.weights / report.traffic.bound < 1.1
    assert "gradients summed over devices" not in str(report)
    assert "layered.py" in str(report)  # what is sent is told at the user's line


def test_nothing_of_the_layers_is_gathered_over_stages() -> None:
    for name in ("1f1b", "circular"):
        found = sent(traced(of_layers(8), EXPLICIT, mesh=FSDP, **scheduled(name)))
        assert not any("stage" in axes for what, axes, _ in found if what not in ("ppermute", "psum"))


def test_chunks_that_take_turns_are_gathered_one_by_one() -> None:
    """Each comes together for its forward works, and again for its gradients."""
    windows = run_of(make("circular", 2, 4, 4)).windows
    fetches = sum(len(window.fetch) for window in windows)
    flushes = sum(len(window.flush) for window in windows)
    options = {"mesh": {"stage": 2, "fsdp": 2}, "schedule": "circular", "repeats": 4}
    jaxpr = traced(of_layers(16), EXPLICIT, **options)
    gathered, scattered = 0, 0
    chunk = 2 * layered.EMBED * layered.MLP  # elements of a matrix, of two layers
    for eqn, times, _ in ran(jaxpr):
        size = math.prod(eqn.invars[0].aval.shape) if eqn.invars else 0
        gathered += times * (eqn.primitive.name == "all_gather" and size == chunk // 2)
        scattered += times * (eqn.primitive.name == "reduce_scatter" and size == chunk)
    assert (gathered, scattered) == (2 * 8, 2 * 4)
    assert (fetches, flushes) == (8, 4)


def test_chunks_gathered_beside_a_tick_and_the_tick_wait_for_nothing_of_each_other() -> None:
    """Nor does it wait for sums of gradients. What stays for its gradients is not gathered again."""
    options = {"mesh": {"stage": 2, "fsdp": 2}, "schedule": "circular", "repeats": 4, "prefetch": True}
    jaxpr = traced(of_layers(8), EXPLICIT, **options)
    scans = [eqn.params["jaxpr"].jaxpr for eqn in equations(jaxpr) if eqn.primitive.name == "scan"]
    (window,) = [body for body in scans if any(eqn.primitive.name == "all_gather" for eqn in body.eqns)]
    tick, *later = [eqn for eqn in window.eqns if eqn.primitive.name == "scan"]
    sides: collections.Counter[str] = collections.Counter()
    for eqn in window.eqns:
        if eqn.primitive.name in ("all_gather", "reduce_scatter"):
            sides[eqn.primitive.name] += 1
            assert reached(window, eqn.outvars).isdisjoint(tick.outvars)
            assert reached(window, tick.outvars).isdisjoint(eqn.outvars)
    assert sides == {"all_gather": 4, "reduce_scatter": 3}  # up, down and norm, and the norm's sum
    assert len(later) == 1
    half = layered.EMBED * layered.MLP // 2
    gathered = [
        times
        for eqn, times, _ in ran(jaxpr)
        if eqn.primitive.name == "all_gather" and math.prod(eqn.invars[0].aval.shape) == half
    ]
    assert sum(gathered) == 2 * (2 * 4 - 2)  # up and down, of four chunks twice but for the last two


# ---------------------------------------------------------------- what is kept


def carried(jaxpr: Jaxpr) -> int:
    """Bytes of what the largest loop carries."""
    most = 0
    for eqn, _, _ in ran(jaxpr):
        if eqn.primitive.name == "scan":
            first, carry, _ = scan_parts(eqn)
            held = eqn.invars[first : first + carry]
            most = max(most, sum(math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in held))
    return most


@pytest.mark.parametrize(
    ("name", "flat"), [("1f1b", True), ("eager-1f1b", True), ("zb-h1", True), ("gpipe", False)]
)
def test_what_loops_carry_is_flat_in_microbatches_or_linear(name: str, flat: bool) -> None:
    sizes = []
    for microbatches in (8, 16, 24):
        program = of_layers(4, microbatches)
        options = {"mesh": {"stage": 4}, "microbatches": microbatches}
        sizes.append(carried(traced(program, schedule=name, **options)))
    more, again = np.diff(sizes)
    assert more == again
    assert bool(more == 0) is flat


@pytest.mark.slow  # compiles four steps
def test_the_memory_of_1f1b_is_flat_in_microbatches() -> None:
    def temp(name: str, microbatches: int) -> int:
        options = {"mesh": {"stage": 2}, "microbatches": microbatches, "schedule": name}
        step, (_, params, data) = stepped(of_layers(2, 2 * microbatches), **options)
        return int(step.lower(params, *data).compile().memory_analysis().temp_size_in_bytes)

    assert temp("1f1b", 24) < 1.1 * temp("1f1b", 6)
    assert temp("gpipe", 24) > 2 * temp("gpipe", 6)


# ---------------------------------------------------------------- as compiled


@pytest.mark.slow  # compiles steps on eight devices
@pytest.mark.parametrize("name", ["1f1b", "circular"])
def test_the_compiler_gathers_nothing_over_stages(name: str) -> None:
    step, (_, params, data) = stepped(of_layers(8), mesh={"stage": 4}, **scheduled(name))
    step.trace(params, *data)
    text = step.lower(step.place(params), *data).compile().as_text()
    assert "collective-permute(" in text
    assert "all-gather(" not in text and "all-to-all(" not in text


@pytest.mark.slow  # compiles a step for a TPU
def test_of_stages_on_slices_of_their_own_only_the_axis_of_the_stages_crosses() -> None:
    """Permutes of the table, and what embedding and head send, whose vocabulary lies over the stages."""
    topologies.prepare_environment()
    topology = topologies.parse("2xv5e:2x2")
    loss, params, data = of_layers(4)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, data))
    pipeline = Pipeline(microbatches=8, schedule="eager-1f1b")
    plan = Plan({"fsdp": 4}, [pipeline, EXPLICIT], dcn={"stage": 2})
    step = parallelize(jax.value_and_grad(loss), plan, devices=topology.devices())
    lowered = step.lower(shapes[0], *shapes[1])
    result = aot.compile_lowered(lowered.lowered, topology=topology, mesh=step.mesh).to_json()
    over = result["collectives_by_axis"]
    assert set(over["stage"]) == {"collective-permute", "all-reduce"}
    schedule = table("eager-1f1b", 2, 8)
    ticks = len({(send.tick, send.direction) for send in cost(schedule).sends})
    assert ticks <= over["stage"]["collective-permute"]["count"] <= ticks + untaken(schedule)
    crossing = {axes: kinds for axes, kinds in over.items() if axes not in ("stage", "fsdp")}
    assert sum(each["wire_bytes"] for kinds in crossing.values() for each in kinds.values()) <= 64


PROGRAM = """
import jax
import xform
from tests.layered import PROGRAMS
loss, params, data = PROGRAMS["documents"]()
pipeline = xform.Pipeline(microbatches=4, schedule="circular", repeats=4)
shard = xform.Shard(strict=False, collectives="explicit")
plan = xform.Plan({"stage": 2, "fsdp": 2}, [pipeline, shard])
step = xform.parallelize(jax.value_and_grad(loss), plan, devices=jax.devices()[:4])
lowered = step.lower(params, *data)
print(lowered.as_text(), lowered.report())
"""


@pytest.mark.slow  # starts two processes that trace and lower a step each
def test_two_processes_lower_a_pipeline_to_the_same_bytes() -> None:
    texts = twice(PROGRAM)
    assert texts[0] == texts[1] and texts[0].count(b"collective_permute") > 8
