"""Multiplies in eight bits and fewer: products of activations and weights, forward and backward.

    y[t,f] = dot_general x w     ->     a = absmax x / 127.5 [t,1];  i:s8[t,d] = round (x / a)
                                        b = absmax w / 127.5 [1,f];  j:s8[d,f] = round (w / b)
                                        y[t,f] = dot_general i j * a * b

It acts before autodiff, on a model that knows nothing of it: the product becomes one with a derivative of its
own (`xform.quantization.training`), whose backward products take the same codes. Which product is which is
told by what it does (`xform.tensors`): scores and the router, whose errors choose, and the head are left as
they are unless a rule names them. What codes the backward pass reads is named "quantization" for Remat.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax

from xform.context import Context
from xform.errors import Decline, PlanError
from xform.promises.multiplied import scope
from xform.quantization.products import is_float
from xform.quantization.recipes import RECIPES, Recipe, recipe_named
from xform.quantization.summing import as_floats
from xform.quantization.training import quantized_dot
from xform.report import Promise
from xform.rewrite import Path, Site, rewrite
from xform.tensors.names import MORE_PRODUCTS, NAMES, NamedProduct, name_products
from xform.topologies import kind_of
from xform.trace import Jaxpr, Value, name_stack, shape_of, source_line

LEFT = {
    "logits": "the head's errors are the loss's own",
    "router": "small errors send tokens elsewhere",
    "scores": "it is no product with a weight",
    "context": "it is no product with a weight",
    "": "neither operand is told to be a weight",
}
"""What is left in float unless a rule names it, and why."""

NONE = "none"
KINDS = ("where", "param")


@dataclasses.dataclass(frozen=True)
class Quantize:
    """Options:

    recipe: how products are quantized: a row of RECIPES, or of `recipes`; "none": only what `rules` name.
    rules: recipes, or "none", of some products: by name ("mlpwi_0", "mlp*", "logits"), by where they stand
        ("where:REGEX", of the name stack or source line), by the path of their weight ("param:REGEX"). Of
        several that match the last one counts.
    recipes: recipes of the plan's own, as fields that differ from those of a "base":
        {"mine": {"base": "int8", "block": 256, "rounding": "stochastic"}}.
    seed: of stochastic rounding.

    Raises PlanError for a rule that no product matches, a recipe that does not exist, and blocks that do not
    divide what is contracted.
    """

    recipe: str = "int8"
    rules: Mapping[str, str] = dataclasses.field(default_factory=dict)
    recipes: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    seed: int = 0

    stages: ClassVar[tuple[str, ...]] = ("model",)
    after: ClassVar[tuple[str, ...]] = ("roll", "chunkedloss", "kernels")

    def rewrite(self, jaxpr: Jaxpr, context: Context) -> Jaxpr:
        rules = list(self._rules())
        by_default = (
            None if self.recipe == NONE else recipe_named(self.recipe, self.recipes, "quantize.recipe")
        )
        products = {(p.path, p.index): p for p in name_products(jaxpr, context.roles(jaxpr))}
        paths = [leaf.path for leaf in context.inputs]
        chosen: dict[tuple[Path, int], Recipe] = {}
        met: Counter[str] = Counter()
        for place, p in products.items():
            recipe, said = (by_default, False) if _by_default(p) else (None, False)
            for rule in rules:
                if rule.matches(p, context.roles(jaxpr).axes.scope(p.path).jaxpr.eqns[p.index], paths):
                    met[rule.text] += 1
                    recipe, said = rule.recipe, True
            if recipe is not None:
                chosen[place] = recipe
            elif not said and by_default is not None:
                _tell_left(p, jaxpr, context)
        for rule in rules:
            if not met[rule.text]:
                raise PlanError(
                    f"quantize.rules: {rule.text!r} matches no product; {_there(products, paths)}"
                )
        if not chosen:
            raise PlanError(f"quantize: there is nothing to quantize; {_there(products, paths)}")

        def rule_for(site: Site) -> Sequence[Value] | None:
            recipe = chosen.get((site.path, site.index))
            if recipe is None:
                return None
            return self._quantized(site, products[site.path, site.index], recipe, context)

        return rewrite(jaxpr, rule_for, context.report, "quantize")

    def finish(self, jaxpr: Jaxpr, context: Context) -> Jaxpr:
        """Where the compiler adds up devices' terms of a gradient, they are floats, not sums of 32 bits."""
        if context.mesh.size == 1 or kind_of(context.mesh.devices.flat[0]) is None:
            return jaxpr
        return as_floats(jaxpr, context.report)

    def _rules(self) -> Iterator[_Rule]:
        for text, name in self.rules.items():
            kind, _, pattern = text.partition(":")
            if kind not in KINDS or not pattern:
                kind, pattern = "name", text
                if not fnmatch.filter([*NAMES, *MORE_PRODUCTS], text):
                    there = ", ".join([*MORE_PRODUCTS, *NAMES])
                    raise PlanError(
                        f"quantize.rules: {text!r} is no name of a product ({there}), and neither "
                        "where:REGEX nor param:REGEX"
                    )
            else:
                try:
                    re.compile(pattern)
                except re.error as error:
                    raise PlanError(f"quantize.rules: {text!r} is no regular expression: {error}") from None
            where = f"quantize.rules[{text!r}]"
            yield _Rule(
                text, kind, pattern, None if name == NONE else recipe_named(name, self.recipes, where)
            )

    def _quantized(self, site: Site, p: NamedProduct, recipe: Recipe, context: Context) -> Sequence[Value]:
        what = p.name or "a product"
        if site.name != "dot_general":
            raise Decline(f"{what} is a {site.name}, which is not quantized")
        if not all(is_float(a.dtype) for a in site.avals):
            raise Decline(f"{what} is of {', '.join(str(a.dtype) for a in site.avals)}, not of floats")
        dims, how = site.params["dimension_numbers"], recipe.products(p.weight, self.seed)
        free = [
            [d for d in range(len(shape_of(v))) if d not in (*dims[0][k], *dims[1][k])]
            for k, v in enumerate(site.eqn.invars[:2])
        ]
        contracted = [*zip((0, 1), dims[0], strict=True), (1, free[1]), (0, free[0])]
        for (k, along), side in zip(contracted, (how.left, how.right, how.dlhs, how.drhs), strict=True):
            size = side.block or (side.format.block if side.format else 0)
            many = shape_of(site.eqn.invars[k])[along[-1]] if along else 1
            if side.format and size and many % size:
                raise PlanError(
                    f"quantize: blocks of {size} do not divide the {many} numbers that {what}, or its "
                    f"gradient, contracts ({site.line}): give it another recipe by a rule, or other blocks"
                )
        (out,) = site.out_avals
        with jax.named_scope(scope(p.name)):
            made = quantized_dot(*site.args, dims, how, site.params["precision"], out.dtype)
        if how.left.format and how.right.format and kind_of(context.mesh.devices.flat[0]) is not None:
            context.report.promise(Promise("quantize", p.name, "quantized", site.line or site.where))
        context.report.did("quantize", f"{what}: {recipe}", _why(recipe), site.line or site.where)
        return [made]


@dataclasses.dataclass(frozen=True)
class _Rule:
    text: str
    kind: str
    pattern: str
    recipe: Recipe | None

    def matches(self, p: NamedProduct, eqn: Any, paths: Sequence[str]) -> bool:
        if self.kind == "name":
            return fnmatch.fnmatchcase(p.name, self.pattern)
        if self.kind == "param":
            return any(re.search(self.pattern, paths[i]) for i in p.inputs)
        return bool(re.search(self.pattern, f"{name_stack(eqn)} {source_line(eqn)}"))


def _by_default(p: NamedProduct) -> bool:
    return p.weight is not None and (not p.name or p.name not in LEFT)


def _tell_left(p: NamedProduct, jaxpr: Jaxpr, context: Context) -> None:
    eqn = context.roles(jaxpr).axes.scope(p.path).jaxpr.eqns[p.index]
    why = LEFT.get(p.name, LEFT[""])
    context.report.declined("quantize", p.name or "a product", why, source_line(eqn) or name_stack(eqn))


def _why(recipe: Recipe) -> str:
    scales = "one scale a channel" if recipe.channels else "one scale an array"
    return f"{scales}; a value that is no number makes what shares its scale none"


def _there(products: Mapping[Any, NamedProduct], paths: Sequence[str]) -> str:
    names = ", ".join(sorted({p.name for p in products.values() if p.name})) or "none has a name"
    weights = sorted({paths[i] for p in products.values() for i in p.inputs if i < len(paths) and paths[i]})
    return f"there are: {names}; weights: {', '.join(weights[:8]) or 'none'}"


__all__ = ["LEFT", "RECIPES", "Quantize"]
