"""Remat: what it wraps, what the gradient keeps, what the compiler makes of it; and that numbers stay."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from tests.layers import TOKENS, f, gated, picked
from xform import Plan, PlanError, Shard, aot, check, parallelize, printing, topologies
from xform.higher_order import equations
from xform.memory.policies import POLICIES
from xform.models import encoder_decoder, gpt2, llama
from xform.passes.remat import Remat
from xform.tensors import NAMES
from xform.trace import Jaxpr

EMBED, HIDDEN, VOCAB, LAYERS = 12, 14, 13, 5
SWIGLU = {"gate": f(LAYERS, EMBED, HIDDEN), "up": f(LAYERS, EMBED, HIDDEN), "down": f(LAYERS, HIDDEN, EMBED)}
PARAMS = {"table": f(VOCAB, EMBED), "layers": SWIGLU}


def swiglu(p: Any, x: Any) -> Any:
    with jax.named_scope("mlp"):
        return x + (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


def model(layer: Callable = swiglu) -> Callable:
    """A scanned language model's loss."""

    def loss(params: Any, tokens: Any, labels: Any) -> Any:
        x, _ = jax.lax.scan(lambda x, p: (layer(p, x), None), params["table"][tokens], params["layers"])
        return picked(x @ params["table"].T, labels)

    return loss


def step(loss: Callable) -> Callable:
    return lambda *args: jax.value_and_grad(loss)(*args)


def rewritten(fn: Callable, args: Any, *passes: Any) -> Any:
    return parallelize(fn, Plan({}, passes)).trace(*args)


def named(jaxpr: Jaxpr) -> list[str]:
    return sorted(eqn.params["name"] for eqn in equations(jaxpr) if eqn.primitive.name == "name")


def remats(jaxpr: Jaxpr) -> list[Any]:
    return [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "remat2"]


def kept(jaxpr: Jaxpr) -> list[str]:
    """The types of what the first scan stacks for the backward pass, a layer's."""
    scan = next(eqn for eqn in equations(jaxpr) if eqn.primitive.name == "scan")
    lead = scan.params["length"]
    stacked = [v.aval.str_short() for v in scan.outvars if v.aval.shape[:1] == (lead,)]
    return sorted(re.sub(r"\[\d+,", "[", text) for text in stacked)


ARGS = (PARAMS, *TOKENS)
STREAM, WIDE = "float32[2,8,12]", "float32[2,8,14]"


def by_hand(policy: Any, prevent_cse: bool) -> Callable:
    """A layer as somebody would write it who knows what to save."""

    def layer(x: Any, p: Any) -> Any:
        with jax.named_scope("mlp"):
            hidden = jax.nn.silu(checkpoint_name(x @ p["gate"], "mlpwi_0"))
            hidden = hidden * checkpoint_name(x @ p["up"], "mlpwi_1")
            return x + checkpoint_name(hidden @ p["down"], "mlpwo")

    wrapped = jax.checkpoint(layer, policy=policy, prevent_cse=prevent_cse)
    return lambda p, x: wrapped(x, p)


def unrolled(layer: Callable = swiglu) -> Callable:
    """The same model with its layers in a Python loop."""

    def loss(params: Any, tokens: Any, labels: Any) -> Any:
        x = params["table"][tokens]
        for i in range(LAYERS):
            x = layer(params["layers"][i], x)
        return picked(x @ params["table"].T, labels)

    return loss


LISTED = {
    "table": PARAMS["table"],
    "layers": [jax.tree.map(lambda w: f(*w.shape[1:]), SWIGLU) for _ in range(LAYERS)],
}


def test_it_wraps_the_body_of_a_scan_and_names_its_tensors() -> None:
    found = rewritten(model(), ARGS, Remat("minimal")).jaxpr
    (remat,) = remats(found)
    wanted = rewritten(model(by_hand(remat.params["policy"], prevent_cse=False)), ARGS).jaxpr
    assert printing.diff(found, wanted) == []


def test_it_wraps_each_unrolled_layer_and_lets_nothing_merge_with_its_first_computation() -> None:
    program = rewritten(unrolled(), (LISTED, *TOKENS), Remat("minimal"))
    found = remats(program.jaxpr)
    assert len(found) == LAYERS
    for remat in found:
        assert remat.params["prevent_cse"] is True
        body = remat.params["jaxpr"]
        assert named(body) == ["mlpwi_0", "mlpwi_1", "mlpwo"]
        names = [str(eqn.source_info.name_stack) for eqn in body.eqns]
        assert set(names) == {"mlp"}
    assert "wrapped a layer of 5 unrolled: saves mlpwi_0, mlpwi_1, mlpwo" in str(program.report)
    assert "[x5]" in str(program.report)


def test_the_gradient_of_unrolled_layers_keeps_what_the_policy_says() -> None:
    def residuals(*passes: Any) -> list[str]:
        """What the backward passes of layers take that is no weight, of all layers."""
        found = remats(rewritten(step(unrolled()), (LISTED, *TOKENS), *passes).jaxpr)
        backward = [eqn for eqn in found if eqn.params["differentiated"]]
        assert len(backward) == LAYERS
        shapes = [v.aval.str_short() for eqn in backward for v in eqn.invars if len(v.aval.shape) > 2]
        return sorted(set(shapes))

    assert residuals(Remat("full")) == [STREAM]
    assert residuals(Remat("minimal")) == [STREAM, WIDE]
    assert residuals(Remat("minimal_offloaded")) == ["float32<host>[2,8,14]", STREAM]


def test_an_unrolled_layers_input_is_offloaded() -> None:
    found = rewritten(step(unrolled()), (LISTED, *TOKENS), Remat("custom", offload=("decoder_layer_input",)))
    backward = [eqn for eqn in remats(found.jaxpr) if eqn.params["differentiated"]]
    taken = [[v.aval.str_short() for v in eqn.invars] for eqn in backward]
    assert all("float32<host>[2,8,12]" in avals for avals in taken)
    assert "as late as it likes: roll the layers" in str(found.report)


@pytest.mark.parametrize(
    ("options", "keeps"),
    [
        ({"policy": "full"}, [STREAM]),
        ({"policy": "minimal"}, [STREAM, WIDE, WIDE]),
        ({"policy": "save_qkv_proj"}, [STREAM]),
        ({"policy": "custom", "save": ("mlpwi_1",)}, [STREAM, WIDE]),
        ({"policy": "minimal", "offload": ("mlpwi_0",)}, [STREAM, WIDE, "float32<host>[2,8,14]"]),
        ({"policy": "minimal_offloaded"}, [STREAM, *["float32<host>[2,8,14]"] * 2]),
        ({"policy": "custom", "offload": ("decoder_layer_input",)}, ["float32<host>[2,8,12]"]),
    ],
)
def test_the_gradient_keeps_what_the_policy_says(options: dict[str, Any], keeps: list[str]) -> None:
    before = rewritten(step(model()), ARGS).jaxpr
    after = rewritten(step(model()), ARGS, Remat(**options)).jaxpr
    assert len(kept(before)) > 5
    assert not remats(before)
    assert kept(after) == sorted(keeps)
    assert len(remats(after)) == 1  # of the backward pass


def test_none_changes_nothing() -> None:
    assert (
        rewritten(model(), ARGS, Remat("none")).jaxpr.pretty_print()
        == rewritten(model(), ARGS).jaxpr.pretty_print()
    )


def test_every_policy_names_tensors_that_there_are() -> None:
    quantized = {"quantization"}  # the name of a quantized product, which only a quantized model has
    for save, offload in POLICIES.values():
        assert {*save, *offload} <= NAMES.keys() | quantized
        assert not set(save) & set(offload)


def test_the_report_says_what_is_saved() -> None:
    text = str(rewritten(model(), ARGS, Remat("minimal", offload=("mlpwo",))).report)
    assert "wrapped the body of a scan over 5 layers: saves mlpwi_0, mlpwi_1; offloads mlpwo" in text
    assert "promised mlpwo in host memory" in text


def test_a_name_of_the_users_own_can_be_saved() -> None:
    def layer(p: Any, x: Any) -> Any:
        return checkpoint_name(jnp.sin(swiglu(p, x)), "mine")

    found = rewritten(step(model(layer)), ARGS, Remat("custom", save=("mine",))).jaxpr
    assert "mine" in named(rewritten(model(layer), ARGS, Remat("full")).jaxpr)
    assert kept(found) == [STREAM]  # the layer's result is what the next one takes: nobody reads it
    inner = rewritten(
        step(model(lambda p, x: jnp.cos(layer(p, x)))), ARGS, Remat("custom", save=("mine",))
    ).jaxpr
    assert kept(inner) == [STREAM, STREAM]


# ---------------------------------------------------------------- a model with its own checkpoints


def test_a_models_own_checkpoint_is_respected_and_the_report_says_so() -> None:
    own = model(jax.checkpoint(swiglu, prevent_cse=False))
    program = rewritten(own, ARGS, Remat("minimal"))
    assert printing.diff(program.jaxpr, rewritten(own, ARGS).jaxpr) == []
    assert 'it calls jax.checkpoint itself; existing = "override"' in str(program.report)


def test_a_models_own_checkpoint_is_overridden() -> None:
    nested = jax.checkpoint(lambda p, x: jax.checkpoint(swiglu)(p, x), prevent_cse=False)
    found = rewritten(model(nested), ARGS, Remat("minimal", existing="override"))
    assert len(remats(found.jaxpr)) == 1
    assert named(found.jaxpr) == ["mlpwi_0", "mlpwi_1", "mlpwo"]
    assert str(found.report).count("took away a call of jax.checkpoint") == 2
    after = rewritten(step(model(nested)), ARGS, Remat("minimal", existing="override")).jaxpr
    assert kept(after) == [STREAM, WIDE, WIDE]
    none = rewritten(model(nested), ARGS, Remat("none", existing="override")).jaxpr
    assert not remats(none)


@pytest.mark.parametrize("scan", [True, False])
def test_a_models_option_to_recompute_is_respected_or_overridden(scan: bool) -> None:
    fn, args = llama.loss(scan=scan, remat=True)
    layers = 1 if scan else 2
    respected = rewritten(fn, args, Remat("minimal"))
    assert [eqn.params["policy"] for eqn in remats(respected.jaxpr)] == [None] * layers
    overridden = rewritten(fn, args, Remat("minimal", existing="override"))
    assert len(remats(overridden.jaxpr)) == layers
    assert len(named(overridden.jaxpr)) == 7 * layers


# ---------------------------------------------------------------- which tensors


@pytest.mark.parametrize(
    ("save", "keeps"),
    [
        (("mlpwi_?",), [STREAM, WIDE, WIDE]),
        (("mlp*",), [STREAM, WIDE, WIDE]),
        (("mlp",), [STREAM, WIDE, WIDE]),  # no name: the role of a dimension
        (("embed",), [STREAM]),
        ((lambda tensor: tensor.name.endswith("_0")), [STREAM, WIDE]),
        ((lambda tensor: tensor.shape[-1] == 14 and tensor.dtype == "float32"), [STREAM, WIDE, WIDE]),
        ((lambda tensor: ("mlp",) in tensor.roles), [STREAM, WIDE, WIDE]),
    ],
)
def test_tensors_are_chosen_by_name_by_role_and_by_a_function(save: Any, keeps: list[str]) -> None:
    assert kept(rewritten(step(model()), ARGS, Remat("custom", save=save)).jaxpr) == keeps
    text = str(rewritten(unrolled(), (LISTED, *TOKENS), Remat("custom", save=save)).report)
    assert text.count("saves") == 1


def test_a_role_offloads_what_has_it() -> None:
    found = rewritten(step(model()), ARGS, Remat("minimal", offload=("mlp",))).jaxpr
    assert kept(found) == sorted([STREAM, *["float32<host>[2,8,14]"] * 2])


def test_a_function_says_which_layers_and_no_plan_file_can() -> None:
    remat = Remat("minimal", where=lambda layer: any("second" in names for names in layer.name_stacks))
    assert len(remats(rewritten(two_stacks, ARGS, remat).jaxpr)) == 1
    with pytest.raises(PlanError, match="says no to each of the 2 layers"):
        rewritten(two_stacks, ARGS, Remat("minimal", where=lambda layer: False))
    with pytest.raises(PlanError, match=r"\[remat\] where: .* cannot be written in a plan file"):
        Plan({}, [remat]).dumps()


# ---------------------------------------------------------------- where


def two_stacks(params: Any, tokens: Any, labels: Any) -> Any:
    x = params["table"][tokens]
    for name in ("first", "second"):
        with jax.named_scope(name):
            x, _ = jax.lax.scan(lambda x, p: (swiglu(p, x), None), x, params["layers"])
    return picked(x @ params["table"].T, labels)


def test_where_restricts_it_to_some_layers() -> None:
    for where, count in (("", 2), ("second/", 1), ("mlp", 2), ("^first/.*mlp$", 1)):
        assert len(remats(rewritten(two_stacks, ARGS, Remat("minimal", where=where)).jaxpr)) == count


def test_layers_inside_a_jit_are_found_and_those_with_a_rule_of_the_users_declined() -> None:
    @jax.custom_vjp
    def outer(params: Any, tokens: Any, labels: Any) -> Any:
        return model()(params, tokens, labels)

    outer.defvjp(lambda *args: (outer(*args), args), lambda args, g: jax.tree.map(jnp.zeros_like, args))
    inner = jax.jit(lambda *args: jax.jit(model())(*args))
    assert len(remats(rewritten(inner, ARGS, Remat("minimal")).jaxpr)) == 1
    program = rewritten(outer, ARGS, Remat("minimal"))
    assert not remats(program.jaxpr)
    assert "the layers in it have a differentiation rule of the user's own" in str(program.report)


def test_layers_nested_in_two_scans_are_wrapped_each() -> None:
    def loss(params: Any, tokens: Any, labels: Any) -> Any:
        def run(x: Any, p: Any) -> Any:
            return jax.lax.scan(lambda x, p: (swiglu(p, x), None), x, p)[0], None

        x, _ = jax.lax.scan(run, params["table"][tokens], params["layers"])
        return picked(x @ params["table"].T, labels)

    stacked = jax.tree.map(lambda w: f(3, *w.shape), SWIGLU)
    found = rewritten(loss, (PARAMS | {"layers": stacked}, *TOKENS), Remat("full")).jaxpr
    assert len(remats(found)) == 1
    scans = [eqn for eqn in equations(found) if eqn.primitive.name == "scan"]
    assert [eqn.params["length"] for eqn in scans] == [3, LAYERS]
    # Offloading there does not work (a fault of the compiler): the report says so, and promises nothing.
    offloaded = rewritten(loss, (PARAMS | {"layers": stacked}, *TOKENS), Remat("minimal_offloaded"))
    assert "flatten the loops" in str(offloaded.report)
    assert not offloaded.report.of("promised")


# ---------------------------------------------------------------- what cannot be


@pytest.mark.parametrize(
    ("remat", "message"),
    [
        (
            Remat("custom", save=("query_proj",)),
            "remat.save: no tensor 'query_proj'.*mlpwi_0, mlpwi_1, mlpwo",
        ),
        (Remat("custom", offload=("mlpwi0",)), "remat.offload: no tensor 'mlpwi0' .did you mean 'mlpwi_0'"),
        (Remat("custom", save=("mlpwo",), offload=("mlpwo",)), "mlpwo cannot be both saved and offloaded"),
        (Remat("none", save=("mlpwo",)), 'with save or offload, use "custom"'),
        (Remat("minimal", where="attention"), "matches no layer; name stacks in layers are .*mlp"),
        (Remat("minimal", where="("), "no regular expression"),
    ],
)
def test_a_wrong_option_is_named(remat: Remat, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        rewritten(model(), ARGS, remat)


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(PlanError, match="minimal_offloaded"):
        Plan({}, [Remat("minimal_ofloaded")])  # type: ignore[arg-type]


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(PlanError, match="no layers to treat"):
        rewritten(lambda x, w: jnp.sum(jnp.tanh(x @ w)), (f(2, 3), f(3, 5)), Remat("minimal"))


# ---------------------------------------------------------------- numbers


def test_a_gated_layer_keeps_its_numbers() -> None:
    weights = {"gate_up": jnp.ones((3, EMBED, 14)), "down": jnp.ones((3, 7, EMBED))}
    key = jax.random.key(0)
    params = {"table": f(VOCAB, EMBED), "layers": weights}
    params = jax.tree.map(lambda w: 0.3 * jax.random.normal(key, w.shape), params)
    tokens = jax.random.randint(key, (2, 8), 0, VOCAB)
    result = check(model(gated), (params, tokens, tokens), Plan({}, [Remat("minimal_offloaded")]))
    assert result.ok, result


MODELS = {"llama": llama, "gpt2": gpt2, "encoder_decoder": encoder_decoder}


COMBINATIONS = [
    ("llama", {"fsdp": 4, "tensor": 2}, "minimal_offloaded", {"scan": False}),
    ("gpt2", {"fsdp": 4, "tensor": 2}, "qkv_proj_offloaded", {}),
    ("encoder_decoder", {"fsdp": 4, "tensor": 2}, "save_out_proj", {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh", "policy", "options"), COMBINATIONS, ids=str)
def test_numbers_stay_under_sharding(
    name: str, mesh: dict[str, int], policy: Any, options: dict[str, Any]
) -> None:
    """Slow: compiles and runs a training step on eight devices and on one."""
    fn, args = MODELS[name].train_step(remat=False, batch=8, length=16, **options)
    result = check(fn, args, Plan(mesh, [Shard(strict=False), Remat(policy)]))
    assert result.ok, result
    assert result.kind == "training step"


# ---------------------------------------------------------------- the compiler

SIZE = llama.Config(512, 8, 512, 8, 4, 64, 1536, remat=False)


def compiled(*passes: Any, scan: bool, layers: int) -> aot.Result:
    topology = topologies.parse("v5e:2x2")
    fn, args = llama.train_step(size=SIZE, batch=8, length=512, scan=scan, layers=layers)
    plan = Plan({"fsdp": 4}, [Shard(), *passes])
    lowered = parallelize(fn, plan, devices=topology.devices(), donate_argnums=0).lower(*args)
    return aot.compile_lowered(lowered.lowered, topology=topology, mesh=lowered.mesh)


@pytest.mark.slow
def test_the_compiled_program_holds_less_the_more_is_computed_again() -> None:
    """Slow: compiles three times for a TPU."""
    run = partial(compiled, scan=True, layers=8)
    none, minimal, full = (run(Remat(policy)) for policy in ("none", "minimal", "full"))
    assert none.memory["temp"] > minimal.memory["temp"] > full.memory["temp"]
    assert none.costs.flops < minimal.costs.flops < full.costs.flops
    assert not full.memory["host_temp"]


@pytest.mark.slow
@pytest.mark.parametrize("scan", [True, False])
def test_what_is_offloaded_goes_to_the_host_in_the_compiled_program(scan: bool) -> None:
    """Slow: compiles for a TPU."""
    layers = 8 if scan else 4  # one after the other each is compiled
    offloaded = compiled(Remat("qkv_proj_offloaded"), scan=scan, layers=layers)
    # In bfloat16, of each layer, for a device's two rows: eight heads of queries, four of keys and values.
    size = layers * 2 * 512 * (8 + 4 + 4) * 64 * 2
    assert offloaded.costs.host["to_host"].count == offloaded.costs.host["from_host"].count == layers * 3
    assert offloaded.costs.host["to_host"].wire_bytes == size
    # Without a loop all goes to the host, but so late that it is never all there: the report says so.
    assert offloaded.memory["host_temp"] == size if scan else 0 < offloaded.memory["host_temp"] < size
