"""Numbers agree: every model and every plan, values, gradients and training steps, against one device.

All models are compared under the plan that is two in one, our Llama under all plans, and two of the public
ones also under the plans that are the simplest. tests/benchmarks/matrix.py runs all pairs.
"""

import pytest

from tests import ours, public
from xform import Accumulate, ChunkedLoss, Narrow, Offload, Plan, Remat, Roll, Shard, plans
from xform.check import check
from xform.models import llama

PLANS = {
    "fsdp": plans.fsdp(8),
    "fsdp_tensor": plans.fsdp_tensor(4, 2),
    "zero1": plans.zero1(8),
    "zero2": plans.zero2(8),
    "hsdp": plans.hsdp(2, 4),
    "slices": plans.hsdp_slices(2, 4),
    "tensor": plans.tensor(8),
    "tensor_2d": plans.tensor_2d(2, 4),
    "megatron_sp": plans.megatron_sp(2, 4),
}
MEMORY = Plan(
    {"fsdp": 4, "tensor": 2},
    [
        Roll(),
        ChunkedLoss(chunks=2),
        Remat(policy="save_qkv_proj"),
        Accumulate(steps=2),
        Narrow(),
        Shard(),
        Offload(),
    ],
)
"""All that decides what lives where and when, at once."""
OURS = ours.MODELS
SIZES = ours.SIZES


def _agrees(fn, args, plan, **options) -> None:
    result = check(fn, args, plan, **options)
    assert result.ok, str(result)
    assert result.compared > 1


KEY_BIASES = {"bert": 2, "vit": 2}
"""One a layer: softmax does not notice a bias on all keys; its gradient is nothing but rounding."""


@pytest.mark.slow  # compiles the gradients of a real model for one and for eight devices
@pytest.mark.parametrize("name", public.PUBLIC)
def test_public_models_have_the_gradients_of_one_device_with_nothing_excused(name):
    """Of two layers, so that one's results are another's inputs: a decoder has one more than its encoder."""
    fn, args = public.PUBLIC[name](layers=1 if name in ("t5", "whisper") else 2)
    result = check(fn, args, PLANS["fsdp_tensor"])
    assert result.ok and result.kind == "loss and gradients", str(result)
    assert result.excused <= KEY_BIASES.get(name, 0), str(result)


@pytest.mark.slow  # compiles a training step of a real model for one and for eight devices
@pytest.mark.parametrize(("name", "plan"), [("gpt2", "fsdp"), ("llama", "zero1")])
def test_public_decoders_train_as_on_one_device(name, plan):
    """Of one layer. What encodes and decodes, and what sees images, trains below."""
    _agrees(*public.train_step(name, layers=1), PLANS[plan], steps=2)


EACH = [
    *(("llama", plan) for plan in PLANS),
    *((name, "fsdp_tensor") for name in OURS if name != "llama"),
]


@pytest.mark.slow  # compiles a training step for one and for eight devices
@pytest.mark.parametrize(("name", "plan"), EACH)
def test_our_models_train_as_on_one_device(name, plan):
    _agrees(*ours.train_step(name), PLANS[plan], steps=2)


@pytest.mark.slow  # compiles for one and for eight devices
def test_unrolled_and_packed_llama_has_the_loss_and_gradients_of_one_device():
    fn, args = llama.loss(**SIZES, scan=False, packed=True, dtype="float32")
    _agrees(fn, args, plans.fsdp_tensor(4, 2))


@pytest.mark.slow  # compiles for one and for eight devices
@pytest.mark.parametrize("name", OURS)
def test_decoding_agrees(name):
    _agrees(*OURS[name].decode_step(**SIZES), plans.fsdp_tensor(4, 2))


@pytest.mark.slow  # compiles a training step of unrolled layers for one device, and one of loops for eight
@pytest.mark.parametrize("name", ["llama", "public t5", "public vit"])
def test_every_pass_over_memory_at_once_trains_as_on_one_device(name):
    if name in OURS:
        fn, args = ours.train_step(name, scan=False)
    else:
        fn, args = public.train_step(name.removeprefix("public "))
    _agrees(fn, args, MEMORY, steps=2)
