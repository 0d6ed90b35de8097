"""When weights are gathered and gradients scattered, over which links, in which dtype; against one device."""

import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from xform.api import parallelize
from xform.passes.accumulate import Accumulate
from xform.passes.shard import Shard
from xform.plan import Plan
from xform.spmd import moves
from xform.spmd.layout import Grid
from xform.spmd.ledger import ledger
from xform.spmd.torus import staged

LAYERS, BATCH, LENGTH, EMBED, MLP, VOCAB = 3, 16, 6, 24, 40, 56
SHAPES = {
    "table": (VOCAB, EMBED),
    "ups": (LAYERS, EMBED, MLP),
    "downs": (LAYERS, MLP, EMBED),
    "head": (EMBED, VOCAB),
}
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (BATCH, LENGTH)).astype(np.int32)
TIED = {name: shape for name, shape in SHAPES.items() if name != "head"}


def values(shapes=SHAPES):
    rng = np.random.default_rng(1)
    return {name: rng.normal(size=shape).astype(np.float32) / 4 for name, shape in shapes.items()}


def model(params, tokens, dtype=jnp.float32):
    """Layers in a loop; with no head of its own, the table's."""

    def layer(x, weights):
        up, down = (w.astype(dtype) for w in weights)
        return x + jnp.tanh(x @ up) @ down, None

    x = params["table"].astype(dtype)[tokens]
    x, _ = jax.lax.scan(layer, x, (params["ups"], params["downs"]))
    head = params["head"].astype(dtype) if "head" in params else params["table"].astype(dtype).T
    logits = (x @ head).astype(jnp.float32)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], axis=-1).mean()


def step(state, tokens):
    params, momentum = state
    loss, gradients = jax.value_and_grad(model)(params, tokens)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
    return (jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum), loss


def planned(mesh, dcn=None, passes=(), **options):
    return Plan(mesh, [Shard(collectives="explicit", strict=False, **options), *passes], dcn=dcn or {})


ZERO1 = planned({"data": 8}, optimizer_axes=["data"])
ZERO2 = planned({"data": 8}, optimizer_axes=["data"], gradient_axes=["data"])
ZERO3 = planned({"fsdp": 8})
HSDP = planned({"fsdp": 4}, {"data": 2})
ACROSS = planned({"fsdp": 4}, {"fsdp": 2})
COPIES = planned({"data": 4}, {"data": 2})
PLANS = {
    "zero1": ZERO1,
    "zero2": ZERO2,
    "zero3": ZERO3,
    "hsdp": HSDP,
    "fsdp across slices": ACROSS,
    "copies across slices": COPIES,
    "hsdp, microbatches": planned({"fsdp": 4}, {"data": 2}, [Accumulate(steps=2)]),
    "zero2, microbatches": planned(
        {"data": 8}, None, [Accumulate(steps=2)], optimizer_axes=["data"], gradient_axes=["data"]
    ),
}


def sent(fn, plan, *args):
    """What a device sends of matrices and more of floats, (kind, axes) -> bytes; each of it; the program."""
    parallel = parallelize(fn, plan)
    program = parallel.trace(*args)
    found = ledger(program.jaxpr, staged(parallel.mesh, plan.dcn).mesh.shape)
    totals = Counter()
    for s in found:
        if len(s.shape) >= 2 and s.dtype != "int32":
            totals[s.kind, "+".join(s.axes)] += s.total
    return dict(totals), found, program


def nbytes(shapes, itemsize=4):
    return itemsize * sum(map(math.prod, shapes))


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize("name", PLANS)
def test_a_step_is_that_of_one_device(name, monkeypatch):
    monkeypatch.setattr(moves, "LARGE", 1)  # sums between slices are taken apart
    state = (values(), jax.tree.map(np.zeros_like, values()))
    wanted = jax.jit(step)(state, TOKENS)
    parallel = parallelize(step, PLANS[name])
    placed = parallel.place(state, TOKENS)
    found = parallel(*placed)
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        # Sums over 96 tokens in another order.
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("axes", [("d", "t", "f"), ("t", "d", "f"), ("f", "t", "d"), ("d", "f")])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_dimension_is_scattered_and_gathered_in_its_order(axes, dim):
    """Whichever of the axes is between slices, and whichever dimension it is."""
    mesh = jax.make_mesh((2, 2, 2), ("t", "d", "f"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    router = moves.Router(Grid(dict(mesh.shape), frozenset({"d"})))
    spec = P(*[None] * dim, axes)
    x = np.arange(8 * 16 * 24, dtype=np.float32).reshape(8, 16, 24)

    def scattered(x):
        return router.scatter(x, axes, dim)

    def both(x):
        return router.gather(router.scatter(x, axes, dim), axes, dim)

    n = 2 ** len(axes)
    for fn, out in ((scattered, spec), (both, P())):
        region = jax.shard_map(fn, mesh=mesh, in_specs=P(), out_specs=out, check_vma=False)
        np.testing.assert_array_equal(jax.jit(region)(x), n * x)


@pytest.mark.parametrize("shape", [(16, 5), (5, 16), (5, 7)])
def test_a_sum_between_slices_is_of_a_part_on_each_device(shape, monkeypatch):
    monkeypatch.setattr(moves, "LARGE", 1)
    mesh = jax.make_mesh((2, 4), ("d", "f"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    router = moves.Router(Grid(dict(mesh.shape), frozenset({"d"})))
    x = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    region = jax.shard_map(
        lambda x: router.sum(x, ("d", "f")), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
    )
    np.testing.assert_array_equal(jax.jit(region)(x), 8 * x)
    across = [s for s in ledger(jax.make_jaxpr(region)(x).jaxpr, mesh.shape) if "d" in s.axes]
    assert [(s.kind, math.prod(s.shape)) for s in across] == [("all-reduce", -(-x.size // 4))]


# ---------------------------------------------------------------- when, and over which links


@pytest.mark.parametrize("plan", [ZERO1, ZERO2], ids=["zero1", "zero2"])
def test_zero_scatters_gradients_and_gathers_new_parameters_and_sums_nothing_whole(plan):
    state = (values(), values())
    totals, _, _ = sent(step, plan, state, TOKENS)
    weights = nbytes(SHAPES.values())
    assert totals.pop(("all-gather", "data")) == weights * 7 / 8
    assert (
        totals.pop(("reduce-scatter", "data")) == nbytes(s for n, s in SHAPES.items() if n != "table") * 7 / 8
    )
    # The table's gradient is added up from rows, each device its columns of all of them: fewer bytes.
    assert set(totals) == {("all-to-all", "data")}
    assert totals["all-to-all", "data"] < nbytes([SHAPES["table"]])


def test_zero3_gathers_for_each_pass_and_scatters_once():
    totals, found, _ = sent(step, ZERO3, (values(), values()), TOKENS)
    gathers = Counter(
        match[1]
        for s in found
        if s.kind == "all-gather" and (match := re.search(r"weight:([\w.]+)", s.where))
    )
    assert {name.split(".")[-1]: n for name, n in gathers.items() if "ups" in name or "downs" in name} == {
        "ups": 2,
        "downs": 2,
    }
    layers = nbytes([SHAPES["ups"], SHAPES["downs"]])
    assert totals["reduce-scatter", "fsdp"] == (layers + nbytes([SHAPES["head"]])) * 7 / 8
    assert ("all-reduce", "fsdp") not in totals


def test_only_sums_of_parts_cross_slices_that_have_copies():
    totals, _, _ = sent(step, HSDP, (values(), values()), np.tile(TOKENS, (4, 4)))
    across = {key: n for key, n in totals.items() if "data" in key[1]}
    assert across == {("all-reduce", "data"): nbytes(SHAPES.values()) / 4}
    assert totals["reduce-scatter", "fsdp"] == nbytes(SHAPES.values()) * 3 / 4


def test_parts_cross_slices_when_they_are_smallest():
    """Gathered across first and scattered across last: what crosses is one device's part, 1/8 of a weight."""
    totals, _, _ = sent(step, ACROSS, (values(), values()), np.tile(TOKENS, (4, 4)))
    weights, read_twice = nbytes(SHAPES.values()), nbytes([SHAPES["ups"], SHAPES["downs"]])
    assert totals["reduce-scatter", "fsdp.dcn"] == weights / 8
    assert totals["reduce-scatter", "fsdp.ici"] == weights * 3 / 4
    assert (weights + read_twice) / 8 <= totals["all-gather", "fsdp.dcn"] <= 2 * weights / 8
    assert totals["all-gather", "fsdp.ici"] == totals["all-gather", "fsdp.dcn"] * 6
    assert not any(kind == "all-reduce" for kind, _ in totals)


def test_a_tied_table_is_scattered_once():
    tokens = np.tile(TOKENS, (4, 4))
    _, found, _ = sent(step, ZERO3, (values(TIED), values(TIED)), tokens)
    table = [s for s in found if VOCAB in s.shape]
    assert Counter(s.kind for s in table) == {"all-gather": 1, "reduce-scatter": 1}
    narrow = jax.grad(lambda params, tokens: model(params, tokens, jnp.bfloat16))
    _, found, _ = sent(narrow, ZERO3, values(TIED), tokens)
    table = [s for s in found if VOCAB in s.shape]
    # The program adds its two gradients up in float32: once in that is as many bytes as each in bfloat16.
    assert Counter(s.kind for s in table) == {"all-gather": 1, "reduce-scatter": 2}
    assert {s.dtype for s in table} == {"bfloat16"}


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_gradients_of_microbatches_are_summed_over_copies_once(steps):
    passes = [Accumulate(steps=steps)] if steps > 1 else []
    tokens = np.tile(TOKENS, (8, 4))
    copies, _, _ = sent(step, planned({"data": 8}, None, passes), (values(), values()), tokens)
    assert copies["all-reduce", "data"] == nbytes(SHAPES.values()) * 2 * 7 / 8
    slices, _, _ = sent(step, planned({"fsdp": 4}, {"data": 2}, passes), (values(), values()), tokens)
    assert slices["all-reduce", "data"] == nbytes(SHAPES.values()) / 4
    assert slices["reduce-scatter", "fsdp"] == nbytes(SHAPES.values()) * 3 / 4 * steps


def test_weights_that_every_turn_uses_are_summed_over_copies_once():
    def shared(params, x):
        def turn(h, _):
            return jnp.tanh(h @ params["up"]) @ params["down"], None

        return (jax.lax.scan(turn, x, None, length=5)[0] ** 2).mean()

    weights = values({"up": (EMBED, MLP), "down": (MLP, EMBED)})
    rows = np.linspace(-1, 1, BATCH * EMBED, dtype=np.float32).reshape(BATCH, EMBED)
    totals, _, _ = sent(jax.grad(shared), planned({"data": 8}), weights, rows)
    assert totals == {("all-reduce", "data"): 2 * 4 * EMBED * MLP * 2 * 7 / 8}
    wanted, found = (
        jax.grad(shared)(weights, rows),
        parallelize(jax.grad(shared), planned({"data": 8}))(weights, rows),
    )
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


# ---------------------------------------------------------------- in which dtype


def product(params, x):
    """Its gradient is a sum over rows of exact products: only the summation rounds."""
    return (
        x["x"].astype(jnp.bfloat16) @ params["w"].astype(jnp.bfloat16) * x["dy"].astype(jnp.bfloat16)
    ).sum()


def test_gradients_in_float32_are_rounded_once():
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(24, 40)).astype(np.float32)}
    x = {
        name: rng.normal(size=(64, n)).astype(jnp.bfloat16).astype(np.float32)
        for name, n in (("x", 24), ("dy", 40))
    }
    exact = x["x"].astype(np.float64).T @ x["dy"]
    errors, dtypes = {}, {}
    for dtype in (None, "bfloat16", "float32"):
        parallel = parallelize(jax.grad(product), planned({"data": 8}, gradient_dtype=dtype))
        errors[dtype] = np.abs(np.asarray(parallel(params, x)["w"], np.float64) - exact)
        found = ledger(parallel.trace(params, x).jaxpr, {"data": 8})
        dtypes[dtype] = {s.dtype for s in found if s.shape == (24, 40)}
    assert dtypes == {None: {"bfloat16"}, "bfloat16": {"bfloat16"}, "float32": {"float32"}}
    assert (errors["float32"] <= np.abs(exact) * 2**-8).all()  # half a unit in the last place
    assert errors["float32"].mean() < 0.7 * errors[None].mean()


def test_gradients_in_bfloat16_send_half_and_the_loss_does_not_change():
    def loss_and_gradient(params, tokens):
        return jax.value_and_grad(model)(params, tokens)

    plain, found, _ = sent(loss_and_gradient, ZERO3, values(), TOKENS)
    half, narrow, program = sent(
        loss_and_gradient, planned({"fsdp": 8}, gradient_dtype="bfloat16"), values(), TOKENS
    )
    assert half["reduce-scatter", "fsdp"] * 2 == plain["reduce-scatter", "fsdp"]
    assert half["all-gather", "fsdp"] == plain["all-gather", "fsdp"]
    scalars = [[s.dtype for s in each if s.shape == ()] for each in (found, narrow)]
    assert scalars[0] == scalars[1] and set(scalars[0]) == {"float32"}
    (said,) = [line for line in program.report.lines() if "summed in bfloat16" in line]
    assert "less than in float32, in which they are computed" in said
    one, many = (
        jax.tree.leaves(fn(values(), TOKENS))
        for fn in (
            jax.jit(loss_and_gradient),
            parallelize(loss_and_gradient, planned({"fsdp": 8}, gradient_dtype="bfloat16")),
        )
    )
    np.testing.assert_allclose(one[0], many[0], rtol=1e-6)
    for a, b in zip(one[1:], many[1:], strict=True):
        np.testing.assert_allclose(a, b, atol=8 * 2**-8 * np.abs(a).max())  # each of eight terms is rounded


def test_sums_of_activations_keep_their_dtype():
    """A product whose contracted dimension lies over the tensor axis: partial sums, but of no gradient."""
    fn = jax.grad(lambda params, tokens: model(params, tokens, jnp.bfloat16))
    plan = planned({"fsdp": 2, "tensor": 4}, gradient_dtype="float32")
    _, found, _ = sent(fn, plan, values(), TOKENS)
    sums = [s for s in found if s.kind in ("reduce-scatter", "all-reduce") and s.shape]
    assert {s.dtype for s in sums if s.axes == ("tensor",) and s.shape[1:] == (LENGTH, EMBED)} == {"bfloat16"}
    assert {s.dtype for s in sums if s.axes == ("fsdp",)} == {"float32"}


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"gradient_dtype": "float32"}, "gradients summed in float32"),
        ({"overlap": ["prefetch", "permute"]}, "overlap by prefetch and permute"),
        ({"gather": "step"}, "weights gathered once a step"),
    ],
    ids=["dtype", "overlap", "gather"],
)
def test_what_only_written_collectives_can_do_is_declined_of_the_compilers(options, what):
    plan = Plan({"fsdp": 8}, [Shard(collectives="auto", strict=False, **options)])
    lines = parallelize(jax.grad(model), plan).trace(values(), TOKENS).report.lines()
    assert any(what in line and "take collectives = 'explicit'" in line for line in lines)
