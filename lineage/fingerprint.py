"""Identity: the SHA-256 of what makes an artifact, and the words for how two of them differ."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Recipe = Mapping[str, object]

_ABSENT = "(none)"


def canonical_json(value: object) -> str:
    """One text per value: keys sorted, no spaces, no NaN.

    Raises:
        TypeError, ValueError: the value holds something JSON cannot state exactly.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def without_nones(value: object) -> object:
    """The value with every None left out of its mappings: a field that is off stays out of the identity."""
    if isinstance(value, Mapping):
        return {key: without_nones(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [without_nones(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return set_fields(value)
    return value


def set_fields(setting: "DataclassInstance") -> dict[str, object]:
    """The fields of a dataclass that are not None, and those of its fields."""
    found = ((each.name, getattr(setting, each.name)) for each in fields(setting))
    return {name: without_nones(value) for name, value in found if value is not None}


def fingerprint(recipe: Recipe, inputs: Mapping[str, str]) -> str:
    """SHA-256, 64 hex digits, of a method's recipe and the fingerprints of its inputs (slot -> fingerprint)."""
    identity = canonical_json({"recipe": without_nones(recipe), "inputs": dict(inputs)})
    return hashlib.sha256(identity.encode()).hexdigest()


def short(full: str) -> str:
    """The first 16 digits: what names a directory."""
    return full[:16]


def differences(before: Recipe, after: Recipe, prefix: str = "") -> Iterator[str]:
    """Each field that changed, with both values: ``beta: 0.1 -> 0.2``; nested fields are dotted."""
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key, _ABSENT), after.get(key, _ABSENT)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from differences(old, new, f"{prefix}{key}.")
        elif old != new:
            yield f"{prefix}{key}: {_show(old)} -> {_show(new)}"


def _show(value: object) -> str:
    return _ABSENT if value is _ABSENT else json.dumps(value, ensure_ascii=False)
