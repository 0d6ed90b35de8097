"""XLA's buffer assignment read: sizes by kind and memory space, and the largest buffers with their names."""

from xform import hlo
from xform.hlo import buffers

TEXT = """BufferAssignment:
allocation 0: size 512, page 0, thread-local:
 value: <11 sum.10 @0> (size=512,offset=0): f32[]{:T(128)}
allocation 1: size 4000, page 0, parameter 0, shape |bf16[2,5,200]| at ShapeIndex {}, maybe-live-out:
 value: <1 weights @0> (size=4000,offset=0): bf16[2,5,200]{2,1,0:T(8,128)(2,1)}
 value: <2 copy.3{0} @0> (size=4000,offset=0): bf16[2,5,200]{2,1,0:T(8,128)(2,1)}
allocation 2: size 300, page 0, parameter 1, shape |bf16[3,50]| at ShapeIndex {}:
 value: <3 x @0> (size=300,offset=0): bf16[3,50]{1,0}
allocation 3: size 77, page 0, constant:
 value: <4 constant.4 @0> (size=77,offset=0): s8[77]{0}
allocation 4: size 20, page 0, output shape is |(bf16[2,5,200], f32[])|, maybe-live-out:
 value: <5 tuple.5 @0> (size=20,offset=0): (bf16[2,5,200], f32[])
allocation 5: size 9000, page 0, preallocated-temp:
 value: <6 hidden.1 @0> (size=6000,offset=0): bf16[3,1000]{1,0}
 value: <7 hidden.2 @0> (size=6000,offset=0): bf16[3,1000]{1,0}
 value: <8 small @0> (size=3000,offset=6000): bf16[3,500]{1,0}
allocation 6: size 50000, color 5, page 0, preallocated-temp:
 value: <9 offloaded @5> (size=50000,offset=0): bf16[25000]{0:S(5)}
allocation 7: size 800000, color 1, page 0, preallocated-temp:
 value: <10 on_chip @1> (size=800000,offset=0): bf16[400000]{0:S(1)}

Total bytes used: 1
"""


def test_memory_is_summed_by_kind_and_on_chip_memory_is_left_out():
    assert buffers.memory(TEXT) == {
        "argument": 4300,
        "output": 4020,
        "alias": 4000,
        "temp": 9000,
        "host_argument": 0,
        "host_output": 0,
        "host_alias": 0,
        "host_temp": 50000,
    }


def test_the_largest_buffers_stand_once_a_place_and_bear_their_operations_names():
    module = hlo.parse(
        "HloModule m\n\nENTRY %main (w: bf16[3]) -> bf16[3] {\n"
        "  %hidden.1 = bf16[3,1000] parameter(0), metadata={op_name=\"state[\\'h\\']\"}\n}\n"
    )
    found = buffers.largest(TEXT, module, count=3)
    assert [(b.nbytes, b.kind, b.name, b.what) for b in found] == [
        (6000, "temp", "hidden.1", "state['h']"),
        (4000, "argument", "weights", ""),
        (3000, "temp", "small", ""),
    ]
    assert found[0].shape == "bf16[3,1000]"
