"""xform.raising.losses: cross-entropy over a vocabulary, from hidden states to a loss a token."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.public import PUBLIC
from tests.raised import run
from tests.spellings import losses as bench
from xform.raising.flat import views
from xform.raising.losses import losses
from xform.raising.meaning import Near, Raised

V = bench.V


def found(fn, *args):
    return [f for view in views(jax.make_jaxpr(fn)(*args)) for f in losses(view)]


def raised(fn, *args):
    return [f for f in found(fn, *args) if isinstance(f, Raised)]


def reasons(fn, *args):
    return [f.why for f in found(fn, *args) if isinstance(f, Near)]


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def computed(each, values):
    """(loss, lse, picked) of all tokens as the meaning says, in float64, one dimension for all tokens."""
    m, sizes = each.meaning, each.sizes

    def value(tensor):
        x = np.asarray(values[tensor.atom], np.float64)
        dims = "".join(tensor.dims)
        if tensor is m.x and m.part is not None:
            spans, axes = iter(m.part), [d for d, dim in enumerate(tensor.dims) if dim not in ("d", "f")]
            for d in axes:
                first, last = next(spans)
                x = np.take(x, range(first, last), d)
        return x.reshape([sizes[c] for c in dims]), dims

    (x, x_dims), (w, w_dims), (labels, dims) = value(m.x), value(m.w), value(m.labels)
    tokens = dims.replace("v", "")
    z = m.scale * np.einsum(f"{x_dims},{w_dims}->{tokens}v", x, w).reshape(-1, sizes["v"])
    z = z if m.cap is None else m.cap * np.tanh(z / m.cap)
    z = z if m.bias is None else z + np.asarray(values[m.bias], np.float64).reshape(-1)
    z = z[:, : m.valid]
    lse = np.log(np.exp(z).sum(-1))
    if m.soft:
        p = np.einsum(f"{dims}->{tokens}v", labels).reshape(z.shape)
        return p.sum(-1) * lse - (p * z).sum(-1), lse, None
    picked = z[np.arange(len(z)), labels.reshape(-1).astype(int)]
    loss = lse - (1 - m.smoothing) * picked - m.smoothing * z.mean(-1) + m.z_loss * lse**2 + m.offset
    return loss, lse, picked


def held_to(fn, *args, close=1e-5):
    """Every loss of a program, held to what the program computes."""
    every = raised(fn, *args)
    for each in every:
        values = run(each.view, each.meaning.valid or each.sizes["v"])
        loss, lse, picked = computed(each, values)
        m = each.meaning
        for tensor, expected in ((m.lse, lse), (m.picked, picked)):
            if tensor is not None:
                value = np.asarray(values[tensor.atom], np.float64).reshape(-1)
                np.testing.assert_allclose(value, expected, close, close)
        if m.out is not None:
            expected = -loss if m.negative else loss
            expected = expected.sum(keepdims=True) if m.summed else expected
            value = np.asarray(values[m.out.atom], np.float64).reshape(-1)
            np.testing.assert_allclose(value, expected, close, close * len(loss) if m.summed else close)
    return every


@pytest.mark.parametrize("name", bench.SPELLINGS)
def test_what_is_raised_computes_what_the_program_computes(name):
    case = bench.SPELLINGS[name]
    close = 0.05 if any(a.dtype == jnp.bfloat16 for a in case.args) else 1e-5  # bfloat16 has 8 bits
    assert len(held_to(case.fn, *case.args, close=close)) == case.count


AROUND = {
    "clipped": lambda y, m: jnp.minimum(y, 50.0),
    "clipped_below": lambda y, m: jnp.maximum(y, 1e-3),
    "last_position_zero": lambda y, m: y * (jnp.arange(5) < 4),
    "a_prefix_zero": lambda y, m: jnp.where(jnp.arange(5) < 2, 0.0, y),
    "a_constant_array": lambda y, m: y * np.arange(1, 6, dtype=np.float32),
    "masked": lambda y, m: jnp.where(m > 0, y, 0.0),
    "weighted": lambda y, m: y * m,
    "in_bits": lambda y, m: y / jnp.log(2.0),
    "no_label_where_zero": lambda y, m: y + jnp.log(m * m + 1),
}


@pytest.mark.parametrize("name", AROUND)
def test_what_comes_after_a_loss_is_none_of_it(name):
    def fn(x, w, labels, m):
        return AROUND[name](optax.softmax_cross_entropy_with_integer_labels(x @ w, labels), m)

    assert len(held_to(fn, bench.X, bench.W, bench.LABELS, bench.MASK)) == 1


LABELLED = {
    "position_masked": lambda labels: jnp.where(jnp.arange(5) < 4, labels, 0),
    "constant_mask": lambda labels: jnp.where(np.arange(5) % 2 == 0, labels, 1),
    "shifted": lambda labels: jnp.roll(labels, -1, axis=1),
    "one_more": lambda labels: (labels + 1) % 11,
    "clipped": lambda labels: jnp.clip(labels, 0, 8),
    "ignored": lambda labels: jnp.where(labels == 3, 0, labels),
}


@pytest.mark.parametrize("name", LABELLED)
def test_what_is_done_to_labels_is_none_of_it(name):
    def fn(x, w, labels):
        return optax.softmax_cross_entropy_with_integer_labels(x @ w, LABELLED[name](labels))

    assert len(held_to(fn, bench.X, bench.W, bench.LABELS)) == 1


@pytest.mark.parametrize("name", PUBLIC)
def test_the_head_loss_of_every_public_model_is_recognised(name):
    fn, args = PUBLIC[name]()
    (one,) = raised(fn, *args)
    assert not reasons(fn, *args)
    assert one.sizes["d"] == 192 and one.sizes["v"] == 416
    assert (one.meaning.bias is not None) == (name in ("bert", "vit"))


def case(name):
    each = bench.SPELLINGS[name]
    return each.fn, *each.args


def meaning(name):
    (one,) = raised(*case(name))
    return one.meaning


def test_operands_are_the_programs_own():
    (one,) = raised(*case("with_bias"))
    x, w, bias, labels = one.view.jaxpr.invars
    m = one.meaning
    assert (m.x.atom, m.w.atom, m.bias, m.labels.atom) == (x, w, bias, labels)
    assert (m.x.dims, m.w.dims) == (("A", "B", "d"), ("d", "v"))
    assert m.labels.dims == m.out.dims == ("A", "B")


def test_tokens_in_one_dimension_have_both_letters():
    m = meaning("flattened")
    assert (m.x.dims, m.labels.dims, m.out.dims) == (("A", "B", "d"), ("A", "B"), ("AB",))


def test_tokens_without_a_label_are_left_out():
    m = meaning("next_token")
    assert m.part == ((0, 2), (0, 4)) and meaning("tied").part is None


def test_what_is_done_to_the_logits_is_told():
    assert meaning("capped").cap == 30.0 and meaning("capped").scale == 1.0
    assert meaning("scaled").scale == pytest.approx(1 / 0.7, rel=1e-6)


def test_a_part_of_the_vocabulary_that_is_masked_away_is_told():
    assert meaning("padded").valid == 9 and meaning("tied").valid is None


def test_smoothing_z_loss_and_a_constant_are_told():
    m = meaning("smoothed_t5x")
    high, low = 0.9, 0.1 / (V - 1)
    least = high * math.log(high) + (V - 1) * low * math.log(low)
    assert (m.smoothing, m.z_loss, m.offset) == pytest.approx((low * V, 1e-4, least), rel=1e-4)


def test_a_log_probability_is_minus_the_loss_until_its_sign_is_changed():
    assert meaning("weighted").negative and not meaning("integer_labels").negative


def test_a_sum_over_everything_is_of_all_losses():
    m = meaning("summed_at_once")
    assert m.summed and m.out.dims == () and m.negative


def test_both_terms_are_given_where_no_value_is_the_loss():
    m = meaning("apart")
    assert m.out is None and m.lse is not None and m.picked is not None


def test_a_log_sum_exp_that_is_used_besides_is_given():
    m = meaning("z_loss")
    assert m.out is not None and m.lse is not None and not m.logits_used


def test_logits_that_an_accuracy_needs_are_told():
    (one,) = raised(*case("with_accuracy"))
    assert one.meaning.logits_used and "logits" in one.note
    assert not meaning("tied").logits_used


def test_what_a_label_outside_of_the_vocabulary_picks_is_told():
    def gathered(mode):
        def fn(x, w, labels):
            logp = jax.nn.log_softmax(x @ w)
            return -jnp.take_along_axis(logp, labels[:, None], 1, mode=mode)[:, 0]

        return fn

    args = array(5, 3), array(3, 7), array(5, dtype=jnp.int32)
    outside = {mode: raised(gathered(mode), *args)[0].meaning.outside for mode in ("fill", "clip")}
    # jax.numpy counts from the end before anything else.
    assert outside == {"fill": ("wrap", "nan"), "clip": ("wrap", "clamp")}
    assert meaning("one_hot_labels").outside == ("other", "other")  # not even the log-sum-exp is left
    assert meaning("by_hand").outside == ("none", "none")


def test_a_mask_made_of_the_labels_stays_outside():
    def fn(x, w, labels):
        losses = optax.softmax_cross_entropy_with_integer_labels(x @ w, jnp.where(labels < 0, 0, labels))
        return jnp.where(labels < 0, 0.0, losses).sum()

    (one,) = raised(fn, array(5, 3), array(3, 7), array(5, dtype=jnp.int32))
    values = run(one.view)
    loss, _, _ = computed(one, values)
    np.testing.assert_allclose(values[one.meaning.out.atom], loss, rtol=1e-5)
    assert "other" not in one.meaning.outside


def test_products_that_are_written_twice_are_one():
    (one,) = raised(*case("mapped"))
    assert not one.meaning.logits_used


def test_logits_that_are_given_are_no_head():
    assert not found(optax.softmax_cross_entropy_with_integer_labels, array(5, 7), array(5, dtype=jnp.int32))


def test_two_heads_of_one_stream_are_two_losses():
    def fn(x, w, other, labels):
        ahead = bench.integer_labels(x[:, :-1], other, labels[:, 1:])
        return bench.integer_labels(x, w, labels) + 0.3 * ahead

    args = bench.X, bench.W, bench.W, bench.LABELS
    assert len(raised(fn, *args)) == 2


def test_logits_of_several_products_are_declined():
    def fn(x, w, a, b, labels):
        return optax.softmax_cross_entropy_with_integer_labels(x @ w + (x @ a) @ b, labels)

    args = array(5, 3), array(3, 7), array(3, 2), array(2, 7), array(5, dtype=jnp.int32)
    assert not raised(fn, *args)
    assert any("several products" in why for why in reasons(fn, *args))


@pytest.mark.slow  # a vocabulary of a hundred thousand
def test_published_sizes_are_read_without_making_the_logits():
    args = array(8, 2048, 4096), array(4096, 128_256), array(8, 2048, dtype=jnp.int32)
    (one,) = raised(bench.integer_labels, *args)
    assert one.sizes == {"A": 8, "B": 2048, "d": 4096, "v": 128_256}
