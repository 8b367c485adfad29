"""Runs a plan: warm-up of processes and server side by side, the flow, then the report."""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import FrameType

from flows.admission import require_gpus
from flows.board import Board
from flows.declared import show_declared
from flows.execute import Run, execute, needs
from flows.launch import StageProcesses
from flows.plan import Plan, PlannedStage
from flows.prefect_server import embedded_server
from flows.reports.run import plan_table, run_dict, summary
from flows.tracking import complete_record, make_tracker
from flows.verdicts import may_ask, require_passed
from lineage.artifact import SOURCE
from lineage.errors import ConfigError
from lineage.stated_labels import Statement, record_labels
from lineage.tracker import Execution, NoTracker, Tracker
from tasks.context import Launcher


def run_plan(plan: Plan, words: Sequence[str], *, as_json: bool) -> int:
    """Executes what is stale and reports; the progress goes to stderr, the result to stdout.

    Args:
        words: the options and overrides of the command, to build on in what is proposed next.

    Raises:
        PipelineError: a stage failed; at the very end, a gate refused.
        KeyboardInterrupt: the run was stopped, by Ctrl-C or SIGTERM; nothing is left running.
    """
    start = time.perf_counter()
    complete_record(plan.pipeline)
    record_labels(plan.pipeline.store, _stated(plan))
    seconds: dict[str, float] = {}
    tracker = make_tracker(plan.pipeline.tracking) if plan.stale else NoTracker()
    asks = may_ask(plan)
    if plan.stale or asks:
        _check_machine(plan)
        with contextlib.suppress(OSError):  # nobody reads stderr: that is no reason not to train
            print(plan_table(plan), file=sys.stderr, flush=True)
        with _stoppable(), tracker.execution(_execution(plan, words)):
            seconds = _run_stale(plan, tracker, asks)
    show_declared(plan, words)
    wall = time.perf_counter() - start
    result = run_dict(plan, seconds, wall, tracker.execution_id())
    print(json.dumps(result, indent=2) if as_json else summary(plan, seconds, wall, words), flush=True)
    require_passed(plan)
    return 0


def run_one(plan: Plan, name: str, words: Sequence[str]) -> None:
    """Makes one stage, whose inputs are finished, without Prefect; the progress goes to stderr.

    Raises:
        PipelineError: the stage failed.
        KeyboardInterrupt: it was stopped; nothing is left running.
    """
    planned = plan.stage(name)
    foreground = planned.stage.resources.launcher == Launcher.FOREGROUND
    tracker = make_tracker(plan.pipeline.tracking)
    _check_machine(replace(plan, stages=[planned]))
    processes = StageProcesses()
    with _stoppable(), tracker.execution(_execution(plan, words)):
        if not foreground and _needs_torch(planned):
            processes.warm_up()
        try:
            with Board(sys.stderr, [name], plain=foreground) as board:
                execute(Run(plan=plan, processes=processes, board=board, tracker=tracker), planned)
        finally:
            processes.stop()


def _stated(plan: Plan) -> list[Statement]:
    """The labels of its sources: also where all is reused, and no manifest will tell of them."""
    given = {each.name: each for planned in plan.stages for each in planned.inputs.values()}
    return [
        Statement(fingerprint=each.fingerprint, source=each.name.removeprefix(SOURCE), labels=list(each.source.labels))
        for each in given.values()
        if each.source and each.source.labels
    ]


def _execution(plan: Plan, words: Sequence[str]) -> Execution:
    manifests = {each.name: plan.entry(each).manifest() for each in plan.stages if each.state == "reuse"}
    reused = {name: manifest for name, manifest in manifests.items() if manifest}
    return Execution(pipeline=plan.pipeline.name, store=plan.pipeline.store, words=list(words), reused=reused)


def _check_machine(plan: Plan) -> None:
    """What a plan may ask for and this machine has not."""
    for planned in plan.stale:
        require_gpus(planned.name, needs(planned)[1])
        nodes = planned.stage.resources.num_nodes
        if planned.stage.method.trains and nodes > 1 and not os.environ.get("RAY_ADDRESS"):
            raise ConfigError(
                f"stages.{planned.name}.resources.num_nodes={nodes}: a cluster started here has one node; "
                "set RAY_ADDRESS to the address of your Ray cluster, or num_nodes=1"
            )


def _run_stale(plan: Plan, tracker: Tracker, asks: bool) -> dict[str, float]:
    processes = StageProcesses()
    foreground = any(planned.stage.resources.launcher == Launcher.FOREGROUND for planned in plan.stale)
    names = [planned.name for planned in plan.stale]
    if not foreground and any(_needs_torch(planned) for planned in plan.stale):
        processes.warm_up()
    try:
        with (
            embedded_server(plan.pipeline.store / "logs" / "prefect-server.log", ui=asks) as server,
            Board(sys.stderr, names, plain=foreground) as board,
        ):
            from flows.prefect_flow import run_flow  # the import of prefect, beside the server's start

            if server:
                server.wait_until_ready()
            results = run_flow(Run(plan=plan, processes=processes, board=board, tracker=tracker))
    finally:
        processes.stop()
    return {name: result.seconds for name, result in results.items()}


def _needs_torch(planned: PlannedStage) -> bool:
    method = planned.stage.method
    return method.imports_torch and (method.trains or bool(planned.upstream))


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Makes the first Ctrl-C or SIGTERM one ``KeyboardInterrupt``, whatever the libraries make of it on its way up."""
    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)  # the stop is under way; a second one would only break it
        raise KeyboardInterrupt

    handlers = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except BaseException as error:
        if stopped:
            raise KeyboardInterrupt from error
        raise
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
