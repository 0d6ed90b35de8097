"""HLO text read into instructions: types, operands, attributes, and both spellings of a tuple's element."""

import pytest

from xform import hlo

TEXT = """HloModule jit_f, is_scheduled=true, num_partitions=4, frontend_attributes={a="b"}

FileNames
1 "f.py"

%fused (p.0: f32[3,5], p.1: s32[]) -> f32[3,5] {
  %p.1 = s32[]{:T(128)S(6)} parameter(1)
  %p.0 = f32[3,5]{1,0:T(8,128)} parameter(0)
  ROOT %add.1 = f32[3,5]{1,0:T(8,128)S(1)} add(%p.0, %p.0), \
metadata={op_name="jit(f)/a \\"b\\"/add" stack_frame_id=1}
}

ENTRY %main (x: f32[3,5]) -> (f32[3,5], f32[]) {
  %x = f32[3,5]{1,0:T(8,128)} parameter(0), metadata={op_name="x"}
  %table = f32[2,3]{1,0} constant({
    { 1, 2, 3 },
    { 4, 5, 6 }
  })
  %one = s32[]{:T(128)} constant(1)
  %both = ((f32[3,5]{1,0}, bf16[7]{0:T(256)S(5)}), /*index=1*/s4[9]{0}) custom-call(%x), \
custom_call_target="Both(x)"
  %fusion.2 = f32[3,5]{1,0:T(8,128)S(1)} fusion(%both#0.0, /*index=1*/%one), kind=kLoop, calls=%fused, \
metadata={op_name="jit(f)/mlp/add"}, backend_config={"window_config":{"estimated_cycles":"17"},"calls":"%not"}
  ROOT %tuple.1 = (f32[3,5]{1,0:T(8,128)S(1)}, s32[]) tuple(%fusion.2, %one)
}
"""


def entry() -> hlo.Computation:
    return hlo.parse(TEXT).entry


def test_a_module_has_its_computations_roots_and_devices():
    module = hlo.parse(TEXT)
    assert (module.name, module.devices) == ("jit_f", 4)
    assert list(module.computations) == ["fused", "main"]
    assert [module.computations[name].root for name in ("fused", "main")] == ["add.1", "tuple.1"]
    assert module.entry is module.computations["main"]


def test_an_instruction_has_opcode_operands_type_and_attributes():
    fusion = entry().instructions["fusion.2"]
    assert (fusion.opcode, fusion.operands) == ("fusion", ("both#0.0", "one"))
    assert fusion.type == "f32[3,5]{1,0:T(8,128)S(1)}"
    assert (fusion.called, fusion.attribute("kind"), fusion.attribute("absent")) == ("fused", "kLoop", None)
    assert (fusion.op_name, fusion.cycles) == ("jit(f)/mlp/add", 17)


def test_a_constant_over_several_lines_is_one_instruction():
    assert list(entry().instructions) == ["x", "table", "one", "both", "fusion.2", "tuple.1"]
    assert entry().instructions["table"].inside == "{ { 1, 2, 3 }, { 4, 5, 6 } }"


def test_what_a_kernel_says_of_itself_may_go_over_several_lines() -> None:
    said = """  %kernel.1 = f32[3,5]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", \\
frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 512}"
}}, metadata={op_name="jit(f)/attention"}
""".replace("\\\n", "")
    main = hlo.parse(TEXT.replace("  %one = ", said + "  %one = ")).entry
    kernel = main.instructions["kernel.1"]
    assert (kernel.target, kernel.op_name) == ("tpu_custom_call", "jit(f)/attention")
    assert {"one", "fusion.2", "tuple.1"} <= set(main.instructions)


def test_quotes_in_names_are_kept_and_brackets_in_targets_do_no_harm():
    inner = hlo.parse(TEXT).computations["fused"].instructions["add.1"]
    assert inner.op_name == 'jit(f)/a \\"b\\"/add'
    assert entry().instructions["both"].target == "Both(x)"


def test_types_have_sizes_and_memory_spaces():
    assert hlo.arrays("f32[3,5]{1,0:T(8,128)}")[0].nbytes == 60
    assert [a.nbytes for a in hlo.arrays("(s4[9]{0}, pred[7], f8e4m3fn[3,3], bf16[], u32[<=5])")] == [
        5,
        7,
        9,
        2,
        20,
    ]
    host, device = hlo.arrays("(bf16[3]{0:T(256)S(5)}, bf16[3]{0:T(256)})")
    assert (host.space, device.space) == (hlo.HOST_SPACE, 0)


def test_the_type_of_a_tuples_element_is_found_at_any_depth():
    assert entry().type_of("both#0.1") == "bf16[7]{0:T(256)S(5)}"
    assert entry().type_of("both#1") == "s4[9]{0}"


def test_what_is_no_module_is_an_error():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        hlo.parse("module @jit_f {\n}\n")
