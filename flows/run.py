"""A run of a plan: from the command line to the report, and the context that every other run shares.

The context opens and closes the run's record, starts and ends its processes.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from flows.planning.estimates import require_plan_disk
from flows.planning.model_checks import awaited_weights
from flows.planning.plan import Plan, PlannedStage
from flows.planning.reads import claim
from flows.planning.verdicts import may_ask, require_passed
from flows.prefect.open_runs import settle_left
from flows.prefect.server import embedded_server
from flows.progress.declared import show_declared
from flows.progress.recorder import RunRecorder
from flows.progress.run_record import RUN_VARIABLE, SweepRecord
from flows.progress.screen import Screen
from flows.progress.tracking import complete_record, make_tracker
from flows.promotion.retrain import follow_up, has_work
from flows.reports.run import plan_table, run_dict, summary
from flows.reports.wording import coloured
from flows.stages.execute import Result, execute, mirror_of
from flows.stages.launch import StageProcesses, modules_of, shares_imports
from flows.stages.resources import Cluster, ask_cluster, require_beside, require_cluster, require_gpus, require_pools
from flows.stages.run import Run
from flows.stages.stops import seconds_left, stoppable
from lineage.artifact import MODELS, SOURCE
from lineage.dvc import VIEWS
from lineage.errors import ConfigError, PipelineError, StoppedError
from lineage.filesystem.files import atomic_write
from lineage.graph.places import node_key
from lineage.record.labels import Statement, record_labels
from lineage.record.tracker import Event, Execution, Listener, Tracker
from tasks.context import Launcher
from tasks.train.evaluation import asked_beside

if TYPE_CHECKING:
    from prefect.states import State

_HEAD = 2000  # characters of a page, up to its title


def run_plan(
    plan: Plan, cli_args: Sequence[str], *, as_json: bool, expected: Mapping[str, float | None] | None = None
) -> int:
    """Executes stale stages and reports; progress goes to stderr, the result to stdout.

    Args:
        cli_args: arguments of the command.
        expected: stage -> its estimated seconds, for the time of the whole run.

    Raises:
        PipelineError: a stage failed; after the report: a gate refused.
        KeyboardInterrupt: the run was stopped by Ctrl-C or SIGTERM; nothing is left running.
    """
    start = time.perf_counter()
    prepare_run(plan)
    seconds, execution_id, outcome = _run_stale(plan, cli_args, expected) if has_work(plan) else ({}, None, None)
    show_declared(plan, cli_args)
    if not (seconds or _page(plan)):  # all is reused, and the page is of another run's model
        write_page(plan, partial(print, file=sys.stderr))
    wall = time.perf_counter() - start
    page = _page(plan)
    result = run_dict(plan, seconds, wall, execution_id) | ({"outcome": outcome} if outcome else {})
    result |= {"page": str(page)} if page else {}
    text = "\n\n".join([summary(plan, seconds, wall, cli_args, page), *([outcome] if outcome else [])])
    print(json.dumps(result, indent=2) if as_json else coloured(text, sys.stdout), flush=True)
    require_passed(plan)
    return 0


def run_one(plan: Plan, name: str, cli_args: Sequence[str], *, command: str = "run") -> None:
    """Runs one stage, whose inputs are finished, without Prefect; progress goes to stderr.

    Args:
        cli_args: arguments of the command, for the record.

    Raises:
        PipelineError: the stage failed.
        KeyboardInterrupt: it was stopped; nothing is left running.
    """
    planned = plan.stage(name)
    with contextlib.ExitStack() as stack:
        stack.enter_context(stoppable())
        screen = stack.enter_context(_screen([planned]))
        opened = open_run(plan, cli_args, screen.on, [planned], in_flow=False, command=command)
        execute(stack.enter_context(opened), planned)


def _run_stale(
    plan: Plan, cli_args: Sequence[str], expected: Mapping[str, float | None] | None
) -> tuple[dict[str, float], str | None, str | None]:
    """Duration of each stage that ran, id of the execution in the tracker, and the text on promotion."""
    with stoppable(), contextlib.ExitStack() as beside:
        try:
            with _screen(plan.stale, expected) as screen, open_run(plan, cli_args, screen.on, plan.stale) as run:
                results = _run_flow(run, beside)
        except (ConfigError, StoppedError):  # nothing ran, or the user stopped it
            raise
        except PipelineError as error:
            follow_up(plan, cli_args, error)
            raise
        outcome = follow_up(plan, cli_args)
    return {name: result.seconds for name, result in results.items()}, run.tracker.execution_id(), outcome


def _run_flow(run: Run, beside: contextlib.ExitStack) -> dict[str, Result]:
    """Runs a plan's stale stages as one Prefect flow run named after the pipeline, a task run per stage.

    A Prefect server that it starts ends with ``beside``.
    """
    plan = run.plan
    with contextlib.suppress(OSError):  # stderr is closed
        print(coloured(plan_table(plan), sys.stderr), file=sys.stderr, flush=True)
    log = plan.pipeline.store / "logs" / "prefect-server.log"
    server = beside.enter_context(embedded_server(log, ui=may_ask(plan)))
    from flows.prefect.flow import in_flow, verdict_state  # the import of prefect, beside the server's start

    if server:
        server.wait_until_ready()
    if plan.pipeline.operation.notify:
        from flows.promotion.notify import require_block

        require_block(plan.pipeline.operation.notify)
    results: dict[str, Result] = {}

    def body() -> "State[None] | None":
        run_stages(run, results)
        return verdict_state(run)

    assert run.recorder
    in_flow(run.recorder, plan.pipeline.store, body, server, name=plan.pipeline.name)
    return results


def run_stages(run: Run, results: dict[str, Result]) -> None:
    """Inside a flow run: a task run per stale stage.

    Args:
        results: filled as stages finish.

    Raises:
        PipelineError: the first stage that failed, after the branches that do not need it have finished.
    """
    from prefect import task
    from prefect.cache_policies import NO_CACHE
    from prefect.futures import PrefectFuture, wait

    plan = run.plan
    drawn = [planned.pool for planned in plan.stale if planned.pool]
    require_pools({pool: max(slots for other, slots in drawn if other == pool) for pool, _ in drawn})

    # The stage goes in by name: a result of a task is nothing that Prefect should store or copy.
    @task(cache_policy=NO_CACHE, persist_result=False, task_run_name="{stage}")
    def run_stage(stage: str) -> None:
        results[stage] = execute(run, plan.stage(stage))

    runs: dict[str, PrefectFuture[None] | State[None]] = {}
    try:
        for planned in plan.stale:
            before = plan.waits(planned)
            waits = [run for other, run in runs.items() if other in before]
            if planned.stage.resources.launcher == Launcher.FOREGROUND:
                # In this thread, where a debugger and Ctrl-C reach it.
                runs[planned.name] = run_stage(planned.name, wait_for=waits, return_state=True)
            else:
                runs[planned.name] = run_stage.submit(planned.name, wait_for=waits)
        futures = [future for future in runs.values() if isinstance(future, PrefectFuture)]
        wait(futures)  # independent branches finish first
    except BaseException:
        run.processes.stop()  # forwards the stop to the stages, and waits for them
        raise
    states = [run.state if isinstance(run, PrefectFuture) else run for run in runs.values()]
    # A stage that never began, because one before it failed, has no error of its own.
    errors = [state.result(raise_on_failure=False) for state in states if state.is_failed() or state.is_crashed()]
    for error in sorted(errors, key=lambda error: not isinstance(error, PipelineError)):
        raise error
    write_page(plan, run.announce)
    if page := _page(plan):
        run.tracker.keep([page])


def write_page(plan: Plan, announce: Callable[[str], None]) -> None:
    """Writes the page of the pipeline's model beside its view; a failure is only announced."""
    model, place = _shown_model(plan), _page_path(plan)
    if model is None:
        return
    try:
        from flows.reports.model import model_page, model_report
        from lineage.graph.index import Index

        with Index(plan.pipeline.store) as index:
            text = model_page([model_report(model, index)])
        place.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(place, text)
    except Exception as error:  # of any reader of the record: the models are there all the same
        announce(f"the page of {model} is not written ({type(error).__name__}: {error}); the run is as good without it")


def _page(plan: Plan) -> Path | None:
    """The page of the pipeline's model; None: there is none, or it is of another model."""
    model, place = _shown_model(plan), _page_path(plan)
    with contextlib.suppress(OSError, UnicodeDecodeError), place.open(encoding="ascii") as file:
        return place if f"<title>{model}</title>" in file.read(_HEAD) else None
    return None


def _page_path(plan: Plan) -> Path:
    return plan.pipeline.store / VIEWS / plan.pipeline.name / "report.html"


def _shown_model(plan: Plan) -> str | None:
    """The candidate of a gate, or else the model that is trained last; None: the pipeline has no model."""
    judged = {each.inputs["candidate"].name for each in plan.stages if "candidate" in each.inputs}
    models = [each for each in plan.stages if each.stage.method.produces in MODELS]
    trained = [each for each in models if each.stage.method.trains]
    chosen = [each for each in models if each.name in judged] or trained or models
    return node_key(chosen[-1].name, chosen[-1].fingerprint) if chosen else None


def _screen(stages: Sequence[PlannedStage], expected: Mapping[str, float | None] | None = None) -> Screen:
    foreground = any(planned.stage.resources.launcher == Launcher.FOREGROUND for planned in stages)
    return Screen(sys.stderr, [planned.name for planned in stages], plain=foreground, expected=expected)


@dataclass(frozen=True, kw_only=True)
class Trials:
    """The trials of a sweep that a run executes.

    Args:
        folder: of the sweep.
        own: names of the stages that may differ between trials.
        count: number of trials; None: not known in advance.
    """

    folder: Path
    own: frozenset[str]
    count: int | None = None


def prepare_run(plan: Plan) -> None:
    """Updates the record before anything runs: closes killed runs, records labels, protects reused outputs from gc.

    Raises:
        ArtifactError: an output that the plan reuses was deleted since.
    """
    complete_record(plan.pipeline)
    settle_left(plan.pipeline.store)
    record_labels(plan.pipeline.store, _label_statements(plan))
    claim([plan])


@contextlib.contextmanager
def open_run(
    plan: Plan, cli_args: Sequence[str], listener: Listener, stages: Sequence[PlannedStage],
    trials: Trials | None = None, *, recorder: RunRecorder | None = None, in_flow: bool = True, command: str = "run",
) -> Iterator[Run]:  # fmt: skip
    """Opens a run of some stages of a plan; at the end of the context its processes end and its record is closed.

    Args:
        cli_args: arguments of the command, for the record.
        listener: displays the run.
        trials: of a sweep; the plan is then that of one trial, and the stages are those of all.
        recorder: an open one; None: the record of the run starts here.
        in_flow: whether the stages run in a Prefect flow.
        command: name of the ``posttrain`` command.

    Raises:
        ArtifactError: an output that the plan reuses was deleted since.
        ConfigError: a model has no weights yet, this machine or the store lacks required resources, a mirror of
            checkpoints cannot be written, or MLflow does not answer.
    """
    check_machine(stages)
    if awaited := awaited_weights(plan.pipeline, [each.name for each in stages]):
        raise ConfigError("\n".join(awaited))
    mirrors = [(each.stage.resources.checkpoint_mirror, mirror_of(each, plan.entry(each))) for each in stages]
    for mirror in {url: mirror for url, mirror in mirrors if mirror}.values():
        mirror.require_writable()
    require_plan_disk(plan, plan.stale if trials else stages)  # for a sweep, at least one trial must fit
    tracker = make_tracker(plan.pipeline.tracking, seconds_left) if stages or trials else Tracker()
    processes = StageProcesses()
    foreground = any(planned.stage.resources.launcher == Launcher.FOREGROUND for planned in stages)
    sweep = None
    if trials:
        own = [planned.name for planned in plan.stages if planned.name in trials.own]
        sweep = SweepRecord(folder=str(trials.folder), own=own, trials=trials.count)
    with contextlib.ExitStack() as stack:
        if recorder is None:
            recorder = RunRecorder(plan.home, plan.pipeline.name, cli_args, in_flow=in_flow, command=command)
            stack.enter_context(recorder.open())
        listeners = [listener, recorder.on, tracker.on]
        stack.enter_context(recorder.running(plan, tracker, stages, sweep))
        os.environ[RUN_VARIABLE] = recorder.record.id  # by which what a killed run has left is found
        stack.enter_context(tracker.execution(_execution(plan, cli_args, trials)))
        modules = [] if foreground else _shared_modules(stages)
        if modules:
            processes.warm_up(modules)

        def emit(event: Event) -> None:
            for each in listeners:
                each(event)

        try:
            yield Run(plan=plan, processes=processes, emit=emit, tracker=tracker, recorder=recorder)
        except BaseException as error:
            if not isinstance(error, Exception):
                processes.stop()
            raise
        finally:
            processes.end_all()


def _label_statements(plan: Plan) -> list[Statement]:
    """Statements of the labels of a plan's sources, needed if all is reused and no new manifest records them."""
    planned_inputs = {each.name: each for planned in plan.stages for each in planned.inputs.values()}
    return [
        Statement(fingerprint=each.fingerprint, source=each.name.removeprefix(SOURCE), labels=list(each.source.labels))
        for each in planned_inputs.values()
        if each.source and each.source.labels
    ]


def _execution(plan: Plan, cli_args: Sequence[str], trials: Trials | None) -> Execution:
    own = trials.own if trials else ()
    manifests = {each.name: plan.entry(each).manifest() for each in plan.stages if each.state == "reuse"}
    reused = {name: manifest for name, manifest in manifests.items() if manifest and name not in own}
    return Execution(
        pipeline=plan.pipeline.name, store=plan.pipeline.store, cli_args=list(cli_args), reused=reused,
        folder=trials.folder if trials else None,
    )  # fmt: skip


def check_machine(stages: Sequence[PlannedStage]) -> Cluster | None:
    """Refuses stages that need GPUs or nodes which this machine, or the cluster at RAY_ADDRESS, lacks.

    Returns:
        That cluster, where a stage runs on it.
    """
    for planned in stages:
        resources = planned.resources
        beside = asked_beside(planned.stage.method)
        require_gpus(planned.name, planned.needs[1], resources.gpu, beside[1])
        if resources.num_nodes > 1 and not os.environ.get("RAY_ADDRESS"):
            raise ConfigError(
                f"stages.{planned.name}.resources.num_nodes={resources.num_nodes}: a cluster started here has one "
                "node; set RAY_ADDRESS to the address of your Ray cluster, or num_nodes=1"
            )
    remote = [planned for planned in stages if planned.runs_elsewhere]
    cluster = ask_cluster() if remote else None
    for planned in remote:
        assert cluster
        batch, islands = (getattr(planned.stage.method, each, None) for each in ("global_batch_size", "num_islands"))
        require_cluster(planned.name, planned.resources, batch, cluster, islands or 1)
        require_beside(planned.name, planned.resources, asked_beside(planned.stage.method), cluster)
    return cluster


def _shared_modules(stages: Sequence[PlannedStage]) -> list[str]:
    """The modules that the stages' processes import: each once, in order."""
    shared = [
        each.stage for each in stages
        if shares_imports(each.stage.method, each.stage.resources, is_first=not each.upstream)
    ]  # fmt: skip
    return modules_of([type(stage.method) for stage in shared])
