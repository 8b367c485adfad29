"""Learning-rate schedules by name: the setting, and the arguments of transformers' trainer that choose one."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Lt

from lineage.errors import ConfigError
from lineage.fingerprint import without_nones
from tasks.train.adaptive import Adaptive
from tasks.train.optimizers import refuse_unread

if TYPE_CHECKING:
    from transformers import Trainer

Arguments = dict[str, object]
Name = Literal[
    "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr", "polynomial",
    "inverse_sqrt", "warmup_stable_decay", "reduce_lr_on_plateau",
]  # fmt: skip
PLATEAU: Name = "reduce_lr_on_plateau"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning rate over the steps of a training.

    Args:
        name: an entry of ``SCHEDULES``, which says what each one is and reads.
        warmup: from 0 to the learning rate, linearly: below 1 a share of all steps, from 1 a number of steps.
        adaptive: cuts of it by what the loss does; None: none.
        min_learning_rate: what it ends at, or does not fall below; of ``cosine_with_min_lr`` a tenth of the learning
            rate, of the others 0. ``warmup_stable_decay`` also starts its warm-up there.
        num_cycles: cosines of ``cosine_with_restarts``, one after the other; 2.
        power: of ``polynomial``; 1, which is ``linear``.
        decay: the last part of ``warmup_stable_decay``: below 1 a share of all steps, from 1 a number of steps; 0.1.
        decay_type: its shape; cosine.
        timescale: steps of ``inverse_sqrt`` after which the rate falls with the root of the step; those of the warm-up,
            or 10000 without.
        factor: by which ``reduce_lr_on_plateau`` lowers the learning rate; 0.1.
        patience: measurements without a lower loss that it allows before; 10.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True, "allow_inf_nan": False}

    name: Name = "cosine"
    warmup: Annotated[float, Ge(0)] = 0.05
    adaptive: Adaptive | None = None
    min_learning_rate: Annotated[float, Gt(0)] | None = None
    num_cycles: Annotated[int, Gt(1)] | None = None
    power: Annotated[float, Gt(0)] | None = None
    decay: Annotated[float, Gt(0)] | None = None
    decay_type: Literal["linear", "cosine", "1-sqrt"] | None = None
    timescale: Annotated[int, Gt(0)] | None = None
    factor: Annotated[float, Gt(0), Lt(1)] | None = None
    patience: Annotated[int, Ge(0)] | None = None

    def __post_init__(self) -> None:
        for name in ("warmup", "decay"):
            value = getattr(self, name)
            if value is not None and value >= 1 and value != int(value):
                raise ConfigError(
                    f"schedule.{name}={value:g}: below 1 it is a share of the steps, from 1 a number of steps, which "
                    f"is whole; set schedule.{name}={int(value)}, or a share such as 0.05"
                )
        shared = ("name", "warmup", *(() if self.name == PLATEAU else ("adaptive",)))  # both cut by a loss
        refuse_unread("schedule", self, dict.fromkeys((*SCHEDULES[self.name].reads, *shared), True))
        decay = self._decay
        if self.name == "warmup_stable_decay" and self.warmup < 1 and decay < 1 and self.warmup + decay > 1:
            raise ConfigError(
                f"schedule.warmup={self.warmup:g}, schedule.decay={decay:g}: together they are more than all steps; "
                f"set schedule.decay={1 - self.warmup:g}, or less"
            )

    @property
    def _decay(self) -> float:
        return 0.1 if self.decay is None else self.decay

    def identity(self) -> dict[str, object]:
        """Its part of a recipe: name and share stand beside it, as in recipes from before it was a setting."""
        values = without_nones(asdict(self))
        assert isinstance(values, dict)
        name, warmup = values.pop("name"), values.pop("warmup")
        if self.warmup >= 1:
            values["warmup_steps"] = int(self.warmup)
        share = {"warmup_ratio": warmup} if self.warmup < 1 else {}
        return {"lr_schedule": name, **share, **({"schedule": values} if values else {})}

    def share_of_minimum(self, learning_rate: float) -> float:
        """The minimum learning rate as a share of the learning rate."""
        if self.min_learning_rate is None:
            return 0.1 if self.name == "cosine_with_min_lr" else 0.0
        return self.min_learning_rate / learning_rate

    def is_longer_than(self, num_steps: int) -> bool:
        """Whether warm-up and decay of ``warmup_stable_decay`` are more than all steps."""
        if self.name != "warmup_stable_decay":
            return False
        warmup = int(self.warmup) if self.warmup >= 1 else math.ceil(self.warmup * num_steps)
        return warmup + self.decay_steps(num_steps) > num_steps

    def decay_steps(self, num_steps: int) -> int:
        """Steps of the last part of ``warmup_stable_decay``."""
        return int(self._decay) if self._decay >= 1 else math.ceil(self._decay * num_steps)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What a schedule is and reads.

    Args:
        about: the learning rate after the warm-up, and its paper.
        args: fields of transformers' TrainingArguments, from the setting, the learning rate and the number of steps.
        reads: the fields of the setting that it has, beside ``warmup``.
    """

    about: str
    args: Callable[[Schedule, float, int], Arguments]
    reads: tuple[str, ...] = ()


def _constant(setting: Schedule, learning_rate: float, num_steps: int) -> Arguments:
    # Transformers' own "constant" has no warmup.
    return {"lr_scheduler_type": "constant_with_warmup"}


def _linear(setting: Schedule, learning_rate: float, num_steps: int) -> Arguments:
    if setting.min_learning_rate is None:
        return {"lr_scheduler_type": "linear"}
    return _polynomial(setting, learning_rate, num_steps)


def _polynomial(setting: Schedule, learning_rate: float, num_steps: int) -> Arguments:
    # Transformers' own end is 1e-7, above some learning rates of preference methods.
    end = setting.min_learning_rate or 0.0
    return {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": end, "power": setting.power or 1.0}}


def _cosine(setting: Schedule, learning_rate: float, num_steps: int) -> Arguments:
    share = setting.share_of_minimum(learning_rate)
    if not share:
        return {"lr_scheduler_type": "cosine"}
    return {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": share}}


def _restarts(setting: Schedule, learning_rate: float, num_steps: int) -> Arguments:
    # Transformers' own number of cycles is 1, which is "cosine".
    return {
        "lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": setting.num_cycles or 2},
    }  # fmt: skip


def _inverse_sqrt(setting: Schedule, learning_rate: float, num_steps: int) -> Arguments:
    timescale = {"timescale": setting.timescale} if setting.timescale else {}
    return {"lr_scheduler_type": "inverse_sqrt", "lr_scheduler_kwargs": timescale}


def _stable(setting: Schedule, learning_rate: float, num_steps: int) -> Arguments:
    own = {
        "num_decay_steps": setting.decay_steps(num_steps), "decay_type": setting.decay_type or "cosine",
        "min_lr_ratio": setting.share_of_minimum(learning_rate),
    }  # fmt: skip
    return {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": own}


_MIN = ("min_learning_rate",)
SCHEDULES: Mapping[str, Entry] = {
    "constant": Entry(about="the learning rate", args=_constant),
    "constant_with_warmup": Entry(about="another name of constant, which warms up too", args=_constant),
    "linear": Entry(about="falls linearly", args=_linear, reads=_MIN),
    "cosine": Entry(
        about="falls as a cosine: Loshchilov and Hutter 2016, arXiv:1608.03983", args=_cosine, reads=_MIN
    ),
    "cosine_with_restarts": Entry(
        about="falls as a cosine to 0, and starts again: arXiv:1608.03983", args=_restarts, reads=("num_cycles",)
    ),
    "cosine_with_min_lr": Entry(
        about="cosine that ends at a tenth, as in Hoffmann et al. 2022, arXiv:2203.15556", args=_cosine, reads=_MIN
    ),
    "polynomial": Entry(about="falls as a power of the steps that remain", args=_polynomial, reads=(*_MIN, "power")),
    "inverse_sqrt": Entry(
        about="falls with the square root of the step: Vaswani et al. 2017, arXiv:1706.03762", args=_inverse_sqrt,
        reads=("timescale",),
    ),
    "warmup_stable_decay": Entry(
        about="constant, and falls at the end: Hu et al. 2024, arXiv:2404.06395", args=_stable,
        reads=(*_MIN, "decay", "decay_type"),
    ),
    PLATEAU: Entry(
        about="falls each time that the loss on held-out rows does not: of torch.optim, with a warm-up",
        args=_constant, reads=(*_MIN, "factor", "patience"),  # install_schedule does the rest
    ),
}  # fmt: skip


def schedule_args(setting: Schedule, learning_rate: float, num_steps: int, updates_per_step: int = 1) -> Arguments:
    """The arguments of a trainer for a schedule; ``install_schedule`` does the rest.

    Args:
        updates_per_step: of a loop of its own, which steps the schedule as often.

    Raises:
        ConfigError: warm-up and decay are more than the steps that the rows make, which the plan did not know.
    """
    if setting.is_longer_than(num_steps):
        raise ConfigError(
            f"schedule.warmup={setting.warmup:g}, schedule.decay={setting._decay:g}: warm-up and decay are more than "
            f"the {num_steps} steps of this training; set smaller ones, or shares of the steps such as "
            "schedule.warmup=0.05 schedule.decay=0.1"
        )
    in_updates = {
        name: getattr(setting, name) * updates_per_step
        for name in ("warmup", "decay", "timescale")
        if (getattr(setting, name) or 0) >= 1  # a number of steps, not a share of them
    }
    counted = replace(setting, **in_updates)
    # Below 1, transformers 5 takes warmup_steps for a ratio.
    warmup = counted.warmup if counted.warmup < 1 else int(counted.warmup)
    own = SCHEDULES[counted.name].args(counted, learning_rate, num_steps * updates_per_step)
    return {"learning_rate": learning_rate, "warmup_steps": warmup, **own}


def install_schedule(trainer: "Trainer", setting: Schedule, learning_rate: float) -> None:
    """Has a trainer of transformers build the schedule, where its arguments do not choose it."""
    if setting.name == PLATEAU:
        from tasks.train.own_optimizers import install_plateau

        install_plateau(
            trainer,
            factor=0.1 if setting.factor is None else setting.factor,
            patience=10 if setting.patience is None else setting.patience,
            floor=setting.share_of_minimum(learning_rate),
        )
