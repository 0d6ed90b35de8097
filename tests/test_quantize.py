"""Which products are quantized, by which rules, what is left alone and why; on several devices too."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xform import Plan, PlanError, Remat, Shard, parallelize, topologies
from xform.higher_order import equations
from xform.models import llama
from xform.passes.quantize import Quantize

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


def test_scores_can_be_quantized_when_a_rule_asks_for_it() -> None:
    assert set(done(traced(Quantize("none", rules={"scores": "int8", "context": "int8"})))) == {
        "scores",
        "context",
    }


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


# ---------------------------------------------------------------- on several devices


def layer(params: Any, tokens: Any, t: Any) -> Any:
    """A product of what nothing was computed for: its codes are the same wherever they lie."""

    def loss(params: Any) -> Any:
        h = jnp.einsum("bld,df->blf", params["table"][tokens], params["up"])
        return jnp.sum(h * t), h

    (value, h), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return value, h, grads


RNG = np.random.default_rng(0)
LAYER = (
    {
        "table": RNG.normal(size=(40, 16)).astype(np.float32),
        "up": RNG.normal(size=(16, 24)).astype(np.float32),
    },
    RNG.integers(0, 40, size=(8, 6)).astype(np.int32),
    RNG.normal(size=(8, 6, 24)).astype(np.float32),
)

MESHES = {
    "fsdp": {"fsdp": 8},
    "fsdp and tensor": {"fsdp": 4, "tensor": 2},
    "data, fsdp, tensor": {"data": 2, "fsdp": 2, "tensor": 2},
}


@pytest.mark.parametrize("recipe", ["int8", "fp8"])
@pytest.mark.parametrize("collectives", ["explicit", "auto"])
@pytest.mark.parametrize("mesh", MESHES)
def test_codes_are_the_same_on_any_mesh(mesh: str, collectives: Any, recipe: str) -> None:
    """A scale is that of the whole array, over all devices that have a part of what shares it.

    With absmax alone the largest magnitude would lie on the border of two integers, and how the compiler
    spells a division (x * (1 / s) is another number) would decide between them.
    """
    wider = {f"{each}_calibration": "absmax,1.01" for each in ("activations", "weights", "gradients")}
    own = {"wider": {"base": recipe, **wider}}
    quantize = Quantize("none", rules={"param:up": "wider"}, recipes=own)
    one = parallelize(layer, Plan({"data": 1}, [quantize]), devices=jax.devices()[:1])(*LAYER)
    plan = Plan(MESHES[mesh], [quantize, Shard(collectives=collectives)])
    found = parallelize(layer, plan)(*LAYER)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(np.abs(a).max()))


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


def test_terms_of_a_contraction_over_devices_are_summed_as_floats() -> None:
    fn, args = llama.train_step(size="tiny", batch=8, length=16, dtype="bfloat16")
    passes = [Quantize(), Shard(collectives="explicit")]
    program = traced(*passes, mesh={"data": 2, "tensor": 4}, fn=fn, args=args)
    assert "int32" not in moved(program, "psum") | moved(program, "reduce_scatter")


def test_where_the_compiler_adds_up_gradients_the_products_are_floats_at_once() -> None:
    """On a TPU; XLA for CPUs would round each term of the sum."""
    passes = [Quantize("none", rules={"param:up": "int8"}), Shard(collectives="auto")]

    def given(devices: Any) -> list[str]:
        program = parallelize(layer, Plan({"fsdp": 4}, passes), devices=devices).trace(*LAYER)
        found = (e for e in equations(program.jaxpr) if e.primitive.name == "dot_general")
        return [str(e.outvars[0].aval.dtype) for e in found if str(e.invars[0].aval.dtype) == "int8"]

    assert given(jax.devices()[:4]) == ["int32"] * 3
    assert given(topologies.parse("v5e-4").devices()) == ["float32"] * 3


def test_remat_saves_codes_by_their_name() -> None:
    def saved(policy: str) -> set[str]:
        program = traced(Quantize(), Remat(policy=policy))
        scans = [e for e in equations(program.jaxpr) if e.primitive.name == "scan"]
        stacked = [v.aval for v in scans[0].outvars if getattr(v.aval, "ndim", 0) > 2]
        return {str(a.dtype) for a in stacked}

    assert "int8" in saved("minimal_with_quantization") and "int8" not in saved("full")
