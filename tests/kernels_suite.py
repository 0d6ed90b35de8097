"""What every kernel is held to: a table of cases, and the checks that each goes through.

A `Case` is an operation with its operands. `agree` compares its kernel, in the interpreter, with its plain
form; `agree_under_vmap` and `agree_in_shard_map` the operation mapped, and cut over devices, with the plain
form of the whole. `compiled` has Mosaic compile a program for a chip that is not there.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xform import topologies
from xform.ops import Operation, apply

SLICES = {"v5e": "v5e-4", "v5p": "v5p-8", "v6e": "v6e-4"}
"""A small slice of each generation that kernels are compiled for."""


@dataclasses.dataclass(frozen=True)
class Case:
    """op: in the interpreter. tolerance: of the largest number of each result."""

    name: str
    op: Operation
    args: tuple[Any, ...]
    tolerance: float = 2e-6


def close(got: Sequence[Any], want: Sequence[Any], tolerance: float) -> None:
    """Each is within tolerance * the largest number in it, infinite where the other is, and nowhere NaN."""
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert not np.isnan(x).any()
        np.testing.assert_array_equal(np.isinf(x), np.isinf(y))
        x, y = (np.where(np.isinf(y), 0, each) for each in (x, y))
        assert np.abs(x - y).max(initial=0) <= tolerance * max(np.abs(y).max(initial=0), 1e-6)


@functools.cache
def plain(op: Operation) -> Callable[..., Any]:
    """The plain form, compiled once for all tests that run equal operations."""
    return jax.jit(op.plain)


def agree(case: Case) -> None:
    close(jax.jit(case.op.kernel)(*case.args), plain(case.op)(*case.args), case.tolerance)


def agree_under_vmap(case: Case) -> None:
    """Mapped over the first operand alone, and over all but the first."""
    for mapped in ([i == 0 for i in range(len(case.args))], [i > 0 for i in range(len(case.args))]):
        args = [jnp.stack([x, x[::-1]]) if m else x for x, m in zip(case.args, mapped, strict=True)]
        axes = [0 if m else None for m in mapped]
        got = jax.jit(jax.vmap(lambda *xs: apply(case.op, *xs), axes))(*args)
        close(got, jax.jit(jax.vmap(case.op.plain, axes))(*args), case.tolerance)


def agree_in_shard_map(case: Case, cut: str) -> None:
    """Each letter of `cut` over two devices."""
    mesh = Mesh(np.array(jax.devices()[: 2 ** len(cut)]).reshape((2,) * len(cut)), tuple(cut))

    def specs(arrays: Sequence[str]) -> tuple[PartitionSpec, ...]:
        return tuple(PartitionSpec(*(c if c in cut else None for c in dims)) for dims in arrays)

    region: Any = jax.shard_map(
        lambda *xs: tuple(apply(case.op, *xs)),
        mesh=mesh,
        in_specs=specs(case.op.operands),
        out_specs=specs(case.op.results),
    )
    close(jax.jit(region)(*case.args), plain(case.op)(*case.args), case.tolerance)


def compiled(chip: str, fn: Callable[..., Any], args: Sequence[Any], spec: PartitionSpec) -> tuple[Any, int]:
    """The program in a shard_map over the chips of a small slice, all operands and results laid out by `spec`
    over the axis "x"; and how many Mosaic kernels it has.
    """
    topologies.prepare_environment()
    mesh = Mesh(np.ravel(topologies.parse(SLICES[chip]).devices()), ("x",))
    region: Any = jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec)
    laid = NamedSharding(mesh, spec)
    shaped = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=laid) for x in args]
    made = jax.jit(region).lower(*shaped).compile()
    return made, len(re.findall(r'custom_call_target="tpu_custom_call"', made.as_text()))
