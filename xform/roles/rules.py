"""How dataflow shows what an axis is: one rule a role, tried in order.

A rule looks at the evidence and at what is known so far, and yields the axes that play its role; an axis
keeps the first role it gets. No rule looks at a name or compares sizes, and a rule without evidence yields
nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from xform.axes import Factor
from xform.roles.evidence import Factors, Pick, Scan, factors, union
from xform.roles.known import Known

# Rules, in the order of RULES


def _batch(k: Known) -> Iterable[Factor]:
    """The axis of the data that pairs each example with itself: where two activations meet, it is batched,
    not free.
    """
    plus, minus = _paired(k, k.candidates)
    if plus - minus:
        return plus - minus if minus else _first(k, plus)
    leads = union(scan.lead for scan in k.e.scans)
    rest = k.candidates - minus
    return _first(k, rest - leads) or _first(k, rest) or _batch_of_floats(k)


def _batch_of_floats(k: Known) -> list[Factor]:
    """Without integers to go by: an axis in every dot that leads most of the inputs, is contracted in none,
    and is no result's.
    """
    if not k.e.dots:
        return []
    root = k.e.axes.root
    common = frozenset.intersection(*(d.result | d.contract for d in k.e.dots))
    plus, minus = _paired(k, common)
    common = plus - minus or common - minus
    free = common - union(d.contract for d in k.e.dots)
    out = union(factors(root[v]) for v in root.jaxpr.outvars)
    votes = Counter(f for v in root.jaxpr.invars for f in factors(root[v][:1]) if len(root[v]) > 1)
    ranked = sorted(((votes[f] + (f in free), f not in out, f) for f in common if votes[f]), key=_rank)
    unique = len(ranked) == 1 or (len(ranked) > 1 and _rank(ranked[0]) < _rank(ranked[1]))
    return [ranked[0][2]] if unique else []


def _rank(entry: tuple[int, bool, Factor]) -> tuple[int, int]:
    return -entry[0], -entry[1]


def _paired(k: Known, candidates: Factors) -> tuple[Factors, Factors]:
    """Which candidates are batched where two arrays meet along others of them, and those others."""
    plus: set[Factor] = set()
    minus: set[Factor] = set()
    for dot in k.e.dots:
        paired, met = dot.batch & candidates, dot.contract & candidates
        left, right = dot.left & candidates, dot.right & candidates
        if paired and dot.contract and (met or (left and right)):
            plus |= paired
            minus |= met | left | right
        elif dot.batch and not paired:
            minus |= left & right
    return frozenset(plus), frozenset(minus)


def _first(k: Known, allowed: Factors) -> list[Factor]:
    """What is allowed of the first such dimension of most inputs of integers."""
    votes: Counter[tuple[Factor, ...]] = Counter()
    for v in k.data:
        dims = (tuple(f for f in dim if f in allowed) for dim in k.e.axes.root[v])
        votes.update([dim for dim in dims if dim][:1])
    return list(votes.most_common(1)[0][0]) if votes else []


def _microbatches(k: Known) -> Iterable[Factor]:
    """A scan over data, and nothing else of the examples, that carries none: each step takes some of the
    batch.
    """
    for scan in k.e.scans:
        data = [
            k.e.source(scan.scope, v)
            for v, fs in zip(scan.operands, scan.scanned, strict=True)
            if fs & k.batch
        ]
        if data and all(source is not None for source in data) and not scan.carry & k.batch:
            yield from scan.lead & k.candidates


def _layers(k: Known) -> Iterable[Factor]:
    """The first axis of weights that a scan, carrying activations, goes through; or that a loop indexes one
    by one.
    """
    for scan in k.e.scans:
        weights = any(len(s) > 1 and not k.is_activation(s) for s in scan.scanned)
        if weights and k.is_activation(scan.carry) and not _over_tokens(k, scan):
            yield from scan.lead
    yield from k.e.stacked
    for pick in k.e.indexed:
        if pick.in_loop and len(pick.window) > 1 and not k.is_activation(pick.factors):
            counted = k.e.origin(pick.scope, pick.indices) <= {"count"}
            if counted and k.e.source(pick.scope, pick.operand) is not None:
                yield from pick.rows


def _over_tokens(k: Known, scan: Scan) -> bool:
    """Whether a scan goes through the tokens: what it takes besides is no layer's."""
    return any(scan.lead & pick.index_factors for pick, _ in _tables_of_data(k))


def _vocab(k: Known) -> Iterable[Factor]:
    """The axis of the logits along which the data's labels pick, and the rows of the table that its integers
    index.
    """
    for pick in k.e.picks:
        classes = pick.rows & k.weights
        if classes and k.is_activation(pick.factors) and k.points_from_data(pick.scope, pick.indices):
            yield from classes
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
        free = dot.left | dot.right
        if dot.contract & k.scores & k.lengths and (dot.batch - k.batch or free & k.lengths):
            yield from free - k.scores - k.lengths


def _heads(k: Known) -> Iterator[tuple[Factor, bool]]:
    """The axes of heads, and whether the keys are projected without them: shared by a group of queries."""
    found = [(d, (d.batch | (queries & k.weights)) - k.batch - k.lengths) for d, queries in k.score_dots]
    every = union(heads for _, heads in found)
    uses = [use for _, use in k.uses]
    for dot, heads in found:
        having = [use for use in uses if use & dot.contract] or [fs for fs in k.inputs if fs & dot.contract]
        shared = any(use.isdisjoint(every) for use in having)
        for f in heads:
            yield f, shared or any(_is_within(f, g, having) for g in heads if g is not f)
    for dot in k.states:
        for f in dot.batch & k.weights:
            yield f, False


def _is_within(f: Factor, g: Factor, sets: Iterable[Factors]) -> bool:
    """Whether g is wherever f is, and elsewhere too."""
    with_f = [g in s for s in sets if f in s]
    return all(with_f) and any(g in s and f not in s for s in sets)


def _q_group(k: Known) -> Iterable[Factor]:
    """An axis of heads that the queries' projection has and the keys' has not."""
    return [f for f, grouped in _heads(k) if grouped]


def _kv_heads(k: Known) -> Iterable[Factor]:
    """An axis of heads that all projections have. Without groups this is all of the heads."""
    return [f for f, grouped in _heads(k) if not grouped]


def _kv_length(k: Known) -> Iterable[Factor]:
    """What a softmax runs over, for queries along another axis, or for a single one if it is not the tokens'
    axis.
    """
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
    """The groups of a ragged dot; what a router chooses among, or weighs where weights are stacked along
    it. The largest alone is a choice only where something is done with it: classes are counted as well.
    """
    groups = union(dot.group for dot in k.e.dots)
    yield from groups
    embed = k.having("embed")
    routers = union(use for _, use in k.uses if len(use) == 2 and (use & embed or not embed)) - embed
    stacked = union(use for _, use in k.uses if len(use) > 2)
    softmaxed = union(m.reduced for m in k.e.maxima)
    largest = (f for f in k.e.largest if groups or any(k.choices(frozenset((f,)))))
    experts = routers & (k.e.chosen | (softmaxed & stacked) | frozenset(largest)) - frozenset(k.role)
    yield from experts
    yield from union(k.choices(experts))


def _residual(k: Known) -> Iterable[Factor]:
    """What heads are projected from and back to; without attention, the axis that more weights have than any
    other.
    """
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
    """Made from the residual stream by one weight and contracted back to it by another. If no stream is
    known: between two weights, but for the features of convolutions.
    """
    embed = k.having("embed")
    others = embed | k.having("experts") if embed else k.having("experts", "vocab")
    named = frozenset(k.role) | (frozenset() if embed else union(conv.features for conv in k.convs))
    made: set[Factor] = set()
    taken: set[Factor] = set()
    for contracted, free in k.first_uses:
        hidden = (contracted | free) - named
        known = (contracted | free) & named
        if known <= others and (known & embed or not embed):
            made |= hidden & free
            taken |= hidden & contracted
    return (f for f in made & taken if not f.sum)


def _scored(k: Known) -> Iterable[Factor]:
    """A softmax over what a weight makes of the residual stream, and what a language model gives as its last
    result.
    """
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
    """Rows of a table that counted integers index, one row for all examples, or that the length is a part
    of.
    """
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
    """Rows of a table of biases for each head, indexed by distances: by counts or constants."""
    heads = k.having("kv_heads", "q_group")
    for pick, origin in k.tables:
        if pick.window & heads and ("count" in origin or not origin):
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
    ("embed", _residual),
    ("experts", _experts),
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
