"""What is written to MLflow while an execution runs; all of it by the tracker's one thread."""

import shlex
import time
from collections.abc import Mapping

from lineage.lease import Holder
from lineage.manifest import Manifest
from lineage.mlflow.client import PatientClient, RunTag
from lineage.mlflow.executions import Row, description, end_dead_runs, run_name
from lineage.mlflow.follow import Follower
from lineage.mlflow.lookup import Recorded
from lineage.mlflow.names import CAUSE, HOST, NOTE, PARENT_RUN, PID, REUSED, STARTED, WORDS
from lineage.mlflow.record import Record
from lineage.run_file import RunFile
from lineage.tracker import Execution, RunIds, StageStart

_CAUSE_LENGTH = 4000
_HALF_RECORDED = "the stage finished, its record did not: `posttrain rebuild` writes it again"


class LiveRecord:
    """One execution and its stages."""

    def __init__(self, client: PatientClient, uri: str, execution: Execution) -> None:
        self._client = client
        self._uri = uri
        self._execution = execution
        self._record = Record(client, execution.store)
        self._followers: dict[str, tuple[str, Follower]] = {}  # stage -> its open run
        self._rows: dict[str, Row] = {}
        self.run_id = ""

    def open(self) -> None:
        """Closes what dead processes left open, then opens the run of this execution."""
        pipeline, words = self._execution.pipeline, self._execution.words
        end_dead_runs(self._client, self._record.runs.experiment(pipeline))
        now = time.time()
        tags = {WORDS: shlex.join(words), **_process_tags()}
        self.run_id = self._record.runs.create_run(pipeline, run_name(pipeline, now), tags, now)
        for stage, manifest in self._execution.reused.items():
            self._reuse(stage, self._record.recorded(manifest))
        self._record.rebuilt.close()
        self._describe()

    def reuse(self, stage: str, manifest: Manifest) -> None:
        """Links to the run of another execution that made a stage meanwhile."""
        self._reuse(stage, self._record.recorded(manifest))
        self._record.rebuilt.close()
        self._describe()

    def _reuse(self, stage: str, recorded: Recorded) -> None:
        self._rows[stage] = Row(state="reused", experiment_id=recorded.experiment_id, run_id=recorded.run_id)
        self._client.set_tag(self.run_id, REUSED + stage, recorded.run_id)

    def open_stage(self, start: StageStart) -> RunIds:
        """Opens the run of a stage, or goes on in the one of the attempt before."""
        parents = {stage: self._record.recorded(manifest) for stage, manifest in start.parents.items()}
        for stage, parent in parents.items():
            if stage not in self._rows:  # another execution made it meanwhile
                self._reuse(stage, parent)
        resumed = self._reopen(start)
        run_id, logged = resumed or (self._open_new(start), {})
        note = RunFile(uri=self._uri, run_id=run_id, execution_id=self.run_id, words=self._execution.words)
        note.write(start.directory)
        self._record.rebuilt.close()
        self._followers[start.stage] = (run_id, Follower(start.directory / "metrics.jsonl", logged))
        self._set_state(start.stage, "running", run_id)
        return RunIds(stage=run_id, execution=self.run_id, parents=tuple(parent.run_id for parent in parents.values()))

    def _open_new(self, start: StageStart) -> str:
        return self._record.open_stage(start, self._execution.pipeline, self.run_id, time.time(), _process_tags())

    def _reopen(self, start: StageStart) -> tuple[str, Mapping[str, int]] | None:
        """The run of the attempt before, and the last step of each metric there; it is ended if it is not gone on."""
        note = RunFile.read(start.directory)
        if note is None or note.uri != self._uri:
            return None
        run = self._client.get_run(note.run_id)
        if not start.resumes or run.info.status == "FINISHED" or run.info.lifecycle_stage != "active":
            if run.info.status == "RUNNING":
                self._client.set_terminated(note.run_id, "KILLED")
            return None
        self._client.update_run(note.run_id, status="RUNNING")
        self._tag(note.run_id, {**_process_tags(), PARENT_RUN: self.run_id})
        histories = {name: self._client.get_metric_history(note.run_id, name) for name in run.data.metrics}
        return note.run_id, {name: max(each.step for each in history) for name, history in histories.items()}

    def follow(self) -> None:
        """Writes what the running stages have reported."""
        for run_id, follower in self._followers.values():
            self._record.runs.log(run_id, follower)

    def close_stage(self, manifest: Manifest) -> None:
        """A stage was committed; where its run could not be opened, all of it is written now."""
        opened = self._followers.get(manifest.stage)
        recorded = self._record.close_stage(opened[0], manifest, opened[1]) if opened else None
        self._followers.pop(manifest.stage, None)
        self._set_state(manifest.stage, "finished", (recorded or self._record.recorded(manifest)).run_id)

    def end_stage(self, stage: str, cause: str, *, stopped: bool) -> None:
        """A stage failed or was stopped."""
        run_id, follower = self._followers.pop(stage)
        self._record.runs.log(run_id, follower)
        self._end(run_id, cause, stopped=stopped)
        self._set_state(stage, "stopped" if stopped else "failed", run_id)

    def close(self, cause: str | None, *, stopped: bool) -> None:
        """Ends the execution, and what stages it has left open."""
        for stage in list(self._followers):
            self.end_stage(stage, cause or _HALF_RECORDED, stopped=stopped or cause is None)
        if cause is None:
            self._client.set_terminated(self.run_id, "FINISHED")
        else:
            self._end(self.run_id, cause, stopped=stopped)

    def _end(self, run_id: str, cause: str, *, stopped: bool) -> None:
        self._client.set_tag(run_id, CAUSE, cause[:_CAUSE_LENGTH])
        self._client.set_terminated(run_id, "KILLED" if stopped else "FAILED")

    def _tag(self, run_id: str, tags: Mapping[str, str]) -> None:
        self._client.log_batch(run_id, tags=[RunTag(name, value) for name, value in tags.items()])

    def _set_state(self, stage: str, state: str, run_id: str) -> None:
        experiment = self._record.runs.experiment(self._execution.pipeline)
        self._rows[stage] = Row(state=state, experiment_id=experiment, run_id=run_id)
        self._describe()

    def _describe(self) -> None:
        text = description(self._execution.words, self._execution.store, self._rows)
        self._client.set_tag(self.run_id, NOTE, text)


def _process_tags() -> dict[str, str]:
    """Who writes a run: it is closed by the next command when that process is gone."""
    me = Holder.here()
    return {HOST: me.host, PID: str(me.pid), STARTED: repr(me.started)}
