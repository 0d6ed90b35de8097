"""The check finds what is wrong, excuses nothing but rounding, and says where it looked."""

import dataclasses
import json
from typing import ClassVar

import jax
import jax.numpy as jnp
import pytest

from tests import targets_for_tests as targets
from xform import PlanError, plans
from xform.check import check
from xform.plan import Plan
from xform.rewrite import rewrite

PLAN = plans.fsdp(8)


@dataclasses.dataclass(frozen=True)
class Spoil:
    """Multiplies the result of every tanh by a factor: a pass that is wrong by a known amount."""

    factor: float
    stages: ClassVar[tuple[str, ...]] = ("model",)

    def rewrite(self, jaxpr, context):
        def rule(site):
            return [site.bind()[0] * self.factor] if site.name == "tanh" else None

        return rewrite(jaxpr, rule, context.report, "spoil")


def test_a_loss_is_compared_with_its_gradients():
    result = check(*targets.loss(), PLAN)
    assert result.ok and result.kind == "loss and gradients" and result.compared == 3


def test_a_loss_with_aux_too():
    result = check(*targets.loss(aux=True), PLAN)
    assert result.ok and result.kind == "loss and gradients" and result.compared == 4


def test_a_training_step_is_run_several_times():
    result = check(*targets.step(), PLAN, steps=4)
    assert result.ok and result.kind == "training step" and result.compared == 4 * 3


def test_anything_else_by_its_results():
    fn = lambda x: {"up": x + 1, "down": x - 1}  # noqa: E731
    result = check(fn, (jax.ShapeDtypeStruct((8, 6), jnp.int32),), PLAN)
    assert result.ok and result.kind == "results" and result.max_abs_error == 0


@pytest.mark.parametrize("target", ["loss", "step"])
def test_a_wrong_pass_is_caught_and_the_first_tensor_named(target):
    result = check(*getattr(targets, target)(), Plan({"fsdp": 8}, [Spoil(1.1)]))
    assert not result.ok
    assert result.max_rel_error > result.tolerance
    first = {"loss": "[0]", "step": "step 1: [1]"}[target]
    assert result.first_difference == first
    assert first in str(result) and "DIFFERS" in str(result)


def test_an_error_as_small_as_rounding_passes():
    assert check(*targets.loss(), Plan({"fsdp": 8}, [Spoil(1.0 + 2e-7)])).ok


def test_tolerance_can_be_given():
    assert check(*targets.loss(), Plan({"fsdp": 8}, [Spoil(1.001)]), tolerance=1e-1).ok


def test_a_tensor_that_is_nothing_but_rounding_is_excused():
    """A bias before softmax has gradient zero; sign-like updates blow its rounding up to a whole step."""

    def loss(params, tokens):
        x = params["table"].at[tokens].get(mode="clip")
        logits = jnp.tanh(x) @ params["table"].T + params["shift"]
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1, mode="clip")
        return -chosen.mean()

    def step(params, tokens):
        gradients = jax.grad(loss)(params, tokens)
        return jax.tree.map(lambda p, g: p - 1e-2 * g / (jnp.abs(g) + 1e-12), params, gradients)

    params = {"table": jax.ShapeDtypeStruct((56, 24), jnp.float32), "shift": jnp.ones(())}
    tokens = jax.ShapeDtypeStruct((8, 6), jnp.int32)
    result = check(step, (params, tokens), PLAN, steps=1)
    assert result.ok and result.excused >= 1
    assert "itself moves as far" in str(result)


def test_what_is_not_finite_must_agree():
    def fn(x):
        return jnp.where(x > 0.5, jnp.inf, jnp.log(x - 2.0))

    assert check(fn, (jnp.linspace(0.1, 1, 8),), PLAN).ok


def test_a_plan_for_other_devices_says_what_would_fit():
    with pytest.raises(PlanError, match="8"):
        check(*targets.loss(), plans.fsdp(16))


def test_a_comparison_of_nan_with_nan_says_so():
    params = jnp.ones((8, 4))
    result = check(lambda p: jnp.log(-p).sum(), (params,), PLAN)
    assert result.not_finite == 1 and "NaN was compared with NaN" in str(result)
    assert check(lambda p: jnp.log(p).sum(), (params,), PLAN).not_finite == 0


def test_the_json_of_an_infinite_error_is_json():
    result = dataclasses.replace(check(jnp.tanh, (jnp.ones((8, 4)),), PLAN), max_abs_error=float("inf"))
    text = json.dumps(result.to_json(), allow_nan=False)
    assert json.loads(text)["max_abs_error"] is None and json.loads(text)["ok"]


def test_a_program_that_the_plan_does_not_touch_was_compared_with_itself():
    untouched = check(lambda p: jnp.tanh(p), (jnp.ones((7, 3)),), PLAN)
    assert (untouched.split, untouched.changed) == (0, 0) and "compared with itself" in str(untouched)
    assert "nothing was compared" in str(check(lambda p: None, (jnp.ones(3),), PLAN))


def test_arguments_beyond_this_machines_memory_are_refused_before_anything_runs():
    huge = jax.ShapeDtypeStruct((1 << 30, 1 << 12), jnp.float32)
    with pytest.raises(PlanError, match="check a smaller size of the model"):
        check(jnp.sum, (huge,), PLAN)


@dataclasses.dataclass(frozen=True)
class Meant(Spoil):
    """The same, by intent."""

    exact: ClassVar[bool] = False


def test_a_pass_that_changes_numbers_by_intent_is_given_to_the_one_device_too():
    result = check(*targets.loss(), Plan({"fsdp": 8}, [Meant(1.5), *PLAN.passes]))
    assert result.ok and result.alike == ("meant",)
    assert "the original on one, with meant alone" in str(result)
    wrong = check(*targets.loss(), Plan({"fsdp": 8}, [Meant(1.5), Spoil(1.1), *PLAN.passes]))
    assert not wrong.ok
