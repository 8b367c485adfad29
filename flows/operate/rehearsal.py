"""Rehearsal: every stage of a pipeline at two steps, with the real save, resume, merge, evaluation and registration."""

import contextlib
import shutil
import sys
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from filelock import FileLock

from flows.declare.operation import Operation
from flows.declare.pipeline import Pipeline, Stage
from flows.planning.estimates import Estimator, History
from flows.planning.plan import Plan, PlannedStage, make_plan
from flows.planning.verdicts import judgements
from flows.progress.screen import Screen
from flows.progress.tracking import make_tracker
from flows.reports.wording import clock, counted
from flows.run import check_machine, open_run, prepare_run
from flows.stages.execute import execute
from flows.stages.job import STOP_FILE
from flows.stages.stops import stoppable
from lineage.artifact import DATA, MODELS, Kind
from lineage.errors import ArtifactError, ConfigError, PipelineError
from lineage.filesystem.lock import Lock, owner
from lineage.record.metrics_file import read_reports, step_seconds
from lineage.record.tracker import Event, Listener
from lineage.store import REHEARSALS, Entry, Manifest, create_store
from tasks.context import Launcher
from tasks.method import Training
from tasks.model.adapter_files import ADAPTER_DIR
from tasks.recipe import without_verdict

NUM_STEPS = 2
SUFFIX = "-rehearsal"  # of the pipeline's name in MLflow, to tell its models from real ones
WEIGHTS = ".safetensors"
_EXERCISES = {Kind.REPORT: "evaluate", Kind.VERDICT: "judge", **dict.fromkeys(DATA, "prepare")}


@dataclass(frozen=True, kw_only=True)
class Row:
    """The rehearsal of one stage.

    Args:
        exercised: the parts of the real stage that ran.
        seconds: duration of the rehearsal.
        memory_gib: largest memory that a step reported.
        checkpoint_bytes: size of one checkpoint.
        real_seconds: estimated duration of the real stage, for trainings from the fastest step; None: unknown.
        verdict: ``works``, or what failed.
    """

    stage: str
    exercised: tuple[str, ...] = ()
    seconds: float | None = None
    memory_gib: float | None = None
    checkpoint_bytes: int | None = None
    real_seconds: float | None = None
    verdict: str = "works"


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """The result: the store of the rehearsal, a row per stage, and the error that ended it."""

    place: Path
    rows: list[Row]
    error: PipelineError | None = None


def rehearse(pipeline: Pipeline, cli_args: Sequence[str], *, keep: bool) -> Rehearsal:
    """Runs every stage for two steps, one after another, in a temporary store.

    Args:
        cli_args: arguments of the command, for the record.
        keep: keep the store until the next rehearsal, and its models registered.

    Raises:
        ConfigError: the pipeline is refused.
        KeyboardInterrupt: the command was stopped.
    """
    named = replace(pipeline, name=pipeline.name + SUFFIX, tracking=replace(pipeline.tracking, dvc=False))
    plan: Plan | None = None
    rows: list[Row] = []
    try:
        with scratch(pipeline.store, keep=keep) as place:
            plan = scratch_plan(named, place, num_steps=NUM_STEPS, save_steps=1, one_micro_batch=True)
            check_machine(plan.stages)
            make_tracker(named.tracking)  # checks that MLflow answers
            announce(plan)
            delete_others(place)
            _unregister(named)  # the registry creates no second version for equal bytes
            _run(pipeline, plan, cli_args, rows)
            _require_recorded(plan)
        _unregister(named)
    except PipelineError as error:
        if plan is None or isinstance(error, ConfigError):
            raise
        verdicts = ["FAILED", *["not reached"] * len(plan.stages)]
        left = zip(plan.stages[len(rows) :], verdicts, strict=False)
        rows += [Row(stage=planned.name, verdict=verdict) for planned, verdict in left]
        return Rehearsal(place=place, rows=rows, error=error)
    return Rehearsal(place=place, rows=rows)


def announce(plan: Plan) -> None:
    """Prints the estimated duration of a rehearsal's trainings to stderr."""
    found = list(Estimator(plan, History.of(plan.home)).estimates(plan.stages).values())
    if found:
        runs = sum(each.runs for each in found)
        basis = f"measured on {counted(runs, 'run')}" if runs else "by formula"
        trainings = f"{counted(len(found), 'training')} of {NUM_STEPS} steps"
        about = clock(sum(each.seconds or 0.0 for each in found))
        print(f"{trainings}, one micro batch per worker each: about {about} ({basis})", file=sys.stderr)


def micro_batches(real: Stage, short: Stage) -> int:
    """Number of rehearsal steps that correspond to one real step."""
    if isinstance(real.method, Training) and isinstance(short.method, Training):
        return real.method.global_batch_size // short.method.global_batch_size
    return 1


def _run(pipeline: Pipeline, plan: Plan, cli_args: Sequence[str], rows: list[Row]) -> None:
    """Adds a row for each finished stage."""
    prepare_run(plan)
    names = [planned.name for planned in plan.stages]
    with stoppable(), Screen(sys.stderr, names) as screen:
        stop = StopOnce(screen.on, max(map(len, names)))
        with open_run(plan, cli_args, stop.on, plan.stages, in_flow=False, command="rehearse") as run:
            for planned in plan.stages:
                seconds = execute(run, planned).seconds
                num_steps = run.checks.num_steps(planned, pipeline.stages[planned.name].method)
                num_steps = num_steps and num_steps * micro_batches(pipeline.stages[planned.name], planned.stage)
                size = stop.saved.get(planned.name)
                rows.append(row_of(plan, planned, seconds=seconds, num_steps=num_steps, checkpoint_bytes=size))


class StopOnce:
    """Stops each training after its first step, as in a preemption: it saves a checkpoint and is resumed.

    Attributes:
        saved: stage -> size of the checkpoint from which it resumes.
    """

    def __init__(self, listener: Listener, width: int) -> None:
        self.saved: dict[str, int] = {}
        self._listener = listener
        self._entry: Entry | None = None  # of the training that runs; stages run one after another
        self._name = ""
        self._width = width

    def on(self, event: Event) -> None:
        """Forwards an event; replaces the first message on the stop by one that explains it."""
        checkpoint = self._entry.checkpoints.newest() if self._entry else None
        if event.state == "message" and self._entry and checkpoint and self._name not in self.saved:
            folder = self._entry.checkpoints.path(checkpoint.step)
            self.saved[self._name] = sum((folder / name).stat().st_size for name in checkpoint.files)
            text = f"{self._name:<{self._width}}  saved at step {checkpoint.step} and stopped; resumes from there"
            event = Event(text=text)
        self._listener(event)
        if event.start:
            self._name, self._entry = event.title, Entry(event.start.directory) if event.num_steps else None
            if self._entry:
                (self._entry.work / STOP_FILE).touch()


def row_of(
    plan: Plan, planned: PlannedStage, *, seconds: float, num_steps: int | None, checkpoint_bytes: int | None
) -> Row:
    """The row of a finished stage, from its manifest and reports.

    Args:
        num_steps: length of the real stage in steps of the rehearsal; None: unknown, or it does not train.
        checkpoint_bytes: size of the checkpoint from which it resumed.
    """
    entry, method = plan.entry(planned), planned.stage.method
    manifest = entry.manifest()
    assert manifest is not None
    registered = method.produces in MODELS and manifest.mlflow_run_id is not None
    output = (*(("merge",) if _is_merged(manifest) else ()), *(("register",) if registered else ()))
    if not isinstance(method, Training):
        judged = next((each for each in judgements(plan) if each.gate == planned.name), None)
        verdict = f"works: {judged.verdict.result}, of models of two steps" if judged else "works"
        exercised = (_EXERCISES.get(method.produces, "make"), *output)
        return Row(stage=planned.name, exercised=exercised, seconds=seconds, real_seconds=seconds, verdict=verdict)
    reports = [report.metrics for report in read_reports(entry.metrics)]
    resumed = bool(manifest.provenance.resumed_at)
    pace = step_seconds(reports)
    return Row(
        stage=planned.name,
        exercised=(counted(len(reports), "step"), *(("save", "resume") if resumed else ()), *output),
        seconds=seconds,
        memory_gib=max((metrics["memory_gib"] for metrics in reports if "memory_gib" in metrics), default=None),
        checkpoint_bytes=checkpoint_bytes,
        real_seconds=None if pace is None or num_steps is None else pace * num_steps,
        verdict="works" if resumed else "works, but leaves no checkpoint when it is stopped",
    )


def _is_merged(manifest: Manifest) -> bool:
    """Whether an output is a merged model with its adapter beside it."""
    weights = [path for path in map(PurePosixPath, manifest.files) if path.suffix == WEIGHTS]
    return {PurePosixPath(), PurePosixPath(ADAPTER_DIR)} <= {path.parent for path in weights}


def _unregister(named: Pipeline) -> None:
    """Removes models of rehearsals whose store is deleted from the registry (ArtifactError: MLflow failed)."""
    if named.tracking.mlflow:
        from lineage.mlflow.registry import unregister_gone

        unregister_gone(named.tracking.uri, named.name, (named.store / REHEARSALS).absolute())


def _require_recorded(plan: Plan) -> None:
    """Checks that MLflow has every run and model, which a run itself does not require."""
    if not plan.pipeline.tracking.mlflow:
        return
    from lineage.verify.mlflow import check_mlflow
    from lineage.verify.store import Checked, read_store

    everything, _ = read_store(plan.pipeline.store)
    lacking = [f"{node} has no run in MLflow" for node, (_, made) in everything.items() if made.mlflow_run_id is None]
    checked = Checked(all=everything, chosen=sorted(everything))
    found = check_mlflow(plan.pipeline.tracking.uri, plan.pipeline.store, checked, is_over=True)
    lacking += [f"{each.what}: {each.why}" for each in found]
    if lacking:
        raise ArtifactError(
            f"the rehearsal is not recorded as a run would be: {'; '.join(lacking[:3])}; fix MLflow, or turn the "
            "record off with tracking=none"
        )


# --- a shortened pipeline in a temporary store


@contextlib.contextmanager
def scratch(store: Path, *, keep: bool) -> Iterator[Path]:
    """A temporary store inside a store, on the same file system.

    Args:
        keep: keep it until the next such command, as is done after a failure, for its logs.
    """
    create_store(store)
    folder = store / REHEARSALS
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / uuid.uuid4().hex[:8]
    with FileLock(folder / "guard"):
        lock = Lock(place)
        assert lock.try_acquire()  # the name is unique
    kept = keep
    try:
        with lock.holding():
            yield place
    except PipelineError as error:
        kept = keep or not isinstance(error, ConfigError)  # raised before anything runs
        raise
    finally:
        if not kept:
            shutil.rmtree(place, ignore_errors=True)


def delete_others(place: Path) -> None:
    """Deletes other temporary stores that no process owns: kept, failed or killed ones."""
    with FileLock(place.parent / "guard"):
        for other in place.parent.iterdir():
            if other.is_dir() and other != place and not owner(other):
                shutil.rmtree(other, ignore_errors=True)


def scratch_plan(
    pipeline: Pipeline, store: Path, *, num_steps: int, save_steps: int, one_micro_batch: bool = False
) -> Plan:
    """A plan that runs every stage of a pipeline for a few steps in another store; aliases come from the real store.

    Args:
        one_micro_batch: one micro batch per worker and step, which needs the same memory and runs the same code.

    Raises:
        ConfigError: the pipeline is refused.
    """
    stages = {
        name: _short(stage, num_steps, save_steps, one_micro_batch=one_micro_batch)
        for name, stage in pipeline.stages.items()
    }
    plan = make_plan(
        replace(pipeline, stages=stages, code_drift="warn", restart=(), operation=Operation(), advice="off")
    )
    planned = [
        replace(each, state="run", reason="shortened", restart=False, rerun_drifted=False) for each in plan.stages
    ]
    return replace(plan, pipeline=replace(plan.pipeline, store=store), stages=planned)


def _short(stage: Stage, num_steps: int, save_steps: int, *, one_micro_batch: bool = False) -> Stage:
    """The stage with fewer steps and the same memory needs; a lost training is retried once.

    It waits for no verdict: that on models of a few steps says nothing.
    """
    stage = replace(stage, inputs=without_verdict(stage.inputs))
    method, resources = stage.method, stage.resources
    if not isinstance(method, Training):
        return stage
    micro = method.global_batch_size if resources.micro_batch_size == "auto" else resources.micro_batch_size
    rows, reads = resources.num_workers * micro, getattr(method, "reads", None)
    # A step of generated completions is divided into groups and minibatches, which need the full batch.
    if one_micro_batch and rows < method.global_batch_size and reads is not None and reads.trained:
        method = replace(method, global_batch_size=rows)
    best = method.best and replace(method.best, every_steps=min(method.best.every_steps or save_steps, save_steps))
    validation = method.validation and replace(
        method.validation, every_steps=min(method.validation.every_steps or save_steps, save_steps), every_epochs=None,
        patience=None,
    )  # fmt: skip
    # A stage in the command's own process cannot be killed separately.
    launcher = Launcher.AUTO if resources.launcher == Launcher.FOREGROUND else resources.launcher
    return replace(
        stage, method=replace(method, num_steps=num_steps, num_epochs=None, best=best, validation=validation),
        resources=replace(
            resources, launcher=launcher, save_steps=save_steps, save_epochs=None, save_minutes=None, max_failures=1,
            checkpoint_mirror=None,
        ),
    )  # fmt: skip
