"""Writes a lowered program down for the process that compiles it (`xform.aot.child`).

It is the StableHLO and the compile options that `jax.stages.Lowered.compile` would have handed to the
compiler, so that what is compiled there is what would have been compiled here.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from xform import topologies
from xform.trace import pxla


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
    request = {"topology": topology.description, "devices": [device.id for device in listed]}
    (directory / "request.json").write_text(json.dumps(request))
