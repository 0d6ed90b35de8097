"""Codes moved stand for the numbers that would have been moved, to the bit, and keep scales few."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xform.quantization.arrays import Quantized, quantized, whole
from xform.quantization.formats import FORMATS
from xform.quantization.moving import MOVES, moved
from xform.quantization.scales import How, calibration

SHAPE = (4, 6, 8)
HOWS = {
    "one scale": How(FORMATS["int8"]),
    "channels": How(FORMATS["int8"], (0, 2)),
    "blocks": How(FORMATS["int4"], (0, 2), ((1, 3),)),
    "a table": How(FORMATS["nf4"], (0, 1), ((2, 4),)),
    "a zero": How(FORMATS["int8"], (1,), (), calibration("minmax", "")),
}
STARTS = (jnp.int32(1), jnp.int32(2), jnp.int32(0))
ROWS = jnp.array([[2], [0], [3]], jnp.int32)

CASES: dict[str, Callable[[Any], Any]] = {
    "broadcast_in_dim": lambda x: jax.lax.broadcast_in_dim(x, (5, 4, 6, 8), (1, 2, 3)),
    "broadcast_in_dim of 1": lambda x: jax.lax.broadcast_in_dim(x[:1], (3, 6, 8), (0, 1, 2)),
    "concatenate of one": lambda x: jnp.concatenate([x, x[:2]], 0),
    "concatenate of blocks": lambda x: jnp.concatenate([x, x], 1),
    "stack": lambda x: jnp.stack([x, x], 2),
    "unstack": lambda x: jnp.unstack(x, axis=1)[2],
    "split": lambda x: jnp.split(x, [2, 3], axis=1)[2],
    "slice along channels": lambda x: jax.lax.slice(x, (1, 0, 3), (3, 6, 8)),
    "slice along blocks": lambda x: jax.lax.slice(x, (0, 2, 0), (4, 5, 8), (1, 2, 1)),
    "dynamic_slice": lambda x: jax.lax.dynamic_slice(x, STARTS, (2, 3, 8)),
    "gather of rows": lambda x: x[ROWS[:, 0]],
    "gather outside": lambda x: x.at[jnp.array([1, 9])].get(mode="fill", fill_value=jnp.nan),
    "gather of blocks": lambda x: x[:, ROWS[:, 0]],
    "neg": lambda x: -x,
    "rev": lambda x: jax.lax.rev(x, (0, 1)),
    "squeeze": lambda x: jax.lax.squeeze(x[:1], (0,)),
    "transpose": lambda x: x.transpose(2, 0, 1),
    "reshape that merges": lambda x: x.reshape(24, 8),
    "reshape that merges the last": lambda x: x.reshape(4, 48),
    "reshape that splits": lambda x: x.reshape(2, 2, 3, 2, 2, 4),
    "reshape between blocks": lambda x: x.reshape(4, 2, 3, 8),
    "reshape to one dimension": lambda x: x.reshape(-1),
    "reshape with ones": lambda x: x.reshape(4, 1, 6, 8, 1),
}


def by_codes(fn: Callable[[Any], Any], q: Quantized) -> Any:
    """What `fn` makes of codes, equation by equation, or None where one of them does not take codes."""
    jaxpr = jax.make_jaxpr(fn)(whole(q))
    env: dict[Any, Any] = dict(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))
    env |= dict(zip(jaxpr.jaxpr.invars, [q], strict=True))

    def run(eqns: Any, env: dict[Any, Any]) -> bool:
        for eqn in eqns:
            ins = [v.val if isinstance(v, jax.extend.core.Literal) else env[v] for v in eqn.invars]
            if any(isinstance(x, Quantized) for x in ins):
                outs = moved(eqn, ins)
                if outs is None:
                    return False
            else:
                outs = eqn.primitive.bind(*ins, **eqn.params)
                outs = outs if eqn.primitive.multiple_results else [outs]
            env.update(zip(eqn.outvars, outs, strict=True))
        return True

    return env[jaxpr.jaxpr.outvars[0]] if run(jaxpr.jaxpr.eqns, env) else None


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("case", CASES)
def test_moved_codes_stand_for_the_moved_numbers(case: str, how: str) -> None:
    x = jnp.asarray(np.random.RandomState(0).standard_normal(SHAPE), jnp.float32)
    q = quantized(x, HOWS[how])
    found = by_codes(CASES[case], q)
    wanted = CASES[case](whole(q))
    assert found is not None, "codes were not moved"
    assert found.codes.dtype == q.codes.dtype and found.scale.ndim == found.codes.ndim
    np.testing.assert_array_equal(whole(found), wanted)


@pytest.mark.parametrize("how", HOWS)
def test_a_cast_rounds_the_scale_in_place_of_each_number(how: str) -> None:
    x = jnp.asarray(np.random.RandomState(0).standard_normal(SHAPE), jnp.float32)
    q = quantized(x, HOWS[how])
    found = by_codes(lambda x: x.astype(jnp.bfloat16), q)
    assert found.codes is q.codes and found.scale.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.asarray(whole(found), np.float32), np.asarray(whole(q)), rtol=2**-7, atol=1e-6
    )


def test_every_way_of_moving_is_among_the_cases() -> None:
    told = {case.split()[0] for case in CASES}
    same = {"convert_element_type", "copy", "copy_p", "name", "sharding_constraint"}
    assert told | same == set(MOVES)


@pytest.mark.parametrize(
    ("case", "shape"),
    [
        ("transpose", (8, 4, 2)),
        ("reshape that merges", (8, 8)),
        ("reshape between blocks", (4, 2, 1, 8)),
        ("slice along channels", (2, 2, 5)),
        ("dynamic_slice", (2, 3, 8)),
        ("stack", (4, 2, 2, 8)),
    ],
)
def test_numbers_that_share_a_scale_go_on_sharing_it(case: str, shape: tuple[int, ...]) -> None:
    x = jnp.asarray(np.random.RandomState(0).standard_normal(SHAPE), jnp.float32)
    assert by_codes(CASES[case], quantized(x, HOWS["blocks"])).scale.shape == shape


def test_codes_whose_numbers_would_be_mixed_are_not_moved() -> None:
    q = quantized(jnp.ones((4, 6)), How(FORMATS["int8"], (1,)))
    assert by_codes(lambda x: x.reshape(6, 4), q) is None
    assert by_codes(lambda x: x.astype(jnp.int32), q) is None
    assert by_codes(lambda x: x.sum(0), q) is None
    assert by_codes(lambda x: jnp.concatenate([x, jnp.ones((2, 6))]), q) is None
