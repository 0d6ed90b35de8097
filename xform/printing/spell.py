"""How types, literals, shardings and parameters are spelled: short, and the same in every process.

Two values that are spelled alike are taken to be equal: functions are named with what plain values they close
over, arrays have a digest.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from xform.trace import Jaxpr, Literal


@functools.lru_cache(maxsize=4096)
def type_text(aval: Any) -> str:
    """`bf16[16,128]`, with shardings and memory space where the type carries them."""
    short = getattr(aval, "str_short", None)
    return short(short_dtypes=True) if short is not None else str(aval)


def literal_text(literal: Literal) -> str:
    """A literal as a reader would write it: `2.0`, `True`; an array as its type and digest."""
    val = literal.val
    if getattr(val, "shape", ()) != ():
        return spell(val)
    try:
        return str(np.asarray(val)[()])
    except (TypeError, ValueError):
        return str(val)


# ---------------------------------------------------------------- values


def spec_text(spec: PartitionSpec) -> str:
    """`P('fsdp', None)`, with `?` for a dimension that is left to the compiler."""

    def one(part: Any) -> str:
        if part is PartitionSpec.UNCONSTRAINED:
            return "?"
        if isinstance(part, tuple):
            return "(" + ", ".join(repr(p) for p in part) + ("," if len(part) == 1 else "") + ")"
        return repr(part)

    return "P(" + ", ".join(one(part) for part in spec) + ")"


@functools.lru_cache(maxsize=4096)
def sharding_text(sharding: Any) -> str:
    """A sharding as its PartitionSpec, with the memory it asks for when that is not the device's own."""
    if not isinstance(sharding, NamedSharding):
        return _plain(str(sharding))
    text = spec_text(sharding.spec)
    return text if sharding.memory_kind in (None, "device") else f"{text} in {sharding.memory_kind}"


@functools.lru_cache(maxsize=4096)
def _sharding_exactly(sharding: Any) -> str:
    return f"{sharding_text(sharding)} on {spell(getattr(sharding, 'mesh', None))}"


def spell(value: Any) -> str:
    """One text for a parameter's value; values that differ are spelled differently, wherever they lie in
    memory."""
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return str(value)
    if isinstance(value, np.generic):
        return str(value)
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, PartitionSpec):
        return spec_text(value)
    if isinstance(value, (NamedSharding,)):
        return _sharding_exactly(value)
    if isinstance(value, (Mesh, AbstractMesh)):
        return "mesh(" + ", ".join(f"{name}={size}" for name, size in value.shape.items()) + ")"
    if isinstance(value, np.dtype):
        return value.name
    if isinstance(value, Jaxpr):
        return "{...}"
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        return "(" + ", ".join(spell(v) for v in value) + ("," if len(value) == 1 else "") + ")"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(spell(v) for v in value)) + "}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {spell(v)}" for k, v in value.items()) + "}"
    if hasattr(value, "__array__") and hasattr(value, "dtype"):
        return _array(value)
    if callable(value):
        return _function(value)
    return _plain(str(value))


def _plain(text: str) -> str:
    """The text on one line, without addresses."""
    return re.sub(r"\s+", " ", re.sub(r"(\bat )?0x[0-9a-f]+", "", text)).strip()


def _array(value: Any) -> str:
    shape = ",".join(str(n) for n in value.shape)
    kind = f"{value.dtype}[{shape}]"
    try:
        array = np.asarray(value)
        if array.size <= 8:
            return f"{kind} {array.tolist()}"
        return f"{kind}#{hashlib.blake2b(np.ascontiguousarray(array), digest_size=4).hexdigest()}"
    except Exception:  # a tracer, a key array: nothing but its type can be told
        return kind


def const_key(value: Any) -> str:
    """The exact text of a constant, all its bytes counted."""
    try:
        array = np.asarray(value)
        digest = hashlib.blake2b(np.ascontiguousarray(array), digest_size=16).hexdigest()
        return f"{array.dtype}{array.shape}{digest}"
    except Exception:  # a tracer or a key array: the same object is the same constant
        return f"{type(value).__name__}{id(value)}"


def _function(value: Any) -> str:
    """A function by its name and by what plain values it closes over, as a remat policy closes over its
    names."""
    if isinstance(value, functools.partial):
        args = [spell(a) for a in value.args] + [f"{k}={spell(v)}" for k, v in value.keywords.items()]
        return f"{_function(value.func)}({', '.join(args)})"
    wrapped = getattr(value, "callback_func", None)  # what a pure_callback calls
    if callable(wrapped):
        return _function(wrapped)
    info = getattr(value, "debug_info", None)
    if info is not None and hasattr(info, "func_src_info"):
        return str(info.func_src_info).split(" at ")[0]
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None) or type(value).__name__
    name = name.split(".<locals>")[0]
    cells = getattr(value, "__closure__", None) or ()
    names = getattr(getattr(value, "__code__", None), "co_freevars", ())
    plain = (bool, int, float, str, tuple, list, set, frozenset)
    held = []
    for label, cell in zip(names, cells, strict=False):
        try:
            content = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        if isinstance(content, plain):
            held.append(f"{label}={spell(content)}")
    return f"{name}({', '.join(held)})" if held else name
