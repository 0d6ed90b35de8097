"""Which numbers of a product are quantized, and how: recipes by name, and what they make of a product.

RECIPES["fp8"]: activations and weights fp8_e4m3, gradients fp8_e5m2, the largest magnitude by channel
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from xform.errors import PlanError
from xform.quantization.formats import FORMATS, Format
from xform.quantization.scales import calibration
from xform.quantization.training import Products, Side
from xform.registry import unknown

ROUNDINGS = ("nearest", "stochastic")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """activations, weights, gradients: formats (`FORMATS`), "" for floats. gradients are those that come into
    both backward products. *_calibration: as `scales.calibration` reads it. channels: a scale for each place
    along dimensions that are not contracted; else one for the array. block: a scale for so many numbers along
    what is contracted; backward products then take floats, quantized anew where `anew`. rounding: of
    gradients, "nearest" or "stochastic". What has a "delayed" or "calibrated" range has one scale, whatever
    `channels`, and no blocks.
    """

    activations: str = ""
    weights: str = ""
    gradients: str = ""
    activations_calibration: str = "absmax"
    weights_calibration: str = "absmax"
    gradients_calibration: str = "absmax"
    channels: bool = True
    block: int = 0
    anew: bool = False
    rounding: str = "nearest"

    def check(self, where: str) -> None:
        """Raises PlanError that names the option, under `where`, and says what would work."""
        for field in ("activations", "weights", "gradients"):
            name = getattr(self, field)
            if name and name not in FORMATS:
                raise unknown("format", name, FORMATS, f"{where}.{field}")
            option = f"{where}.{field}_calibration"
            found = calibration(getattr(self, f"{field}_calibration"), option)
            blocks = (self.block if field != "gradients" else 0) or (FORMATS[name].block if name else 0)
            if name and found.is_kept and blocks:
                raise PlanError(
                    f"{option} = {found.method!r}: one range is kept for the whole array, and {self} has "
                    f'blocks of {blocks}: use "absmax", or no blocks and a format without'
                )
        if self.gradients and FORMATS[self.gradients].table:
            raise PlanError(
                f"{where}.gradients = {self.gradients!r}: its codes are no numbers to be multiplied; "
                'use "int8" or "fp8_e5m2"'
            )
        for field in ("activations", "weights"):
            name, method = getattr(self, field), getattr(self, f"{field}_calibration").split(",")[0]
            if name and method == "minmax" and not FORMATS[name].is_integer:
                raise PlanError(f"{where}.{field}_calibration: minmax is for integers; for {name} use absmax")
        if self.rounding not in ROUNDINGS:
            raise unknown("rounding", self.rounding, ROUNDINGS, f"{where}.rounding")
        if self.block < 0:
            raise PlanError(f"{where}.block = {self.block}: a block has at least one number; 0: no blocks")
        if not (self.activations or self.weights):
            raise PlanError(f"{where} quantizes neither activations nor weights")

    def products(self, weight: int | None, seed: int) -> Products:
        """For a product whose operand `weight` is one; None: neither."""
        left, right = (self._side("weights" if k == weight else "activations") for k in (0, 1))
        gradient = dataclasses.replace(self._side("gradients"), block=0, round=self.rounding, anew=self.anew)
        return Products(left, right, gradient, gradient, seed)

    def _side(self, field: str) -> Side:
        name = getattr(self, field)
        found = calibration(getattr(self, f"{field}_calibration"), field)
        form: Format | None = FORMATS[name] if name else None
        return Side(form, found, self.channels, self.block)

    def __str__(self) -> str:
        parts = [f"{name} {field}" for field in FIELDS if (name := getattr(self, field))]
        more = [f"blocks of {self.block}"] if self.block else []
        return ", ".join(parts + more)


FIELDS = ("activations", "weights", "gradients")

DELAYED = "delayed,1024"

RECIPES: dict[str, Recipe] = {
    "int8": Recipe("int8", "int8", "int8"),
    "int4": Recipe("int4", "int4", "int8"),
    "fp8": Recipe("fp8_e4m3", "fp8_e4m3", "fp8_e5m2"),
    "fp8_e4m3": Recipe("fp8_e4m3", "fp8_e4m3", "fp8_e4m3"),
    "fp8_e5m2": Recipe("fp8_e5m2", "fp8_e5m2", "fp8_e5m2"),
    "mxfp8": Recipe("mxfp8", "mxfp8", "mxfp8", anew=True),
    "int8_forward": Recipe("int8", "int8"),
    "fp8_forward": Recipe("fp8_e4m3", "fp8_e4m3"),
    "int8_delayed": Recipe("int8", "int8", "int8", DELAYED, DELAYED, DELAYED),
    "fp8_delayed": Recipe("fp8_e4m3", "fp8_e4m3", "fp8_e5m2", DELAYED, DELAYED, DELAYED),
    "int8_static": Recipe("int8", "int8", activations_calibration="calibrated"),
    "int8_weights": Recipe(weights="int8"),
    "int4_weights": Recipe(weights="int4", block=128),
    "fp8_weights": Recipe(weights="fp8_e4m3"),
    "nf4_weights": Recipe(weights="nf4", block=64),
}
"""The recipes by name: all three products, the forward one alone, those with kept ranges, weights alone."""


def recipe_named(name: str, own: Mapping[str, Mapping[str, Any]], where: str) -> Recipe:
    """A recipe of `RECIPES`, or of a plan's `own`: fields that differ from those of its "base"."""
    if name not in own:
        if name not in RECIPES:
            raise unknown("recipe", name, [*own, *RECIPES], where)
        return RECIPES[name]
    fields = dict(own[name])
    base = fields.pop("base", "")
    if base and base not in RECIPES:
        raise unknown("recipe", base, RECIPES, f"quantize.recipes.{name}.base")
    allowed = [f.name for f in dataclasses.fields(Recipe)]
    for field in fields:
        if field not in allowed:
            raise unknown("field", field, ["base", *allowed], f"quantize.recipes.{name}")
    made = dataclasses.replace(RECIPES[base] if base else Recipe(), **fields)
    made.check(f"quantize.recipes.{name}")
    return made
