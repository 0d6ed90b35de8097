"""Stacks of layers are found by their dataflow, whatever way they are written; what is none is left alone."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import public
from tests.layers import f, i, picked, told
from tests.loops import (
    KEYS,
    MATRIX,
    attend,
    dropout,
    layer,
    mlp,
    model,
    norm,
    one,
    random,
    random_layer,
)
from xform.layers import Block, Refusal, Stack, find_stacks
from xform.layers.unrolled import is_real
from xform.models import encoder_decoder, gpt2, llama
from xform.trace import Jaxpr, Literal, Var, bind, shape_of

ARRAY = (3, 7, 12)
"""The residual stream: batch, length, embed."""


def found(fn: Callable, args: Any) -> tuple[Jaxpr, list[Stack], list[Refusal]]:
    roles = told(fn, args)
    return roles.axes.jaxpr, *find_stacks(roles.axes.jaxpr, roles)


def only(fn: Callable, args: Any) -> Stack:
    _, stacks, _ = found(fn, args)
    (stack,) = stacks
    return stack


def weights(stack: Stack) -> int:
    return sum(isinstance(v, Var) and is_real(v) for v in stack.blocks[0].own)


def replayed(jaxpr: Jaxpr, stacks: list[Stack], args: list[Any]) -> list[Any]:
    """The program's results where every block is run as the first one is, on its own values."""
    env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*jaxpr.consts, *args], strict=True))
    blocks = {i: (s, n) for s in stacks for n, b in enumerate(s.blocks) for i in b.equations}

    def read(v: Any, local: dict[int, Any]) -> Any:
        if id(v) in local:
            return local[id(v)]
        return v.val if isinstance(v, Literal) else env[v]

    def run(index: int, local: dict[int, Any]) -> dict[Any, Any]:
        eqn = jaxpr.eqns[index]
        values = bind(eqn, [read(v, local) for v in eqn.invars], eqn.params)
        return dict(zip(eqn.outvars, values, strict=True))

    def block(stack: Stack, n: int) -> None:
        first, this = stack.blocks[0], stack.blocks[n]
        takes = zip((*first.carried, *first.own), (*this.carried, *this.own), strict=True)
        local = {id(a): read(b, {}) for a, b in takes}
        for index, own in zip(first.equations, this.equations, strict=False):
            made = run(index, local)
            local |= {id(v): value for v, value in made.items()}
            env.update(zip(jaxpr.eqns[own].outvars, made.values(), strict=True))

    todo = list(range(len(jaxpr.eqns)))
    done: set[tuple[int, int]] = set()
    while todo:  # a stack is one operation: it may have to wait for what stands after its first equation
        waiting = []
        for index in todo:
            try:
                if index not in blocks:
                    env.update(run(index, {}))
                elif (key := (id(blocks[index][0]), blocks[index][1])) not in done:
                    block(*blocks[index])
                    done.add(key)
            except KeyError:
                waiting.append(index)
        assert len(waiting) < len(todo), "a block reads what comes after it"
        todo = waiting
    return [read(v, {}) for v in jaxpr.outvars]


def check(fn: Callable, args: Any) -> list[Stack]:
    """The stacks; each block, run as the first with its own values, must give what the program gives."""
    jaxpr, stacks, _ = found(fn, args)
    values = random(args)
    leaves, tree = jax.tree.flatten(args)
    assert len(leaves) == len(values)
    expected = jax.tree.leaves(fn(*jax.tree.unflatten(tree, values)))
    outside = [s for s in stacks if s.path == () and s.kind == "unrolled"]
    for stack in outside:
        well_formed(stack)
    for a, b in zip(replayed(jaxpr, outside, values), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    return stacks


def well_formed(stack: Stack) -> None:
    assert len(stack.blocks) * stack.period == stack.layers and len(stack.blocks) > 1
    for before, after in zip(stack.blocks, stack.blocks[1:], strict=False):
        assert before.results == after.carried
        for field in ("carried", "own", "extra"):
            one, other = getattr(before, field), getattr(after, field)
            assert [(shape_of(v), v.aval.dtype) for v in one] == [(shape_of(v), v.aval.dtype) for v in other]
    every = [i for block in stack.blocks for i in block.equations]
    assert len(every) == len(set(every)) and stack.index == min(stack.blocks[0].equations)


# ---------------------------------------------------------------- models


@dataclasses.dataclass(frozen=True)
class Row:
    layers: int
    weights: int
    shared: set[str]
    carried: tuple[int, ...]


TABLE = {
    "gpt2": [Row(2, 12, {"int32[8,20]"}, (8, 20, 192))],
    "llama": [Row(2, 9, {"int32[8,20]", "float32[40,1,32]"}, (8, 20, 192))],
    "mistral": [Row(2, 9, {"int32[8,20]", "float32[40,1,32]"}, (8, 20, 192))],
    "bloom": [Row(2, 12, {"int32[8,20]", "float32[8,4,1,20]"}, (8, 20, 192))],
    "bert": [Row(2, 16, {"int32[8,20]"}, (8, 20, 192))],
    "t5": [
        Row(2, 8, {"float32[8,12,28,28]"}, (8, 28, 192)),
        Row(3, 13, {"float32[8,12,20,20]", "float32[8,28,192]", "float32[8,1,1,28]"}, (8, 20, 192)),
    ],
    "vit": [Row(2, 16, set(), (8, 26, 192))],
    "whisper": [
        Row(2, 15, set(), (8, 28, 192)),
        Row(3, 24, {"int32[8,20]", "float32[8,28,192]"}, (8, 20, 192)),
    ],
}


def summary(stack: Stack) -> Row:
    (carried,) = stack.blocks[-1].carried
    assert stack.period == 1 and not any(block.extra for block in stack.blocks)
    return Row(stack.layers, weights(stack), {str(v.aval) for v in stack.shared}, shape_of(carried))


@pytest.mark.parametrize("name", TABLE)
def test_the_layers_of_a_public_model(name: str) -> None:
    _, stacks, refusals = found(*public.PUBLIC[name]())
    assert [summary(stack) for stack in stacks] == TABLE[name]
    for stack in stacks:
        well_formed(stack)
    assert not refusals


OWN = {llama: [9], gpt2: [12], encoder_decoder: [8, 13]}


@pytest.mark.parametrize("model", OWN)
@pytest.mark.parametrize("remat", [False, True])
def test_the_layers_of_our_models_unrolled(model: Any, remat: bool) -> None:
    _, stacks, refusals = found(*model.loss(size="tiny", layers=3, scan=False, remat=remat))
    assert [(s.kind, s.layers, s.period, weights(s)) for s in stacks] == [
        ("unrolled", 3, 1, own) for own in OWN[model]
    ]
    assert not refusals


@pytest.mark.parametrize("model", OWN)
@pytest.mark.parametrize("remat", [False, True])
def test_the_layers_of_our_models_scanned(model: Any, remat: bool) -> None:
    jaxpr, stacks, refusals = found(*model.loss(size="tiny", layers=3, scan=True, remat=remat))
    assert [(s.kind, s.layers, s.period) for s in stacks] == [("scanned", 3, 1)] * len(OWN[model])
    assert all(jaxpr.eqns[s.index].primitive.name == "scan" for s in stacks) and not refusals


@pytest.mark.parametrize("model", OWN)
def test_a_decoding_step_has_caches_of_its_own_and_hands_them_back(model: Any) -> None:
    stack = only(*model.decode_step(size="tiny", layers=3, scan=False))
    cache = shape_of(stack.blocks[0].extra[0])
    assert [shape_of(v) for v in stack.blocks[0].extra] == [cache] * 2
    assert sum(shape_of(v) == cache for v in stack.blocks[0].own) == 2
    assert only(*model.decode_step(size="tiny", layers=3, scan=True)).layers == 3


def test_dropout_in_a_public_model() -> None:
    stack = only(*public.PUBLIC["gpt2"](dropout=0.1))
    assert stack.layers == 2 and weights(stack) == 12


# ---------------------------------------------------------------- plain programs


def test_a_plain_loop() -> None:
    def apply(params: Any, x: Any) -> Any:
        for w in params["layers"]:
            x = layer(x, w)
        return x

    (stack,) = check(*model(apply, 3))
    assert (stack.layers, stack.period, len(stack.shared), weights(stack)) == (3, 1, 0, 7)
    assert [shape_of(v) for v in stack.blocks[0].carried] == [ARRAY]


@pytest.mark.parametrize("windows", [(2, 5), (2, 2, 7), (2, 3, 4)])
def test_windows_that_alternate_make_a_cycle(windows: tuple[int, ...]) -> None:
    def apply(params: Any, x: Any) -> Any:
        at = jnp.arange(7)
        for n, w in enumerate(params["layers"]):
            x = layer(x, w, at[:, None] - at[None, :] < windows[n % len(windows)])
        return x

    (stack,) = check(*model(apply, 2 * len(windows)))
    assert (stack.layers, stack.period, len(stack.blocks)) == (2 * len(windows), len(windows), 2)
    assert not any(isinstance(v, Literal) for v in stack.blocks[0].own)


def test_masks_made_once_that_alternate_are_shared_by_the_cycles() -> None:
    def apply(params: Any, x: Any) -> Any:
        at = jnp.arange(7)
        masks = [at[:, None] >= at[None, :], abs(at[:, None] - at[None, :]) < 3]
        for n, w in enumerate(params["layers"]):
            x = layer(x, w, masks[n % 2])
        return x

    (stack,) = check(*model(apply, 4))
    assert (stack.layers, stack.period) == (4, 2)
    assert [shape_of(v) for v in stack.shared] == [(7, 7)] * 2


def test_dense_and_expert_layers_in_turn_make_a_cycle() -> None:
    def experts(x: Any, w: Any) -> Any:
        gate = jax.nn.softmax(x @ w["router"])
        return jnp.einsum("bln,blne->ble", gate, jnp.einsum("ble,nef->blnf", x, w["experts"]))

    def apply(params: Any, x: Any) -> Any:
        for n, w in enumerate(params["layers"]):
            x = x + attend(norm(x, w["norm"]), w)
            x = x + (experts(x, params["moe"][n // 2]) if n % 2 else mlp(x, w))
        return x

    moe = [{"router": f(12, 5), "experts": f(5, 12, 12)}] * 3
    (stack,) = check(*model(apply, 6, moe=moe))
    assert (stack.layers, stack.period, weights(stack)) == (6, 2, 7 + 4 + 2)


def test_a_first_layer_that_differs_stays_outside() -> None:
    def apply(params: Any, x: Any) -> Any:
        for n, w in enumerate(params["layers"]):
            x = layer(x, w, act=jnp.sin if n == 0 else jnp.tanh)
        return x

    loss, args = model(apply, 4)
    (stack,) = check(loss, args)
    assert stack.layers == 3
    _, _, (refusal,) = found(loss, args)
    assert "`tanh`" in refusal.why and "`sin`" in refusal.why and "loops.py" in refusal.why


def test_one_norm_for_all_is_shared_and_tied_weights_stay_so() -> None:
    def apply(params: Any, x: Any) -> Any:
        for w in params["layers"]:
            x = layer(x, w | {"norm": params["final"]}, bias=params["table"][0, 0])
        return x

    (stack,) = check(*model(apply, 3))
    assert {shape_of(v) for v in stack.shared} >= {(12,)} and weights(stack) == 6


def test_constants_of_each_layer_are_its_own() -> None:
    def apply(params: Any, x: Any) -> Any:
        at = jnp.arange(7)
        for n, w in enumerate(params["layers"]):
            x = layer(x, w, at[:, None] - at[None, :] < 2 + n) * (0.5 + n)
        return x

    (stack,) = check(*model(apply, 4))
    values = [[float(v.val) for v in block.own if isinstance(v, Literal)] for block in stack.blocks]
    assert sorted(map(sorted, values)) == [[0.5, 2], [1.5, 3], [2.5, 4], [3.5, 5]]


@pytest.mark.parametrize("how", KEYS)
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("layers", [2, 4])
def test_keys_are_carried_or_each_layers_own(how: str, raw: bool, layers: int) -> None:
    make, carried = KEYS[how]

    def loss(params: Any, tokens: Any, labels: Any, key: Any) -> Any:
        x = params["table"][tokens]
        key = jax.random.key_data(key) if raw else key
        for w, sub in zip(params["layers"], make(key, layers), strict=True):
            x = dropout(sub, layer(x, w))
        return picked(x @ params["table"].T, labels)

    _, args = model(layer, layers)
    key = jax.eval_shape(lambda: jax.random.key(0))
    (stack,) = check(loss, (*args, key))
    assert stack.layers == layers and weights(stack) == 7
    assert len(stack.blocks[-1].carried) == carried


def test_collected_states_and_losses_are_extra() -> None:
    def apply(params: Any, x: Any) -> Any:
        states, total = [], 0.0
        for w in params["layers"]:
            states.append(x)
            x = layer(x, w)
            total += jnp.mean(jnp.square(x @ w["up"]))
        return x, states, total

    (stack,) = check(*model(apply, 3))
    assert stack.layers == 3
    assert [shape_of(v) for v in stack.blocks[0].extra] == [ARRAY, ()]


def test_a_loss_that_is_summed_on_the_way_is_carried_from_a_literal() -> None:
    def apply(params: Any, x: Any) -> Any:
        total = jnp.float32(0)
        for w in params["layers"]:
            total += jnp.mean(jnp.square(x))
            x = layer(x, w) + total
        return x

    (stack,) = check(*model(apply, 3))
    assert stack.layers == 3 and sorted(shape_of(v) for v in stack.blocks[0].carried) == [(), ARRAY]


@pytest.mark.parametrize("layers", [2, 4])
def test_a_bias_that_the_first_layer_makes_for_all_is_shared(layers: int) -> None:
    def apply(params: Any, x: Any) -> Any:
        bias = None
        for w in params["layers"]:
            normed = norm(x, w["norm"])
            if bias is None:
                at = jnp.arange(7)
                bias = params["distance"][jnp.abs(at[:, None] - at[None, :])]
            x = x + attend(normed, w, bias=bias)
            x = x + mlp(x, w)
        return x

    (stack,) = check(*model(apply, layers, distance=f(7)))
    assert stack.layers == layers and [shape_of(v) for v in stack.shared] == [(7, 7)]


def test_casts_at_the_beginning_and_dead_equations_do_not_matter() -> None:
    def apply(params: Any, x: Any) -> Any:
        small = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params["layers"][::-1])
        for n, w in enumerate(small[::-1]):
            x = layer(x, jax.tree.map(lambda w: w.astype(jnp.float32), w))
            if n == 1:
                jnp.sin(x) @ params["final"]
        return x

    (stack,) = check(*model(apply, 3))
    assert stack.layers == 3 and weights(stack) == 7


def test_layers_written_in_turn_with_others_are_two_stacks() -> None:
    def apply(params: Any, x: Any) -> Any:
        y = jnp.cos(x)
        for w, u in zip(params["layers"], params["others"], strict=True):
            x, y = layer(x, w), y + jnp.tanh(y @ u)
        return x * y

    stacks = check(*model(apply, 3, others=[MATRIX] * 3))
    assert sorted((s.layers, weights(s)) for s in stacks) == [(3, 1), (3, 7)]


def test_an_encoder_and_a_decoder_are_two_stacks() -> None:
    def apply(params: Any, x: Any) -> Any:
        y = jnp.cos(x)
        for w in params["layers"]:
            y = layer(y, w)
        for w in params["decoder"]:
            x = layer(x, w) + attend(y, w)
        return x

    stacks = check(*model(apply, 3, decoder=[one()] * 4))
    assert [(s.layers, len(s.shared)) for s in stacks] == [(3, 0), (4, 1)]


def test_post_norm_layers_end_with_their_norm() -> None:
    def apply(params: Any, x: Any) -> Any:
        x = norm(x, params["final"])
        for w in params["layers"]:
            x = norm(x + jnp.tanh(x @ w["q"]), w["norm"])
        return x

    jaxpr, (stack,), _ = found(*model(apply, 3))
    check(*model(apply, 3))
    assert stack.layers == 3
    last = jaxpr.eqns[max(stack.blocks[-1].equations)]
    assert last.primitive.name == "mul" and stack.blocks[0].own[-1] in jaxpr.invars


def test_a_stack_inside_jit_inside_jit() -> None:
    def apply(params: Any, x: Any) -> Any:
        for w in params["layers"]:
            x = layer(x, w)
        return x

    loss, args = model(apply, 3)
    _, (stack,), _ = found(jax.jit(lambda *a: jax.jit(loss)(*a)), args)
    assert stack.path == ((0, 0), (0, 0)) and stack.layers == 3 and weights(stack) == 7


def test_weights_that_a_loop_indexes_itself_are_scanned() -> None:
    def apply(params: Any, x: Any) -> Any:
        def turn(carry: Any, _: Any) -> Any:
            n, x = carry
            return (n + 1, layer(x, jax.tree.map(lambda w: w[n], params["stacked"]))), None

        return jax.lax.scan(turn, (0, x), None, length=5)[0][1]

    stacked = jax.tree.map(lambda w: f(5, *w.shape), one())
    stack = only(*model(apply, 1, stacked=stacked))
    assert (stack.kind, stack.layers) == ("scanned", 5) and not stack.shared


def test_a_cycle_in_a_scan_and_a_scan_in_a_scan_count_all_layers() -> None:
    def cycles(params: Any, x: Any) -> Any:
        def turn(x: Any, ws: Any) -> Any:
            for n in range(2):
                x = layer(x, jax.tree.map(lambda w, n=n: w[n], ws))
            return x, None

        return jax.lax.scan(turn, x, params["stacked"])[0]

    def nested(params: Any, x: Any) -> Any:
        def outer(x: Any, ws: Any) -> Any:
            return jax.lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0], None

        return jax.lax.scan(outer, x, params["stacked"])[0]

    stacked = jax.tree.map(lambda w: f(3, 2, *w.shape), one())
    for apply in (cycles, nested):
        stack = only(*model(apply, 1, stacked=stacked))
        assert (stack.kind, stack.layers, stack.period) == ("scanned", 6, 2)


# ---------------------------------------------------------------- near misses


def test_a_layer_in_the_middle_of_another_activation_splits_the_stack() -> None:
    def apply(params: Any, x: Any) -> Any:
        for n, w in enumerate(params["layers"]):
            x = layer(x, w, act=jax.nn.relu if n == 2 else jnp.tanh)
        return x

    _, stacks, refusals = found(*model(apply, 5))
    assert [s.layers for s in stacks] == [2, 2]
    assert len(refusals) == 2 and all("`tanh`" in r.why for r in refusals)
    assert all("loops.py" in r.where for r in refusals)


def test_two_layers_of_which_one_is_wider_do_not_stack() -> None:
    def apply(params: Any, x: Any) -> Any:
        for w in params["layers"]:
            x = layer(x, w)
        return x

    loss, (params, *rest) = model(apply, 2)
    params["layers"][1] = one(28)
    _, stacks, (refusal,) = found(loss, (params, *rest))
    assert not stacks
    assert refusal.why == (
        "[0]['layers'][1]['down'] is float32[28,12];"
        " in the block before, [0]['layers'][0]['down'] is float32[20,12]"
    )


def test_windows_inside_checkpoint_make_a_cycle_and_an_index_there_is_told() -> None:
    def stack_of(windows: list[int]) -> Callable:
        def apply(params: Any, x: Any) -> Any:
            at = jnp.arange(7)

            for w, window in zip(params["layers"], windows, strict=True):

                @jax.checkpoint
                def run(x: Any, w: Any, window: int = window) -> Any:
                    return layer(x, w, at[:, None] - at[None, :] < window)

                x = run(x, w)
            return x

        return apply

    assert [(s.layers, s.period) for s in check(*model(stack_of([2, 5, 2, 5]), 4))] == [(4, 2)]
    _, stacks, refusals = found(*model(stack_of([2, 3, 4]), 3))
    assert not stacks and "`lt 4`" in refusals[0].why and "`lt 3`" in refusals[0].why


@pytest.mark.parametrize("alike", [True, False])
def test_layers_with_other_rules_of_differentiation_do_not_stack(alike: bool) -> None:
    def activation(backward: Callable) -> Callable:
        act = jax.custom_vjp(lambda x: jnp.tanh(x))
        act.defvjp(lambda x: (jnp.tanh(x), x), backward)
        return act

    def straight(x: Any, g: Any) -> Any:
        return (g,)

    def scaled(x: Any, g: Any) -> Any:
        return (g * 2,)

    acts = [activation(straight), activation(straight if alike else scaled)]

    def apply(params: Any, x: Any) -> Any:
        for w, act in zip(params["layers"], acts, strict=True):
            x = layer(x, w, act=act)
        return x

    _, stacks, refusals = found(*model(apply, 2))
    assert [s.layers for s in stacks] == ([2] if alike else []) and bool(refusals) != alike


def test_the_same_weights_in_every_block_are_nothing_to_stack() -> None:
    def apply(params: Any, x: Any) -> Any:
        for _ in range(3):
            x = layer(x, params["layers"][0])
        return x

    _, stacks, (refusal,) = found(*model(apply, 1))
    assert not stacks and "same weights" in refusal.why


# ---------------------------------------------------------------- what is none


def differing_widths(params: Any, x: Any) -> Any:
    for a, b in ((12, 20), (20, 31), (31, 12)):
        x = jnp.tanh(x @ jnp.ones((a, b)) * params["final"][0])
    return x


def over_time(params: Any, x: Any) -> Any:
    w = params["layers"][0]

    def turn(h: Any, x: Any) -> Any:
        h = jnp.tanh(h @ w["q"] + x @ w["k"])
        return h, h

    return jnp.swapaxes(jax.lax.scan(turn, x[:, 0], jnp.swapaxes(x, 0, 1))[1], 0, 1)


def unrolled_over_time(params: Any, x: Any) -> Any:
    w, h, states = params["layers"][0], x[:, 0], []
    for t in range(x.shape[1]):
        h = jnp.tanh(h @ w["q"] + x[:, t] @ w["k"])
        states.append(h)
    return jnp.stack(states, 1)


def loop_over_heads(params: Any, x: Any) -> Any:
    out = jnp.zeros_like(x)
    for w in params["layers"]:
        out = out + attend(x, w) @ w["q"]
    return x + out


def scan_over_heads(params: Any, x: Any) -> Any:
    stacked = jax.tree.map(lambda *w: jnp.stack(w), *params["layers"])
    return jax.lax.scan(jax.checkpoint(lambda out, w: (out + attend(x, w), None)), x, stacked)[0]


def scan_over_chunks(params: Any, x: Any) -> Any:
    chunks = jnp.moveaxis(x.reshape(3, 7, 3, 4), 2, 0)
    return x + jax.lax.map(lambda c: c @ params["layers"][0]["q"][:4], chunks).sum(0)


NONE = (differing_widths, over_time, unrolled_over_time, loop_over_heads, scan_over_heads, scan_over_chunks)


@pytest.mark.parametrize("apply", NONE, ids=lambda f: f.__name__)
def test_what_is_no_stack(apply: Callable) -> None:
    _, stacks, refusals = found(*model(apply, 3))
    assert not stacks and not refusals


@pytest.mark.parametrize("scan", [False, True])
def test_microbatches_are_no_stack_but_the_model_in_them_has_one(scan: bool) -> None:
    def apply(params: Any, x: Any) -> Any:
        for w in params["layers"]:
            x = layer(x, w)
        return x

    loss, (params, *_) = model(apply, 3)

    def total(params: Any, tokens: Any, labels: Any) -> Any:
        if scan:
            parts = (tokens.reshape(2, 3, 7), labels.reshape(2, 3, 7))
            return jax.lax.scan(lambda sum, part: (sum + loss(params, *part)[0], None), 0.0, parts)[0]
        return loss(params, tokens[:3], labels[:3])[0] + loss(params, tokens[3:], labels[3:])[0]

    _, stacks, refusals = found(total, (params, i(6, 7), i(6, 7)))
    assert [s.layers for s in stacks] == ([3] if scan else [3, 3]) and not refusals


def test_heads_in_a_loop_inside_the_layers_are_part_of_them() -> None:
    def apply(params: Any, x: Any) -> Any:
        for w in params["layers"]:
            for n in range(3):
                x = x + attend(x, {name: w[name][:, 4 * n : 4 * n + 4] for name in "qkv"}) @ w["q"][:4]
            x = x + mlp(x, w)
        return x

    (stack,) = check(*model(apply, 4))
    assert stack.layers == 4 and weights(stack) == 6


def test_blocks_say_the_same_thing_at_the_same_place() -> None:
    def apply(params: Any, x: Any) -> Any:
        for w in params["layers"]:
            x = layer(x, w)
        return x

    jaxpr, (stack,), _ = found(*model(apply, 3))

    def names(block: Block) -> list[str]:
        return [jaxpr.eqns[i].primitive.name for i in block.equations]

    assert names(stack.blocks[0]) == names(stack.blocks[1]) == names(stack.blocks[2])


@pytest.mark.parametrize("seed", range(16))
def test_random_layers_run_as_the_first_one_does(seed: int) -> None:
    run = random_layer(seed)

    def apply(params: Any, x: Any) -> Any:
        shared, collected = jnp.cos(x @ params["first"]), []
        for n, w in enumerate(params["layers"], 1):
            x, extra = run(n, x, w, shared)
            collected.append(extra)
        return x, collected

    (stack,) = check(*model(apply, 4, first=MATRIX))
    assert (stack.layers, stack.period) == (4, 1)


def test_reversible_layers_carry_two_streams() -> None:
    def apply(params: Any, x: Any) -> Any:
        y = x @ params["final"][:, None] * x
        for w in params["layers"]:
            x = x + attend(norm(y, w["norm"]), w)
            y = y + mlp(x, w)
        return x * y

    (stack,) = check(*model(apply, 4))
    assert stack.layers == 4 and len(stack.blocks[0].carried) == 2


@pytest.mark.parametrize("layers", [3, 4])
def test_a_sum_over_layers_is_carried_not_what_is_summed(layers: int) -> None:
    def apply(params: Any, x: Any) -> Any:
        total = jnp.sin(x)
        for w in params["layers"]:
            hidden = attend(norm(x, w["norm"]), w)
            x = x + mlp(x + hidden, w) * total
            total = jnp.tanh(total + hidden)
        return x + total

    (stack,) = check(*model(apply, layers))
    assert stack.layers == layers and len(stack.blocks[0].carried) == 2
