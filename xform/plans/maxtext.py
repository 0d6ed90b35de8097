"""MaxText's configurations as plans: its base rules on any mesh, and its seven preset rule files.

Each takes the sizes of its mesh's axes; an axis of size 1 is left out of the mesh and of the rules, so that
no plan names an axis it lacks (two of MaxText's files do). The plan holds the rules in which a file departs
from the base rules on that mesh: a table a user can save, read and change.
"""

from __future__ import annotations

from xform import registry
from xform.errors import PlanError
from xform.plan import Plan
from xform.plans.rules import MESH_AXES, RULE_FILES, base_rules, restrict


def base(**sizes: int) -> Plan:
    """MaxText's base rules on axes of its mesh, in its order: `base(data=2, fsdp=8, tensor=4)`."""
    mesh = _mesh("maxtext", MESH_AXES, sizes)
    return Plan(mesh, (registry.find("shard")(),))


def pure_fsdp(fsdp: int = -1) -> Plan:
    """Everything on one axis: batch and weights."""
    sizes = dict(fsdp=fsdp)
    return _of("pure_fsdp", sizes)


def pipeline_large_moe(
    data: int = 1, stage: int = 1, fsdp: int = -1, context: int = 1, tensor: int = 1, expert: int = 1
) -> Plan:
    """Stages of a large mixture of experts; weights lie on fsdp and expert, never on context."""
    sizes = dict(data=data, stage=stage, fsdp=fsdp, context=context, tensor=tensor, expert=expert)
    return _of("pipeline_large_moe", sizes)


def cp_as_ep(data: int = 1, stage: int = 1, fsdp: int = -1, context: int = 1, expert: int = 1) -> Plan:
    """The context axis divides the experts too; inside them the batch is on data and fsdp alone."""
    sizes = dict(data=data, stage=stage, fsdp=fsdp, context=context, expert=expert)
    return _of("cp_as_ep", sizes)


def ep_as_cp(data: int = 1, stage: int = 1, fsdp: int = -1, expert: int = 1) -> Plan:
    """The expert axis divides the length outside the experts."""
    sizes = dict(data=data, stage=stage, fsdp=fsdp, expert=expert)
    return _of("ep_as_cp", sizes)


def ep_as_dp(data: int = 1, fsdp: int = -1, fsdp_transpose: int = 1, expert: int = 1) -> Plan:
    """The expert axis divides the batch outside the experts."""
    sizes = dict(data=data, fsdp=fsdp, fsdp_transpose=fsdp_transpose, expert=expert)
    return _of("ep_as_dp", sizes)


def fsdp_as_dp_for_attn(data: int = 1, fsdp: int = -1, fsdp_transpose: int = 1, expert: int = 1) -> Plan:
    """Attention's weights lie on the expert axis, for which fsdp is data parallelism; the router is whole."""
    sizes = dict(data=data, fsdp=fsdp, fsdp_transpose=fsdp_transpose, expert=expert)
    return _of("fsdp_as_dp_for_attn", sizes)


def shard_exp_on_fsdp(
    data: int = 1, stage: int = 1, fsdp: int = -1, fsdp_transpose: int = 1, context: int = 1, expert: int = 1
) -> Plan:
    """fsdp divides the experts themselves, not the embed side of their weights."""
    sizes = dict(
        data=data, stage=stage, fsdp=fsdp, fsdp_transpose=fsdp_transpose, context=context, expert=expert
    )
    return _of("shard_exp_on_fsdp", sizes)


def _of(name: str, sizes: dict[str, int]) -> Plan:
    mesh = _mesh(name, RULE_FILES[name].mesh, sizes)
    mine, base = restrict(base_rules(name), mesh), restrict(base_rules(), mesh)
    departures = {key: axes for key, axes in mine.items() if axes != base[key]}
    # A file speaks of every kind of model, so a rule that has nothing to say of this one is no fault.
    options = {"rules": departures, "strict": False} if departures else {}
    return Plan(mesh, (registry.find("shard")(**options),))


def _mesh(name: str, axes: tuple[str, ...], sizes: dict[str, int]) -> dict[str, int]:
    for axis in sizes:
        if axis not in axes:
            raise registry.unknown("axis", axis, axes, name)
    mesh = {axis: sizes[axis] for axis in axes if sizes.get(axis, 1) != 1}
    if not mesh:
        raise PlanError(f"{name}: every axis has size 1: give one a size, or -1 for all devices")
    return mesh
