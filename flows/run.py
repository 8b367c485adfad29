"""Runs a plan: warm-up of processes and server side by side, the flow, then the report."""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from types import FrameType

from flows.admission import require_gpus
from flows.board import Board
from flows.execute import Run, needs
from flows.launch import StageProcesses
from flows.plan import Plan
from flows.prefect_server import embedded_server
from flows.report import plan_table, run_dict, summary
from flows.tracking import make_tracker
from lineage.errors import ConfigError
from lineage.tracker import Execution, NoTracker, Tracker
from tasks.context import Launcher


def run_plan(plan: Plan, words: Sequence[str], *, as_json: bool) -> int:
    """Executes what is stale and reports; the progress goes to stderr, the result to stdout.

    Args:
        words: the options and overrides of the command, to build on in what is proposed next.

    Raises:
        PipelineError: a stage failed.
        KeyboardInterrupt: the run was stopped, by Ctrl-C or SIGTERM; nothing is left running.
    """
    start = time.perf_counter()
    seconds: dict[str, float] = {}
    tracker = make_tracker(plan.pipeline.tracking) if plan.stale else NoTracker()
    if plan.stale:
        _check_machine(plan)
        with contextlib.suppress(OSError):  # nobody reads stderr: that is no reason not to train
            print(plan_table(plan), file=sys.stderr, flush=True)
        with _stoppable(), tracker.execution(_execution(plan, words)):
            seconds = _run_stale(plan, tracker)
    wall = time.perf_counter() - start
    result = run_dict(plan, seconds, wall, tracker.execution_id())
    print(json.dumps(result, indent=2) if as_json else summary(plan, seconds, wall, words))
    return 0


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


def _run_stale(plan: Plan, tracker: Tracker) -> dict[str, float]:
    processes = StageProcesses()
    foreground = any(planned.stage.resources.launcher == Launcher.FOREGROUND for planned in plan.stale)
    names = [planned.name for planned in plan.stale]
    if not foreground:
        processes.warm_up()
    try:
        with (
            embedded_server(plan.pipeline.store / "logs" / "prefect-server.log") as server,
            Board(sys.stderr, names, plain=foreground) as board,
        ):
            from flows.prefect_flow import run_flow  # the import of prefect, beside the server's start

            if server:
                server.wait_until_ready()
            results = run_flow(Run(plan=plan, processes=processes, board=board, tracker=tracker))
    finally:
        processes.stop()
    return {name: result.seconds for name, result in results.items()}


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
