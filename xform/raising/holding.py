"""What an attention means whose structure was read, once the program is seen to compute just that.

Of each operand the smallest value that it is made of is taken, the formula is held to the program at random
points (`probing`), and rows and heads are seen to be shared as the operation shares them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence

from xform.axes.factors import Shape
from xform.raising.flat import dtype_of, size
from xform.raising.lettering import OWN
from xform.raising.logits import Logits, Miss, Part
from xform.raising.meaning import Attention, Raised, Tensor
from xform.raising.operands import Operand, Source
from xform.raising.points import Unknown
from xform.raising.probing import Claim, Factor, Probe, product_holds
from xform.raising.projections import projected
from xform.raising.reading import Reading, Space
from xform.raising.seen import Read, Term, classified
from xform.raising.softmax import Mixing
from xform.trace import Atom, Var

NAME = "attention"
MULTIPLIED = "its logits are multiplied by an array, not by a constant"


@dataclasses.dataclass(frozen=True)
class Structure:
    """An attention as its equations are read, not yet held to what they compute.

    start: the exponentials. parts, q, k: the products whose sum the logits are, and their operands. terms:
    what is added to logits or hides keys; masks: what hides weights; weighing, scale: what weights are
    multiplied by. out: the result and its dimensions. rows: factors of the logits but for s, of keys. named:
    the letters of factors. core: the numbers of equations between scores and result.
    """

    start: Var
    mixing: Mixing
    parts: Sequence[Part]
    logits: Logits
    terms: Sequence[Term]
    masks: Sequence[Term]
    weighing: Sequence[Factor]
    scale: float
    sink: Factor | None
    q: Sequence[Operand]
    k: Sequence[Operand]
    v: Operand
    out: tuple[Var, Shape]
    rows: frozenset[int]
    s: tuple[int, ...]
    named: Mapping[int, str]
    core: Collection[int]

    @property
    def at(self) -> int:
        """The number of the equation that a reason is given for."""
        return self.mixing.product.numbers[0]


def held(reading: Reading, space: Space, found: Structure) -> Raised:
    """The operation that a structure is. Raises `Miss` where the program computes something else."""
    return _Holding(reading, space, found).raised()


class _Holding:
    def __init__(self, reading: Reading, space: Space, found: Structure) -> None:
        self.reading, self.space, self.found = reading, space, found
        self.view, self.named = reading.view, found.named
        self.sizes = self._sizes()

    def raised(self) -> Raised:
        found = self.found
        read = classified(self.reading, self.space, [*found.terms, *found.masks], self.named, self.sizes)
        q = [self._chosen(x, True) for x in found.q]
        k = [self._chosen(x, True) for x in found.k]
        v = self._chosen(found.v, False)
        for part, a, b in zip(found.parts, q, k, strict=True):
            if not (isinstance(a.atom, Var) and isinstance(b.atom, Var)):
                raise Miss("its queries or keys are constants", part.product.numbers[0])
            if not product_holds(self.reading, self.space, part, a, b):
                raise Miss("its scores are not products of queries and keys", part.product.numbers[0])
        scale = self._scale(q, k)
        self._check(self._claim(read, v))
        if abs(found.scale - 1.0) > 1e-6 and not found.weighing:
            raise Miss(f"its weights are scaled by {found.scale:g}", found.at)
        for x in (*q, *k, v):
            self._check_groups(x)
        for x in k:
            self._check_sharing(x, v)
        numbers = set(found.core).union(*(part.product.numbers for part in found.parts))
        numbers = numbers.union(*(x.numbers for x in (*q, *k, v)))
        meaning = self._meaning(read, q, k, v, scale)
        number = self.reading.number(found.out[0])
        return Raised(NAME, self.view, number, frozenset(numbers), meaning, self.sizes)

    def _scale(self, q: Sequence[Source], k: Sequence[Source]) -> float:
        """What the products of all pairs are multiplied by."""
        parts = self.found.parts
        scales = [
            part.factor * a.factor * b.factor * (self.found.logits.amp or 1.0)
            for part, a, b in zip(parts, q, k, strict=True)
        ]
        if max(scales) - min(scales) > 1e-6 * abs(max(scales)):
            raise Miss("the products that are its logits are scaled differently", parts[1].product.numbers[0])
        return max(scales)

    def _claim(self, read: Read, v: Source) -> Claim:
        found = self.found
        return Claim(
            parts=found.parts,
            amp=found.logits.amp,
            read=read,
            raw=[Factor(t.atom, t.dims, t.factor, t.seen) for t in (*found.terms, *found.masks)],
            sink=found.sink,
            after=found.weighing,
            scale=found.scale,
            v=v,
            weights=(found.mixing.weights, found.mixing.dims),
            out=found.out,
            rows=found.rows,
            s=found.s,
            letters=self.named,
            sizes=self.sizes,
        )

    def _check(self, claim: Claim) -> None:
        """That the program computes what is claimed."""
        found = self.found
        try:
            for seed in (1, 2):
                if mistake := Probe(self.reading, self.space, claim).mistake(seed):
                    if found.logits.zeroed is not None:
                        raise Miss(MULTIPLIED, found.logits.zeroed)
                    raise Miss(mistake, found.at)
        except Unknown as unknown:
            norms = [
                step.atom for step in found.mixing.steps if step.kind == "norm" and step.atom is not None
            ]
            if any(not self.reading.follows(x, {found.start}) for x in norms):
                raise Miss(
                    "it is divided by another sum: its weights do not add up to one", found.at
                ) from None
            raise Miss(f"it cannot be checked: it depends on {unknown}", found.at) from None

    def _meaning(
        self, read: Read, q: Sequence[Source], k: Sequence[Source], v: Source, scale: float
    ) -> Attention:
        found, pieces = self.found, read.pieces
        pairs = [
            (self._tensor(a.atom, a.dims), self._tensor(b.atom, b.dims)) for a, b in zip(q, k, strict=True)
        ]
        return Attention(
            q=pairs[0][0],
            k=pairs[0][1],
            v=self._tensor(v.atom, v.dims),
            out=self._tensor(*found.out),
            scale=scale,
            mask=pieces.mask,
            cap=found.logits.amp,
            bias=pieces.bias,
            bias_kinds=pieces.kinds,
            sinks=None if found.sink is None else self._tensor(found.sink.atom, found.sink.dims),
            dropout=bool(found.weighing),
            cross=self._is_cross(pieces.mask.kinds),
            latent=len(pairs) > 1 or self._is_latent(found.k[0], found.v),
            softmax=str(dtype_of(found.start)),
            more=tuple(pairs[1:]),
            bias_factors=pieces.factors,
        )

    def _sizes(self) -> dict[str, int]:
        sizes = {letter: self.space.size(leaf) for leaf, letter in self.named.items()}
        for c in "tsde":
            sizes.setdefault(c, 1)
        return sizes

    def _tensor(self, atom: Atom, dims: Shape) -> Tensor:
        return Tensor(
            atom, tuple("".join(self.named[leaf] for leaf in self.space.leaves(dim)) for dim in dims)
        )

    def _chosen(self, side: Operand, scaled: bool) -> Source:
        """The value to take for an operand: as small as it gets, and as it lay in the product."""
        options = [
            x
            for x in side.sources
            if (scaled or x.factor == 1.0)
            and isinstance(x.atom, Var)
            and all(leaf in self.named for leaf in self.space.all(x.dims))
        ]
        if not options:
            raise Miss(
                "a dimension of its operands is none of attention's", max(self.reading.number(side.atom), 0)
            )

        def rank(x: Source) -> tuple[int, int, int]:
            bytes_ = math.prod(size(x.atom)) * dtype_of(x.atom).itemsize
            joined = sum(len(self.space.leaves(d)) > 1 for d in x.dims)
            ones = sum(not d for d in x.dims)
            return (bytes_, joined, ones)

        scales = [abs(x.factor) for x in options]
        deepest = [x for x, c in zip(options, scales, strict=True) if c == scales[-1]]
        return min(deepest, key=rank)

    def _check_groups(self, x: Source) -> None:
        for dim in x.dims:
            joined = "".join(self.named.get(leaf, "") for leaf in self.space.leaves(dim))
            if "g" in joined and "n" in joined and joined.index("g") < joined.index("n"):
                raise Miss(
                    "query heads share key heads by h % n, as tiled, not by h // g, as repeated",
                    self.found.at,
                )

    def _check_sharing(self, k: Source, v: Source) -> None:
        """That keys and values are of the same rows of the batch, and values more than one number each."""
        own = [{self.named[leaf] for leaf in self.space.all(x.dims)} - set("ngt" + OWN) for x in (k, v)]
        if own[0] != own[1]:
            what = "keys" if own[0] - own[1] else "values"
            raise Miss(
                f"its {what} differ by row of the batch, or by query, and the others do not", self.found.at
            )
        if "e" not in {self.named[leaf] for leaf in self.space.all(v.dims)} and all(map(len, v.dims)):
            raise Miss("its values have no dimension of their own", self.found.at)

    def _is_cross(self, kinds: tuple[str, ...]) -> bool:
        """Whether keys are made of something else than queries."""
        if "decode" in kinds or "causal" in kinds:
            return False
        made = [self._made_of(side) for side in (self.found.q[0], self.found.k[0])]
        if made[0] is not None and made[1] is not None:
            return made[0] is not made[1]
        return self.sizes["t"] > 1 and self.sizes["t"] != self.sizes["s"]

    def _made_of(self, side: Operand) -> Atom | None:
        for x in side.sources:
            for axis, dim in enumerate(x.dims):
                if any(self.named.get(leaf) == "d" for leaf in self.space.leaves(dim)):
                    return projected(self.reading, x.atom, axis)
        return None

    def _is_latent(self, k: Operand, v: Operand) -> bool:
        """Whether keys are some that heads share, beside some of a latent that the values are made of too."""
        number = self.reading.number(k.sources[-1].atom)
        for x in k.sources:
            n = self.reading.number(x.atom)
            if n >= 0 and self.view.eqns[n].primitive.name == "concatenate":
                number = n
        if number < 0 or self.view.eqns[number].primitive.name != "concatenate":
            return k.last.atom is v.last.atom
        spread = [sum(self.reading.varies(w)) for w in self.view.eqns[number].invars]
        return len(spread) == 2 and min(spread) < max(spread)
