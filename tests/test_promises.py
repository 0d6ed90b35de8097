"""Promises: what a program keeps, and that a compiled one which does not is an error that says why."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from xform import (
    Plan,
    PromiseError,
    Remat,
    Shard,
    aot,
    cli,
    commands,
    faults,
    hlo,
    parallelize,
    registry,
    topologies,
)
from xform.context import Context
from xform.hlo.costs import Costs, Kernel, Product
from xform.models import encoder_decoder, gpt2, llama
from xform.passes.quantize import Quantize
from xform.promises import broken, check_compiled, multiplied
from xform.promises.kept import Kept, again, kept
from xform.report import Keeping, Promise, Report
from xform.trace import Jaxpr

LAYERS, EMBED, HIDDEN, BATCH = 6, 128, 512, 4096
NOTHING = jax.checkpoint_policies.nothing_saveable
SAVED = jax.checkpoint_policies.save_only_these_names("hidden")
OFFLOADED = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["hidden"],
    offload_src="device",
    offload_dst="pinned_host",
)


def layer(x: Any, p: Any) -> Any:
    return x + checkpoint_name(jax.nn.relu(x @ p["up"]), "hidden") @ p["down"]


@functools.cache
def scanned(policy: Any, **options: Any) -> Callable:
    """A stack of layers as a loop, or as a loop in a loop where the weights have two dimensions of layers."""
    inner = jax.checkpoint(layer, policy=policy, prevent_cse=False)

    def run(x: Any, p: Any) -> Any:
        if p["up"].ndim == 2:
            return inner(x, p), None
        return jax.lax.scan(run, x, p, **options)[0], None

    return lambda p, x: jnp.mean(run(x, p)[0].astype(jnp.float32) ** 2)


@functools.cache
def unrolled(policy: Any, prevent_cse: bool = True) -> Callable:
    one = jax.checkpoint(layer, policy=policy, prevent_cse=prevent_cse)

    def loss(params: Any, x: Any) -> Any:
        for i in range(LAYERS):
            x = one(x, jax.tree.map(lambda w, i=i: w[i], params))
        return jnp.mean(x.astype(jnp.float32) ** 2)

    return loss


def arguments(*lead: int, mesh: Any = None) -> Any:
    def struct(*shape: int, spec: tuple[Any, ...]) -> Any:
        sharding = mesh and NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)

    over = (*[None] * len(lead), "fsdp")
    params = {
        "up": struct(*lead, EMBED, HIDDEN, spec=over),
        "down": struct(*lead, HIDDEN, EMBED, spec=over),
    }
    return params, struct(BATCH, EMBED, spec=("fsdp",))


def differentiated(loss: Callable, *lead: int) -> Jaxpr:
    return jax.make_jaxpr(jax.grad(loss))(*arguments(*lead))


# ---------------------------------------------------------------- what a program says of itself


@pytest.mark.parametrize(
    ("loss", "lead", "wanted"),
    [
        (scanned(SAVED), (LAYERS,), [(LAYERS,)]),
        (scanned(SAVED), (2, 3), [(2, 3)]),
        (unrolled(SAVED), (LAYERS,), [()] * LAYERS),
        (scanned(NOTHING), (LAYERS,), []),
    ],
)
def test_a_named_tensor_is_kept_by_the_loops_that_stack_it(loss: Callable, lead: Any, wanted: list) -> None:
    jaxpr = differentiated(loss, *lead)
    found = kept(jaxpr)
    assert [tensor.stacked for tensor in found] == wanted
    assert all((t.name, t.shape, t.on_host) == ("hidden", (BATCH, HIDDEN), False) for t in found)
    assert again(jaxpr).names == (set() if wanted else {"hidden"})


def test_what_is_sent_to_the_host_is_kept_there() -> None:
    for loss in (scanned(OFFLOADED), unrolled(OFFLOADED)):
        found = kept(differentiated(loss, LAYERS))
        assert {tensor.on_host for tensor in found} == {True}
        assert sum(tensor.nbytes for tensor in found) == LAYERS * BATCH * HIDDEN * 2


def test_a_scan_that_is_unrolled_is_no_loop() -> None:
    (plain,), (whole,) = (
        kept(differentiated(scanned(SAVED, unroll=unroll), LAYERS)) for unroll in (2, LAYERS)
    )
    assert plain.looped and not whole.looped
    assert dataclasses.replace(whole, looped=True) == plain


def test_a_tensor_in_a_jit_or_made_of_a_number_is_followed() -> None:
    def loss(params: Any, x: Any) -> Any:
        return scanned(SAVED)(params, x * jax.lax.convert_element_type(2.0, x.dtype))

    assert len(kept(jax.make_jaxpr(jax.jit(jax.grad(loss)))(*arguments(LAYERS)))) == 1
    numbers = jax.make_jaxpr(lambda x: jax.lax.convert_element_type_p.bind(
        1.0, new_dtype=x.dtype, weak_type=False, sharding=None) + x)  # fmt: skip
    assert kept(numbers(jnp.float32(1))) == []


def test_what_is_computed_again_is_counted_with_its_turns() -> None:
    flops = 2.0 * BATCH * EMBED * HIDDEN
    for loss, lead in ((scanned(NOTHING), (LAYERS,)), (scanned(NOTHING), (2, 3)), (unrolled(NOTHING), (6,))):
        found = again(differentiated(loss, *lead))
        assert found.flops == {flops: LAYERS}  # the second product's result is read by nothing
        assert not found.merged
    merged = again(differentiated(unrolled(NOTHING, prevent_cse=False), LAYERS)).merged
    assert len(merged) == LAYERS and "test_promises.py" in merged[0]


def test_remat_promises_what_it_saves_computes_again_and_offloads() -> None:
    def promised(policy: Any, **options: Any) -> set[tuple[str, Keeping]]:
        fn, args = llama.loss(remat=False, **options)
        report = parallelize(fn, Plan({}, [Remat(policy)])).trace(*args).report
        return {(promise.tensor, promise.kind) for promise in report.promises}

    qkv = {"query_proj", "key_proj", "value_proj"}
    saved, offloaded = promised("save_qkv_proj"), promised("qkv_proj_offloaded")
    assert {name for name, kind in saved if kind == "saved"} == qkv
    assert {name for name, kind in offloaded if kind == "offloaded"} == qkv
    assert ("mlpwi_0", "recomputed") in saved & offloaded
    assert not {(name, "recomputed") for name in qkv} & (saved | offloaded)
    late = promised("qkv_proj_offloaded", scan=False)  # unrolled: Remat says why it promises no such thing
    assert {kind for _, kind in late} == {"recomputed"}


def test_a_program_for_a_cpu_cannot_be_held_to_it_and_the_report_says_so_once() -> None:
    report = Report()
    compiled = jax.jit(lambda x: x + 1).lower(1.0).compile()
    jaxpr = jax.make_jaxpr(lambda x: x + 1)(1.0)
    check_compiled(jaxpr, report, compiled)
    assert not len(report)
    report.promise(Promise("remat", "hidden", "saved"))
    for _ in range(2):
        check_compiled(jaxpr, report, compiled)
    assert str(report).count("only a TPU's program says where things lie") == 1 and "[x" not in str(report)


@pytest.mark.parametrize("runs", [0, 1, 2])
def test_an_operation_that_was_to_be_a_kernel_has_to_be_one(runs: int) -> None:
    costs = Costs(kernels={"splash": Kernel(runs)} if runs else {})
    promises = [Promise("kernels", "attention", "kernel", f"model.py:{line}") for line in (3, 5)]
    module = hlo.parse("HloModule m\n\nENTRY %main () -> f32[] {\n  ROOT %x = f32[] constant(1)\n}\n")
    found = list(broken(jax.make_jaxpr(lambda x: x)(1.0), promises, module, costs, {}, 1))
    both = "attention (model.py:3), attention (model.py:5)"
    says = f"  kernels of {both}: {runs} run: something else computes the others"
    assert found == ([] if runs == 2 else [says])


def quantized(gradients: str = "int8") -> tuple[Jaxpr, tuple[Promise, ...]]:
    """A differentiated product, quantized for a TPU, and what is promised of it."""

    def step(params: Any, tokens: Any) -> Any:
        return jax.grad(lambda p: jnp.sum(jnp.dot(p["table"][tokens], p["up"]) ** 2))(params)

    params = {
        "table": jax.ShapeDtypeStruct((40, 16), jnp.bfloat16),
        "up": jax.ShapeDtypeStruct((16, 24), jnp.bfloat16),
    }
    own = {"own": {"base": "int8", "gradients": gradients}}
    plan = Plan({"data": 1}, [Quantize("none", rules={"param:up": "own"}, recipes=own)])
    devices = topologies.parse("v5e-4").devices()[:1]
    program = parallelize(step, plan, devices=devices).trace(params, jax.ShapeDtypeStruct((8, 6), jnp.int32))
    return program.jaxpr, program.report.promises


def test_a_product_that_is_quantized_for_a_tpu_is_promised_with_its_line() -> None:
    (promise,) = quantized()[1]
    assert (promise.pass_name, promise.kind) == ("quantize", "quantized")
    assert promise.where.startswith("test_promises.py:")


FORWARD = "jit(step)/jvp()/quantized.{}/dot_general"
BACKWARD = "jit(step)/transpose(jvp())/quantized.{}/dot_general"


@pytest.mark.parametrize(
    ("gradients", "backward", "says"),
    [
        ("int8", ("s8", "s8"), ""),
        (
            "int8",
            ("bf16", "bf16"),
            "1 of 2 dots multiplied in eight bits: the compiler multiplies bf16",
        ),
        ("int8", ("s8", "bf16"), "1 of 2 dots multiplied in eight bits: the compiler multiplies s8 x"),
        ("", ("bf16", "bf16"), ""),  # the program itself has floats there
    ],
)
def test_what_was_quantized_has_to_be_multiplied_in_eight_bits(
    gradients: str, backward: tuple[str, str], says: str
) -> None:
    jaxpr, promises = quantized(gradients)
    name = promises[0].tensor
    products = [
        Product(FORWARD.format(name), ("s8", "s8"), 5.0),
        Product(BACKWARD.format(name), backward, 5.0),
    ]
    costs = Costs(products=Counter([*products, Product("jit(step)/dot_general", ("bf16", "bf16"), 7.0)]))
    module = hlo.parse("HloModule m\n\nENTRY %main () -> f32[] {\n  ROOT %x = f32[] constant(1)\n}\n")
    found = "".join(broken(jaxpr, promises, module, costs, {}, 1))
    assert says in found and bool(says) == bool(found)
    assert not says or promises[0].where in found
    share = multiplied.share(costs)
    assert share is not None and share.of == 2 and share.count == 1 + (backward == ("s8", "s8"))


# ---------------------------------------------------------------- the compiler


@functools.cache
def compiled(loss: Callable, *lead: int) -> aot.Result:
    """The gradient for a TPU, compiled once for all promises about it."""
    topology = topologies.parse("v5e:2x2")
    mesh = topologies.make_mesh(topology, {"fsdp": 4})
    lowered = jax.jit(jax.grad(loss)).lower(*arguments(*lead, mesh=mesh))
    return aot.compile_lowered(lowered, topology=topology, mesh=mesh)


def held(loss: Callable, kind: Keeping, *lead: int) -> str:
    """What a TPU's program breaks of a promise about `hidden`; '' where it keeps it."""
    result, report = compiled(loss, *lead), Report()
    report.promise(Promise("by hand", "hidden", kind))
    try:
        result.check_promises(differentiated(loss, *lead), report)
    except PromiseError as error:
        return str(error)
    assert f"promises: kept in the compiled program: tensors 1 {kind}" in str(report)
    return ""


KEPT = [
    (scanned(OFFLOADED), "offloaded", (LAYERS,)),
    (scanned(OFFLOADED), "offloaded", (2,)),  # of which the compiler leaves no loop
    (scanned(SAVED), "saved", (LAYERS,)),
    (scanned(SAVED), "saved", (3,)),
    (scanned(NOTHING), "recomputed", (LAYERS,)),
    (unrolled(NOTHING), "recomputed", (LAYERS,)),
    (unrolled(SAVED), "saved", (LAYERS,)),
]
NOT_SENT = "the program itself does not send it there"
BROKEN = [
    (scanned(OFFLOADED), "offloaded", (4, 3), "of 12.58 MB a device in host memory: in a loop within a loop"),
    (scanned(SAVED), "offloaded", (LAYERS,), f"0 bytes of 6.29 MB a device in host memory: {NOT_SENT}"),
    (scanned(NOTHING), "offloaded", (LAYERS,), f"offload of hidden: none of it in host memory: {NOT_SENT}"),
    (scanned(NOTHING), "saved", (LAYERS,), "saving of hidden: none of it saved: the program itself computes"),
    (
        unrolled(NOTHING, prevent_cse=False),
        "recomputed",
        (LAYERS,),
        "0 of 3.221 GFLOP done again: jax.checkpoint(prevent_cse=False) outside a loop (test_promises.py",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "kind", "lead"), KEPT)
def test_a_kept_promise_raises_no_alarm(loss: Callable, kind: Keeping, lead: Any) -> None:
    """Slow: compiles for a TPU."""
    assert held(loss, kind, *lead) == ""


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "kind", "lead", "says"), BROKEN)
def test_a_broken_promise_names_the_tensor_and_the_cause(
    loss: Callable, kind: Keeping, lead: Any, says: str
) -> None:
    """Slow: compiles for a TPU."""
    found = held(loss, kind, *lead)
    assert says in found
    assert found.startswith("the compiled program does not keep what was promised:\n")


MODELS = [
    (llama, "minimal_offloaded", {"size": llama.Config(512, 4, 256, 8, 4, 32, 768, remat=False)}),
    (gpt2, "minimal", {"remat": False, "length": 32}),
    (encoder_decoder, "qkv_proj_offloaded", {"remat": False, "length": 32}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "policy", "options"), MODELS)
def test_a_models_promises_are_kept(model: Any, policy: Any, options: dict[str, Any]) -> None:
    """Slow: compiles a training step for a TPU."""
    topology = topologies.parse("v5e:2x2")
    fn, args = model.train_step(batch=8, **{"length": 128} | options)
    plan = Plan({"fsdp": 4}, [Shard(strict=False), Remat(policy)])
    lowered = parallelize(fn, plan, devices=topology.devices(), donate_argnums=0).lower(*args)
    result = aot.compile_lowered(lowered.lowered, topology=topology, mesh=lowered.mesh)
    assert len(lowered.program.report.promises) > 4
    result.check_promises(lowered.program.jaxpr, lowered.program.report)
    report = str(lowered.program.report)
    assert "promises: kept in the compiled program" in report
    # The last product of a layer is added to the stream, which is kept as what the next layer takes.
    assert ("nothing is kept of mlpwo: the backward pass does not read it" in report) == ("minimal" in policy)


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "collectives"), [("int8", "explicit"), ("fp8", "auto")])
def test_all_dots_that_are_quantized_multiply_in_eight_bits(recipe: str, collectives: Any) -> None:
    """Slow: compiles a training step for a TPU."""
    topology = topologies.parse("v5e:2x2")
    config = llama.Config(512, 4, 256, 8, 4, 32, 768, remat=False)
    fn, args = llama.train_step(size=config, batch=8, length=128)
    plan = Plan({"fsdp": 4}, [Quantize(recipe, force=True), Remat("full"), Shard(collectives=collectives)])
    lowered = parallelize(fn, plan, devices=topology.devices(), donate_argnums=0).lower(*args)
    result = aot.compile_lowered(lowered.lowered, topology=topology, mesh=lowered.mesh)
    result.check_promises(lowered.program.laid_out, lowered.program.report)
    share = multiplied.share(result.costs)
    assert share is not None and share.count == share.of >= 3 * 7 * config.layers
    assert result.to_json()["quantized_dots"]["count"] == share.count
    assert f"quantized  dots: {share.of} of {share.of}, 1.00" in result.render()


@dataclasses.dataclass(frozen=True)
class Boast:
    """Promises what it does nothing for."""

    stages = ("step",)

    def rewrite(self, jaxpr: Jaxpr, context: Context) -> Jaxpr:
        context.report.promise(Promise("boast", "all weights", "offloaded", nbytes=5_000_000))
        return jaxpr


@pytest.mark.slow
def test_the_command_line_ends_with_the_broken_promise(monkeypatch: Any, capsys: Any) -> None:
    """Slow: compiles for a TPU."""
    monkeypatch.setitem(registry.BUILTIN, "boast", f"{__name__}:Boast")
    target = ["aot", "tests.targets_for_tests:step", "--mesh", "fsdp=4", "--topology", "v5e:2x2"]
    options = cli._parse(["xform", *target, "--use", "boast"])
    with pytest.raises(PromiseError) as error:
        commands.aot(options)
    code, message = faults.told(error.value)
    assert code == faults.BAD_INPUT
    said = "offload of all weights: 0 bytes of 5.00 MB a device in host memory: as arguments they lie"
    assert said in message


def test_kept_counts_bytes_of_all_layers() -> None:
    tensor = Kept("hidden", (4, 3), (5, 7), 2, True)
    assert tensor.count == 12 and tensor.nbytes == 840
