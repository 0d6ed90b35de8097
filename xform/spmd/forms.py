"""What each operation does to dimensions, as data: which dimensions are the same, which are summed away.

Every dimension of every operand and result is a product of *factors*, as in Shardy's sharding rules. A factor
is mapped (each element treated alone), summed, maximised, minimised, or must be whole on a device. The walk
lowers all operations from this one description.

Source: https://openxla.org/shardy/sharding_propagation, "Operation sharding rule"; written anew for jaxprs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax.numpy as jnp

from xform.flops import product_flops
from xform.ops.operation import Operation, body, on_parts, operation_of, shared_of, sums_of, told_of
from xform.trace import JaxprEqn, ShapedArray, shape_of

Kind = Literal["map", "sum", "max", "min", "whole"]
Factors = tuple[tuple[int, ...], ...]
"""For each dimension the numbers of its factors, outermost first."""


@dataclasses.dataclass(frozen=True)
class Form:
    """operands, results: the factors of each one's dimensions. sizes, kinds: of each factor.

    A factor that is summed is treated alone in those results that have it; the others are terms of the sum.
    local: the equation's parameters for operands and results of other shapes (those on one device). told: the
    parameters where the factors lie over these mesh axes. blocks: factors that lie in blocks alone. flops: of
    the whole, where that is more than `kinds` say.
    """

    operands: tuple[Factors, ...]
    results: tuple[Factors, ...]
    sizes: tuple[int, ...]
    kinds: tuple[Kind, ...]
    local: Callable[[dict[str, Any], list[tuple[int, ...]], list[tuple[int, ...]]], dict[str, Any]] | None = (
        None
    )
    told: Callable[[dict[str, Any], list[tuple[str, ...]]], dict[str, Any]] | None = None
    blocks: frozenset[int] = frozenset()
    flops: float = 0.0


class Draft:
    """A form in the making: dimensions are told apart, tied, and marked."""

    def __init__(self, eqn: JaxprEqn) -> None:
        self.ins = [shape_of(v) for v in eqn.invars]
        self.outs = [shape_of(v) for v in eqn.outvars]
        self.sizes: list[int] = []
        self.kinds: list[Kind] = []
        self._of: dict[tuple[bool, int, int], tuple[int, ...]] = {}

    def factor(self, size: int, kind: Kind = "map") -> int:
        self.sizes.append(size)
        self.kinds.append(kind)
        return len(self.sizes) - 1

    def operand(self, number: int, dim: int, *factors: int) -> None:
        self._of[False, number, dim] = factors

    def result(self, number: int, dim: int, *factors: int) -> None:
        self._of[True, number, dim] = factors

    def tie(self, ins: dict[int, int], outs: dict[int, int], kind: Kind = "map") -> int:
        """One factor that is a dimension of these operands and results: number -> dimension."""
        number, dim = next(iter((ins or outs).items()))
        f = self.factor((self.ins if ins else self.outs)[number][dim], kind)
        for n, d in ins.items():
            self.operand(n, d, f)
        for n, d in outs.items():
            self.result(n, d, f)
        return f

    def form(self, local: Any = None) -> Form:
        """Dimensions of which nothing was said are whole."""

        def of(is_result: bool, shapes: list[tuple[int, ...]]) -> tuple[Factors, ...]:
            return tuple(
                tuple(
                    self._of.get((is_result, n, d)) or (self.factor(size, "whole"),)
                    for d, size in enumerate(shape)
                )
                for n, shape in enumerate(shapes)
            )

        operands, results = of(False, self.ins), of(True, self.outs)
        return Form(operands, results, tuple(self.sizes), tuple(self.kinds), local)


Rule = Callable[[JaxprEqn], Form | None]


def elementwise(eqn: JaxprEqn) -> Form:
    """Operands of the result's rank are treated element by element; scalars and single rows go with each."""
    d = Draft(eqn)
    rank = len(d.outs[0])
    for dim, size in enumerate(d.outs[0]):
        ins = {n: dim for n, s in enumerate(d.ins) if len(s) == rank and s[dim] == size}
        d.tie(ins, dict.fromkeys(range(len(d.outs)), dim))
    return d.form(_without_sharding)


def each_alone(eqn: JaxprEqn) -> Form:
    """Every result is the operand of its number; the last one's, where there is one result (`tie`)."""
    d = Draft(eqn)
    first = len(d.ins) - len(d.outs)
    for n, shape in enumerate(d.ins):
        for dim in range(len(shape)):
            d.tie({n: dim}, {n - first: dim} if n >= first else {})
    return d.form()


def dot_general(eqn: JaxprEqn) -> Form:
    d = Draft(eqn)
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    out = 0
    for a, b in zip(lb, rb, strict=True):
        d.tie({0: a, 1: b}, {0: out})
        out += 1
    for number, taken in ((0, {*lc, *lb}), (1, {*rc, *rb})):
        for dim in range(len(d.ins[number])):
            if dim not in taken:
                d.tie({number: dim}, {0: out})
                out += 1
    for a, b in zip(lc, rc, strict=True):
        d.tie({0: a, 1: b}, {}, "sum")
    return d.form(_without_sharding)


def reduction(kind: Kind, bitwise: bool = False) -> Rule:
    """bitwise: on integers the operation works on bits, and only on booleans is it of this kind."""

    def rule(eqn: JaxprEqn) -> Form:
        d = Draft(eqn)
        dtype: Any = getattr(eqn.invars[0].aval, "dtype", None)
        how = "whole" if jnp.issubdtype(dtype, jnp.integer) and bitwise else kind
        if how != "sum" and jnp.issubdtype(dtype, jnp.complexfloating):
            how = "whole"  # no order that collectives know
        axes, out = set(eqn.params["axes"]), 0
        for dim in range(len(d.ins[0])):
            if dim in axes:
                d.tie({0: dim}, {}, how)
            else:
                d.tie({0: dim}, {0: out})
                out += 1
        return d.form(_without_sharding)

    return rule


def _without_sharding(params: dict[str, Any], ins: Any, outs: Any) -> dict[str, Any]:
    """What a type says of the mesh does not hold on one device."""
    return {**params, **{k: None for k in ("sharding", "out_sharding") if k in params}}


def broadcast_in_dim(eqn: JaxprEqn) -> Form:
    d = Draft(eqn)
    tied = dict(zip(eqn.params["broadcast_dimensions"], range(len(d.ins[0])), strict=True))
    for dim, size in enumerate(d.outs[0]):
        source = tied.get(dim)
        if source is not None and d.ins[0][source] == size:
            d.tie({0: source}, {0: dim})
        else:
            d.tie({}, {0: dim})
    return d.form(lambda p, ins, outs: {**p, "shape": outs[0], "sharding": None})


def reshape(eqn: JaxprEqn) -> Form:
    d = Draft(eqn)
    order = eqn.params.get("dimensions") or range(len(d.ins[0]))  # transposed so before
    old, new = [d.ins[0][k] for k in order], list(d.outs[0])
    left: list[list[int]] = [[] for _ in old]
    right: list[list[int]] = [[] for _ in new]
    if 0 not in old:
        i = j = 0
        a, b = (old[0] if old else 1), (new[0] if new else 1)
        while i < len(old) or j < len(new):
            if a == 1 and i < len(old):
                i += 1
                a = old[i] if i < len(old) else 1
                continue
            if b == 1 and j < len(new):
                j += 1
                b = new[j] if j < len(new) else 1
                continue
            # Cut from the outermost in: the common part of both.
            size = math.gcd(a, b)
            if size == 1:  # they meet only further in
                run_a, run_b, x, y = [i], [j], a, b
                while x != y:
                    if x < y:
                        run_a.append(run_a[-1] + 1)
                        x *= old[run_a[-1]]
                    else:
                        run_b.append(run_b[-1] + 1)
                        y *= new[run_b[-1]]
                f, g = d.factor(a, "whole"), d.factor(b, "whole")
                left[i].append(f)
                right[j].append(g)
                for k in run_a[1:]:
                    left[k].append(d.factor(old[k], "whole"))
                for k in run_b[1:]:
                    right[k].append(d.factor(new[k], "whole"))
                i, j, a, b = run_a[-1], run_b[-1], 1, 1
                continue
            f = d.factor(size)
            left[i].append(f)
            right[j].append(f)
            a, b = a // size, b // size
    for k, factors in enumerate(left):
        d.operand(0, order[k], *(factors or [d.factor(old[k], "whole")]))
    for k, factors in enumerate(right):
        d.result(0, k, *(factors or [d.factor(new[k], "whole")]))
    return d.form(lambda p, ins, outs: {**p, "new_sizes": outs[0], "sharding": None})


def transpose(eqn: JaxprEqn) -> Form:
    d = Draft(eqn)
    for out, dim in enumerate(eqn.params["permutation"]):
        d.tie({0: dim}, {0: out})
    return d.form()


def squeeze(eqn: JaxprEqn) -> Form:
    d = Draft(eqn)
    kept = [k for k in range(len(d.ins[0])) if k not in eqn.params["dimensions"]]
    for out, dim in enumerate(kept):
        d.tie({0: dim}, {0: out})
    return d.form()


def _same_but(eqn: JaxprEqn, changed: Callable[[int], bool], local: Any = None) -> Form:
    """All operands of the result's rank and the results share their dimensions, except those `changed`."""
    d = Draft(eqn)
    rank = len(d.outs[0])
    for dim in range(rank):
        if not changed(dim):
            ins = {n: dim for n, s in enumerate(d.ins) if len(s) == rank}
            d.tie(ins, {n: dim for n in range(len(d.outs))})
    return d.form(local)


def sliced(eqn: JaxprEqn) -> Form:
    p, before, after = eqn.params, shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])

    def changed(k: int) -> bool:
        return before[k] != after[k] or bool(p["strides"] and p["strides"][k] != 1)

    def local(p: dict[str, Any], ins: Any, outs: Any) -> dict[str, Any]:
        limits = tuple(
            size if whole == kept else limit
            for size, whole, kept, limit in zip(ins[0], before, after, p["limit_indices"], strict=True)
        )
        return {**p, "limit_indices": limits}

    return _same_but(eqn, changed, local)


def dynamic_slice(eqn: JaxprEqn) -> Form:
    before, after = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    return _same_but(eqn, lambda k: before[k] != after[k], lambda p, ins, outs: {**p, "slice_sizes": outs[0]})


def dynamic_update_slice(eqn: JaxprEqn) -> Form:
    before, part = shape_of(eqn.invars[0]), shape_of(eqn.invars[1])
    return _same_but(eqn, lambda k: before[k] != part[k])


def concatenate(eqn: JaxprEqn) -> Form:
    return _same_but(eqn, lambda k: k == eqn.params["dimension"])


def pad(eqn: JaxprEqn) -> Form:
    return _same_but(eqn, lambda k: tuple(eqn.params["padding_config"][k]) != (0, 0, 0))


def rev(eqn: JaxprEqn) -> Form:
    return _same_but(eqn, lambda k: k in eqn.params["dimensions"])


def split(eqn: JaxprEqn) -> Form:
    return _same_but(eqn, lambda k: k == eqn.params["axis"])


def iota(eqn: JaxprEqn) -> Form:
    def local(p: dict[str, Any], ins: Any, outs: Any) -> dict[str, Any]:
        return {**p, "shape": outs[0], "sharding": None}

    return _same_but(eqn, lambda k: k == eqn.params["dimension"], local)


def along_axis(eqn: JaxprEqn) -> Form:
    """cumsum and its like."""
    return _same_but(eqn, lambda k: k == eqn.params["axis"])


def sort(eqn: JaxprEqn) -> Form:
    return _same_but(eqn, lambda k: k == eqn.params["dimension"])


def top_k(eqn: JaxprEqn) -> Form:
    axis = eqn.params["axis"] if "axis" in eqn.params else eqn.params["reduction_dimension"]
    return _same_but(eqn, lambda k: k == axis)


def arg_reduction(eqn: JaxprEqn) -> Form:
    d = Draft(eqn)
    out = 0
    for dim in range(len(d.ins[0])):
        if dim not in eqn.params["axes"]:
            d.tie({0: dim}, {0: out})
            out += 1
    return d.form()


def stack(eqn: JaxprEqn) -> Form:
    """Operands become rows of a new dimension `axis`; unstack is the reverse."""
    d = Draft(eqn)
    for dim in range(len(d.ins[0])):
        d.tie(dict.fromkeys(range(len(d.ins)), dim), {0: dim + (dim >= eqn.params["axis"])})
    return d.form()


def unstack(eqn: JaxprEqn) -> Form:
    d = Draft(eqn)
    axis = eqn.params["axis"]
    for dim in range(len(d.ins[0])):
        if dim != axis:
            d.tie({0: dim}, dict.fromkeys(range(len(d.outs)), dim - (dim > axis)))
    return d.form()


def tile(eqn: JaxprEqn) -> Form:
    d = Draft(eqn)
    for dim, (size, reps) in enumerate(zip(d.ins[0], eqn.params["reps"], strict=True)):
        f = d.factor(size)
        d.operand(0, dim, f)
        d.result(0, dim, d.factor(reps), f)

    def local(p: dict[str, Any], ins: Any, outs: Any) -> dict[str, Any]:
        return {**p, "reps": tuple(b // a if a else 1 for a, b in zip(ins[0], outs[0], strict=True))}

    return d.form(local)


def empty(eqn: JaxprEqn) -> Form:
    d = Draft(eqn)
    for dim in range(len(d.outs[0])):
        d.tie({}, {0: dim})
    return d.form(lambda p, ins, outs: {**p, "shape": outs[0], "out_sharding": None})


def reduce(eqn: JaxprEqn) -> Form:
    """With a computation of its own: whole along what is reduced."""
    d = Draft(eqn)
    kept = [k for k in range(len(d.ins[0])) if k not in eqn.params["dimensions"]]
    count = len(d.ins) // 2
    for out, dim in enumerate(kept):
        d.tie(dict.fromkeys(range(count), dim), dict.fromkeys(range(count), out))
    return d.form()


def leading(count: int) -> Rule:
    """All but the last `count` dimensions are treated alone, in all operands and results."""

    def rule(eqn: JaxprEqn) -> Form | None:
        d = Draft(eqn)
        rank = max(len(s) for s in d.ins) - count
        for dim in range(rank):
            ins = {n: dim for n, s in enumerate(d.ins) if len(s) >= rank + min(count, 1)}
            outs = {n: dim for n, s in enumerate(d.outs) if len(s) > dim}
            d.tie(ins, outs)
        return d.form()

    return rule


def fft(eqn: JaxprEqn) -> Form | None:
    return leading(len(eqn.params["fft_lengths"]))(eqn)


def conv_general_dilated(eqn: JaxprEqn) -> Form:
    """Batch and features are the outermost groups, each a convolution of its own, and what a group has."""
    d, p = Draft(eqn), eqn.params
    lhs, rhs, out = p["dimension_numbers"]
    batch_groups, feature_groups = p["batch_group_count"], p["feature_group_count"]
    b, g = d.factor(batch_groups), d.factor(feature_groups)
    batch = d.factor(d.outs[0][out[0]])
    within = d.factor(d.ins[1][rhs[1]], "sum")
    made = d.factor(d.ins[1][rhs[0]] // (batch_groups * feature_groups))
    d.operand(0, lhs[0], b, batch)
    d.operand(0, lhs[1], g, within)
    d.operand(1, rhs[0], b, g, made)
    d.operand(1, rhs[1], within)
    d.result(0, out[0], batch)
    d.result(0, out[1], b, g, made)

    def local(p: dict[str, Any], ins: Any, outs: Any) -> dict[str, Any]:
        counts = {
            "batch_group_count": ins[0][lhs[0]] // outs[0][out[0]],
            "feature_group_count": ins[0][lhs[1]] // ins[1][rhs[1]],
        }
        return {**p, **counts, "out_sharding": None}

    return d.form(local)


def ragged_dot_general(eqn: JaxprEqn, rows: Kind = "whole") -> Form | None:
    """Products of groups of rows: [b,m,k], [g,b,k,n], [g] -> [b,m,n], or with the rows contracted [b,m,k],
    [b,m,n], [g] -> [g,b,k,n]. The rows lie in groups, one after the other; they are whole unless the caller
    takes care of them (`rows`), and the groups are whole.
    """
    d, numbers = Draft(eqn), eqn.params["ragged_dot_dimension_numbers"]
    (lc, rc), (lb, rb) = numbers.dot_dimension_numbers
    (ragged,) = numbers.lhs_ragged_dimensions
    if len(d.ins[2]) != 1 or ragged in lb:
        return None
    out = int(ragged in lc)  # the groups are outermost where rows are contracted
    for a, b in zip(lb, rb, strict=True):
        d.tie({0: a, 1: b}, {0: out})
        out += 1
    for number, taken in ((0, {*lc, *lb}), (1, {*rc, *rb, *numbers.rhs_group_dimensions})):
        for dim in range(len(d.ins[number])):
            if dim not in taken:
                d.tie({number: dim}, {0: out}, rows if (number, dim) == (0, ragged) else "map")
                out += 1
    for a, b in zip(lc, rc, strict=True):
        d.tie({0: a, 1: b}, {}, rows if a == ragged else "sum")
    return d.form(_without_sharding)


def reduce_window(eqn: JaxprEqn) -> Form:
    p = eqn.params
    ones = ("window_strides", "base_dilation", "window_dilation")

    def windowed(k: int) -> bool:
        if p["window_dimensions"][k] != 1 or any(p.get(o) and p[o][k] != 1 for o in ones):
            return True
        return tuple(p["padding"][k]) != (0, 0)

    return _same_but(eqn, windowed)


def select_and_scatter(eqn: JaxprEqn) -> Form:
    p = eqn.params

    def windowed(k: int) -> bool:
        return (p["window_dimensions"][k], p["window_strides"][k], tuple(p["padding"][k])) != (1, 1, (0, 0))

    return _same_but(eqn, windowed)


def random_wrap(eqn: JaxprEqn) -> Form:
    """The leading dimensions are the same; a last one, of one of them alone, is new."""
    d = Draft(eqn)
    for dim in range(min(len(d.ins[0]), len(d.outs[0]))):
        if d.ins[0][dim] == d.outs[0][dim]:
            d.tie({0: dim}, {0: dim})
    return d.form()


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


ELEMENTWISE = _words(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz
    complex conj convert_element_type copy cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1
    floor ge gt igamma igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p logistic lt
    lt_to max min mul name ne neg nextafter not or polygamma population_count pow real reduce_precision
    regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh threefry2x32 xor zeta
    random_fold_in log2 mulhi one_minus_square polynomial layout_constraint to_edtype from_edtype"""
)

FACTORISATIONS = _words(
    """cholesky eig eigh geqp3 geqrf hessenberg householder_product lu ormqr qr schur svd symmetric_product
    triangular_solve tridiagonal tridiagonal_solve"""
)


def operation(eqn: JaxprEqn) -> Form:
    """A high-level operation says itself along which dimensions each element is treated alone, and over which
    it sums.
    """
    op, d = operation_of(eqn), Draft(eqn)
    assert op is not None
    sizes: dict[str, int] = {}
    for dims, v in zip((*op.operands, *op.results), (*eqn.invars, *eqn.outvars), strict=True):
        sizes.update(zip(dims, shape_of(v), strict=True))
    kinds: dict[str, Kind] = {
        c: "map" if c in op.cut else "sum" if c in sums_of(op) else "whole" for c in sizes
    }
    factors, between = _shared_factors(op, d, sizes, kinds)
    factors |= {c: (d.factor(size, kinds[c]),) for c, size in sizes.items() if c not in factors}
    for n, dims in enumerate(op.operands):
        for dim, c in enumerate(dims):
            d.operand(n, dim, *factors[c])
    for n, dims in enumerate(op.results):
        for dim, c in enumerate(dims):
            d.result(n, dim, *factors[c])

    def told(params: dict[str, Any], axes: list[tuple[str, ...]]) -> dict[str, Any]:
        over = {c: tuple(a for f in fs for a in axes[f]) for c, fs in factors.items()}
        return {**params, "op": on_parts(op, over)}

    def local(
        params: dict[str, Any], ins: list[tuple[int, ...]], outs: list[tuple[int, ...]]
    ) -> dict[str, Any]:
        avals: Any = [v.aval for v in eqn.invars]
        parts = [ShapedArray(s, a.dtype) for s, a in zip(ins, avals, strict=True)]
        return {**params, "jaxpr": body(params["op"], parts)}

    blocks = frozenset(f for c in told_of(op) for f in factors.get(c, ())) | between
    flops = product_flops(eqn.params["jaxpr"])
    return dataclasses.replace(d.form(local), told=told, blocks=blocks, flops=flops)


def _shared_factors(
    op: Operation, d: Draft, sizes: Mapping[str, int], kinds: Mapping[str, Kind]
) -> tuple[dict[str, tuple[int, ...]], frozenset[int]]:
    """The factors of two letters that have one in common, as far as they divide, and that one."""
    shared = shared_of(op)
    if shared is None:
        return {}, frozenset()
    rows, blocks, outer, ways = shared
    if sizes[rows] % (outer * ways) or sizes[blocks] % ways:
        return {}, frozenset()
    between = d.factor(ways, "sum" if rows in sums_of(op) else "map")
    inner = d.factor(sizes[rows] // (outer * ways), kinds[rows])
    of_rows = d.factor(outer, kinds[rows]), between, inner
    return {rows: of_rows, blocks: (between, d.factor(sizes[blocks] // ways, "whole"))}, frozenset((between,))


FORMS: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    **dict.fromkeys(("optimization_barrier", "device_put", "dce_sink", "tie"), each_alone),
    "dot_general": dot_general,
    "operation": operation,
    "reduce_sum": reduction("sum"),
    "reduce_max": reduction("max"),
    "reduce_min": reduction("min"),
    "reduce_and": reduction("min", bitwise=True),
    "reduce_or": reduction("max", bitwise=True),
    "reduce_prod": reduction("whole"),
    "reduce_xor": reduction("whole"),
    "reduce": reduce,
    "argmax": arg_reduction,
    "argmin": arg_reduction,
    "broadcast_in_dim": broadcast_in_dim,
    "reshape": reshape,
    "transpose": transpose,
    "squeeze": squeeze,
    "slice": sliced,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
    "concatenate": concatenate,
    "pad": pad,
    "rev": rev,
    "split": split,
    "iota": iota,
    "empty": empty,
    "tile": tile,
    "cumsum": along_axis,
    "cumprod": along_axis,
    "cummax": along_axis,
    "cummin": along_axis,
    "cumlogsumexp": along_axis,
    "sort": sort,
    "top_k": top_k,
    "approx_top_k": top_k,
    "stack": stack,
    "unstack": unstack,
    "conv_general_dilated": conv_general_dilated,
    "reduce_window": reduce_window,
    "reduce_window_max": reduce_window,
    "reduce_window_min": reduce_window,
    "reduce_window_sum": reduce_window,
    "select_and_scatter": select_and_scatter,
    "select_and_scatter_add": select_and_scatter,
    "select_and_gather_add": reduce_window,
    "bitcast_convert_type": random_wrap,
    "random_split": random_wrap,
    "random_wrap": random_wrap,
    "random_unwrap": random_wrap,
    "ragged_dot_general": ragged_dot_general,
    "fft": fft,
    **dict.fromkeys(FACTORISATIONS, leading(2)),
    "lu_pivots_to_permutation": leading(1),
}


def form_of(eqn: JaxprEqn) -> Form | None:
    """What an operation does to dimensions; None where nothing is known of it."""
    rule = FORMS.get(eqn.primitive.name)
    return rule(eqn) if rule is not None else None
