"""An operation as one equation that carries its meaning, its own program, and a kernel that computes it.

    o, lse = operation[attention causal] q k v

A high-level operation (`Operation`) is a frozen dataclass; `apply(op, *args)` is one equation of it. Its body
is the operation in plain JAX, `op.plain`, and every analysis reads that: axes, roles, arithmetic. What runs
is `op.kernel` on a TPU, or where the operation asks for the interpreter; elsewhere `op.plain`. So a program
says what it means until the end, layouts are decided as for plain JAX, and the kernel is traced last, on what
one device has. `op.operands` and `op.results` name the dimensions, a letter each; those in `op.cut` may lie
over devices, each element being treated alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from xform.trace import (
    Jaxpr,
    JaxprEqn,
    Value,
    eval_jaxpr,
    new_operation_primitive,
    plain_aval,
    trace_flat,
    typeof,
    without_dead,
)

NAME = "operation"
"""The name of the primitive."""


class Operation(Protocol):
    """What a frozen dataclass has to have to be an operation; compared and hashed by its fields.

    name: "attention". operands, results: for each array its dimensions, a letter each: ("bntd", "bnsd").
    cut: the letters along which each element is treated alone. interpret: off TPU, run the kernel in the
    interpreter. `plain` and `kernel` compute the same, for any sizes that agree with the letters.

    It may have, besides: `sums`, letters that may be cut too, where results that lack one are terms of a sum
    over the parts (`sums_of`). `told`, letters of both whose mesh axes it is told by `over(axes)`, which
    gives the operation on a part (`on_parts`); such parts are blocks, and it may use collectives over them.
    `lies`: the mesh axes over which what it is told of is to lie, whatever is known of its operands.
    `wider(dtype)`: the operation that gives its terms of a weight's gradient in a wider dtype. `back`: it is
    linear in its one operand, and gradients of its result become the operand's by this operation. `batched`:
    the operation on arrays that all have a dimension more, in front. `grouped`: the letter of rows that
    come in groups, whose sizes it takes: each is treated alone but for its group, results that lack it are
    sums; `groups` is the letter of the groups. `shared`: (rows, blocks, outer, ways), two letters that lie
    over the same mesh axes in `ways` parts, of rows the `outer` parts lying further out: between these the
    operation moves things itself, and is told of the axes by the letter of the blocks. `sent`: the kind of
    collective, and over which axes, that it is to whoever counts what is sent, of its first operand.
    """

    @property
    def name(self) -> str: ...

    @property
    def operands(self) -> tuple[str, ...]: ...

    @property
    def results(self) -> tuple[str, ...]: ...

    @property
    def cut(self) -> str: ...

    @property
    def interpret(self) -> bool: ...

    def plain(self, *args: Value) -> Sequence[Value]: ...

    def kernel(self, *args: Value) -> Sequence[Value]: ...


@dataclasses.dataclass(frozen=True)
class Mapped:
    """An operation under `jax.vmap`: a dimension more, in front of those operands that have it."""

    op: Any
    mapped: tuple[bool, ...]

    @property
    def name(self) -> str:
        return str(self.op.name)

    @property
    def letter(self) -> str:
        """The letter of the dimension, one that the operation does not have."""
        used = set("".join((*self.op.operands, *self.op.results)))
        return next(c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in used)

    @property
    def operands(self) -> tuple[str, ...]:
        pairs = zip(self.op.operands, self.mapped, strict=True)
        return tuple(self.letter + dims if own else dims for dims, own in pairs)

    @property
    def results(self) -> tuple[str, ...]:
        return tuple(self.letter + dims for dims in self.op.results)

    @property
    def cut(self) -> str:
        return self.letter + str(self.op.cut)

    @property
    def sums(self) -> str:
        return sums_of(self.op)

    @property
    def told(self) -> str:
        return told_of(self.op)

    @property
    def interpret(self) -> bool:
        return bool(self.op.interpret)

    @property
    def back(self) -> Mapped:
        return Mapped(self.op.back, self.mapped)

    def over(self, axes: Mapping[str, tuple[str, ...]]) -> Mapped:
        return Mapped(on_parts(self.op, axes), self.mapped)

    def plain(self, *args: Value) -> Sequence[Value]:
        return self._each(self.op.plain, args)

    def kernel(self, *args: Value) -> Sequence[Value]:
        return self._each(self.op.kernel, args)

    def _each(self, f: Any, args: Sequence[Value]) -> Sequence[Value]:
        made: Sequence[Value] = jax.vmap(
            lambda *xs: tuple(f(*xs)), tuple(0 if m else None for m in self.mapped)
        )(*args)
        return made


def apply(op: Operation, *args: Value) -> list[Value]:
    """The results of an operation, as one equation."""
    args = tuple(jnp.asarray(x) for x in args)
    jaxpr = body(op, [typeof(x) for x in args])
    return list(_operation.bind(*args, op=op, jaxpr=jaxpr))


def body(op: Operation, avals: Sequence[Any]) -> Jaxpr:
    """The operation in plain JAX, as a program; it brings no arrays with it."""
    jaxpr = without_dead(trace_flat(op.plain, [plain_aval(a) for a in avals], op.name))
    if jaxpr.consts:
        raise TypeError(
            f"{op.name}: its plain form brings {len(jaxpr.consts)} constant arrays; make them of iota"
        )
    return jaxpr


def operation_of(eqn: JaxprEqn) -> Operation | None:
    """The operation that an equation is; None where it is something else."""
    op: Operation | None = eqn.params["op"] if eqn.primitive.name == NAME else None
    return op


# ---------------------------------------------------------------- on parts


def sums_of(op: Operation) -> str:
    """The letters that an operation contracts and that may be cut: results that lack one are terms then."""
    return str(getattr(op, "sums", ""))


def told_of(op: Operation) -> str:
    """The letters whose mesh axes an operation wants to know."""
    return str(getattr(op, "told", ""))


def grouped_of(op: Operation) -> str:
    """The letter along which rows come in groups whose sizes an operation takes."""
    return str(getattr(op, "grouped", ""))


def groups_of(op: Operation) -> str:
    """The letter of the groups."""
    return str(getattr(op, "groups", ""))


def shared_of(op: Operation) -> tuple[str, str, int, int] | None:
    """Two letters that lie over the same mesh axes: of rows, of blocks; how many parts of rows lie further
    out, and how many parts there are.
    """
    found: tuple[str, str, int, int] | None = getattr(op, "shared", None)
    return found


def on_parts(op: Operation, axes: Mapping[str, tuple[str, ...]]) -> Operation:
    """The operation as a device runs it, its dimensions lying over these mesh axes of a manual region."""
    own = {c: tuple(axes.get(c, ())) for c in told_of(op)}
    over: Callable[[Mapping[str, tuple[str, ...]]], Operation] | None = getattr(op, "over", None)
    return over(own) if over is not None and any(own.values()) else op


def terms_of(op: Operation, number: int, axes: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The mesh axes over which a result is the terms of a sum, where the dimensions lie over `axes`."""
    own = {a for c in op.results[number] for a in axes.get(c, ())}
    lacking = (c for c in sums_of(op) if c not in op.results[number])
    return tuple(dict.fromkeys(a for c in lacking for a in axes.get(c, ()) if a not in own))


def widened(op: Operation, dtype: str) -> Operation:
    """The operation with its terms of a weight's gradient in a dtype that is wider, where it can."""
    made: Operation = op.wider(dtype) if hasattr(op, "wider") else op
    return made


# ---------------------------------------------------------------- the primitive


def _run(*args: Value, op: Any, jaxpr: Jaxpr) -> Sequence[Value]:
    del jaxpr
    return op.kernel(*args)  # type: ignore[no-any-return]


def _run_plain(*args: Value, op: Any, jaxpr: Jaxpr) -> Sequence[Value]:
    return op.kernel(*args) if op.interpret else eval_jaxpr(jaxpr, *args)  # type: ignore[no-any-return]


def _jvp(primals: Sequence[Value], tangents: Sequence[Value], *, op: Any, jaxpr: Jaxpr) -> Any:
    """Where it is differentiated (its kernels have a rule of their own outside of it), as plain JAX is; a
    linear one stays one.
    """
    del jaxpr
    if hasattr(op, "back") and tangents[0].dtype != jax.dtypes.float0:
        return apply(op, *primals), apply(op, *tangents)
    return jax.jvp(lambda *xs: list(op.plain(*xs)), list(primals), list(tangents))


def _batch(args: Sequence[Value], dims: Sequence[Any], *, op: Any, jaxpr: Jaxpr) -> Any:
    del jaxpr
    mapped = tuple(isinstance(d, (int, np.integer)) for d in dims)
    moved = [jnp.moveaxis(x, int(d), 0) if m else x for x, d, m in zip(args, dims, mapped, strict=True)]
    whole = getattr(op, "batched", None) if all(mapped) else None
    outs = apply(Mapped(op, mapped) if whole is None else whole, *moved)
    return outs, [0] * len(outs)


def _transpose(cotangents: Iterable[Value], *, op: Any, jaxpr: Jaxpr) -> Value:
    del jaxpr
    return apply(op.back, *cotangents)[0]


_operation = new_operation_primitive(
    NAME, on_tpu=_run, elsewhere=_run_plain, jvp=_jvp, batch=_batch, transpose=_transpose
)
