"""A body of a program with the calls in it opened, so that what belongs together stands in one list.

    y = jit[_softmax] { e = exp x ... }        e = exp x
    z = dot_general y v                  ->    ...
                                               z = dot_general y v

Calls of jit and functions with a custom_jvp rule are opened: jax.numpy and jax.nn hide operations in both.
What is a body of its own (a loop, a branch, a checkpoint, a custom_vjp, a shard_map) stays. Every equation
keeps the *chain* of numbers by which it is found in the program as it was, so that only those calls have to
be opened for good that hold something to be replaced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from xform.higher_order import READ, bodies, is_plain_jit, operands, scan_parts
from xform.trace import Atom, DropVar, Jaxpr, JaxprEqn, Literal, Value, Var, name_stack, shape_of, source_line

Chain = tuple[int, ...]
"""Numbers of equations: of a call, of an equation in its body, and so on."""

Place = tuple[tuple[Chain, int], ...]
"""Where a body is: for each step inward the chain of the equation that holds it, and the body's number."""


CLOSED = frozenset({"custom_vjp_call", *READ})
"""What is not looked into: its derivative is its own affair, or it is an operation already."""


def is_call(eqn: JaxprEqn) -> bool:
    """Whether the body of an equation can stand in its place, to be read."""
    if eqn.primitive.name in ("closed_call", "core_call", "custom_jvp_call"):
        return len(bodies(eqn)) == 1
    return is_plain_jit(eqn)


@dataclasses.dataclass(eq=False)
class View:
    """A body with its calls opened, as a graph.

    makers: the number of the equation that makes a variable; inputs and constants have none. users: the
    numbers of those that read it; -1 where the body returns it. chains, names: of each equation, the chain
    and the whole name stack. constants: values of `jaxpr.constvars`. inputs: for a body within another one,
    what is known of where its inputs come from: an atom of `outer`, where each turn is given the same.
    calls: which equations are calls that are opened, here and in bodies.
    """

    jaxpr: Jaxpr
    chains: list[Chain]
    names: list[str]
    place: Place = ()
    outer: View | None = None
    inputs: dict[Var, Atom] = dataclasses.field(default_factory=dict)
    calls: Callable[[JaxprEqn], bool] = is_call

    def __post_init__(self) -> None:
        self.makers: dict[Var, int] = {}
        self.users: dict[Var, list[int]] = {}
        for number, eqn in enumerate(self.jaxpr.eqns):
            self.makers.update((v, number) for v in eqn.outvars if not isinstance(v, DropVar))
            for v in dict.fromkeys(v for v in eqn.invars if isinstance(v, Var)):
                self.users.setdefault(v, []).append(number)
        for v in dict.fromkeys(v for v in self.jaxpr.outvars if isinstance(v, Var)):
            self.users.setdefault(v, []).append(-1)
        self.constants: dict[Var, Value] = dict(zip(self.jaxpr.constvars, self.jaxpr.consts, strict=True))

    @property
    def eqns(self) -> Sequence[JaxprEqn]:
        return self.jaxpr.eqns

    def maker(self, atom: Atom) -> JaxprEqn | None:
        """The equation that makes a value; None for inputs, constants and literals."""
        number = self.makers.get(atom) if isinstance(atom, Var) else None
        return None if number is None else self.jaxpr.eqns[number]

    def line(self, number: int) -> str:
        return source_line(self.jaxpr.eqns[number])

    def ancestors(self, atoms: Sequence[Atom], stop: Callable[[Var], bool] = lambda v: False) -> set[int]:
        """The numbers of all equations that the atoms depend on; not beyond variables where `stop` holds."""
        found: set[int] = set()
        todo = [v for v in atoms if isinstance(v, Var)]
        while todo:
            v = todo.pop()
            number = self.makers.get(v)
            if number is None or number in found or stop(v):
                continue
            found.add(number)
            todo += [w for w in self.jaxpr.eqns[number].invars if isinstance(w, Var)]
        return found

    def inner(self) -> Iterator[View]:
        """The bodies in this one, of loops and the like, each with its calls opened."""
        for number, eqn in enumerate(self.jaxpr.eqns):
            if eqn.primitive.name in CLOSED:
                continue
            for k, body in enumerate(bodies(eqn)):
                yield flat(
                    body,
                    place=(*self.place, (self.chains[number], k)),
                    names=self.names[number],
                    outer=self,
                    holder=eqn,
                    calls=self.calls,
                )


def views(jaxpr: Jaxpr) -> Iterator[View]:
    """Every body of a program, at every depth, outer ones first."""
    todo = [flat(jaxpr)]
    while todo:
        view = todo.pop(0)
        yield view
        todo[:0] = list(view.inner())


def flat(
    jaxpr: Jaxpr,
    opens: Callable[[Chain], bool] = lambda chain: True,
    place: Place = (),
    names: str = "",
    outer: View | None = None,
    holder: JaxprEqn | None = None,
    calls: Callable[[JaxprEqn], bool] = is_call,
) -> View:
    """The body with those of its calls opened whose chains `opens` takes. calls: what is one."""
    opened = _Opening(opens, calls)
    env: dict[Var, Atom] = {v: v for v in jaxpr.all_invars}
    outs = opened.into(jaxpr, env, (), None)
    changed = jaxpr
    if opened.any:
        changed = jaxpr.replace(
            constvars=[*jaxpr.constvars, *opened.constvars],
            consts=[*jaxpr.consts, *opened.consts],
            eqns=opened.eqns,
            outvars=outs,
            debug_info=jaxpr.debug_info,
        )
    own = [name_stack(eqn) for eqn in changed.eqns]
    whole = ["/".join(filter(None, (names, n))) for n in own]
    view = View(changed, opened.chains, whole, place, outer, calls=calls)
    if holder is not None and outer is not None:
        view.inputs = _given(changed, holder, place[-1][1])
    return view


def _given(jaxpr: Jaxpr, holder: JaxprEqn, number: int) -> dict[Var, Atom]:
    """The inputs of a body that are the same in each of its turns: which operand each is."""
    name = holder.primitive.name
    places = operands(holder, number)
    fixed = len(places)
    if name == "scan":
        fixed = scan_parts(holder)[0]
    elif name == "while":
        body = bodies(holder)[number]
        fixed = holder.params["cond_nconsts" if body is holder.params["cond_jaxpr"] else "body_nconsts"]
    elif name == "shard_map":
        fixed = 0
    pairs = zip(jaxpr.invars[:fixed], places[:fixed], strict=True)
    return {v: holder.invars[at] for v, at in pairs if at is not None}


class _Opening:
    """Collects the equations of a body and of the calls in it, variables of calls renamed."""

    def __init__(self, opens: Callable[[Chain], bool], calls: Callable[[JaxprEqn], bool]) -> None:
        self.opens, self.calls = opens, calls
        self.any = False
        self.eqns: list[JaxprEqn] = []
        self.chains: list[Chain] = []
        self.constvars: list[Var] = []
        self.consts: list[Any] = []

    def into(self, jaxpr: Jaxpr, env: dict[Var, Atom], chain: Chain, within: Any) -> list[Atom]:
        def read(atom: Atom) -> Atom:
            return atom if isinstance(atom, Literal) else env[atom]

        for number, eqn in enumerate(jaxpr.eqns):
            here = (*chain, number)
            if self.calls(eqn) and self.opens(here):
                self.any = True
                (body,) = bodies(eqn)
                inside: dict[Var, Atom] = dict(zip(body.invars, map(read, eqn.invars), strict=True))
                for v, value in zip(body.constvars, body.consts, strict=True):
                    inside[v] = fresh_constant = Var(v.aval)
                    self.constvars.append(fresh_constant)
                    self.consts.append(value)
                stack = eqn.source_info.name_stack
                outs = self.into(body, inside, here, stack if within is None else within + stack)
                env.update(zip(eqn.outvars, outs, strict=True))
                continue
            if chain:
                fresh = {v: v if isinstance(v, DropVar) else Var(v.aval) for v in eqn.outvars}
                env.update(fresh)
                info = eqn.source_info
                eqn = eqn.replace(
                    invars=[read(v) for v in eqn.invars],
                    outvars=list(fresh.values()),
                    source_info=info.replace(name_stack=within + info.name_stack),
                )
            else:
                env.update((v, v) for v in eqn.outvars)
                if any(env.get(v, v) is not v for v in eqn.invars if isinstance(v, Var)):
                    eqn = eqn.replace(invars=[read(v) for v in eqn.invars])
            self.eqns.append(eqn)
            self.chains.append(here)
        return [read(v) for v in jaxpr.outvars]


def dtype_of(atom: Atom) -> Any:
    """The dtype of an atom that is an array."""
    aval: Any = atom.aval
    return aval.dtype


def place_of(eqn: JaxprEqn, atom: Atom) -> int:
    """Which of the results of its equation an atom is."""
    return next(k for k, v in enumerate(eqn.outvars) if v is atom)


def size(atom: Atom) -> tuple[int, ...]:
    """The shape of an atom."""
    return tuple(shape_of(atom))
