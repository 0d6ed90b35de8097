"""Number formats of eight bits and fewer: their range, and how numbers become codes and back.

    FORMATS["int8"].encode([0.2, -3.7, 200.0])  ->  [0, -4, 127]      int8
    FORMATS["nf4"].decode([0, 7, 15])           ->  [-1.0, 0.0, 1.0]

Integers are symmetric around zero and reach half a step beyond their largest code, so that the largest number
is rounded to it. Source of nf4: Dettmers et al. 2023, appendix E; of mxfp8: OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from xform.trace import Value

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023,
    1.0,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Format:
    """stored: the dtype of codes. bound: the largest magnitude that is encoded. bits: of integers, where they
    are fewer than the dtype's. block: how many numbers have to share a scale; the scale is a power of two.
    table: what codes stand for, where that is no number of the dtype.
    """

    name: str
    stored: Any
    bound: float
    bits: int = 0
    block: int = 0
    table: tuple[float, ...] = ()

    @property
    def is_integer(self) -> bool:
        return bool(self.bits)

    @property
    def keeps_nan(self) -> bool:
        """Whether there is a code of what is no number; else that becomes zero."""
        return not (self.is_integer or self.table)

    @property
    def range(self) -> tuple[float, float]:
        """The least and the largest code of an integer."""
        return -(2.0 ** (self.bits - 1)), 2.0 ** (self.bits - 1) - 1

    def encode(self, x: Value, noise: Value | None = None) -> Value:
        """Codes of numbers that were divided by their scale; noise, between -1/2 and 1/2, is added before
        rounding to integers. What is out of range becomes the nearest code.
        """
        if self.table:
            table = jnp.asarray(self.table, jnp.float32)
            x = jnp.where(jnp.isnan(x), 0.0, x).clip(self.table[0], self.table[-1])
            return jnp.argmin(jnp.abs(table - x[..., None]), axis=-1).astype(self.stored)
        if not self.is_integer:
            info = jnp.finfo(self.stored)
            return x.clip(info.min.astype(x.dtype), info.max.astype(x.dtype)).astype(self.stored)
        if noise is not None:
            x = x.astype(jnp.float32) + noise
        low, high = self.range
        return jnp.round(x).clip(low, high).astype(self.stored)

    def decode(self, codes: Value, dtype: Any) -> Value:
        """The numbers that codes stand for, before their scale."""
        if not self.table:
            return codes.astype(dtype)
        # By their bits, not by a lookup, which a TPU does number by number and in a pass of its own.
        values = [jnp.asarray(x, jnp.float32).astype(dtype) for x in self.table]
        bits, place = codes.astype(jnp.uint8), 1
        while len(values) > 1:
            is_set = (bits & place) != 0
            pairs = zip(values[::2], values[1::2], strict=True)
            values, place = [jnp.where(is_set, upper, lower) for lower, upper in pairs], 2 * place
        return values[0]


def bits(dtype: Any) -> int:
    """Of a number of a dtype, also where these are four, which numpy takes for eight; eight of a boolean."""
    info = jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo
    return int(info(dtype).bits) if jnp.issubdtype(dtype, jnp.number) else 8


def _integer(bits: int) -> Format:
    return Format(f"int{bits}", jnp.int4 if bits <= 4 else jnp.int8, 2.0 ** (bits - 1) - 0.5, bits)


def _float(name: str, dtype: Any, block: int = 0) -> Format:
    return Format(name, dtype, float(jnp.finfo(dtype).max), block=block)


FORMATS: dict[str, Format] = {
    **{f"int{bits}": _integer(bits) for bits in range(8, 1, -1)},
    "fp8_e4m3": _float("fp8_e4m3", jnp.float8_e4m3fn),
    "fp8_e5m2": _float("fp8_e5m2", jnp.float8_e5m2),
    "mxfp8": _float("mxfp8", jnp.float8_e4m3fn, block=32),
    "nf4": Format("nf4", jnp.uint4, 1.0, table=NF4),
}
"""The formats by name."""
