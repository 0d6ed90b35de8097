"""What a pass is told about the program it rewrites: the mesh, the inputs and outputs, their axes, and the
report.

A pass takes a program to one of the same inputs and results, or says in the context which it has now; what it
decides about the arguments, their layout, it writes into the context, and `parallelize` applies it. One
context serves one traced function, through all passes of its stage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod
from typing import Any, Literal

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xform.axes import find_axes
from xform.quantization.given import Given
from xform.quantization.weights import Storable
from xform.report import Report
from xform.roles import Roles, find_roles
from xform.roles.logical import Named
from xform.state.kept import Kept, Phase
from xform.trace import Jaxpr

Stage = Literal["model", "step", "compiler"]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array among a function's inputs or outputs.

    path: as `jax.tree_util.keystr` writes it, over (args..., kwargs...) for inputs of the whole function,
    also
        where they are inputs of the function being differentiated; '' for what has no name.
    argument: the number (or keyword) of the argument it belongs to; -1 for outputs and closed-over values.
    """

    path: str
    aval: Any
    argument: int | str = -1
    donated: bool = False


@dataclasses.dataclass
class Context:
    """Handed to every pass of one stage.

    in_shardings, out_shardings: one a leaf of `inputs` and `outputs`, None where no pass has said anything.
    reasons: for each leaf's path, why it lies so. kinds: of each input, `roles.inputs.Kind`, once Shard has
    looked. dcn: by how much each axis of the mesh crosses slices, as the plan says. spec: the layout of a
    value by what its dimensions are, once Shard has looked. differentiated: whether the program is what the
    function differentiates, or holds gradients. given: which inputs are codes of weights, which the program
    takes as floats until Quantize carries them through it; given_as: the leaves they are then; codes: the
    paths of these weights. storable: finds which weights of a program that is not differentiated can be
    stored as codes, and how. kept: the last of the inputs and of the outputs, which are not the function's
    own. keeper: the argument that they are part of; returns: whether the function returns it. model: the
    number of the function that is differentiated, at the model stage. stage_axes: the mesh axes that layers
    lie over as stages, so that no rows do; vocabulary_axes: those of them that the vocabulary lies over;
    expert_axes: those that experts lie over, to which tokens are sent.
    steps: how often Accumulate has them all go through; sums: in which dtype it has gradients added up, None
    where it is not in the plan. cuts: of each pass that cuts the batch into microbatches, into how many it
    does one of so many rows.
    """

    stage: Stage
    mesh: Mesh
    report: Report
    inputs: Sequence[Leaf]
    outputs: Sequence[Leaf]
    axis_names: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    in_shardings: list[NamedSharding | None] = dataclasses.field(default_factory=list)
    out_shardings: list[NamedSharding | None] = dataclasses.field(default_factory=list)
    reasons: dict[str, str] = dataclasses.field(default_factory=dict)
    kinds: Sequence[str] = ()
    dcn: Mapping[str, int] = dataclasses.field(default_factory=dict)
    spec: Callable[[Sequence[Named]], PartitionSpec] | None = None
    differentiated: bool = False
    given: Given | None = None
    given_as: Sequence[Leaf] = ()
    codes: Collection[str] = ()
    storable: Callable[[], Storable] | None = None
    kept: tuple[Kept, ...] = ()
    keeper: int | str = 0
    returns: bool = True
    phase: Phase = "start"
    model: int = 0
    stage_axes: tuple[str, ...] = ()
    expert_axes: tuple[str, ...] = ()
    vocabulary_axes: tuple[str, ...] = ()
    steps: int = 1
    sums: str | None = None
    cuts: tuple[Callable[[int], int], ...] = ()
    _roles: tuple[Jaxpr, Roles] | None = None

    def __post_init__(self) -> None:
        self.in_shardings = self.in_shardings or [None] * len(self.inputs)
        self.out_shardings = self.out_shardings or [None] * len(self.outputs)

    def keep(self, more: Sequence[Kept]) -> None:
        """The program has these arrays as its last inputs, and what becomes of them as its last results. They
        lie whole on every device.
        """
        donated = any(leaf.donated for leaf in self.inputs if leaf.argument == self.keeper)
        self.kept = (*self.kept, *more)
        self.inputs = [*self.inputs, *(Leaf(k.path, k.aval, self.keeper, donated) for k in more)]
        self.outputs = [*self.outputs, *(Leaf(k.path, k.aval) for k in more)]
        whole = [NamedSharding(self.mesh, PartitionSpec())] * len(more)
        self.in_shardings = [*self.in_shardings, *whole]
        self.out_shardings = [*self.out_shardings, *whole]
        self.reasons.update((k.path, "kept from step to step: lies whole on every device") for k in more)

    def microbatches(self, rows: int) -> int:
        """Into how many microbatches the plan cuts a batch of so many rows."""
        return prod(cut(rows) for cut in self.cuts)

    def roles(self, jaxpr: Jaxpr) -> Roles:
        """The axes of `jaxpr` and their roles; analysed once for the same program."""
        if self._roles is None or self._roles[0] is not jaxpr:
            paths = [leaf.path for leaf in self.inputs]
            names = self.axis_names if self.stage == "step" else _of_these(self.axis_names, paths)
            self._roles = (jaxpr, find_roles(find_axes(jaxpr), names, paths))
        return self._roles[1]


def _of_these(names: Mapping[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """The user's names for axes of these inputs: a function that is differentiated takes a part of the
    step's.

    A role's places are `path[dimension]`, alone or in a list; or the key is the place and the value splits
    it.
    """

    def here(place: Any) -> bool:
        return any(path and str(place).startswith(path + "[") for path in paths)

    found = {}
    for key, value in names.items():
        places = [value] if isinstance(value, str) else list(value)
        if here(key):
            found[key] = value
        elif kept := [place for place in places if here(place)]:
            found[key] = kept
    return found
