"""`parallelize` behaves like `jax.jit`, and applies each pass where it belongs, once."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import subprocess
import sys
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.programs import NAMES, Programs, W, X
from xform.api import parallelize
from xform.errors import PlanError, RewriteError
from xform.plan import Plan
from xform.rewrite import rewrite

ONE = Plan(mesh={})
CHECKOUT = pathlib.Path(__file__).parents[1]


def softsign(x):
    return x / (1 + jnp.abs(x))


@dataclasses.dataclass(frozen=True)
class Soften:
    """tanh -> softsign, `times` over."""

    stages: ClassVar[tuple[str, ...]] = ("model",)
    scale: float = 1.0

    def rewrite(self, jaxpr: Any, context: Any) -> Any:
        context.report.did("soften", f"a program of {len(jaxpr.eqns)} equations")

        def rule(site):
            return [softsign(*site.args) * self.scale] if site.name == "tanh" else None

        return rewrite(jaxpr, rule, context.report, "soften")


@dataclasses.dataclass(frozen=True)
class Double:
    """sin(x) -> 2 sin(x), in the whole step: shows when a pass is applied more than once."""

    stages: ClassVar[tuple[str, ...]] = ("step",)
    after: ClassVar[tuple[str, ...]] = ()

    def rewrite(self, jaxpr: Any, context: Any) -> Any:
        return rewrite(jaxpr, lambda s: [s.bind()[0] * 2] if s.name == "sin" else None)


@dataclasses.dataclass(frozen=True)
class Halve:
    """Drops the last result: a pass that is wrong."""

    stages: ClassVar[tuple[str, ...]] = ("step",)

    def rewrite(self, jaxpr: Any, context: Any) -> Any:
        return jaxpr.replace(outvars=jaxpr.outvars[:-1])


def plan(*passes):
    return Plan(mesh={}, passes=passes)


def assert_close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), a, b)


def train_step(w, x, tanh=jnp.tanh):
    value, grad = jax.value_and_grad(lambda w: jnp.sum(tanh(x @ w) ** 2))(w)
    return w - 0.1 * grad, value


# ---------------------------------------------------------------- like jax.jit


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("refs",)])
def test_under_an_empty_plan_a_call_runs_the_stablehlo_of_jit(name):
    f = getattr(Programs(), name)
    assert parallelize(f, ONE)._jit.lower(W, X).as_text() == jax.jit(f).lower(W, X).as_text()


def test_pytrees_keywords_and_none_pass_through():
    def f(state, *, scale=2.0, extra=None):
        assert extra is None
        return {"a": state["a"] * scale, "none": None, "b": (state["b"][0] + 1, 3)}

    state = {"a": X, "none": None, "b": [W, 1]}
    step = parallelize(f, ONE)
    assert_close(step(state, scale=3.0), jax.jit(f)(state, scale=3.0))
    assert_close(step(state), f(state))
    assert jax.tree.structure(step(state, extra=None)) == jax.tree.structure(jax.jit(f)(state))


def test_static_arguments_by_number_and_by_name():
    def f(x, kind, *, times):
        return [x * times if kind == "mul" else x + times] * times

    by_number = parallelize(f, ONE, static_argnums=(1,), static_argnames="times")
    by_name = parallelize(f, ONE, static_argnames=("kind", "times"))
    for step in by_number, by_name:
        assert_close(step(X, "mul", times=3), f(X, "mul", times=3))
        assert len(step(X, "add", times=2)) == 2
    assert_close(by_name(X, kind="mul", times=1), [X])


def test_static_arguments_that_are_equal_but_of_different_types_are_different():
    step = parallelize(lambda x, n: x * n, ONE, static_argnums=1)
    x = jnp.arange(3)
    assert step(x, 1).dtype == jnp.int32 and step(x, 1.0).dtype == jnp.float32


def test_donated_arguments_are_deleted():
    for options in ({"donate_argnums": 0}, {"donate_argnames": "w"}):
        w = jnp.asarray(W) + 0
        step = parallelize(train_step, ONE, **options)
        new, _ = step(w, X)
        assert w.is_deleted() and not new.is_deleted()
        assert step.trace(new, X).inputs[0].donated and not step.trace(new, X).inputs[1].donated


def test_new_shapes_and_dtypes_are_traced_anew_and_old_ones_are_not():
    traces = []

    def f(x):
        traces.append(x.shape)
        return x * 2

    step = parallelize(f, ONE)
    for x in (X, X, W, X.astype(np.float16), X, 2.0, 3.0, np.float32(2)):
        assert_close(step(x), x * 2)
    assert traces == [(3, 5), (5, 5), (3, 5), (), ()]


def test_weak_types_are_those_of_jit():
    def f(x):
        return x * 2.0, jnp.asarray(1.0) * x

    for x in 1.5, np.float32(1.5), 2, jnp.bfloat16(3):
        assert [y.weak_type for y in parallelize(f, ONE)(x)] == [y.weak_type for y in jax.jit(f)(x)]


def test_it_works_under_grad_vmap_jit_and_inside_another():
    step, plain = parallelize(lambda w, x: jnp.tanh(x @ w).sum(), ONE), lambda w, x: jnp.tanh(x @ w).sum()
    rows = jnp.stack([X, 2 * X])
    assert_close(jax.grad(step)(W, X), jax.grad(plain)(W, X))
    assert_close(jax.vmap(step, (None, 0))(W, rows), jax.vmap(plain, (None, 0))(W, rows))
    assert_close(jax.jit(step)(W, X), plain(W, X))
    assert_close(parallelize(lambda w: step(w, X) * 2, ONE)(W), plain(W, X) * 2)


def test_it_closes_over_values_of_an_outer_trace():
    def outer(w):
        return parallelize(lambda x: jnp.sum(jnp.sin(x @ w)), ONE)(X)

    assert_close(jax.grad(outer)(W), jax.grad(lambda w: jnp.sum(jnp.sin(X @ w)))(W))


def test_with_jit_disabled_the_function_itself_runs():
    seen = []
    with jax.disable_jit():
        parallelize(lambda x: seen.append(float(x.sum())) or x, ONE)(jnp.ones(3))
    assert seen == [3.0]


def test_it_keeps_the_name_and_is_a_method_of_a_class():
    class Model:
        weight = 3.0

        def apply(self, x):
            """Doc."""
            return self.weight * x

        step = parallelize(apply, ONE, static_argnums=0)

    assert Model.step.__name__ == "apply" and Model.step.__doc__ == "Doc."
    assert_close(Model().step(X), 3 * X)


def test_an_error_of_the_users_shows_as_it_is_and_nothing_is_kept():
    fail = [True]

    def f(x):
        if fail[0]:
            raise KeyError("mine")
        return x

    step = parallelize(f, ONE)
    with pytest.raises(KeyError, match="mine"):
        step(X)
    fail[0] = False
    assert_close(step(X), X)


def test_a_random_key_and_a_ref_are_arguments():
    def f(key, ref):
        ref[...] = ref[...] + jax.random.uniform(key, (3,))
        return jax.random.split(key)[0]

    ref = jax.new_ref(jnp.zeros(3))
    key = parallelize(f, ONE)(jax.random.key(0), ref)
    assert_close(ref[...], jax.random.uniform(jax.random.key(0), (3,)))
    assert key.dtype == jax.random.key(0).dtype


# ---------------------------------------------------------------- passes, each at its stage, once


def test_a_model_pass_rewrites_what_is_about_to_be_differentiated():
    step = parallelize(train_step, plan(Soften()))
    assert_close(step(W, X), train_step(W, X, softsign))
    assert step.trace(W, X).report.lines() == ["soften: a program of 4 equations"]


def test_a_model_pass_rewrites_the_function_itself_when_nothing_differentiates():
    step = parallelize(lambda w, x: jnp.tanh(x @ w).sum(), plan(Soften()))
    assert_close(step(W, X), softsign(X @ W).sum())
    assert_close(jax.grad(step)(W, X), jax.grad(lambda w: softsign(X @ w).sum())(W))
    assert len(step.trace(W, X).stages) == 1


def test_a_pass_with_an_option_is_another_plan():
    soft, softer = (parallelize(train_step, plan(Soften(scale=s))) for s in (1.0, 0.5))
    assert_close(soft(W, X), train_step(W, X, softsign))
    assert_close(softer(W, X), train_step(W, X, lambda x: 0.5 * softsign(x)))


def test_a_gradient_inside_an_inner_jit_is_rewritten_once_in_every_program():
    """What jit has traced under the same passes before is traced anew, and not rewritten twice."""
    inner = jax.jit(train_step)

    def f(w, x, n):
        return [inner(w, x)[0] + i for i in range(n)]

    step = parallelize(f, plan(Soften()), static_argnums=2)
    for n in 1, 2:
        assert_close(step(W, X, n), [train_step(W, X, softsign)[0] + i for i in range(n)])
    assert_close(parallelize(f, plan(Soften()), static_argnums=2)(W, X, 1), step(W, X, 1))
    assert_close(inner(W, X), train_step(W, X))


def test_two_losses_in_a_step_are_each_rewritten_and_the_rest_is_not():
    def f(w, x, tanh=jnp.tanh):
        first, _ = train_step(w, x, tanh)
        return train_step(first, x, tanh)[1], jnp.tanh(w)

    assert_close(parallelize(f, plan(Soften()))(W, X), f(W, X, softsign))


def test_a_step_pass_rewrites_the_whole_step_after_the_model_passes():
    def f(w, x, tanh=jnp.tanh, scale=1):
        return scale * jnp.sin(train_step(w, x, tanh)[1])

    step = parallelize(f, plan(Double(), Soften()))
    assert_close(step(W, X), f(W, X, softsign, 2))
    assert [s.name for s in step.trace(W, X).stages] == ["soften (model)", "double"]


def test_passes_run_after_those_they_name():
    @dataclasses.dataclass(frozen=True)
    class Late(Double):
        after: ClassVar[tuple[str, ...]] = ("double",)

    names = [s.name for s in parallelize(jnp.sin, plan(Late(), Double())).trace(X).stages]
    assert names == ["double", "late"]


def test_passes_that_want_to_come_after_one_another_are_an_error():
    @dataclasses.dataclass(frozen=True)
    class Late(Double):
        after: ClassVar[tuple[str, ...]] = ("later",)

    @dataclasses.dataclass(frozen=True)
    class Later(Double):
        after: ClassVar[tuple[str, ...]] = ("late",)

    with pytest.raises(PlanError, match="late, later each want to come after one another"):
        parallelize(jnp.sin, plan(Late(), Later()))(X)


def test_a_pass_that_changes_the_type_of_the_program_is_named():
    with pytest.raises(
        RewriteError, match=r"halve made a program of type .* -> \(\); it should be .* -> \(float32\[3,5\]\)"
    ):
        parallelize(jnp.sin, plan(Halve()))(X)


def test_under_enable_checks_every_pass_is_checked():
    @dataclasses.dataclass(frozen=True)
    class Wrong(Double):
        def rewrite(self, jaxpr: Any, context: Any) -> Any:
            return jaxpr.replace(eqns=jaxpr.eqns[:-1])

    with jax.enable_checks(True):
        assert_close(parallelize(train_step, plan(Soften()))(W, X), train_step(W, X, softsign))
        with pytest.raises(Exception, match="not defined"):
            parallelize(lambda x: jnp.sin(x) * 3, plan(Wrong()))(X)


def test_the_program_says_what_its_inputs_and_results_are():
    program = parallelize(lambda state, batch, *, scale: {"loss": state["w"] + scale}, ONE).trace(
        {"w": W}, X, scale=jax.ShapeDtypeStruct((), np.float32)
    )
    assert [(leaf.path, leaf.argument) for leaf in program.inputs] == [
        ("[0]['w']", 0),
        ("[1]", 1),
        ("['scale']", "scale"),
    ]
    assert [leaf.path for leaf in program.outputs] == ["['loss']"]


# ---------------------------------------------------------------- the same in every process

PROGRAM = """
import jax, sys
import jax.numpy as jnp
from tests.test_api import Soften, plan, train_step, W, X
from tests.programs import Programs
from xform.api import parallelize

def f(w, x):
    model = Programs()
    return train_step(w, x), model.layers(w, x), model.clipped(x, w), model.scan_in_scan(w, x)

sys.stdout.write(parallelize(f, plan(Soften())).lower(W, X).as_text())
"""


def test_two_processes_lower_to_the_same_bytes():
    texts = []
    for seed in "0", "1":
        env = {**os.environ, "PYTHONHASHSEED": seed}
        run = subprocess.run(
            [sys.executable, "-c", PROGRAM], cwd=CHECKOUT, env=env, capture_output=True, check=True
        )
        texts.append(run.stdout)
    assert texts[0] == texts[1] and b"stablehlo.abs" in texts[0]


@dataclasses.dataclass(frozen=True)
class Look:
    """A pass that changes nothing and keeps what it was told, by name."""

    seen: ClassVar[list[tuple[list[str], list[list[str]]]]] = []
    stages: ClassVar[tuple[str, ...]] = ("model",)

    def rewrite(self, jaxpr, context):
        roles = context.roles(jaxpr)
        self.seen.append(([leaf.path for leaf in context.inputs], list(roles.inputs().values())))
        return jaxpr


def test_a_model_pass_is_told_which_inputs_of_the_step_the_model_has():
    def loss(params, x):
        return jnp.square(x @ params["w"]).sum()

    def step(state, x):
        doubled = {"w": state["ema"]["w"] * 2}
        return jax.grad(loss)(state["params"], x), jax.grad(loss)(doubled, x)

    state = {"params": {"w": W}, "ema": {"w": W}}
    Look.seen.clear()
    named = Plan({}, [Look()], axes={"mlp": "[0]['params']['w'][1]", "vocab": "[1][1]"})
    parallelize(step, named).trace(state, X)
    (first, roles), (second, _) = Look.seen
    assert first == ["[0]['params']['w']"] and second == [""]
    assert roles[0][1] == ["mlp"]
