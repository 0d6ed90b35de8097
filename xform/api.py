"""`parallelize`: a function and a plan become a function that behaves like `jax.jit`, rewritten.

On each new combination of argument types the function is traced (with the boundary up, when the plan has
model-stage passes), the step-stage passes run over the whole program, and the result is copied into the trace
that `jax.jit` has open. Dispatch, donation, static arguments and caching are therefore jit's own, and a call
costs what jit costs.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import time
import types
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import networkx as nx
import numpy as np
from jax.sharding import Mesh, NamedSharding

from xform.context import Context, Leaf
from xform.errors import PlanError, RewriteError
from xform.plan import Pass, Plan
from xform.report import Report
from xform.sharding.placement import dtype_of, provisional, put
from xform.topologies import make_mesh
from xform.trace import (
    Jaxpr,
    Tracer,
    boundary,
    check_jaxpr,
    inline,
    plain_aval,
    trace_context,
    trace_flat,
    typeof,
)


@dataclasses.dataclass(frozen=True)
class Stage:
    """The program before and after one pass."""

    name: str
    before: Jaxpr
    after: Jaxpr


@dataclasses.dataclass(frozen=True)
class Program:
    """One traced and rewritten form of a function, for one combination of argument types.

    jaxpr: the program after all passes, over the flat arguments. stages: what each pass did, the model
    stage's first. in_shardings and out_shardings: a layout a leaf, None where the plan says nothing. seconds:
    trace and rewrite.
    """

    jaxpr: Jaxpr
    stages: tuple[Stage, ...]
    report: Report
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    in_shardings: tuple[NamedSharding | None, ...]
    out_shardings: tuple[NamedSharding | None, ...]
    reasons: dict[str, str]
    in_tree: Any
    out_tree: Any
    seconds: dict[str, float]

    @property
    def original(self) -> Jaxpr:
        """The program as it was traced, after model-stage passes and before the first step-stage one."""
        steps = [s for s in self.stages if not s.name.endswith("(model)")]
        return steps[0].before if steps else self.jaxpr


class Parallelized:
    """A function under a plan. Call it as you would call `jax.jit(fn)`."""

    def __init__(self, fn: Callable[..., Any], plan: Plan, mesh: Mesh, jit_options: dict[str, Any]) -> None:
        self.plan, self.mesh = plan, mesh
        self._fn, self._options = fn, jit_options
        self._programs: dict[Any, Program] = {}
        functools.update_wrapper(self, fn, updated=())
        self._jit = jax.jit(self._entry(), **jit_options)

    # A call is jit's own: a method that passes the arguments on would cost a small function a tenth more.
    __call__: Callable[..., Any] = property(operator.attrgetter("_jit"))  # type: ignore[assignment]

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """As a method, of a class whose function was parallelized."""
        return self if instance is None else types.MethodType(self, instance)

    def trace(self, *args: Any, **kwargs: Any) -> Program:
        """Traces and rewrites for these arguments (arrays or ShapeDtypeStructs), and compiles nothing."""
        return self._trace(args, kwargs)[0]

    def _trace(self, args: Any, kwargs: Any) -> tuple[Program, Any]:
        seen: list[Program] = []
        traced = jax.jit(self._entry(seen), **self._options).trace(*args, **kwargs)
        return seen[-1], traced

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Traces, rewrites and lowers for these arguments, laid out on the mesh as the plan says."""
        start = time.perf_counter()
        program = self.trace(*args, **kwargs)
        laid = self._with_layout(program, args, kwargs)
        lowered = self._trace(*laid)[1].lower()
        rest = time.perf_counter() - start - sum(program.seconds.values())
        return Lowered(program, lowered, self.mesh, {**program.seconds, "lower": max(0.0, rest)})

    def place(self, *args: Any) -> Any:
        """The leading arguments on the mesh, laid out as the plan says: one gives it, several a tuple.

        Which dimension is what follows from the whole program: all arguments are needed, or an earlier
        `trace`, `lower` or call with arguments of these types. Before that, they are laid out provisionally,
        with a warning, and the first call moves them.
        """
        layouts = self._layouts(args, "place")
        placed = tuple(jax.tree.map(put, a, layout) for a, layout in zip(args, layouts, strict=True))
        return placed[0] if len(placed) == 1 else placed

    def init(self, init_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`init_fn(*args)`, the function's first argument, born on the mesh: nobody ever holds it whole.

        Laid out as `place` would.
        """
        shapes = jax.eval_shape(init_fn, *args, **kwargs)
        (layout,) = self._layouts((shapes,), "init")
        return jax.jit(init_fn, out_shardings=layout)(*args, **kwargs)

    def shardings(self, *args: Any, **kwargs: Any) -> Any:
        """The layout of the arguments, as a pair of trees like (args, kwargs), for a call with these
        arguments.
        """
        program = self.trace(*args, **kwargs)
        return jax.tree.unflatten(program.in_tree, self._leading(program, None))

    # -------------------------------------------------------------- how a program comes about

    def _entry(self, seen: list[Program] | None = None) -> Callable[..., Any]:
        """A fresh function for jit to trace: rewrites the user's function and copies the result into jit's
        trace.
        """

        def entry(*args: Any, **kwargs: Any) -> Any:
            if jax.config.jax_disable_jit:
                return self._fn(*args, **kwargs)
            leaves, tree = jax.tree.flatten((args, kwargs))
            program = self._specialize(leaves, tree)
            if seen is not None:
                seen.append(program)
            values = [x for x in leaves if isinstance(x, Tracer)]
            values = [_constrain(x, s) for x, s in zip(values, program.in_shardings, strict=True)]
            outs = inline(program.jaxpr, *values)
            outs = [_constrain(x, s) for x, s in zip(outs, program.out_shardings, strict=True)]
            return jax.tree.unflatten(program.out_tree, outs)

        functools.update_wrapper(
            entry, self._fn, assigned=("__module__", "__name__", "__qualname__", "__doc__")
        )
        entry.__signature__ = getattr(self._fn, "__signature__", None) or _signature(self._fn)  # type: ignore[attr-defined]
        return entry

    def _specialize(self, leaves: Sequence[Any], tree: Any) -> Program:
        static = {i: x for i, x in enumerate(leaves) if not isinstance(x, Tracer)}
        avals = tuple(plain_aval(typeof(x)) for x in leaves if isinstance(x, Tracer))
        kinds = tuple((i, type(x), x) for i, x in static.items())  # 1, 1.0 and True are equal
        key = (tree, kinds, avals, trace_context())
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self._make(tree, static, avals)
        return program

    def _make(self, tree: Any, static: dict[int, Any], avals: Sequence[Any]) -> Program:
        report = Report()
        stages: list[Stage] = []
        numbers = [i for i in range(tree.num_leaves) if i not in static]
        inputs = _input_leaves(tree, numbers, avals, _donated(self._fn, self._options))
        out_tree: Any = None
        outputs: tuple[Leaf, ...] = ()
        spent = 0.0

        passed: dict[int, Leaf] = {}  # inputs by the tracers they are while the function is traced

        def flat(*values: Any) -> list[Any]:
            nonlocal out_tree, outputs
            passed.update(zip(map(id, values), inputs, strict=True))
            leaves = dict(static) | dict(zip(numbers, values, strict=True))
            args, kwargs = jax.tree.unflatten(tree, [leaves[i] for i in range(tree.num_leaves)])
            with_paths, out_tree = jax.tree_util.tree_flatten_with_path(self._fn(*args, **kwargs))
            outputs = tuple(Leaf(jax.tree_util.keystr(p), typeof(x)) for p, x in with_paths)
            return [x for _, x in with_paths]

        def model(jaxpr: Jaxpr, leaves: Sequence[Leaf]) -> Jaxpr:
            nonlocal spent
            start = time.perf_counter()
            results = tuple(Leaf("", v.aval) for v in jaxpr.outvars)
            context = Context("model", self.mesh, report, leaves, results, self.plan.axes)
            after = _run(jaxpr, model_passes, context, stages, " (model)")
            spent += time.perf_counter() - start
            return after

        differentiated = False

        def at_boundary(jaxpr: Jaxpr, values: Sequence[Any]) -> Jaxpr:
            nonlocal differentiated
            differentiated = True
            return model(jaxpr, [passed.get(id(x), Leaf("", typeof(x))) for x in values])

        model_passes = _of_stage(self.plan.passes, "model")
        name = getattr(self._fn, "__name__", "fn")
        start = time.perf_counter()
        paths = [leaf.path for leaf in inputs]
        if model_passes:
            with boundary(
                at_boundary, object()
            ):  # a key of its own: nothing that jit traced before is reused
                jaxpr = trace_flat(flat, avals, name, paths)
            if not differentiated:
                jaxpr = model(jaxpr, inputs)
        else:
            jaxpr = trace_flat(flat, avals, name, paths)
        traced = time.perf_counter()
        context = Context("step", self.mesh, report, inputs, outputs, self.plan.axes)
        jaxpr = _run(jaxpr, _of_stage(self.plan.passes, "step"), context, stages, "")
        rewritten = time.perf_counter()
        return Program(
            jaxpr,
            tuple(stages),
            report,
            inputs,
            outputs,
            tuple(context.in_shardings),
            tuple(context.out_shardings),
            context.reasons,
            tree,
            out_tree,
            {"trace": traced - start - spent, "rewrite": rewritten - traced + spent},
        )

    # -------------------------------------------------------------- layouts of arguments

    def _leading(self, program: Program, count: int | None) -> list[Any]:
        """The layout of every leaf of the first `count` arguments (None: of all); static leaves have none."""
        replicated = NamedSharding(self.mesh, jax.sharding.PartitionSpec())
        of_leaf = {
            leaf.path: s or replicated for leaf, s in zip(program.inputs, program.in_shardings, strict=True)
        }
        found = []
        for path, _ in _paths(program.in_tree):
            number = _argument(path)
            if count is None or (isinstance(number, int) and number < count):
                found.append(of_leaf.get(_keystr(path)))
        return found

    def _with_layout(self, program: Program, args: Any, kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        layouts = self._leading(program, None)
        laid = [x if s is None else _struct(x, s) for x, s in zip(leaves, layouts, strict=True)]
        return jax.tree.unflatten(tree, laid)

    def _layouts(self, args: Sequence[Any], verb: str) -> tuple[Any, ...]:
        """A tree of layouts for each of the leading arguments."""
        program = self._known(args)
        if program is None and self._takes(args):
            program = self.trace(*args)
        if program is None:
            name = getattr(self._fn, "__name__", "the function")
            warnings.warn(
                f"{verb}: {name} was not traced with arguments of these types yet; the whole program alone"
                " says how they should lie. They are laid out provisionally and moved at the first call. Call"
                " .trace(...) once before, with all arguments (jax.ShapeDtypeStructs will do)",
                stacklevel=3,
            )
            return tuple(provisional(a, self.mesh) for a in args)
        layouts = iter(self._leading(program, len(args)))
        return tuple(jax.tree.map(lambda _: next(layouts), a) for a in args)

    def _takes(self, args: Sequence[Any]) -> bool:
        """Whether these are all the arguments that the function needs."""
        signature = _signature(self._fn)
        try:
            return signature is None or bool(signature.bind(*args))
        except TypeError:
            return False

    def _known(self, args: Sequence[Any]) -> Program | None:
        """A program whose leading arguments are of these types."""
        wanted: list[tuple[Any, list[Any]]] = [
            (jax.tree.structure(a), [(np.shape(x), dtype_of(x)) for x in jax.tree.leaves(a)]) for a in args
        ]
        for program in reversed(list(self._programs.values())):
            positional, _ = jax.tree.unflatten(program.in_tree, range(program.in_tree.num_leaves))
            if len(positional) < len(args):
                continue
            avals = {leaf.path: leaf.aval for leaf in program.inputs}
            paths = {i: avals.get(_keystr(p)) for i, (p, _) in enumerate(_paths(program.in_tree))}
            if all(
                structure == jax.tree.structure(have)
                and all(
                    (a := paths[i]) is not None and (a.shape, a.dtype) == t
                    for i, t in zip(jax.tree.leaves(have), types, strict=True)
                )
                for have, (structure, types) in zip(positional, wanted, strict=False)
            ):
                return program
        return None


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A lowered program with what the passes did to it."""

    program: Program
    lowered: jax.stages.Lowered
    mesh: Mesh
    seconds: dict[str, float]

    def as_text(self) -> str:
        """The StableHLO, sources and locations left out: the same in every process."""
        return self.lowered.as_text()

    def compile(self) -> jax.stages.Compiled:
        return self.lowered.compile()

    def report(self) -> str:
        """What every pass did and left alone, a line each."""
        return str(self.program.report)


def parallelize(
    fn: Callable[..., Any],
    plan: Plan,
    *,
    devices: Sequence[Any] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
) -> Parallelized:
    """Rewrites `fn` as `plan` says; the result behaves like `jax.jit(fn, ...)` with the same options.

    fn: any JAX function: a loss, a forward pass, a decode step, or a training step that differentiates
    inside. devices: those to lay the mesh on; default `jax.devices()`, or the first without a mesh. Raises
    PlanError when the plan's mesh does not fit the devices, and, at the first call, when the plan cannot be
    honoured for this program.
    """
    if devices is None:
        # A plan without a mesh is for one device, as jax.jit is.
        devices = jax.devices() if plan.mesh or plan.dcn else jax.devices()[:1]
    mesh = make_mesh(list(devices), plan.mesh, plan.dcn)
    options = {
        "donate_argnums": donate_argnums,
        "donate_argnames": donate_argnames,
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
    }
    return Parallelized(fn, plan, mesh, {k: v for k, v in options.items() if v is not None})


def _run(jaxpr: Jaxpr, passes: Sequence[Pass], context: Context, stages: list[Stage], suffix: str) -> Jaxpr:
    for p in passes:
        before = jaxpr
        jaxpr = p.rewrite(jaxpr, context)
        name = type(p).__name__.lower()
        if (was := _type(before)) != (now := _type(jaxpr)):
            raise RewriteError(f"{name} made a program of type {now}; it was {was}")
        if jax.config.jax_enable_checks:
            check_jaxpr(jaxpr)
        stages.append(Stage(name + suffix, before, jaxpr))
    return jaxpr


def _type(jaxpr: Jaxpr) -> str:
    """The types of a program's inputs and results."""
    takes, gives = ([v.aval.str_short() for v in variables] for variables in (jaxpr.invars, jaxpr.outvars))
    return f"({', '.join(takes)}) -> ({', '.join(gives)})"


def _of_stage(passes: Sequence[Pass], stage: str) -> tuple[Pass, ...]:
    """The passes that act on a stage, in the order their needs allow: each after those its `after` names."""
    chosen = [p for p in passes if stage in p.stages]
    names = [type(p).__name__.lower() for p in chosen]
    order = nx.DiGraph()
    order.add_nodes_from(range(len(chosen)))
    for i, p in enumerate(chosen):
        order.add_edges_from((j, i) for j, n in enumerate(names) if n in getattr(p, "after", ()) and j != i)
    try:
        return tuple(chosen[i] for i in nx.lexicographical_topological_sort(order))
    except nx.NetworkXUnfeasible:
        raise PlanError(f"the passes {', '.join(names)} each want to come after one another") from None


# ---------------------------------------------------------------- arguments and their names


def _signature(fn: Callable[..., Any]) -> Any:
    import inspect

    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):
        return None


def _paths(tree: Any) -> list[tuple[Any, Any]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(tree, range(tree.num_leaves)))
    return leaves


def _keystr(path: Any) -> str:
    """The path without the (args, kwargs) pair around it: `[0]['params']['w']`, `['scale']`."""
    return jax.tree_util.keystr(path[1:])


def _argument(path: Any) -> int | str:
    """The number of a positional argument, the name of a keyword one."""
    return path[1].idx if path[0].idx == 0 else path[1].key


def _input_leaves(
    tree: Any, numbers: Sequence[int], avals: Sequence[Any], donated: set[int | str]
) -> tuple[Leaf, ...]:
    paths = _paths(tree)
    return tuple(
        Leaf(_keystr(paths[i][0]), aval, _argument(paths[i][0]), _argument(paths[i][0]) in donated)
        for i, aval in zip(numbers, avals, strict=True)
    )


def _donated(fn: Callable[..., Any], options: dict[str, Any]) -> set[int | str]:
    """The arguments that are donated, by number and by name, whichever of both the user gave."""
    signature = _signature(fn)
    names = list(signature.parameters) if signature is not None else []
    given = {*_as_tuple(options.get("donate_argnums")), *_as_tuple(options.get("donate_argnames"))}
    by_name = {names[i] for i in given if isinstance(i, int) and -len(names) <= i < len(names)}
    by_number = {names.index(name) for name in given | by_name if name in names}
    return given | by_name | by_number


def _as_tuple(x: Any) -> tuple[Any, ...]:
    return () if x is None else (x,) if isinstance(x, (int, str)) else tuple(x)


def _struct(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    aval = typeof(x) if not isinstance(x, jax.ShapeDtypeStruct) else x
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=sharding, weak_type=getattr(aval, "weak_type", False)
    )


def _constrain(x: Any, sharding: NamedSharding | None) -> Any:
    return x if sharding is None else jax.lax.with_sharding_constraint(x, sharding)
