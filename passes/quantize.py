"""Multiplies in eight bits and fewer: products of activations and weights, forward and backward.

    y[t,f] = dot_general x w     ->     a = absmax x / 127.5 [t,1];  i:s8[t,d] = round (x / a)
                                        b = absmax w / 127.5 [1,f];  j:s8[d,f] = round (w / b)
                                        y[t,f] = dot_general i j * a * b

It acts before autodiff, on a model that knows nothing of it: the product becomes one with a derivative of its
own (`xform.quantization.training`), whose backward products take the same codes. So do products by expert
(`ragged`) and `convolutions`, with scales for each column of all experts, for each feature. Which product is
which is told by what it does (`xform.tensors`): scores and the router, whose errors choose, and the head are
left as they are unless a rule names them. Ranges that are kept from step to step, "delayed" and "calibrated",
come from the state, once the step is whole (`kept`). On a TPU what takes longer quantized, finding ranges and
making codes counted, is left too, by estimate (`weighing`). What codes the backward pass reads is named
"quantization" for Remat.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax

from xform.context import Context
from xform.errors import Decline, PlanError
from xform.promises.multiplied import scope as scope_of
from xform.quantization.convolutions import quantized_conv, window_of
from xform.quantization.kept import with_kept_ranges
from xform.quantization.naming import Names, marked
from xform.quantization.products import is_float
from xform.quantization.ragged import is_forward, quantized_ragged_dot
from xform.quantization.recipes import RECIPES, Recipe, recipe_named
from xform.quantization.summing import as_floats
from xform.quantization.training import Products, quantized_dot
from xform.quantization.turns import loops_around
from xform.quantization.weighing import check_pays, sizes_of
from xform.report import Promise
from xform.rewrite import Path, Site, rewrite
from xform.tensors.names import MORE_PRODUCTS, NAMES, NamedProduct, name_products
from xform.topologies import kind_of
from xform.trace import Atom, Jaxpr, Value, Var, name_stack, shape_of, source_line

LEFT = {
    "logits": "the head's errors are the loss's own",
    "router": "small errors send tokens elsewhere",
    "scores": "it is no product with a weight",
    "context": "it is no product with a weight",
    "": "neither operand is told to be a weight",
}
"""What is left in float unless a rule names it, and why."""

NONE = "none"
CONVOLUTION = "conv_general_dilated"
KINDS = ("where", "param")

Place = tuple[Path, int]
"""Where a product stands: its body, and the number of its equation."""


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
    force: quantize by `recipe` even what takes a TPU longer so, by estimate; what a rule names always is.

    Raises PlanError for a rule that no product matches, a recipe that does not exist, and blocks that do not
    divide what is contracted.
    """

    recipe: str = "int8"
    rules: Mapping[str, str] = dataclasses.field(default_factory=dict)
    recipes: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    seed: int = 0
    force: bool = False

    stages: ClassVar[tuple[str, ...]] = ("model", "step")
    leads: ClassVar[tuple[str, ...]] = ("step",)
    after: ClassVar[tuple[str, ...]] = ("roll", "chunkedloss", "kernels")
    exact: ClassVar[bool] = False

    def rewrite(self, jaxpr: Jaxpr, context: Context) -> Jaxpr:
        if context.stage == "step":
            jaxpr, kept = with_kept_ranges(jaxpr, context.phase, context.report, context.returns)
            context.keep(kept)
            return jaxpr
        rules = list(self._rules())
        by_default = (
            None if self.recipe == NONE else recipe_named(self.recipe, self.recipes, "quantize.recipe")
        )
        products = {(p.path, p.index): p for p in name_products(jaxpr, context.roles(jaxpr))}
        paths = [leaf.path for leaf in context.inputs]
        chosen: dict[Place, Recipe] = {}
        named: set[Place] = set()
        met: Counter[str] = Counter()
        for place, p in products.items():
            recipe, said = (by_default, False) if _by_default(p) else (None, False)
            for rule in rules:
                if rule.matches(p, context.roles(jaxpr).axes.scope(p.path).jaxpr.eqns[p.index], paths):
                    met[rule.text] += 1
                    recipe, said = rule.recipe, True
                    named.add(place)
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

        for place in list(self._slower(products, chosen, named, jaxpr, context)):
            del chosen[place]

        loops = loops_around(products.values(), context.roles(jaxpr))
        names = Names(context.roles(jaxpr))
        hows: dict[Place, Products] = {}
        for n, (place, p) in enumerate(products.items()):
            if place in chosen:
                how = chosen[place].products(p.weight, self.seed)
                hows[place] = marked(how, names.of(p, _key(n, p, context.model), how), loops[p.path])

        def rule_for(site: Site) -> Sequence[Value] | None:
            place = site.path, site.index
            recipe = chosen.get(place)
            if recipe is None:
                return None
            return self._quantized(site, products[place], recipe, hows[place], context)

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

    def _slower(
        self,
        products: Mapping[Place, NamedProduct],
        chosen: Mapping[Place, Recipe],
        named: Collection[Place],
        jaxpr: Jaxpr,
        context: Context,
    ) -> Iterator[Place]:
        """Of what no rule names, what takes a TPU longer when it is quantized, which the report says."""
        kind = kind_of(context.mesh.devices.flat[0])
        if kind is None or self.force:
            return
        roles, eqns = context.roles(jaxpr), {}
        takers: Counter[tuple[Path, Recipe, Atom]] = Counter()
        for place, recipe in chosen.items():
            eqns[place] = eqn = roles.axes.scope(place[0]).jaxpr.eqns[place[1]]
            takers.update((place[0], recipe, v) for v in eqn.invars[:2] if isinstance(v, Var))
        for place, recipe in list(chosen.items()):
            p, eqn, scope = products[place], eqns[place], roles.axes.scope(place[0])
            if place in named or eqn.primitive.name not in ("dot_general", CONVOLUTION):
                continue
            try:
                if eqn.primitive.name == CONVOLUTION and recipe.activations:
                    raise Decline("left in float: a TPU computes convolutions of codes no faster")
                if eqn.primitive.name == CONVOLUTION:
                    continue
                shared = [takers[place[0], recipe, v] or 1 for v in eqn.invars[:2]]
                sizes = sizes_of(roles, scope, eqn, p.weight, context.mesh.shape, shared)
                check_pays(kind, sizes, recipe.products(p.weight, self.seed))
            except Decline as why:
                where = source_line(eqn) or name_stack(eqn)
                context.report.declined("quantize", p.name or "a product", str(why), where)
                yield place

    def _quantized(
        self, site: Site, p: NamedProduct, recipe: Recipe, how: Products, context: Context
    ) -> Sequence[Value]:
        what = p.name or "a product"
        if not all(is_float(a.dtype) for a in site.avals[:2]):
            raise Decline(f"{what} is of {', '.join(str(a.dtype) for a in site.avals[:2])}, not of floats")
        contracted, make = MAKERS[site.name](site, what)
        for (k, along), side in zip(contracted, (how.left, how.right, how.dlhs, how.drhs), strict=True):
            size = side.block or (side.format.block if side.format else 0)
            if not (side.format and size):
                continue
            if along is None:
                raise Decline(
                    f"{what} contracts no dimension that blocks could be along: give it a recipe "
                    "without blocks by a rule"
                )
            many = shape_of(site.eqn.invars[k])[along]
            if many % size:
                raise PlanError(
                    f"quantize: blocks of {size} do not divide the {many} numbers that {what}, or its "
                    f"gradient, contracts ({site.line}): give it another recipe by a rule, or other blocks"
                )
        (out,) = site.out_avals
        with jax.named_scope(scope_of(p.name)):
            made = make(how, site.params["precision"], out.dtype)
        codes = how.left.format and how.right.format and site.name == "dot_general"
        if codes and kind_of(context.mesh.devices.flat[0]) is not None:
            context.report.promise(Promise("quantize", p.name, "quantized", site.line or site.where))
        context.report.did("quantize", f"{what}: {recipe}", _why(recipe), site.line or site.where)
        return [made]


Contracted = list[tuple[int, int | None]]
"""What each side of `Products` has contracted, in blocks if there are any: a dimension of an operand, left 0
or right 1; None: no dimension.
"""
Make = Callable[[Products, Any, Any], Value]
"""The product quantized, in this precision and dtype."""


def _dot(site: Site, what: str) -> tuple[Contracted, Make]:
    dims, (left, right) = site.params["dimension_numbers"], site.args
    free = [
        [d for d in range(len(shape_of(v))) if d not in (*dims[0][k], *dims[1][k])]
        for k, v in enumerate(site.eqn.invars[:2])
    ]
    along = [*zip((0, 1), dims[0], strict=True), (1, free[1]), (0, free[0])]
    return (
        [(k, ds[-1] if ds else None) for k, ds in along],
        lambda how, precision, dtype: quantized_dot(left, right, dims, how, precision, dtype),
    )


def _ragged_dot(site: Site, what: str) -> tuple[Contracted, Make]:
    if not is_forward(site.params["ragged_dot_dimension_numbers"]) or len(site.avals[2].shape) != 1:
        raise Decline(
            f"{what} is a ragged product of other dimensions than rows x contracted, experts x "
            "contracted x columns: move them so, as lax.ragged_dot takes them"
        )
    left, right, sizes = site.args
    return (
        [(0, 1), (1, 1), (1, 2), (0, 0)],
        lambda how, precision, dtype: quantized_ragged_dot(left, right, sizes, how, precision, dtype),
    )


def _conv(site: Site, what: str) -> tuple[Contracted, Make]:
    if site.params["batch_group_count"] != 1:
        raise Decline(f"{what} has groups of the batch, which have no scales apart: convolve each by itself")
    window, (left, right) = window_of(site.params), site.args
    return (
        [(0, None), (1, None), (1, None), (0, None)],
        lambda how, precision, dtype: quantized_conv(left, right, window, how, precision, dtype),
    )


MAKERS: dict[str, Callable[[Site, str], tuple[Contracted, Make]]] = {
    "dot_general": _dot,
    "ragged_dot_general": _ragged_dot,
    CONVOLUTION: _conv,
}
"""What is quantized, by primitive."""


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


def _key(number: int, p: NamedProduct, model: int) -> str:
    """What a product's ranges are called: its number among those of the model, and what it is. model: the
    number of the function that is differentiated; the first goes without saying.
    """
    return ".".join([*([str(model)] if model else []), str(number), p.name or "product"])


def _by_default(p: NamedProduct) -> bool:
    return p.weight is not None and (not p.name or p.name not in LEFT)


def _tell_left(p: NamedProduct, jaxpr: Jaxpr, context: Context) -> None:
    eqn = context.roles(jaxpr).axes.scope(p.path).jaxpr.eqns[p.index]
    why = LEFT.get(p.name, LEFT[""])
    context.report.declined("quantize", p.name or "a product", why, source_line(eqn) or name_stack(eqn))


def _why(recipe: Recipe) -> str:
    scales = "one scale a channel" if recipe.channels else "one scale an array"
    own = recipe.products(1, 0)
    kept = any(side.format and side.calibration.is_kept for side in (own.left, own.right, own.dlhs))
    if kept and recipe.channels:
        scales += ", an array where its range is kept"
    if kept or "fixed" in (recipe.activations_calibration + recipe.weights_calibration):
        what = "known before" if kept else "fixed"
        return f"{scales}; where the range is {what}, NaN becomes the integer 0 and infinity the range's end"
    return f"{scales}; NaN or infinity in an operand shows as NaN in all results that share its scale"


def _there(products: Mapping[Any, NamedProduct], paths: Sequence[str]) -> str:
    names = ", ".join(sorted({p.name for p in products.values() if p.name})) or "none has a name"
    weights = sorted({paths[i] for p in products.values() for i in p.inputs if i < len(paths) and paths[i]})
    return f"there are: {names}; weights: {', '.join(weights[:8]) or 'none'}"


__all__ = ["LEFT", "RECIPES", "Quantize"]
