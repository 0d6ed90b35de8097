"""What each tensor of a model is, by the name MaxText has for it, told from what the operations do.

A product of an activation and a weight is a *projection*. Attention is a product of two activations (the
scores) that reaches another (the context) along a dimension that the first made and the second sums: the
keys. What reaches the scores on the side of the keys is `key_proj`, on the other `query_proj`; what is summed
is `value_proj`; one projection that makes all three is `qkv_proj`, keys and values `kv_proj`. The projection
that takes the context is `out_proj`. Of the rest, one that contracts what others made of the residual stream
is `mlpwo`, and those are `mlpwi`, or `mlpwi_0` through the nonlinearity and `mlpwi_1` beside it. No name of
the user's is looked at.

    names = name_tensors(jaxpr, roles)        # {(((12, 0),), 7, 0): "query_proj", ...}

Source of the names: MaxText 0.2.5, layers/attentions.py, linears.py, moe.py and attention_mla.py.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from xform.axes import Factor, Path, Scope, find_axes
from xform.higher_order import carries
from xform.layers import Stack, find_stacks
from xform.roles import Roles, find_roles
from xform.roles.evidence import Dot, Evidence
from xform.tensors.flow import Flow, Op, Value, dimensions_behind
from xform.trace import Atom, Jaxpr, Literal, boundary

Place = tuple[Path, int, int]
"""A result of an equation: where its body stands, the equation's number, the result's number."""

NAMES: dict[str, str] = {
    "decoder_layer_input": "the residual stream as a layer takes it",
    "query_proj": "queries",
    "key_proj": "keys",
    "value_proj": "values",
    "kv_proj": "keys and values of one projection",
    "qkv_proj": "queries, keys and values of one projection",
    "query_wa_proj": "the latent that queries are projected from",
    "kv_wa_proj": "the latent that keys and values are projected from",
    "mla_q": "the latent of queries, normed",
    "mla_kv": "the latent of keys and values, normed",
    "context": "the values weighted by attention",
    "attention_out": "the context as the output projection takes it",
    "out_proj": "attention's output",
    "mlpwi": "hidden of an MLP without a gate, or with it in the same projection",
    "mlpwi_0": "hidden of an MLP before its nonlinearity",
    "mlpwi_1": "the gate, which is multiplied with that",
    "mlpwo": "the MLP's output",
    "moe_mlpwi_0": "the same of experts",
    "moe_mlpwi_1": "the same of experts",
    "moe_mlpwo": "the same of experts",
    "logits": "scores of the vocabulary's classes",
}
"""Every name, and what it stands for."""

FINISHES = frozenset({"add", "mul", "convert_element_type", "reshape", "transpose", "reduce_precision"})
"""What may stand between a product and its tensor: a bias, a cast."""

PRODUCTS = frozenset({"dot_general", "ragged_dot_general"})
CONVOLUTION = "conv_general_dilated"
LENGTHS = frozenset({"length", "kv_length"})

_NONLINEAR = """
    abs clamp cos erf erfc exp exp2 expm1 integer_pow log log1p logistic max min pow rsqrt sin sqrt square
    tanh
"""
NONLINEAR = frozenset(_NONLINEAR.split())


def name_tensors(jaxpr: Jaxpr, roles: Roles, stacks: Sequence[Stack] | None = None) -> dict[Place, str]:
    """The names of the tensors of a program before autodiff, at any depth, in program order.

    A projection that is cast to a narrower type, behind its bias, has its name there. `decoder_layer_input`
    of a scanned stack is no equation's result but what the body carries: its equation number is -1, and the
    result's is that of the body's input. `roles` are those of `jaxpr`, and `stacks` its layers, if they were
    found already.
    """
    if roles.axes.jaxpr is not jaxpr:
        raise ValueError("the roles are of another program")
    names = _Names(roles)
    names.layer_inputs(find_stacks(jaxpr, roles)[0] if stacks is None else stacks)
    return names.places()


@dataclasses.dataclass(frozen=True)
class NamedProduct:
    """A product of a program before autodiff: equation `index` of the body at `path`.

    name: of its result, a row of `NAMES` or of `MORE_PRODUCTS`; "" for another one. weight: which operand is
    one; None: none is. inputs: the numbers of the program's inputs that the weight is made of.
    """

    path: Path
    index: int
    name: str
    weight: int | None
    inputs: tuple[int, ...] = ()


MORE_PRODUCTS = {
    "scores": "scores of attention",
    "router": "scores of experts",
    "conv": "a convolution",
}
"""What products may be besides."""


def name_products(jaxpr: Jaxpr, roles: Roles) -> list[NamedProduct]:
    """Every product of a program before autodiff (`PRODUCTS`) and every convolution, at any depth, in program
    order; one body that is called from several places is listed for each. `roles` are those of `jaxpr`.
    """
    if roles.axes.jaxpr is not jaxpr:
        raise ValueError("the roles are of another program")
    return list(_Names(roles).each_product())


def describe_tensors(fn: Callable[..., Any], args: Sequence[Any]) -> list[dict[str, Any]]:
    """The named tensors of a model as plain data, in the order of `NAMES`: {"name", "count", "dtype", "dims",
    "what"}, `dims` the roles of each dimension. The model is what `fn` differentiates, or `fn` itself.

    Tensors of one name and one type are one entry. A stack that is scanned counts once.
    """
    models: list[Jaxpr] = []

    def keep(jaxpr: Jaxpr, _: Sequence[Any]) -> Jaxpr:
        models.append(jaxpr)
        return jaxpr

    with boundary(keep, object()):
        whole = jax.make_jaxpr(lambda *xs: fn(*xs))(*args)
    jaxpr = models[0] if models else whole
    roles = find_roles(find_axes(jaxpr))
    count: Counter[tuple[str, str, tuple[tuple[str, ...], ...]]] = Counter()
    for (path, index, result), name in name_tensors(jaxpr, roles).items():
        scope = roles.axes.scope(path)
        var = scope.jaxpr.invars[result] if index < 0 else scope.jaxpr.eqns[index].outvars[result]
        aval: Any = var.aval
        count[name, str(aval.dtype), roles.of(scope, var)] += 1
    order = {name: i for i, name in enumerate(NAMES)}
    return [
        {"name": name, "count": n, "dtype": dtype, "dims": [list(dim) for dim in dims], "what": NAMES[name]}
        for (name, dtype, dims), n in sorted(count.items(), key=lambda entry: order[entry[0][0]])
    ]


def tensor_rows(described: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """The same as the rows of a table, its heading first."""
    rows: list[tuple[str, ...]] = [("tensor", "count", "dimensions", "what it is")]
    for each in described:
        dims = " x ".join("·".join(dim) or "1" for dim in each["dims"])
        rows.append((each["name"], str(each["count"]), f"{each['dtype']} {dims}", each["what"]))
    return rows


@dataclasses.dataclass(frozen=True, eq=False)
class _Projection:
    """A product of an activation and a weight: what it contracts, and what it takes of the weight."""

    op: Op
    activation: Value
    contract: frozenset[Factor]
    roles: frozenset[str]  # of what is contracted
    free: frozenset[str]  # the roles of the weight's other dimensions
    experts: bool


class _Names:
    def __init__(self, roles: Roles) -> None:
        self.roles = roles
        self.flow = Flow(roles)
        self.named: dict[Op, str] = {}
        self.more: dict[Value, str] = {}  # what is no product
        self.inputs: dict[Place, str] = {}  # what is no result of an equation
        dots = {(id(dot.scope), *map(id, dot.operands)): dot for dot in Evidence(roles.axes).dots}
        self.products: dict[Op, Dot] = {}  # of two activations
        self.projections: dict[Op, _Projection] = {}
        for op in self.flow.ops:
            if op.name in PRODUCTS and op.eqn is not None:
                dot = dots[id(op.scope), *map(id, op.eqn.invars[:2])]
                weight = _weight(op)
                if all(v.data for v in op.ins[:2]):
                    self.products[op] = dot
                elif weight is not None:
                    self.projections[op] = self._projection(op, dot, weight)
        self.stops = self.products.keys() | self.projections.keys()
        self.scores: set[Op] = set()
        self._attention()
        self._mlp()
        for op, p in self.projections.items():
            if op not in self.named and "vocab" in p.free and p.roles & {"embed", "channels"}:
                self.named[op] = "logits"

    def _projection(self, op: Op, dot: Dot, weight: int) -> _Projection:
        free = dot.sides[weight] - dot.contract
        return _Projection(
            op,
            op.ins[1 - weight],
            dot.contract,
            self._told(dot.contract),
            self._told(free),
            "experts" in self._told(dot.batch | dot.group),
        )

    def _told(self, factors: Iterable[Factor]) -> frozenset[str]:
        return frozenset(self.roles.name(f) for f in factors)

    def places(self) -> dict[Place, str]:
        named = [(_kept(op.outs[0]), name) for op, name in self.named.items()]
        found = {_place(value): name for value, name in named}
        for value, name in self.more.items():
            found.setdefault(_place(value), name)
        placed = {place: name for place, name in found.items() if place is not None}
        return dict(sorted((self.inputs | placed).items()))

    def each_product(self) -> Iterator[NamedProduct]:
        """As `name_products`."""
        inputs = {id(value): i for i, value in enumerate(self.flow.inside[()])}
        for op in self.flow.ops:
            if op.name == CONVOLUTION:
                weight = _weight(op)
                made_of = () if weight is None else tuple(_inputs(op.ins[weight], inputs))
                yield NamedProduct(op.path, op.index, "conv", weight, made_of)
            if op.name not in PRODUCTS:
                continue
            name = self.named.get(op, "scores" if op in self.scores else "")
            p = self.projections.get(op)
            if p is None:
                yield NamedProduct(op.path, op.index, name, None)
                continue
            if not name and "experts" in p.free:
                name = "router"
            weight = 1 if op.ins[0] is p.activation else 0
            yield NamedProduct(op.path, op.index, name, weight, tuple(_inputs(op.ins[weight], inputs)))

    # ------------------------------------------------------------ attention

    def _attention(self) -> None:
        sides: dict[Op, set[str]] = {}

        def claim(value: Value, what: str) -> None:
            for op in self.flow.behind(value, self.stops):
                if op in self.projections:
                    sides.setdefault(op, set()).add(what)

        contexts: set[Op] = set()
        for context in self.products:
            for side in (0, 1):
                for scores, keys in self._scores(context, side):
                    contexts.add(context)
                    self.scores.add(scores)
                    other = context.ins[1 - side]
                    linear = bool(self._told(self.products[scores].contract) & LENGTHS)
                    claim(scores.ins[keys], "key")
                    claim(scores.ins[1 - keys], "value" if linear else "query")
                    claim(other, "query" if linear else "value")
        for op, p in self.projections.items():
            behind = self.flow.behind(p.activation, self.stops)
            met = [context for context in behind if context in contexts]
            if met and not self._is_stream(p, met):
                self.named[op] = "out_proj"
                self.more.setdefault(p.activation, "attention_out")
        self.named |= dict.fromkeys(contexts, "context")
        for op, what in sides.items():
            self.named.setdefault(op, _of_heads(what))
            self._latent(self.projections[op], what)

    def _scores(self, context: Op, side: int) -> list[tuple[Op, int]]:
        """The products whose dimensions an operand of `context` is contracted along, each with the operand
        that made them: keys.
        """
        assert context.eqn is not None
        numbers = context.eqn.params.get("dimension_numbers")
        stream = "embed" in self._told(self.products[context].sides[side])
        if stream or numbers is None:  # ragged: of experts
            return []
        found: dict[Op, int] = {}
        todo = [(context.ins[side], d) for d in numbers[0][side]]
        seen = set(todo)
        while todo:
            value, dimension = todo.pop()
            op = value.op
            if op is None or not value.data:
                continue
            if op in self.stops:
                made = _operand_of(op, dimension)
                if op in self.products and made is not None and self.products[op].contract:
                    found[op] = made
                continue
            new = [step for step in dimensions_behind(op, dimension) if step not in seen]
            seen.update(new)
            todo += new
        return list(found.items())

    def _is_stream(self, p: _Projection, contexts: list[Op]) -> bool:
        """Whether the projection takes the residual stream, to which somebody added the bare context."""
        made = frozenset(f for op in contexts for f in self.products[op].result)
        return "embed" in p.roles and not p.contract & made

    def _latent(self, p: _Projection, what: Collection[str]) -> None:
        """The latent that heads are projected from, where it is not the residual stream itself."""
        if "embed" in p.roles:
            return
        of = "q" if set(what) == {"query"} else "kv"
        for op in self.flow.behind(p.activation, self.stops):
            latent = self.projections.get(op)
            if latent is not None and "embed" in latent.roles:
                self.named[op] = "query_wa_proj" if of == "q" else "kv_wa_proj"
                if _kept(op.outs[0]) is not p.activation:
                    self.more.setdefault(p.activation, f"mla_{of}")

    # ------------------------------------------------------------ MLPs

    def _mlp(self) -> None:
        for op, p in self.projections.items():
            if op in self.named or "embed" in p.roles:
                continue
            behind = self.flow.behind(p.activation, self.stops)
            ins = [self.projections[b] for b in behind if b in self.projections and b not in self.named]
            ins = [q for q in ins if self._makes(q, p)]
            if not ins:
                continue
            prefix = "moe_" if p.experts or any(q.experts for q in ins) else ""
            self.named[op] = f"{prefix}mlpwo"
            depth = self._depth([q.op for q in ins], p.activation)
            ranked = sorted(ins, key=lambda q: (-depth[q.op], q.op.number))
            for i, q in enumerate(ranked):
                single = len(ranked) == 1 and not prefix
                self.named[q.op] = f"{prefix}mlpwi" if single else f"{prefix}mlpwi_{min(i, 1)}"

    def _makes(self, first: _Projection, second: _Projection) -> bool:
        """Whether one makes the hidden axis that the other contracts, or an axis of which that is a part."""
        made = self._whole(first.op)
        return bool(made & second.contract)

    def _whole(self, op: Op) -> frozenset[Factor]:
        assert op.eqn is not None
        found: set[Factor] = set()
        todo = [f for dim in op.scope[op.eqn.outvars[0]] for f in dim]
        while todo:
            f = todo.pop()
            if f not in found:
                found.add(f)
                todo += [g for _, dim in f.parts for g in dim]
        return frozenset(found)

    def _depth(self, ops: list[Op], value: Value) -> Counter[Op]:
        """How many nonlinear operations are on the ways from each operation to a value."""
        region = self.flow.region(value, self.stops)
        count: Counter[Op] = Counter()
        for op in ops:
            seen: set[Op] = set()
            todo = list(op.outs[0].users)
            while todo:
                user = todo.pop()
                if user in region and user not in seen:
                    seen.add(user)
                    count[op] += user.name in NONLINEAR
                    todo += [u for v in user.outs for u in v.users]
        return count

    # ------------------------------------------------------------ layers

    def layer_inputs(self, stacks: Sequence[Stack]) -> None:
        """What layers carry of the residual stream: the innermost scans', and that of unrolled ones."""
        outer: set[Path] = set()
        for scope in reversed(self.roles.axes.scopes):
            eqn, path = scope.eqn, scope.path
            if eqn is None or eqn.primitive.name != "scan" or path in outer:
                continue
            if not any(op.path[: len(path)] == path for op in self.named):
                continue
            for i in carries(eqn, 0).values():
                if is_stream(self.roles, scope, scope.jaxpr.invars[i]):
                    self.inputs[path, -1, i] = "decoder_layer_input"
                    outer.update(path[:k] for k in range(len(path)))
        for stack in stacks:
            scope = self.roles.axes.scope(stack.path)
            carried = {v for block in stack.blocks for v in block.carried if is_stream(self.roles, scope, v)}
            for i, eqn in enumerate(scope.jaxpr.eqns):
                for r, v in enumerate(eqn.outvars):
                    if v in carried:
                        self.inputs.setdefault((stack.path, i, r), "decoder_layer_input")


def _weight(op: Op) -> int | None:
    """Which operand of a product is a weight, where the other is of data."""
    left, right = op.ins[:2]
    if left.data == right.data or not (right if left.data else left).weight:
        return None
    return 1 if left.data else 0


def _inputs(value: Value, numbers: Mapping[int, int]) -> list[int]:
    """The inputs of the program that a value is made of."""
    found: set[int] = set()
    seen: set[int] = set()
    todo = [value]
    while todo:
        v = todo.pop()
        if id(v) in seen:
            continue
        seen.add(id(v))
        if id(v) in numbers:
            found.add(numbers[id(v)])
        if v.op is not None:
            todo += v.op.sources
    return sorted(found)


def is_stream(roles: Roles, scope: Scope, atom: Atom) -> bool:
    """Whether a value is the residual stream, or one of several."""
    if isinstance(atom, Literal) or not roles.is_activation(scope, atom):
        return False
    return any("embed" in dim for dim in roles.of(scope, atom))


def _place(value: Value) -> Place | None:
    op = value.op
    return None if op is None or op.eqn is None else (op.path, op.index, value.result)


def _of_heads(what: Collection[str]) -> str:
    """The name of a projection that makes these: query, key, value."""
    if len(what) == 1:
        return f"{next(iter(what))}_proj"
    return "kv_proj" if "query" not in what else "qkv_proj"


def _operand_of(op: Op, dimension: int) -> int | None:
    """Which operand of a dot has a dimension of its result to itself."""
    assert op.eqn is not None
    numbers = op.eqn.params.get("dimension_numbers")
    if numbers is None:
        return None
    (contracted, _), (batch, _) = numbers
    left = len(op.ins[0].shape) - len(contracted)
    if dimension < len(batch):
        return None
    return 0 if dimension < left else 1


def _kept(value: Value) -> Value:
    """Where a product is worth keeping: behind its bias and its cast to fewer bytes, if only that is used."""
    best = here = value
    while len(here.users) == 1:
        op = here.users[0]
        if op.name not in FINISHES or op.eqn is None or sum(v.data for v in op.ins) != 1:
            break
        here = op.outs[0]
        if _width(here) < _width(best):
            best = here
    return best


def _width(value: Value) -> int:
    assert value.op is not None and value.op.eqn is not None
    aval: Any = value.op.eqn.outvars[value.result].aval
    return int(np.dtype(aval.dtype).itemsize)
