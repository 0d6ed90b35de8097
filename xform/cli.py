"""The command line: the axes of a program, what a plan does to it, whether it is still right, what a TPU
makes of it.

    xform axes    TARGET                              which dimensions are what
    xform explain TARGET --plan P PATH                why a tensor is laid out as it is
    xform dump    TARGET --plan P                     the program before and after each pass
    xform check   TARGET --plan P --devices 8         the rewritten program against the original
    xform aot     TARGET --plan P --topology v5e-16   compiled for a TPU, without one
    xform passes                                      every pass and its options

TARGET is `module:factory`; `-s key=value` gives the factory's options. A plan is `--plan FILE.toml`, `--plan
PRESET:SIZE`, or `--mesh fsdp=4,tensor=4` with any number of `--use pass:option=value`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from absl import app
from absl.flags import argparse_flags

from xform.errors import Decline, PlanError, RewriteError


def main() -> None:
    """The console script."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    app.run(_run, flags_parser=_parse)


def _run(options: argparse.Namespace) -> int:
    try:
        return int(options.command(options) or 0)
    except (PlanError, Decline) as error:
        print(f"xform: {error}", file=sys.stderr)
        return 2
    except RewriteError as error:
        print(f"xform: a fault of xform, not of your program or plan: {error}", file=sys.stderr)
        return 3
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse_flags.ArgumentParser(
        prog="xform", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], Any], text: str, target: bool = True) -> Any:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(command=run)
        if target:
            sub.add_argument("target", metavar="TARGET", help="module:factory, which returns (fn, args)")
            sub.add_argument("-s", dest="settings", action="append", default=[], metavar="key=value")
        return sub

    def with_plan(sub: Any, devices: bool = True) -> Any:
        sub.add_argument("--plan", help="a TOML file, or a preset with its sizes: fsdp:16")
        sub.add_argument(
            "--mesh", default="", help="axes and sizes: fsdp=4,tensor=4; dcn.data=2 between slices"
        )
        sub.add_argument(
            "--use", action="append", default=[], help="a pass with options: remat:policy=minimal"
        )
        if devices:
            sub.add_argument(
                "--devices", type=int, help="virtual CPU devices (default: as many as the mesh says, or 8)"
            )
        return sub

    sub = command("axes", axes, "Print which dimensions are the same axis, and what each is.")
    sub.add_argument("--json", action="store_true")

    sub = with_plan(command("explain", explain, "Say why a tensor is laid out as it is."))
    sub.add_argument("path", metavar="PATH", help="an input's path, or the end of one: ['mlp']['wi']")

    sub = with_plan(command("dump", dump, "Print the program before and after the passes."))
    sub.add_argument("--pass", dest="only", metavar="NAME", help="only this pass")
    which = sub.add_mutually_exclusive_group()
    which.add_argument("--before", dest="which", action="store_const", const="before")
    which.add_argument("--after", dest="which", action="store_const", const="after")
    which.add_argument("--diff", dest="which", action="store_const", const="diff", help="the default")
    sub.add_argument("--stablehlo", action="store_true", help="the lowered program instead of the jaxpr")
    sub.add_argument("--html", metavar="FILE", help="write a page that shows it all")

    sub = with_plan(command("check", check, "Compare the rewritten program with the original."))
    sub.add_argument("--steps", type=int, default=3, help="training steps to run")
    sub.add_argument("--tolerance", type=float, help="relative to each tensor's largest value")
    sub.add_argument("--json", action="store_true")

    sub = with_plan(command("aot", aot, "Compile for a TPU topology and report."), devices=False)
    sub.add_argument("--topology", required=True, help="v5e-16, v5p-128, v5p:4x4x4, 2xv5e-256 ...")
    sub.add_argument(
        "--full", action="store_true", help="compile to the end: peak memory and estimated cycles too"
    )
    sub.add_argument("--donate", default="auto", help="arguments whose memory is reused: auto, none, or 0,2")
    sub.add_argument("--save-hlo", metavar="FILE", help="write the scheduled module")
    sub.add_argument("--json", action="store_true")

    sub = command("passes", passes, "Print every pass with its options and their defaults.", target=False)
    sub.add_argument("--json", action="store_true")
    return parser.parse_args(argv[1:])


# ---------------------------------------------------------------- commands


def axes(options: argparse.Namespace) -> None:
    import jax

    from xform import roles, targets
    from xform.axes import find_axes

    _virtual_devices(1)
    fn, args = targets.load(options.target, options.settings)
    jaxpr = jax.make_jaxpr(fn)(*args)
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_flatten_with_path(args)[0]]
    if options.json:
        print(json.dumps(roles.describe(jaxpr, paths), indent=1))
        return
    found = roles.find_roles(find_axes(jaxpr), None, paths)
    rows = [("role", "size", "axes", "occurs in")]
    for row in found.table(examples=2):
        more = row.count - len(row.inputs)
        examples = ", ".join(row.inputs) + (f" and {more} more" if more else "")
        rows.append((row.role, str(row.size), str(row.axes), examples or row.where))
    print(_columns(rows))
    print()
    shapes = {path: v.aval.str_short() for path, v in zip(paths, jaxpr.invars, strict=True)}
    spelled = {p: " x ".join("·".join(d) or "1" for d in dims) or "-" for p, dims in found.inputs().items()}
    print(_columns([(path, shapes[path], spelled[path]) for path in paths]))
    for name, count in found.axes.unruled.items():
        print(f"# no rule for {name} ({count}): it ties nothing")


def explain(options: argparse.Namespace) -> None:
    import difflib

    step, args = _parallelized(options)
    program = step.trace(*args)
    paths = [leaf.path for leaf in program.inputs]
    found = [p for p in paths if p == options.path] or [p for p in paths if options.path in p]
    if not found:
        near = difflib.get_close_matches(options.path, paths, 3, 0.3)
        raise PlanError(
            f"no input is called {options.path!r}; did you mean {' or '.join(near or paths[:3])}?"
        )
    specs = dict(zip(paths, program.in_shardings, strict=True))
    leaves = {leaf.path: leaf for leaf in program.inputs}
    for path in found:
        sharding = specs[path]
        spec = "no pass lays it out" if sharding is None else sharding.spec
        print(f"{path}: {leaves[path].aval.str_short()} {spec}")
        if path in program.reasons:
            print(f"  {program.reasons[path]}")


def dump(options: argparse.Namespace) -> None:
    from xform import printing

    step, args = _parallelized(options)
    program = step.trace(*args)
    stages = [s for s in program.stages if options.only is None or s.name.split()[0] == options.only]
    if options.only is not None and not stages:
        names = ", ".join(sorted({s.name.split()[0] for s in program.stages})) or "none"
        raise PlanError(f"--pass {options.only}: the plan's passes are {names}")
    which = options.which or "diff"
    if options.html:
        chain = [("traced", stages[0].before), *((s.name, s.after) for s in stages)] if stages else []
        title = f"{options.target} under {options.plan or options.mesh}"
        page = printing.html(chain or [("traced", program.jaxpr)], notes=program.report.lines(), title=title)
        with open(options.html, "w", encoding="utf-8") as file:
            file.write(page)
        print(f"wrote {options.html}")
        return
    if options.stablehlo:
        import jax

        after = step.lower(*args).as_text()
        before = jax.jit(step.__wrapped__).lower(*args).as_text()  # type: ignore[attr-defined]
        print({"before": before, "after": after}.get(which) or printing.stablehlo_diff(before, after))
        return
    for stage in stages:
        print(f"== {stage.name} ({which})")
        if which == "diff":
            print(printing.diff_text(stage.before, stage.after, color=sys.stdout.isatty()))
        else:
            print(printing.text(getattr(stage, which)))
    if not stages:
        print(printing.text(program.jaxpr))
    for line in program.report.lines():
        print(f"# {line}")


def check(options: argparse.Namespace) -> int:
    from xform import targets
    from xform.check import check as run

    plan = _plan(options)
    _virtual_devices(options.devices or _size(plan))
    fn, args = targets.load(options.target, options.settings)
    result = run(fn, args, plan, steps=options.steps, tolerance=options.tolerance)
    print(json.dumps(result.to_json(), indent=1) if options.json else result)
    return 0 if result.ok else 1


def aot(options: argparse.Namespace) -> None:
    from xform import targets, topologies
    from xform.aot import compile_lowered
    from xform.api import parallelize

    topology = topologies.parse(options.topology)
    topologies.prepare_environment()
    plan = _plan(options)
    progress = _progress(options)
    progress(f"{options.target} for {topology}")
    fn, args = targets.load(options.target, options.settings)
    donated = _donated(options.donate, fn, args)
    step = parallelize(fn, plan, devices=topology.devices(), donate_argnums=donated or None)
    progress("tracing, rewriting and lowering")
    lowered = step.lower(*args)
    result = compile_lowered(
        lowered.lowered,
        topology=topology,
        mesh=step.mesh,
        full=options.full,
        seconds=lowered.seconds,
        progress=progress,
    )
    notes = [*lowered.program.report.lines(), f"donated arguments: {', '.join(map(str, donated)) or 'none'}"]
    if options.save_hlo:
        with open(options.save_hlo, "w", encoding="utf-8") as file:
            file.write(result.hlo_text)
    if options.json:
        data = result.to_json()
        print(json.dumps({**data, "notes": [*notes, *data["notes"]]}, indent=1))
    else:
        print(result.render())
        print("\n".join(notes))


def passes(options: argparse.Namespace) -> None:
    from xform import registry

    found = {name: registry.find(name) for name in registry.names()}
    if options.json:
        print(json.dumps({n: [o.to_json() for o in registry.options(c)] for n, c in found.items()}, indent=1))
        return
    for name, cls in found.items():
        print(f"{name}: {(sys.modules[cls.__module__].__doc__ or cls.__doc__ or '').strip().splitlines()[0]}")
        for option in registry.options(cls):
            print(f"    {option}")


# ---------------------------------------------------------------- what the commands share


def _plan(options: argparse.Namespace) -> Any:
    from xform import plans
    from xform.plan import Plan

    if options.plan and options.mesh:
        raise PlanError("--plan and --mesh: give one of them")
    if options.plan:
        if options.use:
            raise PlanError("--use goes with --mesh; a plan given by --plan has its own passes")
        return plans.resolve(options.plan)
    if not options.mesh:
        raise PlanError("no plan: give --plan FILE.toml, --plan fsdp:8, or --mesh fsdp=8")
    return Plan.from_flags(options.mesh, options.use)


def _size(plan: Any) -> int:
    """How many devices a plan's mesh takes; 8 when a size is left open."""
    size = 1
    for n in (*plan.mesh.values(), *plan.dcn.values()):
        size *= n
    return size if size > 0 else 8


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


def _donated(option: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[int, ...]:
    """The arguments to donate; auto: each whose next value is among the results, as a training step's
    state.
    """
    import jax

    if option == "none":
        return ()
    if option != "auto":
        try:
            return tuple(int(n) for n in option.split(","))
        except ValueError:
            raise PlanError(f"--donate {option}: auto, none, or numbers such as 0,2") from None

    def types(tree: Any) -> Any:
        return jax.tree.structure(tree), [
            (x.shape, x.dtype) for x in jax.tree.leaves(tree) if hasattr(x, "shape")
        ]

    out = jax.eval_shape(fn, *args)
    results = [types(o) for o in (out if isinstance(out, tuple) else (out,))] + [types(out)]
    return tuple(i for i, a in enumerate(args) if jax.tree.leaves(a) and types(a) in results)


def _columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows as lines, in columns as wide as what stands in them."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _progress(options: argparse.Namespace) -> Callable[[str], None]:
    def show(text: str) -> None:
        print(f"xform: {text}", file=sys.stderr, flush=True)

    return show


if __name__ == "__main__":
    main()
