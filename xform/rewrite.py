"""The engine: walks a program and replaces the equations that a rule claims by what the rule emits.

Match on the graph, build by tracing. At each equation a rule looks at a `Site` and answers None (not mine),
raises `Decline` (mine, but no), or returns values that it made by calling JAX. Equations that no rule claims
are carried over as they are, the same objects, so that a program in which nothing changes comes back itself
and costs a walk. Nobody but this module builds equations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from xform.errors import Decline, RewriteError
from xform.higher_order import RULES, bodies, enter, hoist
from xform.report import Report
from xform.trace import (
    Atom,
    Builder,
    DropVar,
    Jaxpr,
    JaxprEqn,
    Literal,
    Tracer,
    Value,
    Var,
    bind,
    body_effects,
    equation_type,
    fitted,
    name_stack,
    rename_effects,
    same_constant,
    source_line,
    typeof,
)

Path = tuple[tuple[int, int], ...]
"""Where a body stands: (equation index, body number) from the outermost jaxpr inward. Rules of a custom_jvp
have -1.
"""


class Site:
    """One equation as a rule sees it: what it is, the values it is applied to, where it stands.

    path: the body the equation stands in; index: its number there, both in the program as it was before the
    rewrite.
    """

    __slots__ = ("_builder", "_names", "_renamed", "eqn", "index", "jaxpr", "path")

    def __init__(
        self,
        eqn: JaxprEqn,
        index: int,
        path: Path,
        jaxpr: Jaxpr,
        renamed: Callable[[Sequence[Atom]], Sequence[Atom]],
        builder: Callable[[], Builder],
        names: str,
    ) -> None:
        self.eqn, self.index, self.path, self.jaxpr = eqn, index, path, jaxpr
        self._renamed, self._builder, self._names = renamed, builder, names

    @property
    def name(self) -> str:
        """The primitive's name."""
        return self.eqn.primitive.name

    @property
    def params(self) -> dict[str, Any]:
        return self.eqn.params

    @property
    def args(self) -> list[Value]:
        """The values the equation is applied to, to call JAX with."""
        return self.values(self.eqn.invars)

    def values(self, atoms: Sequence[Atom]) -> list[Value]:
        """The values of variables of this body that were made before the equation, and of literals."""
        builder = self._builder()
        return [builder.value(v) for v in self._renamed(atoms)]

    @property
    def avals(self) -> list[Any]:
        """The types of the operands."""
        return [v.aval for v in self.eqn.invars]

    @property
    def out_avals(self) -> list[Any]:
        return [v.aval for v in self.eqn.outvars]

    @property
    def where(self) -> str:
        """The whole name stack, from the outermost jaxpr inward, as `decoder/layer/mlp`."""
        own = name_stack(self.eqn)
        return f"{self._names}/{own}" if self._names and own else self._names or own

    @property
    def line(self) -> str:
        """The user's source line."""
        return source_line(self.eqn)

    def bind(self, *args: Value, **params: Any) -> list[Value]:
        """The equation's own primitive applied to `args` (default: its own), with `params` changed."""
        return bind(self.eqn, args or self.args, {**self.eqn.params, **params})


Rule = Callable[[Site], Sequence[Value] | None]


def rewrite(jaxpr: Jaxpr, rule: Rule, report: Report | None = None, name: str = "rewrite") -> Jaxpr:
    """Applies a rule at every equation, at every depth. Gives a jaxpr of the same type; itself if unchanged.

    Outer equations are offered before what is in their bodies; what a rule emits is not offered again. `name`
    is the pass, for the report and for errors. Raises RewriteError when a rule returns values of other types
    than it replaces.
    """
    return _Walk(rule, report, name).body(jaxpr, (), "")


class _Walk:
    def __init__(self, rule: Rule, report: Report | None, name: str) -> None:
        self.rule, self.report, self.name = rule, report, name
        self.shared: dict[int, tuple[Jaxpr, list[Jaxpr]]] = {}

    def body(self, jaxpr: Jaxpr, path: Path, names: str) -> Jaxpr:
        new = _Body(jaxpr)
        for index, eqn in enumerate(jaxpr.eqns):
            site = Site(eqn, index, path, jaxpr, new.renamed, new.builder, names)
            if not self.replaced(site, new):
                new.carry(eqn, self.inside(site))
        return self.once(jaxpr, new.finish(self.name))

    def once(self, old: Jaxpr, new: Jaxpr) -> Jaxpr:
        """The form `old` was given before, when `new` is no different: what was one function stays one."""
        if new is old:
            return old
        _, forms = self.shared.setdefault(id(old), (old, []))
        for form in forms:
            if alike(form, new):
                return form
        forms.append(new)
        return new

    def inside(self, site: Site) -> dict[str, Any]:
        if not bodies(site.eqn):
            return site.params
        return enter(site.eqn, lambda b, number: self.body(b, (*site.path, (site.index, number)), site.where))

    def replaced(self, site: Site, new: _Body) -> bool:
        declined: Decline | None = None

        def answer() -> Sequence[Value] | None:
            nonlocal declined
            try:
                outs = self.rule(site)
            except Decline as reason:
                declined = reason
                return None
            return None if outs is None else conform(site.eqn, outs, self.name)

        eqns, outs = new.emit(site.eqn, answer)
        if declined is not None and self.report is not None:
            self.report.declined(self.name, site.name, str(declined), site.line or site.where)
        if outs is None:
            return False
        new.put(eqns, site.eqn.outvars, outs)
        return True


def conform(eqn: JaxprEqn, outs: Sequence[Value], name: str) -> list[Value]:
    """Values for an equation's results, weak types and varying mesh axes made the same.

    Raises RewriteError, naming the pass and both types, when the types are others.
    """
    if len(outs) != len(eqn.outvars):
        raise RewriteError(
            f"{name} replaced {eqn.primitive.name} at {source_line(eqn)} by {len(outs)} values;"
            f" it has {len(eqn.outvars)} results"
        )
    result = []
    for var, out in zip(eqn.outvars, outs, strict=True):
        old, new = var.aval, typeof(out)
        if _shape_and_dtype(old) == _shape_and_dtype(new):
            out = fitted(out, old)
            new = typeof(out)
        if old.str_short() != new.str_short():
            raise RewriteError(
                f"{name} replaced {eqn.primitive.name} at {source_line(eqn)} by a value of type"
                f" {new.str_short()}; it was {old.str_short()}"
            )
        result.append(out)
    return result


def _shape_and_dtype(aval: Any) -> tuple[Any, Any]:
    return getattr(aval, "shape", None), getattr(aval, "dtype", None)


def alike(a: Jaxpr, b: Jaxpr) -> bool:
    """Whether two programs differ only in the names of their variables. Answers no where it cannot tell."""
    if a is b:
        return True
    inputs = list(zip(b.all_invars, a.all_invars, strict=False))
    if len(a.all_invars) != len(b.all_invars) or any(v.aval != w.aval for v, w in inputs):
        return False
    if len(a.eqns) != len(b.eqns) or len(a.consts) != len(b.consts):
        return False
    names: dict[Var, Var] = dict(inputs)

    def same(x: Atom, y: Atom) -> bool:
        if isinstance(x, Literal) and isinstance(y, Literal):
            return x.aval == y.aval and same_constant(x.val, y.val)
        return isinstance(x, Var) and isinstance(y, Var) and names.get(y, y) is x

    for x, y in zip(a.eqns, b.eqns, strict=True):
        if x.primitive is not y.primitive or len(x.invars) != len(y.invars) or x.ctx is not y.ctx:
            return False
        if x.source_info.name_stack != y.source_info.name_stack:
            return False
        if not all(map(same, x.invars, y.invars)):
            return False
        # The rule of a custom_jvp or custom_vjp that was carried over is the same, changed when asked for.
        carried = all(v is w for v, w in zip(x.outvars, y.outvars, strict=True))
        rule = RULES.get(x.primitive.name) if carried else None
        if not all(k == rule or _same_param(v, y.params[k]) for k, v in x.params.items()):
            return False
        names.update(zip(y.outvars, x.outvars, strict=True))
    return all(map(same_constant, a.consts, b.consts)) and all(map(same, a.outvars, b.outvars))


def _same_param(a: Any, b: Any) -> bool:
    return alike(a, b) if isinstance(a, Jaxpr) and isinstance(b, Jaxpr) else bool(a == b)


class _Body:
    """A jaxpr on its way to its new form: equations so far, and what each old variable is called now."""

    def __init__(self, jaxpr: Jaxpr) -> None:
        self.jaxpr = jaxpr
        self.eqns: list[JaxprEqn] = []
        self.env: dict[Var, Atom] = {}
        self.changed = False
        self._builder: Builder | None = None

    def builder(self) -> Builder:
        if self._builder is None:
            self._builder = Builder(self.jaxpr.debug_info)
        return self._builder

    def renamed(self, atoms: Sequence[Atom]) -> Sequence[Atom]:
        env = self.env
        if not env:
            return atoms
        return [v if isinstance(v, Literal) else env.get(v, v) for v in atoms]

    def emit(self, eqn: JaxprEqn, f: Callable[[], Any]) -> tuple[list[JaxprEqn], Any]:
        return self.builder().emit(eqn, f)

    def put(self, eqns: list[JaxprEqn], outvars: Sequence[Var], outs: Sequence[Value]) -> None:
        builder = self.builder()
        self.eqns += eqns
        for var, out in zip(outvars, outs, strict=True):
            if not isinstance(var, DropVar):
                self.env[var] = builder.atom(out)
        self.changed = True

    def carry(self, eqn: JaxprEqn, params: dict[str, Any]) -> None:
        invars = list(self.renamed(eqn.invars))
        if params is not eqn.params:
            params, consts = hoist(eqn, params)
            old = eqn
            eqn = eqn.replace(params=params, invars=[*map(self.builder().atom, consts), *eqn.invars])
            eqn = eqn.replace(effects=_effects_of(old, eqn))
            invars = eqn.invars[: len(consts)] + invars
            self.changed = True
        if self.env and any(a is not b for a, b in zip(invars, eqn.invars, strict=True)):
            effs = rename_effects(eqn.effects, lambda v: self._var(v))
            eqn = eqn.replace(invars=invars, effects=effs)
            self.changed = True
        self.eqns.append(eqn)

    def _var(self, var: Var) -> Var:
        atom = self.env.get(var, var)
        assert isinstance(atom, Var)
        return atom

    def finish(self, name: str) -> Jaxpr:
        if not self.changed:
            return self.jaxpr
        old = self.jaxpr
        consts = self._builder.constants() if self._builder is not None else {}
        used = {v for eqn in self.eqns for v in eqn.invars if isinstance(v, Var)}
        outvars = list(self.renamed(old.outvars))
        used |= {v for v in outvars if isinstance(v, Var)}
        extra = {v: c for v, c in consts.items() if v in used}
        if any(isinstance(c, Tracer) for c in extra.values()):
            raise RewriteError(
                f"{name} used a value that it made in one body in another: make it anew in each"
            )
        new = old.replace(
            constvars=[*old.constvars, *extra],
            invars=old.invars,
            outvars=outvars,
            eqns=self.eqns,
            consts=[*old.consts, *extra.values()],
            debug_info=old.debug_info,
        )
        return new.replace(effects=body_effects(new))


def _effects_of(old: JaxprEqn, new: JaxprEqn) -> Any:
    """The effects of an equation that has been given other bodies."""
    same = len(old.invars) == len(new.invars) and all(
        a.effects == b.effects for a, b in zip(bodies(old), bodies(new), strict=True)
    )
    return old.effects if same else equation_type(new)[1]


# ---------------------------------------------------------------- replacing a run of equations


def interface(jaxpr: Jaxpr, start: int, stop: int) -> tuple[list[Var], list[Var]]:
    """The variables that equations [start, stop) read from outside, and those of theirs that are used after.

    Both in the order of first use and of definition.
    """
    run = jaxpr.eqns[start:stop]
    made = {v for eqn in run for v in eqn.outvars}
    reads: dict[Var, None] = {}
    for eqn in run:
        for v in eqn.invars:
            if isinstance(v, Var) and v not in made:
                reads.setdefault(v)
    later = {v for eqn in jaxpr.eqns[stop:] for v in eqn.invars if isinstance(v, Var)}
    later |= {v for v in jaxpr.outvars if isinstance(v, Var)}
    live = [v for eqn in run for v in eqn.outvars if v in later]
    return list(reads), live


def splice(
    jaxpr: Jaxpr,
    start: int,
    stop: int,
    emit: Callable[..., Sequence[Value]],
    name: str = "splice",
) -> Jaxpr:
    """Replaces equations [start, stop) by what `emit` traces. The program's type is kept.

    `emit` is called with a value for each variable that the run reads and returns a value for each that is
    used after, both as `interface(jaxpr, start, stop)` lists them.
    """
    if not 0 <= start < stop <= len(jaxpr.eqns):
        raise RewriteError(f"{name}: no equations {start}:{stop} in a program of {len(jaxpr.eqns)}")
    reads, live = interface(jaxpr, start, stop)
    new = _Body(jaxpr)
    for eqn in jaxpr.eqns[:start]:
        new.carry(eqn, eqn.params)
    first = jaxpr.eqns[start]
    target = first.replace(outvars=live)
    eqns, outs = new.emit(
        first, lambda: conform(target, emit(*(new.builder().value(v) for v in reads)), name)
    )
    new.put(eqns, live, outs)
    for eqn in jaxpr.eqns[stop:]:
        new.carry(eqn, eqn.params)
    return new.finish(name)
