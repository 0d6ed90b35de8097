"""Functions to jaxprs and back, and the boundary where a function is about to be differentiated.

This is the one module that touches jax's private names; everything else takes them from here, and one test
imports them all, so that a new jax shows at once what moved. A program is traced on avals
(`ShapeDtypeStruct`s lose explicit shardings) and carried over equation by equation: `inline` copies a jaxpr
into the trace at hand without binding anything again, and a `Builder` collects what a replacement emits by
calling JAX.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import config, core, dispatch, dtypes, effects, source_info_util
from jax._src import linear_util as lu
from jax._src.core import DropVar, Jaxpr, JaxprEqn, Literal, ShapedArray, Tracer, Var
from jax._src.interpreters import ad, batching, mlir, pxla
from jax._src.interpreters import partial_eval as pe
from jax._src.lax import lax as lax_internal
from jax._src.mesh import get_abstract_mesh, use_abstract_mesh
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
    "at_equation",
    "at_line",
    "at_source",
    "bind",
    "body_effects",
    "boundary",
    "check_jaxpr",
    "current_trace",
    "equation_type",
    "eval_jaxpr",
    "fitted",
    "has_effects",
    "in_shard_map",
    "in_trace",
    "inline",
    "lazily",
    "mlir",
    "name_stack",
    "new_operation_primitive",
    "plain_aval",
    "pxla",
    "rename_effects",
    "same_constant",
    "shape_of",
    "source_frame",
    "source_line",
    "splash",
    "trace_context",
    "trace_flat",
    "typeof",
    "without_dead",
    "without_vma",
]

Atom = Var | Literal
Value = Any
"""What a rule handles: a tracer, an array or a scalar."""

typeof = core.typeof
check_jaxpr = core.check_jaxpr


def shape_of(v: Any) -> tuple[int, ...]:
    """The shape of a variable; () for what has none."""
    return getattr(v.aval, "shape", ())


def trace_context() -> Any:
    """Everything of jax's configuration that a trace depends on; hashable."""
    return config.trace_context()


def plain_aval(aval: Any) -> Any:
    """The type without a mesh whose axes are all automatic: that says where a value lies, not what it is."""
    mesh = aval.sharding.mesh if isinstance(aval, ShapedArray) else None
    if mesh is None or mesh.empty or not mesh.are_all_axes_auto:
        return aval
    return ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type, memory_space=aval.memory_space)


# ---------------------------------------------------------------- functions to jaxprs, and back


def trace_flat(
    fn: Callable[..., Sequence[Value]],
    avals: Sequence[Any],
    name: str,
    arg_names: Sequence[str] | None = None,
) -> Jaxpr:
    """Traces `fn`, from values of types `avals` to a flat sequence, to a jaxpr with its constants.

    Values that `fn` closes over, tracers of an enclosing trace included, become its constants. Never cached.
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

    Sources, name stacks, effects and contexts are kept. Binds where the current trace records no jaxpr.
    """
    trace = core.trace_ctx.trace
    if not isinstance(trace, pe.DynamicJaxprTrace):
        return eval_jaxpr(jaxpr, *args)
    here = source_info_util.current()
    env: dict[Var, Any] = {}
    for var, value in zip(jaxpr.all_invars, [*jaxpr.consts, *args], strict=True):
        env[var] = trace.to_jaxpr_tracer(dtypes.canonicalize_value(value), source_info=here)

    def read(atom: Atom) -> Any:
        return _literal(trace, atom) if isinstance(atom, Literal) else env[atom]

    trace.frame.is_high |= jaxpr.is_high
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


def bind(eqn: JaxprEqn, args: Sequence[Value], params: dict[str, Any]) -> list[Value]:
    """The equation's primitive applied to `args` with `params`, under whatever transformation is active."""
    primitive, trace = eqn.primitive, core.trace_ctx.trace
    bound = primitive.get_bind_params(params)
    if "subfuns" in bound and isinstance(trace, pe.DynamicJaxprTrace):
        # A custom rule or a shard_map: to bind it would trace its body anew, and lose what is constant to it.
        here = source_info_util.current()
        tracers = [trace.to_jaxpr_tracer(dtypes.canonicalize_value(x), here) for x in args]
        avals, effs = equation_type(eqn.replace(invars=[t.val for t in tracers], params=params))
        return trace.emit_eqn(tracers, avals, primitive, params, effs, here)
    outs = primitive.bind(*args, **bound)
    return list(outs) if primitive.multiple_results else [outs]


def _literal(trace: Any, literal: Literal) -> Any:
    """A tracer for a literal, of the literal's own type: its value alone may have forgotten to be weak."""
    return pe.DynamicJaxprTracer(trace, literal.aval, literal, source_info_util.new_source_info())


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


def equation_type(eqn: JaxprEqn) -> tuple[list[Any], Any]:
    """The types of an equation's results, and its effects, that follow from its operands and parameters."""
    primitive, avals = eqn.primitive, [v.aval for v in eqn.invars]
    with eqn.ctx.manager:
        typecheck = core.custom_typechecks.get(primitive)
        if typecheck is not None:
            outs, effs = typecheck(
                lambda: (core.JaxprPpContext(), core.JaxprPpSettings()), *eqn.invars, **eqn.params
            )
        else:
            outs, effs = primitive.abstract_eval(*avals, **eqn.params)
    outs = list(outs) if primitive.multiple_results or typecheck is not None else [outs]
    return outs, core.resolve_input_effects(effs, eqn.invars)


# ---------------------------------------------------------------- a primitive that holds its own program


def new_operation_primitive(
    name: str,
    on_tpu: Callable[..., Sequence[Value]],
    elsewhere: Callable[..., Sequence[Value]],
    jvp: Callable[..., Any],
    batch: Callable[..., Any],
    transpose: Callable[..., Any],
) -> core.Primitive:
    """A primitive whose results are those of its parameter `jaxpr`; what runs, by platform, is given.

    jvp: of primals and tangents, no symbolic zeros. batch: of operands and their mapped dimensions.
    transpose: of a linear one, which takes one operand: the operand's gradient, of the results'.
    """
    primitive = core.Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(functools.partial(dispatch.apply_primitive, primitive))
    primitive.def_abstract_eval(lambda *_, jaxpr, **__: [v.aval for v in jaxpr.outvars])
    mlir.register_lowering(primitive, mlir.lower_fun(elsewhere, multiple_results=True))
    mlir.register_lowering(primitive, mlir.lower_fun(on_tpu, multiple_results=True), platform="tpu")

    def instantiated(primals: Sequence[Value], tangents: Sequence[Value], **params: Any) -> Any:
        return jvp(primals, [ad.instantiate_zeros(t) for t in tangents], **params)

    def transposed(cotangents: Sequence[Value], operand: Any, **params: Any) -> Any:
        del operand
        return [transpose(map(ad.instantiate_zeros, cotangents), **params)]

    ad.primitive_jvps[primitive] = instantiated
    ad.primitive_transposes[primitive] = transposed
    batching.primitive_batchers[primitive] = batch
    return primitive


def splash() -> Any:
    """The splash attention kernels that JAX ships, one by one: the public function of the whole has its own
    rule of differentiation and its own masks. Imported on use, since Pallas takes a while.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as masks

    return types.SimpleNamespace(
        forward=kernels._splash_attention_forward,
        dq=kernels._splash_attention_bwd_dq,
        dkv=kernels._splash_attention_bwd_dkv,
        BlockSizes=kernels.BlockSizes,
        QKVLayout=kernels.QKVLayout,
        SegmentIds=kernels.SegmentIds,
        MaskInfo=masks.MaskInfo,
    )


def without_vma() -> contextlib.AbstractContextManager[Any]:
    """Where JAX does not ask over which mesh axes values vary, which kernels of libraries do not say."""
    return config._check_vma(False)


# ---------------------------------------------------------------- what a replacement emits


class Builder:
    """Collects the equations that a function emits when it is called on a program's own variables.

    `value(atom)` gives a value that stands for a variable of the program; `emit(eqn, f)` calls `f` with JAX
    recording into this builder, at the place in the source of `eqn`, and returns the new equations and the
    atoms that `f` returned. Array constants that `f` brings become constants, found in `constants()`.
    """

    def __init__(self, debug_info: Any) -> None:
        self._trace = pe.DynamicJaxprTrace(debug_info, parent_trace=core.trace_ctx.trace)
        # Held strongly: a constant outlives the tracer a rule had of it, since the equations name it.
        self._trace.frame.constid_to_tracer = {}  # type: ignore[assignment]
        self._tracers: dict[Var, Any] = {}

    def value(self, atom: Atom) -> Value:
        if isinstance(atom, Literal):
            return atom.val if typeof(atom.val) == atom.aval else _literal(self._trace, atom)
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
            return frame.get_eqns(), result
        finally:
            frame.tracing_eqns = []

    def atom(self, value: Value) -> Atom:
        """The variable or literal that a value made under `emit` is called by in the new equations."""
        value = dtypes.canonicalize_value(value)
        return self._trace.to_jaxpr_tracer(value, source_info_util.new_source_info()).val

    def constants(self) -> dict[Var, Any]:
        return self._trace.frame.constvar_to_val


@contextlib.contextmanager
def at_equation(eqn: JaxprEqn) -> Iterator[None]:
    """What is traced inside carries the source line, the name stack and the context of `eqn`."""
    info = eqn.source_info
    with (
        source_info_util.user_context(info.traceback, name_stack=info.name_stack),
        eqn.ctx.manager,
    ):
        yield


def at_line(eqn: JaxprEqn) -> contextlib.AbstractContextManager[Any]:
    """What is traced inside carries the source line of `eqn`, and the name stack at hand."""
    return source_info_util.user_context(eqn.source_info.traceback)


@contextlib.contextmanager
def at_source(eqn: JaxprEqn, prefix: str = "") -> Iterator[None]:
    """As `at_equation`, but inside a manual region: the mesh stays the one at hand. prefix: name scopes
    around the equation, as `a/b`, that its own name stack does not have.
    """
    stack, mesh = eqn.source_info.name_stack, get_abstract_mesh()
    for name in reversed(prefix.split("/") if prefix else []):
        stack = source_info_util.NameStack((source_info_util.Scope(name), *stack.stack))
    with (
        source_info_util.user_context(eqn.source_info.traceback, name_stack=stack),
        eqn.ctx.manager,
        use_abstract_mesh(mesh),
    ):
        yield


def current_trace() -> Any:
    """The trace that JAX's operations are recorded in at this moment."""
    return core.trace_ctx.trace


def in_trace(trace: Any) -> contextlib.AbstractContextManager[Any]:
    """JAX's operations are recorded in `trace`, one around the current one: a loop's body, say, has something
    done before the loop.
    """
    return core.set_current_trace(trace)


def fitted(value: Value, aval: Any) -> Value:
    """`value` with the weak type of `aval`, and varying over the mesh axes that `aval` varies over."""
    now = typeof(value)
    if getattr(now, "weak_type", None) != getattr(aval, "weak_type", None):
        value = lax_internal._convert_element_type(value, aval.dtype, weak_type=aval.weak_type)
    if isinstance(aval, ShapedArray) and isinstance(now, ShapedArray):
        missing = aval.manual_axis_type.varying - now.manual_axis_type.varying
        if missing and config._check_vma.value:
            value = jax.lax.pcast(value, tuple(sorted(missing)), to="varying")
    return value


def same_constant(a: Any, b: Any) -> bool:
    """Whether two constants or literals are the same object or, on the host, the same value to the bit."""
    if a is b:
        return True
    if type(a) is not type(b) or not isinstance(a, (bool, int, float, complex, np.ndarray, np.generic)):
        return False
    x, y = np.asarray(a), np.asarray(b)
    return x.shape == y.shape and x.dtype == y.dtype and x.tobytes() == y.tobytes()


def lazily(thunk: Any, change: Callable[[Jaxpr], Jaxpr]) -> Any:
    """A custom_jvp or custom_vjp rule (a thunk that gives a jaxpr when asked) with its jaxpr changed."""

    def changed(*zeros: Any) -> Any:
        jaxpr, consts, *rest = thunk.call_wrapped(*zeros)
        new = change(jaxpr.with_consts(consts))
        return (new.with_consts(()), new.consts, *rest)

    return lu.wrap_init(pe._memoize(changed), debug_info=thunk.debug_info)


def has_effects(eqn: JaxprEqn) -> bool:
    """Whether an equation does something besides computing its results; that it names a mesh axis is
    nothing.
    """
    return any(not isinstance(e, core.NamedAxisEffect) for e in eqn.effects)


def without_dead(jaxpr: Jaxpr) -> Jaxpr:
    """The program without equations that nothing needs, at every depth; its inputs and results stay."""
    made, _ = pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    return made


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
    """The frame of the user's source: the innermost outside installed packages, else outside jax."""
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

Change = Callable[[Jaxpr, Sequence[Value]], Jaxpr]
"""The program that is about to be differentiated, and the values it is applied to, give the program to take
instead.
"""
_cache_key = jax.make_user_context(None)
_active = threading.local()
_patch_lock = threading.Lock()
_patched = 0
_autodiff: Any = ad
_linearize, _backward_pass = ad.linearize, ad.backward_pass3


@contextlib.contextmanager
def boundary(change: Change, key: Any) -> Iterator[None]:
    """While active, `change` rewrites every function that is about to be differentiated in reverse.

    The outermost call of `jax.grad`, `value_and_grad` or `vjp` (and all that is built on them) has its
    function traced on its own, closed-over tracers becoming constants; `change` is given the jaxpr and what
    it is applied to, rewrites it, and JAX differentiates the result. What is differentiated inside that
    function, or by a custom rule on the way back, belongs to it and is left alone. `key`, hashable, keeps
    programs traced under one boundary out of jit's caches for another: a function that jit has traced under
    an equal key is not traced again, and `change` not called.
    """
    global _patched
    with _patch_lock:
        if _patched == 0:
            _autodiff.linearize = _linearize_at_boundary
            _autodiff.backward_pass3 = _backward_pass_inside
        _patched += 1
    try:
        with _acting(change, ("boundary", key)):
            yield
    finally:
        with _patch_lock:
            _patched -= 1
            if _patched == 0:
                _autodiff.linearize, _autodiff.backward_pass3 = _linearize, _backward_pass


@contextlib.contextmanager
def _acting(change: Change | None, key: Any) -> Iterator[None]:
    before = getattr(_active, "now", (None, None))
    _active.now = (change, key)
    try:
        with _cache_key(key):
            yield
    finally:
        _active.now = before


@contextlib.contextmanager
def _inside() -> Iterator[None]:
    """Where the boundary is behind us: nothing more is rewritten, and what jit traces here it keeps apart."""
    change, key = getattr(_active, "now", (None, None))
    if change is None:
        yield
    else:
        with _acting(None, ("inside", key)):
            yield


def _linearize_at_boundary(
    fun: Callable[..., Any], primals: Any, has_aux: bool = False, is_vjp: bool = False, **rest: Any
) -> Any:
    change, _ = getattr(_active, "now", (None, None))
    if change is None or not is_vjp:
        return _linearize(fun, primals, has_aux=has_aux, is_vjp=is_vjp, **rest)
    with _inside():
        fun = _rewritten(fun, primals, change)
        return _linearize(fun, primals, has_aux=has_aux, is_vjp=is_vjp, **rest)


def _backward_pass_inside(*args: Any, **kwargs: Any) -> Any:
    with _inside():
        return _backward_pass(*args, **kwargs)


def _rewritten(fun: Callable[..., Any], primals: Any, change: Change) -> Callable[..., Any]:
    """`fun` as the evaluation of its rewritten jaxpr. Outputs that were never traced pass beside it."""
    tree: Any = None
    outs: list[Any] = []
    with_paths, in_tree = jax.tree_util.tree_flatten_with_path(primals.unflatten())

    def flat(*xs: Value) -> list[Value]:
        nonlocal tree, outs
        outs, tree = jax.tree.flatten(fun(*jax.tree.unflatten(in_tree, xs)))
        traced = [x for x in outs if isinstance(x, Tracer)]
        outs = [_TRACED if isinstance(x, Tracer) else x for x in outs]
        return traced

    name = getattr(fun, "__name__", "model")
    names = ["args" + jax.tree_util.keystr(path) for path, _ in with_paths]
    values = list(primals)
    new = change(trace_flat(flat, [typeof(x) for x in values], name, names), values)

    def evaluated(*args: Any) -> Any:
        traced = iter(eval_jaxpr(new, *jax.tree.leaves(args)))
        return jax.tree.unflatten(tree, [next(traced) if x is _TRACED else x for x in outs])

    evaluated.__name__ = name
    return evaluated


_TRACED = object()


def _private_names() -> list[Any]:
    """Every private name used here, for the test that says what a new jax has moved."""
    return [
        _as_manual_mesh, _extend_axis_env, ad.backward_pass3, ad.linearize, config._check_vma,
        core.custom_typechecks, core.DebugInfo, dispatch.apply_primitive,
        ad.instantiate_zeros, ad.primitive_jvps, ad.primitive_transposes,
        batching.primitive_batchers, mlir.lower_fun,
        mlir.register_lowering, core.resolve_input_effects, core.trace_ctx,
        dtypes.canonicalize_value, effects.JaxprInputEffect, lax_internal._convert_element_type,
        lu.wrap_init, mlir.make_ir_context, pxla.create_compile_options,
        pxla.get_prop_to_input_output, pxla.maybe_concretize_mesh, pe.DynamicJaxprTrace,
        pe.DynamicJaxprTracer, pe._memoize, pe.make_jaxpr_effects, pe.trace_to_jaxpr_dynamic,
        source_info_util.user_frames, use_abstract_mesh, *vars(splash()).values(),
    ]  # fmt: skip
