"""The names of passes: from the name in a plan to the pass's class, and from the class to its options.

A built-in pass is a row of `BUILTIN`. A third party's pass is an entry point of the group `xform.passes`,
whose name is the name in the plan and whose value is `module:Class`; nothing needs to be imported for it to
be found. A class is imported when a plan asks for it, never before.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import re
import sys
import typing
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any

from xform.errors import PlanError

GROUP = "xform.passes"

BUILTIN: dict[str, str] = {
    "chunkedloss": "xform.passes.chunkedloss:ChunkedLoss",
    "context": "xform.passes.context:Context",
    "accumulate": "xform.passes.accumulate:Accumulate",
    "experts": "xform.passes.experts:Experts",
    "kernels": "xform.passes.kernels:Kernels",
    "narrow": "xform.passes.narrow:Narrow",
    "offload": "xform.passes.offload:Offload",
    "pipeline": "xform.passes.pipeline:Pipeline",
    "quantize": "xform.passes.quantize:Quantize",
    "roll": "xform.passes.roll:Roll",
    "remat": "xform.passes.remat:Remat",
    "shard": "xform.passes.shard:Shard",
    "sparseexperts": "xform.passes.sparseexperts:SparseExperts",
}

RESERVED = ("axes", "mesh")  # the tables of a plan file that are no passes


@dataclasses.dataclass(frozen=True)
class Option:
    """One option of a pass: name, type as written, default (`MISSING` if it must be given), description."""

    name: str
    type: str
    default: Any
    doc: str

    def __str__(self) -> str:
        default = "" if self.default is dataclasses.MISSING else f" = {self.default!r}"
        return f"{self.name}: {self.type}{default}" + (f"\n        {self.doc}" if self.doc else "")

    def to_json(self) -> dict[str, Any]:
        """As the values of JSON; an option that must be given has no "default"."""
        default = {} if self.default is dataclasses.MISSING else {"default": _plain(self.default)}
        return {"name": self.name, "type": self.type, **default, "doc": self.doc}


def unknown(what: str, name: str, allowed: Iterable[str], where: str = "") -> PlanError:
    """The error for a name that does not exist: what there is, and the nearest of it. `where` comes first."""
    allowed = list(allowed)
    near = difflib.get_close_matches(name, allowed, n=1, cutoff=0.5)
    guess = f" (did you mean {near[0]!r}?)" if near else ""
    there = ", ".join(allowed) or "none"
    return PlanError(f"{where}{': ' if where else ''}no {what} {name!r}{guess}; there is: {there}")


def names() -> list[str]:
    """The names of all passes that a plan can use: the built-in ones in order, then third parties'."""
    return [*BUILTIN, *sorted(_third_parties().keys() - BUILTIN.keys())]


def find(name: str) -> type[Any]:
    """The class of the pass called `name`; a `PlanError` where there is none, or two, or a broken one."""
    targets = _third_parties().get(name, {})
    if name in BUILTIN:
        targets = {**targets, BUILTIN[name]: "xform itself"}
    if not targets:
        raise unknown("pass", name, names())
    if len(targets) > 1:
        who = " and ".join(sorted(f"{owner} ({target})" for target, owner in targets.items()))
        raise PlanError(
            f"two passes are called {name!r}: of {who}: uninstall one, or have it rename its entry point"
        )
    ((target, owner),) = targets.items()
    if name in RESERVED or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise PlanError(
            f"{owner} calls a pass {name!r}: the name must be lower-case letters, digits and _, "
            f"and none of {', '.join(RESERVED)}"
        )
    return _load(name, target, owner)


def name_of(cls: type[Any]) -> str:
    """The name under which a plan file knows the pass `cls`; a `PlanError` where it is not registered."""
    written = f"{cls.__module__}:{cls.__qualname__}"
    third_parties = _third_parties()
    for name, target in BUILTIN.items():
        if target == written:
            return name
    for name, targets in sorted(third_parties.items()):
        # An entry point may name the class where it is re-exported, so compare the class itself as well.
        if written in targets or any(_is(cls, target) for target in targets):
            return name
    raise PlanError(
        f"the pass {cls.__qualname__} of module {cls.__module__} has no name to be written in a plan file: "
        f"register it as an entry point of the group {GROUP!r}"
    )


def options(cls: type[Any]) -> list[Option]:
    """The options of a pass, in order: the fields of its dataclass.

    An option's description is in the docstring of the class: a line `name: what it does`, and what
    follows it up to the next option or an empty line.
    """
    docs, types_ = _field_docs(cls), field_types(cls)
    return [
        Option(field.name, type_text(types_[field.name]), default_of(field), docs.get(field.name, ""))
        for field in dataclasses.fields(cls)
        if field.init
    ]


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The default of a dataclass field, made if it has a factory; `dataclasses.MISSING` if it has none."""
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def field_types(cls: type[Any]) -> dict[str, Any]:
    """The types of a pass's options as objects; a `PlanError` where an annotation cannot be read."""
    try:
        return typing.get_type_hints(cls)
    except NameError as error:
        raise PlanError(
            f"the option types of the pass {cls.__qualname__} cannot be read ({error}): "
            f"import what they name at the top of {cls.__module__}"
        ) from error


def type_text(annotation: Any) -> str:
    """A type as a person writes it: `str | None`, `tuple[str, ...]`."""
    if isinstance(annotation, str):
        return annotation
    if isinstance(annotation, typing.TypeAliasType):
        return type_text(annotation.__value__)
    plain = isinstance(annotation, type) and not typing.get_args(annotation)
    return annotation.__name__ if plain else re.sub(r"\b(typing|collections\.abc)\.", "", str(annotation))


def _third_parties() -> dict[str, dict[str, str]]:
    """name -> {target: the distribution that offers it}."""
    found: dict[str, dict[str, str]] = {}
    for entry in metadata.entry_points(group=GROUP):
        owner = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unknown distribution"
        found.setdefault(entry.name, {}).setdefault(entry.value.replace(" ", ""), owner)
    return found


def _load(name: str, target: str, owner: str) -> type[Any]:
    module, _, attribute = target.partition(":")
    try:
        cls = importlib.import_module(module)
        for part in attribute.split("."):
            cls = getattr(cls, part)
    except Exception as error:  # whatever a third party's module raises while it is imported
        raise PlanError(
            f"the pass {name!r} of {owner} cannot be loaded from {target}: {type(error).__name__}: {error}"
        ) from error
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise PlanError(
            f"the pass {name!r} of {owner}, {target}, is not a dataclass: a pass is a frozen dataclass"
        )
    return cls


def _is(cls: type[Any], target: str) -> bool:
    """Whether `target` names `cls`, told without importing anything that is not imported yet."""
    module, _, attribute = target.partition(":")
    return getattr(sys.modules.get(module), attribute, None) is cls


def _field_docs(cls: type[Any]) -> dict[str, str]:
    docs: dict[str, str] = {}
    names, name = {field.name for field in dataclasses.fields(cls)}, ""
    for line in inspect.cleandoc(cls.__doc__ or "").splitlines():
        start = re.match(r"(\w+): (.*)", line)
        if start and start[1] in names:
            name = start[1]
            docs[name] = start[2].strip()
        elif name and line.strip():
            docs[name] += f" {line.strip()}"
        else:
            name = ""
    return docs


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, str | bool | int | float) else repr(value)
