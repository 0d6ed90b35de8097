"""DeepSeek: latent attention and its router against their definitions, and its published size."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from xform import check, plans, raised
from xform.models import deepseek

ODD = deepseek.Config(29, 3, 11, 3, 9, 5, 4, 7, 13, 6, 6, 2, 2, dtype="float32", remat=False)
TOLERANCE = 1e-5  # float32, sums in another order


def built(module: Any, config: deepseek.Config) -> Any:
    return module(config, nnx.Rngs(3))


def drawn(*shape: int) -> np.ndarray:
    return np.float32(np.random.default_rng(0).normal(size=shape))


def close(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE * np.abs(wanted).max())


def test_latent_attention_is_attention_with_keys_and_values_made_of_latents() -> None:
    x, layer = drawn(2, 5, 11), built(deepseek.Attention, ODD)
    rotation = deepseek.llama.rotation_at(jnp.arange(5)[None], ODD.rotated, 100.0)
    kept = layer.kept(x, rotation)
    both = np.einsum("bsr,rhd->bshd", kept["latent"], layer.both.kernel[...])
    shared = np.broadcast_to(kept["key"][:, :, None], (2, 5, ODD.heads, ODD.rotated))
    key, value = np.concatenate([both[..., : ODD.plain], shared], -1), both[..., ODD.plain :]
    query = np.array(layer.query(x))
    query[..., ODD.plain :] = deepseek.rotate(query[..., ODD.plain :], rotation)
    mask = np.tril(np.ones((5, 5), bool))
    mixed = jax.nn.dot_product_attention(query, key, np.pad(value, ((0, 0),) * 3 + ((0, 2),)), mask=mask)
    close(layer(x, rotation, mask), layer.out(mixed[..., : ODD.value]))


ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax of groups": {"groups": 3, "top_groups": 1},
    "sigmoid": {"scores": "sigmoid", "norm": True, "scale": 2.5},
    "sigmoid of groups with a bias": {
        **{"scores": "sigmoid", "norm": True, "scale": 2.5},
        **{"groups": 3, "top_groups": 2, "bias": True},
    },
}


@pytest.mark.parametrize("name", ROUTERS)
def test_routers(name: str) -> None:
    config = dataclasses.replace(ODD, **ROUTERS[name])
    x, layer = drawn(2, 7, 11), built(deepseek.Experts, config)
    bias = np.zeros(6)
    if config.bias:
        bias = np.linspace(-0.4, 0.4, 6)[::-1]
        layer.bias[...] = jnp.asarray(bias, jnp.float32)
    weights, numbers = (np.asarray(each) for each in layer.chosen(x))
    logits = np.float64(x) @ np.float64(layer.router.kernel[...])
    scores = 1 / (1 + np.exp(-logits)) if config.scores == "sigmoid" else np.asarray(jax.nn.softmax(logits))
    for where in np.ndindex(2, 7):
        mine, size = scores[where] + bias, 6 // config.groups
        groups = np.sort(mine.reshape(config.groups, size), 1)[:, -2 if config.bias else -1 :].sum(1)
        best = np.argsort(-groups)[: config.top_groups]
        allowed = [n for n in range(6) if config.groups == 1 or n // size in best]
        wanted = sorted(allowed, key=lambda n: -mine[n])[: config.top]
        assert list(numbers[where]) == wanted
        each = scores[where][wanted]
        close(weights[where], (each / each.sum() if config.norm else each) * config.scale)


def test_experts_beside_those_that_all_tokens_go_to() -> None:
    x, layer = drawn(2, 3, 11), built(deepseek.Experts, ODD)
    weights, numbers = layer.chosen(x)
    wanted = np.array(layer.shared(x))
    for where in np.ndindex(2, 3):
        for weight, n in zip(weights[where], numbers[where], strict=True):
            hidden = jax.nn.silu(x[where] @ layer.gate[n]) * (x[where] @ layer.up[n])
            wanted[where] += weight * (hidden @ layer.down[n])
    close(layer(x), wanted)


@pytest.mark.parametrize("scan", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_decoding_gives_the_logits_of_the_whole_text(scan: bool) -> None:
    options = {"size": ODD, "batch": 3, "length": 7, "scan": scan, "abstract": False}
    fn, (params, batch) = deepseek.forward(**options)
    step, (_, cache, _, _) = deepseek.decode_step(**options)
    wanted, step = jax.jit(fn)(params, batch), jax.jit(step)
    for i in range(7):
        logits, cache = step(params, cache, batch["inputs"][:, i], jnp.int32(i))
        close(logits, wanted[:, i])


def test_published_size() -> None:
    _, (params, _) = deepseek.loss(size="v2-lite-16b")
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(params)) == 15_706_484_224


def test_its_experts_are_recognised() -> None:
    fn, args = deepseek.forward(size="tiny", batch=2, length=24)
    found = [entry for entry in raised(fn, *args)["raised"] if entry["op"] == "experts"]
    assert [(entry["style"], entry["experts"]) for entry in found] == [("ragged_dot", 4)]


@pytest.mark.slow  # compiles gradients for one and for eight devices
def test_it_trains_on_a_mesh_as_on_one_device() -> None:
    fn, args = deepseek.loss(size="tiny", batch=8, length=16)
    result = check(fn, args, plans.fsdp_tensor(4, 2))
    assert result.ok, str(result)
