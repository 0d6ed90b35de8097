"""What a module costs: each collective once however dressed, weighted by trips; flops, kernels, copies."""

import itertools
import random

import pytest

from xform.hlo import collectives as hlo_collectives
from xform.hlo import costs as hlo_costs

HEADER = "HloModule m, is_scheduled=true, num_partitions=4\n\n"


def costs(entry: str, more: str = "", mesh: dict[str, int] | None = None) -> hlo_costs.Costs:
    body = "\n".join(f"  {line}" for line in entry.strip().splitlines())
    return hlo_costs.costs(f"{HEADER}{more}\nENTRY %main (x: bf16[3,5]) -> bf16[3,5] {{\n{body}\n}}\n", mesh)


def counted(found: hlo_costs.Costs) -> dict[str, tuple[int, float, int]]:
    return {kind: (t.count, t.wire_bytes, t.async_count) for kind, t in found.collectives.items()}


PARAMETER = "%x = bf16[3,5] parameter(0)\n"
GROUPS = "replica_groups=[1,4]<=[4]"


def test_a_plain_collective_counts_once():
    found = costs(
        PARAMETER + f"ROOT %g = bf16[12,5] all-gather(%x), {GROUPS}, dimensions={{0}}", mesh={"fsdp": 4}
    )
    assert counted(found) == {"all-gather": (1, 90, 0)}
    assert found.axes["fsdp"]["all-gather"].to_json() == {"count": 1, "wire_bytes": 90, "async_count": 0}


def test_a_start_counts_and_its_done_does_not():
    found = costs(
        PARAMETER
        + f"%s = (bf16[3,5], bf16[12,5]) all-gather-start(%x), {GROUPS}, dimensions={{0}}\n"
        + "ROOT %d = bf16[12,5] all-gather-done(%s)"
    )
    assert counted(found) == {"all-gather": (1, 90, 1)}


def test_an_async_wrapper_is_looked_into():
    inner = f"""%wrapped (p: bf16[12,5]) -> bf16[3,5] {{
  %p = bf16[12,5] parameter(0)
  ROOT %r = bf16[3,5] reduce-scatter(%p), {GROUPS}, dimensions={{0}}, to_apply=%add
}}
"""
    entry = """%y = bf16[12,5] parameter(0)
%s = ((bf16[12,5]), bf16[3,5], u32[]) async-start(%y), calls=%wrapped
ROOT %d = bf16[3,5] async-done(%s)"""
    assert counted(costs(entry, inner)) == {"reduce-scatter": (1, 90, 1)}


def test_what_is_offloaded_to_another_core_is_found_where_it_is_called():
    inner = f"""%offloaded (p: bf16[12,5]) -> bf16[3,5] {{
  %p = bf16[12,5] parameter(0)
  ROOT %r = bf16[3,5] reduce-scatter(%p), {GROUPS}, dimensions={{0}}, to_apply=%add
}}, execution_thread="sparsecore"

%wrapped (q: bf16[12,5]) -> bf16[3,5] {{
  %q = bf16[12,5] parameter(0)
  ROOT %c = bf16[3,5] custom-call(%q), custom_call_target="any", called_computations={{%offloaded}}
}}, execution_thread="sparsecore"
"""
    entry = """%y = bf16[12,5] parameter(0)
%s = ((), (), s32[7]) async-start(), async_execution_thread="sparsecore", calls=%wrapped
%u = ((bf16[12,5]), bf16[3,5], s32[7]) async-update(%s, %y)
ROOT %d = bf16[3,5] async-done(%u)"""
    assert counted(costs(entry, inner)) == {"reduce-scatter": (1, 90, 1)}


def test_stages_of_an_axis_are_told_apart_and_their_bytes_add_up_to_its_own():
    entry = """%x = bf16[3,5] parameter(0)
%g = bf16[6,5] all-gather(%x), replica_groups={{0,1},{2,3}}, dimensions={0}
ROOT %h = bf16[12,5] all-gather(%g), replica_groups={{0,2},{1,3}}, dimensions={0}"""
    text = f"{HEADER}ENTRY %main (x: bf16[3,5]) -> bf16[12,5] {{\n{entry}\n}}\n"
    mesh = hlo_collectives.Mesh({"fsdp": 4}, (), {"fsdp": {"fsdp.x": 2, "fsdp.y": 2}})
    found = hlo_costs.costs(text, mesh)
    assert found.axes == {"fsdp": {"all-gather": hlo_costs.Traffic(2, 90)}}
    assert found.stages == {
        "fsdp": {
            "fsdp.y": {"all-gather": hlo_costs.Traffic(1, 30)},
            "fsdp.x": {"all-gather": hlo_costs.Traffic(1, 60)},
        }
    }
    total = hlo_costs.Costs()
    total.add(found)
    assert total.stages == found.stages


ASYNC = """%start (p: bf16[3,5]) -> (bf16[3,5], bf16[12,5]) {
  %p = bf16[3,5] parameter(0)
  %g1 = bf16[12,5] all-gather(%p), GROUPS, frontend_attributes={chain_id="0"}START
  ROOT %c1 = (bf16[3,5], bf16[12,5]) custom-call(%g1), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.7 (q: bf16[3,5]) -> bf16[12,5] {
  %q = bf16[3,5] parameter(0)
  ROOT %g2 = bf16[12,5] all-gather(%q), GROUPS, frontend_attributes={chain_id="0"}GOES_ON
}

%done (r: bf16[3,5]) -> bf16[12,5] {
  %r = bf16[3,5] parameter(0)
  %g3 = bf16[12,5] all-gather(%r), GROUPS, frontend_attributes={chain_id="0"}GOES_ON
  ROOT %c3 = bf16[12,5] custom-call(%r, %g3), custom_call_target="AsyncCollectiveDone"
}
"""
CHAIN = (
    PARAMETER
    + """%f1 = (bf16[3,5], bf16[12,5]) fusion(%x), kind=kCustom, calls=%start
%f2 = bf16[12,5] fusion(%f1#0), kind=kOutput, calls=%async_collective_fusion.7
ROOT %f3 = bf16[12,5] fusion(%f1#0), kind=kCustom, calls=%done"""
)


@pytest.mark.parametrize("flags", [True, False])
def test_an_asynchronous_collective_fusion_counts_at_its_start_alone(flags):
    config = ', backend_config={{"async_collective_fusion_config":{{"flag_start":"{}","flag_end":"{}"}}}}'
    text = ASYNC.replace("GROUPS", GROUPS)
    text = text.replace("START", config.format(-1, -1) if flags else "").replace(
        "GOES_ON", config.format(2, 15) if flags else ""
    )
    assert counted(costs(CHAIN, text)) == {"all-gather": (1, 90, 1)}


def test_an_all_reduce_of_which_a_slice_is_used_is_a_reduce_scatter():
    fused = f"""%NAME (p: bf16[12,5], i: u32[]) -> bf16[3,5] {{
  %p = bf16[12,5] parameter(0)
  %i = u32[] parameter(1)
  %sum = bf16[12,5] all-reduce(%p), {GROUPS}, to_apply=%add
  %flat = bf16[12,5] bitcast(%sum)
  ROOT %mine = bf16[3,5] dynamic-slice(%flat, %i, %i), dynamic_slice_sizes={{3,5}}
}}
"""
    entry = """%y = bf16[12,5] parameter(0)
%n = u32[] parameter(1)
ROOT %f = bf16[3,5] fusion(%y, %n), kind=kCustom, calls=%NAME"""
    for name in ("all-reduce-scatter.3", "fused_computation.3"):
        found = costs(entry.replace("NAME", name), fused.replace("NAME", name))
        assert counted(found) == {"reduce-scatter": (1, 90, 0)}
    used_whole = fused.replace("NAME", "fused").replace("%flat, %i, %i", "%p, %i, %i")
    assert counted(costs(entry.replace("NAME", "fused"), used_whole)) == {"all-reduce": (1, 180, 0)}


LOOP = f"""%cond (c: (s32[], bf16[3,5])) -> pred[] {{
  %c = (s32[], bf16[3,5]) parameter(0)
  %n = s32[] constant(7)
  ROOT %lt = pred[] compare(%c#0, %n), direction=LT
}}

%body (b: (s32[], bf16[3,5])) -> (s32[], bf16[3,5]) {{
  %b = (s32[], bf16[3,5]) parameter(0)
  %one = s32[] constant(1)
  %next = s32[] add(%b#0, %one), metadata={{op_name="jit(f)/while/body/add"}}, \
backend_config={{"estimated_cycles":"3"}}
  %sum = bf16[3,5] all-reduce(%b#1), {GROUPS}, to_apply=%add
  ROOT %out = (s32[], bf16[3,5]) tuple(%next, %sum)
}}
"""
LOOPED = (
    PARAMETER
    + """%zero = s32[] constant(0)
%init = (s32[], bf16[3,5]) tuple(%zero, %x)
%loop = (s32[], bf16[3,5]) while(%init), condition=%cond, body=%body, metadata={op_name="jit(f)/while"}
ROOT %r = bf16[3,5] copy(%loop#1), metadata={op_name="jit(f)/jvp(mlp)/add"}, \
backend_config={"estimated_cycles":"40"}"""
)


def test_what_is_in_a_loop_counts_as_often_as_it_runs():
    found = costs(LOOPED, LOOP)
    assert counted(found) == {"all-reduce": (7, 7 * 45, 0)}
    assert found.cycles == 7 * 3 + 40
    assert found.scopes == {"(add)": 21, "mlp": 40}
    assert found.notes == []


def test_a_loop_whose_count_is_unknown_counts_once_and_is_noted():
    found = costs(LOOPED, LOOP.replace("constant(7)", "parameter(1)"))
    assert counted(found) == {"all-reduce": (1, 45, 0)}
    assert found.notes == ["loop jit(f)/while: trip count unknown, counted once"]


def test_of_a_conditional_the_dearest_branch_counts():
    branches = f"""%cheap (a: bf16[3,5]) -> bf16[3,5] {{
  ROOT %a = bf16[3,5] parameter(0)
}}

%dear (b: bf16[3,5]) -> bf16[3,5] {{
  %b = bf16[3,5] parameter(0)
  ROOT %sum = bf16[3,5] all-reduce(%b), {GROUPS}, to_apply=%add
}}
"""
    entry = PARAMETER + "%i = s32[] parameter(1)\nROOT %c = bf16[3,5] conditional(%i, %x, %x), BRANCHES"
    for listed in ("branch_computations={%dear, %cheap}", "true_computation=%cheap, false_computation=%dear"):
        found = costs(entry.replace("BRANCHES", listed), branches)
        assert counted(found) == {"all-reduce": (1, 45, 0)}
        assert found.notes == ["conditional c: its dearest branch counts"]


def test_dots_count_by_phase_inside_fusions_too():
    fused = """%fused (p: bf16[2,3,5], q: bf16[2,5,7]) -> bf16[2,3,7] {
  %p = bf16[2,3,5] parameter(0)
  %q = bf16[2,5,7] parameter(1)
  ROOT %d = bf16[2,3,7] dot(%p, %q), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, \
rhs_contracting_dims={1}, metadata={op_name="jit(f)/transpose(jvp())/rematted_computation/dot_general"}
}
"""
    entry = """%p = bf16[2,3,5] parameter(0)
%q = bf16[2,5,7] parameter(1)
%d = bf16[2,3,7] dot(%p, %q), lhs_batch_dims={0}, lhs_contracting_dims={2}, \
metadata={op_name="jit(f)/transpose(jvp())/d"}
%m = bf16[3,7] convolution(%x, %w), dim_labels=bf_io->bf, metadata={op_name="jit(f)/jvp()/dot_general"}
%x = bf16[3,5] parameter(2)
%w = bf16[5,7] parameter(3)
ROOT %f = bf16[2,3,7] fusion(%p, %q), kind=kOutput, calls=%fused"""
    found = costs(entry, fused)
    assert found.dot_flops == {"backward": 420, "forward": 210, "remat": 420}
    assert found.flops == 1050


def convolution(size: int, kernel: int, out: int, window: str) -> float:
    entry = f"""%x = f32[{size},3,5] parameter(0)
%w = f32[{kernel},5,7] parameter(1)
ROOT %c = f32[{out},3,7] convolution(%x, %w), window={{{window}}}, dim_labels=0bf_0io->0bf"""
    return costs(entry).flops


def test_a_batched_dot_as_a_dilated_convolution_counts_as_the_dot():
    assert convolution(4, 4, 4, "size=4 stride=3 pad=0_0 lhs_dilate=4") == 2 * 4 * 3 * 5 * 7


def test_convolutions_count_the_positions_that_exist():
    choices = random.Random(0)
    for _ in range(200):
        size, kernel, stride, dilate, spread = (choices.randint(1, 6) for _ in range(5))
        low, high = choices.randint(-1, 3), choices.randint(0, 3)
        spread_size = (size - 1) * dilate + 1
        out = (spread_size + low + high - (kernel - 1) * spread - 1) // stride + 1
        if out < 1:
            continue
        window = f"size={kernel} stride={stride} pad={low}_{high} lhs_dilate={dilate} rhs_dilate={spread}"
        places = [o * stride + k * spread - low for o, k in itertools.product(range(out), range(kernel))]
        valid = sum(0 <= place < spread_size and place % dilate == 0 for place in places)
        assert convolution(size, kernel, out, window) == 2 * valid * 3 * 5 * 7, window


def test_kernels_are_counted_by_name_with_the_flops_they_claim():
    config = 'backend_config={"custom_call_config":{"cost_estimate":{"bytes_accessed":"5","flops":"100"}}}'
    entry = PARAMETER + "\n".join(
        f'%{name} = bf16[3,5] custom-call(%x), custom_call_target="tpu_custom_call", {config}'
        for name in ("splash_fwd", "splash_fwd.3", "splash_fwd.7.remat", "gmm.1.clone.2")
    )
    kernels = costs(entry).kernels
    assert {name: (k.count, k.claimed_flops) for name, k in kernels.items()} == {
        "splash_fwd": (3, 300),
        "gmm": (1, 100),
    }


def test_copies_between_device_and_host_are_counted_each_way():
    wrapped = """%wrapped (p: bf16[7,3,5], i: s32[]) -> bf16[1,3,5] {
  %p = bf16[7,3,5]{2,1,0:T(8,128)S(5)} parameter(0)
  %i = s32[] parameter(1)
  ROOT %s = bf16[1,3,5]{2,1,0:T(8,128)} dynamic-slice(%p, %i, %i, %i), dynamic_slice_sizes={1,3,5}
}
"""
    entry = """%i = s32[] parameter(0)
%x = bf16[1,3,5]{2,1,0:T(8,128)} parameter(1)
%h = bf16[7,3,5]{2,1,0:T(8,128)S(5)} parameter(2)
%u = ((bf16[7,3,5]{2,1,0:S(5)}, bf16[1,3,5]{2,1,0}, s32[]), bf16[7,3,5]{2,1,0:S(5)}, u32[]) \
dynamic-update-slice-start(%h, %x, %i, %i, %i)
%v = bf16[7,3,5]{2,1,0:S(5)} dynamic-update-slice-done(%u)
%w = ((bf16[7,3,5]{2,1,0:S(5)}, s32[]), bf16[1,3,5]{2,1,0}, u32[]) async-start(%v, %i), calls=%wrapped
%y = bf16[1,3,5]{2,1,0} async-done(%w)
%k = (bf16[1,3,5]{2,1,0:S(5)}, bf16[1,3,5]{2,1,0}, u32[]) copy-start(%y)
%z = bf16[1,3,5]{2,1,0:S(5)} copy-done(%k)
ROOT %o = bf16[1,3,5]{2,1,0:S(1)} copy(%x)"""
    host = costs(entry, wrapped).host
    assert {way: (t.count, t.wire_bytes, t.async_count) for way, t in host.items()} == {
        "to_host": (2, 60, 2),
        "from_host": (1, 30, 1),
    }


@pytest.mark.parametrize(
    ("op_name", "scope", "phase"),
    [
        ("jit(step)/jvp(decoder)/while/body/closed_call/mlp/dot_general", "decoder/mlp", "forward"),
        ("jit(step)/transpose(jvp(decoder/layer_0))/mlp/jit(relu)/max", "decoder/layer_0/mlp", "backward"),
        ("jit(f)/transpose(jvp())/while/body/checkpoint/rematted_computation/attn/dot", "attn", "remat"),
        ("jit(f)/vmap(jvp(a))/cond/branch_1_fun/b/add", "a/b", "forward"),
        ("jit(step)/sub", "", "forward"),
        ("state.params['w']", "", "forward"),
    ],
)
def test_names_give_the_models_scope_and_the_phase(op_name, scope, phase):
    assert (hlo_costs.scope_of(op_name), hlo_costs.phase_of(op_name)) == (scope, phase)
