"""Operations as equations: what runs, how they are mapped, laid out and cut into microbatches."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xform import Plan, parallelize
from xform.higher_order import bodies, equations
from xform.ops import Band, apply, operation_of, resident
from xform.ops.operation import Mapped, body
from xform.ops.rows import Reorder, by_stage, in_own_order, inverse, runs, take, turned
from xform.passes.accumulate import Accumulate
from xform.passes.kernels import Kernels
from xform.passes.shard import Shard
from xform.printing import diff, text
from xform.rewrite import rewrite


@dataclasses.dataclass(frozen=True)
class Scaled:
    """x [b, i] times w [i, o], times `by`; its kernel adds a hundred, so that one sees which ran."""

    by: float = 2.0
    interpret: bool = False

    name = "scaled"
    operands = ("bi", "io")
    results = ("bo",)
    cut = "bo"

    def plain(self, x: Any, w: Any) -> Sequence[Any]:
        return [self.by * x @ w]

    def kernel(self, x: Any, w: Any) -> Sequence[Any]:
        return [self.by * x @ w + 100]


@dataclasses.dataclass(frozen=True)
class Contracted:
    """x [b, i] and y [b, o] contracted over b, and the root of x."""

    interpret: bool = False

    name = "contracted"
    operands = ("bi", "bo")
    results = ("io", "bi")
    cut = "io"
    sums = "b"

    def plain(self, x: Any, y: Any) -> Sequence[Any]:
        return [x.T @ y, jnp.sqrt(jnp.abs(x))]

    def kernel(self, x: Any, y: Any) -> Sequence[Any]:
        return self.plain(x, y)


def names(jaxpr: Any) -> list[str]:
    return [eqn.primitive.name for eqn in jaxpr.eqns]


X = np.arange(15, dtype=np.float32).reshape(5, 3)
W = np.arange(21, dtype=np.float32).reshape(3, 7) / 7


def test_an_operation_is_one_equation_that_holds_its_program() -> None:
    jaxpr = jax.make_jaxpr(lambda x, w: apply(Scaled(), x, w))(X, W)
    assert names(jaxpr) == ["operation"]
    assert operation_of(jaxpr.eqns[0]) == Scaled()
    assert "dot_general" in names(bodies(jaxpr.eqns[0])[0])


def test_its_plain_form_runs_where_there_is_no_tpu_and_the_kernel_where_it_is_asked_for() -> None:
    for run in (apply, jax.jit(apply, static_argnums=0)):
        np.testing.assert_allclose(run(Scaled(), X, W)[0], 2 * X @ W, rtol=1e-6)
        np.testing.assert_allclose(run(Scaled(interpret=True), X, W)[0], 2 * X @ W + 100, rtol=1e-6)


def test_it_is_differentiated_as_its_plain_form_is() -> None:
    got = jax.grad(lambda x, w: jnp.sum(apply(Scaled(), x, w)[0] ** 2), (0, 1))(X, W)
    want = jax.grad(lambda x, w: jnp.sum((2 * x @ w) ** 2), (0, 1))(X, W)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_vmap_gives_it_a_dimension_more() -> None:
    xs = np.stack([X, X + 1])
    jaxpr = jax.make_jaxpr(jax.vmap(lambda x: apply(Scaled(), x, W)[0], 0, 1))(xs)
    (eqn,) = [e for e in jaxpr.eqns if e.primitive.name == "operation"]
    op = operation_of(eqn)
    assert isinstance(op, Mapped)
    assert (op.operands, op.results, op.cut, op.sums) == (("Abi", "io"), ("Abo",), "Abo", "")
    got = jax.vmap(lambda x: apply(Scaled(), x, W)[0], 0, 1)(xs)
    np.testing.assert_allclose(got, np.moveaxis(2 * xs @ W, 0, 1), rtol=1e-6)


def test_a_plain_form_that_brings_arrays_is_refused() -> None:
    @dataclasses.dataclass(frozen=True)
    class Brings(Scaled):
        def plain(self, x: Any, w: Any) -> Sequence[Any]:
            return [x @ w + jnp.asarray(np.arange(7.0, dtype=np.float32))]

    with pytest.raises(TypeError, match="scaled: its plain form brings 1 constant arrays"):
        apply(Brings(), X, W)


def test_a_rewrite_leaves_what_an_operation_says_it_computes() -> None:
    jaxpr = jax.make_jaxpr(lambda x, w: apply(Scaled(), x, w))(X, W)
    assert (
        rewrite(jaxpr, lambda site: [site.args[0] @ site.args[1]] if site.name == "dot_general" else None)
        is jaxpr
    )


@jax.custom_vjp
def scaled(x: Any, w: Any) -> Any:
    return apply(Scaled(), x, w)[0]


scaled.defvjp(lambda x, w: (scaled(x, w), (x, w)), lambda kept, ct: (2 * ct @ kept[1].T, 2 * kept[0].T @ ct))


def step(w: Any, x: Any) -> Any:
    def loss(w: Any) -> Any:
        return jnp.mean(jnp.sin(scaled(x, w)) ** 2)

    value, gradient = jax.value_and_grad(loss)(w)
    return w - 0.1 * gradient, value


def operands_of(program: Any) -> list[tuple[int, ...]]:
    return [e.invars[0].aval.shape for e in equations(program.jaxpr) if e.primitive.name == "operation"]


@pytest.mark.parametrize("collectives", ["explicit", "auto"])
def test_it_runs_on_the_rows_of_a_device(collectives: Any) -> None:
    x, w = np.ones((16, 3), np.float32), W
    run = parallelize(step, Plan({"data": 8}, [Shard(collectives=collectives), Kernels()]))
    assert set(operands_of(run.trace(w, x))) == {(2, 3)}
    for a, b in zip(run(w, x), step(w, x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_accumulate_makes_it_anew_for_the_rows_of_a_microbatch() -> None:
    x, w = np.linspace(0, 1, 48, dtype=np.float32).reshape(16, 3), W
    run = parallelize(step, Plan({"data": 1}, [Accumulate(4)]), devices=jax.devices()[:1])
    assert set(operands_of(run.trace(w, x))) == {(4, 3)}
    for a, b in zip(run(w, x), step(w, x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


@jax.custom_vjp
def product(x: Any, w: Any) -> Any:
    return x @ w


product.defvjp(
    lambda x, w: (x @ w, (x, w)),
    lambda kept, ct: (ct @ kept[1].T, apply(Contracted(), kept[0], ct)[0]),
)


@pytest.mark.parametrize("collectives", ["explicit", "auto"])
def test_what_it_sums_over_rows_is_summed_over_devices(collectives: Any) -> None:
    def step(w: Any, x: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.sin(product(x, w)) ** 2))(w)
        return w - 0.1 * gradient, loss

    x, w = np.linspace(0, 1, 512 * 8, dtype=np.float32).reshape(512, 8), np.ones((8, 16), np.float32)
    run = parallelize(step, Plan({"data": 2, "fsdp": 4}, [Shard(collectives=collectives), Kernels()]))
    program = run.trace(w, x)
    assert set(operands_of(program)) == {(64, 8)}
    assert (8, 16) in {
        e.outvars[0].aval.shape for e in equations(program.jaxpr) if e.primitive.name == "psum"
    }
    for a, b in zip(run(w, x), step(w, x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_accumulate_adds_up_what_it_sums_over_rows() -> None:
    def loss(w: Any, x: Any) -> Any:
        total, root = apply(Contracted(), x @ w, x)
        return jnp.sum(jnp.sin(total)) + jnp.mean(root)

    x, w = np.linspace(1, 2, 48, dtype=np.float32).reshape(16, 3), W
    run = parallelize(jax.value_and_grad(loss), Plan({"data": 1}, [Accumulate(4)]), devices=jax.devices()[:1])
    shapes = {e.outvars[0].aval.shape for e in equations(run.trace(w, x).jaxpr)}
    assert (4, 7) in shapes and (16, 7) not in shapes
    for a, b in zip(run(w, x), jax.value_and_grad(loss)(w, x), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * np.abs(b).max())  # sums in another order


def test_the_plain_form_of_parts_is_traced_for_their_sizes() -> None:
    avals = [jax.core.ShapedArray(s, np.dtype("float32")) for s in ((2, 3), (3, 7))]
    assert body(Scaled(), avals).outvars[0].aval.shape == (2, 7)


@pytest.mark.parametrize(
    "band",
    [
        Band(),
        Band(right=0),
        Band(right=0, offset=3),
        Band(right=0, left=2),
        Band(left=2, right=1),
        Band(right=0, chunk=3),
        Band(right=0, prefix=4),
        Band(right=-1),
    ],
    ids=str,
)
def test_the_bounds_of_a_band_are_those_of_what_it_allows(band: Band) -> None:
    queries, keys = 7, 9
    seen = np.broadcast_to(band.allowed(np.arange(queries)[:, None], np.arange(keys)), (queries, keys))
    first, last = band.bounds(queries, keys)
    within = (np.arange(keys) >= first[:, None]) & (np.arange(keys) < last[:, None])
    np.testing.assert_array_equal(seen, within | (np.arange(keys) < band.prefix))
    assert band.sees_some(queries, keys) == bool(seen.any(1).all())
    assert band.is_full <= bool(seen.all())


def test_it_is_printed_by_its_meaning_and_not_by_its_plain_program() -> None:
    before, after = (jax.make_jaxpr(lambda x, w, n=n: apply(Scaled(by=n), x, w))(X, W) for n in (2.0, 3.0))
    assert "operation scaled a b [bi io -> bo]" in text(before)
    assert "operation scaled a b [bi io -> bo, by 3.0]" in text(after)
    assert "dot_general" not in text(after)
    changed = [line.line.text for line in diff(before, after) if line.mark != " "]
    assert len(changed) == 2 and "by 3.0" in changed[1]
    assert not [line for line in diff(before, before) if line.mark != " "]


# ---------------------------------------------------------------- rows in another order

ORDER = (1, 3, 0, 2, 4)


def test_rows_by_stage_are_one_equation_and_so_is_the_way_back() -> None:
    there = by_stage(X, ORDER)
    np.testing.assert_array_equal(there, X[list(ORDER)])
    np.testing.assert_array_equal(in_own_order(there, ORDER), X)
    jaxpr = jax.make_jaxpr(lambda x: in_own_order(by_stage(x, (2, 0, 1), 1), (2, 0, 1), 1))(X)
    assert [operation_of(e) for e in jaxpr.eqns] == [
        Reorder((2, 0, 1), 2, 1),
        Reorder((2, 0, 1), 2, 1, goes_back=True),
    ]
    assert "operation by_stage" in text(jaxpr) and "operation in_own_order" in text(jaxpr)


def test_rows_in_their_own_order_are_left_alone() -> None:
    assert by_stage(X, range(5)) is X


@pytest.mark.parametrize("order", [(0, 1), (0, 1, 2, 3, 3), (1, 2, 3, 4, 5)])
def test_what_is_no_order_of_the_rows_is_refused(order: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"by_stage: \(.*\) is no order of the 5 rows of dimension 0"):
        by_stage(X, order)


def test_gradients_of_reordered_rows_go_back_by_one_equation() -> None:
    def loss(x: Any) -> Any:
        return jnp.sum(by_stage(x, ORDER) ** 2 * jnp.arange(5.0)[:, None])

    def plainly(x: Any) -> Any:
        return jnp.sum(x[np.asarray(ORDER)] ** 2 * jnp.arange(5.0)[:, None])

    np.testing.assert_array_equal(jax.grad(loss)(X), jax.grad(plainly)(jnp.asarray(X)))
    for change in (lambda f: f, jax.jit, jax.checkpoint):
        jaxpr = jax.make_jaxpr(jax.grad(change(loss)))(X)
        found = {op.name for eqn in equations(jaxpr) if (op := operation_of(eqn)) is not None}
        assert found == {"by_stage", "in_own_order"}
        assert not any(eqn.primitive.name == "pad" for eqn in equations(jaxpr))
    value, tangent = jax.jvp(loss, (X,), (X,))
    np.testing.assert_allclose(tangent, 2 * value)


def test_a_dimension_more_of_reordered_rows_is_a_reordering_too() -> None:
    xs = np.stack([X, X + 1])
    jaxpr = jax.make_jaxpr(jax.vmap(lambda x: by_stage(x, ORDER), 1))(np.moveaxis(xs, 0, 1))
    assert [op for e in jaxpr.eqns if (op := operation_of(e)) is not None] == [Reorder(ORDER, 3, 1)]
    np.testing.assert_array_equal(jax.vmap(lambda x: by_stage(x, ORDER))(xs), xs[:, list(ORDER)])


def test_codes_that_are_reordered_have_no_gradient() -> None:
    codes = np.arange(5, dtype=np.int32)
    got = jax.grad(lambda x: jnp.sum(x[:, 0] * by_stage(codes, ORDER)))(X)
    np.testing.assert_array_equal(got[:, 0], codes[list(ORDER)])
    _, back = jax.vjp(lambda i: by_stage(i, ORDER), codes)
    assert back(np.zeros(5, jax.dtypes.float0))[0].dtype == jax.dtypes.float0


@pytest.mark.parametrize("sizes", [(2, 3, 1), (3, 2, 2), (4, 2, 3)])
def test_the_order_of_stages_is_a_transpose(sizes: tuple[int, int, int]) -> None:
    rows = np.arange(np.prod(sizes))
    order = tuple(map(int, rows.reshape(sizes).swapaxes(0, 1).ravel()))
    assert turned(order) == sizes
    assert turned(inverse(order)) == (sizes[1], sizes[0], sizes[2])
    x = np.stack([rows, rows + 100])
    np.testing.assert_array_equal(take(jnp.asarray(x), order, 1), x[:, order])
    np.testing.assert_array_equal(Reorder(order, 2, 1).kernel(jnp.asarray(x))[0], by_stage(x, order, 1))


@pytest.mark.parametrize("order", [ORDER, (4, 3, 2, 1, 0), (0, 1, 2, 4, 3), (0, 3, 1, 4, 2), (0, 4, 1, 2, 3)])
def test_any_other_order_is_looked_up(order: tuple[int, ...]) -> None:
    assert turned(order) is None
    np.testing.assert_array_equal(take(jnp.asarray(X), order, 0), X[list(order)])


def test_orders_and_their_runs() -> None:
    assert inverse(ORDER) == (2, 0, 3, 1, 4)
    assert runs((4, 5, 0, 1, 2, 3)) == [(4, 6), (0, 4)]


def test_keys_have_an_order_in_memory_of_their_own() -> None:
    keys = jax.random.split(jax.random.key(0), (3, 5))
    found = jax.jit(resident.plain)(keys)
    np.testing.assert_array_equal(jax.random.key_data(found), jax.random.key_data(keys))
