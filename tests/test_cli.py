"""The command line, run as a user runs it."""

import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
LOSS, STEP = "tests.targets_for_tests:loss", "tests.targets_for_tests:step"


def xform(*args: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    import os

    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    done = subprocess.run(
        [sys.executable, "-m", "xform", *args], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done


pytestmark = pytest.mark.slow  # every test starts a process that imports jax


def test_axes_prints_roles_and_json():
    assert "vocab" in xform("axes", LOSS).stdout
    found = json.loads(xform("axes", LOSS, "--json").stdout)
    assert found["inputs"]["[0]['table']"] == [["vocab"], ["embed"]]
    assert found["inputs"]["[1]"][0] == ["batch"]
    assert {"role": "vocab", "size": 56} in found["axes"]


def test_explain_says_why():
    out = xform("explain", STEP, "--mesh", "fsdp=8", "['table']").stdout
    assert "[0]['table']: float32[56,24] P(None, 'fsdp')" in out.replace("PartitionSpec", "P")
    assert "parameter, vocab x embed: vocab whole, embed_vocab -> fsdp" in out


def test_explain_names_the_nearest_path():
    err = xform("explain", STEP, "--mesh", "fsdp=8", "tabel", code=2).stderr
    assert "no input is called 'tabel'; did you mean [0]['table']" in err


def test_dump_shows_the_diff_the_report_and_a_page(tmp_path):
    out = xform("dump", STEP, "--mesh", "fsdp=8").stdout
    assert "== shard (diff)" in out and "+ " in out and "sharding_constraint" in out
    assert "# shard: did" in out
    page = tmp_path / "page.html"
    xform("dump", STEP, "--mesh", "fsdp=8", "--html", str(page))
    text = page.read_text()
    assert "sharding_constraint" in text and "http" not in text.split("<body")[0]


def test_dump_before_after_and_stablehlo():
    assert (
        "sharding_constraint" not in xform("dump", STEP, "--mesh", "fsdp=8", "--before").stdout.split("#")[0]
    )
    assert "sharding_constraint" in xform("dump", STEP, "--mesh", "fsdp=8", "--after").stdout
    assert "sdy.sharding_constraint" in xform("dump", STEP, "--mesh", "fsdp=8", "--stablehlo").stdout
    err = xform("dump", STEP, "--mesh", "fsdp=8", "--pass", "remat", code=2).stderr
    assert "--pass remat: the plan's passes are shard" in err


def test_check_agrees_and_has_json():
    found = json.loads(xform("check", LOSS, "--plan", "fsdp:8", "--devices", "8", "--json").stdout)
    assert found["ok"] is True and found["first_difference"] is None
    assert found["max_rel_error"] < found["tolerance"]
    assert {"ok", "max_abs_error", "max_rel_error", "first_difference"} <= set(found)


def test_check_exits_with_one_beyond_the_tolerance():
    out = xform("check", LOSS, "--plan", "fsdp:8", "--tolerance", "0", code=1).stdout
    assert "DIFFERS, first at [0]" in out


def test_a_plan_file_is_read(tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text('[mesh]\nfsdp = 4\ntensor = 2\n\n[shard.rules]\nembed_vocab = ["fsdp"]\n')
    assert xform("check", LOSS, "--plan", str(plan)).stdout.startswith("agrees")
    plan.write_text("[mesh]\nfsdp = 8\n\n[shrad]\n")
    assert "shard" in xform("check", LOSS, "--plan", str(plan), code=2).stderr


def test_passes_lists_options_and_defaults():
    assert "sequence_parallel" in xform("passes").stdout
    assert "shard" in json.loads(xform("passes", "--json").stdout)


@pytest.mark.parametrize(
    "args, says",
    [
        (["check", LOSS], "no plan: give --plan"),
        (["check", LOSS, "--mesh", "fsdp=3", "--devices", "8"], "8"),
        (["check", "xform.models.lama:loss", "--mesh", "fsdp=8"], "no module 'xform.models.lama'"),
        (["aot", LOSS, "--mesh", "fsdp=4", "--topology", "v5x-16"], "v5"),
        (["aot", STEP, "--mesh", "fsdp=8", "--topology", "v5e:2x2"], "4"),
    ],
)
def test_bad_input_is_one_line_that_names_it(args, says):
    err = xform(*args, code=2).stderr
    assert says in err.splitlines()[-1], err


def test_aot_reports_and_has_json(tmp_path):
    hlo = tmp_path / "step.hlo"
    args = ("aot", STEP, "--mesh", "fsdp=4", "--topology", "v5e:2x2", "--json", "--save-hlo", str(hlo))
    found = json.loads(xform(*args).stdout)
    assert set(found["seconds"]) >= {"trace", "rewrite", "lower", "compile"}
    assert set(found["memory"]) >= {"argument", "output", "temp", "peak", "host_temp"}
    assert found["memory"]["argument"] > 0 and found["full"] is False and found["cycles"] is None
    assert all({"count", "wire_bytes"} <= set(c) for c in found["collectives"].values())
    assert found["dot_flops"] > 0 and found["kernels"] == []
    assert any("donated arguments: 0" in note for note in found["notes"])
    assert hlo.read_text().startswith("HloModule")
