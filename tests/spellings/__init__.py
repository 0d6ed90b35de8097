"""Spellings of the operations that xform recognises, and look-alikes that it must leave alone.

One module an operation, each with two dicts by name: SPELLINGS, programs that are the operation, and
LOOKALIKES, each wrong in one place. No two spellings are the same program but for sizes.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Spelling:
    """A program `fn(*args)`; `count` times the operation, whose entry in `xform.raised` has what `expect`
    says.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    expect: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    count: int = 1


@dataclasses.dataclass(frozen=True)
class LookAlike:
    """A program that is not the operation. why: what its reason has to speak of (a regular expression), where
    it is near enough that it has to be declined; "" where silence will do.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    why: str = ""
