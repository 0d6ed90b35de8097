"""Axes are cut where they turn a corner of the torus; what lies over the parts lies as over the axis."""

import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from xform.errors import PlanError
from xform.hlo import costs as hlo_costs
from xform.spmd.torus import staged
from xform.topologies import make_mesh, parse

P = PartitionSpec

RING = {"fsdp.major": 4, "fsdp.minor": 4}  # mesh_utils lays a single axis of 16 as a ring through 4x4

# Topology, ici and dcn sizes: the refined mesh.
LAID = [
    ("v5e:2x2", {"fsdp": 4}, {}, {"fsdp": 4}),
    ("v5e:2x4", {"fsdp": 8}, {}, {"fsdp": 8}),
    ("v5e:4x4", {"fsdp": 16}, {}, RING),
    ("v6e:4x4", {"fsdp": 16}, {}, RING),
    ("v5e:4x4", {"fsdp": 4, "tensor": 4}, {}, {"fsdp": 4, "tensor": 4}),
    ("v5e:4x4", {"fsdp": 8, "tensor": 2}, {}, {"fsdp": 8, "tensor": 2}),
    ("v5e:8x8", {"fsdp": 64}, {}, {"fsdp.x": 8, "fsdp.y": 8}),
    ("v5e:16x16", {"fsdp": 256}, {}, {"fsdp.x": 16, "fsdp.y": 16}),
    ("v5e:16x16", {"data": 16, "fsdp": 16}, {}, {"data": 16, "fsdp": 16}),
    ("v5e:16x16", {"fsdp": 64, "tensor": 4}, {}, {"fsdp.x": 4, "fsdp.y": 16, "tensor": 4}),
    ("v5p:2x2x2", {"fsdp": 8}, {}, {"fsdp.major": 4, "fsdp.minor": 2}),
    ("v5p:4x4x4", {"fsdp": 64}, {}, {"fsdp.xy": 16, "fsdp.z": 4}),
    ("v5p:4x4x4", {"fsdp": 16, "tensor": 4}, {}, {"fsdp": 16, "tensor": 4}),
    ("tpu7x:2x2x1", {"fsdp": 8}, {}, {"fsdp": 8}),
    ("tpu7x:4x4x4", {"fsdp": 128}, {}, {"fsdp.xy": 16, "fsdp.zcore": 8}),
    ("2xv5e-16", {"fsdp": 16}, {"data": 2}, {"data": 2, **RING}),
    ("2xv5e-16", {"fsdp": 16}, {"fsdp": 2}, {"fsdp.dcn": 2, **RING}),
    ("2xv5e-16", {"fsdp": 4, "tensor": 4}, {"fsdp": 2}, {"fsdp.dcn": 2, "fsdp.y": 4, "tensor": 4}),
]


@pytest.mark.parametrize(("name", "ici", "dcn", "refined"), LAID, ids=lambda each: str(each))
def test_an_axis_is_cut_where_it_turns(name, ici, dcn, refined):
    mesh = make_mesh(parse(name), ici, dcn)
    found = staged(mesh)
    assert dict(found.mesh.shape) == refined
    assert list(found.mesh.devices.flat) == list(mesh.devices.flat)
    for axis, parts in found.parts.items():
        assert math.prod(found.mesh.shape[part] for part in parts) == mesh.shape[axis]
        assert all(found.owner(part) == axis for part in parts)
    assert found.dcn == {"data" if axis == "data" else f"{axis}.dcn" for axis in dcn}


def mesh_at(places, shape, axes):
    """A mesh of stand-ins for devices at (x, y) of one slice, or at (slice, x, y)."""
    devices = np.empty(len(places), object)
    for number, place in enumerate(places):
        *slices, x, y = place
        devices[number] = types.SimpleNamespace(
            coords=(x, y, 0), core_on_chip=0, slice_index=slices[0] if slices else None, process_index=0
        )
    return types.SimpleNamespace(
        devices=devices.reshape(shape),
        axis_names=axes,
        shape=dict(zip(axes, shape, strict=True)),
        axis_types=(jax.sharding.AxisType.Auto,) * len(axes),
    )


def test_an_axis_that_goes_along_no_dimension_in_some_line_is_cut_by_number(monkeypatch):
    monkeypatch.setattr(jax.sharding, "Mesh", lambda devices, names, axis_types: (devices, names))
    square = [(x, y) for x in range(4) for y in range(4)]
    assert staged(mesh_at(square, (16,), ("fsdp",))).parts["fsdp"] == ("fsdp.x", "fsdp.y")
    crooked = [*square[:14], square[15], square[14]]
    assert staged(mesh_at(crooked, (16,), ("fsdp",))).parts["fsdp"] == ("fsdp.major", "fsdp.minor")
    lines = [(x, y) for x in range(8) for y in range(4)]
    assert staged(mesh_at(lines, (2, 16), ("tensor", "fsdp"))).parts["fsdp"] == ("fsdp.x", "fsdp.y")
    lines[-1], lines[-2] = lines[-2], lines[-1]
    assert staged(mesh_at(lines, (2, 16), ("tensor", "fsdp"))).parts["fsdp"] == ("fsdp.major", "fsdp.minor")


def test_an_axis_that_mixes_slices_stays_whole(monkeypatch):
    monkeypatch.setattr(jax.sharding, "Mesh", lambda devices, names, axis_types: (devices, names))
    mixed = [(s, x, y) for x in range(4) for s in range(2) for y in range(4)]
    found = staged(mesh_at(mixed, (32,), ("fsdp",)))
    assert (found.parts, found.dcn) == ({"fsdp": ("fsdp",)}, {"fsdp"})


def test_devices_without_slices_are_cut_as_the_plan_says():
    mesh = make_mesh(jax.devices(), {"fsdp": 2, "tensor": 2}, {"fsdp": 2})
    found = staged(mesh, {"fsdp": 2})
    assert dict(found.mesh.shape) == {"fsdp.dcn": 2, "fsdp.ici": 2, "tensor": 2}
    assert found.dcn == {"fsdp.dcn"}
    across = staged(make_mesh(jax.devices(), {"fsdp": 4}, {"data": 2}), {"data": 2})
    assert (dict(across.mesh.shape), across.dcn) == ({"data": 2, "fsdp": 4}, {"data"})
    assert dict(staged(mesh).mesh.shape) == dict(mesh.shape)
    assert dict(staged(mesh, {"fsdp": -1}).mesh.shape) == dict(mesh.shape)


@pytest.mark.parametrize(
    ("dcn", "said"), [({"data": 2}, "data is none of the mesh's: fsdp"), ({"fsdp": 3}, "fsdp = 3")]
)
def test_sizes_between_slices_that_do_not_fit_are_refused(dcn, said):
    with pytest.raises(PlanError, match=said):
        staged(make_mesh(jax.devices(), {"fsdp": 8}), dcn)


def test_a_layout_over_the_parts_is_that_over_the_axes():
    mesh = make_mesh(jax.devices(), {"fsdp": 2, "tensor": 2}, {"fsdp": 2})
    found = staged(mesh, {"fsdp": 2})
    free = P.UNCONSTRAINED
    assert found.refined(P("tensor", None, free)) == P("tensor", None, free)
    assert found.refined(P("fsdp")) == P(("fsdp.dcn", "fsdp.ici"))
    spec = P(("tensor", "fsdp"), None)
    assert found.refined(spec) == P(("tensor", "fsdp.dcn", "fsdp.ici"), None)
    assert NamedSharding(mesh, spec).is_equivalent_to(NamedSharding(found.mesh, found.refined(spec)), 2)
    with pytest.raises(KeyError, match="fsdp"):
        found.owner("fsdp")


def in_stages(mesh, dcn=None):
    """x [rows over fsdp, 7] and w [24 over fsdp, 5]: the gradient of a product, gathered and scattered."""
    cut = staged(mesh, dcn)
    parts, spec = cut.parts["fsdp"], cut.refined(P("fsdp"))

    def body(x, w):
        for part in reversed(parts):
            w = lax.all_gather(w, part, axis=0, tiled=True)
        grad = jnp.einsum("be,bm->em", x, jnp.tanh(x @ w))
        for part in parts:
            grad = lax.psum_scatter(grad, part, scatter_dimension=0, tiled=True)
        return grad

    return jax.shard_map(body, mesh=cut.mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False)


def test_a_program_on_the_plans_mesh_runs_in_stages_and_moves_nothing_else():
    mesh = make_mesh(jax.devices(), {"fsdp": 4}, {"fsdp": 2})
    sharding = NamedSharding(mesh, P("fsdp"))
    x, w = (
        np.linspace(-1, 1, math.prod(shape), dtype=np.float32).reshape(shape) for shape in ((16, 24), (24, 5))
    )
    fn = jax.jit(in_stages(mesh, {"fsdp": 2}), out_shardings=sharding)
    args = [jax.device_put(each, sharding) for each in (x, w)]
    out = fn(*args)
    assert out.sharding == sharding
    np.testing.assert_allclose(out, np.einsum("be,bm->em", x, np.tanh(x @ w)), rtol=1e-5, atol=1e-5)
    costs = hlo_costs.costs(fn.lower(*args).compile().as_text(), {"fsdp": 8})
    assert {kind: each.count for kind, each in costs.collectives.items()} == {
        "all-gather": 2,
        "reduce-scatter": 2,
    }


@pytest.mark.parametrize(("name", "size"), [("v5e:4x4", 16), ("v5p:4x4x4", 64)])
def test_a_scatter_in_stages_stays_a_scatter(name, size):
    mesh = make_mesh(parse(name), {"fsdp": size})
    sharding = NamedSharding(mesh, P("fsdp"))
    x, w = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding) for shape in ((size, 4096), (4096, 512))
    )
    text = jax.jit(in_stages(mesh)).lower(x, w).compile().as_text()
    kinds = hlo_costs.costs(text, dict(mesh.shape)).collectives
    assert (kinds["all-gather"].count, kinds["reduce-scatter"].count, "all-reduce" in kinds) == (2, 2, False)
