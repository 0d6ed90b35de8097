"""Computes recognised operations by kernels: attention by splash attention, products by expert by megablox.

    s = dot_general q k                       o, lse = operation[attention causal] q k v
    p = softmax s, masked              ->     and backward:
    o = dot_general p v                       dq, dk, dv = operation[attention_backward] q k v lse ...

`xform.raising` says what the program means, `xform.kernels` has the operations; this puts one in the place of
the other, before autodiff. An operation says in plain JAX what it computes, which all other passes read, and
is lowered to its kernel last, where it is known what of it one device has: in the one manual region of an
explicit plan, or in a `shard_map` of its own over the axes that its operands lie on.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import ClassVar

from xform.context import Context
from xform.errors import Decline, PlanError
from xform.heads import CHUNKED
from xform.higher_order import equations
from xform.kernels import lowering
from xform.kernels.lowering import Options
from xform.plans.rules import ways
from xform.raising.finding import find
from xform.raising.placing import Claim, placed
from xform.raising.sinking import sunk
from xform.registry import unknown
from xform.report import Promise
from xform.rewrite import rewrite
from xform.rotations import Rotations
from xform.sharding import regions
from xform.topologies import kind_of
from xform.trace import Jaxpr, name_stack, source_line


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Options:

    only: the operations to lower, of "attention", "cross_entropy", "experts" and "linear_recurrence";
        by default each that a kernel computes in less time or memory, and rotations of heads' halves.
    where: a regular expression; only operations are lowered whose name stack or source line matches it.
    shortest: attention over fewer keys or queries stays as it is: its scores take less than a kernel's setup.
    blocks: block sizes in place of the table's, by operation: {"attention": {"block_q": 256}}.
    library: whose kernels, by operation: {"attention": "tokamax"} for those of tokamax, which has to be
        installed (`pip install 'xform[tokamax]'`), in place of "jax"'s.
    interpret: where there is no TPU, run kernels in the interpreter, to try them; else operations are
        computed there as the program has them.

    Raises PlanError for an operation that is not in the table, for blocks that a chip's memory cannot hold,
    and for a library that is not installed or does not have the operation.
    """

    only: Sequence[str] = ()
    where: str = ""
    shortest: int = 128
    blocks: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)
    library: Mapping[str, str] = dataclasses.field(default_factory=dict)
    interpret: bool = False

    stages: ClassVar[tuple[str, ...]] = ("model",)
    after: ClassVar[tuple[str, ...]] = ("roll", "chunkedloss", "sparseexperts", "shard")

    def rewrite(self, jaxpr: Jaxpr, context: Context) -> Jaxpr:
        self._check()
        device = context.mesh.devices.flat[0]
        kind = kind_of(device)
        inside = sunk(jaxpr)
        found = find(inside)
        for near in found.declined:
            context.report.declined("kernels", near.what, near.why, near.line or near.where)
        if not self.only or "cross_entropy" in self.only:
            _tell_chunked(inside, context)
        claims = []
        for r in found.raised:
            if self.where and not re.search(self.where, f"{r.where} {r.line}"):
                continue
            if r.op == "cross_entropy" and _is_chunked(r.where):
                continue  # which was said
            what = lowering.spelled(r)
            try:
                if r.op not in lowering.LOWERINGS:
                    raise Decline("no kernel: the compiler fuses it with its neighbours")
                if self.only and r.op not in self.only:
                    raise Decline(f"kernels.only names {', '.join(self.only)}")
                if kind is None and not self.interpret:
                    raise Decline(f"no TPU but {device.platform}: it is computed as it is written")
                chip = kind.name if kind else "v5e"
                blocks = self.blocks.get(r.op, {})
                options = Options(
                    chip,
                    kind is None,
                    self.shortest,
                    blocks,
                    bool(self.only),
                    library=self.library.get(r.op, "jax"),
                    tokens_over=ways(["activation_batch"], context.mesh.shape),
                    vocab_over=ways(["vocab"], context.mesh.shape),
                    memory=kind.hbm if kind else math.inf,
                )
                made = lowering.LOWERINGS[r.op](r, options)
            except Decline as reason:
                context.report.declined("kernels", what, str(reason), r.line or r.where)
                continue
            context.report.did("kernels", f"{what} by a kernel", made[0].why, r.line or r.where)
            if kind is not None:
                context.report.promise(Promise("kernels", r.op, "kernel", r.line or r.where))
            claims += [Claim(r.view, each.takes, each.gives, each.emit) for each in made]
        return placed(inside, claims, context.report) if claims else jaxpr

    def _check(self) -> None:
        for name in (*self.only, *self.blocks, *self.library):
            if name not in lowering.LOWERINGS:
                options = "kernels.only, kernels.blocks and kernels.library"
                raise unknown("operation", name, lowering.LOWERINGS, options)
        for name, library in self.library.items():
            lowering.provided(name, library)
        try:
            re.compile(self.where)
        except re.error as error:
            raise PlanError(f"kernels.where = {self.where!r} is no regular expression: {error}") from None

    # ------------------------------------------------------------ in the whole step

    def _rotated(self, jaxpr: Jaxpr, context: Context) -> Jaxpr:
        """Halves of heads that are rotated into each other, as products; where there are vector registers."""
        if self.only or kind_of(context.mesh.devices.flat[0]) is None:
            return jaxpr
        rule = Rotations(self.where)
        new = rewrite(jaxpr, rule, context.report, "kernels")
        for line, times in Counter(rule.lines).items():
            what = "halves of heads that are rotated into each other, by a product"
            context.report.did("kernels", what, f"exact; {times} in the program", line)
        return new

    def finish(self, jaxpr: Jaxpr, context: Context) -> Jaxpr:
        """Operations outside of any manual region get one, over the axes that their operands lie on: a kernel
        cannot be partitioned by the compiler.
        """
        jaxpr = self._rotated(jaxpr, context)
        return regions.written(jaxpr, context, "kernels", lambda op: True)


def _tell_chunked(jaxpr: Jaxpr, context: Context) -> None:
    """Says of a loss that goes through chunks that it gets no kernel."""
    for eqn in equations(jaxpr):
        if eqn.primitive.name == "scan" and _is_chunked(name_stack(eqn)):
            what = f"the head and its cross_entropy in {eqn.params['length']} chunks"
            why = "chunkedloss has cut it up before; the kernel, for all tokens at once and with no logits in"
            why += " memory, is for plans without chunkedloss"
            context.report.declined("kernels", what, why, source_line(eqn))


def _is_chunked(where: str) -> bool:
    return CHUNKED in re.split(r"\W+", where)
