"""Two processes of four devices each train together and get the losses of one device."""

import json
import socket
import subprocess
import sys

import pytest

from tests.processes import environment

PROGRAM = """
import json, sys
import jax
jax.config.update("jax_platforms", "cpu")
rank, port, count = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
jax.config.update("jax_num_cpu_devices", 8 // count)
if count > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", count, rank)
import numpy as np
import xform
from xform.models import llama

options = dict(size="tiny", batch=8, length=16)
fn, (state, batch) = llama.train_step(**options)
init, (key,) = llama.init(**options)
devices = None if count > 1 else jax.devices()[:1]
rng = np.random.default_rng(0)
given = {k: rng.integers(0, 2, v.shape).astype(v.dtype) for k, v in batch.items()}


def losses(mesh, collectives):
    plan = xform.Plan(mesh, [xform.Shard(collectives=collectives)])
    step = xform.parallelize(fn, plan, devices=devices)
    step.trace(state, batch)
    born = step.init(init, jax.random.key(0))
    assert all(not x.is_fully_addressable for x in jax.tree.leaves(born)) or count == 1
    now, data = step.place(born, given)
    found = []
    for _ in range(3):
        now, metrics = step(now, data)
        found.append(float(metrics["loss"]))
    return found


if count > 1:
    all_of_them = [losses({"fsdp": 8}, "auto"), losses({"fsdp": 4, "tensor": 2}, "explicit")]
else:
    all_of_them = [losses({"fsdp": 1}, "auto")]
if rank == 0:
    print(json.dumps(all_of_them))
"""


def _run(count: int) -> list[list[float]]:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = str(s.getsockname()[1])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), port, str(count)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        for rank in range(count)
    ]
    results = [p.communicate(timeout=300) for p in processes]
    for process, (_, err) in zip(processes, results, strict=True):
        assert process.returncode == 0, err[-3000:]
    return json.loads(results[0][0].strip().splitlines()[-1])


@pytest.mark.slow  # starts three processes, each of which loads jax and compiles
def test_two_processes_of_four_devices_get_the_losses_of_one_device():
    (compilers, written), (alone,) = _run(2), _run(1)
    # bfloat16 products, summed in another order over eight devices.
    assert compilers == pytest.approx(alone, rel=2e-3)
    assert written == pytest.approx(alone, rel=2e-3)
    assert len(set(compilers)) == 3
