"""The engine: a program in which nothing changes stays what it is; a rule's change reaches every depth."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax.sharding import Mesh, PartitionSpec

from tests.programs import (
    DIFFERENTIABLE,
    DIFFERENTIATES,
    NAMES,
    Programs,
    W,
    X,
    assert_same,
    flat,
    loss,
    with_gradients,
)
from tests.random_programs import programs
from xform.errors import Decline, RewriteError
from xform.higher_order import bodies
from xform.report import Report
from xform.rewrite import alike, interface, rewrite, splice
from xform.trace import Jaxpr, check_jaxpr, eval_jaxpr, inline, name_stack, source_line, trace_flat, typeof

SCALE = np.float32([0.5, 1.5, 2.0, 0.25, 1.0])
PLAIN = Programs()
PROGRAMS = [*NAMES, *(f"grad {name}" for name in DIFFERENTIABLE)]


def trace(f, *args) -> Jaxpr:
    return trace_flat(flat(f), [typeof(jnp.asarray(a)) for a in args], getattr(f, "__name__", "f"))


def program(name: str, programs: Programs = PLAIN):
    f = getattr(programs, name.removeprefix("grad "))
    return jax.grad(loss(f), (0, 1)) if name.startswith("grad ") else f


def text(jaxpr: Jaxpr) -> str:
    return jaxpr.pretty_print(name_stack=True, source_info=True)


def lowered(jaxpr: Jaxpr, *args) -> str:
    return jax.jit(lambda *xs: inline(jaxpr, *xs)).lower(*args).as_text()


def every_eqn(jaxpr: Jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for body in bodies(eqn):
            yield from every_eqn(body)


def primitives(jaxpr: Jaxpr) -> list[str]:
    return [eqn.primitive.name for eqn in every_eqn(jaxpr)]


def softsign(x):
    return x / (1 + jnp.abs(x))


def scaled_dot(x, w):
    y = jnp.matmul(x, w)
    return y * SCALE[: y.shape[-1]]


def soft_and_scaled(site):
    """tanh -> softsign, x @ w -> (x @ w) * an array constant."""
    if site.name == "tanh":
        return [softsign(*site.args)]
    if site.name == "dot_general":
        (y,) = site.bind()
        size = y.shape[-1] if y.ndim else 1
        return [(y * jnp.resize(SCALE, size)).astype(y.dtype).reshape(y.shape)]
    return None


def rebind_leaves(site):
    return None if bodies(site.eqn) else site.bind()


def rebind_all(site):
    return site.bind()


# ---------------------------------------------------------------- nothing changes


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_rule_that_answers_none_gives_the_same_object(name):
    jaxpr = trace(program(name), W, X)
    assert rewrite(jaxpr, lambda site: None) is jaxpr


@pytest.mark.parametrize("name", PROGRAMS)
def test_to_bind_again_gives_the_same_text(name):
    jaxpr = trace(program(name), W, X)
    expected = text(jaxpr), lowered(jaxpr, W, X)
    for rule in rebind_leaves, rebind_all:
        new = rewrite(jaxpr, rule)
        assert new is not jaxpr
        check_jaxpr(new)
        assert (text(new), lowered(new, W, X)) == expected


def test_a_kernel_is_left_whole():
    jaxpr = trace(Programs().pallas_call, W, X)
    seen = []
    rewrite(jaxpr, lambda site: seen.append(site.name))
    assert seen.count("tanh") == 1  # that of the layer after the kernel, whose own is not offered


@settings(max_examples=40)
@given(programs())
def test_to_bind_a_random_program_again_gives_the_same_text(drawn):
    f, args = drawn
    jaxpr = trace(f, *args)
    assert rewrite(jaxpr, lambda site: None) is jaxpr
    for rule in rebind_leaves, rebind_all:
        new = rewrite(jaxpr, rule)
        check_jaxpr(new)
        assert text(new) == text(jaxpr)


@settings(max_examples=4)
@given(programs())
def test_a_random_program_lowers_and_computes_the_same_after_it_was_bound_again(drawn):
    f, args = drawn
    jaxpr = trace(f, *args)
    new = rewrite(jaxpr, rebind_leaves)
    assert lowered(new, *args) == lowered(jaxpr, *args)
    before, after = (jax.jit(lambda *xs, j=j: inline(j, *xs))(*args) for j in (jaxpr, new))
    jax.tree.map(np.testing.assert_array_equal, before, after)


@settings(max_examples=15)
@given(programs())
def test_what_a_rule_changes_in_a_random_program_is_changed_everywhere(drawn):
    f, args = drawn
    jaxpr = trace(f, *args)
    new = rewrite(jaxpr, soft_and_scaled)
    check_jaxpr(new)
    assert [v.aval for v in new.outvars] == [v.aval for v in jaxpr.outvars]
    assert "tanh" not in primitives(new)
    assert primitives(new).count("dot_general") == primitives(jaxpr).count("dot_general")


# ---------------------------------------------------------------- a change reaches every depth


@pytest.mark.parametrize("name", [name for name in NAMES if name not in DIFFERENTIATES])
def test_a_change_reaches_every_depth(name):
    before, after = program(name), program(name, Programs(softsign, scaled_dot))
    jaxpr = trace(before, W, X)
    new = rewrite(jaxpr, soft_and_scaled)
    check_jaxpr(new)
    assert [v.aval for v in new.outvars] == [v.aval for v in jaxpr.outvars]

    both = with_gradients if name in DIFFERENTIABLE else flat
    assert_same(both(after), both(lambda w, x: inline(new, w, x)), W, X)


@pytest.mark.parametrize(
    "name", ["scan", "remat", "cond", "nested_jit", "custom_vjp", "custom_jvp", "shard_map"]
)
def test_array_constants_of_a_rule_survive_vmap_and_grad(name):
    before, after = program(name), program(name, Programs(softsign, scaled_dot))
    new = rewrite(trace(before, W, X), soft_and_scaled)

    def per_example(f):
        return jax.vmap(jax.grad(loss(f), (0, 1)), (None, 0))

    assert_same(per_example(after), per_example(lambda w, x: inline(new, w, x)), W, jnp.stack([X, X * 2]))


def test_the_forward_pass_of_a_custom_vjp_is_rewritten():
    new = rewrite(trace(Programs().clipped, X, W), soft_and_scaled)
    assert "tanh" not in primitives(new)
    assert "tanh" not in primitives(trace(jax.grad(lambda x, w: eval_jaxpr(new, x, w)[0].sum()), X, W))


def test_a_function_called_twice_stays_one_function():
    new = rewrite(trace(Programs().layers, W, X), soft_and_scaled)
    assert len(re.findall(r"func.func private @layer", lowered(new, W, X))) == 1


def test_a_function_whose_calls_are_rewritten_differently_becomes_two():
    def first_only(site):
        return [softsign(*site.args)] if site.name == "tanh" and site.path[0][0] == 0 else None

    new = rewrite(trace(Programs().layers, W, X), first_only)
    assert primitives(new).count("tanh") == 2  # of three layers
    assert len(re.findall(r"func.func private @layer", lowered(new, W, X))) == 2


def test_what_a_rule_emits_is_not_offered_again():
    jaxpr = trace(jnp.tanh, X)
    new = rewrite(jaxpr, lambda site: [jnp.tanh(site.bind()[0])] if site.name == "tanh" else None)
    assert primitives(new) == ["tanh", "tanh"]


def test_an_outer_equation_is_offered_before_what_is_inside_it():
    seen = []
    rewrite(trace(Programs().scan, W, X), lambda site: seen.append(site.name))
    assert seen.index("scan") < seen.index("dot_general")


def test_a_site_knows_where_it_stands():
    where = {}

    def look(site):
        where.setdefault(site.name, (site.path, site.where, site.line))

    rewrite(trace(Programs().layers, W, X), look)
    path, stack, line = where["dot_general"]
    assert path == ((0, 0),) and stack == "decoder"
    assert re.fullmatch(r"programs.py:\d+ \(Programs.layer\)", line)


# ---------------------------------------------------------------- what is kept


def test_weak_types_are_kept():
    jaxpr = trace(lambda x: (x * 2.0, jnp.tanh(jnp.asarray(0.5) * 1.0)), X)
    new = rewrite(jaxpr, lambda site: [jnp.float32(3.0)] if site.name == "tanh" else rebind_leaves(site))
    assert (
        [v.aval.weak_type for v in new.outvars] == [v.aval.weak_type for v in jaxpr.outvars] == [False, True]
    )


def test_what_is_emitted_has_the_line_and_the_names_of_what_it_replaces():
    jaxpr = trace(Programs().layers, W, X)

    def places(jaxpr, *names):
        return {(source_line(e), name_stack(e)) for e in every_eqn(jaxpr) if e.primitive.name in names}

    new = rewrite(jaxpr, soft_and_scaled)
    assert places(new, "div", "abs") == places(jaxpr, "tanh")
    compiled = jax.jit(lambda *xs: inline(new, *xs)).lower(W, X).as_text(debug_info=True)
    assert re.search(r"decoder/[^\"]*abs", compiled)


def test_an_effect_that_a_rule_brings_is_registered_on_every_enclosing_equation(capfd):
    def printing(site):
        if site.name != "tanh":
            return None
        jax.debug.print(f"tanh of {site.avals[0].shape}")
        return site.bind()

    jaxpr = trace(Programs().scan_in_scan, W, X)
    new = rewrite(jaxpr, printing)
    assert not jaxpr.effects and len(new.effects) == 1
    assert all(
        e.effects == new.effects for e in every_eqn(new) if e.primitive.name in ("scan", "debug_print")
    )
    check_jaxpr(new)
    jax.block_until_ready(jax.jit(lambda *xs: inline(new, *xs))(W, X))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("tanh of (5,)") == 15


def test_an_effect_that_a_rule_removes_is_gone_from_every_enclosing_equation():
    new = rewrite(
        trace(Programs().debug_print, W, X), lambda site: [] if site.name == "debug_print" else None
    )
    assert not new.effects
    check_jaxpr(new)


def test_a_collective_in_a_shard_map_is_an_effect_of_nothing_outside_it():
    new = rewrite(
        trace(Programs().shard_map, W, X),
        lambda site: [jax.lax.psum(site.args[0], "model") / 2] if site.name == "psum_invariant" else None,
    )
    check_jaxpr(new)


def test_constants_that_nothing_uses_are_dropped():
    def rule(site):
        if site.name == "tanh":
            return [softsign(*site.args)]
        jnp.broadcast_to(jnp.asarray(SCALE), (3, 5)) + 1
        return None

    assert not rewrite(trace(lambda x: jnp.tanh(x) @ x.T, X), rule).consts


def test_the_rewrite_is_the_same_in_a_shard_map_over_some_of_the_axes():
    mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("data", "model"))

    def f(tanh):
        def body(x):
            return jax.lax.psum(tanh(x) * 3, "data")

        return jax.shard_map(
            body, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec(), axis_names={"data"}
        )

    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    new = rewrite(trace(f(jnp.tanh), x), soft_and_scaled)
    check_jaxpr(new)
    np.testing.assert_allclose(jax.jit(lambda x: inline(new, x))(x)[0], jax.jit(f(softsign))(x), rtol=1e-6)


def test_a_rule_may_answer_with_an_operand_or_a_constant():
    jaxpr = trace(lambda x: (-jnp.sin(x), jnp.cos(x)), X)
    new = rewrite(
        jaxpr, lambda s: s.args if s.name == "neg" else [np.ones_like(X)] if s.name == "cos" else None
    )
    check_jaxpr(new)
    assert primitives(new) == ["sin"]
    np.testing.assert_array_equal(eval_jaxpr(new, X)[1], np.ones_like(X))


def test_a_constant_in_a_shard_map_is_made_to_vary_as_what_it_replaces():
    def rule(site):
        return [jnp.zeros(site.out_avals[0].shape)] if site.name == "tanh" else None

    new = rewrite(trace(Programs().shard_map, W, X), rule)
    check_jaxpr(new)
    assert "tanh" not in primitives(new)


def test_explicit_shardings_are_part_of_the_type():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(np.zeros((4, 3), np.float32), jax.NamedSharding(mesh, PartitionSpec("data")))
        jaxpr = trace(jnp.tanh, x)
        assert str(rewrite(jaxpr, soft_and_scaled).outvars[0].aval) == "float32[4@data,3]"
        with pytest.raises(RewriteError, match=r"type float32\[4,3\]; it was float32\[4@data,3\]"):
            rewrite(jaxpr, lambda site: [jnp.zeros((4, 3))])


def test_programs_are_alike_when_only_names_of_variables_differ():
    def same(*programs):
        return alike(*(trace(p, W, X) for p in programs))

    assert same(Programs().layers, Programs().layers) and same(Programs().scan, Programs().scan)
    assert not same(Programs().layer, Programs(jnp.sin).layer)
    assert not same(lambda w, x: x * 2.0, lambda w, x: x * 3.0)
    assert not same(lambda w, x: x * 0.0, lambda w, x: x * -0.0)
    assert not same(lambda w, x: x - w[:3], lambda w, x: w[:3] - x)
    assert not same(lambda w, x: (w, x), lambda w, x: (x, w))


# ---------------------------------------------------------------- refusals and faults


def test_a_decline_reaches_the_report_with_the_users_line():
    def rule(site):
        if site.name == "tanh":
            raise Decline("tanh is not supported yet; use softsign")
        return None

    report = Report()
    jaxpr = trace(Programs().layers, W, X)
    assert rewrite(jaxpr, rule, report, "soften") is jaxpr
    ((note, count),) = report
    assert (note.kind, note.pass_name, note.what, count) == ("declined", "soften", "tanh", 3)
    assert note.why == "tanh is not supported yet; use softsign"
    assert re.fullmatch(r"programs.py:\d+ \(Programs.layer\)", note.where)


@pytest.mark.parametrize("name", ["layer", "scan", "custom_jvp"])
def test_a_rule_that_returns_another_type_is_named_with_both_types(name):
    def rule(site):
        return [jnp.zeros((7,), jnp.bfloat16)] if site.name == "tanh" else None

    with pytest.raises(
        RewriteError, match=r"wrong replaced tanh at programs.py:\d+ .*bfloat16\[7\]; it was float32\["
    ):
        rewrite(trace(program(name), W, X), rule, name="wrong")


def test_a_rule_that_returns_too_few_values_is_named():
    with pytest.raises(RewriteError, match=r"short replaced top_k at .* by 1 values; it has 2 results"):
        rewrite(
            trace(Programs().integers, W, X),
            lambda s: s.args[:1] if s.name == "top_k" else None,
            name="short",
        )


def test_a_value_made_in_one_body_and_used_in_another_is_named():
    made = []

    def rule(site):
        if site.name == "dot_general":
            made.append(site.bind()[0])
        return [made[0]] if site.name == "tanh" else None

    with pytest.raises(RewriteError, match="shared used a value that it made in one body in another"):
        rewrite(trace(Programs().nested_jit, W, X), rule, name="shared")


# ---------------------------------------------------------------- splice


def attend(q, k, v):
    scores = q @ k.T
    weights = jax.nn.softmax(scores * 0.5)
    return weights @ v, scores


def test_splice_turns_a_run_of_equations_into_what_a_function_emits():
    def after(q, k, v):
        scores = q @ k.T
        return softsign(scores) @ v, scores

    jaxpr = trace(attend, X, X, X)
    names = [e.primitive.name for e in jaxpr.eqns]
    start, stop = names.index("dot_general") + 1, len(names) - 1
    reads, live = interface(jaxpr, start, stop)
    assert [v.aval.shape for v in reads] == [(3, 3)] and [v.aval.shape for v in live] == [(3, 3)]
    new = splice(jaxpr, start, stop, lambda scores: [softsign(scores)])
    check_jaxpr(new)
    assert alike(new, trace(after, X, X, X))


def test_splice_of_a_run_that_is_read_later_gives_all_that_is_read():
    jaxpr = trace(attend, X, X, X)
    reads, live = interface(jaxpr, 0, 2)
    assert [v.aval.shape for v in reads] == [(3, 5), (3, 5)] and [v.aval.shape for v in live] == [(3, 3)]
    new = splice(jaxpr, 0, 2, lambda k, q: [q @ k.T])
    check_jaxpr(new)
    assert alike(new, jaxpr)


def test_splice_names_a_value_of_the_wrong_type():
    with pytest.raises(
        RewriteError, match=r"attention replaced .* by a value of type float32\[3,5\]; it was float32\[3,3\]"
    ):
        splice(trace(attend, X, X, X), 0, 2, lambda q, k: [q], "attention")


def test_splice_outside_the_program_is_an_error():
    with pytest.raises(RewriteError, match="no equations 3:99"):
        splice(trace(attend, X, X, X), 3, 99, lambda *a: a)


def test_source_lines_are_found_in_this_file():
    jaxpr = trace(lambda x: jnp.tanh(x), X)
    assert source_line(jaxpr.eqns[0]).startswith("test_rewrite.py:")
