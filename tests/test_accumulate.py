"""Accumulate: microbatches give what the whole batch gives, or the report names what is in the way."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import public
from xform import Accumulate, Plan, PlanError, Remat, Roll, Shard, check, parallelize
from xform.higher_order import equations
from xform.models import encoder_decoder, gpt2, llama
from xform.trace import Jaxpr

BATCH, IN, OUT = 12, 5, 3
KEYS = jax.random.split(jax.random.key(0), 4)
W = jax.random.normal(KEYS[0], (IN, OUT))
X = jax.random.normal(KEYS[1], (BATCH, IN))
Y = jax.random.normal(KEYS[2], (BATCH, OUT))
LABELS = jnp.arange(BATCH) % OUT
WEIGHTS = jnp.array([0, 0, 0, 0, 7, 0.5, 1, 2, 30, 0, 0, 1])  # very different ones in each microbatch


def graded(loss: Callable, **options: Any) -> Callable:
    return lambda *args: jax.value_and_grad(loss, **options)(*args)


def accumulated(fn: Callable, *args: Any, steps: int = 3, passes: Any = (), **options: Any) -> Any:
    """The results and the program, of a function that is left as it is but for microbatches."""
    step = parallelize(fn, Plan({}, (*passes, Accumulate(steps=steps, **options))))
    return step(*args), step.trace(*args)


def traced(fn: Callable, *args: Any, **options: Any) -> Any:
    """The program alone."""
    return parallelize(fn, Plan({}, (Accumulate(**{"steps": 3} | options),))).trace(*args)


def loops(jaxpr: Jaxpr, steps: int = 3) -> list[Any]:
    """The scans over microbatches."""
    return [e for e in equations(jaxpr) if e.primitive.name == "scan" and e.params["length"] == steps]


def agree(found: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    """To float32 rounding, beside the largest entry of each array."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        scale = max(float(np.abs(np.asarray(b, np.float32)).max(initial=0)), 1e-3)
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=0, atol=tolerance * scale
        )


def declined(fn: Callable, *args: Any) -> str:
    """Why a program is left alone, as the report says."""
    program = traced(fn, *args)
    assert not loops(program.jaxpr)
    (note,) = program.report.of("declined")
    return str(note)


def squares(w: Any, x: Any, y: Any) -> Any:
    return jnp.mean((x @ w - y) ** 2)


def errors(w: Any, x: Any, y: Any) -> Any:
    return jnp.sum((x @ w - y) ** 2, -1)


def weighted(w: Any, x: Any, y: Any, m: Any) -> Any:
    return jnp.sum(m * errors(w, x, y)) / jnp.sum(m)


def entropy(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


LOSSES: dict[str, tuple[Callable, tuple[Any, ...]]] = {
    "mean": (squares, (X, Y)),
    "sum": (lambda w, x, y: jnp.sum(errors(w, x, y)), (X, Y)),
    "weighted mean": (weighted, (X, Y, WEIGHTS)),
    "weights that sum to one": (
        lambda w, x, y, m: jnp.sum(m / jnp.sum(m) * errors(w, x, y)),
        (X, Y, WEIGHTS),
    ),
    "at least one token": (
        lambda w, x, y, m: jnp.sum(m * errors(w, x, y)) / jnp.maximum(jnp.sum(m), 1.0),
        (X, Y, WEIGHTS),
    ),
    "mean over those that count": (
        lambda w, x, y, m: jnp.where(m > 0, errors(w, x, y), 0).sum() / jnp.count_nonzero(m),
        (X, Y, WEIGHTS),
    ),
    "a dot with the weights": (lambda w, x, y, m: errors(w, x, y) @ m / m.sum(), (X, Y, WEIGHTS)),
    "a root": (lambda w, x, y: jnp.sqrt(squares(w, x, y)), (X, Y)),
    "two terms": (lambda w, x, y: squares(w, x, y) + jnp.mean(jax.nn.logsumexp(x @ w, -1) ** 2), (X, Y)),
    "weight decay": (lambda w, x, y: squares(w, x, y) + 0.1 * jnp.sum(w**2), (X, Y)),
    "a product of means": (lambda w, x, y: squares(w, x, y) * jnp.mean(jnp.tanh(x @ w)), (X, Y)),
    "balanced experts": (
        lambda w, x, y: (
            squares(w, x, y)
            + jnp.sum(
                jax.nn.softmax(x @ w).mean(0) * jax.nn.one_hot(jnp.argmax(x @ w, -1), OUT).mean(0)
            )
        ),
        (X, Y),
    ),
    "labels by count": (
        lambda w, x, t: -jnp.mean(jax.nn.log_softmax(x @ w)[jnp.arange(BATCH), t]),
        (X, LABELS),
    ),
    "labels": (lambda w, x, t: entropy(x @ w, t).mean(), (X, LABELS)),
    "one-hot labels": (
        lambda w, x, t: -jnp.mean(jnp.sum(jax.nn.log_softmax(x @ w) * jax.nn.one_hot(t, OUT), -1)),
        (X, LABELS),
    ),
    "flattened": (
        lambda w, x, t: -jnp.mean(
            jax.nn.log_softmax((x[:, :, None] * w).reshape(BATCH * IN, OUT))[
                jnp.arange(BATCH * IN), jnp.repeat(t, IN)
            ]
        ),
        (X, LABELS),
    ),
    "a row's number": (lambda w, x, y: jnp.mean(jnp.arange(float(BATCH)) * errors(w, x, y)), (X, Y)),
    "running data": (lambda w, x, y, m: jnp.sum(jnp.cumsum(m) * errors(w, x, y)), (X, Y, WEIGHTS)),
    "vmap": (lambda w, x, y: jnp.mean(jax.vmap(lambda x, y: squares(w, x, y))(x, y)), (X, Y)),
    "map": (lambda w, x, y: jnp.mean(jax.lax.map(lambda p: squares(w, *p), (x, y))), (X, Y)),
    "a checkpoint": (
        lambda w, x, y: jnp.mean((jax.checkpoint(lambda x: jax.nn.gelu(x @ w))(x) - y) ** 2),
        (X, Y),
    ),
    "a checkpoint with the loss in it": (jax.checkpoint(weighted), (X, Y, WEIGHTS)),
    "a derivative inside": (
        lambda w, x, y: jnp.mean(jax.grad(lambda x: jnp.sum((x @ w - y) ** 3))(x) ** 2),
        (X, Y),
    ),
    "jit": (lambda w, x, y: jax.jit(squares)(w, x, y), (X, Y)),
    "a loop that adds up": (
        lambda w, x, y: jax.lax.scan(
            lambda c, k: (c + jnp.sum(k * errors(w, x, y)), None), 0.0, jnp.arange(3.0)
        )[0],
        (X, Y),
    ),
    "a choice": (
        lambda w, x, y: jnp.mean(jax.lax.cond(w[0, 0] > 9, jnp.sin, jnp.cos, x @ w) * y),
        (X, Y),
    ),
    "relu": (lambda w, x, y: jnp.mean((jax.nn.relu(x @ w) - y) ** 2), (X, Y)),
}  # fmt: skip


@pytest.mark.parametrize("name", ["weighted mean", "a product of means", "labels by count"])
def test_values_and_gradients_are_those_of_the_whole_batch(name: str) -> None:
    loss, data = LOSSES[name]
    found, program = accumulated(graded(loss), W, *data)
    agree(found, graded(loss)(W, *data))
    assert loops(program.jaxpr), program.report


@pytest.mark.slow
def test_every_loss_and_its_gradient_are_those_of_the_whole_batch() -> None:
    """Slow: one program of all of them."""

    def step(w: Any) -> Any:
        return {name: graded(loss)(w, *data) for name, (loss, data) in LOSSES.items()}

    found, _ = accumulated(step, W)
    wanted = jax.jit(step)(W)
    for name in LOSSES:
        agree(found[name], wanted[name])


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_runs_in_microbatches(name: str) -> None:
    loss, data = LOSSES[name]
    program = traced(graded(loss), W, *data)
    assert loops(program.jaxpr), program.report


def test_nothing_of_a_microbatch_outlives_it() -> None:
    program = traced(graded(LOSSES["labels"][0]), W, X, LABELS)
    (loop,) = loops(program.jaxpr)
    assert sorted(v.aval.str_short() for v in loop.outvars) == ["float32[5,3]", "float32[]"]


def test_one_product_forward_and_one_backward_a_microbatch() -> None:
    """The gradient of the loss alone is computed, though other sums could be differentiated too."""

    def loss(w: Any, x: Any, y: Any) -> Any:
        return squares(w, x, y), {"tanh": jnp.tanh(x @ w).mean(), "largest": (x @ w).max()}

    program = traced(graded(loss, has_aux=True), W, X, Y)
    forward = [e for e in equations(program.jaxpr) if e.primitive.name == "dot_general"]
    whole = parallelize(graded(loss, has_aux=True), Plan({})).trace(W, X, Y).jaxpr
    assert len(forward) == sum(e.primitive.name == "dot_general" for e in equations(whole))
    assert "twice" not in str(program.report)


def test_a_loss_that_is_linear_in_no_sum_runs_forward_twice_and_says_so() -> None:
    loss, data = LOSSES["a product of means"]
    program = traced(graded(loss), W, *data)
    assert len(loops(program.jaxpr)) == 2
    assert "the forward pass runs twice: not one sum alone: mul: not linear" in str(program.report)
    assert "test_accumulate.py" in str(program.report)


def test_metrics_and_rows_come_back_as_they_were() -> None:
    def loss(w: Any, x: Any, y: Any, t: Any, m: Any) -> Any:
        out = x @ w
        each = errors(w, x, y)
        metrics = {
            "accuracy": jnp.mean(jnp.argmax(out, -1) == t),
            "correct": jnp.sum(jnp.argmax(out, -1) == t),
            "tokens": m.sum(),
            "largest": out.max(),
            "smallest of each": out.min(0),
            "finite": jnp.isfinite(out).all(),
            "any": (each > 1).any(),
            "perplexity": jnp.exp(jnp.mean(each) / 10),
            "spread": jnp.sqrt(jnp.mean(out**2) - jnp.mean(out) ** 2),
            "by class": jax.ops.segment_sum(each, t, OUT),
            "each": each,
            "out": out.T,
            "flat": out.reshape(-1),
            "numbers": jnp.arange(BATCH) * 2,
            "data": x,
            "weights": w,
            "constant": jnp.ones(4),
        }
        return weighted(w, x, y, m), metrics

    args = (W, X, Y, LABELS, WEIGHTS)
    found, program = accumulated(graded(loss, has_aux=True), *args)
    agree(found, graded(loss, has_aux=True)(*args))
    assert len(loops(program.jaxpr)) == 1


def test_several_results_that_are_differentiated() -> None:
    def step(w: Any, x: Any, y: Any) -> Any:
        values, pull = jax.vjp(lambda w: (squares(w, x, y), jnp.mean(jnp.tanh(x @ w))), w)
        return values, pull((1.0, 2.0)), jax.jacrev(lambda w: jnp.stack([squares(w, x, y), jnp.sum(w)]))(w)

    agree(accumulated(step, W, X, Y)[0], step(W, X, Y))


def test_two_losses_in_one_step_and_clipping() -> None:
    def step(w: Any, v: Any, x: Any, y: Any) -> Any:
        a, g = jax.value_and_grad(squares)(w, x, y)
        b, h = jax.value_and_grad(lambda v: jnp.mean(jnp.abs(x @ v - y)))(v)
        g, h = jax.tree.map(lambda g: g / jnp.maximum(1.0, optax.global_norm((g, h))), (g, h))
        return a, b, w - g, v - h

    found, program = accumulated(step, W, W + 1, X, Y)
    agree(found, step(W, W + 1, X, Y))
    assert len(loops(program.jaxpr)) == 2


def test_the_gradient_of_the_data_keeps_the_order_of_rows() -> None:
    def step(w: Any, x: Any, y: Any) -> Any:
        return jax.grad(squares, (0, 1))(w, x, y)

    agree(accumulated(step, W, X, Y)[0], step(W, X, Y))


def test_a_forward_pass_alone_runs_in_microbatches() -> None:
    def forward(w: Any, x: Any, t: Any) -> Any:
        return entropy(x @ w, t).mean(), jnp.argmax(x @ w, -1)

    found, program = accumulated(forward, W, X, LABELS)
    agree(found, forward(W, X, LABELS))
    assert loops(program.jaxpr)


def test_a_row_that_is_differentiated_is_an_error() -> None:
    def step(w: Any, x: Any, y: Any) -> Any:
        return jax.vjp(lambda w: errors(w, x, y), w)[1](jnp.ones(BATCH))

    with pytest.raises(PlanError, match=r"a row for each.*has_aux"):
        traced(step, W, X, Y)


def test_a_maximum_that_is_differentiated_is_an_error() -> None:
    with pytest.raises(PlanError, match="the largest or smallest"):
        traced(graded(lambda w, x, y: jnp.max(errors(w, x, y)) + squares(w, x, y)), W, X, Y)


# ---------------------------------------------------------------- what mixes rows


def normalised(w: Any, x: Any, y: Any) -> Any:
    h = x @ w
    return jnp.mean((h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5) * y)


def contrastive(w: Any, x: Any, y: Any) -> Any:
    h = x @ w
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(h @ h.T)))


MIXING: dict[str, tuple[Callable, str]] = {
    "batch norm": (normalised, "a sum over the batch is used for each of its rows"),
    "contrastive": (contrastive, "every row meets every other"),
    "sorted": (lambda w, x, y: jnp.mean(jnp.sort(errors(w, x, y))[:6]), "sort: it goes along the batch"),
    "running": (
        lambda w, x, y: jnp.mean(jnp.cumsum(errors(w, x, y)) ** 2),
        "cumsum: it goes along the batch",
    ),
    "the first half": (lambda w, x, y: errors(w, x, y)[:6].mean(), "slice: it takes a part of the batch"),
    "another's row": (
        lambda w, x, y: jnp.mean(errors(w, x, y)[jnp.argsort(errors(w, x, y))] * x[:, 0]),
        "goes along the batch",
    ),
    "the next row": (
        lambda w, x, y: jnp.mean(errors(w, x, y) * jnp.roll(errors(w, x, y), 1)),
        "it takes a part of the batch",
    ),
    "recurrent": (
        lambda w, x, y: jax.lax.scan(lambda c, e: (0.5 * c + e, c * e), 0.0, errors(w, x, y))[1].mean(),
        "from one row of the batch to the next",
    ),
    "pairs": (
        lambda w, x, y: jnp.mean((x @ w).reshape(BATCH // 2, 2 * OUT).max(-1)),
        "rows of the batch are taken apart by a reshape",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_rows_is_left_alone_and_the_reason_names_the_line(name: str) -> None:
    loss, why = MIXING[name]
    note = declined(graded(loss), W, X, Y)
    assert why in note
    assert "(test_accumulate.py:" in note


def test_data_with_the_batch_inside_a_dimension_is_declined() -> None:
    def loss(w: Any, x: Any, t: Any, u: Any) -> Any:
        return jnp.mean(entropy(x @ w, t) * u.reshape(2, BATCH))

    assert "the batch is not the major part of a dimension" in declined(
        graded(loss), W, X, LABELS, jnp.ones(2 * BATCH)
    )


def test_batch_statistics_as_aux_are_exact_and_as_an_input_of_the_rows_declined() -> None:
    def loss(w: Any, x: Any, y: Any) -> Any:
        return squares(w, x, y), (x @ w).mean(0)

    found, program = accumulated(graded(loss, has_aux=True), W, X, Y)
    agree(found, graded(loss, has_aux=True)(W, X, Y))
    assert len(loops(program.jaxpr)) == 1


# ---------------------------------------------------------------- rules of the user's own


def test_custom_derivatives_go_along() -> None:
    @jax.custom_vjp
    def product(x: Any, w: Any) -> Any:
        return x @ w

    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (2 * g @ kept[1].T, 3 * kept[0].T @ g))

    @jax.custom_jvp
    def bent(x: Any) -> Any:
        return jnp.tanh(x)

    bent.defjvp(lambda x, t: (jnp.tanh(x[0]), 5 * t[0]))
    loss = lambda w, x, y: jnp.mean((bent(product(x, w)) - y) ** 2)  # noqa: E731
    found, program = accumulated(graded(loss), W, X, Y)
    agree(found, graded(loss)(W, X, Y))
    assert loops(program.jaxpr)


def test_a_rule_of_a_derivative_that_mixes_rows_is_declined() -> None:
    @jax.custom_vjp
    def centred(x: Any, w: Any) -> Any:
        return x @ w

    centred.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ (g - g.mean(0))))
    note = declined(graded(lambda w, x, y: jnp.mean((centred(x, w) - y) ** 2)), W, X, Y)
    assert "a sum over the batch is used for each of its rows" in note


# ---------------------------------------------------------------- options


def test_rows_is_the_size_of_a_microbatch() -> None:
    step = parallelize(graded(squares), Plan({}, (Accumulate(rows=3),)))
    assert loops(step.trace(W, X, Y).jaxpr, 4)
    assert "4 microbatches of 3 rows" in str(step.trace(W, X, Y).report)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"steps": 5}, r"steps = 5 does not divide the batch of 12.*1, 2, 3, 4, 6, 12"),
        ({"rows": 5}, r"rows = 5 does not divide the batch of 12.*1, 2, 3, 4, 6, 12"),
        ({}, "give steps"),
        ({"steps": 2, "rows": 2}, "give steps"),
        ({"steps": -2}, "give steps"),
        ({"steps": 2, "dtype": "int8"}, "dtype: no such value 'int8'"),
        ({"steps": 2, "reduce": "never"}, "reduce: no such value 'never'"),
    ],
)
def test_options_that_do_not_fit_are_errors(options: dict[str, Any], why: str) -> None:
    with pytest.raises(PlanError, match=why):
        parallelize(graded(squares), Plan({}, (Accumulate(**options),))).trace(W, X, Y)


def test_one_microbatch_is_no_change_and_says_so() -> None:
    program = traced(graded(squares), W, X, Y, steps=1)
    assert "one microbatch is the whole batch of 12" in str(program.report)


def test_gradients_of_bfloat16_are_added_up_in_float32_or_as_the_plan_says() -> None:
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (W, X, Y))

    def carried(**options: Any) -> list[str]:
        (loop,) = loops(traced(graded(squares), *half, **options).jaxpr)
        return sorted(v.aval.str_short() for v in loop.outvars if v.aval.shape)

    assert carried() == ["float32[5,3]"]
    assert carried(dtype="bfloat16") == carried(dtype="") == ["bfloat16[5,3]"]
    found, _ = accumulated(graded(squares), *half)
    agree(found, graded(squares)(*half), 1e-2)  # two roundings to eight bits


def test_a_cast_of_weights_stays_in_the_loop_and_a_product_of_weights_does_not() -> None:
    def loss(w: Any, u: Any, x: Any) -> Any:
        both = w @ u
        return jnp.mean(x.astype(jnp.bfloat16) @ both.astype(jnp.bfloat16))

    u = jnp.ones((OUT, 4))
    found, program = accumulated(lambda *args: jax.value_and_grad(loss, (0, 1))(*args), W, u, X)
    (loop,) = loops(program.jaxpr)
    inside = [e for e in equations(loop.params["jaxpr"]) if e.primitive.name == "dot_general"]
    assert len(inside) == 2
    assert any(e.primitive.name == "convert_element_type" for e in loop.params["jaxpr"].eqns)
    assert found[1][1].shape == u.shape


def test_the_same_program_is_made_twice() -> None:
    def text() -> str:
        plan = Plan({}, (Accumulate(steps=3),))
        return parallelize(graded(weighted), plan).lower(W, X, Y, WEIGHTS).as_text()

    assert text() == text()


# ---------------------------------------------------------------- models


@pytest.mark.slow
def test_a_models_loss_and_gradients_are_those_of_the_whole_batch() -> None:
    """Slow: compiles a model twice."""
    loss, args = llama.loss(size="tiny", abstract=False, packed=True)
    found, program = accumulated(graded(loss), *args, steps=4)
    agree(found, jax.jit(graded(loss))(*args), 2e-5)  # sums of 512 tokens in another order
    assert loops(program.jaxpr, 4)


@functools.cache
def packed_step() -> tuple[Callable, Any]:
    return llama.train_step(size="tiny", packed=True, abstract=False, batch=16)


@pytest.mark.slow
@pytest.mark.parametrize("reduce", ["each", "once"])
def test_gradients_lie_as_the_parameters_under_every_sharding(reduce: str) -> None:
    """Slow: compiles a training step on eight devices."""
    fn, args = packed_step()
    plan = Plan({"fsdp": 4, "tensor": 2}, (Shard(), Accumulate(steps=2, reduce=reduce)))
    result = check(fn, args, plan, devices=jax.devices()[:8])
    assert result.ok, result
    step = parallelize(fn, plan)
    report = str(step.trace(*args).report)
    if reduce == "each":
        assert "carried weight [vocab x embed] P('tensor', 'fsdp')" in report
    else:
        gradients = len(jax.tree.leaves(args[0].params))
        carried = [[v.aval.shape[:1] for v in loop.outvars] for loop in loops(step.trace(*args).jaxpr, 2)]
        assert any(lead.count((4,)) == gradients for lead in carried)


def test_once_needs_an_axis_of_the_batch() -> None:
    plan = Plan({"tensor": 2}, (Accumulate(steps=2, reduce="once"),))
    with pytest.raises(PlanError, match=r"the mesh has tensor and none of the axes that the batch lies on"):
        parallelize(graded(squares), plan, devices=jax.devices()[:2]).trace(W, X, Y)


@pytest.mark.parametrize("name", ["labels by count", "a row's number"])
def test_groups_of_devices_side_by_side_give_the_same(name: str) -> None:
    loss, data = LOSSES[name]
    plan = Plan({"data": 2}, (Accumulate(steps=3, reduce="once"),))
    step = parallelize(graded(loss), plan, devices=jax.devices()[:2])
    agree(step(W, *data), graded(loss)(W, *data))
    assert loops(step.trace(W, *data).jaxpr)


@pytest.mark.slow
def test_it_goes_with_recomputation_and_rolled_layers() -> None:
    """Slow: compiles a model twice."""
    loss, args = llama.loss(size="tiny", layers=2, packed=True, abstract=False, scan=False)
    wanted = jax.jit(graded(loss))(*args)
    for passes in ((Remat("full"),), (Roll(), Remat("minimal"))):
        found, program = accumulated(graded(loss), *args, steps=4, passes=passes)
        agree(found, wanted, 2e-5)
        assert any(
            e.primitive.name == "remat2" for e in equations(loops(program.jaxpr, 4)[0].params["jaxpr"])
        )


@pytest.mark.parametrize("model", [gpt2, encoder_decoder], ids=lambda m: m.__name__)
def test_our_other_models_run_in_microbatches(model: Any) -> None:
    loss, args = model.loss(size="tiny")
    assert loops(traced(graded(loss), *args, steps=4).jaxpr, 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_public_models_accumulate(name: str) -> None:
    """Slow: traces and compiles a public model twice."""
    loss, args = public.PUBLIC[name]()
    found, program = accumulated(graded(loss), *args, steps=4)
    assert loops(program.jaxpr, 4), program.report
    value, (gradients, _) = public.gradients(name)
    agree(found, (value, gradients), 5e-5)  # sums of some hundred tokens, through layers of them
