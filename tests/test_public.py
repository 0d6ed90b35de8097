"""The public models run as they are, quietly, and their losses have gradients."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import public

every_model = pytest.mark.parametrize("name", public.PUBLIC)


@pytest.mark.slow  # compiles the gradients of a real model
@every_model
def test_a_public_model_has_a_finite_loss_and_a_gradient_for_every_weight(name: str) -> None:
    _, (params, _) = public.PUBLIC[name]()
    value, (gradients, _) = public.gradients(name)
    assert value.shape == () and value.dtype == jnp.float32
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    assert jax.tree.map(jnp.shape, gradients) == jax.tree.map(jnp.shape, params)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((value, gradients)))
    leaves = jax.tree_util.tree_leaves_with_path(gradients)
    still = {jax.tree_util.keystr(path) for path, x in leaves if not np.any(x)}
    # Whisper keeps its encoder's sinusoids constant.
    assert still == ({"['model']['encoder']['embed_positions']['embedding']"} if name == "whisper" else set())


@pytest.mark.slow  # compiles a training step of a real model
@pytest.mark.parametrize("name", ["gpt2", "vit"])
def test_a_training_step_takes_the_loss_down(name: str) -> None:
    """The step is made the same way for all: of a model of texts, and of one of images."""
    step, (state, batch) = getattr(public, f"{name}_train_step")(layers=1)
    step = jax.jit(step, donate_argnums=0)
    losses = []
    for _ in range(4):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]


@pytest.mark.parametrize("name", [name for name in public.PUBLIC if name != "vit"])
def test_what_is_masked_has_no_part_in_the_loss(name: str) -> None:
    loss, (params, batch) = getattr(public, name)(layers=1)
    key = "decoder_input_ids" if "decoder_input_ids" in batch else "input_ids"
    changed = batch[key].at[-1, -1].add(1)
    loss = jax.jit(loss)
    np.testing.assert_allclose(loss(params, batch | {key: changed}), loss(params, batch), rtol=1e-6)


@every_model
def test_sizes_are_options(name: str) -> None:
    sizes = {"batch": 3, "length": 9, "source": 11, "embed": 24, "heads": 6, "kv_heads": 2, "mlp": 56}
    predict, (params, batch) = public.logits(name, **sizes, vocab=40, layers=1)
    shape = (3, 40) if name == "vit" else (3, 9, 40)
    assert jax.eval_shape(predict, params, batch).shape == shape
    _, (other, again) = public.loss(name, **sizes, vocab=40, layers=1, seed=2)
    assert not any(np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, (params, other)), strict=True))
    assert not np.array_equal(batch["targets"], again["targets"])


@pytest.mark.parametrize("name", ["gpt2", "bloom", "bert", "t5", "vit", "whisper"])
def test_dropout_depends_on_the_key_in_the_batch(name: str) -> None:
    loss, (params, batch) = public.PUBLIC[name](dropout=0.3, layers=1)
    run = jax.jit(loss)
    value = run(params, batch)
    assert value == run(params, batch)
    assert abs(value - run(params, batch | {"key": jax.random.key(7)})) > 1e-4


@pytest.mark.slow  # compiles the gradients of a real model
def test_gradients_with_dropout_are_finite() -> None:
    loss, args = public.gpt2(dropout=0.3, layers=1)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.jit(jax.grad(loss))(*args)))


@pytest.mark.slow  # starts a process that imports jax and transformers
def test_nothing_is_printed_and_transformers_is_imported_late() -> None:
    program = (
        "import sys; from tests import public; assert 'transformers' not in sys.modules;"
        "public.gpt2(layers=1); assert 'transformers' in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
