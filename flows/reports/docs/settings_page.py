"""The tables of ``docs/settings.md``, from the settings' dataclasses and the table of what works with what."""

import inspect
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import cast, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter

from flows.reports.compat import all_outcomes, condition_rows, refused_rows, rule_rows
from lineage.markup import markdown_table
from tasks.context import Resources
from tasks.recipe import ADAPTER_FACTOR, TrainingRecipe
from tasks.train.models.adapters import ADAPTERS
from tasks.train.models.quantization import FORMATS
from tasks.train.optim.optimizers import EXTRA, OPTIMIZERS, Entry
from tasks.train.optim.schedules import SCHEDULES

_ARGS = re.compile(r"^Args:\n((?:[ \t]+.*\n?|\n)+)", re.MULTILINE)
_ARGUMENT = re.compile(r"^    (\w[\w, ]*): (.*(?:\n {5,}.*)*)", re.MULTILINE)
_COMMENT = re.compile(r"^    (\w+): [^#\n]*?#\s*(.*)$", re.MULTILINE)

_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
_TYPES = {"string": "text", "boolean": "`true`, `false`", "object": "keys and values"}

Schema = Mapping[str, object]


def render() -> dict[str, str]:
    """The rendered parts of the page."""
    more = {"optimizer": _optimizers, "adapter": _adapters, "schedule": _schedules, "quantization": _formats}
    parts = [section("Every training", "method", TrainingRecipe)]
    for path, cls in nested(TrainingRecipe):
        parts += [section(f"`method.{path}`", f"method.{path}", cls), *([more[path]()] if path in more else [])]
    parts.append(section("Resources", "resources", Resources))
    parts += [section(f"`resources.{path}`", f"resources.{path}", cls) for path, cls in nested(Resources)]
    return {"fields": "\n".join(parts), **_what_works()}


def coded(names: Iterable[str]) -> str:
    """Names in backquotes, separated by commas."""
    return ", ".join(f"`{name}`" for name in names)


def table_below(text: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A paragraph and a table, as a part of a page."""
    return "\n".join([f"{text}\n", markdown_table(columns, rows), ""])


def _formats() -> str:
    needs = {name: ("a GPU" if row.gpu else "", row.package[1] if row.package else "") for name, row in FORMATS.items()}
    rows = [
        (f"`{name}`", coded(row.reads), ", ".join(filter(None, needs[name])), "yes" if row.dequantizes else "no",
         row.reason)
        for name, row in FORMATS.items()
    ]  # fmt: skip
    columns = ("format", "reads", "needs", "dequantizes", "note")
    return table_below("Every format reads `skip_modules` and `merge`.", columns, rows)


def _optimizers() -> str:
    rows = [(f"`{name}`", row.about, coded(row.reads), _needs(row)) for name, row in OPTIMIZERS.items()]
    text = (
        f"Every optimizer reads `weight_decay`. `pip install 'posttrain[{EXTRA}]'` installs the packages that they "
        "need, but for those with a licence, which forbids commercial use."
    )
    return table_below(text, ("optimizer", "what it is", "reads", "needs"), rows)


def _needs(entry: Entry) -> str:
    if entry.package:
        return f"{entry.package.name} ({entry.package.licence})" if entry.package.licence else entry.package.name
    return "a GPU" if entry.needs_gpu else ""


def _adapters() -> str:
    rows = [(f"`{name}`", row.paper, coded(row.reads)) for name, row in ADAPTERS.items()]
    text = (
        "Every type reads `target_modules`, `exclude_modules`, `layers` and `modules_to_save`; `ln_tuning` is on the "
        "norms."
    )
    return table_below(text, ("type", "from", "reads"), rows)


def _schedules() -> str:
    rows = [(f"`{name}`", row.about, coded(row.reads)) for name, row in SCHEDULES.items()]
    columns = ("schedule", "the learning rate after the warm-up", "reads")
    return table_below("Every schedule reads `warmup`.", columns, rows)


def nested(cls: type, path: str = "") -> Iterator[tuple[str, type]]:
    """Path and class of all nested dataclass fields, including the values of mappings."""
    hints = get_type_hints(cls)
    for each in fields(cls):
        for part in _types(hints[each.name]):
            if is_dataclass(part):
                name = f"{path}{each.name}.NAME" if _is_mapping(hints[each.name]) else f"{path}{each.name}"
                yield name, part
                yield from nested(part, f"{name}.")


def _types(hint: object) -> Iterator[type]:
    """A type and its type arguments, recursively."""
    if isinstance(hint, type):
        yield hint
    for part in get_args(hint):
        yield from _types(part)


def _is_mapping(hint: object) -> bool:
    return get_origin(hint) is Mapping or any(_is_mapping(part) for part in get_args(hint))


def section(title: str, where: str, cls: type, without: Collection[str] = (), about: str = "") -> str:
    """A dataclass as a table of its fields.

    Args:
        without: fields that are left out.
        about: a paragraph between the docstring's first one and the table.
    """
    schema = TypeAdapter(cls).json_schema()
    properties = cast("Mapping[str, Schema]", schema["properties"])
    descriptions, parts = _descriptions(cls), dict(nested(cls))
    rows = [
        (
            f"`{each.name}`",
            "fields of its own" if each.name in parts else _accepted(properties[each.name], schema),
            _default(each),
            prose(descriptions.get(each.name) or lead(parts.get(each.name))),
        )
        for each in fields(cls)
        if each.name not in without
    ]
    learning_rate = getattr(cls, "default_learning_rate", None)
    rate = (
        f" Its learning rate is {learning_rate:g}, or {ADAPTER_FACTOR} times that under an adapter."
        if learning_rate
        else ""
    )
    table = markdown_table((f"`{where}.`", "accepted", "default", "meaning"), rows)
    paragraphs = [prose(lead(cls)) + rate, *([about] if about else []), table if rows else ""]
    return "\n\n".join([f"## {title}", *filter(None, paragraphs)]) + "\n"


def lead(cls: type | None) -> str:
    """The first paragraph of a class's docstring."""
    return " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split()) if cls else ""


def prose(text: str) -> str:
    """A comment or docstring as Markdown, with ``null`` for None."""
    return re.sub(r"\bNone\b", "`null`", text.replace("``", "`"))


def _descriptions(cls: type) -> dict[str, str]:
    """Field -> its description in docstrings and comments of a class and its bases."""
    found: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        if not is_dataclass(each):
            continue
        found |= {name: comment for name, comment in _COMMENT.findall(inspect.getsource(each))}
        arguments = _ARGS.search(inspect.getdoc(each) or "")
        for names, text in _ARGUMENT.findall(arguments[1] if arguments else ""):
            found |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    return found


def _accepted(schema: Schema, root: Schema) -> str:
    """The values that a field takes, from its JSON schema."""
    if "$ref" in schema:
        definitions = cast("Mapping[str, Schema]", root["$defs"])
        return _accepted(definitions[str(schema["$ref"]).rpartition("/")[2]], root)
    options = [each for each in cast("Sequence[Schema]", schema.get("anyOf", [])) if each.get("type") != "null"]
    if options:
        return ", or ".join(_accepted(each, root) for each in options)
    words = cast("Sequence[object]", schema.get("enum", [schema["const"]] if "const" in schema else []))
    if words:
        return ", ".join(f"`{word if isinstance(word, str) else json.dumps(word)}`" for word in words)
    if items := cast("Sequence[Schema]", schema.get("prefixItems", [])):
        return f"list of {len(items)}: {_accepted(items[0], root)}"
    if schema.get("type") == "array":
        return f"list: {_accepted(cast('Schema', schema.get('items', {})), root)}"
    name = str(schema.get("type", "any"))
    limits = [f"{sign} {schema[key]}" for key, sign in _BOUNDS.items() if key in schema]
    return " ".join([_TYPES.get(name, name), *limits])


def _default(each: "Field[object]") -> str:
    if each.default is MISSING:
        return "required" if each.default_factory is MISSING else "empty"
    if is_dataclass(each.default):
        return "its defaults"
    value = each.default if isinstance(each.default, str) else json.dumps(each.default)
    return f"`{value}`"


def _what_works() -> dict[str, str]:
    alone, pairs = all_outcomes()
    conditions = [(f"`{setting}`", works, _code(why)) for setting, works, why in condition_rows(alone)]
    refused = [(f"`{left}`", f"`{right}`", rule) for left, right, rule in refused_rows(pairs)]
    rules = [(name, _code(example), why, _code(nearest)) for name, example, why, nearest in rule_rows()]
    return {
        "conditions": markdown_table(("setting", "works", "with, or why not"), conditions),
        "refused": markdown_table(("setting", "not with", "rule"), refused),
        "rules": markdown_table(("rule", "refuses, for example", "why", "set instead"), rules),
    }


def _code(overrides: str) -> str:
    return f"`{overrides}`" if overrides else ""
