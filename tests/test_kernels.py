"""Kernels: what becomes a kernel, on one device and on several, what does not and why; the same numbers."""

import re
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xform import ChunkedLoss, Kernels, Plan, PlanError, Remat, Shard, check, parallelize, topologies
from xform.errors import Decline
from xform.higher_order import equations
from xform.kernels import lowering
from xform.models import llama
from xform.ops import operation_of
from xform.raising.finding import find
from xform.trace import typeof

RNG = np.random.default_rng(0)
B, T, H, N, D = 2, 7, 6, 3, 5


def made(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


Q, K, V = made(B, T, H, D), made(B, T, N, D), made(B, T, N, D)
POSITIONS = np.arange(T)
CAUSAL = POSITIONS[:, None] >= POSITIONS
LOW = jnp.finfo(jnp.float32).min


def attend(q: Any, k: Any, v: Any, mask: Any = None, low: Any = LOW, bias: Any = 0.0) -> Any:
    """Grouped-query attention, plainly."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) * 0.3 + bias
    scores = scores if mask is None else jnp.where(mask, scores, low)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, -1), v)


def on_one(fn: Callable, *args: Any, **options: Any) -> Any:
    """The function under Kernels on one device, its kernels interpreted."""
    passes = [Kernels(**{"interpret": True, "shortest": 1} | options)]
    step = parallelize(fn, Plan({"data": 1}, passes), devices=jax.devices()[:1])
    return step.trace(*args), step


def operations(program: Any) -> Counter[str]:
    return Counter(op.name for eqn in equations(program.jaxpr) if (op := operation_of(eqn)) is not None)


def reasons(program: Any) -> str:
    return "\n".join(f"{n.what}: {n.why}" for n in program.report.of("declined"))


def causal_loss(q: Any, k: Any, v: Any) -> Any:
    return jnp.sum(jnp.sin(attend(q, k, v, CAUSAL)))


def test_attention_becomes_one_operation_and_its_gradient_another() -> None:
    gradients = jax.grad(causal_loss, (0, 1, 2))
    program, step = on_one(gradients, Q, K, V)
    assert operations(program) == {"attention": 1, "attention_backward": 1}
    assert "exp" not in {eqn.primitive.name for eqn in program.jaxpr.eqns}
    for got, want in zip(step(Q, K, V), gradients(Q, K, V), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)


def test_a_function_that_is_not_differentiated_stays_differentiable_from_outside() -> None:
    _, step = on_one(causal_loss, Q, K, V)
    np.testing.assert_allclose(step(Q, K, V), causal_loss(Q, K, V), rtol=1e-5)
    np.testing.assert_allclose(jax.grad(step)(Q, K, V), jax.grad(causal_loss)(Q, K, V), atol=2e-5)


def test_layers_in_a_loop_that_share_a_mask_made_of_segments() -> None:
    segments = jnp.asarray(RNG.integers(0, 2, (B, T)).cumsum(1))

    def loss(ws: Any, x: Any, segments: Any) -> Any:
        mask = (CAUSAL & (segments[:, :, None] == segments[:, None, :]))[:, None]

        def layer(x: Any, w: Any) -> Any:
            q = (x @ w).reshape(B, T, H, D)
            return x + attend(q, q[:, :, :N], q[:, :, N:], mask).reshape(x.shape), None

        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, ws)[0] ** 2)

    ws, x = made(2, H * D, H * D) / 5, made(B, T, H * D)
    gradient = jax.grad(loss)
    program, step = on_one(gradient, ws, x, segments)
    assert operations(program) == {"attention": 2, "attention_backward": 1}  # forward, again, backward
    want = gradient(ws, x, segments)
    np.testing.assert_allclose(step(ws, x, segments), want, atol=1e-4 * float(jnp.abs(want).max()))


@pytest.mark.parametrize("low", [LOW, -1e9, -jnp.inf], ids=str)
def test_a_query_that_sees_no_key_gets_what_the_program_has_for_it(low: Any) -> None:
    seen = np.ones((B, T), bool)
    seen[0, :] = False  # a text of padding alone
    seen[1, 4:] = False

    def run(q: Any, k: Any, v: Any, seen: Any) -> Any:
        return attend(q, k, v, seen[:, None, None, :], low)

    program, step = on_one(run, Q, K, V, seen)
    assert operations(program) == {"attention": 1}
    np.testing.assert_allclose(step(Q, K, V, seen), run(Q, K, V, seen), atol=2e-5)

    def masked(v: Any) -> Any:
        return jnp.sum(jnp.nan_to_num(run(Q, K, v, seen)) ** 2)

    _, step = on_one(jax.grad(masked), V)
    np.testing.assert_allclose(step(V), jax.grad(masked)(V), atol=5e-5)


def test_a_mask_that_is_added_leaves_a_query_that_sees_no_key_its_derivative() -> None:
    """Its scores are lost in what is added, their derivative is not."""
    seen = np.ones((B, T), bool)
    seen[0, :] = False
    seen[1, 4:] = False

    def loss(q: Any, k: Any, v: Any, seen: Any) -> Any:
        added = jnp.where(CAUSAL & seen[:, None, :], 0.0, -1e9)[:, None]
        return jnp.sum(jnp.sin(attend(q, k, v, bias=added)))

    gradients = jax.grad(loss, (0, 1, 2))
    program, step = on_one(gradients, Q, K, V, seen)
    assert operations(program) == {"attention": 1, "attention_backward": 1}
    want = gradients(Q, K, V, seen)
    for a, b in zip(step(Q, K, V, seen), want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    assert float(jnp.abs(want[0][0]).max()) > 1e-3


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (lambda q, k, v: attend(q, k, v, CAUSAL, bias=jnp.sin(q[0, :, 0, 0])), "bias on the logits"),
        (
            lambda q, k, v: attend(q, k, v, q[:, None, :, 0, :1] > k[:, None, :, 0, 0][:, :, None]),
            "data for each query",
        ),
        (lambda q, k, v: attend(q, k, v, (POSITIONS[:, None] * POSITIONS) % 3 > 0), "no band"),
    ],
    ids=["bias", "data", "table"],
)
def test_what_the_kernel_does_not_take_stays_as_it_was_with_the_reason(fn: Callable, why: str) -> None:
    program, step = on_one(fn, Q, K, V)
    assert not operations(program)
    assert why in reasons(program)
    np.testing.assert_array_equal(step(Q, K, V), jax.jit(fn)(Q, K, V))


def test_short_texts_and_machines_without_a_tpu_are_said() -> None:
    program, _ = on_one(causal_loss, Q, K, V, shortest=128)
    assert f"{T} queries, fewer than kernels.shortest = 128" in reasons(program)
    program, _ = on_one(causal_loss, Q, K, V, interpret=False)
    assert "no TPU but cpu: it is computed as it is written" in reasons(program)


def test_where_and_only_choose() -> None:
    def two(q: Any, k: Any, v: Any) -> Any:
        with jax.named_scope("encoder"):
            x = attend(q, k, v)
        with jax.named_scope("decoder"):
            return attend(x, k, v, CAUSAL)

    assert operations(on_one(two, Q, K, V)[0]) == {"attention": 2}
    assert operations(on_one(two, Q, K, V, where="encoder")[0]) == {"attention": 1}
    program, _ = on_one(two, Q, K, V, only=["experts"])
    assert not operations(program)
    assert "kernels.only names experts" in reasons(program)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"only": ["atention"]}, "attention"),
        ({"where": "("}, "no regular expression"),
        ({"blocks": {"attention": {"block_r": 3}}}, "attention has no 'block_r'"),
        ({"blocks": {"norms": {}}}, "norms"),
    ],
)
def test_options_that_cannot_be_are_errors_that_name_them(options: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=r"kernels\.") as error:
        on_one(causal_loss, Q, K, V, **options)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("library", "says"),
    [
        ({"attention": "tokamax"}, r"attention = 'tokamax': .* pip install 'xform\[tokamax\]'"),
        (
            {"cross_entropy": "tokamax"},
            "tokamax is not used for cross_entropy; it is for: attention, experts",
        ),
        ({"attention": "other"}, "attention by 'other': there is jax and tokamax"),
        ({"attend": "tokamax"}, "did you mean 'attention'"),
    ],
)
def test_a_library_that_is_not_there_is_an_error_that_names_what_is(
    monkeypatch: pytest.MonkeyPatch, library: Any, says: str
) -> None:
    monkeypatch.setitem(sys.modules, "tokamax", None)  # as if it were not installed
    with pytest.raises(PlanError, match=rf"kernels\.library.*{says}"):
        on_one(causal_loss, Q, K, V, library=library)


def test_a_plan_with_kernels_reads_and_writes_as_toml(tmp_path: Any) -> None:
    blocks, library = {"attention": {"block_q": 256}}, {"attention": "jax"}
    plan = Plan({"data": 1}, [Kernels(only=["attention"], blocks=blocks, library=library)])
    path = tmp_path / "plan.toml"
    path.write_text(plan.dumps())
    assert Plan.load(path).passes == plan.passes


def entropy(x: Any, w: Any, labels: Any) -> Any:
    picked = jnp.take_along_axis(jax.nn.log_softmax(x @ w), labels[..., None], -1)
    return -jnp.mean(picked)


LOSS = jnp.zeros((8, 512, 4096)), jnp.zeros((4096, 1280)), jnp.zeros((8, 512), jnp.int32)


def loss_kernel(**options: Any) -> str:
    """Why a loss of long vectors gets its kernel on v5e."""
    (r,) = find(jax.make_jaxpr(entropy)(*map(typeof, LOSS)), "cross_entropy").raised
    (made,) = lowering.LOWERINGS[r.op](r, lowering.Options("v5e", **options))
    return made.why


def test_a_loss_gets_its_kernel_where_whole_logits_take_more_time_or_memory_or_it_is_asked_for() -> None:
    with pytest.raises(Decline, match=r"whole logits, 21 MB a device, take less time.*kernels.only asks"):
        loss_kernel()
    assert loss_kernel(asked=True) == "head and loss in one"
    assert "42 MB of a device" in loss_kernel(memory=5e7)
    with pytest.raises(Decline, match="whole logits, 1 MB a device"):
        loss_kernel(memory=5e7, tokens_over=8, vocab_over=2)


def test_a_loss_that_goes_through_chunks_gets_no_kernel_and_is_told_of() -> None:
    args = jnp.ones((8, 16, 8)), jnp.ones((8, 96)), jnp.zeros((8, 16), jnp.int32)
    passes = [ChunkedLoss(4), Kernels(only=["cross_entropy"], interpret=True)]
    step = parallelize(jax.grad(entropy, (0, 1)), Plan({"data": 1}, passes), devices=jax.devices()[:1])
    program = step.trace(*args)
    assert not operations(program)
    assert "cross_entropy in 4 chunks: chunkedloss has cut it up before" in reasons(program)


# ---------------------------------------------------------------- on several devices, and with other passes


@pytest.mark.parametrize("collectives", ["explicit", "auto"])
@pytest.mark.slow
def test_a_model_agrees_on_a_mesh_of_data_fsdp_and_tensor(collectives: Any) -> None:
    """Slow: a training step of Llama compiled twice for eight devices, its kernels interpreted."""
    # Of shorter texts XLA's CPU partitioner computes a wrong product without kernels too (auto, jax 0.12).
    fn, args = llama.train_step(size="tiny", length=64, abstract=False)
    passes = [
        Shard(collectives=collectives),
        Remat("minimal_with_context"),
        Kernels(only=["attention", "cross_entropy"], interpret=True, shortest=1),
    ]
    plan = Plan({"data": 2, "fsdp": 2, "tensor": 2}, passes)
    assert check(fn, args, plan, steps=1).ok
    program = parallelize(fn, plan).trace(*args)
    names = ("attention", "attention_backward", "cross_entropy", "cross_entropy_gradient")
    assert operations(program) == dict.fromkeys(names, 1)
    shapes = {
        op.name.partition("_")[0]: [v.aval.shape for v in e.invars[:2]]
        for e in equations(program.jaxpr)
        if (op := operation_of(e)) is not None
    }
    # Rows of two of four parts; key heads, and the vocabulary, of one of two.
    assert shapes == {"attention": [(2, 2, 3, 64, 16), (2, 2, 64, 16)], "cross": [(2, 64, 96), (96, 160)]}
    if collectives == "auto":
        assert "attention in a shard_map of its own: b over data,fsdp, n over tensor" in str(program.report)
        assert "gradient in a shard_map of its own: v over tensor, t over data,fsdp" in str(program.report)


@pytest.mark.parametrize(("policy", "runs"), [("full", 2), ("minimal", 2), ("minimal_with_context", 1)])
def test_where_context_is_saved_the_kernel_does_not_run_again(policy: Any, runs: int) -> None:
    fn, args = llama.train_step(size="tiny", length=16)
    passes = [Shard(collectives="auto"), Remat(policy), Kernels(interpret=True, shortest=1)]
    program = parallelize(fn, Plan({"data": 8}, passes)).trace(*args)
    assert operations(program) == {"attention": runs, "attention_backward": 1}


@pytest.mark.slow
@pytest.mark.parametrize("collectives", ["explicit", "auto"])
def test_on_a_tpu_the_compiled_step_has_the_kernels_and_no_scores(collectives: Any) -> None:
    """Slow: compiles for a TPU."""
    from xform import aot

    topologies.prepare_environment()
    topology = topologies.parse("v5e-4")
    size = llama.Config(512, 2, 256, 4, 2, 128, 512, remat=False)
    fn, args = llama.train_step(size=size, batch=4, length=512)
    passes = [Shard(collectives=collectives), Remat("full"), Kernels()]
    step = parallelize(
        fn, Plan({"fsdp": 2, "tensor": 2}, passes), devices=topology.devices(), donate_argnums=0
    )
    lowered = step.lower(*args)
    result = aot.compile_lowered(lowered.lowered, topology=topology, mesh=step.mesh)
    assert sum(kernel.count for kernel in result.costs.kernels.values()) == 2 * 3 + 2  # layers, and the loss
    assert "512,512]" not in lowered.as_text().replace(" ", "")
    result.check_promises(lowered.program.laid_out, lowered.program.report)
    assert "by a kernel" in str(lowered.program.report)


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "collectives"), [(1, "explicit"), (2, "auto")])
def test_on_a_tpu_the_compiled_step_has_no_logits(tensor: int, collectives: Any) -> None:
    """Slow: compiles for a TPU."""
    from xform import aot

    topologies.prepare_environment()
    topology = topologies.parse("v5e-4")
    size = llama.Config(1280, 2, 256, 4, 2, 128, 512, remat=False)
    fn, args = llama.train_step(size=size, batch=8, length=384)
    passes = [Shard(collectives=collectives), Kernels(only=["cross_entropy"])]
    plan = Plan({"fsdp": 4 // tensor, "tensor": tensor}, passes)
    step = parallelize(fn, plan, devices=topology.devices(), donate_argnums=0)
    result = aot.compile_lowered(step.lower(*args).lowered, topology=topology, mesh=step.mesh)
    assert sum(kernel.count for kernel in result.costs.kernels.values()) == 2
    shapes = [set(map(int, dims.split(","))) for dims in re.findall(r"\[([\d,]+)\]", result.hlo_text)]
    vocab, tokens = {1280, 1280 // tensor}, {384, 8 * 384, 8 * 384 * tensor // 4}
    assert any(shape & vocab for shape in shapes)
    assert not [shape for shape in shapes if shape & vocab and shape & tokens]
