"""Experts: tokens that are sent to devices of experts come back as on one device, by what is planned."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xform import Accumulate, Experts, Kernels, Pipeline, Plan, PlanError, Quantize, Remat, Shard, parallelize
from xform.experts.dispatch import DispatchBackward, DispatchForward
from xform.higher_order import equations
from xform.models import deepseek, mixtral
from xform.ops import operation_of
from xform.report import amount
from xform.spmd.ledger import ledger

B, T, D, F, K = 8, 4, 6, 10, 2
MESH = {"fsdp": 2, "expert": 4}
X = np.random.default_rng(0).normal(size=(B, T, D))


def weights(experts: int = 8, seed: int = 1) -> Any:
    rng = np.random.default_rng(seed)
    shapes = {"router": (D, experts), "up": (experts, D, F), "gate": (experts, D, F), "down": (experts, F, D)}
    return {name: rng.normal(size=shape) * 0.7 for name, shape in shapes.items()} | {
        "bias": rng.normal(size=(experts, F))
    }


def sorted_by(w: Any, x: Any, numbers: Any, made: Any) -> Any:
    """`made` of rows in the order of experts; where they come back to, and whose they are."""
    experts, flat = w["router"].shape[1], numbers.reshape(-1)
    order = jnp.argsort(flat)
    counts = jnp.bincount(flat, length=experts).astype(jnp.int32)
    rows = x.reshape(-1, D)[order // numbers.shape[-1]]
    return made(rows, counts, flat[order]), order


def swiglu(w: Any, rows: Any, counts: Any, numbers: Any, **mode: Any) -> Any:
    bias = w["bias"].at[numbers].get(**mode)
    hidden = jax.nn.silu(jax.lax.ragged_dot(rows, w["gate"], counts) + bias)
    return jax.lax.ragged_dot(hidden * jax.lax.ragged_dot(rows, w["up"], counts), w["down"], counts)


def chosen(w: Any, x: Any) -> Any:
    return jax.lax.top_k(jax.nn.softmax(x @ w["router"]), K)


def by_product(w: Any, x: Any) -> Any:
    gates, numbers = chosen(w, x)
    out, order = sorted_by(w, x, numbers, lambda *rows: swiglu(w, *rows))
    return x + jnp.einsum("btk,btke->bte", gates, out[jnp.argsort(order)].reshape(*numbers.shape, D))


def by_sum(w: Any, x: Any) -> Any:
    gates, numbers = chosen(w, x)
    out, order = sorted_by(w, x, numbers, lambda *rows: swiglu(w, *rows))
    out = out[jnp.argsort(order)].reshape(*numbers.shape, D)
    return x + (out * gates[..., None]).sum(2)


def weighed_inside(w: Any, x: Any) -> Any:
    """Rows are weighed in the order of experts, and added up where tokens are."""
    gates, numbers = chosen(w, x)
    out, order = sorted_by(w, x, numbers, lambda *rows: swiglu(w, *rows))
    out = out * gates.reshape(-1)[order][:, None]
    return jnp.zeros((x.shape[0] * x.shape[1], D)).at[order // K].add(out).reshape(x.shape) + x


def not_added_up(w: Any, x: Any) -> Any:
    """What is made of a token's choices is more than a sum."""
    gates, numbers = chosen(w, x)
    out, order = sorted_by(w, x, numbers, lambda *rows: swiglu(w, *rows))
    out = out[jnp.argsort(order)].reshape(*numbers.shape, D)
    return x + jnp.max(out * gates[..., None], axis=2)


def some_dropped(w: Any, x: Any) -> Any:
    """Choices of the last expert go to none."""
    gates, numbers = chosen(w, x)
    experts = w["router"].shape[1]
    numbers = jnp.where(numbers == experts - 1, experts, numbers)
    fill: Any = {"mode": "fill", "fill_value": 0.5}
    out, order = sorted_by(w, x, numbers, lambda *rows: swiglu(w, *rows, **fill) + 0.25)
    return x + jnp.einsum("btk,btke->bte", gates, out[jnp.argsort(order)].reshape(*numbers.shape, D))


def another_ones_bias(w: Any, x: Any) -> Any:
    """As `some_dropped`, but that these have the bias of an expert."""
    gates, numbers = chosen(w, x)
    experts = w["router"].shape[1]
    numbers = jnp.where(numbers == experts - 1, experts, numbers)

    def made(rows: Any, counts: Any, ids: Any) -> Any:
        return swiglu(w, rows, counts, jnp.minimum(ids, experts - 1))

    out, order = sorted_by(w, x, numbers, made)
    return x + jnp.einsum("btk,btke->bte", gates, out[jnp.argsort(order)].reshape(*numbers.shape, D))


WRITTEN = {f.__name__: f for f in (by_product, by_sum, weighed_inside, not_added_up, some_dropped)}


def stepped(layer: Any) -> Any:
    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(jnp.sin(layer(w, x)) ** 2)

    return jax.value_and_grad(loss, argnums=(0, 1))


def planned(
    mesh: Mapping[str, int] = MESH,
    collectives: Any = "explicit",
    more: Any = (),
    axes: Any = (),
    **options: Any,
) -> Plan:
    passes = [Experts(**options), Shard(strict=False, collectives=collectives), *more]
    return Plan(mesh, passes, axes=dict(axes))


def held(layer: Any, w: Any, plan: Plan, x: Any = X, within: float = 1e-12) -> Any:
    """The program of the plan, once its values and gradients are those of one device."""
    step = stepped(layer)
    with jax.enable_x64(True):
        want, devices = jax.jit(step)(w, x), jax.devices()[: math.prod(plan.mesh.values())]
        ours = parallelize(step, plan, devices=devices)
        got, program = ours(w, x), ours.trace(w, x)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        assert np.abs(a - b).max() <= within * np.abs(a).max()
    return program


def said(program: Any, kind: str = "did") -> str:
    return "\n".join(f"{note.what}: {note.why}" for note in program.report.of(kind))


def operations(program: Any) -> list[Any]:
    found = (operation_of(eqn) for eqn in equations(program.jaxpr))
    return [op for op in found if isinstance(op, DispatchForward | DispatchBackward)]


@pytest.mark.parametrize(
    "layer, collectives",
    [*((layer, "explicit") for layer in WRITTEN.values()), (by_product, "auto"), (some_dropped, "auto")],
)
def test_tokens_go_around_and_come_back_however_they_are_put_together(layer: Any, collectives: Any) -> None:
    program = held(layer, weights(), planned(collectives=collectives, dispatch="ring"))
    assert {op.axes for op in operations(program)} == {("expert",)}
    assert ("more than a sum" in said(program, "declined")) == (layer is not_added_up)


@pytest.mark.parametrize(
    "dispatch, layer, collectives",
    [
        ("all_to_all", by_product, "auto"),
        ("all_to_all", weighed_inside, "explicit"),
        ("all_to_all", some_dropped, "explicit"),
        ("ragged_all_to_all", by_product, "explicit"),
        ("ragged_all_to_all", weighed_inside, "auto"),
        ("ragged_all_to_all", some_dropped, "explicit"),
    ],
)
def test_each_choice_goes_to_its_expert(dispatch: Any, layer: Any, collectives: Any) -> None:
    held(layer, weights(), planned(collectives=collectives, dispatch=dispatch, capacity=9.0))


@pytest.mark.parametrize("dispatch", ["all_to_all", "ragged_all_to_all"])
def test_where_there_are_more_choices_than_slots_nothing_is_lost(dispatch: Any) -> None:
    """All tokens choose the first two experts."""
    w, x = weights(), np.abs(X)
    w["router"] = -np.abs(w["router"])
    w["router"][:, :2] = 1.0
    held(by_product, w, planned(dispatch=dispatch, capacity=1.0), x)


@pytest.mark.parametrize(
    "mesh, experts, dispatch",
    [
        ({"expert": 8}, 8, "ring"),
        ({"expert": 2}, 6, "all_to_all"),
        ({"expert": 4, "fsdp": 2}, 8, "ring"),  # tokens lie over fsdp first, whatever the order of the mesh
        ({"fsdp": 2, "expert": 2, "tensor": 2}, 4, "all_to_all"),
        ({"data": 2, "expert": 2, "tensor": 2}, 4, "ring"),
        ({"fsdp": 2, "expert": 4}, 6, None),  # they do not divide
        ({"fsdp": 4}, 8, None),
    ],
    ids=str,
)
def test_meshes(mesh: Any, experts: int, dispatch: Any) -> None:
    plan = planned({**mesh, "expert": mesh.get("expert", 1)}, dispatch=dispatch)
    program = held(by_product, weights(experts), plan)
    sent = [each for each in ledger(program.jaxpr, mesh) if each.axes == ("expert",)]
    if dispatch is None:
        assert "none sent" in said(program)
    else:
        assert sent and f"tokens: {dispatch}" in said(program)


@pytest.mark.parametrize("dispatch", ["ring", "all_to_all"])
def test_what_is_another_experts_is_looked_up_where_all_have_it(dispatch: Any) -> None:
    held(another_ones_bias, weights(), planned(dispatch=dispatch, capacity=9.0))


def test_a_number_that_may_be_negative() -> None:
    def layer(w: Any, x: Any, offset: int = -1) -> Any:
        gates, numbers = chosen(w, x)
        out, order = sorted_by(w, x, numbers + offset, lambda *rows: swiglu(w, *rows))
        return x + jnp.einsum("btk,btke->bte", gates, out[jnp.argsort(order)].reshape(*numbers.shape, D))

    assert "none sent: the number of an expert may be negative" in said(held(layer, weights(), planned()))
    with pytest.raises(PlanError, match=r"experts.dispatch = 'ring' \(.*test_experts_dispatch.py.*negative"):
        parallelize(stepped(layer), planned(dispatch="ring")).trace(weights(), X)


@pytest.mark.parametrize("dispatch", ["ring", "all_to_all"])
def test_what_is_sent_is_what_is_planned(dispatch: Any) -> None:
    """In slots for all, so that nothing may be sent by the ring."""
    w, x = jax.tree.map(jnp.float32, (weights(), np.repeat(X, 64, axis=1)))
    for fn, passes in ((by_product, "forward"), (stepped(by_product), "forward and backward")):
        plan = planned(dispatch=dispatch, capacity=4.0, axes={"batch": "[1][0]"})
        program = parallelize(fn, plan).trace(w, x)
        kinds: Counter[str] = Counter()
        for each in ledger(program.jaxpr, MESH):
            if "dispatch" in each.where:
                assert each.axes == ("expert",)
                kinds[each.kind] += int(each.total)
        assert set(kinds) == ({"all-gather", "reduce-scatter"} if dispatch == "ring" else {"all-to-all"})
        assert f"{dispatch}: {amount(sum(kinds.values()))} a device, {passes}, over expert" in said(program)


# ---------------------------------------------------------------- with other passes


def deep(w: Any, x: Any) -> Any:
    """Layers in a loop, each of experts."""
    return jax.lax.scan(lambda y, layer: (by_product(layer, y), None), x, w)[0]


LAYERS = 4
STACK = jax.tree.map(lambda *xs: np.stack(xs), *(weights(seed=n) for n in range(LAYERS)))


@pytest.mark.parametrize(
    "mesh, more, dispatch",
    [
        (MESH, Accumulate(steps=2), "ring"),
        ({"stage": 2, "fsdp": 2, "expert": 2}, Pipeline(microbatches=2, schedule="1f1b"), "all_to_all"),
        ({"stage": 2, "expert": 2, "tensor": 2}, Pipeline(microbatches=2, schedule="gpipe"), "ring"),
    ],
    ids=lambda each: type(each).__name__,
)
def test_whole_steps(mesh: Any, more: Any, dispatch: Any) -> None:
    x = np.repeat(X, 2, axis=0)
    program = held_steps(STACK, x, planned(mesh, dispatch=dispatch, more=[more], axes={"batch": "[1][0]"}))
    assert {op.axes for op in operations(program)} == {("expert",)}


def held_steps(w: Any, x: Any, plan: Plan) -> Any:
    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(jnp.sin(deep(w, x)) ** 2)

    step = jax.value_and_grad(loss)
    with jax.enable_x64(True):
        want, ours = jax.jit(step)(w, x), parallelize(step, plan)
        got, program = ours(w, x), ours.trace(w, x)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        assert np.abs(a - b).max() <= 1e-12 * np.abs(a).max()
    return program


@pytest.mark.parametrize("name", ["mixtral", "deepseek"])
def test_a_kernel_runs_inside_models_that_are_computed_again(name: str) -> None:
    fn, args = {"mixtral": mixtral, "deepseek": deepseek}[name].loss(batch=8, length=16, abstract=False)
    step = jax.value_and_grad(fn)
    more = [Kernels(interpret=True, only=("experts",)), Remat(policy="full")]
    plan = planned(more=more, dispatch="ring")
    ours = parallelize(step, plan)
    assert {op.axes for op in operations(ours.trace(*args))} == {("expert",)}
    assert "by a kernel: megablox" in "\n".join(str(ours.trace(*args).report).splitlines())
    for a, b in zip(jax.tree.leaves(jax.jit(step)(*args)), jax.tree.leaves(ours(*args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5 * float(jnp.abs(a).max()))


def test_quantized_products_have_ranges_of_a_device() -> None:
    """As far from floats as on one device, whose ranges are those of all tokens; these are rounded twice."""
    x, w = np.float32(np.repeat(X, 8, axis=1)), jax.tree.map(np.float32, weights())
    step, options = stepped(by_product), {"axes": {"batch": "[1][0]"}, "more": [Quantize(recipe="int8")]}
    exact = jax.tree.leaves(jax.jit(step)(w, x)[1])
    ours = parallelize(step, planned(dispatch="all_to_all", **options))
    program = ours.trace(w, x)
    assert operations(program) and "tokens go there as int8" in said(program)
    alone = parallelize(step, Plan({"data": 1}, [Quantize(recipe="int8")]), devices=jax.devices()[:1])
    found, others = (jax.tree.leaves(f(w, x)[1]) for f in (ours, alone))
    for a, b, c in zip(exact, found, others, strict=True):
        assert 0 < np.linalg.norm(a - b) <= 2 * np.linalg.norm(a - c)


@pytest.mark.parametrize(
    "dispatch, dtype, within",
    [("ring", "float8_e4m3fn", 0.05), ("all_to_all", "int8", 0.01), ("ragged_all_to_all", "int8", 0.01)],
)
def test_tokens_are_sent_in_eight_bits(dispatch: Any, dtype: Any, within: float) -> None:
    x, w = np.float32(np.repeat(X, 8, axis=1)), jax.tree.map(np.float32, weights())
    plan = planned(dispatch=dispatch, dtype=dtype, capacity=4.0, axes={"batch": "[1][0]"})
    ours = parallelize(by_product, plan)
    exact = jax.jit(by_product)(w, x)
    assert 0 < np.linalg.norm(ours(w, x) - exact) <= within * np.linalg.norm(exact - x)
    program = ours.trace(w, x)
    found = [each for each in ledger(program.jaxpr, MESH) if "dispatch" in each.where]
    assert [each.dtype for each in found].count(dtype) == 1
    if dispatch != "ragged_all_to_all":  # of which the counts are gathered besides
        assert f"{amount(sum(each.total for each in found))} a device, forward" in said(program)


@pytest.mark.parametrize(
    "plan, why",
    [
        (Plan({"fsdp": 8}, [Experts(), Shard(strict=False)]), "experts.axis = 'expert': the mesh has fsdp"),
        (planned(capacity=0.5), "experts.capacity = 0.5: it takes 1.0 or more"),
        (planned(chunks=3), r"experts.chunks = 3 .*by_product.*: the 4 of a device .*; into 2, 4 they would"),
        (Plan(MESH, [Experts(dispatch="ring")]), r"\(test_experts_dispatch.py.*lie over no 'expert'. Shard"),
        (
            planned(more=[Accumulate(steps=8)], axes={"batch": "[1][0]"}),
            r"\(test_experts_dispatch.py.*4 tokens of a microbatch do not divide over the 8 devices",
        ),
    ],
    ids=["no axis", "capacity", "chunks", "no Shard", "microbatches"],
)
def test_errors_say_what_would_do(plan: Plan, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        parallelize(stepped(by_product), plan).trace(weights(), X)


def test_experts_that_do_not_divide_are_an_error_where_the_plan_says_how_they_are_sent() -> None:
    with pytest.raises(PlanError, match=r"'ring' \(.*6 experts do not divide over 4 devices of 'expert'"):
        parallelize(stepped(by_product), planned(dispatch="ring")).trace(weights(6), X)


def test_ranges_that_are_kept_are_those_of_all_tokens_and_nothing_is_sent() -> None:
    """Devices would each keep others: the layer stays as it is, and the report has it."""
    fn, args = mixtral.train_step(size="tiny", batch=8, length=16, layers=1)
    program = parallelize(fn, planned(more=[Quantize(recipe="int8_delayed")])).trace(*args)
    assert not operations(program) and "kept from step to step" in said(program, "declined")
    assert any("moe_mlpwo" in leaf.path and "left" in leaf.path for leaf in program.inputs)


def test_a_program_without_experts_says_so() -> None:
    program = parallelize(lambda x: jnp.sin(x), planned()).trace(X)
    assert "no tokens sorted by expert were found" in said(program, "declined")
