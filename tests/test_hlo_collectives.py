"""Who takes part in a collective, along which mesh axes, and what a device sends for it."""

import pytest

from xform import hlo
from xform.hlo import collectives as hlo_collectives

MESH = hlo_collectives.Mesh({"fsdp": 2, "tensor": 4})


def read(line: str, devices: int = 8, mesh: hlo_collectives.Mesh = MESH) -> hlo_collectives.Collective:
    head = "HloModule m\n\nENTRY %main (x: f32[3,5]) -> f32[3,5] {\n  %x = f32[3,5] parameter(0)\n"
    entry = hlo.parse(f"{head}  {line}\n}}\n").entry
    return hlo_collectives.read(entry, entry.instructions["c"], devices, mesh)


@pytest.mark.parametrize(
    ("spelling", "groups"),
    [
        ("{{0,1},{2,3}}, dimensions={0}", [[0, 1], [2, 3]]),
        ("[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("[4,2]<=[2,4]T(1,0), dimensions={0}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=2,'b'=4] {'b'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("mesh['a'=2,'b'=4] {'a'}, dimensions={1}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=2,'b'=4] {'a','b'}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("mesh['a'=8] {'a':(1)2}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=8] {'a':(2)4}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("{}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
    ],
)
def test_replica_groups_are_read_in_every_spelling(spelling, groups):
    assert (
        read(f"ROOT %c = f32[3,5] all-reduce(%x), replica_groups={spelling}, to_apply=%add").groups == groups
    )


@pytest.mark.parametrize(
    ("opcode", "share"),
    [
        ("all-gather", 3),  # the operand is a shard; the other three are gathered, and this one sent on
        ("all-reduce", 1.5),
        ("reduce-scatter", 0.75),
        ("all-to-all", 0.75),
        ("ragged-all-to-all", 0.75),
    ],
)
def test_wire_bytes_are_those_of_the_bandwidth_optimal_algorithm(opcode, share):
    found = read(f"ROOT %c = f32[3,5] {opcode}(%x), replica_groups=[2,4]<=[8], dimensions={{0}}")
    assert (found.kind, found.wire_bytes) == (opcode, 60 * share)


def test_a_permute_sends_all_of_it_from_the_devices_that_send():
    found = read("ROOT %c = f32[3,5] collective-permute(%x), source_target_pairs={{0,1},{1,2},{2,2}}")
    assert (found.wire_bytes, found.groups) == (60 * 2 / 8, [[0, 1], [1, 2]])


def test_an_in_place_permute_and_a_ragged_all_to_all_send_their_first_operand():
    pairs = "source_target_pairs={{0,1},{1,0}}"
    in_place = read(f"ROOT %c = f32[3,5] collective-permute-start(%x, %x, %x, %x), {pairs}", devices=2)
    assert in_place.wire_bytes == 60
    assert read("ROOT %c = f32[3,5] ragged-all-to-all(%x, %x, %x)", devices=4).wire_bytes == 45


def test_axes_are_those_along_which_members_differ():
    spanned = {
        "fsdp": [[0, 4], [1, 5]],
        "tensor": [[0, 1, 2, 3]],
        "fsdp+tensor": [[0, 1, 4, 5]],
        "(none)": [[3]],
        "(another mesh)": [[0, 8]],
    }
    assert {axes: MESH.spanned(groups) for axes, groups in spanned.items()} == {
        axes: axes for axes in spanned
    }


CUT = hlo_collectives.Mesh({"fsdp": 6, "tensor": 2}, (), {"fsdp": {"fsdp.x": 2, "fsdp.y": 3}})


def test_a_stage_is_named_by_the_parts_of_axes_and_lies_in_its_axis():
    found = {
        ("fsdp", "fsdp.x"): [[0, 6], [1, 7]],
        ("fsdp", "fsdp.y"): [[0, 2, 4]],
        ("fsdp", "fsdp.x+fsdp.y"): [[0, 2, 4, 6, 8, 10]],
        ("fsdp+tensor", "fsdp.x+tensor"): [[0, 1, 6, 7]],
        ("tensor", None): [[0, 1]],
    }
    assert {(CUT.spanned(groups), CUT.stage(groups)) for groups in found.values()} == set(found)
    assert MESH.stage([[0, 4]]) is None


def test_an_axis_of_one_part_has_no_stages():
    assert hlo_collectives.Mesh({"fsdp": 6}, (), {"fsdp": {"fsdp": 6}}).stage([[0, 1]]) is None


def test_parts_that_do_not_make_up_their_axis_are_refused():
    with pytest.raises(ValueError, match="axis fsdp of size 8 is not made up of the parts"):
        hlo_collectives.Mesh({"fsdp": 8}, (), {"fsdp": {"fsdp.x": 2, "fsdp.y": 3}})
    with pytest.raises(ValueError, match="axis data of size None"):
        hlo_collectives.Mesh({"fsdp": 8}, (), {"data": {"data.x": 2}})


SEND = """HloModule m, num_partitions=2

ENTRY %main (x: f32[3,5]) -> token[] {
  %x = f32[3,5] parameter(0)
  %c = (f32[3,5], u32[], token[]) send(%x), is_host_transfer=true, frontend_attributes={TARGET}
  ROOT %done = token[] send-done(%c)
}
"""
SLICED = hlo_collectives.Mesh({"data": 4, "fsdp": 2}, (0, 0, 1, 1, 2, 2, 3, 3))


def sent(target: str, kind: str) -> hlo_collectives.Collective | None:
    attributes = f'_xla_megascale_target={target},_xla_megascale_transfer_type="{kind}"'
    entry = hlo.parse(SEND.replace("TARGET", attributes)).entry
    return hlo_collectives.between_slices(entry, entry.instructions["c"], SLICED)


def test_a_send_to_the_runtime_between_slices_is_a_collective():
    found = sent('"{1,2,3,4}x{0:1}"', "ALL_REDUCE")
    assert found == hlo_collectives.Collective("all-reduce", 60 * 1.5, [[0, 2, 4, 6]])
    assert SLICED.spanned(found.groups) == "data"
    found = sent("{{100000,200000},{100001,200001},{300000,400000}}", "ALL_GATHER")
    assert found is not None
    assert (found.kind, found.wire_bytes) == ("all-gather", 60)
    pairs = ",".join(f"{{{i}0000{d}->{i % 4 + 1}0000{d}}}" for i in range(1, 5) for d in range(2))
    found = sent(f"{{{pairs}}}", "ONE_TO_ONE")
    assert found is not None
    assert (found.kind, found.wire_bytes) == ("collective-permute", 60)


def test_a_send_to_the_host_is_none():
    entry = hlo.parse(SEND.replace("TARGET", '_xla_host_transfer_handler_name="pjrt_rendezvous"')).entry
    assert hlo_collectives.between_slices(entry, entry.instructions["c"], SLICED) is None


def test_a_module_of_one_slice_numbers_its_own_partitions():
    # data crosses slices in its major half: slice 0 has data 0 and 1, its partitions are 0, 1, 4 and 5.
    mesh = hlo_collectives.Mesh({"tensor": 2, "data": 4}, (0, 0, 1, 1, 0, 0, 1, 1))
    found = read("ROOT %c = f32[3,5] all-reduce(%x), replica_groups={{0,2},{1,3}}", 4, mesh)
    assert found.groups == [[0, 4], [1, 5]]
    assert mesh.spanned(found.groups) == "tensor"
