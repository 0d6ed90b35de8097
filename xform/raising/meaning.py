"""What a raised operation means: which value is what, which dimension is what, and what is done."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from xform.ops.masks import Band
from xform.raising.flat import View
from xform.trace import Atom, Var, source_line


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A value in a view, and what its dimensions are: letters, the outermost first; "" where of size 1, or
    where nothing changes along it: its first element will do.

    A dimension of several letters is their product: "ng" is query heads, n key heads of g queries each.
    """

    atom: Atom
    dims: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Chosen(Tensor):
    """Keys are seen where the value is not zero; negated: where it is zero; or, with `above`, where `factor`
    times it is greater than that.
    """

    negated: bool = False
    above: float | None = None
    factor: float = 1.0


@dataclasses.dataclass(frozen=True)
class Mask:
    """Which keys each query sees: where all of these hold.

    band: by position alone. table: by position alone too, but no band. chosen: booleans that are computed
    when the program runs, of some of the dimensions, e.g. keys that are no padding ("b", "s"). segments:
    where both, numbers of segments of queries and of keys, are equal. filled: what the logits are where a
    key is not seen: -inf, or a finite number (added or put in their place); added: it is added to the
    logits; uneven: keys that are not seen get different numbers, the highest of which is `filled`, so that a
    query that sees none tells them apart. kinds: full, causal, window, prefix, chunked, segments, padding,
    decode, arbitrary: those that hold.
    """

    band: Band | None = dataclasses.field(default_factory=Band)
    table: bool = False
    chosen: tuple[Tensor, ...] = ()
    segments: tuple[tuple[Tensor, Tensor], ...] = ()
    filled: float = -float("inf")
    added: bool = False
    uneven: bool = False
    kinds: tuple[str, ...] = ("full",)


@dataclasses.dataclass(frozen=True)
class Attention:
    """softmax over s of (cap(scale * q . k) + bias, where seen) times v.

    Letters: other capitals or b, c for batch; n: key heads; g: queries of a key head (none: as many as keys);
    t: queries; s: keys; d: contracted by q and k; e: dimension of values. cap: c of c * tanh(x / c), after
    scale. bias: terms that are added to logits, of some of b, n, g, t, s. sinks: a logit more for each head,
    whose value is zero. latent: keys and values share what they are made of (MLA). softmax: the dtype in
    which the weights are computed. more: pairs of queries and keys more, whose products are added to those
    of q and k, as if heads were joined. bias_factors: what each bias is multiplied by.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    scale: float
    mask: Mask
    cap: float | None = None
    bias: tuple[Tensor, ...] = ()
    bias_kinds: tuple[str, ...] = ()
    sinks: Tensor | None = None
    dropout: bool = False
    cross: bool = False
    latent: bool = False
    softmax: str = "float32"
    more: tuple[tuple[Tensor, Tensor], ...] = ()
    bias_factors: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Norm:
    """kind "rms" or "layer": x over the root of the mean of its squares (about its mean), times scale, plus
    shift, over the dimensions `axes` of x. scale, shift: arrays over those, in their order, dimensions of
    size 1 more or fewer. add_one: the scale is 1 + that.
    """

    kind: str
    x: Tensor
    out: Tensor
    axes: tuple[int, ...]
    epsilon: float
    scale: Atom | None = None
    shift: Atom | None = None
    add_one: bool = False


@dataclasses.dataclass(frozen=True)
class CrossEntropy:
    """log-sum-exp over the vocabulary v of the logits, minus the logit of the label: one loss a token.

    Logits are cap(scale * x . w) + bias. x: [tokens..., d] in some order; w: [d, v] in some order; labels:
    [tokens...], or with soft=True floats [tokens..., v]; bias: [v]. A dimension of labels or out may be
    several of x's ("AB"). part: where not all tokens of x have a loss, for each dimension of x but d the
    first that has one, and the one after the last; sizes are of these. cap: as in Attention.

    With lse, the log-sum-exp, and z, the logits:
    loss = lse - (1 - smoothing) * z[label] - smoothing * mean(z) + z_loss * lse^2 + offset
    soft: loss = sum(labels) * lse - sum(labels * z). negative: `out` is minus the loss. summed: `out` is
    the sum of the losses over those tokens' dimensions that it lacks. lse, picked: the log-sum-exp, and the
    label's logit, where they are used besides, or where no value is the loss (`out` is None).
    outside: what stands for the logit of a label from -v to -1, and of one beyond the last: "none" (zero),
    "nan", "wrap" (counted from the end), "clamp" (the nearest), "other". valid: where not the whole of v
    takes part, but the first so many; the rest is masked away, whatever the logits. logits_used: logits are
    used besides, as for an accuracy: who computes losses without logits spares nothing.
    """

    x: Tensor
    w: Tensor
    labels: Tensor
    out: Tensor | None
    cap: float | None = None
    scale: float = 1.0
    bias: Atom | None = None
    smoothing: float = 0.0
    z_loss: float = 0.0
    offset: float = 0.0
    soft: bool = False
    negative: bool = False
    summed: bool = False
    lse: Tensor | None = None
    picked: Tensor | None = None
    part: tuple[tuple[int, int], ...] | None = None
    outside: tuple[str, str] = ("none", "none")
    valid: int | None = None
    logits_used: bool = False


@dataclasses.dataclass(frozen=True)
class Experts:
    """Products of tokens with the weights of the expert that each was sent to: all of one dispatch.

    style: how it was written: "ragged_dot"; "one_hot" (dispatched by products with zeros and ones); "sorted"
    (scattered or gathered to places of their experts, or laid out over experts); "loop" (over experts, or an
    array for each); "all" (all experts, and a choice); "gathered" (each token's weights are looked up).

    Letters: m: tokens, or rows of sorted ones (others where tokens have more dimensions); k: contracted with
    the first weights; f: what they give, o: what weights after those give; x: experts, with X where they lie
    in rows and columns; of ragged products a capital instead where sizes differ. x: what the first product
    takes. w: the weights; where an array is one expert's, none has x. out: the result of the last product, of
    ragged ones, or the first value that depends on all of them. sizes: rows of each expert, where ragged.
    products: of ragged products of [m, k], [x, k, f] and [x] in this order, the operands and the result.
    """

    style: str
    x: Tensor
    w: tuple[Tensor, ...]
    out: Tensor
    experts: int
    sizes: Tensor | None = None
    products: tuple[tuple[Atom, Atom, Atom, Var], ...] = ()


@dataclasses.dataclass(frozen=True)
class Product:
    """A coefficient times the product of `times`, divided by that of `over`; each is the same along a letter
    that it lacks. Without either, the coefficient alone.
    """

    times: tuple[Tensor, ...] = ()
    over: tuple[Tensor, ...] = ()
    coefficient: float = 1.0


@dataclasses.dataclass(frozen=True)
class Recurrence:
    """A state of an outer product, with decay: S' = a S + beta k (v - k a S)^T (delta), or a S + k v^T; read
    after it: o = scale q S'.

    kind: "gla" (a by key channel), "retention" (an a by head), "linear" (none: a = 1); with delta "kda",
    "gated_delta", "delta". Letters: t (time), d (keys), e (values); n for heads and others for batch. decay:
    a, or its logarithm (decay_is_log). out: what is read, all steps of it; initial, final: the state in and
    out, in dims `state`. chunk: the length of the chunks in which it was written, 0 for a step a turn.
    reverse: time runs backwards.

    A tensor with the letter t is one of the view, or the same in all steps without it; where it is made in
    the loop's body, it is one of the view `step`, for one step. So is `read`, where what is read goes through
    more in the body before it is `out`.
    """

    kind: str
    q: Product
    k: Product
    v: Product
    out: Tensor
    decay: Product | None = None
    decay_is_log: bool = False
    beta: Product | None = None
    initial: Tensor | None = None
    final: Tensor | None = None
    state: tuple[str, ...] = ()
    scale: float = 1.0
    chunk: int = 0
    reverse: bool = False
    read: Tensor | None = None
    step: View | None = dataclasses.field(default=None, repr=False)


Meaning = Attention | Norm | CrossEntropy | Experts | Recurrence


@dataclasses.dataclass(frozen=True)
class Raised:
    """One operation that was recognised.

    number: the equation of the view that makes its (last) result. numbers: all equations that it stands for.
    sizes: of each letter. where, line: the name stack and the user's source line.
    """

    op: str
    view: View
    number: int
    numbers: frozenset[int]
    meaning: Meaning
    sizes: Mapping[str, int]
    note: str = ""

    @property
    def where(self) -> str:
        return self.view.names[self.number]

    @property
    def line(self) -> str:
        return source_line(self.view.eqns[self.number])


@dataclasses.dataclass(frozen=True)
class Near:
    """What is nearly an operation: `what` it would be, and `why` it is not: what was missing."""

    what: str
    why: str
    view: View
    number: int

    @property
    def where(self) -> str:
        return self.view.names[self.number]

    @property
    def line(self) -> str:
        return source_line(self.view.eqns[self.number])
