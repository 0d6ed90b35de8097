"""The loss over a vocabulary in one kernel each way, against the same in plain JAX, in every form."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, PartitionSpec

from tests.kernels_suite import SLICES, Case, agree, agree_under_vmap, close, compiled, plain
from xform import Kernels, Plan, Shard, parallelize
from xform.errors import PlanError
from xform.higher_order import equations
from xform.kernels import cross_entropy_kernels as kernels
from xform.kernels.cross_entropy import (
    LSE,
    CrossEntropy,
    CrossEntropyGradient,
    Form,
    cross_entropy,
    moved,
    pays,
    refused,
)
from xform.kernels.cross_entropy_blocks import CHIPS, Blocks, Sizes, sizes_of
from xform.ops import apply, operation_of
from xform.ops.operation import on_parts, terms_of
from xform.trace import JaxprEqn

FORMS = {
    "bare": Form(),
    "tied": Form(transposed=True),
    "capped": Form(cap=3.0, scale=0.5),
    "smoothed": Form(smoothing=0.1, bias=True),
    "all": Form(cap=3.0, scale=0.5, smoothing=0.1, bias=True, transposed=True),
}

# Sums go in another order; a gradient in bfloat16 is rounded to eight bits, and so is that of the logits.
TOLERANCE = {"float32": 2e-6, "bfloat16": 2**-7}

SMALL = Blocks(16, 128, 128, 128)


def operands(form: Form, t: int, d: int, v: int, dtype: str = "float32") -> list[Any]:
    """x, w, labels (the first is outside of the vocabulary) and, if the form has one, a bias."""
    random = np.random.RandomState(0)
    x, w = random.randn(t, d), random.randn(d, v) / d**0.5
    labels = random.randint(0, v, t)
    labels[0] = -1
    args = [jnp.asarray(x, dtype), jnp.asarray(w.T if form.transposed else w, dtype)]
    args += [jnp.asarray(labels, jnp.int32)]
    return [*args, jnp.asarray(random.randn(v), jnp.float32)] if form.bias else args


def douts(t: int) -> list[Any]:
    random = np.random.RandomState(1)
    return [jnp.asarray(random.randn(t), jnp.float32) for _ in range(2)]


def forward(form: str, t: int, d: int, v: int, dtype: str = "float32") -> Case:
    op = CrossEntropy(FORMS[form], blocks=SMALL, interpret=True)
    return Case(f"forward-{form}-{dtype}-{t}-{v}", op, tuple(operands(op.form, t, d, v, dtype)))


def backward(form: str, t: int, d: int, v: int, dtype: str = "float32", chip: str = "v5e") -> Case:
    op = CrossEntropyGradient(FORMS[form], chip, SMALL, True, dtype=dtype)
    args = operands(op.form, t, d, v, dtype)
    lse = plain(CrossEntropy(op.form))(*args)[1]
    return Case(f"backward-{form}-{dtype}-{t}-{v}-{chip}", op, (*args, lse, *douts(t)), TOLERANCE[dtype])


def shaped(each: Case, *sizes: int) -> Case:
    """The case with tokens of two dimensions."""
    op: Any = each.op
    args = (
        x.reshape(*sizes, *x.shape[1:]) if dims[0] == "t" else x
        for x, dims in zip(each.args, op.operands, strict=True)
    )
    return dataclasses.replace(
        each, name=f"{each.name}-shaped", op=dataclasses.replace(op, tokens="ts"), args=tuple(args)
    )


CASES = [make(form, 19, 5, 300) for make in (forward, backward) for form in FORMS]
CASES += [make("bare", 7, 3, 5) for make in (forward, backward)]
CASES += [shaped(make("tied", 12, 3, 140), 3, 4) for make in (forward, backward)]
CASES += [make("all", 16, 8, 256, "bfloat16") for make in (forward, backward)]
CASES += [backward("all", 130, 5, 300, chip="v5p"), backward("bare", 300, 3, 140)]


@pytest.mark.parametrize("each", CASES, ids=lambda c: c.name)
def test_the_kernel_computes_what_the_plain_form_does(each: Case) -> None:
    agree(each)


@pytest.mark.parametrize("make", [forward, backward])
def test_operands_may_be_mapped(make: Any) -> None:
    agree_under_vmap(make("bare", 7, 3, 140))


@pytest.mark.parametrize("make", [forward, backward])
@pytest.mark.parametrize("cut", ["t", "v", "tv"])
def test_tokens_and_vocabulary_may_lie_over_devices(make: Any, cut: str) -> None:
    case = make("all", 14, 3, 280)
    op: Any = case.op
    mesh = Mesh(np.array(jax.devices()[: 2 ** len(cut)]).reshape((2,) * len(cut)), tuple(cut))
    axes = {c: (c,) for c in cut}

    def specs(arrays: Any) -> Any:
        return tuple(PartitionSpec(*(c if c in cut else None for c in dims)) for dims in arrays)

    def part(*args: Any) -> Any:
        outs = enumerate(apply(on_parts(op, axes), *args))
        return tuple(jax.lax.psum(x, terms) if (terms := terms_of(op, n, axes)) else x for n, x in outs)

    laid = {"in_specs": specs(op.operands), "out_specs": specs(op.results)}
    region: Any = jax.shard_map(part, mesh=mesh, check_vma=False, **laid)
    close(jax.jit(region)(*case.args), plain(op)(*case.args), case.tolerance)


def test_tokens_may_have_several_dimensions_or_none() -> None:
    x, w, labels = operands(Form(), 12, 3, 140)
    loss = functools.partial(cross_entropy, Form())
    want, back = jax.vjp(lambda x, w: loss(x, w, labels)[0], x, w)
    shaped = labels.reshape(2, 2, 3)
    got, ours = jax.vjp(lambda x, w: loss(x, w, shaped)[0], x.reshape(2, 2, 3, 3), w)
    close([got.reshape(12)], [want], 1e-6)
    (dx, dw), (wx, ww) = ours(jnp.ones((2, 2, 3))), back(jnp.ones(12))
    close([dx.reshape(12, 3), dw], [wx, ww], 1e-6)
    close([loss(x[1], w, labels[1])[0]], [want[1]], 1e-6)


@pytest.mark.parametrize("label", [-100, -1, 140, 200, 1000])
def test_a_label_of_no_class_picks_nothing(label: int) -> None:
    x, w, labels = operands(Form(), 7, 3, 140)
    op = CrossEntropy(Form(), blocks=SMALL, interpret=True)
    for run in (op.kernel, op.plain):
        loss, lse = run(x, w, jnp.full_like(labels, label))
        np.testing.assert_array_equal(loss, lse)


@pytest.mark.parametrize("form", FORMS)
def test_the_plain_form_is_log_softmax_at_the_label_and_its_derivative(form: str) -> None:
    f = FORMS[form]
    x, w, labels, *bias = operands(f, 7, 3, 11)

    def spelled(x: Any, w: Any, *bias: Any) -> Any:
        z = f.scale * (x @ (w.T if f.transposed else w)) + (bias[0] if bias else 0.0)
        z = f.cap * jnp.tanh(z / f.cap) if f.cap else z
        wanted = jax.nn.one_hot(labels, 11) * (1 - f.smoothing) + f.smoothing / 11
        return jax.nn.logsumexp(z, -1) - (wanted * z).sum(-1), jax.nn.logsumexp(z, -1)

    want, back = jax.vjp(spelled, x, w, *bias)
    got, ours = jax.vjp(lambda x, w, *b: cross_entropy(f, x, w, labels, *b), x, w, *bias)
    close([*got, *ours(tuple(douts(7)))], [*want, *back(tuple(douts(7)))], TOLERANCE["float32"])


def test_weights_in_float32_are_multiplied_narrow_and_their_gradient_is_not_rounded() -> None:
    x, w, labels = operands(Form(), 19, 5, 140, "bfloat16")
    wide = w.astype(jnp.float32)
    made = jax.grad(lambda w: cross_entropy(Form(), x, w, labels, blocks=SMALL, interpret=True)[0].sum())(
        wide
    )
    lse = plain(CrossEntropy(Form()))(x, w, labels)[1]
    narrow = plain(CrossEntropyGradient(Form()))(x, w, labels, lse, jnp.ones(19), jnp.zeros(19))[1]
    assert made.dtype == jnp.float32
    close([made], [narrow], 1e-5)  # a sum of products of bfloat16 numbers, in float32
    assert (np.asarray(made.astype(jnp.bfloat16), np.float32) != np.asarray(made)).any()


def test_logits_that_are_minus_infinity_are_no_class() -> None:
    form = FORMS["smoothed"]
    x, w, labels, bias = operands(dataclasses.replace(form, smoothing=0.0), 7, 3, 140)
    bias = bias.at[jnp.arange(140) >= 128].set(-jnp.inf)
    labels = jnp.clip(labels, 0, 127)
    op = CrossEntropy(Form(bias=True), blocks=SMALL, interpret=True)
    cut = CrossEntropy(Form(bias=True))
    close(op.kernel(x, w, labels, bias), cut.plain(x, w[:, :128], labels, bias[:128]), 2e-6)


@pytest.mark.slow  # the interpreter keeps clocks of two cores for each of the copies
def test_no_two_copies_of_a_block_of_gradients_cross() -> None:
    form, sizes = Form(), Sizes(8, 128, 64 << 20, 2)
    for t in (8, 16, 24):
        x, w, labels = operands(form, t, 5, 600)
        lse = plain(CrossEntropy(form))(x, w, labels)[1]
        watched = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)
        rest = x, w, labels, None, lse, *douts(t)
        got = kernels.backward(form, sizes, watched, *rest, jnp.dtype("float32"))
        want = plain(CrossEntropyGradient(form))(x, w, labels, lse, *douts(t))
        close(got, want, TOLERANCE["float32"])


def test_with_lse_saved_the_forward_kernel_does_not_run_again() -> None:
    x, w, labels = operands(Form(), 7, 3, 11)

    def names(policy: Any) -> list[str]:
        loss = jax.checkpoint(lambda x, w: cross_entropy(Form(), x, w, labels)[0].sum(), policy=policy)
        return sorted(ops(jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, w).jaxpr))

    saved = jax.checkpoint_policies.save_only_these_names(LSE)
    assert names(saved) == ["cross_entropy", "cross_entropy_gradient"]
    assert names(None) == ["cross_entropy", "cross_entropy", "cross_entropy_gradient"]


def ops(jaxpr: Any) -> list[str]:
    """The names of the operations of a program, at any depth, after what is not needed has been taken out."""
    found: list[str] = []
    for eqn in jaxpr.eqns:
        assert isinstance(eqn, JaxprEqn)
        op = operation_of(eqn)
        if op is not None:
            found.append(op.name)
            continue
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                found += ops(inner)
    return found


def test_dtypes_that_do_not_go_together_are_refused() -> None:
    x, w, _ = operands(Form(), 7, 3, 11, "bfloat16")
    assert refused(x, w) == "" == refused(x, w.astype(jnp.float32))
    assert "float16" in refused(x.astype(jnp.float16), w.astype(jnp.float16))
    assert "weights bfloat16" in refused(x.astype(jnp.float32), w)


def test_blocks_that_do_not_fit_are_an_error_and_those_of_the_table_are_made_to_fit() -> None:
    with pytest.raises(
        PlanError, match=r"blocks of 4096 tokens.*a kernel on v5e may have 94: make them smaller"
    ):
        sizes_of("v5e", "backward", 8192, 4096, 32000, 2, Blocks(back_t=4096))
    with pytest.raises(PlanError, match="multiples of 128"):
        sizes_of("v5e", "backward", 8192, 4096, 32000, 2, Blocks(back_t=100))
    for chip, row in CHIPS.items():
        for way in ("forward", "backward"):
            for d in (100, 4096, 8192):
                for size in (2, 4):
                    assert sizes_of(chip, way, 4096, d, 151936, size, Blocks()).vmem <= row.vmem


def test_it_pays_against_chunks_and_against_whole_logits_where_vectors_are_short() -> None:
    assert pays("v5e", 4096, 4096, 32000) and not pays("v5e", 4096, 4096, 32000, against="plain")
    assert pays("v5e", 4096, 1024, 32000, against="plain")
    assert not pays("v5e", 4096, 65536, 32000), "no block of such vectors fits"
    short = sizes_of("v5e", "forward", 16, 4096, 32000, 2, Blocks())
    assert moved("forward", short, 16, 4096, 32000) == 2 * 4096 * (16 + 32000)


@pytest.mark.slow  # libtpu compiles both kernels of four forms
@pytest.mark.parametrize("chip", SLICES)
def test_mosaic_compiles_forward_and_backward(chip: str) -> None:
    for form, dtype, (t, d, v) in (
        ("bare", "bfloat16", (256, 256, 1280)),
        ("all", "bfloat16", (37, 100, 300)),
        ("smoothed", "float32", (300, 100, 3000)),
        ("tied", "float32", (37, 256, 100)),
    ):

        def both(*args: Any, form: Form = FORMS[form]) -> Any:
            x, w, labels, *bias = args
            outs, back = jax.vjp(
                lambda x, w, *b: cross_entropy(form, x, w, labels, *b, chip=chip), x, w, *bias
            )
            return *outs, *back(outs)

        _, count = compiled(chip, both, operands(FORMS[form], t, d, v, dtype), PartitionSpec())
        assert count == 2


# ---------------------------------------------------------------- in a step on several devices


def step(params: Any, batch: Any) -> Any:
    """Loss and gradients of a small language model; labels of -100 are padding, and tokens have weights."""

    def loss(params: Any) -> Any:
        x = params["table"][batch["tokens"]]
        x = x + jnp.tanh(x @ params["up"]) @ params["down"]
        logits = (x @ params["head"]).astype(jnp.float32)
        padding = batch["labels"] == -100
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits, jnp.where(padding, 0, batch["labels"])
        )
        weights = jnp.where(padding, 0.0, batch["weights"])
        return jnp.sum(losses * weights) / jnp.sum(weights)

    return jax.value_and_grad(loss)(params)


def arguments() -> Any:
    random = np.random.RandomState(0)
    sizes = {"table": (256, 8), "up": (8, 24), "down": (24, 8), "head": (8, 256)}
    params = {name: random.randn(*shape).astype(np.float32) for name, shape in sizes.items()}
    tokens = random.randint(0, 256, (16, 33))
    labels = np.where(random.rand(16, 32) < 0.2, -100, tokens[:, 1:])
    labels[0] = -100  # a text of padding alone
    return params, {"tokens": tokens[:, :-1], "labels": labels, "weights": random.rand(16, 32)}


def test_terms_of_a_gradient_come_in_the_dtype_they_are_summed_in() -> None:
    params, batch = arguments()
    params = {name: x.astype(jnp.bfloat16) for name, x in params.items()}
    passes = [
        Shard(collectives="explicit", gradient_dtype="float32"),
        Kernels(only=["cross_entropy"], interpret=True),
    ]
    program = parallelize(step, Plan({"fsdp": 8}, passes)).trace(params, batch)
    eqns = [eqn for eqn in equations(program.jaxpr) if operation_of(eqn) is not None]
    assert [str(v.aval.dtype) for v in eqns[-1].outvars] == ["bfloat16", "float32"]
    assert program.jaxpr.outvars[2].aval.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("mesh", "tokens", "vocab", "collectives"),
    [
        ({"fsdp": 8}, 8, 1, "auto"),
        ({"data": 2, "fsdp": 4}, 8, 1, "explicit"),
        ({"fsdp": 4, "tensor": 2}, 4, 2, "explicit"),
        ({"fsdp": 4, "tensor": 2}, 4, 2, "auto"),
    ],
    ids=str,
)
def test_a_step_on_several_devices_agrees_with_one(
    mesh: dict[str, int], tokens: int, vocab: int, collectives: Any
) -> None:
    args = arguments()
    plan = Plan(mesh, [Shard(collectives=collectives), Kernels(only=["cross_entropy"], interpret=True)])
    run = parallelize(step, plan)
    program = run.trace(*args)
    found = {op.name: eqn for eqn in equations(program.jaxpr) if (op := operation_of(eqn)) is not None}
    assert sorted(found) == ["cross_entropy", "cross_entropy_gradient"]
    for eqn in found.values():
        shapes = [v.aval.shape for v in eqn.invars]
        assert shapes[:3] == [(16 // tokens, 32, 8), (8, 256 // vocab), (16 // tokens, 32)]
    scattered = [e for e in equations(program.jaxpr) if e.primitive.name == "reduce_scatter"]
    assert (8 // mesh["fsdp"], 256 // vocab) in [e.outvars[0].aval.shape for e in scattered]
    want, got = jax.jit(step)(*args), run(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6 * float(np.abs(b).max()), rtol=2e-5)
