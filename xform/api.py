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
import os
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from xform.errors import PlanError
from xform.kept import arrived, beginning, has_begun, known, layouts_of, phase_of, started
from xform.making import Making
from xform.plan import Plan
from xform.program import (
    Argument,
    Program,
    donated_arguments,
    signature,
)
from xform.promises import check_compiled
from xform.quantization.arrays import Quantized, quantized
from xform.quantization.scales import How
from xform.sharding.memory import in_memory, laid
from xform.sharding.placement import dtype_of, provisional, put, put_row, taken_apart
from xform.state import (
    Element,
    Ordered,
    Placed,
    apart,
    closed,
    gathered,
    is_placed,
    opened,
    order_at,
    scattered,
)
from xform.state.kept import Phase
from xform.topologies import make_mesh
from xform.trace import (
    ShapedArray,
    Tracer,
    inline,
    plain_aval,
    trace_context,
    typeof,
)


class Parallelized:
    """A function under a plan. Call it as you would call `jax.jit(fn)`."""

    def __init__(self, fn: Callable[..., Any], plan: Plan, mesh: Mesh, jit_options: dict[str, Any]) -> None:
        self.plan, self.mesh = plan, mesh
        self._fn, self._options = fn, jit_options
        self._programs: dict[Any, Program] = {}
        self._donated = frozenset(donated_arguments(fn, jit_options))
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
        structs = [
            _struct(leaf.aval, s) for leaf, s in zip(program.inputs, self._shardings(program), strict=True)
        ]
        laid = program.arranged(structs, dict(enumerate(jax.tree.leaves(opened((args, kwargs))))))
        lowered = self._trace(*laid)[1].lower()
        rest = time.perf_counter() - start - sum(program.seconds.values())
        return Lowered(program, lowered, self.mesh, {**program.seconds, "lower": max(0.0, rest)})

    def place(self, *args: Any) -> Any:
        """The leading arguments on the mesh, laid out as the plan says: one gives it, several a tuple.

        An argument of which the plan stacks some arrays, stores some in another order (layers by stage), or
        in which it keeps some of its own (amax histories), becomes an `xform.Placed`; `unplace` is the way
        back. One whose histories all have something in them, after a step or from a checkpoint, is taken by a
        program whose products wait for nothing that they measure: it is worth to be placed again. Raises
        PlanError where ranges can only come from `calibrate`.
        Which dimension is what follows from the whole program: all arguments are needed, or an earlier
        `trace`, `lower` or call with arguments of these types. Before that, they are laid out provisionally,
        with a warning, and the first call moves them.
        """
        program = self._program_of(args, "place")
        if program is None:
            placed = tuple(jax.tree.map(put, a, provisional(a, self.mesh)) for a in args)
        else:
            placed = tuple(
                self._place(program, argument, value, started(program, argument, value))
                for argument, value in zip(program.arguments, args, strict=False)
            )
        return placed[0] if len(placed) == 1 else placed

    def _place(self, program: Program, argument: Argument, value: Any, kept: Sequence[Any]) -> Any:
        shardings = self._shardings(program)
        own = [shardings[i] for i in argument.inputs]
        leaves, layout = jax.tree.leaves(opened(value)), argument.layout

        def made(row: Sequence[Any], n: int) -> Any:
            return put_row(row, own[n], order_at(layout.orders, n))

        arrays = gathered(layout.groups, leaves, made, layout.orders)
        arrays = [put(x, s) for x, s in zip([*arrays, *kept], own, strict=True)]
        if argument.is_stacked:
            begun = bool(kept) and has_begun(program, kept)
            return Placed(dataclasses.replace(layout, begun=begun), arrays)
        return jax.tree.unflatten(layout.tree, arrays)

    def unplace(self, *trees: Any) -> Any:
        """Trees in the model's own structure, to read or to save: every `xform.Placed` in them taken apart.

        One gives it, several a tuple. What was stacked lies as it did, without the dimension of the stack;
        what the plan keeps for itself is left out.
        """
        plain = tuple(
            jax.tree.map(lambda x: taken_apart(x) if is_placed(x) else x, tree, is_leaf=is_placed)
            for tree in trees
        )
        return plain[0] if len(plain) == 1 else plain

    def quantize(self, params: Any, *args: Any, **kwargs: Any) -> Any:
        """`params`, the function's first argument, with its weights as codes: `xform.Quantized` in place of
        those arrays that the plan's Quantize multiplies. The step takes either tree.

        params: arrays or ShapeDtypeStructs, or `Placed`. args: the function's other arguments, not needed
        where it was traced before. What cannot be stored as codes stays as it is, with a warning that says
        why. Ranges that `calibrate` found are left out: calibrate afterwards. Raises PlanError where the plan
        does not quantize weights, or the function differentiates.
        """
        params = self.unplace(params)
        program = self.trace(params, *args, **kwargs) if args or kwargs else self._known((params,))
        if program is None and self._takes((params,)):
            program = self.trace(params)
        if program is None:
            raise PlanError(
                f"quantize: {self._name} was not traced with arguments of these types yet, and the whole"
                " program says which weights it multiplies: give all arguments, or call .trace(...) before"
            )
        if program.storable is None:
            raise PlanError(
                f"quantize: {self._name} has no weights to be stored as codes: its plan has no quantize, or"
                " it differentiates; use a step that serves, under a plan with quantize"
            )
        found = program.storable()
        for where in dict.fromkeys(found.left.values()):
            left = [path for path, at in found.left.items() if at == where]
            what = left[0] if len(left) == 1 else f"{len(left)} weights as {left[0]}"
            warnings.warn(f"quantize: {what} stay in floats, which {where} needs", stacklevel=2)
        with_paths, tree = jax.tree_util.tree_flatten_with_path((params,))
        leaves = [
            x if (how := found.hows.get(jax.tree_util.keystr(path))) is None else _as_codes(x, how)
            for path, x in with_paths
        ]
        return jax.tree.unflatten(tree, leaves)[0]

    def init(self, init_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`init_fn(*args)`, the function's first argument, born on the mesh: nobody ever holds it whole.

        Laid out as `place` would; ranges to be calibrated are still missing.
        """
        shapes = jax.eval_shape(init_fn, *args, **kwargs)
        program = self._program_of((shapes,), "init")
        if program is None:
            return jax.jit(init_fn, out_shardings=provisional(shapes, self.mesh))(*args, **kwargs)
        argument = program.arguments[0]
        argument = dataclasses.replace(argument, layout=dataclasses.replace(argument.layout, begun=False))
        own = program.kept if argument.layout.kept else ()
        if any(kept.initial is None for kept in own):
            own, argument = (), argument.without_kept

        def born(*args: Any, **kwargs: Any) -> Any:
            leaves, layout = jax.tree.leaves(init_fn(*args, **kwargs)), argument.layout
            arrays = [*gathered(layout.groups, leaves, orders=layout.orders), *map(beginning, own)]
            return argument.filled(dict(zip(argument.inputs, arrays, strict=True)), {})

        layout = argument.filled(self._shardings(program), {})
        return jax.jit(born, out_shardings=layout)(*args, **kwargs)

    def shardings(self, *args: Any, **kwargs: Any) -> Any:
        """The layout of the arguments as `place` lays them out, as a pair of trees like (args, kwargs), for
        a call with these arguments.
        """
        program = self.trace(*args, **kwargs)
        return program.arranged(self._shardings(program), {})

    def calibrate(self, first: Any, batches: Iterable[Sequence[Any]]) -> Any:
        """The first argument, placed, with the largest ranges of numbers that were met over all batches.

        batches: tuples of the arguments after the first, shapes alike. The function is run on each, with
        the ranges of the batch itself, and its results are thrown away. Where `first` has ranges already they
        grow. Raises PlanError for a plan that keeps no calibrated ranges, and for no batches.
        """
        placed: Placed | None = None
        for batch in batches:
            if placed is None:
                program = self.trace(first, *batch)
                if program.keeper != 0 or all(kept.initial is not None for kept in program.kept):
                    raise PlanError(
                        f"calibrate: the plan keeps no calibrated ranges in the first argument of "
                        f"{self._name}; a recipe of quantize that has some says "
                        'activations_calibration = "calibrated"'
                    )
                own = known(program, first)
                placed = self._place(program, program.arguments[0], first, own)
            arrays = placed.arrays[: len(placed.layout.groups)]
            placed = Placed(placed.layout, [*arrays, *self._measure(placed, *batch)])
        if placed is None:
            raise PlanError(
                "calibrate: there are no batches; give the arguments after the first, a tuple each"
            )
        return placed

    @functools.cached_property
    def _measure(self) -> Any:
        """The function as one that returns what it keeps alone, measured anew."""
        other = Parallelized(self._fn, self.plan, self.mesh, {})
        options = {k: v for k, v in self._options.items() if k.startswith("static")}
        return jax.jit(other._entry(measures=True), **options)

    @property
    def _name(self) -> str:
        return getattr(self._fn, "__name__", "the function")

    # -------------------------------------------------------------- how a program comes about

    def _entry(self, seen: list[Program] | None = None, measures: bool = False) -> Callable[..., Any]:
        """A fresh function for jit to trace: rewrites the user's function and copies the result into jit's
        trace. measures: what is kept, measured on the arguments, is the result.
        """

        def entry(*args: Any, **kwargs: Any) -> Any:
            if jax.config.jax_disable_jit:
                args, kwargs = closed(opened((args, kwargs)), {})
                return self._fn(*args, **kwargs)
            leaves, tree = jax.tree.flatten(opened((args, kwargs)))
            program = self._specialize(leaves, tree, "measure" if measures else phase_of(args, kwargs))
            kept = arrived(program, args, kwargs, self._name if seen is None else "")
            if seen is None:
                _warn_of_stacking(program, leaves, self._name)
            else:
                seen.append(program)
            values = [*gathered(program.in_groups, leaves, orders=program.in_orders), *kept.values()]
            values = list(map(laid, values, program.in_shardings, (v.aval for v in program.jaxpr.invars)))
            outs = inline(program.jaxpr, *values)
            outs = list(map(laid, outs, program.out_shardings, map(typeof, outs)))
            own = len(program.out_groups)
            if measures:
                return outs[own:]
            result = scattered(program.out_groups, outs[:own], program.out_orders)
            result = jax.tree.unflatten(program.out_tree, result)
            return closed(result, *layouts_of(program, args, kwargs, outs[own:]))

        functools.update_wrapper(
            entry, self._fn, assigned=("__module__", "__name__", "__qualname__", "__doc__")
        )
        entry.__signature__ = getattr(self._fn, "__signature__", None) or signature(self._fn)  # type: ignore[attr-defined]
        return entry

    def _specialize(self, leaves: Sequence[Any], tree: Any, phase: Phase = "start") -> Program:
        static = {i: x for i, x in enumerate(leaves) if not isinstance(x, Tracer | Element | Ordered)}
        avals = tuple(_aval(x) for i, x in enumerate(leaves) if i not in static)
        if any(getattr(p, "hosts", False) for p in self.plan.passes):
            avals = tuple(in_memory(aval, jax.memory.Space.Device) for aval in avals)
        kinds = tuple((i, type(x), x) for i, x in static.items())  # 1, 1.0 and True are equal
        key = (tree, kinds, avals, phase, trace_context())
        program = self._programs.get(key)
        if program is None:
            making = Making(self._fn, self.plan, self.mesh, self._donated, phase)
            program = self._programs[key] = making.program(tree, static, avals)
        return program

    # -------------------------------------------------------------- layouts of arguments

    def _shardings(self, program: Program) -> list[NamedSharding]:
        """The layout of every input."""
        replicated = NamedSharding(self.mesh, jax.sharding.PartitionSpec())
        return [sharding or replicated for sharding in program.in_shardings]

    def _program_of(self, args: Sequence[Any], verb: str) -> Program | None:
        """The program whose leading arguments these are; None, with a warning, where it is not known yet."""
        program = self._known(args)
        if program is None and self._takes(args):
            program = self.trace(*args)
        if program is None:
            warnings.warn(
                f"{verb}: {self._name} was not traced with arguments of these types yet; the whole program"
                " alone says how they should lie. They are laid out provisionally and moved at the first"
                " call. Call .trace(...) once before, with all arguments (jax.ShapeDtypeStructs will do)",
                stacklevel=3,
            )
        return program

    def _takes(self, args: Sequence[Any]) -> bool:
        """Whether these are all the arguments that the function needs."""
        known = signature(self._fn)
        try:
            return known is None or bool(known.bind(*args))
        except TypeError:
            return False

    def _known(self, args: Sequence[Any]) -> Program | None:
        """A program whose leading arguments are of these types."""
        wanted = [jax.tree.flatten(opened(a)) for a in args]
        for program in reversed(list(self._programs.values())):
            arguments = [a for a in program.arguments if isinstance(a.name, int)]
            types = program.types()
            if len(arguments) >= len(args) and all(
                tree == argument.layout.tree
                and all(
                    types.get(i) == (np.shape(x), dtype_of(x))
                    for i, x in zip(argument.leaves, leaves, strict=True)
                )
                for argument, (leaves, tree) in zip(arguments, wanted, strict=False)
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
        """Compiles, and raises PromiseError where the result breaks a promise of a pass (on a TPU)."""
        compiled = self.lowered.compile()
        check_compiled(self.program.laid_out, self.program.report, compiled)
        return compiled

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


@functools.partial(jax.jit, static_argnames="how")
def _quantized(x: Any, how: How) -> Quantized:
    return quantized(x, how)


def _as_codes(x: Any, how: How) -> Quantized:
    """A weight as codes; of a ShapeDtypeStruct, such too."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.eval_shape(functools.partial(quantized, how=how), x)
    return _quantized(x, how)


def _aval(x: Any) -> Any:
    """The type of a leaf, in a stack or by itself."""
    if isinstance(x, Element | Ordered):
        return ShapedArray(x.shape, x.dtype)
    return plain_aval(typeof(x))


_INSTALLED = tuple(os.path.dirname(module.__file__ or "") for module in (jax, sys.modules[__name__]))
"""Where the user's code is not: a warning names the line of the call."""


def _warn_of_stacking(program: Program, leaves: Sequence[Any], name: str) -> None:
    for text in apart(program.in_groups, leaves, program.in_orders):
        warnings.warn(f"{name}: {text}", skip_file_prefixes=_INSTALLED)


def _struct(aval: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=sharding, weak_type=getattr(aval, "weak_type", False)
    )
