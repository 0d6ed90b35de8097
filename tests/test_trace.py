"""Tracing and inlining, and the boundary: what is about to be differentiated is rewritten, once."""

from __future__ import annotations

import threading
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax import value_and_grad  # imported before xform, as a user's module may

from tests.programs import Programs, W, X, assert_same, flat, loss
from xform.errors import RewriteError
from xform.higher_order import bodies
from xform.rewrite import rewrite
from xform.trace import (
    Builder,
    Jaxpr,
    _private_names,
    ad,
    boundary,
    eval_jaxpr,
    inline,
    name_stack,
    source_line,
    trace_flat,
    typeof,
)


def softsign(x):
    return x / (1 + jnp.abs(x))


class Soften:
    """A change for the boundary: tanh -> softsign. Counts how often it was asked, and what it was shown."""

    def __init__(self) -> None:
        self.programs: list[Jaxpr] = []

    def __call__(self, jaxpr: Jaxpr, values) -> Jaxpr:
        self.programs.append(jaxpr)
        return rewrite(jaxpr, lambda s: [softsign(*s.args)] if s.name == "tanh" else None)


def with_boundary(f, soften):
    """f with `soften` at the boundary."""

    def bounded(*args):
        with boundary(soften, object()):
            return f(*args)

    return bounded


def assert_rewritten(before, after, times=1):
    """Under the boundary `before` computes what `after` does, and was rewritten so many times."""
    soften = Soften()
    assert_same(after, with_boundary(before, soften), W, X)
    assert len(soften.programs) == times


def seen(f) -> list[Jaxpr]:
    """The programs that the boundary shows for f(W, X)."""
    soften = Soften()
    jax.make_jaxpr(with_boundary(f, soften))(W, X)
    return soften.programs


def assert_close(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def model(w, x, tanh=jnp.tanh):
    return jnp.sum(tanh(x @ w) ** 2)


# ---------------------------------------------------------------- the boundary catches them all


def with_grad(tanh):
    return lambda w, x: jax.grad(model)(w, x, tanh)


def with_value_and_grad_imported_early(tanh):
    return lambda w, x: value_and_grad(lambda w: model(w, x, tanh))(w)


def with_vjp(tanh):
    def step(w, x):
        value, pullback = jax.vjp(lambda w, x: model(w, x, tanh), w, x)
        return value, pullback(jnp.ones_like(value))

    return step


def with_jacrev(tanh):
    return lambda w, x: jax.jacrev(lambda w: tanh(x @ w).sum(0))(w)


def with_closed_over_tracers(tanh):
    def step(w, x):
        scale = jnp.sin(x).sum()
        return jax.grad(lambda w: model(w, x, tanh) * scale)(w)

    return step


def with_a_scan_over_microbatches(tanh):
    def step(w, x):
        def body(total, row):
            value, grad = jax.value_and_grad(model)(w, row[None], tanh)
            return total + grad, value

        return jax.lax.scan(body, jnp.zeros_like(w), x)

    return step


def with_per_example_gradients(tanh):
    return lambda w, x: jax.vmap(lambda row: jax.grad(model)(w, row[None], tanh))(x)


def with_aux_and_keys(tanh):
    def objective(w, x, key):
        kept = jax.random.bernoulli(key, 0.7, x.shape)
        y = tanh((x * kept) @ w)
        return jnp.sum(y**2), {
            "y": y,
            "key": jax.random.split(key)[0],
            "count": 3,
            "name": "aux",
            "none": None,
        }

    def step(w, x):
        (value, aux), grad = jax.value_and_grad(objective, has_aux=True)(w, x, jax.random.key(1))
        assert aux["name"] == "aux" and aux["none"] is None
        return value, aux["y"], jax.random.key_data(aux["key"]), [grad] * aux["count"]

    return step


def with_optax(tanh):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))

    def step(w, x):
        params = {"w": w, "none": None}
        grads = jax.grad(lambda p: model(p["w"], x, tanh))(params)
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        return optax.apply_updates(params, updates)["w"]

    return step


def with_linen(tanh):
    ones = linen.initializers.constant(0.3)

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(7, kernel_init=ones)(tanh(linen.Dense(3, kernel_init=ones)(x)))

    def step(w, x):
        params = Net().init(jax.random.key(0), x)
        return jax.value_and_grad(lambda p: (Net().apply(p, x @ w) ** 2).sum())(params)

    return step


def with_nnx(tanh):
    ones = nnx.initializers.constant(0.3)

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first, self.drop = nnx.Linear(5, 3, kernel_init=ones, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
            self.calls = nnx.BatchStat(jnp.zeros(()))

        def __call__(self, x):
            self.calls[...] += 1
            return self.drop(tanh(self.first(x)))

    def step(w, x):
        net = Net(nnx.Rngs(0))
        value, grads = nnx.value_and_grad(lambda net: (net(x @ w) ** 2).sum())(net)
        return value, nnx.to_pure_dict(grads), net.calls[...]

    return step


def with_an_inner_jit(tanh):
    @jax.jit
    def inner(w, x):
        return jax.grad(jax.jit(lambda w, x: model(w, x, tanh)))(w, x)

    return lambda w, x: inner(w, x) + inner(w, x * 2)


def with_remat(tanh):
    layer = jax.checkpoint(lambda w, x: tanh(x @ w))
    return lambda w, x: jax.grad(lambda w: layer(w, layer(w, x)).sum())(w)


CALLS = [
    with_grad, with_value_and_grad_imported_early, with_vjp, with_jacrev, with_closed_over_tracers,
    with_a_scan_over_microbatches, with_per_example_gradients, with_aux_and_keys, with_optax, with_linen,
    with_nnx, with_an_inner_jit, with_remat,
]  # fmt: skip


@pytest.mark.parametrize("make", CALLS, ids=lambda f: f.__name__)
def test_what_is_differentiated_is_rewritten_once(make):
    assert_rewritten(make(jnp.tanh), make(softsign))


@pytest.mark.parametrize(
    "name", ["nested_jit", "scan", "cond", "custom_jvp", "custom_vjp", "remat", "shard_map"]
)
def test_what_is_inside_of_what_is_differentiated_is_rewritten_too(name):
    before, after = (loss(getattr(Programs(tanh), name)) for tanh in (jnp.tanh, softsign))
    assert_rewritten(jax.grad(before, (0, 1)), jax.grad(after, (0, 1)))


def test_several_losses_in_one_step_are_each_rewritten():
    def step(tanh):
        def both(w, x):
            first, grad = jax.value_and_grad(model)(w, x, tanh)
            return first, jax.grad(model)(w - grad, x, tanh)

        return both

    assert_rewritten(step(jnp.tanh), step(softsign), times=2)


def test_of_a_gradient_of_a_gradient_the_outermost_is_rewritten():
    def step(w, x):
        return jax.grad(lambda w: jax.grad(lambda x: model(w, x))(x).sum())(w)

    (program,) = seen(step)
    assert {"tanh", "one_minus_square"} <= {e.primitive.name for e in program.eqns}


def test_a_jitted_inner_gradient_is_left_alone_inside_an_outer_one_and_rewritten_outside_it():
    inner = jax.jit(lambda w, x: jax.grad(model)(w, x))

    def step(w, x):
        alone = inner(w, x)
        return alone, jax.grad(lambda w: inner(w, x).sum())(w)

    first, second = seen(step)
    assert "one_minus_square" not in str(first)
    assert "one_minus_square" in str(second)  # the inner gradient came unrewritten into the outer program


def test_what_a_custom_rule_differentiates_on_the_way_back_is_left_alone():
    def step(w, x):
        return jax.grad(lambda w: Programs().custom_vjp_differentiates(w, x).sum())(w)

    def step_x(w, x):
        return jax.grad(lambda x: Programs().custom_vjp_differentiates(w, x).sum())(x)

    for f in step, step_x:
        assert len(seen(f)) == 1


def test_forward_mode_is_no_boundary():
    assert not seen(lambda w, x: jax.jvp(lambda w: model(w, x), (w,), (w,)))


def test_names_and_lines_of_the_model_are_kept():
    def step(w, x):
        with jax.named_scope("outer"):

            def named(w):
                with jax.named_scope("mlp"):
                    return jnp.sin(x @ w).sum()

            return jax.grad(named)(w)

    def places(jaxpr):
        return sorted((e.primitive.name, name_stack(e), source_line(e)) for e in jaxpr.eqns)

    plain = trace_flat(flat(step), [typeof(W), typeof(X)], "step")
    with boundary(lambda jaxpr, values: jaxpr, object()):
        caught = trace_flat(flat(step), [typeof(W), typeof(X)], "step")
    assert places(caught) == places(plain)
    assert any(n == "outer/jvp(mlp)" for _, n, _ in places(caught))


def test_refs_that_the_model_closes_over_are_written():
    def step(tanh):
        def f(w, x):
            seen = jax.new_ref(jnp.zeros(()))

            def objective(w):
                y = model(w, x, tanh)
                seen[...] = jax.lax.stop_gradient(y)
                return y

            return jax.grad(objective)(w), seen[...]

        return f

    assert_rewritten(step(jnp.tanh), step(softsign))


# ---------------------------------------------------------------- and leaves no trace


def test_jit_caches_are_not_polluted_either_way():
    inner = jax.jit(lambda w, x: jax.grad(model)(w, x))
    plain, soft = jax.grad(model)(W, X), jax.grad(model)(W, X, softsign)
    assert_close(inner(W, X), plain)
    with boundary(Soften(), "first"):
        assert_close(inner(W, X), soft)
    with boundary(lambda jaxpr, values: jaxpr, "second"):
        assert_close(inner(W, X), plain)
    assert_close(inner(W, X), plain)


def test_the_patch_is_removed_after_an_error_which_shows_the_users_lines():
    def wrong(jaxpr, values):
        return rewrite(jaxpr, lambda s: [jnp.zeros(2)] if s.name == "tanh" else None, name="wrong")

    linearize, backward = ad.linearize, ad.backward_pass3
    with boundary(lambda jaxpr, values: jaxpr, 0):
        assert ad.linearize is not linearize
        with (
            pytest.raises(
                RewriteError, match=r"wrong replaced tanh at test_trace.py:\d+ \(model\)"
            ) as caught,
            boundary(wrong, 1),
        ):
            jax.grad(model)(W, X)
        assert_close(jax.grad(model)(W, X), jax.grad(lambda w: model(w, X))(W))
    assert ad.linearize is linearize and ad.backward_pass3 is backward
    frames, cause = [], caught.value
    while cause is not None:
        frames += [frame.name for frame in traceback.extract_tb(cause.__traceback__)]
        cause = cause.__cause__
    assert "model" in frames


def test_an_error_of_the_users_passes_through():
    def broken(w):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), boundary(Soften(), 0):
        jax.grad(broken)(W)
    assert len(seen(jax.grad(model))) == 1


def test_a_loss_that_is_not_a_scalar_is_jaxs_own_error():
    with pytest.raises(TypeError, match="scalar-output"), boundary(Soften(), 0):
        jax.grad(lambda w: jnp.tanh(w))(W)


def test_other_threads_see_no_boundary():
    results = {}

    def other():
        results["other"] = jax.grad(model)(W, X)

    with boundary(Soften(), object()):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        results["here"] = jax.grad(model)(W, X)
    assert_close(results["other"], jax.grad(model)(W, X))
    assert_close(results["here"], jax.grad(model)(W, X, softsign))


def test_boundaries_in_two_threads_keep_apart():
    barrier, results = threading.Barrier(2), {}

    def run(name, change):
        with boundary(change, object()):
            barrier.wait()
            results[name] = jax.grad(model)(W, X)
            barrier.wait()

    threads = [
        threading.Thread(target=run, args=a) for a in (("soft", Soften()), ("plain", lambda j, values: j))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_close(results["soft"], jax.grad(model)(W, X, softsign))
    assert_close(results["plain"], jax.grad(model)(W, X))


# ---------------------------------------------------------------- functions to jaxprs, and back


def test_inline_copies_a_program_with_its_constants_names_and_effects():
    def f(x):
        jax.debug.print("here")
        with jax.named_scope("inner"):
            return [jnp.sin(x) * jnp.arange(5.0)]

    jaxpr = trace_flat(f, [typeof(X)], "f")

    def outer(x):
        with jax.named_scope("outer"):
            return inline(jaxpr, x)

    copy = trace_flat(outer, [typeof(X)], "outer")
    assert [e.primitive for e in copy.eqns] == [e.primitive for e in jaxpr.eqns]
    assert copy.effects == jaxpr.effects
    assert [name_stack(e) for e in copy.eqns][-1] == "outer/inner"
    assert [source_line(e) for e in copy.eqns] == [source_line(e) for e in jaxpr.eqns]


def test_inline_outside_of_any_trace_evaluates():
    jaxpr = trace_flat(lambda x: [x * 2, 3.0], [typeof(X)], "f")
    doubled, three = inline(jaxpr, X)
    assert_close(doubled, X * 2)
    assert three == 3.0


def test_inline_binds_under_grad_and_vmap():
    jaxpr = trace_flat(lambda x: [jnp.sin(x).sum()], [typeof(X[0])], "f")
    assert_close(jax.grad(lambda x: inline(jaxpr, x)[0])(X[0]), np.cos(X[0]))
    assert_close(jax.vmap(lambda x: inline(jaxpr, x)[0])(X), np.sin(X).sum(1))


def test_inline_keeps_the_weak_types_of_literals():
    jaxpr = trace_flat(lambda x: [x, 2.0, x * 2.0], [typeof(jnp.float32(1))], "f")
    copy = trace_flat(lambda x: inline(jaxpr, x), [typeof(jnp.float32(1))], "f")
    assert [v.aval.weak_type for v in copy.outvars] == [v.aval.weak_type for v in jaxpr.outvars]


def test_constants_outlive_the_values_that_a_rule_made_of_them():
    jaxpr = trace_flat(lambda x: [jnp.sin(x)], [typeof(X)], "f")
    builder = Builder(jaxpr.debug_info)
    made = []
    for _ in range(3):
        eqns, outs = builder.emit(
            jaxpr.eqns[0], lambda: [builder.value(jaxpr.invars[0]) + jnp.asarray(X * 2)]
        )
        made += eqns
        del outs
    assert {v for e in made for v in e.invars} - {v for e in made for v in e.outvars} == {
        jaxpr.invars[0],
        *builder.constants(),
    }


def test_explicit_shardings_survive_tracing_and_rewriting():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(np.zeros((4, 3), np.float32), jax.sharding.NamedSharding(mesh, jax.P("data")))
        jaxpr = trace_flat(lambda x: [jnp.tanh(x) * 2], [typeof(x)], "f")
        new = Soften()(jaxpr, ())
    assert str(new.outvars[0].aval) == str(jaxpr.outvars[0].aval) == "float32[4@data,3]"


def test_every_private_name_of_jax_is_where_it_was():
    assert all(name is not None for name in _private_names())


def test_eval_binds_a_program_again():
    jaxpr = trace_flat(flat(Programs().scan), [typeof(W), typeof(X)], "scan")
    again = trace_flat(lambda *a: eval_jaxpr(jaxpr, *a), [typeof(W), typeof(X)], "scan")
    assert str(again) == str(jaxpr)
    assert [len(bodies(e)) for e in again.eqns] == [len(bodies(e)) for e in jaxpr.eqns]
