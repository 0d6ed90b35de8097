"""What passes keep from call to call, between a program and the `Placed` argument that it is part of.

A program takes it as its last inputs and gives it as its last results; the user's function knows nothing of
it. An argument that has more than the program keeps, one of a training step in an evaluation, is as good.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform.errors import PlanError
from xform.program import Argument, Program
from xform.sharding.placement import dtype_of
from xform.state import Layout, Placed
from xform.state.kept import Kept, Phase


def beginning(kept: Kept) -> Any:
    """The array before the first call."""
    return jnp.full(kept.aval.shape, kept.initial or 0.0, kept.aval.dtype)


def known(program: Program, value: Any) -> list[Any]:
    """What the program keeps, as an argument has it; its beginning, where that has none."""
    there = _there(value)
    return [there[k.path] if _fits(k, there) else beginning(k) for k in program.kept]


def started(program: Program, argument: Argument, value: Any) -> list[Any]:
    """What is kept with an argument that is placed. Raises PlanError where only data can tell it."""
    if not argument.layout.kept:
        return []
    if any(k.initial is None for k in _missing(program, value)):
        raise PlanError(_CALIBRATE.format("place"))
    return known(program, value)


def has_begun(program: Program, kept: Sequence[Any]) -> bool:
    """Whether what is kept from call to call has something in it, all of it: histories are no more empty."""
    own = [x for k, x in zip(program.kept, kept, strict=True) if k.initial is not None]
    return bool(own) and all((_here(x).max(-1) > 0).all() for x in own)


def _here(x: Any) -> np.ndarray:
    """The numbers, of what lies whole on every device, whether other processes have devices too or not."""
    return np.asarray(x.addressable_data(0) if isinstance(x, jax.Array) else x)


def phase_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Phase:
    """The phase of a call with these arguments."""
    begun = any(isinstance(x, Placed) and x.layout.begun for x in (*args, *kwargs.values()))
    return "run" if begun else "start"


def arrived(program: Program, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What a call of function `name` brings of what is kept. Raises PlanError where it does not; without a
    name, for a program that is only looked at, it is at its beginning.
    """
    value = _given(args, kwargs).get(program.keeper)
    missing = _missing(program, value)
    if missing and name:
        if any(k.initial is None for k in missing):
            raise PlanError(_CALIBRATE.format(name))
        raise PlanError(
            f"{name} keeps amax histories ({missing[0].path}, ...): state = step.place(state, ...) first, or "
            "step.init, and from then on what the step returns"
        )
    return dict(zip((k.path for k in program.kept), known(program, value), strict=True))


def layouts_of(
    program: Program, args: Sequence[Any], kwargs: Mapping[str, Any], new: Sequence[Any]
) -> tuple[dict[Any, Layout], dict[str, Any]]:
    """The layouts of the arguments that come as `Placed`, by the structure of the model's own tree; and what
    goes back to them of what is kept.
    """
    given = _given(args, kwargs)
    layouts: dict[Any, Layout] = {}
    kept: dict[str, Any] = {}
    for argument in sorted(program.arguments, key=lambda a: a.name == program.keeper):
        value = given.get(argument.name)
        if argument.is_stacked and isinstance(value, Placed):
            layout = argument.layout
            if layout.kept and program.returns:
                kept = _there(value) | dict(zip(layout.kept, new, strict=True))
                layout = dataclasses.replace(layout, kept=value.layout.kept, begun=value.layout.begun)
            layouts[layout.tree] = layout
    return layouts, kept


_CALIBRATE = (
    "{}: the plan takes calibrated ranges, and there are none: state = step.calibrate(state, batches) first, "
    "with tuples of the other arguments"
)


def _given(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int | str, Any]:
    given: dict[int | str, Any] = dict(enumerate(args))
    given.update(kwargs)
    return given


def _there(value: Any) -> dict[str, Any]:
    return value.kept if isinstance(value, Placed) else {}


def _missing(program: Program, value: Any) -> list[Kept]:
    there = _there(value)
    return [k for k in program.kept if not _fits(k, there)]


def _fits(kept: Kept, there: Mapping[str, Any]) -> bool:
    x = there.get(kept.path)
    return x is not None and (np.shape(x), dtype_of(x)) == (kept.aval.shape, kept.aval.dtype)
