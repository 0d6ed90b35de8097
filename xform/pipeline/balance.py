"""How many layers each block of a pipeline has: so many that the dearest, by its products, costs least.

A tick takes as long as its slowest stage. Where there are several stacks, it is best that each run of chunks,
one on every stage, is of one stack alone, and evenly: then a stage has room for no layer that it does not
have, and stacks are stored as stages have them. That cut is taken where its dearest block costs at most a
tenth more than that of the best one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from xform.flops import product_flops
from xform.pipeline.pieces import Part

MORE = 1.1
"""What the slowest block may take of that of the best cut, where each stack has chunks of its own."""


def sizes_of(parts: Sequence[Part], stages: int, repeats: int) -> tuple[tuple[int, ...], ...]:
    """By part and then by block, how many layers a block has. Stacks have as many layers as there are blocks,
    or more. What is before a stack is in the block of its first layer, what is after the last in the last.
    """
    costs = _costs(parts)
    stacks = [part.layers for part in parts if part.stack is not None]
    best = evened(costs, stages * repeats)
    apart = min(_apart(stacks, stages, repeats), key=lambda cut: slowest(costs, cut), default=best)
    counts = apart if slowest(costs, apart) <= MORE * slowest(costs, best) else best
    blocks = list(itertools.chain.from_iterable([n] * count for n, count in enumerate(counts)))
    found, at = [], 0
    for part in parts:
        if part.stack is None:
            mine = [blocks[min(at, len(blocks) - 1)]]
        else:
            mine = blocks[at : at + part.layers]
            at += part.layers
        found.append(tuple(mine.count(n) for n in range(len(counts))))
    return tuple(found)


def _costs(parts: Sequence[Part]) -> list[int]:
    """Of the layers of all stacks, flops, with those of what is around them."""
    costs: list[int] = []
    around = 0
    for part in parts:
        cost = round(product_flops(part.body))
        if part.stack is None:
            around += cost
            continue
        costs += [cost + around, *[cost] * (part.layers - 1)]
        around = 0
    costs[-1] += around
    return costs if any(costs) else [1] * len(costs)


def slowest(costs: Sequence[int], counts: Sequence[int]) -> int:
    """What the dearest block costs."""
    ends = list(itertools.accumulate(counts))
    return max(sum(costs[end - count : end]) for end, count in zip(ends, counts, strict=True))


def evened(costs: Sequence[int], blocks: int) -> tuple[int, ...]:
    """Layers in a row as blocks, of one or more each: so that the dearest one costs least, then so that they
    are as even as can be (the sum of squares), then the first ones with more.
    """
    dearest = _cut(costs, blocks, lambda block, before: max(block, before))[0]
    counts = _cut(costs, blocks, lambda block, before: before + block**2 if block <= dearest else None)[1]
    return tuple(counts)


def _cut(
    costs: Sequence[int], blocks: int, joined: Callable[[int, int], int | None]
) -> tuple[int, Sequence[int]]:
    """The cut into blocks that comes to least, and how many layers each has. joined: of the cost of a block
    and what the ones before it come to, what they come to together; None for what is not to be.
    """
    ends = [0, *itertools.accumulate(costs)]
    found: dict[int, tuple[int, list[int]]] = {0: (0, [])}
    for block in range(1, blocks + 1):
        longer: dict[int, tuple[int, list[int]]] = {}
        for end in range(block, len(costs) - (blocks - block) + 1):
            for start, (before, counts) in found.items():
                value = joined(ends[end] - ends[start], before) if start < end else None
                if value is not None and (end not in longer or value <= longer[end][0]):
                    longer[end] = value, [*counts, end - start]
        found = longer
    return found[len(costs)]


def _apart(stacks: Sequence[int], stages: int, repeats: int) -> Iterator[tuple[int, ...]]:
    """Cuts in which each run of chunks is of one stack, as even as can be."""
    for borders in itertools.combinations(range(1, repeats), len(stacks) - 1):
        runs = [b - a for a, b in itertools.pairwise((0, *borders, repeats))]
        if all(layers >= run * stages for layers, run in zip(stacks, runs, strict=True)):
            cuts = [evened([1] * layers, run * stages) for layers, run in zip(stacks, runs, strict=True)]
            yield tuple(itertools.chain.from_iterable(cuts))
