"""What is said of an equation: its label, the parameters that a reader should know, and its exact text.

`phrases` leaves out what the types of the equation show anyway, what has its default, and what is machinery.
`exactly` leaves out only what each trace makes afresh: it is what two equations are compared by.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jax.sharding import AxisType, NamedSharding

from xform.printing.spell import literal_text, sharding_text, spell, type_text
from xform.trace import Jaxpr, JaxprEqn, Literal

WIDEST = 60
"""A parameter spelled longer than this, in characters, is cut when it is shown."""

MACHINERY = frozenset(
    re.findall(
        r"\w+",
        """
        bwd check_vma compiler_options_kvs concrete_mesh context_mesh copy_semantics ctx_mesh
        differentiated ft_in ft_out fwd_jaxpr_thunk has_placeholders in_layouts in_tree inline
        jvp_jaxpr_fun keep_unused np_printoptions num_consts out_layouts out_tree out_trees prevent_cse
        resource_env result_avals srcs symbolic_zeros tree
        """,
    )
)
"""Parameters that are not shown: a reader learns nothing from them."""

THUNKS = frozenset({"bwd", "fwd_jaxpr_thunk", "jvp_jaxpr_fun", "out_trees"})
"""Parameters that are functions made afresh by each trace, and say nothing when two programs are compared."""

TYPED = frozenset(
    re.findall(
        r"\w+",
        """
        dtype new_dtype new_sizes out_dtype preferred_element_type shape weak_type
        """,
    )
)
"""Parameters that the type of the result already shows."""


def _dims(dims: Iterable[int]) -> str:
    return "(" + ",".join(str(d) for d in dims) + ")"


def _dot_general(p: Mapping[str, Any]) -> list[str]:
    (contract_l, contract_r), (batch_l, batch_r) = p["dimension_numbers"]
    found = []
    if len(contract_l):
        found.append("contract " + ",".join(f"{l}x{r}" for l, r in zip(contract_l, contract_r, strict=True)))
    if len(batch_l):
        found.append("batch " + ",".join(f"{l}x{r}" for l, r in zip(batch_l, batch_r, strict=True)))
    return found + _rest(p, {"dimension_numbers"})


def _sharding_constraint(p: Mapping[str, Any]) -> list[str]:
    return [sharding_text(p["sharding"])]


def _reshard(p: Mapping[str, Any]) -> list[str]:
    return [sharding_text(p["dst_sharding"])]


def _reduce(p: Mapping[str, Any]) -> list[str]:
    return [f"over {_dims(p['axes'])}"] + _rest(p, {"axes"})


def _transpose(p: Mapping[str, Any]) -> list[str]:
    return [_dims(p["permutation"])]


def _broadcast(p: Mapping[str, Any]) -> list[str]:
    dims = p["broadcast_dimensions"]
    return ([f"into dims {_dims(dims)}"] if dims else []) + _rest(p, {"broadcast_dimensions"})


def _slice(p: Mapping[str, Any]) -> list[str]:
    steps = p["strides"] or (1,) * len(p["start_indices"])
    bounds = zip(p["start_indices"], p["limit_indices"], steps, strict=True)
    return [", ".join(f"{a}:{b}" + (f":{s}" if s != 1 else "") for a, b, s in bounds)]


def _gather(p: Mapping[str, Any]) -> list[str]:
    d = p["dimension_numbers"]
    found = [f"sizes {_dims(p['slice_sizes'])}"] if "slice_sizes" in p else []
    for label in ("offset_dims", "collapsed_slice_dims", "start_index_map", "update_window_dims"):
        dims = getattr(d, label, ())
        if dims:
            found.append(f"{label.replace('_dims', '').replace('_', ' ')} {_dims(dims)}")
    return found


def _jit(p: Mapping[str, Any]) -> list[str]:
    donated = [i for i, given in enumerate(p.get("donated_invars", ())) if given]
    found = [f"donates {_dims(donated)}"] if donated else []
    return found + _rest(p, {"name", "donated_invars"})


def _scan(p: Mapping[str, Any]) -> list[str]:
    found = [f"length {p['length']}"]
    if p.get("reverse"):
        found.append("from the last to the first")
    if p.get("unroll", 1) != 1:
        found.append(f"unroll {p['unroll']}")
    return found


def loop_split(eqn: JaxprEqn, label: str) -> tuple[int, int, int] | None:
    """How many inputs of a loop's body are constant, carried and scanned over, in this order."""
    p = eqn.params
    if eqn.primitive.name == "while":
        body = p["cond_jaxpr"] if label == "condition" else p["body_jaxpr"]
        consts = p["cond_nconsts"] if label == "condition" else p["body_nconsts"]
        return consts, len(body.invars) - consts, 0
    return scan_split(p)


def scan_split(p: Mapping[str, Any]) -> tuple[int, int, int] | None:
    tree = p.get("ft_in")
    if tree is None or not hasattr(tree, "unpack"):
        return None
    consts, carry, xs = (len(part) for part in tree.unpack())
    return consts, carry, xs


def _while(p: Mapping[str, Any]) -> list[str]:
    return _rest(p, {"cond_nconsts", "body_nconsts"})


def _shard_map(p: Mapping[str, Any]) -> list[str]:
    found = []
    for label, key in (("in", "in_specs"), ("out", "out_specs")):
        if key in p:
            found.append(f"{label} " + " ".join(spell(s) for s in p[key]))
    manual = p.get("manual_axes") or p.get("newly_manual_axes")
    if manual:
        found.append(f"manual over {', '.join(sorted(str(a) for a in manual))}")
    return found


def _device_put(p: Mapping[str, Any]) -> list[str]:
    return ["to " + ", ".join(_target(d) for d in p["devices"])]


def _target(device: Any) -> str:
    return sharding_text(device) if isinstance(device, NamedSharding) else spell(device)


def _checkpoint_name(p: Mapping[str, Any]) -> list[str]:
    return [repr(p["name"])]


def _pallas_call(p: Mapping[str, Any]) -> list[str]:
    grid = getattr(p.get("grid_mapping"), "grid", None)
    return [f"grid {_dims(grid)}"] if grid else []


def _collective(p: Mapping[str, Any]) -> list[str]:
    axes = p["axis_name"] if "axis_name" in p else p["axes"]
    names = axes if isinstance(axes, (tuple, list)) else (axes,)
    found = ["over " + ", ".join(map(str, names))]
    told = {"axis_name", "axes", "axis_size", "tiled"} | {"split_axis", "concat_axis", *ALONG}
    if "split_axis" in p:
        found.append(f"dimension {p['split_axis']} to {p['concat_axis']}")
    found += [f"dimension {p[key]}" for key in ALONG if key in p]
    if p.get("tiled") is False:
        found.append("untiled")
    return found + _rest(p, told)


def _operation(p: Mapping[str, Any]) -> list[str]:
    op = p["op"]
    return [f"{' '.join(op.operands)} -> {' '.join(op.results)}", *_fields(op)]


def _fields(value: Any) -> Iterator[str]:
    """What fields of a dataclass are not as they are by default; of dataclasses in it the same."""
    for field in dataclasses.fields(value):
        own = getattr(value, field.name)
        if dataclasses.is_dataclass(own):
            yield from _fields(own)
        elif own != field.default:
            yield field.name if own is True else f"{field.name} {spell(own)}"


ALONG = ("all_gather_dimension", "scatter_dimension")


PHRASES: dict[str, Callable[[Mapping[str, Any]], list[str]]] = {
    "dot_general": _dot_general,
    "sharding_constraint": _sharding_constraint,
    "reduce_sum": _reduce,
    "reduce_max": _reduce,
    "reduce_min": _reduce,
    "reduce_prod": _reduce,
    "reduce_and": _reduce,
    "reduce_or": _reduce,
    "argmax": _reduce,
    "argmin": _reduce,
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "slice": _slice,
    "gather": _gather,
    "scatter": _gather,
    "scatter-add": _gather,
    "all_gather": _collective,
    "reduce_scatter": _collective,
    "all_to_all": _collective,
    "psum": _collective,
    "psum_invariant": _collective,
    "pmax": _collective,
    "pmin": _collective,
    "jit": _jit,
    "scan": _scan,
    "while": _while,
    "shard_map": _shard_map,
    "device_put": _device_put,
    "reshard": _reshard,
    "name": _checkpoint_name,
    "pallas_call": _pallas_call,
    "operation": _operation,
}
"""How the parameters of a primitive are put; all others as `name value`."""


def phrases(eqn: JaxprEqn) -> list[str]:
    """What a reader should know of an equation's parameters, in a few words each."""
    put = PHRASES.get(eqn.primitive.name)
    params = {name: None if _idle(eqn, value) else value for name, value in eqn.params.items()}
    found = put(params) if put is not None else _rest(params, frozenset())
    if eqn.ctx is not None and eqn.ctx.compute_type is not None:
        found.append(f"computed on {eqn.ctx.compute_type}")
    return [text if len(text) <= WIDEST else text[: WIDEST - 3] + "..." for text in found]


def _rest(params: Mapping[str, Any], shown: Iterable[str]) -> list[str]:
    found = []
    for name, value in params.items():
        if name in shown or name in MACHINERY or name in TYPED or _says_nothing(value):
            continue
        text = sharding_text(value) if isinstance(value, NamedSharding) else spell(value)
        found.append(f"{name} {text}")
    return found


def _says_nothing(value: Any) -> bool:
    if value is None or value is False or isinstance(value, Jaxpr):
        return True
    if isinstance(value, (tuple, list, set, frozenset)):
        return all(_says_nothing(v) for v in value)
    return type(value).__name__ == "UnspecifiedValue"


def label(eqn: JaxprEqn) -> str:
    """The primitive, with the name of the function that it calls when it has one: `jit silu`."""
    primitive, name = eqn.primitive.name, eqn.params.get("name")
    if primitive == "operation":
        name = eqn.params["op"].name
    if primitive in CALLS_BY_SOURCE:
        body = eqn.params.get(CALLS_BY_SOURCE[primitive])
        name = name or getattr(getattr(body, "debug_info", None), "func_src_info", None)
    if primitive == "name" or not isinstance(name, str) or not name:
        return primitive
    return f"{primitive} {name.split(' at ')[0].replace(' ', '_')}"


CALLS_BY_SOURCE = {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr", "pallas_call": "jaxpr"}
"""Primitives that call a function whose name stands with its body, and the parameter that is the body."""


def exactly(eqn: JaxprEqn) -> str:
    """Everything about an equation but its operands, its bodies, and where in the source it is from."""
    params = ",".join(
        f"{name}={'None' if _idle(eqn, value) else spell(value)}"
        for name, value in sorted(eqn.params.items())
        if name not in SILENT
    )
    where = f"@{eqn.ctx.compute_type}" if eqn.ctx is not None and eqn.ctx.compute_type is not None else ""
    outs = ",".join(type_text(v.aval) for v in eqn.outvars)
    ins = ",".join(_atom(v) for v in eqn.invars)
    split = scan_split(eqn.params)  # what ft_in says, however it is held
    return f"{eqn.primitive.name}{where}[{params}]{split or ''} {ins} -> {outs}"


def unsized(eqn: JaxprEqn) -> str:
    """The same without sizes: equal for an equation and the one that does its work on one shard."""
    params = ",".join(
        f"{name}={len(value) if name in SIZES else 'None' if _idle(eqn, value) else spell(value)}"
        for name, value in sorted(eqn.params.items())
        if name not in SILENT
    )
    return f"{eqn.primitive.name}[{params}]{scan_split(eqn.params) or ''}"


SIZES = frozenset({"shape", "new_sizes", "slice_sizes", "sizes", "limit_indices"})
"""Parameters that are sizes of dimensions."""


def _idle(eqn: JaxprEqn, value: Any) -> bool:
    """Whether a parameter is a sharding that asks for nothing: it names no axis, and its mesh is the
    compiler's.

    JAX notes such ones on what it traces where a mesh is about.
    """
    if not isinstance(value, NamedSharding) or eqn.primitive.name in PLACING or any(value.spec):
        return False
    return all(kind == AxisType.Auto for kind in value.mesh.axis_types)


PLACING = frozenset({"sharding_constraint", "reshard", "device_put"})
"""Primitives whose sharding is an order even when it names no axis."""

SILENT = THUNKS | {"ft_in", "ft_out", "ctx_mesh", "context_mesh"}
"""Parameters that do not count when two equations are compared."""


def _atom(atom: Any) -> str:
    if isinstance(atom, Literal):
        return f"{literal_text(atom)}:{type_text(atom.aval)}"
    return type_text(atom.aval)
