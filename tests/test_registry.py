"""Passes are found by name: the built-in ones, and those that other packages bring."""

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import pytest

from xform import registry
from xform.errors import PlanError

CHECKOUT = pathlib.Path(__file__).parents[1]
type Choice = Literal["one", "two"]
THIRD_PARTY = pathlib.Path(__file__).parent / "third_party"


def install(folder: pathlib.Path, name: str, version: str, entry_points: dict[str, str]) -> None:
    """Writes what an installer leaves of a distribution with entry points: enough for it to be found."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [f"{key} = {value}" for key, value in entry_points.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{registry.GROUP}]", *lines, ""]))


@dataclasses.dataclass(frozen=True)
class Sample:
    """A pass.

    policy: which tensors to save,
        and which to keep: none.
    axes: where to.

    plainly: no option.
    """

    ratio: float
    policy: str | None = None
    axes: tuple[str, ...] = ("data",)
    plain: bool = False
    derived: int = dataclasses.field(default=0, init=False)
    stages: ClassVar[tuple[str, ...]] = ("step",)


def test_every_builtin_row_is_a_pass_with_a_lower_case_name() -> None:
    for name in registry.BUILTIN:
        cls = registry.find(name)
        assert dataclasses.is_dataclass(cls) and callable(cls.rewrite) and cls.stages, name
        assert name == name.lower()
        assert registry.name_of(cls) == name


def test_options_are_the_fields_with_types_defaults_and_sentences() -> None:
    ratio, policy, axes, plain = registry.options(Sample)
    assert ratio == registry.Option("ratio", "float", dataclasses.MISSING, "")
    assert policy == registry.Option(
        "policy", "str | None", None, "which tensors to save, and which to keep: none."
    )
    assert axes == registry.Option("axes", "tuple[str, ...]", ("data",), "where to.")
    assert plain == registry.Option("plain", "bool", False, "")
    assert str(policy).splitlines()[0] == "policy: str | None = None"
    assert json.loads(json.dumps([ratio.to_json(), axes.to_json()])) == [
        {"name": "ratio", "type": "float", "doc": ""},
        {"name": "axes", "type": "tuple[str, ...]", "default": ["data"], "doc": "where to."},
    ]


def test_every_option_of_a_builtin_pass_is_described() -> None:
    for name in registry.BUILTIN:
        for option in registry.options(registry.find(name)):
            assert option.doc, f"{name}: {option.name}"


def test_an_unknown_name_is_answered_with_the_nearest_one() -> None:
    with pytest.raises(PlanError, match=r"no pass 'shrad' \(did you mean 'shard'\?\); there is: .*shard"):
        registry.find("shrad")


def test_a_class_that_is_not_registered_has_no_name() -> None:
    with pytest.raises(
        PlanError, match=r"Sample of module .*test_registry .*entry point of the group 'xform.passes'"
    ):
        registry.name_of(Sample)


def test_option_types_that_cannot_be_read_are_named() -> None:
    cls = dataclasses.make_dataclass("Broken", [("x", "NoSuchType", None)])
    with pytest.raises(PlanError, match="option types of the pass Broken cannot be read"):
        registry.field_types(cls)


def test_a_pass_of_another_package_is_found_listed_loaded_and_run(tmp_path: pathlib.Path) -> None:
    shutil.copy(THIRD_PARTY / "xform_tally.py", tmp_path)
    project = tomllib.loads((THIRD_PARTY / "pyproject.toml").read_text())["project"]
    install(tmp_path, project["name"], project["version"], project["entry-points"][registry.GROUP])
    program = """
import json, types
import jax
from xform import registry
from xform.plan import Pass, Plan
from xform.report import Report

text = '[mesh]\\nfsdp = 4\\n\\n[tally]\\nonly = ["sin"]\\n'
plan = Plan.loads(text)
(tally,) = plan.passes
report = Report()
jaxpr = jax.make_jaxpr(lambda x, y: jax.numpy.sin(x * y))(1.0, 2.0)
same = tally.rewrite(jaxpr, types.SimpleNamespace(report=report)) is jaxpr
print(json.dumps({
    "names": registry.names(), "is_pass": isinstance(tally, Pass), "only": tally.only, "again": plan.dumps()
    == text, "same": same, "notes": report.lines(), "flag": Plan.from_flags("fsdp=4", ["shard",
    "tally:only=sin"]).passes[-1] == tally, "options": [[o.name, o.type, o.doc] for o in
    registry.options(type(tally))],
}))
"""
    path = os.pathsep.join([str(tmp_path), str(CHECKOUT)])
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert run.returncode == 0, run.stderr
    got: dict[str, Any] = json.loads(run.stdout)
    assert got == {
        "names": [*registry.BUILTIN, "tally"],
        "is_pass": True,
        "only": ["sin"],
        "again": True,
        "same": True,
        "notes": ["tally: 1 equations"],
        "flag": True,
        "options": [
            ["only", "tuple[str, ...]", "primitives to count; all where none is named."],
            ["label", "str", "what the note calls them."],
        ],
    }


def test_two_packages_with_a_pass_of_one_name_are_both_named(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "one", "1.0", {"twice": "one:Twice", "shard": "one:Shard"})
    install(tmp_path, "two", "2.0", {"twice": "two:Twice"})
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        PlanError, match=r"two passes are called 'twice'.*one 1.0 \(one:Twice\).*two 2.0 \(two:Twice\)"
    ):
        registry.find("twice")
    with pytest.raises(
        PlanError, match=r"'shard': of one 1.0 \(one:Shard\) and xform itself \(.*\): uninstall one"
    ):
        registry.find("shard")
    assert registry.names().count("twice") == registry.names().count("shard") == 1


def test_a_package_installed_twice_offers_its_pass_once(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(THIRD_PARTY / "xform_tally.py", tmp_path)
    for copy in ("a", "b"):
        install(tmp_path / copy, f"tally-{copy}", "1", {"tally": "xform_tally:Tally"})
        monkeypatch.syspath_prepend(tmp_path / copy)
    monkeypatch.syspath_prepend(tmp_path)
    assert registry.find("tally").__name__ == "Tally"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (None, "cannot be loaded from brought:Thing: ModuleNotFoundError: No module named 'brought'"),
        ("1 / 0", "cannot be loaded from brought:Thing: ZeroDivisionError"),
        ("Other = 1", "cannot be loaded from brought:Thing: AttributeError"),
        ("class Thing: pass", "brought:Thing, is not a dataclass"),
    ],
)
def test_a_pass_that_cannot_be_loaded_says_who_brought_it_and_why(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, source: str | None, reason: str
) -> None:
    install(tmp_path, "bringer", "0.1", {"thing": "brought:Thing"})
    if source is not None:
        (tmp_path / "brought.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "brought", raising=False)
    assert "thing" in registry.names()
    with pytest.raises(PlanError, match=f"the pass 'thing' of bringer 0.1.*{reason}"):
        registry.find("thing")
    monkeypatch.delitem(sys.modules, "brought", raising=False)


@pytest.mark.parametrize("name", ["mesh", "axes", "Upper", "two-words"])
def test_a_name_that_no_plan_file_could_use_is_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    install(tmp_path, "bringer", "0.1", {name: "brought:Thing"})
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PlanError, match=f"bringer 0.1 calls a pass '{name}': the name must be lower-case"):
        registry.find(name)


def test_the_choices_of_an_option_are_shown_where_its_type_has_a_name() -> None:
    @dataclasses.dataclass(frozen=True)
    class Choosing:
        choice: Choice = "one"
        names: Sequence[str] = ()

    assert [o.type for o in registry.options(Choosing)] == ["Literal['one', 'two']", "Sequence[str]"]
