"""xform.raising.norms: RMSNorm and LayerNorm, found from the root of a mean of squares."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.public import PUBLIC
from tests.raised import run
from tests.spellings import norms as bench
from xform.raising.flat import views
from xform.raising.meaning import Near, Raised
from xform.raising.norms import norms

NORMS = {"gpt2": 5, "llama": 5, "mistral": 5, "bloom": 6, "bert": 6, "t5": 15, "vit": 5, "whisper": 15}
"""How many norms each public model of two layers (three in decoders with an encoder) has."""


def found(fn, *args):
    return [f for view in views(jax.make_jaxpr(fn)(*args)) for f in norms(view)]


def raised(fn, *args):
    return [f for f in found(fn, *args) if isinstance(f, Raised)]


def reasons(fn, *args):
    return [f.why for f in found(fn, *args) if isinstance(f, Near)]


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def computed(meaning, values):
    """A norm as its meaning says, in float64."""
    x = np.asarray(values[meaning.x.atom], np.float64)
    centred = x - x.mean(meaning.axes, keepdims=True) if meaning.kind == "layer" else x
    normed = centred / np.sqrt((centred**2).mean(meaning.axes, keepdims=True) + meaning.epsilon)

    def weight(atom):
        sizes = [n if d in meaning.axes else 1 for d, n in enumerate(x.shape)]
        return np.asarray(values[atom], np.float64).reshape(sizes)

    scale = 1.0 if meaning.scale is None else weight(meaning.scale) + meaning.add_one
    return normed * scale + (0.0 if meaning.shift is None else weight(meaning.shift))


@pytest.mark.parametrize("name", bench.SPELLINGS)
def test_what_is_raised_computes_what_the_program_computes(name):
    case = bench.SPELLINGS[name]
    for each in raised(case.fn, *case.args):
        values = run(each.view)
        out = values[each.meaning.out.atom]
        close = 0.05 if any(a.dtype == jnp.bfloat16 for a in case.args) else 1e-5  # bfloat16 has 8 bits
        np.testing.assert_allclose(np.asarray(out, np.float64), computed(each.meaning, values), close, close)


def held_to(fn, *args, close=1e-5):
    """Every norm of a program, held to what the program computes."""
    every = raised(fn, *args)
    for each in every:
        values = run(each.view)
        out = np.asarray(values[each.meaning.out.atom], np.float64)
        np.testing.assert_allclose(out, computed(each.meaning, values), close, close)
    return every


AROUND = {
    "clipped": lambda y, m: jnp.clip(y, -1e3, 1e3),
    "clipped_a_little": lambda y, m: jnp.clip(y, -2, 2),
    "some_rows_zero": lambda y, m: jnp.where(jnp.arange(5)[:, None] == 3, 0.0, y),
    "some_columns_zero": lambda y, m: jnp.where(jnp.arange(7) == 3, 0.0, y),
    "masked": lambda y, m: jnp.where(m > 0, y, 0.0),
    "masked_by_a_product": lambda y, m: y * (m > 0),
    "a_constant_array": lambda y, m: y * np.arange(1, 6, dtype=np.float32)[:, None],
    "reversed": lambda y, m: y[:, ::-1],
    "positive": lambda y, m: jnp.maximum(y, -30.0),
    "doubled": lambda y, m: 2 * y,
    "negated": lambda y, m: -y,
    "conditioned": lambda y, m: y * (1 + m),
}


@pytest.mark.parametrize("name", AROUND)
def test_what_comes_after_a_norm_is_none_of_it(name):
    def fn(x, w, b, m):
        return AROUND[name](bench.layer(x, w, b), m)

    (one,) = held_to(fn, array(2, 5, 7), array(7), array(7), array(2, 5, 1))
    assert one.meaning.scale is not None and one.meaning.shift is not None


def test_what_comes_before_a_norm_is_none_of_it():
    def fn(x, w):
        return bench.rms(jnp.clip(x, -1, 1), w), bench.rms(jnp.where(jnp.arange(7) < 3, x, 0.0), w)

    first, second = held_to(fn, array(2, 5, 7), array(7))
    inputs = first.view.jaxpr.invars
    assert first.meaning.x.atom not in inputs and second.meaning.x.atom not in inputs


def test_a_weight_may_be_a_constant_of_the_program():
    w = jnp.arange(7.0)
    (one,) = held_to(lambda x: bench.rms(x, w), array(2, 5, 7))
    assert one.meaning.scale is not None


@pytest.mark.parametrize("name", NORMS)
def test_every_norm_of_the_public_models_is_recognised(name):
    fn, args = PUBLIC[name]()
    every = raised(fn, *args)
    assert len(every) == NORMS[name]
    assert {each.meaning.kind for each in every} == {"rms" if name in ("llama", "mistral", "t5") else "layer"}
    assert not reasons(fn, *args)


def test_the_result_is_the_last_value_that_nothing_else_comes_between():
    def fn(x, w):
        normed = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        return normed * w, normed

    (one,) = raised(fn, array(3, 5), array(5))
    assert one.meaning.scale is None  # the value without the weight is a result too


def test_the_value_before_it_was_cast_is_what_is_normed():
    def fn(x, w):
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(x.dtype) * w

    (one,) = raised(fn, array(3, 5, dtype=jnp.bfloat16), array(5, dtype=jnp.bfloat16))
    assert one.meaning.x.atom is one.view.jaxpr.invars[0]
    assert one.meaning.scale is one.view.jaxpr.invars[1]


def test_dimensions_have_letters_and_sizes():
    (one,) = raised(*_case("rms_two_axes"))
    assert one.meaning.x.dims == ("A", "B", "e", "d")
    assert one.sizes == {"A": 2, "B": 5, "e": 3, "d": 7}


def test_a_scale_of_one_plus_a_weight_is_the_weight():
    (one,) = raised(*_case("rms_gemma"))
    assert one.meaning.add_one and one.meaning.scale is one.view.jaxpr.invars[1]


def test_two_weights_one_after_the_other_are_the_norms_and_another():
    def fn(x, w, other):
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * w * other

    (one,) = raised(fn, array(3, 5), array(5), array(5))
    assert one.meaning.scale is one.view.jaxpr.invars[1]


def test_an_epsilon_of_any_size_is_found_and_none_too():
    for epsilon in (0.0, 1e-12, 1e-5, 0.3):

        def fn(x, epsilon=epsilon):
            return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + epsilon)

        (one,) = raised(fn, array(3, 5))
        assert one.meaning.epsilon == epsilon


def test_a_residual_after_a_norm_is_none_of_it():
    def fn(x, w, b):
        return x + bench.layer(x, w, b)

    (one,) = raised(fn, array(3, 5), array(5), array(5))
    assert one.meaning.out.atom is not one.view.jaxpr.outvars[0]


def test_channels_first_needs_a_weight_over_the_channels():
    def fn(x):
        return x * jax.lax.rsqrt(jnp.mean(x * x, 1, keepdims=True) + 1e-6)

    assert not raised(fn, array(2, 7, 5, 3))
    assert raised(lambda x, w: fn(x) * w[:, None, None], array(2, 7, 5, 3), array(7))


def test_the_number_of_equations_holds_all_that_the_norm_is():
    (one,) = raised(*_case("layer"))
    assert one.numbers == frozenset(range(len(one.view.eqns)))


def test_what_has_a_norms_statistics_besides_is_told():
    (one,) = raised(*_case("rms_statistic_returned"))
    assert "statistics" in one.note


def test_published_sizes_are_read_as_fast_as_small_ones():
    (one,) = raised(bench.rms, array(8, 2048, 8192), array(8192))
    assert one.sizes == {"A": 8, "B": 2048, "d": 8192}


def _case(name):
    case = bench.SPELLINGS[name]
    return case.fn, *case.args
