"""The command line, run as a user runs it."""

import json
import signal
import subprocess
import sys
import time

import pytest

from tests import processes
from tests.processes import ROOT, environment

XFORM = [sys.executable, "-m", "xform"]
LOSS, STEP = "tests.targets_for_tests:loss", "tests.targets_for_tests:step"


def xform(*args: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = processes.xform(*args)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done


pytestmark = pytest.mark.slow  # processes that import jax, run programs and compile them


def test_axes_prints_roles_and_json():
    assert "vocab" in xform("axes", LOSS).stdout
    found = json.loads(xform("axes", LOSS, "--json").stdout)
    assert found["inputs"]["[0]['table']"] == [["vocab"], ["embed"]]
    assert found["inputs"]["[1]"][0] == ["batch"]
    assert {"role": "vocab", "size": 56} in found["axes"]


def test_axes_of_many_layers_fit_a_page():
    out = xform("axes", "xform.models.llama:train_step", "-s", "scan=false", "-s", "layers=12").stdout
    axes, inputs, tensors = out.split("\n\n")
    assert "[0..11]" in inputs and ".mu, .nu" in inputs and len(out.splitlines()) < 60
    assert max(map(len, [*axes.splitlines(), *inputs.splitlines()])) <= 100
    assert [line.split()[:2] for line in tensors.splitlines()][2] == ["query_proj", "12"]


def test_axes_are_called_what_a_plan_calls_them(tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text("[mesh]\nfsdp = 8\n\n[axes]\nfeatures = \"[0]['table'][1]\"\n\n[shard]\n")
    found = json.loads(xform("axes", LOSS, "--plan", str(plan), "--json").stdout)
    assert found["inputs"]["[0]['table']"] == [["vocab"], ["features"]]
    plan.write_text(plan.read_text().replace("table", "tabel"))
    assert "[0]['table']" in xform("axes", LOSS, "--plan", str(plan), code=2).stderr


def test_explain_says_why():
    out = xform("explain", STEP, "--mesh", "fsdp=8", "['table']").stdout
    assert "[0]['table']: float32[56,24] P(None, 'fsdp')" in out.replace("PartitionSpec", "P")
    assert "parameter, vocab x embed: vocab whole (no tensor, " in out and "embed_vocab -> fsdp" in out


def test_explain_names_the_nearest_path():
    err = xform("explain", STEP, "--mesh", "fsdp=8", "tabel", code=2).stderr
    assert "no input is called 'tabel'; did you mean [0]['table']" in err


def test_dump_shows_the_diff_the_report_and_a_page(tmp_path):
    out = xform("dump", STEP, "--mesh", "fsdp=8").stdout
    assert "== shard (diff)" in out and "+ " in out and "sharding_constraint" in out
    assert "# shard: laid out" in out
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


def test_dump_and_explain_give_the_step_its_weights_as_codes():
    serve = ["xform.models.llama:forward", "-s", "size=tiny", "--mesh", "fsdp=8", "--use", "shard"]
    serve += ["--use", "quantize:recipe=int8_weights", "--codes"]
    assert "i8[2,96,224]" in xform("dump", *serve, "--after").stdout
    both = xform("dump", *serve, "--stablehlo").stdout
    assert "tensor<2x96x224xf32>" in both and "tensor<2x96x224xi8>" in both
    assert "['up']['kernel'].codes: int8[2,96,224] P(None, 'fsdp'" in xform("explain", *serve, "up").stdout
    err = xform("dump", STEP, "--mesh", "fsdp=8", "--codes", code=2).stderr
    assert "no weights to be stored as codes: its plan has no quantize" in err


def test_check_agrees_and_has_json():
    found = json.loads(xform("check", LOSS, "--plan", "fsdp:8", "--devices", "8", "--json").stdout)
    assert found["ok"] is True and found["first_difference"] is None
    assert found["max_rel_error"] < found["tolerance"]
    assert {"ok", "max_abs_error", "max_rel_error", "first_difference"} <= set(found)


def test_check_exits_with_one_beyond_the_tolerance():
    out = xform("check", LOSS, "--plan", "fsdp:8", "--tolerance", "0", code=1).stdout
    assert "DIFFERS, first at [" in out


def test_a_plan_file_is_read(tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text('[mesh]\nfsdp = 4\ntensor = 2\n\n[shard.rules]\nembed_vocab = ["fsdp"]\n')
    assert xform("check", LOSS, "--plan", str(plan)).stdout.startswith("agrees")
    plan.write_text("[mesh]\nfsdp = 8\n\n[shrad]\n")
    assert "shard" in xform("check", LOSS, "--plan", str(plan), code=2).stderr


def test_check_says_when_the_plan_left_the_program_as_it_was():
    assert "compared with itself" not in xform("check", LOSS, "--plan", "fsdp:8").stdout
    assert "compared with itself" in xform("check", LOSS, "--plan", "fsdp:16").stdout


def test_a_plan_without_passes_is_said_to_be_one(tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text("[mesh]\nfsdp = 8\n")
    assert "has no passes, such as [shard]" in xform("explain", LOSS, "--plan", str(plan), "['w']").stderr


def test_what_the_users_program_prints_is_kept_out_of_the_json():
    done = xform("check", "tests.targets_for_tests:noisy", "--plan", "fsdp:8", "--json")
    assert json.loads(done.stdout)["ok"]
    for place in ("factory", "trace", "run"):
        assert f"from the {place}" in done.stderr


def test_a_program_that_fails_is_shown_by_the_users_own_line():
    err = xform("axes", "tests.targets_for_tests:shapes_clash", code=2).stderr
    assert err.startswith("xform: your program failed: TypeError: dot_general requires")
    assert err.splitlines()[-1].strip().startswith("tests/targets_for_tests.py:")


def test_a_reader_who_leaves_early_is_no_error():
    for args in (["dump", STEP, "--mesh", "fsdp=8"], ["passes"]):
        with subprocess.Popen(
            [*XFORM, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, env=environment()
        ) as run:
            run.stdout.close()
            assert run.stderr.read() == b"" and run.wait() == 0


@pytest.mark.parametrize("which, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_compilation_says_so_and_leaves_nothing_behind(tmp_path, which, code):
    args = ["aot", "xform.models.llama:train_step", "--mesh", "fsdp=4", "--topology", "v5e:2x2", "--full"]
    with subprocess.Popen(
        [*XFORM, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        env={**environment(), "TMPDIR": str(tmp_path)},
        # A shell has what it runs in the background ignore SIGINT, and that is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as run:  # fmt: skip
        while not list(tmp_path.glob("xform-aot-*/dump")):  # the compiler is at work
            assert run.poll() is None
            time.sleep(0.05)
        run.send_signal(which)
        err = run.stderr.read()
        assert run.wait() == code and "Traceback" not in err
    assert ("xform: interrupted" in err) == (which == signal.SIGINT)
    assert not list(tmp_path.glob("xform-*"))


def test_it_runs_from_any_directory(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import jax.numpy as jnp\ndef f():\n    return jnp.tanh, (jnp.ones(8),)\n"
    )
    env = {**environment(), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*XFORM, "axes", "mine:f"], capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 0 and "f32[8]" in done.stdout


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
        (["aot", STEP, "--mesh", "fsdp=4", "--topology", "v5e:2x2", "--donate", "7"], "which are 0 to 1"),
        (["check", "xform.models.llama:loss", "-s", "size=70b", "--plan", "fsdp:8"], "smaller size"),
    ],
)
def test_bad_input_is_one_line_that_names_it(args, says):
    err = xform(*args, code=2).stderr
    said = [line for line in err.splitlines() if "for v5e" not in line]  # progress
    assert len(said) == 1 and says in said[0] and said[0].startswith("xform"), err


def test_aot_reports_and_has_json(tmp_path):
    hlo = tmp_path / "step.hlo"
    args = ("aot", STEP, "--mesh", "fsdp=4", "--topology", "v5e:2x2", "--json", "--save-hlo", str(hlo))
    found = json.loads(xform(*args).stdout)
    assert set(found["seconds"]) >= {"trace", "rewrite", "lower", "compile"}
    assert set(found["memory"]) >= {"argument", "output", "temp", "peak", "host_temp"}
    assert found["memory"]["argument"] > 0 and found["full"] is False and found["cycles"] is None
    assert all({"count", "wire_bytes"} <= set(c) for c in found["collectives"].values())
    assert found["dot_flops"] > 0 and found["kernels"] == []
    assert "donated arrays reused by results: 2 of 2 (8.19 kB)" in found["notes"]
    assert found["ideal_dot_flops"] == found["dot_flops"]
    assert hlo.read_text().startswith("HloModule")


def test_aot_tells_what_is_written_from_what_is_compiled():
    plan = ("--mesh", "fsdp=4,tensor=2", "--use", "shard:collectives=explicit", "--topology", "v5e:2x4")
    target = ("xform.models.llama:train_step", "-s", "size=tiny")
    found = json.loads(xform("aot", *target, *plan, "--json").stdout)
    written, sizes = found["written"], found["collectives"].values()
    assert sum(s["compiled_bytes"] for s in written["by_stage"].values()) == pytest.approx(
        sum(kind["wire_bytes"] for kind in sizes), abs=10
    )
    assert sum(s["wire_bytes"] for s in written["by_stage"].values()) == pytest.approx(
        written["wire_bytes"], abs=10
    )
    assert 0 < written["weights"]["bound_bytes"] < written["wire_bytes"]
    out = xform("aot", *target, *plan).stdout
    assert "for weights and their gradients, compiled" in out
    rows = [line for line in out.splitlines() if line.startswith("shard") and line.endswith("activations")]
    assert len(rows) <= 9 and max(map(len, out.split("promises")[0].splitlines())) < 200


def test_dump_raise_prints_what_is_recognised_and_takes_no_plan():
    target = ["dump", "xform.models.llama:loss", "-s", "size=tiny", "--raise"]
    assert "mask causal" in xform(*target).stdout
    found = json.loads(xform(*target, "--json").stdout)
    assert {each["op"] for each in found["raised"]} == {"attention", "cross_entropy", "layers", "norm"}
    assert "--mesh has no part in it" in xform(*target, "--mesh", "fsdp=8", code=2).stderr
