"""An adaptive learning rate: cuts of the schedule's, decided by how far the loss is from its moving average.

The average and the variance are exponential: Finch 2009, "Incremental calculation of weighted mean and variance",
section 9. z = (loss - mean) / sqrt(variance).
"""

import math
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Annotated, ClassVar

from annotated_types import Ge, Gt, Lt

from lineage.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Adaptive:
    """Cuts the schedule's learning rate when the loss of a step spikes, stays where it is, or diverges.

    Args:
        spike_z: a loss so many standard deviations above its average is a spike; None: none is.
        spike_factor: of the learning rate after a spike; it rises back linearly.
        recovery_steps: steps until it is back.
        plateau_steps: steps without a smaller average, after which the learning rate is cut for good; None: never.
        plateau_factor: of that cut.
        min_improvement: by which share an average must be smaller to count.
        divergence_z: a loss so far above its average, or a non-finite one, has the training go back to the weights and
            the optimizer of its best checkpoint (``best``); rows and schedule go on. None: it never goes back.
        divergence_factor: of the learning rate after that, for good.
        max_returns: how often it goes back.
        smoothing: of the average: the share of the average before in that of a step.
        start_steps: steps of which only the average is taken, at the start and after a return.
        min_factor: below which no cut for good goes.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True, "allow_inf_nan": False}

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


class Event(StrEnum):
    """What an intervention answers."""

    SPIKE = "spike"
    PLATEAU = "plateau"
    DIVERGENCE = "divergence"


@dataclass(kw_only=True)
class LossWatch:
    """The moving average of the loss, and the cuts so far: all that a resume needs, as JSON.

    Attributes:
        count: losses in the average.
        least, waited: the smallest average so far, and the steps since.
        cut: the cuts for good, multiplied.
        recovering: steps that are left until a spike is over.
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
        """Of the schedule's learning rate, at the next step."""
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
        """Takes in the loss of a step; returns what it did about it.

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
            self._average(self.mean + setting.spike_z * math.sqrt(self.variance))  # no spike hides the next
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
        share = max(1 - self.setting.smoothing, 1 / self.count)  # the first steps count alike
        difference = loss - self.mean
        self.mean += share * difference
        self.variance = (1 - share) * (self.variance + share * difference * difference)

    def _cut(self, step: int, event: Event, factor: float) -> Event:
        self.cut = max(self.setting.min_factor, self.cut * factor)
        return self._note(step, event)

    def _note(self, step: int, event: Event) -> Event:
        self.events.append((step, event.value, self.factor))
        return event
