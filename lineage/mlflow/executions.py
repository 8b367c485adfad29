"""The runs that stand for executions: their description, and those that are rebuilt from manifests."""

import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from lineage.fingerprint import short
from lineage.holder import Holder
from lineage.manifest import Manifest
from lineage.mlflow.client import MlflowException, PatientClient, RunTag
from lineage.mlflow.lookup import ABSENT, Recorded, is_dead, running
from lineage.mlflow.names import CAUSE, NOTE, RECORDED_RUN, REUSED, WORDS
from lineage.mlflow.runs import Runs
from lineage.mlflow.shelf import Shelf
from lineage.run_file import RunFile

_UNRECORDED = "unrecorded"  # stages whose manifests name no execution
_ROWS = 50  # of a description: MLflow takes 8,000 characters


@dataclass(frozen=True, kw_only=True)
class Row:
    """What an execution did about one stage, and the run of it."""

    state: str
    experiment_id: str
    run_id: str


def description(words: Iterable[str] | None, store: object, rows: Mapping[str, Row]) -> str:
    """Markdown: what was called, and a line per stage that links to its run.

    Args:
        words: of the command; None: it is told elsewhere.
    """
    called = [] if words is None else [f"`{' '.join(['posttrain run', shlex.join(words)]).strip()}`", ""]
    lines = ["| stage | state | run |", "| --- | --- | --- |"]
    for stage, row in list(rows.items())[:_ROWS]:
        link = f"#/experiments/{row.experiment_id}/runs/{row.run_id}"
        lines.append(f"| {stage} | {row.state} | [{row.run_id[:8]}]({link}) |")
    if len(rows) > _ROWS:
        lines.append(f"| {len(rows) - _ROWS} more | | |")
    return "\n".join([*called, f"store `{store}`", "", *lines])


def run_name(pipeline: str, start: float) -> str:
    """How an execution is told from the others of its pipeline."""
    return f"{pipeline} {datetime.fromtimestamp(start):%Y-%m-%d %H:%M:%S}"


def end_dead_runs(client: PatientClient, experiment_id: str, silent: Collection[Holder] = ()) -> None:
    """Closes the runs that a killed process left open; a living one's stay.

    Args:
        silent: processes of other hosts of which nothing is heard any more.
    """
    for run in running(client, experiment_id):
        if is_dead(run, silent):
            tags = {CAUSE: "its process was killed"}
            if NOTE in run.data.tags:
                tags[NOTE] = run.data.tags[NOTE].replace("| running |", "| killed |")
            client.log_batch(run.info.run_id, tags=[RunTag(name, value) for name, value in tags.items()])
            client.set_terminated(run.info.run_id, "KILLED")


@dataclass
class _Execution:
    """One that is being rebuilt."""

    words: list[str]
    end: float = 0.0
    rows: dict[str, Row] = field(default_factory=dict)


class RebuiltExecutions:
    """Executions that MLflow has lost: a run each, told by the stages that were made in it."""

    def __init__(self, runs: Runs, shelf: Shelf) -> None:
        self._runs = runs
        self._shelf = shelf
        self._ids: dict[tuple[str, str], str] = {}
        self._open: dict[str, _Execution] = {}
        self._began: dict[str | None, float] = {}

    def expect(self, manifests: Iterable[Manifest]) -> None:
        """All that will be added: an execution begins with the first of its stages."""
        for manifest in manifests:
            began = self._began.get(manifest.execution_run_id, manifest.provenance.start)
            self._began[manifest.execution_run_id] = min(began, manifest.provenance.start)

    def of(self, manifest: Manifest) -> str:
        """The run of the execution that made an output; opened where there is none."""
        recorded = manifest.execution_run_id or _UNRECORDED
        key = (manifest.pipeline, recorded)
        if key not in self._ids:
            self._ids[key] = self._find(manifest.pipeline, recorded) or self._create(manifest, recorded)
        return self._ids[key]

    def _find(self, pipeline: str, recorded: str) -> str | None:
        if recorded != _UNRECORDED:
            try:
                return str(self._runs.client.get_run(recorded).info.run_id)
            except MlflowException as error:
                if error.error_code not in ABSENT:
                    raise
        where = f"tags.`{RECORDED_RUN}` = '{recorded}'"
        found = self._runs.client.search_runs([self._runs.experiment(pipeline)], where, max_results=1)
        return str(found[0].info.run_id) if found else None

    def _create(self, manifest: Manifest, recorded: str) -> str:
        start = self._began.get(manifest.execution_run_id, manifest.provenance.start)
        note = RunFile.read(self._shelf.entry(manifest).path)
        words = note.words if note and note.execution_id == manifest.execution_run_id else []
        name = run_name(manifest.pipeline, start)
        run_id = self._runs.create_run(
            manifest.pipeline, name, {RECORDED_RUN: recorded, WORDS: shlex.join(words)}, start
        )
        self._runs.added["executions"] += 1
        self._open[run_id] = _Execution(words=words)
        return run_id

    def add(self, run_id: str, manifest: Manifest, recorded: Recorded, parents: Mapping[str, Recorded]) -> None:
        """A stage that was made in an execution, from parents of which others may have been made before."""
        execution = self._open.get(run_id)
        if execution is None:  # one that was not lost
            return
        execution.end = max(execution.end, manifest.provenance.end)
        known = {row.run_id for row in execution.rows.values()}
        for stage, parent in parents.items():
            if parent.run_id not in known:
                execution.rows.setdefault(stage, _row("reused", parent))
        title = manifest.stage  # a sweep makes a stage more than once
        if title in execution.rows:
            title = f"{title}@{short(manifest.fingerprint)}"
        execution.rows[title] = _row("finished", recorded)

    def close(self) -> None:
        """Describes and ends what was opened."""
        for run_id, execution in self._open.items():
            reused = {REUSED + stage: row.run_id for stage, row in execution.rows.items() if row.state == "reused"}
            tags = {NOTE: description(execution.words, self._shelf.root, execution.rows), **reused}
            self._runs.client.log_batch(run_id, tags=[RunTag(name, value) for name, value in tags.items()])
            self._runs.client.set_terminated(run_id, "FINISHED", int(execution.end * 1000))
        self._open.clear()


def _row(state: str, recorded: Recorded) -> Row:
    return Row(state=state, experiment_id=recorded.experiment_id, run_id=recorded.run_id)
