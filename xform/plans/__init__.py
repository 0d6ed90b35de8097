"""Plans by name: the usual ways of training in parallel, a few lines each.

    xform.plans.fsdp(16)        Plan(mesh={"fsdp": 16}, passes=[Shard()])

`resolve` reads what the command line calls a plan: a TOML file, or a preset's name with its arguments,
`fsdp:16`. A size of -1, the default, is what is left of the devices. Axes and rules are MaxText's
(`xform.plans.maxtext`), save where a docstring says otherwise.
"""

from __future__ import annotations

import inspect
import os
import pathlib
from collections.abc import Callable

from xform import registry
from xform.errors import PlanError
from xform.plan import Plan
from xform.plans import maxtext


def fsdp(n: int = -1) -> Plan:
    """Fully sharded data parallelism, ZeRO-3: batch, weights, gradients and optimizer on one axis."""
    return Plan({"fsdp": n}, (registry.find("shard")(),))


zero3 = fsdp


def zero1(n: int = -1) -> Plan:
    """Data parallelism with the optimizer state sharded, the rest whole (Rajbhandari et al. 2020)."""
    return Plan({"data": n}, (registry.find("shard")(optimizer_axes=("data",)),))


def zero2(n: int = -1) -> Plan:
    """Data parallelism with gradients and optimizer state sharded; weights are whole."""
    return Plan({"data": n}, (registry.find("shard")(optimizer_axes=("data",), gradient_axes=("data",)),))


def hsdp(replicas: int, n: int = -1) -> Plan:
    """Hybrid sharding: `replicas` copies of an FSDP group of `n`, gradients reduced between them."""
    return Plan({"data": replicas, "fsdp": n}, (registry.find("shard")(),))


def hsdp_slices(slices: int, n: int = -1) -> Plan:
    """Hybrid sharding over slices: FSDP over the `n` chips of each slice."""
    return Plan({"fsdp": n}, (registry.find("shard")(),), dcn={"data": slices})


def tensor(n: int = -1) -> Plan:
    """Tensor parallelism (Megatron): heads, mlp and vocabulary on one axis; the batch is whole."""
    return Plan({"tensor": n}, (registry.find("shard")(),))


def tensor_2d(x: int, y: int = -1) -> Plan:
    """Tensor parallelism in two dimensions: embed over `x` chips, heads, mlp and vocabulary over `y`.

    As in GSPMD (Xu et al. 2021). The axis of the embed side, in weights and residual stream alike, is called
    tensor_transpose.
    """
    embed = (("tensor_transpose",),)
    rules = dict.fromkeys(("embed", "embed_attn", "embed_vocab", "activation_embed"), embed)
    return Plan({"tensor_transpose": x, "tensor": y}, (registry.find("shard")(rules=rules, strict=False),))


def fsdp_tensor(n: int, tensor: int = -1) -> Plan:
    """FSDP over `n` chips times tensor parallelism over `tensor`."""
    return Plan({"fsdp": n, "tensor": tensor}, (registry.find("shard")(),))


def megatron_sp(tensor: int = -1, n: int = 1) -> Plan:
    """Tensor parallelism with Megatron's sequence parallelism, times FSDP over `n` chips.

    Norms and the residual stream are divided by length over the tensor axis (Korthikanti et al. 2022).
    """
    mesh = {"fsdp": n, "tensor": tensor} if n != 1 else {"tensor": tensor}
    return Plan(mesh, (registry.find("shard")(sequence_parallel=True),))


PRESETS: dict[str, Callable[..., Plan]] = {
    "fsdp": fsdp,
    "zero1": zero1,
    "zero2": zero2,
    "zero3": fsdp,
    "hsdp": hsdp,
    "hsdp_slices": hsdp_slices,
    "tensor": tensor,
    "tensor_2d": tensor_2d,
    "fsdp_tensor": fsdp_tensor,
    "megatron_sp": megatron_sp,
    "maxtext": maxtext.base,
    "pure_fsdp": maxtext.pure_fsdp,
    "pipeline_large_moe": maxtext.pipeline_large_moe,
    "cp_as_ep": maxtext.cp_as_ep,
    "ep_as_cp": maxtext.ep_as_cp,
    "ep_as_dp": maxtext.ep_as_dp,
    "fsdp_as_dp_for_attn": maxtext.fsdp_as_dp_for_attn,
    "shard_exp_on_fsdp": maxtext.shard_exp_on_fsdp,
}
"""What `--plan` takes by name."""


def resolve(name: str) -> Plan:
    """The plan that `--plan` means: a TOML file, or a preset with its sizes.

    `plan.toml`, `fsdp`, `fsdp:16`, `hsdp:2,8`, `hsdp:2,n=8`, `maxtext:data=2,fsdp=8`.
    Raises `PlanError` where there is no such file or preset, or the sizes do not fit it.
    """
    preset, _, sizes = name.partition(":")
    if preset not in PRESETS:
        if name.endswith(".toml") or os.sep in name or pathlib.Path(name).is_file():
            return Plan.load(name)
        raise registry.unknown("file or preset", preset, PRESETS, f"--plan {name}")
    make = PRESETS[preset]
    signature = inspect.signature(make)
    positional: list[int] = []
    named: dict[str, int] = {}
    try:
        for part in filter(None, (part.strip() for part in sizes.split(","))):
            key, equals, value = part.rpartition("=")
            if equals:
                named[key.strip()] = _size(value)
            else:
                positional.append(_size(value))
        signature.bind(*positional, **named)
    except (TypeError, ValueError) as error:
        wanted = ", ".join(
            str(parameter).replace(": 'int'", "") for parameter in signature.parameters.values()
        )
        raise PlanError(f"--plan {name}: {error}; the sizes of {preset} are {wanted}") from error
    return make(*positional, **named)


def _size(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text.strip()!r} is not a size") from None
