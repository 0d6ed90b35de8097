"""Processes that tests start: their environment, and the command line at the cost of a fork.

`python -m xform` imports the package, and with it jax, before it reads its arguments: over a second. Here one
process does that and waits; for each command a copy of it is forked, which goes on as `python -m xform` does.
"""

import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from tests.conftest import DEVICES

ROOT = pathlib.Path(__file__).parent.parent

_WAITING = """
import json, os, runpy, sys
import xform
for line in sys.stdin:
    arguments, *files = json.loads(line)
    if (child := os.fork()) == 0:
        for descriptor, file in zip((0, 1, 2), (os.devnull, *files)):
            os.dup2(os.open(file, os.O_RDWR), descriptor)
        sys.argv[1:] = arguments
        runpy.run_module("xform", run_name="__main__", alter_sys=True)
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def twice(program: str) -> list[bytes]:
    """What a program prints in two processes that hash strings in another way."""
    return [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    ]


def environment() -> dict[str, str]:
    """Neither a platform nor a number of devices is set; programs are compiled as fast as they are here."""
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(DEVICES)]
    rest = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    return rest | {"XLA_FLAGS": " ".join(flags)}


@functools.cache
def _waiting() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _WAITING],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(),
    )


def xform(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m xform ARGUMENTS` in the root of the repository, and what it says."""
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        server = _waiting()
        assert server.stdin is not None and server.stdout is not None
        print(json.dumps([arguments, out.name, err.name]), file=server.stdin, flush=True)
        code = int(server.stdout.readline())
        return subprocess.CompletedProcess(arguments, code, out.read(), err.read())
