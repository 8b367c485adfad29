"""Builds a dataclass from a plain tree: every key and every type of it is checked, once."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TypeVar, cast, get_args

from pydantic import TypeAdapter, ValidationError

from flows.declare.pipeline import nearest
from lineage.errors import ConfigError

T = TypeVar("T")
Node = Mapping[str, object]

_ADAPTERS: dict[type, TypeAdapter[object]] = {}  # each takes milliseconds to build; a sweep checks hundreds of trees


def typed(cls: type[T], node: Node, where: str, groups: Sequence[str] = ()) -> T:
    """Checks every key and type of a node against a dataclass, then builds it.

    Args:
        groups: keys that are accepted beside its fields, and never get here.
    """
    try:
        # Through JSON, because pydantic's strict mode then takes a string for an enum but never `true` for a number.
        if cls not in _ADAPTERS:
            _ADAPTERS[cls] = TypeAdapter(cls)
        return cast(T, _ADAPTERS[cls].validate_json(json.dumps(node), strict=True))
    except ValidationError as error:
        problems = [_problem(cls, dict(detail), where, groups) for detail in error.errors()]
        raise ConfigError("\n".join(problems)) from error
    except ConfigError as error:  # of a dataclass that looks at its fields together, and knows not where it stands
        if str(error).startswith(where):
            raise
        raise ConfigError(f"{where}: {error}") from error


def _problem(cls: type, detail: dict[str, object], where: str, groups: Sequence[str]) -> str:
    loc = detail["loc"]
    assert isinstance(loc, tuple)
    path = ".".join(part for part in (where, *map(str, loc)) if part)
    if detail["type"] == "unexpected_keyword_argument":
        accepted = [field.name for field in fields(_class_at(cls, loc[:-1]))]
        accepted = list(dict.fromkeys([*accepted, *groups])) if len(loc) == 1 else accepted
        return f"{path}: unknown key; accepted: {', '.join(accepted)}{nearest(str(loc[-1]), accepted)}"
    if detail["type"] in ("missing", "missing_argument"):
        return f"{path}: is not stated and has no default; state {path}=..."
    form = _form(cls, detail, loc)
    hint = f"; write {path}={form}" if form else ""
    return f"{path}={json.dumps(detail['input'])}: {str(detail['msg'])[0].lower()}{str(detail['msg'])[1:]}{hint}"


def _form(cls: type, detail: dict[str, object], loc: tuple[int | str, ...]) -> str:
    """What a list or an object looks like in an override, where something else was given; else empty."""
    if detail["type"] in ("list_type", "tuple_type"):
        return f"[{detail['input'] if isinstance(detail['input'], str | int | float) else '...'}]"
    if detail["type"] == "dataclass_type":
        return f"{{{', '.join(f'{field.name}: ...' for field in fields(_class_at(cls, loc)))}}}"
    return ""


def _class_at(cls: type, loc: tuple[int | str, ...]) -> type:
    """The dataclass that a location inside ``cls`` belongs to."""
    for part in loc:
        hints = {field.name: field.type for field in fields(cls)}
        cls = next(_dataclasses(hints.get(str(part))), cls)
    return cls


def _dataclasses(hint: object) -> Iterator[type]:
    """The dataclasses that a type is made of: of ``Mapping[str, Rule] | None`` it is ``Rule``."""
    if isinstance(hint, type) and is_dataclass(hint):
        yield hint
    for part in get_args(hint):
        yield from _dataclasses(part)
