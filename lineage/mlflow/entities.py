"""Manifests and reports as MLflow's tags, parameters, data sets and metrics."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Run

from lineage.artifact import MODELS, QUICKSTART, SOURCE, WHEEL, Kind
from lineage.filesystem.owner import Owner
from lineage.filesystem.remote_files import is_url
from lineage.fingerprint import short
from lineage.markup import markdown_table
from lineage.record.metrics_file import ReportFile
from lineage.record.tracker import FINAL
from lineage.source.source_checks import PYTHON
from lineage.store import InputRecord, Manifest, SourceRecord

_DIGEST_LENGTH = 36  # characters that MLflow keeps of a data set's digest
# Slots of the rows that a metric is measured on, the first that is filled; other metrics are of answers.
_MEASURED_ON = {
    "text_perplexity": ("text",),
    **dict.fromkeys(("answer_perplexity", "exact_match", "one_sentence_share", "answer_tokens"), ("conversations",)),
    **dict.fromkeys(("preference_accuracy", "logp_accuracy", "mean_logp_accuracy", "accuracy"), ("pairs",)),
    **dict.fromkeys(("unpaired_accuracy", "unpaired_auc"), ("unpaired",)),
}
_ANSWERED, _TRAINED_ON = ("prompts", "conversations", "pairs", "unpaired"), ("rows", "pairs", "prompts")
MAX_ROWS = 50  # of a table in a description: MLflow accepts 8,000 characters


class Tag:
    """Names of tags; those that end in a dot are followed by the name of a stage or slot."""

    FINGERPRINT, STAGE, METHOD = "posttrain.fingerprint", "posttrain.stage", "posttrain.method"
    STORE, OUTPUT, DIGEST = "posttrain.store", "posttrain.output", "posttrain.digest"
    LABELS, WORDS, CAUSE = "posttrain.labels", "posttrain.words", "posttrain.cause"
    RESUMED_AT = "posttrain.resumed_at"  # JSON: steps of the checkpoints that a stage was resumed from
    DIAGNOSIS = "posttrain.diagnosis"  # a line per finding on the curves of a stage, also while it runs
    HOST, PID, STARTED = "posttrain.host", "posttrain.pid", "posttrain.process_started"
    RECORDED_RUN = "posttrain.recorded_run_id"  # on a run that was rebuilt: its id in the manifest
    REUSED = "posttrain.reused."  # the run that produced what this execution reused
    TRIAL, TRIAL_STATE = "posttrain.trial", "posttrain.trial_state"  # its number; complete, pruned or failed
    STAGE_RUN = "posttrain.stage_run."  # the run of a stage of a trial
    INPUT = "posttrain.input."  # what fills a slot, NAME@FINGERPRINT
    PIPELINE = "posttrain.pipeline"  # of a run; an experiment has a tag posttrain.pipeline.NAME for each of its own

    # MLflow's own.
    PARENT_RUN, NOTE, USER = "mlflow.parentRunId", "mlflow.note.content", "mlflow.user"
    SOURCE_NAME, SOURCE_TYPE, GIT_COMMIT = "mlflow.source.name", "mlflow.source.type", "mlflow.source.git.commit"
    EXTERNAL_MODEL, MODEL_VERSIONS = "mlflow.model.isExternal", "mlflow.modelVersions"
    EXPERIMENT_KIND, DATA_CONTEXT = "mlflow.experimentKind", "mlflow.data.context"


class Key(NamedTuple):
    """One artifact: two stages may share a fingerprint, and a repeated stage may have produced other bytes."""

    stage: str
    fingerprint: str
    digest: str

    @staticmethod
    def of(manifest: Manifest) -> "Key":
        return Key(manifest.stage, manifest.fingerprint, manifest.output_digest)

    @staticmethod
    def tagged(tags: Mapping[str, str]) -> "Key":
        """From the tags of a run, model or version."""
        return Key(tags.get(Tag.STAGE, ""), tags[Tag.FINGERPRINT], tags.get(Tag.DIGEST, ""))


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """The run of a stage, and the model that it gave."""

    run_id: str
    experiment_id: str
    model_id: str | None = None
    num_inputs: int = 0


def recorded_of(run: Run) -> Recorded:
    """A run with the model that it gave."""
    models = output_models(run)
    return Recorded(
        run_id=str(run.info.run_id), experiment_id=str(run.info.experiment_id), model_id=models[0] if models else None,
        num_inputs=len([*run.inputs.model_inputs, *run.inputs.dataset_inputs]) if run.inputs else 0,
    )  # fmt: skip


def output_models(run: Run) -> list[str]:
    """Ids of the logged models that a run gave."""
    return [str(each.model_id) for each in run.outputs.model_outputs] if run.outputs else []


def stage_table(rows: Sequence[tuple[str, str, Recorded]]) -> str:
    """Markdown: a line per stage with its state and a link to its run."""
    found = [
        (stage, state, f"[{run.run_id[:8]}](#/experiments/{run.experiment_id}/runs/{run.run_id})")
        for stage, state, run in rows[:MAX_ROWS]
    ]
    more = [("...", "", "")] if len(rows) > MAX_ROWS else []
    return markdown_table(("stage", "state", "run"), [*found, *more])


def execution_name(pipeline: str, start: float) -> str:
    """What distinguishes an execution from others of its pipeline."""
    return f"{pipeline} {datetime.fromtimestamp(start):%Y-%m-%d %H:%M:%S}"


def process_tags(writer: Owner) -> dict[str, str]:
    """Tags of the process that writes a run: the next command closes the run once that process is gone."""
    return {Tag.HOST: writer.host, Tag.PID: str(writer.pid), Tag.STARTED: repr(writer.started)}


def parameters(recipe: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """A recipe, flat: ``adapter.rank``."""
    for key, value in recipe.items():
        name = accepted(f"{prefix}{key}")
        if isinstance(value, Mapping):
            yield from parameters(value, f"{name}.")
        else:
            yield name, json.dumps(value) if isinstance(value, list | tuple) else str(value)


def accepted(name: str) -> str:
    """A name of a parameter or metric in the characters that MLflow accepts."""
    return re.sub(r"[^\w.\- :/]", "_", name)


def model_name(stage: str) -> str:
    """A stage's or source's name in the characters that MLflow accepts in a logged model's name."""
    return re.sub(r"[/:.%\"']", "-", stage.removeprefix(SOURCE))


def produces(manifest: Manifest) -> str:
    """The kind of an output; manifests of the first schema tell it by their files."""
    if manifest.produces:
        return manifest.produces
    if not any(name.endswith(".safetensors") for name in manifest.files):
        return Kind.ROWS
    return Kind.REWARD_MODEL if manifest.method.endswith(".RewardModel") else Kind.CHECKPOINT


def is_model(manifest: Manifest) -> bool:
    """Whether an output is weights: a logged model, not a data set."""
    return produces(manifest) in MODELS


def is_model_source(record: InputRecord) -> bool:
    """Whether a slot is filled by weights that no stage of ours produced."""
    return record.source is not None and record.source.kind == Kind.CHECKPOINT


def input_tags(inputs: Mapping[str, InputRecord]) -> dict[str, str]:
    """The input of each slot, for people and for searches."""
    return {
        Tag.INPUT + accepted(slot): f"{record.artifact}@{short(record.fingerprint)}" for slot, record in inputs.items()
    }


def model_tags(manifest: Manifest, output: Path, labels: list[str]) -> dict[str, str]:
    """Tags of a logged model or a registered version: what its weights are, and where."""
    return {
        Tag.FINGERPRINT: manifest.fingerprint, Tag.STAGE: manifest.stage, Tag.DIGEST: manifest.output_digest,
        Tag.OUTPUT: output.as_uri(), Tag.LABELS: json.dumps(labels),
    }  # fmt: skip


def source_data(slot: str, record: InputRecord, rows: float | None) -> DatasetInput:
    """A source as a data set; ``rows``: as ``rows_read`` counts them."""
    source, digest = record.source, record.digest or record.fingerprint
    name, about = record.artifact.removeprefix(SOURCE), {"digest": digest, "fingerprint": record.fingerprint}
    if source is None:  # of an old manifest, which says no more
        return _data(slot, name, "unknown", {}, {**about, "labels": []}, rows)
    kind, place = _place(source)
    about = {**about, "labels": source.labels, "files": len(source.files), "dvc": source.dvc}  # type: ignore[dict-item]
    return _data(slot, name, kind, place, about, rows)


def stage_data(slot: str, manifest: Manifest, output: Path, labels: list[str]) -> DatasetInput:
    """A stage's rows as a data set."""
    about = {"digest": manifest.output_digest, "fingerprint": manifest.fingerprint, "labels": labels}
    return _data(slot, manifest.stage, "local", {"uri": output.as_uri()}, about, manifest.metrics.get("rows"))


def metrics_of_models(
    metrics: Iterable[Metric], own: str | None, models: Mapping[str, str | None], data: Mapping[str, DatasetInput],
    benchmarks: Iterable[str],
) -> list[Metric]:  # fmt: skip
    """Metrics of models, each with the model and the data set that it was measured on.

    Args:
        own: the model that the run gave, whose are all of its metrics but those of its start; None: a metric's name
            begins with the slot of its model.
        models, data: slot -> model or rows of the run.
        benchmarks: beginnings of the names of their metrics: a benchmark has rows of its own.
    """
    found, of_benchmarks = [], tuple(f"{each}/" for each in benchmarks)
    for each in metrics:
        key = each.key.removeprefix(FINAL)
        slot, _, name = key.partition("/")
        of = models.get("policy") if key.startswith("evaluation/base/") else own or models.get(slot)
        slots = _TRAINED_ON if own else _MEASURED_ON.get(name.partition("/")[0], _ANSWERED)
        has_own = name.removeprefix("base/").startswith(of_benchmarks)
        rows = None if has_own else next((data[slot].dataset for slot in slots if slot in data), None)
        at = (each.key, each.value, each.timestamp, each.step)
        if of:
            found.append(Metric(*at, of, rows and rows.name, rows and rows.digest))
    return found


def _place(source: SourceRecord) -> tuple[str, dict[str, object]]:
    """Type and location of a source, as MLflow's own classes write them."""
    for prefix, kind in ((QUICKSTART, "quickstart"), (PYTHON, "code"), (WHEEL, "wheel")):
        if source.path.startswith(prefix):
            return kind, {"uri": source.path, "revision": source.revision}
    if is_url(source.path):
        return source.path.partition("://")[0], {"uri": source.path}
    if source.revision:
        return "hugging_face", {"path": source.path, "revision": source.revision, "split": source.split}
    return "local", {"uri": source.path}


def _data(
    slot: str, name: str, source_type: str, place: Mapping[str, object], about: Mapping[str, object],
    rows: float | None,
) -> DatasetInput:  # fmt: skip
    profile = json.dumps({"num_rows": None if rows is None else int(rows), **about})
    digest = str(about["digest"])[:_DIGEST_LENGTH]  # the full one is in the profile
    dataset = Dataset(name, digest, source_type, json.dumps(place), profile=profile)
    return DatasetInput(dataset, [InputTag(Tag.DATA_CONTEXT, slot)])


class Reports:
    """The metrics of a ``metrics.jsonl`` that MLflow lacks.

    Args:
        logged: metric -> the last step that is recorded: a resumed stage reports its last steps again.

    Attributes:
        latest: metric -> what was last reported.
    """

    def __init__(self, path: Path, logged: Mapping[str, int] | None = None) -> None:
        self._file = ReportFile(path)
        self.logged = dict(logged or {})
        self.latest: dict[str, Metric] = {}

    @property
    def last_step(self) -> int:
        return max(self.logged.values(), default=0)

    def ends_apart(self, final: Metric) -> bool:
        """Whether the curve of a final metric ends with another value."""
        end = self.latest.get(final.key)
        return end is not None and end.value != final.value

    def new(self) -> list[Metric]:
        """The metrics that were appended since the last call; an incomplete line is left for the next one."""
        found = []
        for report in self._file.read():
            for name, value in report.metrics.items():
                metric = Metric(accepted(name), float(value), int(report.time * 1000), report.step)
                self.latest[metric.key] = metric
                if metric.step > self.logged.get(metric.key, -1):
                    self.logged[metric.key] = metric.step
                    found.append(metric)
        return found
