"""Attention as operations: the splash kernels against the plain forms, and what is known of both."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from tests.kernels_suite import SLICES, Case, agree_in_shard_map, agree_under_vmap, close, compiled, plain
from xform.errors import PlanError
from xform.higher_order import bodies, equations
from xform.kernels import splash
from xform.kernels.attention import AttentionBackward, AttentionForward, attention, attention_and_lse
from xform.kernels.blocks import Blocks
from xform.ops import Band, operation_of

CAUSAL = Band(right=0)
SMALL = Blocks(128, 256, 128, 128, 256, 128, use_fused_bwd_kernel=True)
TWO = Blocks(128, 256, 128, 128, 128, None, 256, 384, use_fused_bwd_kernel=False)

BFLOAT16 = 2e-2
"""Rounding q * scale, weights and results to eight bits."""


def made(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(rng.normal(size=shape), dtype)


def operands(
    op: AttentionForward,
    b: int = 1,
    n: int = 1,
    g: int = 2,
    t: int = 7,
    s: int = 7,
    d: int = 5,
    e: int = 3,
    dtype: Any = jnp.float32,
) -> tuple[Any, ...]:
    rng = np.random.default_rng(t * s)
    args = [made(rng, shape, dtype) for shape in ((b, n, g, t, d), (b, n, s, d), (b, n, s, e))]
    if op.sinks:
        args.append(made(rng, (n, g)))
    if op.segments:  # the last segment of queries has no keys
        args += [jnp.asarray(np.sort(rng.integers(0, 3, (b, t))), jnp.int32)]
        args += [jnp.asarray(np.sort(rng.integers(0, 2, (b, s))), jnp.int32)]
    return tuple(args)


def forward(band: Band = CAUSAL, scale: float = 0.3, **options: Any) -> AttentionForward:
    return AttentionForward(band=band, scale=scale, interpret=True, **options)


# name: the operation, sizes other than those of `operands`
TABLE: dict[str, tuple[AttentionForward, dict[str, Any]]] = {
    "causal, odd": (forward(), {}),
    "causal, aligned": (forward(scale=128**-0.5), {"t": 128, "s": 128, "d": 128, "e": 128}),
    "causal, 100": (forward(), {"t": 100, "s": 100}),
    "causal, bfloat16": (forward(), {"t": 100, "s": 100, "d": 64, "e": 64, "dtype": jnp.bfloat16}),
    "full, odd": (forward(Band()), {}),
    "full, aligned": (forward(Band()), {"t": 128, "s": 256}),
    "cross": (forward(Band()), {"t": 100, "s": 197, "b": 2, "n": 2, "g": 1}),
    "window": (forward(Band(right=0, left=30)), {"t": 197, "s": 197}),
    "window both ways": (forward(Band(right=3, left=2), blocks=SMALL), {"t": 300, "s": 300}),
    "chunks": (forward(Band(right=0, chunk=50)), {"t": 197, "s": 197}),
    "whole chunks": (forward(Band(chunk=64)), {"t": 150, "s": 150}),
    "prefix": (forward(Band(right=0, prefix=37)), {"t": 100, "s": 100}),
    "prefix of two blocks": (forward(Band(right=0, left=9, prefix=300), blocks=SMALL), {"t": 400, "s": 400}),
    "prefix of all": (forward(Band(right=0, prefix=500)), {"t": 100, "s": 100}),
    "offset": (forward(Band(right=0, offset=99)), {"t": 100, "s": 199}),
    "decode": (forward(Band(right=0, offset=99)), {"t": 1, "s": 150, "n": 2, "g": 3}),
    "few queries of many heads": (
        forward(Band(right=0, left=40, offset=60), segments=True),
        {"t": 5, "s": 150},
    ),
    "sinks": (forward(sinks=True), {"t": 100, "s": 100, "n": 3}),
    "few queries with sinks": (forward(Band(right=0, offset=9), sinks=True), {"t": 3, "s": 20}),
    "cap": (forward(cap=2.0), {"t": 100, "s": 100}),
    "segments": (forward(segments=True), {"t": 100, "s": 100, "b": 2}),
    "segments, full": (forward(Band(), segments=True), {"t": 100, "s": 150}),
    "segments, sinks, cap": (
        forward(segments=True, sinks=True, cap=3.0),
        {"t": 100, "s": 100, "b": 2, "n": 2},
    ),
    "some see none": (forward(Band(right=-20)), {"t": 100, "s": 100}),
    "some see none, by blocks": (forward(Band(right=0, offset=-300), blocks=SMALL), {"t": 500, "s": 300}),
    "none sees any": (forward(Band(right=-200)), {"t": 100, "s": 100}),
    "blocks": (forward(Band(right=0, left=150, offset=50), blocks=SMALL), {"t": 600, "s": 700, "g": 1}),
    "blocks, two kernels": (forward(Band(right=0, offset=50), blocks=TWO), {"t": 600, "s": 700, "g": 1}),
    "blocks, segments": (forward(segments=True, blocks=TWO), {"t": 300, "s": 300, "g": 1}),
}


def case(name: str) -> Case:
    op, sizes = TABLE[name]
    bfloat16 = sizes.get("dtype") == jnp.bfloat16
    return Case(name, op, operands(op, **sizes), BFLOAT16 if bfloat16 else 2e-6)


def backward(case: Case, results: Sequence[jax.Array] | None = None) -> Case:
    """The same of the backward operation, with an lse and a delta as they come. results: the plain ones."""
    op: Any = case.op
    out, lse = plain(op)(*case.args) if results is None else results
    dout = made(np.random.default_rng(3), out.shape, out.dtype)
    delta = jnp.asarray(np.sum(np.asarray(out, np.float32) * np.asarray(dout, np.float32), -1))
    q, k, v, _, segments = op.named(case.args)
    args = (q, k, v, *(segments or ()), lse, delta, dout)
    return Case(case.name, AttentionBackward(op), args, case.tolerance)


@pytest.mark.parametrize("name", TABLE)
def test_the_kernels_forward_and_backward_compute_what_the_plain_forms_do(name: str) -> None:
    there = case(name)
    results = plain(there.op)(*there.args)
    back = backward(there, results)
    kernels = jax.jit(lambda xs, ys: (*there.op.kernel(*xs), *back.op.kernel(*ys)))
    want = (*results, *plain(back.op)(*back.args))
    close(kernels(there.args, back.args), want, there.tolerance)


def around_kernels(jaxpr: Any) -> Iterator[Any]:
    """The equations at every depth but in kernels."""
    for eqn in jaxpr.eqns:
        yield eqn
        for body in bodies(eqn) if eqn.primitive.name != "pallas_call" else ():
            yield from around_kernels(body)


def test_the_parts_of_dq_are_added_as_they_lie() -> None:
    """A sum over the dimension of the parts would stand alone, and so would a cast of them all."""
    args = operands(forward(), t=300, s=300, dtype=jnp.bfloat16)
    rows = jax.ShapeDtypeStruct(args[0].shape[:-1], jnp.float32)
    dout = jax.ShapeDtypeStruct((*rows.shape, args[2].shape[-1]), jnp.bfloat16)
    kernel = AttentionBackward(forward(blocks=SMALL)).kernel
    found = list(around_kernels(jax.make_jaxpr(kernel)(*args, rows, rows, dout).jaxpr))
    assert "reduce_sum" not in {eqn.primitive.name for eqn in found}
    (parts,) = [v for eqn in found if eqn.primitive.name == "pallas_call" for v in eqn.outvars[:1]]
    assert parts.aval.shape[-4] == 2 and parts.aval.dtype == jnp.bfloat16
    casts = [eqn for eqn in found if eqn.primitive.name == "convert_element_type"]
    assert all(parts not in eqn.invars for eqn in casts)


MAPPED = ["segments, sinks, cap", "few queries of many heads"]


@pytest.mark.parametrize("form", [lambda each: each, backward], ids=["forward", "backward"])
@pytest.mark.parametrize("name", MAPPED)
def test_under_vmap_they_agree(name: str, form: Any) -> None:
    agree_under_vmap(form(case(name)))


@pytest.mark.parametrize("cut", ["b", "n", "bn"])
def test_in_shard_map_they_agree(cut: str) -> None:
    both = case("segments, sinks, cap")
    agree_in_shard_map(both, cut)
    agree_in_shard_map(backward(both), cut)


@pytest.mark.parametrize("interpret", [False, True])
def test_in_shard_map_gradients_of_what_all_devices_share_are_summed_over_them(interpret: bool) -> None:
    op = dataclasses.replace(TABLE["sinks"][0], interpret=interpret)
    q, k, v, sinks = operands(op, b=2)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    over, same = PartitionSpec("x"), PartitionSpec()

    def loss(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        k, v = (jnp.broadcast_to(x, (q.shape[0], *x.shape[1:])) for x in (k, v))
        return jnp.sum(jnp.sin(attention(op, q, k, v, sinks=sinks)))

    region: Any = jax.shard_map(
        lambda *xs: jax.lax.psum(loss(*xs), "x"), mesh=mesh, in_specs=(over, same, over, same), out_specs=same
    )
    args = (q, k[:1], v, sinks)
    got, want = (jax.jit(jax.grad(f, (0, 1, 2, 3)))(*args) for f in (region, loss))
    close(got, want, 1e-5)


def test_heads_of_one_key_head_may_lie_over_devices() -> None:
    agree_in_shard_map(case("segments, sinks, cap"), "g")


# ---------------------------------------------------------------- differentiated


def dense(op: AttentionForward, *args: Any) -> Any:
    """Attention as anybody writes it."""
    q, k, v, sinks, segments = op.named(args)
    logits = jnp.einsum("bngtd,bnsd->bngts", op.scale * q, k)
    if op.cap:
        logits = op.cap * jnp.tanh(logits / op.cap)
    seen = op.band.allowed(np.arange(q.shape[-2])[:, None], np.arange(k.shape[-2]))
    if segments is not None:
        seen = seen & (segments[0][:, None, None, :, None] == segments[1][:, None, None, None])
    logits = jnp.where(seen, logits, -1e30)
    if sinks is not None:
        extra = jnp.broadcast_to(sinks[None, :, :, None, None], (*logits.shape[:-1], 1))
        logits = jnp.concatenate([logits, extra], -1)
    weights = jax.nn.softmax(logits, -1)[..., : k.shape[-2]]
    return jnp.einsum("bngts,bnse->bngte", weights, v)


@pytest.mark.parametrize(
    "name", ["causal, odd", "segments, sinks, cap", "sinks", "window", "prefix", "cross"]
)
def test_values_and_gradients_are_those_of_attention_as_anybody_writes_it(name: str) -> None:
    """In plain JAX, and by the kernel in the interpreter."""
    op, sizes = TABLE[name]
    args = operands(op, **sizes)
    if op.segments:
        args = (*args[:-1], args[-2])
    plainly, interpreted = (dataclasses.replace(op, interpret=interpret) for interpret in (False, True))

    def loss(f: Any, op: AttentionForward, *xs: Any) -> Any:
        out = f(op, *xs, *args[len(xs) :])
        return jnp.sum(jnp.sin(out)), out

    def ours(op: AttentionForward, *xs: Any) -> Any:
        q, k, v, sinks, segments = op.named(xs)
        own, others = segments or (None, None)
        return attention(op, q, k, v, q_segments=own, kv_segments=others, sinks=sinks)

    floats = tuple(range(4 if op.sinks else 3))
    results = []
    for f, form in ((dense, plainly), (ours, plainly), (ours, interpreted)):
        grad = jax.value_and_grad(functools.partial(loss, f, form), floats, has_aux=True)
        (_, out), grads = jax.jit(grad)(*args[: len(floats)])
        results.append([out, *grads])
    for found in results[1:]:
        close(found, results[0], tolerance=1e-5)


def test_lse_has_a_gradient_too() -> None:
    op, _ = TABLE["causal, odd"]
    args = operands(op)

    def lse(q: Any, k: Any) -> Any:
        logits = op.scale * jnp.einsum("bngtd,bnsd->bngts", q, k)
        return jax.nn.logsumexp(jnp.where(np.tri(7, dtype=bool), logits, -jnp.inf), -1)

    def ours(q: Any, k: Any) -> Any:
        return attention_and_lse(op, q, k, args[2])[1]

    want, got = (
        jax.jit(jax.grad(lambda q, k, f=f: jnp.sum(f(q, k) ** 2), (0, 1)))(*args[:2]) for f in (lse, ours)
    )
    close(got, want, 1e-5)


@pytest.mark.parametrize("interpret", [False, True])
def test_a_query_that_sees_no_key_has_zero_and_takes_no_part_in_gradients(interpret: bool) -> None:
    op = AttentionForward(interpret=interpret, segments=True)
    q, k, v, *_ = operands(op, t=5, s=6)
    own, others = jnp.array([[0, 0, 7, 0, 7]]), jnp.array([[0, 0, 0, 1, 1, 1]])
    out, lse = attention_and_lse(op, q, k, v, None, own, others)
    assert (np.asarray(out)[..., [2, 4], :] == 0).all() and (np.asarray(lse)[..., [2, 4]] == -np.inf).all()
    assert np.isfinite(np.asarray(lse)[..., [0, 1, 3]]).all()

    def loss(q: Any, k: Any, v: Any) -> Any:
        return jnp.sum(attention(op, q, k, v, q_segments=own, kv_segments=others))

    dq, dk, dv = jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)
    assert (np.asarray(dq)[..., [2, 4], :] == 0).all() and (np.asarray(dq)[..., [0, 1, 3], :] != 0).any()
    assert (np.asarray(dk)[..., 3:, :] == 0).all() and (np.asarray(dv)[..., 3:, :] == 0).all()
    assert all(np.isfinite(x).all() for x in (dq, dk, dv))


def test_remat_that_saves_context_does_not_run_the_forward_kernel_again() -> None:
    q, k, v = operands(forward())

    def count(*saved: str) -> list[str]:
        policy = jax.checkpoint_policies.save_only_these_names(*saved)
        layer = jax.checkpoint(lambda q: jnp.sum(attention(forward(), q, k, v)), policy=policy)
        found = map(operation_of, equations(jax.make_jaxpr(jax.grad(layer))(q)))
        return sorted(op.name for op in found if op)

    assert count("context") == ["attention", "attention_backward"]
    assert count() == ["attention", "attention", "attention_backward"]


# ---------------------------------------------------------------- masks as data


@pytest.mark.parametrize("band", [TABLE[name][0].band for name in TABLE], ids=list(TABLE))
def test_the_function_of_positions_is_the_band(band: Band) -> None:
    t, s = np.arange(300)[:, None], np.arange(310)[None]
    function = splash.Seen(band, 300)
    if not band.is_full:
        want = band.allowed(t, s)
        np.testing.assert_array_equal(splash.Seen(band)(jnp.asarray(t + band.offset), s), want)
    np.testing.assert_array_equal(
        np.broadcast_to(function(jnp.asarray(t + band.offset), s), (300, 310)), band.allowed(t, s) & (s < 300)
    )


def test_chunks_of_any_length_start_where_they_do_up_to_a_million_positions() -> None:
    for chunk in (1, 3, 7, 100, 8191, 8192):
        starts = np.arange(0, 1 << 20, chunk)
        for at in (starts, starts + chunk - 1):
            got = splash._chunk_start(jnp.asarray(at), chunk)
            np.testing.assert_array_equal(np.asarray(got), at // chunk * chunk)
        np.testing.assert_array_equal(np.asarray(splash._chunk_start(jnp.array([-1, -chunk]), chunk)), -chunk)


@pytest.mark.parametrize(
    "name", ["causal, odd", "window", "offset", "some see none, by blocks", "prefix of two blocks"]
)
def test_blocks_are_visited_where_a_query_sees_a_key_and_nowhere_else(name: str) -> None:
    band = TABLE[name][0].band
    t, s, bq, bkv = 500, 700, 128, 256
    mask = splash._Rows(band, 1, 1, t, True).mask(512, s, 768, bq, bkv)
    seen = np.zeros((512, 768), bool)
    seen[:t, :s] = band.allowed(np.arange(t)[:, None], np.arange(s)[None])
    assert mask.visits is not None
    np.testing.assert_array_equal(mask.visits, seen.reshape(4, bq, 3, bkv).any((1, 3)))


def test_rows_of_blocks_stay_where_they_are_when_they_are_done() -> None:
    visits = np.array([[0, 1, 0, 1], [0, 0, 1, 0], [0, 0, 0, 0]], bool)
    numbers, run = splash._turns(visits)
    assert run.tolist() == [[True, True], [True, False], [False, False]]
    assert numbers[0].tolist() == [1, 3] and numbers[1].tolist() == [2, 2]


def test_nothing_of_the_size_of_queries_times_keys_is_in_the_program_of_long_texts() -> None:
    op = forward(segments=True)
    shapes = ((1, 1, 1, 32768, 64), (1, 1, 32768, 64), (1, 1, 32768, 64), (1, 32768), (1, 32768))
    args = [jax.ShapeDtypeStruct(x, jnp.int32 if len(x) == 2 else jnp.bfloat16) for x in shapes]
    for eqn in equations(jax.make_jaxpr(op.kernel)(*args)):
        assert all(np.prod(v.aval.shape) <= 32768 * 128 for v in eqn.outvars)
    constants = jax.make_jaxpr(op.kernel)(*args).consts
    assert sum(np.size(c) for c in constants) < 32768


# ---------------------------------------------------------------- on chips


def test_blocks_that_do_not_fit_are_refused_before_anything_is_compiled() -> None:
    q, v = (jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in ((1, 1, 1, 4096, 128), (1, 1, 4096, 128)))
    splash.check(q, v, False, "v5e", Blocks())
    for blocks in (
        Blocks(block_q=4096),
        Blocks(block_q_dkv=4096, block_kv_dkv=4096),
        Blocks(block_q_dq=4096),
    ):
        with pytest.raises(PlanError, match="take smaller ones"):
            splash.check(q, v, False, "v5e", blocks)


@pytest.mark.slow  # Mosaic compiles three forward and three backward kernels
@pytest.mark.parametrize("chip", SLICES)
def test_mosaic_compiles_forward_and_backward(chip: str) -> None:
    packed = AttentionForward(CAUSAL, 128**-0.5, chip=chip)
    latent = AttentionForward(Band(right=0, left=1000, prefix=3), 0.1, chip=chip)
    capped = AttentionForward(Band(right=0, chunk=100), 0.1, cap=30.0, sinks=True, chip=chip)

    def grads(*args: Any) -> Any:
        def outs(q: Any, k: Any, v: Any, wide: Any, narrow: Any, q2: Any, k2: Any, v2: Any, own: Any) -> Any:
            sinks = jnp.zeros((1, 2))
            return (
                attention(packed, q, k, v, q_segments=own, kv_segments=own),
                attention(latent, wide, wide[:, :, 0], narrow),
                attention(capped, q2, k2, v2, sinks=sinks),
            )

        made, pullback = jax.vjp(lambda *xs: outs(*xs, args[-1]), *args[:-1])
        return pullback(made)

    bf16, f32 = jnp.bfloat16, jnp.float32
    packed_q, packed_k = (4, 2, 2, 1500, 128), (4, 2, 1500, 128)
    odd_q, odd_k = (4, 1, 2, 197, 80), (4, 1, 197, 80)
    shapes = [(packed_q, bf16), (packed_k, bf16), (packed_k, bf16)]
    shapes += [((4, 1, 1, 2500, 192), bf16), ((4, 1, 2500, 128), bf16)]
    shapes += [(odd_q, f32), (odd_k, f32), (odd_k, f32), ((4, 1500), jnp.int32)]
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    _, kernels = compiled(chip, grads, args, PartitionSpec("x"))
    assert kernels == 2 + 3 + 2  # dq of 2500 keys, in three blocks, has a kernel of its own
