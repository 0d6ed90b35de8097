"""ChunkedLoss: every spelling of a loss, values and gradients, no logits left whole, what it declines."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import public
from xform import ChunkedLoss, Plan, PlanError, Remat, Shard, check, parallelize
from xform.higher_order import equations
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


def agrees(fn: Callable, args: Any, *passes: Any, tolerance: float = 1e-5) -> Any:
    """In float32; sums over chunks are taken in another order."""
    step = parallelize(fn, Plan({}, passes or [ChunkedLoss(CHUNKS)]))
    wanted, found = jax.jit(fn)(*args), step(*args)
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


@pytest.mark.parametrize("head", HEADS, ids=lambda f: f.__name__)
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


@pytest.mark.parametrize(
    ("chunks", "says"),
    [(1, "chunkedloss.chunks = 1: at least 2"), (5, "does not divide the length of 8 (2, 4, 8)")],
)
def test_a_wrong_number_of_chunks_says_what_would_work(chunks: int, says: str) -> None:
    with pytest.raises(PlanError) as error:
        rewritten(model(plain, integer_labels), arguments(), ChunkedLoss(chunks))
    assert says in str(error.value)


# ---------------------------------------------------------------- models, and other passes around it


@pytest.mark.slow  # compiles the models' gradients twice
@pytest.mark.parametrize("module", [llama, gpt2, encoder_decoder], ids=lambda m: m.__name__)
def test_the_models_losses_and_gradients_stay(module: Any) -> None:
    fn, args = module.loss(size="tiny", layers=1, batch=2, length=16, abstract=False)
    program = agrees(jax.value_and_grad(fn), args)
    assert "go through 4 chunks of the length" in str(program.report)


@pytest.mark.slow  # initialises public models and compiles each twice
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_public_models_losses_and_gradients_stay(name: str) -> None:
    fn, args = public.loss(name)
    program = agrees(jax.value_and_grad(fn), args, ChunkedLoss(2), tolerance=1e-4)
    assert "go through 2 chunks of the length" in str(program.report)


@pytest.mark.slow  # compiles a training step for one device and for eight
@pytest.mark.parametrize("mesh", [{"fsdp": 4, "tensor": 2}, {"fsdp": 8}])
def test_under_shard_with_a_split_vocabulary_and_remat_the_numbers_stay(mesh: dict[str, int]) -> None:
    fn, args = llama.train_step(size="tiny", batch=8, length=16, abstract=False)
    plan = Plan(mesh, [ChunkedLoss(CHUNKS), Remat("minimal"), Shard()])
    result = check(fn, args, plan)
    assert result.ok, str(result)
