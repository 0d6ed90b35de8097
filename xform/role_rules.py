"""How dataflow shows what an axis is: one rule a role, tried in order.

A rule looks at the evidence and at what is known so far, and yields the axes that play its role; an axis keeps the first
role it gets. No rule looks at a name or compares sizes, and a rule without evidence yields nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any

import numpy as np

from xform.axes import Factor, Scope
from xform.evidence import Conv, Dot, Evidence, Factors, Maximum, Pick, Scan, factors, one_hots, union
from xform.trace import Var


class Known:
    """The evidence, the roles told so far, and what follows from both."""

    def __init__(self, evidence: Evidence) -> None:
        self.e = evidence
        self.role: dict[Factor, str] = {}

    def having(self, *roles: str) -> Factors:
        return frozenset(f for f, role in self.role.items() if role in roles)

    # Data

    @cached_property
    def data(self) -> list[Var]:
        """The inputs of integers, but keys: tokens, labels, segments, positions."""
        jaxpr = self.e.axes.jaxpr
        return [v for v in jaxpr.invars if _is_data(v)] or [v for v in jaxpr.constvars if _is_data(v)]

    @cached_property
    def candidates(self) -> Factors:
        """The axes of the data: batch and length are among them."""
        return union(factors(self.e.axes.root[v]) for v in self.data)

    @cached_property
    def data_axes(self) -> Factors:
        """The axes of the data that come with a batch."""
        found = [factors(self.e.axes.root[v]) for v in self.data]
        return union(found if not self.batch else (d for d in found if d & self.batch))

    @cached_property
    def batch(self) -> Factors:
        return self.having("batch")

    def is_activation(self, side: Factors) -> bool:
        return not side.isdisjoint(self.batch or self.candidates)

    # Weights

    @cached_property
    def weight_dots(self) -> list[tuple[Dot, int]]:
        """Dots of an activation and a weight, with the side of the weight."""
        found = []
        for dot in self.e.dots:
            left, right = map(self.is_activation, dot.sides)
            if left != right:
                side = 1 if left else 0
                if self.e.source(dot.scope, dot.operands[side]) is not None:
                    found.append((dot, side))
        return found

    @cached_property
    def convs(self) -> list[Conv]:
        """Convolutions of an activation with a kernel; those that make a kernel's gradient are none."""
        return [conv for conv in self.e.convs if [*map(self.is_activation, conv.sides)] == [True, False]]

    @cached_property
    def uses(self) -> list[tuple[Var, Factors]]:
        """Each weight with its factors in a dot, once; where one is a sum, once more for each part in its place."""
        found: dict[tuple[Var, Factors], None] = {}
        for dot, side in self.weight_dots:
            source = self.e.source(dot.scope, dot.operands[side])
            assert source is not None
            for use in _expanded(dot.sides[side]):
                found[source, use] = None
        return list(found)

    @cached_property
    def weights(self) -> Factors:
        """All factors of weights."""
        return union(use for _, use in self.uses)

    @cached_property
    def count(self) -> Counter[Factor]:
        """How many weights have a factor."""
        return Counter(f for _, f in {(source, f) for source, use in self.uses for f in use})

    # Attention

    @cached_property
    def act_dots(self) -> list[Dot]:
        """Dots of two activations, of each example with itself: the batch, where there is one, is not contracted."""
        return [d for d in self.e.dots if all(map(self.is_activation, d.sides)) and self.batch <= d.batch]

    @cached_property
    def softmaxes(self) -> list[tuple[Maximum, Factors]]:
        """Maxima of attention scores, with the axes along which they are taken: the keys."""
        met = union(d.result | d.contract for d in self.act_dots)
        found = []
        for maximum in self.e.maxima:
            keys = (maximum.reduced & met) - self.weights - self.batch
            if keys and self.is_activation(maximum.rest | maximum.reduced):
                found.append((maximum, keys))
        return found

    @cached_property
    def keys(self) -> Factors:
        return union(keys for _, keys in self.softmaxes)

    @cached_property
    def score_dots(self) -> list[tuple[Dot, Factors]]:
        """Dots that make scores, or their gradient, with what is free on the side of the queries."""
        found = []
        for dot in self.act_dots:
            features = dot.contract
            if not features or features & (self.keys | self.candidates):
                continue
            if self.uses and not all(self._is_weights(f) for f in features):
                continue
            for queries, keys in ((dot.left, dot.right), (dot.right, dot.left)):
                if keys & self.keys and keys <= self.keys:
                    found.append((dot, queries))
                    break
        return found

    def _is_weights(self, f: Factor) -> bool:
        return f in self.weights or any(self._is_weights(g) for _, dim in f.parts for g in dim)

    @cached_property
    def scores(self) -> Factors:
        """All axes of attention scores but the batch."""
        return union(dot.result for dot, _ in self.score_dots) - self.batch

    @cached_property
    def lengths(self) -> Factors:
        """What attention runs over, and the data's axes that are neither batch nor part of a weight."""
        queries = union(queries for _, queries in self.score_dots)
        return (self.data_axes | self.keys | queries) - self.batch - self.weights

    @cached_property
    def states(self) -> list[Dot]:
        """Dots that sum outer products of keys and values over the length, head by head: linear attention."""
        return [
            d
            for d in self.act_dots
            if d.contract
            and d.contract <= self.lengths - self.scores
            and all(side & self.weights for side in (d.batch, d.left, d.right))
        ]

    @cached_property
    def inputs(self) -> list[Factors]:
        """The factors of the program's inputs that have a batch."""
        found = (factors(self.e.axes.root[v]) for v in self.e.axes.jaxpr.invars)
        return [fs for fs in found if self.is_activation(fs)]

    # Tables

    @cached_property
    def tables(self) -> list[tuple[Pick, frozenset[str]]]:
        """Single rows taken from an input that is no activation, with the origin of the indices."""
        found = []
        for pick in (*self.e.picks, *self.e.indexed):
            if len(pick.rows) == 1 and pick.window and not self.is_activation(pick.factors):
                if self.e.source(pick.scope, pick.operand) is not None:
                    found.append((pick, self.e.origin(pick.scope, pick.indices)))
        return found

    @cached_property
    def one_hots(self) -> Factors:
        """Classes into which the data's integers point."""
        return union(along for along, scope, v in one_hots(self.e) if self.points_from_data(scope, v))

    def points_from_data(self, scope: Scope, integers: Any) -> bool:
        origin = self.e.origin(scope, integers)
        return "data" in origin and "computed" not in origin

    def choices(self, among: Factors) -> Iterator[Factors]:
        """Axes into which integers point that a top_k or argmax chose among these: one-hot classes, and indexed rows."""
        for along, scope, v in one_hots(self.e):
            if self.e.chosen_from(scope, v) & among:
                yield along
        for pick in self.e.picks:
            if self.e.chosen_from(pick.scope, pick.indices) & among:
                yield pick.rows & self.weights


def _is_data(v: Var) -> bool:
    dtype = getattr(v.aval, "dtype", None)
    if dtype is None or not getattr(v.aval, "shape", ()):
        return False
    kind = getattr(dtype, "kind", "V")
    return kind == "b" or (kind == "i" and dtype.itemsize > 1) or dtype == np.uint8


def _expanded(use: Factors) -> Iterator[Factors]:
    yield use
    for f in sorted(use, key=lambda f: f.id):
        for part in f.sum:
            yield from _expanded((use - {f}) | frozenset(part))


# Rules, in the order of RULES


def _batch(k: Known) -> Iterable[Factor]:
    """The axis of the data that pairs each example with itself: where two activations meet, it is batched, not free."""
    for candidates in (k.candidates, *_everywhere(k)):
        plus, minus = _paired(k, candidates)
        if plus - minus:
            return plus - minus if minus else _first(k, plus)
        leads = union(scan.lead for scan in k.e.scans)
        rest = candidates - minus
        first = _first(k, rest - leads) or _first(k, rest)
        if first:
            return first
    return []


def _paired(k: Known, candidates: Factors) -> tuple[Factors, Factors]:
    """Which candidates some dot batches, and which some dot does not where it batches others."""
    plus: set[Factor] = set()
    minus: set[Factor] = set()
    for dot in k.e.dots:
        paired = dot.batch & candidates
        plus |= paired
        if paired:
            minus |= (dot.contract | dot.left | dot.right) & candidates
        elif dot.batch:
            minus |= dot.left & dot.right & candidates
    return frozenset(plus), frozenset(minus)


def _first(k: Known, allowed: Factors) -> list[Factor]:
    """What is allowed of the dimension that leads most of the inputs, those of integers if they have it."""
    root = k.e.axes.root
    integers = allowed <= k.candidates
    votes: Counter[tuple[Factor, ...]] = Counter()
    for v in k.data if integers else root.jaxpr.invars:
        dims = [tuple(f for f in dim if f in allowed) for dim in root[v]]
        if integers or len(dims) > 1:
            votes.update([dim for dim in (dims if integers else dims[:1]) if dim][:1])
    return list(max(votes, key=votes.__getitem__)) if votes else []


def _everywhere(k: Known) -> list[Factors]:
    """Without integers to go by: the axes in every dot, at best free in all of them and no result's."""
    if not k.e.dots:
        return []
    root = k.e.axes.root
    common = frozenset.intersection(*(d.result | d.contract for d in k.e.dots))
    free = common - union(d.contract for d in k.e.dots)
    out = union(factors(root[v]) for v in root.jaxpr.outvars)
    return [free - out, common - out, free]


def _microbatches(k: Known) -> Iterable[Factor]:
    """A scan over data, and nothing else of the examples, that carries none: each step takes some of the batch."""
    for scan in k.e.scans:
        data = [
            k.e.source(scan.scope, v)
            for v, fs in zip(scan.operands, scan.scanned, strict=True)
            if fs & k.batch
        ]
        if data and all(source is not None for source in data) and not scan.carry & k.batch:
            yield from scan.lead & k.candidates


def _layers(k: Known) -> Iterable[Factor]:
    """The first axis of weights that a scan, carrying activations, goes through; or that a loop indexes one by one."""
    for scan in k.e.scans:
        weights = any(len(s) > 1 and not k.is_activation(s) for s in scan.scanned)
        if weights and k.is_activation(scan.carry) and not _over_data(k, scan):
            yield from scan.lead
    for pick in k.e.indexed:
        if pick.in_loop and len(pick.window) > 1 and not k.is_activation(pick.factors):
            counted = k.e.origin(pick.scope, pick.indices) <= {"count"}
            if counted and k.e.source(pick.scope, pick.operand) is not None:
                yield from pick.rows


def _over_data(k: Known, scan: Scan) -> bool:
    return bool(scan.lead & k.data_axes)


def _vocab(k: Known) -> Iterable[Factor]:
    """The axis of the logits along which the data's labels pick, and the rows of the table that its integers index."""
    for pick in k.e.picks:
        if pick.rows & k.weights and k.is_activation(pick.factors):
            if k.points_from_data(pick.scope, pick.indices):
                yield from pick.rows & k.weights
    yield from k.one_hots & k.weights
    rows = [pick.rows for pick, origin in _tables_of_data(k)]
    tied = [r for r in rows if r & (k.weights | k.having("vocab"))]
    yield from union(tied or rows[:1])


def _tables_of_data(k: Known) -> list[tuple[Pick, frozenset[str]]]:
    """Tables indexed by integers of the data, one index an example at least."""
    return [
        (pick, origin)
        for pick, origin in k.tables
        if "data" in origin and "count" not in origin and k.is_activation(pick.index_factors)
    ]


def _embed(k: Known) -> Iterable[Factor]:
    """What a row of the vocabulary's table is made of, picked by an index or by a one-hot product."""
    vocab = k.having("vocab")
    tables = [pick.window for pick, _ in k.tables if pick.rows & vocab]
    if not tables:
        sides = ((dot, (dot.left, dot.right)[side]) for dot, side in k.weight_dots)
        tables = [free for dot, free in sides if dot.contract & vocab & k.one_hots]
    yield from union(tables) - vocab


def _head_dim(k: Known) -> Iterable[Factor]:
    """Contracted between queries and keys, or what attention sums of the values."""
    for dot, _ in k.score_dots:
        yield from dot.contract
    for dot in k.states:
        yield from (dot.left | dot.right) & k.weights
    for dot in k.act_dots:
        if dot.contract & k.scores & k.lengths:
            if dot.batch - k.batch or (dot.left | dot.right) & k.lengths:
                yield from (dot.left | dot.right) - k.scores - k.lengths


def _heads(k: Known) -> Iterator[tuple[Factor, bool]]:
    """The axes of heads, and whether there is a projection to a head's dimension without them: the keys'."""
    for dot, queries in k.score_dots:
        having = [use for _, use in k.uses if use & dot.contract]
        having = having or [fs for fs in k.inputs if fs & dot.contract]
        for f in (dot.batch | (queries & k.weights)) - k.batch - k.lengths:
            yield f, any(f in fs for fs in having) and any(f not in fs for fs in having)
    for dot in k.states:
        for f in dot.batch & k.weights:
            yield f, False


def _q_group(k: Known) -> Iterable[Factor]:
    """An axis of heads that the queries' projection has and the keys' has not."""
    return [f for f, grouped in _heads(k) if grouped]


def _kv_heads(k: Known) -> Iterable[Factor]:
    """An axis of heads that all projections have. Without groups this is all of the heads."""
    return [f for f, grouped in _heads(k) if not grouped]


def _kv_length(k: Known) -> Iterable[Factor]:
    """What a softmax runs over, for queries along another axis, or for a single one if it is not the tokens' axis."""
    tokens = union(pick.index_factors for pick, _ in _tables_of_data(k))
    found: set[Factor] = set()
    for maximum, keys in k.softmaxes:
        queries = maximum.rest & k.lengths
        if keys & maximum.rest:
            continue
        if queries - found or (not queries and not keys & tokens):
            found |= keys
            yield from keys


def _attended(k: Known) -> Iterable[Factor]:
    """What queries and keys run over."""
    return (k.scores | k.keys) & k.lengths


def _experts(k: Known) -> Iterable[Factor]:
    """The groups of a ragged dot; what a router chooses among; what batches weights and a router scores."""
    for dot in k.e.dots:
        yield from dot.group
    routed = union(m.reduced for m in k.e.maxima) | k.e.chosen
    made = union(dot.result & dot.sides[side] for dot, side in k.weight_dots if not dot.batch)
    batched = union(dot.batch & dot.sides[side] for dot, side in k.weight_dots)
    experts = made & (k.e.chosen | (routed & batched))
    yield from experts
    yield from union(k.choices(experts))


def _residual(k: Known) -> Iterable[Factor]:
    """What heads are projected from and back to; without attention, the axis that more weights have than any other."""
    heads = k.having("kv_heads", "q_group", "head_dim")
    aside = heads | k.having("layers", "experts", "vocab")
    for dot, queries in k.score_dots:
        anchors = (dot.contract | dot.batch | queries) & heads
        rest = union(use for _, use in k.uses if use & anchors) - aside
        most = max((k.count[f] for f in rest), default=0)
        yield from (f for f in rest if k.count[f] == most)
    if not k.score_dots and not k.having("embed"):
        aside |= union(conv.features for conv in k.convs)
        ranked = sorted(((n, f) for f, n in k.count.items() if f not in aside), key=lambda nf: -nf[0])
        if len(ranked) > 1 and ranked[0][0] > ranked[1][0] and ranked[0][0] > 2:
            yield ranked[0][1]
        shared = [f for n, f in ranked if n > 1 and any(f in fs for fs in k.inputs)]
        if ranked and ranked[0][0] == 2 and len(shared) == 1:
            yield from shared


def _mlp(k: Known) -> Iterable[Factor]:
    """Made from the residual stream by one weight and contracted back to it by another. If no stream is known: between
    two weights, but for the features of convolutions."""
    embed = k.having("embed")
    others = embed | k.having("experts") if embed else k.having("experts", "vocab")
    named = frozenset(k.role) | (frozenset() if embed else union(conv.features for conv in k.convs))
    partners: dict[Factor, set[Var]] = {}
    for source, use in k.uses:
        hidden = use - named
        if len(use) > 1 and use - hidden <= others and (use & embed or not embed):
            for f in hidden:
                partners.setdefault(f, set()).add(source)
    freed = union(d.result & d.sides[side] for d, side in k.weight_dots)
    used = union(d.contract for d, _ in k.weight_dots)
    for f, sources in partners.items():
        if len(sources) > 1 and not f.sum and (embed or (f in used and _made(f, freed))):
            yield f


def _made(f: Factor, freed: Factors) -> bool:
    return f in freed or any(f in part for g in freed for part in g.sum)


def _scored(k: Known) -> Iterable[Factor]:
    """A softmax over what a weight makes of the residual stream, and what a language model gives as its last result."""
    made = union(d.result & d.sides[side] for d, side in k.weight_dots if d.contract & k.having("embed"))
    single = frozenset(f for f in made if k.count[f] == 1)
    yield from single & union(m.reduced for m in k.e.maxima if k.is_activation(m.rest))
    if k.having("vocab"):
        root = k.e.axes.root
        for v in root.jaxpr.outvars:
            dims = root[v]
            if len(dims) > 1 and k.is_activation(factors(dims[:-1])):
                yield from single & factors(dims[-1:])


def _positions(k: Known) -> Iterable[Factor]:
    """Rows of a table that counted integers index, one row for all examples, or that the length is a part of."""
    embed = k.having("embed")
    for pick, origin in k.tables:
        if pick.window & embed and ("count" in origin or not k.is_activation(pick.index_factors)):
            yield from pick.rows
    root = k.e.axes.root
    for v in root.jaxpr.invars:
        fs = factors(root[v])
        if fs & embed and not k.is_activation(fs):
            for f in fs - k.weights:
                if any(stride == 1 and set(dim) & k.lengths for (_, _, stride), dim in f.parts):
                    yield f


def _buckets(k: Known) -> Iterable[Factor]:
    """Rows of a table of biases for each head, indexed by distances."""
    heads = k.having("kv_heads", "q_group")
    for pick, origin in k.tables:
        if pick.window & heads and "count" in origin:
            yield from pick.rows


def _rows(k: Known) -> Iterable[Factor]:
    """Rows of another table that is looked up, e.g. of token types."""
    for pick, _ in k.tables:
        if pick.window & k.having("embed"):
            yield from pick.rows


def _patch(k: Known) -> Iterable[Factor]:
    """The window of a convolution that steps from one patch to the next."""
    return union(conv.patch for conv in k.convs)


def _images(k: Known) -> Iterable[Factor]:
    """What a convolution of two dimensions or more slides over."""
    return union(conv.image for conv in k.convs if len(conv.image) > 1)


def _spatial(k: Known) -> Iterable[Factor]:
    """What a convolution slides over."""
    return union(conv.image for conv in k.convs)


def _kernel(k: Known) -> Iterable[Factor]:
    """The window of any other convolution."""
    return union(conv.kernel for conv in k.convs)


def _channels(k: Known) -> Iterable[Factor]:
    """Features that a convolution takes or makes."""
    return union(conv.features for conv in k.convs)


def _length(k: Known) -> Iterable[Factor]:
    """The data's other axis; or what a scan goes through that carries the examples."""
    yield from k.lengths
    for scan in k.e.scans:
        if scan.carry & k.batch and any(s & k.batch for s in scan.scanned):
            yield from scan.lead


RULES: tuple[tuple[str, Callable[[Known], Iterable[Factor]]], ...] = (
    ("batch", _batch),
    ("microbatches", _microbatches),
    ("layers", _layers),
    ("vocab", _vocab),
    ("embed", _embed),
    ("q_group", _q_group),
    ("kv_heads", _kv_heads),
    ("head_dim", _head_dim),
    ("kv_length", _kv_length),
    ("length", _attended),
    ("experts", _experts),
    ("embed", _residual),
    ("mlp", _mlp),
    ("vocab", _scored),
    ("positions", _positions),
    ("buckets", _buckets),
    ("rows", _rows),
    ("patch", _patch),
    ("spatial", _images),
    ("length", _length),
    ("spatial", _spatial),
    ("kernel", _kernel),
    ("channels", _channels),
)
"""Role and rule, in order; the first that yields an axis names it."""
