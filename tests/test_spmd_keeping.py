"""Weights that come together once a step: how often they are gathered, in which dtype; the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.test_spmd_zero import LAYERS, TOKENS, model, planned, sent, step, values
from xform import parallelize
from xform.passes.accumulate import Accumulate
from xform.spmd.keeping import narrowed
from xform.spmd.values import WEIGHT

STATE = (values(), jax.tree.map(np.zeros_like, values()))


def gathers(plan, fn=step):
    _, found, program = sent(fn, plan, STATE, TOKENS)
    return [s for s in found if s.kind == "all-gather" and WEIGHT in s.where], program


@pytest.mark.parametrize("passes", [[], [Accumulate(steps=2)]], ids=["whole", "microbatches"])
def test_each_weight_is_gathered_once(passes):
    once, program = gathers(planned({"fsdp": 8}, None, passes, gather="step"))
    assert {s.times for s in once} == {1}
    stacks = [s for s in once if len(s.shape) == 3]
    assert len(stacks) == 2 and {s.shape[0] for s in stacks} == {LAYERS}
    assert "weights come together once a step:" in str(program.report)
    each, _ = gathers(planned({"fsdp": 8}, None, passes))
    assert sum(s.total for s in once) < sum(s.total for s in each)
    wanted = jax.jit(step)(STATE, TOKENS)
    found = parallelize(step, planned({"fsdp": 8}, None, passes, gather="step"))(STATE, TOKENS)
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_stacks_travel_in_the_dtype_that_the_body_makes_of_them():
    def narrow(state, tokens):
        loss, gradients = jax.value_and_grad(lambda p: model(p, tokens, jnp.bfloat16))(state[0])
        return jax.tree.map(lambda p, g: p - 0.1 * g, state[0], gradients), loss

    once, _ = gathers(planned({"fsdp": 8}, gather="step"), narrow)
    assert {s.dtype for s in once if len(s.shape) == 3} == {"bfloat16"}


def test_of_several_dtypes_the_weights_own_is_kept():
    def body(x):
        return x.astype(jnp.bfloat16), jnp.transpose(x).astype(jnp.bfloat16)

    made = jax.make_jaxpr(body)(jnp.ones((2, 3)))
    assert narrowed(made, made.invars[0]) == jnp.bfloat16
    made = jax.make_jaxpr(lambda x: (x.astype(jnp.bfloat16), x * 2))(jnp.ones((2, 3)))
    assert narrowed(made, made.invars[0]) == jnp.float32


def test_the_report_says_what_microbatches_send_again():
    passes = [Accumulate(steps=2)]
    _, program = gathers(planned({"fsdp": 8}, None, passes))
    assert "2 weights gathered 2 times in each pass that reads them: in a loop over microb" in str(
        program.report
    )
    assert "gradients summed over devices 2 times: in a loop over microbatches" in str(program.report)
    _, program = gathers(planned({"fsdp": 8}, None, passes, gather="step"))
    assert "in each pass that reads them" not in str(program.report)
    _, program = gathers(planned({"fsdp": 8}))
    assert "microbatches" not in str(program.report)
