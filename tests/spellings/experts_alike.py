"""Products with several weights that are none by expert: no data say which token takes which."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.spellings import LookAlike

T, D, F, E = 7, 3, 5, 4
X = jax.ShapeDtypeStruct((T, D), jnp.float32)
ROUTER = jax.ShapeDtypeStruct((D, E), jnp.float32)
UP = jax.ShapeDtypeStruct((E, D, F), jnp.float32)
DOWN = jax.ShapeDtypeStruct((E, F, D), jnp.float32)
MASK = jax.ShapeDtypeStruct((T,), jnp.bool_)
IDS = jax.ShapeDtypeStruct((T,), jnp.int32)
SIZES = jax.ShapeDtypeStruct((E,), jnp.int32)


def heads(x, up, down, mask):
    """A projection for each head, masked tokens zero."""
    y = jnp.einsum("thf,hfd->td", jnp.einsum("td,hdf->thf", x, up), down)
    return jnp.where(mask[:, None], y, 0.0)


def attention(x, up, down, mask):
    """Self-attention with a projection for each head."""
    q = jnp.einsum("td,hdf->htf", x, up)
    logits = jnp.where(mask[None, None, :], jnp.einsum("htf,hsf->hts", q, q), -1e30)
    return jnp.einsum("hts,hsf,hfd->td", jax.nn.softmax(logits), q, down)


def adapters_without_routing(x, up, down):
    return x + jnp.einsum("td,edf,efg->tg", x, up, down)


def ensemble(x, up, down):
    return jax.vmap(lambda w, v: jax.nn.relu(x @ w) @ v)(up, down).mean(0)


def ensemble_kept_apart(x, up, down, mask):
    """The results of all models, masked."""
    y = jax.vmap(lambda w, v: jax.nn.relu(x @ w) @ v)(up, down)
    return jnp.where(mask[None, :, None], y, 0.0)


def mixture_of_softmaxes(x, router, up):
    p = jax.nn.softmax(jnp.einsum("td,edf->tef", x, up), -1)
    return jnp.einsum("te,tef->tf", jax.nn.softmax(x @ router), p)


def soft_mixture(x, router, up, down):
    """Every token takes all experts, by softmax."""
    h = jax.nn.relu(jnp.einsum("td,edf->tef", x, up))
    return jnp.einsum("tef,efd,te->td", h, down, jax.nn.softmax(x @ router))


def soft_slots(x, router, up, down):
    """Soft MoE: the places of experts are means of all tokens."""
    logits = x @ router
    inside = jnp.einsum("td,te->ed", x, jax.nn.softmax(logits, 0))
    out = jnp.einsum("ef,efd->ed", jax.nn.gelu(jnp.einsum("ed,edf->ef", inside, up)), down)
    return jnp.einsum("ed,te->td", out, jax.nn.softmax(logits, 1))


def block_diagonal(x, up):
    wide = jnp.concatenate([x] * E, 1).reshape(T, E, D)
    return jnp.einsum("ted,edf->tef", wide, up).reshape(T, E * F)


def grouped_convolution(x, w):
    """Groups of channels, each with its kernel."""
    wide = jnp.concatenate([x] * E, 1)[None]
    return lax.conv_general_dilated(
        wide, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=E
    )


def by_position(x, up):
    """The token's place says which weights it takes."""
    return jnp.einsum("td,tdf->tf", x, up[jnp.arange(T) % E])


def by_halves(x, up, mask):
    """Fixed slices of tokens, a weight each."""
    y = jnp.concatenate([x[:3] @ up[0], x[3:5] @ up[1], x[5:] @ up[2]])
    return jnp.where(mask[:, None], y, 0.0)


def one_for_all(x, up, ids):
    """One choice for the whole batch, by the program's own number."""
    return (x @ up[2]) * (ids > 1)[:, None]


def layers(x, up, down):
    """A scan over layers, whose weights are stacked."""
    return lax.scan(lambda y, w: (y + jax.nn.relu(y @ w[0]) @ w[1], None), x, (up, down))[0]


def relu_units(x, up, down, mask):
    """Units that a ReLU switches off by data."""
    h = jax.nn.relu(jnp.einsum("td,edf->tef", x, up))
    return jnp.einsum("tef,efd->td", h, down) * mask[:, None]


def weighted_by_tokens(x, w, mask):
    """Weighted by what tokens give, all of them."""
    return jnp.where(mask[:, None], jnp.einsum("td,edf,te->tf", x, w, jnp.tanh(x @ w[:, :, 0].T)), 0.0)


def tokens_mixed(x, router, up, down):
    """What each expert gives is summed over all tokens before they take it."""
    mask = jax.nn.one_hot(jnp.argmax(x @ router, -1), E)
    inside = jnp.einsum("td,te->ed", x, mask)
    out = jnp.einsum("ef,efd->ed", jax.nn.gelu(jnp.einsum("ed,edf->ef", inside, up)), down)
    return jnp.einsum("ed,te->td", out, mask)


def combined_elsewhere(x, router, up, down):
    """Results go to other tokens than they came from."""
    mask = jax.nn.one_hot(jnp.argmax(x @ router, -1), E)
    place = jax.nn.one_hot(jnp.cumsum(mask, 0) - 1, T) * mask[..., None]
    inside = jnp.einsum("tec,td->ecd", place, x)
    out = jnp.einsum("ecf,efd->ecd", jax.nn.gelu(jnp.einsum("ecd,edf->ecf", inside, up)), down)
    return jnp.einsum("tec,ecd->td", place[::-1], out)


def gradient_of_weights(x, dy, sizes):
    """The ragged dimension is summed over."""
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
    )
    return lax.ragged_dot_general(x, dy, sizes, numbers)


WIDE = jax.ShapeDtypeStruct((T, F), jnp.float32)
KERNEL = jax.ShapeDtypeStruct((3, D, E * F), jnp.float32)

LOOKALIKES = {
    "heads": LookAlike(heads, (X, UP, DOWN, MASK)),
    "attention": LookAlike(attention, (X, UP, DOWN, MASK)),
    "adapters_without_routing": LookAlike(adapters_without_routing, (X, UP, DOWN)),
    "ensemble": LookAlike(ensemble, (X, UP, DOWN)),
    "ensemble_kept_apart": LookAlike(ensemble_kept_apart, (X, UP, DOWN, MASK)),
    "mixture_of_softmaxes": LookAlike(mixture_of_softmaxes, (X, ROUTER, UP)),
    "soft_mixture": LookAlike(soft_mixture, (X, ROUTER, UP, DOWN)),
    "soft_slots": LookAlike(soft_slots, (X, ROUTER, UP, DOWN)),
    "block_diagonal": LookAlike(block_diagonal, (X, UP)),
    "grouped_convolution": LookAlike(grouped_convolution, (X, KERNEL)),
    "by_position": LookAlike(by_position, (X, UP)),
    "by_halves": LookAlike(by_halves, (X, UP, MASK)),
    "one_for_all": LookAlike(one_for_all, (X, UP, IDS)),
    "layers": LookAlike(layers, (X, UP, DOWN)),
    "relu_units": LookAlike(relu_units, (X, UP, DOWN, MASK)),
    "weighted_by_tokens": LookAlike(weighted_by_tokens, (X, UP, MASK)),
    "tokens_mixed": LookAlike(tokens_mixed, (X, ROUTER, UP, DOWN), "other tokens"),
    "combined_elsewhere": LookAlike(combined_elsewhere, (X, ROUTER, UP, DOWN), "other tokens"),
    "gradient_of_weights": LookAlike(gradient_of_weights, (X, WIDE, SIZES), "summed over"),
}
