"""Which products are quantized, by which rules, what is left alone and why; on several devices too."""

import math
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.layers import f, i, picked
from tests.test_experts import ARGS as EXPERTS
from tests.test_experts import grouped, loss_with
from xform import Plan, PlanError, Remat, Shard, parallelize, topologies
from xform.higher_order import equations
from xform.models import llama
from xform.passes.quantize import RECIPES, Quantize

STEP, ARGS = llama.train_step(size="tiny", batch=8, length=16)
ALL = {"query_proj", "key_proj", "value_proj", "out_proj", "mlpwi_0", "mlpwi_1", "mlpwo"}


def traced(*passes: Any, mesh: dict[str, int] | None = None, fn: Any = STEP, args: Any = ARGS) -> Any:
    mesh = mesh or {"data": 1}
    devices = jax.devices()[: math.prod(mesh.values())]
    return parallelize(fn, Plan(mesh, passes=passes), devices=devices).trace(*args)


def done(program: Any) -> dict[str, str]:
    notes = [note for note, _ in program.report if note.pass_name == "quantize" and note.kind == "did"]
    return {name: recipe for name, _, recipe in (n.what.partition(": ") for n in notes)}


def left(program: Any) -> dict[str, str]:
    return {n.what: n.why for n, _ in program.report if n.pass_name == "quantize" and n.kind == "declined"}


def dots(program: Any) -> list[str]:
    found = (e for e in equations(program.jaxpr) if e.primitive.name == "dot_general")
    return sorted(str(e.invars[0].aval.dtype) for e in found)


def test_products_with_weights_are_quantized_forward_and_backward_and_the_rest_says_why_not() -> None:
    program = traced(Quantize())
    assert set(done(program)) == ALL
    assert "the head's errors" in left(program)["logits"]
    assert "no product with a weight" in left(program)["scores"]
    # three products for each, of integers; scores, context and the head stay
    assert dots(program).count("int8") == 3 * len(ALL)


def test_a_rule_changes_one_product_by_its_name_and_puts_the_head_in() -> None:
    program = traced(Quantize(rules={"mlp*": "fp8", "logits": "int8", "mlpwo": "none"}))
    found = done(program)
    assert set(found) == (ALL | {"logits"}) - {"mlpwo"}
    assert found["mlpwi_0"].startswith("fp8_e4m3 activations") and found["logits"].startswith("int8")
    assert {"float8_e4m3fn", "float8_e5m2", "int8"} <= set(dots(program))


def test_a_rule_finds_a_weight_by_its_path_and_a_product_by_its_line() -> None:
    by_path = traced(Quantize("none", rules={"param:query": "int8_forward"}))
    assert set(done(by_path)) == {"query_proj"}
    by_line = traced(Quantize(rules={r"where:\bmlp\b": "none"}))
    assert set(done(by_line)) == {"query_proj", "key_proj", "value_proj", "out_proj"}


def test_a_recipe_is_for_what_stands_there_alone_and_rules_come_after() -> None:
    program = traced(Quantize("int8", where=r"\bmlp\b", rules={"query_proj": "int8"}))
    assert set(done(program)) == {"mlpwi_0", "mlpwi_1", "mlpwo", "query_proj"}


def test_scores_can_be_quantized_when_a_rule_asks_for_it() -> None:
    assert set(done(traced(Quantize("none", rules={"scores": "int8", "context": "int8"})))) == {
        "scores",
        "context",
    }


def gradient_of(loss: Any) -> Any:
    return lambda *args: jax.value_and_grad(loss)(*args)


def of_codes(program: Any, primitive: str) -> list[list[str]]:
    """The dtypes of the operands and results of products."""
    found = (e for e in equations(program.jaxpr) if e.primitive.name == primitive)
    return [[str(v.aval.dtype) for v in (*e.invars[:2], *e.outvars)] for e in found]


def test_products_by_expert_are_quantized_and_the_router_is_not() -> None:
    program = traced(Quantize(), fn=gradient_of(loss_with(grouped)), args=EXPERTS)
    assert set(done(program)) == {"moe_mlpwi_0", "moe_mlpwo"}
    assert "tokens elsewhere" in left(program)["router"]
    assert of_codes(program, "ragged_dot_general") == [["int8", "int8", "int32"]] * 6


def test_products_by_expert_inside_a_scan_are_quantized() -> None:
    def layers(p: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, p: (x + grouped(p, x), None), x, p["layers"])[0]

    params = {**EXPERTS[0], "layers": {k: f(3, *EXPERTS[0][k].shape) for k in ("router", "up", "down")}}
    args = (params, *EXPERTS[1:])
    program = traced(Quantize("fp8"), fn=gradient_of(loss_with(layers)), args=args)
    assert set(done(program)) == {"moe_mlpwi_0", "moe_mlpwo"}
    e4m3, e5m2 = "float8_e4m3fn", "float8_e5m2"
    found = Counter(tuple(types[:2]) for types in of_codes(program, "ragged_dot_general"))
    assert found == {(e4m3, e4m3): 2, (e5m2, e4m3): 2, (e4m3, e5m2): 2}


def test_a_ragged_product_of_other_dimensions_is_left_alone_and_says_so() -> None:
    numbers = jax.lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))

    def turned(p: Any, x: Any) -> Any:
        flat, scores = x.reshape(-1, 24), jax.nn.softmax(x.reshape(-1, 24) @ p["router"])
        chosen = jnp.argmax(scores, -1)
        order, sizes = jnp.argsort(chosen), jnp.bincount(chosen, length=8).astype(jnp.int32)
        hidden = jax.lax.ragged_dot_general(flat[order], p["up"].swapaxes(1, 2), sizes, numbers)
        made = jax.lax.ragged_dot(jnp.tanh(hidden), p["down"], sizes)
        return (made[jnp.argsort(order)] * scores.max(-1, keepdims=True)).reshape(x.shape)

    program = traced(Quantize(), fn=gradient_of(loss_with(turned)), args=EXPERTS)
    assert set(done(program)) == {"moe_mlpwo"}
    (why,) = [why for why in left(program).values() if "ragged product" in why]
    assert "as lax.ragged_dot takes them" in why


def convolved(x: Any, w: Any, **more: Any) -> Any:
    return jax.lax.conv_general_dilated(
        x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), **more
    )


def seen(p: Any, images: Any, labels: Any) -> Any:
    hidden = jax.nn.relu(convolved(jax.nn.relu(convolved(images, p["first"])), p["second"]))
    return picked(hidden.mean((1, 2)) @ p["head"], labels)


IMAGES = ({"first": f(3, 3, 5, 6), "second": f(3, 2, 6, 7), "head": f(7, 11)}, f(8, 9, 7, 5), i(8))


def test_convolutions_with_weights_are_quantized() -> None:
    program = traced(Quantize(), fn=gradient_of(seen), args=IMAGES)
    assert set(done(program)) == {"conv"}
    assert of_codes(program, "conv_general_dilated") == [["int8", "int8", "int32"]] * 6
    assert "the head's errors" in left(program)["logits"]


def test_a_convolution_is_chosen_by_its_name_or_its_weight() -> None:
    def found(*args: Any) -> list[list[str]]:
        products = of_codes(
            traced(Quantize(*args), fn=gradient_of(seen), args=IMAGES), "conv_general_dilated"
        )
        return [types for types in products if "int8" in types]

    assert found("none", {"param:second": "int8_forward"}) == [["int8", "int8", "int32"]]
    assert not found("int8", {"conv": "none", "logits": "int8"})


def test_a_convolution_of_two_activations_is_no_product_with_a_weight() -> None:
    def pairs(p: Any, images: Any, labels: Any) -> Any:
        each = jax.vmap(lambda x: convolved(x[None], x[:3, :3, :, None]))(images)
        return picked(each.mean((1, 2, 3)) + convolved(images, p["first"]).mean((1, 2)) @ p["head"], labels)

    params = {"first": f(3, 3, 5, 6), "head": f(6, 11)}
    program = traced(Quantize(), fn=gradient_of(pairs), args=(params, *IMAGES[1:]))
    assert "told to be a weight" in left(program)["conv"] and "conv" in done(program)


@pytest.mark.parametrize(
    ("recipe", "more", "said"),
    [
        ("nf4_weights", {}, "no dimension that blocks could be along"),
        ("int8", {"batch_group_count": 2}, "groups of the batch"),
    ],
)
def test_a_convolution_that_cannot_be_quantized_says_why(recipe: str, more: Any, said: str) -> None:
    def loss(p: Any, images: Any, labels: Any) -> Any:
        hidden = jax.nn.relu(convolved(images, p["first"], **more)).mean((1, 2))
        logits = jnp.tile(hidden, (8 // len(hidden), 1)) @ p["head"]
        return picked(logits, labels)

    params = {"first": f(3, 3, 5, 6), "head": f(6, 64)}
    rules = {"param:head": "int8"}
    program = traced(Quantize(recipe, rules=rules), fn=gradient_of(loss), args=(params, *IMAGES[1:]))
    assert said in " ".join(left(program).values())


def test_a_recipe_of_the_plans_own_differs_from_its_base_in_what_it_says() -> None:
    own = {"mine": {"base": "int8", "block": 16, "gradients": "", "weights_calibration": "rms,3"}}
    found = done(traced(Quantize("mine", recipes=own)))
    assert found["query_proj"] == "int8 activations, int8 weights, blocks of 16"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"recipe": "int9"}, r"no recipe 'int9' \(did you mean 'int8'\?\)"),
        ({"rules": {"mlp_wi": "int8"}}, "no name of a product"),
        ({"rules": {"moe_mlpwo": "int8"}}, "matches no product; there are: .*mlpwo"),
        ({"rules": {"param:wq$": "int8"}}, r"matches no product; .*weights: .*\['query'\]"),
        ({"rules": {"where:(": "int8"}}, "no regular expression"),
        ({"where": "("}, r"quantize.where: '\(' is no regular expression"),
        ({"where": "moe"}, "quantize.where: 'moe' matches no product; there are: .*mlpwo"),
        ({"rules": {"logits": "int3bit"}}, r"rules\['logits'\]: no recipe"),
        ({"recipe": "none"}, "nothing to quantize"),
        ({"recipe": "m", "recipes": {"m": {"base": "int8", "bits": 8}}}, "no field 'bits'"),
        ({"recipe": "m", "recipes": {"m": {"weights": "int9"}}}, "recipes.m.weights: no format 'int9'"),
        ({"recipe": "m", "recipes": {"m": {"base": "int8", "weights_calibration": "rms"}}}, "'rms,3'"),
        ({"recipe": "m", "recipes": {"m": {"base": "int8", "block": 7}}}, "blocks of 7 do not divide the 96"),
        ({"recipe": "m", "recipes": {"m": {"base": "int8", "gradients": "nf4"}}}, "gradients = 'nf4'"),
        ({"recipe": "m", "recipes": {"m": {"gradients": "int8"}}}, "neither activations nor weights"),
        ({"recipe": "m", "recipes": {"m": {"base": "int8", "rounding": "up"}}}, "no rounding 'up'"),
    ],
)
def test_an_option_that_cannot_be_is_an_error_that_says_what_can(options: Any, said: str) -> None:
    with pytest.raises(PlanError, match=re.compile(said, re.DOTALL)):
        traced(Quantize(**options))


# ---------------------------------------------------------------- where it costs time


def on_tpu(name: str, quantize: Quantize, fn: Any = STEP, args: Any = ARGS) -> Any:
    devices = topologies.parse(name).devices()
    return parallelize(fn, Plan({"data": len(devices)}, [quantize]), devices=devices).trace(*args)


def test_what_takes_a_tpu_longer_is_left_in_float_unless_forced_or_named() -> None:
    program = on_tpu("v5e-4", Quantize())
    assert not done(program) and set(left(program)) >= ALL
    assert re.match(r"left in float: [\d.]+ us against [\d.]+ us; force", left(program)["mlpwo"])
    assert set(done(on_tpu("v5e-4", Quantize(force=True)))) == ALL
    assert set(done(on_tpu("v5e-4", Quantize(rules={"mlpwo": "int8"})))) == {"mlpwo"}


def test_weights_alone_are_quantized_for_memory_and_not_weighed() -> None:
    assert set(done(on_tpu("v5e-4", Quantize("int8_weights")))) == ALL


def mlp(weights: Any, tokens: Any) -> Any:
    def loss(w: Any) -> Any:
        x = w["table"][tokens]
        h = jax.nn.silu(jnp.einsum("bld,df->blf", x, w["up"]))
        return jnp.mean((x + jnp.einsum("blf,fd->bld", h, w["down"])) ** 2)

    return jax.grad(loss)(weights)


def test_large_products_pay_on_a_tpu_and_not_where_it_has_no_units_for_them() -> None:
    def found(recipe: str, length: int, hidden: int) -> Any:
        shapes = {"table": (40, 8192), "up": (8192, hidden), "down": (hidden, 8192)}
        weights = {k: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for k, shape in shapes.items()}
        return on_tpu(
            "v5e-1", Quantize(recipe), mlp, (weights, jax.ShapeDtypeStruct((16, length), jnp.int32))
        )

    assert not done(found("int8", 8, 512))
    assert set(done(found("int8", 1024, 32768))) == {"mlpwi", "mlpwo"}
    said = left(found("fp8", 1024, 32768))
    assert "v5e multiplies fp8 no faster than bfloat16" in said["mlpwi"]


# ---------------------------------------------------------------- on several devices


def layer(params: Any, tokens: Any, t: Any) -> Any:
    """A product of what nothing was computed for: its codes are the same wherever they lie."""

    def loss(params: Any) -> Any:
        h = jnp.einsum("bld,df->blf", params["table"][tokens], params["up"])
        return jnp.sum(h * t), h

    (value, h), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return value, h, grads


def experts(params: Any, tokens: Any, t: Any) -> Any:
    """The same by expert."""

    def loss(params: Any) -> Any:
        x = params["table"][tokens].reshape(-1, 16)
        chosen = jnp.argmax(jax.lax.stop_gradient(x @ params["router"]), -1)
        sizes = jnp.bincount(chosen, length=4).astype(jnp.int32)
        h = jax.lax.ragged_dot(x[jnp.argsort(chosen)], params["up"], sizes)
        return jnp.sum(h * t.reshape(h.shape)), h

    (value, h), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return value, h, grads


def images(params: Any, pixels: Any, labels: Any, t: Any) -> Any:
    """A convolution; what comes of it only shows which dimension are the examples."""

    def loss(params: Any) -> Any:
        h = convolved(pixels, params["up"])
        logits = jax.lax.stop_gradient(h.mean((1, 2))) @ params["head"]
        return jnp.sum(h * t) + picked(logits, labels), h

    (value, h), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return value, h, grads


RNG = np.random.default_rng(0)


def normal(*shape: int) -> Any:
    return RNG.normal(size=shape).astype(np.float32)


TOKENS = RNG.integers(0, 40, size=(8, 6)).astype(np.int32)
ON_MESHES: dict[str, tuple[Any, Any]] = {
    "dot": (layer, ({"table": normal(40, 16), "up": normal(16, 24)}, TOKENS, normal(8, 6, 24))),
    "ragged": (
        experts,
        (
            {"table": normal(40, 16), "router": normal(16, 4), "up": normal(4, 16, 24)},
            TOKENS,
            normal(8, 6, 24),
        ),
    ),
    "conv": (
        images,
        (
            {"up": normal(3, 3, 8, 16), "head": normal(16, 10)},
            normal(16, 9, 14, 8),
            RNG.integers(0, 10, size=16).astype(np.int32),
            normal(16, 5, 7, 16),
        ),
    ),
}
MESHES = {
    "fsdp": {"fsdp": 8},
    "fsdp and tensor": {"fsdp": 4, "tensor": 2},
    "data, fsdp, tensor": {"data": 2, "fsdp": 2, "tensor": 2},
}
CODED = [
    *(("dot", mesh, recipe) for mesh in MESHES for recipe in ("int8", "fp8")),
    ("dot", "data, fsdp, tensor", "stochastic"),
    *(("dot", "fsdp and tensor", recipe) for recipe in ("int4", "int8_weights")),
    *(("ragged", mesh, "int8") for mesh in MESHES),
    ("ragged", "fsdp and tensor", "fp8"),
    *(("conv", mesh, "int8") for mesh in MESHES),
    ("conv", "fsdp and tensor", "fp8"),
]


def wider(recipe: str) -> Quantize:
    """Of `up`, by a recipe with ranges a little wider than the largest magnitude.

    With absmax alone the largest magnitude would lie on the border of two integers, and how the compiler
    spells a division (x * (1 / s) is another number) would decide between them.
    """
    calibrations = {f"{each}_calibration": "absmax,1.01" for each in ("activations", "weights", "gradients")}
    own: dict[str, Any] = {"base": recipe} if recipe in RECIPES else {"base": "int8", "rounding": recipe}
    return Quantize("none", rules={"param:up": "wider"}, recipes={"wider": own | calibrations})


@pytest.mark.parametrize(
    ("what", "mesh", "recipe", "collectives"),
    [
        *((*case, "explicit") for case in CODED),
        *((what, "data, fsdp, tensor", "int8", "auto") for what in ("dot", "ragged", "conv")),
        *((what, "fsdp and tensor", "fp8", "auto") for what in ("dot", "ragged", "conv")),
        ("dot", "data, fsdp, tensor", "stochastic", "auto"),
    ],
)
def test_codes_are_the_same_on_any_mesh(what: str, mesh: str, recipe: str, collectives: Any) -> None:
    """A scale is that of the whole array, over all devices that have a part of what shares it."""
    fn, args = ON_MESHES[what]
    one = parallelize(fn, Plan({"data": 1}, [wider(recipe)]), devices=jax.devices()[:1])(*args)
    plan = Plan(MESHES[mesh], [wider(recipe), Shard(collectives=collectives)])
    found = parallelize(fn, plan)(*args)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(np.abs(a).max()))


def in_bfloat16(args: Any) -> Any:
    def cast(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, jnp.bfloat16 if x.dtype == np.float32 else x.dtype)

    return jax.tree.map(cast, args)


SUMS = ("psum", "reduce_scatter")


@pytest.mark.parametrize("mesh", [*MESHES, "data and tensor"])
@pytest.mark.parametrize("what", ["ragged", "conv"])
def test_sums_of_products_by_expert_and_of_convolutions_go_as_floats(what: str, mesh: str) -> None:
    fn, args = ON_MESHES[what]
    axes = MESHES.get(mesh, {"data": 2, "tensor": 4})
    passes = [wider("int8"), Shard(collectives="explicit")]
    program = traced(*passes, mesh=axes, fn=fn, args=in_bfloat16(args))
    sums = set().union(*(moved(program, name) for name in SUMS))
    assert sums == {"bfloat16"}
    if what == "ragged" and "fsdp" in axes:
        assert "int8" in moved(program, "all_gather")


def test_terms_of_what_experts_contract_over_devices_are_summed_as_floats() -> None:
    args = in_bfloat16(EXPERTS)
    passes = [Quantize(), Shard(collectives="explicit")]
    fn = gradient_of(loss_with(grouped))
    program = traced(*passes, mesh={"data": 2, "tensor": 4}, fn=fn, args=args)
    sums = set().union(*(moved(program, name) for name in SUMS))
    assert "bfloat16" in sums and "int32" not in sums


def moved(program: Any, primitive: str) -> set[str]:
    """The dtypes of matrices and more that a collective takes."""
    found = [e.invars[0].aval for e in equations(program.jaxpr) if e.primitive.name == primitive]
    return {str(a.dtype) for a in found if len(a.shape) > 1}


def test_weights_are_gathered_as_codes_and_gradients_are_summed_as_floats() -> None:
    fn, args = llama.train_step(size="tiny", batch=8, length=128, dtype="bfloat16")
    passes = [Quantize(rules={"logits": "int8"}), Shard(collectives="explicit")]
    program = traced(*passes, mesh={"fsdp": 8}, fn=fn, args=args)
    assert moved(program, "all_gather") == {"int8", "int32"}  # int32: the tokens
    assert moved(program, "reduce_scatter") == {"bfloat16"}


@pytest.mark.parametrize(
    ("recipe", "sent"), [("int4", "int4"), ("int8_weights", "int8"), ("fp8_weights", "float8_e4m3fn")]
)
def test_weights_are_gathered_as_codes_where_these_are_no_operands_too(recipe: str, sent: str) -> None:
    fn, args = llama.train_step(size="tiny", batch=8, length=128, dtype="bfloat16")
    program = traced(Quantize(recipe), Shard(collectives="explicit"), mesh={"fsdp": 8}, fn=fn, args=args)
    gathered = (e.invars[0].aval for e in equations(program.jaxpr) if e.primitive.name == "all_gather")
    found = Counter(str(a.dtype) for a in gathered if len(a.shape) > 1)
    assert found[sent] == 14 and found["bfloat16"] == 1  # in both passes; the head


def test_the_report_calls_codes_of_weights_weights_in_both_passes() -> None:
    fn, args = llama.train_step(size="tiny", batch=8, length=128, dtype="bfloat16")
    program = traced(Quantize(), Shard(collectives="explicit"), mesh={"fsdp": 8}, fn=fn, args=args)
    lines = program.report.lines()
    assert any("7 weights gathered twice" in line for line in lines)
    assert not [line for line in lines if "all-gather" in line and "(llama.py" in line]


def test_terms_of_a_contraction_over_devices_are_summed_as_floats() -> None:
    fn, args = llama.train_step(size="tiny", batch=8, length=16, dtype="bfloat16")
    passes = [Quantize(), Shard(collectives="explicit")]
    program = traced(*passes, mesh={"data": 2, "tensor": 4}, fn=fn, args=args)
    assert "int32" not in moved(program, "psum") | moved(program, "reduce_scatter")


def test_where_the_compiler_adds_up_gradients_the_products_are_floats_at_once() -> None:
    """On a TPU; XLA for CPUs would round each term of the sum."""
    passes = [Quantize("none", rules={"param:up": "int8"}), Shard(collectives="auto")]

    def given(devices: Any) -> list[str]:
        fn, args = ON_MESHES["dot"]
        program = parallelize(fn, Plan({"fsdp": 4}, passes), devices=devices).trace(*args)
        found = (e for e in equations(program.jaxpr) if e.primitive.name == "dot_general")
        return [str(e.outvars[0].aval.dtype) for e in found if str(e.invars[0].aval.dtype) == "int8"]

    assert given(jax.devices()[:4]) == ["int32"] * 3
    assert given(topologies.parse("v5e-4").devices()) == ["float32"] * 3


@pytest.mark.parametrize("recipe", [name for name in RECIPES if not RECIPES[name].block and name != "mxfp8"])
def test_every_recipe_is_weighed_for_a_tpu(recipe: str) -> None:
    plan = Plan({"fsdp": 4}, [Quantize(recipe)])
    program = parallelize(STEP, plan, devices=topologies.parse("v5e-4").devices()).trace(*ARGS)
    notes = done(program) | left(program)
    assert set(notes) >= ALL


def test_remat_saves_codes_by_their_name() -> None:
    def saved(policy: str) -> set[str]:
        program = traced(Quantize(), Remat(policy=policy))
        scans = [e for e in equations(program.jaxpr) if e.primitive.name == "scan"]
        stacked = [v.aval for v in scans[0].outvars if getattr(v.aval, "ndim", 0) > 2]
        return {str(a.dtype) for a in stacked}

    assert "int8" in saved("minimal_with_quantization") and "int8" not in saved("full")
