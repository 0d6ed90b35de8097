"""What each primitive ties, and what must never be tied."""

import dataclasses
import functools
import string
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from xform import higher_order
from xform.axes import Axes, Dim, Factor, find_axes


def arrays(*shapes: str | tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
    """Abstract arguments: (3, 5) is float32, "i3,5" integers, "k" a random key."""
    made = []
    for shape in shapes:
        if shape == "k":
            made.append(jax.eval_shape(lambda: jax.random.key(0)))
        elif isinstance(shape, str):
            made.append(jax.ShapeDtypeStruct([int(n) for n in shape[1:].split(",") if n], jnp.int32))
        else:
            made.append(jax.ShapeDtypeStruct(shape, jnp.float32))
    return made


def analysed(fn: Callable, *shapes: str | tuple[int, ...]) -> Axes:
    return find_axes(jax.make_jaxpr(fn)(*arrays(*shapes)))


class Spelling:
    """Letters for factors, in the order in which they are met: two axes are the same if their letters are."""

    def __init__(self) -> None:
        self.letters: dict[Factor, str] = {}

    def dim(self, dim: Dim) -> str:
        return (
            "".join(self.letters.setdefault(f, string.ascii_letters[len(self.letters)]) for f in dim) or "1"
        )

    def dims(self, dims: Iterable[Dim]) -> str:
        return " ".join(map(self.dim, dims))


def spelled(fn: Callable, *shapes: str | tuple[int, ...]) -> str:
    """The axes of a function's inputs and results: "a b, b c -> a c" is a matrix product."""
    axes = analysed(fn, *shapes)
    spell, root, jaxpr = Spelling(), axes.root, axes.jaxpr
    sides = [[spell.dims(root[v]) for v in vs] for vs in (jaxpr.invars, jaxpr.outvars)]
    return " -> ".join(", ".join(side) for side in sides)


def convolve(x: Any, w: Any, stride: int = 1, padding: Any = "VALID", groups: int = 1) -> jax.Array:
    spec = ("NHC", "HIO", "NHC")
    return lax.conv_general_dilated(
        x, w, (stride,), padding, dimension_numbers=spec, feature_group_count=groups
    )


def sharded(f: Callable, in_specs: Any, out_specs: Any) -> Callable:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("d",))
    return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


@jax.custom_vjp
def doubled(x: Any) -> Any:
    return x * 2.0


doubled.defvjp(lambda x: (x * 2.0, None), lambda _, g: (g * 2.0,))

TIES: dict[str, tuple[Callable, tuple[str | tuple[int, ...], ...], str]] = {
    "elementwise": (lambda x, y: jnp.sin(x) + y, ((3, 5), (3, 5)), "a b, a b -> a b"),
    "scalars": (lambda x, y: x * y + 1.0, ((3, 5), ()), "a b,  -> a b"),
    "broadcast of size 1": (lambda x, y: x * y, ((3, 5), (1, 5)), "a b, 1 b -> a b"),
    "broadcast both ways": (lambda x, y: x - y, ((3, 1), (1, 5)), "a 1, 1 b -> a b"),
    "select": (lambda c, x, y: jnp.where(c > 0, x, y), ((3,), (3,), (3,)), "a, a, a -> a"),
    "clamp": (lambda x: jnp.clip(x, 0.0, 1.0), ((3, 5),), "a b -> a b"),
    "same sizes, untied": (lambda x, y: (x.sum(), y.sum()), ((4, 4), (4, 4)), "a b, c d -> , "),
    "transpose": (lambda x: x.transpose(2, 0, 1), ((3, 5, 7),), "a b c -> c a b"),
    "reduce": (lambda x: x.sum(1), ((3, 5, 7),), "a b c -> a c"),
    "argmax": (lambda x: jnp.argmax(x, 0), ((3, 5),), "a b -> b"),
    "squeeze and expand": (lambda x: x[:, None, 0], ((3, 1, 5),), "a 1 b -> a 1 b"),
    "general reduce": (lambda x: lax.reduce(x, 0.0, lax.add, (0,)), ((3, 5),), "a b -> b"),
    "matrix product": (lambda x, w: x @ w, ((3, 5), (5, 7)), "a b, b c -> a c"),
    "square matrix product": (lambda x, w: x @ w, ((4, 4), (4, 4)), "a b, b c -> a c"),
    "an axis that meets itself": (lambda x: jnp.einsum("bld,bmd->blm", x, x), ((3, 5, 7),), "a b c -> a b b"),
    "batched product": (
        lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k),
        ((2, 3, 5, 7), (2, 4, 5, 7)),
        "a b c d, a e c d -> a c b e",
    ),
    "merge": (lambda x: x.reshape(15, 7), ((3, 5, 7),), "a b c -> ab c"),
    "split": (lambda x: x.reshape(3, 5, 7), ((15, 7),), "ab c -> a b c"),
    "merge and split elsewhere": (lambda x: x.reshape(5, 4), ((10, 2),), "ab c -> a bc"),
    "a reshape without common factors": (lambda x: x.reshape(8, 3, 5), ((6, 4, 5),), "a b c -> d e c"),
    "split after use": (lambda x, w: (x @ w).reshape(3, 2, 5), ((3, 7), (7, 10)), "a b, b cd -> a c d"),
    "repeat": (lambda x: jnp.repeat(x, 3, axis=1), ((2, 5),), "a b -> a bc"),
    "tile": (lambda x: jnp.tile(x, (1, 3)), ((2, 5),), "a b -> a cb"),
    "stack": (lambda x, y: jnp.stack([x, y], 1), ((2, 5), (2, 5)), "a b, a b -> a c b"),
    "unstack": (lambda x: jnp.unstack(x)[1], ((2, 5),), "a b -> b"),
    "a part, twice": (lambda x: (x[:3], x[:3], x[2:]), ((5,),), "a -> b, b, c"),
    "a part of a part": (lambda x: (x[1:5][1:3], x[2:4]), ((7,),), "a -> b, b"),
    "a row of blocks": (lambda x: (x[5:10], x.reshape(3, 5)), ((15,),), "ab -> b, a b"),
    "every other": (lambda x: (x[::2], x[::2], x[1::2]), ((6,),), "a -> b, b, c"),
    "parts tied by use": (lambda x: x[:3] * x[3:], ((6,),), "a -> b"),
    "split in parts": (lambda x: tuple(jnp.split(x, [2], axis=1)), ((3, 7),), "a b -> a c, a d"),
    "join of parts is the whole": (
        lambda x: jnp.concatenate([jnp.sin(x[:3]), jnp.cos(x[3:])]),
        ((7,),),
        "a -> a",
    ),
    "join of other parts": (lambda x, y: jnp.concatenate([x, y], 1), ((3, 5), (3, 2)), "a b, a c -> a d"),
    "single elements joined": (
        lambda x, y: (jnp.concatenate([x, x]), jnp.concatenate([y, y])),
        ((1,), (1,)),
        "1, 1 -> a, b",
    ),
    "pad undone": (lambda x: jnp.pad(x, ((1, 2),))[1:6], ((5,),), "a -> a"),
    "pad": (lambda x: jnp.pad(x, ((0, 0), (1, 2))), ((3, 5),), "a b -> a c"),
    "dynamic slice": (
        lambda x, i: lax.dynamic_slice(x, (i, 0), (2, 5)),
        ((3, 5), "i"),
        "a b,  -> c b",
    ),
    "dynamic update": (
        lambda c, x, i: lax.dynamic_update_slice(c, x, (0, i, 0)),
        ((2, 9, 5), (2, 1, 5), "i"),
        "a b c, a 1 c,  -> a b c",
    ),
    "embedding": (lambda t, i: t[i], ((11, 5), "i2,3"), "a b, c d -> c d b"),
    "embedding by take": (lambda t, i: jnp.take(t, i, axis=0), ((11, 5), "i2,3"), "a b, c d -> c d b"),
    "a gradient of a table": (
        jax.grad(lambda t, i: jnp.sin(t[i]).sum()),
        ((11, 5), "i2,3"),
        "a b, c d -> a b",
    ),
    "two tables, two indices": (
        lambda t, u, i, j: t[i] + u[j],
        ((4, 5), (4, 5), "i3", "i3"),
        "a b, c b, d, d -> d b",
    ),
    "take along axis": (
        lambda x, i: jnp.take_along_axis(x, i[..., None], -1),
        ((2, 3, 11), "i2,3"),
        "a b c, a b -> a b 1",
    ),
    "labels by arange": (lambda x, i: x[jnp.arange(3), i], ((3, 11), "i3"), "a b, a -> a"),
    "a permutation of some": (lambda x, i: x[i], ((7, 5), "i3"), "a b, c -> c b"),
    "scatter": (lambda x, i, u: x.at[i].set(u), ((7, 5), "i3", (3, 5)), "a b, c, c b -> a b"),
    "scatter-add": (lambda x, i, u: x.at[i].add(u), ((7, 5), "i3", (3, 5)), "a b, c, c b -> a b"),
    "scatter-sub": (lambda x, i, u: x.at[i].subtract(u), ((7, 5), "i3", (3, 5)), "a b, c, c b -> a b"),
    "scatter-mul": (lambda x, i, u: x.at[i].multiply(u), ((7, 5), "i3", (3, 5)), "a b, c, c b -> a b"),
    "scatter-min": (lambda x, i, u: x.at[i].min(u), ((7, 5), "i3", (3, 5)), "a b, c, c b -> a b"),
    "scatter-max": (lambda x, i, u: x.at[i].max(u), ((7, 5), "i3", (3, 5)), "a b, c, c b -> a b"),
    "a table and a largest value for each of its rows": (
        lambda t, i, u: (t[i], jax.ops.segment_max(u, i, 7)),
        ((7, 5), "i3", (3, 2)),
        "a b, c, c d -> c b, a d",
    ),
    "arrays placed together": (lambda x, y: jax.device_put((x, y)), ((3, 5), (7,)), "a b, c -> a b, c"),
    "cumulative": (lambda x: jnp.cumsum(x, 1), ((3, 5),), "a b -> a b"),
    "sort": (lambda x: (jnp.sort(x), jnp.argsort(x)), ((3, 5),), "a b -> a b, a b"),
    "top k": (lambda x: lax.top_k(x, 2), ((3, 5),), "a b -> a c, a c"),
    "flip": (lambda x: x[::-1], ((3, 5),), "a b -> a b"),
    "convolution": (convolve, ((2, 9, 3), (4, 3, 5)), "a b c, d c e -> a f e"),
    "convolution of the same length": (
        functools.partial(convolve, padding="SAME"),
        ((2, 9, 3), (3, 3, 5)),
        "a b c, d c e -> a b e",
    ),
    "depthwise convolution": (
        functools.partial(convolve, padding="SAME", groups=3),
        ((2, 9, 3), (5, 1, 3)),
        "a b c, d 1 c -> a b c",
    ),
    "grouped convolution": (
        functools.partial(convolve, groups=2),
        ((2, 9, 6), (4, 3, 10)),
        "a b cd, e d cf -> a g cf",
    ),
    "patches": (functools.partial(convolve, stride=3), ((2, 9, 4), (3, 4, 5)), "a bc d, c d e -> a b e"),
    "a patch kernel's gradient": (
        lambda x, w: jax.vjp(lambda w: convolve(x, w, stride=3), w)[1](jnp.ones((2, 3, 5)))[0],
        ((2, 9, 4), (3, 4, 5)),
        "a bc d, c d e -> c d f",
    ),
    "pooling": (
        lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 3), (1, 3), "VALID"),
        ((2, 9),),
        "a b -> a c",
    ),
    "ragged product": (
        lax.ragged_dot,
        ((8, 5), (3, 5, 7), "i3"),
        "a b, c b d, c -> a d",
    ),
    "a ragged product's gradient": (
        lambda x, w, g: jax.grad(lambda w: lax.ragged_dot(x, w, g).sum())(w),
        ((8, 5), (3, 5, 7), "i3"),
        "a b, c b d, c -> c b e",
    ),
    "complex": (lambda x, y: jnp.abs(lax.complex(x, y)), ((3,), (3,)), "a, a -> a"),
    "fft": (lambda x: jnp.fft.fft(x).real, ((3, 5),), "a b -> a c"),
    "dropout": (lambda k, x: jax.random.bernoulli(k, 0.5, x.shape) * x, ("k", (3, 5)), ", a b -> a b"),
    "barrier": (lambda x, y: lax.optimization_barrier((x, y)), ((3,), (4,)), "a, b -> a, b"),
    "call": (lambda x: jax.jit(jnp.sin)(x), ((3, 5),), "a b -> a b"),
    "custom derivative": (doubled, ((3, 5),), "a b -> a b"),
    "custom derivative, differentiated": (jax.grad(lambda x: doubled(x).sum()), ((3, 5),), "a b -> c d"),
    "a jvp rule": (lambda x: jax.nn.relu(x), ((3, 5),), "a b -> a b"),
    "remat": (lambda x, w: jax.checkpoint(lambda x: jnp.sin(x @ w))(x), ((3, 5), (5, 5)), "a b, b c -> a c"),
    "remat under grad": (
        lambda x, w: jax.grad(lambda w: jax.checkpoint(lambda w: jnp.sin(x @ w))(w).sum())(w),
        ((3, 5), (5, 7)),
        "a b, b c -> b c",
    ),
    "cond": (
        lambda p, x, y: lax.cond(p.sum() > 0, lambda x, y: x, lambda x, y: y, x, y),
        ((2,), (3, 5), (3, 5)),
        "a, b c, b c -> b c",
    ),
    "switch": (
        lambda i, x: lax.switch(i, [jnp.sin, lambda x: x.T, jnp.cos], x),
        ("i", (5, 5)),
        ", a a -> a a",
    ),
    "while": (
        lambda x, w: lax.while_loop(lambda c: c.sum() < 9, lambda c: c @ w, x),
        ((3, 5), (5, 5)),
        "a b, b b -> a b",
    ),
    "fori": (lambda x: lax.fori_loop(0, 3, lambda i, c: c.T, x), ((5, 5),), "a a -> a a"),
    "scan": (
        lambda c, w: lax.scan(lambda c, w: (jnp.sin(c @ w), c.sum(0)), c, w),
        ((3, 5), (7, 5, 5)),
        "a b, c b b -> a b, c b",
    ),
    "scan, constants": (
        lambda w, x: lax.scan(lambda c, x: (c, x @ w), 0.0, x)[1],
        ((5, 7), (3, 2, 5)),
        "a b, c d a -> c d b",
    ),
    "scan under grad": (
        lambda w, c: jax.grad(lambda w: lax.scan(lambda c, w: (jnp.sin(c @ w), 0.0), c, w)[0].sum())(w),
        ((7, 5, 5), (3, 5)),
        "a b b, c b -> a b b",
    ),
    "a loop that indexes": (
        lambda w, u, c: lax.fori_loop(0, 7, lambda i, c: jnp.sin(c @ w[i] + u[i]), c),
        ((7, 5, 5), (7, 5), (3, 5)),
        "a b b, a b, c b -> c b",
    ),
    "a loop that indexes, under grad": (
        lambda w, c: jax.grad(lambda w: lax.fori_loop(0, 7, lambda i, c: jnp.sin(c @ w[i]), c).sum())(w),
        ((7, 5, 5), (3, 5)),
        "a b b, c b -> a b b",
    ),
    "vmap": (lambda x, w: jax.vmap(lambda x: x @ w)(x), ((3, 5), (5, 7)), "a b, b c -> a c"),
    "shard_map": (
        sharded(lambda x, w: jnp.sin(x @ w), (P("d"), P()), P("d")),
        ((4, 5), (5, 7)),
        "a b, b c -> a c",
    ),
    "shard_map, summed": (
        sharded(lambda x, w: lax.psum(x @ w, "d"), (P(None, "d"), P("d")), P()),
        ((4, 6), (6, 7)),
        "a b, b c -> a c",
    ),
    "shard_map, gathered": (
        sharded(lambda x: lax.all_gather(x, "d", tiled=True), P("d"), P()),
        ((4, 5),),
        "a b -> c b",
    ),
}


@pytest.mark.parametrize("name", TIES)
def test_ties(name: str) -> None:
    fn, shapes, expected = TIES[name]
    assert spelled(fn, *shapes) == expected


@pytest.mark.parametrize("name", TIES)
def test_all_primitives_of_the_table_have_a_rule(name: str) -> None:
    fn, shapes, _ = TIES[name]
    assert not analysed(fn, *shapes).unruled


def test_a_primitive_without_a_rule_ties_nothing_and_is_listed() -> None:
    axes = analysed(lambda x: jnp.linalg.cholesky(x @ x.T), (5, 5))
    assert axes.unruled == {"cholesky": 1}
    (x,), (y,) = axes.jaxpr.invars, axes.jaxpr.outvars
    assert not {f for dim in axes.root[x] for f in dim} & {f for dim in axes.root[y] for f in dim}


def test_a_kernel_is_not_entered() -> None:
    from jax.experimental import pallas as pl

    def kernel(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[...]

    def fn(x: Any) -> Any:
        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((4, 8), jnp.float32))(x)

    axes = analysed(fn, (4, 8))
    assert axes.unruled == {"pallas_call": 1}
    assert not axes.root.children


def test_two_calls_of_one_program_are_not_tied() -> None:
    shared = jax.jit(lambda x, w: jnp.sin(x @ w))

    def fn(x: Any, w: Any, y: Any, v: Any) -> Any:
        return shared(x, w), shared(y, v)

    assert spelled(fn, (4, 4), (4, 4), (4, 4), (4, 4)) == "a b, b c, d e, e f -> a c, d f"
    axes = analysed(fn, (4, 4), (4, 4), (4, 4), (4, 4))
    calls = [i for i, eqn in enumerate(axes.jaxpr.eqns) if eqn.primitive.name == "jit"]
    assert axes.jaxpr.eqns[calls[0]].params["jaxpr"] is axes.jaxpr.eqns[calls[1]].params["jaxpr"]
    one, other = (axes.root.enter(i, 0) for i in calls)
    inner = one.jaxpr.invars[0]
    assert one[inner] != other[inner]
    assert one[inner] == axes.root[axes.jaxpr.invars[0]]


def test_lengths_are_tied_in_self_attention_and_not_in_cross_attention() -> None:
    def scores(x: Any, y: Any, wq: Any, wk: Any) -> Any:
        return jnp.einsum("bld,bmd->blm", x @ wq, y @ wk)

    shapes = (2, 5, 3), (2, 5, 3), (3, 4), (3, 4)
    assert spelled(scores, *shapes) == "a b c, a d e, c f, e f -> a b d"
    assert spelled(lambda x, wq, wk: scores(x, x, wq, wk), *shapes[1:]) == "a b c, c d, c d -> a b b"


def test_a_path_leads_to_the_scope_of_a_call_site() -> None:
    def fn(x: Any, w: Any) -> Any:
        return lax.scan(lambda c, w: (jax.jit(jnp.matmul)(c, w), None), x, w)[0]

    axes = analysed(fn, (3, 5), (7, 5, 5))
    (index,) = (i for i, eqn in enumerate(axes.jaxpr.eqns) if eqn.primitive.name == "scan")
    scope = axes.scope(((index, 0), (0, 0)))
    assert scope is axes.root.enter(index, 0).enter(0, 0)
    assert scope.path == ((index, 0), (0, 0))
    assert scope.jaxpr is higher_order.bodies(axes.jaxpr.eqns[index])[0].eqns[0].params["jaxpr"]
    carried = scope[scope.jaxpr.invars[0]]
    assert carried == axes.root[axes.jaxpr.invars[0]]


@pytest.mark.parametrize("fn", [TIES[name][0] for name in ("while", "switch", "scan", "remat")])
def test_body_numbers_are_those_of_higher_order(fn: Callable) -> None:
    shapes = next(shapes for f, shapes, _ in TIES.values() if f is fn)
    axes = analysed(fn, *shapes)
    seen = 0
    for index, eqn in enumerate(axes.jaxpr.eqns):
        for number, body in enumerate(higher_order.bodies(eqn)):
            assert axes.root.enter(index, number).jaxpr is body
            seen += 1
    assert seen


def test_a_sum_knows_its_parts() -> None:
    def fn(x: Any, w: Any) -> Any:
        gate, up = jnp.split(x @ w, 2, axis=-1)
        return jax.nn.silu(gate) * up

    axes = analysed(fn, (3, 5), (5, 14))
    (_, (whole,)), (_, (half,)) = axes.root[axes.jaxpr.invars[1]], axes.root[axes.jaxpr.outvars[0]]
    assert whole.sum == ((half,), (half,))
    assert whole.parts == (((0, 7, 1), (half,)), ((7, 7, 1), (half,)))
    assert half.sum == ()


def test_a_sum_of_products() -> None:
    """One projection to two query heads for each of three key heads, and to these, of size 4 each."""

    def fn(x: Any, w: Any) -> Any:
        q, k = jnp.split(x @ w, [24], axis=-1)
        return jnp.einsum("lkgd,mkd->kglm", q.reshape(5, 3, 2, 4), k.reshape(5, 3, 4))

    axes = analysed(fn, (5, 7), (7, 36))
    (whole,) = axes.root[axes.jaxpr.invars[1]][1]
    (heads,), (group,), *_ = axes.root[axes.jaxpr.outvars[0]]
    queries, keys = whole.sum
    assert (queries[0], queries[1], keys[0]) == (heads, group, heads)
    assert queries[2] is keys[1]


def test_sums_go_through_the_gradient_and_the_optimizer() -> None:
    def step(w: Any, m: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            gate, up = jnp.split(x @ w, [4], axis=-1)
            return (gate.sum(-1) * up.sum(-1)).sum()

        m = 0.9 * m + jax.grad(loss)(w)
        return w - m, m

    assert spelled(step, (5, 14), (5, 14), (3, 5)) == "a b, a b, c a -> a b, a b"


def test_tokens_index_the_same_axis_in_and_out_of_calls() -> None:
    def fn(table: Any, tokens: Any) -> Any:
        return jax.grad(lambda t: jax.jit(lambda t, i: jnp.sin(t[i]))(t, tokens).sum())(table)

    assert spelled(fn, (11, 5), "i2,3") == "a b, c d -> a b"


def test_columns_of_one_array_of_integers_index_different_axes() -> None:
    def fn(users: Any, items: Any, pairs: Any) -> Any:
        return users[pairs[:, 0]].sum() + items[pairs[:, 1]].sum()

    assert spelled(fn, (9, 5), (9, 5), "i4,2") == "a b, c d, e f -> "


def test_clipping_by_a_global_norm_ties_nothing() -> None:
    def fn(a: Any, b: Any) -> Any:
        norm = jnp.sqrt(sum(jnp.sum(x**2) for x in (a, b)))
        return a / norm, b / norm

    assert spelled(fn, (4, 4), (4, 4)) == "a b, c d -> a b, c d"


def test_a_constant_has_axes() -> None:
    table = jnp.ones((5, 7))
    axes = analysed(lambda x: x @ table, (3, 5))
    (x,), (y,), (c,) = axes.jaxpr.invars, axes.jaxpr.outvars, axes.jaxpr.constvars
    assert axes.root[c] == (axes.root[x][1], axes.root[y][1])


def test_splitting_a_dimension_splits_it_everywhere() -> None:
    axes = analysed(lambda x, w: x @ w, (3, 6), (6, 7))
    x, w = axes.jaxpr.invars
    axes.split(axes.root.raw_of(w), 0, (2, 3))
    assert [f.size for f in axes.root[w][0]] == [2, 3]
    assert axes.root[x][1] == axes.root[w][0]


def test_factors_are_numbered_alike_each_time() -> None:
    fn, shapes, _ = TIES["scan under grad"]
    spellings = []
    for _ in range(2):
        axes = analysed(fn, *shapes)
        spellings.append([(f.id, f.size) for f in axes.all()])
    assert spellings[0] == spellings[1]
    ids = [i for i, _ in spellings[0]]
    assert ids == sorted(set(ids))


def test_a_factor_of_a_dimension_has_the_dimensions_size() -> None:
    """On a program of many kinds: the product of the factors is the size, everywhere, at every depth."""

    def fn(tokens: Any, table: Any, w: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            h = (x @ w).reshape(2, 6, 3, 2, 5)
            s = jax.nn.softmax(jnp.einsum("bqhgd,bkhgd->bhgqk", h, h))
            o = jnp.einsum("bhgqk,bkhgd->bqhgd", s, h).reshape(2, 6, 30)
            return x + jnp.pad(o[..., :20], ((0, 0), (0, 0), (0, 10))), s.max()

        x, _ = lax.scan(jax.checkpoint(layer), table[tokens], w)
        return -jnp.take_along_axis(jax.nn.log_softmax(x @ table.T), tokens[..., None], -1).mean()

    axes = analysed(jax.grad(fn, argnums=(1, 2)), "i2,6", (11, 30), (4, 30, 30))
    checked = 0
    for scope in axes.scopes:
        for v in scope.raw:
            dims = scope[v]
            assert tuple(int(np.prod([f.size for f in dim], dtype=int)) for dim in dims) == v.aval.shape
            checked += 1
    assert checked > 100


@dataclasses.dataclass(frozen=True)
class Case:
    fn: Callable
    shapes: tuple[Any, ...]


@pytest.mark.parametrize(
    "case",
    [
        Case(lambda x: x.reshape(0, 3), ((3, 0),)),
        Case(lambda x: jnp.concatenate([x, x[:0]]), ((3,),)),
        Case(lambda x: lax.scan(lambda c, x: (c, x), 0.0, x)[1], ((0, 3),)),
    ],
)
def test_empty_arrays(case: Case) -> None:
    analysed(case.fn, *case.shapes)
