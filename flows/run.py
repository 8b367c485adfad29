"""Runs a plan from the command line: starts a Prefect server if needed, runs the flow, prints the report."""

import contextlib
import json
import sys
import time
from collections.abc import Sequence

from flows.declared import show_declared
from flows.open_run import open_run, prepare_run
from flows.planning.plan import Plan, PlannedStage
from flows.planning.verdicts import may_ask, require_passed
from flows.prefect.server import embedded_server
from flows.progress.screen import Screen
from flows.promotion.retrain import follow_up, has_work
from flows.reports.run import plan_table, run_dict, summary
from flows.stages.execute import Result, execute
from flows.stages.run import Run
from flows.stops import stoppable
from lineage.errors import ConfigError, PipelineError, StoppedError
from tasks.context import Launcher


def run_plan(plan: Plan, words: Sequence[str], *, as_json: bool) -> int:
    """Executes stale stages and reports; progress goes to stderr, the result to stdout.

    Args:
        words: arguments of the command.

    Raises:
        PipelineError: a stage failed; after the report: a gate refused.
        KeyboardInterrupt: the run was stopped by Ctrl-C or SIGTERM; nothing is left running.
    """
    start = time.perf_counter()
    prepare_run(plan)
    seconds, execution_id, said = _run_stale(plan, words) if has_work(plan) else ({}, None, None)
    show_declared(plan, words)
    wall = time.perf_counter() - start
    result = run_dict(plan, seconds, wall, execution_id) | ({"outcome": said} if said else {})
    text = "\n\n".join([summary(plan, seconds, wall, words), *([said] if said else [])])
    print(json.dumps(result, indent=2) if as_json else text, flush=True)
    require_passed(plan)
    return 0


def run_one(plan: Plan, name: str, words: Sequence[str], *, command: str = "run") -> None:
    """Runs one stage, whose inputs are finished, without Prefect; progress goes to stderr.

    Args:
        words: arguments of the command, for the record.

    Raises:
        PipelineError: the stage failed.
        KeyboardInterrupt: it was stopped; nothing is left running.
    """
    planned = plan.stage(name)
    with contextlib.ExitStack() as stack:
        stack.enter_context(stoppable())
        screen = stack.enter_context(_screen([planned]))
        opened = open_run(plan, words, screen.on, [planned], in_flow=False, command=command)
        execute(stack.enter_context(opened), planned)


def _run_stale(plan: Plan, words: Sequence[str]) -> tuple[dict[str, float], str | None, str | None]:
    """Duration of each stage that ran, id of the execution in the tracker, and the text on promotion."""
    with stoppable(), contextlib.ExitStack() as beside:
        try:
            with _screen(plan.stale) as screen, open_run(plan, words, screen.on, plan.stale) as run:
                results = _run_flow(run, beside)
        except (ConfigError, StoppedError):  # nothing ran, or the user stopped it
            raise
        except PipelineError as error:
            follow_up(plan, words, error)
            raise
        said = follow_up(plan, words)
    return {name: result.seconds for name, result in results.items()}, run.tracker.execution_id(), said


def _run_flow(run: Run, beside: contextlib.ExitStack) -> dict[str, Result]:
    """Runs the flow; a Prefect server that it starts ends with ``beside``."""
    plan = run.plan
    with contextlib.suppress(OSError):  # stderr is closed
        print(plan_table(plan), file=sys.stderr, flush=True)
    log = plan.pipeline.store / "logs" / "prefect-server.log"
    server = beside.enter_context(embedded_server(log, ui=may_ask(plan)))
    from flows.prefect.flow import run_flow  # the import of prefect, beside the server's start

    if server:
        server.wait_until_ready()
    if plan.pipeline.operation.notify:
        from flows.promotion.notify import require_block

        require_block(plan.pipeline.operation.notify)
    return run_flow(run, server)


def _screen(stages: Sequence[PlannedStage]) -> Screen:
    foreground = any(planned.stage.resources.launcher == Launcher.FOREGROUND for planned in stages)
    return Screen(sys.stderr, [planned.name for planned in stages], plain=foreground)
