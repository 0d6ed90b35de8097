"""Context: recurrences whose steps lie over devices are those of one device, in any order of texts."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.test_context import CAUSAL, MESH, RNG, B, E, T, made, mixed, planned, said, same, times, weights
from xform import Kernels, Plan, parallelize
from xform.spmd.ledger import ledger

H, D, V = 2, 4, 5
KINDS = ("gla", "gated", "kda", "linear")


def recurrent(kind: str, x: Any, w: Any) -> Any:
    """A layer: a decay by channel or by head or none, with the delta rule or without."""
    q, k, v, g = (jnp.einsum("bte,ehd->tbhd", x, w[name]) for name in "qkvg")
    k = k * jax.lax.rsqrt(jnp.sum(k * k, -1, keepdims=True) + 1e-3)
    beta = jax.nn.sigmoid(jnp.einsum("bte,eh->tbh", x, w["beta"]))
    decay = jnp.exp(-jax.nn.softplus(g[..., :1] if kind == "gated" else g))

    def step(state: Any, now: Any) -> tuple[Any, Any]:
        q, k, v, decay, beta = now
        state = state if kind == "linear" else state * decay[..., None]
        if kind in ("gated", "kda"):
            v = beta[..., None] * (v - jnp.einsum("bhde,bhd->bhe", state, k))
        state = state + k[..., :, None] * v[..., None, :]
        return state, jnp.einsum("bhde,bhd->bhe", state, q)

    initial = jnp.broadcast_to(w["state"], (x.shape[0], H, D, V))
    state, out = jax.lax.scan(step, initial, (q, k, v, decay, beta))
    return jnp.einsum("tbhd,hde->bte", out, w["o"]) + 0.1 * jnp.mean(state)


def layer() -> dict[str, jax.Array]:
    shapes = {"q": (E, H, D), "k": (E, H, D), "v": (E, H, V), "g": (E, H, D), "beta": (E, H), "o": (H, V, E)}
    return {name: 0.3 * made(*shape) for name, shape in (shapes | {"state": (H, D, V)}).items()}


PARAMS = {kind: layer() for kind in KINDS}
TOKENS = jnp.asarray(RNG.integers(0, 11, (B, T)), jnp.int32)
TABLE = made(11, E)


def loss_of(*kinds: str, attending: bool = False) -> Callable[..., Any]:
    def loss(params: Any, tokens: Any) -> Any:
        x = params["table"][tokens]
        for kind in kinds:
            x = x + recurrent(kind, x, params[kind])
        x = x + 0.1 * mixed(params["attention"], x, CAUSAL) if attending else x
        return jnp.mean(jnp.sin(x))

    return loss


def params_of(*kinds: str) -> Any:
    attention = jax.tree.map(lambda w: 0.3 * w, weights()["causal"])
    return {"table": TABLE, "attention": attention, **{kind: PARAMS[kind] for kind in kinds}}


@pytest.mark.parametrize(
    "kinds, collectives",
    [(("gla", "gated"), "explicit"), (("kda", "linear"), "auto")],
)
def test_every_kind_is_that_of_one_device(kinds: tuple[str, ...], collectives: str) -> None:
    step, params = jax.value_and_grad(loss_of(*kinds)), params_of(*kinds)
    ours = parallelize(step, planned(collectives=collectives))
    same(ours(params, TOKENS), jax.jit(step)(params, TOKENS), atol=1e-5)
    assert times(ours.trace(params, TOKENS), "recurrence of 24 steps") == len(kinds)


def test_a_text_in_zigzag_has_two_parts_on_a_device() -> None:
    step, params = jax.value_and_grad(loss_of("kda", "gla", attending=True)), params_of("kda", "gla")
    ours = parallelize(step, planned(balance="zigzag"))
    same(ours(params, TOKENS), jax.jit(step)(params, TOKENS), atol=1e-5)
    program = ours.trace(params, TOKENS)
    assert times(program, "recurrence of 24 steps, zigzag") == 2 and not said(program, "declined")


def test_striped_texts_are_declined() -> None:
    """A device's steps would each follow from one on another device."""
    params = params_of("kda")
    step = parallelize(jax.grad(loss_of("kda", attending=True)), planned(balance="striped"))
    assert "balance = 'striped'" in said(step.trace(params, TOKENS), "declined")


def test_a_kernel_runs_inside() -> None:
    step, params = jax.value_and_grad(loss_of("kda")), params_of("kda")
    plan = Plan(MESH, [*planned().passes, Kernels(interpret=True, shortest=1)])
    ours = parallelize(step, plan)
    same(ours(params, TOKENS), jax.jit(step)(params, TOKENS), atol=2e-5)
    program = ours.trace(params, TOKENS)
    assert times(program, "by a kernel") == times(program, "recurrence of 24 steps") == 1


def test_what_is_sent_does_not_grow_with_the_text() -> None:
    """What becomes of a state, and what is added to it, to three others; backward of gradients too."""

    def gathered(length: int) -> int:
        tokens = jnp.tile(TOKENS, (1, length // T))
        program = parallelize(jax.grad(loss_of("kda")), planned()).trace(params_of("kda"), tokens)
        found = [each for each in ledger(program.jaxpr, MESH) if "(recurrent)" in each.line]
        return sum(int(each.total) for each in found if each.kind == "all-gather")

    state, whole = D * V, D * D
    assert gathered(T) == gathered(2 * T) == 4 * (B // 2) * H * 3 * 3 * (state + whole)


def test_steps_that_do_not_divide_are_all_done_by_each() -> None:
    step, params, tokens = jax.value_and_grad(loss_of("gla")), params_of("gla"), TOKENS[:, :22]
    ours = parallelize(step, planned())
    why = said(ours.trace(params, tokens), "declined")
    assert "recurrence of 22 steps, which do not divide over 4: all devices do all" in why
    same(ours(params, tokens), jax.jit(step)(params, tokens), atol=1e-5)
