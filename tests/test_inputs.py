"""Parameters, optimizer state and data are told apart by the dataflow."""

import jax
import jax.numpy as jnp
import optax
import pytest

from xform.axes import find_axes
from xform.models import llama
from xform.roles import find_roles
from xform.roles.inputs import kinds


def kinds_of(fn, *args):
    jaxpr = jax.make_jaxpr(fn)(*args)
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_flatten_with_path(args)[0]]
    return dict(zip(paths, kinds(jaxpr, find_roles(find_axes(jaxpr), None, paths)), strict=True))


@pytest.mark.parametrize("scan", [True, False])
def test_adamws_moments_and_counts_are_the_optimizers(scan):
    fn, args = llama.train_step(size="tiny", layers=2, scan=scan)
    for path, kind in kinds_of(fn, *args).items():
        wanted = "data" if path.startswith("[1]") else "parameter" if ".params" in path else "optimizer"
        assert kind == wanted, path


def test_a_loss_has_parameters_and_data_only():
    fn, args = llama.loss(size="tiny", layers=2)
    assert set(kinds_of(fn, *args).values()) == {"parameter", "data"}


def small_step(optimizer):
    def loss(params, tokens):
        x = params["table"][tokens]
        return jnp.square(jnp.tanh(x @ params["w"]) @ params["table"].T).mean()

    def step(params, state, tokens):
        updates, state = optimizer.update(jax.grad(loss)(params, tokens), state, params)
        return optax.apply_updates(params, updates), state

    params = {"table": jnp.ones((56, 24)), "w": jnp.ones((24, 24))}
    return step, params, optimizer.init(params)


OPTIMIZERS = {
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "lion": optax.lion(1e-3),
    "nesterov": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam with bfloat16 means": optax.adam(1e-2, mu_dtype=jnp.bfloat16),
    "average of updates": optax.chain(optax.adam(1e-2), optax.ema(0.9)),
    "gradients summed over steps": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "skipped when not finite": optax.apply_if_finite(optax.adam(1e-2), 3),
    "lamb": optax.lamb(1e-3),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizers_state_is_its_own(optimizer):
    step, params, state = small_step(OPTIMIZERS[optimizer])
    for path, kind in kinds_of(step, params, state, jnp.zeros((3, 7), jnp.int32)).items():
        assert kind == {"[0]": "parameter", "[1]": "optimizer", "[2]": "data"}[path[:3]], path


def test_an_average_of_parameters_and_master_weights_are_the_optimizers():
    step, params, state = small_step(optax.adam(1e-3))

    def averaged(params, others, tokens):
        half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        new, state = step(half, others["state"], tokens)
        masters = jax.tree.map(lambda m, p: m + p.astype(jnp.float32), others["masters"], new)
        mean = jax.tree.map(lambda e, p: 0.9 * e + 0.1 * p, others["mean"], masters)
        return masters, {"state": state, "masters": masters, "mean": mean}

    others = {"state": state, "masters": params, "mean": params}
    found = kinds_of(averaged, params, others, jnp.zeros((3, 7), jnp.int32))
    assert {kind for path, kind in found.items() if path.startswith("[1]")} == {"optimizer"}
    assert {kind for path, kind in found.items() if path.startswith("[0]")} == {"parameter"}


def test_without_activations_all_inputs_are_parameters():
    found = kinds_of(lambda params: jax.tree.map(jnp.sin, params), {"w": jnp.ones((24, 5)), "b": jnp.ones(5)})
    assert set(found.values()) == {"parameter"}


def test_the_state_of_several_steps_in_one_scan_is_told_apart():
    step, params, state = small_step(optax.adam(1e-3))

    def several(params, state, batches):
        def one(carry, tokens):
            return step(*carry, tokens), None

        return jax.lax.scan(one, (params, state), batches)[0]

    found = kinds_of(several, params, state, jnp.zeros((5, 3, 7), jnp.int32))
    assert {kind for path, kind in found.items() if path.startswith("[0]")} == {"parameter"}
    assert {kind for path, kind in found.items() if path.startswith("[1]")} == {"optimizer"}
    assert found["[2]"] == "data"


def test_a_step_inside_jit_and_cond_is_seen_through():
    step, params, state = small_step(optax.sgd(1e-3, momentum=0.9))

    def maybe(params, state, tokens, ready):
        return jax.lax.cond(ready, jax.jit(step), lambda p, s, t: (p, s), params, state, tokens)

    found = kinds_of(maybe, params, state, jnp.zeros((3, 7), jnp.int32), True)
    assert {kind for path, kind in found.items() if path.startswith("[0]")} == {"parameter"}
    assert {kind for path, kind in found.items() if path.startswith("[1]")} == {"optimizer"}


def test_a_table_of_learnt_positions_is_a_parameter_and_positions_are_data():
    def loss(params, tokens, positions):
        x = params["table"][tokens] + params["positions"] + params["more"][positions]
        scores = jax.nn.softmax(jnp.einsum("ble,bme->blm", x @ params["q"], x @ params["k"]))
        return jnp.square(jnp.einsum("blm,bme->ble", scores, x) @ params["table"].T).mean()

    shapes = {"table": (56, 24), "positions": (7, 24), "more": (9, 24), "q": (24, 5), "k": (24, 5)}
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    found = kinds_of(loss, params, jnp.zeros((3, 7), jnp.int32), jnp.arange(7))
    assert {kind for path, kind in found.items() if path.startswith("[0]")} == {"parameter"}
    assert found["[1]"] == found["[2]"] == "data"
