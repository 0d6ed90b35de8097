"""Says for each tensor of a layer whether the backward pass reads it, computes it again, or fetches it from
the host.

    scan {                               scan {
      q = dot_general x wq                 remat2[policy=save query_proj, prevent_cse=False] {
      ...                        ->          q = dot_general x wq
    }                                        q' = name[query_proj] q
                                             ... } }

Tensors are named by what they are (`xform.tensors`), and a policy, MaxText's by default, is two sets of
names: what is saved and what is offloaded; the rest of a layer is computed again. It acts before autodiff, so
JAX itself makes the backward pass. In a loop nothing keeps the compiler from merging what is computed again
with its first computation but that the two are different loops; outside, `prevent_cse` does. With a budget,
what is saved and what is offloaded is chosen so that the compiled step fits it (`xform.memory`).
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal

from jax.ad_checkpoint import checkpoint_name
from jax.extend.source_info_util import reset_name_stack

from xform.context import Context
from xform.errors import Decline, PlanError
from xform.higher_order import RULES, enter, equations, hoist
from xform.layers import Refusal
from xform.memory import Choice, Choices, Trial, find, layers_of, nothing_to_choose, parse_size, tell
from xform.memory.policies import POLICIES, Keep, Policy
from xform.memory.selection import Tensor, selected, tensors_of
from xform.registry import unknown
from xform.report import Keeping, Promise, Report
from xform.rewrite import Path, Rule, Site, rewrite
from xform.tensors import Place
from xform.tensors.layers import Layer, find_layers, name_stacks
from xform.tensors.runs import Change, replaced
from xform.trace import Jaxpr, inline, source_line, trace_flat

Emit = Callable[..., Sequence[Any]]

CHECKPOINT = "remat2"

LATE = "outside a loop the compiler copies to the host as late as it likes: roll the layers"
NESTED = "in a loop within a loop the compiler keeps most of it on the device: flatten the loops"


@dataclasses.dataclass(frozen=True)
class Remat:
    """Options:

    policy: a row of `POLICIES`; "none" wraps nothing, "full" keeps only what a layer takes.
    save: tensors to save besides the policy's: names ("mlp*" for several), roles of their dimensions
        ("heads"), or a function that takes a Tensor and says yes; "custom" alone has none of its own.
    offload: tensors to keep on the host instead; a name given here is taken off the policy's saved ones.
    where: a regular expression; only layers in which some name stack matches it are treated. Or a function
        that takes a Layer and says yes.
    existing: of a model that calls jax.checkpoint itself: "respect" leaves such layers alone, "override"
        takes its calls away first.
    budget: device memory that the compiled step may take, "14GiB", "15.5GB" or bytes: in place of a policy,
        what is saved and offloaded is chosen so that it fits and takes the least time.

    Raises PlanError for what `save` or `offload` names and no tensor of the layers is, where there are no
    layers, and for a budget that cannot be met.
    """

    policy: Policy = "minimal"
    save: Sequence[str] | Callable[[Tensor], bool] = ()
    offload: Sequence[str] | Callable[[Tensor], bool] = ()
    where: str | Callable[[Layer], bool] = ""
    existing: Literal["respect", "override"] = "respect"
    budget: str | int = ""

    stages: ClassVar[tuple[str, ...]] = ("model",)
    after: ClassVar[tuple[str, ...]] = ("roll", "chunkedloss", "kernels", "context", "experts")

    def rewrite(self, jaxpr: Jaxpr, context: Context) -> Jaxpr:
        self._check()
        if self.existing == "override":
            jaxpr = self._without_checkpoints(jaxpr, context)
        if self.policy == "none":
            return jaxpr
        roles = context.roles(jaxpr)
        layers, refusals = find_layers(jaxpr, roles)
        chosen = [layer for layer in layers if self._treats(layer)]
        if not chosen:
            raise PlanError(_no_layers(layers, refusals, self.where))
        policy = self._policy([t for layer in chosen for t in tensors_of(layer, roles)])
        if self.existing == "respect":
            chosen = [layer for layer in chosen if not self._respects(layer, context)]
        return _Wrap(policy, chosen, context.report).body(jaxpr, ())

    def settle(self, trial: Callable[[Any], Trial], report: Report) -> Remat:
        """The pass with its budget met by a choice of what is saved and offloaded, which `report` is told.

        `trial` makes the whole step with a pass in this one's place.
        """
        if self.budget == "":
            return self
        self._check()
        budget = parse_size(self.budget, "remat.budget")
        none = trial(self)  # everything named, nothing kept
        layers = layers_of(none.spread, self._has_made, none.speeds)
        if not layers:
            raise PlanError(nothing_to_choose("remat.budget", none.program.laid_out))
        choices = Choices(layers, none.speeds)

        def settled(choice: Choice) -> Remat:
            policy: Policy = "custom" if choice.save or choice.offload else "full"
            return dataclasses.replace(
                self, policy=policy, save=choice.save, offload=choice.offload, budget=""
            )

        found = find(budget, "remat.budget", none, choices, lambda choice: trial(settled(choice)))
        tell(report, found, choices, budget)
        return settled(found.tried.choice)

    def _has_made(self, policy: Any) -> bool:
        return isinstance(policy, Keep) and policy.open == self

    def _check(self) -> None:
        """Options that cannot be together, or be at all."""
        if self.policy not in POLICIES:
            raise unknown("policy", self.policy, POLICIES, "remat.policy")
        if self.policy == "none" and (self.save or self.offload):
            raise PlanError('remat: policy "none" keeps everything; with save or offload, use "custom"')
        if self.budget != "" and (self.save or self.offload or self.policy != "minimal"):
            raise PlanError("remat: a budget chooses what is kept, in place of policy, save and offload")
        try:
            re.compile(self.where if isinstance(self.where, str) else "")
        except re.error as error:
            raise PlanError(f"remat.where = {self.where!r} is no regular expression: {error}") from None

    def _policy(self, tensors: Sequence[Tensor]) -> Keep:
        """What is saved, and what is offloaded, of these tensors."""
        if self.budget != "":
            return Keep(frozenset(), frozenset(), self)
        mine, theirs = (
            selected(each, tensors, f"remat.{option}")
            for option, each in (("save", self.save), ("offload", self.offload))
        )
        if both := mine & theirs:
            raise PlanError(f"remat: {', '.join(sorted(both))} cannot be both saved and offloaded")
        save, offload = map(frozenset, POLICIES[self.policy])
        return Keep((save | mine) - theirs, (offload | theirs) - mine)

    def _treats(self, layer: Layer) -> bool:
        if callable(self.where):
            return self.where(layer)
        return not self.where or any(re.search(self.where, each) for each in layer.name_stacks)

    def _respects(self, layer: Layer, context: Context) -> bool:
        """Whether the user's own recomputation stays, and the layer is left alone."""
        own = next((eqn for eqn in equations(layer.jaxpr) if eqn.primitive.name == CHECKPOINT), None)
        if own is not None:
            why = 'it calls jax.checkpoint itself; existing = "override" would take that away'
            context.report.declined("remat", layer.what, why, source_line(own))
        return own is not None

    def _without_checkpoints(self, jaxpr: Jaxpr, context: Context) -> Jaxpr:
        """The program with the bodies of its jax.checkpoint calls in their place."""

        def rule(site: Site) -> Sequence[Any] | None:
            if site.name != CHECKPOINT:
                return None
            body = site.params["jaxpr"]
            names = name_stacks(body.eqns, site.where)
            if (
                isinstance(self.where, str)
                and self.where
                and not any(re.search(self.where, n) for n in names)
            ):
                return None
            context.report.did("remat", "took away a call of jax.checkpoint", "overridden", site.line)
            return inline(rewrite(body, rule, context.report, "remat"), *site.args)

        return rewrite(jaxpr, rule, context.report, "remat")


class _Wrap:
    """Names the tensors of layers, and wraps the layers."""

    def __init__(self, policy: Keep, layers: Sequence[Layer], report: Report) -> None:
        self.policy, self.layers, self.report = policy, layers, report

    def body(self, jaxpr: Jaxpr, path: Path) -> Jaxpr:
        """A body with the layers wrapped that stand in it, at any depth."""
        runs: list[tuple[Collection[int], Change]] = []
        around: dict[int, None] = {}
        for layer in self.layers:
            if layer.path == path:
                runs.append((layer.numbers, functools.partial(self.layer, layer)))
            elif layer.path[: len(path)] == path:
                around[layer.path[len(path)][0]] = None
        runs += [((i,), functools.partial(self.around, path, i)) for i in around]
        return replaced(jaxpr, runs, "remat") if runs else jaxpr

    def layer(self, layer: Layer, part: Jaxpr) -> Emit:
        self.tell(layer)
        wrapped = self.wrapped(layer)
        if not layer.scanned:
            return _apart(wrapped)
        avals = [v.aval for v in layer.jaxpr.invars]

        def rule(site: Site) -> Sequence[Any] | None:
            return None if site.path else site.bind(jaxpr=trace_flat(wrapped, avals, "layer"))

        return _apart(functools.partial(inline, rewrite(part, rule, self.report, "remat")))

    def around(self, path: Path, index: int, part: Jaxpr) -> Emit:
        """An equation with layers somewhere inside."""

        def rule(site: Site) -> Sequence[Any] | None:
            if site.path:
                return None
            if site.name in RULES:
                raise Decline("the layers in it have a differentiation rule of the user's own")
            inside = enter(site.eqn, lambda b, n: b if n < 0 else self.body(b, (*path, (index, n))))
            params, consts = hoist(site.eqn, inside)
            return site.bind(*consts, *site.args, **params)

        return _apart(functools.partial(inline, rewrite(part, rule, self.report, "remat")))

    def wrapped(self, layer: Layer) -> Emit:
        body = rewrite(layer.jaxpr, _naming(layer.names, self.policy), self.report, "remat")
        inputs = {i: name for i, name in layer.inputs.items() if self.policy.names_input(name)}

        def run(*args: Any) -> list[Any]:
            named = (checkpoint_name(x, inputs[i]) if i in inputs else x for i, x in enumerate(args))
            return inline(body, *named)

        return self.policy.checkpoint(run, layer.in_loop)

    def tell(self, layer: Layer) -> None:
        count = Counter((*layer.names.values(), *layer.inputs.values()))
        save, offload = (sorted(layer.has & names) for names in (self.policy.save, self.policy.offload))
        verbs = (("saves", save), ("offloads", offload))
        parts = [f"{verb} {', '.join(names)}" for verb, names in verbs if names]
        rest = "computes everything else again" if parts else "computes everything again"
        self.report.did("remat", f"wrapped {layer.what}", "; ".join([*parts, rest]))
        why = NESTED if layer.nested else "" if layer.in_loop else LATE
        if why and offload:
            self.report.declined("remat", f"a promise of memory freed by {layer.what}", why)
        again = sorted(layer.has - self.policy.save - self.policy.offload)
        kinds: dict[Keeping, Sequence[str]] = {"saved": save, "recomputed": again}
        for kind, names in (kinds if why else kinds | {"offloaded": offload}).items():
            for name in names:
                self.report.promise(Promise("remat", name, kind, layer.what))
        for name in () if why else offload:
            self.report.promised("remat", f"{name} in host memory", f"{count[name] or 1} of {layer.what}")


def _apart(emit: Emit) -> Emit:
    """`emit` without the name stack of the equations that it replaces: what it emits has its own."""

    def apart(*args: Any) -> Sequence[Any]:
        with reset_name_stack():
            return emit(*args)

    return apart


def _naming(names: Mapping[Place, str], policy: Keep) -> Rule:
    """The rule that names results."""

    def rule(site: Site) -> Sequence[Any] | None:
        results = range(len(site.eqn.outvars))
        all_names = {r: names.get((site.path, site.index, r)) for r in results}
        own = {r: name for r, name in all_names.items() if name is not None and policy.names(name)}
        if not own:
            return None
        return [checkpoint_name(x, own[r]) if r in own else x for r, x in enumerate(site.bind())]

    return rule


def _no_layers(layers: Sequence[Layer], refusals: Sequence[Refusal], where: str | Callable[..., bool]) -> str:
    if not layers:
        near = "".join(f"; {refusal.why} ({refusal.where})" for refusal in refusals[:3])
        return (
            "remat: the model has no layers to treat: nothing carries a residual stream from one block of"
            f" attention or MLP to the next alike{near}"
        )
    stacks = {s for layer in layers for s in layer.name_stacks if s}
    if callable(where):
        return f"remat.where says no to each of the {len(layers)} layers that there are"
    there = ", ".join(sorted(stacks)[:8]) or "none: nothing has a name stack"
    return f"remat.where = {where!r} matches no layer; name stacks in layers are {there}"
