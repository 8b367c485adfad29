"""How a manifest reads in MLflow's words: tags, parameters, data sets. Imports no mlflow."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lineage.artifact import QUICKSTART, SOURCE, WHEEL, Kind
from lineage.fingerprint import short
from lineage.manifest import InputRecord, Manifest, SourceRecord
from lineage.remote_files import is_url
from lineage.source_checks import PYTHON

FINGERPRINT = "posttrain.fingerprint"
STAGE = "posttrain.stage"
METHOD = "posttrain.method"
STORE = "posttrain.store"
OUTPUT = "posttrain.output"
DIGEST = "posttrain.digest"
LABELS = "posttrain.labels"
WORDS = "posttrain.words"
CAUSE = "posttrain.cause"
RESUMED_AT = "posttrain.resumed_at"  # JSON: steps of the checkpoints that a stage was gone on from
HOST, PID, STARTED = "posttrain.host", "posttrain.pid", "posttrain.process_started"
RECORDED_RUN = "posttrain.recorded_run_id"  # on a run that was rebuilt: what the manifest calls it
REUSED = "posttrain.reused."  # + stage: the run that made what this execution reused
TRIAL, TRIAL_STATE = "posttrain.trial", "posttrain.trial_state"  # its number; complete, pruned or failed
STAGE_RUN = "posttrain.stage_run."  # + stage: the run that made what a trial is made of
INPUT = "posttrain.input."  # + slot: what fills it, NAME@FINGERPRINT

# MLflow's own.
PARENT_RUN, NOTE, USER = "mlflow.parentRunId", "mlflow.note.content", "mlflow.user"
SOURCE_NAME, SOURCE_TYPE, GIT_COMMIT = "mlflow.source.name", "mlflow.source.type", "mlflow.source.git.commit"
EXTERNAL_MODEL, MODEL_VERSIONS = "mlflow.model.isExternal", "mlflow.modelVersions"
EXPERIMENT_KIND = "mlflow.experimentKind"
DATA_CONTEXT = "mlflow.data.context"

MODELS = (Kind.CHECKPOINT, Kind.REWARD_MODEL)
DIGEST_LENGTH = 36  # what MLflow keeps of a data set's digest


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """A data set as MLflow shows it.

    Args:
        digest: cut to what MLflow keeps; the whole one is in ``profile``.
        source, profile: JSON.
    """

    name: str
    digest: str
    source_type: str
    source: str
    profile: str


def parameters(recipe: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """A recipe, flat: ``adapter.rank``."""
    for key, value in recipe.items():
        name = accepted(f"{prefix}{key}")
        if isinstance(value, Mapping):
            yield from parameters(value, f"{name}.")
        else:
            yield name, json.dumps(value) if isinstance(value, list | tuple) else str(value)


def accepted(name: str) -> str:
    """A name of a parameter or metric in the characters that MLflow takes."""
    return re.sub(r"[^\w.\- :/]", "_", name)


def model_name(stage: str) -> str:
    """A stage's or source's name in the characters that a logged model's may have."""
    return re.sub(r"[/:.%\"']", "-", stage.removeprefix(SOURCE))


def produces(manifest: Manifest) -> str:
    """The kind of an output; one that was recorded before kinds were is told by its files."""
    if manifest.produces:
        return manifest.produces
    if not any(name.endswith(".safetensors") for name in manifest.files):
        return Kind.ROWS
    return Kind.REWARD_MODEL if manifest.method.endswith(".RewardModel") else Kind.CHECKPOINT


def is_model(manifest: Manifest) -> bool:
    """Whether an output is weights: a logged model, not a data set."""
    return produces(manifest) in MODELS


def is_model_source(record: InputRecord) -> bool:
    """Whether a slot is filled by weights that no stage of ours made."""
    return record.source is not None and record.source.kind == Kind.CHECKPOINT


def input_tags(inputs: Mapping[str, InputRecord]) -> dict[str, str]:
    """What fills each slot, for people and for searches."""
    return {INPUT + accepted(slot): f"{record.artifact}@{short(record.fingerprint)}" for slot, record in inputs.items()}


def source_data(record: InputRecord, rows: float | None) -> DataSet:
    """The data set that a source is; ``rows`` as the stage that read it counted them."""
    source = record.source
    name = record.artifact.removeprefix(SOURCE)
    digest = record.digest or record.fingerprint
    if source is None:  # of an old manifest, which says no more
        return _data(name, digest, "unknown", {}, record.fingerprint, rows, [])
    kind, place = _place(source)
    return _data(name, digest, kind, place, record.fingerprint, rows, source.labels, _details(source))


def stage_data(manifest: Manifest, output: Path, labels: list[str]) -> DataSet:
    """The data set that a stage's rows are."""
    rows = manifest.metrics.get("rows")
    place: dict[str, object] = {"uri": output.as_uri()}
    return _data(manifest.stage, manifest.output_digest, "local", place, manifest.fingerprint, rows, labels)


def _place(source: SourceRecord) -> tuple[str, dict[str, object]]:
    """Type and place of a source, as MLflow's own classes write them."""
    if source.path.startswith(QUICKSTART):
        return "quickstart", {"uri": source.path, "revision": source.revision}
    if source.path.startswith(PYTHON):
        return "code", {"uri": source.path, "revision": source.revision}
    if source.path.startswith(WHEEL):
        return "wheel", {"uri": source.path, "revision": source.revision}
    if is_url(source.path):
        return source.path.partition("://")[0], {"uri": source.path}
    if source.revision:
        return "hugging_face", {"path": source.path, "revision": source.revision, "split": source.split}
    return "local", {"uri": source.path}


def _details(source: SourceRecord) -> dict[str, object]:
    return {"files": len(source.files), "dvc": source.dvc}


def _data(
    name: str,
    digest: str,
    source_type: str,
    source: Mapping[str, object],
    fingerprint: str,
    rows: float | None,
    labels: list[str],
    details: Mapping[str, object] | None = None,
) -> DataSet:
    profile = {
        "num_rows": None if rows is None else int(rows), "digest": digest, "fingerprint": fingerprint,
        "labels": labels, **(details or {}),
    }  # fmt: skip
    return DataSet(
        name=name, digest=digest[:DIGEST_LENGTH], source_type=source_type, source=json.dumps(source),
        profile=json.dumps(profile),
    )  # fmt: skip
