"""The runs of executions and trials in MLflow, which contain those of stages, and functions for all runs."""

import shlex
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock
from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException

from lineage.fingerprint import short
from lineage.manifest import Manifest
from lineage.mlflow.address import shown
from lineage.mlflow.entities import (
    ExecutionRun,
    Recorded,
    Tag,
    accepted,
    execution_name,
    process_tags,
    stage_table,
    user,
)  # fmt: skip
from lineage.owner import Owner
from lineage.run_file import RunFile, is_gone
from lineage.tracker import TrialEnd

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.store.entities import PagedList

ABSENT = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")  # MLflow's codes for a run that it does not have
EXISTS = "RESOURCE_ALREADY_EXISTS"
KILLED_CAUSE = "its process was killed"
_CAUSE_LENGTH = 4000
_UNRECORDED = "unrecorded"  # stages whose manifests name no execution
_TRIAL_STATUS = {"complete": "FINISHED", "pruned": "KILLED", "failed": "FAILED"}


class Executions:
    """Writes executions and trials.

    Args:
        writer: this process, where it runs an execution.
        silent: processes of other hosts whose heartbeats timed out.

    Attributes:
        added: what was not there before: executions, runs, models, versions.
        began: execution -> when its first stage did, of those that are rebuilt.
        current: the execution that this process runs.
        lock: one process at a time writes what several may miss.
    """

    def __init__(
        self, client: "MlflowClient", root: Path, writer: Owner | None = None, silent: Collection[Owner] = ()
    ) -> None:
        self.client, self.root, self.writer, self.silent = client, root, writer, silent
        self.uri = shown(client.tracking_uri)
        self.added: Counter[str] = Counter()
        self.began: dict[str, float] = {}
        self.current: ExecutionRun | None = None
        self.lock = FileLock(root / "mlflow.lock")
        self._experiments: dict[str, str] = {}
        self._rebuilt: dict[tuple[str, str], ExecutionRun] = {}

    def open(self, pipeline: str, words: list[str], folder: Path | None, start: float) -> ExecutionRun:
        """The run of this process's execution; that of a sweep is opened again, by the note in its folder."""
        assert self.writer
        self.close_dead(self.experiment(pipeline))
        note = RunFile.read(folder) if folder else None
        run = self.find(note.run_id) if note and note.uri == self.uri else None
        tags = {Tag.WORDS: shlex.join(words), **process_tags(self.writer)}
        if run:
            self.client.update_run(run.info.run_id, status="RUNNING")
            self.tag(run.info.run_id, tags)
        else:
            name = f"sweep {folder.name}" if folder else execution_name(pipeline, start)
            run = self.create(pipeline, name, tags, start)
        run_id = str(run.info.run_id)
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
            RunFile(uri=self.uri, run_id=run_id, execution_id=run_id, words=words).write(folder)
        self.current = ExecutionRun(run_id, words)
        return self.current

    def write_table(self, execution: ExecutionRun) -> None:
        """Shows what an execution did with each stage."""
        called = f"`{' '.join(['posttrain run', shlex.join(execution.words)]).strip()}`"
        text = "\n".join([called, "", f"store `{self.root}`", "", stage_table(execution.rows)])
        if text != execution.written:
            rows = execution.rows.items()
            reused = {Tag.REUSED + accepted(title): run.run_id for title, (state, run) in rows if state == "reused"}
            self.tag(execution.run_id, {Tag.NOTE: text, **reused})
            execution.written = text

    def sync_trial(
        self,
        pipeline: str,
        number: int,
        params: Mapping[str, str],
        end: TrialEnd | None,
        stages: Mapping[str, Recorded],
    ) -> None:
        """The run of a trial, child of the sweep's: opened, or ended with its metrics and the runs of its stages."""
        assert self.current and self.writer
        place = {Tag.PARENT_RUN: self.current.run_id, Tag.TRIAL: str(number)}
        found = self.client.search_runs([self.experiment(pipeline)], where(place), max_results=1)
        tags = {**place, **process_tags(self.writer)}
        run = found[0] if found else self.create(pipeline, f"trial {number}", tags, time.time())
        run_id = str(run.info.run_id)
        if end is None:
            self.client.update_run(run_id, status="RUNNING")
            self.tag(run_id, tags)
            self.client.log_batch(run_id, params=[Param(accepted(name), value) for name, value in params.items()])
            return
        now = int(time.time() * 1000)
        metrics = [Metric(accepted(name), value, now, 0) for name, value in end.metrics.items()]
        self.client.log_batch(run_id, metrics=metrics)
        table = stage_table({stage: ("finished", each) for stage, each in stages.items()})
        made_of = {Tag.STAGE_RUN + accepted(stage): each.run_id for stage, each in stages.items()}
        self.tag(run_id, {Tag.TRIAL_STATE: end.state, Tag.NOTE: f"store `{self.root}`\n\n{table}", **made_of})
        self.end(run_id, _TRIAL_STATUS[end.state], end.cause)

    def end_trials(self, pipeline: str, cause: str) -> None:
        """Ends the trials that were running when the sweep was stopped."""
        assert self.current
        place = where({Tag.PARENT_RUN: self.current.run_id})
        filters = f"attributes.status = 'RUNNING' and tags.`{Tag.TRIAL}` LIKE '%' and {place}"
        for run in list(pages(self.client.search_runs, [self.experiment(pipeline)], filters)):
            self.end(run.info.run_id, "KILLED", cause)

    def of(self, start: Manifest, note: RunFile | None) -> str:
        """The run of the execution in which a stage ran; rebuilt where MLflow has lost it."""
        if self.current and self.is_ours(note):
            return self.current.run_id
        noted = note.execution_id if note and note.uri == self.uri else None
        recorded = start.execution_run_id or noted or _UNRECORDED
        key = (start.pipeline, recorded)
        if key in self._rebuilt:
            return self._rebuilt[key].run_id
        if recorded != _UNRECORDED and self.find(recorded):
            return recorded
        found = self.client.search_runs(
            [self.experiment(start.pipeline)], where({Tag.RECORDED_RUN: recorded}), max_results=1
        )
        if found:
            return str(found[0].info.run_id)
        words = note.words if note and note.execution_id == recorded else []
        began = self.began.get(recorded, start.provenance.start)
        tags = {Tag.RECORDED_RUN: recorded, Tag.WORDS: shlex.join(words)}
        run = self.create(start.pipeline, execution_name(start.pipeline, began), tags, began)
        self.added["executions"] += 1
        self._rebuilt[key] = ExecutionRun(str(run.info.run_id), words)
        return str(run.info.run_id)

    def is_ours(self, note: RunFile | None) -> bool:
        """Whether this process runs the stage."""
        return bool(note and note.writer and self.writer and note.writer.token == self.writer.token)

    def add_row(
        self, execution_id: str, manifest: Manifest, recorded: Recorded, parents: Mapping[str, Recorded]
    ) -> None:
        """Adds a stage to a rebuilt execution."""
        execution = next((each for each in self._rebuilt.values() if each.run_id == execution_id), None)
        if execution is None:  # one that was not lost
            return
        execution.end = max(execution.end, manifest.provenance.end)
        # A sweep runs a stage more than once.
        again = manifest.stage in execution.rows
        title = f"{manifest.stage}@{short(manifest.fingerprint)}" if again else manifest.stage
        execution.add(title, "finished", recorded, parents)

    def close_rebuilt(self) -> None:
        """Ends the executions that were rebuilt."""
        for execution in self._rebuilt.values():
            self.write_table(execution)
            self.client.set_terminated(execution.run_id, "FINISHED", int(execution.end * 1000) or None)
        self._rebuilt.clear()

    def close_dead(self, experiment: str) -> None:
        """Ends the runs that a killed process left open; those of a live one stay."""
        with self.lock:
            for run in list(pages(self.client.search_runs, [experiment], "attributes.status = 'RUNNING'")):
                if is_dead(run, self.silent):
                    if Tag.NOTE in run.data.tags:
                        killed = run.data.tags[Tag.NOTE].replace("| running |", "| killed |")
                        self.tag(run.info.run_id, {Tag.NOTE: killed})
                    self.end(run.info.run_id, "KILLED", KILLED_CAUSE)

    def experiment(self, pipeline: str) -> str:
        """Id of a pipeline's experiment, which is created or restored if it is missing."""
        if pipeline not in self._experiments:
            found = self.client.get_experiment_by_name(pipeline)
            if found is None:
                try:
                    self.client.create_experiment(pipeline, tags={Tag.EXPERIMENT_KIND: "custom_model_development"})
                except MlflowException as error:  # another process was faster
                    if error.error_code != EXISTS:
                        raise
                found = self.client.get_experiment_by_name(pipeline)
            if found.lifecycle_stage != "active":
                self.client.restore_experiment(found.experiment_id)
            self._experiments[pipeline] = str(found.experiment_id)
        return self._experiments[pipeline]

    def create(self, pipeline: str, name: str, tags: Mapping[str, str], start: float) -> Run:
        """Opens a run; ``start`` in seconds since the epoch."""
        common = {Tag.STORE: str(self.root), Tag.USER: user(), Tag.SOURCE_NAME: "posttrain", Tag.SOURCE_TYPE: "LOCAL"}
        return self.client.create_run(
            self.experiment(pipeline), start_time=int(start * 1000), tags={**common, **tags}, run_name=name
        )

    def find(self, run_id: str) -> Run | None:
        """A run; None: this MLflow does not have it, or it was deleted."""
        run = present(self.client.get_run, run_id)
        return run if run and run.info.lifecycle_stage == "active" else None

    def tag(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Sets tags of a run."""
        self.client.log_batch(run_id, tags=[RunTag(name, value) for name, value in tags.items()])

    def end(self, run_id: str, status: str, cause: str | None) -> None:
        """Ends a run."""
        if cause:
            self.client.set_tag(run_id, Tag.CAUSE, cause[:_CAUSE_LENGTH])
        self.client.set_terminated(run_id, status)


def is_dead(run: Run, silent: Collection[Owner] = ()) -> bool:
    """Whether the process that writes a run is gone; ``silent``: those of other hosts that are."""
    tags = run.data.tags
    if not {Tag.HOST, Tag.PID, Tag.STARTED} <= tags.keys():
        return False
    return is_gone(
        Owner(host=tags[Tag.HOST], pid=int(tags[Tag.PID]), started=float(tags[Tag.STARTED]), token=""), silent
    )


def present(call: Callable[[str], Run], name: str) -> Run | None:
    """The object that MLflow has under an id; None: there is none."""
    try:
        return call(name)
    except MlflowException as error:
        if error.error_code not in ABSENT:
            raise
        return None


def pages(search: Callable[..., "PagedList"], *args: object, **filters: object) -> Iterator[Run]:
    """All results of a search."""
    token = None
    while True:
        page = search(*args, page_token=token, **filters)
        yield from page
        token = page.token
        if not token:
            return


def where(tags: Mapping[str, str]) -> str:
    """A filter by tags."""
    return " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())
