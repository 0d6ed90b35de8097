"""Look-alikes of attention: heads in another order, or weights or logits that are used elsewhere."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.spellings import LookAlike
from tests.spellings.attention_parts import attend, by_name, mix, qkv, scores

# ---------------------------------------------------------------- grouped heads


def heads_tiled(q, k, v):
    k, v = (jnp.tile(x, (1, 1, 2, 1)) for x in (k, v))
    return attend(scores(q, k), v)


def heads_concatenated_with_themselves(q, k, v):
    k, v = (jnp.concatenate([x, x], axis=2) for x in (k, v))
    return attend(scores(q, k), v)


def keys_repeated_and_values_tiled(q, k, v):
    return attend(scores(q, jnp.repeat(k, 2, axis=2)), jnp.tile(v, (1, 1, 2, 1)))


def keys_tiled_and_values_repeated(q, k, v):
    return attend(scores(q, k[:, :, jnp.arange(6) % 3]), v[:, :, jnp.arange(6) // 2])


# ---------------------------------------------------------------- what else is made of the weights


def weights_returned(q, k, v):
    w = jax.nn.softmax(scores(q, k))
    return mix(w, v), w


def weights_averaged_over_heads_returned(q, k, v):
    w = jax.nn.softmax(scores(q, k))
    return mix(w, v), w.mean(1)


def entropy_of_the_weights_in_the_loss(q, k, v):
    w = jax.nn.softmax(scores(q, k))
    return (mix(w, v) ** 2).mean() + 0.1 * (w * jnp.log(w)).sum(-1).mean()


def logits_held_small_by_the_loss(q, k, v):
    x = scores(q, k)
    return attend(x, v).sum() + 1e-3 * (x**2).mean()


def logits_returned(q, k, v):
    x = scores(q, k)
    return attend(x, v), x


def weights_mixed_with_those_before(q, k, v):
    w = jax.nn.softmax(scores(q, k))
    return mix(0.5 * w + 0.5 * jax.nn.softmax(scores(k, q)), v)


def weights_for_two_layouts_of_values(q, k, v):
    w = jax.nn.softmax(scores(q, k))
    return mix(w, v), jnp.einsum("bhqk,bqhd->bkhd", w, v)


def weights_out_of_a_scan(q, k, v):
    def layer(x, _):
        w = jax.nn.softmax(scores(x, k))
        return mix(w, v), w[:, :, -1]

    return lax.scan(layer, q, None, 2)


GROUPS = qkv(n=6, kv=3)
USED = "elsewhere"
ORDER = "til|repeat|order"

LOOKALIKES = by_name(
    LookAlike(heads_tiled, GROUPS, ORDER),
    LookAlike(heads_concatenated_with_themselves, GROUPS, ORDER),
    LookAlike(keys_repeated_and_values_tiled, GROUPS),
    LookAlike(keys_tiled_and_values_repeated, GROUPS),
    LookAlike(weights_returned, qkv(), USED),
    LookAlike(weights_averaged_over_heads_returned, qkv(), USED),
    LookAlike(entropy_of_the_weights_in_the_loss, qkv(), USED),
    LookAlike(logits_held_small_by_the_loss, qkv(), USED),
    LookAlike(logits_returned, qkv(), USED),
    LookAlike(weights_mixed_with_those_before, qkv()),
    LookAlike(weights_for_two_layouts_of_values, qkv(), USED),
    LookAlike(weights_out_of_a_scan, qkv(), USED),
)
