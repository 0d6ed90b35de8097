"""What the memory benchmark reads from the compiler's dumps: what is in use when, and what is scores."""

import dataclasses

import pytest

from tests.benchmarks.in_use import Temporary, peak, temporaries
from tests.benchmarks.memory import is_scores
from xform import hlo

ASSIGNMENT = """BufferAssignment:
allocation 0: size 700, page 0, parameter 0, shape |f32[175]|, maybe-live-out:
 value: <1 weights @0> (size=700,offset=0): f32[175]{0}
allocation 1: size 900, page 0, preallocated-temp:
 value: <2 scores @0> (size=500,offset=0): bf16[2,5,25]{2,1,0:T(8,128)(2,1)}
 value: <3 pair{} @0> (size=8,offset=892): (f32[75], f32[25])
 value: <4 pair{0} @0> (size=300,offset=500): f32[75]{0}
 value: <5 loop{1} (phi) @0> (size=300,offset=500): f32[75]{0}
 value: <6 late @0> (size=700,offset=0): f32[175]{0}
allocation 2: size 4000, color 1, page 0, preallocated-temp:
 value: <7 on_chip @1> (size=4000,offset=0): f32[1000]{0:S(1)}

Total bytes used: 1
"""

RANGES = """HloLiveRange (max 40):
  InstructionSequence:
    0:weights
  BufferLiveRange:
    weights{}:0-40
    scores{}:3-9
    pair{}:2-3
    pair{0}:2-5
    loop{1}:5-9
    late{}:10-12
    on_chip{}:0-40
"""


def test_temporaries_are_read_with_their_places_and_times():
    module = hlo.parse(
        "HloModule m\n\nENTRY %main (w: bf16[3]) -> bf16[3] {\n"
        '  %scores = bf16[2,5,25] parameter(0), metadata={op_name="attention/dot"}\n}\n'
    )
    found = temporaries(ASSIGNMENT, RANGES, module)
    assert [(t.what, t.offset, t.nbytes, t.first, t.last) for t in found] == [
        ("attention/dot", 0, 500, 3, 9),
        ("pair", 892, 8, 2, 3),
        ("pair", 500, 300, 2, 5),
        ("loop", 500, 300, 5, 9),
        ("late", 0, 700, 10, 12),
    ]
    assert found[0].shape == "bf16[2,5,25]"


def test_the_peak_counts_bytes_that_two_values_lie_in_once():
    found = peak(temporaries(ASSIGNMENT, RANGES))
    assert found.nbytes == 808  # the scores, the tuple, and a pair's part that the loop carries on
    assert [t.what for t in found.temporaries] == ["scores", "pair", "pair"]


def test_without_some_buffers_the_fullest_time_is_another_one():
    found = peak(temporaries(ASSIGNMENT, RANGES), lambda t: t.what != "scores")
    assert (found.nbytes, [t.what for t in found.temporaries]) == (700, ["late"])


def test_values_of_two_arenas_do_not_overlap():
    value = Temporary(1, 0, 100, 0, 9, "f32[25]", "a")
    both = [value, dataclasses.replace(value, arena=2, what="b")]
    assert peak(both).nbytes == 200


@pytest.mark.parametrize("shape", ["bf16[32,2048,2048]", "f32[4,2048,2048,8]", "pred[2048,2048]"])
def test_scores_have_two_dimensions_of_the_texts_length(shape):
    assert is_scores(Temporary(1, 0, 1, 0, 1, shape, ""))


@pytest.mark.parametrize(
    "shape",
    ["bf16[1,2048,4096]", "f32[2048]", "f32[12048,2048]", "f32[2048,20480]", "(f32[2048], f32[2048])"],
)
def test_other_buffers_are_not_taken_for_scores(shape):
    assert not is_scores(Temporary(1, 0, 1, 0, 1, shape, ""))
