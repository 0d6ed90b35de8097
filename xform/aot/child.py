"""The process that compiles: `python child.py DIRECTORY`, started and ended by `xform.aot`.

Code generation is nearly all of a compilation's time and tells nothing about memory or traffic, and XLA has
no way to stop before it: so it compiles in a process of its own, which is ended when what was wanted is on
disk. A lowered program reaches it as `packing` writes it down. It imports JAX alone: all of xform would take
as long as many a compilation.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.interpreters import mlir
from jaxlib import _jax as xla
from jaxlib.mlir import ir

PR_SET_PDEATHSIG = 1


def compile_packed(directory: Path) -> None:
    """Compile what `pack` wrote, to the end; write the scheduled module's text and its memory figures."""
    request: dict[str, Any] = json.loads((directory / "request.json").read_text())
    asked: dict[str, Any] = {
        key: tuple(x) if isinstance(x, list) else x for key, x in request["topology"].items()
    }
    described: Any = topologies.get_topology_desc(platform="tpu", **asked)
    by_id = {device.id: device for device in described.devices}
    devices = [by_id[number] for number in request["devices"]]
    options = xla.CompileOptions.ParseFromString((directory / "options.pb").read_bytes())
    options.executable_build_options.debug_options.xla_dump_to = str(directory / "dump")
    with mlir.make_ir_context():
        module = ir.Module.parse((directory / "module.mlirbc").read_bytes())
        compiled = devices[0].client.compile(
            module, executable_devices=xla.DeviceList(tuple(devices)), compile_options=options
        )
    memory = compiled.get_compiled_memory_stats()
    keys = [key for key in dir(memory) if key.endswith("_in_bytes")]
    text = "\n\n".join(module.to_string() for module in compiled.hlo_modules())
    (directory / "compiled.txt").write_text(text)
    (directory / "memory.json").write_text(json.dumps({key: getattr(memory, key) for key in keys}))


def main(directory: Path) -> int:
    if sys.platform == "linux":  # end with the parent, however that ends
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        compile_packed(directory)
    except Exception as error:
        known = isinstance(error, jax.errors.JaxRuntimeError)
        (directory / "error.txt").write_text(str(error) if known else traceback.format_exc())
        return 1
    return 0


if __name__ == "__main__":
    sys.stdout.flush()
    os._exit(main(Path(sys.argv[1])))  # nothing to tear down; libtpu takes its time to
