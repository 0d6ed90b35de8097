"""The README's programs run as they stand."""

import pathlib
import re

import pytest

README = (pathlib.Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.mark.slow  # compiles a training step for eight devices
@pytest.mark.parametrize("program", [text for language, text in BLOCKS if language == "python"])
def test_python_in_the_readme_runs(program, capsys):
    namespace: dict[str, object] = {}
    exec(compile(program, "README.md", "exec"), namespace)
    assert "shard: did" in capsys.readouterr().out
    assert float(namespace["metrics"]["loss"]) > 0  # type: ignore[index]


def test_the_plan_in_the_readme_loads():
    from xform.plan import Plan

    (text,) = [t for language, t in BLOCKS if language == "toml" and "[mesh]" in t]
    plan = Plan.loads(text)
    assert dict(plan.mesh) == {"fsdp": 16, "tensor": 4}
    assert Plan.loads(plan.dumps()) == plan


def test_every_command_in_the_readme_exists():
    from xform import cli

    shell = " ".join(t for language, t in BLOCKS if language == "sh").replace("\\\n", " ")
    commands = set(re.findall(r"\bxform (\w+)", shell))
    assert commands == {"axes", "explain", "dump", "check", "aot", "passes"}
    assert all(callable(getattr(cli, name)) for name in commands)
