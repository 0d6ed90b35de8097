"""Products by expert as they are written: ragged, dispatched one-hot, in buffers, in loops, or all and a
choice.
"""

import jax
import jax.numpy as jnp
from jax import lax

from tests.spellings import Spelling, experts_alike, experts_models, experts_others, experts_ways

T, D, F, E, K = 7, 3, 5, 4, 2
X = jax.ShapeDtypeStruct((T, D), jnp.float32)
X16 = jax.ShapeDtypeStruct((T, D), jnp.bfloat16)
XB = jax.ShapeDtypeStruct((2, T, D), jnp.float32)
ROUTER = jax.ShapeDtypeStruct((D, E), jnp.float32)
UP = jax.ShapeDtypeStruct((E, D, F), jnp.float32)
UP16 = jax.ShapeDtypeStruct((E, D, F), jnp.bfloat16)
DOWN = jax.ShapeDtypeStruct((E, F, D), jnp.float32)
IDS = jax.ShapeDtypeStruct((T,), jnp.int32)
SIZES = jax.ShapeDtypeStruct((E,), jnp.int32)

SWIGLU = (X, ROUTER, UP, UP, DOWN)
PLAIN = (X, ROUTER, UP, DOWN)


def top(x, router):
    """(weights, experts) of each token's best."""
    weights, chosen = lax.top_k(jax.nn.softmax(x @ router, -1), K)
    return weights / weights.sum(-1, keepdims=True), chosen


def gates(x, router):
    """The weights laid out over all experts, zeros where not chosen."""
    weights, chosen = top(x, router)
    return jnp.einsum("tk,tke->te", weights, jax.nn.one_hot(chosen, E))


def ragged_sorted(x, router, gate, up, down):
    """As MaxText and Mixtral: repeated, sorted by expert, three ragged products, put back and summed."""
    weights, chosen = top(x, router)
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat)
    rows = jnp.take(x, order // K, axis=0)
    sizes = jnp.bincount(flat, length=E)
    h = jax.nn.silu(lax.ragged_dot(rows, gate, sizes)) * lax.ragged_dot(rows, up, sizes)
    y = jnp.take(lax.ragged_dot(h, down, sizes), jnp.argsort(order), axis=0)
    return (y.reshape(T, K, D) * weights[..., None]).sum(1)


def ragged_scattered(x, router, up, down):
    """Group sizes from a one-hot sum, results added where their tokens are."""
    weights, chosen = top(x, router)
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat)
    sizes = jax.nn.one_hot(flat, E, dtype=jnp.int32).sum(0)
    y = lax.ragged_dot(jax.nn.relu(lax.ragged_dot(x[order // K], up, sizes)), down, sizes)
    return jnp.zeros((T, D)).at[order // K].add(y * weights.reshape(-1)[order][:, None])


def ragged_alone(x, w, sizes):
    return lax.ragged_dot(x, w, sizes)


def ragged_half(x, w, sizes):
    return lax.ragged_dot(x, w, sizes, preferred_element_type=jnp.float32)


def ragged_transposed(x, w, sizes):
    """Weights stored output first."""
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
    )
    return lax.ragged_dot_general(x, w, sizes, numbers)


def capacity(x, router, up, down):
    """As Mesh TensorFlow and flaxformer: dispatch and combine tensors of tokens, experts and places."""
    weights, chosen = top(x, router)
    mask = jax.nn.one_hot(chosen[:, 0], E)
    place = (jnp.cumsum(mask, 0) * mask - 1).max(-1).astype(jnp.int32)
    dispatch = mask[:, :, None] * jax.nn.one_hot(place, 4)[:, None, :]
    inside = jnp.einsum("tec,td->ecd", dispatch, x)
    h = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", inside, up))
    out = jnp.einsum("ecf,efd->ecd", h, down)
    return jnp.einsum("tec,ecd->td", dispatch * weights[:, :1, None], out)


def capacity_booleans(x, router, up, down):
    """The dispatch mask is of booleans, cast at the einsum; experts outermost by a transposition."""
    chosen = jnp.argmax(x @ router, -1)
    mask = chosen[:, None] == jnp.arange(E)
    place = jnp.cumsum(mask, 0) - 1
    dispatch = mask[..., None] & (place[..., None] == jnp.arange(5))
    inside = jnp.einsum("td,tec->ced", x, dispatch.astype(x.dtype))
    h = jnp.tanh(jnp.einsum("ced,edf->cef", inside, up))
    out = jnp.einsum("cef,efd->ced", h, down)
    return jnp.einsum("ced,tec->td", out, dispatch.astype(x.dtype))


def buffers(x, router, gate, up, down):
    """Scattered into places of each expert's buffer, and gathered back."""
    chosen = jnp.argmax(x @ router, -1)
    mask = jax.nn.one_hot(chosen, E, dtype=jnp.int32)
    place = jnp.take_along_axis(jnp.cumsum(mask, 0) - 1, chosen[:, None], 1)[:, 0]
    inside = jnp.zeros((E, T, D)).at[chosen, place].set(x)
    h = jax.nn.silu(jnp.einsum("ecd,edf->ecf", inside, gate)) * jnp.einsum("ecd,edf->ecf", inside, up)
    return jnp.einsum("ecf,efd->ecd", h, down)[chosen, place]


def python_loop(x, router, up, down):
    """A sum over experts, each on all tokens, masked."""
    g = gates(x, router)
    y = jnp.zeros_like(x)
    for e in range(E):
        y = y + jax.nn.relu(x @ up[e]) @ down[e] * g[:, e, None]
    return y


def python_loop_where(x, router, gate, up, down):
    """The result of each expert is put where its tokens are."""
    chosen = jnp.argmax(x @ router, -1)
    y = jnp.zeros_like(x)
    for e in range(E):
        h = (jax.nn.silu(x @ gate[e]) * (x @ up[e])) @ down[e]
        y = jnp.where((chosen == e)[:, None], h, y)
    return y


def scanned(x, router, up, down):
    g = gates(x, router)

    def turn(y, each):
        w, v, own = each
        return y + own[:, None] * (jax.nn.gelu(x @ w) @ v), None

    return lax.scan(turn, jnp.zeros_like(x), (up, down, g.T))[0]


def counted(x, router, up, down):
    """A fori_loop that takes expert e's weights, tokens compared with e."""
    chosen = jnp.argmax(x @ router, -1)

    def turn(e, y):
        return y + jnp.where((chosen == e)[:, None], jax.nn.relu(x @ up[e]) @ down[e], 0.0)

    return lax.fori_loop(0, E, turn, jnp.zeros_like(x))


def mapped(x, router, up, down):
    """lax.map over experts, then the weighted sum."""
    every = lax.map(lambda w: jax.nn.gelu(x @ w[0]) @ w[1], (up, down))
    return jnp.einsum("etd,te->td", every, gates(x, router))


def every_expert(x, router, gate, up, down):
    """All experts on all tokens, and the weighted sum, mostly of zeros."""
    h = jax.nn.silu(jnp.einsum("td,edf->tef", x, gate)) * jnp.einsum("td,edf->tef", x, up)
    return jnp.einsum("tef,efd,te->td", h, down, gates(x, router))


def every_expert_then_taken(x, router, up, down):
    """All experts, of which each token takes two."""
    weights, chosen = top(x, router)
    every = jnp.einsum("tef,efd->ted", jax.nn.relu(jnp.einsum("td,edf->tef", x, up)), down)
    return (jnp.take_along_axis(every, chosen[..., None], 1) * weights[..., None]).sum(1)


def vmapped(x, router, up, down):
    """One expert's function, vmapped over the weights."""
    every = jax.vmap(lambda w, v: jnp.tanh(x @ w) @ v)(up, down)
    return jnp.sum(every * gates(x, router).T[..., None], 0)


def looked_up(x, router, up, down):
    """Each token's weights are gathered."""
    chosen = jnp.argmax(x @ router, -1)
    h = jax.nn.relu(jnp.einsum("td,tdf->tf", x, up[chosen]))
    return jnp.einsum("tf,tfd->td", h, down[chosen])


def looked_up_by_id(x, w, ids):
    """As a bank of adapters, one for each request."""
    return jax.vmap(lambda row, i: row @ w[i])(x, ids)


def sorted_masked(x, router, up):
    """Tokens times their one-hot expert, contracted with weights over both."""
    chosen = jnp.argmax(x @ router, -1)
    wide = x[:, None, :] * jax.nn.one_hot(chosen, E)[:, :, None]
    return jnp.einsum("ted,edf->tf", wide, up)


def batched(x, router, up, down):
    """Sequences in a batch, half precision, experts last in the weights."""
    g = jnp.where(jax.nn.softmax(x @ router) >= jax.nn.softmax(x @ router).max(-1, keepdims=True), 1.0, 0.0)
    h = jax.nn.gelu(jnp.einsum("btd,dfe->btef", x, up))
    return jnp.einsum("btef,fde,bte->btd", h, down, g)


def _case(fn, args, style, products, count=1):
    return Spelling(fn, args, {"style": style, "experts": E, "products": products}, count)


LAST_UP = jax.ShapeDtypeStruct((D, F, E), jnp.float32)
LAST_DOWN = jax.ShapeDtypeStruct((F, D, E), jnp.float32)

SPELLINGS = {
    "ragged_sorted": _case(ragged_sorted, SWIGLU, "ragged_dot", 3),
    "ragged_scattered": _case(ragged_scattered, PLAIN, "ragged_dot", 2),
    "ragged_alone": _case(ragged_alone, (X, UP, SIZES), "ragged_dot", 1),
    "ragged_half": _case(ragged_half, (X16, UP16, SIZES), "ragged_dot", 1),
    "ragged_transposed": _case(ragged_transposed, (X, DOWN, SIZES), "ragged_dot", 1),
    "capacity": _case(capacity, PLAIN, "one_hot", 2),
    "capacity_booleans": _case(capacity_booleans, PLAIN, "one_hot", 2),
    "buffers": _case(buffers, SWIGLU, "sorted", 3),
    "python_loop": _case(python_loop, PLAIN, "loop", 2),
    "python_loop_where": _case(python_loop_where, SWIGLU, "loop", 3),
    "scanned": _case(scanned, PLAIN, "loop", 2),
    "counted": _case(counted, PLAIN, "loop", 2),
    "mapped": _case(mapped, PLAIN, "loop", 2),
    "every_expert": _case(every_expert, SWIGLU, "all", 3),
    "every_expert_then_taken": _case(every_expert_then_taken, PLAIN, "all", 2),
    "vmapped": _case(vmapped, PLAIN, "all", 2),
    "looked_up": _case(looked_up, PLAIN, "gathered", 2),
    "looked_up_by_id": _case(looked_up_by_id, (X, UP, IDS), "gathered", 1),
    "sorted_masked": _case(sorted_masked, (X, ROUTER, UP), "sorted", 1),
    "batched": _case(batched, (XB, ROUTER, LAST_UP, LAST_DOWN), "all", 2),
}

SPELLINGS |= experts_ways.SPELLINGS | experts_models.SPELLINGS
LOOKALIKES = experts_alike.LOOKALIKES | experts_others.LOOKALIKES | experts_models.LOOKALIKES
