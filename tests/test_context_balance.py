"""Context: texts in an order in which all devices have as much to do, and what follows them into it."""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.test_context import (
    AT,
    CAUSAL,
    MESH,
    PARAMS,
    RNG,
    SEGMENTS,
    B,
    E,
    T,
    X,
    attend,
    gradients,
    made,
    mixed,
    planned,
    said,
    same,
    times,
    weights,
)
from xform import ChunkedLoss, Kernels, Pipeline, Plan, PlanError, parallelize
from xform.kernels import balance, ring
from xform.kernels.balance import BALANCES
from xform.models import llama
from xform.ops import Band

BANDS = {
    "causal": Band(right=0),
    "window": Band(right=0, left=6),
    "both ways": Band(right=2, left=3),
    "chunks": Band(right=0, chunk=8),
    "prefix": Band(right=0, prefix=9),
    "moved": Band(right=0, offset=5),
    "full": Band(),
}


@pytest.mark.parametrize("name", BALANCES)
@pytest.mark.parametrize("kind", BANDS)
def test_what_parts_see_of_each_other_is_the_mask(name: str, kind: str) -> None:
    ways, t = 4, 6
    order = np.asarray(balance.order(name, ways * t, ways)).reshape(ways, t)
    for queries in range(ways):
        for keys in range(ways):
            seen = np.zeros((t, t), int)
            for block in balance.blocks(name, BANDS[kind], ways, t, t, queries, keys):
                rows, columns = np.arange(np.diff(block.queries)[0]), np.arange(np.diff(block.keys)[0])
                part = block.band.allowed(rows[:, None], columns)
                seen[slice(*block.queries), slice(*block.keys)] += np.broadcast_to(
                    part, (rows.size, columns.size)
                )
            want = BANDS[kind].allowed(order[queries][:, None], order[keys])
            np.testing.assert_array_equal(seen, np.broadcast_to(want, (t, t)))


@pytest.mark.parametrize("name", ["", *BALANCES])
def test_under_a_causal_mask_devices_have_as_much_to_do(name: str) -> None:
    """Scores that a kernel computes in every hop, where each lasts as long as that of the slowest."""
    ways, t = 4, 32

    def scores(found: balance.Blocks) -> int:
        sizes = [(np.diff(block.queries)[0], np.diff(block.keys)[0], block.band) for block in found]
        return sum(
            int(np.broadcast_to(band.allowed(np.arange(q)[:, None], np.arange(k)), (q, k)).sum())
            for q, k, band in sizes
        )

    table = ring.turns(Band(right=0), ways, t, t, "keys", name)
    assert sum(sum(map(scores, hop)) for hop in table) == 128 * 129 // 2
    lasting = ways * sum(max(map(scores, hop)) for hop in table) / (128 * 129 // 2)
    assert lasting < 1.05 if name else lasting > 1.7


def test_an_order_goes_there_and_back() -> None:
    x = jnp.arange(48).reshape(2, 24)
    for name in BALANCES:
        order = balance.order(name, 24, 4)
        moved = balance.there(x, name, 4, 1)
        np.testing.assert_array_equal(moved, np.asarray(x)[:, order])
        np.testing.assert_array_equal(balance.back(moved, name, 4, 1), x)


@pytest.mark.parametrize(
    "name, strategy, collectives, kinds",
    [
        ("zigzag", "ring", "explicit", ("segments", "window", "capped")),
        ("striped", "ring", "auto", ("segments", "both ways")),
        ("zigzag", "all_gather", "auto", ("segments", "prefix")),
        ("striped", "all_gather", "explicit", ("capped", "full")),
    ],
)
def test_every_mask_is_that_of_one_device(name: Any, strategy: Any, collectives: Any, kinds: Any) -> None:
    params = {kind: PARAMS[kind] for kind in kinds}
    step = parallelize(gradients, planned(collectives=collectives, strategy=strategy, balance=name))
    same(step(params, X, SEGMENTS), jax.jit(gradients)(params, X, SEGMENTS))
    program = step.trace(params, X, SEGMENTS)
    assert times(program, f"8 heads, 4 of keys: {strategy}, {name}") == len(params)
    assert "put texts in the order of their devices" in said(program) and not said(program, "declined")


@pytest.mark.parametrize("name, strategy", [("striped", "all_gather"), ("zigzag", "ring")])
def test_a_kernel_runs_inside(name: Any, strategy: str) -> None:
    params = {"causal": PARAMS["causal"]}
    plan = planned(strategy=strategy, balance=name)
    step = parallelize(gradients, Plan(MESH, [*plan.passes, Kernels(interpret=True, shortest=1)]))
    same(step(params, X, SEGMENTS), jax.jit(gradients)(params, X, SEGMENTS))
    program = step.trace(params, X, SEGMENTS)
    assert times(program, "by a kernel") == times(program, f"{strategy}, {name}") == 1


# ---------------------------------------------------------------- what follows

WORDS = 11
TOKENS = jnp.asarray(RNG.integers(0, WORDS, (B, T)), jnp.int32)
MODEL = jax.tree.map(
    lambda w: 0.3 * w,
    {
        "table": made(WORDS, E),
        "layer": weights()["causal"],
        "layers": jax.tree.map(lambda w: jnp.stack([w, -w]), weights()["causal"]),
        "kernel": made(3, E, E),
    },
)


def turned(x: Any) -> Any:
    """By the number of the token."""
    angle = jnp.arange(T)[:, None] * 0.3
    return x * jnp.cos(angle) + jnp.roll(x, 1, -1) * jnp.sin(angle)


def objective(params: Any, tokens: Any, segments: Any, together: Any = lambda params, x: x) -> Any:
    """Two layers in a loop of packed texts, whose tokens are labels of those before."""
    seen = (CAUSAL & (segments[:, :, None] == segments[:, None]))[:, None]

    def layer(x: Any, w: Mapping[str, Any]) -> Any:
        q, k, v = (jnp.einsum("bte,ehd->bthd", turned(x), w[name]) for name in "qkv")
        return x + jnp.einsum("bthd,hde->bte", attend(q, k, v, seen), w["o"]), None

    x = together(params, params["table"][tokens])
    x = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])[0]
    logits = jax.nn.log_softmax(x @ params["table"].T)
    after = jnp.concatenate([tokens[:, 1:], tokens[:, :1]], 1)
    picked = jnp.take_along_axis(logits, after[..., None], -1)[..., 0]
    return -jnp.mean(jnp.where(jnp.arange(T) < T - 1, picked * (segments < 3), 0.0))


def sent(compiled: Any) -> Counter[tuple[str, str]]:
    """What a program sends: collectives and the types of what they give."""
    kinds = "all-to-all|all-gather|collective-permute|all-reduce|reduce-scatter"
    made = re.finditer(rf"= (\w+\[[\d,]*\])\S* ({kinds})(?:-start)?\(", compiled.as_text())
    return Counter((m[2], m[1]) for m in made)


def test_positions_masks_and_labels_follow_and_tokens_alone_are_moved() -> None:
    step = jax.value_and_grad(objective)
    want = jax.jit(step)(MODEL, TOKENS, SEGMENTS)
    found = {}
    for name in (None, "zigzag"):
        ours = parallelize(step, planned(strategy="ring", balance=name))
        compiled = ours.lower(MODEL, TOKENS, SEGMENTS).compile()
        same(compiled(MODEL, TOKENS, SEGMENTS), want)
        found[name] = sent(compiled)
    more, fewer = found["zigzag"] - found[None], found[None] - found["zigzag"]
    assert {(kind, dtype.split("[")[0]) for kind, dtype in more} == {("all-gather", "s32")}
    assert sum(more.values()) <= 3 and not fewer


MIXING: dict[str, Any] = {
    "convolution": lambda params, x: (
        x
        + jax.lax.conv_general_dilated(
            x, params["kernel"], (1,), [(2, 0)], dimension_numbers=("NWC", "WIO", "NWC")
        )
    ),
    "cumsum": lambda params, x: x + 0.1 * jnp.cumsum(x, 1),
    "shift": lambda params, x: x + jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1],
    "roll": lambda params, x: x + jnp.roll(x, 2, 1),
    "last": lambda params, x: x + x[:, -1:],
    "scan": lambda params, x: (
        x
        + jnp.swapaxes(
            jax.lax.scan(lambda c, row: (0.5 * c + row,) * 2, x[:, 0], jnp.swapaxes(x, 0, 1))[1], 0, 1
        )
    ),
}


def test_what_mixes_neighbours_has_the_text_in_order() -> None:
    def mix(params: Any, tokens: Any, segments: Any) -> Any:
        def together(params: Any, x: Any) -> Any:
            for each in MIXING.values():
                x = 0.3 * each(params, x)
            return x

        return objective(params, tokens, segments, together)

    step = jax.value_and_grad(mix)
    ours = parallelize(step, planned(strategy="all_gather", balance="zigzag"))
    same(ours(MODEL, TOKENS, SEGMENTS), jax.jit(step)(MODEL, TOKENS, SEGMENTS))


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_neighbours_is_told(name: str) -> None:
    """A convolution once is moved there and back, as long as attention sends more."""

    def mix(params: Any, tokens: Any, segments: Any) -> Any:
        return objective(params, tokens, segments, MIXING[name])

    program = parallelize(jax.grad(mix), planned(balance="zigzag")).trace(MODEL, TOKENS, SEGMENTS)
    assert "in order, float32[2,24,5]" in said(program, "declined")


def test_learnt_positions_dropout_and_logits_are_those_of_one_device() -> None:
    """Arrays of the state along the length, random numbers, logits that are cut, and logits as a result."""

    def step(params: Any, moments: Any, tokens: Any) -> Any:
        def loss(params: Any) -> Any:
            x = params["table"][tokens] + params["positions"]
            x = jnp.where(jax.random.bernoulli(jax.random.key(0), 0.9, x.shape), x / 0.9, 0)
            logits = (x + mixed(params["layer"], x, CAUSAL)) @ params["table"].T
            before = jax.nn.log_softmax(logits[:, :-1])
            return -jnp.mean(jnp.take_along_axis(before, tokens[:, 1:, None], -1)), logits

        (value, logits), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradients)
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments, value, logits

    params = {"table": MODEL["table"], "layer": MODEL["layer"], "positions": made(T, E)}
    args = params, jax.tree.map(jnp.zeros_like, params), TOKENS
    ours = parallelize(step, planned(strategy="ring", balance="zigzag"))
    same(ours(*args), jax.jit(step)(*args))
    assert "output float32[2,24,11]" in said(ours.trace(*args))


# ---------------------------------------------------------------- what is declined


def test_more_that_is_moved_than_attention_takes_and_gives_is_declined() -> None:
    def mix(params: Any, tokens: Any, segments: Any) -> Any:
        def together(params: Any, x: Any) -> Any:
            for _ in range(24):
                x = x + 0.1 * jnp.cumsum(x, 1)
            return x

        return objective(params, tokens, segments, together)

    plan = planned(collectives="auto", balance="zigzag")
    program = parallelize(jax.grad(mix), plan).trace(MODEL, TOKENS, SEGMENTS)
    assert "balance = 'zigzag'" in (text := said(program, "declined"))
    assert "bytes of it would be moved" in text
    assert "zigzag" not in said(program)


@pytest.mark.parametrize(
    "kind, length, name, words",
    [
        ("full", T, "zigzag", "no attention sees more keys from later tokens"),
        ("causal", 20, "zigzag", "20 tokens are not 8 pieces"),
        ("causal", 22, "striped", "22 tokens are not 4 pieces"),
        ("chunks", T, "striped", "chunks of 5 are not a multiple of 4"),
    ],
)
def test_what_has_its_own_order_and_why(kind: str, length: int, name: Any, words: str) -> None:
    masks = {"full": None, "causal": CAUSAL, "chunks": CAUSAL & (AT[:, None] // 5 == AT // 5)}
    mask = masks[kind]
    seen = None if mask is None else mask[:length, :length]

    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(jnp.sin(mixed(params["causal"], x, seen)))

    args = weights(), X[:, :length]
    program = parallelize(jax.grad(loss), planned(balance=name)).trace(*args)
    assert f"balance = {name!r}: {words}" in said(program, "declined")
    assert "put texts in the order" not in said(program)


def test_heads_for_length_have_no_balance() -> None:
    with pytest.raises(PlanError, match=r"balance = 'zigzag' with context.strategy = 'ulysses'"):
        parallelize(gradients, planned(strategy="ulysses", balance="zigzag")).trace(PARAMS, X, SEGMENTS)


def test_chunks_of_the_loss_have_their_tokens_in_order() -> None:
    plan = planned(strategy="ring", balance="zigzag")
    step = parallelize(jax.grad(objective), Plan(MESH, [*plan.passes, ChunkedLoss(chunks=3)]))
    program = step.trace(MODEL, TOKENS, SEGMENTS)
    assert "put what `reshape` takes in order, float32[2,24,5]" in said(program, "declined")


def test_texts_in_a_pipeline_keep_their_order() -> None:
    objective, args = llama.loss(batch=4, length=32)
    plan = planned({"stage": 2, "context": 4}, balance="zigzag")
    passes = [Pipeline(microbatches=2, schedule="1f1b"), *plan.passes]
    program = parallelize(jax.grad(objective), Plan({"stage": 2, "context": 4}, passes)).trace(*args)
    assert "in the stages of a pipeline keep their own order" in said(program, "declined")
