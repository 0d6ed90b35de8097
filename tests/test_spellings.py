"""Every spelling of an operation is recognised as what it is, and every look-alike is left alone."""

import importlib
import importlib.util
import re

import jax
import pytest

from tests.spellings import LookAlike, Spelling
from xform import raised

OPS = {
    "attention": "attention",
    "norms": "norm",
    "losses": "cross_entropy",
    "experts": "experts",
    "recurrences": "linear_recurrence",
}
"""What the spellings of each module are of."""

LEAST = {"attention": 60, "norms": 10, "losses": 15, "experts": 15, "recurrences": 15}
"""How many spellings, and how many look-alikes, there have to be."""

BENCH = {
    name: importlib.import_module(f"tests.spellings.{name}")
    for name in OPS
    if importlib.util.find_spec(f"tests.spellings.{name}") is not None
}


def _cases(table):
    return [
        pytest.param(OPS[name], case, id=f"{name}-{each}")
        for name, module in BENCH.items()
        for each, case in getattr(module, table).items()
    ]


def _agrees(entry, key, value):
    found = entry[key]
    if key == "axes":
        return all(found.get(axis, 1) == size for axis, size in value.items())
    return found == (pytest.approx(value, rel=1e-4) if isinstance(value, float) else value)


@pytest.mark.parametrize(("op", "spelling"), _cases("SPELLINGS"))
def test_a_spelling_is_recognised(op: str, spelling: Spelling):
    found = raised(spelling.fn, *spelling.args)
    entries = [e for e in found["raised"] if e["op"] == op]
    assert len(entries) == spelling.count, (entries, found["declined"])
    assert {e["op"] for e in found["raised"]} <= {op, "norm", "layers"}, "it is taken for another one too"
    for key, value in spelling.expect.items():
        if isinstance(value, list):
            assert sorted(e[key] for e in entries) == sorted(value)
        else:
            assert all(_agrees(e, key, value) for e in entries), (key, value, entries)


@pytest.mark.parametrize(("op", "case"), _cases("LOOKALIKES"))
def test_a_look_alike_is_left_alone_with_a_reason_where_it_is_near(op: str, case: LookAlike):
    found = raised(case.fn, *case.args)
    assert not [e for e in found["raised"] if e["op"] == op]
    reasons = [d["why"] for d in found["declined"]]
    assert not case.why or any(re.search(case.why, reason) for reason in reasons), reasons


@pytest.mark.parametrize("name", BENCH)
def test_there_are_as_many_spellings_and_look_alikes_as_there_have_to_be(name: str):
    assert len(BENCH[name].SPELLINGS) >= LEAST[name]
    assert len(BENCH[name].LOOKALIKES) >= LEAST[name]


@pytest.mark.parametrize("name", BENCH)
def test_no_two_programs_are_the_same(name: str):
    programs: dict[str, str] = {}
    for each, case in (BENCH[name].SPELLINGS | BENCH[name].LOOKALIKES).items():
        text = str(jax.make_jaxpr(case.fn)(*case.args))
        assert text not in programs, (each, programs[text])
        programs[text] = each
