"""Our own models' training steps, small and made once, so that tests of the same step compile it once."""

import functools
from collections.abc import Callable
from typing import Any

from xform.models import encoder_decoder, gpt2, llama

MODELS = {"llama": llama, "gpt2": gpt2, "encoder_decoder": encoder_decoder}
SIZES: dict[str, Any] = {"size": "tiny", "layers": 2, "batch": 8, "length": 16}


@functools.cache
def train_step(name: str, scan: bool = True) -> tuple[Callable, tuple[Any, Any]]:
    """`step(state, batch)` of the model `name` in float32, and its arguments' shapes.

    The same function each time: jax keeps what it compiled for it.
    """
    return MODELS[name].train_step(**SIZES, scan=scan, dtype="float32")
