"""The tables of ``docs/methods.md``, from the methods of ``conf/stage`` and the table of what works with what."""

import inspect
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields

from flows.reports.compat import Outcome, all_outcomes, shipped, trainings
from flows.reports.docs.settings_page import coded, nested, section, table_below
from lineage.artifact import Kind
from lineage.markup import markdown_table
from tasks.dpo import DPO
from tasks.recipe import Method, TrainingRecipe
from tasks.train.losses.dpo_losses import LOSSES

_SETTINGS = ("adapter", "quantization", "precision", "sharding")


def render() -> dict[str, str]:
    """The rendered parts of the page."""
    parts = [markdown_table(("method", "reads", "writes", *_SETTINGS), _overview()), ""]
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
        (f"`{name}`", row.paper, coded(row.reads), "yes" if row.difference else "no",
         "posttrain" if row.is_ours else "TRL")
        for name, row in LOSSES.items()
    ]  # fmt: skip
    text = (
        "The losses. All but `sft` read `beta`. `aot`, `aot_unpaired` and `kto_pair` compare the pairs of a whole "
        "step, so that micro batch and workers change nothing; where a step has several micro batches, that takes "
        "another forward pass."
    )
    return table_below(text, ("loss", "from", "reads", "takes an `f_divergence`", "computed by"), rows)


def _overview() -> list[tuple[str, ...]]:
    """Each training with its slots and the setting values that it works with."""
    _, pairs = all_outcomes()
    return [
        (f"[`{name}`](#{name})", _slots(cls), cls.produces.value, *(_works(name, each, pairs) for each in _SETTINGS))
        for name, cls in trainings().items()
    ]


def _slots(cls: type[Method]) -> str:
    slots = {slot: f"`{slot}` ({kind.value})" for slot, kind in cls.consumes.items() if slot != "*"}
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
    parts = ["#" + section(f"`{name}`", "method", cls, without, about)]
    for path, part in nested(cls):
        if path.partition(".")[0] not in without:
            parts.append("##" + section(f"`{name}`: `method.{path}`", f"method.{path}", part))
    return "\n".join(parts)
