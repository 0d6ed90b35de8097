"""Mixtures of experts that are written otherwise than by sorting tokens: the same operation, with values and
gradients of the program as it was, and with the arithmetic of tokens that are sorted.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import xform
from tests.raised import made_up
from tests.spellings.experts import LOOKALIKES, SPELLINGS
from tests.test_experts_sorted import operations, ran
from xform.experts import lifted, raised
from xform.flops import product_flops
from xform.models import mixtral
from xform.report import Report
from xform.trace import eval_jaxpr, shape_of

B, L, D, F, E, K, C = 2, 7, 8, 5, 6, 2, 3


def drawn(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


ARGS = (drawn(0, B, L, D), drawn(1, D, E), drawn(2, E, D, F), drawn(3, E, F), drawn(4, E, F, D))


def chosen(x, router, k=K):
    weights, numbers = jax.lax.top_k(jax.nn.softmax(x @ router), k)
    return weights / weights.sum(-1, keepdims=True), numbers


def read(fn, *args):
    jaxpr, report = jax.make_jaxpr(fn)(*args), Report()
    return jaxpr, raised(jaxpr, "test", report), str(report)


def differentiated(jaxpr, args):
    """The results, and the gradients of all floats of something that they all go into unlike."""
    own = [n for n, x in enumerate(args) if x.dtype.kind == "f"]

    def loss(*floats):
        given = list(args)
        for n, x in zip(own, floats, strict=True):
            given[n] = x
        outs = eval_jaxpr(jaxpr, *given)
        return sum(jnp.sum(jnp.sin(x) * jnp.arange(1.0, x.size + 1).reshape(x.shape)) for x in outs), outs

    run = jax.jit(jax.value_and_grad(loss, argnums=tuple(range(len(own))), has_aux=True))
    return jax.tree.leaves(run(*(args[n] for n in own)))


def held(fn, *args):
    """Raised, with values and gradients of the program as it was, in float64; gives it as it is then."""
    with jax.enable_x64(True):
        jaxpr, new, report = read(fn, *args)
        assert operations(new), report
        leaves = jax.tree.leaves(args)
        pairs = zip(differentiated(jaxpr, leaves), differentiated(new, leaves), strict=True)
        for want, got in pairs:
            assert np.abs(want - got).max() <= 1e-12 * max(np.abs(want).max(), 1)
    return new


def in_float64(args, high):
    """Arguments drawn at random; integers up to a number."""
    rng = np.random.default_rng(0)

    def one(x):
        value = np.asarray(made_up(jax.ShapeDtypeStruct(x.shape, x.dtype), rng, high))
        return value.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else value

    return jax.tree.map(one, args)


# ---------------------------------------------------------------- places of experts


def maxtext(x, router, up, bias, down):
    """As MaxText has it: places are counted from 1, and the one before them is cut off; gates are written to
    all experts, and tokens dispatched wherever the combined gates are not zero.
    """
    weights, numbers = chosen(x, router)
    at = jnp.arange(B)[:, None, None], jnp.arange(L)[:, None], numbers
    gates = jnp.zeros((B, L, E)).at[at].set(weights)
    mask = jax.nn.one_hot(numbers, E, dtype=jnp.int32)
    count = jnp.cumsum(mask.reshape(B, L * K, E), axis=1)
    kept = jnp.sum(mask * jnp.less_equal(count.reshape(B, L, K, E), C), axis=2)
    place = jnp.sum((mask.reshape(B, L * K, E) * count).reshape(B, L, K, E), axis=2) * kept
    combine = (gates * kept)[..., None] * jax.nn.one_hot(place, C + 1, dtype=jnp.int32)
    combine = combine[..., 1:]
    rows = jnp.einsum("BSM,BSEC->EBCM", x, combine.astype(bool))
    h = jax.nn.relu(jnp.einsum("EBCM,EMH->EBCH", rows, up) + bias[:, None, None])
    return jnp.einsum("EBCM,BSEC->BSM", jnp.einsum("EBCH,EHM->EBCM", h, down), combine)


def gshard(x, router, up, bias, down):
    """As GShard: the second choice is the largest of what the first has left, after all first ones."""
    scores = jax.nn.softmax(x @ router)
    first = jax.nn.one_hot(jnp.argmax(scores, -1), E)
    second = jax.nn.one_hot(jnp.argmax(scores * (1 - first), -1), E)
    place = (jnp.cumsum(first, 1) - first) * first
    later = ((jnp.cumsum(second, 1) - second) + first.sum(1, keepdims=True)) * second
    parts = []
    for mask, where in ((first, place), (second, later)):
        mask = mask * (where < C)
        gate = (scores * mask).sum(-1)
        places = jax.nn.one_hot((where * mask).sum(-1).astype(jnp.int32), C)
        parts.append(gate[..., None, None] * mask[..., None] * places[:, :, None])
    combine = parts[0] + parts[1]
    rows = jnp.einsum("gsec,gsm->egcm", (combine > 0).astype(x.dtype), x)
    h = jax.nn.gelu(jnp.einsum("egcm,emh->egch", rows, up) + bias[:, None, None])
    return jnp.einsum("gsec,egcm->gsm", combine, jnp.einsum("egch,ehm->egcm", h, down))


CAPACITY = ["gshard_with_two_experts", "vision", "a_layer_in_a_scan_over_layers"]


@pytest.mark.parametrize("fn", [maxtext, gshard], ids=lambda fn: fn.__name__)
def test_masks_of_places_are_gone_and_dropped_tokens_stay_dropped(fn):
    new = held(fn, *ARGS)
    assert not any({E, C} <= set(shape_of(v)) for eqn in ran(new) for v in eqn.outvars)


def test_a_token_without_a_place_goes_to_no_expert():
    """All tokens choose the same, whose places the first ones have."""

    def layer(x, scores, up, down):
        mask = jax.nn.one_hot(jnp.argmax(scores, -1), E)
        place = jnp.sum((jnp.cumsum(mask, 0) - 1) * mask, -1).astype(jnp.int32)
        sent = mask[:, :, None] * jax.nn.one_hot(place, C)[:, None]
        h = jnp.tanh(jnp.einsum("xcd,xdf->xcf", jnp.einsum("txc,td->xcd", sent, x), up))
        return jnp.einsum("txc,xcd->td", sent, jnp.einsum("xcf,xfd->xcd", h, down))

    x, _, up, _, down = ARGS
    scores = np.tile([0.1, 0.1, 0.4, 0.2, 0.1, 0.1], (L, 1))
    new = held(layer, x[0], scores, up, down)
    with jax.enable_x64(True):
        (out,) = eval_jaxpr(new, x[0], scores, up, down)
    assert np.all(out[C:] == 0) and np.all(np.abs(out[:C]).max(-1) > 0)


@pytest.mark.parametrize("name", CAPACITY)
def test_places_as_others_write_them(name):
    spelled = SPELLINGS[name]
    held(spelled.fn, *in_float64(spelled.args, 4))


def shared_places(x, router, up, bias, down):
    """Places that are counted over all experts, so that two tokens of one may have the same."""
    scores = jax.nn.softmax(x[0] @ router)
    mask = jax.nn.one_hot(jnp.argmax(scores, -1), E)
    place = jax.nn.one_hot(jnp.arange(L) % C, C)
    sent = mask[:, :, None] * place[:, None]
    h = jnp.tanh(jnp.einsum("xcd,xdf->xcf", jnp.einsum("txc,td->xcd", sent, x[0]), up))
    return jnp.einsum("txc,xcd->td", sent, jnp.einsum("xcf,xfd->xcd", h, down))


# ---------------------------------------------------------------- all experts

DENSE = [
    "every_expert",
    "every_expert_then_taken",
    "vmapped_over_experts",
    "llama4",
    "hash_layer",
    "experts_side_by_side",
    "masked_product_of_sorted_tokens",
]


@pytest.mark.parametrize("name", DENSE)
def test_all_experts_as_others_write_them(name):
    spelled = SPELLINGS[name]
    held(spelled.fn, *in_float64(spelled.args, 4))


def test_the_first_of_what_is_sorted_are_chosen():
    def layer(x, router, up, bias, down):
        scores = jax.nn.softmax(x @ router)
        numbers = jnp.argsort(-scores, axis=-1)[..., :K]
        weights = jnp.take_along_axis(scores, numbers, -1)
        g = jnp.einsum("blk,blkx->blx", weights, jax.nn.one_hot(numbers, E))
        h = jax.nn.relu(jnp.einsum("bld,xdf->blxf", x, up) + bias)
        return jnp.einsum("blxf,xfd,blx->bld", h, down, g)

    held(layer, *ARGS)


def test_of_those_that_are_chosen_some_may_count_for_nothing():
    held(all_of(lambda g: jnp.where(g > 0.3, 1.0, 0.0)), *ARGS)


def all_of(gates, scaled=False):
    """A layer in which gates weigh what experts make, or what they take."""

    def layer(x, router, up, bias, down):
        weights, numbers = chosen(x, router)
        g = gates(jnp.einsum("blk,blkx->blx", weights, jax.nn.one_hot(numbers, E)))
        sent = jnp.einsum("bld,blx->blxd", x, g if scaled else jnp.ones_like(g))
        h = jax.nn.relu(jnp.einsum("blxd,xdf->blxf", sent, up) + bias)
        made = jnp.einsum("blxf,xfd->blxd", h, down)
        return made.sum(2) if scaled else jnp.einsum("blxd,blx->bld", made, g)

    return layer


def experts_that_meet(x, router, up, bias, down):
    """What an expert makes depends on what others make."""
    weights, numbers = chosen(x, router)
    h = jax.nn.softmax(jnp.einsum("bld,xdf->blxf", x, up), axis=2)
    g = jnp.einsum("blk,blkx->blx", weights, jax.nn.one_hot(numbers, E))
    return jnp.einsum("blxf,xfd,blx->bld", h, down, g)


def a_threshold(x, router, up, bias, down):
    """All as likely as the second: with ties, more than two."""
    scores = jax.nn.softmax(x @ router)
    g = jnp.where(scores >= jax.lax.top_k(scores, K)[0][..., -1:], scores, 0)
    h = jax.nn.relu(jnp.einsum("bld,xdf->blxf", x, up))
    return jnp.einsum("blxf,xfd,blx->bld", h, down, g)


# ---------------------------------------------------------------- in turns

TURNS = [
    "python_loop",
    "scanned",
    "nested_selections",
    "fori_over_experts",
    "loop_over_weights_of_their_own",
    "one_selection",
    "stacked_in_linen",
    "mapped_over_buffers",
]


@pytest.mark.parametrize("name", TURNS)
def test_experts_that_take_turns_as_others_write_them(name):
    spelled = SPELLINGS[name]
    new = held(spelled.fn, *in_float64(spelled.args, 4))
    assert not any(eqn.primitive.name in ("scan", "while") for eqn in ran(new))


def test_a_loop_that_puts_results_over_earlier_ones_keeps_the_last():
    """Backwards, with experts that are not all there: what none has is what there was."""

    def layer(x, ids, up):
        def turn(y, each):
            w, e = each
            return jnp.where((ids == e)[:, None], jnp.tanh(x @ w), y), None

        return jax.lax.scan(turn, jnp.sin(x), (up, jnp.arange(E)), reverse=True)[0]

    x, ids = drawn(5, L, D), np.array([0, 9, 3, -1, 5, 5, 2])
    held(layer, x, ids, drawn(6, E, D, D))


def after_another(x, router, up, bias, down):
    """What an expert gives makes less of what those before it gave."""
    numbers = jnp.argmax(x @ router, -1)

    def turn(y, each):
        e, w, v = each
        return 0.5 * y + jnp.where((numbers == e)[..., None], jnp.tanh(x @ w) @ v, 0), None

    return jax.lax.scan(turn, jnp.zeros_like(x), (jnp.arange(E), up, down))[0]


def unlike(x, router, up, bias, down):
    """The last expert does something else."""
    numbers, y = jnp.argmax(x @ router, -1), jnp.zeros_like(x)
    for e in range(E):
        f = jnp.sin if e == E - 1 else jnp.tanh
        y = y + jnp.where((numbers == e)[..., None], f(x @ up[e]) @ down[e], 0)
    return y


# ---------------------------------------------------------------- looked up


@pytest.mark.parametrize("name", ["weights_looked_up", "gpt_oss", "weights_looked_up_token_by_token"])
def test_weights_that_are_looked_up_as_others_write_it(name):
    spelled = SPELLINGS[name]
    new = held(spelled.fn, *in_float64(spelled.args, 4))
    assert len(operations(new)) == 1


def test_numbers_that_are_clipped_are_those_of_the_nearest_expert():
    ids = np.array([0, 9, 3, -9, 5, 5, -1])
    held(SPELLINGS["looked_up_by_id"].fn, drawn(5, L, D), drawn(6, E, D, F), ids)


def filled(x, router, up, bias, down):
    """With numbers of no expert, whose weights are not a number."""
    ids = jnp.argmax(x[0] @ router, -1) + 1
    return jnp.einsum("ld,ldf->lf", x[0], jnp.take(up, ids, axis=0))


# ---------------------------------------------------------------- what is none

SOFT = "a token takes something of experts that it did not choose"


def in_places(more):
    """A layer that does more with what is at its places."""

    def layer(x, router, up, bias, down):
        mask = jax.nn.one_hot(jnp.argmax(x[0] @ router, -1), E)
        place = jnp.sum((jnp.cumsum(mask, 0) - 1) * mask, -1).astype(jnp.int32)
        sent = mask[:, :, None] * jax.nn.one_hot(place, C)[:, None]
        h = more(jnp.einsum("xcd,xdf->xcf", jnp.einsum("txc,td->xcd", sent, x[0]), up))
        return jnp.einsum("txc,xcd->td", sent, jnp.einsum("xcf,xfd->xcd", h, down))

    return layer


def of_numbered_experts(x, router, up, bias, down):
    """What an expert makes is scaled by its number."""
    g = jax.nn.one_hot(jnp.argmax(x @ router, -1), E)
    h = jnp.einsum("bld,xdf->blxf", x, up) * jnp.arange(1.0, E + 1)[:, None]
    return jnp.einsum("blxf,xfd,blx->bld", jnp.tanh(h), down, g)


def test_numbers_of_experts_are_an_operand_as_any_other():
    held(of_numbered_experts, *ARGS)


def dropped_out(h):
    return h * jax.random.bernoulli(jax.random.key(0), 0.5, h.shape)


NEAR = {
    "places that are numbered": (
        in_places(lambda h: h + jnp.arange(C)[:, None]),
        "something else of that place",
    ),
    "random numbers at places": (in_places(dropped_out), "given random numbers"),
    "places that several have": (shared_places, "a place has several tokens"),
    "little gates are none": (all_of(lambda g: (g > 1e-6) * 1.0 + 1e-9), SOFT),
    "places that meet": (in_places(lambda h: jnp.cumsum(h, 1)), "cumsum: it goes along the batch"),
    "a little of all": (all_of(lambda g: g + 0.01), SOFT),
    "a bias of those that were sent nothing": (all_of(lambda g: g, scaled=True), SOFT),
    "experts meet": (experts_that_meet, "comes back to tokens in several ways"),
    "a threshold": (a_threshold, "is the number of one"),
    "of no expert": (filled, "may be of no expert"),
    "one after another": (after_another, "an expert needs what another one makes"),
    "experts that are unlike": (unlike, "experts are not alike"),
}


@pytest.mark.parametrize(("fn", "why"), NEAR.values(), ids=NEAR)
def test_what_is_nearly_a_mixture_stays_and_is_told(fn, why):
    jaxpr, new, report = read(fn, *ARGS)
    assert new is jaxpr
    assert why in report and "test_sparseexperts.py" in report


def test_what_is_raised_already_stays():
    spelled = SPELLINGS["ragged_sorted"]
    jaxpr, new, _ = read(spelled.fn, *spelled.args)
    assert new is jaxpr
    for made in (lifted(jaxpr, "test", Report()), read(maxtext, *ARGS)[1]):
        assert operations(made)
        assert raised(made, "test", Report()) is made


OTHERS = [
    "combined_elsewhere",
    "tokens_mixed",
    "soft_slots",
    "soft_mixture",
    "heads",
    "ensemble",
    "relu_units",
]


@pytest.mark.parametrize("name", OTHERS)
def test_what_looks_like_one_stays(name):
    other = LOOKALIKES[name]
    jaxpr, new, report = read(other.fn, *other.args)
    assert new is jaxpr
    assert "a mixture of experts: " in report or not other.why


# ---------------------------------------------------------------- a model


@pytest.mark.parametrize("routing", ["dense", "capacity"])
def test_each_routing_of_mixtral_is_raised(routing):
    config = dataclasses.replace(mixtral.SIZES["tiny"], dtype="float64", routing=routing)
    with jax.enable_x64(True):
        graph, state = nnx.split(mixtral.Experts(config, nnx.Rngs(0)))
        state = jax.tree.map(lambda x: np.asarray(x, np.float64), state)
    held(lambda state, x: nnx.merge(graph, state)(x), state, drawn(5, B, 8, config.embed))


def through_microbatches(fn, *args):
    """What it gives with gradients of weights, on the whole batch, and a row of it at a time."""

    def step(x, *weights):
        return jax.value_and_grad(lambda w: jnp.mean(fn(x, *w) ** 2))(weights)

    plan = xform.Plan(mesh={"data": 1}, passes=[xform.Accumulate(steps=B)])
    return jax.jit(step)(*args), xform.parallelize(step, plan, devices=jax.devices()[:1])(*args)


def test_what_is_raised_is_right_for_any_number_of_tokens():
    with jax.enable_x64(True):
        new = read(maxtext, *ARGS)[1]
        want, got = through_microbatches(lambda *args: eval_jaxpr(new, *args)[0], *ARGS)
        for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
            assert np.abs(a - b).max() <= 1e-12


@pytest.mark.parametrize("routing", ["dense", "capacity"])
def test_at_full_size_it_costs_what_tokens_cost_that_are_sorted(routing):
    def made(routing):
        size = dataclasses.replace(mixtral.SIZES["8x7b"], layers=1)
        loss, args = mixtral.loss(size=size, batch=4, length=2048, routing=routing)
        return jax.make_jaxpr(loss)(*args)

    new = raised(made(routing), "test", Report())
    usual = product_flops(lifted(made("sorted"), "test", Report()))
    assert product_flops(made(routing)) > 1.2 * usual
    assert product_flops(new) < 1.0001 * usual
    assert len(operations(new)) == 1
    places = math.ceil(2048 * 2 * 1.25 / 8)
    assert not any(places in shape_of(v) for eqn in ran(new) for v in eqn.outvars)


@pytest.mark.parametrize("routing", ["dense", "capacity"])
def test_the_pass_by_itself(routing):
    """Its products are there for other passes to find."""
    fn, args = mixtral.forward(routing=routing, size="tiny", batch=2, length=16, layers=1, abstract=False)
    plan = xform.Plan({"data": 1}, [xform.SparseExperts(), xform.Kernels(interpret=True, only=("experts",))])
    ours = xform.parallelize(fn, plan, devices=jax.devices()[:1])
    want, got = jax.jit(fn)(*args), ours(*args)
    assert np.abs(want - got).max() <= 1e-5 * np.abs(want).max()
    program = ours.trace(*args)
    assert "by a kernel: megablox" in str(program.report)
    assert product_flops(program.jaxpr) < product_flops(jax.make_jaxpr(fn)(*args))
