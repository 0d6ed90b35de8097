"""A program as a graph: who makes and reads what, what depends on what, and where it is cheapest to cut."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import networkx as nx
import pytest
from hypothesis import given, settings

from tests.programs import W, X, flat
from tests.random_programs import programs
from xform.graph import ancestors, between, cut, descendants, graph, producer, users
from xform.trace import trace_flat, typeof


def traced(f, *args):
    return trace_flat(flat(f), [typeof(jnp.asarray(a)) for a in args], "f")


def block(w, x):
    """dot, tanh, dot, add (of x): a residual block, and a sum of w beside it."""
    return jnp.tanh(x @ w) @ w + x, w.sum()


JAXPR = traced(block, W, X)
FIRST, TANH, SECOND, ADD, SUM = [("eqn", i) for i in range(5)]
INW, INX = ("input", 0), ("input", 1)


def test_nodes_stand_in_program_order_and_edges_are_variables():
    read = graph(JAXPR)
    assert list(read) == [INW, INX, FIRST, TANH, SECOND, ADD, SUM, ("output", 0), ("output", 1)]
    assert nx.is_directed_acyclic_graph(read)
    assert [read.edges[e]["var"].aval.shape for e in read.in_edges(SECOND, keys=True)] == [(3, 5), (5, 5)]


def test_a_variable_has_a_producer_and_users():
    read, (w, x) = graph(JAXPR), JAXPR.invars
    assert producer(read, w) == INW and users(read, w) == [FIRST, SECOND, SUM]
    assert producer(read, JAXPR.eqns[1].outvars[0]) == TANH
    assert users(read, JAXPR.outvars[0]) == [("output", 0)]
    assert users(read, x) == [FIRST, ADD]


def test_a_variable_read_twice_by_one_equation_has_one_user():
    jaxpr = traced(lambda x: x * x, X)
    read = graph(jaxpr)
    assert users(read, jaxpr.invars[0]) == [("eqn", 0)]
    assert read.number_of_edges(("input", 0), ("eqn", 0)) == 2


def test_what_depends_on_what():
    read = graph(JAXPR)
    assert ancestors(read, [TANH]) == {TANH, FIRST, INW, INX}
    assert descendants(read, [TANH]) == {TANH, SECOND, ADD, ("output", 0)}
    assert between(read, [INX], [SECOND]) == {INX, FIRST, TANH, SECOND}


def test_literals_and_dropped_results_are_no_nodes():
    jaxpr = traced(lambda x: (jax.lax.top_k(x, 2)[0] * 2.0, 3.0), X)
    read = graph(jaxpr)
    assert [n for n in read if n[0] != "eqn"] == [("input", 0), ("output", 0), ("output", 1)]
    assert read.in_degree(("output", 1)) == 0


def test_a_constant_is_a_node():
    read = graph(traced(lambda x: x + jnp.asarray(X), X))
    assert next(iter(read)) == ("const", 0) and list(read.successors(("const", 0))) == [("eqn", 0)]


def test_the_cheapest_cut_goes_through_the_narrowest_variable():
    def narrow(x):
        return jnp.tanh(jnp.sin(x.astype(jnp.bfloat16)).astype(jnp.float32))

    jaxpr = traced(narrow, X)
    total, variables = cut(graph(jaxpr), [("input", 0)], [("output", 0)])
    assert total == 3 * 5 * 2 and [v.aval.dtype for v in variables] == [jnp.bfloat16]


def test_a_variable_that_several_read_is_paid_for_once():
    jaxpr = traced(lambda x: sum(f(jnp.cos(x)) for f in (jnp.sin, jnp.tanh, jnp.exp)), X)
    total, variables = cut(graph(jaxpr), [("input", 0)], [("eqn", 1), ("eqn", 2), ("eqn", 3)], lambda v: 1)
    assert total == 1 and len(variables) == 1


def test_a_cut_avoids_what_is_forbidden_and_says_when_there_is_none():
    read, (_, x) = graph(JAXPR), JAXPR.invars
    total, variables = cut(read, [INX], [("output", 0)], lambda v: math.inf if v is x else 1)
    assert total == 1 and variables == [JAXPR.outvars[0]]
    with pytest.raises(ValueError, match="no cut"):
        cut(read, [INX], [("output", 0)], lambda v: math.inf)


@settings(max_examples=15)
@given(programs())
def test_a_cut_separates_and_costs_what_it_says(program):
    f, args = program
    jaxpr = traced(f, *args)
    read = graph(jaxpr)
    sources = [n for n in read if n[0] in ("const", "input")]
    targets = [n for n in read if n[0] == "output"]
    total, variables = cut(read, sources, targets, lambda v: 1)
    assert total == len(variables)
    open_ways = nx.MultiDiGraph()
    open_ways.add_nodes_from(read)
    open_ways.add_edges_from((a, b) for a, b, v in read.edges(data="var") if v not in set(variables))
    assert not descendants(open_ways, sources) & set(targets)
