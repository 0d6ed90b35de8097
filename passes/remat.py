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
with its first computation but that the two are different loops; outside, `prevent_cse` does.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.source_info_util import reset_name_stack

from xform.context import Context
from xform.errors import Decline, PlanError
from xform.higher_order import RULES, enter, equations, hoist
from xform.layers import Refusal
from xform.registry import unknown
from xform.report import Report
from xform.rewrite import Path, Rule, Site, rewrite
from xform.tensors import Place
from xform.tensors.layers import Layer, find_layers, name_stacks
from xform.tensors.runs import Change, replaced
from xform.trace import Jaxpr, inline, source_line, trace_flat

Emit = Callable[..., Sequence[Any]]

CHECKPOINT = "remat2"

QKV = ("query_proj", "key_proj", "value_proj", "kv_proj", "qkv_proj")
DOTS = (*QKV, "out_proj")
MLP = ("mlpwi", "mlpwi_0", "mlpwi_1", "mlpwo", "moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo")

LATE = "outside a loop the compiler copies to the host as late as it likes: roll the layers"
NESTED = "in a loop within a loop the compiler keeps most of it on the device: flatten the loops"

POLICIES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "none": ((), ()),
    "full": ((), ()),
    "minimal": ((*DOTS, *MLP), ()),
    "minimal_with_context": ((*DOTS, *MLP, "context"), ()),
    "minimal_with_quantization": ((*DOTS, *MLP, "quantization"), ()),
    "minimal_with_context_and_quantization": ((*DOTS, *MLP, "context", "quantization"), ()),
    "save_dot_with_context_except_mlp": ((*DOTS, "context"), ()),
    "save_dot_except_mlpwi": ((*DOTS, "mlpwo", "moe_mlpwo"), ()),
    "save_dot_except_mlp": (DOTS, ()),
    "save_qkv_proj": (QKV, ()),
    "save_out_proj": (("out_proj",), ()),
    "qkv_proj_offloaded": ((), QKV),
    "minimal_offloaded": ((), (*DOTS, *MLP)),
    "custom": ((), ()),
}
"""What each policy saves on the device, and what on the host: MaxText's, nnx_decoders.py, with its drift
mended: a fused projection is offloaded as well, and of experts both up-projections are saved."""

Policy = Literal[
    "none",
    "full",
    "minimal",
    "minimal_with_context",
    "minimal_with_quantization",
    "minimal_with_context_and_quantization",
    "save_dot_with_context_except_mlp",
    "save_dot_except_mlpwi",
    "save_dot_except_mlp",
    "save_qkv_proj",
    "save_out_proj",
    "qkv_proj_offloaded",
    "minimal_offloaded",
    "custom",
]


@dataclasses.dataclass(frozen=True)
class Remat:
    """Options:

    policy: a row of `POLICIES`; "none" wraps nothing, "full" keeps only what a layer takes.
    save: tensors to save besides the policy's, by name; "custom" alone has none of its own.
    offload: tensors to keep on the host instead; a name given here is taken off the policy's saved ones.
    where: a regular expression; only layers in which some name stack matches it are treated.
    existing: of a model that calls jax.checkpoint itself: "respect" leaves such layers alone, "override"
        takes its calls away first.

    Raises PlanError for a name in `save` or `offload` that no tensor of the layers has, and where there are
    no layers.
    """

    policy: Policy = "minimal"
    save: Sequence[str] = ()
    offload: Sequence[str] = ()
    where: str = ""
    existing: Literal["respect", "override"] = "respect"

    stages: ClassVar[tuple[str, ...]] = ("model",)

    def rewrite(self, jaxpr: Jaxpr, context: Context) -> Jaxpr:
        policy = self._policy()
        if self.existing == "override":
            jaxpr = self._without_checkpoints(jaxpr, context)
        if self.policy == "none":
            return jaxpr
        layers, refusals = find_layers(jaxpr, context.roles(jaxpr))
        chosen = [layer for layer in layers if _matches(self.where, layer.name_stacks)]
        if not chosen:
            raise PlanError(_no_layers(layers, refusals, self.where))
        self._check(chosen)
        if self.existing == "respect":
            chosen = [layer for layer in chosen if not self._respects(layer, context)]
        return _Wrap(policy, chosen, context.report).body(jaxpr, ())

    def _policy(self) -> _Policy:
        """What is saved, and what is offloaded."""
        if self.policy not in POLICIES:
            raise unknown("policy", self.policy, POLICIES, "remat.policy")
        if both := set(self.save) & set(self.offload):
            raise PlanError(f"remat: {', '.join(sorted(both))} cannot be both saved and offloaded")
        if self.policy == "none" and (self.save or self.offload):
            raise PlanError('remat: policy "none" keeps everything; with save or offload, use "custom"')
        try:
            re.compile(self.where)
        except re.error as error:
            raise PlanError(f"remat.where = {self.where!r} is no regular expression: {error}") from None
        save, offload = map(frozenset, POLICIES[self.policy])
        mine, theirs = frozenset(self.save), frozenset(self.offload)
        return _Policy((save | mine) - theirs, (offload | theirs) - mine)

    def _check(self, layers: Sequence[Layer]) -> None:
        there = sorted({name for layer in layers for name in layer.has})
        for option in ("save", "offload"):
            for name in getattr(self, option):
                if name not in there:
                    raise unknown("tensor", name, there, f"remat.{option}")

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
            if not _matches(self.where, name_stacks(body.eqns, site.where)):
                return None
            context.report.did("remat", "took away a call of jax.checkpoint", "overridden", site.line)
            return inline(rewrite(body, rule, context.report, "remat"), *site.args)

        return rewrite(jaxpr, rule, context.report, "remat")


@dataclasses.dataclass(frozen=True, repr=False)
class _Policy:
    """What is saved and what is offloaded, as `jax.checkpoint` asks it of each operation."""

    save: frozenset[str]
    offload: frozenset[str]

    def __call__(self, *args: Any, **params: Any) -> Any:
        return self._jax(*args, **params)

    def __repr__(self) -> str:  # a set of strings is written in another order in each process
        return f"save {', '.join(sorted(self.save)) or '-'}; offload {', '.join(sorted(self.offload)) or '-'}"

    @functools.cached_property
    def _jax(self) -> Callable[..., Any]:
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=sorted(self.save),
            names_which_can_be_offloaded=sorted(self.offload),
            offload_src="device",
            offload_dst="pinned_host",
        )

    def checkpoint(self, f: Callable[..., Any], in_loop: bool) -> Callable[..., Any]:
        """`f` so that only what the policy says is there for its backward pass."""
        return jax.checkpoint(f, policy=self if self.save or self.offload else None, prevent_cse=not in_loop)


class _Wrap:
    """Names the tensors of layers, and wraps the layers."""

    def __init__(self, policy: _Policy, layers: Sequence[Layer], report: Report) -> None:
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
        chosen = self.policy.save | self.policy.offload
        body = rewrite(layer.jaxpr, _naming(layer.names, chosen), self.report, "remat")

        def run(*args: Any) -> list[Any]:
            named = (
                checkpoint_name(x, layer.inputs[i]) if layer.inputs.get(i) in self.policy.offload else x
                for i, x in enumerate(args)
            )
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
        for name in () if why else offload:
            self.report.promised("remat", f"{name} in host memory", f"{count[name] or 1} of {layer.what}")


def _apart(emit: Emit) -> Emit:
    """`emit` without the name stack of the equations that it replaces: what it emits has its own."""

    def apart(*args: Any) -> Sequence[Any]:
        with reset_name_stack():
            return emit(*args)

    return apart


def _naming(names: Mapping[Place, str], chosen: Collection[str]) -> Rule:
    """The rule that names results."""

    def rule(site: Site) -> Sequence[Any] | None:
        results = range(len(site.eqn.outvars))
        all_names = {r: names.get((site.path, site.index, r)) for r in results}
        own = {r: name for r, name in all_names.items() if name in chosen}
        if not own:
            return None
        return [checkpoint_name(x, own[r]) if r in own else x for r, x in enumerate(site.bind())]

    return rule


def _matches(where: str, names: Iterable[str]) -> bool:
    return not where or any(re.search(where, each) for each in names)


def _no_layers(layers: Sequence[Layer], refusals: Sequence[Refusal], where: str) -> str:
    if not layers:
        near = "".join(f"; {refusal.why} ({refusal.where})" for refusal in refusals[:3])
        return (
            "remat: the model has no layers to treat: nothing carries a residual stream from one block of"
            f" attention or MLP to the next alike{near}"
        )
    stacks = {s for layer in layers for s in layer.name_stacks if s}
    there = ", ".join(sorted(stacks)[:8]) or "none: nothing has a name stack"
    return f"remat.where = {where!r} matches no layer; name stacks in layers are {there}"
