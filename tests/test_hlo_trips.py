"""Trip counts of loops whose numbers come through tuples, copies, fusions and other loops."""

from xform import hlo
from xform.hlo import trips as hlo_trips

COND = """%cond (c: (s32[], f32[3], s32[])) -> pred[] {
  %c = (s32[], f32[3], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %n = s32[] constant(7)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}
"""
BODY = """%body (b: (s32[], f32[3], s32[])) -> (s32[], f32[3], s32[]) {
  %b = (s32[], f32[3], s32[]) parameter(0)
  %j = s32[] get-tuple-element(%b), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%j, %one)
  ROOT %out = (s32[], f32[3], s32[]) tuple(%next, %b#1, %b#2)
}
"""
ENTRY = """ENTRY %main (x: f32[3], m: s32[]) -> (s32[], f32[3], s32[]) {
  %x = f32[3] parameter(0)
  %m = s32[] parameter(1)
  %zero = s32[] constant(0)
  %limit = s32[] constant(11)
  %start = (s32[], f32[3], s32[]) tuple(%zero, %x, %limit)
  ROOT %loop = (s32[], f32[3], s32[]) while(%start), condition=%cond, body=%body
}
"""


def trips(cond: str = COND, body: str = BODY, entry: str = ENTRY, more: str = "") -> hlo_trips.Trips:
    module = hlo.parse(f"HloModule m\n\n{more}{cond}\n{body}\n{entry}")
    return hlo_trips.trips(module, module.entry, module.entry.instructions["loop"], lambda number, path: None)


def test_the_count_is_the_conditions_constant():
    assert trips() == hlo_trips.Trips(7)


def test_what_xla_noted_comes_first():
    noted = ENTRY.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"5"}}')
    assert trips(entry=noted) == hlo_trips.Trips(5)


def test_the_limit_may_be_carried():
    carried = COND.replace("constant(7)", "get-tuple-element(%c), index=2")
    assert trips(carried) == hlo_trips.Trips(11)


def test_copies_and_the_dumps_spelling_of_elements_are_followed():
    copied = ENTRY.replace("tuple(%zero,", "tuple(%copied,").replace(
        "%start =", "%copies = (s32[], s32[], u32[]) copy-start(%two)\n  %two = s32[] constant(2)\n"
        "  %copied = s32[] copy-done(%copies)\n  %start ="
    )  # fmt: skip
    assert trips(COND.replace("compare(%i,", "compare(%c#0,"), entry=copied) == hlo_trips.Trips(5)


def test_a_comparison_inside_a_fusion_is_followed():
    fused = """%fused (p: s32[], q: s32[]) -> pred[] {
  %q = s32[] parameter(1)
  %p = s32[] parameter(0)
  ROOT %cmp = pred[] compare(%q, %p), direction=GT
}
"""
    cond = COND.replace("compare(%i, %n), direction=LT", "fusion(%i, %n), kind=kLoop, calls=%fused")
    assert trips(cond, more=fused) == hlo_trips.Trips(7)


def test_steps_of_two_offsets_and_downward_counts_are_reckoned():
    assert trips(body=BODY.replace("constant(1)", "constant(2)")) == hlo_trips.Trips(4)
    ahead = COND.replace(
        "ROOT %lt = pred[] compare(%i,", "%k = s32[] add(%i, %n)\n  ROOT %lt = pred[] compare(%k,"
    )
    assert trips(ahead) == hlo_trips.Trips(0)
    down = ENTRY.replace("%zero = s32[] constant(0)", "%zero = s32[] constant(12)")
    falling = BODY.replace("add(%j", "subtract(%j")
    assert trips(COND.replace("=LT", "=GE"), falling, down) == hlo_trips.Trips(6)
    assert trips(COND.replace("=LT", "=NE"), falling, down) == hlo_trips.Trips(5)


def test_of_two_conditions_the_one_that_counts_is_taken():
    both = COND.replace(
        "ROOT %lt = pred[] compare(%i, %n), direction=LT",
        "%lt = pred[] compare(%i, %n), direction=LT\n  %go = pred[] convert(%c#1)\n"
        "  ROOT %and = pred[] and(%lt, %go)",
    )
    assert trips(both) == hlo_trips.Trips(7)


def test_a_start_that_is_an_argument_is_taken_as_zero_with_a_doubt():
    found = trips(entry=ENTRY.replace("tuple(%zero,", "tuple(%m,"))
    assert found.count == 7
    assert "taken as 0" in found.doubt


def test_a_limit_that_changes_or_is_an_argument_is_unknown():
    carried = COND.replace("constant(7)", "get-tuple-element(%c), index=2")
    argument = ENTRY.replace("%x, %limit)", "%x, %m)")
    changing = BODY.replace("%b#1, %b#2)", "%b#1, %next)")
    for found in (trips(carried, entry=argument), trips(carried, changing)):
        assert found == hlo_trips.Trips(1, "trip count unknown, counted once")


def test_a_limit_is_followed_out_of_an_enclosing_loop():
    cond = COND.replace("constant(7)", "get-tuple-element(%c), index=2")
    outer = """%outer (o: (s32[], f32[3], s32[])) -> (s32[], f32[3], s32[]) {
  %o = (s32[], f32[3], s32[]) parameter(0)
  %zero = s32[] constant(0)
  %init = (s32[], f32[3], s32[]) tuple(%zero, %o#1, %o#2)
  %inner = (s32[], f32[3], s32[]) while(%init), condition=%cond, body=%body
  %one = s32[] constant(1)
  %next = s32[] add(%o#0, %one)
  ROOT %out = (s32[], f32[3], s32[]) tuple(%next, %inner#1, %o#2)
}
"""
    module = hlo.parse(
        f"HloModule m\n\n{cond}\n{BODY}\n{outer}\n" + ENTRY.replace("body=%body", "body=%outer")
    )
    loop = module.entry.instructions["loop"]
    inside = hlo_trips.enter(module, module.entry, loop, lambda number, path: None)
    inner = module.computations["outer"]
    assert hlo_trips.trips(module, inner, inner.instructions["inner"], inside) == hlo_trips.Trips(11)
