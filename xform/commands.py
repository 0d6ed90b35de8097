"""What each command of the command line does: it takes the parsed options, and gives what is printed."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import math
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from xform import faults
from xform.errors import PlanError

Answer = tuple[str, int]
"""What a command prints, and its exit code."""


def axes(options: argparse.Namespace) -> Answer:
    import jax

    from xform import plans, roles, targets
    from xform.axes import find_axes
    from xform.printing import tree
    from xform.printing.spell import type_text
    from xform.tensors import describe_tensors, tensor_rows

    _virtual_devices(1)
    fn, args = targets.load(options.target, options.settings)
    jaxpr = jax.make_jaxpr(fn)(*args)
    keys = [path for path, _ in jax.tree_util.tree_flatten_with_path(args)[0]]
    paths = [jax.tree_util.keystr(path) for path in keys]
    names = plans.resolve(options.plan).axes if options.plan else None
    if options.json:
        described = roles.describe(jaxpr, paths, names) | {"tensors": describe_tensors(fn, args)}
        return json.dumps(described, indent=1), faults.OK
    found = roles.find_roles(find_axes(jaxpr), names, paths)
    rows: list[tuple[str, ...]] = [("role", "size", "axes", "occurs in")]
    for row in found.table(examples=1):
        more = f" and {row.count - 1} more" if row.count > 1 else ""
        rows.append((row.role, str(row.size), str(row.axes), "".join(row.inputs) + more or row.where))
    spelled = found.inputs()
    leaves = [
        ([str(key) for key in path], (type_text(v.aval), _dimensions(spelled[name])))
        for path, name, v in zip(keys, paths, jaxpr.invars, strict=True)
    ]
    inputs: list[tuple[str, ...]] = [("input", "type", "its dimensions"), *tree.tree(leaves)]
    unruled = [
        f"# no rule for {name} ({count}): it ties nothing" for name, count in found.axes.unruled.items()
    ]
    tensors = tensor_rows(describe_tensors(fn, args))
    tables = [rows, inputs, tensors] if len(tensors) > 1 else [rows, inputs]
    return "\n\n".join(map(tree.columns, tables)) + "".join(f"\n{line}" for line in unruled), faults.OK


def _dimensions(roles: Sequence[Sequence[str]]) -> str:
    return " x ".join("·".join(dim) or "1" for dim in roles) or "scalar"


def explain(options: argparse.Namespace) -> Answer:
    step, args = _parallelized(options)
    program = step.trace(*_given(step, args, options))
    paths = program.places
    exact = [options.path] if options.path in paths else [p for p in paths if options.path in p]
    if not exact:
        near = difflib.get_close_matches(options.path, paths, 3, 0.3)
        raise PlanError(
            f"no input is called {options.path!r}; did you mean {' or '.join(near or list(paths)[:3])}?"
        )
    lines = []
    for number in dict.fromkeys(paths[path] for path in exact):
        leaf, sharding = program.inputs[number], program.in_shardings[number]
        spec = "no pass lays it out" if sharding is None else sharding.spec
        lines.append(f"{leaf.path}: {leaf.aval.str_short()} {spec}")
        if leaf.path in program.reasons:
            lines.append(f"  {program.reasons[leaf.path]}")
    return "\n".join(lines), faults.OK


def dump(options: argparse.Namespace) -> Answer:
    from xform import printing

    if options.raising:
        return _raised(options)
    if options.json:
        raise PlanError("--json goes with --raise; without it, --html FILE has everything")
    step, args = _parallelized(options)
    program = step.trace(*_given(step, args, options))
    stages = [s for s in program.stages if options.only is None or s.name.split()[0] == options.only]
    if options.only is not None and not stages:
        names = ", ".join(sorted({s.name.split()[0] for s in program.stages})) or "none"
        raise PlanError(f"--pass {options.only}: the plan's passes are {names}")
    which = options.which or "diff"
    if options.html:
        chain = [("traced", stages[0].before if stages else program.jaxpr)]
        for stage in stages:
            if stage.before is not chain[-1][1]:
                chain.append(("", stage.before))  # the step, for instance, after passes over the model
            chain.append((stage.name, stage.after))
        title = f"{options.target} under {options.plan or options.mesh}"
        page = printing.html(chain, notes=program.report.lines(), title=title)
        _write("--html", options.html, page)
        return f"wrote {options.html}", faults.OK
    if options.stablehlo:
        import jax

        after = step.lower(*_given(step, args, options)).as_text()
        original: Any = vars(step)["__wrapped__"]  # as functools.update_wrapper left it
        before = jax.jit(original).lower(*args).as_text()
        texts = {"before": before, "after": after}
        return texts.get(which) or printing.stablehlo_diff(before, after), faults.OK
    lines = []
    for stage in stages:
        lines.append(f"== {stage.name} ({which})")
        if which == "diff":
            lines.append(printing.diff_text(stage.before, stage.after, color=options.color))
        else:
            lines.append(printing.text(getattr(stage, which)))
    if not stages:
        lines.append(printing.text(program.jaxpr))
    return "\n".join([*lines, *(f"# {line}" for line in program.report.lines())]), faults.OK


def _raised(options: argparse.Namespace) -> Answer:
    from xform import targets
    from xform.raising import describe

    for flag, given in (("--plan", options.plan), ("--mesh", options.mesh), ("--use", options.use)):
        if given:
            raise PlanError(f"--raise looks at the model as it is written; {flag} has no part in it")
    _virtual_devices(1)
    fn, args = targets.load(options.target, options.settings)
    found = describe.raised(fn, *args)
    text = json.dumps(found, indent=1) if options.json else "\n".join(describe.lines(found))
    return text or "nothing is recognised", faults.OK


def check(options: argparse.Namespace) -> Answer:
    from xform import targets
    from xform.check import check as run

    plan = _plan(options)
    _virtual_devices(options.devices or _size(plan))
    fn, args = targets.load(options.target, options.settings)
    result = run(fn, args, plan, steps=options.steps, tolerance=options.tolerance, progress=_progress)
    text = json.dumps(result.to_json(), indent=1) if options.json else str(result)
    return text, faults.OK if result.ok else faults.DIFFERS


def aot(options: argparse.Namespace) -> Answer:
    from xform import targets, topologies
    from xform.aot import CompilerError, compile_lowered
    from xform.aot.donation import chosen
    from xform.api import parallelize
    from xform.flops import product_flops

    topology = topologies.parse(options.topology)
    topologies.prepare_environment()
    plan = _plan(options)
    _progress(f"{options.target} for {topology}")
    fn, args = targets.load(options.target, options.settings)
    donated = chosen(options.donate, fn, args)
    step = parallelize(fn, plan, devices=topology.devices(), donate_argnums=donated or None)
    _progress("tracing, rewriting and lowering")
    args = _given(step, args, options)
    lowered = step.lower(*args)
    written = lowered.program.report.traffic
    try:
        result = compile_lowered(
            lowered.lowered,
            topology=topology,
            mesh=step.mesh,
            full=options.full,
            seconds=lowered.seconds,
            progress=_progress,
            ideal_flops=product_flops(lowered.program.original),
            parts=_parts(step.mesh, plan.dcn) if written else None,
            written=written,
        )
    except CompilerError as error:
        raise PlanError(f"the TPU compiler refuses the program: {error}") from error
    if options.save_hlo:
        _write("--save-hlo", options.save_hlo, result.hlo_text)
    result.check_promises(lowered.program.laid_out, lowered.program.report)
    notes = lowered.program.report.lines()
    if options.json:
        data = result.to_json()
        return json.dumps({**data, "notes": [*notes, *data["notes"]]}, indent=1), faults.OK
    said = ["{:10} {}".format(*line.split(": ", 1)) for line in notes]
    return "\n".join([result.render(), *said]), faults.OK


def _parts(mesh: Any, dcn: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """The stages in which collectives over each axis of a mesh run, with their sizes."""
    from xform.spmd.torus import staged

    cut = staged(mesh, dcn)
    return {axis: {part: cut.mesh.shape[part] for part in parts} for axis, parts in cut.parts.items()}


def passes(options: argparse.Namespace) -> Answer:
    from xform import registry

    found = {name: registry.find(name) for name in registry.names()}
    if options.json:
        data = {name: [option.to_json() for option in registry.options(cls)] for name, cls in found.items()}
        return json.dumps(data, indent=1), faults.OK
    return "\n\n".join(_described(name, cls) for name, cls in found.items()), faults.OK


def _described(name: str, cls: type[Any]) -> str:
    """A pass for `xform passes`: what it does in its first sentence, then its options."""
    from xform import registry

    doc = " ".join((sys.modules[cls.__module__].__doc__ or cls.__doc__ or "").split("\n\n")[0].split())
    lines = textwrap.wrap(f"{name} ({', '.join(cls.stages)}): {doc}", 100, subsequent_indent="    ")
    for option in registry.options(cls):
        default = "must be given" if option.default is dataclasses.MISSING else f"default: {option.default!r}"
        head = f"  {option.name}: {option.type} ({default})"
        lines += textwrap.wrap(head, 100, subsequent_indent=" " * 6)
        lines += textwrap.wrap(option.doc, 96, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)


def schedule(options: argparse.Namespace) -> Answer:
    from xform import schedules

    costs = schedules.Costs.loads(options.costs)
    found = _schedule(options)
    cost = schedules.cost(found, costs)
    if options.html:
        _write("--html", options.html, schedules.html(found, cost))
    if options.json:
        return json.dumps({**found.to_json(), **cost.to_json()}, indent=1), faults.OK
    return f"wrote {options.html}" if options.html else schedules.draw(found, cost), faults.OK


def _schedule(options: argparse.Namespace) -> Any:
    """The table with the given name, or that in a file."""
    from xform import schedules

    name = options.schedule
    sizes = {key: getattr(options, key) for key in ("stages", "microbatches", "repeats", "delay")}
    given = {key: number for key, number in sizes.items() if number is not None}
    if name not in schedules.SCHEDULES and ("." in name or os.path.exists(name)):
        if given:
            raise PlanError(f"--{next(iter(given))}: the table in {name} has its own")
        return schedules.Schedule.load(name)
    if name in schedules.SCHEDULES and not {"stages", "microbatches"} <= given.keys():
        raise PlanError(f"{name}: give --stages and --microbatches")
    return schedules.make(name, **{"stages": 1, "microbatches": 1} | given)


# ---------------------------------------------------------------- what the commands share


def _plan(options: argparse.Namespace) -> Any:
    from xform import plans
    from xform.plan import Plan

    if options.plan and options.mesh:
        raise PlanError("--plan and --mesh: give one of them")
    if options.plan:
        if options.use:
            raise PlanError("--use goes with --mesh; a plan given by --plan has its own passes")
        plan = plans.resolve(options.plan)
        if not plan.passes:
            _progress(f"--plan {options.plan} has no passes, such as [shard]: the program stays as it is")
        return plan
    if not options.mesh:
        raise PlanError("no plan: give --plan FILE.toml, --plan fsdp:8, or --mesh fsdp=8")
    return Plan.from_flags(options.mesh, options.use)


def _size(plan: Any) -> int:
    """How many devices a plan's mesh takes; where a size is left open, 8 or the next number that fits."""
    sizes = [*plan.mesh.values(), *plan.dcn.values()]
    fixed = math.prod(n for n in sizes if n > 0)
    return fixed if -1 not in sizes else fixed * -(-8 // fixed)


def _virtual_devices(count: int) -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def _parallelized(options: argparse.Namespace) -> tuple[Any, tuple[Any, ...]]:
    from xform import targets
    from xform.api import parallelize

    plan = _plan(options)
    _virtual_devices(options.devices or _size(plan))
    fn, args = targets.load(options.target, options.settings)
    return parallelize(fn, plan), args


def _given(step: Any, args: tuple[Any, ...], options: argparse.Namespace) -> tuple[Any, ...]:
    """The arguments that a step is given, of those that its function takes."""
    return (step.quantize(*args), *args[1:]) if options.codes else args


def _write(flag: str, path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise PlanError(f"{flag} {path}: {error.strerror}") from error


def _progress(text: str) -> None:
    print(f"xform: {text}", file=sys.stderr, flush=True)
