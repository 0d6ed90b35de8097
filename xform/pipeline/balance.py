"""How many layers each block of a pipeline has: so many that the dearest, by its products, costs least.

A tick takes as long as its slowest stage. Where there are several stacks, it is best that each run of chunks,
one on every stage, is of one stack alone, and evenly: then a stage has room for no layer that it does not
have, and stacks are stored as stages have them. That cut is taken where its dearest block costs at most a
tenth more than that of the best one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from xform.flops import product_flops
from xform.pipeline.cutting import Part

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


def _costs(parts: Sequence[Part]) -> list[float]:
    """Of the layers of all stacks, flops, with those of what is around them."""
    costs: list[float] = []
    around = 0.0
    for part in parts:
        cost = product_flops(part.body)
        if part.stack is None:
            around += cost
            continue
        costs += [cost + around, *[cost] * (part.layers - 1)]
        around = 0.0
    costs[-1] += around
    return costs if any(costs) else [1.0] * len(costs)


def slowest(costs: Sequence[float], counts: Sequence[int]) -> float:
    """What the dearest block costs."""
    ends = list(itertools.accumulate(counts))
    return max(sum(costs[end - count : end]) for end, count in zip(ends, counts, strict=True))


def evened(costs: Sequence[float], blocks: int) -> tuple[int, ...]:
    """Layers in a row as blocks, of one or more each: so that the dearest one costs least, then so that they
    are as even as can be (the sum of squares), then the first ones with more.
    """
    ends = [0.0, *itertools.accumulate(costs)]
    n = len(costs)

    def best(most: float) -> list[list[tuple[float, float, int]]]:
        """By blocks and layers: the dearest block, the sum of squares, and where the last block begins. With
        `most`, blocks that cost more are left out.
        """
        table = [[(0.0, 0.0, 0)] + [(float("inf"), float("inf"), 0)] * n]
        for block in range(1, blocks + 1):
            row = [(float("inf"), float("inf"), 0)] * (n + 1)
            for end in range(block, n - (blocks - block) + 1):
                for start in range(block - 1, end):
                    cost = ends[end] - ends[start]
                    dearest, squares, _ = table[-1][start]
                    if cost > most or dearest == float("inf"):
                        continue
                    new = max(dearest, cost) if most == float("inf") else 0.0, squares + cost * cost, start
                    row[end] = min(row[end], new, key=lambda each: (each[0], each[1] * (1 - 1e-12), -each[2]))
            table.append(row)
        return table

    most = best(float("inf"))[-1][n][0]
    table = best(most * (1 + 1e-9))
    counts, end = [], n
    for block in range(blocks, 0, -1):
        start = table[block][end][2]
        counts.append(end - start)
        end = start
    return tuple(reversed(counts))


def _apart(stacks: Sequence[int], stages: int, repeats: int) -> Iterator[tuple[int, ...]]:
    """Cuts in which each run of chunks is of one stack, as even as can be."""
    for borders in itertools.combinations(range(1, repeats), len(stacks) - 1):
        runs = [b - a for a, b in itertools.pairwise((0, *borders, repeats))]
        if all(layers >= run * stages for layers, run in zip(stacks, runs, strict=True)):
            cuts = [evened([1.0] * layers, run * stages) for layers, run in zip(stacks, runs, strict=True)]
            yield tuple(itertools.chain.from_iterable(cuts))
