"""Functions whose own rule for the derivative is gone: to differentiate one is an error, no wrong number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from xform.errors import PlanError
from xform.trace import Value


def undifferentiated(f: Callable[..., Sequence[Value]], why: str) -> Callable[..., tuple[Value, ...]]:
    """`f`, whose derivative raises PlanError(why)."""

    @jax.custom_jvp
    def function(*xs: Value) -> tuple[Value, ...]:
        return tuple(f(*xs))

    @function.defjvp
    def rule(*given: Any) -> Any:
        raise PlanError(why)

    return function
