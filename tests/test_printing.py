"""Programs as text and pages, and differences that show what changed and nothing else."""

import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from xform.printing import DiffLine, align, diff, diff_text, html, lines, stablehlo_diff, text
from xform.printing.compare import compare
from xform.printing.difference import rows_of
from xform.printing.listing import count
from xform.trace import Jaxpr

WEIGHTS = jax.ShapeDtypeStruct((3, 5, 5), jnp.float32)
X = jax.ShapeDtypeStruct((16, 5), jnp.float32)


def traced(fn: Callable[..., Any], *args: Any) -> Jaxpr:
    return jax.make_jaxpr(lambda *xs: fn(*xs))(*args)


def constrained(x: jax.Array, *spec: Any) -> jax.Array:
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec or ("fsdp", None))))


def same(x: Any) -> Any:
    return x


def mlp(
    hidden: Callable[[Any], Any] = same, block: Callable[[Any], Any] = same
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """A scanned MLP's loss: `hidden` is applied to each layer's output, `block` to the layer."""

    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            with jax.named_scope("layer"):
                return hidden(jnp.tanh(h @ w)), None

        h, _ = jax.lax.scan(block(layer), x, weights)
        return jnp.mean(h * h)

    return loss


def train_step(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    def step(weights: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, grad = jax.value_and_grad(loss)(weights, x)
        return weights - 0.1 * grad, value

    return step


def unrolled(layers: int, hidden: Callable[[Any], Any] = same) -> Callable[..., jax.Array]:
    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in weights:
            h = hidden(jnp.tanh(x @ w))
            x = x + jnp.sin(h) * jnp.exp(-h)
        return jnp.mean(x * x)

    return loss


def marks(rows: list[DiffLine]) -> list[str]:
    return [f"{row.mark} {row.line.text}" for row in rows if row.mark in "+-~"]


def primitives(rows: list[DiffLine], mark: str) -> list[str]:
    return [r.line.eqn.primitive.name for r in rows if r.mark in mark and r.line.eqn is not None]


@jax.custom_vjp
def clipped(x: jax.Array) -> jax.Array:
    return jnp.clip(x, -1.0, 1.0)


clipped.defvjp(lambda x: (clipped(x), x), lambda x, g: (g * jnp.cos(x),))


def with_cond(w: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.cond(x.sum() > 0, lambda a: a @ w[0], lambda a: clipped(a) - 1.5, x)


def with_while(w: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.while_loop(lambda c: c[0] < 7, lambda c: (c[0] + 1, c[1] @ w[1]), (0, x))[1]


def with_constants(w: jax.Array, x: jax.Array) -> jax.Array:
    noise = jax.random.normal(jax.random.key(3), x.shape)
    return x * jnp.arange(5.0) + noise @ w[0] + jnp.asarray([2.0, 3.0, 5.0, 7.0, 11.0])


PROGRAMS: dict[str, Callable[..., Any]] = {
    "scan": mlp(),
    "step": train_step(mlp()),
    "constrained step": train_step(mlp(constrained)),
    "remat step": train_step(mlp(block=jax.checkpoint)),
    "cond": with_cond,
    "grad of cond": jax.grad(lambda w, x: with_cond(w, x).sum()),
    "while": with_while,
    "constants": with_constants,
}


# ---------------------------------------------------------------- lines


def test_text_of_a_scan() -> None:
    assert text(traced(mlp(), WEIGHTS, X), source=False).split("\n") == [
        "input a: f32[3,5,5]",
        "input b: f32[16,5]",
        "c: f32[16,5] = scan b a [length 3]",
        "  body: carried d: f32[16,5]; scanned e: f32[5,5]",
        "    f: f32[16,5] = dot_general d e [contract 1x0]",
        "    g: f32[16,5] = tanh f",
        "    return g",
        "h: f32[16,5] = mul c c",
        "i: f32[] = reduce_sum h [over (0,1)]",
        "j: f32[] = div i 80.0",
        "output j",
    ]


def test_lines_carry_the_users_source_line_and_scope() -> None:
    def fn(x: jax.Array) -> jax.Array:
        with jax.named_scope("here"):
            return jnp.tanh(x)

    line = fn.__code__.co_firstlineno + 2
    (found,) = [each for each in lines(jax.make_jaxpr(fn)(X)) if each.kind == "eqn"]
    assert (found.source, found.scope) == (f"test_printing.py:{line}", "here")
    assert text(jax.make_jaxpr(fn)(X)).split("\n")[1].endswith(f"# test_printing.py:{line}  here")


def test_inputs_and_outputs_have_the_users_names() -> None:
    def fn(params: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {"out": params["w"] + 1}

    found = lines(jax.make_jaxpr(fn)({"w": X}))
    assert [(each.kind, each.scope) for each in found if each.scope] == [
        ("input", "params['w']"),
        ("output", "result['out']"),
    ]


def test_shardings_are_shown_as_partition_specs() -> None:
    assert "= sharding_constraint g [P('fsdp', None)]" in text(traced(mlp(constrained), WEIGHTS, X))
    left_open = traced(lambda x: constrained(x, P.UNCONSTRAINED, "fsdp"), jnp.zeros((3, 8)))
    assert "[P(?, 'fsdp')]" in text(left_open)


def test_branches_conditions_and_called_functions_are_labelled() -> None:
    cond, loop = text(traced(with_cond, WEIGHTS, X)), text(traced(with_while, WEIGHTS, X))
    for expected in ("branch 0 (if false):", "branch 1 (if true):", "custom_vjp_call clipped ", " 1.5"):
        assert expected in cond
    assert "condition: carried " in loop and "body: constant " in loop
    assert "jit silu" in text(traced(lambda x: jax.nn.silu(x), X))


def test_a_kernel_is_named_and_left_whole() -> None:
    def fn(scale: float) -> Callable[[Any], Any]:
        def kernel(x_ref: Any, o_ref: Any) -> None:
            o_ref[...] = x_ref[...] * scale

        return pl.pallas_call(kernel, out_shape=X)

    assert "b: f32[16,5] = pallas_call kernel a\n" in text(traced(fn(2.0), X), source=False)
    assert diff(traced(fn(2.0), X), traced(fn(2.0), X)) == []
    rows = diff(traced(fn(2.0), X), traced(fn(3.0), X))
    assert [row.note for row in rows if row.mark == "+"] == ["the program inside differs"]


def test_a_shard_map_shows_its_specs_and_its_body() -> None:
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(
        lambda a: jax.lax.psum(a * 2, "fsdp"), mesh=mesh, in_specs=P("fsdp"), out_specs=P()
    )
    shown = text(traced(mapped, X))
    assert "shard_map a [in P('fsdp'), out P(), manual over fsdp]" in shown
    assert "body: c: f32[2,5]" in shown


def test_a_body_that_was_printed_is_pointed_to() -> None:
    inner = jax.jit(lambda x: jnp.tanh(x) * 2)
    shown = text(traced(lambda x: inner(inner(x)), X))
    assert shown.count("tanh") == 1
    assert "body: as under `b = jit" in shown and "(2 equations)" in shown


def test_variables_are_never_called_like_an_operation() -> None:
    def long(x: jax.Array) -> jax.Array:
        for _ in range(2000):
            x = x + 1
        return x

    named = [each.text.split(":")[0] for each in lines(traced(long, X)) if each.kind == "eqn"]
    assert len(set(named)) == 2000
    assert not {"in", "ge", "add", "sub"} & set(named)


@pytest.mark.parametrize("name", PROGRAMS)
def test_text_is_the_same_for_every_trace(name: str) -> None:
    fn = PROGRAMS[name]
    one, two = traced(fn, WEIGHTS, X), traced(fn, WEIGHTS, X)
    assert one is not two
    assert text(one) == text(two)
    assert " at 0x" not in text(one)


# ---------------------------------------------------------------- differences


@pytest.mark.parametrize("name", PROGRAMS)
def test_two_traces_of_one_function_do_not_differ(name: str) -> None:
    fn = PROGRAMS[name]
    assert diff(traced(fn, WEIGHTS, X), traced(fn, WEIGHTS, X)) == []


@pytest.mark.parametrize("before", PROGRAMS)
@pytest.mark.parametrize("after", PROGRAMS)
def test_a_difference_holds_both_programs_whole(before: str, after: str) -> None:
    old, new = traced(PROGRAMS[before], WEIGHTS, X), traced(PROGRAMS[after], WEIGHTS, X)
    rows, _ = rows_of(compare(old, new), None)
    assert any(row.mark != " " for row in rows) == (before != after)
    listed = [[each.eqn.primitive.name for each in lines(p) if each.eqn is not None] for p in (old, new)]
    assert Counter(primitives(rows, " -")) == Counter(listed[0])
    assert primitives(rows, " +") == listed[1]


def test_an_inserted_constraint_is_one_line_in_the_scan() -> None:
    rows = diff(traced(mlp(), WEIGHTS, X), traced(mlp(constrained), WEIGHTS, X))
    assert marks(rows) == ["+ g': f32[16,5] = sharding_constraint g [P('fsdp', None)]"]
    assert any(row.line.text == "return g'" and row.mark == " " for row in rows)


def test_inserted_constraints_in_a_step_are_found_forward_and_backward() -> None:
    before, after = traced(train_step(mlp()), WEIGHTS, X), traced(train_step(mlp(constrained)), WEIGHTS, X)
    added = primitives(diff(before, after), "+")
    assert added.count("sharding_constraint") == 2
    # with a mesh about, JAX also notes where the gradient's seed lives; nothing else may show
    assert set(added) <= {"sharding_constraint", "reshard", "div"}


def test_a_removed_constraint_is_one_line() -> None:
    rows = diff(traced(mlp(constrained), WEIGHTS, X), traced(mlp(), WEIGHTS, X))
    assert [mark[0] for mark in marks(rows)] == ["-"]
    assert primitives(rows, "-") == ["sharding_constraint"]


def test_later_readers_of_a_replaced_value_are_unchanged() -> None:
    def fn(op: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda x: (lambda y: (y * y, jnp.exp(y)))(op(x + 1))

    rows = diff(traced(fn(jnp.sin), X), traced(fn(jnp.cos), X))
    assert marks(rows) == ["- c: f32[16,5] = sin b", "+ c': f32[16,5] = cos b"]
    assert [row.line.text for row in rows if row.rewired] == [
        "d: f32[16,5] = mul c' c'",
        "e: f32[16,5] = exp c'",
    ]


def test_another_operand_is_a_change() -> None:
    before = traced(lambda x, y, z: (x + y) * z, X, X, X)
    after = traced(lambda x, y, z: (x + y) * x, X, X, X)
    assert marks(diff(before, after)) == ["- e: f32[16,5] = mul d c", "+ e: f32[16,5] = mul d a"]


def test_another_output_is_a_change() -> None:
    before = traced(lambda x: (jnp.sin(x), jnp.cos(x)), X)
    after = traced(lambda x: (lambda a, b: (b, a))(jnp.sin(x), jnp.cos(x)), X)
    assert marks(diff(before, after)) == ["- output b", "+ output c", "- output c", "+ output b"]


def test_another_literal_is_a_change() -> None:
    rows = diff(traced(lambda x: x * 2.0 + 1, X), traced(lambda x: x * 3.0 + 1, X))
    assert marks(rows) == ["- b: f32[16,5] = mul a 2.0", "+ b: f32[16,5] = mul a 3.0"]


def test_another_constant_is_a_change() -> None:
    def fn(constant: jax.Array) -> Callable[[Any], Any]:
        return lambda x: x + constant

    one, two = jnp.arange(5.0), jnp.arange(5.0).at[4].set(9.0)
    assert diff(traced(fn(one), X), traced(fn(jnp.array(one)), X)) == []
    assert marks(diff(traced(fn(one), X), traced(fn(two), X)))


def test_a_parameter_that_a_line_does_not_show_is_noted() -> None:
    def fn(prevent_cse: bool) -> Callable[[Any], Any]:
        return jax.checkpoint(lambda x: jnp.sin(x) * x, prevent_cse=prevent_cse)

    rows = diff(traced(fn(True), X), traced(fn(False), X))
    assert [row.note for row in rows if row.mark == "+"] == ["prevent_cse: True -> False"]
    assert primitives(rows, "+-") == ["remat2", "remat2"]


def test_an_operand_that_a_long_line_does_not_show_is_noted() -> None:
    def fn(last: int) -> Callable[..., Any]:
        return lambda *xs: jnp.concatenate([*xs[:19], xs[last]])

    rows = diff(traced(fn(19), *[X] * 20), traced(fn(0), *[X] * 20))
    assert [row.note for row in rows if row.mark == "+"] == ["operand 19: t -> a"]


def test_remat_policies_differ_by_the_names_that_they_save() -> None:
    def fn(*names: str) -> Callable[[Any], Any]:
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        return jax.checkpoint(lambda x: jnp.sin(x) * x, policy=policy)

    assert diff(traced(fn("q", "k"), X), traced(fn("q", "k"), X)) == []
    shown = marks(diff(traced(fn("q", "k"), X), traced(fn("mlp"), X)))
    assert len(shown) == 2 and "mlp" in shown[1]


def test_remat_around_a_scans_body_leaves_the_body_unchanged() -> None:
    before, after = traced(mlp(), WEIGHTS, X), traced(mlp(block=jax.checkpoint), WEIGHTS, X)
    rows = diff(before, after)
    assert marks(rows) == [
        "+ g: f32[16,5] = remat2 d e",
        "+ body: d: f32[16,5], e: f32[5,5]",
        "+ return g",
    ]
    back = diff(after, before)
    assert primitives(back, "-") == ["remat2"]
    assert all(mark[0] == "-" for mark in marks(back))


def test_remat_around_each_layer_of_an_unrolled_model() -> None:
    def fn(wrap: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
        def model(w: jax.Array, x: jax.Array) -> jax.Array:
            for k in range(3):
                x = wrap(lambda h, w: jnp.tanh(h @ w) + jnp.sin(h))(x, w[k])
            return x

        return model

    rows = diff(traced(fn(same), WEIGHTS, X), traced(fn(jax.checkpoint), WEIGHTS, X))
    assert primitives(rows, "+-") == ["remat2"] * 3


def test_an_inlined_call_shows_only_the_call_going() -> None:
    def fn(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        inner = call(lambda x: jnp.tanh(x) * jnp.exp(x))
        return lambda x: inner(x + 1) * 2

    rows = diff(traced(fn(jax.jit), X), traced(fn(same), X))
    assert primitives(rows, "+-") == ["jit"]
    assert primitives(diff(traced(fn(same), X), traced(fn(jax.jit), X)), "+-") == ["jit"]


def test_only_the_branch_that_changed_shows_a_change() -> None:
    def fn(op: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda x: jax.lax.cond(x.sum() > 0, jnp.exp, lambda a: op(a) + jnp.tanh(a), x)

    rows = diff(traced(fn(jnp.sin), X), traced(fn(jnp.cos), X))
    assert primitives(rows, "-") == ["sin"] and primitives(rows, "+") == ["cos"]
    assert not any("branch 1" in row.line.text for row in rows)


def test_a_loop_that_carries_more_shows_its_new_inputs_and_keeps_the_rest() -> None:
    def fn(more: bool) -> Callable[[Any], Any]:
        def body(carry: Any, _: Any) -> Any:
            x, *rest = carry
            return (jnp.tanh(x) * 2, *(n + 1 for n in rest)), None

        return lambda x: jax.lax.scan(body, (x, *([0] * more)), None, length=3)[0][0]

    rows, _ = rows_of(compare(traced(fn(False), X), traced(fn(True), X)), None)
    assert primitives(rows, "+") == ["scan", "add"]
    assert primitives(rows, " ") == ["tanh", "mul"]


def test_a_new_input_is_one_line() -> None:
    rows = diff(traced(lambda x: jnp.sin(x), X), traced(lambda y, x: jnp.sin(x), WEIGHTS, X))
    assert marks(rows) == ["+ input c: f32[3,5,5]"]


def test_the_same_change_in_a_shared_body_is_shown_once() -> None:
    def fn(op: Callable[[Any], Any]) -> Callable[[Any], Any]:
        inner = jax.jit(lambda x: op(x) * 2)
        return lambda x: inner(inner(inner(x)))

    rows = diff(traced(fn(jnp.sin), X), traced(fn(jnp.cos), X))
    assert primitives(rows, "+-") == ["sin", "cos"]
    assert [mark.endswith("the same changes") for mark in marks(rows)] == [False, False, True, True]


@pytest.mark.parametrize("most_edits", [500, 3])
def test_many_alike_layers_stay_aligned(most_edits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(align, "MOST_EDITS", most_edits)
    weights = [jax.ShapeDtypeStruct((5, 5), jnp.float32)] * 30
    before, after = (traced(unrolled(30, h), weights, X) for h in (same, jax.lax.optimization_barrier))
    rows = diff(before, after)
    assert primitives(rows, "+-") == ["optimization_barrier"] * 30


def test_unchanged_stretches_are_counted_in_one_line() -> None:
    weights = [jax.ShapeDtypeStruct((5, 5), jnp.float32)] * 30

    def once(h: jax.Array, seen: list[int]) -> jax.Array:
        seen.append(1)
        return constrained(h) if len(seen) == 15 else h

    seen: list[int] = []
    before = traced(unrolled(30), weights, X)
    after = traced(unrolled(30, lambda h: once(h, seen)), weights, X)
    rows = diff(before, after, context=1)
    folds = [row.line.text for row in rows if row.mark == "."]
    assert len(marks(rows)) == 1 and len(folds) == 2
    hidden = sum(int(n) for fold in folds for n in re.findall(r"(\d+) equation", fold))
    assert hidden + len(primitives(rows, " ")) == count(before)
    assert folds[1].endswith("1 of them reading a new variable") or "new variable" not in folds[1]


def test_diff_text_marks_lines_and_colors_them_on_request() -> None:
    before, after = traced(mlp(), WEIGHTS, X), traced(mlp(constrained), WEIGHTS, X)
    plain, color = diff_text(before, after), diff_text(before, after, color=True)
    assert [line[0] for line in plain.split("\n")].count("+") == 1
    assert "\033[" not in plain
    assert "\033[32m+" in color and re.sub(r"\033\[\d+m", "", color) == plain
    assert diff_text(before, before) == ""


# ---------------------------------------------------------------- alignment


def test_alignment_is_a_longest_common_subsequence() -> None:
    def longest(a: list[int], b: list[int]) -> int:
        best = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
        for i, x in enumerate(a):
            for j, y in enumerate(b):
                best[i + 1][j + 1] = best[i][j] + 1 if x == y else max(best[i][j + 1], best[i + 1][j])
        return best[-1][-1]

    rng = random.Random(7)
    for _ in range(300):
        a, b = ([rng.randrange(4) for _ in range(rng.randrange(12))] for _ in range(2))
        pairs = align.align([(a, b)])
        assert all(a[i] == b[j] for i, j in pairs)
        assert all(p[0] < q[0] and p[1] < q[1] for p, q in itertools.pairwise(pairs))
        assert len(pairs) == longest(a, b)


def test_a_weaker_key_aligns_only_what_a_stronger_left() -> None:
    strong = (["a1", "a2", "b"], ["a2", "x", "b"])
    weak = ([s[0] for s in strong[0]], [s[0] for s in strong[1]])
    assert align.align([strong, weak]) == [(1, 0), (2, 2)]
    assert align.align([([None, "a"], [None, "a"])]) == [(1, 1)]


# ---------------------------------------------------------------- StableHLO


def lowered(fn: Callable[..., Any], *args: Any) -> str:
    return jax.jit(fn).lower(*args).as_text()


def test_renumbered_stablehlo_does_not_differ() -> None:
    one = lowered(train_step(mlp()), WEIGHTS, X)
    renamed = re.sub(r"%(\d+)", lambda m: f"%{int(m[1]) + 100}", one)
    assert renamed != one
    assert stablehlo_diff(one, renamed) == ""


def test_a_constraint_in_stablehlo_is_one_line_and_its_readers_are_unchanged() -> None:
    def fn(op: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda x: jnp.exp(op(jnp.tanh(x))) * 2

    shown = stablehlo_diff(lowered(fn(same), X), lowered(fn(jax.lax.optimization_barrier), X))
    changed = [line for line in shown.split("\n") if line[0] in "+-"]
    assert len(changed) == 1 and "stablehlo.optimization_barrier" in changed[0]


def test_another_operand_in_stablehlo_is_a_change() -> None:
    one, two = lowered(lambda x, y: jnp.sin(x) - y, X, X), lowered(lambda x, y: jnp.sin(x) - x, X, X)
    changed = [line for line in stablehlo_diff(one, two).split("\n") if line[0] in "+-"]
    assert any("stablehlo.subtract" in line and line[0] == "+" for line in changed)


# ---------------------------------------------------------------- the page


def page_data(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found is not None
    return json.loads(found[1])


def stages() -> list[tuple[str, Jaxpr]]:
    programs = [mlp(), mlp(constrained), mlp(constrained, jax.checkpoint)]
    return list(zip(("traced", "shard", "remat"), (traced(p, WEIGHTS, X) for p in programs), strict=True))


def test_the_page_stands_alone_and_is_the_same_each_time() -> None:
    page = html(stages(), notes=["shard: did 1 constraint"], title="a <b> title")
    assert page == html(stages(), notes=["shard: did 1 constraint"], title="a <b> title")
    assert not re.search(r"(src|href)=[\"'](?!#)|<link|<img|@import|url\(|https?://", page)
    assert "a &lt;b&gt; title" in page and "<b> title" not in page


def test_the_page_says_what_each_pass_did_with_its_notes() -> None:
    page = html(stages(), notes=["shard: did one thing", "Remat: declined another", "neither: general"])
    shard, remat = page.index('<section id="pass1">'), page.index('<section id="pass2">')
    assert "added 1 equation (1 sharding_constraint)" in page[shard:remat]
    assert "did one thing" in page[shard:remat] and "declined another" not in page[shard:remat]
    assert "added 1 equation (1 remat2)" in page[remat:] and "declined another" in page[remat:]
    assert "neither: general" in page[:shard]


def test_the_page_shows_the_change_and_folds_the_rest_as_data() -> None:
    weights = [jax.ShapeDtypeStruct((5, 5), jnp.float32)] * 40
    before = traced(unrolled(40), weights, X)
    after = traced(lambda w, x: unrolled(40)(w, constrained(x)), weights, X)
    page = html([("traced", before), ("shard", after)])
    shown = re.findall(r'<div class="l ([a-z ]*)"', page)
    assert shown.count("add") == 1 and shown.count("del") == 0 and len(shown) < 8
    data = page_data(page)
    whole = [len(fold) for fold in data["folds"]][-2:]
    assert whole == [len(lines(before)), len(lines(after))]
    assert {data["texts"][row[2]] for row in data["folds"][-2]} == {line.text for line in lines(before)}


def test_a_stage_without_a_name_is_no_change() -> None:
    (first, before), (name, after), *_ = stages()
    other = jax.make_jaxpr(lambda x: jnp.sin(x) * 2)(1.0)
    page = html([(first, other), ("", before), (name, after)])
    alone = html([(first, before), (name, after)])
    table = re.compile(r"<table.*?</table>", re.DOTALL)
    assert table.findall(page) == table.findall(alone)


def test_names_stay_through_the_stages() -> None:
    page = html(stages())
    remat = page[page.index('<section id="pass2">') :]
    assert "g&#x27;: f32[16,5] = remat2 d e" in remat


def test_a_long_run_of_added_lines_is_folded_in_the_middle() -> None:
    def long(x: jax.Array) -> jax.Array:
        for _ in range(200):
            x = jnp.sin(x)
        return x

    page = html([("traced", traced(lambda x: x, X)), ("grow", traced(long, X))])
    assert "added 200 equations (200 sin)" in page
    assert "more lines added" in page
    assert len(re.findall(r'<div class="l add', page)) < 60


def test_a_pass_that_did_nothing_says_so() -> None:
    page = html([("traced", traced(mlp(), WEIGHTS, X)), ("shard", traced(mlp(), WEIGHTS, X))])
    assert "left the program as it was" in page and "No line changed." in page


def test_the_page_shows_what_goes_to_the_compiler() -> None:
    texts = lowered(mlp(), WEIGHTS, X), lowered(mlp(jax.lax.optimization_barrier), WEIGHTS, X)
    page = html(stages(), stablehlo=texts)
    assert "stablehlo.optimization_barrier" in page[page.index('<section id="stablehlo">') :]


def regional(fn: Callable[..., Any], *specs: P) -> Callable[..., Any]:
    """The function as every one of eight devices runs it, its result the same on all."""
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)


def scanned(gather: Callable[..., Any], total: Callable[..., Any], scale: Any = lambda y: y) -> Any:
    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jax.nn.silu(x @ gather(w)), None

    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sqrt(total(scale(jax.lax.scan(layer, x, w)[0]).sum()))

    return fn


SHARDS = P(None, None, "fsdp"), P("fsdp")
SCANNED = jax.ShapeDtypeStruct((3, 8, 8), jnp.float32), jax.ShapeDtypeStruct((16, 8), jnp.float32)


def gathered(w: jax.Array) -> jax.Array:
    return jax.lax.all_gather(w, "fsdp", axis=1, tiled=True)


def summed(x: jax.Array) -> jax.Array:
    return jax.lax.psum(x, "fsdp")


def marked(before: Jaxpr, after: Jaxpr, mark: str) -> list[str]:
    """What stands on the lines of a difference that have this mark."""
    return [row.line.text.split(" = ")[-1].split(" ")[0] for row in diff(before, after) if row.mark == mark]


def test_in_a_new_manual_region_only_the_collectives_are_new() -> None:
    before = traced(scanned(constrained, jax.lax.optimization_barrier), *SCANNED)
    after = traced(regional(scanned(gathered, summed), *SHARDS), *SCANNED)
    assert marked(before, after, "+") == ["shard_map", "body:", "all_gather", "psum", "return"]
    assert marked(before, after, "-") == ["sharding_constraint", "optimization_barrier"]


def test_in_a_new_manual_region_other_arithmetic_shows() -> None:
    before = traced(scanned(constrained, jax.lax.optimization_barrier, lambda y: y * 16.0), *SCANNED)
    after = traced(regional(scanned(gathered, summed, lambda y: y * 2.0), *SHARDS), *SCANNED)
    assert "mul" in marked(before, after, "-") and "mul" in marked(before, after, "+")


def test_a_call_with_a_literal_among_its_operands_is_inlined() -> None:
    def scaled(call: Callable[..., Any]) -> Callable[..., Any]:
        def fn(x: jax.Array) -> jax.Array:
            return jnp.sin(call(lambda y, by: jnp.cos(y * by))(x, np.float32(3)))

        return fn

    before, after = traced(scaled(jax.jit), X), traced(scaled(same), X)
    changed = marked(before, after, "-")
    assert "jit" in changed and "cos" not in changed and "sin" not in changed
