"""Learning-rate schedules by name: the setting, and the arguments of transformers' trainer that choose one.

An adaptive schedule is cut by how far the loss, or minus the reward, is from its moving average. The average and the
variance are exponential: Finch 2009, "Incremental calculation of weighted mean and variance", section 9.
z = (loss - mean) / sqrt(variance).
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Gt, Lt

from lineage.errors import ConfigError
from lineage.fingerprint import Setting, set_fields
from tasks.train.optim.optimizers import refuse_unread

if TYPE_CHECKING:
    from transformers import Trainer

Arguments = dict[str, object]
Name = Literal[
    "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr", "polynomial",
    "inverse_sqrt", "warmup_stable_decay", "reduce_lr_on_plateau",
]  # fmt: skip
PLATEAU: Name = "reduce_lr_on_plateau"


@dataclass(frozen=True, kw_only=True)
class Adaptive(Setting):
    """Cuts the schedule's learning rate when the loss of a step spikes, stays where it is, or diverges.

    Methods with rewards, whose loss is 0 by construction, have minus the mean reward of a step watched in its place: a
    spike is then a reward that collapses, a plateau one that no longer rises.

    Args:
        spike_z: a loss this many standard deviations above its average is a spike; None: none is.
        spike_factor: factor of the learning rate after a spike, from which it rises back linearly.
        recovery_steps: steps until it is back.
        plateau_steps: steps without a smaller average, after which the learning rate is permanently cut; None: never.
        plateau_factor: factor of that cut.
        min_improvement: by which share an average must be smaller to count.
        divergence_z: a loss so far above its average, or a non-finite one, has the training go back to the weights and
            the optimizer of its best checkpoint (``best``); rows and schedule continue. None: it never goes back.
        divergence_factor: permanent factor of the learning rate after that.
        max_returns: how often it goes back.
        smoothing: of the average: the share of the average before in that of a step.
        start_steps: steps at the start and after a return that only update the average.
        min_factor: smallest factor of permanent cuts.
    """

    spike_z: Annotated[float, Gt(0)] | None = 4.0
    spike_factor: Annotated[float, Gt(0), Lt(1)] = 0.5
    recovery_steps: Annotated[int, Gt(0)] = 20
    plateau_steps: Annotated[int, Gt(0)] | None = 100
    plateau_factor: Annotated[float, Gt(0), Lt(1)] = 0.5
    min_improvement: Annotated[float, Ge(0), Lt(1)] = 0.001
    divergence_z: Annotated[float, Gt(0)] | None = None
    divergence_factor: Annotated[float, Gt(0), Lt(1)] = 0.5
    max_returns: Annotated[int, Gt(0)] = 3
    smoothing: Annotated[float, Gt(0), Lt(1)] = 0.95
    start_steps: Annotated[int, Gt(0)] = 20
    min_factor: Annotated[float, Gt(0), Lt(1)] = 0.01

    def __post_init__(self) -> None:
        if self.spike_z is None and self.plateau_steps is None and self.divergence_z is None:
            raise ConfigError(
                "schedule.adaptive: spike_z, plateau_steps and divergence_z are null, so it never acts; set one of "
                "them, or schedule.adaptive=null"
            )
        if self.spike_z is not None and self.divergence_z is not None and self.divergence_z <= self.spike_z:
            raise ConfigError(
                f"schedule.adaptive.divergence_z={self.divergence_z:g} and spike_z={self.spike_z:g}: what diverges is "
                f"further off than a spike; set divergence_z={2 * self.spike_z:g}, or spike_z=null"
            )


@dataclass(frozen=True, kw_only=True)
class Schedule(Setting):
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
        refuse_unread("schedule", self, "name", {name: each.reads for name, each in SCHEDULES.items()})
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
        values = set_fields(self)
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
        """Whether warm-up and decay of ``warmup_stable_decay`` have more steps than the training."""
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
        reads: the fields of the setting that it reads, in addition to ``warmup``.
    """

    about: str
    reads: tuple[str, ...] = ("adaptive",)


def _name_and_own(setting: Schedule, learning_rate: float, num_steps: int) -> tuple[str, Arguments]:
    """transformers' name of a schedule, and its arguments."""
    minimum, share = setting.min_learning_rate, setting.share_of_minimum(learning_rate)
    match setting.name:
        case "linear" if minimum is None:
            return "linear", {}
        case "linear" | "polynomial":
            # Transformers' own end is 1e-7, above some learning rates of preference methods.
            return "polynomial", {"lr_end": minimum or 0.0, "power": setting.power or 1.0}
        case "cosine" | "cosine_with_min_lr":
            return ("cosine_with_min_lr", {"min_lr_rate": share}) if share else ("cosine", {})
        case "cosine_with_restarts":  # transformers' own number of cycles is 1, which is "cosine"
            return "cosine_with_restarts", {"num_cycles": setting.num_cycles or 2}
        case "inverse_sqrt":
            return "inverse_sqrt", {"timescale": setting.timescale} if setting.timescale else {}
        case "warmup_stable_decay":
            return "warmup_stable_decay", {
                "num_decay_steps": setting.decay_steps(num_steps), "decay_type": setting.decay_type or "cosine",
                "min_lr_ratio": share,
            }  # fmt: skip
    return "constant_with_warmup", {}  # transformers' own "constant" has no warm-up


_MIN = ("min_learning_rate", "adaptive")
SCHEDULES: Mapping[str, Entry] = {
    "constant": Entry(about="the learning rate"),
    "constant_with_warmup": Entry(about="another name of constant, which warms up too"),
    "linear": Entry(about="falls linearly", reads=_MIN),
    "cosine": Entry(about="falls as a cosine: Loshchilov and Hutter 2016, arXiv:1608.03983", reads=_MIN),
    "cosine_with_restarts": Entry(
        about="falls as a cosine to 0, and starts again: arXiv:1608.03983", reads=("num_cycles", "adaptive"),
    ),
    "cosine_with_min_lr": Entry(
        about="cosine that ends at a tenth, as in Hoffmann et al. 2022, arXiv:2203.15556", reads=_MIN
    ),
    "polynomial": Entry(about="falls as a power of the steps that remain", reads=(*_MIN, "power")),
    "inverse_sqrt": Entry(
        about="falls with the square root of the step: Vaswani et al. 2017, arXiv:1706.03762",
        reads=("timescale", "adaptive"),
    ),
    "warmup_stable_decay": Entry(
        about="constant, and falls at the end: Hu et al. 2024, arXiv:2404.06395", reads=(*_MIN, "decay", "decay_type"),
    ),
    PLATEAU: Entry(
        about="falls each time that the loss on held-out rows does not: of torch.optim, with a warm-up",
        reads=("min_learning_rate", "factor", "patience"),  # adaptive also cuts by a loss
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
    name, own = _name_and_own(counted, learning_rate, num_steps * updates_per_step)
    return {
        "learning_rate": learning_rate, "warmup_steps": warmup, "lr_scheduler_type": name, "lr_scheduler_kwargs": own,
    }  # fmt: skip


def install_schedule(trainer: "Trainer", setting: Schedule, learning_rate: float) -> None:
    """Lets a trainer of transformers build the schedule, where its arguments cannot choose it."""
    if setting.name == PLATEAU:
        from tasks.train.optim.own_optimizers import install_plateau

        install_plateau(
            trainer,
            factor=0.1 if setting.factor is None else setting.factor,
            patience=10 if setting.patience is None else setting.patience,
            floor=setting.share_of_minimum(learning_rate),
        )


class Event(StrEnum):
    """The reason for an intervention."""

    SPIKE = "spike"
    PLATEAU = "plateau"
    DIVERGENCE = "divergence"


@dataclass(kw_only=True)
class LossWatch:
    """The moving average of the loss, and the cuts so far; the state that a resume needs is JSON.

    Attributes:
        count: losses in the average.
        least, waited: the smallest average so far, and the steps since.
        cut: the product of all permanent cuts.
        recovering: remaining steps until the learning rate has recovered from a spike.
        events: step, event and the factor of the learning rate after it.
    """

    setting: Adaptive
    count: int = 0
    mean: float = 0.0
    variance: float = 0.0
    least: float | None = None
    waited: int = 0
    cut: float = 1.0
    recovering: int = 0
    returns: int = 0
    events: list[tuple[int, str, float]] = field(default_factory=list)

    @property
    def factor(self) -> float:
        """The factor of the schedule's learning rate at the next step."""
        setting = self.setting
        return self.cut * (1 - (1 - setting.spike_factor) * self.recovering / setting.recovery_steps)

    def state(self) -> dict[str, object]:
        return {name: value for name, value in asdict(self).items() if name != "setting"}

    def load(self, state: dict[str, object]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self.events = [(step, event, factor) for step, event, factor in self.events]

    def z(self, loss: float) -> float:
        """How many standard deviations a loss is above the average; infinite where it is non-finite."""
        if not math.isfinite(loss):
            return math.inf
        if self.count < self.setting.start_steps or self.variance <= 0:
            return 0.0
        return (loss - self.mean) / math.sqrt(self.variance)

    def observe(self, step: int, loss: float, *, can_return: bool) -> Event | None:
        """Processes the loss of a step; returns the intervention, if any.

        Args:
            can_return: whether there is a best checkpoint to go back to.
        """
        setting, z = self.setting, self.z(loss)
        self.recovering = max(0, self.recovering - 1)
        diverges = setting.divergence_z is not None and z >= setting.divergence_z
        if diverges and can_return and self.returns < setting.max_returns:
            self.returns += 1
            self.count, self.mean, self.variance, self.least, self.waited, self.recovering = 0, 0.0, 0.0, None, 0, 0
            return self._cut(step, Event.DIVERGENCE, setting.divergence_factor)
        if not math.isfinite(loss):
            return None
        if setting.spike_z is not None and z >= setting.spike_z:
            self._average(self.mean + setting.spike_z * math.sqrt(self.variance))  # so that no spike hides the next one
            self.recovering = setting.recovery_steps
            return self._note(step, Event.SPIKE)
        self._average(loss)
        return self._plateau(step)

    def _plateau(self, step: int) -> Event | None:
        setting = self.setting
        if setting.plateau_steps is None or self.count < setting.start_steps:
            return None
        if self.least is None or self.mean < self.least - setting.min_improvement * abs(self.least):
            self.least, self.waited = self.mean, 0
            return None
        self.waited += 1
        if self.waited < setting.plateau_steps:
            return None
        self.waited = 0
        before = self.cut
        if before <= setting.min_factor:
            return None
        return self._cut(step, Event.PLATEAU, setting.plateau_factor)

    def _average(self, loss: float) -> None:
        self.count += 1
        share = max(1 - self.setting.smoothing, 1 / self.count)  # the first steps have equal weights
        difference = loss - self.mean
        self.mean += share * difference
        self.variance = (1 - share) * (self.variance + share * difference * difference)

    def _cut(self, step: int, event: Event, factor: float) -> Event:
        self.cut = max(self.setting.min_factor, self.cut * factor)
        return self._note(step, event)

    def _note(self, step: int, event: Event) -> Event:
        self.events.append((step, event.value, self.factor))
        return event
