"""A rule of what works with what, and the training that it judges."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tasks.context import Resources
from tasks.method import Training
from tasks.train.optimizers import OPTIMIZERS, Entry

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

    def get(self, path: str) -> object:
        """The value of a field, such as ``method.adapter.type``; None: it, or the setting that it is of, is not set."""
        return self.found(path)[1]

    def found(self, path: str) -> tuple[str, object]:
        """The same, with the field that holds it: ``method.adapter`` where there is no adapter."""
        if path == "method":
            return path, type(self.method).__name__
        if path.startswith("config."):
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
    def optimizer(self) -> Entry:
        """What the optimizer is and needs."""
        return OPTIMIZERS[self.method.optimizer.name]

    @property
    def accumulates(self) -> bool:
        """Whether a step adds up several micro batches."""
        return self.method.global_batch_size > self.resources.num_workers * self.resources.micro_batch_size

    @property
    def on_gpu(self) -> bool:
        return self.resources.gpus_per_worker > 0


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Settings that do not work together.

    Args:
        id: its name in ``posttrain compat``.
        fields: the fields that it joins; a refusal shows their values.
        refuses: whether it refuses a training.
        reason: why, as half a sentence after the values of the fields.
        detail: what to say in place of ``reason`` of the training that is refused.
        nearest: the values that make it work with the fewest changes; they pass every rule.
        example: values that it refuses, of a stage of ``stage``: the tests try both.
        stage: a file of ``conf/stage``, or ``own_loop`` for a method with a loop of its own.
        config: of the example's model.
    """

    id: str
    fields: tuple[str, ...]
    refuses: Callable[[Case], object]
    reason: str
    nearest: Fields | Callable[[Case], Fields]
    example: Fields
    stage: str = "sft"
    config: Mapping[str, object] = field(default_factory=dict)
    detail: Callable[[Case], str] | None = None
