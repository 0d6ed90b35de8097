"""Rules to PartitionSpecs, on names given by hand."""

import jax
import pytest
from jax.sharding import PartitionSpec as P

from xform import PlanError
from xform.plans.rules import base_rules
from xform.report import Report
from xform.roles.logical import Named
from xform.sharding.layout import Layout, alternatives, entry_axes, spec_axes
from xform.topologies import make_mesh

OPEN = P.UNCONSTRAINED


def layout(rules, sizes=None, given=None):
    mesh = make_mesh(jax.devices(), sizes or {"a": 2, "b": 4})
    return Layout(mesh, {n: alternatives(n, v) for n, v in rules.items()}, given or {}, Report())


def dims(*pairs):
    return [Named(name, name or "x", size) for name, size in pairs]


def test_the_first_rule_whose_axes_are_free_wins_in_the_order_of_the_table():
    rules = layout({"x": ["a"], "y": [["a"], ["b"]]})
    assert rules.spec(dims(("x", 6), ("y", 8)), "")[0] == P("a", "b")
    assert rules.spec(dims(("y", 8), ("x", 6)), "")[0] == P("b", "a")
    assert rules.spec(dims(("y", 8)), "")[0] == P("a")


def test_a_name_whose_axes_are_taken_says_so():
    rules = layout({"x": ["a"], "y": ["a", "b"]})
    assert rules.spec(dims(("y", 8), ("x", 6)), "") == (P(None, "a"), "y whole (a taken), x -> a")


def test_maxtexts_second_rule_for_embed_is_for_where_mlp_has_fsdp_transpose():
    rules = layout(base_rules(), {"fsdp": 4, "fsdp_transpose": 2})
    assert rules.spec(dims(("embed", 24), ("mlp", 40)), "")[0] == P("fsdp", "fsdp_transpose")
    assert rules.spec(dims(("mlp", 40), ("embed", 24)), "")[0] == P("fsdp_transpose", "fsdp")


def test_a_place_is_looked_up_only_when_something_was_dropped():
    rules = layout({"x": ["b"]})
    rules.spec(dims(("x", 8)), lambda: 1 / 0)
    for line in ("one", "two"):
        rules.spec(dims(("x", 6)), lambda line=line: line)
    assert [n.where for n in rules.report.of("dropped")] == ["one", "two"]


def test_an_axis_the_mesh_lacks_or_has_at_size_one_counts_as_absent():
    rules = layout({"x": ["missing", "one", "a"], "y": ["missing"]}, {"one": 1, "a": 8})
    assert rules.spec(dims(("x", 8), ("y", 8)), "")[0] == P("a")


def test_axes_that_do_not_divide_are_dropped_one_by_one():
    rules = layout({"x": ["b", "a"]})
    spec, why = rules.spec(dims(("x", 12)), "w")
    assert spec == P("b")
    assert why == "x -> b (12 does not divide by a=2)"
    assert [str(n) for n in rules.report.of("dropped")] == [
        "shard: dropped a=2 for x: 12 does not divide (w)"
    ]


def test_only_partial_layouts_leave_a_dimension_open():
    rules = layout({"x": ["a"], "y": ["b"]})
    untold = dims((None, 5), ("x", 3), (None, 1), ("y", 4))
    assert rules.spec(untold, "", partial=True)[0] == P(OPEN, OPEN, None, "b")
    assert rules.spec(untold, "")[0] == P(None, None, None, "b")


def test_spread_takes_the_same_role_whatever_the_order_of_dimensions():
    rules = layout({})
    one, other = dims(("mlp", 8), ("embed", 4)), dims(("embed", 4), ("mlp", 8))
    assert rules.spread(P(), one, (8, 4), ["b"], "")[0] == P(None, "b")
    assert rules.spread(P(), other, (4, 8), ["b"], "")[0] == P("b")


def test_spread_joins_axes_and_avoids_layers_and_tensor_axes():
    rules = layout({}, {"fsdp": 2, "tensor": 2, "data": 2})
    stacked = [Named("layers", "layers", 4), Named("mlp", "mlp", 8), Named("kv", "kv", 8)]
    assert rules.spread(P(None, "tensor"), stacked, (4, 8, 8), ["data"], "")[0] == P(None, "tensor", "data")
    assert rules.spread(P(None, "fsdp"), stacked[:2], (4, 8), ["data"], "")[0] == P(None, ("fsdp", "data"))


def test_spread_says_when_nothing_divides():
    rules = layout({})
    spec, why = rules.spread(P(), dims(("x", 3)), (3,), ["b"], "here")
    assert (spec, why) == (P(), "")
    assert "no dimension of (3,) divides by 4 (here)" in str(rules.report.of("dropped")[0])


def test_alternatives_reads_an_axis_a_list_and_a_list_of_lists():
    assert alternatives("x", "a") == [("a",)]
    assert alternatives("x", ["a", "b"]) == [("a", "b")]
    assert alternatives("x", [["a", "b"], ["b"]]) == [("a", "b"), ("b",)]
    assert alternatives("x", []) == []
    with pytest.raises(PlanError, match="'x' mixes axes with lists"):
        alternatives("x", ["a", ["b"]])


def test_axes_of_specs():
    assert entry_axes(OPEN) == () and entry_axes(("a", "b")) == ("a", "b")
    assert spec_axes(P("a", None, ("b", "c"))) == ("a", "b", "c")
