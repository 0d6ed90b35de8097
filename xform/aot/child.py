"""The process that compiles: `python -m xform.aot.child DIRECTORY`, started and ended by `xform.aot`.

Code generation is nearly all of a compilation's time and tells nothing about memory or traffic, and XLA has
no way to stop before it: so it compiles in a process of its own, which is ended when what was wanted is on
disk. A lowered program reaches it as the StableHLO and the compile options that `jax.stages.Lowered.compile`
would have handed to the compiler (`pack`), so that what is compiled here is what would have been compiled
there.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxlib import _jax as xla
from jaxlib.mlir import ir

from xform import topologies
from xform.trace import mlir, pxla

PR_SET_PDEATHSIG = 1


def pack(lowered: jax.stages.Lowered, topology: topologies.Topology, directory: Path) -> None:
    """Write what the child needs to compile `lowered`, a program lowered for the topology's devices."""
    lowering: Any = lowered._lowering  # type: ignore[attr-defined]
    args = lowering.compile_args
    devices = lowering._device_list
    ins, outs = (
        tuple(pxla.maybe_concretize_mesh(sharding, devices) for sharding in args[key])
        for key in ("in_shardings", "out_shardings")
    )
    free_ins, free_outs = pxla.get_prop_to_input_output(ins, outs, len(args["ordered_effects"]))
    listed = np.array(list(devices), dtype=object)
    options = pxla.create_compile_options(
        lowering._hlo, args["tuple_args"], free_ins, free_outs, args["backend"], listed,
        dict(lowering._compiler_options_kvs),
    )  # fmt: skip
    module = io.BytesIO()
    lowering._hlo.operation.write_bytecode(file=module)
    (directory / "module.mlirbc").write_bytes(module.getvalue())
    (directory / "options.pb").write_bytes(options.SerializeAsString())
    request = {"topology": topology.name, "devices": [device.id for device in listed]}
    (directory / "request.json").write_text(json.dumps(request))


def read_json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


def compile_packed(directory: Path) -> None:
    """Compile what `pack` wrote, to the end; write the scheduled module's text and its memory figures."""
    request = read_json(directory / "request.json")
    by_id = {device.id: device for device in topologies.parse(request["topology"]).devices()}
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
