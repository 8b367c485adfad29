"""Runs a plan: warm-up of processes and server side by side, the flow, then the report."""

import json
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType

from flows.admission import require_gpus
from flows.board import Board
from flows.execute import needs
from flows.launch import StageProcesses
from flows.plan import Plan
from flows.prefect_server import embedded_server
from flows.report import plan_table, run_dict, summary
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
    for planned in plan.stale:
        require_gpus(planned.name, needs(planned)[1])
    if plan.stale:
        print(plan_table(plan), file=sys.stderr)
        signal.signal(signal.SIGTERM, _stop)
        seconds = _run_stale(plan)
    wall = time.perf_counter() - start
    print(json.dumps(run_dict(plan, seconds, wall), indent=2) if as_json else summary(plan, seconds, wall, words))
    return 0


def _run_stale(plan: Plan) -> dict[str, float]:
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
            results = run_flow(plan, processes, board)
    finally:
        processes.stop()
    return {name: result.seconds for name, result in results.items()}


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
