"""Small programs that between them use every higher-order primitive, nested in each other.

`Programs()` has one method a program; each takes a square matrix `w` [5, 5] and rows `x` [3, 5]. What they do
at the bottom, `tanh` and `dot`, is an option, so that a rewrite is tested as before and after: a rule takes
`Programs().scan` to `Programs(tanh=...).scan`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.sharding import Mesh, PartitionSpec

X = np.linspace(-1.0, 1.0, 15, dtype=np.float32).reshape(3, 5)
W = np.linspace(-0.5, 0.9, 25, dtype=np.float32).reshape(5, 5)
CONSTANT = jnp.asarray(np.linspace(0.3, 0.7, 5, dtype=np.float32))


@dataclasses.dataclass(frozen=True)
class Programs:
    """The programs, over one choice of what is at the bottom."""

    tanh: Callable[[Any], Any] = jnp.tanh
    dot: Callable[[Any, Any], Any] = jnp.matmul

    def layer(self, w, x):
        return self.tanh(self.dot(x, w)) * CONSTANT

    def layers(self, w, x):
        layer = jax.jit(self.layer)
        with jax.named_scope("decoder"):
            x = layer(w, layer(w, x))
            return jax.checkpoint(self.layer)(w, x)

    def nested_jit(self, w, x):
        @jax.jit
        def inner(x):
            return jax.jit(self.layer)(w, x) + jax.jit(self.layer)(w, x + 1)

        return inner(x)

    def scan(self, w, x):
        def body(carry, row):
            return self.layer(w, carry + row), (carry.sum(), row * 2)

        return jax.lax.scan(body, x[0], x)

    def scan_in_scan(self, w, x):
        def outer(carry, row):
            inner, _ = jax.lax.scan(lambda c, s: (self.layer(w, c) + s, None), carry, row)
            return inner, self.dot(inner, w)

        return jax.lax.scan(outer, x[0], x, reverse=True, unroll=2)

    def while_loop(self, w, x):
        def body(state):
            return state[0] + 1, state[1] + jnp.abs(self.layer(w, state[1])) + 0.1

        return jax.lax.while_loop(lambda s: (s[0] < 4) & (self.tanh(s[1]).sum() < 7.0), body, (0, x))

    def fori_loop(self, w, x):
        static = jax.lax.fori_loop(0, 3, lambda i, x: self.layer(w, x) + i, x)
        turns = jnp.int32(jnp.abs(static.sum())) % 3
        return jax.lax.fori_loop(0, turns, lambda i, x: self.layer(w, x), x)

    def cond(self, w, x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: self.dot(x, w), lambda x: self.layer(w, x), x)

    def switch(self, w, x):
        def last(x):
            return jax.lax.cond(x[0, 0] > 0, jnp.sin, lambda x: self.layer(w, x), x)

        return jax.lax.switch(jnp.argmax(x[0]) % 3, [lambda x: self.layer(w, x), lambda x: x, last], x)

    def softened(self, x):
        """Its derivative is a rule, and not what it would be without one."""

        @jax.custom_jvp
        def softened(x):
            return self.tanh(x) * CONSTANT

        @softened.defjvp
        def rule(primals, tangents):
            (x,), (t,) = primals, tangents
            return softened(x), (2 - self.tanh(x)) * t

        return softened(x)

    def custom_jvp(self, w, x):
        return self.softened(self.dot(x, w))

    def custom_jvp_in_scan(self, w, x):
        return jax.lax.scan(lambda c, r: (self.softened(self.dot(c, w)) + r, self.softened(r)), x[0], x)

    def clipped(self, x, w):
        """Its gradient is a rule, from what its forward pass saved."""

        @jax.custom_vjp
        def clipped(x, w):
            return self.tanh(self.dot(x, w)) * CONSTANT

        def forward(x, w):
            y = self.tanh(self.dot(x, w))
            return y * CONSTANT, (x, w, y)

        def backward(residuals, g):
            x, w, y = residuals
            g = jnp.clip(g, -1.0, 1.0) * (3 - y)
            return g @ w.T, x.T @ g

        clipped.defvjp(forward, backward)
        return clipped(x, w)

    def custom_vjp(self, w, x):
        return self.clipped(self.clipped(x, w), w)

    def custom_vjp_differentiates(self, w, x):
        """The rule itself calls jax.vjp."""

        @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
        def doubled(f, x):
            return f(x) * 2

        doubled.defvjp(lambda f, x: (f(x) * 2, x), lambda f, x, g: (jax.vjp(f, x)[1](g)[0] * 2,))
        return self.dot(doubled(jnp.sin, x), w)

    def custom_vjp_in_remat_in_scan(self, w, x):
        @jax.checkpoint
        def body(carry, row):
            return self.clipped((carry + row)[None], w)[0], carry

        return jax.lax.scan(body, x[0], x)

    def remat(self, w, x):
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        inner = jax.checkpoint(self.layer, policy=policy)
        return jax.checkpoint(lambda x: self.layer(w, inner(w, x)))(x)

    def vmapped(self, w, x):
        def one(row):
            return jax.lax.cond(row.sum() > 0, lambda r: self.layer(w, r), lambda r: self.softened(r), row)

        return jax.vmap(one)(x), jax.vmap(
            lambda r: jax.lax.fori_loop(0, 2, lambda _, r: self.layer(w, r), r)
        )(x)

    def gradient(self, w, x):
        return jax.value_and_grad(lambda w: (self.layer(w, x) ** 2).sum() + self.scan(w, x)[0].sum())(w)

    def gradient_of_gradient(self, w, x):
        def inner(w, x):
            return jax.grad(lambda x: (self.custom_jvp(w, x) ** 2).sum())(x).sum()

        return jax.grad(inner)(w, x)

    def has_aux(self, w, x):
        def loss(w, scale):
            y = self.layer(w, x) * scale
            return y.sum(), {"y": y, "none": None, "count": 3}

        (value, aux), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(w, 2.0)
        return value, aux["y"], [0.0] * aux["count"], grads

    def random(self, w, x):
        key, sub = jax.random.split(jax.random.key(3))

        def body(key, row):
            key, sub = jax.random.split(key)
            return key, row * jax.random.bernoulli(sub, 0.5, row.shape)

        last, rows = jax.lax.scan(body, key, x)
        old = jax.random.normal(jax.random.PRNGKey(0), (3,))
        return (
            jax.random.key_data(last),
            rows,
            jax.random.uniform(sub, (3,)),
            old,
            jax.nn.relu(self.dot(x, w)),
        )

    def debug_print(self, w, x):
        def body(carry, row):
            jax.debug.print("row {}", row.sum())
            return self.layer(w, carry) + row, None

        jax.debug.print("x {}", x[0, 0], ordered=True)
        return jax.lax.scan(body, x[0], x)[0]

    def callbacks(self, w, x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        y = jax.pure_callback(lambda a: np.asarray(a) * 2, shape, x, vmap_method="sequential")
        z = io_callback(lambda a: np.asarray(a) + 1, shape, y, ordered=True)
        return jax.lax.cond(z.sum() > 0, lambda z: self.layer(w, z), lambda z: z, z)

    def shard_map(self, w, x):
        mesh, p = Mesh(np.asarray(jax.devices()[:2]), ("model",)), PartitionSpec

        @functools.partial(jax.shard_map, mesh=mesh, in_specs=(p(), p("model")), out_specs=p())
        def inner(x, w):
            part = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index("model") * 2, 2, 1)
            y = jax.lax.psum(self.clipped(part, w), "model")
            return jax.lax.fori_loop(0, 2, lambda _, y: self.tanh(y) * CONSTANT, y)

        return inner(x[:, :4], w[:4])

    def pallas_call(self, w, x):
        def double(x_ref, o_ref):
            o_ref[...] = jnp.where(x_ref[...] > 0, jnp.tanh(x_ref[...]) * 2, 0.0)

        y = pl.pallas_call(double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)
        return self.layer(w, y)

    def refs(self, w, x):
        ref = jax.new_ref(jnp.zeros((5,), jnp.float32))

        def body(i, carry):
            ref[...] += self.layer(w, carry)
            return carry + ref[...]

        out = jax.lax.fori_loop(0, 3, body, x[0])
        ref[0] = self.tanh(out[0])
        return out, ref[...]

    def weak_types(self, w, x):
        half = self.tanh(jnp.asarray(0.5) * 1.0)
        weak = jax.lax.cond(x[0, 0] > 0, lambda: 1.0, lambda: self.tanh(2.0))
        count = jax.lax.fori_loop(0, 3, lambda i, n: n + i, 0)
        return half, weak, count, x * weak, self.dot(x, w).astype(jnp.bfloat16) * weak, jnp.arange(5) * count

    def integers(self, w, x):
        tokens = (self.tanh(x[0]) * 4).astype(jnp.int32)
        table = jnp.take(w, tokens, axis=0, mode="clip")
        order = jnp.argsort(x[1])
        w = jnp.asarray(w)
        return (
            table,
            jnp.asarray(x)[:, order],
            w.at[tokens].add(1.0, mode="drop"),
            jnp.cumsum(tokens),
            jax.lax.top_k(x, 2),
        )

    def linear_solve(self, w, x):
        matrix = self.dot(w, w.T) + 3 * jnp.eye(5)

        def apply(v):
            return matrix @ v + 0.1 * self.tanh(1.0) * v

        return jax.lax.custom_linear_solve(
            apply, x[0], lambda _, b: jnp.linalg.solve(matrix, b), symmetric=True
        )

    def associative(self, w, x):
        pairs = jax.lax.associative_scan(lambda a, b: a * self.tanh(b), x)
        return pairs, jax.lax.reduce(x, 0.0, jax.lax.add, (0,)), jax.lax.map(lambda r: self.layer(w, r), x)


NAMES = [
    name
    for name in vars(Programs)
    if not name.startswith("_") and name not in ("softened", "clipped", "tanh", "dot")
]
"""The programs; `softened` and `clipped` are parts of them."""

DIFFERENTIABLE = (
    "layer", "layers", "nested_jit", "scan", "scan_in_scan", "cond", "switch", "custom_jvp",
    "custom_jvp_in_scan", "custom_vjp", "custom_vjp_differentiates", "custom_vjp_in_remat_in_scan",
    "remat", "vmapped", "gradient", "gradient_of_gradient", "debug_print", "shard_map",
)  # fmt: skip
"""Those that can be differentiated from outside in reverse."""

DIFFERENTIATES = ("gradient", "gradient_of_gradient", "has_aux")
"""Those that differentiate inside: to replace tanh after that is not to differentiate what replaces it."""


def loss(program: Callable[..., Any]) -> Callable[..., Any]:
    """The program's floating-point results added up."""
    return lambda w, x: _sum(program(w, x))


def _sum(values: Any) -> Any:
    floats = [y for y in jax.tree.leaves(values) if jnp.issubdtype(y.dtype, jnp.floating)]
    return sum(jnp.sum(y * (i + 1)) for i, y in enumerate(floats))


def with_gradients(program: Callable[..., Any]) -> Callable[..., Any]:
    """The program's results and the gradients of their sum by both arguments, from one forward pass."""

    def summed(w, x):
        values = program(w, x)
        return _sum(values), values

    return lambda w, x: jax.value_and_grad(summed, (0, 1), has_aux=True)(w, x)


def flat(f: Callable[..., Any]) -> Callable[..., list[Any]]:
    """The function with its results in a list."""
    return lambda *args: jax.tree.leaves(f(*args))


def assert_same(one: Callable[..., Any], other: Callable[..., Any], *args: Any) -> None:
    """Both functions give the same values, up to rounding; compiled together, which is quicker."""
    a, b = jax.jit(lambda *args: (flat(one)(*args), flat(other)(*args)))(*args)
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
