"""RMSNorm and LayerNorm as they are written, and what looks like them."""

import jax
import jax.numpy as jnp
from flax import linen, nnx

from tests.spellings import LookAlike, Spelling

B, T, N, D = 2, 5, 3, 7
X = jax.ShapeDtypeStruct((B, T, D), jnp.float32)
X16 = jax.ShapeDtypeStruct((B, T, D), jnp.bfloat16)
HEADS = jax.ShapeDtypeStruct((B, T, N, D), jnp.float32)
MAP = jax.ShapeDtypeStruct((B, D, T, N), jnp.float32)
W = jax.ShapeDtypeStruct((D,), jnp.float32)
W16 = jax.ShapeDtypeStruct((D,), jnp.bfloat16)
WIDE = jax.ShapeDtypeStruct((N, D), jnp.float32)
SQUARE = jax.ShapeDtypeStruct((B, D, D), jnp.float32)
PROJECT = jax.ShapeDtypeStruct((D, 11), jnp.float32)

RMS = {"kind": "rms", "scale": True, "shift": False, "epsilon": 1e-6}
LAYER = {"kind": "layer", "scale": True, "shift": True, "epsilon": 1e-5}


# ---------------------------------------------------------------- RMSNorm


def rms(x, w):
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6) * w


def rms_llama(x, w):
    """As Hugging Face's Flax Llama: pow, mean, division by the square root, the weight on the left."""
    variance = jnp.power(jnp.asarray(x, jnp.float32), 2).mean(-1, keepdims=True)
    return w * jnp.asarray(x / jnp.sqrt(variance + 1e-6), x.dtype)


def rms_reciprocal(x, w):
    """The sum over n, and one over the root; the weight first."""
    total = jnp.sum(x * x, axis=-1) / x.shape[-1]
    return (x * w) * (1.0 / jnp.sqrt(1e-6 + total))[..., None]


def rms_einsum(x, w):
    """The product of each row with itself; the power of -1/2."""
    mean = jnp.einsum("btd,btd->bt", x, x) * (1.0 / x.shape[-1])
    return jnp.einsum("btd,bt,d->btd", x, jnp.power(mean + 1e-6, -0.5), w)


def rms_gemma(x, w):
    """As Gemma: float32 inside, 1 + weight, cast at the end."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
    return (normed * (1.0 + w.astype(jnp.float32))).astype(x.dtype)


def rms_cast_between(x, w):
    """As Llama in bfloat16: cast before the weight."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return normed.astype(x.dtype) * w


def rms_statistics_only_wide(x, w):
    """As T5X: only the statistics are float32; the input is scaled in its own dtype."""
    mean = jnp.mean(jax.lax.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    return (x * jax.lax.rsqrt(mean + 1e-6).astype(x.dtype)) * w


def rms_folded_root(x, w):
    """Rows of length one, times the root of their number of elements: epsilon is divided by it too."""
    root = jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + x.shape[-1] * 1e-6)
    return x / root * x.shape[-1] ** 0.5 * w


def rms_two_axes(x, w):
    """Over heads and their dimensions together."""
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=(-2, -1), keepdims=True) + 1e-6) * w


def rms_of_heads(x):
    """On queries, without weights."""
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def rms_vmapped(x, w):
    """A function of one row."""
    return jax.vmap(jax.vmap(lambda row: row * w / jnp.sqrt(jnp.dot(row, row) / row.size + 1e-6)))(x)


def rms_channels_first(x, w):
    mean = jnp.mean(x * x, axis=1, keepdims=True)
    return w[:, None, None] * (x * jax.lax.rsqrt(mean + 1e-6))


def rms_in_scan(x, w):
    """A loop over positions."""
    return jax.lax.scan(lambda c, row: (c, rms(row, w)), 0, x.swapaxes(0, 1))[1]


def rms_statistic_returned(x, w):
    """Its mean of squares is a result too."""
    mean = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean + 1e-6) * w, mean


def rms_linen(x, w):
    return linen.RMSNorm(epsilon=1e-6).apply({"params": {"scale": w}}, x)


def rms_nnx(x, w):
    norm = nnx.RMSNorm(D, epsilon=1e-6, rngs=nnx.Rngs(0))
    norm.scale[...] = w
    return norm(x)


# ---------------------------------------------------------------- LayerNorm


def layer(x, w, b):
    mean = jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(x - mean), axis=-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + 1e-5) * w + b


def layer_var(x, w, b):
    return w * (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) + b


def layer_moments(x, w, b):
    """E[x^2] - E[x]^2, clipped at zero; the weight on the reciprocal root."""
    mean = jnp.sum(x, -1) / x.shape[-1]
    variance = jnp.maximum(0.0, jnp.mean(x * x, -1) - mean * mean)
    by = jax.lax.rsqrt(variance + 1e-5)[..., None] * w
    return (x - mean[..., None]) * by + b


def layer_affine(x, w, b):
    """One product and one sum: x a + (b - mean a)."""
    mean = x.mean(-1, keepdims=True)
    a = w * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) - mean**2 + 1e-5)
    return x * a + (b - mean * a)


def layer_standardized(x, w, b):
    return jax.nn.standardize(x, axis=-1, epsilon=1e-5) * w + b


def layer_of_mean_matrix(x, w, b):
    """The mean by a product with a vector of ones."""
    ones = jnp.full((x.shape[-1],), 1.0 / x.shape[-1], x.dtype)
    centred = x - (x @ ones)[..., None]
    return centred * (((centred * centred) @ ones)[..., None] + 1e-5) ** -0.5 * w + b


def layer_linen(x, w, b):
    return linen.LayerNorm(epsilon=1e-5).apply({"params": {"scale": w, "bias": b}}, x)


def layer_linen_two_pass(x, w, b):
    norm = linen.LayerNorm(epsilon=1e-5, use_fast_variance=False, dtype=jnp.float32)
    return norm.apply({"params": {"scale": w, "bias": b}}, x)


def layer_nnx(x, w, b):
    norm = nnx.LayerNorm(D, epsilon=1e-5, rngs=nnx.Rngs(0))
    norm.scale[...], norm.bias[...] = w, b
    return norm(x)


def layer_without_shift(x, w):
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * w


def layer_conditioned(x, a, c):
    """As in DiT: the norm has no weights, what follows comes from the condition."""
    centred = x - x.mean(-1, keepdims=True)
    normed = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return normed * (1 + a[:, None, :]) + c[:, None, :]


def layer_narrow(x, w, b):
    """bfloat16 in and out, float32 between."""
    wide = x.astype(jnp.float32)
    mean, mean2 = wide.mean(-1, keepdims=True), jnp.square(wide).mean(-1, keepdims=True)
    normed = (wide - mean) * jax.lax.rsqrt(jnp.maximum(mean2 - mean**2, 0) + 1e-5)
    return (normed * w + b).astype(x.dtype)


def both_in_a_block(x, w, b, kernel):
    """Two norms, the second of a sum with what follows from the first."""
    y = x + jnp.tanh(layer(x, w, b) @ kernel) @ kernel.T
    return rms(y, w)


CONDITION = jax.ShapeDtypeStruct((B, D), jnp.float32)

SPELLINGS = {
    "rms": Spelling(rms, (X, W), RMS | {"axes": {"batch": B * T, "embed": D}}),
    "rms_llama": Spelling(rms_llama, (X, W), RMS),
    "rms_reciprocal": Spelling(rms_reciprocal, (X, W), RMS),
    "rms_einsum": Spelling(rms_einsum, (X, W), RMS),
    "rms_gemma": Spelling(rms_gemma, (X16, W16), RMS),
    "rms_cast_between": Spelling(rms_cast_between, (X16, W16), RMS),
    "rms_statistics_only_wide": Spelling(rms_statistics_only_wide, (X16, W16), RMS),
    "rms_folded_root": Spelling(rms_folded_root, (X, W), RMS),
    "rms_two_axes": Spelling(rms_two_axes, (HEADS, WIDE), RMS | {"axes": {"batch": B * T, "embed": N * D}}),
    "rms_of_heads": Spelling(rms_of_heads, (HEADS,), RMS | {"scale": False}),
    "rms_vmapped": Spelling(rms_vmapped, (X, W), RMS),
    "rms_channels_first": Spelling(rms_channels_first, (MAP, W), RMS),
    "rms_in_scan": Spelling(rms_in_scan, (X, W), RMS),
    "rms_statistic_returned": Spelling(rms_statistic_returned, (X, W), RMS),
    "rms_linen": Spelling(rms_linen, (X, W), RMS),
    "rms_nnx": Spelling(rms_nnx, (X, W), RMS),
    "rms_in_remat": Spelling(jax.checkpoint(rms_llama), (X, W), RMS),
    "rms_in_jit": Spelling(jax.jit(rms_gemma), (X16, W16), RMS),
    "layer": Spelling(layer, (X, W, W), LAYER),
    "layer_var": Spelling(layer_var, (X, W, W), LAYER),
    "layer_moments": Spelling(layer_moments, (X, W, W), LAYER),
    "layer_affine": Spelling(layer_affine, (X, W, W), LAYER),
    "layer_standardized": Spelling(layer_standardized, (X, W, W), LAYER),
    "layer_of_mean_matrix": Spelling(layer_of_mean_matrix, (X, W, W), LAYER),
    "layer_linen": Spelling(layer_linen, (X, W, W), LAYER),
    "layer_linen_two_pass": Spelling(layer_linen_two_pass, (X16, W, W), LAYER),
    "layer_nnx": Spelling(layer_nnx, (X, W, W), LAYER),
    "layer_without_shift": Spelling(layer_without_shift, (X, W), LAYER | {"shift": False}),
    "layer_conditioned": Spelling(
        layer_conditioned, (X, CONDITION, CONDITION), LAYER | {"scale": False, "shift": False}
    ),
    "layer_narrow": Spelling(layer_narrow, (X16, W16, W16), LAYER),
    "both_in_a_block": Spelling(both_in_a_block, (X, W, W, PROJECT), {"scale": True}, count=2),
}


# ---------------------------------------------------------------- look-alikes


def _layer(x, variance, centred=None):
    centred = x - x.mean(-1, keepdims=True) if centred is None else centred
    return centred * jax.lax.rsqrt(variance + 1e-5)


def length_one(x, w):
    """Rows of length one: the sum of squares, not the mean."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6) * w


def unbiased(x, w):
    return _layer(x, x.var(-1, ddof=1, keepdims=True)) * w


def other_axis(x, w):
    """Of a square matrix, the mean of columns where rows are divided."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, 1) + 1e-6)[:, :, None] * w


def by_maximum(x, w):
    return x / (jnp.max(jnp.abs(x), -1, keepdims=True) + 1e-6) * w


def by_maximum_of_squares(x, w):
    return x * jax.lax.rsqrt(jnp.max(x * x, -1, keepdims=True) + 1e-6) * w


def without_square(x, w):
    return x * jax.lax.rsqrt(jnp.mean(jnp.abs(x), -1, keepdims=True) + 1e-6) * w


def centred_above_alone(x, w):
    """Centred, and divided by the mean of squares of what is not."""
    return _layer(x, jnp.mean(x * x, -1, keepdims=True)) * w


def centred_below_alone(x, w):
    return _layer(x, x.var(-1, keepdims=True), x) * w


def epsilon_outside(x, w):
    return x / (jnp.sqrt(jnp.mean(x * x, -1, keepdims=True)) + 1e-3) * w


def epsilon_as_bound(x, w):
    return x * jax.lax.rsqrt(jnp.maximum(jnp.mean(x * x, -1, keepdims=True), 1e-3)) * w


def without_root(x, w):
    return x / (jnp.mean(x * x, -1, keepdims=True) + 1e-6) * w


def multiplied(x, w):
    """By the root, not by one over it."""
    return x * jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * w


def of_another(x, y):
    """One value is measured, another divided."""
    return y * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def group_norm(x, w):
    """Groups of channels, with all positions."""
    groups = x.reshape(*x.shape[:-1], 2, -1)
    mean, variance = groups.mean((1, 3), keepdims=True), groups.var((1, 3), keepdims=True)
    return ((groups - mean) * jax.lax.rsqrt(variance + 1e-5)).reshape(x.shape) * w


def batch_norm(x, w):
    mean, variance = x.mean((0, 1)), x.var((0, 1))
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * w


def running(x, mean, variance):
    """With statistics that are given."""
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5)


def masked_statistics(x, keep):
    """Of some elements alone."""
    mean = jnp.sum(x * x * keep, -1, keepdims=True) / jnp.sum(keep, -1, keepdims=True)
    return x * jax.lax.rsqrt(mean + 1e-6)


def half_the_row(x, w):
    """The statistics of the first elements of a row."""
    return x * jax.lax.rsqrt(jnp.mean(x[..., :4] ** 2, -1, keepdims=True) + 1e-6) * w


def whole_array(x):
    """Advantages: over everything."""
    return (x - x.mean()) * jax.lax.rsqrt(x.var() + 1e-5)


def fourth_power(x, w):
    return x * jnp.power(jnp.mean(x**4, -1, keepdims=True) + 1e-6, -0.25) * w


def global_clip(x, y):
    """Both by their common length."""
    length = jnp.sqrt(jnp.sum(x * x) + jnp.sum(y * y))
    return x / length, y / length


def adam(m, v):
    return m / (jnp.sqrt(v) + 1e-8)


def weight_length(w):
    """A weight over the lengths of its columns."""
    return w / jnp.sqrt(jnp.sum(w * w, 0, keepdims=True))


def nonlinear(x, w):
    """Squashed before it is divided."""
    return jnp.tanh(x) * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * w


@jax.custom_vjp
def own_rule(x, w):
    """Its derivative is its own affair."""
    return rms(x, w)


own_rule.defvjp(lambda x, w: (rms(x, w), (x, w)), lambda saved, g: jax.vjp(rms, *saved)[1](g))

EVEN = jax.ShapeDtypeStruct((B, T, 6), jnp.float32)
ROW = jax.ShapeDtypeStruct((6,), jnp.float32)

LOOKALIKES = {
    "length_one": LookAlike(length_one, (X, W)),
    "unbiased": LookAlike(unbiased, (X, W), "n - 1"),
    "other_axis": LookAlike(other_axis, (SQUARE, W)),
    "by_maximum": LookAlike(by_maximum, (X, W)),
    "by_maximum_of_squares": LookAlike(by_maximum_of_squares, (X, W)),
    "without_square": LookAlike(without_square, (X, W)),
    "centred_above_alone": LookAlike(centred_above_alone, (X, W), "mean"),
    "centred_below_alone": LookAlike(centred_below_alone, (X, W), "mean"),
    "epsilon_outside": LookAlike(epsilon_outside, (X, W), "epsilon"),
    "epsilon_as_bound": LookAlike(epsilon_as_bound, (X, W), "epsilon"),
    "without_root": LookAlike(without_root, (X, W)),
    "multiplied": LookAlike(multiplied, (X, W)),
    "of_another": LookAlike(of_another, (X, X)),
    "group_norm": LookAlike(group_norm, (EVEN, ROW)),
    "batch_norm": LookAlike(batch_norm, (X, W), "axes"),
    "running": LookAlike(running, (X, W, W)),
    "masked_statistics": LookAlike(masked_statistics, (X, X)),
    "half_the_row": LookAlike(half_the_row, (X, W)),
    "whole_array": LookAlike(whole_array, (X,)),
    "fourth_power": LookAlike(fourth_power, (X, W)),
    "global_clip": LookAlike(global_clip, (X, X)),
    "adam": LookAlike(adam, (X, X)),
    "weight_length": LookAlike(weight_length, (PROJECT,)),
    "nonlinear": LookAlike(nonlinear, (X, W)),
    "own_rule": LookAlike(own_rule, (X, W)),
}
