"""How a function becomes a program: it is traced, passes rewrite it before and after autodiff, its state is
stacked.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import networkx as nx
from jax.sharding import Mesh

from xform.context import Context, Leaf
from xform.errors import PlanError, RewriteError
from xform.memory import Trial
from xform.ordering import stored_by_stage
from xform.plan import Pass, Plan
from xform.program import LAST, Program, Stage, input_leaves, moved_names, next_state, stacked_leaves
from xform.quantization.given import given
from xform.quantization.weights import Storable
from xform.registry import find
from xform.report import Report
from xform.sharding.memory import type_text
from xform.state import Groups, Order, Orders, Packed, only, pack
from xform.state.kept import Phase
from xform.state.owner import state_argument
from xform.trace import Jaxpr, boundary, check_jaxpr, trace_flat, typeof


@dataclasses.dataclass(frozen=True)
class Making:
    """Makes the programs of one function under one plan. donated: arguments, by number and by name. phase: of
    what passes keep.
    """

    fn: Callable[..., Any]
    plan: Plan
    mesh: Mesh
    donated: frozenset[int | str]
    phase: Phase = "start"

    def program(self, tree: Any, static: dict[int, Any], avals: Sequence[Any]) -> Program:
        """The program; a pass with a `settle` first decides, by trial of whole programs, what its plan leaves
        open.
        """
        passes, report = _brought(self.plan.passes), Report()
        for i, each in enumerate(passes):
            if (settle := getattr(each, "settle", None)) is None:
                continue

            def trial(other: Pass, i: int = i, others: Sequence[Pass] = tuple(passes)) -> Trial:
                tried = (*others[:i], other, *others[i + 1 :])
                return Trial(self._made(tree, static, avals, tried, Report()), self.mesh)

            passes[i] = settle(trial, report)
        return self._made(tree, static, avals, passes, report)

    def _made(
        self,
        tree: Any,
        static: dict[int, Any],
        avals: Sequence[Any],
        passes: Sequence[Pass],
        report: Report,
    ) -> Program:
        """The program that these passes make."""
        stages: list[Stage] = []
        numbers = [i for i in range(tree.num_leaves) if i not in static]
        inputs = input_leaves(tree, numbers, avals, self.donated)
        takes = _Takes(tree, numbers, static, inputs)  # what the function takes: floats where codes are given
        if (codes := given(tree, numbers)) is not None:
            types = codes.types(avals)
            floats = input_leaves(codes.tree, codes.values, types, self.donated)
            takes = _Takes(codes.tree, codes.values, codes.static(static), floats)
        coded = frozenset(takes.inputs[k].path for k in codes.coded) if codes else frozenset[str]()
        out_tree: Any = None
        outputs: tuple[Leaf, ...] = ()
        storable: Callable[[], Storable] | None = None
        spent = 0.0

        passed: dict[int, Leaf] = {}  # inputs by the tracers they are while the function is traced

        def flat(*values: Any) -> list[Any]:
            nonlocal out_tree, outputs
            passed.update(zip(map(id, values), takes.inputs, strict=True))
            args, kwargs = takes.arguments(values)
            with_paths, out_tree = jax.tree_util.tree_flatten_with_path(self.fn(*args, **kwargs))
            outputs = tuple(Leaf(jax.tree_util.keystr(p), typeof(x)) for p, x in with_paths)
            return [x for _, x in with_paths]

        def model(
            jaxpr: Jaxpr, leaves: Sequence[Leaf], passes: Sequence[Pass], context: dict[str, Any]
        ) -> Jaxpr:
            nonlocal spent, storable
            start = time.perf_counter()
            results = tuple(Leaf("", v.aval) for v in jaxpr.outvars)
            made = Context(
                "model",
                self.mesh,
                report,
                leaves,
                results,
                self.plan.axes,
                codes=coded,
                model=next(models),
                stage_axes=staged,
                expert_axes=experts,
                cuts=cuts,
                **context,
            )
            after = _run(jaxpr, passes, made, stages, " (model)")
            storable = made.storable
            spent += time.perf_counter() - start
            return after

        differentiated = False
        models = itertools.count()

        def at_boundary(jaxpr: Jaxpr, values: Sequence[Any]) -> Jaxpr:
            nonlocal differentiated
            differentiated = True
            leaves = [passed.get(id(x), Leaf("", typeof(x))) for x in values]
            return model(jaxpr, leaves, model_passes, {"differentiated": True})

        model_passes = _of_stage(passes, "model")
        staged = tuple(axis for p in passes if (axis := getattr(p, "stage_axis", "")))
        experts = tuple(axis for p in passes if (axis := getattr(p, "expert_axis", "")))
        cuts = tuple(p.cuts for p in passes if hasattr(p, "cuts"))
        name = getattr(self.fn, "__name__", "fn")
        start = time.perf_counter()
        paths = [leaf.path for leaf in takes.inputs]
        types = [leaf.aval for leaf in takes.inputs]
        if model_passes:
            with boundary(
                at_boundary, object()
            ):  # a key of its own: nothing that jit traced before is reused
                jaxpr = trace_flat(flat, types, name, paths)
            carrying = [p for p in model_passes if hasattr(p, "carry")] if codes else []
            more: dict[str, Any] = {"given": codes, "given_as": inputs} if codes else {}
            if not differentiated:
                jaxpr = model(jaxpr, takes.inputs, model_passes, more)
            elif carrying:
                jaxpr = model(jaxpr, takes.inputs, carrying, {**more, "differentiated": True})
        else:
            jaxpr = trace_flat(flat, types, name, paths)
        if codes is not None and len(jaxpr.invars) != len(inputs):
            raise PlanError(
                f"{', '.join(sorted(coded)[:3])}: given as codes (xform.Quantized), which no pass of the plan"
                " takes: add quantize to it"
            )
        traced = time.perf_counter()
        keeper, returns = state_argument(tree, out_tree, numbers, jaxpr)
        stacks = any(getattr(p, "stacks", False) for p in passes)
        state = next_state(tree, numbers, out_tree)
        jaxpr, in_groups, out_groups = _stacked(jaxpr, inputs, state, report, stages, stacks)
        ordered = _ordered(jaxpr, inputs, in_groups, out_groups, state, report, stages)
        jaxpr, in_groups, out_groups, in_orders, out_orders = ordered
        context = Context(
            "step",
            self.mesh,
            report,
            stacked_leaves(inputs, in_groups),
            stacked_leaves(outputs, out_groups),
            moved_names(self.plan.axes, inputs, in_groups),
            dcn=self.plan.dcn,
            keeper=keeper,
            returns=returns,
            phase=self.phase,
            stage_axes=staged,
            vocabulary_axes=tuple(a for p in passes if (a := getattr(p, "vocabulary_axis", ""))),
        )
        jaxpr = _run(jaxpr, _of_stage(passes, "step"), context, stages, "")
        last = _in_order([p for p in passes if hasattr(p, "finish")])
        jaxpr = _run(jaxpr, last, context, stages, LAST, "finish")
        rewritten = time.perf_counter()
        return Program(
            jaxpr,
            tuple(stages),
            report,
            tuple(context.inputs),
            tuple(context.outputs),
            tuple(context.in_shardings),
            tuple(context.out_shardings),
            context.reasons,
            storable,
            tree,
            out_tree,
            tuple(tuple(numbers[i] for i in group) for group in in_groups),
            out_groups,
            {"trace": traced - start - spent, "rewrite": rewritten - traced + spent},
            context.kept,
            keeper,
            returns,
            self.phase,
            in_orders,
            out_orders,
        )


@dataclasses.dataclass(frozen=True)
class _Takes:
    """What a function takes. tree: of (args, kwargs). numbers: the leaves that are arrays, `inputs`; static:
    the others.
    """

    tree: Any
    numbers: Sequence[int]
    static: Mapping[int, Any]
    inputs: Sequence[Leaf]

    def arguments(self, arrays: Sequence[Any]) -> Any:
        """(args, kwargs) with these arrays."""
        leaves = dict(self.static) | dict(zip(self.numbers, arrays, strict=True))
        return jax.tree.unflatten(self.tree, [leaves[i] for i in range(self.tree.num_leaves)])


def _run(
    jaxpr: Jaxpr,
    passes: Sequence[Pass],
    context: Context,
    stages: list[Stage],
    suffix: str,
    method: str = "rewrite",
) -> Jaxpr:
    for p in passes:
        before = jaxpr
        carries = context.given is not None and hasattr(p, "carry")
        jaxpr = getattr(p, "carry" if carries else method)(jaxpr, context)
        if jaxpr is before and (method == "finish" or hasattr(p, "leads")):
            continue
        name = type(p).__name__.lower()
        want, now = type_text(context.inputs, context.outputs), type_text(jaxpr.invars, jaxpr.outvars)
        if now != want:
            raise RewriteError(f"{name} made a program of type {now}; it should be {want}")
        if jax.config.jax_enable_checks:
            check_jaxpr(jaxpr)
        stages.append(Stage(name + suffix, before, jaxpr))
    return jaxpr


def _brought(passes: Sequence[Pass]) -> list[Pass]:
    """The plan's passes, and those that one of them needs and the plan does not name."""
    found = list(passes)
    for name in dict.fromkeys(name for p in passes for name in getattr(p, "brings", ())):
        if all(type(p).__name__.lower() != name for p in passes):
            found.append(find(name)())
    return found


def _of_stage(passes: Sequence[Pass], stage: str) -> tuple[Pass, ...]:
    """The passes that act on a stage, in the order their needs allow; before them those that lead there."""
    acting = [p for p in passes if stage in p.stages]
    leading = [p for p in acting if stage in getattr(p, "leads", ())]
    return _in_order(leading) + _in_order([p for p in acting if p not in leading])


def _in_order(chosen: Sequence[Pass]) -> tuple[Pass, ...]:
    """Each pass after those that its `after` names, else as given."""
    names = [type(p).__name__.lower() for p in chosen]
    order = nx.DiGraph()
    order.add_nodes_from(range(len(chosen)))
    for i, p in enumerate(chosen):
        order.add_edges_from((j, i) for j, n in enumerate(names) if n in getattr(p, "after", ()) and j != i)
    try:
        return tuple(chosen[i] for i in nx.lexicographical_topological_sort(order))
    except nx.NetworkXUnfeasible:
        raise PlanError(f"the passes {', '.join(names)} each want to come after one another") from None


def _stacked(
    jaxpr: Jaxpr,
    inputs: Sequence[Leaf],
    state: Mapping[int, int],
    report: Report,
    stages: list[Stage],
    stacks: bool,
) -> tuple[Jaxpr, Groups, Groups]:
    """The program over its state as it is stored; what each input and output holds of the model's leaves."""
    packed = _packed(jaxpr, inputs, state) if stacks else None
    if packed is None:
        single = tuple((i,) for i in range(max(len(jaxpr.invars), len(jaxpr.outvars))))
        return jaxpr, single[: len(jaxpr.invars)], single[: len(jaxpr.outvars)]
    stages.append(Stage("state", jaxpr, packed.jaxpr))
    rows = [group for group in packed.inputs if len(group) > 1]
    if rows:
        report.did(
            "state",
            f"stored {sum(map(len, rows))} arrays of the state as {len(rows)}",
            "stacked once, by place or init; unplace gives the model's own tree",
        )
    for left in packed.left:
        report.declined("state", f"{left.what} ({left.bytes} bytes a step)", left.why, left.where)
    for each in packed.reordered:
        report.did("state", f"took {each.what} row by row", "another order of summation", each.where)
    return packed.jaxpr, packed.inputs, packed.outputs


def _ordered(
    jaxpr: Jaxpr,
    inputs: Sequence[Leaf],
    in_groups: Groups,
    out_groups: Groups,
    state: Mapping[int, int],
    report: Report,
    stages: list[Stage],
) -> tuple[Jaxpr, Groups, Groups, Orders, Orders]:
    """The program over its state in the order in which stages take it; what each input and output holds, and
    in which order. A stack's own rows are stacked in that.
    """
    number = {group: n for n, group in enumerate(in_groups)}
    after = {n: number.get(tuple(state.get(i, -1) for i in group)) for n, group in enumerate(out_groups)}
    weak = {n for n, group in enumerate(in_groups) if getattr(inputs[group[0]].aval, "weak_type", False)}
    found = stored_by_stage(jaxpr, {out: n for out, n in after.items() if n is not None}, weak)
    if found is None:
        return jaxpr, in_groups, out_groups, (), ()
    stages.append(Stage("order", jaxpr, found.jaxpr))
    counts = collections.Counter(len(order.rows) for order in found.inputs if order is not None)
    for layers, count in counts.items():
        report.did(
            "state",
            f"stored {count} arrays of {layers} layers in the order of their stages",
            "put in it once, by place or init; unplace gives the model's own",
        )
    if found.edge:
        report.did("state", "put texts in the order of their devices", ", ".join(found.edge))
    for left in found.left:
        report.declined("state", f"{left.what} ({left.bytes} bytes a step)", left.why, left.where)
    for each in found.reordered:
        report.did("state", f"took {each.what} by stage", "another order of summation", each.where)
    in_groups, in_orders = _stacked_so(in_groups, found.inputs)
    out_groups, out_orders = _stacked_so(out_groups, found.outputs)
    return found.jaxpr, in_groups, out_groups, in_orders, out_orders


def _stacked_so(groups: Groups, orders: Orders) -> tuple[Groups, Orders]:
    """Stacks whose rows have an order are stacked in it, and have none then."""

    def stack(group: tuple[int, ...], order: Order | None) -> bool:
        return order is not None and order.dim == 0 and len(group) > 1

    pairs = list(zip(groups, orders, strict=True))
    made = tuple(tuple(g[i] for i in o.rows) if o is not None and stack(g, o) else g for g, o in pairs)
    return made, only(tuple(None if stack(g, o) else o for g, o in pairs))


def _packed(jaxpr: Jaxpr, inputs: Sequence[Leaf], state: Mapping[int, int]) -> Packed | None:
    """The program with its state stacked, no array of two arguments or without a dtype of its own."""
    paths = [leaf.path for leaf in inputs]
    keep = {i for i, leaf in enumerate(inputs) if getattr(leaf.aval, "weak_type", False)}
    while (packed := pack(jaxpr, paths, keep, state)) is not None:
        mixed = [row for row in packed.inputs if len({inputs[i].argument for i in row}) > 1]
        if not mixed:
            break
        keep.update(*mixed)
    return packed
