"""The report is the log: notes in order, counted, as lines."""

from __future__ import annotations

from xform.report import Note, Report, duration


def test_the_same_note_stands_once_with_its_count():
    report = Report()
    for _ in range(3):
        report.declined("kernels", "softmax", "no mask", "model.py:3 (attend)")
    report.declined("kernels", "softmax", "no mask", "model.py:4 (attend)")
    assert len(report) == 2
    assert [count for _, count in report] == [3, 1]
    assert report.lines()[0] == "kernels: declined softmax: no mask (model.py:3 (attend)) [x3]"


def test_notes_keep_their_order_and_are_found_by_kind():
    report = Report()
    report.did("shard", "4 parameters")
    report.dropped("shard", "axis tensor of mlp", "7 is not divisible by 4")
    report.promised("remat", "offload", "to the host")
    report.did("shard", "2 activations")
    assert report.of("did") == [Note("did", "shard", "4 parameters"), Note("did", "shard", "2 activations")]
    assert str(report).splitlines() == [
        "shard: 4 parameters",
        "shard: dropped axis tensor of mlp: 7 is not divisible by 4",
        "remat: promised offload: to the host",
        "shard: 2 activations",
    ]


def test_an_empty_report_is_an_empty_text():
    assert str(Report()) == "" and not Report()


def test_times_are_written_as_a_person_reads_them() -> None:
    assert [duration(x) for x in (1.624, 0.0032, 4.5e-5)] == ["1.62 s", "3.20 ms", "45.0 us"]
