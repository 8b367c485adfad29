"""A compatibility rule, and the training that it is applied to."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass
from enum import Enum

from lineage.fingerprint import set_fields
from tasks.context import Resources
from tasks.method import Training
from tasks.train.sharding import STRATEGIES, holds_parts, is_fsdp

_CONFIG = "config."
Fields = Mapping[str, object]  # field of a stage, such as method.adapter.type or resources.num_workers -> value


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training and what it runs on.

    Args:
        config: of its model, as ``config.json`` has it; empty: not known yet, so no rule that reads it applies.
    """

    method: Training
    resources: Resources
    config: Mapping[str, object] = field(default_factory=dict)
    _known: dict[str, tuple[str, object]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def get(self, path: str) -> object:
        """The value of a field, such as ``method.adapter.type``; None: it, or the setting around it, is not set."""
        return self.found(path)[1]

    def found(self, path: str) -> tuple[str, object]:
        """The same, with the field that holds it: ``method.adapter`` where there is no adapter."""
        if path not in self._known:  # many rules ask for the same fields
            self._known[path] = self._find(path)
        return self._known[path]

    def _find(self, path: str) -> tuple[str, object]:
        if path == "method":
            return path, type(self.method).__name__
        if path.startswith(_CONFIG):
            node: object = self.config
            for name in path.split(".")[1:]:
                node = node.get(name) if isinstance(node, Mapping) else None
            return path, node
        value: object = self
        names = path.split(".")
        for depth, name in enumerate(names, start=1):
            value = getattr(value, name, None)
            if value is None:
                return ".".join(names[:depth]), None
        return path, value

    @property
    def on_gpu(self) -> bool:
        return self.resources.gpus_per_worker > 0


Condition = object  # a value; several of them, as a tuple; or a function of the case
Fit = Fields | Callable[[Case], Fields]
SET = bool  # any value except None, 0 and false


HAVE_B = ("lora", "dora")  # adapters with two matrices, one of which starts at 0
# Parts of examples.
GPU: Fields = {"resources.gpus_per_worker": 1}
ZERO: Fields = {"resources.num_workers": 2, "resources.sharding": "zero2"}
FSDP: Fields = {**ZERO, "resources.sharding": "fsdp"}


def own_loop(case: Case) -> bool:
    """Condition of ``method``: it trains without a trainer of transformers."""
    return case.method.has_own_loop


def sharded(case: Case) -> bool:
    """Condition of ``resources.sharding``: workers divide something among them."""
    return case.resources.sharding != "none"


def by_deepspeed(case: Case) -> bool:
    """Condition of ``resources.sharding``."""
    return STRATEGIES[case.resources.sharding].engine == "deepspeed"


def by_fsdp(case: Case) -> bool:
    """Condition of ``resources.sharding``."""
    return is_fsdp(case.resources)


def divides_weights(case: Case) -> bool:
    """Condition of ``resources.sharding``: no worker holds a whole model."""
    return holds_parts(case.resources)


UNSHARDED: Fields = {"resources.sharding": "none"}  # a training is whole on each worker


def shown(_case: Case) -> bool:
    """Condition of a field that a refusal shows, whatever its value."""
    return True


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Settings that do not work together.

    Args:
        id: its name in ``posttrain compat``.
        when: the fields that it concerns, which a refusal shows, with the combination of values that is refused.
        reason: why, as a clause after the values of the fields.
        detail: a more specific reason for a given training, used in place of ``reason``.
        nearest: the values that make it work with the fewest changes; they pass every rule.
        also: values that, together with those of ``when``, make an example that it refuses; tests try it.
        stage: of the example: a file of ``conf/stage``, or ``own_loop`` for a method with a loop of its own.
    """

    id: str
    when: Mapping[str, Condition]
    reason: str
    nearest: Fit
    also: Fields = field(default_factory=dict)
    stage: str = "sft"
    detail: Callable[[Case], str] | None = None

    def refuses(self, case: Case) -> bool:
        """Whether all fields have the refused values."""
        return all(_has(case, path, wanted) for path, wanted in self.when.items())

    def remedy(self, case: Case) -> Fields:
        """The fields to set in a training, with the old name of its sharding where that has it."""
        found = self.nearest(case) if callable(self.nearest) else self.nearest
        is_old = "resources.sharding" in found and case.resources.zero_stage
        return {**found, "resources.zero_stage": 0} if is_old else found

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(self.when)

    @property
    def example(self) -> Fields:
        """Values of the method and its resources that it refuses."""
        return {path: value for path, value in self._values.items() if not path.startswith(_CONFIG)}

    @property
    def config(self) -> Fields:
        """The config of the example's model."""
        return {
            path.removeprefix(_CONFIG): value for path, value in self._values.items() if path.startswith(_CONFIG)
        }  # fmt: skip

    @property
    def _values(self) -> Fields:
        plain = {path: wanted for path, wanted in self.when.items() if not callable(wanted)}
        return {**{path: each[0] if isinstance(each, tuple) else each for path, each in plain.items()}, **self.also}


def _has(case: Case, path: str, wanted: Condition) -> bool:
    if wanted is not SET and callable(wanted):
        return bool(wanted(case))
    value = case.get(path)
    if wanted is SET:
        return bool(value)
    return value in wanted if isinstance(wanted, tuple) else value == wanted


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A refused training: the rule's finding, and what to do.

    Args:
        found: the fields that do not work together -> their values.
        nearest: the fields to set.
    """

    rule: str
    found: Fields
    reason: str
    nearest: Fields

    def text(self, where: str) -> str:
        """A message about the stage at ``where``, such as ``stages.sft``, that ends in overrides to paste."""
        return (
            f"{where}: {', '.join(assigned(self.found))}: {self.reason}; set {' '.join(assigned(self.nearest, where))}"
        )


def assigned(values: Fields, where: str = "") -> list[str]:
    """Fields and values in the form of overrides."""
    prefix = f"{where}." if where else ""
    return [f"{prefix}{path}={_written(value)}" for path, value in values.items()]


def _written(value: object) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, float):
        return f"{value:g}"
    if is_dataclass(value) and not isinstance(value, type):
        return f"{{{','.join(f'{name}:{_written(each)}' for name, each in set_fields(value).items())}}}"
    return value if isinstance(value, str) else json.dumps(value)
