"""Collectives written out are exact: every model and every kind of mesh, against one device.

A part of the table of models and plans; `python -m tests.benchmarks.matrix --explicit` compares all of it.
"""

import itertools
from typing import Any

import pytest

from tests import ours, public
from xform import Accumulate, ChunkedLoss, Narrow, Offload, Plan, Remat, Roll, Shard
from xform.check import check

MESHES = {
    "fsdp": {"fsdp": 8},
    "data_fsdp": {"data": 2, "fsdp": 4},
    "fsdp_tensor": {"fsdp": 2, "tensor": 4},
    "data_fsdp_tensor": {"data": 2, "fsdp": 2, "tensor": 2},
    "tensor": {"tensor": 8},
}


def explicit(mesh: str, *passes: Any, **options: Any) -> Plan:
    """A plan whose collectives are written out; `options` are those of Shard."""
    return Plan(MESHES[mesh], [*passes, Shard(strict=False, collectives="explicit", **options)])


MEMORY = (
    Roll(),
    ChunkedLoss(chunks=2),
    Remat(policy="save_qkv_proj"),
    Accumulate(steps=2),
    Narrow(),
    Offload(),
)
PLANS = {
    **{mesh: explicit(mesh) for mesh in MESHES},
    "zero1": explicit("data_fsdp", optimizer_axes=["data"]),
    "zero2": explicit("data_fsdp", optimizer_axes=["data"], gradient_axes=["data"]),
    "sequence": explicit("fsdp_tensor", sequence_parallel=True),
    "remat": explicit("data_fsdp_tensor", Remat(policy="full")),
    "roll": explicit("fsdp_tensor", Roll()),
    "chunkedloss": explicit("data_fsdp_tensor", ChunkedLoss(chunks=2)),
    "accumulate": explicit("data_fsdp_tensor", Accumulate(steps=2), gradient_dtype="float32"),
    "offload": explicit("fsdp", Narrow(), Offload()),
    "memory": explicit("fsdp_tensor", *MEMORY),
    "memory_zero2": explicit("data_fsdp", *MEMORY, optimizer_axes=["data"], gradient_axes=["data"]),
}


def _agrees(fn: Any, args: Any, plan: Plan, **options: Any) -> None:
    result = check(fn, args, plan, **options)
    assert result.ok, str(result)
    assert result.compared and result.split


EACH = list(zip(public.PUBLIC, itertools.cycle(MESHES), strict=False))
FORWARD = {"bert", "bloom", "gpt2", "llama", "mistral", "whisper"}
"""Much like ours or another in the backward pass: what they predict is compared."""


@pytest.mark.slow  # compiles a real model, some with gradients, for one and for eight devices
@pytest.mark.parametrize(("name", "plan"), EACH)
def test_public_models_agree_with_one_device(name: str, plan: str) -> None:
    fn, args = (public.logits if name in FORWARD else public.loss)(name, layers=1)
    _agrees(fn, args, PLANS[plan])


@pytest.mark.slow  # compiles a training step of unrolled layers for one device, and one of loops for eight
def test_every_pass_over_memory_at_once_trains_as_on_one_device() -> None:
    _agrees(*ours.train_step("llama", scan=False), PLANS["memory"], steps=2)


@pytest.mark.slow  # compiles for one and for eight devices
@pytest.mark.parametrize("name", ["gpt2", "encoder_decoder"])
def test_decoding_agrees(name: str) -> None:
    fn, args = ours.MODELS[name].decode_step(**ours.SIZES)
    _agrees(fn, args, PLANS["data_fsdp_tensor"])
