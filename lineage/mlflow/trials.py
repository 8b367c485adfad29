"""The trials of a sweep in MLflow: a run each, child of the sweep's, so that its pages compare them."""

import time
from collections.abc import Mapping

from lineage.mlflow.client import Metric, Param, PatientClient, RunTag
from lineage.mlflow.executions import Row, description
from lineage.mlflow.names import CAUSE, NOTE, PARENT_RUN, STAGE_RUN, TRIAL, TRIAL_STATE, accepted
from lineage.mlflow.record import Record
from lineage.tracker import TrialEnd

_STATUS = {"complete": "FINISHED", "pruned": "KILLED", "failed": "FAILED"}
_CAUSE_LENGTH = 4000


class Trials:
    """Writes the trials of one sweep; one that an earlier execution of it has begun goes on in its run."""

    def __init__(self, client: PatientClient, record: Record, pipeline: str, sweep_id: str) -> None:
        self._client, self._record = client, record
        self._pipeline, self._sweep_id = pipeline, sweep_id
        self._earlier: dict[int, str] | None = None
        self._open: dict[int, str] = {}

    def open(self, number: int, params: Mapping[str, str], process: Mapping[str, str]) -> None:
        """Begins a trial; ``process`` are the tags that name who writes it."""
        run_id = self._found().get(number)
        if run_id is None:
            tags = {PARENT_RUN: self._sweep_id, TRIAL: str(number), **process}
            run_id = self._record.runs.create_run(self._pipeline, f"trial {number}", tags, time.time())
            self._client.log_batch(run_id, params=[Param(accepted(name), value) for name, value in params.items()])
        else:
            self._client.update_run(run_id, status="RUNNING")
            self._tag(run_id, process)
        self._open[number] = self._found()[number] = run_id

    def close(self, number: int, end: TrialEnd) -> None:
        """Ends a trial: its metrics, its state, where the runs of its stages are."""
        run_id = self._open[number]
        now = int(time.time() * 1000)
        made = {stage: self._record.recorded(manifest) for stage, manifest in end.manifests.items()}
        rows = {stage: Row(state="finished", experiment_id=each.experiment_id, run_id=each.run_id)
                for stage, each in made.items()}  # fmt: skip
        self._client.log_batch(
            run_id, metrics=[Metric(accepted(name), value, now, 0) for name, value in end.metrics.items()]
        )
        self._tag(run_id, {
            TRIAL_STATE: end.state, NOTE: description(None, self._record.shelf.root, rows),
            **({CAUSE: end.cause[:_CAUSE_LENGTH]} if end.cause else {}),
            **{STAGE_RUN + accepted(stage): row.run_id for stage, row in rows.items()},
        })  # fmt: skip
        self._client.set_terminated(run_id, _STATUS[end.state])
        del self._open[number]

    def end_open(self, cause: str) -> None:
        """The sweep was stopped, with these under way."""
        for run_id in self._open.values():
            self._tag(run_id, {CAUSE: cause[:_CAUSE_LENGTH]})
            self._client.set_terminated(run_id, "KILLED")
        self._open.clear()

    def _found(self) -> dict[int, str]:
        """Number -> run, of all that are there."""
        if self._earlier is None:
            where = f"tags.`{PARENT_RUN}` = '{self._sweep_id}' and tags.`{TRIAL}` LIKE '%'"
            runs = self._client.search_runs([self._record.runs.experiment(self._pipeline)], where, max_results=10_000)
            self._earlier = {int(run.data.tags[TRIAL]): str(run.info.run_id) for run in runs}
        return self._earlier

    def _tag(self, run_id: str, tags: Mapping[str, str]) -> None:
        self._client.log_batch(run_id, tags=[RunTag(name, value) for name, value in tags.items()])
