"""Layers of experts: what they are made of, that sizes do not matter, and what is said of near misses."""

import time

import jax
import jax.numpy as jnp
import pytest

from tests.spellings.experts_models import SPELLINGS
from xform import raised
from xform.raising.finding import find

T, D, F, E, K = 12, 6, 8, 4, 2


def shapes(*sizes, dtype=jnp.float32):
    return [jax.ShapeDtypeStruct(s, dtype) for s in sizes]


def switch(x, router, gate, up, down, capacity=3):
    """Places for each expert, of up, gate and down projections."""
    chosen = jax.nn.one_hot(jnp.argmax(x @ router, -1), E)
    place = jax.nn.one_hot((jnp.cumsum(chosen, 0) * chosen - 1).max(-1).astype(jnp.int32), capacity)
    sent = jnp.einsum("te,tc,td->ecd", chosen, place, x)
    h = jax.nn.silu(jnp.einsum("ecd,edf->ecf", sent, gate)) * jnp.einsum("ecd,edf->ecf", sent, up)
    return jnp.einsum("te,tc,ecd->td", chosen, place, jnp.einsum("ecf,efd->ecd", h, down))


ARGS = shapes((T, D), (D, E), (E, D, F), (E, D, F), (E, F, D))


def meanings(fn, *args):
    found = find(jax.make_jaxpr(fn)(*args))
    return [r for r in found.raised if r.op == "experts"], found.declined


def test_weights_have_their_experts_contracted_and_given_dimensions():
    (layer,), _ = meanings(switch, *ARGS)
    assert [w.dims for w in layer.meaning.w] == [("x", "k", "f"), ("x", "k", "f"), ("x", "f", "o")]
    assert layer.sizes["x"] == E and layer.sizes["k"] == D and layer.sizes["f"] == F
    assert layer.meaning.x.dims == ("x", "m", "k")


def test_a_layer_is_all_from_its_first_product_to_where_the_last_ones_result_is():
    (layer,), _ = meanings(switch, *ARGS)
    names = [layer.view.eqns[n].primitive.name for n in sorted(layer.numbers)]
    assert names.count("dot_general") == 3
    assert "argmax" not in names


def test_weights_of_several_arrays_are_one_product_an_expert():
    (entry,) = raised(SPELLINGS["stacked_in_linen"].fn, *SPELLINGS["stacked_in_linen"].args)["raised"]
    assert (entry["experts"], entry["products"]) == (E, 2)


def test_rows_of_one_expert_are_the_batch():
    (entry,) = raised(switch, *ARGS)["raised"]
    assert entry["axes"] == {"batch": 3, "experts": E, "embed": D, "mlp": F}


def test_a_model_of_eight_times_seven_billion_weights_is_as_quick_as_a_small_one():
    """Nothing is evaluated, whatever the sizes."""
    args = shapes((8192, 4096), (4096, E), *[(E, 4096, 14336)] * 2, (E, 14336, 4096), dtype=jnp.bfloat16)
    jaxpr = jax.make_jaxpr(lambda *a: switch(*a, capacity=2048))(*args)
    before = time.perf_counter()
    found = find(jaxpr)
    assert time.perf_counter() - before < 5
    assert [r.op for r in found.raised] == ["experts"]


def test_layers_in_a_loop_are_one_entry_for_its_body():
    def model(layers, x):
        return jax.lax.scan(lambda x, w: (x + switch(x, *w), None), x, layers)[0]

    stacked = [jax.ShapeDtypeStruct((3, *a.shape), a.dtype) for a in ARGS[1:]]
    (entry,) = (e for e in raised(model, stacked, ARGS[0])["raised"] if e["op"] == "experts")
    assert entry["style"] == "one_hot"


def test_two_layers_that_choose_apart_are_two():
    def two(x, *weights):
        return switch(switch(x, *weights), *weights)

    assert len(meanings(two, *ARGS)[0]) == 2


def test_what_is_sent_back_to_other_tokens_is_a_near_miss_with_its_line():
    def summed(x, router, up, down):
        mask = jax.nn.one_hot(jnp.argmax(x @ router, -1), E)
        h = jax.nn.gelu(jnp.einsum("ed,edf->ef", jnp.einsum("td,te->ed", x, mask), up))
        return jnp.einsum("ed,te->td", jnp.einsum("ef,efd->ed", h, down), mask)

    found, declined = meanings(summed, ARGS[0], ARGS[1], ARGS[2], ARGS[4])
    assert not found
    assert {d.why for d in declined} == {
        "what an expert gives goes to other tokens than it took, or to sums of them"
    }
    assert all("test_raising_experts.py" in d.line for d in declined)


@pytest.mark.parametrize("name", ["switch_cases", "nested"])
def test_cases_of_one_selection_are_told_apart_by_their_places(name):
    def nested(x, router, up):
        chosen = jnp.argmax(x @ router, -1)[:, None]
        y = x @ up[0]
        for e in range(1, E):
            y = jnp.where(chosen == e, x @ up[e], y)
        return y

    def switch_cases(x, router, up):
        chosen = jnp.broadcast_to(jnp.argmax(x @ router, -1)[:, None], (T, F)).astype(jnp.int32)
        return jax.lax.select_n(chosen, *(x @ up[e] for e in range(E)))

    (layer,), _ = meanings({"nested": nested, "switch_cases": switch_cases}[name], *ARGS[:3])
    assert layer.meaning.style == "loop"


def test_experts_of_which_one_is_never_chosen_are_none():
    """The last has no case of its own: it is added to all tokens."""

    def fn(x, router, up):
        chosen = jnp.argmax(x @ router, -1)[:, None]
        y = x @ up[E - 1]
        for e in range(E - 1):
            y = y + jnp.where(chosen == e, x @ up[e], 0)
        return y

    assert not meanings(fn, *ARGS[:3])[0]
