"""Identity: the fingerprint of an artifact, and the differences of two recipes as text."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Recipe = Mapping[str, object]

_ABSENT = "(none)"


def canonical_json(value: object) -> str:
    """The canonical JSON text of a value: sorted keys, no spaces, no NaN.

    Raises:
        TypeError, ValueError: JSON cannot represent the value exactly.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest_json(value: object) -> str:
    """SHA-256 of the canonical JSON text of a value."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def without_nones(value: object) -> object:
    """The value without the None entries of its mappings: unset fields stay out of the identity."""
    if isinstance(value, Mapping):
        return {key: without_nones(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [without_nones(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return set_fields(value)
    return value


class Setting:
    """Base of the dataclasses of a recipe, which refuse unknown fields, other types and non-finite numbers."""

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True, "allow_inf_nan": False}


@cache
def field_names(cls: "type[DataclassInstance]") -> tuple[str, ...]:
    """The fields of a dataclass; asked for hundreds of times by a plan."""
    return tuple(each.name for each in fields(cls))


def set_fields(setting: "DataclassInstance") -> dict[str, object]:
    """The fields of a dataclass that are not None, nested ones included."""
    found = ((name, getattr(setting, name)) for name in field_names(type(setting)))
    return {name: without_nones(value) for name, value in found if value is not None}


def fingerprint(recipe: Recipe, inputs: Mapping[str, str]) -> str:
    """SHA-256, 64 hex digits, of a method's recipe and the fingerprints of its inputs (slot -> fingerprint)."""
    return digest_json({"recipe": without_nones(recipe), "inputs": dict(inputs)})


def short(full: str) -> str:
    """The first 16 digits, which name a directory."""
    return full[:16]


def differences(before: Recipe, after: Recipe, prefix: str = "") -> Iterator[str]:
    """Each changed field with both values, nested ones by dotted names: ``beta: 0.1 -> 0.2``."""
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key, _ABSENT), after.get(key, _ABSENT)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from differences(old, new, f"{prefix}{key}.")
        elif old != new:
            yield f"{prefix}{key}: {_show(old)} -> {_show(new)}"


def _show(value: object) -> str:
    return _ABSENT if value is _ABSENT else json.dumps(value, ensure_ascii=False)
