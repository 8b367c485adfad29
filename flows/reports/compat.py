"""Compatibility of settings: each value alone, and with each value of another setting, by the table of rules."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from typing import Literal, get_args, get_type_hints

import yaml

from flows.declare.config import CONF, method_class, typed
from flows.reports.wording import empty_table, plain_text
from lineage.errors import ConfigError
from tasks.context import Dtype, Resources
from tasks.method import Adapter, Method, Optimizer, Quantization, Schedule, Training
from tasks.recipe import TrainingRecipe
from tasks.train.compatibility import RULES, refusals
from tasks.train.models.quantization import FORMATS
from tasks.train.optim.optimizers import OPTIMIZERS
from tasks.train.rule import Case, Fields, Refusal, Rule, assigned
from tasks.train.sharding import STRATEGIES

Works = Literal["yes", "on a GPU", "no"]

_GPU: Fields = {"resources.gpus_per_worker": 1, "method.precision": "bf16"}  # as conf/resources/gpu.yaml
# Fields of the trainings in these tables, unless a choice sets them.
_BASE: Fields = {
    "method.learning_rate": 1e-3, "method.num_steps": 8, "method.max_length": 512, "method.global_batch_size": 8,
    "resources.micro_batch_size": 8,
}  # fmt: skip
_SHARDING: Mapping[str, Fields] = {
    "none": {"resources.num_workers": 1, "resources.micro_batch_size": 8},
    "accumulation": {"resources.num_workers": 1, "resources.micro_batch_size": 4},
    "2-workers": {"resources.num_workers": 2, "resources.micro_batch_size": 4},
    **{
        name: {
            "resources.num_workers": 4 if name == "fsdp_hybrid" else 2,
            "resources.micro_batch_size": 2 if name == "fsdp_hybrid" else 4,
            "resources.sharding": name,
            **({"resources.num_nodes": 2} if name == "fsdp_hybrid" else {}),
        }
        for name in STRATEGIES
        if name != "none"
    },
}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One value of a setting: ``optimizer=adamw_torch``."""

    setting: str
    value: str
    fields: Fields = field(default_factory=dict, hash=False)
    method: type[Method] | None = None

    def __str__(self) -> str:
        return f"{self.setting}={self.value}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Whether choices work together.

    Args:
        condition: what else must be set.
        case: a training with these settings, if they work.
        rule: id of the rule that refuses them; None: a setting refuses its own fields, or they work.
        reason: why they are refused.
    """

    choices: tuple[Choice, ...]
    works: Works
    condition: Fields = field(default_factory=dict)
    case: Case | None = None
    rule: str | None = None
    reason: str | None = None

    @property
    def needs(self) -> list[str]:
        """The commands that install what is not in the lock, without which the plan refuses them."""
        if self.case is None:
            return []
        setting, package = self.case.method.quantization, OPTIMIZERS[self.case.method.optimizer.name].package
        own = FORMATS[setting.format].package if setting else None
        return [*([own[1]] if own else []), *([package.install] if package else [])]

    def to_dict(self) -> dict[str, object]:
        entry = {
            "rule": self.rule, "reason": self.reason, "condition": assigned(self.condition), "needs": self.needs,
        }  # fmt: skip
        return {
            "settings": {choice.setting: choice.value for choice in self.choices},
            "works": self.works,
            **{key: value for key, value in entry.items() if value},
        }


@cache
def shipped() -> dict[str, tuple[type[Method], Fields]]:
    """The methods of ``conf/stage`` and the fields that their files set, by the names of the files."""
    files = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((CONF / "stage").glob("*.yaml"))}
    return {
        name: (method_class(f"conf/stage/{name}.yaml", str(configured.pop("_target_"))), configured)
        for name, configured in files.items()
    }


def trainings() -> dict[str, type[Method]]:
    """The methods of ``conf/stage`` that train, by the name of their file."""
    return {name: method for name, (method, _) in shipped().items() if issubclass(method, Training)}


def choices() -> dict[str, list[Choice]]:
    """All values of the settings that the tables combine."""
    return {
        "method": [Choice(setting="method", value=name, method=cls) for name, cls in trainings().items()],
        "adapter": [
            Choice(setting="adapter", value="full", fields={"method.adapter": None}),
            *_values("adapter", "method.adapter.type", Adapter),
        ],
        "quantization": [
            Choice(setting="quantization", value="none", fields={"method.quantization": None}),
            *_values("quantization", "method.quantization.format", Quantization),
        ],
        "optimizer": _values("optimizer", "method.optimizer.name", Optimizer),
        "schedule": _values("schedule", "method.schedule.name", Schedule),
        "precision": _values("precision", "method.precision", TrainingRecipe),
        "attention": _values("attention", "resources.attention", Resources),
        "weights": _each("weights", "resources.weights", get_args(Dtype)),
        "checkpointing": _each("checkpointing", "resources.gradient_checkpointing", ("off", "on")),
        "sharding": [Choice(setting="sharding", value=name, fields=fields) for name, fields in _SHARDING.items()],
    }


def _values(setting: str, path: str, cls: type) -> list[Choice]:
    """The values of a ``Literal`` field, but for ``auto``."""
    hint = get_type_hints(cls)[path.rpartition(".")[2]]
    return _each(setting, path, [value for value in get_args(hint) if value != "auto"])


def _each(setting: str, path: str, values: Sequence[str]) -> list[Choice]:
    return [Choice(setting=setting, value=value, fields={path: value}) for value in values]


def case_of(cls: type[Method], fields: Fields, config: Mapping[str, object] | None = None) -> Case:
    """A training and its resources with these fields over those of its file in ``conf/stage``.

    Raises:
        ConfigError: a value is wrong, or a setting refuses its own fields.
    """
    tree: dict[str, object] = {"method": {}, "resources": {}}
    configured = next((configured for method, configured in shipped().values() if method is cls), {})
    for path, value in {**{f"method.{name}": value for name, value in configured.items()}, **fields}.items():
        *parents, name = path.split(".")
        node = tree
        for parent in parents:
            below = node.get(parent)
            node[parent] = node = below if isinstance(below, dict) else {}
        node[name] = value
    method, resources = tree["method"], tree["resources"]
    assert isinstance(method, dict) and isinstance(resources, dict)
    built = typed(cls, method, "method")
    assert isinstance(built, Training)
    return Case(method=built, resources=typed(Resources, resources, "resources"), config=config or {})


def outcome(*chosen: Choice) -> Outcome:
    """Whether choices work together on CPUs or else on a GPU, and what else must be set."""
    on_cpu = _judged(chosen, {})
    return on_cpu if on_cpu.works != "no" else _judged(chosen, _GPU)


def _judged(chosen: tuple[Choice, ...], machine: Fields) -> Outcome:
    """Applies the fix of each refusal until there is none, or one would change a choice."""
    cls = next((each.method for each in chosen if each.method), None) or trainings()["sft"]
    pinned: dict[str, object] = {}
    for each in chosen:
        pinned = {path: value for path, value in pinned.items() if not _overlap(path, each.fields)} | dict(each.fields)
    condition: dict[str, object] = {}
    while True:
        try:
            case = case_of(cls, {**_BASE, **machine, **condition, **pinned})
        except ConfigError as error:
            return Outcome(choices=chosen, works="no", reason=str(error))
        refusal = next(refusals(case), None)
        if refusal is None:
            return Outcome(choices=chosen, works="on a GPU" if machine else "yes", condition=condition, case=case)
        # The precision of conf/resources/gpu.yaml is a default, which a condition may replace; the GPU is not.
        settled = {**pinned, **condition, **{path: 1 for path in machine if path.startswith("resources.")}}
        if any(_overlap(path, settled) for path in refusal.nearest):
            return Outcome(choices=chosen, works="no", rule=refusal.rule, reason=refusal.reason)
        condition |= refusal.nearest


def _overlap(path: str, fields: Fields) -> bool:
    """Whether a field is one of these, contains one, or is part of one."""
    return any(f"{path}.".startswith(f"{each}.") or f"{each}.".startswith(f"{path}.") for each in fields)


@cache
def all_outcomes() -> tuple[list[Outcome], list[Outcome]]:
    """Outcomes of every choice alone, and of all pairs of choices of different settings that work alone."""
    by_setting = choices()
    alone = [outcome(each) for values in by_setting.values() for each in values]
    working = {str(each.choices[0]) for each in alone if each.works != "no"}
    pairs = [
        outcome(left, right)
        for one, other in combinations(by_setting.values(), 2)
        for left in one
        for right in other
        if {str(left), str(right)} <= working
    ]
    return alone, pairs


def compat_dict() -> dict[str, object]:
    """The part of ``compat --json`` that is the same for every pipeline."""
    alone, pairs = all_outcomes()
    return {
        "rules": [_rule_dict(rule) for rule in RULES],
        "settings": [each.to_dict() for each in alone],
        "combinations": [each.to_dict() for each in pairs],
    }


def rule_nearest(rule: Rule) -> Fields:
    """The fix that a rule proposes for its example."""
    if not callable(rule.nearest):
        return rule.nearest
    return rule.nearest(case_of(trainings()[rule.stage], {**_BASE, **rule.example}, rule.config))


def _rule_dict(rule: Rule) -> dict[str, object]:
    return {
        "rule": rule.id,
        "fields": list(rule.fields),
        "example": assigned(_example(rule)),
        "reason": rule.reason,
        "nearest": assigned(rule_nearest(rule)),
    }


def stages_dict(found: Mapping[str, Sequence[Refusal]]) -> list[dict[str, object]]:
    """The part of ``compat --json`` about the stages of a pipeline."""
    return [
        {"stage": name, "works": not refused, "refusals": [_refusal_dict(each, f"stages.{name}") for each in refused]}
        for name, refused in found.items()
    ]


def _refusal_dict(refusal: Refusal, where: str) -> dict[str, object]:
    return {
        "rule": refusal.rule,
        "found": assigned(refusal.found, where),
        "reason": refusal.reason,
        "set": assigned(refusal.nearest, where),
    }


def compat_text() -> str:
    """The tables of ``compat``: settings with conditions, pairs that do not work together, and the rules."""
    alone, pairs = all_outcomes()
    values = [(name, ", ".join(each.value for each in values)) for name, values in choices().items()]
    parts = [_table(("SETTING", "VALUES"), values)]
    if conditions := condition_rows(alone):
        parts.append(_table(("SETTING", "WORKS", "WHY, OR WITH WHAT"), conditions))
    if refused := refused_rows(pairs):
        parts.append(_table(("SETTING", "NOT WITH", "RULE"), refused))
    else:
        parts.append("Every setting of these works with every other.")
    parts.append(_table(("RULE", "REFUSES, FOR EXAMPLE", "WHY", "SET INSTEAD"), rule_rows()))
    return "\n\n".join(parts)


def rule_rows() -> list[tuple[str, str, str, str]]:
    """Every rule with its example, reason, and fix."""
    return [
        (rule.id, " ".join(assigned(_example(rule))), rule.reason, " ".join(assigned(rule_nearest(rule))))
        for rule in RULES
    ]


def _example(rule: Rule) -> Fields:
    """The example of a rule, with the method's name and the model's config as in ``Rule.fields``."""
    method = {"method": rule.stage} if rule.stage != "sft" else {}
    return {**method, **rule.example, **{f"config.{key}": value for key, value in rule.config.items()}}


def condition_rows(alone: Sequence[Outcome]) -> list[tuple[str, str, str]]:
    """The choices that do not work alone, or only under a condition."""
    return [
        (str(each.choices[0]), each.works, each.reason or ", ".join(filter(None, (_conditions(each), *each.needs))))
        for each in alone
        if each.works != "yes" or each.condition or each.needs
    ]


def _conditions(found: Outcome) -> str:
    return " ".join(assigned(found.condition))


def refused_rows(pairs: Sequence[Outcome]) -> list[tuple[str, str, str]]:
    """A choice, the values of another setting that it does not work with, and the rule or reason.

    Of the two settings of a rule, the one that gives fewer rows comes first.
    """
    rows: list[tuple[str, str, str]] = []
    groups: dict[tuple[str, ...], list[tuple[Choice, ...]]] = {}
    for each in pairs:
        if each.works == "no":
            key = (*(one.setting for one in each.choices), each.rule or each.reason or "")
            groups.setdefault(key, []).append(each.choices)
    for (*_, why), found in groups.items():
        if len({right for _, right in found}) < len({left for left, _ in found}):
            found = [(right, left) for left, right in found]
        for first in dict.fromkeys(each[0] for each in found):
            others = [other for left, other in found if left == first]
            rows.append((str(first), f"{others[0].setting}={', '.join(each.value for each in others)}", why))
    return rows


def stages_text(found: Mapping[str, Sequence[Refusal]]) -> str:
    """The trainings of a pipeline and the fixes of those that do not work; long lines, to be pasted."""
    width = max(map(len, found), default=0)
    lines = []
    for name, refused in found.items():
        lines.append(f"{name:<{width}}  {'does not work' if refused else 'works'}")
        for each in refused:
            lines.append(f"{'':<{width}}  {', '.join(assigned(each.found))}: {each.reason} ({each.rule})")
            lines.append(f"{'':<{width}}  -> {' '.join(assigned(each.nearest, f'stages.{name}'))}")
    return "\n".join(lines)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    table = empty_table(*columns)
    for row in rows:
        table.add_row(*row)
    return plain_text(table, unseen=120)
