"""The values of options: frozen, checked against the types of a dataclass, read from a flag, written as TOML.

An option is a string, a number, a boolean, a list or a table of these, at any depth. Lists become tuples and
tables become `Frozen`, so that a plan is hashable whatever it holds.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from xform.errors import PlanError
from xform.registry import type_text, unknown


class Frozen(Mapping[str, Any]):
    """An ordered, immutable, hashable mapping. Equals a mapping of the same items; a Frozen, in order."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, Any] | None = None) -> None:
        self._items = {key: freeze(value) for key, value in (items or {}).items()}

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Frozen):
            return list(self.items()) == list(other.items())
        return isinstance(other, Mapping) and self._items == Frozen(other)._items

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


def freeze(value: Any) -> Any:
    """The value with its lists as tuples and its mappings as `Frozen`, at every depth."""
    if isinstance(value, Frozen):
        return value
    if isinstance(value, Mapping):
        return Frozen(value)
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return _kept(value, tuple(freeze(item) for item in value))
    return value


def fit(value: Any, hint: Any, where: str) -> Any:
    """The value as the type `hint` has it, frozen; a `PlanError` beginning with `where` if it misfits.

    A whole number fits a float, nothing else is converted; a type that is no plain value (a function, a class
    of the pass's own) is checked as far as `isinstance` goes.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return freeze(value)
    if isinstance(hint, typing.TypeAliasType):
        return fit(value, hint.__value__, where)
    if origin is typing.Annotated:
        return fit(value, args[0], where)
    if origin in (typing.Union, types.UnionType):
        return _fit_union(value, args, where)
    if origin is typing.Literal:
        if any(value == choice and type(value) is type(choice) for choice in args):
            return value
        if isinstance(value, str):
            raise unknown("such value", value, [str(choice) for choice in args], where)
    elif hint in (None, type(None)):
        if value is None:
            return value
    elif hint is bool or hint is str:
        if isinstance(value, hint):
            return value
    elif hint is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    elif hint is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    elif _is(origin or hint, Mapping):
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            item = args[1] if args else Any
            made = Frozen({key: fit(inner, item, f"{where}.{key}") for key, inner in value.items()})
            same = isinstance(value, Frozen) and all(made[key] is value[key] for key in value)
            return value if same else made
    elif _is(origin or hint, Sequence):
        if isinstance(value, list | tuple):
            return _fit_sequence(value, args, hint, where)
    elif not isinstance(origin or hint, type) or isinstance(value, origin or hint):
        return freeze(value)
    raise _misfit(value, [hint], where)


def _fit_union(value: Any, hints: Sequence[Any], where: str) -> Any:
    # The arm of the value's very type first: of `float | int` an int stays what it is.
    arms = sorted(hints, key=lambda hint: type(value) is not hint)
    errors = []
    for arm in arms:
        try:
            return fit(value, arm, where)
        except PlanError as error:
            errors.append((arm, error))
    real = [error for arm, error in errors if arm is not type(None)]
    raise real[0] if len(real) == 1 else _misfit(value, hints, where)


def _fit_sequence(value: Sequence[Any], hints: Sequence[Any], hint: Any, where: str) -> tuple[Any, ...]:
    fixed = typing.get_origin(hint) is tuple and hints[-1:] != (...,)
    if fixed and len(hints) != len(value):
        raise _misfit(value, [hint], where)
    items = hints if fixed else [hints[0] if hints else Any] * len(value)
    pairs = enumerate(zip(value, items, strict=True))
    return _kept(value, tuple(fit(inner, item, f"{where}[{i}]") for i, (inner, item) in pairs))


def _kept(value: Sequence[Any], made: tuple[Any, ...]) -> tuple[Any, ...]:
    """`value` itself where `made` is no different: what is frozen already keeps its identity."""
    if isinstance(value, tuple) and all(a is b for a, b in zip(value, made, strict=True)):
        return value
    return made


def _is(hint: Any, kind: type[Any]) -> bool:
    return isinstance(hint, type) and issubclass(hint, kind) and hint is not str


def _misfit(value: Any, hints: Sequence[Any], where: str) -> PlanError:
    expected = " or ".join(_words(hint) for hint in hints if hint is not type(None))
    return PlanError(f"{where} = {written(value)}: expected {expected}")


def _words(hint: Any) -> str:
    plain = {str: "a string", bool: "true or false", int: "a whole number", float: "a number"}
    if isinstance(hint, type) and hint in plain:
        return plain[hint]
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(written(choice) for choice in args)
    if _is(origin, Mapping):
        return f"a table, each entry {_words(args[1])}"
    if _is(origin, Sequence) and (origin is not tuple or args[-1:] == (...,)):
        return f"a list, each item {_words(args[0])}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_words(arm) for arm in args if arm is not type(None))
    return type_text(hint)


def written(value: Any) -> str:
    """A value as TOML, or as Python writes it where TOML has no word for it: for messages."""
    try:
        return toml(value, "")
    except PlanError:
        return repr(value)


def toml(value: Any, where: str) -> str:
    """A value on one line of TOML; a `PlanError` that begins with `where` for what TOML cannot say."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml(item, where) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{toml_key(key)} = {toml(item, where)}' for key, item in value.items())}}}"
    raise PlanError(
        f"{where}: {value!r} cannot be written in a plan file: "
        "TOML has strings, numbers, booleans, lists and tables"
    )


def toml_key(key: str) -> str:
    """A key as TOML writes it: bare where it can be."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml(key, "")


def toml_table(header: str, table: Mapping[str, Any], prefix: str) -> list[str]:
    """The lines of a table: its header, its values in order, its last inner tables under `prefix.key`.

    TOML has plain values before inner tables: an inner table that a plain value follows is written on one
    line.
    """
    plain = [i for i, value in enumerate(table.values()) if not isinstance(value, Mapping)]
    head = max(plain, default=-1) + 1
    lines = [header]
    for i, (key, value) in enumerate(table.items()):
        if i < head:
            lines.append(f"{toml_key(key)} = {toml(value, f'[{prefix}] {key}')}")
        else:
            inner = f"{prefix}.{toml_key(key)}"
            lines += ["", *toml_table(f"[{inner}]", value, inner)]
    return lines


def split(text: str, where: str) -> list[str]:
    """The parts of `a=1,b=[2,3],c="x,y"` between commas, those inside brackets and quotes left alone."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "[]{}":
            depth += 1 if letter in "[{" else -1
        elif letter == "," and not depth:
            parts.append("")
            continue
        parts[-1] += letter
    if depth or quote:
        raise PlanError(f"{where}: {text!r} leaves a {'quote' if quote else 'bracket'} open")
    return [part.strip() for part in parts if part.strip()]


def fit_flag(text: str, hint: Any, where: str) -> Any:
    """A value from the command line as the type `hint` has it: TOML, a bare string, or a list of one."""
    value = _parse_flag(text, where)
    try:
        return fit(value, hint, where)
    except PlanError as error:
        for other in (text, (value,)):
            try:
                return fit(other, hint, where)
            except PlanError:
                continue
        raise error


def _parse_flag(text: str, where: str) -> Any:
    if text.startswith("[") and text.endswith("]"):
        return [_parse_flag(part, where) for part in split(text[1:-1], where)]
    try:
        value = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    plain = list(value) == ["value"] and isinstance(value["value"], str | int | float | list | dict)
    return value["value"] if plain else text
