"""Names to real machines, machines to meshes: published slices, their wrap-around links, refusals."""

import math
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from xform import topologies
from xform.errors import PlanError
from xform.topologies import make_mesh, parse

# From the cloud's pages on each TPU, and from MaxText's table of topologies.
PUBLISHED = {
    "v5e-1": (1, 1), "v5e-4": (2, 2), "v5e-8": (2, 4), "v5e-16": (4, 4), "v5e-32": (4, 8),
    "v5e-64": (8, 8), "v5e-128": (8, 16), "v5e-256": (16, 16), "v6e-64": (8, 8), "v5litepod-16": (4, 4),
    "v4-8": (2, 2, 1), "v4-64": (2, 4, 4), "v4-512": (4, 8, 8), "v4-1536": (8, 8, 12),
    "v4-4096": (8, 16, 16), "v5p-8": (2, 2, 1), "v5p-32": (2, 2, 4), "v5p-128": (4, 4, 4),
    "v5p-640": (4, 4, 20), "v5p-768": (4, 8, 12), "v5p-2048": (8, 8, 16), "v5p-6912": (12, 12, 24),
    "v5p-10368": (12, 12, 36), "v5p-11520": (12, 20, 24), "v5p-12288": (16, 16, 24),
    "v5p-17920": (16, 20, 28), "tpu7x-8": (2, 2, 1), "tpu7x-18432": (16, 24, 24),
}  # fmt: skip
WRAPS = {
    "v5e-16": "", "v5e-128": "y", "v5e-256": "xy", "v6e-64": "", "v6e-256": "xy", "v4-64": "",
    "v4-128": "xyz", "v5p-32": "", "v5p-640": "xyz", "tpu7x-16": "", "tpu7x-128": "xyz",
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_names_have_their_published_shapes(name):
    assert parse(name).shape == PUBLISHED[name]


@pytest.mark.parametrize("name", WRAPS)
def test_whole_cubes_and_lines_of_sixteen_wrap_around(name):
    assert parse(name).wrap == tuple(axis in WRAPS[name] for axis in "xyz")


def test_a_shape_and_a_number_of_slices_can_be_given():
    assert parse("v5p:4x4x4") == parse("V5P-128")
    assert parse("v5p:2x2") == parse("v5p-8")
    both = parse("2xv5e-256")
    assert (both.slices, both.shape, both.chips, both.device_count) == (2, (16, 16), 512, 512)
    assert parse(both.name) == both


def test_figures_are_those_of_one_device():
    assert (parse("v5p-128").chips, parse("v5p-128").device_count) == (64, 64)
    ironwood = parse("tpu7x-128")
    assert (ironwood.chips, ironwood.device_count, ironwood.hbm) == (64, 128, 96 << 30)
    v5e = parse("v5e-4")
    assert (v5e.hbm, v5e.peak_flops, v5e.clock) == (16 << 30, 197e12, 1.5e9)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("v5e-17", "v5e-16 (4x4) and v5e-32 (4x8)"),
        ("v5e-512", "the nearest are v5e-256"),
        ("v5p-130", "v5p-128 (4x4x4) and v5p-256 (4x4x8)"),
        ("v5p:8x4x4", "v5p-256 (4x4x8)"),
        ("v5e:3x5", "v5e-8 (2x4) and v5e-16 (4x4)"),
        ("v5x-16", "did you mean"),
        ("h100-8", "there are v4, v5e, v5p, v6e, tpu7x"),
        ("v5e", "not a name like v5e-16"),
        ("0xv5e-4", "0 slices"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_right_ones(name, hint):
    with pytest.raises(PlanError) as refusal:
        parse(name)
    assert hint in str(refusal.value) and name in str(refusal.value)


@pytest.mark.parametrize("name", ["v4-8", "v5e-1", "v5e-8", "v5p-128", "v6e-256", "tpu7x-16", "2xv5e-16"])
def test_libtpu_has_the_machine(name):
    topology = parse(name)
    devices = topology.devices()
    assert len(devices) == topology.device_count
    sizes = np.array([device.coords for device in devices]).max(0) + 1
    assert math.prod(sizes) * topology.slices == topology.chips
    hosts = {device.process_index for device in devices}
    assert len(hosts) == topology.chips / math.prod(topology.host_bounds)


def test_a_mesh_lies_along_the_torus():
    mesh = make_mesh(parse("v5p-128"), {"fsdp": -1, "tensor": 4})
    assert dict(mesh.shape) == {"fsdp": 16, "tensor": 4}
    coords = np.array([device.coords for device in mesh.devices.flat]).reshape(16, 4, 3)
    moved = (coords != coords[:, :1]).any(1).sum(0)
    assert sorted(moved.tolist()) == [0, 0, 16]  # a tensor group is one line of four, in one dimension


def test_slices_are_outermost_and_an_axis_may_lie_in_both():
    topology = parse("2xv5e-16")
    mesh = make_mesh(topology, {"fsdp": 4, "tensor": -1}, {"data": -1})
    assert dict(mesh.shape) == {"data": 2, "fsdp": 4, "tensor": 4}
    assert [{device.slice_index for device in part.flat} for part in mesh.devices] == [{0}, {1}]
    assert dict(make_mesh(topology, {"data": 2, "fsdp": 8}, {"data": 2}).shape) == {"data": 4, "fsdp": 8}


def test_cpu_devices_make_the_same_meshes():
    devices = jax.devices()[:8]
    mesh = make_mesh(devices, {"fsdp": -1, "tensor": 2}, {"data": 2})
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "tensor": 2}
    assert mesh.devices.reshape(-1).tolist() == devices
    both = make_mesh(devices, {"data": 2, "fsdp": 2}, {"data": 2})
    assert both.devices[:2].reshape(-1).tolist() == devices[:4]
    assert dict(make_mesh(devices[:1], {}).shape) == {}


@pytest.mark.parametrize(
    ("ici", "dcn", "hint"),
    [
        (
            {"fsdp": 8, "tensor": 4},
            {},
            "needs 32 devices, and there are 16; fsdp = 4 or tensor = 2 would fit",
        ),
        ({"fsdp": 8}, {}, "fsdp = 16 would fit"),
        ({"fsdp": -1, "tensor": 3}, {}, "needs a multiple of 3 devices"),
        ({"fsdp": -1, "tensor": -1}, {}, "only one can take what is left"),
        ({"fsdp": 0}, {}, "a size is a positive number"),
        ({"fsdp": 16}, {"data": 2}, "needs 2 slices"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_with_what_would(ici, dcn, hint):
    with pytest.raises(PlanError) as refusal:
        make_mesh(parse("v5e-16"), ici, dcn)
    assert hint in str(refusal.value)


def test_several_slices_need_an_axis_that_crosses_them():
    with pytest.raises(PlanError, match=r"--mesh dcn\.data=2"):
        make_mesh(parse("2xv5e-16"), {"fsdp": 16})
    with pytest.raises(PlanError, match="needs 4 slices, and there are 2; data = 2 would fit"):
        make_mesh(parse("2xv5e-16"), {"fsdp": 16}, {"data": 4})


def test_without_libtpu_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(topologies.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    with pytest.raises(PlanError, match="pip install libtpu"):
        parse("v5e-4").devices()


def test_a_user_sets_nothing_and_sees_nothing(tmp_path):
    program = (
        "import jax\n"  # before xform, which can then no longer speak through jax's environment
        "from xform import topologies\n"
        "mesh = topologies.make_mesh(topologies.parse('v5e-4'), {'fsdp': 4})\n"
        "sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('fsdp'))\n"
        "x = jax.ShapeDtypeStruct((8, 128), 'float32', sharding=sharding)\n"
        "jax.jit(lambda x: x.sum()).lower(x).compile()\n"
        "print(jax.devices()[0].platform)\n"
    )
    hidden = ("TPU_", "JAX_", "XLA_", "ALLOW_", "TF_", "LIBTPU_")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(hidden)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    ran = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        check=False,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "cpu\n", "")
