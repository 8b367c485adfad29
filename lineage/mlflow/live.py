"""What is written to MLflow while an execution runs; all of it by the tracker's one thread."""

import contextlib
import json
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from lineage.attempts import attempts, resumed_at
from lineage.manifest import Manifest
from lineage.mlflow.client import MlflowException, PatientClient, RunTag
from lineage.mlflow.executions import Row, description, end_dead_runs, run_name
from lineage.mlflow.follow import Follower
from lineage.mlflow.lookup import Recorded
from lineage.mlflow.names import CAUSE, NOTE, PARENT_RUN, RESUMED_AT, REUSED, WORDS, accepted
from lineage.mlflow.record import Record
from lineage.mlflow.reopened import find_run, process_tags
from lineage.mlflow.trials import Trials
from lineage.run_file import RunFile
from lineage.tracker import Execution, RunIds, StageStart, TrialEnd

Artifact = tuple[str, str]  # stage and fingerprint: a sweep makes a stage more than once

_CAUSE_LENGTH = 4000
_HALF_RECORDED = "the stage finished, its record did not: `posttrain rebuild` writes it again"


class LiveRecord:
    """One execution and its stages."""

    def __init__(self, client: PatientClient, uri: str, execution: Execution) -> None:
        self._client = client
        self._uri = uri
        self._execution = execution
        self._record = Record(client, execution.store)
        self._me = process_tags()
        self._followers: dict[Artifact, tuple[str, Follower]] = {}  # of the open runs
        self._titles: dict[Artifact, str] = {}
        self._rows: dict[str, Row] = {}  # by title
        self._trials: Trials | None = None
        self.run_id = ""

    def open(self) -> None:
        """Closes what dead processes left open, then opens the run of this execution."""
        pipeline, words = self._execution.pipeline, self._execution.words
        end_dead_runs(self._client, self._record.runs.experiment(pipeline))
        now = time.time()
        tags = {WORDS: shlex.join(words), **self._me}
        self.run_id = self._earlier(tags) or self._record.runs.create_run(pipeline, self._name(now), tags, now)
        if self._execution.folder:
            note = RunFile(uri=self._uri, run_id=self.run_id, execution_id=self.run_id, words=words)
            self._execution.folder.mkdir(parents=True, exist_ok=True)
            note.write(self._execution.folder)
            self._trials = Trials(self._client, self._record, pipeline, self.run_id)
        for title, manifest in self._execution.reused.items():
            self._reuse(title, (manifest.stage, manifest.fingerprint), self._record.recorded(manifest))
        self._record.rebuilt.close()
        self._describe()

    def _name(self, now: float) -> str:
        folder = self._execution.folder
        return f"sweep {folder.name}" if folder else run_name(self._execution.pipeline, now)

    def _earlier(self, tags: Mapping[str, str]) -> str | None:
        """The run of a sweep that was begun before, opened again."""
        note = RunFile.read(self._execution.folder) if self._execution.folder else None
        if note is None or note.uri != self._uri:
            return None
        with contextlib.suppress(MlflowException):  # another database, or it was deleted
            if self._client.get_run(note.run_id).info.lifecycle_stage == "active":
                self._client.update_run(note.run_id, status="RUNNING")
                self._tag(note.run_id, tags)
                return note.run_id
        return None

    def reuse(self, title: str, manifest: Manifest) -> None:
        """Links to the run of another execution that made a stage meanwhile."""
        self._reuse(title, (manifest.stage, manifest.fingerprint), self._record.recorded(manifest))
        self._record.rebuilt.close()
        self._describe()

    def _reuse(self, title: str, artifact: Artifact, recorded: Recorded) -> None:
        self._titles[artifact] = title
        self._rows[title] = Row(state="reused", experiment_id=recorded.experiment_id, run_id=recorded.run_id)
        self._client.set_tag(self.run_id, REUSED + accepted(title), recorded.run_id)

    def open_trial(self, number: int, params: Mapping[str, str]) -> None:
        """Begins a trial of this sweep."""
        assert self._trials
        self._trials.open(number, params, self._me)

    def close_trial(self, number: int, end: TrialEnd) -> None:
        """Ends a trial of this sweep."""
        assert self._trials
        self._trials.close(number, end)
        self._record.rebuilt.close()

    def keep(self, files: Sequence[Path]) -> None:
        """Copies small files to where this execution's artifacts are."""
        for file in files:
            self._client.log_artifact(self.run_id, str(file))

    def open_stage(self, start: StageStart) -> RunIds:
        """Opens the run of a stage, or goes on in the one of the attempt before."""
        parents = {stage: self._record.recorded(manifest) for stage, manifest in start.parents.items()}
        for stage, parent in parents.items():
            artifact = stage, start.parents[stage].fingerprint
            if artifact not in self._titles:  # another execution made it meanwhile
                self._reuse(stage, artifact, parent)
        before = RunFile.read(start.directory)
        run_id, logged = self._reopen(start, before) or (self._open_new(start), {})
        note = RunFile(
            uri=self._uri, run_id=run_id, execution_id=self.run_id, words=self._execution.words,
            registries=before.registered_in if before else [],  # an alias there still names this fingerprint
        )  # fmt: skip
        note.write(start.directory)
        self._record.rebuilt.close()
        artifact = start.stage, start.fingerprint
        self._titles[artifact] = start.title or start.stage
        self._followers[artifact] = (run_id, Follower(start.directory / "metrics.jsonl", logged))
        self._set_state(artifact, "running", run_id)
        return RunIds(stage=run_id, execution=self.run_id, parents=tuple(parent.run_id for parent in parents.values()))

    def _open_new(self, start: StageStart) -> str:
        return self._record.open_stage(start, self._execution.pipeline, self.run_id, time.time(), self._me)

    def _reopen(self, start: StageStart, before: RunFile | None) -> tuple[str, Mapping[str, int]] | None:
        """The run of the attempt before, and the last step of each metric there; a restart only closes it.

        Args:
            before: where that attempt wrote down its run; MLflow is asked first, because a kill may come in between.
        """
        run = self._record.unfinished(start, self._execution.pipeline)
        if run is None and before and before.uri == self._uri:  # of another pipeline with this stage
            run = find_run(self._client, before.run_id)
        if run is None:  # the first attempt, or the database was lost, and is another one now
            return None
        run_id = str(run.info.run_id)
        if not start.resumes or run.info.status == "FINISHED" or run.info.lifecycle_stage != "active":
            if run.info.status == "RUNNING":
                self._client.set_terminated(run_id, "KILLED")
            return None
        steps = json.dumps(resumed_at(attempts(start.directory)))
        tags = {**self._me, PARENT_RUN: self.run_id, RESUMED_AT: steps}
        return run_id, self._record.reopen_stage(run, start, self._execution.pipeline, tags)

    def follow(self) -> None:
        """Writes what the running stages have reported."""
        for run_id, follower in self._followers.values():
            self._record.runs.log(run_id, follower)

    def close_stage(self, manifest: Manifest) -> None:
        """A stage was committed; where its run could not be opened, all of it is written now."""
        artifact = manifest.stage, manifest.fingerprint
        opened = self._followers.get(artifact)
        recorded = self._record.close_stage(opened[0], manifest, opened[1]) if opened else None
        self._followers.pop(artifact, None)
        self._set_state(artifact, "finished", (recorded or self._record.recorded(manifest)).run_id)

    def end_stage(self, artifact: Artifact, cause: str, *, killed: bool) -> None:
        """A stage failed, or was ended by us."""
        run_id, follower = self._followers.pop(artifact)
        self._record.runs.log(run_id, follower)
        self._end(run_id, cause, killed=killed)
        self._set_state(artifact, "stopped" if killed else "failed", run_id)

    def leave_stage(self, artifact: Artifact, cause: str) -> None:
        """Another process has taken it over; its run too, unless it is `gc`, or tells this MLflow nothing."""
        run_id, _ = self._followers.pop(artifact)
        run = self._client.get_run(run_id)
        if run.info.status == "RUNNING" and self._me.items() <= run.data.tags.items():
            self._end(run_id, cause, killed=True)
        self._set_state(artifact, "failed", run_id)

    def close(self, cause: str | None, *, stopped: bool) -> None:
        """Ends the execution, and what stages and trials it has left open."""
        for artifact in list(self._followers):
            self.end_stage(artifact, cause or _HALF_RECORDED, killed=stopped or cause is None)
        if self._trials:
            self._trials.end_open(cause or "the sweep ended")
        if cause is None:
            self._client.set_terminated(self.run_id, "FINISHED")
        else:
            self._end(self.run_id, cause, killed=stopped)

    def _end(self, run_id: str, cause: str, *, killed: bool) -> None:
        self._client.set_tag(run_id, CAUSE, cause[:_CAUSE_LENGTH])
        self._client.set_terminated(run_id, "KILLED" if killed else "FAILED")

    def _tag(self, run_id: str, tags: Mapping[str, str]) -> None:
        self._client.log_batch(run_id, tags=[RunTag(name, value) for name, value in tags.items()])

    def _set_state(self, artifact: Artifact, state: str, run_id: str) -> None:
        experiment = self._record.runs.experiment(self._execution.pipeline)
        self._rows[self._titles.setdefault(artifact, artifact[0])] = Row(
            state=state, experiment_id=experiment, run_id=run_id
        )
        self._describe()

    def _describe(self) -> None:
        text = description(self._execution.words, self._execution.store, self._rows)
        self._client.set_tag(self.run_id, NOTE, text)
