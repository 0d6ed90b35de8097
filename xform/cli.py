"""Rewrites JAX programs: the axes of a program, what a plan does to it, whether it is still right, what a TPU
makes of it.

    xform axes    TARGET                              which dimensions are what
    xform explain TARGET --plan P PATH                why a tensor is laid out as it is
    xform dump    TARGET --plan P                     the program before and after each pass
    xform check   TARGET --plan P --devices 8         the rewritten program against the original
    xform aot     TARGET --plan P --topology v5e-16   compiled for a TPU, without one
    xform passes                                      every pass and its options
    xform schedule NAME --stages 4 --microbatches 8   a pipeline's schedule as a table, and what it takes

TARGET is `module:factory`; `-s key=value` gives the factory's options. A plan is `--plan FILE.toml`, `--plan
PRESET:SIZE`, or `--mesh fsdp=4,tensor=4` with any number of `--use pass:option=value`.

Exit codes: 0 well, 1 the check differs, 2 the program, plan or options are at fault, 3 xform is.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from absl import app

from xform import commands, faults
from xform.arguments import Layout, Parser, not_negative, whole_number, writable


def main() -> None:
    """The console script."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    app.run(_run, flags_parser=_parse)


def _run(options: argparse.Namespace) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that `finally` cleans up
    options.color = sys.stdout.isatty()
    try:
        with _users_output_on_stderr():
            text, code = options.command(options)
    except (Exception, KeyboardInterrupt) as error:
        code, message = faults.told(error)
        print(f"xform: {message}", file=sys.stderr)
        return code
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


@contextlib.contextmanager
def _users_output_on_stderr() -> Iterator[None]:
    """What the user's program prints while it is traced and run goes to stderr; stdout is the command's."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="xform", description=__doc__, formatter_class=Layout)
    subparsers = parser.add_subparsers(
        required=True, metavar="COMMAND", help="one of these; xform COMMAND --help says more"
    )

    def command(name: str, text: str, *shared: Any) -> Any:
        sub = subparsers.add_parser(name, description=text, formatter_class=Layout)
        sub.set_defaults(command=getattr(commands, name))
        for add in shared:
            add(sub)
        return sub

    text = "Print which dimensions are the same axis, and what each is."
    command("axes", text, _target, _named, _json)

    text = "Say why a tensor is laid out as it is."
    sub = command("explain", text, _target, _planned, _coded, _devices)
    sub.add_argument("path", metavar="PATH", help="an input's path, or a part of one: \"['mlp']['up']\"")

    text = "Print the program before and after the passes."
    sub = command("dump", text, _target, _planned, _coded, _devices)
    sub.add_argument("--pass", dest="only", metavar="NAME", help="only this pass")
    which = sub.add_mutually_exclusive_group()
    for name, text in (
        ("before", "the program each pass was given"),
        ("after", "what it made of it"),
        ("diff", "what it changed, renamed variables left out (the default)"),
    ):
        which.add_argument(f"--{name}", dest="which", action="store_const", const=name, help=text)
    sub.add_argument("--stablehlo", action="store_true", help="the lowered program instead of the jaxpr")
    sub.add_argument("--html", metavar="FILE", type=writable, help="write a page that shows it all")
    text = "print what is recognised in the model (attention, losses, norms ...) instead; takes no plan"
    sub.add_argument("--raise", dest="raising", action="store_true", help=text)
    sub.add_argument("--json", action="store_true", help="with --raise: print JSON")

    text = "Compare the rewritten program with the original."
    sub = command("check", text, _target, _planned, _devices, _json)
    add = sub.add_argument
    add("--steps", type=whole_number, default=3, metavar="N", help="training steps to run (default: 3)")
    text = "largest error, relative to each tensor's largest value (default: by the program's float types)"
    add("--tolerance", type=not_negative, metavar="X", help=text)

    text = "Compile for a TPU and report."
    add = command("aot", text, _target, _planned, _coded, _json).add_argument
    add("--topology", required=True, metavar="NAME", help="v5e-16, v5p-128, v5p:4x4x4, 2xv5e-256 ...")
    add("--full", action="store_true", help="compile to the end: peak memory and estimated cycles too")
    text = "arguments whose memory the results may take: auto (a training step's state), none, or 0,2"
    add("--donate", default="auto", metavar="WHICH", help=text)
    add("--save-hlo", metavar="FILE", type=writable, help="write the scheduled module")

    command("passes", "Print every pass with its options and their defaults.", _json)

    text = "Print the schedule of a pipeline as a table, its idle slots, what it keeps and what travels."
    add = command("schedule", text, _json).add_argument
    add(
        "schedule",
        metavar="NAME",
        help="gpipe, circular, eager-1f1b, 1f1b, interleaved, zb-h1, or a file with a table",
    )
    add("--stages", type=whole_number, metavar="N", help="how many stages the layers are cut into")
    add("--microbatches", type=whole_number, metavar="N", help="how many parts the batch is cut into")
    add("--repeats", type=whole_number, metavar="N", help="chunks of layers a stage (default: 1)")
    text = "ticks that activations are on their way for beyond the next (default: 0)"
    add("--delay", type=int, metavar="N", help=text)
    text = "forward=1,input=1,weight=1,recompute=0: what a microbatch and chunk takes (the default)"
    add("--costs", metavar="KEY=VALUE", default="", help=text)
    add("--html", metavar="FILE", type=writable, help="write a page that shows it")
    return parser.parse_args(argv[1:])


def _target(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("target", metavar="TARGET", help="module:factory, which returns (fn, args)")
    text = "an option of the factory; any number of them"
    sub.add_argument("-s", dest="settings", action="append", default=[], metavar="KEY=VALUE", help=text)


def _planned(sub: argparse.ArgumentParser) -> None:
    add = sub.add_argument
    add("--plan", metavar="PLAN", help="a TOML file, or a preset with its sizes: fsdp:16")
    text = "axes and sizes in place of --plan: fsdp=4,tensor=4; dcn.data=2 between slices"
    add("--mesh", metavar="AXIS=N", default="", help=text)
    text = "with --mesh, a pass with options: shard:sequence_parallel=true (see xform passes)"
    add("--use", metavar="PASS:OPTION=VALUE", action="append", default=[], help=text)


def _coded(sub: argparse.ArgumentParser) -> None:
    text = "give the step its first argument's weights as codes, as step.quantize stores them"
    sub.add_argument("--codes", action="store_true", help=text)


def _named(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--plan", metavar="PLAN", help="a plan whose [axes] name what cannot be told")


def _devices(sub: argparse.ArgumentParser) -> None:
    text = "virtual CPU devices (default: as many as the mesh says, or 8)"
    sub.add_argument("--devices", type=whole_number, metavar="N", help=text)


def _json(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--json", action="store_true", help="print JSON")


if __name__ == "__main__":
    main()
