"""From what a program means to the operation that computes it: for each kind, where a kernel fits and pays.

A row of `LOWERINGS` takes a raised operation and gives what stands in its place (`Lowered`), or raises
Decline with what keeps it from a kernel. Values come in whatever layout the program had; they are arranged as
the operation takes them, and its results back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from xform.errors import Decline, PlanError
from xform.kernels import cross_entropy as losses
from xform.kernels import grouped as megablox
from xform.kernels import tokamax
from xform.kernels.attending import attended
from xform.kernels.lowered import Lowered, Options, checked, value
from xform.kernels.recurrence import recurrence
from xform.kernels.stepwise import Steps
from xform.raising.canonical import arranged, back
from xform.raising.describe import axes, mask_name
from xform.raising.flat import dtype_of
from xform.raising.meaning import Attention, CrossEntropy, Experts, Product, Raised, Recurrence, Tensor
from xform.trace import Atom, Literal, Value, Var


def spelled(r: Raised) -> str:
    """An operation for people: `attention causal [batch 2, kv_heads 4, ...]`."""
    sizes = ", ".join(f"{name} {size}" for name, size in axes(r).items())
    kind = f" {mask_name(r.meaning)}" if isinstance(r.meaning, Attention) else ""
    return f"{r.op}{kind} [{sizes}]"


# ---------------------------------------------------------------- gated linear recurrences


def recurred(r: Raised, options: Options) -> list[Lowered]:
    """A recurrence by chunks, whatever way it was written."""
    m = r.meaning
    assert isinstance(m, Recurrence)
    sizes = {"n": 1, **r.sizes}
    blocks = checked(options, r.op, ("chunk", "heads"))
    if sizes["t"] < options.shortest:
        raise Decline(f"{sizes['t']} steps, fewer than kernels.shortest = {options.shortest}")
    batch = "".join(c for c in r.sizes if c not in "ntde")
    delta = m.kind in ("delta", "gated_delta", "kda")
    letters = {c for p in (m.decay,) if p is not None for t in (*p.times, *p.over) for c in "".join(t.dims)}
    if "e" in letters:
        raise Decline("its decay differs by the channel of its values")
    order = {"q": "ntd", "k": "ntd", "v": "nte", "decay": "ntd" if "d" in letters else "nt", "beta": "nt"}
    products = {name: p for name in order if (p := getattr(m, name)) is not None}
    tensors = [t for p in products.values() for t in (*p.times, *p.over)]
    tensors += [m.initial] if m.initial is not None else []
    own = [a for t in tensors if isinstance(a := t.atom, Var) and a not in r.view.makers and _inside(m, a)]
    steps = Steps(r, own) if m.step is not None else None
    takes = dict.fromkeys(a for t in tensors if isinstance(a := t.atom, Var) and a not in own)
    takes |= dict.fromkeys(steps.takes if steps else ())
    given = (m.final,) if m.read is not None else (m.out, m.final)
    gives = [a for t in given if t is not None and isinstance(a := t.atom, Var)]
    gives += steps.gives if steps else []

    def emit(values: Mapping[Var, Value]) -> Mapping[Var, Value]:
        made = steps.first(values) if steps else {}

        def of(tensor: Tensor, *dims: str) -> Value:
            if tensor.atom in made:
                return arranged(made[tensor.atom], ("t", *tensor.dims), (batch, *dims), sizes)
            return arranged(value(tensor, values), tensor.dims, (batch, *dims), sizes)

        def product(name: str) -> Value:
            p: Product | None = products.get(name)
            if p is None:
                return None
            shape = [math.prod(sizes[c] for c in batch), *(sizes[c] for c in order[name])]
            x: Value = jnp.full(shape, p.coefficient, jnp.float32)
            if p.times:
                x = of(p.times[0], *order[name])
                x = x if p.coefficient == 1.0 else x * p.coefficient
            for each in p.times[1:]:
                x = x * of(each, *order[name])
            for each in p.over:
                x = x / of(each, *order[name])
            return jnp.flip(x, 2) if m.reverse else x

        g, beta = product("decay"), product("beta")
        if g is not None and not m.decay_is_log:
            g = jnp.log(g.astype(jnp.float32))
        if delta and beta is None:
            beta = jnp.ones([math.prod(sizes[c] for c in batch), sizes["n"], sizes["t"]], jnp.float32)
        initial = None if m.initial is None else of(m.initial, *"nde")
        out, final = recurrence(
            product("q"),
            product("k"),
            product("v"),
            g,
            beta,
            initial,
            scale=m.scale,
            chip=options.chip,
            chunk=blocks.get("chunk"),
            heads=blocks.get("heads"),
            interpret=options.interpret,
        )
        out = jnp.flip(out, 2) if m.reverse else out
        found: dict[Any, Value]
        if m.read is None:
            found = {m.out.atom: back(out, (batch, *"nte"), m.out.dims, sizes)}
        else:
            assert steps is not None
            kind: Any = dtype_of(m.read.atom)
            read = back(out, (batch, *"nte"), ("t", *m.read.dims), sizes)
            found = dict(steps.last(values, read.astype(kind)))
        if m.final is not None:
            found[m.final.atom] = back(final, (batch, *"nde"), m.final.dims, sizes)
        return {v: found[v].astype(dtype_of(v)) for v in gives}

    return [Lowered(tuple(takes), tuple(gives), emit, f"{m.kind} by chunks")]


def _inside(m: Recurrence, atom: Var) -> bool:
    """Whether a value is one of the body of the recurrence's loop."""
    return m.step is not None and (atom in m.step.makers or atom in m.step.jaxpr.all_invars)


# ---------------------------------------------------------------- cross-entropy


def entropied(r: Raised, options: Options) -> list[Lowered]:
    """The head and its cross-entropy as one kernel that never has the logits whole."""
    m = r.meaning
    assert isinstance(m, CrossEntropy)
    checked(options, r.op, ())
    v = r.sizes["v"]
    for held, why in (
        (m.logits_used, "its logits are used besides: they are needed whole"),
        (m.soft, "its labels are shares of the vocabulary"),
        (m.summed or m.out is None or m.part is not None, "its losses are not one a token"),
        (m.lse is not None or m.picked is not None, "its log-sum-exp or the labels' logits are used besides"),
        (m.valid is not None, "a part of the vocabulary is masked away"),
        (
            m.outside[0] == "other" or m.outside[1] in ("other", "wrap"),
            "what labels outside the vocabulary pick",
        ),
    ):
        if held:
            raise Decline(why)
    if why := losses.refused(m.x.atom.aval, m.w.atom.aval):
        raise Decline(why)
    eqns = [r.view.eqns[n] for n in r.numbers]
    dots = [dtype_of(v) for eqn in eqns if eqn.primitive.name == "dot_general" for v in eqn.invars]
    kind = jnp.result_type(dtype_of(m.x.atom), *dots)
    why = _worth(r, options, kind.itemsize)
    assert m.out is not None and isinstance(m.out.atom, Var)
    out, made = m.out, m.out.atom
    tokens = tuple(c for dim in m.x.dims for c in dim if c != "d")
    turned = "".join(m.w.dims).index("v") < "".join(m.w.dims).index("d")
    form = losses.Form(cap=m.cap, scale=m.scale, smoothing=m.smoothing, transposed=turned)
    tensors = [m.x.atom, m.w.atom, m.labels.atom, *([] if m.bias is None else [m.bias])]

    def emit(values: Mapping[Var, Value]) -> Mapping[Var, Value]:
        x = arranged(value(m.x, values), m.x.dims, (*tokens, "d"), r.sizes).astype(kind)
        w = arranged(value(m.w, values), m.w.dims, ("v", "d") if turned else ("d", "v"), r.sizes)
        labels = arranged(value(m.labels, values), m.labels.dims, tokens, r.sizes).astype(jnp.int32)
        bias = None if m.bias is None else value(Tensor(m.bias, ("v",)), values)
        inside, wrong = _within(labels, v, m.outside)
        loss, lse = losses.cross_entropy(
            form, x, w, inside, bias, chip=options.chip, interpret=options.interpret
        )
        loss = loss + m.z_loss * lse**2 + m.offset if m.z_loss else loss + m.offset
        loss = jnp.where(wrong, jnp.nan, loss)
        loss = back(-loss if m.negative else loss, tokens, out.dims, r.sizes)
        return {made: loss.astype(dtype_of(made))}

    takes = tuple(dict.fromkeys(a for a in tensors if isinstance(a, Var)))
    return [Lowered(takes, (made,), emit, why)]


def _worth(r: Raised, options: Options, size: int) -> str:
    """What the kernel is better for than what the program does else, by what of it a device has. Declines
    where it is for nothing, unless the user asks for it.
    """
    t = -(-math.prod(n for c, n in r.sizes.items() if c not in "dv") // options.tokens_over)
    d, v = r.sizes["d"], r.sizes["v"]
    v = v // options.vocab_over if v % options.vocab_over == 0 else v
    if losses.pays(options.chip, t, d, v, size, "plain"):
        return "head and loss in one, in less time than with whole logits"
    logits = 2 * 4.0 * t * v
    if logits > options.memory / 2:
        return f"head and loss in one: whole logits and their gradient take {logits / 1e6:.0f} MB of a device"
    if not options.asked:
        raise Decline(
            f"whole logits, {logits / 2e6:.0f} MB a device, take less time: the kernel computes them twice"
            " (kernels.only asks for it)"
        )
    return "head and loss in one"


def _within(labels: Value, v: int, outside: tuple[str, str]) -> tuple[Value, Value]:
    """Labels that pick what the program's pick outside of the vocabulary too, and which make no number."""
    low, high = labels < 0, labels >= v
    wrong = jnp.zeros(labels.shape, bool)
    for where, kind, nearest in ((low, outside[0], 0), (high, outside[1], v - 1)):
        if kind == "wrap":
            labels = jnp.where(where, labels + v, labels)
        elif kind == "clamp":
            labels = jnp.where(where, nearest, labels)
        elif kind == "nan":
            wrong |= where
    return labels, wrong


# ---------------------------------------------------------------- products by expert


def grouped(r: Raised, options: Options) -> list[Lowered]:
    """Products of sorted tokens with the weights of each one's expert, by megablox."""
    m = r.meaning
    assert isinstance(m, Experts)
    checked(options, r.op, ())
    if not m.products:
        raise Decline(f"its products are written as {m.style}, not as ragged_dot of sorted tokens")
    return [_grouped(each, options) for each in m.products]


def _grouped(product: tuple[Atom, Atom, Atom, Var], options: Options) -> Lowered:
    x, w, sizes, out = product
    if why := megablox.refused(x.aval, w.aval, sizes.aval):
        raise Decline(why)
    aval: Any = out.aval

    def emit(values: Mapping[Var, Value]) -> Mapping[Var, Value]:
        args = [a.val if isinstance(a, Literal) else values[a] for a in (x, w, sizes)]
        made = megablox.grouped_matmul(
            *args,
            dtype=aval.dtype,
            chip=options.chip,
            interpret=options.interpret,
            library=options.library,
        )
        return {out: made}

    takes = tuple(dict.fromkeys(a for a in (x, w, sizes) if isinstance(a, Var)))
    return Lowered(takes, (out,), emit, "megablox" if options.library == "jax" else "tokamax's ragged dot")


def provided(op: str, library: str) -> None:
    """Raises PlanError where a library has no kernel for an operation, or is not there."""
    if library not in LIBRARIES:
        raise PlanError(f"kernels.library: {op} by {library!r}: there is {' and '.join(LIBRARIES)}")
    if op not in LIBRARIES[library]:
        has = ", ".join(LIBRARIES[library])
        raise PlanError(f"kernels.library: {library} is not used for {op}; it is for: {has}")
    if library == "tokamax":
        tokamax.required(f"kernels.library: {op} = {library!r}")


LOWERINGS: dict[str, Callable[[Raised, Options], list[Lowered]]] = {
    "attention": attended,
    "cross_entropy": entropied,
    "experts": grouped,
    "linear_recurrence": recurred,
}
"""The operations that have a kernel."""

LIBRARIES: dict[str, Sequence[str]] = {"jax": tuple(LOWERINGS), "tokamax": tokamax.OPERATIONS}
"""Whose kernels there are, and the operations for which they are: "jax" means its own and those of this
package.
"""

__all__ = ["LOWERINGS", "Lowered", "Options", "provided", "spelled"]
