"""The runs of executions and trials in MLflow, which contain those of stages, and functions for all runs."""

import shlex
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from filelock import FileLock
from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException

from lineage.filesystem.owner import Owner
from lineage.mlflow.address import shown, sqlite_file
from lineage.mlflow.entities import (
    MAX_ROWS,
    Recorded,
    Tag,
    accepted,
    execution_name,
    process_tags,
    recorded_of,
    stage_table,
)  # fmt: skip
from lineage.record.labels import user
from lineage.record.run_file import UNNAMED, RunFile, RunNames, is_gone
from lineage.record.tracker import TrialEnd
from lineage.store import Manifest

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.store.entities import PagedList

ABSENT = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")  # MLflow's codes for a run that it does not have
EXISTS = "RESOURCE_ALREADY_EXISTS"
KILLED_CAUSE = "its process was killed"
LOST_CAUSE = "its folder in the store was deleted"
_CAUSE_LENGTH = 4000
_UNRECORDED = "unrecorded"  # stages whose manifests name no execution
_STATES = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "stopped"}
_TRIAL_STATUS = {"complete": "FINISHED", "pruned": "KILLED", "failed": "FAILED"}


class Executions:
    """Writes executions and trials.

    Args:
        writer: this process, where it runs an execution.
        silent: processes of other hosts whose heartbeats timed out.

    Attributes:
        added: what was not there before: executions, runs, models, versions.
        began: execution -> when its first stage did, of those that are rebuilt.
        current: run id of the execution that this process runs.
        lock: one process at a time writes what several may miss.
    """

    def __init__(
        self, client: "MlflowClient", root: Path, writer: Owner | None = None, silent: Collection[Owner] = ()
    ) -> None:
        self.client, self.root, self.writer, self.silent = client, root, writer, silent
        self.uri = shown(client.tracking_uri)
        self.added: Counter[str] = Counter()
        self.began: dict[str, float] = {}
        self.current: str | None = None
        self.lock = FileLock(root / "mlflow.lock")
        self.names = UNNAMED  # of the execution that this process runs
        self._experiments: dict[tuple[str, str], str] = {}
        self._homes: dict[str, dict[str, str]] = {}
        self._rebuilt: dict[tuple[str, str], str] = {}

    def open(
        self, pipeline: str, cli_args: list[str], folder: Path | None, start: float, names: RunNames = UNNAMED
    ) -> None:
        """Opens the run of this process's execution; that of a sweep is continued, by the note in its folder."""
        assert self.writer
        self.names = names
        self.experiment(pipeline, names)
        for experiment in self.homes(pipeline):
            self.close_dead(experiment)
        note = RunFile.read(folder) if folder else None
        run = self.find(note.run_id) if note and note.uri == self.uri else None
        tags = {Tag.WORDS: shlex.join(cli_args), **process_tags(self.writer)}
        if run:
            self.client.update_run(run.info.run_id, status="RUNNING")
            self.tag(run.info.run_id, tags)
        else:
            name = f"sweep {folder.name}" if folder else execution_name(pipeline, start)
            run = self.create(pipeline, names.run_name or name, tags, start, names)
        run_id = str(run.info.run_id)
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
            RunFile(uri=self.uri, run_id=run_id, execution_id=run_id, cli_args=cli_args).write(folder)
        self.current = run_id

    def reuse(self, execution_id: str, stages: Mapping[str, Recorded]) -> None:
        """Links an execution to the stages that others ran for it."""
        runs = {title: self.client.get_run(each.run_id) for title, each in stages.items()}
        others = {title: run for title, run in runs.items() if run.data.tags.get(Tag.PARENT_RUN) != execution_id}
        self.tag(execution_id, {Tag.REUSED + accepted(title): run.info.run_id for title, run in others.items()})

    def show(self, execution_id: str) -> None:
        """Describes an execution by its command, and by the stages that it reused and ran."""
        execution = self.client.get_run(execution_id)
        tags = execution.data.tags
        linked = [(name, self.find(tags[name])) for name in tags if name.startswith(Tag.REUSED)]
        rows = [(name.removeprefix(Tag.REUSED), "reused", recorded_of(run)) for name, run in linked if run]
        filters = f"tags.`{Tag.FINGERPRINT}` LIKE '%' and {where({Tag.PARENT_RUN: execution_id})}"
        homes = {execution.info.experiment_id, *self.homes(tags.get(Tag.PIPELINE, ""))}
        ran = self.client.search_runs(
            [*homes], filters, order_by=["attributes.start_time ASC"], max_results=MAX_ROWS + 1
        )
        rows += [(run.info.run_name, _STATES.get(run.info.status, "running"), recorded_of(run)) for run in ran]
        command = f"`{' '.join(['posttrain run', tags.get(Tag.WORDS, '')]).strip()}`"
        text = "\n".join([command, "", f"store `{self.root}`", "", stage_table(rows)])
        if text != tags.get(Tag.NOTE):
            self.tag(execution_id, {Tag.NOTE: text})

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
        place = {Tag.PARENT_RUN: self.current, Tag.TRIAL: str(number)}
        found = self.client.search_runs([self.experiment(pipeline, self.names)], where(place), max_results=1)
        tags = {**place, **process_tags(self.writer)}
        run = found[0] if found else self.create(pipeline, f"trial {number}", tags, time.time(), self.names)
        run_id = str(run.info.run_id)
        if end is None:
            self.client.update_run(run_id, status="RUNNING")
            self.tag(run_id, tags)
            self.client.log_batch(run_id, params=[Param(accepted(name), value) for name, value in params.items()])
            return
        now = int(time.time() * 1000)
        metrics = [Metric(accepted(name), value, now, 0) for name, value in end.metrics.items()]
        self.client.log_batch(run_id, metrics=metrics)
        table = stage_table([(stage, "finished", each) for stage, each in stages.items()])
        made_of = {Tag.STAGE_RUN + accepted(stage): each.run_id for stage, each in stages.items()}
        self.tag(run_id, {Tag.TRIAL_STATE: end.state, Tag.NOTE: f"store `{self.root}`\n\n{table}", **made_of})
        self.end(run_id, _TRIAL_STATUS[end.state], end.cause)

    def end_trials(self, pipeline: str, cause: str) -> None:
        """Ends the trials that were running when the sweep was stopped."""
        assert self.current
        place = where({Tag.PARENT_RUN: self.current})
        filters = f"attributes.status = 'RUNNING' and tags.`{Tag.TRIAL}` LIKE '%' and {place}"
        for run in list(pages(self.client.search_runs, [self.experiment(pipeline, self.names)], filters)):
            self.end(run.info.run_id, "KILLED", cause)

    def of(self, start: Manifest, note: RunFile | None) -> str:
        """The run of the execution in which a stage ran; rebuilt where MLflow has lost it."""
        if self.current and self.is_ours(note):
            return self.current
        noted = note.execution_id if note and note.uri == self.uri else None
        process = note.writer.token if note and note.writer else _UNRECORDED  # it had none yet, or MLflow was away
        recorded = start.execution_run_id or noted or process
        key = (start.pipeline, recorded)
        if key in self._rebuilt:
            return self._rebuilt[key]
        if recorded != process and self.find(recorded):
            return recorded
        found = next(self.search(start.pipeline, where({Tag.RECORDED_RUN: recorded})), None)
        if found:
            self._rebuilt[key] = str(found.info.run_id)
            return self._rebuilt[key]
        cli_args = note.cli_args if note and recorded in (note.execution_id, process) else []
        names = note.names if note else UNNAMED
        began = self.began.get(recorded, start.provenance.start)
        tags = {Tag.RECORDED_RUN: recorded, Tag.WORDS: shlex.join(cli_args)}
        run = self.create(start.pipeline, names.run_name or execution_name(start.pipeline, began), tags, began, names)
        self.added["executions"] += 1
        self._rebuilt[key] = str(run.info.run_id)
        return self._rebuilt[key]

    def is_ours(self, note: RunFile | None) -> bool:
        """Whether this process runs the stage."""
        return bool(note and note.writer and self.writer and note.writer.token == self.writer.token)

    def close_rebuilt(self) -> None:
        """Ends the executions that were rebuilt: when the last stage ended, as failed or killed where a stage was."""
        for (pipeline, _), run_id in self._rebuilt.items():
            self.show(run_id)
            stages = [*pages(self.client.search_runs, [*self.homes(pipeline)], where({Tag.PARENT_RUN: run_id}))]
            status = next((each for each in ("FAILED", "KILLED") if each in {run.info.status for run in stages}), None)
            cause = next((run.data.tags.get(Tag.CAUSE) for run in stages if run.info.status == status), None)
            if cause:
                self.client.set_tag(run_id, Tag.CAUSE, cause)
            ended = max((run.info.end_time or 0 for run in stages), default=None)
            self.client.set_terminated(run_id, status or "FINISHED", ended)
        self._rebuilt.clear()

    def close_dead(self, experiment: str) -> None:
        """Ends the runs that a killed process left open; those of a live one stay."""
        with self.lock:
            running = pages(self.client.search_runs, [experiment], "attributes.status = 'RUNNING'")
            dead = [run for run in running if is_dead(run, self.silent)]
            for run in dead:
                lost = Tag.OUTPUT in run.data.tags and _has_lost_folder(run, Owner.here())
                self.end(run.info.run_id, "KILLED", LOST_CAUSE if lost else KILLED_CAUSE)
            for run in dead:
                if Tag.PARENT_RUN not in run.data.tags:
                    self.show(run.info.run_id)

    def experiment(self, pipeline: str, names: RunNames = UNNAMED) -> str:
        """Id of the experiment for new runs of a pipeline, which is created or restored if it is missing."""
        name = names.experiment or pipeline
        if (pipeline, name) not in self._experiments:
            found = self.client.get_experiment_by_name(name)
            if found is None:
                files = self.root / "logs" / "mlflow"  # else they go to the working directory
                place = files.absolute().as_uri() if sqlite_file(self.client.tracking_uri) else None
                tags = {Tag.EXPERIMENT_KIND: "custom_model_development"}
                try:
                    self.client.create_experiment(name, artifact_location=place, tags=tags)
                except MlflowException as error:  # another process was faster
                    if error.error_code != EXISTS:
                        raise
                found = self.client.get_experiment_by_name(name)
            if found.lifecycle_stage != "active":
                self.client.restore_experiment(found.experiment_id)
            if name != pipeline:
                self.client.set_experiment_tag(found.experiment_id, _pipeline_tag(pipeline), "true")
            self._experiments[pipeline, name] = str(found.experiment_id)
            self._homes.pop(pipeline, None)
        return self._experiments[pipeline, name]

    def homes(self, pipeline: str) -> dict[str, str]:
        """As ``experiments``, read once."""
        if pipeline not in self._homes:
            self._homes[pipeline] = experiments(self.client, [pipeline])
        return self._homes[pipeline]

    def search(self, pipeline: str, filters: str, **options: object) -> Iterator[Run]:
        """The runs of a pipeline, in all experiments that have some."""
        homes = self.homes(pipeline)
        found = pages(self.client.search_runs, [*homes], filters, **options) if homes else iter(())
        return (run for run in found if pipeline_of(run, homes) == pipeline)

    def create(self, pipeline: str, name: str, tags: Mapping[str, str], start: float, names: RunNames = UNNAMED) -> Run:
        """Opens a run; ``start`` in seconds since the epoch."""
        common = {
            Tag.STORE: str(self.root), Tag.PIPELINE: pipeline, Tag.USER: user(),
            Tag.SOURCE_NAME: "posttrain", Tag.SOURCE_TYPE: "LOCAL",
        }  # fmt: skip
        return self.client.create_run(
            self.experiment(pipeline, names), start_time=int(start * 1000),
            tags={**names.tags, **common, **tags}, run_name=name,
        )  # fmt: skip

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
    """Whether nothing writes a run any more: its process is gone, or the folder of its stage was deleted.

    Args:
        silent: processes of other hosts that are gone.
    """
    tags = run.data.tags
    if not {Tag.HOST, Tag.PID, Tag.STARTED} <= tags.keys():
        return False
    writer = Owner(host=tags[Tag.HOST], pid=int(tags[Tag.PID]), started=float(tags[Tag.STARTED]), token="")
    return is_gone(writer, silent) or _has_lost_folder(run, writer)


def _has_lost_folder(run: Run, writer: Owner) -> bool:
    """Whether the folder of a stage on this host is gone, while the process that ran the stage still lives."""
    output = run.data.tags.get(Tag.OUTPUT)
    is_here = writer.host == Owner.here().host
    return is_here and output is not None and not Path(unquote(urlsplit(output).path)).parent.is_dir()


def experiments(client: "MlflowClient", pipelines: Collection[str]) -> dict[str, str]:
    """Id and name of every active experiment with runs of these pipelines: those of their names, and shared ones."""
    named = [client.get_experiment_by_name(name) for name in pipelines]
    shared = [each for name in pipelines for each in pages(
        client.search_experiments, filter_string=f"tags.`{_pipeline_tag(name)}` = 'true'"
    )]  # fmt: skip
    return {
        str(each.experiment_id): each.name for each in [*named, *shared] if each and each.lifecycle_stage == "active"
    }


def pipeline_of(run: Run, homes: Mapping[str, str]) -> str:
    """The pipeline of a run; earlier versions have it only in the name of the experiment."""
    return str(run.data.tags.get(Tag.PIPELINE) or homes[str(run.info.experiment_id)])


def _pipeline_tag(pipeline: str) -> str:
    return f"{Tag.PIPELINE}.{accepted(pipeline)}"


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
