"""The curves of a training: its reported metrics, recipe, row statistics and failure."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median

from lineage.fingerprint import short
from lineage.record.metrics_file import StageReport, read_reports
from lineage.record.run_file import RunFile
from lineage.store import Entry, Manifest

VALIDATION = ("val/loss", "held_out_loss")
_NOISE = 0.954  # median difference of two neighbours, per standard deviation of white noise
_MOST = 4000  # points of a curve that are kept, evenly spread
_LOGGED = re.compile(
    r"\b(rows|rows_cut|rows_dropped|trained_tokens_percent)=([\d.]+)"
)  # of the log of an unfinished run
_JUMPED = re.compile(r"\bstep=(\d+) loss=\S+ state=jumped rows=(.+)")


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One metric over the steps; only finite values."""

    steps: Sequence[int] = ()
    values: Sequence[float] = ()

    def __len__(self) -> int:
        return len(self.values)

    def part(self, start: float, end: float) -> "Curve":
        """The points between two fractions of the curve; at least one, if there are any."""
        first = min(int(start * len(self)), max(0, len(self) - 1))
        last = max(first + 1, math.ceil(end * len(self)))
        return Curve(steps=self.steps[first:last], values=self.values[first:last])

    def mean(self, start: float = 0.0, end: float = 1.0) -> float:
        """Mean of the points between two fractions of the curve."""
        return fmean(self.part(start, end).values)

    @property
    def first(self) -> float:
        """Mean of the first twentieth, at least three points."""
        return fmean(self.values[: max(3, len(self) // 20)])

    @property
    def last(self) -> float:
        """Mean of the last tenth, at least three points."""
        return fmean(self.values[-max(3, len(self) // 10) :])

    @property
    def noise(self) -> float:
        """Standard deviation of a point around the trend, estimated from the differences of neighbours."""
        distances = [abs(after - before) for before, after in zip(self.values, self.values[1:], strict=False)]
        return median(distances) / _NOISE if distances else 0.0

    def error(self, share: float = 0.1) -> float:
        """Standard error of the mean of a fraction of the points."""
        return self.noise / math.sqrt(max(1.0, share * len(self)))

    def blocks(self, count: int = 10) -> list[float]:
        """Means of ``count`` equal parts."""
        return [self.mean(index / count, (index + 1) / count) for index in range(count)]

    @property
    def lowest(self) -> float:
        """The smallest mean of a tenth."""
        return min(self.blocks())


@dataclass(frozen=True, kw_only=True)
class Curves:
    """What a stage has reported so far.

    Args:
        series: name of a metric -> its curve, as the trainer names it: ``loss``, ``grad_norm``, ``val/loss`` ...
        recipe: of the method; may be empty for a running stage without MLflow.
        report: final metrics, row statistics (``rows``, ``rows_cut``, ``trained_tokens_percent`` ...), and the counts
            of the data stages that it reads, as ``data/duplicates``.
        jumps: step at which the loss jumped -> its rows, as the stage logged them.
        because: the rule whose change the recipe follows; empty: none.
        failure: why the stage failed; empty: it did not.
        gpus: GPUs per worker.
        micro_batch_size: rows per worker in one forward pass; None: unknown.
        is_checkpointed: whether activations are computed again in the backward pass.
        is_over: whether the stage has finished or failed.
    """

    stage: str = "stage"
    series: Mapping[str, Curve] = field(default_factory=dict)
    recipe: Mapping[str, object] = field(default_factory=dict)
    report: Mapping[str, float] = field(default_factory=dict)
    jumps: Mapping[int, str] = field(default_factory=dict)
    because: str = ""
    failure: str = ""
    gpus: int = 0
    micro_batch_size: int | None = None
    is_checkpointed: bool = False
    is_over: bool = True

    def __getitem__(self, name: str) -> Curve:
        return self.series.get(name, Curve())

    @property
    def loss(self) -> Curve:
        return self["loss"]

    @property
    def validation_name(self) -> str:
        """Name of the metric with the held-out loss; empty: it was not measured."""
        return next((name for name in VALIDATION if name in self.series), "")

    @property
    def validation(self) -> Curve:
        """The loss on held-out rows."""
        return self[self.validation_name]

    @property
    def num_steps(self) -> int:
        """The last reported step."""
        return max((curve.steps[-1] for curve in self.series.values() if len(curve)), default=0)

    @property
    def num_reports(self) -> int:
        """Number of reported steps."""
        return max(map(len, self.series.values()), default=0)

    @property
    def is_preference(self) -> bool:
        return "rewards/margins" in self.series

    @property
    def is_reinforcement(self) -> bool:
        return "reward" in self.series

    @property
    def loss_is_progress(self) -> bool:
        """Whether the loss says how far a training is: not where it is 0 by construction, or to a target that moves."""
        return not self.is_reinforcement and "taid/t" not in self.series

    @property
    def is_reward_model(self) -> bool:
        return "margin" in self.series and "accuracy" in self.series

    def number(self, *path: str, default: float = 0.0) -> float:
        """A number of the recipe, such as ``number("adapter", "rank")``."""
        value: object = self.recipe
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return float(value) if isinstance(value, int | float) else default

    @property
    def learning_rate(self) -> float:
        """Learning rate of the recipe, or else the largest that was reported."""
        return self.number("learning_rate", default=max(self["learning_rate"].values, default=0.0))

    @property
    def steps_per_epoch(self) -> float | None:
        """Optimizer steps per pass over the rows; None: unknown."""
        epochs = self.report.get("epochs")
        if epochs:
            return self.num_steps / epochs
        rows, batch = self.report.get("rows"), self.number("global_batch_size")
        return rows / batch if rows and batch else None


def curves_of(reports: Iterable[StageReport]) -> dict[str, Curve]:
    """The curve of each metric, thinned to at most ``_MOST`` points."""
    points: dict[str, list[tuple[int, float]]] = {}
    for report in reports:
        for name, value in report.metrics.items():
            if math.isfinite(value):
                points.setdefault(name, []).append((report.step, value))
    thinned = {name: each[:: -(-len(each) // _MOST)] for name, each in points.items()}
    return {
        name: Curve(steps=[step for step, _ in each], values=[value for _, value in each])
        for name, each in thinned.items()
    }


def read_curves(directory: Path, *, failure: str = "") -> Curves:
    """The curves of a stage of the store, finished or not (ArtifactError: its manifest cannot be read)."""
    entry = Entry(directory)
    manifest = entry.manifest()
    noted = RunFile.read(directory)
    known = manifest or (noted.start if noted else None)
    resources = manifest.provenance.resources if manifest else {}
    log = _read_log(entry.log)
    report = manifest.metrics if manifest else {name: float(value) for name, value in _LOGGED.findall(log)}
    micro, gpus = resources.get("micro_batch_size"), resources.get("gpus_per_worker")
    return Curves(
        stage=known.stage if known else directory.parent.name,
        series=curves_of(read_reports(entry.metrics)),
        recipe=known.recipe if known else {},
        report={**report, **_data_counts(known, directory.parents[1])} if known else report,
        jumps={int(step): rows for step, rows in _JUMPED.findall(log)},
        because=known.provenance.because.partition(":")[0] if known else "",
        failure="" if manifest else failure,
        gpus=gpus if isinstance(gpus, int) else 0,
        micro_batch_size=micro if isinstance(micro, int) else None,
        is_over=manifest is not None or bool(failure),
    )


def _data_counts(reader: Manifest, store: Path) -> dict[str, float]:
    """Counts of the data stages that a stage reads: ``data/rows``, ``data/duplicates`` ..."""
    found: dict[str, float] = {}
    for each in reader.inputs.values():
        made = Entry(store / each.artifact / short(each.fingerprint)).readable_manifest()
        if made and "duplicates" in made.metrics:
            found |= {f"data/{name}": count for name, count in made.metrics.items()}
    return found


def _read_log(log: Path) -> str:
    """What a stage logged: before its first step the statistics of its rows, then the rows of jumps."""
    try:
        return log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
