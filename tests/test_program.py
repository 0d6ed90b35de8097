"""The state under a plan that stacks layers: in, out and through the step, and the model's own tree again."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from xform import Plan, Shard, parallelize
from xform.passes.roll import Roll
from xform.state import Placed

LAYERS, EMBED, MLP, BATCH, LENGTH, VOCAB = 3, 16, 40, 8, 6, 24
ROLL = Plan({}, [Roll()])
SHARDED = Plan({"fsdp": 4, "tensor": 2}, [Roll(), Shard()])


def init(key):
    keys = jax.random.split(key, LAYERS + 1)

    def layer(key):
        up, down = jax.random.split(key)
        return {
            "scale": jnp.ones(EMBED),
            "up": jax.random.normal(up, (EMBED, MLP)) * EMBED**-0.5,
            "down": jax.random.normal(down, (MLP, EMBED)) * MLP**-0.5,
        }

    params = {
        "table": jax.random.normal(keys[-1], (VOCAB, EMBED)),
        "layers": [layer(key) for key in keys[:-1]],
    }
    zeros = jax.tree.map(jnp.zeros_like, params)
    return {"params": params, "mu": zeros, "count": jnp.zeros((), jnp.int32)}


def loss(params, batch):
    x = params["table"][batch["tokens"]]
    for layer in params["layers"]:
        normed = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * layer["scale"]
        x = x + jax.nn.silu(normed @ layer["up"]) @ layer["down"]
    logits = x @ params["table"].T
    losses = (
        jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
    )
    return losses.mean()


def train(state, batch):
    value, grads = jax.value_and_grad(loss)(state["params"], batch)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g / jnp.maximum(norm, 1.0), grads)
    mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mu"], grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], mu)
    return {"params": params, "mu": mu, "count": state["count"] + 1}, {"loss": value, "norm": norm}


def arguments():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (2, BATCH, LENGTH), dtype=np.int32)
    return init(jax.random.key(0)), {"tokens": tokens[0], "targets": tokens[1]}


def same(a, b, tolerance=0.0):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), a, b)


@pytest.mark.parametrize("plan", [ROLL, SHARDED], ids=["one", "sharded"])
def test_place_and_unplace_are_exact_and_each_others_inverse(plan):
    state, batch = arguments()
    step = parallelize(train, plan)
    placed, _ = step.place(state, batch)
    assert isinstance(placed, Placed)
    same(step.unplace(placed), state)
    same(step.unplace(step.place(placed)), state)
    shapes = {path: x.shape for path, x in zip(placed.layout.paths, placed.arrays, strict=True)}
    assert shapes["['mu']['layers'][*]['up']"] == (LAYERS, EMBED, MLP)
    assert shapes["['count']"] == ()


@pytest.mark.parametrize("plan", [ROLL, SHARDED], ids=["one", "sharded"])
def test_steps_on_the_stored_state_are_the_original_s_and_compile_once(plan):
    state, batch = arguments()
    step = parallelize(train, plan, donate_argnums=0)
    placed, there = step.place(jax.tree.map(jnp.copy, state), batch)
    for _ in range(3):
        placed, metrics = step(placed, there)
        state, expected = jax.jit(train)(state, batch)
    same(metrics, expected, 1e-5)
    same(step.unplace(placed), state, 1e-5)
    assert step._jit._cache_size() == 1


def test_a_state_born_placed_is_the_one_that_is_placed():
    state, batch = arguments()
    step = parallelize(train, SHARDED)
    step.trace(state, batch)
    born = step.init(init, jax.random.key(0))
    placed = step.place(state)
    assert born.layout == placed.layout
    assert [x.sharding for x in born.arrays] == [x.sharding for x in placed.arrays]
    same(born, placed, 1e-6)


def test_unplaced_layers_lie_as_their_stack_does_without_its_dimension():
    state, batch = arguments()
    step = parallelize(train, SHARDED)
    placed, _ = step.place(state, batch)
    specs = {p: x.sharding.spec for p, x in zip(placed.layout.paths, placed.arrays, strict=True)}
    assert specs["['params']['layers'][*]['up']"] == P(None, "fsdp", "tensor")
    assert step.unplace(placed)["params"]["layers"][1]["up"].sharding.spec == P("fsdp", "tensor")


def test_a_state_in_the_model_s_own_tree_is_taken_and_given_back_as_such_with_a_word():
    state, batch = arguments()
    step = parallelize(train, ROLL)
    with pytest.warns(UserWarning, match=r"train: 18 arrays come in the model's own tree.*\.place"):
        result, metrics = step(state, batch)
    same((result, metrics), jax.jit(train)(state, batch), 1e-5)


def test_gradients_by_placed_parameters_are_placed():
    state, batch = arguments()
    step = parallelize(jax.value_and_grad(loss), ROLL)
    params, there = step.place(state["params"], batch)
    value, grads = step(params, there)
    assert isinstance(grads, Placed)
    assert grads.layout == params.layout
    same((value, step.unplace(grads)), jax.jit(jax.value_and_grad(loss))(state["params"], batch), 1e-5)


def test_each_argument_has_a_layout_of_its_own():
    def two(params, mu, batch):
        state, metrics = train({"params": params, "mu": mu, "count": 0}, batch)
        return state["params"], state["mu"], metrics

    state, batch = arguments()
    step = parallelize(two, ROLL)
    params, mu, there = step.place(state["params"], state["mu"], batch)
    assert isinstance(params, Placed)
    assert isinstance(mu, Placed)
    got = step(params, mu, there)
    same(step.unplace(*got), jax.jit(two)(state["params"], state["mu"], batch), 1e-5)


def test_nothing_is_stacked_or_taken_apart_inside_the_compiled_step():
    state, batch = arguments()
    step = parallelize(train, ROLL, donate_argnums=0)
    lowered = step.lower(state, batch)
    assert not re.search(r"\b(stack|unstack|concatenate)\b", str(lowered.program.jaxpr))
    text = lowered.compile().as_text()
    layer = MLP * EMBED
    shapes = re.findall(r"= f32\[([\d,]*)\]\S* (?:slice|concatenate)\(", text)
    assert all(np.prod([int(n) for n in shape.split(",") if n]) < layer for shape in shapes)
    assert "input_output_alias" in text
    assert "state: stored 18 arrays of the state as 6" in lowered.report()


def test_names_for_axes_are_those_of_the_model_s_own_tree():
    state, batch = arguments()
    names = {"narrow": "[0]['params']['layers'][1]['up'][1]"}
    plan = Plan({"tensor": 8}, [Roll(), Shard(rules={"narrow": ["tensor"]})], axes=names)
    step = parallelize(train, plan)
    placed, _ = step.place(state, batch)
    specs = {p: x.sharding.spec for p, x in zip(placed.layout.paths, placed.arrays, strict=True)}
    assert specs["['params']['layers'][*]['up']"] == P(None, None, "tensor")


def test_a_plan_that_rolls_nothing_new_leaves_the_state_as_it_is():
    def scanned(state, batch):
        def objective(params, batch):
            def body(x, layer):
                normed = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * layer["scale"]
                return x + jax.nn.silu(normed @ layer["up"]) @ layer["down"], None

            x, _ = jax.lax.scan(body, params["table"][batch["tokens"]], params["layers"])
            return (x @ params["table"].T).mean()

        grads = jax.grad(objective)(state["params"], batch)
        return jax.tree.map(lambda p, g: p - g, state["params"], grads)

    state, batch = arguments()
    layers = jax.tree.map(lambda *xs: jnp.stack(xs), *state["params"]["layers"])
    state = {"params": state["params"] | {"layers": layers}}
    placed, _ = parallelize(scanned, ROLL).place(state, batch)
    assert not isinstance(placed, Placed)


def test_without_a_warning_from_beginning_to_end():
    state, batch = arguments()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = parallelize(train, ROLL, donate_argnums=0)
        state, batch = step.place(state, batch)
        for _ in range(2):
            state, _ = step(state, batch)
