"""Every stage of a pipeline at two steps: the real save, resume, merge, evaluation and registration, in minutes."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flows.declare.pipeline import Pipeline
from flows.open_run import check_machine, note_before, open_run
from flows.planning.plan import Plan
from flows.progress.board import Board
from flows.rehearsal.one_stop import OneStop
from flows.rehearsal.row import Row, row_of
from flows.rehearsal.scratch import free_left, scratch, scratch_plan
from flows.stages.execute import execute
from flows.stops import stoppable
from flows.tracking import make_tracker
from lineage.errors import ArtifactError, ConfigError, PipelineError
from lineage.store import REHEARSALS

NUM_STEPS = 2
SUFFIX = "-rehearsal"  # of the pipeline's name in MLflow, so that nobody takes what it made for a model


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What became of a pipeline.

    Args:
        place: where its outputs are, or were.
        rows: of every stage, in order.
        error: of the stage that failed, or of the record.
    """

    place: Path
    rows: list[Row]
    error: PipelineError | None = None


def rehearse(pipeline: Pipeline, words: Sequence[str], *, keep: bool) -> Rehearsal:
    """Makes every stage in short, one after another, in a store that is gone afterwards.

    Args:
        words: the options and overrides of the command, for the record.
        keep: the store stays until the next rehearsal, and its models stay registered.

    Raises:
        ConfigError: the pipeline cannot work.
        KeyboardInterrupt: it was stopped.
    """
    named = replace(
        pipeline, name=pipeline.name + SUFFIX, tracking=replace(pipeline.tracking, dvc=False)
    )  # fmt: skip
    plan: Plan | None = None
    rows: list[Row] = []
    try:
        with scratch(pipeline.store, keep=keep) as place:
            plan = scratch_plan(named, place, num_steps=NUM_STEPS, save_steps=1)
            _make_way(named, plan, place)
            _run(pipeline, plan, words, rows)
            _require_recorded(plan)
        _unregister(named)
    except PipelineError as error:
        if plan is None or isinstance(error, ConfigError):
            raise
        left = [Row(stage=planned.name, verdict="not reached") for planned in plan.stages[len(rows) :]]
        failed = [replace(each, verdict="FAILED") for each in left[:1]]
        return Rehearsal(place=place, rows=[*rows, *failed, *left[1:]], error=error)
    return Rehearsal(place=place, rows=rows)


def _make_way(named: Pipeline, plan: Plan, place: Path) -> None:
    """Frees what rehearsals before have left, also in the registry: of the same bytes no second version is made.

    Raises:
        ConfigError: the rehearsal cannot work, and nothing was touched.
    """
    check_machine(plan.stages)
    make_tracker(named.tracking)  # MLflow answers
    free_left(place)
    _unregister(named)


def _run(pipeline: Pipeline, plan: Plan, words: Sequence[str], rows: list[Row]) -> None:
    """Adds a row for each stage when it is made."""
    note_before(plan)
    names = [planned.name for planned in plan.stages]
    with stoppable(), Board(sys.stderr, names) as board:
        stop = OneStop(board, names)
        with open_run(plan, words, stop, plan.stages, in_flow=False, command="rehearse") as run:
            for planned in plan.stages:
                seconds = execute(run, planned).seconds
                real = pipeline.stages[planned.name].method
                num_steps = run.checks.num_steps(planned, real)
                size = stop.saved.get(planned.name)
                rows.append(row_of(plan, planned, seconds=seconds, num_steps=num_steps, checkpoint_bytes=size))


def _unregister(named: Pipeline) -> None:
    """Takes out of the registry the models of rehearsals whose place is gone.

    Raises:
        ArtifactError: MLflow refuses.
    """
    if named.tracking.mlflow:
        from lineage.mlflow.registry import unregister_gone

        unregister_gone(named.tracking.uri, named.name, (named.store / REHEARSALS).absolute())


def _require_recorded(plan: Plan) -> None:
    """That MLflow has every run and model, since a run goes on without it.

    Raises:
        ArtifactError: it lacks one.
    """
    if not plan.pipeline.tracking.mlflow:
        return
    from lineage.verify.mlflow import check_mlflow
    from lineage.verify.store import Checked, read_store

    everything, _ = read_store(plan.pipeline.store)
    unrecorded = [node for node, (_, manifest) in everything.items() if manifest.mlflow_run_id is None]
    checked = Checked(all=everything, chosen=sorted(everything))
    findings = check_mlflow(plan.pipeline.tracking.uri, plan.pipeline.store, checked)
    lacking = [f"{node} has no run in MLflow" for node in unrecorded]
    lacking += [f"{each.what}: {each.why}" for each in findings]
    if lacking:
        raise ArtifactError(
            f"the rehearsal is not recorded as a run would be: {'; '.join(lacking[:3])}; mend MLflow, or turn the "
            "record off with tracking=none"
        )
