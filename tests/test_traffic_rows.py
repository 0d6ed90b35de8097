"""The traffic benchmark: which aims a row misses, and what the report says of the bytes a program sends."""

import pytest

from tests.benchmarks.in_use import Compiled
from tests.benchmarks.rows_maxtext import ROWS, parser, wire_over
from tests.benchmarks.traffic import SHOWN, missed, sharded
from xform.hlo.costs import Costs, Traffic
from xform.plan import Plan
from xform.report import Report
from xform.report import Traffic as Written


def compiled(**gigabytes: float) -> Compiled:
    """A step that sends so many GB over these axes of the mesh, `_` for `+`."""
    axes = {
        over.replace("_", "+"): {"all-gather": Traffic(1, amount * 1e9)} for over, amount in gigabytes.items()
    }
    total = Traffic(len(axes), sum(gigabytes.values()) * 1e9)
    return Compiled({"temp": 0}, Costs({"all-gather": total}, axes), [], 0.0, 0.0)


def test_a_row_that_sends_what_it_must_misses_nothing() -> None:
    assert missed("A1", compiled(fsdp=37.7), 37.66e9, 3.0e9, 0.0) == []


@pytest.mark.parametrize(
    "name, wire, bare, cycles, says",
    [
        ("A1", 38.5, 3.0, 0, "wire/bound 1.022 > 1.02"),
        ("A1", 37.7, 3.8, 0, "temp 1.027 > 1.0"),
        ("A1", 37.7, 3.0, 1650, "cycles 1.067 > 1.0"),
        ("B1", 26.0, 3.0, 0, "wire 0.874 > 0.86"),  # less than MaxText, and not enough
        ("B2", 29.0, 3.0, 0, "wire 1.031 > 1.0"),
    ],
)
def test_an_aim_that_is_missed_is_named(
    name: str, wire: float, bare: float, cycles: float, says: str
) -> None:
    assert missed(name, compiled(fsdp=wire), 37.66e9, bare * 1e9, cycles) == [says]


def test_activations_are_what_goes_over_other_axes() -> None:
    found = compiled(fsdp=3, data=5, data_fsdp=7, tensor=11, fsdp_tensor=13)
    assert wire_over(found, ["data", "fsdp"]) == 15e9 and found.wire == 39e9


@pytest.mark.parametrize("uses", [["narrow"], ["shard"], ["narrow", "shard:sequence_parallel=true"]])
def test_collectives_are_an_option_of_the_one_shard(uses: list[str]) -> None:
    plan = Plan.from_flags("fsdp=4", sharded(uses, "explicit"))
    (shard,) = [each for each in plan.passes if type(each).__name__ == "Shard"]
    assert shard.collectives == "explicit"
    assert shard.sequence_parallel == any("parallel" in use for use in uses)


def test_rows_without_a_mesh_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(ROWS) - set(SHOWN) == {"H1", "H2"}
    assert parser("traffic", SHOWN).parse_args([]).rows == []
    with pytest.raises(SystemExit):
        parser("traffic", SHOWN).parse_args(["H1"])
    assert "there is no row H1; the rows are A1" in capsys.readouterr().err


def test_the_report_has_the_traffic_as_lines_and_as_data() -> None:
    axes = {
        "fsdp": {"fsdp.y": 3e9, "fsdp.x": 12e9, "fsdp.x+fsdp.y": 2e6},
        "tensor+fsdp": {"tensor+fsdp": 45.0},
    }
    written, report = (
        Written(15e9, 14e9, 13e9, 1e9, axes, ("fsdp",), [("1.00 GB", "activations", "")]),
        Report(),
    )
    written.tell(report)
    assert report.traffic is written
    total, along, reason = report.lines()
    assert "15.00 GB a device and step" in total and "the plan's bound 13.00 GB, 1.08 of it" in total
    assert along == "shard: along fsdp: 15.00 GB: fsdp.y 3.00 GB, fsdp.x 12.00 GB"  # the rest is too small
    assert reason == "shard: 1.00 GB: activations"
