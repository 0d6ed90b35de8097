"""Mixtral: its experts against a loop over tokens, in each way of routing, and its published sizes."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from xform import check, plans, raised
from xform.models import mixtral

ODD = mixtral.Config(29, 2, 11, 15, 5, 14, 13, dtype="float32", remat=False, experts=5, top=2)
TOLERANCE = 1e-5  # float32, sums in another order


def forward(**changes: Any) -> tuple[Any, Any, Any]:
    fn, (params, batch) = mixtral.forward(size=ODD, batch=3, length=7, abstract=False, **changes)
    return jax.jit(fn), params, batch


def one_by_one(x: np.ndarray, weights: dict[str, Any], capacity: float | None) -> np.ndarray:
    """Experts as their definition has them; capacity: None for places for all."""
    router, gate, up, down = (
        np.float64(w) for w in (weights["router"]["kernel"], *(weights[n] for n in ("gate", "up", "down")))
    )
    out = np.zeros_like(x, np.float64)
    places = math.inf if capacity is None else math.ceil(x.shape[1] * ODD.top * capacity / ODD.experts)
    for text, tokens in enumerate(np.float64(x)):
        taken = [0] * ODD.experts
        for turn in range(ODD.top):
            for number, token in enumerate(tokens):
                scores = np.exp(token @ router)
                order = np.argsort(-scores)[: ODD.top]
                expert = order[turn]
                taken[expert] += 1
                if taken[expert] > places:
                    continue
                inner = token @ gate[expert]
                hidden = inner / (1 + np.exp(-inner)) * (token @ up[expert])
                out[text, number] += scores[expert] / scores[order].sum() * (hidden @ down[expert])
    return out


@pytest.mark.parametrize("routing", mixtral.ROUTINGS)
@pytest.mark.parametrize("capacity", [0.6, 2.5])
def test_experts_are_those_that_are_chosen(routing: Any, capacity: float) -> None:
    """With few places some choices find none; with `experts / top` times as many all do."""
    _, params, _ = forward()
    config = dataclasses.replace(ODD, routing=routing, capacity=capacity)
    weights = jax.tree.map(lambda w: w[0], params["layers"]["mlp"])
    x = np.float32(np.random.default_rng(0).normal(size=(3, 7, 11)))
    block = nnx.eval_shape(lambda: mixtral.Experts(config, nnx.Rngs(0)))
    found = nnx.merge(nnx.split(block)[0], weights)(x)
    wanted = one_by_one(x, weights, capacity if routing == "capacity" else None)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE * np.abs(wanted).max())
    if routing == "capacity" and capacity < 1:
        assert np.abs(wanted - one_by_one(x, weights, None)).max() > 0.1


def test_ways_of_routing_give_the_same_logits() -> None:
    fn, params, batch = forward()
    wanted = fn(params, batch)
    dense = forward(routing="dense")[0](params, batch)
    np.testing.assert_allclose(dense, wanted, rtol=0, atol=TOLERANCE * np.abs(wanted).max())


def test_decoding_gives_the_logits_of_the_whole_text() -> None:
    fn, params, batch = forward()
    step, (_, cache, _, _) = mixtral.decode_step(size=ODD, batch=3, length=7, abstract=False)
    wanted, step = fn(params, batch), jax.jit(step)
    for i in range(7):
        logits, cache = step(params, cache, batch["inputs"][:, i], jnp.int32(i))
        np.testing.assert_allclose(logits, wanted[:, i], rtol=0, atol=TOLERANCE * np.abs(wanted).max())


@pytest.mark.parametrize(("size", "count"), [("8x7b", 46_702_792_704), ("8x22b", 140_630_071_296)])
def test_published_sizes(size: str, count: int) -> None:
    _, (params, _) = mixtral.loss(size=size)
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(params)) == count


@pytest.mark.parametrize(
    ("routing", "style"), [("sorted", "ragged_dot"), ("dense", "all"), ("capacity", "one_hot")]
)
def test_its_experts_are_recognised(routing: Any, style: str) -> None:
    fn, args = mixtral.forward(size="tiny", batch=2, length=24, routing=routing)
    (found,) = [entry for entry in raised(fn, *args)["raised"] if entry["op"] == "experts"]
    assert (found["style"], found["experts"], found["axes"]["mlp"]) == (style, 4, 112)


def test_a_routing_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="no routing 'top2'; there are sorted, dense, capacity"):
        mixtral.forward(routing="top2")


@pytest.mark.slow  # compiles gradients for one and for eight devices
def test_it_trains_on_a_mesh_as_on_one_device() -> None:
    fn, args = mixtral.loss(size="tiny", batch=8, length=16)
    result = check(fn, args, plans.fsdp_tensor(4, 2))
    assert result.ok, str(result)
