"""A method: a frozen dataclass of hyperparameters, and how it runs. ``docs/add_a_method.md`` shows one."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Gt

from lineage.errors import ConfigError
from lineage.fingerprint import field_names, without_nones
from lineage.source.model_source import text_digest
from tasks.context import Metrics, TrainContext
from tasks.data.images import Images
from tasks.data.tokens.template import Thinking
from tasks.data.tokens.tokenization import ControlText, TooLong
from tasks.model.chat_template import CHAT_TEMPLATES, template_text
from tasks.recipe import (
    FROZEN_POLICY,
    POLICY,
    REWARD_HEAD,
    REWARD_MODEL,
    TEACHER,
    VALUE_MODEL,
    Input,
    Inputs,
    Method,
    Role,
    TrainingRecipe,
)
from tasks.reward_functions import identity_of
from tasks.train.best import Validation
from tasks.train.models.adapters import Adapter
from tasks.train.models.quantization import Quantization
from tasks.train.optim.optimizers import Optimizer
from tasks.train.optim.schedules import Adaptive, Schedule

if TYPE_CHECKING:
    from transformers import Trainer

    from tasks.train.run import TrainingRun

__all__ = [
    "FROZEN_POLICY",
    "LOOP_FIELDS",
    "POLICY",
    "REWARD_HEAD",
    "REWARD_MODEL",
    "TEACHER",
    "VALUE_MODEL",
    "Adapter",
    "Adaptive",
    "AnswerTraining",
    "Input",
    "Inputs",
    "Method",
    "Optimizer",
    "Quantization",
    "Role",
    "Schedule",
    "Training",
    "Validation",
]


# Fields that were added later with a default other than None: the default stays out of the fingerprint.
_ADDED_LATER = {"output": "last", "on_divergence": "fail", "adapter_in": "merge"}
# The fields that transformers' trainer applies; in a loop of its own, ``tasks.train.loop.own_loop.Optimization`` does.
LOOP_FIELDS = frozenset({"precision", "optimizer", "schedule", "max_grad_norm"})


@dataclass(frozen=True, kw_only=True)
class Training(TrainingRecipe):
    """A method that takes optimizer steps. It defines its fields, ``reads``, ``models`` and its ``trainer``.

    A method with a loop of its own defines ``loop`` instead (``tasks.train.loop.own_loop``).

    Class attributes:
        applies: the fields of ``LOOP_FIELDS`` that a loop of its own applies. The others must keep their defaults, and
            are not in its recipe.
    """

    applies: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls.has_own_loop = cls.loop is not Training.loop

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.has_own_loop:
            self._check_own_loop()

    def recipe(self) -> dict[str, object]:
        """As of every method, with settings in their first form, so that old outputs stay valid.

        Without the fields that a loop of its own does not apply.
        """
        recipe: dict[str, object] = {"method": self.name(), "version": self.version, **_as_set(self)}
        if rewards := getattr(self, "rewards", None):
            recipe["rewards"] = identity_of(rewards)
        recipe = {name: value for name, value in recipe.items() if _ADDED_LATER.get(name) != value}
        for name in ("optimizer", "schedule", "adapter", "quantization"):
            recipe.pop(name, None)
        recipe |= {**self.optimizer.identity(), **self.schedule.identity()}
        recipe |= self.adapter.identity() if self.adapter else {}
        recipe |= self.quantization.identity(recipe) if self.quantization else {}
        recipe.pop("evaluation", None)
        recipe |= {"evaluation": found} if self.evaluation and (found := self.evaluation.identity()) else {}
        template = recipe.get("chat_template")
        if isinstance(template, str) and template not in CHAT_TEMPLATES:  # the text of a family, which TRL may change
            recipe["chat_template_text"] = text_digest(template_text(template))
        versions = {**self.option_versions, **(_OF_REFERENCES if self.has_reference else {})}
        for options, (entry, raised) in versions.items():
            if all(_is_set(recipe, option) for option in options.split("+")):
                version = recipe.get(entry, 1)
                assert isinstance(version, int)
                recipe[entry] = version + raised
        recipe |= self._raised()
        for field in LOOP_FIELDS - self.applies if self.has_own_loop else ():
            setting = getattr(self, field)
            for name in (field, *(setting.identity() if isinstance(setting, Optimizer | Schedule) else ())):
                recipe.pop(name, None)
        return recipe

    def _raised(self) -> dict[str, int]:
        """The second version of what became other results where fields have these values."""
        is_copy = self.has_reference and self.reference_kind == "copy" and not self.has_own_loop
        found = {
            # The copy of the adapter had its dropout too.
            "reference_version": is_copy and self.adapter and self.adapter.dropout,
            # A base in bf16 rounded modules_to_save and biases of the adapter below.
            "stack_version": self.adapter_in == "stack" and self.precision in ("bf16", "auto"),
        }
        return {name: 2 for name, is_other in found.items() if is_other}

    def _check_own_loop(self) -> None:
        """Refuses a value that the training would ignore."""
        cls = type(self).__name__
        if self.best is not None:
            raise ConfigError(
                f"method.best: {cls} has a loop of its own, which measures no competing models; set best=null"
            )
        if self.validation is not None:
            raise ConfigError(
                f"method.validation: {cls} has a loop of its own, which measures no held-out rows; set validation=null"
            )
        if self.evaluation is not None:
            raise ConfigError(
                f"evaluation: {cls} has a loop of its own, which keeps no checkpoint to score; set evaluation=null"
            )
        if self.schedule.adaptive is not None:
            raise ConfigError(
                f"method.schedule.adaptive: {cls} has a loop of its own, which does not watch the loss; set "
                "schedule.adaptive=null"
            )
        defaults = {each.name: each.default for each in fields(self)}
        for name in sorted(LOOP_FIELDS - self.applies):
            difference = _difference(name, getattr(self, name), defaults[name])
            if difference:
                field, found, default = difference
                raise ConfigError(
                    f"{field}={found}: {cls} has a loop of its own, which does not apply it; set {field}={default}, "
                    f'or apply it in {cls}.loop (Optimization does) and add "{name}" to {cls}.applies'
                )

    def run(self, inputs: Inputs, ctx: TrainContext) -> Metrics:
        """Trains, and writes the output."""
        from tasks.train.run import train

        return train(self, inputs, ctx, self.loop)

    def loop(self, run: "TrainingRun") -> Metrics:
        """Trains ``run.policy.model`` to its last step; returns final metrics."""
        return run.fit(self.trainer(run))

    def trainer(self, run: "TrainingRun") -> "Trainer":
        """The trainer of a method that transformers' loop trains: ``run.trl(Trainer, Config, **own)``."""
        raise NotImplementedError(f"{type(self).__qualname__} defines neither trainer(run) nor loop(run)")


@dataclass(frozen=True, kw_only=True)
class AnswerTraining(Training):
    """A training on answers to prompts, which are rows of their own lengths.

    Args:
        too_long: what is done with a row of more than ``max_length`` tokens: cut the end of its answers (None), cut the
            beginning of its prompt, drop it, or fail.
        max_prompt_length: a longer prompt, which is all before the first answer, keeps its last tokens.
        thinking: whether thinking in the answers (``<think>...</think>``) is trained or dropped; None: as the chat
            template does, and a row whose thinking the template would drop is an error.
        control_tokens: what is done with rows whose texts spell a control token, such as ``<|im_end|>``: encode it as
            text (None), keep it as that token, drop the rows, or fail.
        images: rows may have images, which the model reads; the language model alone is trained, unless
            ``images.trains`` names other parts. None: rows with images are refused.
    """

    global_batch_size: Annotated[int, Gt(0)] = 64  # rows per step: conversations, pairs, or single answers
    max_length: Annotated[int, Gt(0)] = 2048  # tokens, prompt + answer
    too_long: TooLong | None = None
    max_prompt_length: Annotated[int, Gt(0)] | None = None  # tokens
    thinking: Thinking | None = None
    control_tokens: ControlText | None = None
    images: Images | None = None


def _as_set(method: Training) -> dict[str, object]:
    """The fields that are not None, and of settings those of theirs."""
    values = {name: getattr(method, name) for name in field_names(type(method))}
    return {
        name: value if isinstance(value, str | int | float) else without_nones(value)
        for name, value in values.items()
        if value is not None
    }


def _difference(name: str, found: object, default: object) -> tuple[str, object, object] | None:
    """The field that differs from its default, found and default; of a setting the first of its own fields."""
    if is_dataclass(found) and is_dataclass(default):
        for field in fields(found):
            values = getattr(found, field.name), getattr(default, field.name)
            if values[0] != values[1]:
                return f"{name}.{field.name}", *values
        return None
    return None if found == default else (name, found, default)


# Of methods with a reference: at first the noise was in the reference too, where it is the policy without its adapter.
_OF_REFERENCES = {"neftune_alpha+adapter": ("neftune_version", 1)}


def _is_set(recipe: object, option: str) -> bool:
    """Whether a recipe, which has no field that is None, has a field; fields of its fields are named with dots."""
    for name in option.split("."):
        if not isinstance(recipe, Mapping) or name not in recipe:
            return False
        recipe = recipe[name]
    return True
