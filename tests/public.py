"""Eight models nobody here wrote: Hugging Face's Flax classes, unmodified, tiny, randomly weighted.

`PUBLIC[name](**sizes)` gives `(loss, (params, batch))`, and so does the function of that name: a target of
the command line is `tests.public:gpt2`, or `tests.public:gpt2_train_step` for `(step, (state, batch))`.
The sizes (`Sizes`) differ from each other where the model allows it, and divide by meshes of eight devices.
"""

import dataclasses
import functools
import math
import os
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

Params = Any
Batch = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a model and its batch; each model uses those it has."""

    batch: int = 8
    length: int = 20  # of the text, or of what is decoded
    source: int = 28  # of what is encoded
    embed: int = 192
    heads: int = 12
    kv_heads: int = 4
    mlp: int = 320
    vocab: int = 416  # or the number of classes
    layers: int = 2
    dropout: float = 0.0  # when not 0, the batch has a random key
    seed: int = 1  # one with which no ReLU of T5 stands so near zero that rounding decides it


class Parts(NamedTuple):
    """A model's class, its configuration's, options and rates of dropout, and the model's inputs."""

    model: str
    config: str
    options: dict[str, Any]
    dropout: tuple[str, ...]
    inputs: Batch


def text(sizes: Sizes) -> Batch:
    """Tokens [batch, length], the last quarter of the last text masked."""
    mask = np.ones((sizes.batch, sizes.length), np.int32)
    mask[-1, sizes.length - sizes.length // 4 :] = 0
    rng = np.random.default_rng(sizes.seed)
    tokens = rng.integers(2, sizes.vocab, (sizes.batch, sizes.length), dtype=np.int32)
    return {"input_ids": tokens, "attention_mask": mask}


def decoded(sizes: Sizes) -> Batch:
    """The same as the text of a decoder."""
    return {f"decoder_{name}": value for name, value in text(sizes).items()}


def _gpt2(sizes: Sizes) -> Parts:
    options = {
        "vocab_size": sizes.vocab,
        "n_positions": 2 * sizes.length,
        "n_embd": sizes.embed,
        "n_layer": sizes.layers,
        "n_head": sizes.heads,
        "n_inner": sizes.mlp,
    }
    dropout = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
    return Parts("FlaxGPT2LMHeadModel", "GPT2Config", options, dropout, text(sizes))


def _grouped(sizes: Sizes) -> dict[str, Any]:
    return {
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.embed,
        "intermediate_size": sizes.mlp,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "max_position_embeddings": 2 * sizes.length,
    }


def _llama(sizes: Sizes) -> Parts:
    return Parts("FlaxLlamaForCausalLM", "LlamaConfig", _grouped(sizes), (), text(sizes))


def _mistral(sizes: Sizes) -> Parts:
    options = _grouped(sizes) | {"sliding_window": 7}
    return Parts("FlaxMistralForCausalLM", "MistralConfig", options, (), text(sizes))


def _bloom(sizes: Sizes) -> Parts:
    # ALiBi's slopes for other than a power of two heads call jnp.cat, which jax does not have.
    heads = sizes.heads & -sizes.heads
    options = {
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.embed,  # the MLP is four times that
        "n_layer": sizes.layers,
        "n_head": heads,
    }
    dropout = ("hidden_dropout", "attention_dropout")
    return Parts("FlaxBloomForCausalLM", "BloomConfig", options, dropout, text(sizes))


def _bert(sizes: Sizes) -> Parts:
    options = {
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.embed,
        "intermediate_size": sizes.mlp,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "max_position_embeddings": 2 * sizes.length,
        "type_vocab_size": 5,
    }
    dropout = ("hidden_dropout_prob", "attention_probs_dropout_prob")
    return Parts("FlaxBertForMaskedLM", "BertConfig", options, dropout, text(sizes))


def _t5(sizes: Sizes) -> Parts:
    options = {
        "vocab_size": sizes.vocab,
        "d_model": sizes.embed,
        "d_kv": sizes.embed // sizes.heads + 8,
        "d_ff": sizes.mlp,
        "num_layers": sizes.layers,
        "num_decoder_layers": sizes.layers + 1,
        "num_heads": sizes.heads,
        "relative_attention_num_buckets": 22,
        "relative_attention_max_distance": 30,
    }
    source = text(dataclasses.replace(sizes, length=sizes.source, seed=sizes.seed + 1))
    inputs = source | decoded(sizes)
    return Parts("FlaxT5ForConditionalGeneration", "T5Config", options, ("dropout_rate",), inputs)


def _vit(sizes: Sizes) -> Parts:
    options = {
        "hidden_size": sizes.embed,
        "intermediate_size": sizes.mlp,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "image_size": 50,
        "patch_size": 10,
        "num_labels": sizes.vocab,
    }
    rng = np.random.default_rng(sizes.seed)
    pixels = rng.normal(size=(sizes.batch, 3, 50, 50)).astype(np.float32)
    dropout = ("hidden_dropout_prob", "attention_probs_dropout_prob")
    return Parts("FlaxViTForImageClassification", "ViTConfig", options, dropout, {"pixel_values": pixels})


def _whisper(sizes: Sizes) -> Parts:
    options = {
        "vocab_size": sizes.vocab,
        "num_mel_bins": 40,
        "d_model": sizes.embed,
        "encoder_layers": sizes.layers,
        "decoder_layers": sizes.layers + 1,
        "encoder_attention_heads": sizes.heads,
        "decoder_attention_heads": sizes.heads,
        "encoder_ffn_dim": sizes.mlp,
        "decoder_ffn_dim": sizes.mlp + 32,
        "max_source_positions": sizes.source,  # after a convolution of stride two
        "max_target_positions": 2 * sizes.length,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 1,
        "decoder_start_token_id": 1,
    }
    rng = np.random.default_rng(sizes.seed)
    features = rng.normal(size=(sizes.batch, 40, 2 * sizes.source)).astype(np.float32)
    inputs = {"input_features": features} | decoded(sizes)
    dropout = ("dropout", "attention_dropout", "activation_dropout")
    return Parts("FlaxWhisperForConditionalGeneration", "WhisperConfig", options, dropout, inputs)


MODELS: dict[str, Callable[[Sizes], Parts]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _mistral,
    "bloom": _bloom,
    "bert": _bert,
    "t5": _t5,
    "vit": _vit,
    "whisper": _whisper,
}


class OlderNumpy(types.ModuleType):
    """jax.numpy with the keywords that `clip` had when T5 was written."""

    def __getattr__(self, name: str) -> Any:
        return getattr(jnp, name)

    @staticmethod
    def clip(x: jax.Array, a_min: Any = None, a_max: Any = None) -> jax.Array:
        return jnp.clip(x, min=a_min, max=a_max)


@functools.cache
def transformers() -> Any:
    """The library, imported when first needed, offline and without its advice."""
    os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers as library
    from transformers.models.t5 import modeling_flax_t5

    library.logging.set_verbosity_error()
    modeling_flax_t5.jnp = OlderNumpy("jax.numpy")
    return library


@functools.cache
def initialised(name: str, sizes: Sizes) -> tuple[Any, Params]:
    """The model and its weights, all of them random: no bias of zero or scale of one hides a mistake."""
    library, parts = transformers(), MODELS[name](sizes)
    rates = dict.fromkeys(parts.dropout, sizes.dropout)
    config = getattr(library, parts.config)(**parts.options, **rates)
    model = getattr(library, parts.model)(config, _do_init=False)
    rng = np.random.default_rng(sizes.seed)

    def weight(path: tuple, shape: jax.ShapeDtypeStruct) -> np.ndarray:
        leaf = path[-1].key
        noise = rng.normal(size=shape.shape).astype(np.float32)
        if len(shape.shape) == 1:
            return 0.1 * noise + (leaf in ("scale", "weight"))
        fan = shape.shape[-1] if leaf == "embedding" else math.prod(shape.shape[:-1])
        return noise / math.sqrt(fan)

    return model, jax.tree_util.tree_map_with_path(weight, model.params_shape_tree)


def logits(name: str, **sizes: Any) -> tuple[Callable, tuple[Params, Batch]]:
    """`logits(params, batch)` of the public model `name`, and its arguments."""
    chosen = Sizes(**sizes)
    model, weights = initialised(name, chosen)

    def logits(params: Params, batch: Batch) -> jax.Array:
        inputs = {key: value for key, value in batch.items() if key not in ("targets", "weights", "key")}
        out = model(**inputs, params=params, dropout_rng=batch.get("key"), train="key" in batch)
        return out.logits

    # Copies, so that a caller may donate them.
    return logits, jax.tree.map(jnp.array, (weights, batch_of(name, chosen)))


def batch_of(name: str, sizes: Sizes) -> Batch:
    """The inputs, `targets` (tokens, or the class of each image) and `weights` (0 where masked)."""
    inputs = MODELS[name](sizes).inputs
    mask = inputs.get("decoder_attention_mask", inputs.get("attention_mask"))
    weights = np.ones(sizes.batch, np.float32) if mask is None else mask.astype(np.float32)
    rng = np.random.default_rng(sizes.seed + 2)
    targets = rng.integers(0, sizes.vocab, weights.shape, dtype=np.int32)
    key = {"key": jax.random.key(sizes.seed)} if sizes.dropout else {}
    return inputs | {"targets": targets, "weights": weights} | key


def loss(name: str, **sizes: Any) -> tuple[Callable, tuple[Params, Batch]]:
    """`loss(params, batch) -> scalar`, the mean cross-entropy of the model `name`, and its arguments."""
    predict, arguments = logits(name, **sizes)

    def loss(params: Params, batch: Batch) -> jax.Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(predict(params, batch), batch["targets"])
        return jnp.sum(losses * batch["weights"]) / jnp.sum(batch["weights"])

    return loss, arguments


@functools.cache
def gradients(name: str) -> tuple[jax.Array, tuple[Params, Batch]]:
    """The loss of `loss(name)` and its gradients by both arguments, computed once for all who compare."""
    objective, arguments = loss(name)
    return jax.jit(jax.value_and_grad(objective, (0, 1), allow_int=True))(*arguments)


def train_step(name: str, **sizes: Any) -> tuple[Callable, tuple[Any, Batch]]:
    """`step(state, batch) -> (state, metrics)` with AdamW, and its arguments."""
    objective, (params, batch) = loss(name, **sizes)
    optimizer = optax.adamw(1e-3)

    def step(state: Any, batch: Batch) -> tuple[Any, dict[str, jax.Array]]:
        value, gradients = jax.value_and_grad(objective)(state["params"], batch)
        updates, moments = optimizer.update(gradients, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "optimizer": moments}, {"loss": value}

    return step, ({"params": params, "optimizer": optimizer.init(params)}, batch)


PUBLIC: dict[str, Callable[..., tuple[Callable, tuple[Params, Batch]]]] = {
    name: functools.partial(loss, name) for name in MODELS
}

gpt2 = PUBLIC["gpt2"]
llama = PUBLIC["llama"]
mistral = PUBLIC["mistral"]
bloom = PUBLIC["bloom"]
bert = PUBLIC["bert"]
t5 = PUBLIC["t5"]
vit = PUBLIC["vit"]
whisper = PUBLIC["whisper"]

gpt2_train_step = functools.partial(train_step, "gpt2")
llama_train_step = functools.partial(train_step, "llama")
mistral_train_step = functools.partial(train_step, "mistral")
bloom_train_step = functools.partial(train_step, "bloom")
bert_train_step = functools.partial(train_step, "bert")
t5_train_step = functools.partial(train_step, "t5")
vit_train_step = functools.partial(train_step, "vit")
whisper_train_step = functools.partial(train_step, "whisper")
