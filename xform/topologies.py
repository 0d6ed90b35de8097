"""From the name of a TPU slice to the real machine, and from a machine to a mesh laid along its torus.

One table, `KINDS`, says what a chip of each generation is, and two rules say how a slice of it is wired. A
name is a count (`v5e-16`, `v5p-128`), a shape (`v5p:4x4x4`) or several slices of either (`2xv5e-256`). The
count is what the cloud's accelerator types count: chips for v5e and v6e, TensorCores, two a chip, for v4, v5p
and tpu7x.

Sources:
- Chips (memory, its bandwidth, peak, pod size), accelerator types, slice shapes: the pages v4, v5e, v5p, v6e
  and tpu7x of https://cloud.google.com/tpu/docs. Clocks: the peak over what the matrix units do in a cycle
  (v4, v5p 8 of 128x128 a chip, v5e 4 of them, v6e and tpu7x counted in the same unit).
- Wrap-around links, cubes: "All 4x4x4 and larger slices (one cube) have full 3D torus",
  https://cloud.google.com/tpu/docs/v5p; v4 and tpu7x are built of the same cubes. Lines of 16 of v5e and v6e
  close into rings, shorter ones don't (v5e-256 is a torus, v5e-128 wraps in one dimension), as MaxText's
  table has it, and all the rest of what libtpu is asked for: https://github.com/AI-Hypercomputer/maxtext,
  src/maxtext/utils/accelerator_to_spec_map.py.
A slice is taken untwisted; twisted tori (k x k x 2k, k x 2k x 2k) are another order that the cloud must be
asked for.

Without its wrap-around links a slice is another machine: on v5p 4x4x4 the compiler then turns all-gathers
into all-reduces.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import itertools
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils, topologies

from xform.errors import PlanError

GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Kind:
    """A generation of TPU. `hbm` (bytes), `bandwidth` of that memory (bytes a second), `peak_flops`
    (bfloat16), `peak_int8`, `peak_fp8` (operations a second) and `clock` (Hz) are of one JAX device. A peak
    of 0: the chip has no units for such numbers, and the compiler multiplies them as bfloat16.
    """

    name: str
    aliases: tuple[str, ...]
    dims: int  # of the interconnect: 2 (lines of 16 close) or 3 (cubes of 4x4x4 close)
    config: str  # libtpu's chip_config_name: with "megacore" both cores of a chip are one device
    counted: int  # what one chip counts in names: 2 where names count cores
    devices: int  # JAX devices a chip
    hbm: int
    bandwidth: float
    peak_flops: float
    peak_int8: float
    peak_fp8: float
    clock: float
    small: tuple[tuple[int, ...], ...]  # the slices that are not built of whole cubes, or all of them in 2-D
    most: int  # chips of the largest slice


_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_PARTS = ((1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))

# fmt: off
KINDS = (
    Kind("v4", ("tpuv4",), 3, "megacore", 2, 1,
         32 * GIB, 1200e9, 275e12, 275e12, 0, 1.05e9, _PARTS, 4096),
    Kind("v5e", ("v5litepod", "v5lite", "tpuv5e"), 2, "default", 1, 1,
         16 * GIB, 819e9, 197e12, 394e12, 0, 1.5e9, _FLAT, 256),
    Kind("v5p", ("v5", "tpuv5p"), 3, "megacore", 2, 1,
         95 * GIB, 2765e9, 459e12, 918e12, 0, 1.75e9, _PARTS, 8960),
    Kind("v6e", ("v6lite", "trillium", "tpuv6e"), 2, "default", 1, 1,
         32 * GIB, 1638e9, 918e12, 1836e12, 0, 1.75e9, _FLAT, 256),
    Kind("tpu7x", ("v7x", "tpu7", "ironwood"), 3, "default", 2, 2,
         96 * GIB, 7380e9 / 2, 1153.5e12, 0, 2307e12, 2.2e9, _PARTS, 9216),
)
# fmt: on


@dataclasses.dataclass(frozen=True)
class Topology:
    """`slices` equal slices of `shape` chips of `kind`; `wrap` says which dimensions close into rings."""

    kind: Kind
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def wrap(self) -> tuple[bool, bool, bool]:
        closed = [size % 16 == 0 for size in self.shape]
        if self.kind.dims == 3:
            closed = [all(size % 4 == 0 for size in self.shape)] * 3
        x, y, z = (*closed, False)[:3]
        return x, y, z

    @property
    def chips(self) -> int:
        """In all slices together."""
        return self.slices * math.prod(self.shape)

    @property
    def device_count(self) -> int:
        """JAX devices in all slices together: chips, or twice as many on tpu7x."""
        return self.chips * self.kind.devices

    @property
    def hbm(self) -> int:
        """Bytes of device memory a device. The compiler keeps some back (v5e offers 15.75 of its 16 GiB)."""
        return self.kind.hbm

    @property
    def bandwidth(self) -> float:
        """Bytes a second between a device and its memory."""
        return self.kind.bandwidth

    @property
    def peak_flops(self) -> float:
        """bfloat16 floating-point operations a second and device."""
        return self.kind.peak_flops

    @property
    def clock(self) -> float:
        """Hz."""
        return self.kind.clock

    @property
    def host_bounds(self) -> tuple[int, int, int]:
        """Chips a host, in each dimension: 2x2 of them, fewer where the slice is smaller."""
        x, y = (min(size, 2) for size in self.shape[:2])
        return x, y, 1

    @property
    def name(self) -> str:
        """The name that says everything: `v5e:4x4`, `2xv5p:4x4x4`."""
        slices = f"{self.slices}x" if self.slices > 1 else ""
        return f"{slices}{self.kind.name}:{_shape_text(self.shape)}"

    @property
    def description(self) -> dict[str, Any]:
        """What libtpu is asked for: options of `jax.experimental.topologies.get_topology_desc`."""
        return {
            "topology_name": f"{self.kind.name}:{_shape_text(self.shape)}",
            "chip_config_name": self.kind.config,
            "chips_per_host_bounds": self.host_bounds,
            "num_slices": self.slices,
            "wrap": self.wrap,
        }

    def devices(self) -> list[Any]:
        """Abstract devices, which programs can be lowered and compiled for. Needs libtpu, no TPU."""
        prepare_environment()
        return list(topologies.get_topology_desc(platform="tpu", **self.description).devices)

    def __str__(self) -> str:
        slices = f"{self.slices} slices of " if self.slices > 1 else ""
        rings = "".join(axis for axis, closed in zip("xyz", self.wrap, strict=True) if closed)
        links = f"wrap-around in {rings}" if rings else "no wrap-around links"
        return f"{slices}{self.kind.name} {_shape_text(self.shape)} ({self.device_count} devices, {links})"


def parse(name: str) -> Topology:
    """The machine called `v5e-16`, `v5p-128`, `v5p:4x4x4`, `2xv5e-256`. PlanError names what is nearest."""
    text = name.strip().lower().replace("_", "-")
    found = re.fullmatch(r"(?:(\d+)x)?([a-z][a-z0-9]*)(?:-(\d+)|[:=](\d+(?:x\d+)*))", text)
    if found is None:
        raise PlanError(
            f"topology {name!r} is not a name like v5e-16, v5p:4x4x4 or 2xv5e-256 (two slices); "
            f"kinds: {', '.join(kind.name for kind in KINDS)}"
        )
    slices, word, count, shape_text = found.groups()
    if slices is not None and int(slices) < 1:
        raise PlanError(f"topology {name!r}: {slices} slices is none")
    kind = _kind(name, word)
    if count is not None:
        shape = _shape_of(name, kind, int(count))
    else:
        shape = tuple(int(size) for size in shape_text.split("x"))
        if kind.dims == 3 and len(shape) == 2:
            shape = (*shape, 1)
        if not _is_real(kind, shape):
            near = _nearest(kind, math.prod(shape))
            raise PlanError(f"topology {name!r}: {kind.name} has no slice of that shape; {near}")
    return Topology(kind, shape, int(slices or 1))


def _kind(name: str, word: str) -> Kind:
    for kind in KINDS:
        if word == kind.name or word in kind.aliases:
            return kind
    words = [word for kind in KINDS for word in (kind.name, *kind.aliases)]
    near = difflib.get_close_matches(word, words, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise PlanError(
        f"topology {name!r}: no TPU is called {word!r}; {hint}there are {', '.join(k.name for k in KINDS)}"
    )


def _is_real(kind: Kind, shape: tuple[int, ...]) -> bool:
    if shape in kind.small:
        return True
    whole_cubes = kind.dims == 3 and len(shape) == 3 and all(size % 4 == 0 and size for size in shape)
    return whole_cubes and shape == tuple(sorted(shape)) and math.prod(shape) <= kind.most


def _shape_of(name: str, kind: Kind, count: int) -> tuple[int, ...]:
    chips, rest = divmod(count, kind.counted)
    shape = None if rest else _shape_with(kind, chips)
    if shape is None:
        unit = "TensorCores, two a chip" if kind.counted == 2 else "chips"
        near = _nearest(kind, count / kind.counted)
        raise PlanError(f"topology {name!r}: there is no {kind.name} slice of {count} {unit}; {near}")
    return shape


def _shape_with(kind: Kind, chips: int) -> tuple[int, ...] | None:
    """The slice with that many chips: a small one, else the cuboid of cubes that is nearest to a cube."""
    for shape in kind.small:
        if math.prod(shape) == chips:
            return shape
    cubes, rest = divmod(chips, 64)
    if kind.dims != 3 or rest or not 0 < chips <= kind.most:
        return None
    sides = [
        (a, b, cubes // (a * b))
        for a in range(1, math.isqrt(cubes) + 1)
        for b in range(a, cubes // a + 1)
        if cubes % (a * b) == 0 and cubes // (a * b) >= b
    ]
    a, b, c = min(sides, key=lambda side: (side[2] - side[0], side))
    return 4 * a, 4 * b, 4 * c


def _nearest(kind: Kind, chips: float) -> str:
    """The slices just below and just above, by name."""
    sizes = [math.prod(shape) for shape in kind.small]
    if kind.dims == 3:
        sizes += range(64, kind.most + 1, 64)
    below, above = [s for s in sizes if s <= chips], [s for s in sizes if s > chips]
    near = ([max(below)] if below else []) + ([min(above)] if above else [])
    names = [
        f"{kind.name}-{size * kind.counted} ({_shape_text(_shape_with(kind, size) or ())})" for size in near
    ]
    return f"the nearest are {' and '.join(names)}"


def _shape_text(shape: Sequence[int]) -> str:
    return "x".join(str(size) for size in shape)


# What libtpu must find in the environment when it is loaded, to compile and do nothing else: no query of a
# metadata server, no lock on the machine's only TPU, no search for hosts, and no log lines, in files or on
# stderr, unless they are fatal.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_LOG_DIR": "disabled",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}


def kind_of(device: Any) -> Kind | None:
    """Which TPU a JAX device is; None for another machine."""
    if device.platform != "tpu":
        return None
    word = str(device.device_kind).lower().removeprefix("tpu").replace(" ", "")
    return next((k for k in KINDS if word in (k.name, *k.aliases, k.name.removeprefix("tpu"))), None)


def prepare_environment() -> None:
    """Set what libtpu reads when it loads, so that a user sets nothing and sees no noise; what is set stays.

    Without libtpu: PlanError with the command that installs it.
    """
    if importlib.util.find_spec("libtpu") is None and not os.path.isfile(
        os.environ.get("TPU_LIBRARY_PATH", "")
    ):
        raise PlanError("compiling for a TPU needs libtpu, which is not installed: pip install libtpu")
    if "tpu" in (jax.config.jax_platforms or ""):
        return  # a TPU is attached, on which programs may run later: libtpu must find it as it is
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    if not jax.config.jax_platforms:  # jax would look for a TPU to run on, and say that there is none
        jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])


def make_mesh(
    devices: Topology | Sequence[Any], ici: Mapping[str, int], dcn: Mapping[str, int] | None = None
) -> jax.sharding.Mesh:
    """A mesh over the devices, its axes laid along the torus, those between slices (`dcn`) outermost.

    `ici` and `dcn` map axes to sizes; one size in each may be -1, for what is left. An axis in both has the
    product of its sizes, slices outermost. The last axis is the busiest and gets the best links
    (`jax.experimental.mesh_utils`). Devices that know no slices (CPU) are cut into equal slices in their
    order, by process where that fits. PlanError when the sizes don't make the number of devices, saying which
    would.
    """
    listed = devices.devices() if isinstance(devices, Topology) else list(devices)
    outer = dict(dcn or {})
    on_tpu = listed[0].platform == "tpu"
    slices = len({getattr(device, "slice_index", None) or 0 for device in listed}) if on_tpu else 1
    if slices == 1:  # devices that know no slices, or a single slice: as many as asked for
        slices = math.prod(outer.values()) if -1 not in outer.values() else 1
        if slices > 1 and on_tpu:
            raise PlanError(
                f"mesh: dcn {_mesh_text(outer)} needs {slices} slices, and the topology is one; "
                f"several are written {slices}xv5e-16"
            )
    if slices > 1 and not outer:
        raise PlanError(
            f"mesh: the devices are {slices} slices; say which axes cross them: "
            f"--mesh dcn.data={slices},..., or data = {slices} under [mesh.dcn]"
        )
    if len(listed) % slices:
        raise PlanError(f"mesh: {len(listed)} devices can't be cut into {slices} slices")
    outer = _sized("dcn", outer, slices, "slices")
    inner = _sized("ici", dict(ici), len(listed) // slices, "devices" if slices == 1 else "devices a slice")
    names = [*outer, *(axis for axis in inner if axis not in outer)]
    inner_shape, outer_shape = [inner.get(a, 1) for a in names], [outer.get(a, 1) for a in names]
    return jax.sharding.Mesh(_laid_out(listed, inner_shape, outer_shape, slices), tuple(names))


def _laid_out(devices: Sequence[Any], inner: list[int], outer: list[int], slices: int) -> np.ndarray:
    if len(devices) == 1:
        return np.array(devices, object).reshape([1] * len(inner))
    if slices == 1:
        return mesh_utils.create_device_mesh(inner, devices, allow_split_physical_axes=True)
    by_process = devices[0].platform != "tpu"
    attribute = "process_index" if by_process else "slice_index"
    if len({getattr(device, attribute, None) for device in devices}) == slices:
        return mesh_utils.create_hybrid_device_mesh(
            inner, outer, devices, process_is_granule=by_process, allow_split_physical_axes=True
        )
    size = len(devices) // slices
    parts = [mesh_utils.create_device_mesh(inner, devices[i * size : (i + 1) * size]) for i in range(slices)]
    blocks = np.empty(outer, object)
    for position, part in zip(itertools.product(*map(range, outer)), parts, strict=True):
        blocks[position] = part
    return np.block(blocks.tolist())


def _sized(group: str, axes: dict[str, int], total: int, unit: str) -> dict[str, int]:
    """The axes with their -1 filled in, their product checked against `total`."""
    for axis, size in axes.items():
        if not isinstance(size, int) or (size < 1 and size != -1):
            raise PlanError(
                f"mesh: {group} axis {axis} = {size!r}: a size is a positive number, or -1 for what is left"
            )
    free = [axis for axis, size in axes.items() if size == -1]
    if len(free) > 1:
        raise PlanError(
            f"mesh: {group} axes {' and '.join(free)} are both -1; only one can take what is left"
        )
    fixed = math.prod(size for size in axes.values() if size != -1)
    if free and total % fixed == 0:
        return axes | {free[0]: total // fixed}
    if not free and fixed == total:
        return axes
    fits = [
        f"{axis} = {total // (fixed // size)}"
        for axis, size in axes.items()
        if size > 0 and total % (fixed // size) == 0
    ]
    remedy = f"; {' or '.join(fits)} would fit" if fits and not free else ""
    needs = f"a multiple of {fixed}" if free else f"{fixed}"
    raise PlanError(
        f"mesh: {group} {_mesh_text(axes) or '(no axes)'} needs {needs} {unit}, and there are {total}{remedy}"
    )


def _mesh_text(axes: Mapping[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in axes.items())
