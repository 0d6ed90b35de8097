"""What MaxText would call each dimension of a value: its logical name, for the rules that say where it lies.

A weight's dimension has its role's name, refined by what else the weight has: the embed of a norm's scale is
`norm`, of an attention projection `embed_attn`, of a table of the vocabulary `embed_vocab`, of an expert
`embed_moe`. An activation's is `activation_` and its role, with `activation_norm_length` for the length of
the residual stream, `_attn` names beside heads and `_moe` names beside experts. Source: MaxText 0.2.5,
configs/base.yml and the layers that name their axes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from xform.axes import Factor, Scope
from xform.roles.naming import Roles
from xform.trace import Literal, Var

LENGTHS = frozenset({"length", "kv_length"})
DATA = LENGTHS | {"batch", "microbatches"}
"""The roles of a batch of tokens."""

HEADS = frozenset({"heads", "kv_heads", "q_group"})
EXAMPLES = frozenset({"microbatches", "batch"})


@dataclasses.dataclass(frozen=True)
class Named:
    """A dimension for the rules.

    name: the logical name, or None where the role has none (it could not be told, or the size is 1).
    role: the role of its major factor. size: how far it can be split, the size of that factor (of all heads
    together).
    """

    name: str | None
    role: str
    size: int


def is_activation(roles: Roles, scope: Scope, var: Var | Literal) -> bool:
    """Whether a value is data or made of data: it has a batch axis, or holds integers along a length.

    A table of learnt positions has a length and no batch: it is a weight.
    """
    if roles.is_activation(scope, var):
        return True
    integer = jax.dtypes.issubdtype(getattr(var.aval, "dtype", np.float32), np.integer)
    return integer and any(role in LENGTHS for dim in roles.of(scope, var) for role in dim)


def logical_names(roles: Roles, scope: Scope, var: Var | Literal) -> list[Named]:
    """The logical name of each dimension of a value."""
    dims, factors = roles.of(scope, var), scope[var]
    flat = {role for dim in dims for role in dim}
    active = is_activation(roles, scope, var)
    alone = sum(bool(dim) and dim != ("layers",) for dim in dims) == 1
    found = []
    for dim, parts in zip(dims, factors, strict=True):
        if not dim:
            found.append(Named(None, "", 1))
            continue
        role, size = _together(dim, parts)
        if not roles.is_told(parts[0]) and not parts[0].sum:
            found.append(Named(None, role, size))
            continue
        name = _of_activation(role, flat) if active else _of_weight(role, flat, alone)
        found.append(Named(name, role, size))
    return found


def _together(dim: Sequence[str], parts: Sequence[Factor]) -> tuple[str, int]:
    """The role of a dimension's major factors, and how far they can be split together.

    kv_heads·q_group are the query heads; microbatches·batch, which the program takes apart, are the examples.
    """
    size, count = 1, 0
    group = HEADS if dim[0] in HEADS else EXAMPLES if dim[0] in EXAMPLES and "batch" in dim else {dim[0]}
    for role, part in zip(dim, parts, strict=True):
        if role not in group or (count and len(group) == 1):
            break
        size *= part.size
        count += 1
    if group is EXAMPLES:
        return "batch", size
    return ("heads" if count > 1 else dim[0]), size


def _of_weight(role: str, flat: set[str], alone: bool) -> str:
    experts = "experts" in flat
    match role:
        case "embed" if alone:
            return "norm"
        case "embed" if experts:
            return "embed_moe" if "mlp" in flat else "embed_router"
        case "embed" if flat & HEADS:
            return "embed_attn"
        case "embed" if "vocab" in flat:
            return "embed_vocab"
        case "mlp" if experts:
            return "mlp_moe"
        case "experts":
            return "exp"
        case "head_dim":
            return "kv_head_dim"
    return role


def _of_activation(role: str, flat: set[str]) -> str | None:
    attention = bool(flat & HEADS)
    routed = "experts" in flat and bool(flat & {"embed", "mlp"})  # sent to experts, not scores of them
    match role:
        case "batch" | "length" | "embed" | "mlp" if routed:
            return f"activation_{role}_moe"
        case "experts":
            return "activation_exp" if routed else None
        case "length" if "experts" in flat:
            return "activation_norm_length"
        case "batch" if attention:
            return "activation_kv_batch"
        case "batch" if "vocab" in flat or flat <= DATA:
            return "activation_embed_and_logits_batch"
        case "length" if attention:
            return "activation_length_attn"
        case "length" | "kv_length" if "embed" in flat or flat <= DATA:
            return "activation_norm_length"
        case "kv_length" if not attention:
            return "activation_length"  # of an encoder
        case "head_dim":
            return "activation_kv_head_dim"
    return f"activation_{role}"
