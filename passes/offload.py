"""Keeps the optimizer's state, and the weights if asked to, in the host's memory between steps.

    step m[host], g, w {                step m[host], g, w {
      m' = m * 0.9 + g * 0.1      ->      for each layer i {
      w' = w - 0.01 * m'                    m_i = device_put m[i]
    }                                       m'_i = m_i * 0.9 + g[i] * 0.1
                                            m'[host][i], w'[i] = device_put m'_i, w[i] - 0.01 * m'_i } }

What updates an array element by element (`xform.regions`) runs in a loop over slices of it, in place, so that
the device holds one slice of the state at a time: a layer's, of stacked layers. Weights that a loop over
layers scans are fetched inside it, a layer a turn, forwards and backwards; gradients stay on the device.
Everything else is brought over whole where it is read, and the report says what that is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from jax.sharding import NamedSharding, PartitionSpec

from xform.context import Context
from xform.errors import PlanError
from xform.report import Promise, amount
from xform.rewrite import Site, rewrite
from xform.roles.inputs import Kind, kinds
from xform.sharding.hosted import Hosted, nbytes_of
from xform.sharding.memory import HOST_KIND
from xform.sharding.twins import twins
from xform.trace import Jaxpr, Var, inline

SMALL = 4096
"""Bytes of an array below which it stays on the device: a transfer takes longer than it saves."""


_KINDS: tuple[tuple[Kind, str, str], ...] = (
    ("optimizer", "optimizer", "optimizer state"),
    ("parameter", "parameters", "weights"),
)
"""Of what can be offloaded: the kind of an input, the option, and what the report calls it."""


@dataclasses.dataclass(frozen=True)
class Offload:
    """Options:

    optimizer: the optimizer's state lies in the host's memory between steps.
    parameters: the weights do; what a loop over layers reads comes over a layer at a time.

    Raises PlanError where there is nothing of what is asked for.
    """

    optimizer: bool = True
    parameters: bool = False

    stages: ClassVar[tuple[str, ...]] = ("step",)
    after: ClassVar[tuple[str, ...]] = ("narrow", "shard")
    hosts: ClassVar[bool] = True

    def rewrite(self, jaxpr: Jaxpr, context: Context) -> Jaxpr:
        found = kinds(jaxpr, context.roles(jaxpr), len(context.kept))
        layers = {v for v in jaxpr.invars if _has_layers(context, jaxpr, v)}
        chosen = self._chosen(jaxpr, found)
        jaxpr = _without_calls(jaxpr, context)
        inputs = {i: jaxpr.invars[i] for i in chosen}
        outputs = {n: i for n, i in enumerate(twins(context.inputs, context.outputs)) if i in inputs}
        for i in inputs:
            context.in_shardings[i] = _hosted(context.in_shardings[i], context)
        for n, i in outputs.items():
            context.out_shardings[n] = _hosted(context.out_shardings[n] or context.in_shardings[i], context)
        hosted = Hosted(jaxpr, context, layers, inputs, outputs)
        result = hosted.traced()
        for kind, _, what in _KINDS:
            _tell(hosted, [i for i in inputs if found[i] == kind], what)
        _tell_whole(hosted)
        return result

    def _chosen(self, jaxpr: Jaxpr, found: Sequence[Kind]) -> list[int]:
        wanted = {"optimizer": self.optimizer, "parameter": self.parameters}
        if not any(wanted.values()):
            raise PlanError("offload: neither optimizer nor parameters: set one of them, or drop the pass")
        for kind, option, what in _KINDS:
            if wanted[kind] and kind not in found:
                raise PlanError(
                    f"offload.{option}: the program takes no {what}; give parallelize the whole training"
                    f" step, or set {option} = false"
                )
        return [
            i
            for i, (v, kind) in enumerate(zip(jaxpr.invars, found, strict=True))
            if wanted.get(kind) and nbytes_of(v) >= SMALL
        ]


def _hosted(sharding: NamedSharding | None, context: Context) -> NamedSharding:
    """The layout with the host's memory in it; whole on each device where none was said."""
    return (sharding or NamedSharding(context.mesh, PartitionSpec())).with_memory_kind(HOST_KIND)


def _has_layers(context: Context, jaxpr: Jaxpr, v: Var) -> bool:
    roles = context.roles(jaxpr)
    dims = roles.of(roles.axes.root, v)
    return bool(dims) and tuple(dims[0]) == ("layers",)


def _without_calls(jaxpr: Jaxpr, context: Context) -> Jaxpr:
    """The program with the bodies of its jit calls in their place: what they update is then in sight."""

    def rule(site: Site) -> Sequence[Any] | None:
        if site.path or site.name != "jit":
            return None
        return inline(_without_calls(site.params["jaxpr"], context), *site.args)

    return rewrite(jaxpr, rule, context.report, "offload")


def _tell(hosted: Hosted, own: Sequence[int], what: str) -> None:
    """The report of the inputs of one kind."""
    if not own:
        return
    report = hosted.context.report
    there, back = (
        sum(hosted.held(hosted.inputs[i]) for i in numbers)
        for numbers in (own, [i for i in hosted.outputs.values() if i in own])
    )
    moved = f"{amount(there)} a device are read from the host, {amount(back)} written"
    report.did("offload", f"{what} in host memory", f"{len(own)} arrays; a step, {moved}")
    if stay := len(own) - sum(i in own for i in hosted.outputs.values()):
        why = "no result is their next value: the next step takes them from the device"
        report.declined("offload", f"{stay} arrays of {what} in host memory after the step", why)
    report.promise(Promise("offload", what, "offloaded", nbytes=there))


def _tell_whole(hosted: Hosted) -> None:
    """The report of what comes over whole and would better not."""
    large = hosted.large()
    for why, line in dict.fromkeys(large.values()):
        own = [v for v in large if large[v] == (why, line)]
        nbytes = sum(map(hosted.held, own))
        what = f"{len(own)} arrays a slice at a time: {amount(nbytes)} a device come over whole"
        hosted.context.report.declined("offload", what, why, line)
