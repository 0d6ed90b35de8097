"""The layers of a program, each a program of its own with its tensors named: what a pass treats one by one.

A layer is the body of a scan over layers, the innermost, or some equations of an unrolled stack.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping

from xform.higher_order import bodies, equations
from xform.layers import Block, Refusal, Stack, find_stacks
from xform.rewrite import Path
from xform.roles import Roles
from xform.tensors.names import Place, is_stream, name_tensors
from xform.tensors.runs import taken_out
from xform.trace import Jaxpr, JaxprEqn, name_stack


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer, or the body of a scan over several.

    path, numbers: the equations that it is, in which body; scanned: whether that is a scan, whose body is
    the layer. jaxpr: the layer as a program. names: the tensors in it by their place there; inputs: those
    that it takes, by number. in_loop: whether a loop keeps the compiler from merging passes;
    nested: whether that loop is inside another.
    """

    path: Path
    numbers: tuple[int, ...]
    scanned: bool
    jaxpr: Jaxpr
    outside: str  # the name stack around it
    names: Mapping[Place, str]
    inputs: Mapping[int, str]
    in_loop: bool
    nested: bool
    what: str

    @functools.cached_property
    def has(self) -> frozenset[str]:
        """The names of its tensors, the user's own calls of `checkpoint_name` among them."""
        own = {eqn.params["name"] for eqn in equations(self.jaxpr) if eqn.primitive.name == "name"}
        return frozenset(self.names.values()) | frozenset(self.inputs.values()) | own

    @property
    def name_stacks(self) -> Iterator[str]:
        """Those of its equations, from the outermost program inward, at any depth."""
        return name_stacks(self.jaxpr.eqns, self.outside)


def find_layers(jaxpr: Jaxpr, roles: Roles) -> tuple[list[Layer], list[Refusal]]:
    """The layers of a program: innermost scans over layers, and unrolled ones without such a scan in them."""
    stacks, refusals = find_stacks(jaxpr, roles)
    names = name_tensors(jaxpr, roles, stacks)
    found = [_scanned(jaxpr, path, names) for path in dict.fromkeys(p for p, i, _ in names if i < 0)]
    scans = {(layer.path, layer.numbers[0]) for layer in found}
    scans |= {(layer.path[:k], layer.path[k][0]) for layer in found for k in range(len(layer.path))}
    for stack in stacks:
        numbers = [i for block in stack.blocks for i in block.equations]
        if stack.kind == "unrolled" and not any((stack.path, i) in scans for i in numbers):
            found += [_unrolled(jaxpr, roles, stack, block, names) for block in stack.blocks]
    return found, refusals


def _scanned(jaxpr: Jaxpr, path: Path, names: Mapping[Place, str]) -> Layer:
    n = len(path)
    own = {(p[n:], i, r): name for (p, i, r), name in names.items() if p[:n] == path}
    inputs = {r: name for (p, i, r), name in own.items() if i < 0}
    results = {place: name for place, name in own.items() if place[1] >= 0}
    *outer, (index, _) = path
    around, _, nested = _at(jaxpr, tuple(outer))
    body, outside, _ = _at(jaxpr, path)
    params = around.eqns[index].params
    # What is unrolled whole, or turns once, is no loop to the compiler.
    in_loop = params["length"] > max(1, int(params["unroll"]))
    what = f"the body of a scan over {params['length']} layers"
    return Layer(tuple(outer), (index,), True, body, outside, results, inputs, in_loop, nested, what)


def _unrolled(jaxpr: Jaxpr, roles: Roles, stack: Stack, block: Block, names: Mapping[Place, str]) -> Layer:
    body, outside, in_loop = _at(jaxpr, stack.path)
    numbers = tuple(sorted(block.equations))
    part, n = taken_out(body, numbers), len(stack.path)
    place = {i: k for k, i in enumerate(numbers)}
    own: dict[Place, str] = {}
    for (path, index, result), name in names.items():
        inner = (*path, (index, 0))[n:]
        if path[:n] != stack.path or inner[0][0] not in place or name == "decoder_layer_input":
            continue
        (first, number), rest = inner[0], path[n + 1 :]
        if len(path) == n:
            own[(), place[first], result] = name
        else:
            own[((place[first], number), *rest), index, result] = name
    scope = roles.axes.scope(stack.path)
    stream = {v for v in block.carried if is_stream(roles, scope, v)}
    inputs = {i: "decoder_layer_input" for i, v in enumerate(part.invars) if v in stream}
    layers = "a layer" if stack.period == 1 else f"a block of {stack.period} layers"
    what = f"{layers} of {stack.layers} unrolled"
    return Layer(stack.path, numbers, False, part, outside, own, inputs, in_loop, False, what)


def _at(jaxpr: Jaxpr, path: Path) -> tuple[Jaxpr, str, bool]:
    """The body at a path, the name stack around it, and whether a loop is."""
    outside, in_loop = "", False
    for index, number in path:
        eqn = jaxpr.eqns[index]
        outside = _joined(outside, name_stack(eqn))
        in_loop |= eqn.primitive.name in ("scan", "while")
        jaxpr = bodies(eqn)[number]
    return jaxpr, outside, in_loop


def name_stacks(eqns: Iterable[JaxprEqn], outside: str) -> Iterator[str]:
    """The name stacks of equations, and of those inside them, below one that they stand in."""
    for eqn in eqns:
        names = _joined(outside, name_stack(eqn))
        yield names
        for body in bodies(eqn):
            yield from name_stacks(body.eqns, names)


def _joined(outer: str, inner: str) -> str:
    return f"{outer}/{inner}" if outer and inner else outer or inner
