"""Compiling for a TPU topology: figures reckoned by hand, the same early as at the end, errors."""

import dataclasses
import pathlib
import subprocess
import tempfile
import threading

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding, PartitionSpec

from xform import topologies
from xform.aot import compiling as aot
from xform.report import Traffic

LAYERS, EMBED, MLP, BATCH = 5, 256, 512, 64
P = PartitionSpec


@pytest.fixture(autouse=True)
def scratch(tmp_path, monkeypatch):
    """Compilations write here, and must leave nothing; nor may a child outlive them."""
    children = []

    class Recorded(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            children.append(self)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(aot.subprocess, "Popen", Recorded)
    yield children
    assert list(tmp_path.glob("xform-aot-*")) == []
    assert all(child.poll() is not None for child in children)


def machine(name: str = "v5e:2x2", **ici: int) -> tuple[topologies.Topology, jax.sharding.Mesh]:
    topology = topologies.parse(name)
    return topology, topologies.make_mesh(topology, ici or {"fsdp": -1})


def struct(
    mesh: jax.sharding.Mesh, shape: tuple[int, ...], *spec: str | tuple[str, ...] | None
) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))


def layer(x: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, None]:
    with jax.named_scope("mlp"):
        hidden = jax.nn.relu(x @ weights["up"])
        return x + hidden @ weights["down"], None


def weights_on(mesh: jax.sharding.Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        "up": struct(mesh, (LAYERS, EMBED, MLP), None, "fsdp"),
        "down": struct(mesh, (LAYERS, MLP, EMBED), None, "fsdp"),
    }


def gathering(mesh: jax.sharding.Mesh) -> jax.stages.Lowered:
    """The forward pass, the weights of each layer gathered by hand."""

    def shard(weights, x):
        def body(x, shards):
            whole = {name: jax.lax.all_gather(part, "fsdp", tiled=True) for name, part in shards.items()}
            return layer(x, whole)

        x, _ = jax.lax.scan(body, x, weights)
        return jax.lax.psum(x.astype(jnp.float32).sum(), "fsdp")

    mapped = jax.shard_map(shard, mesh=mesh, in_specs=(P(None, "fsdp"), P("fsdp")), out_specs=P())
    return jax.jit(mapped).lower(weights_on(mesh), struct(mesh, (BATCH, EMBED), "fsdp"))


def training(mesh: jax.sharding.Mesh) -> jax.stages.Lowered:
    """A training step under full remat, partitioned by the compiler."""

    def loss(weights, x):
        x, _ = jax.lax.scan(jax.checkpoint(layer), x, weights)
        return (x.astype(jnp.float32) ** 2).mean()

    def step(weights, x):
        value, gradients = jax.value_and_grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.01 * g, weights, gradients), value

    lowered = jax.jit(step, donate_argnums=0)
    return lowered.lower(weights_on(mesh), struct(mesh, (BATCH, EMBED), "fsdp"))


def test_a_scanned_mlp_has_the_bytes_counts_and_flops_reckoned_by_hand():
    topology, mesh = machine()
    told = []
    result = aot.compile_lowered(
        gathering(mesh), topology=topology, mesh=mesh, seconds={"trace": 0.25}, progress=told.append
    )
    weight = EMBED * MLP * 2  # bytes, bfloat16
    json = result.to_json()
    gathers, sums = json["collectives"]["all-gather"], json["collectives"]["all-reduce"]
    assert (gathers["count"], gathers["wire_bytes"]) == (2 * LAYERS, 2 * LAYERS * weight * 3 // 4)
    assert (sums["count"], sums["wire_bytes"]) == (1, 4 * 2 * 3 // 4)
    assert json["collectives_by_axis"] == {"fsdp": json["collectives"]}
    assert json["dot_flops"] == LAYERS * 2 * (2 * BATCH // 4 * EMBED * MLP)
    assert json["memory"]["argument"] == 2 * LAYERS * weight // 4 + BATCH // 4 * EMBED * 2
    assert json["memory"]["host_temp"] == 0
    assert (json["full"], json["cycles"], json["memory"]["peak"]) == (False, None, None)
    assert json["kernels"] == []
    assert json["seconds"]["trace"] == 0.25 and json["seconds"]["compile"] > 0
    donated, stopped = json["notes"]
    assert "nothing is donated" in donated and "stopped before code generation" in stopped
    assert "is_scheduled=true" in result.hlo_text
    text = dataclasses.replace(result, ideal_flops=json["dot_flops"] / 2).render()
    assert "over fsdp" in text and "50.0% of these" in text


@pytest.mark.slow  # compiles to the end
def test_stopped_early_the_figures_are_those_of_a_full_compilation():
    topology, mesh = machine()
    lowered = training(mesh)
    early, full = (aot.compile_lowered(lowered, topology=topology, mesh=mesh, full=f) for f in (False, True))
    assert early.costs.collectives == full.costs.collectives and early.costs.collectives
    assert early.costs.axes == full.costs.axes
    assert early.costs.dot_flops == full.costs.dot_flops
    assert set(full.costs.dot_flops) == {"forward", "backward", "remat"}
    for key in ("argument", "output", "alias", "host_temp"):
        assert early.memory[key] == full.memory[key], key
    assert abs(early.memory["temp"] - full.memory["temp"]) <= 16 << 10
    assert early.cycles is None and early.memory["peak"] is None
    assert full.cycles and full.memory["peak"]
    assert full.to_json()["cycles_by_scope"]["mlp"] > 0
    assert not any("stopped" in note for note in full.notes)
    assert "ms" in full.render()


@pytest.mark.slow  # compiles to the end, twice
def test_a_full_compilation_is_the_one_that_jax_would_have_made():
    topology, mesh = machine()
    lowered = training(mesh)
    compiled = lowered.compile()
    result = aot.compile_lowered(lowered, topology=topology, mesh=mesh, full=True)
    assert result.hlo_text == compiled.as_text()
    assert result.memory["temp"] == compiled.memory_analysis().temp_size_in_bytes
    assert result.memory["peak"] == compiled.memory_analysis().peak_memory_in_bytes


def test_traffic_between_slices_is_told_from_that_within():
    topology = topologies.parse("2xv5e:2x2")
    mesh = topologies.make_mesh(topology, {"fsdp": 4}, {"data": 2})

    def shard(x):
        return jax.lax.psum(jax.lax.psum(x, "fsdp") * 2, "data")

    mapped = jax.shard_map(shard, mesh=mesh, in_specs=P(("data", "fsdp")), out_specs=P())
    lowered = jax.jit(mapped).lower(struct(mesh, (64, 128), ("data", "fsdp")))
    axes = aot.compile_lowered(lowered, topology=topology, mesh=mesh).to_json()["collectives_by_axis"]
    block = 8 * 128 * 2  # bytes
    assert axes["fsdp"] == {"all-reduce": {"count": 1, "wire_bytes": block * 3 // 2, "async_count": 0}}
    assert axes["data"] == {"all-reduce": {"count": 1, "wire_bytes": block, "async_count": 1}}


def test_a_gather_in_stages_is_reported_by_stage():
    topology, mesh = machine("v5e:4x4")
    parts = {"fsdp": {"fsdp.x": 4, "fsdp.y": 4}}
    finer = jax.sharding.Mesh(mesh.devices.reshape(4, 4), tuple(parts["fsdp"]))

    def shard(w):
        return jax.lax.all_gather(jax.lax.all_gather(w, "fsdp.y", tiled=True), "fsdp.x", tiled=True)

    mapped = jax.shard_map(
        shard, mesh=finer, in_specs=P(tuple(parts["fsdp"])), out_specs=P(), check_vma=False
    )
    lowered = jax.jit(mapped).lower(struct(mesh, (256, 128), "fsdp"))
    block = 16 * 128 * 2  # bytes, of which one stage gathers 4 and the other 4 times 4
    written = Traffic(16 * block, 16 * block, 30 * block, 0, {"fsdp": {"fsdp.x": 13 * block}}, ("fsdp",), ())
    result = aot.compile_lowered(lowered, topology=topology, mesh=mesh, parts=parts, written=written)
    json = result.to_json()
    stages = {stage: kinds["all-gather"] for stage, kinds in json["collectives_by_stage"]["fsdp"].items()}
    assert {stage: traffic["wire_bytes"] for stage, traffic in stages.items()} == {
        "fsdp.x": 4 * 3 * block,
        "fsdp.y": 3 * block,
    }
    assert json["collectives_by_axis"]["fsdp"]["all-gather"]["wire_bytes"] == 15 * block
    assert "in fsdp.y" in result.render()
    told = json["written"]
    assert told["weights"] == {
        "wire_bytes": 16 * block,
        "compiled_bytes": 15 * block,
        "bound_bytes": 30 * block,
    }
    assert told["by_stage"] == {
        "fsdp.x": {"wire_bytes": 13 * block, "compiled_bytes": 12 * block},
        "fsdp.y": {"wire_bytes": 0, "compiled_bytes": 3 * block},
    }
    assert "compiled 61.44 kB, 0.50 of it" in result.render()


def test_permutes_are_in_flight_beside_the_products_they_do_not_feed():
    topology, mesh = machine()

    def shard(weights, x):
        def body(x, up):
            sums = jnp.zeros((x.shape[0], MLP), x.dtype)
            for turn in range(4):
                rows = jax.lax.dynamic_slice_in_dim(x, turn * (EMBED // 4), EMBED // 4, 1)
                sent = jax.lax.ppermute(up, "fsdp", [(i, (i + 1) % 4) for i in range(4)])
                sums, up = sums + rows @ up, sent
            return x + sums[:, :EMBED], None

        return jax.lax.scan(body, x, weights["up"])[0]

    mapped = jax.shard_map(shard, mesh=mesh, in_specs=(P(None, "fsdp"), P("fsdp")), out_specs=P("fsdp"))
    lowered = jax.jit(mapped).lower(weights_on(mesh), struct(mesh, (64 * BATCH, EMBED), "fsdp"))
    result = aot.compile_lowered(lowered, topology=topology, mesh=mesh)
    found = result.to_json()["overlap"]
    total = found["by_axis"]["fsdp"]["collective-permute"]
    assert (total["async_bytes"], total["sync_bytes"]) == (LAYERS * 3 * EMBED // 4 * MLP * 2, 0)
    assert {flight["times"] for flight in found["flights"]} == {LAYERS} and len(found["flights"]) == 3
    product = 2 * 16 * BATCH * EMBED // 4 * MLP / topology.peak_flops
    assert LAYERS * product <= total["between_seconds"] <= found["beside_seconds"] <= found["compute_seconds"]
    assert found["by"] == "peak" and not any("no done" in note for note in result.notes)
    assert "ms of compute between" in result.render()


def test_a_cube_of_v5p_gathers_along_its_torus():
    topology, mesh = machine("v5p-128")
    assert (
        "all-reduce"
        not in aot.compile_lowered(
            jax.jit(lambda w: w * 2, out_shardings=NamedSharding(mesh, P())).lower(
                struct(mesh, (4096, 512), "fsdp")
            ),
            topology=topology,
            mesh=mesh,
        ).costs.collectives
    )


def test_a_kernel_is_listed_by_name():
    def double(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    topology, mesh = machine()
    cost = pl.CostEstimate(flops=1000, bytes_accessed=10, transcendentals=0)

    def shard(x):
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        call = pl.pallas_call(double, out_shape=out, name="double", cost_estimate=cost)
        return call(call(x))

    mapped = jax.shard_map(shard, mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp"), check_vma=False)
    lowered = jax.jit(mapped).lower(struct(mesh, (64, 128), "fsdp"))
    result = aot.compile_lowered(lowered, topology=topology, mesh=mesh)
    assert result.to_json()["kernels"] == [{"name": "double", "count": 2, "claimed_flops": 2000}]
    assert "double x2" in result.render()


def test_offloaded_residuals_lie_in_host_memory_and_cross_twice():
    topology, mesh = machine()
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["hidden"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def body(x, weights):
        hidden = checkpoint_name(jax.nn.relu(x @ weights["up"]), "hidden")
        return x + hidden @ weights["down"], None

    def loss(weights, x):
        return (
            jax.lax.scan(jax.checkpoint(body, policy=policy), x, weights)[0].astype(jnp.float32) ** 2
        ).mean()

    x = struct(mesh, (4096, EMBED), "fsdp")
    lowered = jax.jit(jax.grad(loss)).lower(weights_on(mesh), x)
    result = aot.compile_lowered(lowered, topology=topology, mesh=mesh)
    moved = LAYERS * 1024 * MLP * 2
    assert result.memory["host_temp"] == moved
    transfers = result.to_json()["host_transfers"]
    assert {way: (t["count"], t["wire_bytes"]) for way, t in transfers.items()} == {
        "to_host": (LAYERS, moved),
        "from_host": (LAYERS, moved),
    }


def test_a_program_too_large_is_refused_with_its_largest_buffers_and_remedies():
    topology, mesh = machine()
    lowered = jax.jit(lambda x: jnp.sort(x @ x.T, axis=0).sum(1)).lower(struct(mesh, (1 << 18, 128), "fsdp"))
    with pytest.raises(aot.OutOfDeviceMemory) as refusal:
        aot.compile_lowered(lowered, topology=topology, mesh=mesh)
    largest = refusal.value.largest[0]
    assert largest.nbytes > topology.hbm and largest.kind == "temp"
    message = str(refusal.value)
    first = message.splitlines()[0]
    assert first.startswith("out of device memory on v5e:2x2: ") and first.endswith("a device has 15.75GiB")
    assert str(largest) in message and "0.00 GB" not in message
    assert largest.what and "jax.checkpoint" in message


def test_a_kernel_that_exceeds_its_own_memory_is_no_matter_of_device_memory():
    def copy(x_ref, out_ref, scratch_ref):
        scratch_ref[:64] = x_ref[...]
        out_ref[...] = scratch_ref[:64]

    def shard(x):
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        scratch = pltpu.VMEM((1 << 20, 128), x.dtype)
        return pl.pallas_call(copy, out_shape=out, scratch_shapes=[scratch], name="copy")(x)

    topology, mesh = machine()
    mapped = jax.shard_map(shard, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    with pytest.raises(aot.CompilerError, match="vmem"):
        aot.compile_lowered(
            jax.jit(mapped).lower(struct(mesh, (64, 128))), topology=topology, mesh=mesh, full=True
        )


@pytest.mark.slow  # two compilations
def test_any_other_error_of_the_compiler_is_passed_on():
    topology, mesh = machine()
    call = jax.ffi.ffi_call("no_such_target", jax.ShapeDtypeStruct((64, 128), jnp.bfloat16))
    lowered = jax.jit(call).lower(struct(mesh, (64, 128)))
    assert aot.compile_lowered(lowered, topology=topology, mesh=mesh).notes  # that it can't be seen yet
    with pytest.raises(aot.CompilerError, match="no_such_target"):
        aot.compile_lowered(lowered, topology=topology, mesh=mesh, full=True)


def test_progress_is_told_and_an_interruption_leaves_nothing_behind(monkeypatch, scratch):
    monkeypatch.setattr(aot, "PROGRESS_SECONDS", 0.0)
    topology, mesh = machine()

    def interrupt(line: str) -> None:
        assert line.startswith("compiling: ")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        aot.compile_lowered(gathering(mesh), topology=topology, mesh=mesh, progress=interrupt)
    assert len(scratch) == 1  # and the fixture sees that it has ended


def test_a_child_that_dies_is_an_error_with_its_last_words(monkeypatch):
    monkeypatch.setattr(aot.sys, "executable", "/bin/false")
    topology, mesh = machine()
    with pytest.raises(aot.CompilerError, match="the compiler's process died"):
        aot.compile_lowered(gathering(mesh), topology=topology, mesh=mesh)


@pytest.mark.slow  # two compilations at once
def test_two_compilations_run_side_by_side_from_any_directory(monkeypatch, tmp_path):
    monkeypatch.chdir(pathlib.Path(tmp_path.anchor))
    topology, mesh = machine()
    lowered = gathering(mesh)
    results: list[aot.Result] = []

    def compile_one() -> None:
        results.append(aot.compile_lowered(lowered, topology=topology, mesh=mesh))

    threads = [threading.Thread(target=compile_one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2 and results[0].costs == results[1].costs
