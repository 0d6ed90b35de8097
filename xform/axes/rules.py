"""What each primitive says about axes: from the dimensions of its operands to those of its results.

One table, `RULES`, from the primitive's name to a function that ties what the primitive identifies and
answers the dimensions of the results. Elementwise primitives are listed by name in `ELEMENTWISE`, and treated
where the program is walked, since they are most of it. A primitive in neither table ties nothing. Primitives
that hold programs are in `axes`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from xform.axes.factors import Factors, Raw, Shape
from xform.higher_order import SCATTERS
from xform.trace import JaxprEqn, shape_of

Rule = Callable[[Factors, JaxprEqn, list[Shape]], Sequence[Shape]]

_ELEMENTWISE = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz
    complex conj convert_element_type copy copy_p cos cosh digamma div eq eq_to erf erf_inv erfc
    exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow is_finite layout_constraint le
    le_to lgamma log log1p log2 logistic lt lt_to max min mul mulhi name ne neg nextafter not
    one_minus_square or polygamma population_count pow preduced pvary random_fold_in random_gamma real
    reduce_precision reduced_vary_cast regularized_incomplete_beta relayout rem reshard round rsqrt select_n
    shift_left shift_right_arithmetic shift_right_logical sharding_constraint sign sin sinh sqrt square
    stop_gradient sub tan tanh vary_unreduced_cast xla_metadata_value xor zeros_like zeta
"""
ELEMENTWISE = frozenset(_ELEMENTWISE.split())
"""One result; every operand that is no scalar has its shape, dimension by dimension."""


def fresh(f: Factors, eqn: JaxprEqn, ins: list[Shape]) -> list[Shape]:
    """Ties nothing."""
    return [f.fresh(shape_of(v)) for v in eqn.outvars]


def _each(f: Factors, eqn: JaxprEqn, ins: list[Shape]) -> list[Shape]:
    """Result i has the dimensions of operand i: psum, optimization_barrier, device_put."""
    return ins[: len(eqn.outvars)]


def _same(f: Factors, eqn: JaxprEqn, ins: list[Shape]) -> list[Shape]:
    """All operands and results have the same dimensions: cumsum, sort, threefry2x32."""
    for other in ins[1:]:
        f.tie(ins[0], other)
    return [ins[0]] * len(eqn.outvars)


def _first(f: Factors, eqn: JaxprEqn, ins: list[Shape]) -> list[Shape]:
    return [ins[0]]


def _where_same_size(f: Factors, eqn: JaxprEqn, ins: list[Shape]) -> list[Shape]:
    """bitcast_convert_type: an added or dropped last dimension is unrelated."""
    operand, sizes = ins[0], shape_of(eqn.outvars[0])
    if len(sizes) <= len(operand):
        return [operand[: len(sizes)]]
    return [operand + f.fresh(sizes[len(operand) :])]


def _transpose(f: Factors, eqn: JaxprEqn, ins: list[Shape]) -> list[Shape]:
    return [tuple(ins[0][i] for i in eqn.params["permutation"])]


def _broadcast_in_dim(f: Factors, eqn: JaxprEqn, ins: list[Shape]) -> list[Shape]:
    sizes = eqn.params["shape"]
    places = eqn.params["broadcast_dimensions"]
    if not places:
        return [f.fresh(sizes)]
    dims: list[Raw | None] = [None] * len(sizes)
    for dim, place in zip(ins[0], places, strict=True):
        if dim:
            dims[place] = dim
    return [tuple(f.fresh((n,))[0] if dim is None else dim for dim, n in zip(dims, sizes, strict=True))]


def _reshape(f: Factors, eqn: JaxprEqn, ins: list[Shape]) -> list[Shape]:
    order = eqn.params["dimensions"]
    dims = ins[0] if order is None else tuple(ins[0][i] for i in order)
    return [f.reshape(dims, eqn.params["new_sizes"])]


def _without(dims: Shape, axes: Sequence[int]) -> Shape:
    return tuple(dim for i, dim in enumerate(dims) if i not in axes)


def _reduce(f: Factors, eqn: JaxprEqn, ins: list[Shape]) -> list[Shape]:
    return [_without(ins[0], eqn.params["axes"])] * len(eqn.outvars)


def _reduce_with(f: Factors, eqn: JaxprEqn, ins: list[Shape]) -> list[Shape]:
    """The general reduce: n operands, then n initial scalars."""
    operands = ins[: len(eqn.outvars)]
    for other in operands[1:]:
        f.tie(operands[0], other)
    return [_without(operands[0], eqn.params["dimensions"])] * len(eqn.outvars)


def _squeeze(f: Factors, eqn: JaxprEqn, ins: list[Shape]) -> list[Shape]:
    dimensions = eqn.params["dimensions"]
    return [_without(ins[0], [d % len(ins[0]) for d in dimensions])]


def _dot_general(f: Factors, eqn: JaxprEqn, ins: list[Shape]) -> list[Shape]:
    return [_dot(f, ins[0], ins[1], eqn.params["dimension_numbers"])]


def _dot(f: Factors, lhs: Shape, rhs: Shape, numbers: Any) -> Shape:
    (lc, rc), (lb, rb) = numbers
    for i, j in zip((*lc, *lb), (*rc, *rb), strict=True):
        f.tie_dim(lhs[i], rhs[j])
    batch = tuple(lhs[i] for i in lb)
    return batch + _without(lhs, (*lc, *lb)) + _without(rhs, (*rc, *rb))


def _ragged_dot_general(f: Factors, eqn: JaxprEqn, ins: list[Shape]) -> list[Shape]:
    """lhs [m, k] with rows in groups, rhs [g, k, n], group_sizes [g]; or the groups along k, with result [g,
    m, n].
    """
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (lc, rc), (lb, rb) = numbers.dot_dimension_numbers
    groups = list(numbers.rhs_group_dimensions)
    lhs, rhs, sizes = ins[0], ins[1], ins[2]
    for i in groups:
        f.tie_dim(rhs[i], sizes[-1])
    for i, j in zip((*lc, *lb), (*rc, *rb), strict=True):
        f.tie_dim(lhs[i], rhs[j])
    batch = tuple(lhs[i] for i in lb)
    dims = batch + _without(lhs, (*lc, *lb)) + _without(rhs, (*rc, *rb, *groups))
    if len(shape_of(eqn.outvars[0])) == len(dims) + 1:
        dims = (sizes[-1], *dims)
    return [dims]


# Slices and joins


def _slice(f: Factors, eqn: JaxprEqn, ins: list[Shape]) -> list[Shape]:
    p = eqn.params
    strides = p["strides"] or (1,) * len(ins[0])
    sizes = shape_of(eqn.outvars[0])
    return [tuple(map(f.part, ins[0], p["start_indices"], sizes, strides))]


def _split(f: Factors, eqn: JaxprEqn, ins: list[Shape]) -> list[Shape]:
    axis, start, results = eqn.params["axis"], 0, []
    for size in map(int, eqn.params["sizes"]):
        piece = f.part(ins[0][axis], start, size)
        results.append((*ins[0][:axis], piece, *ins[0][axis + 1 :]))
        start += size
    return results


def _concatenate(f: Factors, eqn: JaxprEqn, ins: list[Shape]) -> list[Shape]:
    axis, total = eqn.params["dimension"], 0
    parts = {}
    for v, dims in zip(eqn.invars, ins, strict=True):
        size = shape_of(v)[axis]
        parts[total, size, 1] = dims[axis]
        total += size
        f.tie(_without(ins[0], (axis,)), _without(dims, (axis,)))
    return [(*ins[0][:axis], f.whole(total, parts), *ins[0][axis + 1 :])]


def _stack(f: Factors, eqn: JaxprEqn, ins: list[Shape]) -> list[Shape]:
    axis = eqn.params["axis"]
    for other in ins[1:]:
        f.tie(ins[0], other)
    return [(*ins[0][:axis], *f.fresh((len(ins),)), *ins[0][axis:])]


def _unstack(f: Factors, eqn: JaxprEqn, ins: list[Shape]) -> list[Shape]:
    return [_without(ins[0], (eqn.params["axis"],))] * len(eqn.outvars)


def _tile(f: Factors, eqn: JaxprEqn, ins: list[Shape]) -> list[Shape]:
    reps = f.fresh(eqn.params["reps"])
    return [tuple(a + b for a, b in zip(reps, ins[0], strict=True))]


def _pad(f: Factors, eqn: JaxprEqn, ins: list[Shape]) -> list[Shape]:
    """Each dimension becomes part of a larger one; a negative amount takes a part."""
    dims = []
    sizes = zip(shape_of(eqn.invars[0]), shape_of(eqn.outvars[0]), strict=True)
    for dim, (low, high, inner), (size, total) in zip(
        ins[0], eqn.params["padding_config"], sizes, strict=True
    ):
        kept = size if inner else size + min(low, 0) + min(high, 0)
        if (low, high, inner) == (0, 0, 0):
            dims.append(dim)
        elif kept <= 0 or (inner and min(low, high) < 0):
            dims.append(f.fresh((total,))[0])
        else:
            piece = dim if kept == size else f.part(dim, max(-low, 0), kept)
            dims.append(f.whole(total, {(max(low, 0), kept, inner + 1): piece}))
    return [tuple(dims)]


def _dynamic_slice(f: Factors, eqn: JaxprEqn, ins: list[Shape]) -> list[Shape]:
    sizes = zip(ins[0], shape_of(eqn.invars[0]), eqn.params["slice_sizes"], strict=True)
    return [tuple(dim if whole == part else f.some_part(dim, part) for dim, whole, part in sizes)]


def _dynamic_update_slice(f: Factors, eqn: JaxprEqn, ins: list[Shape]) -> list[Shape]:
    shapes = zip(ins[0], ins[1], shape_of(eqn.invars[0]), shape_of(eqn.invars[1]), strict=True)
    for dim, piece, whole, part in shapes:
        _tie_if_whole(f, dim, piece, whole, part)
    return [ins[0]]


def _tie_if_whole(f: Factors, dim: Raw, piece: Raw, whole: int, part: int) -> None:
    if whole == part:
        f.tie_dim(dim, piece)
    elif dim and len(piece) == 1:
        f.loose.setdefault(f.find(piece[0]), f.leaves(dim)[0])


# Gather and scatter


def _gather(f: Factors, eqn: JaxprEqn, ins: list[Shape]) -> list[Shape]:
    """The indices' dimensions come out where no window does, the operand's whole window dimensions where one
    does.
    """
    numbers, windows = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    operand, indices = ins[0], ins[1]
    for i, j in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        f.tie_dim(operand[i], indices[j])
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    sizes = shape_of(eqn.invars[0])
    window = [
        operand[i] if n == windows[i] else f.some_part(operand[i], windows[i])
        for i, n in enumerate(sizes)
        if i not in gone
    ]
    return [_interleave(numbers.offset_dims, window, indices[:-1], len(shape_of(eqn.outvars[0])))]


def _interleave(places: Sequence[int], window: Sequence[Raw], batch: Sequence[Raw], rank: int) -> Shape:
    inside, outside = iter(window), iter(batch)
    return tuple(next(inside) if i in places else next(outside) for i in range(rank))


def _scatter(f: Factors, eqn: JaxprEqn, ins: list[Shape]) -> list[Shape]:
    """Operand, indices, updates: the gather's ties backwards; the result is like the operand."""
    numbers = eqn.params["dimension_numbers"]
    operand, indices, updates = ins[0], ins[1], ins[2]
    for i, j in zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True):
        f.tie_dim(operand[i], indices[j])
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    into = [i for i in range(len(operand)) if i not in gone]
    for i, j in zip(into, sorted(numbers.update_window_dims), strict=True):
        whole, part = shape_of(eqn.invars[0])[i], shape_of(eqn.invars[2])[j]
        _tie_if_whole(f, operand[i], updates[j], whole, part)
    outside = [dim for j, dim in enumerate(updates) if j not in numbers.update_window_dims]
    f.tie(tuple(outside), indices[:-1])
    return [operand]


def _top_k(f: Factors, eqn: JaxprEqn, ins: list[Shape]) -> list[Shape]:
    axis = eqn.params.get("axis", eqn.params.get("reduction_dimension", -1)) % len(ins[0])
    chosen = f.some_part(ins[0][axis], shape_of(eqn.outvars[0])[axis])
    return [(*ins[0][:axis], chosen, *ins[0][axis + 1 :])] * len(eqn.outvars)


# Windows


def _reduce_window(f: Factors, eqn: JaxprEqn, ins: list[Shape]) -> list[Shape]:
    """A dimension goes through where the window moves by one and leaves the size: a pool with padding."""
    p, results = eqn.params, []
    for i, dims in enumerate(ins[: len(eqn.outvars)]):
        sizes = zip(dims, shape_of(eqn.invars[i]), shape_of(eqn.outvars[i]), p["window_strides"], strict=True)
        results.append(tuple(d if m == n and s == 1 else f.fresh((n,))[0] for d, m, n, s in sizes))
    return results


def _select_and_scatter_add(f: Factors, eqn: JaxprEqn, ins: list[Shape]) -> list[Shape]:
    return [ins[1]]


def _conv_general_dilated(f: Factors, eqn: JaxprEqn, ins: list[Shape]) -> list[Shape]:
    """Batch goes through, features are contracted and produced; in groups, both are products with the
    group.
    """
    p = eqn.params
    lhs_spec, rhs_spec, out_spec = p["dimension_numbers"]
    lhs = [ins[0][i] for i in lhs_spec]
    rhs = [ins[1][i] for i in rhs_spec]
    batch, feature, (produced, taken) = lhs[0], lhs[1], rhs[:2]
    if p["batch_group_count"] > 1:
        group = f.fresh((p["batch_group_count"],))[0]
        batch = _rest_of_group(f, batch, group)
        _rest_of_group(f, produced, group)
    if p["feature_group_count"] > 1:
        group = f.fresh((p["feature_group_count"],))[0]
        feature = _rest_of_group(f, feature, group)
        _rest_of_group(f, produced, group)
    f.tie_dim(feature, taken)
    out: list[Raw] = [batch, produced]
    sizes = [tuple(shape[i] for i in spec[2:]) for shape, spec in _conv_shapes(eqn)]
    for k, (m, w, n) in enumerate(zip(*sizes, strict=True)):
        out.append(_conv_dim(f, p, k, (m, w, n), lhs[k + 2], rhs[k + 2]))
    dims = dict(zip(out_spec, out, strict=True))
    return [tuple(dims[i] for i in range(len(dims)))]


def _conv_shapes(eqn: JaxprEqn) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    variables = (*eqn.invars, eqn.outvars[0])
    return [(shape_of(v), spec) for v, spec in zip(variables, eqn.params["dimension_numbers"], strict=True)]


def _rest_of_group(f: Factors, dim: Raw, group: Raw) -> Raw:
    """A dimension as group times the rest; the rest."""
    n, size = f.length(f.leaves(group)), f.length(f.leaves(dim))
    rest = f.fresh((size // n,))[0]
    f.tie_dim(dim, group + rest)
    return rest


def _conv_dim(f: Factors, p: Any, k: int, sizes: tuple[int, int, int], lhs: Raw, rhs: Raw) -> Raw:
    """One spatial dimension: through if the kernel slides along it; patches if it steps from one to the
    next.
    """
    m, w, n = sizes
    stride, padding = p["window_strides"][k], tuple(p["padding"][k])
    spread, apart = p["lhs_dilation"][k], p["rhs_dilation"][k]
    if spread == stride == 1 and m == n and (w == 1 or (w < m and apart == 1)):
        return lhs
    new = f.fresh((n,))[0]
    if padding == (0, 0) and spread == 1 and apart == 1 and stride == w > 1 and m == n * w:
        f.tie_dim(lhs, new + rhs)
    elif padding == (0, 0) and spread == 1 and stride == 1 and apart == n > 1 and m == w * n:
        f.tie_dim(lhs, rhs + new)  # the kernel's gradient
    elif stride == 1 and apart == 1 and spread == w > 1 and padding == (w - 1, w - 1) and n == m * w:
        f.tie_dim(new, lhs + rhs)  # the image's gradient
    return new


# Transforms, random numbers, collectives


def _fft(f: Factors, eqn: JaxprEqn, ins: list[Shape]) -> list[Shape]:
    kept = len(ins[0]) - len(eqn.params["fft_lengths"])
    return [ins[0][:kept] + f.fresh(shape_of(eqn.outvars[0])[kept:])]


def _leading(f: Factors, eqn: JaxprEqn, ins: list[Shape]) -> list[Shape]:
    """Random bits, splits and wrapped keys: the leading dimensions are those of the keys."""
    sizes = shape_of(eqn.outvars[0])
    n = min(len(ins[0]), len(sizes))
    return [ins[0][:n] + f.fresh(sizes[n:])]


def _sized(f: Factors, eqn: JaxprEqn, ins: list[Shape]) -> list[Shape]:
    """Collectives that change the size of a dimension: the others go through."""
    results = []
    for operand, dims, v in zip(eqn.invars, ins, eqn.outvars, strict=False):
        before, after = shape_of(operand), shape_of(v)
        if len(before) == len(after) and eqn.params.get("tiled", True):
            sizes = zip(dims, before, after, strict=True)
            results.append(tuple(d if m == n else f.fresh((n,))[0] for d, m, n in sizes))
        else:
            results.append(f.fresh(after))
    return results


def _names(names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


RULES: dict[str, Rule] = {
    **_names(
        "iota empty empty2 axis_index platform_index rng_uniform create_token rng_bit_generator",
        fresh,
    ),
    **_names("device_put optimization_barrier psum pmax pmin ppermute pbroadcast psum_invariant", _each),
    **_names("cumsum cumprod cummax cummin cumlogsumexp rev sort threefry2x32", _same),
    **_names("random_clone random_seed freeze ref new_ref", _first),
    **_names(
        "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin", _reduce
    ),
    **dict.fromkeys(SCATTERS, _scatter),
    **_names("reduce_window reduce_window_sum reduce_window_max reduce_window_min", _reduce_window),
    **_names("random_bits random_split random_wrap random_unwrap", _leading),
    **_names("all_gather all_gather_invariant reduce_scatter psum_scatter all_to_all", _sized),
    **_names("top_k approx_top_k", _top_k),
    "bitcast_convert_type": _where_same_size,
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": _concatenate,
    "conv_general_dilated": _conv_general_dilated,
    "dot_general": _dot_general,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "fft": _fft,
    "gather": _gather,
    "pad": _pad,
    "ragged_dot_general": _ragged_dot_general,
    "reduce": _reduce_with,
    "reshape": _reshape,
    "select_and_scatter_add": _select_and_scatter_add,
    "slice": _slice,
    "split": _split,
    "squeeze": _squeeze,
    "stack": _stack,
    "tile": _tile,
    "transpose": _transpose,
    "unstack": _unstack,
}
"""Primitive name -> what it ties."""
