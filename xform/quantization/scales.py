"""Which range of numbers a format's codes are laid over: calibrations, and the scale that follows.

    absmax          the largest magnitude          rms,3          three times the root of the mean square
    minmax          the least and the largest      percentile,99  of the magnitudes
    fixed,-2,2      this, for the whole array      absmax,0.9     nine tenths of it; larger ones are cut off
    delayed,16      the largest magnitude of 16 steps before      calibrated     the one of `step.calibrate`

The last two are kept from one step to the next (`kept`), one number for the whole array. Here they are
measured and marked, so that a program is right before it is told where they are kept.

A range has the dimensions of the array, of size one where numbers share a scale, of the number of blocks
where they do in blocks. Source: Qwix 0.1.8, `qarray.calibrate`, in its order of
operations, so that bits agree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from xform.errors import PlanError
from xform.ops.marks import APART
from xform.quantization.formats import Format
from xform.registry import unknown
from xform.trace import Value

METHODS = {
    "absmax": (0, 1),
    "minmax": (0, 1),
    "rms": (1, 1),
    "percentile": (1, 1),
    "fixed": (1, 2),
    "delayed": (1, 2),
    "calibrated": (0, 1),
}
"""The calibrations, and how many numbers they take, at least and at most."""

KEPT = ("delayed", "calibrated")
"""Those whose ranges are kept."""


@dataclasses.dataclass(frozen=True)
class Calibration:
    """method: a row of METHODS; numbers: what follows it."""

    method: str
    numbers: tuple[float, ...] = ()

    @property
    def is_kept(self) -> bool:
        """Whether its range is kept from one step to the next."""
        return self.method in KEPT

    @property
    def steps(self) -> int:
        """Of how many steps the largest magnitudes are kept; 0: no history is."""
        return int(self.numbers[0]) if self.method == "delayed" else 0

    @property
    def factor(self) -> float | None:
        """What the largest magnitude is multiplied with."""
        given = self.numbers[1:] if self.method == "delayed" else self.numbers
        return given[0] if given and self.method not in ("fixed", "percentile") else None

    @property
    def covers_all(self) -> bool:
        """Whether no number is out of range; or, of a delayed one, counts as such: what grew beyond the
        last steps' range keeps its gradient, as in Flax 0.12.12, `linen.fp8_ops`.
        """
        return self.method in ("absmax", "minmax", "delayed") and (self.factor or 1.0) >= 1.0


def calibration(text: str, where: str) -> Calibration:
    """`absmax`, `rms,3`, `fixed,-1,1`; raises PlanError that says what is wrong, and `where`."""
    method, *rest = (part.strip() for part in text.lower().split(","))
    if method not in METHODS:
        raise unknown("calibration", method, METHODS, where)
    try:
        numbers = tuple(float(part) for part in rest)
    except ValueError:
        raise PlanError(f"{where} = {text!r}: what follows {method} has to be numbers") from None
    least, most = METHODS[method]
    if not least <= len(numbers) <= most:
        many = f"{least}" if least == most else f"{least} to {most}"
        raise PlanError(f"{where} = {text!r}: {method} takes {many} numbers, as in {_EXAMPLES[method]!r}")
    if method == "fixed" and not _holds_zero(numbers):
        raise PlanError(f"{where} = {text!r}: the range has to hold zero, as in {_EXAMPLES[method]!r}")
    if method == "percentile" and not 0 < numbers[0] <= 100:
        raise PlanError(f"{where} = {text!r}: a percentile lies above 0 and is at most 100")
    if method == "delayed" and (numbers[0] < 1 or numbers[0] % 1):
        raise PlanError(f"{where} = {text!r}: delayed takes a number of steps, as in {_EXAMPLES[method]!r}")
    made = Calibration(method, numbers)
    if made.factor is not None and made.factor <= 0:
        raise PlanError(f"{where} = {text!r}: the factor has to be positive")
    return made


_EXAMPLES = {
    "absmax": "absmax,0.9",
    "minmax": "minmax,0.9",
    "rms": "rms,3",
    "percentile": "percentile,99.9",
    "fixed": "fixed,-1,1",
    "delayed": "delayed,1024",
    "calibrated": "calibrated,0.9",
}


def _holds_zero(numbers: Sequence[float]) -> bool:
    low, high = (-numbers[0], numbers[0]) if len(numbers) == 1 else numbers
    return low <= 0 <= high and low < high


ABSMAX = Calibration("absmax")


@dataclasses.dataclass(frozen=True)
class How:
    """How an array is quantized: the format, the dimensions along which each place has a scale of its own
    (`channels`), and those along which blocks of so many do. round: "nearest", or "stochastic". mark: what
    the largest magnitude is called in the program, where the range is kept.
    """

    format: Format
    channels: tuple[int, ...] = ()
    blocks: tuple[tuple[int, int], ...] = ()
    calibration: Calibration = ABSMAX
    round: str = "nearest"
    mark: str = ""

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Of the scale of an array of this shape."""
        blocks = dict(self.blocks)
        return tuple(
            n if d in self.channels else n // blocks[d] if d in blocks else 1 for d, n in enumerate(shape)
        )


Range = Mapping[str, Value]
"""{"absmax"}, or {"min", "max"}."""


def measured(x: Value, how: How) -> Range:
    """The range of an array."""
    method, numbers = how.calibration.method, how.calibration.numbers
    shape, blocks = how.shape(x.shape), dict(how.blocks)
    if method == "fixed":
        low, high = (-numbers[0], numbers[0]) if len(numbers) == 1 else numbers
        one = (1,) * x.ndim
        if low + high == 0:
            return {"absmax": jnp.full(one, high, x.dtype)}
        return {"min": jnp.full(one, low, x.dtype), "max": jnp.full(one, high, x.dtype)}
    axes, split, at = [], [], 0
    for d, n in enumerate(x.shape):
        if d in blocks:
            split += [n // blocks[d], blocks[d]]
            at += 1
        else:
            split.append(n)
        if d not in how.channels:
            axes.append(d + at)
    x = x.reshape(split)
    reduced: dict[str, Any] = {"axis": tuple(axes), "keepdims": True}

    def own(found: Value) -> Value:
        return checkpoint_name(found, APART) if how.mark == APART else found

    if method == "minmax":
        least, most = jnp.clip(jnp.min(x, **reduced), max=0), jnp.clip(jnp.max(x, **reduced), min=0)
        if numbers:
            least, most = least * numbers[0], most * numbers[0]
        return {"min": own(least.reshape(shape)), "max": own(most.reshape(shape))}
    if how.calibration.is_kept:
        found = checkpoint_name(jnp.max(jnp.abs(x)), how.mark)
        if how.calibration.factor is not None:
            found = found * how.calibration.factor
    elif method == "rms":
        found = jnp.sqrt(jnp.mean(jnp.square(x), **reduced)) * numbers[0]
    elif method == "percentile":
        found = jnp.percentile(jnp.abs(x).astype(jnp.float32), numbers[0], **reduced).astype(x.dtype)
    else:
        found = jnp.max(jnp.abs(x), **reduced)
        if numbers:
            found = found * numbers[0]
    return {"absmax": own(found.reshape(shape))}


def scale_of(found: Range, form: Format) -> tuple[Value, Value | None]:
    """The scale, and the code of zero where the range is not symmetric. Where all numbers are zero, one."""
    if "absmax" in found:
        scale = found["absmax"] / form.bound
    else:
        low, high = form.range
        scale = (found["max"] - found["min"]) / (high - low)
    least = jnp.sqrt(jnp.finfo(scale.dtype).tiny)
    scale = jnp.where(scale < least, jnp.ones_like(scale), scale)
    zero = None if "absmax" in found else form.encode(low - found["min"] / scale)
    if form.block:
        scale = (2 ** jnp.ceil(jnp.log2(scale))).astype(scale.dtype)
    return scale, zero


def noise_for(x: Value, seed: int) -> Value:
    """Numbers between -1/2 and 1/2, one an element. They follow from the array alone, by its largest and its
    least number, so that a step needs no key, and are the same on any mesh: no sum is taken.
    """
    ends = jnp.stack([jnp.max(x), jnp.min(x)]).astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(ends, jnp.uint32)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), bits[0]), bits[1])
    return jax.random.uniform(key, x.shape, jnp.float32, -0.5, 0.5)
