"""The README's programs run as they stand."""

import pathlib
import re
import shlex
import subprocess
import sys
from typing import Any

import jax
import pytest

from tests.processes import environment

README = (pathlib.Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.mark.slow  # compiles a training step for eight devices
def test_python_in_the_readme_runs(capsys):
    namespace: dict[str, object] = {}
    (program,) = [text for language, text in BLOCKS if language == "python" and "import xform" in text]
    exec(compile(program, "README.md", "exec"), namespace)
    assert "shard: laid out" in capsys.readouterr().out
    assert float(namespace["metrics"]["loss"]) > 0  # type: ignore[index]


def test_serving_in_the_readme_runs() -> None:
    namespace: dict[str, Any] = {}
    (program,) = [text for language, text in BLOCKS if language == "python" and "step.quantize" in text]
    exec(compile(program, "README.md", "exec"), namespace)
    assert namespace["logits"].shape == (8, 64, 320)
    assert "int8" in {str(x.dtype) for x in jax.tree.leaves(namespace["codes"])}


@pytest.mark.slow  # compiles for a TPU
def test_the_readme_s_own_program_does_what_its_commands_say(tmp_path):
    (program,) = [text for language, text in BLOCKS if language == "python" and "# mine.py" in text]
    (commands,) = [text for language, text in BLOCKS if language == "sh" and "mine:" in text]
    (tmp_path / "mine.py").write_text(program)
    env = environment() | {"PYTHONPATH": str(pathlib.Path(__file__).parent.parent)}
    said = []
    for line in commands.splitlines():
        words = shlex.split(line, comments=True)[1:]
        run = [sys.executable, "-m", "xform", *words]
        said.append(
            subprocess.run(run, cwd=tmp_path, env=env, capture_output=True, text=True, check=True).stdout
        )
    assert said[0].startswith("agrees") and "cycles" in said[1]
    assert "donated arrays reused by results: 7 of 7" in said[1]


def test_the_plans_in_the_readme_load():
    from xform.plan import Plan

    plans = [Plan.loads(t) for language, t in BLOCKS if language == "toml" and "[mesh]" in t]
    meshes = [{"fsdp": 16, "tensor": 4}, *[{"fsdp": 16}] * 4]
    assert [dict(plan.mesh) for plan in plans] == meshes
    assert all(Plan.loads(plan.dumps()) == plan for plan in plans)


def test_every_command_in_the_readme_exists():
    from xform import commands

    shell = " ".join(t for language, t in BLOCKS if language == "sh").replace("\\\n", " ")
    named = set(re.findall(r"\bxform (\w+)", shell))
    assert named == {"axes", "explain", "dump", "check", "aot", "passes", "schedule"}
    assert all(callable(getattr(commands, name)) for name in named)
