"""Parameters, optimizer state and data are told apart by the dataflow."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from xform import Plan, parallelize
from xform.axes import find_axes
from xform.models import llama
from xform.passes.shard import Shard
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


GROUPS = jnp.asarray([0, 2, 1])


def squared(x):
    return jnp.square(x).mean()


def scattered(write):
    """The loss of an array of ones into which `write` puts x @ w [batch, 3, 3]."""
    return lambda x, w: squared(write(jnp.ones((8, 5, 3)).at[:, GROUPS], x @ w))


UNENTERED = {
    "inverse": lambda x, w: squared(x @ jnp.linalg.inv(w)),
    "eigenvalues": lambda x, w: squared(x * jnp.linalg.eigvalsh(w + w.T)),
    "linear solve": lambda x, w: squared(
        x * jax.lax.custom_linear_solve(lambda v: w @ v, w[0], lambda f, b: b / 3.0, lambda f, b: b / 3.0)
    ),
    "root": lambda x, w: squared(
        x * jax.lax.custom_root(lambda y: y - w[0], w[1], lambda f, y: y - f(y), lambda g, y: y)
    ),
    "conjugate gradients": lambda x, w: squared(
        x * jax.scipy.sparse.linalg.cg(lambda v: w @ v, w[0], maxiter=2)[0]
    ),
    "largest of groups": lambda x, w: squared(jax.ops.segment_max((x @ w)[:, 0].T, GROUPS, 3)),
    "scatter": scattered(lambda at, u: at.set(u)),
    "scatter-add": scattered(lambda at, u: at.add(u)),
    "scatter-sub": scattered(lambda at, u: at.subtract(u)),
    "scatter-mul": scattered(lambda at, u: at.multiply(u, unique_indices=True)),
    "scatter-min": scattered(lambda at, u: at.min(u)),
    "scatter-max": scattered(lambda at, u: at.max(u)),
}


@pytest.mark.parametrize("name", UNENTERED)
def test_what_goes_into_an_activation_by_a_body_that_no_analysis_entered_is_a_parameter(name):
    def step(params, tokens):
        def loss(params):
            return UNENTERED[name](params["table"][tokens], params["w"])

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    w = jnp.asarray(np.random.default_rng(0).normal(size=(3, 3)), jnp.float32) + 3.0 * jnp.eye(3)
    params, tokens = {"table": jnp.ones((11, 3)).at[2].set(2.0), "w": w}, jnp.arange(24).reshape(8, 3) % 11
    found = kinds_of(step, params, tokens)
    assert set(found.values()) == {"parameter", "data"} and found["[1]"] == "data"
    planned = parallelize(step, Plan(mesh={"data": 8}, passes=[Shard(strict=False)]))(params, tokens)
    for new, wanted in zip(
        jax.tree.leaves(planned), jax.tree.leaves(jax.jit(step)(params, tokens)), strict=True
    ):
        np.testing.assert_allclose(new, wanted, rtol=1e-5, atol=1e-6)  # sums over devices in another order


def test_statistics_whose_inverse_scales_gradients_are_the_optimizers():
    def step(params, statistics, tokens):
        def loss(params):
            return squared(jnp.tanh(params["table"][tokens] @ params["w"]) @ params["table"].T)

        grads = jax.grad(loss)(params)
        scale = jnp.linalg.inv(statistics)
        new = {"table": params["table"] - 0.1 * grads["table"], "w": params["w"] - scale @ grads["w"]}
        return new, 0.9 * statistics + grads["w"] @ grads["w"].T

    params = {"table": jnp.ones((56, 24)), "w": jnp.ones((24, 24))}
    found = kinds_of(step, params, jnp.eye(24), jnp.zeros((3, 7), jnp.int32))
    wanted = {"['table']": "parameter", "['w']": "parameter"}
    assert found == {**{f"[0]{k}": v for k, v in wanted.items()}, "[1]": "optimizer", "[2]": "data"}
