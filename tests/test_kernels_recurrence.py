"""The gated linear recurrence: its kernels against the recurrence step by step, in every form."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xform import topologies
from xform.kernels.recurrence import RecurrenceForward, recurrence
from xform.kernels.recurrence_blocks import BLOCKS, VMEM, fitted, sizes_of, vmem_bytes

Array = jax.Array

FORMS = {
    "kda": ("channel", True),
    "gla": ("channel", False),
    "gated_delta": ("head", True),
    "retention": ("head", False),
    "delta": ("none", True),
    "linear": ("none", False),
}

SHAPES = {  # b, n, t, d, e
    "odd": (1, 3, 19, 5, 3),
    "aligned": (1, 1, 16, 64, 128),
    "short": (2, 1, 3, 7, 5),
}

# What is summed differently is a few units in the last place; a bfloat16 operand is rounded to eight bits.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}


def operands(
    form: str, shape: Sequence[int], dtype: Any = jnp.float32, strong: bool = False, seed: int = 0
) -> Any:
    """q, k, v, g, beta and the initial state. strong: a fifth of all decays is exp(-20), the rest any."""
    decay, delta = FORMS[form]
    b, n, t, d, e = shape
    rng = np.random.default_rng(seed)
    q, k, v = (rng.normal(size=(b, n, t, width)) for width in (d, d, e))
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    g = None
    if decay != "none":
        dims = (b, n, t, d) if decay == "channel" else (b, n, t)
        g = -np.exp(rng.normal(size=dims) * (2 if strong else 1) - (0 if strong else 3))
        g = np.where(rng.uniform(size=dims) < 0.2, -20.0, g) if strong else g
    beta = 1 / (1 + np.exp(-rng.normal(size=(b, n, t)))) if delta else None
    initial = rng.normal(size=(b, n, d, e))
    wide = [None if x is None else jnp.asarray(x, jnp.float32) for x in (g, beta, initial)]
    return (*(jnp.asarray(x, dtype) for x in (q, k, v)), *wide)


def stepwise(q: Array, k: Array, v: Array, g: Any, beta: Any, state: Array) -> tuple[Array, Array]:
    """The recurrence in float64, in numpy's own words."""
    q, k, v, state = (np.asarray(x, np.float64) for x in (q, k, v, state))
    outs = []
    for t in range(q.shape[2]):
        if g is not None:
            a = np.exp(np.asarray(g, np.float64)[:, :, t])
            state = state * (a[..., None] if a.ndim == 3 else a[..., None, None])
        u = v[:, :, t]
        if beta is not None:
            u = np.asarray(beta, np.float64)[:, :, t, None] * (
                u - np.einsum("bnde,bnd->bne", state, k[:, :, t])
            )
        state = state + k[:, :, t, :, None] * u[:, :, None]
        outs.append(0.3 * np.einsum("bnde,bnd->bne", state, q[:, :, t]))
    return np.stack(outs, 2), state


def results(args: Sequence[Any], run: Callable[..., Any]) -> list[Array]:
    """What `run` gives and its gradients, for cotangents of both results."""
    given = tuple(i for i, x in enumerate(args) if x is not None)
    return _results(run, given)(*(args[i] for i in given))


@cache
def _results(run: Callable[..., Any], given: tuple[int, ...]) -> Callable[..., list[Array]]:
    """A function that is compiled once for all tests that run the same on equal shapes."""

    @jax.jit
    def all_of(*xs: Array) -> list[Array]:
        outs, back = jax.vjp(
            lambda *ys: run(*(ys[given.index(i)] if i in given else None for i in range(6))), *xs
        )
        rng = np.random.default_rng(7)
        cotangents = [jnp.asarray(rng.normal(size=o.shape), jnp.bfloat16) for o in outs]
        return [*outs, *back(tuple(c.astype(o.dtype) for c, o in zip(cotangents, outs, strict=True)))]

    return all_of


def distance(got: Any, want: Any) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30))


kernel = partial(recurrence, scale=0.3, interpret=True, chunk=16, heads=2)
plain = partial(recurrence, scale=0.3, interpret=False, chunk=16)
long_kernel = partial(recurrence, scale=0.3, interpret=True, chunk=64)
long_plain = partial(recurrence, scale=0.3)


def check(args: Sequence[Any], run: Callable[..., Any] = kernel, of: Callable[..., Any] = plain) -> None:
    dtype = str(args[0].dtype)
    wide = [None if x is None else x.astype(jnp.float32) for x in args]
    for got, want in zip(results(args, run), results(wide, of), strict=True):
        assert np.isfinite(np.asarray(got, np.float32)).all()
        assert distance(got, want) < TOLERANCE[dtype], got.shape


@pytest.mark.parametrize("form", FORMS)
def test_the_plain_form_is_the_recurrence_step_by_step(form: str) -> None:
    args = operands(form, SHAPES["odd"])
    for got, want in zip(plain(*args), stepwise(*args), strict=True):
        assert distance(got, want) < 1e-6


@pytest.mark.parametrize("form", FORMS)
def test_the_kernels_agree_with_the_recurrence_values_and_gradients(form: str) -> None:
    check(operands(form, SHAPES["odd"]))


@pytest.mark.parametrize(
    ("form", "shape"), [("kda", "aligned"), ("gated_delta", "aligned"), ("gated_delta", "short")]
)
def test_they_agree_for_other_shapes(form: str, shape: str) -> None:
    check(operands(form, SHAPES[shape]))


@pytest.mark.parametrize("form", ["kda", "gated_delta", "gla"])
def test_in_bfloat16_they_agree_within_its_rounding(form: str) -> None:
    check(operands(form, SHAPES["odd"], jnp.bfloat16))


@pytest.mark.parametrize("form", ["kda", "gla", "gated_delta", "retention"])
def test_strong_decays_beside_weak_ones_lose_no_precision(form: str) -> None:
    check(operands(form, SHAPES["odd"], strong=True))


@pytest.mark.slow  # chunks of 64 steps are large programs for the CPU's compiler
@pytest.mark.parametrize("form", ["kda", "gated_delta", "retention"])
def test_long_sequences_in_long_chunks_agree_whether_decays_are_strong_or_not(form: str) -> None:
    for strong in (False, True):
        args = operands(form, (1, 2, 500, 32, 48), strong=strong)
        check(args, long_kernel, long_plain)


def test_a_state_carried_from_one_call_to_the_next_is_one_sequence() -> None:
    q, k, v, g, beta, initial = operands("kda", SHAPES["odd"])
    whole, final = kernel(q, k, v, g, beta, initial)
    first, middle = kernel(*(x[:, :, :11] for x in (q, k, v, g, beta)), initial)
    second, last = kernel(*(x[:, :, 11:] for x in (q, k, v, g, beta)), middle)
    assert distance(jnp.concatenate([first, second], 2), whole) < 1e-6
    assert distance(last, final) < 1e-6


def test_without_an_initial_state_it_is_zero() -> None:
    *args, initial = operands("gated_delta", SHAPES["short"])
    for got, want in zip(kernel(*args), kernel(*args, jnp.zeros_like(initial)), strict=True):
        assert (got == want).all()


def test_under_vmap_they_agree() -> None:
    many = jax.tree.map(
        lambda *xs: jnp.stack(xs), *(operands("gated_delta", SHAPES["short"], seed=s) for s in (1, 2, 3))
    )
    check(many, jax.vmap(lambda *xs: kernel(*xs)), jax.vmap(lambda *xs: plain(*xs)))


MESH = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"))
SPEC = PartitionSpec("data", "tensor")


def test_inside_shard_map_each_device_does_its_own_heads() -> None:
    # jax's interpreter of kernels does not know what varies over which axis; the plain form and Mosaic do.
    cut = jax.shard_map(
        lambda *xs: kernel(*xs), mesh=MESH, in_specs=(SPEC,) * 6, out_specs=SPEC, check_vma=False
    )
    check(operands("retention", (2, 4, 3, 5, 3)), cut)


def test_inside_shard_map_a_state_of_zeros_and_shared_operands_are_as_outside() -> None:
    args = operands("retention", (2, 4, 3, 5, 3))[:5]
    shared = (args[0][:1, :1], *args[1:])
    specs = (PartitionSpec(), *(SPEC,) * 4)
    cut = jax.shard_map(
        lambda q, *xs: plain(jnp.broadcast_to(q, xs[0].shape), *xs), mesh=MESH, in_specs=specs, out_specs=SPEC
    )
    whole = lambda q, *xs: plain(jnp.broadcast_to(q, xs[0].shape), *xs)  # noqa: E731
    check([*shared, None], lambda *xs: cut(*xs[:5]), lambda *xs: whole(*xs[:5]))


def test_in_the_tpu_interpreter_the_state_stays_from_chunk_to_chunk() -> None:
    args = operands("retention", SHAPES["odd"])
    q, k, v, g, _, initial = args
    with pltpu.force_tpu_interpret_mode():
        op = RecurrenceForward("head", False, 0.3, 16, 1)
        got = op.kernel(q, k, v, g, initial)
    for each, want in zip(got, plain(*args), strict=True):
        assert distance(each, want) < 1e-5


def test_remat_that_saves_context_does_not_run_the_forward_kernel_again() -> None:
    args = operands("gated_delta", SHAPES["short"])

    def loss(save: Sequence[str], q: Array) -> Array:
        policy = jax.checkpoint_policies.save_only_these_names(*save)
        return jax.checkpoint(lambda x: kernel(x, *args[1:])[0].sum(), policy=policy)(q)

    def count(save: Sequence[str]) -> int:
        return str(jax.make_jaxpr(jax.grad(partial(loss, save)))(args[0])).count("op=RecurrenceForward(")

    assert count(["context"]) == 1
    assert count([]) == 2


def test_a_short_sequence_is_one_short_chunk_and_heads_are_a_divisor() -> None:
    sizes = sizes_of((1, 6, 5, 64), 128, 64, 4)
    assert (sizes.chunk, sizes.chunks, sizes.heads) == (16, 1, 3)


@pytest.mark.slow  # Mosaic compiles two kernels for each
@pytest.mark.parametrize(
    ("chip", "form", "dtype"),
    [
        ("v5e-4", "kda", "bfloat16"),
        ("v5e-4", "gated_delta", "float32"),
        ("v5e-4", "retention", "bfloat16"),
        ("v5p-8", "kda", "float32"),
        ("v5p-8", "gated_delta", "bfloat16"),
        ("v5p-8", "retention", "float32"),
        ("v6e-4", "kda", "float32"),
        ("v6e-4", "gated_delta", "bfloat16"),
        ("v6e-4", "retention", "float32"),
    ],
)
def test_mosaic_compiles_both_kernels_inside_shard_map(chip: str, form: str, dtype: str) -> None:
    topologies.prepare_environment()
    mesh = Mesh(np.ravel(topologies.parse(chip).devices()), ("tensor",))
    spec = PartitionSpec(None, "tensor")
    decay, delta = FORMS[form]
    b, n, t, d, e = 1, 2 * mesh.size, 300, 128, 192
    dims = ["bntd", "bntd", "bnte", *([] if decay == "none" else ["bntd" if decay == "channel" else "bnt"])]
    dims += ["bnt"] * delta
    sizes = {"b": b, "n": n, "t": t, "d": d, "e": e}
    args = [
        jax.ShapeDtypeStruct(
            [sizes[letter] for letter in letters],
            jnp.dtype(dtype) if i < 3 else jnp.float32,
            sharding=NamedSharding(mesh, spec),
        )
        for i, letters in enumerate(dims)
    ]

    def loss(q: Array, k: Array, v: Array, *gates: Array) -> Array:
        g, beta = [*([None] if decay == "none" else []), *gates, *([] if delta else [None])]
        out, final = recurrence(q, k, v, g, beta, chip=chip[:3])
        return jax.lax.psum(out.astype(jnp.float32).sum() + final.sum(), "tensor")

    cut = jax.shard_map(loss, mesh=mesh, in_specs=spec, out_specs=PartitionSpec())
    text = jax.jit(jax.grad(cut, tuple(range(len(args))))).lower(*args).compile().as_text()
    assert len(re.findall(r'custom_call_target="tpu_custom_call"', text)) == 2


def test_a_program_takes_as_many_heads_as_vmem_holds() -> None:
    for chip, table in BLOCKS.items():
        for (channel, delta), (chunk, heads) in table.items():
            decay = "channel" if channel else "head"
            asked = sizes_of((2, 16, 4096, 128), 128, chunk, heads)
            assert fitted(asked, decay, delta, 2) == asked, chip
    large = fitted(sizes_of((2, 16, 4096, 256), 512, 64, 16), "channel", True, 4)
    assert large.heads < 16 and vmem_bytes(large, "channel", True, 4) <= VMEM
