"""The scores per row and policy behind the metrics of an evaluation: a gate estimates their noise from them."""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from lineage.errors import ConfigError
from tasks.reward_functions.built_in import BUILT_IN

REWARD = "reward/"  # before the name of a reward function
KL = "kl"  # nats per answer between a policy and the reference
SCORES_FILE, POLICIES_FILE, WEIGHTS_FILE = "scores.jsonl", "policies.json", "weights.json"
FAILED_FILE = "failed.json"
_OPTIONAL = ("small_is_good", "bounded")  # written where they are set
_MAX_ENTROPY = math.log(sys.float_info.max)  # in nats per token


@dataclass(frozen=True, kw_only=True)
class RowScores:
    """One metric: its rows, and each policy's scores on them.

    Args:
        metric: its name without the policy's, such as ``text_perplexity``.
        row_ids: one per row.
        groups: one per row; rows of one group are not independent (the pairs of one prompt), and are drawn together.
        weights: one per row: its number of tokens, in a perplexity.
        scores: policy -> a number per row: a summed log-probability, a win (1, 0.5 or 0), a reward.
        small_is_good, bounded: whether small values are better, and whether scores lie in [0, 1]; None: as its name
            says.
    """

    metric: str
    row_ids: Sequence[str]
    groups: Sequence[str]
    weights: Sequence[float]
    scores: Mapping[str, Sequence[float]]
    small_is_good: bool | None = None
    bounded: bool | None = None

    @property
    def lower_is_better(self) -> bool:
        return lower_is_better(self.metric) if self.small_is_good is None else self.small_is_good

    @property
    def is_bounded(self) -> bool:
        return is_bounded(self.metric) if self.bounded is None else self.bounded

    def standard_error(self, policy: str) -> float | None:
        """Of the mean over independent groups of rows; None: of a perplexity, or of one group."""
        means = dict[str, list[float]]()
        for group, score in zip(self.groups, self.scores[policy], strict=True):
            means.setdefault(group, []).append(score)
        if is_perplexity(self.metric) or len(means) < 2:
            return None
        return stdev(fmean(each) for each in means.values()) / math.sqrt(len(means))

    def metrics(self) -> dict[str, float]:
        """``policy/metric`` -> its value over all rows."""
        return {f"{policy}/{self.metric}": self.value(policy) for policy in self.scores}

    def value(self, policy: str) -> float:
        """The metric of one policy; inf for a perplexity beyond the range of floats."""
        if is_perplexity(self.metric):
            entropy = -sum(self.scores[policy]) / sum(self.weights)
            return math.inf if entropy > _MAX_ENTROPY else math.exp(entropy)
        return fmean(self.scores[policy])


def is_perplexity(metric: str) -> bool:
    """Whether a metric is the exponential of a mean, and its scores are log-probabilities."""
    of_label = metric.startswith(("text_perplexity/", "answer_perplexity/"))  # whatever the label
    return of_label or (metric.endswith("perplexity") and not metric.startswith(REWARD))


def lower_is_better(metric: str) -> bool:
    """True for perplexities, losses, the share of unfinished answers, tokens per answer, and KL."""
    endings = ("loss", "unfinished_share", "answer_tokens")
    if metric.startswith(REWARD):
        known = BUILT_IN.get(metric.removeprefix(REWARD))
        return known is not None and known.small_is_good
    return metric == KL or is_perplexity(metric) or metric.endswith(endings)


def is_bounded(metric: str) -> bool:
    """Whether the scores of a metric lie in [0, 1], and differences of them in [-1, 1]."""
    if metric.startswith(REWARD):  # a function of the user's may return any number
        known = BUILT_IN.get(metric.removeprefix(REWARD))
        return known is not None and known.bounded
    return not is_perplexity(metric) and metric.endswith(("accuracy", "exact_match", "win_rate", "_share"))


def write_scores(
    directory: Path, measured: Sequence[RowScores], policies: Mapping[str, str],
    weights: Mapping[str, str] | None = None,
) -> None:  # fmt: skip
    """Writes ``scores.jsonl``, a line per metric and row, and ``policies.json``: name -> fingerprint.

    Args:
        weights: slot of a model -> digest of its files, for ``weights.json``; None: there is no such file.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if weights is not None:
        (directory / WEIGHTS_FILE).write_text(json.dumps(dict(weights), indent=2) + "\n", encoding="utf-8")
    (directory / POLICIES_FILE).write_text(json.dumps(dict(policies), indent=2) + "\n", encoding="utf-8")
    with (directory / SCORES_FILE).open("w", encoding="utf-8") as file:
        for each in measured:
            for index, (row, group, weight) in enumerate(zip(each.row_ids, each.groups, each.weights, strict=True)):
                scores = {policy: values[index] for policy, values in each.scores.items()}
                line = {"metric": each.metric, "row": row, "group": group, "weight": weight, "scores": scores}
                line |= {name: value for name in _OPTIONAL if (value := getattr(each, name)) is not None}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")


def read_scores(report: Path) -> dict[str, RowScores]:
    """Metric -> its scores, from a report's output directory (ConfigError: the report has none)."""
    lines: dict[str, list[dict[str, object]]] = {}
    for line in _read(report, SCORES_FILE).splitlines():
        row = json.loads(line)
        lines.setdefault(row["metric"], []).append(row)
    return {metric: _scores(metric, rows) for metric, rows in lines.items()}


def read_policies(report: Path) -> dict[str, str]:
    """Policy -> fingerprint of the model, from a report's output directory."""
    return {str(name): str(value) for name, value in json.loads(_read(report, POLICIES_FILE)).items()}


def read_weights(report: Path) -> dict[str, str]:
    """Slot of a model -> digest of its files, from a report's output directory; empty: its writer recorded none."""
    if not (report / WEIGHTS_FILE).exists():
        return {}
    return {str(slot): str(digest) for slot, digest in json.loads(_read(report, WEIGHTS_FILE)).items()}


def read_failed(report: Path) -> dict[str, str]:
    """``policy/metric`` -> why it could not be measured, from a report's output directory."""
    path = report / FAILED_FILE
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {str(name): str(reason) for name, reason in found.items()}


def _scores(metric: str, rows: Sequence[Mapping[str, object]]) -> RowScores:
    scores: dict[str, list[float]] = {}
    for row in rows:
        of_row = row["scores"]
        assert isinstance(of_row, dict)
        for policy, score in of_row.items():
            scores.setdefault(policy, []).append(float(score))
    return RowScores(
        metric=metric,
        row_ids=[str(row["row"]) for row in rows],
        groups=[str(row["group"]) for row in rows],
        weights=[float(str(row["weight"])) for row in rows],
        scores=scores,
        **{name: bool(rows[0][name]) for name in _OPTIONAL if name in rows[0]},
    )


def _read(report: Path, name: str) -> str:
    try:
        return (report / name).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(
            f"{report}: this report has no {name}, and a gate judges by scores per row; the output of a method that "
            "writes them is accepted; write them with tasks.evaluate.row_scores.write_scores, as Evaluate does"
        ) from error
