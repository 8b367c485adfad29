"""The setting of an evaluation beside a training: which checkpoints are scored, by what, and which is the output."""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from lineage.artifact import Kind
from lineage.errors import ConfigError
from lineage.filesystem.files import read_jsonl
from lineage.fingerprint import Setting, set_fields
from lineage.record.metrics_file import CHECKPOINT_SCORES_FILE
from tasks.reward_functions.metric import REWARD_MODEL, Metric, check_metrics, metrics_of
from tasks.train.best import is_due, require_one

SLOTS = {  # kind of rows -> the slot of ``evaluate`` that reads them, and the metric that ranks by default
    Kind.TEXT: ("text", "text_perplexity"), Kind.CONVERSATIONS: ("conversations", "answer_perplexity"),
    Kind.PREFERENCES: ("pairs", "preference_accuracy"), Kind.UNPAIRED: ("unpaired", "unpaired_accuracy"),
    Kind.PROMPTS: ("prompts", "unfinished_share"),
}  # fmt: skip
BATCH_TOKENS = 2**14  # of a batch that is scored, including padding, where no number of rows is set
BATCH_LOGITS = 2**28  # 1 GiB in fp32; rows of 2,048 tokens with 150,000 logits each are scored one by one
_BOUNDS = ("at_least", "at_most", "min_gain", "max_regression")


@dataclass(frozen=True, kw_only=True)
class Bound(Setting):
    """A rule of a gate on checkpoints: one bound on a metric, of itself or against the model that was trained.


    Args:
        metric: such as ``answer_perplexity``; ``lm_eval/*`` is a rule on each that begins so.
        at_least, at_most: of the metric.
        min_gain, max_regression: against the start, as in a rule of a gate.
    """

    metric: str
    at_least: float | None = None
    at_most: float | None = None
    min_gain: Annotated[float, Ge(0)] | None = None
    max_regression: Annotated[float, Ge(0)] | None = None


@dataclass(frozen=True, kw_only=True)
class Evaluation(Setting):
    """Scores checkpoints in a process beside the training, and may choose among them.

    What is scored is not identity; with ``patience`` or ``pick`` other than last, all but ``cpus`` and ``gpus`` is.

    Args:
        every_steps, every_epochs: between the checkpoints that are scored; one of the two is set. The start and the
            last step are scored too.
        metrics: as of ``evaluate``, besides those that the kind of rows has.
        rows: held-out rows of the stage's own data, at most.
        max_new_tokens: of an answer.
        pick: which model is the output: of the last step, the best by ``metric``, or the best of those that pass
            ``gate``.
        metric: ranks them; None: the first of ``metrics``, else the first that the rows have.
        patience: number of consecutive scores without a better ``metric`` after which training stops; the last of them
            is the end, whatever was trained meanwhile. None: never.
        gate: name -> a bound that the output must keep.
        cpus, gpus: of the process that scores, beside those of the training.
    """

    every_steps: Annotated[int, Gt(0)] | None = None
    every_epochs: Annotated[float, Gt(0)] | None = None
    metrics: tuple[str | Metric, ...] | None = None
    rows: Annotated[int, Gt(0)] = 50
    max_new_tokens: Annotated[int, Gt(0)] = 64
    pick: Literal["last", "best", "gate"] = "last"
    metric: str | None = None
    patience: Annotated[int, Gt(0)] | None = None
    gate: Mapping[str, Bound] | None = None
    cpus: Annotated[int, Gt(0)] = 1
    gpus: Annotated[int, Ge(0), Le(1)] = 0

    def __post_init__(self) -> None:
        require_one("evaluation", self.every_steps, self.every_epochs, "checkpoints are scored")
        check_metrics(self.own_metrics, ())
        if (self.pick == "gate") != bool(self.gate):
            raise ConfigError(
                f"evaluation.pick={self.pick} with evaluation.gate={'set' if self.gate else 'null'}: a gate chooses "
                "where pick=gate, and needs its bounds there; set both, or neither"
            )
        if self.metric and not self.decides:
            raise ConfigError(
                f"evaluation.metric={self.metric}: it ranks nothing with pick=last; set pick=best, or patience"
            )
        for name, bound in (self.gate or {}).items():
            if sum(getattr(bound, each) is not None for each in _BOUNDS) != 1:
                raise ConfigError(f"evaluation.gate.{name}: exactly one of {', '.join(_BOUNDS)} is accepted; set one")

    @property
    def own_metrics(self) -> tuple[Metric, ...]:
        return metrics_of(self.metrics)

    @property
    def decides(self) -> bool:
        """Whether scores may change the output."""
        return self.pick != "last" or self.patience is not None

    @property
    def is_judged(self) -> bool:
        """Whether a reward model judges answers."""
        return any(each.judge == REWARD_MODEL for each in self.own_metrics)

    def identity(self) -> dict[str, object] | None:
        """What may change the output; None: nothing."""
        if not self.decides:
            return None
        found = {key: value for key, value in set_fields(self).items() if key not in ("cpus", "gpus")}
        return found | ({"metrics": {each.label: each.identity() for each in self.own_metrics}} if self.metrics else {})

    def is_due(self, step: int, num_rows: int, rows_per_step: int | Fraction) -> bool:
        """Whether the model after a step is scored."""
        return is_due(self, step, num_rows, rows_per_step)


def asked_beside(method: object) -> tuple[int, int]:
    """CPUs and GPUs of what scores the checkpoints of a training."""
    found = getattr(method, "evaluation", None)
    return (found.cpus, found.gpus) if isinstance(found, Evaluation) else (0, 0)


def failed_scores(stage: Path) -> dict[str, str]:
    """``step N``, or ``step N, METRIC``, that was to be scored and has no score -> why.

    Args:
        stage: its directory in the store.
    """
    lines: list[dict[str, object]] = read_jsonl(stage / CHECKPOINT_SCORES_FILE, dict)
    found = dict[str, str]()
    for line in sorted(lines, key=lambda each: int(str(each["step"]))):
        name, metrics = f"step {line['step']}", line.get("failed")
        found |= {name: str(line["error"])} if line.get("error") else {}
        found |= {f"{name}, {key}": str(why) for key, why in metrics.items()} if isinstance(metrics, Mapping) else {}
    return found


def failure_lines(failed: Mapping[str, str]) -> list[str]:
    """A line for each reason of ``failed_scores``, with all that it is the reason of."""
    reasons = dict[str, list[str]]()
    for name, why in failed.items():
        reasons.setdefault(why, []).append(name)
    return [f"no score of {'; '.join(names)}: {why}" for why, names in reasons.items()]
