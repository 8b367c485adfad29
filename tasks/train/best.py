"""When a training is validated, and which checkpoint is best by a metric."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, ClassVar, Literal, Protocol

from annotated_types import Gt

from lineage.checkpoints import Checkpoint
from lineage.errors import ConfigError
from lineage.fingerprint import Setting

VAL_LOSS = "val/loss"
HELD_OUT_LOSS = "held_out_loss"  # the mean loss on the held-out rows of the stage's own data
# Metrics: of the steps of every training, of its output besides, and of kinds of methods. NAME is that of a reward; a
# name that ends in * stands for all that begin like it.
STEPS = (
    "loss", "grad_norm", "learning_rate", "num_tokens", "memory_gib", "tokens_per_second",
    "tokens_per_second_per_worker", "mfu", "aux_loss",
)  # fmt: skip
ONLY_REPORTED = ("learning_rate", "memory_gib")  # no metrics of an output
OUTPUT = (
    "steps", "epochs", "rows", "rows_cut", "rows_dropped", "packs", "train_seconds", "trained_tokens_percent",
    "prompt_tokens", "parameters", "trained_parameters", "percent_trained", "best_step", "ended_early_at_step",
    "diverged_at_step", "weights_left_out", "weights_unchanged",
)  # fmt: skip
MERGES = tuple(f"merge/{of}_{when}" for of in ("logps", "scores") for when in ("before", "after", "difference"))
BY_OPTION = (
    *MERGES, "adaptive/*", "diloco/*", "weights/reward_model", "sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/max", "sampling/importance_sampling_ratio/mean",
    "sampling/importance_sampling_ratio/min", "sampling/importance_sampling_ratio/max",
)  # fmt: skip
PAIRS = (
    "rewards/accuracies", "rewards/margins", "rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected",
    "mean_token_accuracy",
)  # fmt: skip
COMPLETIONS = (
    "completions/mean_length", "completions/min_length", "completions/max_length", "completions/clipped_ratio",
    "completions/mean_terminated_length", "completions/min_terminated_length", "completions/max_terminated_length",
    "sampler/logp_difference_mean", "sampler/logp_difference_max", "sampler/weights_step",
)  # fmt: skip
REWARDED = (
    *COMPLETIONS, "reward", "reward_std", "rewards/NAME/mean", "rewards/NAME/std", "frac_reward_zero_std", "kl",
    "entropy", "advantages/max", "advantages/min",
)  # fmt: skip
CLIPPED = (
    "clip_ratio/low_mean", "clip_ratio/low_min", "clip_ratio/high_mean", "clip_ratio/high_max",
    "clip_ratio/region_mean", "cispo_clip_ratio",
)  # fmt: skip
# By suffixes of metric names.
_SMALL_IS_GOOD = re.compile(r"(loss|perplexity|grad_norm)$")
_LARGE_IS_GOOD = re.compile(r"(accuracy|accuracies|margins)$")


@dataclass(frozen=True, kw_only=True)
class Ranking(Setting):
    """A ranking of checkpoints by one metric.

    Args:
        metric: a reported metric, as the mean of the last steps; or ``held_out_loss``, of the model itself.
        mode: whether small or large values are better; None: small for names that end in loss, perplexity or
            grad_norm, large for names that end in accuracy, accuracies or margins.

    Class attributes:
        key: name of the setting.
    """

    key: ClassVar[str] = ""

    metric: str
    mode: Literal["min", "max"] | None = None

    def __post_init__(self) -> None:
        if self.mode is None and not _SMALL_IS_GOOD.search(self.metric) and not _LARGE_IS_GOOD.search(self.metric):
            raise ConfigError(
                f"{self.key}.metric={self.metric}: whether small or large is good does not show in its name; set "
                f"{self.key}.mode=min or max"
            )

    @property
    def small_is_good(self) -> bool:
        return self.mode == "min" or (self.mode is None and bool(_SMALL_IS_GOOD.search(self.metric)))

    def is_better(self, value: float, than: float | None) -> bool:
        """Whether a value is strictly better; a non-finite value never is."""
        if not math.isfinite(value):
            return False
        return than is None or (value < than if self.small_is_good else value > than)

    def best(self, checkpoints: Sequence[Checkpoint], count: int = 1) -> list[Checkpoint]:
        """The best checkpoints, best first, of equal ones the earlier; those without the metric are left out.

        Args:
            checkpoints: by step, ascending.
        """
        finite = [each for each in checkpoints if math.isfinite(each.metrics.get(self.metric, math.nan))]
        return sorted(finite, key=lambda each: each.metrics[self.metric], reverse=not self.small_is_good)[:count]


@dataclass(frozen=True, kw_only=True)
class KeepBest(Ranking):
    """Keeps the best checkpoints besides the newest ones, also after the stage is finished. Not identity."""

    key: ClassVar[str] = "resources.keep_best"

    n: Annotated[int, Gt(0)] = 1  # number of checkpoints


@dataclass(frozen=True, kw_only=True)
class Best(Ranking):
    """Makes the best model the output of a stage, among multiples of ``every_steps`` and the last step. Identity.

    Args:
        every_steps: None: all steps that ``validation`` measures compete.
    """

    key: ClassVar[str] = "method.best"

    metric: str = HELD_OUT_LOSS
    every_steps: Annotated[int, Gt(0)] | None = None

    def competes(self, step: int) -> bool:
        """Whether the model of a step before the last one competes; the last one always does.

        Args:
            step: optimizer steps of the model.
        """
        return (
            self.every_steps is None or step % self.every_steps == 0
        )  # without ``every_steps``, only measured steps have the metric


def kept_steps(
    checkpoints: Sequence[Checkpoint], keep_last: int, keep_best: KeepBest | None, best: Best | None
) -> set[int]:
    """The steps whose checkpoints are kept while the stage trains.

    Args:
        checkpoints: by step, ascending.
        best: also keep the best checkpoint as of each of the newest, so that a stage that resumes from an older one,
            because the newest is damaged, yields the same model. This keeps at most one more checkpoint: later bests
            are among the newest.
    """
    newest = [each.step for each in checkpoints[-keep_last:]]
    kept = set(newest)
    if keep_best:
        kept |= {each.step for each in keep_best.best(checkpoints, keep_best.n)}
    if best:
        for step in newest:
            competed = [each for each in checkpoints if each.step <= step and best.competes(each.step)]
            kept |= {each.step for each in best.best(competed)}
    return kept


@dataclass(frozen=True, kw_only=True)
class Validation(Setting):
    """Measures the loss on held-out rows during training and after the last step.

    Args:
        every_steps: optimizer steps between measurements.
        every_epochs: epochs between measurements; 0.5 is twice per epoch. One of the two is set.
        patience: number of consecutive measurements without a smaller loss after which training stops; None: never.
        max_rows: use only the first held-out examples; None: all.
    """

    every_steps: Annotated[int, Gt(0)] | None = None
    every_epochs: Annotated[float, Gt(0)] | None = None
    patience: Annotated[int, Gt(0)] | None = None
    max_rows: Annotated[int, Gt(0)] | None = None

    def __post_init__(self) -> None:
        require_one("validation", self.every_steps, self.every_epochs, "the loss is measured")

    def is_due(self, step: int, num_rows: int, rows_per_step: int | Fraction) -> bool:
        """Whether the loss is measured after a step; after the last step it always is."""
        return is_due(self, step, num_rows, rows_per_step)


class Every(Protocol):
    """When something is measured."""

    @property
    def every_steps(self) -> int | None: ...
    @property
    def every_epochs(self) -> float | None: ...


def require_one(key: str, every_steps: int | None, every_epochs: float | None, what: str) -> None:
    """Refuses a setting that says twice, or not, when something is measured."""
    if (every_steps is None) == (every_epochs is None):
        found = "neither is" if every_steps is None else "both are"
        raise ConfigError(
            f"{key}.every_steps and {key}.every_epochs: {found} set, and exactly one of them sets when {what}; set "
            f"{key}.every_steps=N or {key}.every_epochs=1, and the other to null"
        )


def is_due(every: Every, step: int, num_rows: int, rows_per_step: int | Fraction) -> bool:
    """Whether a step completes a multiple of what is set."""
    if every.every_steps is not None:
        return step % every.every_steps == 0
    assert every.every_epochs
    return completes_epochs(every.every_epochs, step, num_rows, rows_per_step)


@dataclass
class Patience:
    """The smallest loss so far, and the number of measurements since."""

    least: float = math.inf
    waited: int = 0

    def add(self, loss: float) -> None:
        """A non-finite loss is no improvement."""
        if loss < self.least:
            self.least, self.waited = loss, 0
        else:
            self.waited += 1


def steps_of_epochs(epochs: float, num_rows: int, rows_per_step: int | Fraction) -> int:
    """Optimizer steps of a number of epochs; the last step is filled from the next epoch."""
    return max(1, math.ceil(_rows(epochs, num_rows) / rows_per_step))


def completes_epochs(epochs: float, step: int, num_rows: int, rows_per_step: int | Fraction) -> bool:
    """Whether a step is the first that completes a multiple of a number of epochs."""
    rows = _rows(epochs, num_rows)
    return step * rows_per_step // rows > (step - 1) * rows_per_step // rows


def _rows(epochs: float, num_rows: int) -> Fraction:
    return Fraction(str(epochs)) * num_rows  # exact: as floats, 1.1 x 100 is more than 110
