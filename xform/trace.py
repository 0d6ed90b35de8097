"""Functions to jaxprs and back, and the boundary where a function is about to be differentiated.

This is the one module that touches jax's private names; everything else takes them from here, and one test imports
them all, so that a new jax shows at once what moved. A program is traced on avals (`ShapeDtypeStruct`s lose explicit
shardings) and carried over equation by equation: `inline` copies a jaxpr into the trace at hand without binding
anything again, and a `Builder` collects what a replacement emits by calling JAX.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax._src import ad_checkpoint, api_util, config, core, effects, source_info_util
from jax._src import linear_util as lu
from jax._src import tree_util as tree_util
from jax._src.core import DropVar, Jaxpr, JaxprEqn, Literal, ShapedArray, Tracer, Var
from jax._src.interpreters import ad, batching
from jax._src.interpreters import partial_eval as pe
from jax._src.lax import lax as lax_internal
from jax._src.lib import hlo as hlo
from jax._src.mesh import use_abstract_mesh
from jax._src.shard_map import _as_manual_mesh, _extend_axis_env

__all__ = [
    "Atom",
    "Builder",
    "DropVar",
    "Jaxpr",
    "JaxprEqn",
    "Literal",
    "ShapedArray",
    "Tracer",
    "Var",
    "ad_checkpoint",
    "at_equation",
    "batching",
    "body_effects",
    "boundary",
    "check_jaxpr",
    "eval_jaxpr",
    "hlo",
    "in_shard_map",
    "inline",
    "is_jax_value",
    "lazily",
    "name_stack",
    "rename_effects",
    "plain_aval",
    "same_weak_type",
    "source_frame",
    "source_line",
    "trace_context",
    "trace_flat",
    "typeof",
]

Atom = Var | Literal
Value = Any
"""What a rule handles: a tracer, an array or a scalar."""

typeof = core.typeof
check_jaxpr = core.check_jaxpr


def trace_context() -> Any:
    """Everything of jax's configuration that a trace depends on; hashable."""
    return config.trace_context()


def plain_aval(aval: Any) -> Any:
    """The type without a mesh whose axes are all automatic: such a mesh says where a value lies, not what it is."""
    sharding = getattr(aval, "sharding", None)
    if sharding is None or sharding.mesh.empty or not sharding.mesh.are_all_axes_auto:
        return aval
    return ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type)


def is_jax_value(x: Any) -> bool:
    """Whether x can be an input or output of a jaxpr."""
    try:
        core.typeof(x)
    except TypeError:
        return False
    return True


# ---------------------------------------------------------------- functions to jaxprs, and back


def trace_flat(
    fn: Callable[..., Sequence[Value]],
    avals: Sequence[Any],
    name: str,
    arg_names: Sequence[str] | None = None,
) -> Jaxpr:
    """Traces `fn`, which takes values of types `avals` and returns a flat sequence, to a jaxpr with its constants.

    Values that `fn` closes over, tracers of an enclosing trace included, become the jaxpr's constants. Never cached.
    """
    names = tuple(arg_names) if arg_names is not None else tuple(f"args[{i}]" for i in range(len(avals)))
    debug_info = core.DebugInfo("xform", name, names, None)
    flat = lu.wrap_init(lambda *xs: list(fn(*xs)), debug_info=debug_info)
    jaxpr, _, consts = pe.trace_to_jaxpr_dynamic(flat, list(avals))
    return jaxpr.with_consts(consts)


def eval_jaxpr(jaxpr: Jaxpr, *args: Value) -> list[Value]:
    """Evaluates a jaxpr by binding its equations, under whatever transformation is active."""
    return core.eval_jaxpr(jaxpr, jaxpr.consts, *args)


def inline(jaxpr: Jaxpr, *args: Value) -> list[Value]:
    """Evaluates a jaxpr by copying its equations into the current trace, without abstract evaluation.

    Sources, name stacks, effects and contexts are kept. Where the current trace records no jaxpr, binds instead.
    """
    trace = core.trace_ctx.trace
    if not isinstance(trace, pe.DynamicJaxprTrace):
        return eval_jaxpr(jaxpr, *args)
    here = source_info_util.current()
    env: dict[Var, Any] = {}
    for var, value in zip(jaxpr.all_invars, [*jaxpr.consts, *args], strict=True):
        env[var] = trace.to_jaxpr_tracer(value, source_info=here)

    def read(atom: Atom) -> Any:
        return trace.to_jaxpr_tracer(atom.val, here) if isinstance(atom, Literal) else env[atom]

    prefix = here.name_stack
    for eqn in jaxpr.eqns:
        info = eqn.source_info
        if prefix.stack:
            info = info.replace(name_stack=prefix + info.name_stack)
        tracers = [read(v) for v in eqn.invars]
        effs = rename_effects(eqn.effects, lambda v: env[v].val if v in env else v)
        outs = trace.emit_eqn(
            tracers, [v.aval for v in eqn.outvars], eqn.primitive, eqn.params, effs, info, eqn.ctx
        )
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def rename_effects(effs: Any, rename: Callable[[Var], Var]) -> Any:
    """The effects with those that speak of an input (a ref) speaking of what it is called now."""
    if not any(isinstance(e, effects.JaxprInputEffect) and isinstance(e.input, Var) for e in effs):
        return effs
    return {
        e.replace(rename(e.input))
        if isinstance(e, effects.JaxprInputEffect) and isinstance(e.input, Var)
        else e
        for e in effs
    }


def body_effects(jaxpr: Jaxpr) -> Any:
    """The effects of a jaxpr, from its equations."""
    return pe.make_jaxpr_effects(jaxpr.constvars, jaxpr.invars, jaxpr.outvars, jaxpr.eqns)


# ---------------------------------------------------------------- what a replacement emits


class Builder:
    """Collects the equations that a function emits when it is called on a program's own variables.

    `value(atom)` gives a value that stands for a variable of the program; `emit(eqn, f)` calls `f` with JAX recording
    into this builder, at the place in the source of `eqn`, and returns the new equations and the atoms that `f`
    returned. Array constants that `f` brings become constants, found in `constants()`.
    """

    def __init__(self, debug_info: Any) -> None:
        self._trace = pe.DynamicJaxprTrace(debug_info, parent_trace=core.trace_ctx.trace)
        self._tracers: dict[Var, Any] = {}
        self._consts: dict[Var, Any] = {}
        self._kept: list[Any] = []

    def value(self, atom: Atom) -> Value:
        if isinstance(atom, Literal):
            return atom.val
        tracer = self._tracers.get(atom)
        if tracer is None:
            tracer = self._trace.var_to_tracer(atom, source_info_util.new_source_info())
            self._tracers[atom] = tracer
        return tracer

    def emit(self, eqn: JaxprEqn, f: Callable[[], Any]) -> tuple[list[JaxprEqn], Any]:
        """Calls f; returns (new equations, what f returned); no equations when f returns None or raises."""
        frame = self._trace.frame
        try:
            with core.set_current_trace(self._trace), at_equation(eqn):
                result = f()
            if result is None:
                return [], None
            # Constants live as long as their tracers do: keep both.
            self._kept.append((result, list(frame.constid_to_tracer.values())))
            self._consts.update(frame.constvar_to_val)
            return frame.get_eqns(), result
        finally:
            frame.tracing_eqns = []

    def atom(self, value: Value) -> Atom:
        """The variable or literal that a value made under `emit` is called by in the new equations."""
        tracer = self._trace.to_jaxpr_tracer(value, source_info_util.new_source_info())
        self._kept.append(tracer)
        self._consts.update(self._trace.frame.constvar_to_val)
        return tracer.val

    def constants(self) -> dict[Var, Any]:
        return self._consts


@contextlib.contextmanager
def at_equation(eqn: JaxprEqn) -> Iterator[None]:
    """What is traced inside carries the source line, the name stack and the context of `eqn`."""
    info = eqn.source_info
    with (
        source_info_util.user_context(info.traceback, name_stack=info.name_stack),
        eqn.ctx.manager,
    ):
        yield


def same_weak_type(value: Value, aval: Any) -> Value:
    """`value` with the weak type of `aval`; shape and dtype are the caller's affair."""
    if getattr(typeof(value), "weak_type", None) == getattr(aval, "weak_type", None):
        return value
    return lax_internal._convert_element_type(value, aval.dtype, weak_type=aval.weak_type)


def lazily(thunk: Any, change: Callable[[Jaxpr], Jaxpr]) -> Any:
    """A custom_jvp or custom_vjp rule (a thunk that gives a jaxpr when asked) with its jaxpr changed."""

    def changed(*zeros: Any) -> Any:
        jaxpr, consts, *rest = thunk.call_wrapped(*zeros)
        new = change(jaxpr.with_consts(consts))
        return (new.with_consts(()), new.consts, *rest)

    return lu.wrap_init(pe._memoize(changed), debug_info=thunk.debug_info)


@contextlib.contextmanager
def in_shard_map(mesh: Any, manual_axes: frozenset[Any], check_vma: bool) -> Iterator[None]:
    """The axis environment in which the body of a shard_map is traced."""
    with (
        _extend_axis_env(mesh, manual_axes),
        use_abstract_mesh(_as_manual_mesh(mesh, manual_axes)),
        config._check_vma(check_vma),
    ):
        yield


# ---------------------------------------------------------------- where in the user's source


def name_stack(eqn: JaxprEqn) -> str:
    """The equation's name stack, relative to the jaxpr it stands in, as `a/b`."""
    return str(eqn.source_info.name_stack)


def source_frame(eqn: JaxprEqn) -> Any | None:
    """The frame of the user's source: the innermost outside installed packages, else the innermost outside jax."""
    frames = list(source_info_util.user_frames(eqn.source_info.traceback))
    for frame in frames:
        if "site-packages" not in frame.file_name and "dist-packages" not in frame.file_name:
            return frame
    return frames[0] if frames else None


def source_line(eqn: JaxprEqn) -> str:
    """`file.py:12 (function)` of the user's source, or ''."""
    frame = source_frame(eqn)
    if frame is None:
        return ""
    return f"{frame.file_name.rsplit('/', 1)[-1]}:{frame.start_line} ({frame.function_name})"


# ---------------------------------------------------------------- the differentiation boundary

Change = Callable[[Jaxpr], Jaxpr]
_cache_key = jax.make_user_context(None)
_active = threading.local()
_patch_lock = threading.Lock()
_patched = 0
_linearize = ad.linearize


@contextlib.contextmanager
def boundary(change: Change, key: Any) -> Iterator[None]:
    """While active, every function that is about to be differentiated in reverse is first rewritten by `change`.

    The outermost call of `jax.grad`, `value_and_grad` or `vjp` (and all that is built on them) has its function traced
    on its own, closed-over tracers becoming constants; `change` rewrites the jaxpr, and JAX differentiates the result.
    What is differentiated inside that function belongs to it, and is left alone. `key`, hashable, keeps programs
    traced under one boundary out of jit's caches for another: equal keys must mean equal changes.
    """
    global _patched
    with _patch_lock:
        if _patched == 0:
            ad.linearize = _linearize_at_boundary
        _patched += 1
    before = getattr(_active, "change", None)
    _active.change = change
    try:
        with _cache_key(key):
            yield
    finally:
        _active.change = before
        with _patch_lock:
            _patched -= 1
            if _patched == 0:
                ad.linearize = _linearize


def _linearize_at_boundary(
    fun: Callable[..., Any], primals: Any, has_aux: bool = False, is_vjp: bool = False, **rest: Any
) -> Any:
    change = getattr(_active, "change", None)
    if change is None or not is_vjp:
        return _linearize(fun, primals, has_aux=has_aux, is_vjp=is_vjp, **rest)
    _active.change = None
    try:
        fun = _rewritten(fun, primals, change)
        return _linearize(fun, primals, has_aux=has_aux, is_vjp=is_vjp, **rest)
    finally:
        _active.change = change


def _rewritten(fun: Callable[..., Any], primals: Any, change: Change) -> Callable[..., Any]:
    """`fun` as the evaluation of its rewritten jaxpr. Outputs that are not arrays (in aux) pass beside it."""
    tree, passed, arrays = None, [], []
    _, in_tree = jax.tree.flatten(primals.unflatten())

    def flat(*xs: Value) -> list[Value]:
        nonlocal tree, passed, arrays
        out, tree = jax.tree.flatten(fun(*jax.tree.unflatten(in_tree, xs)))
        arrays = [is_jax_value(x) for x in out]
        passed = [None if a else x for a, x in zip(arrays, out, strict=True)]
        return [x for a, x in zip(arrays, out, strict=True) if a]

    jaxpr = trace_flat(flat, [typeof(x) for x in primals], getattr(fun, "__name__", "model"))
    new = change(jaxpr)

    def evaluated(*args: Any) -> Any:
        outs = iter(eval_jaxpr(new, *jax.tree.leaves(args)))
        assert tree is not None
        return jax.tree.unflatten(
            tree, [next(outs) if a else x for a, x in zip(arrays, passed, strict=True)]
        )

    evaluated.__name__ = getattr(fun, "__name__", "model")
    return evaluated


def debug_info(name: str, arg_names: Sequence[str]) -> Any:
    """Names for a jaxpr's inputs."""
    return core.DebugInfo("xform", name, tuple(arg_names), None)


def _private_names() -> list[Any]:
    """Every private name used here, for the test that says what a new jax has moved."""
    return [
        _as_manual_mesh, _extend_axis_env, ad.linearize, ad_checkpoint, api_util, batching, config._check_vma,
        core.DebugInfo, core.trace_ctx, effects.JaxprInputEffect, hlo, lax_internal._convert_element_type,
        lu.wrap_init, pe.DynamicJaxprTrace, pe._memoize, pe.make_jaxpr_effects, pe.trace_to_jaxpr_dynamic,
        source_info_util.user_frames, tree_util, use_abstract_mesh,
    ]  # fmt: skip
