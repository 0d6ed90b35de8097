"""A plan is a mesh and a list of passes; it reads and writes as TOML.

    [mesh]                      Plan(
    fsdp = 16                       mesh={"fsdp": 16, "tensor": 4},
    tensor = 4                      dcn={"data": 2},
                                    passes=[Shard(), Remat(policy="minimal")],
    [mesh.dcn]                  )
    data = 2

    [shard]

    [remat]
    policy = "minimal"

A pass is a frozen dataclass whose fields are its options: its table has the pass's registered name, and the
options that differ from their defaults as keys. Passes have an order that follows from what they need, so the
order of the tables says nothing; a second pass of a kind makes the table an array, `[[remat]]`, in the order
in which the two are given.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import tomllib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, Self, runtime_checkable

from xform import registry
from xform.errors import PlanError
from xform.faults import text_of
from xform.registry import unknown
from xform.values import Frozen, fit, fit_flag, freeze, split, toml_table, written

STAGES = ("model", "step", "compiler")
_EMPTY = Frozen()


@runtime_checkable
class Pass(Protocol):
    """What every pass is: a frozen dataclass that takes a program to a program.

    `stages`, a class variable, says where it acts: on the "model" (the function about to be differentiated),
    on the "step" (the whole traced function) or in the "compiler". `context` is what `xform.api` hands to a
    pass: the mesh, the roles of the axes and the report. A pass that changes numbers by intent says so by a
    class variable `exact = False`: `xform check` gives it to both programs.
    """

    @property
    def stages(self) -> Collection[str]: ...

    def rewrite(self, jaxpr: Any, context: Any) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a program is to be rewritten. Immutable and hashable; `Plan.loads(plan.dumps()) == plan`.

    mesh: the axes within a slice (over ICI) by name, in order, and their sizes; one may be -1, what is left
    of the devices. dcn: the same between slices. An axis in both has the product of both sizes. passes: in
    any order. axes: names for axes whose role cannot be told: role -> where it is, "path[dimension]", or a
    list. Raises `PlanError` for a size, a name or an option that cannot be.
    """

    mesh: Mapping[str, int]
    passes: Sequence[Pass] = ()
    dcn: Mapping[str, int] = _EMPTY
    axes: Mapping[str, Any] = _EMPTY

    def __post_init__(self) -> None:
        if not isinstance(self.passes, list | tuple):
            raise PlanError(f"passes: expected a list of passes, got {self.passes!r}")
        passes = [_fitted(each) for each in self.passes]
        kinds = list(dict.fromkeys(type(each) for each in passes))
        object.__setattr__(self, "mesh", _sizes(self.mesh, "[mesh]"))
        object.__setattr__(self, "dcn", _sizes(self.dcn, "[mesh.dcn]"))
        object.__setattr__(self, "axes", fit(self.axes, Mapping[str, str | Sequence[Any]], "[axes]"))
        # Passes of a kind stand together: their order is all that a plan file keeps.
        object.__setattr__(self, "passes", tuple(sorted(passes, key=lambda each: kinds.index(type(each)))))

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The axes of the mesh, outermost first: those between slices, then those within one."""
        return (*(name for name in self.dcn if name not in self.mesh), *self.mesh)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """The plan in a TOML file; a `PlanError` names the file, and the table and key that are wrong."""
        return cls.loads(text_of(path), os.fspath(path))

    @classmethod
    def loads(cls, text: str, source: str = "plan") -> Self:
        """The plan in a TOML text. `source` begins every error."""
        try:
            tables = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise PlanError(f"{source}: {error}") from error
        try:
            mesh = _table(tables.pop("mesh", {}), "[mesh]")
            dcn = _table(mesh.pop("dcn", {}), "[mesh.dcn]")
            inner = next((name for name, value in mesh.items() if isinstance(value, dict)), None)
            if inner is not None:
                raise PlanError(f"[mesh.{inner}]: the only table under [mesh] is [mesh.dcn], between slices")
            axes = _table(tables.pop("axes", {}), "[axes]")
            passes = [each for name, value in tables.items() for each in _passes_of(name, value)]
            return cls(mesh, passes, dcn, axes)
        except PlanError as error:
            raise PlanError(f"{source}: {error}") from error.__cause__

    def dumps(self) -> str:
        """The plan as TOML; a `PlanError` for a pass that has no registered name, or what TOML cannot say."""
        names = [registry.name_of(type(each)) for each in self.passes]
        mesh = {**self.mesh, **({"dcn": self.dcn} if self.dcn else {})}
        tables = [toml_table("[mesh]", mesh, "mesh")] if mesh else []
        if self.axes:
            tables.append(toml_table("[axes]", self.axes, "axes"))
        for name, each in zip(names, self.passes, strict=True):
            header = f"[[{name}]]" if names.count(name) > 1 else f"[{name}]"
            tables.append(toml_table(header, _changed(each), name))
        return "\n\n".join("\n".join(lines) for lines in tables) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan to a TOML file."""
        pathlib.Path(path).write_text(self.dumps(), encoding="utf-8")

    @classmethod
    def from_flags(cls, mesh: str = "", uses: Sequence[str] = ()) -> Self:
        """The plan that the flags `--mesh fsdp=4,tensor=4,dcn.data=2` and `--use remat:policy=minimal` make.

        `uses` are passes by name with their options; a list is written `[a, b]`, an entry of a table
        `rules.embed=[fsdp]`. Shard with its defaults is added where none is named: a mesh alone is a plan.
        """
        ici: dict[str, int] = {}
        dcn: dict[str, int] = {}
        for key, value in _pairs(mesh, f"--mesh {mesh}"):
            group, name = (dcn, key.removeprefix("dcn.")) if key.startswith("dcn.") else (ici, key)
            if name in group:
                raise PlanError(f"--mesh {mesh}: the axis {name!r} is given twice")
            group[name] = fit_flag(value, int, f"--mesh {key}")
        passes = [_pass_of_flag(use) for use in uses]
        if not any(use.partition(":")[0].strip() == "shard" for use in uses):
            passes.insert(0, registry.find("shard")())
        return cls(ici, passes, dcn)


def _sizes(sizes: Mapping[str, int], where: str) -> Frozen:
    if not isinstance(sizes, Mapping):
        raise PlanError(f"{where}: expected axis = size, got {sizes!r}")
    for name, size in sizes.items():
        if not (isinstance(name, str) and name.isidentifier()) or name == "dcn":
            raise PlanError(
                f"{where}: {name!r} cannot be the name of an axis: letters, digits and _, and not dcn"
            )
        if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
            raise PlanError(
                f"{where} {name} = {written(size)}: the size of an axis is 1 or more, or -1 for what is left"
            )
    open_axes = [name for name, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise PlanError(f"{where}: only one axis can be -1, not {' and '.join(open_axes)}")
    return Frozen(sizes)


def _fitted(each: Pass) -> Pass:
    """The pass with its options checked and frozen."""
    cls = type(each)
    if isinstance(each, type) or not isinstance(each, Pass) or not dataclasses.is_dataclass(each):
        hint = f": write {each.__name__}()" if isinstance(each, type) else ""
        raise PlanError(f"{each!r} is not a pass (a frozen dataclass with `stages` and `rewrite`){hint}")
    if not each.stages or not set(each.stages) <= set(STAGES):
        raise PlanError(
            f"the pass {cls.__name__} acts on {sorted(each.stages)}: the stages are {', '.join(STAGES)}"
        )
    hints = registry.field_types(cls)
    changes = {}
    for field in dataclasses.fields(each):
        value = getattr(each, field.name)
        fitted = fit(value, hints[field.name], f"{cls.__name__}: {field.name}") if field.init else value
        if fitted is not value:
            changes[field.name] = fitted
    return dataclasses.replace(each, **changes) if changes else each


def _changed(each: Pass) -> dict[str, Any]:
    """The options of a pass that are not at their default, tables last, as TOML has them."""
    assert dataclasses.is_dataclass(each)
    defaults = {f.name: freeze(registry.default_of(f)) for f in dataclasses.fields(each) if f.init}
    changed = [(name, getattr(each, name)) for name in defaults if getattr(each, name) != defaults[name]]
    return dict(sorted(changed, key=lambda item: isinstance(item[1], Mapping)))


def _table(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise PlanError(f"{where}: expected a table, got {written(value)}")
    return value


def _passes_of(name: str, value: Any) -> list[Pass]:
    if not isinstance(value, dict) and not (
        isinstance(value, list) and all(isinstance(v, dict) for v in value)
    ):
        raise PlanError(
            f"{name} = {written(value)} stands in no table: "
            "sizes of axes go under [mesh], options under their pass"
        )
    try:
        cls = registry.find(name)
    except PlanError as error:
        raise PlanError(f"[{name}]: {error}") from error.__cause__
    return [_build(name, cls, table) for table in (value if isinstance(value, list) else [value])]


def _pass_of_flag(flag: str) -> Pass:
    """A pass from `name:key=value,key=value`."""
    name, _, text = flag.partition(":")
    where = f"--use {flag}"
    try:
        cls = registry.find(name.strip())
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from error.__cause__
    flat: dict[str, str] = {}
    tables: dict[str, dict[str, Any]] = {}
    for key, value in _pairs(text, where):
        option, dot, entry = key.partition(".")
        if dot:
            tables.setdefault(option, {})[entry] = fit_flag(value, Any, where)
        elif key in flat:
            raise PlanError(f"{where}: {key} is given twice")
        else:
            flat[key] = value
    hints = registry.field_types(cls)
    values = {
        key: fit_flag(value, hints[key], f"{where}: {key}") if key in hints else value
        for key, value in flat.items()
    }
    return _build(name.strip(), cls, values | tables, f"{where}: ")


def _build(name: str, cls: type[Any], values: Mapping[str, Any], source: str = "") -> Pass:
    """The pass made with these options; a `PlanError` for one that is unknown, missing or mistyped."""
    where, hints = f"{source}[{name}]", registry.field_types(cls)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    for key in values:
        if key not in fields:
            raise unknown("option", key, fields, where)
    for key, field in fields.items():
        if key not in values and registry.default_of(field) is dataclasses.MISSING:
            raise PlanError(f"{where}: {key} must be given: {registry.type_text(field.type)}")
    fitted = {key: fit(value, hints[key], f"{where} {key}") for key, value in values.items()}
    try:
        made: Pass = cls(**fitted)
    except (
        TypeError,
        ValueError,
    ) as error:  # PlanError is a ValueError: what the pass itself says of its options
        raise PlanError(f"{where}: {error}") from error
    return made


def _pairs(text: str, where: str) -> list[tuple[str, str]]:
    pairs = [part.partition("=") for part in split(text, where)]
    for key, equals, value in pairs:
        if not (equals and key.strip() and value.strip()):
            raise PlanError(f"{where}: expected key=value, got {key!r}")
    return [(key.strip(), value.strip()) for key, _, value in pairs]
