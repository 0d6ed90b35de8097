"""What products take in floats and quantized, as the TPU compiler counts; what of one a device has."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.benchmarks.quantize_costs import TOPOLOGIES, counted
from xform import topologies
from xform.axes import find_axes
from xform.errors import Decline
from xform.quantization import costs
from xform.quantization.recipes import RECIPES, Recipe
from xform.quantization.scales import METHODS
from xform.quantization.weighing import check_pays, lacking, sizes_of
from xform.roles import find_roles

CHIPS = {kind.name: kind for kind in topologies.KINDS}


def sizes(t: int, d: int, f: int) -> costs.Sizes:
    return costs.Sizes(t * d * f, (t * d, d * f, t * f), (t * d, d * f))


def estimated(chip: str, recipe: str, *shape: int) -> tuple[float, float]:
    """Cycles in floats and quantized, with gradients."""
    kind, how = CHIPS[chip], RECIPES[recipe].products(1, 0)
    floats, codes = (
        costs.in_floats(kind, sizes(*shape), True),
        costs.quantized(kind, sizes(*shape), how, True),
    )
    return floats * kind.clock, codes * kind.clock


# As `python -m tests.benchmarks.quantize_costs` has the compiler count: tokens, widths, float, int8.
COUNTED = {
    "v5e": [
        (128, 1024, 1024, 30_636, 79_317),
        (1024, 4096, 4096, 827_437, 1_245_120),
        (4096, 4096, 4096, 3_225_970, 3_428_950),
        (16384, 4096, 16384, 57_228_556, 47_729_694),
    ],
    "v5p": [
        (128, 1024, 1024, 18_289, 48_314),
        (1024, 4096, 4096, 434_685, 591_799),
        (4096, 4096, 16384, 6_581_341, 6_014_451),
        (16384, 4096, 16384, 27_904_008, 22_991_563),
    ],
    "v6e": [
        (128, 1024, 1024, 21_301, 61_051),
        (1024, 4096, 4096, 295_376, 636_429),
        (4096, 4096, 4096, 909_240, 1_379_410),
        (4096, 16384, 4096, 3_721_107, 5_481_644),
    ],
}


@pytest.mark.parametrize("chip", COUNTED)
def test_estimates_are_the_compilers_cycles_within_a_fifth(chip: str) -> None:
    for *shape, plain, codes in COUNTED[chip]:
        assert estimated(chip, "int8", *shape) == pytest.approx((plain, codes), rel=0.2)


@pytest.mark.slow  # compiles two products and their gradients
@pytest.mark.parametrize("chip", ["v5e"])
def test_the_compiler_counts_as_it_did(chip: str) -> None:
    *shape, plain, codes = COUNTED[chip][1]
    topology = topologies.parse(TOPOLOGIES[chip])
    found = [counted(topology, how, shape, False) * topology.clock for how in (None, RECIPES["int8"])]
    assert found == pytest.approx([plain, codes], rel=0.02)


def test_floats_of_eight_bits_pay_only_on_chips_with_units_for_them() -> None:
    def pays(chip: str, recipe: str) -> bool:
        plain, codes = estimated(chip, recipe, 16384, 16384, 16384)
        return codes < plain

    assert [chip for chip in CHIPS if pays(chip, "fp8")] == ["tpu7x"]
    assert [chip for chip in CHIPS if pays(chip, "int8")] == ["v5e", "v5p", "v6e"]


def test_short_blocks_and_tables_are_floats_when_they_are_multiplied() -> None:
    v5e = CHIPS["v5e"]
    for recipe in (RECIPES["mxfp8"], Recipe("int8", "nf4"), Recipe("int8", "int8", block=64)):
        assert "floats again" in (lacking(v5e, recipe.products(1, 0)) or "")
    assert lacking(v5e, Recipe("int8", "int4", block=128).products(1, 0)) is None


def test_a_range_that_is_known_saves_a_pass_and_one_that_is_sorted_never_pays() -> None:
    def taken(calibration: str) -> float:
        fields = {f"{each}_calibration": calibration for each in ("activations", "weights", "gradients")}
        how = dataclasses.replace(RECIPES["int8"], **fields).products(1, 0)
        return costs.quantized(CHIPS["v5e"], sizes(4096, 4096, 4096), how, True)

    plain = costs.in_floats(CHIPS["v5e"], sizes(4096, 4096, 4096), True)
    assert taken("fixed,-4,4") < plain < taken("absmax") < taken("percentile,99")


def test_what_is_declined_gives_both_estimates_and_weights_alone_are_not_weighed() -> None:
    small = sizes(128, 1024, 1024)
    with pytest.raises(Decline, match=r"left in float: 5\d\.\d us against 2\d\.\d us; force = true"):
        check_pays(CHIPS["v5e"], small, RECIPES["int8"].products(1, 0))
    check_pays(CHIPS["v5e"], small, RECIPES["nf4_weights"].products(1, 0))


def test_a_device_multiplies_its_tokens_by_whole_weights_and_encodes_its_own_part_of_them() -> None:
    def loss(w: Any, x: Any) -> Any:
        h = jnp.einsum("bld,df->blf", x, w["up"])
        return jnp.sum(jnp.einsum("blf,fd->bld", jax.nn.silu(h), w["down"]) ** 2)

    shapes = {"up": (16, 24), "down": (24, 16)}
    w = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    names = {"batch": "x[0]", "length": "x[1]", "embed": ["x[2]"], "mlp": ["down[0]"]}
    jaxpr = jax.make_jaxpr(loss)(w, jax.ShapeDtypeStruct((8, 6, 16), jnp.bfloat16)).jaxpr
    roles = find_roles(find_axes(jaxpr), names, ["down", "up", "x"])
    up, down = (e for e in jaxpr.eqns if e.primitive.name == "dot_general")
    scope = roles.axes.scope(())

    whole = sizes_of(roles, scope, up, 1, {"fsdp": 1})
    assert whole == costs.Sizes(48 * 16 * 24, (48 * 16, 16 * 24, 48 * 24), (48 * 16, 16 * 24))
    # fsdp 4: a quarter of the tokens, the weight together, of which a quarter is encoded; x is another's too
    found = sizes_of(roles, scope, up, 1, {"fsdp": 4}, (2, 1))
    assert found == costs.Sizes(12 * 16 * 24, (12 * 16, 16 * 24, 12 * 24), (12 * 16 / 2, 16 * 24 / 4))
    # tensor 2: half of the features, which `down` contracts
    found = sizes_of(roles, scope, up, 1, {"fsdp": 4, "tensor": 2})
    assert found.numbers[1:] == (16 * 12, 12 * 12)
    found = sizes_of(roles, scope, down, 1, {"fsdp": 4, "tensor": 2})
    assert found.multiplied == 12 * 12 * 16 and found.numbers == (12 * 12, 12 * 16, 12 * 16)


def test_every_calibration_has_its_passes() -> None:
    assert set(costs.PASSES) == set(METHODS)
