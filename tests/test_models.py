"""The models are what they say: of published sizes, the same however run, and as others have them."""

import functools
import itertools
import math
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import public
from xform.models import encoder_decoder, gpt2, llama, training

MODULES = {"llama": llama, "gpt2": gpt2, "encoder_decoder": encoder_decoder}

# Odd sizes, all different, so that no transposed or merged axis agrees by luck.
ODD: dict[str, Any] = {
    "llama": llama.Config(29, 2, 11, 15, 5, 14, 13, dtype="float32"),
    "gpt2": gpt2.Config(29, 2, 35, 5, 13, context=17, dtype="float32"),
    "encoder_decoder": encoder_decoder.Config(29, 2, 11, 5, 7, 13, buckets=8, furthest=6, dtype="float32"),
}

every_model = pytest.mark.parametrize("name", MODULES)


@functools.cache
def made(name: str, factory: str, **options: Any) -> tuple:
    fn, arguments = getattr(MODULES[name], factory)(size=ODD[name], abstract=False, **options)
    return jax.jit(fn), arguments


def odd(
    name: str, factory: str, length: int = 9, packed: bool = False, scan: bool = True, seed: int = 0
) -> tuple:
    """The factory's function, compiled once, and its arguments, at the odd sizes."""
    fn, arguments = made(name, factory, batch=3, length=length, packed=packed, scan=scan, seed=seed)
    return fn, jax.tree.map(lambda x: x, arguments)


def unstacked(name: str, params: Any) -> Any:
    """The weights of scanned layers as those of layers one after the other."""

    def split(layers: Any) -> list:
        return [jax.tree.map(lambda x, i=i: x[i], layers) for i in range(ODD[name].layers)]

    if name == "encoder_decoder":
        halves = ("encoder", "decoder")
        return params | {half: params[half] | {"layers": split(params[half]["layers"])} for half in halves}
    rest = {key: value for key, value in params.items() if key != "layers"}
    if name == "gpt2":
        return rest | {f"layer_{i}": layer for i, layer in enumerate(split(params["layers"]))}
    return rest | {"layers": dict(enumerate(split(params["layers"])))}


def close(a: Any, b: Any, tolerance: float = 1e-5) -> None:
    """Both trees agree: float32 arithmetic in another order."""
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance), a, b)


@pytest.mark.parametrize(
    ("module", "size", "count"),
    [
        (llama, "7b", 6_738_415_616),
        (llama, "13b", 13_015_864_320),
        (llama, "8b", 8_030_261_248),
        (llama, "70b", 70_553_706_496),
        (gpt2, "small", 124_439_808),
        (gpt2, "medium", 354_823_168),
        (gpt2, "large", 774_030_080),
        (gpt2, "xl", 1_557_611_200),
        (encoder_decoder, "small", 60_506_624),
        (encoder_decoder, "base", 222_903_552),
        (encoder_decoder, "large", 737_668_096),
        (encoder_decoder, "3b", 2_851_598_336),
        (encoder_decoder, "11b", 11_307_321_344),
    ],
)
def test_sizes_have_the_published_number_of_parameters(module: ModuleType, size: str, count: int) -> None:
    _, (params, _) = module.loss(size=size)
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(params)) == count


@every_model
def test_unrolled_layers_have_as_many_parameters_as_scanned_ones(name: str) -> None:
    def count(scan: bool) -> int:
        _, (params, _) = MODULES[name].loss(layers=3, scan=scan)
        return sum(math.prod(x.shape) for x in jax.tree.leaves(params))

    assert count(False) == count(True)


@every_model
@pytest.mark.parametrize(
    ("factory", "scan", "packed"),
    [("train_step", True, False), ("decode_step", False, False), ("loss", True, True)],
)
def test_abstract_arguments_are_the_shapes_of_the_real_ones(
    name: str, factory: str, scan: bool, packed: bool
) -> None:
    options = {"batch": 3, "length": 9, "packed": packed, "scan": scan}
    _, abstract = getattr(MODULES[name], factory)(size=ODD[name], **options)
    _, real = odd(name, factory, packed=packed, scan=scan)
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(abstract))
    assert abstract == jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), real)


@every_model
def test_init_makes_the_state_that_train_step_takes(name: str) -> None:
    options = {"size": ODD[name], "length": 9, "abstract": False, "seed": 3}
    _, (state, _) = MODULES[name].train_step(**options)
    fn, (key,) = MODULES[name].init(**options)
    close(fn(key), state)


@every_model
def test_an_unknown_size_is_named_with_the_sizes_there_are(name: str) -> None:
    with pytest.raises(ValueError, match=r"no size '9z'; the sizes are tiny, \w+"):
        MODULES[name].loss(size="9z")


@every_model
def test_layers_overrides_the_number_of_the_size(name: str) -> None:
    _, (params, _) = MODULES[name].loss(layers=5)
    stacks = params["decoder"]["layers"] if name == "encoder_decoder" else params["layers"]
    assert {x.shape[0] for x in jax.tree.leaves(stacks)} == {5}


def test_gpt2_refuses_a_length_beyond_its_learnt_positions() -> None:
    with pytest.raises(ValueError, match="length 81 is more than this size's 80 positions"):
        gpt2.loss(length=81)


@every_model
def test_weights_and_moments_are_float32_and_the_computation_bfloat16(name: str) -> None:
    fn, arguments = MODULES[name].train_step(dtype="bfloat16")
    floats = {x.dtype for x in jax.tree.leaves(arguments) if jnp.issubdtype(x.dtype, jnp.floating)}
    assert floats == {jnp.dtype("float32")}
    forward, inputs = MODULES[name].forward(dtype="bfloat16")
    assert jax.eval_shape(forward, *inputs).dtype == jnp.bfloat16
    dots = [x for x in equations(jax.make_jaxpr(fn)(*arguments)) if x.primitive.name == "dot_general"]
    assert dots and {v.aval.dtype for dot in dots for v in dot.invars} == {jnp.dtype("bfloat16")}


def equations(jaxpr: Any) -> list:
    """Every equation at every depth."""
    found = []
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        found.append(eqn)
        for value in eqn.params.values():
            for body in value if isinstance(value, (tuple, list)) else [value]:
                if hasattr(body, "eqns") or hasattr(body, "jaxpr"):
                    found += equations(body)
    return found


def gradient(name: str, scan: bool, remat: bool) -> tuple[Any, tuple]:
    """The loss of packed texts and its gradients, traced at the scanned weights, and its arguments."""
    _, (params, batch) = odd(name, "loss", packed=True)
    fn, _ = MODULES[name].loss(size=ODD[name], batch=3, length=9, packed=True, scan=scan, remat=remat)
    args = (params if scan else unstacked(name, params), batch)
    return jax.jit(jax.value_and_grad(fn)).trace(*args), args


@functools.cache
def differentiated(name: str, scan: bool, remat: bool = False) -> tuple[Any, Any]:
    """What it gives: the loss of packed texts and its gradients."""
    traced, args = gradient(name, scan, remat)
    return traced.lower().compile()(*args)


@pytest.mark.slow  # compiles the gradients of two programs
@every_model
def test_scanned_and_unrolled_layers_have_the_same_loss_and_gradients(name: str) -> None:
    _, (params, _) = odd(name, "loss", packed=True)
    _, (other, _) = odd(name, "loss", packed=True, scan=False)
    value, gradients = differentiated(name, scan=True)
    assert not [path for path, x in jax.tree_util.tree_leaves_with_path(gradients) if not jnp.any(x)]
    params = unstacked(name, params)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, other)
    close(differentiated(name, scan=False), (value, unstacked(name, gradients)))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_packed_texts_are_read_as_if_each_stood_alone(name: str) -> None:
    forward, (params, batch) = odd(name, "forward", packed=True)
    logits = forward(params, batch)
    for segment in (1, 2):
        where = np.flatnonzero(batch["segments"][1] == segment)
        close(logits[1, where], forward(params, {"inputs": batch["inputs"][1:2, where]})[0])


def test_packed_inputs_and_targets_are_read_as_if_each_stood_alone() -> None:
    forward, (params, batch) = odd("encoder_decoder", "forward", packed=True, length=12)
    logits = forward(params, batch)
    for segment in (1, 2):
        source = np.flatnonzero(batch["input_segments"][1] == segment)
        target = np.flatnonzero(batch["segments"][1] == segment)
        inputs, outputs = batch["inputs"][1:2, source], batch["decoder_inputs"][1:2, target]
        close(logits[1, target], forward(params, {"inputs": inputs, "decoder_inputs": outputs})[0])


def test_packing_gives_no_weight_to_padding_and_to_the_ends_of_texts() -> None:
    options = training.Options(batch=7, length=31, packed=True)
    batch = training.text_tokens(llama.SIZES["tiny"], options)
    segments, positions = batch["segments"], batch["positions"]
    last = np.concatenate([segments[:, 1:] != segments[:, :-1], np.ones((7, 1), bool)], axis=1)
    np.testing.assert_array_equal(batch["weights"] > 0, (segments > 0) & ~last)
    np.testing.assert_array_equal(batch["inputs"] > 0, segments > 0)
    kept = batch["weights"][:, :-1] > 0
    np.testing.assert_array_equal(batch["targets"][:, :-1][kept], batch["inputs"][:, 1:][kept])
    np.testing.assert_array_equal(positions[:, 1:][kept], positions[:, :-1][kept] + 1)
    assert (segments == 0).any() and (positions[:, 0] == 0).all()


@every_model
def test_a_padded_weight_of_zero_takes_the_token_out_of_the_loss(name: str) -> None:
    loss, (params, batch) = odd(name, "loss")
    weights = batch["weights"].copy()
    weights[1, 2] = 0.0
    changed = batch["targets"].copy()
    changed[1, 2] = (changed[1, 2] + 5) % 29
    unlike = loss(params, batch | {"targets": changed})
    assert abs(unlike - loss(params, batch)) > 1e-4
    batch["weights"] = weights
    close(loss(params, batch | {"targets": changed}), loss(params, batch))


@pytest.mark.slow  # compiles a forward pass and a decoding step
@every_model
@pytest.mark.parametrize("scan", [False, True])
def test_decoding_gives_the_logits_of_the_whole_text_position_by_position(name: str, scan: bool) -> None:
    """The whole text goes through scanned layers."""
    forward, (params, batch) = odd(name, "forward")
    step, (_, cache, token, position) = odd(name, "decode_step", scan=scan)
    assert token.shape == (3,) and position.shape == ()
    tokens, expected = batch["inputs"], forward(params, batch)
    params = params if scan else unstacked(name, params)
    if name == "encoder_decoder":
        tokens = batch["decoder_inputs"]
        started = encoder_decoder.start(params, batch["inputs"], 4, ODD[name])
        assert jax.tree.map(jnp.shape, started) == jax.tree.map(jnp.shape, cache)
        cache = started
    for i in range(tokens.shape[1]):
        logits, cache = step(params, cache, tokens[:, i], jnp.int32(i))
        close(logits, expected[:, i])


@every_model
def test_later_tokens_do_not_change_earlier_logits(name: str) -> None:
    forward, (params, batch) = odd(name, "forward")
    key = "decoder_inputs" if name == "encoder_decoder" else "inputs"
    tokens = batch[key].copy()
    tokens[:, 2] = (tokens[:, 2] + 3) % 28 + 1
    before, after = forward(params, batch), forward(params, batch | {key: tokens})
    np.testing.assert_array_equal(before[:, :2], after[:, :2])
    assert np.all(np.max(np.abs(before - after)[:, 2:], axis=-1) > 1e-4)


def test_padding_of_the_inputs_does_not_change_the_decoder() -> None:
    forward, (params, batch) = odd("encoder_decoder", "forward")
    padded = np.pad(batch["inputs"], ((0, 0), (0, 3)))
    close(forward(params, batch), forward(params, batch | {"inputs": padded}))


@pytest.mark.slow  # compiles a training step
@every_model
def test_the_loss_of_a_repeated_batch_goes_down(name: str) -> None:
    step, (state, batch) = odd(name, "train_step")
    losses = []
    for _ in range(20):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert all(later < earlier for earlier, later in itertools.pairwise(losses))
    assert losses[-1] < losses[0] - 0.05
    assert int(state.step) == 20


@pytest.mark.slow  # compiles a training step
@every_model
def test_gradients_are_clipped_at_a_norm_of_one(name: str) -> None:
    step, (state, batch) = odd(name, "train_step")
    after, metrics = step(state, batch)
    norm = float(metrics["grad_norm"])
    assert norm > 1.0
    # After one step of AdamW the first moment is (1 - b1) times the clipped gradient.
    clipped = jax.tree.map(lambda x: x / (1 - 0.9), after.optimizer[1][0].mu)
    assert float(jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(clipped)))) == pytest.approx(1.0, 1e-4)


def test_a_published_size_traces_at_no_cost() -> None:
    fn, arguments = llama.train_step(size="70b", batch=16, length=2048, packed=True)
    state, metrics = jax.eval_shape(fn, *arguments)
    assert jax.tree.map(lambda x: x.shape, state) == jax.tree.map(lambda x: x.shape, arguments[0])
    assert metrics["loss"].shape == ()


HUGGING_FACE = {"batch": 3, "length": 9, "embed": 36, "heads": 6, "mlp": 42, "vocab": 40, "layers": 2}


def agree(ours: jax.Array, theirs: jax.Array, mask: Any) -> None:
    """The logits agree where there is text, and say something there."""
    assert ours.shape == theirs.shape and float(jnp.std(theirs)) > 0.1
    np.testing.assert_allclose(ours[mask > 0], theirs[mask > 0], rtol=1e-4, atol=1e-4)


@pytest.mark.slow  # compiles two programs, as do the next two
def test_llama_computes_what_hugging_face_computes() -> None:
    theirs, (weights, batch) = public.logits("llama", kv_heads=2, **HUGGING_FACE)
    config = llama.Config(40, 2, 36, 6, 2, 6, 42, norm_epsilon=1e-6, dtype="float32")
    model = weights["model"]

    def linear(kernel: jax.Array, *shape: int) -> dict:
        return {"kernel": kernel["kernel"].reshape(shape or kernel["kernel"].shape)}

    def layer(w: Any) -> dict:
        attention = {
            "query": linear(w["self_attn"]["q_proj"], 36, 6, 6),
            "key": linear(w["self_attn"]["k_proj"], 36, 2, 6),
            "value": linear(w["self_attn"]["v_proj"], 36, 2, 6),
            "out": linear(w["self_attn"]["o_proj"], 6, 6, 36),
        }
        return {
            "attention_norm": {"scale": w["input_layernorm"]["weight"]},
            "attention": attention,
            "mlp_norm": {"scale": w["post_attention_layernorm"]["weight"]},
            "mlp": {name: linear(w["mlp"][f"{name}_proj"]) for name in ("gate", "up", "down")},
        }

    params = {
        "embed": model["embed_tokens"],
        "layers": {i: layer(model["layers"][str(i)]) for i in range(2)},
        "norm": {"scale": model["norm"]["weight"]},
        "head": weights["lm_head"],
    }
    ours, _ = llama.forward(size=config, scan=False)
    logits = jax.jit(ours)(params, {"inputs": batch["input_ids"]})
    agree(logits, jax.jit(theirs)(weights, batch), batch["attention_mask"])


@pytest.mark.slow
def test_gpt2_computes_what_hugging_face_computes() -> None:
    theirs, (weights, batch) = public.logits("gpt2", **HUGGING_FACE)
    config = gpt2.Config(40, 2, 36, 6, 42, context=18, dtype="float32")
    model = weights["transformer"]

    def dense(w: Any) -> dict:
        return {"kernel": w["kernel"].T, "bias": w["bias"]}

    def layer(w: Any) -> dict:
        return {
            "attention_norm": w["ln_1"],
            "attention": {"qkv": dense(w["attn"]["c_attn"]), "out": dense(w["attn"]["c_proj"])},
            "mlp_norm": w["ln_2"],
            "up": dense(w["mlp"]["c_fc"]),
            "down": dense(w["mlp"]["c_proj"]),
        }

    params = {
        "embed": model["wte"],
        "position_embed": model["wpe"],
        **{f"layer_{i}": layer(model["h"][str(i)]) for i in range(2)},
        "norm": model["ln_f"],
    }
    ours, _ = gpt2.forward(size=config, length=9, scan=False)
    logits = jax.jit(ours)(params, {"inputs": batch["input_ids"]})
    agree(logits, jax.jit(theirs)(weights, batch), batch["attention_mask"])


@pytest.mark.slow
def test_encoder_decoder_computes_what_hugging_face_computes() -> None:
    theirs, (weights, batch) = public.logits("t5", source=13, **HUGGING_FACE)
    config = encoder_decoder.Config(40, 2, 36, 6, 14, 42, buckets=22, furthest=30, dtype="float32")

    def heads(w: Any) -> dict:
        names = {"query": "q", "key": "k", "value": "v"}
        split = {ours: w[theirs]["kernel"].reshape(36, 6, 14) for ours, theirs in names.items()}
        return split | {"out": w["o"]["kernel"].reshape(6, 14, 36)}

    def layer(w: Any) -> dict:
        parts = [w["layer"][name] for name in sorted(w["layer"])]
        own, mlp = parts[0], parts[-1]
        result = {
            "self_norm": own["layer_norm"]["weight"],
            "self": heads(own["SelfAttention"]),
            "mlp_norm": mlp["layer_norm"]["weight"],
            "up": mlp["DenseReluDense"]["wi"]["kernel"],
            "down": mlp["DenseReluDense"]["wo"]["kernel"],
        }
        if len(parts) == 3:
            result["cross_norm"] = parts[1]["layer_norm"]["weight"]
            result["cross"] = heads(parts[1]["EncDecAttention"])
        return result

    def half(w: Any) -> dict:
        first = w["block"]["0"]["layer"]["0"]["SelfAttention"]
        return {
            "position_bias": first["relative_attention_bias"]["embedding"],
            "layers": [layer(w["block"][name]) for name in sorted(w["block"])],
            "norm": w["final_layer_norm"]["weight"],
        }

    params = {
        "embed": weights["shared"]["embedding"],
        "encoder": half(weights["encoder"]),
        "decoder": half(weights["decoder"]),
    }
    ours, _ = encoder_decoder.forward(size=config, scan=False)
    inputs = batch["input_ids"] * batch["attention_mask"]  # their mask, as our token of padding
    logits = jax.jit(ours)(params, {"inputs": inputs, "decoder_inputs": batch["decoder_input_ids"]})
    agree(logits, jax.jit(theirs)(weights, batch), batch["decoder_attention_mask"])


@every_model
@pytest.mark.parametrize("scan", [True, False])
def test_layers_are_recomputed_where_that_is_asked_for(name: str, scan: bool) -> None:
    for remat in (True, False):
        found = {eqn.primitive.name for eqn in equations(gradient(name, scan, remat)[0].jaxpr)}
        assert ("remat2" in found) == remat


@pytest.mark.slow  # compiles two gradients
@pytest.mark.parametrize(("name", "scan"), [("llama", False), ("gpt2", True), ("encoder_decoder", True)])
def test_recomputed_layers_have_the_same_gradients(name: str, scan: bool) -> None:
    _, plain = differentiated(name, scan)
    _, again = differentiated(name, scan, remat=True)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
