"""What a differentiated program keeps of its named tensors for the backward pass, and what it computes again.

A tensor bears a name by `checkpoint_name`. It is followed from there, through casts, transfers and the loops
that stack it, to the top of the program; in the part that jax.checkpoint computes again, the same name says
that it is computed again.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

import jax

from xform.flops import AGAIN, terms
from xform.higher_order import READ, bodies, scan_parts
from xform.trace import DropVar, Jaxpr, Var, name_stack, shape_of, source_line

CHECKPOINT = "remat2"

_PASSED_ON = frozenset(
    ["convert_element_type", "copy", "copy_p", "device_put", "name", "reduce_precision", "reshape"]
    + ["sharding_constraint", "squeeze", "expand_dims", "transpose"]
)


@dataclasses.dataclass(frozen=True)
class Kept:
    """A tensor that the forward pass hands to the backward pass.

    stacked: the turns of the loops that stack it, outermost first; () where no loop does. looped: whether
    these are loops to the compiler too, not scans that are unrolled. shape: of one of them, on all devices
    together. on_host: whether the program sends it there.
    """

    name: str
    stacked: tuple[int, ...]
    shape: tuple[int, ...]
    itemsize: int
    on_host: bool
    looped: bool = False

    @property
    def count(self) -> int:
        return math.prod(self.stacked)

    @property
    def nbytes(self) -> int:
        """Of all of them, on all devices together."""
        return self.count * math.prod(self.shape) * self.itemsize


def kept(jaxpr: Jaxpr) -> list[Kept]:
    """What is kept of the named tensors: the same name once for each loop that stacks it, or layer."""
    found: list[Kept] = []
    _results(jaxpr, found)
    return found


def _results(jaxpr: Jaxpr, found: list[Kept]) -> dict[int, Kept]:
    """By number, the results of a body that hold a named tensor. What is kept and stays in it goes to
    `found`.
    """
    holds: dict[Var, Kept] = {}
    stacks: list[Var] = []  # the results of loops among them
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if AGAIN in name_stack(eqn):
            continue
        reads = [v for v in eqn.invars if isinstance(v, Var) and v in holds]
        if name == "name":
            holds[eqn.outvars[0]] = _as_it_is(eqn.params["name"], eqn.outvars[0])
        elif name in _PASSED_ON and reads:
            tensor = holds[reads[0]]
            holds[eqn.outvars[0]] = tensor if tensor.stacked else _as_it_is(tensor.name, eqn.outvars[0])
        elif name == CHECKPOINT and eqn.params["differentiated"]:
            found += [holds[v] for v in dict.fromkeys(reads) if not holds[v].stacked]
        elif name == "scan":
            _, carry, _ = scan_parts(eqn)
            for number, tensor in _results(eqn.params["jaxpr"], found).items():
                v = eqn.outvars[number]
                if number >= carry and not isinstance(v, DropVar):
                    length = eqn.params["length"]
                    looped = tensor.looped or length > max(1, int(eqn.params["unroll"]))
                    holds[v] = dataclasses.replace(tensor, stacked=(length, *tensor.stacked), looped=looped)
                    stacks.append(v)
        else:
            for body in bodies(eqn):
                results = _results(body, found)
                if len(body.outvars) == len(eqn.outvars):
                    holds.update((eqn.outvars[n], tensor) for n, tensor in results.items())
                    stacks += [eqn.outvars[n] for n, tensor in results.items() if tensor.stacked]
    results = {n: holds[v] for n, v in enumerate(jaxpr.outvars) if isinstance(v, Var) and v in holds}
    found += [holds[v] for v in stacks if not any(holds[v] is tensor for tensor in results.values())]
    return results


def _as_it_is(name: str, v: Var) -> Kept:
    aval: Any = v.aval
    on_host = getattr(aval, "memory_space", None) is jax.memory.Space.Host
    return Kept(name, (), shape_of(v), int(aval.dtype.itemsize), on_host)


# ---------------------------------------------------------------- what is computed again


@dataclasses.dataclass
class Again:
    """The products that are computed again.

    flops: of all devices together, by what one product takes. names: named tensors that are. merged: lines of
    calls of jax.checkpoint outside of loops that let the compiler merge both computations.
    """

    flops: Counter[float] = dataclasses.field(default_factory=Counter)
    names: set[str] = dataclasses.field(default_factory=set)
    merged: list[str] = dataclasses.field(default_factory=list)


def again(jaxpr: Jaxpr) -> Again:
    """What the program computes again, before the compiler has seen it."""
    found = Again()
    _again(jaxpr, found, 1, False)
    return found


def _again(jaxpr: Jaxpr, found: Again, times: int, inside: bool) -> None:
    for eqn in jaxpr.eqns:
        here = inside or AGAIN in name_stack(eqn)
        if eqn.primitive.name == CHECKPOINT and eqn.params["differentiated"]:
            if times == 1 and not eqn.params["prevent_cse"]:
                found.merged.append(source_line(eqn))
        elif here and eqn.primitive.name == "name":
            found.names.add(eqn.params["name"])
        elif here and (terms_ := terms(eqn)):
            flops = 2.0 * math.prod(shape_of(eqn.outvars[0])) * terms_
            found.flops[flops] += times
        for body in bodies(eqn) if eqn.primitive.name not in READ else ():
            turns = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            _again(body, found, times * turns, here)
