"""What a lowering is told, and what it gives."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from xform.errors import PlanError
from xform.raising.meaning import Tensor
from xform.trace import Literal, Value, Var


@dataclasses.dataclass(frozen=True)
class Options:
    """chip: its name, by which block sizes go. interpret: there is none. shortest: see `Kernels`. blocks: in
    place of the table's. asked: the user names the operation, so that it is lowered where it only fits.
    library: whose kernel it is to be; "none": there is to be none, the operation is computed plainly.
    tokens_over, vocab_over: over how many devices tokens lie, and the vocabulary. memory: bytes of one.
    """

    chip: str
    interpret: bool = False
    shortest: int = 128
    blocks: Mapping[str, int] = dataclasses.field(default_factory=dict)
    asked: bool = False
    library: str = "jax"
    tokens_over: int = 1
    vocab_over: int = 1
    memory: float = math.inf


@dataclasses.dataclass(frozen=True)
class Lowered:
    """`gives` follow from `takes` by `emit`; why: which kernel, and how."""

    takes: Sequence[Var]
    gives: Sequence[Var]
    emit: Callable[[Mapping[Var, Value]], Mapping[Var, Value]]
    why: str


def value(tensor: Tensor, values: Mapping[Var, Value]) -> Value:
    """The value that a tensor names."""
    return tensor.atom.val if isinstance(tensor.atom, Literal) else values[tensor.atom]


def checked(options: Options, op: str, known: Sequence[str]) -> Mapping[str, int]:
    """The block sizes that a plan gives an operation; PlanError for one that there is not."""
    for name in options.blocks:
        if name not in known:
            has = ", ".join(known) or "none of its own"
            raise PlanError(f"kernels.blocks: {op} has no {name!r}; it has {has}")
    return options.blocks
