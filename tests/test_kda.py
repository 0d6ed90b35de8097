"""The model of delta-rule layers: it is what it says, however it is run, and over a context axis."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.test_context import planned, said, times
from xform import check, parallelize
from xform.models import kda

ODD = kda.Config(29, 8, 11, 3, 5, 14, taps=3, dtype="float32", remat=False)


def made(factory: Any, **options: Any) -> Any:
    fn, args = factory(size=ODD, batch=2, length=8, abstract=False, **options)
    return jax.jit(fn), args


def close(a: Any, b: Any) -> None:
    """Eight layers in float32, with another order of arithmetic in each."""
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def unstacked(params: Any) -> Any:
    layers = [jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(2)]
    return params | {"layers": layers}


def test_scanned_and_unrolled_layers_are_the_same_and_so_is_decoding() -> None:
    forward, (params, batch) = made(kda.forward)
    want = forward(params, batch)
    np.testing.assert_allclose(
        made(kda.forward, scan=False)[0](unstacked(params), batch), want, rtol=1e-4, atol=1e-4
    )
    step, (_, cache, _, _) = made(kda.decode_step)
    for position in range(8):
        logits, cache = step(params, cache, batch["inputs"][:, position], jnp.int32(position))
        close(logits, want[:, position])


def test_texts_that_share_a_row_know_nothing_of_each_other() -> None:
    forward, (params, batch) = made(kda.forward)
    tokens = batch["inputs"]
    packed = {"inputs": tokens, "segments": jnp.asarray([[1] * 5 + [2] * 3] * 2)}
    apart = {"inputs": jnp.concatenate([tokens[:, 5:], tokens[:, 5:], tokens[:, :2]], 1)}
    np.testing.assert_allclose(
        forward(params, packed)[:, 5:], forward(params, apart)[:, :3], rtol=1e-4, atol=1e-4
    )


def test_every_fourth_layer_is_attention_and_others_are_no_layers() -> None:
    params = made(kda.forward)[1][0]
    assert len(params["layers"]["recurrent"]) == 3 and params["layers"]["attention"]["query"].shape[0] == 2
    with pytest.raises(ValueError, match="6 layers are no multiple of 4"):
        kda.forward(size=dataclasses.replace(ODD, layers=6))


@pytest.mark.slow  # compiles the gradients of four layers for one and for eight devices
def test_its_length_over_devices() -> None:
    """In the texts' own order: with zigzag the convolutions would move more than attention takes."""
    size = dataclasses.replace(ODD, layers=4)
    objective, args = kda.loss(size=size, batch=2, length=16, packed=True, abstract=False)
    plan = planned(balance="zigzag")
    result = check(jax.value_and_grad(objective), args, plan)
    assert result.ok, str(result)
    program = parallelize(jax.value_and_grad(objective), plan).trace(*args)
    assert times(program, "recurrence of 16 steps") == 3 and times(program, "attention of 16 queries") == 1
    assert "balance = 'zigzag'" in said(program, "declined")
