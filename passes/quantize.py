"""Multiplies in eight bits and fewer: products of activations and weights, forward and backward.

    y[t,f] = dot_general x w     ->     a = absmax x / 127.5 [t,1];  i:s8[t,d] = round (x / a)
                                        b = absmax w / 127.5 [1,f];  j:s8[d,f] = round (w / b)
                                        y[t,f] = dot_general i j * a * b

It acts before autodiff, on a model that knows nothing of it: the product becomes one with a derivative of its
own (`xform.quantization.training`), whose backward products take the same codes. So do products by expert
(`ragged`) and `convolutions`, with scales for each column of all experts, for each feature. Which product is
which is told by what it does (`xform.tensors`): scores and the router, whose errors choose, and the head are
left as they are unless a rule names them. Weights may come as codes, which are carried to the products
(`carry`). Ranges that are kept from step to step, "delayed" and "calibrated",
come from the state, once the step is whole (`kept`). On a TPU what takes longer quantized, finding ranges and
making codes counted, is left too, by estimate (`weighing`). What codes the backward pass reads is named
"quantization" for Remat.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from xform.context import Context
from xform.errors import Decline, PlanError
from xform.promises.multiplied import scope as scope_of
from xform.quantization.arrays import Quantized
from xform.quantization.carrying import Made, Place, carried
from xform.quantization.convolutions import CONVOLUTION
from xform.quantization.kept import with_kept_ranges
from xform.quantization.naming import Names, marked
from xform.quantization.products import Operand, is_float
from xform.quantization.ragged import RAGGED
from xform.quantization.recipes import RECIPES, Recipe, recipe_named
from xform.quantization.replacing import MAKERS
from xform.quantization.summing import as_floats
from xform.quantization.training import Products, Side
from xform.quantization.turns import loops_around
from xform.quantization.weighing import check_pays, sizes_of
from xform.quantization.weights import Storable, Taker, storable
from xform.report import Promise, amount
from xform.rewrite import Path, Site, rewrite
from xform.roles import Roles
from xform.tensors.names import MORE_PRODUCTS, NAMES, NamedProduct, name_products
from xform.topologies import kind_of
from xform.trace import Atom, Jaxpr, JaxprEqn, Value, Var, name_stack, shape_of, source_line

LEFT = {
    "logits": "the head's errors are the loss's own",
    "router": "small errors send tokens elsewhere",
    "scores": "it is no product with a weight",
    "context": "it is no product with a weight",
    "": "neither operand is told to be a weight",
}
"""What is left in float unless a rule names it, and why."""

GIVEN = "its weight is given as codes, which a program that is differentiated multiplies in floats"
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
    where: a regular expression of name stacks and source lines: `recipe` is for what stands there alone.
    seed: of stochastic rounding.
    force: quantize by `recipe` even what takes a TPU longer so, by estimate; what a rule names always is.

    Raises PlanError for a rule that no product matches, a recipe that does not exist, and blocks that do not
    divide what is contracted.
    """

    recipe: str = "int8"
    rules: Mapping[str, str] = dataclasses.field(default_factory=dict)
    recipes: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    where: str = ""
    seed: int = 0
    force: bool = False

    stages: ClassVar[tuple[str, ...]] = ("model", "step")
    leads: ClassVar[tuple[str, ...]] = ("step",)
    after: ClassVar[tuple[str, ...]] = ("roll", "chunkedloss", "sparseexperts", "kernels", "context")
    exact: ClassVar[bool] = False

    def rewrite(self, jaxpr: Jaxpr, context: Context) -> Jaxpr:
        if context.stage == "step":
            staged = bool(context.stage_axes)
            jaxpr, kept = with_kept_ranges(jaxpr, context.phase, context.report, context.returns, staged)
            context.keep(kept)
            return jaxpr
        products = self._products(jaxpr, context)

        def rule_for(site: Site) -> Sequence[Value] | None:
            made = products.get((site.path, site.index))
            return None if made is None else [made(site.args)]

        return rewrite(jaxpr, rule_for, context.report, "quantize")

    def carry(self, jaxpr: Jaxpr, context: Context) -> Jaxpr:
        """The program with the weights that are given as codes as its inputs, in place of floats."""
        given = context.given
        assert given is not None
        leaves = context.given_as
        products = {} if context.differentiated else self._products(jaxpr, context)
        values = [leaf.path for leaf in context.inputs]
        avals, names = [leaf.aval for leaf in leaves], [leaf.path for leaf in leaves]
        made = carried(jaxpr, given.held, avals, names, products)
        for eqn, why in made.declined:
            where = source_line(eqn) or name_stack(eqn)
            context.report.declined("quantize", eqn.primitive.name, why, where)
        for note in made.whole:
            why = f"{note.what} takes no codes: it gets them as floats"
            for i in sorted(note.inputs):
                context.report.declined("quantize", values[i], why, note.where)
        if sizes := given.sizes(avals):
            what = ", ".join(f"{count} weights as {name} codes" for name, (count, _) in sizes.items())
            nbytes = sum(size for _, size in sizes.values())
            context.report.did("quantize", f"took {what}", f"{amount(nbytes)} with their scales")
        context.inputs, context.in_shardings = leaves, [None] * len(leaves)
        return made.jaxpr

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
                _check_regex(pattern, f"quantize.rules: {text!r}")
            where = f"quantize.rules[{text!r}]"
            yield _Rule(
                text, kind, pattern, None if name == NONE else recipe_named(name, self.recipes, where)
            )

    def _products(self, jaxpr: Jaxpr, context: Context) -> dict[Place, Made]:
        """What takes the place of each product that is quantized, once its operands are known."""
        rules = list(self._rules())
        by_default = (
            None if self.recipe == NONE else recipe_named(self.recipe, self.recipes, "quantize.recipe")
        )
        _check_regex(self.where, f"quantize.where: {self.where!r}")
        there = _There.of(jaxpr, context)
        chosen: dict[Place, Recipe] = {}
        named: set[Place] = set()
        met: Counter[str] = Counter()
        for place, p in there.products.items():
            recipe, said = (by_default, False) if _by_default(p) else (None, False)
            if self.where and not _stands(there.eqns[place], self.where):
                recipe, said = None, True
            else:
                met[self.where] += 1
            for rule in rules:
                if rule.matches(p, there.eqns[place], there.paths):
                    met[rule.text] += 1
                    recipe, said = rule.recipe, True
                    named.add(place)
            if recipe is not None:
                chosen[place] = recipe
            elif not said and by_default is not None:
                there.tell(place, LEFT.get(p.name, LEFT[""]), context)
        elsewhere = context.differentiated and context.codes  # in the rest of the program
        if self.where and not met[self.where] and not elsewhere:
            raise PlanError(f"quantize.where: {self.where!r} matches no product; {there}")
        for rule in rules:
            if not met[rule.text] and not elsewhere:
                raise PlanError(f"quantize.rules: {rule.text!r} matches no product; {there}")
        if not chosen and not elsewhere:
            raise PlanError(f"quantize: there is nothing to quantize; {there}")
        if context.differentiated:
            for place in [place for place in chosen if there.is_given(place, context)]:
                there.tell(place, GIVEN, context)
                del chosen[place]
        elif context.given is None:
            context.storable = functools.partial(self._storable, jaxpr, dict(chosen), there)
        for place in list(self._slower(chosen, named, there, context)):
            del chosen[place]
        loops, names = loops_around(there.products.values(), there.roles), Names(there.roles)
        made: dict[Place, Made] = {}
        for n, (place, p) in enumerate(there.products.items()):
            if (own := chosen.get(place)) is not None:
                how = own.products(p.weight, self.seed)
                called = names.of(p, _key(n, p, context.model), how)
                sent = bool(context.expert_axes) and there.eqns[place].primitive.name == RAGGED
                how = marked(how, called, loops[p.path], bool(context.stage_axes) or sent)
                made[place] = functools.partial(self._quantized, there.eqns[place], p, own, how, context)
        return made

    def _storable(self, jaxpr: Jaxpr, chosen: Mapping[Place, Recipe], there: _There) -> Storable:
        """How the weights that products take can be stored as codes."""
        takers: dict[Place, Taker] = {}
        inputs: set[int] = set()
        for place, recipe in chosen.items():
            p = there.products[place]
            if p.weight is not None and recipe.weights:
                how = recipe.products(p.weight, self.seed)
                side = (how.left, how.right)[p.weight]
                if there.eqns[place].primitive.name == CONVOLUTION and _in_blocks(side):
                    continue  # it is declined, and told, where it stands
                takers[place] = Taker(there.eqns[place], p.weight, side, p.name or "a product")
                inputs |= set(p.inputs)
        return storable(jaxpr, takers, sorted(inputs), there.paths)

    def _slower(
        self, chosen: Mapping[Place, Recipe], named: Collection[Place], there: _There, context: Context
    ) -> Iterator[Place]:
        """Of what no rule names, what takes a TPU longer when it is quantized, which the report says."""
        kind = kind_of(context.mesh.devices.flat[0])
        if kind is None or self.force:
            return
        takers: Counter[tuple[Path, Recipe, Atom]] = Counter()
        for place, recipe in chosen.items():
            takers.update((place[0], recipe, v) for v in there.eqns[place].invars[:2] if isinstance(v, Var))
        for place, recipe in list(chosen.items()):
            p, eqn = there.products[place], there.eqns[place]
            if place in named or eqn.primitive.name not in ("dot_general", CONVOLUTION):
                continue
            how = recipe.products(p.weight, self.seed)
            if not context.differentiated:
                how = dataclasses.replace(how, dlhs=Side(), drhs=Side())
            try:
                if eqn.primitive.name == CONVOLUTION and recipe.activations:
                    raise Decline("left in float: a TPU computes convolutions of codes no faster")
                if eqn.primitive.name == CONVOLUTION:
                    continue
                shared: list[float] = [takers[place[0], recipe, v] or 1 for v in eqn.invars[:2]]
                if p.weight is not None and there.is_given(place, context):
                    shared[p.weight] = math.inf
                scope = there.roles.axes.scope(place[0])
                sizes = sizes_of(there.roles, scope, eqn, p.weight, context.mesh.shape, shared)
                check_pays(kind, sizes, how)
            except Decline as why:
                there.tell(place, str(why), context)
                yield place

    def _quantized(
        self,
        eqn: JaxprEqn,
        p: NamedProduct,
        recipe: Recipe,
        how: Products,
        context: Context,
        operands: Sequence[Operand],
    ) -> Value:
        what, line = p.name or "a product", source_line(eqn) or name_stack(eqn)
        types = [str((x.scale if isinstance(x, Quantized) else x).dtype) for x in operands[:2]]
        if not all(is_float(jnp.dtype(name)) for name in types):
            raise Decline(f"{what} is of {', '.join(types)}, not of floats")
        contracted, make = MAKERS[eqn.primitive.name](eqn, what)
        for k, (field, other) in enumerate((("left", "right"), ("right", "left"))):
            if isinstance(x := operands[k], Quantized):
                # its blocks, if it has some, are those of what it is multiplied with too
                along = contracted[k][1]
                block = 0 if along is None else x.blocks().get(along, 0)
                sides = {field: Side(), other: dataclasses.replace(getattr(how, other), block=block)}
                how = dataclasses.replace(how, **sides)
        for (k, along), side in zip(contracted, (how.left, how.right, how.dlhs, how.drhs), strict=True):
            size = side.block or (side.format.block if side.format else 0)
            if not (side.format and size):
                continue
            if along is None:
                raise Decline(
                    f"{what} contracts no dimension that blocks could be along: give it a recipe "
                    "without blocks by a rule"
                )
            many = shape_of(eqn.invars[k])[along]
            if many % size:
                raise PlanError(
                    f"quantize: blocks of {size} do not divide the {many} numbers that {what}, or its "
                    f"gradient, contracts ({line}): give it another recipe by a rule, or other blocks"
                )
        codes = all(
            isinstance(x, Quantized) or side.format
            for x, side in zip(operands, (how.left, how.right), strict=False)
        )
        out: Any = eqn.outvars[0].aval
        with jax.named_scope(scope_of(p.name) if codes else f"weights.{p.name}"):
            made = make(operands, how, eqn.params["precision"], out.dtype)
        if (
            codes
            and eqn.primitive.name == "dot_general"
            and kind_of(context.mesh.devices.flat[0]) is not None
        ):
            context.report.promise(Promise("quantize", p.name, "quantized", line))
        context.report.did("quantize", f"{what}: {recipe}", _why(recipe), line)
        return made


@dataclasses.dataclass(frozen=True)
class _There:
    """The products of a program, and what they are told by."""

    products: dict[Place, NamedProduct]
    eqns: dict[Place, JaxprEqn]
    roles: Roles
    paths: list[str]

    @classmethod
    def of(cls, jaxpr: Jaxpr, context: Context) -> _There:
        roles = context.roles(jaxpr)
        products = {(p.path, p.index): p for p in name_products(jaxpr, roles)}
        eqns = {place: roles.axes.scope(place[0]).jaxpr.eqns[place[1]] for place in products}
        return cls(products, eqns, roles, [leaf.path for leaf in context.inputs])

    def is_given(self, place: Place, context: Context) -> bool:
        """Whether the weight of a product is given as codes."""
        return any(self.paths[i] in context.codes for i in self.products[place].inputs)

    def tell(self, place: Place, why: str, context: Context) -> None:
        """Says why a product is left alone."""
        where = source_line(self.eqns[place]) or name_stack(self.eqns[place])
        context.report.declined("quantize", self.products[place].name or "a product", why, where)

    def __str__(self) -> str:
        names = ", ".join(sorted({p.name for p in self.products.values() if p.name})) or "none has a name"
        inputs = {i for p in self.products.values() for i in p.inputs if i < len(self.paths)}
        weights = sorted({self.paths[i] for i in inputs if self.paths[i]})
        return f"there are: {names}; weights: {', '.join(weights[:8]) or 'none'}"


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
        return _stands(eqn, self.pattern)


def _in_blocks(side: Side) -> bool:
    return bool(side.block or (side.format and side.format.block))


def _stands(eqn: JaxprEqn, pattern: str) -> bool:
    """Whether a product's name stack or source line has a match."""
    return bool(re.search(pattern, f"{name_stack(eqn)} {source_line(eqn)}"))


def _check_regex(pattern: str, where: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise PlanError(f"{where} is no regular expression: {error}") from None


def _key(number: int, p: NamedProduct, model: int) -> str:
    """What a product's ranges are called: its number among those of the model, and what it is. model: the
    number of the function that is differentiated; the first goes without saying.
    """
    return ".".join([*([str(model)] if model else []), str(number), p.name or "product"])


def _by_default(p: NamedProduct) -> bool:
    return p.weight is not None and (not p.name or p.name not in LEFT)


def _why(recipe: Recipe) -> str:
    scales = "one scale a channel" if recipe.channels else "one scale an array"
    own = recipe.products(1, 0)
    sides = [side for side in (own.left, own.right, own.dlhs) if side.format]
    if recipe.channels and any(side.calibration.is_kept for side in sides):
        scales += ", an array where its range is kept"
    known = [side.format for side in sides if side.calibration.is_kept or side.calibration.method == "fixed"]
    if known:
        nan = "stays NaN" if all(f and f.keeps_nan for f in known) else "becomes 0"
        return f"{scales}; where the range is known before, NaN {nan} and infinity the range's end"
    return f"{scales}; NaN or infinity in an operand shows as NaN in all results that share its scale"


__all__ = ["LEFT", "RECIPES", "Quantize"]
