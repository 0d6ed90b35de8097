"""ChunkedLoss: every spelling of a loss, values and gradients, no logits left whole, what it declines."""

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import ours, public
from xform import Accumulate, ChunkedLoss, Plan, PlanError, Remat, Roll, Shard, check, parallelize
from xform.higher_order import equations
from xform.hlo.costs import costs
from xform.models import encoder_decoder, gpt2, llama
from xform.trace import Jaxpr

BATCH, LENGTH, EMBED, VOCAB = 3, 8, 5, 37
CHUNKS = 4


def arguments(seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    params = {
        "table": jnp.asarray(rng.normal(size=(VOCAB, EMBED)), jnp.float32),
        "mix": jnp.asarray(rng.normal(size=(EMBED, EMBED)), jnp.float32),
        "head": jnp.asarray(rng.normal(size=(EMBED, VOCAB)), jnp.float32),
        "bias": jnp.asarray(rng.normal(size=(VOCAB,)), jnp.float32),
    }
    tokens = jnp.asarray(rng.integers(0, VOCAB, (BATCH, LENGTH)), jnp.int32)
    labels = jnp.asarray(rng.integers(0, VOCAB, (BATCH, LENGTH)), jnp.int32)
    weights = jnp.asarray(rng.uniform(size=(BATCH, LENGTH)) > 0.2, jnp.float32)
    return params, (tokens, labels, weights)


def hidden(p: Any, tokens: Any) -> Any:
    return jnp.tanh(p["table"][tokens] @ p["mix"])


def mean(losses: Any, weights: Any) -> Any:
    return jnp.sum(losses * weights) / jnp.sum(weights)


def rewritten(fn: Callable, args: Any, *passes: Any) -> Any:
    return parallelize(fn, Plan({}, passes or [ChunkedLoss(CHUNKS)])).trace(*args)


def sizes(jaxpr: Jaxpr, inner: int = VOCAB) -> set[int]:
    """How many rows the arrays over the vocabulary have that are larger than a weight."""
    shapes = {v.aval.shape for eqn in equations(jaxpr) for v in eqn.outvars if hasattr(v.aval, "shape")}
    return {int(np.prod(s)) // inner for s in shapes if inner in s and EMBED not in s}


# ---------------------------------------------------------------- spellings


def integer_labels(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def one_hot_labels(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, VOCAB))


def picked(logits: Any, labels: Any) -> Any:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)[..., 0]


def counted(logits: Any, labels: Any) -> Any:
    """Picks by counting positions."""
    i, j = jnp.meshgrid(jnp.arange(BATCH), jnp.arange(LENGTH), indexing="ij")
    return -jax.nn.log_softmax(logits)[i, j, labels]


def by_hand(logits: Any, labels: Any) -> Any:
    shifted = logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    total = jnp.log(jnp.sum(jnp.exp(shifted), -1))
    return total - jnp.take_along_axis(shifted, labels[..., None], -1)[..., 0]


def smoothed(logits: Any, labels: Any) -> Any:
    soft = optax.smooth_labels(jax.nn.one_hot(labels, VOCAB), 0.1)
    return -jnp.sum(soft * jax.nn.log_softmax(logits), -1)


def with_z(logits: Any, labels: Any) -> Any:
    z = jax.nn.logsumexp(logits, -1)
    return z - jnp.sum(jax.nn.one_hot(labels, VOCAB) * logits, -1) + 1e-2 * z**2


def capped(logits: Any, labels: Any) -> Any:
    return integer_labels(3.0 * jnp.tanh(logits / 3.0), labels)


def masked_tail(logits: Any, labels: Any) -> Any:
    """Some of the vocabulary is padding."""
    real = jnp.arange(VOCAB) < VOCAB - 3
    return integer_labels(jnp.where(real, logits, -1e9), jnp.minimum(labels, VOCAB - 4))


def in_jit(logits: Any, labels: Any) -> Any:
    return jax.jit(by_hand)(logits, labels)


def by_vmap(logits: Any, labels: Any) -> Any:
    return jax.vmap(jax.vmap(lambda x, k: jax.nn.logsumexp(x) - x[k]))(logits, labels)


def probabilities(logits: Any, labels: Any) -> Any:
    return -jnp.log(jnp.take_along_axis(jax.nn.softmax(logits), labels[..., None], -1)[..., 0])


LOSSES = [
    integer_labels, one_hot_labels, picked, counted, by_hand, smoothed, with_z, capped, masked_tail, in_jit,
    by_vmap, probabilities,
]  # fmt: skip


def plain(p: Any, x: Any) -> Any:
    return x @ p["head"]


def tied(p: Any, x: Any) -> Any:
    return jnp.einsum("ble,ve->blv", x, p["table"]) / EMBED**0.5


def biased(p: Any, x: Any) -> Any:
    return jax.jit(lambda x, w: x @ w)(x, p["head"]) + p["bias"]


def cast(p: Any, x: Any) -> Any:
    """In bfloat16, as x and the head's weights are cast to it, and back."""
    return (x.astype(jnp.bfloat16) @ p["head"].astype(jnp.bfloat16)).astype(jnp.float32)


HEADS = [plain, tied, biased]


def model(head: Callable, loss: Callable) -> Callable:
    def step(params: Any, batch: Any) -> Any:
        def objective(p: Any) -> Any:
            tokens, labels, weights = batch
            return mean(loss(head(p, hidden(p, tokens)), labels), weights)

        return jax.value_and_grad(objective)(params)

    return step


def agrees(fn: Callable, args: Any, *passes: Any, tolerance: float = 1e-5, wanted: Any = None) -> Any:
    """In float32; sums over chunks are taken in another order."""
    step = parallelize(fn, Plan({}, passes or [ChunkedLoss(CHUNKS)]))
    wanted, found = wanted or jax.jit(fn)(*args), step(*args)
    for x, y in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        assert x.dtype == y.dtype
        scale = max(float(jnp.abs(x).max()), 1e-3)
        np.testing.assert_allclose(np.asarray(x) / scale, np.asarray(y) / scale, atol=tolerance)
    return step.trace(*args)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_every_spelling_of_the_loss_is_chunked_and_gives_the_same_numbers(loss: Callable) -> None:
    program = agrees(model(plain, loss), arguments())
    assert sizes(program.original) and max(sizes(program.original)) == BATCH * LENGTH // CHUNKS
    assert f"go through {CHUNKS} chunks of the length" in str(program.report)


@pytest.mark.parametrize("head", HEADS[1:], ids=lambda f: f.__name__)  # the plain one is that of all losses
def test_every_spelling_of_the_head_is_chunked_and_gives_the_same_numbers(head: Callable) -> None:
    program = agrees(model(head, integer_labels), arguments())
    assert max(sizes(program.original)) == BATCH * LENGTH // CHUNKS


def test_tokens_that_are_one_dimension_are_chunked_together() -> None:
    def step(params: Any, batch: Any) -> Any:
        def objective(p: Any) -> Any:
            tokens, labels, weights = batch
            logits = hidden(p, tokens).reshape(-1, EMBED) @ p["head"]
            return mean(integer_labels(logits, labels.reshape(-1)), weights.reshape(-1))

        return jax.value_and_grad(objective)(params)

    program = agrees(step, arguments())
    assert f"{CHUNKS} chunks of the tokens" in str(program.report)
    assert max(sizes(program.original)) == BATCH * LENGTH // CHUNKS


def test_where_the_length_is_taken_apart_the_batch_is_chunked() -> None:
    def flattened(p: Any, x: Any) -> Any:
        return (x.reshape(-1, EMBED) @ p["head"]).reshape(BATCH, LENGTH, VOCAB)

    program = agrees(model(flattened, integer_labels), arguments(), ChunkedLoss(3))
    assert "3 chunks of the batch" in str(program.report)
    assert max(sizes(program.original)) == LENGTH


def test_logits_are_never_whole_in_the_compiled_program() -> None:
    args = arguments()
    whole = re.compile(rf"\[({BATCH},{LENGTH},{VOCAB}|{BATCH * LENGTH},{VOCAB}|{VOCAB},{BATCH * LENGTH})\]")
    fn = model(plain, smoothed)
    step = parallelize(fn, Plan({}, [ChunkedLoss(CHUNKS)]))
    assert whole.search(jax.jit(fn).lower(*args).compile().as_text())
    assert not whole.search(step.lower(*args).compile().as_text())


def test_metrics_and_sums_over_all_at_once_are_part_of_it() -> None:
    def step(params: Any, batch: Any) -> Any:
        def objective(p: Any) -> Any:
            tokens, labels, weights = batch
            logits = plain(p, hidden(p, tokens))
            hits = (jnp.argmax(logits, -1) == labels) * weights
            entropy = -jnp.mean(jnp.sum(jax.nn.softmax(logits) * jax.nn.log_softmax(logits), -1))
            loss = -jnp.sum(jax.nn.one_hot(labels, VOCAB) * jax.nn.log_softmax(logits)) / labels.size
            return loss, {"accuracy": hits.sum(), "entropy": entropy, "largest": logits.max()}

        return jax.value_and_grad(objective, has_aux=True)(params)

    program = agrees(step, arguments())
    assert max(sizes(program.original)) == BATCH * LENGTH // CHUNKS


def test_two_logits_that_meet_go_through_together() -> None:
    def step(params: Any, teacher: Any, batch: Any) -> Any:
        def objective(p: Any) -> Any:
            tokens, labels, weights = batch
            student = jax.nn.log_softmax(plain(p, hidden(p, tokens)))
            target = jax.nn.log_softmax(tied(teacher, hidden(teacher, tokens)))
            apart = jnp.sum(jnp.exp(target) * (target - student), -1)
            own = -jnp.take_along_axis(student, labels[..., None], -1)[..., 0]
            return mean(own + apart, weights)

        return jax.value_and_grad(objective)(params)

    params, batch = arguments()
    program = agrees(step, (params, arguments(1)[0], batch))
    assert max(sizes(program.original)) == BATCH * LENGTH // CHUNKS


def test_the_gradient_of_a_cast_weight_adds_up_in_the_weights_own_dtype() -> None:
    program = rewritten(model(cast, integer_labels), arguments())
    backward = [eqn for eqn in equations(program.jaxpr) if eqn.primitive.name == "scan"][-1]
    carried = [v.aval.str_short() for v in backward.outvars if v.aval.shape == (EMBED, VOCAB)]
    assert carried == [f"float32[{EMBED},{VOCAB}]"]


def test_a_forward_pass_alone_is_chunked_too() -> None:
    params, (tokens, labels, weights) = arguments()

    def loss(p: Any, tokens: Any) -> Any:
        return mean(integer_labels(plain(p, hidden(p, tokens)), labels), weights)

    program = agrees(loss, (params, tokens))
    assert max(sizes(program.jaxpr)) == BATCH * LENGTH // CHUNKS


# ---------------------------------------------------------------- what is declined, and bad input


def test_logits_that_are_a_result_are_left_whole_and_the_report_says_so() -> None:
    def step(params: Any, batch: Any) -> Any:
        def objective(p: Any) -> Any:
            tokens, labels, weights = batch
            logits = plain(p, hidden(p, tokens))
            return mean(integer_labels(logits, labels), weights), logits

        return jax.value_and_grad(objective, has_aux=True)(params)

    program = rewritten(step, arguments())
    assert "declined the head with logits [3, 8, 37]: its logits" in str(program.report)
    assert "test_chunkedloss.py:" in str(program.report)
    assert max(sizes(program.original)) == BATCH * LENGTH


def test_a_loss_that_mixes_tokens_is_declined_at_the_users_line() -> None:
    def mixing(logits: Any, labels: Any) -> Any:
        return integer_labels(jnp.cumsum(logits, 1) + jnp.cumsum(logits, 0), labels)

    program = rewritten(model(plain, mixing), arguments())
    assert "declined" in str(program.report) and "mixing)" in str(program.report)


def test_a_program_without_a_vocabulary_is_left_alone() -> None:
    def step(w: Any, x: Any) -> Any:
        return jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)

    args = (jnp.ones((5, 3)), jnp.ones((7, 5)))
    assert "no product of activations and a weight gives logits" in str(rewritten(step, args).report)


def at_once(logits: Any, labels: Any) -> Any:
    """Summed over the tokens before anything else is done."""
    return -jnp.sum(jax.nn.one_hot(labels, VOCAB) * jax.nn.log_softmax(logits))


@pytest.mark.parametrize(
    ("chunks", "loss", "says"),
    [
        (1, integer_labels, "chunkedloss.chunks = 1: at least 2"),
        (5, at_once, "does not divide the length of 8, over which the loss sums at once (2, 4, 8 would do)"),
        (9, integer_labels, "does not divide the length of 8, fewer than chunks"),
    ],
)
def test_a_wrong_number_of_chunks_says_what_would_work(chunks: int, loss: Callable, says: str) -> None:
    with pytest.raises(PlanError) as error:
        rewritten(model(plain, loss), arguments(), ChunkedLoss(chunks))
    assert says in str(error.value)


# ---------------------------------------------------------------- any length, and the shift by one


def unit(logits: Any, labels: Any) -> Any:
    """Of logits of length one, which zeros do not have."""
    return integer_labels(5 * logits / jnp.linalg.norm(logits, axis=-1, keepdims=True), labels)


@pytest.mark.parametrize(
    ("loss", "chunks"),
    [(integer_labels, 3), (counted, 5), (unit, 7), (unit, 3)],
    ids=["even", "counted", "one a chunk", "unit"],
)
def test_chunks_that_do_not_divide_the_length_are_filled_up(loss: Callable, chunks: int) -> None:
    program = agrees(model(plain, loss), arguments(), ChunkedLoss(chunks))
    rows = -(-LENGTH // chunks)
    assert f"chunks of the length of 8, filled up to {rows * chunks}" in str(program.report)
    assert max(sizes(program.original)) == BATCH * rows


def dropped(logits: Any, labels: Any) -> Any:
    kept = jax.random.bernoulli(jax.random.key(1), 0.7, logits.shape)
    return integer_labels(jnp.where(kept, logits, -3.0), labels)


@pytest.mark.parametrize("chunks", [4, 5])
def test_chunks_draw_the_random_numbers_of_the_whole_loss(chunks: int) -> None:
    program = agrees(model(plain, dropped), arguments(), ChunkedLoss(chunks))
    assert max(sizes(program.original)) == BATCH * -(-LENGTH // chunks)


def shifted(head: Callable) -> Callable:
    """Each token predicts the next, of logits of all of them."""

    def step(params: Any, batch: Any) -> Any:
        def objective(p: Any) -> Any:
            tokens, _, weights = batch
            logits = head(p, hidden(p, tokens))[:, :-1]
            return mean(integer_labels(logits, tokens[:, 1:]), weights[:, 1:])

        return jax.value_and_grad(objective)(params)

    return step


@pytest.mark.parametrize("head", HEADS, ids=lambda f: f.__name__)
def test_logits_without_the_last_token_are_not_made_for_it(head: Callable) -> None:
    program = agrees(shifted(head), arguments())
    assert "4 chunks of the length of 7, filled up to 8" in str(program.report)
    assert max(sizes(program.original)) == BATCH * 2


# ---------------------------------------------------------------- on a mesh


def laid_out(chunks: int, mesh: dict[str, int], gather: Any, *passes: Any) -> tuple[Any, tuple[Any, ...]]:
    """A step, in bfloat16, whose head's weight lies in parts on the mesh, and its arguments."""
    embed, vocab, batch, length = 8, 36, 8, 12
    rng = np.random.default_rng(0)
    params = {
        "table": jnp.asarray(rng.normal(size=(vocab, embed)), jnp.float32),
        "head": jnp.asarray(rng.normal(size=(embed, vocab)), jnp.float32),
    }
    tokens, labels = jnp.asarray(rng.integers(0, vocab, (2, batch, length)), jnp.int32)

    def step(params: Any, tokens: Any, labels: Any) -> Any:
        def objective(p: Any) -> Any:
            return integer_labels(cast(p, jnp.tanh(p["table"][tokens])), labels).mean()

        value, gradients = jax.value_and_grad(objective)(params)
        return jax.tree.map(lambda p, g: p - g, params, gradients), value

    plan = Plan(mesh, [ChunkedLoss(chunks, gather=gather), Shard(strict=False), *passes])
    devices = jax.devices()[: math.prod(mesh.values())]
    return parallelize(step, plan, devices=devices), (params, tokens, labels)


def traffic(chunks: int, mesh: dict[str, int], gather: Any) -> float:
    step, args = laid_out(chunks, mesh, gather)
    return costs(step.lower(*args).compile().as_text(), mesh).wire_bytes


@pytest.mark.parametrize("mesh", [{"fsdp": 4}, {"data": 2, "fsdp": 2}, {"fsdp": 2, "tensor": 2}], ids=str)
def test_a_weight_is_gathered_and_its_gradient_summed_once_for_all_chunks(mesh: dict[str, int]) -> None:
    step, args = laid_out(4, mesh, "once")
    program = step.trace(*args)
    groups = mesh.get("data", 1) * mesh["fsdp"]
    carried = [
        v.aval.shape for e in equations(program.jaxpr) if e.primitive.name == "scan" for v in e.outvars
    ]
    assert (groups, 8, 36) in carried
    assert "gathers 1 weights and sums 1 gradients over the devices once" in str(program.report)
    if "tensor" not in mesh:  # there the logits' own sums go over the network for every chunk
        assert traffic(2, mesh, "once") == pytest.approx(traffic(6, mesh, "once"), rel=0.02)
    assert traffic(6, mesh, "once") < 0.8 * traffic(6, mesh, "each")


@pytest.mark.parametrize("gather", ["once", "each"])
def test_however_it_is_gathered_the_numbers_are_the_same(gather: str) -> None:
    """In bfloat16: to one rounding of the product."""
    step, args = laid_out(4, {"data": 2, "fsdp": 2}, gather)
    whole, _ = laid_out(4, {}, "each")
    for x, y in zip(jax.tree.leaves(step(*args)), jax.tree.leaves(whole(*args)), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=2**-7)


def test_a_weight_that_takes_more_than_the_chunks_save_is_gathered_for_each() -> None:
    step, args = laid_out(2, {"fsdp": 8}, "auto")
    program = step.trace(*args)
    assert "declined a loop over 2 chunks gathers 1 weights" in str(program.report)
    assert (8, 8, 36) not in [v.aval.shape for e in equations(program.jaxpr) for v in e.outvars]


# ---------------------------------------------------------------- models, and other passes around it


@pytest.mark.slow  # compiles the models' gradients twice
@pytest.mark.parametrize("module", [gpt2, encoder_decoder], ids=lambda m: m.__name__)
def test_the_models_losses_and_gradients_stay(module: Any) -> None:
    fn, args = module.loss(size="tiny", layers=1, batch=2, length=16, abstract=False)
    program = agrees(jax.value_and_grad(fn), args)
    assert "go through 4 chunks of the length" in str(program.report)


@pytest.mark.slow  # initialises public models and compiles each twice
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_public_models_losses_and_gradients_stay(name: str) -> None:
    fn, args = public.loss(name)
    value, (gradients, _) = public.gradients(name)
    graded = jax.value_and_grad(fn)
    program = agrees(graded, args, ChunkedLoss(2), tolerance=1e-4, wanted=(value, gradients))
    assert "go through 2 chunks of the length" in str(program.report)


@pytest.mark.slow  # initialises a public model and compiles it twice
def test_a_public_model_that_predicts_the_next_token() -> None:
    predict, args = public.logits("gpt2")

    def loss(params: Any, batch: Any) -> Any:
        return integer_labels(predict(params, batch)[:, :-1], batch["input_ids"][:, 1:]).mean()

    program = agrees(jax.value_and_grad(loss), args, tolerance=1e-4)
    assert "4 chunks of the length of 19, filled up to 20" in str(program.report)


@pytest.mark.slow  # compiles a training step for one device and for eight
def test_under_shard_with_a_split_vocabulary_and_remat_the_numbers_stay() -> None:
    fn, args = ours.train_step("llama")
    plan = Plan({"fsdp": 4, "tensor": 2}, [ChunkedLoss(CHUNKS), Remat("minimal"), Shard()])
    result = check(fn, args, plan)
    assert result.ok, str(result)


@functools.cache
def unrolled() -> tuple[Callable, Any]:
    fn, args = llama.loss(size="tiny", layers=2, scan=False, batch=4, length=12, abstract=False)
    return jax.value_and_grad(fn), args


@pytest.mark.slow  # compiles the gradients of a model twice
@pytest.mark.parametrize(
    "passes",
    [[Accumulate(steps=2)], [Roll(), Remat("full"), Accumulate(steps=2)]],
    ids=["accumulate", "rolled and accumulated"],
)
def test_with_other_passes_over_the_model_losses_and_gradients_stay(passes: list[Any]) -> None:
    fn, args = unrolled()
    program = agrees(fn, args, ChunkedLoss(5), *passes)
    assert "chunks of the length of 12, filled up to 15" in str(program.report)
    assert "declined" not in str(program.report)


@pytest.mark.slow  # compiles a training step for one device and for eight
def test_weights_gathered_once_in_microbatches_of_a_rolled_model() -> None:
    fn, args = llama.train_step(size="tiny", layers=2, scan=False, batch=16, length=16)
    passes = [Roll(), ChunkedLoss(CHUNKS, gather="once"), Accumulate(steps=2), Shard()]
    plan = Plan({"data": 2, "fsdp": 4}, passes)
    report = str(parallelize(fn, plan).trace(*args).report)
    assert "gathers 1 weights and sums 1 gradients over the devices once" in report
    assert "2 microbatches of 8 rows" in report
    result = check(fn, args, plan)
    assert result.ok, str(result)
