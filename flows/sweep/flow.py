"""The Prefect flow of a sweep: one flow run, a task run per stage. The engine decides what runs when."""

from collections.abc import Callable

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.states import State

from flows.prefect.flow import failed_state, in_flow
from flows.prefect.server import EmbeddedServer
from flows.stages.run import Run
from flows.sweep.engine import Engine


def run_sweep_flow(
    run: Run, engine: Engine, name: str, verdict: Callable[[], str | None], server: EmbeddedServer | None
) -> None:
    """Runs a sweep to its end.

    Args:
        verdict: asked at the end: what failed; None: nothing.
        server: that was started for this run alone; None: it is the user's.
    """

    finished: set[str] = set()

    # The stage goes in by title: a result of a task is nothing that Prefect should store or copy.
    @task(cache_policy=NO_CACHE, persist_result=False, task_run_name="{title}")
    def run_stage(title: str) -> None:
        engine.work(title)
        finished.add(title)

    def submit(title: str) -> None:
        run_stage.submit(title).add_done_callback(lambda _: engine.ended(title))

    def drive() -> State[None] | None:
        try:
            engine.drive(submit)
        except BaseException:
            run.processes.stop()  # a stop is passed on to the stages, and they are waited for
            raise
        return failed_state(verdict())

    in_flow(run, drive, finished, server, name=f"{run.plan.pipeline.name}-sweep", flow_run_name=name)
