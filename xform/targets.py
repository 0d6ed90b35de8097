"""Targets of the command line: `module:factory`, where `factory(**options)` returns `(fn, args)`.

Also what stands in for arguments given as shapes when a program is to be run: `materialize`.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import importlib
import inspect
import os
import pkgutil
import re
import sys
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform.errors import PlanError
from xform.faults import summary, users_lines
from xform.higher_order import bodies, carries, operands
from xform.registry import unknown
from xform.roles import Roles
from xform.roles.inputs import kinds
from xform.trace import Jaxpr, Literal, Var, shape_of


def load(target: str, options: Sequence[str] = ()) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function and arguments of `module:factory` with options `key=value`.

    The current directory is searched as well. Raises PlanError, saying what there is, for a module, a factory
    or an option that does not exist, for a factory that fails, and for what is no `(fn, args)` to be traced.
    """
    module_name, colon, name = target.partition(":")
    if not (colon and name and module_name) or module_name.startswith("."):
        raise PlanError(f"target {target!r}: write module:factory, such as xform.models.llama:train_step")
    module = _module(target, module_name)
    factory = getattr(module, name, None)
    if not callable(factory):
        names = [n for n, v in vars(module).items() if _is_factory(v, module_name) and not n.startswith("_")]
        near = difflib.get_close_matches(name, names, 3)
        guess = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(names) or 'none'}"
        raise PlanError(f"target {target!r}: {module_name} has no factory {name!r}; {guess}")
    keywords = dict(_option(o) for o in options)
    _check_options(target, factory, keywords)
    try:
        made = factory(**keywords)
    except SystemExit as error:
        raise PlanError(f"target {target!r}: its factory exits: {error}") from error
    except Exception as error:
        given = "".join(f" -s {option}" for option in options)
        raise PlanError(f"target {target}{given}: {_failure(error, keywords)}") from error
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0])):
        raise PlanError(f"target {target!r} gave {type(made).__name__}; a factory returns (fn, args)")
    fn, args = made
    if not isinstance(args, tuple | list):
        raise PlanError(
            f"target {target!r}: args are a tuple, of one argument too: (fn, (x,)); not {type(args).__name__}"
        )
    _check_arguments(target, fn, args)
    return fn, tuple(args)


def _module(target: str, name: str) -> types.ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except SystemExit as error:
        raise PlanError(f"target {target!r}: importing {name} exits: {error}") from error
    except Exception as error:  # whatever a user's module raises
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is None or not f"{name}.".startswith(f"{missing}."):
            lines = "".join(f"\n{line}" for line in users_lines(error))
            raise PlanError(
                f"target {target!r}: {name} cannot be imported: {summary(error)}{lines}"
            ) from error
    if os.sep in name or name.endswith(".py"):
        dotted = name.removesuffix(".py").strip("./").replace(os.sep, ".")
        raise PlanError(f"target {target!r}: name the module, not its file: {dotted}:{target.split(':')[1]}")
    parent, _, last = name.rpartition(".")
    beside = getattr(sys.modules.get(parent), "__path__", [os.getcwd()] if not parent else [])
    near = difflib.get_close_matches(last, [each.name for each in pkgutil.iter_modules(beside)], 1)
    guess = f"; did you mean {parent}{'.' if parent else ''}{near[0]}?" if near else ""
    raise PlanError(f"target {target!r}: there is no module {missing!r}{guess}")


def _is_factory(value: Any, module: str) -> bool:
    """Whether a module means it as one: a function of its own, or made by functools.partial."""
    own = isinstance(value, types.FunctionType) and value.__module__ == module
    return own or isinstance(value, functools.partial)


def _option(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise PlanError(f"-s {text}: write key=value")
    if value.lower() in ("true", "false"):
        return key, value.lower() == "true"
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


def _check_options(target: str, factory: Callable[..., Any], keywords: Mapping[str, Any]) -> None:
    """Names an option that the factory does not take, or one that it needs."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # it has none that Python can tell
        return
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    needed = [p.name for p in parameters if p.default is p.empty and p.name in named]
    for key in keywords:
        if key not in named and not any(p.kind is p.VAR_KEYWORD for p in parameters):
            raise unknown("option", key, named, f"target {target!r}")
    for key in needed:
        if key not in keywords:
            raise PlanError(f"target {target!r}: it needs the option {key}: -s {key}=VALUE")


def _failure(error: Exception, keywords: Mapping[str, Any]) -> str:
    """What is said of an exception in a factory; of an option it hands on to a dataclass, which there are."""
    found = re.fullmatch(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'.*", str(error))
    if isinstance(error, TypeError) and found and found[2] in keywords:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        for value in frame.f_globals.values():
            cls = vars(value).get(found[1]) if isinstance(value, types.ModuleType) else value
            if isinstance(cls, type) and cls.__name__ == found[1] and dataclasses.is_dataclass(cls):
                return str(unknown("option", found[2], [field.name for field in dataclasses.fields(cls)]))
    if type(error) is ValueError:
        return str(error)  # the factory's own word on its options
    return "\n".join([f"its factory failed: {summary(error)}", *users_lines(error)])


def _check_arguments(target: str, fn: Callable[..., Any], args: Sequence[Any]) -> None:
    """That `fn` takes as many, and that each of their leaves is something jax can trace."""
    try:
        inspect.signature(fn).bind(*args)
    except TypeError as error:
        raise PlanError(f"target {target!r}: fn does not take the {len(args)} arguments: {error}") from None
    except ValueError:  # it has no signature that Python can tell
        pass
    for path, leaf in jax.tree_util.tree_flatten_with_path(tuple(args))[0]:
        try:
            jax.typeof(leaf)
        except TypeError:
            raise PlanError(
                f"target {target!r}: the argument {jax.tree_util.keystr(path)} is {_described(leaf)}: "
                "arguments are arrays or ShapeDtypeStructs; let fn close over what is none"
            ) from None


def _described(leaf: Any) -> str:
    return repr(leaf) if isinstance(leaf, str | bytes) else f"a {type(leaf).__name__}"


# ---------------------------------------------------------------- arguments to run with


def materialize(args: Any, jaxpr: Jaxpr, roles: Roles, seed: int = 0) -> Any:
    """Arrays for the ShapeDtypeStructs among `args`, a tree whose leaves are the inputs of `jaxpr` in order.

    Float data is between 0 and 1; parameters are normal, scaled by the square root of what they are
    contracted over so that activations keep their size; optimizer state is zero, as at the start; integers
    are below what they index (a vocabulary), or 0 and 1 where they index nothing (segments, masks). Arrays
    are left as they are.
    """
    leaves, tree = jax.tree.flatten(args)
    bounds = index_bounds(jaxpr)
    rng = np.random.default_rng(seed)
    made = []
    for x, var, kind in zip(leaves, jaxpr.invars, kinds(jaxpr, roles), strict=True):
        made.append(_array(x, kind, bounds.get(var, 2), rng) if isinstance(x, jax.ShapeDtypeStruct) else x)
    return jax.tree.unflatten(tree, made)


def _array(x: jax.ShapeDtypeStruct, kind: str, bound: int, rng: np.random.Generator) -> Any:
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        keys = jax.random.split(jax.random.key(int(rng.integers(1 << 30))), int(np.prod(x.shape)))
        return keys.reshape(x.shape)
    if kind == "optimizer":
        return jnp.zeros(x.shape, x.dtype)
    if jnp.issubdtype(x.dtype, jnp.bool_):
        return jnp.asarray(rng.integers(0, 2, x.shape), x.dtype)
    if jnp.issubdtype(x.dtype, jnp.integer):
        return jnp.asarray(rng.integers(0, max(bound, 1), x.shape), x.dtype)
    if kind == "data":
        return jnp.asarray(rng.random(x.shape, np.float32), x.dtype)
    values = rng.standard_normal(x.shape, np.float32)
    if len(x.shape) < 2:
        return jnp.asarray(1 + 0.1 * values, x.dtype)
    return jnp.asarray(values * float(np.prod(x.shape[:-1])) ** -0.5, x.dtype)


_MOVES = {
    "reshape",
    "broadcast_in_dim",
    "squeeze",
    "expand_dims",
    "transpose",
    "copy",
    "slice",
    "split",
    "rev",
}
_KEEPS_INDICES = _MOVES | {
    "convert_element_type",
    "concatenate",
    "select_n",
    "add",
    "sub",
    "max",
    "min",
    "clamp",
}
_KEEPS_INDICES |= {"pad", "stop_gradient", "sharding_constraint"}


def index_bounds(jaxpr: Jaxpr) -> dict[Var, int]:
    """For the integer inputs that index something (a table, the classes of a one-hot), how large it is."""
    return _bounds(jaxpr)


def _bounds(jaxpr: Jaxpr, outs: Sequence[int | None] = ()) -> dict[Var, int]:
    bound: dict[Var, int] = {}

    def limit(atom: Any, size: int | None) -> None:
        if size is not None and not isinstance(atom, Literal):
            bound[atom] = min(size, bound.get(atom, size))

    for var, size in zip(jaxpr.outvars, outs, strict=False):
        limit(var, size)
    counted: dict[Any, int] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "iota":
            counted[eqn.outvars[0]] = eqn.params["shape"][eqn.params["dimension"]]
        elif eqn.primitive.name in _MOVES | {"convert_element_type"}:
            operand = eqn.invars[0]
            if not isinstance(operand, Literal) and operand in counted:
                counted[eqn.outvars[0]] = counted[operand]
    for eqn in reversed(jaxpr.eqns):
        name = eqn.primitive.name
        if name == "gather":
            numbers = eqn.params["dimension_numbers"]
            sizes = [shape_of(eqn.invars[0])[d] for d in numbers.start_index_map]
            limit(eqn.invars[1], min(sizes, default=None))
        elif name in ("dynamic_slice", "dynamic_update_slice"):
            first = 1 if name == "dynamic_slice" else 2
            for index, size in zip(eqn.invars[first:], shape_of(eqn.invars[0]), strict=False):
                limit(index, size)
        elif name in ("eq", "ne"):
            for a, b in (eqn.invars, reversed(eqn.invars)):
                if not isinstance(b, Literal) and b in counted:
                    limit(a, counted[b])
        elif bodies(eqn):
            for number, body in enumerate(bodies(eqn)):
                wanted = [bound.get(v) for v in eqn.outvars] if len(body.outvars) == len(eqn.outvars) else []
                inside = _bounds(body, [] if carries(eqn, number) else wanted)
                for var, position in zip(body.invars, operands(eqn, number), strict=True):
                    if position is not None:
                        limit(eqn.invars[position], inside.get(var))
        elif name in _KEEPS_INDICES:
            sizes = [bound[v] for v in eqn.outvars if v in bound]
            for v in eqn.invars:
                if sizes and jnp.issubdtype(getattr(v.aval, "dtype", jnp.float32), jnp.integer):
                    limit(v, min(sizes))
    return {v: n for v, n in bound.items() if v in set(jaxpr.invars)}
