"""What runs between the start and the done of collectives: in schedules, loops, fusions, between slices."""

import pytest

from xform.hlo import collectives as hlo_collectives
from xform.hlo import module as hlo
from xform.hlo import overlap as hlo_overlap

HEADER = "HloModule m, is_scheduled=true, num_partitions=4\n\n"
CHIP = hlo_overlap.Chip(peak_flops=1000.0, bandwidth=100.0, clock=10.0)
MESH = hlo_collectives.Mesh({"fsdp": 4})
GROUPS = "replica_groups=[1,4]<=[4]"
PAIRS = "source_target_pairs={{0,1},{1,2},{2,3},{3,0}}"
PARAMETER = "%x = f32[3,5] parameter(0)\n"
START = f"%s = (f32[3,5], f32[3,5]) collective-permute-start(%x), {PAIRS}\n"
DONE = "%d = f32[3,5] collective-permute-done(%s)\n"


def work(name: str, cycles: int, operand: str = "x") -> str:
    estimate = f', backend_config={{"estimated_cycles":"{cycles}"}}' if cycles else ""
    return f"%{name} = f32[3,5] negate(%{operand}){estimate}\n"


def overlap(entry: str, more: str = "", mesh: hlo_collectives.Mesh = MESH) -> hlo_overlap.Overlap:
    text = f"{HEADER}{more}\nENTRY %main (x: f32[3,5]) -> f32[3,5] {{\n{entry}}}\n"
    return hlo_overlap.overlap(text, CHIP, mesh)


def sums(found: hlo_overlap.Overlap, axes: str = "fsdp") -> dict[str, tuple[float, float, float]]:
    return {kind: (s.async_bytes, s.sync_bytes, s.seconds) for kind, s in found.axes[axes].items()}


def test_what_is_scheduled_between_start_and_done_is_beside_the_collective():
    found = overlap(PARAMETER + work("a", 70) + START + work("b", 30) + work("c", 20) + DONE + work("e", 90))
    assert sums(found) == {"collective-permute": (60, 0, 5.0)}
    assert (found.by_cycles, found.seconds, found.beside) == (True, 21.0, 5.0)
    assert found.flights == [hlo_overlap.Flight("s", "collective-permute", "fsdp", 60, 1, 5.0)]
    assert found.notes == []


def test_a_plain_collective_is_synchronous_and_has_nothing_beside_it():
    plain = f"%g = f32[12,5] all-gather(%x), {GROUPS}, dimensions={{0}}\n"
    found = overlap(PARAMETER + work("a", 70) + plain + work("b", 30))
    assert sums(found) == {"all-gather": (0, 180, 0)}
    assert found.flights == [] and (found.seconds, found.beside) == (10.0, 0)


def test_what_runs_beside_two_collectives_counts_once():
    entry = PARAMETER + START + work("a", 10) + START.replace("%s", "%t") + work("b", 20) + DONE
    entry += work("c", 40) + DONE.replace("%s", "%t").replace("%d", "%e")
    found = overlap(entry)
    assert sums(found) == {"collective-permute": (120, 0, 7.0)}
    assert [flight.seconds for flight in found.flights] == [3.0, 6.0]
    assert found.beside == 7.0


LOOP = """%cond (c: (s32[], f32[3,5])) -> pred[] {
  %c = (s32[], f32[3,5]) parameter(0)
  %n = s32[] constant(7)
  ROOT %lt = pred[] compare(%c#0, %n), direction=LT
}

%body (q: (s32[], f32[3,5])) -> (s32[], f32[3,5]) {
  %q = (s32[], f32[3,5]) parameter(0)
  %one = s32[] constant(1)
  %next = s32[] add(%q#0, %one)
  %x = f32[3,5] get-tuple-element(%q), index=1
WORK
  ROOT %out = (s32[], f32[3,5]) tuple(%next, %x)
}
"""
LOOPED = """%zero = s32[] constant(0)
%init = (s32[], f32[3,5]) tuple(%zero, %x)
%loop = (s32[], f32[3,5]) while(%init), condition=%cond, body=%body
"""


def test_a_collective_in_a_loop_counts_as_often_as_the_loop_runs():
    found = overlap(PARAMETER + LOOPED, LOOP.replace("WORK", START + work("a", 30) + DONE + work("b", 20)))
    assert sums(found) == {"collective-permute": (7 * 60, 0, 7 * 3.0)}
    assert [(flight.times, flight.seconds) for flight in found.flights] == [(7, 3.0)]
    assert (found.seconds, found.beside) == (7 * 5.0, 7 * 3.0)


def test_a_loop_between_start_and_done_is_beside_the_collective_with_all_its_trips():
    found = overlap(PARAMETER + START + LOOPED + DONE, LOOP.replace("WORK", work("a", 30)))
    assert sums(found) == {"collective-permute": (60, 0, 7 * 3.0)}
    assert [flight.seconds for flight in found.flights] == [7 * 3.0]


def test_of_a_conditional_the_dearest_branch_is_beside_the_collective():
    branches = "".join(
        f"%{name} (x: f32[3,5]) -> f32[3,5] {{\n{PARAMETER}{work('a', cycles)}}}\n\n"
        for name, cycles in (("cheap", 10), ("dear", 50))
    )
    conditional = (
        "%i = s32[] constant(0)\n%k = f32[3,5] conditional(%i, %x, %x), branch_computations={%cheap, %dear}\n"
    )
    assert sums(overlap(PARAMETER + START + conditional + DONE, branches)) == {
        "collective-permute": (60, 0, 5.0)
    }


CHAIN = f"""%start (p: f32[3,5]) -> (f32[3,5], f32[12,5]) {{
  %p = f32[3,5] parameter(0)
  %g1 = f32[12,5] all-gather(%p), channel_id=3, {GROUPS}
  ROOT %c1 = (f32[3,5], f32[12,5]) custom-call(%g1), custom_call_target="AsyncCollectiveStart"
}}

%async_collective_fusion.7 (q: f32[3,5], r: f32[3,5]) -> (f32[3,5], f32[3,5]) {{
  %q = f32[3,5] parameter(0)
  %r = f32[3,5] parameter(1)
  %g2 = f32[12,5] all-gather(%q), channel_id=3, {GROUPS}
  %n = f32[3,5] negate(%r)
  ROOT %t = (f32[3,5], f32[3,5]) tuple(%n, %q)
}}

%done (u: f32[3,5]) -> f32[12,5] {{
  %u = f32[3,5] parameter(0)
  %g3 = f32[12,5] all-gather(%u), channel_id=3, {GROUPS}
  ROOT %c3 = f32[12,5] custom-call(%u, %g3), custom_call_target="AsyncCollectiveDone"
}}
"""
ENDED = "%f3 = f32[12,5] fusion(%f1#0), kind=kCustom, calls=%done\n"
BEGUN = "%f1 = (f32[3,5], f32[12,5]) fusion(%x), kind=kCustom, calls=%start\n"
CARRIED = (
    "%f2 = (f32[3,5], f32[3,5]) fusion(%f1#0, %x), kind=kOutput, calls=%async_collective_fusion.7"
    ', backend_config={"estimated_cycles":"40"}\n'
)


def test_the_arithmetic_of_the_fusion_that_carries_a_collective_on_is_beside_it():
    found = overlap(PARAMETER + BEGUN + CARRIED + ENDED + work("b", 30), CHAIN)
    assert sums(found) == {"all-gather": (180, 0, 4.0)}


def test_a_collective_that_a_loop_carries_ends_at_the_done_of_its_channel():
    other = CHAIN.replace("channel_id=3", "channel_id=5")
    for name in ("start", "done", "async_collective_fusion.7"):
        other = other.replace(f"%{name} ", f"%{name}.5 ")
    entry = PARAMETER + BEGUN + LOOPED + BEGUN.replace("%f1", "%h1").replace("%start", "%start.5")
    entry += ENDED.replace("%f3", "%h3").replace("%done", "%done.5") + work("a", 20)
    entry += ENDED.replace("%f1#0", "%loop#1") + work("b", 90)
    found = overlap(entry, CHAIN + other + LOOP.replace("WORK", work("l", 30)))
    assert [flight.seconds for flight in found.flights] == [7 * 3.0 + 2.0, 0.0]
    assert found.notes == []


def test_collectives_of_one_channel_end_in_the_order_in_which_they_start():
    entry = PARAMETER + BEGUN + work("a", 10) + BEGUN.replace("%f1", "%h1") + work("b", 20) + ENDED
    entry += work("c", 40) + ENDED.replace("%f3", "%h3").replace("%f1", "%h1")
    assert [flight.seconds for flight in overlap(entry, CHAIN).flights] == [3.0, 6.0]


def test_a_collective_offloaded_to_another_core_begins_when_it_gets_its_operands():
    inner = f"""%wrapped (p: f32[3,5]) -> f32[3,5] {{
  %p = f32[3,5] parameter(0)
  ROOT %r = f32[3,5] all-reduce(%p), {GROUPS}, to_apply=%add
}}
"""
    offloaded = "%s = ((), (), s32[7]) async-start(), calls=%wrapped\n"
    update = "%u = ((f32[3,5]), f32[3,5], s32[7]) async-update(%s, %x)\n"
    done = "%d = f32[3,5] async-done(%u)\n"
    found = overlap(PARAMETER + offloaded + work("a", 70) + update + work("b", 30) + done, inner)
    assert sums(found) == {"all-reduce": (90, 0, 3.0)}
    at_once = offloaded.replace("async-start()", "async-start(%x)")
    found = overlap(PARAMETER + at_once + work("a", 70) + done.replace("%u", "%s"), inner)
    assert sums(found) == {"all-reduce": (90, 0, 7.0)}


def test_a_collective_between_slices_ends_when_what_it_receives_is_there():
    transfer = (
        'is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="psum_0",'
        '_xla_megascale_target="{1,2}x{0:1}",_xla_megascale_transfer_type="ALL_REDUCE"}\n'
    )
    entry = PARAMETER + "%token = token[] after-all()\n"
    entry += f"%s = (f32[3,5], u32[], token[]) send(%x, %token), channel_id=2, {transfer}"
    entry += f"%r = (f32[3,5], u32[], token[]) recv(%token), channel_id=1, {transfer}"
    entry += work("a", 10) + "%sd = token[] send-done(%s), channel_id=2\n" + work("b", 20)
    entry += "%rd = (f32[3,5], token[]) recv-done(%r), channel_id=1\n" + work("c", 40)
    sliced = hlo_collectives.Mesh({"data": 2, "fsdp": 2}, (0, 0, 1, 1))
    assert sums(overlap(entry, mesh=sliced), "data") == {"all-reduce": (60, 0, 3.0)}


def test_a_collective_without_a_done_lasts_as_long_as_its_computation_and_is_noted():
    found = overlap(PARAMETER + work("a", 10) + START + work("b", 20))
    assert sums(found) == {"collective-permute": (60, 0, 2.0)}
    assert found.notes == ["s in main has no done there: taken to end with it"]


def test_without_cycles_arithmetic_takes_its_time_at_peak_or_its_bytes_theirs():
    dot = "%m = f32[3,3] dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={1}\n"
    entry = PARAMETER + "%y = f32[3,5] parameter(1)\n"
    found = overlap(entry + START + dot + DONE)
    assert not found.by_cycles
    assert found.seconds == found.beside == pytest.approx((60 + 60 + 36) / CHIP.bandwidth)
    on_chip = (
        (entry + dot).replace("[3,5] p", "[3,5]{1,0:S(1)} p").replace("[3,3] dot", "[3,3]{1,0:S(1)} dot")
    )
    assert overlap(on_chip).seconds == pytest.approx(2 * 3 * 5 * 3 / CHIP.peak_flops)


def test_a_kernel_takes_what_its_author_claims_with_cycles_or_without():
    kernel = (
        '%k = f32[3,5] custom-call(%x), custom_call_target="tpu_custom_call", '
        'backend_config={"custom_call_config":{"cost_estimate":{"flops":"5000","bytes_accessed":"200"}}}\n'
    )
    assert overlap(PARAMETER + START + kernel + DONE).beside == 5.0
    assert overlap(PARAMETER + START + kernel + DONE + work("a", 10)).beside == 5.0


SLICED = """%fused (p: f32[7,3,5], i: s32[]) -> f32[3,5] {
  %p = f32[7,3,5] parameter(0)
  %i = s32[] parameter(1)
  %one = f32[1,3,5] dynamic-slice(%p, %i, %i, %i), dynamic_slice_sizes={1,3,5}
  ROOT %flat = f32[3,5] bitcast(%one)
}

%updated (p: f32[7,3,5], u: f32[1,3,5], i: s32[]) -> f32[7,3,5] {
  %p = f32[7,3,5] parameter(0)
  %u = f32[1,3,5] parameter(1)
  %i = s32[] parameter(2)
  ROOT %all = f32[7,3,5] dynamic-update-slice(%p, %u, %i, %i, %i)
}

%both (p: f32[3,5]) -> (f32[3,5], f32[3,5], f32[3,5]) {
  %p = f32[3,5] parameter(0)
  %n = f32[3,5] negate(%p)
  ROOT %t = (f32[3,5], f32[3,5]{1,0:S(1)}, f32[3,5]) tuple(%n, %n, %p)
}
"""
STACKED = """%p = f32[7,3,5] parameter(0)
%x = f32[3,5] parameter(1)
%i = s32[] parameter(2)
%u = f32[1,3,5] bitcast(%x)
"""


@pytest.mark.parametrize(
    ("line", "nbytes"),
    [
        ("f32[3,5] negate(%x)", 60 + 60),
        ("f32[1,3,5] dynamic-slice(%p, %i, %i, %i)", 60 + 3 * 4 + 60),
        ("f32[7,3,5] dynamic-update-slice(%p, %u, %i, %i, %i)", 60 + 3 * 4 + 60),
        ("f32[3,5] fusion(%p, %i), kind=kLoop, calls=%fused", 60 + 4 + 60),
        ("f32[7,3,5] fusion(%p, %u, %i), kind=kLoop, calls=%updated", 60 + 4 + 60),
        ("(f32[3,5], f32[3,5]{1,0:S(1)}, f32[3,5]) fusion(%x), kind=kLoop, calls=%both", 60 + 60),
        ("f32[3,5]{1,0:S(1)} copy(%x)", 60),
        ("f32[3,5] bitcast(%x)", 0),
        ("(f32[3,5], f32[3,5], u32[]) copy-start(%x)", 0),
        (f"f32[12,5] all-gather(%x), {GROUPS}", 0),
    ],
)
def test_bytes_are_those_that_are_read_and_written(line, nbytes):
    text = f"{HEADER}{SLICED}\nENTRY %main (x: f32[3,5]) -> f32[3,5] {{\n{STACKED}%r = {line}\n}}\n"
    module = hlo.parse(text)
    assert hlo_overlap.memory_bytes(module, module.entry, module.entry.instructions["r"]) == nbytes


def test_a_fusion_that_only_carries_a_collective_moves_nothing_of_its_own():
    text = (
        f"{HEADER}{CHAIN}\nENTRY %main (x: f32[3,5]) -> f32[3,5] {{\n{PARAMETER}{BEGUN}{CARRIED}{ENDED}}}\n"
    )
    module = hlo.parse(text)
    moved = {
        name: hlo_overlap.memory_bytes(module, module.entry, module.entry.instructions[name])
        for name in ("f1", "f2", "f3")
    }
    assert moved == {"f1": 0, "f2": 60 + 60, "f3": 0}
