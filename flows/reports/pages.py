"""Renders the tables of pages in ``docs/`` from the code: ``python -m flows.reports.pages`` writes them."""

import inspect
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import cast, get_args, get_origin, get_type_hints

import yaml
from pydantic import TypeAdapter

from flows.declare.config import CONF
from flows.reports.compat import Outcome, all_outcomes, condition_rows, refused_rows, rule_rows, shipped, trainings
from flows.reports.wording import spelled
from flows.steps.calls import CALLS
from lineage.artifact import Kind
from lineage.diagnosis.rules import RULES
from lineage.markup import markdown_table
from tasks.context import Resources
from tasks.dpo import DPO
from tasks.judgement.advice import ADAMW, BATCH_FACTOR, SIZES, TABLE, Row, Value
from tasks.recipe import ADAPTER_FACTOR, Method, TrainingRecipe, without_verdict
from tasks.train.losses.dpo_losses import LOSSES as DPO_LOSSES
from tasks.train.models.adapters import ADAPTERS
from tasks.train.models.quantization import FORMATS
from tasks.train.optim.optimizers import EXTRA, OPTIMIZERS, Entry
from tasks.train.optim.schedules import SCHEDULES
from tasks.train.steps.losses import LOSSES
from tasks.train.steps.renderers import RENDERERS

DOCS = Path(__file__).parents[2] / "docs"

_PART = re.compile(r"(<!-- (\w+) -->\n?).*?(\n?<!-- end -->)", re.DOTALL)
_ARGS = re.compile(r"^Args:\n((?:[ \t]+.*\n?|\n)+)", re.MULTILINE)
_ARGUMENT = re.compile(r"^    (\w[\w, ]*): (.*(?:\n {5,}.*)*)", re.MULTILINE)
_COMMENT = re.compile(r"^    (\w+): [^#\n]*?#\s*(.*)$", re.MULTILINE)

_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
_TYPES = {"string": "text", "boolean": "`true`, `false`", "object": "keys and values"}

Schema = Mapping[str, object]
_PAIRED = ("adapter", "quantization", "precision", "sharding")


def _settings() -> dict[str, str]:
    """The parts of ``settings.md``, from the settings' dataclasses and the table of what works with what."""
    more = {"optimizer": _optimizers, "adapter": _adapters, "schedule": _schedules, "quantization": _formats}
    parts = [_section("Every training", "method", TrainingRecipe)]
    for path, cls in _nested(TrainingRecipe):
        parts += [_section(f"`method.{path}`", f"method.{path}", cls), *([more[path]()] if path in more else [])]
    parts.append(_section("Resources", "resources", Resources))
    parts += [_section(f"`resources.{path}`", f"resources.{path}", cls) for path, cls in _nested(Resources)]
    return {"fields": "\n".join(parts), **_what_works()}


def _coded(names: Iterable[str]) -> str:
    """Names in backquotes, separated by commas."""
    return ", ".join(f"`{name}`" for name in names)


def _table_below(text: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A paragraph and a table, as a part of a page."""
    return "\n".join([f"{text}\n", markdown_table(columns, rows), ""])


def _formats() -> str:
    needs = {name: ("a GPU" if row.gpu else "", row.package[1] if row.package else "") for name, row in FORMATS.items()}
    rows = [
        (f"`{name}`", _coded(row.reads), ", ".join(filter(None, needs[name])), "yes" if row.dequantizes else "no",
         row.reason)
        for name, row in FORMATS.items()
    ]  # fmt: skip
    columns = ("format", "reads", "needs", "dequantizes", "note")
    return _table_below("Every format reads `skip_modules` and `merge`.", columns, rows)


def _optimizers() -> str:
    rows = [(f"`{name}`", row.about, _coded(row.reads), _needs(row)) for name, row in OPTIMIZERS.items()]
    text = (
        f"Every optimizer reads `weight_decay`. `pip install 'posttrain[{EXTRA}]'` installs the packages that they "
        "need, but for those with a licence, which forbids commercial use."
    )
    return _table_below(text, ("optimizer", "what it is", "reads", "needs"), rows)


def _needs(entry: Entry) -> str:
    if entry.package:
        return f"{entry.package.name} ({entry.package.licence})" if entry.package.licence else entry.package.name
    return "a GPU" if entry.needs_gpu else ""


def _adapters() -> str:
    rows = [(f"`{name}`", row.paper, _coded(row.reads)) for name, row in ADAPTERS.items()]
    text = (
        "Every type reads `target_modules`, `exclude_modules`, `layers` and `modules_to_save`; `ln_tuning` is on the "
        "norms."
    )
    return _table_below(text, ("type", "from", "reads"), rows)


def _schedules() -> str:
    rows = [(f"`{name}`", row.about, _coded(row.reads)) for name, row in SCHEDULES.items()]
    columns = ("schedule", "the learning rate after the warm-up", "reads")
    return _table_below("Every schedule reads `warmup`.", columns, rows)


def _nested(cls: type, path: str = "") -> Iterator[tuple[str, type]]:
    """Path and class of all nested dataclass fields, including the values of mappings."""
    hints = get_type_hints(cls)
    for each in fields(cls):
        for part in _types(hints[each.name]):
            if is_dataclass(part):
                name = f"{path}{each.name}.NAME" if _is_mapping(hints[each.name]) else f"{path}{each.name}"
                yield name, part
                yield from _nested(part, f"{name}.")


def _types(hint: object) -> Iterator[type]:
    """A type and its type arguments, recursively."""
    if isinstance(hint, type):
        yield hint
    for part in get_args(hint):
        yield from _types(part)


def _is_mapping(hint: object) -> bool:
    return get_origin(hint) is Mapping or any(_is_mapping(part) for part in get_args(hint))


def _section(title: str, where: str, cls: type, without: Collection[str] = (), about: str = "") -> str:
    """A dataclass as a table of its fields.

    Args:
        without: fields that are left out.
        about: a paragraph between the docstring's first one and the table.
    """
    schema = TypeAdapter(cls).json_schema()
    properties = cast("Mapping[str, Schema]", schema["properties"])
    descriptions, parts = _descriptions(cls), dict(_nested(cls))
    rows = [
        (
            f"`{each.name}`",
            "fields of its own" if each.name in parts else _accepted(properties[each.name], schema),
            _default(each),
            _prose(descriptions.get(each.name) or _lead(parts.get(each.name))),
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
    paragraphs = [_prose(_lead(cls)) + rate, *([about] if about else []), table if rows else ""]
    return "\n\n".join([f"## {title}", *filter(None, paragraphs)]) + "\n"


def _lead(cls: type | None) -> str:
    """The first paragraph of a class's docstring."""
    return " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split()) if cls else ""


def _prose(text: str) -> str:
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
    values = cast("Sequence[object]", schema.get("enum", [schema["const"]] if "const" in schema else []))
    if values:
        return ", ".join(f"`{spelled(word)}`" for word in values)
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
    return f"`{spelled(each.default)}`"


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


def _methods() -> dict[str, str]:
    """The parts of ``methods.md``, from the methods of ``conf/stage`` and the table of what works with what."""
    parts = [markdown_table(("method", "reads", "writes", *_PAIRED), _overview()), ""]
    shared = {each.name for each in fields(TrainingRecipe)}
    for name, cls in trainings().items():
        own = set().union(*(each.__annotations__ for each in cls.__mro__ if each not in TrainingRecipe.__mro__))
        parts.append(_method(name, cls, shared - own))
        if cls is DPO:
            parts.append(_losses())
    others = {name: cls for name, (cls, _) in shipped().items() if name not in trainings()}
    rest = "\n".join(_method(name, cls, ()) for name, cls in others.items())
    return {"trainings": "\n".join(parts), "others": rest}


def _losses() -> str:
    """Table of the losses of DPO."""
    rows = [
        (f"`{name}`", row.paper, _coded(row.reads), "yes" if row.difference else "no",
         "posttrain" if row.is_ours else "TRL")
        for name, row in DPO_LOSSES.items()
    ]  # fmt: skip
    text = (
        "The losses. All but `sft` read `beta`. `aot`, `aot_unpaired` and `kto_pair` compare the pairs of a whole "
        "step, so that micro batch and workers change nothing; where a step has several micro batches, that takes "
        "another forward pass."
    )
    return _table_below(text, ("loss", "from", "reads", "takes an `f_divergence`", "computed by"), rows)


def _overview() -> list[tuple[str, ...]]:
    """Each training with its slots and the setting values that it works with."""
    _, pairs = all_outcomes()
    return [
        (f"[`{name}`](#{name})", _slots(cls), cls.produces.value, *(_works(name, each, pairs) for each in _PAIRED))
        for name, cls in trainings().items()
    ]


def _slots(cls: type[Method]) -> str:
    slots = {slot: f"`{slot}` ({kind.value})" for slot, kind in without_verdict(cls.consumes).items() if slot != "*"}
    if "*" in cls.consumes:
        slots["*"] = f"further slots ({_plural(cls.consumes['*'])})"
    return ", ".join(text + (", optional" if slot in cls.optional else "") for slot, text in slots.items())


def _plural(kind: Kind) -> str:
    return kind.value if kind.value.endswith("s") else f"{kind.value}s"


def _works(method: str, setting: str, pairs: Sequence[Outcome]) -> str:
    """The values of a setting that work with a method, or that do not, whichever are fewer."""
    found: Mapping[str, str] = {
        right.value: each.works
        for each in pairs
        for left, right in [each.choices]
        if (left.setting, left.value, right.setting) == ("method", method, setting)
    }
    refused = [value for value, works in found.items() if works == "no"]
    working = [value for value in found if value not in refused]
    if not refused:
        return "all"
    if len(working) <= len(refused):
        return ", ".join(working) or "none"
    return f"all but {', '.join(refused)}"


def _method(name: str, cls: type[Method], without: Collection[str]) -> str:
    module = inspect.getdoc(sys.modules[cls.__module__]) or ""
    source = module.partition("\n\n")[0].replace("\n", " ")
    about = f"{source} `{cls.__module__}.{cls.__qualname__}`. Reads {_slots(cls)}; writes {cls.produces.value}."
    parts = ["#" + _section(f"`{name}`", "method", cls, without, about)]
    for path, part in _nested(cls):
        if path.partition(".")[0] not in without:
            parts.append("##" + _section(f"`{name}`: `method.{path}`", f"method.{path}", part))
    return "\n".join(parts)


def _advice() -> dict[str, str]:
    """The parts of ``advice.md``, from the table of ``tasks.judgement.advice``, the presets and the sweeps."""
    head = ("field", "of", "size", "default", "recommended", "permissible", "advised", "source", "no warning")
    return {
        "adamw": ", ".join(f"`{name}`" for name in sorted(ADAMW)), "factor": str(ADAPTER_FACTOR),
        "batch": str(BATCH_FACTOR), "table": markdown_table(head, [_cells(row) for row in TABLE]),
        "presets": _files("preset", ("conservative", "tiny-data", "medium", "large", "one-gpu-qlora")),
        "sweeps": _files("sweep", ("lr-sft", "lr-peft", "guide")),
    }  # fmt: skip


def _cells(row: Row) -> list[str]:
    of = [*(row.methods or ("every training",)), *row.tuned]
    default = _text(row.default)
    ranges = [each.text if each else "-" for each in (row.recommended, row.permissible)]
    if row.share:
        ranges[0] += f", or {row.share.text} of all steps"
    return [
        f"`{row.field}`" if "." in row.field else row.field, ", ".join(of), SIZES[row.size] if row.size else "any",
        f"**{default}**" if row.breaks_itself else default, *ranges, _text(row.advised), row.source, row.silent,
    ]  # fmt: skip


def _text(value: Value | None) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _files(group: str, names: Sequence[str]) -> str:
    """Table of the values that the files of a group set."""
    rows = []
    for name in names:
        tree = yaml.safe_load((CONF / group / f"{name}.yaml").read_text(encoding="utf-8"))
        tree.pop("defaults")
        rows.append([f"`{group}={name}`", ", ".join(_leaves(tree, ""))])
    return markdown_table([group, "sets"], rows)


def _leaves(tree: object, path: str) -> list[str]:
    if not isinstance(tree, dict):
        return [f"`{path}={'null' if tree is None else tree}`"]
    nested = (path == "params" or path == "fixed") and all(not isinstance(value, dict) for value in tree.values())
    dot = " " if nested else "."
    return [leaf for key, value in tree.items() for leaf in _leaves(value, f"{path}{dot}{key}" if path else str(key))]


def _rules() -> dict[str, str]:
    rows = [(f"`{rule.name}`", rule.group, rule.needs, rule.sign, rule.remedy) for rule in RULES]
    return {"rules": markdown_table(("rule", "group", "needs", "sign", "what to change"), rows)}


def _steps() -> dict[str, str]:
    rows = [
        (f"`{name}`", f"`{each.about}`", ", ".join(f"`{column}`" for column in each.reads),
         ", ".join(f"`{option}`" if of is None else f"`{option}={of:g}`" for option, of in each.options.items()),
         each.paper)
        for name, each in LOSSES.items()
    ]  # fmt: skip
    calls = [
        (f"`{name}`", ", ".join(f"`{each.name}`" for each in fields(call)), "yes" if call.changes else "no",
         call.__doc__ or "")
        for name, call in CALLS.items()
    ]  # fmt: skip
    families = [
        (f"`{name}`", each.about, f"`{each.turn}...{each.end}`".replace("\n", "\\n"))
        for name, each in RENDERERS.items()
    ]
    return {
        "renderers": markdown_table(("renderer", "models", "a turn"), families),
        "losses": markdown_table(("loss", "of each token", "columns", "options", "source"), rows),
        "primitives": markdown_table(("primitive", "arguments", "in the command log", "does"), calls),
    }


PAGES = {
    "settings.md": _settings, "methods.md": _methods, "advice.md": _advice,
    "diagnose.md": _rules, "steps.md": _steps,
}  # fmt: skip


def rendered(page: str) -> str:
    """A page with its parts between ``<!-- NAME -->`` and ``<!-- end -->``; the rest is written by hand."""
    parts, text = PAGES[page](), (DOCS / page).read_text(encoding="utf-8")
    return _PART.sub(lambda found: found[1] + parts[found[2]].strip("\n") + found[3], text)


def main() -> int:
    """Writes the pages."""
    for page in PAGES:
        (DOCS / page).write_text(rendered(page), encoding="utf-8")
        print(f"{DOCS / page} is written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
