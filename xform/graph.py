"""A jaxpr read as a graph: for matching, for what depends on what, and for cuts.

The nodes are its constants, inputs, equations and outputs, as ("const", 0), ("input", 0), ("eqn", 0),
("output", 0), and an edge is a variable that one makes and another reads; its attribute `var` says which.
Bodies are programs of their own, with graphs of their own. The graph is for reading: a program is rewritten
by `rewrite` and `splice`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import networkx as nx

from xform.trace import DropVar, Jaxpr, Var

type Node = tuple[str, int]
type Graph = nx.MultiDiGraph


def graph(jaxpr: Jaxpr) -> Graph:
    """The graph of a program: nodes in program order, one edge for each use of a variable. Literals are no
    nodes.
    """
    made: dict[Var, Node] = {}
    read = nx.MultiDiGraph()

    def add(node: Node, reads: Sequence[object], makes: Sequence[Var]) -> None:
        read.add_node(node)
        for v in reads:
            if isinstance(v, Var):
                read.add_edge(made[v], node, var=v)
        made.update((v, node) for v in makes if not isinstance(v, DropVar))

    for i, v in enumerate(jaxpr.constvars):
        add(("const", i), (), [v])
    for i, v in enumerate(jaxpr.invars):
        add(("input", i), (), [v])
    for i, eqn in enumerate(jaxpr.eqns):
        add(("eqn", i), eqn.invars, eqn.outvars)
    for i, atom in enumerate(jaxpr.outvars):
        add(("output", i), [atom], ())
    read.graph["made"] = made
    return read


def producer(read: Graph, var: Var) -> Node:
    """The node that makes a variable."""
    node: Node = read.graph["made"][var]
    return node


def users(read: Graph, var: Var) -> list[Node]:
    """The nodes that read a variable, in program order, each once."""
    edges = read.out_edges(producer(read, var), data="var")
    return list(dict.fromkeys(node for _, node, v in edges if v is var))


def ancestors(read: Graph, nodes: Iterable[Node]) -> set[Node]:
    """Everything that the nodes depend on, themselves among it."""
    return _closure(nodes, read.predecessors)


def descendants(read: Graph, nodes: Iterable[Node]) -> set[Node]:
    """Everything that depends on the nodes, themselves among it."""
    return _closure(nodes, read.successors)


def between(read: Graph, sources: Iterable[Node], targets: Iterable[Node]) -> set[Node]:
    """The nodes on the ways from any source to any target, these among them."""
    return descendants(read, sources) & ancestors(read, targets)


def cut(
    read: Graph, sources: Iterable[Node], targets: Iterable[Node], cost: Callable[[Var], float] | None = None
) -> tuple[float, list[Var]]:
    """The cheapest variables that all dataflow from sources to targets goes through, and what they cost
    together.

    The cost of a variable, by default its size in bytes, counts once however many read it; math.inf forbids
    it. Source: Ford and Fulkerson's theorem, each variable split into two nodes. Raises ValueError when every
    cut is forbidden.
    """
    price = cost if cost is not None else _bytes
    flow = nx.DiGraph()
    flow.add_nodes_from(("source", "target"))
    for node, user, var in read.edges(data="var"):
        flow.add_edge(node, (var, "made"))  # an edge without a capacity cannot be cut
        flow.add_edge((var, "read"), user)
        if not flow.has_edge((var, "made"), (var, "read")):
            capacity = price(var)
            limit = {} if math.isinf(capacity) else {"capacity": capacity}
            flow.add_edge((var, "made"), (var, "read"), **limit)
    flow.add_edges_from(("source", node) for node in sources)
    flow.add_edges_from((node, "target") for node in targets)
    try:
        total, (reached, beyond) = nx.minimum_cut(flow, "source", "target")
    except nx.NetworkXUnbounded:
        raise ValueError("no cut: a source is a target, or every way between them is forbidden") from None
    crossing = [v for v in read.graph["made"] if (v, "made") in reached and (v, "read") in beyond]
    return total, crossing


def _bytes(var: Var) -> float:
    aval: Any = var.aval
    return math.prod(aval.shape) * aval.dtype.itemsize


def _closure(nodes: Iterable[Node], step: Callable[[Node], Iterable[Node]]) -> set[Node]:
    found = set(nodes)
    todo = list(found)
    while todo:
        for node in step(todo.pop()):
            if node not in found:
                found.add(node)
                todo.append(node)
    return found
