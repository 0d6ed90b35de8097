"""Rewrites a program to the view of one shard: every value has a layout, every operation runs on the parts.

    y = dot_general x w      ->     w' = all_gather w                  [e/fsdp, f] -> [e, f]
                                    y  = dot_general x w'              on this device's rows
    dw = dot_general x dy    ->     dw = psum_scatter (dot_general x dy)

The walk goes over the program once, in order. An operation is data (`forms`): which dimensions are the same,
which are summed away. For each, the layouts that its operands have and the one that is wanted of its result
(a sharding constraint that follows it) are candidates; the one that moves the fewest bytes is taken, and the
operands are brought there (`moves`). What was gathered is kept for the next use in the same body. A value
that can be made anywhere for nothing, a mask, a broadcast, zeros, is made where it is used, as it is wanted
there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xform.higher_order import enter
from xform.ops import NAME as OPERATION
from xform.ops.operation import body, widened
from xform.report import Report, amount
from xform.rewrite import Site, rewrite
from xform.spmd.choice import Assignment, Case, Choice, Operand
from xform.spmd.codes import codes_in, made_of
from xform.spmd.extremes import of_all, with_derivative
from xform.spmd.forms import Form, form_of
from xform.spmd.holding import Holding
from xform.spmd.layout import Grid, Laid
from xform.spmd.values import PLAIN, WHOLE, Options, Scope, Val
from xform.spmd.wishes import Wish, becomes_float, scales, terms
from xform.spmd.wishes import waiting as waiting_of
from xform.spmd.wishes import wishes as wishes_of
from xform.trace import (
    DropVar,
    Jaxpr,
    JaxprEqn,
    Literal,
    Value,
    Var,
    at_source,
    bind,
    in_trace,
    name_stack,
    source_line,
    typeof,
)

MOVES = frozenset(
    {
        "convert_element_type",
        "copy",
        "layout_constraint",
        "reduce_precision",
        "reshape",
        "sharding_constraint",
        "slice",
        "squeeze",
        "transpose",
    }
)
"""Operations whose result is a weight still, when their operand is one."""

SAME = {"convert_element_type": ("new_dtype",), "transpose": ("permutation",)}
"""Those that, done twice to a weight, are done once; with the parameters that say what."""

LINEAR = frozenset(
    {"copy", "imag", "neg", "real", "reduce_sum", "reshape", "rev", "slice", "squeeze", "stack", "transpose"}
)
"""Operations of one value that may run on the terms of a sum; so may a product with a scale."""

SUMS = frozenset({"add", "add_any", "sub"})

DotAlgorithms = (jax.lax.DotAlgorithm, jax.lax.DotAlgorithmPreset)

FREE = frozenset({"broadcast_in_dim", "iota", "random_bits"})
"""Operations whose results are made as they are wanted, whatever they are made of."""


class Walk(Holding):
    """One walk over one program.

    grid: the axes of the manual region. parts: of the plan's axes, those that are in it. report: told what is
    done on whole values. options: how. differentiated: nobody will differentiate the result; else rules for
    derivatives are kept. batch: the axes that rows of data lie over.
    """

    def __init__(
        self,
        grid: Grid,
        parts: Mapping[str, tuple[str, ...]],
        report: Report,
        handlers: Mapping[str, Callable[..., list[Val] | None]],
        options: Options = PLAIN,
        differentiated: bool = True,
        batch: Sequence[str] = (),
    ) -> None:
        super().__init__(grid, options)
        self.parts, self.report, self.handlers = parts, report, handlers
        self.differentiated, self.batch = differentiated, frozenset(batch)
        self.choice = Choice(grid, self.router, self.batch)
        self.spared = 0.0
        self.prefix = ""
        self.current_wishes: Sequence[Wish | None] = ()
        self.current_waits: Sequence[bool] = ()
        self._forms: dict[int, tuple[JaxprEqn, Form | None]] = {}
        self._weights: dict[Any, Val] = {}
        self._told: set[tuple[str, str]] = set()

    # ------------------------------------------------------------ programs

    def run(
        self,
        jaxpr: Jaxpr,
        inputs: Sequence[Val],
        asked: Sequence[Wish | None] = (),
        waits: Sequence[bool] = (),
    ) -> list[Val]:
        """The results of a program, here; asked: how each is wanted; waits: which are only added to terms."""
        env: dict[Var, Val] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, x in zip(jaxpr.constvars, jaxpr.consts, strict=True):
            env[var] = self.constant(x, var.aval)
        known = wishes_of(jaxpr, self.parts)
        for v, wish in zip(jaxpr.outvars, asked, strict=False):
            if wish is not None and isinstance(v, Var):
                known.setdefault(v, wish)
        added, waiting = terms(jaxpr), waiting_of(jaxpr, waits)
        known |= {v: known[v].without(self.batch) for v in waiting if v in known}

        def read(atom: Any) -> Val:
            if isinstance(atom, Literal):
                return self.constant(atom.val, atom.aval)
            return env[atom]

        for eqn in jaxpr.eqns:
            vals = [read(v) for v in eqn.invars]
            phase, self.phase = self.phase, int("transpose(" in name_stack(eqn) or self.phase)
            self.current_waits = [v in waiting for v in eqn.outvars]
            with at_source(eqn, self.prefix):
                if eqn.primitive.name == "sharding_constraint" and eqn.invars[0] in waiting:
                    outs = vals
                else:
                    outs = self.equation(eqn, vals, [known.get(v) for v in eqn.outvars], added | waiting)
            if self.phase and outs and (own := self.scope.forms.get(outs[0])) and outs[0].make is None:
                self.scope.later = next(iter(own.values()))[0]
            self.phase = phase
            for var, val in zip(eqn.outvars, outs, strict=True):
                if not isinstance(var, DropVar):
                    env[var] = val
        return [read(v) for v in jaxpr.outvars]

    def inlined(self, eqn: JaxprEqn, jaxpr: Jaxpr, vals: Sequence[Val]) -> list[Val]:
        """The results of a body in place of the call of it."""
        before = self.prefix
        self.prefix = "/".join(filter(None, (before, name_stack(eqn))))
        try:
            return self.run(jaxpr, vals, self.current_wishes, self.current_waits)
        finally:
            self.prefix = before

    def inside(self, kind: str, f: Callable[..., Any], turns: int = 1) -> Callable[..., Any]:
        """`f`, traced as a body of its own that runs so often."""

        def traced(*args: Any) -> Any:
            before = (self.scope, self.prefix, self.phase)
            self.scope, self.prefix = Scope(kind, before[0], turns), ""
            try:
                return f(*args)
            finally:
                self.scope, self.prefix, self.phase = before

        return traced

    def overlapped(self, eqn: JaxprEqn, nbytes: int, early: int, late: int) -> None:
        """Tells the report of a loop with collectives that run beside another turn."""
        self.report.did(
            "shard",
            f"{early} collectives of a loop run a turn early, {late} a turn late",
            f"{amount(nbytes)} more on a device",
            source_line(eqn),
        )

    # ------------------------------------------------------------ equations

    def equation(
        self,
        eqn: JaxprEqn,
        vals: list[Val],
        wishes: Sequence[Wish | None],
        added: frozenset[Var] = frozenset(),
    ) -> list[Val]:
        """The results of an equation, as `wishes` say; added: results that are summed further as they are."""
        if eqn.primitive.name in MOVES and vals[0].origin:
            here, self.scope = self.scope, self.outside(vals[0].scope, self.early(vals[0]))
            if self.scope is not here:  # a weight from before a loop is cast and turned before it
                try:
                    with in_trace(self.scope.trace):
                        return self.equation(eqn, vals, wishes, added)
                finally:
                    self.scope = here
        if eqn.primitive.name == "sharding_constraint" and eqn.invars[0] in added and vals[0].laid.partial:
            return vals
        if eqn.primitive.name in SAME and vals[0].origin:
            return [self._weight(eqn, vals[0])]
        handler = self.handlers.get(eqn.primitive.name)
        self.current_wishes = wishes
        outs = handler(self, eqn, vals) if handler is not None else None
        if outs is None:
            form = self.form(eqn)
            outs = self.undivided(eqn, vals) if form is None else self.lower(eqn, form, vals, wishes)
        return [
            val
            if wish is None or not val.shape or (var in added and val.laid.partial)
            else self.moved_to(val, self.granted(val, wish))
            for var, val, wish in zip(eqn.outvars, outs, wishes, strict=True)
        ]

    def _weight(self, eqn: JaxprEqn, val: Val) -> Val:
        """A weight cast or transposed: the same value for all who do the same, so that it is gathered
        once.
        """
        key = (val, eqn.primitive.name, *(eqn.params[name] for name in SAME[eqn.primitive.name]))
        made, scope = self._weights.get(key), self.scope
        while made is not None and scope is not made.scope:
            if scope.parent is None:
                made = None
            else:
                scope = scope.parent
        if made is None:
            form = self.form(eqn)
            assert form is not None
            (made,) = self.lower(eqn, form, [val])
            if eqn.primitive.name == "transpose":
                made.turned = (val, tuple(eqn.params["permutation"]))
            self._weights[key] = made
        return made

    def cast(self, val: Val, dtype: Any) -> Val:
        """A weight in another dtype: the same value for all who ask."""
        made = self._weights.get((val, "cast", dtype))
        if made is None:
            x = self.get(val, val.laid)
            made = self.held(x.astype(dtype), val.aval.update(dtype=dtype), val.laid, val.origin)
            self._weights[val, "cast", dtype] = made
        return made

    def form(self, eqn: JaxprEqn) -> Form | None:
        known = self._forms.get(id(eqn))
        if known is None:
            known = self._forms[id(eqn)] = (eqn, form_of(eqn))
        return known[1]

    def undivided(self, eqn: JaxprEqn, vals: Sequence[Val], why: str = "") -> list[Val]:
        """The operation on whole values, on every device."""
        if any(val.make is None and not val.laid.is_whole for val in vals):
            self.tell(eqn, why or "nothing is known of what it does to dimensions")
        with jax.named_scope(WHOLE):
            args = [self.whole(v) for v in vals]
        outs = bind(eqn, args, enter(eqn, lambda body, _: rewrite(body, _unconstrained)))
        return [self.constant(x, var.aval) for x, var in zip(outs, eqn.outvars, strict=True)]

    def tell(self, eqn: JaxprEqn, why: str) -> None:
        line = source_line(eqn)
        if (eqn.primitive.name, line) not in self._told:
            self._told.add((eqn.primitive.name, line))
            self.report.declined(
                "shard", f"{eqn.primitive.name} on the parts: it takes whole values", why, line
            )

    def lower(
        self, eqn: JaxprEqn, form: Form, vals: Sequence[Val], wishes: Sequence[Wish | None] = ()
    ) -> list[Val]:
        """The operation on the parts, in the layout that moves the fewest bytes."""
        name = eqn.primitive.name
        avals = [v.aval for v in eqn.outvars]
        wishes = wishes or [None] * len(avals)
        partial = self._carried(eqn, vals)
        if (codes := codes_in(eqn, vals)) is not None:
            # the codes' layout comes first, and is the one that what is made of them has
            laids = [(n, v.laid) for n, v in enumerate(vals) if v is codes]
            laids += [(n, v.laid) for n, v in enumerate(vals) if v is not codes and v.make is None]
            made = self._made(eqn, form, vals, 0, self.choice.combined(form, laids, []))
            made.origin, made.codes = codes.origin, codes.codes or codes.itemsize
            return [made]
        if name in FREE or self._is_free(vals, avals):
            chosen = self.choice.combined(form, [(n, v.laid.summed()) for n, v in enumerate(vals)], [])
            return [self._made(eqn, form, vals, number, chosen) for number in range(len(avals))]
        chosen = self.choice.best(self.case(eqn, form, vals, wishes, partial))
        if partial and name in SUMS and wishes[0] is not None:
            route = self.router.route(vals[0].laid, wishes[0].granted(vals[0].laid.summed()))
            self.spared += route.sent * vals[0].itemsize * self.scope.times
        return self.bound(eqn, form, vals, chosen, partial)

    def bound(
        self,
        eqn: JaxprEqn,
        form: Form,
        vals: Sequence[Val],
        chosen: Assignment,
        partial: tuple[str, ...] = (),
    ) -> list[Val]:
        """The operation on parts laid out by `chosen`."""
        args, shapes = [], []
        for val, factors in zip(vals, form.operands, strict=True):
            laid = self.choice.laid(factors, chosen)
            if partial and val.laid.partial:
                laid = Laid(laid.dims, partial)
            args.append(self.get(val, laid))
            shapes.append(self.grid.local(laid))
        outs = [self.choice.laid(factors, chosen) for factors in form.results]
        params = eqn.params
        if form.told is not None:
            params = form.told(params, [tuple(a for p in dim for a in p.axes) for dim in chosen])
        if form.local is not None:
            params = form.local(params, shapes, [self.grid.local(o) for o in outs])
        origin = vals[0].origin if eqn.primitive.name in MOVES else ""
        summed = [self.choice.summed(form, chosen, number) for number in range(len(outs))]
        added = any(v.gradient for v in vals if partial)
        gradient = [added or self.is_gradient(form, vals, number, axes) for number, axes in enumerate(summed)]
        if any(gradient):
            args, params = self._wide(eqn, args, params)
        results = self._results(eqn, form, chosen, args, params)
        made = []
        for number, (x, var, laid) in enumerate(zip(results, eqn.outvars, outs, strict=True)):
            terms = tuple(dict.fromkeys((*partial, *summed[number])))
            made.append(self.held(x, var.aval, Laid(laid.dims, terms), origin, made_of(eqn, vals)))
            made[-1].gradient = gradient[number]
            made[-1].terms = bool(partial) and any(v.terms for v in vals)
        return made

    def is_gradient(self, form: Form, vals: Sequence[Val], number: int, summed: Collection[str]) -> bool:
        """Whether a result adds up a weight's gradient: in the backward pass, over the batch, and no weight
        is summed over with it.
        """
        own = {f for factors in form.results[number] for f in factors}
        gone = {f for f, kind in enumerate(form.kinds) if kind == "sum" and f not in own}
        weights = (fs for v, fs in zip(vals, form.operands, strict=True) if v.origin)
        meets = any(f in gone for fs in weights for factors in fs for f in factors)
        return bool(self.phase) and not self.batch.isdisjoint(summed) and not meets

    def _wide(
        self, eqn: JaxprEqn, args: list[Value], params: dict[str, Any]
    ) -> tuple[list[Value], dict[str, Any]]:
        """The operands and parameters with which a gradient's terms come in the dtype they are summed in,
        where that is the wider: rounded after the sum, not before.
        """
        aval: Any = eqn.outvars[0].aval
        own, name = aval.dtype, eqn.primitive.name
        if jnp.issubdtype(own, jnp.integer):
            return args, params
        if self.options.sum_dtype is None or jnp.promote_types(own, self.options.sum_dtype) == own:
            return args, params
        if "preferred_element_type" in params and not isinstance(params["precision"], DotAlgorithms):
            return args, {**params, "preferred_element_type": jnp.dtype(self.options.sum_dtype)}
        if name == OPERATION:
            op = widened(params["op"], self.options.sum_dtype)
            return args, {**params, "op": op, "jaxpr": body(op, [typeof(x) for x in args])}
        if name == "convert_element_type":
            return args, {**params, "new_dtype": jnp.dtype(self.options.sum_dtype)}
        if name in ("mul", "reduce_sum") or name in SUMS:
            return [x.astype(self.options.sum_dtype) for x in args], params
        return args, params

    def _results(
        self, eqn: JaxprEqn, form: Form, chosen: Assignment, args: Sequence[Value], params: dict[str, Any]
    ) -> list[Value]:
        """The operation on the parts; of extremes, that of all devices."""
        for kind, reduced in (("max", jax.lax.pmax), ("min", jax.lax.pmin)):
            if axes := self.choice.over(form, chosen, kind):

                def extreme(x: Value, *, reduced: Any = reduced, axes: tuple[str, ...] = axes) -> Value:
                    return of_all(bind(eqn, [x], params)[0], axes, reduced)

                if self.differentiated or not jnp.issubdtype(args[0].dtype, jnp.floating):
                    return [extreme(args[0])]
                return [with_derivative(extreme, args[0], params["axes"], axes)]
        return bind(eqn, args, params)

    def _carried(self, eqn: JaxprEqn, vals: Sequence[Val]) -> tuple[str, ...]:
        """The axes over which the terms of a sum go through the operation as they are."""
        name, first = eqn.primitive.name, vals[0].laid.partial if vals else ()
        if not first or vals[0].make is not None:
            return ()
        if (name in LINEAR and len(vals) == 1) or (name == "dynamic_slice" and vals[0].terms):
            return first
        if name in SUMS and all(v.make is None and v.laid.partial == first for v in vals):
            return first
        if name == "convert_element_type":
            if any(self.current_waits):
                return first  # it is added to terms of that dtype
            before, after = vals[0].aval.dtype, eqn.params["new_dtype"]
            adding = vals[0].gradient and self.adding(self.scope)
            wider = adding and jnp.promote_types(before, after) == after
            return first if becomes_float(eqn) or wider else ()
        return first if scales(eqn) and not vals[1].laid.partial else ()

    def _is_free(self, vals: Sequence[Val], avals: Sequence[Any]) -> bool:
        """Whether an operation works on nothing but what is made as wanted, and scalars."""
        if not vals or len(avals) != 1:
            return False
        free = [v.make is not None or not v.shape for v in vals]
        return all(free) and any(v.make is not None for v in vals)

    def _made(self, eqn: JaxprEqn, form: Form, vals: Sequence[Val], number: int, chosen: Assignment) -> Val:
        """A result that is made in whatever layout it is asked for."""
        factors, aval = form.results[number], eqn.outvars[number].aval
        prefix = self.prefix

        def make(want: Laid) -> Value:
            assigned = self.choice.combined(form, [], [(number, want)])
            laid = self.choice.laid(factors, assigned)
            with at_source(eqn, prefix):
                val = self.bound(eqn, form, vals, assigned)[number]
                return self.router.emit(self.get(val, laid), laid, want)

        return Val(aval, self.choice.laid(factors, chosen), self.scope, make)

    def case(
        self,
        eqn: JaxprEqn,
        form: Form,
        vals: Sequence[Val],
        wishes: Sequence[Wish | None],
        partial: tuple[str, ...] = (),
    ) -> Case:
        """What the choice of a layout for an operation goes by."""
        operands = tuple(
            Operand(
                (v.laid,) if v.make is not None else tuple(dict.fromkeys((v.laid, *self.forms(v)))),
                v.codes or v.itemsize,
                v.make is not None and not v.codes,
                bool(v.origin),
            )
            for v in vals
        )
        outs = tuple(int(getattr(getattr(v.aval, "dtype", None), "itemsize", 4)) for v in eqn.outvars)
        numbers = range(len(form.results))
        adds = self.adding(self.scope) and any(self.is_gradient(form, vals, n, self.batch) for n in numbers)
        return Case(form, operands, outs, tuple(wishes), partial, self.batch if adds else frozenset())


def _unconstrained(site: Site) -> list[Value] | None:
    """Inside the manual region nothing is constrained to lie on its axes: what is whole is whole."""
    return [site.args[0]] if site.name == "sharding_constraint" else None
