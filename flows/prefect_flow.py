"""The Prefect flow: order and waiting only. The plan decides, `execute` does."""

from collections.abc import Callable, Collection, Sequence

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectFuture, wait
from prefect.states import Cancelled, Failed, State
from prefect.task_runners import ThreadPoolTaskRunner

from flows.planning.needs import pool_of
from flows.planning.plan import PlannedStage
from flows.planning.verdicts import judgements, record_decision, require_passed
from flows.prefect_ends import Ending
from flows.prefect_server import EmbeddedServer
from flows.prefect_told import tell_left
from flows.promotion.prefect_approval import ask
from flows.stages.execute import Result, execute
from flows.stages.gpu_pool import require_pools
from flows.stages.run import Run
from lineage.errors import GateError, PipelineError
from tasks.context import Launcher


def run_flow(run: Run, server: EmbeddedServer | None) -> dict[str, Result]:
    """Runs a plan's stale stages as one Prefect flow run named after the pipeline, a task run per stage.

    Args:
        server: that was started for this run alone; None: it is the user's.

    Raises:
        PipelineError: the first stage that failed, after the branches that do not need it have finished.
    """
    results: dict[str, Result] = {}

    def run_all() -> State[None] | None:
        run_stages(run, results)
        return verdict_state(run)

    in_flow(run, run_all, results.keys(), server, name=run.plan.pipeline.name)
    return results


def in_flow(
    run: Run, body: Callable[[], State[None] | None], finished: Collection[str], server: EmbeddedServer | None, *,
    name: str, flow_run_name: str | None = None,
) -> None:  # fmt: skip
    """Runs the body of a command as one Prefect flow run.

    Args:
        body: returns the state that the flow run ends in; None: completed.
        finished: names of the task runs whose stages are committed, as they come to be.
        server: that was started for this run alone; None: it is the user's.
    """
    ending = Ending(run.plan.pipeline.store, server, finished)

    @flow(name=name, flow_run_name=flow_run_name, persist_result=False, task_runner=task_runner())
    def pipeline_flow() -> State[None] | None:
        return ending.follow(body)

    if server:  # on a database that has the runs of all such servers
        tell_left(run.plan.pipeline.store, None)
    with ending.told():
        pipeline_flow()


def as_task(title: str, work: Callable[[], None]) -> None:
    """Runs work in the calling thread, inside a flow run, as a task run of this name."""

    def run_stage() -> None:
        work()

    task(run_stage, name="run_stage", task_run_name=title, cache_policy=NO_CACHE, persist_result=False)()


def failed_state(failure: str | None) -> State[None] | None:
    """How a flow run ends; None: completed."""
    return Failed(message=failure) if failure else None


def task_runner() -> ThreadPoolTaskRunner:
    """Threads that wait: what may run at once is admitted by CPUs and GPUs."""
    return ThreadPoolTaskRunner(max_workers=64)


def run_stages(run: Run, results: dict[str, Result]) -> None:
    """Inside a flow run: a task run per stale stage.

    Args:
        results: filled as stages finish.

    Raises:
        PipelineError: the first stage that failed, after the branches that do not need it have finished.
    """
    plan = run.plan
    require_pools(_pools(plan.stale))

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
        run.processes.stop()  # a stop is passed on to the stages, and they are waited for
        raise
    _raise_first_failure(runs)


def approved(run: Run) -> bool:
    """Asks for every approval that is missing, until one is denied."""
    for judged in judgements(run.plan):
        if judged.awaits_approval:
            approved, who, why = ask(judged, run.observer)
            record_decision(run.plan.pipeline.store, judged, approved=approved, who=who, why=why)
            if not approved:
                return False
    return True


def verdict_state(run: Run) -> State[None] | None:
    """How a flow run ends that a gate or a person refused; None: they did not."""
    if not approved(run):
        return Cancelled(message="rejected")
    try:
        require_passed(run.plan)
    except GateError as refusal:
        return Failed(name="Refused", message=str(refusal))
    return None


def _pools(stages: Sequence[PlannedStage]) -> dict[str, int]:
    drawn = [each for each in map(pool_of, stages) if each]
    return {pool: max(slots for other, slots in drawn if other == pool) for pool, _ in drawn}


def _raise_first_failure(runs: dict[str, PrefectFuture[None] | State[None]]) -> None:
    states = [run.state if isinstance(run, PrefectFuture) else run for run in runs.values()]
    # A stage that never began, for want of one that failed, has nothing to tell.
    errors = [state.result(raise_on_failure=False) for state in states if state.is_failed() or state.is_crashed()]
    for error in sorted(errors, key=lambda error: not isinstance(error, PipelineError)):
        raise error
