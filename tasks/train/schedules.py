"""Learning-rate schedules by name: the setting, and the arguments of transformers' trainer that choose one."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge

from lineage.errors import ConfigError
from lineage.fingerprint import without_nones
from tasks.train.adaptive import Adaptive

Arguments = dict[str, object]
Name = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning rate over the steps of a training.

    Args:
        name: an entry of ``SCHEDULES``.
        warmup: from 0 to the learning rate, linearly: below 1 a share of all steps, from 1 a number of steps.
        adaptive: cuts of it by what the loss does; None: none.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True, "allow_inf_nan": False}

    name: Name = "cosine"
    warmup: Annotated[float, Ge(0)] = 0.05
    adaptive: Adaptive | None = None

    def __post_init__(self) -> None:
        if self.warmup >= 1 and self.warmup != int(self.warmup):
            raise ConfigError(
                f"schedule.warmup={self.warmup:g}: below 1 it is a share of the steps, from 1 a number of steps, which "
                f"is whole; set schedule.warmup={int(self.warmup)}, or a share such as 0.05"
            )

    def identity(self) -> dict[str, object]:
        """Its part of a recipe: name and share stand beside it, as in recipes from before it was a setting."""
        values = without_nones(asdict(self))
        assert isinstance(values, dict)
        name, warmup = values.pop("name"), values.pop("warmup")
        if self.warmup >= 1:
            values["warmup_steps"] = int(self.warmup)
        share = {"warmup_ratio": warmup} if self.warmup < 1 else {}
        return {"lr_schedule": name, **share, **({"schedule": values} if values else {})}


# What a row returns, from the setting and the number of steps, are fields of transformers' TrainingArguments.
SCHEDULES: Mapping[str, Callable[[Schedule, int], Arguments]] = {
    # Transformers' own "constant" has no warmup.
    "constant": lambda setting, num_steps: {"lr_scheduler_type": "constant_with_warmup"},
    "linear": lambda setting, num_steps: {"lr_scheduler_type": "linear"},
    "cosine": lambda setting, num_steps: {"lr_scheduler_type": "cosine"},
}


def schedule_args(setting: Schedule, learning_rate: float, num_steps: int) -> Arguments:
    """The arguments of a trainer for a schedule."""
    # Below 1, transformers 5 takes warmup_steps for a ratio.
    warmup = setting.warmup if setting.warmup < 1 else int(setting.warmup)
    return {"learning_rate": learning_rate, "warmup_steps": warmup, **SCHEDULES[setting.name](setting, num_steps)}
