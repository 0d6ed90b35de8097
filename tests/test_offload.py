"""Offload: what lies on the host, what comes over and how, that numbers stay, and what a TPU's compiler makes
of it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from tests.layers import picked
from xform import Plan, PlanError, Remat, Shard, aot, check, parallelize, topologies
from xform.higher_order import equations
from xform.models import llama
from xform.passes import offload
from xform.passes.offload import Offload
from xform.sharding import hosted
from xform.sharding.memory import is_host
from xform.trace import Jaxpr

EMBED, HIDDEN, VOCAB, LAYERS = 8, 16, 13, 3


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "SMALL", 64)


SPACE = jax.memory.Space

SHAPES = {
    "table": (VOCAB, EMBED),
    "layers": {"up": (LAYERS, EMBED, HIDDEN), "down": (LAYERS, HIDDEN, EMBED)},
}


def weights(shapes: Any) -> Any:
    keys = iter(jax.random.split(jax.random.key(0), 99))
    return jax.tree.map(
        lambda s: 0.3 * jax.random.normal(next(keys), s), shapes, is_leaf=lambda s: isinstance(s, tuple)
    )


def loss(params: Any, tokens: Any, labels: Any) -> Any:
    def layer(x: Any, p: Any) -> Any:
        return x + jax.nn.silu(x @ p["up"]) @ p["down"], None

    x, _ = jax.lax.scan(layer, params["table"][tokens], params["layers"])
    return picked(x @ params["table"].T, labels)


def training(optimizer: Any, loss: Callable = loss) -> Callable:
    def step(state: Any, tokens: Any, labels: Any) -> Any:
        params, moments = state
        value, gradients = jax.value_and_grad(loss)(params, tokens, labels)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return step


def arguments(optimizer: Any, shapes: Any = SHAPES) -> Any:
    params = weights(shapes)
    tokens = jax.random.randint(jax.random.key(1), (8, 4), 0, VOCAB)
    return (params, optimizer.init(params)), tokens, tokens


ADAM = optax.adamw(1e-2)


def rewritten(*passes: Any, optimizer: Any = ADAM, loss: Callable = loss, shapes: Any = SHAPES) -> Any:
    step = parallelize(training(optimizer, loss), Plan({}, passes))
    return step.trace(*arguments(optimizer, shapes))


def transfers(jaxpr: Jaxpr) -> list[str]:
    """The types of what is brought to the device, at every depth."""
    puts = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "device_put"]
    return sorted(e.outvars[0].aval.str_short() for e in puts if is_host(e.invars[0].aval))


def on_host(program: Any) -> tuple[set[str], set[str]]:
    """The paths of the inputs and of the results that lie on the host."""
    sides = (program.jaxpr.invars, program.inputs), (program.jaxpr.outvars, program.outputs)
    found = [
        {leaf.path for v, leaf in zip(variables, leaves, strict=True) if is_host(v.aval)}
        for variables, leaves in sides
    ]
    return found[0], found[1]


# ---------------------------------------------------------------- what it makes of a program


def test_moments_lie_on_the_host_and_come_over_a_layer_at_a_time() -> None:
    program = rewritten(Offload())
    inputs, outputs = on_host(program)
    assert len(inputs) == len(outputs) == 6  # two moments of three weights, and not the count
    assert all("mu" in path or "nu" in path for path in inputs)
    up, down, table = "float32[1,8,16]", "float32[1,16,8]", "float32[13,8]"
    assert transfers(program.jaxpr) == sorted([up, up, down, down, table, table])
    kinds = {s.memory_kind for s in program.in_shardings if s is not None}
    assert kinds == {"pinned_host"}


def test_weights_of_a_loop_come_over_inside_it_in_every_pass() -> None:
    program = rewritten(Offload(optimizer=False, parameters=True), optimizer=optax.sgd(0.1))
    inputs, outputs = on_host(program)
    assert len(inputs) == len(outputs) == 3
    found = transfers(program.jaxpr)
    # Forwards, backwards, and where it is updated.
    assert found.count("float32[8,16]") == found.count("float32[16,8]") == 2
    assert found.count("float32[1,8,16]") == found.count("float32[1,16,8]") == 1
    assert not any(text.startswith(f"float32[{LAYERS},") for text in found)


def test_what_is_large_and_has_no_layers_comes_over_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosted, "SLICE", 200)
    found = transfers(rewritten(Offload()).jaxpr)
    # Three slices or more: 13 rows would be 13, 8 columns are 4.
    assert found.count("float32[13,2]") == 2
    assert "float32[13,8]" not in found


def test_what_a_norm_of_all_updates_scales_is_still_right() -> None:
    optimizer = optax.chain(optax.scale_by_adam(), optax.clip_by_global_norm(0.01), optax.scale(-0.1))
    args = arguments(optimizer)
    result = check(training(optimizer), args, Plan({}, [Offload(parameters=True)]))
    assert result.ok, result


def test_a_step_inside_a_jit_is_in_sight() -> None:
    step = training(ADAM)
    program = parallelize(lambda *args: jax.jit(step)(*args), Plan({}, [Offload()])).trace(*arguments(ADAM))
    assert "float32[1,8,16]" in transfers(program.jaxpr)


def test_small_arrays_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "SMALL", VOCAB * EMBED * 4 + 1)
    inputs, _ = on_host(rewritten(Offload()))
    assert len(inputs) == 4
    assert not any("table" in path for path in inputs)


@pytest.mark.slow
def test_what_remat_keeps_on_the_host_goes_with_it() -> None:
    """Slow: compiles and runs a training step on eight devices and on one."""
    passes = [Remat("minimal_offloaded"), Offload(parameters=True)]
    result = check(training(ADAM), arguments(ADAM), Plan({"fsdp": 8}, [Shard(strict=False), *passes]))
    assert result.ok, result


def test_an_update_that_is_not_elementwise_comes_over_whole_and_the_report_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hosted, "SLICE", 16)

    def sorts(updates: Any, state: Any, params: Any = None) -> Any:
        state = jax.tree.map(lambda m, g: jnp.sort(m, axis=0) + g, state, updates)
        return jax.tree.map(lambda m: -0.1 * m, state), state

    optimizer = optax.GradientTransformation(lambda p: jax.tree.map(jnp.zeros_like, p), sorts)
    program = rewritten(Offload(), optimizer=optimizer)
    assert f"float32[{LAYERS},8,16]" in transfers(program.jaxpr)
    assert "come over whole: no loop over layers reads it there" in str(program.report)


def test_the_report_says_what_moves_and_promises_it() -> None:
    program = rewritten(Offload(parameters=True))
    size = 4 * (VOCAB * EMBED + 2 * LAYERS * EMBED * HIDDEN)
    text = str(program.report)
    moved = f"{size / 1e3:.2f} kB a device are read from the host, {size / 1e3:.2f} kB written"
    assert f"weights in host memory: 3 arrays; a step, {moved}" in text
    assert "optimizer state in host memory: 6 arrays" in text
    promised = {(p.tensor, p.kind, p.nbytes) for p in program.report.promises}
    assert promised == {("optimizer state", "offloaded", 2 * size), ("weights", "offloaded", size)}


# ---------------------------------------------------------------- what cannot be


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Offload(optimizer=False), "neither optimizer nor parameters"),
        (Offload(), "offload.optimizer: the program takes no optimizer state; give parallelize the whole"),
    ],
)
def test_a_wrong_option_is_named(options: Offload, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        rewritten(options, optimizer=optax.sgd(0.1))


def test_state_that_is_not_returned_is_reported() -> None:
    step = training(ADAM)

    def halves(state: Any, *batch: Any) -> Any:
        (params, _), value = step(state, *batch)
        return params, value

    report = parallelize(halves, Plan({}, [Offload()])).trace(*arguments(ADAM)).report
    assert "6 arrays of optimizer state in host memory after the step: no result is their" in str(report)


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize("parameters", [pytest.param(False, marks=pytest.mark.slow), True])
def test_three_steps_on_eight_devices_are_those_of_one(parameters: bool) -> None:
    """The first is slow: a second program for eight devices."""
    args = arguments(ADAM)
    plan = Plan({"fsdp": 4, "tensor": 2}, [Shard(strict=False), Offload(parameters=parameters)])
    step = parallelize(training(ADAM), plan, donate_argnums=0)
    plain = jax.jit(training(ADAM))
    step.trace(*args)
    state, tokens, labels = step.place(*args)
    wanted, *_ = arguments(ADAM)
    for _ in range(3):
        before = state
        state, value = step(state, tokens, labels)
        assert all(x.is_deleted() for x in jax.tree.leaves(before))
        wanted, expected = plain(wanted, tokens, labels)
        assert jnp.allclose(value, expected, rtol=1e-5)
    assert len(step._programs) == 1  # on the host or not, the types are the same to the user's function
    params, moments = state
    kinds = [{x.sharding.memory_kind for x in jax.tree.leaves(tree)} for tree in (params, moments[0].mu)]
    assert kinds == [{"pinned_host" if parameters else "device"}, {"pinned_host"}]
    close = jax.tree.map(lambda a, b: jnp.allclose(jax.device_get(a), b, rtol=1e-4, atol=1e-6), state, wanted)
    assert all(jax.tree.leaves(close)), close


def test_a_state_that_nobody_placed_is_moved_by_the_first_step() -> None:
    args = arguments(ADAM)
    step = parallelize(training(ADAM), Plan({}, [Offload()]))
    (_, moments), _ = step(*args)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(moments[0].mu)} == {"pinned_host"}


MODELS = [({}, {}), ({"parameters": True}, {"scan": False})]


@pytest.mark.slow
@pytest.mark.parametrize(("options", "model"), MODELS, ids=str)
def test_a_models_numbers_stay(options: dict[str, Any], model: dict[str, Any]) -> None:
    """Slow: compiles and runs a training step on eight devices and on one."""
    fn, args = llama.train_step(remat=False, batch=8, length=16, **model)
    plan = Plan({"fsdp": 4, "tensor": 2}, [Shard(strict=False), Offload(**options)])
    result = check(fn, args, plan)
    assert result.ok, result


# ---------------------------------------------------------------- the compiler

SIZE = llama.Config(2048, 6, 512, 8, 4, 64, 1536, remat=False)


@pytest.mark.slow
def test_a_tpus_device_memory_holds_no_more_of_it_than_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow: compiles three times for a TPU."""
    monkeypatch.setattr(offload, "SMALL", 4096)
    topology = topologies.parse("v5e:2x2")
    fn, args = llama.train_step(size=SIZE, batch=8, length=256)

    def compiled(*passes: Any) -> aot.Result:
        plan = Plan({"fsdp": 4}, [Shard(strict=False), Remat("full"), *passes])
        lowered = parallelize(fn, plan, devices=topology.devices(), donate_argnums=0).lower(*args)
        result = aot.compile_lowered(lowered.lowered, topology=topology, mesh=lowered.mesh)
        result.check_promises(lowered.program.jaxpr, lowered.program.report)
        return result

    def held(result: aot.Result) -> int:
        return (result.memory["argument"] or 0) + (result.memory["temp"] or 0)

    none, moments, all_ = compiled(), compiled(Offload()), compiled(Offload(parameters=True))
    state = none.memory["alias"] or 0
    weights = state / 3
    for result, part in ((moments, 2 / 3), (all_, 1)):
        memory = result.memory
        assert memory["host_argument"] == memory["host_alias"] and not memory["host_temp"]  # in place
        assert 0.97 * part * state < memory["host_argument"] <= part * state
        assert not result.donation.left
    # A layer's two moments, old and new, and its slice of the gradient, are a twentieth of all weights each.
    assert held(moments) < held(none) - 2 * weights + weights / 2
    assert held(all_) < held(moments)
    for way in ("from_host", "to_host"):  # once a step, but for the padding of small arrays
        moved = moments.costs.host[way].wire_bytes
        assert 0.99 * moments.memory["host_argument"] < moved <= moments.memory["host_argument"]
