"""Context: attention over a length that lies over devices is what it is on one, and sends what is planned."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.shards import grid
from xform import Context, Kernels, Pipeline, Plan, PlanError, Remat, Shard, parallelize
from xform.higher_order import equations
from xform.kernels.across import AcrossForward
from xform.kernels.attention import AttentionForward
from xform.models import llama
from xform.ops import Band
from xform.report import amount
from xform.spmd.ledger import Sent, ledger
from xform.trace import shape_of

RNG = np.random.default_rng(0)
B, T, H, N, D, E = 2, 24, 8, 4, 3, 5
MESH = {"fsdp": 2, "context": 4}
AT = np.arange(T)
CAUSAL = AT[:, None] >= AT

MASKS: dict[str, Any] = {
    "full": None,
    "causal": CAUSAL,
    "window": CAUSAL & (AT[:, None] - AT < 7),
    "both ways": abs(AT[:, None] - AT) < 3,
    "chunks": CAUSAL & (AT[:, None] // 5 == AT // 5),
    "prefix": CAUSAL | (AT < 8),
}
SEGMENTS = jnp.asarray(np.array([AT // 7, AT // 10]), jnp.int32)


def made(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def attend(q: Any, k: Any, v: Any, seen: Any = None, cap: float | None = None) -> Any:
    """Grouped-query attention, plainly."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) * 0.3
    scores = scores if cap is None else cap * jnp.tanh(scores / cap)
    scores = scores if seen is None else jnp.where(seen, scores, -1e30)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, -1), v)


def weights(heads: int = H, keys: int = N, kinds: Any = ("causal",)) -> dict[str, dict[str, jax.Array]]:
    shapes = {"q": (E, heads, D), "k": (E, keys, D), "v": (E, keys, D), "o": (heads, D, E)}
    return {kind: {name: made(*shape) for name, shape in shapes.items()} for kind in kinds}


def mixed(w: Mapping[str, Any], x: Any, seen: Any = None, cap: float | None = None) -> Any:
    """A layer of attention."""
    q, k, v = (jnp.einsum("bte,ehd->bthd", x, w[name]) for name in "qkv")
    return jnp.einsum("bthd,hde->bte", attend(q, k, v, seen, cap), w["o"])


def loss(params: Any, x: Any, segments: Any) -> Any:
    """Of every mask, each with weights of its own."""
    total, x = 0.0, x + 0.1 * segments[..., None]
    for kind, w in params.items():
        seen, cap = MASKS.get(kind), None
        if kind == "segments":
            seen = (CAUSAL & (segments[:, :, None] == segments[:, None]))[:, None]
        if kind == "capped":
            seen, cap = CAUSAL, 0.7
        total += jnp.mean(jnp.sin(x + mixed(w, x, seen, cap)))
    return total


def gradients(params: Any, x: Any, segments: Any) -> Any:
    return jax.value_and_grad(loss)(params, x, segments)


X = made(B, T, E)
PARAMS = weights(kinds=(*MASKS, "segments", "capped"))


def planned(mesh: Mapping[str, int] = MESH, collectives: Any = "explicit", **options: Any) -> Plan:
    return Plan(mesh, [Context(**options), Shard(strict=False, collectives=collectives)])


def same(got: Any, want: Any, atol: float = 2e-6) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=atol), got, want)


def said(program: Any, kind: str = "did") -> str:
    return "\n".join(f"{note.what}: {note.why}" for note in program.report.of(kind))


def times(program: Any, what: str) -> int:
    """How often it was said that something was done."""
    return sum(count for note, count in program.report if what in note.what)


def sent(program: Any, axes: tuple[str, ...] = ("context",)) -> list[Sent]:
    """The collectives of attention."""
    found = ledger(program.jaxpr, MESH)
    return [each for each in found if each.axes == axes and "(attend)" in each.line]


@pytest.fixture(scope="module")
def wanted() -> Any:
    return jax.jit(gradients)(PARAMS, X, SEGMENTS)


@pytest.mark.parametrize("strategy", ["all_gather", "ring", "ulysses"])
def test_every_mask_is_that_of_one_device(strategy: str, wanted: Any) -> None:
    step = parallelize(gradients, planned(strategy=strategy))
    same(step(PARAMS, X, SEGMENTS), wanted)
    program = step.trace(PARAMS, X, SEGMENTS)
    assert times(program, f"8 heads, 4 of keys: {strategy}") == len(PARAMS)
    kinds = Counter(each.kind for each in sent(program))
    assert (
        set(kinds)
        == {
            "all_gather": {"all-gather", "reduce-scatter"},
            "ring": {"permute"},
            "ulysses": {"all-to-all", "all-gather"},  # the segments are gathered
        }[strategy]
    )


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_collectives_left_to_the_compiler(strategy: str) -> None:
    params = {kind: PARAMS[kind] for kind in ("window", "segments")}
    step = parallelize(gradients, planned(collectives="auto", strategy=strategy))
    same(step(params, X, SEGMENTS), jax.jit(gradients)(params, X, SEGMENTS))
    assert "attention in a shard_map of its own: t over context, b over fsdp" in said(
        step.trace(params, X, SEGMENTS)
    )


def test_heads_are_exchanged_along_one_axis_and_a_ring_goes_along_the_other() -> None:
    mesh, params = {"context": 2, "context_usp_ulysses": 4}, {k: PARAMS[k] for k in ("chunks", "segments")}
    step = parallelize(gradients, planned(mesh, strategy="usp"))
    same(step(params, X, SEGMENTS), jax.jit(gradients)(params, X, SEGMENTS))
    found = ledger(step.trace(params, X, SEGMENTS).jaxpr, mesh)
    kinds = {(each.kind, each.axes) for each in found if "(attend)" in each.line}
    assert ("permute", ("context",)) in kinds and ("all-to-all", ("context_usp_ulysses",)) in kinds


@pytest.mark.parametrize("strategy", ["all_gather", "ring", "ulysses"])
def test_a_length_over_two_axes(strategy: str) -> None:
    """As it lies over one that is cut along the torus."""
    params = {kind: PARAMS[kind] for kind in ("window", "segments")}
    step = parallelize(gradients, planned({"context": 4, "context_usp_ulysses": 2}, strategy=strategy))
    same(step(params, X, SEGMENTS), jax.jit(gradients)(params, X, SEGMENTS))


@pytest.mark.parametrize(("strategy", "kinds"), [("all_gather", ("chunks",)), ("ring", ("segments",))])
def test_a_kernel_runs_inside(strategy: str, kinds: Any) -> None:
    params = {kind: PARAMS[kind] for kind in kinds}
    plan = planned(strategy=strategy)
    plan = Plan(MESH, [*plan.passes, Kernels(interpret=True, shortest=1)])
    step = parallelize(gradients, plan)
    same(step(params, X, SEGMENTS), jax.jit(gradients)(params, X, SEGMENTS))
    program = step.trace(params, X, SEGMENTS)
    assert times(program, "by a kernel") == times(program, f"4 of keys: {strategy}") == 1
    assert "tpu_custom_call" not in (text := step.lower(params, X, SEGMENTS).as_text()) and "while" in text


@pytest.mark.parametrize("heads, keys", [(6, 1), (4, 2), (8, 2)])
def test_heads_that_are_fewer_than_devices(heads: int, keys: int) -> None:
    """Of key heads, repeated for as many devices as there are; of query heads, what is left takes any."""
    params = weights(heads, keys)
    strategy = "ulysses" if heads % 4 == 0 else None
    step = parallelize(gradients, planned(strategy=strategy))
    same(step(params, X, SEGMENTS), jax.jit(gradients)(params, X, SEGMENTS))


@pytest.mark.parametrize(("collectives", "strategy"), [("auto", "ulysses"), ("explicit", "ring")])
def test_a_logit_that_no_key_has(collectives: str, strategy: str) -> None:
    """Sinks: one for each head, counted once, whichever device has the head or the part."""
    params = weights()["causal"] | {"sinks": made(H)}

    def objective(w: Any, x: Any, segments: Any) -> Any:
        x = x + 0.1 * segments[..., None]
        q, k, v = (jnp.einsum("bte,ehd->bthd", x, w[name]) for name in "qkv")
        k, v = (jnp.repeat(each, 2, axis=2) for each in (k, v))
        scores = jnp.where(CAUSAL, jnp.einsum("bthd,bshd->bhts", q, k) * 0.3, -1e30)
        sinks = jnp.broadcast_to(w["sinks"][None, :, None, None], (*scores.shape[:3], 1))
        seen = jax.nn.softmax(jnp.concatenate([scores, sinks], -1), -1)[..., :-1]
        mixed = jnp.einsum("bhts,bshd->bthd", seen, v)
        return jnp.mean(jnp.sin(x + jnp.einsum("bthd,hde->bte", mixed, w["o"])))

    step = jax.value_and_grad(objective)
    ours = parallelize(step, planned(collectives=collectives, strategy=strategy))
    same(ours(params, X, SEGMENTS), jax.jit(step)(params, X, SEGMENTS))
    assert times(ours.trace(params, X, SEGMENTS), f"of keys: {strategy}") == 1


# ---------------------------------------------------------------- what is sent


BYTES = 4 * B // 2 * T // 4


@pytest.mark.parametrize(
    "strategy, kind, heads, expected",
    [
        # keys and values to three others; backward these and their gradients; queries are twice as many
        ("all_gather", "causal", (8, 4), {"all-gather": 12 * 4 * D, "reduce-scatter": 6 * 4 * D}),
        # as many heads of keys: forward keys and values, backward queries, dout, lse and delta, and dq
        ("all_gather", "causal", (4, 4), {"all-gather": 3 * 4 * (4 * D + 2), "reduce-scatter": 3 * 4 * D}),
        # the same in permutes, one a hop
        ("ring", "causal", (8, 4), {"permute": 3 * 6 * 4 * D}),
        # a window of 7 reaches back over two parts of 6
        ("ring", "window", (8, 4), {"permute": 6 * 4 * D}),
        # q, k, v, out and lse; q, k, v, dout, lse and delta; dq, dk, dv
        ("ulysses", "causal", (4, 4), {"all-to-all": 3 * (11 * D + 3)}),
    ],
)
def test_what_is_sent_is_what_is_planned(strategy: str, kind: str, heads: Any, expected: Any) -> None:
    params = weights(*heads, kinds=(kind,))
    program = parallelize(gradients, planned(strategy=strategy)).trace(params, X, SEGMENTS)
    found: Counter[str] = Counter()
    for each in sent(program):
        found[each.kind] += int(each.total)
    assert found == {name: n * BYTES for name, n in expected.items()}
    assert f"{strategy}: {amount(sum(found.values()))} a device and pass over context" in said(program)


@pytest.mark.parametrize(
    "heads, kind, strategy",
    [
        ((8, 8), "causal", "ulysses"),
        ((8, 1), "causal", "all_gather"),
        ((8, 4), "window", "ring"),
    ],
)
def test_by_default_it_is_the_strategy_that_sends_the_fewest_bytes(
    heads: tuple[int, int], kind: str, strategy: str
) -> None:
    program = parallelize(gradients, planned()).trace(weights(*heads, kinds=(kind,)), X, SEGMENTS)
    assert f"{heads[1]} of keys: {strategy}: " in said(program)


def test_the_compiled_program_has_the_collectives_that_are_planned() -> None:
    params = weights(kinds=("causal",))
    step = parallelize(gradients, planned(strategy="ring"))
    hops = sum(each.kind == "permute" for each in sent(step.trace(params, X, SEGMENTS)))
    text = step.lower(params, X, SEGMENTS).compile().as_text()
    # The first hop of keys and values is the same in both passes: the compiler makes it once.
    assert text.count(" collective-permute(") + text.count(" collective-permute-start(") == hops - 2
    assert " all-to-all(" not in text and " all-gather(" not in text  # weights of 5 lie whole


@pytest.mark.parametrize("strategy", ["all_gather", "ring", "ulysses"])
def test_nothing_of_length_times_length_exists_where_kernels_are(strategy: str) -> None:
    length, part, heads = 131072, 32768, jax.sharding.PartitionSpec(None, None, None, "context")
    keys, rows = jax.sharding.PartitionSpec(None, None, "context"), jax.ShapeDtypeStruct
    of = AttentionForward(Band(right=0), 0.1, chip="v5e")
    op = AcrossForward(of, strategy).over({"t": ("context",)})
    q, k = rows((1, 4, 2, length, 64), jnp.bfloat16), rows((1, 4, length, 64), jnp.bfloat16)
    lse = rows((1, 4, 2, length), jnp.float32)
    for run, args, ins, outs in (
        (op.kernel, (q, k, k), (heads, keys, keys), (heads, heads)),
        (
            op.backward.kernel,
            (q, k, k, lse, lse, q),
            (heads, keys, keys, heads, heads, heads),
            (heads, keys, keys),
        ),
    ):
        region = jax.shard_map(run, mesh=grid({"context": 4}), in_specs=ins, out_specs=outs, check_vma=False)
        shapes = [shape_of(v) for eqn in equations(jax.make_jaxpr(region)(*args)) for v in eqn.outvars]
        assert max(sum(n >= part for n in shape) for shape in shapes) == 1


# ---------------------------------------------------------------- whole programs


def test_a_step_that_shifts_its_labels_inside_and_adds_up_along_the_length() -> None:
    table = {"table": made(11, E), "layer": weights()["causal"], "kernel": made(3, E, E)}
    table = jax.tree.map(lambda w: 0.3 * w, table)
    tokens = jnp.asarray(RNG.integers(0, 11, (B, T)), jnp.int32)

    def objective(params: Any, tokens: Any) -> Any:
        x = params["table"][tokens]
        x = x + jax.lax.conv_general_dilated(
            x, params["kernel"], (1,), [(2, 0)], dimension_numbers=("NWC", "WIO", "NWC")
        )
        x = x + mixed(params["layer"], x, CAUSAL)
        x = x + 0.1 * jnp.cumsum(x, axis=1)
        logits = jax.nn.log_softmax(x @ params["table"].T)
        after = jnp.roll(tokens, -1, axis=1)
        picked = jnp.take_along_axis(logits, after[..., None], -1)[..., 0]
        return -jnp.mean(jnp.where(jnp.arange(T) < T - 1, picked, 0.0))

    step = jax.value_and_grad(objective)
    for collectives in ("auto", "explicit"):
        ours = parallelize(step, planned(collectives=collectives))
        same(ours(table, tokens), jax.jit(step)(table, tokens))


def test_a_llama_whose_layers_are_computed_again() -> None:
    """Packed texts, in a scan, fewer rows than the batch's axis; attention's results are saved."""
    objective, (params, batch) = llama.loss(batch=1, length=32, packed=True, abstract=False, remat=False)
    fn = jax.value_and_grad(objective)
    plan = Plan(MESH, [Context(), Shard(collectives="explicit"), Remat(policy="custom", save=("context",))])
    step = parallelize(fn, plan)
    same(step(params, batch), jax.jit(fn)(params, batch), atol=1e-4)
    assert times(step.trace(params, batch), "of keys: ") == 1


def test_queries_of_another_length_than_keys() -> None:
    """Queries lie in parts, keys and values whole, and their gradients are sums over the parts."""
    params, memory = weights(), made(B, 10, E)

    def objective(params: Any, x: Any, tokens: Any, memory: Any) -> Any:
        w, x = params["causal"], x + tokens[..., None]
        q = jnp.einsum("bte,ehd->bthd", x, w["q"])
        k, v = (jnp.einsum("bse,ehd->bshd", memory, w[name]) for name in "kv")
        return jnp.mean(jnp.sin(x + jnp.einsum("bthd,hde->bte", attend(q, k, v), w["o"])))

    step = jax.value_and_grad(objective)
    for collectives in ("auto", "explicit"):
        ours = parallelize(step, planned(collectives=collectives))
        same(ours(params, X, SEGMENTS, memory), jax.jit(step)(params, X, SEGMENTS, memory))
        assert "10 keys" in said(ours.trace(params, X, SEGMENTS, memory))


@pytest.mark.parametrize("collectives, strategy", [("auto", "all_gather"), ("explicit", "ring")])
def test_a_length_that_does_not_divide_is_filled_up(collectives: str, strategy: str) -> None:
    length = 22
    x, segments, at = X[:, :length], SEGMENTS[:, :length], np.arange(length)
    params = {kind: PARAMS[kind] for kind in ("full", "causal", "segments")}

    def objective(params: Any, x: Any, segments: Any) -> Any:
        x, causal = x + 0.1 * segments[..., None], at[:, None] >= at
        packed = (segments[:, :, None] == segments[:, None])[:, None]
        masks = {"full": None, "causal": causal, "segments": packed}
        return sum(jnp.mean(jnp.sin(x + mixed(w, x, masks[kind]))) for kind, w in params.items())

    step = jax.value_and_grad(objective)
    ours = parallelize(step, planned(collectives=collectives, strategy=strategy))
    same(ours(params, x, segments), jax.jit(step)(params, x, segments))
    program = ours.trace(params, x, segments)
    assert times(program, "filled up to 24") == 3
    assert collectives == "auto" or {each.kind for each in sent(program)} >= {"permute"}


# ---------------------------------------------------------------- what cannot be


@pytest.mark.parametrize(
    "mesh, options, heads, words",
    [
        ({"fsdp": 8}, {}, (8, 4), "context.axis = 'context': the mesh has fsdp"),
        ({"fsdp": 8, "context": 1}, {}, (8, 4), "'context' has one device in the mesh"),
        (MESH, {"strategy": "usp"}, (8, 4), "'context_usp_ulysses' for the heads.*fsdp=2, context=4"),
        (
            MESH,
            {"strategy": "ulysses"},
            (6, 3),
            r"test_context.py:\d+ \(attend\).*4 devices; over 2, 3, 6",
        ),
    ],
)
def test_what_cannot_be_says_where_and_what_would(mesh: Any, options: Any, heads: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        parallelize(gradients, planned(mesh, **options)).trace(weights(*heads), X, SEGMENTS)


def test_a_pipeline_has_no_rings() -> None:
    """A stage that runs something else would be waited for."""
    objective, args = llama.loss(batch=4, length=32)
    pipeline = Pipeline(microbatches=2, schedule="1f1b")

    def program(**options: Any) -> Any:
        plan = Plan({"stage": 2, "context": 4}, [pipeline, Context(**options), Shard()])
        return parallelize(jax.grad(objective), plan).trace(*args)

    with pytest.raises(PlanError, match=r"'ring' with pipeline: stages over stage .* 'ulysses'"):
        program(strategy="ring")
    assert " by all_gather " in (text := said(program())) and " ring " not in text


def test_a_length_that_lies_over_nothing_is_an_error() -> None:
    with pytest.raises(PlanError, match=r"test_context.py:\d+.*lies over no 'context'"):
        parallelize(gradients, Plan(MESH, [Context()])).trace(PARAMS, X, SEGMENTS)
