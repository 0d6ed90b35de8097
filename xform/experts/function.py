"""The expert function: what is done with the rows of experts, for any number of rows, of experts, of
features, and its derivative.

`Middle` is the user's program at the user's sizes. Which of its dimensions are of experts, and which are
features that it sums over, is told from its axes; that each device may have some of them is proven by the
rules of `batch`, which also make the program for so many.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import GatherScatterMode

from xform.axes import Factor, find_axes
from xform.batch.states import GROUPS, SAME, SUM, Mixes, State, rows
from xform.derivative import derivative
from xform.experts.operation import CHOICE, COUNTS, GIVEN, IDS, LETTERS, TOKEN, Middle
from xform.experts.sizes import Sized, local, resized, with_rows
from xform.higher_order import bodies, equations
from xform.raising.flat import dtype_of
from xform.trace import Jaxpr, Literal, Value, Var, eval_jaxpr, inline, shape_of, without_dead

LOOKED = "looked"
"""What the function takes besides what a middle does: for each row what an array has for its expert."""

ROWS = frozenset((TOKEN, CHOICE, IDS, LOOKED))

EXPERT = "x"
"""The letter of experts."""

PRODUCTS = frozenset(("ragged_dot_general", "dot_general"))

RANGES = frozenset(("abs", "stop_gradient", "name", "convert_element_type"))
"""What reads rows for the largest of them."""

Run = Callable[..., Sequence[Value]]


@dataclasses.dataclass(frozen=True, eq=False)
class Function:
    """jaxpr: of a middle, but that what is looked up by the number of a row's expert it takes, the arrays by
    `lookups`: how, by the number of the input. sources: of what a `Sorted` of the middle takes after the ids,
    which is each input's. natural: of the middle. takes: what each input is. size, experts: for how many rows
    and experts it was written.
    """

    jaxpr: Jaxpr
    takes: tuple[str, ...]
    size: int
    experts: int
    lookups: Mapping[int, Mapping[str, Any]]
    sources: tuple[int, ...]
    natural: bool
    _made: dict[Any, Run] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, middle: Middle) -> Function:
        numbers = [n for n, t in enumerate(middle.takes) if t not in (IDS, COUNTS)]
        place = {n: k for k, n in enumerate(numbers)}
        jaxpr, found = middle.jaxpr, _lookups(middle)
        gone = set(found)
        eqns = [eqn for n, eqn in enumerate(jaxpr.eqns) if n not in gone]
        invars = [*jaxpr.invars, *(jaxpr.eqns[n].outvars[0] for n in found)]
        takes = [*middle.takes, *(LOOKED for _ in found)]
        origin = [place.get(n, -1) for n in range(len(jaxpr.invars))] + [place[k] for k in found.values()]
        how: list[Mapping[str, Any]] = [{}] * len(jaxpr.invars) + [jaxpr.eqns[n].params for n in found]
        info = jaxpr.debug_info.with_unknown_names()
        whole = without_dead(jaxpr.replace(eqns=eqns, invars=invars, debug_info=info))
        used = {v for eqn in whole.eqns for v in eqn.invars if isinstance(v, Var)} | set(jaxpr.outvars)
        kept = [n for n, v in enumerate(invars) if v in used]
        made = whole.replace(invars=[invars[n] for n in kept])
        modes = {k: {m: how[n][m] for m in ("mode", "fill_value")} for k, n in enumerate(kept) if how[n]}
        return cls(
            made,
            tuple(takes[n] for n in kept),
            middle.size,
            middle.experts,
            modes,
            tuple(origin[n] for n in kept),
            middle.natural,
        )

    # ------------------------------------------------------------ dimensions

    @functools.cached_property
    def taken(self) -> tuple[int, ...]:
        """The inputs that are no numbers of experts, nor made of them."""
        return tuple(n for n, t in enumerate(self.takes) if t not in (IDS, COUNTS))

    @functools.cached_property
    def floats(self) -> tuple[int, ...]:
        """Those of them, by their number there, that have a gradient."""
        return tuple(k for k, n in enumerate(self.taken) if _is_float(self.jaxpr.invars[n]))

    @functools.cached_property
    def _dims(self) -> list[tuple[Factor | None, ...]]:
        """Of each input the factor that each dimension is; none where it is several."""
        axes = find_axes(self.jaxpr).root
        return [tuple(dim[0] if len(dim) == 1 else None for dim in axes[v]) for v in self.jaxpr.invars]

    def _places(self, factor: Factor | None) -> dict[int, int]:
        return {
            n: dims.index(factor)
            for n, dims in enumerate(self._dims)
            if factor is not None and dims.count(factor) == 1
        }

    @functools.cached_property
    def of_experts(self) -> dict[int, int]:
        """The inputs that have a dimension of experts: counts, and weights."""
        counts = self.takes.index(COUNTS)
        found = self._places(self._dims[counts][0])
        return {n: d for n, d in found.items() if self.takes[n] in (COUNTS, GIVEN)}

    @functools.cached_property
    def of_features(self) -> list[dict[int, int]]:
        """For each feature that is summed over, the inputs that have it."""
        axes = find_axes(self.jaxpr).root
        outside = {f for v in self.jaxpr.outvars if isinstance(v, Var) for dim in axes[v] for f in dim}
        for dims, kind in zip(self._dims, self.takes, strict=True):
            if kind in (TOKEN, CHOICE, IDS, COUNTS):
                outside.update(f for f in dims if f is not None)
        candidates = dict.fromkeys(f for dims in self._dims for f in dims if f is not None)
        found = []
        for factor in candidates:
            at = self._places(factor)
            if factor in outside or not any(self.takes[n] == GIVEN for n in at):
                continue
            try:
                made = local(
                    self.jaxpr, with_rows(len(self.takes), at), Sized(factor.size, 1, have=factor.size)
                )
            except Mixes:
                continue
            if all(s == SUM for s in made.outs):
                found.append(at)
        return found

    @functools.cached_property
    def _letters(self) -> tuple[tuple[str, ...], str, str]:
        free: Iterator[str] = (c for c in LETTERS if c != EXPERT)
        known = {(n, d): EXPERT for n, d in self.of_experts.items()}
        features = ""
        for at in self.of_features:
            features += (letter := next(free))
            known |= {(n, d): letter for n, d in at.items()}
        lead = {TOKEN: "m", CHOICE: "mj", LOOKED: EXPERT}
        letters = []
        for n, (v, kind) in enumerate(zip(self.jaxpr.invars, self.takes, strict=True)):
            own = range(kind in ROWS, len(shape_of(v)))
            letters.append(lead.get(kind, "") + "".join(known.get((n, d)) or next(free) for d in own))
        (out,) = self.jaxpr.outvars
        return tuple(letters), "".join(next(free) for _ in shape_of(out)[1:]), features

    @property
    def letters(self) -> tuple[str, ...]:
        """Of the dimensions of each input, as an operation takes it."""
        return self._letters[0]

    @property
    def out(self) -> str:
        """Of the result's, after tokens and choices."""
        return self._letters[1]

    @property
    def features(self) -> str:
        """Of those that are summed over."""
        return self._letters[2]

    @functools.cached_property
    def codes(self) -> str:
        """The dtype of eight bits in which rows of tokens are multiplied; "" where some are not."""
        rows = {v for v, t in zip(self.jaxpr.invars, self.takes, strict=True) if t == TOKEN and _is_float(v)}
        found: set[str] = set()
        for eqn in self.jaxpr.eqns:
            if not rows & {v for v in eqn.invars if isinstance(v, Var)} or eqn.primitive.name in RANGES:
                continue
            products = [e for body in bodies(eqn) for e in equations(body) if e.primitive.name in PRODUCTS]
            found |= {str(dtype_of(e.invars[0])) for e in products} or {""}
        (dtype,) = found if len(found) == 1 else ("",)
        return dtype if dtype and jnp.dtype(dtype).itemsize == 1 else ""

    # ------------------------------------------------------------ at other sizes

    def refused(self, ways: int) -> str:
        """Why it cannot be had for the experts of one of so many devices; "" where it can."""
        if not self.natural and {IDS, LOOKED} & set(self.takes):
            return "the number of an expert may be negative, and what is looked up by it another's"
        shapes = []
        for n, v in enumerate(self.jaxpr.invars):
            shape = list(shape_of(v))
            if n in self.of_experts:
                shape[self.of_experts[n]] //= ways
            shapes.append(tuple(shape))
        try:
            self._made.setdefault(tuple(shapes), self._sized(shapes))
        except Mixes as why:
            return str(why)
        return ""

    def run(self, args: Sequence[Value]) -> Value:
        """The result for these inputs, rows, weights and counts of any size. Raises Mixes, with the line,
        where the function cannot be had for these sizes.
        """
        key = tuple(x.shape for x in args)
        if key not in self._made:
            self._made[key] = self._sized(key)
        (out,) = self._made[key](*args)
        return out

    def _sized(self, shapes: Sequence[tuple[int, ...]]) -> Run:
        count = next(s[0] for s, t in zip(shapes, self.takes, strict=True) if t in ROWS)
        states: list[State] = [rows(0) if t in ROWS else GROUPS if t == COUNTS else SAME for t in self.takes]
        jaxpr, _ = resized(self.jaxpr, states, self.size, count)
        for at in self.of_features:
            n, d = next(iter(at.items()))
            whole, have = shape_of(self.jaxpr.invars[n])[d], shapes[n][d]
            if have != whole:
                jaxpr, _ = resized(jaxpr, with_rows(len(shapes), at), whole, have)
        chosen = [n for n in self.taken if _is_float(self.jaxpr.invars[n])]
        made = derivative(jaxpr, len(shapes), chosen, range(len(shapes)))
        forward, backward = made.forward, made.backward
        experts = shapes[self.takes.index(COUNTS)][0]
        if experts != self.experts:
            given = with_rows(len(shapes), self.of_experts)
            forward, outs = resized(forward, given, self.experts, experts, groups=True)
            kept, cotangents = outs[1:], [SAME] * (len(backward.invars) - len(made.kept) - len(shapes))
            backward, found = resized(
                backward, [*kept, *given, *cotangents], self.experts, experts, groups=True
            )
            for n, state in zip(chosen, found, strict=True):
                if n in self.of_experts and state != rows(self.of_experts[n]):
                    raise Mixes("the gradient of an expert's weights is made of others' too")
        return _differentiated(forward, backward, chosen)


def _differentiated(forward: Jaxpr, backward: Jaxpr, chosen: Sequence[int]) -> Run:
    @jax.custom_vjp
    def function(*args: Value) -> list[Value]:
        return inline(forward, *args)[:1]

    def first(*args: Value) -> tuple[list[Value], Any]:
        out, *kept = inline(forward, *args)
        return [out], (kept, args)

    def then(saved: Any, cotangents: Sequence[Value]) -> tuple[Any, ...]:
        kept, args = saved
        found = dict(zip(chosen, inline(backward, *kept, *args, *cotangents), strict=True))
        return tuple(found.get(n) for n in range(len(args)))

    function.defvjp(first, then)
    return function


def _is_float(v: Any) -> bool:
    return bool(jnp.issubdtype(v.aval.dtype, jnp.inexact))


# ---------------------------------------------------------------- lookups by expert


def _lookups(middle: Middle) -> dict[int, int]:
    """The equations that look up, for each row, what an array has for its expert, and which input that is."""
    jaxpr, found = middle.jaxpr, dict[int, int]()
    ids = [v for v, t in zip(jaxpr.invars, middle.takes, strict=True) if t == IDS]
    inputs: dict[Any, int] = {v: n for n, v in enumerate(jaxpr.invars)}
    for number, eqn in enumerate(jaxpr.eqns):
        source = inputs.get(eqn.invars[0]) if eqn.primitive.name == "gather" else None
        if source is None or middle.takes[source] != GIVEN or not ids or not _of_whole_rows(eqn, middle):
            continue
        if _is_by(jaxpr, eqn.invars[1], ids[0], middle) and (middle.bounded or _fills(eqn)):
            found[number] = source
    return found


def _of_whole_rows(eqn: Any, middle: Middle) -> bool:
    d, x = eqn.params["dimension_numbers"], shape_of(eqn.invars[0])
    return (
        x[0] == middle.experts
        and tuple(d.collapsed_slice_dims) == tuple(d.start_index_map) == (0,)
        and not d.operand_batching_dims
        and tuple(d.offset_dims) == tuple(range(1, len(x)))
        and tuple(eqn.params["slice_sizes"]) == (1, *x[1:])
        and shape_of(eqn.invars[1]) == (middle.size, 1)
    )


def _fills(eqn: Any) -> bool:
    """Whether the number of an expert that there is not has a value of its own."""
    return bool(eqn.params["mode"] == GatherScatterMode.FILL_OR_DROP)


def _is_by(jaxpr: Jaxpr, indices: Any, ids: Var, middle: Middle) -> bool:
    """Whether indices are the numbers of rows' experts, by what they come out as."""
    if isinstance(indices, Literal):
        return False
    part = without_dead(jaxpr.replace(outvars=[indices], debug_info=jaxpr.debug_info.with_unknown_names()))
    used = {v for eqn in part.eqns for v in eqn.invars if isinstance(v, Var)} | {indices}
    if any(v in used for v in part.invars if v is not ids):
        return False
    end = middle.experts + (0 if middle.bounded else 3)
    dtypes: list[Any] = [v.aval for v in part.invars]
    drawn = np.random.default_rng(0).integers(0, end, shape_of(ids))
    given = [
        (drawn if v is ids else np.zeros(aval.shape)).astype(aval.dtype)
        for v, aval in zip(part.invars, dtypes, strict=True)
    ]
    with jax.ensure_compile_time_eval(), jax.default_device(jax.devices("cpu")[0]):
        (made,) = eval_jaxpr(part, *given)
    return bool(np.array_equal(np.asarray(made).reshape(-1), drawn))
