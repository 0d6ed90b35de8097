"""Which memory a value lies in, the device's or the host's, as its type and its layout say.

Under a plan with a pass that keeps arguments on the host (its `hosts` is true), a function is traced as if
all lay on the device, wherever they do; the pass changes the types of the program's inputs and results, and
their layouts say the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import NamedSharding

from xform.trace import ShapedArray, typeof

Space = jax.memory.Space

HOST_KIND = "pinned_host"


def in_memory(aval: Any, space: Any) -> Any:
    """The type of the same array in another memory."""
    return aval.update(memory_space=space) if isinstance(aval, ShapedArray) else aval


def is_host(aval: Any) -> bool:
    """Whether a value of this type lies in the host's memory."""
    return getattr(aval, "memory_space", Space.Device) is Space.Host


def to(x: Any, space: Any) -> Any:
    """x in a memory; itself if it is there."""
    return x if is_host(typeof(x)) == (space is Space.Host) else jax.device_put(x, space)


def laid(x: Any, sharding: NamedSharding | None, aval: Any) -> Any:
    """x inside a program, constrained to a layout and in the memory of its type there."""
    x = to(x, Space.Host if is_host(aval) else Space.Device)
    return x if sharding is None else jax.lax.with_sharding_constraint(x, sharding)


def type_text(inputs: Iterable[Any], outputs: Iterable[Any]) -> str:
    """The types of a program's inputs and results, whatever memory they lie in. Each has an `aval`."""
    takes, gives = (_texts(each.aval for each in some) for some in (inputs, outputs))
    return f"({takes}) -> ({gives})"


def _texts(avals: Iterable[Any]) -> str:
    return ", ".join(in_memory(aval, Space.Device).str_short() for aval in avals)
