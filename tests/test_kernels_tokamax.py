"""Attention by tokamax: its kernels against the plain forms, masks that are data, and what is asked of it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from tests.kernels_suite import SLICES, Case, agree, agree_in_shard_map, agree_under_vmap, close, compiled
from xform import Kernels, Plan, PlanError, Shard, parallelize
from xform.higher_order import equations
from xform.kernels.attention import AttentionForward
from xform.kernels.blocks import Blocks
from xform.kernels.tokamax import TokamaxBackward, TokamaxForward, attention
from xform.ops import Band, operation_of

pytest.importorskip("tokamax")

CAUSAL = Band(right=0)
SMALL = Blocks(128, 256, 128, 128, 256, 128, use_fused_bwd_kernel=True)
FLOAT32 = 1e-5
"""Powers of two in place of e: the logits are rounded once more."""

BFLOAT16 = 2e-2
"""Rounding q * scale, weights and results to eight bits."""


def forward(band: Band = CAUSAL, mask: str = "", **options: Any) -> TokamaxForward:
    of = AttentionForward(band=band, scale=0.3, interpret=True, **{"blocks": SMALL} | options)
    return TokamaxForward(of, mask)


def operands(
    op: TokamaxForward,
    b: int = 1,
    n: int = 1,
    g: int = 2,
    t: int = 7,
    s: int = 7,
    d: int = 5,
    e: int = 3,
    dtype: Any = jnp.float32,
) -> tuple[Any, ...]:
    """The second query sees no key where there is a mask, nor do queries of the last segment."""
    keys = jax.random.split(jax.random.key(t * s), 7)
    shapes = ((b, n, g, t, d), (b, n, s, d), (b, n, s, e))
    args = [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=False)]
    if op.of.sinks:
        args.append(jax.random.normal(keys[3], (n, g)))
    if op.of.segments:
        args += [jnp.sort(jax.random.randint(keys[4], (b, t), 0, 3))]
        args += [jnp.sort(jax.random.randint(keys[5], (b, s), 0, 2))]
    if op.mask:
        shape = (t, s) if op.mask == "ts" else (b, t, s)
        args.append(jax.random.bernoulli(keys[6], 0.3, shape) & (np.arange(t) != 1)[:, None])
    return tuple(args)


# name: the operation, sizes other than those of `operands`
TABLE: dict[str, tuple[TokamaxForward, dict[str, Any]]] = {
    "causal": (forward(), {}),
    "causal, aligned": (forward(), {"t": 128, "s": 128, "d": 128, "e": 128}),
    "causal, bfloat16": (forward(), {"t": 100, "s": 100, "d": 64, "e": 64, "dtype": jnp.bfloat16}),
    "causal, more queries than keys": (forward(), {"t": 300, "s": 100}),
    "causal, many blocks": (forward(), {"t": 300, "s": 1100, "g": 1}),
    "full": (forward(Band()), {"t": 100, "s": 197, "b": 2, "n": 2, "g": 1}),
    "full, aligned": (forward(Band()), {"t": 128, "s": 256}),
    "window": (forward(Band(right=0, left=30)), {"t": 197, "s": 300}),
    "prefix": (forward(Band(right=0, prefix=37)), {"t": 100, "s": 100}),
    "some see none": (forward(Band(right=-20)), {"t": 100, "s": 100}),
    "a block sees none": (forward(Band(right=0, offset=-150)), {"t": 300, "s": 300}),
    "mask": (forward(Band(), "ts"), {"t": 100, "s": 150}),
    "mask, causal": (forward(mask="ts"), {"t": 300, "s": 300}),
    "mask of each row": (forward(Band(), "bts"), {"t": 20, "s": 30, "b": 3, "n": 2}),
    "mask, segments, sinks, cap": (
        forward(mask="bts", segments=True, sinks=True, cap=2.0),
        {"t": 20, "s": 20, "b": 2, "n": 2},
    ),
    "segments": (forward(segments=True), {"t": 100, "s": 100, "b": 2}),
    "segments, full": (forward(Band(), segments=True), {"t": 100, "s": 150}),
    "sinks": (forward(sinks=True), {"t": 100, "s": 100, "n": 3}),
    "cap": (forward(cap=2.0), {"t": 100, "s": 100}),
}


def case(name: str) -> Case:
    op, sizes = TABLE[name]
    bfloat16 = sizes.get("dtype") == jnp.bfloat16
    return Case(name, op, operands(op, **sizes), BFLOAT16 if bfloat16 else FLOAT32)


def backward(case: Case) -> Case:
    """The same of the backward operation, with what the forward one gives."""
    op: Any = case.op
    out, lse = op.plain(*case.args)
    dout = jax.random.normal(jax.random.key(3), out.shape, out.dtype)
    q, k, v, _, segments, mask = op.named(case.args)
    hidden = (*(segments or ()), *(() if mask is None else (mask,)))
    return Case(case.name, TokamaxBackward(op), (q, k, v, *hidden, out, lse, dout), case.tolerance)


@pytest.mark.parametrize("name", TABLE)
def test_the_kernel_computes_what_the_plain_form_does(name: str) -> None:
    agree(case(name))


@pytest.mark.parametrize("name", TABLE)
def test_the_backward_kernel_computes_what_the_plain_form_does(name: str) -> None:
    agree(backward(case(name)))


@pytest.mark.parametrize("segments", [False, True])
def test_nothing_of_the_size_of_queries_times_keys_is_in_the_program_of_long_causal_texts(
    segments: bool,
) -> None:
    op, length = forward(segments=segments), 4096
    args = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands(op, g=1, t=length, s=length)]
    for eqn in equations(jax.make_jaxpr(op.kernel)(*args)):
        assert all(np.prod(v.aval.shape) <= length * 128 for v in eqn.outvars)


MAPPED = ["mask, segments, sinks, cap", "causal"]


@pytest.mark.slow  # the interpreter runs in loops
@pytest.mark.parametrize("form", [lambda each: each, backward], ids=["forward", "backward"])
@pytest.mark.parametrize("name", MAPPED)
def test_under_vmap_they_agree(name: str, form: Any) -> None:
    agree_under_vmap(form(case(name)))


@pytest.mark.slow  # the interpreter runs on several devices
@pytest.mark.parametrize("cut", ["b", "n", "bn"])
def test_in_shard_map_they_agree(cut: str) -> None:
    both = case("mask, segments, sinks, cap")
    agree_in_shard_map(both, cut)
    agree_in_shard_map(backward(both), cut)


# ---------------------------------------------------------------- differentiated


@pytest.mark.parametrize("interpret", [False, True])
def test_values_and_gradients_are_those_of_attention_as_anybody_writes_it(interpret: bool) -> None:
    t, mask = 7, np.tri(7, dtype=bool) & (np.arange(7) % 3 != 1)
    op = dataclasses.replace(forward(Band(), sinks=True, cap=2.0).of, interpret=interpret)
    q, k, v, sinks = operands(TokamaxForward(op), b=2, n=2)

    def ours(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        return attention(TokamaxForward(op), q, k, v, sinks, None, jnp.asarray(mask))[0]

    def plain(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        logits = 2.0 * jnp.tanh(0.3 * jnp.einsum("bngtd,bnsd->bngts", q, k) / 2.0)
        extra = jnp.broadcast_to(sinks[None, :, :, None, None], (*logits.shape[:-1], 1))
        weights = jax.nn.softmax(jnp.concatenate([jnp.where(mask, logits, -1e30), extra], -1), -1)
        return jnp.einsum("bngts,bnse->bngte", weights[..., :t], v)

    args = (q, k, v, sinks)
    results = [jax.jit(jax.vjp(f, *args)[1])(plain(*args)) for f in (ours, plain)]
    close([ours(*args)], [plain(*args)], 1e-5)
    close(*results, tolerance=1e-5)


def test_where_context_is_saved_the_forward_kernel_does_not_run_again() -> None:
    q, k, v = operands(forward())

    def count(*saved: str) -> list[str]:
        policy = jax.checkpoint_policies.save_only_these_names(*saved)
        layer = jax.checkpoint(lambda q: jnp.sum(attention(forward(), q, k, v)[0]), policy=policy)
        found = map(operation_of, equations(jax.make_jaxpr(jax.grad(layer))(q)))
        return sorted(op.name for op in found if op)

    assert count("context") == ["attention", "attention_backward"]
    assert count() == ["attention", "attention", "attention_backward"]


# ---------------------------------------------------------------- in a plan

T = 7
Q, K, V = operands(forward(), b=2, n=3, t=T, s=T)
MASK = jax.random.bernoulli(jax.random.key(1), 0.4, (2, 1, 1, T, T))


def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
    scores = jnp.einsum("bngtd,bnsd->bngts", q, k) * 0.3
    return jnp.einsum("bngts,bnse->bngte", jax.nn.softmax(jnp.where(mask, scores, -1e9), -1), v)


def every_other(q: Any, k: Any, v: Any) -> Any:
    return attend(q, k, v, np.arange(T)[:, None] % 2 == np.arange(T) % 2)


def two_kinds(q: Any, k: Any, v: Any, own: Any, others: Any) -> Any:
    same = (x[:, None, None, :, None] == x[:, None, None, None] for x in (own, others))
    return attend(q, k, v, functools.reduce(jnp.logical_and, same))


SEGMENTS = jnp.array([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 2, 2, 2]])
OTHERS = jnp.array([[0, 1, 1, 1, 2, 2, 2], [0, 0, 0, 0, 0, 1, 1]])

# name: the function, its operands, and why JAX's splash attention does not compute it
LIFTED: dict[str, tuple[Any, tuple[Any, ...], str]] = {
    "data": (attend, (Q, K, V, MASK), "data for each query and key"),
    "data for all": (attend, (Q, K, V, MASK[:1]), "data for each query and key"),
    "position": (every_other, (Q, K, V), "no band, chunk or prefix"),
    "segments": (two_kinds, (Q, K, V, SEGMENTS, OTHERS), "two kinds of segments"),
}


def traced(fn: Any, *args: Any, devices: int = 1, **options: Any) -> Any:
    """The function under Kernels, its kernels interpreted; and the program."""
    passes: list[Any] = [Kernels(**{"interpret": True, "shortest": 1} | options)]
    passes = [Shard(collectives="auto"), *passes] if devices > 1 else passes
    step = parallelize(fn, Plan({"data": devices}, passes), devices=jax.devices()[:devices])
    return step, step.trace(*args)


def operations(program: Any) -> list[Any]:
    return [op for eqn in equations(program.jaxpr) if (op := operation_of(eqn)) is not None]


@pytest.mark.parametrize("name", LIFTED)
def test_masks_that_splash_attention_does_not_take_are_lifted(name: str) -> None:
    fn, args, why = LIFTED[name]

    def gradients(*args: Any) -> Any:
        return jax.value_and_grad(lambda *xs: jnp.sum(jnp.sin(fn(*xs, *args[3:]))), (0, 1, 2))(*args[:3])

    _, before = traced(gradients, *args)
    assert not operations(before) and why in str(before.report)
    step, after = traced(gradients, *args, library={"attention": "tokamax"})
    assert [op.name for op in operations(after)] == ["attention", "attention_backward"]
    assert "tokamax's splash attention, its mask an array" in str(after.report)
    close(jax.tree.leaves(step(*args)), jax.tree.leaves(gradients(*args)), 1e-5)


def test_causal_attention_has_no_array_as_mask() -> None:
    def causal(q: Any, k: Any, v: Any) -> Any:
        return attend(q, k, v, np.tri(T, dtype=bool))

    step, program = traced(causal, Q, K, V, library={"attention": "tokamax"})
    (op,) = operations(program)
    assert isinstance(op, TokamaxForward) and not op.mask
    assert "array" not in str(program.report)
    close([step(Q, K, V)], [causal(Q, K, V)], 1e-5)


@pytest.mark.slow  # the interpreter runs on two devices
def test_a_mask_that_is_data_lies_over_devices_with_its_rows() -> None:
    step, program = traced(attend, Q, K, V, MASK, devices=2, library={"attention": "tokamax"})
    assert "b over data" in str(program.report)
    close([step(Q, K, V, MASK)], [attend(Q, K, V, MASK)], 1e-5)


def biased(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bngtd,bnsd->bngts", q, k) + jnp.sin(np.arange(T) * np.arange(T)[:, None] * 1.0)
    return jnp.einsum("bngts,bnse->bngte", jax.nn.softmax(scores, -1), v)


BY_HEAD = MASK | (np.arange(3) == 1)[:, None, None, None]
NARROW = tuple(x.astype("float16") for x in (Q, K, V))


@pytest.mark.parametrize(
    ("fn", "args", "says"),
    [
        (biased, (Q, K, V), "bias on the logits"),
        (attend, (Q, K, V, BY_HEAD), "differs by head"),
        (attend, (*NARROW, MASK), "bfloat16 and float32, these are float16"),
    ],
)
def test_what_it_does_not_take_stays_as_it_was(fn: Any, args: Any, says: str) -> None:
    _, program = traced(fn, *args, library={"attention": "tokamax"})
    assert not operations(program) and says in str(program.report)


@pytest.mark.parametrize(
    ("blocks", "says"),
    [({"block_q_dq": 128}, "no 'block_q_dq'"), ({"block_q": 4096}, "take smaller ones")],
)
def test_blocks_are_those_of_its_kernels_and_have_to_fit(blocks: Any, says: str) -> None:
    options, long = (
        {"library": {"attention": "tokamax"}, "blocks": {"attention": blocks}},
        jnp.zeros((1, 3, 2, 4096, 5)),
    )
    with pytest.raises(PlanError, match=says):
        traced(attend, long, long[:, :, 0], long[:, :, 0], True, **options)


# ---------------------------------------------------------------- on chips


@pytest.mark.slow  # Mosaic compiles two forward and two backward kernels
@pytest.mark.parametrize("chip", SLICES)
def test_mosaic_compiles_forward_and_backward(chip: str) -> None:
    of = AttentionForward(band=CAUSAL, scale=0.1, chip=chip, blocks=Blocks(use_fused_bwd_kernel=True))
    masked = dataclasses.replace(of, band=Band(), cap=30.0)

    def grads(q: Any, k: Any, q2: Any, k2: Any, own: Any, mask: Any) -> Any:
        def outs(q: Any, k: Any, q2: Any, k2: Any) -> Any:
            causal = attention(TokamaxForward(of), q, k, k)[0]
            return causal, attention(TokamaxForward(masked), q2, k2, k2, None, (own, own), mask)[0]

        made, pullback = jax.vjp(outs, q, k, q2, k2)
        return pullback(made)

    shapes = [((8, 2, 2, 2500, 128), jnp.bfloat16), ((8, 2, 2500, 128), jnp.bfloat16)]
    shapes += [((8, 1, 2, 300, 80), jnp.float32), ((8, 1, 300, 80), jnp.float32)]
    shapes += [((8, 300), jnp.int32), ((8, 300, 300), jnp.bool_)]
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    _, kernels = compiled(chip, grads, args, PartitionSpec("x"))
    assert kernels == 4


@pytest.mark.slow  # compiles for a TPU
@pytest.mark.parametrize("collectives", ["explicit", "auto"])
def test_on_a_tpu_the_compiled_step_has_the_kernels_and_no_scores(collectives: Any) -> None:
    from xform import aot, topologies
    from xform.models import llama

    topologies.prepare_environment()
    topology = topologies.parse("v5e-4")
    size = llama.Config(512, 2, 256, 4, 2, 128, 512, remat=False)
    fn, args = llama.train_step(size=size, batch=4, length=1024)
    passes = [Shard(collectives=collectives), Kernels(library={"attention": "tokamax"})]
    step = parallelize(
        fn, Plan({"fsdp": 2, "tensor": 2}, passes), devices=topology.devices(), donate_argnums=0
    )
    lowered = step.lower(*args)
    result = aot.compile_lowered(lowered.lowered, topology=topology, mesh=step.mesh)
    assert sum(kernel.count for kernel in result.costs.kernels.values()) == 2 * 2
    assert "1024x1024x" not in lowered.as_text()
    result.check_promises(lowered.program.laid_out, lowered.program.report)
