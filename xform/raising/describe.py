"""What was recognised in a function, as plain Python data and as lines to read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from xform.axes import find_axes
from xform.layers import find_stacks
from xform.raising.finding import Found, find
from xform.raising.lettering import KEYS, MORE, VALUES, WIDTHS
from xform.raising.meaning import Attention, CrossEntropy, Experts, Near, Norm, Raised, Recurrence, Tensor
from xform.raising.sinking import sunk
from xform.roles import find_roles
from xform.trace import Jaxpr, boundary

LETTERS = {
    "n": "kv_heads",
    "g": "q_group",
    "t": "length",
    "s": "kv_length",
    "d": "head_dim",
    "e": "v_head_dim",
    "v": "vocab",
    "x": "experts",
}
"""What the letters of a meaning are called; those that are not here are the batch's."""

MASKS = (
    "full", "causal", "window", "prefix", "chunked", "segments", "padding", "decode", "arbitrary", "alibi",
    "bias"
)  # fmt: skip
"""The kinds of mask, in the order in which a combination names them."""


def raised(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, list[dict[str, Any]]]:
    """What a function means: `{"raised": [...], "declined": [...]}`, an entry an operation.

    fn(*args, **kwargs) is traced, nothing is computed; args are arrays or `jax.ShapeDtypeStruct`s. Where it
    differentiates a function, that function is looked at, as a plan's passes see it. An operation in the body
    of a scan stands once. Entries of "raised" have "op" (attention, experts, cross_entropy,
    linear_recurrence, norm, layers), "where" (the name stack), "line", "axes" (sizes by role) and what is
    the operation's own: of attention "mask" (kinds joined by "+"), "scale", "cap", "sinks", "dropout",
    "cross". Entries of "declined" have "what", "why" and "where".
    """
    found = [(jaxpr, find(sunk(jaxpr))) for jaxpr in models(fn, *args, **kwargs)]
    entries = [entry(r) for _, each in found for r in each.raised]
    for jaxpr, _ in found:
        entries += _layers(jaxpr)
    return {"raised": entries, "declined": [near(n) for _, each in found for n in each.declined]}


def models(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Jaxpr]:
    """The programs that passes before autodiff act on: what is differentiated, or else the whole function."""
    seen: list[Jaxpr] = []

    def look(jaxpr: Jaxpr, values: Sequence[Any]) -> Jaxpr:
        seen.append(jaxpr)
        return jaxpr

    with boundary(look, object()):
        whole = jax.make_jaxpr(lambda *a, **k: fn(*a, **k))(*args, **kwargs)
    return seen or [whole]


def entry(r: Raised) -> dict[str, Any]:
    """One operation as plain data."""
    made: dict[str, Any] = {"op": r.op, "where": r.where or r.line, "line": r.line, "axes": axes(r)}
    meaning = r.meaning
    if isinstance(meaning, Attention):
        made |= {
            "mask": mask_name(meaning),
            "scale": meaning.scale,
            "cap": meaning.cap,
            "sinks": meaning.sinks is not None,
            "dropout": meaning.dropout,
            "cross": meaning.cross,
            "latent": meaning.latent,
        }
    elif isinstance(meaning, Norm):
        made |= {
            "kind": meaning.kind,
            "epsilon": meaning.epsilon,
            "scale": meaning.scale is not None,
            "shift": meaning.shift is not None,
        }
    elif isinstance(meaning, CrossEntropy):
        made |= {
            "cap": meaning.cap,
            "smoothing": meaning.smoothing,
            "z_loss": meaning.z_loss,
            "soft": meaning.soft,
        }
    elif isinstance(meaning, Experts):
        alone = not any("x" in dim for w in meaning.w for dim in w.dims)
        products = len(meaning.w) // (meaning.experts if alone else 1)
        made |= {"style": meaning.style, "experts": meaning.experts, "products": products}
    elif isinstance(meaning, Recurrence):
        made |= {"kind": meaning.kind, "chunk": meaning.chunk, "scale": meaning.scale}
    if r.note:
        made["note"] = r.note
    return made


def near(n: Near) -> dict[str, Any]:
    """A near miss as plain data."""
    return {"what": n.what, "why": n.why, "where": n.where or n.line, "line": n.line}


def axes(r: Raised) -> dict[str, int]:
    """The sizes of an operation's dimensions by role; several of the batch are one, their product."""
    if isinstance(r.meaning, Attention):
        return _axes_of_attention(r)
    batch = [size for letter, size in r.sizes.items() if letter not in LETTERS]
    named = {LETTERS[letter]: size for letter, size in r.sizes.items() if letter in LETTERS}
    if isinstance(r.meaning, Norm):
        shape = getattr(r.meaning.x.atom.aval, "shape", ())
        embed = math.prod(shape[i] for i in r.meaning.axes)
        return {"batch": math.prod(shape) // max(embed, 1), "embed": embed}
    if isinstance(r.meaning, Experts):
        wide = {"k": "embed", "f": "mlp"}
        own = {*"xXYZ", *wide}
        rows = [
            n for letter, n in r.sizes.items() if letter in "".join(r.meaning.x.dims) and letter not in own
        ]
        found = {name: r.sizes[letter] for letter, name in wide.items() if letter in r.sizes}
        return {"batch": math.prod(rows), "experts": r.meaning.experts} | found
    if isinstance(r.meaning, CrossEntropy):
        named["embed"] = named.pop("head_dim")
    return {"batch": math.prod(batch)} | named


def _axes_of_attention(r: Raised) -> dict[str, int]:
    """As `axes`; keys, or the width of heads, may lie in several dimensions."""
    names = dict(LETTERS)
    for own, name in ((KEYS, "s"), (WIDTHS, "d"), (VALUES, "e")):
        names |= dict.fromkeys(own, LETTERS[name])
    found = {"batch": 1}
    for letter, size in r.sizes.items():
        if letter not in MORE:
            name = names.get(letter, "batch")
            found[name] = found.get(name, 1) * size
    return found


def mask_name(meaning: Attention) -> str:
    """The kinds of a mask, and of what is added to the logits, joined."""
    kinds = {*meaning.mask.kinds, *meaning.bias_kinds}
    if len(kinds) > 1:
        kinds.discard("full")
    return "+".join(sorted(kinds, key=MASKS.index)) or "full"


def _layers(jaxpr: Jaxpr) -> Iterator[dict[str, Any]]:
    stacks, _ = find_stacks(jaxpr, find_roles(find_axes(jaxpr)))
    for stack in stacks:
        yield {
            "op": "layers",
            "where": f"{stack.kind} stack",
            "line": "",
            "axes": {"layers": stack.layers},
            "kind": stack.kind,
            "period": stack.period,
        }


def lines(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """The same for people: a line an entry, what they have in common counted."""
    rows = [_line(each) for each in found["raised"]]
    rows += [f"declined  {d['what']}: {d['why']} ({d['line'] or d['where']})" for d in found["declined"]]
    counts: dict[str, int] = {}
    for row in rows:
        counts[row] = counts.get(row, 0) + 1
    return [row + (f" [x{n}]" if n > 1 else "") for row, n in counts.items()]


def _line(each: Mapping[str, Any]) -> str:
    sizes = ", ".join(f"{name} {size}" for name, size in each["axes"].items())
    rest = [
        f"{key} {value:.6g}" if isinstance(value, float) else key if value is True else f"{key} {value}"
        for key, value in each.items()
        if key not in ("op", "where", "line", "axes") and value not in (None, False, 0.0, "")
    ]
    place = each["line"] or each["where"]
    return f"{each['op']:<18}{'; '.join([sizes, *rest])} ({place})"


__all__ = ["Found", "Tensor", "axes", "entry", "lines", "mask_name", "models", "near", "raised"]
