"""What is added to logits or selects among them, as a mask and biases."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from xform.axes.factors import Shape
from xform.raising import masks
from xform.raising.masks import Masks, Pieces
from xform.raising.meaning import Tensor
from xform.raising.reading import Reading, Space
from xform.trace import Atom


@dataclasses.dataclass(frozen=True)
class Term:
    """An atom laid along `dims` of the logits. seen: it is boolean, and keys are seen where it is this,
    elsewhere the logits are `fill`; None: `factor` times it is added. weights: it acts on the weights.
    """

    atom: Atom
    dims: Shape
    factor: float
    seen: bool | None
    fill: float
    weights: bool = False


@dataclasses.dataclass(frozen=True)
class Read:
    """masks: has the values of what `pieces` names."""

    masks: Masks
    pieces: Pieces


def classified(
    reading: Reading, space: Space, terms: Sequence[Term], named: Mapping[int, str], sizes: Mapping[str, int]
) -> Read:
    """The mask and the biases that all terms come to."""
    key = tuple(sorted(sizes.items()))
    known = reading.masks.setdefault(key, Masks(reading.view, sizes))
    given = [
        masks.Term(
            Tensor(t.atom, _lettered(reading, space, t, named)),
            "added" if t.seen is None else "seen" if t.seen else "hidden",
            t.fill,
            t.factor,
        )
        for t in terms
    ]
    return Read(known, known.of(given))


def _lettered(reading: Reading, space: Space, term: Term, named: Mapping[int, str]) -> tuple[str, ...]:
    """The letters of an atom's dimensions; "" along those where nothing changes."""
    if not term.dims:
        return ("",) * len(reading.varies(term.atom))
    pairs = zip(term.dims, reading.varies(term.atom), strict=True)
    return tuple("".join(named[leaf] for leaf in space.leaves(d)) if own else "" for d, own in pairs)
